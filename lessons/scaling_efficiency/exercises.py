# %% [markdown]
# # Exercises 05 · What does the eighth GPU really buy?
#
# Six exercises on [05 scaling efficiency](../notebooks/05_scaling_efficiency.ipynb). In two you compress gradients
# and measure their noise on real ranks. In four you work out speed-ups, money, bucket sizes and utilization on paper
# and let Python do the arithmetic. All of them take about 135 minutes.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | top-k compression with error feedback | 4 of 5 | 40 |
# | 2 | the laws of Amdahl and Gustafson | 2 of 5 | 15 |
# | 3 | dollars for a training run | 2 of 5 | 10 |
# | 4 | the best number of buckets | 4 of 5 | 30 |
# | 5 | MFU and HFU from tokens per second | 2 of 5 | 15 |
# | 6 | the noise scale of the gradients | 3 of 5 | 25 |
#
# Each stands alone. *Follows* on each card names the section of the lesson to look things up in; those of 1, 4 and 6
# are in the lesson's deeper half.
#
# **If you do only these:** 1, 2 and 5.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/05_scaling_efficiency_solutions.ipynb).
#
# **What a check does.** In Exercises 1 and 6 it runs your function on real ranks, compares every result with that of
# one process, and reads the **ledger** of each rank for the bytes. The others it calls with the numbers of the text
# and with others, so that a typed result does not pass.

# %% tags=["parameters"]
import torch
import torch.distributed as dist

from course_utils import launch
from lessons.scaling_efficiency import check

WORLD_SIZE = 2  # ranks of the demonstration; the checks choose their own

# %% [markdown]
# ---
# ## Exercise 1 · Top-k with error feedback
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 40 | 05, Compressed gradients | k values and k indices of each rank |
#
# Of a gradient with many elements, a few carry most of its length. **Top-k** compression sends the k elements of
# the largest magnitude, with their indices. What is not sent must not be lost: each rank keeps it in a **residual**
# and adds it to its next gradient. This is **error feedback**.
#
# Ranks choose different indices, so an all-reduce cannot add what they send. An all-gather can bring it to all ranks.
# Where two ranks chose the same index, their values have to be added. Predict what the cell below prints.

# %%
indices = torch.tensor([1, 3, 1])
values = torch.tensor([10.0, 20.0, 5.0])
assigned, added = torch.zeros(4), torch.zeros(4)
assigned[indices] = values
added.index_add_(0, indices, values)
print(f"assigned {assigned.tolist()}, added {added.tolist()}")

# %% [markdown]
# An assignment keeps one of the two values at index 1; `index_add_` adds them. Now write one step:
#
# 1. Add the residual to the gradient.
# 2. Of this sum, choose the k elements of largest magnitude. Keep the others as the new residual, and zero where an
#    element was chosen.
# 3. Send the chosen values and their indices to all ranks. Return the mean over the ranks.


# %%
# {{top_k_mean}}


# %%
check.top_k_mean(top_k_mean)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Work on a flat tensor, and give the result the shape of `gradient` at the end. `total.abs().topk(k).indices`
# chooses; `total[indices]` are the values with their signs.
# </details>
# <details><summary>Hint 2</summary>
#
# The new residual is `total` with zeros at the indices. The caller keeps the tensor `residual`, so write into it:
# `residual.copy_(…)`.
# </details>
# <details><summary>Hint 3</summary>
#
# Two `dist.all_gather_single`, one for the values, one for the indices, into tensors of N · k elements. Then
# `index_add_` into zeros, with the values divided by N.
# </details>
# <details><summary>From which k on is that no compression any more?</summary>
#
# A ring all-reduce of S elements sends 2(N − 1)/N · S of them, 8 bytes each in float64. Here N − 1 times k values and
# k indices travel, 16 bytes a pair. The two are equal at k = S/N: on 2 ranks half of the gradient, on 100 ranks the
# top 1 %. The traffic grows with N, so many ranks need a small k.
# </details>

# %% [markdown]
# Does the residual pay? Two ranks send 1 of 4 elements in each step, and their gradients never change. Without error
# feedback three elements would never arrive. When your function passes, see what has arrived on average after 1, 10
# and 100 steps.


# %%
def arrived(steps):
    gradient = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    residual = torch.zeros_like(gradient)
    return sum(top_k_mean(gradient, residual, 1) for _ in range(steps)) / steps


for steps in (1, 10, 100):
    mean = launch(arrived, steps, world_size=WORLD_SIZE, backend="gloo")[0]
    print(f"after {steps:>3} steps on average {mean.tolist()}")

# %% [markdown]
# The mean over the steps tends to the gradient. Small elements arrive late, and then all at once.

# %% [markdown]
# ---
# ## Exercises 2 to 5 · On paper
#
# Work out the formula by hand, then write it as a function of its arguments. The check calls it with the numbers of
# the text and with others. Answers within 1 % pass, in Exercise 4 within 0.1 %.

# %% [markdown]
# ## Exercise 2 · Amdahl and Gustafson
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 15 | 05, Two laws |
#
# A step takes 800 ms on 1 GPU and 130 ms on 8, with the same batch in all. Take Amdahl's model: a part s of the
# one-GPU time is serial, the rest is divided by N.
#
# - How large is s?
# - What speed-up does the model promise for 64 GPUs, and for ever more of them, with the same batch?
# - How many times the work per second does it promise for 64 GPUs if the batch grows with their number, and the
#   serial part does not (Gustafson)?


# %%
# {{amdahl_and_gustafson}}


# %%
check.amdahl_and_gustafson(amdahl_and_gustafson)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In units of the one-GPU time, a step on N GPUs takes s + (1 − s)/N. You know that for N = 8.
# </details>
# <details><summary>Hint 2</summary>
#
# s = (t_N/t_1 − 1/N) / (1 − 1/N), known as the Karp–Flatt metric. The speed-up is 1/(s + (1 − s)/N).
# </details>
# <details><summary>Hint 3</summary>
#
# With N times the batch, a step on N GPUs takes as long as one on 1 GPU did. One GPU alone would need s + (1 − s)·N
# for it.
# </details>
# <details><summary>What is the model worth?</summary>
#
# It puts all that is lost into one constant. Communication is not constant: latencies grow with N, and overlap
# hides a part. Fit s at 8 and at 32 GPUs; if it grows, something that grows with N is in it.
# </details>

# %% [markdown]
# ## Exercise 3 · Dollars for a run
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 10 | 05, What does it cost? |
#
# A model trains at 40,150 tokens per second on each of 8 GPUs, and at 15,700 on each of 256 (*recorded*, data
# parallelism, Ultra-Scale Playbook, Hugging Face): an efficiency of 39 %. The run has 100 billion tokens. Say that
# a GPU costs $2.50 an hour, or $1.00 as a **spot** instance that can be taken away; then 10 % of all hours are lost
# to restarts and to work since the last checkpoint. These prices are assumptions; put in those of today.
#
# How long does the run take, and what does it cost: on 256 GPUs, and on 256 spot GPUs? And on 8?


# %%
# {{cost_of_run}}


# %%
check.cost_of_run(cost_of_run)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First the tokens per second of all GPUs together, then the seconds, then the hours, then the money.
# </details>
# <details><summary>Hint 2</summary>
#
# If 10 % of all hours are lost, 90 % are useful: hours = useful / 0.9, not useful · 1.1.
# </details>
# <details><summary>Hint 3</summary>
#
# Dollars = hours · gpus · dollars. The number of GPUs cancels but for the efficiency: dollars = tokens ·
# dollars / (rate · efficiency · 3600 · (1 − lost)).
# </details>
# <details><summary>So is the smallest number of GPUs always the cheapest?</summary>
#
# By this formula yes, as efficiency falls with the number of GPUs: 256 GPUs cost 2.6 times as much as 8. What is
# bought is time, here 12.5 times less of it. Memory can turn it round: a model that does not fit on few GPUs, or
# only with tiny micro-batches, is inefficient there.
# </details>

# %% [markdown]
# ## Exercise 4 · The best number of buckets
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 4 of 5 | 30 | 05, Buckets, and what hides behind backward |
#
# Backward takes t, and gradients of S bytes become ready at a steady rate. They are cut into k equal buckets, k at
# most the number of tensors. Bucket i is complete at i · t/k. Its all-reduce starts then, or when the one before it
# ends, whichever is later. An all-reduce of b bytes among N ranks takes 2(N−1) · (α + b/(N·B)) in a ring, where B is
# the speed of a link in bytes per second, and does not slow backward down.
#
# Few large buckets overlap badly: the last one is complete when backward ends. Many small ones pay α each. 2.6 GB of
# gradients in 148 tensors, t = 200 ms, 64 ranks, α = 14 µs: which k is best at 400 Gb/s, and which at 100 Gb/s?


# %%
# {{best_buckets}}


# %%
check.best_buckets(best_buckets)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Draw it for 3 buckets: above, backward as three pieces; below, the three all-reduces. Once with an all-reduce
# shorter than a piece, once with a longer one.
# </details>
# <details><summary>Hint 2</summary>
#
# If an all-reduce is shorter than a piece, only the last one sticks out behind backward. If it is longer, they follow
# each other without a gap from t/k on. One formula holds both: t/k + (k − 1) · max(t/k, c) + c.
# </details>
# <details><summary>Hint 3</summary>
#
# There are 148 numbers to try. `min(range(1, tensors + 1), key=finish)` does it.
# </details>
# <details><summary>Is there a formula?</summary>
#
# Let A = 2(N−1)α be the latency of one all-reduce, and R = 2(N−1)/N · S/B the time for all bytes. As long as k·A +
# R < t, only A + R/k sticks out, and more buckets are better. Beyond, the end is at t/k + k·A + R, with its minimum
# at k = √(t/A). So if R > t, take √(t/A), the size of the gradient does not matter; otherwise the larger of √(t/A)
# and (t − R)/A, and no more than there are tensors.
# </details>

# %% [markdown]
# ## Exercise 5 · MFU and HFU
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 15 | 05, Memory for time, and two utilizations |
#
# A model of 175 billion parameters trains at 102,400 tokens per second on 1,024 A100s together. Each could do 312
# TFLOP/s in bf16. Activation checkpointing repeats the whole forward pass. (By section 15 this is GPT-3 at 140
# TFLOP/s a GPU.) Count 2 FLOPs for each parameter and token in forward, and twice as many in backward; leave
# attention out.
#
# - How large are MFU and HFU, as shares of the peak?
# - Suppose the memory sufficed without checkpointing, and HFU stayed as it is. How many tokens per second would it
#   be?


# %%
# {{mfu_and_hfu}}


# %%
check.mfu_and_hfu(mfu_and_hfu)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First the FLOPs of one token: 2Ψ in forward, 4Ψ in backward, and 2Ψ more for a forward pass that is repeated whole.
# </details>
# <details><summary>Hint 2</summary>
#
# Then the FLOP/s of one GPU: FLOPs of a token · tokens per second / GPUs. Divide by the peak in FLOP/s. MFU takes 6Ψ,
# HFU takes all that is computed.
# </details>
# <details><summary>Hint 3</summary>
#
# At the same HFU the GPUs compute as many FLOPs per second, and a token needs only 6Ψ of them: tokens per second grow
# by (6 + 2 · recomputed) / 6.
# </details>
# <details><summary>Is checkpointing a bad idea, then?</summary>
#
# Not if it makes room for a larger batch or for less communication. Then HFU rises, and MFU may rise with it. What
# the two numbers tell you is whether it was worth it: watch MFU.
# </details>

# %% [markdown]
# ---
# ## Exercise 6 · The noise scale
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 05, How large a batch still pays | one all-reduce of the gradient, and one number |
#
# The gradient of a batch of b samples is the true gradient plus noise, and on average its squared length is
# |g|² + v/b. Here |g|² is the signal, and v the noise of a single sample. The **noise scale** is v/|g|².
#
# Each rank has the gradient of its own `samples` samples. Their mean over N ranks is a gradient of N · `samples`. So
# you can measure the squared length for two batch sizes: as the mean over the ranks, and of the mean over the ranks.
# That makes two equations for two unknowns.


# %%
# {{noise_scale}}


# %%
check.noise_scale(noise_scale)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Let A be the mean over the ranks of the squared lengths, and M the squared length of the mean gradient. Both need an
# all-reduce; the input must stay as it is.
# </details>
# <details><summary>Hint 2</summary>
#
# A = |g|² + v/b and M = |g|² + v/(N·b). Subtract one from the other, and v is left.
# </details>
# <details><summary>Hint 3</summary>
#
# v = (A − M) · N · b / (N − 1), and |g|² = (N · M − A) / (N − 1).
# </details>
# <details><summary>What do you do with it in a real job?</summary>
#
# Average v and |g|² over many steps before you divide, because single steps scatter, and |g|² can even come out
# negative. Then compare with your batch: far above the noise scale, more ranks should work on something else than on
# a larger batch.
# </details>
