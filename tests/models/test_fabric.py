"""Promises of the emulated links: exact times on a virtual clock, unchanged programs, nothing left behind."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_utils import HangError, WorkerError, launch, record
from course_utils.topology import from_matrix, two_level
from lessons.nccl.fabric import emulate, emulated_seconds

pytestmark = pytest.mark.guard(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

ALPHA, BETA = 3e-6, 1 / 25e9
SIZE = 1_200_000  # bytes; a multiple of 4 bytes for every number of ranks below
BYTES = BETA * SIZE
MESSAGE = ALPHA + BYTES


def flat(n: int):
    return two_level(1, n, (ALPHA, BETA), (ALPHA, BETA))


def exactly(seconds):
    return pytest.approx(seconds, rel=1e-12, abs=1e-18)


def clocks(work, topology, *, timeout: float = 30.0) -> list:
    """Emulated seconds of every rank at the end of `work`."""

    def timed():
        with emulate(topology) as clock:
            work()
        return clock.seconds

    return launch(timed, world_size=len(topology.gpus), backend="gloo", timeout=timeout)


def tensor(size: int = SIZE) -> torch.Tensor:
    return torch.ones(size // 4)


def ring(x: torch.Tensor) -> None:
    """All-reduce in 2(n-1) steps."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = x.view(n, -1)
    for step in range(2 * (n - 1)):
        give, take = (rank - step) % n, (rank - step - 1) % n
        sent, got = dist.isend(pieces[give], (rank + 1) % n), torch.empty_like(pieces[take])
        dist.recv(got, (rank - 1) % n)
        sent.wait()
        pieces[take] = pieces[take] + got if step < n - 1 else got


# --- exact times ---------------------------------------------------------------------------------------------------


def ping():
    if dist.get_rank() == 0:
        dist.send(tensor(), 1)
    else:
        dist.recv(tensor(), 0)


def exchange():
    other = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, tensor(), other), dist.P2POp(dist.irecv, tensor(), other)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()


def gather():
    if dist.get_rank():
        dist.send(tensor(), 0)
    else:
        for src in (3, 1, 2):
            dist.recv(tensor(), src)


def scatter():
    if dist.get_rank():
        dist.recv(tensor(), 0)
    else:
        for request in [dist.isend(tensor(), dst) for dst in (1, 2, 3)]:
            request.wait()


@pytest.mark.parametrize(("work", "seconds"), {
    ping: [BYTES, MESSAGE],
    exchange: [MESSAGE, MESSAGE],
    gather: [ALPHA + 3 * BYTES, BYTES, 2 * BYTES, 3 * BYTES],  # asked at one moment: in order of rank
    scatter: [3 * BYTES, MESSAGE, MESSAGE + BYTES, MESSAGE + 2 * BYTES],
}.items(), ids=lambda of: getattr(of, "__name__", ""))
def test_messages_wait_for_the_ports_and_for_nothing_else(work, seconds):
    assert clocks(work, flat(len(seconds))) == exactly(seconds)


def test_all_reduces_take_their_formula_one_by_one_at_every_size():
    for n in (1, 2, 3):
        found = emulated_seconds({"once": ring, "again": ring}, flat(n), [SIZE, 2 * SIZE])
        expected = exactly([2 * (n - 1) * (ALPHA + BETA * size / n) for size in (SIZE, 2 * SIZE)])
        assert found["once"] == found["again"] == expected

# --- programs run unchanged, and errors are told as without emulation -----------------------------------------------


def test_messages_in_a_group_are_timed_and_the_ledger_counts_as_usual():
    def work(inside: bool):
        odd, even = dist.new_group([1, 3]), dist.new_group([2, 0])
        rank, group = dist.get_rank(), odd if dist.get_rank() % 2 else even
        with record() as ledger, emulate(flat(4)) if inside else nullcontext() as clock:
            if rank < 2:
                dist.send(tensor(), rank + 2, group=group)
                dist.send(tensor(), group=group, group_dst=1 - group.rank())
            else:
                dist.recv(tensor(), rank - 2, group=group)
                dist.recv(tensor(), group=group, group_src=1 - group.rank())
        return [(e.op, e.bytes, e.peer, e.call_site) for e in ledger], clock and clock.seconds

    emulated, plain = (launch(work, inside, world_size=4, backend="gloo") for inside in (True, False))
    assert [entries for entries, _ in emulated] == [entries for entries, _ in plain]
    assert [seconds for _, seconds in emulated] == exactly([2 * BYTES] * 2 + [ALPHA + 2 * BYTES] * 2)


def test_errors_deadlocks_and_links_of_unknown_bandwidth_are_told():
    def gives_up():
        if dist.get_rank() == 1:
            raise LookupError("rank 1 gives up")
        dist.recv(tensor(), 1)

    with pytest.raises(WorkerError, match="rank 1 gives up"):
        clocks(gives_up, flat(3), timeout=80)
    with pytest.raises(HangError, match="recv"):
        clocks(lambda: dist.recv(tensor(), 1 - dist.get_rank()), flat(2), timeout=5)
    with pytest.raises(WorkerError, match="bytes/s of every link"):
        clocks(ping, from_matrix("GPU0 GPU1\nGPU0 X PHB\nGPU1 PHB X\n"))
