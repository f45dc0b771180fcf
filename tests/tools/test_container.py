"""What a container refuses is not needed: namespaces, much of /dev/shm. The files that make one name what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.guard(240), pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")]
CORE = """
import sys; sys.path[:0] = ["tests", "."]
from pathlib import Path
from notebook_runs import run_core
run_core(Path("notebooks/00_start_here.ipynb").resolve(), Path(sys.argv[1]), deeper=False)
"""


def contained(*command: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tests" / "contained.py", *command]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_doctor_finds_two_ranks_and_no_hosts_and_says_why():
    assert contained("unshare", "--user", "true").returncode and not contained("true").returncode
    done = contained(sys.executable, "-m", "tools", "doctor")
    assert (done.returncode, done.stderr) == (0, "") and "2 ranks, one all_reduce: [3.0, 3.0]" in done.stdout
    assert re.search(r"hosts +this \w+ \w+ .*make the network of emulated hosts", done.stdout), done.stdout


def test_the_first_lesson_runs(tmp_path: Path, pytestconfig: pytest.Config):
    if not pytestconfig.getoption("thorough"):
        pytest.skip("--thorough runs it: the doctor starts ranks, too")
    done = contained(sys.executable, "-c", CORE, tmp_path)
    assert done.returncode == 0, done.stderr


def test_solutions_get_all_points_behind_a_fence_that_needs_no_namespace(tmp_path: Path):
    """Or grading says what keeps it from that, and runs them where that is asked for."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # pytest makes them private
    (tmp_path / "in" / "ada").mkdir(parents=True)
    shutil.copy(ROOT / "solutions" / "02_collectives_solutions.ipynb", tmp_path / "in" / "ada")
    command = [sys.executable, "-m", "tools", "grade", tmp_path / "in", "--json", tmp_path / "grades.json"]
    done = contained(*command)
    if done.returncode:
        assert re.search("no way to fence them in .*(only root can|chmod o\\+x|no setpriv)", done.stderr), done.stderr
        done = contained(*command, "--no-sandbox")
    (row,) = json.loads((tmp_path / "grades.json").read_text())["rows"]
    assert row["points"] == row["of"] > 0 and not row["not_graded"]


def test_images_are_made_by_the_set_up_and_start_what_there_is():
    dockerfile = (ROOT / "Dockerfile").read_text()
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
    settings = json.loads(re.sub("^ *//.*", "", text, flags=re.MULTILINE))
    options = subprocess.run([sys.executable, "tools/setup.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    for text in (dockerfile, settings["updateContentCommand"]):
        (given,) = re.findall("python3 tools/setup.py(.*)", text)
        assert {*re.findall("--[a-z]+", given)} <= {*re.findall("--[a-z]+", options.stdout)}
    assert "-m tools copy course" in dockerfile and settings["image"].endswith("3.11-bookworm")
    for opened in settings["customizations"]["codespaces"]["openFiles"]:
        assert (ROOT / Path(opened).relative_to("work")).exists()
