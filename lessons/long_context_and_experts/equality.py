"""Attention and experts that ranks share, beside one process: the largest difference, and what was sent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_utils.beside import Trial, beside
from course_utils.ranks import device

__all__ = ["try_attention", "try_experts"]


def try_attention(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], order: Sequence[Tensor], heads: int = 4,
    kv_heads: int | None = None, size: int = 16, batch: int = 2, causal: bool = True,
) -> Trial:
    """On each rank: ``attend(q, k, v)`` with the tokens ``order[rank]``, beside one process with all tokens."""
    tokens, kv_heads, length = order[dist.get_rank()], kv_heads or heads, sum(map(len, order))
    shapes = [(batch, h, length, size) for h in (heads, kv_heads, kv_heads)]
    qkv = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]

    def whole(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=kv_heads < heads)

    return beside(whole, attend, qkv, mine=lambda t: t[:, :, tokens])


def try_experts(
    make: Callable[[nn.Module], nn.Module], whole: nn.Module, inputs: Tensor, shared: Sequence[str] = ("router",),
) -> tuple[Trial, nn.Module]:
    """On each rank: a mixture of experts ``make(whole)`` with this rank's tokens, beside `whole` with all of them.

    Gradients whose names begin as in `shared` are summed over ranks; other parameters are this rank's part of rows.
    """
    rank, n, whole = dist.get_rank(), dist.get_world_size(), copy.deepcopy(whole).to(device())
    module = make(whole)

    def gradients() -> dict[str, tuple[Tensor, Tensor]]:
        pairs = {}
        for name, p in module.named_parameters():
            gradient = whole.get_parameter(name).grad
            if name.startswith(tuple(shared)):
                dist.all_reduce(p.grad)
            else:
                gradient = gradient.chunk(n)[rank]
            pairs[name] = p.grad, gradient
        return pairs

    return beside(whole, module, [inputs], mine=lambda t: t.chunk(n)[rank], gradients=gradients), module
