"""A field of boxes for the exercises on data loading, which FFCV writes and loads with a learner's functions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ._beton import written_by_ffcv

__all__ = [
    "BOX_ROW", "MOST", "ROW", "decoded_by_ffcv", "encoded_by_ffcv", "padded_boxes", "random_boxes", "right_encode",
]

BOX_ROW = np.dtype([("count", "<u4"), ("pointer", "<u8")])  # what a row of the file holds of the boxes of an image
ROW = np.dtype([("label", "<i8"), ("boxes", BOX_ROW)], align=True)
MOST = 6  # boxes that the decoder returns of an image


def random_boxes(count: int, seed: int) -> np.ndarray:
    """Boxes of shape (count, 4), float32."""
    return np.random.default_rng(seed).uniform(0, 256, (count, 4)).astype(np.float32)


def padded_boxes(boxes: np.ndarray) -> np.ndarray:
    """What the decoder makes of the boxes of an image: the first `MOST`, then rows of -1."""
    full = np.full((MOST, 4), -1, np.float32)
    full[: len(boxes)] = boxes[:MOST]
    return full


def right_encode(destination: np.ndarray, boxes: np.ndarray, malloc: Callable) -> None:
    destination["count"] = len(boxes)
    if len(boxes):
        destination["pointer"], memory = malloc(boxes.nbytes)
        memory[:] = boxes.view(np.uint8).ravel()


def encoded_by_ffcv(encode: Callable, boxes: list[np.ndarray], path: Path) -> None:
    """Let FFCV write a file with rows `ROW`: the numbers of the images as labels, and their boxes by ``encode``."""
    from ffcv.fields import IntField

    fields = {"label": IntField(), "boxes": _box_field(encode, None)(MOST)}
    written_by_ffcv(path, fields, [list(range(len(boxes))), boxes])


def decoded_by_ffcv(decoder: Callable, boxes: list[np.ndarray], indices: list[int], size: int) -> list[np.ndarray]:
    """Batches of ``size`` images that FFCV's Loader compiles ``decoder`` for, in the order of ``indices``."""
    from ffcv.loader import Loader, OrderOption

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "boxes.beton"
        encoded_by_ffcv(right_encode, boxes, path)
        loader = Loader(
            str(path), batch_size=size, num_workers=1, order=OrderOption.SEQUENTIAL, drop_last=False,
            indices=np.array(indices, np.uint64), custom_fields={"boxes": _box_field(right_encode, decoder)},
            pipelines={"label": None},
        )
        return [batch.numpy().copy() for (batch,) in loader]


def _box_field(encode: Callable, decoder: Callable | None) -> Any:
    """FFCV's field, a class, around the two functions; imports FFCV."""
    from ffcv.fields.base import ARG_TYPE, Field
    from ffcv.pipeline.allocation_query import AllocationQuery
    from ffcv.pipeline.operation import Operation

    class BoxDecoder(Operation):
        def declare_state_and_memory(self, previous_state: Any) -> tuple:
            shape, dtype = (self.field.most, 4), np.dtype("<f4")
            return replace(previous_state, shape=shape, dtype=dtype), AllocationQuery(shape, dtype)

        def generate_code(self) -> Callable:
            return decoder(self.memory_read, self.field.most)

    class BoxField(Field):
        metadata_type = BOX_ROW

        def __init__(self, most: int):
            self.most = most

        def encode(self, destination: np.ndarray, boxes: np.ndarray, malloc: Callable) -> None:
            encode(destination, boxes, malloc)

        def to_binary(self) -> Any:
            arguments = np.zeros(1, ARG_TYPE)[0]
            arguments[0][:8] = np.array([self.most], "<u8").view(np.uint8)
            return arguments

        @classmethod
        def from_binary(cls, binary: np.ndarray) -> Any:
            return cls(int(binary[:8].view("<u8")[0]))

        def get_decoder_class(self) -> type:
            return BoxDecoder

    return BoxField
