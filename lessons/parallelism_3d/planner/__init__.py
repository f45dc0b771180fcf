"""How to divide a training run among GPUs: is a layout legal, what does it hold in memory, how long does a step take.

A layout is tensor x context x pipeline x data parallelism, the data ranks in replicas of sharded groups (HSDP) if you
like, experts divided among tensor, context and data ranks. Ranks are numbered with tensor fastest, then context, data
and pipeline (`Layout.order`), so that the groups that talk most sit closest. Bytes, seconds, bytes per second; a batch
is counted in sequences.

What is modelled (`rates`, `messages`, `step_time`, `held`): matrix products by shape; attention by kernel and length;
element-wise operations by the bytes they pass; kernels that start no faster than Python starts them; collectives by
size, ranks and links; what hides behind computing, which it slows; the bubble; the optimizer; the loss. What is not:
input, failures, congestion, slow nodes, software that does not do what the hardware allows. Fitted are two shares to
five runs (`FITTED`), Blackwell's, and what a pipeline holds beside (`tried`); the others are measurements of others.
"""

from __future__ import annotations

from collections.abc import Mapping

from course_utils.transformer import RECOMPUTE, TransformerConfig

from .clusters import CLUSTERS, GpuCluster, cluster, own_cluster
from .evidence import (
    FITTED,
    Replayed,
    fit,
    fitted_runs,
    plan_inputs,
    replay,
    score,
    scores,
)
from .held import fullest, reserve
from .layout import Layout, broken_rules
from .messages import traffic
from .plans import PARTS, Plan
from .published import published_runs
from .rates import CONSTANTS, StepTimeConstants, attention_rate, best_product, product_seconds
from .searches import Search, place, search
from .step_time import StepModel
from .tried import Tried, foreseen, layouts_measured

__all__ = [
    "CLUSTERS", "CONSTANTS", "FITTED", "PARTS", "RECOMPUTE", "GpuCluster", "Layout", "Plan",
    "Replayed", "Search", "Tried", "attention_rate", "best_product", "broken_rules", "cluster", "fit", "fitted_runs",
    "foreseen", "layouts_measured", "mesh_groups", "own_cluster", "place", "plan", "plan_inputs",
    "product_seconds", "published_runs", "reasons_against", "replay", "score", "scores", "search", "traffic",
]


def reasons_against(model: TransformerConfig, cluster: GpuCluster, layout: Layout, batch: int) -> list[str]:
    """Return the reasons why a layout cannot run, none if it can.

    Each says in brackets what kind of reason it is: impossible, this planner's convention, or a rule of Megatron-LM
    that other software does not have (Llama 3's and PyTorch's schedules interleave any number of micro-batches).
    Memory is looked at only if all else is well: what is counted and `reserve` have to be less than CUDA reports.
    """
    found = [text for _, text in broken_rules(model, cluster, layout, batch)]
    if not found:
        held = fullest(model, layout, batch)
        apart = reserve(layout, held)
        if sum(held) + apart > cluster.card.memory_bytes:
            has = f"{cluster.card.memory_bytes / 1e9:.0f} of this {cluster.card.name}"
            need = f"{(sum(held) + apart) / 1e9:.1f} GB, {apart / 1e9:.1f} of it in reserve"
            found.append(f"the fullest GPU needs {need}, more than the {has}")
    return found


def plan(
    model: TransformerConfig, cluster: GpuCluster, layout: Layout, batch: int, constants: StepTimeConstants = CONSTANTS
) -> Plan:
    """Return memory and time of a step of `batch` sequences; a layout that cannot run is a ValueError with reasons."""
    against = reasons_against(model, cluster, layout, batch)
    if against:
        raise ValueError(f"{model.name} as {layout} cannot run: " + "; ".join(against))
    return StepModel(model, cluster, constants).step(layout, batch, fullest(model, layout, batch))


def mesh_groups(sizes: Mapping[str, int]) -> dict[str, list[tuple[int, ...]]]:
    """Return the ranks of every group of a mesh, by dimension; the last dimension is the fastest, as in torch's."""
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
