"""The solutions of the exercises of lesson 19; what stands between the marks is what a learner writes."""

import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

PAD = -1  # a target that does not count


def draw_weights(
    shapes: dict[str, tuple], split: set[str], seed: int, dp_rank: int, tp_rank: int
) -> dict[str, torch.Tensor]:
    """What one rank of a mesh holds at the start, by name: normal, standard deviation 0.02.

    shapes: of what this rank holds, by name, in the same order on all ranks.
    split: the names that are pieces of a matrix, one for each tp_rank; all others are whole.
    Each rank calls it with its own place, and sends nothing. Another seed draws all anew.
    """
    ### BEGIN SOLUTION
    common = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(1000 * (seed + 1) + tp_rank)
    weights = {}
    for name, shape in shapes.items():
        generator = own if name in split else common
        weights[name] = 0.02 * torch.randn(shape, generator=generator)
    return weights
    ### END SOLUTION


def token_step(model: nn.Module, micro_batches: list[tuple]) -> torch.Tensor:
    """Leave in each p.grad the gradient of the mean loss over all ranks' tokens; return the loss.

    model: (B, T) -> logits (B, T, vocabulary); the same on all ranks, no DDP; each p.grad is None.
    micro_batches: this rank's, each (tokens, targets), both (B, T); targets that are PAD do not
        count. All ranks have equally many. A micro-batch, or a rank, may have none that counts.
    """
    ### BEGIN SOLUTION
    total = sum((targets != PAD).sum() for _, targets in micro_batches)
    dist.all_reduce(total)
    loss = 0
    for tokens, targets in micro_batches:
        logits = model(tokens).flatten(0, 1)
        each = F.cross_entropy(logits, targets.flatten(), ignore_index=PAD, reduction="sum")
        part = each / total
        part.backward()
        loss = loss + part.detach()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(loss)
    return loss
    ### END SOLUTION


def drifted(model: nn.Module) -> list[str]:
    """Names of the parameters that are not the same on all ranks, to the last bit.

    All ranks return the same list.
    model: has the same parameters on all ranks, of any dtype; it stays as it is.
    """
    ### BEGIN SOLUTION
    sums = []
    for p in model.parameters():
        numbers = p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        sums.append(zlib.crc32(numbers))
    low = torch.tensor(sums)
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    same = (low == high).tolist()
    names = [name for name, _ in model.named_parameters()]
    return [name for name, equal in zip(names, same, strict=True) if not equal]
    ### END SOLUTION
