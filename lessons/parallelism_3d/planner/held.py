"""What the fullest GPU of a layout holds: states, activations in flight, and every buffer that the schedule needs."""

from __future__ import annotations

from functools import cache

from course_utils import memory
from course_utils.transformer import TransformerConfig

from .layout import Layout, chunks


def stage(model: TransformerConfig, pp: int, v: int, rank: int, microbatches: int) -> tuple[int, int]:
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


def rank_parameters(
    model: TransformerConfig, tp: int, ep: int, layers: int, first: bool, last: bool
) -> tuple[float, float]:
    """Parameters of a pipeline rank, experts left out, and of its experts; a tied embedding is on first and last."""
    around = model.embedding_parameters if first else 0
    if last and not (first and model.tied):
        around += model.vocabulary * model.hidden
    dense = layers * (model.layer_parameters - model.expert_parameters) + around
    return dense / tp, layers * model.expert_parameters / tp / ep


def fullest(model: TransformerConfig, layout: Layout, batch: int) -> tuple[float, ...]:
    """Return the bytes of the fullest GPU, in the order of `memory.PARTS`."""
    ranks, pp = [0], layout.pp  # the first pipeline rank holds the most activations
    if pp > 1:
        ranks.append(pp - 1)  # the last one has the head
    if pp > 2 and chunks(model, pp * layout.virtual)[1]:
        ranks.append(1)  # the second has a layer more than the first
    return max((_on_rank(model, layout, rank, layout.microbatches(batch)) for rank in ranks), key=sum)


@cache
def _each_state(zero: int, ranks: int, precision: str) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer for each parameter of a rank."""
    each = memory.model_states(1.0, stage=zero, ranks=ranks, precision=precision)
    return each.parameters, each.gradients, each.optimizer


def _on_rank(m: TransformerConfig, layout: Layout, rank: int, microbatches: int) -> tuple[float, ...]:
    """Bytes of a pipeline rank, in the order of `memory.PARTS`.

    Two moments can be the fullest: a backward, with activations, gathered weights and gradients that are not reduced
    yet; and the optimizer's step, with its temporaries. In the first the loss and a layer's backward do not meet: with
    the head on this rank and no pipeline it is the larger of the two.
    """
    tp, cp, pp, ep, zero, shards = layout.tp, layout.cp, layout.pp, layout.ep, layout.zero, layout.shards
    layers, held = stage(m, pp, layout.virtual, rank, microbatches)
    dense, experts = rank_parameters(m, tp, ep, layers, rank == 0, rank == pp - 1)
    root, _ = rank_parameters(m, tp, ep, 0, rank == 0, rank == pp - 1)
    parameters, unit = dense + experts, (dense + experts - root) / max(layers, 1)
    of_dense, of_experts = (_each_state(zero, n, layout.precision) for n in (shards, max(1, shards // ep)))
    states = [dense * one + experts * other for one, other in zip(of_dense, of_experts, strict=True)]
    tokens, apart = layout.microbatch * m.context / cp, layout.sequence_parallel
    kept, whole = (m.kept(tokens, how, tp, apart) for how in (layout.recompute, "none"))
    more, loss = whole - kept, m.kept_around(tokens, tp, apart, layout.loss_pieces)
    working, width = m.working(tokens, tp), memory.PRECISIONS[layout.precision]
    if cp > 1:  # keys and values of the whole sequence
        working += 4 * tokens * cp * m.kv_width / tp
    if pp > 1:
        activations = held * kept + more + (loss if rank == pp - 1 else 0.0)
    else:
        activations = held * kept + max(loss, more)
        working = working if loss < more + working else 0.0
    buffers = working
    if zero >= 2:  # gradients before they are reduced: with a pipeline they add up whole
        buffers += (parameters if pp > 1 else max(unit, root)) * width.gradient
    if zero == 3:  # gathered: a layer and the next one ahead; with a pipeline weights stay
        buffers += (parameters if pp > 1 else 2 * unit + root) * width.activation
    if layout.foreach:
        temporary = 4 * parameters / (shards if zero else 1)
        if temporary > activations + buffers:
            activations, buffers = 0.0, temporary
    return *states, activations, buffers
