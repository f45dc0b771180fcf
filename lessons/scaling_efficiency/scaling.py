"""Training steps on more and more ranks by the clock: throughput, what hides behind backward, hooks on gradients."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course_utils.costs import bytes_sent
from course_utils.data import Windows
from course_utils.memory import track
from course_utils.models import TransformerConfig, build_gpt, loss_of
from course_utils.ranks import device, record
from course_utils.step_log import Span

__all__ = [
    "BucketRun", "CONTEXT", "ForwardBackward", "TrainedWithHook", "bucket_schedule", "bucket_sweep", "counts",
    "cpu_seconds", "fixed_batch", "forward_backward", "my_windows", "overlap", "shortest_step", "slowest_step",
    "smooth_losses", "step_seconds", "train_with_hook",
]

#: Characters in a window of text.
CONTEXT = 64
_WINDOWS = Windows("train", CONTEXT)
_ORDER = torch.randperm(len(_WINDOWS), generator=torch.Generator().manual_seed(0)).tolist()


def my_windows(step: int, size: int) -> tuple[Tensor, Tensor]:
    """On a rank: its `size` windows of text in a step, inputs and targets, both (size, 64), on this rank's device.

    The windows are shuffled, always in the same way; ranks have different ones.
    """
    first = (step * dist.get_world_size() + dist.get_rank()) * size
    return _WINDOWS.batch((_ORDER[i % len(_ORDER)] for i in range(first, first + size)), device())


def fixed_batch(step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Without ranks: `size` windows of a step, inputs and targets, both (size, 64), in the order of the text."""
    return _WINDOWS.batch(range(step * size, (step + 1) * size))


def counts(most: int) -> list[int]:
    """Numbers of ranks to try: the powers of two below `most`, and `most`."""
    return [2**k for k in range(most.bit_length()) if 2**k < most] + [most]


def _finish() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def step_seconds(
    prepare: Callable[[], Callable[[Tensor, Tensor], Any]], size: int, steps: int = 8, warm_up: int = 3
) -> list[float]:
    """On all ranks: seconds of each training step on this rank; all ranks begin a step together."""
    step, seconds = prepare(), []
    for number in range(warm_up + steps):
        x, y = my_windows(number, size)
        dist.barrier()
        start = time.perf_counter()
        step(x, y)
        _finish()
        seconds.append(time.perf_counter() - start)
    return seconds[warm_up:]


def slowest_step(by_rank: Iterable[Sequence[float]]) -> float:
    """Seconds of a step: it ends when the slowest rank has ended it; of all steps, the best."""
    return min(max(seconds) for seconds in zip(*by_rank, strict=True))


def shortest_step(by_rank: Sequence[Sequence[Sequence[Span]]], skip: int = 0) -> dict[str, list[Span]]:
    """Of the spans of steps on all ranks, the shortest step as rows for `step_spans`, from its first moment on."""
    def length(ranks: Sequence[Sequence[Span]]) -> float:
        return max(spans[-1][2] for spans in ranks) - min(spans[0][1] for spans in ranks)

    ranks = min(zip(*(steps[skip:] for steps in by_rank), strict=True), key=length)
    zero = min(spans[0][1] for spans in ranks)
    return {
        f"rank {rank}": [(part, start - zero, end - zero) for part, start, end in spans]
        for rank, spans in enumerate(ranks)
    }


def cpu_seconds(work: Callable[[], Any], rounds: int = 6) -> float:
    """CPU seconds of the best of some calls of `work` in this process, after one that does not count."""
    taken = []
    for _ in range(rounds + 1):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken[1:])


class ForwardBackward(NamedTuple):
    """What forward and backward of a model give and need in this process."""

    gradients: Tensor  # of all parameters
    kept: float  # bytes of activations that forward keeps for backward
    seconds: float  # CPU seconds of both


def forward_backward(config: TransformerConfig) -> ForwardBackward:
    """Without ranks: forward and backward of a GPT of this shape on four windows, measured."""
    model, (x, y) = build_gpt(config), fixed_batch(0)
    with track(model) as tracker:
        loss = loss_of(model, x, y)
        kept = tracker.mark("forward").activations
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return ForwardBackward(gradients, kept, cpu_seconds(lambda: loss_of(model, x, y).backward()))


# Buckets


class BucketRun(NamedTuple):
    """What rank 0 saw of DDP with one size of buckets."""

    messages: int  # all-reduces of a step
    bytes: int  # of all of them
    seconds: float  # median time of forward and backward
    rows: dict[str, list[Span]]  # a step for `step_spans`: the backward pass, and all-reduces on each of gloo's threads
    hidden: float  # share of the time in which an all-reduce is under way that lies within the backward pass


def overlap(events: Iterable[tuple[str, int, float, float]]) -> tuple[dict[str, list[Span]], float]:
    """Read a traced step of a CPU rank: its rows for `step_spans`, and the share of communication in backward.

    Events are operations of the profiler (name, thread, start, end), in seconds. A moment in which several threads
    communicate counts once.
    """
    events = list(events)
    backward = [(start, end) for name, _, start, end in events if name.startswith("autograd::engine")]
    busy = [(thread, start, end) for name, thread, start, end in events if name.startswith("gloo:")]
    zero, until = backward[0][0], backward[-1][1]
    rows: dict[str, list[Span]] = {"backward": [("backward", 0.0, until - zero)]}
    for thread, start, end in busy:
        rows.setdefault(f"gloo, thread {thread}", []).append(("all_reduce", start - zero, end - zero))
    edges = sorted({t for _, *span in busy for t in span} | {until})
    inside = outside = 0.0
    for a, b in zip(edges, edges[1:], strict=False):
        if any(start <= a and b <= end for _, start, end in busy):
            inside, outside = inside + (b - a) * (b <= until), outside + (b - a) * (b > until)
    return rows, inside / (inside + outside) if busy else 0.0


def _traced(model: nn.Module, x: Tensor, y: Tensor) -> list[tuple[str, int, float, float]]:
    from torch.profiler import ProfilerActivity, profile

    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler says nothing on the side
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss_of(model, x, y).backward()
        time.sleep(0.05)  # gloo's threads note the end of a message after DDP goes on, and not in freed memory
    spans = ((e.name, e.thread, e.time_range.start, e.time_range.end) for e in profiler.events())
    return [(name, thread, start / 1e6, end / 1e6) for name, thread, start, end in spans]


def _length(events: Sequence[tuple[str, int, float, float]]) -> float:
    return max(end for *_, end in events) - min(start for _, _, start, _ in events)


def bucket_sweep(caps: Sequence[float], size: int, steps: int = 5) -> list[BucketRun]:
    """On all ranks, with gloo: train the GPT under DDP with each `bucket_cap_mb` in turn, and watch this rank."""
    runs = []
    for cap in caps:
        model = DistributedDataParallel(build_gpt().to(device()), bucket_cap_mb=cap)
        seconds = []
        for number in range(3 + steps):
            x, y = my_windows(number, size)
            dist.barrier()
            start = time.perf_counter()
            loss = loss_of(model, x, y)
            with record() as ledger:
                loss.backward()
            seconds.append(time.perf_counter() - start)
            model.zero_grad()
        traces = [_traced(model, x, y) for _ in range(3)]
        rows, hidden = overlap(min(traces, key=_length))  # the one that was disturbed least
        runs.append(BucketRun(ledger.count(), ledger.bytes(), median(seconds[3:]), rows, hidden))
    return runs


def bucket_schedule(buckets: int, each: float, backward: float) -> list[tuple[float, float]]:
    """When the all-reduces of equal buckets start and end, one after the other."""
    spans, free = [], 0.0
    for i in range(1, buckets + 1):
        start = max(free, backward * i / buckets)
        free = start + each
        spans.append((start, free))
    return spans


# Communication hooks


class TrainedWithHook(NamedTuple):
    """What a rank saw of training with a communication hook."""

    losses: list[float]  # of this rank's windows, at each step
    sent: float  # bytes that the rank has to send in a step, at least
    unchanged: float  # share of the weights that are what they were at the start


def train_with_hook(
    make: Callable[[], tuple[Any, Callable]] | None, steps: int, size: int = 4, lr: float = 0.2
) -> TrainedWithHook:
    """On all ranks: train the GPT under DDP with plain SGD, all gradients in one bucket, and a hook on it."""
    model = DistributedDataParallel(build_gpt().to(device()), bucket_cap_mb_list=[100])
    if make:
        model.register_comm_hook(*make())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        loss = loss_of(model, *my_windows(step, size))
        with record() as ledger:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    dist.barrier()  # on every rank gloo's threads are done with the hooks' futures
    pairs = zip(model.parameters(), build_gpt().to(device()).parameters(), strict=True)
    same = torch.cat([(p == q).flatten() for p, q in pairs]).float().mean().item()
    sent = sum(bytes_sent(entry.op, dist.get_world_size(), entry.bytes) for entry in ledger)
    return TrainedWithHook(torch.stack(losses).tolist(), sent, same)


def smooth_losses(by_rank: Sequence[TrainedWithHook], width: int = 5) -> tuple[list[int], list[float]]:
    """Steps, and the mean loss of all ranks over `width` steps up to each, from the first that has so many."""
    losses = torch.tensor([rank.losses for rank in by_rank]).mean(0)
    return [*range(width, len(losses) + 1)], losses.unfold(0, width, 1).mean(1).tolist()
