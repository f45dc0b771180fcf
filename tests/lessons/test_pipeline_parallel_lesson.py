"""What lesson 10 says of pipelines and no cell asserts: odd schedules, queues of messages, costs of stages."""

from __future__ import annotations

import sys
from functools import cache

import cloudpickle
import pytest
import torch
from lesson_cells import definitions

from course_utils import launch, recorded
from course_utils.models import TransformerConfig
from lessons.pipeline_parallel import pipeline_training, stage_costs
from lessons.pipeline_parallel.pipeline import Op, Schedule, gpipe, interleaved, naive, one_f_one_b, simulate

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = TransformerConfig(layers=7, hidden=12, heads=2, context=8, vocabulary=16, tied=False)
LENGTH = 5


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("10", gpt=SMALL)


def text(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(SMALL.vocabulary, (8, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def backwards(ranks: int, microbatches: int) -> Schedule:
    """GPipe whose backwards come in the opposite order."""
    order = tuple(
        (*(Op("F", rank, m) for m in range(microbatches)), *(Op("B", rank, m) for m in reversed(range(microbatches))))
        for rank in range(ranks)
    )
    return Schedule("backwards", microbatches, tuple(range(ranks)), order)


@pytest.mark.parametrize("ranks", [3, 8])
def test_one_queue_for_each_kind_and_direction_is_emptied_in_the_order_in_which_it_was_filled(ranks):
    """What NCCL needs, which does not look at tags."""
    made = [make(ranks, m) for make in (naive, gpipe, one_f_one_b) for m in (1, 2, 7)]
    for schedule in [*made, *(interleaved(ranks, k * ranks, v) for k in (1, 3) for v in (2, 3))]:
        place, last, filled, emptied = schedule.placement, schedule.stages - 1, {}, {}
        for rank, ops in enumerate(schedule.order):
            for op in ops:
                before, behind = (op.stage - 1, op.stage + 1) if op.kind == "F" else (op.stage + 1, op.stage - 1)
                if 0 <= before <= last:
                    emptied.setdefault((op.kind, place[before], rank), []).append(op)
                if 0 <= behind <= last:
                    filled.setdefault((op.kind, rank, place[behind]), []).append(op._replace(stage=behind))
        assert filled == emptied


def test_training_weighs_times_and_compares():
    """What ranks hold is what the schedule says, and a wrong engine is told."""
    plain, sizes = [*(make(2, 4) for make in (naive, gpipe, one_f_one_b)), backwards(2, 4)], [4, 5]
    of = lesson()

    def halved(schedule, stages):
        step = of["with_engine"](schedule, stages)
        return lambda x, y: step(x, y) / 2

    def both():
        right = pipeline_training.train(of["with_engine"], plain, SMALL, sizes, text, 2, (0.01, 0.02), True)
        return right, pipeline_training.train(halved, plain[:1], SMALL, sizes, text, 2, None)

    reference = launch(pipeline_training.one_process, SMALL, text, 2, world_size=1, backend="gloo")[0]
    found = launch(both, world_size=2, backend="gloo")
    right = {each.name: [rank[0][each.name] for rank in found] for each in plain}
    for schedule in plain:
        runs, peak = right[schedule.name], simulate(schedule).peak
        assert pipeline_training.same_as_one_process(runs, reference).endswith("equal to one process")
        assert pipeline_training.weighed(runs, right["naive"]) == pytest.approx(peak, rel=0.05)
        for rank, spans in enumerate(pipeline_training.measured(runs)):
            assert [op for op, *_ in spans] == list(schedule.order[rank])
            assert all(end - start >= 0.999 * (0.01 if op.kind == "F" else 0.02) for op, start, end in spans)
    with pytest.raises(AssertionError, match="not as in one process: off are losses by"):
        pipeline_training.same_as_one_process([rank[1]["naive"] for rank in found], reference)


def test_stage_of_the_largest_published_run():
    """Recorded shape and speed, by hand: 2 layers on 8 GPUs, h = 25,600, s = 2,048, 163 TFLOP/s."""
    stage = stage_costs.published_stage(recorded.MEGATRON_RUNS[-1])
    h, s = 25_600, 2048
    assert stage.microbatches == 512 and stage.message == 2 * s * h and stage.pipeline == 4 * s * h
    assert stage.tensor == pytest.approx(2 * 12 * s * h * 7 / 8 * 2)
    assert stage.forward == pytest.approx((2 * 12 * h**2 * 2 + 4 * s * h * 2) * s / 8 / 163e12, rel=0.02)
    assert stage.data == pytest.approx(2 * 2 * 5 / 6 * 1008e9 / 512 / 512, rel=0.01)
