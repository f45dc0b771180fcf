"""One rank: the process that runs the learner's functions (private). Imported by the fork server, never by a notebook.

A rank has four ways to the notebook: a connection for calls and results, one for questions while a call runs, a pipe
for whatever it prints, and a small shared file with its last operation, which is there even when the process is not.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import linecache
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import socket
import stat
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from multiprocessing import forkserver, parent_process, process, reduction
from multiprocessing.connection import wait

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import cloudpickle
    import numpy
    import torch
    import torch.distributed as dist

from . import _display, _evidence, _transfer
from ._text import MARK, STATUS_BYTES, is_learner
from .ledger import tracker

if os.environ.get(
    "COURSE_UTILS_FOLDER"
):  # this is the fork server: leave no file behind, even if the notebook was killed
    _server = os.getpid()
    atexit.register(
        lambda folder: os.getpid() == _server and shutil.rmtree(folder, ignore_errors=True),
        os.environ["COURSE_UTILS_FOLDER"],
    )
    tracker.install()
    gc.collect()
    gc.freeze()  # what all ranks share stays shared: the collector does not write into these pages

_MODULES = len(sys.modules)
_NEVER = timedelta(days=1)  # it is the launcher that watches the time


@dataclass
class State:
    """What this rank is doing; the main thread writes, the control thread reads."""

    rank: int = -1
    running: bool = False
    phase: str = "idle"
    call: int = 0
    generation: int | None = None
    store: object = None
    meeting: tuple[int, int] | None = None  # port of the store and generation of the group
    server: object = None
    output: object = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    place: tuple[dict, str, list] | None = None  # the notebook's environment, folder and module path
    rendezvous: int = 0


state = State()


def main(rank: int, task, control, output, status, environment: dict) -> None:
    """Serve calls until the notebook closes the connection."""
    state.rank = rank
    _seed()
    _detach(status, output)
    _take_environment(environment)
    tracker.install()
    torch.set_num_threads(1)
    sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["env"] = _rendezvous
    builtins.display = _display.display
    _display.replace_ipython_display()
    sys.modules["__main__"].__dict__.update(torch=torch, dist=dist)
    threading.Thread(target=_answer, args=(control,), daemon=True).start()
    stamps: dict[str, float] = {}
    while True:
        try:
            header = task.recv()
            body = task.recv_bytes()
            if header["listen"]:
                _host_store(reduction.recv_handle(task))
        except (EOFError, OSError):
            os._exit(0)
        _forget_edited_modules(stamps)
        reply = _serve(header, body)
        with state.lock:  # an abort under way must not reach into the next call
            state.running = False
        _finish_output(header["call"])
        try:
            task.send(reply)
        except OSError:
            os._exit(0)
        if not header["cell"]:
            _tidy()


def _detach(status, output) -> None:
    """Become independent of the server's terminal and signals, and sure to end with it."""
    os.setsid()
    signal.signal(signal.SIGINT, _interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    threading.Thread(target=_end_with_parent, daemon=True).start()
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)  # otherwise the server outlives the notebook as long as we live
        server._forkserver_alive_fd = None
    process.current_process()._config["daemon"] = False  # a DataLoader may start workers here,
    multiprocessing.set_start_method("fork", force=True)  # also of a data set that was defined in a cell
    fd = status.detach()
    tracker.status = mmap.mmap(fd, STATUS_BYTES)
    os.lseek(fd, STATUS_BYTES, os.SEEK_SET)
    faulthandler.enable(file=fd, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=False)
    state.output = output
    _open_streams()


def _open_streams() -> None:
    """Let whatever this process prints, also from C, go to the notebook."""
    for target, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(state.output.fileno(), target)
        stream = os.fdopen(target, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _end_with_parent() -> None:
    wait([parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


def _interrupted(_signal, _frame) -> None:
    if state.running:
        raise KeyboardInterrupt


def _take_environment(environment: dict) -> None:
    """The notebook's environment as it is now, with what a rank must have otherwise."""
    os.environ.clear()
    os.environ.update(environment)
    os.environ["MPLBACKEND"] = "module://course_utils._backend"
    os.environ["OMP_NUM_THREADS"] = "1"
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def _forget_edited_modules(stamps: dict[str, float]) -> None:
    """Import a module of the learner's again if its file has changed since the last call."""
    for name in list(islice(reversed(sys.modules), max(0, len(sys.modules) - _MODULES))):  # the newest
        path = getattr(sys.modules[name], "__file__", None)
        if path and is_learner(path):
            with contextlib.suppress(OSError):  # an editor is just replacing it
                changed = os.path.getmtime(path)
                if stamps.setdefault(path, changed) != changed:
                    del stamps[path], sys.modules[name]


# ---------------------------------------------------------------------------------------------------------------- group


def _host_store(listener: int) -> None:
    """Rank 0: serve the store on a socket that the notebook has bound to the loopback interface."""
    state.server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, master_listen_fd=listener, timeout=timedelta(seconds=60)
    )


def _rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **_ignored):
    """``env://`` as PyTorch defines it, but meeting in the store that rank 0 already serves on loopback."""
    if state.store is None:
        state.store = dist.TCPStore(
            "127.0.0.1", state.meeting[0], is_master=False, wait_for_workers=False, timeout=timeout
        )
    state.rendezvous += 1
    store = dist.PrefixStore(f"call {state.call}.{state.rendezvous}", state.store)
    yield store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    raise RuntimeError("this rendezvous is over")


def _drop_group() -> None:
    state.generation = None
    groups = [*dist.distributed_c10d._world.pg_map]  # noqa: F841  whose end comes last, without Python's lock
    if dist.is_initialized():
        if dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()  # its destruction would wait for ranks that have gone
        else:
            dist.destroy_process_group()
    c10d = dist.distributed_c10d  # an initialisation that failed half-way leaves names behind that others do not have
    c10d._world.group_count = 0
    for book in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(c10d._world, book).clear()
    c10d._unregister_all_process_groups()
    if "torch.distributed.tensor" in sys.modules:  # its caches hold meshes whose groups are gone
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _untouched() -> bool:
    """Whether a function has left the default group as it was: nothing under way in it, no other groups made."""
    tracker.settle()
    return not tracker.unfinished() and len(dist.distributed_c10d._world.pg_map) == 1


def _prepare_group(header: dict) -> None:
    world_size, rank = header["world_size"], state.rank
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(header["port"]),
    )  # fmt: skip
    if (header["port"], header["generation"]) != state.meeting:
        state.store, state.meeting = None, (header["port"], header["generation"])
    if header["backend"] == "nccl":
        torch.cuda.set_device(rank)
    elif not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if header["init"] and state.generation == header["generation"] and dist.is_initialized():
        return
    _drop_group()
    if header["init"]:
        device = torch.device("cuda", rank) if header["backend"] == "nccl" else None
        dist.init_process_group(header["backend"], timeout=_NEVER, device_id=device)
        state.generation = header["generation"]


# ----------------------------------------------------------------------------------------------------------------- call


def _serve(header: dict, body: bytes) -> tuple:
    """Run one call; the reply is ``("done", call, result, books)`` or ``("error", call, failure)``."""
    call = header["call"]
    state.rendezvous = 0
    try:
        with state.lock:
            state.call, state.running, state.phase = call, True, "starting"
        if header["place"] is not None:
            state.place = header["place"]
            _take_place()
        linecache.cache.update(header["sources"])
        tracker.reset()
        _prepare_group(header)
        tracker.reset()
        state.phase = "running"
        result = _run_cell(header, body) if header["cell"] else _run_function(body)
        state.phase = "returned"
        state.running = False
        books = (
            (_evidence.latest(), tracker.sent, tracker.received, _evidence.entry_data(tracker.last)),
            dist.is_initialized() and state.generation == header["generation"] and (header["cell"] or _untouched()),
        )
        tracker.pending.clear()
        return "done", call, result, books
    except BaseException as error:
        state.running = False
        state.phase = "failed"
        failure = _evidence.describe(error)
        failure["last"] = _evidence.entry_data(tracker.last)
        failure["line"] = next((f for f in reversed(failure["frames"]) if f["learner"]), None)
        failure["latest"] = _evidence.latest()
        traceback.clear_frames(error.__traceback__)
        return "error", call, failure


def _take_place() -> None:
    environment, folder, sys.path[:] = state.place
    _take_environment(environment)
    os.chdir(folder)


def _tidy() -> None:
    """After a function has run and its result is sent: nothing that it set reaches into the next."""
    gc.collect()
    tracker.groups.clear()
    _open_streams()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    _take_place()
    _seed()


def _seed() -> None:
    """Different random numbers on every rank, the same each time."""
    random.seed(state.rank)
    numpy.random.seed(state.rank)
    (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(state.rank)


def _run_function(body: bytes) -> bytes:
    fn, args, kwargs = cloudpickle.loads(body)
    try:
        result = fn(*args, **kwargs)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        result = None
    return _transfer.pack_result(result)


def _run_cell(header: dict, body: bytes) -> bytes | None:
    """Run a ``%%ranks`` cell in this rank's namespace; the text of its last expression, if it has a value."""
    names, filename = sys.modules["__main__"].__dict__, header["filename"]
    device = torch.device("cuda", state.rank) if header["backend"] == "nccl" else torch.device("cpu")
    names.update(rank=state.rank, world_size=header["world_size"], device=device)
    tree = ast.parse(body.decode(), filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, filename, "exec"), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), filename, "eval"), names)
    if value is not None:
        names["_"] = value
        _show_value(value)
    return None


def _show_value(value) -> None:
    if len(_display.bundle(value)) > 1:
        _display.display(value)
    else:
        print(repr(value))


def _finish_output(call: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    ctypes.CDLL(None).fflush(None)
    os.write(state.output.fileno(), MARK + b"E%d\n" % call)


# -------------------------------------------------------------------------------------------------------------- control


def _answer(control) -> None:
    """Control thread: answer questions while the main thread is busy or blocked."""
    while True:
        try:
            question = control.recv()
            if question == "where":
                control.send(_evidence.standing(state.phase, state.running))
            else:
                _abort(question)
        except (EOFError, OSError):
            return


def _hang_up() -> None:
    """Shut down this rank's TCP connections: gloo has no abort of its own, but gives up when its peer has gone."""
    for fd in map(int, os.listdir("/dev/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()  # refused on a listening socket, which must stay: gloo would abort
                        connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def _abort(call: int) -> None:
    """Free the main thread from whatever it waits in, unless that call has ended meanwhile."""
    with state.lock:
        if not state.running or state.call != call:
            return
        state.generation = state.store = None
        if not torch.cuda.is_initialized():
            _hang_up()
        if dist.is_initialized():
            try:
                dist.distributed_c10d._abort_process_group()
            except Exception:
                pass  # the group is half made or half gone; the interrupt follows either way
        os.kill(os.getpid(), signal.SIGINT)
