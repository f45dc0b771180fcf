"""The actor on a node of a Ray cluster: it starts ranks as a notebook does, and passes on what they say (private).

It is sent by value, so that a node without the course, or with another version, can say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import sys
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path

import ray

_OWN = ("CUDA_VISIBLE_DEVICES", "HOME", "HOSTNAME", "TMPDIR", "XDG_RUNTIME_DIR")  # variables about the machine
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_REST = 8  # parts of output that are read of a rank that has ended


def versions() -> dict[str, str]:
    """What must be the same in the notebook and on each node, as far as it is there."""
    found = {name: version(name).partition("+")[0] for name in ("torch", "cloudpickle") if find_spec(name)}
    if (course := find_spec("course_utils")) and course.origin:
        files = sorted(Path(course.origin).parent.glob("ranks/*.py"))
        found["course_utils"] = hashlib.sha1(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]
    return found | {"Python": platform.python_version().rpartition(".")[0]}


class Node:
    """Ranks of one notebook on one node. A rank has a token, because a number may have a second process."""

    def __init__(self, path: list[str]):
        sys.path[:] = [*path, *(place for place in sys.path if place not in path)]
        self._path, self._folder, self._told = list(sys.path), os.getcwd(), dict(os.environ)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))  # for what ranks are forked from
        self._workers: dict = {}
        self._ended: set = set()  # connections that have come to their end
        self._new = os.eventfd(0, os.EFD_CLOEXEC)

    def about(self) -> dict:
        """The node, for comparison and for the others."""
        return {"name": socket.gethostname(), "address": ray.util.get_node_ip_address(), "versions": versions()}

    def free_port(self) -> int:
        """A port at which rank 0 may have its store."""
        with socket.socket() as free:
            free.bind(("", 0))
            return free.getsockname()[1]

    def start(self, ranks: dict[int, int], gpus: list[int], modules: list[str]) -> None:
        """Start ranks (by token), which see these GPUs and find these modules imported."""
        import psutil

        from course_utils.ranks import processes

        self._processes = processes
        self._told["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        here = ray.util.get_node_ip_address()
        mine = [name for name, ends in psutil.net_if_addrs().items() if any(end.address == here for end in ends)]
        self._told = dict.fromkeys(_INTERFACES, mine[0] if mine else "") | self._told
        processes.room_for(len(ranks))
        processes.share(*modules)
        processes.start_server()
        for token, rank in ranks.items():
            self._workers[token] = processes.Worker(rank)
        os.eventfd_write(self._new, 1)

    def act(self, token: int, what: str) -> None:
        """Kill a rank, after which `listen` tidies up, or have it write down where it is."""
        if worker := self._workers.get(token):
            worker.report() if what == "report" else self._processes.kill([worker])

    def deliver(self, token: int, header: dict, body: bytes) -> None:
        """Send a rank a call."""
        if worker := self._workers.get(token):
            header["place"] = header["place"] and self._place(*header["place"])
            worker.deliver(header, body)

    def _place(self, environment: dict, folder: str, path: list[str]) -> tuple[dict, str, list[str]]:
        """The notebook's variables, folder and module path, as far as they make sense here."""
        environment = {name: value for name, value in environment.items() if name not in _OWN}
        environment |= {name: self._told[name] for name in _OWN if name in self._told}
        for name in _INTERFACES:
            if self._told[name]:
                environment.setdefault(name, self._told[name])
        folder = folder if os.path.isdir(folder) else self._folder
        return environment, folder, [*path, *(place for place in self._path if place not in path)]

    def tell(self, token: int, channel: str, message: object) -> None:
        """Send a rank something else than a call."""
        if worker := self._workers.get(token):
            with contextlib.suppress(OSError):
                getattr(worker, channel).send(message)

    def evidence(self, token: int) -> tuple[dict | None, dict | None, float]:
        """A rank's last operation, the line where it was last seen, the processor time that it has used."""
        worker = self._workers.get(token)
        return (worker.last_operation(), worker.fatal_frame(), worker.cpu_seconds()) if worker else (None, None, 0.0)

    def listen(self) -> list[tuple[int, str, object]]:
        """What ranks have said: (token, channel, bytes), and of one that has ended last how."""
        sources: dict = {self._new: (0, "")}
        for token, worker in list(self._workers.items()):
            sources |= {getattr(worker, channel): (token, channel) for channel in ("output", "task", "control")}
            sources[worker.process.sentinel] = token, "end"
        ready = [sources[source] for source in wait([each for each in sources if each not in self._ended], 30)]
        if (0, "") in ready:
            os.eventfd_read(self._new)
        said = [part for token, channel in ready if channel not in ("", "end") for part in self._read(token, channel)]
        return said + [part for token, channel in ready if channel == "end" for part in self._last_words(token)]

    def _read(self, token: int, channel: str) -> list[tuple[int, str, object]]:
        worker = self._workers[token]
        try:
            data = worker.read_output() if channel == "output" else getattr(worker, channel).recv_bytes()
        except (EOFError, OSError):
            data = b""
        if not data:
            self._ended.add(getattr(worker, channel))
        return [(token, channel, data)] if data or channel == "output" else []

    def _last_words(self, token: int) -> list[tuple[int, str, object]]:
        """What is left to read of a rank that has ended, and how it ended; nothing of it stays."""
        worker, said = self._workers[token], []
        for connection, channel in ((worker.output, "output"), (worker.task, "task")):
            while connection not in self._ended and len(said) < _REST and wait([connection], 0):
                said += self._read(token, channel)
        worker.process.join(0.2)
        said.append((token, "end", (worker.process.exitcode, *self.evidence(token))))
        del self._workers[token]
        self._ended -= {worker.output, worker.task, worker.control}
        self._processes.kill([worker])
        worker.close()
        return said
