"""The exercises on data loading: what an answer must give or keep to, and the usual mistakes with their hints.

Files are read through an object that counts every byte; orders and shards are judged by what they promise, so that any
with the property passes; the training jobs run on a clock of their own, so that no machine is too busy for them.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from course_utils import record
from course_utils.check import Case, CheckFailed, exercise, number, paper, show, whole_number

from . import answers
from .beton import CUSTOM, FLOAT, IMAGE, INT, PAGE, CountedFile, beton, pictures, row_type
from .beton import own_file as own_file
from .ffcv.by_hand import FIELD, HEADER
from .jobs import HIDDEN, PLANS, STAGES, Job
from .jobs import JOBS as JOBS
from .page_cache import hit_rate, in_memory

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

READ = "{number:,.0f} bytes were read, {most:,.0f} do."

# --- exercise 1: the header

TWO = [("image", IMAGE), ("label", INT)]


def header(name: str, hint: str | None = None, begin: int = 0, **other: Any) -> Case:
    """A case with a header in which some things are other than usual."""
    usual = {"version": 2, "page_size": 1 << 23, "samples": 50_000, "table": 3 * PAGE, "fields": TWO}
    return Case(0, name, (usual | other, begin), hint)


@exercise("Exercise 1", passed="with 24 bytes and 1041 for each field, however large the file is.", cases=[
    header("fields image and label"),
    header("one field", fields=[("label", INT)], page_size=PAGE, samples=77),
    header("five fields", table=170 << 30, fields=[*TWO, ("boxes", CUSTOM), ("x", FLOAT), ("caption", 3)]),
    header("a name of 16 characters", fields=[("coarse_label_100", INT), ("image", IMAGE)]),
    header("6 billion samples", samples=6 * 10**9 + 3, table=1 << 50),
    header("a file that has been read from", "not-rewound", begin=1000),
    header("a file of version 1", "version", version=1),
])
def read_header(note, answer, right, begin):
    version, *numbers, fields = right.values()
    head = np.array((version, len(fields), *numbers), HEADER)
    descriptors = np.array([(kind, name.encode(), bytes(range(1, 255))) for name, kind in fields], FIELD)
    file = CountedFile(head.tobytes() + descriptors.tobytes() + bytes(PAGE))
    file.seek(begin)
    try:
        got = answer(file)
    except CheckFailed as error:
        if version != 2 and isinstance(error.__context__, ValueError):
            return
        raise
    what = f"the function returned {show(got)}."
    note.holds(version == 2, "version", what)
    if not note.holds(isinstance(got, dict) and set(got) == set(right), "odd", what):
        return
    named = [tuple(field) if isinstance(field, list) else field for field in got["fields"]]
    note.equal({key: whole_number(value) for key, value in got.items()} | {"fields": named}, right, "the value")
    note.at_most("too-many-bytes", file.count, head.nbytes + descriptors.nbytes, READ)


NAME, REWIND = 'row["name"].decode()', "file.seek(0)"
MISTAKES["read_header"] = {
    "too-many-bytes": ("The result is right, but more was read than needed. A buffered reader takes whole blocks.",
            f"{REWIND}  ->  {REWIND}\nfile = io.BytesIO(file.read(1 << 16))"),
    "swapped": ("Two numbers of 8 bytes follow each other: first the samples, then the place of the table.",
            "samples, table =  ->  table, samples ="),
    "narrow": ("A number was read from the wrong end, or lost its upper half; the format is little endian.",
            {"samples, table =": "samples, _, table, _ =", '"<u8", 2, offset=8': '"<u4", 4, offset=8'}),
    "fields-count": ("The header says how many fields follow. This is another number.",
            "fields * descriptor.itemsize  ->  2 * descriptor.itemsize"),
    "names": ("A name is text without the zeros that fill its 16 bytes; behind one of 16 characters there are none.",
            [f'{NAME}  ->  row["name"]', f"{NAME}  ->  {NAME}[:15]"]),
    "version": ("Only version 2 has this form. Refuse any other with a ValueError, before you misread it.",
            ["if version != 2:  ->  if version > 2:", "raise ValueError  ->  raise AssertionError"]),
    "not-rewound": ("A file stands wherever its last reader left it, which need not be the beginning.",
            f"{REWIND}  ->  pass"),
    "value": ("Something was read from another place than the exercise says. A descriptor has 1041 bytes, no padding.",
            "V1024  ->  V1027"),
}


def with_struct(file):
    file.seek(0)
    version, count, page_size, samples, table = struct.unpack("=HHIqq", file.read(24))
    if version != 2:
        raise ValueError
    found = [struct.unpack("<B16s1024s", file.read(1041)) for _ in range(count)]
    fields = [[name.rstrip(b"\0").decode(), np.uint8(kind)] for kind, name, _ in found]
    return {"version": np.uint16(2), "fields": fields, "page_size": page_size, "samples": samples, "table": table}


RIGHT["read_header"] = {
    "with struct": with_struct,
    "into a buffer": "head = file.read(24)  ->  file.readinto(head := bytearray(24))",
}

# --- exercise 2: one sample

SAMPLES, LARGE = 3000, 1234
LAYOUTS = (
    (("image", IMAGE), ("label", INT)),
    (("label", INT), ("weight", FLOAT), ("image", IMAGE)),
    (("picture", IMAGE), ("weight", FLOAT), ("class", INT)),
)
OWN_HINTS = {1: "index", LARGE: "narrow-size", SAMPLES - 1: "index"}  # in the first layout


@cache
def columns() -> dict[int, list]:
    images = pictures(SAMPLES, 8)
    images[LARGE] = np.random.default_rng(9).integers(0, 256, (200, 150, 3), np.uint8)
    labels = np.random.default_rng(2).integers(0, 1000, SAMPLES).tolist()
    return {IMAGE: images, INT: labels, FLOAT: [0.25 * i for i in range(SAMPLES)]}


@cache
def file_of(fields: tuple) -> bytes:
    return beton(fields, [columns()[kind] for _, kind in fields])


@exercise("Exercise 2", passed="with no more bytes than header, descriptors, one row and the pixels.", cases=[
    Case(0, f"fields {', '.join(name for name, _ in fields)}, sample {index}", (fields, index),
         OWN_HINTS.get(index) if fields is LAYOUTS[0] else "field-order")
    for fields in LAYOUTS for index in (0, 1, LARGE, SAMPLES - 1)
])
def read_sample(note, answer, fields, index):
    file = CountedFile(file_of(fields))
    got = answer(file, index)
    pair = isinstance(got, (tuple, list)) and len(got) == 2 and isinstance(got[0], np.ndarray)
    if not note.holds(pair and got[0].dtype == np.uint8, "odd", f"the function returned {show(got)}."):
        return
    image, label = columns()[IMAGE][index], columns()[INT][index]
    note.equal(torch.from_numpy(got[0].copy()), torch.from_numpy(image), "the image")
    note.equal(whole_number(got[1]), label, "the label")
    row = row_type([kind for _, kind in fields]).itemsize
    enough = HEADER.itemsize + FIELD.itemsize * len(fields) + row + image.nbytes
    note.at_most("too-many-bytes", file.count, enough + 64, READ)


PIXELS, SHAPED = "shape[0] * shape[1] * 3", "pixels.reshape(shape),"
MISTAKES["read_sample"] = {
    "too-many-bytes": ("The sample is right, but more was read than header, descriptors, one row and the pixels.",
            {" + row.itemsize * index": "", "read(row.itemsize), row)[0]": "read(row.itemsize * 3000), row)[index]"}),
    "packed": ("Rows are aligned: every field starts at a multiple of its alignment, and so does the next row.",
            ", align=True  ->  "),
    "index": ("What is read here does not belong to sample `index`. Where does its row start?",
            "row.itemsize * index  ->  0"),
    "width-height": ("Width and height are swapped. The row stores the width first; the array has the height first.",
            'int(place["height"]), int(place["width"])  ->  int(place["width"]), int(place["height"])'),
    "field-order": ("This depends on the first file's fields. The descriptors say which field has which type.",
            'types = [kind for _, kind in header["fields"]]  ->  types = [2, 1]'),
    "narrow-size": ("The product of NumPy numbers of 2 bytes has 2 bytes too, and 200 · 150 · 3 does not fit.",
            f"{PIXELS}  ->  int(np.prod(shape, dtype=np.uint16))"),
    "pointer": ("The pixels come from another place. The pointer counts from the beginning of the file.",
            'int(place["pointer"])  ->  int(place["pointer"]) - header["page_size"]'),
    "channels": ("The pixels are stored row by row, each pixel with its three colours together.",
            f"{SHAPED}  ->  pixels.reshape(3, *shape[:2]).transpose(1, 2, 0),"),
}
RIGHT["read_sample"] = {
    "a list, and a number of NumPy": 'pixels.reshape(shape), int(sample["type 1"])  ->  '
                                     '[pixels.reshape(*shape), sample["type 1"]]',
    "images of 16 bytes in the row": '("pointer", "<u8")]  ->  ("pointer", "<u8"), ("padding", "V3")]',
}

# --- exercise 3: an order for a small memory

EVEN, SMALL = np.repeat(np.arange(1, 33), 24), np.repeat(np.arange(24), 16)
BY_TURNS = np.concatenate([np.tile(group, 20) for group in np.arange(27).reshape(-1, 3)])
ODD = np.repeat(3 + 2 * np.arange(30), np.random.default_rng(11).integers(8, 40, 30))
LONG = np.repeat(np.arange(40), np.random.default_rng(12).integers(24, 60, 40))
SEED = 17


@exercise("Exercise 3", explains=["odd", "over-cap"], passed="with each page loaded once, in order of chance.", cases=[
    (0, "pages 1 to 32 of 24 samples each, 4 fit", EVEN, 4, 0),
    (0, "30 pages of 8 to 39 samples, numbered 3, 5, 7, …, 5 fit", ODD, 5, 0),
    Case(0, "three writers took turns, 4 of 27 pages fit", (BY_TURNS, 4, 0), "unsorted"),
    Case(0, "24 pages of 16 samples, 1 fits", (SMALL, 1, 0), "large-cap"),
    Case(0, "10 pages of 30 samples, 12 fit", (np.repeat(np.arange(1, 11), 30), 12, 0), "large-cap"),
    (0, "pages 1 to 32 of 24 samples each, 9 fit, loaded 12 samples ahead", EVEN, 9, 12),
    (0, "pages 1 to 32 of 24 samples each, 9 fit, loaded 2 samples ahead", EVEN, 9, 2),
    (0, "40 pages of 24 to 59 samples, 12 fit, loaded 20 samples ahead", LONG, 12, 20),
    Case(0, "24 pages of 16 samples, 2 fit, loaded 8 samples ahead", (SMALL, 2, 8), "large-cap"),
])
def quasi_random(note, answer, pages, cap, ahead):
    seeds = range(SEED, SEED + (6 if ahead else 2))  # where chance decides what fits, several
    orders = {}
    for seed in seeds:
        got = answer(pages.copy(), cap, ahead, seed)
        order = np.array(got) if isinstance(got, (list, tuple, np.ndarray, torch.Tensor)) else np.zeros(0)
        form = order.ndim == 1 and order.dtype.kind in "iu" and not np.any((order < 0) | (order >= len(pages)))
        if not note.holds(form, "odd", f"the function returned {show(got)}."):
            return
        missing, twice = len(pages) - len(np.unique(order)), len(order) - len(np.unique(order))
        what = f"{missing} samples never come, and {twice} places are for samples that have come before."
        if not note.holds(not missing and not twice, "each-once", what):
            return
        orders[seed] = order
        opened, held = (in_memory(pages[order], early).max() for early in (0, ahead))
        hits = 100 * hit_rate(pages[order].tolist(), cap)
        note.at_most("over-cap", opened, cap, f"{{number}} pages are open at once; {{most}} fit. {hits:.0f} % hit.")
        note.at_most("ahead", held, cap, "{number} pages are in memory at once; {most} fit.")
        chance(note, order, pages)
    mixed, can = (np.mean([in_memory(pages[order], 0).mean() for order in some])
                  for some in (orders.values(), [answers.quasi_random(pages, cap, ahead, seed) for seed in orders]))
    note.holds(mixed >= 0.9 * can, "unused-cap", f"{mixed:.1f} pages are open on average; {can:.1f} can be.")
    again = np.array_equal(answer(pages.copy(), cap, ahead, SEED), orders[SEED])
    note.holds(again, "same-every-epoch", f"two calls with seed {SEED} differ.")
    ours, few = by_page(orders[SEED], pages), cap >= len(np.unique(pages))
    theirs, alike = by_page(orders[SEED + 1], pages), f"seeds {SEED} and {SEED + 1} give the same order"
    inside = np.mean([np.array_equal(samples, theirs[page]) for page, samples in ours.items()])
    note.holds(few or list(ours) != list(theirs), "same-every-epoch", f"{alike} of pages.")
    note.holds(inside < 0.5, "same-every-epoch", f"{alike} of the samples in {100 * inside:.0f} % of the pages.")


def by_page(order: np.ndarray, pages: np.ndarray) -> dict[int, np.ndarray]:
    """The samples of each page in the order of reading; pages in the order in which they are opened."""
    read = pages[order]
    _, first = np.unique(read, return_index=True)
    return {int(page): order[read == page] for page in read[np.sort(first)]}


def chance(note, order, pages) -> None:
    """Pages, the samples of a page, and the turns of pages follow no rule."""
    read, samples = pages[order], by_page(order, pages)
    names, opened = list(samples), in_memory(read, 0)
    if len(names) >= 16:
        places = np.argsort(np.argsort(names))
        trend = (abs(np.diff(places)) == 1).mean()  # neighbours after each other, from wherever it begins
        what = f"the pages are opened in the order {', '.join(map(str, names[:6]))}, …."
        note.holds(trend < 0.8, "round-robin", what)
    ranks = [np.argsort(np.argsort(some)) for some in samples.values()]
    equal = np.mean([np.bincount(np.diff(rank) % len(rank)).max() / (len(rank) - 1) for rank in ranks])
    what = f"{100 * equal:.0f} % of the steps from one sample of a page to its next one are the same."
    note.holds(equal < 0.5, "round-robin", what)
    if 1 < opened.max() < len(names):
        again, drawn = (read[1:] == read[:-1]).sum(), (1 / opened[1:]).sum()
        what = f"{again} accesses are to the same page as the one before; if drawn evenly, about {drawn:.0f} are."
        note.holds(again > 0.5 * drawn, "round-robin", what)


WINDOWS, FITS, DRAWN = "for window in range(cap, 0, -1):", "if in_memory.max() <= cap:", "rng.integers(len(opened))"
SHUFFLED = "rng.permutation(np.flatnonzero(pages == page))"
SHUFFLED_PAGES = "rng.shuffle(waiting := [samples.tolist() for samples in waiting])"
IN_FILE_ORDER = "waiting = [samples.tolist() for samples in waiting]"


def opened_when_loaded(pages, cap, ahead, seed):
    """Pages are opened when they could have been loaded; another try where no page is open, and none may be."""
    rng = np.random.default_rng(seed)
    while True:
        waiting = [rng.permutation(np.flatnonzero(pages == page)).tolist() for page in np.unique(pages)]
        rng.shuffle(waiting)
        order, opened, ended = [], [], []
        while waiting or opened:
            while waiting and len(opened) + sum(end >= len(order) - ahead for end in ended) < cap:
                opened.append(waiting.pop())
            if not opened:
                break
            chosen = opened[rng.integers(len(opened))]
            order.append(chosen.pop())
            if not chosen:
                opened.remove(chosen)
                ended.append(len(order) - 1)
        if not waiting and not opened:
            return order


MISTAKES["quasi_random"] = {
    "each-once": ("Each sample comes exactly once in an epoch. Are all pages as full as the first?",
            f"{SHUFFLED}  ->  {SHUFFLED}[:24]"),
    "over-cap": ("""More pages are open at once than fit, even if none is loaded ahead. A page is open from its first
        sample to its last.""", {"range(cap, 0, -1)": "range(cap + 1, 0, -1)", FITS: "if True:"}),
    "ahead": ("""It would fit if no page were loaded ahead. But a page is in memory from `ahead` samples before its
        first one, while the page whose place it takes is still in use.""", f"{FITS}  ->  if True:"),
    "unused-cap": ("""Fewer pages are open, on average, than could be: open the next one as soon as one is used up, and
        take the widest window that fits, for each seed anew.""",
            "range(cap, 0, -1)  ->  range(max(1, cap // 2), 0, -1)"),
    "round-robin": ("""Chance has to decide the order in which pages are opened, the order of the samples of a page,
        and, sample by sample, which of the open pages is next.""",
            [f"{SHUFFLED_PAGES}  ->  {IN_FILE_ORDER}", f"{DRAWN}  ->  len(order) % len(opened)"]),
    "same-every-epoch": ("""The same seed gives the same order, as ranks and a resumed run need it; another seed gives
        another one, of the pages and of the samples of a page.""", ["default_rng(seed)  ->  default_rng()",
             f"{SHUFFLED}  ->  np.random.default_rng(page).{SHUFFLED[4:]}"]),
    "unsorted": ("This is right where each page holds neighbours, but not where several writers took turns.",),
    "large-cap": ("""The answer must work with any room: with room for one page, pages come one at a time; with room for
        all, the order is a full shuffle.""", "range(cap, 0, -1)  ->  range(cap, 1, -1)"),
}
RIGHT["quasi_random"] = {
    "pages opened when they could have been loaded": opened_when_loaded,
    "groups of pages if nothing is loaded ahead": f"""{WINDOWS}  ->  if not ahead:
    rng = np.random.default_rng(seed)
    names = rng.permutation(np.unique(pages))
    groups = [np.isin(pages, names[i : i + cap]) for i in range(0, len(names), cap)]
    return np.concatenate([rng.permutation(np.flatnonzero(group)) for group in groups])
{WINDOWS}""",
}

# --- exercise 4: a bottleneck


@exercise("Exercise 4", passed="with the stage and the waiting of six jobs.", cases=[
    (0, f"job {name}", plan) for name, plan in (PLANS | HIDDEN).items()
])
def find_bottleneck(note, answer, plan):
    looks: list[float] = []
    got = answer(Job(**plan, looks=looks))
    form = isinstance(got, (tuple, list)) and len(got) == 2 and got[0] in STAGES and number(got[1]) is not None
    if not note.holds(form, "odd", f"the function returned {show(got)}."):
        return
    note.holds(bool(looks), "clock", "the job's clock was not looked at.")
    (stage, waits), (best, share) = got, answers.find_bottleneck(Job(**plan))
    note.holds(stage == best, "stage", f"another stage than {stage}, halved, gives more batches/s.", ("stage", stage))
    what = f"the step waits for {share:.0f} % of the time; the function returned {waits:.3g}."
    note.holds(abs(waits - share) <= 2, "waits", what, ("waits", float(f"{waits:.2g}")))


STAGE = "stage = min(STAGES, key=lambda stage: measure(job.halved(stage))[0])"
RETURNED, CLOCK = "return stage, measure(job)[1]", "__import__('time').perf_counter()"
ALONE = "def alone(stage):\n    start = job.clock()\n    job.alone(stage)\n    return job.clock() - start\n\n"
MISTAKES["find_bottleneck"] = {
    "loader-only": ("The step itself is the bottleneck here. Halve it as well, and compare the seconds of the run.",
            "min(STAGES  ->  min(STAGES[:-1]"),
    "warm-up": ("""This is the answer if the first batches count. One of them holds the compilation, which happens once
        in a run.""", "measure(job.halved(stage))  ->  measure(job.halved(stage), skip=0)"),
    "longest": ("""That stage takes the longest alone, in one thread. But several threads share it, or it runs beside
        the step. Compare runs that include the steps.""", f"{STAGE}  ->  {ALONE}stage = max(STAGES, key=alone)"),
    "clock": ("The job has a clock of its own, job.clock(), and nothing has looked at it.",
            {"start = job.clock()": f"start = {CLOCK}", "job.clock() - start": f"{CLOCK} - start",
             "job.clock() - begin": f"{CLOCK} - begin"}),
    "stage": ("Making another stage twice as fast brings more. Compare the whole run with each stage halved.",
            "min(STAGES  ->  max(STAGES"),
    "fraction": ("The docstring asks for per cent.", "100 * waited  ->  waited"),
    "added": ("That is the loader's share if loader and step took turns. Here stages run beside the step.",
            f"{RETURNED}  ->  {ALONE}times = [alone(each) for each in STAGES]\n"
            "return stage, 100 * sum(times[:-1]) / sum(times)"),
    "waits": ("""Add up the time that next() takes, and divide by the time of the whole loop. The first batch, with the
        compilation, does not count.""", "100 * waited / seconds  ->  100 - 100 * waited / seconds"),
}
RIGHT["find_bottleneck"] = {
    "three batches skipped": "skip=20  ->  skip=3",
    "many batches": "skip=20, count=100  ->  skip=50, count=1000",
}

# --- exercise 5: shards

EPOCHS = {"epoch 0": (0, 5), "a second call": (0, 5), "epoch 1": (1, 5), "another seed": (0, 6)}  # epoch, seed


@exercise(
    "Exercise 5", passed="each sample once, as many batches on every rank, without a message.",
    cases=[
        (n, f"{count} samples in batches of {batch}", count, batch) for n in (2, 4, 3, 1)
        for count, batch in ((300, 32), (299, 16), (65, 32), (128, 16), (1000, 64), (7, 32))
    ],
)
def shard(note, answer, count, batch):
    rank, n = dist.get_rank(), dist.get_world_size()
    random.seed(rank)  # as in processes that torchrun starts: generators that nobody has seeded differ, hash() too
    np.random.seed(rank)
    torch.manual_seed(rank)
    answer.__globals__.setdefault("hash", lambda value: hash((rank, value) if isinstance(value, str) else value))
    with record() as ledger:
        got = [answer(count, batch, *key) for key in EPOCHS.values()]
    note.holds(not len(ledger), "messages", f"the ledger shows {len(ledger)} operations.")
    try:
        mine = [[[int(i) for i in part] for part in batches] for batches in map(list, got)]
    except (TypeError, ValueError):
        mine = None
    everyone = [None] * n
    dist.all_gather_object(everyone, mine)
    sizes = mine and {len(part) for batches in mine for part in batches}
    what = f"the function returned {show(got[0])}."
    if note.holds(bool(sizes) and 1 <= min(sizes) <= max(sizes) <= batch, "odd", what) and None not in everyone:
        shares(note, everyone, count, batch)


def shares(note, everyone, count, batch) -> None:
    """What the batches of all ranks, epoch by epoch, have to be together."""
    n, steps = len(everyone), [len(batches[0]) for batches in everyone]
    first, again, later, other = ([sum(batches, []) for batches in epoch] for epoch in zip(*everyone, strict=True))
    times = Counter(i for own in first for i in own)
    twice, missing = sum(t > 1 for t in times.values()), len({*range(count)} - {*times})
    what = f"{twice} samples come twice or more in the epoch, {missing} never."
    everything = n > 1 and all(len({*own}) == count for own in first)
    key = "not-sharded" if everything else "own-shuffle" if missing else "repeated"
    if not note.holds(not twice, key, what):
        return
    note.holds(not missing and len(times) == count, "missing", what)
    note.holds(len({*steps}) == 1, "steps", f"the ranks have {', '.join(map(str, steps))} batches.")
    enough = -(-count // (n * batch))
    note.at_most("steps", steps[0], enough, "{number} steps; {most} do.")
    if count != 300:  # by chance few samples may come together again
        return
    note.holds(first == again, "same-order", "two calls with epoch 0 differ.")
    note.holds(first != [sorted(own) for own in first], "same-order", f"the batches begin with {first[0][:5]}.")
    before = {pair for own in first for pair in pairwise(own)}
    for name, orders in (("epoch 1", later), ("another seed", other)):
        note.holds(orders != first, "same-order", f"{name} gives the same batches.")
        same = sum(pair in before for own in orders for pair in pairwise(own)) / len(before)
        what = f"{100 * same:.0f} % of the samples have the same successor in epoch 0 and with {name}."
        note.holds(same < 0.5, "together", what)
        blocks = n > 1 and any({*own} == {*part} for own in first for part in orders)
        note.holds(not blocks, "together", f"a rank has the samples in epoch 0 that one has with {name}.")


ORDER = "np.random.default_rng((seed, epoch)).permutation(count)"
PARTS = "parts = np.array_split(order, steps * n)"
BLOCK = "np.array_split(np.random.default_rng(3).permutation(count), n)"
MISTAKES["shard"] = {
    "not-sharded": ("Every rank gets every sample. Together they work through the set as often as there are ranks.",
            {"steps * n": "-(-count // batch)", "parts[rank::n]": "parts"}),
    "own-shuffle": ("""Some samples come twice, and others not at all. Has each rank shuffled in its own way? Ranks
        share seed and epoch, but no generator; and hash() of a text is another number in each process.""",
            ["(seed, epoch)  ->  (seed, epoch, rank)", '(seed, epoch)  ->  abs(hash(f"{seed}/{epoch}"))']),
    "repeated": ("""Some samples come more than once, as DistributedSampler repeats some until all ranks have the same
        number: let batches differ in size instead.""",
            f"{ORDER}  ->  np.resize({ORDER}, -(-count // (batch * n)) * batch * n)"),
    "missing": ("Some samples are on no rank: those left over after an equal division, or in a last batch.",
            f"{ORDER}  ->  {ORDER}[: count // n * n]"),
    "steps": ("""Ranks have different numbers of batches, so that in DDP one of them waits for ever; or there are more
        steps than needed: with n ranks a step can hold n * batch samples.""",
            {PARTS: "own = order[rank::n]", "[part.tolist() for part in parts[rank::n]]":
             "[own[i : i + batch].tolist() for i in range(0, len(own), batch)]"}),
    "same-order": ("""The same arguments give the same batches, as a resumed run needs them; and another epoch, or
        another seed, gives others, which are not the file's order.""",
            [f"{ORDER}  ->  np.arange(count)", "(seed, epoch)  ->  seed", "(seed, epoch)  ->  seed * epoch"]),
    "together": ("""Samples that are together in one epoch stay together in the next: the order is only rotated, or
        fixed blocks belong to a rank. Shuffle all of them anew, and share them out afterwards.""",
            [f"{ORDER}  ->  np.roll(np.random.default_rng(0).permutation(count), 7 * epoch + seed)",
             {f"order = {ORDER}": f"own = {BLOCK}[rank]\norder = {ORDER[:-6]}own)", "steps * n": "steps",
              "parts[rank::n]": "parts"}]),
    "messages": ("The rank asks others. It can compute its batches alone from seed, epoch, rank and world size.",
            f"order = {ORDER}  ->  import torch\norder = torch.from_numpy({ORDER})\ndist.broadcast(order, 0)\n"
            "order = order.numpy()"),
}
RIGHT["shard"] = {
    "neighbouring parts": "[part.tolist() for part in parts[rank::n]]  ->  parts[rank * steps : (rank + 1) * steps]",
    "own samples, split into steps": {
        PARTS: "parts = np.array_split(order[rank::n], steps)", "parts[rank::n]": "parts",
    },
}

# --- exercise 6: rows of text

TEXTS = {  # lengths of documents, tokens in a row, rows in a step
    "200 documents, 7 tokens left over": ([*range(1, 201)], 93, 12),
    "7 documents": ([5, 0, 9, 2, 14, 7, 3], 8, 6),
    "one long document": ([1000], 32, 6),
    "documents of a row each": ([16] * 24, 16, 12),
}
ASKED = ((0, 0, 1), (3, 0, 1), (7, 1, 2), (1, 2, 3), (12, 0, 2), (0, 0, 1))  # step, rank, ranks


@exercise("Exercise 6", passed="for any step on any number of ranks, from the step alone.",
          cases=[(0, name, *text) for name, text in TEXTS.items()])
def text_rows(note, answer, lengths, length, batch):
    given, found, right = [*lengths], [], []
    for step, rank, ranks in ASKED:
        case = (given, length, batch, step, rank, ranks, 11)
        got = answer(*case)
        try:
            got = [[tuple(map(whole_number, piece)) for piece in row] for row in got]
        except TypeError:
            got = None
        if not note.holds(got is not None, "odd", f"step {step}: expected a list of rows, each a list of pieces."):
            return
        note.holds(given == lengths, "input-changed", "the list of lengths was changed.")
        found.append(got)
        right.append(answers.text_rows(*case))
    note.holds(found[0] == found[-1], "remembers", "step 0, asked for again, has other rows.")
    wrong = [(asked, a, b) for asked, got, rows in zip(ASKED, found, right, strict=True)
             for a, b in zip([*got, None], [*rows, None], strict=False) if a != b]
    (step, rank, ranks), got, row = wrong[0] if wrong else (ASKED[0], None, None)
    what = f"a row of step {step} on rank {rank} of {ranks} is wrong.\n  expected  {row}\n  got       {got}"
    note.holds(not wrong, "value", what, ("rows", found))


PERMUTED = "int(np.random.default_rng([seed, epoch]).permutation(rows)[place])"
PIECE = "(document, first - start, last - start)"
OWN_ROWS = "step * batch + rank * share, step * batch + (rank + 1) * share"
MISTAKES["text_rows"] = {
    "same-every-epoch": ("Each epoch goes through the rows in an order of its own, and another seed in another one.",
            [f"{PERMUTED}  ->  place", "[seed, epoch]  ->  seed", "[seed, epoch]  ->  epoch"]),
    "last-row": ("The tokens that are left at the end make no whole row, and are dropped.",
            "int(ends[-1]) // length  ->  -(-int(ends[-1]) // length)"),
    "epoch-end": ("""The rows at the end of an epoch are lost where they do not fill a step. The next epoch follows at
        once, and a step may have rows of both.""", "(number, rows)  ->  (number, rows // batch * batch or rows)"),
    "share": ("""These are rows of the step, and not those of this rank. Ranks take neighbouring rows: rank 0 the first
        batch / ranks, rank 1 the next. The next step begins `batch` rows later.""",
            [f"{OWN_ROWS}  ->  step * batch, (step + 1) * batch",
             f"{OWN_ROWS}  ->  step * batch + rank, (step + 1) * batch, ranks"]),
    "counted-from": ("A piece is counted from the beginning of its document; its end is the first token behind it.",
            [f"{PIECE}  ->  (document, first, last)", f"{PIECE}  ->  (document, first - start, last - start - 1)"]),
    "whole-documents": ("A document that crosses the border of a row is in both rows; one without tokens in none.",
            "if first < last:  ->  if first < last and begin <= start and end <= begin + length:"),
    "remembers": ("The answer depends on earlier calls. A job that was started again knows the step, and nothing else.",
            {"seed: int": "seed: int, done=[]", "rows, share =": "done.append(batch)\nrows, share =",
             OWN_ROWS: "sum(done[:-1]), sum(done[:-1]) + share"}),
    "value": ("""These are other rows than asked for. Number the rows of the run from its first step on, and look each
        number up in the order of its epoch.""", "[seed, epoch]  ->  [epoch, seed]"),
}
RIGHT["text_rows"] = {
    "sums by hand": "np.cumsum(lengths)  ->  np.array([sum(lengths[: i + 1]) for i in range(len(lengths))])",
    "numbers of NumPy, and a generator": "return found  ->  return (np.array(row) for row in found)",
}

# --- exercise 7: on paper

LATER, SLOWEST = "rates if gigabytes > memory else {\"cpu\": cpu, \"gpu\": gpu}", "min(later, key=later.get)"
FIRST_SECONDS, LATER_SECONDS = "images / min(rates.values())", "images / min(later.values())"
MISTAKES["imagenet_epoch"] = {
    "gigabits": ("The file and the disk are both given in gigabytes, not gigabits.",
            "disk / gigabytes  ->  disk / 8 / gigabytes"),
    "memory-ignored": ("If the file fits in memory, the disk is read in the first epoch only.", f"{LATER}  ->  rates"),
    "always-cached": ("The file does not fit in memory: later epochs read the disk, too.",
            f"{LATER}  ->  {{'cpu': cpu, 'gpu': gpu}}"),
    "first-epoch": ("In the first epoch everything comes from the disk, whether it fits in memory or not.",
            f"{FIRST_SECONDS}  ->  {LATER_SECONDS}"),
    "added": ("Disk, CPU and GPUs work at the same time, on different batches: the slowest sets the pace.",
            {FIRST_SECONDS: "images * sum(1 / rate for rate in rates.values())",
             LATER_SECONDS: "images * sum(1 / rate for rate in later.values())"}),
    "cached-part": ("""The page cache does not help with a file that does not fit, as the exercise says: a later epoch
        reads all of it.""", f"{LATER}  ->  rates | {{'disk': images * disk / max(gigabytes - memory, 1e-9)}}"),
    "minutes": ("The docstring asks for seconds.",
            {FIRST_SECONDS: f"{FIRST_SECONDS} / 60", LATER_SECONDS: f"{LATER_SECONDS} / 60"}),
    "bottleneck": ("""The times are right. The word names what sets the pace in the later epochs: 'disk', 'cpu' or
        'gpu'.""",
            [f"{SLOWEST}  ->  {word}" for word in ("max(later, key=later.get)", "'disk'", "'cpu'", "'gpu'")]),
}


RIGHT["imagenet_epoch"] = {
    "by the seconds": f"{LATER_SECONDS}  ->  max(images / rate for rate in later.values())",
    "the slowest is the first of the sorted ones": f"{SLOWEST}  ->  sorted(later, key=later.get)[0]",
}
imagenet_epoch = paper(
    "Exercise 7", answers.imagenet_epoch, MISTAKES["imagenet_epoch"], units=["s in the first epoch", "s later", ""],
    cases=[
        (1281167, 169.8, 256, 0.91, 172801, 22930), (1281167, 169.8, 100, 0.8, 172801, 30000),
        (1281167, 169.8, 128, 0.91, 172801, 22930), (1281167, 169.8, 128, 7, 172801, 22930),
        (1281167, 140, 512, 2, 9000, 22930), (10000000, 1400, 512, 12, 60000, 30000), (50000, 1, 16, 0.5, 4000, 90000),
    ],
)
