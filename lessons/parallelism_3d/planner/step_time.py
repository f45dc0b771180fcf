"""The seconds of a training step by part, for one layout: what computing takes, and what communication adds to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial

from course_utils import memory
from course_utils.hardware import LINKS
from course_utils.transformer import TransformerConfig

from . import messages, rates
from .clusters import GpuCluster
from .held import kept_by_a_layer, rank_parameters
from .layout import Layout, chunks, kv_on_rank
from .messages import exposed, half_all_reduce, mates, per_byte
from .plans import Plan
from .rates import StepTimeConstants


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a micro-batch in a layer: computing, what messages add, and those of tensor ranks that add nothing."""

    forward: float
    backward: float
    tensor: float
    context: float = 0.0
    expert: float = 0.0
    hidden: float = 0.0

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
        shares = {"Ampere": constants.matmul, "Blackwell": constants.matmul_blackwell}
        self.clock = shares.get(card.architecture, constants.matmul_hopper) * cluster.clock
        self.half = cache(partial(half_all_reduce, cluster, constants))
        self._layers: dict[tuple, tuple[LayerTimes, LayerTimes]] = {}

    def product(
        self, rows: float, columns: float, inner: float, products: str = "bf16", fused: bool = True
    ) -> tuple[float, float]:
        """Seconds of a product in forward, and of the two in backward: for the gradient of its input and its weight."""
        flops, width = rates.best_product(self.cluster.gpu, products) * self.clock, 1.0 if products == "fp8" else 2.0
        shapes = ((rows, columns, inner), (rows, inner, columns), (columns, inner, rows))
        forward, *backward = (rates.product_seconds(*shape, self.units, flops, self.stream, width) for shape in shapes)
        casts = 0.0
        if products == "fp8":  # each factor is read for its largest value and again to be converted, written twice
            casts = 2 * (rates.FUSED_CAST if fused else rates.CAST) * inner * rows / self.stream
        return forward + casts / 2, sum(backward) + casts

    def layer(self, layout: Layout) -> tuple[LayerTimes, LayerTimes]:
        """Times of a layer, and of the head with the loss."""
        key = (
            layout.tp, layout.cp, layout.ep, layout.expert_tp, layout.order, layout.microbatch, layout.recompute,
            layout.recompute_share, layout.offload, layout.sequence_parallel, layout.compiled, layout.fused_norms,
            layout.attention, layout.products, layout.tp_overlap,
        )
        if key not in self._layers:
            self._layers[key] = self._mixed(layout), self._head(layout)
        return self._layers[key]

    def _mixed(self, one: Layout) -> LayerTimes:
        """The mean of layers that are computed again and of those that are not, with what offloading adds."""
        share, again = one.recompute_share, self._layer(replace(one, recompute_share=1.0))
        if share == 1 and not one.offload:
            return again
        whole = self._layer(replace(one, recompute="none"))
        mean = [share * a + (1 - share) * b for a, b in zip(astuple(again), astuple(whole), strict=True)]
        link = LINKS[self.cluster.card.pcie].bandwidth * self.constants.nvlink  # the same share of the data sheet
        seconds = one.offload * kept_by_a_layer(self.model, one) / link  # out beside forward, in beside backward
        return LayerTimes(*(max(work, seconds) for work in mean[:2]), *mean[2:])

    def _layer(self, one: Layout) -> LayerTimes:
        """Tensor: 8 bsh (t-1)/t elements a layer (Narayanan et al. 2021, section 3.2). Context: keys and values are
        gathered in forward and again in backward, and their gradients reduced, as Llama 3 does; nothing hides it."""
        m, tp, tokens = self.model, one.tp, one.microbatch * self.model.context / one.cp
        products = self._products(one, tokens)
        forward, backward = sum(f for f, _ in products), sum(b for _, b in products)
        again = {"none": 0.0, "selective": 0.0, "full": forward, "half": forward / 2}[one.recompute]
        if m.fused:
            rate = rates.attention_rate(self.cluster.gpu, one.attention, m.context) * self.clock
            scores = m.attention_flops * tokens / tp / rate
            after, more = rates.ATTENTION_BACKWARD * scores, scores if one.recompute == "full" else 0.0
        else:
            batch, width = one.microbatch * m.heads / tp, (m.query_width + m.mixed_width) / 2 / m.heads
            flops = rates.best_product(self.cluster.gpu) * self.clock
            product = 2 * m.context * m.context * width * batch / flops
            scores, after = 2 * product, 4 * product
            more = scores if one.recompute in ("full", "selective") else 0.0
        code = one.sequence_parallel, one.compiled, one.fused_norms
        passing = [size / self.stream for size in m.traffic(tokens, tp, *code)]
        if one.recompute == "selective":
            cheap = m.selective_traffic(tokens, tp, one.sequence_parallel) / self.stream
        else:
            cheap = 0.0 if one.recompute == "none" else passing[0]
        forward += scores + passing[0]
        backward += after + passing[1] + again + more + cheap
        started = rates.KERNELS[one.compiled] * rates.LAUNCH
        forward, backward = max(forward, started), max(backward, 2 * started)
        reductions, gathers, exchanges = one.passes
        hidden_size = 2 * tokens * m.hidden
        tensor = sent = reductions * 2 * self.half(tp, mates(self.cluster, one, "tp"), hidden_size)
        if one.tp_overlap and sent:  # all but the first of tp pieces runs beside the products
            beside = sent * (tp - 1) / tp
            tensor = sent / tp + exposed(beside, sum(f + b for f, b in products), self.constants.contention)
        keys = 4 * tokens * one.cp * kv_on_rank(m, tp)
        context = gathers * self.half(one.cp, mates(self.cluster, one, "cp"), keys)
        expert = 0.0
        if one.ep > 1:
            near, size = messages.expert_mates(self.cluster, one), m.routed * hidden_size / tp * m.experts_per_token
            expert = exchanges * messages.all_to_all(self.cluster, self.constants, one.ep, near, size)
        return LayerTimes(forward, backward, tensor, context, expert, max(0.0, sent - tensor))

    def _products(self, one: Layout, tokens: float) -> list[tuple[float, float]]:
        m, tp, h = self.model, one.tp, self.model.hidden
        make = partial(self.product, products=one.products, fused=one.compiled)
        made = []
        for columns, inner, divided in m.attention_shapes:
            columns += 2 * (kv_on_rank(m, tp) * tp - m.kv_width) * (divided == "out" and not m.latent)  # copies
            made.append(make(tokens, columns / (tp if divided == "out" else 1), inner / (tp if divided == "in" else 1)))
        matrices, pairs = 2 if m.gated else 1, one.ep * one.of_expert / tp
        mlps = [(1.0, tokens, m.ffn / tp)]  # number, tokens of each, width
        if m.experts:
            rows = tokens * m.experts_per_token * pairs / m.experts
            mlps = [(m.routed * m.experts / one.ep, rows, m.ffn / one.of_expert)]
            mlps.append((m.routed * m.shared_experts, tokens, m.ffn / tp))
            mlps.append((1 - m.routed, tokens, m.dense_ratio * h / tp))
        for count, rows, wide in mlps:
            for columns, inner in ((matrices * wide, h), (h, wide)) if count else ():
                made.append(tuple(count * seconds for seconds in make(rows, columns, inner)))
        return [*made, self.product(tokens, m.experts, h)] if m.experts else made

    def _head(self, one: Layout) -> LayerTimes:
        m, tokens = self.model, one.microbatch * self.model.context / one.cp
        forward, backward = self.product(tokens, m.vocabulary / one.tp, m.hidden)
        loss = m.loss_traffic(tokens, one.tp) / self.stream
        reduced = 2 * self.half(one.tp, mates(self.cluster, one, "tp"), 2 * tokens * m.hidden)
        return LayerTimes(forward + loss / 2, backward + loss / 2, reduced)

    def work(self, one: Layout, layer: LayerTimes, head: LayerTimes) -> tuple[tuple[float, ...], float, int]:
        """Seconds of a micro-batch by part on the rank with the most work, of the bubble (a forward and backward of all
        other ranks, by the chunks of a rank: Narayanan et al. 2021, 2.2), and layers of the first rank."""
        sizes = chunks(self.model, one.pp * one.virtual, one.unequal_stages)
        layers = [sum(sizes[rank :: one.pp]) for rank in range(one.pp)]
        most, edge = max(layers[:-1], default=0), layers[0]
        last = layers[-1] * layer.all + head.all > most * layer.all  # has the last rank the most work?
        many = layers[-1] if last else most
        parts = tuple(
            many * getattr(layer, part) + last * getattr(head, part)
            for part in ("compute", "tensor", "context", "expert", "hidden")
        )
        others = self.model.layers * layer.all + head.all - sum(parts[:4]) if one.pp > 1 else 0.0
        return parts, others / one.virtual, edge

    def step(self, one: Layout, batch: int, held: Sequence[float]) -> Plan:
        """Return the plan of a legal layout whose fullest GPU holds the bytes `held`."""
        count, (layer, head) = one.microbatches(batch), self.layer(one)
        (compute, tensor, context, expert, hidden), bubble, edge = self.work(one, layer, head)
        busy = compute + tensor + context + expert
        dense, experts = rank_parameters(self.model, one, edge, True, one.pp == 1)
        divided = (one.shards, one.expert_shards) if one.zero else (1, 1)
        stepped = dense / divided[0] + experts / divided[1]
        width = memory.PRECISIONS[one.precision]  # Adam reads and writes gradient, weight, twice master and moments
        touched = width.gradient + 2 * (width.master + 2 * width.state) + width.parameter
        optimizer = stepped * touched / self.stream
        data, data_hidden = self._data(one, count, busy, layer, (dense, experts))
        pipeline, pipeline_hidden = self._pipeline(one, count, busy / one.virtual)
        behind = dict(tensor=count * hidden, context=0.0, expert=0.0, pipeline=pipeline_hidden, data=data_hidden)
        return Plan(
            self.model, self.cluster, one, batch, memory.Memory(*held), count * compute + optimizer, count * tensor,
            count * context, count * expert, pipeline, data, bubble, behind, self.constants,
        )

    def _data(
        self, one: Layout, count: int, busy: float, layer: LayerTimes, parameters: tuple[float, float]
    ) -> tuple[float, float]:
        """Seconds that data parallelism adds, and seconds of it that computing hides.

        Stages 0 and 1 reduce once, and stage 1 gathers behind the next forward. Without a pipeline stages 2 and 3
        reduce after each micro-batch, and stage 3 gathers layer by layer: a layer's messages run beside the computing
        of its neighbour, which the first in forward and the last in backward lack. With a pipeline they do as stage 1.
        Parameters come in two parts, the second that of experts, which fewer ranks share.
        """
        if one.dp * one.cp == 1:
            return 0.0, 0.0
        width, c = memory.PRECISIONS[one.precision], self.constants.contention
        spread = mates(self.cluster, one, "data")
        near = math.gcd(one.shards, spread)  # of the group that divides states

        def moved(dense: float, experts: float = 0.0) -> list[float]:
            """Gather and reduce-scatter of so many parameters."""
            of = ((dense, one.shards, near), (experts, one.expert_shards, math.gcd(one.expert_shards, near)))
            return [
                sum(self.half(ranks, close, size * each) for size, ranks, close in of if size)
                for each in (messages.gathered_width(one), width.gradient)
            ]

        def beside(seconds: float, share: float) -> float:
            """What messages add beside a share of the work of a micro-batch."""
            return exposed(seconds, share * busy / 3, c) if one.overlap else seconds

        if one.zero >= 2 and one.pp == 1:
            layers = self.model.layers
            unit = rank_parameters(self.model, one, 1, False, False)
            (gather, scatter), (first, last) = moved(*unit), moved(parameters[0] - layers * unit[0])
            if one.zero == 2:
                gather = first = 0.0
            more, rounds = layer.all - layer.compute, 1 if one.no_sync else count
            total = added = count * (layers * 2 * gather + first) + rounds * (layers * scatter + last)
            if one.overlap:
                ahead = (layers - 1) * exposed(gather, layer.forward + more / 3, c) + gather + first
                behind, reduced = (
                    (layers - 1) * exposed(gather + sent, layer.backward + 2 * more / 3, c) + gather + sent
                    for sent in (0.0, scatter)
                )
                added = count * ahead + (count - rounds) * behind + rounds * (reduced + last)
            if one.zero == 2:
                gathered, _ = moved(*parameters)
                total, added = total + gathered, added + beside(gathered, 1)
        else:
            gather, scatter = moved(*parameters)
            if one.zero == 0:
                gather = scatter
            total = scatter + gather
            added = beside(total, 2) if one.zero == 0 else beside(scatter, 2) + beside(gather, 1)
            if one.zero == 3 and one.reshard:  # the first gather is counted; the schedule waits for the others
                total, added = total + count * gather, added + count * gather
        if one.replicas > 1:
            size = parameters[0] / one.shards + parameters[1] / one.expert_shards
            apart, size = max(1, spread // near), size * width.gradient
            across = 2 * self.half(one.replicas, apart, size)
            total, added = total + across, added + beside(across, 2)
        return added, max(0.0, total - added)

    def _pipeline(self, one: Layout, count: int, busy: float) -> tuple[float, float]:
        """Seconds of messages between pipeline ranks, and hidden ones, a chunk being `busy` so long with a micro-batch:
        each tensor rank sends its part (Narayanan et al. 2021, section 4.1); filling and draining hide nothing."""
        if one.pp == 1:
            return 0.0, 0.0
        inside = one.stride("pp") * one.pp <= self.cluster.per_node
        fast, slow = per_byte(self.cluster, self.constants)
        size = 2 * one.microbatch * self.model.context / one.cp * self.model.hidden
        message = (self.cluster.intra if inside else self.cluster.inter)[0] + size / one.tp * (fast if inside else slow)
        if not one.sequence_parallel:
            message += self.half(one.tp, mates(self.cluster, one, "tp"), size)
        shown = exposed(2 * message, busy, self.constants.contention) if one.overlap else 2 * message
        filling, steady = 2 * message * (one.pp - 1), count * one.virtual
        return filling + shown * steady, max(0.0, (2 * message - shown) * steady)
