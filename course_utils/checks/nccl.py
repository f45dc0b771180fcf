"""Checks of the exercises on NCCL's algorithms.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import torch

from ..costs import all_reduce_seconds, flat
from . import BACKEND, TIMEOUT, CheckFailed, Exercise, Outcome, checked, close, message_steps, paper_problem, values

__all__ = [
    "HINTS", "crossover_ranks", "crossover_size", "hierarchical_all_reduce", "mended_ring_all_reduce",
    "pick_algorithm", "ring_all_gather", "ring_all_reduce", "ring_reduce_scatter", "tree_all_reduce",
]  # fmt: skip

INTRA = (3.4e-6, 1 / 450e9)  # alpha in s, beta in s/byte: an NVLink hop of NCCL's ring, NVLink 4 one way
INTER = (14e-6, 1 / 50e9)  # a network hop, one InfiniBand NDR port

_MESSAGES = "Only messages count here: send, recv, isend, irecv and batch_isend_irecv. "
_RING = {
    "hang": "With gloo a send returns only once the other side receives. If all ranks of a ring send first, nobody "
    "receives. Start both with batch_isend_irecv, then wait for both.",
    "library": _MESSAGES + "The library's collective is what you are to build.",
    "not-divisible": "Right while N divides the number of elements. x.tensor_split(N) makes N chunks whose lengths "
    "differ by one at most, and gives views into x.",
    "small": "Right while every chunk has an element. torch.chunk and torch.split make fewer than N chunks of a short "
    "tensor; tensor_split makes N, some of them empty.",
    "dtype": "Whole numbers must stay whole: make each buffer with empty_like or new_empty, not with torch.empty, and "
    "convert nothing.",
    "ring": "Right for the ring 0, 1, …, N-1 only. Work with places, place = ring.index(rank), and translate a place "
    "to a rank, ring[place], for send and recv alone.",
    "whole-tensor": "The result is right, but a message carries the whole tensor. In a ring only chunks travel, 1/N "
    "of the tensor in each step.",
    "hub": "Everything passes through one rank, whose link is then the bottleneck. In a ring each rank sends to "
    "one neighbour and receives from the other.",
    "direction": "The result is right, but the ring turns to the right. This one sends to the place before and "
    "receives from the next.",
    "not-a-ring": "The result is right, but a rank talks to others than its two neighbours. A ring has one way "
    "in and one way out for each rank, which can be laid along the fastest links.",
    "steps": "The bytes are right, but the messages wait for each other. In every step all ranks send and receive at "
    "once.",
}
_AVERAGE = {"average": "The sum is asked for, not the mean. Do not divide by N."}
_UNITS = {
    "gigabits": "Gb are bits: 400 Gb/s carry 50 GB/s.",
    "microseconds": "The latency comes in µs, the answer is wanted in seconds or bytes: 1 µs = 10⁻⁶ s.",
    "not-rounded": "A tree of N ranks has ⌈log2 N⌉ levels: for 6 ranks 3, not 2.58.",
}

HINTS: dict[str, dict[str, str]] = {
    "ring_reduce_scatter": _RING | _AVERAGE | {
        "unwaited": "A rank returns while a message of its own is still under way. Wait for every request before you "
        "go on.",
        "wrong-chunk": "The chunk is finished, but it is another rank's. Which chunk has to arrive in the last step, "
        "and which one is therefore sent first?",
        "first-chunk": "This rank returns the chunk that it sent away in the first step; the sum is in another one. "
        "The chunk of place p has to reach p in the last step. Which one does p send first, then?",
        "whole-result": "The docstring asks for one chunk, that of this rank's place.",
        "not-added": "Only one rank's numbers are in it. Add what comes in to your own chunk before you pass it on, "
        "and wait for a receive before you read its buffer.",
        "partial": "Some ranks' numbers are missing. A chunk visits all N ranks: N-1 steps. And what a rank sends on "
        "is the sum so far, not its own numbers.",
        "input-changed": "Add into a copy (x.clone()): tensor_split gives views, and what is added into a chunk of x "
        "changes x.",
    },
    "ring_all_gather": _RING | {
        "missing": "Some chunks still hold what stood there before. Start with the own chunk, then pass on in each "
        "step what came in the step before: N-1 steps.",
        "not-passed-on": "One neighbour's chunk came again and again. In the next step pass on what came in.",
        "order": "All chunks are there, but chunk p of x has to come from place p of the ring.",
        "added": "An all-gather adds nothing: what comes in replaces what stood there.",
        "not-in-place": "The function fills x and returns nothing. Receive into chunks of x itself.",
    },
    "ring_all_reduce": _RING | _AVERAGE | {
        "tail": "The last elements, those beyond the largest multiple of N, were not summed. Each of the N chunks "
        "takes part, the last as well.",
        "not-gathered": "This rank has the sum of one chunk only. After the reduce-scatter comes the all-gather.",
        "missing": "No chunk is finished. The all-gather starts with the chunk that the reduce-scatter has finished on "
        "this rank; any other that it sends overwrites a finished one.",
        "added": "The second half adds finished sums once more. It has to replace, not add.",
        "shape": "The sum has the shape of x. Work on a flat copy, and give it the shape of x at the end.",
    },
    "tree_all_reduce": _AVERAGE | {
        "hang": "Somebody waits for a message that nobody sends, or both sides of a pair send first. Follow one pair "
        "in the table: who of the two sends, and in which round?",
        "library": _MESSAGES + "dist.all_reduce, reduce and broadcast are what you are to build.",
        "not-broadcast": "One rank has the sum, and the others do not. The second half sends it back down the tree.",
        "own-sent": "Some ranks' numbers are missing. A rank that has children passes on the sum of its whole "
        "subtree, not its own numbers.",
        "added": "On the way down the finished sum replaces what a rank holds; it is not added.",
        "root": "The sums meet at rank 0, not at the root. Number the ranks from the root, place = (rank - root) % N, "
        "and translate places back to ranks for send and recv.",
        "power-of-two": "Right while N is a power of two. The partner of the last ranks may not exist: compare with N "
        "before you receive or send.",
        "dtype": _RING["dtype"],
        "hub": "One rank receives from all others one after another, and sends to all: 2(N-1) steps for it. In a tree "
        "pairs add at the same time.",
        "chain": "The sum goes from hand to hand, and back: 2(N-1) steps. In a tree pairs add at the same time.",
        "order": "The tree is right, but somebody far away waits too long. On the way up a rank receives first from "
        "the child with the smallest subtree, on the way down it sends first to the one with the largest.",
        "too-many-messages": "In a tree every rank but the root sends one message up and receives one on the way "
        "down: 2(N-1) messages in all, each the whole tensor.",
        "exchange": "Both sides of each pair send: recursive doubling. It needs half the steps, but every rank sends "
        "log2 N tensors. In a tree one side of a pair sends on the way up, the other on the way down.",
    },
    "hierarchical_all_reduce": _AVERAGE | {
        "hang": "Every rank must use the same ring in the same order in each of the three phases. Print the two lists "
        "of ranks on every rank, and compare.",
        "library": _MESSAGES + "Your functions of exercises 1 to 3 do the work.",
        "not-divisible": "Right while the number of ranks in a node divides the tensor. tensor_split works for any.",
        "two-nodes": "Right for two nodes only. The ring across has one rank of each of the M nodes.",
        "one-level": "The sum goes over this node only; the second level is missing.",
        "counted-twice": "Each number is counted several times: the second sum goes over ranks that already hold the "
        "first.",
        "shard-order": "The sums are right and stand in the wrong places. The chunk that a rank reduces, the one it "
        "sums between the nodes and the one it gathers are all number rank % per_node.",
        "flat-ring": "This is one ring over all ranks. All its bytes between the nodes pass one port of each, and "
        "the other ports are idle. Use a ring in each node, and one for each local rank across the nodes.",
        "leaders": "One rank of each node carries the whole tensor between the nodes, while the network ports of the "
        "others are idle. Let every local rank carry 1/G of it: reduce-scatter inside the node comes first.",
        "whole-tensor-across": "Every rank carries the whole tensor between the nodes. Reduce-scatter inside the node "
        "first, so that only 1/G of it is left.",
        "groups": "The result is right, but the heavy part runs between the nodes. Node m holds the ranks m·G to "
        "m·G + G-1; reduce-scatter and all-gather have to stay among them.",
        "slow": "The bytes are right, but the emulation shows no gain over the flat ring. Are there more messages one "
        "after another than 2(G-1) inside the node and 2(M-1) between the nodes?",
    },
    "mended_ring_all_reduce": {key: text for key, text in _RING.items() if key != "ring"} | _AVERAGE | {
        "only-two-ranks": "With two ranks the left neighbour is also the right one. Write down for 3 ranks who sends "
        "to whom, and who receives from whom.",
        "tail": "One of the faults: the last elements were never summed. Print len(chunks) for 11 numbers on 2 ranks. "
        "How many chunks are there, and how many take part?",
        "library": _MESSAGES + "Mend the ring; do not replace it.",
        "direction": "The result is right, but the ring turns to the left. The given one sends to rank + 1; mend it "
        "and keep its direction.",
        "not-gathered": "This rank has the sum of one chunk only. The second N-1 steps were not broken.",
        "missing": "No chunk is finished. Which chunk is complete after N-1 steps, and is it the one that is sent "
        "next? That part of the given function was right.",
        "added": "Finished sums replace what stands there. Only the first N-1 steps add.",
    },
    "pick_algorithm": _UNITS | {
        "whole-tensor": "In a ring only S/N travels in each of the 2(N-1) steps.",
        "half": "That is one half. Sums have to come in, and to go out again.",
        "root-port": "Rank 0 receives N-1 tensors through one port, one after another: (N-1)·S/B, and as much to send.",
        "root-latency": "The N-1 messages to rank 0 start at the same time on different ranks: their latencies "
        "overlap, and only their bytes wait for each other.",
        "no-latency": "By bytes alone the ring always wins. Every step costs the latency as well.",
        "slowest": "This is the slowest of the three.",
    },
    "crossover_size": _UNITS | {
        "upside-down": "Solve for S: the latency that the tree saves, divided by the time per byte that it adds.",
        "half-tree": "The tree is climbed and descended: 2⌈log2 N⌉ steps, as the ring has 2(N-1).",
        "whole-tensor": "In a ring only S/N travels in each step.",
    },
    "crossover_ranks": {
        "gigabits": _UNITS["gigabits"],
        "last-ring": "With that many ranks the ring is still as fast as the tree. The next power of two is the answer.",
        "any-number": "The docstring asks for a power of two.",
        "same-steps": "That holds if a step of the ring costs as much as one of the tree. The ring's carries S/N, the "
        "tree's all of S; and 1 µs = 10⁻⁶ s.",
        "half-tree": "The tree is climbed and descended: 2⌈log2 N⌉ steps.",
    },
}  # fmt: skip


def _numbers(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that depend on the seed only; whole ones are too large for float32."""
    if dtype.is_floating_point:
        return values(count, seed=seed)
    generator = torch.Generator().manual_seed(7919 * (seed + 1))
    return torch.randint(2**40, 2**41, (count,), generator=generator, dtype=dtype)


def _cases(n: int) -> Iterator[tuple[str, int, torch.dtype, str | None]]:
    """Inputs for ``n`` ranks: name, number of elements, dtype, and the hint if this is the first that fails."""
    yield "12 numbers", 12, torch.float32, None
    if n > 1:
        yield "11 numbers", 11, torch.float32, "not-divisible"
        yield f"{n - 1} number{'s' * (n > 2)}", n - 1, torch.float32, "small"
        yield "12 numbers of dtype int64", 12, torch.int64, "dtype"


def _used(outcome: Outcome) -> Counter:
    return Counter(entry.op for entry in outcome.ledger if entry.op != "barrier")


def _only_messages(exercise: Exercise, rank: int, outcome: Outcome, n: int) -> None:
    exercise.communicates(rank, outcome, n)
    collectives = sorted(set(_used(outcome)) - {"send", "recv"})
    exercise.require(not collectives, "library", f"the ledger shows {', '.join(collectives)}.", rank)


def _equal(
    exercise: Exercise, rank: int, got: Any, expected: torch.Tensor, traps: dict, what: str = "the result"
) -> None:
    if isinstance(got, torch.Tensor) and got.dtype != expected.dtype:
        exercise.refuse("dtype", f"{what} is of dtype {got.dtype}, x is {expected.dtype}.", rank)
    exercise.equal(rank, got, expected, traps, what)


def _joined(chunks: Sequence[torch.Tensor], shape: Sequence[int] = (-1,)) -> torch.Tensor:
    return torch.cat(list(chunks)).reshape(shape)


# ------------------------------------------------------------------------------------------------ rings


def _on_rings(x: torch.Tensor, fn: Callable, rings: list[list[int]]) -> Any:
    import torch.distributed as dist

    return fn(x, next(ring for ring in rings if dist.get_rank() in ring))


def _on_the_world(x: torch.Tensor, fn: Callable, rings: list[list[int]]) -> Any:
    return fn(x)


def _check_ring(
    exercise: Exercise, fn: Callable, make: Callable, compare: Callable, call: Callable, halves: int, turn: int
) -> None:
    """Run a ring algorithm on several inputs, first for its results, then for how they came about.

    ``make(ring, rank, count, dtype)`` gives a rank's input, ``compare(data, ring, rank, outcome)`` refuses a wrong
    result. ``halves`` times N-1 steps are allowed, and each place sends to the place ``turn`` further on.
    """
    runs = []
    for n in (2, 3, 4, 1):
        cases = [(*case, [list(range(n))]) for case in _cases(n)]
        if n == 4 and call is _on_rings:
            cases.append(("rings 0, 2 and 3, 1", 12, torch.float32, "ring", [[0, 2], [3, 1]]))
        for name, count, dtype, fallback, rings in cases:
            ring_of = {rank: ring for ring in rings for rank in ring}
            data = [make(ring_of[rank], rank, count, dtype) for rank in range(n)]
            outcomes = exercise.run(call, data, fn, rings, case=name, fallback=fallback)
            for rank, outcome in enumerate(outcomes):
                _only_messages(exercise, rank, outcome, n)
                compare(data, ring_of[rank], rank, outcome)
            runs.append((exercise.case, data, rings, outcomes))
    for run in sorted(runs, key=lambda run: len(run[1]) == 2):  # two ranks last: all algorithms look alike on them
        _audit_ring(exercise, *run, halves, turn)


def _audit_ring(
    exercise: Exercise, case: str, data: list, rings: list, outcomes: list[Outcome], halves: int, turn: int
) -> None:
    """Refuse other ways than a ring of chunks: peers, bytes and steps."""
    exercise.case, exercise.fallback = case, None
    n, size = len(rings[0]), data[0].nbytes
    chunk = math.ceil(data[0].numel() / n) * data[0].element_size()
    ledgers = [outcome.ledger for outcome in outcomes]
    sends = [{entry.peer for entry in ledger if entry.op == "send"} for ledger in ledgers]
    for hub in range(n if n > 2 else 0):
        others = set().union(*(peers for rank, peers in enumerate(sends) if rank != hub))
        exercise.require(others != {hub}, "hub", f"all other ranks send to rank {hub}, and to no other.")
    for ring in rings:
        for place, rank in enumerate(ring):
            following, before = ring[(place + turn) % n], ring[(place - turn) % n]
            peers = f"this rank sends to rank {', '.join(map(str, sorted(sends[rank])))}."
            largest = max((entry.bytes for entry in ledgers[rank] if entry.op == "send"), default=0)
            what = f"a message carries {largest} bytes; the tensor has {size}, a chunk at most {chunk}."
            exercise.require(largest < size or size == chunk, "whole-tensor", what, rank)
            exercise.require(n == 2 or sends[rank] != {before}, "direction", peers, rank)
            exercise.require(sends[rank] <= {following}, "not-a-ring", peers, rank)
            enough, sent = halves * (n - 1) * chunk, ledgers[rank].sent
            what = f"this rank sends {sent} bytes; {enough} are enough."
            exercise.require(sent <= enough, "too-many-bytes", what, rank)
    steps, enough = message_steps(ledgers), halves * (n - 1)
    exercise.require(steps <= enough, "steps", f"the messages need {steps} steps; {enough} are enough.")


@checked
def ring_reduce_scatter(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, ring) -> chunk``: N-1 steps, S minus one chunk sent."""
    exercise = Exercise("Exercise 1", HINTS["ring_reduce_scatter"], timeout)

    def make(ring: list[int], rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return _numbers(count, 400 + rank, dtype)

    def compare(data: list, ring: list[int], rank: int, outcome: Outcome) -> None:
        n, place = len(ring), ring.index(rank)
        total = sum(data[r] for r in ring)
        sums, parts = total.tensor_split(n), [data[r].tensor_split(n)[place] for r in ring]
        traps = {}
        if 1 < n == len(data) and len(total) == 12:
            arcs = [sum(parts[(i + k) % n] for k in range(length)) for length in range(2, n) for i in range(n)]
            others = [chunk for i, chunk in enumerate(sums) if i != place]
            traps = {"whole-result": total, "wrong-chunk": others, "not-added": parts, "partial": arcs}
            traps["average"] = sums[place] / n
            if n == 2 and close(outcome.result, parts[place]) and _own_chunk_first(exercise, fn):
                traps = {"first-chunk": parts[place]}
        _equal(exercise, rank, outcome.result, sums[place], traps)
        exercise.keeps_input(rank, outcome)

    _check_ring(exercise, fn, make, compare, _on_rings, 1, -1)
    exercise.passed("N-1 steps, and (N-1)/N of the tensor sent by each.")


def _own_chunk_first(exercise: Exercise, fn: Callable) -> bool:
    """Whether place 0 of two begins with the chunk that it should end with: 11 numbers make chunks of 6 and 5."""
    before = exercise.case, exercise.fallback
    data = [_numbers(11, 400 + rank) for rank in range(2)]
    try:
        ledger = exercise.run(_on_rings, data, fn, [[0, 1]])[0].ledger
    except CheckFailed:
        return False
    finally:
        exercise.case, exercise.fallback = before
    return next((entry.bytes for entry in ledger if entry.op == "send"), 0) == 6 * data[0].element_size()


_OLD = -1000  # stands where an all-gather has to write


@checked
def ring_all_gather(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, ring)``, in place: N-1 steps, S minus one chunk sent."""
    exercise = Exercise("Exercise 2", HINTS["ring_all_gather"], timeout)

    def make(ring: list[int], rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        n, place = len(ring), ring.index(rank)
        x = torch.full((count,), _OLD, dtype=dtype)
        x.tensor_split(n)[place].copy_(_numbers(count, 500 + rank, dtype).tensor_split(n)[place])
        return x

    def compare(data: list, ring: list[int], rank: int, outcome: Outcome) -> None:
        n, place, after = len(ring), ring.index(rank), outcome.after
        chunks = [data[r].tensor_split(n)[i] for i, r in enumerate(ring)]
        expected = torch.cat(chunks)
        returned = isinstance(outcome.result, torch.Tensor) and torch.equal(outcome.result, expected)
        if returned and not torch.equal(after, expected):
            exercise.refuse("not-in-place", "the chunks are returned, and x is not filled.", rank)
        traps = {}
        if 1 < n == len(data) and len(expected) == 12:
            orders = [[chunks[(place + sign * i) % n] for i in range(n)] for sign in (1, -1)]
            again = [[c if i == place else chunks[(place + k) % n] for i, c in enumerate(chunks)] for k in (1, -1)]
            plus = [[c if i == place else c + _OLD for i, c in enumerate(chunks)], [c + _OLD for c in chunks]]
            traps = {
                "order": list(map(torch.cat, orders)),
                "not-passed-on": list(map(torch.cat, again)),
            }
            traps |= {"added": list(map(torch.cat, plus)), "missing": after if (after == _OLD).any() else None}
        _equal(exercise, rank, after, expected, traps, "x after the call")

    _check_ring(exercise, fn, make, compare, _on_rings, 1, -1)
    exercise.passed("N-1 steps, and (N-1)/N of the tensor sent by each.")


@checked
def ring_all_reduce(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, ring) -> sum over the ring``: 2(N-1) steps, 2(N-1)/N of S sent."""
    _ring_all_reduce(Exercise("Exercise 3", HINTS["ring_all_reduce"], timeout), fn, _on_rings, -1)


@checked
def mended_ring_all_reduce(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x) -> sum over all ranks``: 2(N-1) steps, 2(N-1)/N of S sent."""
    _ring_all_reduce(Exercise("Exercise 6", HINTS["mended_ring_all_reduce"], timeout), fn, _on_the_world, 1)


def _ring_all_reduce(exercise: Exercise, fn: Callable, call: Callable, turn: int) -> None:
    def make(ring: list[int], rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        x = _numbers(count, 600 + rank, dtype)
        return x.reshape(3, 4) if count == 12 and call is _on_rings else x

    def compare(data: list, ring: list[int], rank: int, outcome: Outcome) -> None:
        total = sum(data[r] for r in ring)
        _equal(exercise, rank, outcome.result, total, _all_reduce_traps(data, ring, rank, total))
        exercise.keeps_input(rank, outcome)

    _check_ring(exercise, fn, make, compare, call, 2, turn)
    exercise.passed("2(N-1) steps, and 2(N-1)/N of the tensor sent by each.")


def _all_reduce_traps(data: list, ring: list[int], rank: int, total: torch.Tensor) -> dict[str, list]:
    """Hint key to wrong results of an all-reduce; most need two ranks only, and those come first."""
    n, count, sums, own = len(ring), total.numel(), total.flatten(), data[rank].flatten()
    body = count // n * n  # elements that N divides
    if body < count:
        return {"tail": [torch.cat([sums[:body], tail]) for tail in (0 * own[body:], own[body:])] if body else []}
    if not n == len(data) == 2:
        return {"average": [total / n]} if 2 < n == len(data) else {}
    (a, b), (mine_a, mine_b), other = sums.tensor_split(2), own.tensor_split(2), sums - own
    halves = {
        "not-gathered": [(a, mine_b), (mine_a, b), (a, 0 * b), (0 * a, b)],
        "added": [(a, b + mine_b), (a + mine_a, b)],
        "missing": product((mine_a, other[: len(a)]), (mine_b, other[len(a) :])),
    }
    traps = {key: [torch.cat(pair).reshape(total.shape) for pair in pairs] for key, pairs in halves.items()}
    traps["not-gathered"] += [a, b]
    return traps | {"average": [total / n]}


# ------------------------------------------------------------------------------------------------ tree


@checked
def tree_all_reduce(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, root) -> sum over ranks``: 2(N-1) messages in 2⌈log2 N⌉ steps."""
    exercise = Exercise("Exercise 4", HINTS["tree_all_reduce"], timeout)
    steps = {}
    cases = [(n, 0, torch.float32) for n in (2, 4, 3, 5, 8, 1)]
    for n, root, dtype in [*cases, (3, 0, torch.int64), (2, 1, torch.float32), (4, 3, torch.float32)]:
        data = [_numbers(6, 700 + rank, dtype).reshape(2, 3) for rank in range(n)]
        usual = "root" if root else "power-of-two" if n in (3, 5) else None
        whole = dtype == torch.int64
        case = f"root {root}" + ", x of dtype int64" * whole
        outcomes = exercise.run(fn, data, root, case=case, fallback="dtype" if whole else usual)
        for rank, outcome in enumerate(outcomes):
            _only_messages(exercise, rank, outcome, n)
            traps = _tree_traps(data, rank) if n in (2, 4) and not root else {}
            _equal(exercise, rank, outcome.result, sum(data), traps)
            exercise.keeps_input(rank, outcome)
        steps[n] = _audit_tree(exercise, root, outcomes)
    exercise.passed(f"2(N-1) messages in {', '.join(str(steps[n]) for n in sorted(steps))} steps.")


def _tree_traps(data: list, rank: int) -> dict[str, list]:
    n, total = len(data), sum(data)
    subsets = [sum(data[r] for r in ranks) for size in range(2, n) for ranks in combinations(range(n), size)]
    return {
        "not-broadcast": [data[rank], 0 * data[rank], sum(data[rank : rank + 2])] if rank else [],
        "added": [total + data[rank], total + sum(data[rank : rank + 2])],
        "average": [total / n],
        "own-sent": subsets,
    }


def _audit_tree(exercise: Exercise, root: int, outcomes: list[Outcome]) -> int:
    """Refuse other ways than a tree; return the number of steps."""
    n, ledgers = len(outcomes), [outcome.ledger for outcome in outcomes]
    messages, steps = sum(ledger.messages for ledger in ledgers), message_steps(ledgers)
    whole = {entry.bytes for ledger in ledgers for entry in ledger} <= {outcomes[0].before.nbytes}
    key = "exchange" if whole and messages == n * math.ceil(math.log2(n)) else "too-many-messages"
    exercise.require(messages <= 2 * (n - 1), key, f"{messages} messages; {2 * (n - 1)} are enough.")
    allowed, most = 2 * math.ceil(math.log2(n)), max(ledger.messages for ledger in ledgers)
    hops = {(entry.peer - rank) % n for rank, ledger in enumerate(ledgers) for entry in ledger}
    key = "hub" if most == n - 1 else "chain" if hops <= {1, n - 1} else "order"
    exercise.require(steps <= allowed, key, f"the messages need {steps} steps; {allowed} are enough.")
    order = [entry.op for entry in ledgers[root]]
    late = root > 0 and "send" in order and "recv" in order[order.index("send") :]
    exercise.require(not late, "root", "the root receives after it has sent.", root)
    return steps


# ------------------------------------------------------------------------------------------------ two levels


@checked
def hierarchical_all_reduce(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, nodes, per_node) -> sum over ranks``: few bytes between nodes, and faster than a flat ring."""
    exercise = Exercise("Exercise 5", HINTS["hierarchical_all_reduce"], timeout)
    for nodes, per_node, count in ((2, 3, 12), (2, 2, 11), (3, 2, 12)):
        data = [_numbers(count, 800 + rank) for rank in range(nodes * per_node)]
        case = f"{nodes} nodes of {per_node}, {count} numbers"
        fallback = "not-divisible" if count == 11 else "two-nodes" if nodes > 2 else None
        outcomes = exercise.run(fn, data, nodes, per_node, case=case, fallback=fallback)
        for rank, outcome in enumerate(outcomes):
            _only_messages(exercise, rank, outcome, len(data))
            _two_levels(exercise, data, nodes, per_node, rank, outcome.result)
            exercise.keeps_input(rank, outcome)
        _audit_levels(exercise, nodes, per_node, data[0], [outcome.ledger for outcome in outcomes])
    data = [_numbers(2**18, 800 + rank) for rank in range(8)]
    outcomes = exercise.run(_emulated, data, fn, 2, 4, case="emulated links, 2 nodes of 4, 1 MiB")
    for rank, outcome in enumerate(outcomes):
        _two_levels(exercise, data, 2, 4, rank, outcome.result[0])
    _audit_levels(exercise, 2, 4, data[0], [outcome.result[2] for outcome in outcomes])
    took, ring = (
        1e6 * max(seconds) for seconds in ([o.result[1] for o in outcomes], _flat_ring(data[0].numel(), 2, 4))
    )
    what = f"{took:.4g} µs of emulated time; the flat ring takes {ring:.4g} µs."
    exercise.require(took < ring, "slow", what)
    exercise.passed(f"{took:.3g} µs of emulated time on 2 nodes of 4, where the flat ring takes {ring:.3g} µs.")


def _emulated(x: torch.Tensor, fn: Callable, nodes: int, per_node: int) -> tuple[Any, float, Any]:
    """What ``fn`` returns on emulated links, the seconds that it takes there, and its ledger."""
    from .. import record
    from ..fabric import emulate
    from ..topology import two_level

    with emulate(two_level(nodes, per_node, INTRA, INTER)) as clock:
        with record() as ledger:
            result = fn(x, nodes, per_node)
        seconds = clock.seconds
    return result, seconds, ledger


def _one_ring(x: torch.Tensor, nodes: int, per_node: int) -> None:
    from ..collective_algorithms import step_through

    for _ in step_through("all_reduce", x.view(nodes * per_node, -1)):
        pass


def _flat_ring_rank(count: int, nodes: int, per_node: int) -> float:
    return _emulated(torch.zeros(count), _one_ring, nodes, per_node)[1]


def _flat_ring(count: int, nodes: int, per_node: int) -> list[float]:
    """Emulated seconds by rank of the textbook's ring over all ranks."""
    from .. import launch

    return launch(_flat_ring_rank, count, nodes, per_node, world_size=nodes * per_node, backend=BACKEND)


def _two_levels(exercise: Exercise, data: list, nodes: int, per_node: int, rank: int, got: Any) -> None:
    total, first = sum(data), rank // per_node * per_node
    chunks = total.tensor_split(per_node)
    traps = {
        "one-level": sum(data[first : first + per_node]),
        "counted-twice": [per_node * total, nodes * total],
        "average": [total / len(data), total / per_node, total / nodes],
        "shard-order": [torch.cat([chunks[(i * s + k) % per_node] for i in range(per_node)])
                        for k in range(per_node) for s in (1, -1)],
    }  # fmt: skip
    exercise.equal(rank, got, total, traps)


def _audit_levels(exercise: Exercise, nodes: int, per_node: int, x: torch.Tensor, ledgers: list) -> None:
    n, shard = nodes * per_node, math.ceil(x.numel() / per_node)
    piece = math.ceil(shard / nodes)
    item = x.element_size()
    across_limit, inside_limit = 2 * (nodes - 1) * piece * item, 2 * (per_node - 1) * shard * item
    traffic = []  # by rank: bytes (inside a node, between nodes)
    for rank, ledger in enumerate(ledgers):
        sent = Counter()
        for entry in ledger:
            if entry.op == "send":
                sent[entry.peer // per_node == rank // per_node] += entry.bytes
        traffic.append((sent[True], sent[False]))
    hops = {(entry.peer - rank) % n for rank, ledger in enumerate(ledgers) for entry in ledger if entry.op == "send"}
    exercise.require(len(hops) > 1, "flat-ring", "every rank sends to one other only, as in one ring.")
    few = sum(across > 0 for _, across in traffic) <= nodes
    for rank, (inside, across) in enumerate(traffic):
        light = inside <= 2 * (per_node - 1) * math.ceil(x.numel() / nodes / per_node) * item
        key = "leaders" if few else "groups" if light else "whole-tensor-across"
        what = f"this rank sends {across} bytes between nodes; {across_limit} are enough."
        exercise.require(across <= across_limit, key, what, rank)
        what = f"this rank sends {inside} bytes inside its node; {inside_limit} are enough."
        exercise.require(inside <= inside_limit, "too-many-bytes", what, rank)


# ------------------------------------------------------------------------------------------------ paper problems


_CHOICES = ("root", "ring", "tree")


def _links(latency_us: float, gigabits: float) -> tuple[float, float]:
    """Alpha in seconds and beta in seconds per byte."""
    return latency_us * 1e-6, 8 / (gigabits * 1e9)


def _bits(latency_us: float, gigabits: float) -> tuple[float, float]:
    return latency_us * 1e-6, 1 / (gigabits * 1e9)


def _whole_seconds(latency_us: float, gigabits: float) -> tuple[float, float]:
    return latency_us, 8 / (gigabits * 1e9)


@checked
def pick_algorithm(fn: Callable) -> None:
    """Check ``fn(size, ranks, latency_us, gigabits) -> (name, seconds)``."""

    def answer(change: Callable | None = None, links: Callable = _links, best: Callable = min) -> Callable:
        def pick(size: float, n: int, latency_us: float, gigabits: float) -> tuple[str, float]:
            alpha, beta = links(latency_us, gigabits)
            times = {name: all_reduce_seconds(name, size, flat(n, alpha, beta)) for name in _CHOICES}
            times |= change(size, n, alpha, beta) if change else {}
            name = best(times, key=times.get)
            return name, times[name]

        return pick

    def half(*case: float) -> tuple[str, float]:
        name, seconds = answer()(*case)
        return name, seconds / 2

    paper_problem(
        "Exercise 7", fn, answer(),
        [
            (2**18, 8, 14, 400), (2**20, 8, 14, 400), (2**26, 8, 14, 400), (2**20, 64, 14, 400), (2**24, 64, 14, 400),
            (2**16, 6, 30, 25), (2**10, 2, 30, 25), (2e5, 6, 30, 25),
        ],
        {
            "gigabits": answer(links=_bits),
            "microseconds": answer(links=_whole_seconds),
            "slowest": answer(best=max),
            "half": half,
            "root-port": answer(lambda s, n, a, b: {"root": 2 * (a + b * s)}),
            "root-latency": answer(lambda s, n, a, b: {"root": 2 * (n - 1) * (a + b * s)}),
            "whole-tensor": answer(lambda s, n, a, b: {"ring": 2 * (n - 1) * (a + b * s)}),
            "not-rounded": answer(lambda s, n, a, b: {"tree": 2 * math.log2(n) * (a + b * s)}),
            "no-latency": answer(links=lambda us, gigabits: (0.0, _links(us, gigabits)[1])),
        },
        HINTS["pick_algorithm"], ["", "s"],
    )  # fmt: skip


def _levels(n: int) -> int:
    return math.ceil(math.log2(n))


@checked
def crossover_size(fn: Callable) -> None:
    """Check ``fn(ranks, latency_us, gigabits) -> bytes``."""

    def size(levels: Callable = _levels, share: Callable = lambda n: (n - 1) / n, links: Callable = _links) -> Callable:
        def solve(n: int, latency_us: float, gigabits: float) -> float:
            alpha, beta = links(latency_us, gigabits)
            return alpha / beta * (n - 1 - levels(n)) / (levels(n) - share(n))

        return solve

    def upside_down(n: int, latency_us: float, gigabits: float) -> float:
        alpha, beta = _links(latency_us, gigabits)
        return alpha / beta * (_levels(n) - (n - 1) / n) / (n - 1 - _levels(n))

    paper_problem(
        "Exercise 8", fn, size(), [(8, 14, 400), (64, 14, 400), (24, 30, 25), (6, 3.4, 3600)],
        {
            "gigabits": size(links=_bits),
            "microseconds": size(links=_whole_seconds),
            "not-rounded": size(math.log2),
            "limit": size(share=lambda n: 1),
            "whole-tensor": size(share=lambda n: n - 1),
            "half-tree": size(lambda n: _levels(n) / 2),
            "upside-down": upside_down,
        },
        HINTS["crossover_size"], ["bytes"],
    )  # fmt: skip


@checked
def crossover_ranks(fn: Callable) -> None:
    """Check ``fn(size, latency_us, gigabits) -> ranks``."""

    def ranks(
        numbers: Sequence[int] = tuple(2**k for k in range(1, 21)),
        levels: Callable = _levels,
        share: Callable = lambda n: (n - 1) / n,
        links: Callable = _links,
    ) -> Callable:
        def search(size: float, latency_us: float, gigabits: float) -> int:
            alpha, beta = links(latency_us, gigabits)
            for n in numbers:
                if levels(n) * (alpha + beta * size) < (n - 1) * alpha + share(n) * beta * size:
                    return n
            return 0

        return search

    paper_problem(
        "Exercise 9", fn, ranks(), [(2**24, 14, 400), (2**20, 14, 400), (2**27, 14, 400), (2**20, 30, 25)],
        {
            "gigabits": ranks(links=_bits),
            "last-ring": lambda *case: ranks()(*case) // 2,
            "any-number": [ranks(range(2, 2**14), levels) for levels in (_levels, math.log2)],
            "same-steps": [ranks(share=lambda n: n - 1), ranks(links=lambda us, gigabits: (us, 0.0))],
            "half-tree": ranks(levels=lambda n: _levels(n) / 2),
        },
        HINTS["crossover_ranks"], ["ranks"],
    )  # fmt: skip
