"""Pipeline schedules as data: which rank computes what in which order, and the time and memory that this takes.

A model of `stages` stages lies on ``ranks`` ranks; each of ``microbatches`` micro-batches goes forward through all
stages and back. What a rank does is a list of operations, named as in torch.distributed.pipelining: ``F`` forward,
``B`` backward, or in two parts ``I``, gradient of the input, and ``W``, that of the weights (B and W in the paper).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "SCHEDULES", "Costs", "Op", "Schedule", "Timeline", "gpipe", "ideal_seconds", "interleaved", "naive",
    "one_f_one_b", "partition", "simulate", "zero_bubble_h1", "zero_bubble_h2",
]

KINDS = ("F", "B", "I", "W")
_BEFORE = {"B": "F", "I": "F", "W": "I"}  # what a stage has to do first


class Op(NamedTuple):
    """One operation: `kind` is one of F, B, I, W; `stage` and `microbatch` count from 0."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order."""

    name: str
    microbatches: int
    placement: tuple[int, ...]  # the rank of each stage
    order: tuple[tuple[Op, ...], ...]  # by rank

    @property
    def ranks(self) -> int:
        return len(self.order)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def virtual(self) -> int:
        """Stages on each rank."""
        return self.stages // self.ranks


@dataclass(frozen=True)
class Costs:
    """Time and memory of a micro-batch, in units of your choice.

    Seconds for F, I and W are those of a rank's share of the layers, or of each *stage* if they are a sequence. B takes
    I and W together.
    """

    forward: float | Sequence[float] = 1.0
    input: float | Sequence[float] = 1.0
    weight: float | Sequence[float] = 1.0
    transfer: float = 0.0  # seconds until another rank can use a result; the rank itself goes on at once
    activation: float = 1.0  # memory that F of a rank's share of the layers leaves behind for backward
    after_input: float = 1.0  # the part of it that is still needed between I and W, 0 to 1

    def by_stage(self, schedule: Schedule) -> dict[str, list[float]]:
        """Seconds of every kind of operation, by stage."""

        def of(name: str) -> list[float]:
            value = getattr(self, name)
            if isinstance(value, Sequence):
                if len(value) != schedule.stages:
                    raise ValueError(f"{name} has {len(value)} numbers for {schedule.stages} stages")
                return [float(x) for x in value]
            return [value / schedule.virtual] * schedule.stages

        parts = {"F": of("forward"), "I": of("input"), "W": of("weight")}
        if min(map(min, parts.values())) < 0 or self.transfer < 0:
            raise ValueError("times must not be negative")
        return parts | {"B": [i + w for i, w in zip(parts["I"], parts["W"], strict=True)]}


class Span(NamedTuple):
    """An operation in time, in the unit of the costs."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]  # by rank, in order
    memory: tuple[tuple[tuple[float, float], ...], ...]  # by rank: time, and `Costs.activation` held from then on

    @property
    def seconds(self) -> float:
        """From the first operation of any rank to the end of the last."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def period(self) -> float:
        """From step to step, if no rank waits for the others at the end: the longest that one rank takes."""
        return max(spans[-1].end - spans[0].start for spans in self.spans)

    @property
    def busy(self) -> list[float]:
        """Seconds that each rank computes."""
        return [sum(span.end - span.start for span in spans) for spans in self.spans]

    @property
    def bubble(self) -> float:
        """Share of the `period` that the ranks idle."""
        return 1 - sum(self.busy) / (self.schedule.ranks * self.period)

    @property
    def peak(self) -> list[float]:
        """Most activations held at a time, by rank."""
        return [max(held for _, held in steps) for steps in self.memory]


def _check(ranks: int, microbatches: int, virtual: int = 1) -> None:
    for name, value in (("ranks", ranks), ("microbatches", microbatches), ("virtual", virtual)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def naive(ranks: int, microbatches: int) -> Schedule:
    """One micro-batch at a time goes all the way forward and back before the next begins: one rank works at a time."""
    _check(ranks, microbatches)
    order = tuple(tuple(Op(kind, r, m) for m in range(microbatches) for kind in "FB") for r in range(ranks))
    return Schedule("naive", microbatches, tuple(range(ranks)), order)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, https://arxiv.org/abs/1811.06965)."""
    _check(ranks, microbatches)
    order = tuple(tuple(Op(kind, r, m) for kind in "FB" for m in range(microbatches)) for r in range(ranks))
    return Schedule("GPipe", microbatches, tuple(range(ranks)), order)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Forwards until the last rank has work, then one forward and one backward in turn.

    PipeDream-Flush of Narayanan et al. 2020, https://arxiv.org/abs/2006.09503: rank r has at most ``ranks - r``
    micro-batches in flight.
    """
    _check(ranks, microbatches)

    def of(rank: int) -> tuple[Op, ...]:
        warm = min(microbatches, ranks - rank - 1)
        ops = [Op("F", rank, m) for m in range(warm)]
        for m in range(microbatches - warm):
            ops += [Op("F", rank, warm + m), Op("B", rank, m)]
        return (*ops, *(Op("B", rank, m) for m in range(microbatches - warm, microbatches)))

    return Schedule("1F1B", microbatches, tuple(range(ranks)), tuple(map(of, range(ranks))))


def interleaved(ranks: int, microbatches: int, virtual: int = 2) -> Schedule:
    """1F1B with `virtual` stages on each rank, stage s on rank s mod ranks.

    From Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473, section 2.2): the bubble is `virtual` times smaller,
    the messages are more than `virtual` times as many. Groups of `ranks` micro-batches go through a rank's stages in
    turn, so there must be a multiple of `ranks`.
    """
    _check(ranks, microbatches, virtual)
    if microbatches % ranks:
        raise ValueError(f"interleaving needs a multiple of {ranks} micro-batches, got {microbatches}")
    if virtual == 1:
        return one_f_one_b(ranks, microbatches)
    total = microbatches * virtual

    def op(kind: str, rank: int, k: int) -> Op:
        """The k-th forward or backward of a rank."""
        group, within = divmod(k, ranks * virtual)
        chunk, m = divmod(within, ranks)
        chunk = virtual - 1 - chunk if kind == "B" else chunk
        return Op(kind, chunk * ranks + rank, group * ranks + m)

    def of(rank: int) -> tuple[Op, ...]:
        warm = min(total, 2 * (ranks - rank - 1) + (virtual - 1) * ranks)
        ops = [op("F", rank, k) for k in range(warm)]
        for k in range(total - warm):
            ops += [op("F", rank, warm + k), op("B", rank, k)]
        return (*ops, *(op("B", rank, k) for k in range(total - warm, total)))

    placement = tuple(s % ranks for s in range(ranks * virtual))
    return Schedule("interleaved", microbatches, placement, tuple(map(of, range(ranks))))


def _zero_bubble(name: str, ranks: int, microbatches: int, ahead: Callable[[int], int], lag: int) -> Schedule:
    """Forwards ahead of backward, then I, W and F in turn; W comes `lag` times the rank number later than I."""
    _check(ranks, microbatches)

    def of(rank: int) -> tuple[Op, ...]:
        forward, weight = min(microbatches, ahead(rank)), 0
        ops = [Op("F", rank, m) for m in range(forward)]
        for m in range(microbatches):
            ops.append(Op("I", rank, m))
            if m >= lag * rank:
                ops.append(Op("W", rank, weight))
                weight += 1
            if forward < microbatches:
                ops.append(Op("F", rank, forward))
                forward += 1
        return (*ops, *(Op("W", rank, m) for m in range(weight, microbatches)))

    return Schedule(name, microbatches, tuple(range(ranks)), tuple(map(of, range(ranks))))


def zero_bubble_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with backward split: later ranks put W off and fill the end with it.

    From Qi et al. 2023 (https://arxiv.org/abs/2401.10241): every rank idles (p - 1)(F + I - W) with activations of p
    micro-batches, as many as rank 0 holds in 1F1B. This takes m >= p micro-batches and W <= F.
    """
    return _zero_bubble("ZB-H1", ranks, microbatches, lambda rank: ranks - rank, 1)


def zero_bubble_h2(ranks: int, microbatches: int) -> Schedule:
    """Zero-bubble with more forwards ahead: no bubble where F = I = W, for nearly twice the activations.

    From Qi et al. 2023 (https://arxiv.org/abs/2401.10241): every rank idles (p - 1)(F + I - 2 W) with activations of
    2p - 1 micro-batches. This takes m >= 2p - 1 micro-batches, W <= F and 2 W <= F + I. Ranks end at different times;
    the optimizer step must not wait for all of them.
    """
    return _zero_bubble("ZB-H2", ranks, microbatches, lambda rank: 2 * (ranks - rank) - 1, 2)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive, "GPipe": gpipe, "1F1B": one_f_one_b, "interleaved": interleaved,
    "ZB-H1": zero_bubble_h1, "ZB-H2": zero_bubble_h2,
}


def _complete(schedule: Schedule) -> None:
    """Refuse a schedule that leaves something out, does it twice, too early, or on the wrong rank."""
    stages, count = schedule.stages, schedule.microbatches
    seen = {kind: bytearray(stages * count) for kind in KINDS}
    for rank, ops in enumerate(schedule.order):
        for op in ops:
            kind, stage, m = op
            if kind not in seen or not 0 <= stage < stages or not 0 <= m < count:
                raise ValueError(
                    f"rank {rank}: {op} is not an operation of {stages} stages and {count} micro-batches; kinds are "
                    f"{', '.join(KINDS)}"
                )
            if schedule.placement[stage] != rank:
                raise ValueError(f"rank {rank}: {op} belongs to rank {schedule.placement[stage]}")
            i = stage * count + m
            if seen[kind][i]:
                raise ValueError(f"rank {rank}: {op} comes twice")
            before = _BEFORE.get(kind)
            if before and not seen[before][i]:
                raise ValueError(f"rank {rank}: {op} comes before {Op(before, stage, m)}")
            seen[kind][i] = 1
    for i, has in enumerate(zip(*seen.values(), strict=True)):
        if has not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            names = ", ".join(kind for kind, there in zip(KINDS, has, strict=True) if there) or "nothing"
            raise ValueError(f"stage {i // count}, micro-batch {i % count}: needs F and B, or F, I and W, has {names}")


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule in simulated time: a rank starts its next operation as soon as it is free and has what it needs.

    F needs the F of the stage before; B and I need the B or I of the stage behind. A ValueError says which operations
    are missing, twice, on the wrong rank or before their own F, or where each of the ranks waits for ever.
    """
    costs = costs or Costs()
    _complete(schedule)
    seconds, place, last = costs.by_stage(schedule), schedule.placement, schedule.stages - 1
    count, order = schedule.microbatches, schedule.order
    outputs = [[None] * count for _ in place]  # when each stage's output is there, by micro-batch
    gradients = [[None] * count for _ in place]  # and the gradient of its input
    at, free = [0] * schedule.ranks, [0.0] * schedule.ranks
    spans: list[list[Span]] = [[] for _ in order]
    beside: list[set[int]] = [set() for _ in order]  # the ranks of the stages before and behind a rank's own
    for a, b in itertools.pairwise(place):
        if a != b:
            beside[a].add(b)
            beside[b].add(a)
    queue, waiting = deque(range(schedule.ranks)), set(range(schedule.ranks))
    while queue:
        rank = queue.popleft()
        waiting.discard(rank)
        ops, now, i = order[rank], free[rank], at[rank]
        while i < len(ops):
            op = ops[i]
            kind, stage, m = op
            if kind != "W":
                results, neighbour = (outputs, stage - 1) if kind == "F" else (gradients, stage + 1)
                if 0 <= neighbour <= last:
                    arrival = results[neighbour][m]
                    if arrival is None:
                        break
                    now = max(now, arrival + (costs.transfer if place[neighbour] != rank else 0.0))
            end = now + seconds[kind][stage]
            spans[rank].append(Span(op, now, end))
            now, i = end, i + 1
            if kind != "W":
                results[stage][m] = end
        moved, at[rank], free[rank] = i > at[rank], i, now
        if moved:  # its neighbours may go on
            queue.extend(beside[rank] - waiting)
            waiting |= beside[rank]
    stuck = [(rank, order[rank][i]) for rank, i in enumerate(at) if i < len(order[rank])]
    if stuck:
        raise ValueError("the ranks wait for each other: " + ", ".join(f"rank {r} at {op}" for r, op in stuck))
    memory = tuple(_held(done, costs.activation / schedule.virtual, costs.after_input) for done in spans)
    return Timeline(schedule, tuple(map(tuple, spans)), memory)


def _held(spans: Sequence[Span], share: float, after_input: float) -> tuple[tuple[float, float], ...]:
    """Activations over time: F adds them when it starts; B, or I and W, give them back when they end."""
    change = {"F": share, "B": -share, "I": -share * (1 - after_input), "W": -share * after_input}
    changes = [(span.start if span.op.kind == "F" else span.end, change[span.op.kind]) for span in spans]
    changes.sort()  # at the same moment memory is given back first
    totals = itertools.accumulate(amount for _, amount in changes)
    return tuple((time, total) for (time, _), total in zip(changes, totals, strict=True))


def ideal_seconds(schedule: Schedule, costs: Costs | None = None) -> float:
    """Seconds of the rank with the most work, if it never waited."""
    seconds = (costs or Costs()).by_stage(schedule)
    return max(sum(seconds[op.kind][op.stage] for op in ops) for ops in schedule.order)


def partition(costs: Sequence[float], stages: int) -> list[int]:
    """Cut layers into `stages` runs of neighbours so that the most expensive run is as cheap as it can be.

    `costs` has that of each layer, in order. Returns the number of layers of each stage, at least one.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"stages must be from 1 to the {layers} layers, got {stages}")
    total = [0.0, *itertools.accumulate(costs)]
    best = total[:]  # of the first n layers on one stage
    cuts: list[list[int]] = []
    for stage in range(2, stages + 1):
        new, cut = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for n in range(stage, layers + 1):
            new[n], cut[n] = min((max(best[k], total[n] - total[k]), k) for k in range(stage - 1, n))
        best, cuts = new, [*cuts, cut]
    sizes, end = [], layers
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return [end, *reversed(sizes)]
