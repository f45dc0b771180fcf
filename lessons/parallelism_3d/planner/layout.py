"""Layouts of a training run, and which are legal."""

from __future__ import annotations

import itertools
import math
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
      gradients add up whole before they are reduced, and stage 3 gathers the weights once and keeps them (unless
      `reshard`): stages 2 and 3 then divide between steps only.
    - recompute: what backward computes a second time. "full": every layer from its input. "selective": attention's
      scores (Korthikanti et al. 2022, arXiv 2205.05198); with fused attention, which keeps no scores, what is cheap:
      the outputs of norms and of the MLP's activation, as kernels do that fuse them with the next product. "half":
      torchtitan's per-op policy, which keeps attention and every other matrix product. Or "none".
    - recompute_share: share of the layers that it holds for; the others keep all.
    - offload: share of what layers keep that lies in the host's memory until backward, sent over PCIe.
    - sequence_parallel: whether norms and dropout are divided along the sequence among the tensor ranks.
    - overlap: whether pipeline messages, gathers and the reduction of gradients run while the GPU computes. With ZeRO-1
      they do not in simple code, nor in DeepSpeed and Megatron-LM unless these are told to.
    - precision: name of `memory.PRECISIONS`; its gradient width is also what data parallelism sends.
    - reshard: whether stage 3 frees weights after each forward with a pipeline too, FSDP2's default, and gathers them
      for each micro-batch; memory is the same, because a backward does not free.
    - replicas: HSDP. The states are divided among ``dp * cp / replicas`` ranks, close to each other, and so many groups
      of them reduce gradients among each other once a step. 1: among all.
    - ep: ranks among which experts are divided, out of the tensor, context and data ranks.
    - expert_tp: ranks among which each expert's matrices are divided besides; 0: as many as `tp`.
    - unequal_stages: whether stages may have unequal numbers of layers (`chunks`), or the layers of each chunk in turn.
    - copied_kv: whether tensor ranks beyond the key-value heads hold copies of them.
    - order: dimensions in which ranks are numbered, the closest first. Megatron-LM and torchtitan have the pipeline
      outermost, so that experts and gathers stay near, Llama 3 its data ranks (arXiv 2407.21783, section 3.3.2).
    - loss_pieces: pieces in which the loss takes the tokens of a micro-batch; logits exist of one at a time.
    - parallel_loss: whether logits stay divided among the tensor ranks. None: as in Megatron-LM and torchtitan if
      `compiled`; simple code gathers them whole.
    - compiled: whether element-wise operations are fused, as `torch.compile` or hand-written kernels do.
    - fused_norms: whether one kernel does a norm in code that is not compiled.
    - attention: kernel of fused attention, "flash1", "flash2" or "flash3".
    - products: format of the layers' matrix products, "bf16" or "fp8"; those of the head stay in bf16. Without FSDP the
      inputs of products are kept in fp8 too, as Transformer Engine does; torchao's keep them in bf16.
    - tp_overlap: whether tensor-parallel messages run in pieces beside the products they belong to.
    - foreach: whether the optimizer holds a temporary as large as its fp32 weights, as PyTorch's default on GPUs does.
    - no_sync: whether stages 2 and 3 add up gradients of micro-batches whole, in fp32, and reduce them once a step.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    microbatch: int = 1
    virtual: int = 1
    zero: int = 1
    recompute: str = "full"
    recompute_share: float = 1.0
    offload: float = 0.0
    sequence_parallel: bool = True
    overlap: bool = True
    precision: str = "mixed"
    reshard: bool = False
    replicas: int = 1
    ep: int = 1
    expert_tp: int = 0
    unequal_stages: bool | tuple[int, ...] = False
    copied_kv: bool = False
    order: str = "tp-cp-dp-pp"
    loss_pieces: int = 1
    parallel_loss: bool | None = None
    compiled: bool = True
    fused_norms: bool = False
    attention: str = "flash2"
    products: str = "bf16"
    tp_overlap: bool = False
    foreach: bool = False
    no_sync: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """(tp, cp, pp, dp)."""
        return self.tp, self.cp, self.pp, self.dp

    @property
    def of_expert(self) -> int:
        """Ranks among which each expert's matrices are divided."""
        return self.expert_tp or self.tp

    @property
    def expert_shards(self) -> int:
        """Ranks among which ZeRO divides the states of an expert."""
        return max(1, self.shards * self.tp // (self.ep * self.of_expert))

    def stride(self, dimension: str) -> int:
        """Distance between neighbours of a group of "tp", "cp", "pp" or "dp", in ranks."""
        before = self.order.partition(dimension)[0]
        return math.prod(getattr(self, name) for name in before.split("-") if name)

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO divides states."""
        return self.dp * self.cp // self.replicas

    @property
    def passes(self) -> tuple[float, float, float]:
        """A layer's all-reduces of activations, gathers of keys and values, and exchanges between experts."""
        again = self.recompute_share if self.recompute == "full" else 0
        return 4 + 2 * again, 3 + again, 4 + 2 * again

    def microbatches(self, batch: int) -> int:
        """Micro-batches of each pipeline in a step of `batch` sequences."""
        return batch // (self.dp * self.microbatch)

    def __str__(self) -> str:
        parts = [f"TP {self.tp}", f"PP {self.pp}", f"DP {self.dp}"] + ([f"CP {self.cp}"] if self.cp > 1 else [])
        parts += [f"EP {self.ep}"] * (self.ep > 1)
        return " x ".join(parts) + (f", {self.replicas} replicas" if self.replicas > 1 else "")


def kv_on_rank(model: TransformerConfig, tp: int) -> float:
    """Width of keys, and of values, on one of `tp` ranks, which hold copies where they are more than the heads."""
    return model.kv_width / min(tp, model.heads if model.latent else model.kv_heads)


@cache
def chunks(model: TransformerConfig, parts: int, unequal: bool | tuple[int, ...] = False) -> tuple[int, ...] | None:
    """Layers in each of `parts` chunks, in order; None if they do not divide, even with embedding and head as a layer
    each. If `unequal`, what is left goes to the first, as in torchtitan's `generate_llm_fqn_per_model_part`."""
    if isinstance(unequal, tuple):
        return unequal if len(unequal) == parts and sum(unequal) == model.layers else None
    if model.layers % parts == 0:
        return (model.layers // parts,) * parts
    size, rest = divmod(model.layers + 2, parts)
    if not size or rest and not unequal:
        return None
    sizes = [size + (index < rest) for index in range(parts)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return tuple(sizes)


_ALLOWED = {
    "zero": (0, 1, 2, 3), "recompute": RECOMPUTE_KINDS, "precision": tuple(memory.PRECISIONS),
    "attention": ("flash1", "flash2", "flash3"), "products": ("bf16", "fp8"),
    "order": tuple("-".join(names) for names in itertools.permutations(("tp", "cp", "dp", "pp"))),
}
#: What kind of reason a rule is, as its text says.
_IMPOSSIBLE, _OURS, _MEGATRON = " (impossible)", " (this planner's convention)", " (a rule of Megatron-LM)"
#: Tokens of a step beyond which a batch was not counted in sequences: 16 times Llama 3's largest.
_TOKENS = 2**28


def broken_rules(
    model: TransformerConfig, cluster: GpuCluster, layout: Layout, batch: int
) -> Iterator[tuple[str, str]]:
    """Yield kind and text of each rule that a layout breaks, memory aside; the text ends with whose rule it is."""
    tp, cp, pp, dp = layout.degrees
    counts = (tp, cp, pp, dp, layout.microbatch, layout.virtual, batch, layout.replicas, layout.ep, layout.loss_pieces)
    if set(map(type, counts)) != {int} or min(counts) < 1:
        yield "value", "degrees, micro-batch, virtual stages and batch must be integers of at least 1" + _IMPOSSIBLE
        return
    for name, allowed in _ALLOWED.items():
        if getattr(layout, name) not in allowed:
            text = f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(layout, name)!r}"
            yield "value", text + _OURS
            return
    if not 0 <= min(layout.recompute_share, layout.offload) <= max(layout.recompute_share, layout.offload) <= 1:
        yield "value", "recompute_share and offload are shares, from 0 to 1" + _IMPOSSIBLE
        return
    if batch * model.context > _TOKENS:
        meant = f"; did you mean {batch // model.context}?" if batch % model.context == 0 else ""
        text = f"a batch counts sequences: {batch:,} of {model.context:,} tokens are more than any run's step{meant}"
        yield "value", text + _OURS
        return
    if layout.products not in cluster.card.flops:
        yield "value", f"{cluster.card.name} has no {layout.products} arithmetic" + _IMPOSSIBLE
    if layout.gpus != cluster.gpus:
        product = f"TP {tp} x CP {cp} x PP {pp} x DP {dp}"
        yield "gpus", f"{product} makes {layout.gpus} GPUs, the cluster has {cluster.gpus}" + _IMPOSSIBLE
    if model.heads % tp:
        yield "heads", f"{model.heads} attention heads do not divide among TP {tp}" + _MEGATRON
    elif model.kv_heads % tp and not (layout.copied_kv and tp % model.kv_heads == 0) and not model.latent:
        text = f"{model.kv_heads} key-value heads do not divide among TP {tp}"
        copied = "; copied_kv=True copies them" if tp % model.kv_heads == 0 and not layout.copied_kv else ""
        yield "heads", text + copied + _MEGATRON
    elif model.ffn % tp:
        yield "heads", f"the MLP's width {model.ffn} does not divide among TP {tp}" + _MEGATRON
    if cp > 1 and model.context % (2 * cp):
        yield "context", f"sequences of {model.context} do not divide into 2 x CP {cp} pieces" + _MEGATRON
    if layout.sequence_parallel and tp > 1 and model.context % (tp * cp):
        yield "context", f"sequences of {model.context} do not divide among TP {tp} x CP {cp}" + _MEGATRON
    if pp == 1 and layout.virtual > 1:
        yield "interleaving", f"{layout.virtual} chunks on a rank need a pipeline, PP is 1" + _IMPOSSIBLE
    elif chunks(model, pp * layout.virtual, layout.unequal_stages) is None:
        parts = f"PP {pp} x {layout.virtual} chunks" if layout.virtual > 1 else f"PP {pp}"
        also = f"nor do {model.layers + 2}, with embedding and head as a layer each"
        more = "; unequal_stages=True takes them" if chunks(model, pp * layout.virtual, True) else ""
        yield "layers", f"{model.layers} layers do not divide among {parts}, {also}{more}" + _MEGATRON
    if dp % layout.replicas:
        yield "replicas", f"DP {dp} does not divide into {layout.replicas} replicas" + _IMPOSSIBLE
    elif layout.replicas > 1 and not layout.zero:
        yield "replicas", f"{layout.replicas} replicas need states that are divided, ZeRO is 0" + _IMPOSSIBLE
    ranks = tp * cp * dp // layout.replicas
    if layout.ep > 1 and (not model.experts or model.experts % layout.ep):
        yield "experts", f"{model.experts} experts do not divide among EP {layout.ep}" + _MEGATRON
    elif model.experts and tp * cp * dp % (layout.ep * layout.of_expert * layout.replicas):
        divided = f" x {layout.of_expert} of an expert" if layout.of_expert > 1 else ""
        yield "experts", f"TP x CP x DP {ranks} of a replica does not divide into EP {layout.ep}{divided}" + _IMPOSSIBLE
    if batch % (dp * layout.microbatch):
        text = f"{batch} sequences do not divide into DP {dp} x micro-batches of {layout.microbatch}"
        yield "batch", text + _MEGATRON
    elif layout.virtual > 1 and (count := layout.microbatches(batch)) % pp:
        text = f"interleaving as planned here needs a multiple of PP {pp} micro-batches, got {count}"
        yield "interleaving", text + _MEGATRON
