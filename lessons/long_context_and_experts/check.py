"""Checks of the exercises on long sequences and experts: results, gradients, and the bytes of each way.

What the ranks compute together is a program for one process, such as `_ring`; usual slips are edits of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course_utils.check import (
    Exercise,
    Outcome,
    checked,
    close,
    load_hints,
    paper_problem,
    show,
    whole_numbers,
)
from course_utils.check.compare import listed
from course_utils.check.edits import edited_function

__all__ = [
    "HINTS", "balanced_step", "expert_layer", "expert_traffic", "merge", "ring_attention", "ring_hides", "ulysses",
    "zigzag",
]

HINTS = load_hints(__file__)
_INF = float("inf")

Piece = tuple[Tensor, Tensor, Tensor]
Slips = dict[str, Any]  # hint key to an edit of a program, or a list of several


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(15485863 + seed), dtype=torch.float64)


def _slips(program: Callable, slips: Slips, *args: Any) -> dict[str, list]:
    """What the slips of a program give."""
    return {key: [edited_function(program, slip)(*args) for slip in listed(some)] for key, some in slips.items()}


# ------------------------------------------------------------------------------------------------ runs on ranks


def _both_ways(fn: Callable, inputs: list[Any], args: tuple) -> Outcome:
    """Forward of one rank, and backward if there is a gradient to begin with; ledgers of both."""
    import torch.distributed as dist

    from course_utils import record

    (start, upstream), (call,) = inputs[dist.get_rank()], args
    inputs[:] = []  # what other ranks hold has to be sent
    own = [t.clone().requires_grad_(upstream is not None and t.is_floating_point()) for t in start]
    with record() as forward:
        y = call(fn, *own)
    with record() as backward:
        if isinstance(y, Tensor) and y.requires_grad and upstream is not None and y.shape == upstream.shape:
            (y * upstream).sum().backward()
    changed = any(not torch.equal(t.detach(), old) for t, old in zip(own, start, strict=True))
    gradients = [t.grad for t in own if t.is_floating_point()]
    return Outcome((y.detach() if isinstance(y, Tensor) else y, gradients), (forward, backward), changed, None)


def _plain(fn: Callable, *leaves: Tensor) -> Any:
    return fn(*leaves)


def _compare(
    exercise: Exercise, outcomes: list[Outcome], program: Callable, slips: Slips, args: tuple,
    gradients: Sequence[dict[str, Tensor]] = (), default: str | None = None,
) -> None:
    """Refuse outputs that are not ``program(*args, rank)``, changed arguments, and then wrong gradients, by rank."""
    for rank, outcome in exercise.each(outcomes):
        got, right = outcome.result[0], program(*args, rank).detach()
        if not close(got, right):
            traps = _slips(program, slips, *args, rank) if len(outcomes) > 1 else {}
            formed = default and isinstance(got, Tensor) and got.shape == right.shape
            exercise.equal(rank, got, right, traps | ({default: got} if formed else {}), what="the output")
        exercise.require(not outcome.before, "input-changed", "the output is right, but the arguments were changed.")
    exercise.fallback = None
    for rank, outcome in exercise.each(outcomes if gradients else []):
        for got, (name, right) in zip(outcome.result[1], gradients[rank].items(), strict=True):
            exercise.require(got is not None, "no-gradient", f"{name} has no gradient.")
            exercise.equal(rank, got, right, what=f"the gradient of {name}")


# ------------------------------------------------------------------------------------------------ pieces


def _piece(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Piece:
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~keep, -_INF)
    m = scores.amax(-1, keepdim=True)
    p = torch.where(keep, torch.exp(scores - m), 0)
    return m, p.sum(-1, keepdim=True), p @ v


def _merged(a: Piece, b: Piece) -> Piece:
    m = torch.maximum(a[0], b[0])
    fa, fb = (torch.where(one == -_INF, 0, torch.exp(one - m)) for one in (a[0], b[0]))
    return m, fa * a[1] + fb * b[1], fa * a[2] + fb * b[2]


_ALL, _NONE = (0, 0, 0), (9, 9, 9)  # of three queries, the first key that each sees
_MERGES = (  # name, what the queries see of the first and of the second piece, scale of the scores, fallback
    ("all queries see all keys", _ALL, _ALL, 1.0, None),
    ("scores in the thousands", _ALL, _ALL, 3000.0, "overflow"),
    ("query 1 sees no key of the second piece", _ALL, (0, 9, 2), 1.0, "no-key"),
    ("queries 0 and 2 see no key of the first piece", (9, 1, 9), _ALL, 1.0, "no-key"),
    ("query 1 sees no key at all", (0, 9, 9), (1, 9, 0), 1.0, "no-key"),
    ("no query sees a key of the first piece", _NONE, _ALL, 1.0, "no-key"),
)


@checked
def merge(fn: Callable) -> None:
    """Check ``fn(first, second) -> (m, l, o)``, the merge of two pieces of attention."""
    exercise = Exercise("Exercise 1", HINTS["merge"])
    for number, (exercise.case, *sees, scale, fallback) in enumerate(_MERGES):
        q, k, v = (_numbers(2, tokens, 4, seed=10 * number + tokens) for tokens in (3, 8, 8))
        q, keep = scale * q, [torch.arange(4) >= torch.tensor(first)[:, None] for first in sees]
        pieces = [_piece(q, k[:, s], v[:, s], kept) for s, kept in zip((slice(4), slice(4, 8)), keep, strict=True)]
        before = [t.clone() for one in pieces for t in one]
        got, right = exercise.call(fn, *pieces), _piece(q, k, v, torch.cat(keep, 1))
        formed = isinstance(got, tuple | list) and len(got) == 3 and all(isinstance(t, Tensor) for t in got)
        exercise.require(formed, "form", f"the function returned {show(got)}.")
        for name, one, expected in zip(("m", "l", "o"), got, right, strict=True):
            wrong = one.shape == expected.shape and (one.isnan() | one.isinf() & expected.isfinite()).any()
            exercise.fallback = fallback if wrong else None
            exercise.equal(None, one, expected, {} if wrong else _merge_slips(name, pieces, right), what=name)
        same = all(map(torch.equal, (t for one in pieces for t in one), before))
        exercise.require(same, "input-changed", "the result is right, but the pieces were changed.")
    print("Exercise 1 passed: two pieces are one, with large scores and with queries that see no key.")


def _merge_slips(name: str, pieces: Sequence[Piece], right: Piece) -> dict[str, Any]:
    (m1, l1, o1), (m2, l2, o2) = pieces
    f1, f2 = torch.exp(m1 - right[0]), torch.exp(m2 - right[0])
    return {
        "m": {"maximum": [m1 + m2, torch.minimum(m1, m2), m1, m2, torch.full_like(m1, right[0].max())]},
        "l": {"rescale-l": [l1 + l2, l1 / f1 + l2 / f2]},
        "o": {"rescale-o": [o1 + o2, o1 / f1 + o2 / f2, f1 * o1 + o2, o1 + f2 * o2],
              "divided": [right[2] / right[1], o1 / l1 + o2 / l2]},
    }[name]


# ------------------------------------------------------------------------------------------------ zig-zag


def _zigzag(length: int, n: int) -> list[Tensor]:
    runs = torch.arange(length).tensor_split(2 * n)
    return [torch.cat([runs[r], runs[2 * n - 1 - r]]) for r in range(n)]


@checked
def zigzag(fn: Callable) -> None:
    """Check ``fn(length, n) -> positions``, a tensor of int64 for each of n ranks."""
    exercise = Exercise("Exercise 2", HINTS["zigzag"])
    for length, n in ((64, 4), (16, 2), (24, 3), (8, 1), (10, 2), (10, 4), (53, 4), (101, 8)):
        exercise.case = f"{length} tokens on {n} ranks"
        exercise.fallback = "uneven" if length % (2 * n) else None
        got = exercise.call(fn, length, n)
        rows = [whole_numbers(one) for one in got] if isinstance(got, list | tuple) else []
        exercise.require(len(rows) == n and None not in rows, "form", f"the function returned {show(got)}.")
        held = sorted(p for row in rows for p in row)
        usual = {"contiguous": torch.arange(length).chunk(n), "striped": [torch.arange(r, length, n) for r in range(n)],
                 "mirror": [torch.cat(torch.arange(length).tensor_split(2 * n)[r::n]) for r in range(n)]}
        for key, orders in usual.items() if n > 1 else ():
            same = len(orders) == n and all(order.tolist() == row for order, row in zip(orders, rows, strict=True))
            exercise.require(not same, key, f"the ranks have {_pairs(rows)} pairs.")
        odd = [p for p in range(length) if held.count(p) != 1] or [p for p in held if not 0 <= p < length]
        exercise.require(not odd, exercise.fallback or "once", f"position {odd[:1]} is not held exactly once.")
        for _, row in exercise.each(rows):
            exercise.require(row == sorted(row), "order", f"the positions are {row[:8]}…, not in ascending order.")
            ends = [i for i in range(1, len(row)) if row[i] - row[i - 1] != 1]
            runs = [b - a for a, b in zip([0, *ends], [*ends, len(row)], strict=True)]
            exercise.require(len(runs) <= 2, "runs", f"the positions are {len(runs)} runs: {str(row)[:60]}…")
            short = length // (2 * n)  # two neighbors look like one run of twice the length
            fit = all(0 <= run - short * parts <= parts for run in runs for parts in [3 - len(runs)])
            exercise.require(fit, "uneven", f"the runs have {runs} tokens, and not {short} or {short + 1}.")
        spread = max(_pairs(rows)) - min(_pairs(rows))  # a token more in some runs makes up to 4 · length pairs
        most = 4 * length if length % (2 * n) else 0
        exercise.require(spread <= most, "balance", f"the ranks have {_pairs(rows)} pairs.")
    print("Exercise 2 passed: with 64 tokens on 4 ranks 520 pairs each, where contiguous parts have 136 to 904.")


def _pairs(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(p + 1 for p in row) for row in rows]


# ------------------------------------------------------------------------------------------------ ring

_REPEATED = "k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)"  # in both programs
_TILED = {_REPEATED: "k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)"}


def _ring(q: Tensor, k: Tensor, v: Tensor, order: list[Tensor], r: int) -> Tensor:
    """The output of rank r; `_RING_SLIPS` edits this program."""
    n, total, group = len(order), None, q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    for step in range(n):
        mine, theirs = order[r], order[(r - step) % n]
        keep = mine[:, None] >= theirs
        part = _piece(q[:, :, mine], k[:, :, theirs], v[:, :, theirs], keep)
        total = part if total is None else _merged(total, part)
    m, weights, o = total
    return o / weights


_KEEP = "keep = mine[:, None] >= theirs"
_RING_SLIPS: Slips = {
    "positions": f"{_KEEP}  ->  keep = mine[:, None] >= mine",
    "not-causal": f"{_KEEP}  ->  keep = mine[:, None] >= 0 * theirs",
    "future": [f"{_KEEP}  ->  keep = mine[:, None] <= theirs", f"{_KEEP}  ->  keep = mine[:, None] > theirs"],
    "own-block": "range(n)  ->  range(1, n)",
    "last-block": "range(n)  ->  range(n - 1)",
    "rescale": "_merged(total, part)  ->  tuple(a + b for a, b in zip(total, part))",
    "divided": "o / weights  ->  o",
    "kv-order": _TILED,
}
_RINGS = (  # name, heads, KV heads, positions of each rank
    ("contiguous tokens", 2, 2, torch.arange(16).chunk(2)),
    ("zig-zag, 4 heads, 2 KV heads", 4, 2, _zigzag(32, 4)),
    ("contiguous tokens, 4 heads, 1 KV head", 4, 1, torch.arange(24).chunk(4)),
    ("tokens in any order", 2, 2, (torch.arange(21) * 8 % 21).chunk(3)),
    ("all tokens", 2, 1, torch.arange(8).chunk(1)),
)


@checked
def ring_attention(fn: Callable) -> None:
    """Check ``fn(q, k, v, positions) -> o``: causal attention of a rank's queries to the tokens of all ranks."""
    exercise = Exercise("Exercise 3", HINTS["ring_attention"], program=_both_ways)
    for name, heads, kv_heads, order in _RINGS:
        n, length = len(order), sum(map(len, order))
        q, k, v = (_numbers(2, h, length, 4, seed=30 + i) for i, h in enumerate((heads, kv_heads, kv_heads)))
        inputs = [((*(t[:, :, mine] for t in (q, k, v)), mine.clone()), None) for mine in order]
        outcomes = exercise.run(fn, inputs, _plain, case=name)
        _compare(exercise, outcomes, _ring, _RING_SLIPS, (q, k, v, order))
        block, positions = 2 * k.nbytes // n, order[0].nbytes
        for rank, outcome in exercise.each(outcomes if n > 1 else []):
            ledger, hops = outcome.ledger[0], n - 1
            limits = {"calls": {"send": 3 * hops}, "sent": (hops * block, hops * (block + positions))}
            peers = {entry.peer for entry in ledger if entry.op == "send"}
            apart = ledger.count() > 0 and peers not in ({(rank + 1) % n}, {(rank - 1) % n})
            keys = {"other-calls": "gathered", "too-many-calls": "extra-hop",
                    "too-many-bytes": "heads-sent" if heads > kv_heads else "extra-hop"}
            exercise.audit(ledger, {"send", "recv"}, keys=keys, **limits)
            exercise.require(not apart, "neighbor", f"this rank sends to ranks {sorted(peers)}.")
    exercise.passed("equal to one process in every order of the tokens, with N − 1 messages of K, V and positions.")


# ------------------------------------------------------------------------------------------------ Ulysses


def _ulysses(q: Tensor, k: Tensor, v: Tensor, n: int, r: int) -> Tensor:
    """The output of rank r; `_ULYSSES_SLIPS` edits this program."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return o.chunk(n, 2)[r]


_COPIED = """copies = math.lcm(n, k.shape[1]) // k.shape[1]
k, v = (t.repeat(1, copies, 1, 1).repeat_interleave(group // copies, 1) for t in (k, v))"""
_LOCAL = "k.repeat_interleave(group, 1).chunk(n, 2)[r], v.repeat_interleave(group, 1).chunk(n, 2)[r]"
_ULYSSES_SLIPS: Slips = {
    "not-causal": "is_causal=True  ->  is_causal=False",
    "kv-order": [_TILED, {f"k, v = {_REPEATED}": _COPIED}],
    "local": {_REPEATED: _LOCAL, "(q, k": "(q.chunk(n, 2)[r], k", "o.chunk(n, 2)[r]": "o"},
    "head-order": "return o  ->  return o.unflatten(1, (n, -1)).transpose(1, 2).flatten(1, 2)",
}
_ULYSSES = (  # ranks, heads, KV heads, fallback
    (2, 4, 4, None), (2, 8, 4, "grouped"), (4, 8, 4, None), (4, 8, 2, "few-heads"), (2, 6, 3, "few-heads"),
    (1, 4, 2, None),
)


@checked
def ulysses(fn: Callable) -> None:
    """Check ``fn(q, k, v) -> o``: causal attention by all-to-alls, with gradients."""
    exercise = Exercise("Exercise 4", HINTS["ulysses"], program=_both_ways)
    for n, heads, kv_heads, fallback in _ULYSSES:
        q, k, v = (_numbers(2, h, 3 * n, 4, seed=60 + i) for i, h in enumerate((heads, kv_heads, kv_heads)))
        above = _numbers(*q.shape, seed=90).chunk(n, 2)
        inputs = list(zip(zip(*(t.chunk(n, 2) for t in (q, k, v)), strict=True), above, strict=True))
        case = f"{heads} heads, {kv_heads} KV heads"
        outcomes = exercise.run(fn, inputs, _plain, case=case, fallback=fallback, errors="non-empty|chunk|match")
        for _, outcome in exercise.each(outcomes if n > 1 else []):
            turned = isinstance(outcome.result[0], Tensor) and outcome.result[0].shape == (2, heads // n, 3 * n, 4)
            exercise.require(not turned, "not-back", "the output has all tokens of some heads.")
        whole = [t.requires_grad_() for t in (q, k, v)]
        found = torch.autograd.grad(_ulysses(*whole, 1, 0), whole, torch.cat(above, 2))
        shares = [dict(zip("qkv", each, strict=True)) for each in zip(*(g.chunk(n, 2) for g in found), strict=True)]
        _compare(exercise, outcomes, _ulysses, _ULYSSES_SLIPS, (*whole, n), shares)
        least, copies = 2 * (q.nbytes + k.nbytes) // n, math.lcm(n, kv_heads) // kv_heads
        most = 2 * (q.nbytes + copies * k.nbytes) // n
        for _, outcome in exercise.each(outcomes):
            for way, ledger in zip(("forward", "backward"), outcome.ledger, strict=True):
                keys = {"other-calls": "gathered", "too-many-bytes": "copies"}
                exercise.audit(ledger, {"all_to_all"}, calls=4, carried=(least, most), where=f"in {way}, ", keys=keys)
    exercise.passed("output and gradients equal to one process, in four all-to-alls each way.")


# ------------------------------------------------------------------------------------------------ experts


def _ffn(rows: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return F.gelu(rows @ w1) @ w2


def _experts(
    xs: list[Tensor], choices: list[Tensor], weights: list[Tensor], w1: Tensor, w2: Tensor, capacity: int | None, r: int
) -> Tensor:
    """The output of rank r; `_EXPERT_SLIPS` edits this program."""
    x, k, y = xs[r], choices[r].shape[1], torch.zeros_like(xs[r])
    flats = [choice.flatten() for choice in choices]
    for e in range(len(w1)):
        pairs = (flats[r] == e).nonzero()[:capacity, 0]
        scale = weights[r].flatten()[pairs, None]
        y = y.index_add(0, pairs // k, scale * _ffn(x[pairs // k], w1[e], w2[e]))
    return y


_KEPT = "[:capacity, 0]"
_EXPERT_SLIPS: Slips = {
    "unweighted": "scale * _ffn  ->  _ffn",
    "one-result": "y.index_add  ->  y.index_copy",
    "weighted-before": "scale * _ffn(x[pairs // k]  ->  _ffn(scale * x[pairs // k]",
}
_CAPACITY_SLIPS: Slips = {
    "not-dropped": f"{_KEPT}  ->  [:, 0]",
    "last-kept": f"{_KEPT}  ->  [-capacity:, 0]",
    "all-ranks": f"{_KEPT}  ->  [: max(0, capacity - sum(int((flat == e).sum()) for flat in flats[:r])), 0]",
    "per-rank": f"{_KEPT}  ->  [: capacity * len(xs) // len(w1), 0]",
}
_EXPERTS = (  # tokens of each rank, name, experts, experts a token, largest part of which is chosen, capacity, fallback
    ((6, 6), "6 tokens each, 1 expert a token", 4, 1, 4, None, None),
    ((5, 3, 7), "5, 3 and 7 tokens, 2 experts a token", 6, 2, 6, None, None),
    ((4, 2, 3), "1 expert on each rank", 3, 2, 3, None, "experts-per-rank"),
    ((5, 4), "experts 2 and 3 without tokens", 4, 1, 2, None, "no-tokens"),
    ((4, 0, 3), "rank 1 without tokens", 3, 2, 3, None, "no-tokens"),
    ((7, 6), "a capacity of 2", 4, 2, 3, 2, "capacity"),
    ((5,), "5 tokens", 3, 2, 3, None, None),
)


def _with_experts(n_experts: int, capacity: int | None, fn: Callable, *leaves: Tensor) -> Any:
    x, choice, weight, w1, w2 = leaves
    more = () if capacity is None else (capacity,)
    return fn(x, choice, weight, lambda i, rows: _ffn(rows, w1[i], w2[i]), n_experts, *more)


@checked
def expert_layer(fn: Callable) -> None:
    """Check ``fn(x, chosen, weights, expert, n_experts, capacity=None) -> y``, with gradients."""
    explained = {"plit sizes": "splits", "different sizes": "splits"}
    explained |= {f" number {call};": "cut-graph" for call in (4, 5)}  # those of backward
    exercise = Exercise("Exercise 5", HINTS["expert_layer"], program=_both_ways, explained=explained)
    for tokens, name, experts, k, used, capacity, fallback in _EXPERTS:
        n = len(tokens)
        xs = [_numbers(t, 3, seed=100 + r) for r, t in enumerate(tokens)]
        choices = [_numbers(t, used, seed=110 + r).topk(k, 1).indices for r, t in enumerate(tokens)]
        weights = [_numbers(t, k, seed=120 + r).sigmoid() for r, t in enumerate(tokens)]
        w1, w2 = _numbers(experts, 3, 5, seed=130), _numbers(experts, 5, 3, seed=131)
        above = [_numbers(t, 3, seed=140 + r) for r, t in enumerate(tokens)]
        held = list(zip(xs, choices, weights, w1.chunk(n), w2.chunk(n), strict=True))
        inputs, call = list(zip(held, above, strict=True)), partial(_with_experts, experts, capacity)
        outcomes = exercise.run(fn, inputs, call, case=name, fallback=fallback)
        leaves, args = [t.requires_grad_() for t in (*xs, *weights, w1, w2)], (xs, choices, weights, w1, w2, capacity)
        total = sum((_experts(*args, r) * above[r]).sum() for r in range(n))
        found = torch.autograd.grad(total, leaves)
        shares = [{"x": found[r], "weight": found[n + r], "w1 of its experts": found[-2].chunk(n)[r],
                   "w2 of its experts": found[-1].chunk(n)[r]} for r in range(n)]  # fmt: skip
        slips = _CAPACITY_SLIPS if capacity else _EXPERT_SLIPS
        _compare(exercise, outcomes, _experts, slips, args, shares, None if fallback else "order")
        counts = torch.stack([torch.bincount(choice.flatten(), minlength=experts) for choice in choices])
        rows = counts.clamp(max=capacity or max(tokens) * k).view(n, n, -1).sum(2)  # from each rank to each
        for rank, outcome in exercise.each(outcomes):
            least = 8 * 3 * int(rows[rank].sum() + rows[:, rank].sum())
            for way, ledger, calls in zip(("forward", "backward"), outcome.ledger, (3, 2), strict=True):
                limits = {"calls": calls, "carried": (least, least + (calls - 2) * 16 * experts * n)}
                ops, keys = {"all_to_all", "all_gather"}, {"too-many-bytes": "padded"}
                exercise.audit(ledger, ops, where=f"in {way}, ", keys=keys, **limits)
    exercise.passed("output and gradients equal to one process, and only rows that an expert takes are sent.")


# ------------------------------------------------------------------------------------------------ router

_RATE, _STEPS, _LEARN = 0.05, 3, 0.5


def _steps(fn: Callable, inputs: list[Any], args: tuple) -> Outcome:
    """Three steps of a router on one rank, each with the gate of the step before moved by its gradient."""
    import torch.distributed as dist

    from course_utils import record

    (x, table, gate), (top_k, tokens) = inputs[dist.get_rank()], args
    inputs[:] = []
    bias, steps, ledgers = torch.zeros(gate.shape[1], dtype=torch.float64), [], []

    def use(choice: Tensor, weight: Tensor) -> Tensor:
        used.append((choice.clone(), weight.detach().clone()))
        return (weight * table[choice.flatten()].view_as(weight)).sum() / tokens

    for _ in range(_STEPS):
        used: list[tuple[Tensor, Tensor]] = []
        leaf = gate.clone().requires_grad_()
        with record() as ledger:
            fn(x, leaf, bias, top_k, use, _RATE)
        steps.append((used, None if leaf.grad is None else leaf.grad.clone(), bias.clone()))
        gate = gate - _LEARN * (0 if leaf.grad is None else leaf.grad)
        ledgers.append(ledger)
    return Outcome(steps, ledgers, None, None)


def _in_order(choice: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Experts of each token in ascending order, because the order of the chosen is free."""
    place = choice.argsort(1)
    return {"choice": choice.gather(1, place), "weight": weight.gather(1, place)}


def _router(xs: list[Tensor], tables: list[Tensor], gate: Tensor, k: int, steps: int, r: int) -> dict[str, Tensor]:
    """Choice, weight, gradient and bias of rank r in the last of some steps; `_ROUTER_SLIPS` edits this program."""
    tokens, ranks = sum(map(len, xs)), range(len(xs))
    after, result = [torch.zeros(gate.shape[1], dtype=torch.float64) for _ in xs], {}
    for _ in range(steps):
        leaf, biases = gate.clone().requires_grad_(), after
        scores = [torch.sigmoid(x @ leaf) for x in xs]
        used = [(scores[s] + biases[s]).topk(k, 1).indices for s in ranks]
        counts = [torch.bincount(one.flatten(), minlength=gate.shape[1]).double() for one in used]
        loads = [sum(counts) for s in ranks]
        after = [biases[s] + _RATE * torch.sign(loads[s].mean() - loads[s]) for s in ranks]
        chosen = [scores[s].gather(1, used[s]) for s in ranks]
        weights = [w / w.sum(1, keepdim=True) for w in chosen]
        losses = [(weights[s] * tables[s][used[s]]).sum() / tokens for s in ranks]
        grads = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in losses]
        left = sum(grads)
        result = _in_order(used[r], weights[r].detach()) | {"gradient": left, "bias": after[r]}
        gate = gate - _LEARN * sum(grads)
    return result


_SIGN = "torch.sign(loads[s].mean() - loads[s])"
_ROUTER_SLIPS: Slips = {
    "no-bias": "scores[s] + biases[s]).topk  ->  scores[s]).topk",
    "too-early": {"chosen = [": "used = [(scores[s] + after[s]).topk(k, 1).indices for s in ranks]\nchosen = ["},
    "biased-weight": "scores[s].gather  ->  (scores[s] + biases[s]).gather",
    "softmax": "torch.sigmoid(x @ leaf)  ->  torch.softmax(x @ leaf, 1)",
    "not-normalized": ["w / w.sum(1, keepdim=True)  ->  w", "w / w.sum(1, keepdim=True)  ->  w.softmax(1)"],
    "own-gradient": "left = sum(grads)  ->  left = grads[r]",
    "mean-gradient": "left = sum(grads)  ->  left = sum(grads) / len(xs)",
    "own-load": "sum(counts) for s in ranks  ->  counts[s] for s in ranks",
    "sign": f"{_SIGN}  ->  torch.sign(loads[s] - loads[s].mean())",
    "size": [f"{_SIGN}  ->  (loads[s].mean() - loads[s])", f"{_SIGN}  ->  (1 - loads[s] / loads[s].mean())"],
    "not-kept": f"_RATE * {_SIGN}  ->  0",
}


@checked
def balanced_step(fn: Callable) -> None:
    """Check ``fn(x, gate, bias, top_k, use, rate)``, which leaves gate.grad and changes bias."""
    exercise = Exercise("Exercise 6", HINTS["balanced_step"], program=_steps)
    for sizes, experts, k in (((9, 9), 4, 2), ((7, 12, 10), 6, 3), ((11,), 4, 2)):
        n = len(sizes)
        xs = [_numbers(t, 5, seed=200 + r) + 0.6 for r, t in enumerate(sizes)]
        tables, gate = [_numbers(experts, seed=210 + r) for r in range(n)], 0.4 * _numbers(5, experts, seed=220)
        inputs, of_all = [(x, table, gate) for x, table in zip(xs, tables, strict=True)], (xs, tables, gate, k)
        outcomes = exercise.run(fn, inputs, k, sum(sizes), case=f"{experts} experts, {k} a token")
        for step in range(_STEPS):
            for rank, outcome in exercise.each(outcomes, f"step {step + 1}: "):
                used, gradient, bias = outcome.result[step]
                exercise.require(len(used) == 1, "use-once", f"use was called {len(used)} times.")
                shapes = [tuple(t.shape) for t in used[0]]
                exercise.require(shapes == [(sizes[rank], k)] * 2, "shape", f"use was called with shapes {shapes}.")
                exercise.require(gradient is not None, "no-gradient", "gate.grad is None.")
                got, args = _in_order(*used[0]) | {"gradient": gradient, "bias": bias}, (*of_all, step + 1, rank)
                for name, right in _router(*args).items():
                    if not close(got[name], right):
                        slips = _slips(_router, _ROUTER_SLIPS, *args)
                        wrong = {key: [one[name] for one in some] for key, some in slips.items()}
                        exercise.equal(rank, got[name], right, wrong, what=f"the {name}")
        most = (gate.nbytes + 8 * experts) * 2 * (n - 1) / n
        for _, outcome in exercise.each(outcomes):
            for ledger in outcome.ledger:
                exercise.audit(ledger, calls=2, sent=(gate.nbytes * 2 * (n - 1) / n, most))
    exercise.passed("choices with the bias, weights without it, one gradient and one bias on all ranks.")


# ------------------------------------------------------------------------------------------------ on paper


@paper_problem(
    "Exercise 7",
    cases=[
        (4096, 32, 8, 128, 2, 989, 400, True), (4096, 32, 32, 128, 4, 989, 400, True),
        (8192, 64, 8, 128, 2, 312, 100, False), (2048, 16, 16, 64, 4, 312, 2400, False),
        (16384, 40, 8, 128, 1, 500, 200, True),
    ],
    slips={
        "pairs": ["if causal  ->  if not causal", "if causal  ->  if False", "if causal  ->  if True"],
        "products": "4 * pairs  ->  2 * pairs",
        "kv-heads": ["tokens * kv_heads  ->  tokens * heads", "pairs * heads  ->  pairs * kv_heads"],
        "keys-only": "2 * tokens  ->  tokens",
        "element": "* d * element_bytes  ->  * d",
        "bits": "gigabits * 1e9 / 8  ->  gigabits * 1e9",
        "milliseconds": "computing * 1e3, moving * 1e3  ->  computing, moving",
        "least": ["tokens * moving / computing  ->  tokens * computing / moving",
                  "tokens * moving / computing  ->  moving / computing",
                  "tokens * moving / computing  ->  tokens * (moving / computing) ** 0.5"],
    },
    units=["ms computing", "ms moving", "tokens"],
    hints=HINTS["ring_hides"],
    tolerance=1e-3,
)
def ring_hides(tokens, heads, kv_heads, d, element_bytes, tflops, gigabits, causal):
    """Check ``fn(tokens, heads, kv_heads, d, element_bytes, tflops, gigabits, causal) -> (ms, ms, tokens)``."""
    pairs = tokens**2 / 2 if causal else tokens**2
    computing = 4 * pairs * heads * d / (tflops * 1e12)
    moving = 2 * tokens * kv_heads * d * element_bytes / (gigabits * 1e9 / 8)
    return computing * 1e3, moving * 1e3, tokens * moving / computing


@paper_problem(
    "Exercise 8",
    cases=[
        (128, 7168, 8, 4, 173, 314), (128, 7168, 8, 4, 77, 114), (256, 4096, 2, 4, 50, 90),
        (4096, 2048, 6, 3, 700, 900),
    ],
    slips={
        "scales": ["hidden + 4 * hidden / 128  ->  hidden", "4 * hidden / 128  ->  hidden / 128",
                   "hidden + 4 * hidden / 128  ->  hidden + 4"],
        "precision": ["top_k * 2 * hidden  ->  top_k * row", "hidden + 4 * hidden / 128  ->  2 * hidden"],
        "copies": ["dispatch = tokens * top_k  ->  dispatch = tokens",
                   "combine = tokens * top_k  ->  combine = tokens"],
        "nodes": ["min(top_k, max_nodes)  ->  top_k", "min(top_k, max_nodes)  ->  max_nodes",
                  "tokens * min(top_k, max_nodes)  ->  tokens * top_k * max_nodes"],
        "microseconds": {"dispatch_us * 1e-6": "dispatch_us * 1e-3", "combine_us * 1e-6": "combine_us * 1e-3"},
        "units": ["dispatch / 1e9, combine / 1e9  ->  dispatch, combine",
                  "dispatch / 1e9, combine / 1e9  ->  8 * dispatch / 1e9, 8 * combine / 1e9",
                  "across / 1e6  ->  across", "across / 1e6  ->  across / 2**20"],
    },
    units=["GB/s", "GB/s", "MB"],
    hints=HINTS["expert_traffic"],
    tolerance=1e-3,
)
def expert_traffic(tokens, hidden, top_k, max_nodes, dispatch_us, combine_us):
    """Check ``fn(tokens, hidden, top_k, max_nodes, dispatch_us, combine_us) -> (GB/s, GB/s, MB)``."""
    row = hidden + 4 * hidden / 128
    dispatch = tokens * top_k * row / (dispatch_us * 1e-6)
    combine = tokens * top_k * 2 * hidden / (combine_us * 1e-6)
    across = tokens * min(top_k, max_nodes) * row
    return dispatch / 1e9, combine / 1e9, across / 1e6
