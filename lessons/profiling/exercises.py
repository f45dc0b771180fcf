# %% [markdown]
# # Exercises 13 · Where does a step's time go?
#
# Three exercises on [13 profiling](../notebooks/13_profiling.ipynb). Two read traces, and one mends a program. All of
# them take about 85 minutes. **If you do only these:** 1 and 2.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | who came late to each collective | 3 of 5 | 25 |
# | 2 | exposed communication, by hand | 3 of 5 | 20 |
# | 3 | a slow program, made fast without changing its numbers | 4 of 5 | 40 |
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

from course_utils.traces import Trace, kind, matched
from lessons.profiling import check
from lessons.profiling.program import per_step, record_run

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
# {{late}}


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
# {{exposed}}


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
# ## Exercise 3 · Find seven faults
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 40 | 13, A slow program | the same losses and weights, to 1e-5; no fault left |
#
# The program below trains a net of ten layers on two ranks, and it is right: its losses are those of one process. But
# it has seven faults that cost time. Each of them is common, and each of them shows in a trace as a count: something
# happens more often than it has to, or more often on one rank than on the other. (That *one* rank prints one line a
# step is no fault.) Find them, and write `speed_up`,
# which computes the same numbers without them.
#
# `texts` holds four micro-batches as text, with one example in a line; they have 48, 48, 16 and 16 lines, and they
# are the same ones in every step. `prepare(text)` reads one: inputs and targets. `model` has the same weights on both
# ranks; inputs have the shape (lines, 32), targets (lines, 1). Of the files in `folder` only `rank0.pt` is needed, with
# the last `state_dict` of the model. The texts of the check are those of `record_run`.


# %%
# {{slow}}


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
# {{speed_up}}


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
