"""The planner held against published runs: what it makes of each, how far off it is by family, and the fit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from course_utils.recorded import Run
from course_utils.transformer import PUBLISHED, TransformerConfig

from .clusters import USABLE, GpuCluster, cluster, links
from .held import fits, fullest
from .layout import Layout, broken_rules
from .plans import Plan
from .published import PublishedRun, published_runs
from .rates import CONSTANTS, StepTimeConstants
from .step_time import StepModel
from .tried import Tried

#: Names of the published runs that the shares of products in `CONSTANTS` are fitted to.
FITTED = (
    "llm-foundry-a100-80-19", "llm-foundry-a100-80-34", "megatron-weak-5", "torchtitan-fsdp-2", "torchtitan-fsdp-5",
)

#: GPU -> Gb/s of its network port where a source does not say, and watts by the data sheet.
_USUAL = {"a100": (200, 400), "h100": (400, 700), "h200": (400, 700), "b200": (400, 1000)}
#: What sources call a kernel of attention -> the planner's name. cuDNN's is about as fast as FlashAttention-3.
_KERNELS = {"triton": "flash1", "flash": "flash1", "flash3": "flash3", "cudnn": "flash3"}
#: Bytes per second of the A100 with 40 GB, by NVIDIA's data sheet.
_A100_40_BANDWIDTH = 1.555e12


def plan_inputs(run: Run | PublishedRun) -> tuple[TransformerConfig, GpuCluster, Layout, int]:
    """Return model, cluster, layout and batch of a published run, as `plan` takes them."""
    if isinstance(run, Run):
        model = replace(PUBLISHED[run.model], context=run.length)
        return model, cluster(run.cluster, run.gpus), Layout(**run.layout), run.batch
    port, watts = _USUAL[run.gpu]
    intra, inter = links(run.gpu, (run.network_gbps or port) * 1e9)
    bandwidth = run.memory_bandwidth or (_A100_40_BANDWIDTH if (run.gpu, run.memory_gb) == ("a100", 40) else None)
    machine = GpuCluster(
        run.gpu, run.gpus, min(run.gpus_per_node, run.gpus), intra, inter, memory_bytes=USABLE * run.memory_gb * 1e9,
        memory_bandwidth=bandwidth, power=(run.power_w or watts) / watts,
    )
    return run.model, machine, _layout(run), run.batch


def _layout(run: PublishedRun) -> Layout:
    """Return the layout of a run, with our reading of what its source leaves open.

    llm-foundry's loss for MPT works in place, and a compiled loss stores no logits in fp32: 2 to 4 bytes a logit, as in
    pieces. NVIDIA's recipes, known by cuDNN's attention, overlap tensor-parallel messages.
    """
    zero = 1 if run.zero is None else run.zero
    half = run.recompute == "selective" and "every" in run.recompute_detail
    wide = "bf16 policy" if zero == 3 else "mixed, fp32 gradients"
    recipe = run.attention == "cudnn"
    return Layout(
        run.tp, run.pp, run.dp, run.cp, run.microbatch or 1, run.virtual, zero,
        recompute="half" if half else run.recompute or "none", recompute_share=run.recompute_share,
        sequence_parallel=run.sequence_parallel is not False,
        overlap=not (zero == 0 and run.pp > 1), precision=wide if run.reduce == "fp32" else "mixed",
        replicas=run.dp_replicate if zero >= 2 else 1, ep=run.ep,
        loss_pieces=4 if run.model.name.startswith("MPT") or run.loss == "compiled" else 1,
        compiled=run.compile is not False or zero < 3 or recipe,  # others than PyTorch fuse by hand
        fused_norms=bool(run.fused_norms), attention=_KERNELS.get(run.attention or "", "flash2"),
        order="tp-cp-pp-dp" if run.table.startswith("llama-3") else "tp-cp-dp-pp", unequal_stages=True,
        products="bf16" if run.precision in ("bf16", "fp16") else "fp8",
        tp_overlap=recipe if run.tp_overlap is None else run.tp_overlap,
    )


# --- fit --------------------------------------------------------------------------------------------------------------


def _measured(row: Run | PublishedRun | Tried) -> Tried:
    """The step of a row and its seconds."""
    if isinstance(row, Tried):
        return row
    model, machine, layout, batch = plan_inputs(row)
    if isinstance(row, Run):
        rate = row.tflops * 1e12 / model.flops_per_token(layout.recompute if row.counted == "hardware" else "none")
    else:
        rate = row.rate
    return Tried(model, machine, layout, batch, "seconds", batch * model.context / machine.gpus / rate)


def fitted_runs() -> tuple[PublishedRun, ...]:
    """Return the published runs of `FITTED`, in that order."""
    by_name = {run.id: run for run in published_runs(role="known")}
    return tuple(by_name[name] for name in FITTED)


def fit(
    rows: Iterable[Run | PublishedRun | Tried], names: Sequence[str] = ("matmul", "matmul_hopper")
) -> StepTimeConstants:
    """Fit the constants `names` to published runs, or to "seconds" of your own; the others stay.

    Least squares on the logarithm of predicted over measured time. Raises ValueError if that takes a share beyond 0.05
    to 1.2, which says that something else takes their time.
    """
    steps = [_measured(row) for row in rows]
    if len(steps) < len(names):
        raise ValueError(f"{len(names)} constants need as many measured steps, got {len(steps)}")

    def constants(values: np.ndarray) -> StepTimeConstants:
        return replace(CONSTANTS, **dict(zip(names, map(float, values), strict=True)))

    def errors(values: np.ndarray) -> np.ndarray:
        models = [(each, StepModel(each.model, each.cluster, constants(values))) for each in steps]
        times = [model.step(each.layout, each.batch, (0.0,) * 5).seconds / each.value for each, model in models]
        return np.log(np.array(times))

    values = np.array([getattr(CONSTANTS, name) for name in names])
    for _ in range(12):
        here = errors(values)
        slopes = [(errors(values * moved) - here) / 0.01 for moved in 1 + 0.01 * np.eye(len(names))]
        change = np.linalg.lstsq(np.stack(slopes, axis=1), -here, rcond=None)[0]
        values = np.clip(values * np.exp(np.clip(change, -0.5, 0.5)), 1e-4, 1.5)
    odd = {name: f"{value:.3g}" for name, value in zip(names, values, strict=True) if not 0.05 < value < 1.2}
    if odd:
        told = " and ".join(f"{name} {value}" for name, value in odd.items())
        raise ValueError(f"no share explains these steps: {told}; look for what else takes their time")
    return constants(values)


# --- replay -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """A published run and what the planner makes of it."""

    run: Run | PublishedRun
    plan: Plan
    published: float  # tokens per second of each GPU
    fitted: bool  # whether constants were fitted to it: its error says nothing about the planner
    refused: bool  # whether the planner says that it does not fit

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def family(self) -> str:
        return self.run.family

    @property
    def error(self) -> float:
        """Predicted over published throughput, less one."""
        return self.plan.tokens_per_gpu / self.published - 1

    @property
    def share(self) -> float:
        """Published share of the GPU's bf16 peak, each operation counted once, of attention what the mask leaves."""
        once = replace(self.plan.model, fused=True).flops_per_token("none")
        return self.published * once / self.plan.cluster.card.flops["bf16"]


def replay(rows: Iterable[Run | PublishedRun]) -> list[Replayed]:
    """Plan published runs; a run that takes more memory than we think there is is planned all the same."""
    found = []
    for run in rows:
        one = _measured(run)
        against = [text for _, text in broken_rules(one.model, one.cluster, one.layout, one.batch)]
        if against:
            raise ValueError(f"{run.name} as {one.layout} cannot run: " + "; ".join(against))
        held = fullest(one.model, one.layout, one.batch)
        each = StepModel(one.model, one.cluster, CONSTANTS).step(one.layout, one.batch, held)
        published = one.batch * one.model.context / one.cluster.gpus / one.value
        refused = not fits(one.model, one.cluster, one.layout, one.batch)
        found.append(Replayed(run, each, published, getattr(run, "id", "") in FITTED, refused))
    return found


@dataclass(frozen=True)
class Score:
    """How far off the planner is over some runs, those left out that it was fitted to.

    The best constant guess is that every run reaches one share of the peak, chosen with all these runs in view.
    """

    runs: int
    median: float  # of the errors' sizes
    bias: float  # median of the errors with their sign
    guess: float  # median size of the errors of the best constant guess


def score(rows: Sequence[Replayed]) -> Score:
    """Return the score over replayed runs."""
    seen = [row for row in rows if not row.fitted]
    errors, shares = [row.error for row in seen], [row.share for row in seen]
    guesses = (statistics.median(abs(guess / share - 1) for share in shares) for guess in shares)
    size = statistics.median(map(abs, errors))
    return Score(len(seen), size, statistics.median(errors), min(guesses))


def scores(rows: Sequence[Replayed]) -> dict[str, Score]:
    """Return the score of each family of runs, and of all."""
    kinds = dict.fromkeys(row.family for row in rows if not row.fitted)
    return {**{kind: score([row for row in rows if row.family == kind]) for kind in kinds}, "all": score(rows)}
