"""``gpu-check`` as far as a machine without a GPU can show it: the kit itself, and every check that has CPU code."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, missing

from course_utils.gpu_check import CHECKS, REPORT, TRACE, Check, faults, measured, run
from course_utils.gpu_check.lesson_cells import CELLS, statements
from course_utils.gpu_check.report import scrub
from course_utils.gpu_check.runner import _Starter
from course_utils.traces import load
from lessons.nccl import c_programs

PATIENTS = '''
import os, pathlib, subprocess, sys, time
from course_utils.gpu_check import CheckError, Skip, measured

def fine(setting):
    return {"two": 2, "length": measured(1.0, "m", "with a ruler"), "lies in": os.path.expanduser("~/secret/file")}

def fails(setting):
    raise CheckError("seven is not eight", {"seven": 7})

def raises(setting):
    return {"x": [][1]}

def skips(setting):
    raise Skip("there is no moon tonight")

def hangs(setting):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    pathlib.Path(setting.folder, "pid").write_text(str(other.pid))
    print("about to wait", flush=True)
    time.sleep(600)

def dies(setting):
    print("the last words", flush=True)
    os.abort()

def no_facts(setting):
    return {"x": object()}
'''
NAMES = ("fine", "fails", "raises", "skips", "hangs", "dies", "no_facts")
GPU_ONLY = {"two_ranks_one_gpu", "batches", "memory_snapshot", "resume"}
COMPILED = {"c_program", "tracer"}

pytestmark = pytest.mark.guard(600)


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Check]:
    """Checks of all kinds, by name."""
    (tmp_path / "gpu_check_patients.py").write_text(PATIENTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    limits = {"hangs": 4}
    return {n: Check(n, f"It {n}.", f"gpu_check_patients:{n}", limits.get(n, 100)) for n in NAMES}


def stored(folder: Path) -> dict:
    return json.loads((folder / REPORT).read_text(encoding="utf-8"))


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def gpu_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "course_utils", "gpu-check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment, timeout=550)


def test_without_a_gpu_it_ends_with_one_sentence_and_writes_nothing(tmp_path: Path):
    done = gpu_check("--out", str(tmp_path / "found"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "PyTorch sees no GPU here, and gpu-check is for machines with one: nothing was run.\n"
    assert not (tmp_path / "found").exists()


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path):
    done = gpu_check("--on", "cpu", "--only", "copys", "--out", str(tmp_path / "found"))
    assert done.returncode == 2 and "no check copys" in done.stderr and "copies" in done.stderr
    assert not (tmp_path / "found").exists()


def test_a_check_that_fails_hangs_or_dies_is_named_and_the_others_run(patients, tmp_path: Path, capsys):
    report = run([*patients.values(), patients["fine"]], "cpu", 2, tmp_path)
    assert [c["name"] for c in report["checks"]] == [*NAMES, "fine"]
    by_name = {check["name"]: check for check in report["checks"]}
    assert {name: by_name[name]["status"] for name in NAMES} == {
        "fine": "passed", "fails": "failed", "raises": "failed", "skips": "skipped", "hangs": "timed out",
        "dies": "failed", "no_facts": "failed",
    }
    assert by_name["fails"]["facts"] == {"seven": 7} and "seven is not eight" in by_name["fails"]["reason"]
    assert by_name["raises"]["reason"].startswith("IndexError: list index out of range")
    assert by_name["skips"]["reason"] == "there is no moon tonight"
    assert by_name["hangs"]["reason"] == "stopped after 4 s; it printed last: about to wait"
    assert by_name["dies"]["reason"].startswith("its process ended with SIGABRT")
    assert "TypeError" in by_name["no_facts"]["reason"]
    assert faults(report) == [] and stored(tmp_path) == report and report["complete"]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(NAMES) + 1 and said[4].startswith("TIMED OUT") and "hangs" in said[4]


def test_a_check_that_is_over_before_anybody_looks_is_not_waited_for(patients, tmp_path: Path):
    class ReadLate:
        """What the starter of checks says, read when the check is over."""

        def readline(self) -> bytes:
            end = time.monotonic() + 60
            while not (tmp_path / "over").exists():
                assert time.monotonic() < end
                time.sleep(0.05)
            time.sleep(0.5)
            return answers.readline()

        def fileno(self) -> int:
            return answers.fileno()

    starter = _Starter()
    answers, starter._process.stdout = starter._process.stdout, ReadLate()
    values = ("gpu_check_patients:fine", "cpu", "2", str(tmp_path), str(tmp_path / "over"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    try:
        assert starter.run(str(tmp_path / "log"), environment, values, 5) == 0  # None: stopped after 5 s
    finally:
        starter.close()


def test_what_a_check_started_ends_with_it(patients, tmp_path: Path):
    run([patients["hangs"]], "cpu", 2, tmp_path)
    other = int((tmp_path / "pid").read_text())
    if not Path("/proc").exists():
        missing("/proc, where processes below others are found")
    end = time.monotonic() + 20
    while not gone(other):
        assert time.monotonic() < end, "a process of a check that was stopped is still there"
        time.sleep(0.1)


def test_checks_that_are_not_begun_in_time_are_named(patients, tmp_path: Path):
    report = run([patients["fine"]], "cpu", 2, tmp_path, seconds=5)
    assert report["checks"][0]["status"] == "timed out"
    assert report["checks"][0]["reason"] == "not begun: the time for all checks was over"
    assert faults(report) == []


def test_an_interruption_loses_nothing_that_was_found(patients, tmp_path: Path):
    code = (
        "from pathlib import Path; from course_utils.gpu_check import Check, run\n"
        f"run([Check(n, 'It.', f'gpu_check_patients:{{n}}', 200) for n in ('fine', 'hangs')], 'cpu', 2, "
        f"Path({str(tmp_path / 'out')!r}))"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path})
    end = time.monotonic() + 120
    while not (tmp_path / "out" / "pid").exists() and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    report = stored(tmp_path / "out")
    assert [(c["name"], c["status"]) for c in report["checks"]] == [("fine", "passed")]
    assert not report["complete"] and faults(report) == []
    assert gone(int((tmp_path / "out" / "pid").read_text()))


def test_names_of_host_user_and_folders_are_taken_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("course_utils.gpu_check.report._names", lambda: ["gpu-box7", "ada"])
    monkeypatch.setattr("course_utils.gpu_check.report._folders", lambda: [("/srv/course", "<course>")])
    given = {"a": ["gpu-box7:12 NCCL WARN", "/srv/course/native/x.c and /tmp/abc-1/y"], "ada": "adam optimises"}
    wanted = {"a": ["<name>:12 NCCL WARN", "<course>/native/x.c and <path>"], "<name>": "adam optimises"}
    assert scrub(given) == wanted and scrub(wanted) == wanted


def test_a_measurement_has_a_place_for_each_value():
    assert measured(1.23456, "s", "by clock") == {"value": 1.235, "unit": "s", "how": "by clock"}
    assert measured([1.0], "s", "by clock", [8], "bytes")["at"] == [8]
    with pytest.raises(ValueError, match="as many places"):
        measured([1.0, 2.0], "s", "by clock", [8], "bytes")


def edit(report: dict, where: str, value: object) -> dict:
    changed = copy.deepcopy(report)
    *way, last = where.split(".")
    part = changed
    for key in way:
        part = part[int(key) if isinstance(part, list) else key]
    part[last] = value
    return changed


@pytest.mark.parametrize(
    ("where", "value", "fault"),
    [
        ("schema", 2, "schema is 2"), ("on", "tpu", "on is 'tpu'"), ("checks", {}, "not of type list"),
        ("more", 1, "which the schema has not"), ("checks.0.status", "good", "status is 'good'"),
        ("checks.0.reason", "why", "a reason is for those that did not pass"),
        ("checks.0.seconds", "1", "seconds is '1'"), ("checks.0.facts.length.unit", "", "without unit or how"),
        ("checks.0.facts.length.how", "", "without unit or how"),
        ("checks.0.facts.length.value", "1", "its value is no number"),
        ("checks.0.facts.length.value", [1.0], "a list of values without as many places"),
        ("checks.0.facts.x", [float("nan")], "is no number"),
        ("checks.0.facts.x", "/home/ada/run", "names a host, a user or a folder"),
    ],
)
def test_a_report_that_is_not_as_described_is_noticed(where: str, value: object, fault: str):
    check = {"name": "a", "what": "It.", "status": "passed", "reason": "", "seconds": 1.0,
             "facts": {"length": measured(1.0, "m", "with a ruler")}}
    good = {"schema": 1, "made_by": "a test", "on": "cpu", "complete": True, "machine": {}, "checks": [check]}
    assert faults(good) == []
    found = faults(edit(good, where, value))
    assert any(fault in line for line in found), found


def test_the_limits_of_checks_are_those_of_a_machine_with_gpus():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.limit <= 120 for check in CHECKS)


@pytest.mark.parametrize(("number", "cell"), [(n, cell) for n, cells in CELLS.items() for cell in cells])
def test_cells_of_lessons_are_found_with_what_they_need(number: str, cell):
    file, before, body = statements(number, cell)
    assert Path(file).name.startswith(number) and body and before


def test_the_kit_imports_nothing_but_torch_and_the_standard_library():
    """In a process where other packages, numpy too, cannot be imported."""
    code = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        first = name.split(".")[0]
        if first in ("numpy", "psutil", "cloudpickle", "IPython", "matplotlib", "nbformat", "yaml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=first)
sys.meta_path.insert(0, Refuse())
import pkgutil, course_utils.gpu_check as kit
for module in pkgutil.iter_modules(kit.__path__):
    importlib.import_module(f"course_utils.gpu_check.{module.name}")
for module in ("__main__", "models", "data", "traces", "transformer", "c_programs", "programs", "hardware"):
    importlib.import_module(f"course_utils.{module}")
from course_utils.ranks import record
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def on_the_cpu(folder: Path, *names: str) -> dict[str, dict]:
    done = gpu_check("--on", "cpu", "--out", str(folder), "--only", *names)
    report = stored(folder)
    reasons = [f"{c['name']}: {c['reason']}" for c in report["checks"] if c["status"] not in ("passed", "skipped")]
    assert done.returncode == 0 and not reasons, (reasons, done.stderr)
    assert faults(report) == [] and report["complete"] and report["machine"]["torch"]
    assert "no number in it says anything of a GPU" in done.stdout
    return {check["name"]: check for check in report["checks"]}


def test_every_check_of_the_kit_that_can_runs_on_the_cpu(tmp_path: Path):
    names = [check.name for check in CHECKS if not check.name.startswith("cells_")]
    found = on_the_cpu(tmp_path, *names)
    skipped = {name for name, check in found.items() if check["status"] == "skipped"}
    assert skipped - COMPILED == GPU_ONLY
    assert found["ledger"]["facts"]["operations"][0] == {"op": "all_reduce", "bytes": 8000}
    losses = found["same_losses"]["facts"]
    assert losses["DDP"] == pytest.approx(losses["one process, CPU"], abs=1e-4)
    assert found["train_program"]["facts"]["steps"] == [2, 4, 6, 8]
    trace, = load(tmp_path / TRACE)
    assert len(trace.steps) == 3 and found["profiler_trace"]["facts"]["communication_kernels"] == ["gloo:all_reduce"]
    assert "rank 1" in found["launcher"]["facts"]["rank_that_fails"]
    if skipped & COMPILED:
        missing("NCCL's headers and a C compiler")
    assert found["tracer"]["facts"]["c_program"]["calls"]["ncclAllReduce"] == 42


def test_cells_of_all_lessons_run_on_the_cpu(tmp_path: Path):
    found = on_the_cpu(tmp_path, *(f"cells_{number}" for number in CELLS))
    cells = [cell for check in found.values() for cell in check["facts"].get("cells", [])]
    assert len(cells) == sum(map(len, CELLS.values())) and not any("failed" in cell for cell in cells)
    printed = [line for cell in cells for line in cell["printed"]]
    assert any(re.match(r"losses .* equal to one process", line) for line in printed)
    try:
        c_programs.find_nccl()
    except c_programs.MissingToolError:
        return
    assert any("exit code" in line for line in printed)
