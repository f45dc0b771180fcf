"""Spans of ranks side by side; the log adds up parts by step; a tool's cost is a ratio, and all see as many steps."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import pytest

from course_utils import launch
from course_utils.step_log import LateRank, StepLog, all_inside, longest, side_by_side, slowdown, spans_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


def test_parts_belong_to_their_step_and_add_up():
    log = StepLog()
    for parts in (("data", "forward"), ("data", "forward", "forward")):
        for part in parts:
            with log.part(part):
                pass
        log.end_step()
    assert [list(step) for step in log.steps] == [["data", "forward"]] * 2
    assert all(seconds >= 0 for step in log.steps for seconds in step.values())
    assert list(log.mean(skip=1)) == ["data", "forward"]
    assert log.mean(skip=1)["data"] == log.steps[1]["data"]
    assert log.mean(skip=2) == {}


def test_spans_of_a_step_keep_their_order_and_add_up_to_its_parts():
    log = StepLog(synchronize=True)
    for _ in range(2):
        for part in ("copies", "wait", "copies"):
            with log.part(part):
                pass
        log.end_step()
    for step, spans in zip(log.steps, log.spans, strict=True):
        assert [part for part, *_ in spans] == ["copies", "wait", "copies"]
        assert all(a[2] <= b[1] for a, b in zip(spans, spans[1:], strict=False))
        assert step["copies"] == pytest.approx(sum(end - start for part, start, end in spans if part == "copies"))


def test_a_tool_is_entered_once_a_round_and_the_first_of_two_steps_warms_up():
    entered, steps = [], []

    @contextmanager
    def tool():
        entered.append(len(steps))
        yield

    ratios = slowdown(lambda: steps.append(sum(range(1000))), {"tool": tool}, rounds=3)
    assert list(ratios) == ["tool"] and ratios["tool"] > 0
    assert entered == [3, 7, 11] and len(steps) == 13


def at_work(folder: str, late: int) -> list[int]:
    """For each step how many other ranks were at their gradients when this rank was let go."""
    disk, seen = LateRank(folder, late), []
    for step in range(3):
        disk.hold(step)
        seen.append(len(list(Path(folder).glob(f"{step}-*.reached"))))
        disk.reached(step)
    return seen


def test_the_late_rank_goes_on_when_all_others_are_at_their_gradients(tmp_path: Path):
    assert launch(at_work, str(tmp_path), 1, world_size=3)[1] == [2, 2, 2]


def first():
    pass


def second():
    pass


def test_spans_of_ranks_stand_side_by_side():
    runs = launch(spans_of, first, second, world_size=2)
    assert [[name for name, *_ in spans] for spans in runs] == [["first", "second"]] * 2
    assert all(start <= end for spans in runs for _, start, end in spans)
    alone, together = [[("a", 5.0, 7.0)]], [[("a", 1.0, 2.0), ("b", 2.0, 5.0)], [("a", 1.5, 3.0), ("b", 3.0, 4.0)]]
    assert side_by_side(alone=alone, together=together) == {
        "alone": [("a", 0.0, 2.0)],
        "rank 0": [("a", 0.0, 1.0), ("b", 1.0, 4.0)],
        "rank 1": [("a", 0.5, 2.0), ("b", 2.0, 3.0)],
    }
    assert longest(together, "b") == 3.0
    assert all_inside(together, "a") and not all_inside([[("a", 0.0, 1.0)], [("a", 1.0, 2.0)]], "a")
