"""What pipeline stages cost: FLOPs by piece, seconds that are measured, and what stages of published runs send."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_utils.models import PUBLISHED, build_gpt, next_token_loss
from course_utils.ranks import device
from course_utils.recorded import Run
from course_utils.transformer import TransformerConfig

from .pipeline_training import build_stage, now

__all__ = ["PublishedStage", "kernel_prices", "piece_flops", "published_stage", "stage_seconds", "stage_sums"]

Batch = tuple[Tensor, Tensor]


def piece_flops(config: TransformerConfig) -> list[float]:
    """Return the forward FLOPs of each piece for one token; to look up an embedding takes none."""
    head = 2 * config.vocabulary * config.hidden
    block = (config.flops_per_token(backward=False) - head) / config.layers
    return [0, *[block] * config.layers, head]


def stage_sums(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Return the costs of stages, from those of the pieces and the number of pieces of each stage."""
    ends = [*itertools.accumulate(sizes)]
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _fastest(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return min(f for f, _ in times), min(b for _, b in times)


def stage_seconds(config: TransformerConfig, sizes: Sequence[int], text: Batch, repeats: int = 3) -> list[tuple]:
    """On one rank: measure (forward, backward) of each stage with one micro-batch, the loss included.

    Each is the least of some repeats.
    """
    (x, y), found = text, []
    for number in range(len(sizes)):
        stage, times = build_stage(config, sizes, number), []
        for _ in range(repeats):
            entry = x.detach().requires_grad_(x.is_floating_point())
            start = now()
            out = stage(entry)
            loss = next_token_loss(out, y) if number == len(sizes) - 1 else out
            middle = now()
            loss.backward(None if loss is not out else torch.ones_like(out))
            times.append((middle - start, now() - middle))
        found.append(_fastest(times))
        x = out
    return found


def kernel_prices(config: TransformerConfig, counts: Sequence[int], windows: int = 16, repeats: int = 3) -> list[float]:
    """On one rank: seconds for forward and backward of two blocks and a batch that is cut into so many micro-batches.

    Each is the least of some repeats.
    """
    stage = nn.Sequential(*build_gpt(config).blocks[:2]).to(device())
    x = torch.randn(windows, config.context, config.hidden, device=device())
    best = dict.fromkeys(counts, float("inf"))
    for count in [*counts] * repeats:
        start = now()
        for part in x.tensor_split(count):
            stage(part).backward(torch.ones_like(part))
        best[count] = min(best[count], now() - start)
    return list(best.values())


@dataclass(frozen=True)
class PublishedStage:
    """A stage of a published run, by formula, for one micro-batch; bytes are those that one GPU sends, both ways."""

    forward: float  # seconds, at the published TFLOP/s
    message: int  # bytes of the activations that go to the next stage
    pipeline: float  # of activations and their gradients
    tensor: float  # of the all-reduces in every layer
    data: float  # of the gradients, which are all-reduced once a step, divided by its micro-batches
    microbatches: int  # of a replica in a step


def published_stage(run: Run) -> PublishedStage:
    """Return what a stage of a published run computes and sends, one sequence a micro-batch, 2 bytes a number.

    Tensor: 8 b s h (t - 1)/t numbers a layer (Narayanan et al. 2021, section 3.2), and half as many again where all is
    recomputed. Every tensor rank sends the whole activations to the next stage.
    """
    t, p, d = (int(str(run.layout[name])) for name in ("tp", "pp", "dp"))
    config = PUBLISHED[run.model]
    flops = config.flops_per_token(backward=False) * run.length / (t * p)
    numbers, count = run.length * config.hidden, run.batch // d
    all_reduced = 12 if run.layout["recompute"] == "full" else 8
    tensor = all_reduced * numbers * (t - 1) / t * config.layers / p
    data = 2 * (d - 1) / d * config.parameter_count / (t * p) / count
    return PublishedStage(flops / run.tflops / 1e12, 2 * numbers, 4 * numbers, 2 * tensor, 2 * data, count)
