"""The network above the nodes: leaf and spine switches, and who shares which of its links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from .graph import Device, Link, Topology

__all__ = ["leaf_spine", "most_shared"]


def leaf_spine(flat: Topology, leaves: int, oversubscription: float = 1.0, rails: bool = False) -> Topology:
    """Put leaf switches and a spine, one switch here, in the place of the one switch of a cluster.

    The leaves divide the nodes among them in order, or with `rails` the cards of each node: card r of every node goes
    to leaf r mod leaves. `oversubscription` is how many times the bandwidth of a leaf's nodes exceeds that to the
    spine.
    """
    ports = [link for link in flat.links if link.b == "switch"]
    nodes = sorted({flat.devices[gpu].node for gpu in flat.gpus})
    cards: Counter[int] = Counter()
    devices = {name: device for name, device in flat.devices.items() if name != "switch"}
    devices |= {name: Device(name, "switch") for name in (*(f"leaf{i}" for i in range(leaves)), "spine")}
    links, below = [link for link in flat.links if link.b != "switch"], Counter()
    for port in ports:
        node = flat.devices[port.a].node
        leaf = f"leaf{cards[node] % leaves if rails else nodes.index(node) * leaves // len(nodes)}"
        cards[node] += 1
        below[leaf] += port.bandwidth
        links.append(replace(port, b=leaf))
    kind = ports[0].kind + " trunk"
    links += [Link(leaf, "spine", kind, bandwidth / oversubscription) for leaf, bandwidth in below.items()]
    return Topology(f"{flat.name}, {leaves} leaves", flat.source, devices, links)


def most_shared(topology: Topology, pairs: Iterable[tuple[str | int, str | int]]) -> tuple[Link, int]:
    """The link that limits messages of one size that are under way together, and how many of them it carries one way.

    Each pair (a, b) is a message from a to b, each a device's name or a rank. The messages then take that number times
    their size, divided by the link's bandwidth.
    """
    users: Counter[tuple[Link, str]] = Counter()
    for a, b in pairs:
        path = topology.path(a, b)
        users.update(zip(path.links, path.devices, strict=False))
    (link, _), count = max(users.items(), key=lambda item: item[1] / item[0][0].bandwidth)
    return link, count
