"""Steps by the clock: which seconds count, whose windows, what lies in backward; hooks train as DDP does."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from course_utils import launch
from course_utils.models import TransformerConfig
from lessons.scaling_efficiency import scaling

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


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


def test_a_hook_that_does_nothing_else_trains_as_ddp_does():
    def plain():
        return None, default_hooks.allreduce_hook

    runs = [launch(scaling.train_with_hook, make, 3, world_size=2, backend="gloo")[0] for make in (None, plain)]
    assert runs[0].losses == pytest.approx(runs[1].losses)
    assert runs[0].sent == runs[1].sent == 4 * TransformerConfig().parameter_count  # 2 (N - 1) / N of them
    assert runs[0].unchanged < 0.1
