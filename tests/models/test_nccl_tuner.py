"""NCCL's choice, rebuilt: its constants, worked by hand, and what was recorded beside what the lesson compares."""

from dataclasses import replace

import pytest

from course_utils import recorded
from lessons.nccl import nccl_tuner
from lessons.nccl.nccl_tuner import MACHINES, Machine, bandwidth, choose, latency

A100, H200 = MACHINES["8 x A100"], MACHINES["8 x H200"]
CLUSTER = Machine(4, 8, "nvlink", 240e9, network=100e9)
TWO_NODES = Machine(2, 8, "nvlink", 240e9, network=200e9)  # A100, eight ports of 200 Gb/s in each


@pytest.mark.parametrize(
    "machine, choice, microseconds",
    [
        (A100, ("ring", "LL"), 6.6 + 14 * 0.6),
        (A100, ("ring", "LL128"), 14.0 + 14 * 1.9),
        (A100, ("tree", "Simple"), 8.4 + 2 * 7 * 4.0),
        (CLUSTER, ("ring", "LL"), 6.6 + (62 - 6) * 1.0 + 6 * 2.7),  # in a node a hop waits 1 us for the CPU
        (CLUSTER, ("tree", "LL"), 6.8 + 2 * (7 * 0.6 + 2 * 5.0)),
        # 2(N-1) hops of a ring cross between N nodes since NCCL 2.23; 2.19 to 2.22 counted 2N, and chose otherwise
        (TWO_NODES, ("ring", "Simple"), 8.4 + 28 * 3.4 + 2 * 14.0),
    ],
)
def test_latencies_in_a_node_and_between_nodes(machine, choice, microseconds):
    assert latency(choice, machine) == pytest.approx(microseconds * 1e-6)


def test_choices_on_two_nodes_are_those_of_nccl_since_2_23():
    changes = {}
    for k in range(10, 35):
        changes.setdefault(" ".join(choose(2**k, TWO_NODES)), k)
    assert changes == {"tree LL": 10, "ring LL": 18, "tree LL128": 19, "ring LL128": 24, "ring Simple": 27}


@pytest.mark.parametrize(
    "choice, gigabytes",
    [
        (("ring", "Simple"), 240 * 8 / 14),
        (("ring", "LL128"), 0.92 * 240 * 8 / 14),
        (("ring", "LL"), 87.7 * 8 / 14),  # half of 240, but no more than the threads can do
        (("tree", "Simple"), 0.92 * 240 / 2),
        (("tree", "LL"), 0.92 * 240 / 3.8 / 2),
        (("tree", "LL128"), 0.92 * 240 * 7 / 9 / 2),
    ],
)
def test_bandwidths_in_one_node(choice, gigabytes):
    assert bandwidth(choice, A100) == pytest.approx(gigabytes * 1e9)


def test_nvls_on_any_number_of_gpus_and_rings_on_hopper_are_as_fast_as_recorded():
    ring = 1.75 * bandwidth(("ring", "Simple"), H200)
    assert ring == pytest.approx(recorded.H200_LARGEST["all_reduce, ring"], rel=0.01)
    for gpus, rate in recorded.H200_NVLS_BY_GPUS.items():
        assert nccl_tuner.nvls_busbw(replace(H200, gpus_per_node=gpus)) == pytest.approx(rate, rel=0.05)
