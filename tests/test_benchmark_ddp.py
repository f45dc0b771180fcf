"""The benchmark of data parallelism runs and reports what it promises; no time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.guard(120)
PROGRAM = Path(__file__).parent / "benchmarks" / "ddp.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[dict, str]:
    output = tmp_path_factory.mktemp("bench") / "ddp.json"
    command = [sys.executable, str(PROGRAM), "--quick", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text()), done.stdout


def test_every_version_sends_the_same_bytes_in_fewer_messages(report):
    rows = report[0]["versions"]
    assert [*rows] == ["AfterBackward", "FlatBuckets", "Overlapped", "DistributedDataParallel"]
    assert [row["messages"] for row in rows.values()] == [28, 4, 4, 4]
    assert len({row["bytes"] for row in rows.values()}) == 1
    assert all(row["step_s"] > 0 and row["quartiles"][0] <= row["quartiles"][1] for row in rows.values())
    assert rows["DistributedDataParallel"]["ratio"] == 1


def test_table_names_the_goal(report):
    assert "| version | messages | bytes | step (median) | against DDP (quartiles) | goal |" in report[1]
    assert "overlapped within 1.3×" in report[1]
