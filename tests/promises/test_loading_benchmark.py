"""The benchmark of lesson 15 runs, and the data that the lesson shows are whole; no time is asserted."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, missing

from lessons.ffcv_data_loading.ffcv import fixes

pytestmark = pytest.mark.guard(180)
FOLDER = ROOT / "benchmarks"
sys.path.append(str(FOLDER))

import loading  # noqa: E402
import loading_ways  # noqa: E402

STORED = json.loads((ROOT / "docs" / "loading.json").read_text())


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    if reason := fixes.missing():
        missing(f"FFCV ({reason})")
    folder = tmp_path_factory.mktemp("loading")
    ways = "dataloader,dataloader_cv2,threads_raw,ffcv_raw,ffcv_jpeg_python"
    command = [sys.executable, FOLDER / "loading.py", "--quick", "--ways", ways, "--output", folder / "loading.json"]
    environment = os.environ | {"COURSE_BENCH_ENVS": str(folder), "XDG_CACHE_HOME": str(folder)}
    environment["NUMBA_CACHE_DIR"] = str(fixes.user_cache.folder("numba"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "loading.json").read_text()), done.stdout


def test_every_way_is_measured(report: tuple[dict, str]):
    for key, row in report[0]["ways"].items():
        at = row["by_workers"]["1"]
        assert at["images_per_s"] > 0 and at["cpu_ms_per_image"] > 0 and at["first_batch_s"] > 0, key


def test_table_and_steps_are_printed(report: tuple[dict, str]):
    assert "| DataLoader, PIL | PIL | JPEG files | processes |" in report[1]
    assert "From DataLoader to FFCV, raw" in report[1]


def test_data_name_no_machine(report: tuple[dict, str]):
    for text in (json.dumps(report[0]), json.dumps(STORED)):
        for private in (str(Path.home()), os.sep + "tmp", str(ROOT)):
            assert private not in text


def test_every_way_exists():
    assert {way.key for way in loading.WAYS} == set(loading_ways.WAYS)
    assert {key for steps in loading.STEPS.values() for *_, key in steps} <= set(loading_ways.WAYS)


def test_stored_run_is_complete():
    assert not STORED["quick"] and STORED["images"]["count"] == 2000
    assert set(STORED["ways"]) == set(loading_ways.WAYS)
    for row in STORED["ways"].values():
        assert row["by_workers"] or row["unavailable"], row["name"]
        assert all(len(at["rounds"]) == STORED["rounds"] for at in row["by_workers"].values()), row["name"]
    assert set(STORED["compile"]) == {"cold_s", "next_process_s", "without_fixes_s"}


def test_ways_are_compared_within_a_round():
    slow = {"by_workers": {"1": {"images_per_s": 100, "rounds": [100, 50, 400]}}}
    two = {"images_per_s": 200, "rounds": [300, 100, 200]}
    fast = {"by_workers": {"1": {"images_per_s": 150, "rounds": [150, 150, 150]}, "2": two}}
    assert loading.against(fast, slow) == [0.5, 2.0, 3.0]
    assert loading.shown(loading.against(fast, slow)) == ["2.00", "0.50 to 3.00"]


def test_lesson_says_what_the_record_says():
    """Its sections 8 and 11 put the stored factors into words: a new record wants them read again."""

    def times(way, base="dataloader"):
        return loading.against(STORED["ways"][way], STORED["ways"][base])

    chain = [key for *_, key in loading.STEPS["FFCV, raw"]]
    gains = [times(way, base) for base, way in itertools.pairwise(chain)]
    assert min(each[0] for each in gains) > 1  # in every round
    decoder, storage, threads, loop = map(statistics.median, gains)
    assert storage > decoder > 1.4 and 1.15 < threads < 1.25 and 1.15 < loop < 1.25
    product = math.prod((decoder, storage, threads, loop))
    assert product == pytest.approx(statistics.median(times("ffcv_raw")), rel=0.05)
    assert times("ffcv_jpeg")[-1] < 2
    others = ("dali", "litdata", "grain", "webdataset", "mosaicml_streaming", "spdl")
    assert [round(statistics.median(times(way)), 1) for way in others] == [1.2, 1.0, 1.0, 0.9, 0.9, 0.5]
