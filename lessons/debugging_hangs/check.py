"""The exercises on hangs: calls compared before they run, a skip by all, the clinic, and the usual mistakes."""

from __future__ import annotations

import builtins
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils import record
from course_utils.check import Case, Exercise, checked, exercise
from course_utils.check.program import hints_of
from course_utils.costs import bytes_sent
from course_utils.ranks import share

from .clinic import hangs
from .clinic_check import ward

share("torch._dynamo")  # every optimizer imports it as it is made: a second on each rank

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

# --- exercise 1: calls compared

Call = tuple[tuple[int, ...], torch.dtype, str]  # shape, dtype, and name of the reduction
FLOAT = torch.float32
AGREE: list[tuple[int, Call]] = [
    (2, ((5,), FLOAT, "SUM")), (3, ((2, 3), torch.int32, "MAX")), (4, ((), torch.float64, "SUM")),
    (3, ((4, 250), FLOAT, "MIN")),
]
DIFFER: dict[str, list[Call]] = {
    "another reduction on rank 1": [((6,), FLOAT, name) for name in ("SUM", "MAX", "SUM")],
    "another reduction on rank 0": [((6,), FLOAT, name) for name in ("MAX", "SUM", "SUM")],
    "another shape on rank 2": [(shape, FLOAT, "SUM") for shape in ((8,), (8,), (2, 4))],
    "another dtype of the same size on rank 1": [((8,), dtype, "SUM") for dtype in (FLOAT, torch.int32, FLOAT)],
    "two ranks against two": [((4,), FLOAT, name) for name in ("MIN", "SUM", "SUM", "MIN")],
    "three different calls": [((4,), FLOAT, name) for name in ("MIN", "SUM", "MAX")],
}


@contextlib.contextmanager
def own_hashes(rank: int, used: list[str]) -> Iterator[None]:
    """Let `hash` of texts differ from rank to rank, as under torchrun, and note that it was called."""

    def salted(value: Any) -> int:
        used.append("hash")
        return usual((rank, value))

    usual, builtins.hash = builtins.hash, salted
    try:
        yield
    finally:
        builtins.hash = usual


def tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(1, 1 + max(1, torch.Size(shape).numel())) * (rank + 2) % 17
    return numbers.to(dtype).reshape(shape)


def reduced(inputs: Sequence[Tensor], name: str) -> Tensor:
    stacked = torch.stack(list(inputs))
    return {"SUM": stacked.sum(0), "MAX": stacked.amax(0), "MIN": stacked.amin(0)}[name]


@exercise("Exercise 1", cases=[
    *((n, f"all pass {call[2]}, {str(call[1])[6:]}, shape {call[0]}", [call] * n) for n, call in AGREE),
    *((len(calls), name, calls) for name, calls in DIFFER.items()),
], passed="equal calls are reduced, different ones refused on all ranks with one small message.")
def checked_all_reduce(note, answer, calls):
    rank, n, used, said = dist.get_rank(), dist.get_world_size(), [], None
    inputs = [tensor(one, shape, dtype) for one, (shape, dtype, _) in enumerate(calls)]
    x = inputs[rank].clone()
    with record() as ledger, own_hashes(rank, used):
        try:
            answer(x, getattr(dist.ReduceOp, calls[rank][2]))
        except ValueError as error:
            said = str(error)
    usual = Counter(calls).most_common(1)[0][0]  # of several, the one of the lowest rank
    odd = [one for one, call in enumerate(calls) if call != usual]
    if odd:
        if note.holds(said is not None, "silent", "the function raised no ValueError."):
            form = bool(re.fullmatch(r"ranks \[(\d+(, \d+)*)?\] differ", said))
            note.holds(form, "form", f"the error says {said[:80]!r}.")
            note.holds(said == f"ranks {odd} differ", "majority", f"the error says {said!r}, but ranks {odd} differ.")
        note.equal(x, inputs[rank], "the tensor after a refused call", "changed")
        return
    note.holds(said is None, "hash" if used else "false-alarm", f"the function raised: {said}.")
    note.equal(x, reduced(inputs, usual[2]), "the tensor")
    most = bytes_sent("all_reduce", n, x.nbytes)
    note.sent(ledger, calls=2, sent=(most - 1, most + 256 * n), object="object")


CALL = 'call = f"{op} {tensor.dtype} {tuple(tensor.shape)}"'
MINE = "mine = torch.tensor(list(digest), dtype=torch.uint8)"
REDUCE = "dist.all_reduce(tensor, op=op)"

MISTAKES["checked_all_reduce"] = {
    "silent": ("""The ranks passed different calls, and this rank did not notice. What has to be equal is the reduction,
        the shape and the dtype: gloo and NCCL compare none of them.""",
            [{CALL: 'call = f"{tensor.dtype} {tuple(tensor.shape)}"'},
             {CALL: 'call = f"{op} {tensor.dtype} {tensor.nbytes}"'}]),
    "form": ("The error's text has the form of the docstring, with the ranks in ascending order: ranks [1] differ.",
            "{odd} differ  ->  {odd} pass another call"),
    "majority": ("The usual call is the one that most ranks pass; of two as frequent, that of the lowest rank.",
            "Counter(calls).most_common(1)[0][0]  ->  calls[0]"),
    "changed": ("The comparison comes before the reduction: a call that is refused must leave the tensor as it was.",
            "if odd:  ->  if odd:\n    tensor.zero_()"),
    "false-alarm": ("All ranks passed the same call here. Compare what is passed, and not the numbers in the tensor.",
            {CALL: 'call = f"{op} {tensor}"'}),
    "hash": ("The same call everywhere; but Python's hash() of a text is another number in every process.",
            {MINE: "mine = torch.tensor([hash(call)])", "bytes(one.tolist())": "one.item()"}),
    "other-op": ("This is the sum. Reduce with the reduction that was passed.", {REDUCE: "dist.all_reduce(tensor)"}),
    "object": ("""all_gather_object pickles what it sends, and sends the sizes before: two collectives, of any length. A
        tensor of fixed size is enough.""",
            {"[torch.empty_like(mine) for _ in range(dist.get_world_size())]": "[None] * dist.get_world_size()",
             "dist.all_gather(theirs, mine)": "dist.all_gather_object(theirs, call)",
             "[bytes(one.tolist()) for one in theirs]": "theirs"}),
}
RIGHT["checked_all_reduce"] = {
    "counted by list.count": "Counter(calls).most_common(1)[0][0]  ->  max(calls, key=calls.count)",
    "one row of fixed length, reduced asynchronously": {
        "digest = hashlib.sha256(call.encode()).digest()": "digest = call.ljust(96)[:96].encode()",
        "theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]":
        "theirs = torch.empty(96 * dist.get_world_size(), dtype=torch.uint8)",
        "dist.all_gather(theirs, mine)": "dist.all_gather_into_tensor(theirs, mine)",
        "for one in theirs]": "for one in theirs.view(-1, 96)]",
        REDUCE: "dist.all_reduce(tensor, op=op, async_op=True).wait()",
    },
}

# --- exercise 2: a skip by all

STEPS = 5


class Job:
    """A rank's model of three numbers, whose batches sometimes do not fit."""

    def __init__(self, full: set[tuple[int, int]]):
        self.full, self.weights = full, torch.zeros(3, dtype=torch.float64)
        self.tried = self.applied = 0

    def compute(self, batch: Tensor) -> Tensor:
        self.tried += 1
        if (dist.get_rank(), self.tried - 1) in self.full:
            raise MemoryError("the batch does not fit")
        return batch - self.weights

    def apply(self, gradient: Tensor) -> None:
        self.applied += 1
        self.weights = self.weights - 0.1 * gradient


def faulty(batch: Tensor) -> Tensor:
    raise ZeroDivisionError("a fault of the model")


@exercise("Exercise 2", cases=[
    (2, "every batch fits", set()),
    Case(3, "one batch of rank 1 does not fit", ({(1, 1)},), "out-of-step"),
    Case(3, "two ranks run out in one step", ({(0, 2), (2, 2)},), "out-of-step"),
    Case(2, "in different steps", ({(0, 0), (1, 3)},), "out-of-step"),
    Case(3, "the last one does not fit", ({(2, 4)},), "out-of-step"),
    (2, "the model raises ZeroDivisionError", None),
], passed="a batch is skipped by all ranks or by none, at the price of one number.")
def skip_together(note, answer, full):
    n, first, job = dist.get_world_size(), torch.arange(3.0 * STEPS, dtype=torch.float64).reshape(STEPS, 3), Job(full)
    batches = list(first * (dist.get_rank() + 1))
    if full is None:  # another error than MemoryError, here on all ranks at once
        raised = False
        try:
            answer(faulty, job.apply, batches)
        except ZeroDivisionError:
            raised = True
        note.holds(raised, "swallowed", "the error of the model was caught.")
        return
    with record() as ledger:
        skipped = answer(job.compute, job.apply, batches)
    weights, kept = torch.zeros(3, dtype=torch.float64), sorted({*range(STEPS)} - {step for _, step in full})
    for step in kept:
        weights = weights - 0.1 * torch.stack([first[step] * (rank + 1) - weights for rank in range(n)]).mean(0)
    note.holds(job.tried == STEPS, "every-batch", f"compute was called {job.tried} times, of {STEPS} batches.")
    what = f"apply was called {job.applied} times, and should be {len(kept)} times."
    note.holds(job.applied == len(kept), "local-skip", what)
    note.equal(job.weights, weights, "the weights after the epoch")
    note.holds(skipped == STEPS - len(kept), "count", f"the function returned {str(skipped)[:40]}.")
    least = len(kept) * bytes_sent("all_reduce", n, weights.nbytes)
    note.sent(ledger, calls=STEPS + len(kept), sent=(least - 1, least + STEPS * 64 * n),
              too_many_calls="gradient-sent" if full else "too-many-calls")


TOGETHER = "dist.all_reduce(full, op=dist.ReduceOp.MAX)"
APPLY = "apply(gradient / dist.get_world_size())"

MISTAKES["skip_together"] = {
    "every-batch": ("Each rank computes each of its batches once, also after a batch that did not fit.",
            "continue  ->  break"),
    "local-skip": ("A batch is skipped by all ranks if it does not fit on one of them: they have to tell each other.",
            {"if full.item() > 0:": "if False:", "full += 1": "full += 1\ngradient = batch * 0"}),
    "out-of-step": ("""It is right as long as every batch fits. When one does not, the ranks call different collectives
        from then on: every rank has to take the same way through the step.""", {TOGETHER: "pass"}),
    "mean": ("The gradient that is applied is the mean over the ranks, not the sum.", {APPLY: "apply(gradient)"}),
    "ahead": ("Each gradient depends on the weights that the batch before it has left.",
            {"skipped = 0": "skipped, later = 0, []", APPLY: "later.append(gradient / dist.get_world_size())",
             "return skipped": "for gradient in later:\n    apply(gradient)\nreturn skipped"}),
    "count": ("Return how many batches were skipped; all ranks return the same number.",
            "return skipped  ->  return len(batches)"),
    "gradient-sent": ("In a step that is skipped only the flag has to be sent: decide first, then reduce the gradient.",
            "skipped += 1  ->  dist.all_reduce(batch * 0)\nskipped += 1"),
    "swallowed": ("Only MemoryError means that the batch does not fit. Other errors are faults, and end the job.",
            "except MemoryError:  ->  except Exception:"),
}
RIGHT["skip_together"] = {
    "gather": {
        TOGETHER: "flags = [torch.zeros(1) for _ in range(dist.get_world_size())]\ndist.all_gather(flags, full)",
        "if full.item() > 0:": "if torch.cat(flags).any():",
    },
    "minimum of done": {
        "full = torch.zeros(1)": "done = torch.ones(1)", "full += 1": "done -= 1",
        TOGETHER: "dist.all_reduce(done, op=dist.ReduceOp.MIN)", "if full.item() > 0:": "if not done.item():",
    },
}

# --- exercises 3 and 4: the clinic


def judge(title: str, name: str, fn: Callable, numbers: range) -> None:
    """Ask for cause, rank, call and edit of each patient, and try the edits."""
    run = Exercise(title, hints_of(MISTAKES[name]))
    count = ward(run, fn, hangs.clinic(), numbers, ("rank", "call"))
    run.passed(f": {count} faults found, with rank and call, and {count} programs healed, each by a run.")


@checked
def diagnoses_and_cures(fn: Callable) -> None:
    """Check ``fn()``: number of patients 1 to 9 -> (cause, rank, call, edit), as `diagnose` and `treat` take them."""
    judge("Exercise 3", "diagnoses_and_cures", fn, range(1, 10))


@checked
def second_ward(fn: Callable) -> None:
    """Check ``fn()``: the same for patients 10 to 15."""
    judge("Exercise 4", "second_ward", fn, range(10, 16))


MISTAKES["diagnoses_and_cures"] = {
    "missing": ("Return an entry for each patient.", "        1: (  ->          16: ("),
    "form": ("""An entry is the number of a patient and four things: cause, rank, call, and the edit as a dictionary,
        such as 3: ("uneven batches", 0, "all_reduce", {"old text": "new text"}).""",
            ', {"reduce(loss, dst=0)": "all_reduce(loss)"}  ->  '),
    "name": ("The names of causes are those of clinic.list_causes().",
            '"decision on a local value"  ->  "a bad value"'),
    "diagnosis": ("""Ask for the evidence that is named below. The rank and the call are those of the fault, which need
        not be where the ranks wait.""", ['on a local value", 1  ->  on a local value", 0',
             '"decision on a local value"  ->  "one rank only"']),
    "cure-form": ("Old texts of an edit must stand in the program once. Copy them from the program as it is shown.",
            '"reduce(loss, dst=0)"  ->  "reduce(loss, dst=1)"'),
    "cure": ("""What the ranks say after the change stands below. Is it the same as before? Then the change did not
        touch the cause.""", '"if True:"  ->  "if rank < 2:"'),
}
RIGHT["diagnoses_and_cures"] = {
    "in a tuple": "[first, second] if  ->  (first, second) if",
    "other ranks": {'"both receive first", 0': '"both receive first", 1', 'reductions", 1,': 'reductions", 2,'},
}
MISTAKES["second_ward"] = {key: row[:1] for key, row in MISTAKES["diagnoses_and_cures"].items()} | {
    "diagnosis": ("""Ask for the evidence that is named below. In this ward the stacks say little: what has a rank left
        out, or what does it hold that the others do not?""", 'its other side", 1,  ->  its other side", 0,'),
    "cure": ("What the ranks say after the change stands below. A program must still do what it is for, on every rank.",
            '"dist.isend, mine, 1 - rank)"  ->  "dist.isend, mine, 1)"'),
}
RIGHT["second_ward"] = {
    "find unused": {'{"return self.layer(x)": "return self.layer(x) + 0 * self.head(x)"}':
                    '{"Parallel(Model())": "Parallel(Model(), find_unused_parameters=True)"}'},
    "other ranks": {'"unused parameters", 0': '"unused parameters", 1', '"seeds that differ", 1':
                    '"seeds that differ", 0'},
}
