"""The exercises on profiling: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
from exercise_cases import ExerciseTests

from course_utils import traces
from course_utils.checks import profiling
from course_utils.traces import kind, length, matched, merge, spans

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

# ------------------------------------------------------------------------------------------------ MFU

RATE = "rate = tokens * len(steady) / sum(steady)"

WRONG["mfu"] = {
    "number": "return rate, 6 * parameters  ->  return 6 * parameters",
    "numbers": "return rate, 6  ->  return rate, 4",
    "typed": {RATE: f"{RATE}\nreturn 3.4e6, 0.3224", "steady = seconds[warm_up:]": "seconds, warm_up = "
              "(9.0, 2.1, 1.0, 1.6, 1.1), 2\ntokens = 4_194_304\nsteady = seconds[warm_up:]"},
    "warm-up": ["seconds[warm_up:]  ->  seconds", "seconds[warm_up:]  ->  seconds[0:]"],
    "one-gpu": ["(ranks * peak_tflops * 1e12)  ->  (peak_tflops * 1e12)", "return rate,  ->  return rate / ranks,"],
}


def in_flop(seconds, warm_up, tokens, ranks, parameters, peak_tflops):
    count, time = len(seconds) - warm_up, sum(seconds[warm_up:])
    done, possible = 6e-12 * parameters * tokens * count, peak_tflops * ranks * time
    return np.array([tokens * count / time, done / possible])


def by_the_mean_step(seconds, warm_up, tokens, ranks, parameters, peak_tflops):
    step = torch.tensor(seconds[warm_up:], dtype=torch.float64).mean()
    best = 3 * 2 * parameters * tokens / ranks / (peak_tflops * 1e12)
    return tokens / step, best / step


RIGHT["mfu"] = {"in FLOP": in_flop, "by the mean step": by_the_mean_step}

# ------------------------------------------------------------------------------------------------ before and after

STEPS = "count / len(trace.steps)"
NAMES = "{*counts[0], *counts[1]}"
OLD, NEW = "counts[0].get(n, 0)", "counts[1].get(n, 0)"
OUT = "return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}"


def times(before, after):
    """How long each name takes in a step, on average."""
    found = {}
    for place, trace in enumerate((before, after)):
        for event in trace.events:
            found.setdefault(event.name, [0.0, 0.0])[place] += (event.end - event.start) / len(trace.steps)
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


WRONG["changed"] = {
    "form": [
        f"{OUT}  ->  return list(pairs.items())",
        f"{OUT}  ->  return {{name: new - old for name, (old, new) in pairs.items() if old != new}}",
        f"{OUT}  ->  return {{name for name, (old, new) in pairs.items() if old != new}}",
    ],
    "names": [times, f"{STEPS}  ->  round({STEPS})"],
    "unchanged": [" if pair[0] != pair[1]  ->  ", {" if pair[0] != pair[1]": "", STEPS: "count"}],
    "per-step": [f"{STEPS}  ->  count", {STEPS: "count", NAMES: "{*counts[0]} & {*counts[1]}"}],
    "gone": [f"{NAMES}  ->  counts[0]", f"{NAMES}  ->  counts[1]", f"{NAMES}  ->  {{*counts[0]}} & {{*counts[1]}}",
             f"{OLD}  ->  counts[0][n]"],
    "order": {OLD: "0", NEW: OLD, "(0,": f"({NEW},"},
    "outside": " if event.step is not None  ->  ",
    "one-step": {STEPS: "count", "event.step is not None": "event.step == trace.steps[0]"},
    "error": "len(trace.steps)  ->  trace.steps",
}


def one_table(before, after):
    found = defaultdict(lambda: [Fraction(0), Fraction(0)])
    for place, trace in enumerate((before, after)):
        for event in trace.of_steps(trace.steps).events:
            found[event.name][place] += Fraction(1, len(trace.steps))
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def step_by_step(before, after):
    def mean(trace, name):
        return fmean(sum(e.name == name for e in trace.of_steps([step]).events) for step in trace.steps)

    names = sorted({event.name for trace in (before, after) for event in trace.events})
    pairs = {name: np.array([mean(before, name), mean(after, name)]) for name in names}
    return Counter({name: tuple(pair) for name, pair in pairs.items() if np.ptp(pair) > 0})


RIGHT["changed"] = {"one table": one_table, "step by step": step_by_step}


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

    def test_answers_to_the_cases_of_changed_are_those_of_the_counts(self):
        for _, before, after, right in profiling._PAIRS:
            assert dict(step_by_step(before, after)) == right


