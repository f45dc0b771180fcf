"""Checks of the exercises on data parallelism.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Models are in float64, so that the ranks can be compared with one
process to 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_utils.check import TIMEOUT, Exercise, checked, load_hints, show
from course_utils.check.compare import listed, slip_of
from course_utils.check.edits import edited_function
from course_utils.check.traffic import calls
from course_utils.check.training import (
    EXACT,
    ROUNDS,
    Passes,
    average,
    batches_of,
    compare,
    exact,
    gradients_of,
    loss_gradient,
    regression_net,
    sample_table,
    trained_parameters,
    weighted_sum,
    weights_of,
)  # fmt: skip

__all__ = [
    "HINTS", "accumulate", "bucketed", "data_parallel", "epoch_indices", "in_buckets", "overlapped", "uneven_epoch",
]

HINTS = load_hints(__file__)

# ------------------------------------------------------------------------------------------------ models and numbers

WIDTH, WORDS = 6, 8
SIZES = (4, 4, 2)  # samples of a rank's batches: the last is smaller
LAYERS = ("embedding", "frozen", "first", "branch", "last", "head")


class Words(nn.Module):
    """Embedding, three linear layers and a head: one layer may be frozen, one left out, and the head tied."""

    def __init__(self, seed: int, frozen: bool = False, tied: bool = False):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + seed)
            self.embedding = nn.Embedding(WORDS, WIDTH)
            for name in LAYERS[1:-1]:
                setattr(self, name, nn.Linear(WIDTH, WIDTH))
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.register_buffer("scale", 1 + torch.rand(WIDTH))
        if frozen:
            self.frozen.requires_grad_(False)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, words: Tensor, branch: bool = True) -> Tensor:
        x = torch.tanh(self.frozen(self.embedding(words) * self.scale))
        x = torch.tanh(self.first(x))
        if branch:
            x = x + torch.tanh(self.branch(x))
        return self.head(torch.tanh(self.last(x)))

    def loss(self, words: Tensor, branch: bool = True) -> Tensor:
        return F.cross_entropy(self(words[:, :-1], branch).flatten(0, 1), words[:, 1:].flatten())


# ------------------------------------------------------------------------------------------------ replicas


@contextmanager
def _counted_waits() -> Iterator[list]:
    """Yield a list that grows by one whenever this rank waits for an operation to end."""
    import torch.distributed as dist

    waits, wait = [], dist.Work.wait

    def counted(work: Any, *args: Any, **kwargs: Any) -> Any:
        waits.append(1)
        return wait(work, *args, **kwargs)

    dist.Work.wait = counted
    try:
        yield waits
    finally:
        dist.Work.wait = wait


def _train(words: Tensor, fn: Callable, options: dict, args: tuple, branches: list[list[bool]]) -> dict:
    """Three steps of one rank with what the learner's ``fn(module, *args)`` returns after each backward.

    ``words`` has shape (batches, samples, length); ``branches[step][rank]`` says who takes the branch.
    """
    import torch.distributed as dist

    from course_utils import record

    rank = dist.get_rank()
    module = Words(rank, **options)
    arrivals: list[int] = []
    current = [[]]  # the ledger of the backward that goes on
    for p in trained_parameters(module).values():
        p.register_post_accumulate_grad_hook(lambda _: arrivals.append(len(current[0])))
    parameters = list(module.parameters())
    finish = fn(module, *args)
    out = {
        "callable": callable(finish), "start": weights_of(module), "scale": module.scale.clone(),
        "kept": all(p is q for p, q in zip(parameters, module.parameters(), strict=False)), "steps": [],
    }
    if not callable(finish):
        return out
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step, samples in enumerate(SIZES):
        arrivals.clear()
        optimizer.zero_grad()
        loss = module.loss(words[step, :samples], branches[step][rank])
        with record() as ledger:
            with record() as current[0], _counted_waits() as waits:
                loss.backward()
            finish()
        out["steps"].append({
            "gradients": gradients_of(module), "ledger": ledger, "during": current[0], "waits": len(waits),
            "before_last": arrivals[-1] if arrivals else 0,
        })
        optimizer.step()
    return out


@cache
def _one_process(n: int, everyone: bool, **options: bool) -> list[list[dict]]:
    """By step, the gradients of all ranks' batches in one process that trains rank 0's model."""
    module, steps = Words(0, **options), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step, samples in enumerate(SIZES):
        parts = []
        for words, branch in zip(_words(n), _branches(n, everyone)[step], strict=True):
            optimizer.zero_grad()
            module.loss(words[step, :samples], branch).backward()
            parts.append(gradients_of(module))
        for name, gradient in average(parts).items():
            module.get_parameter(name).grad = gradient
        optimizer.step()
        steps.append(parts)
    return steps


def _words(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(40 + n)
    return [torch.randint(WORDS, (len(SIZES), max(SIZES), 5), generator=generator) for _ in range(n)]


CAPS = (340, 700, 100_000)  # bytes of a bucket: some parameters are larger, some fit together, all fit
_CASES = (  # ranks, name, options of the model, whether all ranks take the branch, bucket sizes, hint if it fails first
    (2, "a plain model", {}, True, CAPS, None),
    (2, "a frozen layer", {"frozen": True}, True, CAPS[:1], "frozen"),
    (2, "tied weights", {"tied": True}, True, CAPS[:1], "tied"),
    (2, "a branch that not every rank takes", {}, False, CAPS[2:], "unused"),
    (2, "a branch that not every rank takes", {}, False, CAPS[:1], "order"),
    (3, "all of that together", {"frozen": True, "tied": True}, False, CAPS[:1], None),
    (1, "all of that together", {"frozen": True, "tied": True}, True, CAPS[:1], None),
)


def _branches(n: int, everyone: bool) -> list[list[bool]]:
    """Who takes the branch in each step: all, or in the first and last step all but one rank."""
    return [[everyone or step == 1 or rank != (step // 2 + 1) % n for rank in range(n)] for step in range(len(SIZES))]


def _replicas(exercise: Exercise, fn: Callable, audit: Callable, with_caps: bool = True) -> None:
    """Run ``fn`` on all cases; ``audit(exercise, result, trained, cap, everyone)`` looks at the ledger of a step."""
    for n, name, options, everyone, caps, fallback in _CASES:
        if fallback == "order" and "order" not in exercise.hints:
            continue
        for cap in caps if with_caps else caps[:1]:
            args, case = ((cap,), f"{name}, buckets of {cap:,} bytes") if with_caps else ((), name)
            explained = {"fallback": fallback, "errors": "NoneType|gradient"}
            outcomes = exercise.run(
                _train, _words(n), fn, options, args, _branches(n, everyone), case=case, **explained
            )
            for rank, outcome in exercise.each(outcomes):
                exercise.communicates(rank, outcome, n)
                _starts_alike(exercise, outcome.result, options)
            results = list(zip(*(outcome.result["steps"] for outcome in outcomes), strict=True))
            for step, parts in enumerate(_one_process(n, everyone, **options)):
                for rank, result in exercise.each(results[step], f"step {step + 1}: "):
                    _step(exercise, rank, result, parts, step)
            trained = list(trained_parameters(Words(0, **options)).values())
            for step in range(len(SIZES) if n > 1 else 0):
                for _, result in exercise.each(results[step], f"step {step + 1}: "):
                    audit(exercise, result, trained, cap, everyone)


def _starts_alike(exercise: Exercise, got: dict, options: dict) -> None:
    """Refuse a rank that does not start with the weights and buffers of rank 0."""
    root = Words(0, **options)
    exercise.require(got["callable"], "finish", "the function returned nothing that can be called.")
    wrong = [name for name, value in weights_of(root).items() if not exact(got["start"][name], value)]
    if wrong:
        key = "frozen-broadcast" if all(name.startswith("frozen") for name in wrong) else "no-broadcast"
        lines = f"\n  rank 0     {show(root.get_parameter(wrong[0]))}\n  this rank  {show(got['start'][wrong[0]])}"
        exercise.refuse(key, f"{wrong[0]} starts with other numbers than on rank 0.{lines}")
    exercise.require(exact(got["scale"], root.scale), "buffers", "the buffer `scale` differs from rank 0's.")
    exercise.require(got["kept"], "replaced", "some parameters are not those that the module had.")


def _step(exercise: Exercise, rank: int, result: dict, parts: list[dict], step: int) -> None:
    """Compare a rank's gradients after a step with the mean over the parts."""
    n, mean, got, traps = len(parts), average(parts), result["gradients"], {}
    if n > 1 and step == 0 and exercise.fallback is None:
        traps = {
            "own-gradient": parts[rank], "sum": average(parts, 1), "divided-twice": average(parts, n * n),
            "too-early": {name: torch.zeros_like(g) for name, g in mean.items()},
            "write-back": {name: _elsewhere(got[name], mean) for name in mean},
        }
    traps = {key: wrong for key, wrong in traps.items() if key in exercise.hints}
    compare(exercise, rank, got, mean, traps, "the gradient", "leftover" if step and not exercise.fallback else "value")


def _elsewhere(got: Tensor, mean: dict[str, Tensor]) -> Tensor | None:
    """``got`` if its first number stands somewhere else in the mean gradient, so that it was put in a wrong place."""
    numbers = torch.cat([g.flatten() for g in mean.values()])
    nonzero = got.flatten()[got.flatten() != 0]
    found = all(bool(torch.isclose(numbers, v, rtol=EXACT, atol=EXACT).any()) for v in nonzero[:3])
    return got if found and len(nonzero) else None


def _audit_bytes(exercise: Exercise, result: dict, trained: list, cap: int, everyone: bool) -> None:
    """Refuse other operations than all-reduces, and more or fewer bytes than the trained parameters have."""
    enough = sum(p.nbytes for p in trained)
    keys = {"not-distributed": "too-few-bytes"}
    if exercise.fallback in ("tied", "frozen"):
        keys["too-many-bytes"] = exercise.fallback
    exercise.audit(result["ledger"], {"all_reduce"}, carried=(enough, enough), keys=keys)


def _filled(parameters: Sequence[nn.Parameter], cap: int) -> list[list[nn.Parameter]]:
    """Buckets of at most ``cap`` bytes, filled in order, one open for each dtype."""
    closed, filling = [], {}
    for p in parameters:
        bucket = filling.setdefault(p.dtype, [])
        if bucket and sum(q.nbytes for q in bucket) + p.nbytes > cap:
            closed.append(bucket)
            bucket = filling[p.dtype] = []
        bucket.append(p)
    return closed + list(filling.values())


def _audit_buckets(exercise: Exercise, result: dict, trained: list, cap: int, everyone: bool) -> None:
    """Refuse too many messages and too large ones."""
    _audit_bytes(exercise, result, trained, cap, everyone)
    enough = max(len(_filled(order, cap)) for order in (trained, trained[::-1]))
    alone = len(calls(result["ledger"])) == len(trained)
    keys = {"too-many-calls": "one-per-parameter" if alone else "too-many-messages"}
    exercise.audit(result["ledger"], calls=enough, largest=max(cap, *(p.nbytes for p in trained)), keys=keys)


def _audit_overlap(exercise: Exercise, result: dict, trained: list, cap: int, everyone: bool) -> None:
    """Refuse all-reduces that start after backward, at its very end, or that backward waits for."""
    _audit_buckets(exercise, result, trained, cap, everyone)
    if not everyone:
        return
    started, waits, early = result["during"].count("all_reduce"), result["waits"], result["before_last"]
    late = len(result["ledger"]) - len(result["during"])
    what = f"{started} all-reduces start before backward returns, {late} after it."
    exercise.require(late == 0, "after-backward", what)
    exercise.require(waits == 0, "waits-in-hook", f"backward waits for {waits} operations.")
    what = f"when the last gradient arrives, {early} of {started} all-reduces have started."
    exercise.require(early >= started - 1, "starts-late", what)


@checked
def data_parallel(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(module) -> finish``: weights and buffers of rank 0, mean gradients after each backward."""
    exercise = Exercise("Exercise 1", HINTS["data_parallel"], timeout)
    _replicas(exercise, fn, _audit_bytes, with_caps=False)
    exercise.passed("equal to one process to 1e-12, and no byte more than the gradient.")


@checked
def bucketed(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(module, bucket_bytes) -> finish``: one all-reduce a bucket."""
    exercise = Exercise("Exercise 3", HINTS["bucketed"], timeout)
    _replicas(exercise, fn, _audit_buckets)
    exercise.passed("equal to one process to 1e-12, with one all-reduce a bucket.")


@checked
def overlapped(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(module, bucket_bytes) -> finish``: all-reduces that start while backward goes on."""
    exercise = Exercise("Exercise 4", HINTS["overlapped"], timeout)
    _replicas(exercise, fn, _audit_overlap)
    exercise.passed("each bucket starts during backward, and backward never waits.")


# ------------------------------------------------------------------------------------------------ buckets


@checked
def in_buckets(fn: Callable) -> None:
    """Check ``fn(parameters, bucket_bytes) -> list of lists``: full buckets of one dtype, in order."""
    exercise = Exercise("Exercise 2", HINTS["in_buckets"])
    double, single = torch.float64, torch.float32
    cases = {
        "float64": ([3, 2, 1, 4, 1, 5, 2], [double], 48),
        "float32": ([3, 2, 1, 4, 1, 5, 2], [single], 24),
        "one parameter larger than a bucket": ([2, 9, 2, 3], [double], 48),
        "a large parameter first": ([9, 2, 3], [double], 48),
        "all in one bucket": ([3, 1], [double], 32),
        "two dtypes": ([3, 2, 1, 4, 1, 5, 2], [double, single], 48),
        "pieces of one flat tensor": ([3, 2, 1, 4, 1, 5, 2], [double], 48),
    }
    for name, (lengths, dtypes, cap) in cases.items():
        pieces = [torch.zeros(length, dtype=dtypes[i % len(dtypes)]) for i, length in enumerate(lengths)]
        if name.startswith("pieces"):
            pieces = list(torch.cat(pieces).split(lengths))
        parameters = [nn.Parameter(piece) for piece in pieces]
        exercise.case = f"{name}, {cap} bytes, parameters of {', '.join(str(p.nbytes) for p in parameters)} bytes"
        given = list(parameters)
        _in_buckets(exercise, exercise.call(fn, given, cap), parameters, cap)
        same = len(given) == len(parameters) and all(a is b for a, b in zip(given, parameters, strict=True))
        exercise.require(same, "input-changed", f"it held {len(parameters)} parameters, now {len(given)}.")
    print(f"Exercise 2 passed on {len(cases)} lists of parameters.")


def _in_buckets(exercise: Exercise, got: Any, parameters: list, cap: int) -> None:
    lists = isinstance(got, (list, tuple)) and all(isinstance(bucket, (list, tuple)) for bucket in got)
    lists = lists and all(isinstance(p, nn.Parameter) for bucket in got for p in bucket)
    exercise.require(lists, "lists", f"the function returned {show(got)}.")
    sizes = [[p.nbytes for p in bucket] for bucket in got]
    what = f"the buckets have {' | '.join(', '.join(map(str, bucket)) for bucket in sizes)} bytes."
    place = {id(p): i for i, p in enumerate(parameters)}
    order = [place.get(id(p), -1) for bucket in got for p in bucket]
    exercise.require(all(sizes), "large-alone", what)
    exercise.require(sorted(order) == sorted(place.values()), "lost", what)
    exercise.require(all(len({p.dtype for p in bucket}) == 1 for bucket in got), "dtype", what)
    for dtype in {p.dtype for p in parameters}:
        mine = [i for i in order if parameters[i].dtype == dtype]
        exercise.require(mine == sorted(mine), "order", what)
    groups, one_dtype = [len(bucket) for bucket in sizes], len({p.dtype for p in parameters}) == 1

    def grouped(size: Callable[[nn.Parameter], int]) -> bool:
        return groups == _grouped([size(p) for p in parameters], cap)

    if one_dtype and max(map(max, sizes)) <= cap and not grouped(lambda p: p.nbytes):
        exercise.require(not grouped(lambda p: p.untyped_storage().nbytes()), "storage", what)
        exercise.require(not any(grouped(lambda p, k=k: k * p.numel()) for k in (1, 4, 8)), "elements", what)
    large = [bucket for bucket in sizes if sum(bucket) > cap and len(bucket) > 1]
    alone = all(max(bucket) <= cap for bucket in large)
    exercise.require(not large, "too-large" if alone else "large-alone", what)
    kinds = [p.dtype for p in parameters]
    changes = [0] + [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]] + [len(kinds)]
    runs = [parameters[a:b] for a, b in zip(changes[:-1], changes[1:], strict=True)]
    enough = sum(len(_filled(run, cap)) for run in runs)
    exercise.require(len(got) <= enough, "too-small", what)


def _grouped(sizes: Sequence[int], cap: int) -> list[int]:
    """Lengths of the buckets that are filled in order."""
    lengths, total = [0], 0
    for size in sizes:
        if lengths[-1] and total + size > cap:
            lengths, total = [*lengths, 0], 0
        lengths[-1], total = lengths[-1] + 1, total + size
    return lengths


# ------------------------------------------------------------------------------------------------ accumulation


def _accumulate(table: Tensor, fn: Callable, sizes: list[int]) -> list[dict]:
    """Two rounds of one rank; each has its own half of the table."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from course_utils import record

    entered = []

    class Counted(DistributedDataParallel):
        def no_sync(self):
            entered.append(1)
            return super().no_sync()

    net = regression_net()
    passes, model, out = Passes(net), Counted(net), []
    dist.barrier()
    for half in table.chunk(ROUNDS):
        net.zero_grad()
        with record() as ledger:
            fn(model, batches_of(half, sizes))
        out.append({
            "gradients": gradients_of(net), "ledger": ledger, "entered": len(entered), "largest": passes.largest,
            "alive": passes.alive,
        })
    return out


@checked
def accumulate(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(model, batches)``: the gradient of all samples, which travels once."""
    exercise = Exercise("Exercise 5", HINTS["accumulate"], timeout)
    for n, sizes, fallback in (
        (2, [4, 4, 4], None), (2, [4, 4, 2], "mean-of-means"), (2, [4], "one-micro-batch"), (3, [3, 3, 3, 1], None),
        (1, [4, 4, 2], None),
    ):
        data = [sample_table(ROUNDS * sum(sizes), 900 + 10 * n + rank) for rank in range(n)]
        case = f"{len(sizes)} micro-batch{'es' * (len(sizes) > 1)} of {', '.join(map(str, sizes))} samples"
        outcomes = exercise.run(_accumulate, data, fn, sizes, case=case, fallback=fallback)
        net = regression_net()
        for number in range(ROUNDS):
            batches = [batches_of(table.chunk(ROUNDS)[number], sizes) for table in data]
            parts = [[loss_gradient(net, x, y) for x, y in own] for own in batches]
            for rank, outcome in exercise.each(outcomes, f"accumulation {number + 1} of {ROUNDS}: "):
                _accumulated(exercise, rank, outcome.result[number], parts, sizes)
    exercise.passed("the gradient travels once, whatever the number of micro-batches.")


def _accumulated(exercise: Exercise, rank: int, result: dict, parts: list[list[dict]], sizes: list[int]) -> None:
    """Refuse a gradient that is not that of all samples, from ``parts`` by rank and micro-batch, or travels twice."""
    n, m = len(parts), len(sizes)
    share = [size / sum(sizes) for size in sizes]
    by_rank = [weighted_sum(own, share) for own in parts]
    right = average(by_rank)
    traps = {}
    if m > 1:
        plain, last = average([weighted_sum(own, [1] * m) for own in parts]), average([own[-1] for own in parts])
        traps = {
            "not-scaled": plain, "mean-of-means": weighted_sum([plain], [1 / m]),
            "only-last": [weighted_sum([last], [w]) for w in (1, 1 / m, share[-1])],
        }
    if n > 1:
        traps |= {"never": by_rank[rank], "divided-twice": weighted_sum([right], [1 / n])}
        if m > 1:
            traps["never"] = [by_rank[rank], *(weighted_sum(parts[rank], [w] * m) for w in (1, 1 / m))]
    compare(exercise, rank, result["gradients"], right, traps, "the gradient")
    largest, alive, ledger = result["largest"], result["alive"], [e for e in result["ledger"] if e.op != "broadcast"]
    what = f"the model saw {largest} samples at once; a micro-batch has {max(sizes)} at most."
    exercise.require(largest <= max(sizes), "one-batch", what)
    what = f"{alive} micro-batches have gone forward and not yet backward."
    exercise.require(alive <= 1, "all-graphs", what)
    enough = sum(g.nbytes for g in right.values())
    every = m > 1 and sum(e.bytes for e in ledger) >= m * enough
    key = "forward-outside" if every and result["entered"] else "every-micro-batch" if every else "too-many-bytes"
    exercise.audit(ledger, carried=enough, keys={"too-many-bytes": key})


# ------------------------------------------------------------------------------------------------ sampler


def _order(samples: int, seed: int) -> list[int]:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()


def _indices(samples: int, ranks: int, rank: int, epoch: int, seed: int, done: int) -> list[int]:
    """What DistributedSampler gives a rank, without the first ``done`` samples of the epoch's order."""
    order = _order(samples, seed + epoch)
    left = order[done:]
    left = left + (order * ranks)[: -len(left) % ranks]
    return left[rank::ranks]


_SHUFFLED_AGAIN = "[done + i for i in _order(samples - done, seed + epoch)]"
_INDEX_SLIPS = {  # hint key to an edit of `_indices`, or several
    "no-shuffle": "_order(samples, seed + epoch)  ->  list(range(samples))",
    "no-epoch": "seed + epoch  ->  seed",
    "no-seed": "seed + epoch  ->  epoch",
    "rank-seed": ["seed + epoch  ->  seed + epoch + rank", "seed + epoch  ->  seed + rank"],
    "overlap": [
        "left[rank::ranks]  ->  order[done:]", "left[rank::ranks]  ->  left",
        "left[rank::ranks]  ->  left[: len(left) // ranks]",
    ],
    "blocks": "left[rank::ranks]  ->  left[rank * len(left) // ranks : (rank + 1) * len(left) // ranks]",
    "no-padding": "(order * ranks)[: -len(left) % ranks]  ->  []",
    "cut": "left + (order * ranks)[: -len(left) % ranks]  ->  left[: len(left) // ranks * ranks]",
    "not-resumed": "order[done:]  ->  order",
    "per-rank": [
        {"order[done:]": "order", "[rank::ranks]": f"[rank::ranks]{rest}"} for rest in ("[done:]", "[done // ranks :]")
    ],
    "shuffled-again": [
        {"order[done:]": again, "(order * ranks)": "(left * ranks)"}
        for again in (_SHUFFLED_AGAIN, _SHUFFLED_AGAIN.replace("done + i", "order[done + i]"))
    ],
    "resumed-uneven": {"order[done:]": "order", "left[rank::ranks]": "left[done:][rank::ranks]"},
    "resumed-padding": "(order * ranks)  ->  (left * ranks)",
}  # fmt: skip


@checked
def epoch_indices(fn: Callable) -> None:
    """Check ``fn(samples, ranks, rank, epoch, seed, done) -> list of int`` against DistributedSampler."""
    from torch.utils.data import DistributedSampler

    exercise = Exercise("Exercise 6", HINTS["epoch_indices"])
    cases = (
        (12, 4, 3, 7, 0, None), (12, 4, 4, 7, 0, None), (10, 4, 3, 7, 0, None), (11, 3, 1, 2, 0, None),
        (3, 8, 2, 5, 0, "short"), (1, 3, 2, 5, 0, "short"), (1, 8, 2, 5, 0, "short"), (12, 4, 3, 7, 4, None),
        (12, 2, 3, 7, 8, None), (10, 4, 3, 7, 4, None), (10, 3, 3, 7, 8, None), (10, 4, 3, 7, 10, None),
    )
    for samples, ranks, epoch, seed, done, fallback in cases:
        exercise.case = f"{samples} samples, {ranks} ranks, epoch {epoch}, seed {seed}, done {done}"
        exercise.fallback = fallback
        parts = [_sampled(exercise, fn, samples, ranks, rank, epoch, seed, done) for rank in range(ranks)]
        right = [_indices(samples, ranks, rank, epoch, seed, done) for rank in range(ranks)]
        if done == 0:
            samplers = [DistributedSampler(range(samples), ranks, rank, seed=seed) for rank in range(ranks)]
            for sampler in samplers:
                sampler.set_epoch(epoch)
            right = [list(sampler) for sampler in samplers]
        if parts != right:
            _refuse_indices(exercise, parts, right, (samples, ranks, epoch, seed, done))
    print(f"Exercise 6 passed on {len(cases)} epochs, equal to DistributedSampler.")


def _sampled(exercise: Exercise, fn: Callable, *args: int) -> list[int]:
    """What ``fn`` returns; refuses other things than lists, and any use of the global generator."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        got = exercise.call(fn, *args)
        same = torch.equal(before, torch.get_rng_state())
    exercise.require(same, "global-generator", "the global generator was used.")
    whole = isinstance(got, (list, tuple)) and all(isinstance(i, Integral) for i in got)
    exercise.require(whole, "list", f"the function returned {show(got)}.")
    return [int(i) for i in got]


def _refuse_indices(exercise: Exercise, parts: list, right: list, case: tuple) -> None:
    samples, ranks, epoch, seed, done = case

    def same(edit: str | dict[str, str]) -> bool:
        wrong = edited_function(_indices, edit)
        return parts == [wrong(samples, ranks, rank, epoch, seed, done) for rank in range(ranks)]

    real = [len(range(rank, samples - done, ranks)) for rank in range(ranks)]  # samples without the padding
    alike = all(p[:k] == r[:k] for p, r, k in zip(parts, right, real, strict=True)) and not exercise.fallback
    key = slip_of(_INDEX_SLIPS, same, "padding" if alike else "value")
    rank = next(rank for rank in range(ranks) if parts[rank] != right[rank])
    exercise.differs(key, "the indices are wrong.", right[rank], parts[rank], rank)


# ------------------------------------------------------------------------------------------------ uneven inputs


def _uneven(table: Tensor, fn: Callable, sizes: Sequence[Sequence[int]]) -> dict:
    import torch.distributed as dist

    module = regression_net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    fn(module, optimizer, batches_of(table, sizes[dist.get_rank()]))
    return weights_of(module)


def _tables(sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The samples of each rank."""
    return [sample_table(max(1, sum(own)), 700 + 10 * len(sizes) + rank) for rank, own in enumerate(sizes)]


@cache
def _uneven_in_one(sizes: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """Final weights of one process that takes in each step the batches of all ranks."""
    net = regression_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batches = [batches_of(table, own) for table, own in zip(_tables(sizes), sizes, strict=True)]
    for step in range(max(map(len, batches))):
        present = [own[step] for own in batches if step < len(own)]
        parts, counts = [loss_gradient(net, x, y) for x, y in present], [len(x) for x, _ in present]
        mean = weighted_sum(parts, [count / sum(counts) for count in counts])
        for name, g in mean.items():
            net.get_parameter(name).grad = g.clone()
        optimizer.step()
    return weights_of(net)


def _not_cleared(stale: str) -> dict[str, str]:
    """The edit by which so many ranks add their gradient of the step before."""
    added = f"mean = weighted_sum([mean, before], [1, ({stale}) / sum(counts)]) if before else mean\nbefore = mean\n"
    return {"net = ": "before = None\nnet = ", "for name, g": f"{added}for name, g"}


_UNEVEN_SLIPS = {  # hint key to edits of `_uneven_in_one`
    "stops-early": "max(map  ->  min(map",
    "mean-of-means": "count / sum(counts)  ->  1 / len(counts)",
    "divided-by-all": "count / sum(counts)  ->  1 / len(sizes)",
    "sum": ["count / sum(counts)  ->  1", "count / sum(counts)  ->  count"],
    "leftover": [_not_cleared("len(sizes) - len(present)"), _not_cleared("len(sizes)")],
}
_UNEVEN = (
    ((4, 4, 4), (4, 4, 4)), ((4, 4, 4), (4,)), ((4, 4, 2), (4, 2, 1)), ((3,), (4, 2, 4)), ((4, 1), (), (3, 4, 4)),
    ((4, 2),),
)


@checked
def uneven_epoch(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(module, optimizer, batches)``: every step with the mean over the samples that there are."""
    exercise = Exercise("Exercise 7", HINTS["uneven_epoch"], timeout)
    for sizes in _UNEVEN:
        n = len(sizes)
        case = "batches of " + " | ".join(", ".join(map(str, own)) or "none" for own in sizes) + " samples"
        outcomes, right = exercise.run(_uneven, _tables(sizes), fn, sizes, case=case), _uneven_in_one(sizes)
        agree = [all(exact(outcome.result[name], w) for name, w in right.items()) for outcome in outcomes]
        slips = _UNEVEN_SLIPS if n > 1 and not all(agree) else {}
        traps = {
            key: [edited_function(_uneven_in_one, edit)(sizes) for edit in listed(some)] for key, some in slips.items()
        }
        for rank, outcome in exercise.each(outcomes):
            exercise.communicates(rank, outcome, n)
            lost = any(bool(w.isnan().any()) for w in outcome.result.values())
            exercise.require(not lost, "no-samples", "the weights are nan.")
            odd = agree[rank] or not any(agree)
            exercise.require(odd, "ranks-differ", "these weights are wrong, those of another rank are right.")
            compare(exercise, rank, outcome.result, right, traps, "after the epoch the weight")
        gradient, steps = sum(p.nbytes for p in regression_net().parameters()), max(map(len, sizes))
        for _, outcome in exercise.each(outcomes):
            others = [entry for entry in outcome.ledger if entry.op != "all_reduce"]
            told = {"where": "outside of all-reduces ", "keys": {"too-many-bytes": "gathers-everything"}}
            exercise.audit(others, carried=gradient - 1, **told)
            exercise.audit(outcome.ledger, carried=steps * (gradient + 16) + 16, where=f"in {steps} steps ")
    exercise.passed("every sample weighs the same, with one gradient a step.")
