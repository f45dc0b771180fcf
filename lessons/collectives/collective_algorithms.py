"""Textbook algorithms of collectives: the messages of each step, and running them with real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Message", "owned_slots", "result_slots", "schedule", "step_through", "trace"]


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


def _message(src: int, dst: int, pieces: Sequence[int], add: bool = False) -> Message:
    return Message(src, dst, tuple(pieces), tuple(pieces), add)


def schedule(op: str, n: int) -> list[list[Message]]:
    """Return the messages of each step of a textbook algorithm for a collective `op` on `n` ranks.

    The root is rank 0. Every rank has n slots, one for each piece of S/n bytes. Ring for all-gather, reduce-scatter and
    all-reduce; binomial tree for broadcast and reduce; the root and one other rank at a time for gather and scatter;
    exchange by pairs for all-to-all.
    """
    ring_reduce = [[_message(r, (r + 1) % n, [(r - s - 1) % n], add=True) for r in range(n)] for s in range(n - 1)]
    ring_gather = [[_message(r, (r + 1) % n, [(r - s) % n]) for r in range(n)] for s in range(n - 1)]
    doubling = [2**k for k in range((n - 1).bit_length())]
    tree = [[(r, r + d) for r in range(d) if r + d < n] for d in doubling]
    power_of_two = n & (n - 1) == 0
    rounds = [[(r, r ^ s if power_of_two else (s - r) % n) for r in range(n)] for s in range(n)]
    exchange = [[Message(a, b, (b,), (a,), False) for a, b in pairs if a != b] for pairs in rounds]
    return {
        "reduce_scatter": ring_reduce, "all_gather": ring_gather, "all_reduce": ring_reduce + ring_gather,
        "broadcast": [[_message(a, b, range(n)) for a, b in pairs] for pairs in tree],
        "reduce": [[_message(b, a, range(n), add=True) for a, b in pairs] for pairs in reversed(tree)],
        "scatter": [[_message(0, r, [r])] for r in range(1, n)],
        "gather": [[_message(r, 0, [r])] for r in range(1, n)],
        "all_to_all": [step for step in exchange if step],
    }[op]


def step_through(op: str, pieces) -> Iterator[int]:
    """Run `schedule` on this rank with real point-to-point messages, in place; yield the step number after each step.

    `pieces` is a tensor (world_size, k): row p is piece p. Rows that a rank does not own are overwritten or ignored.
    """
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
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

    `inputs` has a number for each slot of each rank; slots outside `owned_slots` are not used. Returned is a tensor
    (steps + 1, world_size, 2) in float64: each slot's value, and a bit mask of the ranks that contributed to it.
    """
    import torch
    import torch.distributed as dist

    from course_utils.ranks import device

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
