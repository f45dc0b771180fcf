"""The small benchmarks run and print a table with their goals; no time is asserted."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = [
    pytest.mark.guard(300),
    pytest.mark.skipif(sys.platform != "linux", reason="memory of the ranks is read from /proc"),
]
TABLES = {
    "launcher": "| warm call of an empty function |",
    "memory": "| version | between steps | peak of a rank |",
    "planner": "| model | GPUs | legal | refused | taken | goal |",
    "train_overhead": "| step of the bare loop | the program adds (quartiles) |",
    "verify": "| on rank 0 | without | with / without (median) |",
}


@pytest.mark.parametrize("name", TABLES)
def test_program_runs_and_prints_its_table(name, tmp_path, pytestconfig):
    if name != "launcher" and not pytestconfig.getoption("thorough"):
        pytest.skip("--thorough runs the others too")
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--quick", "--output", tmp_path / "measured.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert TABLES[name] in done.stdout and json.loads((tmp_path / "measured.json").read_text())


def test_stored_comparison_names_no_machine():
    text = (ROOT / "docs" / "benchmark.json").read_text()
    assert not json.loads(text)["quick"] and "/home/" not in text and "/tmp" not in text
