"""The processes of the ranks, seen from the notebook: how they start, and the channels to them (private)."""

from __future__ import annotations

import atexit
import contextlib
import json
import linecache
import mmap
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, process, reduction, util
from multiprocessing.connection import wait

from ._text import STATUS_BYTES, is_learner

_LARGE = 1 << 12  # bytes that a socket surely takes without a reader
SLOW = tuple(f"torch.distributed.{name}" for name in ("checkpoint", "fsdp", "pipelining", "tensor"))  # to import
_shared: list[str] = []  # what else the server imports for the ranks
_forked: set[int] = set()  # servers from which ranks have been forked

_context = multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Start processes that do not run the notebook's main module again and that no interrupt hits while they import."""
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        main.__dict__.update(hidden)


def server_id() -> int | None:
    """Process id of the fork server, None if there is none; a dead one is forgotten."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        try:
            dead = os.waitpid(server._forkserver_pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            dead = True
        if dead or not os.path.exists(server._forkserver_address):
            os.close(server._forkserver_alive_fd)
            server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    return server._forkserver_pid


def wait_for_end(server: int | None) -> bool:
    """Whether this fork server has ended, or does so within a moment."""
    for _ in range(20):
        if server_id() != server:
            return True
        time.sleep(0.01)
    return False


def start_server() -> int | None:
    """Start the process that ranks are forked from, unless it runs; it imports torch in the background.

    What is slow to import it imports too, once for all ranks: what the notebook has imported already, and what
    `share` has been told.
    """
    if server_id() is None:
        folder = _private_folder()
        owner = os.getpid()  # and not a fork of it; if the notebook is killed, the server removes the folder
        atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
        extra = {"COURSE_UTILS_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        extra["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        config = process.current_process()._config
        with _quiet_start(), _replaced(os.environ, extra), _replaced(config, {"tempdir": folder}):
            with _replaced(util.__dict__, {"spawnv_passfds": _spawn_apart}):
                slow = [name for name in SLOW if name in sys.modules]
                _context.set_forkserver_preload([*slow, *_shared, "course_utils._worker"])
                forkserver.ensure_running()
    return server_id()


def share(*modules: str) -> None:
    """Tell what ranks are going to import, so that they find it imported; a server without ranks starts again for it.

    Once there are ranks it is too late, and each imports for itself.
    """
    new = [name for name in modules if name not in _shared]
    _shared.extend(new)
    server = server_id()
    if new and server is not None and server not in _forked:
        folder = os.path.dirname(forkserver._forkserver._forkserver_address)
        os.kill(server, signal.SIGKILL)
        if wait_for_end(server):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # told when ranks are asked for
                start_server()


def _private_folder() -> str:
    """A folder of the user's own for the server's socket, whose path may not exceed about 100 characters."""
    places = [tempfile.gettempdir(), "/tmp"]
    return tempfile.mkdtemp(prefix="course-", dir=next((p for p in places if len(p) < 60), places[-1]))


@contextlib.contextmanager
def _replaced(mapping, items: dict) -> Iterator[None]:
    before = {key: mapping[key] for key in items if key in mapping}
    mapping.update(items)
    try:
        yield
    finally:
        for key in items:
            del mapping[key]
        mapping.update(before)


def _spawn_apart(path, arguments, fds) -> int:
    """Start a helper process in a session of its own: signals meant for the notebook's group do not reach it."""
    started = subprocess.Popen(arguments, executable=path, pass_fds=fds, start_new_session=True)
    started.returncode = 0  # multiprocessing looks after it from here on
    return started.pid


def _run_worker(*arguments) -> None:
    from . import _worker

    _worker.main(*arguments)


class _SharedFile:
    """A file descriptor that travels to the process being started."""

    def __init__(self, fd: int):
        self.fd = fd

    def __reduce__(self):
        return _same, (reduction.DupFd(self.fd),)


def _same(value):
    return value


def learner_line(file: str, line: int) -> dict:
    return {"file": file, "line": line, "text": linecache.getline(file, line).strip()}


class Worker:
    """One rank's process, with the notebook's ends of its channels."""

    def __init__(self, rank: int):
        self.rank = rank
        self.server = server_id()
        _forked.add(self.server)
        self.place: tuple[dict, str, list] | None = None
        self.sources: dict[str, tuple] = {}
        self.output_open = True
        self.sender: threading.Thread | None = None
        if hasattr(os, "memfd_create"):
            self.status = os.memfd_create("rank")
        else:
            with tempfile.TemporaryFile() as file:
                self.status = os.dup(file.fileno())
        os.ftruncate(self.status, STATUS_BYTES)
        self.task, task = _context.Pipe()
        self.control, control = _context.Pipe()
        self.output, output = _context.Pipe(duplex=False)
        arguments = (rank, task, control, output, _SharedFile(self.status), dict(os.environ))
        self.process = _context.Process(target=_run_worker, args=arguments, daemon=True, name=f"rank {rank}")
        try:
            with _quiet_start():
                self.process.start()
        finally:
            for end in (task, control, output):
                end.close()
        self.pid = self.process.pid

    def deliver(self, header: dict, body: bytes, listener: socket.socket | None) -> None:
        """Send a call; a large one from a thread, because a rank that does not read must not block the notebook."""

        head = pickle.dumps(header)

        def send() -> None:
            with contextlib.suppress(OSError, RuntimeError):  # it has died: the wait for its reply finds out how
                self.task.send_bytes(head)
                self.task.send_bytes(body)
                if listener is not None:
                    reduction.send_handle(self.task, listener.fileno(), self.pid)
                    listener.close()

        if self.sender is not None:
            self.sender.join(1.0)
        self.sender = threading.Thread(target=send, daemon=True)
        if listener is None and len(head) + len(body) <= _LARGE:
            self.sender = None
        if self.sender is None:
            send()
        else:
            self.sender.start()

    def last_operation(self) -> dict | None:
        """The last operation that the rank started, readable even when it is dead."""
        with mmap.mmap(self.status, STATUS_BYTES, prot=mmap.PROT_READ) as status:
            size = int.from_bytes(status[:4], "little")
            text = status[4 : 4 + size]
        try:
            op, group, count, peer, ranks, number, where = json.loads(text)
        except ValueError:
            return None
        return dict(op=op, group=group, bytes=count, peer=peer, ranks=ranks, number=number, where=where)

    def fatal_frame(self) -> dict | None:
        """The learner's innermost line from the newest report that the rank's fault handler wrote."""
        report = os.pread(self.status, 1 << 16, STATUS_BYTES).decode(errors="replace")
        frames = re.findall(r'File "(.*?)", line (\d+) in ', report.rpartition("most recent call first")[2])
        return next((learner_line(file, int(line)) for file, line in frames if is_learner(file)), None)

    def kill(self) -> None:
        """End the process and its children at once."""
        if wait([self.process.sentinel], 0):
            return
        for kill in (os.killpg, os.kill):
            try:
                kill(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        wait([self.process.sentinel], 1.0)

    def close(self) -> None:
        self.kill()
        for end in (self.task, self.control, self.output):
            end.close()
        os.close(self.status)
