"""What lesson 11 says of long sequences and experts, and no cell of it asserts."""

from __future__ import annotations

import sys
from functools import cache

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from lesson_cells import definitions

from course_utils import launch
from lessons.long_context_and_experts.equality import try_experts

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("11", n=2) | {"orders": {}}


def test_an_expert_without_tokens_is_no_fault():
    names = lesson()

    def nobody_goes_to_rank_1():
        torch.manual_seed(1)
        whole = names["MoE"](16, 8, 4, top_k=2)
        with torch.no_grad():
            whole.router.weight[2:] = -100 * torch.ones(2, 16)
        trial, module = try_experts(names["ParallelMoE"], whole, torch.rand(12, 16))
        return trial.error, module.load

    (error, load), (other, empty) = launch(nobody_goes_to_rank_1, world_size=2, backend="gloo")
    assert max(error, other) < 1e-4 and (load, empty) == (24, 0)


@pytest.mark.filterwarnings("error")  # it warns where it does not work in chunks
def test_a_loss_in_chunks_is_the_loss():
    torch.manual_seed(0)
    hidden, head, targets = torch.randn(64, 16), torch.randn(300, 16), torch.randint(300, (64,))
    found = []
    for options in (None, torch.nn.LinearCrossEntropyOptions()):
        x, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        loss = F.linear_cross_entropy(x, w, targets, options=options)
        loss.backward()
        found.append((loss.detach(), x.grad, w.grad))
    for whole, in_chunks in zip(*found, strict=True):
        assert torch.allclose(whole, in_chunks, atol=1e-5)
