"""Textbook algorithms of collectives: the messages of each step, and running them with real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from course_utils.costs import COLLECTIVES

__all__ = ["ALGORITHMS", "Message", "owned_slots", "result_slots", "schedule", "step_through", "trace"]

ALGORITHMS = ("ring", "root", "tree", "recursive_doubling", "halving_doubling")  # of all-reduce


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


def schedule(op: str, n: int, algorithm: str | None = None) -> list[list[Message]]:
    """Return the messages of each step of a textbook algorithm for `op` on `n` ranks; the root is rank 0.

    Every rank has n slots, one for each piece of S/n bytes. Ring for all-gather, reduce-scatter and all-reduce;
    binomial tree for broadcast and reduce; the root and one other rank at a time for gather and scatter; exchange by
    pairs for all-to-all.

    Parameters
    ----------
    op : str
        One of `COLLECTIVES`.
    n : int
        Number of ranks, from 1.
    algorithm : str, optional
        For all-reduce, one of `ALGORITHMS`. ``"ring"`` (default); ``"root"``: rank 0 takes everything from one rank
        after the other and gives the sum back in the same way; ``"tree"``: binomial reduce and broadcast;
        ``"recursive_doubling"``: pairs exchange everything; ``"halving_doubling"``: pairs exchange halves, then
        quarters and so on, and the way back. The last two need a power of two: ranks beyond it add their pieces to
        another rank's before, and get the result from it after (Rabenseifner 2004, Optimization of collective
        reduction operations).
    """
    if op not in COLLECTIVES:
        raise ValueError(f"unknown collective {op!r}; choose one of {', '.join(COLLECTIVES)}")
    if algorithm not in (None, *ALGORITHMS):
        raise ValueError(f"unknown algorithm {algorithm!r}; choose one of {', '.join(ALGORITHMS)}")
    if algorithm and op != "all_reduce":
        raise ValueError(f"{op} has one algorithm here; a choice is there for all_reduce only")
    if algorithm in ("recursive_doubling", "halving_doubling"):
        return _doubling(n, whole=algorithm == "recursive_doubling")

    message = _message
    ring_reduce = [[message(r, (r + 1) % n, [(r - s - 1) % n], add=True) for r in range(n)] for s in range(n - 1)]
    ring_gather = [[message(r, (r + 1) % n, [(r - s) % n]) for r in range(n)] for s in range(n - 1)]
    doubling = [2**k for k in range((n - 1).bit_length())]
    tree = [[(r, r + d) for r in range(d) if r + d < n] for d in doubling]
    broadcast = [[message(a, b, range(n)) for a, b in pairs] for pairs in tree]
    reduce = [[message(b, a, range(n), add=True) for a, b in pairs] for pairs in reversed(tree)]
    match op:
        case "reduce_scatter":
            return ring_reduce
        case "all_gather":
            return ring_gather
        case "all_reduce" if algorithm == "root":
            to_root = [[message(r, 0, range(n), add=True)] for r in range(1, n)]
            return to_root + [[message(0, r, range(n))] for r in range(1, n)]
        case "all_reduce" if algorithm == "tree":
            return reduce + broadcast
        case "all_reduce":
            return ring_reduce + ring_gather
        case "broadcast":
            return broadcast
        case "reduce":
            return reduce
        case "scatter":
            return [[message(0, r, [r])] for r in range(1, n)]
        case "gather":
            return [[message(r, 0, [r])] for r in range(1, n)]
    power_of_two = n & (n - 1) == 0
    rounds = [[(r, r ^ s if power_of_two else (s - r) % n) for r in range(n)] for s in range(n)]
    steps = [[Message(a, b, (b,), (a,), False) for a, b in pairs if a != b] for pairs in rounds]
    return [step for step in steps if step]


def _doubling(n: int, whole: bool) -> list[list[Message]]:
    """All-reduce by pairs at distance 1, 2, 4 …: all pieces (`whole`), or first halves of what is left, then back."""
    power = 1 << (n.bit_length() - 1)
    distances = [1 << k for k in range(power.bit_length() - 1)]
    fold = [_message(r + power, r, range(n), add=True) for r in range(n - power)]
    unfold = [_message(r, r + power, range(n)) for r in range(n - power)]

    def part(rank: int, d: int) -> range:
        """Pieces of the `d` neighbouring ranks that `rank` belongs to, if the first `power` share all n."""
        first = rank & -d
        return range(first * n // power, (first + d) * n // power)

    if whole:
        steps = [[_message(r, r ^ d, range(n), add=True) for r in range(power)] for d in distances]
    else:
        halving = [[_message(r, r ^ d, part(r ^ d, d), add=True) for r in range(power)] for d in reversed(distances)]
        steps = halving + [[_message(r, r ^ d, part(r, d)) for r in range(power)] for d in distances]
    return [step for step in (fold, *steps, unfold) if step]


def step_through(op: str, pieces, algorithm: str | None = None) -> Iterator[int]:
    """Run `schedule` on this rank with real point-to-point messages, in place; yield the step number after each step.

    Parameters
    ----------
    op : str
        One of `COLLECTIVES`.
    pieces : torch.Tensor
        Shape (world_size, k): row p is piece p. Rows a rank does not own at the start are overwritten or ignored.
    algorithm : str, optional
        As for `schedule`.
    """
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    if pieces.dim() != 2 or len(pieces) != n:
        raise ValueError(f"pieces must have shape (world_size, k) with world_size {n}, got {tuple(pieces.shape)}")
    for number, step in enumerate(schedule(op, n, algorithm), start=1):
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


def trace(op: str, inputs: Sequence[Sequence[float]], algorithm: str | None = None):
    """Run `op` step by step on this rank, on numbers, and check the end against the library's collective.

    Parameters
    ----------
    op : str
        One of `COLLECTIVES`.
    inputs : list of list of float
        One number for each slot of each rank, shape (world_size, world_size); slots outside `owned_slots` are not used.
    algorithm : str, optional
        As for `schedule`.

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

    from course_utils.ranks import device

    rank, n = dist.get_rank(), dist.get_world_size()
    slots = torch.zeros(n, 2, dtype=torch.float64, device=device())
    for slot in owned_slots(op, rank, n):
        slots[slot] = torch.tensor([inputs[rank][slot], 2.0**rank])
    expected = _library_result(op, slots[:, 0].clone())
    snapshots = [slots.clone()]
    for _ in step_through(op, slots, algorithm):
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
