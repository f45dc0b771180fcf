"""Clusters: equal nodes of GPUs with the links between them, those of the course and your own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from course_utils import costs, topology
from course_utils.hardware import GPU, GPUS, LINKS


@dataclass(frozen=True)
class GpuCluster:
    """Equal nodes of GPUs.

    Attributes
    ----------
    name : str
    gpu : str
        A key of `hardware.GPUS`.
    gpus, per_node : int
        GPUs in all, and in each node.
    intra, inter : (float, float)
        Latency in seconds and seconds per byte between two GPUs of a node, and of different nodes, at the speed that
        data sheets print.
    reached : (float or None, float or None)
        Bus bandwidth in bytes per second that large collectives were measured to reach, in a node and, for each GPU,
        between nodes. None: the planner's shares of the data sheet (`StepTimeConstants`).
    memory_bytes, memory_bandwidth : float or None
        Of a GPU, where it differs from the data sheet of `gpu`.
    power : float
        Watts of a GPU, as a share of the data sheet's. Its clock follows the cube root, since power grows with the
        frequency and the square of the voltage, which grow together.
    """

    name: str
    gpu: str
    gpus: int
    per_node: int
    intra: tuple[float, float]
    inter: tuple[float, float]
    reached: tuple[float | None, float | None] = (None, None)
    memory_bytes: float | None = None
    memory_bandwidth: float | None = None
    power: float = 1.0

    @cached_property
    def card(self) -> GPU:
        """What the data sheet says about the GPU, with this cluster's memory."""
        sheet = GPUS[self.gpu]
        return replace(
            sheet, memory_bytes=self.memory_bytes or sheet.memory_bytes,
            memory_bandwidth=self.memory_bandwidth or sheet.memory_bandwidth,
        )

    @property
    def clock(self) -> float:
        """Share of the data sheet's arithmetic that the power allows."""
        return min(1.0, self.power ** (1 / 3))


#: Name -> the reference machine of `topology` and the GPU of `hardware`.
CLUSTERS: Mapping[str, tuple[str, str]] = {
    "DGX A100": ("dgx a100", "a100"), "DGX H100": ("dgx h100", "h100"), "DGX H200": ("dgx h200", "h200"),
}
_NETWORK_LATENCY = LINKS["ib_ndr"].latency


@cache
def cluster(name: str, gpus: int) -> GpuCluster:
    """Return `gpus` GPUs in nodes of the kind `name`, one of `CLUSTERS`; links as `topology` joins two such nodes."""
    if name not in CLUSTERS:
        raise ValueError(f"unknown cluster {name!r}; choose one of {', '.join(CLUSTERS)}")
    machine, gpu = CLUSTERS[name]
    pair = costs.cluster_of(topology.cluster(machine, 2))
    _whole_nodes(name, gpus, pair.per_node)
    return GpuCluster(name, gpu, gpus, pair.per_node, pair.intra, pair.inter)


def own_cluster(
    gpu: str, gpus: int, *, per_node: int = 8, network: float = 400e9, busbw_node: float | None = None,
    busbw_network: float | None = None, memory_bytes: float | None = None, name: str = "",
) -> GpuCluster:
    """Return a cluster of your own.

    Parameters
    ----------
    gpu : str
        Key of `hardware.GPUS` of a GPU with NVLink and bf16: "a100", "h100", "h200", "b200".
    gpus, per_node : int
        GPUs in all, and in each node.
    network : float
        Bits per second of the network for each GPU: a node's ports together, divided by its GPUs.
    busbw_node, busbw_network : float, optional
        Bus bandwidth in bytes per second as nccl-tests prints it (times 1e9) for a large size: ``all_gather_perf -b
        256M -e 256M -g 8`` on one node, and the same with one GPU of each of several nodes.
    memory_bytes : float, optional
        Of a GPU; by default the data sheet's.
    """
    usable = [key for key, card in GPUS.items() if card.nvlink and "bf16" in card.flops]
    if gpu not in usable:
        raise ValueError(f"gpu must be one of {', '.join(usable)}, got {gpu!r}")
    numbers = {"network": network, "busbw_node": busbw_node, "busbw_network": busbw_network, "memory": memory_bytes}
    for what, number in numbers.items():
        if number is not None and not number > 0:
            raise ValueError(f"{what} must be a number above 0, got {number!r}")
    name = name or f"own {GPUS[gpu].name}"
    _whole_nodes(name, gpus, per_node)
    link = LINKS[GPUS[gpu].nvlink]
    return GpuCluster(
        name, gpu, gpus, per_node, (link.latency, 1 / link.bandwidth), (_NETWORK_LATENCY, 8 / network),
        (busbw_node, busbw_network), memory_bytes,
    )


def _whole_nodes(name: str, gpus: int, node: int) -> None:
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1 or (gpus > node and gpus % node):
        raise ValueError(f"{name} has {node} GPUs a node: gpus must be fewer or fill whole nodes, got {gpus!r}")
