"""Checks of the exercises on pipeline parallelism.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Orders and schedules are simulated, so that any with the right time
and memory passes. Engines run on real ranks in float64, equal to one process to 1e-12; the stages that they are given
note every forward and backward, and count the micro-batches that autograd keeps something of.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_utils.check import (
    TIMEOUT,
    Exercise,
    Outcome,
    checked,
    close,
    load_hints,
    paper_problem,
    show,
)
from course_utils.check.compare import number, whole_number, whole_numbers
from course_utils.check.training import EXACT, average, compare, exact, gradients_of
from course_utils.ranks import Ledger, interceptor, record

from .pipeline import Costs, Op, Schedule, Timeline, gpipe, one_f_one_b, partition, simulate

__all__ = [
    "HINTS", "balance", "bubble", "one_f_one_b_order", "own_schedule", "run_order",
]

HINTS = load_hints(__file__)

# ------------------------------------------------------------------------------------------------ orders, simulated

Order = list[tuple[str, int]]  # of one rank, such as ("F", 0)

_ORDER_CASES = (  # ranks, micro-batches, hint for any failure here
    (2, 4, None), (4, 8, None), (3, 6, "odd"), (5, 7, "odd"), (4, 2, "few"), (5, 3, "few"), (8, 1, "few"),
    (1, 3, "one-rank"), (7, 20, None), (16, 40, None),
)


class _Orders(Exercise):
    """An exercise in which some cases have a hint of their own for whatever is wrong with the orders."""

    def refuse(self, key: str, what: str, rank: int | None = None) -> NoReturn:
        super().refuse(self.fallback if self.fallback and key in self.hints else key, what, rank)


def _pair(op: Any, kinds: str) -> tuple[str, int] | None:
    if not isinstance(op, list | tuple) or len(op) != 2:
        return None
    kind, m = op[0], whole_number(op[1])
    return (kind, m) if isinstance(kind, str) and kind in tuple(kinds) and m is not None else None


def _simulated(exercise: Exercise, got: Sequence[Any], kinds: str, count: int, costs: Costs) -> Timeline:
    """The orders of all ranks in time; refuses those in another form, incomplete, too early or in each other's way."""
    orders = []
    for rank, ops in exercise.each(got):
        pairs = [_pair(op, kinds) for op in ops] if isinstance(ops, list | tuple) else [None]
        exercise.require(None not in pairs, "form", f"the function returned {str(ops)[:100]}.")
        orders.append(tuple(Op(kind, rank, m) for kind, m in pairs))
    try:
        return simulate(Schedule("yours", count, tuple(range(len(orders))), tuple(orders)), costs)
    except ValueError as error:
        text = str(error)
        key = "deadlock" if "wait for each other" in text else "early" if "comes before" in text else "incomplete"
        text = re.sub(r"\b\d+([FBIW]\d+)\b", r"\1", text)  # a rank has one stage: its number says nothing here
        exercise.refuse(key, f"{text}.")


def _written(ops: Sequence[tuple], most: int = 24) -> str:
    """Operations, of which the kind comes first and the micro-batch last, in one line."""
    return " ".join(f"{op[0]}{op[-1]}" for op in ops[:most]) + (" …" if len(ops) > most else "")


def _waits(timeline: Timeline, most: int = 5, unit: str = "") -> str:
    """The longest times that ranks wait between two operations."""
    pairs = [(rank, *pair) for rank, spans in enumerate(timeline.spans) for pair in itertools.pairwise(spans)]
    waits = sorted((before.end - after.start, after.start, rank, after.op) for rank, before, after in pairs)
    lines = [
        f"rank {rank} waits {-negative:g}{unit} for {op.kind}{op.microbatch}, until {start:g}{unit}"
        for negative, start, rank, op in waits[:most]
        if negative < -1e-9
    ]
    return "\n".join(lines) or "No rank waits between two operations."


@checked
def one_f_one_b_order(fn: Callable) -> None:
    """Check ``fn(rank, ranks, microbatches)``: the order of one rank; all ranks' orders together are simulated."""
    exercise = _Orders("Exercise 1", HINTS["one_f_one_b_order"])
    for ranks, count, fallback in _ORDER_CASES:
        exercise.case, exercise.fallback = f"{ranks} ranks, {count} micro-batches", fallback
        got = [exercise.call(fn, rank, ranks, count) for rank in range(ranks)]
        timeline = _simulated(exercise, got, "FB", count, Costs())
        alike = _known_order([[(op.kind, op.microbatch) for op in ops] for ops in timeline.schedule.order], count)
        for rank, held in exercise.each(timeline.peak):
            limit = min(count, ranks - rank)
            what = f"{held:.0f} micro-batches are held at a time; the target is {limit}."
            ops = _written(timeline.schedule.order[rank])
            exercise.require(held <= limit, alike or "peak", f"{what}\n\n{ops}")
        target = 3 * (count + ranks - 1)
        what = f"the step takes {timeline.seconds:g} (F takes 1, B takes 2); the target is {target}."
        exercise.require(timeline.seconds <= target + 1e-9, alike or "slow", f"{what}\n\n{_waits(timeline)}")
    print("Exercise 1 passed for 1 to 16 ranks: as fast as 1F1B, with no more than ranks - rank micro-batches held.")


def _known_order(orders: Sequence[Order], count: int) -> str | None:
    """The hint for orders that are those of another schedule."""
    if any(ops != orders[0] for ops in orders):
        return None
    if orders[0] == [(kind, m) for m in range(count) for kind in "FB"]:
        return "naive"
    return "gpipe" if orders[0] == [(kind, m) for kind in "FB" for m in range(count)] else "rank-ignored"


TARGET = Costs(2, 3, 1)  # of the puzzle, in ms
RANKS, COUNT, LIMIT, SECONDS = 4, 8, 5, 59


@checked
def own_schedule(fn: Callable) -> None:
    """Check ``fn()``: a schedule of 4 ranks and 8 micro-batches under limits of time and memory."""
    exercise = Exercise("Exercise 5", HINTS["own_schedule"])
    got = exercise.call(fn)
    form = isinstance(got, list | tuple) and len(got) == RANKS
    exercise.require(form, "form", f"the function returned {str(got)[:100]}.")
    timeline = _simulated(exercise, got, "FBIW", COUNT, TARGET)
    orders = timeline.schedule.order
    for rank, held in exercise.each(timeline.peak):
        what = f"{held:.0f} activations are held at a time; the target is {LIMIT}. Time: {timeline.seconds:g} ms."
        exercise.require(held <= LIMIT, "memory", f"{what}\n\n{_written(orders[rank], 40)}")
    split = any(op.kind == "W" for ops in orders for op in ops)
    what = f"the step takes {timeline.seconds:g} ms; the target is {SECONDS} ms."
    on_time = timeline.seconds <= SECONDS + 1e-9
    exercise.require(on_time, "slow" if split else "unsplit", f"{what}\n\n{_waits(timeline, unit=' ms')}")
    peak = ", ".join(f"{held:.0f}" for held in timeline.peak)
    print(f"Exercise 5 passed: {timeline.seconds:g} ms, activations {peak}.")


# ------------------------------------------------------------------------------------------------ stages with notes

WORDS, WIDTH, BATCH, LENGTH = 11, 6, 2, 5


class Stage(nn.Module):
    """A stage of a small model: the first embeds words, the last has the head; weights depend on the rank only."""

    def __init__(self, rank: int, ranks: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3000 + rank)
            self.embedding = nn.Embedding(WORDS, WIDTH) if rank == 0 else nn.Identity()
            self.block = nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, WORDS) if rank == ranks - 1 else nn.Identity()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(self.embedding(x))))


@dataclass
class Notes:
    """What a stage notes of one step; its calls count from 0.

    Attributes
    ----------
    seen : list of Tensor
        The input of each call.
    events : list of (str, int)
        ``F`` or ``B``, and the number of the call.
    messages : list of Counter
        At the start of each event: messages sent and messages received until then, by ``("send" or "recv", peer)``.
    arrived : dict
        Number of the call to the gradient of its output.
    peak, inputs : int
        The most calls at a time of which autograd keeps something, and the most inputs that are in memory.
    overwritten : bool
        Whether backward found that something kept for it had changed.
    """

    seen: list[Tensor] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    messages: list[Counter] = field(default_factory=list)
    arrived: dict[int, Tensor] = field(default_factory=dict)
    peak: int = 0
    inputs: int = 0
    overwritten: bool = False


class _Kept:
    """What autograd keeps of one call in place of a tensor; counts while it lives, and notices a change."""

    def __init__(self, tensor: Tensor, alive: Counter, call: int):
        self.tensor, self.copy, self.alive, self.call = tensor, tensor.detach().clone(), alive, call
        alive[call] += 1

    def __del__(self):
        self.alive[self.call] -= 1


class Watched(Stage):
    """A stage that notes its forwards and backwards in order, and how many of its calls are in memory at a time."""

    def __init__(self, rank: int, ranks: int, ledger: Ledger):
        super().__init__(rank, ranks)
        self.notes, self._ledger = Notes(), ledger
        self._storages: list = []  # of the inputs, as weak references
        self._alive: Counter = Counter()

    def forward(self, x: Tensor) -> Tensor:
        from torch.multiprocessing.reductions import StorageWeakRef

        notes, call = self.notes, len(self.notes.seen)
        _require_tensor("the stage", x)
        self._note("F", call)
        notes.seen.append(x.detach().clone())
        self._storages.append(StorageWeakRef(x.untyped_storage()))
        notes.inputs = max(notes.inputs, len({s.cdata for s in self._storages if not s.expired()}))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: _Kept(t, self._alive, call), self._unpacked):
            y = super().forward(x)
        notes.peak = max(notes.peak, sum(count > 0 for count in self._alive.values()))
        if y.requires_grad:
            y.register_hook(lambda gradient: self._backward(call, gradient))
        return y

    def _unpacked(self, kept: _Kept) -> Tensor:
        self.notes.overwritten |= not torch.equal(kept.tensor, kept.copy)
        return kept.tensor

    def _backward(self, call: int, gradient: Tensor) -> None:
        self._note("B", call)
        self.notes.arrived[call] = gradient.detach().clone()

    def _note(self, kind: str, call: int) -> None:
        under_way = interceptor.unfinished()
        done = [e for e in self._ledger if e.op == "send" or all(e is not other for other in under_way)]
        self.notes.events.append((kind, call))
        self.notes.messages.append(Counter((e.op, e.peer) for e in done))


def _require_tensor(user: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{user} got {value} instead of a tensor")


def _loss(output: Tensor, target: Tensor) -> Tensor:
    _require_tensor("loss_fn", target)
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


# ------------------------------------------------------------------------------------------------ engines


@dataclass
class _Step:
    """What one rank brings back from a step with the learner's engine."""

    loss: Any
    gradients: dict[str, Tensor]
    missing: bool  # whether a parameter has no gradient
    notes: Notes
    unwaited: int  # operations that nobody has waited for


def _step(words: Tensor, fn: Callable, orders: list[Order]) -> _Step:
    """Run the learner's engine on one rank, with its order."""
    import torch.distributed as dist

    rank, n, count = dist.get_rank(), dist.get_world_size(), len(words)
    inputs = [x.clone() for x in words[..., :-1]] if rank == 0 else [None] * count
    targets = [y.clone() for y in words[..., 1:]] if rank == n - 1 else [None] * count
    like = torch.empty(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    with record() as ledger:
        stage = Watched(rank, n, ledger)
        loss = fn(stage, list(orders[rank]), inputs, targets, _loss, like)
    loss = loss.detach() if isinstance(loss, Tensor) else loss
    missing = any(p.grad is None for p in stage.parameters())
    return _Step(loss, gradients_of(stage), missing, stage.notes, len(interceptor.unfinished()))


@dataclass
class _Whole:
    """The whole batch in one process, by rank: gradients, those of each micro-batch, and what passes boundaries."""

    loss: float
    gradients: list[dict[str, Tensor]]
    each: list[list[dict[str, Tensor]]]  # by rank and micro-batch; they add up to the gradients
    inputs: list[list[Tensor]]
    arriving: list[list[Tensor]]  # gradient of each stage's output, by rank and micro-batch


def _whole(words: Tensor, ranks: int) -> _Whole:
    stages = [Stage(rank, ranks) for rank in range(ranks)]
    each, inputs, arriving = ([[] for _ in stages] for _ in range(3))
    total = 0.0
    for part in words:
        x, outputs = part[..., :-1], []
        for rank, stage in enumerate(stages):
            stage.zero_grad()
            inputs[rank].append(x.detach())
            x = stage(x)
            x.retain_grad()
            outputs.append(x)
        loss = _loss(x, part[..., 1:]) / len(words)
        loss.backward()
        total += loss.item()
        for rank, stage in enumerate(stages):
            each[rank].append(gradients_of(stage))
            arriving[rank].append(outputs[rank].grad)
    net = nn.Sequential(*stages)
    net.zero_grad()
    _loss(net(words[..., :-1].flatten(0, 1)), words[..., 1:].flatten(0, 1)).backward()
    return _Whole(total, [gradients_of(stage) for stage in stages], each, inputs, arriving)


_CAUSES = {  # of hangs and of errors: pattern of the text, and hint
    "hang": {
        "send to rank None|recv from any rank": "neighbours",
        r"(?m)^\d+\s+returned\s+send to rank": "not-waited",
    },
    "error": {
        "instead of a tensor": "no-input",
        "but got <class 'NoneType'>|'NoneType' object has no attribute|expected.*NoneType": "requires-grad",
        "leaf Variable .* in an in-place operation": "one-buffer",
        "backward through the graph a second time": "graph-twice",
    },
}


class _Engine(Exercise):
    """An exercise whose answer runs a pipeline: names the usual causes of errors and of waiting."""

    def refuse(self, key: str, what: str, rank: int | None = None) -> NoReturn:
        if self.fallback is None:
            if key == "hang" and "blocking" in self.hints and _neighbours_send(what):
                key = "blocking"
            causes = _CAUSES.get(key, {}).items()
            key = next((cause for pattern, cause in causes if re.search(pattern, what)), key)
        super().refuse(key, what, rank)


def _neighbours_send(what: str) -> bool:
    """Whether the table of a hang shows two ranks that wait in a send to each other."""
    rows = re.findall(r"^(\d+)\s+waits\s+send to rank (\d+)(.*)$", what, re.M)
    sends = {(int(a), int(b)) for a, b, line in rows if "recv(" not in line}  # an earlier isend, named in vain
    return any((b, a) in sends for a, b in sends)


def _stepped(exercise: Exercise, n: int, count: int, fn: Callable, name: str) -> tuple[list[Outcome], _Whole]:
    """Run the engine on ``n`` ranks with ``count`` micro-batches, in the order ``name``.

    Refuses a result that is not that of one process, and other messages than one for each micro-batch, boundary and
    direction.
    """
    generator = torch.Generator().manual_seed(100 + count)
    words = torch.randint(WORDS, (count, BATCH, LENGTH + 1), generator=generator)
    case = f"{count} micro-batches, {name}"
    outcomes = exercise.run(_step, [words] * n, fn, _given(name, n, count), case=case)
    whole = _whole(words, n)
    for rank, outcome in exercise.each(outcomes):
        exercise.communicates(rank, outcome, n)
        _audit_inputs(exercise, outcome.result.notes, whole.inputs[rank])
    for rank, outcome in reversed(list(enumerate(outcomes))):  # a wrong gradient goes on from stage to stage
        _audit_gradients(exercise, rank, outcome.result, whole)
    for rank, outcome in exercise.each(outcomes):
        _audit_messages(exercise, rank, outcome, n, count)
    for rank, outcome in exercise.each(outcomes):
        _audit_loss(exercise, outcome.result.loss, whole.loss if rank == n - 1 else None)
    return outcomes, whole


@checked
def run_order(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(stage, order, inputs, targets, loss_fn, like)``: forwards and backwards in a given order."""
    exercise = _Engine("Exercise 2", HINTS["run_order"], timeout)
    for n, count, name in (
        (2, 4, "1F1B"), (2, 3, "last in, first out"), (3, 5, "1F1B"), (4, 2, "1F1B"), (4, 7, "1F1B"), (3, 4, "GPipe"),
        (1, 3, "1F1B"),
    ):
        outcomes, whole = _stepped(exercise, n, count, fn, name)
        orders = _given(name, n, count)
        for rank, outcome in exercise.each(outcomes):
            _audit_order(exercise, rank, outcome.result.notes, orders[rank], whole.inputs[rank])
    exercise.passed("equal to one process to 1e-12, and no micro-batch is kept for longer than the order says.")


def _given(name: str, ranks: int, count: int) -> list[Order]:
    if name == "last in, first out":
        return [[*(("F", m) for m in range(count)), *(("B", m) for m in reversed(range(count)))]] * ranks
    schedule = {"1F1B": one_f_one_b, "GPipe": gpipe}[name](ranks, count)
    return [[(op.kind, op.microbatch) for op in ops] for ops in schedule.order]


def _names(seen: Sequence[Tensor], right: Sequence[Tensor]) -> list[int | None]:
    """Of each call, the micro-batch whose input it got."""
    return [next((m for m, x in enumerate(right) if close(got, x)), None) for got in seen]


def _audit_inputs(exercise: Exercise, notes: Notes, right: Sequence[Tensor]) -> None:
    """Refuse a stage that is not called once with each micro-batch, in memory that stays as it is until backward."""
    calls, names = len(notes.seen), _names(notes.seen, right)
    called = f"the stage was called {calls} times for {len(right)} micro-batches."
    exercise.require(calls >= len(right), "whole-batch", called)
    if None in names:
        what = f"call {names.index(None) + 1} of the stage got an input that no micro-batch has there."
        exercise.refuse(exercise.fallback or "not-received", what)
    exercise.require(not notes.overwritten, "one-buffer", "what the stage had kept for backward has changed since.")
    exercise.require(len(set(names)) == calls, "forwards", called)


def _audit_gradients(exercise: Exercise, rank: int, step: _Step, whole: _Whole) -> None:
    """Compare with one process; the stages behind this one are right."""
    right, each = whole.gradients[rank], whole.each[rank]
    if exercise.fallback or all(exact(step.gradients[name], value) for name, value in right.items()):
        return compare(exercise, rank, step.gradients, right, {}, "the gradient")
    names, arriving = _names(step.notes.seen, whole.inputs[rank]), whole.arriving[rank]
    for call, gradient in step.notes.arrived.items():
        m, others = names[call], [k for k, other in enumerate(arriving) if close(gradient, other)]
        if others and m not in others:
            what = f"the gradient of micro-batch {others[0]} went into the output of micro-batch {m}."
            exercise.refuse("wrong-microbatch", what, rank)
    traps, default, count = {}, "value", len(each)
    if rank < len(whole.gradients) - 1:
        nothing = step.missing or not any(bool(g.any()) for g in step.gradients.values())
        default = "last-stage-only" if nothing else "input-gradient"
    if count > 1:
        traps = {
            "sum": average([right], 1 / count), "divided-twice": average([right], count),
            "one-microbatch": [average([part], divisor) for part in each for divisor in (1, 1 / count)],
        }
    compare(exercise, rank, step.gradients, right, traps, "the gradient", default)


def _audit_messages(exercise: Exercise, rank: int, outcome: Outcome, n: int, count: int) -> None:
    """Refuse collectives, messages to others than neighbours, another number or size of them, and no wait."""
    exercise.audit(outcome.ledger, {"send", "recv"}, keys={"other-calls": "collective"})
    beside = [r for r in (rank - 1, rank + 1) if 0 <= r < n]
    for peer in sorted({e.peer for e in outcome.ledger if e.peer is not None} - set(beside)):
        exercise.refuse("neighbours", f"the ledger shows messages with rank {peer}.")
    size = count * 8 * BATCH * LENGTH * WIDTH
    keys = dict.fromkeys(("not-distributed", "too-many-calls", "too-few-calls"), "messages")
    for peer in beside:
        there = [e for e in outcome.ledger if (e.op, e.peer) == ("send", peer)]
        exercise.audit(there, calls=(count, count), sent=(size, size), where=f"to rank {peer}: ", keys=keys)
    unwaited = outcome.result.unwaited
    exercise.require(not unwaited, "not-waited", f"{unwaited} of {len(outcome.ledger)} operations are not waited for.")


def _audit_loss(exercise: Exercise, got: Any, right: float | None) -> None:
    """Refuse another loss than that of one process, and one on a rank that has none to return (``right`` is None)."""
    value = number(got.reshape(()) if isinstance(got, Tensor) and got.numel() == 1 else got)
    if right is None or value is None:
        return exercise.require(got is None and right is None, "loss", f"this rank returned {show(got)}.")
    lines = f"\n  one process  {right:.6g}\n  this rank    {value:.6g}"
    exercise.require(math.isclose(value, right, rel_tol=EXACT, abs_tol=EXACT), "loss", f"the loss is wrong.{lines}")


def _audit_order(exercise: Exercise, rank: int, notes: Notes, order: Order, right: Sequence[Tensor]) -> None:
    """Refuse another order than the given one, and more micro-batches in memory than it needs."""
    names = _names(notes.seen, right)
    done = [(kind, names[call]) for kind, call in notes.events]
    what = f"the order is another.\n  expected  {_written(order)}\n  got       {_written(done)}"
    exercise.require(done == order, "order", what)
    limit = max(itertools.accumulate({"F": 1, "B": -1}[kind] for kind, _ in order))
    what = f"{notes.peak} micro-batches are in memory at a time; the order needs {limit}."
    exercise.require(notes.peak <= limit, "kept", what)
    if rank:  # one more, which a variable may still name
        what = f"the inputs of {notes.inputs} micro-batches are in memory at a time; the order needs {limit}."
        exercise.require(notes.inputs <= limit + 1, "kept", what)


# ------------------------------------------------------------------------------------------------ stages of equal cost

_BALANCE_CASES: tuple[tuple[list[float], int], ...] = (
    ([1, 1, 1, 1, 1, 1, 1, 1], 4),
    ([1, 1, 1, 1, 1, 1, 1, 1, 4], 3),
    ([5, 7, 3, 2, 2, 1, 1, 5, 8, 3], 4),
    ([2, 3, 1, 4, 1, 1, 6, 2, 2, 5], 4),
    ([1] * 24 + [3.5], 8),
    ([0.5] + [1] * 12 + [2.5], 4),
    ([5, 1, 1, 1, 1, 1, 5, 1], 3),
    ([9, 1, 1, 1, 1], 5),
    ([3, 1, 2], 1),
    ([0.7, 1.9, 2.2, 0.4, 3.1, 1.3, 0.9, 2.8, 1.1, 0.6, 2.4, 1.7, 0.8, 3.3], 5),
    ([4, 4, 1, 1, 1, 1, 1, 1, 4], 3),
    ([1.54, 1.32, 2.51, 2.91, 1.95, 0.54, 0.53], 3),
)


@checked
def balance(fn: Callable) -> None:
    """Check ``fn(costs, stages)``: numbers of layers; any cut whose slowest stage costs as little as can be passes."""
    exercise = Exercise("Exercise 3", HINTS["balance"])
    for costs, stages in _BALANCE_CASES:
        exercise.case = f"costs {', '.join(f'{c:g}' for c in costs[:14])}{', …' * (len(costs) > 14)}, {stages} stages"
        got = exercise.call(fn, list(costs), stages)
        sizes, what = whole_numbers(got), f"the function returned {str(got)[:100]}."
        exercise.require(sizes is not None and len(sizes) == stages, "form", what)
        exercise.require(sum(sizes) == len(costs), "missing", what)
        exercise.require(min(sizes) > 0, "empty-stage", what)
        best, dearest = max(_sums(costs, partition(costs, stages))), max(_sums(costs, sizes))
        if dearest > best + 1e-9:
            key = next((key for key, cuts in _CUTS.items() if sizes in cuts(costs, stages)), "not-best")
            sums = ", ".join(f"{x:g}" for x in _sums(costs, sizes))
            exercise.refuse(key, f"{what} The stages cost {sums}; the slowest one can cost {best:g}.")
    print("Exercise 3 passed: no cut is better.")


def _sums(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    ends = list(itertools.accumulate(sizes))
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _equal_counts(costs: Sequence[float], stages: int) -> list[list[int]]:
    each, rest = divmod(len(costs), stages)
    first = [each + (s < rest) for s in range(stages)]
    return [first, first[::-1], [each] * (stages - 1) + [each + rest], [each + rest] + [each] * (stages - 1)]


_FULL: tuple[Callable[[float, float, float], bool], ...] = (  # of a stage's load, the next layer's cost, and the mean
    lambda load, cost, mean: load + cost > mean,
    lambda load, cost, mean: load >= mean,
    lambda load, cost, mean: load + cost - mean > mean - load,
)


def _greedy_cuts(costs: Sequence[float], stages: int) -> list[list[int]]:
    """What looking only forward gives: stages filled one after the other, and cuts at each share of the total."""
    layers, total, found = len(costs), sum(costs), []
    for full, anew in itertools.product(_FULL, (False, True)):  # whether the mean is that of what is left
        sizes, start = [], 0
        for left in range(stages, 1, -1):
            mean = sum(costs[start:]) / left if anew else total / stages
            end = start + 1
            while end <= layers - left and not full(sum(costs[start:end]), costs[end], mean):
                end += 1
            sizes.append(end - start)
            start = end
        found.append([*sizes, layers - start])
    sums = list(itertools.accumulate(costs))
    for more in (0, 1):
        ends = [more + sum(x < total * s / stages - 1e-12 for x in sums) for s in range(1, stages)]
        found.append([b - a for a, b in itertools.pairwise([0, *ends, layers])])
    return found


def _even_cuts(costs: Sequence[float], stages: int) -> list[list[int]]:
    """The cuts with the smallest squares, and those whose cheapest stage costs most."""
    if math.comb(len(costs) - 1, stages - 1) > 5000:
        return []
    cuts = [
        [b - a for a, b in itertools.pairwise((0, *ends, len(costs)))]
        for ends in itertools.combinations(range(1, len(costs)), stages - 1)
    ]
    squares = [sum(x * x for x in _sums(costs, sizes)) for sizes in cuts]
    least = [-min(_sums(costs, sizes)) for sizes in cuts]
    return [
        sizes for scores in (squares, least)
        for sizes, score in zip(cuts, scores, strict=True) if score <= min(scores) + 1e-9
    ]


_CUTS = {"equal-counts": _equal_counts, "greedy": _greedy_cuts, "most-even": _even_cuts}

# ------------------------------------------------------------------------------------------------ paper problems


def _interleaves(schedule: str, ranks: int, microbatches: int, virtual: int, gb: float) -> bool:
    """Whether stages and micro-batches are such as the schedule can have."""
    if schedule != "interleaved":
        return virtual == 1
    return virtual > 1 and microbatches % ranks == 0


@paper_problem(
    "Exercise 4",
    cases=[
        ("GPipe", 8, 32, 1, 0.5), ("1F1B", 4, 16, 1, 0.2), ("1F1B", 8, 32, 1, 0.5), ("interleaved", 8, 32, 4, 0.5),
        ("1F1B", 8, 4, 1, 0.5), ("interleaved", 4, 4, 2, 0.2), ("GPipe", 1, 6, 1, 0.3),
        ("interleaved", 16, 64, 3, 0.1),
    ],
    slips={
        "of-ideal": "(v * m + p - 1)  ->  (v * m)",
        "virtual-ignored": "(v * m + p - 1)  ->  (m + p - 1)",
        "ranks": [{"(p - 1) / (v * m + p - 1)": "p / (v * m + p)"}, "(p - 1) / (v  ->  p / (v"],
        "work": "(p - 1) / (v  ->  v * m / (v",
        "fraction": "100 * share  ->  share",
        "gpipe-memory": '"GPipe": m  ->  "GPipe": min(m, p)',
        "1f1b-memory": '"1F1B": min(m, p)  ->  "1F1B": m',
        "few": [{"min(m, p)": "p", "min(m, pieces / v)": "pieces / v"}, "min(m, p)  ->  p",
                "min(m, pieces / v)  ->  pieces / v"],
        "interleaved-memory": "min(m, pieces / v)  ->  min(m, p)",
        "pieces": [f"min(m, pieces / v)  ->  {held}" for held in (
            "min(v * m, pieces)", "pieces", "v * min(m, p)", "v * p", "min(m, pieces)", "min(m, 2 * p - 1)",
        )],
        "divided": "min(m, pieces / v)  ->  min(m, p) / v",
    },
    units=["% of the time", "GB"],
    hints=HINTS["bubble"],
    allowed=_interleaves,
)
def bubble(schedule, ranks, microbatches, virtual, gb):
    """Check ``fn(schedule, ranks, microbatches, virtual, gb)``: per cent of bubble, and GB of activations on rank 0."""
    p, m, v = ranks, microbatches, virtual
    share = (p - 1) / (v * m + p - 1)
    pieces = 2 * (p - 1) + (v - 1) * p + 1
    held = {"GPipe": m, "1F1B": min(m, p), "interleaved": min(m, pieces / v)}
    return 100 * share, gb * held[schedule]
