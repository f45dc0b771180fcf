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

__all__ = ["ForkServer", "leave_server", "replaced", "run_exit_functions", "set_daemon", "set_folder", "started_by"]


class ForkServer(forkserver.ForkServer):
    """A process from which others are forked; there may be several, where multiprocessing knows one."""

    @property
    def pid(self) -> int | None:
        """Its process id, None if it does not run; a dead one is forgotten, so that it can start again."""
        if self._forkserver_pid is not None:
            try:
                dead = os.waitpid(self._forkserver_pid, os.WNOHANG)[0] != 0
            except ChildProcessError:
                dead = True
            if dead or not os.path.exists(self._forkserver_address):
                os.close(self._forkserver_alive_fd)
                self._forkserver_address = self._forkserver_alive_fd = self._forkserver_pid = None
        return self._forkserver_pid

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Fork from this server what multiprocessing starts."""
        with replaced(forkserver.__dict__, {"connect_to_new_process": self.connect_to_new_process}):
            yield


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
