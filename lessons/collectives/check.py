"""Checks of the exercises on collectives.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from course_utils.check import (
    TIMEOUT,
    Exercise,
    Outcome,
    checked,
    load_hints,
    paper_problem,
    values,
)
from course_utils.costs import busbw_factor, bytes_sent

__all__ = [
    "HINTS", "all_gather_seconds", "bandwidths", "gradient_all_reduce_seconds", "mean_and_variance",
    "ragged_all_gather", "ring_shift",
]

HINTS = load_hints(__file__)

_HUB = dict.fromkeys(("reduce", "broadcast", "gather", "scatter"), "hub")
_TENSORS: dict[str, Callable[[int], torch.Tensor]] = {  # by seed; what works for the first may fail for the others
    "float32 of shape (6, 2)": lambda seed: values(6, 2, seed=seed),
    "int32 of shape (2, 3, 2)": lambda seed: (1e8 * values(2, 3, 2, seed=seed)).int(),
    "float64 of shape ()": lambda seed: values(seed=seed).double(),
}


# ------------------------------------------------------------------------------------------------ mean and variance


@checked
def mean_and_variance(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x) -> (mean, variance)``, x of shape (n,), two float64 scalars: one all-reduce of 24 bytes."""
    exercise = Exercise("Exercise 1", HINTS["mean_and_variance"], timeout)
    for n in (2, 3, 4, 1):
        equal, ragged = (
            [2 + (1 + rank) * values(5 + step * (3 * rank - 1), seed=rank) for rank in range(n)] for step in (0, 1)
        )
        for case, data, fallback in (
            ("as many numbers on every rank", equal, None),
            ("other counts on every rank", ragged, None),
            ("none on the last rank", [*ragged[:-1], ragged[-1][:0]], "empty-shard"),
            ("numbers near 3000", [3000 + x for x in ragged], "float32"),
        ):
            if any(map(len, data)):
                _mean_and_variance(exercise, data, exercise.run(fn, data, case=case, fallback=fallback))
    exercise.passed("1 all-reduce of 24 bytes.")


def _mean_and_variance(exercise: Exercise, data: list[torch.Tensor], outcomes: list[Outcome]) -> None:
    n, everything = len(data), torch.cat(data).double()
    filled = [x.double() for x in data if len(x) > 1]
    within = [torch.stack([x.var(correction=c) for x in filled]).mean() for c in (0, 1)]
    within.append(sum(len(x) * x.var(correction=0) for x in filled) / len(everything))
    mean_traps = {"mean-of-means": torch.stack([x.mean() for x in filled]).mean(), "not-divided": everything.sum()}
    variance_traps = {"unbiased": everything.var(), "average-of-variances": within}
    sizes = bytes_sent("all_reduce", n, 3 * 4), bytes_sent("all_reduce", n, 3 * 8)
    for rank, outcome in exercise.each(outcomes):
        exercise.communicates(rank, outcome, n)
        exercise.audit(outcome.ledger, {"all_reduce"}, keys={**_HUB, "all_gather": "gathers-everything"})
        pair = isinstance(outcome.result, (tuple, list)) and len(outcome.result) == 2
        exercise.require(pair, "shape", "expected a pair (mean, variance) of scalar tensors.")
        mean, variance = [v.squeeze() if isinstance(v, torch.Tensor) else v for v in outcome.result]
        exercise.equal(rank, mean, everything.mean(), mean_traps, "the mean")
        exercise.equal(rank, variance, everything.var(correction=0), variance_traps, "the variance")
        if exercise.fallback == "float32":  # where sums in float32 have been told from right ones
            what = f"the mean is {mean.dtype}, the variance {variance.dtype}; the docstring promises float64."
            exercise.require(mean.dtype == variance.dtype == torch.float64, "dtype", what)
        exercise.audit(outcome.ledger, calls=1, sent=sizes, keys={"too-many-calls": "two-all-reduces"})
        exercise.keeps_input(rank, outcome)


# ------------------------------------------------------------------------------------------------ ring shift


@checked
def ring_shift(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x) -> tensor of the left neighbour``, of any shape and dtype: one message out, one in."""
    exercise = Exercise("Exercise 2", HINTS["ring_shift"], timeout)
    for n in (2, 3, 4, 1):
        for i, (kind, tensor) in enumerate(_TENSORS.items()):
            data = [tensor(10 + rank) for rank in range(n)]
            size, dtype = data[0].nbytes, data[0].dtype
            fallback = "any-tensor" if i and n == 2 else None
            outcomes = exercise.run(fn, data, case=f"x {kind}", fallback=fallback, errors="unpack|dim|dtype")
            for rank, outcome in exercise.each(outcomes):
                exercise.communicates(rank, outcome, n)
                exercise.audit(outcome.ledger, {"send", "recv"}, keys={"other-calls": "collective"})
                traps = {"direction": data[(rank + 1) % n]} if n > 2 else {}
                exercise.equal(rank, outcome.result, data[rank - 1], traps, dtype=dtype)
                exercise.audit(outcome.ledger, calls={"send": (1, 1), "recv": (1, 1)}, sent=(size, size))
                exercise.keeps_input(rank, outcome)
    exercise.passed("1 message out and 1 in on every rank.")


# ------------------------------------------------------------------------------------------------ ragged all-gather


@checked
def ragged_all_gather(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x) -> list of all ranks' tensors``, x of shape (rows, d): two collectives, padded to the longest."""
    exercise = Exercise("Exercise 3", HINTS["ragged_all_gather"], timeout)
    for n in (2, 3, 4, 1):
        uneven = [(3 * rank + 1) % 8 for rank in range(n)]
        for name, lengths, columns, fallback in (
            ("as many rows on every rank", [3] * n, 2, None),
            ("other numbers of rows", uneven, 3, "uneven"),
            ("rank 0 without rows", [0, *range(4, 4 - n + 1, -1)], 3, "uneven"),
            ("no rows anywhere", [0] * n, 1, None),
            ("a last row of zeros, one of nan", uneven, 2, "padding-guessed"),
            ("many rows", [300, *uneven[1:]], 1, "many-rows"),
        ):
            data = [values(length, columns, seed=60 + rank) for rank, length in enumerate(lengths)]
            if fallback == "padding-guessed":
                data[0][-1], data[-1][-1] = 0, torch.nan
            case = f"{name} ({', '.join(map(str, lengths))})"
            outcomes = exercise.run(fn, data, case=case, fallback=fallback if n == 2 else None)
            _ragged_all_gather(exercise, data, outcomes)
    exercise.passed("2 collectives, the second no larger than N times the longest.")


def _ragged_all_gather(exercise: Exercise, data: list[torch.Tensor], outcomes: list[Outcome]) -> None:
    n, longest, expected = len(data), max(x.nbytes for x in data), [len(x) for x in data]
    most = bytes_sent("all_reduce", n, 8 * n) + bytes_sent("all_gather", n, n * longest)
    for rank, outcome in exercise.each(outcomes):
        exercise.communicates(rank, outcome, n)
        got, used = outcome.result, {entry.op for entry in outcome.ledger}
        is_list = isinstance(got, (list, tuple)) and len(got) == n and all(isinstance(p, torch.Tensor) for p in got)
        found = f"{len(got)} parts" if isinstance(got, (list, tuple)) else type(got).__name__
        exercise.require(is_list, "not-a-list", f"expected a list of {n} tensors, got {found}.")
        lengths = [len(part) if part.dim() else -1 for part in got]
        if lengths != expected:
            padded = min(lengths) >= max(expected) and max(lengths) > min(expected)
            key = "padding-left" if padded else "own-length" if set(lengths) == {expected[rank]} else "shape"
            exercise.refuse(key, f"the parts have {lengths} rows, expected {expected}.")
        for i, part in enumerate(got):
            exercise.equal(rank, part, data[i], {"rank-order": [x for x in data if len(x)]}, f"part {i}")
        exercise.audit(
            outcome.ledger,
            {"all_gather", "all_to_all", "all_reduce"},
            calls=2,
            carried=8 * n + n * longest,
            sent=((n - 1) * data[rank].nbytes, most),
            keys={
                "gather": "hub",
                "broadcast": "hub" if used & {"send", "recv"} else "one-call-per-rank",
                "send": "messages",
                "recv": "messages",
                "too-many-calls": "more-than-two",
            },
        )
        exercise.keeps_input(rank, outcome)


# ------------------------------------------------------------------------------------------------ paper problems


@paper_problem(
    "Exercise 4",
    cases=[(7e9, 2, 16, 400), (70e9, 2, 64, 800), (1e9, 4, 2, 100)],
    slips={
        "gigabits": ["/ 8  ->  ", "/ 8  ->  * 8"],
        "gibi": "giga = 1e9  ->  giga = 2**30",
        "no-factor": "2 * (ranks - 1) / ranks  ->  1",
        "limit": "2 * (ranks - 1) / ranks  ->  2",
        "half": "2 * (ranks - 1) / ranks  ->  (ranks - 1) / ranks",
        "whole-tensor": ["2 * (ranks - 1) / ranks  ->  (ranks - 1)", "(ranks - 1) / ranks  ->  (ranks - 1)"],
    },
    units=["s"],
    hints=HINTS["gradient_all_reduce_seconds"],
)
def gradient_all_reduce_seconds(parameters, bytes_per_parameter, ranks, link_gigabits):
    """Check ``fn(parameters, bytes_per_parameter, ranks, link_gigabits) -> seconds``, of a link in Gb/s."""
    giga = 1e9
    return 2 * (ranks - 1) / ranks * parameters * bytes_per_parameter / (link_gigabits * giga / 8)


@paper_problem(
    "Exercise 5",
    cases=[
        ("all_reduce", 8, 2**30, 8203.9e-6), ("all_reduce", 2, 2**20, 1e-4), ("all_gather", 4, 2**24, 1e-3),
        ("reduce_scatter", 8, 2**24, 1e-3), ("all_to_all", 3, 2**24, 1e-3), ("broadcast", 8, 2**24, 1e-3),
        ("reduce", 4, 2**24, 1e-3),
    ],
    slips={
        "gigabits": "giga = 1e9  ->  giga = 1e9 / 8",
        "gibi": "giga = 1e9  ->  giga = 2**30",
        "bytes-per-second": "giga = 1e9  ->  giga = 1",
        "swapped": "return algbw, algbw * factor  ->  return algbw * factor, algbw",
        "divided": "algbw * factor  ->  algbw / factor",
        "one-factor": "busbw_factor(op,  ->  busbw_factor('all_reduce',",
        "gather-factor": "busbw_factor(op,  ->  busbw_factor('all_gather',",
        "no-factor": "busbw_factor(op,  ->  busbw_factor('broadcast',",
    },
    units=["GB/s algbw", "GB/s busbw"],
    hints=HINTS["bandwidths"],
)
def bandwidths(op, ranks, size, seconds):
    """Check ``fn(op, ranks, size, seconds) -> (algbw, busbw)`` in GB/s, of a size in bytes."""
    giga = 1e9
    factor = busbw_factor(op, ranks)
    algbw = size / seconds / giga
    return algbw, algbw * factor


@paper_problem(
    "Exercise 6",
    cases=[(2e9, 8, 900), (1e9, 4, 600), (5e8, 16, 1800)],
    slips={
        "directions": "both_directions / 2  ->  both_directions",
        "shard": [
            "(ranks - 1)  ->  (ranks - 1) / ranks",
            {"(ranks - 1)": "(ranks - 1) / ranks", "both_directions / 2": "both_directions"},
        ],
        "own-shard": "(ranks - 1)  ->  ranks",
        "all-reduce": "(ranks - 1)  ->  2 * (ranks - 1)",
        "bits": "both_directions / 2  ->  both_directions / 2 / 8",
    },
    units=["s"],
    hints=HINTS["all_gather_seconds"],
)
def all_gather_seconds(shard, ranks, both_directions):
    """Check ``fn(shard, ranks, both_directions) -> seconds``, of a shard in bytes and a bandwidth in GB/s."""
    return (ranks - 1) * shard / (both_directions / 2 * 1e9)
