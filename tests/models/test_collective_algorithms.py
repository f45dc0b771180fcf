"""The textbook algorithms: right on any number of ranks, with the steps and bytes of their formulas."""

from __future__ import annotations

import random

import pytest

from course_utils import launch, record
from course_utils.costs import COLLECTIVES, all_reduce_bytes, all_reduce_seconds, all_reduce_steps, flat_cluster
from course_utils.topology import two_level
from lessons.collectives.collective_algorithms import ALGORITHMS, owned_slots, result_slots, schedule, trace
from lessons.nccl.fabric.replay import ARRIVED, LEAVE, RECORD, SEND, SENT, Replay

pytestmark = pytest.mark.guard(90)

CASES = [(op, None) for op in COLLECTIVES] + [("all_reduce", algorithm) for algorithm in ALGORITHMS]
ALL_REDUCES = pytest.mark.parametrize("algorithm", ALGORITHMS)
SIZES = pytest.mark.parametrize("n", range(1, 10))


def contributions(op: str, n: int, algorithm: str | None) -> list[list[list[int]]]:
    """How often each rank's piece is in every slot of every rank after the last step."""
    slots = [[[0] * n for _ in range(n)] for _ in range(n)]
    for rank in range(n):
        for slot in owned_slots(op, rank, n):
            slots[rank][slot][rank] = 1
    for step in schedule(op, n, algorithm):
        sent = [[list(slots[m.src][piece]) for piece in m.pieces] for m in step]
        for m, parts in zip(step, sent, strict=True):
            for slot, part in zip(m.into, parts, strict=True):
                old = slots[m.dst][slot]
                slots[m.dst][slot] = [a + b for a, b in zip(old, part, strict=True)] if m.add else part
    return slots


@SIZES
@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_every_result_holds_each_contribution_once(op, algorithm, n):
    slots = contributions(op, n, algorithm)
    for rank in range(n):
        for slot in result_slots(op, rank, n):
            if op in ("reduce", "all_reduce", "reduce_scatter"):
                assert slots[rank][slot] == [1] * n
            else:
                source = slot if op in ("gather", "all_gather", "all_to_all") else 0
                assert slots[rank][slot] == [int(r == source) for r in range(n)]


@SIZES
@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_a_rank_sends_and_receives_at_most_one_message_in_a_step(op, algorithm, n):
    for step in schedule(op, n, algorithm):
        assert step
        for ends in ([m.src for m in step], [m.dst for m in step]):
            assert len(set(ends)) == len(ends) and set(ends) <= set(range(n))
        assert all(m.src != m.dst and len(m.pieces) == len(m.into) > 0 for m in step)


@SIZES
@ALL_REDUCES
def test_steps_and_bytes_are_those_of_the_formulas(algorithm, n):
    steps, sent = schedule("all_reduce", n, algorithm), [0] * n
    for step in steps:
        for m in step:
            sent[m.src] += len(m.pieces)
    assert len(steps) == all_reduce_steps(algorithm, n)
    power = 1 << (n.bit_length() - 1)
    total = {
        "ring": 2 * (n - 1), "root": 2 * (n - 1), "tree": 2 * (n - 1),
        "recursive_doubling": power * (power.bit_length() - 1) + 2 * (n - power),
        "halving_doubling": 2 * (power - 1) + 2 * (n - power),
    }[algorithm]
    assert sum(sent) == total * n
    busiest = all_reduce_bytes(algorithm, n, n)
    if algorithm == "halving_doubling" and power < n:  # n pieces do not divide evenly among fewer ranks
        assert abs(max(sent) - busiest) < n.bit_length()
    else:
        assert max(sent) == busiest


def test_ring_is_what_all_reduce_does_by_default():
    assert schedule("all_reduce", 5) == schedule("all_reduce", 5, "ring")


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@ALL_REDUCES
def test_emulated_time_is_that_of_the_formula(algorithm, n):
    """What `step_through` does, replayed on equal links."""
    alpha, beta, piece = 3e-6, 1 / 25e9, 100_000
    found, counts = Replay(two_level(1, n, (alpha, beta)), n), {}

    def count(*key: int) -> int:
        counts[key] = counts.get(key, -1) + 1
        return counts[key]

    for step in schedule("all_reduce", n, algorithm):
        waits = []
        for m in step:
            number = count(m.src, m.dst)
            found.add(RECORD.pack(SEND, m.src, m.dst, 0, number, 0, len(m.pieces) * piece))
            waits += [RECORD.pack(SENT, m.src, m.dst, 0, number, 0, 0)]
            waits += [RECORD.pack(ARRIVED, m.dst, m.src, 0, number, 0, 0)]
        for wait in waits:
            found.add(wait)
    for rank in range(n):
        found.add(RECORD.pack(LEAVE, rank, 0, 0, 0, 0, 0))
    found.advance()
    modelled = all_reduce_seconds(algorithm, n * piece, flat_cluster(n, alpha, beta))
    assert max(found.clock) == pytest.approx(modelled, rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@ALL_REDUCES
def test_real_ranks_get_what_the_library_gets(algorithm, n):
    chosen = random.Random(n)
    inputs = [[chosen.uniform(-9, 9) for _ in range(n)] for _ in range(n)]

    def run():
        with record() as ledger:
            snapshots = trace("all_reduce", inputs, algorithm)  # compares with the library
        return snapshots, ledger.sent, ledger.messages

    steps = schedule("all_reduce", n, algorithm)
    for rank, (snapshots, sent, messages) in enumerate(launch(run, world_size=n, backend="gloo")):
        mine = [m for step in steps for m in step if m.src == rank]
        assert snapshots.shape == (len(steps) + 1, n, 2)
        assert (snapshots[-1, :, 1] == 2**n - 1).all()
        assert messages == len(mine) and sent == 16 * sum(len(m.pieces) for m in mine)  # value and mask, 8 bytes each


@pytest.mark.parametrize(
    ("op", "algorithm", "complaint"),
    [("all_reduce", "Ring", "halving_doubling"), ("broadcast", "tree", "all_reduce only"), ("sum", None, "all_to_all")],
)
def test_what_there_is_not_is_refused_with_what_there_is(op, algorithm, complaint):
    with pytest.raises(ValueError, match=complaint):
        schedule(op, 4, algorithm)
