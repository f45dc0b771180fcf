"""What a container refuses is not needed: namespaces, much of /dev/shm. The files that make one name what there is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from test_grade import PAPER, Desk

pytestmark = [pytest.mark.guard(240), pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")]


def contained(*command: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tests" / "contained.py", *command]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_doctor_finds_two_ranks_and_no_hosts_and_says_why():
    assert contained("unshare", "--user", "true").returncode and not contained("true").returncode
    done = contained(sys.executable, "-m", "tools", "doctor")
    assert (done.returncode, done.stderr) == (0, "") and "2 ranks, one all_reduce: [3.0, 3.0]" in done.stdout
    assert re.search(r"hosts +this \w+ \w+ .*make the network of emulated hosts", done.stdout), done.stdout


def test_ranks_of_a_hand_in_start_behind_a_fence_that_needs_no_namespace(tmp_path: Path):
    """Or grading says what keeps it from that, and runs them where that is asked for."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # pytest makes them private
    desk = Desk(tmp_path)
    desk.put("ada", desk.answered((1, PAPER)))
    command = [sys.executable, "-m", "tools", "grade", desk.folder, "--course", desk.course]
    done = contained(*command, "--json", tmp_path / "grades.json")
    if done.returncode:
        assert re.search("no way to fence them in .*(only root can|chmod o\\+x|no setpriv)", done.stderr), done.stderr
        done = contained(*command, "--json", tmp_path / "grades.json", "--no-sandbox")
    (row,) = json.loads((tmp_path / "grades.json").read_text())["rows"]
    assert row["passed"] == 2 and not row["not_graded"]


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
