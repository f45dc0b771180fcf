"""The small GPT: it is causal, the same for the same seed, counted right, and it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from course_utils.data import Windows, tokens
from course_utils.models import (
    GPT,
    PUBLISHED,
    TransformerConfig,
    build_gpt,
)

OTHER = TransformerConfig(layers=3, heads=2, hidden=32, context=48, vocabulary=96, tied=False)
CONFIGS = pytest.mark.parametrize("config", [TransformerConfig(), OTHER], ids=["default", "other"])


def batch(config: TransformerConfig = OTHER, size: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(config.vocabulary, (size, config.context + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def gradients(model: GPT, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model.loss(x, y)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@CONFIGS
def test_later_tokens_do_not_change_earlier_logits(config):
    model, (x, _) = build_gpt(config, dtype=torch.float64), batch(config)
    changed = x.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % config.vocabulary
    before, after = model(x), model(changed)
    assert before.shape == (3, config.context, config.vocabulary)
    torch.testing.assert_close(after[:, :20], before[:, :20], rtol=0, atol=1e-13)
    assert (after[:, 20:] != before[:, 20:]).any(-1).all()


@CONFIGS
def test_parameters_are_counted(config):
    assert config.parameter_count == sum(parameter.numel() for parameter in GPT(config).parameters())
    assert 100_000 < TransformerConfig().parameter_count < 200_000


@pytest.mark.parametrize("checkpoint", [False, True])
@CONFIGS
def test_flops_are_counted(config, checkpoint):
    config = replace(config, checkpoint=checkpoint)
    model, (x, y) = build_gpt(config), batch(config)
    with sdpa_kernel(SDPBackend.MATH):  # the counter does not know the CPU's fused kernel
        with FlopCounterMode(display=False) as forward:
            loss = model.loss(x, y)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    assert forward.get_total_flops() == x.numel() * config.flops_per_token(backward=False)
    assert forward.get_total_flops() + backward.get_total_flops() == x.numel() * config.flops_per_token()


def test_it_learns_more_than_how_frequent_letters_are():
    windows, model = Windows(), build_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).view(-1, 16)
    for index in order[:150]:
        x, y = windows.batch(index.tolist())
        optimizer.zero_grad()
        model.loss(x, y).backward()
        optimizer.step()
    share = tokens("train").bincount(minlength=128) / len(tokens("train"))
    letters_alone = -share[tokens("valid")].log().mean()
    held_out = Windows("valid", length=100)
    x, y = held_out.batch(range(len(held_out)))
    with torch.no_grad():
        assert model.loss(x, y) < letters_alone - 0.2


def test_published_shapes_are_about_as_large_as_their_papers_say():
    millions = {"GPT-2": 124, "GPT-2 medium": 355, "GPT-2 large": 774, "GPT-2 XL": 1558}
    assert {name: round(PUBLISHED[name].parameter_count / 1e6) for name in millions} == millions
    for name, billions in {"GPT-3 6.7B": 6.7, "GPT-3 13B": 13, "GPT-3 175B": 175}.items():
        assert PUBLISHED[name].parameter_count / 1e9 == pytest.approx(billions, rel=0.02)
