"""The net and the texts of the exercise on a slow program, and how a program that trains it is watched.

Each of the program's faults is known by a count, and none by a clock.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from course_utils import launch
from course_utils.traces import Trace, load

from . import answers

STEPS = 6
ROWS = (48, 48, 16, 16)  # of the four texts
WIDTH = 32
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
SMALL = min(ROWS) * WIDTH  # numbers: the inputs of the shortest text


def micro_batches() -> list[str]:
    """The four texts: 32 inputs and one target a line, with spaces between them."""
    generator, texts = torch.Generator().manual_seed(0), []
    for rows in ROWS:
        x = torch.randn(rows, WIDTH, generator=generator)
        y = x[:, :4].sin().sum(1, keepdim=True)
        texts.append("\n".join(" ".join(f"{v:.4f}" for v in line) for line in torch.cat([x, y], 1).tolist()))
    return texts


def prepare(text: str) -> tuple[Tensor, Tensor]:
    """Read a text: inputs (lines, 32) and targets (lines, 1), both float32."""
    numbers = torch.tensor([[float(word) for word in line.split()] for line in text.splitlines()])
    return numbers[:, :-1].contiguous(), numbers[:, -1:].contiguous()


def wide_net() -> nn.Module:
    """A net of ten small layers, with the same weights on each call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        parts: list[nn.Module] = [nn.Linear(WIDTH, 64)]
        for _ in range(8):
            parts += [nn.Tanh(), nn.Linear(64, 64)]
        return nn.Sequential(*parts, nn.Tanh(), nn.Linear(64, 1))


# --- one rank


def profiled(program: Callable, folder: str, **how: Any) -> tuple[Any, nn.Module, Any]:
    """Run a program under the profiler; its result, its model, and the profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def named(text: str) -> tuple[Tensor, Tensor]:
        with record_function("prepare"):
            return prepare(text)

    model = wide_net()
    with profile(activities=[ProfilerActivity.CPU], **how) as profiler:
        result = program(model, micro_batches(), STEPS, named, folder)
    return result, model, profiler


def needless(event: Any) -> bool:
    """Whether an event copies a tensor of some size, not to prepare data, and not in backward, which has to."""
    shapes = [shape for shape in event.input_shapes or [] if shape]
    if event.name not in ("aten::clone", "aten::_to_copy") or not shapes or math.prod(shapes[0]) < SMALL:
        return False
    above = event
    while (above := above.cpu_parent) is not None:
        if above.name == "prepare" or above.name.startswith("autograd::engine"):
            return False
    return True


def counts(profiler: Any) -> dict[str, float]:
    """What the faults show in: counts of one rank's trace, and FLOPs of its matrix products."""
    events = list(profiler.events())
    products = [e for e in events if e.name in PRODUCTS]
    last = max((e.time_range.end for e in products), default=0.0)
    return {
        "prepare": sum(e.name == "prepare" for e in events),
        "collectives": sum(e.name.startswith("gloo:") for e in events),
        "reads": sum(e.name == "aten::_local_scalar_dense" and e.time_range.start < last for e in events),
        "copies": sum(map(needless, events)),
        "flops": sum(e.flops or 0 for e in products),
    }


def timed(program: Callable, folder: str) -> float:
    """Seconds of one run on this rank, without the profiler and without its output."""
    model, texts = wide_net(), micro_batches()
    dist.barrier()
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        program(model, texts, STEPS, prepare, folder)
    return time.perf_counter() - start


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def floats(losses: Any) -> list[float] | None:
    try:
        return [float(loss) for loss in losses]
    except (TypeError, ValueError):
        return None


def saved(path: str) -> Tensor | None:
    """The weights in a file; None where it is missing or holds something else."""
    model = wide_net()
    try:
        model.load_state_dict(torch.load(path))
    except Exception:
        return None
    return weights(model)


def observed(fn: Callable, folder: str) -> dict[str, Any]:
    """What a rank finds in a run of the answer, and of the slow program beside it."""
    own, slow, said = f"{folder}/answer", f"{folder}/slow", io.StringIO()
    for path in (own, slow):
        Path(path).mkdir(exist_ok=True)
    with patch.object(torch, "save", wraps=torch.save) as save, contextlib.redirect_stdout(said):
        losses, model, profiler = profiled(fn, own, record_shapes=True, with_flops=True)
    dist.barrier()
    found = counts(profiler) | {
        "saves": save.call_count, "lines": len(said.getvalue().splitlines()), "losses": floats(losses),
        "weights": weights(model), "saved": saved(f"{own}/rank0.pt"),
    }
    reference = wide_net()
    with contextlib.redirect_stdout(io.StringIO()):
        found["slow losses"] = answers.slow(reference, micro_batches(), STEPS, prepare, slow)
    return found | {"slow weights": weights(reference)}


def speed_ratio(fn: Callable, folder: str) -> float:
    """How many times as fast as the slow program the answer is, in the folder of `observed`."""
    pairs = [(timed(answers.slow, f"{folder}/slow"), timed(fn, f"{folder}/answer")) for _ in range(3)]
    return min(a for a, _ in pairs) / min(b for _, b in pairs)


# --- for the learner


def recorded(program: Callable, folder: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as files:
        _, _, profiler = profiled(program, files)
    profiler.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json.gz")


def record_run(program: Callable) -> list[Trace]:
    """Run a training program on two ranks, with the texts of the exercise, and return a trace of each."""
    with tempfile.TemporaryDirectory() as folder:
        launch(recorded, program, folder, world_size=2, backend="gloo")
        return load(folder)


def per_step(traces: Sequence[Trace], names: Sequence[str]) -> dict[str, list[float]]:
    """For each name how often it comes in a step, on each rank."""
    numbers = [Counter(event.name for event in trace.events) for trace in traces]
    return {name: [number[name] / STEPS for number in numbers] for name in names}
