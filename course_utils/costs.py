"""What a collective costs: the bytes each rank must move, and the time that takes.

Sizes follow nccl-tests: S is the tensor for all-reduce, broadcast and reduce, the whole output for all-gather, the
whole input for reduce-scatter and all-to-all, and all pieces together for gather and scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["COLLECTIVES", "algbw", "busbw", "busbw_factor", "bytes_sent", "fit_alpha_beta", "format_bytes"]

COLLECTIVES = (
    "broadcast", "reduce", "all_reduce", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all",
)  # fmt: skip


def busbw_factor(op: str, n: int) -> float:
    """Bytes that the busiest of `n` ranks must move one way, as a multiple of S.

    2(n-1)/n for all-reduce, 1 for broadcast, reduce, send and recv, (n-1)/n for the others (NVIDIA nccl-tests,
    doc/PERFORMANCE.md; for gather and scatter the root's share, by the same reasoning).
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if op in ("send", "recv"):
        return 1.0
    if op not in COLLECTIVES:
        raise ValueError(f"unknown operation {op!r}; choose one of {', '.join(COLLECTIVES)}, send, recv")
    if n == 1:
        return 0.0
    return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0}.get(op, (n - 1) / n)


def bytes_sent(op: str, n: int, size: float) -> float:
    """Bytes the busiest of `n` ranks must move one way, at least, for message size `size` in bytes.

    The symmetric collectives reach it on every rank at once by a ring; for broadcast, reduce, gather and scatter the
    busiest rank is the root.
    """
    return busbw_factor(op, n) * size


def algbw(size: float, seconds: float) -> float:
    """Algorithm bandwidth S/t in bytes per second: how fast the caller's data gets done."""
    return size / seconds


def busbw(op: str, n: int, size: float, seconds: float) -> float:
    """Bus bandwidth in bytes per second: `algbw` times `busbw_factor`, to be compared with a link's speed."""
    return algbw(size, seconds) * busbw_factor(op, n)


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit t = alpha + beta * S by least squares on the relative error, so that small and large sizes count alike.

    Returns alpha in seconds and beta in seconds per byte, neither negative, from at least two different sizes in bytes.
    """
    s, t = np.asarray(sizes, float), np.asarray(seconds, float)
    if s.shape != t.shape or s.ndim != 1 or len(np.unique(s)) < 2:
        raise ValueError("sizes and seconds must have one length, with at least two different sizes")
    if not (t > 0).all():
        raise ValueError("seconds must be positive")
    columns = np.stack([1 / t, s / t], axis=1)
    alpha, beta = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)[0]
    if alpha < 0 or beta < 0:  # then the best non-negative fit has one term only
        single = [columns[:, i].sum() / (columns[:, i] ** 2).sum() for i in (0, 1)]
        worst = [((columns[:, i] * single[i] - 1) ** 2).sum() for i in (0, 1)]
        alpha, beta = (single[0], 0.0) if worst[0] <= worst[1] else (0.0, single[1])
    return float(alpha), float(beta)


def format_bytes(size: float) -> str:
    """Return `size` in bytes with a binary prefix, such as ``64 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
