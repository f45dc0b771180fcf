"""The pipeline engine of lesson 10: equal to one process for any stages, micro-batches and schedule; what it sends."""

from __future__ import annotations

import math
import sys
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lessons import definitions
from torch import nn

from course_utils import HangError, launch, record
from course_utils.models import TransformerConfig, build_gpt
from course_utils.pipeline import Op, Schedule, gpipe, interleaved, naive, one_f_one_b, partition, simulate

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = TransformerConfig(layers=7, hidden=12, heads=2, context=8, vocabulary=16, tied=False)
BATCH, LENGTH = 14, 5  # not a multiple of most numbers of micro-batches


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("10", gpt=SMALL)


def engine() -> dict:
    return {name: lesson()[name] for name in ("Worker", "run", "pieces", "messages_only")}


def text(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SMALL.vocabulary, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


@cache
def one_process(steps: int = 3) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Losses, the gradients of the first step, and the parameters at the end."""
    model = build_gpt(SMALL, dtype=torch.float64)
    whole = nn.Sequential(*lesson()["pieces"](model))
    optimizer, losses, gradients = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9), [], None
    for step in range(steps):
        optimizer.zero_grad()
        x, y = text(step)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        gradients = flat(p.grad for p in whole.parameters()) if gradients is None else gradients
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, flat(whole.parameters())


def pipeline_runs(parts, schedules, sizes, steps=3):
    """Each schedule from the same weights on this rank, in float64."""
    seen = []
    for schedule in schedules:
        pieces, modules, start = parts["pieces"](build_gpt(SMALL, dtype=torch.float64)), {}, 0
        for stage, count in enumerate(sizes[schedule.stages]):
            if schedule.placement[stage] == dist.get_rank():
                modules[stage] = nn.Sequential(*pieces[start : start + count])
            start += count
        worker, losses, gradients = parts["Worker"](modules, schedule.placement, SMALL.hidden), [], {}
        optimizer = torch.optim.SGD(worker.parameters, lr=0.1, momentum=0.9)
        for step in range(steps):
            optimizer.zero_grad()
            with record() as ledger:
                losses.append(parts["run"](worker, schedule, *text(step)))
            if step == 0:
                gradients = {s: flat(p.grad for p in m.parameters()) for s, m in modules.items()}
            optimizer.step()
        seen.append({
            "losses": losses, "gradients": gradients, "kept": worker.most, "left": len(worker.kept),
            "parameters": {s: flat(m.parameters()) for s, m in modules.items()},
            "order": [op for op, *_ in worker.spans],
            "messages": ledger.messages, "sent": ledger.sent, "other": ledger.count() - ledger.count("recv"),
        })
        for group in worker.mail.groups.values():
            dist.destroy_process_group(group)
    return seen


def backwards(ranks: int, microbatches: int) -> Schedule:
    """GPipe whose backwards come in the opposite order, and whose ranks disagree on the order of the forwards."""

    def order(rank: int) -> tuple[Op, ...]:
        forward = range(microbatches) if rank % 2 == 0 else reversed(range(microbatches))
        return (*(Op("F", rank, m) for m in forward), *(Op("B", rank, m) for m in reversed(range(microbatches))))

    return Schedule("backwards", microbatches, tuple(range(ranks)), tuple(map(order, range(ranks))))


def schedules(ranks: int) -> list[Schedule]:
    plain = [make(ranks, m) for make in (naive, gpipe, one_f_one_b, backwards) for m in range(1, 8)]
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
    runs = schedules(ranks)
    by_rank = launch(pipeline_runs, engine(), runs, sizes, world_size=ranks, timeout=100, backend="gloo")
    losses, gradients, parameters = one_process()
    for schedule, *seen in zip(runs, *by_rank, strict=True):
        for step, expected in enumerate(losses):
            assert sum(rank["losses"][step] for rank in seen) == pytest.approx(expected, abs=1e-12), schedule.name
        assert (joined(seen, "gradients") - gradients).abs().max() < 1e-12, schedule.name
        assert (joined(seen, "parameters") - parameters).abs().max() < 1e-12, schedule.name
        peaks = simulate(schedule).peak
        for rank, of in enumerate(seen):
            assert of["order"] == list(schedule.order[rank])
            assert of["kept"] == round(peaks[rank] * schedule.virtual) and of["left"] == 0
            assert of["other"] == of["messages"]
        boundaries = schedule.stages - 1
        assert sum(of["messages"] for of in seen) == 2 * schedule.microbatches * boundaries
        assert sum(of["sent"] for of in seen) == 2 * boundaries * BATCH * LENGTH * SMALL.hidden * 8


@pytest.mark.parametrize("ranks", [2, 3])
def test_blocking_sends_hang_in_1f1b_and_not_in_gpipe(ranks):
    steps = lesson()["messages_only"]
    quick = {"world_size": ranks, "timeout": 2.0, "backend": "gloo"}
    assert launch(steps, gpipe(ranks, 2 * ranks), **quick) == [4 * ranks] * ranks
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
    costs = lesson()["piece_costs"](SMALL)
    assert len(costs) == len(lesson()["pieces"](build_gpt(SMALL)))
    assert sum(costs) == SMALL.flops_per_token(backward=False)
    assert lesson()["sums"](costs, [3, 4, 2]) == [sum(costs[:3]), sum(costs[3:7]), sum(costs[7:])]


def test_pieces_in_a_row_are_the_model():
    model = build_gpt(SMALL, dtype=torch.float64)
    x, _ = text()
    assert torch.equal(nn.Sequential(*lesson()["pieces"](model))(x), model(x))
    cut = [lesson()["stage_of"](SMALL, [4, 3, 2], stage) for stage in range(3)]
    assert sum(p.numel() for stage in cut for p in stage.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_library_lists_our_orders_but_for_the_last_rank_of_1f1b(name):
    pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    names = lesson()
    make = {"GPipe": gpipe, "1F1B": one_f_one_b, "Interleaved1F1B": interleaved}[name]
    for ranks, m in ((2, 4), (3, 6), (4, 8)):
        listed = names["library_order"](name, ranks, m)
        equal = [a == [str(op) for op in b] for a, b in zip(listed, make(ranks, m).order, strict=True)]
        assert equal == [True] * (ranks - 1) + [name != "1F1B"]


def test_pace_is_kept_by_stage_or_by_kind():
    worker = object.__new__(lesson()["Worker"])
    worker.pace, worker.spans = {"F": 0.02, ("F", 1): 0.05}, []
    for op in (Op("F", 0, 0), Op("F", 1, 0), Op("B", 0, 0)):
        with worker.timed(op):
            pass
    took = [end - start for _, start, end in worker.spans]
    assert took[0] >= 0.02 and took[1] >= 0.05 and math.isfinite(took[2])
