"""Checks of the exercises on tensor parallelism.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Numbers are in float64, so that outputs and gradients of the ranks
can be compared with one process to 1e-12. What differs between exercises is only which tensors a rank gets: its
``leaves``, which are the answer's arguments in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course_utils.check import TIMEOUT, Exercise, checked, close, load_hints, paper_problem
from course_utils.check.compare import listed
from course_utils.check.edits import edited_function
from course_utils.check.training import difference, exact

__all__ = [
    "HINTS", "column_row_mlp", "head_attention", "sequence_parallel_norm", "tp_traffic", "vocab_parallel_loss",
]

HINTS = load_hints(__file__)

# ------------------------------------------------------------------------------------------------ numbers and runs

Leaves = list[dict[str, Tensor]]  # by rank, what the answer is called with; a gradient is asked of each float tensor
Slips = Callable[[int, str], dict[str, Any]]  # of a rank's output "y" or gradient: hint key to what the slip gives


def _numbers(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(104729 + seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def _split(whole: dict[str, Tensor], n: int, cuts: dict[str, int]) -> Leaves:
    """What each of n ranks holds: a part along the dimension that ``cuts`` names, or the whole tensor."""
    return [{k: t.tensor_split(n, cuts[k])[r] if k in cuts else t for k, t in whole.items()} for r in range(n)]


def _called(fn: Callable, leaves: dict[str, Tensor], more: tuple, residual: bool) -> Any:
    """``fn`` of the leaves, a whole number as int, and of ``more``; with ``residual`` as a branch beside x."""
    whole = {k: int(t) for k, t in leaves.items() if t.dim() == 0 and not t.is_floating_point()}
    x = {"x": leaves["x"] * 1.0} if residual else {}
    y = fn(*(leaves | whole | x).values(), *more)
    return x["x"] + y if residual and isinstance(y, Tensor) else y


def _both_ways(
    tag: Tensor, fn: Callable, leaves: Leaves, upstream: list[Tensor], more: tuple, residual: bool
) -> dict[str, Any]:
    """Forward and backward of one rank: the output, the gradient of each leaf, and what it took each way."""
    import torch.distributed as dist
    from torch.utils.flop_counter import FlopCounterMode

    from course_utils import record

    rank = dist.get_rank()
    start, above = leaves[rank], upstream[rank]
    leaves[:], upstream[:] = [], []  # what other ranks hold has to be sent
    own = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in start.items()}
    gradients, kept = {}, {}  # of what autograd keeps for backward: the bytes of each storage

    def keep(t: Tensor) -> Tensor:
        if type(t) is Tensor:  # a subclass may have no memory of its own
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with record() as forward, FlopCounterMode(display=False) as counter, hooks:
        y = _called(fn, own, more, residual)
    fits = isinstance(y, Tensor) and y.shape == above.shape
    with record() as backward:
        if fits and y.requires_grad:
            (y * above).sum().backward()
            gradients = {k: t.grad for k, t in own.items()}
    return {
        "y": y.detach() if isinstance(y, Tensor) else y, "gradients": {k: gradients.get(k) for k in own},
        "forward": forward, "backward": backward, "flops": counter.get_total_flops(), "kept": list(kept.values()),
        "changed": [k for k, t in own.items() if not torch.equal(t.detach(), start[k])],
    }


def _run(
    exercise: Exercise, fn: Callable, leaves: Leaves, upstream: list[Tensor], name: str, fallback: str | None = None,
    more: tuple = (), residual: bool = False,
) -> list[dict[str, Any]]:
    tags = [torch.zeros(1) for _ in leaves]
    outcomes = exercise.run(_both_ways, tags, fn, leaves, upstream, more, residual, case=name, fallback=fallback)
    for rank, outcome in enumerate(outcomes):
        exercise.communicates(rank, outcome, len(leaves))
    return [outcome.result for outcome in outcomes]


def _whole(
    fn: Callable, leaves: dict[str, Tensor], upstream: Tensor, more: tuple = (), residual: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the gradients of one process: ``fn`` of whole tensors."""
    own = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in leaves.items()}
    y = _called(fn, own, more, residual)
    floats = {k: t for k, t in own.items() if t.is_floating_point()}
    found = torch.autograd.grad(y, list(floats.values()), upstream, allow_unused=True, materialize_grads=True)
    return y.detach(), dict(zip(floats, found, strict=True))


def _no_slips(rank: int, name: str) -> dict[str, Any]:
    return {}


def _compare(
    exercise: Exercise, results: list[dict], outputs: list[Tensor], gradients: Leaves, slips: Slips = _no_slips,
    defaults: dict[str, str] | None = None,
) -> None:
    """Refuse wrong outputs, changed arguments, then wrong gradients; ``defaults`` are hints of gradients by name."""
    for rank, result in exercise.each(results):
        _equal(exercise, result["y"], outputs[rank], "the output", partial(slips, rank, "y"))
        what = f"the answer changed {' and '.join(result['changed'])}."
        exercise.require(not result["changed"], "input-changed", what)
    for rank, result in exercise.each(results):
        for name, right in gradients[rank].items():
            got, key = result["gradients"][name], (defaults or {}).get(name)
            if got is None:
                exercise.refuse(exercise.fallback or key or "no-gradient", f"{name} has no gradient.")
            _equal(exercise, got, right, f"the gradient of {name}", partial(slips, rank, name), key or "value")


def _equal(
    exercise: Exercise, got: Any, right: Tensor, what: str, slips: Callable[[], dict[str, Any]], default: str = "value"
) -> None:
    """Compare to 1e-12; a wrong tensor gets the hint of the slip that leads to it, else ``default``."""
    if exact(got, right):
        return
    if "overflow" in exercise.hints and isinstance(got, Tensor) and not got.isfinite().all():
        exercise.refuse("overflow", f"{what} is not finite.{difference(got, right)}")
    same = (key for key, some in slips().items() for wrong in listed(some) if exact(got, wrong))
    form = default if isinstance(got, Tensor) and got.shape == right.shape else "shape"
    key = next(same, "float32" if close(got, right) else form)
    exercise.refuse(key, f"{what} is wrong.{difference(got, right)}")


def _reduced(n: int, size: float) -> float:
    """Bytes that each of n ranks sends in an all-reduce."""
    return 2 * (n - 1) / n * size


def _audit(exercise: Exercise, results: list[dict], backward: int = 1, least: float = 1.0) -> None:
    """One all-reduce of the output in forward, as many in backward as ``backward`` says, and nothing else.

    ``least`` is the share of the output's bytes that has to travel.
    """
    for _, result in exercise.each(results):
        for way, calls in {"forward": 1, "backward": backward}.items():
            size = calls * _reduced(len(results), result["y"].nbytes)
            limits = {"calls": (calls, calls), "sent": (least * size, size)}
            exercise.audit(result[way], {"all_reduce"}, where=f"in {way}, ", **limits)


# ------------------------------------------------------------------------------------------------ MLP

_MLP_CASES = (  # ranks, name, sizes of batch, sequence, hidden, inner; a residual branch; hint if it fails first
    (2, "an MLP", (2, 3, 4, 10), False, None),
    (2, "x + MLP(x)", (2, 3, 4, 10), True, "residual"),
    (3, "an inner layer of 7, in parts of 3, 2 and 2", (2, 3, 5, 7), False, None),
    (1, "x + MLP(x)", (2, 3, 4, 6), True, None),
)


def _mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


@checked
def column_row_mlp(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, up, up_bias, down, down_bias) -> y``: a two-layer MLP from this rank's shards."""
    exercise = Exercise("Exercise 1", HINTS["column_row_mlp"], timeout)
    for n, name, (b, s, h, m), residual, fallback in _MLP_CASES:
        whole = {
            "x": _numbers(b, s, h, seed=n), "up": _numbers(m, h, seed=10), "up_bias": _numbers(m, seed=11),
            "down": _numbers(h, m, seed=12), "down_bias": _numbers(h, seed=13),
        }
        cuts = {"up": 0, "up_bias": 0, "down": 1}
        leaves, upstream = _split(whole, n, cuts), _numbers(b, s, h, seed=14)
        results = _run(exercise, fn, leaves, [upstream] * n, name, fallback, residual=residual)
        y, right = _whole(_mlp, whole, upstream, residual=residual)
        gradients = _split({k: right[k] for k in ("down", "up", "up_bias", "x", "down_bias")}, n, cuts)
        plain = n > 1 and not fallback
        slips = partial(_mlp_slips, leaves, upstream, y, gradients) if plain else _no_slips
        _compare(exercise, results, [y] * n, gradients, slips, {"down_bias": "bias-gradient"})
        _audit(exercise, results)
    exercise.passed("output and gradients equal to one process to 1e-12, one all-reduce each way.")


def _mlp_slips(
    leaves: Leaves, upstream: Tensor, y: Tensor, gradients: Leaves, rank: int, name: str
) -> dict[str, Any]:
    n, bias = len(leaves), leaves[rank]["down_bias"]
    part, partial_gradients = _whole(_mlp, leaves[rank] | {"down_bias": 0 * bias}, upstream)
    if name == "y":
        averages = [(y - bias) / n + k * bias for k in (1, 0, 1 / n)]
        return {"no-g": [part, part + bias], "bias": y + (n - 1) * bias, "average": averages}
    if name == "down_bias":
        return {}
    right, shards = gradients[rank][name], [own[name] for own in gradients]
    slips = {"g-backward": n * right, "average": right / n}
    if name == "x":
        return slips | {"no-f": partial_gradients["x"]}
    alike = len({shard.shape for shard in shards}) == 1
    return slips | ({"weights-reduced": sum(shards)} if alike else {})


# ------------------------------------------------------------------------------------------------ attention

_ATTENTION_CASES = (  # ranks, name, q heads, k/v heads, size of a head; a residual branch; hint if it fails first
    (2, "4 heads", 4, 4, 3, False, None),
    (2, "x + attention(x)", 4, 4, 3, True, "residual"),
    (3, "6 heads", 6, 6, 2, False, None),
    (2, "8 q heads, 4 k/v heads", 8, 4, 2, False, "grouped"),
    (4, "4 q heads, 2 k/v heads", 4, 2, 3, False, "shared"),
    (2, "6 q heads, 3 k/v heads", 6, 3, 2, False, "shared"),
    (1, "4 q heads, 2 k/v heads", 4, 2, 3, True, None),
)
_BATCH, _LENGTH = 2, 5


def _attention(
    x: Tensor, qkv: Tensor, out: Tensor, heads: int, kv_heads: int, causal: bool = True, scale: float | None = None,
    tiled: bool = False,
) -> Tensor:
    """Causal self-attention in one process; the last three arguments make known slips."""
    d = len(qkv) // (heads + 2 * kv_heads)
    q, k, v = F.linear(x, qkv).unflatten(-1, (-1, d)).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
    serve = torch.arange(heads) % kv_heads if tiled else torch.arange(heads) // (heads // kv_heads)
    mixed = F.scaled_dot_product_attention(q, k[:, serve], v[:, serve], is_causal=causal, scale=scale)
    return F.linear(mixed.transpose(1, 2).flatten(2), out)


def _head_parts(whole: dict[str, Tensor], n: int, heads: int, kv_heads: int, tiled: bool = False) -> list[Tensor]:
    """What each of n ranks adds to the output, with heads cut in order; ``kv_heads`` is a multiple of n."""
    d = len(whole["qkv"]) // (heads + 2 * kv_heads)
    q, k, v = (part.chunk(n) for part in whole["qkv"].split([heads * d, kv_heads * d, kv_heads * d]))
    outs = whole["out"].chunk(n, 1)
    return [
        _attention(whole["x"], torch.cat([q[r], k[r], v[r]]), outs[r], heads // n, kv_heads // n, tiled=tiled)
        for r in range(n)
    ]


@checked
def head_attention(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, qkv, out, heads, kv_heads) -> y``: causal self-attention, a part of the heads on each rank."""
    exercise = Exercise("Exercise 2", HINTS["head_attention"], timeout)
    for n, name, heads, kv_heads, d, residual, fallback in _ATTENTION_CASES:
        h = heads * d
        whole = {
            "x": _numbers(_BATCH, _LENGTH, h, seed=n), "qkv": _numbers(h + 2 * kv_heads * d, h, seed=20, scale=0.5),
            "out": _numbers(h, h, seed=21),
        }
        upstream, more = _numbers(_BATCH, _LENGTH, h, seed=22), (heads, kv_heads)
        results = _run(exercise, fn, [whole] * n, [upstream] * n, name, fallback, more, residual)
        y, right = _whole(_attention, whole, upstream, more, residual)
        slips, shape = _no_slips, (n, heads, kv_heads)
        if fallback == "grouped":
            slips = partial(_grouped_slips, whole, shape)
        elif n > 1 and not fallback:
            slips = partial(_attention_slips, whole, upstream, y, right["x"], shape)
        _compare(exercise, results, [y] * n, [{"x": right["x"]}] * n, slips)
        _compare_sums(exercise, results, {k: right[k] for k in ("out", "qkv")})
        _audit(exercise, results)
        own = 2 * _BATCH * _LENGTH * (4 * h * h + 2 * _LENGTH * h) // n
        for _, result in exercise.each(results if n > 1 else []):
            what = f"{result['flops']:,} operations in forward; {own:,} are enough for 1/{n} of the heads."
            exercise.require(result["flops"] <= own, "all-work", what)
    exercise.passed("output and gradients equal to one process to 1e-12, one all-reduce each way.")


def _grouped_slips(whole: dict[str, Tensor], shape: tuple[int, int, int], rank: int, name: str) -> dict[str, Any]:
    tiled = sum(_head_parts(whole, *shape, tiled=True))
    return {"kv-order": [tiled, _attention(**whole, heads=shape[1], kv_heads=shape[2], tiled=True)]}


def _attention_slips(
    whole: dict[str, Tensor], upstream: Tensor, y: Tensor, gradient: Tensor, shape: tuple[int, int, int], rank: int,
    name: str,
) -> dict[str, Any]:
    n, heads, kv_heads = shape
    if name == "x":
        x = whole["x"].clone().requires_grad_()
        part = _head_parts(whole | {"x": x}, *shape)[rank]
        own = torch.autograd.grad(part, x, upstream)[0]
        return {"no-f": own, "average": gradient / n, "g-backward": n * gradient}
    attention = partial(_attention, **whole, heads=heads, kv_heads=kv_heads)
    rows, columns = whole["qkv"].chunk(n), whole["out"].chunk(n, 1)
    parts = [_attention(whole["x"], rows[r], columns[r], heads // n, heads // n) for r in range(n)]
    h = len(whole["out"])
    return {
        "no-g": _head_parts(whole, *shape)[rank], "average": y / n, "chunked": sum(parts),
        "not-causal": attention(causal=False),
        "scale": [attention(scale=width**-0.5) for width in (h, h // n, heads, heads // n, 1)],
    }


def _compare_sums(exercise: Exercise, results: list[dict], right: dict[str, Tensor]) -> None:
    """The gradients of the whole weights, zero but for a rank's own heads, have to add up over the ranks."""
    n = len(results)
    for name, whole in right.items():
        gradients = [result["gradients"][name] for result in results]
        for rank, gradient in enumerate(gradients):
            key = exercise.fallback or "no-gradient"
            exercise.require(gradient is not None, key, f"{name} has no gradient.", rank)
        slips = {"g-backward": n * whole, "average": whole / n}
        what = f"the gradient of {name}, summed over the ranks,"
        _equal(exercise, sum(gradients), whole, what, lambda slips=slips: slips)


# ------------------------------------------------------------------------------------------------ look-ups

_PLACE, _OWN = "torch.where(here[r], local[r], 0)", "_only(here[r], read[r])"
_CLAMPED = {_PLACE: "local[r].clamp(0, size[r] - 1)"}
_OUTSIDE = [{_OWN: "read[r]", **place} for place in ({}, _CLAMPED, {_PLACE: "(local[r] % size[r])"})]
_BORDERS = [
    {"local[r] >= 0": "local[r] > 0"}, {"local[r] < size[r]": "local[r] < size[r] - 1"},
    {"local[r] < size[r]": "local[r] <= size[r]", **_CLAMPED},
]


def _only(here: Tensor, rows: Tensor) -> Tensor:
    """Rows of this rank's words, and zeros in place of others."""
    return torch.where(here.view(*here.shape, *[1] * (rows.dim() - here.dim())), rows, 0)


def _summed(parts: list[Tensor], r: int) -> Tensor:
    """What rank r gets from g: the sum over the ranks, whose gradient goes to its own part."""
    return parts[r] + sum(part.detach() for q, part in enumerate(parts) if q != r)


def _starts(size: int, n: int) -> list[int]:
    return [int(part[0]) for part in torch.arange(size).tensor_split(n)]


def _program_slips(program: Callable, slips: dict[str, dict], arguments: tuple, rank: int, name: str) -> dict[str, Any]:
    """What edits of a program for all ranks make of a rank's output or gradient, by hint key."""
    return {
        key: [edited_function(program, slip)(*arguments)[rank][name] for slip in listed(some)]
        for key, some in slips[name].items()
    }


# ------------------------------------------------------------------------------------------------ loss

_LOSS_CASES = (  # ranks, name, vocabulary, level of the logits, what one of them has more, hint if it fails first
    (2, "a vocabulary of 12", 12, 0.0, 0.0, None),
    (2, "logits about 1,000", 12, 1000.0, 0.0, None),
    (2, "logits about -1,000", 12, -1000.0, 0.0, None),
    (2, "one logit of 2,000 among small ones", 12, 0.0, 2000.0, None),
    (3, "a vocabulary of 13, in parts of 5, 4 and 4", 13, 3.0, 0.0, "uneven"),
    (4, "a vocabulary of 14, in parts of 4, 4, 3 and 3", 14, 3.0, 0.0, None),
    (1, "a vocabulary of 12", 12, 1000.0, 0.0, None),
)
UPSTREAM = 3.0  # the gradient that comes back to the loss


@checked
def vocab_parallel_loss(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(logits, targets, first) -> loss``: mean cross-entropy of logits that are cut over the vocabulary."""
    exercise = Exercise("Exercise 3", HINTS["vocab_parallel_loss"], timeout)
    for n, name, vocabulary, level, more, fallback in _LOSS_CASES:
        starts, tokens = _starts(vocabulary, n), 2 * n + 1
        ends = [start - 1 for start in (*starts[1:], vocabulary)]
        targets = torch.tensor([*starts, *ends, vocabulary // 3])
        logits = level + _numbers(tokens, vocabulary, seed=60 + n, scale=2.0)
        logits[0, 3] += more
        shards = list(logits.tensor_split(n, 1))
        leaves = [{"logits": shards[r].clone(), "targets": targets, "first": torch.tensor(starts[r])} for r in range(n)]
        upstream = torch.tensor(UPSTREAM, dtype=torch.float64)
        results = _run(exercise, fn, leaves, [upstream] * n, name, fallback)
        loss, right = _whole(F.cross_entropy, {"input": logits, "target": targets}, upstream)
        gradients = _split({"logits": right["input"]}, n, {"logits": 1})
        plain = n > 1 and not fallback
        slips = partial(_program_slips, _loss_of_all, _LOSS_SLIPS, (shards, targets, starts)) if plain else _no_slips
        _compare(exercise, results, [loss] * n, gradients, slips)
        for _, result in exercise.each(results if n > 1 else []):
            entries = [*result["forward"], *result["backward"]]
            one = _reduced(n, 8 * tokens)
            key = "gathered" if sum(entry.bytes for entry in entries) >= logits.nbytes else "too-many-bytes"
            exercise.audit(entries, sent=(one, 3 * one), keys={"too-many-bytes": key})
            exercise.audit(entries, calls=(1, 2))
    exercise.passed("loss and gradients equal to one process to 1e-12, 3 numbers a token in two messages.")


def _loss_of_all(shards: list[Tensor], targets: Tensor, starts: list[int]) -> list[dict[str, Tensor]]:
    """By rank the loss and its gradient, as all ranks compute them; `_LOSS_SLIPS` edits this program."""
    ranks, tokens, size = range(len(shards)), torch.arange(len(targets)), [shard.shape[1] for shard in shards]
    logits = [shard.clone().requires_grad_() for shard in shards]
    top = torch.stack([shard.amax(1) for shard in shards]).amax(0)
    largest = [top for r in ranks]
    shifted = [logits[r] - largest[r][:, None] for r in ranks]
    local = [targets - start for start in starts]
    here = [(local[r] >= 0) & (local[r] < size[r]) for r in ranks]
    read = [shifted[r][tokens, torch.where(here[r], local[r], 0)] for r in ranks]
    target = [_only(here[r], read[r]) for r in ranks]
    total = [shifted[r].exp().sum(1) for r in ranks]
    losses = [(_summed(total, r).log() - _summed(target, r)).mean() for r in ranks]
    gradients = [torch.autograd.grad(UPSTREAM * losses[r], logits[r])[0] for r in ranks]
    return [{"y": losses[r].detach(), "logits": gradients[r]} for r in ranks]


_TOTAL, _TARGET, _TOP = "_summed(total, r)", "_summed(target, r)", "[top for"
_WAYS = ({}, {"shifted[r][tokens": "logits[r][tokens", ".log()": ".log() + largest[r]"})  # the maximum is added again
_LOSS_SLIPS = dict.fromkeys(("y", "logits"), {
    "local-max": [{_TOP: "[shards[r].amax(1) for", **way} for way in _WAYS],
    "mean": ".mean()  ->  .sum()",
    "local-softmax": [f"{_TOTAL}.log()  ->  total[r].log()", f"{_TOTAL}.log()  ->  sum(t.log() for t in total)"],
    "average": [".mean()  ->  .mean() / len(ranks)"] + [
        {**{part: f"({part} / len(ranks))" for part in parts}, **way}
        for parts in ((_TOTAL, _TARGET), (_TOTAL,), (_TARGET,)) for way in _WAYS
    ],
    "outside": [slip | way for slip in _OUTSIDE for way in _WAYS],
    "border": [slip | way for slip in _BORDERS for way in _WAYS],
    "g-backward": "UPSTREAM *  ->  len(ranks) * UPSTREAM *",
    "upstream": "UPSTREAM *  ->  1 *",
    "target-gradient": [f"{part}  ->  {part}.detach()" for part in (_TARGET, _TOTAL)],
    "max-gradient": [{_TOP: "[logits[r].amax(1) + (top - logits[r].amax(1)).detach() for", **way} for way in _WAYS],
})

# ------------------------------------------------------------------------------------------------ paper problem


@paper_problem(
    "Exercise 4",
    cases=[
        (1, 2048, 12288, 8, 2, 900, "GB/s", 2, 400), (1, 2048, 12288, 8, 2, 400, "Gb/s", 1, 400),
        (1, 2048, 12288, 16, 2, 400, "Gb/s", 1, 400), (4, 1024, 2048, 2, 4, 128, "GB/s", 2, 60),
        (2, 8192, 4096, 4, 2, 800, "Gb/s", 2, 500), (1, 2048, 4096, 1, 2, 900, "GB/s", 2, 400),
    ],
    slips={
        "factor": "2 * (t - 1) / t  ->  2",
        "half": ["4 * 2 * (t  ->  2 * 2 * (t", "h * element_bytes  ->  h"],
        "quarter": "4 * 2 * (t  ->  2 * (t",
        "all-ranks": "(t - 1) / t  ->  (t - 1)",
        "megabytes": ["size / 1e6  ->  size", "size / 1e6  ->  size / 2**20", "size / 1e6  ->  size / 1e9"],
        "bits": ['(8 if unit == "Gb/s" else 1)  ->  1', '(8 if unit == "Gb/s" else 1)  ->  8'],
        "directions": "/ directions  ->  ",
        "milliseconds": "moving * 1e3  ->  moving",
        "compute-whole": "(t * tflops  ->  (tflops",
        "compute-forward": "3 * (24  ->  (24",
        "scores": "+ 4 * b * s**2 * h  ->  ",
        "ratio": "moving / (moving + computing)  ->  moving / computing",
        "percent": "moving / (moving + computing)  ->  100 * moving / (moving + computing)",
    },
    units=["MB", "ms", "of the time"],
    hints=HINTS["tp_traffic"],
    tolerance=1e-3,
)
def tp_traffic(b, s, h, t, element_bytes, bandwidth, unit, directions, tflops):
    """Check ``fn(b, s, h, t, element_bytes, bandwidth, unit, directions, tflops) -> (MB, ms, share)``."""
    size = 4 * 2 * (t - 1) / t * b * s * h * element_bytes
    moving = size / (bandwidth * 1e9 / directions / (8 if unit == "Gb/s" else 1))
    computing = 3 * (24 * b * s * h**2 + 4 * b * s**2 * h) / (t * tflops * 1e12)
    return size / 1e6, moving * 1e3, moving / (moving + computing)


# ------------------------------------------------------------------------------------------------ sequence parallel

_SEQUENCE_CASES = (  # ranks, name, tokens of each rank
    (2, "2 tokens on each rank", 2),
    (3, "2 tokens on each rank", 2),
    (1, "4 tokens", 4),
)


def _normed_mlp(x: Tensor, gain: Tensor, up: Tensor, down: Tensor, eps: float | None = None) -> Tensor:
    return F.linear(F.gelu(F.linear(F.rms_norm(x, x.shape[-1:], gain, eps), up)), down)


@checked
def sequence_parallel_norm(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, gain, up, down) -> y``: a norm on this rank's tokens, and an MLP on this rank's features."""
    exercise = Exercise("Exercise 5", HINTS["sequence_parallel_norm"], timeout)
    b, h, m = 2, 6, 9  # the parts of m differ from h, so that tokens and inner features differ in bytes
    for n, name, tokens in _SEQUENCE_CASES:
        whole = {
            "x": _numbers(n * tokens, b, h, seed=50 + n), "gain": 1 + _numbers(h, seed=51, scale=0.3),
            "up": _numbers(m, h, seed=52), "down": _numbers(h, m, seed=53),
        }
        cuts = {"x": 0, "up": 0, "down": 1}
        leaves, upstream = _split(whole, n, cuts), _numbers(n * tokens, b, h, seed=54)
        results = _run(exercise, fn, leaves, list(upstream.chunk(n)), name)
        y, right = _whole(_normed_mlp, whole, upstream)
        gradients = _split({k: right[k] for k in ("down", "up", "x", "gain")}, n, cuts)
        slips = partial(_sequence_slips, leaves, whole, upstream, y) if n > 1 else _no_slips
        defaults = {"gain": "norm-gradient"} if n > 1 else {}
        _compare(exercise, results, list(y.chunk(n)), gradients, slips, defaults)
        for _, result in exercise.each(results if n > 1 else []):
            for way, gain in {"forward": 0, "backward": whole["gain"].nbytes}.items():
                entries, where = [_per_rank(e) for e in result[way]], f"in {way}, "
                reduced = [e for e in entries if e.op == "all_reduce"]
                exercise.audit(reduced, carried=gain, where=where, keys={"too-many-bytes": "all-reduce"})
                limits = {"carried": 2 * y.nbytes + n * gain, "sent": (_reduced(n, y.nbytes), None)}
                exercise.audit(entries, where=where, **limits)
            copies = sum(size >= y.nbytes for size in result["kept"])
            what = f"{copies} tensors of all tokens are kept for backward; 1 is enough."
            exercise.require(copies <= 1, "whole-norm", what)
    exercise.passed("outputs and gradients equal to one process to 1e-12, in as many bytes as with all-reduces.")


def _per_rank(entry: Any) -> Any:
    """An entry with a rank's share of its bytes: torch makes an all-to-all of one scatter from each rank."""
    return replace(entry, bytes=entry.bytes // len(entry.ranks)) if entry.op == "scatter" else entry


def _sequence_slips(
    leaves: Leaves, whole: dict[str, Tensor], upstream: Tensor, y: Tensor, rank: int, name: str
) -> dict[str, Any]:
    n, own = len(leaves), whole | {k: leaves[rank][k] for k in ("up", "down")}
    part, gradients = _whole(_normed_mlp, own, upstream)
    if name == "y":
        parts = y.chunk(n)
        return {
            "no-gather": sum(_normed_mlp(**leaf) for leaf in leaves), "no-scatter": [part.chunk(n)[rank], part],
            "whole": y, "wrong-part": [other for r, other in enumerate(parts) if r != rank],
            "average": parts[rank] / n,
            "eps": [_normed_mlp(**whole, eps=10.0**-k).chunk(n)[rank] for k in range(3, 13)],
        }
    if name == "x":
        return {"gather-backward": gradients["x"].chunk(n)[rank]}
    if name == "gain":
        return {}
    masked = torch.zeros_like(upstream)
    masked.chunk(n)[rank].copy_(upstream.chunk(n)[rank])
    return {"scatter-backward": _whole(_normed_mlp, own, masked)[1][name], "average": gradients[name] / n}
