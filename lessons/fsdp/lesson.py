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
# FSDP2 is PyTorch's own ZeRO-3. To the `Zero3` that you built in lesson 06 it adds four things: every parameter keeps
# its name and its shape, messages travel while blocks compute, a policy sets the precision of weights and gradients,
# and checkpoints are written and read in shards. Two lines are enough: `fully_shard(block)` for each block, and
# `fully_shard(model)`. The loop stays as it was, and so do the losses.
#
# Llama 3.1 8B, sharded in this way, takes 5,762 tokens a second on each of 8 H100s, and 5,605 on each of 128, with 16
# times the batch (*recorded*, [torchtitan](https://github.com/pytorch/torchtitan): bf16, some activations recomputed,
# cards of 96 GB and 500 W). Every weight travels to every rank in every step, and yet 128 GPUs wait hardly more than 8.
# This lesson shows why.
#
# **You will be able to**
# - *say* for every moment of a step what a rank holds of each layer;
# - *choose* what to wrap, and *count* what it costs in memory and bytes;
# - *see* whether messages overlap with computation, and *make* them overlap;
# - *save* a sharded checkpoint that survives a rank's death, and *load* it on any number of ranks.
#
# **Before this:** [04 ddp](04_ddp.ipynb), [06 zero](06_zero.ipynb). **Time:** about 45 minutes to read the core, 100
# with the deeper sections, under two to run.

# %% [markdown]
# Parameters and imports:

# %% tags=["parameters"]
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

world_size = 4  # ranks, 2 or more
whole_batch = 24  # windows of text in a step, of all ranks together: a multiple of the ranks

# %%
from course_utils import WorkerError, attempt, device, expect_error, launch, memory, record
from course_utils.data import Windows
from course_utils.models import GPT, Block, TransformerConfig, build_gpt, loss_of
from course_utils.predictions import predict, predictions
from course_utils.programs import SCRIPTS, TEXT, excerpt, folded, read_log, torchrun
from lessons.fsdp import figures, sharded
from lessons.fsdp.sharded import EmulatedGPU, KilledWriter, OnEmulatedGPU, padded_bytes, same_losses
from lessons.fsdp.watching import watch

# %% [markdown]
# ## 1. Sharded: what a rank keeps
#
# The model is the small GPT of the lessons before, with four blocks. Each of the N ranks takes an equal part of a
# step's windows of text, so a step trains on the same text for every N. Ψ is the number of parameters.

# %% jupyter={"source_hidden": true}
folded("The model", Block, GPT)

# %%
windows, gpt = Windows("train"), TransformerConfig(layers=4)
backend = launch(dist.get_backend, world_size=max(4, world_size))[0]  # one for the whole lesson
on_ranks = partial(launch, world_size=world_size, backend=backend)
psi = gpt.parameter_count


def my_part(step, size=whole_batch):
    """This rank's windows of a step, and the same text one character later: both (windows, 64)."""
    each = size // dist.get_world_size()
    first = step * size + dist.get_rank() * each
    return windows.batch(range(first, first + each), device())


# %% [markdown]
# The loop is the same for every model of this lesson, sharded or not, and returns the mean loss over all ranks. One
# rank with the plain model gives the losses that everything else is compared with.


# %%
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


def alone():
    model = build_gpt(gpt).to(device())
    return train(model, adam(model), range(3))


reference = on_ranks(alone, world_size=1)[0]
print("one process:", ", ".join(f"{loss:.3f}" for loss in reference))

# %% [markdown]
# Now the two lines. `fully_shard` changes a module *in place*: its parameters become **shards**, one piece for each
# rank, and hooks are put around its forward and backward. Each call makes one **unit**, of all parameters that no
# earlier call has taken. So the blocks come first, and what remains, the embeddings and the last norm, is the unit of
# the **root**, the whole model. The optimizer comes last, because it has to hold the shards.


# %%
def shard(model, root=None, **options):
    """Make a unit of each block, and one of the rest; `root` are its options if they differ."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **(root or options))


def first_run():
    model = shard(build_gpt(gpt).to(device()))
    optimizer = adam(model)
    return train(model, optimizer, range(3))


print(same_losses(on_ranks(first_run)[0], reference))

# %% [markdown]
# The losses are the same, because FSDP changes how a model is stored, not how it is trained. A parameter is now a
# **DTensor**, which knows its whole shape, the **mesh** of ranks that it is spread over (a grid, here a single row),
# and its **placement** there. `Shard(0)`, printed as `S(0)`, means that it is cut along dimension 0, by rows. Below it
# lies an ordinary tensor with this rank's rows.
#
# **Predict** the shape of the piece on each rank, for a weight of 192 rows and 64 columns, and for one of only 5 rows
# and 4 columns. Commit to the last rank's rows of the second.

# %%
last_rows = predict("of 5 rows, the last rank has", unit="rows")


# %%
def pieces():
    model = shard(build_gpt(gpt).to(device()))
    layer = fully_shard(torch.nn.Linear(4, 5, bias=False).to(device()))
    weights = (model.blocks[0].attention.qkv.weight, layer.weight)
    return [(tuple(w.shape), w.placements[0], tuple(w.to_local().shape)) for w in weights]


by_rank = on_ranks(pieces)
for i in range(2):
    whole, placement, _ = by_rank[0][i]
    local = [rank[i][2] for rank in by_rank]
    print(f"whole {whole}, {placement}: pieces", *local)

# %% jupyter={"source_hidden": true}
for i, rows in ((0, 192), (1, 5)):
    assert sum(rank[i][2][0] for rank in by_rank) == rows
last_rows.compare(by_rank[-1][1][2][0])

# %% [markdown]
# **Compare.** Each rank in turn takes ⌈rows/N⌉ rows until none are left: 2, 2, 1 and 0 of five.
#
# The optimizer's states have the shapes of its parameters, so they are sharded too. Between two steps a rank therefore
# keeps an N-th of everything, which is ZeRO-3. But a layer cannot compute with a quarter of its weight, so there must
# be moments when a rank holds more.

# %% [markdown]
# ## 2. Gathered, computed, freed: one step
#
# FSDP gathers a unit's weights just before the unit computes, and frees them right after:
#
# ```text
# forward    all-gather the weights  →  compute  →  free the whole weights
# backward   all-gather again        →  compute  →  free, and reduce-scatter the gradients
# ```
#
# The reduce-scatter leaves each rank with the mean gradient of its own rows, the only ones that its optimizer updates.
# In space, the weights of the model look like this at the beginning of a step:

# %%
units = ["root", "block 0", "block 1", "block 2", "block 3"]
moments = {"between steps": [], "forward, block 0 computes": ["root", "block 0"]}
moments["forward, block 1 computes"] = ["root", "block 1"]
figures.who_holds_what(moments, units, ranks=4, title="modelled: the weights on four ranks")

# %% [markdown]
# *The figure (modelled): between steps each rank stores its own quarter of every unit, drawn full. While block 0
# computes, each rank also has the other quarters of the root and of block 0, drawn pale. While block 1 computes, those
# of block 0 are gone.*
#
# Now a whole step. `watch` notes when messages start, when layers compute, and how many bytes of gathered weights a
# rank holds.
#
# **Predict**: with four wrapped blocks and a wrapped root, how many all-gathers and reduce-scatters does a step have?
# And how many blocks' gathered weights are there at once, at most?

# %%
count = predict("all-gathers in a step")


# %%
def watched(model):
    """On a rank: lanes of a step, and bytes of gathered weights after each event."""
    return watch(model, lambda step: loss_of(model, *my_part(step)).backward())


def watch_blocks(**options):
    return watched(shard(build_gpt(gpt).to(device()), **options))


lanes, line = on_ranks(watch_blocks)[0]

# %%
gathered = padded_bytes(build_gpt(gpt), world_size)  # bytes of all weights as they are gathered
order = [unit for unit, *_ in lanes["all-gather"]]
block = padded_bytes(build_gpt(gpt).blocks[0], world_size)
root = gathered - 4 * block
most = max(size for _, size in line)
print("all-gathers:    ", " -> ".join(order))
print("reduce-scatters:", " -> ".join(unit for unit, *_ in lanes["reduce-scatter"]))
print(f"most: {most:,} bytes; the root has {root:,}, a block {block:,}, the model {gathered:,}")
figures.shard_timeline(lanes, line, "measured: one step of rank 0, in order of events", order=True)

# %% jupyter={"source_hidden": true}
assert order == ["root", *(f"block {i}" for i in (0, 1, 2, 3, 3, 2, 1, 0))]
assert len(lanes["reduce-scatter"]) == 5 and 0.97 * (2 * block + root) < most <= 2 * block + root
count.compare(len(order))

# %% [markdown]
# **Compare.** Nine all-gathers and five reduce-scatters: backward begins with the root, so FSDP does not free it after
# forward, and gathers it only once. At the peak a rank holds the root and two blocks' worth of bytes. In backward these
# are two *different* blocks, because FSDP fetches the next one before the present one computes; in forward they are one
# block, stored twice.
#
# *The figure (measured): 27 events in four lanes. The root computes first, with the embeddings, and last, with the norm
# and the head. In forward a block computes before the next is gathered; in backward the next is gathered first. The
# curve of gathered bytes stays at the root and two blocks through most of forward, and comes back there in backward.*
#
# In forward an all-gather brings a flat message, and a block's weights are copied out of it. FSDP frees the message
# only when it copies out the next block, so the curve does not dip between blocks. On a GPU the next message may be
# there already (from FSDP's source, not measured). The last block is freed after forward and gathered again at once,
# which section 8 avoids.

# %% [markdown]
# ### What is held, and when
#
# All that a rank holds except activations, with Adam, for example while block 2 computes. *Gather 1* is the flat
# message that the all-gather of block 1 brings, *reduce 3* the one that block 3's reduce-scatter sends.
#
# | when | shards | gathered weights | whole gradients | flat messages, temporaries |
# |---|---|---|---|---|
# | between steps | parameters and moments, Ψ/N each | | | |
# | forward of block 2 | the same | root, block 2 | | gather 2 (on a GPU also gather 3) |
# | backward of block 2 | also gradients so far | root, block 2 | block 2's, root's | gather 1, reduce 3 |
# | optimizer's step | also all gradients | | | on a GPU temporaries of default Adam: 4 bytes a local parameter |
# | *dtype in bf16 training* | *float32* | *bf16* | *bf16* | *bf16 gathered, float32 reduced* |
#
# > **Misconception.** "FSDP divides the memory by N." Only the column of shards shrinks with N. Gathered weights,
# > whole gradients, messages and activations are as large on a thousand ranks as on two, if each rank keeps its batch.
#
# ### How many bytes?
#
# Two all-gathers and a reduce-scatter of the whole model make 3Ψ numbers (lesson 06). DDP's all-reduce counts as 2Ψ.
# The ledger notes whole messages; of each a rank sends (N−1)/N.


# %%
def step_ledger(**options):
    """On a rank: the ledger of one step, after one of warm-up."""
    return ledger_of(shard(build_gpt(gpt).to(device()), **options))


def ledger_of(model):
    for step in range(2):
        with record() as ledger:
            loss_of(model, *my_part(step)).backward()
    return ledger


usual = on_ranks(step_ledger)[0]
print(f"{usual.bytes() / gathered:.2f} Ψ in {len(usual)} messages; root {root / gathered:.2f} Ψ")
assert usual.bytes() == 3 * gathered - root

# %% [markdown]
# It is 3Ψ, less the root's second gathering: about 1.5 times as much as DDP. Section 4 asks whether a rank has to wait
# for it.

# %% [markdown]
# ## 3. What to wrap
#
# A unit is gathered whole and in one message, so large units mean few messages but much memory, and small units the
# opposite. We take a wider GPT and follow every tensor through a step with `memory.track`.
#
# **Predict**: only the root is wrapped, `fully_shard(model)` and nothing else. What is still divided by N? And how much
# does a rank hold at its peak, in percent of its peak under DDP?

# %%
root_peak = predict("peak with the root only, of DDP's", unit="%")

# %%
wide = TransformerConfig(layers=4, hidden=128)


def root_only(model):
    return fully_shard(model)


def every_linear(model):
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # outputs that are views
    for layer in [m for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)]:
        fully_shard(layer)
    return fully_shard(model)


def measure(wrap):
    """On a rank: ledger of the second step, and the memory at its peak."""
    model = wrap(build_gpt(wide).to(device()))
    optimizer = adam(model)
    for step in range(2):  # the first makes the optimizer's states
        with record() as ledger, memory.track(model, optimizer) as tracker:
            loss_of(model, *my_part(step, size=world_size)).backward()
            optimizer.step()
        optimizer.zero_grad()
    return ledger, tracker.peak


# %%
wraps = {"DDP": DDP, "root only": root_only, "every block": shard, "every linear": every_linear}
measured = {name: on_ranks(measure, wrap)[0] for name, wrap in wraps.items()}
peaks = {name: peak for name, (_, peak) in measured.items()}
messages = {name: len(ledger) for name, (ledger, _) in measured.items()}
print("messages in a step:", messages)
figures.memory_bars(peaks, "measured: one rank at its peak, one window of text")

# %% jupyter={"source_hidden": true}
assert [*messages.values()][1:] == [2, 4 * 3 + 2, 4 * 4 * 3 + 2]
assert peaks["every linear"].total < peaks["every block"].total < peaks["root only"].total
root_peak.compare(round(100 * peaks["root only"].total / peaks["DDP"].total))

# %% [markdown]
# **Compare.** With the root only, the model states are divided by N between steps. But the whole model is gathered
# before the first layer computes and stays until backward is over, so at its peak a rank also holds all weights and all
# gradients, whole; the figure counts both as buffers.
#
# *The figure (measured): a bar for each wrapping, by part. DDP's states are whole, the others' divided. Among these,
# buffers are largest with the root only, smaller by block, and smallest by linear layer. Each bar is at its own peak:
# DDP's comes late in backward, when most activations are gone.*
#
# With the root only there is also nothing to fetch ahead. Wrapping every linear layer saves some more memory than
# blocks do, but takes more than three times as many messages, each with its latency. So a block is the usual choice. A
# tied weight, here of embedding and head, belongs in a unit that contains both users: the root.
#
# Two more wrappers go around the same blocks, activation checkpointing (lesson 05) and `torch.compile`. From the inside
# out the order is checkpointing, `compile`, `fully_shard`, as in the program of section 6. Then FSDP's hooks stand
# outside the compiled graph, and a block is computed again while its weights are there, so no message is added.

# %% [markdown]
# ## 4. Overlap: who waits for the messages?
#
# FSDP is fast although it sends more than DDP, because most messages travel while something else computes. A GPU has
# several queues of work, **streams**, which run side by side; FSDP gives its messages streams of their own. The CPU
# only *issues* work: it puts a message, or a **kernel** (a function that the GPU runs), into a queue and goes on
# without waiting. So it runs ahead of the GPU.
#
# A message can be hidden behind a block if the CPU issues it before the GPU has *finished* that block. In backward
# FSDP issues the next unit's all-gather before the present unit's work, because it has seen the order of the units. In
# forward it does not know what comes next, so it issues an all-gather when the CPU comes to that unit.
#
# Our ranks share two cores, so overlapping cannot save time here. We therefore emulate a GPU's two queues, computing
# and messages. FSDP2 really runs, and the order of its calls is its own; the times are *modelled*. A block computes for
# 25 ms in forward and 50 in backward, a message travels for 20, and issuing a block takes 1.
#
# **Predict**: of the nine all-gathers, how many travel while a block computes?

# %%
ahead = predict("hidden all-gathers, the CPU runs ahead")


# %%
def on_gpu(waits=False, hint=False):
    gpu = EmulatedGPU(waits)
    model = shard(OnEmulatedGPU(gpu))
    if hint:
        for block, following in zip(model.blocks[:-1], model.blocks[1:], strict=True):
            block.set_modules_to_forward_prefetch([following])
    return sharded.emulated_step(model, gpu)


def emulate(**how):
    return launch(on_gpu, world_size=2, backend="gloo", **how)[0]


steps = {"runs ahead": emulate()}
figures.shard_timeline(steps["runs ahead"]["lanes"], [], "modelled: a step, the CPU runs ahead")

# %% jupyter={"source_hidden": true}
assert steps["runs ahead"]["hidden"] == 7
ahead.compare(steps["runs ahead"]["hidden"])

# %% [markdown]
# **Compare.** Seven. The GPU waits only for the first two, of the root and of block 0, because nothing computes yet.
# Even the second all-gather of block 3 travels while block 3 still computes in forward.
#
# *The figure (modelled): computing above, all-gathers below, over 340 ms. From block 0 on, blocks compute without a
# gap. Reduce-scatters are not drawn.*
#
# Nobody has to ask for it: this is *implicit* prefetching, and it is always on ([FSDP
# notes](https://docs.pytorch.org/docs/stable/notes/fsdp.html)). But it needs a CPU that is ahead. `loss.item()`, or a
# branch on a tensor's value, makes the CPU wait until the GPU has computed it.
#
# **Predict**: the forward of each block ends with such a call. How many all-gathers are hidden now?

# %%
waiting = predict("hidden all-gathers, the CPU waits in forward")

# %%
steps["waits"] = emulate(waits=True)
figures.shard_timeline(steps["waits"]["lanes"], [], "modelled: a step, the CPU waits in forward")

# %% jupyter={"source_hidden": true}
assert steps["waits"]["hidden"] == 3
waiting.compare(steps["waits"]["hidden"])

# %% [markdown]
# **Compare.** Three, of blocks 2, 1 and 0 in backward. In forward the CPU issues a block's all-gather only when the
# block before has finished.
#
# *The figure (modelled): in forward blocks and messages take turns, and the step takes 420 ms in place of 340.*
#
# The remedy is to remove what waits. Where that is impossible, or blocks are so small that the CPU is always late, a
# hint says which block comes next. Its all-gather is then issued before the present block's work, for the memory of one
# more unit.

# %%
steps["waits, with the hint"] = emulate(waits=True, hint=True)
for name, step in steps.items():
    print(f"{name:21}{step['hidden']} hidden, {1e3 * step['seconds']:.0f} ms a step (modelled)")
assert steps["waits, with the hint"]["hidden"] == 6

# %% [markdown]
# A hidden message is not free: it takes processors and memory bandwidth of the GPU, and computing beside it is slower,
# by 19 % on average (*recorded*, [Lee et al. 2025](https://arxiv.org/abs/2507.03114)).
#
# ### How long does a block have to compute?
#
# Longer than the next one's weights travel. Let a block have P parameters, and a rank T tokens. In forward it computes
# 2·P·T floating-point operations, and 2·P bytes arrive in bf16. In both, P is a factor, so the model's size cancels:
#
# > **The all-gathers of forward can be hidden if each rank has more tokens than FLOP/s divided by bytes/s.**

# %%
speed = 400e12  # FLOP/s of an H100 in training (Llama 3, recorded)
for link, rate in (("network, 50 GB/s a GPU", 50e9), ("NVLink, 450 GB/s", 450e9)):
    print(f"{link}: more than {speed / rate:,.0f} tokens a rank (modelled)")

# %% [markdown]
# Backward computes twice as long, but gathers 2·P bytes and reduces 4·P in float32, so it needs 1.5 times as many
# tokens, 12,000 on this network. In the opening's runs a rank has two sequences of 8,192, which is enough on both
# links.

# %% [markdown]
# ## 5. Checkpoints
#
# No rank has the whole state, so no rank can save it alone. Three tools share the work; `dcp` is
# `torch.distributed.checkpoint`:
#
# - `get_state_dict` names parameters *and* optimizer states by the parameter's full name; the values are DTensors.
#   `set_state_dict` is the way back.
# - `dcp.save` lets every rank write its pieces into its own file. Rank 0 adds `.metadata`, which says where they lie.
# - `dcp.load` reads *into* the tensors that it is given: each rank looks up which pieces overlap with its own rows.
#
# None of this requires the same number of ranks. So we save on all ranks after two steps, and load on all, on two and
# on one, each time into a model of another seed: what is equal afterwards came from the files.


# %%
def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), states.get_state_dict(model, optimizer), strict=True))


def save(folder):
    model = shard(build_gpt(gpt).to(device()))
    optimizer = adam(model)
    train(model, optimizer)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    saved = sharded.whole_state(model, optimizer)  # on rank 0, to compare with
    return train(model, optimizer, range(2, 4)), saved


# %%
def resume(folder):
    """On a rank: a model of another seed and its optimizer, with the states of a checkpoint."""
    model = shard(build_gpt(gpt, seed=7).to(device()))
    optimizer = adam(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    weights, moments = state["model"], state["optimizer"]
    states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return model, optimizer


def load(folder, steps=range(2, 4)):
    model, optimizer = resume(folder)
    loaded = sharded.whole_state(model, optimizer)
    return train(model, optimizer, steps), loaded


# %%
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
losses_after, saved = on_ranks(save, folder / "step-2")[0]
print("files:", *sorted(path.name for path in (folder / "step-2").iterdir()))
for n in (world_size, 2, 1):
    losses, loaded = on_ranks(load, folder / "step-2", world_size=n)[0]
    off = max(abs(a - b) for a, b in zip(losses, losses_after, strict=True))
    assert sharded.equal_states(loaded, saved) and off < 1e-5
    print(f"world size {n}: states equal to the last bit, next losses to 1e-5")

# %% [markdown]
# On fewer ranks gradients are summed in another order, as in lesson 04, so the losses that follow differ in their last
# digits.
#
# ### A rank dies while saving
#
# On 16,384 GPUs something failed every three hours (lesson 00), so it will happen. The safe way saves into a new
# folder, which gets its name when all ranks have finished:


# %%
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
# The next run goes from step 2 to step 3 and saves. In `KilledWriter` the last rank is killed before it begins its own
# file, when the others have written theirs.


# %%
def one_more_step(folder, safe):
    model, optimizer = resume(latest(folder))
    train(model, optimizer, range(2, 3))
    if safe:
        safe_save(state_of(model, optimizer), folder, 3, KilledWriter)
    else:
        warnings.simplefilter("ignore")  # of an existing checkpoint
        dcp.save(state_of(model, optimizer), storage_writer=KilledWriter(latest(folder)))


# %% tags=["nbval-ignore-output"]
with expect_error(WorkerError):
    on_ranks(one_more_step, folder, True)

# %%
print("folders:", *sorted(path.name for path in folder.iterdir()))
_, loaded = on_ranks(load, latest(folder), steps=())[0]
assert sharded.equal_states(loaded, saved)
print(f"latest is {latest(folder).name}: states equal to the last bit")

# %% [markdown]
# Nothing is lost but the work since step 2. The other run saves into the folder that it has loaded from, `step-2`, and
# its last rank is killed in the same way.
#
# **Predict**: what does loading that folder give?

# %%
fate = predict("loading gives", ["step 3", "some of each step", "step 2", "an error"])

# %% tags=["nbval-ignore-output"]
with attempt():
    on_ranks(one_more_step, folder, False)

# %%
with attempt() as outcome:
    _, loaded = on_ranks(load, latest(folder), steps=())[0]
    old = (saved["embedding.weight"] == loaded["embedding.weight"]).all(dim=1)
    rows = [int(part.sum()) for part in old.chunk(world_size)]
    print("rows of the embedding that are those of step 2, by rank:", *rows)

# %% jupyter={"source_hidden": true}
assert outcome.error is None and not sharded.equal_states(loaded, saved)
assert old.any() and not old.all()
fate.compare("some of each step")

# %% [markdown]
# **Compare.** It loads, and it is wrong: the dead rank's rows are those of step 2, the others' those of step 3. The old
# metadata fits the new files, because sizes and places are the same.
#
# `dcp.save` does warn of an existing checkpoint (the cell has silenced it), and `FileSystemWriter(folder,
# overwrite=False)` refuses. So use a new folder each time, with a name that appears when it is complete, and keep the
# last two or three. Loading checks no checksum: if a disk changes some bytes of a weight, nothing notices.

# %% [markdown]
# ## 6. The complete program
#
# [scripts/train.py](../scripts/train.py) is what to take to work, one file of plain PyTorch: FSDP2, recomputed and
# compiled blocks, bf16 (section 10), accumulation, clipping, checkpoints that are published when complete, and a
# restart. The model gets its memory after it is sharded (section 13):

# %%
program = SCRIPTS / "train.py"
print(excerpt(program, "return checkpoint(self.run", "return checkpoint(self.run"), end="\n...\n")
print(excerpt(program, 'with torch.device("meta")', "model.to_empty"))

# %% [markdown]
# Lines with `args.tp` and `parallel` belong to lesson 09. `checkpoint` stands in the block's own `forward`, so it is
# innermost, in the order of section 3. Next, how the loop trains, clips and saves. `log.part` only measures;
# `set_requires_all_reduce` is for several copies of the model (sections 9 and 11). A loaded optimizer state brings the
# learning rates of the run that wrote it, so each step sets its own.

# %%
print(excerpt(program, "for micro, windows in", "optimizer.zero_grad()"), end="\n...\n")
print(excerpt(program, "if ends or step % args.save_every", "writing = background.submit"))

# %% [markdown]
# We start it as on a cluster, with `torchrun`, on two ranks for four steps, and then again on a single rank for two
# more.

# %%
flags = ["--layers=2", "--hidden=64", "--recompute", "--bf16", f"--batch={whole_batch}"]
flags += ["--save-every=2", "--log-every=1", f"--data={TEXT}", f"--out={folder / 'run'}"]
torchrun(program, *flags, "--steps=4", ranks=min(2, torch.cuda.device_count() or 2))
torchrun(program, *flags, "--steps=6", ranks=1)
log = read_log(folder / "run")
print("steps:", *(line["step"] for line in log))
print("checkpoints:", *sorted(path.name for path in (folder / "run").glob("step-*")))
assert [line["step"] for line in log] == [1, 2, 3, 4, 5, 6] and log[-1]["loss"] < log[0]["loss"]

# %% [markdown]
# The second run went on from the newest checkpoint. The last two are kept.

# %% [markdown] tags=["deeper"]
# ## 7. Padding · deeper
#
# Pieces of unequal size cannot be gathered into one message, so all are padded to the size of the first. How much
# padding travels depends on the rows and the ranks:

# %% tags=["deeper"]
for n in (world_size, 3, 5, 64):
    print(f"{n:2} ranks: {padded_bytes(build_gpt(gpt), n) / (4 * psi) - 1:5.1%} padding")

# %% [markdown] tags=["deeper"]
# Where N divides the rows, as 4 and 64 do here, there is none. Otherwise it costs little if weights have many more rows
# than there are ranks.
#
# Frozen parameters are gathered like others, but have no gradients to reduce. Parameters in `ignored_params` stay
# whole on every rank, and their gradients are not averaged.

# %% [markdown] tags=["deeper"]
# ## 8. `reshard_after_forward`, and the ZeRO stages · deeper
#
# After its forward a unit's weights can be
#
# - **freed** (`True`), and gathered again in backward: the default for all units but the root;
# - **kept** (`False`) until backward: the root's default;
# - **freed in part** (an integer k, here as in section 9 the number of ranks in a node): each rank keeps a k-th, and
#   backward gathers among the k ranks of its node.
#
# Here the root is treated like the blocks, and k is N/2.

# %% tags=["deeper"]
even = world_size if world_size >= 4 and world_size % 2 == 0 else 4
per_node = even // 2
all_weights = padded_bytes(build_gpt(gpt), even)


def gathers_among(ledger, ranks):
    """Ψ that a rank gathers in groups of so many ranks."""
    gathers = [e for e in ledger if e.op == "all_gather" and len(e.ranks) == ranks]
    return sum(e.bytes for e in gathers) / all_weights


def held_at_the_turn(lanes, line):
    """Ψ that are gathered when backward begins."""
    _, first, _ = lanes["backward"][0]
    return dict(line)[first] / all_weights


# %% tags=["deeper"]
found = {}
for choice in (True, False, per_node):
    ledger = on_ranks(step_ledger, reshard_after_forward=choice, world_size=even)[0]
    lanes, line = on_ranks(watch_blocks, reshard_after_forward=choice, world_size=even)[0]
    found[choice] = gathers_among(ledger, even), gathers_among(ledger, per_node)
    told = "gathered {:.2f} Ψ among all and {:.2f} Ψ among k ranks".format(*found[choice])
    print(f"{choice!s:6}{told}, held when backward begins {held_at_the_turn(lanes, line):.2f} Ψ")

assert [*found.values()] == [(2, 0), (1, 0), (1, 1)]

# %% [markdown] tags=["deeper"]
# `False` gathers each unit once, 1Ψ, and has the whole model when backward begins. The others gather 2Ψ, with k half of
# them inside the node.
#
# With an integer each rank also keeps a larger shard, Ψ/k, which no line counts (ZeRO++ calls it hpZ).
# Each unit may have its own choice. `False` for the last block saves the all-gather that section 2 found wasted, and
# the peak stays as it is.
#
# | ZeRO | what is divided | FSDP2 | FSDP1 `ShardingStrategy` | traffic of a rank, times (n−1)/n in a group of n |
# |---|---|---|---|---|
# | 0 | nothing | `DDP`, or `replicate` | `NO_SHARD` | 2Ψ |
# | 1 | optimizer states | none; `ZeroRedundancyOptimizer` with DDP | none | 2Ψ; with this tool 3Ψ (lesson 06) |
# | 2 | and gradients | `reshard_after_forward=False` | `SHARD_GRAD_OP` | 2Ψ |
# | 3 | and parameters | `reshard_after_forward=True` | `FULL_SHARD` | 3Ψ |
# | 3, second shard in the node | as 3, and Ψ/k more | `reshard_after_forward=k` | none | 3Ψ, of which Ψ inside |
# | 3 inside, 0 between | all, by one node's ranks | 2-D mesh (section 9) | `HYBRID_SHARD` | 3Ψ inside, 2Ψ/k between |
#
# Strictly, `False` still stores parameters as shards between steps, which ZeRO-2 does not.

# %% [markdown] tags=["deeper"]
# ## 9. Two nodes: HSDP · deeper
#
# Inside a node links are fast, between nodes they are slow (lesson 01). **HSDP**, hybrid sharding, therefore shards
# inside a node and keeps a copy of the model on each node, so that only gradients have to cross. FSDP2 takes this
# from the mesh: with two dimensions it replicates along the first and shards along the second. We emulate two nodes;
# the lower half of the ranks is node 0.

# %% tags=["deeper"]
even = world_size if world_size >= 4 and world_size % 2 == 0 else 4
per_node = even // 2
grid = torch.arange(even).view(2, per_node).tolist()
node = {rank: rank // per_node for rank in range(even)}
title = f"modelled: {even} ranks on two nodes"
figures.mesh_picture(grid, ("replicate", "shard"), title, nodes=node)

# %% [markdown] tags=["deeper"]
# *The figure: a row for each node. Along a row shards differ; down a column they are the same.*
#
# Let every collective run as a ring over its group. We count the bytes of *all ranks together* in three layouts: FSDP
# over all ranks, HSDP, and HSDP with the mesh turned round, its dimensions swapped by mistake. Weights are gathered in
# bf16, and gradients reduced in float32, as section 10 recommends.
#
# **Predict** which sends most between nodes, which least. How many bytes a parameter cross between nodes under HSDP?

# %% tags=["deeper"]
crossing = predict("between two nodes under HSDP", unit="bytes a parameter")


# %% tags=["deeper"]
bf16_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def hybrid(**options):
    mesh = init_device_mesh(device().type, (2, per_node), mesh_dim_names=("replicate", "shard"))
    return step_ledger(mesh=mesh, **options)


def turned(**options):
    grid = torch.arange(dist.get_world_size()).view(2, -1).T.contiguous()
    mesh = DeviceMesh(device().type, grid, mesh_dim_names=("replicate", "shard"))
    return step_ledger(mesh=mesh, **options)


# %% tags=["deeper"]
layouts = {"FSDP": step_ledger, "HSDP": hybrid, "HSDP, mesh turned round": turned}
sent = {}
for name, layout in layouts.items():
    ledgers = on_ranks(layout, mp_policy=bf16_policy, world_size=even)
    sent[name] = [size / psi for size in sharded.ring_traffic(ledgers, node)]
    inside, between = sent[name]
    print(f"{name:24} inside {inside:5.2f}, between nodes {between:5.2f} bytes a parameter")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert sent["HSDP"][1] < sent["FSDP"][1] < sent["HSDP, mesh turned round"][1]
assert sent["HSDP"][1] == 2 * padded_bytes(build_gpt(gpt), per_node) / psi
crossing.compare(sent["HSDP"][1])

# %% [markdown] tags=["deeper"]
# **Compare.** HSDP sends least, 8 bytes a parameter: a unit's gradients are reduce-scattered inside the node, and then
# each rank all-reduces its own shard with its partner on the other node in float32, which makes k pairs × 2 directions
# × 4Ψ/k bytes for k ranks on each node. The mesh that is turned round sends most, because it *shards* over the slow
# link, and nothing warns of that.
#
# A ring over all ranks has two links between the nodes, and each carries (2 + 2 + 4)Ψ(N−1)/N bytes (slightly less here,
# because the root is gathered once).
#
# How much does HSDP save on M nodes of 8 GPUs, and does the model fit? Each node sends 8Ψ(M − 1)/M bytes under HSDP,
# and 8Ψ(N−1)/N in FSDP's ring (12Ψ(N−1)/N with all in float32). The model states, 16 bytes a parameter, have to fit
# into one node.

# %% tags=["deeper"]
for nodes in (2, 8, 64):
    hsdp = 8 * (nodes - 1) / nodes
    of_bf16, of_float32 = (size * (8 * nodes - 1) / (8 * nodes) for size in (8, 12))
    less = f"{1 - hsdp / of_bf16:.0%} less (in float32 {1 - hsdp / of_float32:.0%})"
    print(f"{nodes:2} nodes: FSDP {of_bf16:.2f} bytes, HSDP {hsdp:.2f}: {less} (modelled)")
for name, parameters in {"8B": 8.03e9, "70B": 70.6e9}.items():
    print(f"{name:>3}: {16 * parameters / 8 / 1e9:.0f} GB of states on each of 8 GPUs (modelled)")

# %% [markdown] tags=["deeper"]
# So in bytes HSDP saves nearly half on two nodes, and almost nothing on 64. There it still gives short rings, of M
# ranks in place of N, so less latency; all-gathers that stay on NVLink, so fewer tokens hide them; and messages between
# nodes that only the optimizer waits for, and that accumulation makes rarer (section 11). 8 billion parameters fit on a
# node of 80 GB cards; 70 billion do not, and need FSDP over all ranks or tensor parallelism (lesson 12).
#
# > **Misconception.** "HSDP is FSDP with less memory." It takes more than FSDP, M times as much for states.
#
# > **What changes on real GPUs.** `init_device_mesh("cuda", (nodes, 8))` numbers ranks as torchrun does: those of a
# > node follow each other. NCCL uses several rings or trees at once, so the bytes on one link differ.

# %% [markdown] tags=["deeper"]
# ## 10. Mixed precision and offload · deeper
#
# `MixedPrecisionPolicy` belongs to a unit. `param_dtype` is what its weights are gathered and computed with,
# `reduce_dtype` what gradients are reduced in (by default the same), `output_dtype` what forward hands out. We
# compare float32, bf16, bf16 with gradients reduced in float32, and that with float32 output of the root.
#
# **Predict** for each the dtype of the loss. Commit to bf16 with gradients reduced in float32.

# %% tags=["deeper"]
loss_dtype = predict("the loss is in", ["bf16", "float32"])


# %% tags=["deeper"]
def precision(options, of_root):
    """On a rank: losses, the ledger of a step, the dtype of its loss, and those of what stays."""
    policy, root = MixedPrecisionPolicy(**options), MixedPrecisionPolicy(**options, **of_root)
    model = shard(build_gpt(gpt).to(device()), mp_policy=policy, root={"mp_policy": root})
    optimizer = adam(model)
    losses = train(model, optimizer)
    with record() as ledger:
        loss = loss_of(model, *my_part(9))
        loss.backward()
    kept = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    kept += [p.grad for p in model.parameters()]
    return losses, ledger, loss.dtype, {tensor.dtype for tensor in kept}


# %% tags=["deeper"]
half, single = torch.bfloat16, torch.float32
bf16, reduced = {"param_dtype": half}, {"param_dtype": half, "reduce_dtype": single}
policies = {
    "float32": ({}, {}),
    "bf16": (bf16, {}),
    "bf16, reduced in fp32": (reduced, {}),
    "... and output in fp32": (reduced, {"output_dtype": single}),
}
found, loss_in = {}, {}
for name, options in policies.items():
    losses, ledger, loss_in[name], found[name] = on_ranks(precision, *options)[0]
    sizes = [ledger.bytes(op) / gathered for op in ("all_gather", "reduce_scatter")]
    told = f"gathered {sizes[0]:.2f} Ψ, reduced {sizes[1]:.2f} Ψ (of 4 bytes)"
    print(f"{name:22} {told}, loss {loss_in[name]}, kept", *found[name])
    same_losses(losses, reference, tolerance=1e-4 if name == "float32" else 0.05)

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert all(kept == {single} for kept in found.values())
assert loss_in["bf16, reduced in fp32"] == half
loss_dtype.compare("bf16")

# %% [markdown] tags=["deeper"]
# **Compare.** In bf16 in the second and third row, because it comes from logits in bf16, the root's output; in float32
# in the others.
#
# Shards, their gradients and the optimizer's states stay float32 in all four. The shard *is* the master weight of
# lesson 05, so no second copy is needed. What is gathered is a copy in bf16, so the all-gathers have half the bytes. So
# have the reduce-scatters, unless `reduce_dtype` says otherwise. A sum of N gradients in bf16 loses more digits the
# larger N is, so float32 is the safe choice there, for 2 bytes a number more.
#
# A loss in bf16 has three digits at most. In the fourth row the *root's* policy hands out logits in float32. The same
# option for the blocks would be a mistake: the last norm, which belongs to the root, would get float32 input for its
# bf16 weights and fail.
#
# Models that multiply in float8 may gather in float8 as well, 1 byte a number (torchao's
# `enable_fsdp_float8_all_gather`).
#
# ### Offload
#
# `CPUOffloadPolicy` keeps shards, gradients and states in the memory of the host. A shard goes to the GPU just before
# its all-gather, its gradient comes back after the reduce-scatter, and **the optimizer steps on the CPU**.
# `pin_memory` keeps the host's copies in pages that the GPU can read on its own; without a GPU it must be False.


# %% tags=["deeper"]
def offloaded():
    model = shard(build_gpt(gpt).to(device()), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = adam(model)
    losses = train(model, optimizer)
    with record() as ledger:
        loss_of(model, *my_part(9)).backward()
    return losses, ledger.bytes(), {p.device.type for p in model.parameters()}


losses, size, where = on_ranks(offloaded)[0]
assert size == usual.bytes() and where == {"cpu"}
print(f"{same_losses(losses, reference)}; same messages; parameters are on the {where.pop()}")

# %% [markdown] tags=["deeper"]
# Here, on the CPU, nothing moves. On a GPU, offload frees the memory of the rank's states, 4Ψ/N numbers with Adam. But
# each step copies over PCIe the shard twice to the GPU and its gradient once back, 3Ψ/N numbers a rank, and waits for
# the CPU's Adam.
#
# > **What changes on real GPUs.** With offload, gradients are on the CPU, so clipping and full state dicts are
# > collectives on CPU tensors. NCCL alone refuses them (*recorded*,
# > [pytorch issue 148532](https://github.com/pytorch/pytorch/issues/148532)). The group needs a backend for each kind
# > of device, `init_process_group("cpu:gloo,cuda:nccl")`.

# %% [markdown] tags=["deeper"]
# ## 11. Accumulation · deeper
#
# A batch that does not fit is taken in micro-batches, as in lesson 04. FSDP2 has no `no_sync`; it has switches on the
# model:
#
# - `set_requires_gradient_sync(False)`: gradients are not reduced but added up, *whole*, on this rank;
# - `set_reshard_after_forward(False)` and `set_reshard_after_backward(False)`: weights stay gathered between
#   micro-batches, because only the optimizer changes them.
#
# **Predict** how many Ψ four micro-batches send: without switches; with the first; with all.

# %% tags=["deeper"]
switched = predict("sent by 4 micro-batches with the first switch", unit="Ψ")


# %% tags=["deeper"]
def accumulate(how, micro=4):
    """On a rank: the ledger of one step, and (on rank 0) the whole gradient."""
    model = shard(build_gpt(gpt).to(device()))
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


# %% tags=["deeper"]
model = build_gpt(gpt)
loss_of(model, *windows.batch(range(4 * world_size), "cpu")).backward()
expected = torch.cat([p.grad.flatten() for p in model.parameters()])
sums = {}
for how in ("plain", "sync at the end", "keep weights"):
    ledger, gradient = on_ranks(accumulate, how)[0]
    parts = [ledger.bytes(op) / gathered for op in ("all_gather", "reduce_scatter")]
    sums[how] = sum(parts)
    right = torch.allclose(gradient.cpu(), expected, rtol=0, atol=1e-6)
    told = f"gathered {parts[0]:.2f} Ψ, reduced {parts[1]:.2f} Ψ in {len(ledger)} messages"
    print(f"{how:16} {told}; right gradient: {right}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert [round(total, 1) for total in sums.values()] == [11.8, 8.8, 2.0]
switched.compare(sums["sync at the end"])

# %% [markdown] tags=["deeper"]
# **Compare.** The plain loop sends as much as four steps, nearly 12Ψ. The first switch saves only reduce-scatters, so
# the bytes fall by a factor of 1.3 and not of 4. All switches together leave 2Ψ, as much as DDP sends.
#
# With all switches every rank keeps whole gradients and weights between micro-batches, which FSDP is there to avoid.
# Where memory is tight, accept the traffic of the plain loop, or make the micro-batches larger with activation
# checkpointing.
#
# Under HSDP there is a middle way. With `set_requires_all_reduce(False)` until the last micro-batch, the gradients of
# each are reduce-scattered inside the node, and only their sum is all-reduced between nodes. A rank keeps only its
# shard of that sum.


# %% jupyter={"source_hidden": true} tags=["deeper"]
def reduce_between_nodes(once, micro=4):
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(build_gpt(gpt).to(device()), mesh=mesh)
    with record() as ledger:
        for i in range(micro):
            model.set_requires_all_reduce(not once or i == micro - 1)
            loss_of(model, *my_part(i)).backward()
    return ledger


for once in (False, True):
    ledger = on_ranks(reduce_between_nodes, once, world_size=4)[0]
    scatters, reduces = ledger.count("reduce_scatter"), ledger.count("all_reduce")
    print(f"once {once!s:5}: {scatters} reduce-scatters inside, {reduces} all-reduces between")
    assert (scatters, reduces) == (20, 5 if once else 20)

# %% [markdown] tags=["deeper"]
# Two traps remain. If `param_dtype` is bf16, set `reduce_dtype=torch.float32`: otherwise the first switch adds up the
# micro-batches in bf16. (Then each rank keeps its unreduced gradients in float32, 4 bytes each.) And dividing by
# `micro` is right only if all micro-batches of all ranks have the same number of tokens. With padding or masks, take
# the sum over tokens, divide by the tokens of the whole step (one all-reduce of their count) and multiply by N, because
# FSDP averages over ranks.

# %% [markdown] tags=["deeper"]
# ## 12. Clipping · deeper
#
# Clipping scales the gradient down if its norm is above a limit: the norm of *all* gradients, of which each rank has
# only a piece.
#
# **Predict**: the norm of a rank's own pieces, beside the whole norm, on four ranks?

# %% tags=["deeper"]
own_norm = predict("norm of a rank's pieces, of the whole", ["the same", "half", "a quarter"])


# %% tags=["deeper"]
def norms(limit=0.5):
    model = shard(build_gpt(gpt).to(device()))
    loss_of(model, *my_part(0)).backward()
    own = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
    with record() as ledger:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    left = torch.stack([p.grad.full_tensor().norm() for p in model.parameters()]).norm()
    return own.item(), norm.full_tensor().item(), left.item(), ledger


model = build_gpt(gpt)
loss_of(model, *windows.batch(range(whole_batch), "cpu")).backward()
expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
by_rank = on_ranks(norms)
print(f"one process {expected:.4f}; clip_grad_norm_:", *(f"{norm:.4f}" for _, norm, *_ in by_rank))
print("norm of the own pieces:   ", *(f"{own:.4f}" for own, *_ in by_rank))
print("messages of clip_grad_norm_:", *(f"{e.op} of {e.bytes} bytes" for e in by_rank[0][3]))

# %% jupyter={"source_hidden": true} tags=["deeper"]
for own, norm, left, _ in by_rank:
    assert abs(norm - expected) < 1e-4 and abs(left - 0.5) < 1e-4 and own < expected
assert abs(sum(own**2 for own, *_ in by_rank) ** 0.5 - expected) < 1e-4
own_norm.compare("half")

# %% [markdown] tags=["deeper"]
# **Compare.** About half, and different on each rank: squares add up, so a rank's own norm is too small by a factor of
# about √N.
#
# `clip_grad_norm_` sees DTensors: it squares the pieces' norms, sums over the ranks with one all-reduce (a number for
# each parameter) and takes the root. Clipping by a rank's own norm is too weak and scales each rank's rows by a
# different factor, so the direction changes as well. Nothing warns of it. It happens in hand-written code that takes
# `p.grad.to_local()`. The norm that is returned is a DTensor too, so call `.full_tensor()` before you log it, on *all*
# ranks.

# %% [markdown] tags=["deeper"]
# ## 13. A model that no rank can hold · deeper
#
# So far each rank built the whole model and then sharded it. A model too large for a rank is built on the **meta
# device**, as shapes without memory; then sharded; then given memory for its shards; then filled. Filling is where it
# goes wrong.
#
# **Predict**: all ranks use the same seed, as in lesson 04, and each initializes its own shards. What do the pieces of
# a weight look like?

# %% tags=["deeper"]
drawn = predict("the pieces", ["those of one process", "all equal", "all different"])


# %% tags=["deeper"]
def on_meta():
    with torch.device("meta"):
        model = GPT(gpt)
    shard(model)  # shapes of shards, no memory yet
    return model.to_empty(device=device())


def filled_by_each_rank():
    torch.manual_seed(0)  # the same on all ranks
    model = on_meta()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DTensor's random operators
        torch.nn.init.normal_(model.embedding.weight)
    whole = model.embedding.weight.full_tensor()
    return [piece[0, :3].tolist() for piece in whole.chunk(dist.get_world_size())]


first_rows = on_ranks(filled_by_each_rank)[0]
for rank, row in enumerate(first_rows):
    print(f"first row of rank {rank}'s piece:", *(f"{value:7.4f}" for value in row))

# %% jupyter={"source_hidden": true} tags=["deeper"]
drawn.compare("all equal" if first_rows[0] == first_rows[-1] else "all different")

# %% [markdown] tags=["deeper"]
# **Compare.** On the CPU every rank drew the same numbers for its own piece, so the whole weight is the same piece N
# times, and only a warning says so. On GPUs the random generator of DTensors is meant to give each piece different
# numbers (not run here).
#
# The safe way is to take the weights from one place. If rank 0 has them, `set_model_state_dict` hands each rank its
# piece. But then the host of rank 0 must hold the whole model, 280 GB for 70 billion parameters in float32. A
# pretrained model is better loaded **shard by shard**: every rank maps the file into memory, which reads nothing yet,
# and takes its own rows of one weight after the other.


# %% tags=["deeper"]
def filled_from_rank_0(path):
    model = on_meta()
    whole = torch.load(path) if dist.get_rank() == 0 else {}
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, whole, options=options)
    return model


def filled_shard_by_shard(path):
    model = on_meta()
    whole = torch.load(path, mmap=True)  # nothing is read yet
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(whole[name], p.device_mesh, p.placements, src_data_rank=None))
    return model


# %% tags=["deeper"]
def fill_and_train(fill, path):
    with record() as ledger:
        model = fill(path)
    tied = model.head.weight is model.embedding.weight
    held = memory.held_memory(model).parameters
    return train(model, adam(model)), held, tied, ledger.bytes()


with tempfile.TemporaryDirectory() as pretrained:
    torch.save(build_gpt(gpt).state_dict(), f"{pretrained}/model.pt")
    for fill in (filled_from_rank_0, filled_shard_by_shard):
        losses, held, tied, size = on_ranks(fill_and_train, fill, f"{pretrained}/model.pt")[0]
        print(f"{fill.__name__}: {same_losses(losses, reference)}; sent {size / (4 * psi):.1f} Ψ")
        assert tied and held <= gathered / world_size
        assert (size == 0) == (fill is filled_shard_by_shard)

# %% [markdown] tags=["deeper"]
# Equal losses, and shard by shard nothing is sent at all (`src_data_rank=None` says that every rank has the data). From
# rank 0 the weights are broadcast one by one, so that beside the shards there is never more than one whole weight. For
# safetensors files PyTorch has a reader: `dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder))`.
#
# **Tied weights** survive `to_empty` here, because `fully_shard` has made them one DTensor, and PyTorch fills that in
# place. An ordinary parameter is replaced, separately in each module that uses it:

# %% tags=["deeper"]
with torch.device("meta"):
    model = GPT(gpt)
before = model.head.weight is model.embedding.weight
model.to_empty(device="cpu")
after = model.head.weight is model.embedding.weight
print(f"plain model: tied on meta {before}, after to_empty {after}")
assert before and not after

# %% [markdown] tags=["deeper"]
# So assert after `to_empty` that the weights are tied. If you call `to_empty` before `fully_shard`, tie them again in
# between. Buffers that are not in the state dict, such as tables of rotary embeddings, have to be computed again by
# hand.

# %% [markdown] tags=["deeper"]
# ## 14. Checkpoints without waiting, for resuming, and for others · deeper
#
# `dcp.async_save` returns before the files are written; a thread writes them while training goes on. Its messages
# need a **group of their own**, because on the training group they would mix with those of the training steps. At the
# end all ranks ask for the *full* state dict, of ordinary tensors, in the host's memory.
#
# **Predict**: training changes the weights while the thread writes. Which weights are in the files? And which ranks get
# the full state dict?

# %% tags=["deeper"]
in_files = predict("weights in the files", ["of the last step", "of the call", "of several steps"])


# %% tags=["deeper"]
def save_beside(folder):
    model = shard(build_gpt(gpt).to(device()))
    optimizer = adam(model)
    train(model, optimizer)
    state = {"model": states.get_model_state_dict(model)}
    before = model.embedding.weight.full_tensor().clone()
    beside = dist.new_group(backend="gloo")
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=beside)
    train(model, optimizer, range(2, 4))
    saving.result()  # wait until all is on disk
    moved = (model.embedding.weight.full_tensor() - before).abs().max().item()
    dcp.load(state, checkpoint_id=folder)  # into the model's own shards
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = states.get_model_state_dict(model, options=options)  # on all ranks: it communicates
    if dist.get_rank() == 0:
        torch.save(whole, folder / "model.pt")
    return moved, torch.equal(model.embedding.weight.full_tensor(), before), len(whole)


# %% tags=["deeper"]
with tempfile.TemporaryDirectory() as place:
    found = on_ranks(save_beside, Path(place))
    metadata = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    plain = build_gpt(gpt, seed=7)
    plain.load_state_dict(torch.load(Path(place, "model.pt")))  # an ordinary model
print("weights changed while it wrote:", *(moved > 1e-3 for moved, *_ in found))
print("files equal to the weights before:", *(equal for _, equal, _ in found))
print("tensors in the full state dict, by rank:", *(tensors for *_, tensors in found))
qkv = "model.blocks.0.attention.qkv.weight"
for chunk in metadata[qkv].chunks:
    print(f"{qkv}: {tuple(chunk.sizes)} from row {chunk.offsets[0]}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert all(moved > 1e-3 and equal for moved, equal, _ in found)
assert [tensors > 0 for *_, tensors in found] == [True] + [False] * (world_size - 1)
in_files.compare("of the call")

# %% [markdown] tags=["deeper"]
# **Compare.** The files have the weights of the moment of the call, because `async_save` copies the states before it
# returns. Only rank 0 gets the full state dict.
#
# On a GPU training waits while `async_save` copies the states to the host, which needs room for them. The last lines
# are what `.metadata` says of one tensor. Rank 0 gets the full state dict a tensor at a time, in its host's memory;
# without `cpu_offload=True` every rank would get the whole model on its GPU. `dcp_to_torch_save(folder, file)`, of
# `torch.distributed.checkpoint.format_utils`, does the same on any machine that can hold it, without ranks.
#
# Save also the step, the sampler's position, the schedule, and random states, the GPU's too. What differs between
# ranks needs a key for each rank, because `dcp` writes a plain value once for each key, from one rank only.
#
# > **To resume, in this order:**
# > 1. Build on the meta device, `fully_shard`, `to_empty`; assert that tied weights are still tied (section 13).
# > 2. Make the optimizer from the sharded parameters.
# > 3. `state = state_of(model, optimizer)`, and the step, schedule and random states under their keys.
# > 4. `dcp.load(state, checkpoint_id=latest(folder))` overwrites what it was given.
# > 5. `set_state_dict(...)`, `load_state_dict` of the rest, random states if the number of ranks is the same.
# > 6. Compute again what no state dict has: buffers with `persistent=False`.

# %% [markdown] tags=["deeper"]
# ## 15. FSDP1 and other old names · deeper
#
# Scripts and papers of 2021 to 2024 use FSDP1, which is deprecated. It wraps the model in another module and packs
# each unit into one flat parameter.


# %% jupyter={"source_hidden": true} tags=["deeper"]
def first_version():
    wrap = dist.fsdp.wrap.ModuleWrapPolicy({type(build_gpt(gpt).blocks[0])})
    model = dist.fsdp.FullyShardedDataParallel(
        build_gpt(gpt).to(device()), auto_wrap_policy=wrap, device_id=device()
    )
    with record() as ledger:
        loss_of(model, *my_part(0)).backward()
    model.zero_grad()
    return [p.ndim for p in model.parameters()], ledger, train(model, adam(model))


dimensions, ledger, losses = on_ranks(first_version)[0]
print(f"FSDP1: {same_losses(losses, reference)};", end=" ")
print(f"{ledger.bytes() / gathered:.2f} Ψ in {len(ledger)} messages; dimensions {set(dimensions)}")

# %% [markdown] tags=["deeper"]
# The same losses and the same messages. But a flat parameter needs one dtype for all its weights, frozen ones beside
# trained ones are a special case, a rank's piece can begin in the middle of a row, and state dicts need a context
# manager.
#
# | FSDP1, and older | today |
# |---|---|
# | `FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))` | `fully_shard(block)` each, then `fully_shard(model)` |
# | `FlatParameter`, `ShardedTensor` | a `DTensor` for each parameter |
# | `sharding_strategy=FULL_SHARD`, `SHARD_GRAD_OP` | `reshard_after_forward=True`, `False` |
# | `HYBRID_SHARD`, `process_group=(a, b)` | a 2-D `mesh` |
# | `MixedPrecision(param_dtype, reduce_dtype)` | `MixedPrecisionPolicy(...)`; buffers are left alone |
# | `CPUOffload(offload_params=True)` | `CPUOffloadPolicy()` |
# | `model.no_sync()` | `model.set_requires_gradient_sync(False)` |
# | `model.clip_grad_norm_(1.0)` | `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` |
# | `param_init_fn`, `sync_module_states=True` | meta device, `to_empty`, `set_model_state_dict` (section 13) |
# | `backward_prefetch=BACKWARD_PRE` | always; more with `set_modules_to_backward_prefetch` |
# | `forward_prefetch=True` | `set_modules_to_forward_prefetch` |
# | `limit_all_gathers=True` | not needed: memory is freed in the order of the streams |
# | `use_orig_params=True` | always |
# | `FSDP.state_dict_type(...)`, `FSDP.optim_state_dict(...)` | `get_state_dict(model, optimizer)` |

# %% [markdown] tags=["deeper"]
# ## 16. Mistakes, and what they say · deeper
#
# Three programs, each with one mistake:
#
# - the optimizer is built before `fully_shard`;
# - it is built last, but after a first forward, "to see the shapes";
# - the blocks are wrapped, but the root is not.


# %% tags=["deeper"]
def optimizer_first():
    model = build_gpt(gpt).to(device())
    optimizer = adam(model)
    return train(shard(model), optimizer, range(3)), held_by(optimizer)


def forward_first():
    model = shard(build_gpt(gpt).to(device()))
    loss_of(model, *my_part(0))
    optimizer = adam(model)
    return train(model, optimizer, range(3)), held_by(optimizer)


def held_by(optimizer):
    parameters = optimizer.param_groups[0]["params"]
    return f"{sum(isinstance(p, DTensor) for p in parameters)} of {len(parameters)} are DTensors"


# %% tags=["deeper"]
def no_root():
    model = build_gpt(gpt).to(device())
    for block in model.blocks:
        fully_shard(block)
    train(model, adam(model))
    weight = model.embedding.weight.detach().clone()
    largest, smallest = weight.clone(), weight.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return (largest - smallest).max().item(), ledger_of(model).count("all_gather")


# %% [markdown] tags=["deeper"]
# **Predict** what each does to the weights, and which of them raises an error.

# %% tags=["deeper"]
errors = predict("an error is raised by", ["all three", "two", "one", "none"])

# %% tags=["deeper"]
print("right:", *(f"{loss:.2f}" for loss in reference))
late = {}
for mistake in (optimizer_first, forward_first):
    with attempt():
        losses, held = on_ranks(mistake)[0]
        late[mistake.__name__] = losses
        print(f"{mistake.__name__}:", *(f"{loss:.2f}" for loss in losses), f"({held})")
with attempt():
    spread, gathers = on_ranks(no_root)[0]
    print(f"no root: embeddings differ by up to {spread:.2f}; {gathers} all-gathers a step")

# %% jupyter={"source_hidden": true} tags=["deeper"]
first, forward = late["optimizer_first"], late["forward_first"]
assert abs(first[-1] - first[0]) < 0.1 and first[-1] > reference[-1] + 0.5
assert forward[-1] > reference[-1] + 0.1
assert spread > 0.01 and gathers == 4
errors.compare("none")

# %% [markdown] tags=["deeper"]
# **Compare.** None raises an error. The first optimizer updates parameters that no model uses, and the losses stay
# where they are. The second updates the blocks only. In the third each rank trains its own embeddings.
#
# After a forward the root stays gathered, so `model.parameters()` lists its whole tensors, which no later step uses. So
# the rule is not "last": assert that the optimizer holds DTensors only. Without a wrapped root, embeddings and the last
# norm are ordinary parameters whose gradients nobody averages. And every block treats itself as a root, so it is not
# freed after forward: four all-gathers instead of eight.
#
# **The forward pass is bypassed.** Hooks gather the weights, and hooks run when a module is *called*. So
# `model.loss(x, y)`, a method that calls `self(...)`, works; `model.forward(x)`, and a layer of the root called from
# outside, do not:


# %% tags=["deeper"]
def bypass(how):
    model = shard(build_gpt(gpt).to(device()))
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

# %% [markdown] tags=["deeper"]
# The last two calls meet weights that are still pieces. *Mixed torch.Tensor and DTensor* is the message to remember:
# somebody uses a parameter outside its unit's forward. Another method that should gather too, such as `generate`, is
# registered with `torch.distributed.fsdp.register_fsdp_forward_method(model, "generate")`.
#
# **`torch.save` of a sharded model** works, on every rank. Each file claims the whole shape and has an N-th of the
# numbers, and an ordinary model that loads it meets the same message.
#
# **Only rank 0 asks for the full state dict**, and the run hangs, because that is a collective like any other. Let
# all ranks ask, and one save. The same holds for `full_tensor()` and for printing a parameter's mean.
#
# **One rank has a batch less in every epoch.** As under DDP (lesson 04) there is no error at first: from then on the
# rank is a batch ahead, and gradients of two epochs are averaged. The run hangs at the very end. Count the batches
# before the loop, and take the smallest number of all ranks.

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
temporary.cleanup()
print(f"{world_size} ranks: {usual.count('all_gather')} all-gathers and", end=" ")
print(f"{usual.count('reduce_scatter')} reduce-scatters a step, {usual.bytes() / gathered:.2f} Ψ")
print(f"whole weights held at most: {most / gathered:.0%} of the model")
print(f"peak: FSDP by blocks {peaks['every block'].total / peaks['DDP'].total:.2f} of DDP's")
print("modelled step in ms:", {name: round(1e3 * s["seconds"]) for name, s in steps.items()})

# %% [markdown]
# - Each rank stores some rows of every parameter. Forward: all-gather, compute, free. Backward: all-gather, compute,
#   free, reduce-scatter. 3Ψ in all, and the same losses.
# - Wrap each block, and the root. All-gathers are hidden if the CPU runs ahead, and if a rank has more tokens than
#   FLOP/s divided by bytes/s.
# - `dcp` saves on one number of ranks and loads on any other. A new folder each time, named when complete.
#
# **Now you can answer**
#
# 1. Which part of a rank's memory does not shrink with the number of ranks?
# 2. In what order do you wrap a block for checkpointing, `compile` and FSDP?
# 3. Your all-gathers are not hidden in forward. What do you look at?
# 4. A node died while it saved. When can you trust the newest folder?
# 5. A rank has 4,096 tokens a step and 50 GB/s of network. Are its all-gathers hidden?
#
# <details><summary>Answers</summary>
#
# 1. Gathered weights, whole gradients, messages, activations (section 2).
# 2. From the inside out: checkpointing, `compile`, `fully_shard` (section 3).
# 3. Whether the CPU runs ahead. Remove what makes it wait, or give the hint (`set_modules_to_forward_prefetch`). Then
#    whether a rank has enough tokens (section 4).
# 4. If its name appears only after all ranks have written (section 5).
# 5. No. An H100 at 400 TFLOP/s needs 8,000 in forward, and 1.5 times as many, 12,000, in backward (section 4).
# </details>
#
# How your predictions came out:

# %% tags=["nbval-ignore-output"]
predictions()

# %% [markdown]
#
# **What to take to work:** [scripts/train.py](../scripts/train.py), section 6.
#
# **Exercises:** [exercises/07_fsdp](../exercises/07_fsdp_exercises.ipynb). **Next:** [08
# deepspeed](08_deepspeed.ipynb), the same by another library, or [09 tensor parallel](09_tensor_parallel.ipynb), which
# splits single layers over ranks.
#
# **Worth reading**
# - Y. Zhao et al., *PyTorch FSDP: experiences on scaling fully sharded data parallel*, 2023, [arXiv
#   2304.11277](https://arxiv.org/abs/2304.11277): FSDP1, its flat parameters, and why prefetch needs a limit.
# - W. Liang et al., *TorchTitan*, 2024, [arXiv 2410.06511](https://arxiv.org/abs/2410.06511): FSDP2 in a whole
#   training system.
