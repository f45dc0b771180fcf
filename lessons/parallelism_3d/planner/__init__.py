"""How to divide a training run among GPUs: is a layout legal, what does it hold in memory, how long does a step take.

A layout is tensor x context x pipeline x data parallelism, the data ranks in replicas of sharded groups (HSDP) if you
like, experts divided among them. Ranks are numbered with tensor fastest, then context, pipeline and data, as Llama 3's
(arXiv 2407.21783, section 3.3.2), so that the groups that talk most sit closest. Bytes, seconds, bytes per second; a
batch is counted in sequences.

What is modelled (`rates`, `messages`, `step_time`, `held`): matrix products by shape, with waves of tiles that leave
multiprocessors idle and results that are written after the arithmetic; attention by kernel and length; element-wise
operations by the bytes they pass, with and without compilation; kernels that start no faster than Python starts them;
collectives by size, ranks and links; what hides behind computing, which it slows; the pipeline's bubble; the
optimizer; and the loss. Two shares are fitted, to five runs (`FITTED`); the others are measurements of others. What
is not: input, failures, an allocator short of memory, congestion, waiting for the slowest of many nodes, masks that
make work uneven, software that does not do what the hardware allows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from course_utils.recorded import Run
from course_utils.transformer import RECOMPUTE, TransformerConfig

from . import evidence
from .clusters import CLUSTERS, GpuCluster, cluster, own_cluster
from .evidence import Measured, Replayed, Score, guesses, plan_inputs, score, scores
from .held import MemoryModel, fullest
from .layout import Layout, broken_rules
from .messages import traffic
from .plans import MESSAGES, PARTS, Plan
from .published import ModelShape, PublishedRun, published_runs
from .rates import (
    ATTENTION,
    HOP,
    PRODUCTS,
    StepTimeConstants,
    attention_rate,
    best_product,
    product_seconds,
)
from .step_time import StepModel

__all__ = [
    "ATTENTION", "CLUSTERS", "CONSTANTS", "FITTED", "FITTED_NAMES", "HOP", "MESSAGES", "PARTS", "PRODUCTS", "RECOMPUTE",
    "GpuCluster", "Layout", "Measured", "ModelShape", "Place", "Plan", "PublishedRun", "Replayed", "Score", "Search",
    "StepModel", "StepTimeConstants", "attention_rate", "best_product", "broken_rules", "cluster", "fit", "fitted_runs",
    "guesses", "mesh_groups", "own_cluster", "place", "plan", "plan_inputs", "product_seconds", "published_runs",
    "reasons_against", "replay", "score", "scores", "search", "traffic",
]

#: Names of the published runs that `CONSTANTS` are fitted to, and of the constants that are.
FITTED = (
    "llm-foundry-a100-80-19", "llm-foundry-a100-80-34", "megatron-weak-5", "torchtitan-fsdp-2", "torchtitan-fsdp-5",
)
FITTED_NAMES = ("matmul", "matmul_hopper")
#: What `fit(fitted_runs())` gives, rounded.
CONSTANTS = StepTimeConstants(matmul=0.873, matmul_hopper=0.776)


def fitted_runs() -> tuple[PublishedRun, ...]:
    """Return the published runs of `FITTED`, in that order."""
    by_name = {run.id: run for run in published_runs(role="known")}
    return tuple(by_name[name] for name in FITTED)


def fit(
    rows: Iterable, names: Iterable[str] = FITTED_NAMES, start: StepTimeConstants = CONSTANTS
) -> StepTimeConstants:
    """Fit constants to published runs, or to steps of your own (`Measured`): see `evidence.fit`."""
    return evidence.fit(list(rows), list(names), start)


def replay(
    rows: Iterable, constants: StepTimeConstants = CONSTANTS, *, fitted: Iterable | None = None
) -> list[Replayed]:
    """Plan published runs; `fitted` are those that the constants have seen: see `evidence.replay`."""
    return evidence.replay(rows, constants, fitted=tuple(fitted_runs() if fitted is None else fitted))


def reasons_against(model: TransformerConfig, cluster: GpuCluster, layout: Layout, batch: int) -> list[str]:
    """Return the reasons why a layout cannot run, none if it can.

    Tensor parallelism over more GPUs than a node has is legal: `plan` shows what it costs. Two rules are those of
    Megatron-LM in 2021: key-value heads are divided, not copied, and interleaving wants whole groups of `pp`
    micro-batches. (Llama 3's and PyTorch's schedules take other numbers, for which the bubble here would be wrong: with
    fewer micro-batches than stages a pass of a chunk takes `pp` slots all the same.) Memory is looked at only if all
    else is well; the limit is the data sheet's. What a card has above it is left to CUDA, NCCL and the allocator: an
    "80 GB" H100 reports 81,559 MiB, 85.5 GB (https://thundergolfer.com/blog/nvidia-gpu-memory-capacity).
    """
    found = [text for _, text in broken_rules(model, cluster, layout, batch)]
    if not found and (need := sum(fullest(model, layout, batch))) > cluster.card.memory_bytes:
        has = f"{cluster.card.memory_bytes / 1e9:.0f}"
        found.append(f"the fullest GPU needs {need / 1e9:.1f} GB, more than the {has} of this {cluster.card.name}")
    return found


def plan(
    model: TransformerConfig, cluster: GpuCluster, layout: Layout, batch: int, constants: StepTimeConstants = CONSTANTS
) -> Plan:
    """Return memory and time of a step of `batch` sequences.

    Raises
    ------
    ValueError
        The layout cannot run, with all reasons of `reasons_against`.
    """
    against = reasons_against(model, cluster, layout, batch)
    if against:
        raise ValueError(f"{model.name} as {layout} cannot run: " + "; ".join(against))
    return StepModel(model, cluster, constants).step(layout, batch, fullest(model, layout, batch))


# --- search -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """All layouts of a cluster.

    Attributes
    ----------
    plans : tuple of Plan
        Legal ones, fastest first; of equally fast ones the one with less memory.
    refused : dict of str to int
        Number of illegal ones by kind of the first reason: heads, context, layers, batch, interleaving, replicas,
        experts, memory.
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


def search(
    model: TransformerConfig, cluster: GpuCluster, batch: int, *, constants: StepTimeConstants = CONSTANTS, **restrict
) -> Search:
    """Plan every layout of the cluster's GPUs.

    Tried are all degrees whose product is the number of GPUs; micro-batches of 1, 2, 4, 8 and 16 sequences; up to 8
    virtual stages, where they divide the layers; all ZeRO stages and three kinds of recomputation. With a pipeline
    stages 2 and 3 hold more than stage 1 and take as long, so they are not tried unless 1 is excluded. Without one
    states are divided among all ranks or, as HSDP, in each node. Experts are divided in all ways.

    Parameters
    ----------
    **restrict
        Fields of `Layout`, each a value or several, such as ``tp=8`` or ``recompute=("none", "full")``. Fields that are
        not searched (`precision`, `compiled`, `products`, ...) can be set in the same way, to several values too.
    """
    names = {field.name for field in fields(Layout)}
    if set(restrict) - names:
        raise ValueError(f"unknown {sorted(set(restrict) - names)}; a layout has {', '.join(sorted(names))}")
    defaults = {"zero": (0, 1, 2, 3), "recompute": RECOMPUTE}
    ruled = ("tp", "pp", "dp", "cp", "virtual", "microbatch", "replicas", "ep", "sequence_parallel")  # some are illegal
    defaults |= {name: (getattr(Layout(), name),) for name in sorted(names - {*defaults, *ruled})}
    options = {name: _choices(restrict, name, default) for name, default in defaults.items()}
    combinations = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    refused: Counter[str] = Counter()
    plans, times, bytes_of = [], StepModel(model, cluster, constants), MemoryModel(model)
    limit = cluster.card.memory_bytes
    for degrees in _ruled(model, cluster, restrict):
        sets = [each for each in combinations if _worth_trying(degrees, each["zero"], options["zero"])]
        if not sets:
            continue
        kind, text = next(broken_rules(model, cluster, Layout(**degrees, **sets[0]), batch), (None, ""))
        if kind == "value":
            raise ValueError(text)
        if kind is not None:
            refused[kind] += len(sets)
            continue
        for each in sets:
            layout = Layout(**degrees, **each)
            held = bytes_of.fullest(layout, batch)
            if (total := sum(held)) > limit:
                refused["memory"] += 1
                continue
            made = times.step(layout, batch, held)
            plans.append((made.seconds, total, len(plans), made))
    return Search(tuple(each for *_, each in sorted(plans)), dict(refused))


def _worth_trying(degrees: Mapping[str, int], zero: int, stages: tuple[int, ...]) -> bool:
    """Leave out stages that change nothing for these degrees, or make it worse."""
    if degrees["dp"] * degrees["cp"] == 1:
        return zero == min(stages)
    if degrees["pp"] > 1 and zero > max(1, min(stages)):
        return False
    return degrees["replicas"] == 1 or zero >= 1


def _ruled(model: TransformerConfig, cluster: GpuCluster, restrict: Mapping[str, object]) -> Iterator[dict[str, int]]:
    """Yield degrees, chunks, micro-batches, replicas and expert parallelism: what rules of legality are about."""
    for tp, pp, dp, cp in _degrees(cluster.gpus, restrict):
        chunks = _divisors(model.layers // pp) + _divisors((model.layers + 2) // pp) if pp > 1 else [1]
        virtual = _choices(restrict, "virtual", sorted({v for v in chunks if v <= 8}))
        nodes = cluster.gpus // cluster.per_node
        hybrid = (1, nodes) if pp == 1 and nodes > 1 and dp % nodes == 0 and dp * cp > nodes else (1,)
        experts = [n for n in _divisors(model.experts) if dp % n == 0] if model.experts else (1,)
        options = {
            "virtual": virtual, "microbatch": _choices(restrict, "microbatch", (1, 2, 4, 8, 16)),
            "replicas": _choices(restrict, "replicas", hybrid), "ep": _choices(restrict, "ep", experts),
            "sequence_parallel": _choices(restrict, "sequence_parallel", (True,)),
        }
        for values in itertools.product(*options.values()):
            yield {"tp": tp, "pp": pp, "dp": dp, "cp": cp, **dict(zip(options, values, strict=True))}


def _degrees(gpus: int, restrict: Mapping[str, object]) -> Iterator[tuple[int, int, int, int]]:
    """Yield all (tp, pp, dp, cp) whose product is `gpus`."""
    for tp in _choices(restrict, "tp", _divisors(gpus)):
        for pp in _choices(restrict, "pp", _divisors(gpus)):
            for cp in _choices(restrict, "cp", _divisors(gpus)):
                dp, rest = divmod(gpus, tp * pp * cp)
                if not rest and dp and dp in _choices(restrict, "dp", (dp,)):
                    yield tp, pp, dp, cp


@dataclass(frozen=True)
class Place:
    """Where a published layout stands among all of as many GPUs."""

    rank: int | None  # place of its degrees, the best plan of each counting, from 1; None if none of their plans fits
    of: int  # number of degrees that can run
    behind: float  # how much longer the layout's step takes than that of the best plan found: 0.1 is a tenth


def place(run: Run | PublishedRun, constants: StepTimeConstants = CONSTANTS) -> Place:
    """Search all layouts of a published run's GPUs for the place of its own.

    The search keeps what was given by the software: all but the degrees, micro-batch and virtual stages. Contexts are
    divided only where the run divides them.
    """
    model, machine, layout, batch = plan_inputs(run)
    free = {"tp", "pp", "dp", "microbatch", "virtual"} | ({"cp"} if layout.cp > 1 else set())
    kept = {each.name: getattr(layout, each.name) for each in fields(Layout) if each.name not in free}
    found = search(model, machine, batch, constants=constants, **kept)
    own = StepModel(model, machine, constants).step(layout, batch, fullest(model, layout, batch))
    return Place(found.rank(layout), len(found.best), own.seconds / found.plans[0].seconds - 1)


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
