"""Lessons run with other world sizes than the one their outputs were made with (nbval compares those).

Each runs once: with 3 ranks, among which little divides evenly, or with 2 where nothing is divided. ``--thorough``
runs each with both.
"""

from __future__ import annotations

from pathlib import Path

import papermill
import pytest
from conftest import ROOT

LESSONS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
UNDIVIDED = {"00", "01", "05"}  # lessons that give no rank a share of a tensor or of the data

pytestmark = pytest.mark.guard(600)


def run(lesson: Path, world_size: int, folder: Path) -> None:
    parameters = papermill.inspect_notebook(lesson)
    if "world_size" not in parameters:
        pytest.fail(f"{lesson.name} has no parameter world_size")
    papermill.execute_notebook(
        lesson, folder / lesson.name, parameters={"world_size": world_size}, cwd=lesson.parent,
        progress_bar=False, execution_timeout=300,
    )


def test_there_are_lessons():
    assert LESSONS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world_size" in metafunc.fixturenames:
        both = metafunc.config.getoption("thorough")
        runs = [(path, n) for path in LESSONS for n in (2, 3) if both or (n == 2) == (path.name[:2] in UNDIVIDED)]
        metafunc.parametrize(("lesson", "world_size"), runs, ids=[f"{path.stem}-{n}" for path, n in runs])


def test_lesson_runs(lesson: Path, world_size: int, tmp_path: Path):
    run(lesson, world_size, tmp_path)
