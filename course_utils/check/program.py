"""Checks as programs for the ranks: they note what they find, and a wrong value is told by the mistake that gives it.

In a room, ``answers.py`` has the solutions, and ``check.py`` a program for each exercise, its mistakes and other right
answers::

    MISTAKES = {"shard": {  # key: the hint, and the edits of the solution that make the mistake (none: only the hint)
        "sum": ("These are the sums over the ranks, not the means.", "join([p.grad], n) / n  ->  join([p.grad], n)"),
        "shards": ("Return a dictionary from each parameter to a tensor.", "return shards  ->  pass"),
    }}
    RIGHT = {"shard": {"an all-reduce": "…  ->  …", "a class": ShardOfAnother}}

    @exercise("Exercise 3", passed="the mean gradient to 1e-12.", cases=[(2, "a plain model", {}), (3, "odd", ODD)])
    def shard(note, answer, options):
        module, right = …                      # what one process gives, computed on each rank
        with record() as ledger:
            got = answer(module)
        note.equal(got, right, "the part")     # wrong: the mistakes run on this case; the one with this value speaks
        note.sent(ledger, {"reduce_scatter"}, carried=…)

``shard`` is then the check itself, ``check.shard(fn)``. A case is (ranks, its name, further arguments …), or a `Case`
where a failure in it has a hint of its own; with 0 ranks the program runs in the notebook's process. What a program
notes first on the lowest rank is what the learner reads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import linecache
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import traffic
from .compare import listed, show
from .edits import edited
from .runs import TIMEOUT, CheckFailed, Exercise, Outcome, checked

__all__ = ["Case", "Note", "answer_with", "exercise"]


SHORT = 1.0  # seconds at rest after which the ranks of a mistake count as hanging: nobody shall wait for a diagnosis


@dataclass(frozen=True)
class Case:
    """Ranks (0: none, in this process), the case's name, its further arguments, and the hint that explains a failure
    which is its own.

    ``errors`` is a pattern of errors that the case is to blame for; ``options`` gives more arguments of `ranks.run`.
    """

    ranks: int
    name: str = ""
    args: tuple = ()
    hint: str | None = None
    errors: str | None = None
    options: Callable[[], Mapping[str, Any]] | None = None


class Done(Exception):
    """A mistake has come to the place where it is compared."""


@dataclass
class Note:
    """What a program finds on one rank: places are counted, and the first that is wrong is told.

    Each method returns whether it holds, so that a program can stop where going on makes no sense.
    """

    tolerance: float
    until: int | None = None  # a mistake need not go on after this place
    found: list[tuple[int, str, str, Any]] = field(default_factory=list)  # place, hint, sentence, value
    place: int = 0
    patience: float = 1.0  # seconds for gloo's threads, which let go of tensors late

    def holds(self, condition: bool, hint: str, sentence: str, value: Any = None) -> bool:
        """Note ``sentence`` with the hint of that key, unless the condition holds."""
        self.place += 1
        if not condition:
            self.found.append((self.place, hint, sentence, value))
        if self.place == self.until:
            raise Done
        return bool(condition)

    def equal(self, got: Any, expected: Any, what: str, hint: str = "value") -> bool:
        """Compare a tensor, or tensors by name, with what one process gives."""
        pairs = expected.items() if isinstance(expected, Mapping) else [("", expected)]
        for name, right in pairs:
            value = got.get(name) if isinstance(expected, Mapping) else got
            if not alike(value, right, self.tolerance):
                key = hint
                if key == "value" and isinstance(right, torch.Tensor) and getattr(value, "shape", None) != right.shape:
                    key = "shape"
                lines = f"\n  expected  {show(right)}\n  got       {show(value)}"
                return self.holds(False, key, f"{what}{f' of {name}' if name else ''} is wrong.{lines}", (name, value))
        return self.holds(True, hint, what)

    def settled(self, tracker: Any, most: float) -> float:
        """Bytes alive; what is too much is waited for, for a while in all."""
        start = time.monotonic()
        while (total := tracker.mark("").total) > most and self.until is None:
            if time.monotonic() > start + self.patience:
                break
            time.sleep(0.01)
        self.patience = max(0.1, self.patience - (time.monotonic() - start))
        return total

    def at_most(self, hint: str, number: float, most: float, sentence: str) -> bool:
        """Note ``sentence``, in which ``{number}`` and ``{most}`` are filled in, if the number is larger."""
        return self.holds(number <= most, hint, sentence.format(number=number, most=most))

    def talks(self, ledger: Any, ranks: int) -> bool:
        """The rank has sent or received something, if there is anybody else."""
        talks = ranks == 1 or bool(traffic.calls(ledger))
        return self.holds(talks, "not-distributed", "the ledger of this rank is empty.")

    def sent(self, ledger: Any, ops: set[str] | None = None, *, where: str = "", **limits: Any) -> bool:
        """What one rank has communicated, with limits and keys as `traffic.fault` takes them; ``where`` begins the
        sentence, such as ``"in backward, "``."""
        key, what = traffic.fault(ledger, ops, **limits)
        return self.holds(not key, key, where + what)


def alike(a: Any, b: Any, tolerance: float = 1e-9) -> bool:
    """Whether two values are the same: tensors within a tolerance, numbers and texts exactly."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
        return torch.allclose(a.double(), b.double(), tolerance, tolerance, equal_nan=True)
    return type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b


def _on_a_rank(fn: Callable, inputs: list, args: tuple) -> Outcome:
    program, case, tolerance, until = args
    note, said = Note(tolerance, until), None
    with contextlib.suppress(Done):
        said = program(note, fn, *case)
    return Outcome((note.found[0] if note.found else None, said), None, None, None)


def answer_with(module: str, name: str, edits: Any = ()) -> Callable:
    """The solution ``name`` of a module of answers, with edits of its text, as a function that ranks get by value.

    Edits are one or several of `edits.edited`, in the function if the old text stands there, else in what is around it.
    """
    answers = importlib.import_module(module)
    text, own = inspect.getsource(answers), inspect.getsource(getattr(answers, name))
    before, after = text.split(own)
    for edit in [edits] if isinstance(edits, str) else [{old: new} for old, new in dict(edits).items()]:
        old = edit.split("  ->")[0] if isinstance(edit, str) else next(iter(edit))
        own, before = (edited(own, edit), before) if old in own else (own, edited(before, edit))
    program = before + own + after
    file = f"<{name}, {zlib.crc32(program.encode()):08x}>"
    linecache.cache[file] = (len(program), None, program.splitlines(True), file)  # its lines are known, as a cell's
    names: dict = {"__name__": "__main__"}
    exec(compile(program, file, "exec"), names)
    return names[name]


def hints_of(mistakes: Mapping[str, tuple]) -> dict[str, str]:
    """Key to hint, of a table of mistakes; line breaks and repeated spaces count as one space."""
    return {key: " ".join(hint.split()) for key, (hint, *_) in mistakes.items()}


def exercise(
    title: str, *, passed: str | Callable[[Any], str], cases: Sequence, tolerance: float = 1e-12,
    timeout: float = TIMEOUT, explains: Sequence[str] = (), explained: Mapping[str, str] | None = None,
) -> Callable:
    """Make the check of a program for the ranks; its module says in `MISTAKES` and `RIGHT` what goes with its name.

    ``passed`` follows *passed on 1, 2 and 3 ranks:*; ``{said}`` in it is what the program returns on rank 0 in the
    first case, or it is a function of that. ``explains`` are keys for which the hint of a case is given where it has
    one, as it is for wrong values, hangs, errors and calls or bytes that are too many. ``explained`` are patterns in
    the text of a hang or an error, to the key that they get.
    """

    def make(program: Callable) -> Callable:
        room, name = sys.modules[program.__module__], program.__name__
        answers = f"{program.__module__.rpartition('.')[0]}.answers"
        known = [case if isinstance(case, Case) else Case(*case[:2], tuple(case[2:])) for case in cases]
        solution, remembered = functools.partial(answer_with, answers, name), {}

        def judge(fn: Callable, timeout: float = timeout) -> None:
            mistakes, said = room.MISTAKES[name], None
            run = Exercise(title, hints_of(mistakes), timeout, _on_a_rank, explained=explained or {})
            for number, case in enumerate(known):
                run.options = case.options() if case.options else {}
                results = _run(run, program, fn, case, tolerance)
                found, said = [result[0] for result in results], results[0][1] if said is None else said
                rank = min((r for r, one in enumerate(found) if one), key=lambda r: (found[r][0], r), default=None)
                if rank is not None:
                    place, key, sentence, value = found[rank]
                    same = None
                    if value is not None:
                        once = functools.partial(_of_a_mistake, run.options, solution, program, case, tolerance)
                        same = _diagnosis(mistakes, once, remembered.setdefault(number, {}), rank, found[rank])
                    if same:
                        key = same
                    elif key in explains or case.hint and key.startswith("too-many"):
                        key = run.fallback or key
                    run.refuse(key, sentence, rank if case.ranks else None)
            run.passed(passed(said) if callable(passed) else passed.replace("{said}", str(said)))

        functools.update_wrapper(judge, program, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        del judge.__wrapped__
        judge = checked(judge)
        judge.answer = solution
        return judge

    return make


def _run(
    run: Exercise, program: Callable, fn: Callable, case: Case, tolerance: float, until: int | None = None
) -> list[tuple]:
    """What the program finds first on each rank, and what it returns; in this process where a case has no ranks."""
    if not case.ranks:
        run.case, run.fallback, run.own_fallback = case.name, case.hint, case.hint is not None
        return [_on_a_rank(functools.partial(run.call, fn), [], (program, case.args, tolerance, until)).result]
    inputs, asked = [torch.zeros(0)] * case.ranks, (program, case.args, tolerance, until)
    outcomes = run.run(fn, inputs, *asked, case=case.name, fallback=case.hint, errors=case.errors)
    return [outcome.result for outcome in outcomes]


def _of_a_mistake(
    options: Mapping, solution: Callable, program: Callable, case: Case, tolerance: float, edit: Any, place: int
) -> list[tuple | None] | None:
    """What the program finds on each rank in a mistake, up to a place; None if its ranks end in an error or wait."""
    quiet, same = Exercise("", {}, SHORT, _on_a_rank, options), Case(case.ranks, args=case.args)
    try:
        return [result[0] for result in _run(quiet, program, solution(edit), same, tolerance, place)]
    except CheckFailed:
        return None


def _diagnosis(mistakes: Mapping, once: Callable, remembered: dict, rank: int, found: tuple) -> str | None:
    """The key of the mistake that gives the same wrong value at the same place on this rank.

    What a mistake has given before is ``remembered``: up to which place it went, and the findings of the ranks.
    """
    place, hint, _, value = found
    for key, (_, *edits) in mistakes.items():
        if key in ("hang", "unwaited"):  # whose ranks wait in vain, and have no value
            continue
        for number, edit in enumerate(listed(edits[0]) if edits else []):
            until, results = remembered.get((key, number), (0, [None] * (rank + 1)))
            if results and results[rank] is None and until < place:
                remembered[key, number] = place, (results := once(edit, place))
            other = results and results[rank]
            if other and other[:2] == (place, hint) and other[3][0] == value[0] and alike(value[1], other[3][1]):
                return key
    return None
