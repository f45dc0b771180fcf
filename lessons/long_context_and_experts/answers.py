"""The solutions of the exercises of lesson 11; what stands between the marks is what a learner writes."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def piece(q, k, v, keep):
    """Attention of queries to some keys: (m, l, o). `keep` says which pairs the mask leaves."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~keep, -torch.inf)
    m = scores.amax(-1, keepdim=True)
    p = torch.where(keep, torch.exp(scores - m), 0)
    return m, p.sum(-1, keepdim=True), p @ v


def merge(first: Piece, second: Piece) -> Piece:
    """The piece (m, l, o) of both, without a change of the arguments.

    m and l have the shape (..., queries, 1), o has the shape (..., queries, d).
    """
    ### BEGIN SOLUTION
    (m1, l1, o1), (m2, l2, o2) = first, second
    m = torch.maximum(m1, m2)
    finite = m.masked_fill(m == -torch.inf, 0)
    f1, f2 = torch.exp(m1 - finite), torch.exp(m2 - finite)
    return m, f1 * l1 + f2 * l2, f1 * o1 + f2 * o2
    ### END SOLUTION


def zigzag(length: int, n: int) -> list[torch.Tensor]:
    """For each of n ranks the positions of its tokens in ascending order, int64.

    length: tokens of the whole sequence, from position 0 on.
    """
    ### BEGIN SOLUTION
    runs = torch.arange(length).tensor_split(2 * n)
    return [torch.cat([runs[r], runs[2 * n - 1 - r]]) for r in range(n)]
    ### END SOLUTION


def pass_on(tensors):
    """Start one step: what will arrive from the rank before, and a list of work to wait for."""
    rank, n = dist.get_rank(), dist.get_world_size()
    arrive = [torch.empty_like(t) for t in tensors]
    ops = [dist.P2POp(dist.isend, t, (rank + 1) % n) for t in tensors]
    ops += [dist.P2POp(dist.irecv, t, (rank - 1) % n) for t in arrive]
    return arrive, dist.batch_isend_irecv(ops)


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Causal attention of this rank's queries to all tokens, of the shape of q.

    q: (batch, heads, tokens, d); k and v: (batch, kv_heads, tokens, d).
    positions: (tokens,), int64, of this rank's tokens.
    """
    ### BEGIN SOLUTION
    n, group = dist.get_world_size(), q.shape[1] // k.shape[1]
    block, total = [k, v, positions], None
    for step in range(n):
        if step < n - 1:
            arrive, work = pass_on(block)
        keys, values = (t.repeat_interleave(group, dim=1) for t in block[:2])
        part = piece(q, keys, values, positions[:, None] >= block[2])
        total = part if total is None else merge(total, part)
        if step < n - 1:
            for one in work:
                one.wait()
            block = arrive
    _, weights, o = total
    return o / weights
    ### END SOLUTION


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, recv):
        ctx.lists = send, recv
        out = rows.new_empty(sum(recv), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, recv = ctx.lists
        return AllToAll.apply(grad, recv, send), None, None


def exchange(rows, send, recv):
    """The first send[0] rows go to rank 0, the next send[1] to rank 1, and so on.

    What comes from rank 0, recv[0] rows, stands first in the result, and so on.
    """
    return AllToAll.apply(rows, send, recv)


def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of this rank's tokens, of the shape of q.

    q: (batch, heads, tokens, d); k and v: (batch, kv_heads, tokens, d).
    """
    ### BEGIN SOLUTION
    n, kv_heads = dist.get_world_size(), k.shape[1]

    def swap(x: torch.Tensor, cut: int, join: int) -> torch.Tensor:
        parts = exchange(torch.stack(x.chunk(n, dim=cut)), [1] * n, [1] * n)
        return torch.cat(parts.unbind(), dim=join)

    copies = math.lcm(n, kv_heads) // kv_heads
    k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    q, k, v = (swap(x, cut=1, join=2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return swap(o, cut=2, join=1)
    ### END SOLUTION


def expert_layer(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor,
    expert: Callable, n_experts: int, capacity: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Sum over the chosen experts of weight · expert(token), of the shape of x.

    x: (tokens, d); chosen: (tokens, k), int64, numbers of experts; weights: (tokens, k).
    expert: expert(i, rows) applies the i-th expert of this rank, also to no rows.
    """
    ### BEGIN SOLUTION
    n, k = dist.get_world_size(), chosen.shape[1]
    flat = chosen.flatten()
    sent = torch.cat([(flat == e).nonzero()[:capacity, 0] for e in range(n_experts)])
    counts = torch.bincount(flat[sent], minlength=n_experts).view(n, -1)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    send, recv = counts.sum(1).tolist(), theirs.sum(1).tolist()
    rows = exchange(x[sent // k], send, recv)
    owner = torch.arange(n_experts // n).repeat(n).repeat_interleave(theirs.flatten())
    results = torch.zeros_like(rows)
    for i in range(n_experts // n):
        results[owner == i] = expert(i, rows[owner == i])
    back = exchange(results, recv, send) * weights.flatten()[sent, None]
    return torch.zeros_like(x).index_add(0, sent // k, back)
    ### END SOLUTION


def balanced_step(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, top_k: int, use: Callable, rate: float
) -> None:
    """Leave the gradient of all ranks in gate.grad, and update bias in place.

    x: (tokens, d); gate: (d, experts), requires grad; bias: (experts,), does not.
    use: use(chosen, weights) -> loss of this rank's tokens, divided by the tokens of all ranks;
        chosen and weights have the shape (tokens, top_k).
    """
    ### BEGIN SOLUTION
    scores = torch.sigmoid(x @ gate)
    chosen = (scores + bias).topk(top_k, dim=1).indices
    best = scores.gather(1, chosen)
    use(chosen, best / best.sum(1, keepdim=True)).backward()
    dist.all_reduce(gate.grad)
    load = torch.bincount(chosen.flatten(), minlength=len(bias)).to(bias.dtype)
    dist.all_reduce(load)
    bias += rate * torch.sign(load.mean() - load)
    ### END SOLUTION


def ring_hides(
    tokens: int, heads: int, kv_heads: int, d: int, element_bytes: int,
    tflops: float, gigabits: float, causal: bool,
) -> tuple[float, float, float]:  # fmt: skip
    """Milliseconds of computing and of moving in one step, and the least tokens of a rank.

    tokens: of a rank. tflops: 10¹² FLOP a second. gigabits: of a link one way, 10⁹ bits a second.
    """
    ### BEGIN SOLUTION
    pairs = tokens**2 / 2 if causal else tokens**2
    computing = 4 * pairs * heads * d / (tflops * 1e12)
    moving = 2 * tokens * kv_heads * d * element_bytes / (gigabits * 1e9 / 8)
    return computing * 1e3, moving * 1e3, tokens * moving / computing
    ### END SOLUTION


def expert_traffic(
    tokens: int, hidden: int, top_k: int, max_nodes: int, dispatch_us: float, combine_us: float
) -> tuple[float, float, float]:
    """GB/s to the experts and back, and MB between nodes (10⁹ bytes a second, 10⁶ bytes).

    tokens: of a rank; max_nodes: nodes on which the top_k experts of a token lie, at most.
    """
    ### BEGIN SOLUTION
    row = hidden + 4 * hidden / 128
    dispatch = tokens * top_k * row / (dispatch_us * 1e-6)
    combine = tokens * top_k * 2 * hidden / (combine_us * 1e-6)
    across = tokens * min(top_k, max_nodes) * row
    return dispatch / 1e9, combine / 1e9, across / 1e6
    ### END SOLUTION
