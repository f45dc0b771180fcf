# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercises 14 · It hangs. Which rank, which call, why?
#
# Four exercises on [14 debugging hangs](../notebooks/14_debugging_hangs.ipynb). Two write the code that prevents a
# hang, and two are the clinic. All of them take about 135 minutes. **If you do only these:** 1 and 3.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | an all-reduce that compares the calls first | 3 of 5 | 30 |
# | 2 | a step that all ranks skip, or none | 3 of 5 | 25 |
# | 3 | diagnoses and cures of patients 1 to 9 | 3 of 5 | 45 |
# | 4 | the same for patients 10 to 15 | 4 of 5 | 35 |
#
# *Follows* on each card names the section of the lesson to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/14_debugging_hangs_solutions.ipynb).
#
# **What a check does.** It calls your function on real ranks, looks at the result, and counts what was sent. An answer
# that hangs is ended, and the message says where each rank waits.

# %% tags=["parameters"]
import hashlib
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from lessons.debugging_hangs import check
from lessons.debugging_hangs.clinic import hangs

# %% [markdown]
# ---
# ## Exercise 1 · An all-reduce that compares first
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 30 | 14, Calls compared before they run | one more collective, of 256 bytes at most |
#
# Ranks that pass different reductions to one all-reduce get a wrong number, and nobody complains. Write an all-reduce
# that compares reduction, shape and dtype over all ranks before it reduces. If they are equal, the tensor is reduced in
# place. If not, *every* rank raises the same error, nobody waits, and the tensor stays as it was.
#
# The usual call is the one that most ranks pass; of two that are passed equally often, the one of the lowest rank.


# %%
# {{checked_all_reduce}}


# %%
check.checked_all_reduce(checked_all_reduce)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What the ranks exchange must have the same size on all of them, whatever they were called with. Otherwise the
# comparison itself is a mismatch.
# </details>
# <details><summary>Hint 2</summary>
#
# Write the call as a text and take a hash of it: `hashlib.sha256(text.encode()).digest()` has 32 bytes, always.
# </details>
# <details><summary>Hint 3</summary>
#
# After an all-gather each rank holds the same list, so all of them come to the same result: `Counter(list)` counts,
# and `most_common(1)` gives the usual one, of several the first.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · All skip, or none
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 14, The clinic | two collectives in a step, one if it is skipped; flag of ≤ 64 bytes |
#
# A long batch does not fit, and the rank catches the error and goes on with the next one. Alone this is fine. In a job
# it puts the rank one call ahead of all the others. Write the loop in such a way that a batch that one rank cannot
# compute is skipped by all of them. Otherwise all ranks apply the mean of their gradients.


# %%
# {{skip_together}}


# %%
check.skip_together(skip_together)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A rank that runs out of memory must still call every collective of the step that the others call.
# </details>
# <details><summary>Hint 2</summary>
#
# Let all ranks reduce one number: 1 where memory was full, 0 elsewhere. Which reduction tells all of them whether
# anybody had a 1?
# </details>
# <details><summary>Hint 3</summary>
#
# `MAX`. If the result is not 0, count a skip and go on to the next batch; no gradient is sent.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · The clinic
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 45 | 14, The clinic | each fault with rank and call, each program healed by an edit |
#
# Find out what each of the patients 1 to 9 suffers from, and heal it. In the lesson you have seen patient 1.
#
# | you write | it does |
# |---|---|
# | `clinic[3]` | complaint and program of patient 3 |
# | `clinic[3].symptom()` | runs the program: what each rank says |
# | `clinic[3].ask("stacks")` | evidence, which has a price |
# | `clinic[3].diagnose("one rank only", rank=0, call="barrier")` | a wrong one is answered with evidence |
# | `clinic[3].treat(edit={"old text": "new text"})` | changes the program and runs it again |

# %%
clinic = hangs.clinic()
clinic

# %%
clinic.list_causes()

# %%
clinic.list_evidence()

# %% [markdown]
# Work here, in as many cells as you like.

# %%
clinic[2]

# %%
clinic[2].ask("stacks")

# %% [markdown]
# Then write down what you have found. `rank` and `call` are those of the fault, as `diagnose` takes them.


# %%
# {{diagnoses_and_cures}}


# %%
check.diagnoses_and_cures(diagnoses_and_cures)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with `stacks`, which is cheap. Where the ranks stand in different lines, ask what decided which line they took.
# </details>
# <details><summary>Hint 2</summary>
#
# Patients 1 to 5 wait in two different calls. They differ in *why* a rank took another way: a value, a branch on the
# rank, the number of batches, an error, the number of tokens. Patients 6 and 8 stand in one line.
# </details>
# <details><summary>Hint 3</summary>
#
# Patient 7 fails at once: read the message, and whose ranks `src` counts. Patient 9 finishes: `verify` compares what
# the ranks pass to their reductions.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · The second ward
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 35 | 14, The clinic | each fault with rank and call, each program healed by an edit |
#
# Six more patients, who are harder to read. In most of them the call in which a rank waits is not the one at fault, one
# of them ends without a word, and one fails with a message that says nothing. Where several ranks are at fault, any of
# them is right. If the faulty call is made by DDP, name `backward`.

# %%
clinic[10]

# %%
clinic[12].ask("fingerprint")


# %%
# {{second_ward}}


# %%
check.second_ward(second_ward)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write down what *each* rank calls, in order, until it stops. For patient 10 write both lists of messages side by side.
# </details>
# <details><summary>Hint 2</summary>
#
# `prints` shows the line at which the ranks part. On what does that line decide: on data, on chance, on the rank? If
# the ranks never part, the arguments of a call differ, or all of them do the same wrong thing.
# </details>
# <details><summary>Hint 3</summary>
#
# Patient 12: which parameters have no gradient? DDP sends a bucket once *all* gradients in it are there. Patient 15:
# which group did DDP get, and is it still there when `backward` is called?
# </details>

# %%
clinic.score()
