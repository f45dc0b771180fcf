"""Devices, links, and the search for the best path between two devices."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ..hardware import LinkType

__all__ = ["Builder", "Device", "Link", "Path", "Slot", "Topology"]

_RELAYS = {"cpu", "pcie", "nvswitch"}  # what passes on what is not meant for it, inside a node
_NETWORK = {"nic", "switch"}  # and between nodes


@dataclass(frozen=True)
class Slot:
    """A link that is in no table: its name, and bytes per second one way (NaN where unknown)."""

    name: str
    bandwidth: float = math.nan


@dataclass(frozen=True)
class Device:
    """A part of a machine: gpu, cpu, pcie (a switch), nvswitch, nic or switch (of the network).

    It has the node that it is in, what to add in a picture, and, of a GPU, the card that it takes of those that are
    equally near.
    """

    name: str
    kind: str
    node: int = 0
    detail: str = ""
    card: str = ""


@dataclass(frozen=True)
class Link:
    """A cable, bus or bundle of lanes between two devices: bytes per second one way (NaN: unknown), and seconds."""

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
        return self.latency + size / self.bandwidth

    def __str__(self) -> str:
        speed = "unknown speed" if math.isnan(self.bandwidth) else f"{self.bandwidth / 1e9:.4g} GB/s"
        return f"{' → '.join(self.devices)}: {speed}, {self.latency * 1e6:.3g} µs, slowest link: {self.bottleneck}"


def _width(link: Link) -> float:
    return 0.0 if math.isnan(link.bandwidth) else link.bandwidth


@dataclass(frozen=True, repr=False)
class Topology:
    """A graph of devices and links, with its name and where its structure was read; two devices may share links."""

    name: str
    source: str
    devices: dict[str, Device]
    links: list[Link]

    def __repr__(self) -> str:
        counts = Counter(device.kind for device in self.devices.values())
        return f"Topology({self.name!r}: {', '.join(f'{count} {kind}' for kind, count in counts.items())})"

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
    def _paths(self) -> dict[tuple[str, str], Path]:
        return {}

    def path(self, a: str | int, b: str | int) -> Path:
        """Return the best way from `a` to `b`, each a device's name or a rank.

        Best is the highest bandwidth of the slowest link, then the lowest latency, then the fewest links, then the
        GPUs' own cards. GPUs pass nothing on; network cards and switches only what goes to another node.
        """
        start, end = (device if isinstance(device, str) else self.gpus[device] for device in (a, b))
        if start == end:
            raise ValueError(f"a path needs two different devices, got {start} twice")
        if (start, end) not in self._paths:
            self._paths[start, end] = self._best(start, end)
        return self._paths[start, end]

    def _best(self, start: str, end: str) -> Path:
        ends = self.devices[start], self.devices[end]
        relays = _RELAYS | _NETWORK if ends[0].node != ends[1].node else _RELAYS
        own = {device.card for device in ends}

        def farther(cost: tuple, there: str, link: Link) -> tuple:
            strange = self.devices[there].kind == "nic" and there not in own
            return cost[0] + link.latency, cost[1] + 1, cost[2] + strange

        widest = self._search(start, end, relays, 0.0, -math.inf, lambda low, _, link: max(low, -_width(link)))
        return self._search(start, end, relays, min(map(_width, widest.links)), (0, 0, 0), farther)

    def _search(self, start: str, end: str, relays: set[str], floor: float, zero, extend: Callable) -> Path:
        """Dijkstra's search over links of at least `floor` bytes/s; `extend(cost, device, link)` never falls."""
        queue, done, order = [(zero, 0, (start,), ())], set(), 0
        while queue:
            cost, _, devices, links = heapq.heappop(queue)
            here = devices[-1]
            if here == end:
                return Path(devices, links)
            if here in done or (here != start and self.devices[here].kind not in relays):
                continue
            done.add(here)
            for there, link in self._neighbours[here]:
                if there not in done and _width(link) >= floor:
                    order += 1
                    heapq.heappush(queue, (extend(cost, there, link), order, (*devices, there), (*links, link)))
        raise ValueError(f"{self.name} has no path from {start} to {end}")


class Builder:
    """Devices and links of one machine while it is put together."""

    def __init__(self) -> None:
        self.devices: dict[str, Device] = {}
        self.links: list[Link] = []

    def add(self, name: str, kind: str, node: int = 0, detail: str = "", card: str = "") -> str:
        self.devices[name] = Device(name, kind, node, detail, card)
        return name

    def join(self, a: str, b: str, link: Slot | LinkType, latency: float = 0.0) -> None:
        self.links.append(Link(a, b, link.name, link.bandwidth, latency))

    def sockets(self, cpus: list[str], link: Slot | LinkType) -> None:
        """Join CPUs: two directly, more through one device that stands for what is between them."""
        if len(cpus) == 2:
            self.join(*cpus, link)
        elif len(cpus) > 2:
            hub = self.add("CPU fabric", "cpu")
            for cpu in cpus:
                self.join(cpu, hub, link)

    def done(self, name: str, source: str) -> Topology:
        return Topology(name, source, self.devices, self.links)
