"""Mixtures of experts in numbers: parameters, capacity, bytes of dispatch, nodes that a token reaches; DeepSeek's."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb

__all__ = [
    "DEEPEP_LOW_LATENCY", "DEEPSEEK_V3", "ExpertModel", "Transfer", "capacity", "dispatch_bytes", "expected_nodes",
    "expert_parameters",
]


def expert_parameters(hidden: int, inner: int, matrices: int = 3) -> int:
    """Return the parameters of an expert: three matrices with SwiGLU, two with GELU."""
    return matrices * hidden * inner


def capacity(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """Return the copies of tokens that an expert takes of `tokens` tokens: `factor` times an even share, rounded up."""
    return ceil(factor * tokens * top_k / experts)


def dispatch_bytes(tokens: int, top_k: int, token_bytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends to others when its `tokens` tokens go to `top_k` experts each.

    Experts are chosen evenly, a copy of the token for each, and one copy in N stays on the rank.
    """
    return tokens * top_k * token_bytes * (ranks - 1) / ranks


def expected_nodes(experts: int, top_k: int, nodes: int) -> float:
    """Return how many of `nodes` nodes hold at least one of `top_k` experts that are drawn evenly."""
    return nodes * (1 - comb(experts - experts // nodes, top_k) / comb(experts, top_k))


@dataclass(frozen=True)
class ExpertModel:
    """A published model with experts, and how it was trained."""

    parameters: float
    hidden: int  # width of a token
    inner: int  # width of an expert
    layers: int  # layers with experts
    experts: int  # routed ones in a layer
    top_k: int  # those of a token
    ep: int  # ranks that share the experts of a layer
    pp: int
    gpus: int
    nodes: int  # that share the experts of a layer
    most_nodes: int  # that a token may go to
    source: str


DEEPSEEK_V3 = ExpertModel(
    671e9, 7168, 2048, 58, 256, 8, 64, 16, 2048, 8, 4,
    "DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv 2412.19437, sections 3.2 and 4.2",
)


@dataclass(frozen=True)
class Transfer:
    """A published time of dispatch or combine: `tokens` tokens on each rank, `token_bytes` for each copy.

    `bandwidth` is the published one, in bytes per second.
    """

    name: str
    ep: int
    tokens: int
    top_k: int
    token_bytes: int
    seconds: float
    bandwidth: float


#: Low-latency kernels of DeepEP on H800 with 400 Gb/s InfiniBand: 128 tokens of 7,168 numbers, FP8 out with a scale of
#: 4 bytes for 128 numbers (the scales are an inference from the sizes), BF16 back (docs/legacy.md in
#: https://github.com/deepseek-ai/DeepEP).
DEEPEP_LOW_LATENCY = tuple(
    Transfer(name, ep, 128, 8, size, microseconds / 1e6, gigabytes * 1e9)
    for name, ep, size, microseconds, gigabytes in (
        ("dispatch", 8, 7168 + 4 * 56, 77, 98), ("dispatch", 64, 7168 + 4 * 56, 173, 43),
        ("combine", 8, 2 * 7168, 114, 127), ("combine", 64, 2 * 7168, 314, 46),
    )
)
