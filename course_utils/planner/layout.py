"""Clusters and layouts of a training run: which are legal, and what the fullest GPU holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from .. import costs, memory, topology
from ..hardware import GPU, GPUS
from ..transformer import RECOMPUTE, Model


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of GPUs.

    Attributes
    ----------
    name : str
    gpu : str
        A key of `hardware.GPUS`.
    gpus, per_node : int
        GPUs in all, and in each node.
    intra, inter : (float, float)
        Latency in seconds and seconds per byte between two GPUs of a node, and of different nodes, at the speed that
        data sheets print.
    """

    name: str
    gpu: str
    gpus: int
    per_node: int
    intra: tuple[float, float]
    inter: tuple[float, float]

    @property
    def card(self) -> GPU:
        """What the data sheet says about the GPU."""
        return GPUS[self.gpu]


#: Name -> the reference machine of `topology` and the GPU of `hardware`.
CLUSTERS: Mapping[str, tuple[str, str]] = {
    "DGX A100": ("dgx a100", "a100"), "DGX H100": ("dgx h100", "h100"), "DGX H200": ("dgx h200", "h200"),
}


@cache
def cluster(name: str, gpus: int) -> Cluster:
    """Return `gpus` GPUs in nodes of the kind `name`, one of `CLUSTERS`; links as `topology` joins two such nodes."""
    if name not in CLUSTERS:
        raise ValueError(f"unknown cluster {name!r}; choose one of {', '.join(CLUSTERS)}")
    machine, gpu = CLUSTERS[name]
    pair = costs.cluster_of(topology.cluster(machine, 2))
    node = pair.per_node
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1 or (gpus > node and gpus % node):
        raise ValueError(f"{name} has {node} GPUs a node: gpus must be fewer or fill whole nodes, got {gpus!r}")
    return Cluster(name, gpu, gpus, node, pair.intra, pair.inter)


@dataclass(frozen=True)
class Layout:
    """How a step is divided.

    Attributes
    ----------
    tp, pp, dp, cp : int
        Degrees of tensor, pipeline, data and context parallelism.
    microbatch : int
        Sequences that go through the pipeline at a time.
    virtual : int
        Model chunks on each pipeline rank: 1 is 1F1B, more is interleaved (`pipeline.interleaved`).
    zero : {0, 1, 2, 3}
        ZeRO stage over the data and context ranks: 0 is DDP, 1 the distributed optimizer, 3 FSDP. With a pipeline the
        gradients of all micro-batches add up whole before they are reduced, and stage 3 gathers the weights once and
        keeps them, as FSDP2 does with `reshard_after_forward=False`: stages 2 and 3 then divide between steps only.
    recompute : {"full", "selective", "none"}
        What backward computes a second time. Full: every layer from its input. Selective: attention's scores
        (Korthikanti et al. 2022, arXiv 2205.05198); with fused attention, which keeps no scores, what is cheap: the
        outputs of norms and of the MLP's activation, as kernels do that fuse them with the next product.
    sequence_parallel : bool
        Whether norms and dropout are divided along the sequence among the tensor ranks (Korthikanti et al. 2022).
    overlap : bool
        Whether pipeline messages and the reduction of gradients run while the GPU computes.
    precision : str
        Name of `memory.PRECISIONS`; its gradient width is also what data parallelism sends.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    microbatch: int = 1
    virtual: int = 1
    zero: int = 1
    recompute: str = "full"
    sequence_parallel: bool = True
    overlap: bool = True
    precision: str = "mixed"

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """(tp, cp, pp, dp), the order in which ranks are numbered."""
        return self.tp, self.cp, self.pp, self.dp

    def microbatches(self, batch: int) -> int:
        """Micro-batches of each pipeline in a step of `batch` sequences."""
        return batch // (self.dp * self.microbatch)

    def __str__(self) -> str:
        parts = [f"TP {self.tp}", f"PP {self.pp}", f"DP {self.dp}"] + ([f"CP {self.cp}"] if self.cp > 1 else [])
        return " x ".join(parts)


@cache
def chunks(model: Model, parts: int) -> tuple[int, bool] | None:
    """Layers in one of `parts`, and whether embedding and head count as a layer each; None if they do not divide."""
    if model.layers % parts == 0:
        return model.layers // parts, False
    if (model.layers + 2) % parts == 0:
        return (model.layers + 2) // parts, True
    return None


def reasons(model: Model, cluster: Cluster, layout: Layout, batch: int) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of what speaks against a layout, memory aside."""
    tp, cp, pp, dp = layout.degrees
    counts = (tp, cp, pp, dp, layout.microbatch, layout.virtual, batch)
    if set(map(type, counts)) != {int} or min(counts) < 1:
        yield "value", "degrees, micro-batch, virtual stages and batch must be integers of at least 1"
        return
    for name, allowed in (("zero", (0, 1, 2, 3)), ("recompute", RECOMPUTE), ("precision", tuple(memory.PRECISIONS))):
        if getattr(layout, name) not in allowed:
            yield "value", f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(layout, name)!r}"
            return
    if layout.gpus != cluster.gpus:
        product = f"TP {tp} x CP {cp} x PP {pp} x DP {dp}"
        yield "gpus", f"{product} makes {layout.gpus} GPUs, the cluster has {cluster.gpus}"
    if model.heads % tp:
        yield "heads", f"{model.heads} attention heads do not divide among TP {tp}"
    elif model.kv_heads % tp:
        yield "heads", f"{model.kv_heads} key-value heads do not divide among TP {tp}"
    elif model.ffn % tp:
        yield "heads", f"the MLP's width {model.ffn} does not divide among TP {tp}"
    if cp > 1 and model.length % (2 * cp):
        yield "context", f"sequences of {model.length} do not divide into 2 x CP {cp} pieces"
    if layout.sequence_parallel and tp > 1 and model.length % (tp * cp):
        yield "context", f"sequences of {model.length} do not divide among TP {tp} x CP {cp}"
    if pp == 1 and layout.virtual > 1:
        yield "interleaving", f"{layout.virtual} chunks on a rank need a pipeline, PP is 1"
    elif chunks(model, pp * layout.virtual) is None:
        parts = f"PP {pp} x {layout.virtual} chunks" if layout.virtual > 1 else f"PP {pp}"
        also = f"nor do {model.layers + 2}, with embedding and head as a layer each"
        yield "layers", f"{model.layers} layers do not divide among {parts}, {also}"
    if batch % (dp * layout.microbatch):
        yield "batch", f"{batch} sequences do not divide into DP {dp} x micro-batches of {layout.microbatch}"
    elif layout.virtual > 1 and layout.microbatches(batch) % pp:
        count = layout.microbatches(batch)
        rule = "interleaving as in Megatron-LM's schedule, which is planned here,"
        yield "interleaving", f"{rule} needs a multiple of PP {pp} micro-batches, got {count}"


@cache
def _stage(model: Model, pp: int, v: int, rank: int, microbatches: int) -> tuple[int, int]:
    """Layers of a pipeline rank, and layers whose activations it holds when it holds the most.

    Before its first backward, 1F1B runs ``pp - rank`` micro-batches forward; `pipeline.interleaved` runs
    ``2 (pp - rank - 1) + (v - 1) pp + 1`` chunks, `pp` micro-batches of each chunk in turn.
    """
    size, counted = chunks(model, pp * v)
    first, last = rank == 0, rank == pp - 1
    if v == 1:
        layers = size - counted * (first + last) if pp > 1 else model.layers
        return layers, layers * min(microbatches, pp - rank)
    ahead = min(microbatches * v, 2 * (pp - rank - 1) + (v - 1) * pp + 1)
    layers, held = size * v, ahead * size
    rounds, rest = divmod(ahead, pp * v)
    if counted and first:  # the first chunk has the embedding in place of a layer
        layers, held = layers - 1, held - rounds * pp - min(pp, rest)
    if counted and last:  # and the last one the head
        layers, held = layers - 1, held - rounds * pp - max(0, rest - (v - 1) * pp)
    return layers, held


def fullest(model: Model, layout: Layout, batch: int) -> tuple[float, ...]:
    """Return the bytes of the fullest GPU, in the order of `memory.PARTS`.

    It is on the first pipeline rank, which holds the most activations; on the second, where the first has a layer less;
    or on the last, which has the head.
    """
    microbatches, last = layout.microbatches(batch), layout.pp - 1
    ranks = {0, last} | ({1} if last > 1 and chunks(model, layout.pp * layout.virtual)[1] else set())
    return max((_rank_bytes(model, layout, rank, microbatches) for rank in ranks), key=sum)


def rank_parameters(model: Model, layout: Layout, layers: int, first: bool, last: bool) -> float:
    """Parameters of a pipeline rank; a tied embedding has a copy on the first and on the last."""
    around = model.embedding_parameters if first else 0
    if last and not (first and model.tied):
        around += model.vocabulary * model.hidden
    return (layers * model.layer_parameters + around) / layout.tp


@cache
def _states(zero: int, ranks: int, precision: str) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer for each parameter of a rank."""
    each = memory.model_states(1.0, stage=zero, ranks=ranks, precision=precision)
    return each.parameters, each.gradients, each.optimizer


@cache
def _activations(model: Model, tokens: float, tp: int, recompute: str, sequence_parallel: bool) -> tuple[float, ...]:
    """Bytes of a layer's activations as kept and as needed in its backward, of the loss, and of gradients of them."""
    kept = model.kept(tokens, recompute, tp, sequence_parallel)
    whole = model.kept(tokens, "none", tp, sequence_parallel)
    return kept, whole, model.kept_around(tokens, tp, sequence_parallel), model.working(tokens, tp)


def _rank_bytes(model: Model, layout: Layout, rank: int, microbatches: int) -> tuple[float, ...]:
    """Bytes of a pipeline rank, in the order of `memory.PARTS`."""
    tp, cp, zero, last = layout.tp, layout.cp, layout.zero, rank == layout.pp - 1
    layers, held = _stage(model, layout.pp, layout.virtual, rank, microbatches)
    parameters = rank_parameters(model, layout, layers, rank == 0, last)
    tokens = layout.microbatch * model.length / cp
    kept, whole, around, buffers = _activations(model, tokens, tp, layout.recompute, layout.sequence_parallel)
    activations = held * kept + (whole - kept) + (around if last else 0)
    width, unit = memory.PRECISIONS[layout.precision], model.layer_parameters / tp
    root = parameters - layers * unit  # what is around the layers
    if cp > 1:  # keys and values of the whole sequence
        buffers += 4 * tokens * cp * model.kv_width / tp
    piped = layout.pp > 1  # then gradients add up whole, and gathered weights stay
    if zero >= 2:  # gradients before they are reduced
        buffers += (parameters if piped else max(unit, root)) * width.gradient
    if zero == 3:  # gathered: a layer and the next one ahead
        buffers += (parameters if piped else 2 * unit + root) * width.activation
    weight, gradient, optimizer = _states(zero, layout.dp * cp, layout.precision)
    return parameters * weight, parameters * gradient, parameters * optimizer, activations, buffers
