"""Choose two devices of a machine or cluster: the path between them, its slowest link, the time of a message."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from functools import cache

from matplotlib.figure import Figure

from course_utils.draw.charts import duration
from course_utils.draw.controls import choice, slider
from course_utils.draw.explorer import Explorer
from course_utils.topology import REFERENCES, Path, Topology, cluster, reference, this_machine
from course_utils.units import format_bytes

from .topology_pictures import topology_picture

_SIZES = [2**power for power in range(10, 35)]


def _machines() -> dict[str, Callable[[], Topology]]:
    """Return what builds each machine, by the name shown: nothing is read or built before it is chosen."""
    pairs = ("dgx h100", "dgx a100", "pcie workstation")
    made = {f"2 x {name}": lambda name=name: cluster(name, 2) for name in pairs}
    made |= {name: lambda name=name: reference(name) for name in REFERENCES}
    return {name: cache(build) for name, build in made.items()} | {"this machine": cache(this_machine)}


def _ends(topology: Topology) -> list[str]:
    """Return the devices that can send and receive, GPUs first."""
    kinds = ("gpu", "nic", "cpu", "memory")
    return [name for kind in kinds for name, device in topology.devices.items() if device.kind == kind]


def _describe(topology: Topology, path: Path, size: int) -> str:
    between_gpus = {topology.devices[name].kind for name in (path.devices[0], path.devices[-1])} == {"gpu"}
    unknown = math.isnan(path.bandwidth)
    rows = {
        "path": " → ".join(path.devices),
        "slowest link": str(path.bottleneck),
        "bandwidth": "unknown" if unknown else f"{path.bandwidth / 1e9:.4g} GB/s in one direction",
        "latency": duration(path.latency) if between_gpus else "left out: known between GPUs only",
        f"time of {format_bytes(size)}": "unknown" if unknown else duration(
            path.seconds(size) if between_gpus else size / path.bandwidth),
    }
    body = "".join(f"<tr><td><b>{html.escape(k)}</b>&nbsp;</td><td>{html.escape(v)}</td></tr>" for k, v in rows.items())
    note = "Modelled: latency + size / bandwidth, nothing else on the way, data-sheet speeds. Structure: "
    return f"<table>{body}</table><small>{note}{html.escape(topology.source)}</small>"


def topology_explorer() -> Explorer:
    """Choose a machine, two of its devices and a message size: path, slowest link, latency, bandwidth and time."""
    machines = _machines()
    machine, start, end = choice("machine", machines), choice("from", []), choice("to", [])
    size = slider("size", [(format_bytes(n), n) for n in _SIZES], 2**26)

    def adapt(changed: str | None) -> None:
        if changed in (None, "machine"):
            topology = machines[machine.value]()
            start.options = end.options = names = _ends(topology)
            gpus = topology.gpus or names
            start.value, end.value = gpus[0], gpus[-1]

    def render(machine: str, size: int, start: str, end: str) -> tuple[Figure, str]:
        topology = machines[machine]()
        try:
            path = topology.path(start, end)
        except ValueError as error:  # the machine is shown all the same
            return topology_picture(topology, None), f"<p><b>{html.escape(str(error))}.</b></p>"
        return topology_picture(topology, path), _describe(topology, path, size)

    return Explorer([{"machine": machine, "size": size}, {"start": start, "end": end}], render, adapt)
