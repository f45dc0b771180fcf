"""The notebook's side of the ranks: run a call on them, find out where they stand, stop them (private)."""

from __future__ import annotations

import contextlib
import errno
import linecache
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait

from . import errors
from ._interrupts import Interrupts, ignored
from ._output import Merger
from ._processes import Worker, learner_line, start_server, wait_for_end

_GRACE = 0.3  # seconds between the first failure and asking the others where they stand
_CONNECTION_GRACE = 1.0  # the same when the failure only says that another rank has gone
_ANSWER = 0.5  # seconds a rank has to say where it stands
_DEAF = ("no answer", "starting")  # phases from which a rank does not come back when it is aborted
_RETURN = 1.5  # seconds an aborted rank has to come back before it is killed


@dataclass
class Call:
    """What to run: a pickled call, or the source of a ``%%ranks`` cell (then ``cell`` is its label)."""

    body: bytes
    world_size: int
    backend: str
    timeout: float
    init: bool = True
    cell: str | None = None
    ranks: list[int] | None = None
    show: Callable[[str | dict], None] = print
    failures: dict[int, dict] = field(default_factory=dict)
    results: dict[int, bytes] = field(default_factory=dict)
    books: dict[int, tuple] = field(default_factory=dict)


class Pool:
    """Ranks kept warm between calls. Only one call at a time."""

    def __init__(self):
        self.workers: dict[int, Worker] = {}
        self.generation = 0
        self.group: tuple | None = None  # what the ranks' process group was made for; None: make it anew
        self.backend = ""
        self.port = 0
        self.calls = 0
        self.pid = os.getpid()
        self._busy = threading.Lock()
        self._interrupts = Interrupts()

    def run(self, call: Call) -> list:
        """Run a call on its ranks and return the results by rank."""
        if self.pid != os.getpid():
            raise errors.refusal(
                RuntimeError, "this process is a fork of the notebook; start ranks from the notebook itself"
            )
        if not self._busy.acquire(blocking=False):
            raise errors.refusal(
                RuntimeError, "another launch is running on the ranks; wait until it ends or interrupt it"
            )
        try:
            with self._interrupts.taken():
                return self._run(call)
        except (errors.WorkerError, errors.Interrupted):
            raise
        except KeyboardInterrupt:
            with ignored():
                self.close()  # interrupted while ranks were started, or twice: start afresh next time
            raise errors.Interrupted([]) from None
        except BaseException:
            self.close()
            raise
        finally:
            self._busy.release()

    def stop(self) -> None:
        """Stop all ranks, unless they are running something."""
        if not self._busy.acquire(blocking=False):
            raise errors.refusal(RuntimeError, "the ranks are running something; interrupt it first")
        try:
            self.close()
        finally:
            self._busy.release()

    def close(self) -> None:
        """Stop all ranks."""
        if self.pid != os.getpid():
            return  # a fork of the notebook: the ranks are not its own
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()
        self.group = None

    # ------------------------------------------------------------------------------------------------- start and send

    def _run(self, call: Call) -> list:
        ranks = call.ranks if call.ranks is not None else list(range(call.world_size))
        wanted = (call.world_size, call.backend, call.init)
        if self.backend != call.backend:
            self.close()  # a process that has seen no GPU cannot see one later
            self.backend = call.backend
        listener = self._start_missing(call.world_size)
        if self.group != wanted:
            self.generation += 1
            self.group = wanted
            if call.ranks is not None and len(ranks) < call.world_size:  # the group needs everybody
                everybody = Call(b"", call.world_size, call.backend, call.timeout, cell="", show=call.show)
                with self._interrupts.at_once(False):
                    self._send(everybody, list(range(call.world_size)), listener)
                    self._collect(everybody, list(range(call.world_size)))
                listener = None
        with self._interrupts.at_once(False):
            self._send(call, ranks, listener)
            self._collect(call, ranks)
        self._interrupts.check()
        return [self._load(rank, call.results[rank]) for rank in ranks]

    def _start_missing(self, world_size: int) -> socket.socket | None:
        """Make sure that ranks 0 … world_size-1 live; a socket for rank 0 to serve the store on, if it is new."""
        try:
            server = start_server()
            gone = [r for r, w in self.workers.items() if w.server != server or wait([w.process.sentinel], 0)]
            for rank in gone:
                self.workers.pop(rank).close()
            missing = [rank for rank in range(world_size) if rank not in self.workers]
            if missing or gone:
                self.group = None
            for rank in missing:
                self.workers[rank] = Worker(rank)
        except (EOFError, ConnectionError, AuthenticationError):
            text = "the process that ranks are forked from did not start; run `python -m course_utils.workshop doctor`"
            raise errors.refusal(RuntimeError, text) from None
        except OSError as error:
            text = f"the ranks cannot be started: {error.strerror or error}"
            if error.errno == errno.ENOSPC:
                text += " in the temporary folder. Free some space, or set TMPDIR to a folder on another disk."
            raise errors.refusal(RuntimeError, text) from None
        listener = None
        if 0 in missing:
            listener = socket.create_server(("127.0.0.1", 0), backlog=512)
            self.port = listener.getsockname()[1]
        return listener

    def _send(self, call: Call, ranks: list[int], listener: socket.socket | None) -> None:
        self.calls += 1
        place = (dict(os.environ), os.getcwd(), list(sys.path))
        cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
        for rank in ranks:
            worker = self.workers[rank]
            header = {
                "call": self.calls, "world_size": call.world_size, "backend": call.backend, "init": call.init,
                "generation": self.generation, "port": self.port, "cell": call.cell is not None, "filename": call.cell,
                "listen": rank == 0 and listener is not None, "place": place if worker.place != place else None,
                "sources": {name: entry for name, entry in cells.items() if worker.sources.get(name) is not entry},
            }  # fmt: skip
            worker.place = place
            worker.sources = cells
            worker.deliver(header, call.body, listener if header["listen"] else None)

    # --------------------------------------------------------------------------------------------------------- collect

    def _collect(self, call: Call, ranks: list[int]) -> None:
        """Wait for all replies while showing what ranks print. Raises what the contract says."""
        merger = Merger(ranks, call.show)
        pending = set(ranks)
        deadline = time.monotonic() + call.timeout
        try:
            while pending or any(merger.is_open(rank) for rank in ranks):
                now = time.monotonic()
                stop = min(deadline, self._patience(call)) if pending else now + _ANSWER
                if pending and now >= stop:
                    break
                if not self._listen(call, merger, pending, stop - now) and not pending:
                    break
                merger.flush()
            interrupted = False
        except KeyboardInterrupt:
            interrupted, self._interrupts.count = True, 0
        if interrupted or pending or call.failures:
            with ignored():
                standings = self._where(call, ranks, pending)
                hung = not call.failures
                self._stop(call, merger, pending, {r for r in pending if standings[r]["phase"] in _DEAF})
            if interrupted:
                raise errors.Interrupted(errors.state_table(standings))
            if hung:
                rank, fault = errors.likely_fault(standings)
                raise errors.HangError(rank, call.timeout, fault, errors.state_table(standings))
            raise self._first_cause(call, standings)
        self._close_books(call)
        for rank in ranks:
            merger.close(rank)
        merger.flush()

    def _patience(self, call: Call) -> float:
        """Until when to wait for the others once a rank has failed."""
        if not call.failures:
            return float("inf")
        only_echoes = all(failure["connection"] for failure in call.failures.values())
        return min(f["seen"] for f in call.failures.values()) + (_CONNECTION_GRACE if only_echoes else _GRACE)

    def _listen(self, call: Call, merger: Merger, pending: set[int], timeout: float) -> bool:
        """Handle whatever arrives within ``timeout`` seconds; False if nothing did."""
        sources: dict = {}
        for rank in merger.ranks:
            worker = self.workers[rank]
            if rank in pending:
                sources[worker.task] = sources[worker.process.sentinel] = rank
            if worker.output_open:
                sources[worker.output] = rank
        with self._interrupts.at_once(True):
            ready = wait(list(sources), max(timeout, 0))
        for source in ready:
            rank = sources[source]
            if isinstance(source, Connection) and source is self.workers[rank].output:
                self._read_output(rank, merger)
        for source in ready:
            rank = sources[source]
            if source is self.workers[rank].task and rank in pending:
                self._read_reply(call, rank, pending)
        for source in ready:
            rank = sources[source]
            if source == self.workers[rank].process.sentinel and rank in pending:
                self._bury(call, rank, merger, pending)
        return bool(ready)

    def _read_output(self, rank: int, merger: Merger) -> None:
        worker = self.workers[rank]
        data = os.read(worker.output.fileno(), 1 << 16)
        if data:
            merger.feed(rank, data, self.calls)
        else:
            worker.output_open = False
            merger.close(rank)

    def _read_reply(self, call: Call, rank: int, pending: set[int]) -> None:
        try:
            kind, number, content, *books = self.workers[rank].task.recv()
        except (EOFError, OSError):
            return  # it has died: its sentinel says how
        if number != self.calls:
            return
        pending.discard(rank)
        if kind == "done":
            call.results[rank] = content
            call.books[rank] = books[0]
        else:
            call.failures[rank] = content | {"seen": time.monotonic()}

    def _bury(self, call: Call, rank: int, merger: Merger, pending: set[int]) -> None:
        """A rank has died: keep what it said last, and how it ended."""
        worker = self.workers[rank]
        while worker.task.poll(0) and rank in pending:
            before = set(pending)
            self._read_reply(call, rank, pending)
            if pending == before:
                break
        while worker.output_open and wait([worker.output], 0):
            self._read_output(rank, merger)
        merger.close(rank)
        worker.output_open = False
        if rank in pending:
            pending.discard(rank)
            worker.process.join(0.2)
            last, line = worker.last_operation(), worker.fatal_frame()
            code = worker.process.exitcode
            if code == 255 and wait_for_end(worker.server):
                code = None  # no status: whoever collects it has gone
            if line is None and code == -signal.SIGABRT and last and last["where"]:
                line = learner_line(*last["where"])
            call.failures[rank] = {
                "death": code, "connection": False, "time": 0.0, "seen": time.monotonic(),
                "last": last, "line": line, "said": merger.fatal.get(rank, ""),
            }  # fmt: skip

    # ------------------------------------------------------------------------------------------------- stand and stop

    def _where(self, call: Call, ranks: list[int], pending: set[int]) -> dict[int, dict]:
        """Where each rank stands, by asking those that still run."""
        standings: dict[int, dict] = {}
        for rank in pending:
            with contextlib.suppress(OSError):
                while self.workers[rank].control.poll(0):
                    self.workers[rank].control.recv()
                self.workers[rank].control.send("where")
        deadline = time.monotonic() + _ANSWER
        for rank in sorted(pending):
            with contextlib.suppress(OSError, EOFError):
                if self.workers[rank].control.poll(max(0.0, deadline - time.monotonic())):
                    standings[rank] = self.workers[rank].control.recv()
        silent = [rank for rank in pending if rank not in standings]
        for rank in silent:  # it holds the interpreter lock: its fault handler can still tell the line
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank].pid, signal.SIGUSR1)
        if silent:
            time.sleep(0.1)
        for rank in silent:
            worker = self.workers[rank]
            standings[rank] = {"phase": "no answer", "last": worker.last_operation(), "line": worker.fatal_frame()}
        for rank in ranks:
            if rank in call.failures:
                failure = call.failures[rank]
                standings[rank] = {"phase": "died" if "death" in failure else "failed"} | failure
                if failure["connection"]:  # it was waiting when another rank went
                    standings[rank]["waiting"] = failure["last"]
            elif rank not in standings:
                latest, _, _, last = call.books[rank][0]
                standings[rank] = {"phase": "returned", "last": last, "latest": latest}
        for rank in set(range(call.world_size)).difference(ranks):
            standings[rank] = {"phase": "not in this cell", "last": None}
        return dict(sorted(standings.items()))

    def _stop(self, call: Call, merger: Merger, pending: set[int], silent: set[int]) -> None:
        """Bring the ranks that still run back; kill those that do not come. The group is made anew at the next call."""
        self.group = None
        ranks = merger.ranks
        for rank in ranks:
            while self.workers[rank].output_open and wait([self.workers[rank].output], 0):
                self._read_output(rank, merger)
            merger.close(rank)
        merger.flush()
        for rank in pending:
            with contextlib.suppress(OSError):
                self.workers[rank].control.send(self.calls)  # abort this call
        # What ranks say and print about being stopped is of no interest.
        echo, unseen = Call(b"", call.world_size, call.backend, 0), Merger(ranks, lambda item: None)
        deadline = time.monotonic() + (_RETURN if pending - silent else 0)
        while pending - silent and time.monotonic() < deadline:
            self._listen(echo, unseen, pending, deadline - time.monotonic())
        for rank in pending:
            self.workers[rank].kill()
        for rank in ranks:
            worker = self.workers[rank]
            if wait([worker.process.sentinel], 0):
                self.workers.pop(rank).close()

    def _first_cause(self, call: Call, standings: dict[int, dict]) -> errors.WorkerError:
        def order(item: tuple[int, dict]) -> tuple:
            return item[1]["connection"], "death" not in item[1], item[1]["time"], item[0]

        failure = min(call.failures.items(), key=order)[1]
        return errors.worker_error(failure, call.failures, standings)

    def _close_books(self, call: Call) -> None:
        """Make the group anew if ranks called different things, left messages behind, made others or destroyed it."""
        if not all(alive for _, alive in call.books.values()):
            self.group = None
        if call.cell is not None:
            return  # what a cell leaves under way, another may finish
        sent = sum(count for (_, count, _, _), _ in call.books.values())
        received = sum(count for (_, _, count, _), _ in call.books.values())
        entries = [(key, entry) for (latest, *_), _ in call.books.values() for key, entry in latest.items()]
        joined = {(key, entry["number"]): 0 for key, entry in entries}
        for key, entry in entries:
            joined[key, entry["number"]] += 1
        if sent != received or any(joined[key, entry["number"]] != len(entry["ranks"]) for key, entry in entries):
            self.group = None

    def _load(self, rank: int, content: bytes | None):
        if content is None:
            return None
        try:
            return pickle.loads(content)
        except Exception as error:
            text = f"its result cannot be rebuilt in the notebook: {type(error).__name__}: {error}"
            raise errors.WorkerError(rank, text, "", [], f"rank {rank}: {text}") from None
