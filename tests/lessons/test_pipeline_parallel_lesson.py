"""The pipeline engine of lesson 10: equal to one process for any stages, micro-batches and schedule; what it sends."""

from __future__ import annotations

import dataclasses
import sys
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions
from torch import nn

from course_utils import HangError, launch, record, recorded
from course_utils.models import TransformerConfig, build_gpt
from lessons.pipeline_parallel import pipeline_training, stage_costs
from lessons.pipeline_parallel.pipeline import (
    Op,
    Schedule,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    partition,
    simulate,
)
from lessons.pipeline_parallel.pipeline_training import PipelineRun

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = TransformerConfig(layers=7, hidden=12, heads=2, context=8, vocabulary=16, tied=False)
LENGTH = 5


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("10", gpt=SMALL)


def text(step: int = 0, windows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """As many windows as all numbers of micro-batches divide."""
    tokens = torch.randint(SMALL.vocabulary, (windows, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


@cache
def one_process(steps: int = 2) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Losses, the gradients of the first step, and the parameters at the end, in float64."""
    model = build_gpt(SMALL).double()
    whole = nn.Sequential(*pipeline_training.pieces(model))
    optimizer, losses, gradients = pipeline_training.sgd(whole.parameters()), [], None
    for step in range(steps):
        optimizer.zero_grad()
        x, y = text(step)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        gradients = flat(p.grad for p in whole.parameters()) if gradients is None else gradients
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, flat(whole.parameters())


def pipeline_runs(engine, run, schedules, sizes, steps=2):
    """Each schedule from the same weights on this rank, in float64."""
    found = []
    for schedule in schedules:
        modules = {stage: pipeline_training.build_stage(SMALL, sizes[schedule.stages], stage).double()
                   for stage, rank in enumerate(schedule.placement) if rank == dist.get_rank()}
        torch.set_default_dtype(torch.float64)  # of what the mailbox receives
        try:
            found.append(_one_run(engine(modules, schedule), run, modules, steps))
        finally:
            torch.set_default_dtype(torch.float32)
    return found


def _one_run(worker, run, modules, steps):
    losses, gradients = [], {}
    optimizer = pipeline_training.sgd([p for module in modules.values() for p in module.parameters()])
    for step in range(steps):
        optimizer.zero_grad()
        with record() as ledger:
            losses.append(run(worker, *text(step)))
        if step == 0:
            gradients = {s: flat(p.grad for p in m.parameters()) for s, m in modules.items()}
        optimizer.step()
    for group in worker.mail.groups.values():
        dist.destroy_process_group(group)
    return {
        "losses": losses, "gradients": gradients, "left": len(worker.kept),
        "parameters": {s: flat(m.parameters()) for s, m in modules.items()},
        "messages": ledger.messages, "sent": ledger.sent, "other": ledger.count() - ledger.count("recv"),
    }


def backwards(ranks: int, microbatches: int) -> Schedule:
    """GPipe whose backwards come in the opposite order."""
    order = tuple(
        (*(Op("F", rank, m) for m in range(microbatches)), *(Op("B", rank, m) for m in reversed(range(microbatches))))
        for rank in range(ranks)
    )
    return Schedule("backwards", microbatches, tuple(range(ranks)), order)


def schedules(ranks: int) -> list[Schedule]:
    plain = [make(ranks, m) for make in (naive, gpipe, one_f_one_b, backwards) for m in (1, 2, 3, 4, 6)]
    if ranks == 1:
        return plain
    return [*plain, *(interleaved(ranks, m, 2) for m in range(1, 8) if m % ranks == 0)]


def joined(by_rank, what: str) -> torch.Tensor:
    stages = {stage: vector for seen in by_rank for stage, vector in seen[what].items()}
    return torch.cat([stages[stage] for stage in sorted(stages)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_engine_is_one_process_for_any_schedule(ranks):
    costs = [0, *[1] * SMALL.layers, 0.5]
    sizes = {n: partition(costs, n) for n in (ranks, 2 * ranks)}
    runs, parts = schedules(ranks), (lesson()["Engine"], lesson()["run_schedule"])
    by_rank = launch(pipeline_runs, *parts, runs, sizes, world_size=ranks, timeout=100, backend="gloo")
    losses, gradients, parameters = one_process()
    for schedule, *seen in zip(runs, *by_rank, strict=True):
        for step, expected in enumerate(losses):
            assert sum(rank["losses"][step] for rank in seen) == pytest.approx(expected, abs=1e-12), schedule.name
        assert (joined(seen, "gradients") - gradients).abs().max() < 1e-12, schedule.name
        assert (joined(seen, "parameters") - parameters).abs().max() < 1e-12, schedule.name
        for of in seen:
            assert of["left"] == 0 and of["other"] == of["messages"]
        boundaries = schedule.stages - 1
        assert sum(of["messages"] for of in seen) == 2 * schedule.microbatches * boundaries
        assert sum(of["sent"] for of in seen) == 2 * boundaries * text()[0].numel() * SMALL.hidden * 8


@pytest.mark.parametrize("ranks", [2, 3])
def test_blocking_sends_hang_in_1f1b_and_not_in_gpipe(ranks):
    steps = lesson()["messages_only"]
    quick = {"world_size": ranks, "timeout": 2.0, "backend": "gloo"}
    assert launch(steps, gpipe(ranks, 2 * ranks), **quick) == [None] * ranks
    with pytest.raises(HangError, match="circle"):
        launch(steps, one_f_one_b(ranks, 2 * ranks), **quick)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
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


def test_costs_of_pieces_are_those_of_the_model():
    costs = stage_costs.piece_flops(SMALL)
    assert len(costs) == len(pipeline_training.pieces(build_gpt(SMALL)))
    assert sum(costs) == SMALL.flops_per_token(backward=False)
    assert stage_costs.stage_sums(costs, [3, 4, 2]) == [sum(costs[:3]), sum(costs[3:7]), sum(costs[7:])]


def test_pieces_in_a_row_are_the_model():
    model = build_gpt(SMALL, dtype=torch.float64)
    x, _ = text()
    assert torch.equal(nn.Sequential(*pipeline_training.pieces(model))(x), model(x))
    cut = [pipeline_training.build_stage(SMALL, [4, 3, 2], stage) for stage in range(3)]
    assert sum(p.numel() for stage in cut for p in stage.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_library_lists_our_orders_but_for_the_last_rank_of_1f1b(name):
    """Its listing, which is not documented, counts the forwards of that rank from 1; what runs is right."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    make = {"GPipe": gpipe, "1F1B": one_f_one_b, "Interleaved1F1B": interleaved}[name]
    for ranks, m in ((2, 4), (3, 6), (4, 8)):
        orders = [[str(op) for op in order if op is not None] for order in visualizer.get_schedule_ops(name, ranks, m)]
        listed = [[op for op in order if not op.endswith("GRAD")] for order in orders]
        equal = [a == [str(op) for op in b] for a, b in zip(listed, make(ranks, m).order, strict=True)]
        assert equal == [True] * (ranks - 1) + [name != "1F1B"]


def test_training_weighs_times_and_compares():
    """What ranks hold is what the schedule says; a step with a pace takes as long; a wrong engine is told."""
    plain, sizes = [make(2, 4) for make in (naive, gpipe, one_f_one_b)], [4, 5]
    of = lesson()

    def halved(schedule, stages):
        step = of["with_engine"](schedule, stages)
        return lambda x, y: step(x, y) / 2

    def both():
        right = pipeline_training.train(of["with_engine"], plain, SMALL, sizes, small_text, 2, (0.01, 0.02), True)
        return right, pipeline_training.train(halved, plain[:1], SMALL, sizes, small_text, 2, None)

    def small_text(step):
        return text(step, 8)

    reference = launch(pipeline_training.one_process, SMALL, small_text, 2, world_size=1, backend="gloo")[0]
    found = launch(both, world_size=2, backend="gloo")
    right = {each.name: [rank[0][each.name] for rank in found] for each in plain}
    for schedule in plain:
        runs, peak = right[schedule.name], simulate(schedule).peak
        assert pipeline_training.same_as_one_process(runs, reference).endswith("equal to one process")
        assert pipeline_training.total_messages(runs) == (8, 8 * 2 * LENGTH * SMALL.hidden * 4)
        assert pipeline_training.weighed(runs, right["naive"]) == pytest.approx(peak, rel=0.05)
        for rank, spans in enumerate(pipeline_training.measured(runs)):
            assert [op for op, *_ in spans] == list(schedule.order[rank])
            assert all(end - start >= 0.999 * (0.01 if op.kind == "F" else 0.02) for op, start, end in spans)
        assert all(0 < share < 1 for share in pipeline_training.idle(runs))
    wrong = [rank[1]["naive"] for rank in found]
    assert wrong[0].spans == [] and wrong[0].held == 0
    with pytest.raises(AssertionError, match="not as in one process: off are losses by"):
        pipeline_training.same_as_one_process(wrong, reference)


def test_operations_that_are_no_messages_are_told():
    with record() as ledger:
        pass
    run = PipelineRun(None, [0.0], {}, {}, ledger, [], 0)
    assert pipeline_training.total_messages([run]) == (0, 0)

    def reduces():
        with record() as ledger:
            dist.all_reduce(torch.ones(1))
        return dataclasses.replace(run, ledger=ledger)

    with pytest.raises(AssertionError, match="1 operations are no messages"):
        pipeline_training.total_messages(launch(reduces, world_size=2, backend="gloo"))


def test_copies_of_a_tied_weight_drift_apart_unless_their_gradients_are_added():
    names = definitions("10", gpt=SMALL, microbatches=4, sizes=[4, 5], one_f_one_b=one_f_one_b)
    training, names["text"] = names["tied_training"], lambda step: text(step, 8)
    tied = dataclasses.replace(SMALL, tied=True)
    one = launch(pipeline_training.one_process, tied, lambda step: text(step, 8), world_size=1, backend="gloo")[0]
    for add in (True, False):
        first, last = launch(training, add, world_size=2, backend="gloo")
        assert torch.equal(first[1], last[1]) == add
        assert (max(abs(a - b) for a, b in zip(last[0], one.losses, strict=True)) < 1e-5) == add


def test_seconds_of_stages_and_of_micro_batches_are_positive():
    stages = launch(stage_costs.stage_seconds, SMALL, [4, 3, 2], text(0, 2), 1, world_size=1, backend="gloo")[0]
    assert len(stages) == 3 and all(forward > 0 and backward > 0 for forward, backward in stages)
    prices = launch(stage_costs.kernel_prices, SMALL, [1, 2], 4, 1, world_size=1, backend="gloo")[0]
    assert len(prices) == 2 and min(prices) > 0


def test_stage_of_the_largest_published_run():
    """Recorded shape and speed, by hand: 2 layers on 8 GPUs, h = 25,600, s = 2,048, 163 TFLOP/s."""
    stage = stage_costs.published_stage(recorded.MEGATRON_RUNS[-1])
    h, s = 25_600, 2048
    assert stage.microbatches == 512 and stage.message == 2 * s * h and stage.pipeline == 4 * s * h
    assert stage.tensor == pytest.approx(2 * 12 * s * h * 7 / 8 * 2)
    assert stage.forward == pytest.approx((2 * 12 * h**2 * 2 + 4 * s * h * 2) * s / 8 / 163e12, rel=0.02)
    assert stage.data == pytest.approx(2 * 2 * 5 / 6 * 1008e9 / 512 / 512, rel=0.01)
