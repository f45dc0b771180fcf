# %% [markdown]
# # Exercises 03 · Can you make a ring, a tree and a cluster add up?
#
# Seven exercises on [03 NCCL](../notebooks/03_nccl.ipynb). In five you build all-reduce out of messages between two
# ranks, or mend one; in two you work out times on paper and let Python do the arithmetic. All of them take about
# 180 minutes. **If you do only these:** 1, 2 and 6.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | a ring reduce-scatter | 3 of 5 | 25 |
# | 2 | a ring all-gather, and the whole ring all-reduce | 2 of 5 | 30 |
# | 3 | a tree all-reduce | 4 of 5 | 30 |
# | 4 | an all-reduce for two nodes that beats the ring | 5 of 5 | 40 |
# | 5 | a mended ring | 3 of 5 | 25 |
# | 6 | which algorithm is fastest, on paper | 2 of 5 | 10 |
# | 7 | where ring and tree cross, on paper | 4 of 5 | 20 |
#
# 2 uses what 1 builds, and 4 uses both. The others stand alone. *Follows* on each card names the section of the lesson
# to look things up in. The letters are the lesson's: N ranks, S bytes of the whole tensor, m nodes of g GPUs.

# %% [markdown]
# **The rule of this notebook.** Nothing but messages: `dist.send`, `dist.recv`, `dist.isend`, `dist.irecv` and
# `dist.batch_isend_irecv`. A collective of the library is refused.
#
# **What a check does.** It runs your function on real ranks, at several world sizes, on sizes that N divides and sizes
# that it does not, on fewer numbers than ranks, and on whole numbers. It compares the result with that of one process.
# Then it reads the **ledger** of each rank: to whom it sends, how many bytes, and in how many steps. In one **step** a
# rank sends at most one message and receives at most one, and it passes on only what came in an earlier step. If the
# ranks wait for each other, the check stops them within seconds and shows where each one stood.
#
# **How to look inside.** Run the function yourself before you check it:
#
# ```python
# from course_utils import record
#
# def look():
#     x = torch.arange(6.0) * (1 + dist.get_rank())
#     with record() as ledger:
#         result = ring_reduce_scatter(x, list(range(dist.get_world_size())))
#     return result, ledger
#
# for result, ledger in launch(look, world_size=3, backend="gloo"):
#     print(result, ledger, sep="\n")
# ```

# %% tags=["parameters"]
import math

import torch
import torch.distributed as dist

from course_utils import expect_error, launch
from course_utils.costs import format_bytes
from course_utils.topology import two_level
from lessons.collectives.collective_algorithms import step_through
from lessons.nccl import check
from lessons.nccl.fabric import emulated_seconds

WORLD_SIZE = 4  # ranks of the demonstrations; the checks choose their own

# %% [markdown]
# A tensor of 11 numbers has to be cut into N **chunks** (the lesson's pieces), even when N does not divide 11.
# `tensor_split` makes their lengths differ by one at most, and its chunks are views, so writing into a chunk changes
# the tensor. Predict the lengths for 11 numbers on 4 ranks, and for 3 numbers on 4 ranks.

# %%
for numbers in (11, 3):
    x = torch.zeros(numbers)
    chunks = x.tensor_split(4)
    chunks[1].fill_(7)
    print(f"{numbers} numbers: chunks of {[len(chunk) for chunk in chunks]}, x = {x.tolist()}")

# %% [markdown]
# Empty chunks do no harm: a message of 0 bytes is a message.

# %% [markdown]
# ---
# ## Exercise 1 · Ring reduce-scatter
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 02, Ring all-reduce from scratch | N−1 steps, S minus one chunk sent by each rank |
#
# The ring of lesson 02 sends to the right. A link carries as much to the left at the same time, so a second ring that
# turns **the other way** can do half of the work. Build that one: place p of the ring sends to place p−1 and receives
# from place p+1, and in the end place p holds chunk p of the sum.
#
# The ring is given as a list of ranks: `[3, 0, 2]` means that rank 3 has place 0, rank 0 place 1, rank 2 place 2. A
# rank that is not in the list does not take part. You will need that in Exercise 4.


# %%
# {{ring_reduce_scatter}}


# %%
check.ring_reduce_scatter(ring_reduce_scatter)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Follow one chunk backwards. In the last step chunk p arrives at place p. From which place does it come, and where was
# it one step earlier? Where does its journey start?
# </details>
# <details><summary>Hint 2</summary>
#
# Chunk p starts at place p−1 and goes p−1, p−2, …, p+1, p. So in step s = 1 … N−1 place p sends chunk p+s and receives
# chunk p+s+1, all modulo N. What it receives it adds to its own numbers of that chunk; the result is what it sends in
# the next step.
# </details>
# <details><summary>Hint 3</summary>
#
# `chunks = x.clone().tensor_split(n)`. In each step one `dist.isend` and one `dist.irecv` go into
# `dist.batch_isend_irecv`. Receive into a buffer of its own, `torch.empty_like(into)`, wait for both requests, then
# add: `into += received`.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · The other half, and the whole ring
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 30 | 02, Ring all-reduce from scratch | N−1 and 2(N−1) steps; 2(N−1)/N · S sent by each rank in all |
#
# First the ring **all-gather**, in N−1 steps, with S minus one chunk sent by each rank. Place p holds chunk p; in the
# end everybody holds all chunks. Turn the same way as before: send to place p−1. Nothing is added here, so each chunk
# can be received directly into its place in x.


# %%
# {{ring_all_gather}}


# %%
check.ring_all_gather(ring_all_gather)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In the first step there is only one chunk that a rank can send. In every later step it sends what it has just
# received.
# </details>
# <details><summary>Hint 2</summary>
#
# In step s = 0 … N−2 place p sends chunk p+s and receives chunk p+s+1, modulo N.
# </details>
# <details><summary>Hint 3</summary>
#
# The loop of Exercise 1 with another start, without a buffer and without the addition:
# `dist.P2POp(dist.irecv, chunks[…], …)` writes into x.
# </details>

# %% [markdown]
# ### The whole ring
#
# Put the halves together. This function takes a tensor of any shape. Before you write: how many numbers does a rank
# send at most, if x has 11 and N is 4?


# %%
# {{ring_all_reduce}}


# %%
check.ring_all_reduce(ring_all_reduce)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What does the reduce-scatter return, and where in a tensor does the all-gather expect it?
# </details>
# <details><summary>Hint 2</summary>
#
# Make a flat copy of x, write the finished chunk over this rank's chunk of the copy, and gather in the copy.
# </details>
# <details><summary>Hint 3</summary>
#
# `flat.tensor_split(len(ring))[place].copy_(…)`, and `flat.reshape(x.shape)` at the end.
# </details>
# <details><summary>How many numbers does a rank send?</summary>
#
# 11 numbers on 4 ranks make chunks of 3, 3, 3 and 2. A rank sends all but one chunk in each half, so at most 9 + 9 =
# 18 numbers, where 2(N−1)/N · 11 is 16.5. The check allows 2(N−1) times the longest chunk.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · Tree all-reduce
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 30 | 03, A tree, for small messages | 2(N−1) messages in 2⌈log2 N⌉ steps, for any root |
#
# A ring of 1,000 ranks takes 1,998 steps, a tree 20. Each of its messages carries the whole tensor: up the tree the
# sums of ever larger groups come together at the root, down the tree the total goes out. Use a **binomial tree** as in
# the lesson, but with any root: NCCL runs two trees at once, and no rank may have children in both.
#
# At 1, 2, 3, 4, 5 and 8 ranks the target leaves 0, 2, 4, 4, 6 and 6 steps. `dist.send` and `dist.recv` will do.


# %%
# {{tree_all_reduce}}


# %%
check.tree_all_reduce(tree_all_reduce)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take root 0 and N = 8 and draw it. Up, step 1: 1→0, 3→2, 5→4, 7→6. Step 2: 2→0, 6→4. Step 3: 4→0. Down: the same
# arrows backwards, in the opposite order.
# </details>
# <details><summary>Hint 2</summary>
#
# With d = 1, 2, 4, … on the way up: a rank that is an odd multiple of d sends to rank − d and is done; an even multiple
# receives from rank + d, if there is such a rank, and adds. On the way down with d = …, 4, 2, 1 send and receive change
# sides, and what comes in replaces what was there.
# </details>
# <details><summary>Hint 3</summary>
#
# For another root, renumber: `place = (rank - root) % n` runs the algorithm, `(place + root) % n` is the rank to talk
# to. `place % (2 * d) == d` is "odd multiple of d", `place % (2 * d) == 0` "even multiple".
# </details>
# <details><summary>Why not let both partners send, and save half of the steps?</summary>
#
# That is recursive doubling. On links of equal speed it takes half the time for small tensors, as section 9 shows. On
# a cluster every rank then sends to far partners, while in a tree one message crosses each pair of nodes.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · Two nodes of four GPUs
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 5 of 5 | 40 | 03, Two levels, and a cluster in a notebook; exercises 1 and 2 | less time than a flat ring |
#
# m nodes have g GPUs each. Node 0 has the ranks 0 … g−1, node 1 the next g, and so on. A ring over all ranks sends
# nearly 2·S from node to node, through one port of each node. Build an all-reduce that sends only 2(m−1)/m · S/g
# bytes through the port of each GPU, and uses all ports at once.
#
# How much time that saves, you see on **emulated** links. The messages are real; the time is that of 2 nodes with 4
# GPUs, NVLink 4 inside (450 GB/s each way, 3.4 µs a message), and one port of InfiniBand NDR for each GPU between
# them (50 GB/s, 14 µs). The latencies are those that NCCL's tuner assumes for a hop (NVIDIA/nccl,
# src/graph/tuning.cc, protocol Simple).


# %%
cluster = two_level(2, 4, intra=(3.4e-6, 1 / 450e9), inter=(14e-6, 1 / 50e9))
sizes = [2**10, 2**20]


def flat_ring(x):
    for _ in step_through("all_reduce", x.view(8, -1)):  # 8 rows are the 8 chunks
        pass


times = emulated_seconds({"flat ring": flat_ring}, cluster, sizes)["flat ring"]
for size, seconds in zip(sizes, times, strict=True):
    print(f"flat ring, {format_bytes(size):>5}: {seconds * 1e6:.0f} µs of emulated time")

# %% [markdown]
# Beat that at 1 MiB. Before you write, work out on paper what the three phases of the hierarchical all-reduce take:
# the reduce-scatter in the node, the all-reduce between the nodes, the all-gather in the node. Once you have it,
# `emulated_seconds({"mine": lambda x: x.copy_(hierarchical_all_reduce(x, 2, 4))}, cluster, sizes)` times it.


# %%
# {{hierarchical_all_reduce}}


# %%
check.hierarchical_all_reduce(hierarchical_all_reduce)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which ranks hold the same chunk after a reduce-scatter in each node? These have to add, and g such groups can do it at
# the same time, each through ports of its own.
# </details>
# <details><summary>Hint 2</summary>
#
# Rank r is local rank r % g of node r // g. Its ring inside the node holds the g ranks of that node, its ring across
# the m ranks with the same local rank.
# </details>
# <details><summary>Hint 3</summary>
#
# `ring_reduce_scatter(x, inside)` gives a chunk, `ring_all_reduce(chunk, across)` its sum over all nodes. Copy it to
# its place in a tensor like x, then `ring_all_gather(result, inside)`.
# </details>
# <details><summary>The times on paper</summary>
#
# Inside the node 3 steps of S/4 = 256 KiB: 3 · (3.4 + 0.58) µs, twice. Between the nodes 2 steps of S/8 = 128 KiB: 2 ·
# (14 + 2.6) µs. Together 57 µs.
#
# In the flat ring a piece travels for 14 steps of S/8, which is 1.75 times round the ring. The slowest piece crosses
# between the nodes 4 times: 4 · (14 + 2.6) + 10 · (3.4 + 0.29) = 103 µs. Of these, 90 µs are latency. At 64 MiB bytes
# count, and the gain is larger, since four ports of a node work instead of one: 2,363 against 608 µs (*modelled*).
# </details>

# %% [markdown]
# ---
# ## Exercise 5 · Debug this: a ring that passed its test
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 02, Ring all-reduce from scratch | 2(N−1) steps, 2(N−1)/N · S sent by each rank |
#
# Somebody wrote a ring all-reduce in a single loop: N−1 steps that add, N−1 steps that copy. It sends to the right.
# Its author tried it with 2 ranks and 8 numbers, saw the correct sum, and tested no more. It has **two** faults. Read
# it first; can you find them without running it?


# %%
def broken_ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    result = x.clone()
    chunks = result.split(len(x) // n)
    for step in range(2 * (n - 1)):
        out, into = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = torch.empty_like(into)
        receive = dist.P2POp(dist.irecv, received, (rank + 1) % n)
        send = dist.P2POp(dist.isend, out, (rank + 1) % n)
        for request in dist.batch_isend_irecv([receive, send]):
            request.wait()
        into.copy_(into + received if step < n - 1 else received)
    return result


def trial(numbers):
    return broken_ring_all_reduce(torch.arange(float(numbers)) * (1 + dist.get_rank()))


print(launch(trial, 8, world_size=2, backend="gloo")[0])
with expect_error():
    launch(trial, 8, world_size=max(3, WORLD_SIZE), backend="gloo", timeout=2)

# %% [markdown]
# Write a version that works for any number of ranks from 1 and any number of elements, with the same idea: one loop, to
# the right, and no byte more.


# %%
# {{mended_ring_all_reduce}}


# %%
check.mended_ring_all_reduce(mended_ring_all_reduce)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The test took 2 ranks and 8 numbers. Which two neighbours are one and the same with 2 ranks? Which division leaves
# nothing over with 8 numbers?
# </details>
# <details><summary>Hint 2</summary>
#
# The report guesses that nobody sends. Look at the table instead: from whom does rank 1 want to receive? And which rank
# sends to rank 1?
# </details>
# <details><summary>Hint 3</summary>
#
# `torch.arange(11.0).split(11 // 2)` has three chunks, and the loop uses two. `split` with a rounded-up length, and
# `chunk`, can make too few: try 5 numbers on 4 ranks.
# </details>
# <details><summary>How could a test have found both?</summary>
#
# With 3 ranks and 4 numbers. Two ranks hide every confusion of left and right, powers of two hide wrong halvings, sizes
# that N divides hide wrong chunks, and the same data on every rank hides nearly everything.
# </details>

# %% [markdown]
# ---
# ## Exercises 6 and 7 · On paper
#
# Work out the formula by hand, then write it as a function of its arguments. The check calls it with the numbers of the
# text and with others. Answers within 1 % pass.
#
# The model is that of the lesson: a message of S bytes takes α + βS between any two ranks. A rank sends one message
# at a time and receives one at a time, and each costs its latency. Links are given in Gb/s, 10⁹ **bits** per second
# each way, latencies in µs.

# %% [markdown]
# ## Exercise 6 · Pick the algorithm
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 10 | 03, What it costs |
#
# One GPU in each node, InfiniBand of 400 Gb/s, 14 µs. Which of **root** (all send to rank 0, which adds and sends the
# sum to each), **ring** and **tree** is fastest, and how long does it take?
#
# | size | 8 ranks | 64 ranks |
# |---|---|---|
# | 256 KiB | ? | |
# | 1 MiB | ? | ? |
# | 16 MiB | | ? |
# | 64 MiB | ? | |


# %%
# {{pick_algorithm}}


# %%
check.pick_algorithm(pick_algorithm)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For each of the three count two things: how many latencies follow each other, and how many bytes pass the busiest
# port, one after another.
# </details>
# <details><summary>Hint 2</summary>
#
# Root: N−1 messages of S into rank 0, and later as many out of it. Ring: 2(N−1) messages of S/N. Tree: 2⌈log2 N⌉
# messages of S.
# </details>
# <details><summary>Hint 3</summary>
#
# 2(N−1)·(α + βS), 2(N−1)·(α + βS/N) and 2⌈log2 N⌉·(α + βS). 400 Gb/s are 50 GB/s, and β is 1 s over as many bytes.
# `min` of pairs with `key=lambda pair: pair[1]` gives the pair with the least time.
# </details>
# <details><summary>Is root ever the fastest?</summary>
#
# Not in this model: a ring has as many latencies and fewer bytes. In a real network the latencies of several messages
# to one port may overlap, so for a few small messages it can be.
# </details>

# %% [markdown]
# ## Exercise 7 · Where ring and tree cross
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 4 of 5 | 20 | 03, What it costs |
#
# For small tensors a tree is faster than a ring, for large ones slower. With 8 and with 64 ranks on the links of
# Exercise 6: at which size do both take the same time?


# %%
# {{crossover_size}}


# %%
check.crossover_size(crossover_size)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write both times with α, β, N and S, set them equal, and solve for S.
# </details>
# <details><summary>Hint 2</summary>
#
# (N−1)·(α + βS/N) = L·(α + βS) with L = ⌈log2 N⌉. Bring α to the left and S to the right.
# </details>
# <details><summary>Hint 3</summary>
#
# S = α/β · (N − 1 − L) / (L − (N−1)/N), with β in seconds per byte.
# </details>
# <details><summary>Does NCCL switch there?</summary>
#
# Not exactly. Its tree is pipelined, so that large tensors do not pay S once for each level, and it has three protocols
# with latencies of their own. The lesson rebuilds that choice. What stays is the form: the crossing moves to larger
# sizes with the number of ranks, and with α/β.
# </details>

# %% [markdown]
# ### From how many ranks on?
#
# Turn the question round. A bucket of gradients has 16 MiB. On a few ranks the ring is faster; its latencies grow
# with N, those of the tree with log2 N. From which power of two on is the tree faster, on the same links?


# %%
# {{crossover_ranks}}


# %%
check.crossover_ranks(crossover_ranks)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# This has no formula in closed form. Let Python try N = 2, 4, 8, …
# </details>
# <details><summary>Hint 2</summary>
#
# For N = 2^L the tree takes 2·L·(α + βS), the ring 2(N−1)·(α + βS/N). Stop at the first N at which the tree takes
# less.
# </details>
# <details><summary>Hint 3</summary>
#
# With 16 MiB at 50 GB/s, βS is 336 µs, 24 times α. At 128 ranks the tree takes 7 · 25 units of α, the ring 127 +
# 127/128 · 24.
# </details>
