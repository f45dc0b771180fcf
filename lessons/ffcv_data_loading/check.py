"""Checks of the exercises on data loading with FFCV.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Files are read through an object that counts every byte; orders and
shards are judged by what they promise, so that any with the property passes; the training jobs run on a clock of their
own, so that no machine is too busy for them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from course_utils.check import (
    TIMEOUT,
    CheckFailed,
    Exercise,
    checked,
    load_hints,
    number,
    paper_problem,
    whole_number,
)
from course_utils.check.edits import edited_function
from course_utils.check.limits import Endless, limited
from course_utils.torch_internals import default_store

from .beton import (
    CUSTOM,
    DESCRIPTOR,
    FLOAT,
    HEADER,
    IMAGE,
    INT,
    PAGE,
    ROWS,
    Reads,
    beton,
    counted_file,
    own_file,
    pictures,
)
from .jobs import HIDDEN, JOBS, MEASURED, PLANS, STAGES, Job, Plan, steady
from .orders import SEEDS, OrderCase, by_page, hit_rate, in_memory, open_in_window, order_cases

__all__ = [
    "HINTS", "JOBS", "STAGES", "Job", "find_bottleneck", "hit_rate", "imagenet_epoch", "own_file", "quasi_random",
    "read_header", "read_sample", "shard", "text_rows",
]

HINTS = load_hints(__file__)


def _shown(value: Any) -> str:
    """What a value is, in one line: type, shape and dtype of an array, else its beginning as text."""
    if getattr(value, "shape", None) is not None and getattr(value, "dtype", None) is not None:
        return f"{type(value).__name__} of shape {tuple(value.shape)}, dtype {value.dtype}"
    text = " ".join(str(value).split())
    return text if len(text) <= 100 else f"{text[:100]} …"


# ------------------------------------------------------------------------------------------------ files that count


def _asked(exercise: Exercise, fn: Callable, file: Any, reads: Reads, *args: Any) -> Any:
    """The result of ``fn(file, *args)``; refuses an answer that fails because it asks for a descriptor."""
    try:
        return exercise.call(fn, file, *args)
    except CheckFailed:
        exercise.require(not reads.wanted_descriptor, "no-descriptor", "the function wants a file descriptor.")
        raise


def _thrifty(
    exercise: Exercise, read: int, content: bytes, enough: int, slack: int = 0, rows: float = math.inf
) -> None:
    """Refuse an answer that has read the whole file, as much as all rows have, or more than ``enough`` bytes."""
    what = f"{read:,} bytes were read, {enough:,} do; the file has {len(content):,}."
    exercise.require(read < 0.9 * len(content), "whole-file", what)
    exercise.require(read < rows, "all-rows", what)
    exercise.require(read <= enough + slack, "too-many-bytes", what)


_NUMBERS = {"version": "version", "page_size": "page", "samples": "samples", "table": "table"}


def _header(content: bytes) -> dict[str, Any]:
    head = np.frombuffer(content, HEADER, 1)[0]
    fields = np.frombuffer(content, DESCRIPTOR, int(head["fields"]), HEADER.itemsize)
    found = {key: int(head[of]) for key, of in _NUMBERS.items()}
    return found | {"fields": [(f["name"].decode(), int(f["type"])) for f in fields]}


def _headers() -> Iterator[tuple[str, bytes]]:
    """Cases: a name, and the beginning of a file, or all of it."""
    yield "fields image and label", own_file()
    for case, fields, page, samples, table in (
        ("one field", [("label", INT)], PAGE, 77, 3 * PAGE),
        ("five fields", [("image", IMAGE), ("boxes", CUSTOM), ("x", FLOAT), ("caption", 3), ("label", INT)],
         1 << 23, 1281167, 170 << 30),
        ("a name of 16 characters", [("coarse_label_100", INT), ("image", IMAGE)], 1 << 23, 50000, 1 << 25),
        ("6 billion samples", [("image", IMAGE), ("label", INT)], 1 << 22, 6 * 10**9 + 3, 1 << 50),
    ):
        head = np.array((2, len(fields), page, samples, table), HEADER).tobytes()
        arguments = np.random.default_rng(1).bytes(1024)
        descriptors = np.array([(kind, name.encode(), arguments) for name, kind in fields], DESCRIPTOR).tobytes()
        yield case, head + descriptors + bytes(PAGE)


@checked
def read_header(fn: Callable) -> None:
    """Check ``fn(file) -> dict`` on files that count, twice on each: version, page size, samples, table and fields."""
    exercise = Exercise("Exercise 1", HINTS["read_header"])
    for exercise.case, content in _headers():
        file, reads = counted_file(content)
        got = _asked(exercise, fn, file, reads)
        _same_header(exercise, got, _header(content))
        said = reads.count
        _thrifty(exercise, said, content, HEADER.itemsize + DESCRIPTOR.itemsize * len(got["fields"]))
        exercise.fallback = "not-rewound"
        again = _asked(exercise, fn, file, reads)
        what = f"a second call for the same file returned {_shown(again)}."
        exercise.require(again == got, "not-rewound", what)
        exercise.fallback = None
    exercise.case = "a file of version 1"
    file, reads = counted_file(bytes([1]) + content[1:])
    try:
        what, refused = f"the function returned {_shown(limited(lambda: fn(file)))}.", False
    except Endless:
        exercise.refuse("endless", "the function does not come to an end.")
    except Exception as error:
        what, refused = f"{type(error).__name__}: {error}", isinstance(error, ValueError)
    exercise.require(refused, "version", what)
    print(f"Exercise 1 passed: {said:,} bytes read of a file with 2 fields, whatever its size.")


def _same_header(exercise: Exercise, got: Any, right: dict[str, Any]) -> None:
    form = isinstance(got, dict) and set(got) == set(right)
    form = form and all(whole_number(got[key]) is not None for key in _NUMBERS)
    form = form and isinstance(got["fields"], (list, tuple))
    form = form and all(isinstance(f, (list, tuple)) and len(f) == 2 for f in got["fields"])
    exercise.require(form, "form", f"the function returned {_shown(got)}.")
    for key, of in _NUMBERS.items():
        value, expected = whole_number(got[key]), right[key]
        if value != expected:
            turned = int.from_bytes(expected.to_bytes(HEADER[of].itemsize, "little"), "big")
            other = right.get({"samples": "table", "table": "samples"}.get(key))
            slips = {"byte-order": turned, "swapped": other, "narrow": expected % 2**32}
            hint = next((hint for hint, wrong in slips.items() if value == wrong), "value")
            exercise.refuse(hint, f"{key} is wrong.\n  expected  {expected}\n  got       {value}")
    names, expected = [tuple(f) for f in got["fields"]], right["fields"]
    what = f"the fields are wrong.\n  expected  {expected}\n  got       {names}"
    exercise.require(len(names) == len(expected), "fields-count", what)
    for i, ((name, kind), (right_name, right_kind)) in enumerate(zip(names, expected, strict=True)):
        if name == right_name:
            exercise.require(whole_number(kind) == right_kind, "types", what)
            continue
        text = bytes(name) if isinstance(name, (bytes, bytearray, np.ndarray)) else str(name).encode()
        causes = (
            ("names", text.startswith(right_name.encode())),
            ("full-name", len(right_name) == 16 and name == right_name[:15]),
            ("descriptor-size", i > 0),
        )
        exercise.refuse(next((key for key, holds in causes if holds), "value"), what)


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
            file, reads = counted_file(content)
            try:
                got = _asked(exercise, fn, file, reads, index)
            except CheckFailed as error:
                if index and error.hint == "error":
                    hint = "narrow-size" if images[index] is large else "index"
                    exercise.refuse(hint, str(error).split("\n\n")[-1])
                raise
            _same_sample(exercise, got, images, labels, index)
            enough = HEADER.itemsize + DESCRIPTOR.itemsize * len(fields) + row + images[index].nbytes
            _thrifty(exercise, reads.count, content, enough, 64, rows=row * samples + images[index].nbytes)
    print(f"Exercise 2 passed: {reads.count:,} bytes read for one sample of a file of {len(content):,}.")


def _same_sample(exercise: Exercise, got: Any, images: list[np.ndarray], labels: list[int], index: int) -> None:
    pair = isinstance(got, (tuple, list)) and len(got) == 2
    form = pair and isinstance(got[0], np.ndarray) and whole_number(got[1]) is not None
    exercise.require(form, "form", f"the function returned {' and '.join(map(_shown, got)) if pair else _shown(got)}.")
    image, label = got[0], whole_number(got[1])
    expected, fallback, pixels = images[index], exercise.fallback, got[0].dtype == np.uint8
    if image.shape != expected.shape or not pixels:
        height, width, _ = expected.shape
        causes = (
            ("form", not pixels or np.array_equal(image, expected)),
            ("width-height", image.shape == (width, height, 3)),
            ("index", any(np.array_equal(image, other) for other in images)),
            (fallback or "index", image.ndim == 3 and index),
        )
        key = next((key for key, holds in causes if holds), fallback or "form")
        exercise.refuse(key, f"the image is {_shown(image)}; expected {expected.shape}, uint8.")
    if not np.array_equal(image, expected):
        planes = expected.tobytes() == image.transpose(2, 0, 1).tobytes()
        planes = planes or np.array_equal(np.sort(image.ravel()), np.sort(expected.ravel()))
        exercise.refuse("channels" if planes else fallback or "pointer", "the pixels are wrong.")
    if label != labels[index]:
        other = label in (labels[0], labels[max(0, index - 1)], labels[min(index + 1, len(labels) - 1)])
        hint = fallback or ("index" if index and other else "packed")
        exercise.refuse(hint, f"the label is {label}; expected {labels[index]}.")


# ------------------------------------------------------------------------------------------------ quasi-random order

_SEED, _FAR = 17, 64_000  # far: a seed that ends in the same digits, in decimal and in binary


@checked
def quasi_random(fn: Callable) -> None:
    """Check ``fn(pages, cap, ahead, seed)``: each page loaded once, and as random as ``cap`` pages allow."""
    exercise = Exercise("Exercise 3", HINTS["quasi_random"])
    said = []
    for case in order_cases():
        exercise.case, exercise.fallback = case.name, case.fallback
        orders = []
        for seed in range(_SEED, _SEED + (SEEDS if case.ahead else 2)):
            orders.append(_order(exercise, fn, case, seed))
            said.append(_judge_memory(exercise, orders[-1], case))
            _judge_chance(exercise, orders[-1], case.pages)
        _judge_room(exercise, orders, case)
        same = np.array_equal(orders[0], _order(exercise, fn, case, _SEED))
        exercise.require(same, "not-reproducible", f"two calls with seed {_SEED} differ.")
        far = _order(exercise, fn, case, _SEED + _FAR)
        for seed, other in ((_SEED + 1, orders[1]), (_SEED + _FAR, far)):
            _judge_seeds(exercise, case, orders[0], other, f"seeds {_SEED} and {seed} give the same order")
    print(f"Exercise 3 passed: {100 * said[0]:.1f} % of the accesses hit where 4 of 32 pages fit.")


def _order(exercise: Exercise, fn: Callable, case: OrderCase, seed: int) -> np.ndarray:
    """What ``fn`` returns; refuses what is not each sample once."""
    got, count = exercise.call(fn, case.pages.copy(), case.cap, case.ahead, seed), len(case.pages)
    exercise.require(got is not None or case.cap > 2, "no-window", "the function returned None.")
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


def _judge_memory(exercise: Exercise, order: np.ndarray, case: OrderCase) -> float:
    """Refuse too many pages in memory; return the hit rate."""
    read, names = case.pages[order], len(np.unique(case.pages))
    opened, hits = in_memory(read, 0).max(), hit_rate(read.tolist(), case.cap)
    if opened > case.cap:
        full = opened > 0.75 * names and exercise.fallback != "unsorted"
        what = f"{opened} pages are open at once; {case.cap} fit. {100 * hits:.1f} % of the accesses hit"
        possible = 100 * (1 - names / len(read))
        exercise.refuse("random" if full else exercise.fallback or "over-cap", f"{what}; {possible:.1f} % can.")
    held = in_memory(read, case.ahead).max()
    exercise.require(held <= case.cap, "ahead", f"{held} pages are in memory at once; {case.cap} fit.")
    return hits


def _judge_chance(exercise: Exercise, order: np.ndarray, pages: np.ndarray) -> None:
    """Refuse an order in which pages, samples of a page, or turns follow a rule."""
    exercise.require(not np.array_equal(order, np.arange(len(order))), "sequential", "the order is 0, 1, 2, ….")
    read, samples = pages[order], by_page(order, pages)
    names = list(samples)
    if len(names) >= 16:
        places = np.argsort(np.argsort(names))
        trend = abs(float(np.corrcoef(np.arange(len(names)), places)[0, 1]))
        trend = max(trend, float((abs(np.diff(places)) == 1).mean()))  # also from a page in the middle
        what = f"the pages are opened in the order {', '.join(map(str, names[:6]))}, …."
        exercise.require(trend < 0.8, "page-order", what)
    steps = 100 * np.mean([_equal_steps(some) for some in samples.values()])
    what = f"{steps:.0f} % of the steps from one sample of a page to its next one are the same."
    exercise.require(steps < 50, "within", what)
    opened = in_memory(read, 0)
    if 1 < opened.max() < len(names):
        turns, every = max((float((read[n:] == read[:-n]).mean()), n) for n in range(1, len(read) // 4))
        what = f"{100 * turns:.0f} % of the accesses are to the same page as {every} accesses before."
        exercise.require(turns < 0.75, "round-robin", what)
        again, drawn = int((read[1:] == read[:-1]).sum()), float((1 / opened[1:]).sum())
        what = f"{again} accesses are to the same page as the one before; if drawn evenly, about {drawn:.0f} are."
        exercise.require(again > 0.5 * drawn, "round-robin", what)


def _equal_steps(samples: np.ndarray) -> float:
    """Share of the most frequent step, counted in samples of the page and around its end."""
    steps = np.diff(np.argsort(np.argsort(samples))) % len(samples)
    return np.bincount(steps).max() / len(steps)


def _judge_room(exercise: Exercise, orders: list[np.ndarray], case: OrderCase) -> None:
    """Refuse orders that have fewer pages open than a window has."""
    opened, can = [in_memory(case.pages[order], 0) for order in orders], open_in_window(case)
    mixed, most = float(np.mean([each.mean() for each in opened])), max(each.max() for each in opened)
    key = "one-page" if most == 1 else "unused-cap"
    exercise.require(mixed >= 0.9 * can, key, f"{mixed:.1f} pages are open on average; {can:.1f} can be.")


def _judge_seeds(exercise: Exercise, case: OrderCase, order: np.ndarray, other: np.ndarray, same: str) -> None:
    exercise.require(not np.array_equal(order, other), "same-every-epoch", f"{same}.")
    ours, theirs = by_page(order, case.pages), by_page(other, case.pages)
    few = len(ours) < 16 or case.cap >= len(ours)
    exercise.require(few or list(ours) != list(theirs), "same-every-epoch", f"{same} of pages.")
    inside = np.mean([np.array_equal(samples, theirs[page]) for page, samples in ours.items()])
    exercise.require(inside < 0.5, "same-every-epoch", f"{same} of the samples in {100 * inside:.0f} % of the pages.")


# ------------------------------------------------------------------------------------------------ bottleneck


@checked
def find_bottleneck(fn: Callable) -> None:
    """Check ``fn(job) -> (stage, per cent)``: what to make faster first, and how much of its time the step waits."""
    exercise = Exercise("Exercise 4", HINTS["find_bottleneck"])
    said = []
    for name, plan in (PLANS | HIDDEN).items():
        exercise.case = f"job {name}"
        looks: list[float] = []
        got = exercise.call(fn, Job(plan, looks))
        form = isinstance(got, (tuple, list)) and len(got) == 2 and got[0] in STAGES and number(got[1]) is not None
        exercise.require(form, "form", f"the function returned {_shown(got)}.")
        exercise.require(bool(looks), "clock", "the job's clock was not looked at.")
        said.append(_judge_job(exercise, plan, got[0], number(got[1])))
    print(f"Exercise 4 passed: {', '.join(f'{n} {s}' for n, s in zip(PLANS, said, strict=False))}.")


def _judge_job(exercise: Exercise, plan: Plan, stage: str, waits: float) -> str:
    seconds = {name: steady(plan.halved(name))[0] for name in STAGES}
    best, right = min(seconds, key=seconds.get), steady(plan)[1]
    if stage != best:
        rate = {name: MEASURED / s for name, s in seconds.items()}
        what = f"with {stage} halved the run makes {rate[stage]:.0f} batches/s, with another stage {rate[best]:.0f}."
        exercise.refuse(_other_stage(plan, stage, best), what)
    if abs(waits - right) > 2:
        what = f"the step waits for {right:.0f} % of the time; the function returned {waits:.3g}."
        exercise.refuse(_other_share(plan, waits, right), what)
    return f"{stage} ({right:.0f} % waiting)"


def _other_stage(plan: Plan, stage: str, best: str) -> str:
    """The hint for a stage that is not the bottleneck."""
    longest = stage == max(STAGES, key=plan.milliseconds.get)
    if best == "step" and not (plan.background and longest):
        return "loader-only"
    first = min(STAGES, key=lambda name: steady(plan.halved(name), 0)[0])
    return "longest" if longest else "warm-up" if stage == first else "stage"


def _other_share(plan: Plan, waits: float, right: float) -> str:
    """The hint for a share of waiting that is not that of the job."""
    read, decode, augment, copy, step = (plan.milliseconds[name] for name in STAGES)
    threads = (decode + augment) / plan.threads
    loaders = (read + decode + augment + copy, read + threads + copy, max(read, threads, copy))
    if right > 3 and abs(waits - right / 100) < 0.02:
        return "fraction"
    if any(abs(waits - 100 * loader / (loader + step)) < 0.3 for loader in loaders):
        return "added"
    if abs(waits - (100 - right)) < 2:
        return "working"
    first = waits > right + 2 and abs(waits - steady(plan, 0)[1]) < abs(waits - right)
    return "waits-warm-up" if first else "waits"


# ------------------------------------------------------------------------------------------------ shards

_SHARD_CASES = ((300, 32), (299, 16), (65, 32), (128, 16), (1000, 64), (7, 32))  # samples, batch


def _shards(x: torch.Tensor, fn: Callable, cases: Sequence[tuple[int, int, int, int]]) -> list:
    """What ``fn`` gives on one rank for each case, as lists of int, or as text if it has another form.

    As in processes that torchrun starts, generators that nobody has seeded and hash() of a text differ on each rank.
    """
    rank = int(x[0])
    random.seed(1000 + rank)
    np.random.seed(1000 + rank)
    torch.manual_seed(1000 + rank)

    def salted(value: Any) -> int:
        parts = value if isinstance(value, tuple) else (value,)
        return hash((rank, value)) if any(isinstance(part, str | bytes) for part in parts) else hash(value)

    getattr(fn, "__globals__", {}).setdefault("hash", salted)
    results = []
    for case in cases:
        got = fn(*case)
        try:
            results.append([[int(i) for i in batch] for batch in got])
        except (TypeError, ValueError):
            results.append(str(got))
    return results


def _alone(x: torch.Tensor, fn: Callable, last: int, case: tuple[int, int, int, int]) -> bool:
    """Call ``fn`` on the last rank only; whether it waits for what another rank has to put into the store."""
    store = default_store()
    patience = store.timeout
    try:
        store.set_timeout(timedelta(seconds=2))
        if int(x[0]) == last:
            fn(*case)
    except RuntimeError:
        return True
    finally:
        store.set_timeout(patience)
    return False


@checked
def shard(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(count, batch, epoch, seed)``: batches of one rank; all ranks' together hold each sample once."""
    exercise = Exercise("Exercise 5", HINTS["shard"], timeout)
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
        for _, outcome in exercise.each(outcomes):
            what = f"the ledger shows {len(outcome.ledger)} operations."
            exercise.require(len(outcome.ledger) == 0, "messages", what)
        if n == 2:
            case = "only the last rank asks for its batches"
            outcomes = exercise.run(_alone, ranks, fn, n - 1, (300, 32, 2, 5), case=case, fallback="messages")
            for _, outcome in exercise.each(outcomes):
                exercise.require(not outcome.result, "messages", "it waits for another rank.")
    exercise.passed("each sample once, as many batches on every rank, without a message.")


def _judge_shards(exercise: Exercise, ranks: list, count: int, size: int) -> None:
    n = len(ranks)
    for _, batches in exercise.each(ranks):
        form = isinstance(batches, list) and all(0 <= i < count for batch in batches for i in batch)
        exercise.require(form, "form", f"the function returned {_shown(batches)}.")
        largest = max(map(len, batches), default=0)
        exercise.require(largest <= size, "batch-size", f"a batch has {largest} samples.")
    flat = [_samples(batches) for batches in ranks]
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
    for _, (first, again, later, other) in exercise.each(ranks):
        exercise.require(first == again, "not-reproducible", "two calls with epoch 0 differ.")
        samples = _samples(first)
        exercise.require(samples != sorted(samples), "not-shuffled", f"the batches begin with {samples[:5]}.")
        for name, batches in (("epoch 1", later), ("another seed", other)):
            exercise.require(first != batches, "same-every-epoch", f"{name} gives the same batches.")
            same = len(ranks) > 1 and sorted(samples) == sorted(_samples(batches))
            exercise.require(not same, "fixed-shard", f"{name} gives this rank the same samples.")
            before, after = set(pairwise(samples)), set(pairwise(_samples(batches)))
            kept = 100 * len(before & after) / len(before)
            what = f"{kept:.0f} % of the samples have the same successor in epoch 0 and with {name}."
            exercise.require(kept < 50, "together", what)
    epochs = [[_samples(batches) for batches in each] for each in zip(*ranks, strict=True)]
    for name, later in (("epoch 1", epochs[2]), ("another seed", epochs[3])):
        what = f"samples of one rank are together again with {name} more often than by chance."
        exercise.require(_kept_together(epochs[0], later) < 25 + 4 * (len(ranks) - 1) ** 2, "together", what)


def _samples(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def _kept_together(before: list[list[int]], after: list[list[int]]) -> float:
    """Chi-square of how many samples go from each rank to each: near (ranks - 1)² if chance shares them out."""
    rank_of = {i: rank for rank, samples in enumerate(after) for i in samples}
    moved = Counter((rank, rank_of[i]) for rank, samples in enumerate(before) for i in samples)
    even = {(a, b): len(x) * len(y) / len(rank_of) for a, x in enumerate(before) for b, y in enumerate(after)}
    return sum((moved[pair] - share) ** 2 / share for pair, share in even.items())


# ------------------------------------------------------------------------------------------------ rows of text

_TEXTS = {  # lengths of documents, tokens in a row, rows in a step
    "7 documents": ([5, 0, 9, 2, 14, 7, 3], 8, 6),
    "one long document": ([1000], 32, 6),
    "documents of a row each": ([16] * 24, 16, 12),
    "200 documents, 7 tokens left over": ([*range(1, 201)], 93, 12),
}
_STEPS = ((0, 0, 1), (3, 0, 1), (7, 1, 2), (1, 2, 3), (12, 0, 2), (0, 0, 1))  # step, rank, ranks
_PERMUTED = "permutation(rows)[place]"
_OWN = "step * batch + rank * share, step * batch + (rank + 1) * share"
_ROW_SLIPS = {
    "not-shuffled": f"int(np.random.default_rng([seed, epoch]).{_PERMUTED})  ->  place",
    "same-every-epoch": ["[seed, epoch]  ->  [seed, 0]", "[seed, epoch]  ->  seed"],
    "no-seed": "[seed, epoch]  ->  epoch",
    "last-row": "int(ends[-1]) // length  ->  -(-int(ends[-1]) // length)",
    "epoch-end": "divmod(n, rows)  ->  divmod(n, rows // batch * batch or rows)",
    "not-sharded": f"{_OWN}  ->  step * batch, (step + 1) * batch",
    "share": f"{_OWN}  ->  step * batch + rank, (step + 1) * batch, ranks",
    "rank-first": f"{_OWN}  ->  (step + rank) * share, (step + rank + 1) * share",
    "global": "(document, first - start, last - start)  ->  (document, first, last)",
    "in-the-row": "(document, first - start, last - start)  ->  (document, first - begin, last - begin)",
    "end-included": "last - start)  ->  last - start - 1)",
    "whole-documents": "if first < last  ->  if begin <= start and end <= begin + length and first < last",
    "empty-piece": "if first < last  ->  if first < last or begin <= start == end < begin + length",
}


def _rows_of_text(lengths, length, batch, step, rank, ranks, seed):
    ends = np.cumsum(lengths)
    starts = ends - lengths
    rows, share = int(ends[-1]) // length, batch // ranks
    own = range(step * batch + rank * share, step * batch + (rank + 1) * share)
    found = []
    for n in own:
        epoch, place = divmod(n, rows)
        begin = int(np.random.default_rng([seed, epoch]).permutation(rows)[place]) * length
        pieces = []
        for document, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            first, last = max(start, begin), min(end, begin + length)
            if first < last:
                pieces.append((document, first - start, last - start))
        found.append(pieces)
    return found


def _as_rows(got: Any) -> list[list[tuple[int, ...]]] | None:
    """Rows of pieces as whole numbers; None for what has another form."""
    try:
        rows = [[tuple(map(whole_number, piece)) for piece in row] for row in got]
    except TypeError:
        return None
    pieces = [piece for row in rows for piece in row]
    return rows if all(len(piece) == 3 and None not in piece for piece in pieces) else None


@checked
def text_rows(fn: Callable) -> None:
    """Check ``fn(lengths, length, batch, step, rank, ranks, seed)``: rows of a rank at a step, in pieces."""
    exercise = Exercise("Exercise 6", HINTS["text_rows"])
    slips = [(key, edited_function(_rows_of_text, edit)) for key, edits in _ROW_SLIPS.items()
             for edit in (edits if isinstance(edits, list) else [edits])]
    answers: list[tuple[str, Any, tuple]] = []
    for name, (lengths, length, batch) in _TEXTS.items():
        for step, rank, ranks in _STEPS:
            case = ([*lengths], length, batch, step, rank, ranks, 11)
            exercise.case = f"{name}, rows of {length} tokens, {batch} in step {step}, rank {rank} of {ranks}"
            got = exercise.call(fn, *case)
            rows = _as_rows(got)
            exercise.require(rows is not None, "form", f"the function returned {_shown(got)}.")
            exercise.require(case[0] == lengths, "changed", "the list of lengths was changed.")
            answers.append((exercise.case, rows, case))
    alike = {key for key, slip in slips if all(rows == slip(*case) for _, rows, case in answers)}
    for exercise.case, rows, case in answers:
        right = _rows_of_text(*case)
        if rows == right:
            continue
        first = next((i for i, pair in enumerate(zip(rows, right, strict=False)) if pair[0] != pair[1]),
                     min(len(rows), len(right)))
        here, there = (each[first] if first < len(each) else "no row" for each in (rows, right))
        what = f"row {first} of this rank is wrong.\n  expected  {_shown(there)}\n  got       {_shown(here)}"
        again = _as_rows(exercise.call(fn, *case))
        exercise.require(again == rows, "remembers", "a second call with the same arguments returned something else.")
        tokens = {sum(end - begin for _, begin, end in row) for row in rows}
        exercise.refuse(min(alike, default="tokens" if tokens != {case[1]} else "rows"), what)
    exercise.passed("any step on any number of ranks, from the step alone.")


# ------------------------------------------------------------------------------------------------ paper problem

_LATER = "cached if gigabytes <= memory else rates"
_FASTEST = {"min(first.values": "max(first.values", "min(later.values": "max(later.values"}


@paper_problem(
    "Exercise 7",
    cases=[
        (1281167, 169.8, 256, 0.91, 172801, 22930), (1281167, 169.8, 100, 0.8, 172801, 30000),
        (1281167, 169.8, 128, 0.91, 172801, 22930), (1281167, 169.8, 128, 7, 172801, 22930),
        (1281167, 140, 512, 2, 9000, 22930), (10000000, 1400, 512, 12, 60000, 30000), (50000, 1, 16, 0.5, 4000, 90000),
    ],
    slips={
        "gigabits": "disk / gigabytes  ->  disk / 8 / gigabytes",
        "memory-ignored": f"{_LATER}  ->  rates",
        "always-cached": f"{_LATER}  ->  cached",
        "first-epoch": [f"first = rates  ->  first = {_LATER}", "first = rates  ->  first = cached"],
        "added": {
            "/ min(first.values())": "* sum(1 / rate for rate in first.values())",
            "/ min(later.values())": "* sum(1 / rate for rate in later.values())",
        },
        "fastest": [_FASTEST, _FASTEST | {"min(later, ": "max(later, "}],
        "cached-part": f"{_LATER}  ->  cached | {{'disk': images * disk / max(gigabytes - memory, 1e-9)}}",
        "minutes": [
            {"images / min(first": "images / 60 / min(first", "images / min(later": "images / 60 / min(later"},
            {"images / min(first": "min(first", "images / min(later": "min(later"},
        ],
        "bottleneck": [
            "min(later, key=later.get)  ->  max(later, key=later.get)",
            *(f"min(later, key=later.get)  ->  {word!r}" for word in ("disk", "cpu", "gpu")),
            "min(later, key=later.get)  ->  min(later, key=later.get).upper()",
        ],
    },
    units=["s in the first epoch", "s later", ""],
    hints=HINTS["imagenet_epoch"],
)
def imagenet_epoch(images, gigabytes, memory, disk, cpu, gpu):
    """Check ``fn(images, gigabytes, memory, disk, cpu, gpu) -> (first epoch, later epochs, bottleneck)``."""
    cached = {"cpu": cpu, "gpu": gpu}
    rates = cached | {"disk": images * disk / gigabytes}
    first = rates
    later = cached if gigabytes <= memory else rates
    return images / min(first.values()), images / min(later.values()), min(later, key=later.get)
