"""What the fullest GPU of a layout holds: states, activations in flight, and every buffer that the schedule needs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from course_utils import memory
from course_utils.transformer import TransformerConfig

from .clusters import GpuCluster
from .layout import Layout, chunks, kv_on_rank

#: Bytes of CUDA's context with the libraries' work areas, and of NCCL's buffers for a group.
CONTEXT, GROUP = 0.6e9, 0.4e9
#: What is held beside activations and buffers, as a share of them, without a pipeline and with one, whose micro-batches
#: come and go. Without: FSDP of torchtitan reserves 2 % more than is counted, in the median. With: fitted to every
#: second layout that "ran" or did not (`evidence`); nanotron's stages allocate 9 to 19 % more than is counted.
FRAGMENTS = {False: 0.02, True: 0.2}


def stage(
    model: TransformerConfig, pp: int, v: int, rank: int, microbatches: int, unequal: bool | tuple[int, ...] = False
) -> tuple[int, int]:
    """Layers of a pipeline rank, and layers whose activations it holds before its first backward: of ``pp - rank``
    micro-batches in 1F1B, of ``2 (pp - rank - 1) + (v - 1) pp + 1`` chunks in `pipeline.interleaved`."""
    mine = chunks(model, pp * v, unequal)[rank::pp]
    if v == 1:
        return mine[0], mine[0] * min(microbatches, pp - rank)
    ahead = min(microbatches * v, 2 * (pp - rank - 1) + (v - 1) * pp + 1)
    return sum(mine), sum(mine[i // pp % v] for i in range(ahead))


def rank_parameters(
    model: TransformerConfig, layout: Layout, layers: float, first: bool, last: bool
) -> tuple[float, float]:
    """Parameters of a pipeline rank, experts left out, and of its experts; a tied embedding is on first and last."""
    around = model.embedding_parameters if first else 0
    if last and not (first and model.tied):
        around += model.vocabulary * model.hidden
    dense = layers * (model.layer_parameters - model.expert_parameters) + around
    copied = 2 * model.hidden * (kv_on_rank(model, layout.tp) - model.kv_width / layout.tp)
    experts = layers * model.expert_parameters / layout.of_expert / layout.ep
    return dense / layout.tp + (0 if model.latent else layers * copied), experts


def fullest(model: TransformerConfig, layout: Layout, batch: int) -> tuple[float, ...]:
    """Return the bytes of the fullest GPU, in the order of `memory.PARTS`."""
    ranks, pp = [0], layout.pp  # the first pipeline rank holds the most activations
    if pp > 1:
        ranks.append(pp - 1)  # the last one has the head
    if pp > 2 and len(set(chunks(model, pp * layout.virtual, layout.unequal_stages))) > 1:
        ranks += range(1, pp - 1) if isinstance(layout.unequal_stages, tuple) else [1]  # can have more than the first
    return max((_on_rank(model, layout, rank, layout.microbatches(batch)) for rank in ranks), key=sum)


def fragments(layout: Layout, held: tuple[float, ...]) -> float:
    """Return the bytes that the allocator and the software hold beside activations and buffers."""
    return FRAGMENTS[layout.pp > 1] * sum(held[3:])


def reserve(layout: Layout, held: tuple[float, ...]) -> float:
    """Return the bytes that a GPU holds beside what is counted: these, CUDA's context, and NCCL's for each group."""
    sizes = (layout.tp, layout.cp, layout.pp, layout.shards, layout.replicas, layout.ep)
    return CONTEXT + GROUP * sum(size > 1 for size in sizes) + fragments(layout, held)


def fits(model: TransformerConfig, cluster: GpuCluster, layout: Layout, batch: int) -> bool:
    """Return whether the fullest GPU of a legal layout holds it, with the reserve."""
    held = fullest(model, layout, batch)
    return sum(held) + reserve(layout, held) <= cluster.card.memory_bytes


def kept_by_a_layer(m: TransformerConfig, layout: Layout) -> float:
    """Bytes that a layer keeps of a micro-batch for backward; the mean, if only some are computed again."""
    tokens, share = layout.microbatch * m.context / layout.cp, layout.recompute_share
    in_fp8 = layout.products == "fp8" and layout.zero < 3  # inputs of products
    gathered = not layout.compiled or layout.zero == 3  # kept whole for backward; Megatron-LM gathers again
    code = layout.tp, layout.sequence_parallel, layout.compiled, in_fp8, layout.fused_norms, gathered
    return share * m.kept(tokens, layout.recompute, *code) + (1 - share) * m.kept(tokens, "none", *code)


_states = cache(memory.model_states)


def _on_rank(m: TransformerConfig, layout: Layout, rank: int, microbatches: int) -> tuple[float, ...]:
    """Bytes of a pipeline rank when it is fullest: in a backward, with gathered weights and gradients not reduced yet
    (without a pipeline the loss and a layer's backward do not meet), or in the optimizer's step."""
    tp, cp, pp, zero, shards = layout.tp, layout.cp, layout.pp, layout.zero, layout.shards
    layers, held = stage(m, pp, layout.virtual, rank, microbatches, layout.unequal_stages)
    dense, experts = rank_parameters(m, layout, layers, rank == 0, rank == pp - 1)
    root, _ = rank_parameters(m, layout, 0, rank == 0, rank == pp - 1)
    parameters, unit = dense + experts, (dense + experts - root) / max(layers, 1)
    of_dense, of_experts = (
        _states(1.0, stage=zero, ranks=n, precision=layout.precision) for n in (shards, layout.expert_shards)
    )
    states = [dense * getattr(of_dense, part) + experts * getattr(of_experts, part) for part in memory.PARTS[:3]]
    tokens, apart = layout.microbatch * m.context / cp, layout.sequence_parallel
    kept, divided = kept_by_a_layer(m, layout), layout.parallel_loss
    logits = tp if (layout.compiled if divided is None else divided) else 1
    loss = m.kept_around(tokens, tp, apart, layout.loss_pieces, logits, layout.compiled)
    whole = kept_by_a_layer(m, replace(layout, recompute="none"))
    more = whole - kept_by_a_layer(m, replace(layout, recompute_share=1.0)) if layout.recompute_share else 0.0
    held = (1 - layout.offload) * held + layout.offload * min(2, held)  # two layers are on their way
    working, width = m.working(tokens, tp), memory.PRECISIONS[layout.precision]
    if cp > 1:  # keys and values of the whole sequence
        working += 4 * tokens * cp * kv_on_rank(m, tp)
    if pp > 1:
        activations = held * kept + more + (loss if rank == pp - 1 else 0.0)
    else:
        activations = held * kept + max(loss, more)
        working = working if loss < more + working else 0.0
    buffers = working
    if zero >= 2:  # gradients before they are reduced: with a pipeline they add up whole
        whole = 4 * parameters - states[1]
        buffers += whole if layout.no_sync else (parameters if pp > 1 else max(unit, root)) * width.gradient
    if zero == 3:  # gathered: a layer and the next one ahead; with a pipeline weights stay
        buffers += (parameters if pp > 1 else 2 * unit + root) * width.activation
    if layout.foreach:
        temporary = 4 * parameters / (shards if zero else 1)
        if temporary > activations + buffers:
            activations, buffers = 0.0, temporary
    return *states, activations, buffers
