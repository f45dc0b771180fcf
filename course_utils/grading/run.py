"""Run one hand-in cell by cell, whatever it does, and say which checks it passes."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .assignments import Assignment, Check, normal
from .collect import HandIn
from .sandbox import Sandbox
from .session import Died, Session

__all__ = ["Result", "Verdict", "grade_hand_in"]

_SOLUTIONS = re.compile(r"solutions?[/\\]|[\"']solutions?[\"']")
CHECK = 200.0  # seconds for a check; its own limits are shorter
_LARGEST = 1_000_000  # bytes of a module beside the notebook that is taken along


@dataclass
class Verdict:
    """What one check said.

    Attributes
    ----------
    slow : bool
        Refused for want of time, or not reached: to be tried again, alone.
    again : bool
        It has been tried again.
    graded : bool
        False: the machine is at fault, the check could not run; it takes no points.
    """

    id: str
    points: int
    passed: bool = False
    hint: str = ""
    message: str = "The check was not reached."
    slow: bool = True
    again: bool = False
    graded: bool = True
    same_as_solution: bool = False


@dataclass
class Result:
    """What became of a hand-in: a verdict for each check of its notebook."""

    hand_in: HandIn
    verdicts: dict[str, Verdict]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def empty(cls, hand_in: HandIn) -> Result:
        """Nothing has been run yet."""
        checks = hand_in.assignment.checks.values() if hand_in.assignment else ()
        why = "; ".join(hand_in.notes) or "the kernel did not start"
        return cls(hand_in, {c.id: Verdict(c.id, c.points, message=f"Not run: {why}.", slow=False) for c in checks})

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def slow(self) -> list[str]:
        """Checks to be tried again."""
        return [verdict.id for verdict in self.verdicts.values() if verdict.slow and not verdict.passed]

    def fail(self, error: Exception) -> None:
        """Note that the fault is not the hand-in's; what has not passed is to be tried again."""
        self.note(f"not graded: {type(error).__name__}: {error}")
        for verdict in self.verdicts.values():
            verdict.slow = not verdict.passed
            verdict.graded = verdict.passed

    def take(self, other: Result) -> None:
        """Replace verdicts by those of a second run, in which nothing else was running."""
        for name, verdict in other.verdicts.items():
            if self.verdicts[name].slow:
                verdict.again = True
                if verdict.passed:
                    self.note(f"{name} passed when it was tried again, alone")
                self.verdicts[name] = verdict
        self.notes += [note for note in other.notes if note not in self.notes]
        self.seconds += other.seconds


@dataclass
class _Step:
    """A cell of the hand-in, or a check; ``number`` is the cell's in the notebook."""

    number: int
    source: str
    check: Check | None = None
    own: bool = False


async def grade_hand_in(
    hand_in: HandIn, sandbox: Sandbox, timeout: float, limit: float, only: list[str] | None = None, patience: float = 1
) -> Result:
    """Run a hand-in in a folder of its own with the course's checks.

    Parameters
    ----------
    timeout, limit : float
        Seconds for a cell, which is then interrupted, and for the whole, which is then ended.
    only : list of str, optional
        The checks to run; default: all.
    patience : float
        By this factor the checks' own time-outs are longer.
    """
    steps, notes = _steps(hand_in.notebook, hand_in.assignment)
    wanted = [step for step in steps if step.check is None or only is None or step.check.id in only]
    verdicts = {step.check.id: Verdict(step.check.id, step.check.points) for step in wanted if step.check}
    result = Result(hand_in, verdicts, notes)
    start = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="course-grade-"))
    try:
        home = place / "w"
        home.mkdir(mode=0o700)
        for module in hand_in.modules:
            if module.is_file() and not module.is_symlink() and module.stat().st_size < _LARGEST:
                shutil.copyfile(module, home / module.name)
        place.chmod(0o711)
        run = _Run(result, wanted, sandbox, home, timeout, patience)
        try:
            async with asyncio.timeout(limit):
                await run.all()
        except TimeoutError:
            result.note(f"ended after {limit:g} s")
        finally:
            await run.end()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    result.seconds = time.monotonic() - start
    return result


class _Run:
    """The way through the steps, with a new kernel where one has died."""

    def __init__(
        self, result: Result, steps: list[_Step], sandbox: Sandbox, home: Path, timeout: float, patience: float
    ) -> None:
        self._result, self._steps, self._sandbox, self._home = result, steps, sandbox, home
        self._timeout, self._patience = timeout, patience
        self._imports = result.hand_in.assignment.imports
        self._session: Session | None = None
        self._skipped: set[int] = set()
        self._errors: dict[int, str] = {}

    async def all(self) -> None:
        position = 0
        while position < len(self._steps):
            try:
                if self._session is None:
                    await self._start(position)
                await self._one(position)
            except Died:
                self._tell_death(position)
                await self.end()
            position += 1

    async def end(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            for command in await session.end():
                self._result.note(f"left a process behind, which was ended: {command[:60]}")

    async def _start(self, position: int) -> None:
        """Start a kernel and bring it to where the steps before a position had brought the last one."""
        room = self._sandbox.room(self._home)
        self._session = await Session.start(room, self._imports, self._patience, 300)
        for before in range(position):
            if self._steps[before].check is None and before not in self._skipped:
                try:
                    await self._session.run(self._steps[before].source, self._timeout)
                except Died:
                    self._skipped.add(before)
                    await self.end()
                    return await self._start(position)

    async def _one(self, position: int) -> None:
        step = self._steps[position]
        if step.check is None:
            error, interrupted = await self._session.run(step.source, self._timeout)
            if interrupted:
                error = f"interrupted after {self._timeout:g} s"
            if error:
                self._errors[position] = f"cell {step.number}: {error}"
            if error and step.own and not error.startswith("NotImplementedError"):
                self._result.note(f"cell {step.number}: {error}")
        else:
            found = await self._session.check(
                step.check.source, [*step.check.solution], self._patience * max(self._timeout, CHECK)
            )
            self._take(position, step.check, found)

    def _take(self, position: int, check: Check, found: dict[str, Any]) -> None:
        verdict = self._result.verdicts[check.id]
        verdict.passed, verdict.hint = found["passed"], found["hint"]
        verdict.message = "" if found["passed"] else self._with_errors(position, found["message"])
        verdict.graded = found["hint"] != "not-started"
        late = any("interrupted after" in error for error in self._errors_before(position))
        verdict.slow = (found["slow"] or late and found["hint"] != "empty") and not found["passed"]
        verdict.same_as_solution = check.is_solution(found.get("digests", {}))
        if changed := found.get("changed"):
            verdict.hint, verdict.slow = "changed", False
            some = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            verdict.message = f"The checks were changed by the hand-in, so this one does not count: {some}."
            self._result.note(f"the checks were changed by the hand-in: {some}")
        for name in found.get("replaced", ()):
            self._result.note(f"the hand-in has something else under the name {name}; the course's was used")

    def _errors_before(self, position: int) -> list[str]:
        """Errors of the cells between the last check and this one."""
        start = position
        while start and self._steps[start - 1].check is None:
            start -= 1
        return [self._errors[each] for each in range(start, position) if each in self._errors]

    def _with_errors(self, position: int, message: str) -> str:
        return "\n\n".join([message, *self._errors_before(position)])

    def _tell_death(self, position: int) -> None:
        step = self._steps[position]
        if step.check is None:
            self._skipped.add(position)
            self._errors[position] = f"cell {step.number}: it ended its kernel"
            self._result.note(f"cell {step.number} ended its kernel; the others were run without it")
        else:
            verdict = self._result.verdicts[step.check.id]
            verdict.message = self._with_errors(position, "The kernel ended during this check.")
            self._result.note(f"the kernel ended in {step.check.id}")


def _steps(notebook: Any, assignment: Assignment) -> tuple[list[_Step], list[str]]:
    """Cells and checks in order: each check once, where the hand-in has it last; those that it lacks at the end."""
    calls = {normal(check.source): check for check in assignment.checks.values()}
    steps: list[_Step] = []
    places: dict[str, int] = {}
    notes: list[str] = []
    edited, foreign = [], []
    code = ((number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code")
    for number, cell in code:
        marks, source = cell.metadata.get("nbgrader", {}), normal(cell.source)
        check = calls.get(source) or (assignment.checks.get(marks.get("grade_id")) if marks.get("grade") else None)
        if check is not None:
            if source not in calls:
                edited.append(check.id)
            places[check.id] = len(steps)
            steps.append(_Step(number, check.source, check))
        elif marks.get("grade"):
            foreign.append(str(marks.get("grade_id")))
        elif cell.source.strip():
            own = source not in assignment.sources
            steps.append(_Step(number, cell.source, own=own))
            if own and _SOLUTIONS.search(cell.source):
                notes.append(f"cell {number} names the folder with the solutions")
    lost = [check for check in assignment.checks.values() if check.id not in places]
    steps = [step for place, step in enumerate(steps) if step.check is None or places[step.check.id] == place]
    steps += [_Step(len(notebook.cells) + 1, check.source, check) for check in lost]
    changes = {"missing": [check.id for check in lost], "changed": edited, "not the course's": foreign}
    notes += [f"check cells {how}: {', '.join(names)}" for how, names in changes.items() if names]
    return steps, notes
