"""What lesson 06 says of ZeRO and no cell of it asserts: odd models on odd numbers of ranks, units, answers."""

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

from course_utils import launch
from course_utils.data import Windows
from course_utils.memory import training_memory
from course_utils.models import PUBLISHED, TransformerConfig, build_gpt
from lessons.zero.helpers import MasterAdam

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = TransformerConfig(hidden=12, heads=2, context=16)
STAGES = ("Zero1", "Zero2", "Zero3")


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("06", windows=Windows("train", 64), gpt=TransformerConfig())


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


def differences(versions: dict, steps: int = 4, micro: int = 1, **shape) -> dict[str, float]:
    """On a rank: largest difference to one process in any weight or buffer, after training, by version."""
    rank, n, alone = dist.get_rank(), dist.get_world_size(), small(**shape)
    optimizer = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
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


@pytest.mark.parametrize("shape", [
    {"micro": 2},
    {"config": replace(SMALL, tied=False, checkpoint=True)},
    {"config": replace(SMALL, layers=1), "frozen": True},
], ids=["micro-batches", "untied, recomputed", "one block, frozen"])
def test_every_stage_equals_one_process(shape):
    """On three ranks, which divide no unit, from another seed on each."""
    for found in on(3, differences, {name: lesson()[name] for name in STAGES}, **shape):
        assert found.keys() == {*STAGES} and max(found.values()) < 1e-12


def test_master_adam_steps_masters_in_fp32():
    model, reference = (build_gpt(SMALL, dtype=torch.bfloat16) for _ in range(2))
    masters = [p.detach().float().requires_grad_() for p in reference.parameters()]
    ours, adam = MasterAdam(model.parameters()), torch.optim.Adam(masters, lr=1e-3)
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


def test_calculators_answers_are_those_of_the_formula():
    """What the text folds away in section 8."""

    def total(name, again=False, **layout):
        return training_memory(replace(PUBLISHED[name], checkpoint=again), 1, **layout).total / 1e9

    assert {n: round(total("GPT-3 13B", True, stage=1, ranks=n), 1) for n in (8, 16, 4096)} == {
        8: 72.2, 16: 62.6, 4096: 52.9}
    assert {n: round(total("GPT-3 175B", True, stage=3, ranks=n)) for n in (32, 64)} == {32: 109, 64: 66}
    assert round(total("GPT-3 175B", stage=3, ranks=4096)) == 94
