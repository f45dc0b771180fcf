"""Counting what an all-reduce of messages needs: right ones are counted, wrong ones are refused."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_utils import WorkerError
from lessons.nccl.message_counts import as_nodes, count_messages, formula

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


def at_rank_0(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    for peer in range(1, n):
        received = torch.empty_like(x)
        dist.recv(received, peer)
        x += received
    for peer in range(1, n):
        dist.send(x, peer)


def forgets_rank_1(x):
    before = x.clone()
    at_rank_0(x)
    if dist.get_rank() == 1:
        x.copy_(before)


def test_steps_and_bytes_are_those_of_the_formula_and_a_wrong_sum_is_refused():
    found = count_messages(at_rank_0, 3)
    assert (found.steps, found.busiest, found.sent) == (*formula("root", 3), (2.0, 1.0, 1.0))
    assert str(found) == " 4 steps; sent by each rank, in S: 2.00 1.00 1.00"
    with pytest.raises(WorkerError, match="the sum is not that of the library"):
        count_messages(forgets_rank_1, 2)


def test_ranks_are_seen_as_nodes():
    assert [as_nodes(n) for n in (2, 3, 4, 6)] == [(2, 1), (3, 1), (2, 2), (2, 3)]
