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
import importlib
import io
import linecache
import mmap
import multiprocessing
import os
import select
import shutil
import signal
import socket
import stat
import sys
import threading
import traceback
import warnings
from multiprocessing import parent_process
from multiprocessing.connection import wait

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import cloudpickle
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional  # noqa: F401  imported during a call, its defaults would keep that group

from ..torch_internals import abort_process_groups, open_groups
from . import display, process_group, serialization, standing
from . import multiprocessing_internals as internals
from .call_signature import Announcer
from .channels import IDLE_SECONDS, MARK, STATUS_BYTES
from .descendants import adopt_orphans, end_descendants
from .intercept import interceptor
from .keyboard import keyboard
from .labels import tells_place
from .modules import Modules, clock
from .settings import Settings, note_threads, seed
from .state import state

if folder := os.environ.get("COURSE_UTILS_FOLDER"):  # this is the fork server
    _server = os.getpid()

    def _end(folder: str) -> None:
        """Leave no process and no file behind, even if the notebook was killed."""
        if os.getpid() == _server:
            end_descendants(_server)
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(_end, folder)
    adopt_orphans()
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # it is one of the adopted
    interceptor.install()
    gc.collect()
    gc.freeze()  # what all ranks share stays shared: the collector does not write into these pages
    gc.enable()  # switched off by `uncollected`

_c = ctypes.CDLL(None)


def main(rank: int, task, control, output, status, environment: dict, folder: str, host: int | None) -> None:
    """Serve calls until the notebook closes the connection, or has had nothing to do for long."""
    if host is not None:  # before there is any thread
        importlib.import_module("lessons.multi_node.hosts.namespaces").enter(host)
    state.rank, state.pid = rank, os.getpid()
    seed(rank)
    _detach(status, output)
    internals.set_folder(folder)
    _take_environment(environment)
    interceptor.install()
    torch.set_num_threads(1)
    process_group.install()
    builtins.display = display.display
    keyboard.install(task)
    display.replace_ipython_display()
    sys.modules["__main__"].__dict__.update(torch=torch, dist=dist)
    threading.Thread(target=_answer, args=(control,), daemon=True).start()
    note_threads()
    settings, modules = Settings(), Modules()
    idle = float(environment.get("COURSE_IDLE_SECONDS") or IDLE_SECONDS)
    calls = select.poll()
    calls.register(task.fileno(), select.POLLIN)
    while True:
        try:
            if not calls.poll(1000 * idle):
                os._exit(0)
            header = task.recv()
            body = task.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        idle = header["idle"]
        kind = header["kind"]
        since = clock()
        how, *reply = _serve(header, body)
        if os.getpid() != state.pid:
            _end_fork(reply[1]["text"] if how == "error" else "")
        modules.note(since)
        kept = (kind.keeps_names or settings.are_left_alone()) and not (how == "error" and _import_was_cut(reply[1]))
        with state.lock:  # an abort under way must not reach into the next call
            state.running = False
        _finish_output(header["call"])
        try:
            task.send((how, *reply, modules.files if kept else None))
        except OSError:
            os._exit(0)
        if not kind.keeps_names:
            _tidy(settings)


def _import_was_cut(failure: dict) -> bool:
    """Whether an interrupt has left a module half imported."""
    importing = any(frame["file"].startswith("<frozen importlib") for frame in failure["frames"])
    return importing and failure["text"].startswith("KeyboardInterrupt")


def _end_fork(error: str) -> None:
    """End a process that the function has forked and that has come out of it: it is not the rank."""
    if error:
        print(f"a process forked by this rank ended in {error}")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1 if error else 0)


def _detach(status, output) -> None:
    """Become independent of the server's terminal and signals, and sure to end with it."""
    os.setsid()
    adopt_orphans()
    signal.signal(signal.SIGINT, _interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if sys.platform == "linux":
        _c.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    threading.Thread(target=_end_with_parent, daemon=True).start()
    internals.leave_server()  # otherwise it outlives the notebook as long as we live
    internals.set_daemon(False)  # a DataLoader may start workers here,
    multiprocessing.set_start_method("fork", force=True)  # also of a data set that was defined in a cell
    fd = status.detach()
    interceptor.status = mmap.mmap(fd, STATUS_BYTES)
    os.lseek(fd, STATUS_BYTES, os.SEEK_SET)
    faulthandler.enable(file=fd, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=False)
    state.output = output
    for target, name in ((1, "stdout"), (2, "stderr")):  # whatever this process prints, also from C, for the notebook
        os.dup2(output.fileno(), target)
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
    os.environ.update({name: value for name, value in environment.items() if not tells_place(name)})
    os.environ["MPLBACKEND"] = "module://course_utils.ranks.matplotlib_backend"
    os.environ["OMP_NUM_THREADS"] = "1"
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # of flight records, as in PyTorch 2.13; 2.10 keeps none


# ----------------------------------------------------------------------------------------------------------------- call


def _serve(header: dict, body: bytes) -> tuple:
    """Run one call; the reply is ``("done", call, result, communication)`` or ``("error", call, failure, None)``."""
    call = header["call"]
    state.rendezvous = 0
    try:
        with state.lock:
            state.call, state.running, state.phase = call, True, "starting"
        if header["place"] is not None:
            state.place, state.environment = header["place"], None
            _take_place()
        linecache.cache.update(header["sources"])
        keyboard.answered = header["answers"]
        interceptor.reset()
        process_group.prepare(header)
        state.environment = os.environ._data.copy()
        interceptor.reset()
        interceptor.announce = Announcer(header["operations"]) if header["operations"] else None
        state.phase = "running"
        result = _RUN[header["kind"].name](header, body)
        state.phase = "returned"
        state.running = False
        same, settled = dist.is_initialized() and state.generation == header["generation"], process_group.settled()
        same = same and (header["kind"].keeps_names or settled and len(open_groups()) == 1)
        communication = {
            "latest": standing.latest(), "last": standing.entry_data(interceptor.last), "same_group": same,
            "settled": settled,
            "sent": interceptor.sent, "received": interceptor.received, "digests": interceptor.digests,
            "streams": interceptor.streams, "made": interceptor.made(), "aliased": interceptor.aliased,
        }
        interceptor.pending.clear()
        return "done", call, result, communication
    except BaseException as error:
        if header["post_mortem"]:
            keyboard.post_mortem(error)
        state.running = False
        starting, state.phase = state.phase == "starting", "failed"
        failure = standing.describe(error)
        failure["last"] = standing.entry_data(interceptor.last)
        failure["line"] = next((f for f in reversed(failure["frames"]) if f["learner"]), None)
        failure["latest"] = standing.latest()
        failure["starting"], failure["settled"] = starting, not starting and process_group.settled()
        traceback.clear_frames(error.__traceback__)
        return "error", call, failure, None


def _take_place() -> None:
    environment, folder, sys.path[:] = state.place
    if os.environ._data != state.environment:
        _take_environment(environment)
    os.chdir(folder)


def _tidy(settings: Settings) -> None:
    """After a function has run and its result is sent: nothing that it set reaches into the next."""
    gc.collect()
    interceptor.groups.clear()
    if interceptor.announce is not None:
        interceptor.announce.close()
        interceptor.announce = None
    settings.put_filters_back()
    _take_place()
    seed(state.rank)


def _run_function(_header: dict, body: bytes) -> bytes:
    fn, args, kwargs = cloudpickle.loads(body)
    try:
        result = fn(*args, **kwargs)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        result = None
    return serialization.pack_result(result)


def _run_program(header: dict, body: bytes) -> bytes:
    """Do also what Python does at the end of a program: wait for threads, run exit functions, flush files."""
    result = _run_function(header, body)
    internals.run_exit_functions()
    for item in gc.get_objects():
        if isinstance(item, io.IOBase) and not item.closed and item.writable():
            with contextlib.suppress(Exception):
                item.flush()
    return result


class _Device(str):
    """The rank's device: as a value wherever PyTorch takes one, and as a call, as `course_utils.device` is."""

    def __call__(self) -> torch.device:
        return torch.device(self)

    def __getattr__(self, name: str):
        return getattr(torch.device(self), name)

    def __eq__(self, other: object) -> bool:
        return torch.device(self) == other or str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(torch.device(self))

    def __repr__(self) -> str:
        return repr(torch.device(self))


def _run_cell(header: dict, body: bytes) -> bytes | None:
    """Run a ``%%ranks`` cell in this rank's namespace; the text of its last expression, if it has a value."""
    names, filename = sys.modules["__main__"].__dict__, header["filename"]
    device = f"cuda:{state.rank}" if header["backend"] == "nccl" else "cpu"
    names.update(rank=state.rank, world_size=header["world_size"], device=_Device(device))
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


_RUN = {"function": _run_function, "program": _run_program, "cell": _run_cell}


def _show_value(value) -> None:
    if len(display.bundle(value)) > 1:
        display.display(value)
    else:
        print(repr(value))


def _finish_output(call: int) -> None:
    with contextlib.suppress(Exception):
        keyboard.end()
    for name in ("stdout", "stderr"):
        with contextlib.suppress(Exception):  # closed, or another object, or None, or nothing
            getattr(sys, name).flush()
    _c.fflush(None)
    os.write(state.output.fileno(), MARK + b"E%d\n" % call)


# -------------------------------------------------------------------------------------------------------------- control


def _answer(control) -> None:
    """Control thread: answer questions while the main thread is busy or blocked."""
    while True:
        try:
            question = control.recv()
            match question:
                case "where", number:
                    control.send((number, standing.standing(state.phase, state.running)))
                case "signatures", number:
                    control.send((number, interceptor.signatures))
                case "abort", call:
                    _abort(call)
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
        state.generation = None
        if not torch.cuda.is_initialized():
            _hang_up()
        if dist.is_initialized():
            try:
                abort_process_groups()
            except Exception:
                pass  # the group is half made or half gone; the interrupt follows either way
        os.kill(os.getpid(), signal.SIGINT)
