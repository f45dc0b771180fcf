"""The measurement behind lesson 15's figure runs, and the lesson says what is stored; no time is asserted."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, missing

from lessons.ffcv_data_loading import loader_records
from lessons.ffcv_data_loading.ffcv import fixes

pytestmark = pytest.mark.guard(180)
STORED = json.loads((ROOT / "docs" / "loading.json").read_text())


def test_ways_are_measured(tmp_path, pytestconfig):
    """FFCV's, whose compiling takes half a minute, with --thorough."""
    if reason := fixes.missing():
        missing(f"FFCV ({reason})")
    output, ways = tmp_path / "loading.json", "dataloader,threads_raw"
    ways += ",ffcv_raw" if pytestconfig.getoption("thorough") else ""
    program = ROOT / "lessons" / "ffcv_data_loading" / "measure_loaders.py"
    command = [sys.executable, program, "--quick", "--ways", ways, "--output", output]
    environment = os.environ | {"COURSE_BENCH_ENVS": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment["NUMBA_CACHE_DIR"] = str(fixes.user_cache.folder("numba"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    for key, row in json.loads(output.read_text())["ways"].items():
        at = row["by_workers"]["1"]
        assert at["images_per_s"] > 0 and at["first_batch_s"] > 0, key


def test_stored_run_is_complete():
    assert not STORED["quick"] and STORED["images"]["count"] == 2000
    for row in STORED["ways"].values():
        assert row["by_workers"] or row["unavailable"], row["name"]
        assert all(len(at["rounds"]) == STORED["rounds"] for at in row["by_workers"].values()), row["name"]
    assert set(STORED["compile"]) == {"cold_s", "next_process_s", "without_fixes_s"}


def test_lesson_says_what_the_record_says():
    """Its sections 8 and 11 put the stored factors into words: a new record wants them read again."""
    chain = ["dataloader", "dataloader_cv2", "dataloader_raw", "threads_raw", "ffcv_raw"]
    gains = [loader_records.gain(way, base) for base, way in itertools.pairwise(chain)]
    assert min(least for _, least, _ in gains) > 1  # in every round
    decoder, storage, threads, loop = (middle for middle, _, _ in gains)
    assert storage > decoder > 1.4 and 1.15 < threads < 1.25 and 1.15 < loop < 1.25
    assert decoder * storage * threads * loop == pytest.approx(loader_records.gain("ffcv_raw")[0], rel=0.05)
    assert loader_records.gain("ffcv_jpeg")[2] < 2
    others = ("dali", "litdata", "grain", "webdataset", "mosaicml_streaming", "spdl")
    assert [round(loader_records.gain(way)[0], 1) for way in others] == [1.2, 1.0, 1.0, 0.9, 0.9, 0.5]
