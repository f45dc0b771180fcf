"""A layout's messages: seconds of collectives by the links of each group, what they add to computing, bytes sent."""

from __future__ import annotations

import math

from course_utils import costs, memory
from course_utils.transformer import TransformerConfig

from .clusters import GpuCluster
from .held import rank_parameters
from .layout import Layout, kv_on_rank
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

    As many rings as a node's ranks have ports: a rank passes (n - 1)/n of the bytes over its link, a node (N - 1)/N
    over its ports, and the slower counts; each hop adds a latency, as in NCCL's own model (src/graph/tuning.cc).
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
    near = cluster.intra[0] and max(cluster.intra[0], HOP[cluster.card.architecture])
    return max(inside, across) + (ranks - nodes) * near + (nodes - 1) * cluster.inter[0]


def all_to_all(cluster: GpuCluster, constants: StepTimeConstants, ranks: int, mates: int, size: float) -> float:
    """Seconds in which each of `ranks` ranks sends `size` bytes, in equal parts to all; `mates` share a node."""
    near, far, (fast, slow) = cluster.intra[0], cluster.inter[0], per_byte(cluster, constants)
    if ranks <= mates:
        return near + size * (ranks - 1) / ranks * fast
    return max(near + size * (mates - 1) / ranks * fast, far + size * (ranks - mates) / ranks * slow)


def mates(cluster: GpuCluster, layout: Layout, dimension: str) -> int:
    """Ranks that share a node in the most spread group of "tp", "cp", "pp", "dp" or "data": context and data ranks."""
    if dimension == "data":
        near, far = sorted(("cp", "dp"), key=layout.order.index)
        inside = mates(cluster, layout, near)
        return inside * (mates(cluster, layout, far) if inside == getattr(layout, near) else 1)
    stride, node = layout.stride(dimension), cluster.per_node
    return math.gcd(getattr(layout, dimension), node // stride) if node % stride == 0 else 1


def expert_mates(cluster: GpuCluster, layout: Layout) -> int:
    """How many ranks of a group that exchanges tokens between experts share a node: those next to each other."""
    names = layout.order.split("-")
    apart = "dp" if names.index("pp") < names.index("dp") else "cp" if layout.of_expert == layout.tp else "tp"
    return max(1, min(layout.ep, cluster.per_node // layout.stride(apart)))


def gathered_width(layout: Layout) -> float:
    """Bytes of a parameter in a gather: FSDP's of weights for products in fp8 are converted before."""
    return 1.0 if layout.products == "fp8" and layout.zero == 3 else memory.PRECISIONS[layout.precision].activation


def traffic(model: TransformerConfig, layout: Layout, batch: int) -> dict[str, float]:
    """Return the bytes that a GPU in the middle of the pipeline sends in a step, by dimension: ``tp``, ``cp``, ``pp``,
    ``dp`` (with what goes among replicas), and ``ep`` where experts are divided."""
    tp, cp, pp, dp = layout.degrees
    count, width = layout.microbatches(batch), memory.PRECISIONS[layout.precision]
    tokens, layers = layout.microbatch * model.context / cp, model.layers / pp
    hidden, keys = 2 * tokens * model.hidden, 4 * tokens * cp * kv_on_rank(model, tp)
    reductions, gathers, exchanges = layout.passes
    dense, experts = rank_parameters(model, layout, layers, False, False)
    rounds = count if pp == 1 else 0  # gradients are moved as by a reduce-scatter, parameters as by an all-gather
    again = count + 1 if layout.reshard else 1
    reduced = 1 if layout.no_sync else rounds or 1
    scatters, gathered = ((2, 0), (1, 1), (reduced, 1), (reduced, 2 * rounds or again))[layout.zero]
    each = scatters * width.gradient + gathered * gathered_width(layout)
    sent = {
        "tp": count * layers * reductions * costs.bytes_sent("all_reduce", tp, hidden),
        "cp": count * layers * gathers * costs.bytes_sent("all_gather", cp, keys),
        "pp": 2 * count * layout.virtual * hidden / tp if pp > 1 else 0.0,
        "dp": sum(
            costs.bytes_sent("all_gather", ranks, part * each)
            for part, ranks in ((dense, layout.shards), (experts, layout.expert_shards))
            if ranks > 1
        ),
    }
    if layout.replicas > 1:
        shard = dense / layout.shards + experts / layout.expert_shards
        sent["dp"] += costs.bytes_sent("all_reduce", layout.replicas, shard * width.gradient)
    if layout.ep > 1:
        size = hidden / tp * model.experts_per_token
        sent["ep"] = count * layers * exchanges * costs.bytes_sent("all_to_all", layout.ep, size)
    return sent
