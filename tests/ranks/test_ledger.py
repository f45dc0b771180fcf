"""Promises of the ledger: what PyTorch sends on this rank, with bytes, peers, times and call sites."""

from __future__ import annotations

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from calls import case

from course_utils import WorkerError, launch, record

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

ROOT = 1  # the root of rooted collectives below
CALLS: list = []  # functions; the number of ranks, the entries of each rank as (operation, bytes) or with a peer


def run(function, *args, world_size: int = 4):
    """Ledgers by rank of one function."""

    def recorded():
        with record() as ledger:
            function(*args)
        return ledger

    return launch(recorded, world_size=world_size)


def every(*entries: tuple) -> list[list[tuple]]:
    """The same entries on each of two ranks."""
    return [[*entries]] * 2


def test_a_rank_that_does_not_exist_is_told_before_gloo_hangs_or_crashes():
    with pytest.raises(WorkerError, match="send: there is no rank 2, the group has ranks 0 to 1"):
        launch(lambda: dist.isend(torch.ones(2), 2), world_size=2)


def test_every_direct_collective_with_its_bytes():
    def work():
        n, rank = dist.get_world_size(), dist.get_rank()
        x, whole = torch.ones(1000), torch.ones(4000)
        parts = [torch.ones(1000) for _ in range(n)]
        dist.all_reduce(x)
        dist.broadcast(x, src=ROOT)
        dist.reduce(x, dst=ROOT)
        dist.all_gather(parts, x)
        dist.all_gather_single(whole, x)
        dist.reduce_scatter(x, parts)
        dist.reduce_scatter_single(x, whole)
        dist.all_to_all_single(torch.empty(4000), whole)
        dist.gather(x, parts if rank == ROOT else None, dst=ROOT)
        dist.scatter(x, parts if rank == ROOT else None, src=ROOT)
        dist.barrier()

    expected = [
        ("all_reduce", 4000), ("broadcast", 4000), ("reduce", 4000), ("all_gather", 16000), ("all_gather", 16000),
        ("reduce_scatter", 16000), ("reduce_scatter", 16000), ("all_to_all", 16000),
        ("gather", 16000), ("scatter", 16000), ("barrier", 0),
    ]
    for ledger in run(work):
        assert [(entry.op, entry.bytes) for entry in ledger.entries] == expected
        rooted = {"broadcast", "reduce", "gather", "scatter"}
        assert [entry.peer for entry in ledger.entries] == [ROOT if op in rooted else None for op, _ in expected]
        assert len(ledger) == ledger.count() == 11 and ledger.count("all_gather") == 2
        assert ledger.bytes() == sum(size for _, size in expected) and ledger.bytes("reduce_scatter") == 32000
        assert (ledger.sent, ledger.received, ledger.messages) == (0, 0, 0)


@case(CALLS, every(*((op, n * size) for size in (8, 2, 1, 8) for op, n in (("broadcast", 10), ("all_gather", 20)))))
def bytes_follow_the_element_type():
    for dtype in (torch.float64, torch.bfloat16, torch.uint8, torch.complex64):
        dist.broadcast(torch.ones(10, dtype=dtype), src=0)
        dist.all_gather([torch.empty(10, dtype=dtype) for _ in range(2)], torch.ones(10, dtype=dtype))


@case(CALLS, [[("all_to_all", 12)], [("all_to_all", 28)]])
def uneven_all_to_all_counts_what_this_rank_puts_in():
    rank = dist.get_rank()
    # rank 0 sends 1 and 2 elements, rank 1 sends 3 and 4
    inputs = [1, 2] if rank == 0 else [3, 4]
    outputs = [1, 3] if rank == 0 else [2, 4]
    dist.all_to_all_single(torch.empty(sum(outputs)), torch.ones(sum(inputs)), outputs, inputs)


@case(CALLS, every(("all_reduce", 240)))
def coalesced_collectives():
    from torch.distributed.distributed_c10d import _coalescing_manager

    with _coalescing_manager(async_ops=True) as manager:
        for n in (10, 20, 30):
            dist.all_reduce(torch.ones(n))
    manager.wait()


@case(CALLS, every(("all_reduce", 40), ("all_gather", 80), ("reduce_scatter", 40), ("all_gather", 8 * 4 * 4)))
def functional_collectives_and_dtensors():
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    x = torch.ones(10)
    functional.wait_tensor(functional.all_reduce(x, "sum", mesh.get_group()))
    functional.wait_tensor(functional.all_gather_tensor(x, 0, mesh.get_group()))
    functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 0, mesh.get_group()))
    DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)]).full_tensor()


@pytest.mark.parametrize(("work", "expected"), CALLS)
def test_calls_are_entries_with_their_bytes(work, expected):
    for ledger, entries in zip(run(work, world_size=2), expected, strict=True):
        found = [(entry.op, entry.bytes, entry.peer) for entry in ledger.entries]
        assert [each[: len(entries[0])] for each in found] == entries


@pytest.mark.parametrize("how", ["isend and recv", "batch_isend_irecv"])
def test_messages_with_their_peers(how):
    def ring():
        rank, n = dist.get_rank(), dist.get_world_size()
        x, y = torch.full((10,), float(rank)), torch.empty(10)
        right, left = (rank + 1) % n, (rank - 1) % n
        if how == "batch_isend_irecv":
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)])
        else:
            works = [dist.isend(x, right)]
            dist.recv(y, src=left)
        for work in works:
            work.wait()
        assert y[0] == left

    for rank, ledger in enumerate(run(ring)):
        found = sorted((entry.op, entry.peer, entry.bytes) for entry in ledger.entries)
        assert found == [("recv", (rank - 1) % 4, 40), ("send", (rank + 1) % 4, 40)]
        assert (ledger.sent, ledger.received, ledger.messages) == (40, 40, 1)


def test_sub_groups_are_told_apart_with_global_ranks():
    def work():
        odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
        rank = dist.get_rank()
        mine = odd if rank % 2 else even
        with record() as ledger:
            x = torch.ones(10)
            dist.all_reduce(x)
            dist.all_reduce(x, group=mine)
            dist.broadcast(x, src=2 + rank % 2, group=mine)
            if rank >= 2:
                dist.send(x, dst=rank - 2, group=mine)
            else:
                dist.recv(x, src=rank + 2, group=mine)
            dist.all_gather([torch.empty(10) for _ in range(2)], x, group=mine)
        return ledger

    for rank, ledger in enumerate(launch(work, world_size=4)):
        world, *sub = ledger.entries
        assert list(world.ranks) == [0, 1, 2, 3]
        assert all(list(entry.ranks) == [rank % 2, rank % 2 + 2] for entry in sub)
        assert len({entry.group for entry in sub}) == 1 and world.group != sub[0].group
        assert [entry.peer for entry in sub] == [None, 2 + rank % 2, rank - 2 if rank >= 2 else rank + 2, None]
        assert sub[-1].bytes == 80


def test_what_a_rank_sends_is_counted_by_group_and_between_nodes():
    """Collectives as rings: an all-reduce of S sends 2 (n - 1)/n S to the next rank, an all-gather (n - 1)/n S."""

    def work():
        ends = dist.new_group([0, 3])
        dist.all_reduce(torch.ones(10))
        dist.barrier()
        if dist.get_rank() in (0, 3):
            dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2), group=ends)
        if dist.get_rank() == 1:
            dist.send(torch.ones(5), 3)
        if dist.get_rank() == 3:
            dist.recv(torch.empty(5), 1)

    nodes = [0, 0, 1, 1]
    sent = [(ledger.bytes_sent(), ledger.bytes_sent(group="default"), ledger.bytes_sent(between=nodes))
            for ledger in run(work)]
    assert sent == [(68, 60, 8), (80, 80, 80), (60, 60, 0), (68, 60, 68)]


def test_an_entry_begins_before_it_ends_and_times_ascend():
    def work():
        begin = time.monotonic()
        with record() as ledger:
            handles = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(3)]
            for handle in handles:
                handle.wait()
            dist.barrier()
        return ledger, begin, time.monotonic()

    for ledger, begin, end in launch(work, world_size=2):
        starts = [entry.start for entry in ledger.entries]
        assert len(ledger) == 4 and starts == sorted(starts)
        assert all(begin <= entry.start <= entry.end <= end for entry in ledger.entries)


def test_the_call_site_is_the_learners_line():
    def work():
        def averaged(x):
            dist.all_reduce(x, op=dist.ReduceOp.SUM)  # in a helper
            return x / dist.get_world_size()

        averaged(torch.ones(1))
        dist.barrier()

    for ledger in run(work, world_size=2):
        first, second = (entry.call_site for entry in ledger.entries)
        assert "dist.all_reduce(x, op=dist.ReduceOp.SUM)" in first and first.startswith("line ")
        assert "dist.barrier()" in second


def test_records_end_with_their_block_also_after_an_exception_and_nest():
    def work():
        dist.all_reduce(torch.ones(1))
        with record() as outer:
            dist.barrier()
            with record() as inner:
                dist.all_reduce(torch.ones(1))
            dist.barrier()
        dist.all_reduce(torch.ones(1))
        try:
            with record() as left_early:
                dist.barrier()
                raise ValueError("left early")
        except ValueError:
            pass
        dist.barrier()
        with record() as empty:
            pass
        return [[entry.op for entry in ledger.entries] for ledger in (outer, inner, left_early, empty)]

    expected = [["barrier", "all_reduce", "barrier"], ["all_reduce"], ["barrier"], []]
    assert launch(work, world_size=2) == [expected] * 2
