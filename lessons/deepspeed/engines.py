"""A small GPT that DeepSpeed or FSDP2 trains on a rank, what it then holds, and the losses of one process."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils.models import TransformerConfig, build_gpt, loss_of

from .deepspeed_tools import prepare

__all__ = [
    "SAMPLES", "STEPS", "fsdp2_training", "held", "losses_of_one", "make_engine", "make_model", "mean_of_ranks",
    "own_words", "to_universal", "train", "values_of",
]

STEPS, SAMPLES = 4, 8  # of a run: steps, and samples of all ranks in a step


def make_model() -> nn.Module:
    """The GPT of all checks, the same each time."""
    return build_gpt(TransformerConfig(layers=2, heads=2, hidden=32, context=8, vocabulary=64))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose step depends on the size of the gradient, so that a wrong factor shows."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


def loss_of_words(model: nn.Module, words: Tensor) -> Tensor:
    """Mean loss of predicting each next word."""
    return loss_of(model, words[:, :-1], words[:, 1:])


def all_words(samples: int) -> Tensor:
    """Sequences of 9 tokens for all steps and all ranks: (steps, samples, 9)."""
    return torch.randint(64, (STEPS, samples, 9), generator=torch.Generator().manual_seed(samples))


def own_words(samples: int = SAMPLES) -> Tensor:
    """Those of this rank."""
    return all_words(samples).chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


@cache
def losses_of_one(samples: int = SAMPLES) -> Tensor:
    """Losses of one process on all ranks' samples, step by step."""
    model, losses = make_model(), []
    optimizer = make_optimizer(model)
    for batch in all_words(samples):
        optimizer.zero_grad()
        losses.append(loss_of_words(model, batch))
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach().double()


def mean_of_ranks(losses: list[float]) -> Tensor:
    """The mean over the ranks, step by step."""
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def make_engine(config: dict[str, Any]) -> Any:
    """DeepSpeed's engine around the model."""
    import deepspeed

    prepare()
    model = make_model()
    optimizer = make_optimizer(model)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config), dist_init_required=False)[0]


def train(engine: Any, words: Tensor, micro: int) -> list[float]:
    """Train on a rank's words, ``micro`` samples at a time; the mean loss of each step."""
    losses = []
    for batch in words:
        total, parts = 0.0, batch.split(micro)
        for part in parts:
            loss = loss_of_words(engine, part)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(parts)
        losses.append(total)
    return losses


def fsdp2_training(model: nn.Module, words: Tensor, setup: dict) -> list[float]:
    """Train a rank's model with FSDP2 on words of shape (steps, samples, 9); the mean loss of each step."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=False) if setup["cpu_offload"] else OffloadPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=setup["reshard_after_forward"], offload_policy=policy)
    optimizer, losses = make_optimizer(model), []
    for batch in words:
        total = 0.0
        for part in batch.split(setup["micro_batch"]):
            loss = loss_of_words(model, part) / setup["micro_batches"]
            loss.backward()
            total += loss.item()
        if setup["max_norm"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), setup["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def held(engine: Any) -> dict[str, int]:
    """Bytes on this rank between two steps: whole parameters, shards of parameters, and states of the optimizer."""
    weights = list(engine.module.parameters())
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = [t for state in inner.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()]
    return {
        "whole": sum(p.nbytes for p in weights),
        "shards": sum(p.ds_tensor.nbytes for p in weights if hasattr(p, "ds_tensor")),
        "states": sum(t.nbytes for t in states),
    }


def values_of(engine: Any) -> dict[str, list[Tensor]]:
    """Of each parameter the whole weight in fp32, and both of Adam's states if there are any."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, p in engine.module.named_parameters():
        found[name] = [safe_get_full_fp32_param(p).clone()]
        with contextlib.suppress(KeyError, AttributeError):
            found[name] += [safe_get_full_optimizer_state(p, key).clone() for key in ("exp_avg", "exp_avg_sq")]
    return found


def to_universal(source: str, target: str) -> None:
    """What ``python -m deepspeed.checkpoint.ds_to_universal`` does, in this process and without its progress bars."""
    from deepspeed.checkpoint import ds_to_universal

    options = Namespace(
        input_folder=source, output_folder=target, num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False,
        strict=True, inject_missing_state=False,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(options)
