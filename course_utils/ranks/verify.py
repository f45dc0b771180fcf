"""Compares what the ranks of a call pass to each operation, while they run (``launch(..., verify=True)``).

Each rank writes to a file of its own (`call_signature`); here, in the notebook, the files are read along. Ranks wait
for nothing, so that a program takes the same course as without; what is wrong is told a moment after it was called.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from . import errors
from .labels import align, rank_label
from .watch import Watch

__all__ = ["Verifier", "path", "watch"]

_GRACE = 0.3  # seconds that the other ranks have to come to a call that two of them have called differently
_ANY = -1  # in place of a source


def path(folder: str, number: int) -> str:
    """The file of a rank with this private folder for one call."""
    return os.path.join(folder, f"operations-{number}")


def watch() -> Watch:
    """Tells ranks that provably can never go on, and has no other limit."""
    return Watch(idle=math.inf, computing=math.inf, look=0.2)


@dataclass
class Operation:
    """What one rank has passed to one operation. Fields that do not exist for it are empty."""

    op: str
    group: str
    label: str
    reduction: str = ""
    peer: int | None = None  # the root; of a message the other side
    dtype: str = ""
    shape: tuple = ()
    exchanged: tuple = ()  # elements that all_to_all sends to each rank and expects from it
    where: tuple | None = None
    ranks: tuple = ()
    tag: int = 0

    @property
    def line(self) -> str:
        from .processes import learner_line

        return errors.line_text(learner_line(*self.where)) if self.where else ""

    def text(self) -> str:
        """The operation in words: ``all_reduce MAX float32 (4)``."""
        root = f"root {self.peer}" if self.peer is not None and self.ranks else ""
        splits = "sends {}, expects {}".format(*(",".join(map(str, s)) for s in self.exchanged or ((), ())))
        parts = (self.op, self.reduction, root, self.dtype, _shape(self.shape), splits if self.exchanged else "")
        return " ".join(part for part in parts if part)


def _shape(shapes: tuple) -> str:
    return ", ".join("({})".format(", ".join(map(str, shape))) for shape in shapes)


def _operation(fields: list) -> Operation:
    if fields[0] == "message":
        _, op, group, label, peer, tag, dtype, count, where = fields
        return Operation(op, group, label, peer=peer, dtype=dtype, shape=((count,),), where=where, tag=tag)
    _, op, group, label, ranks, reduction, root, dtype, shape, exchanged, where = fields
    return Operation(op, group, label, reduction, root, dtype, tuple(map(tuple, shape)), tuple(map(tuple, exchanged)),
                     where, tuple(ranks))


class _File:
    """The operations that a rank has written down, read as they come."""

    def __init__(self, name: str):
        self._name, self._file, self._rest = name, None, b""
        self._known: list[Operation] = []

    def read(self) -> list[Operation]:
        if self._file is None:
            try:
                self._file = open(self._name, "rb", buffering=0)
            except FileNotFoundError:  # the rank has not begun
                return []
        *lines, self._rest = (self._rest + (self._file.read() or b"")).split(b"\n")
        return [self._of(line) for line in lines]

    def _of(self, line: bytes) -> Operation:
        if line.startswith(b"["):
            self._known.append(_operation(json.loads(line)))
            return self._known[-1]
        return self._known[int(line)]

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
    since: float = field(default_factory=time.monotonic)
    advice: str = ""


class Verifier:
    """Compares the operations of the ranks of one call.

    Parameters
    ----------
    files : dict
        By rank, the file in which it writes down what it calls.
    """

    def __init__(self, files: dict[int, str]):
        self._files = {rank: _File(name) for rank, name in files.items()}
        self._counts: dict[str, dict[int, int]] = {}  # by group, how many collectives each rank has called
        self._open: dict[tuple[str, int], dict[int, Operation]] = {}  # called by some of their ranks
        self._apart: dict[str, tuple[int, dict[int, Operation]]] = {}  # first one called from different lines
        self._messages: dict[tuple, dict[str, list[tuple[int, Operation]]]] = {}  # not yet met
        self._number: dict[tuple, int] = {}
        self._at: tuple[str, int] | None = None
        self.fault: _Fault | None = None

    def look(self, returned: set[int]) -> bool:
        """Read on. True if there is a fault, and all ranks have come to it or had the time to.

        Parameters
        ----------
        returned : set of int
            Ranks that call nothing more.
        """
        for rank, file in self._files.items():
            for operation in file.read():
                if operation.ranks:
                    self._collective(rank, operation)
                elif self.fault is None:
                    self._message(rank, operation)
        if self.fault is None:
            self._find_missing(returned)
        fault = self.fault
        if fault is None:
            return False
        members = next((call.ranks for call in fault.calls.values()), ())
        return not set(members) - fault.calls.keys() - returned or time.monotonic() - fault.since > _GRACE

    def error(self) -> errors.MismatchError | None:
        """The error that says what does not fit together, if anything."""
        fault = self.fault
        if fault is None:
            return None
        rank, said = fault.tell()
        rows = [("rank", "call", "line")]
        for each, operation in sorted(fault.calls.items()):
            rows.append((str(each), operation.text(), operation.line))
        rows = [*rows[:1], *_alike(rows[1:])] if len(rows) > 9 else rows
        table = align(rows)
        line = fault.calls[rank].line if rank in fault.calls else ""
        text = "\n\n".join(part for part in (said, table, fault.advice) if part)
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
            said = (f"{_say(ranks, 'calls', 'call')} {errors.operation_text(places[ranks[0]])} first"
                    for ranks in firsts.values())
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
        at = operation.group, number
        if self.fault is not None and at != self._at:
            return
        calls = self._open.setdefault(at, {})
        calls[rank] = operation
        differs = any(other is not operation and _differ(operation, other) for other in calls.values())
        if self.fault is not None:
            return
        if differs or _misfit(calls, rank):
            self._at, self.fault = at, _Fault(partial(_difference, number, calls), calls)
        elif len(calls) == len(operation.ranks):
            if operation.group not in self._apart and len({_place(call) for call in calls.values()}) > 1:
                self._apart[operation.group] = number, calls
            del self._open[at]

    def _find_missing(self, returned: set[int]) -> None:
        """Ranks that have returned without an operation that others have called."""
        for (group, number), calls in self._open.items():
            one = next(iter(calls.values()))
            gone = [rank for rank in one.ranks if rank in returned and rank not in calls]
            if gone:
                done = self._counts[group].get(gone[0], 0)
                title = f"{one.op} #{number} ({one.label})"
                self._at = group, number
                tell = partial(_missing, title, calls, gone, done)
                self.fault = _Fault(tell, calls, advice=self._lines_apart(group))
                return
        for key, sides in self._messages.items():
            self._find_unanswered(key, sides, returned)

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
        return f"The first one called from different lines is {one.op} #{number} ({one.label}):\n{lines}"

    # -------------------------------------------------------------------------------------------------------- messages

    def _message(self, rank: int, operation: Operation) -> None:
        peer = operation.peer if operation.peer is not None else _ANY
        source, target = (rank, peer) if operation.op == "send" else (peer, rank)
        group, tag = operation.group, operation.tag
        if (group, _ANY, target, tag) in self._messages:
            source = _ANY  # who is received from is not known
        elif source == _ANY:
            self._gather(group, target, tag)
        key = group, source, target, tag
        sides = self._messages.setdefault(key, {"send": [], "recv": []})
        count = self._number[*key, operation.op] = self._number.get((*key, operation.op), 0) + 1
        sides[operation.op].append((count, operation))
        if sides["send"] and sides["recv"]:
            (number, sent), (_, received) = sides["send"].pop(0), sides["recv"].pop(0)
            if source != _ANY and (sent.dtype, sent.shape) != (received.dtype, received.shape):
                text = (f"message #{number} from rank {source} to rank {target}: rank {source} sends "
                        f"{_amount(sent)}, rank {target} receives {_amount(received)}")
                self.fault = _Fault(partial(_told, target, text), {source: sent, target: received})

    def _gather(self, group: str, target: int, tag: int) -> None:
        """Put the messages to a rank that receives from anybody together."""
        together: dict = {"send": [], "recv": []}
        for key in [k for k in self._messages if (k[0], *k[2:]) == (group, target, tag)]:
            for op, waiting in self._messages.pop(key).items():
                together[op] += waiting
        self._messages[group, _ANY, target, tag] = together

    def _find_unanswered(self, key: tuple, sides: dict, returned: set[int]) -> None:
        _, source, target, _ = key
        for op, verb, other, peer in (("send", "received", "recv", target), ("recv", "sent", "send", source)):
            if sides[op] and peer in returned and self.fault is None:
                number, operation = sides[op][0]
                rank = source if op == "send" else target
                done = self._number.get((*key, other), 0)
                doing = "sends" if op == "send" else "receives"
                who = "a rank" if rank == _ANY else f"rank {rank}"
                text = (f"message #{number} from {'any rank' if source == _ANY else f'rank {source}'} to rank "
                        f"{target}: {who} {doing} it, rank {peer} returned after it had {verb} {done}")
                self.fault = _Fault(partial(_told, peer, text), {rank: operation} if rank != _ANY else {})
                return


def _place(operation: Operation) -> tuple:
    return tuple(operation.where or ())


def _amount(operation: Operation) -> str:
    count = operation.shape[0][0]
    return f"{count} element{'s' * (count != 1)} of {operation.dtype}"


def _say(ranks: list[int], one: str, many: str) -> str:
    return f"{rank_label(sorted(ranks))} {one if len(ranks) == 1 else many}"


#: What must be alike, in the order in which it is told, and how: verb for one rank, for several, and the value.
_FIELDS = (
    ("op", ("calls", "call"), str), ("reduction", ("reduces with", "reduce with"), str),
    ("peer", ("has", "have"), "root {}".format), ("dtype", ("passes", "pass"), str),
    ("shape", ("passes", "pass"), lambda shape: f"shape{'s' * (len(shape) > 1)} {_shape(shape)}"),
)


def _differ(one: Operation, other: Operation) -> bool:
    return any(getattr(one, name) != getattr(other, name) for name, _, _ in _FIELDS)


def _misfit(calls: dict[int, Operation], new: int) -> str:
    """Of an all-to-all, the first pair of ranks of which one sends what the other does not expect."""
    ranks = calls[new].ranks
    for rank in sorted(calls):
        for source, target in ((rank, new), (new, rank)):
            if not calls[source].exchanged or not calls[target].exchanged:
                continue
            sent = calls[source].exchanged[0][ranks.index(target)]
            expected = calls[target].exchanged[1][ranks.index(source)]
            if sent != expected:
                return (f"rank {source} sends {sent} element{'s' * (sent != 1)} to rank {target}, which expects "
                        f"{expected}")
    return ""


def _told(rank: int, text: str) -> tuple[int, str]:
    return rank, text


def _missing(title: str, calls: dict[int, Operation], gone: list[int], done: int) -> tuple[int, str]:
    """A collective that ranks have left out that returned after `done` others."""
    left_out = f"{rank_label(gone)} returned after {done} collective{'s' * (done != 1)} of this group"
    return gone[0], f"{title}: {_say(list(calls), 'calls', 'call')} it, {left_out}"


def _difference(number: int, calls: dict[int, Operation]) -> tuple[int, str]:
    """What calls of one collective differ in, and the rank that few agree with."""
    calls = dict(sorted(calls.items()))
    one = next(iter(calls.values()))
    for name, verbs, show in _FIELDS:
        values: dict[Any, list[int]] = {}
        for rank, call in calls.items():
            values.setdefault(getattr(call, name), []).append(rank)
        if len(values) > 1:
            few, *others = sorted(values.items(), key=lambda item: (len(item[1]), -item[1][0]))
            parts = [f"{_say(few[1], *verbs)} {show(few[0])}"]
            parts += [f"{_say(ranks, *verbs)} {show(value)}" for value, ranks in others]
            title = f"collective #{number}" if name == "op" else f"{one.op} #{number}"
            return few[1][0], f"{title} ({one.label}): {', '.join(parts)}"
    text = next(filter(None, (_misfit(calls, rank) for rank in calls)), "")
    return int(text.split()[1]), f"{one.op} #{number} ({one.label}): {text}"


def _alike(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows of ranks that call the same, as one."""
    by_call: dict[tuple[str, ...], list[int]] = {}
    for rank, *call in rows:
        by_call.setdefault(tuple(call), []).append(int(rank))
    return [(rank_label(ranks).split(" ", 1)[1], *call) for call, ranks in by_call.items()]
