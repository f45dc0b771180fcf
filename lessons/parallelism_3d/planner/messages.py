"""A layout's messages: seconds of collectives by the links of each group, what they add to computing, bytes sent."""

from __future__ import annotations

import math

from course_utils import costs, memory
from course_utils.transformer import TransformerConfig

from .clusters import GpuCluster
from .layout import Layout
from .rates import HOP, StepTimeConstants


def exposed(messages: float, work: float, contention: float) -> float:
    """Seconds that `messages` add to `work`, which goes on beside them `1 + contention` times as slowly."""
    return max(messages - work, messages * contention / (1 + contention))


def per_byte(cluster: GpuCluster, constants: StepTimeConstants) -> tuple[float, float]:
    """Seconds per byte that large messages take, in a node and between nodes: measured, or a share of the link."""
    (_, fast), (_, slow), (near, far) = cluster.intra, cluster.inter, cluster.reached
    return 1 / near if near else fast / constants.nvlink, 1 / far if far else slow / constants.network


def half_all_reduce(cluster: GpuCluster, constants: StepTimeConstants, ranks: int, mates: int, size: float) -> float:
    """Seconds of an all-gather or a reduce-scatter of `size` bytes by `ranks` ranks, of which `mates` share a node.

    Rings through all ranks, as many as a node's ranks have ports, as NCCL builds them: each rank passes (n - 1)/n of
    the bytes over its link, each node (N - 1)/N over the ports of its ranks, and the slower of the two counts. The
    first byte takes a latency for each hop, as in NCCL's own model (src/graph/tuning.cc).
    """
    if ranks <= 1:
        return 0.0
    if cluster.gpus <= cluster.per_node:
        mates = ranks
    nodes = ranks // mates if ranks % mates == 0 else ranks  # where a group does not fill nodes evenly: the network
    mates = ranks // nodes
    fast, slow = per_byte(cluster, constants)
    inside = size * (ranks - 1) / ranks * fast if mates > 1 else 0.0
    across = size * (nodes - 1) / nodes / mates * slow
    near, far = cluster.intra[0], cluster.inter[0]
    near = near and max(near, HOP.get(cluster.card.architecture, near))
    return max(inside, across) + (ranks - nodes) * near + (nodes - 1) * far


def all_to_all(cluster: GpuCluster, constants: StepTimeConstants, ranks: int, mates: int, size: float) -> float:
    """Seconds in which each of `ranks` ranks sends `size` bytes, in equal parts to all; `mates` share a node."""
    near, far, (fast, slow) = cluster.intra[0], cluster.inter[0], per_byte(cluster, constants)
    if ranks <= mates:
        return near + size * (ranks - 1) / ranks * fast
    return max(near + size * (mates - 1) / ranks * fast, far + size * (ranks - mates) / ranks * slow)


def mates(cluster: GpuCluster, layout: Layout, dimension: str) -> int:
    """How many ranks of a group share a node, by the order of `Layout.degrees`; of the group that is spread most."""
    tp, cp, pp, dp = layout.degrees
    node, block = cluster.per_node, tp * cp * pp
    if dimension == "tensor":
        return math.gcd(tp, node)
    near = math.gcd(cp, node // tp) if node % tp == 0 else 1
    if dimension == "data" and node % block == 0:  # the whole pipeline fits, several times
        return cp * math.gcd(dp, node // block)
    return near


def traffic(model: TransformerConfig, layout: Layout, batch: int) -> dict[str, float]:
    """Return the bytes that a GPU in the middle of the pipeline sends in a step, by dimension: ``tp``, ``cp``, ``pp``,
    ``dp`` (with what goes among replicas), and ``ep`` where experts are divided."""
    tp, cp, pp, dp = layout.degrees
    count, width = layout.microbatches(batch), memory.PRECISIONS[layout.precision]
    tokens, layers = layout.microbatch * model.context / cp, model.layers / pp
    hidden, keys = 2 * tokens * model.hidden, 4 * tokens * cp * model.kv_width / tp
    reductions, gathers, exchanges = layout.passes
    parameters = layers * (model.layer_parameters - model.expert_parameters * (1 - 1 / layout.ep)) / tp
    rounds = count if pp == 1 else 0  # gradients are moved as by a reduce-scatter, parameters as by an all-gather
    scatters, gathered = ((2, 0), (1, 1), (rounds or 1, 1), (rounds or 1, 2 * rounds or 1))[layout.zero]
    moved = parameters * (scatters * width.gradient + gathered * width.activation)
    sent = {
        "tp": count * layers * reductions * costs.bytes_sent("all_reduce", tp, hidden),
        "cp": count * layers * gathers * costs.bytes_sent("all_gather", cp, keys),
        "pp": 2 * count * layout.virtual * hidden / tp if pp > 1 else 0.0,
        "dp": costs.bytes_sent("all_gather", layout.shards, moved) if dp * cp > 1 else 0.0,
    }
    if layout.replicas > 1:
        sent["dp"] += costs.bytes_sent("all_reduce", layout.replicas, parameters * width.gradient / layout.shards)
    if layout.ep > 1:
        size = hidden / tp * model.experts_per_token
        sent["ep"] = count * layers * exchanges * costs.bytes_sent("all_to_all", layout.ep, size)
    return sent
