"""Steps by the clock: which seconds count, whose windows, what lies in backward; hooks train as DDP does."""

from __future__ import annotations

import sys

import cloudpickle
import numpy
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from course_utils import launch
from course_utils.models import TransformerConfig
from lessons.scaling_efficiency import scaling

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


def test_ranks_have_windows_of_their_own_and_the_same_each_time():
    def one_rank():
        return [scaling.my_windows(step, 3)[0] for step in (0, 1, 1)]

    found = launch(one_rank, world_size=2, backend="gloo")
    rows = {tuple(row.tolist()) for rank in found for x in rank[:2] for row in x}
    assert len(rows) == 2 * 2 * 3 and all(torch.equal(rank[1], rank[2]) for rank in found)
    assert scaling.fixed_batch(2, 5)[0].shape == (5, scaling.CONTEXT)


def test_steps_are_counted_without_the_first_ones():
    def prepare():
        return lambda x, y: steps.append(tuple(x.shape))

    def one_rank():
        return len(scaling.step_seconds(prepare, size=2, steps=4, warm_up=3)), steps

    steps = []
    assert launch(one_rank, world_size=2, backend="gloo") == [(4, [(2, 64)] * 7)] * 2


def test_shortest_step_begins_with_the_first_rank():
    late = [[("a", 10.0, 11.0), ("b", 11.0, 14.0)], [("a", 20.5, 21.0), ("b", 21.0, 22.0)]]
    soon = [[("a", 10.0, 12.0)], [("a", 20.0, 21.5)]]
    assert scaling.shortest_step([late, soon]) == {
        "rank 0": [("a", 0.5, 1.0), ("b", 1.0, 2.0)], "rank 1": [("a", 0.0, 1.5)],
    }
    assert scaling.shortest_step([late[:1] * 2, soon[:1] * 2], skip=1)["rank 0"][-1] == ("b", 1.0, 4.0)


def test_overlap_counts_each_moment_once():
    trace = [
        ("autograd::engine: a", 1, 0.0, 1.0),
        ("gloo:all_reduce", 2, 0.5, 2.0),
        ("autograd::engine: b", 1, 1.0, 2.0),
        ("gloo:all_reduce", 3, 1.0, 3.0),
        ("aten::add", 1, 2.0, 9.0),
        ("gloo:all_reduce", 2, 4.0, 5.0),
    ]
    rows, share = scaling.overlap(trace)
    assert share == pytest.approx(1.5 / 3.5), "busy from 0.5 to 3 and from 4 to 5, in backward until 2"
    assert rows["backward"] == [("backward", 0, 2.0)] and len(rows) == 3
    assert scaling.overlap([e for e in trace if "gloo" not in e[0]])[1] == 0


def test_sweep_sends_the_same_bytes_in_any_number_of_buckets():
    one, many = launch(scaling.bucket_sweep, [25, 1e-4], 1, steps=1, world_size=2, backend="gloo")[0]
    assert one.bytes == many.bytes == 4 * TransformerConfig().parameter_count
    assert (one.messages, many.messages) == (1, 28) and one.seconds > 0
    assert 0 <= one.hidden <= 1 and sum(len(bars) for lane, bars in many.rows.items() if lane != "backward") == 28


def test_buckets_follow_each_other_and_none_starts_before_it_is_ready():
    generator = numpy.random.default_rng(0)
    for _ in range(50):
        k = int(generator.integers(1, 60))
        each, backward = 10.0 ** generator.uniform((-4, -3), (0, 0))
        spans = scaling.bucket_schedule(k, each, backward)
        assert len(spans) == k
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        assert all(start >= backward * (i + 1) / k * (1 - 1e-12) for i, (start, _) in enumerate(spans))


def test_a_hook_that_does_nothing_else_trains_as_ddp_does():
    def plain():
        return None, default_hooks.allreduce_hook

    runs = [launch(scaling.train_with_hook, make, 3, world_size=2, backend="gloo")[0] for make in (None, plain)]
    assert runs[0].losses == pytest.approx(runs[1].losses)
    assert runs[0].sent == runs[1].sent == 4 * TransformerConfig().parameter_count  # 2 (N - 1) / N of them
    assert runs[0].unchanged < 0.1


def test_losses_are_the_mean_over_ranks_and_steps():
    ranks = [scaling.TrainedWithHook(losses, 0.0, 0.0) for losses in ([1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0])]
    assert scaling.smooth_losses(ranks, width=3) == ([3, 4], [3.0, 4.0])
