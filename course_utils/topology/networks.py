"""The network above the nodes: leaf and spine switches, and who shares which of its links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from .graph import Device, Link, Topology

__all__ = ["leaf_spine", "most_shared"]


def leaf_spine(flat: Topology, leaves: int, oversubscription: float = 1.0, rails: bool = False) -> Topology:
    """Put leaf switches and a spine in the place of the one switch of a cluster.

    Parameters
    ----------
    flat : Topology
        Of `cluster`, with one network switch.
    leaves : int
        Leaf switches, which divide the nodes among them in order, as evenly as may be.
    oversubscription : float
        How many times the bandwidth of a leaf's nodes exceeds that from the leaf to the spine; at least 1. The spine
        switches are one here, with one link to each leaf.
    rails : bool
        Divide the network cards of each node among the leaves instead: card r of every node goes to leaf r mod leaves.
    """
    ports = [link for link in flat.links if "switch" in (link.a, link.b)]
    if not ports or leaves < 1 or oversubscription < 1:
        raise ValueError(
            f"cannot put {leaves} leaf switches, {oversubscription}:1 oversubscribed, above {flat.name}: needs a "
            "cluster with one network switch, at least one leaf and at least 1:1"
        )
    nodes = sorted({flat.devices[gpu].node for gpu in flat.gpus})
    cards: Counter[int] = Counter()
    devices = {name: device for name, device in flat.devices.items() if name != "switch"}
    devices |= {f"leaf{i}": Device(f"leaf{i}", "switch") for i in range(leaves)} | {"spine": Device("spine", "switch")}
    links, below = [link for link in flat.links if link not in ports], Counter()
    for port in ports:
        card = port.b if port.a == "switch" else port.a
        node = flat.devices[card].node
        leaf = f"leaf{cards[node] % leaves if rails else nodes.index(node) * leaves // len(nodes)}"
        cards[node] += 1
        below[leaf] += port.bandwidth
        links.append(replace(port, a=card, b=leaf))
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
    if not users:
        raise ValueError("at least one pair is needed")
    (link, _), count = max(users.items(), key=lambda item: item[1] / item[0][0].bandwidth)
    return link, count
