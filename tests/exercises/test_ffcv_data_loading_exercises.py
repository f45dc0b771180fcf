"""The exercises on data loading: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import io
import random
import re
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exercise_cases import ExerciseTests, hangs
from torch.utils.data import DistributedSampler

from course_utils.check import limits as _limits
from course_utils.check import wrong_formulas
from lessons.ffcv_data_loading import beton as _beton
from lessons.ffcv_data_loading import check as data_loading
from lessons.ffcv_data_loading import ffcv
from lessons.ffcv_data_loading import jobs as _jobs
from lessons.ffcv_data_loading import orders as _orders

pytestmark = pytest.mark.guard(90)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

# ------------------------------------------------------------------------------------------------ the header

HEAD = "head = file.read(24)"
NAME = 'row["name"].decode()'
WRONG["read_header"] = {
    "no-descriptor": f"{HEAD}  ->  import mmap\n\nhead = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)[:24]",
    "whole-file": "file.seek(0)  ->  file.seek(0)\nfile = io.BytesIO(file.read())",
    "form": [
        "return dict(  ->  dict(",
        f'({NAME}, int(row["type"]))  ->  int(row["type"])',
    ],
    "too-many-bytes": "file.seek(0)  ->  file.seek(0)\nfile = io.BytesIO(file.read(1 << 16))",
    "value": '"<u4", 1, offset=4  ->  "<u4", 1, offset=2',
    "byte-order": "<u4  ->  >u4",
    "swapped": "samples, table =  ->  table, samples =",
    "narrow": {"samples, table =": "samples, _, table, _ =", '"<u8", 2, offset=8': '"<u4", 4, offset=8'},
    "fields-count": "fields * descriptor.itemsize  ->  2 * descriptor.itemsize",
    "descriptor-size": "V1024  ->  V1027",
    "names": [f'{NAME}  ->  row["name"]', f'{NAME}  ->  {NAME}.ljust(16, "\\0")'],
    "types": 'int(row["type"])  ->  str(row["type"])',
    "full-name": f"{NAME}  ->  {NAME}[:15]",
    "version": ["if version != 2:  ->  if version > 2:", "raise ValueError  ->  raise AssertionError"],
    "not-rewound": "file.seek(0)  ->  pass",
    "error": f"{HEAD}  ->  head = file._content[:24]",
}


def one_number_after_the_other(file):
    def number(size):
        return int.from_bytes(file.read(size), "little")

    file.seek(0, io.SEEK_SET)
    version, count = number(2), number(2)
    if version != 2:
        raise ValueError
    values = {"page_size": number(4), "samples": number(8), "table": number(8)}
    fields = []
    for _ in range(count):
        kind, name = number(1), file.read(16)
        fields.append([name.split(b"\0")[0].decode("ascii"), np.uint8(kind)])
        file.seek(1024, io.SEEK_CUR)
    return {"version": np.uint16(version), "fields": tuple(fields), **values}


def read_into_a_buffer(file):
    file.seek(-file.tell(), io.SEEK_CUR)
    file.readinto(head := bytearray(24))
    version, count, page_size, samples, table = struct.unpack("=HHIqq", head)
    if version != 2:
        raise ValueError(f"version {version}")
    fields = [struct.unpack("<B16s1024s", file.read(1041))[:2] for _ in range(count)]
    names = [(name.rstrip(b"\0").decode(), kind) for kind, name in fields]
    return {"version": version, "page_size": page_size, "samples": samples, "table": table, "fields": names}


RIGHT["read_header"] = {
    "one number after the other": one_number_after_the_other,
    "into a buffer, and struct": read_into_a_buffer,
}

# ------------------------------------------------------------------------------------------------ one sample

HEADER = "header = read_header(file)"
PIXELS = "np.frombuffer(file.read(shape[0] * shape[1] * 3), np.uint8)"
SHAPED = "pixels.reshape(shape),"
WRONG["read_sample"] = {
    "no-descriptor": f"{PIXELS}  ->  np.fromfile(file, np.uint8, shape[0] * shape[1] * 3)",
    "narrow-size": "shape[0] * shape[1] * 3  ->  int(np.prod(shape, dtype=np.uint16))",
    "whole-file": f"{HEADER}  ->  file = io.BytesIO(file.read())\n{HEADER}",
    "form": [
        f'{SHAPED} int(sample["type 1"])  ->  pixels.reshape(shape)',
        f"{SHAPED}  ->  pixels.reshape(shape).astype(float),",
    ],
    "too-many-bytes": "return pixels  ->  file.read(4096)\nreturn pixels",
    "all-rows": {
        " + row.itemsize * index": "", "row.itemsize), row)[0]": 'row.itemsize * header["samples"]), row)[index]',
    },
    "packed": ", align=True  ->  ",
    "index": "row.itemsize * index  ->  0",
    "width-height": 'int(place["height"]), int(place["width"])  ->  int(place["width"]), int(place["height"])',
    "field-order": 'types = [kind for _, kind in header["fields"]]  ->  types = [2, 1]',
    "pointer": 'int(place["pointer"])  ->  int(place["pointer"]) - header["page_size"]',
    "channels": [
        f"{SHAPED}  ->  pixels.reshape(3, *shape[:2]).transpose(1, 2, 0),",
        f"{SHAPED}  ->  pixels.reshape(shape)[..., ::-1],",
    ],
}


def aligned_by_hand(file, index):
    file.seek(0)
    _, count, _, _, _ = struct.unpack("<HHIQQ", file.read(24))
    place, at = 0, {}
    for _ in range(count):
        kind = file.read(1041)[0]
        place = place if kind == 2 else -(-place // 8) * 8
        at[kind] = place
        place += 13 if kind == 2 else 8
    file.seek(-(-place // 8) * 8 * index, io.SEEK_CUR)
    row = file.read(place)
    _, width, height, pointer = struct.unpack_from("<BHHQ", row, at[2])
    file.seek(pointer)
    image = np.array(list(file.read(3 * width * height)), np.uint8)
    image.shape = height, width, 3
    return [image, np.int64(struct.unpack_from("<q", row, at[1])[0])]


RIGHT["read_sample"] = {
    "aligned by hand": aligned_by_hand,
    "images of 16 bytes in the row": '("pointer", "<u8")]  ->  ("pointer", "<u8"), ("padding", "V3")]',
}

# ------------------------------------------------------------------------------------------------ quasi-random order

WINDOWS = "for window in range(cap, 0, -1):"
FITS = "if in_memory.max() <= cap:"
SHUFFLED = "rng.permutation(np.flatnonzero(pages == page))"
SHUFFLED_PAGES = "rng.shuffle(waiting := [samples.tolist() for samples in waiting])"
IN_FILE_ORDER = "waiting = [samples.tolist() for samples in waiting]"
DRAWN = "rng.integers(len(opened))"
RANGES = """counts = np.unique(pages, return_counts=True)[1]
waiting = [rng.permutation(part) for part in np.split(np.arange(len(pages)), np.cumsum(counts)[:-1])]"""


def instead(order):
    """An edit that returns another order at once."""
    return f"{WINDOWS}  ->  return {order}\n{WINDOWS}"


def from_window(first):
    return f"range(cap, 0, -1)  ->  range({first}, 0, -1)"


def groups_of(size):
    """All pages of a group are used up before the next group is opened."""
    grouped = f"if not opened:\n    opened = [waiting.pop() for _ in waiting[:{size}]]"
    return {"while waiting and len(opened) < window:\n                opened.append(waiting.pop())": grouped}


def pages_opened_when_they_could_have_been_loaded(pages, cap, ahead, rng):
    """None where no page is open, and all places are kept for pages that have ended."""
    waiting = [rng.permutation(np.flatnonzero(pages == page)).tolist() for page in np.unique(pages)]
    rng.shuffle(waiting)
    order, opened, ended = [], [], []
    while waiting or opened:
        while waiting and len(opened) + sum(end >= len(order) - ahead for end in ended) < cap:
            opened.append(waiting.pop())
        if not opened:
            return None
        chosen = opened[rng.integers(len(opened))]
        order.append(chosen.pop())
        if not chosen:
            opened.remove(chosen)
            ended.append(len(order) - 1)
    return order


def without_a_way_out(pages, cap, ahead, seed):
    return pages_opened_when_they_could_have_been_loaded(pages, cap, ahead, np.random.default_rng(seed)) or 1 // 0


WRONG["quasi_random"] = {
    "form": [
        "return np.array(order)  ->  return np.array(order) / 1.0",
        "return np.array(order)  ->  return [order[i : i + 64] for i in range(0, len(order), 64)]",
    ],
    "incomplete": f"{SHUFFLED}  ->  {SHUFFLED}[:24]",
    "twice": instead("np.random.default_rng(seed).integers(0, len(pages), len(pages))"),
    "random": instead("np.random.default_rng(seed).permutation(len(pages))"),
    "over-cap": {"range(cap, 0, -1)": "range(cap + 1, 0, -1)", FITS: "if True:"},
    "ahead": f"{FITS}  ->  if True:",
    "unsorted": {f"waiting = [{SHUFFLED} for page in np.unique(pages)]": RANGES, FITS: "if True:"},
    "sequential": instead("np.arange(len(pages))"),
    "page-order": [
        f"{SHUFFLED_PAGES}  ->  {IN_FILE_ORDER}",
        f"{SHUFFLED_PAGES}  ->  {IN_FILE_ORDER}\nk = len(waiting) // 2 + int(rng.integers(3))\n"
        "waiting = waiting[k:] + waiting[:k]",
    ],
    "within": [
        f"{SHUFFLED}  ->  np.flatnonzero(pages == page)",
        f"{SHUFFLED}  ->  np.roll(np.flatnonzero(pages == page), rng.integers(1, 8))",
    ],
    "one-page": from_window("1"),
    "unused-cap": [
        from_window("max(1, cap // 2)"),
        groups_of("window"),
    ],
    "no-window": "range(cap, 0, -1)  ->  range(cap, 1, -1)",
    "dead-end": without_a_way_out,
    "round-robin": [
        f"{DRAWN}  ->  len(order) % len(opened)",
        f"k = {DRAWN}  ->  turns = np.random.default_rng((seed, len(order) // len(opened))).permutation(len(opened))\n"
        "k = turns[len(order) % len(opened)]",
    ],
    "not-reproducible": "default_rng(seed)  ->  default_rng()",
    "same-every-epoch": [
        "default_rng(seed)  ->  default_rng(seed // 100)",
        "default_rng(seed)  ->  default_rng(seed % 64)",
        f"{SHUFFLED_PAGES}  ->  np.random.default_rng(0).{SHUFFLED_PAGES[4:]}",
        f"{SHUFFLED}  ->  np.random.default_rng(page).{SHUFFLED[4:]}",
    ],
    "large-cap": f"{WINDOWS}  ->  np.random.default_rng(seed).choice(np.unique(pages), cap, replace=False)\n{WINDOWS}",
    "one": f"{WINDOWS}  ->  for window in range(cap, 0, -1) if cap > 1 else [0]:",
}


def when_it_could_have_been_loaded(pages, cap, ahead, seed):
    rng = np.random.default_rng(seed)
    tries = (pages_opened_when_they_could_have_been_loaded(pages, cap, ahead, rng) for _ in range(5000))
    return next(filter(None, tries))


GROUPS_IF_NOTHING_IS_LOADED_AHEAD = f"""if not ahead:
    rng = np.random.default_rng(seed)
    names = rng.permutation(np.unique(pages))
    groups = [np.isin(pages, names[i : i + cap]) for i in range(0, len(names), cap)]
    return np.concatenate([rng.permutation(np.flatnonzero(group)) for group in groups])
{WINDOWS}"""
RIGHT["quasi_random"] = {
    "groups of pages if nothing is loaded ahead": f"{WINDOWS}  ->  {GROUPS_IF_NOTHING_IS_LOADED_AHEAD}",
    "pages opened when they could have been loaded": when_it_could_have_been_loaded,
    "drawn by a generator of torch": {
        "rng = np.random.default_rng(seed)": "rng = np.random.default_rng(seed)\nimport torch\n"
        "generator = torch.Generator().manual_seed(seed)",
        DRAWN: "int(torch.randint(len(opened), (), generator=generator))",
    },
}

# ------------------------------------------------------------------------------------------------ bottleneck

STAGE = "stage = min(STAGES, key=lambda stage: measure(job.halved(stage))[0])"
RETURNED = "return stage, measure(job)[1]"
ALONE = "def alone(stage):\n    start = job.clock()\n    job.alone(stage)\n    return job.clock() - start\n\n"
OTHER_CLOCK = "__import__('time').perf_counter()"
WRONG["find_bottleneck"] = {
    "form": f"{RETURNED}  ->  return stage",
    "warm-up": "measure(job.halved(stage))  ->  measure(job.halved(stage), skip=0)",
    "longest": f"{STAGE}  ->  {ALONE}stage = max(STAGES, key=alone)",
    "loader-only": "min(STAGES  ->  min(STAGES[:-1]",
    "stage": "min(STAGES  ->  max(STAGES",
    "clock": {
        "start = job.clock()": f"start = {OTHER_CLOCK}",
        "job.clock() - start": f"{OTHER_CLOCK} - start",
        "job.clock() - begin": f"{OTHER_CLOCK} - begin",
    },
    "fraction": "100 * waited  ->  waited",
    "waits-warm-up": f"{RETURNED}  ->  return stage, measure(job, skip=0, count=500)[1]",
    "added": f"{RETURNED}  ->  {ALONE}times = [alone(each) for each in STAGES]\n"
    "return stage, 100 * sum(times[:-1]) / sum(times)",
    "working": "100 * waited / seconds  ->  100 - 100 * waited / seconds",
    "waits": "100 * waited  ->  50 * waited",
    "error": f"{STAGE}  ->  stage = max(STAGES, key=job.milliseconds.get)",
}


def by_the_last_batches(job):
    def ends(job):
        times = []
        for batch in job.batches(300):
            taken = job.clock()
            job.step(batch)
            times.append((taken, job.clock()))
        return times

    def seconds(job):
        times = ends(job)
        return times[-1][1] - times[100][1]

    best = sorted(data_loading.STAGES, key=lambda stage: seconds(job.halved(stage)))[0]
    times = ends(job)
    gaps = [later[0] - before[1] for before, later in zip(times[100:], times[101:], strict=False)]
    return [best, np.float64(100 * sum(gaps) / (times[-1][1] - times[100][1]))]


RIGHT["find_bottleneck"] = {
    "by the last batches": by_the_last_batches,
    "three batches skipped": "skip=20  ->  skip=3",
    "many batches": "skip=20, count=100  ->  skip=50, count=1000",
}

# ------------------------------------------------------------------------------------------------ shards

RANKS = "rank, n = dist.get_rank(), dist.get_world_size()"
ORDER = "np.random.default_rng((seed, epoch)).permutation(count)"
PARTS = "parts = np.array_split(order, steps * n)"
OWN = "[part.tolist() for part in parts[rank::n]]"
STEPS = "-(-count // (batch * n))"
EVERY_NTH_SAMPLE = {
    PARTS: "own = order[rank::n]",
    OWN: "[own[i : i + batch].tolist() for i in range(0, len(own), batch)]",
}


def sampler_of_torch(count, batch, epoch, seed):
    sampler = DistributedSampler(range(count), dist.get_world_size(), dist.get_rank(), seed=seed)
    sampler.set_epoch(epoch)
    own = list(sampler)
    return [own[i : i + batch] for i in range(0, len(own), batch)]


WRONG["shard"] = {
    "form": [f"{OWN}  ->  np.concatenate(parts[rank::n]).tolist()", f"{ORDER}  ->  {ORDER} + 1"],
    "batch-size": f"{STEPS}  ->  max(1, count // (batch * n))",
    "not-sharded": {"steps * n": "-(-count // batch)", "parts[rank::n]": "parts"},
    "own-shuffle": [
        "(seed, epoch)  ->  (seed, epoch, rank)",
        '(seed, epoch)  ->  abs(hash(f"{seed}/{epoch}"))',
    ],
    "padded": [
        sampler_of_torch,
        f"{ORDER}  ->  np.resize({ORDER}, -(-count // (batch * n)) * batch * n)",
    ],
    "overlap": {
        PARTS: "ends = [i * count // (steps * n) for i in range(steps * n + 1)]\n"
        "parts = [order[max(0, a - 1) : b] for a, b in zip(ends, ends[1:])]"
    },
    "last-batch": f"{PARTS}  ->  parts = [order[i : i + batch] for i in range(0, count - batch + 1, batch)]",
    "remainder": f"{ORDER}  ->  {ORDER}[: count // n * n]",
    "missing": "parts[rank::n]  ->  parts[rank::n][: max(1, steps // 2)]",
    "steps": EVERY_NTH_SAMPLE,
    "empty-batch": f"{PARTS}  ->  parts = [order[i : i + batch] for i in range(0, steps * n * batch, batch)]",
    "small-batches": f"{STEPS}  ->  min(count // n, count // (batch * n) + 1)",
    "not-shuffled": f"{ORDER}  ->  np.arange(count)",
    "not-reproducible": {
        "seed: int) -> list[list[int]]:": "seed: int, calls=[]) -> list[list[int]]:\n    calls.append(seed)",
        "(seed, epoch)": "len(calls)",
    },
    "same-every-epoch": ["(seed, epoch)  ->  seed", "(seed, epoch)  ->  seed * epoch"],
    "fixed-shard": {
        f"order = {ORDER}": f"own = np.array_split(np.arange(count), n)[rank]\norder = {ORDER[:-6]}own)",
        "steps * n": "steps",
        "parts[rank::n]": "parts",
    },
    "together": [
        f"{ORDER}  ->  np.roll(np.random.default_rng(0).permutation(count), 7 * epoch + seed)",
        {
            f"order = {ORDER}": "blocks = np.array_split(np.random.default_rng(3).permutation(count), n)\n"
            f"order = {ORDER[:-6]}blocks[(rank + epoch + seed) % n])",
            "steps * n": "steps",
            "parts[rank::n]": "parts",
        },
    ],
    "messages": [
        f"{RANKS}  ->  {RANKS}\nimport torch\n\ndist.broadcast(torch.zeros(3), 0)",
        f"order = {ORDER}  ->  store, key = dist.distributed_c10d._get_default_store(), str((count, epoch, seed))\n"
        f"if rank == 0:\n    store.set(key, {ORDER}.tobytes())\norder = np.frombuffer(store.get(key), np.int64)",
    ],
    "one-rank": f"{RANKS}  ->  {RANKS}\nother = [r for r in range(n) if r != rank][0]",
    "only-two-ranks": "= dist.get_rank(),  ->  = [0, 1][dist.get_rank()],",
    "hang": hangs(f"{RANKS}  ->  {RANKS}\nif rank == 0:\n    dist.barrier()"),
}


def contiguous_parts(count, batch, epoch, seed):
    rank, n = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
    own = order.tensor_split(n)[rank]
    return own.tensor_split(-(-count // (batch * n)))


def shuffled_by_the_library(count, batch, epoch, seed):
    rank, n = dist.get_rank(), dist.get_world_size()
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    steps = -(-count // (batch * n))
    ends = [(rank * steps + i) * count // (steps * n) for i in range(steps + 1)]
    return (order[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True))


RIGHT["shard"] = {
    "contiguous parts": contiguous_parts,
    "shuffled by the library, from a text": shuffled_by_the_library,
    "global generator, seeded": f"order = {ORDER}  ->  np.random.seed(1000 * seed + epoch)\n"
    "order = np.random.permutation(count)",
    "hash of numbers": "(seed, epoch)  ->  abs(hash((seed, epoch)))",
    "own samples, split into steps": {
        PARTS: "parts = np.array_split(order[rank::n], steps)",
        "parts[rank::n]": "parts",
    },
}

# ------------------------------------------------------------------------------------------------ rows of text

PERMUTED = "int(np.random.default_rng([seed, epoch]).permutation(rows)[place])"
PIECE = "(document, first - start, last - start)"
ROWS_OF_RANK = "step * batch + rank * share, step * batch + (rank + 1) * share"
WRONG["text_rows"] = {
    "form": ["return found  ->  return [len(row) for row in found]", f"{PIECE}  ->  {PIECE[:-1]}, length)"],
    "changed": "ends = np.cumsum(lengths)  ->  lengths += [0]\nends = np.cumsum(lengths)",
    "not-shuffled": f"{PERMUTED}  ->  place",
    "same-every-epoch": "[seed, epoch]  ->  seed",
    "no-seed": "[seed, epoch]  ->  epoch",
    "last-row": "int(ends[-1]) // length  ->  -(-int(ends[-1]) // length)",
    "epoch-end": "divmod(number, rows)  ->  divmod(number, rows // batch * batch or rows)",
    "not-sharded": f"{ROWS_OF_RANK}  ->  step * batch, (step + 1) * batch",
    "share": f"{ROWS_OF_RANK}  ->  step * batch + rank, (step + 1) * batch, ranks",
    "rank-first": f"{ROWS_OF_RANK}  ->  (step + rank) * share, (step + rank + 1) * share",
    "global": f"{PIECE}  ->  (document, first, last)",
    "in-the-row": f"{PIECE}  ->  (document, first - begin, last - begin)",
    "end-included": f"{PIECE}  ->  {PIECE[:-1]} - 1)",
    "whole-documents": "if first < last:  ->  if first < last and begin <= start and end <= begin + length:",
    "empty-piece": "if first < last:  ->  if first < last or begin <= start == end < begin + length:",
    "tokens": "last = max(start, begin), min(end, begin + length)  ->  last = max(start, begin), end",
    "rows": "[seed, epoch]  ->  [epoch, seed]",
    "remembers": {
        "seed: int": "seed: int, done=[]", "ends = np.cumsum(lengths)": "done.append(batch)\nends = np.cumsum(lengths)",
        ROWS_OF_RANK: "sum(done[:-1]), sum(done[:-1]) + share",
    },
}


def token_by_token(lengths, length, batch, step, rank, ranks, seed):
    owner = [(document, token) for document, size in enumerate(lengths) for token in range(size)]
    count = len(owner) // length
    orders = {}
    rows = []
    for number in range(step * batch, (step + 1) * batch):
        epoch = number // count
        if epoch not in orders:
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(count)
        row = orders[epoch][number % count]
        pieces = {}
        for document, token in owner[row * length : (row + 1) * length]:
            first, _ = pieces.get(document, (token, token))
            pieces[document] = first, token + 1
        rows.append([[document, *ends] for document, ends in pieces.items()])
    return rows[rank * batch // ranks : (rank + 1) * batch // ranks]


RIGHT["text_rows"] = {
    "token by token": token_by_token,
    "numbers of NumPy, and a generator": "return found  ->  return (np.array(row) for row in found)",
}

# ------------------------------------------------------------------------------------------------ paper problem

WRONG["imagenet_epoch"] = {
    **wrong_formulas(data_loading.imagenet_epoch),
    "numbers": "disk / gigabytes  ->  disk / gigabytes * 1.024**3",
    "number": ", min(later, key=later.get)  ->  ",
    "typed": 'return images  ->  return 186.6, 55.87, "gpu"\nreturn images',
}


def by_the_seconds(images, gigabytes, memory, disk, cpu, gpu):
    seconds = np.array([gigabytes / disk, images / cpu, images / gpu])
    later = seconds.copy()
    if memory >= gigabytes:
        later[0] = 0
    return [seconds.max(), later.max(), ("disk", "cpu", "gpu")[later.argmax()]]


RIGHT["imagenet_epoch"] = {
    "by the seconds": by_the_seconds,
    "the slowest is the first of the sorted ones": "min(later, key=later.get)  ->  sorted(later, key=later.get)[0]",
}


@pytest.fixture
def with_ffcv():
    if reason := ffcv.missing():
        pytest.skip(reason)
    ffcv.apply_fixes()


class TestDataLoading(ExerciseTests):
    checks = data_loading
    WRONG, RIGHT = WRONG, RIGHT

    def passes(self, name, answer):
        getattr(data_loading, name)(answer)

    @pytest.mark.usefixtures("with_ffcv")
    def test_files_of_the_checks_are_read_by_ffcv(self, tmp_path: Path):
        from ffcv.reader import Reader

        fields = [("label", _beton.INT), ("weight", _beton.FLOAT), ("image", _beton.IMAGE)]
        images = _beton.pictures(30, 1)
        content = _beton.beton(fields, [list(range(30)), [0.5] * 30, images], shuffled=True)
        path = tmp_path / "small.beton"
        path.write_bytes(content)
        reader = Reader(str(path))
        assert (reader.num_samples, reader.page_size) == (30, _beton.PAGE)
        assert reader.field_names == ["label", "weight", "image"]
        sizes = dict(zip(reader.alloc_table["ptr"].tolist(), reader.alloc_table["size"].tolist(), strict=True))
        for sample, (label, weight, (mode, width, height, pointer)) in enumerate(reader.metadata.tolist()):
            assert (label, weight, mode) == (sample, 0.5, 1)
            assert images[sample].shape == (height, width, 3)
            assert content[pointer : pointer + sizes[pointer]] == images[sample].tobytes()

    @pytest.mark.usefixtures("with_ffcv")
    def test_first_file_is_written_by_ffcv_as_the_checks_write_one(self):
        columns = [_beton.pictures(40, 3), [7 * i % 10 for i in range(40)]]
        assert _beton.beton([("image", _beton.IMAGE), ("label", _beton.INT)], columns) == data_loading.own_file()

    def test_file_cannot_be_read_without_being_counted(self):
        file, reads = _beton.counted_file(bytes(range(200)) * 100)
        assert file.read(10) == bytes(range(10)) and reads.count == 10
        buffered = io.BufferedReader(file)
        assert buffered.read(4) and reads.count > 14
        before = reads.count
        assert len(file.read()) == reads.count - before and file.tell() == 20_000
        with pytest.raises(io.UnsupportedOperation):
            np.fromfile(file, np.uint8)

    def test_first_file_is_the_same_without_ffcv(self, monkeypatch):
        monkeypatch.setattr(ffcv, "missing", lambda: "not here")
        data_loading.own_file.cache_clear()
        self.passes("read_header", self.answer("read_header"))
        data_loading.own_file.cache_clear()

    def test_pages_open_on_average_as_the_text_says(self):
        pages, window = np.repeat(np.arange(32), 24), self.answer("quasi_random")
        for fn, opened in ((when_it_could_have_been_loaded, 7.8), (window, 6.3)):
            means = [_orders.in_memory(pages[np.array(fn(pages, 9, 12, seed))], 0).mean() for seed in range(20)]
            assert np.mean(means) == pytest.approx(opened, abs=0.25)

    @pytest.mark.parametrize("seed", range(20))
    def test_right_order_passes_whatever_chance_brings(self, seed):
        answer = self.answer("quasi_random")
        self.passes("quasi_random", lambda *case: answer(*case[:3], 1000 * seed + case[3]))

    @pytest.mark.usefixtures("with_ffcv")
    def test_order_of_ffcv_passes(self):
        from ffcv.traversal_order.quasi_random import generate_order_inner

        def quasi_random(pages, cap, ahead, seed):
            orders = (window_of(pages, window, seed) for window in range(cap, 0, -1))
            return next(order for order in orders if _orders.in_memory(pages[order], ahead).max() <= cap)

        def window_of(pages, window, seed):
            names = np.unique(pages)
            lists = [np.flatnonzero(pages == page) for page in names]
            table = np.zeros((len(names), max(map(len, lists))), np.int64)
            for row, samples in zip(table, lists, strict=True):
                row[: len(samples)] = samples
            order = np.zeros(len(pages), np.int64)
            generate_order_inner(seed, table, np.array(list(map(len, lists))), order, window)
            return order

        self.passes("quasi_random", quasi_random)

    def test_hit_rate_of_a_memory_that_knows_the_future(self):
        assert data_loading.hit_rate([1, 2, 3, 1, 2, 3], 3) == pytest.approx(3 / 6)
        assert data_loading.hit_rate([1, 2, 3, 1, 2, 3], 2) == pytest.approx(2 / 6)
        assert data_loading.hit_rate([1, 1, 2, 2, 3], 1) == pytest.approx(2 / 5)

    def test_jobs_have_one_bottleneck_each_that_any_long_measurement_finds(self):
        for name, plan in (_jobs.PLANS | _jobs.HIDDEN).items():
            for skip in (5, 50):
                first, second = sorted(_jobs.steady(plan.halved(stage), skip)[0] for stage in data_loading.STAGES)[:2]
                assert first < 0.98 * second, name
            assert _jobs.steady(plan, 5)[1] == pytest.approx(_jobs.steady(plan, 60)[1], abs=1), name

    @pytest.mark.parametrize("n", [2, 3, 4])
    def test_shuffled_shards_are_told_from_blocks_that_stay_together(self, n):
        def parts(order):
            return [part.tolist() for part in np.array_split(order, n)]

        limit = 25 + 4 * (n - 1) ** 2  # as in the check
        rng = np.random.default_rng(n)
        before = parts(rng.permutation(300))
        by_chance = [data_loading._kept_together(before, parts(rng.permutation(300))) for _ in range(500)]
        assert np.mean(by_chance) == pytest.approx((n - 1) ** 2, rel=0.2) and max(by_chance) < limit
        assert data_loading._kept_together(before, before[1:] + before[:1]) > 5 * limit

    def test_answer_that_never_ends_is_refused_and_ended(self, monkeypatch):
        def quasi_random(pages, cap, ahead, seed):
            while True:
                last.append(time.monotonic())
                del last[:-1]
                time.sleep(0.001)

        last = []
        monkeypatch.setattr(_limits, "LIMIT", 2.0)
        error = self.refusal("quasi_random", quasi_random)
        assert error.hint == "endless" and "does not come to an end" in str(error)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and time.monotonic() - last[0] < 2:
            time.sleep(0.2)
        assert time.monotonic() - last[0] >= 2  # nobody runs any more

    def test_reader_that_never_ends_on_another_version_is_ended(self, monkeypatch):
        def read_header(file):
            try:
                return answer(file)
            except ValueError:
                while True:
                    time.sleep(0.001)

        answer = self.answer("read_header")
        monkeypatch.setattr(_limits, "LIMIT", 5.0)
        assert self.refusal("read_header", read_header).hint == "endless"

    def test_refusals_name_bytes_samples_and_ranks(self):
        def text(exercise, hint, number=1):
            return str(self.refusal(exercise, self.wrong(exercise, hint, number)))

        assert "65,536 bytes were read, 2,106 do;" in text("read_header", "too-many-bytes")
        assert re.search(r"4,2\d\d,\d{3} bytes were read, 2,\d{3} do;", text("read_sample", "whole-file"))
        assert "2 ranks, 299 samples in batches of 16: 1 samples come twice" in text("shard", "padded")
        assert "65 samples in batches of 32: the ranks have 2, 1 batches." in text("shard", "steps")
        assert "32 pages are open at once; 4 fit." in text("quasi_random", "random")
