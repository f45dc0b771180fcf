"""Check of the exercise on a slow training program: each of its faults is known by a count, and none by a clock."""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_utils.check import TIMEOUT, Exercise, Outcome, checked, load_hints
from course_utils.traces import Trace, load

__all__ = ["HINTS", "STEPS", "per_step", "prepare", "record_run", "slow", "speed_up", "texts_of", "wide_net"]

HINTS = load_hints(__file__)
STEPS = 6
ROWS = (48, 48, 16, 16)  # of the four texts
WIDTH = 32
_LIKE = 1e-5  # relative and absolute, of losses and weights in float32
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_COPIES = ("aten::clone", "aten::_to_copy")
_SMALL = min(ROWS) * WIDTH  # numbers: the inputs of the shortest text
_READS = "aten::_local_scalar_dense"


def texts_of(rows: Sequence[int] = ROWS, seed: int = 0) -> list[str]:
    """Micro-batches as text, one of so many lines each: 32 inputs and one target a line, with spaces between them."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for count in rows:
        x = torch.randn(count, WIDTH, generator=generator)
        y = x[:, :4].sin().sum(1, keepdim=True)
        texts.append("\n".join(" ".join(f"{v:.4f}" for v in line) for line in torch.cat([x, y], 1).tolist()))
    return texts


def prepare(text: str) -> tuple[Tensor, Tensor]:
    """Read a text: inputs (lines, 32) and targets (lines, 1), both float32."""
    numbers = torch.tensor([[float(word) for word in line.split()] for line in text.splitlines()])
    return numbers[:, :-1].contiguous(), numbers[:, -1:].contiguous()


def wide_net(layers: int = 10, hidden: int = 64) -> nn.Module:
    """A net of many small layers, with the same weights on each call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        parts: list[nn.Module] = [nn.Linear(WIDTH, hidden)]
        for _ in range(layers - 2):
            parts += [nn.Tanh(), nn.Linear(hidden, hidden)]
        return nn.Sequential(*parts, nn.Tanh(), nn.Linear(hidden, 1))


def slow(model: nn.Module, texts: list[str], steps: int, prepare: Callable, folder: str) -> list[float]:
    """Train slowly: the program of the exercise, word for word as the notebook shows it."""
    rank, half = dist.get_rank(), len(texts) // 2
    mine = texts[rank * half : (rank + 1) * half]
    lines = sum(len(text.splitlines()) for text in texts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = 0.0
        for text in mine:
            x, y = prepare(text)
            x = x.clone().double().float()
            part = F.mse_loss(model(x), y, reduction="sum") / lines
            part.backward()
            loss += part.item()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = torch.tensor(loss)
        dist.all_reduce(total)
        losses.append(total.item())
        torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")
        print(f"rank {rank}, step {step}: loss {losses[-1]:.4f}")
    return losses


# ------------------------------------------------------------------------------------------------ one rank


@contextlib.contextmanager
def _saves_counted() -> Iterator[list[str]]:
    """Count the calls of torch.save on this rank."""
    save, calls = torch.save, []

    def counted(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(str(f))
        save(obj, f, *args, **kwargs)

    torch.save = counted
    try:
        yield calls
    finally:
        torch.save = save


def _profiled(program: Callable, folder: str, **how: Any) -> tuple[Any, nn.Module, Any]:
    """Run a program under the profiler; its result, its model, and the profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def named(text: str) -> tuple[Tensor, Tensor]:
        with record_function("prepare"):
            return prepare(text)

    model = wide_net()
    with profile(activities=[ProfilerActivity.CPU], **how) as profiler:
        result = program(model, texts_of(), STEPS, named, folder)
    return result, model, profiler


def _needless(event: Any) -> bool:
    """Whether an event copies a tensor of some size, not to prepare data, and not in backward, which has to."""
    shapes = [shape for shape in event.input_shapes or [] if shape]
    if event.name not in _COPIES or not shapes or math.prod(shapes[0]) < _SMALL:
        return False
    above = event
    while (above := above.cpu_parent) is not None:
        if above.name == "prepare" or above.name.startswith("autograd::engine"):
            return False
    return True


def _counts(profiler: Any) -> dict[str, float]:
    """What the faults show in: counts of one rank's trace, and FLOPs of its matrix products."""
    events = list(profiler.events())
    products = [e for e in events if e.name in _PRODUCTS]
    last = max((e.time_range.end for e in products), default=0.0)
    return {
        "prepare": sum(e.name == "prepare" for e in events),
        "collectives": sum(e.name.startswith("gloo:") for e in events),
        "reads": sum(e.name == _READS and e.time_range.start < last for e in events),
        "copies": sum(map(_needless, events)),
        "flops": sum(e.flops or 0 for e in products),
    }


def _timed(program: Callable, folder: str) -> float:
    """Seconds of one run on this rank, without the profiler and without its output."""
    model, texts = wide_net(), texts_of()
    dist.barrier()
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        program(model, texts, STEPS, prepare, folder)
    return time.perf_counter() - start


def _observed(fn: Callable, inputs: list[Any], args: tuple) -> Outcome:
    """Run the answer under the profiler; the slow program beside it."""
    (folder,) = args
    rank, found = dist.get_rank(), {}
    said = io.StringIO()
    with _saves_counted() as saves, contextlib.redirect_stdout(said):
        result, model, profiler = _profiled(fn, f"{folder}/answer", record_shapes=True, with_flops=True)
        found["saves"] = len(saves)
    dist.barrier()
    found |= _counts(profiler) | {"lines": len(said.getvalue().splitlines()), "losses": _floats(result)}
    found["weights"] = torch.cat([p.detach().flatten() for p in model.parameters()])
    path = Path(folder, "answer", "rank0.pt")
    found["saved"] = _flat(path) if rank == 0 else None
    reference = wide_net()
    with contextlib.redirect_stdout(io.StringIO()):
        found["slow losses"] = slow(reference, texts_of(), STEPS, prepare, f"{folder}/slow")
    found["slow weights"] = torch.cat([p.detach().flatten() for p in reference.parameters()])
    pairs = [(_timed(slow, f"{folder}/slow"), _timed(fn, f"{folder}/answer")) for _ in range(3)]
    found["ratio"] = min(a for a, _ in pairs) / min(b for _, b in pairs)
    return Outcome(found, None, None, None)


def _floats(losses: Any) -> list[float] | None:
    try:
        return [float(loss) for loss in losses]
    except (TypeError, ValueError):
        return None


def _flat(path: Path) -> Tensor | None:
    """The numbers of a saved state in the net's order; None where the file is missing or holds something else."""
    try:
        state = torch.load(path)
        return torch.cat([state[name].flatten() for name in wide_net().state_dict()])
    except Exception:
        return None


def _near(got: Tensor, right: Tensor) -> bool:
    return got.shape == right.shape and torch.allclose(got.double(), right.double(), _LIKE, _LIKE)


# ------------------------------------------------------------------------------------------------ the check


@checked
def speed_up(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(model, texts, steps, prepare, folder) -> losses``: the slow program's numbers, without its faults."""
    exercise = Exercise("Exercise 3", HINTS["speed_up"], timeout, _observed)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("answer", "slow"):
            Path(folder, name).mkdir()
        outcomes = exercise.run(fn, [torch.zeros(1)] * 2, folder)
    found = [outcome.result for outcome in outcomes]
    for rank, one in enumerate(found):
        with exercise.on_rank(rank):
            _same_numbers(exercise, one)
    saved = found[0]["saved"]
    exercise.require(saved is not None, "no-file", "there is no state of the model in rank0.pt.", 0)
    exercise.require(_near(saved, found[0]["weights"]), "old-file", "rank0.pt has other weights than the model.", 0)
    _judge(exercise, found)
    print(f"Exercise 3 passed: {found[0]['ratio']:.1f} times as fast as the slow program (measured, not judged).")


def _same_numbers(exercise: Exercise, one: dict[str, Any]) -> None:
    losses, right = one["losses"], one["slow losses"]
    form = losses is not None and len(losses) == STEPS
    exercise.require(form, "form", f"the function did not return {STEPS} losses.")
    for step, (got, expected) in enumerate(zip(losses, right, strict=True)):
        same = _near(torch.tensor(got), torch.tensor(expected))
        if not same:
            exercise.differs("losses", f"the loss of step {step} is wrong.", f"{expected:.6f}", f"{got:.6f}")
    what = "the weights at the end are not those of the slow program."
    exercise.require(_near(one["weights"], one["slow weights"]), "weights", what)


def _judge(exercise: Exercise, found: list[dict[str, Any]]) -> None:
    """Refuse the fault that costs most of those that are left."""
    tensors = len(list(wide_net().parameters()))
    for rank, one in enumerate(found):
        with exercise.on_rank(rank):
            calls = one["collectives"]
            what = f"this rank took part in {calls} collectives in {STEPS} steps; the net has {tensors} tensors."
            exercise.require(calls > 0, "alone", "this rank took part in no collective.")
            exercise.require(calls <= 3 * STEPS + 8, "many-collectives", what)
    for rank, one in enumerate(found):
        with exercise.on_rank(rank):
            what = f"this rank called torch.save {one['saves']} times."
            key = "saves" if found[1]["saves"] else "saves-each-step"
            exercise.require(one["saves"] <= (2 if rank == 0 else 0), key, what)
    for rank, one in enumerate(found):
        with exercise.on_rank(rank):
            what = f"prepare was called {one['prepare']} times on this rank, for {len(ROWS)} texts."
            exercise.require(one["prepare"] <= len(ROWS), "prepare", what)
    work = [one["flops"] for one in found]
    most = max(range(len(work)), key=work.__getitem__)
    share = work[most] / sum(work) if sum(work) else 0.0
    what = f"of the FLOPs of the matrix products this rank has {share:.0%}."
    exercise.require(share <= 0.55, "unbalanced", what, most)
    reading = [one["reads"] >= STEPS - 1 for one in found]
    for rank, one in enumerate(found):
        with exercise.on_rank(rank):
            what = f"the trace has {one['copies']} clones and conversions of large tensors in {STEPS} steps."
            exercise.require(one["copies"] < STEPS, "copies", what)
            what = f"a number was read out of a tensor {one['reads']} times before the last matrix product."
            most = STEPS if sum(reading) == 1 else STEPS - 2  # one rank may say each step's loss
            exercise.require(one["reads"] <= most, "reads", what)
            what = f"this rank printed {one['lines']} lines."
            exercise.require(one["lines"] <= (STEPS + 2 if rank == 0 else 0), "prints", what)


# ------------------------------------------------------------------------------------------------ for the learner


def _recorded(program: Callable, folder: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        _, _, profiler = _profiled(program, f"{folder}/files")
    profiler.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json.gz")


def record_run(program: Callable) -> list[Trace]:
    """Run a training program on two ranks, with the texts of the exercise, and return a trace of each."""
    from course_utils import launch

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "files").mkdir()
        launch(_recorded, program, folder, world_size=2, backend="gloo")
        return load(folder)


def per_step(traces: Sequence[Trace], names: Sequence[str]) -> dict[str, list[float]]:
    """For each name how often it comes in a step, on each rank."""
    counts = [Counter(event.name for event in trace.events) for trace in traces]
    return {name: [count[name] / STEPS for count in counts] for name in names}
