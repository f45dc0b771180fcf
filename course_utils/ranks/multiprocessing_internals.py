"""All that the launcher takes from private parts of Python's multiprocessing and threading, and what for.

Written for Python 3.11 to 3.14. When a version changes a name, `tests/ranks/test_internals.py` says which; mend it
here.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver, process, util

__all__ = [
    "forget_server", "leave_server", "replaced", "run_exit_functions", "server_address", "server_pid", "set_daemon",
    "set_folder", "started_by",
]


def server_pid() -> int | None:
    """Process id of the fork server, dead or alive."""
    return forkserver._forkserver._forkserver_pid


def server_address() -> str:
    """The socket at which the fork server listens."""
    return forkserver._forkserver._forkserver_address


def forget_server() -> None:
    """Let the next start make another fork server."""
    server = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def leave_server() -> None:
    """In a process that was forked from it: do not keep the fork server alive."""
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def set_daemon(daemon: bool) -> None:
    """Whether this process counts as a daemon, which may not start processes."""
    process.current_process()._config["daemon"] = daemon


def set_folder(folder: str) -> None:
    """Where multiprocessing puts the sockets of this process."""
    process.current_process()._config["tempdir"] = folder


@contextmanager
def replaced(mapping, items: dict) -> Iterator[None]:
    """Set items of a mapping for a while."""
    before = {key: mapping[key] for key in items if key in mapping}
    mapping.update(items)
    try:
        yield
    finally:
        for key in items:
            del mapping[key]
        mapping.update(before)


@contextmanager
def started_by(spawn: Callable[..., int], folder: str) -> Iterator[None]:
    """Start helper processes by ``spawn(path, arguments, fds)``, which returns a process id; sockets go to `folder`."""
    with ExitStack() as stack:
        stack.enter_context(replaced(process.current_process()._config, {"tempdir": folder}))
        stack.enter_context(replaced(util.__dict__, {"spawnv_passfds": spawn}))
        yield


def run_exit_functions() -> None:
    """Wait for threads and run exit functions, as Python does at a program's end."""
    threading._shutdown()
    atexit._run_exitfuncs()
