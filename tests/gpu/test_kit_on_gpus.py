"""The checks of ``gpu-check`` on GPUs: values, bytes and refusals, never times."""

from __future__ import annotations

import pytest
import torch

from course_utils.gpu_check import CHECKS, TRACE, faults, run
from course_utils.traces import load

pytestmark = pytest.mark.guard(500)


@pytest.fixture(scope="module", autouse=True)
def gpus() -> int:
    """How many GPUs there are, at least one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        pytest.skip("needs a GPU, and PyTorch sees none here")
    return count


@pytest.fixture(scope="module")
def report(gpus: int, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What ``gpu-check`` writes on this machine, and the folder of its files."""
    folder = tmp_path_factory.mktemp("gpu-check")
    return {**run(CHECKS, "gpu", gpus, folder), "folder": folder}


def facts(report: dict, name: str) -> dict:
    """What a check found; the test is skipped with the check's reason if it was."""
    check = next(check for check in report["checks"] if check["name"] == name)
    if check["status"] == "skipped":
        pytest.skip(check["reason"])
    assert check["status"] == "passed", check["reason"]
    return check["facts"]


@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_passes(report: dict, name: str):
    assert facts(report, name)


def test_the_report_is_as_described_and_names_the_gpus(report: dict, gpus: int):
    assert faults({key: value for key, value in report.items() if key != "folder"}) == []
    assert len(report["machine"]["gpus"]) == gpus and report["machine"]["nccl"]


def test_collectives_are_those_of_nccl_with_a_rank_on_each_gpu(report: dict, gpus: int):
    found = facts(report, "collectives")
    assert (found["backend"], found["ranks"]) == ("nccl", gpus)
    assert facts(report, "launcher")["devices"] == [f"cuda:{rank}" for rank in range(gpus)]


def test_the_ledger_counts_the_bytes_that_gloo_would(report: dict, gpus: int):
    size = 4 * gpus * 1000
    assert [(each["op"], each["bytes"]) for each in facts(report, "ledger")["operations"]] == [
        ("all_reduce", size), ("all_gather", gpus * size), ("reduce_scatter", size), ("broadcast", size),
        ("all_to_all", size), ("barrier", 0),
    ]


def test_more_ranks_than_gpus_are_refused(report: dict, gpus: int):
    assert f"NCCL needs one GPU for each of {gpus + 1} ranks" in facts(report, "launcher")["too_many_ranks"]
    assert facts(report, "two_ranks_one_gpu")["refused"]


def test_losses_are_those_of_one_process_on_the_cpu(report: dict):
    found = facts(report, "same_losses")
    for how in ("DDP", "FSDP"):
        assert found[how] == pytest.approx(found["one process, CPU"], abs=1e-3)


def test_the_tracer_sees_what_pytorch_calls(report: dict, gpus: int):
    found = facts(report, "tracer")
    assert found["c_program"]["calls"]["ncclAllReduce"] == 21 * gpus
    assert [rank["calls"]["ncclAllReduce"] >= 3 for rank in found["pytorch"]] == [True] * gpus


def test_the_trace_has_the_work_of_the_gpu(report: dict):
    assert facts(report, "profiler_trace")["steps"] == 3
    trace, = load(report["folder"] / TRACE)
    assert trace.on_gpu and any(event.category == "gpu_memcpy" for event in trace.events)


def test_the_snapshot_has_its_peak_in_the_step(report: dict):
    found = facts(report, "memory_snapshot")
    assert max(found["allocated"]["value"]) == found["largest"]["value"]
    after = {mark["when"]: mark["allocated"]["value"] for mark in found["marks"]}
    assert 0 < after["after backward"] <= found["largest"]["value"] + after["after the optimizer"]
