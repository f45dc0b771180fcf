"""Checks of the exercises on data loading with FFCV.

Each takes the learner's function, and ``timeout`` in seconds unless it is a formula; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Files are read through an object that counts every byte; orders and
shards are judged by what they promise, so that any with the property passes; the training jobs run on a clock of their
own, so that no machine is too busy for them. What needs FFCV itself runs where FFCV is installed.
"""

from __future__ import annotations

import math
import numbers
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import TIMEOUT, CheckFailed, Exercise, checked, paper_problem
from ._beton import (
    CUSTOM,
    DESCRIPTOR,
    FLOAT,
    HEADER,
    IMAGE,
    INT,
    OLD,
    PAGE,
    ROWS,
    CountedFile,
    Heap,
    beton,
    ffcv_here,
    own_file,
    pictures,
    written_by_ffcv,
)
from ._jobs import HIDDEN, JOBS, MEASURED, STAGES, Job, steady
from ._limits import Endless, limited

__all__ = [
    "BOX_ROW", "HINTS", "JOBS", "STAGES", "Job", "box_decoder", "encode_boxes", "find_bottleneck", "hit_rate",
    "imagenet_epoch", "own_file", "quasi_random", "read_header", "read_sample", "shard",
]  # fmt: skip

_BYTES = {
    "no-descriptor": "np.fromfile and mmap want a file of the operating system. This one counts its bytes in Python: "
    "use file.seek(place) and file.read(count), and np.frombuffer or struct for the numbers.",
    "whole-file": "The whole file was read. ImageNet in raw pixels has 170 GB: read the parts that the question needs.",
}

HINTS: dict[str, dict[str, str]] = {
    "read_header": _BYTES | {
        "form": "Return a dictionary with version, page_size, samples and table as whole numbers, and fields as a list "
        "of pairs (name, type).",
        "too-many-bytes": "The numbers are right, but more was read than 24 bytes and 1041 for each field. A buffered "
        "reader takes whole blocks; so does a read with a number that is too large.",
        "value": "Something was read from another place than the card says: 2, 2, 4, 8 and 8 bytes without gaps, and "
        "then for each field its type, its name, its arguments.",
        "byte-order": "The bytes were read from the wrong end. The format is little endian: '<' in struct and in "
        "NumPy's types.",
        "swapped": "Two numbers of 8 bytes follow each other: first the samples, then the place of the table.",
        "narrow": "A number lost its upper half. Samples and the place of the table have 8 bytes each.",
        "fields-count": "The header says how many fields follow. Here it is another number.",
        "descriptor-size": "The first field is right, a later one is not. A descriptor has 1 + 16 + 1024 bytes, "
        "without padding.",
        "names": "A name is text: 16 bytes in the file, of which the zeros at the end do not belong to it.",
        "full-name": "A name of 16 characters fills its place: no zero follows. Do not cut the last character off.",
        "version": "Only version 2 has this form. Refuse another one with a ValueError, before you misread it.",
    },
    "read_sample": _BYTES | {
        "form": "Return a pair: a NumPy array of dtype uint8 and shape (height, width, 3), and the label as an int.",
        "too-many-bytes": "The sample is right, but more was read than the header, the descriptors, one row and the "
        "pixels.",
        "all-rows": "The sample is right, but the rows of all samples were read, or the allocation table. Row i starts "
        "at a place that you can compute.",
        "packed": "Rows are aligned: every field starts at a multiple of its alignment, and the row's length is a "
        "multiple of the largest. np.dtype([…], align=True) does that.",
        "index": "That is another sample. Where does row number `index` start?",
        "width-height": "Width and height are exchanged. The row stores the width first; NumPy wants the rows of "
        "pixels, the height, first.",
        "field-order": "Right if the image comes first and the label second, wrong for another order. The descriptors "
        "say which field has which type.",
        "narrow-size": "Small images are right, a larger one is not. NumPy numbers of 2 bytes have a product of 2 "
        "bytes, and 200 · 150 · 3 does not fit: use int() on each.",
        "pointer": "The pixels come from another place. The pointer counts from the beginning of the file.",
        "channels": "The pixels are stored row by row, and in a row pixel by pixel, with its three colours together.",
    },
    "encode_boxes": {
        "not-written": "The row is unchanged. destination is an array with one row: assign to destination['count'], "
        "not to the name destination.",
        "count": "The row's count is not the number of boxes.",
        "pointer": "The row's pointer is not an address that malloc returned.",
        "not-copied": "Memory was asked for and not filled. malloc returns the address, and an array of bytes to "
        "write into: memory[:] = …",
        "float64": "The boxes were stored as they came. The decoder expects float32: convert first.",
        "contiguous": "It fails, or stores other numbers, where the boxes are a part of a larger array. "
        "np.ascontiguousarray makes a copy with the numbers side by side.",
        "bytes": "The bytes in memory are not those of the boxes: four float32 a box, one box after the other.",
        "changed": "The boxes that encode was given are others afterwards. The writer may call it again with them: "
        "work on a copy.",
        "mallocs": "malloc was called more than once. The row keeps one address.",
        "padded": "More memory was asked for than 16 bytes a box. The count in the row makes filling up unnecessary.",
        "empty-malloc": "malloc(0) returns the address at which the next memory starts as well. FFCV looks up sizes by "
        "address, and may find 0 bytes for the next one. Without boxes, ask for nothing.",
    },
    "box_decoder": {
        "form": "Return the function decode; and decode returns the boxes of the batch, float32 of shape "
        "(batch, most, 4).",
        "stale": "Buffers are used again, and what an earlier batch left in them is still there. Fill the places "
        "without a box with -1.",
        "unfilled": "No box is there at all. Fill up with -1 first, and write the boxes into destination after that.",
        "position": "Those are the boxes of another sample. Position i in the batch has sample number indices[i].",
        "no-boxes": "A row without boxes has no memory: its pointer means nothing. Read only if count is not 0.",
        "more": "An image has more boxes than most. Leave out the rest: in compiled code nothing stops you from "
        "writing beyond the end.",
        "bytes": "read returns bytes. See them as float32, and then as rows of four.",
        "numba": "It is right in Python, and Numba cannot compile it. Keep to loops, indexing and NumPy calls on "
        "arrays; no lists, dictionaries, Python objects or torch.",
    },
    "quasi_random": {
        "form": "Return the numbers of the samples in the order of reading: a list or an array of whole numbers.",
        "incomplete": "Some samples are never read. Are all pages as full as the first, and is the last group as large "
        "as the others?",
        "twice": "Some samples come more than once in an epoch.",
        "random": "That is a full shuffle: nearly all pages are open at once, and in a small memory most reads go to "
        "the disk again.",
        "over-cap": "More pages are open at once than fit, even if none is loaded ahead. A page is open from its first "
        "sample to its last one: open a new page only when another one is used up.",
        "ahead": "It would fit if no page were loaded ahead. A page is in memory from `ahead` samples before its first "
        "one: while it waits there, the page whose place it takes is not yet used up. Several pages may end at nearly "
        "the same time, so count: a page takes room from step first - ahead to step last, both included.",
        "unsorted": "Right where each page holds neighbours, wrong where several writers took turns: look up the page "
        "of each sample in pages.",
        "sequential": "That is the order of the file. Neighbours in the file would always be together in a batch.",
        "page-order": "The pages are opened in the order of the file, or nearly. Shuffle them too.",
        "within": "The samples of a page come in the order of the file. Shuffle them too.",
        "one-page": "Pages are read one after the other, although there is room for more. A batch then holds "
        "neighbours only: mix the samples of all pages that fit.",
        "unused-cap": "Fewer pages are open, on average, than could be. The more, the nearer to a full shuffle: open "
        "the next page as soon as one is used up, not a whole group at once; draw evenly among the open pages; and "
        "take the widest window that fits, for each seed anew.",
        "no-window": "No order was returned: did no window fit? One open page at a time always does.",
        "dead-end": "Two pages fit here, and one of them may be the page to come, so one open page at a time must be a "
        "possible answer. An order that opens a page only when it could have been loaded may come to a point where no "
        "page is open and none may be opened: then take a window of pages for this seed.",
        "round-robin": "The pages take turns in a fixed pattern. Draw which one is next, sample by sample.",
        "not-reproducible": "Two calls with the same seed give different orders. Ranks, and a resumed run, need the "
        "same one: make a generator from the seed.",
        "same-every-epoch": "Another seed gives the same order of samples or of pages. Each epoch wants its own.",
        "large-cap": "With room for all pages the answer must work all the same: it is then a full shuffle.",
        "one": "With room for one page the answer must work all the same: pages in random order, one at a time.",
    },
    "find_bottleneck": {
        "form": "Return a pair: the name of a stage, one of STAGES, and the share of waiting in per cent.",
        "warm-up": "The first batches were counted. One of them holds the compilation, which happens once in a run; "
        "begin to measure after some batches.",
        "longest": "That stage takes the longest alone, in one thread. But it is shared by several threads, or runs "
        "beside the step: making it faster changes the run less than another one would. Compare runs with their steps.",
        "loader-only": "The step itself is the bottleneck here. Halve it as well, and compare the seconds of the run.",
        "clock": "The job has a clock of its own, job.clock(). Your machine's tells how long the imitation takes.",
        "stage": "Making another stage twice as fast brings more. Compare the whole run with each stage halved.",
        "fraction": "The docstring asks for per cent.",
        "waits-warm-up": "The share contains the waiting for the first batch, with the compilation. Begin to measure "
        "after some batches.",
        "added": "That is the loader's share if loader and step took turns. They run at the same time here: measure "
        "how long next() takes.",
        "working": "That is the share in which the step works.",
        "waits": "Add up the time that next() takes, and divide by the time of the whole loop.",
    },
    "shard": {
        "form": "Return a list of batches, each a list of the numbers of samples from 0 to count - 1.",
        "batch-size": "A batch is larger than asked for.",
        "not-sharded": "Every rank gets every sample. Together they work through the set as often as there are ranks.",
        "own-shuffle": "Samples are there twice, and others not at all: each rank has shuffled in another way. Seed a "
        "generator with what all ranks know, seed and epoch.",
        "padded": "Samples are repeated until all ranks have the same number; DistributedSampler does that, and an "
        "evaluation then counts some twice. Let batches differ in size instead.",
        "overlap": "Two ranks hold the same sample. Where does one rank's part end, and the next one's begin?",
        "last-batch": "Only whole batches are there; the last samples are lost in every epoch. FFCV's Loader does that "
        "too, with drop_last=True, which is its default.",
        "remainder": "The samples that remain after an equal division are lost.",
        "missing": "Some samples are on no rank.",
        "steps": "Ranks have different numbers of batches. In DDP the rank with more of them waits for ever.",
        "empty-batch": "A batch is empty. Its loss is a mean over nothing.",
        "small-batches": "More steps than needed: with n ranks a step can hold n * batch samples.",
        "not-shuffled": "The samples come in the order of the file.",
        "not-reproducible": "Two calls with the same arguments give different batches. A resumed run needs the same "
        "ones.",
        "same-every-epoch": "Another epoch, or another seed, gives the same batches.",
        "fixed-shard": "A rank always gets the same samples, only in another order. Shuffle first, then share out.",
        "messages": "The ledger shows a message. Seed, epoch, rank and world size are enough to compute it alone.",
    },
    "imagenet_epoch": {
        "gigabits": "Both are gigabytes here, of the file and of the disk.",
        "memory-ignored": "If the file fits in memory, the disk is read in the first epoch only.",
        "always-cached": "The file does not fit in memory: later epochs read the disk, too.",
        "first-epoch": "In the first epoch everything comes from the disk, whether it fits in memory or not.",
        "added": "Disk, CPU and GPUs work at the same time, on different batches. The slowest sets the pace; the times "
        "do not add up.",
        "fastest": "The slowest part sets the pace, not the fastest.",
        "cached-part": "The page cache does not help with a file that does not fit, says the text: a later epoch reads "
        "all of it.",
        "minutes": "The docstring asks for seconds.",
        "numbers": "Take one case by hand: the seconds that the disk, the CPU and the GPUs need for all images, each "
        "alone.",
        "bottleneck": "The times are right. The word names what sets the pace in the later epochs: 'disk', 'cpu' or "
        "'gpu'.",
    },
}  # fmt: skip

# ------------------------------------------------------------------------------------------------ files that count


def _shown(value: Any) -> str:
    """The beginning of a value as text, in one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= 100 else f"{text[:100]} …"


def _asked(exercise: Exercise, fn: Callable, content: bytes, *args: Any) -> tuple[Any, CountedFile]:
    """Call ``fn(file, *args)``; refuses an answer that fails because it asks for a descriptor."""
    file = CountedFile(content)
    try:
        return exercise.call(fn, file, *args), file
    except CheckFailed:
        exercise.require(not file.wanted_descriptor, "no-descriptor", "the function wants a file descriptor.")
        raise


def _thrifty(exercise: Exercise, file: CountedFile, enough: int, slack: int = 0, rows: float = math.inf) -> None:
    """Refuse an answer that has read the whole file, as much as all rows have, or more than ``enough`` bytes."""
    whole = file.count >= 0.9 * len(file._content)
    what = f"{file.count:,} bytes were read, {enough:,} do; the file has {len(file._content):,}."
    exercise.require(not whole, "whole-file", what)
    exercise.require(file.count < rows, "all-rows", what)
    exercise.require(file.count <= enough + slack, "too-many-bytes", what)


def _header(content: bytes) -> dict[str, Any]:
    head = np.frombuffer(content, HEADER, 1)[0]
    fields = np.frombuffer(content, DESCRIPTOR, int(head["fields"]), HEADER.itemsize)
    numbers_ = {key: int(head[of]) for key, of in _NUMBERS.items()}
    return numbers_ | {"fields": [(f["name"].decode(), int(f["type"])) for f in fields]}


_NUMBERS = {"version": "version", "page_size": "page", "samples": "samples", "table": "table"}


def _headers() -> Iterator[tuple[str, bytes]]:
    """Cases: a name, and the beginning of a file, or all of it."""
    yield "fields image and label", own_file()
    for case, fields, page, samples, table in (
        ("one field", [("label", INT)], PAGE, 77, 3 * PAGE),
        ("five fields", [("image", IMAGE), ("boxes", CUSTOM), ("x", FLOAT), ("caption", 3), ("label", INT)],
         1 << 23, 1281167, 170 << 30),
        ("a name of 16 characters", [("coarse_label_100", INT), ("image", IMAGE)], 1 << 23, 50000, 1 << 25),
        ("6 billion samples", [("image", IMAGE), ("label", INT)], 1 << 22, 6 * 10**9 + 3, 1 << 50),
    ):  # fmt: skip
        head = np.array((2, len(fields), page, samples, table), HEADER).tobytes()
        arguments = np.random.default_rng(1).bytes(1024)
        descriptors = np.array([(kind, name.encode(), arguments) for name, kind in fields], DESCRIPTOR).tobytes()
        yield case, head + descriptors + bytes(PAGE)


@checked
def read_header(fn: Callable) -> None:
    """Check ``fn(file) -> dict`` on files that count: version, page size, samples, table and fields."""
    exercise = Exercise("Exercise 1", HINTS["read_header"])
    for exercise.case, content in _headers():
        got, file = _asked(exercise, fn, content)
        _same_header(exercise, got, _header(content))
        enough = HEADER.itemsize + DESCRIPTOR.itemsize * len(got["fields"])
        _thrifty(exercise, file, enough)
        read = file.count
    exercise.case = "a file of version 1"
    file = CountedFile(bytes([1]) + content[1:])
    try:
        what, refused = f"the function returned {_shown(limited(lambda: fn(file)))}.", False
    except Endless:
        exercise.refuse("endless", "the function does not come to an end.")
    except Exception as error:
        what, refused = f"{type(error).__name__}: {error}", isinstance(error, ValueError)
    exercise.require(refused, "version", what)
    print(f"Exercise 1 passed: {read:,} bytes read of a file with 2 fields, whatever its size.")


def _whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _same_header(exercise: Exercise, got: Any, right: dict[str, Any]) -> None:
    form = isinstance(got, dict) and set(got) == set(right) and all(_whole(got[key]) for key in _NUMBERS)
    form = form and isinstance(got["fields"], (list, tuple))
    form = form and all(isinstance(f, (list, tuple)) and len(f) == 2 for f in got["fields"])
    exercise.require(form, "form", f"the function returned {_shown(got)}.")
    for key, of in _NUMBERS.items():
        value, expected = int(got[key]), right[key]
        if value == expected:
            continue
        size = HEADER[of].itemsize
        turned = int.from_bytes(expected.to_bytes(size, "little"), "big")
        other = {"samples": "table", "table": "samples"}.get(key)
        hint = "value"
        if value == turned:
            hint = "byte-order"
        elif other and value == right[other]:
            hint = "swapped"
        elif value == expected % 2**32:
            hint = "narrow"
        exercise.refuse(hint, f"{key} is wrong.\n  expected  {expected}\n  got       {value}")
    names, expected = [tuple(f) for f in got["fields"]], right["fields"]
    what = f"the fields are wrong.\n  expected  {expected}\n  got       {names}"
    exercise.require(len(names) == len(expected), "fields-count", what)
    for i, ((name, kind), (right_name, right_kind)) in enumerate(zip(names, expected, strict=True)):
        if name == right_name and _whole(kind) and kind == right_kind:
            continue
        if len(right_name) == 16 and isinstance(name, str) and name == right_name[:15]:
            exercise.refuse("full-name", what)
        plain = bytes(name) if isinstance(name, (bytes, bytearray, np.ndarray)) else str(name).encode()
        exercise.refuse("names" if plain.startswith(right_name.encode()) else "descriptor-size" if i else "value", what)


_SAMPLE_CASES = (  # name, fields, hint for failures that nothing explains
    ("fields image and label", [("image", IMAGE), ("label", INT)], None),
    ("fields label, weight and image", [("label", INT), ("weight", FLOAT), ("image", IMAGE)], "field-order"),
    ("fields picture, weight and class", [("picture", IMAGE), ("weight", FLOAT), ("class", INT)], "field-order"),
)


@checked
def read_sample(fn: Callable) -> None:
    """Check ``fn(file, index) -> (image, label)``, with no more bytes than header, row and pixels have."""
    exercise = Exercise("Exercise 2", HINTS["read_sample"])
    samples = 3000
    images, large = pictures(samples, 8), np.random.default_rng(9).integers(0, 256, (200, 150, 3), np.uint8)
    images[1234] = large
    labels = [int(v) for v in np.random.default_rng(2).integers(0, 1000, samples)]
    for case, fields, fallback in _SAMPLE_CASES:
        columns = {IMAGE: images, INT: labels, FLOAT: [0.25 * i for i in range(samples)]}
        content = beton(fields, [columns[kind] for _, kind in fields], shuffled=True)
        row = np.dtype([("", ROWS[kind]) for _, kind in fields], align=True).itemsize
        for index in (0, 1, 1234, samples - 1):
            exercise.case, exercise.fallback = f"{case}, sample {index}", fallback
            try:
                got, file = _asked(exercise, fn, content, index)
            except CheckFailed as error:
                if index and error.hint == "error":
                    hint = "narrow-size" if images[index] is large else "index"
                    exercise.refuse(hint, str(error).split("\n\n")[-1])
                raise
            _same_sample(exercise, got, images, labels, index)
            enough = HEADER.itemsize + DESCRIPTOR.itemsize * len(fields) + row + images[index].nbytes
            _thrifty(exercise, file, enough, slack=64, rows=row * samples + images[index].nbytes)
    print(f"Exercise 2 passed: {file.count:,} bytes read for one sample of a file of {len(content):,}.")


def _form_of(value: Any) -> str:
    """What kind of thing a value is: type, and shape and dtype if it has them, or the value."""
    if getattr(value, "shape", None) is None or getattr(value, "dtype", None) is None:
        return _shown(value)
    return f"{type(value).__name__} of shape {tuple(value.shape)}, dtype {value.dtype}"


def _same_sample(exercise: Exercise, got: Any, images: list[np.ndarray], labels: list[int], index: int) -> None:
    form = isinstance(got, (tuple, list)) and len(got) == 2 and isinstance(got[0], np.ndarray) and _whole(got[1])
    what = " and ".join(map(_form_of, got)) if isinstance(got, (tuple, list)) else _shown(got)
    exercise.require(form, "form", f"the function returned {what}.")
    image, label = got[0], int(got[1])
    expected, fallback = images[index], exercise.fallback
    shape = f"shape {image.shape}, dtype {image.dtype}; expected {expected.shape}, uint8."
    if image.shape != expected.shape or image.dtype != np.uint8:
        turned = image.dtype == np.uint8 and image.shape == (expected.shape[1], expected.shape[0], 3)
        other = image.shape != expected.shape and any(np.array_equal(image, some) for some in images)
        misread = image.dtype == np.uint8 and image.ndim == 3 and index and not fallback
        hint = "width-height" if turned else "index" if other or misread else fallback or "form"
        hint = "form" if np.array_equal(image, expected) else hint
        exercise.refuse(hint, f"the image has {shape}")
    if not np.array_equal(image, expected):
        planes = expected.tobytes() == image.transpose(2, 0, 1).tobytes()
        planes = planes or np.array_equal(np.sort(image.ravel()), np.sort(expected.ravel()))
        exercise.refuse("channels" if planes else fallback or "pointer", "the pixels are wrong.")
    if label != labels[index]:
        other = label in (labels[0], labels[max(0, index - 1)], labels[min(index + 1, len(labels) - 1)])
        hint = fallback or ("index" if index and other else "packed")
        exercise.refuse(hint, f"the label is {label}; expected {labels[index]}.")


# ------------------------------------------------------------------------------------------------ a field of one's own

BOX_ROW = np.dtype([("count", "<u4"), ("pointer", "<u8")])  # what a row of the file holds of the boxes of an image


MOST = 6  # boxes that the decoder returns of an image


def _boxes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, 256, (count, 4)).astype(np.float32)


@checked
def encode_boxes(fn: Callable) -> None:
    """Check ``fn(destination, boxes, malloc)``: the row, and the bytes behind its pointer."""
    exercise = Exercise("Exercise 3", HINTS["encode_boxes"])
    heap = Heap()
    wide = np.random.default_rng(4).uniform(0, 256, (5, 9)).astype(np.float32)
    cases = [
        ("3 boxes", _boxes(3, 1), None), ("1 box", _boxes(1, 2), None), ("no box", _boxes(0, 3), None),
        ("2 boxes in float64", _boxes(2, 4).astype(np.float64), "float64"),
        ("5 boxes, columns 2 to 5 of a larger array", wide[:, 2:6], "contiguous"),
        ("40 boxes", _boxes(40, 6), None),
    ]  # fmt: skip
    rows = np.zeros(len(cases), np.dtype([("label", "<i8"), ("boxes", BOX_ROW)], align=True))
    rows["boxes"] = (2**32 - 1, 2**64 - 1)
    for i, (exercise.case, boxes, exercise.fallback) in enumerate(cases):
        asked: list[tuple[int, np.ndarray]] = []

        def malloc(size: int, asked: list = asked) -> tuple[int, np.ndarray]:
            asked.append(heap.malloc(size))
            return asked[-1]

        before = boxes.copy()
        exercise.call(fn, rows["boxes"][i : i + 1], boxes, malloc)
        exercise.require(np.array_equal(boxes, before), "changed", "the boxes were changed.")
        _same_boxes(exercise, rows["boxes"][i], boxes, asked)
    exercise.fallback = None
    said = "written by FFCV and read back by hand" if _ffcv_writes(exercise, fn) else "read back by hand"
    print(f"Exercise 3 passed: 16 bytes a box, {said}.")


def _same_boxes(exercise: Exercise, row: np.void, boxes: np.ndarray, asked: list[tuple[int, np.ndarray]]) -> None:
    unchanged = (int(row["count"]), int(row["pointer"])) == (2**32 - 1, 2**64 - 1)
    exercise.require(not unchanged, "not-written", "nothing was written.")
    what = f"count is {row['count']}, for {len(boxes)} boxes."
    exercise.require(row["count"] == len(boxes), "count", what)
    if not len(boxes):
        exercise.require(not asked, "empty-malloc", "malloc was called for no boxes.")
        return
    exercise.require(len(asked) < 2, "mallocs", f"malloc was called {len(asked)} times.")
    exercise.require(len(asked) == 1, "pointer", "malloc was not called.")
    address, memory = asked[0]
    what = f"the pointer is {row['pointer']}; malloc returned {address}."
    exercise.require(int(row["pointer"]) == address, "pointer", what)
    right = np.frombuffer(np.ascontiguousarray(boxes, np.float32).tobytes(), np.uint8)
    if len(memory) % 4 == 0 and (memory.reshape(-1, 4) == OLD).all():
        exercise.refuse("not-copied", "the memory is as malloc returned it.")
    double = np.frombuffer(np.ascontiguousarray(boxes, np.float64).tobytes(), np.uint8)
    if boxes.dtype == np.float64 or np.array_equal(memory, double):
        exercise.require(np.array_equal(memory, right), "float64", "the bytes are not those of float32.")
    what = f"{len(memory)} bytes were asked for; {len(right)} do."
    exercise.require(len(memory) <= len(right) or not np.array_equal(memory[: len(right)], right), "padded", what)
    same = np.array_equal(memory, right)
    exercise.require(same, exercise.fallback or "bytes", "the bytes are not those of the boxes.")


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


def _ffcv_writes(exercise: Exercise, encode: Callable) -> bool:
    """Let FFCV's writer use the learner's function, and read the file by hand; False without FFCV."""
    if not ffcv_here():
        return False
    exercise.case = "a file of 50 images, written by FFCV"
    columns = [list(range(50)), [_boxes(7 * i % 5, i) for i in range(50)]]
    from ffcv.fields import IntField

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "boxes.beton"
        fields = {"label": IntField(), "boxes": _box_field(encode, None)(MOST)}
        try:
            written_by_ffcv(path, fields, columns)
        except Exception as error:
            exercise.refuse("error", f"FFCV's writer fails.\n\n{type(error).__name__}: {error}")
        content = path.read_bytes()
    start = HEADER.itemsize + 2 * DESCRIPTOR.itemsize
    rows = np.frombuffer(content, np.dtype([("label", "<i8"), ("boxes", BOX_ROW)], align=True), 50, start)["boxes"]
    for row, boxes in zip(rows, columns[1], strict=True):
        got = np.frombuffer(content, "<f4", 4 * len(boxes), int(row["pointer"])) if len(boxes) else boxes.ravel()
        exercise.require(row["count"] == len(boxes) and np.array_equal(got, boxes.ravel()), "bytes", "other boxes.")
    return True


def _right_encode(destination: np.ndarray, boxes: np.ndarray, malloc: Callable) -> None:
    destination["count"] = len(boxes)
    if len(boxes):
        destination["pointer"], memory = malloc(boxes.nbytes)
        memory[:] = boxes.view(np.uint8).ravel()


@checked
def box_decoder(fn: Callable) -> None:
    """Check ``fn(read, most) -> decode``: in Python first, then compiled and called by FFCV's Loader."""
    exercise = Exercise("Exercise 4", HINTS["box_decoder"])
    heap = Heap()
    counts = [2, 0, 6, 1, 3, 0, 5, 4, 9, 2, 1, 0]
    boxes = [_boxes(count, 30 + i) for i, count in enumerate(counts)]
    rows = np.zeros(len(counts), np.dtype([("label", "<i8"), ("boxes", BOX_ROW)], align=True))["boxes"]
    for i, some in enumerate(boxes):
        _right_encode(rows[i : i + 1], some, heap.malloc)
        rows[i]["pointer"] += 77 * (not len(some))
    exercise.case = "in Python"
    decode = exercise.call(fn, heap.read, MOST)
    exercise.require(callable(decode), "form", f"the function returned {_shown(decode)}.")
    for case, indices, fallback in (
        ("every image has boxes", [0, 2, 3, 4], None), ("in another order", [7, 6, 0, 9, 10], "position"),
        ("an image without boxes", [1, 4, 5, 0, 2], "no-boxes"), ("an image with 9 boxes, most = 6", [8, 3], "more"),
    ):  # fmt: skip
        exercise.case, exercise.fallback = f"in Python, {case}", fallback
        destination = np.full((len(indices), MOST, 4), 7e7, np.float32)
        try:
            got = exercise.call(decode, np.array(indices, np.uint64), destination, rows, None)
        except CheckFailed as error:
            if "NoSuchAddress" in str(error):
                exercise.refuse("no-boxes" if fallback == "no-boxes" else "position", str(error).split("\n\n")[-1])
            raise
        _same_decoded(exercise, got, boxes, indices)
    exercise.fallback = None
    said = "compiled by FFCV's Loader as well" if _ffcv_reads(exercise, fn, boxes) else "in Python, without FFCV"
    print(f"Exercise 4 passed: {len(counts)} images, {said}.")


def _padded(boxes: np.ndarray) -> np.ndarray:
    full = np.full((MOST, 4), -1, np.float32)
    full[: len(boxes)] = boxes[:MOST]
    return full


def _same_decoded(exercise: Exercise, got: Any, boxes: list[np.ndarray], indices: list[int]) -> None:
    form = isinstance(got, np.ndarray) and got.shape == (len(indices), MOST, 4) and got.dtype == np.float32
    what = _form_of(got) if isinstance(got, np.ndarray) else _shown(got)
    exercise.require(form, "form", f"decode returned {what}.")
    value = float(got.ravel()[0])
    what = f"every place holds {value:g}."
    exercise.require((got != value).any() or all(not len(boxes[k]) for k in indices), "unfilled", what)
    for i, sample in enumerate(indices):
        right, count = _padded(boxes[sample]), min(MOST, len(boxes[sample]))
        if np.array_equal(got[i], right):
            continue
        first = ", ".join(f"{number:.1f}" for number in got[i, 0].tolist())
        what = f"place {i} of the batch, sample {sample}, begins with {first}."
        if count and not np.array_equal(got[i, :count], right[:count]):
            others = [some[:MOST] for k, some in enumerate(boxes) if k != sample]
            other = any(np.array_equal(got[i, : len(some)], some) for some in others if len(some))
            other = other or np.array_equal(got[i], _padded(boxes[1]))
            exercise.refuse("position" if other else exercise.fallback or "bytes", what)
        exercise.refuse("stale", f"{what} It has {count} boxes.")


def _ffcv_reads(exercise: Exercise, fn: Callable, boxes: list[np.ndarray]) -> bool:
    """Write the boxes with FFCV, and let its Loader compile and call the learner's decoder; False without FFCV."""
    if not ffcv_here():
        return False
    from ffcv.fields import IntField
    from ffcv.loader import Loader, OrderOption

    exercise.case = "compiled by FFCV"
    field = _box_field(_right_encode, fn)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "boxes.beton"
        written_by_ffcv(path, {"label": IntField(), "boxes": field(MOST)}, [list(range(len(boxes))), boxes])
        indices = [*range(1, len(boxes)), 0]

        def read() -> list[np.ndarray]:
            loader = Loader(
                str(path), batch_size=5, num_workers=1, order=OrderOption.SEQUENTIAL, drop_last=False,
                indices=np.array(indices, np.uint64), custom_fields={"boxes": field}, pipelines={"label": None},
            )  # fmt: skip
            return [batch.numpy().copy() for (batch,) in loader]

        try:
            got = limited(read, computing=300.0, limit=600.0)  # a compiler runs first
        except (Exception, Endless) as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or ["it does not come to an end"]
            exercise.refuse("numba", "\n".join(["FFCV cannot use it.", "", f"{type(error).__name__}:", *lines[:6]]))
    for k, batch in enumerate(got):
        _same_decoded(exercise, batch, boxes, indices[5 * k : 5 * k + len(batch)])
    exercise.require(sum(map(len, got)) == len(boxes), "form", f"{sum(map(len, got))} of {len(boxes)} samples came.")
    return True


# ------------------------------------------------------------------------------------------------ quasi-random order


def _order_cases() -> Iterator[tuple[str, np.ndarray, int, int, str | None]]:
    """A name, the page of every sample, how many pages fit, how far ahead, a hint for failures that nothing explains.

    Pages hold more samples than are loaded ahead: an order with one page open has no more than two in memory.
    """
    rng = np.random.default_rng(11)
    even = np.repeat(np.arange(1, 33), 24)
    yield "pages 1 to 32 of 24 samples each, 4 fit", even, 4, 0, None
    sizes = rng.integers(8, 40, 30)
    yield "30 pages of 8 to 39 samples, numbered 3, 5, 7, …, 5 fit", np.repeat(3 + 2 * np.arange(30), sizes), 5, 0, None
    yield "three writers took turns, 4 of 27 pages fit", _by_turns(27, 20), 4, 0, "unsorted"
    yield "24 pages of 16 samples, 1 fits", np.repeat(np.arange(24), 16), 1, 0, "one"
    yield "10 pages of 30 samples, 12 fit", np.repeat(np.arange(1, 11), 30), 12, 0, "large-cap"
    yield "pages 1 to 32 of 24 samples each, 9 fit, loaded 12 samples ahead", even, 9, 12, None
    yield "pages 1 to 32 of 24 samples each, 9 fit, loaded 2 samples ahead", even, 9, 2, None
    long = np.repeat(np.arange(40), rng.integers(24, 60, 40))
    yield "40 pages of 24 to 59 samples, 12 fit, loaded 20 samples ahead", long, 12, 20, None
    yield "24 pages of 16 samples, 2 fit, loaded 8 samples ahead", np.repeat(np.arange(24), 16), 2, 8, "dead-end"


def _by_turns(pages: int, each: int) -> np.ndarray:
    """Pages of samples that three processes wrote in turns: neighbours lie on three pages."""
    groups = np.arange(pages).reshape(-1, 3)
    return np.concatenate([np.tile(group, each) for group in groups])


def hit_rate(accesses: Sequence[int], cap: int) -> float:
    """Share of accesses whose page is in memory, if ``cap`` fit and the one that is needed latest goes first."""
    later: dict[int, list[int]] = {}
    for step in reversed(range(len(accesses))):
        later.setdefault(accesses[step], []).append(step)
    held, hits = set(), 0
    for page in accesses:
        later[page].pop()
        hits += page in held
        if page not in held:
            if len(held) == cap:
                held.remove(max(held, key=lambda p: later[p][-1] if later[p] else math.inf))
            held.add(page)
    return hits / len(accesses)


@cache
def _open_in_windows() -> dict[str, float]:
    """Pages open on average, by case, in orders of the widest window that fits: what others are measured by."""
    return {
        case: float(np.mean([_windowed(pages, cap, ahead, seed) for seed in range(_SEEDS if ahead else 1)]))
        for case, pages, cap, ahead, _ in _order_cases()
    }


def _windowed(pages: np.ndarray, cap: int, ahead: int, seed: int) -> float:
    for window in range(min(cap, len(np.unique(pages))), 0, -1):
        rng = np.random.default_rng(seed)
        waiting = [rng.permutation(np.flatnonzero(pages == page)).tolist() for page in np.unique(pages)]
        order: list[int] = []
        opened: list[list[int]] = []
        while waiting or opened:
            opened += [waiting.pop() for _ in range(min(len(waiting), window - len(opened)))]
            chosen = opened[rng.integers(len(opened))]
            order.append(chosen.pop())
            opened = [page for page in opened if page]
        if _in_memory(pages[order], ahead).max() <= cap:
            break
    return float(_in_memory(pages[order], 0).mean())


def _in_memory(read: np.ndarray, ahead: int) -> np.ndarray:
    """Pages in memory at each step: each from `ahead` steps before its first access to its last one."""
    steps = np.zeros(len(read) + 1, int)
    for page in np.unique(read):
        places = np.flatnonzero(read == page)
        steps[max(places[0] - ahead, 0)] += 1
        steps[places[-1] + 1] -= 1
    return np.cumsum(steps)[:-1]


_SEEDS = 6  # orders that are judged where chance decides what fits


@checked
def quasi_random(fn: Callable) -> None:
    """Check ``fn(pages, cap, ahead, seed)``: each page loaded once, and as random as ``cap`` pages allow."""
    exercise = Exercise("Exercise 5", HINTS["quasi_random"])
    said = []
    for case, pages, cap, ahead, fallback in _order_cases():
        exercise.case, exercise.fallback = case, fallback

        def order(seed: int, case: tuple = (pages, cap, ahead)) -> np.ndarray:
            pages, cap, ahead = case
            got = exercise.call(fn, pages.copy(), cap, ahead, seed)
            exercise.require(got is not None or cap > 2, "no-window", "the function returned None.")
            return _numbers_of(exercise, got, len(pages))

        orders = [order(seed) for seed in range(17, 17 + (_SEEDS if ahead else 1))]
        said += [_judge_order(exercise, each, pages, cap, ahead) for each in orders]
        _judge_room(exercise, [_in_memory(pages[each], 0) for each in orders], _open_in_windows()[case])
        exercise.require(np.array_equal(orders[0], order(17)), "not-reproducible", "two calls with seed 17 differ.")
        other, same = order(117), "seeds 17 and 117 give the same order"
        exercise.require(not np.array_equal(orders[0], other), "same-every-epoch", f"{same}.")
        opening = [sorted(set(pages), key=lambda page: int(np.argmax(pages[o] == page))) for o in (orders[0], other)]
        few = len(opening[0]) < 16 or cap >= len(opening[0])
        exercise.require(few or opening[0] != opening[1], "same-every-epoch", f"{same} of pages.")
    print(f"Exercise 5 passed: {100 * said[0]:.1f} % of the accesses hit where 4 of 32 pages fit.")


def _judge_room(exercise: Exercise, opened: list[np.ndarray], can: float) -> None:
    """Refuse orders that have fewer pages open than a window has."""
    mixed, most = float(np.mean([each.mean() for each in opened])), max(each.max() for each in opened)
    if mixed < 0.9 * can:
        key = "one-page" if most == 1 else "unused-cap"
        exercise.refuse(key, f"{mixed:.1f} pages are open on average; {can:.1f} can be.")


def _numbers_of(exercise: Exercise, got: Any, count: int) -> np.ndarray:
    try:
        order = np.asarray(got)
        form = order.ndim == 1 and order.dtype.kind in "iu" and len(order) > 0
        form = form and 0 <= order.min() <= order.max() < count
    except (TypeError, ValueError):
        form = False
    exercise.require(form, "form", f"the function returned {_shown(got)}.")
    times = np.bincount(order.astype(np.int64), minlength=count)
    missing, twice = int((times == 0).sum()), int((times > 1).sum())
    exercise.require(not twice, "twice", f"{twice} samples come twice or more, {missing} never.")
    exercise.require(not missing, "incomplete", f"{missing} of {count} samples are never read.")
    return order.astype(np.int64)


def _judge_order(exercise: Exercise, order: np.ndarray, pages: np.ndarray, cap: int, ahead: int) -> float:
    """Refuse too many pages in memory, and too little chance; return the hit rate."""
    read, names = pages[order], np.unique(pages)
    opened, held = _in_memory(read, 0), _in_memory(read, ahead)
    hits, possible, fallback = hit_rate(read.tolist(), cap), 1 - len(names) / len(read), exercise.fallback
    if opened.max() > cap:
        what = f"{opened.max()} pages are open at once; {cap} fit. {100 * hits:.1f} % of the accesses hit"
        full = opened.max() > 0.75 * len(names) and fallback != "unsorted"
        exercise.refuse("random" if full else fallback or "over-cap", f"{what}; {100 * possible:.1f} % can.")
    exercise.require(held.max() <= cap, "ahead", f"{held.max()} pages are in memory at once; {cap} fit.")
    exercise.require(not np.array_equal(order, np.arange(len(order))), "sequential", "the order is 0, 1, 2, ….")
    names = sorted(names, key=lambda page: int(np.argmax(read == page)))
    within = [np.diff(order[read == p]) for p in names]
    ascending = sum(bool((steps > 0).all() or (steps < 0).all()) for steps in within) / len(names)
    if len(names) >= 16:
        places = np.argsort(np.argsort(names))
        trend = abs(float(np.corrcoef(np.arange(len(names)), places)[0, 1]))
        trend = max(trend, float((abs(np.diff(places)) == 1).mean()))  # also from a page in the middle
        what = f"the pages are opened in the order {', '.join(map(str, names[:6]))}, …."
        exercise.require(trend < 0.8, "page-order", what)
    what = f"on {100 * ascending:.0f} % of the pages the samples keep their order."
    exercise.require(ascending < 0.5, "within", what)
    if 1 < opened.max() < len(names):
        turns, every = max((float((read[n:] == read[:-n]).mean()), n) for n in range(1, len(read) // 4))
        what = f"{100 * turns:.0f} % of the accesses are to the same page as {every} accesses before."
        exercise.require(turns < 0.75, "round-robin", what)
    return hits


# ------------------------------------------------------------------------------------------------ bottleneck


@checked
def find_bottleneck(fn: Callable) -> None:
    """Check ``fn(job) -> (stage, per cent)``: what to make faster first, and how much of its time the step waits."""
    exercise = Exercise("Exercise 6", HINTS["find_bottleneck"])
    said = []
    for name, job in (JOBS | HIDDEN).items():
        exercise.case = f"job {name}"
        watched, looks = _watched(job)
        got = exercise.call(fn, watched)
        form = isinstance(got, (tuple, list)) and len(got) == 2 and got[0] in STAGES
        form = form and isinstance(got[1], numbers.Real) and not isinstance(got[1], bool)
        exercise.require(form, "form", f"the function returned {_shown(got)}.")
        said.append(_judge_job(exercise, job, got[0], float(got[1]), bool(looks)))
    print(f"Exercise 6 passed: {', '.join(f'{n} {s}' for n, s in zip(JOBS, said, strict=False))}.")


def _watched(job: Job) -> tuple[Job, list[float]]:
    """A copy of a job, and a list that grows when somebody looks at the clock, also at that of a halved copy."""
    looks: list[float] = []

    class Watched(Job):
        def clock(self) -> float:
            looks.append(self.now)
            return super().clock()

    return Watched(**vars(job)), looks


def _judge_job(exercise: Exercise, job: Job, stage: str, waits: float, looked: bool) -> str:
    seconds = {name: steady(job.halved(name))[0] for name in STAGES}
    best, right = min(seconds, key=seconds.get), steady(job)[1]
    if stage != best:
        early = min(STAGES, key=lambda name: steady(job.halved(name), 0)[0])
        longest = max(STAGES, key=job.milliseconds.get)
        key = "longest" if stage == longest else "warm-up" if stage == early else "stage"
        if best == "step" and not (job.background and key == "longest"):
            key = "loader-only"
        rate = {name: MEASURED / s for name, s in seconds.items()}
        what = f"with {stage} halved the run makes {rate[stage]:.0f} batches/s, with another stage {rate[best]:.0f}."
        exercise.refuse(key if looked else "clock", what)
    if abs(waits - right) > 2:
        loader = sum(job.milliseconds[name] for name in STAGES[:-1])
        shared = loader - (job.milliseconds["decode"] + job.milliseconds["augment"]) * (1 - 1 / job.threads)
        alone = max(job.milliseconds["read"], job.milliseconds["copy"],
                    (job.milliseconds["decode"] + job.milliseconds["augment"]) / job.threads)  # fmt: skip
        added = [100 * part / (part + job.milliseconds["step"]) for part in (loader, shared, alone)]
        key = "waits"
        if right > 3 and abs(waits - right / 100) < 0.02:
            key = "fraction"
        elif any(abs(waits - some) < 0.3 for some in added):
            key = "added"
        elif abs(waits - (100 - right)) < 2:
            key = "working"
        elif waits > right + 2 and abs(waits - steady(job, 0)[1]) < abs(waits - right):
            key = "waits-warm-up"
        key = key if looked else "clock"
        exercise.refuse(key, f"the step waits for {right:.0f} % of the time; the function returned {waits:.3g}.")
    return f"{stage} ({right:.0f} % waiting)"


# ------------------------------------------------------------------------------------------------ shards

_SHARD_CASES = ((300, 32), (299, 16), (65, 32), (128, 16), (1000, 64), (7, 32))


def _shards(x: torch.Tensor, fn: Callable, cases: Sequence[tuple[int, int, int, int]]) -> list:
    """What ``fn`` gives on one rank for each case, as lists of int, or as text if it has another form."""
    seed = 1000 + int(x[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    results = []
    for case in cases:
        got = fn(*case)
        try:
            results.append([[int(i) for i in batch] for batch in got])
        except (TypeError, ValueError):
            results.append(str(got))
    return results


@checked
def shard(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(count, batch, epoch, seed)``: batches of one rank; all ranks' together hold each sample once."""
    exercise = Exercise("Exercise 7", HINTS["shard"], timeout)
    cases = [(count, batch, 0, 5) for count, batch in _SHARD_CASES]
    again = [(300, 32, 0, 5), (300, 32, 1, 5), (300, 32, 0, 6)]
    for n in (2, 4, 3, 1):
        ranks = [torch.tensor([rank]) for rank in range(n)]
        outcomes = exercise.run(_shards, ranks, fn, [*cases, *again])
        where = exercise.case
        for k, (count, batch, *_) in enumerate(cases):
            exercise.case = f"{where}, {count} samples in batches of {batch}"
            _judge_shards(exercise, [o.result[k] for o in outcomes], count, batch)
        exercise.case = f"{where}, 300 samples in batches of 32"
        _judge_epochs(exercise, [[o.result[0], *o.result[len(cases) :]] for o in outcomes])
        for rank, outcome in enumerate(outcomes):
            what = f"the ledger shows {len(outcome.ledger)} operations."
            exercise.require(len(outcome.ledger) == 0, "messages", what, rank)
    exercise.passed("each sample once, as many batches on every rank, without a message.")


def _judge_shards(exercise: Exercise, ranks: list, count: int, size: int) -> None:
    n = len(ranks)
    for rank, batches in enumerate(ranks):
        form = isinstance(batches, list) and all(0 <= i < count for batch in batches for i in batch)
        exercise.require(form, "form", f"the function returned {_shown(batches)}.", rank)
        largest = max(map(len, batches), default=0)
        exercise.require(largest <= size, "batch-size", f"a batch has {largest} samples.", rank)
    flat = [[i for batch in batches for i in batch] for batches in ranks]
    times = Counter(i for some in flat for i in some)
    twice, missing = sum(t > 1 for t in times.values()), count - len(times)
    what = f"{twice} samples come twice or more in the epoch, {missing} never."
    if twice:
        everything = n > 1 and all(len(set(some)) == count for some in flat)
        equal = len({*map(len, flat)}) == 1 and len(flat[0]) in (-(-count // n), -(-count // (n * size)) * size)
        key = "not-sharded" if everything else "own-shuffle" if missing else "padded" if equal else "overlap"
        exercise.refuse(key, what)
    if missing:
        whole = all(len(batch) == size for batches in ranks for batch in batches)
        exercise.refuse("last-batch" if whole else "remainder" if missing < n else "missing", what)
    steps = [len(batches) for batches in ranks]
    exercise.require(len({*steps}) == 1, "steps", f"the ranks have {', '.join(map(str, steps))} batches.")
    empty = sum(not batch for batches in ranks for batch in batches)
    exercise.require(not empty, "empty-batch", f"{empty} batches are empty.")
    enough = -(-count // (n * size))
    exercise.require(steps[0] <= enough, "small-batches", f"{steps[0]} steps; {enough} do.")


def _judge_epochs(exercise: Exercise, ranks: list[list]) -> None:
    """Of each rank: the batches of epoch 0, of epoch 0 again, of epoch 1, and of epoch 0 with another seed."""
    for rank, (first, again, later, other) in enumerate(ranks):
        exercise.require(first == again, "not-reproducible", "two calls with epoch 0 differ.", rank)
        flat = [i for batch in first for i in batch]
        exercise.require(flat != sorted(flat), "not-shuffled", f"the batches begin with {flat[:5]}.", rank)
        for name, batches in (("epoch 1", later), ("another seed", other)):
            exercise.require(first != batches, "same-every-epoch", f"{name} gives the same batches.", rank)
            same = len(ranks) > 1 and sorted(flat) == sorted(i for batch in batches for i in batch)
            exercise.require(not same, "fixed-shard", f"{name} gives this rank the same samples.", rank)


# ------------------------------------------------------------------------------------------------ paper problem


@checked
def imagenet_epoch(fn: Callable) -> None:
    """Check ``fn(images, gigabytes, memory, disk, cpu, gpu) -> (first epoch, later epochs, bottleneck)``."""

    def slip(
        pace: Callable[..., float] = min,
        first: Callable[[bool], bool] = lambda fits: True,
        later: Callable[[bool], bool] = lambda fits: not fits,
        bits: float = 1,
        unit: float = 1,
        word: Callable[..., str] = min,
    ) -> Callable[..., tuple]:
        def answer(images: int, gigabytes: float, memory: float, disk: float, cpu: float, gpu: float) -> tuple:
            fits = gigabytes <= memory
            rates = {"disk": disk / gigabytes * images / bits, "cpu": cpu, "gpu": gpu}

            def taking_part(reads: bool) -> dict[str, float]:
                return {name: rate for name, rate in rates.items() if reads or name != "disk"}

            seconds = [images / pace(taking_part(reads(fits)).values()) / unit for reads in (first, later)]
            part = taking_part(later(fits))
            return *seconds, word(part, key=part.get)

        return answer

    def one_after_the_other(rates: Any) -> float:
        return 1 / sum(1 / rate for rate in rates)

    def part_cached(images: int, gigabytes: float, memory: float, disk: float, cpu: float, gpu: float) -> tuple:
        missing = max(0.0, gigabytes - memory)
        seconds = {"disk": missing / disk, "cpu": images / cpu, "gpu": images / gpu}
        first = max(gigabytes / disk, seconds["cpu"], seconds["gpu"])
        return first, max(seconds.values()), max(seconds, key=seconds.get)

    def rates(*case: float) -> tuple:
        first, later, word = slip()(*case)
        return case[0] / first, case[0] / later, word

    paper_problem(
        "Exercise 8", fn, slip(),
        [
            (1281167, 169.8, 256, 0.91, 172801, 22930), (1281167, 169.8, 100, 0.8, 172801, 30000),
            (1281167, 169.8, 128, 0.91, 172801, 22930),
            (1281167, 169.8, 128, 7, 172801, 22930), (1281167, 140, 512, 2, 9000, 22930),
            (10000000, 1400, 512, 12, 60000, 30000), (50000, 1, 16, 0.5, 4000, 90000),
        ],
        {
            "gigabits": slip(bits=8),
            "memory-ignored": slip(later=lambda fits: True),
            "always-cached": slip(later=lambda fits: False),
            "first-epoch": [slip(first=lambda fits: not fits), slip(first=lambda fits: False)],
            "added": slip(pace=one_after_the_other),
            "fastest": [slip(pace=max), slip(pace=max, word=max)],
            "cached-part": part_cached,
            "minutes": [slip(unit=60), rates],
            "bottleneck": [slip(word=max), slip(later=lambda fits: not fits, word=lambda part, key: "disk"),
                           slip(word=lambda part, key: "gpu"), slip(word=lambda part, key: "cpu"),
                           slip(word=lambda part, key: min(part, key=key).upper())],
        },
        HINTS["imagenet_epoch"], ["s in the first epoch", "s later", ""],
    )  # fmt: skip
