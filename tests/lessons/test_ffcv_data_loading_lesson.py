"""What lesson 15 defines: decoding, buffers, rows of text; and the lesson without FFCV."""

from __future__ import annotations

import io
import os
import random
from functools import cache

import numpy as np
import pytest
import torch
from conftest import ROOT
from lesson_cells import definitions
from notebook_runs import run_core
from PIL import Image

from lessons.ffcv_data_loading.ffcv import ImageFolder, image_folder

pytestmark = pytest.mark.guard(120)


@cache
def lesson() -> dict:
    """What the lesson defines, by name, on a machine without FFCV."""
    return definitions("15", without="not here", cores=2)


@cache
def photographs() -> list[bytes]:
    images = ImageFolder(image_folder(count=20, classes=2) / "train")
    return [images.large_photograph(number) for number in range(2)]


def test_an_image_is_cut_out_resized_and_sometimes_flipped():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8))
    random.seed(0)
    found = [lesson()["cut_out"](image, (10, 10, 42, 42), 32) for _ in range(20)]
    plain = torch.from_numpy(np.asarray(image)[10:42, 10:42].copy())
    flips = [torch.equal(each, plain.flip(1)) for each in found]
    assert all(torch.equal(each, plain) or flip for each, flip in zip(found, flips, strict=True))
    assert 0 < sum(flips) < 20
    assert lesson()["augment"](image).shape == (224, 224, 3)


def test_the_decoder_gives_no_fewer_pixels_than_the_crop_wants(monkeypatch):
    names, kept = lesson(), []
    cut = names["cut_out"]

    def noted(image, box, size):
        kept.append((image.size, box))
        return cut(image, box, size)

    monkeypatch.setitem(names, "cut_out", noted)
    random.seed(0)
    for _ in range(100):
        state = random.getstate()
        box = names["crop_box"](1200, 960)
        random.setstate(state)
        assert names["decode_and_augment"](photographs()[0]).shape == (224, 224, 3)
        (width, _), (left, top, right, bottom) = kept[-1]
        scale = 1200 / width
        assert scale in (1, 2, 4, 8)
        assert [left * scale, top * scale, right * scale, bottom * scale] == pytest.approx(box)
        wanted = min(224, box[2] - box[0], box[3] - box[1])
        assert min(right - left, bottom - top) >= wanted - 1
    assert {1200 // size[0] for size, _ in kept} == {1, 2, 4}


def test_what_the_smaller_decoding_gives_is_the_same_picture():
    small, large = (lesson()["decode_part"](photographs()[1], part) for part in (4, 1))
    assert small.size == (300, 240)
    away = np.subtract(small.resize((224, 224)), large.resize((224, 224)), dtype=int)
    assert np.abs(away).mean() < 3
    assert large.tobytes() == Image.open(io.BytesIO(photographs()[1])).convert("RGB").tobytes()


def test_gray_is_that_of_numpy():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3), np.uint8)
    out = lesson()["to_gray"](pixels, np.empty((8, 5, 4, 3), np.uint8))
    light = ((pixels.astype(int) @ [77, 150, 29]) >> 8).astype(np.uint8)
    assert np.array_equal(out, np.repeat(light[..., None], 3, 3))


@pytest.mark.parametrize("size", [1, 7, 200])
def test_a_buffer_loses_nothing_and_holds_no_more_than_its_size(size):
    arrived, left = [], []

    def samples():
        for sample in range(100):
            arrived.append(sample)
            yield sample

    for sample in lesson()["through_buffer"](samples(), size, np.random.default_rng(0)):
        left.append(sample)
        assert len(arrived) - len(left) <= size
    assert sorted(left) == [*range(100)] and (left != sorted(left)) == (size > 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_of_any_number_of_ranks_are_those_of_one(ranks, monkeypatch):
    names = lesson()
    monkeypatch.setitem(names, "packed", range(13))
    whole = [n for step in range(9) for n in names["rows_of"](step, 0, 1, 4)]
    shared = [n for step in range(9) for rank in range(ranks) for n in names["rows_of"](step, rank, ranks, 4)]
    assert shared == whole and sorted(whole[:13]) == [*range(13)] == sorted(whole[13:26])
    assert whole[:13] != whole[13:26]


@pytest.mark.guard(300)
def test_lesson_runs_without_ffcv(tmp_path):
    lesson_file = ROOT / "notebooks" / "15_ffcv_data_loading.ipynb"
    cells = run_core(lesson_file, tmp_path, use_ffcv=False, world_size=3)
    text = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    assert any("FFCV is left out" in part and "recorded" in part for part in text[:4])
    assert any("epoch 1: [167, 167, 167] samples by rank, 500 different" in part for part in text)
    assert os.sep + "tmp" not in "".join(text)
