"""Attention and experts that ranks share, beside one process: the largest difference, and what was sent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_utils.ranks import Ledger, device, record

__all__ = ["Trial", "try_attention", "try_experts"]


@dataclass(frozen=True)
class Trial:
    """What one rank found.

    Attributes
    ----------
    error : float
        Largest difference of the output and of all gradients from those of one process.
    forward, backward : Ledger
        What this rank sent.
    """

    error: float
    forward: Ledger
    backward: Ledger


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


def _largest(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    return max((got - expected).detach().abs().max().item() for got, expected in pairs)


def try_attention(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], order: Sequence[Tensor], heads: int = 4,
    kv_heads: int | None = None, size: int = 16, batch: int = 2, causal: bool = True,
) -> Trial:
    """On each rank: attend with this rank's tokens, forward and backward, and compare with all tokens in one process.

    Parameters
    ----------
    attend : callable
        ``attend(q, k, v)`` -> output, each (batch, heads, tokens of this rank, size); k and v have `kv_heads`.
    order : list of tensor
        The tokens of each rank.
    heads, kv_heads, size, batch : int
        `kv_heads` is `heads` if None.
    causal : bool
        Whether one process hides later tokens.
    """
    length, kv_heads, mine = sum(map(len, order)), kv_heads or heads, order[dist.get_rank()]
    counts = (heads, kv_heads, kv_heads)
    whole = [_numbers(batch, h, length, size, seed=i).requires_grad_() for i, h in enumerate(counts)]
    gradient = _numbers(batch, heads, length, size, seed=3)
    own = [x.detach()[:, :, mine].clone().requires_grad_() for x in whole]
    expected = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=kv_heads < heads)
    expected.backward(gradient)
    with record() as forward:
        output = attend(*own)
    with record() as backward:
        output.backward(gradient[:, :, mine])
    pairs = [(output, expected[:, :, mine]), *((a.grad, b.grad[:, :, mine]) for a, b in zip(own, whole, strict=True))]
    return Trial(_largest(pairs), forward, backward)


def try_experts(
    make: Callable[[nn.Module], nn.Module], whole: nn.Module, inputs: Tensor, shared: Sequence[str] = ("router",),
) -> tuple[Trial, nn.Module]:
    """On each rank: run a mixture of experts with this rank's tokens and compare with `whole` and all tokens.

    Parameters
    ----------
    make : callable
        ``make(whole)`` -> the module of this rank. Parameters with the same name as in `whole` are equal to it, or are
        this rank's part along the first dimension.
    whole : module
        With all experts: (tokens, hidden) -> the same.
    inputs : tensor
        (tokens of all ranks, hidden), which the ranks divide.
    shared : sequence of str
        Names with which the parameters begin whose gradients are summed over ranks.

    Returns
    -------
    trial : Trial
    module : Module
        The module of this rank, after backward.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    whole, gradient = copy.deepcopy(whole).to(device()), _numbers(*inputs.shape, seed=4)
    module = make(whole)
    everything = inputs.to(device()).clone().requires_grad_()
    mine = inputs.to(device()).chunk(n)[rank].clone().requires_grad_()
    expected = whole(everything)
    expected.backward(gradient)
    with record() as forward:
        output = module(mine)
    with record() as backward:
        output.backward(gradient.chunk(n)[rank])
    pairs = [(output, expected.chunk(n)[rank]), (mine.grad, everything.grad.chunk(n)[rank])]
    for name, parameter in module.named_parameters():
        full = whole.get_parameter(name).grad
        if name.startswith(tuple(shared)):
            dist.all_reduce(parameter.grad)
            pairs.append((parameter.grad, full))
        else:
            pairs.append((parameter.grad, full.chunk(n)[rank]))
    return Trial(_largest(pairs), forward, backward), module
