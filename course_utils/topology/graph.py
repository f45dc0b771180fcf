"""Devices, links, and the search for the best path between two devices."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

__all__ = ["KINDS", "Builder", "Device", "Link", "Path", "Slot", "Topology"]

KINDS = ("gpu", "cpu", "pcie", "nvswitch", "nic", "switch", "memory")
_RELAYS = {"cpu", "pcie", "nvswitch"}  # what passes on what is not meant for it, inside a node
_NETWORK = {"nic", "switch"}  # and between nodes


class Wire(Protocol):
    """What a link is made of, such as `hardware.LinkType`."""

    name: str
    bandwidth: float


@dataclass(frozen=True)
class Slot:
    """A link that is in no table: its name, and bytes per second one way (NaN where unknown)."""

    name: str
    bandwidth: float = math.nan


@dataclass(frozen=True)
class Device:
    """A part of a machine: its name, its kind (one of `KINDS`), the node it is in, and what to add in a picture."""

    name: str
    kind: str
    node: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Link:
    """A cable, bus or bundle of lanes between devices `a` and `b`.

    Bandwidth is in bytes per second in one direction, NaN where unknown; latency in seconds.
    """

    a: str
    b: str
    kind: str
    bandwidth: float
    latency: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} between {self.a} and {self.b}"


@dataclass(frozen=True)
class Path:
    """The way from one device to another: `devices` in order, and the `links` between them, one fewer."""

    devices: tuple[str, ...]
    links: tuple[Link, ...]

    @property
    def latency(self) -> float:
        """Seconds for a message of no length: the sum over the links."""
        return sum(link.latency for link in self.links)

    @property
    def bottleneck(self) -> Link:
        """The first of the slowest links."""
        return min(self.links, key=_width)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the slowest link; NaN where one is unknown."""
        return self.bottleneck.bandwidth

    def seconds(self, size: float) -> float:
        """Return the time of one message of `size` bytes with the path to itself: latency + size / bandwidth."""
        if size < 0:
            raise ValueError(f"size must not be negative, got {size}")
        return self.latency + size / self.bandwidth

    def __str__(self) -> str:
        speed = "unknown speed" if math.isnan(self.bandwidth) else f"{self.bandwidth / 1e9:.4g} GB/s"
        return f"{' → '.join(self.devices)}: {speed}, {self.latency * 1e6:.3g} µs, slowest link: {self.bottleneck}"


def _width(link: Link) -> float:
    return 0.0 if math.isnan(link.bandwidth) else link.bandwidth


@dataclass(frozen=True, repr=False)
class Topology:
    """A graph of devices and links; two devices may share several links.

    Attributes
    ----------
    name : str
    source : str
        Where the structure was read, with the address.
    devices : dict of name to Device
    links : list of Link
    """

    name: str
    source: str
    devices: dict[str, Device]
    links: list[Link] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, device in self.devices.items():
            if device.name != name or device.kind not in KINDS:
                raise ValueError(f"device {name!r} is named {device.name!r}, of kind {device.kind!r}; kinds: {KINDS}")
        for link in self.links:
            if not {link.a, link.b} <= self.devices.keys() or link.a == link.b:
                raise ValueError(f"{link} does not join two devices of {self.name}")
            if link.bandwidth <= 0 or not 0 <= link.latency < math.inf:
                raise ValueError(f"{link}: bandwidth must be positive (bytes/s), latency not negative (s)")

    def __repr__(self) -> str:
        counts = Counter(device.kind for device in self.devices.values())
        return f"Topology({self.name!r}: {', '.join(f'{counts[kind]} {kind}' for kind in KINDS if counts[kind])})"

    @property
    def gpus(self) -> list[str]:
        """Names of the GPUs; rank r runs on ``gpus[r]``."""
        return [name for name, device in self.devices.items() if device.kind == "gpu"]

    @cached_property
    def _neighbours(self) -> dict[str, list[tuple[str, Link]]]:
        near: dict[str, list[tuple[str, Link]]] = {name: [] for name in self.devices}
        for link in self.links:
            near[link.a].append((link.b, link))
            near[link.b].append((link.a, link))
        return near

    @cached_property
    def _paths(self) -> dict[tuple[str, str], Path | None]:
        return {}

    @cached_property
    def _others(self) -> dict[str, set[str]]:
        return {}

    def _find(self, device: str | int) -> str:
        if isinstance(device, str):
            if device not in self.devices:
                raise ValueError(f"{self.name} has no device {device!r}; choose one of {', '.join(self.devices)}")
            return device
        if not 0 <= device < len(self.gpus):
            raise ValueError(f"{self.name} has {len(self.gpus)} GPUs: rank must be from 0, below that; got {device}")
        return self.gpus[device]

    def path(self, a: str | int, b: str | int) -> Path:
        """Return the best way from `a` to `b`, each a device's name or a rank.

        Best is the highest bandwidth of the slowest link, then the lowest latency, then the fewest links. GPUs and
        memory pass nothing on; network cards and switches only what goes to another node. GPUs that are equally near
        to several cards take different ones.
        """
        start, end = self._find(a), self._find(b)
        if start == end:
            raise ValueError(f"a path needs two different devices, got {start} twice")
        if (start, end) not in self._paths:
            self._paths[start, end] = self._best(start, end)
        best = self._paths[start, end]
        if best is None:
            raise ValueError(f"{self.name} has no path from {start} to {end}")
        return best

    def _best(self, start: str, end: str) -> Path | None:
        away = self.devices[start].node != self.devices[end].node
        relays = _RELAYS | _NETWORK if away else _RELAYS
        widest = self._search(start, end, relays, 0.0, -math.inf, lambda low, link: max(low, -_width(link)))
        if widest is None:
            return None
        others = self._cards(start) | self._cards(end) if away else set()

        def farther(cost: tuple, link: Link) -> tuple:
            return cost[0] + link.latency, cost[1] + 1, cost[2] + len(others & {link.a, link.b})

        return self._search(start, end, relays, min(map(_width, widest.links)), (0, 0, 0), farther)

    def _cards(self, end: str) -> set[str]:
        """Return the network cards as near to a GPU as its own, without that; GPUs with the same cards take turns."""
        if self.devices[end].kind != "gpu":
            return set()
        if end not in self._others:
            node = [name for name, device in self.devices.items() if device.node == self.devices[end].node]
            cards = [name for name in node if self.devices[name].kind == "nic"]
            gpus = [name for name in node if self.devices[name].kind == "gpu"] if len(cards) > 1 else []
            self._others[end] = set()  # where there is no choice
            turns: Counter[tuple[str, ...]] = Counter()
            for gpu in gpus:
                paths = {card: self._best(gpu, card) for card in cards}
                cost = {c: (-_width(p.bottleneck), p.latency, len(p.links)) for c, p in paths.items() if p is not None}
                near = tuple(card for card in cost if cost[card] == min(cost.values()))
                self._others[gpu] = set(near) - set(near[turns[near] % max(1, len(near)) :][:1])
                turns[near] += 1
        return self._others[end]

    def _search(self, start: str, end: str, relays: set[str], floor: float, zero, extend: Callable) -> Path | None:
        """Dijkstra's search over links of at least `floor` bytes/s, with `extend(cost, link)` never below `cost`."""
        queue, done, order = [(zero, 0, start, None)], {}, 0
        while queue:
            cost, _, here, came = heapq.heappop(queue)
            if here in done:
                continue
            done[here] = came
            if here == end:
                return self._trace(done, end)
            if here != start and self.devices[here].kind not in relays:
                continue
            for there, link in self._neighbours[here]:
                if there not in done and _width(link) >= floor:
                    order += 1
                    heapq.heappush(queue, (extend(cost, link), order, there, (here, link)))
        return None

    @staticmethod
    def _trace(came: Mapping, end: str) -> Path:
        devices, links = [end], []
        while came[devices[-1]] is not None:
            before, link = came[devices[-1]]
            devices.append(before)
            links.append(link)
        return Path(tuple(reversed(devices)), tuple(reversed(links)))


class Builder:
    """Devices and links of one machine while it is put together."""

    def __init__(self) -> None:
        self.devices: dict[str, Device] = {}
        self.links: list[Link] = []

    def add(self, name: str, kind: str, node: int = 0, detail: str = "") -> str:
        self.devices[name] = Device(name, kind, node, detail)
        return name

    def join(self, a: str, b: str, link: Wire, latency: float = 0.0) -> None:
        self.links.append(Link(a, b, link.name, link.bandwidth, latency))

    def sockets(self, cpus: list[str], link: Wire) -> None:
        """Join CPUs: two directly, more through one device that stands for what is between them."""
        if len(cpus) == 2:
            self.join(*cpus, link)
        elif len(cpus) > 2:
            hub = self.add("CPU fabric", "cpu")
            for cpu in cpus:
                self.join(cpu, hub, link)

    def done(self, name: str, source: str) -> Topology:
        return Topology(name, source, self.devices, self.links)
