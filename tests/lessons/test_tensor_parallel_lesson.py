"""Tensor parallelism as lesson 09 writes it: what no cell of it runs equals one process, and a rank's numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lesson_cells import definitions

from course_utils import device, launch
from course_utils.data import Windows
from course_utils.models import TransformerConfig
from lessons.tensor_parallel.helpers import compare

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = TransformerConfig(heads=12, hidden=24, context=12, vocabulary=131)


@cache
def lesson() -> dict:
    """What the lesson defines, by name; f and g, which defaults are made from, come from a first reading."""
    first = definitions("09", f=None, g=None)
    f, g, both = (first[name].apply for name in ("Copy", "Reduce", "SumBothWays"))
    return definitions("09", gpt=SMALL, f=f, g=g, both=both, same=torch.nn.Identity())


def text(step):
    return Windows("train", SMALL.context).batch(range(4 * step, 4 * step + 4), device())


def on(n: int, fn, *args, **kwargs) -> list:
    return launch(fn, *args, world_size=n, backend="gloo", **kwargs)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_whole_model_equals_one_process(tied):
    """With a vocabulary that three ranks do not divide."""

    def every_kind():
        return [compare(make, step, text, replace(SMALL, tied=tied)) for make, step in kinds]

    of = lesson()
    kinds = [(of["parallel"], of["step"]), (of["sequence_parallel"], of["step"])]
    for found in on(3, every_kind):
        assert all(run.errors.keys() == {"logits", "gradients", "losses", "weights"} for run in found)
        assert all(run.equal for run in found)


def test_loss_over_a_split_vocabulary_whose_exponents_would_overflow():
    def try_it():
        torch.manual_seed(0)
        whole = (1e4 * torch.randn(2, 7, 17).double()).requires_grad_()
        targets = torch.randint(17, (2, 7))
        expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
        expected.backward()
        pieces, rank = torch.arange(17).tensor_split(dist.get_world_size()), dist.get_rank()
        own = whole.detach()[..., pieces[rank]].requires_grad_()
        loss = cross_entropy(own, targets, int(pieces[rank][0]))
        loss.backward()
        return max((loss - expected).abs().item(), (own.grad - whole.grad[..., pieces[rank]]).abs().max().item())

    cross_entropy = lesson()["vocab_parallel_cross_entropy"]
    assert max(on(3, try_it)) < 1e-8
