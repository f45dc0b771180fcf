"""The processes of the ranks, seen from the notebook: how they start, and the channels to them (private)."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import glob
import json
import linecache
import mmap
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing import reduction
from multiprocessing.connection import wait

from . import descendants
from . import multiprocessing_internals as internals
from .channels import STATUS_BYTES, Kind
from .learner_code import is_learner

_LARGE = 1 << 12  # bytes that a socket surely takes without a reader
SLOW = tuple(f"torch.distributed.{name}" for name in ("checkpoint", "fsdp", "pipelining", "tensor"))  # to import
_shared: list[str] = []  # what else the server imports for the ranks
_forked: set[int] = set()  # servers from which ranks have been forked
_ranks: set[int] = set()  # processes that are ranks
_forking = threading.Lock()  # held while one becomes a rank, and while servers start
_FILES = 7  # open files that a rank needs in the notebook, and some while it starts

_context = multiprocessing.get_context("forkserver")
# A hash seed is drawn when Python starts: one for each rank would take an interpreter for each. Neighbours differ.
_servers = [internals.ForkServer() for _ in range(1 if os.environ.get("PYTHONHASHSEED", "").isdigit() else 2)]
_folder = ""  # of the servers and their ranks


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


def server_folder() -> str:
    """The private folder of the fork servers and their ranks."""
    return _folder


def server_ids() -> list[int]:
    """Process ids of the fork servers that live."""
    return [server.pid for server in _servers if server.pid is not None]


def end_server() -> None:
    """Kill the fork servers and with them all ranks; the next start makes others."""
    for server in server_ids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        end = time.monotonic() + 0.2
        while server in server_ids() and time.monotonic() < end:
            time.sleep(0.01)
    if not server_ids():
        shutil.rmtree(_folder, ignore_errors=True)


def start_server() -> None:
    """Start the processes that ranks are forked from, unless they run; they import torch in the background.

    What is slow to import they import too, once for all ranks: what the notebook has imported already, and what
    `share` has been told.
    """
    global _folder
    with _forking:  # calls side by side start them once
        if not server_ids():
            _folder = _private_folder()
            _lock(_folder)
            owner = os.getpid()  # and not a fork of it; if the notebook is killed, the servers remove the folder
            atexit.register(lambda folder: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True), _folder)
        extra = {"COURSE_UTILS_FOLDER": _folder, "OMP_NUM_THREADS": "1"}
        extra["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        extra["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = "YES"  # macOS may else end what is forked after an import
        slow = [name for name in SLOW if name in sys.modules]
        first, last = (f"{__package__}.{name}" for name in ("uncollected", "worker"))
        with _quiet_start(), internals.replaced(os.environ, extra), internals.started_by(_spawn_apart, _folder):
            for server in _servers:
                if server.pid is None:
                    server.set_forkserver_preload([first, *slow, *_shared, last])
                    server.ensure_running()


def share(*modules: str) -> None:
    """Tell what ranks are going to import, so that they find it imported; servers without ranks start again for it.

    Once there are ranks it is too late, and each imports for itself.
    """
    new = [name for name in modules if name not in _shared]
    _shared.extend(new)
    servers = server_ids()
    if new and servers and _forked.isdisjoint(servers):
        end_server()
        with contextlib.suppress(OSError):  # told when ranks are asked for
            start_server()


def _private_folder() -> str:
    """A folder of the user's own for the server's socket, whose path may not exceed about 100 characters."""
    places = [tempfile.gettempdir(), "/tmp"]
    place = next((p for p in places if len(p) < 60), places[-1])
    _sweep(place)
    return tempfile.mkdtemp(prefix="course-", dir=place)


def _lock(folder: str) -> None:
    """Hold a lock in a folder for as long as this process lives."""
    fd = os.open(os.path.join(folder, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sweep(place: str) -> None:
    """Remove folders of notebooks that were killed together with their fork server."""
    for path in glob.glob(os.path.join(place, "course-*", "lock")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while the owner lives
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
            finally:
                os.close(fd)


def _spawn_apart(path, arguments, fds) -> int:
    """Start a helper process in a session of its own: signals meant for the notebook's group do not reach it."""
    started = subprocess.Popen(arguments, executable=path, pass_fds=fds, start_new_session=True)
    started.returncode = 0  # multiprocessing looks after it from here on
    return started.pid


def _run_worker(*arguments) -> None:
    from . import worker

    worker.main(*arguments)


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

    def __init__(self, rank: int, host: int | None = None):
        """Start the process; ``host`` is the one that holds the emulated host that it is to enter, if any."""
        self.rank = rank
        server = _servers[rank % len(_servers)]
        self.server = server.pid
        self.ran: Kind | None = None  # what kind of call it has served
        self.files: dict[str, tuple | None] = {}  # of the learner's modules that it has imported
        self.folder = tempfile.mkdtemp(prefix=f"rank-{rank}-", dir=server_folder())
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
        arguments = (rank, task, control, output, _SharedFile(self.status), dict(os.environ), self.folder, host)
        self.process = _context.Process(target=_run_worker, args=arguments, daemon=True, name=f"rank {rank}")
        try:
            with _forking, _quiet_start(), server.chosen():
                self.process.start()
                self.pid = self.process.pid
                _ranks.add(self.pid)
        finally:
            for end in (task, control, output):
                end.close()

    def deliver(self, header: dict, body: bytes) -> None:
        """Send a call; a large one from a thread, because a rank that does not read must not block the notebook."""

        head = pickle.dumps(header)

        def send() -> None:
            with contextlib.suppress(OSError, RuntimeError, TypeError):  # it has died: its reply tells how
                self.task.send_bytes(head)
                self.task.send_bytes(body)

        if self.sender is not None:
            self.sender.join(1.0)
        self.sender = threading.Thread(target=send, daemon=True)
        if len(head) + len(body) <= _LARGE:
            self.sender = None
        if self.sender is None:
            send()
        else:
            self.sender.start()

    def read_output(self) -> bytes:
        """What the rank has printed, 64 KiB at most; nothing at its end."""
        return os.read(self.output.fileno(), 1 << 16)

    def report(self) -> None:
        """Have the rank's fault handler write down where it is."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def last_operation(self) -> dict | None:
        """The last operation that the rank started, readable even when it is dead."""
        with mmap.mmap(self.status, STATUS_BYTES, prot=mmap.PROT_READ) as status:
            size = int.from_bytes(status[:4], "little")
            text = status[4 : 4 + size]
        try:
            said = json.loads(text)
        except ValueError:
            return None
        return dict(zip(("op", "group", "bytes", "peer", "ranks", "number", "where", "dtype"), said, strict=True))

    def fatal_frame(self) -> dict | None:
        """The learner's innermost line from the newest report that the rank's fault handler wrote."""
        report = os.pread(self.status, 1 << 16, STATUS_BYTES).decode(errors="replace")
        frames = re.findall(r'File "(.*?)", line (\d+) in ', report.rpartition("most recent call first")[2])
        return next((learner_line(file, int(line)) for file, line in frames if is_learner(file)), None)

    def cpu_seconds(self) -> float:
        """Processor time that the process has used."""
        import psutil

        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    @property
    def alive(self) -> bool:
        return not wait([self.process.sentinel], 0)

    def close(self) -> None:
        """Let go of a process that has ended."""
        for end in (self.task, self.control, self.output):
            end.close()
        os.close(self.status)
        _ranks.discard(self.pid)
        shutil.rmtree(self.folder, ignore_errors=True)


def kill(workers: Iterable[Worker]) -> None:
    """End the processes of ranks and all that they have started, at once."""
    workers = list(workers)
    running = [worker for worker in workers if worker.alive]
    if len(running) < len(workers):
        _end_orphans()
    if not running:
        return
    below = descendants.descendants([worker.pid for worker in running])
    for worker in running:
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(worker.pid, signal.SIGKILL)
    descendants.end(below)
    deadline = time.monotonic() + 1.0
    for worker in running:
        wait([worker.process.sentinel], max(0.0, deadline - time.monotonic()))


def _end_orphans() -> None:
    """End what ranks have started that died by themselves: the fork servers have adopted it."""
    for server in server_ids():
        with _forking:
            found = [process for process in descendants.children(server) if process.pid not in _ranks]
            descendants.end([*descendants.descendants(process.pid for process in found), *found])


def room_for(ranks: int) -> None:
    """Make sure that this process may open the files that so many more ranks need; raises OSError if it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + _FILES * ranks + 10
    if soft != resource.RLIM_INFINITY and wanted > soft:
        if hard != resource.RLIM_INFINITY and wanted > hard:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
