"""What emulated ranks did, replayed in the order of emulated time (private): when each message starts and arrives."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import NamedTuple

SEND, SENT, ARRIVED = range(3)  # SENT and ARRIVED: waits of the two sides


class InFlight(NamedTuple):
    asked: float  # emulated second of the call
    src: int
    order: int  # of the call, among those of its sender
    dst: int
    size: int
    key: tuple


class Replay:
    """The logs of all ranks in emulated time; `clock` has each rank's at the end.

    A message starts as soon as every link of its path is free for it. Of several that could start at one moment the
    one asked for first does; of these, that of the lowest rank.
    """

    def __init__(self, topology, logs: list[list]):
        self.topology = topology
        self.clock = [0.0] * len(logs)
        self.todo = [deque(log) for log in logs]
        self.waiting: list[InFlight] = []
        self.times: dict[tuple, tuple[float, float]] = {}  # message: when its last byte has left, when it has arrived
        self.free: dict[tuple, float] = defaultdict(float)  # link and where it is entered: free from then on
        self.routes: dict[tuple[int, int], tuple] = {}
        self.order = itertools.count()
        for rank in range(len(logs)):
            self._run(rank)
        while self.waiting:
            start, message = min((self._earliest(message), message) for message in self.waiting)
            links, latency, bandwidth = self.route(message.src, message.dst)
            for link, speed in links:
                self.free[link] = start + message.size / speed
            sent = start + message.size / bandwidth
            self.times[message.key] = sent, sent + latency
            self.waiting.remove(message)
            self._run(message.src)
            self._run(message.dst)

    def _earliest(self, message: InFlight) -> float:
        links, _, _ = self.route(message.src, message.dst)
        return max([message.asked, *(self.free[link] for link, _ in links)])

    def route(self, src: int, dst: int) -> tuple[list, float, float]:
        """Links from `src` to `dst`, where each is entered, and their bandwidths; latency and bandwidth of all."""
        if (src, dst) not in self.routes:
            at, end = self.topology.gpus[src], self.topology.gpus[dst]
            path, links = self.topology.path(at, end), []
            for link in path.links:
                links.append(((link, at), link.bandwidth))
                at = link.b if link.a == at else link.a
            self.routes[src, dst] = links, path.latency, path.bandwidth
        return self.routes[src, dst]

    def _run(self, rank: int) -> None:
        """Take what `rank` has logged, up to a wait whose end is not known yet."""
        todo = self.todo[rank]
        while todo:
            kind, peer, *what, size = todo[0]
            src, dst = (peer, rank) if kind == ARRIVED else (rank, peer)
            key = (src, dst, *what)
            if kind == SEND:
                self.waiting.append(InFlight(self.clock[rank], src, next(self.order), dst, size, key))
            elif key in self.times:
                self.clock[rank] = max(self.clock[rank], self.times[key][kind - SENT])
            else:
                return
            todo.popleft()
