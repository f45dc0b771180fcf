"""The benchmark of the lessons' algorithms runs and reports what it promises; no time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.guard(120)
PROGRAM = Path(__file__).parent / "benchmarks" / "algorithms.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[dict, str]:
    output = tmp_path_factory.mktemp("bench") / "algorithms.json"
    command = [sys.executable, str(PROGRAM), "--quick", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text()), done.stdout


def test_ring_and_library_are_measured_on_the_same_sizes(report):
    rows = report[0]["ring"]
    assert [(row["ranks"], row["bytes"]) for row in rows] == [(2, 2**10), (2, 2**14)]
    assert all(row["ratio"] == pytest.approx(row["lesson_s"] / row["library_s"]) for row in rows)
    assert all(row["lesson_s"] > 0 and row["library_s"] > 0 for row in rows)


def test_sizes_that_are_predicted_are_not_those_of_the_fit(report):
    fit = report[0]["messages"]
    sizes = list(fit["seconds"])
    assert list(fit["errors"]) == sizes[1::2] and len(sizes) == 6
    assert fit["alpha_s"] >= 0 and fit["beta_s_per_byte"] >= 0 and fit["median_error"] >= 0


def test_tables_name_the_goals(report):
    text = report[1]
    assert "| ranks | size S | lesson | gloo | ratio | goal |" in text
    assert "below 20%" in text and "16 KiB" in text
