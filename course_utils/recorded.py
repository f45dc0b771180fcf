"""Figures that others measured, each with its source: what the models are held against.

Sizes are bytes, times seconds, bandwidths bytes per second. Sizes S follow nccl-tests, as in `course_utils.costs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from . import recordings
from .costs import busbw, busbw_factor
from .transformer import PUBLISHED

__all__ = [
    "A100_ALL_REDUCE", "A100_LATENCY", "A100_P2P", "ACHIEVABLE_MATMUL", "FOUR_H200_NODES", "FUSED_ATTENTION",
    "H100_P2P", "H200_ALL_REDUCE", "H200_LARGEST", "H200_NVLS_BY_GPUS", "LLAMA3_INTERRUPTIONS", "LLAMA3_MISPRINT",
    "LLAMA3_RUNS", "MEGATRON_RUNS", "OTHER_A100_ALL_REDUCE", "PTD_RUNS", "Run", "Scaling", "TORCHTITAN_FSDP",
    "TORCHTITAN_RUNS", "Table", "ULTRASCALE_DP", "ULTRASCALE_TP", "ZERO3_RUNS", "gpu_check",
]

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
)

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
)

#: GPUs of a DGX A100 in one process (``-g n``) -> time of a ring all-reduce of a few bytes on one channel.
#: nccl-tests issue 123, https://github.com/NVIDIA/nccl-tests/issues/123
A100_LATENCY: Mapping[int, float] = MappingProxyType(
    {2: 10e-6, 3: 13.76e-6, 4: 16.88e-6, 5: 20.8e-6, 6: 25.2e-6, 7: 29.5e-6, 8: 33.7e-6}
)

_H200_BUSBW = (
    3.20, 6.26, 12.40, 24.63, 48.30, 72.45, 91.48, 139.97, 182.03, 242.45, 298.44, 369.82, 411.21, 442.27, 455.82,
    464.00, 468.31, 473.10, 475.16, 480.70,
)
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

#: GPU -> FLOP/s of the best bf16 matrix product found on it, of the peak in `hardware.GPUS` (Bekman, ml-engineering,
#: compute/accelerator, Maximum Achievable Matmul FLOPS, https://github.com/stas00/ml-engineering, August 2026).
ACHIEVABLE_MATMUL: Mapping[str, float] = MappingProxyType({"a100": 271.2e12, "h100": 794.5e12, "h200": 794.5e12})
#: GPU -> share of the peak that FlashAttention-2 reaches: A100 50 to 73 % (Dao 2023, arXiv 2307.08691, abstract), H100
#: 35 % (Shah et al. 2024, FlashAttention-3, arXiv 2407.08608, abstract); taken for the H200 too.
FUSED_ATTENTION: Mapping[str, float] = MappingProxyType({"a100": 0.6, "h100": 0.35, "h200": 0.35})


@dataclass(frozen=True)
class Run:
    """A published training run of a language model.

    Attributes
    ----------
    model, cluster : str
        Keys of `transformer.PUBLISHED` and `planner.CLUSTERS`.
    gpus, batch, length : int
        GPUs, sequences in a step, tokens in a sequence.
    layout : mapping of str to value
        Fields of `planner.Layout` that the source gives or that follow from it.
    tflops : float
        Published TFLOP/s of each GPU.
    counted : {"hardware", "model"}
        Whether what is computed a second time is in it.
    share : float
        Published share of the GPU's peak.
    source : str
    detail : str
        What tells the run from others of the same model.
    held : float or None
        Published bytes of the fullest GPU.
    """

    model: str
    cluster: str
    gpus: int
    batch: int
    length: int
    layout: Mapping[str, object]
    tflops: float
    counted: str
    share: float
    source: str
    detail: str = ""
    held: float | None = None

    @property
    def name(self) -> str:
        """Model and detail."""
        return f"{self.model}, {self.detail}" if self.detail else self.model


_MEGATRON = (
    "Narayanan et al. 2021, arXiv 2104.04473, table 1; micro-batches and virtual stages: examples/sc21/run_table_1.sh "
    "in https://github.com/NVIDIA/Megatron-LM"
)
_LLAMA3 = "Grattafiori et al. 2024, The Llama 3 Herd of Models, arXiv 2407.21783, table 4 and section 3.3.2"


def _megatron(size: str, tp: int, pp: int, gpus: int, batch: int, tflops: float, share: float, *more: int) -> Run:
    """`more`: sequences in a micro-batch, chunks on each pipeline rank."""
    microbatch, virtual = more
    layout = {
        "tp": tp, "pp": pp, "dp": gpus // (tp * pp), "microbatch": microbatch, "virtual": virtual, "zero": 0,
        "recompute": "full", "sequence_parallel": False, "overlap": pp == 1, "precision": "mixed",
    }
    return Run(f"Megatron {size}", "DGX A100", gpus, batch, 2048, layout, tflops, "hardware", share, _MEGATRON)


#: Megatron-LM's GPTs of growing size on A100s. Gradients are reduced behind backward where the script says
#: ``DDP=torch`` (one pipeline stage), after it where it says ``DDP=local``. Sequence parallelism came later. Paper and
#: script disagree on 39.1B and 1008B: section 5.1 says that all of these runs interleave, the script's two do not.
MEGATRON_RUNS = (
    _megatron("1.7B", 1, 1, 32, 512, 137, 0.44, 16, 1),
    _megatron("3.6B", 2, 1, 64, 512, 138, 0.44, 16, 1),
    _megatron("7.5B", 4, 1, 128, 512, 142, 0.46, 16, 1),
    _megatron("18.4B", 8, 1, 256, 1024, 135, 0.43, 8, 1),
    _megatron("39.1B", 8, 2, 512, 1536, 138, 0.44, 4, 1),
    _megatron("76.1B", 8, 4, 1024, 1792, 140, 0.45, 2, 3),
    _megatron("145.6B", 8, 8, 1536, 2304, 148, 0.47, 2, 2),
    _megatron("310.1B", 8, 16, 1920, 2160, 155, 0.50, 1, 2),
    _megatron("529.6B", 8, 35, 2520, 2520, 163, 0.52, 1, 3),
    _megatron("1008B", 8, 64, 3072, 3072, 163, 0.52, 1, 1),
)


def _section_5_2(model: str, gpus: int, batch: int, tflops: float, **layout: object) -> Run:
    """A row of table 2; layout as in `_megatron`."""
    source = "Narayanan et al. 2021, arXiv 2104.04473, table 2 and section 5.2"
    fixed = {"recompute": "full", "sequence_parallel": False, "precision": "mixed"}
    return Run(
        model, "DGX A100", gpus, batch, 2048, layout | fixed, tflops, "hardware", tflops / 312, source, f"{gpus} GPUs",
    )


#: The same two models on more and more GPUs with an unchanged batch. Micro-batches of one sequence. Virtual stages are
#: assumed, as table 2 does not give them: those of the same models in the scripts of figure 12 and table 1.
PTD_RUNS = tuple(
    _section_5_2(
        model, gpus, batch, tflops, tp=8, pp=pp, dp=gpus // (8 * pp), virtual=virtual, zero=0, overlap=False,
    )
    for model, pp, virtual, batch, rows in (
        ("Megatron 174.6B", 12, 4, 1536, {384: 153, 768: 149, 1536: 141}),
        ("Megatron 529.6B", 35, 3, 2240, {560: 171, 1120: 167, 2240: 159}),
    )
    for gpus, tflops in rows.items()
)
#: The same with ZeRO-3 and no other parallelism, in DeepSpeed of 2021, which overlaps communication where it can.
ZERO3_RUNS = tuple(
    _section_5_2(model, gpus, batch, tflops, dp=gpus, microbatch=batch // gpus, zero=3, overlap=True)
    for model, batch, gpus, tflops in (
        ("Megatron 174.6B", 1536, 384, 144), ("Megatron 174.6B", 1536, 768, 88), ("Megatron 174.6B", 1536, 1536, 44),
        ("Megatron 529.6B", 2560, 640, 138), ("Megatron 529.6B", 2240, 1120, 98), ("Megatron 529.6B", 2240, 2240, 48),
    )
)


def _llama(gpus: int, cp: int, dp: int, length: int, batch: int, tflops: float, share: float) -> Run:
    layout = {
        "tp": 8, "pp": 16, "dp": dp, "cp": cp, "microbatch": 1, "virtual": 8, "zero": 2, "recompute": "selective",
        "sequence_parallel": True, "overlap": True, "precision": "mixed, fp32 gradients",
    }
    detail = f"{gpus} GPUs, {length // 1024}k"
    return Run("Llama 3 405B", "DGX H100", gpus, batch, length, layout, tflops, "model", share, _LLAMA3, detail)


#: Llama 3 405B on H100s, 16 million tokens in a step. From the text: optimizer states and gradients sharded (ZeRO 2),
#: gradients in fp32, asynchronous messages; 126 layers, embedding and head are spread over 16 ranks so that the first
#: chunk has the embedding only and the last the head only: chunks of one layer, eight on a rank. Assumed: micro-batches
#: of one sequence; FlashAttention; and "no activation checkpointing" read as kernels that compute norms and SwiGLU
#: again from their inputs (`selective`), since all that autograd would keep does not fit by our count.
LLAMA3_RUNS = (
    _llama(8192, 1, 64, 8192, 64 * 32, 430, 0.43),
    _llama(16384, 1, 128, 8192, 128 * 16, 400, 0.41),
    _llama(16384, 16, 8, 131072, 8 * 16, 380, 0.38),
)
#: The third of them as the first version of the paper prints it.
LLAMA3_MISPRINT = _llama(16384, 16, 4, 131072, 4 * 16, 380, 0.38)


def _torchtitan(gpus: int, length: int, batch: int, tokens: float, gib: float, detail: str, **layout: object) -> Run:
    """`tokens` per second of each GPU, and memory in GiB, as they are published."""
    model, fixed = PUBLISHED["Llama 3 8B"], {"zero": 3, "precision": "bf16 policy"}
    tflops = replace(model, context=length).flops_per_token("none") * tokens / 1e12
    source = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, https://github.com/pytorch/torchtitan"
    return Run(
        model.name, "DGX H100", gpus, batch, length, layout | fixed, tflops, "model", tflops / 989.4, source, detail,
        gib * 2**30,
    )


#: Llama 3.1 8B with FSDP2 on H100s of another kind (96 GB at 2.4 TB/s, 500 W), 400 Gb/s a GPU: tables 1 and 3 without
#: compilation, table 2 with `torch.compile` and Float8. `planner.published_runs` has them with all that is said.
TORCHTITAN_RUNS = (
    _torchtitan(8, 8192, 16, 5762, 82.4, "8 GPUs", dp=8, microbatch=2, recompute="selective"),
    _torchtitan(128, 8192, 256, 5605, 67.0, "128 GPUs", dp=128, microbatch=2, recompute="selective"),
    _torchtitan(8, 32768, 8, 3890, 83.9, "32k, Float8", dp=8, recompute="full"),
    _torchtitan(8, 65536, 4, 2540, 84.2, "64k, CP 2, Float8", dp=4, cp=2, recompute="full"),
    _torchtitan(8, 131072, 2, 1071, 84.0, "128k, CP 4, Float8", dp=2, cp=4, recompute="full"),
    _torchtitan(8, 262144, 1, 548, 84.5, "256k, CP 8, Float8", dp=1, cp=8, recompute="full"),
)


@cache
def gpu_check(name: str) -> dict[str, Any]:
    """Return what a check of ``python -m tools gpu-check`` found on one H200.

    ``tests/gpu/conftest.py`` says how measurements are written down.
    PyTorch 2.11.0, CUDA 13.0, NCCL 2.28.9, November 2026, in two calls on machines of the same kind.

    Raises
    ------
    ValueError
        If there is no check of that name, or it found nothing there.
    """
    report, _ = recordings.load("gpu_check_h200")
    checks = {check["name"]: check["facts"] for check in report["checks"] if check["facts"]}
    if name not in checks:
        raise ValueError(f"there is no record of {name!r}; there are {', '.join(checks)}")
    return checks[name]
