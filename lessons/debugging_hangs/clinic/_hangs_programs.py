"""The programs of the hang clinic's patients, short enough to be shown whole (private)."""

from __future__ import annotations

import torch
import torch.distributed as dist


def save_best():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    best, loss = 2.0, torch.tensor([4.0 - 2 * rank])
    dist.reduce(loss, dst=0)
    if loss.item() / ranks < best:
        dist.all_gather([torch.empty(1) for _ in range(ranks)], torch.ones(1))  # the sharded weights
    dist.barrier()
    return "next epoch"


def save_sharded():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shard = torch.full((2,), float(rank))
    parts = [torch.empty(2) for _ in range(ranks)]
    if rank == 0:
        dist.all_gather(parts, shard)
        torch.cat(parts)  # to be saved
    dist.barrier()
    return "saved"


def train_on_shards():
    samples = list(range(7))[dist.get_rank() :: dist.get_world_size()]
    gradient = torch.zeros(1)
    for sample in samples:
        gradient += sample
        dist.all_reduce(gradient)
    dist.barrier()
    return "epoch done"


def skip_when_full():
    done = torch.zeros(1)
    for step in range(3):
        try:
            if dist.get_rank() == 1 and step == 1:
                raise MemoryError("a long batch")
            dist.all_reduce(torch.ones(1))
        except MemoryError:
            continue
    dist.broadcast(done, src=0)
    return "trained"


def generate():
    lengths, tokens = [2, 4, 3], 0
    while tokens < lengths[dist.get_rank()]:
        weights = torch.ones(2)
        dist.all_gather([torch.empty(2) for _ in range(dist.get_world_size())], weights)  # a layer, for this token
        tokens += 1
    dist.all_reduce(torch.ones(4))  # the next training step
    return "trained"


def exchange_halos():
    mine, other = torch.ones(2), torch.zeros(2)
    peer = 1 - dist.get_rank()
    dist.recv(other, src=peer)
    dist.send(mine, dst=peer)
    return other.sum().item()


def load_in_subgroup():
    group = dist.new_group([1, 2])
    value = torch.tensor([float(dist.get_rank())])
    if dist.get_rank() in (1, 2):
        dist.broadcast(value, src=0, group=group)
    dist.barrier()
    return "loaded"


def sum_by_groups():
    first, second = dist.new_group(), dist.new_group()
    x = torch.ones(1)
    order = [second, first] if dist.get_rank() == 1 else [first, second]
    for group in order:
        dist.all_reduce(x, group=group)
    return x.item()


def average_metric():
    rank = dist.get_rank()
    worst = torch.tensor([rank + 1.0])
    op = dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM
    dist.all_reduce(worst, op=op)
    return worst.item()


def pass_back():
    rank = dist.get_rank()
    mine, other = torch.ones(2), torch.zeros(2)
    calls = [dist.P2POp(dist.irecv, other, 1 - rank)]
    if rank == 0:
        calls.insert(0, dist.P2POp(dist.isend, mine, 1))
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return other.sum().item()


def train_experts():
    routed = [[0, 1], [0, 0], [1, 0]][dist.get_rank()]  # the expert of each token
    for expert in range(2):
        if expert in routed:
            dist.all_reduce(torch.ones(2))  # the expert's gradient
    dist.barrier()
    return "trained"


def step_once():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1)
            torch.nn.init.zeros_(self.layer.weight)

        def forward(self, x):
            return self.layer(x)  # the head is for later

    model = torch.nn.parallel.DistributedDataParallel(Model())
    weight = model.module.layer.weight
    model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    with torch.no_grad():
        weight -= weight.grad
    return weight.item()


def log_on_host():
    rank = dist.get_rank()
    losses = torch.full((6,), rank + 1.0)
    dist.reduce(losses, dst=rank // 2)
    return "logged"


def drop_layers():
    torch.manual_seed(5 + dist.get_rank())
    for _ in range(4):  # layers
        if torch.rand(()) < 0.5:
            continue  # the layer is left out of this step
        dist.all_reduce(torch.ones(2))
    dist.barrier()
    return "trained"


def start_again():
    layer, group = torch.nn.Linear(1, 1), dist.new_group()
    model = torch.nn.parallel.DistributedDataParallel(layer, process_group=group)
    dist.destroy_process_group(group)  # the old job is over
    group = dist.new_group()
    model(torch.ones(1, 1)).sum().backward()
    return layer.weight.grad.item()
