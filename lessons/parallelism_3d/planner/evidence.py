"""The planner held against published runs: what it makes of each, how far off it is by family, and the fit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from course_utils.hardware import GPUS, LINKS
from course_utils.recorded import Run
from course_utils.transformer import PUBLISHED, TransformerConfig

from .clusters import GpuCluster, cluster
from .held import fullest
from .layout import Layout, broken_rules
from .plans import Plan
from .published import PublishedRun
from .rates import StepTimeConstants
from .step_time import StepModel

#: What a run is to the planner: model, cluster, layout and sequences in a step.
Inputs = tuple[TransformerConfig, GpuCluster, Layout, int]

#: GPU -> Gb/s of its network port where a source does not say, and watts by the data sheet.
_USUAL = {"a100": (200, 400), "h100": (400, 700), "h200": (400, 700), "b200": (400, 1000)}
#: What sources call a kernel of attention -> the planner's name. cuDNN's is about as fast as FlashAttention-3.
_KERNELS = {"triton": "flash1", "flash": "flash1", "flash3": "flash3", "cudnn": "flash3"}
#: Bytes per second of the A100 with 40 GB, by NVIDIA's data sheet.
_A100_40_BANDWIDTH = 1.555e12


def plan_inputs(run: Run | PublishedRun) -> Inputs:
    """Return model, cluster, layout and batch of a published run, as `plan` takes them."""
    if isinstance(run, Run):
        model = replace(PUBLISHED[run.model], context=run.length)
        return model, cluster(run.cluster, run.gpus), Layout(**run.layout), run.batch
    shape, card = run.shape, GPUS[run.gpu]
    model = replace(
        shape.config(run.length, run.attention != "unfused"), experts=shape.experts,
        experts_per_token=shape.experts_per_token,
    )
    port, watts = _USUAL[run.gpu]
    link, bandwidth = LINKS[card.nvlink], run.memory_bandwidth
    if run.gpu == "a100" and run.memory_gb == 40:
        bandwidth = bandwidth or _A100_40_BANDWIDTH
    machine = GpuCluster(
        f"{card.name}, {run.table}", run.gpu, run.gpus, min(run.gpus_per_node, run.gpus),
        (link.latency, 1 / link.bandwidth), (LINKS["ib_ndr"].latency, 8 / ((run.network_gbps or port) * 1e9)),
        memory_bytes=run.memory_gb * 1e9, memory_bandwidth=bandwidth, power=(run.power_w or watts) / watts,
    )
    return model, machine, _layout(run), run.batch


def _layout(run: PublishedRun) -> Layout:
    """Return the layout of a run, with our reading of what its source leaves open.

    llm-foundry's loss for MPT works in place, and a compiled loss stores no logits in fp32, with 2 to 4
    bytes a logit: as in pieces. NVIDIA's recipes, known by
    cuDNN's attention, overlap tensor-parallel messages. A distributed optimizer divides among all data ranks.
    """
    zero = 1 if run.zero is None else run.zero
    recompute = run.recompute or "none"
    if recompute == "selective" and "every" in run.recompute_detail:
        recompute = "half"
    compiled = run.compile is not False or zero < 3 or run.attention == "cudnn"  # others than PyTorch fuse by hand
    tp_overlap = run.attention == "cudnn" if run.tp_overlap is None else run.tp_overlap
    if run.reduce == "fp32":
        precision = "bf16 policy" if zero == 3 else "mixed, fp32 gradients"
    else:
        precision = "mixed"
    return Layout(
        run.tp, run.pp, run.dp, run.cp, run.microbatch or 1, run.virtual, zero, recompute,
        sequence_parallel=run.sequence_parallel is not False, overlap=not (zero == 0 and run.pp > 1),
        precision=precision, replicas=run.dp_replicate if zero >= 2 else 1, ep=run.ep, compiled=compiled,
        loss_pieces=4 if run.shape.name.startswith("MPT") or run.loss == "compiled" else 1,
        attention=_KERNELS.get(run.attention or "", "flash2"),
        products="bf16" if run.precision in ("bf16", "fp16") else "fp8", tp_overlap=tp_overlap,
    )


# --- fit --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A step that somebody timed: `seconds` for what `plan` takes."""

    model: TransformerConfig
    cluster: GpuCluster
    layout: Layout
    batch: int
    seconds: float


def _measured(row: Run | PublishedRun | Measured) -> Measured:
    if isinstance(row, Measured):
        return row
    inputs = plan_inputs(row)
    model, machine, layout, batch = inputs
    if isinstance(row, Run):
        flops = model.flops_per_token(layout.recompute if row.counted == "hardware" else "none")
        rate = row.tflops * 1e12 / flops
    else:
        rate = row.rate
    return Measured(*inputs, batch * model.context / machine.gpus / rate)


def fit(
    rows: Sequence[Run | PublishedRun | Measured], names: Sequence[str], start: StepTimeConstants
) -> StepTimeConstants:
    """Fit constants to measured steps: least squares on the logarithm of predicted over measured time.

    Parameters
    ----------
    rows : sequence
        At least as many as constants: published runs, or steps of your own.
    names : sequence of str
        Fields of `StepTimeConstants` to fit; the others stay as in `start`.
    start : StepTimeConstants
    """
    known = [each.name for each in fields(StepTimeConstants)]
    if not names or set(names) - set(known):
        raise ValueError(f"constants to fit must be among {', '.join(known)}, got {list(names)}")
    if len(rows) < len(names):
        raise ValueError(f"{len(names)} constants need as many measured steps, got {len(rows)}")
    steps = [_measured(row) for row in rows]

    def errors(values: np.ndarray) -> np.ndarray:
        constants = replace(start, **dict(zip(names, map(float, values), strict=True)))
        return np.array([np.log(_seconds(each, constants) / each.seconds) for each in steps])

    values = np.array([max(1e-3, getattr(start, name)) for name in names])
    for _ in range(12):
        here, slopes = errors(values), []
        for k in range(len(names)):
            moved = values.copy()
            moved[k] *= 1.01
            slopes.append((errors(moved) - here) / 0.01)
        change = np.linalg.lstsq(np.stack(slopes, axis=1), -here, rcond=None)[0]
        values = np.clip(values * np.exp(np.clip(change, -0.5, 0.5)), 1e-4, 1.5)
    return replace(start, **dict(zip(names, map(float, values), strict=True)))


def _seconds(each: Measured, constants: StepTimeConstants) -> float:
    return StepModel(each.model, each.cluster, constants).step(each.layout, each.batch, (0.0,) * 5).seconds


# --- replay -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """A published run and what the planner makes of it.

    Attributes
    ----------
    plan : Plan
        Of the published layout.
    predicted, published : float
        Tokens per second of each GPU.
    fitted : bool
        Whether constants were fitted to this run: its error says nothing about the planner.
    refused : tuple of str
        What speaks against it: that it does not fit, or nothing.
    """

    run: Run | PublishedRun
    plan: Plan
    published: float
    fitted: bool
    refused: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def family(self) -> str:
        """Kind of run: see `published.FAMILIES`."""
        if isinstance(self.run, PublishedRun):
            return self.run.family
        layout = self.plan.layout
        long = layout.cp > 1 or self.run.length >= 32768
        return "long_context" if long else "3d" if layout.tp * layout.pp > 1 else "fsdp"

    @property
    def predicted(self) -> float:
        return self.plan.tokens_per_gpu

    @property
    def error(self) -> float:
        """Predicted over published throughput, less one."""
        return self.predicted / self.published - 1

    @property
    def share(self) -> float:
        """Published share of the GPU's bf16 peak, each operation counted once, of attention what the mask leaves."""
        once = replace(self.plan.model, fused=True).flops_per_token("none")
        return self.published * once / self.plan.cluster.card.flops["bf16"]


def replay(
    rows: Iterable[Run | PublishedRun], constants: StepTimeConstants, *, fitted: Sequence[Run | PublishedRun] = ()
) -> list[Replayed]:
    """Plan published runs. A run that takes more memory than we think there is is planned all the same.

    Raises
    ------
    ValueError
        A layout cannot run for another reason.
    """
    found = []
    for run in rows:
        model, machine, layout, batch = plan_inputs(run)
        against = [text for _, text in broken_rules(model, machine, layout, batch)]
        if against:
            raise ValueError(f"{run.name} as {layout} cannot run: " + "; ".join(against))
        held = fullest(model, layout, batch)
        each = StepModel(model, machine, constants).step(layout, batch, held)
        limit = machine.card.memory_bytes
        refused = (f"the fullest GPU needs {sum(held) / 1e9:.1f} GB of {limit / 1e9:.0f}",) * (sum(held) > limit)
        published = batch * model.context / machine.gpus / _measured(run).seconds
        found.append(Replayed(run, each, published, run in fitted, refused))
    return found


@dataclass(frozen=True)
class Score:
    """How far off the planner is over some runs, those left out that it was fitted to.

    Attributes
    ----------
    runs : int
    median : float
        Of the errors' sizes.
    bias : float
        Median of the errors with their sign.
    guess : float
        Median size of the errors of the best constant guess: that every run reaches one share of the peak, chosen with
        all these runs in view so that this median is smallest.
    """

    runs: int
    median: float
    bias: float
    guess: float


def score(rows: Sequence[Replayed]) -> Score:
    """Return the score over replayed runs."""
    seen = [row for row in rows if not row.fitted]
    if not seen:
        raise ValueError("there is no run that the constants were not fitted to")
    errors, shares = [row.error for row in seen], [row.share for row in seen]
    guesses = (statistics.median(abs(guess / share - 1) for share in shares) for guess in shares)
    size = statistics.median(map(abs, errors))
    return Score(len(seen), size, statistics.median(errors), min(guesses))


def scores(rows: Sequence[Replayed]) -> dict[str, Score]:
    """Return the score of each family of runs, and of all."""
    kinds: dict[str, list[Replayed]] = {}
    for row in rows:
        if not row.fitted:
            kinds.setdefault(row.family, []).append(row)
    return {**{kind: score(some) for kind, some in kinds.items()}, "all": score(rows)}


def guesses(rows: Sequence[Replayed]) -> list[float]:
    """Errors of the best constant guess of the runs' own family, as `Replayed.error`."""
    best: Mapping[str, float] = {}
    kinds: dict[str, list[float]] = {}
    for row in rows:
        kinds.setdefault(row.family, []).append(row.share)
    best = {
        kind: min(shares, key=lambda guess, of=shares: statistics.median(abs(guess / share - 1) for share in of))
        for kind, shares in kinds.items()
    }
    return [best[row.family] / row.share - 1 for row in rows]

