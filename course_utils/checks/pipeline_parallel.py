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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..pipeline import Costs, Op, Schedule, Timeline, gpipe, one_f_one_b, partition, simulate
from . import TIMEOUT, Exercise, Outcome, checked, close, paper_problem, show
from .training import compare, difference, exact, gradients_of

__all__ = [
    "HINTS", "balance", "bubble", "enough_microbatches", "one_f_one_b_order", "own_schedule", "run_gpipe", "run_order",
]  # fmt: skip

_FORM = "Return a list of pairs such as ('F', 0): the kind of operation, and the number of the micro-batch from 0."
_ENGINE = {
    "requires-grad": "Where there is no gradient, x.grad is None. Autograd computes one only for a leaf that asks for "
    "it: call requires_grad_() on what arrived, before the stage gets it.",
    "one-buffer": "All micro-batches were received into the same tensor. What the stage keeps for backward is then "
    "overwritten by the next one. Receive each into a tensor of its own.",
    "not-received": "What the stage got is not what the stage before it has computed. irecv returns at once: wait for "
    "it before you use the tensor.",
    "neighbours": "A stage talks to the stage before it and the one behind it, and to nobody else. The first has none "
    "before it, the last none behind it.",
    "collective": "An operation of the whole group was used. A stage's output concerns one neighbour: send and "
    "receive it point to point.",
    "whole-batch": "The micro-batches went through the stage in one piece, so that the next stage waits for all of "
    "them. Call the stage once for each.",
    "forwards": "The stage was called more than once for a micro-batch. One call keeps what backward needs.",
    "messages": "One message for each micro-batch, boundary and direction is what is needed; here it is another "
    "number.",
    "not-waited": "isend and irecv return at once, and what has been started must end before the function returns: "
    "gloo may drop it otherwise, or a tensor is used again too early. Keep all handles, and wait for them at the end.",
    "loss": "The gradients are right; what is returned is not the loss of the whole batch. That is the mean over the "
    "micro-batches, on the last rank.",
    "sum": "The gradients are too large by the number of micro-batches: each brings the mean of its own samples, and "
    "backward adds them up. Divide the loss of each by their number before backward.",
    "divided-twice": "The gradients are too small by the number of micro-batches: they are divided by it twice.",
    "one-microbatch": "The gradients are those of one micro-batch only. backward adds to p.grad; nothing may clear or "
    "overwrite it between micro-batches.",
    "last-stage-only": "Only the last stage has gradients. Each stage sends the gradient of its input to the stage "
    "before it, and that one continues backward from its output.",
    "input-gradient": "The stages behind this one have the right gradients. What came back is not the gradient of "
    "the loss with respect to this stage's output: send x.grad of the input x, of the same micro-batch.",
    "graph-twice": "backward went through the same graph twice. Each micro-batch has an output of its own: keep all of "
    "them, not only the last.",
    "wrong-microbatch": "The gradient of one micro-batch went into the output of another. Keep input and output "
    "under the number of their micro-batch.",
}

HINTS: dict[str, dict[str, str]] = {
    "one_f_one_b_order": {
        "form": _FORM,
        "incomplete": "Each of the micro-batches goes forward once and back once, on every rank.",
        "early": "A backward comes before the forward of the same micro-batch on the same rank.",
        "deadlock": "Each waits for something that another does later. The ranks before a rank have to be ahead of "
        "it: how many forwards must each have done before its first backward can come?",
        "rank-ignored": "All ranks get the same list. The last can turn round at once; the first has to fill the "
        "pipeline.",
        "gpipe": "This is GPipe's order: all forwards come first, so that the activations of all micro-batches are "
        "held.",
        "naive": "Each micro-batch goes back before the next goes forward, so that one rank works at a time.",
        "peak": "A rank holds more than ranks - rank micro-batches. Every F adds one, every B gives one back.",
        "slow": "The memory is right, but a rank waits that could work. Run further ahead before the first backward.",
        "odd": "Right for 2 and 4 ranks, wrong for an odd number. A rank ^ something, or a half, stands where a "
        "difference belongs.",
        "few": "Right while there are at least as many micro-batches as ranks, wrong for fewer: no rank can run "
        "further ahead than there are micro-batches.",
    },
    "run_gpipe": _ENGINE | {
        "naive": "The gradients are right, but the first rank has one micro-batch in flight at a time: it waits for "
        "each to come back before it starts the next. Send all of them forward first.",
    },
    "run_order": _ENGINE | {
        "order": "The stage was not used in the order that was asked for.",
        "blocking": "Two neighbours send to each other, and neither receives: send waits until the other side takes "
        "the message. Start it with isend, and go on.",
        "kept": "The order is right, but more stays alive than it needs. After backward let go of input, output and "
        "graph of that micro-batch.",
    },
    "balance": {
        "form": "Return the number of layers of each stage: a list of as many whole numbers as there are stages.",
        "missing": "Every layer belongs to one stage: the numbers add up to the number of layers.",
        "empty-stage": "Every stage needs at least one layer.",
        "equal-counts": "Equal numbers of layers are not equal work where layers differ in cost.",
        "greedy": "Filling one stage after the other up to the mean, or cutting where the sum passes its share, looks "
        "only forward: what it leaves over piles up in a later stage. Compare all places of a cut.",
        "most-even": "This comes nearest to the mean over all stages, or lifts the cheapest stage. But a step takes as "
        "long as the dearest stage: only that one counts.",
        "not-best": "There is a cut with a cheaper dearest stage.",
    },
    "bubble": {
        "of-ideal": "(p - 1)/m is the bubble's share of the ideal time, in which nobody waits. Of all time it is less.",
        "virtual-ignored": "With v stages on each rank, a step of the pipeline takes 1/v as long: the bubble shrinks.",
        "ranks": "The last rank begins p - 1 steps after the first, not p.",
        "work": "That is the share in which the ranks work.",
        "fraction": "The docstring asks for per cent.",
        "gpipe-memory": "GPipe begins no backward before the last forward: rank 0 holds all micro-batches.",
        "1f1b-memory": "In 1F1B backward begins as soon as it can: rank 0 never holds more than p micro-batches.",
        "few": "No more can be held than there are micro-batches.",
        "interleaved-memory": "Interleaved, rank 0 runs further ahead than p micro-batches: by p - 1 pieces more.",
        "pieces": "A piece, one of v stages on a rank, keeps 1/v of what a whole rank's layers keep.",
        "divided": "A piece keeps 1/v, but there are v times as many pieces: interleaving does not save activations.",
    },
    "enough_microbatches": {
        "of-ideal": "(p - 1)/m is the bubble's share of the ideal time, in which nobody waits. Of all time it is less.",
        "virtual-ignored": "With v stages on each rank the bubble is v times smaller.",
        "ranks": "The last rank begins p - 1 steps after the first, not p.",
        "round": "The number is not whole, or leaves the bubble too large. Round up.",
        "multiple": "With v > 1 the micro-batches of Megatron-LM's schedule go through in groups of p: their number is "
        "a multiple of p.",
        "multiple-always": "Only interleaving needs a multiple of p. Plain 1F1B takes any number.",
        "nothing": "Without micro-batches nothing is trained: at least 1.",
    },
    "own_schedule": {
        "form": "Return one list for each of the 4 ranks, of pairs such as ('F', 0), ('I', 0), ('W', 0) or ('B', 0).",
        "incomplete": "Each micro-batch needs F and B, or F, I and W, once on every rank.",
        "early": "An operation comes before the one it builds on: F, then I, then W.",
        "deadlock": "Each waits for something that another does later. Neighbours have to take the micro-batches in "
        "orders that fit.",
        "memory": "A rank holds too many activations. F adds one; only W, or B, gives it back.",
        "unsplit": "B is one piece here, and the stage before waits until both of its halves are done. Split it: I is "
        "what the others wait for, W can fill a gap later.",
        "slow": "The memory is right, the time is not yet. The longest waits are listed below: which W could be done "
        "there, or which F could come earlier so that I is there in time?",
    },
}  # fmt: skip

# ------------------------------------------------------------------------------------------------ orders, simulated

_ORDER_CASES = (  # ranks, micro-batches, hint for any failure here
    (2, 4, None), (4, 8, None), (3, 6, "odd"), (5, 7, "odd"), (4, 2, "few"), (5, 3, "few"), (8, 1, "few"),
    (1, 3, "one-rank"), (7, 20, None), (16, 40, None),
)  # fmt: skip


def _pairs(got: Any, kinds: str) -> list[tuple[str, int]] | None:
    """The operations of one rank, or None if they are written in another form."""
    if not isinstance(got, (list, tuple)):
        return None
    for op in got:
        pair = isinstance(op, (list, tuple)) and len(op) == 2 and isinstance(op[0], str) and op[0] in tuple(kinds)
        if not pair or isinstance(op[1], bool) or not isinstance(op[1], int):
            return None
    return [(op[0], op[1]) for op in got]


def _written(ops: Sequence[tuple[str, int]], most: int = 24) -> str:
    return " ".join(f"{kind}{m}" for kind, m in ops[:most]) + (" …" if len(ops) > most else "")


def _timeline(
    refuse: Callable[..., NoReturn], orders: Sequence[Sequence[tuple[str, int]]], count: int, costs: Costs
) -> Timeline:
    """Simulate; refuses orders that are incomplete, come too early or wait for each other."""
    order = tuple(tuple(Op(kind, rank, m) for kind, m in ops) for rank, ops in enumerate(orders))
    try:
        return simulate(Schedule("yours", count, tuple(range(len(order))), order), costs)
    except ValueError as error:
        text = str(error)
        key = "deadlock" if "wait for each other" in text else "early" if "comes before" in text else "incomplete"
        text = re.sub(r"\b\d+([FBIW]\d+)\b", r"\1", text)  # a rank has one stage: its number says nothing here
        refuse(key, f"{text}.")


@checked
def one_f_one_b_order(fn: Callable) -> None:
    """Check ``fn(rank, ranks, microbatches)``: the order of one rank; all ranks' orders together are simulated."""
    exercise = Exercise("Exercise 1", HINTS["one_f_one_b_order"])
    for ranks, count, fallback in _ORDER_CASES:
        exercise.case, exercise.fallback = f"{ranks} ranks, {count} micro-batches", fallback
        _ordered(exercise, [exercise.call(fn, rank, ranks, count) for rank in range(ranks)], ranks, count)
    print("Exercise 1 passed for 1 to 16 ranks: as fast as 1F1B, with no more than ranks - rank micro-batches held.")


def _ordered(exercise: Exercise, got: list, ranks: int, count: int) -> None:
    def refuse(key: str, what: str, rank: int | None = None) -> NoReturn:
        exercise.refuse(exercise.fallback or key, what, rank)

    orders = [_pairs(ops, "FB") for ops in got]
    for rank, ops in enumerate(orders):
        if ops is None:
            refuse("form", f"the function returned {str(got[rank])[:100]}.", rank)
    timeline = _timeline(refuse, orders, count, Costs())
    known = {
        "naive": [(kind, m) for m in range(count) for kind in "FB"],
        "gpipe": [(kind, m) for kind in "FB" for m in range(count)],
    }
    alike = next((key for key, ops in known.items() if all(own == ops for own in orders)), None)
    if alike is None and ranks > 1 and all(ops == orders[0] for ops in orders):
        alike = "rank-ignored"
    for rank, held in enumerate(timeline.peak):
        if held > (limit := min(count, ranks - rank)):
            what = f"{held:.0f} micro-batches are held at a time; the target is {limit}."
            refuse(alike or "peak", f"{what}\n\n{_written(orders[rank])}", rank)
    target = 3 * (count + ranks - 1)
    if timeline.seconds > target + 1e-9:
        what = f"the step takes {timeline.seconds:g} (F takes 1, B takes 2); the target is {target}."
        refuse(alike or "slow", f"{what}\n\n{_waits(timeline)}")


def _waits(timeline: Timeline, most: int = 5, unit: str = "") -> str:
    """The longest times that ranks wait between two operations."""
    gaps = []
    for rank, spans in enumerate(timeline.spans):
        for before, after in itertools.pairwise(spans):
            if after.start - before.end > 1e-9:
                gaps.append((before.end - after.start, after.start, rank, after.op))
    lines = [
        f"rank {rank} waits {-length:g}{unit} for {op.kind}{op.microbatch}, until {start:g}{unit}"
        for length, start, rank, op in sorted(gaps)[:most]
    ]
    return "\n".join(lines) or "No rank waits between two operations."


TARGET = Costs(2, 3, 1)  # of the puzzle, in ms
RANKS, COUNT, LIMIT, SECONDS = 4, 8, 5, 59


@checked
def own_schedule(fn: Callable) -> None:
    """Check ``fn()``: a schedule of 4 ranks and 8 micro-batches under limits of time and memory."""
    exercise = Exercise("Exercise 7", HINTS["own_schedule"])
    got = exercise.call(fn)
    form = isinstance(got, (list, tuple)) and len(got) == RANKS
    exercise.require(form, "form", f"the function returned {str(got)[:100]}.")
    orders = [_pairs(ops, "FBIW") for ops in got]
    for rank, ops in enumerate(orders):
        exercise.require(ops is not None, "form", f"the list begins with {str(got[rank])[:80]}.", rank)
    timeline = _timeline(exercise.refuse, orders, COUNT, TARGET)
    for rank, held in enumerate(timeline.peak):
        what = f"{held:.0f} activations are held at a time; the target is {LIMIT}. Time: {timeline.seconds:g} ms."
        exercise.require(held <= LIMIT, "memory", f"{what}\n\n{_written(orders[rank], 40)}", rank)
    split = any(kind == "W" for ops in orders for kind, _ in ops)
    what = f"the step takes {timeline.seconds:g} ms; the target is {SECONDS} ms."
    on_time = timeline.seconds <= SECONDS + 1e-9
    exercise.require(on_time, "slow" if split else "unsplit", f"{what}\n\n{_waits(timeline, unit=' ms')}")
    peak = ", ".join(f"{held:.0f}" for held in timeline.peak)
    print(f"Exercise 7 passed: {timeline.seconds:g} ms, activations {peak}.")


# ------------------------------------------------------------------------------------------------ stages and engines

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


class _Kept:
    """What autograd keeps of one micro-batch instead of the tensor; counts while it lives."""

    def __init__(self, tensor: Tensor, alive: Counter, call: int):
        self.tensor, self.alive, self.call = tensor, alive, call
        alive[call] += 1

    def __del__(self):
        self.alive[self.call] -= 1


class Watched(Stage):
    """A stage that notes its forwards and backwards in order, and how many of its calls are in memory at a time."""

    def __init__(self, rank: int, ranks: int):
        super().__init__(rank, ranks)
        self.events: list[tuple[str, int]] = []  # kind and number of the call
        self.seen: list[Tensor] = []
        self.arrived: dict[int, Tensor] = {}  # gradient of the output, by call
        self.peak = self.inputs = 0
        self.shared = False  # an input lies where one lies that backward still needs
        self._storages: list = []
        self._alive: Counter = Counter()

    def forward(self, x: Tensor) -> Tensor:
        from torch.multiprocessing.reductions import StorageWeakRef

        call = len(self.seen)
        self.seen.append(x.detach().clone())
        self.events.append(("F", call))
        storage = StorageWeakRef(x.untyped_storage())
        needed = [earlier for i, earlier in enumerate(self._storages) if self._alive[i] and not earlier.expired()]
        self.shared |= any(earlier.cdata == storage.cdata for earlier in needed)
        self._storages.append(storage)
        self.inputs = max(self.inputs, len({s.cdata for s in self._storages if not s.expired()}))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: _Kept(t, self._alive, call), lambda kept: kept.tensor):
            y = super().forward(x)
        self.peak = max(self.peak, sum(count > 0 for count in self._alive.values()))
        if y.requires_grad:
            y.register_hook(lambda gradient: self._backward(call, gradient))
        return y

    def _backward(self, call: int, gradient: Tensor) -> None:
        self.events.append(("B", call))
        self.arrived[call] = gradient.detach().clone()


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class _Noted:
    """In place of a method: adds to a list whenever the method is looked up, and stands in no call stack."""

    def __init__(self, method: Any, noted: list):
        self.method, self.noted = method, noted

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        self.noted.append(1)
        return self.method.__get__(owner, kind)


@contextmanager
def _counted_waits() -> Iterator[list]:
    """Yield a list that grows by one whenever this rank waits for an operation to end."""
    import torch.distributed as dist

    waits, wait = [], dist.Work.wait
    dist.Work.wait = _Noted(wait, waits)
    try:
        yield waits
    finally:
        dist.Work.wait = wait


def _engine(words: Tensor, fn: Callable, order: list | None) -> dict:
    """One rank's step with the learner's engine."""
    import torch.distributed as dist

    rank, n, count = dist.get_rank(), dist.get_world_size(), len(words)
    stage = Watched(rank, n)
    inputs = [x.clone() for x in words[..., :-1]] if rank == 0 else [None] * count
    targets = [y.clone() for y in words[..., 1:]] if rank == n - 1 else [None] * count
    like = torch.empty(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    with _counted_waits() as waits:
        loss = fn(stage, *([] if order is None else [order]), inputs, targets, _loss, like)
    return {
        "loss": loss.detach() if isinstance(loss, Tensor) else loss, "gradients": gradients_of(stage),
        "missing": [name for name, p in stage.named_parameters() if p.grad is None], "seen": stage.seen,
        "events": stage.events, "arrived": stage.arrived, "peak": stage.peak, "inputs": stage.inputs,
        "shared": stage.shared, "waits": len(waits),
    }  # fmt: skip


@dataclass
class _Whole:
    """The whole batch in one process, by rank: gradients, those of each micro-batch, and what passes boundaries."""

    loss: float
    gradients: list[dict[str, Tensor]]
    each: list[list[dict[str, Tensor]]]  # by rank and micro-batch; they add up to the gradients
    inputs: list[list[Tensor]]
    arriving: list[list[Tensor]]  # gradient of each stage's output, by rank and micro-batch


def _whole(words: Tensor, ranks: int) -> _Whole:
    count, stages = len(words), [Stage(rank, ranks) for rank in range(ranks)]
    each: list[list] = [[] for _ in stages]
    inputs: list[list] = [[] for _ in stages]
    arriving: list[list] = [[] for _ in stages]
    total = 0.0
    for part in words:
        x, outputs = part[..., :-1], []
        for rank, stage in enumerate(stages):
            stage.zero_grad()
            inputs[rank].append(x.detach())
            x = stage(x)
            x.retain_grad()
            outputs.append(x)
        loss = _loss(x, part[..., 1:]) / count
        loss.backward()
        total += loss.item()
        for rank, stage in enumerate(stages):
            each[rank].append(gradients_of(stage))
            arriving[rank].append(outputs[rank].grad)
    x = words[..., :-1].flatten(0, 1)
    for stage in stages:
        stage.zero_grad()
        x = stage(x)
    _loss(x, words[..., 1:].flatten(0, 1)).backward()
    return _Whole(total, [gradients_of(stage) for stage in stages], each, inputs, arriving)


class _Engine(Exercise):
    """An exercise whose answer runs a pipeline: names the usual causes of errors and of waiting."""

    def refuse(self, key: str, what: str, rank: int | None = None) -> NoReturn:
        super().refuse(self._cause(key, what) if self.fallback is None else key, what, rank)

    def _cause(self, key: str, what: str) -> str:
        if key == "hang":
            rows = re.findall(r"^(\d+)\s+waits\s+send to rank (\d+)(.*)$", what, re.M)
            sends = {(int(a), int(b)) for a, b, line in rows if "recv(" not in line}  # an earlier isend, named in vain
            if "blocking" in self.hints and any((b, a) in sends for a, b in sends):
                return "blocking"
            if re.search("send to rank None|recv from any rank", what):
                return "neighbours"
            if re.search(r"^\d+\s+returned\s+send to rank", what, re.M):
                return "not-waited"
        if key == "error":
            for pattern, cause in (
                ("but got <class 'NoneType'>|'NoneType' object has no attribute|expected.*NoneType", "requires-grad"),
                ("modified by an inplace operation", "one-buffer"),
                ("backward through the graph a second time", "graph-twice"),
            ):
                if re.search(pattern, what):
                    return cause
        return key


def _batches(count: int, ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + count)
    return [torch.randint(WORDS, (count, BATCH, LENGTH + 1), generator=generator)] * ranks


@checked
def run_gpipe(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(stage, inputs, targets, loss_fn, like)``: all micro-batches forward, then all back."""
    exercise = _Engine("Exercise 2", HINTS["run_gpipe"], timeout)
    for n, count in ((2, 4), (3, 5), (4, 2), (1, 3)):
        words = _batches(count, n)
        outcomes = exercise.run(_engine, words, fn, None, case=f"{count} micro-batches")
        _equal_to_whole(exercise, outcomes, _whole(words[0], n))
        if n > 1:
            peak = outcomes[0].result["peak"]
            what = f"{peak} micro-batch is in flight on the first rank at a time."
            exercise.require(peak > 1, "naive", what, 0)
    exercise.passed("equal to one process to 1e-12, one message for each micro-batch, boundary and direction.")


@checked
def run_order(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(stage, order, inputs, targets, loss_fn, like)``: forwards and backwards in a given order."""
    exercise = _Engine("Exercise 3", HINTS["run_order"], timeout)
    for n, count, name in (
        (2, 4, "1F1B"), (2, 3, "last in, first out"), (3, 5, "1F1B"), (4, 2, "1F1B"), (4, 7, "1F1B"), (3, 4, "GPipe"),
        (1, 3, "1F1B"),
    ):  # fmt: skip
        words, order = _batches(count, n), _given(name, n, count)
        outcomes = exercise.run(_in_order, words, fn, order, case=f"{count} micro-batches, {name}")
        whole = _whole(words[0], n)
        _equal_to_whole(exercise, outcomes, whole)
        for rank, outcome in enumerate(outcomes):
            _audit_order(exercise, rank, outcome.result, order[rank], whole)
    exercise.passed("equal to one process to 1e-12, and no micro-batch is kept for longer than the order says.")


def _given(name: str, ranks: int, count: int) -> list[list[tuple[str, int]]]:
    if name == "last in, first out":
        ops = [*(("F", m) for m in range(count)), *(("B", m) for m in reversed(range(count)))]
        return [list(ops) for _ in range(ranks)]
    schedule = {"1F1B": one_f_one_b, "GPipe": gpipe}[name](ranks, count)
    return [[(op.kind, op.microbatch) for op in ops] for ops in schedule.order]


def _in_order(words: Tensor, fn: Callable, orders: list) -> dict:
    import torch.distributed as dist

    return _engine(words, fn, list(orders[dist.get_rank()]))


def _names(seen: Sequence[Tensor], right: Sequence[Tensor]) -> list[int | None]:
    """Of each call, the micro-batch whose input it got."""
    return [next((m for m, x in enumerate(right) if got.shape == x.shape and close(got, x)), None) for got in seen]


def _equal_to_whole(exercise: Exercise, outcomes: list[Outcome], whole: _Whole) -> None:
    """Compare with one process, from the last stage to the first; then look at calls, messages and bytes."""
    n, count = len(outcomes), len(whole.each[0])
    for rank, outcome in enumerate(outcomes):
        exercise.communicates(rank, outcome, n)
    for rank, outcome in enumerate(outcomes):
        calls = len(outcome.result["seen"])
        what = f"the stage was called {calls} times for {count} micro-batches."
        exercise.require(calls >= count, "whole-batch", what, rank)
        _same_activations(exercise, rank, outcome.result, whole)
    for rank in reversed(range(n)):
        _same_gradients(exercise, rank, outcomes[rank].result, whole, n, count)
    for rank, outcome in enumerate(outcomes):
        _audit_messages(exercise, rank, outcome, n, count)
    got, right = outcomes[-1].result["loss"], torch.tensor(whole.loss, dtype=torch.float64)
    got = torch.tensor(got, dtype=torch.float64) if isinstance(got, float) else got
    if not isinstance(got, Tensor) or got.numel() != 1:
        exercise.refuse("loss", f"the function returned {show(got)} on the last rank.", n - 1)
    got = got.reshape(())
    if not exact(got, right):
        exercise.refuse("loss", f"the loss is wrong.{difference(got, right)}", n - 1)


def _same_activations(exercise: Exercise, rank: int, result: dict, whole: _Whole) -> None:
    names = _names(result["seen"], whole.inputs[rank])
    what = "a micro-batch came to the stage in memory that backward of another one still needs."
    exercise.require(not result["shared"], "one-buffer", what, rank)
    if None in names:
        what = f"call {names.index(None) + 1} of the stage got an input that no micro-batch has there."
        exercise.refuse(exercise.fallback or "not-received", what, rank)
    what = f"the stage was called {len(names)} times for {len(set(names))} micro-batches."
    exercise.require(len(set(names)) == len(names), "forwards", what, rank)


def _same_gradients(exercise: Exercise, rank: int, result: dict, whole: _Whole, n: int, count: int) -> None:
    right, got, each = whole.gradients[rank], result["gradients"], whole.each[rank]
    if all(exact(got[name], value) for name, value in right.items()):
        return
    traps, default = {}, "value"
    if exercise.fallback is None:
        names = _names(result["seen"], whole.inputs[rank])
        came = {names[call]: gradient for call, gradient in result["arrived"].items()}
        for m, gradient in came.items():
            others = [k for k in range(count) if k != m and close(gradient, whole.arriving[rank][k])]
            if others and not close(gradient, whole.arriving[rank][m]):
                what = f"the gradient of micro-batch {others[0]} went into the output of micro-batch {m}."
                exercise.refuse("wrong-microbatch", what, rank)
        if rank < n - 1:
            nothing = result["missing"] or not any(bool(g.any()) for g in got.values())
            default = "last-stage-only" if nothing else "input-gradient"
        if count > 1:
            traps = {
                "sum": _scaled(right, count), "divided-twice": _scaled(right, 1 / count),
                "one-microbatch": [_scaled(part, factor) for part in each for factor in (1, count)],
            }  # fmt: skip
    compare(exercise, rank, got, right, traps, "the gradient", default)


def _scaled(tensors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: factor * t for name, t in tensors.items()}


def _audit_messages(exercise: Exercise, rank: int, outcome: Outcome, n: int, count: int) -> None:
    """Refuse collectives, messages to others than neighbours, another number of them, more bytes, and no wait."""
    entries = [e for e in outcome.ledger if e.op != "barrier"]
    others = sorted({e.op for e in entries} - {"send", "recv"})
    exercise.require(not others, "collective", f"the ledger shows {', '.join(others)}.", rank)
    beside = {r for r in (rank - 1, rank + 1) if 0 <= r < n}
    sends = Counter(e.peer for e in entries if e.op == "send")
    strange = sorted(peer for peer in sends if peer not in beside)
    exercise.require(not strange, "neighbours", f"the ledger shows a send to rank {strange[:1]}.", rank)
    for peer in sorted(beside):
        what = f"{sends[peer]} messages to rank {peer}, for {count} micro-batches."
        exercise.require(sends[peer] == count, "messages", what, rank)
    size, enough = outcome.ledger.sent, 8 * BATCH * LENGTH * WIDTH * count * len(beside)
    exercise.require(size <= enough, "too-many-bytes", f"{size} bytes are sent; {enough} are enough.", rank)
    waits, started = outcome.result["waits"], len(entries)
    what = f"{started} operations were started, and {waits} waited for."
    exercise.require(waits >= started, "not-waited", what, rank)


def _audit_order(exercise: Exercise, rank: int, result: dict, order: list[tuple[str, int]], whole: _Whole) -> None:
    """Refuse another order than the given one, and more micro-batches in memory than it needs."""
    names = _names(result["seen"], whole.inputs[rank])
    done = [(kind, names[call]) for kind, call in result["events"]]
    what = f"the order is another.\n  expected  {_written(order)}\n  got       {_written(done)}"
    exercise.require(done == order, "order", what, rank)
    limit = max(itertools.accumulate({"F": 1, "B": -1}[kind] for kind, _ in order))
    what = f"{result['peak']} micro-batches are in memory at a time; the order needs {limit}."
    exercise.require(result["peak"] <= limit, "kept", what, rank)
    if rank:  # one more, which a variable may still name
        what = f"the inputs of {result['inputs']} micro-batches are in memory at a time; the order needs {limit}."
        exercise.require(result["inputs"] <= limit + 1, "kept", what, rank)


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
)


@checked
def balance(fn: Callable) -> None:
    """Check ``fn(costs, stages)``: numbers of layers; any cut whose dearest stage costs as little as can be passes."""
    exercise = Exercise("Exercise 4", HINTS["balance"])
    for costs, stages in _BALANCE_CASES:
        exercise.case = f"costs {', '.join(f'{c:g}' for c in costs[:14])}{', …' * (len(costs) > 14)}, {stages} stages"
        got = exercise.call(fn, list(costs), stages)
        got = list(got) if isinstance(got, (list, tuple)) else got
        what = f"the function returned {str(got)[:100]}."
        form = isinstance(got, list) and len(got) == stages and all(type(k) is int for k in got)
        exercise.require(form, "form", what)
        exercise.require(sum(got) == len(costs), "missing", what)
        exercise.require(min(got) > 0, "empty-stage", what)
        best, dearest = max(_sums(costs, partition(costs, stages))), max(_sums(costs, got))
        if dearest > best + 1e-9:
            slips = ((key, some(costs, stages)) for key, some in _CUTS)
            key = next((key for key, cuts in slips if got in cuts), "not-best")
            sums = ", ".join(f"{x:g}" for x in _sums(costs, got))
            exercise.refuse(key, f"{what} The stages cost {sums}; a dearest one of {best:g} is possible.")
    print("Exercise 4 passed: no cut has a cheaper dearest stage.")


def _sums(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    ends = list(itertools.accumulate(sizes))
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _equal_counts(costs: Sequence[float], stages: int) -> list[list[int]]:
    each, rest = divmod(len(costs), stages)
    first = [each + (s < rest) for s in range(stages)]
    return [first, first[::-1], [each] * (stages - 1) + [each + rest], [each + rest] + [each] * (stages - 1)]


def _greedy_cuts(costs: Sequence[float], stages: int) -> list[list[int]]:
    """What filling one stage after the other gives: up to the mean, over the mean, up to each share of the total."""
    layers, total, found = len(costs), sum(costs), []
    for over, anew, near in itertools.product((False, True), repeat=3):
        sizes, start, spent = [], 0, 0.0
        for left in range(stages, 1, -1):
            mean = (total - spent) / left if anew else total / stages
            end, load = start + 1, costs[start]
            while end < layers - left + 1:
                after = load + costs[end]
                if (after - mean > mean - load) if near else (load >= mean) if over else (after > mean):
                    break
                end, load = end + 1, after
            sizes.append(end - start)
            start, spent = end, spent + load
        found.append([*sizes, layers - start])
    for over in (False, True):
        sums, ends = list(itertools.accumulate(costs)), []
        for s in range(1, stages):
            goal = total * s / stages
            end = next(i for i, x in enumerate(sums) if x >= goal - 1e-12) + (1 if over or sums[0] > goal else 0)
            ends.append(min(max(end, s), layers - stages + s))
        sizes = [b - a for a, b in itertools.pairwise([0, *ends, layers])]
        if min(sizes) > 0:
            found.append(sizes)
    return found


def _even_cuts(costs: Sequence[float], stages: int) -> list[list[int]]:
    """The cuts with the smallest squares, and those with the dearest cheapest stage."""
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
    ]  # fmt: skip


_CUTS: tuple[tuple[str, Callable[..., list[list[int]]]], ...] = (
    ("equal-counts", _equal_counts), ("greedy", _greedy_cuts), ("most-even", _even_cuts),
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ paper problems


@checked
def bubble(fn: Callable) -> None:
    """Check ``fn(schedule, ranks, microbatches, virtual, gb)``: per cent of bubble, and GB of activations on rank 0."""

    def slip(
        share: Callable[[int, int, int], float] = lambda p, m, v: (p - 1) / (v * m + p - 1),
        gpipe: Callable[[int, int], float] = lambda p, m: m,
        plain: Callable[[int, int], float] = lambda p, m: min(p, m),
        mixed: Callable[[int, int, int], float] = lambda p, m, v: min(p + (p - 1) / v, m),
        percent: float = 100,
    ) -> Callable[..., tuple[float, float]]:
        def answer(schedule: str, ranks: int, microbatches: int, virtual: int, gb: float) -> tuple[float, float]:
            p, m, v = ranks, microbatches, virtual if schedule == "interleaved" else 1
            held = {"GPipe": gpipe(p, m), "1F1B": plain(p, m)}
            return percent * share(p, m, v), gb * held.get(schedule, mixed(p, m, v))

        return answer

    paper_problem(
        "Exercise 5", fn, slip(),
        [
            ("GPipe", 8, 32, 1, 0.5), ("1F1B", 4, 16, 1, 0.2), ("1F1B", 8, 32, 1, 0.5), ("interleaved", 8, 32, 4, 0.5),
            ("1F1B", 8, 4, 1, 0.5), ("interleaved", 4, 4, 2, 0.2), ("GPipe", 1, 6, 1, 0.3),
            ("interleaved", 16, 64, 3, 0.1),
        ],
        {
            "of-ideal": slip(lambda p, m, v: (p - 1) / (v * m)),
            "virtual-ignored": slip(lambda p, m, v: (p - 1) / (m + p - 1)),
            "ranks": [slip(lambda p, m, v: p / (v * m + p)), slip(lambda p, m, v: p / (v * m + p - 1))],
            "work": slip(lambda p, m, v: v * m / (v * m + p - 1)),
            "fraction": slip(percent=1),
            "gpipe-memory": slip(gpipe=min),
            "1f1b-memory": slip(plain=lambda p, m: m),
            "few": [
                slip(plain=lambda p, m: p, mixed=lambda p, m, v: p + (p - 1) / v), slip(plain=lambda p, m: p),
                slip(mixed=lambda p, m, v: p + (p - 1) / v),
            ],
            "interleaved-memory": slip(mixed=lambda p, m, v: min(p, m)),
            "pieces": [
                slip(mixed=lambda p, m, v: min(v * p + p - 1, v * m)), slip(mixed=lambda p, m, v: v * p + p - 1),
                slip(mixed=lambda p, m, v: min(v * p, v * m)), slip(mixed=lambda p, m, v: v * p),
                slip(mixed=lambda p, m, v: min(v * p + p - 1, m)), slip(mixed=lambda p, m, v: min(2 * p - 1, m)),
            ],
            "divided": slip(mixed=lambda p, m, v: min(p, m) / v),
        },
        HINTS["bubble"], ["% of the time", "GB"],
    )  # fmt: skip


@checked
def enough_microbatches(fn: Callable) -> None:
    """Check ``fn(ranks, virtual, percent)``: the fewest micro-batches with a bubble of at most so many per cent."""

    def slip(
        need: Callable[[int, int, float], float] = lambda p, v, x: (p - 1) * (1 - x) / (v * x),
        finish: Callable[[float], float] = math.ceil,
        multiple: Callable[[int, int], int] = lambda p, v: p if v > 1 else 1,
        least: int = 1,
    ) -> Callable[..., float]:
        def answer(ranks: int, virtual: int, percent: float) -> float:
            count, group = finish(need(ranks, virtual, percent / 100)), multiple(ranks, virtual)
            return max(least, count if group == 1 else group * finish(count / group))

        return answer

    paper_problem(
        "Exercise 6", fn, slip(),
        [(8, 1, 3), (8, 2, 3), (8, 4, 3), (16, 1, 7), (4, 3, 12), (1, 1, 5), (32, 4, 4.5), (6, 2, 0.7)],
        {
            "of-ideal": slip(lambda p, v, x: (p - 1) / (v * x)),
            "virtual-ignored": slip(lambda p, v, x: (p - 1) * (1 - x) / x),
            "ranks": [slip(lambda p, v, x: p * (1 - x) / (v * x)), slip(lambda p, v, x: (p - (p - 1) * x) / (v * x))],
            "round": [slip(finish=math.floor), slip(finish=round), slip(finish=float)],
            "multiple": slip(multiple=lambda p, v: 1),
            "multiple-always": slip(multiple=lambda p, v: p),
            "nothing": slip(least=0),
        },
        HINTS["enough_microbatches"], ["micro-batches"], tolerance=1e-9,
    )  # fmt: skip
