"""How to divide a training run among GPUs: is a layout legal, what does it hold in memory, how long does a step take.

A layout is tensor x context x pipeline x data parallelism. Ranks are numbered with tensor fastest, then context,
pipeline and data, as Llama 3's (arXiv 2407.21783, section 3.3.2), so that the groups that talk most sit closest. Bytes,
seconds, bytes per second; a batch is counted in sequences.

What is modelled: matrix products at a share of the best product found on the GPU, fused attention at the published
share of the peak, element-wise operations at a share of the memory bandwidth, collectives as `costs` has them at the
share of the links that large ones reach, the pipeline's bubble by formula. Two shares are fitted, to three runs
(`FITTED`); the others are measurements of others. What is not, and what published runs are slower by: small products
that fill a GPU badly, stragglers among thousands of GPUs, GPUs that communication keeps from computing, congestion,
masks that make work uneven. Where communication is said to hide, it hides entirely: of ZeRO-3 in particular the time is
a lower bound, which DeepSpeed of 2021 missed by far (`recorded.ZERO3_RUNS`) and torchtitan of 2024 by a factor of 1.8
(`recorded.TORCHTITAN_RUNS`). The achievable products, the share of fused attention, and gradients that are not reduced
after each micro-batch of a pipeline came in after a first comparison with Llama 3's runs (errors of +8, +9 and +34 %
before); nothing was fitted to those.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from .. import recorded
from ..hardware import GPUS
from ..recorded import Run
from ..transformer import MODELS, RECOMPUTE, Model
from .layout import CLUSTERS, Cluster, Layout, cluster, fullest, reasons
from .step_time import PARTS, Constants, Plan, step, traffic

__all__ = [
    "CLUSTERS", "CONSTANTS", "FITTED", "MODELS", "PARTS", "RECOMPUTE", "Cluster", "Constants", "Layout", "Model",
    "Plan", "Replayed", "Search", "baseline", "cluster", "fit", "legal", "mesh_groups", "of_run", "plan", "reasons",
    "replay", "search", "traffic",
]

#: Runs that `CONSTANTS` are fitted to: the smallest, the middle and the largest of Megatron-LM's table.
FITTED = (recorded.MEGATRON_RUNS[0], recorded.MEGATRON_RUNS[4], recorded.MEGATRON_RUNS[9])
#: What `fit(FITTED)` gives, rounded.
CONSTANTS = Constants(matmul=0.862, hbm=0.706)


def legal(model: Model, cluster: Cluster, layout: Layout, batch: int) -> list[str]:
    """Return the reasons why a layout cannot run, none if it can.

    Tensor parallelism over more GPUs than a node has is legal: `plan` shows what it costs. Two rules are those of
    Megatron-LM in 2021: key-value heads are divided, not copied, and interleaving wants whole groups of `pp`
    micro-batches. (Llama 3's and PyTorch's schedules take other numbers, for which the bubble here would be wrong: with
    fewer micro-batches than stages a pass of a chunk takes `pp` slots all the same.) Memory is looked at only if all
    else is well; the limit is the data sheet's. What a card has above it is left to CUDA, NCCL and the allocator: an
    "80 GB" H100 reports 81,559 MiB, 85.5 GB (https://thundergolfer.com/blog/nvidia-gpu-memory-capacity).
    """
    found = [text for _, text in reasons(model, cluster, layout, batch)]
    if not found and (need := sum(fullest(model, layout, batch))) > cluster.card.memory_bytes:
        has = f"{cluster.card.memory_bytes / 1e9:.0f}"
        found.append(f"the fullest GPU needs {need / 1e9:.1f} GB, more than the {has} of this {cluster.card.name}")
    return found


def plan(model: Model, cluster: Cluster, layout: Layout, batch: int, constants: Constants = CONSTANTS) -> Plan:
    """Return memory and time of a step of `batch` sequences.

    Raises
    ------
    ValueError
        The layout cannot run, with all reasons of `legal`.
    """
    against = legal(model, cluster, layout, batch)
    if against:
        raise ValueError(f"{model.name} as {layout} cannot run: " + "; ".join(against))
    return step(model, cluster, layout, batch, constants, fullest(model, layout, batch))


# --- search -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """All layouts of a cluster.

    Attributes
    ----------
    plans : tuple of Plan
        Legal ones, fastest first; of equally fast ones the one with less memory.
    refused : dict of str to int
        Number of illegal ones by kind of the first reason: heads, context, layers, batch, interleaving, memory.
    """

    plans: tuple[Plan, ...]
    refused: Mapping[str, int]

    @cached_property
    def best(self) -> tuple[Plan, ...]:
        """The best plan of each choice of degrees (tp, cp, pp, dp), fastest first."""
        found: dict[tuple, Plan] = {}
        for each in self.plans:
            found.setdefault(each.layout.degrees, each)
        return tuple(found.values())

    def rank(self, layout: Layout) -> int | None:
        """Place of the degrees of `layout` in `best`, from 1; None if none of their plans is legal."""
        places = {each.layout.degrees: place for place, each in enumerate(self.best, 1)}
        return places.get(layout.degrees)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _choices(restrict: dict, name: str, default: Iterable) -> tuple:
    value = restrict.get(name, default)
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def search(model: Model, cluster: Cluster, batch: int, *, constants: Constants = CONSTANTS, **restrict) -> Search:
    """Plan every layout of the cluster's GPUs.

    Tried are all degrees whose product is the number of GPUs; micro-batches of 1, 2, 4, 8 and 16 sequences; up to 8
    virtual stages, where they divide the layers; all ZeRO stages and kinds of recomputation.

    Parameters
    ----------
    **restrict
        Fields of `Layout`, each a value or several, such as ``tp=8`` or ``recompute=("none", "full")``. Fields that are
        not searched (`sequence_parallel`, `overlap`, `precision`) can be set in the same way.
    """
    names = {field.name for field in fields(Layout)}
    if set(restrict) - names:
        raise ValueError(f"unknown {sorted(set(restrict) - names)}; a layout has {', '.join(sorted(names))}")
    defaults = {
        "microbatch": (1, 2, 4, 8, 16), "sequence_parallel": (True,), "zero": (0, 1, 2, 3), "recompute": RECOMPUTE,
        "overlap": (True,), "precision": ("mixed",),
    }
    options = {name: _choices(restrict, name, default) for name, default in defaults.items()}
    names = list(options)[2:]  # legal or not whatever they are
    combinations = [dict(zip(names, values, strict=True)) for values in itertools.product(*map(options.get, names))]
    refused: Counter[str] = Counter()
    plans = []
    for tp, pp, dp, cp in _degrees(cluster.gpus, restrict):
        chunks = _divisors(model.layers // pp) + _divisors((model.layers + 2) // pp) if pp > 1 else [1]
        virtual = _choices(restrict, "virtual", sorted({v for v in chunks if v <= 8}))
        sets = [each for each in combinations if dp * cp > 1 or each["zero"] == min(options["zero"])]
        for v, microbatch, sp in itertools.product(virtual, options["microbatch"], options["sequence_parallel"]):
            degrees = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "virtual": v, "microbatch": microbatch}
            layouts = [Layout(**degrees, sequence_parallel=sp, **each) for each in sets]
            kind, text = next(reasons(model, cluster, layouts[0], batch), (None, ""))
            if kind == "value":
                raise ValueError(text)
            for layout in layouts:
                if kind is None:
                    held = fullest(model, layout, batch)
                    if sum(held) <= cluster.card.memory_bytes:
                        each = step(model, cluster, layout, batch, constants, held)
                        plans.append((each.seconds, sum(held), len(plans), each))
                        continue
                refused[kind or "memory"] += 1
    return Search(tuple(each for *_, each in sorted(plans)), dict(refused))


def _degrees(gpus: int, restrict: Mapping[str, object]) -> Iterator[tuple[int, int, int, int]]:
    """Yield all (tp, pp, dp, cp) whose product is `gpus`."""
    for tp in _choices(restrict, "tp", _divisors(gpus)):
        for pp in _choices(restrict, "pp", _divisors(gpus)):
            for cp in _choices(restrict, "cp", _divisors(gpus)):
                dp, rest = divmod(gpus, tp * pp * cp)
                if not rest and dp and dp in _choices(restrict, "dp", (dp,)):
                    yield tp, pp, dp, cp


# --- published runs ---------------------------------------------------------------------------------------------------


def of_run(run: Run) -> tuple[Model, Cluster, Layout, int]:
    """Return model, cluster, layout and batch of a published run, as `plan` takes them."""
    model = replace(MODELS[run.model], length=run.length)
    return model, cluster(run.cluster, run.gpus), Layout(**run.layout), run.batch


def fit(rows: Sequence[Run]) -> Constants:
    """Fit the shares of matrix products and of memory bandwidth to two or three published runs.

    Least squares on the relative error of the TFLOP/s. The time of a step is linear in one over each share as long as
    nothing hides behind computing; where something does, the fit goes on from its own result.
    """
    if not 2 <= len(rows) <= 3:
        raise ValueError(f"two constants are fitted to two or three runs, got {len(rows)}")

    def relative(inverse: np.ndarray) -> np.ndarray:
        """Predicted over published time."""
        constants = Constants(*map(float, 1 / inverse))
        return np.array([run.tflops / _counted(run, _planned(run, constants)) for run in rows])

    inverse = np.array([1.5, 1.5])
    for _ in range(4):
        here = relative(inverse)
        slopes = np.stack([(relative(inverse + change) - here) / 0.1 for change in 0.1 * np.eye(2)], axis=1)
        inverse = np.clip(inverse + np.linalg.lstsq(slopes, 1 - here, rcond=None)[0], 1.0, 20.0)
    return Constants(*map(float, 1 / inverse))


def _planned(run: Run, constants: Constants) -> Plan:
    model, machine, layout, batch = of_run(run)
    return step(model, machine, layout, batch, constants, fullest(model, layout, batch))


def _counted(run: Run, each: Plan) -> float:
    return each.tflops if run.counted == "hardware" else each.model_tflops


@dataclass(frozen=True)
class Replayed:
    """A published run and what the planner makes of it.

    Attributes
    ----------
    plan : Plan
        Of the published layout.
    predicted : float
        TFLOP/s of each GPU, counted as the source counts.
    rank : int or None
        Place of the published degrees among all of as many GPUs, the best plan of each counting; None if not searched.
    behind : float or None
        How much longer its step takes than that of the best plan found, by the planner: 0.1 is a tenth.
    fitted : bool
        Whether the constants were fitted to this run: its error says nothing about the planner.
    refused : tuple of str
        What `legal` says against it: memory, or nothing.
    """

    run: Run
    plan: Plan
    predicted: float
    rank: int | None
    behind: float | None
    fitted: bool
    refused: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def published(self) -> float:
        """TFLOP/s of each GPU."""
        return self.run.tflops

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.run.tflops - 1


def replay(
    rows: Sequence[Run], constants: Constants = CONSTANTS, *, fitted: Sequence[Run] = FITTED, ranks: bool = True
) -> list[Replayed]:
    """Plan published runs; with `ranks`, search the place of their degrees too.

    The search keeps what was given by the software: ZeRO stage, recomputation, sequence parallelism, overlap and
    precision. Micro-batch and virtual stages are free. Contexts are divided only where the run divides them. A run that
    takes more memory than we think there is is planned all the same.

    Raises
    ------
    ValueError
        A layout cannot run for another reason.
    """
    found = []
    for run in rows:
        model, machine, layout, batch = of_run(run)
        against = [text for _, text in reasons(model, machine, layout, batch)]
        if against:
            raise ValueError(f"{run.name} as {layout} cannot run: " + "; ".join(against))
        each, refused = _planned(run, constants), tuple(legal(model, machine, layout, batch))
        place = behind = None
        if ranks:
            given = ["zero", "recompute", "sequence_parallel", "overlap", "precision"] + ["cp"] * (layout.cp == 1)
            kept = {name: getattr(layout, name) for name in given}
            others = search(model, machine, batch, constants=constants, **kept)
            place, behind = others.rank(layout), each.seconds / others.plans[0].seconds - 1
        found.append(Replayed(run, each, _counted(run, each), place, behind, run in fitted, refused))
    return found


def baseline(rows: Sequence[Run], fitted: Sequence[Run] = FITTED) -> list[float]:
    """Errors of the guess that every run reaches the mean share of peak of the fitted ones, as `Replayed.error`."""

    def share(run: Run) -> float:
        return run.tflops * 1e12 / GPUS[CLUSTERS[run.cluster][1]].flops["bf16"]

    mean = statistics.fmean(map(share, fitted))
    return [mean / share(run) - 1 for run in rows]


def mesh_groups(sizes: Mapping[str, int]) -> dict[str, list[tuple[int, ...]]]:
    """Return the ranks of every group of a mesh, by dimension.

    Ranks are numbered row-major, the last dimension fastest, as `torch.distributed.device_mesh` does: with
    ``{"pp": 2, "dp": 2, "tp": 2}`` the tensor groups are (0, 1), (2, 3), (4, 5), (6, 7).
    """
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes.values()):
        raise ValueError(f"sizes must be integers of at least 1 by name, got {dict(sizes)}")
    strides, total = {}, 1
    for name in reversed(sizes):
        strides[name], total = total, total * sizes[name]
    return {
        name: [
            tuple(first + i * strides[name] for i in range(size))
            for first in range(total)
            if first // strides[name] % size == 0
        ]
        for name, size in sizes.items()
    }
