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
# Two lines shard a model so that no rank ever has to hold all of it: `fully_shard(block)` for each block, and
# `fully_shard(model)`. The loop stays as it was, and so do the losses. Llama 3.1 8B, sharded in this way, takes 5,762
# tokens a second on each of 8 H100s. On 128, with 16 times the batch, it takes 5,605 on each, which is 97 %
# (*recorded*, [torchtitan](https://github.com/pytorch/torchtitan): bf16, selective checkpointing, cards of 96 GB and
# 500 W). Every weight travels to every rank in every step, but the GPUs hardly wait for it. This lesson shows why,
# and how to save a model that no rank has whole.
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
# First PyTorch and every parameter, then what comes from the course.

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
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

world_size = 4  # ranks, 2 or more
whole_batch = 24  # windows of text in a step, of all ranks together: a multiple of the ranks

# %%
from course_utils import WorkerError, device, expect_error, launch, memory, record
from course_utils.data import Windows
from course_utils.models import GPT, Block, TransformerConfig, build_gpt, loss_of
from course_utils.programs import SCRIPTS, TEXT, excerpt, folded, read_log, torchrun
from course_utils.traces import breakdown
from course_utils.traces import load as load_trace
from lessons.fsdp import figures, sharded
from lessons.fsdp.sharded import Elsewhere, KilledWriter, padded_bytes, same_losses
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
    """Make a unit of each block, and one of the rest; `root` has options for the root alone."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options | (root or {}))


def first_run():
    model = shard(build_gpt(gpt).to(device()))
    optimizer = adam(model)
    return train(model, optimizer, range(3))


print(same_losses(on_ranks(first_run)[0], reference))

# %% [markdown]
# The losses are the same, because FSDP changes how a model is stored, not how it is trained. A parameter is now a
# **DTensor**, which knows its whole shape, the **mesh** of ranks that it is spread over, and its **placement** there.
# `Shard(0)`, printed as `S(0)`, means that it is cut along dimension 0, by rows. Below it lies an ordinary tensor
# with this rank's rows.
#
# **Predict** the shape of the piece on each rank, for a weight of 192 rows and 64 columns, and for one of only 5 rows
# and 4 columns.


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
    assert sum(shape[0] for shape in local) == whole[0]

# %% [markdown]
# Each rank in turn takes ⌈rows/N⌉ rows until none are left, so of five rows the four ranks get 2, 2, 1 and 0. The
# optimizer's states have the shapes of its parameters, so they are sharded too. Between two steps a rank therefore
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
# The reduce-scatter leaves each rank with the mean gradient of its own rows, the only ones that its optimizer
# updates. `watch` notes when messages start, when layers compute, and how many bytes of gathered weights a rank
# holds. The figure shows the order of events, not their times.


# %%
def watched(model):
    """On a rank: lanes of a step, and bytes of gathered weights after each event."""
    return watch(model, lambda step: loss_of(model, *my_part(step)).backward())


def watch_blocks(**options):
    return watched(shard(build_gpt(gpt).to(device()), **options))


# %% [markdown]
# **Predict**: with four wrapped blocks and a wrapped root, how many all-gathers and reduce-scatters does a step have?
# And how many blocks' gathered weights are there at once, at most?

# %%
lanes, line = on_ranks(watch_blocks)[0]
figures.shard_timeline(lanes, line, "measured: one step of rank 0, in order of events", order=True)

# %% [markdown]
# *The figure: 27 events in four lanes, forward, backward, all-gather, reduce-scatter. In forward a block computes
# before the next is gathered; in backward the next is gathered first. The curve below shows the gathered bytes. In
# forward and in backward it rises to the root and two blocks.*

# %%
gathered = padded_bytes(build_gpt(gpt), world_size)  # bytes of all weights as they are gathered
order = [unit for unit, *_ in lanes["all-gather"]]
block = padded_bytes(build_gpt(gpt).blocks[0], world_size)
root = gathered - 4 * block
most = max(size for _, size in line)
print("all-gathers:    ", " -> ".join(order))
print("reduce-scatters:", " -> ".join(unit for unit, *_ in lanes["reduce-scatter"]))
print(f"held at most: {most:,} bytes; root and two blocks are {root + 2 * block:,} of {gathered:,}")
assert order == ["root", *(f"block {i}" for i in (0, 1, 2, 3, 3, 2, 1, 0))]
assert 0.97 * (2 * block + root) < most <= 2 * block + root

# %% [markdown]
# Nine all-gathers and five reduce-scatters. Backward begins with the root, so FSDP does not free it after forward,
# and it is gathered only once. The last block is freed after forward and gathered again at once, which section 8
# avoids.
#
# Beside the root there are two blocks' bytes at most. In backward they are two *different* blocks, because FSDP
# fetches the next one before the present one computes. In forward it is the *same* block twice. An all-gather brings
# one flat message, the weights are copied out of it, and FSDP keeps the message until it copies out the next unit. On
# a GPU the next all-gather may have started by then, and its message is a third block's bytes (from FSDP's source,
# not measured).
#
# ### What is held, and when
#
# All that a rank holds except activations, with Adam. *Gather i* is the flat message that the all-gather of block i
# brings, *reduce i* the one that its reduce-scatter sends.
#
# | moment | shards | gathered weights | whole gradients | flat messages |
# |---|---|---|---|---|
# | between steps | parameters and moments, Ψ/N each | | | |
# | forward of block i | the same | root, block i | | gather i (on a GPU also gather i + 1) |
# | backward of block i | also gradients so far | root, block i | block i's, root's | gather i − 1, reduce i + 1 |
# | optimizer's step | also all gradients | | | on a GPU temporaries of default Adam: 4 bytes a local parameter |
# | *dtype in bf16 training* | *float32* | *bf16* | *bf16* | *bf16 gathered, float32 reduced* |
#
# > **Misconception.** "FSDP divides the memory by N." Only the column of shards shrinks with N. Gathered weights,
# > whole gradients, messages and activations are as large on a thousand ranks as on two.
#
# ### How many bytes?
#
# Two all-gathers and a reduce-scatter of the whole model make 3Ψ numbers (lesson 06). DDP's all-reduce counts as 2Ψ.
# Of each message a rank sends (N−1)/N; the ledger notes whole messages, without that factor.


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
all_freed = on_ranks(step_ledger, root={"reshard_after_forward": True})[0]
print(f"usual:               {usual.bytes() / gathered:.2f} Ψ in {len(usual)} messages")
print(f"root gathered twice: {all_freed.bytes() / gathered:.2f} Ψ in {len(all_freed)} messages")
assert all_freed.bytes() == 3 * gathered and usual.bytes() == 3 * gathered - root
assert usual.count("all_gather") == 9 and usual.count("reduce_scatter") == 5

# %% [markdown]
# It is exactly 3Ψ when the root is freed like a block, and a little less by default: about 1.5 times as much as DDP.
# Section 4 asks whether a rank has to wait for it.

# %% [markdown]
# ## 3. What to wrap
#
# A unit is gathered whole and in one message, so large units mean few messages but much memory, and small units the
# opposite. We take a wider GPT and follow every tensor through a step with `memory.track`.
#
# **Predict**: only the root is wrapped, `fully_shard(model)` and nothing else. What is still divided by N, and what
# is lost?

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
assert [*messages.values()][1:] == [2, 4 * 3 + 2, 4 * 4 * 3 + 2]
assert peaks["every linear"].total < peaks["every block"].total < peaks["root only"].total
figures.memory_bars(peaks, "measured: one rank at its peak, one window of text")

# %% [markdown]
# *The figure: a bar for each wrapping, by part. DDP holds whole states. With the root only they are divided, but the
# buffers hold all weights and gradients; by block they shrink, by linear layer more.*
#
# With the root only, the model states are still divided by N. But the whole model is gathered before the first layer
# computes and stays until backward is over, so at its peak a rank holds all weights and gradients, and nothing is
# left to fetch ahead. Wrapping every linear layer saves some more memory than blocks do, but takes more than three
# times as many messages, each with its latency. So a block is the usual choice. A tied weight, here of embedding and
# head, belongs in a unit that contains both users: the root.
#
# Two more wrappers go around the same blocks, activation checkpointing (lesson 05) and `torch.compile`:
#
# ```python
# for i, block in enumerate(model.blocks):
#     block = checkpoint_wrapper(block)  # innermost: only computing is repeated, no gathering
#     block.compile()                    # a graph of the block and its recomputation
#     model.blocks[i] = fully_shard(block)
# fully_shard(model)
# ```
#
# In this order FSDP's hooks stand outside the compiled graph, and a recomputed block is not gathered a third time,
# because its weights are there for its backward anyway.

# %% [markdown]
# ## 4. Overlap: who waits for the messages?
#
# FSDP is fast although it sends more than DDP, because most messages travel while something else computes. A GPU has
# several queues of work, **streams**, which run side by side, and FSDP gives its messages streams of their own. But a
# block cannot compute before its weights are there, so the next block's all-gather has to be *issued* before the
# present block computes. In backward FSDP does this by itself, because it has seen the order of the units. In forward
# it does not know which unit comes next. There the CPU has to run ahead of the GPU and issue work early. Where it
# cannot, the hint `set_modules_to_forward_prefetch` says what comes next.
#
# On our CPU ranks computing and sending share two cores, so overlap gains nothing. Therefore the four blocks of the
# model `Elsewhere` *compute elsewhere*, as on a GPU: the CPU only waits, 25 ms a block in forward and 50 ms in
# backward. The weights really travel, but over an emulated link on which a message takes 20 ms. In the first version
# a rank issues an all-gather and waits for it at once, as FSDP2 does on gloo. In the second the message may travel
# while a block computes, and in the third forward gets the hint as well.
#
# **Predict**: of the nine all-gathers, how many run beside a block that computes, in each version?


# %%
def timed(beside, hint):
    model = shard(Elsewhere())
    link = sharded.SlowLink(model, beside)
    if hint:
        for block, following in zip(model.blocks[:-1], model.blocks[1:], strict=True):
            block.set_modules_to_forward_prefetch([following])
    return sharded.time_steps(model, link)


versions = {"waited for": (False, False), "beside": (True, False), "with the hint": (True, True)}
steps = {}
for name, flags in versions.items():
    steps[name] = launch(timed, *flags, world_size=2, backend="gloo")[0]
assert [step["beside"] for step in steps.values()] == [0, 3, 6]

# %% tags=["nbval-ignore-output"]
for name, step in steps.items():
    ms = 1e3 * step["seconds"]
    print(f"{name:13} {step['beside']} all-gathers beside a block, {ms:.0f} ms a step (measured)")
figures.shard_timeline(steps["with the hint"]["lanes"], [], "measured: a step with the hint")

# %% [markdown]
# *The figure: computing above, all-gathers below. While a block computes, the next one's all-gather runs, in forward
# and in backward. Reduce-scatters are not drawn.*
#
# None, three, six: in backward the all-gathers of blocks 2, 1 and 0 are hidden, and with the hint also those of
# blocks 1, 2 and 3 in forward. Each hidden one saves about 20 ms, but takes the memory of one more unit's weights.
# The other three run when no block computes.
#
# And on a real GPU? None of the course's recorded traces shows FSDP, so here is another job with the same mechanism:
# a recommendation model on a V100, one of two ranks, whose all-to-alls have streams of their own (*recorded*,
# published by Meta with [HTA](https://github.com/facebookresearch/HolisticTraceAnalysis)).

# %%
assert [step["beside"] for step in steps.values()] == [0, 3, 6]

v100 = load_trace("two_machines")[1]
parts = breakdown(v100)
hidden = parts["overlap"] / parts["communication"]
print(f"{hidden:.0%} of communication runs while the GPU computes (recorded)")
assert 0.6 < hidden < 0.7
rows = sharded.compute_and_messages(v100, 1009)
figures.step_spans(rows, "recorded: one step of a V100, not FSDP")

# %% [markdown]
# *The figure: two rows over 125 ms. The messages, below, lie for the larger part under the bars of computing.*
#
# Two thirds of the communication cost no time. Under FSDP a message is hidden if a block computes longer than the
# next one's weights travel. Section 7 works that out for Llama 3.1 8B on 8 and on 128 GPUs.

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
#
# **Predict**: are the weights equal to the last bit, also on fewer ranks? And the losses of the next steps?


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
for n in (world_size, max(1, min(2, world_size - 1)), 1):
    losses, loaded = on_ranks(load, folder / "step-2", world_size=n)[0]
    off = max(abs(a - b) for a, b in zip(losses, losses_after, strict=True))
    assert sharded.equal_states(loaded, saved) and off < 1e-5
    assert off == 0 or n < world_size or backend != "gloo"  # some GPU kernels add in any order
    bound = "to the last bit" if off == 0 else "to 1e-5"
    print(f"on {n} ranks: states equal to the last bit, next losses {bound}")

# %% [markdown]
# The states are equal to the last bit each time. The losses that follow are equal to the last bit only on the same
# number of ranks; on others gradients are summed in another order, as in lesson 04.
#
# ### A rank dies while saving
#
# On 16,384 GPUs something failed every three hours (lesson 00), so it will happen. The next run goes from step 2 to
# step 3 and saves, and its last rank is killed while it writes. The careless way writes over the old checkpoint; the
# safe way writes into a new folder, which gets its name when all ranks have finished.
#
# **Predict** what can be loaded afterwards in each case.


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


# %%
def one_more_step(folder, safe):
    model, optimizer = resume(latest(folder))
    train(model, optimizer, range(2, 3))
    if safe:
        safe_save(state_of(model, optimizer), folder, 3, KilledWriter)
    else:
        warnings.simplefilter("ignore")  # "Detected an existing checkpoint ..., overwriting"
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
# Nothing is lost but the work since step 2. And what if the old checkpoint is written over?

# %% tags=["nbval-ignore-output"]
with expect_error(WorkerError):
    on_ranks(one_more_step, folder, False)

# %%
_, loaded = on_ranks(load, latest(folder), steps=())[0]
old = (saved["embedding.weight"] == loaded["embedding.weight"]).all(dim=1)
rows = [int(part.sum()) for part in old.chunk(world_size)]
print("it loads without an error; rows of the embedding that are of step 2, by rank:", *rows)
assert not sharded.equal_states(loaded, saved) and old.any() and not old.all()

# %% [markdown]
# It loads, and it is wrong: the dead rank's rows are those of step 2, the others' those of step 3. The old metadata
# fits the new files, because sizes and places are the same. `dcp.save` does warn of an existing checkpoint (the cell
# has silenced it), and `FileSystemWriter(folder, overwrite=False)` refuses. So use a new folder each time, with a
# name that appears when it is complete, and keep the last two or three.

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
# `checkpoint` stands in the block's own `forward`, so it is innermost, in the order of section 3. Next, how the loop
# trains, clips and saves. `log.part` only measures; `set_requires_all_reduce` is for several copies of the model
# (sections 9 and 11). A loaded optimizer state brings the rates of the call that wrote it, so each step sets its own.

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
# The second run went on from the newest checkpoint, and the last two are kept. [Lesson 16](16_multi_node.ipynb) runs
# the same file on two hosts.

# %% [markdown] tags=["deeper"]
# ## 7. Padding, and which messages are hidden · deeper
#
# Pieces of unequal size cannot be gathered into one message, so all are padded to the size of the first. How much
# padding travels depends on the rows and the ranks:

# %% tags=["deeper"]
for n in (world_size, 3, 5, 64):
    print(f"{n:2} ranks: {padded_bytes(build_gpt(gpt), n) / (4 * psi) - 1:5.1%} padding")

# %% [markdown] tags=["deeper"]
# Where N divides the rows, as 4 and 64 do here, there is none. Otherwise it costs little if weights have many more
# rows than there are ranks.
#
# When is a message hidden? A block has to compute longer than the weights of the next one travel. For Llama 3.1 8B,
# with 16,384 tokens a rank:

# %% tags=["deeper"]
block_parameters, tokens = 218e6, 2 * 8192
computes = 2 * block_parameters * tokens / 400e12  # FLOPs of forward, at 40 % of an H100's peak
print(f"a block computes for {1e3 * computes:.0f} ms in forward (modelled)")
for n, link, rate in ((8, "NVLink, 450 GB/s", 450e9), (128, "network, 50 GB/s a GPU", 50e9)):
    travels = 2 * block_parameters * (n - 1) / n / rate  # 2 bytes each
    print(f"its weights travel for {1e3 * travels:.1f} ms among {n} GPUs ({link}; modelled)")
    assert travels < computes

# %% [markdown] tags=["deeper"]
# So 128 GPUs were nearly as fast as 8. With an eighth of the tokens on each rank, computing would take an eighth of
# the time and the message as long as before, so on the slow link messages would no longer be hidden.
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
# - **freed in part** (an integer k, a divisor of N): each rank keeps a k-th, and backward gathers among k ranks. If
#   those k share a node, backward's all-gathers stay inside it.
#
# Here the root is treated like the blocks, and the integer is N/2. **Predict** how many Ψ are gathered in each case,
# and how many are held when backward begins.

# %% tags=["deeper"]
even = world_size if world_size >= 4 and world_size % 2 == 0 else 4
per_node = even // 2
all_weights = padded_bytes(build_gpt(gpt), even)
choices = {"True": True, "False": False, f"{per_node}": per_node}
by_choice = {}
for name, choice in choices.items():
    by_choice[name] = on_ranks(step_ledger, reshard_after_forward=choice, world_size=even)
    lanes, line = on_ranks(watch_blocks, reshard_after_forward=choice, world_size=even)[0]
    among = {even: 0, per_node: 0}
    for entry in by_choice[name][0]:
        if entry.op == "all_gather":
            among[len(entry.ranks)] += entry.bytes / all_weights
    kept = dict(line)[lanes["backward"][0][1]] / all_weights
    gathers = " and ".join(f"{size:.2f} Ψ among {n} ranks" for n, size in among.items())
    print(f"{name:6} gathered {gathers}, held when backward begins {kept:.2f} Ψ")
    assert (kept > 0.99) == (choice is False)
assert [len(ledgers[0]) for ledgers in by_choice.values()] == [15, 10, 15]

# %% [markdown] tags=["deeper"]
# `False` has the whole model when backward begins, and saves one Ψ of traffic. With an integer the gathered weights
# are freed as with `True`; what stays is a second, larger shard, which these numbers do not count: Ψ/k beside the Ψ/N
# that every rank has (ZeRO++ calls it hpZ). Each unit may have its own choice. `False` for the last block saves the
# all-gather that section 2 found wasted, and the peak stays as it is.
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
# over all ranks, HSDP, and HSDP with the mesh turned round, its dimensions swapped by mistake. **Predict** which
# sends most between nodes, which least.


# %% tags=["deeper"]
def hybrid():
    mesh = init_device_mesh(device().type, (2, per_node), mesh_dim_names=("replicate", "shard"))
    return step_ledger(mesh=mesh)


def turned():
    grid = torch.arange(dist.get_world_size()).view(2, -1).T.contiguous()
    mesh = DeviceMesh(device().type, grid, mesh_dim_names=("replicate", "shard"))
    return step_ledger(mesh=mesh)


# %% tags=["deeper"]
layouts = {"FSDP": step_ledger, "HSDP": hybrid, "HSDP, mesh turned round": turned}
sent = {}
for name, layout in layouts.items():
    ledgers = on_ranks(layout, world_size=even)
    sent[name] = sharded.ring_traffic(ledgers, node)
    inside, between = (size / (4 * psi) for size in sent[name])
    print(f"{name:24} all ranks: inside {inside:5.2f} Ψ, between nodes {between:5.2f} Ψ")
assert sent["HSDP"][1] == min(between for _, between in sent.values())
assert sent["HSDP"][1] == 2 * padded_bytes(build_gpt(gpt), per_node)

# %% [markdown] tags=["deeper"]
# Under HSDP a unit's gradients are reduce-scattered inside the node, and then each rank all-reduces its own shard
# with its partner on the other node. With k ranks on each of two nodes that is k pairs × 2 directions × Ψ/k = 2Ψ,
# whatever k is. A ring over all ranks crosses between the nodes twice, each time with 3Ψ(N−1)/N, less the root's
# second gathering.
#
# A mesh turned round is worse than no mesh at all, because it *shards* over the slow link. Nothing warns of that.
#
# How much does HSDP save on M nodes, and does the model fit? Each node sends 2Ψ(M − 1)/M under HSDP, and 3Ψ(N−1)/N in
# FSDP's ring. The model states, 16 bytes a parameter, have to fit into one node.

# %% tags=["deeper"]
for nodes in (2, 8, 64):
    n = 8 * nodes
    hsdp, fsdp = 2 * (nodes - 1) / nodes, 3 * (n - 1) / n
    print(f"{nodes:2} nodes: each sends {hsdp:.2f} Ψ under HSDP, {fsdp:.2f} under FSDP (modelled)")
for name, parameters in {"8B": 8.03e9, "70B": 70.6e9}.items():
    print(f"{name:>3}: {16 * parameters / 8 / 1e9:.0f} GB of states on each of 8 GPUs (modelled)")

# %% [markdown] tags=["deeper"]
# So the saving shrinks from two thirds on two nodes to one third on many. 8 billion parameters fit on a node of 80 GB
# cards; 70 billion do not, and need FSDP over all ranks or tensor parallelism (lesson 12).
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
# compare float32, bf16, bf16 with gradients reduced in float32, and that with float32 output of the root. **Predict**
# for each the dtype of the weights that the optimizer updates, and of the loss.


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
half, full = torch.bfloat16, torch.float32
bf16, reduced = {"param_dtype": half}, {"param_dtype": half, "reduce_dtype": full}
policies = {
    "float32": ({}, {}),
    "bf16": (bf16, {}),
    "bf16, reduced in fp32": (reduced, {}),
    "... and output in fp32": (reduced, {"output_dtype": full}),
}
for name, options in policies.items():
    losses, ledger, dtype, kept = on_ranks(precision, *options)[0]
    sizes = [ledger.bytes(op) / gathered for op in ("all_gather", "reduce_scatter")]
    told = f"gathered {sizes[0]:.2f} Ψ, reduced {sizes[1]:.2f} Ψ (of 4 bytes)"
    print(f"{name:22} {told}, loss in {dtype}")
    assert kept == {full}
    same_losses(losses, reference, tolerance=1e-4 if name == "float32" else 0.05)

# %% [markdown] tags=["deeper"]
# Shards, their gradients and the optimizer's states stay float32 in all four: the shard *is* the master weight of
# lesson 05, and no second copy is needed. What is gathered is a copy in bf16, so the all-gathers have half the bytes.
# So have the reduce-scatters, unless `reduce_dtype` says otherwise. A sum of N gradients in bf16 loses more digits
# the larger N is, so float32 is the safe choice there, for half a Ψ more.
#
# In the second and third row the loss was computed in bf16, with three digits at most, because the root's output is
# in bf16. In the fourth the *root's* policy hands out logits in float32. The same option for the blocks would be a
# mistake: the last norm, which belongs to the root, would get float32 input for its bf16 weights and fail.
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
# Here, on the CPU, nothing moves. On a GPU, offload frees the memory of the rank's states, 4Ψ/N numbers with Adam.
# But each step copies over PCIe the shard twice to the GPU and its gradient once back, 3Ψ/N numbers a rank, and waits
# for the CPU's Adam.
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
for how in ("plain", "sync at the end", "keep weights"):
    ledger, gradient = on_ranks(accumulate, how)[0]
    parts = [ledger.bytes(op) / gathered for op in ("all_gather", "reduce_scatter")]
    print(f"{how:16} gathered {parts[0]:.2f} Ψ, reduced {parts[1]:.2f} Ψ in {len(ledger)} messages")
    assert torch.allclose(gradient.cpu(), expected, rtol=0, atol=1e-6)

# %% [markdown] tags=["deeper"]
# Each time the gradient is that of one process. The plain loop sends as much as four steps, and the first switch
# saves only reduce-scatters, so the bytes fall by a factor of 1.3 and not of 4. All switches together leave 2Ψ, as
# much as DDP sends. But they give up what FSDP is for: every rank keeps whole gradients and weights between
# micro-batches. Where memory is tight, accept the traffic of the plain loop, or make the micro-batches larger with
# activation checkpointing.
#
# Under HSDP there is a middle way. With `set_requires_all_reduce(False)` until the last micro-batch, the gradients of
# each are reduce-scattered inside the node, and only their sum is all-reduced between nodes. A rank keeps only its
# shard of that sum.


# %% tags=["deeper"]
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
# micro-batches in bf16. With it the whole gradients take 4 bytes a number. And dividing by `micro` is right only if
# all micro-batches of all ranks have the same number of tokens. With padding or masks, take the sum over tokens,
# divide by the tokens of the whole step (one all-reduce of their count) and multiply by N, because FSDP averages over
# ranks.

# %% [markdown] tags=["deeper"]
# ## 12. Clipping · deeper
#
# Clipping scales the gradient down if its norm is above a limit: the norm of *all* gradients, of which each rank has
# only a piece. **Predict** how the norm of a rank's own pieces differs from the whole norm.


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
for own, norm, left, _ in by_rank:
    assert abs(norm - expected) < 1e-4 and abs(left - 0.5) < 1e-4 and own < expected
assert abs(sum(own**2 for own, *_ in by_rank) ** 0.5 - expected) < 1e-4

# %% [markdown] tags=["deeper"]
# `clip_grad_norm_` sees DTensors: it squares the pieces' norms, sums over the ranks with one all-reduce (a number for
# each parameter) and takes the root. A rank's own norm is too small, by a factor of about √N, and different on each
# rank. Clipping by it is too weak and scales each rank's rows by a different factor, so the direction changes as
# well. Nothing warns of it. It happens in hand-written code that takes `p.grad.to_local()`. The norm that is returned
# is a DTensor too, so call `.full_tensor()` before you log it, on *all* ranks.

# %% [markdown] tags=["deeper"]
# ## 13. A model that no rank can hold · deeper
#
# So far each rank built the whole model and then sharded it. A model too large for a rank is built on the **meta
# device**, as shapes without memory; then sharded; then given memory for its shards; then filled. Filling is where it
# goes wrong. **Predict**: all ranks use the same seed, as in lesson 04, and each initialises its own shards. What
# does the whole weight look like?


# %% tags=["deeper"]
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

# %% [markdown] tags=["deeper"]
# Every rank drew the same numbers for its own piece, so the whole weight is the same piece N times. Only a warning
# says so, and it is easily missed. On GPUs the random generator of DTensors is meant to give each piece different
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
# Equal losses, and shard by shard nothing is sent at all (`src_data_rank=None` says that every rank has the data).
# From rank 0 the weights are broadcast one by one, so that beside the shards there is never more than one whole
# weight. For safetensors files PyTorch has a reader: `dcp.load(state,
# storage_reader=dcp.HuggingFaceStorageReader(folder))`.
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
# need a **group of their own**, because on the training group they would mix with those of the training steps.
# **Predict**: training changes the weights while the thread writes. Which weights are in the files? At the end all
# ranks ask for the *full* state dict, of ordinary tensors, in the host's memory. Which get it?


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
assert all(moved > 1e-3 and equal for moved, equal, _ in found)
print("the weights of the call, to the last bit; tensors by rank:", *(count for *_, count in found))
qkv = "model.blocks.0.attention.qkv.weight"
for chunk in metadata[qkv].chunks:
    print(f"{qkv}: {tuple(chunk.sizes)} from row {chunk.offsets[0]}")

# %% [markdown] tags=["deeper"]
# The files have the weights of the moment of the call. `async_save` copies the states before it returns. On a GPU
# training waits for that copy to the host, which needs room for it. The last lines are what `.metadata` says of one
# tensor.
#
# Only rank 0 gets the full state dict, a tensor at a time, in its host's memory; without `cpu_offload=True` every
# rank would get the whole model on its GPU. `dcp_to_torch_save(folder, file)`, of
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


# %% tags=["deeper"]
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
# **The optimizer was built before `fully_shard`**, so it holds the old parameters. **The root is not wrapped**, only
# the blocks are. **Predict** what each of these mistakes does to the weights, and which of them raises an error.


# %% tags=["deeper"]
def optimizer_first():
    model = build_gpt(gpt).to(device())
    optimizer = adam(model)
    return train(shard(model), optimizer, range(3))


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


losses = on_ranks(optimizer_first)[0]
print("optimizer first:", *(f"{loss:.2f}" for loss in losses), f"(expected {reference[-1]:.2f})")
assert abs(losses[-1] - losses[0]) < 0.1 and losses[-1] > reference[-1] + 0.5
spread, gathers = on_ranks(no_root)[0]
print(f"no root: embeddings differ by up to {spread:.2f}; {gathers} all-gathers a step")
assert spread > 0.01 and gathers == 4

# %% [markdown] tags=["deeper"]
# Neither raises an error. The first optimizer updates parameters that no model uses. In the second, embeddings and
# the last norm are ordinary parameters whose gradients nobody averages, so each rank trains its own. And every block
# treats itself as a root, so it is not freed after forward: four all-gathers instead of eight.
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
print("step in ms:", {name: round(1e3 * step["seconds"]) for name, step in steps.items()})

# %% [markdown]
# - Each rank stores some rows of every parameter. Forward: all-gather, compute, free. Backward: all-gather, compute,
#   free, reduce-scatter. 3Ψ in all, and the same losses.
# - Wrap each block, and the root. A message is hidden if it is issued early and travels for less time than a block
#   computes.
# - `dcp` saves on one number of ranks and loads on any other. A new folder each time, named when complete.
#
# **Now you can answer**
#
# 1. Which part of a rank's memory does not shrink with the number of ranks?
# 2. In what order do you wrap a block for checkpointing, `compile` and FSDP?
# 3. Your all-gathers are not hidden in forward. What do you look at?
# 4. A node died while it saved. When can you trust the newest folder?
# 5. When is HSDP worth its memory?
#
# <details><summary>Answers</summary>
#
# 1. Gathered weights, whole gradients, messages, activations (section 2).
# 2. From the inside out: checkpointing, `compile`, `fully_shard` (section 3).
# 3. Whether the CPU runs ahead. If not, give the hint (`set_modules_to_forward_prefetch`). Then whether a block
#    computes long enough (section 4).
# 4. If its name appears only after all ranks have written (section 5).
# 5. If the states fit into one node and the link between nodes is slow (section 9).
# </details>
#
# **What to take to work:** [scripts/train.py](../scripts/train.py), section 6.
#
# **Exercises:** [exercises/07_fsdp](../exercises/07_fsdp_exercises.ipynb). **Next:**
# [08 deepspeed](08_deepspeed.ipynb), the same by another library, or [09 tensor parallel](09_tensor_parallel.ipynb),
# which splits single layers over ranks.
#
# **Worth reading**
# - Y. Zhao et al., *PyTorch FSDP: experiences on scaling fully sharded data parallel*, 2023, [arXiv
#   2304.11277](https://arxiv.org/abs/2304.11277): FSDP1, its flat parameters, and why prefetch needs a limit.
# - W. Liang et al., *TorchTitan*, 2024, [arXiv 2410.06511](https://arxiv.org/abs/2410.06511): FSDP2 in a whole
#   training system.
