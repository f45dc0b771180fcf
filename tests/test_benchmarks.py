"""The benchmark runs and reports all that it promises; no time is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.guard(300),
    pytest.mark.skipif(sys.platform != "linux", reason="memory of the ranks is read from /proc"),
]
RUN = Path(__file__).parent / "benchmarks" / "run.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[dict, str, Path]:
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, str(RUN), "--quick", "--tools", "course", "--output", str(folder / "report.json")]
    environment = {**os.environ, "COURSE_BENCH_ENVS": str(folder / "environments")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "report.json").read_text()), done.stdout, folder


def test_everything_is_measured(report):
    result, _, _ = report
    at = result["tools"]["course"]["ranks"]["2"]
    assert not at["unavailable"] and "unavailable" not in result["own"]
    for key in ("first_cold_s", "first_ready_s", "warm_s", "pss_per_rank_MB", "added_per_rank_MB", "total_MB"):
        assert at[key] > 0, key
    assert set(at["failures"]) == {"error", "death", "hang", "interrupt"}
    assert result["own"]["many"]["cold_s"] > 0 and result["own"]["ledger"]["ratio_watching"] > 0


def test_every_failure_is_survived(report):
    at = report[0]["tools"]["course"]["ranks"]["2"]
    for kind, outcome in at["failures"].items():
        assert outcome["seconds"] is not None and outcome["next_call_works"], kind
        assert kind == "interrupt" or (outcome["names_rank"] and outcome["names_cause"]), kind
    assert at["kernel_killed_idle"]["left"] == at["kernel_killed_busy"]["left"] == 0


def test_targets_table_and_figure_are_written(report):
    result, text, folder = report
    assert len(result["targets"]) == 12
    assert all(set(t) == {"target", "unit", "sense", "limit", "measured", "met"} for t in result["targets"])
    unmeasured = [t["target"] for t in result["targets"] if t["measured"] is None]
    assert unmeasured == ["warm call, against the next best that keeps workers"]
    assert "## 2 ranks" in text and "## Targets" in text and "course_utils.launch" in text
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_stored_data_name_no_machine(report):
    text = json.dumps(report[0])
    for private in (str(Path.home()), os.sep + "tmp", str(Path(__file__).parents[1])):
        assert private not in text
