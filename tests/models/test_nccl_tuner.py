"""NCCL's choice, rebuilt: its constants, worked by hand; what was recorded, and how far the model is from it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from course_utils import recorded
from course_utils.recorded import A100_ALL_REDUCE, H200_ALL_REDUCE, H200_LARGEST, H200_NVLS_BY_GPUS
from lessons.nccl import nccl_tuner
from lessons.nccl.nccl_tuner import (
    MACHINES,
    Machine,
    bandwidth,
    choose,
    corrected,
    errors,
    estimate,
    latency,
    predict,
)

A100, H200 = MACHINES["8 x A100"], MACHINES["8 x H200"]
CLUSTER = Machine(4, 8, "nvlink", 240e9, network=100e9)
TWO_NODES = Machine(2, 8, "nvlink", 240e9, network=200e9)  # A100, eight ports of 200 Gb/s in each


@pytest.mark.parametrize(
    "machine, choice, microseconds",
    [
        (A100, ("ring", "LL"), 6.6 + 14 * 0.6),
        (A100, ("ring", "LL128"), 14.0 + 14 * 1.9),
        (A100, ("ring", "Simple"), 8.4 + 14 * 3.4),
        (A100, ("tree", "LL"), 6.8 + 2 * 7 * 0.6),
        (A100, ("tree", "Simple"), 8.4 + 2 * 7 * 4.0),
        (CLUSTER, ("ring", "LL"), 6.6 + (62 - 6) * 1.0 + 6 * 2.7),  # in a node a hop waits 1 us for the CPU
        (CLUSTER, ("ring", "Simple"), 8.4 + (62 - 6) * 3.4 + 6 * 14.0),
        (CLUSTER, ("tree", "LL"), 6.8 + 2 * (7 * 0.6 + 2 * 5.0)),
        (CLUSTER, ("tree", "Simple"), 8.4 + 2 * (7 * 4.0 + 2 * 14.0)),
        # 2(N-1) hops of a ring cross between N nodes since NCCL 2.23; 2.19 to 2.22 counted 2N, and chose otherwise
        (TWO_NODES, ("ring", "Simple"), 8.4 + 28 * 3.4 + 2 * 14.0),
        (TWO_NODES, ("ring", "LL"), 6.6 + 28 * 1.0 + 2 * 2.7),
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


def test_choice_is_the_shortest_time_and_follows_the_size():
    for machine in (A100, H200, CLUSTER, TWO_NODES, Machine(1, 4, "pcie", 24e9)):
        order = []
        for size in (2**k for k in range(10, 35)):
            best = choose(size, machine)
            assert predict(size, machine)[best] == min(predict(size, machine).values())
            assert best[0] == "nvls" or estimate(size, machine) == predict(size, machine)[best]
            if not order or order[-1] != best:
                order.append(best)
        assert order[0][1] == "LL"
        assert order[-1][1] == "Simple"
        assert len(order) == len(set(order))


def test_without_nvlink_there_is_no_ll128_and_without_a_switch_no_nvls():
    assert {p for _, p in predict(2**20, Machine(1, 4, "pcie", 24e9))} == {"LL", "Simple"}
    assert ("nvls", "Simple") in predict(2**20, H200)
    assert ("nvls", "Simple") not in predict(2**20, replace(H200, nodes=2, network=400e9))
    assert ("nvls", "Simple") not in predict(2**20, A100)


def test_trees_win_on_many_nodes():
    many = Machine(128, 8, "nvlink", 240e9, network=100e9)
    assert choose(2**20, many)[0] == "tree"
    assert choose(2**36, many)[0] == "ring"


def test_recorded_choice_of_eight_h200():
    """Ring with LL up to 1 MiB, NVLS with Simple from 2 MiB (stas00/ml-engineering)."""
    for size in (2**k for k in range(15, 35)):
        assert choose(size, H200) == (("ring", "LL") if size <= 2**20 else ("nvls", "Simple"))


def test_large_messages_on_hopper():
    ring = bandwidth(("ring", "Simple"), H200) * 1.75
    assert ring == pytest.approx(H200_LARGEST["all_reduce, ring"], rel=0.01)
    assert nccl_tuner.nvls_busbw(H200) == pytest.approx(H200_LARGEST["all_reduce, nvls"], rel=0.02)
    for gpus, rate in H200_NVLS_BY_GPUS.items():
        assert nccl_tuner.nvls_busbw(replace(H200, gpus_per_node=gpus)) == pytest.approx(rate, rel=0.05)
    wrong = np.abs(errors(H200_ALL_REDUCE, H200))
    assert np.median(wrong) < 0.12
    assert (wrong[-7:] < 0.08).all()  # from 256 MiB on


def test_estimated_nvls_puts_no_more_on_a_link_than_the_link_gives():
    """Each GPU sends (n+1)/n of S; the rate of the link and its efficiency bound that, whatever NCCL compares with."""
    size = 2**34
    for name, gpus in itertools.product([name for name, machine in MACHINES.items() if machine.nvls], range(2, 9)):
        machine = replace(MACHINES[name], gpus_per_node=gpus)
        if choose(size, machine) == ("nvls", "Simple"):
            on_the_wire = (gpus + 1) / gpus * size / estimate(size, machine)
            assert 0.7 * machine.bandwidth < on_the_wire < 0.85 * machine.bandwidth, (name, gpus)
            assert estimate(size, machine) > predict(size, machine)[("nvls", "Simple")], (name, gpus)


@pytest.mark.parametrize("steps, most", [(0, 0.25), (1, 0.195), (2, 0.106)])
def test_median_error_on_eight_a100(steps, most):
    """Each correction brings the recorded table closer; none was fitted to it."""
    assert len(A100_ALL_REDUCE.sizes) == 16
    wrong = np.abs(errors(A100_ALL_REDUCE, A100, corrected(steps)))
    assert most - 0.01 < np.median(wrong) < most
    assert (wrong[-4:] < 0.06).all()


def test_no_correction_depends_on_the_table_it_predicts(monkeypatch):
    before = corrected()
    other = replace(A100_ALL_REDUCE, seconds=tuple(10 * t for t in A100_ALL_REDUCE.seconds))
    monkeypatch.setattr(recorded, "A100_ALL_REDUCE", other)
    assert corrected() == before
    assert all(table.sizes != A100_ALL_REDUCE.sizes for table in recorded.OTHER_A100_ALL_REDUCE)


@pytest.mark.parametrize("kept", [0, 1])
def test_either_of_the_other_machines_alone_would_do(monkeypatch, kept):
    monkeypatch.setattr(nccl_tuner, "OTHER_A100_ALL_REDUCE", recorded.OTHER_A100_ALL_REDUCE[kept : kept + 1])
    assert np.median(np.abs(errors(A100_ALL_REDUCE, A100, corrected()))) < 0.11


def test_recorded_tables_are_whole():
    for table in (A100_ALL_REDUCE, H200_ALL_REDUCE, *recorded.OTHER_A100_ALL_REDUCE):
        assert "https://" in table.source
        assert list(table.sizes) == sorted(table.sizes)
        assert all(0 < rate < 500e9 for rate in table.busbw)
    assert A100_ALL_REDUCE.busbw[-1] / 1e9 == pytest.approx(234.89, rel=1e-4)
    assert H200_ALL_REDUCE.busbw[0] / 1e9 == pytest.approx(3.20)
