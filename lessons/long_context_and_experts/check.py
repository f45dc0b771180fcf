"""The exercises on long sequences and experts: what each rank must find, and the usual mistakes with their hints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_utils import record
from course_utils.check import Case, exercise, paper, show, whole_numbers

from . import answers

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

CLOSE = 1e-5


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(15485863 + seed), dtype=torch.float64)


def both_ways(call: Callable, given: Sequence[Tensor], upstream: Tensor) -> tuple[Any, list, dict]:
    """The output of one rank, the arguments with their gradients, and the ledgers of forward and backward."""
    own = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
    with record() as forward:
        y = call(*own)
    with record() as backward:
        if isinstance(y, Tensor) and y.requires_grad and y.shape == upstream.shape:
            (y * upstream).sum().backward()
    return y.detach() if isinstance(y, Tensor) else y, own, {"forward": forward, "backward": backward}


def note_gradients(note, own: Sequence[Tensor], given: Sequence[Tensor], right: dict[str, Tensor]) -> None:
    same = all(map(torch.equal, own, given))
    note.holds(same, "input-changed", "the output is right, but the arguments were changed.")
    got = dict(zip(right, (t.grad for t in own if t.is_floating_point()), strict=True))
    missing = [name for name, gradient in got.items() if gradient is None]
    if note.holds(not missing, "no-gradient", f"{', '.join(missing)} has no gradient."):
        note.equal(got, right, "the gradient")


# --- exercise 1: pieces

ALL, NONE = (0, 0, 0), (9, 9, 9)  # of three queries, the first key that each sees
MERGES = [  # scale of the scores, and of three queries the first key that each sees in both pieces
    (0, "all queries see all keys", 1, ALL, ALL),
    Case(0, "scores in the thousands", (3000, ALL, ALL), "overflow"),
    Case(0, "query 1 sees no key of the second piece", (1, ALL, (0, 9, 2)), "no-key"),
    Case(0, "queries 0 and 2 see no key of the first piece", (1, (9, 1, 9), ALL), "no-key"),
    Case(0, "query 1 sees no key at all", (1, (0, 9, 9), (1, 9, 0)), "no-key"),
    Case(0, "no query sees a key of the first piece", (1, NONE, ALL), "no-key"),
]


@exercise("Exercise 1", cases=MERGES, tolerance=1e-4, explains=["not-a-number"],
          passed=": two pieces are one, with large scores and with queries that see no key.")
def merge(note, answer, scale, *sees):
    q, k, v = (numbers(2, tokens, 4, seed=tokens) for tokens in (3, 8, 8))
    q, keep = scale * q, [torch.arange(4) >= torch.tensor(first)[:, None] for first in sees]
    parts = zip(k.chunk(2, 1), v.chunk(2, 1), keep, strict=True)
    pieces = [answers.piece(q, *part) for part in parts]
    before = [t.clone() for one in pieces for t in one]
    got, right = answer(*pieces), answers.piece(q, k, v, torch.cat(keep, 1))
    formed = isinstance(got, tuple | list) and len(got) == 3 and all(isinstance(t, Tensor) for t in got)
    if not note.holds(formed, "form", f"the function returned {show(got)}."):
        return
    for name, one, expected in zip("mlo", got, right, strict=True):
        odd = one.shape == expected.shape and bool((one.isnan() | one.isinf() & expected.isfinite()).any())
        note.holds(not odd, "not-a-number", f"{name} is {show(one)}, expected {show(expected)}.")
        note.equal(one, expected, name)
    same = all(map(torch.equal, (t for one in pieces for t in one), before))
    note.holds(same, "input-changed", "the result is right, but the pieces were changed.")


MISTAKES["merge"] = {
    "not-a-number": ("Where does a nan or an infinity come from: a division, a difference of infinities, an exp?",),
    "form": ("Return a tuple of three tensors: m, l and o.",
            {"return m, f1 * l1 + f2 * l2, f1 * o1 + f2 * o2": "return (f1 * o1 + f2 * o2) / (f1 * l1 + f2 * l2)"}),
    "maximum": ("The m of both is the larger of the two, for each query on its own.",
            ["m = torch.maximum(m1, m2)  ->  m = m1 + m2", "m = torch.maximum(m1, m2)  ->  m = torch.minimum(m1, m2)",
             "m = torch.maximum(m1, m2)  ->  m = m1", "m = torch.maximum(m1, m2)  ->  m = m2",
             "m = torch.maximum(m1, m2)  ->  m = torch.full_like(m1, max(m1.max(), m2.max()))"]),
    "rescale": ("""Each l and each o is relative to the m of its own piece. Before two of them can be added, both have
        to be made relative to the new m, an o by the same factor as its l.""",
            ["f1 * l1 + f2 * l2  ->  l1 + l2", "f1 * l1 + f2 * l2  ->  l1 / f1 + l2 / f2",
             "f1 * o1 + f2 * o2  ->  o1 + o2", "f1 * o1 + f2 * o2  ->  o1 / f1 + o2 / f2",
             "f1 * o1 + f2 * o2  ->  f1 * o1 + o2", "f1 * o1 + f2 * o2  ->  o1 + f2 * o2"]),
    "divided": ("""o is the sum that is not yet divided by l: pieces can be merged further, and the division comes once,
        at the end.""",
            [{"return m, f1": "weights = f1 * l1 + f2 * l2\nreturn m, f1",
             "f1 * o1 + f2 * o2": "(f1 * o1 + f2 * o2) / weights"}, "f1 * o1 + f2 * o2  ->  o1 / l1 + o2 / l2"]),
    "overflow": ("""exp of a number in the thousands is infinite. Only differences that are 0 or less are safe: a score,
        or an m, minus the larger m.""",
            {"torch.exp(m1 - finite), torch.exp(m2 - finite)":
                 "torch.exp(m1) / torch.exp(m), torch.exp(m2) / torch.exp(m)"}),
    "no-key": ("""A query sees no key of a piece, so that its m is -inf there. What is exp(m1 - m) if m1 is -inf, and
        what if m is -inf as well?""",
            "torch.exp(m1 - finite), torch.exp(m2 - finite)  ->  torch.exp(m1 - m), torch.exp(m2 - m)"),
}


def in_logarithms(first, second):
    """By log-sum-exp: m + log l of both, and outputs that are divided meanwhile."""
    (m1, l1, o1), (m2, l2, o2) = first, second
    m, total = torch.maximum(m1, m2), torch.logaddexp(m1 + l1.log(), m2 + l2.log())
    empty = m == -torch.inf
    parts = [torch.where(m_ == -torch.inf, 0, torch.exp(m_ - m)) for m_ in (m1, m2)]
    return [m, torch.where(empty, 0, torch.exp(total - m)), sum(p * o for p, o in zip(parts, (o1, o2), strict=True))]


RIGHT["merge"] = {
    "logarithms": in_logarithms,
    "nan to 0": {"torch.exp(m1 - finite), torch.exp(m2 - finite)":
             "torch.exp(m1 - m).nan_to_num(0), torch.exp(m2 - m).nan_to_num(0)"},
}


# --- exercise 2: zig-zag


def pairs_of(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(p + 1 for p in row) for row in rows]


ZIGZAGS = [
    Case(0, f"{length} tokens on {n} ranks", (length, n), "uneven" if length % (2 * n) else None)
    for length, n in ((64, 4), (16, 2), (24, 3), (8, 1), (10, 2), (10, 4), (53, 4), (101, 8))
]


@exercise("Exercise 2", cases=ZIGZAGS, explains=["once"],
          passed=": with 64 tokens on 4 ranks 520 pairs each, where contiguous parts have 136 to 904.")
def zigzag(note, answer, length, n):
    got = answer(length, n)
    rows = [whole_numbers(one) for one in got] if isinstance(got, list | tuple) else []
    if not note.holds(len(rows) == n and None not in rows, "odd", f"the function returned {show(got)}."):
        return
    held, pairs, all_rows = sorted(p for row in rows for p in row), pairs_of(rows), ("the positions", rows)
    odd = [p for p in range(length) if held.count(p) != 1] or [p for p in held if not 0 <= p < length]
    note.holds(not odd, "once", f"position {odd[:1]} is not held exactly once.", all_rows)
    for rank, row in enumerate(rows):
        whose = f"of rank {rank} are"
        note.holds(row == sorted(row), "order", f"the positions {whose} {row[:8]}…, not in ascending order.", all_rows)
        ends = [i for i in range(1, len(row)) if row[i] - row[i - 1] != 1]
        runs = [b - a for a, b in zip([0, *ends], [*ends, len(row)], strict=True)]
        note.holds(len(runs) <= 2, "runs", f"the positions {whose} {len(runs)} runs: {str(row)[:60]}…", all_rows)
        short = length // (2 * n)  # two neighbors look like one run of twice the length
        fit = all(0 <= size - short * parts <= parts for size in runs for parts in [3 - len(runs)])
        note.holds(fit, "uneven", f"the runs {whose} {runs} tokens long, and not {short} or {short + 1}.", all_rows)
    most = 4 * length if length % (2 * n) else 0  # a token more in some runs makes up to 4 · length pairs
    note.holds(max(pairs) - min(pairs) <= most, "balance", f"the ranks have {pairs} pairs.", all_rows)


MISTAKES["zigzag"] = {
    "contiguous": ("These are consecutive parts. The last rank has the late tokens, and late tokens have many pairs.",
            "[torch.cat([runs[r], runs[2 * n - 1 - r]]) for r in range(n)]  ->  [*torch.arange(length).chunk(n)]"),
    "runs": ("""A rank holds two runs of consecutive tokens at most, one from the first half and one from the second.
        Stripes, every n-th token, are nearly balanced, and no more.""",
            "[torch.cat([runs[r], runs[2 * n - 1 - r]]) for r in range(n)]  ->  [torch.arange(r, length, n) for r "
            "in range(n)]"),
    "once": ("Each position belongs to exactly one rank.", "runs[2 * n - 1 - r]  ->  runs[2 * n - 2 - r]"),
    "order": ("The positions of a rank are in ascending order.",
            "[runs[r], runs[2 * n - 1 - r]]  ->  [runs[2 * n - 1 - r], runs[r]]"),
    "uneven": ("""The number of runs does not divide the number of tokens. There have to be 2n runs all the same, whose
        lengths differ by 1 at most. chunk makes fewer.""",
            ["torch.arange(length).tensor_split(2 * n)  ->  torch.arange(length).chunk(2 * n)",
             "torch.arange(length).tensor_split(2 * n)  ->  torch.arange(length).split(-(-length // (2 * n)))",
             "torch.arange(length).tensor_split(2 * n)  ->  torch.arange(length // (2 * n) * 2 * n).chunk(2 * n)"]),
    "balance": ("""Add up p + 1 over the positions p of each rank. An early run goes with a late one: the r-th with the
        r-th from the end.""",
            ["runs[2 * n - 1 - r]  ->  runs[n + (n - r) % n]", "runs[2 * n - 1 - r]  ->  runs[n + r]"]),
}


def by_borders(length, n):
    borders = [length * i // (2 * n) for i in range(2 * n + 1)]
    return [[*range(borders[r], borders[r + 1]), *range(borders[2 * n - 1 - r], borders[2 * n - r])] for r in range(n)]


RIGHT["zigzag"] = {
    "borders": by_borders,
    "flipped": "[torch.cat([runs[r], runs[2 * n - 1 - r]]) for r in range(n)]  ->  [torch.cat(both) for both in "
        "zip(runs[:n], runs[:n - 1:-1])]",
}

# --- exercise 3: ring attention

RINGS = [  # ranks, name, heads, KV heads, positions of each rank
    (2, "contiguous tokens", 2, 2, torch.arange(16).chunk(2)),
    (4, "zig-zag, 4 heads, 2 KV heads", 4, 2, answers.zigzag(32, 4)),
    (4, "contiguous tokens, 4 heads, 1 KV head", 4, 1, torch.arange(24).chunk(4)),
    (3, "tokens in any order", 2, 2, (torch.arange(21) * 8 % 21).chunk(3)),
    (1, "all tokens", 2, 1, torch.arange(8).chunk(1)),
]


@exercise("Exercise 3", cases=RINGS, tolerance=CLOSE,
          passed="equal to one process in every order of the tokens, with N − 1 messages of K, V and positions.")
def ring_attention(note, answer, heads, kv_heads, order):
    rank, n, length = dist.get_rank(), dist.get_world_size(), sum(map(len, order))
    q, k, v = (numbers(2, h, length, 4, seed=30 + i) for i, h in enumerate((heads, kv_heads, kv_heads)))
    mine, hops = order[rank].clone(), n - 1
    given = [q[:, :, mine], k[:, :, mine], v[:, :, mine], mine]
    own = [t.clone() for t in given]
    with record() as ledger:
        got = answer(*own)
    keep = mine[:, None] >= torch.arange(length)
    note.equal(got, F.scaled_dot_product_attention(given[0], k, v, keep, enable_gqa=True), "the output")
    same = all(map(torch.equal, own, given))
    note.holds(same, "input-changed", "the output is right, but the arguments were changed.")
    if n > 1:
        block = 2 * given[1].nbytes
        note.sent(ledger, {"send", "recv"}, calls={"send": 3 * hops}, sent=(hops * block, hops * (block + mine.nbytes)),
                  other_calls="neighbor", too_many_calls="extra-hop",
                  too_many_bytes="heads-sent" if heads > kv_heads else "extra-hop")
        peers = {entry.peer for entry in ledger if entry.op == "send"}
        ring = peers in ({(rank + 1) % n}, {(rank - 1) % n})
        note.holds(ring, "neighbor", f"this rank sends to ranks {sorted(peers)}.")


MISTAKES["ring_attention"] = {
    "positions": ("""The first block is right, a later one is not: its mask has to compare the positions of your queries
        with those of the keys that have arrived, in the whole sequence. Rows and columns of a block are counted from 0
        on every rank.""", ["positions[:, None] >= block[2]  ->  positions[:, None] >= positions",
             "positions[:, None] >= block[2]  ->  torch.ones(len(positions), len(positions)).tril().bool()"]),
    "future": ("A query sees the keys at its own position and before it, in the whole sequence, and no later ones.",
            ["positions[:, None] >= block[2]  ->  positions[:, None] >= 0 * positions",
             "positions[:, None] >= block[2]  ->  positions[:, None] <= block[2]",
             "positions[:, None] >= block[2]  ->  positions[:, None] > block[2]"]),
    "own-block": ("""A block is missing. There are N blocks to attend to: the rank's own one, before it is passed on,
        and the one that arrives last among them.""", ["total is None  ->  step < 2",
             "total = part if total is None else merge(total, part)  ->  total = part if total is None else total "
             "if step == n - 1 else merge(total, part)"]),
    "rescale": ("""Two pieces become one by merge, which brings them to a common maximum. The output is o divided by l,
        once, after the last block.""",
            ["total = part if total is None else merge(total, part)  ->  total = part if total is None else [a + b "
            "for a, b in zip(total, part)]", "return o / weights  ->  return o"]),
    "kv-order": ("""Consecutive heads use the same KV head: heads 0 and 1 use KV head 0. repeat puts the copies the
        other way round.""", "t.repeat_interleave(group, dim=1)  ->  t.repeat(1, group, 1, 1)"),
    "extra-hop": ("""The output is right, but a block travels once too often. The last one that arrives need not be
        passed on.""",
            {"if step < n - 1:\n            arrive": "if n > 1:\n    arrive",
             "if step < n - 1:\n            for": "if n > 1:\n    for"}),
    "heads-sent": ("""The output is right, but the copies of the KV heads travel, too. Send the KV heads that there are,
        and repeat them where they are used.""",
            {"block, total = [k, v, positions], None":
                 "block, total = [k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), "
                 "positions], None",
             "keys, values = (t.repeat_interleave(group, dim=1) for t in block[:2])": "keys, values = block[:2]"}),
    "neighbor": ("""The output is right, but in a ring there are sends and receives only, and each rank sends to one
        neighbor, always the same one.""",),
}

RIGHT["ring_attention"] = {
    "the other way round": {"dist.isend, t, (rank + 1) % n": "dist.isend, t, (rank - 1) % n",
         "dist.irecv, t, (rank - 1) % n": "dist.irecv, t, (rank + 1) % n"},
    "masked blocks left out": {"total = part if total is None else merge(total, part)":
             "if total is None:\n"
             "    total = part\n"
             "elif (positions.max() >= block[2].min()):\n"
             "    total = merge(total, part)"},
}

# --- exercise 4: Ulysses

SPLIT = "non-empty|chunk|match|group size|plit sizes"  # errors of heads that are cut wrongly
HEADS = [  # ranks, name, heads, KV heads
    (2, "4 heads, 4 KV heads", 4, 4),
    Case(2, "8 heads, 4 KV heads", (8, 4), "grouped", SPLIT),
    Case(4, "8 heads, 4 KV heads", (8, 4), "only-two-ranks", SPLIT),
    Case(4, "8 heads, 2 KV heads", (8, 2), "few-heads", SPLIT),
    Case(2, "6 heads, 3 KV heads", (6, 3), "few-heads", SPLIT),
    (1, "4 heads, 2 KV heads", 4, 2),
]


@exercise("Exercise 4", cases=HEADS, tolerance=CLOSE,
          passed="output and gradients equal to one process, in four all-to-alls each way.")
def ulysses(note, answer, heads, kv_heads):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = [numbers(2, h, 3 * n, 4, seed=60 + i).requires_grad_() for i, h in enumerate((heads, kv_heads, kv_heads))]
    above = numbers(2, heads, 3 * n, 4, seed=90)

    def part(t):
        return t.detach().chunk(n, 2)[rank].clone()

    given = [part(t) for t in whole]
    got, own, ledgers = both_ways(answer, given, part(above))
    turned = n > 1 and getattr(got, "shape", None) == (2, heads // n, 3 * n, 4)
    note.holds(not turned, "local", "the output has all tokens of some heads.")
    right = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    note.equal(got, part(right), "the output")
    gradients = torch.autograd.grad(right, whole, above)
    note_gradients(note, own, given, dict(zip("qkv", map(part, gradients), strict=True)))
    bytes_of = [2 * (given[0].nbytes + copies * given[1].nbytes) for copies in (1, math.lcm(n, kv_heads) // kv_heads)]
    for ledger in ledgers.values() if n > 1 else ():
        note.sent(ledger, {"all_to_all"}, calls=4, carried=tuple(bytes_of), too_many_bytes="copies")


MISTAKES["ulysses"] = {
    "not-causal": ("A token sees tokens here that come later in the sequence.", ", is_causal=True  ->  "),
    "local": ("""There are two exchanges: before attention a rank gets all tokens of its heads, and afterwards all heads
        of its own tokens.""",
            [{"(swap(x, cut=1, join=2) for x in (q, k, v))": "(q, k, v)",
             "return swap(o, cut=2, join=1)": "return swap(swap(o, cut=1, join=2), cut=2, join=1)"},
             "return swap(o, cut=2, join=1)  ->  return o"]),
    "head-order": ("""The heads are in another order than before. What comes back from rank i are the heads that rank i
        has, so the parts are joined along the heads, rank by rank.""",
            {"return swap(o, cut=2, join=1)":
                 "return swap(o, cut=2, join=1).unflatten(1, (n, -1)).transpose(1, 2).flatten(1, 2)"}),
    "grouped": ("""It is right with as many KV heads as heads. Here consecutive heads share one, and the rank that has
        the heads has to have their KV head.""",
            {", enable_gqa=True": "",
             "q, k, v = (": "group = q.shape[1] // k.shape[1]\nq, k, v = (",
             "o = F": "k, v = (t.repeat(1, group, 1, 1) for t in (k, v))\no = F"}),
    "kv-order": ("""Copies of a KV head have to lie next to each other, because consecutive heads use the same one.
        repeat puts them the other way round.""",
            [{"k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)":
                 "g = q.shape[1] // kv_heads\nk, v = k.repeat(1, g, 1, 1), v.repeat(1, g, 1, 1)"},
             {"k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)":
                  "k, v = k.repeat(1, copies, 1, 1), v.repeat(1, copies, 1, 1)"}]),
    "few-heads": ("""The number of ranks does not divide the KV heads here, so some of them have to be copied before
        they are sent. How many are there then at least?""", ["math.lcm(n, kv_heads) // kv_heads  ->  1",
             "math.lcm(n, kv_heads) // kv_heads  ->  max(1, n // kv_heads)"]),
    "copies": ("""The output is right, but KV heads are copied more often than necessary. It is enough if the number of
        ranks divides the copies.""", "math.lcm(n, kv_heads) // kv_heads  ->  q.shape[1] // kv_heads"),
    "no-gradient": ("""The output is right, but no gradient comes back. exchange is differentiable;
        dist.all_to_all_single alone is not.""",
            "AllToAll.apply(rows, send, recv)  ->  AllToAll.apply(rows.detach(), send, recv)"),
}

RIGHT["ulysses"] = {
    "copies after": {"enable_gqa=True": "enable_gqa=False",
         "o = F": "g = q.shape[1] // k.shape[1]\nk, v = (t.repeat_interleave(g, 1) for t in (k, v))\no = F"},
    "indexed heads": {"k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)":
             "serve = [h // copies for h in range(copies * kv_heads)]\nk, v = k[:, serve], v[:, serve]"},
}

# --- exercise 5: experts

SIZES = "plit sizes|different sizes"  # errors of lists that do not fit
EXPERTS = [  # ranks, name, tokens of each rank, experts, experts a token, how many of them are chosen, capacity
    Case(2, "6 tokens each, 1 expert a token", ((6, 6), 4, 1, 4, None), "order", SIZES),
    Case(3, "5, 3 and 7 tokens, 2 experts a token", ((5, 3, 7), 6, 2, 6, None), "order", SIZES),
    Case(3, "1 expert on each rank", ((4, 2, 3), 3, 2, 3, None), "experts-per-rank"),
    Case(2, "experts 2 and 3 without tokens", ((5, 4), 4, 1, 2, None), "no-tokens"),
    Case(3, "rank 1 without tokens", ((4, 0, 3), 3, 2, 3, None), "no-tokens"),
    Case(2, "a capacity of 2", ((7, 6), 4, 2, 3, 2), "capacity"),
    (1, "5 tokens", (5,), 3, 2, 3, None),
]


def ffn(rows: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return F.gelu(rows @ w1) @ w2


def of_all_experts(x, choice, weight, w1, w2, capacity):
    y, k = torch.zeros_like(x), choice.shape[1]
    for e in range(len(w1)):
        copies = (choice.flatten() == e).nonzero()[:capacity, 0]
        y = y.index_add(0, copies // k, weight.flatten()[copies, None] * ffn(x[copies // k], w1[e], w2[e]))
    return y


@exercise("Exercise 5", cases=EXPERTS, tolerance=CLOSE,
          passed="output and gradients equal to one process, and only rows that an expert takes are sent.")
def expert_layer(note, answer, tokens, experts, k, used, capacity):
    rank, n, more = dist.get_rank(), dist.get_world_size(), () if capacity is None else (capacity,)
    xs, above = ([numbers(t, 3, seed=seed + r) for r, t in enumerate(tokens)] for seed in (100, 140))
    choices = [numbers(t, used, seed=110 + r).topk(k, 1).indices for r, t in enumerate(tokens)]
    weights = [numbers(t, k, seed=120 + r).sigmoid() for r, t in enumerate(tokens)]
    w1, w2 = numbers(experts, 3, 5, seed=130), numbers(experts, 5, 3, seed=131)
    given = [xs[rank], choices[rank], weights[rank], w1.chunk(n)[rank], w2.chunk(n)[rank]]

    def call(x, choice, weight, w1, w2):
        return answer(x, choice, weight, lambda i, rows: ffn(rows, w1[i], w2[i]), experts, *more)

    got, own, ledgers = both_ways(call, given, above[rank])
    leaves = [t.requires_grad_() for t in (*xs, *weights, w1, w2)]
    outputs = [of_all_experts(*one, w1, w2, capacity) for one in zip(xs, choices, weights, strict=True)]
    note.equal(got, outputs[rank].detach(), "the output")
    found = torch.autograd.grad(sum((y * g).sum() for y, g in zip(outputs, above, strict=True)), leaves)
    right = {"x": found[rank], "weight": found[n + rank]}
    right |= {f"w{i + 1} of its experts": found[2 * n + i].chunk(n)[rank] for i in range(2)}
    note_gradients(note, own, given, right)
    counts = torch.stack([torch.bincount(choice.flatten(), minlength=experts) for choice in choices])
    rows = counts.clamp(max=capacity or max(tokens) * k).view(n, n, -1).sum(2)  # from each rank to each
    least = 8 * 3 * int(rows[rank].sum() + rows[:, rank].sum())
    for ledger, calls in zip(ledgers.values(), (3, 2), strict=True) if n > 1 else ():
        note.sent(ledger, {"all_to_all", "all_gather"}, calls=calls, too_many_calls="padded", too_many_bytes="padded",
                  carried=(least, least + (calls - 2) * 16 * experts * n))


MISTAKES["expert_layer"] = {
    "unweighted": ("""Results are added up with the weights of the router. A weight belongs to the result: multiplied
        with the token before it is sent, it goes through the expert, which is not linear.""",
            [{" * weights.flatten()[sent, None]": ""},
             {" * weights.flatten()[sent, None]": "",
              "x[sent // k]": "x[sent // k] * weights.flatten()[sent, None]"}]),
    "one-result": ("""Only one result of each token is left. A token with several experts appears several times among
        the copies, and its results have to be added up.""",
            "index_add(0, sent // k, back)  ->  index_copy(0, sent // k, back)"),
    "order": ("""A row was computed by another expert than the chosen one, or a result was added to another token. Rows
        arrive rank by rank, and each rank has sorted its own by expert, so those of one expert are not next to each
        other. Results go back in the order in which the rows came: what a rank sends in dispatch it receives in
        combine, so the two lists change their places.""",
            [{"results = torch.zeros_like(rows)": "owner = owner.sort().values\nresults = torch.zeros_like(rows)"},
             "index_add(0, sent // k,  ->  index_add(0, torch.arange(len(sent)) // k,",
             "exchange(x[sent // k], send, recv)  ->  exchange(x[sent // k], recv, send)",
             "exchange(results, recv, send)  ->  exchange(results, send, recv)"]),
    "experts-per-rank": ("It is right as long as each rank has two experts. Each has n_experts / N.",
            "for i in range(n_experts // n):  ->  for i in range(2):"),
    "no-tokens": ("""It is right as long as each expert and each rank has tokens. A rank without any still has to call
        every exchange, with zeros among its numbers. Its result has to depend on what it received, also if that is no
        row, or it enters no exchange in backward.""",
            {"back = exchange": "back = results * 1 if len(rows) == 0 else exchange"}),
    "capacity": ("""With a capacity, an expert takes only that many copies from each rank, those of the first tokens. It
        holds for each expert and for each rank on its own.""", ["[:capacity, 0]  ->  [:, 0]",
             "[:capacity, 0]  ->  [-(capacity or len(flat) + 1):, 0]",
             {"[:capacity, 0]": "[:, 0]",
              "results[owner == i] = expert(i, rows[owner == i])":
                  "at = (owner == i).nonzero()[:capacity, 0]\nresults[at] = expert(i, rows[at])"},
             "[:capacity, 0]  ->  [: capacity and capacity * n // n_experts, 0]"]),
    "padded": ("""The result is right, but more travels than experts take. There are three exchanges, of the counts, the
        tokens and the results. Send each rank the rows for its experts, in lists of different lengths, and none that
        are dropped.""",),
    "no-gradient": ("""The output is right, but no gradient comes back. Tokens and results have to go through exchange,
        which is differentiable.""", "AllToAll.apply(rows, send, recv)  ->  AllToAll.apply(rows.detach(), send, recv)"),
}

RIGHT["expert_layer"] = {
    "sorted by expert": {"results = torch.zeros_like(rows)\n"
         "    for i in range(n_experts // n):\n"
         "        results[owner == i] = expert(i, rows[owner == i])":
             "by = owner.argsort(stable=True)\n"
             "parts = rows[by].split(theirs.sum(0).tolist())\n"
             "results = torch.cat([expert(i, part) for i, part in enumerate(parts)])[by.argsort()]"},
    "a place for each copy": {" * weights.flatten()[sent, None]": "",
         "torch.zeros_like(x).index_add(0, sent // k, back)":
             "(x.new_zeros(len(flat), x.shape[1]).index_copy(0, sent, back).view(*chosen.shape, x.shape[1]) * "
             "weights[..., None]).sum(1)"},
}

# --- exercise 6: a router

RATE, STEPS, LEARN = 0.05, 3, 0.5
ROUTERS = [  # ranks, name, tokens of each rank, experts, experts a token
    (2, "4 experts, 2 a token", (9, 9), 4, 2),
    (3, "6 experts, 3 a token", (7, 12, 10), 6, 3),
    (1, "4 experts, 2 a token", (11,), 4, 2),
]


def router_data(sizes: Sequence[int], experts: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Tokens of each rank, what a choice of each expert costs there, and the gate."""
    xs = [numbers(t, 5, seed=200 + r) + 0.6 for r, t in enumerate(sizes)]
    return xs, [numbers(experts, seed=210 + r) for r in range(len(sizes))], 0.4 * numbers(5, experts, seed=220)


def in_order(choice: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Experts of each token in ascending order, because the order of the chosen is free."""
    place = choice.argsort(1)
    return {"choice": choice.gather(1, place), "weight": weight.gather(1, place)}


@cache
def routed(sizes: tuple[int, ...], experts: int, k: int, rank: int) -> list[dict[str, Tensor]]:
    """Choice and weight of a rank, gradient and bias of all, by step."""
    (xs, tables, gate), bias, steps = router_data(sizes, experts), torch.zeros(experts, dtype=torch.float64), []
    for _ in range(STEPS):
        leaf = gate.clone().requires_grad_()
        scores = [torch.sigmoid(x @ leaf) for x in xs]
        chosen = [(one + bias).topk(k, 1).indices for one in scores]
        weights = [one.gather(1, choice) for one, choice in zip(scores, chosen, strict=True)]
        weights = [w / w.sum(1, keepdim=True) for w in weights]
        loss = sum((w * table[c]).sum() for w, table, c in zip(weights, tables, chosen, strict=True)) / sum(sizes)
        (gradient,) = torch.autograd.grad(loss, leaf)
        load = torch.bincount(torch.cat(chosen).flatten(), minlength=experts).double()
        bias = bias + RATE * torch.sign(load.mean() - load)
        gate = gate - LEARN * gradient
        steps.append(in_order(chosen[rank], weights[rank].detach()) | {"gradient": gradient, "bias": bias})
    return steps


@exercise("Exercise 6", cases=ROUTERS, tolerance=CLOSE,
          passed="choices with the bias, weights without it, one gradient and one bias on all ranks.")
def balanced_step(note, answer, sizes, experts, k):
    rank, n, right = dist.get_rank(), dist.get_world_size(), routed(sizes, experts, k, dist.get_rank())
    xs, tables, gate = router_data(sizes, experts)
    bias, steps, ledgers = torch.zeros(experts, dtype=torch.float64), [], []

    def use(choice, weight):
        used.append((choice.clone(), weight.detach().clone()))
        return (weight * tables[rank][choice.flatten()].view_as(weight)).sum() / sum(sizes)

    for _ in range(STEPS):
        used, leaf = [], gate.clone().requires_grad_()
        with record() as ledger:
            answer(xs[rank], leaf, bias, k, use, RATE)
        ledgers.append(ledger)
        steps.append((used, None if leaf.grad is None else leaf.grad.clone(), bias.clone()))
        gate = gate - LEARN * (0 if leaf.grad is None else leaf.grad)
    for i, (used, gradient, after) in enumerate(steps):
        if not note.holds(len(used) == 1, "odd", f"use was called {len(used)} times in a step, and not once."):
            return
        shapes = [tuple(t.shape) for t in used[0]]
        if not note.holds(shapes == [(sizes[rank], k)] * 2, "shape", f"use was called with shapes {shapes}.", ("", 0)):
            return
        note.holds(gradient is not None, "own-gradient", "gate.grad is None.")
        note.equal(in_order(*used[0]) | {"gradient": gradient, "bias": after}, right[i], f"step {i + 1}: the value")
    share = 2 * (n - 1) / n
    for ledger in ledgers if n > 1 else ():
        note.sent(ledger, calls=2, sent=(gate.nbytes * share, (gate.nbytes + 8 * experts) * share))


MISTAKES["balanced_step"] = {
    "not-normalized": ("""The scores are sigmoids, each expert on its own. The weights of a token are the scores of the
        chosen, divided by their sum.""", ["torch.sigmoid(x @ gate)  ->  torch.softmax(x @ gate, dim=1)",
             "best / best.sum(1, keepdim=True)  ->  best", "best / best.sum(1, keepdim=True)  ->  best.softmax(1)"]),
    "no-bias": ("The bias takes part in the choice, and only there: the scores without it become the weights.",
            ["(scores + bias).topk  ->  scores.topk", "scores.gather  ->  (scores + bias).gather"]),
    "own-gradient": ("""The gate is the same on all ranks, so gate.grad has to be. The loss is divided by the tokens of
        all ranks already, so it is the sum of the ranks' gradients: not this rank's alone, and not their mean.""",
            ["dist.all_reduce(gate.grad)  ->  dist.all_reduce(gate.grad)\ngate.grad /= dist.get_world_size()",
             "dist.all_reduce(gate.grad)  ->  dist.all_reduce(gate.grad.clone())",
             {"use(chosen, best / best.sum(1, keepdim=True)).backward()":
                  "use(chosen, best / best.sum(1, keepdim=True))",
              "all_reduce(gate.grad)": "all_reduce(gate.detach().clone())"}]),
    "own-load": ("""The load was counted on this rank alone, so each rank would have a bias of its own. Count the
        choices of all ranks before you compare.""", "dist.all_reduce(load)  ->  dist.all_reduce(load.clone())"),
    "sign": ("""The bias changes by rate, however large the difference is: an expert that has too much to do becomes
        less attractive, one with too little more.""", ["load.mean() - load)  ->  load - load.mean())",
             "torch.sign(load.mean() - load)  ->  (load.mean() - load)",
             "torch.sign(load.mean() - load)  ->  (1 - load / load.mean())"]),
    "not-kept": ("bias is as it was before. Change the tensor itself; bias = bias + ... makes a new one.",
            "bias += rate * torch.sign(load.mean() - load)  ->  bias = bias + rate * torch.sign(load.mean() - load)"),
    "too-early": ("This choice was made with the new bias. It is updated after the step, and serves the next one.",
            {"\n"
             "    load = torch.bincount(chosen.flatten(), minlength=len(bias)).to(bias.dtype)\n"
             "    dist.all_reduce(load)\n"
             "    bias += rate * torch.sign(load.mean() - load)": "",
             "best = scores":
                 "load = torch.bincount(chosen.flatten(), minlength=len(bias)).to(bias.dtype)\n"
                 "dist.all_reduce(load)\n"
                 "bias += rate * torch.sign(load.mean() - load)\n"
                 "chosen = (scores + bias).topk(top_k, dim=1).indices\n"
                 "best = scores"}),
}


def in_one_reduction(x, gate, bias, top_k, use, rate):
    """Gradient and load travel together; the order of the chosen is another one."""
    scores = 1 / (1 + torch.exp(-(x @ gate)))
    chosen = (scores.detach() + bias).argsort(1)[:, -top_k:]
    weights = F.normalize(torch.take_along_dim(scores, chosen, 1), p=1, dim=1)
    (gradient,) = torch.autograd.grad(use(chosen, weights), gate)
    load = F.one_hot(chosen, len(bias)).sum((0, 1))
    both = torch.cat([gradient, load[None].to(gradient.dtype)])
    dist.all_reduce(both)
    gate.grad = both[:-1]
    bias.add_((both[-1].mean() - both[-1]).sign(), alpha=rate)


RIGHT["balanced_step"] = {
    "one reduction": in_one_reduction,
    "two masks": "bias += rate * torch.sign(load.mean() - load)  ->  bias[load < load.mean()] += rate\n"
        "bias[load > load.mean()] -= rate",
}

# --- on paper

MISTAKES["ring_hides"] = {
    "pairs": ("""Causal attention with zig-zag leaves half of the pairs of a step; otherwise there are as many as tokens
        times tokens.""", ["if causal  ->  if not causal", "if causal  ->  if False", "if causal  ->  if True"]),
    "products": ("""There are two products, queries with keys and weights with values, and each costs 2 FLOP a pair and
        element.""", "4 * pairs  ->  2 * pairs"),
    "kv-heads": ("All heads compute, but only the KV heads travel.", ["tokens * kv_heads  ->  tokens * heads",
             "pairs * heads  ->  pairs * kv_heads"]),
    "keys-only": ("K travels, and V does, too.", "2 * tokens  ->  tokens"),
    "element": ("What travels is counted in bytes: how many has an element?", "* d * element_bytes  ->  * d"),
    "bits": ("Links are sold in bits a second, and a byte has 8.", "gigabits * 1e9 / 8  ->  gigabits * 1e9"),
    "milliseconds": ("A second has 1,000 milliseconds.", "computing * 1e3, moving * 1e3  ->  computing, moving"),
    "least": ("""At how many tokens do both take equally long? Computing grows with the square of the tokens, moving
        with the tokens.""", ["tokens * moving / computing  ->  tokens * computing / moving",
             "tokens * moving / computing  ->  moving / computing",
             "tokens * moving / computing  ->  tokens * (moving / computing) ** 0.5"]),
}

MISTAKES["expert_traffic"] = {
    "scales": ("Each 128 elements in FP8 bring a scale of 4 bytes with them.", ["hidden + 4 * hidden / 128  ->  hidden",
             "4 * hidden / 128  ->  hidden / 128", "hidden + 4 * hidden / 128  ->  hidden + 4"]),
    "precision": ("To the experts an element has 1 byte, on the way back it has 2.",
            ["top_k * 2 * hidden  ->  top_k * row", "hidden + 4 * hidden / 128  ->  2 * hidden"]),
    "copies": ("A token is sent to each of its experts, and each of them sends a result back.",
            ["dispatch = tokens * top_k  ->  dispatch = tokens", "combine = tokens * top_k  ->  combine = tokens"]),
    "nodes": ("A token goes to as many nodes as it has experts, but to max_nodes at most, and to each of them once.",
            ["min(top_k, max_nodes)  ->  top_k", "min(top_k, max_nodes)  ->  max_nodes",
             "tokens * min(top_k, max_nodes)  ->  tokens * top_k * max_nodes"]),
    "microseconds": ("A microsecond is a millionth of a second.",
            {"dispatch_us * 1e-6": "dispatch_us * 1e-3", "combine_us * 1e-6": "combine_us * 1e-3"}),
    "units": ("A GB has 10⁹ bytes, an MB 10⁶; nothing is counted in bits here.",
            ["dispatch / 1e9, combine / 1e9  ->  dispatch, combine",
             "dispatch / 1e9, combine / 1e9  ->  8 * dispatch / 1e9, 8 * combine / 1e9", "across / 1e6  ->  across",
             "across / 1e6  ->  across / 2**20"]),
}

RIGHT["ring_hides"] = {
    "solved for the tokens":
        "tokens * moving / computing  ->  kv_heads * element_bytes * tflops * 1e3 * (2 if causal else 1) * 4 / "
        "heads / gigabits",
    "a list": {"return computing * 1e3, moving * 1e3, tokens * moving / computing":
             "return [1e3 * computing, 1e3 * moving, tokens / computing * moving]"},
}

RIGHT["expert_traffic"] = {
    "33 parts of 32": "hidden + 4 * hidden / 128  ->  hidden * 33 / 32",
    "a tensor": {"return dispatch / 1e9, combine / 1e9, across / 1e6":
             "return torch.tensor([dispatch / 1e9, combine / 1e9, across / 1e6])"},
}

ring_hides = paper(
    "Exercise 7", answers.ring_hides, MISTAKES["ring_hides"], cases=[
        (4096, 32, 8, 128, 2, 989, 400, True), (4096, 32, 32, 128, 4, 989, 400, True),
        (8192, 64, 8, 128, 2, 312, 100, False), (2048, 16, 16, 64, 4, 312, 2400, False),
        (16384, 40, 8, 128, 1, 500, 200, True),
    ],
    units=["ms computing", "ms moving", "tokens"], tolerance=1e-3,
)
expert_traffic = paper(
    "Exercise 8", answers.expert_traffic, MISTAKES["expert_traffic"], cases=[
        (128, 7168, 8, 4, 173, 314), (128, 7168, 8, 4, 77, 114), (256, 4096, 2, 4, 50, 90),
        (4096, 2048, 6, 3, 700, 900),
    ],
    units=["GB/s", "GB/s", "MB"], tolerance=1e-3,
)
