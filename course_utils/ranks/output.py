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
_REWRITES = re.compile(rb"\r(?!\r*\n)|\x1b\[\d*A")  # a line is written again, as by progress bars
_TOKENS = re.compile(rb"[\n\r]|\x1b\[(\d*)A|\x1b\[[\d;]*[B-HJKST]|(?:[^\n\r\x1b]|\x1b\[[\d;]*m)+|\x1b")
_BAR = re.compile(rb"^(?P<name>.*?) *(?P<percent>\d+)%\|.*?/(?P<total>\d+)")  # tqdm's
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


class _Screen:
    """The lines that progress bars write again and again: a cursor that goes up, down and back to the beginning."""

    def __init__(self, line: bytes):
        self._rows = [line]
        self._written = [0]  # when each row was written last, as a count of writes
        self._cursor = 0
        self._down = False  # the cursor has just come down to its row
        self._again = False  # the next text takes the place of the row's
        self._up = False  # the cursor has been moved up
        self._cut = b""

    def feed(self, data: bytes) -> tuple[list[bytes], bytes | None]:
        """Lines that will not change any more, and what follows them as soon as no line is written again."""
        data = self._cut + data
        cut = re.search(rb"\x1b(\[[\d;]*)?$", data)
        data, self._cut = (data[: cut.start()], data[cut.start() :]) if cut else (data, b"")
        for token in _TOKENS.finditer(data):
            text = token[0]
            if text == b"\n":
                self._cursor += 1
                if self._cursor == len(self._rows):
                    self._rows.append(b"")
                    self._written.append(0)
                self._down, self._again = True, False
            elif text == b"\r":
                self._again, self._down = True, False
            elif token[1] is not None:
                self._cursor = max(0, self._cursor - int(token[1] or 1))
                self._down, self._up = False, True
            elif MARK in text:
                begins = token.start() + text.index(MARK)
                self._write(data[token.start() : begins])
                return self.rows(upto=len(self._rows)), data[begins:]
            elif self._down and not text.startswith(b"\x1b"):  # ordinary text, which goes below all bars
                last = self._cursor == len(self._rows) - 1
                return self.rows(upto=self._cursor if last else len(self._rows)), data[token.start() :]
            elif not text.startswith(b"\x1b") or text.endswith(b"m"):
                self._write(text)
        return [], None

    def _write(self, text: bytes) -> None:
        if text:
            self._rows[self._cursor] = (b"" if self._again else self._rows[self._cursor]) + text
            self._written[self._cursor] = 1 + max(self._written)
            self._again = False

    def rows(self, upto: int) -> list[bytes]:
        """The first rows as lines, without those where only the cursor has been."""
        rows = [row for i, row in enumerate(self._rows[:upto]) if not self._is_stale(i)]
        if self._up:
            return [row for row in rows if row]
        while rows and not rows[-1] and upto == len(self._rows):
            rows.pop()
        return rows

    def _is_stale(self, i: int) -> bool:
        """Whether a row holds a state of a bar that has ended in another row."""
        bar = _BAR.search(self._rows[i])
        later = (row for row, when in zip(self._rows, self._written, strict=True) if when > self._written[i])
        ended = (end for row in later if (end := _BAR.search(row)) and end["percent"] == b"100")
        return bar is not None and any(end["name"] == bar["name"] and end["total"] == bar["total"] for end in ended)

    def __len__(self) -> int:
        return len(self._rows)

    def first(self) -> bytes:
        return next((row for row in self._rows if row), b"")


class _Source:
    """What one rank has printed: whole lines that wait to be shown, and the beginning of the next."""

    def __init__(self) -> None:
        self.partial = bytearray()
        self.dropped = 0  # bytes of the partial line that are not kept
        self.newlines = 0  # with which it has ended since: lines, or the way down to a bar
        self.screen: _Screen | None = None
        self.lines: list[str | dict] = []
        self.last: deque[str | dict] = deque(maxlen=LAST_LINES)
        self.left_out = 0
        self.warned: set[str] = set()
        self.after_told = False  # the last line was a warning that has been shown before

    def take(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes."""
        complete: list[bytes] = []
        while True:
            if self.screen is None:
                data, self.newlines = b"\n" * self.newlines + data, 0
                again = _REWRITES.search(data)
                if again is None:
                    return complete + self._plain(data)
                begins = data.rfind(b"\n", 0, again.start()) + 1
                text = data[:begins].rstrip(b"\n")
                if text or self.partial:  # ordinary lines before it
                    ends = min(begins, len(text) + 1)
                    complete += self._plain(data[:ends])
                    data = b"\n" * self.newlines + data[ends:]
                self.screen, self.partial, self.newlines = _Screen(bytes(self.partial)), bytearray(), 0
            lines, rest = self.screen.feed(data)
            complete += lines
            if rest is None:
                return complete
            self.screen, data = None, rest

    def _plain(self, data: bytes) -> list[bytes]:
        body = data.rstrip(b"\n")
        ends = len(data) - len(body)
        if ends and (body or self.partial):
            body, ends = body + b"\n", ends - 1
        self.newlines = ends
        if b"\n" in body:
            first, *lines, tail = body.split(b"\n")
            complete = [bytes(self.partial) + first, *lines]
            self.partial = bytearray(tail)
            return complete
        self.partial += body
        if len(self.partial) > 2 * _MAX_HELD and MARK not in self.partial[:1]:  # keep its beginning and its end
            self.dropped += len(self.partial) - _MAX_HELD
            self.partial[_MAX_HELD // 2 : len(self.partial) - _MAX_HELD // 2] = b""
        return []

    def rest(self) -> list[bytes]:
        """What has no end and will have none."""
        screen, self.screen = self.screen, None
        partial, self.partial = bytes(self.partial), bytearray()
        lines = screen.rows(upto=len(screen)) if screen else []
        return lines + ([partial] if partial else []) + [b""] * self.newlines

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

    def __init__(self, ranks: list[int], show: Callable[[str | dict], None]):
        self._show = show
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

    def unended(self) -> tuple[int, str] | None:
        """A rank with a line that has no end yet, such as a progress bar, and the line as it stands."""
        for rank, source in self._sources.items():
            line = source.screen.first() if source.screen else bytes(source.partial[-_MAX_HELD:])
            if rank in self._open and line.strip() and MARK not in line:
                return rank, _CURSOR.sub("", line.rpartition(b"\r")[2].decode(errors="replace")).strip()
        return None

    def close(self, rank: int) -> None:
        """Nothing more comes from this rank (it died or was stopped)."""
        source = self._sources[rank]
        if rank in self._open:
            for line in source.rest():
                if not line.startswith(MARK):
                    self._add(rank, source, line)
            source.end()
        self._open.discard(rank)

    def flush(self) -> None:
        """Show every line that is ready."""
        text = []
        while True:
            k = self._next
            if any(k >= len(self._sources[rank].lines) for rank in self._open):
                break
            having = [rank for rank, source in self._sources.items() if k < len(source.lines)]
            if not having:
                break
            self._next += 1
            groups: dict[str, tuple[str | dict, list[int]]] = {}
            for rank in having:
                item = self._sources[rank].lines[k]
                groups.setdefault(item if isinstance(item, str) else json.dumps(item), (item, []))[1].append(rank)
                self._sources[rank].lines[k] = ""
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
