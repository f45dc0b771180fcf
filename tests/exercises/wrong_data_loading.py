"""Usual wrong answers to the exercises on data loading, each with the hint that it must be given."""

from __future__ import annotations

import io
import mmap
import struct
import time
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from exercise_cases import Mutant, register_of
from torch.utils.data import DistributedSampler

MUTANTS: list[Mutant] = []
mutant = register_of(MUTANTS)

# ------------------------------------------------------------------------------------------------ the header


def _bytes_of(file, place, count):
    file.seek(place)
    return file.read(count)


def _text(name):
    return name.rstrip(b"\0").decode()


def _header(file, read=_bytes_of, form="<HHIQQ", size=1041, fields=None, text=_text, name=slice(1, 17), other=None):
    """The right way, with one thing that can be made wrong."""
    version, count, page_size, samples, table = struct.unpack(form, read(file, 0, 24)[: struct.calcsize(form)])
    if version != 2 and other is None:
        raise ValueError(f"version {version}")
    count = fields or count
    block = read(file, 24, size * count)
    parts = [block[i * size : (i + 1) * size] for i in range(count)]
    named = [(text(part[name]), part[0]) for part in parts]
    return {"version": version, "page_size": page_size, "samples": samples, "table": table, "fields": named}


@mutant("read_header", "no-descriptor")
def header_with_fromfile(file):
    return np.fromfile(file, "<u2", 2)


@mutant("read_header", "no-descriptor")
def header_with_mmap(file):
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)[:24]


@mutant("read_header", "whole-file")
def whole_file_for_the_header(file):
    return _header(io.BytesIO(file.read()))


@mutant("read_header", "whole-file")
def whole_file_in_blocks(file):
    return _header(io.BytesIO(b"".join(iter(lambda: file.read(1 << 16), b""))))


@mutant("read_header", "form")
def header_as_a_tuple(file):
    return tuple(_header(file).values())


@mutant("read_header", "form")
def printed_only(file):
    print(_header(file)["version"])


@mutant("read_header", "form")
def names_without_types(file):
    header = _header(file)
    return header | {"fields": 2}


@mutant("read_header", "too-many-bytes")
def header_through_a_buffer(file):
    return _header(io.BufferedReader(file))


@mutant("read_header", "too-many-bytes")
def first_page_for_the_header(file):
    return _header(io.BytesIO(_bytes_of(file, 0, 1 << 16)))


@mutant("read_header", "value")
def page_size_before_the_fields(file):
    version, page_size, count, samples, table = struct.unpack("<HIHQQ", file.read(24))
    return {"version": version, "page_size": page_size, "samples": samples, "table": table, "fields": []}


@mutant("read_header", "form")
def types_alone(file):
    header = _header(file)
    return header | {"fields": [kind for _, kind in header["fields"]]}


@mutant("read_header", "byte-order")
def big_endian(file):
    header = _header(file)
    turned = struct.unpack(">I", struct.pack("<I", header["page_size"]))[0]
    return header | {"page_size": turned}


@mutant("read_header", "swapped")
def table_before_samples(file):
    header = _header(file)
    return header | {"samples": header["table"], "table": header["samples"]}


@mutant("read_header", "narrow")
def four_bytes_for_samples(file):
    return _header(file, form="<HHII4xQ")


@mutant("read_header", "narrow")
def four_bytes_for_the_table(file):
    return _header(file, form="<HHIQI4x")


@mutant("read_header", "fields-count")
def always_two_fields(file):
    return _header(file, fields=2)


@mutant("read_header", "descriptor-size")
def descriptors_of_1040_bytes(file):
    return _header(file, size=1040)


@mutant("read_header", "descriptor-size")
def descriptors_with_padding(file):
    return _header(file, size=1044)


@mutant("read_header", "names")
def zeros_kept(file):
    return _header(file, text=lambda name: name.decode())


@mutant("read_header", "names")
def names_as_bytes(file):
    return _header(file, text=lambda name: name.rstrip(b"\0"))


@mutant("read_header", "full-name")
def names_of_15_characters(file):
    return _header(file, name=slice(1, 16))


@mutant("read_header", "version")
def any_version(file):
    return _header(file, other=True)


@mutant("read_header", "version")
def assertion_about_the_version(file):
    header = _header(file, other=True)
    assert header["version"] == 2
    return header


# ------------------------------------------------------------------------------------------------ one sample

_KINDS = {0: np.dtype("<f8"), 1: np.dtype("<i8")}
_IMAGE = [("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("pointer", "<u8")]


def _row_of(file, place, row, index, count):
    return np.frombuffer(_bytes_of(file, place + row.itemsize * index, row.itemsize), row)[0]


def _sample(
    file, index, header=_header, align=True, order=lambda kinds: kinds, take=_row_of, shape=lambda h, w: (h, w, 3),
    pointer=lambda pointer, start: pointer, image=lambda pixels, shape: pixels.reshape(shape), size=np.prod,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    head = header(file)
    kinds = order([kind for _, kind in head["fields"]])
    row = np.dtype([(f"f{kind}", _KINDS.get(kind, np.dtype(_IMAGE))) for kind in kinds], align=align)
    start = 24 + 1041 * len(kinds)
    sample = take(file, start, row, index, head["samples"])
    shape = shape(int(sample["f2"]["height"]), int(sample["f2"]["width"]))
    place = pointer(int(sample["f2"]["pointer"]), -(-start // head["page_size"]) * head["page_size"])
    pixels = np.frombuffer(_bytes_of(file, place, int(size(shape))), np.uint8)
    return image(pixels, shape), int(sample["f1"])


@mutant("read_sample", "no-descriptor")
def sample_with_fromfile(file, index):
    header = _header(file)
    return np.fromfile(file, np.uint8, 8, offset=header["table"])


@mutant("read_sample", "narrow-size")
def lengths_of_two_bytes(file, index):
    with np.errstate(over="ignore"):
        return _sample(file, index, size=lambda shape: np.prod(shape, dtype=np.uint16))


@mutant("read_sample", "whole-file")
def whole_file_for_a_sample(file, index):
    return _sample(io.BytesIO(file.read()), index)


@mutant("read_sample", "whole-file")
def whole_file_after_the_header(file, index):
    header = _header(file)
    return _sample(io.BytesIO(_bytes_of(file, 0, header["table"])), index)


@mutant("read_sample", "form")
def image_only(file, index):
    return _sample(file, index)[0]


@mutant("read_sample", "form")
def image_in_floats(file, index):
    image, label = _sample(file, index)
    return image / 255, label


@mutant("read_sample", "form")
def right_image_in_float64(file, index):
    image, label = _sample(file, index)
    return image.astype(float), label


@mutant("read_sample", "form")
def image_as_a_tensor(file, index):
    image, label = _sample(file, index)
    return torch.tensor(image), label


@mutant("read_sample", "too-many-bytes")
def pixels_to_the_end_of_a_block(file, index):
    sample = _sample(file, index)
    _bytes_of(file, 1 << 21, 4096)
    return sample


@mutant("read_sample", "all-rows")
def rows_of_all_samples(file, index):
    def take(file, place, row, index, count):
        return np.frombuffer(_bytes_of(file, place, row.itemsize * count), row)[index]

    return _sample(file, index, take=take)


@mutant("read_sample", "all-rows")
def size_out_of_the_table(file, index):
    _bytes_of(file, _header(file)["table"], -1)
    return _sample(file, index)


@mutant("read_sample", "packed")
def rows_without_padding(file, index):
    return _sample(file, index, align=False)


@mutant("read_sample", "index")
def always_the_first_sample(file, index):
    return _sample(file, 0)


@mutant("read_sample", "index")
def counted_from_one(file, index):
    return _sample(file, max(0, index - 1))


@mutant("read_sample", "index")
def rows_without_padding_at_the_end(file, index):
    """Row length as the sum of the sizes, with each field at its aligned place."""

    def take(file, place, row, index, count):
        size = sum(row[name].itemsize for name in row.names)
        return np.frombuffer(_bytes_of(file, place + size * index, row.itemsize), row)[0]

    return _sample(file, index, take=take)


@mutant("read_sample", "width-height")
def width_before_height(file, index):
    return _sample(file, index, shape=lambda h, w: (w, h, 3))


@mutant("read_sample", "field-order")
def image_first_label_second(file, index):
    return _sample(file, index, order=lambda kinds: [2, 1])


@mutant("read_sample", "field-order")
def two_fields_in_any_order(file, index):
    return _sample(file, index, order=lambda kinds: [kind for kind in kinds if kind])


@mutant("read_sample", "pointer")
def pointer_from_the_first_page(file, index):
    return _sample(file, index, pointer=lambda pointer, start: pointer - start)


@mutant("read_sample", "channels")
def colour_by_colour(file, index):
    return _sample(file, index, image=lambda p, shape: p.reshape(3, *shape[:2]).transpose(1, 2, 0))


@mutant("read_sample", "channels")
def blue_first(file, index):
    return _sample(file, index, image=lambda p, shape: p.reshape(shape)[..., ::-1])


# ------------------------------------------------------------------------------------------------ a field of one's own


def _encode(
    destination, boxes, malloc, convert=lambda boxes: np.ascontiguousarray(boxes, np.float32), count=len,
    room=lambda boxes: boxes.nbytes, empty=False,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    boxes = convert(boxes)
    destination["count"], destination["pointer"] = count(boxes), 0
    if len(boxes) or empty:
        destination["pointer"], memory = malloc(room(boxes))
        memory[: boxes.nbytes] = boxes.view(np.uint8).reshape(-1)
        memory[boxes.nbytes :] = 0


@mutant("encode_boxes", "not-written")
def name_assigned_anew(destination, boxes, malloc):
    row = destination.copy()
    _encode(row, boxes, malloc)
    destination = row  # noqa: F841


@mutant("encode_boxes", "count")
def numbers_counted(*case):
    _encode(*case, count=np.size)


@mutant("encode_boxes", "pointer")
def pointer_into_the_page(destination, boxes, malloc):
    _encode(destination, boxes, malloc)
    destination["pointer"] %= 4096


@mutant("encode_boxes", "pointer")
def memory_never_asked_for(destination, boxes, malloc):
    destination["count"], destination["pointer"] = len(boxes), 0


@mutant("encode_boxes", "not-copied")
def memory_named_anew(destination, boxes, malloc):
    destination["count"] = len(boxes)
    if len(boxes):
        destination["pointer"], memory = malloc(16 * len(boxes))
        memory = boxes.astype(np.float32).view(np.uint8)  # noqa: F841


@mutant("encode_boxes", "float64")
def boxes_as_they_come(*case):
    _encode(*case, convert=np.ascontiguousarray)


@mutant("encode_boxes", "contiguous")
def parts_of_an_array_as_they_are(destination, boxes, malloc):
    boxes = boxes.astype(np.float32) if boxes.dtype == np.float64 else boxes
    destination["count"] = len(boxes)
    if len(boxes):
        destination["pointer"], memory = malloc(boxes.nbytes)
        memory[:] = np.ndarray(boxes.nbytes, np.uint8, boxes.base if boxes.base is not None else boxes)


@mutant("encode_boxes", "contiguous")
def one_long_view(destination, boxes, malloc):
    boxes = boxes.astype(np.float32) if boxes.dtype == np.float64 else boxes
    destination["count"] = len(boxes)
    if len(boxes):
        flat = boxes.view()
        flat.shape = (-1,)
        destination["pointer"], memory = malloc(boxes.nbytes)
        memory[:] = flat.view(np.uint8)


@mutant("encode_boxes", "bytes")
def column_by_column(*case):
    _encode(*case, convert=lambda boxes: np.ascontiguousarray(boxes.T, np.float32).reshape(-1, 4))


@mutant("encode_boxes", "bytes")
def whole_pixels(*case):
    _encode(*case, convert=lambda boxes: np.ascontiguousarray(boxes, np.int32))


@mutant("encode_boxes", "mallocs")
def memory_for_each_box(destination, boxes, malloc):
    destination["count"] = len(boxes)
    for box in boxes.astype(np.float32):
        destination["pointer"], memory = malloc(16)
        memory[:] = box.view(np.uint8)


@mutant("encode_boxes", "changed")
def numbered_from_1_in_place(destination, boxes, malloc):
    boxes += 1
    _encode(destination, boxes, malloc)


@mutant("encode_boxes", "padded")
def room_for_64_boxes(*case):
    _encode(*case, room=lambda boxes: 64 * 16)


@mutant("encode_boxes", "empty-malloc")
def memory_for_nothing(*case):
    _encode(*case, empty=True)


def _decoder(read, most, fill=True, number=lambda indices, i: indices[i], least=1, limit=min, image=None):
    """The right way in Python, with one thing that can be made wrong."""
    image = image or (lambda data: data.view(np.float32).reshape(-1, 4))

    def decode(indices, destination, rows, state):
        for i in range(len(indices)):
            row = rows[number(indices, i)]
            count = limit(most, int(row["count"]))
            if fill:
                destination[i] = -1
            if row["count"] >= least:
                destination[i, :count] = image(read(row["pointer"], state))[:count]
        return destination

    return decode


@mutant("box_decoder", "form")
def decoder_that_returns_nothing(read, most):
    decode = _decoder(read, most)
    return lambda *case: decode(*case) is None or None


@mutant("box_decoder", "form")
def list_of_boxes(read, most):
    def decode(indices, destination, rows, state):
        return [read(rows[i]["pointer"], state) if rows[i]["count"] else None for i in indices]

    return decode


@mutant("box_decoder", "form")
def decode_called_at_once(read, most):
    return np.zeros((5, most, 4), np.float32)


@mutant("box_decoder", "stale")
def places_not_filled(*case):
    return _decoder(*case, fill=False)


@mutant("box_decoder", "stale")
def filled_with_zeros(read, most):
    decode = _decoder(read, most)
    return lambda *case: np.maximum(decode(*case), 0)


@mutant("box_decoder", "unfilled")
def filled_up_at_the_end(read, most):
    decode = _decoder(read, most)

    def other(*case):
        destination = decode(*case)
        destination[:] = -1
        return destination

    return other


@mutant("box_decoder", "unfilled")
def copied_into_nothing(read, most):
    return lambda indices, destination, rows, state: destination


@mutant("box_decoder", "position")
def position_for_number(*case):
    return _decoder(*case, number=lambda indices, i: i)


@mutant("box_decoder", "no-boxes")
def always_read(*case):
    return _decoder(*case, least=0)


@mutant("box_decoder", "more")
def more_boxes_than_places(*case):
    return _decoder(*case, limit=lambda most, count: count)


@mutant("box_decoder", "bytes")
def bytes_as_numbers(*case):
    return _decoder(*case, image=lambda data: data.astype(np.float32).reshape(-1, 4))


@mutant("box_decoder", "numba")
def list_and_dictionary(read, most):
    """Right in Python; Numba knows no dictionary of arrays of this kind."""

    def decode(indices, destination, rows, state):
        for i, number in enumerate(indices):
            destination[i] = -1
            row = dict(zip(rows.dtype.names, rows[number], strict=True))
            if row["count"]:
                boxes = read(row["pointer"], state).view(np.float32).reshape(-1, 4)
                destination[i, : row["count"]] = boxes[:most]
        return destination

    return decode


# ------------------------------------------------------------------------------------------------ quasi-random order


def _lists(pages, rng, within=True, across=True):
    lists = [np.flatnonzero(pages == page) for page in np.unique(pages)]
    lists = [list(rng.permutation(samples) if within else samples[::-1]) for samples in lists]
    if across:
        rng.shuffle(lists)
    return lists


def _window_that_fits(pages, cap, ahead, seed):
    for window in range(cap, 0, -1):
        read = pages[_quasi(pages, cap, ahead, seed, room=lambda *_, window=window: window)]
        spans = [np.flatnonzero(read == page)[[0, -1]] for page in np.unique(read)]
        if max(sum(a - ahead <= step <= b for a, b in spans) for step in range(len(read))) <= cap:
            return window


def _quasi(
    pages, cap, ahead, seed, rng=np.random.default_rng, lists=_lists, room=_window_that_fits,
    draw=lambda rng, count, step: int(rng.integers(count)),
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    window = room(pages, cap, ahead, seed)
    rng = rng(seed)
    waiting, order, in_use = lists(pages, rng)[::-1], [], []
    while waiting or in_use:
        while waiting and len(in_use) < window:
            in_use.append(waiting.pop())
        k = draw(rng, len(in_use), len(order))
        order.append(int(in_use[k].pop()))
        if not in_use[k]:
            del in_use[k]
    return order


@mutant("quasi_random", "form")
def pages_instead_of_samples(pages, cap, ahead, seed):
    return np.random.default_rng(seed).permutation(len(pages)) / 1.0


@mutant("quasi_random", "form")
def batches_of_samples(pages, cap, ahead, seed):
    return [_quasi(pages, cap, ahead, seed)[i : i + 64] for i in range(0, len(pages), 64)]


@mutant("quasi_random", "form")
def shuffled_in_place(pages, cap, ahead, seed):
    np.random.default_rng(seed).shuffle(pages)


@mutant("quasi_random", "incomplete")
def last_group_of_pages_lost(pages, cap, ahead, seed):
    rng = np.random.default_rng(seed)
    lists, order = _lists(pages, rng), []
    for start in range(0, len(lists) - cap, cap):
        order += rng.permutation(np.concatenate(lists[start : start + cap])).tolist()
    return order


@mutant("quasi_random", "incomplete")
def pages_as_full_as_the_first(pages, cap, ahead, seed):
    each = int((pages == pages.min()).sum())
    return _quasi(pages, cap, ahead, seed, lists=lambda pages, rng: [part[-each:] for part in _lists(pages, rng)])


@mutant("quasi_random", "twice")
def drawn_with_repetition(pages, cap, ahead, seed):
    return np.random.default_rng(seed).integers(0, len(pages), len(pages))


@mutant("quasi_random", "random")
def full_shuffle(pages, cap, ahead, seed):
    return np.random.default_rng(seed).permutation(len(pages))


@mutant("quasi_random", "over-cap")
def one_page_too_many(*case):
    return _quasi(*case, room=lambda pages, cap, *_: cap + 1)


@mutant("quasi_random", "over-cap")
def twice_the_batch(*case):
    return _quasi(*case, room=lambda pages, cap, *_: 2 * cap)


@mutant("quasi_random", "ahead")
def nothing_kept_for_pages_to_come(*case):
    return _quasi(*case, room=lambda pages, cap, *_: cap)


@mutant("quasi_random", "ahead")
def one_place_kept_for_pages_to_come(*case):
    return _quasi(*case, room=lambda pages, cap, ahead, seed: cap - 1 if ahead else cap)


@mutant("quasi_random", "ahead")
def groups_of_as_many_pages_as_fit(pages, cap, ahead, seed):
    rng = np.random.default_rng(seed)
    lists = _lists(pages, rng)
    return np.concatenate([rng.permutation(np.concatenate(lists[i : i + cap])) for i in range(0, len(lists), cap)])


@mutant("quasi_random", "unsorted")
def a_page_is_a_range(pages, cap, ahead, seed):
    """Takes runs of neighbours for pages, as long as each page is full."""
    counts = np.unique(pages, return_counts=True)[1]

    def ranges(pages, rng):
        lists = [rng.permutation(part).tolist() for part in np.split(np.arange(len(pages)), np.cumsum(counts)[:-1])]
        rng.shuffle(lists)
        return lists

    return _quasi(pages, cap, ahead, seed, lists=ranges)


@mutant("quasi_random", "sequential")
def order_of_the_file(pages, cap, ahead, seed):
    return np.arange(len(pages))


@mutant("quasi_random", "page-order")
def pages_in_the_order_of_the_file(*case):
    return _quasi(*case, lists=lambda pages, rng: _lists(pages, rng, across=False))


@mutant("quasi_random", "page-order")
def order_of_the_file_from_somewhere(*case):
    def lists(pages, rng):
        lists = _lists(pages, rng, across=False)
        start = len(lists) // 2 + int(rng.integers(3))
        return lists[start:] + lists[:start]

    return _quasi(*case, lists=lists)


@mutant("quasi_random", "page-order")
def window_that_slides_over_the_file(pages, cap, ahead, seed):
    """A shuffle buffer, as loaders of streams have it: groups of neighbours, shuffled."""
    rng = np.random.default_rng(seed)
    groups = np.unique(pages)[: len(np.unique(pages)) // cap * cap].reshape(-1, cap)
    rest = np.flatnonzero(~np.isin(pages, groups))
    order = [rng.permutation(np.flatnonzero(np.isin(pages, group))) for group in groups]
    return np.concatenate([*order, rng.permutation(rest)])


@mutant("quasi_random", "within")
def samples_of_a_page_in_order(*case):
    return _quasi(*case, lists=lambda pages, rng: _lists(pages, rng, within=False))


@mutant("quasi_random", "one-page")
def page_after_page(*case):
    return _quasi(*case, room=lambda *_: 1)


@mutant("quasi_random", "within")
def pages_shuffled_only(pages, cap, ahead, seed):
    lists = _lists(pages, np.random.default_rng(seed), within=False)
    return [i for samples in lists for i in samples[::-1]]


@mutant("quasi_random", "unused-cap")
def half_of_the_memory(*case):
    return _quasi(*case, room=lambda pages, cap, *_: max(1, cap // 2))


@mutant("quasi_random", "unused-cap")
def groups_of_half_as_many_pages_as_fit(pages, cap, ahead, seed):
    rng = np.random.default_rng(seed)
    lists, each = _lists(pages, rng), cap // 2 if ahead else cap
    return np.concatenate([rng.permutation(np.concatenate(lists[i : i + each])) for i in range(0, len(lists), each)])


@mutant("quasi_random", "unused-cap")
def one_page_too_few_without_loading_ahead(*case):
    return _quasi(*case, room=lambda pages, cap, ahead, seed: _window_that_fits(pages, cap, ahead, seed) - (cap == 4))


@mutant("quasi_random", "unused-cap")
def three_places_kept_whatever_the_order(*case):
    return _quasi(*case, room=lambda pages, cap, ahead, seed: max(1, cap - 3) if ahead else cap)


@mutant("quasi_random", "unused-cap")
def two_thirds_of_the_memory(*case):
    return _quasi(*case, room=lambda pages, cap, ahead, seed: max(1, 2 * cap // 3) if ahead else cap)


@mutant("quasi_random", "no-window")
def two_pages_at_least(pages, cap, ahead, seed):
    for window in range(cap, 1, -1):
        order = _quasi(pages, cap, ahead, seed, room=lambda *_, window=window: window)
        read = pages[order]
        spans = [np.flatnonzero(read == page)[[0, -1]] for page in np.unique(read)]
        if max(sum(a - ahead <= step <= b for a, b in spans) for step in range(len(read))) <= cap:
            return order


@mutant("quasi_random", "dead-end")
def opens_a_page_when_it_could_have_been_loaded(pages, cap, ahead, seed):
    """A better way, but for the point where no page is open and none may be opened."""
    rng = np.random.default_rng(seed)
    waiting, order, opened, ended = _lists(pages, rng), [], [], []
    while waiting or opened:
        while waiting and len(opened) + sum(end >= len(order) - ahead for end in ended) < cap:
            opened.append(waiting.pop())
        chosen = opened[rng.integers(len(opened))]
        order.append(int(chosen.pop()))
        if not chosen:
            opened.remove(chosen)
            ended.append(len(order) - 1)
    return order


@mutant("quasi_random", "unused-cap")
def a_third_of_the_memory_if_pages_are_loaded_ahead(*case):
    return _quasi(*case, room=lambda pages, cap, ahead, seed: max(1, cap // 3) if ahead else cap)


@mutant("quasi_random", "round-robin")
def pages_take_turns(*case):
    return _quasi(*case, draw=lambda rng, count, step: step % count)


@mutant("quasi_random", "round-robin")
def pages_take_turns_of_two_samples(*case):
    return _quasi(*case, draw=lambda rng, count, step: step // 2 % count)


@mutant("quasi_random", "not-reproducible")
def seed_unused(*case):
    return _quasi(*case, rng=lambda seed: np.random.default_rng())


@mutant("quasi_random", "same-every-epoch")
def always_seed_zero(*case):
    return _quasi(*case, rng=lambda seed: np.random.default_rng(0))


@mutant("quasi_random", "same-every-epoch")
def pages_always_in_the_same_order(*case):
    def lists(pages, rng):
        lists = _lists(pages, rng, across=False)
        np.random.default_rng(0).shuffle(lists)
        return lists

    return _quasi(*case, lists=lists)


@mutant("quasi_random", "large-cap")
def as_many_pages_as_fit_must_exist(pages, cap, ahead, seed):
    chosen = np.random.default_rng(seed).choice(np.unique(pages), cap, replace=False)
    assert len(chosen) == cap
    return _quasi(pages, cap, ahead, seed)


@mutant("quasi_random", "one")
def one_place_is_no_room(*case):
    return _quasi(*case, room=lambda *case: _window_that_fits(*case) if case[1] > 1 else 0)


# ------------------------------------------------------------------------------------------------ bottleneck

STAGES = ("read", "decode", "augment", "copy", "step")


def _measure(job, skip=20, count=100):
    batches, waited, begin = job.batches(skip + count), 0.0, 0.0
    for n in range(skip + count):
        start = job.clock()
        batch = next(batches)
        if n == skip:
            waited, begin = 0.0, start
        waited += job.clock() - start
        job.step(batch)
    return job.clock() - begin, 100 * waited / (job.clock() - begin)


def _best(job, stages=STAGES, skip=20):
    return min(stages, key=lambda stage: _measure(job.halved(stage), skip)[0])


def _alone(job, stage):
    job = replace(job, now=0.0)
    job.alone(stage)
    return job.clock()


@mutant("find_bottleneck", "form")
def stage_only(job):
    return _best(job)


@mutant("find_bottleneck", "form")
def loader_or_step(job):
    waits = _measure(job)[1]
    return ("loader" if waits > 5 else "step"), waits


@mutant("find_bottleneck", "warm-up")
def stage_with_the_first_batches(job):
    return _best(job, skip=0), _measure(job)[1]


@mutant("find_bottleneck", "longest")
def longest_stage_alone(job):
    return max(STAGES, key=lambda stage: _alone(job, stage)), _measure(job)[1]


@mutant("find_bottleneck", "longest")
def longest_stage_of_the_loader_if_it_waits(job):
    waits = _measure(job)[1]
    return max(STAGES[:-1], key=lambda stage: _alone(job, stage)) if waits > 5 else "step", waits


@mutant("find_bottleneck", "loader-only")
def best_stage_of_the_loader(job):
    return _best(job, STAGES[:-1]), _measure(job)[1]


@mutant("find_bottleneck", "loader-only")
def loader_if_the_step_waits(job):
    waits = _measure(job)[1]
    return _best(job, STAGES[:-1]) if waits > 5 else "step", waits


@mutant("find_bottleneck", "stage")
def always_the_disk_of_a_job(job):
    return "read", _measure(job)[1]


@mutant("find_bottleneck", "stage")
def slowest_change(job):
    return max(STAGES, key=lambda stage: _measure(job.halved(stage))[0]), _measure(job)[1]


@mutant("find_bottleneck", "fraction")
def share_not_per_cent(job):
    return _best(job), _measure(job)[1] / 100


@mutant("find_bottleneck", "waits-warm-up")
def waiting_for_the_compiler(job):
    return _best(job), _measure(job, skip=0)[1]


@mutant("find_bottleneck", "waits-warm-up")
def five_hundred_batches_with_the_first(job):
    return _best(job), _measure(job, skip=0, count=500)[1]


@mutant("find_bottleneck", "added")
def shares_of_the_stages(job):
    times = [_alone(job, stage) for stage in STAGES]
    return _best(job), 100 * sum(times[:-1]) / sum(times)


@mutant("find_bottleneck", "added")
def loader_alone_and_step_alone(job):
    loader = replace(job, now=0.0)
    begin = 0.0
    for n, _ in enumerate(loader.batches(120)):
        if n == 19:
            begin = loader.clock()
    loading = (loader.clock() - begin) / 100
    return _best(job), 100 * loading / (loading + _alone(job, "step"))


@mutant("find_bottleneck", "working")
def share_of_working(job):
    return _best(job), 100 - _measure(job)[1]


@mutant("find_bottleneck", "clock")
def by_the_clock_of_the_machine(job):
    begin, waited, batches = time.perf_counter(), 0.0, job.batches(200)
    for _ in range(200):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        job.step(batch)
    return "decode", 100 * waited / (time.perf_counter() - begin)


@mutant("find_bottleneck", "longest")
def without_the_step(job):
    def seconds(job):
        taken = [job.clock() for _ in job.batches(120)]
        return taken[-1] - taken[20]

    return min(STAGES, key=lambda stage: seconds(job.halved(stage))), _measure(job)[1]


@mutant("find_bottleneck", "waits")
def half_of_the_waiting(job):
    return _best(job), _measure(job)[1] / 2


# ------------------------------------------------------------------------------------------------ shards


def _ranks():
    return dist.get_rank(), dist.get_world_size()


def _cut(order, batch):
    return [list(order[i : i + batch]) for i in range(0, len(order), batch)]


def _shard(
    count, batch, epoch, seed, rng=lambda seed, epoch: np.random.default_rng((seed, epoch)),
    steps=lambda count, batch, n: -(-count // (batch * n)), before=lambda: None,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    rank, n = _ranks()
    before()
    parts = np.array_split(rng(seed, epoch).permutation(count), steps(count, batch, n) * n)
    return [part.tolist() for part in parts[rank::n]]


def _sampled(count, batch, epoch, seed, drop=False):
    rank, n = _ranks()
    sampler = DistributedSampler(range(count), n, rank, seed=seed, drop_last=drop)
    sampler.set_epoch(epoch)
    return _cut(list(sampler), batch)


@mutant("shard", "form")
def samples_not_batches(*case):
    return [i for part in _shard(*case) for i in part]


@mutant("shard", "form")
def numbers_from_one(*case):
    return [[i + 1 for i in part] for part in _shard(*case)]


@mutant("shard", "form")
def returns_nothing(*case):
    _shard(*case)


@mutant("shard", "batch-size")
def one_large_batch(*case):
    return [[i for part in _shard(*case) for i in part]]


@mutant("shard", "batch-size")
def rest_joined_to_the_last_batch(count, batch, epoch, seed):
    return _shard(count, batch, epoch, seed, steps=lambda count, batch, n: max(1, count // (batch * n)))


@mutant("shard", "not-sharded")
def everything_on_every_rank(count, batch, epoch, seed):
    return _cut(np.random.default_rng((seed, epoch)).permutation(count), batch)


@mutant("shard", "own-shuffle")
def every_rank_shuffles_for_itself(*case):
    return _shard(*case, rng=lambda seed, epoch: np.random.default_rng((seed, epoch, dist.get_rank())))


@mutant("shard", "own-shuffle")
def global_generator(count, batch, epoch, seed):
    rank, n = _ranks()
    return _cut(torch.randperm(count).tolist()[rank::n], batch)


@mutant("shard", "padded")
def sampler_of_torch(*case):
    return _sampled(*case)


@mutant("shard", "padded")
def filled_up_to_whole_batches(count, batch, epoch, seed):
    rank, n = _ranks()
    order = np.random.default_rng((seed, epoch)).permutation(count)
    order = np.resize(order, -(-count // (batch * n)) * batch * n)
    return _cut(order[rank::n], batch)


@mutant("shard", "overlap")
def one_sample_too_far(count, batch, epoch, seed):
    rank, n = _ranks()
    order = np.random.default_rng((seed, epoch)).permutation(count)
    ends = [count * r // n for r in range(n + 1)]
    return _cut(order[ends[rank] : ends[rank + 1] + 1], batch)


@mutant("shard", "overlap")
def shards_that_overlap(count, batch, epoch, seed):
    """Starts one batch before its own part, as if the last one had been lost."""
    rank, n = _ranks()
    order = np.random.default_rng((seed, epoch)).permutation(count)
    ends = [count * r // n for r in range(n + 1)]
    return _cut(order[max(0, ends[rank] - batch) : ends[rank + 1]], batch)


@mutant("shard", "last-batch")
def incomplete_batch_dropped(count, batch, epoch, seed):
    rank, n = _ranks()
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return [part for part in _cut(order[rank::n], batch) if len(part) == batch]


@mutant("shard", "last-batch")
def whole_steps_only(count, batch, epoch, seed):
    rank, n = _ranks()
    order = np.random.default_rng((seed, epoch)).permutation(count)
    order = order[: count // (batch * n) * batch * n]
    return _cut(order[rank::n], batch)


@mutant("shard", "remainder")
def equal_numbers_only(*case):
    return _sampled(*case, drop=True)


@mutant("shard", "missing")
def first_half_only(*case):
    return _shard(*case)[: max(1, len(_shard(*case)) // 2)]


@mutant("shard", "missing")
def first_rank_has_nothing(*case):
    return _shard(*case) if dist.get_rank() or dist.get_world_size() == 1 else []


@mutant("shard", "steps")
def every_nth_sample(count, batch, epoch, seed):
    rank, n = _ranks()
    return _cut(np.random.default_rng((seed, epoch)).permutation(count)[rank::n], batch)


@mutant("shard", "steps")
def every_nth_batch(count, batch, epoch, seed):
    rank, n = _ranks()
    return _cut(np.random.default_rng((seed, epoch)).permutation(count), batch)[rank::n]


@mutant("shard", "empty-batch")
def empty_batches_to_make_it_even(count, batch, epoch, seed):
    steps = -(-count // (batch * dist.get_world_size()))
    batches = every_nth_batch(count, batch, epoch, seed)
    return batches + [[] for _ in range(steps - len(batches))]


@mutant("shard", "small-batches")
def one_sample_a_batch(*case):
    return _shard(*case, steps=lambda count, batch, n: count // n)


@mutant("shard", "small-batches")
def one_step_more(*case):
    return _shard(*case, steps=lambda count, batch, n: min(count // n, count // (batch * n) + 1))


@mutant("shard", "not-shuffled")
def order_of_the_set(count, batch, epoch, seed):
    rank, n = _ranks()
    return [part.tolist() for part in np.array_split(np.arange(count), -(-count // (batch * n)) * n)[rank::n]]


@mutant("shard", "not-reproducible")
def another_order_at_each_call(count, batch, epoch, seed, calls=[0]):  # noqa: B006 kept from call to call
    calls[0] += 1
    return _shard(count, batch, epoch, seed, rng=lambda *_: np.random.default_rng(calls[0]))


@mutant("shard", "same-every-epoch")
def epoch_unused(*case):
    return _shard(*case, rng=lambda seed, epoch: np.random.default_rng(seed))


@mutant("shard", "same-every-epoch")
def seed_unused_for_shards(*case):
    return _shard(*case, rng=lambda seed, epoch: np.random.default_rng(epoch))


@mutant("shard", "fixed-shard")
def shuffled_within_the_rank(count, batch, epoch, seed):
    rank, n = _ranks()
    rng = np.random.default_rng((seed, epoch))
    own = rng.permutation(np.array_split(np.arange(count), n)[rank])
    return [part.tolist() for part in np.array_split(own, -(-count // (batch * n)))]


@mutant("shard", "messages")
def order_from_the_first_rank(*case):
    order = torch.zeros(3)
    return _shard(*case, before=lambda: dist.broadcast(order, 0))


@mutant("shard", "one-rank")
def divides_by_the_other_ranks(*case):
    assert 1 / (dist.get_world_size() - 1)
    return _shard(*case)


@mutant("shard", "only-two-ranks")
def the_other_half(*case):
    assert dist.get_world_size() <= 2
    return _shard(*case)


@mutant("shard", "hang", hangs=True)
def first_rank_waits_for_an_answer(*case):
    if dist.get_rank() == 0 and dist.get_world_size() > 1:
        dist.recv(torch.zeros(1), 1)
    return _shard(*case)


# ------------------------------------------------------------------------------------------------ paper problem


def _epoch(images, gigabytes, memory, disk, cpu, gpu, first=True, later=None, pace=min):
    fits = gigabytes <= memory
    rates = {"disk": images * disk / gigabytes, "cpu": cpu, "gpu": gpu}
    without = {"cpu": cpu, "gpu": gpu}
    once = rates if first else without
    then = (without if fits else rates) if later is None else later(rates, without)
    return images / pace(once.values()), images / pace(then.values()), min(then, key=then.get)


@mutant("imagenet_epoch", "gigabits")
def disk_in_gigabits(images, gigabytes, memory, disk, cpu, gpu):
    return _epoch(images, gigabytes, memory, disk / 8, cpu, gpu)


@mutant("imagenet_epoch", "memory-ignored")
def disk_in_every_epoch(*case):
    return _epoch(*case, later=lambda rates, without: rates)


@mutant("imagenet_epoch", "always-cached")
def memory_is_large_enough(*case):
    return _epoch(*case, later=lambda rates, without: without)


@mutant("imagenet_epoch", "first-epoch")
def first_epoch_from_memory(*case):
    return _epoch(*case, first=case[1] > case[2])


@mutant("imagenet_epoch", "added")
def one_after_the_other(*case):
    return _epoch(*case, pace=lambda rates: 1 / sum(1 / rate for rate in rates))


@mutant("imagenet_epoch", "fastest")
def fastest_sets_the_pace(*case):
    return _epoch(*case, pace=max)


@mutant("imagenet_epoch", "cached-part")
def rest_of_the_file_from_disk(images, gigabytes, memory, disk, cpu, gpu):
    first, _, _ = _epoch(images, gigabytes, memory, disk, cpu, gpu)
    later = {"cpu": images / cpu, "gpu": images / gpu, "disk": max(0, gigabytes - memory) / disk}
    return first, max(later.values()), max(later, key=later.get)


@mutant("imagenet_epoch", "numbers")
def file_in_gibibytes(images, gigabytes, memory, disk, cpu, gpu):
    return _epoch(images, gigabytes / 1.024**3, memory, disk, cpu, gpu)


@mutant("imagenet_epoch", "minutes")
def images_a_second(*case):
    first, later, word = _epoch(*case)
    return case[0] / first, case[0] / later, word


@mutant("imagenet_epoch", "minutes")
def epoch_in_minutes(*case):
    first, later, word = _epoch(*case)
    return first / 60, later / 60, word


@mutant("imagenet_epoch", "bottleneck")
def in_capitals(*case):
    first, later, word = _epoch(*case)
    return first, later, word.upper()


@mutant("imagenet_epoch", "bottleneck")
def always_the_disk(*case):
    return *_epoch(*case)[:2], "disk"


@mutant("imagenet_epoch", "bottleneck")
def what_is_fastest(*case):
    return *_epoch(*case)[:2], "cpu"


@mutant("imagenet_epoch", "number")
def no_word(*case):
    return _epoch(*case)[:2]


@mutant("imagenet_epoch", "typed")
def numbers_of_the_text(*case):
    return 186.6, 55.87, "gpu"
