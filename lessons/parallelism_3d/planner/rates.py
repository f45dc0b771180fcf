"""How fast a GPU does the operations of a training step: products by shape, attention by length, bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from course_utils.hardware import GPUS
from course_utils.recorded import ACHIEVABLE_MATMUL

#: What FP8 reaches of its peak, beside what bf16 reaches of its own: measured on an H200 (`recorded.gpu_check`), 1,442
#: of 1,979 TFLOP/s with a scale for each tensor, where bf16 is known to reach 0.80.
_FP8_SHARE = 0.91

#: Kernel -> share of a GPU's peak that it reaches on long sequences, forward and backward together, by architecture.
#: Ampere: FlashAttention up to 40 %, its successor up to 73 % (Dao 2023, arXiv 2307.08691, abstract and section 1).
#: Hopper, measured on an H200 (`recorded.gpu_check`): 0.325 for the successor, 0.6 for cuDNN's kernel, which stands for
#: FlashAttention-3; with the next constant both are met within 4 % from 512 to 16,384 tokens. The first one was not
#: measured: its successor reached 35 to 40 % of an H100 where it was twice as fast (the same source). Blackwell is
#: taken like Hopper. A training step reaches as much less of these as of the best product.
_ATTENTION_SHARE: Mapping[tuple[str, str], float] = {
    ("flash1", "Ampere"): 0.4, ("flash2", "Ampere"): 0.73, ("flash3", "Ampere"): 0.73,  # the third is for Hopper
    ("flash1", "Hopper"): 0.22, ("flash2", "Hopper"): 0.325, ("flash3", "Hopper"): 0.6,
}
#: Keys that a token sees at which attention reaches half of that share: FlashAttention-2 with heads of 64 and no mask
#: makes 204, 252, 275, 288 and 302 TFLOP/s forward and backward with 512, 1,024, 2,048, 4,096 and 8,192 tokens
#: (https://github.com/Dao-AILab/flash-attention/pull/2688), which 305 n / (n + 250) follows within 3 %. With a causal
#: mask a token sees half of the tokens on average.
_HALF_KEYS = 250
#: Tokens of a tile of attention. Tiles on the diagonal are computed whole, though half of them is masked.
_ATTENTION_TILE = 128
#: Backward of fused attention takes 2.5 times the products of forward: it computes the scores once more.
ATTENTION_BACKWARD = 2.5

#: Rows and columns of the tiles that matrix libraries cut a product into, with the share of the largest one's speed
#: (NVIDIA, Matrix Multiplication Background User's Guide, sections 3.1 and 3.2, says that larger ones are faster and
#: why; the shares are by bytes read per operation: 1/128 + 1/256 against 1/128 + 1/128 and 1/64 + 1/128, of which
#: a third shows).
_TILES = ((256, 128, 1.0), (128, 128, 0.9), (128, 64, 0.75))

#: Seconds that a hop of a ring adds in a node to a message large enough for the full bandwidth, by architecture.
#: Measured: all-reduces of 16 to 64 MiB by eight A100s take longer than their bytes at 0.8 of the link by 12 us for
#: each of 14 hops, the median of nine (`recorded.A100_ALL_REDUCE`, `recorded.OTHER_A100_ALL_REDUCE`); one of 16 MiB by
#: eight H200s than at the bandwidth of the largest by 4.3 us (`recorded.H200_ALL_REDUCE`).
HOP: Mapping[str, float] = {"Ampere": 12e-6, "Hopper": 4.3e-6, "Blackwell": 4.3e-6}

#: Bytes that converting an element to FP8 passes: read for the largest value and read again, written as it is and
#: transposed; and with that fused into the operation before, which writes both in place of two bytes.
CAST, FUSED_CAST = 6.0, 2.0

#: Seconds that starting a kernel takes from Python, at least: what goes on below it is hidden, what is shorter is not.
LAUNCH = 5e-6
#: Kernels of a layer's forward, without and with compilation. Backward starts twice as many.
KERNELS = {False: 45, True: 20}


@dataclass(frozen=True)
class StepTimeConstants:
    """What share of its hardware's figures a training step reaches."""

    #: Of the best matrix product found on the GPU (`recorded.ACHIEVABLE_MATMUL`), before waves and tiles: Ampere, and
    #: Hopper, whose power does not allow the full clock for long. Fitted to five runs, and rounded. Blackwell: the
    #: median over every second of 29 dense rates in FP8 (`evidence`) comes out right; the others are 2.4 % off.
    matmul: float = 0.873
    matmul_hopper: float = 0.776
    matmul_blackwell: float = 0.7
    #: Of the memory bandwidth, in element-wise operations. Assumed; `fit` can find it from measurements.
    hbm: float = 0.85
    #: How much slower the GPU computes while it communicates as well. Measured: the average over GPT and Llama on A100,
    #: H100 and others (Lee et al. 2025, arXiv 2507.03114, abstract; up to 0.4).
    contention: float = 0.189
    #: Of the link in a node, in large collectives: `recorded.H200_LARGEST` has 361 of 450 GB/s for all-gather, the
    #: A100s of `recorded.A100_ALL_REDUCE` 235 of 300 GB/s at most.
    nvlink: float = 0.8
    #: Of the network port, in large messages: `recorded.FOUR_H200_NODES` reaches 364.7 of 400 GB/s a node.
    network: float = 0.9


#: What a plan takes, unless it is given others.
CONSTANTS = StepTimeConstants()


def best_product(gpu: str, products: str = "bf16") -> float:
    """FLOP/s of the best matrix product found on a GPU; where none was published, the H100's share of the peak."""
    flops, known = GPUS[gpu].flops, gpu if gpu in ACHIEVABLE_MATMUL else "h100"
    share = ACHIEVABLE_MATMUL[known] / GPUS[known].flops["bf16"]
    return share * (_FP8_SHARE if products == "fp8" else 1.0) * flops.get(products, flops["bf16"])


@cache
def fill(rows: float, columns: float, units: int) -> float:
    """Share of the fastest tiles' speed that a product reaches on `units` multiprocessors: the last wave leaves some of
    them idle, and tiles at the edge are partly empty. The library takes the best of its tiles."""

    def reached(high: int, wide: int, share: float) -> float:
        waves = math.ceil(math.ceil(rows / high) * math.ceil(columns / wide) / units)
        return share * rows * columns / (waves * units * high * wide)

    return max(reached(*tile) for tile in _TILES)


def product_seconds(
    rows: float, columns: float, inner: float, units: int, flops: float, stream: float, width: float = 2.0
) -> float:
    """Seconds of a product at `flops` operations and `stream` bytes a second: arithmetic, or in a thin product reading
    its factors, and after that writing what comes out, which is much beside a short inner dimension."""
    arithmetic = 2 * rows * columns * inner / (flops * fill(rows, columns, units))
    factors = width * inner * (rows + columns) / stream
    return max(arithmetic, factors) + 2 * rows * columns / stream


def attention_rate(gpu: str, kernel: str, length: float) -> float:
    """FLOP/s of fused causal attention over `length` tokens, both passes together; the scores that the mask leaves."""
    architecture, keys = GPUS[gpu].architecture, length / 2
    share = _ATTENTION_SHARE.get((kernel, architecture)) or _ATTENTION_SHARE[kernel, "Hopper"]
    return GPUS[gpu].flops["bf16"] * share * keys / (keys + _HALF_KEYS) / (1 + _ATTENTION_TILE / length)
