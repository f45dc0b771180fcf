"""Lessons run with other world sizes than the one their outputs were made with (nbval compares those)."""

from __future__ import annotations

from pathlib import Path

import papermill
import pytest
from conftest import ROOT

LESSONS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))

pytestmark = pytest.mark.guard(600)


def run(lesson: Path, world_size: int, folder: Path) -> None:
    parameters = papermill.inspect_notebook(lesson)
    if "world_size" not in parameters:
        pytest.fail(f"{lesson.name} has no parameter world_size")
    papermill.execute_notebook(
        lesson, folder / lesson.name, parameters={"world_size": world_size}, cwd=lesson.parent,
        progress_bar=False, execution_timeout=300,
    )  # fmt: skip


def test_there_are_lessons():
    assert LESSONS


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
class TestTwoRanks:
    def test_lesson_runs(self, lesson: Path, tmp_path: Path):
        run(lesson, 2, tmp_path)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
class TestThreeRanks:
    def test_lesson_runs(self, lesson: Path, tmp_path: Path):
        run(lesson, 3, tmp_path)
