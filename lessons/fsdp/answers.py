"""The solutions of the exercises of lesson 07; what stands between the marks is what a learner writes."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_utils.models import GPT


def wrap_under_target(model: GPT, learning_rate: float) -> torch.optim.Optimizer:
    """Shard `model` over all ranks, in place, and return torch.optim.Adam for it."""
    ### BEGIN SOLUTION
    blocks = list(model.blocks)
    for i in range(0, len(blocks), 2):
        fully_shard(blocks[i : i + 2])
    fully_shard(model)
    return torch.optim.Adam(model.parameters(), learning_rate)
    ### END SOLUTION


def fewest_internode_bytes(model: GPT, nodes: int, per_node: int):
    """Shard the blocks of `model`, and the model, for `nodes` nodes with `per_node` ranks each."""
    ### BEGIN SOLUTION
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ### END SOLUTION


def reshard(rows: int, saved: int, rank: int, ranks: int, read) -> torch.Tensor:
    """The shard of `rank` among `ranks` of a tensor with `rows` rows that `saved` ranks have saved.

    Parameters
    ----------
    read : callable
        `read(file, start, stop)` returns rows start to stop (without it) of the shard that rank
        `file` saved, 0 <= start <= stop <= its rows. A tensor of shape (stop - start, columns).
    """
    ### BEGIN SOLUTION
    old, new = -(-rows // saved), -(-rows // ranks)  # rows of a full shard
    begin, end = min(rank * new, rows), min((rank + 1) * new, rows)
    pieces = [read(0, 0, 0)]
    for file in range(saved):
        start, stop = max(begin, file * old), min(end, (file + 1) * old)
        if start < stop:
            pieces.append(read(file, start - file * old, stop - file * old))
    return torch.cat(pieces)
    ### END SOLUTION


def clip_sharded(sharded: list[torch.Tensor], replicated: list[torch.Tensor], max_norm: float):
    """Scale all gradients in place so that their common norm is at most `max_norm`.

    Parameters
    ----------
    sharded : list of tensor, float64
        This rank's rows of each sharded gradient, at least one; a tensor may be empty.
    replicated : list of tensor, float64
        Whole gradients that every rank has.

    Returns
    -------
    norm : tensor
        Norm of all gradients before clipping, the same on every rank.
    """
    ### BEGIN SOLUTION
    squares = sum(g.square().sum() for g in sharded)
    dist.all_reduce(squares)
    squares += sum(g.square().sum() for g in replicated)
    norm = squares.sqrt()
    coefficient = min(1.0, max_norm / (norm.item() + 1e-6))
    for gradient in (*sharded, *replicated):
        gradient.mul_(coefficient)
    return norm
    ### END SOLUTION


def fsdp_traffic(
    layers: int,
    block: float,
    around: float,
    ranks: int,
    parameter_bytes: float,
    gradient_bytes: float,
    micro_batches: int,
) -> tuple[float, float, float]:
    """Number of all-gathers and of reduce-scatters in a step, and GB that a rank sends.

    Parameters
    ----------
    layers, block, around : int, float, float
        Number of blocks; parameters of one block, and of the root.
    parameter_bytes, gradient_bytes : float
        Bytes of an element when it travels.
    """
    ### BEGIN SOLUTION
    gathers = micro_batches * (2 * layers + 1)
    gathered = micro_batches * (2 * layers * block + around) * parameter_bytes
    reduced = (layers * block + around) * gradient_bytes
    return gathers, layers + 1, (ranks - 1) / ranks * (gathered + reduced) / 1e9
    ### END SOLUTION
