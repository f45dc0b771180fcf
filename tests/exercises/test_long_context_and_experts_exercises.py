"""The exercises on long sequences and experts: solutions pass, stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_cases import ExerciseTests, hangs

from lessons.long_context_and_experts import check as checks

pytestmark = pytest.mark.guard(120)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}
RANK, RANKS = "dist.get_rank()", "dist.get_world_size()"

# ------------------------------------------------------------------------------------------------ pieces

L_AND_O = "f1 * l1 + f2 * l2, f1 * o1 + f2 * o2"
FACTORS = "torch.exp(m1 - finite), torch.exp(m2 - finite)"
WRONG["merge"] = {
    "form": {f"return m, {L_AND_O}": "return (f1 * o1 + f2 * o2) / (f1 * l1 + f2 * l2)"},
    "maximum": ["m = torch.maximum(m1, m2)  ->  m = m1 + m2", "m = torch.maximum(m1, m2)  ->  m = m1",
                "m = torch.maximum(m1, m2)  ->  m = torch.full_like(m1, max(m1.max(), m2.max()))"],
    "rescale-l": "f1 * l1 + f2 * l2  ->  l1 + l2",
    "rescale-o": "f1 * o1 + f2 * o2  ->  o1 + o2",
    "divided": {"return m, f1": "weights = f1 * l1 + f2 * l2\nreturn m, f1", "f1 * o1 + f2 * o2":
                "(f1 * o1 + f2 * o2) / weights"},
    "overflow": {FACTORS: "torch.exp(m1) / torch.exp(m), torch.exp(m2) / torch.exp(m)"},
    "no-key": f"{FACTORS}  ->  torch.exp(m1 - m), torch.exp(m2 - m)",
    "input-changed": {"return m, f1": "o1.mul_(f1)\nreturn m, f1", "f1 * o1 +": "o1 +"},
    "shape": f"return m, {L_AND_O}  ->  return m[..., 0], {L_AND_O}",
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
    "clamp": "m.masked_fill(m == -torch.inf, 0)  ->  m.clamp(min=-1e30)",
    "nan to 0": {FACTORS: "torch.exp(m1 - m).nan_to_num(0), torch.exp(m2 - m).nan_to_num(0)"},
}

# ------------------------------------------------------------------------------------------------ zig-zag

PAIRS = "[torch.cat([runs[r], runs[2 * n - 1 - r]]) for r in range(n)]"
SPLIT = "torch.arange(length).tensor_split(2 * n)"
WRONG["zigzag"] = {
    "form": f"{PAIRS}  ->  runs",
    "contiguous": f"{PAIRS}  ->  [*torch.arange(length).chunk(n)]",
    "striped": f"{PAIRS}  ->  [torch.arange(r, length, n) for r in range(n)]",
    "mirror": "runs[2 * n - 1 - r]  ->  runs[n + r]",
    "once": "runs[2 * n - 1 - r]  ->  runs[2 * n - 2 - r]",
    "order": "[runs[r], runs[2 * n - 1 - r]]  ->  [runs[2 * n - 1 - r], runs[r]]",
    "runs": {SPLIT: "torch.arange(length).tensor_split(4 * n)", PAIRS:
             "[torch.cat([runs[i] for i in (r, 2 * n - 1 - r, 2 * n + r, 4 * n - 1 - r)]) for r in range(n)]"},
    "uneven": [f"{SPLIT}  ->  torch.arange(length).chunk(2 * n)",
               f"{SPLIT}  ->  torch.arange(length).split(-(-length // (2 * n)))",
               f"{SPLIT}  ->  torch.arange(length // (2 * n) * 2 * n).chunk(2 * n)"],
    "balance": "runs[2 * n - 1 - r]  ->  runs[n + (n - r) % n]",
}


def by_borders(length, n):
    borders = [length * i // (2 * n) for i in range(2 * n + 1)]
    return [[*range(borders[r], borders[r + 1]), *range(borders[2 * n - 1 - r], borders[2 * n - r])] for r in range(n)]


RIGHT["zigzag"] = {
    "borders": by_borders,
    "flipped": f"{PAIRS}  ->  [torch.cat(both) for both in zip(runs[:n], runs[:n - 1:-1])]",
}

# ------------------------------------------------------------------------------------------------ ring

KEEP = "positions[:, None] >= block[2]"
WAIT = """
        if step < n - 1:
            for one in work:
                one.wait()
            block = arrive"""
MERGE = "total = part if total is None else merge(total, part)"
HEADS = "keys, values = (t.repeat_interleave(group, dim=1) for t in block[:2])"
ALL_HEADS = "block, total = [k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), positions], None"


def gathers(q, k, v, positions):
    """Keys and values of all ranks at once."""
    every = []
    for tensor in (k, v, positions):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        every.append(torch.cat(parts, -2 if tensor.dim() > 1 else 0))
    keep = positions[:, None] >= every[2]
    return F.scaled_dot_product_attention(q, *every[:2], attn_mask=keep, enable_gqa=True)


def to_everybody(q, k, v, positions):
    """Each rank sends its block to all others itself."""
    rank, n = dist.get_rank(), dist.get_world_size()
    blocks, ops = {rank: [k, v, positions]}, []
    for peer in set(range(n)) - {rank}:
        blocks[peer] = [torch.empty_like(t) for t in blocks[rank]]
        ops += [dist.P2POp(dist.isend, t, peer) for t in blocks[rank]]
        ops += [dist.P2POp(dist.irecv, t, peer) for t in blocks[peer]]
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    k, v, theirs = (torch.cat([blocks[r][i] for r in range(n)], -2 if i < 2 else 0) for i in range(3))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=positions[:, None] >= theirs, enable_gqa=True)


WRONG["ring_attention"] = {
    "positions": [f"{KEEP}  ->  positions[:, None] >= positions",
                  f"{KEEP}  ->  torch.ones(len(positions), len(positions)).tril().bool()"],
    "not-causal": f"{KEEP}  ->  positions[:, None] >= 0 * positions",
    "future": f"{KEEP}  ->  positions[:, None] <= block[2]",
    "own-block": {"for step in range(n):": "for step in range(n - 1):", WAIT: "", "        keys, values":
                  "        for one in work:\n    one.wait()\nblock = arrive\nkeys, values"},
    "last-block": f"{MERGE}  ->  total = part if total is None else total if step == n - 1 else merge(total, part)",
    "rescale": f"{MERGE}  ->  total = part if total is None else [a + b for a, b in zip(total, part)]",
    "divided": "return o / weights  ->  return o",
    "value": "q.shape[-1] ** 0.5  ->  q.shape[-1]",
    "kv-order": "t.repeat_interleave(group, dim=1)  ->  t.repeat(1, group, 1, 1)",
    "gathered": gathers,
    "extra-hop": {"if step < n - 1:\n            arrive": "if n > 1:\n    arrive",
                  "if step < n - 1:\n            for": "if n > 1:\n    for"},
    "heads-sent": {"block, total = [k, v, positions], None": ALL_HEADS, HEADS: "keys, values = block[:2]"},
    "neighbor": to_everybody,
    "hang": hangs({"block, total =": f"n = n if {RANK} else 1  # the first tokens see no other block\nblock, total ="}),
}


def packed(q, k, v, positions):
    """K and V in one tensor, the other way round the ring, pieces merged at the end."""
    rank, n = dist.get_rank(), dist.get_world_size()
    group, parts, both, theirs = q.shape[1] // k.shape[1], [], torch.stack([k, v]), positions
    for step in range(n):
        ops, arrive = [], [torch.empty_like(both), torch.empty_like(theirs)]
        if step < n - 1:
            ops = [dist.P2POp(dist.irecv, t, (rank + 1) % n) for t in arrive]
            ops += [dist.P2POp(dist.isend, t, (rank - 1) % n) for t in (both, theirs)]
            ops = dist.batch_isend_irecv(ops)
        scores = q.unflatten(1, (-1, group)) @ both[0][:, :, None].mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(theirs > positions[:, None], -math.inf)
        parts.append((scores, both[1]))
        for work in ops:
            work.wait()
        both, theirs = arrive
    weights = torch.cat([scores for scores, _ in parts], -1).softmax(-1)
    return (weights @ torch.cat([v for _, v in parts], 2)[:, :, None]).flatten(1, 2)


RIGHT["ring_attention"] = {
    "packed": packed,
    "heads folded": {HEADS: "keys, values = (t.unflatten(1, (-1, 1)).expand(-1, -1, group, -1, -1).flatten(1, 2)"
                            " for t in block[:2])"},
    "masked blocks left out": {MERGE: "if total is None:\n    total = part\nelif (positions.max() >= block[2].min()):\n"
                                      "    total = merge(total, part)"},
}

# ------------------------------------------------------------------------------------------------ Ulysses

COPIES = "math.lcm(n, kv_heads) // kv_heads"
KV = "k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)"
SWAPPED = "(swap(x, cut=1, join=2) for x in (q, k, v))"
BACK = "swap(o, cut=2, join=1)"


def with_all_gather(q, k, v):
    n = dist.get_world_size()

    def every(x):
        class Gather(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                parts = [torch.empty_like(x) for _ in range(n)]
                dist.all_gather(parts, x.contiguous())
                return torch.cat(parts, 2)

            @staticmethod
            def backward(ctx, grad):
                grad = grad.clone()
                dist.all_reduce(grad)
                return grad.chunk(n, 2)[dist.get_rank()]

        return Gather.apply(x)

    t = q.shape[2]
    keep = torch.ones(n * t, n * t, dtype=torch.bool).tril().chunk(n)[dist.get_rank()]
    return F.scaled_dot_product_attention(q, every(k), every(v), attn_mask=keep, enable_gqa=True)


WRONG["ulysses"] = {
    "not-causal": ", is_causal=True  ->  ",
    "local": {SWAPPED: "(q, k, v)", f"return {BACK}": "return swap(swap(o, cut=1, join=2), cut=2, join=1)"},
    "not-back": f"return {BACK}  ->  return o",
    "head-order": {f"return {BACK}": f"return {BACK}.unflatten(1, (n, -1)).transpose(1, 2).flatten(1, 2)"},
    "grouped": {", enable_gqa=True": "", "q, k, v = (": "group = q.shape[1] // k.shape[1]\nq, k, v = (",
                "o = F": "k, v = (t.repeat(1, group, 1, 1) for t in (k, v))\no = F"},
    "kv-order": [{KV: "g = q.shape[1] // kv_heads\nk, v = k.repeat(1, g, 1, 1), v.repeat(1, g, 1, 1)"},
                 {KV: "k, v = k.repeat(1, copies, 1, 1), v.repeat(1, copies, 1, 1)"}],
    "few-heads": [f"{COPIES}  ->  1", f"{COPIES}  ->  max(1, n // kv_heads)"],
    "only-two-ranks": "torch.stack(x.chunk(n, dim=cut))  ->  torch.stack(x.chunk(2, dim=cut))",
    "gathered": with_all_gather,
    "copies": f"{COPIES}  ->  q.shape[1] // kv_heads",
    "no-gradient": "AllToAll.apply(rows, send, recv)  ->  AllToAll.apply(rows.detach(), send, recv)",
    "hang": hangs({f"return {BACK}": f"return {BACK} if {RANK} else o"}),
}


RIGHT["ulysses"] = {
    "copies after": {"enable_gqa=True": "enable_gqa=False", "o = F": "g = q.shape[1] // k.shape[1]\n"
                     "k, v = (t.repeat_interleave(g, 1) for t in (k, v))\no = F"},
    "indexed heads": {KV: "serve = [h // copies for h in range(copies * kv_heads)]\nk, v = k[:, serve], v[:, serve]"},
}

# ------------------------------------------------------------------------------------------------ experts

KEPT = "[:capacity, 0]"
LOOP = """results = torch.zeros_like(rows)
    for i in range(n_experts // n):
        results[owner == i] = expert(i, rows[owner == i])"""
WEIGHED = " * weights.flatten()[sent, None]"
WRONG["expert_layer"] = {
    "unweighted": {WEIGHED: ""},
    "one-result": "index_add(0, sent // k, back)  ->  index_copy(0, sent // k, back)",
    "weighted-before": {WEIGHED: "", "x[sent // k]": f"x[sent // k]{WEIGHED}"},
    "order": [{"results = torch.zeros_like(rows)": "owner = owner.sort().values\nresults = torch.zeros_like(rows)"},
              "index_add(0, sent // k,  ->  index_add(0, torch.arange(len(sent)) // k,"],
    "splits": ["exchange(x[sent // k], send, recv)  ->  exchange(x[sent // k], recv, send)",
               "exchange(results, recv, send)  ->  exchange(results, send, recv)"],
    "no-tokens": [hangs({"send, recv =": "if len(x) == 0:\n    return x * 1\nsend, recv ="}),
                  {"back = exchange": "back = results * 1 if len(rows) == 0 else exchange"}],
    "experts-per-rank": "for i in range(n_experts // n):  ->  for i in range(2):",
    "cut-graph": [
        hangs({"results = torch": "if len(rows) == 0:\n    back = exchange(rows.new_empty(rows.shape), recv, send)\n"
               "    back = back * weights.flatten()[sent, None]\n"
               "    return torch.zeros_like(x).index_add(0, sent // k, back)\nresults = torch"}),
        hangs({"results[owner == i] = expert": "if len(rows):\n            results[owner == i] = expert"}),
    ],
    "not-dropped": f"{KEPT}  ->  [:, 0]",
    "last-kept": f"{KEPT}  ->  [-(capacity or len(flat) + 1):, 0]",
    "all-ranks": {KEPT: "[:, 0]", "results[owner == i] = expert(i, rows[owner == i])":
                  "at = (owner == i).nonzero()[:capacity, 0]\nresults[at] = expert(i, rows[at])"},
    "per-rank": f"{KEPT}  ->  [: capacity and capacity * n // n_experts, 0]",
    "capacity": f"{KEPT}  ->  [: capacity and capacity + 1, 0]",
    "padded": {"x[sent // k], send, recv)": "torch.cat([x[sent // k], x[:1] * 0]), [*send[:-1], send[-1] + 1], "
               f"[r + ({RANK} == n - 1) for r in recv])", "owner = torch":
               f"if {RANK} == n - 1:\n    ends = torch.tensor(recv).cumsum(0) + torch.arange(n)\n"
               "    rows = rows[[i for i in range(len(rows)) if i not in ends.tolist()]]\nowner = torch"},
    "no-gradient": "AllToAll.apply(rows, send, recv)  ->  AllToAll.apply(rows.detach(), send, recv)",
    "too-many-calls": {"send, recv =": "dist.all_to_all_single(theirs, counts)\nsend, recv ="},
}


def expert_by_expert(x, chosen, weights, expert, n_experts, capacity=None):
    """Sorted by argsort, counts by all_gather, rows of an expert cut out of each rank's part."""
    rank, n = dist.get_rank(), dist.get_world_size()
    local, flat = n_experts // n, chosen.reshape(-1)
    token = torch.arange(len(x)).repeat_interleave(chosen.shape[1])
    place = F.one_hot(flat, n_experts).cumsum(0).gather(1, flat[:, None])[:, 0] - 1
    some = flat.argsort(stable=True)
    some = some if capacity is None else some[place[some] < capacity]
    mine = F.one_hot(flat[some], n_experts).sum(0)
    table = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(table, mine)
    table = torch.stack(table).view(n, n, local)
    send, recv = table[rank].sum(1).tolist(), table[:, rank].sum(1).tolist()
    blocks = AllToAll.apply(x[token[some]], send, recv)  # noqa: F821 - of the notebook
    cells = list(blocks.split(table[:, rank].flatten().tolist()))
    for i in range(local):
        done = expert(i, torch.cat(cells[i::local])).split([len(cell) for cell in cells[i::local]])
        cells[i::local] = done
    back = AllToAll.apply(torch.cat(cells), recv, send)  # noqa: F821
    y = torch.zeros_like(x)
    for t, row, w in zip(token[some].tolist(), back, weights.reshape(-1)[some], strict=True):
        y = y + F.one_hot(torch.tensor(t), len(x))[:, None] * (w * row)
    return y


RIGHT["expert_layer"] = {
    "sorted by expert": {LOOP: "by = owner.argsort(stable=True)\nparts = rows[by].split(theirs.sum(0).tolist())\n"
                         "results = torch.cat([expert(i, part) for i, part in enumerate(parts)])[by.argsort()]"},
    "a place for each copy": {WEIGHED: "", "torch.zeros_like(x).index_add(0, sent // k, back)":
                              "(x.new_zeros(len(flat), x.shape[1]).index_copy(0, sent, back)"
                              ".view(*chosen.shape, x.shape[1]) * weights[..., None]).sum(1)"},
}

# ------------------------------------------------------------------------------------------------ router

UPDATE = "bias += rate * torch.sign(load.mean() - load)"
LOAD = "load = torch.bincount(chosen.flatten(), minlength=len(bias)).to(bias.dtype)"
REDUCED = "dist.all_reduce(load)"
CALL = "use(chosen, best / best.sum(1, keepdim=True)).backward()"
WRONG["balanced_step"] = {
    "use-once": f"{CALL}  ->  {CALL[:-11]}\n{CALL}",
    "biased-weight": "scores.gather  ->  (scores + bias).gather",
    "softmax": "torch.sigmoid(x @ gate)  ->  torch.softmax(x @ gate, dim=1)",
    "not-normalized": "best / best.sum(1, keepdim=True)  ->  best",
    "no-bias": "(scores + bias).topk  ->  scores.topk",
    "own-gradient": "dist.all_reduce(gate.grad)  ->  dist.all_reduce(gate.grad.clone())",
    "mean-gradient": f"dist.all_reduce(gate.grad)  ->  dist.all_reduce(gate.grad)\ngate.grad /= {RANKS}",
    "no-gradient": {CALL: CALL[:-11], "all_reduce(gate.grad)": "all_reduce(gate.detach().clone())"},
    "own-load": f"{REDUCED}  ->  dist.all_reduce(load.clone())",
    "sign": "load.mean() - load)  ->  load - load.mean())",
    "size": f"{UPDATE}  ->  bias += rate * (load.mean() - load)",
    "not-kept": f"{UPDATE}  ->  bias = bias + rate * torch.sign(load.mean() - load)",
    "too-early": {f"\n    {LOAD}\n    {REDUCED}\n    {UPDATE}": "", "best = scores":
                  f"{LOAD}\n{REDUCED}\n{UPDATE}\nchosen = (scores + bias).topk(top_k, dim=1).indices\nbest = scores"},
    "shape": "use(chosen, best  ->  use(chosen.flatten(), best",
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
    "two masks": f"{UPDATE}  ->  bias[load < load.mean()] += rate\nbias[load > load.mean()] -= rate",
}

# ------------------------------------------------------------------------------------------------ on paper

RIGHT["ring_hides"] = {
    "solved for the tokens": "tokens * moving / computing  ->  kv_heads * element_bytes * tflops * 1e3 * "
                             "(2 if causal else 1) * 4 / heads / gigabits",
    "a list": {"return computing * 1e3, moving * 1e3, tokens * moving / computing":
               "return [1e3 * computing, 1e3 * moving, tokens / computing * moving]"},
}
RIGHT["expert_traffic"] = {
    "33 parts of 32": "hidden + 4 * hidden / 128  ->  hidden * 33 / 32",
    "a tensor": {"return dispatch / 1e9, combine / 1e9, across / 1e6":
                 "return torch.tensor([dispatch / 1e9, combine / 1e9, across / 1e6])"},
}


class TestLongContextAndExperts(ExerciseTests):
    checks = checks
    WRONG, RIGHT = WRONG, RIGHT
