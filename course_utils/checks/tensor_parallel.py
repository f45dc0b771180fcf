"""Checks of the exercises on tensor parallelism.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Numbers are in float64, so that outputs and gradients of the ranks
can be compared with one process to 1e-12. What differs between exercises is only which tensors a rank gets (its
``leaves``), and how the answer is called with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import TIMEOUT, Exercise, Outcome, checked, close, paper_problem
from .training import as_list, compare, difference, exact

__all__ = [
    "HINTS", "column_row_mlp", "head_attention", "sequence_parallel_norm", "tp_traffic", "vocab_parallel_embedding",
    "vocab_parallel_loss",
]  # fmt: skip

_CONJUGATES = {
    "no-g": "This is the partial sum of this rank. Its own part of the input features gives one term; the all-reduce "
    "of g adds up the terms of all ranks.",
    "g-backward": "The output is right, and gradients are t times too large: the gradient is all-reduced on its way "
    "back through g as well. Every rank already has the whole gradient of the output, so g hands it on.",
    "average": "A sum over the ranks was divided by t. Parts of a sum are added up, not averaged: ReduceOp.SUM.",
    "float32": "Right to 7 digits only: somewhere the numbers pass through float32. new_empty and zeros_like keep the "
    "dtype.",
    "no-gradient": "A gradient is missing. Autograd does not look into detach(), no_grad() or a copy without a "
    "history.",
    "other-calls": "The result is right, but something else than all-reduces travels. Each rank can work with its own "
    "part until the end, and add up then.",
    "too-many-calls": "The result is right, with more all-reduces than needed. record() shows where they come from.",
}
_F = {
    "no-f": "The output and the shards' gradients are right, the gradient of x is only this rank's part. Each rank "
    "used x, so its gradient is the sum over the ranks: this is the all-reduce of f, in backward.",
    "residual": "Right until x is used a second time, as in x + layer(x). The all-reduce belongs to the branch into "
    "the layer, not to x itself: let f return a new tensor.",
}

HINTS: dict[str, dict[str, str]] = {
    "column_row_mlp": _CONJUGATES | _F | {
        "bias": "The second bias is in the output t times: every rank added it before the sum. Add it once, after the "
        "all-reduce.",
        "bias-gradient": "The output is right, but the gradient of the second bias is not. Every rank holds the whole "
        "bias, and adds it after the all-reduce: then autograd gives it the same gradient everywhere.",
        "weights-reduced": "Gradients of shards were added up over the ranks, as in data parallelism. Each rank has "
        "another part of the weight: its gradient concerns nobody else.",
    },
    "head_attention": _CONJUGATES | _F | {
        "chunked": "The joint weight was cut into t parts. Its rows are all of q, then all of k, then all of v: the "
        "first part has no v at all. Cut q, k and v each, by heads.",
        "not-causal": "A token looks at later ones. Self-attention is causal here: is_causal=True.",
        "scale": "The scores have another scale. Divide by the root of the size of one head, not of what this rank or "
        "the model has in all.",
        "grouped": "Right until there are fewer k/v heads than q heads. qkv then has heads + 2 · kv_heads heads, "
        "and heads // kv_heads q heads share one k/v head.",
        "kv-order": "The k/v heads are there, in wrong order. Neighbours share one: q head i uses k/v head "
        "i // (heads // kv_heads). repeat_interleave does that, repeat does not.",
        "shared": "Right until there are fewer k/v heads than ranks. Then some ranks use the same k/v head, and each "
        "keeps a copy: go from this rank's q heads to the k/v heads that they use.",
        "all-work": "The result is right, but this rank multiplies by heads that are not its own. Cut the weights "
        "before the multiplication, not its result.",
    },
    "vocab_parallel_loss": {
        "overflow": "The result is not finite: exp of a large number overflows, and of very negative ones it leaves "
        "nothing. Take the largest logit of the token off first: the largest on all ranks (ReduceOp.MAX).",
        "local-max": "Each rank took its own maximum off, so that the ranks add up numbers of different scale. All "
        "have to take off the same one: ReduceOp.MAX.",
        "outside": "A rank whose shard does not hold the target read some logit all the same. Exactly one rank has "
        "it; the others contribute zero.",
        "mean": "This is the sum over the tokens. The loss is their mean.",
        "average": "A sum over the shards was averaged: ReduceOp.SUM for the sums, MAX for the maximum.",
        "local-softmax": "This is the softmax of the shard alone. The sum of the exponentials goes over the whole "
        "vocabulary.",
        "uneven": "Right until the number of ranks does not divide the vocabulary. Shards then differ in width: first "
        "says where this one begins.",
        "no-gradient": "After backward the logits have no gradient.",
        "g-backward": "The loss is right, and its gradient t times too large: it is all-reduced on its way back. The "
        "loss is the same on every rank, so each already has its whole gradient.",
        "target-gradient": "The loss is right, but its gradient lacks the target's part: softmax minus 1 at the "
        "target, on the rank that has it.",
        "max-gradient": "The loss is right, but a gradient flows into the largest logits. The maximum only moves the "
        "scale, and cancels: detach it before the all-reduce.",
        "upstream": "The gradient does not change with what comes after the loss. Multiply by what backward gets.",
        "float32": _CONJUGATES["float32"],
        "gathered": "The result is right, but as many bytes travel as the whole logits have. Each rank can reduce its "
        "own to one number a token.",
        "too-many-bytes": "The result is right, but more than three numbers a token travel. record() shows each call.",
        "too-many-calls": "The result is right, in more than two messages. The two sums wait for the maximum, and not "
        "for each other: torch.stack puts them into one tensor.",
        "value": "Compute the three numbers of each token in one process first: the maximum, the sum of the "
        "exponentials, the logit of the target. Which of them differs here?",
    },
    "vocab_parallel_embedding": {key: _CONJUGATES[key] for key in ("average", "float32")} | {
        "no-g": "Tokens of other shards have rows of zeros. Each row is on one rank; a sum over the ranks brings it to "
        "all.",
        "outside": "Tokens that are not in the shard got one of its rows all the same, and these were added. Set them "
        "to zero before the sum.",
        "border": "Rows at the border of a shard are missing. A shard has the tokens from first on up to, and not "
        "with, first + len(weight).",
        "uneven": "Right until the number of ranks does not divide the vocabulary. Shards then differ in length: first "
        "says where this one begins.",
        "empty-shard": "Right until a rank has none of the tokens. It takes part in the sum all the same.",
        "g-backward": "The rows are right, and their gradients t times too large: the gradient is all-reduced on its "
        "way back. Every rank already has the whole gradient of the output, so g hands it on.",
        "mask-gradient": "The rows are right, but a row of the shard gets the gradient of tokens that belong to other "
        "ranks. Autograd has to know of the zeros: torch.where or a product with the mask.",
        "repeated": "Right where each token stands once. The gradient of a row adds up over all places of its token.",
        "no-gradient": "After backward the weight has no gradient.",
        "other-calls": "The result is right, but something else than one all-reduce of the output travels. The weight "
        "stays where it is.",
        "too-many-calls": "The result is right, with more than one all-reduce. Forward needs one, backward none.",
    },
    "tp_traffic": {
        "half": "That is half of the traffic. A layer has four all-reduces in a step, attention and MLP, forward and "
        "backward; each sends 2(t-1)/t of its tensor; and an element has more than one byte.",
        "quarter": "That is a quarter of the traffic: four all-reduces in a step, and each sends 2(t-1)/t of its "
        "tensor.",
        "factor": "The share (t-1)/t is missing. With one GPU nothing would be sent.",
        "all-ranks": "That is what all GPUs send together. The question is about one.",
        "megabytes": "The docstring asks for MB: 10⁶ bytes.",
        "bits": "1 GB/s is 8 Gb/s. Bring the bandwidth to bytes where it is given in bits.",
        "directions": "The bandwidth counts both directions together. What one GPU sends has only one of them.",
        "milliseconds": "The docstring asks for milliseconds.",
        "compute-whole": "Each GPU computes 1/t of the layer.",
        "compute-forward": "Backward takes twice the operations of forward: three times in all.",
        "scores": "The attention scores are missing in the operations: 4·b·s²·h more in forward.",
        "ratio": "That is communication over computation. The share is communication over both together.",
        "percent": "Return the share as a number from 0 to 1.",
    },
    "sequence_parallel_norm": {
        "no-gather": "The MLP saw only this rank's tokens. Its weights are cut over the ranks: each needs all tokens, "
        "to contribute its part.",
        "no-scatter": "The partial sums of the ranks were not added up.",
        "whole": "These are the rows of all ranks. This rank keeps its own.",
        "wrong-part": "These are the tokens of another rank: rank r has part r of the sequence.",
        "gather-backward": "The output is right, but the gradient of x is only this rank's part. Every rank used all "
        "tokens: in backward a reduce-scatter adds the gradients up, and hands out the parts.",
        "scatter-backward": "The output is right, but gradients of the MLP's shards know of this rank's tokens only. "
        "The gradient of the output is cut over the ranks: in backward an all-gather brings it together.",
        "norm-gradient": "The gradient of the norm's gain is that of this rank's tokens. Its weight is whole on every "
        "rank: sum the gradient over them.",
        "average": "Parts of a sum are added up, not averaged: ReduceOp.SUM.",
        "no-gradient": _CONJUGATES["no-gradient"],
        "all-reduce": "The result is right, but the whole output (in backward, the whole gradient) was all-reduced, "
        "only to keep a part of it.",
        "too-many-bytes": "The result is right, but more bytes travel than one all-gather and one reduce-scatter each "
        "way need, and the sum of the gain's gradient.",
        "float32": _CONJUGATES["float32"],
    },
}  # fmt: skip

SLACK = 64  # bytes of scalars that nobody counts

# ------------------------------------------------------------------------------------------------ numbers and runs

Leaves = list[dict[str, Tensor]]  # by rank, what the answer is called with; a gradient is asked of each float tensor


def _numbers(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(104729 + seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def _both_ways(tag: Tensor, fn: Callable, call: Callable, leaves: Leaves, upstream: list[Tensor]) -> dict[str, Any]:
    """Forward and backward of one rank: the output, the gradient of each leaf, and what travelled each way."""
    import torch.distributed as dist
    from torch.utils.flop_counter import FlopCounterMode

    from course_utils import record

    rank, gradients = dist.get_rank(), {}
    start = leaves[rank]
    own = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in start.items()}
    with record() as forward, FlopCounterMode(display=False) as counter:
        y = call(fn, own)
    fits = isinstance(y, Tensor) and y.shape == upstream[rank].shape
    with record() as backward:
        if fits and y.requires_grad:
            (y * upstream[rank]).sum().backward()
            gradients = {k: t.grad for k, t in own.items()}
    return {
        "y": y.detach() if isinstance(y, Tensor) else y, "gradients": {k: gradients.get(k) for k in own},
        "forward": forward, "backward": backward, "flops": counter.get_total_flops(),
        "changed": [k for k, t in own.items() if not torch.equal(t.detach(), start[k])],
    }  # fmt: skip


def _run(exercise: Exercise, fn: Callable, call: Callable, leaves: Leaves, upstream: list[Tensor], name: str,
         fallback: str | None) -> list[dict[str, Any]]:  # fmt: skip
    tags = [torch.zeros(1) for _ in leaves]
    outcomes: list[Outcome] = exercise.run(_both_ways, tags, fn, call, leaves, upstream, case=name, fallback=fallback)
    for rank, outcome in enumerate(outcomes):
        exercise.communicates(rank, outcome, len(leaves))
    return [outcome.result for outcome in outcomes]


def _whole(call: Callable, leaves: dict[str, Tensor], upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the gradients of one process: ``call(**leaves)`` with whole tensors."""
    own = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in leaves.items()}
    y = call(**own)
    floats = {k: t for k, t in own.items() if t.is_floating_point()}
    found = torch.autograd.grad(y, list(floats.values()), upstream, allow_unused=True)
    pairs = zip(floats.items(), found, strict=True)
    return y.detach(), {k: torch.zeros_like(t) if g is None else g for (k, t), g in pairs}


def _output(exercise: Exercise, rank: int, result: dict, right: Tensor, traps: dict[str, Any]) -> None:
    """Compare the output; ``traps``, hint key to wrong outputs. The arguments have to be as before."""
    y = result["y"]
    if not exact(y, right):
        form = "value" if isinstance(y, Tensor) and y.shape == right.shape else "shape"
        alike = (key for key, some in traps.items() if any(close(y, wrong) for wrong in as_list(some)))
        key = "float32" if close(y, right) else next(alike, form)
        exercise.refuse(key, f"the output is wrong.{difference(y, right)}", rank)
    what = f"the answer changed {' and '.join(result['changed'])}."
    exercise.require(not result["changed"], "input-changed", what, rank)


def _gradient(
    exercise: Exercise, rank: int, got: dict[str, Tensor | None], name: str, right: Tensor, traps: dict[str, Any],
    default: str = "value",
) -> None:  # fmt: skip
    """Compare one gradient; ``traps``, hint key to wrong gradients. One that is missing counts as wrong."""
    if got[name] is None and default == "value":
        exercise.refuse(exercise.fallback or "no-gradient", f"{name} has no gradient.", rank)
    wrong = {key: [{name: w} for w in as_list(some)] for key, some in traps.items()}
    compare(exercise, rank, got, {name: right}, wrong, "the gradient", exercise.fallback or default)


def _audit(exercise: Exercise, rank: int, result: dict, n: int, limits: dict[str, tuple[int, int]]) -> None:
    """Refuse other operations than all-reduces, and more of them, or more bytes, than ``limits`` (count, bytes)."""
    for way, (count, size) in limits.items() if n > 1 else ():
        entries = [e for e in result[way] if e.op != "barrier"]
        others = sorted({e.op for e in entries} - {"all_reduce"})
        exercise.require(not others, "other-calls", f"in {way} the ledger shows {', '.join(others)}.", rank)
        what = f"{len(entries)} all-reduces in {way}; {count} {'is' if count == 1 else 'are'} enough."
        exercise.require(len(entries) <= count, "too-many-calls", what, rank)
        total = sum(e.bytes for e in entries)
        what = f"{total} bytes are all-reduced in {way}; {size} are enough."
        exercise.require(total <= size, "too-many-bytes", what, rank)


# ------------------------------------------------------------------------------------------------ MLP

_MLP_CASES = (  # ranks, name, sizes of batch, sequence, hidden, inner; a residual branch; hint if it fails first
    (2, "an MLP", (2, 3, 4, 10), False, None),
    (2, "x + MLP(x)", (2, 3, 4, 10), True, "residual"),
    (3, "an inner layer of 7, in parts of 3, 2 and 2", (2, 3, 5, 7), False, None),
    (1, "x + MLP(x)", (2, 3, 4, 6), True, None),
)


def _mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


def _mlp_residual(x: Tensor, **weights: Tensor) -> Tensor:
    branch = x * 1.0
    return branch + _mlp(branch, **weights)


def _call_mlp(fn: Callable, own: dict[str, Tensor]) -> Any:
    return fn(own["x"], own["up"], own["up_bias"], own["down"], own["down_bias"])


def _call_mlp_residual(fn: Callable, own: dict[str, Tensor]) -> Any:
    branch = own["x"] * 1.0
    y = _call_mlp(fn, own | {"x": branch})
    return branch + y if isinstance(y, Tensor) else y


@checked
def column_row_mlp(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, up, up_bias, down, down_bias) -> y``: a two-layer MLP from this rank's shards."""
    exercise = Exercise("Exercise 1", HINTS["column_row_mlp"], timeout)
    for n, name, (b, s, h, m), residual, fallback in _MLP_CASES:
        whole = {
            "x": _numbers(b, s, h, seed=n), "up": _numbers(m, h, seed=10), "up_bias": _numbers(m, seed=11),
            "down": _numbers(h, m, seed=12), "down_bias": _numbers(h, seed=13),
        }  # fmt: skip
        cuts = {"up": 0, "up_bias": 0, "down": 1}
        leaves = [{k: t.tensor_split(n, cuts[k])[r] if k in cuts else t for k, t in whole.items()} for r in range(n)]
        upstream = _numbers(b, s, h, seed=14)
        call = _call_mlp_residual if residual else _call_mlp
        results = _run(exercise, fn, call, leaves, [upstream] * n, name, fallback)
        y, right = _whole(_mlp_residual if residual else _mlp, whole, upstream)
        bias = whole["down_bias"]
        parts = [_whole(_mlp, own | {"down_bias": 0 * bias}, upstream) for own in leaves]
        for rank, result in enumerate(results):
            traps = {} if fallback or n == 1 else {
                "no-g": [parts[rank][0], parts[rank][0] + bias], "bias": y + (n - 1) * bias,
                "average": [(y - bias) / n + k * bias for k in (1, 0, 1 / n)],
            }  # fmt: skip
            _output(exercise, rank, result, y, traps)
        for rank, result in enumerate(results):
            _mlp_gradients(exercise, rank, result["gradients"], right, leaves, cuts, parts)
        for rank, result in enumerate(results):
            _audit(exercise, rank, result, n, {way: (1, 8 * b * s * h) for way in ("forward", "backward")})
    exercise.passed("output and gradients equal to one process to 1e-12, one all-reduce each way.")


def _mlp_gradients(
    exercise: Exercise, rank: int, got: dict, right: dict, leaves: Leaves, cuts: dict[str, int], parts: list
) -> None:
    n, plain = len(leaves), exercise.fallback is None and len(leaves) > 1
    for name in ("down", "up", "up_bias", "x"):
        shards = right[name].tensor_split(n, cuts[name]) if name in cuts else [right[name]] * n
        traps: dict[str, Any] = {"g-backward": n * shards[rank], "average": shards[rank] / n} if plain else {}
        if plain and name in cuts and len({shard.shape for shard in shards}) == 1:
            traps["weights-reduced"] = sum(shards)
        if plain and name == "x":
            traps |= {"no-f": parts[rank][1]["x"]}
        _gradient(exercise, rank, got, name, shards[rank], traps)
    _gradient(exercise, rank, got, "down_bias", right["down_bias"], {}, "bias-gradient")


# ------------------------------------------------------------------------------------------------ attention

_ATTENTION_CASES = (  # ranks, name, q heads, k/v heads, size of a head; a residual branch; hint if it fails first
    (2, "4 heads", 4, 4, 3, False, None),
    (2, "x + attention(x)", 4, 4, 3, True, "residual"),
    (3, "6 heads", 6, 6, 2, False, None),
    (2, "8 q heads, 4 k/v heads", 8, 4, 2, False, "grouped"),
    (4, "4 q heads, 2 k/v heads", 4, 2, 3, False, "shared"),
    (1, "4 q heads, 2 k/v heads", 4, 2, 3, True, None),
)
_BATCH, _LENGTH = 2, 5


def _attention(
    x: Tensor, qkv: Tensor, out: Tensor, heads: int, kv_heads: int, causal: bool = True, scale: float | None = None,
    tiled: bool = False,
) -> Tensor:  # fmt: skip
    """Causal self-attention in one process; the last three arguments make known slips."""
    d = len(qkv) // (heads + 2 * kv_heads)
    q, k, v = F.linear(x, qkv).unflatten(-1, (-1, d)).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
    serve = torch.arange(heads) % kv_heads if tiled else torch.arange(heads) // (heads // kv_heads)
    mixed = F.scaled_dot_product_attention(q, k[:, serve], v[:, serve], is_causal=causal, scale=scale)
    return F.linear(mixed.transpose(1, 2).flatten(2), out)


class _CallAttention:
    """Calls the answer; an object, so that it can be sent to the ranks with the shape it is for."""

    def __init__(self, heads: int, kv_heads: int, residual: bool):
        self.heads, self.kv_heads, self.residual = heads, kv_heads, residual

    def __call__(self, fn: Callable, own: dict[str, Tensor]) -> Any:
        x = own["x"] * 1.0 if self.residual else own["x"]
        y = fn(x, own["qkv"], own["out"], self.heads, self.kv_heads)
        return x + y if self.residual and isinstance(y, Tensor) else y

    def whole(self, x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
        y = _attention(x, qkv, out, self.heads, self.kv_heads)
        return x + y if self.residual else y


def _head_parts(whole: dict[str, Tensor], n: int, heads: int, kv_heads: int, **slip: Any) -> list[Tensor]:
    """What each of n ranks adds to the output, with heads cut in order; ``kv_heads`` is a multiple of n."""
    d = len(whole["qkv"]) // (heads + 2 * kv_heads)
    q, k, v = (part.chunk(n) for part in whole["qkv"].split([heads * d, kv_heads * d, kv_heads * d]))
    outs = whole["out"].chunk(n, 1)
    return [
        _attention(whole["x"], torch.cat([q[r], k[r], v[r]]), outs[r], heads // n, kv_heads // n, **slip)
        for r in range(n)
    ]


def _chunked(whole: dict[str, Tensor], n: int, heads: int) -> Tensor:
    """The output if every rank takes one of n parts of the joint weight for its q, k and v."""
    qkv, outs = whole["qkv"].chunk(n), whole["out"].chunk(n, 1)
    return sum(_attention(whole["x"], qkv[r], outs[r], heads // n, heads // n) for r in range(n))


@checked
def head_attention(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, qkv, out, heads, kv_heads) -> y``: causal self-attention, a part of the heads on each rank."""
    exercise = Exercise("Exercise 2", HINTS["head_attention"], timeout)
    for n, name, heads, kv_heads, d, residual, fallback in _ATTENTION_CASES:
        h = heads * d
        whole = {
            "x": _numbers(_BATCH, _LENGTH, h, seed=n), "qkv": _numbers(h + 2 * kv_heads * d, h, seed=20, scale=0.5),
            "out": _numbers(h, h, seed=21),
        }  # fmt: skip
        upstream, call = _numbers(_BATCH, _LENGTH, h, seed=22), _CallAttention(heads, kv_heads, residual)
        results = _run(exercise, fn, call, [whole] * n, [upstream] * n, name, fallback)
        y, right = _whole(call.whole, whole, upstream)
        for rank, result in enumerate(results):
            _output(exercise, rank, result, y, _attention_slips(whole, n, heads, kv_heads, rank, y, fallback))
        _attention_gradients(exercise, results, right, whole, upstream, (heads, kv_heads))
        size = 8 * _BATCH * _LENGTH * h
        for rank, result in enumerate(results):
            _audit(exercise, rank, result, n, {way: (1, size) for way in ("forward", "backward")})
            own = 2 * _BATCH * _LENGTH * (4 * h * h + 2 * _LENGTH * h) // n
            what = f"{result['flops']:,} operations in forward; {own:,} are enough for 1/{n} of the heads."
            exercise.require(n == 1 or result["flops"] <= own, "all-work", what, rank)
    exercise.passed("output and gradients equal to one process to 1e-12, one all-reduce each way.")


def _attention_slips(
    whole: dict[str, Tensor], n: int, heads: int, kv_heads: int, rank: int, y: Tensor, fallback: str | None
) -> dict[str, Any]:
    if n == 1 or fallback not in (None, "grouped"):
        return {}
    if fallback == "grouped":
        tiled = sum(_head_parts(whole, n, heads, kv_heads, tiled=True))
        return {"kv-order": [tiled, _attention(**whole, heads=heads, kv_heads=kv_heads, tiled=True)]}
    widths = [len(whole["out"]), len(whole["out"]) // n, heads, heads // n, 1]
    return {
        "no-g": _head_parts(whole, n, heads, kv_heads)[rank], "average": y / n, "chunked": _chunked(whole, n, heads),
        "not-causal": _attention(**whole, heads=heads, kv_heads=kv_heads, causal=False),
        "scale": [_attention(**whole, heads=heads, kv_heads=kv_heads, scale=w**-0.5) for w in widths],
    }  # fmt: skip


def _attention_gradients(
    exercise: Exercise, results: list[dict], right: dict, whole: dict, upstream: Tensor, shape: tuple[int, int]
) -> None:
    """The gradients of the whole weights have to add up over the ranks; that of x is the same on all."""
    n, plain = len(results), exercise.fallback is None and len(results) > 1
    for name in ("out", "qkv"):
        gradients = [result["gradients"][name] for result in results]
        missing = [rank for rank, g in enumerate(gradients) if g is None]
        if missing:
            exercise.refuse(exercise.fallback or "no-gradient", f"{name} has no gradient.", missing[0])
        traps = {"g-backward": n * right[name], "average": right[name] / n} if plain else {}
        if not exact(total := sum(gradients), right[name]):
            key = next((k for k, wrong in traps.items() if close(total, wrong)), exercise.fallback or "value")
            key = "float32" if close(total, right[name]) else key
            exercise.refuse(key, f"the gradient of {name}, summed over the ranks, is wrong."
                            + difference(total, right[name]))  # fmt: skip
    for rank, result in enumerate(results):
        traps = {}
        if plain:
            own = whole["x"].clone().requires_grad_()
            part = _head_parts(whole | {"x": own}, n, *shape)[rank]
            partial = torch.autograd.grad(part, own, upstream)[0]
            traps = {"no-f": partial, "average": right["x"] / n, "g-backward": n * right["x"]}
        _gradient(exercise, rank, result["gradients"], "x", right["x"], traps)


# ------------------------------------------------------------------------------------------------ loss

_LOSS_CASES = (  # ranks, name, tokens, vocabulary, the level of the logits, hint if it fails first
    (2, "a vocabulary of 12", 5, 12, 0.0, None),
    (2, "logits about 1,000", 5, 12, 1000.0, None),
    (2, "logits about -1,000", 5, 12, -1000.0, None),
    (3, "a vocabulary of 13, in parts of 5, 4 and 4", 7, 13, 3.0, "uneven"),
    (4, "a vocabulary of 14, in parts of 4, 4, 3 and 3", 7, 14, 3.0, None),
    (1, "a vocabulary of 12", 5, 12, 1000.0, None),
)
UPSTREAM = 3.0  # the gradient that comes back to the loss


def _call_loss(fn: Callable, own: dict[str, Tensor]) -> Any:
    return fn(own["logits"], own["targets"], int(own["first"]))


def _starts(size: int, n: int) -> list[int]:
    return [int(part[0]) for part in torch.arange(size).tensor_split(n)]


def _picked(logits: list[Tensor], targets: Tensor, starts: list[int], index: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Sum over the shards of the logit that each reads at ``index(target - first, width)``."""
    rows = torch.arange(len(targets))
    return sum(part[rows, index(targets - first, part.shape[1])] for part, first in zip(logits, starts, strict=True))


@checked
def vocab_parallel_loss(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(logits, targets, first) -> loss``: mean cross-entropy of logits that are cut over the vocabulary."""
    exercise = Exercise("Exercise 3", HINTS["vocab_parallel_loss"], timeout)
    for n, name, tokens, vocabulary, level, fallback in _LOSS_CASES:
        logits = level + _numbers(tokens, vocabulary, seed=30 + n, scale=2.0)
        targets = torch.arange(tokens) * 5 % vocabulary
        starts = _starts(vocabulary, n)
        shards = list(logits.tensor_split(n, 1))
        leaves = [{"logits": shards[r].clone(), "targets": targets, "first": torch.tensor(starts[r])} for r in range(n)]
        upstream = torch.tensor(UPSTREAM, dtype=torch.float64)
        results = _run(exercise, fn, _call_loss, leaves, [upstream] * n, name, fallback)
        loss, right = _whole(F.cross_entropy, {"input": logits, "target": targets}, upstream)
        for rank, result in enumerate(results):
            if isinstance(result["y"], Tensor) and not bool(result["y"].isfinite().all()):
                exercise.refuse("overflow", f"the loss is {result['y'].flatten()[0].item()}.", rank)
            traps = _loss_slips(shards, targets, starts, rank, loss) if n > 1 and not fallback else {}
            _output(exercise, rank, result, loss, traps)
        for rank, result in enumerate(results):
            gradient, traps = right["input"].tensor_split(n, 1)[rank], {}
            if n > 1 and not fallback:
                traps = _loss_gradient_slips(shards, targets, starts, rank, gradient)
            got = result["gradients"]["logits"]
            if got is not None and not bool(got.isfinite().all()):
                exercise.refuse("overflow", "the gradient is not finite.", rank)
            _gradient(exercise, rank, result["gradients"], "logits", gradient, traps)
        for rank, result in enumerate(results) if n > 1 else ():
            size = result["forward"].bytes() + result["backward"].bytes()
            what = f"{size} bytes travel; 3 numbers a token are {24 * tokens}."
            key = "gathered" if size >= logits.nbytes else "too-many-bytes"
            exercise.require(size <= 24 * tokens + SLACK, key, what, rank)
            calls = sum(e.op != "barrier" for way in ("forward", "backward") for e in result[way])
            exercise.require(calls <= 2, "too-many-calls", f"{calls} messages; 2 are enough.", rank)
    exercise.passed("loss and gradients equal to one process to 1e-12, 3 numbers a token in two messages.")


def _loss_slips(shards: list[Tensor], targets: Tensor, starts: list[int], rank: int, loss: Tensor) -> dict[str, Any]:
    n, logits = len(shards), torch.cat(shards, 1)
    total, target = logits.logsumexp(1), logits[torch.arange(len(targets)), targets]
    tops = [shard.amax(1) for shard in shards]
    scaled = sum((shard - top[:, None]).exp().sum(1) for shard, top in zip(shards, tops, strict=True)).log()
    owner = torch.bucketize(targets, torch.tensor(starts), right=True) - 1
    owned = torch.stack(tops)[owner, torch.arange(len(targets))]
    reads = [
        _picked(shards, targets, starts, lambda i, width: i.clamp(0, width - 1)),
        _picked(shards, targets, starts, lambda i, width: i % width),
        _picked(shards, targets, starts, lambda i, width: torch.where((i < 0) | (i >= width), 0, i)),
    ]
    outside = [(total - read).mean() for read in reads]
    top = logits.amax(1)
    outside += [(total - top - (read - n * top)).mean() for read in reads]
    return {
        "outside": outside,
        "local-max": [
            (scaled + tops[rank] - target).mean(), (scaled - (target - owned)).mean(),
            (scaled + sum(tops) - target).mean(), (scaled + top - target).mean(),
        ],
        "mean": loss * len(targets),
        "average": [
            (total - a * math.log(n) - target / c).mean() for a, c in ((1, 1), (0, n), (1, n))
        ] + [(total - a * math.log(n) - top - (target - top) / c).mean() for a, c in ((0, n), (1, n))] + [loss / n],
        "local-softmax": [
            (shards[rank].logsumexp(1) - target).mean(), sum(s.logsumexp(1) for s in shards).sub(target).mean(),
        ],
    }  # fmt: skip


def _loss_gradient_slips(
    shards: list[Tensor], targets: Tensor, starts: list[int], rank: int, right: Tensor
) -> dict[str, Any]:
    n, logits, tokens = len(shards), torch.cat(shards, 1), len(targets)
    scale, own = UPSTREAM / tokens, shards[rank]
    soft = logits.softmax(1).tensor_split(n, 1)[rank]
    hit = soft - right / scale  # 1 at the targets of this shard
    top = F.one_hot(own.argmax(1), own.shape[1]).double()
    share, mine = soft.sum(1, keepdim=True), hit.sum(1, keepdim=True)
    return {
        "g-backward": n * right, "average": right / n, "upstream": right / UPSTREAM,
        "target-gradient": [soft * scale, -hit * scale], "local-softmax": (own.softmax(1) - hit) * scale,
        "max-gradient": [right + scale * top * extra for extra in (1 - share, mine - share, -share)],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ embedding

_EMBEDDING_CASES = (  # ranks, name, vocabulary, which tokens, hint if it fails first
    (2, "a vocabulary of 8", 8, "all", None),
    (2, "all tokens in the shard of rank 0", 8, "few", "empty-shard"),
    (3, "a vocabulary of 10, in parts of 4, 3 and 3", 10, "all", "uneven"),
    (4, "a vocabulary of 9, in parts of 3, 2, 2 and 2", 9, "all", None),
    (1, "a vocabulary of 8", 8, "all", None),
)
_WIDTH = 3


def _call_embedding(fn: Callable, own: dict[str, Tensor]) -> Any:
    return fn(own["tokens"], own["weight"], int(own["first"]))


def _embedded(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight[tokens]


@checked
def vocab_parallel_embedding(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(tokens, weight, first) -> rows``: an embedding whose rows are cut over the ranks."""
    exercise = Exercise("Exercise 4", HINTS["vocab_parallel_embedding"], timeout)
    for n, name, vocabulary, which, fallback in _EMBEDDING_CASES:
        tokens = torch.arange(2 * vocabulary).view(2, -1) * 3 % vocabulary
        if which == "few":
            tokens = tokens % (vocabulary // n)
        weight, starts = _numbers(vocabulary, _WIDTH, seed=40 + n), _starts(vocabulary, n)
        shards = list(weight.tensor_split(n))
        leaves = [{"tokens": tokens, "weight": shards[r], "first": torch.tensor(starts[r])} for r in range(n)]
        upstream = _numbers(*tokens.shape, _WIDTH, seed=41)
        results = _run(exercise, fn, _call_embedding, leaves, [upstream] * n, name, fallback)
        y, right = _whole(_embedded, {"tokens": tokens, "weight": weight}, upstream)
        for rank, result in enumerate(results):
            slips = _embedding_slips(tokens, shards, starts, rank, y) if n > 1 and not fallback else {}
            _output(exercise, rank, result, y, slips)
        for rank, result in enumerate(results):
            gradient, traps = right["weight"].tensor_split(n)[rank], {}
            if n > 1 and not fallback:
                traps = _row_slips(tokens, starts[rank], gradient, upstream, n)
            _gradient(exercise, rank, result["gradients"], "weight", gradient, traps)
        for rank, result in enumerate(results):
            _audit(exercise, rank, result, n, {"forward": (1, 8 * upstream.numel()), "backward": (0, 0)})
    exercise.passed("rows and gradients equal to one process to 1e-12, one all-reduce in forward, none in backward.")


def _embedding_slips(tokens: Tensor, shards: list[Tensor], starts: list[int], rank: int, y: Tensor) -> dict[str, Any]:
    n, sizes = len(shards), [len(shard) for shard in shards]

    def each(index: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Sum over the shards of the rows that each reads without a mask."""
        return sum(shards[r][index(tokens - starts[r], sizes[r])] for r in range(n))

    first, last = torch.isin(tokens, torch.tensor(starts)), torch.isin(
        tokens, torch.tensor([a + size - 1 for a, size in zip(starts, sizes, strict=True)])
    )  # fmt: skip
    mine = (tokens >= starts[rank]) & (tokens < starts[rank] + sizes[rank])
    return {
        "no-g": y * mine[..., None], "average": y / n,
        "outside": [
            each(lambda i, size: i.clamp(0, size - 1)), each(lambda i, size: i % size),
            each(lambda i, size: torch.where((i < 0) | (i >= size), 0, i)),
        ],
        "border": [
            y * ~edge[..., None] for edge in (first, last, first & (tokens > 0), last & (tokens < tokens.max()))
        ],
    }  # fmt: skip


def _row_slips(tokens: Tensor, first: int, right: Tensor, upstream: Tensor, n: int) -> dict[str, Any]:
    size, local = len(right), tokens - first
    outside = (local < 0) | (local >= size)

    def added(index: Tensor) -> Tensor:
        return torch.zeros_like(right).index_add_(0, index.flatten(), upstream.flatten(0, 1))

    last_only = torch.zeros_like(right)
    for row, gradient in zip(local.flatten().tolist(), upstream.flatten(0, 1), strict=True):
        if 0 <= row < size:
            last_only[row] = gradient
    indices = [torch.where(outside, 0, local), local.clamp(0, size - 1), local % size]
    return {
        "g-backward": n * right, "average": right / n, "mask-gradient": [added(index) for index in indices],
        "repeated": last_only,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ paper problem


@checked
def tp_traffic(fn: Callable) -> None:
    """Check ``fn(b, s, h, t, element_bytes, bandwidth, unit, directions, tflops) -> (MB, ms, share)``."""

    def slip(
        sent: Callable[[int], float] = lambda t: 8 * (t - 1) / t,
        rate: Callable[[float, str, int], float] = lambda bandwidth, unit, directions: (
            bandwidth * 1e9 / directions / (8 if unit == "Gb/s" else 1)
        ),
        work: Callable[[float, float], float] = lambda linear, scores: 3 * (linear + scores),
        gpus: Callable[[int], int] = lambda t: t,
        mega: float = 1e6, milli: float = 1e3,
        share: Callable[[float, float], float] = lambda moving, computing: moving / (moving + computing),
    ) -> Callable[..., tuple[float, float, float]]:  # fmt: skip
        def answer(
            b: int, s: int, h: int, t: int, element_bytes: int, bandwidth: float, unit: str, directions: int,
            tflops: float,
        ) -> tuple[float, float, float]:  # fmt: skip
            size = sent(t) * b * s * h * element_bytes
            moving = size / rate(bandwidth, unit, directions)
            computing = work(24 * b * s * h**2, 4 * b * s**2 * h) / (gpus(t) * tflops * 1e12)
            return size / mega, moving * milli, share(moving, computing)

        return answer

    def as_bytes(bandwidth: float, unit: str, directions: int) -> float:
        return bandwidth * 1e9 / directions

    def as_bits(bandwidth: float, unit: str, directions: int) -> float:
        return bandwidth * 1e9 / directions / 8

    def both(bandwidth: float, unit: str, directions: int) -> float:
        return bandwidth * 1e9 / (8 if unit == "Gb/s" else 1)

    paper_problem(
        "Exercise 5", fn, slip(),
        [
            (1, 2048, 12288, 8, 2, 900, "GB/s", 2, 400), (1, 2048, 12288, 8, 2, 400, "Gb/s", 1, 400),
            (1, 2048, 12288, 16, 2, 400, "Gb/s", 1, 400), (4, 1024, 2048, 2, 4, 128, "GB/s", 2, 60),
            (2, 8192, 4096, 4, 2, 800, "Gb/s", 2, 500), (1, 2048, 4096, 1, 2, 900, "GB/s", 2, 400),
        ],
        {
            "factor": slip(lambda t: 8),
            "half": slip(lambda t: 4 * (t - 1) / t),
            "quarter": slip(lambda t: 2 * (t - 1) / t),
            "all-ranks": slip(lambda t: 8 * (t - 1)),
            "megabytes": [slip(mega=1), slip(mega=2**20), slip(mega=1e9)],
            "bits": [slip(rate=as_bytes), slip(rate=as_bits)],
            "directions": slip(rate=both),
            "milliseconds": slip(milli=1),
            "compute-whole": slip(gpus=lambda t: 1),
            "compute-forward": slip(work=lambda linear, scores: linear + scores),
            "scores": slip(work=lambda linear, scores: 3 * linear),
            "ratio": slip(share=lambda moving, computing: moving / computing),
            "percent": slip(share=lambda moving, computing: 100 * moving / (moving + computing)),
        },
        HINTS["tp_traffic"], ["MB", "ms", "of the time"], tolerance=1e-3,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ sequence parallel

_SEQUENCE_CASES = (  # ranks, name, tokens of each rank
    (2, "2 tokens on each rank", 2),
    (3, "2 tokens on each rank", 2),
    (1, "4 tokens", 4),
)


def _normed_mlp(x: Tensor, gain: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(F.rms_norm(x, x.shape[-1:], gain), up)), down)


def _call_normed(fn: Callable, own: dict[str, Tensor]) -> Any:
    return fn(own["x"], own["gain"], own["up"], own["down"])


@checked
def sequence_parallel_norm(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, gain, up, down) -> y``: a norm on this rank's tokens, and an MLP on this rank's features."""
    exercise = Exercise("Exercise 6", HINTS["sequence_parallel_norm"], timeout)
    b, h, m = 2, 4, 9
    for n, name, tokens in _SEQUENCE_CASES:
        whole = {
            "x": _numbers(n * tokens, b, h, seed=50 + n), "gain": 1 + _numbers(h, seed=51, scale=0.3),
            "up": _numbers(m, h, seed=52), "down": _numbers(h, m, seed=53),
        }  # fmt: skip
        cuts = {"x": 0, "up": 0, "down": 1}
        leaves = [{k: t.tensor_split(n, cuts[k])[r] if k in cuts else t for k, t in whole.items()} for r in range(n)]
        upstream = _numbers(n * tokens, b, h, seed=54)
        ups = list(upstream.chunk(n))
        results = _run(exercise, fn, _call_normed, leaves, ups, name, None)
        y, right = _whole(_normed_mlp, whole, upstream)
        for rank, result in enumerate(results):
            _output(exercise, rank, result, y.chunk(n)[rank], _sequence_slips(leaves, whole, y, rank))
        for rank, result in enumerate(results):
            own = {k: right[k].tensor_split(n, cuts[k])[rank] if k in cuts else right[k] for k in right}
            slips = _sequence_gradient_slips(leaves, whole, upstream, rank)
            for leaf in ("down", "up", "x", "gain"):
                default = "norm-gradient" if leaf == "gain" and n > 1 else "value"
                _gradient(exercise, rank, result["gradients"], leaf, own[leaf], slips.get(leaf, {}), default)
        for rank, result in enumerate(results) if n > 1 else ():
            for way, extra in (("forward", 0), ("backward", gain_bytes := 8 * h)):
                ledger = result[way]
                what = f"{ledger.bytes('all_reduce')} bytes are all-reduced in {way}; the gain has {gain_bytes}."
                exercise.require(ledger.bytes("all_reduce") <= extra, "all-reduce", what, rank)
                size, enough = ledger.bytes(), 2 * y.nbytes + extra
                what = f"{size} bytes travel in {way}; {enough} are enough."
                exercise.require(size <= enough, "too-many-bytes", what, rank)
    exercise.passed("outputs and gradients equal to one process to 1e-12, in as many bytes as with all-reduces.")


def _sequence_slips(leaves: Leaves, whole: dict[str, Tensor], y: Tensor, rank: int) -> dict[str, Any]:
    n = len(leaves)
    if n == 1:
        return {}
    partial = _normed_mlp(**whole | {k: leaves[rank][k] for k in ("up", "down")})
    return {
        "no-gather": sum(_normed_mlp(**own) for own in leaves), "no-scatter": [partial.chunk(n)[rank], partial],
        "whole": y, "wrong-part": [part for r, part in enumerate(y.chunk(n)) if r != rank],
        "average": y.chunk(n)[rank] / n,
    }  # fmt: skip


def _sequence_gradient_slips(leaves: Leaves, whole: dict[str, Tensor], upstream: Tensor, rank: int) -> dict[str, Any]:
    n, own = len(leaves), {k: leaves[rank][k] for k in ("up", "down")}
    if n == 1:
        return {}
    masked = torch.zeros_like(upstream)
    masked.chunk(n)[rank].copy_(upstream.chunk(n)[rank])
    _, part = _whole(_normed_mlp, whole | own, upstream)
    _, few = _whole(_normed_mlp, whole | own, masked)
    slips = {k: {"scatter-backward": few[k], "average": part[k] / n} for k in own}
    return slips | {"x": {"gather-backward": part["x"].chunk(n)[rank]}}
