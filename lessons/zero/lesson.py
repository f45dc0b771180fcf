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
# # Where does the memory go, and what does each ZeRO stage remove?
#
# The weights of a model with 7.5 billion parameters take 15 GB in 16 bits. To train it with Adam under DDP, each GPU
# needs 120 GB, activations not counted, and 64 GPUs hold 64 identical copies. The three stages of ZeRO reduce this to
# 31.4, 16.6 and 1.9 GB a GPU (*recorded*, Rajbhandari et al. 2020, figure 1). In this lesson you find these bytes, and
# build the three stages.
#
# **You will be able to**
# - *say* to the byte what a training step holds, and *measure* it on real ranks;
# - *derive* the model states of any model, and what each ZeRO stage leaves of them on a rank;
# - *build* ZeRO-1, ZeRO-2 and ZeRO-3, and *count* the bytes that they hold and send;
# - *decide* whether a model fits on a cluster, before anyone buys it.
#
# **Before this:** [02 collectives](02_collectives.ipynb), [04 ddp](04_ddp.ipynb),
# [05 scaling efficiency](05_scaling_efficiency.ipynb). **Time:** about 45 minutes to read the core, 80 with the
# deeper sections, under a minute to run.

# %% [markdown]
# Imports and parameters:

# %% tags=["parameters"]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

world_size = 4  # ranks, 2 or more
cluster = 64  # ranks of the simulated cluster

# %%
import inspect
from dataclasses import replace

from course_utils import device, launch, models
from course_utils.data import Windows
from course_utils.hardware import GPUS, LINKS
from course_utils.memory import activation_bytes, held_memory, model_states, track, training_memory
from course_utils.models import PUBLISHED, TransformerConfig, build_gpt, loss_of
from course_utils.predictions import predict, predictions
from course_utils.programs import folded
from lessons.zero import figures
from lessons.zero.explorer import memory_calculator
from lessons.zero.helpers import MasterAdam, train

# %% [markdown]
# The model is the small GPT of lesson 04, and the text is *Alice in Wonderland*, in windows of 64 characters.

# %% jupyter={"source_hidden": true}
classes = (models.Attention, models.MLP, models.Block, models.GPT)
folded("The model's source", *classes, models.loss_of)

# %% [markdown]
# ## 1. One training step, watched
#
# Five kinds of tensors fill the memory of a rank:
#
# - **parameters**, the model itself;
# - **gradients**, one number for each parameter;
# - **optimizer states**: for Adam, two moments of each parameter;
# - **activations**: what forward keeps because backward needs it;
# - **buffers**, here in a wide sense: all other tensors, such as DDP's buckets and gradients of activations.
#
# The first three are the **model states**. They depend only on the model and the optimizer, while activations also
# grow with the batch. `track` follows every tensor of a process and sorts its bytes into these five parts, so we can
# look at them at any moment of a step.
#
# **Predict**: a batch has 16 windows. When does a step hold the most: after forward, after backward, or in the
# optimizer's step?

# %%
fullest = predict("the step holds the most after", ["forward", "backward", "the optimizer's step"])

# %%
backend = launch(dist.get_backend, world_size=world_size)[0]  # the same for any number of ranks
windows = Windows("train")
gpt = TransformerConfig()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def watched_steps():
    """Bytes by part at the marks of two training steps in one process."""
    model = build_gpt(gpt).to(device())
    optimizer = adam(model.parameters())
    x, y = windows.batch(range(16), device())
    with track(model, optimizer) as tracker:
        for step in (1, 2):
            tracker.mark(f"step {step} begins")
            loss = loss_of(model, x, y)
            tracker.mark("forward")
            loss.backward()
            tracker.mark("backward")
            optimizer.step()
            tracker.mark("optimizer")
            optimizer.zero_grad()
    return tracker.history, tracker.peak


# %%
history, peak = launch(watched_steps, world_size=1, backend=backend)[0]
figures.memory_over_time(history, "measured: two steps of one process, 16 windows")

# %% jupyter={"source_hidden": true}
begin, forward, backward, stepped = [memory for _, memory in history[:4]]
assert peak.total > forward.total > 2 * peak.states and peak.activations > 0.9 * forward.activations
assert begin.parameters == backward.gradients == 4 * gpt.parameter_count
assert round(stepped.optimizer / begin.parameters, 2) == 2 and begin.optimizer == 0
fullest.compare(max(history, key=lambda mark: mark[1].total)[0])

# %% [markdown]
# **Compare.** After forward: 16 windows are many for so small a model, so activations are larger than everything else.
# The true peak comes a moment later, when backward adds the first gradients of activations.
#
# *The figure (measured): bytes by part over two training steps. Parameters are there throughout. Activations appear in
# forward; memory is highest after the second forward. After backward activations are gone, and gradients are there. The
# optimizer's states appear with its first step, and stay.*
#
# The optimizer's states do not exist before the first optimizer step, which means that a program that fits in step 1
# can run out of memory in step 2.
#
# > **Misconception.** "If the model fits, it trains." The parameters are only a quarter of the model states, and most
# > of this peak is not model states at all.

# %% [markdown]
# ## 2. Model states: bytes per parameter
#
# `model_states` is the formula for what a training step keeps. `held_memory` looks at every tensor that model and
# optimizer hold at this moment.
#
# In **mixed precision** (lesson 05), the parameter and its gradient are in bf16, 2 bytes each in place of the 4 of
# **fp32**. Adam's two moments stay in fp32. And the optimizer keeps an fp32 copy of the parameter, the **master
# weight**; `MasterAdam` is Adam with master weights, for a model in bf16.
#
# **Predict**: Adam in fp32 keeps 16 bytes a parameter. How many are they in mixed precision?

# %%
mixed = predict("bytes a parameter in mixed precision", unit="bytes")


# %%
def held_in(dtype, make_optimizer):
    """What is held at the end of backward in the second step."""
    model = build_gpt(dtype=dtype)
    optimizer = make_optimizer(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, *windows.batch(range(4))).backward()
        held = held_memory(model, optimizer)
        optimizer.step()
    return held


def alone(fn, *args):
    """Run on one rank, on the CPU."""
    return launch(fn, *args, world_size=1, backend="gloo")[0]


counted = {
    "fp32": alone(held_in, torch.float32, adam),
    "mixed": alone(held_in, torch.bfloat16, MasterAdam),
    "bf16": alone(held_in, torch.bfloat16, adam),
}

# %%
print("bytes per parameter     parameter  gradient  optimizer  formula  measured")
for name in ("fp32", "mixed", "mixed, fp32 gradients", "bf16 policy", "bf16"):
    formula = model_states(1, precision=name)
    row = f"{name:22}{formula.parameters:11.0f}{formula.gradients:10.0f}{formula.optimizer:11.0f}"
    row += f"{formula.states:9.0f}"
    if name in counted:
        measured = counted[name].states / gpt.parameter_count
        row += f"{measured:10.3f}"
    print(row)

# %% jupyter={"source_hidden": true}
for name, memory in counted.items():
    right = model_states(gpt.parameter_count, precision=name).states
    assert abs(memory.states / right - 1) < 0.01
mixed.compare(model_states(1, precision="mixed").states)

# %% [markdown]
# **Compare.** Again 16: mixed precision only moves bytes, from parameter and gradient to the master weight. (The
# thousandths are Adam's step counters.)
#
# In fp32 these are 4 for the parameter, 4 for its gradient and 4 for each moment. In mixed precision they are 2 and 2,
# and the optimizer's 12, which the ZeRO paper calls K. Many programs sum gradients in fp32, which makes it 18
# (*recorded*, [stas00/ml-engineering](https://github.com/stas00/ml-engineering)). FSDP2's **bf16 policy** (lesson 07)
# keeps all states in fp32 and converts parameters to bf16 for computing. Pure bf16 halves the bytes, but loses small
# updates (lesson 05).
#
# > **Misconception.** "Mixed precision halves the memory." It saves time and memory for activations, but model states
# > stay at 16 bytes. ZeRO reduces those.
#
# Now a real size: seven billion parameters, at 2 + 2 + 12 bytes each.

# %%
seven = model_states(7e9, precision="mixed")
assert seven.states == 7e9 * (2 + 2 + 12) == 112e9
sizes = {GPUS[key].name: GPUS[key].memory_bytes for key in ("v100", "h100", "h200")}
rows = {"model states of 7B, mixed precision": seven}
figures.memory_bars(rows, "modelled: 7 billion parameters with Adam", limit=sizes)

# %% [markdown]
# *The figure (modelled): one bar of 112 GB, three quarters of which are the optimizer's. It ends right of the lines of
# V100 and H100, and left of the H200's.*
#
# Two GPUs of 80 GB could hold these 112 GB together. But under DDP each needs its own copy.
#
# > **What changes on real GPUs.** A GPU holds more than the formula: the CUDA context, NCCL's buffers, workspaces of
# > matrix libraries, and in the optimizer's step up to 4 bytes a parameter, unless Adam is built with `fused=True`
# > (section 9). PyTorch's allocator keeps memory that tensors have freed, so `nvidia-smi` shows what was *reserved*,
# > while `torch.cuda.memory_allocated` counts as this lesson does. Leave a few GB free.

# %% [markdown]
# ## 3. ZeRO on paper
#
# Under DDP all ranks have the same model states, so N ranks hold N copies. **ZeRO**, the *zero redundancy optimizer*
# (Rajbhandari et al. 2020), keeps one. Each rank owns a **shard**, one Nth of it, and each stage divides one more part.
# Ψ is the number of parameters, and N the number of ranks:
#
# | | parameters | gradients | optimizer | bytes on a rank, mixed precision |
# |---|---|---|---|---|
# | DDP (stage 0) | whole | whole | whole | (2 + 2 + K) Ψ |
# | ZeRO-1 | whole | whole | shard | (2 + 2 + K/N) Ψ |
# | ZeRO-2 | whole | shard | shard | (2 + (2 + K)/N) Ψ |
# | ZeRO-3 | shard | shard | shard | (2 + 2 + K)/N · Ψ |
#
# The first figure of the paper has Ψ = 7.5 billion, K = 12 and N = 64. The formulas give the numbers that it prints:

# %%
NAMES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
stages = {name: model_states(7.5e9, stage=i, ranks=64) for i, name in enumerate(NAMES)}
in_gb = [f"{memory.states / 1e9:.1f}" for memory in stages.values()]
assert in_gb == ["120.0", "31.4", "16.6", "1.9"]  # as the paper's figure prints them
gpus = {GPUS[key].name: GPUS[key].memory_bytes for key in ("v100", "h100")}
figures.memory_bars(stages, "modelled: 7.5 billion parameters on 64 ranks, one rank", limit=gpus)

# %% [markdown]
# *The figure (modelled): four bars. Stage 1 cuts the optimizer's part, three quarters of DDP's bar, to a thin strip;
# stage 2 the gradients; stage 3 the parameters. DDP fits on neither GPU. ZeRO-1 leaves room on the H100, but on the
# V100 less than one of 32 GB, too little for any activations.*
#
# With few ranks the savings are smaller:

# %%
print("times less than DDP" + "".join(f"{n:9,}" for n in (2, 4, 8, 64, 1024)) + " ranks")
for stage in (1, 2, 3):
    factors = [16 / model_states(1, stage=stage, ranks=n).states for n in (2, 4, 8, 64, 1024)]
    print(f"{NAMES[stage]:19}" + "".join(f"{factor:9.2f}" for factor in factors))

# %% [markdown]
# > **Misconception.** "ZeRO-1 saves 4×, ZeRO-2 saves 8×." These are the limits for many ranks, 16/4 and 16/2, where the
# > divided part is close to nothing. On 4 ranks it is 2.3 and 2.9. Only ZeRO-3 has no such limit.
#
# In fp32, as in our small GPT, the optimizer has 8 of the 16 bytes, so the limits are 2 and 4.

# %% [markdown]
# ## 4. ZeRO-1: each rank updates its own shard
#
# We compare every version with PyTorch's DDP. All of them are modules with an optimizer and a method `step`, so that
# one loop trains any of them:
#
# ```python
# model = version(build_gpt(gpt, seed=rank), adam)  # another seed on each rank
# for step in range(4):
#     loss = loss_of(model, *batch)  # this rank's windows of text
#     loss.backward()
#     model.step()
# ```
#
# `train` is this loop. It returns the losses, what a rank holds after the last backward, and what it sent in the last
# step. The seeds differ so that a version fails unless it first broadcasts rank 0's parameters.


# %%
class Stage0(DDP):
    """DDP: every rank holds all parameters, gradients and optimizer states."""

    def __init__(self, module, make_optimizer, views=True):
        super().__init__(module, gradient_as_bucket_view=views)  # no second copy (section 11)
        self.optimizer = make_optimizer(self.parameters())

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def on_ranks(version, **options):
    return launch(train, version, adam, world_size=world_size, backend=backend, **options)


runs = {"DDP": on_ranks(Stage0)}

# %% [markdown]
# Now ZeRO-1. Adam treats each element by itself, so a rank can update its shard without the others, and needs moments
# for that shard only. It also needs the mean gradient of its shard, which a reduce-scatter delivers. Afterwards an
# all-gather brings the updated shards to all ranks:
#
# | DDP | ZeRO-1 |
# |---|---|
# | all-reduce the gradients | **reduce-scatter** them: each rank gets the mean of its shard |
# | optimizer over all parameters | optimizer over the **shard** |
# | | **all-gather** the parameters |
#
# How do we cut the parameters into equal shards? Their sizes differ, so we first join those of one block into one flat
# tensor, a **unit**, and add zeros until N divides its length. The parameters and the rank's shard become views of this
# tensor. So an update of the shard updates the parameters.


# %%
class Unit:
    """Parameters of one type in a flat tensor, and the shard of it that this rank owns."""

    @torch.no_grad()
    def __init__(self, parameters):
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.padding = -sum(sizes) % dist.get_world_size()
        self.flat = self.join(parameters)
        for p, piece in zip(parameters, self.flat[: sum(sizes)].split(sizes), strict=True):
            p.set_(piece.view_as(p))  # from now on a view of the flat tensor
        self.shard = nn.Parameter(self.flat.chunk(dist.get_world_size())[dist.get_rank()])

    def join(self, tensors):
        return F.pad(torch.cat([t.flatten() for t in tensors]), (0, self.padding))

    @torch.no_grad()
    def reduce_gradients(self):
        """Add the mean over ranks of the shard's gradient; let go of the whole gradients."""
        mean = self.join([p.grad for p in self.parameters]) / dist.get_world_size()
        mine = torch.empty_like(self.shard)
        dist.reduce_scatter_single(mine, mean)  # reduce_scatter_tensor before PyTorch 2.13
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
        for p in self.parameters:
            p.grad = None


# %% [markdown]
# One more unit holds what stands around the blocks: embeddings, last norm and head. The head is *tied* to the
# embedding: both are one tensor, so they must share a unit. Our units leave out frozen parameters, which have neither
# gradients nor states.


# %%
def units_of(module):
    """The model and its blocks, each with a unit of the trained parameters that are its own."""
    inside = {p for block in module.blocks for p in block.parameters()}
    parts = {module: [p for p in module.parameters() if p not in inside]}
    parts |= {block: [*block.parameters()] for block in module.blocks}
    trained = {part: [p for p in own if p.requires_grad] for part, own in parts.items()}
    return {part: Unit(own) for part, own in trained.items() if own}


# %%
class Zero1(nn.Module):
    """Stage 1: a rank keeps the optimizer states of its shard only."""

    def __init__(self, module, make_optimizer):
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        self.units = units_of(module)
        self.shards = nn.ParameterList([unit.shard for unit in self.units.values()])
        self.optimizer = make_optimizer(self.shards)

    def forward(self, *inputs):
        return self.module(*inputs)

    def step(self):
        for unit in self.units.values():
            unit.reduce_gradients()
        self.update()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units.values():
            dist.all_gather_single(unit.flat, unit.shard.detach())


# %% [markdown]
# The losses must agree with DDP's up to rounding, because only the order of sums differs. The bytes printed are the
# tensors' sizes. The last number is what a rank sends in a ring, in units of Ψ numbers and without the factor (N−1)/N:
# an all-gather of all parameters counts as 1Ψ.
#
# **Predict**: does ZeRO-1 send more than DDP, less, or the same?

# %%
traffic = predict("ZeRO-1 sends", ["less than DDP", "as much as DDP", "half as much again as DDP"])

# %%
runs["ZeRO-1"] = on_ranks(Zero1)
for name in ("DDP", "ZeRO-1"):
    print(f"{name}: {runs[name][0]}")

# %% jupyter={"source_hidden": true}
assert runs["ZeRO-1"][0].same_losses_as(runs["DDP"][0])
traffic.compare("as much as DDP")

# %% [markdown]
# **Compare.** The same, 2Ψ: an all-reduce *is* a reduce-scatter and an all-gather, and ZeRO-1 puts the optimizer's step
# between the two. So dividing the optimizer's states costs no extra traffic.
#
# The usual first attempt keeps DDP's all-reduce and adds the all-gather. That gives the right losses too, but sends
# 3Ψ.
#
# All of this is fp32. In mixed precision the flat tensor would be bf16, and the shard an fp32 copy: the master weights.
#
# <details><summary>Which optimizers cannot be sharded in this way?</summary>
#
# Those that look at more than one element at a time: LAMB and Adafactor need norms or means of whole tensors, Shampoo
# and Muon whole matrices. They need shards along the borders of tensors, or one more collective. Clipping by the norm
# of all gradients needs one more too: every rank squares and sums its shard, and one number is all-reduced.
# </details>
#
# <details><summary>And the padding?</summary>
#
# Its gradient is zero on every rank, so Adam's moments stay zero and it never moves. It costs at most N − 1 numbers
# a unit.
# </details>

# %% [markdown]
# ## 5. ZeRO-2: gradients leave as soon as they are complete
#
# After the reduce-scatter a rank needs the gradients of its shard only. But ZeRO-1 still holds all gradients at the end
# of backward, because it reduces them in `step`. So ZeRO-2 only changes *when* `reduce_gradients` is called: in a hook,
# as soon as the last gradient of a unit has come, as DDP does with its buckets (lesson 04).


# %%
class Zero2(Zero1):
    """Stage 2: a rank keeps the gradients of its shard only."""

    def __init__(self, module, make_optimizer):
        super().__init__(module, make_optimizer)
        self.missing = {unit: len(unit.parameters) for unit in self.units.values()}
        for unit in self.units.values():
            for p in unit.parameters:
                p.register_post_accumulate_grad_hook(lambda p, unit=unit: self.arrived(unit))

    def arrived(self, unit):
        """One more gradient of this unit is complete."""
        self.missing[unit] -= 1
        if self.missing[unit] == 0:
            unit.reduce_gradients()
            self.missing[unit] = len(unit.parameters)

    def step(self):
        whole = [count == len(unit.parameters) for unit, count in self.missing.items()]
        if not all(whole) or any(shard.grad is None for shard in self.shards):
            raise RuntimeError("a parameter got no gradient: every rank must use all of them")
        self.update()


# %%
runs["ZeRO-2"] = on_ranks(Zero2)
assert runs["ZeRO-2"][0].same_losses_as(runs["DDP"][0])
for name in ("ZeRO-1", "ZeRO-2"):
    print(f"{name}: {runs[name][0]}")

# %% [markdown]
# ZeRO-2 sends the same bytes, only earlier, and at the end of backward a rank has one Nth of the gradients. One unit
# would be enough for that, but it would be complete only then, so the peak would be ZeRO-1's. With several units the
# peak is lower. All ranks must complete units in the same order, or gradients of different blocks would be summed.
# They do, as long as every rank uses every parameter.

# %% [markdown]
# ## 6. ZeRO-3: parameters come when they are needed
#
# Only the parameters are still whole. A block needs them twice in a step, in forward and in backward; in between, a
# rank needs only its shard. So ZeRO-3 drops the all-gather after the optimizer's step. Instead it gathers each unit
# before each use, and frees it afterwards:
#
# ```text
#           forward  ──────────────>   backward  ────────────────>
# block 1   gather run free                                gather run reduce free
# block 2             gather run free  gather run reduce free
# ```
#
# Three hooks tell us when. One runs before a module's forward, one after it, and one when the gradient of its output is
# there, because then its backward begins. Backward ends when the unit's last gradient has come, in `arrived`. The
# parameters are views of the flat tensor, so we cannot delete it. Instead we resize its *storage*, its memory, to zero,
# as FSDP does.


# %%
def free(unit):
    unit.flat.untyped_storage().resize_(0)


def gather(unit):
    """All-gather the parameters of a unit, unless they are there."""
    storage = unit.flat.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(unit.flat.nbytes)
        dist.all_gather_single(unit.flat, unit.shard.detach())


# %%
class Zero3(Zero2):
    """Stage 3: a rank keeps the parameters of its shard only."""

    @torch.no_grad()
    def __init__(self, module, make_optimizer):
        super().__init__(module, make_optimizer)
        for part, unit in self.units.items():
            unit.shard.set_(unit.shard.clone())  # no longer a view of what is freed
            free(unit)
            part.register_forward_pre_hook(lambda *_, unit=unit: gather(unit))
            part.register_forward_hook(lambda *args, unit=unit: self.used(unit, args[-1]))

    def used(self, unit, output):
        free(unit)
        if output.requires_grad:  # its gradient comes when backward reaches this part
            output.register_hook(lambda _: gather(unit))

    def arrived(self, unit):
        super().arrived(unit)
        if self.missing[unit] == len(unit.parameters):  # all have come
            free(unit)

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


# %% [markdown]
# **Predict**: the model has two blocks, so three units. How many Ψ does a rank send in a step of ZeRO-3?

# %%
zero3 = predict("sent in a step of ZeRO-3", unit="Ψ")

# %%
runs["ZeRO-3"] = on_ranks(Zero3)
print(f"ZeRO-3: {runs['ZeRO-3'][0]}")
largest = max(entry.bytes for entry in runs["ZeRO-3"][0].ledger)
for entry in runs["ZeRO-3"][0].ledger:
    print(f"  {entry.op:15}", "a block" if entry.bytes == largest else "around the blocks")

# %% jupyter={"source_hidden": true}
assert runs["ZeRO-3"][0].same_losses_as(runs["DDP"][0])
assert runs["ZeRO-3"][0].ledger.count("all_gather") == 6
zero3.compare(runs["ZeRO-3"][0].psi_sent)

# %% [markdown]
# **Compare.** 3Ψ in six all-gathers and three reduce-scatters, 1.5 times what DDP sends: each unit is gathered twice
# and reduced once.
#
# The unit around the blocks comes first and is reduced last, because the model's forward and backward enclose those of
# its blocks. Activation checkpointing (lesson 05), which computes each block again in backward, adds no gathers,
# because the weights are there then.
#
# > **Misconception.** "ZeRO-3 is model parallelism: each rank computes its part of the model." Every rank computes the
# > whole model, on its own data, with whole parameters. Between uses it keeps only a shard. It is data parallelism.

# %% [markdown]
# ## 7. The stages side by side
#
# Now in one picture: what each rank held at the end of backward, against the formulas for fp32.

# %%
bytes_held = {name: [rank.held for rank in runs[name]] for name in NAMES}
print(f"{world_size} ranks      formula    measured (rank 0)    sent")
for stage, (name, psi) in enumerate(zip(NAMES, (2, 2, 2, 3), strict=True)):
    formula = model_states(gpt.parameter_count, stage=stage, ranks=world_size, precision="fp32")
    assert all(abs(held.states / formula.states - 1) < 0.01 for held in bytes_held[name])
    sent = runs[name][0].psi_sent
    assert abs(sent - psi) < 0.01
    print(f"{name:10}{formula.states:12,.0f}{bytes_held[name][0].states:12,.0f}{sent:15.2f} Ψ")
figures.partition_picture(bytes_held, f"measured: {world_size} ranks at the end of backward")

# %% [markdown]
# *The figure (measured): a panel for each version, a column for each rank, and a row each for optimizer states,
# gradients and parameters. Under DDP all is filled. With ZeRO-1 a rank fills one Nth of the optimizer's row, with
# ZeRO-2 also of the gradients', with ZeRO-3 of all three.*
#
# Measured and computed agree within one percent on every rank. The difference is Adam's step counters and any padding.
#
# Large batches are often cut into **micro-batches**, whose gradients are accumulated before one optimizer step. DDP can
# skip communication for all but the last of them (`no_sync`), because it has room for whole gradients.
#
# **Predict** for four micro-batches: how many Ψ does a rank send in a step of ZeRO-2 now? And with the other stages?

# %%
in_parts = predict("sent in a step of ZeRO-2 with 4 micro-batches", unit="Ψ")

# %%
in_micro_batches = {}
for name, version in (("ZeRO-1", Zero1), ("ZeRO-2", Zero2), ("ZeRO-3", Zero3)):
    in_micro_batches[name] = on_ranks(version, micro=4)[0]
    print(f"{name}, 4 micro-batches: {in_micro_batches[name].psi_sent:.2f} Ψ")

# %% jupyter={"source_hidden": true}
for found, psi in zip(in_micro_batches.values(), (2, 5, 12), strict=True):
    assert found.same_losses_as(runs["DDP"][0]) and abs(found.psi_sent - psi) < 0.01
in_parts.compare(in_micro_batches["ZeRO-2"].psi_sent)

# %% [markdown]
# **Compare.** ZeRO-1 adds up whole gradients, then reduces and gathers once: 2Ψ. ZeRO-2 does not keep whole gradients,
# so it reduces in every micro-batch: 4Ψ, and 1Ψ for the all-gather. ZeRO-3 sends its 3Ψ in every micro-batch: 12Ψ.
#
# > **What changes on real GPUs.** NCCL has a real reduce-scatter; gloo runs it as an all-reduce inside, so on the CPU
# > ZeRO sends more than we count. And communication overlaps with computing, which lesson 07 shows.

# %% [markdown]
# ## 8. Does it fit?
#
# Whether a model fits depends on all five parts together. `training_memory` adds them up for a shape, a batch, a stage
# and a number of ranks.
#
# **Predict**: GPT-3 13B in mixed precision on 64 ranks, one sequence on each, with checkpointing. From which stage on
# does it fit on an 80 GB GPU?

# %%
enough = predict("it fits from", ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"])

# %%
thirteen = replace(PUBLISHED["GPT-3 13B"], checkpoint=True)
needs = {name: training_memory(thirteen, 1, stage=i, ranks=64) for i, name in enumerate(NAMES)}
figures.memory_bars(needs, "modelled: GPT-3 13B on 64 ranks, one rank", limit=gpus)

# %% jupyter={"source_hidden": true}
assert [round(memory.total / 1e9) for memory in needs.values()] == [207, 55, 31, 8]
apart = training_memory(thirteen, 1, stage=1, ranks=64, gradient_copy=True)
assert round(apart.total / 1e9) == 81
fits = [name for name, memory in needs.items() if memory.total < GPUS["h100"].memory_bytes]
enough.compare(fits[0])

# %% [markdown]
# **Compare.** From stage 1 on. With a second copy of the gradients, as in DDP's buckets by default, ZeRO-1 would need
# 81 GB: one more than the H100 has.
#
# *The figure (modelled): DDP needs 207 GB, more than an H100 has, and ZeRO-1 55. ZeRO-2 ends just below the V100's
# 32 GB, and ZeRO-3 needs 8.*
#
# The calculator calls the same function, for these shapes or yours.

# %%
memory_calculator()

# %% [markdown]
# *The calculator: left, the five parts; right, for each GPU, whether they fit with a tenth left free. If the notebook
# is not running, it shows one setting.*
#
# <details><summary>Try it: GPT-3 13B as above, ZeRO-1. On how many H100s does it fit, with a tenth of the memory
# free?</summary>
#
# On 16, with 63 GB on each. On 8 it is 72.2, just over the 72 that leave a tenth free. On 4,096 it is still 53, since
# parameters and gradients are whole.
# </details>
#
# <details><summary>Try it: GPT-3 175B, ZeRO-3, one sequence a rank, with checkpointing. What is the smallest number of
# H100s? And without checkpointing?</summary>
#
# 64, with about 66 GB each; on 32 it would be 109. Without checkpointing there is no such number: activations and
# gathered units do not shrink with more ranks, so on 4,096 ranks it is still 94 GB.
# </details>

# %% [markdown] tags=["deeper"]
# ## 9. What Adam's step takes for a moment · deeper
#
# The formulas count what is *kept*, but Adam also needs temporary memory during its step: it divides by the square root
# of the second moment, and this root is a new tensor. PyTorch has three versions of Adam: a loop over the parameters;
# `foreach=True`, which treats all of them in a few calls; and `fused=True`, which does everything in one kernel. On a
# GPU `foreach` is the default.
#
# **Predict** for each: how many bytes per parameter does the step need for a short time, on top of the 16? Commit to
# the default.

# %% tags=["deeper"]
moment = predict("more for a moment, with foreach", unit="bytes a parameter")


# %% tags=["deeper"]
def temporary(**how):
    """Bytes per parameter that Adam's step holds for a moment."""
    model = build_gpt(gpt)
    optimizer = torch.optim.Adam(model.parameters(), **how)
    loss_of(model, *windows.batch(range(4))).backward()
    with track(model, optimizer) as tracker:
        optimizer.step()
    return tracker.peak.buffers / gpt.parameter_count


extra = {
    "loop": alone(lambda: temporary(foreach=False)),
    "foreach": alone(lambda: temporary(foreach=True)),
    "fused": alone(lambda: temporary(fused=True)),
}
for name, size in extra.items():
    print(f"{name:8}{size:5.2f} bytes per parameter (measured, CPU)")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert round(extra["foreach"], 2) == 4 and extra["fused"] == 0 < extra["loop"] < 2
moment.compare(round(extra["foreach"], 2))

# %% [markdown] tags=["deeper"]
# **Compare.** `foreach` makes one temporary number for each parameter that the rank updates, 4 bytes in fp32. The loop
# takes one tensor at a time, so it needs only about twice the largest of them, and `fused` needs nothing.
#
# For an undivided 7B model these are 28 GB, which no formula above counts. `fused` needs none, and it is the fastest
# according to [PyTorch's documentation](https://docs.pytorch.org/docs/stable/optim.html), so build `AdamW(…,
# fused=True)`.

# %% [markdown] tags=["deeper"]
# ## 10. Activations: the part that grows with the batch · deeper
#
# Autograd keeps what each operation needs to compute its gradient: a linear layer its input, attention its queries,
# keys, values and output. `activation_bytes` adds this up from the shape of the GPT alone. The scores of attention,
# whose number grows with the square of the sequence length, are not counted, because the fused kernels behind
# `scaled_dot_product_attention` never store them.
#
# **Activation checkpointing** (lesson 05) keeps only the input of each block, and computes the rest again in backward.
#
# **Predict**: the sequence becomes twice as long. By how much do the activations grow, and by how much with
# checkpointing?

# %% tags=["deeper"]
growths = ["twice", "four times", "twice, with checkpointing less"]
growth = predict("activations for twice the length", growths)


# %% tags=["deeper"]
def kept_after_forward(configs):
    """Bytes of activations at the end of forward, one sequence of full length each."""
    kept = []
    for config in configs:
        model = build_gpt(config)
        x, y = (torch.zeros(1, config.context, dtype=torch.int64) for _ in range(2))
        with track(model) as tracker:
            loss = loss_of(model, x, y)
            kept.append(tracker.mark("forward").activations)
            del loss
    return kept


lengths, kept, by_formula = [64, 128, 256, 512, 1024], {}, {}
for way, again in {"keep all": False, "checkpoint": True}.items():
    shapes = [TransformerConfig(layers=8, context=t, checkpoint=again) for t in lengths]
    kept[way] = alone(kept_after_forward, shapes)
    by_formula[way] = [activation_bytes(config, 1) for config in shapes]
title = "measured and computed: 8 layers, one sequence"
figures.memory_over_length(lengths, kept, by_formula, title)

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert kept == by_formula  # to the byte
for row in kept.values():
    assert all(abs(longer / short - 2) < 0.05 for short, longer in zip(row, row[1:], strict=False))
growth.compare("twice")

# %% [markdown] tags=["deeper"]
# **Compare.** Both double, and the formula is right to the byte.
#
# *The figure: activations over sequence length, both axes logarithmic. Points are measured, lines are computed. Both
# lines grow in proportion to the length. The one with checkpointing is about ten times lower.*
#
# With checkpointing, the largest thing left can be the **logits**,
# one number for each token and each entry of the vocabulary. Recorded at full size: Llama-3-8B takes 7 GiB of
# activations a layer for one sequence of 32k tokens, 224 GiB in all. With checkpointing it takes 8 GiB for the inputs
# of all blocks, 7 for the one block that is computed again, and 15.7 for logits in fp32 (*recorded*,
# [stas00/ml-engineering](https://github.com/stas00/ml-engineering)). Two of these follow from the model's shape alone:

# %% tags=["deeper"]
layers, hidden, vocabulary, tokens = 32, 4096, 128_256, 32 * 1024  # Llama 3 8B
block_inputs = layers * tokens * hidden * 2  # bf16
logits = tokens * vocabulary * 4  # fp32
print(f"the inputs of all blocks in bf16: {block_inputs / 2**30:.1f} GiB")
print(f"the logits in fp32: {logits / 2**30:.1f} GiB")
assert block_inputs == 8 * 2**30 and round(logits / 2**30, 1) == 15.7 and 7 * layers == 224

# %% [markdown] tags=["deeper"]
# Because the logits are so large, programs for long sequences compute the loss in pieces. The three stages do not help
# here, because they divide model states only. What shrinks activations is checkpointing, a smaller batch, splitting the
# sequence (lesson 11), or tensor and pipeline parallelism (lessons 09 and 10). ZeRO-R, of the same paper, also divides
# what checkpointing keeps.

# %% [markdown] tags=["deeper"]
# ## 11. The peak of a step, and shards that do not divide · deeper
#
# The formulas count model states, but a rank runs out of memory at the **peak** of a step, where activations and
# buffers are added. We take six layers, so that one unit is a small part of the model, and checkpointing, so that
# activations do not hide the rest.
#
# **Predict**: states shrink from each version to the next, from DDP to ZeRO-3. Do the peaks as well?

# %% tags=["deeper"]
highest = predict("the highest peak", ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"])

# %% tags=["deeper"]
tall = TransformerConfig(layers=6, checkpoint=True)
versions = dict(zip(NAMES, (Stage0, Zero1, Zero2, Zero3), strict=True))
peaks = {name: on_ranks(of, config=tall, steps=2)[0].peak for name, of in versions.items()}
figures.memory_bars(peaks, f"measured: peak of a step, 6 layers, rank 0 of {world_size}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
totals = [memory.total for memory in peaks.values()]
assert totals == sorted(totals, reverse=True)
highest.compare(max(peaks, key=lambda name: peaks[name].total))

# %% [markdown] tags=["deeper"]
# **Compare.** They do, from DDP's down.
#
# *The figure (measured): the peak of a step for each version, by part. The bars shrink from DDP to ZeRO-3, but by less
# than the states do: activations stay, and ZeRO-3 has more buffers than the others.*
#
# The parts of two bars cannot be compared one by one, because each peak lies at its own moment: under ZeRO-1
# late in backward, when most gradients are there, under ZeRO-2 and 3 early. ZeRO-3 has gathered parameters among its
# buffers: a block, which is a sixth of this model, and what is around the blocks.
#
# Why did we ask DDP for `gradient_as_bucket_view=True`? Because by default its buckets are a second copy of all
# gradients. With it, the gradients are views into the buckets. The price is that `detach_()` on them is an error.

# %% tags=["deeper"]
for views in (False, True):
    ended = on_ranks(lambda *args, views=views: Stage0(*args, views=views))[0].ended
    held = f"gradients {ended.gradients:9,.0f}, buffers {ended.buffers:9,.0f} bytes"
    print(f"views {views!s:6} {held}")

# %% [markdown] tags=["deeper"]
# Now three ranks. 112,384 is not a multiple of 3, and every unit is padded:

# %% tags=["deeper"]
three = launch(train, Zero3, adam, world_size=3, backend="gloo")
block = sum(p.numel() for p in build_gpt(gpt).blocks[0].parameters())
units = [gpt.parameter_count - gpt.layers * block] + [block] * gpt.layers
for count in units[:2]:
    print(f"a unit of {count:,} parameters: {-count % 3} of padding, shards of {-(-count // 3):,}")
assert {run.held.parameters for run in three} == {4 * sum(-(-count // 3) for count in units)}

# %% [markdown] tags=["deeper"]
# Without padding, shards of `len // 3` elements would leave the last one or two to no rank. There would be no error:
# these elements would never be updated, and the loss would hardly show it. Compare weights, not losses, when you test
# such code.

# %% [markdown] tags=["deeper"]
# ## 12. The ZeRO that PyTorch has · deeper
#
# - `ZeroRedundancyOptimizer` is ZeRO-1 for use with DDP. It gives each rank whole tensors instead of shards of a flat
#   one, and each rank broadcasts what it has updated.
# - `fully_shard`, FSDP2, is ZeRO-3. With `reshard_after_forward=False` gathered parameters stay until backward has
#   used them, which is close to ZeRO-2 ([lesson 07](07_fsdp.ipynb)).
# - DeepSpeed has all three stages, and offload ([lesson 08](08_deepspeed.ipynb)).
#
# Here is the first one in place of ours:

# %% tags=["deeper"]
from torch.distributed.optim import ZeroRedundancyOptimizer


class Library1(DDP):
    """ZeRO-1 by PyTorch."""

    def __init__(self, module, make_optimizer):
        super().__init__(module, gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=1e-3)

    step = Stage0.step


library = on_ranks(Library1)
assert library[0].same_losses_as(runs["DDP"][0])
for name, ranks in {"ours": runs["ZeRO-1"], "library": library}.items():
    shares = ", ".join(f"{run.held.optimizer:,.0f}" for run in ranks)
    print(f"{name:8} optimizer states on each rank: {shares} bytes")
for op in ("all_reduce", "broadcast"):
    assert library[0].ledger.bytes(op) == 4 * gpt.parameter_count
    print(f"{library[0].ledger.count(op):4} {op} of 4Ψ bytes in all")

# %% [markdown] tags=["deeper"]
# The library's shares are uneven, because it does not cut tensors. And it sends 3Ψ where ours sends 2Ψ: DDP has already
# all-reduced all gradients, which is 2Ψ, and then every parameter is broadcast by the rank that updated it. (A
# broadcast sends a tensor N − 1 times, so each of N ranks sends (N−1)/N of it on average.) In PyTorch, FSDP is the
# better choice today. Stage 1 with 2Ψ, which suits micro-batches and pipelines, is in DeepSpeed and in Megatron-LM's
# distributed optimizer.

# %% [markdown] tags=["deeper"]
# ## 13. Clusters that are not there · deeper
#
# Four ranks on a laptop do not show what one of 1,024 GPUs holds. A simulation does, and it has three parts:
#
# - a **fake process group** says that it has 1,024 ranks; its collectives return at once and move nothing;
# - **fake tensors** have a shape and a type but no memory, so operations on them only compute shapes;
# - FSDP2's own code runs on both: forward, backward and optimizer's step, while `track` counts bytes. FSDP2 cuts every
#   tensor along its first dimension, into whole rows.
#
# `simulate` shows rank 0 of such a cluster. It knows none of our formulas, so it can disagree with them. First the
# small GPT, by formula, on real ranks, and simulated:

# %% tags=["deeper"]
from course_utils.memory import Memory, simulate

formula = model_states(gpt.parameter_count, stage=3, ranks=world_size, precision="fp32").states
real, fake = runs["ZeRO-3"][0].held.states, simulate(gpt, world_size).states.states
print(f"ZeRO-3, {world_size} ranks: formula {formula:,.0f}, ", end="")
print(f"real ranks {real:,.0f}, simulated {fake:,.0f}")
assert abs(real / formula - 1) < 0.01 and abs(fake / formula - 1) < 0.05

# %% [markdown] tags=["deeper"]
# **Predict**: the same model on 64, 256 and 1,024 ranks. Does a rank hold a quarter each time?

# %% tags=["deeper"]
sizes_then = ["a quarter", "a half", "no smaller"]
shrinks = predict("from 256 to 1,024 ranks a rank's part becomes", sizes_then)

# %% tags=["deeper"]
print(f"{'ranks':>6}{'formula':>12}{'simulated, rank 0':>20}")
for n in (64, 256, 1024):
    formula = model_states(gpt.parameter_count, stage=3, ranks=n, precision="fp32").states
    print(f"{n:6,}{formula:12,.0f}{simulate(gpt, n).states.states:20,.0f}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert simulate(gpt, 256).states.states == simulate(gpt, 1024).states.states
shrinks.compare("no smaller")

# %% [markdown] tags=["deeper"]
# **Compare.** No, at 256 ranks it stops shrinking. Our longest tensors have 256 rows, so from 256 ranks on rank 0 has
# one row of every tensor. (`shard_placement_fn` can name another dimension to cut.)
#
# Now the GPTs from GPT-2 to GPT-3, with checkpointing and one sequence a rank. Their layers are alike, so it is enough
# to simulate a model with three of them and one with four: the difference is what each further layer adds.


# %% tags=["deeper"]
def from_few_layers(config):
    """States and peak of rank 0, from simulations of three and of four layers."""
    few, more = (simulate(replace(config, layers=n), cluster) for n in (3, 4))
    whole = []
    for a, b in ((few.states, more.states), (few.peak, more.peak)):
        pairs = zip(a.parts().items(), b.parts().values(), strict=True)
        whole.append(Memory(**{part: x + (config.layers - 3) * (y - x) for (part, x), y in pairs}))
    return whole


shown = ("GPT-2", "GPT-3 13B", "GPT-3 175B")
configs = {name: replace(PUBLISHED[name], checkpoint=True) for name in shown}
found = {name: from_few_layers(config) for name, config in configs.items()}
every_layer = simulate(configs["GPT-2"], cluster)
assert abs(found["GPT-2"][0].states - every_layer.states.states) < 1
assert abs(found["GPT-2"][1].total / every_layer.peak.total - 1) < 0.01
for name, (states, _) in found.items():
    count = configs[name].parameter_count
    formula = model_states(count, stage=3, ranks=cluster, precision="fp32").states
    assert abs(states.states / formula - 1) < 0.01
figures.memory_bars(
    {name: peak for name, (_, peak) in found.items()},
    f"measured on a simulated cluster: peak of one of {cluster} ranks, fp32",
    limit={GPUS["h100"].name: GPUS["h100"].memory_bytes},
)

# %% [markdown] tags=["deeper"]
# *The figure (measured on a simulated cluster): the peak of a step by part, from GPT-2 to 175 billion parameters. Up to
# 13 billion most of each bar is buffers. At 175 billion more than half is model states, and the bar ends just left of
# the line of 80 GB.*
#
# The states agree with the formula within one percent. The formula does not know the buffers: one block of the largest
# model has 7.2 GB in fp32, and at the peak the buffers hold several times as much: gathered parameters, their
# gradients, and copies for the collectives.
#
# > **Misconception.** "With enough ranks ZeRO-3 fits anything." What is gathered at a time is as large on a thousand
# > ranks as on two. The largest unit must fit, whole, beside its gradients.
#
# A simulation counts what PyTorch allocates. It knows nothing of gaps between blocks of memory (*fragmentation*; on a
# GPU `PYTORCH_ALLOC_CONF=expandable_segments:True` reduces them), and its kernels are those of a CPU.

# %% [markdown] tags=["deeper"]
# ## 14. Offload: memory that is not on the GPU · deeper
#
# The host of a GPU, the machine with its CPUs, has more memory, and an NVMe drive even more. **Offload** keeps there
# what a step needs only once: the optimizer's states ([ZeRO-Offload](https://arxiv.org/abs/2101.06840), Ren et al.
# 2021), and in ZeRO-Infinity the parameters too. The price is time on the link. In each step gradients travel to the
# host and new parameters back, 2 bytes a parameter in each direction. If the states are on a drive, all 12 bytes of K
# are read and written.
#
# **Predict** for one GPU and 7 billion parameters: how long does a step take at least to read the states from a drive?
# PCIe 4 with 16 lanes moves 31.5 GB/s in each direction (lesson 01). A GPU has 16 lanes, a drive only 4.

# %% tags=["deeper"]
reading = predict("reading the states from a drive, PCIe 4", unit="s")

# %% tags=["deeper"]
psi = 7e9
for key in ("pcie4", "pcie5"):
    link = LINKS[key]
    ways = {"host": (2, link.bandwidth), "drive": (12, link.bandwidth / 4)}
    for where, (width, bandwidth) in ways.items():
        tokens = width / bandwidth * 400e12 / 6  # computed meanwhile, at 400 TFLOP/s
        row = f"{link.name}, {where}: {width * psi / bandwidth:5.2f} s each way"
        print(f"{row}, as long as the GPU computes on {tokens:,.0f} tokens")

# %% jupyter={"source_hidden": true} tags=["deeper"]
h100 = GPUS["h100"]
assert round(LINKS[h100.nvlink].bandwidth / link.bandwidth) == 7
assert round(h100.memory_bandwidth / link.bandwidth) == 53
reading.compare(12 * psi / (LINKS["pcie4"].bandwidth / 4))

# %% [markdown] tags=["deeper"]
# **Compare.** 11 seconds with PCIe 4, and 5 with PCIe 5 (*modelled*): 12 bytes a parameter, at a quarter of the lanes.
#
# Whether that is long depends on how long the step computes. A
# GPU needs 6 FLOPs a parameter and token, so the size of the model cancels, and the right column holds for any model at
# 400 TFLOP/s (what Llama 3 reached on an H100, *recorded*, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), table
# 4). Two thousand tokens a GPU are few and fifty thousand are many, so transfers to the host are much easier to hide
# than those to a drive. N ranks with a shard each have N links, so ZeRO and offload go well together. But the host must
# also *compute* Adam, which can take longer than the transfer.
#
# To offload for real, we put the master weights of section 2 on the CPU. Here is all of `MasterAdam`:

# %% tags=["deeper"]
print(inspect.getsource(MasterAdam))

# %% tags=["deeper"]
def offloaded(make):
    """Losses, and bytes on the GPU after the last step, or None where there is no GPU."""
    model, losses = build_gpt(gpt).to(device()), []
    optimizer = make(model.parameters())
    for step in range(4):
        loss = loss_of(model, *windows.batch(range(4 * step, 4 * step + 4), device()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    on_gpu = torch.cuda.memory_allocated() if device().type == "cuda" else None
    return losses, on_gpu


here, there = (
    launch(offloaded, make, world_size=1)[0]
    for make in (adam, lambda parameters: MasterAdam(parameters, place="cpu"))
)
assert max(abs(a - b) for a, b in zip(here[0], there[0], strict=True)) < 1e-4
print("4 losses equal to those of Adam on the device")

# %% tags=["deeper", "nbval-ignore-output"]
if here[1] is None:
    print("no GPU here: host memory was exchanged with host memory")
else:
    print(f"on the GPU after a step: {here[1]:,} bytes, offloaded {there[1]:,} bytes")

# %% [markdown] tags=["deeper"]
# > **Misconception.** "Offload makes large models trainable for free." It trades memory for time, on a link that is a
# > seventh as fast as NVLink and a fiftieth as fast as HBM (PCIe 5 on an H100, lesson 01). It pays where memory is the
# > limit, as when a large model is fine-tuned on one GPU.
#
# > **What changes on real GPUs.** Host memory must be *pinned* (lesson 01), or the copies are slow and the CPU waits
# > for them. FSDP has `CPUOffloadPolicy` (lesson 07), and ZeRO-Offload brings a fast Adam for CPUs.

# %% [markdown] tags=["deeper"]
# ## 15. What to take to work · deeper
#
# You would not write `Zero3` for a real job, because FSDP2 does the same, gathers a unit while the one before it
# computes, and saves and loads its shards on any number of ranks. The
# program [`scripts/train.py`](../scripts/train.py) trains with FSDP2, and one flag decides how many ranks share a copy
# of the states: `--shard 1` keeps a whole copy on every rank, as DDP does, and `--shard N` is ZeRO-3. Its optimizer is
# the `fused` one of section 9. On one machine with four GPUs, start it with:
#
# ```bash
# torchrun --standalone --nproc-per-node=4 scripts/train.py --out run --data text.txt --shard 4
# ```
#
# [Lesson 07](07_fsdp.ipynb) runs it.
#
# Before you choose a stage, do the arithmetic of section 8 with *your* shape, and work out what each stage sends with
# your number of micro-batches (section 7).

# %% [markdown]
# ## Recap, with the numbers of this run

# %%
print(f"{gpt.parameter_count:,} parameters, fp32 Adam, {world_size} ranks; bytes of a rank:")
for name, (run, *_) in runs.items():
    print(f"{name:7}{run.held.states:12,.0f} of model states{run.bytes_sent:12,.0f} sent in a step")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - With Adam, 16 bytes a parameter are kept, in fp32 and in mixed precision. Seven billion parameters are 112 GB.
#   Activations and buffers come on top; for a moment of the step, `foreach` takes 4 bytes more and `fused` none.
# - ZeRO-1 divides the optimizer's states and ZeRO-2 the gradients, for the traffic of DDP: 2Ψ. ZeRO-3 divides the
#   parameters too, for 3Ψ. With m micro-batches it is 2Ψ, (m + 1)Ψ and 3mΨ. Losses are those of DDP.
#
# **Now you can answer**
# - When does a step hold the most, and why can step 2 run out of memory when step 1 did not?
# - Which of a parameter's bytes does each stage divide? What does ZeRO-1 save on 4 ranks, and why not 4×?
# - Why does ZeRO-2 send no more than DDP, and when does it? Why does ZeRO-3 gather every unit twice?
# - Your model and your GPUs: which stage do you need?
#
# <details><summary>Short answers</summary>
#
# In this run when backward begins; where states are larger than activations, late in backward or in the optimizer's
# step. Adam's moments come with its first step (section 1).
#
# Stage 1 divides the 12 of 2 + 2 + 12, stage 2 also the gradient's 2, stage 3 all. On 4 ranks ZeRO-1 saves 2.3×,
# because 4 bytes stay whole and a quarter of 12 remains (sections 2 and 3).
#
# An all-reduce is a reduce-scatter and an all-gather; ZeRO-2 sends more with micro-batches (sections 4, 5 and 7).
# Forward and backward both need a unit, and in between it is freed (section 6).
#
# Section 8 has the arithmetic for your model.
# </details>
#
# **What to take to work:** `fused=True`, and [scripts/train.py](../scripts/train.py), whose `--shard` is ZeRO-3.
#
# **Exercises:** [exercises/06_zero](../exercises/06_zero_exercises.ipynb). **Next:** [07 fsdp](07_fsdp.ipynb), ZeRO-3
# as you will use it.
#
# **Worth reading**
# - Rajbhandari et al., *ZeRO: memory optimizations toward training trillion parameter models*, 2020,
#   [arXiv 1910.02054](https://arxiv.org/abs/1910.02054): the three stages, with their memory and communication.
# - Rajbhandari et al., *ZeRO-Infinity*, 2021, [arXiv 2104.07857](https://arxiv.org/abs/2104.07857): what offload to
#   drives needs in bandwidth.
# - Korthikanti et al., *Reducing activation recomputation in large transformer models*, 2022,
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): activations counted, and what to compute again.
