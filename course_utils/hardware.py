"""What the data sheets say: links and GPUs, each figure with its source.

Bandwidths are bytes per second in one direction. FLOP/s are dense: no sparsity. The figures of data sheets, white
papers and product pages were read in transcriptions of them, the H100's in Lockwood's,
https://glennklockwood.com/garden/processors/h100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["GPU", "GPUS", "LINKS", "LinkType", "growth", "rungs"]

_AMPERE = "NVIDIA Ampere Architecture In-Depth, https://developer.nvidia.com/blog/nvidia-ampere-architecture-in-depth/"
_HOPPER = "NVIDIA Hopper Architecture In-Depth, https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/"
_NETWORK = "Bekman, ml-engineering, network, https://github.com/stas00/ml-engineering/blob/master/network/README.md"
_TOPO = "NCCL source, src/graph/topo.h, https://github.com/NVIDIA/nccl/blob/master/src/graph/topo.h"
_TUNING = "latency: NCCL source, src/graph/tuning.cc, https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc"
_A100 = (
    "NVIDIA A100 data sheet, "
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf"
)
_T4 = (
    "NVIDIA T4 data sheet, "
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
)
_H100 = (
    "NVIDIA H100 Tensor Core GPU Architecture, white paper V1.04, tables 1 and 3, "
    "https://resources.nvidia.com/en-us-tensor-core/nvidia-h100-tensor-core-gpu-architecture"
)
_H200 = "NVIDIA H200 product page, https://www.nvidia.com/en-us/data-center/h200/"
_BLACKWELL = (
    "NVIDIA Blackwell Architecture Technical Brief, table 3, https://resources.nvidia.com/en-us-blackwell-architecture"
)
_SCALING = "SMs: Austin et al., How to Think About GPUs, https://jax-ml.github.io/scaling-book/gpus/"
_DGX_B200 = "memory: DGX B200 User Guide, https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html"
_MLPERF = "memory: MLCommons inference results 6.1, https://github.com/mlcommons/inference_results_v6.1"

# NCCL's latency of one ring step with the Simple protocol, GPU to GPU (tuning.cc, hwLat).
_NVLINK_STEP, _PCIE_STEP, _NETWORK_STEP = 3.4e-6, 5.7e-6, 14e-6


@dataclass(frozen=True)
class LinkType:
    """A kind of link.

    Attributes
    ----------
    name : str
        As it is written in text.
    bandwidth : float
        Bytes per second in one direction: for NVLink all links of one GPU together, for PCIe 16 lanes, for networks
        one port.
    latency : float
        Seconds for a message of no length from one GPU to another whose path is of this kind: NCCL's constant for one
        ring step, Simple protocol. A path of several such links does not take it several times.
    source : str
        Title and address of what the figures were read in.
    """

    name: str
    bandwidth: float
    latency: float
    source: str


@dataclass(frozen=True)
class GPU:
    """A GPU, in its fastest module (SXM where there is one).

    Attributes
    ----------
    name, architecture : str
    year : int
        Of the announcement.
    sms : int
        Streaming multiprocessors that are switched on.
    memory_bytes, memory_bandwidth : float
        Bytes, and bytes per second.
    flops : mapping of precision to float
        Dense operations per second: fp64, fp32 (CUDA cores), fp64_tensor, tf32, fp16, bf16, fp8, fp4 (tensor cores
        where the GPU has any). What the source does not list is left out.
    sparse_factor : float
        Factor on tensor-core figures that data sheets print for matrices with 2:4 sparsity; 1 where there is none.
    nvlink, pcie : str or None
        Keys of `LINKS`.
    source : str
        Title and address of what the figures were read in.
    """

    name: str
    year: int
    architecture: str
    sms: int
    memory_bytes: float
    memory_bandwidth: float
    flops: Mapping[str, float]
    sparse_factor: float
    nvlink: str | None
    pcie: str
    source: str

    def ridge(self, precision: str = "bf16") -> float:
        """FLOP per byte of memory traffic above which arithmetic, not memory, sets the pace (Williams et al. 2009)."""
        if precision not in self.flops:
            raise ValueError(f"{self.name} has no figure for {precision!r}; choose one of {', '.join(self.flops)}")
        return self.flops[precision] / self.memory_bandwidth


def _link(name: str, bandwidth: float, latency: float, source: str) -> LinkType:
    return LinkType(name, bandwidth, latency, f"bandwidth: {source}; {_TUNING}")


#: Links by key. NVLink counts all links of one GPU; a CPU link is what NCCL assumes between two sockets.
LINKS: Mapping[str, LinkType] = MappingProxyType({
    "nvlink1": _link("NVLink 1", 80e9, _NVLINK_STEP, _NETWORK),
    "nvlink2": _link("NVLink 2", 150e9, _NVLINK_STEP, _AMPERE),
    "nvlink3": _link("NVLink 3", 300e9, _NVLINK_STEP, _AMPERE),
    "nvlink4": _link("NVLink 4", 450e9, _NVLINK_STEP, _HOPPER),
    "nvlink5": _link("NVLink 5", 900e9, _NVLINK_STEP, _NETWORK),
    "nvlink_c2c": _link("NVLink-C2C", 450e9, _NVLINK_STEP, _HOPPER),
    "pcie3": _link("PCIe 3 x16", 15.75e9, _PCIE_STEP, _AMPERE),
    "pcie4": _link("PCIe 4 x16", 31.5e9, _PCIE_STEP, _AMPERE),
    "pcie5": _link("PCIe 5 x16", 63e9, _PCIE_STEP, _NETWORK),
    "pcie6": _link("PCIe 6 x16", 121e9, _PCIE_STEP, _NETWORK),
    "cpu_skylake": _link("UPI (Skylake)", 10e9, _PCIE_STEP, _TOPO),
    "cpu_zen2": _link("Infinity Fabric (Zen 2)", 16e9, _PCIE_STEP, _TOPO),
    "cpu_zen4": _link("Infinity Fabric (Zen 4)", 24e9, _PCIE_STEP, _TOPO),
    "cpu_sapphire_rapids": _link("UPI (Sapphire Rapids)", 22e9, _PCIE_STEP, _TOPO),
    "ib_edr": _link("InfiniBand EDR", 100e9 / 8, _NETWORK_STEP, _NETWORK),
    "ib_hdr": _link("InfiniBand HDR", 200e9 / 8, _NETWORK_STEP, _NETWORK),
    "ib_ndr": _link("InfiniBand NDR", 400e9 / 8, _NETWORK_STEP, _NETWORK),
    "ib_xdr": _link("InfiniBand XDR", 800e9 / 8, _NETWORK_STEP, _NETWORK),
    "eth_10g": _link("Ethernet 10G", 10e9 / 8, _NETWORK_STEP, "the name gives it, in bits"),
    "eth_25g": _link("Ethernet 25G", 25e9 / 8, _NETWORK_STEP, "the name gives it, in bits"),
    "eth_50g": _link("Ethernet 50G", 50e9 / 8, _NETWORK_STEP, "the name gives it, in bits"),
    "eth_100g": _link("Ethernet 100G", 100e9 / 8, _NETWORK_STEP, "the name gives it, in bits"),
    "eth_400g": _link("Ethernet 400G", 400e9 / 8, _NETWORK_STEP, "the name gives it, in bits"),
})


def _tera(**flops: float) -> Mapping[str, float]:
    return MappingProxyType({precision: figure * 1e12 for precision, figure in flops.items()})


#: GPUs by key, oldest first.
GPUS: Mapping[str, GPU] = MappingProxyType({
    "p100": GPU(
        "P100", 2016, "Pascal", 56, 16e9, 720e9, _tera(fp64=5.3, fp32=10.6, fp16=21.2), 1,
        "nvlink1", "pcie3", _AMPERE,
    ),
    "v100": GPU(
        "V100", 2017, "Volta", 80, 32e9, 900e9, _tera(fp64=7.8, fp32=15.7, fp16=125), 1,
        "nvlink2", "pcie3", _AMPERE,
    ),
    "t4": GPU(
        "T4", 2018, "Turing", 40, 16e9, 320e9, _tera(fp32=8.1, fp16=65), 1,
        None, "pcie3", _T4,
    ),
    "a100": GPU(
        "A100", 2020, "Ampere", 108, 80e9, 2039e9,
        _tera(fp64=9.7, fp32=19.5, fp64_tensor=19.5, tf32=156, fp16=312, bf16=312), 2,
        "nvlink3", "pcie4", f"{_A100}; {_AMPERE}",
    ),
    "h100": GPU(
        "H100", 2022, "Hopper", 132, 80e9, 3.35e12,
        _tera(fp64=33.5, fp32=66.9, fp64_tensor=66.9, tf32=494.7, fp16=989.4, bf16=989.4, fp8=1978.9), 2,
        "nvlink4", "pcie5", f"{_H100}; {_HOPPER}",
    ),
    "h200": GPU(
        "H200", 2023, "Hopper", 132, 141e9, 4.8e12,
        _tera(fp64=34, fp32=67, fp64_tensor=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979), 2,
        "nvlink4", "pcie5", f"{_H200}; {_SCALING}",
    ),
    "b200": GPU(
        "B200", 2024, "Blackwell", 148, 180e9, 8e12,
        _tera(fp64=40, fp32=80, fp64_tensor=40, tf32=1100, fp16=2250, bf16=2250, fp8=4500, fp4=9000), 2,
        "nvlink5", "pcie5", f"{_BLACKWELL}; {_DGX_B200}; {_SCALING}",
    ),
    "gb200": GPU(
        "GB200 (one GPU)", 2024, "Blackwell", 148, 186e9, 8e12,
        _tera(tf32=1250, fp16=2500, bf16=2500, fp8=5000, fp4=10000), 2,
        "nvlink5", "pcie5", f"{_BLACKWELL}; {_MLPERF}; {_SCALING}",
    ),
})

_KINDS = {"nvlink": "NVLink", "pcie": "PCIe", "ib": "InfiniBand", "eth": "Ethernet"}


def growth(
    keys: Sequence[str] = ("p100", "v100", "a100", "h100", "h200", "b200"),
) -> tuple[list[str], dict[str, list[float]]]:
    """Name and year of GPUs with NVLink, and their figures by what they count, as lesson 01 draws them."""
    line = [GPUS[key] for key in keys]
    figures = {
        "16-bit arithmetic": [gpu.flops["fp16"] for gpu in line],
        "memory size": [gpu.memory_bytes for gpu in line],
        "memory bandwidth": [gpu.memory_bandwidth for gpu in line],
        "NVLink": [LINKS[gpu.nvlink].bandwidth for gpu in line if gpu.nvlink],
        "PCIe": [LINKS[gpu.pcie].bandwidth for gpu in line],
    }
    return [f"{gpu.name}\n{gpu.year}" for gpu in line], figures


def rungs() -> tuple[dict[str, float], dict[str, str]]:
    """Bandwidth and kind of every link of `LINKS` that leaves a chip or a node, and of some GPUs' memory, by name."""
    speeds, kinds = {}, {}
    for key, link in LINKS.items():
        kind = _KINDS.get(key.partition("_")[0].rstrip("0123456789"))
        if kind and key != "nvlink_c2c":
            speeds[link.name], kinds[link.name] = link.bandwidth, kind
    for gpu in (GPUS[key] for key in ("p100", "a100", "h100", "b200")):
        speeds[f"HBM ({gpu.name})"], kinds[f"HBM ({gpu.name})"] = gpu.memory_bandwidth, "HBM"
    return speeds, kinds
