"""Attention over a sequence that ranks share: who computes how many pairs, what each method sends, holds and takes.

N ranks hold T tokens, t = T / N each. H heads of queries and `kv_heads` of keys and values have `head_size` numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = [
    "METHODS", "ORDERS", "RING_TABLE_2", "Attention", "gather_bytes", "overlap_tokens", "pairs_per_rank", "ring_bytes",
    "ulysses_bytes",
]

#: Which tokens a rank holds. Contiguous: a run of them. Zig-zag: of 2N runs the r-th and the r-th from the end.
#: Striped: every N-th.
ORDERS = ("contiguous", "zig-zag", "striped")
METHODS = (*(f"ring, {order}" for order in ORDERS), "Ulysses", "gather K and V")

#: Device and link -> TFLOP/s, GB/s, thousands of tokens a rank so that a ring hides (Liu et al. 2023, Ring Attention,
#: arXiv 2310.01889, table 2).
RING_TABLE_2: Mapping[str, tuple[float, float, float]] = MappingProxyType({
    "A100, NVLink": (312, 300, 1.0), "A100, InfiniBand": (312, 12.5, 24.5), "TPU v3": (123, 112, 1.1),
    "TPU v4": (275, 268, 1.0), "TPU v5e": (196, 186, 1.1),
})


def pairs_per_rank(length: int, ranks: int, order: str) -> list[int]:
    """Return the pairs of a query and a key that the causal mask leaves to each rank, for one head.

    Token i sees the i + 1 tokens up to itself, so a rank has the sum of i + 1 over the tokens that it holds.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    parts = 2 * ranks if order == "zig-zag" else ranks
    if length % parts:
        raise ValueError(f"{order} needs a length that {parts} divides, got {length:,}")
    t = length // ranks
    if order == "zig-zag":
        return [t * (length + 1) // 2] * ranks
    if order == "contiguous":
        return [r * t * t + t * (t + 1) // 2 for r in range(ranks)]
    return [t * (r + 1) + ranks * t * (t - 1) // 2 for r in range(ranks)]


def ring_bytes(tokens: int, kv_width: int, ranks: int, element: int = 2) -> tuple[int, int]:
    """Return the bytes that a rank sends in a ring, in forward and in backward, for `tokens` tokens on each rank.

    Forward passes K and V on N - 1 times. Backward does so again and passes their gradients, which come home after N.
    `element` is the bytes of a number; tokens count those of all sequences in the batch.
    """
    both = 2 * tokens * kv_width * element
    return (ranks - 1) * both, (2 * ranks - 1) * both


def ulysses_bytes(tokens: int, width: int, kv_width: int, ranks: int, element: int = 2) -> tuple[float, float]:
    """Return the bytes that a rank sends with Ulysses: all-to-alls of Q, K, V and the output, once more in backward."""
    once = 2 * tokens * (width + kv_width) * element * (ranks - 1) / ranks
    return once, once


def gather_bytes(tokens: int, kv_width: int, ranks: int, element: int = 2) -> tuple[int, int]:
    """Return the bytes that a rank sends when K and V are gathered, and their gradients reduced and scattered."""
    once = (ranks - 1) * 2 * tokens * kv_width * element
    return once, once


def overlap_tokens(
    flops: float, bandwidth: float, queries_per_key: int = 1, element: int = 2, causal: bool = False
) -> float:
    """Return the tokens that a rank must hold so that forward of a ring hides the messages behind the products.

    A step multiplies 4 c^2 h numbers for c tokens of width h and sends 2 c h / g numbers, for g queries to a key.
    With bf16 this gives c = FLOP/s / (bytes/s) / g (Liu et al. 2023). A causal ring in balance computes half.
    """
    return flops / bandwidth * element / 2 / queries_per_key * (2 if causal else 1)


@dataclass(frozen=True)
class Attention:
    """Forward of causal attention of one layer and one sequence, split over ranks by one of `METHODS`.

    What cannot be split so is a ValueError.
    """

    method: str
    length: int
    heads: int
    kv_heads: int
    ranks: int
    head_size: int = 128
    flops: float = 400e12  # FLOP/s that attention reaches
    bandwidth: float = 50e9  # bytes per second that a rank sends
    element: int = 2  # bytes of a number

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {'; '.join(METHODS)}, got {self.method!r}")
        for name in ("length", "heads", "kv_heads", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of KV heads, got {self.heads} and {self.kv_heads}")
        if self.length % self.ranks:
            raise ValueError(f"{self.ranks} ranks do not divide {self.length:,} tokens")
        if self.method == "Ulysses" and self.heads % self.ranks:
            raise ValueError(f"Ulysses gives each rank whole heads, and {self.ranks} ranks do not divide {self.heads}")
        if self.method == "Ulysses" and self.kv_heads % self.ranks and self.ranks % self.kv_heads:
            raise ValueError(f"{self.ranks} ranks and {self.kv_heads} KV heads: one must be a multiple of the other")

    @property
    def _tokens(self) -> int:
        return self.length // self.ranks

    @property
    def _width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Numbers in the keys of a token; with Ulysses KV heads are repeated until every rank has one."""
        heads = max(self.kv_heads, self.ranks) if self.method == "Ulysses" else self.kv_heads
        return heads * self.head_size

    @property
    def pairs(self) -> list[int]:
        """Pairs of a query and a key that each rank computes, over all heads. Gathering goes with zig-zag."""
        if self.method == "Ulysses":
            return [self.heads // self.ranks * self.length * (self.length + 1) // 2] * self.ranks
        order = self.method.removeprefix("ring, ") if self.method.startswith("ring") else "zig-zag"
        return [self.heads * pairs for pairs in pairs_per_rank(self.length, self.ranks, order)]

    @property
    def sent(self) -> float:
        """Bytes that a rank sends."""
        if self.method == "Ulysses":
            return ulysses_bytes(self._tokens, self._width, self.kv_width, self.ranks, self.element)[0]
        return ring_bytes(self._tokens, self.kv_width, self.ranks, self.element)[0]

    @property
    def compute_seconds(self) -> float:
        """Seconds of the rank that computes most: four FLOPs for each pair and number of a head."""
        return 4 * max(self.pairs) * self.head_size / self.flops

    @property
    def sending_seconds(self) -> float:
        """Seconds that the bytes take."""
        return self.sent / self.bandwidth

    @property
    def exposed_seconds(self) -> float:
        """Seconds of communication that nothing hides: of a ring what its steps cannot cover, of the others all."""
        if not self.method.startswith("ring"):
            return self.sending_seconds
        hidden = self.compute_seconds * (self.ranks - 1) / self.ranks  # the last step has nothing to wait for
        return max(0.0, self.sending_seconds - hidden)

    @property
    def held(self) -> int:
        """Bytes on a rank: its Q, K, V and output, and the buffers of the method.

        A ring computes with one block of K and V while the next one arrives. Gathering holds K and V of all tokens.
        Ulysses holds Q, K, V and the output a second time, split by heads.
        """
        own = 2 * self._tokens * (self._width + self.kv_heads * self.head_size)
        buffers = {
            "Ulysses": 2 * self._tokens * (self._width + self.kv_width),
            "gather K and V": 2 * self.length * self.kv_width,
        }
        return self.element * (own + buffers.get(self.method, 4 * self._tokens * self.kv_width))
