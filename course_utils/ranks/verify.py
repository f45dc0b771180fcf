"""Compares what the ranks of a call pass to each operation, while they run (``launch(..., verify=True)``).

Each rank writes to a file of its own (`call_signature`); here, in the notebook, the files are read along. Ranks wait
for nothing, so that a program takes the same course as without; what is wrong is told a moment after it was called.
"""

from __future__ import annotations

import ast
import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

from . import errors
from .call_signature import Passed, difference
from .labels import align, rank_label
from .watch import Watch

__all__ = ["Verifier", "path", "watch"]

_GRACE = 0.3  # seconds that the other ranks have to come to a call that two of them have called differently


def path(folder: str, number: int) -> str:
    """The file of a rank with this private folder for one call."""
    return os.path.join(folder, f"operations-{number}")


def watch() -> Watch:
    """Tells ranks that provably can never go on, and has no other limit."""
    return Watch(idle=math.inf, computing=math.inf, look=0.2)


@dataclass(frozen=True)
class Operation:
    """One operation of a rank; ``group`` is unique, ``label`` its name."""

    passed: Passed
    group: str
    label: str
    ranks: tuple[int, ...]
    tag: int
    where: tuple[str, int] | None

    @property
    def is_message(self) -> bool:
        return self.passed.op in ("send", "recv")

    @property
    def line(self) -> str:
        from .processes import learner_line

        return errors.line_text(learner_line(*self.where)) if self.where else ""


@lru_cache(4096)
def _operation(line: bytes) -> Operation:
    passed, *rest = ast.literal_eval(line.decode())
    return Operation(Passed(*passed), *rest)


class _File:
    """The operations that a rank has written down, read as they come."""

    def __init__(self, name: str):
        self._name, self._file, self._rest = name, None, b""

    def read(self) -> list[Operation]:
        if self._file is None:
            try:
                self._file = open(self._name, "rb", buffering=0)
            except FileNotFoundError:  # the rank has not begun
                return []
        *lines, self._rest = (self._rest + (self._file.read() or b"")).split(b"\n")
        return [_operation(line) for line in lines]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name)


@dataclass
class _Fault:
    """Calls that do not fit together; ``tell`` gives the rank to blame, and in words how they differ."""

    tell: Callable[[], tuple[int, str]]
    calls: dict[int, Operation]
    advice: str = ""
    since: float = field(default_factory=time.monotonic)


class Verifier:
    """Compares the operations of the ranks of one call; ``files`` has, by rank, where it writes down what it calls."""

    def __init__(self, files: dict[int, str]):
        self._files = {rank: _File(name) for rank, name in files.items()}
        self._counts: dict[str, dict[int, int]] = {}  # by group, how many collectives each rank has called
        self._open: dict[tuple[str, int], dict[int, Operation]] = {}  # called by some of their ranks
        self._apart: dict[str, tuple[int, dict[int, Operation]]] = {}  # first one called from different lines
        self._messages: dict[tuple, dict[str, list[Operation]]] = {}  # by group, source, target and tag
        self._from_anybody: set[tuple] = set()  # groups, targets and tags of which the sources are not known
        self.fault: _Fault | None = None

    def look(self, returned: set[int]) -> bool:
        """Read on; ranks that have ``returned`` call nothing more.

        True if there is a fault, and all ranks have come to it or had the time to.
        """
        for rank, file in self._files.items():
            for operation in file.read():
                if not operation.is_message:
                    self._collective(rank, operation)
                elif self.fault is None:
                    self._message(rank, operation)
        if self.fault is None:
            self.fault = self._left_out(returned) or self._unanswered(returned)
        if self.fault is None:
            return False
        members = next((call.ranks for call in self.fault.calls.values() if not call.is_message), ())
        return not set(members) - self.fault.calls.keys() - returned or time.monotonic() - self.fault.since > _GRACE

    def error(self) -> errors.MismatchError | None:
        """The error that says what does not fit together, if anything."""
        if self.fault is None:
            return None
        rank, said = self.fault.tell()
        rows: dict[tuple, list[int]] = {}
        for each, call in sorted(self.fault.calls.items()):
            row = str(call.passed), call.line
            rows.setdefault(row if len(self.fault.calls) > 8 else (*row, each), []).append(each)
        head = ("rank", "call", "line")
        table = align([head, *((rank_label(ranks).split(" ", 1)[1], *row[:2]) for row, ranks in rows.items())])
        line = self.fault.calls[rank].line if rank in self.fault.calls else ""
        text = "\n\n".join(part for part in (said, table, self.fault.advice) if part)
        return errors.MismatchError(rank, said, line, table.split("\n")[1:], text)

    def advice(self, standings: dict[int, dict]) -> str:
        """For ranks that wait in vain: where they may have gone out of step."""
        waiting = {rank: s["waiting"] for rank, s in standings.items() if s.get("waiting")}
        places = {rank: entry for rank, entry in waiting.items() if entry["op"] not in ("send", "recv")}
        firsts: dict[str, list[int]] = {}
        for rank, entry in places.items():
            if all(set(places) >= set(other["ranks"]) & set(entry["ranks"]) for other in places.values()):
                firsts.setdefault(entry["key"], []).append(rank)
        if len(firsts) > 1:
            said = (f"{_call(ranks)} {errors.operation_text(places[ranks[0]])} first" for ranks in firsts.values())
            return f"The ranks call collectives of different groups in different order: {', '.join(said)}."
        return "\n".join(self._lines_apart(entry["key"]) for entry in [*places.values()][:1])

    def close(self) -> None:
        """Remove the files."""
        for file in self._files.values():
            file.close()

    # ----------------------------------------------------------------------------------------------------- collectives

    def _collective(self, rank: int, operation: Operation) -> None:
        counts = self._counts.setdefault(operation.group, {})
        counts[rank] = number = counts.get(rank, 0) + 1
        if self.fault is not None:  # who else comes to the call that is at fault is part of the table
            if self._open.get((operation.group, number)) is self.fault.calls:
                self.fault.calls[rank] = operation
            return
        calls = self._open.setdefault((operation.group, number), {})
        calls[rank] = operation
        if _apart(calls) or operation.passed.exchanged and _misfit(calls):
            self.fault = _Fault(partial(_difference, number, calls), calls)
        elif len(calls) == len(operation.ranks):
            if operation.group not in self._apart and len({call.where for call in calls.values()}) > 1:
                self._apart[operation.group] = number, calls
            del self._open[operation.group, number]

    def _left_out(self, returned: set[int]) -> _Fault | None:
        """Ranks that have returned without a collective that others have called."""
        for (group, number), calls in self._open.items():
            one = next(iter(calls.values()))
            gone = [rank for rank in one.ranks if rank in returned and rank not in calls]
            if gone:
                title = f"{one.passed.op} #{number} ({one.label})"
                done = self._counts[group].get(gone[0], 0)
                return _Fault(partial(_missing, title, calls, gone, done), calls, self._lines_apart(group))
        return None

    def _lines_apart(self, group: str) -> str:
        """The first collective of a group that fits and was called from different lines."""
        if group not in self._apart:
            return ""
        number, calls = self._apart[group]
        by_line: dict[str, list[int]] = {}
        for rank, call in sorted(calls.items()):
            by_line.setdefault(call.line, []).append(rank)
        one = next(iter(calls.values()))
        lines = "\n".join(f"  {rank_label(ranks)}: {line}" for line, ranks in by_line.items())
        return f"The first one called from different lines is {one.passed.op} #{number} ({one.label}):\n{lines}"

    # -------------------------------------------------------------------------------------------------------- messages

    def _message(self, rank: int, operation: Operation) -> None:
        op, peer = operation.passed.op, operation.passed.peer
        source, target = (rank, peer) if op == "send" else (peer, rank)
        place = operation.group, target, operation.tag
        if source is None:
            self._from_anybody.add(place)
        if place in self._from_anybody:
            return
        sides = self._messages.setdefault((operation.group, source, target, operation.tag), {"send": [], "recv": []})
        sides[op].append(operation)
        number = len(sides[op])
        if min(map(len, sides.values())) < number:
            return
        sent, received = (sides[side][number - 1] for side in ("send", "recv"))
        if (sent.passed.dtype, sent.passed.shape) != (received.passed.dtype, received.passed.shape):
            text = (f"message #{number} from rank {source} to rank {target}: rank {source} sends {_amount(sent)}, "
                    f"rank {target} receives {_amount(received)}")
            self.fault = _Fault(lambda: (target, text), {source: sent, target: received})

    def _unanswered(self, returned: set[int]) -> _Fault | None:
        """A message of which one side has returned without its part."""
        for (group, source, target, tag), sides in self._messages.items():
            done = min(map(len, sides.values()))
            if (group, target, tag) in self._from_anybody:
                continue
            for op, rank, does, peer, did in (("send", source, "sends", target, "received"),
                                              ("recv", target, "receives", source, "sent")):
                if len(sides[op]) > done and peer in returned:
                    text = (f"message #{done + 1} from rank {source} to rank {target}: rank {rank} {does} it, "
                            f"rank {peer} returned after it had {did} {done}")
                    return _Fault(lambda told=(peer, text): told, {rank: sides[op][done]})
        return None


def _apart(calls: dict[int, Operation]):
    return difference({rank: call.passed for rank, call in calls.items()})


def _misfit(calls: dict[int, Operation]) -> tuple[int, str] | None:
    """Of an all-to-all, the first rank that sends to another what that one does not expect, in words."""
    for source, sending in sorted(calls.items()):
        for target, receiving in sorted(calls.items()):
            if sending.passed.exchanged and receiving.passed.exchanged:
                sent = sending.passed.exchanged[0][sending.ranks.index(target)]
                expected = receiving.passed.exchanged[1][sending.ranks.index(source)]
                if sent != expected:
                    elements = f"{sent} element{'s' * (sent != 1)}"
                    return source, f"rank {source} sends {elements} to rank {target}, which expects {expected}"
    return None


def _difference(number: int, calls: dict[int, Operation]) -> tuple[int, str]:
    """What calls of one collective differ in, and the rank that few agree with."""
    one = calls[min(calls)]
    apart = _apart(calls)
    rank, text = (apart.odd, apart.sentence()) if apart else _misfit(calls)
    title = f"collective #{number}" if apart and apart.field == "op" else f"{one.passed.op} #{number}"
    return rank, f"{title} ({one.label}): {text}"


def _missing(title: str, calls: dict[int, Operation], gone: list[int], done: int) -> tuple[int, str]:
    """A collective that ranks have left out that returned after `done` others."""
    left_out = f"{rank_label(gone)} returned after {done} collective{'s' * (done != 1)} of this group"
    return gone[0], f"{title}: {_call(list(calls))} it, {left_out}"


def _call(ranks: list[int]) -> str:
    return f"{rank_label(ranks)} {'calls' if len(ranks) == 1 else 'call'}"


def _amount(operation: Operation) -> str:
    count = operation.passed.shape[0][0]
    return f"{count} element{'s' * (count != 1)} of {operation.passed.dtype}"
