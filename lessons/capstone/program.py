"""The team's training program as it was meant: a small GPT on two hosts. `faults` breaks it, the exercises mend it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_utils.data import Windows
from course_utils.models import TransformerConfig, build_gpt

CONFIG = TransformerConfig(layers=2, heads=4, hidden=48, context=32)
WINDOWS, BATCH, MICRO, EVERY = 64, 16, 2, 2  # windows in all, of a step, micro-batches, steps between evaluations
SPACE = 32  # a character that does not count in the loss


def make_groups():
    """This rank's groups: the ranks of its host (two in a row), and those with its place on all hosts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hosts = [[*range(first, min(first + 2, ranks))] for first in range(0, ranks, 2)]
    places = [[*range(place, ranks, 2)] for place in range(min(2, ranks))]
    groups = {tuple(members): dist.new_group(members) for members in hosts + places}
    inside = next(group for members, group in groups.items() if list(members) in hosts and rank in members)
    across = next(group for members, group in groups.items() if list(members) in places and rank in members)
    return inside, across


def mean_gradients(gradients, inside, across):
    """Replace each gradient by its mean over all ranks."""
    ranks = dist.get_world_size()
    for gradient in gradients:
        total = gradient / ranks
        for group in (inside, across):
            dist.all_reduce(total, group=group)
        gradient.copy_(total)


def ring_sum(x):
    """The sum of x over all ranks, passed on from neighbor to neighbor."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total, passing = x.clone(), x
    for _ in range(ranks - 1):
        arrived = torch.empty_like(passing)
        sent = dist.isend(passing, (rank + 1) % ranks)
        dist.recv(arrived, (rank - 1) % ranks)
        sent.wait()
        total, passing = total + arrived, arrived
    return total


def evaluate(model, held, number=8):
    """Mean loss of windows that are held out, each rank with its share of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        losses = [model.loss(*held.batch([i])) for i in range(rank, number, ranks)]
    return ring_sum(torch.stack(losses).double().sum()).item() / number


def train(exchange=mean_gradients, checkpoint=None, folder=None, at_step=lambda step: None):
    """Train, from the newest checkpoint if there is one; losses by step, the last evaluation, and the weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups, data, held = make_groups(), Windows("train", 32), Windows("valid", 32)
    model = build_gpt(CONFIG, seed=0)
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    mine, share = [*range(WINDOWS)][rank::ranks], BATCH // ranks
    first, losses, evaluated = 0, {}, None
    found = checkpoint(folder) if checkpoint else None
    if found:
        first, state = found
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(first, len(mine) // share):
        at_step(step)
        x, y = data.batch(mine[step * share : (step + 1) * share])
        letters, loss = y != SPACE, torch.zeros(())
        total = letters.sum()
        dist.all_reduce(total)
        for xs, ys, kept in zip(x.chunk(MICRO), y.chunk(MICRO), letters.chunk(MICRO), strict=True):
            each = F.cross_entropy(model(xs).flatten(0, 1), ys.flatten(), reduction="none")
            part = (each * kept.flatten()).sum() / total
            (part * ranks).backward()  # times the ranks, because the exchange takes a mean
            loss += part.detach()
        exchange([p.grad for p in parameters], *groups)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses[step] = loss.item()
        if (step + 1) % EVERY == 0:
            evaluated = evaluate(model, held)
            if checkpoint:
                checkpoint(folder, step + 1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return losses, evaluated, torch.cat([p.detach().flatten() for p in parameters])
