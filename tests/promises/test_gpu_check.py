"""``gpu-check`` as far as a machine without a GPU can show it: how checks run, and each that has CPU code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from gpu.test_lessons import CELLS, NUMBERS, statements

from course_utils.traces import load

PATIENTS = '''
"""Checks of all kinds."""
import os, pathlib, subprocess, sys, time
import pytest

@pytest.mark.limit(60)
def test_fails(setting, facts):
    """It fails."""
    facts["seven"] = 7
    assert False, "seven is not eight"

@pytest.mark.limit(2)
def test_hangs(setting, facts):
    """It hangs, with a process in a session of its own."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    pathlib.Path(setting.folder, "pid").write_text(str(other.pid))
    print("about to wait", flush=True)
    time.sleep(600)

@pytest.mark.limit(60)
def test_dies(setting, facts):
    """It dies."""
    os.abort()

@pytest.mark.limit(60)
def test_fine(setting, facts):
    """It is fine."""
    facts["lies in"] = "/home/ada/secret"
'''
GPU_ONLY = {"two_ranks_one_gpu", "batches", "memory_snapshot", "resume"}

pytestmark = pytest.mark.guard(900)


def gpu_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools", "gpu-check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment, timeout=850)


def stored(folder: Path) -> dict:
    return json.loads((folder / "gpu_check.json").read_text(encoding="utf-8"))


def test_without_a_gpu_it_ends_with_one_sentence_and_writes_nothing(tmp_path: Path):
    done = gpu_check("--out", str(tmp_path / "found"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and not (tmp_path / "found").exists()
    assert done.stderr == "PyTorch sees no GPU here, and gpu-check is for machines with one: nothing was run.\n"


def test_a_check_that_fails_hangs_or_dies_is_named_and_the_others_run(tmp_path: Path):
    checks = tmp_path / "checks"
    checks.mkdir()
    for name in ("__init__.py", "conftest.py", "kit.py"):
        shutil.copy(ROOT / "tests" / "gpu" / name, checks)
    (checks / "test_patients.py").write_text(PATIENTS)
    command = [sys.executable, "-m", "pytest", checks, f"--rootdir={checks}", "--on=cpu", f"--out={tmp_path / 'out'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    report = stored(tmp_path / "out")
    fails, hangs, dies, fine = report["checks"]
    assert done.returncode == 1 and report["complete"]
    assert (fails["status"], fails["facts"]) == ("failed", {"seven": 7}) and "seven is not eight" in fails["reason"]
    assert (hangs["status"], hangs["reason"]) == ("timed out", "stopped after 6 s; it printed last: about to wait")
    assert dies["status"] == "failed" and "its process ended with SIGABRT" in dies["reason"]
    assert (fine["status"], fine["facts"]) == ("passed", {"lies in": "<path>"})
    other = Path("/proc", (tmp_path / "out" / "pid").read_text(), "stat")
    assert not other.exists() or other.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("lesson", CELLS)
def test_cells_stand_in_their_lesson_once(lesson: str):
    for wanted, _, first in CELLS[lesson]:
        assert statements(lesson, wanted, first)[2]


def test_every_check_that_can_runs_on_the_cpu(tmp_path: Path, pytestconfig: pytest.Config):
    """Of the cells of lessons, which their notebooks run too, those of one; --thorough runs all."""
    others = set() if pytestconfig.getoption("thorough") else {f"cells_{number}" for number in NUMBERS[:-1]}
    texts = [path.read_text() for path in ROOT.glob("tests/gpu/test_*.py")]
    checks = {name for text in texts for name in re.findall(r"^def test_(\w+)\(", text, re.M)} - {"cells", "lesson"}
    checks |= {f"cells_{number}" for number in NUMBERS} - others
    done = gpu_check("--on", "cpu", "--out", str(tmp_path), "--only", *sorted(checks))
    report = stored(tmp_path)
    found = {check["name"]: check for check in report["checks"]}
    assert done.returncode == 0 and report["complete"] and report["machine"]["torch"], done.stdout
    skipped = {name for name, check in found.items() if check["status"] == "skipped"}
    assert found.keys() == checks
    assert skipped - {"c_program", "tracer", "cells_03"} == GPU_ONLY  # these want headers and a compiler
    assert found["train_program"]["facts"]["steps"] == [2, 4, 6, 8]
    trace, = load(tmp_path / "trace.json.gz")
    assert len(trace.steps) == 3 and "rank 1" in found["launcher"]["facts"]["rank_that_fails"]
    cells = [cell for name in found if name.startswith("cells_") for cell in found[name]["facts"].get("cells", [])]
    assert cells and any("equal to one process" in line for cell in cells for line in cell.get("printed", []))
