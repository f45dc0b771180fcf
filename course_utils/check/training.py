"""A model by name, for checks of training steps: its parameters and gradients as dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EXACT", "average", "exact", "gradients_of", "trained_parameters", "weights_of"]

EXACT = 1e-12  # tolerance in float64, relative and absolute


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the gradients by name; zeros where there is none."""
    trained = trained_parameters(module).items()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters by name."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def average(parts: Sequence[dict[str, Tensor]], divisor: float | None = None) -> dict[str, Tensor]:
    """The sum of tensors of the same name, divided by ``divisor``: the number of parts if None."""
    return {name: sum(part[name] for part in parts) / (divisor or len(parts)) for name in parts[0]}


def exact(got: Any, expected: Tensor) -> bool:
    """Whether a tensor has the expected shape, and the expected numbers to 1e-12."""
    same = isinstance(got, Tensor) and got.shape == expected.shape
    return same and torch.allclose(got.double(), expected, rtol=EXACT, atol=EXACT)
