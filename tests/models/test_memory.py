"""Bytes of training: the formulas, what ranks hold, and simulated clusters agree, part by part."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import UntypedStorage, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from course_utils import WorkerError, launch
from course_utils.memory import (
    Memory,
    activation_bytes,
    held_memory,
    model_states,
    simulate,
    track,
    training_memory,
)
from course_utils.models import PUBLISHED, TransformerConfig, build_gpt

pytestmark = pytest.mark.guard(200)

SMALL = TransformerConfig()
OTHER = TransformerConfig(layers=3, heads=2, hidden=48, context=40, vocabulary=96, tied=False)


def batch(config: TransformerConfig, size: int, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    shape = size, length or config.context
    return torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TransformerConfig, size: int = 4
) -> dict[str, Memory]:
    """Run a step; return the bytes by moment."""
    x, y = batch(config, size)
    with track(model, optimizer) as tracker:
        value = loss(model, x, y)
        tracker.mark("forward")
        value.backward()
        tracker.mark("backward")
        optimizer.step()
        tracker.mark("step")
        optimizer.zero_grad()
    return {**dict(tracker.history), "peak": tracker.peak}


def sharded(config: TransformerConfig, **how) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    model = build_gpt(config)
    for unit in (*model.blocks, model):
        fully_shard(unit, **how)
    return model, torch.optim.AdamW(model.parameters())


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_bytes_for_a_parameter():
    cases = [
        ("mixed, fp32 gradients", "adam", (2, 4, 12)), ("fp32", "adam", (4, 4, 8)), ("bf16", "adam", (2, 2, 4)),
        ("mixed", "sgd", (2, 2, 4)), ("fp32", "momentum", (4, 4, 4)),
    ]
    for precision, optimizer, expected in cases:
        memory = model_states(1, precision=precision, optimizer=optimizer)
        assert (memory.parameters, memory.gradients, memory.optimizer) == expected, (precision, optimizer)
        assert memory.states == memory.total == sum(expected)


def test_activations_are_counted_to_the_byte():
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for case in itertools.product((SMALL, OTHER), (False, True), ((3, 17),), dtypes):
        config, checkpoint, (size, length), precision = case
        config = replace(config, checkpoint=checkpoint)
        model = build_gpt(config, dtype=dtypes[precision])
        x, y = batch(config, size, length)
        with track(model) as tracker:
            value = loss(model, x, y)
            after = tracker.mark("forward")
        assert value.requires_grad
        assert after.activations == activation_bytes(config, size, length, precision=precision), case
        assert after.buffers == 0


def test_every_storage_counts_once():
    weight = nn.Parameter(torch.zeros(100))
    model = nn.Module()
    model.whole, model.part = weight, nn.Parameter(weight.data[10:20])
    model.register_buffer("own", torch.zeros(7))
    model.register_buffer("shared", weight.data[:3])
    assert held_memory(model, [weight.data, {"m": torch.zeros(5)}]) == Memory(parameters=400, optimizer=20, buffers=28)


# --- following a step -------------------------------------------------------------------------------------------------


def test_the_parts_of_a_step():
    model = build_gpt()
    optimizer = torch.optim.Adam(model.parameters())
    weights, seen = 4 * SMALL.parameter_count, step(model, optimizer, SMALL)
    assert seen["forward"] == Memory(parameters=weights, activations=activation_bytes(SMALL, 4))
    assert seen["backward"].gradients == seen["step"].gradients == weights
    assert seen["forward"].optimizer == seen["backward"].optimizer == 0
    assert seen["step"].optimizer == held_memory(model, optimizer).optimizer
    assert seen["peak"].total >= max(memory.total for memory in seen.values())


@pytest.mark.parametrize("view", [False, True], ids=["buckets", "bucket views"])
def test_buckets_of_ddp(view):
    def follow() -> list[dict[str, Memory]]:
        ddp = nn.parallel.DistributedDataParallel(build_gpt(), gradient_as_bucket_view=view)
        optimizer = torch.optim.Adam(ddp.parameters())
        return [step(ddp, optimizer, SMALL) for _ in range(4)]

    weights, ranks = 4 * SMALL.parameter_count, launch(follow, world_size=2)
    assert ranks[0] == ranks[1]
    for seen in ranks[0]:
        assert seen["backward"].gradients == weights
        assert seen["backward"].buffers == (0 if view else weights)
    assert ranks[0][2] == ranks[0][3]  # the buckets of the first step are replaced in the second


def test_a_rank_holds_what_the_simulation_says():
    def follow() -> list[dict[str, Memory]]:
        model, optimizer = sharded(OTHER)
        return [step(model, optimizer, OTHER) for _ in range(2)]

    real, simulated = launch(follow, world_size=4)[0][1], simulate(OTHER, 4, batch=4)
    assert {name: real[name] for name, _ in simulated.history} == dict(simulated.history)
    assert real["peak"] == simulated.peak
    assert replace(real["step"], activations=0) == simulated.states


def test_tracking_leaves_nothing_behind_also_after_an_error():
    model, resize = build_gpt(), UntypedStorage.resize_
    optimizer = torch.optim.Adam(model.parameters())
    hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    with pytest.raises(ZeroDivisionError):
        with track(model, optimizer) as tracker:
            loss(model, *batch(SMALL, 1)).backward()
            assert UntypedStorage.resize_ is not resize
            1 / 0  # noqa: B018
    assert UntypedStorage.resize_ is resize
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == hooks
    assert not _get_current_dispatch_mode_stack()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    alive, before = weakref.ref(model), tracker.timeline
    del model, optimizer
    torch.zeros(1000).sum()
    assert tracker.timeline == before
    del tracker
    gc.collect()
    assert alive() is None


# --- simulated clusters -----------------------------------------------------------------------------------------------

GPT2 = replace(PUBLISHED["GPT-2"], layers=4)


@pytest.mark.parametrize(
    "config, ranks, size, stage",
    [
        (GPT2, 8, 1, 0), (replace(GPT2, checkpoint=True), 64, 8, 3),
        (replace(PUBLISHED["GPT-3 6.7B"], layers=3, tied=False), 64, 1, 3),
    ],
    ids=str,
)
def test_formula_and_simulation_agree(config, ranks, size, stage):
    for precision in ("fp32",) if stage == 0 else ("fp32", "bf16 policy"):
        simulated = simulate(config, ranks, batch=size, stage=stage, precision=precision)
        formula = training_memory(config, size, ranks=ranks, stage=stage, precision=precision, gradient_copy=True)
        assert simulated.states.states == pytest.approx(formula.states, rel=0.01)
        assert simulated.states.activations == simulated.states.buffers == 0
        # The formula counts all gradients; at the peak of a lone micro-batch few of them exist.
        without = formula.total - formula.gradients
        assert simulated.peak.total - simulated.peak.gradients == pytest.approx(without, rel=0.005)
        assert simulated.peak.activations == pytest.approx(formula.activations, rel=0.01)
        assert simulated.peak.buffers == pytest.approx(formula.buffers, rel=0.01)


def test_a_simulation_leaves_the_callers_groups_alone():
    def inside() -> tuple[float, bool]:
        return simulate(SMALL, 64).states.total, dist.is_initialized()

    assert launch(inside, world_size=1, init=False)[0] == (simulate(SMALL, 64).states.total, False)
    with pytest.raises(WorkerError, match="process without one"):
        launch(inside, world_size=1)
