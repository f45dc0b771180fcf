"""Data parallelism beside one process, and by the clock: how lesson 04 judges every way to average gradients."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils.beside import train_beside
from course_utils.data import Windows
from course_utils.models import build_gpt, loss_of
from course_utils.ranks import Ledger, device, record
from course_utils.traces import load, spans

__all__ = [
    "BOUNDS", "as_text", "compiled_graphs", "judge", "my_batch", "named_buckets", "read_buckets", "recorded_jobs",
    "short", "spread", "time_versions", "typical_steps", "whole_batch",
]

Batch = Callable[[int], tuple[Tensor, Tensor]]
Wrap = Callable[[nn.Module], nn.Module]

#: Largest difference of a weight that rounding explains after three steps, by dtype.
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-12}
#: Recorded training steps: what averages the gradients -> recording, step.
JOBS = {
    "404 small all-reduces, one after the other (V100)": ("tiny_all_reduces", 2),
    "DDP (A100)": ("host_bound", 4),
}
_WINDOWS = Windows("train")


def whole_batch(step: int, per_rank: int) -> tuple[Tensor, Tensor]:
    """On a rank: the inputs and targets of all ranks in a step, both (N * per_rank, 64), on this rank's device."""
    size = dist.get_world_size() * per_rank
    return _WINDOWS.batch(range(step * size, (step + 1) * size), device())


def my_batch(step: int, per_rank: int) -> tuple[Tensor, Tensor]:
    """On a rank: its part of `whole_batch`, both (per_rank, 64)."""
    x, y = whole_batch(step, per_rank)
    first = dist.get_rank() * per_rank
    return x[first : first + per_rank], y[first : first + per_rank]


def as_text(tokens: Tensor) -> str:
    """Characters of the text as a quoted string."""
    return repr(bytes(tokens.tolist()).decode())


def spread(model: nn.Module) -> float:
    """On all ranks: the largest difference between any two ranks in any weight."""
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    largest, smallest = weights.clone(), weights.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return (largest - smallest).max().item()


@dataclass(frozen=True)
class Trial:
    """What one rank found: differences of weights by type, a step's messages, and how many began in backward."""

    differences: dict[torch.dtype, float]
    messages: Ledger
    early: int

    @property
    def equal(self) -> bool:
        return all(difference < BOUNDS[dtype] for dtype, difference in self.differences.items())

    def __str__(self) -> str:
        verdict = "equal to one process" if self.equal else "NOT equal to one process"
        sent = f"{len(self.messages)} all-reduces, {self.messages.bytes():,} bytes"
        return f"{verdict}; {sent}, {self.early} started in backward"


def _finish(model: nn.Module) -> None:
    """Call what the lesson's own wrappers still have to do between backward and the optimizer's step."""
    if hasattr(model, "finish"):
        model.finish()


def _difference(wrap: Wrap, mine: Batch, whole: Batch, make: Callable[..., nn.Module], dtype: torch.dtype) -> float:
    """Of the weights after three steps; each rank begins with a seed of its own, one process with rank 0's."""
    alone, replica = (make(seed=seed).to(device(), dtype) for seed in (0, dist.get_rank()))
    wrapped = wrap(replica)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(wrapped, x, y).backward()
        _finish(wrapped)

    return train_beside(replica, step, alone, whole, 3, mine=mine).errors["weights"]


def try_data_parallel(wrap: Wrap, mine: Batch, whole: Batch, make: Callable[..., nn.Module] = build_gpt) -> Trial:
    """On each rank: train with `wrap` for three steps beside one process with all batches, then count messages."""
    differences = {dtype: _difference(wrap, mine, whole, make, dtype) for dtype in BOUNDS}
    model = wrap(make(seed=0).to(device()))
    for step in range(3):  # DDP sends its first steps in other ways
        loss = loss_of(model, *mine(step))
        with record() as messages:
            loss.backward()
            early = len(messages)
            _finish(model)
    return Trial(differences, messages, early)


def judge(
    on_ranks: Callable[..., list], mine: Batch, whole: Batch, wrap: Wrap, make: Callable[..., nn.Module] = build_gpt,
) -> Trial:
    """Let all ranks `try_data_parallel`; return what rank 0 found, if all ranks are equal to one process."""
    trials = on_ranks(try_data_parallel, wrap, mine, whole, make)
    for rank, trial in enumerate(trials):
        if not trial.equal:
            raise AssertionError(f"rank {rank} ends at other weights than one process: {trial.differences}")
    return trials[0]


# Steps by the clock


def _backward_by_clock(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Spans, in seconds, of the gradients' computation and of every message of one step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    ready: list[float] = []
    hooks = [p.register_post_accumulate_grad_hook(lambda p: ready.append(time.monotonic())) for p in parameters]
    for p in parameters:
        p.grad = None
    loss = loss_of(model, *batch)
    dist.barrier()
    with record() as ledger:
        begin = time.monotonic()
        loss.backward()
        _finish(model)
        end = time.monotonic()
    for hook in hooks:
        hook.remove()
    messages = [(entry.start - begin, (entry.end or end) - begin) for entry in ledger]
    return {"backward": (0.0, ready[-1] - begin), "messages": messages, "end": end - begin}


def _as_if_computed_elsewhere() -> nn.Module:
    """Return the small GPT with a backward pass in which the rank sleeps for a while before each gradient is ready."""
    model = build_gpt()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: time.sleep(0.006))
    return model


def time_versions(versions: Sequence[Wrap], batch: Batch) -> dict[str, list[dict[str, Any]]]:
    """On each rank: let versions take turns, and return by name the spans of three steps, after three to warm up."""
    wrapped = {wrap.__name__: wrap(_as_if_computed_elsewhere().to(device())) for wrap in versions}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in wrapped}
    for step in range(6):
        for name, model in wrapped.items():
            found[name].append(_backward_by_clock(model, batch(step)))
    return {name: by_step[3:] for name, by_step in found.items()}


def typical_steps(by_rank: Sequence[Mapping[str, Sequence[Mapping]]]) -> dict[str, list[Mapping]]:
    """Of what `time_versions` gave on all ranks, by version the step of median length: a list of spans by rank."""
    typical = {}
    for name in by_rank[0]:
        steps = [list(ranks) for ranks in zip(*(rank[name] for rank in by_rank), strict=True)]
        steps.sort(key=lambda ranks: max(rank["end"] for rank in ranks))
        typical[name] = steps[len(steps) // 2]
    return typical


@dataclass(frozen=True)
class RecordedJob:
    """Of one training step on a GPU: when it computed and reduced, in seconds, and its all-reduces in milliseconds."""

    lanes: dict[str, list[tuple[float, float]]]
    all_reduces: int
    lasting: float  # from the first one's start to the last one's end
    running: float  # of this, all-reduces are running for so long
    idle: float  # and nothing is, for so long


def _recorded(name: str, step: int) -> RecordedJob:
    part = load(name)[0].of_steps([step])
    zero = spans(part, "compute", "communication")[0][0]
    reduces = [(e.start, e.end) for e in part.events if e.category == "kernel" and "AllReduce" in e.name]
    first, last = reduces[0][0], max(end for _, end in reduces)
    busy = sum(max(0.0, min(b, last) - max(a, first)) for a, b in spans(part, "compute", "communication"))
    lanes = {"compute": spans(part, "compute"), "all-reduces": reduces}
    seconds = {row: [((a - zero) / 1e6, (b - zero) / 1e6) for a, b in bars] for row, bars in lanes.items()}
    running = sum(b - a for a, b in reduces)
    return RecordedJob(seconds, len(reduces), (last - first) / 1e3, running / 1e3, (last - first - busy) / 1e3)


def recorded_jobs() -> dict[str, RecordedJob]:
    """What the GPUs of `JOBS` did in one training step."""
    return {job: _recorded(*place) for job, place in JOBS.items()}


def compiled_graphs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    """How many graphs `torch.compile` makes of a model for forward and backward of one batch; nothing is compiled."""
    import torch._dynamo
    import torch._logging

    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch._logging.set_logs(dynamo=logging.ERROR)  # it warns that ranges of the profiler are left out
    loss_of(torch.compile(model, backend=keep), *batch).backward()
    return len(graphs)


# Names of parameters


def short(name: str) -> str:
    """``blocks.1.mlp.up.weight`` becomes ``up 1``."""
    found = re.fullmatch(r"blocks\.(\d+)\.(?:.*\.)?(\w+)\.\w+", name)
    return f"{found[2]} {found[1]}" if found else name.split(".")[0]


def named_buckets(model: nn.Module, buckets: Sequence[Sequence[nn.Parameter]]) -> list[list[tuple[str, int]]]:
    """Return buckets of the model's parameters as `figures.bucket_picture` takes them: (short name, bytes)."""
    names = {p: short(name) for name, p in model.named_parameters()}
    return [[(names[p], p.nbytes) for p in bucket] for bucket in buckets]


def read_buckets(model: nn.Module, numbers: str) -> list[list[tuple[str, int]]]:
    """Return what DDP's log says of its buckets, such as ``"3 2, 1 0"``, as `named_buckets` does."""
    parameters = list(model.parameters())
    buckets = [[parameters[int(i)] for i in bucket.split()] for bucket in numbers.split(", ")]
    return named_buckets(model, buckets)
