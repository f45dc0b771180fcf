"""The costs of collectives: formulas agree with the messages of the textbook algorithms, these with the library."""

from __future__ import annotations

import random

import numpy as np
import pytest

from course_utils import launch, record
from course_utils.costs import (
    COLLECTIVES,
    TwoLevelCluster,
    all_reduce_bytes,
    all_reduce_seconds,
    all_reduce_steps,
    bootstrap_alpha_beta,
    busbw_factor,
    cluster_of,
    fit_alpha_beta,
    flat_cluster,
)
from course_utils.topology import two_level
from lessons.collectives.collective_algorithms import owned_slots, result_slots, schedule, trace

pytestmark = pytest.mark.guard(90)

SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
US, GB = 1e-6, 1e9
NEAR, FAR = (2 * US, 1 / (300 * GB)), (14 * US, 1 / (50 * GB))


def test_factors_are_those_of_nccl_tests():
    for n in (1, 2, 3, 8, 1000):
        assert busbw_factor("all_reduce", n) == pytest.approx(2 * (n - 1) / n)
        for op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
            assert busbw_factor(op, n) == pytest.approx((n - 1) / n)
        assert busbw_factor("send", n) == busbw_factor("recv", n) == 1
        assert busbw_factor("broadcast", n) == busbw_factor("reduce", n) == (n > 1)


def contributions(op: str, n: int) -> list[list[list[int]]]:
    """How often each rank's piece is in every slot of every rank after the last step."""
    slots = [[[0] * n for _ in range(n)] for _ in range(n)]
    for rank in range(n):
        for slot in owned_slots(op, rank, n):
            slots[rank][slot][rank] = 1
    for step in schedule(op, n):
        sent = [[list(slots[m.src][piece]) for piece in m.pieces] for m in step]
        for m, parts in zip(step, sent, strict=True):
            for slot, part in zip(m.into, parts, strict=True):
                old = slots[m.dst][slot]
                slots[m.dst][slot] = [a + b for a, b in zip(old, part, strict=True)] if m.add else part
    return slots


def test_every_result_holds_each_contribution_once():
    for n in range(1, 10):
        for op in COLLECTIVES:
            slots = contributions(op, n)
            for rank in range(n):
                for slot in result_slots(op, rank, n):
                    source = slot if op in ("gather", "all_gather", "all_to_all") else 0
                    adds = op in ("reduce", "all_reduce", "reduce_scatter")
                    once = [1] * n if adds else [int(r == source) for r in range(n)]
                    assert slots[rank][slot] == once, (op, n)


def test_steps_end_where_the_library_does():
    for n in (1, 3):
        chosen = random.Random(n)
        inputs = [[chosen.uniform(-9, 9) for _ in range(n)] for _ in range(n)]

        def run():
            found = {}
            for op in COLLECTIVES:
                with record() as ledger:
                    snapshots = trace(op, inputs)  # noqa: B023 # compares with the library on every rank
                found[op] = snapshots, ledger
            return found

        for rank, found in enumerate(launch(run, world_size=n, backend="gloo")):
            for op, (snapshots, ledger) in found.items():
                steps = schedule(op, n)
                assert snapshots.shape == (len(steps) + 1, n, 2)
                assert (snapshots[0, :, 1] > 0).nonzero().flatten().tolist() == owned_slots(op, rank, n)
                if op == "all_reduce":
                    mine = [m for step in steps for m in step if m.src == rank]
                    assert ledger.messages == len(mine)
                    assert ledger.sent == 16 * sum(len(m.pieces) for m in mine)  # value and mask, 8 bytes each


def test_fit_recovers_latency_and_bandwidth():
    sizes = [2**k for k in range(10, 26)]
    assert fit_alpha_beta(sizes, [3e-4 + 2e-9 * s for s in sizes]) == pytest.approx((3e-4, 2e-9))


def simulate(steps, n, cluster, size):
    """Seconds of a schedule under the port model: a message takes alpha + beta * S; alpha does not keep a port busy.

    A rank starts a step when what it sent in the last one has left and what it received has arrived.
    """
    clock, free = [0.0] * n, {}
    for step in steps:
        done = {rank: clock[rank] for rank in range(n)}
        for m in step:
            near = m.src // cluster.per_node == m.dst // cluster.per_node
            alpha, beta = cluster.intra if near else cluster.inter
            ports = (m.src, "out", near), (m.dst, "in", near)
            start = max(clock[m.src], *(free.get(port, 0.0) for port in ports))
            left = start + beta * size * len(m.pieces) / n
            free.update(dict.fromkeys(ports, left))
            done[m.src] = max(done[m.src], left)
            done[m.dst] = max(done[m.dst], left + alpha)
        clock = [done[rank] for rank in range(n)]
    return max(clock)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_formulas_are_the_schedules_under_the_port_model(algorithm):
    """The steps and bytes of all algorithms are proven with the functions of lesson 03."""
    for n in range(1, 18):
        tree = schedule("reduce", n) + schedule("broadcast", n)
        steps, cluster = schedule("all_reduce", n) if algorithm == "ring" else tree, flat_cluster(n, *NEAR)
        assert all_reduce_steps(algorithm, n) == len(steps)
        sent = [sum(len(m.pieces) for step in steps for m in step if m.src == rank) / n for rank in range(n)]
        for size in (0, 2**10, 2**20, 2**30):
            modelled, simulated = all_reduce_seconds(algorithm, size, cluster), simulate(steps, n, cluster, size)
            if algorithm == "ring" or n & (n - 1) == 0:
                assert modelled == pytest.approx(simulated)
            else:  # some ranks need not wait for every step
                assert modelled / 2 <= simulated <= (1 + 1e-9) * modelled
            assert all_reduce_bytes(algorithm, n, size) == pytest.approx(max(sent) * size)


def test_a_ring_across_nodes_takes_what_a_simulation_gives():
    for nodes, per_node in [(2, 1), (2, 4), (4, 2), (3, 3), (5, 3)]:
        cluster, n = TwoLevelCluster(nodes, per_node, NEAR, FAR), nodes * per_node
        for size in (0, 2**12, 2**20, 2**30):
            simulated = simulate(schedule("all_reduce", n), n, cluster, size)
            assert all_reduce_seconds("ring", size, cluster) == pytest.approx(simulated), cluster


def test_a_topology_becomes_a_cluster():
    for nics, sharing in (("gpu", 1), ("node", 4)):
        cluster = cluster_of(two_level(2, 4, NEAR, FAR, nics))
        assert (cluster.nodes, cluster.per_node, cluster.sharing) == (2, 4, pytest.approx(sharing))
        assert cluster.intra == pytest.approx(NEAR)
        assert cluster.inter == pytest.approx(FAR)
    assert cluster_of(two_level(1, 3, NEAR)) == flat_cluster(3, *map(pytest.approx, NEAR))


def test_bootstrap_surrounds_the_fit():
    random = np.random.default_rng(1)
    sizes = np.repeat([2**k for k in range(10, 24, 2)], 5)
    seconds = (1e-5 + 1e-9 * sizes) * random.lognormal(0, 0.1, len(sizes))
    fits = bootstrap_alpha_beta(sizes, seconds, resamples=200)
    assert fits.shape == (200, 2)
    for value, column in zip((1e-5, 1e-9), fits.T, strict=True):
        low, high = np.percentile(column, [0.5, 99.5])
        assert low < value < high < low + value
    assert np.array_equal(fits, bootstrap_alpha_beta(sizes, seconds, resamples=200))
