"""One rank's memory in a training step on a cluster that is not there: a fake process group and fake tensors.

A fake tensor has a shape, a type and a size in bytes, and no data; collectives of a fake group return at once.
"""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from ..torch_internals import FakeTensorMode, fake_store
from .parts import Simulated
from .tracking import held_memory, track

if TYPE_CHECKING:
    from ..models import GPT, TransformerConfig

WRAPS = ("block", "layer", "model")


def step_apart(*arguments) -> Simulated:
    """The step on a rank that has come with a group of its own, and has the libraries warm for the next simulation."""
    torch.distributed.destroy_process_group()
    return step(*arguments)


def step(
    config: TransformerConfig, ranks: int, stage: int, batch: int, length: int, stored: str, computed: str, wrap: str
) -> Simulated:
    """Run the step in a process that has no process group. `stored` and `computed` are types of the parameters."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ..models import GPT

    start = time.perf_counter()
    if dist.is_initialized():
        raise RuntimeError("simulate makes a fake process group and needs a process without one: launch(init=False)")
    with ExitStack() as stack:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=fake_store())
        stack.callback(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (ranks,))
        with torch.device("meta"):  # sharding a fake model would take minutes on 1,024 ranks
            model = GPT(config).to(getattr(torch, stored))
        if stage == 3:
            _shard(model, mesh, wrap, getattr(torch, computed))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model.to_empty(device="cpu")
        model.tie()
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():  # the optimizer makes its states in its first step
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        bucket = None if stage == 3 else torch.empty(config.parameter_count, dtype=parameter.dtype)
        tokens, targets = (torch.zeros(batch, length, dtype=torch.int64) for _ in range(2))
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # wrap="layer"; never in place
        with track(model, optimizer) as tracker:
            logits = model(tokens).flatten(0, 1)  # not model.loss: FSDP2 gathers in the hooks of a call
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
            del logits
            tracker.mark("forward")
            loss.backward()
            if bucket is not None:
                _all_reduce(model, bucket)
            tracker.mark("backward")
            optimizer.step()
            tracker.mark("step")
        seconds = time.perf_counter() - start
        return Simulated(held_memory(model, optimizer), tracker.peak, tuple(tracker.history), seconds)


def _shard(model: GPT, mesh, wrap: str, computed: torch.dtype) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    units = [] if wrap == "model" else list(model.blocks)
    if wrap == "layer":
        units = [unit for block in model.blocks for unit in (block.attention, block.mlp, block)]
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=computed))


@torch.no_grad()
def _all_reduce(model: GPT, bucket: torch.Tensor) -> None:
    """Stand in for DDP, which does not run on fake tensors: average gradients through buckets as large as all of them.

    DDP makes its buckets before the step and keeps them; here they are one.
    """
    gradients = [parameter.grad for parameter in model.parameters()]
    pieces = bucket.split([gradient.numel() for gradient in gradients])
    pieces = [piece.view_as(gradient) for piece, gradient in zip(pieces, gradients, strict=True)]
    torch._foreach_copy_(pieces, gradients)
    torch.distributed.all_reduce(bucket)
    torch._foreach_copy_(gradients, pieces)
