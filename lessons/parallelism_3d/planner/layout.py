"""Layouts of a training run, and which are legal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from course_utils import memory
from course_utils.transformer import RECOMPUTE_KINDS, TransformerConfig

from .clusters import GpuCluster


@dataclass(frozen=True)
class Layout:
    """How a step is divided, and what the software does.

    - tp, pp, dp, cp: degrees of tensor, pipeline, data and context parallelism.
    - microbatch: sequences that go through the pipeline at a time.
    - virtual: model chunks on each pipeline rank; 1 is 1F1B, more is interleaved (`pipeline.interleaved`).
    - zero: ZeRO stage over the data and context ranks; 0 is DDP, 1 the distributed optimizer, 3 FSDP. With a pipeline
      the gradients of all micro-batches add up whole before they are reduced, and stage 3 gathers the weights once and
      keeps them, as FSDP2 does with `reshard_after_forward=False`: stages 2 and 3 then divide between steps only.
    - recompute: what backward computes a second time. "full": every layer from its input. "selective": attention's
      scores (Korthikanti et al. 2022, arXiv 2205.05198); with fused attention, which keeps no scores, what is cheap:
      the outputs of norms and of the MLP's activation, as kernels do that fuse them with the next product. "half":
      torchtitan's per-op policy, which keeps attention and every other matrix product. Or "none".
    - sequence_parallel: whether norms and dropout are divided along the sequence among the tensor ranks (the same).
    - overlap: whether pipeline messages, gathers and the reduction of gradients run while the GPU computes.
    - precision: name of `memory.PRECISIONS`; its gradient width is also what data parallelism sends.
    - replicas: HSDP. The states are divided among ``dp * cp / replicas`` ranks, close to each other, and so many groups
      of them reduce gradients among each other once a step. 1: among all.
    - ep: ranks among which experts are divided, out of the data ranks.
    - loss_pieces: pieces in which the loss takes the tokens of a micro-batch; logits exist of one at a time.
    - compiled: whether element-wise operations are fused, as `torch.compile` or hand-written kernels do.
    - attention: kernel of fused attention, "flash1", "flash2" or "flash3".
    - products: format of the layers' matrix products, "bf16" or "fp8"; those of the head stay in bf16.
    - tp_overlap: whether tensor-parallel messages run in pieces beside the products they belong to.
    - foreach: whether the optimizer holds a temporary of the size of its fp32 weights, as PyTorch's default on GPUs
      does; a fused one does not.
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
    replicas: int = 1
    ep: int = 1
    loss_pieces: int = 1
    compiled: bool = True
    attention: str = "flash2"
    products: str = "bf16"
    tp_overlap: bool = False
    foreach: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """(tp, cp, pp, dp), the order in which ranks are numbered."""
        return self.tp, self.cp, self.pp, self.dp

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO divides states."""
        return self.dp * self.cp // self.replicas

    @property
    def passes(self) -> tuple[int, int, int]:
        """A layer's all-reduces of activations, gathers of keys and values, and exchanges between experts."""
        return (6, 4, 6) if self.recompute == "full" else (4, 3, 4)

    def microbatches(self, batch: int) -> int:
        """Micro-batches of each pipeline in a step of `batch` sequences."""
        return batch // (self.dp * self.microbatch)

    def __str__(self) -> str:
        parts = [f"TP {self.tp}", f"PP {self.pp}", f"DP {self.dp}"] + ([f"CP {self.cp}"] if self.cp > 1 else [])
        parts += [f"EP {self.ep}"] * (self.ep > 1)
        return " x ".join(parts) + (f", {self.replicas} replicas" if self.replicas > 1 else "")


@cache
def chunks(model: TransformerConfig, parts: int) -> tuple[int, bool] | None:
    """Layers in one of `parts`, and whether embedding and head count as a layer each; None if they do not divide."""
    if model.layers % parts == 0:
        return model.layers // parts, False
    if (model.layers + 2) % parts == 0:
        return (model.layers + 2) // parts, True
    return None


_ALLOWED = {
    "zero": (0, 1, 2, 3), "recompute": RECOMPUTE_KINDS, "precision": tuple(memory.PRECISIONS),
    "attention": ("flash1", "flash2", "flash3"), "products": ("bf16", "fp8"),
}


def broken_rules(
    model: TransformerConfig, cluster: GpuCluster, layout: Layout, batch: int
) -> Iterator[tuple[str, str]]:
    """Yield kind and text of each rule that a layout breaks, memory aside."""
    tp, cp, pp, dp = layout.degrees
    counts = (tp, cp, pp, dp, layout.microbatch, layout.virtual, batch, layout.replicas, layout.ep, layout.loss_pieces)
    if set(map(type, counts)) != {int} or min(counts) < 1:
        yield "value", "degrees, micro-batch, virtual stages and batch must be integers of at least 1"
        return
    for name, allowed in _ALLOWED.items():
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
    if cp > 1 and model.context % (2 * cp):
        yield "context", f"sequences of {model.context} do not divide into 2 x CP {cp} pieces"
    if layout.sequence_parallel and tp > 1 and model.context % (tp * cp):
        yield "context", f"sequences of {model.context} do not divide among TP {tp} x CP {cp}"
    if pp == 1 and layout.virtual > 1:
        yield "interleaving", f"{layout.virtual} chunks on a rank need a pipeline, PP is 1"
    elif chunks(model, pp * layout.virtual) is None:
        parts = f"PP {pp} x {layout.virtual} chunks" if layout.virtual > 1 else f"PP {pp}"
        also = f"nor do {model.layers + 2}, with embedding and head as a layer each"
        yield "layers", f"{model.layers} layers do not divide among {parts}, {also}"
    if dp % layout.replicas:
        yield "replicas", f"DP {dp} does not divide into {layout.replicas} replicas"
    elif layout.replicas > 1 and not layout.zero:
        yield "replicas", f"{layout.replicas} replicas need states that are divided, ZeRO is 0"
    if layout.ep > 1 and (not model.experts or model.experts % layout.ep):
        yield "experts", f"{model.experts} experts do not divide among EP {layout.ep}"
    elif dp % (layout.ep * layout.replicas):
        yield "experts", f"DP {dp} with {layout.replicas} replicas does not divide into EP {layout.ep}"
    if batch % (dp * layout.microbatch):
        yield "batch", f"{batch} sequences do not divide into DP {dp} x micro-batches of {layout.microbatch}"
    elif layout.virtual > 1 and layout.microbatches(batch) % pp:
        count = layout.microbatches(batch)
        rule = "interleaving as in Megatron-LM's schedule, which is planned here,"
        yield "interleaving", f"{rule} needs a multiple of PP {pp} micro-batches, got {count}"
