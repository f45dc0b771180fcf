# %% [markdown]
# # Exercises 12 · Which TP × PP × CP × DP for this model on this cluster?
#
# Seven exercises on [12 3-D parallelism](../notebooks/12_parallelism_3d.ipynb). In two you work on real ranks; the
# others are about ranks, bytes and layouts, without ranks. All of them take about 200 minutes.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | the groups of a mesh | 2 of 5 | 20 |
# | 2 | what a GPU sends, on paper | 3 of 5 | 25 |
# | 3 | the order of the dimensions | 3 of 5 | 25 |
# | 4 | two nodes, two kinds of parallelism (challenge) | 4 of 5 | 45 |
# | 5 | the norm of the gradient over a mesh | 3 of 5 | 25 |
# | 6 | find the illegal layouts | 3 of 5 | 30 |
# | 7 | plan 70B on 64 GPUs (puzzle) | 3 of 5 | 30 |
#
# Exercise 3 uses what you write in 1. The others stand alone. *Follows* on each card names the section of the lesson
# to look things up in; all of them are in its core.
#
# **If you do only these:** 2, 5 and 7.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/12_parallelism_3d_solutions.ipynb).
#
# **What a check does.** In Exercise 4 your training runs in float64 on meshes of 1 × 1 to 3 × 2 ranks; weights are
# compared with one process to 12 digits, losses to 6. Then the check counts the bytes inside a node and between
# nodes, which it reads from the **ledger**, and the operations of each rank. Exercise 5 runs on up to 8 ranks. Checks
# 6 and 7 ask the planner of the lesson. If ranks wait for each other, the check stops them within seconds and shows
# where each one stood.

# %% tags=["parameters"]
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_utils import launch, memory, record, recorded
from course_utils.models import PUBLISHED, TransformerConfig
from lessons.parallelism_3d import check, planner

NODES, GPUS = 2, 2  # of the demonstration in Exercise 4; the checks choose their own

# %% [markdown]
# ---
# ## Exercise 1 · The groups of a mesh
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 20 | 12, A mesh of ranks | every group of every dimension, for any sizes |
#
# The ranks of a **mesh** are numbered like the digits of a number: the last dimension changes fastest. In pp 2 × dp 2
# × tp 2 the coordinates (0, 0, 0), (0, 0, 1), (0, 1, 0) … (1, 1, 1) are the ranks 0, 1, 2 … 7. A **group** of a
# dimension holds the ranks that differ in this coordinate and agree in all others. Rank 5 is in the tp group (4, 5),
# the dp group (5, 7) and the pp group (1, 5).


# %%
# {{mesh_groups}}


# %%
check.mesh_groups(mesh_groups)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# By how much does the rank grow if one coordinate grows by 1? That is the **stride** of the dimension: 1 for the
# last, and for each other one the product of all sizes behind it.
# </details>
# <details><summary>Hint 2</summary>
#
# The coordinate of a rank in a dimension is `rank // stride % size`. Every rank whose coordinate is 0 begins a group:
# rank, rank + stride, rank + 2 · stride ….
# </details>
# <details><summary>Hint 3</summary>
#
# Or let torch count: `torch.arange(world).view(*sizes.values())` is the mesh. Move a dimension to the end with
# `movedim`, and each row of the rest is a group.
# </details>

# %% [markdown]
# When your function passes, look at 256 GPUs in nodes of 8. Predict first: how many nodes does a group of each
# dimension touch?

# %%
groups = mesh_groups({"pp": 4, "dp": 8, "tp": 8})
for name, lines in groups.items():
    mine = next(line for line in lines if 77 in line)
    nodes = {rank // 8 for rank in mine}
    print(f"{name}: {len(lines)} groups; rank 77 is in {mine}, on {len(nodes)} node(s)")

# %% [markdown]
# ---
# ## Exercise 2 · What a GPU sends, on paper
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 12, Which link carries what; lessons 09 and 10 | per cent and GB, within 1 % |
#
# A transformer trains in bf16 (2 bytes), with tp, pp and dp ranks along the three dimensions. A GPU **in the middle
# of the pipeline** sends in one step:
#
# - for tensor parallelism, ring all-reduces of the activation, 4 in each of its layers and micro-batches;
# - for the pipeline, the whole activation to the stage behind it, and a gradient of the same size to the stage
#   before it, once a micro-batch (as in the lesson's own run, where the ranks of a tensor group all send the same);
# - for data parallelism, one ring all-reduce of the gradients of its part of the weights.
#
# An activation has microbatch · length · hidden elements. Parameters are cut evenly; nothing is recomputed. How many
# GB is each, and which share of all the time is the bubble of 1F1B?


# %%
# {{traffic}}


# %%
check.traffic(traffic)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A replica gets batch / dp sequences: how many micro-batches is that? Call it m; then write down what one micro-batch
# sends.
# </details>
# <details><summary>Hint 2</summary>
#
# Bubble: (pp - 1)/(m + pp - 1). A ring all-reduce over n ranks sends 2(n - 1)/n of the tensor from each.
# </details>
# <details><summary>Hint 3</summary>
#
# tensor = m · layers/pp · 4 · 2(tp - 1)/tp · activation; pipeline = m · 2 · activation; data = 2(dp - 1)/dp · 2 bytes
# · parameters/(tp · pp), without m.
# </details>
# <details><summary>And with sequence parallelism?</summary>
#
# It sends an all-gather and a reduce-scatter where there was an all-reduce: the same bytes. Between the stages only
# 1/tp of the activation has to travel, as each rank holds a part of the sequence.
# </details>

# %% [markdown]
# When your function passes, take a model as large as Llama 3 70B on 256 GPUs. Which of the three is worth an NVLink?

# %%
bubble, *sent = traffic(80, 8192, 8192, 70.6e9, tp=8, pp=4, dp=8, batch=512, microbatch=1)
gigabytes = dict(zip(("tp", "pp", "dp"), (round(x, 1) for x in sent), strict=True))
print(f"bubble {bubble:.1f} %; GB that a GPU sends in a step: {gigabytes}")

# %% [markdown]
# ---
# ## Exercise 3 · The order of the dimensions
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 12, Which link carries what | no order sends less between nodes |
#
# Ranks are given out node by node: with 8 GPUs a node, ranks 0 to 7 are on the first. So the order of the dimensions
# decides which groups stay inside a node. Suppose every group is a **ring** in the order of its ranks: each rank
# sends its bytes to the next one of the group, and the last to the first. A ring of one rank sends nothing.
#
# Find the order with the fewest bytes between nodes, over all ranks. Sizes and bytes can be anything, so a rule of
# thumb does not do: *what sends most goes innermost* is wrong in one of the cases.


# %%
# {{node_order}}


# %%
check.node_order(node_order)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three dimensions have 6 orders, four have 24: `itertools.permutations(sizes)` gives them all. What is left is a
# function that tells how much one order sends between nodes.
# </details>
# <details><summary>Hint 2</summary>
#
# `mesh_groups({name: sizes[name] for name in order})` gives the groups. Go round each ring, and add the dimension's
# GB whenever a rank and the next one are on different nodes.
# </details>
# <details><summary>Hint 3</summary>
#
# The node of a rank is `rank // gpus_per_node`. The next ranks of `line` are `line[1:] + line[:1]`.
# </details>

# %% [markdown]
# When your function passes, ask it about the cluster of Exercise 2.

# %%
print(" > ".join(node_order({"tp": 8, "pp": 4, "dp": 8}, gigabytes, 8)), "(slowest to fastest)")

# %% [markdown]
# tp is innermost and fills the node. pp and dp cross the network in any order: here all their neighbours are on other
# nodes.

# %% [markdown]
# ---
# ## Exercise 4 · Two nodes, two kinds of parallelism (challenge)
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 45 | 12, Two machines: what may cross the slow link? | equal to one process; only gradients cross |
#
# Two nodes have two GPUs each; ranks 0 and 1 are on the first node. The link between the nodes is slow. Train with
# **tensor parallelism inside a node and data parallelism between the nodes**:
#
# - the weights: each rank of a node has a part of the inner features, rows of `up` and the same columns of `down`;
#   the parts go by rank, so that the first GPU of every node has part 0. `gain` is whole on every rank;
# - the samples: each node has a part of every batch, the first node the first part. All ranks of a node need the same.
#
# The layer is y = x + GELU((x · gain) Upᵀ) Downᵀ, the loss `F.mse_loss(y, target)`, the mean over the batch. A step
# is plain gradient descent, w -= lr · gradient. f and g of lesson 09 are here, for any group:


# %%
# {{summed}}


# {{copy_to}}


# {{sum_over}}


# %% [markdown]
# Write the training, for any number of nodes and of GPUs in each (the check also takes 2 nodes with 3 GPUs, and 3
# with 2). `F.linear`, `Tensor.chunk` and `torch.autograd.grad` are useful. Before you begin, predict which bytes will
# pass between the nodes in a step.
#
# - `weights`: dict of the whole model, the same on every rank: "gain" (width,), "up" (inner, width), "down" (width,
#   inner).
# - `batches`: list of whole batches (x, target), the same on every rank, each of shape (samples, width); one step for
#   each, of plain SGD with the rate `lr`.
# - It returns two things. First a list: for each step the mean loss of the whole batch before the step, a float, the
#   same on every rank. Then a dict of this rank's trained weights: "gain" whole, its rows of "up", its columns of
#   "down".


# %%
# {{hybrid_training}}


# %%
check.hybrid_training(hybrid_training)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `dist.init_device_mesh("cpu", (nodes, gpus_per_node), mesh_dim_names=("dp", "tp"))`, on GPUs with "cuda": tp is last,
# so its ranks are neighbours, on one node, and `mesh.get_group("tp")` is their group. `divmod(rank, gpus_per_node)` is
# the pair of node and GPU. The node says which samples, the GPU says which weights.
# </details>
# <details><summary>Hint 2</summary>
#
# Two all-reduces go through the tp group: the partial sum behind `down` (`sum_over`), and in backward the gradient of
# x · gain (`copy_to`). x + … stands outside of both.
# </details>
# <details><summary>Hint 3</summary>
#
# Gradients of all three weights, and the loss, are summed over the **dp** group and divided by the number of nodes.
# Take the gradients with `torch.autograd.grad(loss, parameters)`, and change the weights in `torch.no_grad()`.
# </details>
# <details><summary>Why not average the gain's gradient over all four ranks?</summary>
#
# The weights would be right, because the ranks of a node have the same gradient of the gain. But it would travel
# between the nodes more than once. On a real cluster such a group of all ranks is a common slip: right, and slow.
# </details>

# %% [markdown]
# When your function passes, count what crosses the slow link between the two nodes.


# %%
def bytes_by_link(gpus_per_node):
    torch.manual_seed(0)
    shapes = {"gain": (64,), "up": (256, 64), "down": (64, 256)}
    weights = {name: torch.randn(shape) / 8 for name, shape in shapes.items()}
    batch = torch.randn(1024, 64), torch.randn(1024, 64)
    with record() as ledger:
        hybrid_training(weights, [batch], 0.1, gpus_per_node)
    sent = {"in one node": 0, "over both nodes": 0}
    for e in ledger:
        nodes = {rank // GPUS for rank in e.ranks}
        link = "in one node" if len(nodes) == 1 else "over both nodes"
        sent[link] += 2 * (len(e.ranks) - 1) * e.bytes // len(e.ranks)
    return sent


print("bytes that a rank sends in groups")
for tp in (GPUS, NODES * GPUS, 1):
    sent = launch(bytes_by_link, tp, world_size=NODES * GPUS, backend="gloo")[0]
    sizes = ", ".join(f"{link}: {size:,}" for link, size in sent.items())
    print(f"dp {NODES * GPUS // tp} × tp {tp}: {sizes}")

# %% [markdown]
# With tensor parallelism over all four ranks (dp 1 × tp 4), activations cross the link that gradients crossed before.
# Without it (dp 4 × tp 1) every rank sends the gradients of the whole model.

# %% [markdown]
# ---
# ## Exercise 5 · The norm of the gradient over a mesh
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 12, Clipping over three dimensions | the norm of the whole model, one number sent by each rank |
#
# Before a step, gradients are often **clipped**: if the norm of all gradients of the model together is above a limit,
# all are multiplied by limit / norm. On a mesh no rank has them all. Each holds some tensors, and for each tensor we
# know along which dimensions there are **copies** of it: ("dp",) for a shard of a linear layer, ("dp", "tp") for a
# norm's gain, () for a shard of FSDP with tensor parallelism, ("tp",) for an FSDP shard of a gain. Stages of the
# pipeline hold other layers, so nothing is copied along pp. A stage whose layers are all frozen has no gradients.
# They are averaged already: copies are equal.
#
# The lesson's functions and `train_3d.py` sum along one dimension after the other: a message for each. One sum over all
# ranks is enough and gives the same norm. That is your target, so the check refuses more.


# %%
# {{clip_gradients}}


# %%
check.clip_gradients(clip_gradients)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The square of the norm is a sum over all numbers of the model, each once. Which ranks hold a number, and how many
# are they?
# </details>
# <details><summary>Hint 2</summary>
#
# A tensor with copies along dp and tp is on `groups["dp"].size() * groups["tp"].size()` ranks of each stage. If each
# of them adds its square divided by this number, it counts once.
# </details>
# <details><summary>Hint 3</summary>
#
# Add up on the rank, then one `dist.all_reduce` over all ranks, then the root. A rank without gradients adds zero,
# and calls all_reduce like the others.
# </details>
# <details><summary>What about a table that the first and the last stage share?</summary>
#
# A tied embedding is a copy along pp, but only on two of the stages. Let one of the two count it. Megatron-LM marks
# such parameters as shared and leaves them out on all ranks but one.
# </details>

# %% [markdown]
# ---
# ## Exercise 6 · Find the illegal layouts
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 30 | 12, Layouts that cannot run; lesson 06 | all reasons, and no others |
#
# Some layouts cannot run, whatever the network. Write a function that says why, by the planner's rules, with these
# words:
#
# | word | when |
# |---|---|
# | gpus | the product of all four degrees is not the number of GPUs |
# | heads | query heads, key-value heads or the MLP's width do not divide among tp |
# | layers | pp · virtual divides neither the layers nor the layers plus 2 |
# | batch | dp · microbatch does not divide the batch |
# | interleaving | virtual > 1, and either pp is 1 or it does not divide the micro-batches of a replica |
# | memory | nothing else is wrong, and the model states of a rank are more than its GPU has |
#
# *Plus 2*, because embedding and head may count as a layer each: Llama 3 405B has 126 layers and ran on 16 stages.
# *Heads* has one rule that not all programs have: lesson 09, section 12, copies key-value heads where tp is larger.
# *Interleaving* is a rule of Megatron-LM's schedule, which the planner assumes; others are less strict (lesson 10).
# If the batch does not divide, there is no number of micro-batches to look at.
#
# | argument | what it is |
# |---|---|
# | `model` | `heads`, `kv_heads`, `ffn`, `layers`, `parameter_count` … |
# | `cluster` | `gpus`, `per_node`, `card.memory_bytes` |
# | `layout` | `tp`, `pp`, `dp`, `cp`, `microbatch`, `virtual`, `zero` (stage of ZeRO over the dp · cp ranks) |
# | `batch` | sequences of a step |
#
# For the states, `memory.model_states(parameters, stage=…, ranks=…).total` of lesson 06 gives the bytes of a rank.
# Take 1/(tp · pp) of the parameters. Activations are left out: the layouts of the check are far from that border.


# %%
# {{why_not}}


# %%
check.why_not(why_not)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Start with an empty set, and add a word for each condition that fails. `a % b` is not zero where b does not divide
# a.
# </details>
# <details><summary>Hint 2</summary>
#
# The micro-batches of a replica are batch // (dp · microbatch). tp may be larger than a node: that is slow, and
# legal.
# </details>
# <details><summary>Hint 3</summary>
#
# States: `memory.model_states(model.parameter_count / (tp * pp), stage=layout.zero, ranks=dp * layout.cp).total`,
# against `cluster.card.memory_bytes`; only if the set is still empty. Ranks along cp hold the same parameters as
# those along dp, so ZeRO divides among them too.
# </details>

# %% [markdown]
# When your function passes, let it read a table. The first version of the Llama 3 paper
# ([Grattafiori et al. 2024](https://arxiv.org/abs/2407.21783), table 4) prints three layouts. One of them cannot be.

# %%
for run in (*recorded.LLAMA3_RUNS[:2], recorded.LLAMA3_MISPRINT):
    model, cluster, layout, batch = planner.plan_inputs(run)
    found = why_not(model, cluster, layout, batch) or "no reason"
    print(f"{model.name} on {cluster.gpus:6} GPUs as {layout}: {found}")

# %% [markdown]
# *Recorded layouts.* The third row prints DP 4, and that makes 8,192 GPUs, half of those it names. With DP 8 it is
# right.

# %% [markdown]
# ---
# ## Exercise 7 · Plan 70B on 64 GPUs (puzzle)
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 30 | 12, The planner, and all that it assumes | at most 72 GB, at most 5 % above the best |
#
# Llama 3 70B is to be trained on 8 nodes with 8 H100 each, 128 sequences of 8,192 tokens in a step: a million tokens.
# The GPUs have 80 GB; leave 8 GB of them for what no formula knows. Choose
#
# - `tp`, `pp` and `dp`, with the product 64, and `microbatch`;
# - `virtual`, 1 or the number of chunks on a pipeline rank;
# - `zero`, 0 to 3, and `recompute`, "none", "selective" or "full".
#
# Sequences stay whole (`cp=1`), and what is not in this list stays as it is.
# `planner.search` would do it for you. Use `plan` alone, one layout after the other, and read where the seconds go.

# %%
llama_70b, h100s = PUBLISHED["Llama 3 70B"], planner.cluster("DGX H100", 64)


def show_plan(layout):
    against = planner.reasons_against(llama_70b, h100s, layout, 128)
    if against:
        return print(f"{layout}: {'; '.join(against)}")
    plan = planner.plan(llama_70b, h100s, layout, 128)
    seconds = ", ".join(f"{part} {t:.1f}" for part, t in plan.parts().items() if t >= 0.05)
    print(f"{layout}: {plan.seconds:.1f} s ({seconds}), {plan.memory.total / 1e9:.1f} GB")


show_plan(planner.Layout(tp=8, pp=8, dp=1, zero=0))
show_plan(planner.Layout(tp=2, pp=2, dp=16))
show_plan(planner.Layout(tp=8, pp=2, dp=4))


# %%
# {{plan_70b}}


# %%
check.plan_70b(plan_70b)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# All three layouts above compute the whole forward again in backward (`recompute="full"` is the default). How many
# seconds does that cost, and how many GB does it save?
# </details>
# <details><summary>Hint 2</summary>
#
# tp · pp is not the only way to divide the states: `zero=3` divides them among the dp ranks, and its traffic hides
# behind computing here. Then tp can be smaller, and its all-reduces cost less.
# </details>
# <details><summary>Hint 3</summary>
#
# Try tp 4 without a pipeline, the rest dp, `zero=3`, and see which `recompute` fits. With a pipeline, `virtual` makes
# the bubble small, and `zero=1` does as much as 3: inside a step a stage's weights and gradients are whole.
# </details>
# <details><summary>How far can one trust this?</summary>
#
# The planner's errors for published runs are in the lesson, and half of them are larger than the 5 % of this
# puzzle. It tells which few layouts are worth an hour of measuring, and why the others are not.
# </details>

# %% [markdown]
# When your layout passes, see what `search` finds. It knows what CUDA reports of the card, and not these 72 GB.

# %%
found = planner.search(llama_70b, h100s, 128, cp=1)
print(f"{len(found.plans):,} legal; refused: {found.refused}")
for plan in found.best[:5]:
    kind = f"zero {plan.layout.zero}, recompute {plan.layout.recompute}"
    print(f"{plan.layout}, {kind}: {plan.seconds:.1f} s, {plan.memory.total / 1e9:.0f} GB")
