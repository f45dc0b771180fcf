"""Files in FFCV's format for checks, made in memory and read through an object that counts."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .ffcv.by_hand import FIELD, HEADER, RAW, TYPES, write_beton

FLOAT, INT, IMAGE, CUSTOM = 0, 1, 2, 255  # types of fields
PAGE = 1 << 21  # the smallest that FFCV writes


class CountedFile(io.BytesIO):
    """Bytes as a file without a descriptor; ``count`` is how many have been read."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer)
        self.count += size
        return size


def row_type(kinds: Sequence[int]) -> np.dtype:
    """The type of a sample's row, from the types of its fields."""
    return np.dtype([(f"f{i}", TYPES[kind]) for i, kind in enumerate(kinds)], align=True)


def beton(fields: Sequence[tuple[str, int]], columns: Sequence[Sequence]) -> bytes:
    """A file in FFCV's format: for each field (name, type) a column of numbers, or of raw images (height, width, 3).

    The images lie in another order than the rows, and the allocation table, which a row does not need, is left out.
    """
    samples = len(columns[0])
    header = np.array((2, len(fields), PAGE, samples, 0), HEADER)
    descriptors = np.array([(kind, name.encode(), b"") for name, kind in fields], FIELD)
    rows, heap = np.zeros(samples, row_type([kind for _, kind in fields])), bytearray()
    for i, (_, kind) in enumerate(fields):
        if kind != IMAGE:
            rows[f"f{i}"] = columns[i]
            continue
        for sample in np.random.default_rng(5).permutation(samples).tolist():
            image = columns[i][sample]
            rows[f"f{i}"][sample] = (RAW, image.shape[1], image.shape[0], PAGE + len(heap))
            heap += image.tobytes()
    head = header.tobytes() + descriptors.tobytes() + rows.tobytes()
    return head + bytes(PAGE - len(head)) + bytes(heap)


def pictures(count: int, seed: int) -> list[np.ndarray]:
    """Random pictures, higher than wide or wider than high, each different."""
    rng = np.random.default_rng(seed)
    sizes = [(int(h), int(w)) for h, w in rng.integers(3, 9, (count, 2))]
    return [rng.integers(0, 256, (h, w + (w == h), 3), np.uint8) for h, w in sizes]


def own_file() -> bytes:
    """A small file with the fields image and label: 40 raw images, as FFCV's writer makes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.beton"
        write_beton([(Image.fromarray(image), 7 * i % 10) for i, image in enumerate(pictures(40, 3))], path)
        return path.read_bytes()
