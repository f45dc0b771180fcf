"""The room of a new lesson: it builds, its check takes the solution, and nothing that exists is overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import ROOT

from tools import ToolError
from tools.author import builder
from tools.author.new import new


def test_a_new_room_builds_and_its_solution_passes_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    room = new("17", "slow_links", tmp_path)
    (tmp_path / "lessons" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))  # where kernels find the room
    assert builder.build(tmp_path) == builder.check(tmp_path) == []
    passed = "Exercise 1 passed on 2 and 3 ranks: equal to one process to 1e-12."
    assert passed in (tmp_path / "solutions" / "17_slow_links_solutions.ipynb").read_text()
    assert {path.name for path in room.iterdir()} >= {"lesson.py", "exercises.py", "answers.py", "check.py"}


@pytest.mark.parametrize(
    ("number", "topic", "says"),
    [("17", "small", "a lesson small already"), ("7", "x", "two digits")],
)
def test_a_name_that_is_taken_or_none_is_refused(tmp_path: Path, number: str, topic: str, says: str):
    new("90", "small", tmp_path)
    with pytest.raises(ToolError, match=says):
        new(number, topic, tmp_path)
