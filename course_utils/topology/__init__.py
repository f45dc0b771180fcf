"""Machines and clusters as graphs of devices and links: reference machines, this machine, the path between two GPUs.

Bandwidths are bytes per second in one direction; a link is full duplex. NCCL gives one latency for a whole step from
GPU to GPU (`hardware.LINKS`). Here half of it lies on the link at each GPU; what is left of a network step lies on the
two network ports; links in between add nothing. So the latency of a path between two GPUs is NCCL's figure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..hardware import LINKS, LinkType
from .detection import from_matrix, nvidia_smi, parse_matrix, pcie_slot, this_machine
from .graph import Builder, Device, Link, Path, Slot, Topology
from .networks import leaf_spine, most_shared

__all__ = [
    "REFERENCES", "Device", "Link", "Path", "Topology", "cluster", "from_matrix", "leaf_spine", "most_shared",
    "nvidia_smi", "parse_matrix", "reference", "this_machine", "two_level",
]


def _workstation() -> Builder:
    b, pcie = Builder(), LINKS["pcie4"]
    b.add("CPU0", "cpu")
    for i in range(2):
        b.join(b.add(f"GPU{i}", "gpu"), "CPU0", pcie, pcie.latency / 2)
    b.join(b.add("NIC0", "nic"), "CPU0", pcie_slot(3, 4))
    return b


def _dgx(nvlink: str, pcie: str, sockets: str, share: int) -> Builder:
    """Eight GPUs on an NVSwitch plane and two CPUs; `share` GPUs and as many network cards on one PCIe switch."""
    b, lanes, plane = Builder(), LINKS[pcie], LINKS[nvlink]
    for cpu in ("CPU0", "CPU1"):
        b.add(cpu, "cpu")
    b.add("NVSwitch", "nvswitch")
    for i in range(8):
        gpu, nic, bridge = b.add(f"GPU{i}", "gpu", card=f"NIC{i}"), b.add(f"NIC{i}", "nic"), f"PCIe{i // share}"
        if bridge not in b.devices:
            b.join(b.add(bridge, "pcie"), f"CPU{i // 4}", lanes)
        b.join(gpu, "NVSwitch", plane, plane.latency / 2)
        b.join(gpu, bridge, lanes, lanes.latency / 2)
        b.join(nic, bridge, lanes)
    b.sockets(["CPU0", "CPU1"], LINKS[sockets])
    return b


def _nvl72() -> Builder:
    b, plane, chip = Builder(), LINKS["nvlink5"], LINKS["nvlink_c2c"]
    b.add("NVSwitch", "nvswitch")
    for i in range(72):
        tray, cpu = i // 4, f"CPU{i // 2}"
        if cpu not in b.devices:
            b.add(cpu, "cpu", tray)
        gpu, nic = b.add(f"GPU{i}", "gpu", tray, card=f"NIC{i}"), b.add(f"NIC{i}", "nic", tray)
        b.join(gpu, "NVSwitch", plane, plane.latency / 2)
        b.join(gpu, cpu, chip, chip.latency / 2)
        b.join(nic, cpu, LINKS["pcie5"])
    for tray in range(18):
        b.sockets([f"CPU{2 * tray}", f"CPU{2 * tray + 1}"], Slot("socket link"))
    return b


def _t4() -> Builder:
    b, pcie = Builder(), LINKS["pcie3"]
    b.add("CPU0", "cpu")
    b.join(b.add("GPU0", "gpu"), "CPU0", pcie, pcie.latency / 2)
    b.join(b.add("NIC0", "nic"), "CPU0", pcie)
    return b


_DOCS, _NCCL = "https://docs.nvidia.com/dgx", "https://github.com/NVIDIA/nccl"
_T4_PORT = replace(LINKS["eth_10g"], name="Ethernet 8G", bandwidth=1e9)
#: Builder, network port and source of each reference machine.
_MACHINES: dict[str, tuple[Callable[[], Builder], LinkType, str]] = {
    "pcie workstation": (_workstation, LINKS["eth_10g"],
        "two GeForce cards: " + _NCCL + "/issues/1309 (traffic between them goes to the CPU), 16 lanes each: "
        "https://www.runlocalai.co/hardware-combos/dual-rtx-4090; the 10 Gb/s network card is assumed"),
    "dgx a100": (lambda: _dgx("nvlink3", "pcie4", "cpu_zen2", 2), LINKS["ib_hdr"],
        f"{_DOCS}/dgxa100-user-guide/introduction-to-dgxa100.html; PCIe: {_NCCL}/issues/1505; its six NVSwitch chips "
        "are one plane here, and the cards for storage are left out"),
    "dgx h100": (lambda: _dgx("nvlink4", "pcie5", "cpu_sapphire_rapids", 1), LINKS["ib_ndr"],
        f"{_DOCS}/dgxh100-user-guide/introduction-to-dgxh100.html (table of network modules); PCIe: "
        "https://github.com/vllm-project/vllm/issues/13855; its four NVSwitch chips are one plane here, and the cards "
        "for storage are left out"),
    "dgx h200": (lambda: _dgx("nvlink4", "pcie5", "cpu_sapphire_rapids", 1), LINKS["ib_ndr"],
        f"{_DOCS}/dgxh100-user-guide/introduction-to-dgxh100.html (one guide for DGX H100 and H200)"),
    "gb200 nvl72": (_nvl72, LINKS["ib_ndr"],
        f"{_DOCS}/dgxgb200-user-guide/hardware.html; a node is a compute tray, the nine switch trays are one plane "
        "here, and NVLink-C2C is taken as Hopper's"),
    "2 x t4": (_t4, _T4_PORT,
        "Azure Standard_NC4as_T4_v3, 8 Gb/s each: "
        "https://github.com/MicrosoftDocs/azure-docs/blob/main/articles/virtual-machines/nct4-v3-series.md"),
}

#: Names that `reference` knows.
REFERENCES = tuple(_MACHINES)


def reference(name: str) -> Topology:
    """Return the reference machine `name`, one of `REFERENCES`, with the sources of its structure.

    ``2 x t4`` is two nodes with one GPU each; the others are one machine each, to be joined by `cluster`.
    """
    if name not in _MACHINES:
        raise ValueError(f"unknown machine {name!r}; choose one of {', '.join(REFERENCES)}")
    build, port, source = _MACHINES[name]
    machine = build().done(name, source)
    return replace(cluster(machine, 2, port), name=name) if build is _t4 else machine


def cluster(node: str | Topology, nodes: int, link: LinkType | None = None) -> Topology:
    """Join copies of a machine: every network card to one switch, which stands for a network without bottleneck.

    `node` is one of `REFERENCES`, or a machine with `link`, the network port of each card. Names of devices begin with
    ``node0.``, ``node1.`` and so on (``rack0.`` for racks).
    """
    machine = reference(node) if isinstance(node, str) else node
    link = link or _MACHINES[machine.name][1]
    cards = [device for device in machine.devices.values() if device.kind == "nic"]
    size = 1 + max(device.node for device in machine.devices.values())
    b, ports = Builder(), []
    for i in range(nodes):
        prefix = f"{'rack' if size > 1 else 'node'}{i}."
        for device in machine.devices.values():
            b.add(prefix + device.name, device.kind, i * size + device.node, device.detail, prefix + device.card)
        b.links += [replace(old, a=prefix + old.a, b=prefix + old.b) for old in machine.links]
        for card in cards:
            mates = [gpu for gpu in machine.gpus if machine.devices[gpu].node == card.node]
            inside = min(machine.path(gpu, card.name).latency for gpu in mates)
            latency = max(0.0, link.latency / 2 - inside)
            ports.append(Link(prefix + card.name, "switch", link.name, link.bandwidth, latency))
    b.add("switch", "switch")
    b.links += ports
    return b.done(f"{nodes} x {machine.name}", machine.source)


def two_level(
    nodes: int, per_node: int, intra: tuple[float, float], inter: tuple[float, float] | None = None, nics: str = "gpu"
) -> Topology:
    """Return a made-up cluster whose paths have exactly the given (alpha in s, beta in s/byte).

    `intra` is between two GPUs of a node, `inter` between those of different nodes. `nics` says whether each "gpu" has
    a network card of its own, or each "node" one that its GPUs share.
    """
    b = Builder()
    bus = Slot("bus", max(1 / beta for _, beta in (intra, inter or intra)))
    for node in range(nodes):
        prefix = f"node{node}." if nodes > 1 else ""
        hub = b.add(f"{prefix}NVSwitch", "nvswitch", node) if per_node > 1 else None
        for i in range(per_node):
            gpu = b.add(f"{prefix}GPU{i}", "gpu", node)
            if hub:
                b.join(gpu, hub, Slot("node link", 1 / intra[1]), intra[0] / 2)
            if nodes > 1:
                b.join(gpu, b.add(f"{prefix}NIC{i if nics == 'gpu' else 0}", "nic", node), bus)
    if nodes > 1:
        cards = [name for name, device in b.devices.items() if device.kind == "nic"]
        b.add("switch", "switch")
        for card in cards:
            b.join(card, "switch", Slot("network link", 1 / inter[1]), inter[0] / 2)
    name = f"{nodes} x {per_node} GPUs" if nodes > 1 else f"{per_node} GPUs"
    return b.done(name, "made up: alpha and beta were given")
