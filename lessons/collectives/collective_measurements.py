"""Collectives on real ranks, watched: what each rank holds, the seconds by size, the bytes that went over TCP."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from course_utils.ranks import device, launch

__all__ = [
    "barrier_spans", "best_seconds", "collective_calls", "digits", "held", "hidden_step", "tcp_traffic",
    "time_collectives",
]

Spans = list[tuple[str, float, float]]


def digits(count: int | None = None) -> torch.Tensor:
    """Numbers that tell the rank they come from: 1, 2, 3 … on rank 0, 10, 20, 30 … on rank 1, and so on."""
    place = 10 ** dist.get_rank()
    return torch.tensor([(i % 9 + 1) * place for i in range(count or dist.get_world_size())], device=device())


def held(
    collective: Callable[[Any], Any], world_size: int, start: str = "row", backend: str | None = None
) -> tuple[list, list]:
    """Run ``collective(x)`` on N real ranks, and return what each held before it, and after it: what it returned.

    x is by `start`: ``"row"``, N numbers of :func:`digits` on every rank; ``"piece"``, one number on every rank;
    ``"root"``, N numbers on rank 0 and None on the others.
    """

    def on_this_rank() -> tuple[Any, Any]:
        x = None if start == "root" and dist.get_rank() else digits(1 if start == "piece" else None)
        before = None if x is None else x.clone()
        return before, collective(x)

    pairs = launch(on_this_rank, world_size=world_size, backend=backend)
    return [before for before, _ in pairs], [after for _, after in pairs]


def collective_calls(size: int) -> dict[str, Callable[[], Any]]:
    """The eight collectives on this rank, ready to call, on messages of about `size` bytes in float32; root 0."""
    n, root = dist.get_world_size(), dist.get_rank() == 0
    count = max(1, size // 4 // n)
    whole, other = torch.zeros(2, n * count, device=device())
    piece = torch.zeros(count, device=device())
    pieces = list(whole.split(count)) if root else None
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, piece),
        "reduce_scatter": lambda: dist.reduce_scatter_single(piece, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "reduce": lambda: dist.reduce(whole, dst=0),
        "gather": lambda: dist.gather(piece, pieces, dst=0),
        "scatter": lambda: dist.scatter(piece, pieces, src=0),
    }


def _finish() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()  # a call on CUDA tensors returns before the work is done


def _timed(call: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    _finish()
    return time.perf_counter() - start


def best_seconds(call: Callable[[], Any], in_a_row: int = 1, rounds: int = 5) -> float:
    """Seconds of a call on this rank: the mean of some in a row, in the best of some rounds that all ranks begin."""

    def calls() -> None:
        for _ in range(in_a_row):
            call()

    return min(_timed(calls) for _ in range(rounds)) / in_a_row


def _all_times(sizes: Sequence[int], ops: Sequence[str]) -> dict[str, list[list[float]]]:
    times: dict[str, list[list[float]]] = {op: [] for op in ops}
    for size in sizes:
        calls = collective_calls(size)
        for op in ops:
            calls[op]()  # warm up
            times[op].append([_timed(calls[op]) for _ in range(15 if size < 2**20 else 4)])
    return times


def time_collectives(sizes: Sequence[int], ops: Sequence[str], world_size: int) -> dict[str, list[float]]:
    """Seconds of each collective at each size: the best repetition, of which the slowest rank counts."""
    by_rank = launch(partial(_all_times, sizes, ops), world_size=world_size)
    seconds: dict[str, list[float]] = {op: [] for op in ops}
    for op in ops:
        for at in range(len(sizes)):
            repetitions = zip(*(times[op][at] for times in by_rank), strict=True)
            seconds[op].append(min(max(ranks) for ranks in repetitions))
    return seconds


def _tcp_bytes() -> tuple[int, int]:
    """Bytes that this process has sent, and seen acknowledged, and received over TCP; Linux only."""
    sent = received = 0
    for descriptor in os.scandir("/proc/self/fd"):
        if not os.readlink(descriptor.path).startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                # at byte 120 of the kernel's struct tcp_info: tcpi_bytes_acked, tcpi_bytes_received
                acknowledged, arrived = struct.unpack_from("QQ", info, 120)
                sent, received = sent + acknowledged, received + arrived
    return sent, received


def _traffic(size: int) -> dict[str, dict[str, float]]:
    counts = {}
    for op, call in collective_calls(size).items():
        call()  # connections are made at the first call
        time.sleep(0.1)  # until everything is acknowledged
        before = _tcp_bytes()
        dist.barrier()
        call()
        dist.barrier()
        time.sleep(0.1)
        after = _tcp_bytes()
        counts[op] = {"sent": (after[0] - before[0]) / size, "received": (after[1] - before[1]) / size}
    return counts


def tcp_traffic(size: int, world_size: int) -> list[dict[str, dict[str, float]]]:
    """What each rank sends and receives over TCP in each of the eight collectives, in units of `size`; over gloo."""
    return launch(partial(_traffic, size), world_size=world_size, backend="gloo") if sys.platform == "linux" else []


def barrier_spans(work: Callable[[], Any], world_size: int) -> dict[str, Spans]:
    """Run `work` and then a barrier on every rank; when each did what, in seconds, for `draw.lanes.timeline`."""

    def on_this_rank() -> tuple[float, float, float]:
        dist.barrier()  # a common start
        start = time.monotonic()
        work()
        entered = time.monotonic()
        dist.barrier()
        return start, entered, time.monotonic()

    moments = launch(on_this_rank, world_size=world_size)
    zero = min(start for start, _, _ in moments)
    return {f"rank {rank}": [("work", start - zero, entered - zero), ("barrier", entered - zero, left - zero)]
            for rank, (start, entered, left) in enumerate(moments)}


def _step_spans(step: Callable[[torch.Tensor, Callable[[], None]], Any], size: int) -> Spans:
    x = torch.zeros(size // 4)
    alone = min(_timed(lambda: dist.all_reduce(x)) for _ in range(3))
    longest = torch.tensor([alone])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    moments = []

    def compute() -> None:
        moments.append(time.perf_counter())
        time.sleep(longest.item())
        moments.append(time.perf_counter())

    dist.barrier()
    begin = time.perf_counter()
    step(x, compute)
    end = time.perf_counter() - begin
    start, stop = (moment - begin for moment in moments)
    return [("waiting", 0.0, start), ("computing", start, stop), ("waiting", stop, end)]


def hidden_step(
    step: Callable[[torch.Tensor, Callable[[], None]], Any], size: int, world_size: int, repeats: int = 3
) -> Spans:
    """When rank 0 computes and when it waits, in the fastest of some runs of a step with an all-reduce."""
    runs = [launch(partial(_step_spans, step, size), world_size=world_size, backend="gloo")[0] for _ in range(repeats)]
    return min(runs, key=lambda spans: spans[-1][2])
