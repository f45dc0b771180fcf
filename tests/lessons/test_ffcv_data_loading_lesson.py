"""The decoding of lesson 15, its exercises, and the lesson without FFCV."""

from __future__ import annotations

import os
import random
from functools import cache

import pytest
from conftest import ROOT
from lesson_cells import definitions
from notebook_runs import run_core

from course_utils import recordings
from lessons.ffcv_data_loading import loader_records
from lessons.ffcv_data_loading.ffcv import ImageFolder, image_folder

pytestmark = pytest.mark.guard(120)


@cache
def lesson() -> dict:
    """What the lesson defines, by name, on a machine without FFCV."""
    return definitions("15", without="not here", cores=2)


def test_the_decoder_gives_no_fewer_pixels_than_the_crop_wants(monkeypatch):
    names, kept = lesson(), []
    cut, photograph = names["cut_out"], ImageFolder(image_folder(count=20) / "train").large_photograph(0)

    def noted(image, box, size):
        kept.append((image.size, box))
        return cut(image, box, size)

    monkeypatch.setitem(names, "cut_out", noted)
    random.seed(0)
    for _ in range(100):
        state = random.getstate()
        box = names["crop_box"](1200, 960)
        random.setstate(state)
        assert names["decode_and_augment"](photograph).shape == (224, 224, 3)
        (width, _), (left, top, right, bottom) = kept[-1]
        scale = 1200 / width
        assert scale in (1, 2, 4, 8)
        assert [left * scale, top * scale, right * scale, bottom * scale] == pytest.approx(box)
        wanted = min(224, box[2] - box[0], box[3] - box[1])
        assert min(right - left, bottom - top) >= wanted - 1
    assert {1200 // size[0] for size, _ in kept} == {1, 2, 4}


@pytest.mark.guard(300)
def test_lesson_runs_without_ffcv(tmp_path, pytestconfig):
    lesson_file = ROOT / "notebooks" / "15_ffcv_data_loading.ipynb"
    cells = run_core(lesson_file, tmp_path, deeper=pytestconfig.getoption("thorough"), use_ffcv=False, world_size=3)
    text = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    assert any("FFCV is left out" in part and "recorded" in part for part in text[:4])
    assert any("epoch 1: [167, 167, 167] samples by rank, 500 different" in part for part in text)
    assert os.sep + "tmp" not in "".join(text)


def test_the_copies_of_the_box_take_what_the_record_says():
    checks = recordings.load("gpu_check_h200")[0]["checks"]
    facts = next(check["facts"] for check in checks if "pinned to device" in check["facts"])
    size, text = 256 * 3 * 224 * 224 * 4, (ROOT / "lessons/ffcv_data_loading/lesson.py").read_text("utf-8")
    box = " ".join(text.split("**What changes on real GPUs.**")[1].split("# %%")[0].replace("# >", "").split())
    assert f"are {size / 1e6:.0f} MB" in box
    for kind, said in (("pageable", "{:.0f} ms from ordinary memory ({:.1f} GB/s)"),
                       ("pinned", "{:.1f} ms from *pinned* memory ({:.0f} GB/s)")):
        rate = facts[f"{kind} to device"]["value"][-1]  # of the largest copy
        assert said.format(size / rate / 1e6, rate) in box


def test_what_the_text_says_of_the_recorded_loaders():
    names = ["dataloader", "dataloader_cv2", "dataloader_raw", "threads_raw", "ffcv_raw"]
    gains = [loader_records.gain(way, base)[0] for base, way in zip(names[:-1], names[1:], strict=True)]
    assert max(gains) == gains[1] > gains[0] > 1.5 and all(1.15 < gain < 1.22 for gain in gains[2:])
    assert [round(loader_records.gain("ffcv_raw", "threads_raw", workers)[0], 2) for workers in (1, 2)] == [1, 1.17]
    raw, mixed, jpeg = (loader_records.gain(f"ffcv_{mode}")[0] for mode in ("raw", "mixed", "jpeg"))
    assert raw > mixed > jpeg > 1.5
    others = {name: loader_records.gain(name)[0] for name in ("dali", "litdata", "grain")}
    assert round(others.pop("dali"), 1) == 1.2 and all(abs(gain - 1) < 0.05 for gain in others.values())
    assert all(loader_records.gain(name)[0] < 0.95 for name in ("webdataset", "mosaicml_streaming", "spdl"))
