"""The notebook's side of the ranks: run a call on them, find out where they stand, stop them (private)."""

from __future__ import annotations

import contextlib
import errno
import itertools
import linecache
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from typing import Any

from . import errors, modules, processes, verify
from .channels import FUNCTION, IDLE_SECONDS, Kind
from .collector import Collector
from .interrupts import Interrupts, held_back
from .labels import rank_label
from .processes import Worker, start_server
from .status_line import TICK, Status, can_answer
from .watch import Watch

_group_numbers = itertools.count()


@dataclass
class Call:
    """What to run: a pickled call, or the source of a ``%%ranks`` cell, of which ``label`` is the name."""

    body: bytes
    world_size: int
    backend: str
    timeout: float
    kind: Kind = FUNCTION
    label: str = ""
    ranks: list[int] | None = None
    show: Callable[[str | dict], None] = print
    watch: Watch | None = None
    hosts: Any = None  # the plan of the hosts that the ranks are divided among (see `hosts`)
    verify: bool = False
    post_mortem: bool = False  # let the learner examine a rank that fails
    by_rank: bool = False  # show also what each rank has shown

    @property
    def group(self) -> tuple:
        """What the ranks' process group depends on."""
        return self.world_size, self.backend, self.kind.is_program


class Pool:
    """Ranks kept warm between calls. Only one call at a time."""

    def __init__(self):
        self.workers: dict[int, Worker] = {}
        self.generation = 0
        self.group: tuple | None = None  # what the ranks' process group was made for; None: make it anew
        self.world_size = 0  # of the last group
        self.backend = ""
        self.port = 0
        self.store = ""
        self._old_stores: list[str] = []
        self.calls = 0
        self.pid = os.getpid()
        self.used = 0.0  # when a call ended last
        self.start_limit = 120.0  # seconds that processes have to start
        self.starting = "starting"  # what the ranks are doing then
        self._busy = threading.Lock()
        self._stopped = False  # by another thread, while a call runs
        self._interrupts = Interrupts()

    def run(self, call: Call) -> list:
        """Run a call on its ranks and return the results by rank."""
        if self.pid != os.getpid():
            raise errors.refusal(
                RuntimeError, "this process is a fork of the notebook; start ranks from the notebook itself"
            )
        if not self._busy.acquire(blocking=False):
            raise errors.refusal(
                RuntimeError, "another launch is running on the ranks; wait until it ends, or end it: shutdown()"
            )
        try:
            with self._interrupts.taken():
                return self._run(call)
        except (errors.WorkerError, errors.Interrupted):
            if self._stopped:
                raise errors.refusal(RuntimeError, "shutdown() has ended the ranks of this call") from None
            raise
        except KeyboardInterrupt:
            self.close()  # interrupted while ranks were started, or twice: start afresh next time
            raise errors.Interrupted([]) from None
        except BaseException:
            self.close()
            raise
        finally:
            self.used = time.monotonic()
            self._busy.release()

    def stop(self) -> None:
        """Stop all ranks, also those on which another thread runs something: that call ends with an error."""
        while not self._busy.acquire(timeout=0.1):  # its thread notices that the ranks have ended, and tidies up
            self._stopped = True
            self._kill(list(self.workers.values()))
        try:
            self.close()
        finally:
            self._stopped = False
            self._busy.release()

    def close(self) -> None:
        """Stop all ranks."""
        if self.pid != os.getpid():
            return  # a fork of the notebook: the ranks are not its own
        with held_back():
            self._end(list(self.workers))
            self.group = None

    def _end(self, ranks: list[int]) -> None:
        """End the processes of some ranks; the next call starts new ones."""
        ended = [self.workers.pop(rank) for rank in ranks if rank in self.workers]
        self._kill(ended)
        for worker in ended:
            worker.close()
        if ended:
            self.group = None

    # What follows is different where the processes are on other machines (`on_ray`).

    _server_ids = staticmethod(processes.server_ids)
    _start_server = staticmethod(start_server)
    _give_up_start = staticmethod(processes.end_server)

    def _kill(self, workers: list[Worker]) -> None:
        processes.kill(workers)

    # ------------------------------------------------------------------------------------------------- start and send

    def _run(self, call: Call) -> list:
        ranks = call.ranks if call.ranks is not None else list(range(call.world_size))
        folder = os.getcwd()
        self._end_unfit(call)
        self._start_missing(call)
        if self.group != call.group:
            self.group, self.world_size = call.group, call.world_size
            self._choose_meeting()
            self._make_group(call, ranks, folder)
        results = self._serve(call, ranks, folder)
        self._remove_old_stores()
        self._interrupts.check()
        return [self._load(rank, results[rank]) for rank in ranks]

    def _remove_old_stores(self) -> None:
        """Remove the files of earlier groups, now that no rank has these groups any more.

        Not before: each second a thread of NCCL's looks whether a rank has left word in its group's store, and PyTorch
        waits for a file that is not there. The end of the group waits for that thread.
        """
        for store in self._old_stores:
            with contextlib.suppress(OSError):
                os.unlink(store)
        self._old_stores.clear()

    def _make_group(self, call: Call, ranks: list[int], folder: str) -> None:
        """Make the process group where the call cannot do so itself, because the group needs everybody."""
        if call.ranks is not None and len(ranks) < call.world_size:
            everybody = Call(b"", call.world_size, call.backend, call.timeout, call.kind, show=call.show)
            self._serve(everybody, list(range(call.world_size)), folder)

    def _serve(self, call: Call, ranks: list[int], folder: str) -> dict[int, bytes | None]:
        """Send a call and wait for its end; ranks that must not serve another are ended. Returns pickled results."""
        collector = Collector(call, self.calls + 1, ranks, self.workers, self._interrupts)
        try:
            with self._interrupts.at_once(False):
                self._send(call, ranks, folder)
                collector.wait()
        finally:
            collector.close()
            if not collector.same_group:
                self.group = None
            self._end_lost(call, collector)
        return collector.results

    def _end_lost(self, call: Call, collector: Collector) -> None:
        stuck = call.backend == "nccl" and not collector.same_group and not collector.settled
        lost = set(self.workers) if stuck else collector.lost  # an aborted group of NCCL's may never end
        if lost and call.kind.keeps_names:
            afresh = f"{rank_label(sorted(lost))} {'starts' if len(lost) == 1 else 'start'} afresh"
            call.show(f"{afresh}, without the names of earlier cells\n")
        with held_back():
            self._end(sorted(lost))

    def _end_unfit(self, call: Call) -> None:
        """End ranks that must not serve this call: for another backend, used by a program, about to end, dead."""
        if self.backend != call.backend:
            self.close()  # a process that has seen no GPU cannot see one later
            self.backend = call.backend
        fewer_or_more = call.backend == "nccl" and call.world_size != self.world_size  # not all would end the group
        limit = self._idle_seconds(call)
        idle = time.monotonic() - self.used > limit - min(5.0, limit / 2)  # none is to end just as it is called
        if idle and call.kind.keeps_names and any(worker.ran for worker in self.workers.values()):
            call.show("the ranks had nothing to do for long and have ended: names of earlier cells are gone\n")
        edited = self._edited(call)
        servers = self._server_ids()
        self._end([
            rank for rank, worker in self.workers.items()
            if idle or not worker.alive or worker.server not in servers or edited & worker.files.keys()
            or worker.ran and (fewer_or_more or worker.ran.is_program or call.kind.is_program)
        ])

    def _edited(self, call: Call) -> set[str]:
        """Files of the learner's modules that have been edited since ranks imported them.

        Ranks that keep the names of cells keep such modules too, as a notebook does, and the learner is told.
        """
        files = {path: stamp for worker in self.workers.values() for path, stamp in worker.files.items()}
        edited = modules.edited(files)
        for path in edited:
            modules.forget_bytecode(path)
        if not call.kind.keeps_names:
            return set(edited)
        if names := ", ".join(sorted(os.path.basename(path) for path in edited if files[path])):
            call.show(f"edited since the ranks imported it: {names}; %ranks_reset lets them import it again\n")
        return set()

    @staticmethod
    def _idle_seconds(call: Call) -> float:
        text = os.environ.get("COURSE_IDLE_SECONDS") or str(IDLE_SECONDS)
        if not text.strip().isdigit() or int(text) == 0:
            raise errors.refusal(ValueError, f"COURSE_IDLE_SECONDS is {text!r}; allowed are whole seconds from 1 on")
        return int(text) * call.kind.patience

    def _start_missing(self, call: Call) -> None:
        """Make sure that all ranks live; in a thread, so that an interrupt and a limit can end the wait."""
        missing = [rank for rank in range(call.world_size) if rank not in self.workers]
        if not missing:
            return
        outcome: list[BaseException | None] = []
        finished = threading.Event()  # a thread whose ``join`` was interrupted says that it has ended (Python 3.11)

        def start() -> None:
            try:
                processes.room_for(len(missing))
                self._start_server()
                self._start_workers(call, missing)
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)
            finished.set()

        self.group = None
        status = Status(call.show)
        threading.Thread(target=start, daemon=True).start()
        deadline = time.monotonic() + self.start_limit
        try:
            while not finished.is_set() and time.monotonic() < deadline:
                with self._interrupts.at_once(True):
                    finished.wait(TICK)
                status.update(missing, None, self.starting)
        finally:
            status.erase()
            if not finished.is_set():
                with held_back():
                    self._give_up_start()
                    finished.wait(5.0)
        self._interrupts.check()
        self._tell_start(outcome[0] if outcome else EOFError())

    def _start_workers(self, call: Call, missing: list[int]) -> None:
        for rank in missing:
            self.starting = "starting" if rank > 1 else "importing PyTorch"  # the first two wait for it, one a server
            self.workers[rank] = Worker(rank)

    @staticmethod
    def _tell_start(error: BaseException | None) -> None:
        if error is None:
            return
        if isinstance(error, (EOFError, ConnectionError, AuthenticationError)):
            text = "the process that ranks are forked from did not start; run `python -m tools doctor`"
            raise errors.refusal(RuntimeError, text) from None
        if not isinstance(error, OSError):
            raise error
        text = f"the ranks cannot be started: {error.strerror or error}"
        if error.errno == errno.ENOSPC:
            text += f" in the temporary folder {tempfile.gettempdir()}: free some space, or set TMPDIR to another disk."
        if error.errno == errno.EMFILE:
            text += ". Ask for fewer ranks, or allow more open files: `ulimit -n 4096` in the shell before Jupyter."
        raise errors.refusal(RuntimeError, text) from None

    def _choose_meeting(self) -> None:
        """A new file in which the ranks meet, and a free port for programs that want one of their own."""
        self._old_stores.append(self.store)
        self.generation += 1
        self.store = os.path.join(processes.server_folder(), f"group-{next(_group_numbers)}")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def _send(self, call: Call, ranks: list[int], folder: str) -> None:
        self.calls += 1
        place = (dict(os.environ), folder, list(sys.path))
        cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
        for rank in ranks:
            worker = self.workers[rank]
            header = {
                "call": self.calls, "kind": call.kind, "world_size": call.world_size, "backend": call.backend,
                "generation": self.generation, "port": self.port, "store": self.store,
                "filename": call.label, "idle": self._idle_seconds(call),
                "answers": can_answer(), "post_mortem": call.post_mortem,
                "hosts": call.hosts and call.hosts.environment, "timeout": call.timeout,
                "operations": verify.path(worker.folder, self.calls) if call.verify else None,
                "place": place if worker.place != place else None,
                "sources": {name: entry for name, entry in cells.items() if worker.sources.get(name) is not entry},
            }
            worker.place = place
            worker.sources = cells
            worker.ran = call.kind
            worker.deliver(header, call.body)

    def _load(self, rank: int, content: bytes | None):
        if content is None:
            return None
        try:
            return pickle.loads(content)
        except Exception as error:
            text = f"its result cannot be rebuilt in the notebook: {type(error).__name__}: {error}"
            raise errors.WorkerError(rank, text, "", [], f"rank {rank}: {text}") from None
