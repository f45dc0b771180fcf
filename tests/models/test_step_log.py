"""Spans of ranks side by side; the log adds up parts by step; a tool's cost is a ratio, and all see as many steps."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from course_utils import launch
from course_utils.step_log import LateRank, slowdown

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


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
