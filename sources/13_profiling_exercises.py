# %% [markdown]
# # Exercises 13 · Where does a step's time go?
#
# Five exercises on [13 profiling](../notebooks/13_profiling.ipynb). Three read traces, one is on paper, and one mends a
# program. All of them take about 120 minutes. **If you do only these:** 1 and 2.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | who came late to each collective | 3 of 5 | 25 |
# | 2 | exposed communication, by hand | 3 of 5 | 20 |
# | 3 | MFU out of a log, on paper | 2 of 5 | 15 |
# | 4 | what changed between two traces | 2 of 5 | 20 |
# | 5 | a slow program, made fast without changing its numbers | 4 of 5 | 40 |
#
# *Follows* on each card names the section of the lesson to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/13_profiling_solutions.ipynb).
#
# **What a check does.** It calls your function with traces whose answer is known: made up, drawn at random, and
# *recorded* on GPUs. A trace has `events`, each with `name`, `category`, `start` and `end` in microseconds, `row` and
# `step`.

# %% tags=["parameters"]
from collections import Counter
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_utils.checks import profiling as check
from course_utils.checks.profiling_program import per_step, record_run
from course_utils.traces import Trace, kind, matched

# %% [markdown]
# ---
# ## Exercise 1 · Who is late?
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 3 of 5 | 25 | 13, Who arrives last? |
#
# In a collective that waits for all ranks, the rank that arrives last makes the others wait. Name it for each
# collective, with the wait of the rank that came first. The ranks' clocks may differ by a constant, but all ranks leave
# such a collective at the same moment. `matched(ranks)` gives for each collective its events, one a rank.


# %%
def late(ranks: list[Trace]) -> list[tuple[int, float]]:
    """For each matched collective, in its order: the rank that arrived last, and the wait in us.

    The wait lasts from the first arrival to the last one, on one clock.
    """
    ### BEGIN SOLUTION
    rows = matched(ranks)
    ahead = [median(row[rank].end - row[0].end for row in rows) for rank in range(len(ranks))]
    found = []
    for row in rows:
        starts = [event.start - clock for event, clock in zip(row, ahead, strict=True)]
        last = starts.index(max(starts))
        found.append((last, max(starts) - min(starts)))
    return found
    ### END SOLUTION


# %%
check.late(late)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Put the clocks right first. Compare the ends of each collective on a rank with its ends on rank 0.
# </details>
# <details><summary>Hint 2</summary>
#
# The median of these differences is how far the rank's clock is ahead. Subtract it from the rank's starts.
# </details>
# <details><summary>Hint 3</summary>
#
# For each collective, the largest start belongs to the late rank; the wait is the largest start minus the smallest.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · Exposed communication
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 3 of 5 | 20 | 13, An analyser in 60 lines |
#
# Communication is exposed while a rank communicates and computes nothing. Events overlap, touch, lie inside one
# another, and run on several streams. `kind(event, trace.on_gpu)` says what an event is: `"compute"`,
# `"communication"`, `"copy"` or `"other"`. Copies neither compute nor communicate.


# %%
def exposed(trace: Trace) -> float:
    """Microseconds in which at least one event communicates and none computes."""
    ### BEGIN SOLUTION
    edges = []
    for event in trace.events:
        what = kind(event, trace.on_gpu)
        if what in ("compute", "communication"):
            edges += [(event.start, 1, what), (event.end, -1, what)]
    running, before, total = Counter(), 0.0, 0.0
    for moment, change, what in sorted(edges):
        if running["communication"] > 0 and running["compute"] == 0:
            total += moment - before
        running[what] += change
        before = moment
    return total
    ### END SOLUTION


# %%
check.exposed(exposed)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Draw the events as bars. Only the moments at which a bar begins or ends can change the answer.
# </details>
# <details><summary>Hint 2</summary>
#
# Sort these moments. Count how many events compute and how many communicate between one moment and the next.
# </details>
# <details><summary>Hint 3</summary>
#
# Add the time between two moments if the count of communication is above 0 and that of compute is 0.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · MFU out of a log
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 15 | 13, What to watch: one line a step |
#
# A log says how long each step took, in seconds. A step processes `tokens` tokens on all ranks together, and the first
# `warm_up` steps do not count. A GPU can compute `peak_tflops` · 10¹² FLOP a second. The run recomputes all
# activations. How many tokens per second does it process over the steps that count, and what is its MFU (model FLOPs
# utilization)? The numbers of the check are made up.


# %%
def mfu(
    seconds: tuple[float, ...],
    warm_up: int,
    tokens: int,
    ranks: int,
    parameters: float,
    peak_tflops: float,
) -> tuple[float, float]:
    """Tokens per second of all ranks together, and MFU as a fraction."""
    ### BEGIN SOLUTION
    steady = seconds[warm_up:]
    rate = tokens * len(steady) / sum(steady)
    return rate, 6 * parameters * rate / (ranks * peak_tflops * 1e12)
    ### END SOLUTION


# %%
check.mfu(mfu)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Leave out the warm-up. Tokens per second are all tokens of the other steps by all their seconds.
# </details>
# <details><summary>Hint 2</summary>
#
# A token costs 2 FLOP a parameter in forward and 4 in backward. MFU does not count what is recomputed.
# </details>
# <details><summary>Hint 3</summary>
#
# MFU = 6 · parameters · tokens per second / (ranks · peak in FLOP per second).
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · What changed?
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 20 | 13, Before and after a change |
#
# Here are two traces of one program, before and after a change. Times differ in every step, so they are hard to
# compare. Counts are easier: what a step does more or less often on average is what has changed. The traces may have
# different numbers of steps, which `trace.steps` lists. An event outside all steps has the `step` None, and does not
# count.


# %%
def changed(before: Trace, after: Trace) -> dict[str, tuple[float, float]]:
    """Name to (times per step before, times per step after), where these two differ.

    A time per step: the events of this name in all steps, divided by the number of steps.
    """
    ### BEGIN SOLUTION
    counts = []
    for trace in (before, after):
        names = Counter(event.name for event in trace.events if event.step is not None)
        counts.append({name: count / len(trace.steps) for name, count in names.items()})
    pairs = {n: (counts[0].get(n, 0), counts[1].get(n, 0)) for n in {*counts[0], *counts[1]}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    ### END SOLUTION


# %%
check.changed(changed)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `collections.Counter` counts the events of each name.
# </details>
# <details><summary>Hint 2</summary>
#
# Divide by the number of steps before you compare.
# </details>
# <details><summary>Hint 3</summary>
#
# Go through the names of both traces; a name that one of them lacks has the count 0 there.
# </details>

# %% [markdown]
# ---
# ## Exercise 5 · Find seven faults
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 40 | 13, A slow program | the same losses and weights, to 1e-5; no fault left |
#
# The program below trains a net of ten layers on two ranks, and it is right: its losses are those of one process. But
# it has seven faults that cost time. Each of them is common, and each of them shows in a trace as a count: something
# happens more often than it has to, or more often on one rank than on the other. Find them, and write `speed_up`,
# which computes the same numbers without them.
#
# `texts` holds four micro-batches as text, with one example in a line; they have 48, 48, 16 and 16 lines, and they
# are the same ones in every step. `prepare(text)` reads one: inputs and targets. `model` has the same weights on both
# ranks; inputs have the shape (lines, 32), targets (lines, 1). Of the files in `folder` only `rank0.pt` is needed, with
# the last `state_dict` of the model. The texts of the check are those of `record_run`.


# %%
def slow(model, texts, steps, prepare, folder):
    rank, half = dist.get_rank(), len(texts) // 2
    mine = texts[rank * half : (rank + 1) * half]
    lines = sum(len(text.splitlines()) for text in texts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = 0.0
        for text in mine:
            x, y = prepare(text)
            x = x.clone().double().float()
            part = F.mse_loss(model(x), y, reduction="sum") / lines
            part.backward()
            loss += part.item()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = torch.tensor(loss)
        dist.all_reduce(total)
        losses.append(total.item())
        torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")
        print(f"rank {rank}, step {step}: loss {losses[-1]:.4f}")
    return losses


# %% [markdown]
# Look before you change anything. `record_run` runs a program on two ranks and returns their traces; `per_step` counts
# names. Add names that you want to know about, here and for your own version.

# %%
names = ["gloo:all_reduce", "prepare", "aten::addmm", "aten::clone"]
for name, ranks in per_step(record_run(slow), names).items():
    print(f"{name:>16} {ranks[0]:4.0f} a step on rank 0, {ranks[1]:4.0f} on rank 1")

# %% [markdown]
# Now mend it. Copy the body of `slow` and remove one fault at a time. The check names one fault of those that are left,
# the one that costs most here first. When none is left, it says how much faster your program has become.


# %%
def speed_up(model, texts: list[str], steps: int, prepare, folder: str) -> list[float]:
    """Train as slow does; return each step's mean loss over all lines of all ranks."""
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    lines = sum(len(text.splitlines()) for text in texts)
    mine = [prepare(text) for text in texts[rank::world_size]]
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(torch.zeros(()))
        for x, y in mine:
            part = F.mse_loss(model(x), y, reduction="sum") / lines
            part.backward()
            losses[-1] += part.detach()
        gradients = [parameter.grad for parameter in model.parameters()]
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)
        vector_to_parameters(flat, gradients)
        optimizer.step()
    all_losses = torch.stack(losses)
    dist.all_reduce(all_losses)
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/rank0.pt")
    return all_losses.tolist()
    ### END SOLUTION


# %% tags=["nbval-ignore-output"]
check.speed_up(speed_up)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go through the loop line by line and ask of each line: how often does it run in six steps, on how many ranks, and how
# often does it have to? Three of the seven need no look at the trace.
# </details>
# <details><summary>Hint 2</summary>
#
# In the trace: `gloo:all_reduce` against the number of tensors of the net; `aten::_local_scalar_dense`, which is
# `.item()`; `aten::_to_copy` and `aten::clone`. For the balance between the ranks count lines, not micro-batches.
# </details>
# <details><summary>Hint 3</summary>
#
# Before the loop: prepare this rank's texts, `texts[rank::2]`. In the loop: `torch.cat` of all flattened gradients, one
# all-reduce, `copy_` back. After the loop: one all-reduce of the stacked losses, and the file on rank 0.
# </details>
# <details><summary>Does DDP do this by itself?</summary>
#
# It makes the buckets, and sends the first while backward still computes the next. The other six faults remain.
# </details>
