"""The solutions of the exercises of lesson 10; what stands between the marks is what a learner writes."""

import torch
import torch.distributed as dist
from torch import nn


def receive(like: torch.Tensor, source: int) -> torch.Tensor:
    """A new tensor of the shape and dtype of `like`, with what `source` sends (Exercise 2)."""
    tensor = torch.empty_like(like)
    dist.recv(tensor, source)
    return tensor


def one_f_one_b_order(rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    """The operations of a rank in order: ("F", i) forward, ("B", i) backward of micro-batch i.

    Micro-batches count from 0. A rank never holds more than ranks - rank of them: F adds one, B
    gives it back. There may be fewer micro-batches than ranks.
    """
    ### BEGIN SOLUTION
    ahead = min(microbatches, ranks - rank - 1)
    order = [("F", i) for i in range(ahead)]
    for i in range(microbatches - ahead):
        order += [("F", ahead + i), ("B", i)]
    return order + [("B", i) for i in range(microbatches - ahead, microbatches)]
    ### END SOLUTION


def run_order(stage: nn.Module, order: list, inputs: list, targets: list, loss_fn, like):
    """Do what `order` says and leave the batch's gradients; return its loss on the last rank."""
    ### BEGIN SOLUTION
    rank, n, m = dist.get_rank(), dist.get_world_size(), len(inputs)
    first, last = rank == 0, rank == n - 1
    kept, sends, loss = {}, [], 0
    for kind, i in order:
        if kind == "F":
            x = inputs[i] if first else receive(like, rank - 1).requires_grad_()
            y = stage(x)
            if last:
                y = loss_fn(y, targets[i]) / m
                loss += y.detach()
            else:
                sends.append(dist.isend(y.detach(), rank + 1))
            kept[i] = x, y
        else:
            x, y = kept.pop(i)
            y.backward(None if last else receive(like, rank + 1))
            if not first:
                sends.append(dist.isend(x.grad, rank - 1))
    for send in sends:
        send.wait()
    return loss if last else None
    ### END SOLUTION


def balance(costs: list[float], stages: int) -> list[int]:
    """The number of layers of each stage, at least one.

    `costs` are the times of the layers in order, such as [1, 1, 1, 1, 4]: for 2 stages, [4, 1].
    """
    ### BEGIN SOLUTION
    # best[n]: slowest stage and sizes of the first n layers, cut into as many stages as so far
    best = {n: (sum(costs[:n]), [n]) for n in range(1, len(costs) + 1)}
    for stage in range(2, stages + 1):
        best = {
            n: min(
                (max(best[k][0], sum(costs[k:n])), best[k][1] + [n - k])
                for k in range(stage - 1, n)
            )
            for n in range(stage, len(costs) + 1)
        }
    return best[len(costs)][1]
    ### END SOLUTION


def bubble(
    schedule: str, ranks: int, microbatches: int, virtual: int, gb: float
) -> tuple[float, float]:
    """Per cent of all the time that a rank idles, and GB of activations that rank 0 holds at most.

    Parameters
    ----------
    schedule : str
        "GPipe", "1F1B" or "interleaved".
    virtual : int
        Stages on each rank; 1 for GPipe and 1F1B.
    gb : float
        GB that all layers of a rank keep of one micro-batch.
    """
    ### BEGIN SOLUTION
    p, m, v = ranks, microbatches, virtual
    share = (p - 1) / (v * m + p - 1)
    pieces = 2 * (p - 1) + (v - 1) * p + 1  # those ahead, and the forward of the first pair
    held = m if schedule == "GPipe" else min(m, p) if schedule == "1F1B" else min(m, pieces / v)
    return 100 * share, gb * held
    ### END SOLUTION


def own_schedule() -> list[list[tuple[str, int]]]:
    """For each of the 4 ranks its operations in order, such as ("F", 0), ("I", 0), ("W", 0).

    Each of the 8 micro-batches needs F, I and W, or F and B, once on every rank.
    """
    ### BEGIN SOLUTION
    orders = []
    # by rank: forwards before I0, and how much later W comes than I
    for ahead, behind in ((5, 0), (3, 2), (2, 3), (1, 4)):
        order = [("F", i) for i in range(ahead)]
        for i in range(8):
            order.append(("I", i))
            if i >= behind:
                order.append(("W", i - behind))
            if i + ahead < 8:
                order.append(("F", i + ahead))
        orders.append(order + [("W", i) for i in range(8 - behind, 8)])
    return orders
    ### END SOLUTION
