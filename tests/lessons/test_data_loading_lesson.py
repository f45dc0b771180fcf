"""What lesson 15 defines: .beton by hand, orders, caches, operations, sharding; and the lesson without FFCV."""

from __future__ import annotations

import os
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from conftest import ROOT, missing
from lessons import definitions
from notebook_runs import run_core
from PIL import Image

from course_utils import ffcv, launch

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

PAGE = 2 << 20
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("pointer", "<u8")])
TYPES = {
    "HEADER": np.dtype([("version", "<u2"), ("fields", "<u2"), ("page", "<u4"), ("samples", "<u8"), ("table", "<u8")]),
    "FIELD": np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")]),
    "IMAGE": IMAGE, "TYPES": {0: np.dtype("<f8"), 1: np.dtype("<i8"), 2: IMAGE},
    "PIECE": np.dtype([("sample", "<u8"), ("pointer", "<u8"), ("size", "<u8")]), "JPEG": 0, "RAW": 1,
}


@cache
def lesson() -> dict:
    """What the lesson defines, by name, on a machine without FFCV."""
    names = definitions("15", Operation=object, without="not here", cores=2, LINUX=True, **TYPES)
    names["count"] = 90
    return names


def needs_ffcv() -> None:
    if reason := ffcv.missing():
        missing(reason)
    ffcv.apply_fixes()


def samples(sizes: list[tuple[int, int]]) -> list[tuple[Image.Image, int]]:
    """Images of noise with these widths and heights, and labels."""
    rng = np.random.default_rng(0)
    return [(Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8)), 7 * i) for i, (w, h) in enumerate(sizes)]


SETS = {
    "one image": [(3, 2)],
    "many to a page": [(64 + i % 9, 48 + i % 7) for i in range(300)],
    "pages filled to the last byte": [(1024, 1024 * 2 // 3)] * 5 + [(1024, 2)] * 4,
    "a page each": [(800, 800)] * 4,
}


@pytest.mark.parametrize("name", SETS)
def test_reader_finds_what_the_writer_wrote(name, tmp_path):
    source = samples(SETS[name])
    lesson()["write_by_hand"](source, tmp_path / "x.beton")
    file = lesson()["Beton"](tmp_path / "x.beton")
    assert (file.header["version"], file.header["page"], len(file.samples)) == (2, PAGE, len(source))
    for i, (image, label) in enumerate(source):
        assert np.array_equal(file.image(i), np.asarray(image)) and file.samples["label"][i] == label
    start, end = file.table["pointer"], file.table["pointer"] + file.table["size"]
    assert np.array_equal(start // PAGE, (end - 1) // PAGE)  # no image crosses into the next page
    assert (start[1:] >= end[:-1]).all() and (tmp_path / "x.beton").stat().st_size == end_of_table(file)


def end_of_table(file) -> int:
    return int(file.header["table"]) + file.table.nbytes


@pytest.mark.parametrize("name", SETS)
def test_file_is_that_of_ffcv_to_the_last_byte(name, tmp_path):
    needs_ffcv()
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    source = samples(SETS[name])
    lesson()["write_by_hand"](source, tmp_path / "ours.beton")
    fields = {"image": RGBImageField("raw"), "label": IntField()}
    DatasetWriter(str(tmp_path / "theirs.beton"), fields, PAGE, 1).from_indexed_dataset(source)
    assert (tmp_path / "ours.beton").read_bytes() == (tmp_path / "theirs.beton").read_bytes()


def test_ffcv_reads_our_mixed_file(tmp_path):
    needs_ffcv()
    from ffcv.libffcv import imdecode
    from ffcv.reader import Reader

    smooth = Image.fromarray(np.fromfunction(lambda y, x, c: 5 * y + 2 * x + 9 * c, (30, 40, 3)).astype(np.uint8))
    source = [(smooth, i) for i in range(6)]
    lesson()["write_by_hand"](source, tmp_path / "x.beton", (TYPES["RAW"], TYPES["JPEG"]))
    ours, theirs = lesson()["Beton"](tmp_path / "x.beton"), Reader(str(tmp_path / "x.beton"))
    assert theirs.field_names == ["image", "label"]
    assert theirs.metadata["f0"]["mode"].tolist() == [1, 0] * 3
    assert theirs.metadata["f0"]["data_ptr"].tolist() == ours.samples["image"]["pointer"].tolist()
    for i, (image, _) in enumerate(source):
        if i % 2 == 0:
            assert np.array_equal(ours.image(i), np.asarray(image))
            continue
        decoded, piece = np.zeros((30, 40, 3), np.uint8), theirs.alloc_table[i]
        data = np.ascontiguousarray(ours.bytes[piece["ptr"] : piece["ptr"] + piece["size"]])
        imdecode(data, decoded, 30, 40, 30, 40, 0, 0, 1, 1, False, False)
        assert np.abs(ours.image(i).astype(int) - decoded).mean() < 3


@pytest.mark.parametrize("window", [1, 4, 16, 100])
def test_quasi_random_is_a_permutation_with_few_pages_open(window):
    page_of = np.sort(np.random.default_rng(1).integers(5, 45, 400))
    order = lesson()["quasi_random"](page_of, window, np.random.default_rng(2))
    assert sorted(order.tolist()) == list(range(400))
    pages = page_of[order].tolist()
    first, last = {}, {}
    for at, page in enumerate(pages):
        first.setdefault(page, at)
        last[page] = at
    most = max(sum(first[page] <= at <= last[page] for page in first) for at in range(400))
    assert most <= window
    again = lesson()["quasi_random"](page_of, window, np.random.default_rng(2))
    assert np.array_equal(order, again)
    assert not np.array_equal(order, lesson()["quasi_random"](page_of, window, np.random.default_rng(3)))


def test_pages_held_by_hand():
    held = lesson()["pages_held"]
    assert held([{1}, {2}, {3}], ahead=0) == 1
    assert held([{1}, {2}, {3}], ahead=1) == 2
    assert held([{1, 2}, {3}, {1}], ahead=0) == 2
    assert held([{1, 2}, {3}, {1, 2}], ahead=0) == 3
    assert held([{page} for page in range(10)]) == 4


@pytest.mark.parametrize("size", [1, 8, 30])
def test_pages_held_is_the_room_that_ffcv_makes(size):
    needs_ffcv()
    from ffcv.memory_managers.process_cache.schedule import compute_schedule

    rng = np.random.default_rng(size)
    page_of = np.sort(rng.integers(0, 40, 300))
    for order in (np.arange(300), rng.permutation(300), lesson()["quasi_random"](page_of, 5, rng)):
        batches = lesson()["pages_by_batch"](order, page_of, size)
        assert lesson()["pages_held"](batches) == compute_schedule(batches).num_slots


def test_share_from_memory_is_that_of_a_cache_that_drops_what_is_used_least_recently():
    share = lesson()["share_from_memory"]
    page_of, rng = np.repeat(np.arange(10), 9), np.random.default_rng(0)
    in_order = np.arange(90)
    assert share([in_order, in_order], page_of, 9) == pytest.approx(1 - 10 / 90)  # a page short: none is left
    assert share([in_order, in_order], page_of, 10) == 1
    for room in (1, 4, 9):
        orders = [rng.permutation(90), rng.permutation(90)]
        recent, hits = [], 0
        for at, page in enumerate(page_of[np.concatenate(orders)].tolist()):
            hits += page in recent and at >= 90
            recent = [*(p for p in recent if p != page), page][-room:]
        assert share(orders, page_of, room) == pytest.approx(hits / 90)


def test_crops_lie_in_the_image():
    for width, height in ((300, 200), (200, 300), (224, 224), (2000, 50), (1, 1)):
        for _ in range(200):
            left, top, right, bottom = lesson()["crop_box"](width, height)
            assert 0 <= left < right <= width and 0 <= top < bottom <= height
    assert lesson()["augment"](samples([(80, 60)])[0][0], 32).shape == (32, 32, 3)


def test_epoch_counts_images_and_waits_no_longer_than_it_takes():
    steps = []
    batches = [(np.zeros((size, 2)), np.zeros(size)) for size in (4, 4, 3)]
    seen, seconds, waited = lesson()["epoch"](batches, lambda *batch: steps.append(len(batch[0])))
    assert seen == 11 and steps == [4, 4, 3] and 0 <= waited <= seconds
    assert lesson()["epoch"]([])[0] == 0


def test_gray_is_that_of_numpy():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3), np.uint8)
    for share, expected in ((0.0, pixels), (1.0, None)):
        operation = lesson()["RandomGray"](share)
        out = operation.generate_code()(pixels, np.empty((8, 5, 4, 3), np.uint8))
        light = ((pixels.astype(int) @ [77, 150, 29]) >> 8).astype(np.uint8)
        assert np.array_equal(out, np.repeat(light[..., None], 3, 3) if expected is None else expected)


def test_operations_are_compiled_by_ffcv(tmp_path):
    needs_ffcv()
    from ffcv.fields import rgb_image
    from ffcv.fields.basics import IntDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.pipeline.allocation_query import AllocationQuery
    from ffcv.pipeline.compiler import Compiler
    from ffcv.pipeline.operation import Operation
    from ffcv.pipeline.pipeline_spec import PipelineSpec
    from ffcv.transforms import Squeeze, ToTensor

    library = {"Operation": Operation, "AllocationQuery": AllocationQuery, "Compiler": Compiler}
    names = definitions("15", without=None, cores=1, **TYPES, **library)
    source = samples([(40, 30)] * 20)
    names["write_by_hand"](source, tmp_path / "x.beton")
    decoder = rgb_image.SimpleRGBImageDecoder
    pipelines = {
        "image": [decoder(), names["RandomGray"](1.0), ToTensor()],
        "label": None,
        "index": PipelineSpec("label", transforms=[IntDecoder(), names["WhichSample"](), ToTensor(), Squeeze(1)]),
    }
    loader = Loader(str(tmp_path / "x.beton"), 7, 1, order=OrderOption.RANDOM, drop_last=False, pipelines=pipelines)
    seen = []
    for images, index in loader:
        for image, number in zip(images.numpy(), index.tolist(), strict=True):
            light = (np.asarray(source[number][0]).astype(int) @ [77, 150, 29]) >> 8
            assert (image == light[..., None]).all()
            seen.append(number)
    assert sorted(seen) == list(range(20)) and seen != sorted(seen)


def epochs_of_rank(names: dict, path: Path, seed: int) -> list[list[int]]:
    names["without"] = "not here"
    loader = names["ByHand"](path, 8, seed)
    return [[i for *_, index in loader for i in index.tolist()] for _ in range(2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shares_of_ranks_are_one_shuffle(ranks, tmp_path):
    lesson()["write_by_hand"](samples([(9, 9)] * 90), tmp_path / "x.beton")
    parts = {"ByHand": lesson()["ByHand"]}
    by_rank = launch(epochs_of_rank, parts, tmp_path / "x.beton", 3, world_size=ranks, backend="gloo")
    for shares in zip(*by_rank, strict=True):
        times = Counter(sample for share in shares for sample in share)
        assert set(times) == set(range(90))
        assert sum(times.values()) - 90 == -90 % ranks  # filled up, so that all have the same number
    assert by_rank[0][0] != by_rank[0][1]


def test_seeds_of_their_own_lose_samples():
    names = lesson()
    for ranks in (2, 5):
        names["world_size"] = ranks
        same = {i for rank in range(ranks) for i in names["share_of"](rank, 4)}
        own = {i for rank in range(ranks) for i in names["share_of"](rank, rank)}
        assert same == set(range(90)) > own


@pytest.mark.skipif(sys.platform != "linux", reason="counts of Linux")
def test_memory_of_a_mapped_file_is_seen(tmp_path):
    lesson()["write_by_hand"](samples([(500, 500)] * 4), tmp_path / "x.beton")
    file = lesson()["Beton"](tmp_path / "x.beton")
    pixels = sum(int(file.image(i).astype(np.int64).sum()) for i in range(4))
    whole, share = lesson()["in_memory_of"](tmp_path / "x.beton")
    assert pixels > 0 and whole >= 4 * 500 * 500 * 3 and 0 < share <= whole
    assert lesson()["in_memory_of"](tmp_path / "another") == (0, 0)
    assert lesson()["memory"]().min() > 0
    assert lesson()["linux_counts"]("/proc/self/status", "Nothing").tolist() == [0]


@pytest.mark.parametrize("share", [2, 4, 8])
def test_a_decoder_can_give_a_part_of_the_size(share, tmp_path):
    Image.new("RGB", (800, 640)).save(tmp_path / "large.jpg")
    with Image.open(tmp_path / "large.jpg") as image:
        image.draft("RGB", (800 // share, 640 // share))
        assert image.convert("RGB").size == (800 // share, 640 // share)


@pytest.mark.guard(300)
def test_lesson_runs_without_ffcv(tmp_path):
    lesson_file = ROOT / "notebooks" / "15_ffcv_data_loading.ipynb"
    cells = run_core(lesson_file, tmp_path, use_ffcv=False, world_size=3)
    text = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    assert any("FFCV is left out" in part and "recorded" in part for part in text[:4])
    assert any("epoch 1: [267, 267, 267] samples by rank, 800 different, 1 twice" in part for part in text)
    assert os.sep + "tmp" not in "".join(text)
