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
# # How do I train with FSDP2, and checkpoint and reshard it?
#
# A training script needs two lines to become one whose model no rank holds whole: `fully_shard(block)` for each block,
# and `fully_shard(model)`. The loop stays as it was, and so do the losses. Llama 3.1 8B, sharded in this way, takes
# 5,762 tokens a second on each of 8 H100s, and on 128, with 16 times the batch, 5,605 on each: 97 % (*recorded*,
# [torchtitan](https://github.com/pytorch/torchtitan): bf16, selective checkpointing, and 82.4 GiB on cards of 96 GB and
# 500 W; with `torch.compile` 6,667 and 6,514).
# This lesson shows what the two lines do, when, and in how many bytes, and how to save a model that no rank has whole.
#
# **You will be able to**
# - *say* for every moment of a step what a rank holds of each layer, and *read* it from the ledger;
# - *choose* what to wrap, `reshard_after_forward` and a mesh, and *count* what each costs in memory and bytes;
# - *use* mixed precision, offload, prefetch, accumulation, clipping and a start on the meta device as they are meant;
# - *save* a sharded checkpoint that survives a rank's death, and *load* it on any number of ranks;
# - *recognise* the usual mistakes by their message, and those that have none.
#
# **Before this:** [04 ddp](04_ddp.ipynb), [06 zero](06_zero.ipynb). **Time:** about 120 minutes to read, under a
# minute to run.

# %% [markdown]
# ## Ten predictions
#
# Write down an answer to each, however unsure. They come up again on the way, and the answers are at the end.
#
# 1. A weight with 5 rows is sharded over 4 ranks. How many rows does each rank get?
# 2. In a step of a model with 4 wrapped blocks and a wrapped root: how many all-gathers, how many reduce-scatters?
# 3. At most how many blocks' gathered weights does a rank hold at once?
# 4. Only the root is wrapped. Which part of the memory is still divided by N, and what is lost?
# 5. Two nodes. What sends more bytes between them: sharding over all ranks (FSDP), or sharding inside each node, with
#    a copy of the model on each (HSDP)?
# 6. `param_dtype=torch.bfloat16`. What is the dtype of the weights that the optimizer updates?
# 7. Four micro-batches are accumulated, with gradient synchronisation off for the first three. How many times fewer
#    bytes than without?
# 8. Each rank clips by the norm of its own gradient shards. Is that too much or too little?
# 9. A checkpoint of 4 ranks is loaded on 2, and on 1. Are the weights equal to the last bit? And the losses that
#    follow?
# 10. A rank dies while it saves over the previous checkpoint. What happens when that is loaded?

# %% [markdown]
# The first cell imports everything and names every parameter.

# %% tags=["parameters"]
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils import HangError, WorkerError, device, expect_error, launch, memory, plots, record
from course_utils.costs import bytes_sent
from course_utils.data import Windows
from course_utils.fsdp import watch
from course_utils.models import GPT, GPTConfig, build, parameters

world_size = 4  # ranks, 2 or more
whole_batch = 24  # windows of text in a step, of all ranks together: a multiple of the ranks

# %% [markdown]
# ## 1. Sharded: what a rank keeps
#
# The model is the small GPT of the lessons before, here with four blocks. Rank r of n takes the r-th part of the
# windows that belong to a step, so that a step means the same on any number of ranks. Ψ is the number of parameters,
# as in lesson 06, and traffic is given in multiples of Ψ numbers in float32, 4 bytes each.

# %%
windows, gpt = Windows("train"), GPTConfig(layers=4)
backend = launch(dist.get_backend, world_size=max(4, world_size))[0]  # one for the whole lesson
psi_bytes = 4 * parameters(gpt)  # Ψ numbers in float32


def on_ranks(fn, *args, n=world_size, **kwargs):
    return launch(fn, *args, world_size=n, backend=backend, **kwargs)


def take(numbers):
    """Windows by number, and the same text one character later: both (len(numbers), 64)."""
    x, y = zip(*(windows[i] for i in numbers), strict=True)
    return torch.stack(x).to(device()), torch.stack(y).to(device())


def my_part(step, size=whole_batch):
    """This rank's windows of a step of `size` windows."""
    each = size // dist.get_world_size()
    return take(range(step * size, (step + 1) * size)[dist.get_rank() * each :][:each])


# %% [markdown]
# The loop is the same for every model of this lesson, sharded or not. It notes the loss of the whole batch, which
# is the mean over the ranks. One rank with the plain model gives the losses that everything else is compared with.


# %%
def loss_of(model, x, y):
    """Mean cross-entropy of the next character."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train(model, optimizer, steps=range(2)):
    """Train; returns the loss of the whole batch at each step."""
    losses = []
    for step in steps:
        loss = loss_of(model, *my_part(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().float()
        dist.all_reduce(whole)
        losses.append(whole.item() / dist.get_world_size())
    return losses


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# %%
def alone(steps=range(3)):
    model = build(gpt).to(device())
    return train(model, adam(model), steps)


def prove(losses, tolerance=1e-4):
    """Compare losses, those of two steps at least, with those of one process."""
    assert 2 <= len(losses) <= len(reference)
    assert all(abs(a - b) < tolerance for a, b in zip(losses, reference, strict=False))
    return f"losses equal to one process, to {tolerance:g}"


reference = on_ranks(alone, n=1)[0]
print("one process:", ", ".join(f"{loss:.3f}" for loss in reference))

# %% [markdown]
# Now the two lines. `fully_shard` changes a module *in place*: its parameters become shards, and hooks are put
# around its forward and backward. It is called from the inside out, blocks first, then the root. Each call makes
# one **unit**: the parameters of that module that no earlier call has taken. The root's unit is what remains:
# embeddings and the last norm.


# %%
def shard(model, root=None, **options):
    """Make a unit of each block, and one of the rest; `root` has options for the root alone."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options | (root or {}))


def first_run():
    model = shard(build(gpt).to(device()))
    optimizer = adam(model)  # after fully_shard: it is to hold the shards
    return train(model, optimizer, range(3))


print(prove(on_ranks(first_run)[0]))

# %% [markdown]
# Same losses. (They differ in section 7, which changes the precision, and in the mistakes of section 13; nowhere
# else.)
#
# What does a parameter look like now? It is a **DTensor**: a tensor that knows its whole shape, the **mesh** of
# ranks it is spread over, and its **placement** on it. `Shard(0)` means: cut along dimension 0. Under it lies an
# ordinary tensor, this rank's piece. **Predict** the pieces' shapes.


# %%
def pieces(names):
    model = shard(build(gpt).to(device()))
    chosen = {name: dict(model.named_parameters())[name] for name in names}
    return {
        name: (tuple(p.shape), p.placements[0], tuple(p.to_local().shape))
        for name, p in chosen.items()
    }


names = ["embedding.weight", "blocks.0.attention.qkv.weight", "blocks.0.mlp.down.bias"]
by_rank = on_ranks(pieces, names)
for name in names:
    whole, placement, _ = by_rank[0][name]
    print(f"{name}: whole {whole}, {placement}")
    print("    pieces", *[rank[name][2] for rank in by_rank])

# %% [markdown]
# Each parameter is cut on its own, by rows, and keeps its name. Optimizer states are made like their parameters, so
# they are sharded too, without a line of code.
#
# ### Rows that do not divide
#
# **Predict** (question 1): a weight of five rows of four numbers. And how many bytes does its all-gather have?


# %%
def five_rows():
    layer = fully_shard(torch.nn.Linear(4, 5, bias=False).to(device()))
    rows = layer.weight.to_local().shape[0]
    with record() as ledger:
        layer(torch.ones(1, 4, device=device()))
    return rows, ledger[0].bytes


rows, sizes = zip(*on_ranks(five_rows), strict=True)
print(f"rows by rank: {rows}; all-gather of {sizes[0]} bytes, and the weight has {5 * 4 * 4}")
assert sum(rows) == 5 and sizes[0] == 4 * 4 * world_size * -(-5 // world_size)

# %% [markdown]
# The rows are dealt in chunks of ⌈5/N⌉ until there are none left. A rank can get fewer, or nothing at all. For the
# message all pieces are padded to the size of the first, so a few bytes travel for nothing. In the GPT on 3 ranks
# that is 1.6 %.


# %%
def padded(model, n):
    """Bytes of a model's parameters with rows padded to a multiple of `n`, as they are gathered."""
    return sum(4 * n * -(-p.shape[0] // n) * p[0].numel() for p in model.parameters())


gathered = padded(build(gpt), world_size)
for n in (world_size, 3, 5, 64):
    print(f"{n:2} ranks: {padded(build(gpt), n) / psi_bytes - 1:5.1%} padding")

# %% [markdown]
# At 64 ranks each bias of 64 numbers gives one number to a rank; at 128 the upper half of the ranks would have none
# of it. Padding costs little as long as the rows are many more than the ranks.
#
# ### The bytes
#
# `memory.held` goes through all tensors that a rank holds, after one step. **Predict** from lesson 06: what share
# of 16 bytes a parameter?


# %%
def held_after_a_step(sharded):
    model = build(gpt).to(device())
    model = shard(model) if sharded else model
    optimizer = adam(model)
    loss_of(model, *my_part(0)).backward()
    optimizer.step()
    return memory.held(model, optimizer)


plain = on_ranks(held_after_a_step, False)[0]
shards = on_ranks(held_after_a_step, True)
for part in ("parameters", "gradients"):
    assert getattr(plain, part) == psi_bytes
    assert psi_bytes <= sum(getattr(rank, part) for rank in shards) <= gathered
rows = {"whole model": plain} | {f"FSDP, rank {r}": rank for r, rank in enumerate(shards)}
plots.memory_bars(rows, "measured: model states after one step")

# %% [markdown]
# *The figure: stacked bars of parameters, gradients and optimizer states. A rank with the whole model holds 3.4 MB.
# Each rank under FSDP holds an N-th of every part.*
#
# This is ZeRO-3: the states are divided by N, and nothing but Adam's step counters is held twice. The rest of the
# lesson is about what happens *between* two such moments.

# %% [markdown]
# ## 2. Gathered, computed, freed: one step
#
# A rank cannot compute with a quarter of a weight. So in each step, for each unit:
#
# 1. forward: **all-gather** the pieces, compute, **free** the whole weights;
# 2. backward: all-gather again, compute, free, and **reduce-scatter** the gradients: every rank gets the mean of its
#    own rows only.
#
# `watch` runs a step to warm up, and then notes the order of events in the next: when messages start, when a layer
# computes, and how many bytes of gathered weights are held. The bytes can be read off because PyTorch keeps the same
# storage for each whole weight and frees it by resizing it to zero, as lesson 06 did. An all-gather's flat result, out
# of which FSDP copies the weights, is counted as well. Clocks are left out: each event is one step to the right.


# %%
def watched(model):
    """On a rank: lanes of a step, and bytes of gathered weights after each event."""
    found = watch(model, lambda step: loss_of(model, *my_part(step)).backward())
    model.zero_grad()
    return found


def watch_blocks(**options):
    return watched(shard(build(gpt).to(device()), **options))


# %% [markdown]
# **Predict** (questions 2 and 3), then look.

# %%
lanes, line = on_ranks(watch_blocks)[0]
plots.shard_timeline(lanes, line, "measured: one step of rank 0, in order of events", order=True)

# %% [markdown]
# *The figure: four lanes over 27 events; the root computes the embeddings, and later the last norm and the head. In
# forward each block is gathered, computed and freed before the next is gathered. In backward the next block is gathered
# before the present one computes, and each block's reduce-scatter follows it. Below, the bytes held for gathered
# weights: in both directions up to the root's and twice a block's.*

# %%
order = [unit for unit, *_ in lanes["all-gather"]]
block = padded(build(gpt).blocks[0], world_size)
root = gathered - 4 * block
turn = lanes["backward"][0][1]  # the first event of backward
in_forward, in_backward = (
    max(size for at, size in line if (at < turn) == forward) for forward in (True, False)
)
most = max(in_forward, in_backward)
print("all-gathers:    ", " -> ".join(order))
print("reduce-scatters:", " -> ".join(unit for unit, *_ in lanes["reduce-scatter"]))
print(f"held at most: in forward {in_forward:,} bytes of {gathered:,}, in backward {in_backward:,}")
assert order == ["root", *(f"block {i}" for i in (0, 1, 2, 3, 3, 2, 1, 0))]
assert 0.97 * (2 * block + root) < min(in_forward, in_backward) <= most <= 2 * block + root

# %% [markdown]
# Nine all-gathers and five reduce-scatters. The root is gathered once: the backward pass begins with it, so freeing it
# after forward would be for nothing, and FSDP does not. Besides the root, two blocks' bytes are held at most, for
# different reasons. In backward two *different* blocks are there, the one that computes and the one that is fetched
# ahead. In forward it is the *same* block twice: FSDP keeps the flat result of an all-gather until the next unit's
# weights are copied out. On a GPU, where the CPU runs ahead, forward can hold the next block's message as well, a third
# block's bytes (by FSDP's source; not measured here).
#
# The last block is left, freed, and gathered again at once. That all-gather is wasted; section 4 saves it.
#
# ### How many bytes?
#
# Lesson 06 says 3Ψ for ZeRO-3, of which each rank sends (N−1)/N: two all-gathers and a reduce-scatter of the whole
# model. The ledger counts the whole messages, without that factor. **Predict** what it says for this run, whose root
# is gathered once.


# %%
def step_ledger(**options):
    """On a rank: the ledger of one step, after one of warm-up."""
    return ledger_of(shard(build(gpt).to(device()), **options))


def ledger_of(model):
    for step in range(2):
        with record() as ledger:
            loss_of(model, *my_part(step)).backward()
    return ledger


def volume(ledger):
    return f"{ledger.bytes() / gathered:.2f} Ψ in {len(ledger)} messages"


usual, all_freed = (on_ranks(step_ledger, root=r)[0] for r in ({}, {"reshard_after_forward": True}))
print(f"usual:          {volume(usual)}; root gathered twice: {volume(all_freed)}")
assert all_freed.bytes() == 3 * gathered and usual.bytes() == 3 * gathered - root
assert usual.count("all_gather") == 9 and usual.count("reduce_scatter") == 5
ddp = on_ranks(lambda: ledger_of(DDP(build(gpt).to(device()))))[0]
print(f"DDP, for comparison: all-reduces of {ddp.bytes() / psi_bytes:.2f} Ψ,", end="")
print(" which cost as much as 2")

# %% [markdown]
# 3Ψ to the byte (with its padding) when the root is treated like a block. An all-reduce of Ψ sends 2Ψ(N−1)/N, an
# all-gather or a reduce-scatter Ψ(N−1)/N. So FSDP sends half as much again as DDP.
#
# > **What changes on real GPUs.** The all-gathers run on a stream of their own, ahead of the computing (section 6),
# > and the 3Ψ are hidden as long as a block computes longer than its weights travel. On this CPU each message is
# > waited for. gloo also sends a reduce-scatter as an all-reduce inside, twice the bytes on the wire; the ledger
# > notes what was asked for.

# %% [markdown]
# ## 3. What to wrap
#
# A unit is gathered whole, in one message. So units are a trade: **large** units mean few messages and much memory,
# **small** ones many messages and little memory. **Predict** (question 4) what happens if only the root is wrapped.
#
# A wider GPT shows it better: 128 instead of 64. `memory.track` follows every tensor through a step.

# %%
wide = GPTConfig(layers=4, hidden=128)


def root_only(model):
    return fully_shard(model)


def every_linear(model):
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # outputs that are views
    for layer in [m for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)]:
        fully_shard(layer)
    return fully_shard(model)


def measure(wrap, config=wide):
    """On a rank: ledger of the second step, and the memory at its peak."""
    model = wrap(build(config).to(device()))
    optimizer = adam(model)
    loss_of(model, *my_part(0, size=world_size)).backward()
    optimizer.step()  # makes the optimizer's states
    optimizer.zero_grad()
    with record() as ledger, memory.track(model, optimizer) as tracker:
        loss_of(model, *my_part(1, size=world_size)).backward()
        optimizer.step()
    return ledger, tracker.peak


# %% tags=["nbval-ignore-output"]
wraps = {"DDP": DDP, "root only": root_only, "every block": shard, "every linear": every_linear}
measured = {name: on_ranks(measure, wrap)[0] for name, wrap in wraps.items()}
print(f"{'':13}messages  kB each (mean)  peak (MB)  of it buffers (MB)")
for name, (ledger, peak) in measured.items():
    each = ledger.bytes() / len(ledger) / 1e3
    print(f"{name:13}{len(ledger):8}{each:16.1f}", end="")
    print(f"{peak.total / 1e6:11.2f}{peak.buffers / 1e6:20.2f}")

# %%
counts = {name: len(ledger) for name, (ledger, _) in measured.items()}
peaks = {name: peak for name, (_, peak) in measured.items()}
assert counts["root only"] == 2 and counts["every block"] == 4 * 3 + 2
assert counts["every linear"] == 4 * 4 * 3 + 2
assert peaks["every linear"].total < peaks["every block"].total < peaks["root only"].total
plots.memory_bars(peaks, "measured: one rank at its peak, one window of text")

# %% [markdown]
# *The figure: four bars by part. DDP holds whole parameters, gradients and optimizer states. With the root only the
# states are divided but the buffers hold the whole model. With every block, and with every linear layer, the buffers
# shrink.*
#
# With the root only, the whole model is gathered before the first layer computes and stays until backward is over.
# States are still divided by N; but at its peak each rank holds all weights and all gradients. Nothing can be
# fetched ahead either.
#
# Every linear layer by itself saves a little more, and pays more than three times the messages. Each pays its α (lesson
# 02). DDP's buffers are its buckets, a second copy of the gradients (lesson 04). It reaches its peak after backward, in
# the optimizer's step; hence the few activations in its bar.
#
# One block is the usual choice: its weights are used one after the other anyway, and it is large enough for the
# bandwidth. Where blocks are small, `fully_shard([a, b])` makes one unit of several. A **tied** weight must be in one
# unit with both its users, or in a unit above both: here the root. Frozen parameters are gathered like others, but have
# no gradients to reduce; `ignored_params` stay whole on every rank, and nobody averages their gradients.
#
# Blocks are also what is checkpointed (lesson 05) and compiled. torchtitan does it in this order, block by block:
# `checkpoint_wrapper`, `torch.compile`, `fully_shard`. Recomputing gathers nothing again, because the block's weights
# are there for its backward.
#
# What is on the GPU, and when? With Adam and the precisions of section 7:
#
# | moment | shards | gathered weights | whole gradients | flat copies |
# |---|---|---|---|---|
# | between steps | parameters and moments, Ψ/N each | | | |
# | forward of block i | the same | root, block i | | gather i (on a GPU also gather i + 1) |
# | backward of block i | also gradients so far | root, block i | block i's, root's | gather i − 1, reduce i + 1 |
# | optimizer's step | also all gradients | | | temporaries of default Adam on a GPU: 4 bytes a local parameter |
# | *dtype* | *fp32* | `param_dtype` | `param_dtype` | `param_dtype` gathered, `reduce_dtype` reduced |
#
# The flat copies are the messages: *gather i* what the all-gather of block i brings, *reduce i* what its reduce-scatter
# takes. Activations come on top. They rise in forward, fall in backward, and are the same for any N.
#
# > **Misconception.** "FSDP divides the memory by N." Only the first column shrinks with N. Gathered weights,
# > whole gradients, messages and activations are as large on a thousand ranks as on two.

# %% [markdown]
# ## 4. `reshard_after_forward`, and the ZeRO stages
#
# After forward a unit's weights can be
#
# - **freed** (`True`): gathered again in backward, 3Ψ. The default for all units but the root;
# - **kept** (`False`): 2Ψ and the memory of the whole model between forward and backward. The root's default;
# - **freed in part** (an integer k, a divisor of N): each rank keeps a k-th, and backward gathers among k ranks. If
#   those k share a node, backward's all-gathers stay inside it.
#
# An integer wants an even number of ranks of 4 or more, as do the two nodes of section 5. If `world_size` is 2 or 3,
# these cells start four ranks.
#
# **Predict** the bytes gathered in each case.

# %%
even = world_size if world_size >= 4 and world_size % 2 == 0 else 4
per_node = even // 2
choices = {"True": True, "False": False, f"{per_node}": per_node}
by_choice = {
    name: on_ranks(step_ledger, reshard_after_forward=choice, n=even)
    for name, choice in choices.items()
}
for name, ledgers in by_choice.items():
    gathers = [entry for entry in ledgers[0] if entry.op == "all_gather"]
    groups = {len(entry.ranks): 0 for entry in gathers}
    for entry in gathers:
        groups[len(entry.ranks)] += entry.bytes / padded(build(gpt), even)
    told = ", ".join(f"{size:.2f} Ψ among {n} ranks" for n, size in groups.items())
    print(f"{name:6} gathered: {told}")
assert [len(ledgers[0]) for ledgers in by_choice.values()] == [15, 10, 15]

# %% [markdown]
# And the bytes of gathered weights, at most and when backward begins:


# %%
for name, choice in choices.items():
    lanes, line = on_ranks(watch_blocks, reshard_after_forward=choice, n=even)[0]
    whole = padded(build(gpt), even)
    kept = dict(line)[lanes["backward"][0][1]] / whole
    at_most = max(size for _, size in line) / whole
    print(f"{name:6} at most {at_most:.2f} Ψ, when backward begins {kept:.2f} Ψ")
    assert (kept > 0.99) == (choice is False)

# %% [markdown]
# `True` never holds much more than half of this small model: the root, and two of four blocks. `False` has the whole
# model when backward begins, and the last block's flat copy a moment before. With an integer the gathered weights are
# freed as with `True`. (The root is too, because it has the same choice here.) What is kept until backward is a second,
# larger shard, which these numbers do not count: Ψ/k beside the Ψ/N that every rank has. (ZeRO++ calls this hpZ.)
#
# Each unit may have its own choice. `False` for the last block saves the all-gather that section 2 stumbled over, for
# no memory at the peak: that block is needed at once.
#
# | ZeRO | what is divided | FSDP2 | FSDP1 `ShardingStrategy` | traffic of a rank |
# |---|---|---|---|---|
# | 0 | nothing | `DDP`, or `replicate` | `NO_SHARD` | 2Ψ |
# | 1 | optimizer states | none; `ZeroRedundancyOptimizer` with DDP | none | 2Ψ; with this tool 3Ψ (lesson 06) |
# | 2 | and gradients | `reshard_after_forward=False` | `SHARD_GRAD_OP` | 2Ψ |
# | 3 | and parameters | `reshard_after_forward=True` | `FULL_SHARD` | 3Ψ |
# | 3, second shard in the node | as 3, and Ψ/k more | `reshard_after_forward=k` | none | 3Ψ, of which Ψ inside |
# | 3 inside, 0 between | all, by one node's ranks | 2-D mesh (section 5) | `HYBRID_SHARD` | 3Ψ inside, 2Ψ/k between |
#
# Strictly, `reshard_after_forward=False` still stores parameters as shards between steps, which ZeRO-2 does not.
# What it has in common with it is the traffic, and whole parameters from forward to backward.

# %% [markdown]
# ## 5. Two nodes: HSDP
#
# Inside a node links are fast, between nodes slow (lesson 01). **HSDP**, hybrid sharding, shards inside a node and
# replicates between nodes. FSDP2 takes it from the mesh: a 2-D one means *replicate along the first dimension, shard
# along the second*.
#
# Two nodes are emulated here: the lower half of the ranks is node 0, the upper half node 1.

# %%
grid = torch.arange(even).view(2, per_node).tolist()
node = {rank: rank // per_node for rank in range(even)}
title = f"modelled: {even} ranks on two nodes"
plots.mesh_picture(grid, ("replicate", "shard"), title, nodes=node)

# %% [markdown]
# *The figure: a row for each node. Along a row the ranks hold different shards; down a column they hold the same.*
#
# What travels where? The ledger knows each message's group. Let every collective run as a ring over its group: then
# rank r sends its share to the next rank of the group, and that one is on the same node or not. Four layouts:
# FSDP over all ranks; the same with an integer, which keeps backward's all-gathers inside; HSDP; and HSDP with the
# mesh turned round by mistake. The bytes are those of *all ranks together*. **Predict** (question 5) their order.


# %%
def hybrid():
    mesh = init_device_mesh(device().type, (2, per_node), mesh_dim_names=("replicate", "shard"))
    return step_ledger(mesh=mesh)


def turned():
    grid = torch.arange(dist.get_world_size()).view(2, -1).T.contiguous()
    mesh = DeviceMesh(device().type, grid, mesh_dim_names=("replicate", "shard"))
    return step_ledger(mesh=mesh)


def traffic(ledgers):
    """Bytes that all ranks send inside and between nodes, each collective as a ring."""
    inside = between = 0
    for rank, ledger in enumerate(ledgers):
        for entry in ledger:
            n = len(entry.ranks)
            following = entry.ranks[(entry.ranks.index(rank) + 1) % n]
            sent = bytes_sent(entry.op, n, entry.bytes)
            inside += sent * (node[following] == node[rank])
            between += sent * (node[following] != node[rank])
    return inside, between


# %%
layouts = {
    "FSDP": on_ranks(step_ledger, n=even),
    f"FSDP, reshard to {per_node}": by_choice[f"{per_node}"],
    "HSDP": on_ranks(hybrid, n=even),
    "HSDP, mesh turned round": on_ranks(turned, n=even),
}
sent = {name: traffic(ledgers) for name, ledgers in layouts.items()}
for name, (inside, between) in sent.items():
    inside, between = inside / psi_bytes, between / psi_bytes
    print(f"{name:24} all ranks: inside {inside:5.2f} Ψ, between nodes {between:5.2f} Ψ")

# %%
print(*(f"{e.op} of {e.bytes:,} among ranks {e.ranks}" for e in layouts["HSDP"][0][-3:]), sep="\n")
assert sent["HSDP"][1] == min(between for _, between in sent.values())
assert sent["HSDP"][1] == 2 * padded(build(gpt), per_node)

# %% [markdown]
# A unit's gradients are reduce-scattered inside the node, and then each rank all-reduces its own shard with its
# partner on the other node. For two nodes of k ranks that is k partners × 2 directions × Ψ/k = 2Ψ between the nodes,
# whatever k is. FSDP's ring over all ranks crosses the border twice, each time with 3Ψ(N−1)/N: on 4 ranks 4.5Ψ, less
# the root's second all-gather, and with many ranks nearly 6Ψ.
#
# With M nodes HSDP's all-reduces send 2(M − 1)Ψ between nodes, FSDP's ring 3MΨ(N−1)/N. For each node that is 2Ψ(M−1)/M
# against nearly 3Ψ. HSDP sends about a third as much on two nodes, 1.75Ψ against 2.95Ψ on eight nodes of eight GPUs,
# and on many nodes two thirds.
#
# What HSDP costs is memory: states are divided by the ranks of a node, not by all. So it is for models that fit into
# a node, on more nodes than one. 70 billion parameters do not: 16 · 70 / 8 = 140 GB of states on each of 8 GPUs.
#
# A mesh turned round is worse than no mesh at all: it *shards* over the slow link. Nothing warns of that.
#
# > **Misconception.** "HSDP is FSDP with less memory." It has more than FSDP: twice as much on two nodes. It saves
# > bytes on the slow link.

# %% [markdown]
# And the losses:


# %%
def train_hybrid():
    mesh = init_device_mesh(device().type, (2, per_node), mesh_dim_names=("replicate", "shard"))
    model = shard(build(gpt).to(device()), mesh=mesh)
    placements = model.embedding.weight.placements
    return train(model, adam(model)), placements


losses, placements = on_ranks(train_hybrid, n=even)[0]
print(f"HSDP: {prove(losses)}; placements {placements}")

# %% [markdown]
# > **What changes on real GPUs.** `init_device_mesh("cuda", (nodes, 8))` numbers ranks as torchrun does: those of a
# > node follow each other. The all-reduce between nodes runs beside the reduce-scatters of the next units. NCCL uses
# > several rings or trees at once, so the bytes on one link differ; the sums above are what any ring has to carry.

# %% [markdown]
# ## 6. Prefetch
#
# A block can compute only when its weights are there. To hide the wait, the next block's all-gather must be *issued*
# before the present block computes, and must *run beside it*. Those are two conditions:
#
# - backward fetches ahead by itself: section 2 shows the next all-gather before the block computes;
# - forward does not, because nobody knows yet which unit comes next. `set_modules_to_forward_prefetch` says so.
#
# On gloo the call blocks, so that even a message issued early is waited for: only the order can be seen here.
# **Predict** the order of events in forward with and without the hint.


# %%
def prefetching(forward):
    """On a rank: the lanes of a step, and the losses of a few."""
    model = shard(build(gpt).to(device()))
    if forward:
        for block, following in zip(model.blocks, model.blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([following])
    return watched(model)[0], train(model, adam(model))


def told(lanes):
    """The order of all-gathers and computing in the forward pass, until block 2."""
    events = [(at, "+" + unit) for unit, at, _ in lanes["all-gather"]]
    events = sorted(events + [(at, unit) for unit, at, _ in lanes["forward"]])
    words = [word for _, word in events]
    return "  ".join(words[: words.index("block 2")])


def ahead(lanes):
    """How many all-gathers are issued before another unit computes."""
    computing = sorted((at, unit) for unit, at, _ in lanes["forward"] + lanes["backward"])
    return sum(
        next(of for later, of in computing if later > at) != unit
        for unit, at, _ in lanes["all-gather"]
    )


# %%
for forward in (False, True):
    lanes, losses = on_ranks(prefetching, forward)[0]
    print(f"hint {forward!s:5}: {told(lanes)}")
    early, count = ahead(lanes), len(lanes["all-gather"])
    print(f"    {early} of {count} all-gathers before another unit computes; {prove(losses)}")
    assert early == (7 if forward else 4)

# %% [markdown]
# `+block 1` is the all-gather, `block 1` the computing. With the hint the all-gathers of blocks 1 to 3 are issued one
# block ahead, in forward as in backward, and can be hidden behind that block. Without it only backward's four are
# (block 3's comes while the root computes). The price is one more unit's weights in memory. A list of two modules
# fetches two ahead.
#
# > **What changes on real GPUs.** There the CPU runs ahead of the GPU: it has issued the next all-gather long before
# > the GPU has computed the present block. So forward overlaps without any hint, and the hint matters when the CPU
# > falls behind. Running ahead does not fill the GPU: FSDP2 frees memory in the order of its streams, so that a later
# > all-gather takes the memory of an earlier one.

# %% [markdown]
# ## 7. Mixed precision and offload
#
# `MixedPrecisionPolicy` belongs to a unit: `param_dtype` is what is gathered and computed with, `reduce_dtype` what
# gradients are reduced in (by default the same), `output_dtype` what forward hands out. **Predict** (question 6):
# which dtype have the shards and the optimizer states? And the bytes of a step?


# %%
def precision(options, of_root):
    """On a rank: losses, the ledger of a step, and the dtypes that stay."""
    policy, root = MixedPrecisionPolicy(**options), MixedPrecisionPolicy(**options, **of_root)
    model = shard(build(gpt).to(device()), mp_policy=policy, root={"mp_policy": root})
    optimizer = adam(model)
    losses = train(model, optimizer)
    with record() as ledger:
        loss = loss_of(model, *my_part(9))
        loss.backward()
    kept = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
    kept += [p.grad for p in model.parameters()]
    return losses, ledger, {t.dtype for t in kept}, loss.dtype


# %%
half, full = torch.bfloat16, torch.float32
bf16, reduced = {"param_dtype": half}, {"param_dtype": half, "reduce_dtype": full}
policies = {
    "float32": ({}, {}),
    "bf16": (bf16, {}),
    "bf16, reduced in fp32": (reduced, {}),
    "... and output in fp32": (reduced, {"output_dtype": full}),
}
for name, options in policies.items():
    losses, ledger, kept, loss = on_ranks(precision, *options)[0]
    sizes = [ledger.bytes(op) / gathered for op in ("all_gather", "reduce_scatter")]
    print(f"{name:22} gathered {sizes[0]:.2f} Ψ, reduced {sizes[1]:.2f} Ψ, loss in {loss}")
    assert kept == {full}
    prove(losses, tolerance=0.05 if "bf16" in name or "output" in name else 1e-4)

# %% [markdown]
# Shards, their gradients and the optimizer's states stay float32 in all four: the shard *is* the master weight of
# lesson 05, and no second copy is needed. A cast copy is gathered, so the all-gathers halve; the reduce-scatters
# halve unless `reduce_dtype` says otherwise. Sums of N gradients in bf16 lose digits with N, so float32 is the safe
# choice there, for half a Ψ more.
#
# In the second and third row the loss itself was computed in bf16, because the root's output is: three digits at
# most. In the fourth the *root's* policy has `output_dtype`: logits are handed out in float32, and so is the loss.
# (In every block's policy it would be a mistake: the last norm, which is in the root's unit, would get float32 input
# for its bf16 weights and refuse.)
#
# The losses agree with float32 to within 0.05. That is bf16, not FSDP.
#
# ### Offload
#
# `CPUOffloadPolicy` keeps shards, gradients and states in the memory of the host. A shard goes to the GPU just
# before its all-gather, its gradient comes back after the reduce-scatter, and **the optimizer steps on the CPU**.
# `pin_memory` keeps the host's copies in pages that the GPU can read on its own; without a GPU it must be False.


# %%
def offloaded():
    model = shard(build(gpt).to(device()), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = adam(model)
    losses = train(model, optimizer)
    with record() as ledger:
        loss_of(model, *my_part(9)).backward()
    kept = memory.held(model, optimizer).states
    return losses, ledger.bytes(), {p.device.type for p in model.parameters()}, kept


by_rank = on_ranks(offloaded)
losses, size, where, kept = by_rank[0]
assert size == usual.bytes() and where == {"cpu"}
print(f"{prove(losses)}; same messages; {kept:,} bytes of states are on the {where.pop()}")

# %% [markdown]
# On the CPU nothing moves. From a GPU the rank's share of the states goes, 4Ψ/N numbers with Adam. In return each step
# carries over PCIe the shard twice in and its gradient once out, 3Ψ/N numbers a rank, and waits for the CPU's Adam.
# Lesson 06 does this by hand.
#
# > **What changes on real GPUs.** With offload, gradients lie on the CPU, so clipping (section 9) and full state dicts
# > (section 11) are collectives on CPU tensors. NCCL alone refuses them (*recorded*,
# > [pytorch issue 148532](https://github.com/pytorch/pytorch/issues/148532)): the group needs a backend for each kind
# > of device, `init_process_group("cpu:gloo,cuda:nccl")`.

# %% [markdown]
# ## 8. Accumulation
#
# As in lesson 04 a batch is taken in micro-batches. FSDP2 has no `no_sync`; it has switches on the model:
#
# - `set_requires_gradient_sync(False)`: gradients are not reduced but added up, *whole*, on this rank;
# - `set_reshard_after_forward(False)` and `set_reshard_after_backward(False)`: weights stay gathered from one
#   micro-batch to the next. They do not change between them, after all.
#
# **Predict** (question 7) the bytes of four micro-batches: plainly; with the first switch; with all.


# %%
def accumulate(how, micro=4):
    """On a rank: the ledger of one step, and (on rank 0) the whole gradient."""
    model = shard(build(gpt).to(device()))
    x, y = my_part(0, size=4 * world_size)
    if how == "keep weights":
        model.set_reshard_after_forward(False)
    with record() as ledger:
        for i in range(micro):
            last = i == micro - 1
            model.set_requires_gradient_sync(how == "plain" or last)
            model.set_reshard_after_backward(how != "keep weights" or last)
            (loss_of(model, x[i : i + 1], y[i : i + 1]) / micro).backward()
    gradient = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    return ledger, gradient if dist.get_rank() == 0 else None


# %%
model = build(gpt)
loss_of(model, *take(range(4 * world_size))).backward()
expected = torch.cat([p.grad.flatten() for p in model.parameters()])
for how in ("plain", "sync at the end", "keep weights"):
    ledger, gradient = on_ranks(accumulate, how)[0]
    parts = [ledger.bytes(op) / gathered for op in ("all_gather", "reduce_scatter")]
    print(f"{how:16} gathered {parts[0]:.2f} Ψ, reduced {parts[1]:.2f} Ψ", end="")
    assert torch.allclose(gradient.cpu(), expected, rtol=0, atol=1e-6)
    print(f" in {len(ledger)} messages")
print("each time the gradient of one process")

# %% [markdown]
# In float32 all three are right. (With `param_dtype=torch.bfloat16` set `reduce_dtype=torch.float32`: without it the
# first switch adds the micro-batches up in bf16; with it the whole gradients it keeps take 4 bytes each.) The plain
# loop sends four steps' worth; the first switch saves the reduce-scatters; all of them together leave 2Ψ for four
# micro-batches, as much as DDP.
#
# What they cost is what FSDP was for: whole gradients on every rank between micro-batches, and with the others whole
# weights too. Where memory is tight, accept the traffic of the plain loop (lesson 12 computes its time), or
# better: make the micro-batches larger with activation checkpointing. With HSDP there is a middle way. With
# `set_requires_all_reduce(False)` until the last micro-batch, each one is reduced inside the node and only their sum
# between nodes, and a rank keeps no more than a shard of it.
#
# Dividing by `micro` is right where every micro-batch of every rank has as many tokens. With padding or masks a mean of
# means is wrong: take the sum over tokens, divide by the tokens of the whole step (one all-reduce of their count) and
# multiply by the number of ranks N, because FSDP averages over ranks.

# %% [markdown]
# ## 9. Clipping
#
# Clipping scales the gradient down if its norm is above a limit: the norm of *all* gradients. Each rank has a piece
# only. **Predict** (question 8) what a rank gets that takes the norm of its own piece.


# %%
def norms(limit=0.5):
    model = shard(build(gpt).to(device()))
    loss_of(model, *my_part(0)).backward()
    own = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
    with record() as ledger:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    left = torch.stack([p.grad.full_tensor().norm() for p in model.parameters()]).norm()
    return own.item(), norm.full_tensor().item(), left.item(), ledger


model = build(gpt)
loss_of(model, *take(range(whole_batch))).backward()
expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
by_rank = on_ranks(norms)
own, norm, left, ledgers = zip(*by_rank, strict=True)
print(f"one process {expected:.4f}; clip_grad_norm_ on ranks", *(f"{value:.4f}" for value in norm))
print("norm of the own pieces:   ", *(f"{value:.4f}" for value in own))
print("messages of clip_grad_norm_:", *(f"{e.op} of {e.bytes} bytes" for e in ledgers[0]))
assert all(abs(value - expected) < 1e-4 for value in norm) and abs(left[0] - 0.5) < 1e-4
assert abs(sum(value**2 for value in own) ** 0.5 - expected) < 1e-4 and max(own) < expected

# %% [markdown]
# `clip_grad_norm_` sees DTensors and does the right thing: it squares the pieces' norms, sums over the ranks with one
# all-reduce (a number for each parameter) and takes the root.
#
# A rank's own norm is too small, by about √N, and different on each rank. Clipping by it clips too little, and each
# rank scales its rows by another factor: the direction changes as well. No message tells. It happens in hand-written
# code that takes `p.grad.to_local()`, or in one that was written for DDP.
#
# The norm that is returned is a DTensor too: `.full_tensor()` before it is logged, on *all* ranks.

# %% [markdown]
# ## 10. A model that no rank can hold
#
# So far each rank built the whole model and then sharded it. A model too large for a rank is built on the **meta
# device**, as shapes without memory; then sharded; then given memory for its shards; then filled.
#
# Filling is where it goes wrong. **Predict:** all ranks use the same seed, as in lesson 04, and initialise their
# shards. What is in the whole weight?


# %%
def on_meta():
    with torch.device("meta"):
        model = GPT(gpt)
    shard(model)
    assert all(p.device.type == "meta" for p in model.parameters())  # no memory yet
    return model.to_empty(device=device())


def filled_by_each_rank():
    torch.manual_seed(0)  # the same on all ranks
    model = on_meta()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "DTensor random operators may not have complete support"
        torch.nn.init.normal_(model.embedding.weight)
    whole = model.embedding.weight.full_tensor()
    return [piece[0, :3].tolist() for piece in whole.chunk(dist.get_world_size())]


for rank, row in enumerate(on_ranks(filled_by_each_rank)[0]):
    print(f"first row of rank {rank}'s piece:", *(f"{value:7.4f}" for value in row))

# %% [markdown]
# Every rank drew the same numbers for its own piece, so the whole weight repeats itself N times. On the CPU there is
# a warning, which is easily missed. The model would train, badly. (On GPUs the random generator of DTensors is made to
# give each piece numbers of its own; not run here.)
#
# The safe way is to take the weights from one place. Rank 0 has them, from a file or by building the model once on
# the CPU; `set_model_state_dict` hands each rank its piece. The other ranks give an empty dict. (Rank 0's host must
# hold the whole model, 280 GB for 70 billion parameters in fp32. From safetensors files a rank can read its own rows:
# `dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))`, of `torch.distributed.checkpoint.hf_storage`.)


# %%
def filled_from_rank_0():
    model = on_meta()
    whole = build(gpt).state_dict() if dist.get_rank() == 0 else {}
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with record() as ledger:
        states.set_model_state_dict(model, whole, options=options)
    tied = model.head.weight is model.embedding.weight
    held = memory.held(model).parameters
    return train(model, adam(model)), held, tied, ledger.bytes("broadcast")


losses, held, tied, size = on_ranks(filled_from_rank_0)[0]
print(f"{prove(losses)}; weights on rank 0: {held:,} bytes of {psi_bytes:,}")
print(f"broadcast {size / psi_bytes:.1f} Ψ; output layer and embedding still tied: {tied}")
assert tied and size >= psi_bytes

# %% [markdown]
# Weights are broadcast one by one, and each rank cuts out its rows: but for rank 0's own copy, there is never more
# than one whole weight beside the shards.
#
# **Tied weights** survive `to_empty` here: `fully_shard` has made them one DTensor, and PyTorch fills a DTensor
# parameter in place. An ordinary parameter is replaced, once for each user. **Predict** what `is` says for the plain
# model:

# %%
with torch.device("meta"):
    model = GPT(gpt)
before = model.head.weight is model.embedding.weight
model.to_empty(device="cpu")
after = model.head.weight is model.embedding.weight
print(f"plain model: tied on meta {before}, after to_empty {after}")

# %% [markdown]
# So assert it after `to_empty`, and tie again if it fails (`model.head.weight = model.embedding.weight`, before
# `fully_shard`). Buffers are empty after `to_empty` too; those that are not in the state dict (`persistent=False`,
# such as the tables of rotary embeddings) have to be computed again by hand.

# %% [markdown]
# ## 11. Checkpoints
#
# Now the states that no rank has whole are to be saved, and loaded on another number of ranks. Three tools:
#
# - `get_state_dict(model, optimizer)` names all parameters *and* optimizer states by their parameter's full name;
#   the values are DTensors. `set_state_dict` is the way back;
# - `dcp.save`: every rank writes its own pieces into its own file, in parallel, and rank 0 a `.metadata` file that
#   says which piece of what is where;
# - `dcp.load` reads *into* the tensors that it is given: each rank looks up which pieces overlap with its own rows,
#   and reads those.
#
# Nothing in this asks for the same number of ranks.


# %%
def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), states.get_state_dict(model, optimizer), strict=True))


def whole_state(model, optimizer):
    """All states as ordinary tensors on the CPU, on rank 0; copies, so that training can go on."""
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    tensors, rest = states.get_state_dict(model, optimizer, options=options)
    for name, state in rest.get("state", {}).items():  # on rank 0; empty on the others
        tensors |= {f"{name}, {kind}": value for kind, value in state.items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# %% [markdown]
# The states after two steps are saved twice, by `dcp.save` and by `dcp.async_save`. That one copies the states and
# returns; a thread writes while training goes on. Its messages need a **group of their own**: on the training group
# they would get between those of the training steps. **Predict** (question 9).


# %%
def save(folder):
    model = shard(build(gpt).to(device()))
    optimizer = adam(model)
    train(model, optimizer)
    saved = whole_state(model, optimizer)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder / "plain")
    beside = dist.new_group(backend="gloo")
    saving = dcp.async_save(
        state_of(model, optimizer), checkpoint_id=folder / "async", process_group=beside
    )
    losses = train(model, optimizer, range(2, 4))  # changes the weights while they are written
    saving.result()  # wait until all is on disk
    return losses, saved if dist.get_rank() == 0 else None


temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
losses_after, saved = on_ranks(save, folder)[0]
print("losses after saving:", ", ".join(f"{loss:.3f}" for loss in losses_after))
print("files:", ", ".join(sorted(path.name for path in (folder / "plain").iterdir())))

# %% [markdown]
# What the metadata says of one tensor:

# %%
found = dcp.FileSystemReader(folder / "plain").read_metadata().state_dict_metadata
qkv = "model.blocks.0.attention.qkv.weight"
for chunk in found[qkv].chunks:
    print(f"{qkv}: {tuple(chunk.sizes)} from row {chunk.offsets[0]}")
print(f"{len(found)} entries")

# %% [markdown]
# Now load: on as many ranks, on two and on one (on fewer where there are only two). Each begins with weights of
# another seed, so that what is equal afterwards came from the files.


# %%
def load(folder, steps=range(2, 4)):
    model = shard(build(gpt, seed=7).to(device()))
    optimizer = adam(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    states.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    loaded = whole_state(model, optimizer)
    return train(model, optimizer, steps), loaded if dist.get_rank() == 0 else None


fewer = max(1, min(2, world_size - 1))
for kind, n in (("plain", world_size), ("plain", fewer), ("async", 1)):
    losses, loaded = on_ranks(load, folder / kind, n=n)[0]
    off = max(abs(a - b) for a, b in zip(losses, losses_after, strict=True))
    exact = n == world_size and backend == "gloo"  # some GPU kernels add in any order
    assert equal(loaded, saved) and off < 1e-5 and (off == 0 or not exact)
    text = "to the last bit" if exact else "to 1e-5"
    print(f"{kind:5} on {n}: states equal to the last bit, next losses {text}")

# %% [markdown]
# The states are equal to the last bit in each case, the asynchronous one too, although training went on while it was
# written. The losses that follow are so on the same number of ranks; on others gradients are summed in another
# order, as in lesson 04.
#
# > **What changes on real GPUs.** `async_save` copies the states from the GPU to the host first, and training waits
# > for that copy; writing to a slow file system goes on beside. The host needs room for the copy.
#
# What has to be saved besides: the step, the sampler's position, the learning rate's schedule, and random states, the
# GPU's too (`torch.get_rng_state()` and `torch.cuda.get_rng_state()`: dropout on a GPU draws from the second). They go
# into the same dict, as objects with `state_dict` and `load_state_dict`, or as plain values. What differs between
# ranks, as random states do, needs a key for each rank: of plain values with the same key one rank's is written.
#
# > **To resume, in this order:**
# > 1. Build on the meta device, `fully_shard`, `to_empty`; assert that tied weights are still tied (section 10).
# > 2. Make the optimizer from the sharded parameters.
# > 3. `state = state_of(model, optimizer)`, and the step, schedule and random states under their keys.
# > 4. `dcp.load(state, checkpoint_id=latest(folder))` overwrites what it was given (`latest` is written below).
# > 5. `set_state_dict(...)` as in `load`; `load_state_dict` of the rest; `set_rng_state` from this rank's key, if
# >    the number of ranks is the same.
# > 6. Compute again what no state dict has: buffers with `persistent=False`.
#
# ### For others: one file
#
# A checkpoint for training is not what others want. A **full state dict** has ordinary tensors, gathered whole.
# **Predict** which ranks get it in the cell below.


# %%
def export(folder):
    model = shard(build(gpt, seed=7).to(device()))
    state = {"model": states.get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder / "plain")
    states.set_model_state_dict(model, state["model"])
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = states.get_model_state_dict(model, options=options)  # on all ranks: it communicates
    if dist.get_rank() == 0:
        torch.save(whole, folder / "model.pt")
    return len(whole)


print("tensors by rank:", on_ranks(export, folder))
plain = build(gpt, seed=7)
plain.load_state_dict(torch.load(folder / "model.pt"))
assert all(torch.equal(value, saved[name]) for name, value in plain.state_dict().items())
print("an ordinary model loads the file: weights equal to the last bit")

# %% [markdown]
# Only rank 0 gets it, a tensor at a time, in the memory of its host; `cpu_offload=True` does that, and without it every
# rank would get the whole model, on its GPU. The host must hold the whole model. If it cannot,
# `torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, file)` converts on any machine that can,
# without ranks and without the model's code.

# %% [markdown]
# ### A rank dies while saving
#
# The longer a run, the surer it happens (lesson 00: every three hours on 16,384 GPUs). `Doomed` writes as usual, but
# on the last rank, which waits a moment and is then killed, as by a node's failure.


# %%
class Doomed(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(1)  # the others write their files meanwhile
            signal.raise_signal(signal.SIGKILL)
        return super().write_data(plan, planner)


def safe_save(state, folder, step, writer=dcp.FileSystemWriter):
    """Save into a folder of its own, which gets its name when all ranks have finished."""
    unfinished = folder / f"step-{step}.unfinished"
    dcp.save(state, storage_writer=writer(unfinished))  # rank 0 returns when all have written
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"step-{step}")  # all or nothing, but not in object stores
    dist.barrier()


def latest(folder):
    finished = [path for path in folder.glob("step-*") if path.suffix != ".unfinished"]
    return max(finished, key=lambda path: int(path.name.split("-")[1]))


# %% [markdown]
# The run goes from the checkpoint of step 2 to step 3 and saves there, once safely into a new folder and once over
# the old one. **Predict** (question 10) what can be loaded in each case.


# %%
def one_more_step(folder, safe):
    model = shard(build(gpt, seed=7).to(device()))
    optimizer = adam(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=latest(folder))
    states.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    train(model, optimizer, range(2, 3))
    if safe:
        safe_save(state_of(model, optimizer), folder, 3, Doomed)
    else:
        warnings.simplefilter("ignore")  # "Detected an existing checkpoint ..., overwriting"
        dcp.save(state_of(model, optimizer), storage_writer=Doomed(latest(folder)))


for way in ("safe", "unsafe"):
    shutil.copytree(folder / "plain", folder / way / "step-2")

# %% tags=["nbval-ignore-output"]
with expect_error(WorkerError):
    on_ranks(one_more_step, folder / "safe", True)

# %%
names = sorted(path.name for path in (folder / "safe").iterdir())
has_metadata = (folder / "safe" / "step-3.unfinished" / ".metadata").exists()
print(f"{', '.join(names)}; metadata in the unfinished one: {has_metadata}")
_, loaded = on_ranks(load, latest(folder / "safe"), steps=())[0]
assert equal(loaded, saved)
print(f"latest is {latest(folder / 'safe').name}: states equal to the last bit")

# %% [markdown]
# Nothing is lost but the work since step 2. The unfinished folder has no `.metadata`: rank 0 writes that last, when
# all ranks have reported. Even without our renaming it would not load.
#
# And over the old one?

# %% tags=["nbval-ignore-output"]
with expect_error(WorkerError):
    on_ranks(one_more_step, folder / "unsafe", False)

# %%
_, loaded = on_ranks(load, latest(folder / "unsafe"), steps=())[0]
whole, mixed = saved["embedding.weight"], loaded["embedding.weight"]
old = (whole == mixed).all(dim=1)
print("it loads without an error")
print(
    "rows of the embedding that are of step 2:",
    *(int(part.sum()) for part in old.chunk(world_size)),
)
assert not equal(loaded, saved) and old.any() and not old.all()

# %% [markdown]
# It loads, and it is wrong: the dead rank's rows are those of step 2, the others' those of step 3. The old metadata
# fits the new files, because sizes and places are the same. That is worse than an error. `dcp.save` warns of an
# existing checkpoint (the cell has silenced it); with `FileSystemWriter(folder, overwrite=False)` it refuses.
#
# So: a new folder each time, a name that appears when it is complete, and the last two or three kept until the new one
# has been read once. (Renaming a folder is all or nothing on POSIX file systems, but not in object stores.)

# %% [markdown]
# ## 12. FSDP1 and other old names
#
# Scripts and papers of 2021 to 2024 use `FullyShardedDataParallel`, FSDP1, which is deprecated. It wraps the model in
# another module and packs each unit into one flat parameter.


# %%
def first_version():
    wrap = dist.fsdp.wrap.ModuleWrapPolicy({type(build(gpt).blocks[0])})
    model = dist.fsdp.FullyShardedDataParallel(
        build(gpt).to(device()), auto_wrap_policy=wrap, device_id=device()
    )
    names = [
        (name.replace("_fsdp_wrapped_module.", ""), tuple(p.shape))
        for name, p in model.named_parameters()
    ]
    with record() as ledger:
        loss_of(model, *my_part(0)).backward()
    model.zero_grad()
    return names[:2], ledger, train(model, adam(model))


names, ledger, losses = on_ranks(first_version)[0]
print(f"FSDP1: {prove(losses)}; {volume(ledger)}")
print(*names)

# %% [markdown]
# The same losses and the same messages. What was wrong with it: a flat parameter needs one dtype for all its weights,
# and frozen ones beside trained ones are a special case; a rank's piece can begin in the middle of a row; and its state
# dicts need a context manager to be useful.
#
# | FSDP1, and older | today |
# |---|---|
# | `FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))` | `fully_shard(block)` each, then `fully_shard(model)` |
# | `FlatParameter` | a `DTensor` for each parameter |
# | `sharding_strategy=FULL_SHARD`, `SHARD_GRAD_OP` | `reshard_after_forward=True`, `False` |
# | `HYBRID_SHARD`, `process_group=(a, b)` | a 2-D `mesh` |
# | `MixedPrecision(param_dtype, reduce_dtype)` | `MixedPrecisionPolicy(...)`; buffers are left alone |
# | `CPUOffload(offload_params=True)` | `CPUOffloadPolicy()` |
# | `model.no_sync()` | `model.set_requires_gradient_sync(False)` |
# | `model.clip_grad_norm_(1.0)` | `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` |
# | `param_init_fn`, `sync_module_states=True` | meta device, `to_empty`, `set_model_state_dict` (section 10) |
# | `backward_prefetch=BACKWARD_PRE` | always; more with `set_modules_to_backward_prefetch` |
# | `forward_prefetch=True` | `set_modules_to_forward_prefetch` |
# | `limit_all_gathers=True` | not needed: memory is freed in the order of the streams |
# | `use_orig_params=True` | always |
# | `FSDP.state_dict_type(...)`, `FSDP.optim_state_dict(...)` | `get_state_dict(model, optimizer)` |
# | `ShardedTensor` | `DTensor` |
# | `torch.distributed._composable.fsdp` | `torch.distributed.fsdp` |
# | fairscale's `FullyShardedDataParallel` | the same idea before FSDP1 |

# %% [markdown]
# ## 13. Mistakes, and what they say
#
# **The optimizer was built before `fully_shard`.** It holds the old parameters. **Predict** the losses.


# %%
def optimizer_first():
    model = build(gpt).to(device())
    optimizer = adam(model)
    return train(shard(model), optimizer, range(3))


losses = on_ranks(optimizer_first)[0]
values = ", ".join(f"{loss:.2f}" for loss in losses)
print(f"losses: {values} (expected: {reference[-1]:.2f} at the end)")
assert abs(losses[-1] - losses[0]) < 0.1 and losses[-1] > reference[-1] + 0.5

# %% [markdown]
# No message: it steps parameters that no model uses. Hence the comment in `first_run`, section 1.
#
# **The root is not wrapped.** Blocks are, and it trains.


# %%
def no_root():
    model = build(gpt).to(device())
    for block in model.blocks:
        fully_shard(block)
    train(model, adam(model))
    weight = model.embedding.weight.detach().clone()
    largest, smallest = weight.clone(), weight.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return (largest - smallest).max().item(), ledger_of(model).count("all_gather")


spread, gathers = on_ranks(no_root)[0]
print(f"embeddings differ between ranks by up to {spread:.2f}; {gathers} all-gathers a step")
assert spread > 0.01 and gathers == 4

# %% [markdown]
# No message either. Embeddings and the last norm are ordinary parameters: nobody averages their gradients, so each
# rank trains its own. And every block takes itself for a root, so it is not freed after forward: four all-gathers
# instead of eight.
#
# **The forward pass is bypassed.** Hooks gather the weights, and hooks run when a module is *called*. **Predict**
# which of these three work: `model.loss(x, y)`, a method that calls `self(...)`; `model.forward(x)`; a layer of the
# root called from outside, `model.head(x)`.


# %%
def bypass(how):
    model = shard(build(gpt).to(device()))
    x, y = my_part(0)
    if how == "loss":
        return model.loss(x, y).item() < 9
    return model.forward(x) if how == "forward" else model.head(torch.ones(1, 64, device=device()))


print("model.loss works:", on_ranks(bypass, "loss")[0])
for how in ("forward", "head"):
    try:
        on_ranks(bypass, how)
    except WorkerError as error:
        print(f"{how}: {error.exception}")

# %% [markdown]
# `model.loss` calls the model, so it works; under DDP and FSDP1, which *wrap* the model, `loss` is a method of the
# inner one, and would go past the wrapper. The other two meet weights that are still pieces, and *mixed torch.Tensor
# and DTensor* is the message to remember: somebody uses a parameter outside its unit's forward. A method that stands
# beside forward, such as `generate`, is made known with
# `torch.distributed.fsdp.register_fsdp_forward_method(model, "generate")`.
#
# **`torch.save` of a sharded model.** It works, on every rank:


# %%
def saved_by_hand(folder):
    model = shard(build(gpt).to(device()))
    torch.save(model.state_dict(), folder / f"rank-{dist.get_rank()}.pt")
    pieces = torch.load(folder / f"rank-{dist.get_rank()}.pt")
    weight = pieces["embedding.weight"]
    try:
        build(gpt).load_state_dict(pieces)
    except RuntimeError as error:
        return tuple(weight.shape), tuple(weight.to_local().shape), str(error).splitlines()[1]


says, has, message = on_ranks(saved_by_hand, folder)[0]
print(f"says {says}, has {has}; an ordinary model answers:")
print("...", message[message.index("mixed") : message.index("!")])

# %% [markdown]
# Each file claims the whole shape and has an N-th of the numbers. If rank 0 alone saved, the rest is lost.
#
# **Only rank 0 asks for the full state dict.** It is a collective like any other:


# %%
def rank_0_only():
    model = shard(build(gpt).to(device()))
    if dist.get_rank() == 0:
        options = states.StateDictOptions(full_state_dict=True)
        states.get_model_state_dict(model, options=options)


with expect_error(HangError):
    on_ranks(rank_0_only, timeout=2)

# %% [markdown]
# All ranks ask, one saves. The same holds for `full_tensor()`, for the norm of section 9, and for printing a
# parameter's mean.
#
# **One rank has a batch less in every epoch.** Each gradient here is the input: 1 in the first epoch, 10 in the second.
# **Predict** in which batch it hangs.


# %% tags=["nbval-ignore-output"]
def two_epochs():
    last = dist.get_rank() == dist.get_world_size() - 1
    layer = fully_shard(torch.nn.Linear(1, dist.get_world_size(), bias=False).to(device()))
    for epoch, size in enumerate((1.0, 10.0)):
        for i in range(2 if last else 3):
            layer.zero_grad()
            layer(torch.full((1, 1), size, device=device())).sum().backward()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}, batch {i}: {layer.weight.grad.to_local().item()}")


with expect_error(HangError):
    on_ranks(two_epochs, timeout=2)

# %% [markdown]
# In batch 1 of epoch 1, and only because the last rank has no batches left and has returned. Before that it was a batch
# ahead: its first batch of epoch 1 was averaged with the others' last of epoch 0, (1 + 1 + 1 + 10)/4 = 3.25 on four
# ranks. There is no error, since the operations and sizes are the same. (Seen here on gloo; NCCL pairs operations by
# their order in the group, too. DDP behaves alike.) Count the batches before the loop, and take the smallest number of
# all ranks.

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
temporary.cleanup()
print(f"{world_size} ranks: {usual.count('all_gather')} all-gathers and", end=" ")
print(f"{usual.count('reduce_scatter')} reduce-scatters a step, {usual.bytes() / gathered:.2f} Ψ")
print(f"whole weights held at most: {most / gathered:.0%} of the model")
share = peaks["every block"].total / peaks["DDP"].total
print(f"peak of 4 blocks of 128: FSDP by blocks {share:.2f} of DDP's,", end=" ")
print(f"root only {peaks['root only'].total / peaks['DDP'].total:.2f}")
between = [sent[name][1] / psi_bytes for name in ("FSDP", "HSDP")]
print("between two nodes: FSDP {:.2f} Ψ, HSDP {:.2f} Ψ".format(*between))

# %% [markdown]
# - `fully_shard` stores every parameter by rows over the ranks, and gathers a unit when it computes.
# - Forward: all-gather, compute, free. Backward: all-gather, compute, free, reduce-scatter. 3Ψ in all.
# - Units are a trade of memory against messages; a block is the usual one. The root has to be wrapped too.
# - `reshard_after_forward`: False for 2Ψ and more memory, an integer to stay inside the node.
# - HSDP sends 2Ψ between two nodes where FSDP sends more, nearly 6Ψ on many ranks. It holds more. Mind which mesh
#   dimension is which.
# - Shards are the fp32 master weights of mixed precision. Switches save the traffic of accumulation, for memory.
# - Norms and full state dicts are collectives. Let the library clip.
# - `dcp` saves on some number of ranks and loads on any other, equal to the last bit. A new folder each time, named
#   when complete.
#
# <details><summary>Answers to the ten predictions</summary>
#
# 1. 2, 2, 1 and 0: chunks of ⌈5/4⌉ (section 1).
# 2. 9 and 5: blocks are gathered twice, the root once (section 2).
# 3. Two in backward: one computes, one is fetched ahead. In forward one, but twice, so as many bytes; on a GPU also the
#    next one's. The root's come on top (section 2).
# 4. The states between steps are divided. Lost: the peak holds the whole model, and nothing overlaps (section 3).
# 5. FSDP: 4.4Ψ on 4 ranks and nearly 6Ψ on many, against 2Ψ (section 5).
# 6. float32 (section 7).
# 7. 1.3 times only: the reduce-scatters are 4 times fewer, the all-gathers as many. With weights kept as well, 5.9
#    times fewer (section 8).
# 8. Too little: each norm is too small by about √N, and they differ (section 9).
# 9. Yes. The losses follow to the last bit on as many ranks, and to rounding on others (section 11).
# 10. It loads without an error, and mixes two steps (section 11).
# </details>
#
# **Exercises:** [exercises/07_fsdp](../exercises/07_fsdp_exercises.ipynb). **Next:**
# [09 tensor parallel](09_tensor_parallel.ipynb), which splits single layers over ranks.
#
# **Worth reading**
# - Y. Zhao et al., *PyTorch FSDP: experiences on scaling fully sharded data parallel*, 2023, [arXiv
#   2304.11277](https://arxiv.org/abs/2304.11277): FSDP1, its flat parameters, and why prefetch needs a limit.
# - W. Liang et al., *TorchTitan*, 2024, [arXiv 2410.06511](https://arxiv.org/abs/2410.06511): FSDP2 in a whole
#   training system, with tensor and pipeline parallelism beside it.
# - S. Rajbhandari et al., *ZeRO: memory optimizations toward training trillion parameter models*, 2020, [arXiv
#   1910.02054](https://arxiv.org/abs/1910.02054): the stages, and the 3Ψ.
