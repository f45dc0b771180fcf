"""Files in FFCV's format for checks: written with NumPy or with FFCV, and read through an object that counts."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "CUSTOM", "DESCRIPTOR", "FLOAT", "HEADER", "IMAGE", "INT", "PAGE", "ROWS", "Reads", "beton", "counted_file",
    "own_file", "pictures",
]

FLOAT, INT, IMAGE, CUSTOM = 0, 1, 2, 255
HEADER = np.dtype([("version", "<u2"), ("fields", "<u2"), ("page", "<u4"), ("samples", "<u8"), ("table", "<u8")])
DESCRIPTOR = np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")])
_TABLE = np.dtype([("sample", "<u8"), ("pointer", "<u8"), ("size", "<u8")])
_PIXELS = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("pointer", "<u8")])
ROWS = {FLOAT: np.dtype("<f8"), INT: np.dtype("<i8"), IMAGE: _PIXELS}
PAGE = 1 << 21  # the smallest that FFCV writes


@dataclass
class Reads:
    """What was asked of a file: how many bytes were read, and whether its descriptor was wanted."""

    count: int = 0
    wanted_descriptor: bool = False


def counted_file(content: bytes) -> tuple[io.RawIOBase, Reads]:
    """Bytes as a file without a descriptor, and what is asked of it; they can only be had by reading."""
    reads, place = Reads(), 0

    class CountedFile(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def seekable(self) -> bool:
            return True

        def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
            nonlocal place
            place = max(0, int(offset) + {0: 0, 1: place, 2: len(content)}[whence])
            return place

        def tell(self) -> int:
            return place

        def readinto(self, buffer: Any) -> int:
            nonlocal place
            part = content[place : place + len(buffer)]
            buffer[: len(part)] = part
            place += len(part)
            reads.count += len(part)
            return len(part)

        def fileno(self) -> int:
            reads.wanted_descriptor = True
            raise io.UnsupportedOperation("this file counts its bytes in Python and has no descriptor")

    return CountedFile(), reads


def beton(fields: Sequence[tuple[str, int]], columns: Sequence[Sequence], shuffled: bool = False) -> bytes:
    """A file in FFCV's format: for each field (name, type) a column of numbers, or of raw images (height, width, 3).

    With ``shuffled`` the images lie in memory, and in the allocation table, in another order than the rows.
    """
    samples = len(columns[0])
    row = np.dtype([(f"f{i}", ROWS[kind]) for i, (_, kind) in enumerate(fields)], align=True)
    descriptors = np.array([(kind, name.encode(), b"") for name, kind in fields], DESCRIPTOR)
    rows = np.zeros(samples, row)
    start = -(-(HEADER.itemsize + descriptors.nbytes + rows.nbytes) // PAGE) * PAGE
    heap, table, place = bytearray(), [], {}
    order = np.random.default_rng(5).permutation(samples) if shuffled else np.arange(samples)
    for i, (_, kind) in enumerate(fields):
        if kind != IMAGE:
            rows[f"f{i}"] = columns[i]
            continue
        for sample in order.tolist():
            image = columns[i][sample]
            if len(heap) % PAGE + image.nbytes > PAGE:
                heap.extend(bytes(-len(heap) % PAGE))
            place[sample] = start + len(heap)
            heap += image.tobytes()
            table.append((sample, place[sample], image.nbytes))
            rows[f"f{i}"][sample] = (1, image.shape[1], image.shape[0], place[sample])
    heap.extend(bytes(-len(heap) % PAGE))
    header = np.array((2, len(fields), PAGE, samples, start + len(heap)), HEADER)
    head = header.tobytes() + descriptors.tobytes() + rows.tobytes()
    return head + bytes(start - len(head)) + bytes(heap) + np.array(table, _TABLE).tobytes()


def pictures(count: int, seed: int, largest: int = 9) -> list[np.ndarray]:
    """Random pictures, higher than wide or wider than high, each different."""
    rng = np.random.default_rng(seed)
    sizes = [(int(h), int(w)) for h, w in rng.integers(3, largest, (count, 2))]
    return [rng.integers(0, 256, (h, w + (w == h), 3), np.uint8) for h, w in sizes]


class _Listed:
    """A data set as FFCV's writer wants it: samples by number."""

    def __init__(self, columns: Sequence[Sequence]):
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple:
        return tuple(column[int(index)] for column in self.columns)


def _ffcv_here() -> bool:
    """Whether FFCV can be used; if so it has been mended."""
    from . import ffcv

    if ffcv.missing():
        return False
    ffcv.apply_fixes()
    return True


def _written_by_ffcv(path: Path, fields: dict[str, Any], columns: Sequence[Sequence]) -> None:
    from ffcv.writer import DatasetWriter

    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        DatasetWriter(str(path), fields, page_size=PAGE, num_workers=1).from_indexed_dataset(_Listed(columns))


@lru_cache(1)
def own_file() -> bytes:
    """A small file with the fields image and label: 40 raw images, written by FFCV itself where it is installed."""
    images, labels = pictures(40, 3), [7 * i % 10 for i in range(40)]
    if not _ffcv_here():
        return beton([("image", IMAGE), ("label", INT)], [images, labels])
    from ffcv.fields import IntField, RGBImageField

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.beton"
        _written_by_ffcv(path, {"image": RGBImageField(), "label": IntField()}, [images, labels])
        return path.read_bytes()
