"""The report of ``gpu-check`` that the lessons show: as described, complete, and below the data sheet of its GPU."""

from __future__ import annotations

import pytest

from course_utils import recorded, recordings
from course_utils.hardware import GPUS

SKIPPED = {"cells_02", "cells_10"}  # need two GPUs


@pytest.fixture(scope="module")
def report() -> dict:
    return recordings.load("gpu_check_h200")[0]


def test_it_is_a_whole_report_of_a_gpu_without_a_failure(report: dict):
    assert report["schema"] == 1 and report["on"] == "gpu" and report["complete"]
    assert {check["name"] for check in report["checks"] if check["status"] != "passed"} == SKIPPED


def test_it_says_what_it_was_made_with(report: dict):
    machine, said = report["machine"], recordings.load("gpu_check_h200")[1]
    (gpu,) = machine["gpus"]
    for name in (gpu["name"], machine["torch"].partition("+")[0], machine["cuda"], machine["nccl"]):
        assert name in said


def test_nothing_in_it_is_above_the_data_sheet():
    h200 = GPUS["h200"]
    for point in recorded.gpu_check("roofline")["points"]:
        rate = 1e12 * point["rate"]["value"]
        assert rate <= h200.flops[point["precision"]] and rate <= point["flop_per_byte"] * h200.memory_bandwidth
    assert max(recorded.gpu_check("copies")["within the device"]["value"]) < h200.memory_bandwidth / 2e9
