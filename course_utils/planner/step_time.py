"""The seconds of a training step by part, for one layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from .. import costs, memory
from ..recorded import ACHIEVABLE_MATMUL, FUSED_ATTENTION
from ..transformer import Model
from .layout import Cluster, Layout, chunks, rank_parameters

#: Where the seconds of a step go, in the order of tables and figures.
PARTS = ("compute", "tensor", "context", "pipeline", "data", "bubble")


@dataclass(frozen=True)
class Constants:
    """What share of its hardware's figures a training step reaches.

    Attributes
    ----------
    matmul : float
        Of the best matrix product found on the GPU (`recorded.ACHIEVABLE_MATMUL`).
    hbm : float
        Of the memory bandwidth, in element-wise operations.
    nvlink : float
        Of the link in a node, in collectives of 64 to 256 MiB. 0.6 is measured: `recorded.A100_ALL_REDUCE` reaches 172,
        177 and 194 of 300 GB/s.
    network : float
        Of the network port, in large messages. 0.9 is measured: `recorded.FOUR_H200_NODES` reaches 364.7 of 400 GB/s a
        node with the ring.
    """

    matmul: float
    hbm: float
    nvlink: float = 0.6
    network: float = 0.9


@dataclass(frozen=True)
class Plan:
    """What a layout costs.

    Attributes
    ----------
    memory : memory.Memory
        Bytes on the fullest GPU.
    compute, tensor, context, pipeline, data, bubble : float
        Seconds of a step on the GPU with the most work. compute: matrix products, what passes through memory, the
        optimizer. tensor, context, pipeline, data: communication that computing does not hide. bubble: waiting for
        other pipeline stages.
    """

    model: Model
    cluster: Cluster
    layout: Layout
    batch: int
    memory: memory.Memory
    compute: float
    tensor: float
    context: float
    pipeline: float
    data: float
    bubble: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.compute + self.tensor + self.context + self.pipeline + self.data + self.bubble

    def parts(self) -> dict[str, float]:
        """Seconds by name, in the order of `PARTS`."""
        return {part: getattr(self, part) for part in PARTS}

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.model.length

    @property
    def tflops(self) -> float:
        """TFLOP/s of each GPU, with what is computed a second time, as Megatron-LM counts."""
        return self.model.flops(self.tokens, self.layout.recompute) / self.seconds / self.cluster.gpus / 1e12

    @property
    def model_tflops(self) -> float:
        """TFLOP/s of each GPU, every operation counted once, as Llama 3 counts."""
        return self.model.flops(self.tokens) / self.seconds / self.cluster.gpus / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: `model_tflops` as a share of the peak (Chowdhery et al. 2022, arXiv 2204.02311)."""
        return self.model_tflops * 1e12 / self.cluster.card.flops["bf16"]

    def __str__(self) -> str:
        held, rate = f"{self.memory.total / 1e9:.1f} GB", f"{self.model_tflops:.0f} model TFLOP/s a GPU"
        return f"{self.model.name} as {self.layout}: {self.seconds:.3g} s a step, {rate}, {held}"

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: `tflops` as a share of the peak."""
        return self.tflops * 1e12 / self.cluster.card.flops["bf16"]


@cache
def _links(cluster: Cluster, constants: Constants) -> tuple[tuple[float, float], tuple[float, float]]:
    """Latency and seconds per byte in a node and between nodes, at the speed that collectives reach."""
    (near, fast), (far, slow) = cluster.intra, cluster.inter
    return (near, fast / constants.nvlink), (far, slow / constants.network)


@cache
def _all_reduce(cluster: Cluster, constants: Constants, ranks: int, mates: int, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes by `ranks` ranks, of which `mates` share a node.

    Ring in the node, rings between nodes over the port of each rank (`costs.all_reduce_seconds`, hierarchical). A
    reduce-scatter or an all-gather takes half.
    """
    intra, inter = _links(cluster, constants)
    if cluster.gpus <= cluster.per_node:
        mates = ranks
    nodes = ranks // mates if ranks % mates == 0 else ranks  # where a group does not fill nodes evenly: the network
    group = costs.Cluster(nodes, ranks // nodes, intra, inter)
    return costs.all_reduce_seconds("hierarchical", size, group)


def _mates(cluster: Cluster, layout: Layout, dimension: str) -> int:
    """How many ranks of a group share a node, by the order of `Layout.degrees`; of the group that is spread most."""
    tp, cp, pp, dp = layout.degrees
    node, block = cluster.per_node, tp * cp * pp
    if dimension == "tensor":
        return math.gcd(tp, node)
    near = math.gcd(cp, node // tp) if node % tp == 0 else 1
    if dimension == "data" and node % block == 0:  # the whole pipeline fits, several times
        return cp * math.gcd(dp, node // block)
    return near


#: All-reduces of the tensor ranks, and all-gathers or reduce-scatters of the context ranks, for a layer and a
#: micro-batch: without and with a second forward.
_COLLECTIVES = ((4, 3), (6, 4))


@cache
def _layer(
    model: Model, cluster: Cluster, constants: Constants, tp: int, cp: int, microbatch: int, recompute: str, sp: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of a micro-batch in a layer, and in the head with the loss: compute, tensor, context.

    Tensor: 8 bsh (t-1)/t elements a layer (Narayanan et al. 2021, section 3.2), in four all-reduces or as many pairs of
    all-gather and reduce-scatter; two more where forward runs again. Context: keys and values are gathered in forward
    and again in backward, and their gradients reduced; nothing hides either (Llama 3 does so for context).
    """
    tokens, card = microbatch * model.length / cp, cluster.card
    peak, stream = ACHIEVABLE_MATMUL[cluster.gpu] * constants.matmul, card.memory_bandwidth * constants.hbm
    kernel = card.flops["bf16"] * FUSED_ATTENTION[cluster.gpu] if model.fused else peak
    products = (2 * model.layer_weights / peak + model.attention_flops() / kernel) * tokens / tp
    forward, backward = (size / stream for size in model.traffic(tokens, tp, sp))
    compute = 3 * products + forward + backward
    if recompute == "full":
        compute += products + forward
    elif recompute == "selective":
        compute += model.selective_flops() * tokens / tp / kernel + model.selective_traffic(tokens, tp, sp) / stream
    reductions, gathers = _COLLECTIVES[recompute == "full"]
    layout = Layout(tp=tp, cp=cp)
    hidden = 2 * tokens * model.hidden
    reduced = _all_reduce(cluster, constants, tp, _mates(cluster, layout, "tensor"), hidden)
    keys = 4 * tokens * cp * model.kv_width / tp
    gathered = _all_reduce(cluster, constants, cp, _mates(cluster, layout, "context"), keys) / 2
    head = 6 * model.hidden * model.vocabulary * tokens / tp / peak + model.loss_traffic(tokens, tp) / stream
    return (compute, reductions * reduced, gathers * gathered), (head, reduced, 0.0)


def _data(
    model: Model, cluster: Cluster, constants: Constants, layout: Layout, parameters: float, count: int, busy: float
) -> float:
    """Seconds of data parallelism that `busy` seconds of computing in each of `count` micro-batches do not hide.

    Stages 0 and 1 reduce once, behind the last micro-batch. Without a pipeline stages 2 and 3 reduce after each
    micro-batch, and stage 3 gathers the parameters, layer by layer, before each forward and backward. With one they
    reduce and gather once, like stage 1: DeepSpeed refuses them (issue 4164, https://github.com/deepspeedai/DeepSpeed),
    and PyTorch's schedules add gradients up until the last micro-batch.
    """
    ranks = layout.dp * layout.cp
    if ranks == 1:
        return 0.0
    width, mates = memory.PRECISIONS[layout.precision], _mates(cluster, layout, "data")
    pieces = model.layers / layout.pp if layout.zero == 3 else 1

    def half(size: float) -> float:
        return pieces * _all_reduce(cluster, constants, ranks, mates, size / pieces) / 2

    scatter, gather = half(parameters * width.gradient), half(parameters * width.activation)
    scatters, gathers = _exchanges(layout, count)
    total = scatters * scatter + gathers * gather
    hides = busy if layout.zero < 2 or layout.pp > 1 else count * busy
    return max(0.0, total - hides) if layout.overlap else total


def _exchanges(layout: Layout, count: int) -> tuple[int, int]:
    """How often a step moves all gradients as a reduce-scatter does, and all parameters as an all-gather does."""
    rounds = count if layout.pp == 1 else 0
    return ((2, 0), (1, 1), (rounds or 1, 1), (rounds or 1, 2 * rounds or 1))[layout.zero]


def traffic(model: Model, layout: Layout, batch: int) -> dict[str, float]:
    """Return the bytes that a GPU in the middle of the pipeline sends in a step: by ``tp``, ``cp``, ``pp``, ``dp``.

    The counts are those of the planner's times; a dimension of one rank sends nothing.
    """
    tp, cp, pp, dp = layout.degrees
    count, width = layout.microbatches(batch), memory.PRECISIONS[layout.precision]
    tokens, layers = layout.microbatch * model.length / cp, model.layers / pp
    hidden, keys = 2 * tokens * model.hidden, 4 * tokens * cp * model.kv_width / tp
    reductions, gathers = _COLLECTIVES[layout.recompute == "full"]
    parameters = layers * model.layer_parameters / tp
    scatters, gathered = _exchanges(layout, count)
    moved = parameters * (scatters * width.gradient + gathered * width.activation)
    return {
        "tp": count * layers * reductions * costs.bytes_sent("all_reduce", tp, hidden),
        "cp": count * layers * gathers * costs.bytes_sent("all_gather", cp, keys),
        "pp": 2 * count * layout.virtual * hidden / tp if pp > 1 else 0.0,
        "dp": costs.bytes_sent("all_gather", dp * cp, moved) if dp * cp > 1 else 0.0,
    }


def step(
    model: Model, cluster: Cluster, layout: Layout, batch: int, constants: Constants, held: Sequence[float]
) -> Plan:
    """Return the plan of a legal layout whose fullest GPU holds the bytes `held`."""
    count = layout.microbatches(batch)
    key = (layout.tp, layout.cp, layout.microbatch, layout.recompute, layout.sequence_parallel)
    (compute, tensor, context), bubble, edge = _work(model, cluster, constants, key, layout.pp, layout.virtual)
    busy = compute + tensor + context
    parameters = rank_parameters(model, layout, edge, True, layout.pp == 1)
    stepped = parameters / (layout.dp * layout.cp if layout.zero else 1)
    optimizer = stepped * _touched(layout.precision) / (cluster.card.memory_bandwidth * constants.hbm)
    return Plan(
        model, cluster, layout, batch, memory.Memory(*held),
        compute=count * compute + optimizer, tensor=count * tensor, context=count * context,
        pipeline=_pipeline(model, cluster, constants, layout, count, busy / layout.virtual),
        data=_data(model, cluster, constants, layout, parameters, count, busy), bubble=bubble,
    )


@cache
def _work(
    model: Model, cluster: Cluster, constants: Constants, key: tuple, pp: int, virtual: int
) -> tuple[tuple[float, float, float], float, int]:
    """Seconds of a micro-batch by part on the rank with the most work, of the bubble, and layers of the first rank.

    The rank with the most work computes without a break from its first micro-batch on; the pipeline adds one forward
    and backward of all other ranks, divided by the chunks of a rank (Narayanan et al. 2021, section 2.2).
    """
    layer, head = _layer(model, cluster, constants, *key)
    size, counted = chunks(model, pp * virtual)
    most = size * virtual
    edge = most - counted  # layers of the first and last rank
    each, loss = sum(layer), sum(head)
    last = pp <= 2 or edge * each + loss > most * each  # is the last rank the one with the most work?
    parts = tuple((edge if last else most) * a + last * b for a, b in zip(layer, head, strict=True))
    others = (pp * most - 2 * counted) * each + loss - sum(parts) if pp > 1 else 0.0
    return parts, others / virtual, edge


@cache
def _touched(precision: str) -> int:
    """Bytes that Adam reads and writes for each parameter: gradient, weight, and twice master weight and moments."""
    width = memory.PRECISIONS[precision]
    return width.gradient + 2 * (width.master + 2 * width.state) + width.parameter


def _pipeline(model: Model, cluster: Cluster, constants: Constants, layout: Layout, count: int, busy: float) -> float:
    """Seconds of messages between pipeline ranks, a chunk being `busy` for so long with a micro-batch.

    Each of the tensor ranks sends its part, bsh/t elements; without sequence parallelism the parts are gathered on the
    other side (Narayanan et al. 2021, section 4.1). Filling and draining the pipeline nothing hides the messages.
    """
    if layout.pp == 1:
        return 0.0
    near, far = _links(cluster, constants)
    inside = layout.tp * layout.cp * layout.pp <= cluster.per_node
    latency, each = near if inside else far
    size = 2 * layout.microbatch * model.length / layout.cp * model.hidden
    message = latency + each * size / layout.tp
    if not layout.sequence_parallel:
        message += _all_reduce(cluster, constants, layout.tp, _mates(cluster, layout, "tensor"), size) / 2
    exposed = max(0.0, 2 * message - busy) if layout.overlap else 2 * message
    return 2 * message * (layout.pp - 1) + exposed * count * layout.virtual
