"""Clusters: equal nodes of GPUs with the links between them, those of the course and your own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from course_utils.hardware import GPU, GPUS, LINKS

#: Bytes that CUDA reports for each byte of a GPU's name: 150.1e9 for the 141 GB of an H200 (`recorded.gpu_check`),
#: 79.1 GiB for the 80 GB of an A100 (its message at https://github.com/lianqi1008/Control-GIC/issues/6).
USABLE = 1.06


@dataclass(frozen=True)
class GpuCluster:
    """Equal nodes of GPUs.

    `intra` and `inter` are latency in seconds and seconds per byte between two GPUs of a node, and of different nodes,
    by data sheets; `reached` the bus bandwidths in bytes per second that large collectives were measured to reach in a
    node and, for each GPU, between nodes (None: the planner's shares of the data sheet).
    """

    gpu: str  # key of `hardware.GPUS`
    gpus: int
    per_node: int
    intra: tuple[float, float]
    inter: tuple[float, float]
    reached: tuple[float | None, float | None] = (None, None)
    memory_bytes: float | None = None  # that CUDA reports of a GPU; None: `USABLE` times its name's
    memory_bandwidth: float | None = None
    power: float = 1.0  # of a GPU, as a share of the data sheet's

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus > self.per_node and self.gpus % self.per_node:
            used = max(n for n in range(1, self.per_node + 1) if self.gpus % n == 0)
            text = f"{self.gpus} GPUs do not fill nodes of {self.per_node}"
            raise ValueError(f"{text}; a job that takes {used} of each: per_node={used}")

    @cached_property
    def card(self) -> GPU:
        """What the data sheet says about the GPU, with the memory that CUDA reports."""
        sheet = GPUS[self.gpu]
        return replace(
            sheet, memory_bytes=self.memory_bytes or USABLE * sheet.memory_bytes,
            memory_bandwidth=self.memory_bandwidth or sheet.memory_bandwidth,
        )

    @property
    def clock(self) -> float:
        """Share of the data sheet's arithmetic that the power allows: power grows with the frequency and the square of
        the voltage, which grow together."""
        return min(1.0, self.power ** (1 / 3))


#: Name -> key of `hardware.GPUS`, GPUs of a node or NVLink domain, bits per second of a GPU's port (NVIDIA's guides).
CLUSTERS: Mapping[str, tuple[str, int, float]] = {
    "DGX A100": ("a100", 8, 200e9), "DGX H100": ("h100", 8, 400e9), "DGX H200": ("h200", 8, 400e9),
    "DGX B200": ("b200", 8, 400e9), "GB200 NVL72": ("gb200", 72, 400e9),
}
#: Seconds of a hop between nodes, and share of the port that collectives reach (None: the planner's constant). EFA: an
#: all-reduce over four nodes of B200 takes 48 to 150 us, 77 in the median, for each of 6 hops beside its bytes at 0.74
#: of the port, from 16 MiB to 4 GiB (Bekman, ml-engineering, network/README.md).
_FABRICS = {"infiniband": (LINKS["ib_ndr"].latency, None), "efa": (77e-6, 0.74)}


@cache
def cluster(name: str, gpus: int) -> GpuCluster:
    """Return `gpus` GPUs in nodes of the kind `name`, one of `CLUSTERS`; of more than one NVL72 as many of each as
    divide them."""
    if name not in CLUSTERS:
        raise ValueError(f"a cluster is one of {', '.join(CLUSTERS)}, got {name!r}")
    gpu, domain, port = CLUSTERS[name]
    used = max(n for n in range(1, domain + 1) if gpus % n == 0) if gpus > domain > 8 else domain
    return own_cluster(gpu, gpus, per_node=used, network=port)


def own_cluster(
    gpu: str, gpus: int, *, per_node: int = 8, network: float = 400e9, busbw_node: float | None = None,
    busbw_network: float | None = None, memory_bytes: float | None = None, fabric: str = "infiniband",
) -> GpuCluster:
    """Return a cluster of your own, of "a100", "h100", "h200", "b200" or "gb200".

    `network` is in bits per second for each GPU: a node's ports together, divided by its GPUs. `fabric` is "efa",
    Amazon's, or "infiniband", also for Ethernet with RoCE. `busbw_node` and `busbw_network` are bus bandwidths in bytes
    per second, as nccl-tests prints them (times 1e9) for a large size:
    ``all_gather_perf -b 256M -e 256M -g 8`` on one node, and the same with one GPU of each of several nodes.
    """
    usable = [key for key, card in GPUS.items() if card.nvlink and "bf16" in card.flops]
    if gpu not in usable:
        raise ValueError(f"gpu must be one of {', '.join(usable)}, got {gpu!r}")
    if not 1e9 <= network <= 1.6e12:
        scaled = next((network * 10**n for n in (9, 6, 3) if 1e9 <= network * 10**n <= 1.6e12), None)
        meant = f"did you mean {scaled:.0e}?" if scaled else f"a node's ports together, divided by its {per_node} GPUs?"
        raise ValueError(f"network is in bits per second of each GPU, from 1e9 to 1.6e12, got {network:g}; {meant}")
    for name, speed in (("busbw_node", busbw_node), ("busbw_network", busbw_network)):
        if speed is not None and not 1e8 <= speed <= 2e12:
            meant = f"; did you mean {speed * 1e9:g}?" if 0.1 <= speed <= 2000 else ""
            raise ValueError(f"{name} is in bytes per second, from 1e8 to 2e12, got {speed:g}{meant}")
    if fabric not in _FABRICS:
        raise ValueError(f"fabric must be one of {', '.join(_FABRICS)}, got {fabric!r}")
    near, (latency, share) = LINKS[GPUS[gpu].nvlink], _FABRICS[fabric]
    reached = busbw_node, busbw_network or (share and share * network / 8)
    intra, inter = (near.latency, 1 / near.bandwidth), (latency, 8 / network)
    return GpuCluster(gpu, gpus, per_node, intra, inter, reached, memory_bytes)
