"""Training in pipeline stages, as lesson 10 builds it, beside one process: what ranks send and hold, when they work."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils import beside
from course_utils.beside import TOLERANCE, Run, sgd
from course_utils.models import GPT, build_gpt
from course_utils.ranks import Ledger, device, share
from course_utils.transformer import TransformerConfig

from .pipeline import Op, Schedule

__all__ = [
    "PipelineRun", "Start", "build_stage", "idle", "measured", "now", "one_process", "pieces", "same_as_one_process",
    "sgd", "total_messages", "train", "weighed",
]

share("torch.distributed.pipelining")  # what each rank would import for itself

Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], float]
Timed = tuple[Op, float, float]

# --- what a pipeline is cut from


class Start(nn.Module):
    """Embedding and position: tokens (b, T) -> activations (b, T, C)."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.embedding, self.position = model.embedding, model.position

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.position.weight[: tokens.shape[1]]


def pieces(model: GPT) -> list[nn.Module]:
    """Return what a pipeline can be cut between, in order: embeddings, each block, and the norm with the head."""
    return [Start(model), *model.blocks, nn.Sequential(model.norm, model.head)]


def build_stage(config: TransformerConfig, sizes: Sequence[int], number: int) -> nn.Sequential:
    """Return one stage, of ``sizes[number]`` pieces, with the weights that it has in every run."""
    first = sum(sizes[:number])
    return nn.Sequential(*pieces(build_gpt(config))[first : first + sizes[number]]).to(device())


# --- when a rank works, and what it holds


def now() -> float:
    """Seconds on the clock that all processes of a machine share, when the GPU has finished."""
    if device().type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.monotonic()


@dataclass
class _Notes:
    """What the stages of a rank note."""

    seconds: tuple[float, float] = (0.0, 0.0)  # that a forward and a backward take at least
    spans: list[tuple[str, int, float, float]] = field(default_factory=list)  # kind, stage, start, end


class _Watched(nn.Module):
    """A stage that notes when it computes: backward from the gradient of its output to the last gradient of its own.

    With a pace, an operation sleeps until it has taken as long as it should.
    """

    def __init__(self, stage: nn.Module, number: int, notes: _Notes) -> None:
        super().__init__()
        self.stage, self.number, self.notes = stage, number, notes
        self.began, self.missing = 0.0, 0
        for p in stage.parameters():
            p.register_post_accumulate_grad_hook(self._accumulated)

    def forward(self, x: Tensor) -> Tensor:
        start = now()
        out = self.stage(x)
        self._note("F", start)
        if out.requires_grad:
            out.register_hook(self._arrived)
        if x.requires_grad and x.is_leaf:
            x.register_post_accumulate_grad_hook(self._accumulated)
        return out

    def _arrived(self, gradient: Tensor) -> None:
        self.began, self.missing = now(), sum(p.requires_grad for p in self.parameters()) + (self.number > 0)

    def _accumulated(self, tensor: Tensor) -> None:
        self.missing -= 1
        if not self.missing:
            self._note("B", self.began)

    def _note(self, kind: str, start: float) -> None:
        time.sleep(max(0.0, start + self.notes.seconds[kind == "B"] - now()))
        self.notes.spans.append((kind, self.number, start, now()))


class _Kept:
    """What autograd keeps in place of a tensor; says when it is let go of."""

    def __init__(self, tensor: Tensor, scale: _Scale) -> None:
        self.tensor, self.scale = tensor, scale

    def __del__(self) -> None:
        self.scale.let_go(self.tensor)


def _taken_back(kept: Tensor | _Kept) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept


class _Scale:
    """Weighs what autograd keeps for backward, parameters apart, each block of memory once: `most` bytes at a time."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.parameters = {p.untyped_storage().data_ptr() for module in modules for p in module.parameters()}
        self.users: Counter[int] = Counter()
        self.total = self.most = 0

    def keep(self, tensor: Tensor) -> Tensor | _Kept:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.parameters:
            return tensor
        if not self.users[storage.data_ptr()]:
            self.total += storage.nbytes()
            self.most = max(self.most, self.total)
        self.users[storage.data_ptr()] += 1
        return _Kept(tensor.detach(), self)

    def let_go(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.users[storage.data_ptr()] -= 1
        if not self.users[storage.data_ptr()]:
            self.total -= storage.nbytes()

    def weigh(self, step: Callable[[], object]) -> int:
        """Run a step; return the most bytes that were kept."""
        with torch.autograd.graph.saved_tensors_hooks(self.keep, _taken_back):
            step()
        return self.most


# --- beside one process


@dataclass(frozen=True)
class PipelineRun:
    """What a rank has found in training with one schedule; `reference` of one process has none."""

    schedule: Schedule | None
    losses: list[float]  # of each step; 0 where the last stage is on another rank
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]  # after the last one
    ledger: Ledger  # of the last step
    spans: list[Timed] = field(default_factory=list)  # when it computed in one more step, in seconds
    held: int = 0  # the most bytes that autograd kept for backward in yet another step, parameters apart


def _run(run: Run, *more: object) -> PipelineRun:
    return PipelineRun(run.part, run.losses, run.gradients, run.weights, run.ledger, *more)


def train(
    make: Callable[[Schedule, dict[int, nn.Module]], Step], schedules: Sequence[Schedule], config: TransformerConfig,
    sizes: Sequence[int], text: Callable[[int], Batch], steps: int = 3, pace: tuple[float, float] | None = (0.0, 0.0),
    weigh: bool = False,
) -> dict[str, PipelineRun]:
    """On each rank: train with each schedule from the same weights, and note what happens, by name of the schedule.

    ``make(schedule, stages)`` -> ``step(x, y)``, which leaves the gradients of the mean loss of the batch in this
    rank's `stages`, {number: module}, and returns that loss, or 0 if the last stage is on another rank. In one more
    step, whose times are noted, a forward and a backward take at least `pace` seconds; yet another one is weighed.
    """
    found = {}
    for schedule in schedules:
        mine = [stage for stage, rank in enumerate(schedule.placement) if rank == dist.get_rank()]
        notes = _Notes()
        stages = {s: _Watched(build_stage(config, sizes, s), s, notes) for s in mine}
        step, modules = make(schedule, stages), nn.ModuleDict({str(s): stage for s, stage in stages.items()})
        run = beside.train(modules, step, text, steps, names=_names(modules, sizes), part=schedule)
        x, y = text(0)
        notes.spans, notes.seconds, spans = [], pace or (0.0, 0.0), []
        if pace:
            dist.barrier()
            step(x, y)
            order = schedule.order[dist.get_rank()]
            if [(op.kind, op.stage) for op in order] == [(kind, stage) for kind, stage, *_ in notes.spans]:
                spans = [(op, start, end) for op, (*_, start, end) in zip(order, notes.spans, strict=True)]
        notes.seconds = (0.0, 0.0)
        held = _Scale(stages.values()).weigh(partial(step, x, y)) if weigh else 0
        found[schedule.name] = _run(run, spans, held)
    return found


def _names(stages: nn.ModuleDict, sizes: Sequence[int]) -> dict[str, str]:
    """The names that parameters of watched stages have in the whole model: "1.stage.0.up" may be "4.up"."""
    found = {}
    for name, _ in stages.named_parameters():
        number, _, piece, rest = name.split(".", 3)
        found[name] = f"{sum(sizes[: int(number)]) + int(piece)}.{rest}"
    return found


def one_process(config: TransformerConfig, text: Callable[[int], Batch], steps: int = 3) -> PipelineRun:
    """On one rank: the same training of the whole model with the whole batches."""
    return _run(beside.one_process(nn.Sequential(*pieces(build_gpt(config))).to(device()), text, steps))


def same_as_one_process(runs: Sequence[PipelineRun], reference: PipelineRun) -> str:
    """Say that every loss, the first gradients and the last weights are those of one process; else `AssertionError`."""
    off = beside.differences(runs, reference)
    if max(off.values()) > TOLERANCE:
        told = ", ".join(f"{what} by {difference:.2g}" for what, difference in off.items())
        raise AssertionError(f"not as in one process: off are {told}")
    losses = [sum(each) for each in zip(*(run.losses for run in runs), strict=True)]
    return f"losses {', '.join(f'{loss:.4f}' for loss in losses)}; {', '.join(off)} equal to one process"


# --- what ranks found


def total_messages(runs: Sequence[PipelineRun]) -> tuple[int, int]:
    """Return how many messages all ranks sent in a step, and their bytes; anything else is an `AssertionError`."""
    for run in runs:
        other = run.ledger.count() - run.ledger.messages - run.ledger.count("recv")
        if other:
            raise AssertionError(f"{other} operations are no messages")
    return sum(run.ledger.messages for run in runs), sum(run.ledger.sent for run in runs)


def measured(runs: Sequence[PipelineRun]) -> list[list[Timed]]:
    """Return the operations of each rank with their times, counted from the first one of any rank."""
    first = min(start for run in runs for _, start, _ in run.spans)
    return [[(op, start - first, end - first) for op, start, end in run.spans] for run in runs]


def idle(runs: Sequence[PipelineRun]) -> list[float]:
    """Return the share of the step, 0 to 1, in which each rank did not compute."""
    by_rank = measured(runs)
    whole = max(end for spans in by_rank for *_, end in spans)
    return [1 - sum(end - start for _, start, end in spans) / whole for spans in by_rank]


def weighed(runs: Sequence[PipelineRun], unit: Sequence[PipelineRun]) -> list[float]:
    """Return the most activations that each rank held, in units of what it holds in another run."""
    return [run.held / other.held for run, other in zip(runs, unit, strict=True)]
