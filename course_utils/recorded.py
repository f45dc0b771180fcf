"""Figures that others measured, each with its source: what the models are held against.

Sizes are bytes, times seconds, bandwidths bytes per second. Sizes S follow nccl-tests, as in `course_utils.costs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .costs import busbw, busbw_factor

__all__ = [
    "A100_ALL_REDUCE", "A100_LATENCY", "A100_P2P", "FOUR_H200_NODES", "H100_P2P", "H200_ALL_REDUCE", "H200_LARGEST",
    "H200_NVLS_BY_GPUS", "LLAMA3_INTERRUPTIONS", "OTHER_A100_ALL_REDUCE", "Scaling", "TORCHTITAN_FSDP", "Table",
    "ULTRASCALE_DP", "ULTRASCALE_TP",
]  # fmt: skip

_MIB = 2**20
_ENGINEERING = "Bekman, ml-engineering, https://github.com/stas00/ml-engineering/blob/master/network"


@dataclass(frozen=True)
class Table:
    """Times of one collective over message size.

    Attributes
    ----------
    name, op : str
        The machine, and a name of `costs.COLLECTIVES`.
    ranks : int
        GPUs that took part.
    sizes : tuple of int
        Message sizes S in bytes.
    seconds : tuple of float
        Time of one call at each size.
    source : str
        Title and address of what the table was read in.
    command : str
        How it was measured, where the source says so.
    """

    name: str
    op: str
    ranks: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    source: str
    command: str = ""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.seconds):
            raise ValueError(f"{self.name} has {len(self.sizes)} sizes and {len(self.seconds)} times")

    @property
    def busbw(self) -> tuple[float, ...]:
        """Bus bandwidth at each size, in bytes per second."""
        return tuple(busbw(self.op, self.ranks, s, t) for s, t in zip(self.sizes, self.seconds, strict=True))


def _times(name: str, rows: Mapping[float, float], source: str, command: str) -> Table:
    """Make a table of all-reduce on 8 GPUs from microseconds by MiB."""
    sizes, seconds = tuple(int(m * _MIB) for m in rows), tuple(t / 1e6 for t in rows.values())
    return Table(name, "all_reduce", 8, sizes, seconds, source, command)


#: One node of eight A100 with NVSwitch. One process with one thread drives all eight GPUs (``-g 8``).
A100_ALL_REDUCE = _times(
    "8 x A100",
    {
        1 / 32: 43.83, 1 / 8: 51.76, 1 / 2: 80.40, 1: 101.9, 2: 101.4, 4: 101.5, 8: 133.5, 16: 276.6, 32: 424.0,
        64: 684.6, 128: 1327.6, 256: 2420.6, 512: 4218.4, 1024: 8203.9, 4096: 32136, 16384: 127997,
    },
    f"{_ENGINEERING}/README.md, Real network throughput",
    "all_reduce_perf -b 32k -e 16G -f 2 -g 8 -n 50",
)  # fmt: skip

#: The same command and kind of node elsewhere: two A100-SXM4-40GB machines, by others and with other versions of NCCL.
OTHER_A100_ALL_REDUCE = (
    _times(
        "8 x A100-40GB, Galvatron's test data",
        {
            1: 78.77, 2: 108.8, 4: 131.1, 8: 183.4, 16: 293.6, 32: 415.7, 64: 657.2, 128: 1256.7, 256: 2338.9,
            512: 4651.2, 1024: 8139.9,
        },
        "Hetu-Galvatron, tests/profiler/test_hardware_profile.py, https://github.com/AFDWang/Hetu-Galvatron",
        "nThread 1 nGpus 8",
    ),
    _times(
        "8 x A100-40GB, a rented node",
        {
            1 / 32: 57.41, 1 / 16: 58.10, 1 / 8: 58.39, 1 / 4: 60.46, 1 / 2: 62.01, 1: 69.33, 2: 74.91, 4: 120.36,
            8: 187.26, 16: 294.92, 32: 457.11, 64: 729.48, 128: 1402.03,
        },
        "CS244C-Research, phase1-baseline/a100-8gpu-new/results, https://github.com/yumibyte/CS244C-Research",
        "all_reduce_perf -b 8 -e 128M -f 2 -g 8, NCCL 2.29.3",
    ),
)  # fmt: skip

#: GPUs of a DGX A100 in one process (``-g n``) -> time of a ring all-reduce of a few bytes on one channel.
#: nccl-tests issue 123, https://github.com/NVIDIA/nccl-tests/issues/123
A100_LATENCY: Mapping[int, float] = MappingProxyType(
    {2: 10e-6, 3: 13.76e-6, 4: 16.88e-6, 5: 20.8e-6, 6: 25.2e-6, 7: 29.5e-6, 8: 33.7e-6}
)

_H200_BUSBW = (
    3.20, 6.26, 12.40, 24.63, 48.30, 72.45, 91.48, 139.97, 182.03, 242.45, 298.44, 369.82, 411.21, 442.27, 455.82,
    464.00, 468.31, 473.10, 475.16, 480.70,
)  # fmt: skip
_H200_SIZES = tuple(2**k for k in range(15, 35))

#: One node of eight H200, nccl-tests with NCCL 2.30.7. NCCL chose ring with LL up to 1 MiB, NVLS with Simple above.
H200_ALL_REDUCE = Table(
    "8 x H200",
    "all_reduce",
    8,
    _H200_SIZES,
    tuple(busbw_factor("all_reduce", 8) * s / (b * 1e9) for s, b in zip(_H200_SIZES, _H200_BUSBW, strict=True)),
    f"{_ENGINEERING}/benchmarks/README.md, How the calls are timed",
    "nccl-tests",
)

#: Bus bandwidth of eight H200 at 16 GiB by what was run (ml-engineering, network).
H200_LARGEST: Mapping[str, float] = MappingProxyType(
    {"all_reduce, ring": 367.6e9, "all_reduce, nvls": 482.3e9, "all_gather": 361.4e9, "reduce_scatter": 362.9e9}
)
#: Bus bandwidth of all-reduce at 8 GiB by number of H200 (the same source); with four NCCL still takes the ring.
H200_NVLS_BY_GPUS: Mapping[int, float] = MappingProxyType({4: 363e9, 5: 414e9, 6: 436e9, 7: 460e9, 8: 473e9})
#: Bus bandwidth of four nodes of eight H200 at 4 GiB by algorithm (the same source).
FOUR_H200_NODES: Mapping[str, float] = MappingProxyType({"ring": 364.7e9, "nvls_tree": 310.1e9})
#: One GPU writing to another, measured with p2pBandwidthLatencyTest (the same source), of 300 and 450 GB/s.
A100_P2P, H100_P2P = 274e9, 376e9


@dataclass(frozen=True)
class Scaling:
    """Throughput of one job on more and more GPUs.

    Attributes
    ----------
    name : str
        The job.
    gpus : tuple of int
        Numbers of GPUs, growing.
    tokens_per_gpu : tuple of float
        Tokens per second of one GPU at each of them.
    source : str
        Title and address of what the figures were read in.
    """

    name: str
    gpus: tuple[int, ...]
    tokens_per_gpu: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if len(self.gpus) != len(self.tokens_per_gpu):
            raise ValueError(f"{self.name} has {len(self.gpus)} GPU counts and {len(self.tokens_per_gpu)} throughputs")

    @property
    def throughput(self) -> tuple[float, ...]:
        """Tokens per second of all GPUs together."""
        return tuple(n * rate for n, rate in zip(self.gpus, self.tokens_per_gpu, strict=True))

    @property
    def efficiency(self) -> tuple[float, ...]:
        """Throughput of a GPU as a share of what it was on the fewest GPUs."""
        return tuple(rate / self.tokens_per_gpu[0] for rate in self.tokens_per_gpu)


#: Data parallelism on ever more GPUs.
ULTRASCALE_DP = Scaling(
    "data parallelism, Ultra-Scale Playbook",
    (8, 16, 32, 64, 128, 256),
    (40150, 37610, 35368, 31112, 26446, 15700),
    "Hugging Face, The Ultra-Scale Playbook, https://huggingface.co/spaces/nanotron/ultrascale-playbook",
)
#: Tensor parallelism: more and more GPUs share each layer of one model with 3 billion parameters.
ULTRASCALE_TP = Scaling(
    "tensor parallelism, Ultra-Scale Playbook",
    (2, 4, 8, 16, 32),
    (13923, 12421, 10903, 6246, 2146),
    "Hugging Face, The Ultra-Scale Playbook, https://huggingface.co/spaces/nanotron/ultrascale-playbook",
)
#: Llama-3-8B with FSDP on H100s, without compilation.
TORCHTITAN_FSDP = Scaling(
    "Llama-3-8B with FSDP, torchtitan",
    (8, 128),
    (5762, 5605),
    "torchtitan, benchmarks, https://github.com/pytorch/torchtitan",
)
#: Unexpected interruptions, days, and GPUs of the Llama 3 405B run (arXiv 2407.21783).
LLAMA3_INTERRUPTIONS = (419, 54, 16384)
