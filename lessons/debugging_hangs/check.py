"""Checks of the exercises on hangs: calls compared before they run, a skip by all, the clinic.

Each takes the learner's function; it prints one line if that passes, and raises :class:`CheckFailed` with a hint if
not.
"""

from __future__ import annotations

import builtins
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from course_utils.check import Exercise, checked, load_hints
from course_utils.check.runs import Outcome
from course_utils.costs import bytes_sent

from .clinic import hangs
from .clinic_check import treat

__all__ = ["HINTS", "checked_all_reduce", "diagnoses_and_cures", "second_ward", "skip_together"]

HINTS = load_hints(__file__)

# ------------------------------------------------------------------------------------------------ calls compared


@contextlib.contextmanager
def _own_hashes(rank: int, used: list[str]) -> Iterator[None]:
    """Let `hash` of texts differ from rank to rank, as under torchrun, and note that it was called."""

    def salted(value: Any) -> int:
        used.append("hash")
        return usual((rank, value))

    usual, builtins.hash = builtins.hash, salted
    try:
        yield
    finally:
        builtins.hash = usual


def _one_reduction(fn: Callable, inputs: list[Any], args: tuple) -> Outcome:
    """On a rank: one call, what it has refused, and whether it asked for a hash of Python's."""
    import torch.distributed as dist

    from course_utils import record

    names, x = args[0], inputs[dist.get_rank()]
    inputs[:] = []
    before, said, used = x.clone(), None, []
    with record() as ledger, _own_hashes(dist.get_rank(), used):
        try:
            fn(x, getattr(dist.ReduceOp, names[dist.get_rank()]))
        except ValueError as error:
            said = str(error)
    return Outcome((said, bool(used)), ledger, before, x)


def _tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(1, 1 + max(1, torch.Size(shape).numel())) * (rank + 2) % 17
    return numbers.to(dtype).reshape(shape)


_FLOAT = torch.float32
_AGREE: list[tuple[int, tuple[int, ...], torch.dtype, str]] = [
    (2, (5,), _FLOAT, "SUM"), (3, (2, 3), torch.int32, "MAX"), (4, (), torch.float64, "SUM"),
    (3, (4, 250), _FLOAT, "MIN"),
]
Call = tuple[tuple[int, ...], torch.dtype, str]
_DIFFER: list[tuple[str, list[Call]]] = [
    ("another reduction on rank 1", [((6,), _FLOAT, name) for name in ("SUM", "MAX", "SUM")]),
    ("another reduction on rank 0", [((6,), _FLOAT, name) for name in ("MAX", "SUM", "SUM")]),
    ("another shape on rank 2", [(shape, _FLOAT, "SUM") for shape in ((8,), (8,), (2, 4))]),
    ("another dtype of the same size on rank 1", [((8,), dtype, "SUM") for dtype in (_FLOAT, torch.int32, _FLOAT)]),
    ("two ranks against two", [((4,), _FLOAT, name) for name in ("MIN", "SUM", "SUM", "MIN")]),
    ("another size on rank 1", [(shape, _FLOAT, "SUM") for shape in ((3,), (5,))]),
    ("three different calls", [((4,), _FLOAT, name) for name in ("MIN", "SUM", "MAX")]),
]


def _reduced(inputs: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    stacked = torch.stack(list(inputs))
    return {"SUM": stacked.sum(0).to(stacked.dtype), "MAX": stacked.amax(0), "MIN": stacked.amin(0)}[name]


def _agreeing(exercise: Exercise, fn: Callable) -> None:
    for n, shape, dtype, name in _AGREE:
        inputs = [_tensor(rank, shape, dtype) for rank in range(n)]
        right = _reduced(inputs, name)
        case = f"all pass {name}, {str(dtype)[6:]}, shape {shape}"
        for rank, outcome in exercise.each(exercise.run(fn, inputs, [name] * n, case=case)):
            said, hashed = outcome.result
            key = "hash" if hashed else "false-alarm"
            exercise.require(said is None, key, f"the function raised: {said}.")
            traps = {"other-op": _reduced(inputs, "SUM"), "not-reduced": outcome.before}
            exercise.equal(rank, outcome.after, right, traps, what="the tensor")
            most = bytes_sent("all_reduce", n, right.nbytes)
            exercise.audit(outcome.ledger, calls=2, sent=(most - 1, most + 256 * n))


def _odd(calls: Sequence[Call]) -> list[int]:
    usual = Counter(calls).most_common(1)[0][0]  # of several, the one of the lowest rank
    return [rank for rank, call in enumerate(calls) if call != usual]


def _differing(exercise: Exercise, fn: Callable) -> None:
    for case, calls in _DIFFER:
        inputs = [_tensor(rank, shape, dtype) for rank, (shape, dtype, _) in enumerate(calls)]
        outcomes = exercise.run(fn, inputs, [name for _, _, name in calls], case=case)
        right = f"ranks {_odd(calls)} differ"
        for _, outcome in exercise.each(outcomes):
            exercise.require(outcome.result[0] is not None, "silent", "the function raised no ValueError.")
        for rank, outcome in exercise.each(outcomes):
            said, _ = outcome.result
            form = re.fullmatch(r"ranks \[(\d+(, \d+)*)?\] differ", said)
            exercise.require(bool(form), "form", f"the error says {said[:80]!r}.")
            if said != right:
                exercise.differs("majority", "the error names other ranks.", right, said)
            exercise.require(bool((outcome.before == outcome.after).all()), "changed", "the tensor has changed.", rank)


@checked
def checked_all_reduce(fn: Callable) -> None:
    """Check ``fn(tensor, op) -> None``, which reduces in place or raises ValueError on all ranks."""
    exercise = Exercise("Exercise 1", HINTS["checked_all_reduce"], program=_one_reduction)
    _agreeing(exercise, fn)
    _differing(exercise, fn)
    exercise.passed("equal calls are reduced, different ones refused on all ranks with one small message.")


# ------------------------------------------------------------------------------------------------ a skip by all


class _Job:
    """A rank's model of three numbers, whose batches sometimes do not fit."""

    def __init__(self, rank: int, full: set[tuple[int, int]]):
        self.rank, self.full, self.weights = rank, full, torch.zeros(3, dtype=torch.float64)
        self.tried = self.applied = 0

    def compute(self, batch: torch.Tensor) -> torch.Tensor:
        self.tried += 1
        if (self.rank, self.tried - 1) in self.full:
            raise MemoryError("the batch does not fit")
        return batch - self.weights

    def apply(self, gradient: torch.Tensor) -> None:
        self.applied += 1
        self.weights = self.weights - 0.1 * gradient


def _epoch(fn: Callable, inputs: list[Any], args: tuple) -> Outcome:
    import torch.distributed as dist

    from course_utils import record

    x, inputs[:] = inputs[dist.get_rank()], []
    job, before = _Job(dist.get_rank(), args[0]), x.clone()
    with record() as ledger:
        skipped = fn(job.compute, job.apply, list(x))
    return Outcome((skipped, job.tried, job.applied, job.weights), ledger, before, x)


def _expected(inputs: Sequence[torch.Tensor], full: set[tuple[int, int]]) -> tuple[torch.Tensor, int]:
    weights, done = torch.zeros(3, dtype=torch.float64), 0
    for step in range(len(inputs[0])):
        if not any((rank, step) in full for rank in range(len(inputs))):
            weights, done = weights - 0.1 * torch.stack([x[step] - weights for x in inputs]).mean(0), done + 1
    return weights, done


_STEPS = 5
_FULL: list[tuple[int, str, set[tuple[int, int]]]] = [
    (2, "every batch fits", set()), (3, "one batch of rank 1 does not fit", {(1, 1)}),
    (3, "two ranks run out in one step", {(0, 2), (2, 2)}), (2, "in different steps", {(0, 0), (1, 3)}),
    (3, "the last one does not fit", {(2, 4)}),
]


@checked
def skip_together(fn: Callable) -> None:
    """Check ``fn(compute, apply, batches) -> int``, the number of batches that were skipped by all ranks."""
    exercise = Exercise("Exercise 2", HINTS["skip_together"], program=_epoch)
    for n, case, full in _FULL:
        inputs = [torch.arange(3.0 * _STEPS, dtype=torch.float64).reshape(_STEPS, 3) * (rank + 1) for rank in range(n)]
        weights, done = _expected(inputs, full)
        outcomes = exercise.run(fn, inputs, full, case=case, fallback="out-of-step" if full else None)
        exercise.fallback = None
        for rank, outcome in exercise.each(outcomes):
            skipped, tried, applied, got = outcome.result
            exercise.require(tried == _STEPS, "every-batch", f"compute was called {tried} times, of {_STEPS} batches.")
            if applied != done:
                key = "local-skip" if applied > done else "too-many-skips"
                exercise.differs(key, "the number of calls of apply is wrong.", done, applied)
            total, ahead = weights * 0, weights * 0
            for step in range(_STEPS):
                if not any((r, step) in full for r in range(n)):
                    total = total - 0.1 * sum(x[step] - total for x in inputs)
                    ahead = ahead - 0.1 * sum(x[step] for x in inputs) / n
            exercise.equal(rank, got, weights, {"mean": total, "ahead": ahead}, what="the weights after the epoch")
            exercise.require(skipped == _STEPS - done, "count", f"the function returned {str(skipped)[:40]}.")
            least = done * bytes_sent("all_reduce", n, weights.nbytes)
            most = least + _STEPS * 64 * n
            exercise.audit(outcome.ledger, calls=_STEPS + done, sent=(least - 1, most),
                           keys={"too-many-calls": "gradient-sent" if full else "too-many-calls"})
    _other_errors(exercise, fn)
    exercise.passed("a batch is skipped by all ranks or by none, at the price of one number.")


def _failing(fn: Callable, inputs: list[Any], args: tuple) -> Outcome:
    import torch.distributed as dist

    from course_utils import record

    def compute(batch: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("a fault of the model")

    x, inputs[:] = inputs[dist.get_rank()], []
    with record() as ledger:
        try:
            fn(compute, lambda gradient: None, list(x))
        except ZeroDivisionError:
            return Outcome("raised", ledger, x, x)
    return Outcome("swallowed", ledger, x, x)


def _other_errors(exercise: Exercise, fn: Callable) -> None:
    """Another error than MemoryError, here on all ranks at once, must not be taken for a full memory."""
    exercise.program = _failing
    outcomes = exercise.run(fn, [torch.ones(2, 3)] * 2, case="the model raises ZeroDivisionError")
    for _, outcome in exercise.each(outcomes):
        exercise.require(outcome.result == "raised", "swallowed", "the error of the model was caught.")


# ------------------------------------------------------------------------------------------------ the clinic


@checked
def diagnoses_and_cures(fn: Callable) -> None:
    """Check ``fn()``: number of patients 1 to 9 -> (cause, rank, call, edit), as `diagnose` and `treat` take them."""
    _ward(Exercise("Exercise 3", HINTS["diagnoses_and_cures"]), fn, range(1, 10))


@checked
def second_ward(fn: Callable) -> None:
    """Check ``fn()``: the same for patients 10 to 15."""
    _ward(Exercise("Exercise 4", HINTS["second_ward"]), fn, range(10, 16))


def _ward(exercise: Exercise, fn: Callable, numbers: range) -> None:
    answers = exercise.call(fn)
    exercise.require(isinstance(answers, dict), "form", f"the function returned {str(answers)[:100]}.")
    clinic = hangs.clinic()
    for patient in (clinic[number] for number in numbers):
        exercise.case = f"patient {patient.number}"
        exercise.require(patient.number in answers, "missing", "the answers have no entry for it.")
        answer = answers[patient.number]
        form = isinstance(answer, tuple | list) and len(answer) == 4 and isinstance(answer[3], dict)
        exercise.require(form, "form", f"the answer is {str(answer)[:100]}.")
        cause, rank, call, edit = answer
        known = ", ".join(clinic.causes)
        exercise.require(cause in clinic.causes, "name", f"{cause!r} is no cause; allowed are {known}.")
        verdict = patient.diagnose(cause, rank=rank, call=call)
        said = f"the diagnosis ({cause!r}, rank {rank}, {call!r}) is wrong."
        exercise.require(bool(verdict), "diagnosis", f"{said}\n\n{verdict}")
        treat(exercise, patient, {"edit": edit})
    count = len(numbers)
    said = f"{count} faults found, with rank and call, and {count} programs healed, each by a run."
    print(f"{exercise.title} passed: {said}")
