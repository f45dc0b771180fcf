"""A clinic and its patients as the learner handles them: look, ask, diagnose, treat, and what it has cost (private)."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ._cases import Case, Cause, Evidence, Finding, Symptom, Table, Verdict


def _known(what: str, name: Any, allowed: Mapping[str, Any]) -> str:
    if not isinstance(name, str) or name not in allowed:
        raise ValueError(f"{what} is {name!r}; allowed are {', '.join(map(repr, allowed))}")
    return name


class Patient:
    """A program that does not work: what the user says, and what can be asked, found and tried."""

    def __init__(self, number: int, case: Case, clinic: Clinic):
        self.number, self.complaint = number, case.complaint
        self.minutes = 0  # price of the evidence asked for so far
        self._case, self._clinic = case, clinic
        self._symptom: Symptom | None = None
        self._found: dict[str, Finding] = {}
        self._diagnoses: list[bool] = []
        self._treatments: list[bool] = []

    @property
    def diagnosed(self) -> bool:
        """Whether the cause has been named."""
        return any(self._diagnoses)

    @property
    def healed(self) -> bool:
        """Whether a treatment has worked."""
        return any(self._treatments)

    def symptom(self) -> Symptom:
        """Run the program as it is: what each rank says. A second call shows the same run."""
        if self._symptom is None:
            self._symptom = self._look()
        return self._symptom

    def _look(self) -> Symptom:
        possible, sentence = self._clinic.available()
        if possible:
            return self._clinic.run(self._case, None)
        return Symptom(self._case.recorded, recorded=f"Recorded, not run here: {sentence}.")

    def ask(self, evidence: str) -> Finding:
        """A piece of evidence, obtained now; it costs its price once. Raises ValueError with the allowed names."""
        wanted = self._clinic.evidence[_known("evidence", evidence, self._clinic.evidence)]
        if evidence not in self._found:
            possible, sentence = self._clinic.available()
            found = wanted.look(self._case, self.symptom) if possible else Finding(self._recorded(wanted, sentence))
            self._found[evidence] = found
            self.minutes += wanted.minutes
        return self._found[evidence]

    def _recorded(self, wanted: Evidence, sentence: str) -> str:
        facts = [f"- {text}: {self._case.facts.get(fact, 'nothing')}" for fact, text in wanted.facts.items()]
        return "\n".join([f"Recorded, not run here: {sentence}.", *(facts or ["This evidence was not recorded."])])

    def diagnose(self, cause: str, **details: Any) -> Verdict:
        """Name the cause. A wrong one is answered with what speaks against it; a misspelt one raises ValueError.

        Where the clinic has ``details``, such as the rank, each of them has to be named too.
        """
        named = self._clinic.causes[_known("cause", cause, self._clinic.causes)]
        case = self._case
        if set(details) != set(case.details):
            wanted = ", ".join(case.details) or "nothing"
            raise ValueError(f"beside the cause, {', '.join(details) or 'nothing'} is named; allowed are {wanted}")
        wrong = next((name for name, value in details.items() if value not in case.details[name].accepted), None)
        self._diagnoses.append(cause == case.cause and wrong is None)
        if self._diagnoses[-1]:
            return Verdict(True, f"Right: {case.why}\nRule: {case.rule}\nReported: {case.report} {case.thread}")
        if wrong is not None:
            return Verdict(False, f"Not {wrong} {details[wrong]!r}. {self._against(case.details[wrong].fact)}")
        return Verdict(False, f"Not {cause!r}. {self._contradiction(cause, named)}")

    def _against(self, fact: str) -> str:
        """The evidence that shows a fact: what it has shown, if the learner has it."""
        name, text = next((name, one.facts[fact]) for name, one in self._clinic.evidence.items() if fact in one.facts)
        if name not in self._found:
            return f"The evidence {name!r} speaks against it: it shows {text}. Ask for it, and compare."
        return f"Your evidence {name!r} speaks against it: {text}: {self._case.facts[fact]}."

    def _contradiction(self, name: str, cause: Cause) -> str:
        """What speaks against a cause: evidence that the learner has, else which evidence would."""
        against = [
            (evidence, f"{text}: {{}}", fact)
            for evidence, wanted in self._clinic.evidence.items()
            for fact, text in wanted.facts.items()
            if fact in self._case.facts and cause.shows.get(fact, self._case.facts[fact]) != self._case.facts[fact]
        ]
        for evidence, text, fact in against:
            if evidence in self._found:
                shown, expected = text.format(self._case.facts[fact]), cause.shows[fact]
                return f"Your evidence {evidence!r} speaks against it: {shown}. With {name!r} it would be: {expected}."
        for evidence, text, fact in against:
            expected = text.format(cause.shows[fact])
            return f"With it, the evidence {evidence!r} would show: {expected}. Ask for it, and compare."
        return f"The evidence alone does not exclude it, the program does: read it again. {cause.sentence}"

    def treat(self, **cure: Any) -> Verdict:
        """Change something and run the program again, really. ``clinic.cures`` shows what can be changed, and how.

        Raises ValueError or TypeError, with what is allowed, for a cure that cannot be applied.
        """
        if not cure:
            raise ValueError(f"say what to change; allowed are {', '.join(self._clinic.cures)}")
        for name in cure:
            _known("cure", name, self._clinic.cures)
        self._clinic.check_cure(cure)
        possible, sentence = self._clinic.available()
        if not possible:
            return Verdict(False, f"The treatment was not tried: {sentence}.")
        after = self._clinic.run(self._case, cure)
        healed = after.is_healthy(self._case.result)
        silent = healed and after.operations is not None and after.operations < self._case.least
        self._treatments.append(healed and not silent)
        if silent:
            count = after.operations
            return Verdict(False, f"Not healed. The ranks finish, but they communicate {count} times in all, and what "
                           f"the program is for takes at least {self._case.least}. What do they no longer exchange?")
        if not healed:
            return Verdict(False, "Not healed. After this change the ranks say:", after)
        text = f"Healed: with this change every rank finishes with {self._case.result}."
        if len(cure) > 1:
            text += f" You have changed {len(cure)} things at once, so you do not know which of them it was."
        elif not set(cure) <= set(self._case.usual):
            text += " This goes around the cause rather than removing it. Do you know why it works?"
        return Verdict(True, text)

    def __repr__(self) -> str:
        return f"patient {self.number}: {self.complaint}\n\n{self._case.shown()}"

    def _repr_html_(self) -> str:
        program = html.escape(self._case.shown())
        return f"<b>patient {self.number}</b>: {html.escape(self.complaint)}<pre><code>{program}</code></pre>"


class Clinic:
    """Patients, numbered from 1, that share what can be wrong, what can be asked and what can be changed.

    ``run(case, cure)`` runs the program, with a cure (a dict of keywords) or without (None). ``check_cure`` raises
    ValueError or TypeError for a cure that makes no sense, before anything runs. ``available`` says whether programs
    can be run here, and why not. ``run_all`` calls a list of functions, each of which runs a program.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        causes: Mapping[str, Cause],
        evidence: Mapping[str, Evidence],
        cures: Mapping[str, str],
        run: Callable[[Case, dict[str, Any] | None], Symptom],
        check_cure: Callable[[dict[str, Any]], object],
        available: Callable[[], tuple[bool, str]] = lambda: (True, ""),
        run_all: Callable[[Sequence[Callable[[], Symptom]]], list[Symptom]] = lambda looks: [look() for look in looks],
    ):
        self.causes, self.evidence, self.cures = causes, evidence, cures
        self.run, self.check_cure, self.available, self.run_all = run, check_cure, available, run_all
        self.patients = [Patient(number, case, self) for number, case in enumerate(cases, 1)]

    def __getitem__(self, number: int) -> Patient:
        if number not in range(1, len(self.patients) + 1):
            raise ValueError(f"patient is {number!r}; allowed are 1 to {len(self.patients)}")
        return self.patients[number - 1]

    def __iter__(self) -> Iterator[Patient]:
        return iter(self.patients)

    def __len__(self) -> int:
        return len(self.patients)

    def list_causes(self) -> Table:
        """What can be wrong: the names that `Patient.diagnose` takes."""
        return Table(["cause", "what it is"], [[name, cause.sentence] for name, cause in self.causes.items()])

    def list_evidence(self) -> Table:
        """What can be asked for: the names that `Patient.ask` takes, and the price of each."""
        rows = [[name, f"{one.minutes} min", one.sentence] for name, one in self.evidence.items()]
        return Table(["evidence", "price", "what it is"], rows)

    def list_cures(self) -> Table:
        """What can be changed: the keywords that `Patient.treat` takes."""
        return Table(["cure", "what it changes"], [[name, text] for name, text in self.cures.items()])

    def symptoms(self) -> Table:
        """Run every patient: complaint, and what each rank says."""
        new, rows = [patient for patient in self if patient._symptom is None], []
        for patient, symptom in zip(new, self.run_all([patient._look for patient in new]), strict=True):
            patient._symptom = symptom
        for patient in self:
            symptom = patient.symptom()
            for rank, text in enumerate(symptom.said):
                label = f"{rank} (recorded)" if symptom.recorded else f"{rank}"
                first = rank == 0
                rows.append([f"{patient.number}" * first, patient.complaint * first, label, text])
        return Table(["patient", "complaint", "rank", "says"], rows)

    def score(self) -> Table:
        """For each patient: evidence and its price, wrong and right diagnoses, treatments, whether it is healed."""
        counts = [(patient.minutes, patient._diagnoses.count(False), patient.diagnosed, len(patient._treatments),
                   patient.healed) for patient in self]  # fmt: skip
        rows = [[f"{patient.number}", ", ".join(patient._found) or "none", f"{minutes} min", f"{wrong}",
                 "yes" if found else "no", f"{tried}", "yes" if healed else "no"]
                for patient, (minutes, wrong, found, tried, healed) in zip(self, counts, strict=True)]
        minutes, wrong, found, tried, healed = map(sum, zip(*counts, strict=True))
        of = f"of {len(self)}"
        rows.append(["all", "", f"{minutes} min", f"{wrong}", f"{found} {of}", f"{tried}", f"{healed} {of}"])
        return Table(["patient", "evidence", "price", "wrong causes", "cause found", "treatments", "healed"], rows)

    def _table(self) -> Table:
        return Table(["patient", "complaint"], [[f"{patient.number}", patient.complaint] for patient in self])

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()
