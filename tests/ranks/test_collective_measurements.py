"""What the lesson on collectives measures: what ranks hold, what went over TCP, when ranks wait."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from course_utils.costs import COLLECTIVES, bytes_sent
from lessons.collectives import collective_measurements as measured


def double(x):
    return None if x is None else 2 * x


@pytest.mark.parametrize(
    ("start", "before"), {"row": [[1, 2], [10, 20]], "piece": [[1], [10]], "root": [[1, 2], None]}.items()
)
def test_ranks_start_with_digits_of_their_own_place(start: str, before: list):
    found, after = measured.held(double, 2, start=start, backend="gloo")
    assert [None if x is None else x.tolist() for x in found] == before
    assert [None if x is None else x.tolist() for x in after] == [x and [2 * i for i in x] for x in before]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone counts the bytes of a connection")
def test_bytes_over_tcp_are_no_fewer_than_the_formula_says():
    traffic = measured.tcp_traffic(3 * 2**18, 3)
    for op in COLLECTIVES:
        busiest = max(max(rank[op].values()) for rank in traffic)
        assert bytes_sent(op, 3, 1.0) - 0.01 < busiest < 2.1, op


def test_spans_follow_each_other_and_an_overlapped_step_computes_first():
    rows = measured.barrier_spans(lambda: None, 3)
    assert all(work[2] == wait[1] <= wait[2] for work, wait in rows.values())
    assert min(wait[2] for _, wait in rows.values()) >= max(wait[1] for _, wait in rows.values())

    def overlap(x, compute):
        request = dist.all_reduce(x, async_op=True)
        compute()
        request.wait()

    spans = measured.hidden_step(overlap, 2**16, 2, repeats=1)
    assert [label for label, *_ in spans] == ["waiting", "computing", "waiting"]
    assert all(a[2] == b[1] for a, b in zip(spans, spans[1:], strict=False))
