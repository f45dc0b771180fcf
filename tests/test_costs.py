"""The costs of collectives: formulas agree with the messages, the messages with the library."""

import numpy as np
import pytest

from course_utils import launch, record
from course_utils.costs import COLLECTIVES, algbw, busbw, busbw_factor, bytes_sent, fit_alpha_beta, format_bytes
from course_utils.schedules import owned_slots, result_slots, schedule, step_through, trace

SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("n", [1, 2, 3, 8, 1000])
def test_factors_are_those_of_nccl_tests(n):
    assert busbw_factor("all_reduce", n) == pytest.approx(2 * (n - 1) / n)
    for op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        assert busbw_factor(op, n) == pytest.approx((n - 1) / n)
    assert busbw_factor("send", n) == busbw_factor("recv", n) == 1
    assert busbw_factor("broadcast", n) == busbw_factor("reduce", n) == (n > 1)


def test_recorded_a100_table_is_reproduced():
    """8 A100, all-reduce, microseconds and GB/s (stas00/ml-engineering, network/README.md)."""
    for mib, microseconds, printed in ((1 / 32, 43.83, 1.31), (1, 101.9, 18.00), (1024, 8203.9, 229.04)):
        size, seconds = mib * 2**20, microseconds / 1e6
        assert busbw("all_reduce", 8, size, seconds) / 1e9 == pytest.approx(printed, rel=5e-3)
        assert algbw(size, seconds) * 1.75 == busbw("all_reduce", 8, size, seconds)


@pytest.mark.parametrize("n", range(2, 10))
@pytest.mark.parametrize("op", SYMMETRIC)
def test_schedule_sends_exactly_the_least_from_every_rank(op, n):
    pieces = [0] * n
    for step in schedule(op, n):
        for message in step:
            pieces[message.src] += len(message.pieces)
    assert pieces == [round(bytes_sent(op, n, n))] * n


@pytest.mark.parametrize("n", range(2, 10))
def test_schedules_have_the_textbook_number_of_steps(n):
    log = int(np.ceil(np.log2(n)))
    steps = {op: len(schedule(op, n)) for op in COLLECTIVES}
    assert steps["all_reduce"] == 2 * (n - 1)
    assert steps["all_gather"] == steps["reduce_scatter"] == steps["gather"] == steps["scatter"] == n - 1
    assert steps["broadcast"] == steps["reduce"] == log
    assert steps["all_to_all"] == (n - 1 if n & (n - 1) == 0 else n)


@pytest.mark.parametrize("n", range(2, 10))
@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_rank_sends_and_receives_at_most_one_message_a_step(op, n):
    for step in schedule(op, n):
        assert len({m.src for m in step}) == len({m.dst for m in step}) == len(step)
        assert all(m.src != m.dst for m in step)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_steps_end_where_the_library_does(world_size):
    inputs = [[(r + 1) * 1.5 + 10 * i for i in range(world_size)] for r in range(world_size)]

    def every_collective():
        return {op: trace(op, inputs) for op in COLLECTIVES}  # compares with the library on every rank

    for rank, traces in enumerate(launch(every_collective, world_size=world_size, backend="gloo")):
        for op, snapshots in traces.items():
            assert snapshots.shape == (len(schedule(op, world_size)) + 1, world_size, 2)
            start, end = snapshots[0], snapshots[-1]
            assert (start[:, 1] > 0).nonzero().flatten().tolist() == owned_slots(op, rank, world_size)
            everybody = 2**world_size - 1
            if op in ("reduce", "all_reduce", "reduce_scatter"):
                assert all(end[slot, 1] == everybody for slot in result_slots(op, rank, world_size))


def test_ledger_counts_the_bytes_of_the_formula():
    def count(op):
        import torch

        pieces = torch.ones(4, 25)
        with record() as ledger:
            assert list(step_through(op, pieces)) == list(range(1, len(schedule(op, 4)) + 1))
        return ledger.sent

    for op in SYMMETRIC:
        assert launch(count, op, world_size=4, backend="gloo") == [round(bytes_sent(op, 4, 400))] * 4


def test_pieces_of_another_shape_are_refused():
    def wrong():
        import torch

        with pytest.raises(ValueError, match=r"shape \(world_size, k\) with world_size 2"):
            next(step_through("all_reduce", torch.ones(3, 1)))

    launch(wrong, world_size=2, backend="gloo")


def test_unknown_operations_are_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match="all_gather"):
        busbw_factor("allgather", 4)
    with pytest.raises(ValueError, match="reduce_scatter"):
        schedule("send", 4)
    with pytest.raises(ValueError, match="at least 1"):
        bytes_sent("all_reduce", 0, 1.0)


def test_fit_recovers_latency_and_bandwidth():
    sizes = [2**k for k in range(10, 26)]
    alpha, beta = fit_alpha_beta(sizes, [3e-4 + 2e-9 * s for s in sizes])
    assert alpha == pytest.approx(3e-4)
    assert beta == pytest.approx(2e-9)


@pytest.mark.parametrize("seconds", [[1.0, 1.0, 0.5], [1e-3, 1e-1, 1e2]])
def test_fit_is_never_negative(seconds):
    alpha, beta = fit_alpha_beta([1, 10, 100], seconds)
    assert alpha >= 0
    assert beta >= 0
    assert alpha + beta > 0


@pytest.mark.parametrize("sizes, seconds", [([1], [1.0]), ([1, 1], [1.0, 1.0]), ([1, 2], [1.0]), ([1, 2], [0.0, 1.0])])
def test_fit_refuses_what_it_cannot_fit(sizes, seconds):
    with pytest.raises(ValueError):
        fit_alpha_beta(sizes, seconds)


def test_sizes_have_binary_prefixes():
    assert [format_bytes(s) for s in (0, 1000, 2**10, 1.5 * 2**20, 2**32)] == [
        "0 B",
        "1e+03 B",
        "1 KiB",
        "1.5 MiB",
        "4 GiB",
    ]
