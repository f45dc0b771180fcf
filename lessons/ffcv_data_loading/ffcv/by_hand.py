"""Files of FFCV's format, version 2, read and written with NumPy alone: to look inside, and to do without FFCV."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DistributedSampler

HEADER = np.dtype([("version", "<u2"), ("fields", "<u2"), ("page", "<u4"), ("samples", "<u8"), ("table", "<u8")])
FIELD = np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")])
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("pointer", "<u8")])
PIECE = np.dtype([("sample", "<u8"), ("pointer", "<u8"), ("size", "<u8")])
JPEG, RAW = 0, 1  # modes of an image
#: In which modes the images of a file take turns, for the names that FFCV's RGBImageField has for them.
MODES = {"raw": (RAW,), "jpg": (JPEG,), "proportion": (RAW, JPEG)}
TYPES = {0: np.dtype("<f8"), 1: np.dtype("<i8"), 2: IMAGE}  # of fields: float, integer, image


def _record_type(fields: np.ndarray) -> np.dtype:
    """The type of a sample's record, aligned as C does it, from the field descriptors."""
    return np.dtype([(field["name"].decode(), TYPES[int(field["type"])]) for field in fields], align=True)


class Beton:
    """A ``.beton`` file of images and labels, mapped into memory: nothing is read before it is asked for.

    Attributes
    ----------
    header : record of dtype HEADER
    fields : array of dtype FIELD
        The field descriptors.
    samples : structured array
        One record a sample, with a part for each field.
    table : array of dtype PIECE
        The allocation table: sample, place and size of each piece in the pages.
    page_of : array of int
        The page in which each sample's image lies.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.bytes = np.memmap(path, np.uint8, "r")
        self.header = self._part(HEADER, 0, 1)[0]
        self.fields = self._part(FIELD, HEADER.itemsize, int(self.header["fields"]))
        start = HEADER.itemsize + self.fields.nbytes
        self.samples = self._part(_record_type(self.fields), start, int(self.header["samples"]))
        self.table = self.bytes[int(self.header["table"]) :].view(PIECE)
        self.page_of = (self.samples["image"]["pointer"] // self.header["page"]).astype(int)
        self._size = dict(zip(self.table["pointer"].tolist(), self.table["size"].tolist(), strict=True))

    def _part(self, dtype: np.dtype, start: int, number: int) -> np.ndarray:
        return self.bytes[start : start + number * dtype.itemsize].view(dtype)

    def image(self, number: int) -> np.ndarray:
        """The image of a sample: uint8 (height, width, 3)."""
        mode, width, height, pointer = self.samples["image"][number].tolist()
        data = self.bytes[pointer : pointer + self._size[pointer]]
        if mode == RAW:
            return data.reshape(height, width, 3)
        return np.asarray(Image.open(io.BytesIO(data.tobytes())).convert("RGB"))

    def segments(self) -> list[tuple[str, int, int]]:
        """The parts of the file for `figures.file_layout`: label, first byte, bytes."""
        start = HEADER.itemsize + self.fields.nbytes
        found = [("header", 0, HEADER.itemsize), ("fields", HEADER.itemsize, self.fields.nbytes)]
        found += [("metadata", start, self.samples.nbytes)]
        pieces = np.sort(self.table, order="pointer")
        found += [("image", int(piece["pointer"]), int(piece["size"])) for piece in pieces]
        return [*found, ("allocation table", int(self.header["table"]), self.table.nbytes)]


def _up_to(position: int, page: int) -> int:
    """The next multiple of `page`."""
    return -(-position // page) * page


def _stored(image: Image.Image, mode: int) -> bytes:
    """What the pages hold of an image: its pixels, or a JPEG file of quality 90."""
    if mode == RAW:
        return np.asarray(image).tobytes()
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90)
    return stream.getvalue()


def write_beton(
    source: Sequence[tuple[Image.Image, int]], path: str | os.PathLike, mode: str = "raw", page: int = 2 << 20
) -> None:
    """Write samples (RGB image, integer) as FFCV's writer does with one worker.

    A new page is opened when the next image does not fit, and each is written whole.

    Parameters
    ----------
    source : sequence of (image, int)
    path : str or path
    mode : str
        One of `MODES`; in a mixture every second image is JPEG, where FFCV draws which are.
    page : int
        Bytes, a power of 2.

    Raises
    ------
    ValueError
        There is no such mode, or an image is larger than a page.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    fields = np.array([(2, b"image", b""), (1, b"label", b"")], FIELD)
    samples, table = np.zeros(len(source), _record_type(fields)), np.zeros(len(source), PIECE)
    heap = _up_to(HEADER.itemsize + fields.nbytes + samples.nbytes, page)
    with open(path, "wb") as file:
        for i in range(len(source)):
            image, label = source[i]
            stored = MODES[mode][i % len(MODES[mode])]
            data = _stored(image, stored)
            if len(data) > page:
                raise ValueError(f"sample {i} has {len(data):,} bytes, and a page {page:,}")
            if heap % page + len(data) > page:
                heap = _up_to(heap, page)
            samples[i] = (stored, *image.size, heap), label
            table[i] = i, heap, len(data)
            file.seek(heap)
            file.write(data)
            heap += len(data)
        end = _up_to(heap, page)
        file.seek(end)
        file.write(table.tobytes())
        header = np.array((2, len(fields), page, len(source), end), HEADER)
        file.seek(0)
        file.write(header.tobytes() + fields.tobytes() + samples.tobytes())


class PlainLoader:
    """In place of FFCV's Loader on a rank: batches of its share of a file, images uint8 (B, 3, size, size)."""

    def __init__(self, path: str | os.PathLike, size: int, seed: int, batch: int = 64) -> None:
        self.file, self.size, self.batch, self.next_epoch = Beton(path), size, batch, 0
        self.sampler = DistributedSampler(range(len(self.file.samples)), seed=seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.sampler.set_epoch(self.next_epoch)
        self.next_epoch += 1
        for numbers in torch.tensor([*self.sampler]).split(self.batch):
            pixels = [self.file.image(i)[: self.size, : self.size] for i in numbers.tolist()]
            labels = self.file.samples["label"][numbers.numpy()]
            yield torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), torch.from_numpy(labels)
