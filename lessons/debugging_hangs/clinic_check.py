"""What the checks of clinics share: a cure is one change, tried by a run (private)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from course_utils.check.runs import Exercise

from .clinic import Clinic, Patient


def treat(exercise: Exercise, patient: Patient, cure: dict[str, Any]) -> None:
    """Try a cure on a patient whose cause is known; refuse one that cannot be applied, or does not heal."""
    exercise.require(len(cure) <= 1, "several", f"the cure changes {len(cure)} things: {', '.join(map(str, cure))}.")
    try:
        verdict = patient.treat(**cure)
    except (TypeError, ValueError) as error:
        exercise.refuse("cure-form", f"the cure cannot be applied: {error}.")
    exercise.require(bool(verdict), "cure", f"the cause is right, the cure {cure} does not heal.\n\n{verdict}")


def ward(
    run: Exercise, fn: Callable, clinic: Clinic, numbers: Iterable[int], details: tuple[str, ...] = (),
    cure: Callable[[dict], dict] = lambda edit: {"edit": edit},
) -> int:
    """Ask ``fn()`` for the cause of each patient, its details and a cure, by default an edit, and try the cures where
    programs can run; how many were healed."""
    given = run.call(fn)
    run.require(isinstance(given, dict), "form", f"the function returned {str(given)[:100]}.")
    for patient in (clinic[number] for number in numbers):
        run.case = f"patient {patient.number}"
        run.require(patient.number in given, "missing", "the answers have no entry for it.")
        answer = given[patient.number]
        form = isinstance(answer, tuple | list) and len(answer) == 2 + len(details) and isinstance(answer[-1], dict)
        run.require(form, "form", f"the answer is {str(answer)[:100]}.")
        cause, *named, change = answer
        known = ", ".join(clinic.causes)
        run.require(cause in clinic.causes, "name", f"{cause!r} is no cause; allowed are {known}.")
        verdict = patient.diagnose(cause, **dict(zip(details, named, strict=True)))
        said = ", ".join([repr(cause), *(f"{name} {value!r}" for name, value in zip(details, named, strict=True))])
        run.require(bool(verdict), "diagnosis", f"the diagnosis ({said}) is wrong.\n\n{verdict}")
        if clinic.available()[0]:
            treat(run, patient, cure(change))
    return sum(patient.healed for patient in clinic)
