"""Merges what the ranks print into one text that does not depend on who was faster (private)."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable

from ._text import MARK, rank_label

MAX_LINES = 1_000_000
_TERMINATE = r"terminate called|  what\(\):|\[F\d{4} "


def _decoded(special: bytes) -> dict | int | None:
    """A MIME bundle, the call that an end mark is for, or None if the bytes are no record of ours."""
    try:
        if special[:1] == b"D":
            return json.loads(base64.b64decode(special[1:], validate=True))
        return int(special[1:]) if special[:1] == b"E" else None
    except ValueError:
        return None


class Merger:
    """Line k of every rank is shown before line k+1 of any, equal lines once, labelled with their ranks.

    Parameters
    ----------
    ranks : list of int
        Global ranks that take part.
    show : callable
        Called with a text (one or more whole lines) or a MIME bundle (dict).
    """

    def __init__(self, ranks: list[int], show: Callable[[str | dict], None]):
        self._show = show
        self._partial = dict.fromkeys(ranks, b"")
        self._lines: dict[int, list] = {rank: [] for rank in ranks}
        self._open = set(ranks)
        self._next = 0
        self.fatal: dict[int, str] = {}  # what a C++ library said when it ended the process

    def feed(self, rank: int, data: bytes, call: int) -> None:
        """Take bytes that a rank wrote; the end mark of ``call`` closes the rank."""
        *lines, self._partial[rank] = (self._partial[rank] + data).split(b"\n")
        for line in lines:
            text, mark, special = line.rpartition(MARK)
            record = _decoded(special) if mark else None
            if record is None:
                self._add(rank, line)
                continue
            if text:
                self._add(rank, text)
            if isinstance(record, dict):
                self._add(rank, record)
            elif record == call:
                self._open.discard(rank)

    def _add(self, rank: int, item: bytes | dict) -> None:
        if isinstance(item, bytes):
            item = item.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            if re.match(_TERMINATE, item):
                self.fatal[rank] = re.sub(r".*what\(\):\s*(\[enforce fail at \S+\] )?|\[F[^]]*\] ", "", item)
                return
        lines = self._lines[rank]
        if len(lines) < MAX_LINES:
            lines.append(item)
        elif len(lines) == MAX_LINES:
            lines.append(f"… more than {MAX_LINES:,} lines, the rest is not shown")

    @property
    def ranks(self) -> list[int]:
        return list(self._lines)

    def is_open(self, rank: int) -> bool:
        return rank in self._open

    def close(self, rank: int) -> None:
        """Nothing more comes from this rank (it died or was stopped)."""
        if self._partial[rank] and not self._partial[rank].startswith(MARK):
            self._add(rank, self._partial[rank])
        self._partial[rank] = b""
        self._open.discard(rank)

    def flush(self) -> None:
        """Show every line that is ready."""
        text = []
        while True:
            k = self._next
            if any(k >= len(self._lines[rank]) for rank in self._open):
                break
            having = [rank for rank, lines in self._lines.items() if k < len(lines)]
            if not having:
                break
            self._next += 1
            groups: dict[str, tuple[str | dict, list[int]]] = {}
            for rank in having:
                item = self._lines[rank][k]
                groups.setdefault(item if isinstance(item, str) else json.dumps(item), (item, []))[1].append(rank)
                self._lines[rank][k] = ""
            for item, ranks in groups.values():
                if isinstance(item, str):
                    text.append(f"[{rank_label(ranks)}] {item}".rstrip() + "\n")
                    continue
                text.append(f"[{rank_label(ranks)}] shows:\n")
                self._show("".join(text))
                text.clear()
                self._show(item)
        if text:
            self._show("".join(text))
