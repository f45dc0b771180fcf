"""The seconds of a training step by part, for one layout: what computing takes, and what communication adds to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from course_utils import memory
from course_utils.transformer import TransformerConfig

from .clusters import GpuCluster
from .held import rank_parameters
from .layout import Layout, chunks
from .messages import all_to_all, exposed, half_all_reduce, mates
from .plans import Plan
from .rates import (
    ATTENTION_BACKWARD,
    KERNELS,
    LAUNCH,
    StepTimeConstants,
    attention_rate,
    best_product,
    product_seconds,
)


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a micro-batch in a layer: forward and backward, computing alone and with what messages add.

    `forward` and `backward` are computing; `tensor`, `context` and `expert` what messages add, both passes together;
    `hidden` their seconds that add nothing, in that order.
    """

    forward: float
    backward: float
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    hidden: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def all(self) -> float:
        return self.compute + self.tensor + self.context + self.expert


class StepModel:
    """Times of the parts of a step, each computed once."""

    def __init__(self, model: TransformerConfig, cluster: GpuCluster, constants: StepTimeConstants) -> None:
        self.model, self.cluster, self.constants = model, cluster, constants
        card = cluster.card
        self.stream = card.memory_bandwidth * constants.hbm
        self.units = card.sms
        share = constants.matmul if card.architecture == "Ampere" else constants.matmul_hopper
        self.clock = share * cluster.clock
        self._layers: dict[tuple, tuple[LayerTimes, LayerTimes]] = {}
        self._work: dict[tuple, tuple] = {}
        self._halves: dict[tuple, float] = {}

    def half(self, ranks: int, near: int, size: float) -> float:
        """`half_all_reduce` on this cluster."""
        key = (ranks, near, size)
        if key not in self._halves:
            self._halves[key] = half_all_reduce(self.cluster, self.constants, ranks, near, size)
        return self._halves[key]

    def product(self, rows: float, columns: float, inner: float, products: str = "bf16") -> tuple[float, float]:
        """Seconds of a product in forward, and of the two in backward: for the gradient of its input and its weight."""
        flops, width = best_product(self.cluster.gpu, products) * self.clock, 1.0 if products == "fp8" else 2.0
        shapes = ((rows, columns, inner), (rows, inner, columns), (columns, inner, rows))
        forward, *backward = (product_seconds(*shape, self.units, flops, self.stream, width) for shape in shapes)
        casts = 0.0
        if products == "fp8":  # each factor is read for its largest value and again to be converted, written twice
            casts = 2 * 6.0 * inner * rows / self.stream
        return forward + casts / 2, sum(backward) + casts

    def layer(self, layout: Layout) -> tuple[LayerTimes, LayerTimes]:
        """Return the times of a layer, and of the head with the loss."""
        key = (
            layout.tp, layout.cp, layout.ep, layout.microbatch, layout.recompute, layout.sequence_parallel,
            layout.compiled, layout.attention, layout.products, layout.tp_overlap,
        )
        if key not in self._layers:
            self._layers[key] = self._layer(layout), self._head(layout)
        return self._layers[key]

    def _layer(self, one: Layout) -> LayerTimes:
        """Tensor: 8 bsh (t-1)/t elements a layer (Narayanan et al. 2021, section 3.2), in four all-reduces or as many
        pairs of all-gather and reduce-scatter; two more where the whole forward runs again. Context: keys and values
        are gathered in forward and again in backward, and their gradients reduced; nothing hides either (Llama 3 does
        so for context). Experts: tokens go to theirs and come back, in forward and in backward."""
        m, tp, tokens = self.model, one.tp, one.microbatch * self.model.context / one.cp
        products = self._products(one, tokens)
        forward, backward = sum(f for f, _ in products), sum(b for _, b in products)
        again = {"none": 0.0, "selective": 0.0, "full": forward, "half": forward / 2}[one.recompute]
        if m.fused:
            rate = attention_rate(self.cluster.gpu, one.attention, m.context) * self.clock
            scores = m.attention_flops * tokens / tp / rate
            after, more = ATTENTION_BACKWARD * scores, scores if one.recompute == "full" else 0.0
        else:
            batch, width = one.microbatch * m.heads / tp, m.hidden / m.heads
            flops = best_product(self.cluster.gpu) * self.clock
            product = 2 * m.context * m.context * width * batch / flops
            scores, after = 2 * product, 4 * product
            more = scores if one.recompute in ("full", "selective") else 0.0
        passing = [size / self.stream for size in m.traffic(tokens, tp, one.sequence_parallel, one.compiled)]
        cheap = {"none": 0.0, "full": passing[0], "half": passing[0]}.get(one.recompute)
        if cheap is None:
            cheap = m.selective_traffic(tokens, tp, one.sequence_parallel) / self.stream
        forward += scores + passing[0]
        backward += after + passing[1] + again + more + cheap
        started = KERNELS[one.compiled] * LAUNCH
        forward, backward = max(forward, started), max(backward, 2 * started)
        reductions, gathers = (6, 4) if one.recompute == "full" else (4, 3)
        hidden_size = 2 * tokens * m.hidden
        sent = reductions * 2 * self.half(tp, mates(self.cluster, one, "tensor"), hidden_size)
        tensor = sent
        if one.tp_overlap and sent:  # all but the first of tp pieces runs beside the products
            beside = sent * (tp - 1) / tp
            tensor = sent / tp + exposed(beside, sum(f + b for f, b in products), self.constants.contention)
        keys = 4 * tokens * one.cp * m.kv_width / tp
        context = gathers * self.half(one.cp, mates(self.cluster, one, "context"), keys)
        expert = 0.0
        if one.ep > 1:
            size, near = hidden_size / tp * m.experts_per_token, self._expert_mates(one)
            times = 6 if one.recompute == "full" else 4
            expert = times * all_to_all(self.cluster, self.constants, one.ep, near, size)
        return LayerTimes(forward, backward, tensor, context, expert, (max(0.0, sent - tensor), 0.0, 0.0))

    def _expert_mates(self, one: Layout) -> int:
        apart = one.tp * one.cp * one.pp
        return max(1, min(one.ep, self.cluster.per_node // apart))

    def _products(self, one: Layout, tokens: float) -> list[tuple[float, float]]:
        m, tp, kind = self.model, one.tp, one.products
        h, wide = m.hidden, m.ffn / tp
        made = [self.product(tokens, (h + 2 * m.kv_width) / tp, h, kind), self.product(tokens, h, h / tp, kind)]
        first = 2 * wide if m.gated else wide
        if not m.experts:
            return [*made, self.product(tokens, first, h, kind), self.product(tokens, h, wide, kind)]
        mine, rows = m.experts / one.ep, tokens * m.experts_per_token * one.ep / m.experts
        for count, of in ((mine, rows), (m.shared_experts, tokens)):
            for shape in ((of, first, h), (of, h, wide)):
                made.append(tuple(count * seconds for seconds in self.product(*shape, kind)))
        return [*made, self.product(tokens, m.experts, h)]

    def _head(self, one: Layout) -> LayerTimes:
        m, tokens = self.model, one.microbatch * self.model.context / one.cp
        forward, backward = self.product(tokens, m.vocabulary / one.tp, m.hidden)
        loss = m.loss_traffic(tokens, one.tp) / self.stream
        hidden = 2 * tokens * m.hidden
        reduced = 2 * self.half(one.tp, mates(self.cluster, one, "tensor"), hidden)
        return LayerTimes(forward + loss / 2, backward + loss / 2, reduced)

    # --- the step -----------------------------------------------------------------------------------------------------

    def work(self, one: Layout) -> tuple[tuple[float, ...], float, int, LayerTimes, LayerTimes]:
        """Seconds of a micro-batch by part on the rank with the most work, of the bubble, and layers of the first rank.

        The rank with the most work computes without a break from its first micro-batch on; the pipeline adds one
        forward and backward of all other ranks, divided by the chunks of a rank (Narayanan et al. 2021, section 2.2).
        """
        layer, head = self.layer(one)
        key = (id(layer), one.pp, one.virtual)
        if key not in self._work:
            size, counted = chunks(self.model, one.pp * one.virtual)
            most = size * one.virtual
            edge = most - counted  # layers of the first and last rank
            last = one.pp <= 2 or edge * layer.all + head.all > most * layer.all  # has the last rank the most work?
            many = edge if last else most
            parts = tuple(
                many * getattr(layer, part) + last * getattr(head, part)
                for part in ("compute", "tensor", "context", "expert")
            )
            parts += tuple(many * a + last * b for a, b in zip(layer.hidden, head.hidden, strict=True))
            others = 0.0
            if one.pp > 1:
                others = (one.pp * most - 2 * counted) * layer.all + head.all - sum(parts[:4])
            self._work[key] = parts, others / one.virtual, edge
        return *self._work[key], layer, head

    def step(self, one: Layout, batch: int, held: Sequence[float]) -> Plan:
        """Return the plan of a legal layout whose fullest GPU holds the bytes `held`."""
        count = one.microbatches(batch)
        parts, bubble, edge, layer, head = self.work(one)
        compute, tensor, context, expert, *behind = parts
        busy = compute + tensor + context + expert
        dense, experts = rank_parameters(self.model, one.tp, one.ep, edge, True, one.pp == 1)
        divided = one.shards if one.zero else 1
        stepped = dense / divided + experts / max(1, divided // one.ep if one.zero else 1)
        optimizer = stepped * _touched(one.precision) / self.stream
        data, data_hidden = self._data(one, count, busy, layer, head, dense, experts)
        pipeline, pipeline_hidden = self._pipeline(one, count, busy / one.virtual)
        hidden = (*(count * each for each in behind), pipeline_hidden, data_hidden)
        return Plan(
            self.model, self.cluster, one, batch, memory.Memory(*held), count * compute + optimizer, count * tensor,
            count * context, count * expert, pipeline, data, bubble, hidden, self.constants,
        )

    def _groups(self, one: Layout) -> tuple[int, int, int, int]:
        """Ranks and mates of the groups that divide states, and of those that reduce across replicas."""
        near = mates(self.cluster, one, "data")
        inner = math.gcd(one.shards, near)
        return one.shards, inner, one.replicas, max(1, near // inner)

    def _data(
        self, one: Layout, count: int, busy: float, layer: LayerTimes, head: LayerTimes, dense: float, experts: float
    ) -> tuple[float, float]:
        """Seconds that data parallelism adds, and seconds of it that computing hides.

        Stages 0 and 1 reduce once, behind the last backward, and stage 1 gathers behind the next forward. Without a
        pipeline stages 2 and 3 reduce after each micro-batch, and stage 3 gathers the parameters, layer by layer,
        before each forward and backward: a layer's messages run beside the computing of its neighbour, and what comes
        first in forward and last in backward has no neighbour. With a pipeline they reduce and gather once, like stage
        1: DeepSpeed refuses them (issue 4164, https://github.com/deepspeedai/DeepSpeed), and PyTorch's schedules add
        gradients up until the last micro-batch. Replicas all-reduce the shards of gradients once a step.
        """
        if one.dp * one.cp == 1:
            return 0.0, 0.0
        width, c = memory.PRECISIONS[one.precision], self.constants.contention
        shards, near, replicas, apart = self._groups(one)
        parameters = dense + experts
        layers = max(1.0, self.model.layers / one.pp)
        total = added = 0.0
        across = 2 * self.half(replicas, apart, parameters * width.gradient / shards) if replicas > 1 else 0.0
        if one.zero >= 2 and one.pp == 1:
            unit = (self.model.layer_parameters - self.model.expert_parameters * (1 - 1 / one.ep)) / one.tp
            root = parameters - layers * unit
            gather, scatter = (self.half(shards, near, unit * each) for each in (width.activation, width.gradient))
            first, last = (self.half(shards, near, root * each) for each in (width.activation, width.gradient))
            if one.zero == 2:
                gather = first = 0.0
            more = layer.tensor + layer.context + layer.expert
            forward, backward = layer.forward + more / 3, layer.backward + 2 * more / 3
            total = count * (layers * (2 * gather + scatter) + first + last)
            if one.overlap:
                ahead = (layers - 1) * exposed(gather, forward, c) + gather + first
                behind = (layers - 1) * exposed(gather + scatter, backward, c) + gather + scatter + last
                added = count * (ahead + behind)
            else:
                added = total
            if one.zero == 2:
                total += (gathered := self.half(shards, near, parameters * width.activation))
                added += exposed(gathered, busy / 3, c) if one.overlap else gathered
        else:
            scatter, gather = (
                self.half(shards, near, parameters * each) for each in (width.gradient, width.activation)
            )
            if one.zero == 0:
                gather = scatter
            total = scatter + gather
            if not one.overlap:
                added = total
            elif one.zero == 0:
                added = exposed(total, 2 * busy / 3, c)
            else:
                added = exposed(scatter, 2 * busy / 3, c) + exposed(gather, busy / 3, c)
        if across:
            total += across
            added += exposed(across, 2 * busy / 3, c) if one.overlap else across
        return added, max(0.0, total - added)

    def _pipeline(self, one: Layout, count: int, busy: float) -> tuple[float, float]:
        """Seconds of messages between pipeline ranks, and hidden ones, a chunk being `busy` so long with a micro-batch.

        Each of the tensor ranks sends its part, bsh/t elements; without sequence parallelism the parts are gathered on
        the other side (Narayanan et al. 2021, section 4.1). Filling and draining the pipeline nothing hides messages.
        """
        if one.pp == 1:
            return 0.0, 0.0
        inside = one.tp * one.cp * one.pp <= self.cluster.per_node
        latency, beta = self.cluster.intra if inside else self.cluster.inter
        share = self.constants.nvlink if inside else self.constants.network
        reached = self.cluster.reached[0 if inside else 1]
        size = 2 * one.microbatch * self.model.context / one.cp * self.model.hidden
        message = latency + size / one.tp * (1 / reached if reached else beta / share)
        if not one.sequence_parallel:
            message += self.half(one.tp, mates(self.cluster, one, "tensor"), size)
        shown = exposed(2 * message, busy, self.constants.contention) if one.overlap else 2 * message
        filling, steady = 2 * message * (one.pp - 1), count * one.virtual
        return filling + shown * steady, max(0.0, (2 * message - shown) * steady)


@cache
def _touched(precision: str) -> int:
    """Bytes that Adam reads and writes for each parameter: gradient, weight, and twice master weight and moments."""
    width = memory.PRECISIONS[precision]
    return width.gradient + 2 * (width.master + 2 * width.state) + width.parameter
