"""The exercises on profiling: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from exercise_cases import ExerciseTests

from course_utils import traces
from course_utils.traces import kind, length, matched, merge, spans
from lessons.profiling import check as profiling

pytestmark = pytest.mark.guard(60)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

# ------------------------------------------------------------------------------------------------ who is late

AHEAD = "median(row[rank].end - row[0].end for row in rows)"
LAST, WAIT = "last = starts.index(max(starts))", "max(starts) - min(starts)))"


def of_all_ranks(ranks):
    """Which rank came last how often, and the whole wait for it, as in the lesson."""
    return list(zip(*traces.last_to_arrive(matched(traces.aligned(ranks))), strict=True))


def of_each_name(ranks):
    found = {row[0].name: [event.start for event in row] for row in matched(traces.aligned(ranks))}
    return [(starts.index(max(starts)), max(starts) - min(starts)) for starts in found.values()]


WRONG["late"] = {
    "form": [
        lambda ranks: traces.last_to_arrive(matched(traces.aligned(ranks))),
        {"found.append((last, max(starts) - min(starts)))": "found.append(last)"},
        "found.append((last,  ->  found.append((f'rank {last}',",
        "return found  ->  return",
    ],
    "each": [of_all_ranks, of_each_name, {"rows = matched(ranks)": "rows = matched(ranks)[1:]"}],
    "first": [
        "starts.index(max(starts))  ->  starts.index(min(starts))",
        {LAST: "lengths = [event.end - event.start for event in row]\nlast = lengths.index(max(lengths))"},
    ],
    "wait": [
        {WAIT: "row[last].end - row[last].start))"},
        {WAIT: "row[0].end - min(starts)))", "event.start - clock": "event.start"},
        {WAIT: "max(starts) - sorted(starts)[-2] + 1))"},
        {WAIT: "sum(max(starts) - start for start in starts) / len(starts)))"},
        {WAIT: "(max(starts) - min(starts)) / 1e3))"},
    ],
    "clocks": [
        "event.start - clock  ->  event.start",
        {"starts.index(max(starts))": "starts.index(max(starts))\nstarts = [event.start for event in row]"},
    ],
    "clocks-added": "event.start - clock  ->  event.start + clock",
    "clocks-by-starts": [
        {AHEAD: "median(row[rank].start - row[0].start for row in rows)"},
        {AHEAD: "rows[0][rank].start - rows[0][0].start"},
        {AHEAD: "ranks[rank].events[0].start - ranks[0].events[0].start"},
    ],
    "value": "max(starts))  ->  sorted(starts)[len(starts) // 2])",
    "error": "(ranks))]  ->  (3))]",
}


def by_length(ranks):
    """Where all leave together, the shortest call belongs to the last rank, whatever the clocks."""
    found = []
    for row in matched(ranks):
        lengths = [event.end - event.start for event in row]
        found.append([np.argmin(lengths), torch.tensor(max(lengths) - min(lengths), dtype=torch.float64)])
    return found


def with_the_package(ranks):
    rows = ([event.start for event in row] for row in matched(traces.aligned(ranks)))
    return tuple((max(range(len(row)), key=row.__getitem__), max(row) - min(row)) for row in rows)


def in_an_array(ranks):
    """The clocks by the last collective alone."""
    times = np.array([[(event.start, event.end) for event in row] for row in matched(ranks)])
    starts = times[..., 0] - times[-1, :, 1]
    return list(zip(starts.argmax(1).tolist(), np.ptp(starts, axis=1).tolist(), strict=True))


RIGHT["late"] = {
    "by length": by_length,
    "with the package": with_the_package,
    "in an array": in_an_array,
    "the mean of the clocks": {AHEAD: "sum(row[rank].end - row[0].end for row in rows) / len(rows)"},
}

# ------------------------------------------------------------------------------------------------ exposed communication

WHICH = 'if what in ("compute", "communication"):'
OPEN = 'running["communication"] > 0 and running["compute"] == 0'
KIND = "kind(event, trace.on_gpu)"


def each_pair(trace):
    """All communication, less what each event of compute covers of each event."""
    of = {what: [e for e in trace.events if kind(e, trace.on_gpu) == what] for what in ("communication", "compute")}
    total = length(spans(trace, "communication"))
    for event in of["communication"]:
        for other in of["compute"]:
            total -= max(0, min(event.end, other.end) - max(event.start, other.start))
    return total


def durations(trace):
    return sum(e.end - e.start for e in trace.events if kind(e, trace.on_gpu) == "communication")


def copies_cover(trace):
    return length(spans(trace, "communication", "compute", "copy")) - length(spans(trace, "compute", "copy"))


def ends_as_they_come(trace):
    """What lies inside another event cuts its end off."""
    of = {"communication": [], "compute": []}
    for event in trace.events:
        rows = of.get(kind(event, trace.on_gpu), [])
        if rows and event.start <= rows[-1][1]:
            rows[-1] = (rows[-1][0], event.end)
        else:
            rows.append((event.start, event.end))
    return length(merge(of["communication"] + of["compute"])) - length(of["compute"])


def idle_too(trace):
    events = [e for e in trace.events if kind(e, trace.on_gpu) in ("compute", "communication")]
    return max(e.end for e in events) - events[0].start - length(spans(trace, "compute"))


WRONG["exposed"] = {
    "form": ["return total  ->  return {'exposed': total}", "return total  ->  print(total)"],
    "all-communication": [f"{OPEN}  ->  running['communication'] > 0", durations],
    "overlap": 'running["compute"] == 0  ->  running["compute"] > 0',
    "counted-twice": [
        {"total += moment - before": 'total += running["communication"] * (moment - before)'},
        lambda trace: durations(trace) - traces.breakdown(trace)["overlap"],
        each_pair,
    ],
    "idle": [idle_too, lambda trace: traces.breakdown(trace)["total"] - traces.breakdown(trace)["compute"]],
    "copies": [
        copies_cover,
        {KIND: f'{KIND}.replace("copy", "communication")'},
    ],
    "on-gpu": [f"{KIND}  ->  kind(event, True)", f"{KIND}  ->  kind(event, False)"],
    "host": [
        {KIND: f'{KIND}\nwhat = "communication" if what == "communication" else "compute"'},
        {KIND: f'{KIND}.replace("other", "compute")'},
    ],
    "intervals": [
        "running[what] += change  ->  running[what] = max(change, 0)",
        ends_as_they_come,
        "return total  ->  return total / 1e3",
    ],
    "error": "event.start, 1, what  ->  event.begin, 1, what",
}


def by_hand_sets(trace):
    """What is left of each merged communication after each merged compute has been cut out."""
    left = spans(trace, "communication")
    for start, end in spans(trace, "compute"):
        pieces = [(a, min(b, start)) for a, b in left] + [(max(a, end), b) for a, b in left]
        left = [(a, b) for a, b in pieces if a < b]
    return length(left)


def by_lengths_of_unions(trace):
    both = [(e.start, e.end) for e in trace.events if kind(e, trace.on_gpu) in ("compute", "communication")]
    return torch.tensor(length(merge(both)) - length(spans(trace, "compute")), dtype=torch.float64)


def moment_by_moment(trace):
    """Between each two moments at which something changes: who is there?"""
    of = {what: spans(trace, what) for what in ("communication", "compute")}
    moments = sorted({moment for rows in of.values() for row in rows for moment in row})
    there = {
        what: {a for a, b in pairwise(moments) if any(s <= a and b <= e for s, e in rows)} for what, rows in of.items()
    }
    alone = there["communication"] - there["compute"]
    return np.float64(sum(b - a for a, b in pairwise(moments) if a in alone))


RIGHT["exposed"] = {
    "sets cut by hand": by_hand_sets,
    "lengths of unions": by_lengths_of_unions,
    "moment by moment": moment_by_moment,
    "ends before starts": "(event.start, 1, what), (event.end, -1, what)  ->  "
    "(event.end, -1, what), (event.start, 1, what)",
}


class TestProfilingExercises(ExerciseTests):
    checks = profiling
    WRONG = WRONG
    RIGHT = RIGHT

    # what the checks measure

    def test_the_edited_recording_keeps_the_order_of_its_collectives(self):
        pair, right = profiling._recorded_pair()
        assert len(right) == 404 and {rank for rank, _ in right} == {0, 1} and min(wait for _, wait in right) > 1
        for trace in pair:
            calls = [event for event in trace.events if kind(event, trace.on_gpu) == "communication"]
            assert all(before.end <= after.start for before, after in pairwise(calls))
        assert all(one.args == other.args for one, other in matched(pair))

    def test_a_failed_case_of_exposed_repeats_and_shows_its_events(self):
        def whole_numbers(trace):
            return traces.breakdown(trace)["exposed"] + (len(trace.events) == 8)

        first, second = (str(self.refusal("exposed", whole_numbers)) for _ in range(2))
        assert first == second and "random case 0" in first
        assert len(re.findall(r"^ +\d+ to +\d+ us  \S", first, re.MULTILINE)) == 8
