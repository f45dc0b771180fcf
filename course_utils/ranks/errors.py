"""What a learner reads when ranks fail, hang or are interrupted: the first cause, and where every rank stood."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

from ..units import decimal_bytes
from .call_signature import Difference, Passed, difference, passed
from .labels import align, rank_label

__all__ = ["HangError", "Interrupted", "MismatchError", "WorkerError", "expect_error"]

_WIDTH = 110  # characters of a line of code, with its place, that a table shows
_FRAMES = 8  # of a deep stack that are shown at its beginning and at its end


class _Report:
    """Shown as its own text, without the frames of this package."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]

    def __reduce__(self):
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[BaseException], args: tuple, state: dict) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def refusal(kind: type[Exception], text: str, name: str = "") -> Exception:
    """A built-in exception for bad input, shown to the learner without the frames of this package."""
    return type(name or kind.__name__, (_Report, kind), {"__module__": "builtins"})(text)


class WorkerError(_Report, RuntimeError):
    """A rank raised an exception or died.

    Attributes
    ----------
    rank : int
        The rank that failed first (the lowest, if several failed alike).
    exception : str
        Its error in one line, such as ``ValueError: bad batch`` or ``killed by signal SIGKILL``.
    traceback : str
        The learner's frames.
    states : list of str
        One line a rank: where it stood.
    starting : bool
        Whether it happened before the function began, while the ranks made their process group.
    """

    starting = False

    def __init__(self, rank: int, exception: str, traceback: str, states: list[str], message: str):
        self.rank, self.exception, self.traceback, self.states = rank, exception, traceback, states
        super().__init__(message)


class HangError(WorkerError):
    """The ranks did not finish in time. ``fault`` names the likely cause, ``rank`` the rank to blame.

    ``kind`` is ``"stuck"`` if each rank waits for another in vain, ``"endless"`` if one computes without end, else
    ``"slow"``.
    """

    def __init__(self, rank: int, head: str, fault: str, states: list[str], kind: str = "slow"):
        self.rank, self.exception, self.traceback, self.states = rank, "no result in time", "", states[1:]
        self.fault, self.kind = fault, kind
        RuntimeError.__init__(self, "\n\n".join([head, fault, "\n".join(with_note(states))]))


class MismatchError(WorkerError):
    """Ranks passed different things to one operation (``launch(..., verify=True)``).

    ``exception`` says what differs, ``rank`` is the one that few agree with, ``traceback`` its line, and ``states`` has
    what each rank called. If the ranks are two, either may be wrong.
    """


def with_note(states: list[str]) -> list[str]:
    """A table of ranks, with a line below it that explains its numbers, if there are any."""
    return [*states, _NUMBERS] if any(" #" in row for row in states) else states


_NUMBERS = "# counts all collectives of a group, whatever they are called"


class Interrupted(_Report, KeyboardInterrupt):
    """The learner interrupted the kernel; the ranks were stopped. ``states`` says where they stood."""

    def __init__(self, states: list[str]):
        self.states = states[1:]
        where = " where they stood\n\n" + "\n".join(with_note(states)) if states else ""
        super().__init__(f"the ranks were stopped{where}")


@contextlib.contextmanager
def expect_error(kind: type[BaseException] | tuple[type[BaseException], ...] = WorkerError) -> Iterator[None]:
    """Show the error that the block raises, and fail if it raises none.

    Without `kind` any failure of the ranks is expected: an error, a death or a hang.

    Examples
    --------
    >>> with expect_error(ZeroDivisionError):
    ...     1 / 0
    ZeroDivisionError: division by zero
    """
    try:
        yield
    except kind as error:
        print(f"{type(error).__name__}: {error}")
    else:
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise AssertionError(f"expected {names}, but nothing was raised")


class Attempt:
    """What came of a block: ``error`` is what it raised, or None."""

    error: BaseException | None = None


@contextlib.contextmanager
def attempt() -> Iterator[Attempt]:
    """Show the error that the block raises, if it raises one, and go on.

    Examples
    --------
    >>> with attempt() as outcome:
    ...     1 / 0
    ZeroDivisionError: division by zero
    >>> outcome.error
    ZeroDivisionError('division by zero')
    """
    outcome = Attempt()
    try:
        yield outcome
    except Exception as error:
        outcome.error = error
        print(f"{type(error).__name__}: {error}")


# ----------------------------------------------------------------------------------------------- from evidence to words


def file_label(filename: str) -> str:
    """``cell [5]`` for a notebook cell, else the file's name."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(filename)
    return f"cell [{number}]" if number is not None else os.path.basename(filename)


def line_text(frame: dict | None) -> str:
    if frame is None:
        return ""
    return _cut(f"{file_label(frame['file'])}, line {frame['line']}: {frame['text']}".rstrip(": "))


def _cut(text: str, width: int = _WIDTH) -> str:
    return text if len(text) <= width else f"{text[: width - 2]} …"


def traceback_text(failure: dict) -> str:
    """The learner's frames of a failure, oldest first, and the library function that raised, if it was one."""
    frames = failure["frames"]
    shown = _folded([
        f"  {file_label(f['file'])}, line {f['line']}, in {f['function']}\n      {_cut(f['text'])}".rstrip()
        for f in frames
        if f["learner"]
    ])
    if frames and "site-packages" in frames[-1]["file"]:
        module = frames[-1]["file"].rpartition("site-packages" + os.sep)[2].removesuffix(".py").replace(os.sep, ".")
        shown.append(f"  raised in {module}.{frames[-1]['function']}")
    if failure["cause"]:
        shown.append(f"  after {failure['cause']}")
    return "\n".join(shown)


def _folded(frames: list[str]) -> list[str]:
    """Frames in which one that repeats stands once, and of a deep stack the beginning and the end."""
    shown: list[str] = []
    for frame, repeated in itertools.groupby(frames):
        count = len(list(repeated))
        shown += [frame] if count == 1 else [frame, f"  … {count - 1:,} more times"]
    left_out = len(shown) - 2 * _FRAMES
    return shown if left_out <= 1 else [*shown[:_FRAMES], f"  … {left_out:,} more frames", *shown[-_FRAMES:]]


def operation_text(entry: dict | None) -> str:
    """An operation in words: ``all_reduce #3 (default, 4 kB)``: its number among the group's, the group, the size."""
    if entry is None:
        return "none"
    size = f", {decimal_bytes(entry['bytes'])}" if entry["op"] != "barrier" else ""
    if entry["op"] == "send":
        return f"send to rank {entry['peer']} ({size[2:]})"
    if entry["op"] == "recv":
        source = "any rank" if entry["peer"] is None else f"rank {entry['peer']}"
        return f"recv from {source} ({size[2:]})"
    return f"{entry['op']} #{entry['number']} ({entry['group']}{size})"


def death_text(code: int | str) -> str:
    """How a process ended: its exit code, or a text where that is not known, as of a node that has gone."""
    if isinstance(code, str):
        return code
    if code >= 0:
        return f"the process ended itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"number {-code}"
    hint = {"SIGKILL": " (by hand, or by the system when memory runs out)", "SIGSEGV": " (invalid memory access)",
            "SIGABRT": " (a C++ library gave up)"}.get(name, "")
    return f"killed by signal {name}{hint}"


def worker_error(failure: dict, failures: dict[int, dict], standings: dict[int, dict]) -> WorkerError:
    """The error for the failure that came first; ranks that failed alike are named together."""
    states = state_table(standings)
    if "death" in failure:
        alike = [rank for rank, other in failures.items() if other is failure]
        text, traceback = death_text(failure["death"]), ""
        said = f"It said: {failure['said']}" if failure["said"] else ""
        advice = "\n".join(part for part in (said, mismatch(failure["last"], standings)) if part)
        parts = [f"rank {alike[0]}{_on_hosts(alike[:1], standings)} died: {text}", advice]
    else:
        same = failure["text"], failure["line"]
        alike = sorted(rank for rank, other in failures.items() if (other.get("text"), other["line"]) == same)
        text, traceback = failure["text"], traceback_text(failure)
        advice = _advice(text, failure["last"], alike[0])
        parts = [f"{rank_label(alike)}{_on_hosts(alike, standings)} failed: {text}", advice, traceback]
    elsewhere = [s for rank, s in standings.items() if rank not in alike and s["phase"] != "not in this cell"]
    parts += ["\n".join(with_note(states))] if elsewhere else []
    error = WorkerError(alike[0], text, traceback, states[1:], "\n\n".join(part for part in parts if part))
    error.starting = failure.get("starting", False)
    return error


def _on_hosts(ranks: list[int], standings: dict[int, dict]) -> str:
    """On which emulated hosts ranks are; nothing without such hosts."""
    hosts = dict.fromkeys(host for rank in ranks if (host := standings.get(rank, {}).get("host")))
    return f" on {' and '.join(hosts)}" if hosts else ""


def _advice(text: str, last: dict | None, rank: int) -> str:
    """What to do about an error, after the `last` operation of a rank, whose own words do not say it."""
    if "Pair is not connected" in text and last and last["op"] in ("send", "recv") and last["peer"] == rank:
        return "A rank cannot send to itself, or receive from itself."
    if "No space left on device" in text and shutil.disk_usage(tempfile.gettempdir()).free < 1 << 16:
        full = f"There is no room left in the temporary folder {tempfile.gettempdir()}"
        return f"{full}: free some space, or set TMPDIR to a folder on another disk."
    if "alltoall" in text:
        return "With verify=True launch says which rank sends to another what that one does not expect."
    if named := re.search(r"Unable to find address for: (\S+)", text):
        return f"GLOO_SOCKET_IFNAME is {named[1]!r}, which names no interface of this machine that is up."
    return ""


def silent_difference(calls: dict[int, list[Passed]]) -> str:
    """The first collective that ranks of a group have called differently although the library did not complain."""
    calls = dict(sorted(calls.items()))
    if fault := groups_apart({rank: [call.op for call in made] for rank, made in calls.items()}):
        return fault[1]
    for number, together in enumerate(zip(*calls.values(), strict=False), 1):
        if apart := difference(dict(zip(calls, together, strict=True))):
            text = "; ".join(f"{rank_label(some)} {value}" for value, some in apart.values().items())
            name = f"collective number {number}" if apart.field == "op" else f"{together[0].op} number {number}"
            how = f"the ranks called {name} with different {apart.plural} ({text})"
            return f"{how}, and nothing noticed: the result is wrong."
    return ""


def mismatch(last: dict | None, standings: dict[int, dict]) -> str:
    """Advice when a rank died in a collective that others call with another size; else nothing."""
    if last is None or last["op"] in ("send", "recv"):
        return ""
    calls = {
        rank: entry
        for rank, s in standings.items()
        if (entry := s.get("waiting") or s.get("last"))
        and all(entry[what] == last[what] for what in ("op", "number", "group"))
    }
    if not (apart := entries_apart(calls)):
        return ""
    return f"Likely fault: {last['op']} number {last['number']} was called with different {apart.by_rank()}."


def entries_apart(entries: dict[int, dict]) -> Difference | None:
    """What ranks have passed differently to one collective, as far as their last entries tell."""
    return difference({
        rank: passed(entry["op"], "", entry["peer"], entry["dtype"], entry["bytes"]) for rank, entry in entries.items()
    })


def groups_apart(made: dict[int, list[str]]) -> tuple[int, str] | None:
    """The first group that ranks have not made alike: a rank that few agree with, and a sentence."""
    for number, together in enumerate(itertools.zip_longest(*made.values()), 1):
        values: dict[str, list[int]] = {}
        for rank, call in zip(made, together, strict=True):
            if call is not None:
                values.setdefault(call, []).append(rank)
        if len(values) > 1 and all(call.startswith("new_group") for call in values):
            said = "; ".join(f"{rank_label(ranks)} {call}" for call, ranks in values.items())
            text = (f"The ranks make different groups as number {number}: {said}. All ranks must make all groups, in "
                    "one order, also those that they are not in.")
            return Difference("op", values).odd, text
    return None


def state_table(standings: dict[int, dict]) -> list[str]:
    """A head, then one line a rank: state, last operation, line. Beyond 8, ranks that stand alike share a line."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, standing in standings.items():
        waiting = standing.get("waiting")
        state = (
            "waits" if waiting else {"running": "runs", "starting": "starts"}.get(standing["phase"], standing["phase"])
        )
        last = standing.get("meeting") or operation_text(waiting or standing.get("last"))
        row = (standing.get("host", ""), state, last, line_text(standing.get("line")))
        rows.setdefault(row if len(standings) > 8 else (*row, str(rank)), []).append(rank)
    head = ("rank", "host", "state", "last operation", "line")
    table = [head, *((rank_label(ranks).split(" ", 1)[1], *row[:4]) for row, ranks in rows.items())]
    if not any(row[1] for row in table[1:]):
        table = [(row[0], *row[2:]) for row in table]
    return align(table).split("\n")
