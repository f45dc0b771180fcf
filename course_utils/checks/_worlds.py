"""Worlds of ranks that write one checkpoint folder: processes that pause or die at any one of their file operations.

An audit hook sees each operation on the folder just before it happens. So one world can be stopped at every dangerous
moment in turn while another one runs, whatever way an answer uses; no clock decides what comes first. A limit on the
size of files ends a world in the middle of a write.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from ..ranks import is_learner

__all__ = ["Finding", "examine", "state_of"]

OPERATIONS = 400  # in one call; right answers need some ten
PATIENCE = 20.0  # seconds by the clock for one call, which takes milliseconds
ROUNDS = 12  # in which four worlds start at the same time
_DAY = 86_400
_EVENTS = ("open", "os.", "shutil.", "glob.", "pathlib.", "tempfile.")  # audit events begin so


class Finding(Exception):
    """What is wrong with an answer: the key of a hint, the case, and a sentence with its evidence below."""

    def __init__(self, key: str, case: str, what: str):
        super().__init__(key, case, what)
        self.key, self.case, self.what = key, case, what


@dataclass(frozen=True)
class Reply:
    """What came of a call: ``opened``, ``saved``, ``refused`` (RuntimeError), ``loaded``, ``error``, ``form``,
    ``paused`` (before an operation), ``dead``, ``locks``, ``waits``."""

    kind: str
    value: Any = None

    def __str__(self) -> str:
        texts = {
            "opened": "it opened the store", "saved": "save returned", "refused": "save raised RuntimeError",
            "dead": "its process ended", "locks": f"it called {self.value}", "waits": "it does not come to an end",
            "error": f"it failed: {self.value}", "form": f"it returned {self.value}",
        }
        if self.kind == "loaded":
            return "load returned None" if self.value is None else f"load returned step {self.value[0]}"
        return texts.get(self.kind, self.kind)


def state_of(world: str, step: int) -> bytes:
    """The state that a world has after a step: 60 kB or so, of which every part says whose it is."""
    return b"".join(f"world {world}, step {step}, part {part}\n".encode() for part in range(2000))


# ------------------------------------------------------------------------------------------------ one world


class _Hook:
    """Sees the file operations of this process; pauses or kills it before one of them."""

    def __init__(self, pipe: Connection):
        self.pipe, self.pid = pipe, os.getpid()
        self.folder, self.count, self.stop, self.kills, self.armed = "", 0, 0, False, False

    def __call__(self, event: str, args: tuple) -> None:
        if not self.armed:
            return
        if event in ("fcntl.flock", "fcntl.lockf"):
            self._end(Reply("locks", event))
        if not event.startswith(_EVENTS) or not self._in_folder(event, args):
            return
        self.count += 1
        if self.count > OPERATIONS:
            self._end(Reply("waits"))
        if self.count == self.stop:
            if self.kills:
                os.kill(self.pid, signal.SIGKILL)
            self.armed = False
            self.pipe.send(Reply("paused", event))
            self.pipe.recv()
            self.armed = True

    def _in_folder(self, event: str, args: tuple) -> bool:
        named = args[:1] if event == "open" else args  # its second argument is the mode
        paths = [os.fsdecode(arg) for arg in named if isinstance(arg, str | bytes | os.PathLike)]
        return any(not os.path.isabs(path) or path.startswith(self.folder) for path in paths)

    def _end(self, reply: Reply) -> NoReturn:
        self.armed = False
        self.pipe.send(reply)
        os._exit(1)


def _serve(pipe: Connection, fn: Callable, circumstance: str) -> None:
    """Do what the driver asks for until it hangs up."""
    hook = _Hook(pipe)
    sys.addaudithook(hook)
    if circumstance == "clock":
        behind, now = _DAY, time.time
        time.time = lambda: now() - behind
        time.time_ns = lambda: int(1e9 * (now() - behind))
    elif circumstance == "same names":
        _same_names()
    save = load = None
    while True:
        try:
            command, args, hook.stop, hook.kills, largest = pipe.recv()
        except EOFError:
            os._exit(0)
        if largest:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        hook.count = 0
        try:
            if command == "open":
                hook.folder = os.fspath(args[0])
                hook.armed = True
                got = fn(*args)
                hook.armed = False
                if isinstance(got, tuple | list) and len(got) == 2 and all(map(callable, got)):
                    save, load = got
                    reply = Reply("opened")
                else:
                    reply = Reply("form", f"{type(got).__name__} and not two functions")
            else:
                hook.armed = True
                got = (save if command == "save" else load)(*args)
                hook.armed = False
                reply = Reply("saved") if command == "save" else _loaded(got)
        except BaseException as error:
            hook.armed = False
            reply = _failed(error, command)
        pipe.send(reply)


def _same_names() -> None:
    """As in two containers: the same host name, and the program is process 1."""
    import platform
    import socket

    os.getpid = lambda: 1  # type: ignore[assignment]
    socket.gethostname = platform.node = lambda: "worker-0"  # type: ignore[assignment]
    os.uname = lambda: os.uname_result(("Linux", "worker-0", "", "", ""))  # type: ignore[assignment]


def _loaded(got: Any) -> Reply:
    if got is None:
        return Reply("loaded")
    pair = isinstance(got, tuple | list) and len(got) == 2 and isinstance(got[0], int)
    if pair and isinstance(got[1], bytes | bytearray | memoryview):
        return Reply("loaded", (int(got[0]), bytes(got[1])))
    inside = f" of {', '.join(type(part).__name__ for part in got)}" if isinstance(got, tuple | list) else ""
    return Reply("form", f"{type(got).__name__}{inside} from load")


def _failed(error: BaseException, command: str) -> Reply:
    if command == "save" and isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
        return Reply("refused", str(error))
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_learner(frame.filename)]
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return Reply("error", f"{text}\n\n{''.join(traceback.format_list(own[-1:]))}{text}")


class World:
    """A world of ranks, of which rank 0 has a process here.

    Parameters
    ----------
    name : str
        Goes into its states.
    pid, pipe
        Of the process, which `_start` has made.
    """

    def __init__(self, name: str, pid: int, pipe: Connection, behind: bool):
        self.name, self.pid, self.pipe, self.behind, self.folder = name, pid, pipe, behind, Path()
        self.seen: dict[Path, int] = {}

    def ask(self, command: str, *args: Any, pause: int = 0, kill: int = 0, largest: int = 0) -> Reply:
        """Have a call made; ``pause`` or ``kill`` is the number of the operation before which that happens."""
        self.tell(command, *args, pause=pause, kill=kill, largest=largest)
        return self.answer()

    def tell(self, command: str, *args: Any, pause: int = 0, kill: int = 0, largest: int = 0) -> None:
        if self.behind:
            self.seen = self._times()
        self.pipe.send((command, args, pause or kill, bool(kill), largest))

    def go_on(self) -> Reply:
        self.pipe.send(None)
        return self.answer()

    def answer(self) -> Reply:
        try:
            reply = self.pipe.recv() if self.pipe.poll(PATIENCE) else Reply("waits")
        except EOFError:
            reply = Reply("dead")
        if self.behind:
            self._set_times_back()
        return reply

    def open(self, folder: Path, **stop: int) -> Reply:
        self.folder = folder
        return self.ask("open", folder, **stop)

    def save(self, step: int, **stop: int) -> Reply:
        return self.ask("save", step, state_of(self.name, step), **stop)

    def load(self, **stop: int) -> Reply:
        return self.ask("load", **stop)

    def _times(self) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in self.folder.rglob("*")}

    def _set_times_back(self) -> None:
        """What this world has just written bears the time of its host, whose clock is a day behind."""
        for path, changed in self._times().items():
            if self.seen.get(path) != changed:
                os.utime(path, (time.time() - _DAY,) * 2)

    def end(self) -> None:
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@contextlib.contextmanager
def _worlds(fn: Callable, names: str, circumstance: str = "") -> Iterator[tuple[Path, ...]]:
    """A folder, and worlds with these names. The first has the largest process id, except where all have the same."""
    made: list[tuple[int, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="store-") as folder:
        try:
            for number in range(len(names)):
                made.append(_start(fn, circumstance if circumstance != "clock" or number else ""))
            made.sort(reverse=circumstance == "falling")
            behind = [circumstance == "clock" and number > 0 for number in range(len(names))]
            worlds = [World(name, *each, late) for name, each, late in zip(names, made, behind, strict=True)]
            yield (Path(os.path.realpath(folder)), *worlds)  # type: ignore[misc]
        finally:
            for pid, pipe in made:
                World("", pid, pipe, False).end()


def _start(fn: Callable, circumstance: str) -> tuple[int, Connection]:
    ours, theirs = Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the ranks' other threads do nothing that a world needs
        pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            _serve(theirs, fn, circumstance)
        finally:
            os._exit(1)
    theirs.close()
    return pid, ours


# ------------------------------------------------------------------------------------------------ what must hold


def examine(fn: Callable) -> tuple[str, str, str] | None:
    """The first thing that is wrong with ``fn(folder) -> (save, load)``: hint, case, sentence; None if nothing is."""
    try:
        _one_world(fn)
        _second_world(fn)
        _two_worlds(fn, "")
        _two_worlds(fn, "falling")
        _two_worlds(fn, "same names")
        _two_worlds(fn, "clock")
        _at_the_same_time(fn)
        _race(fn)
        _late_save(fn, last=7, late=6)
        _late_save(fn, last=6, late=9)
        _late_new_world(fn)
        _killed(fn)
    except Finding as finding:
        return finding.key, finding.case, finding.what
    return None


def _expect(reply: Reply, kinds: Sequence[str] | str, key: str, case: str, who: str) -> Reply:
    """``reply`` if it is of these kinds; else the finding ``key``, or one that tells more."""
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if reply.kind in kinds:
        return reply
    special = {"locks": "locks", "waits": "waits", "form": "form"}
    what, *evidence = str(reply).split("\n\n", 1)
    raise Finding(special.get(reply.kind, key), case, "\n\n".join([f"{who}: {what.rstrip('.')}.", *evidence]))


def _expect_state(reply: Reply, allowed: Sequence[tuple[str, int]], key: str, case: str, who: str) -> tuple[str, int]:
    """Which of the allowed states, given by world and step, ``load`` brought; ``key`` is the finding for another."""
    _expect(reply, "loaded", key, case, who)
    names = " or ".join(f"step {step} of world {world}" for world, step in allowed)
    if reply.value is None:
        raise Finding("lost" if key == "not-loaded" else key, case, f"{who} finds nothing; {names} was saved.")
    step, state = reply.value
    for world, saved in allowed:
        if (step, state) == (saved, state_of(world, saved)):
            return world, saved
    whole = [(w, s) for w in "ABCD" for s in range(20) if state_of(w, s) == state]
    if not whole:
        raise Finding("partial", case, f"{who} gets {len(state):,} bytes, which are not a whole state.")
    world, saved = whole[0]
    told = "" if saved == step else f", called step {step}"
    raise Finding(key, case, f"{who} gets step {saved} of world {world}{told}; expected is {names}.")


def _one_world(fn: Callable) -> None:
    case = "one world"
    with _worlds(fn, "A") as (folder, a):
        _expect(a.open(folder), "opened", "error", case, "the first world opens the store")
        empty = _expect(a.load(), "loaded", "error", case, "load in an empty folder")
        if empty.value is not None:
            raise Finding("form", case, f"in an empty folder {empty}; None is expected.")
        for step in (1, 2, 10):
            _expect(a.save(step), "saved", "error", case, f"save of step {step}")
            _expect_state(a.load(), [("A", step)], "not-loaded", case, f"load after step {step} was saved")


def _second_world(fn: Callable) -> None:
    case = "world A ends, B starts and ends without a save, C starts"
    with _worlds(fn, "ABC") as (folder, a, b, c):
        for world in (a, b, c):
            _expect(world.open(folder), "opened", "error", case, f"world {world.name} opens the store")
            if world is a:
                _expect(a.save(4), "saved", "error", case, "A saves step 4")
            _expect_state(world.load(), [("A", 4)], "lost", case, f"world {world.name}")
        _expect(c.save(5), "saved", "newer-refused", case, "C, the newest, saves step 5")
        _expect_state(c.load(), [("C", 5)], "lost", case, "world C")


_TWO = {
    "": ("", "world A runs, B starts"),
    "falling": ("name", "world A runs, B starts and has the smaller process id"),
    "same names": ("name", "world A runs, B starts; both have the same host name and process id, as in containers"),
    "clock": ("clock", "world A runs, B starts; the clock of B's host is a day behind"),
}


def _two_worlds(fn: Callable, circumstance: str) -> None:
    """The older one is refused, with a save of the newer before and without; what the newer saved stays."""
    own, case = _TWO[circumstance]
    with _worlds(fn, "ABC", circumstance) as (folder, a, b, c):
        _expect(a.open(folder), "opened", own or "error", case, "A opens the store")
        _expect(a.save(1), "saved", own or "error", case, "A saves step 1")
        _expect(b.open(folder), "opened", own or "error", case, "B opens the store")
        first = a.save(2)
        _expect_state(b.load(), [("A", 1), ("A", 2)], own or "lost", case, "world B")
        _expect(b.save(3), "saved", own or "newer-refused", case, "B, the newer, saves step 3")
        second = a.save(9)
        _expect_state(b.load(), [("B", 3)], own or "not-fenced", case, "B loads after A has tried to save step 9, and")
        for when, reply in (("B has saved step 3", second), ("B has started, and not saved yet", first)):
            key = "goes-on" if reply is second else "not-yet-saved"
            _expect(reply, "refused", own or key, case, f"A saves when {when}")
        _expect(c.open(folder), "opened", own or "error", case, "C opens the store")
        _expect_state(c.load(), [("B", 3)], own or "not-fenced", case, "world C")


def _who_may_save(worlds: Sequence[World], case: str) -> World:
    """The one world that may save step 5; the others are refused."""
    able = list(worlds)
    for step in (5, 6):
        replies = [_expect(w.save(step), ("saved", "refused"), "leftover", case, f"{w.name} saves") for w in able]
        able = [world for world, reply in zip(able, replies, strict=True) if reply.kind == "saved"]
    if len(able) != 1:
        names = ", ".join(world.name for world in able) or "none of them"
        raise Finding("equal", case, f"of {len(worlds)} worlds {names} may save.")
    return able[0]


def _at_the_same_time(fn: Callable) -> None:
    """A world pauses at each operation of its start, and another one starts meanwhile."""
    for moment in range(1, OPERATIONS):
        with _worlds(fn, "AB") as (folder, a, b):
            paused = a.open(folder, pause=moment)
            if paused.kind == "opened":
                return
            _expect(paused, "paused", "error", "a world starts", "A opens the store")
            case = f"A starts and pauses before {paused.value}, B starts, A goes on"
            _expect(b.open(folder), "opened", "start-fails", case, "B opens the store")
            _expect(a.go_on(), "opened", "start-fails", case, "A opens the store")
            winner = _who_may_save((b, a), case)
            _expect_state(winner.load(), [(winner.name, 6)], "equal", case, f"{winner.name}, which may save,")


def _race(fn: Callable) -> None:
    case = "four worlds start at the same time"
    with _worlds(fn, "ABCD") as (folder, *worlds):
        for number in range(ROUNDS):
            place = folder / str(number)
            place.mkdir()
            for world in worlds:
                world.tell("open", place)
            for world in worlds:
                _expect(world.answer(), "opened", "start-fails", case, f"{world.name} opens the store")
            _who_may_save(worlds, case)


def _late_save(fn: Callable, last: int, late: int) -> None:
    """A world pauses at each operation of a save; the next one starts, saves and ends before it goes on."""
    key = "check-then-write" if late < last else "largest-step"
    for moment in range(1, OPERATIONS):
        with _worlds(fn, "ABC") as (folder, a, b, c):
            for reply in (a.open(folder), a.save(5)):
                _expect(reply, ("opened", "saved"), "error", "one world", "A")
            paused = a.save(late, pause=moment)
            if paused.kind == "saved":
                return
            case = f"A pauses in save({late}) before {paused.value}, B saves step {last}, A goes on"
            _expect(paused, "paused", "error", case, "A")
            _expect(b.open(folder), "opened", "shared-name", case, "B opens the store")
            _expect_state(b.load(), [("A", 5), ("A", late)], "in-between", case, "B")
            _expect(b.save(last), "saved", "shared-name", case, f"B saves step {last}")
            _expect_state(b.load(), [("B", last)], key, case, "B")
            _expect(a.go_on(), ("saved", "refused"), "shared-name", case, "A")
            _expect(c.open(folder), "opened", "shared-name", case, "C opens the store")
            _expect_state(c.load(), [("B", last)], key, case, "C, which starts then,")
            _expect(a.save(late + 1), "refused", "goes-on", case, "A saves once more")


def _late_new_world(fn: Callable) -> None:
    """The newer world pauses at each operation of its first save, and the older one tries to save meanwhile."""
    for moment in range(1, OPERATIONS):
        with _worlds(fn, "ABC") as (folder, a, b, c):
            for reply in (a.open(folder), a.save(5), b.open(folder)):
                _expect(reply, ("opened", "saved"), "error", "two worlds", "A or B")
            paused = b.save(6, pause=moment)
            if paused.kind == "saved":
                return
            case = f"B, the newer, pauses in save(6) before {paused.value}, A tries to save step 6, B goes on"
            _expect(paused, "paused", "newer-refused", case, "B")
            _expect(a.save(6), "refused", "goes-on", case, "A saves step 6")
            _expect(b.go_on(), "saved", "shared-name", case, "B")
            _expect(c.open(folder), "opened", "shared-name", case, "C opens the store")
            _expect_state(c.load(), [("B", 6)], "shared-name", case, "C, which starts then,")


def _killed(fn: Callable) -> None:
    """A world dies at each operation of a start or of a save, or in the middle of a write; the next one goes on."""
    size = len(state_of("A", 2))
    for largest in (1, size // 2):
        _killed_once(fn, "save", f"A is killed when it has written {largest:,} bytes of a state", largest=largest)
    for call in ("save", "open"):
        for moment in range(1, OPERATIONS):
            if not _killed_once(fn, call, "A is killed in {call}, before its operation {kill}", kill=moment):
                break


def _killed_once(fn: Callable, call: str, case: str, **stop: int) -> bool:
    """Whether A was killed; B has to go on from what A had saved, and C from what B has."""
    with _worlds(fn, "ABC") as (folder, a, b, c):
        case = case.format(call=call, **stop)
        if call == "open":
            reply = a.open(folder, **stop)
        else:
            for reply in (a.open(folder), a.save(1)):
                _expect(reply, ("opened", "saved"), "error", "one world", "A")
            reply = a.save(2, **stop)
        if reply.kind != "dead":
            return False
        _expect(b.open(folder), "opened", "leftover", case, "B opens the store")
        if call == "save":
            _expect_state(b.load(), [("A", 1), ("A", 2)], "in-between", case, "B")
        else:
            _expect(b.load(), "loaded", "leftover", case, "B")
        _expect(b.save(2), "saved", "leftover", case, "B saves step 2")
        _expect(b.save(3), "saved", "leftover", case, "B saves step 3")
        _expect(c.open(folder), "opened", "leftover", case, "C opens the store")
        _expect_state(c.load(), [("B", 3)], "leftover", case, "C")
    return True
