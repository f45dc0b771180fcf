"""A late rank is let go when all others wait for it."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle

from course_utils import launch
from course_utils.step_log import LateRank

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


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
