"""Numbers for exercises, and what an answer returned: compared, read as whole numbers, and shown in one line."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["close", "listed", "number", "show", "values", "whole_number", "whole_numbers"]

RELATIVE, ABSOLUTE = 1e-4, 1e-5  # tolerance of results: the order of a sum is free


def values(*shape: int, seed: int) -> torch.Tensor:
    """Random float32 numbers that depend on ``seed`` only, not on the generators that ranks share."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7919 * (seed + 1)))


def close(got: Any, expected: Any) -> bool:
    """Whether two tensors agree in shape and in value: exactly if whole numbers are expected, else within tolerance."""
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor) or got.shape != expected.shape:
        return False
    if expected.is_floating_point():
        return torch.allclose(got.double(), expected.double(), RELATIVE, ABSOLUTE, equal_nan=True)
    return torch.equal(got, expected)


def number(value: Any) -> float | None:
    """``value`` as a float if it is a number of any type, also of NumPy or a tensor without dimensions."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def whole_number(value: Any) -> int | None:
    """``value`` as an int if it is a whole number of any type, also of NumPy or a tensor without dimensions."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return None


def whole_numbers(value: Any) -> list[int] | None:
    """``value`` as a list of int if it is a list, tuple, range or 1-d array of whole numbers, else None."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim != 1:
            return None
        value = value.tolist()
    if not isinstance(value, list | tuple | range):
        return None
    found = [whole_number(v) for v in value]
    return None if None in found else found


def show(value: Any, start: int = 0) -> str:
    """A result in one line: a tensor's shape, and its numbers from the flat index ``start`` on."""
    if isinstance(value, torch.Tensor):
        shown = value.detach().flatten()[start : start + 6].tolist()
        shown = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in shown)
        before, after = "…, " if start else "", ", …" if value.numel() > start + 6 else ""
        return shown if value.dim() == 0 else f"shape {tuple(value.shape)}: {before}{shown}{after}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}: " + "; ".join(show(v) for v in value[:4])
    return "None (no return statement?)" if value is None else f"{type(value).__name__} {value!r}"[:100]


def listed(value: Any) -> Sequence:
    """``value`` if it is a list, else a list of it alone."""
    return value if isinstance(value, list) else [value]
