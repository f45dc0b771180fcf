"""What a collective costs: its messages step by step, the bytes each rank must move, and the time that takes.

Sizes follow nccl-tests: S is the tensor for all-reduce, broadcast and reduce, the whole output for all-gather, the
whole input for reduce-scatter and all-to-all, and all pieces together for gather and scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

__all__ = [
    "COLLECTIVES", "Message", "algbw", "busbw", "busbw_factor", "bytes_sent", "fit_alpha_beta", "format_bytes",
    "owned_slots", "result_slots", "schedule", "step_through", "trace",
]  # fmt: skip

COLLECTIVES = (
    "broadcast", "reduce", "all_reduce", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all",
)  # fmt: skip


def busbw_factor(op: str, n: int) -> float:
    """Bytes that the busiest of `n` ranks must move one way, as a multiple of S.

    2(n-1)/n for all-reduce, 1 for broadcast, reduce, send and recv, (n-1)/n for the others (NVIDIA nccl-tests,
    doc/PERFORMANCE.md; for gather and scatter the root's share, by the same reasoning).
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if op in ("send", "recv"):
        return 1.0
    if op not in COLLECTIVES:
        raise ValueError(f"unknown operation {op!r}; choose one of {', '.join(COLLECTIVES)}, send, recv")
    if n == 1:
        return 0.0
    return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0}.get(op, (n - 1) / n)


def bytes_sent(op: str, n: int, size: float) -> float:
    """Bytes the busiest of `n` ranks must move one way, at least, for message size `size` in bytes.

    The symmetric collectives reach it on every rank at once by a ring; for broadcast, reduce, gather and scatter the
    busiest rank is the root.
    """
    return busbw_factor(op, n) * size


def algbw(size: float, seconds: float) -> float:
    """Algorithm bandwidth S/t in bytes per second: how fast the caller's data gets done."""
    return size / seconds


def busbw(op: str, n: int, size: float, seconds: float) -> float:
    """Bus bandwidth in bytes per second: `algbw` times `busbw_factor`, to be compared with a link's speed."""
    return algbw(size, seconds) * busbw_factor(op, n)


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit t = alpha + beta * S by least squares on the relative error, so that small and large sizes count alike.

    Returns alpha in seconds and beta in seconds per byte, neither negative, from at least two different sizes in bytes.
    """
    s, t = np.asarray(sizes, float), np.asarray(seconds, float)
    if s.shape != t.shape or s.ndim != 1 or len(np.unique(s)) < 2:
        raise ValueError("sizes and seconds must have one length, with at least two different sizes")
    if not (t > 0).all():
        raise ValueError("seconds must be positive")
    columns = np.stack([1 / t, s / t], axis=1)
    alpha, beta = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)[0]
    if alpha < 0 or beta < 0:  # then the best non-negative fit has one term only
        single = [columns[:, i].sum() / (columns[:, i] ** 2).sum() for i in (0, 1)]
        worst = [((columns[:, i] * single[i] - 1) ** 2).sum() for i in (0, 1)]
        alpha, beta = (single[0], 0.0) if worst[0] <= worst[1] else (0.0, single[1])
    return float(alpha), float(beta)


def format_bytes(size: float) -> str:
    """Return `size` in bytes with a binary prefix, such as ``64 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


class Message(NamedTuple):
    """One message of one step: pieces of rank `src` go into the slots `into` of rank `dst`, added or stored."""

    src: int
    dst: int
    pieces: tuple[int, ...]
    into: tuple[int, ...]
    add: bool


def owned_slots(op: str, rank: int, n: int) -> list[int]:
    """Slots that `rank` fills before `op` starts; the root is rank 0."""
    if op in ("gather", "all_gather"):
        return [rank]
    return [] if op in ("broadcast", "scatter") and rank else list(range(n))


def result_slots(op: str, rank: int, n: int) -> list[int]:
    """Slots of `rank` that hold the result of `op` at its end; the others hold left-overs."""
    if op in ("scatter", "reduce_scatter"):
        return [rank]
    return [] if op in ("reduce", "gather") and rank else list(range(n))


def schedule(op: str, n: int) -> list[list[Message]]:
    """Return the messages of each step of a textbook algorithm for `op` on `n` ranks; the root is rank 0.

    Every rank has n slots, one for each piece of S/n bytes. Ring for all-gather, reduce-scatter and all-reduce;
    binomial tree for broadcast and reduce; the root and one other rank at a time for gather and scatter; exchange by
    pairs for all-to-all.
    """
    if op not in COLLECTIVES:
        raise ValueError(f"unknown collective {op!r}; choose one of {', '.join(COLLECTIVES)}")

    def message(src: int, dst: int, pieces: Sequence[int], add: bool = False) -> Message:
        return Message(src, dst, tuple(pieces), tuple(pieces), add)

    ring_reduce = [[message(r, (r + 1) % n, [(r - s - 1) % n], add=True) for r in range(n)] for s in range(n - 1)]
    ring_gather = [[message(r, (r + 1) % n, [(r - s) % n]) for r in range(n)] for s in range(n - 1)]
    doubling = [2**k for k in range((n - 1).bit_length())]
    tree = [[(r, r + d) for r in range(d) if r + d < n] for d in doubling]
    match op:
        case "reduce_scatter":
            return ring_reduce
        case "all_gather":
            return ring_gather
        case "all_reduce":
            return ring_reduce + ring_gather
        case "broadcast":
            return [[message(a, b, range(n)) for a, b in pairs] for pairs in tree]
        case "reduce":
            return [[message(b, a, range(n), add=True) for a, b in pairs] for pairs in reversed(tree)]
        case "scatter":
            return [[message(0, r, [r])] for r in range(1, n)]
        case "gather":
            return [[message(r, 0, [r])] for r in range(1, n)]
    power_of_two = n & (n - 1) == 0
    rounds = [[(r, r ^ s if power_of_two else (s - r) % n) for r in range(n)] for s in range(n)]
    steps = [[Message(a, b, (b,), (a,), False) for a, b in pairs if a != b] for pairs in rounds]
    return [step for step in steps if step]


def step_through(op: str, pieces) -> Iterator[int]:
    """Run `schedule` on this rank with real point-to-point messages, in place; yield the step number after each step.

    Parameters
    ----------
    op : str
        One of `COLLECTIVES`.
    pieces : torch.Tensor
        Shape (world_size, k): row p is piece p. Rows a rank does not own at the start are overwritten or ignored.
    """
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    if pieces.dim() != 2 or len(pieces) != n:
        raise ValueError(f"pieces must have shape (world_size, k) with world_size {n}, got {tuple(pieces.shape)}")
    for number, step in enumerate(schedule(op, n), start=1):
        requests, arriving = [], []
        for m in step:
            if m.src == rank:
                requests.append(dist.P2POp(dist.isend, pieces[list(m.pieces)], m.dst))
            if m.dst == rank:
                arriving.append((m, torch.empty_like(pieces[list(m.into)])))
                requests.append(dist.P2POp(dist.irecv, arriving[-1][1], m.src))
        for request in dist.batch_isend_irecv(requests) if requests else ():
            request.wait()
        for m, got in arriving:
            pieces[list(m.into)] = pieces[list(m.into)] + got if m.add else got
        yield number


def trace(op: str, inputs: Sequence[Sequence[float]]):
    """Run `op` step by step on this rank, on numbers, and check the end against the library's collective.

    Parameters
    ----------
    op : str
        One of `COLLECTIVES`.
    inputs : list of list of float
        One number for each slot of each rank, shape (world_size, world_size); slots outside `owned_slots` are not used.

    Returns
    -------
    torch.Tensor
        Shape (steps + 1, world_size, 2), float64: each slot's value and a bit mask of the ranks that contributed.

    Raises
    ------
    AssertionError
        If the result differs from the library's.
    """
    import torch
    import torch.distributed as dist

    from .launcher import device

    rank, n = dist.get_rank(), dist.get_world_size()
    slots = torch.zeros(n, 2, dtype=torch.float64, device=device())
    for slot in owned_slots(op, rank, n):
        slots[slot] = torch.tensor([inputs[rank][slot], 2.0**rank])
    expected = _library_result(op, slots[:, 0].clone())
    snapshots = [slots.clone()]
    for _ in step_through(op, slots):
        snapshots.append(slots.clone())
    kept = result_slots(op, rank, n)
    torch.testing.assert_close(slots[kept, 0], expected[kept], msg=lambda text: f"{op} differs on rank {rank}: {text}")
    return torch.stack(snapshots).cpu()


def _library_result(op: str, x):
    import torch.distributed as dist

    rank, whole = dist.get_rank(), x.clone()
    mine, kept = x[rank : rank + 1], whole[rank : rank + 1]
    {
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "reduce": lambda: dist.reduce(whole, dst=0),
        "all_reduce": lambda: dist.all_reduce(whole),
        "gather": lambda: dist.gather(mine, None if rank else list(whole.split(1)), dst=0),
        "scatter": lambda: dist.scatter(kept, None if rank else list(x.split(1)), src=0),
        "all_gather": lambda: dist.all_gather_single(whole, mine),
        "reduce_scatter": lambda: dist.reduce_scatter_single(kept, x),
        "all_to_all": lambda: dist.all_to_all_single(whole, x),
    }[op]()
    return whole
