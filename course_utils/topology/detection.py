"""Read this machine: what nvidia-smi prints and what the kernel lists under /sys, and the graph they make.

Nothing here keeps a host name, an interface name or an address: a picture of the machine may end up in a notebook.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ..hardware import GPUS, LINKS, LinkType
from .graph import Builder, Slot, Topology

__all__ = ["from_matrix", "nvidia_smi", "parse_matrix", "pcie_slot", "this_machine"]

_CELL = re.compile(r"X|PIX|PXB|PHB|NODE|SYS|NV\d+")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # GT/s of one lane
_OLD_LANE = {1: 0.25e9, 2: 0.5e9}  # bytes/s: 2.5 and 5 GT/s, ten bits on the wire for eight
_GPU_MAKERS = ("0x10de", "0x1002")
_UNKNOWN = Slot("PCIe")
_NVLINKS = {"nvlink1": 4, "nvlink2": 6, "nvlink3": 12, "nvlink4": 18, "nvlink5": 18}  # of one GPU


def nvidia_smi(*arguments: str) -> str:
    """Return what ``nvidia-smi`` (NVML's command line) prints, or nothing where it is missing, fails or hangs."""
    smi = shutil.which("nvidia-smi") or "/usr/lib/wsl/lib/nvidia-smi"
    try:
        done = subprocess.run([smi, *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout


def pcie_slot(generation: int, lanes: int) -> Slot:
    """Return the PCI Express link of `generation` 1 to 6 with `lanes` lanes; unknown outside."""
    if not 1 <= generation <= 6 or lanes < 1:
        return _UNKNOWN
    lane = _OLD_LANE[generation] if generation < 3 else LINKS[f"pcie{generation}"].bandwidth / 16
    return Slot(f"PCIe {generation} x{lanes}", lane * lanes)


# --- the matrix of nvidia-smi


@dataclass(frozen=True)
class Matrix:
    """`nvidia-smi topo -m`: device names in order, cells by pair of names, and the NUMA node of each GPU."""

    names: tuple[str, ...]
    cells: dict[tuple[str, str], str]
    numa: dict[str, str]


def parse_matrix(text: str) -> Matrix:
    """Parse what ``nvidia-smi topo -m`` prints; rows of network cards and the legend below may be missing.

    Raises `ValueError` saying what is wrong where there is no such table or a cell means nothing.
    """
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header = next((words for words in lines if len(words) > 1 and words[0] == "GPU0" and words[1] != "X"), None)
    if header is None:
        raise ValueError("no table found: give the whole output of `nvidia-smi topo -m`, its line 'GPU0 GPU1 …' too")
    names = tuple(header[: header.index("CPU")] if "CPU" in header else header)
    cells, numa = {}, {}
    for words in lines:
        name, row = (words or [""])[0], words[1:]
        if name not in names or words is header:
            continue
        if len(row) < len(names):
            raise ValueError(f"the row of {name} has {len(row)} cells, the header names {len(names)} devices")
        for other, cell in zip(names, row, strict=False):
            cell = {"SOC": "SYS"}.get(cell, cell)  # drivers before 2017 wrote SOC
            if not _CELL.fullmatch(cell):
                raise ValueError(f"cell {name} to {other} is {cell!r}; expected PIX, PXB, PHB, NODE, SYS, NV# or X")
            cells[name, other] = cells[other, name] = cell
        affinity = row[len(names) + 1 : len(names) + 2]
        if affinity and affinity[0] != "N/A":
            numa[name] = affinity[0]
    missing = next((name for name in names if name.startswith("GPU") and (name, name) not in cells), None)
    if missing:
        raise ValueError(f"there is no row of {missing}, which the header names")
    for a in names:
        for b in names:
            cells.setdefault((a, b), "X" if a == b else "SYS")
    return Matrix(names, cells, numa)


def from_matrix(text: str, gpu: str | None = None) -> Topology:
    """Build the graph that ``nvidia-smi topo -m`` describes; `text` is its output, with or without the legend.

    The matrix tells what kind of connection there is, not how fast it is. With `gpu`, a key of `hardware.GPUS`, NVLink
    and PCI Express have the speed of its data sheet; otherwise a link of NVLink counts 25 GB/s (generations 2 to 4) and
    PCI Express is of unknown speed.
    """
    slot = LINKS[GPUS[gpu].pcie] if gpu else _UNKNOWN
    return _graph(parse_matrix(text), GPUS[gpu].nvlink if gpu else None, {}, slot)


def _groups(names: Sequence[str], near: Callable[[str, str], bool]) -> list[list[str]]:
    """Split `names` into groups: two that are near each other are in one, directly or through others."""
    groups: list[list[str]] = []
    for name in names:
        joined = [group for group in groups if any(near(name, other) for other in group)]
        groups = [group for group in groups if group not in joined] + [[*sum(joined, []), name]]
    return sorted((sorted(group, key=names.index) for group in groups), key=lambda group: names.index(group[0]))


def _graph(
    matrix: Matrix, nvlink: str | None, slots: Mapping[str, Slot], other: Slot | LinkType, details: Sequence[str] = ()
) -> Topology:
    """Devices below PCIe switches and CPUs; `slots` has the links of some by name, `other` is that of the rest."""
    names, cells, b = matrix.names, matrix.cells, Builder()
    gpus = [name for name in names if name.startswith("GPU")]
    for i, name in enumerate(names):
        b.add(name, "gpu" if name in gpus else "nic", detail=details[i] if i < len(details) else "")
    _nvlinks(b, gpus, cells, nvlink)
    tops = {name: name for name in names}

    def plug(group: Iterable[str], into: str) -> None:
        for device in dict.fromkeys(tops[name] for name in group):
            half = LINKS["pcie4"].latency / 2 if b.devices[device].kind == "gpu" else 0.0
            b.join(device, into, slots.get(device, other), half)

    def same_cpu(x: str, y: str) -> bool:
        if cells[x, y].startswith("NV"):  # hides how the two are joined otherwise
            return matrix.numa.get(x) == matrix.numa.get(y)
        return cells[x, y] in ("PIX", "PXB", "PHB", "NODE")

    bridges = 0
    for level in ({"PIX"}, {"PIX", "PXB"}):
        for group in _groups(names, lambda x, y, level=level: cells[x, y] in level):
            if len({tops[name] for name in group}) > 1:
                bridge = b.add(f"PCIe{bridges}", "pcie")
                bridges += 1
                plug(group, bridge)
                tops.update(dict.fromkeys(group, bridge))
    cpus: list[str] = []
    for group in _groups(names, same_cpu):
        numa = next((matrix.numa[name] for name in group if name in matrix.numa), None)
        cpus.append(b.add(f"CPU{len(cpus)}", "cpu", detail=f"NUMA {numa}" if numa else ""))
        plug(group, cpus[-1])
    b.sockets(cpus, Slot("socket link"))
    return b.done("nvidia-smi topo -m", "the output of nvidia-smi topo -m")


def _nvlinks(b: Builder, gpus: list[str], cells: Mapping, key: str | None) -> None:
    """Join GPUs by NVLink: one by one, or through a switch where a GPU shows more links than any has."""
    each, step = (LINKS[key].bandwidth / _NVLINKS[key] if key else 25e9), LINKS["nvlink4"].latency
    name = LINKS[key].name if key else "NVLink"
    count = {(x, y): int(cells[x, y][2:]) for x in gpus for y in gpus if cells[x, y].startswith("NV")}
    if any(sum(count.get((x, y), 0) for y in gpus) > max(_NVLINKS.values()) for x in gpus):
        b.add("NVSwitch", "nvswitch")
        for x in gpus:
            if links := max(count.get((x, y), 0) for y in gpus):
                b.join(x, "NVSwitch", Slot(name, links * each), step / 2)
        return
    for (x, y), links in count.items():
        if x < y:
            b.join(x, y, Slot(name, links * each), step)


# --- what the kernel lists


@dataclass(frozen=True)
class PciDevice:
    """A GPU or network card: bridges above it from the root down, NUMA node, link to its slot, port in bits/s."""

    address: str
    kind: str
    bridges: tuple[tuple[str, Slot], ...]
    numa: int
    slot: Slot
    port: float


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> float:
    found = re.match(r"-?\d+(\.\d+)?", text)
    return float(found[0]) if found else 0.0


def _numa_nodes(root: Path) -> dict[int, str]:
    """The NUMA nodes that have CPUs, and how many and how much memory; one where the kernel lists none."""
    nodes = {}
    for folder in sorted(root.glob("devices/system/node/node[0-9]*")):
        ends = [part.split("-") for part in _text(folder / "cpulist").split(",") if part]  # such as 0-3,8-11
        cpus = sum(int(end[-1]) - int(end[0]) + 1 for end in ends)
        total = re.search(r"MemTotal:\s+(\d+) kB", _text(folder / "meminfo"))
        if cpus:
            nodes[int(folder.name[4:])] = f"{cpus} CPUs" + (f", {int(total[1]) / 2**20:.3g} GiB" if total else "")
    return nodes or {0: f"{os.cpu_count() or 1} CPUs, {psutil.virtual_memory().total / 2**30:.3g} GiB"}


def _slot(folder: Path) -> Slot:
    generation = _GENERATION.get(_number(_text(folder / "current_link_speed")), 0)
    return pcie_slot(generation, int(_number(_text(folder / "current_link_width"))))


def _pci_devices(root: Path) -> list[PciDevice]:
    """Return GPUs and network cards on the PCI buses, without the virtual functions of a card that is listed itself."""
    found = []
    for entry in sorted(root.glob("bus/pci/devices/*")):
        folder, number = entry.resolve(), _text(entry / "class")
        gpu = number.startswith("0x03") and _text(folder / "vendor") in _GPU_MAKERS
        if not (gpu or number.startswith("0x02")) or (folder / "physfn").exists():
            continue
        above = [parent for parent in reversed(folder.parents) if _ADDRESS.fullmatch(parent.name)]
        units = {"net/*/speed": 1e6, "virtio*/net/*/speed": 1e6, "infiniband/*/ports/*/rate": 1e9}
        ports = [_number(_text(path)) * unit for place, unit in units.items() for path in folder.glob(place)]
        found.append(PciDevice(
            entry.name, "gpu" if gpu else "nic", tuple((parent.name, _slot(parent)) for parent in above),
            max(0, int(_number(_text(folder / "numa_node")))), _slot(folder), max(ports, default=0.0),
        ))
    return found


def _kernel_graph(root: Path) -> Topology:
    b, count = Builder(), Counter()
    cpus = {node: b.add(f"CPU{i}", "cpu", detail=text) for i, (node, text) in enumerate(_numa_nodes(root).items())}
    b.sockets(list(cpus.values()), Slot("socket link"))
    devices, switches = _pci_devices(root), {}
    for device in devices:
        into = cpus.get(device.numa, "CPU0")
        for bridge, link in device.bridges:
            same = tuple(other.address for other in devices if bridge in dict(other.bridges))
            if len(same) > 1 and same not in switches:  # a switch is several bridges in a row, with the same below them
                switches[same] = b.add(f"PCIe{len(switches)}", "pcie")
                b.join(switches[same], into, link)
            into = switches.get(same, into)
        port = f"{device.port / 1e9:g} Gb/s" if device.port > 0 else ""
        name = b.add(f"{device.kind.upper()}{count[device.kind]}", device.kind, detail=port)
        count[device.kind] += 1
        b.join(name, into, device.slot, LINKS["pcie4"].latency / 2 if device.kind == "gpu" else 0.0)
    return b.done("this machine", "what the operating system lists")


def this_machine(root: str | Path = "/sys") -> Topology:
    """Return the machine this runs on, as far as it can be read.

    With NVIDIA GPUs, what ``nvidia-smi`` (the command line of NVML) prints: ``topo -m``, and generation and lanes of
    each PCI Express slot. Otherwise the NUMA nodes, network cards and PCI Express links that Linux lists under `root`;
    elsewhere one CPU. No name or address of the machine is read.
    """
    query = "--query-gpu=name,pcie.link.gen.max,pcie.link.width.max"
    printed = nvidia_smi(query, "--format=csv,noheader").splitlines()
    cards = [[part.strip() for part in line.split(",")] for line in printed if line.count(",") == 2]
    if not cards:
        return _kernel_graph(Path(root))
    names = [f"GPU{i}" for i in range(len(cards))]
    slots = {name: pcie_slot(*(int(_number(n)) for n in card[1:])) for name, card in zip(names, cards, strict=True)}
    try:
        matrix = parse_matrix(nvidia_smi("topo", "-m"))
    except ValueError:
        matrix = Matrix(tuple(names), {(x, y): "X" if x == y else "PHB" for x in names for y in names}, {})
    first = re.split(r"[ -]", cards[0][0].lower())
    key = next((key for key in reversed(GPUS) if key in first), None)
    machine = _graph(matrix, GPUS[key].nvlink if key else None, slots, _UNKNOWN, [name for name, *_ in cards])
    return replace(machine, name="this machine", source="nvidia-smi on this machine")
