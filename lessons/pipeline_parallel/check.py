"""The exercises on pipeline parallelism: what each rank must find, and the usual mistakes with their hints.

Orders and schedules are simulated, so that any with the right time and memory passes. Engines run on real ranks in
float64, equal to one process to 1e-12; the stages that they are given note every forward and backward, and count the
micro-batches that autograd keeps something of.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from course_utils.check import Case, Note, close, exercise, paper, show
from course_utils.check.compare import number, whole_number, whole_numbers
from course_utils.check.training import exact, gradients_of
from course_utils.ranks import interceptor, record

from . import answers, pipeline
from .pipeline import Costs, Op, Schedule, Timeline, gpipe, one_f_one_b, partition, simulate

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

# --- exercises 1 and 5: orders, simulated

Order = list[tuple[str, int]]  # of one rank, such as ("F", 0)

ORDER_CASES = [
    Case(0, f"{ranks} ranks, {count} micro-batches", (ranks, count), hint)
    for ranks, count, hint in (  # with the hint for any failure there
        (2, 4, None), (4, 8, None), (3, 6, "odd"), (5, 7, "odd"), (4, 2, "few"), (5, 3, "few"), (8, 1, "few"),
        (1, 3, "one-rank"), (7, 20, None), (16, 40, None),
    )
]


def pair(op: Any, kinds: str) -> tuple[str, int] | None:
    if not isinstance(op, list | tuple) or len(op) != 2:
        return None
    kind, m = op[0], whole_number(op[1])
    return (kind, m) if isinstance(kind, str) and kind in tuple(kinds) and m is not None else None


def simulated(note: Note, got: Any, kinds: str, count: int, costs: Costs, ranks: int) -> Timeline | None:
    """The orders of all ranks in time; notes those in another form, incomplete, too early or in each other's way."""
    orders = []
    shown = f"the function returned {str(got)[:100]}."
    if not note.holds(isinstance(got, list | tuple) and len(got) == ranks, "form", shown):
        return None
    for rank, ops in enumerate(got):
        pairs = [pair(op, kinds) for op in ops] if isinstance(ops, list | tuple) else [None]
        if not note.holds(None not in pairs, "form", f"of rank {rank} the order is {str(ops)[:100]}."):
            return None
        orders.append(tuple(Op(kind, rank, m) for kind, m in pairs))
    try:
        timeline = simulate(Schedule("yours", count, tuple(range(ranks)), tuple(orders)), costs)
    except ValueError as error:
        text = str(error)
        key = "deadlock" if "wait for each other" in text else "incomplete"
        text = re.sub(r"\b\d+([FBIW]\d+)\b", r"\1", text)  # a rank has one stage: its number says nothing here
        note.holds(False, key, f"{text}.", ("orders", orders))
        return None
    note.holds(True, "", "")
    return timeline


def written(ops: Sequence[tuple], most: int = 24) -> str:
    """Operations, of which the kind comes first and the micro-batch last, in one line."""
    return " ".join(f"{op[0]}{op[-1]}" for op in ops[:most]) + (" …" if len(ops) > most else "")


def waits(timeline: Timeline, most: int = 5, unit: str = "") -> str:
    """The longest times that ranks wait between two operations."""
    pairs = [(rank, *pair) for rank, spans in enumerate(timeline.spans) for pair in itertools.pairwise(spans)]
    waits = sorted((before.end - after.start, after.start, rank, after.op) for rank, before, after in pairs)
    lines = [
        f"rank {rank} waits {-negative:g}{unit} for {op.kind}{op.microbatch}, until {start:g}{unit}"
        for negative, start, rank, op in waits[:most]
        if negative < -1e-9
    ]
    return "\n".join(lines) or "No rank waits between two operations."


@exercise("Exercise 1", cases=ORDER_CASES, explains=["form", "incomplete", "deadlock", "peak", "slow"],
          passed="for 1 to 16 ranks: as fast as 1F1B, with no more than ranks - rank micro-batches held.")
def one_f_one_b_order(note, answer, ranks, count):
    """The orders of all ranks together, simulated."""
    timeline = simulated(note, [answer(rank, ranks, count) for rank in range(ranks)], "FB", count, Costs(), ranks)
    if timeline is None:
        return
    orders = timeline.schedule.order
    for rank, held in enumerate(timeline.peak):
        limit = min(count, ranks - rank)
        what = f"rank {rank} holds {held:.0f} micro-batches at a time; the target is {limit}."
        note.holds(held <= limit, "peak", f"{what}\n\n{written(orders[rank])}", ("orders", orders))
    target = 3 * (count + ranks - 1)
    what = f"the step takes {timeline.seconds:g} (F takes 1, B takes 2); the target is {target}."
    note.holds(timeline.seconds <= target + 1e-9, "slow", f"{what}\n\n{waits(timeline)}", ("orders", orders))


MISTAKES["one_f_one_b_order"] = {
    "form": ("""Return a list of pairs such as ('F', 0): the kind of operation, and the number of the micro-batch from
        0.""", ["return order  ->  return [(part, i) for kind, i in order for part in ('F' if kind == 'F' else 'IW')]",
             'return order  ->  order']),
    "incomplete": ("Each micro-batch goes forward once and back once, on every rank, and forward comes first.",
            [' + [("B", i) for i in range(microbatches - ahead, microbatches)]  ->  ',
             '("F", ahead + i), ("B", i)  ->  ("B", i), ("F", ahead + i)']),
    "deadlock": ("""Ranks wait for each other in a circle. The ranks before a rank have to be ahead of it: how many
        forwards must each have done before its first backward can come?""",
            "ahead = min(microbatches, ranks - rank - 1)  ->  ahead = min(microbatches, rank)"),
    "rank-ignored": ("""All ranks get the same list. The last can turn round at once; the first has to fill the
        pipeline.""", "ahead = min(microbatches, ranks - rank - 1)  ->  ahead = min(microbatches, ranks - 1)"),
    "peak": ("""A rank holds more than ranks - rank micro-batches. Every F adds one, every B gives one back; in GPipe's
        order, with all forwards first, nothing is given back in time.""",
            ["ahead = min(microbatches, ranks - rank - 1)  ->  ahead = microbatches",
             "ahead = min(microbatches, ranks - rank - 1)  ->  ahead = min(microbatches, ranks - rank)"]),
    "slow": ("""The memory is right, but a rank waits although it could work. Does it run far enough ahead before its
        first backward? If each micro-batch goes back before the next goes forward, one rank works at a time.""",
            ["ahead = min(microbatches, ranks - rank - 1)  ->  ahead = 0",
             "ahead = min(microbatches, ranks - rank - 1)  ->  ahead = min(microbatches, 1, ranks - rank - 1)"]),
    "odd": ("""This is right for 2 and 4 ranks, but not for an odd number. Look for a rank ^ something, or a half, where
        a difference belongs.""",
            "ahead = min(microbatches, ranks - rank - 1)  ->  ahead = min(microbatches, (ranks - 1) ^ rank)"),
    "few": ("""This is right while there are at least as many micro-batches as ranks, but not for fewer. No rank can run
        further ahead than there are micro-batches.""",
            "ahead = min(microbatches, ranks - rank - 1)  ->  ahead = ranks - rank - 1"),
}


def order_of_the_package(rank, ranks, microbatches):
    return [(op.kind, op.microbatch) for op in one_f_one_b(ranks, microbatches).order[rank]]


def back_as_soon_as_it_can(rank, ranks, microbatches):
    order, forwards, backwards = [], 0, 0
    while backwards < microbatches:
        if forwards < microbatches and forwards - backwards < ranks - rank:
            order.append(["F", torch.tensor(forwards)])
            forwards += 1
        else:
            order.append(["B", torch.tensor(backwards)])
            backwards += 1
    return order


RIGHT["one_f_one_b_order"] = {
    "of the package": order_of_the_package, "back as soon as it can": back_as_soon_as_it_can,
}

TARGET = Costs(2, 3, 1)  # of the puzzle, in ms
RANKS, COUNT, LIMIT, SECONDS = 4, 8, 5, 59


@exercise("Exercise 5", passed=": {said}.", cases=[(0, "")])
def own_schedule(note, answer):
    """A schedule of 4 ranks and 8 micro-batches under limits of time and memory."""
    timeline = simulated(note, answer(), "FBIW", COUNT, TARGET, RANKS)
    if timeline is None:
        return None
    orders = timeline.schedule.order
    for rank, held in enumerate(timeline.peak):
        what = f"rank {rank} holds {held:.0f} activations at a time; the target is {LIMIT}."
        what += f" Time: {timeline.seconds:g} ms.\n\n{written(orders[rank], 40)}"
        note.holds(held <= LIMIT, "memory", what)
    split = any(op.kind == "W" for ops in orders for op in ops)
    what = f"the step takes {timeline.seconds:g} ms; the target is {SECONDS} ms.\n\n{waits(timeline, unit=' ms')}"
    note.holds(timeline.seconds <= SECONDS + 1e-9, "slow" if split else "unsplit", what)
    return f"{timeline.seconds:g} ms, activations {', '.join(f'{held:.0f}' for held in timeline.peak)}"


MISTAKES["own_schedule"] = {
    "form": ("Return one list for each of the 4 ranks, of pairs such as ('F', 0), ('I', 0), ('W', 0) or ('B', 0).",
            'return orders  ->  return [[f"{kind}{i}" for kind, i in order] for order in orders]'),
    "incomplete": ("Each micro-batch needs F and B, or F, I and W, once on every rank, and in this order.",
            ["return orders  ->  return [[op for op in order if op[0] != 'W'] for order in orders]",
             "return orders  ->  swap = dict(I='W', W='I', F='F')\n"
             "return [[(swap[kind], i) for kind, i in order] for order in orders]"]),
    "deadlock": ("""Ranks wait for each other in a circle. Neighbours have to take the micro-batches in orders that fit
        together.""", "((5, 0), (3, 2), (2, 3), (1, 4))  ->  ((1, 4), (2, 3), (3, 2), (4, 1))"),
    "memory": ("A rank holds too many activations. F adds one; only W, or B, gives it back.",
            "((5, 0), (3, 2), (2, 3), (1, 4))  ->  ((7, 0), (5, 2), (3, 4), (1, 6))"),
    "unsplit": ("""Here B is one piece, and the stage before waits until both of its halves are done. Of the two, I is
        what the others wait for.""", "return orders  ->  return [one_f_one_b_order(rank, 4, 8) for rank in range(4)]"),
    "slow": ("""The memory is right, but the time is not yet. The longest waits are listed below: which W could be done
        there, or which F could come earlier so that I is there in time?""",
            "((5, 0), (3, 2), (2, 3), (1, 4))  ->  ((4, 0), (3, 1), (2, 2), (1, 3))"),
}

GREEDY = (  # at every moment I first, then F while fewer than 5 activations are held, then W
    "F0 F1 F2 F3 F4 I0 W0 F5 I1 I2 W1 F6 I3 W2 F7 I4 W3 W4 I5 W5 I6 W6 I7 W7",
    "F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 F5 I3 W2 F6 I4 W3 F7 I5 W4 W5 I6 W6 I7 W7",
    "F0 F1 F2 F3 I0 F4 I1 W0 I2 W1 W2 I3 F5 I4 W3 F6 I5 W4 F7 I6 W5 W6 I7 W7",
    "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 F6 I6 W2 F7 I7 W3 W4 W5 W6 W7",
)
RIGHT["own_schedule"] = {
    "greedy": lambda: [[(op[0], int(op[1:])) for op in ops.split()] for ops in GREEDY],
    "tuples": "return orders  ->  return tuple(map(tuple, orders))",
}

# --- exercise 2: an engine, on stages that take notes

WORDS, WIDTH, BATCH, LENGTH = 11, 6, 2, 5
ENGINE_CASES = (  # ranks, micro-batches, order
    (2, 4, "1F1B"), (2, 3, "last in, first out"), (3, 5, "1F1B"), (4, 2, "1F1B"), (4, 7, "1F1B"), (3, 4, "GPipe"),
    (1, 3, "1F1B"),
)


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


class Kept:
    """What autograd keeps of one call in place of a tensor; counts while it lives, and notices a change."""

    def __init__(self, tensor: Tensor, alive: Counter, call: int):
        self.tensor, self.copy, self.alive, self.call = tensor, tensor.detach().clone(), alive, call
        alive[call] += 1

    def __del__(self):
        self.alive[self.call] -= 1


class Watched(Stage):
    """A stage that notes its forwards and backwards in order, and how many of its calls are in memory at a time."""

    def __init__(self, rank: int, ranks: int):
        super().__init__(rank, ranks)
        self.seen: list[Tensor] = []  # the input of each call
        self.events: list[tuple[str, int]] = []  # F or B, and the number of the call
        self.arrived: dict[int, Tensor] = {}  # number of the call to the gradient of its output
        self.peak = self.inputs = 0  # the most calls that autograd keeps something of, and inputs in memory
        self.overwritten = False  # whether backward found that something kept for it had changed
        self._storages: list = []  # of the inputs, as weak references
        self._alive: Counter = Counter()

    def forward(self, x: Tensor) -> Tensor:
        call = len(self.seen)
        require_tensor("the stage", x)
        self.events.append(("F", call))
        self.seen.append(x.detach().clone())
        self._storages.append(StorageWeakRef(x.untyped_storage()))
        self.inputs = max(self.inputs, len({s.cdata for s in self._storages if not s.expired()}))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: Kept(t, self._alive, call), self._unpacked):
            y = super().forward(x)
        self.peak = max(self.peak, sum(count > 0 for count in self._alive.values()))
        if y.requires_grad:
            y.register_hook(lambda gradient: self._backward(call, gradient))
        return y

    def _unpacked(self, kept: Kept) -> Tensor:
        self.overwritten |= not torch.equal(kept.tensor, kept.copy)
        return kept.tensor

    def _backward(self, call: int, gradient: Tensor) -> None:
        self.events.append(("B", call))
        self.arrived[call] = gradient.detach().clone()

    def names(self, right: Sequence[Tensor]) -> list[int | None]:
        """Of each call, the micro-batch whose input it got."""
        return [next((m for m, x in enumerate(right) if close(got, x)), None) for got in self.seen]


def require_tensor(user: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{user} got {value} instead of a tensor")


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    require_tensor("loss_fn", target)
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def words_of(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + count)
    return torch.randint(WORDS, (count, BATCH, LENGTH + 1), generator=generator)


@cache
def in_one_process(rank: int, ranks: int, count: int) -> tuple[float, list[dict], list[Tensor], list[Tensor]]:
    """The loss; of a stage the gradients that each micro-batch adds, its inputs, and the gradients of its outputs."""
    stages, total, each, inputs, arriving = [Stage(r, ranks) for r in range(ranks)], 0.0, [], [], []
    for part in words_of(count):
        x = part[..., :-1]
        for r, stage in enumerate(stages):
            stage.zero_grad()
            if r == rank:
                inputs.append(x.detach())
            x = stage(x)
            if r == rank:
                output = x
                output.retain_grad()
        loss = loss_of(x, part[..., 1:]) / count
        loss.backward()
        total += loss.item()
        each.append(gradients_of(stages[rank]))
        arriving.append(output.grad)
    return total, each, inputs, arriving


def given(name: str, ranks: int, count: int) -> list[Order]:
    if name == "last in, first out":
        return [[*(("F", m) for m in range(count)), *(("B", m) for m in reversed(range(count)))]] * ranks
    schedule = {"1F1B": one_f_one_b, "GPipe": gpipe}[name](ranks, count)
    return [[(op.kind, op.microbatch) for op in ops] for ops in schedule.order]


CAUSES = {  # of hangs and of errors: pattern of the text, and hint
    "instead of a tensor|but got <class 'NoneType'>|'NoneType' object has no attribute|expected.*NoneType": "no-input",
    "leaf Variable .* in an in-place operation": "kept",
    "backward through the graph a second time": "wrong-microbatch",
    r"(?s)\n(\d+) +waits +send to rank (\d+)(?!.*recv\().*\n\2 +waits +send to rank \1\b": "blocking",
    "send to rank None|recv from any rank": "messages",
    r"(?m)^\d+\s+returned\s+send to rank": "not-received",
}


@exercise("Exercise 2", explains=["not-received", "input-gradient"], explained=CAUSES,
          passed="equal to one process to 1e-12, and no micro-batch is kept for longer than the order says.",
          cases=[(n, f"{count} micro-batches, {name}", count, name) for n, count, name in ENGINE_CASES])
def run_order(note, answer, count, name):
    """One step of a rank with the learner's engine: inputs, gradients, messages, loss, order and memory."""
    rank, n, words = dist.get_rank(), dist.get_world_size(), words_of(count)
    total, each, right_inputs, arriving = in_one_process(rank, n, count)
    order, stage = given(name, n, count)[rank], Watched(rank, n)
    inputs = [x.clone() for x in words[..., :-1]] if rank == 0 else [None] * count
    targets = [y.clone() for y in words[..., 1:]] if rank == n - 1 else [None] * count
    like = torch.empty(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    with record() as ledger:
        loss = answer(stage, list(order), inputs, targets, loss_of, like)
    unwaited, calls, names = len(interceptor.unfinished()), len(stage.seen), stage.names(right_inputs)
    note.talks(ledger, n)
    called = f"the stage was called {calls} times for {count} micro-batches."
    note.holds(calls >= count, "messages", called)
    what = "a call of the stage got an input that no micro-batch has there."
    if not note.holds(None not in names, "not-received", what):
        return
    note.holds(not stage.overwritten, "kept", "what the stage had kept for backward has changed since.")
    note.holds(len(set(names)) == calls, "messages", called)
    got, right = gradients_of(stage), {k: sum(part[k] for part in each) for k in each[0]}
    if not all(exact(got[k], g) for k, g in right.items()):
        arrived = [(names[call], gradient) for call, gradient in stage.arrived.items()]
        note.equal(got, right, "the gradient", wrong_gradient(got, arrived, arriving, rank == n - 1))
        return
    messages(note, ledger, n, rank, count)
    note.holds(not unwaited, "not-received", f"{unwaited} of {len(ledger)} operations are not waited for.")
    value = number(loss.detach().reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else loss)
    same = loss is None if rank < n - 1 else value is not None and math.isclose(value, total, rel_tol=1e-12)
    expected = f"{total:.6g}" if rank == n - 1 else "None"
    note.holds(same, "loss", f"the loss is wrong.\n  expected  {expected}\n  got       {show(loss)}")
    done = [(kind, names[call]) for kind, call in stage.events]
    what = f"the order is another.\n  expected  {written(order)}\n  got       {written(done)}"
    note.holds(done == order, "wrong-microbatch", what)
    limit = max(itertools.accumulate({"F": 1, "B": -1}[kind] for kind, _ in order))
    what = "{number} micro-batches are in memory at a time; the order needs {most}."
    note.at_most("kept", stage.peak, limit, what)
    if rank:  # one more, which a variable may still name
        note.at_most("kept", stage.inputs - 1, limit, "besides one, the inputs of " + what)


def wrong_gradient(got: dict, arrived: list, arriving: list, last: bool) -> str:
    """The hint for gradients that differ from those of one process."""
    if not last and not any(bool(g.any()) for g in got.values()):
        return "input-gradient"
    for m, gradient in arrived:
        if not close(gradient, arriving[m]) and any(close(gradient, other) for other in arriving):
            return "wrong-microbatch"
    return "value" if last or all(close(g, arriving[m]) for m, g in arrived) else "input-gradient"


def messages(note: Note, ledger: Any, n: int, rank: int, count: int) -> None:
    """One message for each micro-batch, neighbour and direction, and nothing else."""
    if n == 1:
        return
    note.sent(ledger, {"send", "recv"})
    beside, size = [r for r in (rank - 1, rank + 1) if 0 <= r < n], count * 8 * BATCH * LENGTH * WIDTH
    others = sorted({e.peer for e in ledger if e.peer is not None} - set(beside))
    note.holds(not others, "messages", f"the ledger shows messages with ranks {others}.")
    keys = dict.fromkeys(("not_distributed", "too_many_calls", "too_few_calls"), "messages")
    for peer in beside:
        there = [e for e in ledger if (e.op, e.peer) == ("send", peer)]
        note.sent(there, calls=(count, count), sent=(size, size), **keys)


MISTAKES["run_order"] = {
    "no-input": ("""Something that is used as a tensor is None. inputs holds the micro-batches on the first rank only,
        targets on the last one only; and x.grad is computed only for a leaf that asks for it, which what arrived does
        not do by itself.""", ["if first else receive(  ->  if True else receive(", "if last:  ->  if True:",
             ".requires_grad_()  ->  "]),
    "not-received": ("""isend and irecv return at once: wait for what arrives before the stage uses it, and for all that
        was started before the function returns. Does a rank wait for a message that nobody sends?""",
            "receive(like, rank - 1)  ->  (0 * receive(like, rank - 1))"),
    "messages": ("""There is one call of the stage for each micro-batch, and one message for each micro-batch, boundary
        and direction: with the stage before and the one behind, and with no other.""",
            [{"sends.append(dist.isend(y.detach(), rank + 1))":
                 "sends += [dist.isend(y.detach(), r) for r in range(rank + 1, n)]",
             "receive(like, rank - 1)": "[receive(like, r) for r in range(rank)][-1]"},
             "y = stage(x)  ->  with torch.no_grad():\n    stage(x)\ny = stage(x)",
             {"sends.append(dist.isend(y": "sends.append(dist.isend(torch.tensor(y.shape), rank + 1))\n"
              "sends.append(dist.isend(y",
              "receive(like, rank - 1)":
                  "(receive(torch.empty(3, dtype=torch.long), rank - 1), receive(like, rank - 1))[1]"}]),
    "loss": ("""The gradients add up over the micro-batches. Divide each loss by their number, once, and clear nothing
        in between; the last rank returns the mean of the losses, and the others None.""",
            ["return loss if last else None  ->  return loss * m if last else None", ") / m  ->  )",
             ") / m  ->  ) / m**2", "y.backward(  ->  stage.zero_grad()\ny.backward("]),
    "input-gradient": ("""This stage does not go back with the gradient of the loss with respect to its output. That is
        the gradient of the next stage's input, for the same micro-batch.""",
            [{"y.backward(None if last else receive(like, rank + 1))":
                 "gradient = None if last else receive(like, rank + 1)\n"
             "if last:\n"
             "    y.backward()",
             "x.grad": "torch.zeros_like(x)"}, "x.grad  ->  x.grad / 2"]),
    "wrong-microbatch": ("""The backward of a micro-batch goes through the output of that micro-batch, in the order that
        was asked for: here one micro-batch was taken for another.""",
            ["x, y = kept.pop(i)  ->  x, y = kept[max(kept)]", "x, y = kept.pop(i)  ->  x, y = kept.pop(max(kept))",
             "x, y = kept.pop(i)  ->  x, y = kept.pop(min(kept))"]),
    "blocking": ("""Two neighbours send to each other, and neither receives: send waits until the other side takes the
        message.""",
            {"sends.append(dist.isend(y.detach(), rank + 1))": "dist.send(y.detach(), rank + 1)",
             "sends.append(dist.isend(x.grad, rank - 1))": "dist.send(x.grad, rank - 1)"}),
    "kept": ("""Each micro-batch needs memory of its own until its backward is over, and not any longer: what arrives
        must not overwrite it, and no input, output or graph may stay alive afterwards.""",
            ["receive(like, rank - 1).requires_grad_()  ->  "
            "(dist.recv(like, rank - 1), like.detach().requires_grad_())[1]",
             "receive(like, rank - 1)  ->  like.copy_(receive(like, rank - 1))", "kept.pop(i)  ->  kept[i]"]),
}

RIGHT["run_order"] = {
    "batched operations": {
        "dist.isend(y.detach(), rank + 1)":
            "dist.batch_isend_irecv([dist.P2POp(dist.isend, y.detach(), rank + 1)])[0]",
        "dist.isend(x.grad, rank - 1)": "dist.batch_isend_irecv([dist.P2POp(dist.isend, x.grad, rank - 1)])[0]",
    },
    "gradients added by hand": {
        "y.backward(None if last else receive(like, rank + 1))":
            "wanted = [*stage.parameters()] + ([] if first else [x])\n"
            "found = torch.autograd.grad(y, wanted, None if last else receive(like, rank + 1))\n"
            "for p, g in zip(stage.parameters(), found):\n    p.grad = g if p.grad is None else p.grad + g",
        "x.grad": "found[-1]",
    },
}

# --- exercise 3: stages of equal cost

BALANCE_CASES: tuple[tuple[list[float], int], ...] = (
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

CUT = "return best[len(costs)][1]  ->  "
MEANS = "sum(costs) / stages", "sum(costs[start:]) / left"
FULL = (  # when the stage costs[start:end] is full
    "sum(costs[start : end + 1]) > mean", "sum(costs[start:end]) >= mean",
    "sum(costs[start : end + 1]) + sum(costs[start:end]) > 2 * mean",
)
FILLED = """sizes, start = [], 0
for left in range(stages, 1, -1):
    mean, end = {}, start + 1
    while end <= len(costs) - left and not {}:
        end += 1
    sizes.append(end - start)
    start = end
return [*sizes, len(costs) - start]"""
SHARES = """places = [sum(costs[: i + 1]) * stages / sum(costs) for i in range(len(costs))]
ends = [0, *({} + sum(x < s - 1e-12 for x in places) for s in range(1, stages)), len(costs)]
return [b - a for a, b in zip(ends, ends[1:])]"""
BY_SCORE = """import itertools
found = []
for ends in itertools.combinations(range(1, len(costs)), stages - 1):
    pairs = list(itertools.pairwise((0, *ends, len(costs))))
    sums = [sum(costs[a:b]) for a, b in pairs]
    found.append(({}, [b - a for a, b in pairs]))
return min(found)[1] if len(found) < 5000 else []"""


@exercise("Exercise 3", passed=": no cut is better.", cases=[
    (0, f"costs {', '.join(f'{c:g}' for c in costs[:14])}{', …' * (len(costs) > 14)}, {stages} stages", costs, stages)
    for costs, stages in BALANCE_CASES
])
def balance(note, answer, costs, stages):
    """Numbers of layers; any cut whose slowest stage costs as little as can be passes."""
    got = answer(list(costs), stages)
    sizes, what = whole_numbers(got), f"the function returned {str(got)[:100]}."
    if not (note.holds(sizes is not None and len(sizes) == stages, "form", what)
            and note.holds(sum(sizes) == len(costs), "missing", what)
            and note.holds(min(sizes) > 0, "empty-stage", what)):
        return
    best, sums = max(sums_of(costs, partition(costs, stages))), sums_of(costs, sizes)
    what += f" The stages cost {', '.join(f'{x:g}' for x in sums)}; the slowest one can cost {best:g}."
    note.holds(max(sums) <= best + 1e-9, "not-best", what, ("the sizes", sizes))


def sums_of(costs: Sequence[float], sizes: Sequence[int]) -> list[float]:
    ends = list(itertools.accumulate(sizes))
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


MISTAKES["balance"] = {
    "form": ("Return the number of layers of each stage: a list of as many whole numbers as there are stages.",
            CUT + "return [float(size) for size in best[len(costs)][1]]"),
    "missing": ("Every layer belongs to one stage, so the numbers have to add up to the number of layers.",
            CUT + "return best[len(costs) - 1][1]"),
    "empty-stage": ("Every stage needs at least one layer.",
            CUT + "sizes = best[len(costs)][1]\nreturn [0, sum(sizes[:2]), *sizes[2:]]"),
    "equal-counts": ("Equal numbers of layers are not equal work where layers differ in cost.",
            [CUT + "each, rest = divmod(len(costs), stages)\nreturn [each] * (stages - 1) + [each + rest]",
             CUT + "each, rest = divmod(len(costs), stages)\nreturn [each + (s < rest) for s in range(stages)]"]),
    "greedy": ("""This is how it ends if one fills the stages one by one up to the mean, cuts where the sum passes its
        share, or moves one cut at a time. Each of these looks at one place only, and what is left over piles up
        elsewhere.""",
            [CUT + FILLED.format(mean, full) for mean in MEANS for full in FULL]
            + [CUT + SHARES.format(more) for more in (0, 1)]),
    "most-even": ("""This comes nearest to the mean over all stages, or makes the cheapest stage cost as much as it can.
        But a step takes as long as the slowest stage: only that one counts.""",
            [CUT + BY_SCORE.format(score) for score in ("sum(x * x for x in sums)", "-min(sums)")]),
    "not-best": ("There is a cut whose slowest stage costs less.",),
}


def last_of_the_best(costs, stages):
    total, best, found = [0, *itertools.accumulate(costs)], float("inf"), None
    for ends in itertools.combinations(range(1, len(costs)), stages - 1):
        places = [0, *ends, len(costs)]
        dearest = max(total[b] - total[a] for a, b in itertools.pairwise(places))
        if dearest <= best + 1e-9:
            best, found = min(best, dearest), [b - a for a, b in itertools.pairwise(places)]
    return found


RIGHT["balance"] = {
    "the last of the best cuts": last_of_the_best,
    "an array": CUT + "return torch.tensor(best[len(costs)][1])",
}

# --- exercise 4: on paper

MISTAKES["bubble"] = {
    "of-ideal": ("""The docstring asks for the share of all time in which ranks wait, in per cent. (p - 1)/m is their
        share of the ideal time, in which nobody waits.""", ["(v * m + p - 1)  ->  (v * m)",
             "(p - 1) / (v  ->  v * m / (v", "100 * share  ->  share"]),
    "virtual-ignored": ("With v stages on each rank, a step of the pipeline takes 1/v as long: the bubble shrinks.",
            "(v * m + p - 1)  ->  (m + p - 1)"),
    "ranks": ("The last rank begins p - 1 steps after the first, not p.",
            [{"(p - 1) / (v * m + p - 1)": "p / (v * m + p)"}, "(p - 1) / (v  ->  p / (v"]),
    "gpipe-memory": ("GPipe begins no backward before the last forward: rank 0 holds all micro-batches.",
            "held = m if  ->  held = min(m, p) if"),
    "1f1b-memory": ("In 1F1B backward begins as soon as it can: rank 0 never holds more than p micro-batches.",
            "else min(m, p) if  ->  else m if"),
    "few": ("No more can be held than there are micro-batches.",
            [{"min(m, p)": "p", "min(m, pieces / v)": "pieces / v"}, "min(m, p)  ->  p",
             "min(m, pieces / v)  ->  pieces / v"]),
    "interleaved-memory": ("Interleaved, rank 0 runs further ahead than p micro-batches: by p - 1 pieces more.",
            "min(m, pieces / v)  ->  min(m, p)"),
    "pieces": ("""A piece goes through one of a rank's v stages and keeps 1/v of what all layers of the rank keep, but
        there are v times as many pieces: interleaving does not save activations.""",
            [*[f"min(m, pieces / v)  ->  {held}" for held in (
                "min(v * m, pieces)", "pieces", "v * min(m, p)", "v * p", "min(m, pieces)", "min(m, 2 * p - 1)",
            )], "min(m, pieces / v)  ->  min(m, p) / v"]),
}


def simulated_bubble(schedule, ranks, microbatches, virtual, gb):
    more = (virtual,) if schedule == "interleaved" else ()
    timeline = simulate(pipeline.SCHEDULES[schedule](ranks, microbatches, *more))
    return 100 * timeline.bubble, gb * timeline.peak[0]


RIGHT["bubble"] = {
    "simulated": simulated_bubble,
    "an array": "return 100 * share, gb * held  ->  return torch.tensor([100 * share, gb * held])",
}


def interleaves(schedule: str, ranks: int, microbatches: int, virtual: int, gb: float) -> bool:
    """Whether stages and micro-batches are such as the schedule can have."""
    return virtual > 1 and microbatches % ranks == 0 if schedule == "interleaved" else virtual == 1


bubble = paper(
    "Exercise 4", answers.bubble, MISTAKES["bubble"], cases=[
        ("GPipe", 8, 32, 1, 0.5), ("1F1B", 4, 16, 1, 0.2), ("1F1B", 8, 32, 1, 0.5), ("interleaved", 8, 32, 4, 0.5),
        ("1F1B", 8, 4, 1, 0.5), ("interleaved", 4, 4, 2, 0.2), ("GPipe", 1, 6, 1, 0.3),
        ("interleaved", 16, 64, 3, 0.1),
    ],
    units=["% of the time", "GB"], allowed=interleaves,
)
