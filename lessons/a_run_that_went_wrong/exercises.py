# %% [markdown]
# # Exercises 19 · The loss falls. Is the run all right?
#
# Three exercises on [19 a run that went wrong](../notebooks/19_a_run_that_went_wrong.ipynb). Each makes one of its days
# impossible. All of them take about 65 minutes. **If you do only these:** 2 and 3.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | weights for each place of a mesh | 2 of 5 | 15 |
# | 2 | a step in which tokens count alike | 3 of 5 | 25 |
# | 3 | a detector of drifting replicas | 3 of 5 | 25 |
#
# *Follows* on each card names the section of the lesson to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions
# notebook](../solutions/19_a_run_that_went_wrong_solutions.ipynb).
#
# **What a check does.** It calls your function on real ranks, compares the result with what one process gives, and
# counts what was sent.

# %% tags=["parameters"]
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lessons.a_run_that_went_wrong import check

PAD = -1  # a target that does not count

# %% [markdown]
# ---
# ## Exercise 1 · A seed for each place
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 15 | 19, Day 1: two copies of a program | nothing is sent |
#
# The mesh has data-parallel replicas (dp), each of several tensor-parallel ranks (tp). What is whole must be the same
# on all ranks. Pieces of a matrix must be different on the ranks of one replica, and the same on ranks with the same
# place in different replicas. Draw the weights of one rank so that this holds, without a message.


# %%
# {{draw_weights}}


# %%
check.draw_weights(draw_weights)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two generators: on which place does the seed of each depend?
# </details>
# <details><summary>Hint 2</summary>
#
# `torch.Generator().manual_seed(…)`, made once before the loop, goes on from tensor to tensor. The rank in the whole
# job would give each replica other pieces.
# </details>
# <details><summary>Hint 3</summary>
#
# One generator with the seed, for what is whole. One with a seed that depends on `seed` and `tp_rank`, and that no
# other use shares, for pieces.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · Tokens that count alike
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 19, Day 2: documents instead of windows | one process's gradient to 1e-12; gradients sent once |
#
# Write the backward passes of a step, for several micro-batches on each of several ranks, so that each token that
# counts has the same weight, wherever it is. Some micro-batches are padding only.


# %%
# {{token_step}}


# %%
check.token_step(token_step)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The denominator has to be known before the first backward pass. How many numbers must be sent for it?
# </details>
# <details><summary>Hint 2</summary>
#
# `F.cross_entropy(…, ignore_index=PAD, reduction="sum")` is a sum, and 0 where nothing counts.
# </details>
# <details><summary>Hint 3</summary>
#
# Divide each sum by the tokens of all ranks. Then gradients and losses are *added* over micro-batches and ranks; under
# DDP, which divides by the number of ranks, you would multiply by it.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · Who has drifted?
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 19, Day 4: less memory | a rank sends at most 300 bytes for each tensor |
#
# Find the parameters that are not the same on all ranks, so cheaply that a job can do it every hundred steps. Every
# rank must come to the same list, because all of them have to stop, or none.


# %%
# {{drifted}}


# %%
check.drifted(drifted)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Reduce each parameter to one whole number that changes when any bit changes, or moves.
# </details>
# <details><summary>Hint 2</summary>
#
# `p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()` are the bytes of any dtype, and `zlib.crc32` takes
# them.
# </details>
# <details><summary>Hint 3</summary>
#
# All numbers are equal if and only if the smallest and the largest are: two all-reduces, whatever the number of ranks.
# </details>
#
# You will find the lesson here: [19 a run that went wrong](../notebooks/19_a_run_that_went_wrong.ipynb).
