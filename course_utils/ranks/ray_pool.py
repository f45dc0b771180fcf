"""Ranks on the nodes of a Ray cluster, kept warm between calls (private).

Ray places them, starts an actor on each node that has some (`ray_node`), carries what is said, and notices that a node
has gone. The actor's ranks are processes as on the notebook's own machine: what sees only channels serves both.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InPlace

from . import errors, processes, ray_node
from .on_ray import within
from .pool import Call, Pool
from .processes import Worker
from .status_line import TICK

_SOON = 10.0  # seconds in which an actor answers,
_START = 120.0  # and in which actors and processes start
_INLINE = 1 << 16  # bytes of a call above which Ray keeps it once for all nodes
_UNREAD = 256  # parts of a rank's output, each of 64 KiB at most, that may wait for the notebook
_ACTOR: dict[str, Any] = {
    "num_cpus": 0, "concurrency_groups": {"listening": 1},
    "runtime_env": {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}},  # they tidy up
}
_tokens = itertools.count(1)
ray.cloudpickle.register_pickle_by_value(ray_node)


class _Channel:
    """Messages that have come from a rank, with a descriptor that can be waited for, as a connection has."""

    def __init__(self, worker: RemoteWorker, name: str):
        self._worker, self._name = worker, name
        self.waiting: deque[bytes] = deque()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    def fileno(self) -> int:
        return self._fd

    def put(self, item: bytes) -> None:
        self.waiting.append(item)
        os.eventfd_write(self._fd, 1)

    def take(self) -> bytes:
        os.eventfd_read(self._fd)
        return self.waiting.popleft()

    def poll(self, timeout: float = 0.0) -> bool:
        return bool(wait([self._fd], timeout))

    def recv(self) -> Any:
        return pickle.loads(self.take())

    def send(self, message: object) -> None:
        self._worker.node.actor.tell.remote(self._worker.token, self._name, message)


class RemoteWorker(Worker):
    """A rank on another machine, with what one of this machine has for the notebook."""

    join = staticmethod(lambda _timeout: None)  # how it ended comes with the news that it has

    def __init__(self, rank: int, node: _Node):
        self.rank, self.node, self.token, self.server = rank, node, next(_tokens), 0
        self.ran, self.files, self.folder, self.place, self.sources, self.output_open = None, {}, "", None, {}, True
        self.task, self.control, self.output = (_Channel(self, name) for name in ("task", "control", "output"))
        self.process, self.sentinel, self.exitcode = self, os.eventfd(0, os.EFD_CLOEXEC), None
        self._evidence: tuple | None = None  # of a rank that has ended
        node.workers[self.token] = self

    def end(self, content: tuple) -> None:
        """It has ended: its exit code, or a text, and its last evidence."""
        self.exitcode, *self._evidence = content
        os.eventfd_write(self.sentinel, 1)

    def deliver(self, header: dict, body: Any) -> None:
        self.node.actor.deliver.remote(self.token, header, body)

    def read_output(self) -> bytes:
        return self.output.take()

    def report(self) -> None:
        self.node.actor.act.remote(self.token, "report")

    def _known(self) -> tuple:
        try:
            return self._evidence or self.node.ask("evidence", self.token, seconds=1.0)
        except Exception:  # it has gone, or is too busy
            return None, None, 0.0

    def last_operation(self) -> dict | None:
        return self._known()[0]

    def fatal_frame(self) -> dict | None:
        line = self._known()[1]
        return line and processes.learner_line(line["file"], line["line"])  # a cell's source is here

    def cpu_seconds(self) -> float:
        return self._known()[2]

    def close(self) -> None:
        with self.node.lock:
            self.node.workers.pop(self.token, None)
        for end in (self.task.fileno(), self.control.fileno(), self.output.fileno(), self.sentinel):
            os.close(end)


class _Node:
    """The actor on a node, and a thread that takes what the ranks there say."""

    def __init__(self, actor: Any, name: str, address: str):
        self.actor, self.name, self.address = actor, name, address
        self.workers: dict[int, RemoteWorker] = {}
        self.gpus: list[int] = []
        self.gone = ""  # how it ended
        self.lock = threading.Lock()
        threading.Thread(target=self._take, daemon=True).start()

    def ask(self, method: str, *arguments: Any, seconds: float = _SOON) -> Any:
        return within(seconds, lambda: ray.get(getattr(self.actor, method).remote(*arguments)))

    def _take(self) -> None:
        try:
            listen = self.actor.listen.options(concurrency_group="listening").remote
            asked = deque([listen(), listen()])  # the second begins as the first returns
            while True:
                said = ray.get(asked.popleft())
                asked.append(listen())
                for token, channel, content in said:
                    self._pass_on(token, channel, content)
        except Exception:  # Ray's sentence depends on who noticed it first
            self.gone = f"its node {self.name} has gone, or Ray has ended its actor there"
        for token in list(self.workers):
            self._pass_on(token, "end", (self.gone, None, None, 0.0))

    def _pass_on(self, token: int, channel: str, content: Any) -> None:
        while channel == "output" and (worker := self.workers.get(token)) and len(worker.output.waiting) > _UNREAD:
            time.sleep(0.01)
        with self.lock:
            if worker := self.workers.get(token):
                worker.end(content) if channel == "end" else getattr(worker, channel).put(content)


class RayPool(Pool):
    """Ranks of one notebook, which keep their places on the cluster; also what `Call.hosts` asks where they are."""

    _start_server = staticmethod(lambda: None)  # the actors do so
    _server_ids = staticmethod(lambda: [0])  # of `RemoteWorker.server`

    def __init__(self):
        super().__init__()
        self.nodes: list[_Node] = []  # by rank
        self._placement: Any = None  # Ray's placement group
        self._idle_after = float("inf")
        threading.Thread(target=self._give_back, daemon=True).start()

    def gpu_count(self) -> int:
        """GPUs of the cluster."""
        return int(within(_SOON, ray.cluster_resources).get("GPU", 0))

    def _run(self, call: Call) -> list:
        self.start_limit = call.timeout + _START
        return super()._run(replace(call, hosts=self))

    def name(self, rank: int) -> str:
        return self.nodes[rank].name

    @property
    def environment(self) -> dict[str, Any]:
        """What tells ranks where they are: of each its node's number, its own there, and how many are there."""
        nodes = self.nodes[: self.world_size]
        order, each = list(dict.fromkeys(nodes)), Counter(nodes)
        places = [(order.index(node), nodes[:rank].count(node), each[node]) for rank, node in enumerate(nodes)]
        return {"network": True, "count": len(order), "address": nodes[0].address, "places": places}

    def _give_back(self) -> None:
        """Give the places back when the ranks have been idle for so long that they end."""
        while True:
            time.sleep(5.0)
            if self.workers and time.monotonic() - self.used > self._idle_after and self._busy.acquire(blocking=False):
                self.close()
                self._busy.release()

    def close(self) -> None:
        if self.pid != os.getpid():
            return
        super().close()
        nodes, self.nodes = dict.fromkeys(self.nodes), []
        placement, self._placement = self._placement, None
        if nodes or placement:
            with contextlib.suppress(Exception):  # the cluster has gone, and with it what we had there
                within(_SOON, lambda: [remove_placement_group(placement), *(ray.kill(node.actor) for node in nodes)])

    def _kill(self, workers: list) -> None:
        for worker in workers:
            worker.node.actor.act.remote(worker.token, "kill")

    def _give_up_start(self) -> None:
        self.close()

    def _end_unfit(self, call: Call) -> None:
        self._idle_after = self._idle_seconds(call)
        super()._end_unfit(call)
        if call.world_size > len(self.nodes) or any(node.gone for node in self.nodes):
            self.close()

    def _choose_meeting(self) -> None:
        self.generation += 1
        self.port = self.nodes[0].ask("free_port")

    def _send(self, call: Call, ranks: list[int], folder: str) -> None:
        body: Any = ray.put(call.body) if len(call.body) > _INLINE else call.body
        super()._send(replace(call, body=body), ranks, folder)

    def _start_workers(self, call: Call, missing: list[int]) -> None:
        modules = [*processes._shared, *(name for name in processes.SLOW if name in sys.modules)]
        started = []
        try:
            if not self.nodes:
                self._place(call)
            new = {rank: RemoteWorker(rank, self.nodes[rank]) for rank in missing}
            self.workers.update(new)
            for node in dict.fromkeys(self.nodes):
                ranks = {worker.token: rank for rank, worker in new.items() if worker.node is node}
                started.append(node.actor.start.remote(ranks, node.gpus, modules))
            ray.get(started)
        except (ray.exceptions.RayError, ray.exceptions.RayTaskError) as error:
            why = (str(getattr(error, "cause", error)).strip().splitlines() or [type(error).__name__])[0]
            raise errors.refusal(RuntimeError, f"the ranks cannot be started on the cluster: {why}") from None

    def _place(self, call: Call) -> None:
        """Have Ray find places for the ranks, and start an actor on each node that has some."""
        on_gpus = call.backend == "nccl"
        self._placement = placement_group([{"CPU": 1, "GPU": 1} if on_gpus else {"CPU": 1}] * call.world_size, "PACK")
        self._wait_for_room(call, "GPU" if on_gpus else "CPU")
        where = placement_group_table(self._placement)["bundles_to_node_id"]
        places = sorted(where, key=lambda place: (-list(where.values()).count(where[place]), where[place], place))
        ids = list(dict.fromkeys(where[place] for place in places))
        kind = ray.remote(**_ACTOR)(ray_node.Node)
        actors = [kind.options(scheduling_strategy=OnNode(node, soft=False)).remote(sys.path) for node in ids]
        abouts = ray.get([actor.about.remote() for actor in actors], timeout=_START)
        for about in abouts:
            _compare(about)
        names = [about["name"] for about in abouts]
        names = names if len({*names}) == len(names) else [f"node{i}" for i in range(len(names))]
        nodes = {id: _Node(actors[i], names[i], abouts[i]["address"]) for i, id in enumerate(ids)}
        self.nodes = [nodes[where[place]] for place in places]
        for node, gpus in zip(self.nodes, self._gpus_of(places) if on_gpus else [], strict=False):
            node.gpus += gpus

    def _wait_for_room(self, call: Call, what: str) -> None:
        deadline = time.monotonic() + call.timeout
        while not self._placement.wait(TICK):
            free, there = ray.available_resources().get(what, 0), ray.cluster_resources().get(what, 0)
            self.starting = f"waiting for a {what} each: {free:g} of {there:g} are free"
            if time.monotonic() > deadline:
                text = f"no room on the cluster within {call.timeout:g} s: {call.world_size} ranks need a {what} each, "
                text += f"and {free:g} of {there:g} are free. Ask for fewer ranks, or wait for what else runs there: "
                raise errors.refusal(RuntimeError, text + "`ray status`; a notebook's shutdown() ends its warm ranks.")
        self.starting = "starting"

    def _gpus_of(self, places: list) -> list[list[int]]:
        """The GPU that Ray has set aside in each place: only a task there is told."""
        task = ray.remote(num_cpus=0, num_gpus=1)(lambda: [int(number) for number in ray.get_gpu_ids()])
        return ray.get([task.options(scheduling_strategy=InPlace(self._placement, p)).remote() for p in places])


def _compare(about: dict) -> None:
    """Refuse a node on which something differs that notebook and ranks must share."""
    for name, version in ray_node.versions().items():
        if (there := about["versions"].get(name)) != version:
            text = f"node {about['name']} ({about['address']}) has {f'{name} {there}' if there else f'no {name}'}, the "
            text += f"notebook has {name} {version}. Nothing has run. Give the nodes the notebook's environment: "
            raise errors.refusal(RuntimeError, text + "its folder on a shared disk, or the same image.")


launched = RayPool()  # the ranks of ``launch`` that are on a cluster
atexit.register(launched.close)
