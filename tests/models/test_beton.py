"""Files of FFCV's format by hand: equal to FFCV's to the last byte, and read by it."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import missing
from PIL import Image

from lessons.ffcv_data_loading import ffcv
from lessons.ffcv_data_loading.ffcv import Beton, by_hand

pytestmark = pytest.mark.guard(120)
PAGE = 2 << 20


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


def test_reader_finds_what_the_writer_wrote(tmp_path):
    source = samples(SETS["many to a page"])
    by_hand.write_beton(source, tmp_path / "x.beton")
    file = Beton(tmp_path / "x.beton")
    assert (file.header["version"], file.header["page"], len(file.samples)) == (2, PAGE, len(source))
    for i, (image, label) in enumerate(source):
        assert np.array_equal(file.image(i), np.asarray(image)) and file.samples["label"][i] == label
    start, end = file.table["pointer"], file.table["pointer"] + file.table["size"]
    assert np.array_equal(start // PAGE, (end - 1) // PAGE)  # no image crosses into the next page
    assert (start[1:] >= end[:-1]).all()


@pytest.mark.parametrize("name", SETS)
def test_file_is_that_of_ffcv_to_the_last_byte(name, tmp_path):
    needs_ffcv()
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    source = samples(SETS[name])
    by_hand.write_beton(source, tmp_path / "ours.beton")
    fields = {"image": RGBImageField("raw"), "label": IntField()}
    DatasetWriter(str(tmp_path / "theirs.beton"), fields, PAGE, 1).from_indexed_dataset(source)
    assert (tmp_path / "ours.beton").read_bytes() == (tmp_path / "theirs.beton").read_bytes()


def test_ffcv_reads_our_mixed_file(tmp_path):
    needs_ffcv()
    from ffcv.libffcv import imdecode
    from ffcv.reader import Reader

    smooth = Image.fromarray(np.fromfunction(lambda y, x, c: 5 * y + 2 * x + 9 * c, (30, 40, 3)).astype(np.uint8))
    source = [(smooth, i) for i in range(6)]
    by_hand.write_beton(source, tmp_path / "x.beton", "proportion")
    ours, theirs = Beton(tmp_path / "x.beton"), Reader(str(tmp_path / "x.beton"))
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
