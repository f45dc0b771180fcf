"""What a rank has communicated: a ledger of every operation on any process group, with its bytes.

`intercept` writes it.
"""

from __future__ import annotations

import linecache
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .labels import align

__all__ = ["Entry", "Ledger"]


@dataclass(slots=True)
class Entry:
    """One operation of one rank.

    Attributes
    ----------
    op : str
        ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``reduce``, ``gather``, ``scatter``,
        ``all_to_all``, ``barrier``, ``send`` or ``recv``; fused and single-tensor variants count as the plain one.
    group : str
        ``"default"``, the name of a mesh dimension, or the ranks of the group.
    bytes : int
        Message size S as in nccl-tests: the tensor for all-reduce, broadcast, reduce, send and recv; the whole output
        for all-gather; the whole input for reduce-scatter and all-to-all; all shards for gather and scatter.
    peer : int or None
        Global rank of the other side (send, recv) or of the root; None where there is none or any source will do.
    ranks : tuple of int
        Global ranks of the group.
    number : int
        Position among the group's collectives on this rank, from 1; for send and recv among those of the rank.
    start, end : float
        Seconds on the monotonic clock; ``end`` is None while the operation has not completed. Under NCCL an operation
        counts as completed when it is queued on its stream.
    """

    op: str
    group: str
    bytes: int
    peer: int | None
    ranks: tuple[int, ...]
    number: int
    start: float
    end: float | None = None
    where: tuple[str, int] | None = None
    key: str = field(default="", repr=False)
    stream: tuple | None = field(default=None, repr=False)  # send and recv: group, peer and tag that must agree
    place: int = field(default=0, repr=False)  # among those of the same stream, from 1
    dtype: str = field(default="", repr=False, compare=False)
    thread: int = field(default_factory=threading.get_ident, repr=False, compare=False)  # that issued it
    rank: int | None = field(default=None, repr=False)  # the global rank that this is an operation of

    @property
    def call_site(self) -> str:
        """The learner's line that issued the operation, such as ``line 3: dist.all_reduce(x)``."""
        if self.where is None:
            return ""
        return f"line {self.where[1]}: {linecache.getline(*self.where).strip()}".rstrip(": ")

    @property
    def is_collective(self) -> bool:
        return self.op not in ("send", "recv")

    @property
    def sends_to(self) -> int | None:
        """The rank that this one sends to; in a collective as a ring, the next of the group."""
        if not self.is_collective:
            return self.peer
        return self.ranks[(self.ranks.index(self.rank) + 1) % len(self.ranks)]


class Ledger:
    """The operations of one rank in the order of their start. ``len``, iteration and indexing give entries."""

    def __init__(self, entries: list[Entry] | None = None):
        self.entries: list[Entry] = entries if entries is not None else []

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, index):
        return self.entries[index]

    def count(self, op: str | None = None) -> int:
        """Number of operations, of one kind if ``op`` is given."""
        return sum(op in (None, entry.op) for entry in self.entries)

    def bytes(self, op: str | None = None) -> int:
        """Sum of the message sizes in bytes, of one kind if ``op`` is given."""
        return sum(entry.bytes for entry in self.entries if op in (None, entry.op))

    def bytes_sent(self, group: str | None = None, between: Sequence[int] | Mapping[int, int] | None = None) -> float:
        """Bytes that this rank sends, a collective counted as a ring over its group in the order of the ranks.

        Parameters
        ----------
        group : str, optional
            Count operations of groups with this name only.
        between : sequence of int or dict, optional
            The node of each rank: count only what goes from one node to another.
        """
        from ..costs import bytes_sent

        return sum(
            bytes_sent(entry.op, len(entry.ranks), entry.bytes)
            for entry in self.entries
            if entry.op not in ("recv", "barrier") and group in (None, entry.group)
            and (between is None or between[entry.rank] != between[entry.sends_to])
        )

    @property
    def sent(self) -> int:
        """Bytes sent point to point."""
        return self.bytes("send")

    @property
    def received(self) -> int:
        """Bytes received point to point."""
        return self.bytes("recv")

    @property
    def messages(self) -> int:
        """Number of point-to-point messages sent."""
        return self.count("send")

    def _rows(self) -> list[tuple[str, ...]]:
        head = ("#", "operation", "group", "bytes", "peer", "called at")
        return [head] + [
            (str(i), e.op, e.group, f"{e.bytes:,}", "" if e.peer is None else str(e.peer), e.call_site)
            for i, e in enumerate(self.entries)
        ]

    def table(self) -> str:
        """The entries as aligned text, one line each."""
        return align(self._rows(), right=(0, 3))

    def _repr_html_(self) -> str:
        from html import escape

        head, *rows = self._rows()
        cells = ["<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows]
        return f"<table><tr>{''.join(f'<th>{c}</th>' for c in head)}</tr>{''.join(cells)}</table>"

    def __repr__(self) -> str:
        return self.table()
