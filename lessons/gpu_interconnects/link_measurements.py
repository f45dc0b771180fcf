"""Links and memory of this machine, measured: messages between two ranks, copies, the points of a roofline."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from course_utils.costs import bootstrap_alpha_beta, fit_alpha_beta
from course_utils.ranks import device, launch

__all__ = ["Line", "Roof", "best_seconds", "copy_rates", "fit_line", "measured_roof", "time_messages"]

ROUNDS = 30  # timed exchanges of each size


def best_seconds(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of at least five calls, and as many as a tenth of a second holds, after an untimed one."""
    call()
    seconds: list[float] = []
    while len(seconds) < 5 or sum(seconds) < 0.1:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _times(exchange: Callable[[torch.Tensor], Any], sizes: Sequence[int]) -> list[float]:
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device()) for size in sizes]
    times: list[list[float]] = [[] for _ in sizes]
    for _, (at, buffer), timed in itertools.product(range(ROUNDS), enumerate(buffers), (False, True)):
        start = time.perf_counter()
        exchange(buffer)
        if buffer.is_cuda:
            torch.cuda.synchronize()  # a call returns when it is in the GPU's queue
        if timed:
            times[at].append((time.perf_counter() - start) / 2)
    return [float(np.percentile(found, 25)) for found in times]


def time_messages(exchange: Callable[[torch.Tensor], Any], sizes: Sequence[int]) -> list[float]:
    """Seconds of one message of each size in bytes between two ranks: half of a round trip, the first quartile of many.

    ``exchange(buffer)`` sends the buffer from rank 0 to rank 1 and back; both ranks call it. Sizes take turns, so that
    a slow moment of the machine hits all alike. Each timed exchange follows one that is not timed, after which both
    ranks are at the same line.
    """
    return launch(partial(_times, exchange, sizes), world_size=2)[0]


@dataclass(frozen=True)
class Line:
    """t = alpha + beta · S fitted to measured times, and the fits to resampled points, (alpha, beta) in each row."""

    alpha: float
    beta: float
    fits: np.ndarray

    def seconds(self, size: float) -> float:
        """Predicted seconds of a message of `size` bytes."""
        return self.alpha + self.beta * size

    def __str__(self) -> str:
        low, high = np.percentile(self.fits, [2.5, 97.5], axis=0)
        with np.errstate(divide="ignore"):  # beta may be 0 in a draw of small sizes
            rate, slow, fast = 1e-9 / np.array([self.beta, high[1], low[1]])
        return (
            f"alpha    {self.alpha * 1e6:7.0f} µs,   95 % interval {low[0] * 1e6:.0f} to {high[0] * 1e6:.0f} µs\n"
            f"1 / beta {rate:7.2f} GB/s, 95 % interval {slow:.2f} to {fast:.2f} GB/s"
        )


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit alpha and beta on the relative error, and 500 times to points drawn with replacement (`costs`)."""
    return Line(*fit_alpha_beta(sizes, seconds), bootstrap_alpha_beta(sizes, seconds))


@dataclass(frozen=True)
class Roof:
    """What a chip reached: FLOP/s, bytes/s of memory, and by operation its FLOP per byte and FLOP/s."""

    peak: float
    bandwidth: float
    points: dict[str, tuple[float, float]]

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on arithmetic is the limit."""
        return self.peak / self.bandwidth


def _operations(chip: str, sides: Sequence[int]) -> dict[str, tuple[float, float, Callable[[], Any]]]:
    """By name: FLOP, the bytes that must move at least, and a call, in fp32."""
    count = 2**27 if chip == "cuda" else 2**23  # more than fits into a cache
    x, y, out = (torch.ones(count, device=chip) for _ in range(3))
    square, vector, product = (torch.ones(*shape, device=chip) for shape in ((4096, 4096), (4096,), (4096,)))
    found: dict[str, tuple[float, float, Callable[[], Any]]] = {
        "add": (count, 3 * 4 * count, lambda: torch.add(x, y, out=out)),
        "matrix × vector": (2 * square.numel(), 4 * square.numel(), lambda: torch.mv(square, vector, out=product)),
    }
    for side in [*sides, 8192] if chip == "cuda" else sides:
        a, b, c = (torch.ones(side, side, device=chip) for _ in range(3))
        found[f"matmul {side}"] = 2 * side**3, 3 * 4 * side**2, partial(torch.mm, a, b, out=c)
    return found


def measured_roof(chip: str, sides: Sequence[int]) -> Roof:
    """Measure operations in fp32; the best FLOP/s and the best bytes/s of those that memory limits are the roof.

    A CPU computes with one thread, because several that wait for each other measure how busy the machine is.
    """
    wait, threads = torch.cuda.synchronize if chip == "cuda" else (lambda: None), torch.get_num_threads()
    points, bandwidth = {}, 0.0
    torch.set_num_threads(1)
    try:
        for name, (work, moved, call) in _operations(chip, sides).items():
            seconds = best_seconds(lambda call=call: (call(), wait()))
            points[name] = work / moved, work / seconds
            if not name.startswith("matmul"):
                bandwidth = max(bandwidth, moved / seconds)
    finally:
        torch.set_num_threads(threads)
    return Roof(max(rate for _, rate in points.values()), bandwidth, points)


def copy_rates(size: int) -> dict[str, float]:
    """Bytes per second of copies of `size` bytes: in host memory, and to, from, in and between GPUs where there are.

    Bytes copied count once, though a copy reads and writes them.
    """
    host = torch.ones(size, dtype=torch.uint8)
    pairs = {"in host memory": (torch.empty_like(host), host)}
    if torch.cuda.is_available():
        there, pinned = torch.empty(size, dtype=torch.uint8, device="cuda:0"), host.pin_memory()
        pairs |= {
            "pageable to GPU": (there, host), "pinned to GPU": (there, pinned), "GPU to pinned": (pinned, there),
            "within the GPU": (torch.empty_like(there), there),
        }
        if torch.cuda.device_count() > 1:
            pairs["GPU 0 to GPU 1"] = there.to("cuda:1"), there

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        for index in {x.get_device() for x in (target, source) if x.is_cuda}:
            torch.cuda.synchronize(index)

    return {name: size / best_seconds(partial(copy, *pair)) for name, pair in pairs.items()}
