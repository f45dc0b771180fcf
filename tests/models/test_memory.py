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
    PRECISIONS,
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


def test_the_figure_of_the_zero_paper():
    totals = [model_states(7.5e9, stage=stage, ranks=64).total / 1e9 for stage in range(4)]
    assert [f"{total:.1f}" for total in totals] == ["120.0", "31.4", "16.6", "1.9"]


def test_bytes_for_a_parameter():
    cases = [
        ("mixed", "adam", (2, 2, 12)), ("mixed, fp32 gradients", "adam", (2, 4, 12)), ("fp32", "adam", (4, 4, 8)),
        ("bf16", "adam", (2, 2, 4)), ("bf16 policy", "adam", (4, 4, 8)), ("mixed", "sgd", (2, 2, 4)),
        ("fp32", "momentum", (4, 4, 4)), ("fp32", "sgd", (4, 4, 0)),
    ]
    for precision, optimizer, expected in cases:
        memory = model_states(1, precision=precision, optimizer=optimizer)
        assert (memory.parameters, memory.gradients, memory.optimizer) == expected, (precision, optimizer)
        assert memory.states == memory.total == sum(expected)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="stage must be 0 .DDP., 1, 2 or 3 .FSDP., got 4"):
        model_states(1e9, stage=4)
    with pytest.raises(ValueError, match="precision must be one of 'fp32', 'mixed', .*, got 'fp8'"):
        model_states(1e9, precision="fp8")
    with pytest.raises(ValueError, match="length must be at most the context of the model, 64, got 65"):
        activation_bytes(SMALL, 1, 65)
    with pytest.raises(ValueError, match="Llama 3 8B does not have GPT-2's layers"):
        training_memory(PUBLISHED["Llama 3 8B"], 1)
    with pytest.raises(ValueError, match="stage must be 0 .as DDP. or 3 .FSDP2. in a simulation, got 1"):
        simulate(SMALL, 4, stage=1)


def test_activations_are_counted_to_the_byte():
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for case in itertools.product((SMALL, OTHER), (False, True), ((1, None), (3, 17)), dtypes):
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


def test_activations_are_what_autograd_saves():
    config = OTHER
    model, (x, y), saved = build_gpt(config), batch(config, 3), {}
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss(model, x, y)
    own_result = value.untyped_storage().nbytes()
    assert sum(storage.nbytes() for storage in saved.values()) + own_result == activation_bytes(config, 3)


def test_buckets_apart_from_gradients_are_a_second_copy_before_stage_2():
    for stage in range(4):
        views, apart = (training_memory(SMALL, 4, stage=stage, ranks=4, gradient_copy=copy) for copy in (False, True))
        assert apart.buffers - views.buffers == (2 * SMALL.parameter_count if stage < 2 else 0)


def test_checkpointing_saves_most_of_the_activation_bytes():
    for config in (TransformerConfig(layers=6), PUBLISHED["GPT-2 XL"], PUBLISHED["GPT-3 175B"]):
        plain, again = (training_memory(replace(config, checkpoint=c), 8, stage=3, ranks=64) for c in (False, True))
        assert again.total < plain.total
        assert activation_bytes(replace(config, checkpoint=True), 1) < activation_bytes(config, 1) / 3


# --- what a rank holds ------------------------------------------------------------------------------------------------


def test_states_of_the_small_gpt_are_held_as_the_formula_says():
    model = build_gpt()
    optimizer = torch.optim.Adam(model.parameters())
    assert held_memory(model, optimizer) == Memory(parameters=4 * SMALL.parameter_count)
    step(model, optimizer, SMALL)
    loss(model, *batch(SMALL, 1)).backward()
    now, formula = held_memory(model, optimizer), model_states(SMALL.parameter_count, precision="fp32")
    steps = 4 * len(list(model.parameters()))  # Adam counts its steps in a number for each tensor
    assert replace(now, optimizer=now.optimizer - steps) == formula


def test_every_storage_counts_once():
    weight = nn.Parameter(torch.zeros(100))
    model = nn.Module()
    model.whole, model.part = weight, nn.Parameter(weight.data[10:20])
    model.register_buffer("own", torch.zeros(7))
    model.register_buffer("shared", weight.data[:3])
    assert held_memory(model, [weight.data, {"m": torch.zeros(5)}]) == Memory(parameters=400, optimizer=20, buffers=28)


def test_master_weights_belong_to_the_optimizer():
    model = build_gpt(SMALL, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([p.detach().float().requires_grad_() for p in model.parameters()], momentum=0.9)
    n = SMALL.parameter_count
    assert held_memory(model, optimizer) == Memory(parameters=2 * n, optimizer=4 * n)


def test_fsdp_holds_the_share_that_the_formula_says():
    ranks = 4

    def states() -> Memory:
        model, optimizer = sharded(SMALL)
        loss(model, *batch(SMALL, 1)).backward()
        optimizer.step()
        return held_memory(model, optimizer)

    for memory in launch(states, world_size=ranks):
        formula = model_states(SMALL.parameter_count, stage=3, ranks=ranks, precision="fp32")
        for part in ("parameters", "gradients", "optimizer"):
            assert memory.parts()[part] == pytest.approx(formula.parts()[part], rel=0.01)
        assert memory.activations == memory.buffers == 0


def test_uneven_shards_are_held_with_their_padding():
    def states() -> Memory:
        return held_memory(sharded(SMALL)[0])

    memories = launch(states, world_size=3)
    assert len(set(memories)) == 1
    rows = [p.shape[0] for p in build_gpt(SMALL).parameters()]
    widths = [p.numel() // p.shape[0] for p in build_gpt(SMALL).parameters()]
    assert memories[0].parameters == 4 * sum(-(-r // 3) * w for r, w in zip(rows, widths, strict=True))


def test_parameters_that_fsdp_has_gathered_are_buffers():
    def gathered() -> Memory:
        model, optimizer = sharded(SMALL, reshard_after_forward=False)
        with torch.no_grad():
            model(batch(SMALL, 1)[0])
        return held_memory(model, optimizer)

    share = SMALL.parameter_count * 4
    for memory in launch(gathered, world_size=2):
        assert memory == Memory(parameters=share / 2, buffers=share)


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


def test_the_peak_is_in_the_timeline_and_not_after_it():
    model, (x, y) = build_gpt(), batch(SMALL, 2)
    with track(model) as tracker:
        loss(model, x, y).backward()
    assert tracker.peak.total == max(memory.total for memory in tracker.timeline)
    assert tracker.timeline[0] == Memory(parameters=4 * SMALL.parameter_count, activations=x.nbytes + y.nbytes)
    gc.collect()
    torch.zeros(1000, 1000)
    assert tracker.timeline[-1].gradients == 4 * SMALL.parameter_count


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


@pytest.mark.parametrize("ranks", [3, 4])
def test_fsdp_gives_back_what_it_gathers(ranks):
    def follow() -> list[dict[str, Memory]]:
        model, optimizer = sharded(SMALL)
        return [step(model, optimizer, SMALL) for _ in range(3)]

    results = launch(follow, world_size=ranks)
    for seen in results:
        assert seen[1] == seen[2]
        assert seen[1]["backward"].buffers == seen[1]["step"].buffers == 0
        assert seen[1]["forward"].buffers > 0 and seen[1]["peak"].buffers > seen[1]["forward"].buffers
    assert ranks == 3 or all(seen[1] == results[0][1] for seen in results)  # the last rank's third is smaller


def test_a_rank_holds_what_the_simulation_says():
    def follow() -> list[dict[str, Memory]]:
        model, optimizer = sharded(OTHER)
        return [step(model, optimizer, OTHER) for _ in range(2)]

    real, simulated = launch(follow, world_size=4)[0][1], simulate(OTHER, 4, batch=4)
    assert {name: real[name] for name, _ in simulated.history} == dict(simulated.history)
    assert real["peak"] == simulated.peak
    assert replace(real["step"], activations=0) == simulated.states


def test_a_parameter_filled_by_hand_is_gathered():
    layer = nn.Linear(100, 100, bias=False)
    storage = layer.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    with track(layer) as tracker:
        storage.resize_(size)
        gathered = tracker.mark("gathered")
        storage.resize_(0)
        freed = tracker.mark("freed")
    assert gathered == Memory(buffers=40_000) and freed == Memory()


def test_a_gradient_that_is_freed_at_once_was_a_gradient():
    layer = nn.Linear(100, 100, bias=False)
    with track(layer) as tracker:
        layer.weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        layer(torch.ones(1, 100)).sum().backward()
    assert tracker.peak.gradients == 40_000
    assert tracker.timeline[-1].gradients == 0


@pytest.mark.parametrize("fails", [False, True])
def test_tracking_leaves_nothing_behind(fails):
    model, resize = build_gpt(), UntypedStorage.resize_
    optimizer = torch.optim.Adam(model.parameters())
    hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    with pytest.raises(ZeroDivisionError) if fails else track(model, optimizer):
        with track(model, optimizer) as tracker:
            loss(model, *batch(SMALL, 1)).backward()
            assert UntypedStorage.resize_ is not resize
            if fails:
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


def test_pytorchs_own_tracker_sees_the_same_peak_of_fsdp():
    def both() -> tuple[int, Memory]:
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

        model, optimizer = sharded(OTHER)
        x, y = batch(OTHER, 4)
        step(model, optimizer, OTHER)
        theirs = FSDPMemTracker(model, optimizer)
        theirs.track_inputs((x, y))
        with theirs, track(model, optimizer) as ours:
            loss(model, x, y).backward()
            optimizer.step()
        return theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], ours.peak

    for theirs, ours in launch(both, world_size=2):
        assert theirs == ours.total


# --- simulated clusters -----------------------------------------------------------------------------------------------

WIDE = replace(PUBLISHED["GPT-3 6.7B"], layers=3)
GPT2 = replace(PUBLISHED["GPT-2"], layers=4)


@pytest.mark.parametrize(
    "config, ranks, size, stage",
    [
        (SMALL, 4, 4, 3), (GPT2, 8, 1, 0), (replace(GPT2, checkpoint=True), 8, 4, 0),
        (replace(GPT2, checkpoint=True), 64, 8, 3), (replace(WIDE, tied=False), 64, 1, 3), (WIDE, 1024, 4, 3),
        (replace(PUBLISHED["GPT-3 175B"], layers=2), 1024, 1, 3),
        (replace(PUBLISHED["Megatron 7.5B"], layers=1), 64, 2, 3),
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


@pytest.mark.parametrize("stage", [0, 3])
def test_bf16_halves_the_states(stage):
    full, half = (simulate(OTHER, 4, stage=stage, precision=p).states for p in ("fp32", "bf16"))
    assert half.parameters == full.parameters / 2 and half.gradients == full.gradients / 2
    assert PRECISIONS["bf16"].state == 2 and half.states == pytest.approx(full.states / 2, rel=0.01)


def test_smaller_units_need_less_and_one_unit_needs_most():
    config = TransformerConfig(layers=4, heads=4, hidden=256, context=64, vocabulary=128)
    layer, block, model = (simulate(config, 8, wrap=wrap).peak for wrap in ("layer", "block", "model"))
    assert layer.buffers < block.buffers < model.buffers
    assert model.buffers > 4 * config.parameter_count


def test_a_simulation_leaves_the_callers_groups_alone():
    def inside() -> tuple[float, bool]:
        return simulate(SMALL, 64).states.total, dist.is_initialized()

    assert launch(inside, world_size=1, init=False)[0] == (simulate(SMALL, 64).states.total, False)
    with pytest.raises(WorkerError, match="process without one"):
        launch(inside, world_size=1)
