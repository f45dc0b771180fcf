"""The exercises on profiling, on traces whose answer is known: made up, drawn and recorded; the usual mistakes."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from course_utils.check import TIMEOUT, Case, Exercise, Outcome, checked, exercise, hints_of
from course_utils.check.compare import number, whole_number
from course_utils.ranks import share
from course_utils.traces import Event, Trace, kind, length, load, matched, merge, spans

from . import answers
from .program import ROWS, STEPS, observed, speed_ratio, wide_net

share("torch._dynamo")  # every optimizer imports it as it is made: a second on each rank

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}


def in_order(rank: int, n: int, events: Sequence[Event]) -> Trace:
    return Trace(rank, n, tuple(sorted(events, key=lambda e: (e.start, -e.end))))


def timed_event(name: str, start: float, end: float, category: str = "user_annotation", row: int = 0) -> Event:
    return Event(name, category, start, end, row, 1, {})


# --- exercise 1: who is late


def drawn_ranks(n: int, seed: int, skew: float = 0) -> list[Trace]:
    """Collectives that end together on all ranks, on clocks up to ``skew`` microseconds apart."""
    rng, now = random.Random(seed), 0.0
    events: list[list[Event]] = [[] for _ in range(n)]
    for place in range(9):
        starts = [now + 100.0 * late for late in range(n)]
        rng.shuffle(starts)
        now = max(starts) + 50
        for own, start in zip(events, starts, strict=True):
            own.append(timed_event("gloo:all_gather" if place % 3 == 2 else "gloo:all_reduce", start, now))
            own.append(timed_event("aten::mm", now, now + 20, "cpu_op"))
        now += 500
    clocks = [0.0] + [round(rng.uniform(-skew, skew)) for _ in range(n - 1)]
    return [in_order(rank, n, own).shifted(clock) for rank, (own, clock) in enumerate(zip(events, clocks, strict=True))]


def recorded_pair() -> list[Trace]:
    """A recorded rank, and a copy on another clock that starts its all-reduces earlier and later in turn, in order."""
    one, copy, before, calls = load("tiny_all_reduces")[0].of_steps([2]), [], 0.0, 0
    for each in one.events:
        moved = each.start
        if kind(each, one.on_gpu) == "communication":
            moved = (each.start + (before if calls % 2 else each.end)) / 2
            before, calls = each.end, calls + 1
        copy.append(each._replace(start=moved))
    return [one, in_order(1, 2, copy).shifted(7e4)]


def pairs(found: Any) -> list[tuple[int, float]] | None:
    """Rank and wait of each collective; None if the result has another form."""
    if not isinstance(found, list | tuple) or any(not isinstance(p, list | tuple) or len(p) != 2 for p in found):
        return None
    rows = [(whole_number(rank), number(wait)) for rank, wait in found]
    return None if any(None in row for row in rows) else rows


@exercise("Exercise 1", passed=": the late rank and the wait of every collective, whatever the clocks say.", cases=[
    (0, "2 ranks, one clock", drawn_ranks(2, 1)), (0, "3 ranks, one clock", drawn_ranks(3, 2)),
    Case(0, "3 ranks, clocks that differ", (drawn_ranks(3, 3, 9e5),), "clocks"),
    Case(0, "a recorded trace and an edited copy of it, clocks that differ", (None,), "clocks"),
], explains=["wait"])
def late(note, answer, ranks):
    """Check ``fn(ranks) -> [(rank, wait), ...]``, one pair for each collective, in the order of the first rank."""
    ranks = ranks or recorded_pair()
    found, right = answer(ranks), answers.late(ranks)
    got = pairs(found)
    if not note.holds(got is not None, "form", f"the function returned {str(found)[:80]}."):
        return
    what = f"the list has {len(got)} pairs; there are {len(right)} collectives."
    if not note.holds(len(got) == len(right), "each", what):
        return
    every = ("the pairs", torch.tensor(got, dtype=torch.float64).round(decimals=1))
    for place, ((rank, wait), (right_rank, right_wait)) in enumerate(zip(got, right, strict=True)):
        what = f"collective {place} is wrong.\n  expected  rank {right_rank}, {right_wait:,.1f} us\n"
        same = rank == right_rank and math.isclose(wait, right_wait, abs_tol=0.5)
        key = "wait" if rank == right_rank else "value"
        if not note.holds(same, key, f"{what}  got       rank {rank}, {wait:,.1f} us", every):
            return


AHEAD, WAIT = "median(row[rank].end - row[0].end for row in rows)", "max(starts) - min(starts)))"
MISTAKES["late"] = {
    "form": ("Return a list with one pair (rank, microseconds) for each collective.",
            ["found.append((last,  ->  found.append((f'rank {last}',", "return found  ->  return"]),
    "each": ("The list has one pair for each collective of matched(ranks), not one for each rank or each name.",
            "return found  ->  return [max(found) for _ in ranks]"),
    "first": ("This rank came first and waited. The wait belongs to the rank that came last.",
            "starts.index(max(starts))  ->  starts.index(min(starts))"),
    "wait": ("The rank is right. The wait lasts from the first arrival to the last one.",
            f"{WAIT}  ->  row[last].end - row[last].start))"),
    "clocks": ("""It is right as long as the ranks share a clock. Here they do not: a collective that waits for all
        ranks ends at one moment on all of them, whatever their clocks say.""", "event.start - clock  ->  event.start"),
    "clocks-added": ("The clocks were moved the wrong way: one that is ahead shows too large a number.",
            "event.start - clock  ->  event.start + clock"),
    "clocks-by-starts": ("""Starts do not tell how far a clock is ahead, because a late rank starts later on every
        clock. Which other moment of a collective do all ranks share?""",
            f"{AHEAD}  ->  median(row[rank].start - row[0].start for row in rows)"),
}


def by_length(ranks):
    """Where all leave together, the shortest call belongs to the last rank, whatever the clocks."""
    found = []
    for row in matched(ranks):
        lengths = torch.tensor([event.end - event.start for event in row], dtype=torch.float64)
        found.append([lengths.argmin(), lengths.max() - lengths.min()])
    return found


RIGHT["late"] = {
    "by length": by_length,
    "the mean of the clocks": f"{AHEAD}  ->  sum(row[rank].end - row[0].end for row in rows) / len(rows)",
}

# --- exercise 2: exposed communication

WORK = {  # name and category of an event
    "compute": ("gemm", "kernel"), "communication": ("ncclDevKernel_AllReduce_Sum_f32", "kernel"),
    "copy": ("Memcpy HtoD", "gpu_memcpy"), "launch": ("cudaLaunchKernel", "cuda_runtime"),
    "operator": ("aten::mm", "cpu_op"), "call": ("c10d::allreduce_", "cpu_op"),
    "gloo": ("gloo:all_reduce", "user_annotation"),
}  # fmt: skip


def trace_of(*work: tuple[str, float, float]) -> Trace:
    """A trace of such work, each event with its start and end."""
    events = [(*WORK[what], start, end, 7 + i % 3) for i, (what, start, end) in enumerate(work)]
    return in_order(0, 2, [timed_event(name, a, b, category, row) for name, category, a, b, row in events])


def drawn_trace(seed: int) -> Trace:
    rng = random.Random(seed)
    starts = [(rng.choice(("compute", "communication", "copy")), rng.randrange(60)) for _ in range(8)]
    return trace_of(*((what, start, start + rng.randrange(5, 30)) for what, start in starts))


def exposed_cases() -> list[tuple[str, Trace]]:
    c, n = "compute", "communication"
    return [
        ("nothing overlaps", trace_of((c, 0, 10), (n, 15, 25))),
        ("operators that start kernels", trace_of(("operator", 0, 12), ("launch", 1, 2), (n, 5, 25), (c, 22, 24))),
        ("a rank on a CPU", trace_of(("operator", 0, 8), ("call", 3, 15), ("gloo", 4, 20), ("operator", 18, 22))),
        ("compute inside communication", trace_of((n, 0, 30), (c, 5, 10), (c, 10, 15))),
        ("nested compute", trace_of((c, 0, 20), (c, 5, 10), (n, 8, 30))),
        ("two communications at a time", trace_of((n, 0, 20), (n, 10, 30), (c, 12, 14))),
        ("a copy beside communication", trace_of((c, 0, 1), (n, 3, 20), ("copy", 5, 25))),
        ("no communication", trace_of((c, 0, 20))),
        *((f"random case {seed}", drawn_trace(seed)) for seed in range(30)),
        ("recorded trace host_bound", load("host_bound")[0]),
    ]


def listing(trace: Trace) -> str:
    """The events of a short trace, a line each."""
    return "\n".join(f"  {e.start:>3.0f} to {e.end:>3.0f} us  {e.name} ({e.category})" for e in trace.events)


@exercise("Exercise 2", passed=f": {answers.exposed(load('host_bound')[0]):,.0f} us exposed in the recorded trace.",
          cases=[(0, name, trace) for name, trace in exposed_cases()], tolerance=1e-6)
def exposed(note, answer, trace):
    """Check ``fn(trace) -> float``: microseconds in which a rank communicates and computes nothing."""
    got, right = number(answer(trace)), answers.exposed(trace)
    if not note.holds(got is not None, "odd", "the function did not return a number."):
        return
    events = f"\n\n{listing(trace)}" if len(trace.events) < 10 else ""
    what = f"the time is wrong.\n  expected  {right:,.3f} us\n  got       {got:,.3f} us{events}"
    same = math.isclose(got, right, rel_tol=1e-6, abs_tol=1e-3)
    note.holds(same, "intervals", what, ("the time", torch.tensor(got, dtype=torch.float64)))


TALKS, ALONE = 'running["communication"] > 0', 'running["communication"] > 0 and running["compute"] == 0'
TIME, KIND = "total += moment - before", "kind(event, trace.on_gpu)"


def times(factor: str) -> str:
    return f"total += ({factor}) * (moment - before)"


MISTAKES["exposed"] = {
    "all-communication": ("This is all communication. What compute covers is not exposed.", [f"{ALONE}  ->  {TALKS}",
             {ALONE: TALKS, TIME: times('running["communication"]')}]),
    "overlap": ("This is the part that compute covers. The exposed part is the rest.",
            'running["compute"] == 0  ->  running["compute"] > 0'),
    "counted-twice": ("Where two events of one kind run at the same time, that time was counted twice.",
            [{TIME: times('running["communication"]')},
             {ALONE: TALKS, TIME: times('running["communication"] - (running["compute"] > 0)')},
             {ALONE: TALKS, TIME: times('1 - running["compute"]')}]),
    "idle": ("This is all time without compute. In a part of it the rank does nothing at all.",
            f'{ALONE}  ->  running and running["compute"] == 0'),
    "copies": ("A copy neither computes nor communicates: while it runs, the rank may still wait for communication.",
            [f'{KIND}  ->  {KIND}.replace("copy", "{other}")' for other in ("compute", "communication")]),
    "on-gpu": ("What an operator means depends on whether the trace has a GPU's work: trace.on_gpu.",
            [f"{KIND}  ->  kind(event, True)", f"{KIND}  ->  kind(event, False)"]),
    "host": ("What is not communication need not be compute: a CPU's operators start a GPU's work, and do none of it.",
            f'{KIND}  ->  {KIND}.replace("other", "compute")'),
    "intervals": ("Draw the intervals of this case: which of them overlap, touch or lie inside another?",
            "running[what] += change  ->  running[what] = max(change, 0)"),
}


def lengths_of_unions(trace):
    both = [(e.start, e.end) for e in trace.events if kind(e, trace.on_gpu) in ("compute", "communication")]
    return torch.tensor(length(merge(both)) - length(spans(trace, "compute")), dtype=torch.float64)


RIGHT["exposed"] = {
    "lengths of unions": lengths_of_unions,
    "ends before starts": "(event.start, 1, what), (event.end, -1, what)  ->  "
        "(event.end, -1, what), (event.start, 1, what)",
}

# --- exercise 3: a slow program


def near(got: Any, right: Any) -> bool:
    """Whether losses or weights in float32 agree."""
    return torch.allclose(torch.as_tensor(got), torch.as_tensor(right), 1e-5, 1e-5)


def on_a_rank(fn: Callable, inputs: list[Tensor], args: tuple) -> Outcome:
    look, folder = args
    return Outcome(look(fn, folder), None, None, None)


@checked
def speed_up(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(model, texts, steps, prepare, folder) -> losses``: the slow program's numbers, without its faults."""
    run = Exercise("Exercise 3", hints_of(MISTAKES["speed_up"]), timeout, on_a_rank)
    with tempfile.TemporaryDirectory() as folder:
        found = [outcome.result for outcome in run.run(fn, [torch.zeros(1)] * 2, observed, folder)]
        refuse_other_results(run, found)
        refuse_faults(run, found)
        ratio = run.run(fn, [torch.zeros(1)] * 2, speed_ratio, folder)[0].result
    print(f"Exercise 3 passed: {ratio:.1f} times as fast as the slow program (measured, not judged).")


def refuse_other_results(run: Exercise, found: list[dict[str, Any]]) -> None:
    """Refuse other losses, weights or files than those of the slow program."""
    for _, one in run.each(found):
        losses, right = one["losses"], one["slow losses"]
        form = losses is not None and len(losses) == STEPS
        run.require(form, "odd", f"the function did not return {STEPS} losses.")
        for step, (got, expected) in enumerate(zip(losses, right, strict=True)):
            if not near(got, expected):
                run.differs("losses", f"the loss of step {step} is wrong.", f"{expected:.6f}", f"{got:.6f}")
        what = "the weights at the end are not those of the slow program."
        run.require(near(one["weights"], one["slow weights"]), "losses", what)
    saved = found[0]["saved"]
    run.require(saved is not None, "no-file", "there is no state of the model in rank0.pt.", 0)
    run.require(near(saved, found[0]["weights"]), "no-file", "rank0.pt has other weights than the model.", 0)


def refuse_faults(run: Exercise, found: list[dict[str, Any]]) -> None:
    """Refuse the fault that costs most of those that are left."""
    tensors = len(list(wide_net().parameters()))
    for _, one in run.each(found):
        calls = one["collectives"]
        run.require(calls > 0, "unbalanced", "this rank took part in no collective.")
        what = f"this rank took part in {calls} collectives in {STEPS} steps; the net has {tensors} tensors."
        run.require(calls <= 3 * STEPS + 8, "many-collectives", what)
    for rank, one in run.each(found):
        what = f"this rank called torch.save {one['saves']} times."
        run.require(one["saves"] <= (2 if rank == 0 else 0), "saves", what)
    for _, one in run.each(found):
        what = f"prepare was called {one['prepare']} times on this rank, for {len(ROWS)} texts."
        run.require(one["prepare"] <= len(ROWS), "prepare", what)
    work = torch.tensor([one["flops"] for one in found], dtype=torch.float64)
    share, most = (work / work.sum()).max(0)
    what = f"of the FLOPs of the matrix products this rank has {share:.0%}."
    run.require(not share > 0.55, "unbalanced", what, int(most))
    reading = sum(one["reads"] >= STEPS - 1 for one in found)
    for rank, one in run.each(found):
        what = f"the trace has {one['copies']} clones and conversions of large tensors in {STEPS} steps."
        run.require(one["copies"] < STEPS, "copies", what)
        what = f"a number was read out of a tensor {one['reads']} times before the last matrix product."
        run.require(one["reads"] <= (STEPS if reading == 1 else STEPS - 2), "reads", what)  # one may say each loss
        what = f"this rank printed {one['lines']} lines."
        run.require(one["lines"] <= (STEPS + 2 if rank == 0 else 0), "reads", what)


LOOP, STEP, DETACHED = "for x, y in mine:", "optimizer.step()", "losses[-1] += part.detach()"
MINE, FLAT = "mine = [prepare(text) for text in texts[rank::world_size]]", "dist.all_reduce(flat)"
SAVED = """if rank == 0:
        torch.save(model.state_dict(), f"{folder}/rank0.pt")"""
WRITE = 'torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")'
MISTAKES["speed_up"] = {
    "losses": ("""The program has become another one. Each step's loss is that of all texts together, before the
        optimizer's step; the gradients of all texts are in every step, and the same on both ranks.""",
            ["dist.all_reduce(all_losses)  ->  pass", f"{FLAT}  ->  {FLAT}\nflat /= world_size",
             f"{STEP}  ->  if len(losses) < steps:\n    {STEP}"]),
    "no-file": ("After the call the file rank0.pt in the folder has to hold the model's last state_dict().",
            ["{folder}/rank0.pt  ->  {folder}/rank1.pt",
             {SAVED: "", STEP: f"if rank == 0 and len(losses) == steps:\n    {WRITE}\n{STEP}"}]),
    "many-collectives": ("One all-reduce for each tensor starts collectives again and again; gradients go together.",
            f"{FLAT}  ->  for gradient in gradients:\n    dist.all_reduce(gradient)\n"
            "flat = parameters_to_vector(gradients)"),
    "prepare": ("The texts are the same in each step. What does not change need not be read again.",
            {MINE: "mine = texts[rank::world_size]", LOOP: "for text in mine:\n    x, y = prepare(text)"}),
    "saves": ("The weights are written in each step, or by a second rank. Only rank 0's last state is asked for.",
            {SAVED: "", STEP: f"{STEP}\n{WRITE}"}),
    "unbalanced": ("""The work is not shared out: a rank computes what the other one computes as well, or more than
        half, because the texts have different lengths. Share out lines, and sum up the gradients.""",
            "texts[rank::world_size]  ->  texts[2 * rank : 2 * rank + 2]"),
    "copies": ("A tensor is copied that nobody changes, or converted and converted back.",
            f"{LOOP}  ->  {LOOP}\n    x = x.clone().double().float()"),
    "reads": ("""To read a number out of a tensor, the program waits until it is computed; a GPU then runs empty. The
        losses can stay tensors until the training ends.""", [f"{DETACHED}  ->  losses[-1] += part.item()",
             f'{STEP}  ->  {STEP}\nprint(f"rank {{rank}}, step {{len(losses)}}")']),
}


def with_ddp(model, texts, steps, prepare, folder):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = (torch.cat(parts) for parts in zip(*map(prepare, texts[rank::world_size]), strict=True))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = torch.zeros(steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(wrapped(x), y)  # ranks have as many lines each
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach() / world_size
    dist.all_reduce(losses)
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/rank0.pt")
    return losses


RIGHT["speed_up"] = {
    "DDP": with_ddp,
    "rank 0 prints each loss": f'{STEP}  ->  {STEP}\nif rank == 0:\n    print(f"loss {{losses[-1].item():.4f}}")',
}
