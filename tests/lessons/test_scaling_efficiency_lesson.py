"""The laws and compressed gradients of lesson 05, as its text defines them, on cases of their own."""

from __future__ import annotations

import sys
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils import launch, recorded
from lessons.collectives import explorer as cost

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("05", shrink=2.0**-20)


def test_noise_scale_finds_signal_and_noise_that_it_was_given():
    n, size, signal, noise = 5, 3, 4.0, 30.0
    own, mean = signal + noise / size, signal + noise / (n * size)
    assert lesson()["noise_scale"](own, mean, size, n) == pytest.approx(noise / signal)


def averaged(hook, state) -> tuple[torch.Tensor, ...]:
    """On a rank: sums over six steps of gradients under DDP with top-k and of their means without; what is left."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    plain, model = torch.nn.Linear(5, 7), DDP(torch.nn.Linear(5, 7))
    plain.load_state_dict(model.module.state_dict())
    model.register_comm_hook(state, hook)
    got, mean = torch.zeros(42), torch.zeros(42)
    for _ in range(6):
        x = torch.randn(4, 5, generator=generator)
        for net, total in ((model, got), (plain, mean)):
            net(x).square().sum().backward()
            total += torch.cat([p.grad.flatten() for p in net.parameters()])
            net.zero_grad()
    left = torch.cat([state.left.get(p, torch.zeros_like(p)).flatten() for p in model.parameters()])
    for total in (mean, left):
        dist.all_reduce(total)
    return got, mean / dist.get_world_size(), left / dist.get_world_size()


def test_top_k_of_everything_is_the_mean_and_what_it_does_not_send_is_kept_with_feedback_only():
    for share, feedback, whole in ((1.0, False, True), (0.1, True, True), (0.1, False, False)):
        state = lesson()["TopK"](share, feedback)
        for got, mean, left in launch(averaged, lesson()["top_k_hook"], state, world_size=3, backend="gloo"):
            assert torch.allclose(got + left, mean, rtol=1e-4, atol=1e-3) == whole, (share, feedback)


def test_calculator_and_lesson_have_one_model_of_interruptions():
    goodput, interval = lesson()["goodput"], lesson()["best_interval"]
    for rate, save, restart in ((0.1, 0.03, 0.2), (2.0, 0.01, 0.1), (0.001, 1.0, 0.0)):
        assert goodput(rate, save, restart, interval(rate, save)) == pytest.approx(cost.goodput(rate, save, restart))


def test_spot_becomes_the_dearer_choice_at_512_gpus_as_the_text_says():
    save, restart = 2 / 60, 10 / 60
    useful = {n: cost.goodput(n * 5 / 1000, save, restart) for n in (256, 512, 1024)}
    assert useful[256] > 0.5 > useful[512] > 0 == useful[1024], "spot opens at half the price"


def test_in_fp16_the_order_of_dividing_and_adding_decides_what_is_lost_as_the_text_says():
    n = 64
    for value, first, last in ((2.0**-24, True, False), (2.0**15, False, True)):
        gradient, right = torch.tensor(value, dtype=torch.float16), torch.tensor(value, dtype=torch.float16)
        before, after = sum([gradient / n] * n), sum([gradient] * n) / n
        assert (before != right, after != right) == (first, last)


def test_repeated_forward_cannot_explain_the_recorded_price_of_checkpointing():
    record = recorded.gpu_check("mfu_gpt")
    usual, again = (record["12 layers of 1,024, bf16" + more]["step"]["value"] for more in ("", ", checkpointed"))
    assert round(again / usual, 1) == 1.7 and round(1e3 * (again - usual)) == 22 and round(1e3 * usual / 3) == 10
