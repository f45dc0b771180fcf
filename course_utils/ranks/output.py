"""Merges what the ranks print into one text that does not depend on who was faster (private)."""

from __future__ import annotations

import base64
import json
import re
from collections import deque
from collections.abc import Callable

from .channels import MARK
from .labels import rank_label

MAX_LINES = 10_000  # of a rank that are shown as they come,
LAST_LINES = 50  # and of the rest the last ones
MAX_LINE = 10_000  # characters of a line that are shown
_MAX_HELD = 1 << 17  # bytes of a line without an end that are kept
_TERMINATE = r"terminate called|  what\(\):|\[F\d{4} "
_BELOW = re.compile(rb"\n([^\n]*?)\x1b\[1?A")  # what a bar writes below another, before the cursor goes up again
_REWRITTEN = re.compile(rb"[^\r\n]*\r(?=[^\r\n])")  # a line up to where it is written again, as by progress bars
_TIME = re.compile(rb" \[\d+:\d\d")  # in a bar of tqdm's,
_BAR = re.compile(r"(.*?) *(\d+)%\|.*/(\S+) \[[^,\]]*(?:, *([\d.]+)(\D*?)[,\]])?")  # name, percent, total, rate
_DEPRECATED = re.compile(r": FutureWarning: .*torch\.")  # PyTorch's own; the learner's line follows, indented
_told: set[str] = set()  # of these, those that an earlier call has shown,
_telling: set[str] = set()  # and those that this one shows
_CURSOR = re.compile(r"\x1b\[\d*[A-HJKST]")


def _decoded(special: bytes) -> dict | int | None:
    """A MIME bundle, the call that an end mark is for, or None if the bytes are no record of ours."""
    try:
        if special[:1] == b"D":
            return json.loads(base64.b64decode(special[1:], validate=True))
        return int(special[1:]) if special[:1] == b"E" else None
    except ValueError:
        return None


class _Source:
    """What one rank has printed: whole lines that wait to be shown, and the beginning of the next."""

    def __init__(self) -> None:
        self.partial = b""  # after the last line that cannot change any more
        self.dropped = 0  # bytes of the partial line that are not kept
        self.below = b""  # the newest of the bars below it
        self.lines: list[str | dict | None] = []  # None: has been shown
        self.last: deque[str | dict] = deque(maxlen=LAST_LINES)
        self.left_out = 0
        self.warned: set[str] = set()
        self.after_told = False  # the last line was a warning that has been shown before

    def take(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes.

        The end of a bar, or of an empty line, may be the way down to a bar below it. So it waits for what comes next.
        """
        text = self.partial + data
        if b"\r" in text:
            while b"\x1b" in text and (changed := _BELOW.sub(self._note_below, text)) != text:
                text = changed
            text = _REWRITTEN.sub(b"\r", text)
        *lines, rest = text.split(b"\n")
        self.below = b"" if lines else self.below
        if not rest or rest[:1] in (b"\r", b"\x1b"):
            while lines and not lines[-1]:
                rest = lines.pop() + b"\n" + rest
            if lines and _TIME.search(lines[-1]) and MARK not in lines[-1]:
                rest = lines.pop() + b"\n" + rest
        if len(rest) > 2 * _MAX_HELD and MARK not in rest[:1]:  # keep its beginning and its end
            self.dropped += len(rest) - _MAX_HELD
            rest = rest[: _MAX_HELD // 2] + rest[-_MAX_HELD // 2 :]
        self.partial = rest
        return lines

    def _note_below(self, found: re.Match[bytes]) -> bytes:
        self.below = found[1].strip() or self.below
        return b""

    def rest(self) -> list[bytes]:
        """What has no end and will have none."""
        *lines, rest = self.partial.split(b"\n")
        self.partial = b""
        return lines + [rest] * bool(rest)

    def unended(self) -> str:
        """The line that has no end yet, as it stands: of bars the uppermost."""
        line = self.partial.rpartition(b"\n")[2].rpartition(b"\r")[2].strip() or self.below
        return "" if MARK in self.partial else _CURSOR.sub("", line.decode(errors="replace"))

    def add(self, item: str | dict) -> None:
        if len(self.lines) < MAX_LINES:
            self.lines.append(item)
        else:
            self.left_out += len(self.last) == LAST_LINES
            self.last.append(item)

    def end(self) -> None:
        """Nothing more comes: show the last of the lines that were held back."""
        if self.left_out:
            self.lines.append(f"… {self.left_out:,} lines are not shown …")
        self.lines += self.last
        self.last.clear()
        self.left_out = 0


class Merger:
    """Line k of every rank is shown before line k+1 of any, equal lines once, labelled with their ranks.

    ``show`` is called with a text (one or more whole lines) or a MIME bundle.
    """

    def __init__(self, ranks: list[int], show: Callable[[str | dict], None], by_rank: bool = False):
        self._show = show
        self.by_rank: dict[int, list[str | dict]] | None = {rank: [] for rank in ranks} if by_rank else None
        self._sources = {rank: _Source() for rank in ranks}
        self._open = set(ranks)
        self._next = 0
        _told.update(_telling)
        self.fatal: dict[int, str] = {}  # what a C++ library said when it ended the process

    def feed(self, rank: int, data: bytes, call: int) -> None:
        """Take bytes that a rank wrote; the end mark of ``call`` closes the rank."""
        source = self._sources[rank]
        for line in source.take(data):
            self._take_line(rank, source, line, call)

    def _take_line(self, rank: int, source: _Source, line: bytes, call: int) -> None:
        text, mark, special = line.rpartition(MARK) if MARK in line else (b"", b"", b"")
        record = _decoded(special) if mark else None
        if record is None:
            self._add(rank, source, line)
            return
        if text:
            self._add(rank, source, text)
        if isinstance(record, dict):
            source.add(record)
        elif record == call:
            source.end()
            self._open.discard(rank)
        else:  # what came until now belongs to a call that has ended
            del source.lines[self._next :]

    def _add(self, rank: int, source: _Source, line: bytes) -> None:
        dropped, source.dropped = source.dropped, 0
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        if "\x1b" in text:
            text = _CURSOR.sub("", text)
        if len(text) + dropped > MAX_LINE:
            text = f"{text[:MAX_LINE]} … ({len(text) + dropped - MAX_LINE:,} more characters)"
        if text.startswith(("terminate called", "  what():", "[F")) and re.match(_TERMINATE, text):
            self.fatal[rank] = re.sub(r".*what\(\):\s*(\[enforce fail at \S+\] )?|\[F[^]]*\] ", "", text)
            return
        if text.startswith("[Gloo] Rank "):  # what PyTorch 2.10 says of each group; 2.13 says nothing
            return
        after_told, source.after_told = source.after_told, False
        if after_told and text.startswith("  "):
            return
        if found := _DEPRECATED.search(text):
            warning = text[found.start() :]
            source.after_told = warning in _told or warning in source.warned
            source.warned.add(warning)
            _telling.add(warning)
        if not source.after_told:
            source.add(text)

    def is_open(self, rank: int) -> bool:
        return rank in self._open

    def unended(self) -> tuple[str, str] | None:
        """A line that has no end yet, such as a progress bar of several ranks, and whose it is."""
        texts = {rank: text for rank in sorted(self._open) if (text := self._sources[rank].unended())}
        return next(iter(_together(texts)), None)

    def close(self, rank: int) -> None:
        """Nothing more comes from this rank (it died or was stopped)."""
        source = self._sources[rank]
        if rank in self._open:
            for line in source.rest():
                if not line.startswith(MARK):
                    self._add(rank, source, line)
            source.end()
        self._open.discard(rank)

    def flush(self, asks: int | None = None) -> None:
        """Show every line that is ready, and of a rank that asks something all that it has printed."""
        text: list[str] = []
        while having := [rank for rank, source in self._sources.items() if self._next < len(source.lines)]:
            if not self._open.issubset(having):
                break
            self._show_line(self._next, having, text)
            self._next += 1
        for k in range(self._next, len(self._sources[asks].lines) if asks is not None else 0):
            self._show_line(k, [asks], text)
        if text:
            self._show("".join(text))

    def _show_line(self, k: int, ranks: list[int], text: list[str]) -> None:
        """Add line ``k`` of these ranks to ``text``, or show both if it is a figure."""
        items = {}
        for rank in ranks:
            lines = self._sources[rank].lines
            item, lines[k] = lines[k], None
            if item is not None:
                items[rank] = item
                if self.by_rank is not None:
                    self.by_rank[rank].append(item)
        for label, item in _together(items):
            if isinstance(item, str):
                text.append(f"[{label}] {item}".rstrip() + "\n")
                continue
            self._show("".join([*text, f"[{label}] shows:\n"]))
            text.clear()
            self._show(item)


def _together(items: dict[int, str | dict]) -> list[tuple[str, str | dict]]:
    """What several ranks have printed, equal things once, with whose they are; of one progress bar the slowest's."""
    groups: dict = {}
    for rank, item in items.items():
        key = item if isinstance(item, str) else json.dumps(item)
        if "%|" in key and (bar := _BAR.match(key)):
            key = bar.group(1, 3)
        groups.setdefault(key, {})[rank] = item
    told = []
    for key, having in groups.items():
        first, label = next(iter(having)), rank_label([*having])
        if isinstance(key, tuple) and len({*having.values()}) > 1:
            first = min(having, key=lambda rank, having=having: _speed(having[rank]))
            label += f", slowest {first}"
        told.append((label, having[first]))
    return told


def _speed(text: str) -> tuple[float, float]:
    """How far a bar is, and how fast; ``2.00s/it`` is a rate upside down."""
    percent, rate, unit = _BAR.match(text).group(2, 4, 5)
    each = float(rate or "inf")
    return float(percent), 1 / each if each and (unit or "").startswith("s/") else each
