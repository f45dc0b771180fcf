"""ZeRO as lesson 06 writes it: equal to one process for any ranks and odd parameters; what it holds and sends."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache, partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions
from torch import nn

from course_utils import WorkerError, launch, record
from course_utils.data import Windows
from course_utils.memory import activation_bytes, held_memory, model_states, track, training_memory
from course_utils.models import PUBLISHED, TransformerConfig, build_gpt
from lessons.zero.helpers import MasterAdam, train

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = TransformerConfig(hidden=12, heads=2, context=16)
STAGES = ("Zero1", "Zero2", "Zero3")
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
}


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("06", windows=Windows("train", 64), gpt=TransformerConfig())


def stages() -> dict:
    return {name: lesson()[name] for name in STAGES}


def small(seed: int = 0, config: TransformerConfig = SMALL, frozen: bool = False, dtype=torch.float64) -> nn.Module:
    """A GPT of odd sizes, with two frozen tensors and a buffer if wanted."""
    model = build_gpt(config, seed, dtype)
    model.register_buffer("scale", torch.full((3,), float(seed), dtype=dtype))
    if frozen:
        model.position.weight.requires_grad_(False)
        model.blocks[0].mlp.up.weight.requires_grad_(False)
    return model


def windows_of(step: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SMALL.vocabulary, (24, SMALL.context + 1), generator=generator)[first : first + count]
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def whole(zero) -> list[torch.Tensor]:
    """The model's parameters, gathered if need be."""
    for unit in zero.units.values():
        unit.flat.untyped_storage().resize_(unit.flat.nbytes)
        dist.all_gather_single(unit.flat, unit.shard.detach())
    return [p.detach() for p in zero.module.parameters()]


def differences(versions: dict, optimizer, steps: int = 4, micro: int = 1, **shape) -> dict[str, float]:
    """On a rank: largest difference to one process in any weight or buffer, after training, by version."""
    rank, n = dist.get_rank(), dist.get_world_size()
    alone = small(**shape)
    stepper, found = optimizer([p for p in alone.parameters() if p.requires_grad]), {}
    for step in range(steps):
        stepper.zero_grad()
        loss_of(alone, *windows_of(step, 0, 2 * n)).backward()
        stepper.step()
    for name, version in versions.items():
        zero = version(small(seed=rank, **shape), optimizer)
        for step in range(steps):
            for i in range(micro):
                part = windows_of(step, 2 * rank + i * (2 // micro), 2 // micro)
                (loss_of(zero, *part) / micro).backward()
            zero.step()
        pairs = [*zip(alone.parameters(), whole(zero), strict=True), (alone.scale, zero.module.scale)]
        found[name] = max((a - b).abs().max().item() for a, b in pairs)
    return found


def on(n: int, fn, *args, **kwargs) -> list:
    return launch(fn, *args, world_size=n, backend="gloo", **kwargs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_stage_equals_one_process(n, optimizer):
    """From another seed on each rank, with units that no number of ranks from 2 on need divide."""
    for found in on(n, differences, stages(), OPTIMIZERS[optimizer]):
        assert found.keys() == {*STAGES} and max(found.values()) < 1e-12


@pytest.mark.parametrize("shape", [
    {"frozen": True},
    {"config": TransformerConfig(hidden=12, heads=2, context=16, tied=False)},
    {"config": TransformerConfig(hidden=12, heads=2, context=16, checkpoint=True)},
    {"config": TransformerConfig(hidden=12, heads=2, context=16, layers=1), "frozen": True},
], ids=["frozen", "untied", "checkpointing", "one block"])
def test_odd_models_equal_one_process(shape):
    for found in on(3, differences, stages(), OPTIMIZERS["adamw"], **shape):
        assert max(found.values()) < 1e-12


def test_accumulation_equals_one_process():
    for found in on(3, differences, stages(), OPTIMIZERS["momentum"], micro=2):
        assert max(found.values()) < 1e-12


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ranks_hold_what_the_formulas_say(n):
    def hold():
        found = []
        for version in versions.values():
            zero = version(small(dtype=torch.float32), adam)
            for _ in range(2):
                loss_of(zero, *windows_of(0, 0, 2)).backward()
                memory = held_memory(zero, zero.optimizer)
                zero.step()
            found.append(memory)
        return found

    versions, adam = stages(), lesson()["adam"]
    padded = 8 * 4 * 3 * n  # at most n - 1 numbers a unit in each of parameters, gradients, moments; and the counters
    for by_stage in on(n, hold):
        for stage, memory in enumerate(by_stage, 1):
            formula = model_states(SMALL.parameter_count, stage=stage, ranks=n, precision="fp32")
            for part in ("parameters", "gradients", "optimizer"):
                assert 0 <= getattr(memory, part) - getattr(formula, part) <= padded, (stage, part)


@pytest.mark.parametrize("micro", [1, 3])
def test_traffic_is_2_2_and_3_copies_and_more_with_micro_batches(micro):
    def send():
        found = []
        for version in versions.values():
            zero = version(small(), adam)
            with record() as ledger:
                for _ in range(micro):
                    loss_of(zero, *windows_of(0, 0, 2)).backward()
                zero.step()
            found.append((ledger.bytes("reduce_scatter"), ledger.bytes("all_gather"), ledger.bytes()))
        return found

    versions, adam = stages(), lesson()["adam"]
    psi = 8 * SMALL.parameter_count
    expected = [(1, 1), (micro, 1), (micro, 2 * micro)]
    for by_stage in on(2, send):
        for (scattered, gathered, everything), (a, b) in zip(by_stage, expected, strict=True):
            assert (scattered, gathered, everything) == (a * psi, b * psi, (a + b) * psi)


def test_recomputed_blocks_are_not_gathered_again():
    def gathers():
        found = []
        for checkpoint in (False, True):
            zero = version(small(config=TransformerConfig(hidden=12, heads=2, context=16, checkpoint=checkpoint)), adam)
            with record() as ledger:
                loss_of(zero, *windows_of(0, 0, 2)).backward()
            found.append(ledger.count("all_gather"))
        return found

    version, adam = lesson()["Zero3"], lesson()["adam"]
    assert on(2, gathers) == [[6, 6]] * 2


def test_library_version_sends_an_all_reduce_and_every_parameter_once_more():
    def send():
        model = version(build_gpt(SMALL), adam)
        for step in range(3):
            with record() as ledger:
                loss_of(model, *windows_of(step, 0, 2)).backward()
                model.step()
        return {op: ledger.bytes(op) for op in {entry.op for entry in ledger}}

    version, adam = lesson()["Library1"], lesson()["adam"]
    assert on(3, send) == [dict.fromkeys(("all_reduce", "broadcast"), 4 * SMALL.parameter_count)] * 3


def test_zero_3_has_two_units_at_most_and_none_between_steps():
    def watch():
        zero, most = version(small(config=TransformerConfig(layers=6, hidden=12, heads=2, context=16)), adam), 0

        def there():
            return sum(unit.flat.untyped_storage().nbytes() > 0 for unit in zero.units.values())

        between = [there()]
        seen = []
        for block in zero.module.blocks:
            block.mlp.register_forward_hook(lambda *_: seen.append(there()))
            block.norm1.bias.register_hook(lambda _: seen.append(there()))
        for _ in range(2):
            loss_of(zero, *windows_of(0, 0, 2)).backward()
            between.append(there())
            zero.step()
            most = max(most, *seen)
        with torch.no_grad():
            loss_of(zero, *windows_of(0, 0, 2))
        return between + [there()], most, len(seen)

    version, adam = lesson()["Zero3"], lesson()["adam"]
    assert on(2, watch) == [([0, 0, 0, 0], 2, 30)] * 2


def test_gradients_of_one_unit_at_a_time_from_stage_2_on():
    def peaks():
        found = []
        for version in versions.values():
            zero = version(small(config=deep), adam)
            for _ in range(2):
                with track(zero, zero.optimizer) as tracker:
                    loss_of(zero, *windows_of(0, 0, 2)).backward()
                    ended = tracker.mark("backward").gradients
                    zero.step()
            found.append((ended, tracker.peak.total))
        return found

    deep = TransformerConfig(layers=6, hidden=48, heads=2, context=16, checkpoint=True)
    versions, adam = stages(), lesson()["adam"]
    psi = 8 * deep.parameter_count
    for (first, peak1), (second, peak2), (third, peak3) in on(2, peaks):
        assert first >= psi > second == third and second == pytest.approx(psi / 2, rel=0.01)
        assert peak1 > peak2 > peak3


def test_a_parameter_without_gradient_is_refused():
    def skip():
        zero = version(small(), adam)
        zero.module.blocks[1] = nn.Identity()
        loss_of(zero, *windows_of(0, 0, 2)).backward()
        zero.step()

    for name in STAGES[1:]:
        version, adam = lesson()[name], lesson()["adam"]
        with pytest.raises(WorkerError, match="every rank must use all of them"):
            on(2, skip)


def test_library_version_trains_as_ddp_does():
    def compare():
        found = []
        for version in versions:
            model = version(small(seed=dist.get_rank(), dtype=torch.float32), adam)
            for step in range(3):
                loss_of(model, *windows_of(step, 2 * dist.get_rank(), 2)).backward()
                model.step()
            found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return torch.equal(*found)

    versions, adam = [lesson()["Stage0"], lesson()["Library1"]], lesson()["adam"]
    assert on(3, compare) == [True] * 3


@pytest.mark.parametrize("place", [None, "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_master_adam_steps_masters_in_fp32(dtype, place):
    model, reference = (build_gpt(SMALL, dtype=dtype) for _ in range(2))
    masters = [p.detach().float().requires_grad_() for p in reference.parameters()]
    ours, adam = MasterAdam(model.parameters(), place=place), torch.optim.Adam(masters, lr=1e-3)
    for step in range(3):
        for net in (model, reference):
            loss_of(net, *windows_of(step, 0, 2)).backward()
        for master, p in zip(masters, reference.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        adam.step()
        for master, p in zip(masters, reference.parameters(), strict=True):
            p.data.copy_(master)
        ours.step()
        ours.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert all(p.grad is None for p in (*model.parameters(), *ours.masters))


def test_training_one_version_gives_losses_memory_and_traffic():
    version, adam = lesson()["Stage0"], lesson()["adam"]
    runs = {micro: on(2, train, version, adam, steps=3, micro=micro, config=SMALL) for micro in (1, 2)}
    for run in runs[1]:
        assert run.same_losses_as(runs[2][0]) and run.same_losses_as(runs[1][0], 1e-12)
        assert not run.same_losses_as(replace(run, losses=[loss + 1 for loss in run.losses]))
        assert run.held.parameters == run.parameter_bytes == 4 * SMALL.parameter_count
        assert run.bytes_sent == run.parameter_bytes and run.psi_sent == 2  # of each 2(N-1)/N is 1
        assert "1 all_reduce of" in str(run) and "2.00 Ψ" in str(run)
    assert [run.psi_sent for run in runs[2]] == [4, 4]  # without no_sync


def test_calculators_answers_are_those_of_the_formula():
    """What the text folds away in section 8."""

    def total(name, again=False, **layout):
        return training_memory(replace(PUBLISHED[name], checkpoint=again), 1, **layout).total / 1e9

    assert {n: round(total("GPT-3 13B", True, stage=1, ranks=n), 1) for n in (8, 16, 4096)} == {
        8: 72.2, 16: 62.6, 4096: 52.9}
    assert {n: round(total("GPT-3 175B", True, stage=3, ranks=n)) for n in (32, 64)} == {32: 109, 64: 66}
    assert round(total("GPT-3 175B", stage=3, ranks=4096)) == 94


def test_one_block_keeps_sixteen_times_its_input():
    six, seven = (activation_bytes(TransformerConfig(layers=n, context=1024), 1) for n in (6, 7))
    assert 16 < (seven - six) / (4 * 1024 * TransformerConfig().hidden) < 16.2
