"""The solutions of the exercises of lesson 06; what stands between the marks is what a learner writes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def state_bytes(
    parameters: float, stage: int, ranks: int, precision: str, optimizer: str
) -> tuple[float, float, float]:
    """GB (10⁹ bytes) of parameters, of gradients and of the optimizer on each rank.

    Parameters
    ----------
    parameters : float
        Number of parameters of the model.
    stage : int
        0 (every rank holds everything), 1, 2 or 3.
    precision, optimizer : str
        As in the text.
    """
    ### BEGIN SOLUTION
    parameter = 4 if precision == "fp32" else 2
    gradient = 2 if precision == "mixed" else 4
    master = 0 if precision == "fp32" else 4
    states = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
    p, g, o = (parameters / 1e9 / (ranks if stage >= first else 1) for first in (3, 2, 1))
    return p * parameter, g * gradient, o * (master + 4 * states)
    ### END SOLUTION


def join(tensors, n):
    """One flat tensor of them all, with zeros at its end so that n divides it."""
    flat = torch.cat([t.detach().flatten() for t in tensors])
    return F.pad(flat, (0, -len(flat) % n))


def shard_optimizer(module: nn.Module, make_optimizer):
    """Let all ranks train `module` as one; each keeps the optimizer's states of its part only.

    `make_optimizer([tensor])` returns a torch optimizer that steps this tensor; call it once.
    Returns `step`, a function without arguments, called after each backward, when every trained
    parameter's grad is the mean over the ranks. It updates them in place, on every rank.
    """
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    for p in module.parameters():
        dist.broadcast(p.detach(), src=0)
    trained = [p for p in module.parameters() if p.requires_grad]
    part = nn.Parameter(join(trained, n).chunk(n)[rank].clone())
    optimizer = make_optimizer([part])

    def step():
        part.grad = join([p.grad for p in trained], n).chunk(n)[rank].clone()
        optimizer.step()
        flat = part.new_empty(n * len(part))
        dist.all_gather_single(flat, part.detach())
        nn.utils.vector_to_parameters(flat, trained)

    return step
    ### END SOLUTION


def reduce_scatter_gradients(module: nn.Module) -> dict[nn.Parameter, torch.Tensor]:
    """Reduce the gradient of each trained parameter to this rank's part, during backward.

    Returns
    -------
    shards : dict
        Filled during backward: trained parameter to part `rank` of the flat mean gradient, padded.
        A second backward adds to it. The caller clears it between steps. All p.grad stay None.
    """
    ### BEGIN SOLUTION
    n, shards = dist.get_world_size(), {}

    def arrive(p):
        flat = join([p.grad], n) / n
        p.grad = None
        shard = flat.new_empty(len(flat) // n)
        dist.reduce_scatter_single(shard, flat)
        shards[p] = shards[p] + shard if p in shards else shard

    for p in module.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(arrive)
    return shards
    ### END SOLUTION


def gather(shard: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The whole weight, from the parts of all ranks."""
    flat = shard.new_empty(dist.get_world_size() * len(shard))
    dist.all_gather_single(flat, shard.detach())
    return flat[: shape[0] * shape[1]].view(shape)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape):
        ### BEGIN SOLUTION
        ctx.save_for_backward(x, shard)
        ctx.shape = shape
        return x @ gather(shard, shape).T
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dy):
        ### BEGIN SOLUTION
        (x, shard), n, part = ctx.saved_tensors, dist.get_world_size(), None
        if ctx.needs_input_grad[1]:
            part, dw = torch.empty_like(shard), dy.flatten(0, -2).T @ x.flatten(0, -2)
            dist.reduce_scatter_single(part, join([dw], n) / n)
        return dy @ gather(shard, ctx.shape), part, None
        ### END SOLUTION


def gathered_layer(x: torch.Tensor, shard: nn.Parameter, shape: tuple[int, int]) -> torch.Tensor:
    return Gathered.apply(x, shard, shape)


def largest_model(
    gpu_gb: float, reserved_gb: float, ranks: int, stage: int, width: int, vocabulary: int
) -> int:
    """Largest number of layers that fit, 0 if none does; stage 0 is DDP, 1 GB = 10⁹ bytes."""
    ### BEGIN SOLUTION
    layer, embedding = 12 * width**2, vocabulary * width
    each = sum(size / (ranks if stage >= first else 1) for size, first in ((2, 3), (2, 2), (12, 1)))
    gathered = 4 * max(layer, embedding) if stage == 3 else 0
    free = (gpu_gb - reserved_gb) * 1e9 - gathered
    return max(0, int((free / each - embedding) // layer))
    ### END SOLUTION
