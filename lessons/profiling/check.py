"""Checks of the exercises on profiling, on traces whose answer is known: made up, drawn and recorded."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from statistics import median

from course_utils.check import Exercise, checked, load_hints, number, whole_number
from course_utils.check.compare import slip_of
from course_utils.traces import Event, Trace, aligned, breakdown, kind, length, load, matched, merge

from .program import speed_up

__all__ = ["HINTS", "exposed", "late", "speed_up"]

HINTS = load_hints(__file__)
_NAMES = ("gloo:all_reduce", "gloo:all_gather")

Arrivals = list[tuple[int, float]]


def _trace(rank: int, n: int, events: list[Event]) -> Trace:
    return Trace(rank, n, tuple(sorted(events, key=lambda e: (e.start, -e.end))))


def _event(
    name: str, start: float, end: float, category: str = "user_annotation", row: int = 0, step: int | None = 1
) -> Event:
    return Event(name, category, start, end, row, step, {})


# ------------------------------------------------------------------------------------------------ who is late


def _arrivals(rows: Sequence[Sequence[float]]) -> Arrivals:
    """Who came last and the wait, for each collective, from its starts on all ranks."""
    return [(starts.index(max(starts)), max(starts) - min(starts)) for starts in map(list, rows)]


def _starts(ranks: Sequence[Trace]) -> list[list[float]]:
    return [[event.start for event in row] for row in matched(ranks)]


def _ranks(n: int, seed: int, skew: float = 0) -> tuple[list[Trace], Arrivals]:
    """Collectives that end together on all ranks, on clocks up to ``skew`` microseconds apart; and the answer."""
    rng, now = random.Random(seed), 0.0
    events: list[list[Event]] = [[] for _ in range(n)]
    rows = []
    for place in range(9):
        starts = [now + 100.0 * late for late in range(n)]
        rng.shuffle(starts)
        rows.append(starts)
        now = max(starts) + 50
        for own, start in zip(events, starts, strict=True):
            own.append(_event(_NAMES[place % 3 == 2], start, now))
            own.append(_event("aten::mm", now, now + 20, "cpu_op"))
        now += 500
    clocks = [0.0] + [round(rng.uniform(-skew, skew)) for _ in range(n - 1)]
    ranks = [_trace(rank, n, own).shifted(clock) for rank, (own, clock) in enumerate(zip(events, clocks, strict=True))]
    return ranks, _arrivals(rows)


def _recorded_pair() -> tuple[list[Trace], Arrivals]:
    """A recorded rank, and a copy on another clock that starts each second all-reduce earlier and the others later.

    A start moves at most to the middle of the gap before the all-reduce, or of the all-reduce: their order stays.
    """
    one = load("tiny_all_reduces")[0].of_steps([2])
    copy, rows, before = [], [], 0.0
    for event in one.events:
        moved = event.start
        if kind(event, one.on_gpu) == "communication":
            moved = (event.start + (before if len(rows) % 2 else event.end)) / 2
            rows.append([event.start, moved])
            before = event.end
        copy.append(event._replace(start=moved))
    return [one, _trace(1, 2, copy).shifted(7e4)], _arrivals(rows)


def _late_cases() -> list[tuple[str, tuple[list[Trace], Arrivals], str | None]]:
    return [
        ("2 ranks, one clock", _ranks(2, 1), None), ("3 ranks, one clock", _ranks(3, 2), None),
        ("3 ranks, clocks that differ", _ranks(3, 3, 9e5), "clocks"),
        ("a recorded trace and an edited copy of it, clocks that differ", _recorded_pair(), "clocks"),
    ]  # fmt: skip


def _late_slips(ranks: list[Trace]) -> dict[str, list[Arrivals]]:
    """What is found with clocks left as they are, put right by the starts, or moved the wrong way."""
    starts = _starts(ranks)
    moved = zip(ranks, aligned(ranks), strict=True)
    ahead = [before.events[0].start - after.events[0].start for before, after in moved]
    by_median = [median(row[rank] - row[0] for row in starts) for rank in range(len(ranks))]
    by_first = [start - starts[0][0] for start in starts[0]]

    def less(clocks: list[float]) -> Arrivals:
        return _arrivals([[start - clock for start, clock in zip(row, clocks, strict=True)] for row in starts])

    return {
        "clocks": [less([0.0] * len(ranks))],
        "clocks-added": [less([-clock for clock in ahead])],
        "clocks-by-starts": [less(by_median), less(by_first)],
    }


def _same_arrivals(got: Arrivals, right: Arrivals) -> bool:
    return all(g[0] == r[0] and math.isclose(g[1], r[1], abs_tol=0.5) for g, r in zip(got, right, strict=True))


@checked
def late(fn: Callable) -> None:
    """Check ``fn(ranks) -> [(rank, wait), ...]``, one pair for each collective, in the order of the first rank."""
    exercise = Exercise("Exercise 1", HINTS["late"])
    for exercise.case, (ranks, right), fallback in _late_cases():
        found = exercise.call(fn, ranks)
        form = isinstance(found, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in found)
        got = [(whole_number(rank), number(wait)) for rank, wait in found] if form else []
        form = form and all(None not in pair for pair in got)
        exercise.require(form, "form", f"the function returned {str(found)[:80]}.")
        what = f"the list has {len(got)} pairs; there are {len(right)} collectives."
        exercise.require(len(got) == len(right), "each", what)
        if _same_arrivals(got, right):
            continue
        place = next(i for i in range(len(right)) if not _same_arrivals(got[i : i + 1], right[i : i + 1]))
        (rank, wait), (right_rank, right_wait) = got[place], right[place]
        starts = _starts(aligned(ranks))[place]
        key = "wait" if rank == right_rank else "first" if rank == starts.index(min(starts)) else "value"
        key = slip_of(_late_slips(ranks), functools.partial(_same_arrivals, got), fallback or key)
        expected = f"rank {right_rank}, {right_wait:,.1f} us"
        exercise.differs(key, f"collective {place} is wrong.", expected, f"rank {rank}, {wait:,.1f} us")
    print("Exercise 1 passed: the late rank and the wait of every collective, whatever the clocks say.")


# ------------------------------------------------------------------------------------------------ exposed communication

_WORK = {  # name and category of an event
    "compute": ("gemm", "kernel"), "communication": ("ncclDevKernel_AllReduce_Sum_f32", "kernel"),
    "copy": ("Memcpy HtoD", "gpu_memcpy"), "launch": ("cudaLaunchKernel", "cuda_runtime"),
    "operator": ("aten::mm", "cpu_op"), "call": ("c10d::allreduce_", "cpu_op"),
    "gloo": ("gloo:all_reduce", "user_annotation"),
}  # fmt: skip


def _of(*work: tuple[str, float, float]) -> Trace:
    """A trace of such work, each event with its start and end."""
    return _trace(0, 2, [_event(_WORK[w][0], a, b, _WORK[w][1], row=7 + i % 3) for i, (w, a, b) in enumerate(work)])


def _drawn(seed: int) -> Trace:
    rng = random.Random(seed)
    starts = [(rng.choice(("compute", "communication", "copy")), rng.randrange(60)) for _ in range(8)]
    return _of(*((what, start, start + rng.randrange(5, 30)) for what, start in starts))


def _exposed_cases() -> list[tuple[str, Trace]]:
    c, n = "compute", "communication"
    return [
        ("nothing overlaps", _of((c, 0, 10), (n, 15, 25))),
        ("operators that start kernels", _of(("operator", 0, 12), ("launch", 1, 2), (n, 5, 25), (c, 22, 24))),
        ("a rank on a CPU", _of(("operator", 0, 8), ("call", 3, 15), ("gloo", 4, 20), ("operator", 18, 22))),
        ("compute inside communication", _of((n, 0, 30), (c, 5, 10), (c, 10, 15))),
        ("nested compute", _of((c, 0, 20), (c, 5, 10), (n, 8, 30))),
        ("two communications at a time", _of((n, 0, 20), (n, 10, 30), (c, 12, 14))),
        ("a copy beside communication", _of((c, 0, 1), (n, 3, 20), ("copy", 5, 25))),
        ("no communication", _of((c, 0, 20))),
        *((f"random case {seed}", _drawn(seed)) for seed in range(30)),
        ("recorded trace host_bound", load("host_bound")[0]),
    ]


def _exposed_slips(trace: Trace) -> dict[str, list[float]]:
    """The times that usual mistakes give."""
    times = breakdown(trace)

    def spans(kinds: Sequence[str], on_gpu: bool = trace.on_gpu) -> list[tuple[float, float]]:
        return [(e.start, e.end) for e in trace.events if kind(e, on_gpu) in kinds]

    def without(shown: list, hidden: list) -> float:
        return length(merge(shown + hidden)) - length(merge(hidden))

    def pairwise(shown: list, hidden: list) -> float:
        return length(shown) - sum(max(0.0, min(b, d) - max(a, c)) for a, b in shown for c, d in hidden)

    talk, compute, copy = spans(["communication"]), spans(["compute"]), spans(["copy"])
    extent = max(b for _, b in talk + compute) - min(a for a, _ in talk + compute)
    elsewhere = [spans([what], not trace.on_gpu) for what in ("communication", "compute")]
    return {
        "all-communication": [times["communication"], length(talk)],
        "overlap": [times["overlap"]],
        "counted-twice": [length(talk) - times["overlap"], pairwise(talk, compute), pairwise(merge(talk), compute)],
        "idle": [times["total"] - times["compute"], extent - times["compute"]],
        "copies": [without(talk, compute + copy), without(talk + copy, compute)],
        "on-gpu": [without(*elsewhere)],
        "host": [without(talk, spans(["compute", "copy", "other"])), without(talk, compute + spans(["other"]))],
    }


def _listing(trace: Trace) -> str:
    """The events of a short trace, a line each."""
    return "\n".join(f"  {e.start:>3.0f} to {e.end:>3.0f} us  {e.name} ({e.category})" for e in trace.events)


@checked
def exposed(fn: Callable) -> None:
    """Check ``fn(trace) -> float``: microseconds in which a rank communicates and computes nothing."""
    exercise = Exercise("Exercise 2", HINTS["exposed"])
    for exercise.case, trace in _exposed_cases():
        got, right = number(exercise.call(fn, trace)), breakdown(trace)["exposed"]
        exercise.require(got is not None, "form", "the function did not return a number.")
        if not math.isclose(got, right, rel_tol=1e-6, abs_tol=1e-3):
            same = functools.partial(math.isclose, got, rel_tol=1e-6, abs_tol=1e-3)
            key = slip_of(_exposed_slips(trace), same, "intervals")
            events = f"\n\n{_listing(trace)}" if len(trace.events) < 10 else ""
            exercise.differs(key, "the time is wrong.", f"{right:,.3f} us", f"{got:,.3f} us{events}")
    print(f"Exercise 2 passed: {right:,.0f} us exposed in the recorded trace.")
