"""Checks of the exercises on NCCL's algorithms.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import torch

from course_utils.check import (
    TIMEOUT,
    CheckFailed,
    Exercise,
    Outcome,
    checked,
    close,
    load_hints,
    message_steps,
    paper_problem,
    values,
)
from course_utils.check.traffic import by_node, sent

__all__ = [
    "HINTS", "crossover_ranks", "crossover_size", "hierarchical_all_reduce", "mended_ring_all_reduce",
    "pick_algorithm", "ring_all_gather", "ring_all_reduce", "ring_reduce_scatter", "tree_all_reduce",
]

HINTS = load_hints(__file__)

INTRA = (3.4e-6, 1 / 450e9)  # alpha in s, beta in s/byte: an NVLink hop of NCCL's ring, NVLink 4 one way
INTER = (14e-6, 1 / 50e9)  # a network hop, one InfiniBand NDR port


def _numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that depend on the seed only; whole ones are too large for float64."""
    if dtype.is_floating_point:
        return values(*shape, seed=seed)
    generator = torch.Generator().manual_seed(7919 * (seed + 1))
    return torch.randint(2**57, 2**58, shape, generator=generator, dtype=dtype)


def _only_messages(exercise: Exercise, rank: int, outcome: Outcome, n: int) -> None:
    exercise.communicates(rank, outcome, n)
    exercise.audit(outcome.ledger, {"send", "recv"}, keys={"other-calls": "library"})


def _the_same(exercise: Exercise, outcomes: list[Outcome], ranks: Sequence[int]) -> None:
    """Refuse sums that are right on all of the ranks, and not the same to the last bit."""
    for rank in ranks:
        same = torch.equal(outcomes[rank].result, outcomes[ranks[0]].result)
        exercise.require(same, "differs", f"the result is not that of rank {ranks[0]}.", rank)


# ------------------------------------------------------------------------------------------------ rings

_OTHER_RINGS = {3: [(11, [[2, 0, 1]])], 4: [(3, [[3, 0, 2, 1]]), (12, [[0, 2], [3, 1]])]}


class RingCase(NamedTuple):
    """What is given to the ranks of rings, and the hint if an answer fails here first."""

    name: str
    shape: tuple[int, ...]
    rings: list[list[int]]
    fallback: str | None = None
    dtype: torch.dtype = torch.float32


def _ring_cases(n: int, other_rings: bool, any_shape: bool) -> Iterator[RingCase]:
    """Inputs for ``n`` ranks."""
    world, twelve = [list(range(n))], (3, 4) if any_shape else (12,)
    yield RingCase("12 numbers", twelve, world)
    if n > 1:
        yield RingCase("11 numbers", (11,), world, "not-divisible")
        yield RingCase(f"{n - 1} number{'s' * (n > 2)}", (n - 1,), world, "small")
        yield RingCase("12 numbers of dtype int64", twelve, world, "dtype", torch.int64)
    if n == 2 and any_shape:
        yield RingCase("a number without dimensions", (), world, "shape")
    for count, rings in _OTHER_RINGS.get(n, []) if other_rings else []:
        name = f"ring{'s' * (len(rings) > 1)} {' and '.join(map(str, rings))}, {count} numbers"
        yield RingCase(name, (count,), rings, "ring")


def _on_rings(x: torch.Tensor, fn: Callable, rings: list[list[int]]) -> Any:
    import torch.distributed as dist

    return fn(x, next(ring for ring in rings if dist.get_rank() in ring))


def _check_ring(
    exercise: Exercise, fn: Callable, make: Callable, compare: Callable, halves: int, takes_ring: bool = True
) -> None:
    """Run a ring algorithm on several inputs and look at its results, then at how they came about.

    ``make(ring, rank, case)`` gives a rank's input, ``compare(data, ring, rank, outcome)`` refuses a wrong result.
    ``halves`` times N-1 steps are allowed. A ring that is an argument turns to the left, the other one to the right.
    """
    on_two_ranks = []
    for n in (2, 1, 3, 4):
        for case in _ring_cases(n, takes_ring, "shape" in exercise.hints):
            ring_of = {rank: ring for ring in case.rings for rank in ring}
            data = [make(ring_of[rank], rank, case) for rank in range(n)]
            call = (_on_rings, data, fn, case.rings) if takes_ring else (fn, data)
            outcomes = exercise.run(*call, case=case.name, fallback=case.fallback, errors="0-d|dims|dimension")
            for rank, outcome in exercise.each(outcomes):
                _only_messages(exercise, rank, outcome, n)
                compare(data, ring_of[rank], rank, outcome)
                if "unwaited" in exercise.hints and any(entry.end is None for entry in outcome.ledger):
                    exercise.refuse("unwaited", "a message was not waited for.")
            run = exercise.case, data[0], case.rings, outcomes
            if n == 2:
                on_two_ranks.append(run)
            else:
                _audit_ring(exercise, *run, halves, -1 if takes_ring else 1)
    for run in on_two_ranks:  # last: all algorithms look alike on them
        _audit_ring(exercise, *run, halves, -1 if takes_ring else 1)


def _audit_ring(
    exercise: Exercise, case: str, x: torch.Tensor, rings: list, outcomes: list[Outcome], halves: int, turn: int
) -> None:
    """Refuse other ways than a ring of chunks: peers, bytes and steps."""
    exercise.case = case
    ledgers = [outcome.ledger for outcome in outcomes]
    n, chunk = len(rings[0]), math.ceil(x.numel() / len(rings[0])) * x.element_size()
    peers = [{entry.peer for entry in ledger if entry.op == "send"} for ledger in ledgers]
    for hub in range(n if n > 2 else 0):
        others = set().union(*(to for rank, to in enumerate(peers) if rank != hub))
        exercise.require(others != {hub}, "hub", f"all other ranks send to rank {hub}, and to no other.")
    usual = all(ring == sorted(ring) for ring in rings)
    for ring in rings:
        for place, rank in enumerate(ring):
            with exercise.on_rank(rank):
                most = halves * (n - 1) * chunk
                exercise.audit(ledgers[rank], sent=most, largest=chunk, keys={"too-large": "whole-tensor"})
                following, before = ring[(place + turn) % n], ring[(place - turn) % n]
                key = "ring" if not usual else "direction" if peers[rank] == {before} else "not-a-ring"
                told = f"this rank sends to rank {', '.join(map(str, sorted(peers[rank])))}."
                exercise.require(peers[rank] <= {following}, key, told)
        least = halves * (n - 1) * x.nbytes
        exercise.audit(chain(*(ledgers[rank] for rank in ring)), sent=(least, None), where="all ranks together: ")
    steps, enough = message_steps(ledgers), halves * (n - 1)
    exercise.require(steps <= enough, "steps", f"the messages need {steps} steps; {enough} are enough.")
    for ring in rings if "differs" in exercise.hints else []:
        _the_same(exercise, outcomes, ring)


@checked
def ring_reduce_scatter(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, ring) -> chunk``: N-1 steps, S minus one chunk sent."""
    exercise = Exercise("Exercise 1", HINTS["ring_reduce_scatter"], timeout)

    def make(ring: list[int], rank: int, case: RingCase) -> torch.Tensor:
        return _numbers(case.shape, 400 + rank, case.dtype)

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
            if n == 2 and close(outcome.result, parts[place]) and _own_chunk_first(fn, timeout):
                traps = {"first-chunk": parts[place]}
        exercise.equal(rank, outcome.result, sums[place], traps, dtype=total.dtype)
        exercise.keeps_input(rank, outcome)

    _check_ring(exercise, fn, make, compare, halves=1)
    exercise.passed("N-1 steps, and (N-1)/N of the tensor sent by each.")


def _own_chunk_first(fn: Callable, timeout: float) -> bool:
    """Whether place 0 of two begins with the chunk that it should end with: 11 numbers make chunks of 6 and 5."""
    data = [_numbers((11,), 400 + rank) for rank in range(2)]
    try:
        ledger = Exercise("", HINTS["ring_reduce_scatter"], timeout).run(_on_rings, data, fn, [[0, 1]])[0].ledger
    except CheckFailed:
        return False
    return next((entry.bytes for entry in ledger if entry.op == "send"), 0) == 6 * data[0].element_size()


_OLD = -1000  # stands where an all-gather has to write


@checked
def ring_all_gather(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, ring)``, in place: N-1 steps, S minus one chunk sent."""
    exercise = Exercise("Exercise 2", HINTS["ring_all_gather"], timeout)

    def make(ring: list[int], rank: int, case: RingCase) -> torch.Tensor:
        n, place, own = len(ring), ring.index(rank), _numbers(case.shape, 500 + rank, case.dtype)
        x = torch.full_like(own, _OLD)
        x.tensor_split(n)[place].copy_(own.tensor_split(n)[place])
        return x

    def compare(data: list, ring: list[int], rank: int, outcome: Outcome) -> None:
        n, place, after = len(ring), ring.index(rank), outcome.after
        chunks = [data[r].tensor_split(n)[i] for i, r in enumerate(ring)]
        expected, traps = torch.cat(chunks), {}
        if close(outcome.result, expected) and not close(after, expected):
            exercise.refuse("not-in-place", "the chunks are returned, and x is not filled.")
        if 1 < n == len(data) and len(expected) == 12:
            slips = {
                "order": [[chunks[(place + sign * i) % n] for i in range(n)] for sign in (1, -1)],
                "not-passed-on": [
                    [c if i == place else chunks[(place + k) % n] for i, c in enumerate(chunks)] for k in (1, -1)
                ],
                "added": [[c if i == place else c + _OLD for i, c in enumerate(chunks)], [c + _OLD for c in chunks]],
            }
            traps = {key: list(map(torch.cat, some)) for key, some in slips.items()}
            traps["missing"] = after if (after == _OLD).any() else None
        exercise.equal(rank, after, expected, traps, "x after the call")

    _check_ring(exercise, fn, make, compare, halves=1)
    exercise.passed("N-1 steps, and (N-1)/N of the tensor sent by each.")


@checked
def ring_all_reduce(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, ring) -> sum over the ring``: 2(N-1) steps, 2(N-1)/N of S sent."""
    _ring_all_reduce(Exercise("Exercise 2", HINTS["ring_all_reduce"], timeout), fn, takes_ring=True)


@checked
def mended_ring_all_reduce(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x) -> sum over all ranks``: 2(N-1) steps, 2(N-1)/N of S sent."""
    _ring_all_reduce(Exercise("Exercise 5", HINTS["mended_ring_all_reduce"], timeout), fn, takes_ring=False)


def _ring_all_reduce(exercise: Exercise, fn: Callable, takes_ring: bool) -> None:
    def make(ring: list[int], rank: int, case: RingCase) -> torch.Tensor:
        return _numbers(case.shape, 600 + rank, case.dtype)

    def compare(data: list, ring: list[int], rank: int, outcome: Outcome) -> None:
        total = sum(data[r] for r in ring)
        traps = _all_reduce_traps(data, ring, rank, total)
        exercise.equal(rank, outcome.result, total, traps, dtype=total.dtype)
        exercise.keeps_input(rank, outcome)

    _check_ring(exercise, fn, make, compare, halves=2, takes_ring=takes_ring)
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

_TREES = [(2, 0), (4, 0), (3, 0), (5, 0), (8, 0), (1, 0), (2, 1), (4, 3), (3, 1), (3, 2), (5, 4), (6, 5)]  # ranks, root


@checked
def tree_all_reduce(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, root) -> sum over ranks``: 2(N-1) messages in 2⌈log2 N⌉ steps."""
    exercise = Exercise("Exercise 3", HINTS["tree_all_reduce"], timeout)
    steps = {}
    for n, root, dtype in [*((*tree, torch.float32) for tree in _TREES), (3, 0, torch.int64)]:
        shape = () if n == 8 else (2, 3)
        data = [_numbers(shape, 700 + rank, dtype) for rank in range(n)]
        whole = dtype == torch.int64
        fallback = "dtype" if whole else "root" if root else "power-of-two" if n in (3, 5) else None
        outcomes = exercise.run(fn, data, root, case=f"root {root}" + ", x of dtype int64" * whole, fallback=fallback)
        for rank, outcome in exercise.each(outcomes):
            _only_messages(exercise, rank, outcome, n)
            traps = _tree_traps(data, rank) if n in (2, 4) and not root else {}
            exercise.equal(rank, outcome.result, sum(data), traps, dtype=dtype)
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
    n, size, ledgers = len(outcomes), outcomes[0].before.nbytes, [outcome.ledger for outcome in outcomes]
    sends = [[entry for entry in ledger if entry.op == "send"] for ledger in ledgers]
    doubling = [entry.bytes for entry in chain(*sends)] == [size] * n * math.ceil(math.log2(n))
    exercise.audit(
        chain(*sends), calls=(2 * (n - 1), 2 * (n - 1)), sent=(2 * (n - 1) * size, None), largest=size,
        where="all ranks together: ", keys={"too-many-calls": "exchange" if doubling else "too-many-messages"},
    )
    steps, allowed = message_steps(ledgers), 2 * math.ceil(math.log2(n))
    hops = {(entry.peer - rank) % n for rank, some in enumerate(sends) for entry in some}
    children = defaultdict(list)
    for rank, some in enumerate(sends):
        if rank != root and some:
            children[some[0].peer].append(rank)
    key = (
        "hub" if max(map(len, sends)) == n - 1
        else "chain" if hops <= {1, n - 1}
        else "too-deep" if 2 * _rounds(children, root, n) > allowed
        else "order"
    )
    exercise.require(steps <= allowed, key, f"the messages need {steps} steps; {allowed} are enough.")
    order = [entry.op for entry in ledgers[root]]
    late = root > 0 and "send" in order and "recv" in order[order.index("send") :]
    exercise.require(not late, "root", "the root receives after it has sent.", root)
    _the_same(exercise, outcomes, range(n))
    return steps


def _rounds(children: dict[int, list[int]], rank: int, left: int) -> int:
    """Steps from ``rank`` to all of its subtree, of at most ``left`` levels, if the children come in the best order."""
    below = sorted((_rounds(children, child, left - 1) for child in children.get(rank, []) if left), reverse=True)
    return max((i + rounds for i, rounds in enumerate(below, 1)), default=0)


# ------------------------------------------------------------------------------------------------ two levels


@checked
def hierarchical_all_reduce(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, nodes, per_node) -> sum over ranks``: few bytes between nodes, and faster than a flat ring."""
    exercise = Exercise("Exercise 4", HINTS["hierarchical_all_reduce"], timeout)
    for nodes, per_node, count in ((2, 3, 12), (2, 2, 11), (3, 2, 12), (3, 2, 7)):
        data = [_numbers((count,), 800 + rank) for rank in range(nodes * per_node)]
        case = f"{nodes} nodes of {per_node}, {count} numbers"
        fallback = "not-divisible" if count < 12 else "two-nodes" if nodes > 2 else None
        outcomes = exercise.run(fn, data, nodes, per_node, case=case, fallback=fallback)
        for rank, outcome in exercise.each(outcomes):
            _only_messages(exercise, rank, outcome, len(data))
            _two_levels(exercise, data, nodes, per_node, rank, outcome.result)
            exercise.keeps_input(rank, outcome)
        _audit_levels(exercise, nodes, per_node, outcomes)
    data = [_numbers((2**18,), 800 + rank) for rank in range(8)]
    took, outcomes = _emulated(exercise, data, fn)
    for rank, outcome in enumerate(outcomes):
        _two_levels(exercise, data, 2, 4, rank, outcome.result)
    _audit_levels(exercise, 2, 4, outcomes)
    ring, _ = _emulated(exercise, data, _flat_ring)
    what = f"{took:.4g} µs of emulated time; the flat ring takes {ring:.4g} µs."
    exercise.require(took < ring, "slow", what)
    exercise.passed(f"{took:.3g} µs of emulated time on 2 nodes of 4, where the flat ring takes {ring:.3g} µs.")


def _emulated(exercise: Exercise, data: list, fn: Callable) -> tuple[float, list[Outcome]]:
    """Microseconds of ``fn(x, 2, 4)`` on emulated links, and the outcomes."""
    outcomes = exercise.run(_timed, data, fn, 2, 4, case="emulated links, 2 nodes of 4, 1 MiB")
    results = [outcome.result for outcome in outcomes]
    for outcome, (result, _, ledger) in zip(outcomes, results, strict=True):
        outcome.result, outcome.ledger = result, ledger
    return 1e6 * max(seconds for _, seconds, _ in results), outcomes


def _timed(x: torch.Tensor, fn: Callable, nodes: int, per_node: int) -> tuple[Any, float, Any]:
    """What ``fn`` returns on emulated links, the seconds that it takes there, and its ledger."""
    from course_utils import record
    from course_utils.topology import two_level

    from .fabric import emulate

    with emulate(two_level(nodes, per_node, INTRA, INTER)) as clock:
        with record() as ledger:
            result = fn(x, nodes, per_node)
        seconds = clock.seconds
    return result, seconds, ledger


def _flat_ring(x: torch.Tensor, nodes: int, per_node: int) -> None:
    """The textbook's ring over all ranks, in place."""
    from lessons.collectives.collective_algorithms import step_through

    for _ in step_through("all_reduce", x.view(nodes * per_node, -1)):
        pass


def _two_levels(exercise: Exercise, data: list, nodes: int, per_node: int, rank: int, got: Any) -> None:
    total, first = sum(data), rank // per_node * per_node
    chunks = total.tensor_split(per_node)
    traps = {
        "one-level": sum(data[first : first + per_node]),
        "counted-twice": [per_node * total, nodes * total],
        "average": [total / len(data), total / per_node, total / nodes],
        "shard-order": [torch.cat([chunks[(i * s + k) % per_node] for i in range(per_node)])
                        for k in range(per_node) for s in (1, -1)],
    }
    exercise.equal(rank, got, total, traps)


def _audit_levels(exercise: Exercise, nodes: int, per_node: int, outcomes: list[Outcome]) -> None:
    """Refuse too many bytes between the nodes or inside them, and too few of all."""
    x, ledgers, n = outcomes[0].before, [outcome.ledger for outcome in outcomes], nodes * per_node
    hops = {(entry.peer - rank) % n for rank, ledger in enumerate(ledgers) for entry in ledger if entry.op == "send"}
    exercise.require(len(hops) > 1, "flat-ring", "every rank sends to one other only, as in one ring.")
    inside, across = zip(*(by_node(ledger, rank, per_node) for rank, ledger in enumerate(ledgers)), strict=True)
    shard, piece = math.ceil(x.numel() / per_node), math.ceil(x.numel() / per_node / nodes)
    few = sum(sent(entries) > 0 for entries in across) <= nodes
    limit_across, limit_inside, light = (
        2 * rounds * length * x.element_size()
        for rounds, length in ((nodes - 1, math.ceil(shard / nodes)), (per_node - 1, shard), (per_node - 1, piece))
    )
    for rank, _ in exercise.each(ledgers):
        heavy = "leaders" if few else "groups" if sent(inside[rank]) <= light else "whole-tensor-across"
        exercise.audit(across[rank], sent=limit_across, where="between nodes, ", keys={"too-many-bytes": heavy})
        exercise.audit(inside[rank], sent=limit_inside, where="inside the node, ")
    for some, rounds, where in ((across, nodes - 1, "between"), (inside, n - nodes, "inside")):
        where, keys = f"all ranks together, {where} the nodes: ", {"not-distributed": "too-few-bytes"}
        exercise.audit(chain(*some), sent=(2 * rounds * x.nbytes, None), where=where, keys=keys)
    _the_same(exercise, outcomes, range(n))


# ------------------------------------------------------------------------------------------------ paper problems

_LINKS = {"gigabits": "8 / (gigabits  ->  1 / (gigabits", "microseconds": "latency_us * 1e-6  ->  latency_us"}


@paper_problem(
    "Exercise 6",
    cases=[
        (2**18, 8, 14, 400), (2**20, 8, 14, 400), (2**26, 8, 14, 400), (2**20, 64, 14, 400), (2**24, 64, 14, 400),
        (2**16, 6, 30, 25), (2**10, 2, 30, 25), (2e5, 6, 30, 25),
    ],
    slips=_LINKS | {
        "slowest": "min  ->  max",
        "half": "return name, seconds  ->  return name, seconds / 2",
        "root-port": "2 * alpha + 2 * (ranks - 1) * beta  ->  2 * alpha + 2 * beta",
        "root-latency": "root = 2 * alpha  ->  root = 2 * (ranks - 1) * alpha",
        "whole-tensor": "size / ranks  ->  size",
        "not-rounded": "math.ceil(math.log2(ranks))  ->  math.log2(ranks)",
        "no-latency": "latency_us * 1e-6  ->  0.0",
    },
    units=["", "s"],
    hints=HINTS["pick_algorithm"],
)
def pick_algorithm(size, ranks, latency_us, gigabits):
    """Check ``fn(size, ranks, latency_us, gigabits) -> (name, seconds)``; size in bytes."""
    alpha, beta = latency_us * 1e-6, 8 / (gigabits * 1e9)
    levels = math.ceil(math.log2(ranks))
    root = 2 * alpha + 2 * (ranks - 1) * beta * size
    ring = 2 * (ranks - 1) * (alpha + beta * size / ranks)
    tree = 2 * levels * (alpha + beta * size)
    seconds, name = min((root, "root"), (ring, "ring"), (tree, "tree"))
    return name, seconds


@paper_problem(
    "Exercise 7",
    cases=[(8, 14, 400), (64, 14, 400), (24, 30, 25), (6, 3.4, 3600)],
    slips=_LINKS | {
        "not-rounded": "math.ceil(math.log2(ranks))  ->  math.log2(ranks)",
        "limit": "(ranks - 1) / ranks  ->  1",
        "whole-tensor": "(ranks - 1) / ranks  ->  ranks - 1",
        "half-tree": "math.ceil(math.log2(ranks))  ->  math.ceil(math.log2(ranks)) / 2",
        "upside-down": "saved / added  ->  added / saved",
    },
    units=["bytes"],
    hints=HINTS["crossover_size"],
)
def crossover_size(ranks, latency_us, gigabits):
    """Check ``fn(ranks, latency_us, gigabits) -> bytes``."""
    alpha, beta = latency_us * 1e-6, 8 / (gigabits * 1e9)
    levels, share = math.ceil(math.log2(ranks)), (ranks - 1) / ranks
    saved, added = ranks - 1 - levels, levels - share
    return alpha / beta * saved / added


@paper_problem(
    "Exercise 7",
    cases=[(2**24, 14, 400), (2**20, 14, 400), (2**27, 14, 400), (2**20, 30, 25)],
    slips={
        "gigabits": _LINKS["gigabits"],
        "last-ring": "return n  ->  return n // 2",
        "any-number": [
            "2 * n, levels + 1  ->  n + 1, math.ceil(math.log2(n + 1))",
            "2 * n, levels + 1  ->  n + 1, math.log2(n + 1)",
        ],
        "same-steps": ["byte / n  ->  byte", "/ (gigabits * 1e9) * size  ->  * 0"],
        "half-tree": "while levels  ->  while levels / 2",
    },
    units=["ranks"],
    hints=HINTS["crossover_ranks"],
)
def crossover_ranks(size, latency_us, gigabits):
    """Check ``fn(size, latency_us, gigabits) -> ranks``; size in bytes."""
    alpha, byte = latency_us * 1e-6, 8 / (gigabits * 1e9) * size
    n, levels = 2, 1
    while levels * (alpha + byte) >= (n - 1) * (alpha + byte / n):
        n, levels = 2 * n, levels + 1
    return n
