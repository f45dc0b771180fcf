"""Read this machine: what nvidia-smi prints and what the kernel lists under /sys, and the graph they make.

Nothing here keeps a host name, an interface name or an address: a picture of the machine may end up in a notebook.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ..hardware import GPUS, LINKS
from .graph import Builder, Slot, Topology

__all__ = [
    "Matrix", "Numa", "PciDevice", "from_matrix", "nvidia_smi", "parse_gpus", "parse_matrix", "pcie_slot", "read_numa",
    "read_pci", "this_machine",
]

_CELLS = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # GT/s of one lane
_OLD_LANE = {1: 0.25e9, 2: 0.5e9}  # bytes/s: 2.5 and 5 GT/s, ten bits on the wire for eight
_GPU_MAKERS = ("0x10de", "0x1002")
_UNKNOWN = Slot("PCIe")
_NVLINKS = {"nvlink1": 4, "nvlink2": 6, "nvlink3": 12, "nvlink4": 18, "nvlink5": 18}  # of one GPU


@dataclass(frozen=True)
class Matrix:
    """`nvidia-smi topo -m`: device names in order, cells by pair of names, and the NUMA node of each GPU."""

    names: tuple[str, ...]
    cells: dict[tuple[str, str], str]
    numa: dict[str, str]


@dataclass(frozen=True)
class Numa:
    """A NUMA node: its number, logical CPUs, and bytes of memory."""

    number: int
    cpus: int
    memory: int


@dataclass(frozen=True)
class PciDevice:
    """A GPU or network card: bridges above it from the root down, NUMA node, link to its slot, port in bits/s."""

    address: str
    kind: str
    bridges: tuple[tuple[str, Slot], ...]
    numa: int
    slot: Slot
    port: float = math.nan


def pcie_slot(generation: int, lanes: int) -> Slot:
    """Return the PCI Express link of `generation` 1 to 6 with `lanes` lanes; unknown outside."""
    if not 1 <= generation <= 6 or lanes < 1:
        return _UNKNOWN
    lane = _OLD_LANE[generation] if generation < 3 else LINKS[f"pcie{generation}"].bandwidth / 16
    return Slot(f"PCIe {generation} x{lanes}", lane * lanes)


def parse_matrix(text: str) -> Matrix:
    """Parse what ``nvidia-smi topo -m`` prints; the legend below the table may be missing.

    Raises `ValueError` saying what is wrong where there is no such table or a cell means nothing.
    """
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header = next((words for words in lines if len(words) > 1 and words[0] == "GPU0" and words[1] != "X"), None)
    if header is None:
        raise ValueError("no table found: give the whole output of `nvidia-smi topo -m`, its line 'GPU0 GPU1 …' too")
    names = tuple(header[: header.index("CPU")] if "CPU" in header else header)
    cells, numa = {}, {}
    for name in names:
        row = next((words[1:] for words in lines if words and words[0] == name and words is not header), None)
        if row is None and not name.startswith("GPU"):
            continue  # some tools cut the rows of the network cards: their columns say the same
        if row is None or len(row) < len(names):
            raise ValueError(f"the row of {name} has {len(row or ())} cells, the header names {len(names)} devices")
        for other, cell in zip(names, row, strict=False):
            cell = {"SOC": "SYS"}.get(cell, cell)  # drivers before 2017 wrote SOC
            if cell not in _CELLS and not re.fullmatch(r"NV\d+", cell):
                allowed = ", ".join(_CELLS[1:])
                raise ValueError(f"cell {name} to {other} is {cell!r}; expected one of {allowed}, NV1 to NV18, or X")
            cells[name, other] = cells[other, name] = cell
        affinity = row[len(names) + 1 : len(names) + 2]
        if affinity and affinity[0] != "N/A":
            numa[name] = affinity[0]
    for a in names:
        for b in names:
            cells.setdefault((a, b), "X" if a == b else "SYS")
    return Matrix(names, cells, numa)


def parse_gpus(text: str) -> list[tuple[str, Slot]]:
    """Parse ``nvidia-smi --query-gpu=name,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader``."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    return [(name, pcie_slot(int(_number(generation)), int(_number(lanes)))) for name, generation, lanes in rows]


def nvidia_smi(*arguments: str) -> str:
    """Return what ``nvidia-smi`` (NVML's command line) prints, or nothing where it is missing, fails or hangs."""
    smi = shutil.which("nvidia-smi") or "/usr/lib/wsl/lib/nvidia-smi"
    try:
        done = subprocess.run([smi, *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str, default: float = 0) -> float:
    found = re.match(r"-?\d+(\.\d+)?", text)
    return float(found[0]) if found else default


def _list(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _count(cpus: str) -> int:
    """Count a list of CPUs such as ``0-3,8-11``."""
    ends = [part.split("-") for part in cpus.split(",") if part.strip()]
    return sum(int(_number(end[-1])) - int(_number(end[0])) + 1 for end in ends)


def read_numa(root: str | Path = "/sys") -> list[Numa]:
    """Return the NUMA nodes that have CPUs; one for the whole machine where the kernel lists none."""
    nodes = []
    for folder in _list(Path(root) / "devices/system/node"):
        if not re.fullmatch(r"node\d+", folder.name):
            continue
        cpus = _count(_text(folder / "cpulist"))
        total = re.search(r"MemTotal:\s+(\d+) kB", _text(folder / "meminfo"))
        if cpus:
            nodes.append(Numa(int(folder.name[4:]), cpus, 1024 * int(total[1]) if total else 0))
    return nodes or [Numa(0, os.cpu_count() or 1, _memory())]


def _memory() -> int:
    try:
        return psutil.virtual_memory().total
    except (OSError, RuntimeError, psutil.Error):
        return 0


def _slot(folder: Path) -> Slot:
    generation = _GENERATION.get(_number(_text(folder / "current_link_speed")), 0)
    return pcie_slot(generation, int(_number(_text(folder / "current_link_width"))))


def _kind(folder: Path) -> str | None:
    number = _text(folder / "class")
    if number.startswith("0x02"):
        return "nic"
    return "gpu" if number.startswith("0x03") and _text(folder / "vendor") in _GPU_MAKERS else None


def _port(folder: Path) -> float:
    """Return bits per second of the fastest port: Ethernet in Mb/s below net/, InfiniBand below infiniband/."""
    rates = [_number(_text(path)) * 1e6 for path in _glob(folder, "net/*/speed", "virtio*/net/*/speed")]
    rates += [_number(_text(path)) * 1e9 for path in _glob(folder, "infiniband/*/ports/*/rate")]
    return max((rate for rate in rates if rate > 0), default=math.nan)


def _glob(folder: Path, *patterns: str) -> Iterable[Path]:
    for pattern in patterns:
        yield from sorted(folder.glob(pattern))


def read_pci(root: str | Path = "/sys") -> list[PciDevice]:
    """Return GPUs and network cards on the PCI buses, without the virtual functions of a card that is listed itself."""
    found = []
    for entry in _list(Path(root) / "bus/pci/devices"):
        folder, kind = entry.resolve(), _kind(entry)
        if kind is None or (folder / "physfn").exists():
            continue
        above = [parent for parent in reversed(folder.parents) if _ADDRESS.fullmatch(parent.name)]
        bridges = tuple((parent.name, _slot(parent)) for parent in above)
        numa = max(0, int(_number(_text(folder / "numa_node"))))
        found.append(PciDevice(entry.name, kind, bridges, numa, _slot(folder), _port(folder)))
    return found


def _groups(names: Iterable[str], near: Callable[[str, str], bool]) -> list[list[str]]:
    """Split `names` into groups: two that are near each other are in one, directly or through others."""
    groups: list[list[str]] = []
    for name in names:
        joined = [group for group in groups if any(near(name, other) for other in group)]
        groups = [group for group in groups if group not in joined] + [[*sum(joined, []), name]]
    order = {name: i for i, name in enumerate(names)}
    return sorted((sorted(group, key=order.get) for group in groups), key=lambda group: order[group[0]])


def from_matrix(text: str, gpu: str | None = None) -> Topology:
    """Build the graph that ``nvidia-smi topo -m`` describes.

    The matrix tells what kind of connection there is, not how fast it is.

    Parameters
    ----------
    text : str
        The whole output; the legend may be missing.
    gpu : str, optional
        A key of `hardware.GPUS`. NVLink and PCI Express then have the speed of its data sheet; otherwise a link of
        NVLink counts 25 GB/s (generations 2 to 4) and PCI Express is of unknown speed.
    """
    if gpu is not None and gpu not in GPUS:
        raise ValueError(f"unknown GPU {gpu!r}; choose one of {', '.join(GPUS)}")
    slots = LINKS[GPUS[gpu].pcie] if gpu else _UNKNOWN
    return _graph(parse_matrix(text), GPUS[gpu].nvlink if gpu else None, lambda _: slots)


def _graph(matrix: Matrix, nvlink: str | None, slot_of: Callable[[str], Slot], details: Sequence[str] = ()) -> Topology:
    names, cells, b = matrix.names, matrix.cells, Builder()
    gpus = [name for name in names if name.startswith("GPU")]
    for name in names:
        b.add(name, "gpu" if name in gpus else "nic")
    for name, detail in zip(gpus, details, strict=False):
        b.add(name, "gpu", detail=detail)
    _nvlinks(b, gpus, cells, nvlink)

    def same_cpu(x: str, y: str) -> bool:
        if cells[x, y].startswith("NV"):  # hides how the two are joined otherwise
            return matrix.numa.get(x) == matrix.numa.get(y)
        return cells[x, y] in ("PIX", "PXB", "PHB", "NODE")

    tops, bridges = {name: name for name in names}, 0
    for level in ({"PIX"}, {"PIX", "PXB"}):
        for group in _groups(names, lambda x, y, level=level: cells[x, y] in level):
            below = list(dict.fromkeys(tops[name] for name in group))
            if len(below) > 1:
                bridge = b.add(f"PCIe{bridges}", "pcie")
                bridges += 1
                for device in below:
                    _plug(b, device, bridge, slot_of)
                tops.update(dict.fromkeys(group, bridge))
    cpus = []
    for group in _groups(names, same_cpu):
        numa = next((matrix.numa[name] for name in group if name in matrix.numa), None)
        cpus.append(b.add(f"CPU{len(cpus)}", "cpu", detail=f"NUMA {numa}" if numa else ""))
        for device in dict.fromkeys(tops[name] for name in group):
            _plug(b, device, cpus[-1], slot_of)
    b.sockets(cpus, Slot("socket link"))
    return b.done("nvidia-smi topo -m", "the output of nvidia-smi topo -m")


def _plug(b: Builder, device: str, into: str, slot_of: Callable[[str], Slot]) -> None:
    is_gpu = b.devices[device].kind == "gpu"
    b.join(device, into, slot_of(device), LINKS["pcie4"].latency / 2 if is_gpu else 0.0)


def _nvlinks(b: Builder, gpus: list[str], cells: Mapping, key: str | None) -> None:
    """Join GPUs by NVLink: one by one, or through a switch where a GPU shows more links than any has."""
    each, step = (LINKS[key].bandwidth / _NVLINKS[key] if key else 25e9), LINKS["nvlink4"].latency
    name = LINKS[key].name if key else "NVLink"
    count = {(x, y): int(cells[x, y][2:]) for x in gpus for y in gpus if cells[x, y].startswith("NV")}
    if any(sum(count.get((x, y), 0) for y in gpus) > max(_NVLINKS.values()) for x in gpus):
        b.add("NVSwitch", "nvswitch")
        for x in gpus:
            links = max((count.get((x, y), 0) for y in gpus), default=0)
            if links:
                b.join(x, "NVSwitch", Slot(name, links * each), step / 2)
        return
    for (x, y), links in count.items():
        if x < y:
            b.join(x, y, Slot(name, links * each), step)


def this_machine(root: str | Path = "/sys") -> Topology:
    """Return the machine this runs on, as far as it can be read; never raises.

    With NVIDIA GPUs, what ``nvidia-smi`` (the command line of NVML) prints: ``topo -m``, and generation and lanes of
    each PCI Express slot. Otherwise the NUMA nodes, network cards and PCI Express links that Linux lists under `root`;
    elsewhere one CPU. No name or address of the machine is read.
    """
    query = "--query-gpu=name,pcie.link.gen.max,pcie.link.width.max"
    cards = parse_gpus(nvidia_smi(query, "--format=csv,noheader"))
    if not cards:
        return _kernel_graph(root)
    names = [f"GPU{i}" for i in range(len(cards))]
    try:
        matrix = parse_matrix(nvidia_smi("topo", "-m"))
    except ValueError:
        matrix = Matrix(tuple(names), {(x, y): "X" if x == y else "PHB" for x in names for y in names}, {})
    first = re.split(r"[ -]", cards[0][0].lower())
    key = next((key for key in reversed(GPUS) if key in first), None)
    slots = {name: link for name, (_, link) in zip(names, cards, strict=True)}
    machine = _graph(
        matrix, GPUS[key].nvlink if key else None, lambda name: slots.get(name, _UNKNOWN), [n for n, _ in cards]
    )
    return replace(machine, name="this machine", source="nvidia-smi on this machine")


def _kernel_graph(root: str | Path) -> Topology:
    b, count = Builder(), Counter()
    cpus = {}
    for node in read_numa(root):
        memory = f", {node.memory / 2**30:.3g} GiB" if node.memory else ""
        cpus[node.number] = b.add(f"CPU{len(cpus)}", "cpu", detail=f"{node.cpus} CPUs{memory}")
    b.sockets(list(cpus.values()), Slot("socket link"))
    devices, names, bridges = read_pci(root), {}, {}
    below = {
        bridge: [d.address for d in devices if bridge in dict(d.bridges)] for d in devices for bridge, _ in d.bridges
    }
    for device in devices:
        into = cpus.get(device.numa, "CPU0")
        for bridge, link in device.bridges:
            same = tuple(below[bridge])  # a switch is several bridges in a row: the last of them stands for it
            if len(same) > 1 and same not in bridges:
                bridges[same] = b.add(f"PCIe{len(bridges)}", "pcie")
                b.join(bridges[same], into, link)
            into = bridges.get(same, into)
        kind = device.kind.upper()
        port = "" if math.isnan(device.port) else f"{device.port / 1e9:g} Gb/s"
        names[device.address] = b.add(f"{kind}{count[kind]}", device.kind, detail=port)
        count[kind] += 1
        half = LINKS["pcie4"].latency / 2 if device.kind == "gpu" else 0.0
        b.join(names[device.address], into, device.slot, half)
    return b.done("this machine", "what the operating system lists")
