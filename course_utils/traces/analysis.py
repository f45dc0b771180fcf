"""Where a rank's time went, from the events of its trace: the functions that lesson 13 builds, as tests use them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from .loading import Event, Trace

__all__ = [
    "Spans", "aligned", "breakdown", "ending_together", "kind", "last_to_arrive", "length", "matched", "merge",
    "numbered", "spans",
]

Spans = list[tuple[float, float]]


def kind(event: Event, on_gpu: bool) -> str:
    """Say what an event is: compute, communication, copy, or other.

    Parameters
    ----------
    event : Event
    on_gpu : bool
        Whether the trace has a GPU's work. Then operators on the CPU only start it.
    """
    if event.name.startswith(("nccl", "gloo:")) and (event.category == "kernel" or not on_gpu):
        return "communication"
    if event.category in ("gpu_memcpy", "gpu_memset"):
        return "copy"
    computes = event.category == ("kernel" if on_gpu else "cpu_op")
    is_call = event.name.startswith(("c10d::", "record_param_comms"))
    return "compute" if computes and not is_call else "other"


def merge(intervals: Iterable[tuple[float, float]]) -> Spans:
    """Join intervals that overlap or touch; returns disjoint ones in order."""
    merged: Spans = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Spans) -> float:
    """Sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def spans(trace: Trace, *kinds: str) -> Spans:
    """When a rank did something of one of these kinds."""
    return merge((e.start, e.end) for e in trace.events if kind(e, trace.on_gpu) in kinds)


def breakdown(trace: Trace) -> dict[str, float]:
    """Split a rank's time, in microseconds.

    Returns
    -------
    dict of str to float
        ``total``: from the first start to the last end of what computes, communicates or copies. ``idle``: nothing of
        it. ``compute``, ``communication``: at least one event of this kind. ``overlap``: both. ``exposed``:
        communication without compute.
    """
    compute, communication = spans(trace, "compute"), spans(trace, "communication")
    either = merge(compute + communication)
    busy = spans(trace, "compute", "communication", "copy")
    overlap = length(compute) + length(communication) - length(either)
    total = busy[-1][1] - busy[0][0] if busy else 0.0
    return {
        "total": total,
        "idle": total - length(busy),
        "compute": length(compute),
        "communication": length(communication),
        "overlap": overlap,
        "exposed": length(communication) - overlap,
    }


def numbered(trace: Trace) -> dict[tuple[str, int], Event]:
    """The rank's collectives, each by its name and how many of this name came before."""
    found: dict[tuple[str, int], Event] = {}
    calls: dict[str, int] = {}
    for event in trace.events:
        if kind(event, trace.on_gpu) == "communication":
            number = calls.get(event.name, 0)
            found[event.name, number] = event
            calls[event.name] = number + 1
    return found


def matched(ranks: Sequence[Trace]) -> list[list[Event]]:
    """For each collective its event on every rank: the n-th call of a name is the same one on all of them.

    Calls that a rank lacks are left out. Where traces are samples, see :func:`ending_together`.
    """
    by_rank = [numbered(trace) for trace in ranks]
    shared = [call for call in by_rank[0] if all(call in calls for calls in by_rank)]
    return [[calls[call] for calls in by_rank] for call in shared]


def ending_together(ranks: Sequence[Trace], within: float) -> list[list[Event]]:
    """As :func:`matched`, but what belongs together are calls of a name that end within so many microseconds.

    For traces that lack some events. The ranks have to be on one clock.
    """
    first, *others = [list(numbered(trace).values()) for trace in ranks]
    rows = []
    for event in first:
        row = [event]
        for other in others:
            ends = [e for e in other if e.name == event.name and abs(e.end - event.end) <= within]
            row += sorted(ends, key=lambda e: abs(e.end - event.end))[:1]
        if len(row) == len(ranks):
            rows.append(row)
    return rows


def last_to_arrive(rows: Sequence[Sequence[Event]]) -> tuple[list[int], list[float]]:
    """For each rank how often it came last, and how long the first one waited then, in microseconds.

    Parameters
    ----------
    rows : list of list of Event
        What :func:`matched` or :func:`ending_together` gives.
    """
    ranks = len(rows[0]) if rows else 0
    times, waited = [0] * ranks, [0.0] * ranks
    for row in rows:
        starts = [event.start for event in row]
        late = starts.index(max(starts))
        times[late] += 1
        waited[late] += max(starts) - min(starts)
    return times, waited


def aligned(ranks: Sequence[Trace]) -> list[Trace]:
    """Put the ranks on the clock of the first: a collective that waits for all ranks ends at one moment on all.

    Each rank is moved by the median of the differences between its ends and those of the first rank. The traces must
    have all their collectives.
    """
    rows = matched(ranks)
    ahead = [median(row[place].end - row[0].end for row in rows) for place in range(len(ranks))]
    return [trace.shifted(-late) for trace, late in zip(ranks, ahead, strict=True)]
