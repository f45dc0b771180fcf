"""Where a rank's time went, from the events of its trace: the functions that lesson 13 builds, as tests use them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from .loading import Event, Trace

__all__ = [
    "Spans", "aligned", "breakdown", "ending_together", "kind", "last_to_arrive", "length", "matched", "merge",
    "numbered", "spans",
]

Spans = list[tuple[float, float]]
Group = tuple[str, tuple[int, ...]]


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

    Raises
    ------
    ValueError
        The trace holds no events.
    """
    if not trace.events:
        raise ValueError(
            f"the trace of rank {trace.rank} holds no events: was it exported while the schedule waited? Export it in "
            "on_trace_ready, with repeat=1 (lesson 13)"
        )
    found: dict[str, Spans] = {"compute": [], "communication": [], "copy": [], "other": []}
    for event in trace.events:
        found[kind(event, trace.on_gpu)].append((event.start, event.end))
    compute, communication = merge(found["compute"]), merge(found["communication"])
    either = merge(compute + communication)
    busy = merge(either + found["copy"])
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


def _group(event: Event, trace: Trace) -> Group | None:
    """The process group of a call: its name and, as far as they are known, its ranks; None where there is but one.

    NCCL's kernels say it; gloo's calls do not.
    """
    name = event.args.get("Process Group Name")
    if name is None:
        return None
    written = str(event.args.get("Process Group Ranks", "..."))  # long lists are cut in the middle
    ranks = () if "..." in written else tuple(int(rank) for rank in re.findall(r"\d+", written))
    return str(name), trace.groups.get(str(name), ranks)


def numbered(trace: Trace) -> dict[tuple[Group | None, str, int], Event]:
    """The rank's collectives, each by its group, its name and how many of both came before."""
    found: dict[tuple[Group | None, str, int], Event] = {}
    calls: Counter[tuple[Group | None, str]] = Counter()
    for event in trace.events:
        if kind(event, trace.on_gpu) == "communication":
            call = _group(event, trace), event.name
            found[*call, calls[call]] = event
            calls[call] += 1
    return found


def _refuse_unnamed(trace: Trace, calls: Iterable[tuple[Group | None, str, int]]) -> None:
    several = {frozenset(ranks) for ranks in trace.groups.values() if len(ranks) > 1}
    if len(several) > 1 and any(group is None for group, *_ in calls):
        raise ValueError(
            f"rank {trace.rank} is in {len(several)} process groups, and its trace does not say which call belongs to "
            "which (NCCL's kernels say it, gloo's calls do not): calls of different groups would be taken for one"
        )


def matched(ranks: Sequence[Trace]) -> list[list[Event | None]]:
    """For each collective its event on every rank: in a group, the n-th call of a name is the same one on all ranks.

    A rank that is not in the group has None. Calls that a rank of the group lacks are left out. Where traces are
    samples, see :func:`ending_together`.

    Raises
    ------
    ValueError
        A rank is in several process groups, and its calls do not say in which.
    """
    by_rank = [numbered(trace) for trace in ranks]
    for trace, calls in zip(ranks, by_rank, strict=True):
        _refuse_unnamed(trace, calls)
    rows = []
    for call in dict.fromkeys(call for calls in by_rank for call in calls):
        members = call[0][1] if call[0] else ()
        row = [calls.get(call) for calls in by_rank]
        there = [not members or trace.rank in members for trace in ranks]
        if sum(there) > 1 and all(event or not inside for event, inside in zip(row, there, strict=True)):
            rows.append(row)
    return rows


def _waits(event: Event) -> bool:
    """Whether every rank of such a call waits for all others: not where data flow from or to one rank."""
    name = str(event.args.get("Collective name") or event.name).removeprefix("gloo:").removeprefix("nccl:")
    one_way = r"(ncclKernel_|ncclDevKernel_)?(broadcast|reduce|gather|scatter|send|recv\w*)(_(?!scatter).*)?"
    return not re.fullmatch(one_way, name, re.IGNORECASE)


def ending_together(ranks: Sequence[Trace], within: float) -> list[list[Event | None]]:
    """As :func:`matched`, but what belongs together are calls of a name that end within so many microseconds.

    For traces that lack some events. The ranks have to be on one clock.
    """
    first, *others = [list(numbered(trace).values()) for trace in ranks]
    rows: list[list[Event | None]] = []
    for event in first:
        row: list[Event | None] = [event]
        for other in others:
            ends = [e for e in other if e.name == event.name and abs(e.end - event.end) <= within]
            row += sorted(ends, key=lambda e: abs(e.end - event.end))[:1]
        if len(row) == len(ranks):
            rows.append(row)
    return rows


def last_to_arrive(rows: Sequence[Sequence[Event | None]]) -> tuple[list[int], list[float]]:
    """For each rank how often it came last, and how long the first one waited then, in microseconds.

    Parameters
    ----------
    rows : list of list of Event or None
        What :func:`matched` or :func:`ending_together` gives. Calls in which not all wait for all do not count.
    """
    ranks = len(rows[0]) if rows else 0
    times, waited = [0] * ranks, [0.0] * ranks
    for row in rows:
        starts = {place: event.start for place, event in enumerate(row) if event and _waits(event)}
        if starts:
            late = max(starts, key=starts.__getitem__)
            times[late] += 1
            waited[late] += starts[late] - min(starts.values())
    return times, waited


def aligned(ranks: Sequence[Trace]) -> list[Trace]:
    """Put the ranks on the clock of the first: a collective that waits for all its ranks ends at one moment on them.

    Each rank is moved by the median of the differences between its ends and those of a rank with which it has calls
    in common, the first one if it can be. Ranks that no chain of such calls joins to the first keep a clock of their
    own. The traces must have all their collectives.
    """
    rows = [row for row in matched(ranks) if all(_waits(event) for event in row if event)]
    ends = [{number: row[place].end for number, row in enumerate(rows) if row[place]} for place in range(len(ranks))]
    ahead: dict[int, float] = {}
    for first in range(len(ranks)):
        joined = [] if first in ahead else [first]
        for base in joined:  # grows while it is read
            ahead.setdefault(base, 0.0)
            for place in range(len(ranks)):
                if place not in ahead and (both := ends[base].keys() & ends[place].keys()):
                    ahead[place] = ahead[base] + median(ends[place][number] - ends[base][number] for number in both)
                    joined.append(place)
    return [trace.shifted(-ahead[place]) if ahead[place] else trace for place, trace in enumerate(ranks)]
