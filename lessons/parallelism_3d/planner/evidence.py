"""The planner held against what others ran: what it makes of each layout, how far off it is by family, and the fit."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from course_utils.recorded import Run
from course_utils.recordings import FOLDER
from course_utils.transformer import PUBLISHED, TransformerConfig

from .clusters import CLUSTERS, USABLE, GpuCluster, cluster, own_cluster
from .held import fits, fragments, fullest
from .layout import Layout, broken_rules
from .plans import Plan
from .published import PublishedRun
from .rates import CONSTANTS, StepTimeConstants
from .step_time import StepModel

#: Watts by the data sheet.
_WATTS = {"a100": 400, "h100": 700, "h200": 700, "b200": 1000}
#: What sources call a kernel of attention -> the planner's name. cuDNN's is about as fast as FlashAttention-3.
_KERNELS = {"triton": "flash1", "flash": "flash1", "flash3": "flash3", "cudnn": "flash3"}


def plan_inputs(run: Run | PublishedRun) -> tuple[TransformerConfig, GpuCluster, Layout, int]:
    """Return model, cluster, layout and batch of a published run, as `plan` takes them."""
    if isinstance(run, Run):
        model = replace(PUBLISHED[run.model], context=run.length)
        return model, cluster(run.cluster, run.gpus), Layout(**run.layout), run.batch
    per_node, memory = min(run.gpus_per_node, run.gpus), USABLE * run.memory_gb * 1e9
    usual = own_cluster(run.gpu, run.gpus, per_node=per_node, network=1e9 * run.network_gbps, memory_bytes=memory)
    power = (run.power_w or _WATTS[run.gpu]) / _WATTS[run.gpu]
    return run.model, replace(usual, memory_bandwidth=run.memory_bandwidth, power=power), _layout(run), run.batch


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


@dataclass(frozen=True)
class Tried:
    """A layout as `plan` takes it, and what was measured: whether it "ran", "GB" on its fullest GPU without CUDA and
    NCCL, "tokens/s" of each GPU, or "seconds" of a step."""

    model: TransformerConfig
    cluster: GpuCluster
    layout: Layout
    batch: int
    unit: str
    value: float
    where: str = ""
    run: Run | PublishedRun | None = None  # whose row it is

    @property
    def fitted(self) -> bool:
        """Whether constants were fitted to it: its error says nothing about the planner."""
        return getattr(self.run, "fitted", False)

    @property
    def family(self) -> str:
        """That of the run; else moe, pipeline, tensor, fsdp or one GPU: the first that the layout has."""
        if isinstance(self.run, PublishedRun):
            return self.run.family
        one = self.layout
        has = {"moe": self.model.experts, "pipeline": one.pp > 1, "tensor": one.tp > 1, "fsdp": one.gpus > 1}
        return next((name for name, yes in has.items() if yes), "one GPU")

    def planned(self, constants: StepTimeConstants = CONSTANTS) -> Plan:
        """What the planner makes of it, whether it fits or not."""
        held = fullest(self.model, self.layout, self.batch)
        return StepModel(self.model, self.cluster, constants).step(self.layout, self.batch, held)

    @cached_property
    def plan(self) -> Plan:
        return self.planned()

    @property
    def refused(self) -> bool:
        """Whether the planner says that it does not fit."""
        return not fits(self.model, self.cluster, self.layout, self.batch)

    @property
    def error(self) -> float:
        """Planned over measured, less one."""
        if self.unit == "GB":
            held = fullest(self.model, self.layout, self.batch)
            return (sum(held) + fragments(self.layout, held)) / self.value / 1e9 - 1
        return (self.plan.tokens_per_gpu if self.unit == "tokens/s" else self.plan.seconds) / self.value - 1

    @property
    def share(self) -> float:
        """Measured share of the GPU's memory, or of its peak (in bf16 for a run, else in the format of the products);
        operations count once, and of attention what the mask leaves."""
        card = self.cluster.card
        if self.unit == "GB":
            return self.value * 1e9 / card.memory_bytes
        once = replace(self.model, fused=True).flops_per_token("none")
        return self.value * once / card.flops["bf16" if self.run else self.layout.products]


def replay(rows: Iterable[Run | PublishedRun]) -> list[Tried]:
    """Return published runs as layouts that somebody tried, with the plan of each: also where it does not fit."""
    found = []
    for run in rows:
        model, _, layout, _ = inputs = plan_inputs(run)
        if against := [text for _, text in broken_rules(*inputs)]:
            raise ValueError(f"{run.name} as {layout} cannot run: " + "; ".join(against))
        again = layout.recompute if getattr(run, "counted", "model") == "hardware" else "none"
        rate = run.tflops * 1e12 / model.flops_per_token(again) if isinstance(run, Run) else run.rate
        found.append(Tried(*inputs, "tokens/s", rate, run=run))
    return found


@cache
def layouts_measured(unit: str) -> tuple[Tried, ...]:
    """Return the rows of a unit: 101 peaks of memory of seven projects ("GB"), 109 rates of NVIDIA's pages and 25 of
    H200s ("tokens/s"), or whether 694 layouts of Llama on A100s "ran" (Hagemann et al. 2023, arXiv 2311.05610)."""
    stored = json.loads((FOLDER / "layouts_measured.json").read_text(encoding="utf-8"))
    kinds, found = {gpu: name for name, (gpu, *_) in CLUSTERS.items()}, []
    for row in (dict(zip(stored["columns"], values, strict=True)) for values in stored["rows"]):
        if row["unit"] == unit:
            shape = {name: tuple(of) if name == "latent" else of for name, of in stored["models"][row["model"]].items()}
            model, machine = TransformerConfig(**shape, context=row["length"]), cluster(kinds[row["gpu"]], row["gpus"])
            per_node = stored["sources"][row["source"]].get("per_node", machine.per_node)
            machine = replace(machine, per_node=min(per_node, machine.gpus))
            one = {name: tuple(of) if isinstance(of, list) else of for name, of in row["layout"].items()}
            layout = Layout(**{"unequal_stages": True, "copied_kv": True, **one})
            found.append(Tried(model, machine, layout, row["batch"], unit, row["value"], row["where"]))
    return tuple(found)


def fit(
    rows: Iterable[Run | PublishedRun | Tried], names: Sequence[str] = ("matmul", "matmul_hopper")
) -> StepTimeConstants:
    """Fit the constants `names` to published runs, or to "seconds" of your own; the others stay.

    Least squares on the logarithm of predicted over measured time; a share beyond 0.05 to 1.2 is a ValueError.
    """
    steps = [row if isinstance(row, Tried) else replay([row])[0] for row in rows]
    if len(steps) < len(names):
        raise ValueError(f"{len(names)} constants need as many measured steps, got {len(steps)}")

    def constants(values: np.ndarray) -> StepTimeConstants:
        return replace(CONSTANTS, **dict(zip(names, map(float, values), strict=True)))

    def errors(values: np.ndarray) -> np.ndarray:
        plans = [(each, each.planned(constants(values))) for each in steps]
        slower = [p.seconds / e.value if e.unit == "seconds" else e.value / p.tokens_per_gpu for e, p in plans]
        return np.log(np.array(slower))

    values = np.array([getattr(CONSTANTS, name) for name in names])
    for _ in range(12):
        here = errors(values)
        slopes = [(errors(values * moved) - here) / 0.01 for moved in 1 + 0.01 * np.eye(len(names))]
        change = np.linalg.lstsq(np.stack(slopes, axis=1), -here, rcond=None)[0]
        values = np.clip(values * np.exp(np.clip(change, -0.5, 0.5)), 1e-4, 1.5)
    if odd := {name: f"{value:.3g}" for name, value in zip(names, values, strict=True) if not 0.05 < value < 1.2}:
        told = " and ".join(f"{name} {value}" for name, value in odd.items())
        raise ValueError(f"no share explains these steps: {told}; look for what else takes their time")
    return constants(values)


@dataclass(frozen=True)
class Score:
    """How far off the planner is over some runs, those left out that it was fitted to."""

    runs: int
    median: float  # of the errors' sizes
    bias: float  # median of the errors with their sign
    guess: float  # median size of the errors of one share of the peak for all, the best, with these runs in view


def score(rows: Iterable[Tried]) -> Score:
    """Return the score over runs."""
    errors, shares = zip(*((row.error, row.share) for row in rows if not row.fitted), strict=True)
    guesses = (statistics.median(abs(guess / share - 1) for share in shares) for guess in shares)
    return Score(len(errors), statistics.median(map(abs, errors)), statistics.median(errors), min(guesses))


def scores(rows: Sequence[Tried]) -> dict[str, Score]:
    """Return the score of each family of runs, and of all."""
    kinds = dict.fromkeys(row.family for row in rows if not row.fitted)
    return {**{kind: score(row for row in rows if row.family == kind) for kind in kinds}, "all": score(rows)}


@dataclass(frozen=True)
class Foreseen:
    """Shares: of layouts called fitting, that ran; of those out of memory, foreseen; of those that ran, refused."""

    layouts: int
    fitting_ran: float
    foreseen: float
    refused: float


def foreseen(rows: Iterable[Tried]) -> Foreseen:
    """Return how often the planner is right about memory."""
    seen = [(not row.refused, bool(row.value)) for row in rows]
    fitting, failed = [ran for yes, ran in seen if yes], [yes for yes, ran in seen if not ran]
    return Foreseen(
        len(seen), sum(fitting) / len(fitting), 1 - sum(failed) / len(failed),
        sum(ran and not yes for yes, ran in seen) / sum(ran for _, ran in seen),
    )
