"""What the fullest GPU of a layout holds: states, activations in flight, and every buffer that the schedule needs."""

from __future__ import annotations

from functools import cache

from course_utils import memory
from course_utils.transformer import TransformerConfig

from .layout import Layout, chunks


def _stage(model: TransformerConfig, pp: int, v: int, rank: int, microbatches: int) -> tuple[int, int]:
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


@cache
def _states(zero: int, ranks: int, precision: str) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer for each parameter of a rank."""
    each = memory.model_states(1.0, stage=zero, ranks=ranks, precision=precision)
    return each.parameters, each.gradients, each.optimizer


def fullest(model: TransformerConfig, layout: Layout, batch: int) -> tuple[float, ...]:
    """Return the bytes of the fullest GPU, in the order of `memory.PARTS`: see `MemoryModel`."""
    return MemoryModel(model).fullest(layout, batch)


class MemoryModel:
    """Bytes of pipeline ranks for the layouts of a model, each part counted once."""

    def __init__(self, model: TransformerConfig) -> None:
        self.model = model
        self._held: dict[tuple, tuple] = {}
        self._parameters: dict[tuple, tuple] = {}
        self._activations: dict[tuple, tuple[float, ...]] = {}

    def fullest(self, layout: Layout, batch: int) -> tuple[float, ...]:
        """Return the bytes of the fullest GPU, in the order of `memory.PARTS`.

        It is on the first pipeline rank, which holds the most activations; on the second, where the first has a layer
        less; or on the last, which has the head.
        """
        microbatches, last = layout.microbatches(batch), layout.pp - 1
        most = self._rank(layout, 0, microbatches)
        if last:
            most = max(most, self._rank(layout, last, microbatches), key=sum)
        if last > 1 and chunks(self.model, layout.pp * layout.virtual)[1]:
            most = max(most, self._rank(layout, 1, microbatches), key=sum)
        return most

    def _of_stage(self, layout: Layout, rank: int) -> tuple[float, ...]:
        """Dense and expert parameters, those of a layer and around the layers; states in bytes."""
        key = (
            layout.tp, layout.pp, layout.virtual, layout.ep, rank, layout.zero, layout.dp * layout.cp, layout.replicas,
            layout.precision,
        )
        if key not in self._parameters:
            first, last, count = rank == 0, rank == layout.pp - 1, layout.pp * layout.virtual
            layers = _stage(self.model, layout.pp, layout.virtual, rank, count)[0]
            dense, experts = rank_parameters(self.model, layout.tp, layout.ep, layers, first, last)
            root = rank_parameters(self.model, layout.tp, layout.ep, 0, first, last)[0]
            unit = (dense + experts - root) / max(layers, 1)
            states = [0.0, 0.0, 0.0]
            for parameters, ranks in ((dense, layout.shards), (experts, max(1, layout.shards // layout.ep))):
                for part, each in enumerate(_states(layout.zero, ranks, layout.precision)):
                    states[part] += parameters * each
            self._parameters[key] = dense, experts, unit, root, *states
        return self._parameters[key]

    def _rank(self, layout: Layout, rank: int, microbatches: int) -> tuple[float, ...]:
        """Bytes of a pipeline rank, in the order of `memory.PARTS`.

        Two moments can be the fullest: a backward, with activations, gathered weights and gradients that are not
        reduced yet; and the optimizer's step, with its temporaries. In the first the loss and a layer's backward do not
        meet: with the head on this rank and no pipeline it is the larger of the two.
        """
        tp, cp, pp, zero, m = layout.tp, layout.cp, layout.pp, layout.zero, self.model
        key = (pp, layout.virtual, rank, microbatches)
        if key not in self._held:
            self._held[key] = _stage(m, *key)
        held = self._held[key][1]
        dense, experts, unit, root, *states = self._of_stage(layout, rank)
        tokens = layout.microbatch * m.context / cp
        key = (tokens, tp, layout.recompute, layout.sequence_parallel, layout.loss_pieces)
        if key not in self._activations:
            kept, whole = (m.kept(tokens, how, tp, layout.sequence_parallel) for how in (layout.recompute, "none"))
            loss = m.kept_around(tokens, tp, layout.sequence_parallel, layout.loss_pieces)
            self._activations[key] = kept, whole - kept, loss, m.working(tokens, tp)
        kept, more, loss, working = self._activations[key]
        width = memory.PRECISIONS[layout.precision]
        if cp > 1:  # keys and values of the whole sequence
            working += 4 * tokens * cp * m.kv_width / tp
        if pp > 1:
            activations = held * kept + more + (loss if rank == pp - 1 else 0.0)
        else:
            activations = held * kept + max(loss, more)
            working = working if loss < more + working else 0.0
        parameters = dense + experts
        buffers = working
        if zero >= 2:  # gradients before they are reduced: with a pipeline they add up whole
            buffers += (parameters if pp > 1 else max(unit, root)) * width.gradient
        if zero == 3:  # gathered: a layer and the next one ahead; with a pipeline weights stay
            buffers += (parameters if pp > 1 else 2 * unit + root) * width.activation
        if layout.foreach:
            temporary = 4 * parameters / (layout.shards if zero else 1)
            if temporary > activations + buffers:
                activations, buffers = 0.0, temporary
        return *states, activations, buffers
