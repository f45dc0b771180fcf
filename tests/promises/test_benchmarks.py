"""The benchmarks run, in one go as `make bench` does, and report all that they promise; no time is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = [
    pytest.mark.guard(600),
    pytest.mark.skipif(sys.platform != "linux", reason="memory of the ranks is read from /proc"),
]
RUN = ROOT / "benchmarks" / "run.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[dict, str, Path]:
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, str(RUN), "--quick", "--tools", "course", "--output", str(folder / "report.json")]
    environment = {**os.environ, "COURSE_BENCH_ENVS": str(folder / "environments")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, env=environment)
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
    for private in (str(Path.home()), os.sep + "tmp", str(ROOT)):
        assert private not in text


# --- what lessons measure ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_lesson(report):
    """What a benchmark of a lesson wrote, by its name."""
    return lambda name: json.loads((report[2] / "environments" / f"{name}.json").read_text())


def test_ring_and_library_are_measured_on_the_same_sizes(of_lesson):
    rows = of_lesson("algorithms")["ring"]
    assert [(row["ranks"], row["bytes"]) for row in rows] == [(2, 2**10), (2, 2**14)]
    assert all(row["ratio"] == pytest.approx(row["lesson_s"] / row["library_s"]) for row in rows)
    assert all(row["lesson_s"] > 0 and row["library_s"] > 0 for row in rows)


def test_sizes_that_are_predicted_are_not_those_of_the_fit(of_lesson):
    fit = of_lesson("algorithms")["messages"]
    sizes = list(fit["seconds"])
    assert list(fit["errors"]) == sizes[1::2] and len(sizes) == 6
    assert fit["alpha_s"] >= 0 and fit["beta_s_per_byte"] >= 0 and fit["median_error"] >= 0


def test_every_version_of_data_parallelism_sends_the_same_bytes_in_fewer_messages(of_lesson):
    rows = of_lesson("ddp")["versions"]
    assert [*rows] == ["AfterBackward", "FlatBuckets", "Overlapped", "DistributedDataParallel"]
    assert [row["messages"] for row in rows.values()] == [28, 4, 4, 4]
    assert len({row["bytes"] for row in rows.values()}) == 1
    assert all(row["step_s"] > 0 and row["quartiles"][0] <= row["quartiles"][1] for row in rows.values())
    assert rows["DistributedDataParallel"]["ratio"] == 1


@pytest.mark.parametrize("model", ["small", "larger"])
def test_every_version_of_zero_3_peaks_below_data_parallelism(of_lesson, model):
    rows = of_lesson("memory")["models"][model]["versions"]
    assert [*rows] == ["DistributedDataParallel", "Zero3", "FSDP2"]
    assert all(row["peak_bytes"] == sum(row["peak"].values()) for row in rows.values())
    assert rows["DistributedDataParallel"]["peak_ratio"] == 1
    assert rows["Zero3"]["peak_ratio"] < 1 and rows["FSDP2"]["peak_ratio"] < 1


@pytest.mark.parametrize("model", ["small", "larger"])
def test_two_ranks_hold_half_of_parameters_and_optimizer_states_each(of_lesson, model):
    found = of_lesson("memory")["models"][model]
    for part, of_each in {"parameters": 4, "optimizer": 8}.items():
        whole = of_each * found["parameters"]
        of = {version: row["held"][part] / whole for version, row in found["versions"].items()}
        assert of == pytest.approx({"DistributedDataParallel": 1, "Zero3": 0.5, "FSDP2": 0.5}, rel=0.01)


def test_steps_of_zero_3_are_compared_with_those_of_fsdp2(of_lesson):
    for model in of_lesson("memory")["models"].values():
        rows = model["versions"]
        assert all(row["step_s"] > 0 and row["quartiles"][0] <= row["quartiles"][1] for row in rows.values())
        assert rows["FSDP2"]["step_ratio"] == 1


def test_schedules_are_simulated_and_layouts_searched(of_lesson):
    result = of_lesson("planner")
    assert {row["name"] for row in result["schedules"]} == {"GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-H2"}
    assert [row["model"] for row in result["searches"]] == ["Llama 3 70B", "GPT-3 175B"]
    assert all(row["legal"] > 0 and row["refused"] > 0 for row in result["searches"])
    assert all(row["s"] > 0 for row in result["schedules"] + result["searches"])


def test_what_the_training_program_adds_to_a_bare_loop_is_measured(of_lesson):
    result = of_lesson("train_overhead")
    assert result["bare_s"] > 0 and result["ranks"] == 2
    for quartiles in (result["overhead"], result["overhead_cpu"]):
        assert len(quartiles) == 3 and quartiles == sorted(quartiles)


def test_what_verifying_adds_to_an_operation_is_measured(of_lesson):
    rows = of_lesson("verify")["rows"]
    assert [row["work"] for row in rows][-2:] == ["step of DDP", "step of FSDP2"] and len(rows) == 5
    assert all(row["without_s"] > 0 and row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1] for row in rows)


def test_tables_of_the_lessons_follow_with_their_goals(report):
    for text in (
        "| ranks | size S | lesson | gloo | ratio | goal |", "below 20%", "16 KiB",
        "| version | messages | bytes | step (median) | against DDP (quartiles) | goal |", "overlapped within 1.3×",
        "| schedule | stages × micro-batches | taken | goal |", "| model | GPUs | legal | refused | taken | goal |",
        "| step of the bare loop | the program adds (quartiles) | in CPU time | goal | a checkpoint adds |",
        "| on rank 0 | without | with / without (median) | quartiles | CPU time added |",
        "| peak of a rank | against DDP | parts at the peak, kB | step (median) | against FSDP2 (quartiles) |",
    ):
        assert text in report[1]
