"""The programs of the network clinic's patients, short enough to be shown whole (private)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

_IMPORTS = {
    "meet_as_torchrun": ["torch.distributed.elastic.rendezvous.registry"],
    "save_and_resume": ["torch.distributed.checkpoint", "torch.distributed.tensor"],
}


def import_first(program: Callable) -> None:
    """Import what a program needs, so that on a busy machine no rank waits for another's imports."""
    for name in _IMPORTS.get(program.__name__, []):
        importlib.import_module(name)


# How long PyTorch waits for others: seconds, so that a lesson can wait for it too. Its own default is 30 minutes.
TIMEOUT = timedelta(seconds=2)


def train():
    dist.init_process_group("gloo", timeout=TIMEOUT)
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


def meet_as_torchrun():
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    # what torchrun --rdzv-backend=c10d --rdzv-endpoint=$RDZV_ENDPOINT --nnodes=2 does first
    endpoint, seconds = os.environ["RDZV_ENDPOINT"], TIMEOUT.total_seconds()
    asked = RendezvousParameters("c10d", endpoint, "job", 2, 2, read_timeout=seconds)
    place = get_rendezvous_handler(asked).next_rendezvous()

    group = {"store": place.store, "rank": place.rank, "world_size": place.world_size}
    dist.init_process_group("gloo", **group, timeout=TIMEOUT)
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


def save_and_resume():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"weight": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])}
    dcp.save(state, checkpoint_id=os.environ["CHECKPOINT"])
    state["weight"].zero_()  # a restart knows only what has been saved
    dcp.load(state, checkpoint_id=os.environ["CHECKPOINT"])
    total = state["weight"].full_tensor().sum().item()
    dist.destroy_process_group()
    return total
