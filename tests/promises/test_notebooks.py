"""Lessons run with other world sizes than the one their outputs were made with (nbval compares those).

Each runs once as the core edition has it, without its deeper sections: with 3 ranks, among which little divides evenly,
with 2 where nothing is divided, or with 6 where fewer would take the usual 4 again. ``--thorough`` runs each with 2 and
with 3, and the deeper sections after the core.
"""

from __future__ import annotations

from pathlib import Path

import papermill
import pytest
from conftest import ROOT
from notebook_runs import run_core

LESSONS = sorted((ROOT / "notebooks").glob("[01][0-9]_*.ipynb"))  # lesson 20 has no ranks
RANKS = {
    "00": 2, "01": 2, "05": 2,  # give no rank a share of a tensor or of the data
    "12": 6,  # takes an even number from 4 on, or 4
    "16": 2, "18": 2,  # on two hosts; lesson 18 has two ranks on each
}
THOROUGH = {"16": (2, 6), "18": (2, 6)}  # others: 2 and 3
LEFT_OUT = {  # unless asked for with --thorough
    "01", "05", "13", "14",  # no rank has a part of anything: the number changes only how many lines are printed
    "19",  # its runs were on two ranks; the answers that mend them, its solutions check on 1 to 4
    "00",  # tests/promises/test_browser.py runs it through JupyterLab's menu
    "08",  # tests/lessons/test_deepspeed_lesson.py runs it without DeepSpeed
    "15",  # tests/lessons/test_ffcv_data_loading_lesson.py runs it with 3 ranks, and without FFCV
    "16",  # tests/lessons/test_multi_node_lesson.py runs it with 2 ranks, without emulated hosts and Slurm
}

pytestmark = pytest.mark.guard(600)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world_size" in metafunc.fixturenames:
        thorough = metafunc.config.getoption("thorough")
        runs = [
            (path, n) for path in LESSONS if thorough or path.name[:2] not in LEFT_OUT
            for n in sorted({RANKS.get(path.name[:2], 3), *(THOROUGH.get(path.name[:2], (2, 3)) if thorough else ())})
        ]
        metafunc.parametrize(("lesson", "world_size"), runs, ids=[f"{path.stem}-{n}" for path, n in runs])


def test_lesson_runs(lesson: Path, world_size: int, tmp_path: Path, pytestconfig: pytest.Config):
    assert "world_size" in papermill.inspect_notebook(lesson)
    run_core(lesson, tmp_path, deeper=pytestconfig.getoption("thorough"), world_size=world_size)
