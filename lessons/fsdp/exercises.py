# %% [markdown]
# # Exercises 07 · Can you shard a model so that it fits, and cheaply?
#
# Five exercises on [07 FSDP](../notebooks/07_fsdp.ipynb). In four you shard, reshard and clip; in one you work out
# what a step sends. All of them take about 140 minutes.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | units that fit under two limits | 3 of 5 | 30 |
# | 2 | a mesh for a two-level cluster | 3 of 5 | 25 |
# | 3 | a checkpoint for another number of ranks | 4 of 5 | 40 |
# | 4 | gradient clipping over shards | 3 of 5 | 25 |
# | 5 | messages and bytes of a step | 3 of 5 | 20 |
#
# Each stands alone. *Follows* on each card names the section of the lesson to look things up in; those of 2, 4 and 5
# are partly in the lesson's deeper half.
#
# **If you do only these:** 1, 3 and 4.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/07_fsdp_solutions.ipynb).
#
# **What a check does.** Exercises 1, 2 and 4 run on real ranks, in float64, and are compared with one process.
# Then the check reads each rank's **ledger** of messages: how many all-gathers, over which group, how many bytes.
# Exercise 1 also measures the peak memory of each rank, tensor by tensor. Exercises 3 and 5 run without ranks, and
# are called with several numbers. If the ranks wait for each other, the check stops them within seconds and shows
# where each one stood. The first checks take some seconds more, until all ranks have imported FSDP2.
#
# **How to look inside.** Run your function yourself, with prints, before you check it:
#
# ```python
# from course_utils import record
# from course_utils.memory import track
# from course_utils.models import TransformerConfig, build_gpt
#
# def look():
#     model = build_gpt(TransformerConfig(layers=4))
#     optimizer = wrap_under_target(model, 1e-3)
#     words = torch.zeros(1, 8, dtype=torch.int64)
#     with record() as ledger, track(model, optimizer) as tracker:
#         model.loss(words, words).backward()
#     return ledger, tracker.peak
#
# for ledger, peak in launch(look, world_size=2, backend="gloo"):
#     print(ledger, peak, sep="\n")
# ```

# %% tags=["parameters"]
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_utils import launch
from course_utils.models import GPT
from lessons.fsdp import check

WORLD_SIZE = 4  # ranks of the demonstration; the checks choose their own

# %% [markdown]
# Before you write, see how FSDP2 divides a parameter. The layer below has a weight of 5 rows and 3 columns. Predict how
# many rows each of 4 ranks holds, and what `full_tensor()` gives.


# %%
def look_at_shards():
    layer = fully_shard(nn.Linear(3, 5, bias=False))
    return tuple(layer.weight.to_local().shape), tuple(layer.weight.full_tensor().shape)


for rank, shapes in enumerate(launch(look_at_shards, world_size=WORLD_SIZE, backend="gloo")):
    print(f"rank {rank} holds {shapes[0]} of {shapes[1]}")

# %% [markdown]
# The shards are those of `torch.chunk`: each rank takes ⌈5/4⌉ = 2 rows until none are left, so the third has one and
# the fourth none. `full_tensor()` is a collective: it gathers the whole tensor on every rank.

# %% [markdown]
# ---
# ## Exercise 1 · Units under two limits
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 30 | 07, What to wrap | L + 1 all-gathers a step; model states and 8 blocks at the peak |
#
# Each call of `fully_shard` makes a **unit**: its parameters are gathered together, used, and freed together. Small
# units keep the peak low and send many messages. Large units do the opposite.
#
# You get a `GPT` with L blocks of equal size in `model.blocks` (L is even), an embedding and a head around them.
# Shard it over all ranks and return Adam for it. Two limits have to hold on every rank:
#
# - A step has at most **L + 1 all-gathers**. One unit a block would have 2L + 1.
# - The peak of a step is at most the rank's share of the **model states** (parameters, gradients, two states of Adam)
#   **and 8 blocks**. The batches are small, so that activations take less than two blocks.


# %%
# {{wrap_under_target}}


# %%
check.wrap_under_target(wrap_under_target)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In a step each unit is gathered twice: before its forward and, as it was freed, before its backward. Only the root is
# gathered once. How many units may there be?
# </details>
# <details><summary>Hint 2</summary>
#
# `fully_shard` takes a module, or a list of modules that become one unit. Parts come first, the whole model last: it
# takes what is left into the root.
# </details>
# <details><summary>Hint 3</summary>
#
# Two blocks a unit: `fully_shard(blocks[i : i + 2])`. The parameters are other objects afterwards, so that the
# optimizer has to be made last.
# </details>
# <details><summary>Where do the 8 blocks go?</summary>
#
# Backward computes one unit of two blocks while the next is gathered already: 4 blocks. Beside them stand the gradients
# of the unit, and still the flat tensor from which those of the unit before were reduce-scattered: FSDP drops it when
# the unit's own gradients are complete. That makes 4 more. Activations fit
# because the shards of the gradients, which belong to the model states, are not all there yet. On a GPU the same
# tensors are there, and prefetching further ahead adds units.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · A two-level cluster
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 07, Two nodes: HSDP | 2(M − 1) · Ψ numbers between M nodes in a step |
#
# Inside a node links are fast, between nodes slow. The Ψ parameters fit into a node if its ranks share them.
# Then no all-gather has to leave the node, and only gradients travel between nodes.
#
# Ranks are numbered node by node: with 3 ranks a node, node 0 has ranks 0, 1, 2 and node 1 has ranks 3, 4, 5. Shard
# each block and the model so that a rank holds 1/`per_node` of the parameters, and the fewest bytes cross the nodes.
#
# The check counts them from the ledger. In a collective of S bytes over n ranks each rank sends (n − 1)/n · S to the
# next rank of the group, in an all-reduce twice as much. This counts only if the next rank is on another node.


# %%
# {{fewest_internode_bytes}}


# %%
check.fewest_internode_bytes(fewest_internode_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Draw the ranks as a table with one row for each node. Which ranks share one copy of the parameters, those of a row
# or those of a column? Which ranks add up their gradients afterwards?
# </details>
# <details><summary>Hint 2</summary>
#
# `fully_shard(module, mesh=mesh)` with a mesh of two dimensions replicates over the first and shards over the second.
# </details>
# <details><summary>Hint 3</summary>
#
# `init_device_mesh("cpu", (rows, columns), mesh_dim_names=("replicate", "shard"))` fills the table row by row. Every
# `fully_shard` needs the mesh, that of the model too. (The check's ranks are on the CPU; on GPUs it is `"cuda"`.)
# </details>
# <details><summary>Could it be even less?</summary>
#
# Not with these gradients: what is added up over M nodes has to leave each of them. Each rank all-reduces its shard, Ψ
# divided by the ranks of a node, and all of them together send 2(M − 1) · Ψ. Gradients in bf16 would halve it
# (`MixedPrecisionPolicy(reduce_dtype=...)`), accumulation divides it by the number of micro-batches. Weights in bf16 do
# not change it, but they make sharding over all ranks cheaper: with gradients reduced in float32, both ways send nearly
# the same on many nodes (section 9 of the lesson).
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · A checkpoint for another number of ranks
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 40 | 07, Checkpoints | each rank reads its own rows, and no others |
#
# N ranks have saved a checkpoint, each its shard of a tensor, and M ranks load it. **Resharding** means that each new
# rank finds out which rows it needs, in which of the old files they are, and reads those. The whole tensor would not
# fit into its memory.
#
# Rows are divided as in the demonstration above: each of n ranks takes ⌈rows/n⌉ rows until fewer are left, then comes
# a smaller shard, then empty ones. `read(file, start, stop)` returns rows of a file, numbered from the first row of
# that file. The check notes how many you read.


# %%
# {{reshard}}


# %%
check.reshard(reshard)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First forget the files: from which row to which does this rank's shard go? ⌈rows/n⌉ is `-(-rows // n)`. Neither end
# may lie behind the last row.
# </details>
# <details><summary>Hint 2</summary>
#
# File f holds the rows from f · ⌈rows/N⌉ on. What this rank needs of it is an overlap of two intervals: from the larger
# of both beginnings to the smaller of both ends.
# </details>
# <details><summary>Hint 3</summary>
#
# Where the overlap is not empty, subtract the file's first row from both ends and read. `torch.cat` joins the pieces.
# `read(0, 0, 0)` costs nothing and has the right columns and dtype: put it first, and a rank without rows works too.
# </details>
# <details><summary>And in PyTorch?</summary>
#
# `torch.distributed.checkpoint` does this for every tensor. Its metadata file lists which file holds which part of
# which tensor, the **planner** intersects that with the shards of the loading rank, and each rank reads its parts. As
# parts are boxes in all dimensions, the sharding may change too, not only the number of ranks.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · Clipping over shards
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 07, Clipping | one message of 8 bytes |
#
# Clipping scales all gradients by one coefficient, min(1, `max_norm` / norm), if their common norm is too large. The
# norm is that of all elements of all gradients, as if they were one long vector. After a backward of FSDP each rank
# holds some rows of each gradient, and no rank can see the norm.
#
# Some small parameters may not be sharded at all: their gradients are **replicated**, equal on every rank.


# %%
# {{clip_sharded}}


# %%
check.clip_sharded(clip_sharded)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Of two ranks with norms 3 and 4, what is the norm of all elements? Which number of each rank can be added?
# </details>
# <details><summary>Hint 2</summary>
#
# All-reduce the sum of the squares of the sharded gradients, one number. Which squares must not be in it, because every
# rank would bring the same ones?
# </details>
# <details><summary>Hint 3</summary>
#
# Add the replicated squares after the all-reduce, then take the root. Let the coefficient be `min(1.0, max_norm / (norm
# + 1e-6))`, and multiply every gradient in place with `mul_`.
# </details>
# <details><summary>What does FSDP2 offer?</summary>
#
# `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` works with DTensors: they know their placements, so
# that the sum over the ranks comes by itself. The norm that it returns is a DTensor as well. To print it, call
# `norm.full_tensor()` on all ranks, since that is a collective.
# </details>

# %% [markdown]
# ---
# ## Exercise 5 · Messages and bytes of a step, on paper
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 3 of 5 | 20 | 07, Gathered, computed, freed: one step; Accumulation; Mixed precision and offload |
#
# A model in the shape of GPT-3 6.7B has 32 blocks of 201,379,840 parameters, and 214,249,472 around them, with a tied
# head. Each block is a unit, and the rest is the root. 64 ranks train it with full sharding. Parameters are
# gathered in bf16, gradients are reduce-scattered in fp32. As by default, blocks are freed after forward, and the
# root is not; after backward all are.
#
# How many all-gathers and reduce-scatters does a rank issue in one step, and how many GB does it send in all? And with
# 4 micro-batches whose gradients are reduced once, in the last backward? In a collective of S bytes over N ranks, a
# rank sends (N − 1)/N · S.
#
# Work out the formula by hand, then write it as a function of its arguments. The check calls it with the numbers of the
# text and with others. Answers within 0.1 % pass, because gathering the root once is less than 1 % of a step.


# %%
# {{fsdp_traffic}}


# %%
check.fsdp_traffic(fsdp_traffic)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Follow one block through a micro-batch: gathered, used, freed, gathered, used, freed. Then the root: when is it
# freed?
# </details>
# <details><summary>Hint 2</summary>
#
# A micro-batch has 2L + 1 all-gathers. The reduce-scatters are L + 1, once in a step.
# </details>
# <details><summary>Hint 3</summary>
#
# GB = (N − 1)/N · (m · (2·L·block + around) · parameter bytes + (L·block + around) · gradient bytes) / 10⁹.
# </details>
# <details><summary>So should one rather not free the blocks?</summary>
#
# With `reshard_after_forward=False` the all-gathers of backward go away, and with them a third of the bytes of a step
# if weights and gradients travel in the same dtype. The price is the whole model in memory from forward to backward:
# ZeRO-2. A number in its place is between the two: parameters are resharded to groups of that many ranks, say those
# of a node, so that backward gathers over fast links.
# </details>
