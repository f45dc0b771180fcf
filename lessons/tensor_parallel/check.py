"""The exercises on tensor parallelism: what each rank must find, and the usual mistakes with their hints.

Numbers are in float64, so that outputs and gradients of the ranks can be compared with one process to 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from course_utils import record
from course_utils.check import Case, Note, close, exercise, paper
from course_utils.costs import bytes_sent

from . import answers

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

# --- a layer on one rank, and the whole of it in one process


class Passes(NamedTuple):
    """The output of a layer, its arguments with their gradients, and the ledgers of forward and backward."""

    y: Any
    own: dict[str, Tensor]
    forward: Any
    backward: Any


def numbers(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(104729 + seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def part(tensors: Mapping[str, Tensor], cuts: Mapping[str, int]) -> dict[str, Tensor]:
    """What this rank has of each tensor: a part along the dimension that ``cuts`` names, or all of it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return {name: t.tensor_split(n, cuts[name])[rank] if name in cuts else t for name, t in tensors.items()}


def both_ways(
    layer: Callable, given: Mapping[str, Tensor], above: Tensor, *more: Any, residual: bool = False,
    around: AbstractContextManager | None = None,
) -> Passes:
    """Forward and backward of ``layer(*given, *more)``; with ``residual`` as a branch beside x."""
    own = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in given.items()}
    with record() as forward, around or nullcontext():
        x = {"x": own["x"] * 1.0} if residual else {}
        y = layer(*(own | x).values(), *more)
        if residual and isinstance(y, Tensor):
            y = x["x"] + y
    with record() as backward:
        if isinstance(y, Tensor) and y.shape == above.shape and y.requires_grad:
            (y * above).sum().backward()
    return Passes(y.detach() if isinstance(y, Tensor) else y, own, forward, backward)


def gradients(passes: Passes, *names: str) -> dict[str, Tensor]:
    return {name: passes.own[name].grad for name in names}


def compare(
    note: Note, found: Passes, given: Mapping[str, Tensor], y: Tensor, right: Mapping[str, Tensor],
    near: str = "float32", **keys: str,
) -> None:
    """Output, arguments and gradients; ``near`` is the hint of nearly right numbers, ``keys`` those of gradients."""

    def equal(got: Any, expected: Tensor, what: str, key: str = "value") -> None:
        note.equal(got, expected, what, near if key == "value" and close(got, expected) else key)

    note.talks([*found.forward, *found.backward], dist.get_world_size())
    equal(found.y, y, "the output")
    changed = [name for name, t in found.own.items() if not torch.equal(t.detach(), given[name])]
    note.holds(not changed, "input-changed", f"the answer changed {' and '.join(changed)}.")
    for name, expected in right.items():
        gradient = found.own[name].grad
        if note.holds(gradient is not None, keys.get(name, "no-gradient"), f"{name} has no gradient."):
            equal(gradient, expected, f"the gradient of {name}", keys.get(name, "value"))


def one_all_reduce_each_way(note: Note, found: Passes, y: Tensor) -> None:
    n = dist.get_world_size()
    size = bytes_sent("all_reduce", n, y.nbytes)
    for ledger in (found.forward, found.backward) if n > 1 else ():
        note.sent(ledger, {"all_reduce"}, calls=(1, 1), sent=(size, size))


RANK, RANKS = "dist.get_rank()", "dist.get_world_size()"
F_BOTH, G_BOTH = "with_backward(lambda x: x.view_as(x), summed)(x)", "with_backward(summed, lambda dy: dy)(x)"
SUMMED_TWICE = "lambda dy: dy  ->  summed"

CONJUGATES = {
    "no-g": ("""This is only this rank's partial sum: what its own part of the layer gives. The terms of the other ranks
        are missing.""", f"{G_BOTH}  ->  x"),
    "no-f": ("""The output is right, but the gradient of x is only this rank's part. Every rank used x, so its gradient
        is a sum over the ranks.""", f"{F_BOTH}  ->  x"),
    "g-backward": ("""The output is right, but gradients are t times too large: the gradient was summed over the ranks
        on its way back through g, although every rank already had all of it.""", SUMMED_TWICE),
    "average": ("A sum over the ranks was divided by t. Parts of a sum are added up, not averaged.",
            [f"{G_BOTH}  ->  {G_BOTH} / {RANKS}",
             f"{F_BOTH}  ->  with_backward(lambda x: x.view_as(x), lambda dy: summed(dy) / {RANKS})(x)",
             f"{G_BOTH}  ->  with_backward(summed, lambda dy: dy / {RANKS})(x)"]),
    "residual": ("""This is right until x is used a second time, as in x + layer(x). The sum over the ranks belongs to
        the branch into the layer, not to x itself.""", f"return {F_BOTH}  ->  x.register_hook(summed)\nreturn x"),
}

# --- exercise 1: an MLP


def mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


@exercise("Exercise 1", explains=["no-gradient"], cases=[
    (2, "an MLP", 4, 10, False),
    Case(2, "x + MLP(x)", (4, 10, True), "residual"),
    (3, "an inner layer of 7, in parts of 3, 2 and 2", 5, 7, False),
    (1, "x + MLP(x)", 4, 6, True),
], passed="output and gradients equal to one process to 1e-12, one all-reduce each way.")
def column_row_mlp(note, answer, h, m, residual):
    whole = {
        "x": numbers(2, 3, h, seed=1), "up": numbers(m, h, seed=10), "up_bias": numbers(m, seed=11),
        "down": numbers(h, m, seed=12), "down_bias": numbers(h, seed=13),
    }
    cuts, above = {"up": 0, "up_bias": 0, "down": 1}, numbers(2, 3, h, seed=14)
    given, alone = part(whole, cuts), both_ways(mlp, whole, above, residual=residual)
    right = part(gradients(alone, "down", "up", "up_bias", "x", "down_bias"), cuts)
    found = both_ways(answer, given, above, residual=residual)
    compare(note, found, given, alone.y, right, down_bias="bias-gradient")
    one_all_reduce_each_way(note, found, alone.y)


MLP = "g(F.linear(inner, down)) + down_bias"
MISTAKES["column_row_mlp"] = CONJUGATES | {
    "bias": ("The output contains the second bias t times: every rank added it before the sum.",
            f"{MLP}  ->  g(F.linear(inner, down, down_bias))"),
    "bias-gradient": ("""The output is right, but the gradient of the second bias is not. Every rank holds the whole
        bias and should use it in the same way, so that its gradient is whole and the same everywhere.""",
            [f"{MLP}  ->  g(F.linear(inner, down, None if {RANK} else down_bias))",
             f"{MLP}  ->  g(F.linear(inner, down, down_bias / {RANKS}))"]),
    "weights-reduced": ("""Gradients of shards were added up over the ranks, as in data parallelism. But each rank has a
        different part of the weight, whose gradient concerns nobody else.""",
            ["f(x), up, up_bias  ->  f(x), f(up), f(up_bias)", "inner, down)  ->  inner, f(down))"]),
}
RIGHT["column_row_mlp"] = {
    "a hook for f, detach for g": {
        f"return {F_BOTH}": "x = x.view_as(x)\nx.register_hook(summed)\nreturn x",
        G_BOTH: "x + (summed(x) - x).detach()",
    },
    "summed in place": f"return {MLP}  ->  y = F.linear(inner, down)\ndist.all_reduce(y)\nreturn y + down_bias",
}

# --- exercise 2: attention


def attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int, kv_heads: int) -> Tensor:
    d = len(qkv) // (heads + 2 * kv_heads)
    q, k, v = F.linear(x, qkv).unflatten(-1, (-1, d)).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(mixed.transpose(1, 2).flatten(2), out)


@exercise("Exercise 2", explains=["no-gradient"], cases=[
    (2, "4 heads", 4, 4, 3, False),
    Case(2, "x + attention(x)", (4, 4, 3, True), "residual"),
    (3, "6 heads", 6, 6, 2, False),
    Case(2, "8 q heads, 4 k/v heads", (8, 4, 2, False), "grouped"),
    Case(4, "4 q heads, 2 k/v heads", (4, 2, 3, False), "shared"),
    Case(2, "6 q heads, 3 k/v heads", (6, 3, 2, False), "shared"),
    (1, "4 q heads, 2 k/v heads", 4, 2, 3, True),
], passed="output and gradients equal to one process to 1e-12, one all-reduce each way.")
def head_attention(note, answer, heads, kv_heads, d, residual):
    n, h, length = dist.get_world_size(), heads * d, 5
    given = {
        "x": numbers(2, length, h, seed=n), "qkv": numbers(h + 2 * kv_heads * d, h, seed=20, scale=0.5),
        "out": numbers(h, h, seed=21),
    }
    above, counter = numbers(2, length, h, seed=22), FlopCounterMode(display=False)
    alone = both_ways(attention, given, above, heads, kv_heads, residual=residual)
    mine = torch.zeros(h, dtype=torch.float64)  # 1 where this rank's heads are
    mine.tensor_split(n)[dist.get_rank()].fill_(1)
    own = both_ways(attention, given | {"out": mine * given["out"]}, above, heads, kv_heads)
    right = gradients(alone, "x") | {"out": mine * alone.own["out"].grad} | gradients(own, "qkv")
    found = both_ways(answer, given, above, heads, kv_heads, residual=residual, around=counter)
    compare(note, found, given, alone.y, right)
    one_all_reduce_each_way(note, found, alone.y)
    if n > 1:
        most = 2 * 2 * length * (4 * h * h + 2 * length * h) // n
        what = "{number:,} operations in forward; {most:,} are enough for " + f"1/{n} of the heads."
        note.at_most("all-work", counter.get_total_flops(), most, what)


PRODUCTS = "(F.linear(x, blocks[some].flatten(0, 1)).unflatten(-1, (-1, d)) for some in rows)"
USED = "(mine // (heads // kv_heads)).unique(return_inverse=True)"
SERVED = "k[:, :, serve], v[:, :, serve]"
OWN_KV_HEADS = f"torch.arange(kv_heads).tensor_split({RANKS})[{RANK}]"
MISTAKES["head_attention"] = {
    "no-g": ("""The branch has f before it and g behind it: in forward g adds up the partial sums of all ranks, and in
        backward f adds up the gradients of x, and nobody else does, nor divides by t.""",
            [f"{G_BOTH}  ->  x", f"{F_BOTH}  ->  x", SUMMED_TWICE, *CONJUGATES["average"][1]]),
    "residual": CONJUGATES["residual"],
    "chunked": ("""The joint weight was cut into t parts. Its rows are all of q, then all of k, then all of v: the first
        part has no v at all.""",
            {PRODUCTS: f"(t.unflatten(-1, (-1, d)) for t in F.linear(x, qkv.chunk({RANKS})[{RANK}]).chunk(3, -1))"}),
    "scale": ("""Self-attention is causal here, and the scale of its scores comes from the square root of the size of
        one head.""", [", is_causal=True  ->  ",
             *[f"is_causal=True  ->  is_causal=True, scale={scale}" for scale in ("len(out) ** -0.5", "1.0")]]),
    "grouped": ("""This is right until there are fewer k/v heads than q heads. qkv then has heads + 2 · kv_heads heads,
        and heads // kv_heads q heads share one k/v head.""",
            {PRODUCTS: f"(F.linear(x, w.chunk({RANKS})[{RANK}]).unflatten(-1, (len(mine), -1)) for w in qkv.chunk(3))",
             SERVED: "k, v"}),
    "kv-order": ("""The k/v heads are there, but in the wrong order. Neighbours share one: q head i uses k/v head i //
        (heads // kv_heads). repeat_interleave does that, repeat does not.""",
            [f"{USED}  ->  {OWN_KV_HEADS}.repeat(heads // kv_heads).unique(return_inverse=True)",
             f"{USED}  ->  (mine % kv_heads).unique(return_inverse=True)"]),
    "shared": ("""This is right until ranks share a k/v head, because there are fewer of them than ranks, or because the
        number of ranks does not divide them. Each of these ranks keeps a copy: a rank's q heads tell which k/v heads it
        needs.""", f"{USED}  ->  {OWN_KV_HEADS}.repeat_interleave(heads // kv_heads).unique(return_inverse=True)"),
    "all-work": ("The result is right, but this rank computes more than its own heads need.",
            {"q, k, v = (F": "every = F.linear(x, qkv).unflatten(-1, (-1, d))\nq, k, v = (F",
             PRODUCTS: "(every[:, :, some] for some in rows)"}),
}
RIGHT["head_attention"] = {
    "k and v once for each q head": {
        f"used, serve = {USED}": "used = mine // (heads // kv_heads)", SERVED: "k, v",
    },
    "one product for q, k and v": {
        PRODUCTS: "F.linear(x, torch.cat([blocks[some].flatten(0, 1) for some in rows]))"
        ".unflatten(-1, (-1, d)).split([*map(len, rows)], 2)",
    },
}

# --- exercise 3: the loss


@exercise("Exercise 3", cases=[
    (2, "a vocabulary of 12", 12, 0, 0),
    (2, "logits about 1,000", 12, 1000, 0),
    (2, "logits about -1,000", 12, -1000, 0),
    (2, "one logit of 2,000 among small ones", 12, 0, 2000),
    Case(3, "a vocabulary of 13, in parts of 5, 4 and 4", (13, 3, 0), "uneven"),
    (4, "a vocabulary of 14, in parts of 4, 4, 3 and 3", 14, 3, 0),
    (1, "a vocabulary of 12", 12, 1000, 0),
], passed="loss and gradients equal to one process to 1e-12, 3 numbers a token in two messages.")
def vocab_parallel_loss(note, answer, vocabulary, level, more):
    rank, n = dist.get_rank(), dist.get_world_size()
    starts = [int(words[0]) for words in torch.arange(vocabulary).tensor_split(n)]
    ends = [start - 1 for start in (*starts[1:], vocabulary)]
    targets = torch.tensor([*starts, *ends, vocabulary // 3])
    logits = level + numbers(len(targets), vocabulary, seed=60 + n, scale=2.0)
    logits[0, 3] += more
    whole, above = {"logits": logits, "targets": targets}, torch.tensor(3.0, dtype=torch.float64)
    given, alone = part(whole, {"logits": 1}), both_ways(F.cross_entropy, whole, above)
    found = both_ways(answer, given, above, starts[rank])
    finite = not isinstance(found.y, Tensor) or bool(found.y.isfinite().all())
    note.holds(finite, "overflow", "the loss is not finite.")
    compare(note, found, given, alone.y, part(gradients(alone, "logits"), {"logits": 1}))
    if n > 1:
        entries, one = [*found.forward, *found.backward], bytes_sent("all_reduce", n, 8 * len(targets))
        note.sent(entries, sent=(one, 3 * one), too_many_bytes="gathered")
        note.sent(entries, calls=(1, 2))


LARGEST, MAXIMUM = "largest = logits.detach().amax(1)", "dist.all_reduce(largest, op=dist.ReduceOp.MAX)"
SUMS, LOSS = "g(torch.stack([shifted.exp().sum(1), target]))", "(total.log() - target).mean()"
TARGET, PLACE = "target = torch.where(here, read, 0)", "torch.where(here, local, 0)"
ADDED_AGAIN = {"read = shifted": "read = logits", "total.log()": "total.log() + largest"}


def either_way(edit: dict[str, str]) -> list[dict[str, str]]:
    """A mistake of a loss that subtracts the maximum from all logits, and of one that adds it again."""
    return [edit, edit | ADDED_AGAIN]


MISTAKES["vocab_parallel_loss"] = {
    "overflow": ("""The result is not finite: exp of a large number overflows, and exp of a very negative one is 0. Only
        the largest logit of a token, over all ranks, keeps every exponent at zero or below and one of them at zero.""",
            [f"{LARGEST}  ->  largest = logits.new_zeros(len(logits))",
             {"detach().amax(1)": "detach().mean(1)", "ReduceOp.MAX": "ReduceOp.AVG"}]),
    "local-max": ("""Each rank used the maximum, or the sum of exponentials, of its own shard. Both go over the whole
        vocabulary.""", [*either_way({MAXIMUM: "pass"}), f"{SUMS}  ->  shifted.exp().sum(1), g(target)",
             f"return {LOSS}  ->  own = shifted.exp().sum(1).log()\n"
             "return (own + (total.log() - own).detach() - target).mean()"]),
    "outside": ("""Exactly one rank has the word of a token, and the others contribute zero. A shard has the words from
        first up to, but not including, first plus its size.""", [*either_way({TARGET: "target = read"}),
             *either_way({TARGET: "target = read", PLACE: "local.clamp(0, logits.shape[1] - 1)"}),
             *either_way({TARGET: "target = read", PLACE: "(local % logits.shape[1])"}),
             *either_way({"local >= 0": "local > 0"}),
             *either_way({"local < logits.shape[1]": "local <= logits.shape[1]",
                          "local, 0)[": "local.clamp(max=logits.shape[1] - 1), 0)["})]),
    "mean": ("The loss is the mean over the tokens. What is summed over the ranks is not divided by their number.",
            [".mean()  ->  .sum()", *either_way({SUMS: f"{SUMS} / {RANKS}"}),
             f"lambda dy: dy  ->  lambda dy: dy / {RANKS}"]),
    "g-backward": ("""The loss is right, but its gradient is t times too large: it was summed over the ranks on its way
        back. The loss is the same on every rank, so each already has its whole gradient.""", SUMMED_TWICE),
    "target-gradient": ("""The loss is right, but a part of its gradient is missing, or one too much: it is the softmax,
        minus 1 at the target on the rank that has it. The maximum only shifts the numbers, and autograd need not know
        of it.""", [", target]))  ->  , target.detach()]))",
             "([shifted.exp().sum(1)  ->  ([shifted.exp().sum(1).detach()",
             "logits.detach().amax(1)  ->  logits.amax(1)"]),
    "uneven": ("This is right until the number of ranks does not divide the vocabulary, so that shards differ in size.",
            f"targets - first  ->  targets - {RANK} * logits.shape[1]"),
    "gathered": ("""The result is right, but as many bytes travel as all the logits have. A few numbers per token are
        enough.""",
            f"{LARGEST}  ->  parts = [torch.empty_like(logits) for _ in range({RANKS})]\n"
            f"dist.all_gather(parts, logits.detach().contiguous())\n{LARGEST}"),
}
RIGHT["vocab_parallel_loss"] = {
    "one-hot, asynchronous maximum": {
        MAXIMUM: "work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)\nlocal = targets - first\n"
        "here = (local >= 0) & (local < logits.shape[1])\n"
        f"hot = F.one_hot({PLACE}, logits.shape[1]) * here[:, None]\nwork.wait()",
        TARGET: "target = (shifted * hot).sum(1)",
    },
    "the maximum added again": ADDED_AGAIN,
}

# --- exercise 4: on paper

MISTAKES["tp_traffic"] = {
    "factor": ("""This is not the factor (t-1)/t of one GPU: with one GPU nothing would be sent, and all GPUs together
        send t times as much.""", ["2 * (t - 1) / t  ->  2", "(t - 1) / t  ->  (t - 1)"]),
    "half": ("""That is half or a quarter of the traffic. A layer has four all-reduces in a step, for attention and MLP,
        forward and backward; each sends 2(t-1)/t of its tensor; and an element has more than one byte.""",
            ["4 * 2 * (t  ->  2 * 2 * (t", "h * element_bytes  ->  h", "4 * 2 * (t  ->  2 * (t"]),
    "megabytes": ("The docstring asks for MB, 10⁶ bytes, and for milliseconds.", ["size / 1e6  ->  size",
             "size / 1e6  ->  size / 2**20", "size / 1e6  ->  size / 1e9", "moving * 1e3  ->  moving"]),
    "bits": ("1 GB/s is 8 Gb/s. The argument unit says which of the two the bandwidth is in.",
            ['(8 if unit == "Gb/s" else 1)  ->  1', '(8 if unit == "Gb/s" else 1)  ->  8']),
    "directions": ("Here the bandwidth counts both directions together. What one GPU sends uses only one of them.",
            "/ directions  ->  "),
    "compute-whole": ("""Each GPU computes 1/t of the layer, and backward takes twice the operations of forward: three
        times in all.""", ["(t * tflops  ->  (tflops", "3 * (24  ->  (24"]),
    "scores": ("The operations of the attention scores are missing: 4·b·s²·h more in forward.",
            "+ 4 * b * s**2 * h  ->  "),
    "ratio": ("The share is communication over communication and computation together, as a number from 0 to 1.",
            ["moving / (moving + computing)  ->  moving / computing",
             "moving / (moving + computing)  ->  100 * moving / (moving + computing)"]),
}
RIGHT["tp_traffic"] = {
    "a list": {"return size": "return [size", "(moving + computing)": "(moving + computing)]"},
    "everything in bits": {
        '(8 if unit == "Gb/s" else 1)': '(1 if unit == "Gb/s" else 1 / 8)', "moving = size": "moving = 8 * size",
    },
}

tp_traffic = paper(
    "Exercise 4", answers.tp_traffic, MISTAKES["tp_traffic"], units=["MB", "ms", "of the time"], tolerance=1e-3, cases=[
        (1, 2048, 12288, 8, 2, 900, "GB/s", 2, 400), (1, 2048, 12288, 8, 2, 400, "Gb/s", 1, 400),
        (1, 2048, 12288, 16, 2, 400, "Gb/s", 1, 400), (4, 1024, 2048, 2, 4, 128, "GB/s", 2, 60),
        (2, 8192, 4096, 4, 2, 800, "Gb/s", 2, 500), (1, 2048, 4096, 1, 2, 900, "GB/s", 2, 400),
    ],
)

# --- exercise 5: a norm on a part of the sequence


def normed_mlp(x: Tensor, gain: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(F.rms_norm(x, x.shape[-1:], gain), up)), down)


def share_of_scatters(ledger: Iterable[Any]) -> list[Any]:
    """The entries, scatters with a rank's share of the bytes: torch makes an all-to-all of one from each rank."""
    return [replace(e, bytes=e.bytes // len(e.ranks)) if e.op == "scatter" else e for e in ledger]


@exercise(
    "Exercise 5", cases=[(2, "2 tokens on each rank", 2), (3, "2 tokens on each rank", 2), (1, "4 tokens", 4)],
    explained={"A view was created in no_grad mode": "no-gradient"},  # of an all-gather that autograd would record
    passed="outputs and gradients equal to one process to 1e-12, in as many bytes as with all-reduces.",
)
def sequence_parallel_norm(note, answer, tokens):
    n, b, h, m = dist.get_world_size(), 2, 6, 9  # parts of m differ from h: tokens and features differ in bytes
    whole = {
        "x": numbers(n * tokens, b, h, seed=50 + n), "gain": 1 + numbers(h, seed=51, scale=0.3),
        "up": numbers(m, h, seed=52), "down": numbers(h, m, seed=53),
    }
    cuts, all_above = {"x": 0, "up": 0, "down": 1}, numbers(n * tokens, b, h, seed=54)
    given, alone, kept = part(whole, cuts), both_ways(normed_mlp, whole, all_above), {}
    y, above = part({"y": alone.y, "above": all_above}, {"y": 0, "above": 0}).values()

    def keep(t: Tensor) -> Tensor:
        if type(t) is Tensor:  # a subclass may have no memory of its own
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    found = both_ways(answer, given, above, around=hooks)
    right = part(gradients(alone, "down", "up", "x", "gain"), cuts)
    compare(note, found, given, y, right, near="value", gain="norm-gradient")  # a wrong eps is near, too
    if n == 1:
        return
    for ledger, gain in ((found.forward, 0), (found.backward, whole["gain"].nbytes)):
        entries, size = share_of_scatters(ledger), alone.y.nbytes
        note.sent([e for e in entries if e.op == "all_reduce"], carried=gain, too_many_bytes="all-reduce")
        note.sent(entries, carried=2 * size + n * gain, sent=(bytes_sent("all_reduce", n, size), None))
    copies = sum(size >= alone.y.nbytes for size in kept.values())
    note.at_most("whole-norm", copies, 1, "{number} tensors of all tokens are kept for backward; 1 is enough.")


IN, OUT = "with_backward(gathered, scattered)", "with_backward(scattered, gathered)"
OWN, NORM = f".chunk({RANKS})[{RANK}]", "F.rms_norm(x, x.shape[-1:], f(gain))"
MISTAKES["sequence_parallel_norm"] = {
    "no-gather": ("""The MLP saw only this rank's tokens. Its weights are cut over the ranks, so each rank needs all
        tokens to contribute its part.""", {f"{IN}({NORM})": f"f({NORM})", f"{OUT}(y)": "g(y)"}),
    "no-scatter": ("""The partial sums of all ranks are added up, not averaged, and of the sums this rank keeps the rows
        of its own tokens.""", [f"{OUT}(y)  ->  y{OWN}", f"{OUT}(y)  ->  y", f"{OUT}(y)  ->  g(y)",
             f"{OUT}(y)  ->  {OUT}(y) / {RANKS}",
             f"{OUT}  ->  with_backward(scattered, lambda dy: gathered(dy) / {RANKS})"]),
    "eps": ("The norm has another eps than that of F.rms_norm(x, x.shape[-1:], gain).",
            [f"f(gain))  ->  f(gain), {eps})" for eps in ("1e-5", "1e-6", "1e-8")]),
    "gather-backward": ("""The output is right, but the gradient of x is only what this rank's part of the MLP gives.
        Every rank used all tokens, so the gradient of the gathered ones is a sum over the ranks, of which each needs
        its own part.""", f"{IN}  ->  with_backward(gathered, lambda dy: dy{OWN})"),
    "scatter-backward": ("""The output is right, but the gradients of the MLP's shards know only this rank's tokens.
        Each rank has the gradient of its own tokens, and a shard needs those of all.""",
            {f"return {OUT}": "def alone(dy):\n    whole = torch.zeros_like(y)\n"
             f"    whole{OWN}.copy_(dy)\n    return whole\n\nreturn with_backward(scattered, alone)"}),
    "norm-gradient": ("""The gradient of the norm's gain is not that of all tokens. The gain is whole on every rank, but
        each rank used it for only a part of them.""", "f(gain)  ->  gain"),
    "all-reduce": ("""The result is right, but more is all-reduced than the gain's gradient. Where a rank needs only its
        part of a sum, or already holds its part of a whole, an all-reduce does twice the work.""",
            [f"{OUT}  ->  with_backward(lambda y: summed(y){OWN}.clone(), gathered)",
             f"{IN}  ->  with_backward(gathered, lambda dy: summed(dy){OWN}.clone())"]),
    "whole-norm": ("""The result is right, but this rank keeps more than one tensor of all tokens for backward, as it
        does if it normalizes the tokens of all ranks. For the norm its own tokens are enough.""",
            f"{IN}({NORM})  ->  F.rms_norm({IN}(x), x.shape[-1:], f(gain))"),
}
RIGHT["sequence_parallel_norm"] = {
    "all-to-all, summed here; gradients of the gain gathered": {
        "dist.reduce_scatter_single(part, x.contiguous())\n    return part": "pieces = torch.empty_like(x)\n"
        "dist.all_to_all_single(pieces, x.contiguous())\n"
        "return pieces.unflatten(0, (dist.get_world_size(), len(part))).sum(0)",
        "f(gain)": "with_backward(torch.clone, lambda dy: gathered(dy[None]).sum(0))(gain)",
    },
    "torch.distributed.nn, whose gradient is one scatter from each rank": {
        f"{IN}({NORM})": f"torch.cat(all_gather({NORM}))",
        "tokens =": "from torch.distributed.nn.functional import all_gather\n\ntokens =",
    },
}
