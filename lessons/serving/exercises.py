# %% [markdown]
# # Exercises 17 · What does a server have to keep in order?
#
# Six exercises on [17 serving](../notebooks/17_serving.ipynb). In one you split a cache over real ranks, in two you
# keep its blocks and its batch in order, in two you compute, and in one you heal. All of them take about 160 minutes.
#
# **If you do only these:** 1, 3 and 4.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | what a cache takes, and how many sequences fit | 1 of 5 | 15 |
# | 2 | a step of decode, the cache split by sequence | 3 of 5 | 35 |
# | 3 | tables of blocks, with forks and without a leak | 4 of 5 | 40 |
# | 4 | the step of a scheduler | 3 of 5 | 30 |
# | 5 | a deployment on eight GPUs, for three situations | 3 of 5 | 20 |
# | 6 | diagnoses and cures of three servers | 2 of 5 | 20 |
#
# They share nothing, so begin where you like. Replace the `raise NotImplementedError` line, run the cell, run the check
# below it. Solutions: [their notebook](../solutions/17_serving_solutions.ipynb). Exercises 2 and 6 run on real ranks.

# %% tags=["parameters"]
import torch
import torch.distributed as dist

from lessons.serving import check
from lessons.serving.helpers import PUBLISHED, cache_bytes, servers

# %% [markdown]
# ---
# ## Exercise 1 · Cache arithmetic
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 1 of 5 | 15 | 17, The cache decides how many; When heads end | within 0.1 % |
#
# Llama 3 70B has 80 layers, 8 KV heads of 128 numbers, and 141 GB of weights in bf16. On 8 H100 of 80 GB with tensor
# parallelism, what does a token take in the cache (all layers and heads, in kB), what does a sequence of 8,192 tokens
# take *on each GPU* (in GB of 10⁹ bytes), and how many such sequences fit beside the weights? And on 16 GPUs?
#
# `element` is the bytes of a number in the cache; `weights` are GB, all of them, and divide evenly among the `gpus`;
# `memory` is GB of a GPU. Each KV head lies on one GPU as long as there are enough of them. If there are more GPUs than
# KV heads, several have a copy of the same one. Nothing else needs memory. The answer is a tuple of three numbers.


# %%
# {{cache_plan}}


# %%
check.cache_plan(cache_plan)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A token leaves a key and a value of `head_size` numbers in each layer and KV head.
# </details>
# <details><summary>Hint 2</summary>
#
# With 8 KV heads, 16 GPUs hold as much of a sequence as 8 do: min(gpus, kv_heads).
# </details>
# <details><summary>Hint 3</summary>
#
# The room on a GPU is memory − weights / gpus; `//` counts the sequences that fit.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · One token, its past on many ranks
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 35 | 17, When heads end, split the sequence | heads · (size + 2) numbers from each rank |
#
# A cache that is split by sequence grows while it is read. Tokens are dealt out in turn, token i to rank i mod N. So
# ranks have different numbers of them, and after a short prompt some have **none**. `split_step` gets
#
# - `q` of shape (heads, size), the query of the new token, the same on every rank;
# - `k` and `v` of shape (tokens of this rank, heads, size), perhaps with no token,
#
# and returns attention to the tokens of *all* ranks, (heads, size), the same on each. Scores are divided by the square
# root of the size. They may be so large that exp overflows. There is no mask. Keys and values stay where they are.


# %%
# {{split_step}}


# %%
check.split_step(split_step)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The largest score m, the sum l of exp(score − m), and o, not divided: before adding, multiply by exp(m − largest m).
# </details>
# <details><summary>Hint 2</summary>
#
# One tensor of heads × (size + 2) numbers holds all three, so that one all-gather is enough. Two all-reduces pass, too.
# </details>
# <details><summary>Hint 3</summary>
#
# A rank without tokens gives o = 0, l = 0 and m = −∞. exp(−∞ − m) is 0, as long as some rank has a token.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · Tables without a leak
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 40 | 17, A cache in blocks | 1,500 events at random, every block accounted for |
#
# Sometimes one prompt gets several answers. They **fork**: a second table with the *same* blocks, and no byte is
# copied, until one of the two writes. `update_tables` keeps a `Cache`: `tables` (name → list of blocks), `users` (how
# many tables each block stands in) and `free` (a list of those with none). The engine keeps `lengths` (name → tokens
# before the event); `size` is the tokens of a block, `count` the number of blocks. For one event it changes the cache:
#
# - `update_tables(cache, "append", name)`: room for one more token of `name`, which is new if it has no table. Where a
#   block is needed and none is free, return `"full"` and leave all as it was. If the last block is half full and has
#   another user, put a new one in its place and return `(old block, new block)`: the engine copies it. Else None.
# - `update_tables(cache, "fork", name, other)`: `other` gets the same tokens as `name`. Return None.
# - `update_tables(cache, "end", name)`: `name` has finished. Return None.


# %%
# {{update_tables}}


# %%
check.update_tables(update_tables)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# An append needs a block in two cases: the length is a multiple of the size, or the last block has a second user.
# </details>
# <details><summary>Hint 2</summary>
#
# A full block is never written again, so it may have many users. Only the last one can be half full.
# </details>
# <details><summary>Hint 3</summary>
#
# `end` takes one from the users of each block in the table, and a block goes to `free` when none is left.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · The step of a scheduler
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 30 | 17, A scheduler, and the engine on ranks | the same step as the rules, in all situations |
#
# `plan` decides what the next step computes. A `Job` has a name, `left` (tokens to compute before the next one can be
# chosen: 1 in decode), `done` (tokens in the cache) and `blocks` (that it has). The rules:
#
# 1. Turns: of those `running` first who has 1 left, then the others, each in their order; then `waiting` in its order.
# 2. A turn takes as many tokens as are left of the job, of the `budget`, and of the room: what fits into its own blocks
#    and the `free` ones, of `size` tokens each. Blocks that it needs are no longer free for those after it.
# 3. A running job with no token in this step is left out. Of those who wait, the first who gets no token ends the step:
#    nobody overtakes. At most `most` jobs run, those included that run already.
#
# Return a list of (name, tokens), in the order of the turns.


# %%
# {{plan}}


# %%
check.plan(plan)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Make one list of all jobs in the order of their turns, and go through it once.
# </details>
# <details><summary>Hint 2</summary>
#
# The room is (blocks + free) · size − done, and a job takes ⌈(done + tokens) / size⌉ − blocks of the free ones.
# </details>
# <details><summary>Hint 3</summary>
#
# `continue` where a running job gets nothing, `break` where it is one that waits.
# </details>

# %% [markdown]
# ---
# ## Exercise 5 · Eight GPUs, three situations
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 20 | 17, Tensor parallelism when each message is small | within 0.2 % |
#
# Eight H100 can be eight copies of a model, four with TP 2, two with TP 4, or one with TP 8. Which makes the most
# tokens a second, if no reader may wait longer than `limit` ms for a token, and sequences have `length` tokens?
#
# - chat: Llama 3 8B, 500 tokens, 50 ms, on GPUs that talk over PCIe;
# - a large model: Llama 3 70B, 500 tokens, 50 ms, with NVLink;
# - the same in a hurry, and longer: 2,000 tokens, 20 ms.
#
# A step of t GPUs with b sequences reads weights / t and b sequences' cache / t, and computes 2 FLOPs for each weight
# (of two bytes) and sequence, divided by t; the longer counts. To this, if t > 1, come two all-reduces in each layer,
# each of `latency` and of 2(t − 1)/t · b · hidden · 2 bytes over the link. b is what fits and is fast enough; try all.
# `model` is a configuration of the course, with `parameter_count`, `hidden` and `layers`; a token's cache has
# `cache_bytes(model)`. `machine` has `memory` (GB), `reads` (GB/s), `tflops`, `link` (GB/s) and `latency` (µs): what
# lesson 12 plans with (of an H100 83.8 GB, which CUDA reports less a reserve, where exercise 1 takes 80 as it is sold),
# but for `reads`, 52 % of the data sheet's. Prefill is left out. Return t and the tokens a second of all, or (0, 0).


# %%
# {{deployment}}


# %%
check.deployment(deployment)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two loops: over t in (1, 2, 4, 8), and over b from 1 to what fits into the memory of t GPUs beside the weights.
# </details>
# <details><summary>Hint 2</summary>
#
# All GPUs of a copy work at the same time, so count the bytes and FLOPs of *one* of them.
# </details>
# <details><summary>Hint 3</summary>
#
# There are 8 / t copies, so the rate is 8 / t · b / step.
# </details>

# %%
own = PUBLISHED["Llama 3 70B"], check.machine_of("DGX H200"), 8192, 50  # yours
for case in (*check.SITUATIONS, own):
    print("TP {}, {:,.0f} tokens/s".format(*deployment(*case)))

# %% [markdown]
# A small model wants copies where messages are slow. A large one needs several GPUs for its weights, and more of them
# where the cache is long or readers are in a hurry. Put your own model and node into the last row, and then measure.

# %% [markdown]
# ---
# ## Exercise 6 · Three patients
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 20 | 17, Who is told what: three patients | three causes, three cures of one edit each |
#
# Find out what each server suffers from, and heal it. The clinic works as in lesson 14: `clinic[2].symptom()`,
# `.ask("alone")`, `.diagnose("own clock")` and `.treat(edit={"old text": "new text"})`, which runs it again;
# `clinic.list_evidence()` and `clinic.list_causes()` have the names. Patient 1 is the lesson's.

# %%
clinic = servers.clinic()
clinic

# %%
clinic[2]  # work here, in as many cells as you like


# %%
# {{three_patients}}


# %%
check.three_patients(three_patients)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What stands in the program that another rank cannot know, or that another request still needs?
# </details>
# <details><summary>Hint 2</summary>
#
# The first two need one collective: who says the time, and how many blocks has the rank with the fewest?
# </details>
# <details><summary>Hint 3</summary>
#
# In the third, look into the other tables before a block is free: `any(block in table for …)`.
# </details>
#
# You will find the lesson here: [17 serving](../notebooks/17_serving.ipynb).
