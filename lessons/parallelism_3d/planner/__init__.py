"""How to divide a training run among GPUs: is a layout legal, what does it hold in memory, how long does a step take.

A layout is tensor x context x pipeline x data parallelism, with replicas of sharded groups (HSDP) and experts divided
among tensor, context and data ranks if you like (`Layout`). Bytes, seconds, bytes per second; a batch in sequences.

What is modelled (`rates`, `messages`, `step_time`, `held`): matrix products by shape; attention by kernel and length;
element-wise operations by the bytes they pass; kernels that start no faster than Python starts them; collectives by
size, ranks and links; what hides behind computing, which it slows; the bubble; the optimizer; the loss. What is not:
input, failures, congestion, slow nodes, software that does not do what the hardware allows. Fitted are two shares to
five runs (`published_runs(fitted=True)`), and to every second of `layouts_measured` Blackwell's share and what a
pipeline holds beside; the other constants are measurements of others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from course_utils.transformer import RECOMPUTE, TransformerConfig

from .clusters import CLUSTERS, GpuCluster, cluster, own_cluster
from .evidence import Tried, fit, foreseen, layouts_measured, plan_inputs, replay, score, scores
from .held import fullest, reserve
from .layout import Layout, broken_rules
from .messages import traffic
from .plans import PARTS, Plan
from .published import published_runs
from .rates import CONSTANTS, StepTimeConstants, attention_rate, best_product, product_seconds
from .searches import Search, place, search
from .step_time import StepModel

__all__ = [
    "CLUSTERS", "CONSTANTS", "PARTS", "RECOMPUTE", "GpuCluster", "Layout", "Plan",
    "Search", "Tried", "attention_rate", "best_product", "broken_rules", "cluster", "fit",
    "foreseen", "layouts_measured", "mesh_groups", "own_cluster", "place", "plan", "plan_inputs",
    "product_seconds", "published_runs", "reasons_against", "replay", "score", "scores", "search", "traffic",
]


def reasons_against(model: TransformerConfig, cluster: GpuCluster, layout: Layout, batch: int) -> list[str]:
    """Return the reasons why a layout cannot run, none if it can.

    Each ends with its kind: impossible, this planner's convention, or a rule of Megatron-LM that other software need
    not have. Memory is looked at if all else is well: what is counted and `reserve` have to be less than CUDA reports.
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
    if against := reasons_against(model, cluster, layout, batch):
        raise ValueError(f"{model.name} as {layout} cannot run: " + "; ".join(against))
    return StepModel(model, cluster, constants).step(layout, batch, fullest(model, layout, batch))


def mesh_groups(sizes: Mapping[str, int]) -> dict[str, list[tuple[int, ...]]]:
    """Return the ranks of every group of a mesh, by dimension; the last dimension is the fastest, as in torch's."""
    mesh = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    lines = {name: np.moveaxis(mesh, axis, -1).reshape(-1, sizes[name]) for axis, name in enumerate(sizes)}
    return {name: [tuple(group) for group in groups.tolist()] for name, groups in lines.items()}
