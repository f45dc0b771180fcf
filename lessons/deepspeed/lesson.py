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
# # What does DeepSpeed do differently, and when do I pick it?
#
# DeepSpeed is the library in which ZeRO was first published. It trains a model from one JSON file: the stage, the
# precision, the batch, the clipping and where the optimizer lives are keys of it. That is convenient, and it is also
# how runs go wrong. Some mistakes in the file stop the run with a message. Others train something else, with losses
# that look healthy. This lesson runs the real library on the ranks that you know, holds it against DDP and FSDP2 number
# by number, and ends with a program that reads a configuration before you pay for it.
#
# **You will be able to**
# - *train* one model with ZeRO-0 to 3 and *say* what each stage sends and keeps;
# - *read* a configuration key by key, and *find* those that DeepSpeed passes over;
# - *save* and *load* a sharded checkpoint, also on another number of ranks;
# - *move* a configuration to FSDP2, and back;
# - *choose* between the two for a given job.
#
# **Before this:** [06 zero](06_zero.ipynb), [07 fsdp](07_fsdp.ipynb). **Time:** about 45 minutes to read the core, 95
# with the deeper sections, under a minute to run.

# %% [markdown]
# First PyTorch and every parameter, then what comes from the course.

# %% tags=["parameters"]
import contextlib
import difflib
import json
import runpy
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

world_size = 2  # ranks
use_deepspeed = True  # False: as if DeepSpeed were not installed

# %%
from course_utils import attempt, device, launch, record
from course_utils.data import Windows
from course_utils.models import GPT, TransformerConfig, build_gpt, loss_of, next_token_loss
from course_utils.predictions import predict, predictions
from course_utils.programs import TEXT, folded
from lessons.deepspeed import figures
from lessons.deepspeed.deepspeed_tools import Runs, check_config, missing, quiet
from lessons.deepspeed.deepspeed_tools.internals import Asked

# %% [markdown]
# DeepSpeed is an extra of the course, added by `make deepspeed`. Where it is missing, the cells that need it show what
# was recorded with the same code on 2 ranks, and say so.

# %%
without = missing() if use_deepspeed else "DeepSpeed is left out, as use_deepspeed says."
if without:
    print(without, "\nWhat needs DeepSpeed below is recorded, not measured.")
    world_size = 2  # as recorded
else:
    import deepspeed

    print(f"DeepSpeed {deepspeed.__version__}: what follows is measured here, unless marked.")
runs = Runs("deepspeed_lesson", recorded=bool(without))
on_ranks = partial(runs, world_size=world_size)

# %% [markdown]
# Three helpers are used throughout:
#
# | helper | what it does |
# |---|---|
# | `on_ranks(name, fn, …)` | `launch` with a clean start of DeepSpeed on each rank; the name is that of the record |
# | `record()` | the ledger of lesson 02: each message of a block, with its bytes |
# | `quiet()` | what DeepSpeed prints inside of a block is dropped |
#
# The clean start is needed because the ranks of `launch` are the same processes at every call, while DeepSpeed keeps
# the first process group for the life of a process. A program for `torchrun`, or for DeepSpeed's own launcher
# `deepspeed`, needs none of it.
#
# ## 1. One engine around the model
#
# DeepSpeed takes the training loop apart differently from PyTorch. `deepspeed.initialize` gets the model, the optimizer
# and the configuration, and returns an **engine**. The engine is called like the model. Its `backward` divides the loss
# if several micro-batches make a step, and its `step` counts them, clips, updates and clears the gradients. So two
# lines of a loop change, and `zero_grad` goes. Most people meet the engine inside of Transformers or Accelerate, which
# make it from the same file.
#
# The model, the windows of text, Adam and the mean over the ranks are as in lesson 07 (folded).

# %% jupyter={"source_hidden": true}
gpt = TransformerConfig(layers=4)
psi_bytes = 4 * gpt.parameter_count  # Ψ numbers in float32
windows = Windows("train")


def my_part(step, each=4):
    """This rank's windows of a step, and the same text one character later: both (each, 64)."""
    first = (step * dist.get_world_size() + dist.get_rank()) * each
    return windows.batch(range(first, first + each), device())


def mean_over_ranks(loss):
    whole = loss.detach().float()
    dist.all_reduce(whole)
    return whole.item() / dist.get_world_size()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# %%
def engine_for(config, model=None):
    """The model of this lesson, or another, in an engine; and the optimizer that it was given."""
    model = build_gpt(gpt).to(device()) if model is None else model
    optimizer = adam(model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine, optimizer


def train(engine, steps=range(3)):
    """Train; returns the loss of the whole batch at each step."""
    losses = []
    for step in steps:
        loss = loss_of(engine, *my_part(step))
        engine.backward(loss)
        engine.step()  # clips, updates, clears the gradients
        losses.append(mean_over_ranks(loss))
    return losses


# %% [markdown]
# The first configuration has four keys. PyTorch's own `AdamW` is used throughout: with DeepSpeed's optimizers a C++
# extension would be compiled at the first call, for minutes.


# %%
def config_for(stage, **zero):
    """A plain fp32 configuration; `zero` has further keys of zero_optimization."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **zero},
    }

# %% [markdown]
# What everything is compared with is plain DDP, on the same windows (folded). First ZeRO-2:


# %% jupyter={"source_hidden": true}
def train_ddp(clip=None, steps=range(3)):
    """The same with DDP: the losses that everything is compared with."""
    model = DDP(build_gpt(gpt).to(device()))
    optimizer, losses = adam(model), []
    for step in steps:
        loss = loss_of(model, *my_part(step))
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


# %%
def first_run():
    engine, _ = engine_for(config_for(2))
    return train(engine)


def largest_gap(losses, others):
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


reference = on_ranks("DDP", train_ddp)[0]
gap = largest_gap(on_ranks("first run", first_run)[0], reference)
print(f"ZeRO-2 against DDP over three steps: losses equal to 1e-6: {gap < 1e-6}")
assert gap < 1e-6

# %% [markdown]
# Equal losses, as there must be: ZeRO changes where numbers lie and when they travel, not the numbers.
#
# Now somebody forgets the engine in one line, and writes `loss.backward()` as with PyTorch. **Predict** what becomes of
# the run with ZeRO-2, and with stage 0, which is DDP inside of an engine.

# %%
ends = ["other losses, no message", "the same losses", "an error"]
fate = predict("loss.backward() under ZeRO-2", ends)


# %%
def without_engine(config):
    """The loop with PyTorch's backward: its losses, or what stopped it."""
    engine, _ = engine_for(config)
    losses = []
    try:
        for step in range(3):
            loss = loss_of(engine, *my_part(step))
            loss.backward()
            engine.step()
            losses.append(round(mean_over_ranks(loss), 4))
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return losses


came = {}
for stage in (2, 0):
    came[stage] = on_ranks(f"loss.backward(), {stage}", without_engine, config_for(stage))[0]
    print(f"stage {stage}:", str(came[stage])[:75])
print("DDP:    ", [round(loss, 4) for loss in reference])

# %% jupyter={"source_hidden": true}
assert largest_gap(came[2], reference) < 2e-4 and "not supported" in came[0]
fate.compare("the same losses")

# %% [markdown]
# **Compare.** The same losses: since 0.18.3 (December 2025) the engine finds the end of a backward by itself at stages
# 1 to 3, and stage 0 refuses. `engine.backward` is still what DeepSpeed recommends, and with fp16 it scales the loss.
#
# ## 2. Four stages, one key
#
# Lesson 06 derived what the stages should cost, for Ψ parameters on N ranks. Stages 1, 2 and 3 each keep one more of
# optimizer state, gradients and parameters in shards. Per step, DDP and stages 1 and 2 send 2Ψ(N−1)/N numbers from each
# rank, stage 3 sends 3Ψ(N−1)/N: parameters are gathered for forward and again for backward, and gradients are reduced.
# Does the library do what the paper says?
#
# The ledger has the message sizes S. An all-gather or a reduce-scatter sends S(N−1)/N from each rank, an all-reduce
# twice that. Where each part is reduced to the rank that keeps it, a rank sends all parts but its own, so that counts
# once, too.

# %% jupyter={"source_hidden": true}
SENT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "reduce": 1}  # in S(N−1)/N


def summary(losses, ledger, state):
    """What a run is compared by; `state` is the optimizer's state by parameter."""
    held = [v for of in state.values() for v in of.values() if torch.is_tensor(v)]
    held = [v.to_local() if hasattr(v, "to_local") else v for v in held]
    return {
        "losses": losses,
        "optimizer": sum(v.numel() * v.element_size() for v in held),
        "messages": {op: ledger.count(op) for op in SENT if ledger.count(op)},
        "sent": sum(factor * ledger.bytes(op) for op, factor in SENT.items()) / psi_bytes,
    }

# %% [markdown]
# An engine is measured over three steps, with the ledger open in the last one. DDP and FSDP2 are measured alike, in the
# folded cells below.


# %%
def one_engine(config):
    """Three steps, the ledger open in the last; how much of the model lies whole here after it."""
    engine, optimizer = engine_for(config)
    losses = train(engine, range(2))
    with record() as ledger:
        loss = loss_of(engine, *my_part(2))
        engine.backward(loss)
        engine.step()
    whole = sum(p.numel() for p in engine.module.parameters()) / gpt.parameter_count
    return summary([*losses, mean_over_ranks(loss)], ledger, optimizer.state) | {"whole": whole}


def engines(configs):
    return {name: one_engine(config) for name, config in configs.items()}


# %% jupyter={"source_hidden": true}
def native(sharded):
    """The same three steps with DDP or FSDP2."""
    model = build_gpt(gpt).to(device())
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DDP(model)
    optimizer, losses = adam(model), []
    for step in range(3):
        with record() as ledger:
            loss = loss_of(model, *my_part(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return summary(losses, ledger, optimizer.state) | {"whole": 0.0 if sharded else 1.0}


# %% jupyter={"source_hidden": true}
def show(table):
    print(f"{world_size} ranks    loss gap   optimizer   whole   sent        messages in a step")
    for name, row in table.items():
        assert largest_gap(row["losses"], reference) < 1e-6, name
        messages = ", ".join(f"{n} {op}" for op, n in row["messages"].items())
        share = row["optimizer"] / (2 * psi_bytes)
        start = f"{name:12} < 1e-6      {share:4.2f}      {row['whole']:4.0%}"
        print(f"{start}    {row['sent']:.1f} Ψ    {messages}")


# %% [markdown]
# In the table, *optimizer* is the share of Adam's 8Ψ bytes that a rank holds, *whole* the share of the parameters that
# lie on it between steps, *sent* is in Ψ(N−1)/N numbers per rank.
#
# **Predict** for DeepSpeed's stages 0 to 3, with its defaults, how many Ψ(N−1)/N a rank sends in a step. Commit to
# stage 2.

# %%
sent = predict("ZeRO-2 sends in a step", unit="Ψ(N−1)/N")

# %%
ALL = {"stage3_param_persistence_threshold": 0}  # shard small parameters, too: section 4
stages = {
    "ZeRO-0": config_for(0),
    "ZeRO-1": config_for(1),
    "ZeRO-2": config_for(2),
    "ZeRO-3": config_for(3, **ALL),
}
table = {"DDP": on_ranks("DDP, counted", native, False)[0]}
table |= {"FSDP2": on_ranks("FSDP2", native, True)[0]}
table |= on_ranks("stages", engines, stages)[0]
show(table)

# %% jupyter={"source_hidden": true}
assert [round(table[f"ZeRO-{stage}"]["sent"]) for stage in range(4)] == [2, 3, 3, 2]
sent.compare(round(table["ZeRO-2"]["sent"], 2))

# %% [markdown]
# **Compare.** Losses and optimizer are as derived, the messages are not. Stages 1 and 2 send **3** instead of 2:
# gradients go through an all-reduce, which brings every rank the sum of *all* gradients, and each keeps its part. Stage
# 3 sends **2** instead of 3. (From stage 1 on, one more all-reduce is of a single number.)
#
# Both are choices of DeepSpeed's, and each has a key:
#
# - `use_multi_rank_bucket_allreduce` (on by default) puts gradients of several owners into one all-reduce. Without it
#   each owner gets a reduction of its own: fewer bytes, more and smaller messages.
# - `stage3_max_live_parameters` and `stage3_max_reuse_distance` (each 10⁹ by default) say how many gathered parameters
#   may stay for backward. This model has 0.2 million, so all of it stays from forward to backward. One gather is saved,
#   and with it the memory that stage 3 is for. A model of many times 10⁹ behaves as derived.
#
# With the first key off, and with the others 0, the formulas should hold. Bytes are not all, though. The model has 28
# modules with parameters of their own: six in each of four blocks, and four around them. FSDP2 makes 9 all-gathers in a
# step. **Predict**: how many does ZeRO-3 make, when nothing may stay gathered?

# %%
gathers = predict("all-gathers of ZeRO-3 in a step, if nothing may stay")

# %%
FREED = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
as_derived = {
    "ZeRO-1 owner": config_for(1, use_multi_rank_bucket_allreduce=False),
    "ZeRO-2 owner": config_for(2, use_multi_rank_bucket_allreduce=False),
    "ZeRO-3 freed": config_for(3, **ALL, **FREED),
}
table |= on_ranks("as derived", engines, as_derived)[0]
show({name: table[name] for name in as_derived})
figures.sent({name: row["sent"] for name, row in table.items()})

# %% jupyter={"source_hidden": true}
assert [round(table[name]["sent"]) for name in as_derived] == [2, 2, 3]
assert sum(len(m._parameters) > 0 for m in GPT(gpt).modules()) == 28
gathers.compare(table["ZeRO-3 freed"]["messages"]["all_gather"])

# %% [markdown]
# **Compare.** 56: each module gathers for itself, once in forward and once in backward. Bytes are now as derived.
#
# *The figure: one bar for each way, in Ψ(N−1)/N. DDP, ZeRO-0, ZeRO-3 with its defaults, and ZeRO-1 and 2 with a
# reduction for each owner send 2; ZeRO-1 and 2 with their defaults 3; FSDP2 and ZeRO-3 without reuse about 3, since one
# keeps a small part gathered and the other gathers one once more.*
#
# So many messages cost latency. The cure is `leaf_module`, classes of modules that are gathered as one (in code
# `set_z3_leaf_modules`), which is what `fully_shard(block)` says to FSDP2. For **mixture-of-experts models it is more
# than a cure for latency**. Ranks whose tokens take different experts gather in different orders, and hang, unless the
# block with the experts is a leaf ([7461](https://github.com/deepspeedai/DeepSpeed/issues/7461)).
#
# A second key is worth a run. `reduce_scatter` is on by default, and yet the ledger of stage 2 shows none.

# %%
leaves = {"classes": ["course_utils.models.Block"]}
more = {
    "leaf blocks": config_for(3, **ALL, **FREED, leaf_module=leaves),
    "no scatter": config_for(2, reduce_scatter=False),
}
more = on_ranks("more", engines, more)[0]
show(more)
assert more["leaf blocks"]["messages"]["all_gather"] == 16
assert more["no scatter"]["messages"] == table["ZeRO-2"]["messages"]

# %% [markdown]
# Blocks as leaves need 16 all-gathers, for the same bytes. And `reduce_scatter` changes nothing here, on or off.
#
# > **Misconception.** "ZeRO-2 communicates as little as DDP." In the paper. In this library, with its defaults, it
# > sends half as much again, and the ledger is how you know.
#
# ## 3. A configuration, key by key
#
# These are the keys that usual configurations have, and what stands in for one that is left out. A dot marks a key of
# `zero_optimization`.
#
# | key | what it does | left out |
# |---|---|---|
# | `train_batch_size` | samples of a step over all ranks | the product of the next two and N |
# | `train_micro_batch_size_per_gpu` | samples that a rank takes at once | worked out, if the one above is there |
# | `gradient_accumulation_steps` | micro-batches in a step; the engine divides the loss | worked out, or 1 |
# | `gradient_clipping` | largest norm of all gradients | since 0.19.3 (June 2026) 1.0, before: off |
# | `optimizer`, `scheduler` | made by DeepSpeed | those given to `initialize` |
# | `bf16`, `fp16` | half precision with fp32 master weights, if `enabled` is true | fp32 |
# | `zero_optimization`, `.stage` | 0 to 3 | 0 |
# | `.overlap_comm` | reduce while backward goes on | on at stage 3 only |
# | `.reduce_bucket_size`, `.allgather_bucket_size` | elements in a message | 5·10⁸ |
# | `.contiguous_gradients` | copy gradients into one buffer as they come | on |
# | `.stage3_param_persistence_threshold` | parameters with fewer elements stay whole | 100,000 |
# | `.stage3_prefetch_bucket_size` | elements gathered ahead | 5·10⁷ |
# | `.stage3_max_live_parameters`, `.stage3_max_reuse_distance` | how much may stay gathered | 10⁹ |
# | `.offload_optimizer`, `.offload_param` | `{"device": "cpu"}` or `"nvme"`; parameters at stage 3 only | on the GPU |
# | `.stage3_gather_16bit_weights_on_model_save` | whole weights for `save_16bit_model` | off |
# | `zero_allow_untested_optimizer` | use ZeRO with SGD and others | they are refused |
# | `steps_per_print`, `wall_clock_breakdown`, `comms_logger`, `flops_profiler` | what is printed | off |
# | `"auto"` for any value | filled in by Transformers or Accelerate | |
#
# Clipping is worth a run of its own, because what it does looks like a numerical error. **Predict**: the configuration
# says nothing of clipping. In which step does its loss first differ from DDP's, counted from 0?

# %%
parted = predict("first step whose loss differs, counted from 0")


# %%
def unclipped(config):
    return train(engine_for(config)[0])


unsaid = {key: value for key, value in config_for(2).items() if key != "gradient_clipping"}
clipped = on_ranks("clipped", unclipped, unsaid)[0]
clipped_ddp = on_ranks("DDP, clipped", train_ddp, 1.0)[0]
for step in range(3):
    print(f"step {step}: off by {clipped[step] - reference[step]:+.4f} from DDP, "
          f"by {abs(clipped[step] - clipped_ddp[step]):.4f} from DDP clipped at 1.0")

# %% jupyter={"source_hidden": true}
assert largest_gap(clipped, clipped_ddp) < 1e-5 < 1e-3 < largest_gap(clipped, reference)
differs = [abs(clipped[step] - reference[step]) > 1e-4 for step in range(3)]
parted.compare(differs.index(True))

# %% [markdown]
# **Compare.** In step 2. The first loss is computed before any update, and the first update of Adam does not depend on
# the scale of the gradient, so two losses agree; only then the gap opens.
#
# It is no error of ZeRO: the run is equal to DDP with clipping at 1.0. Since [pull request
# 8068](https://github.com/deepspeedai/DeepSpeed/pull/8068) a configuration that says nothing clips. The other direction
# hurts as well: GPT-NeoX left `gradient_clipping` out when it was 1.0, its own default, and with the older DeepSpeed
# ran unclipped ([1433](https://github.com/EleutherAI/gpt-neox/pull/1433)). Write the key down.
#
# ## 4. The clinic
#
# Now fourteen configurations, as people write them. `facts` builds an engine from one, takes one step, and asks the
# engine what it has understood. Messages of refusals are kept.


# %%
def facts(config):
    """What an engine made of a configuration, after one step; or the message of its refusal."""
    model = build_gpt(gpt).to(device())
    optimizer = None if "optimizer" in config else adam(model)
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        train(engine, range(1))
    except Exception as error:  # of many kinds: AssertionError, ValidationError, TypeError …
        return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    parameters = list(engine.module.parameters())
    return {
        "stage": engine.zero_optimization_stage(),
        "clipping": engine.gradient_clipping(),
        "accumulation": engine.gradient_accumulation_steps(),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "whole": sum(p.numel() for p in parameters),
    }


# %% jupyter={"source_hidden": true}
def examine(configs):
    return {name: facts(config) for name, config in configs.items()}


def verdict(found, wanted):
    """Right, refused or silent, and the evidence."""
    if "refused" in found:
        return "refused", found["refused"][:88]
    wrong = [f"{k} is {found[k]}, not {value}" for k, value in wanted.items() if found[k] != value]
    return ("silent" if wrong else "right"), ", ".join(wrong)

# %% [markdown]
# Each has what its author **wanted**. A configuration can be *right*, it can be *refused* with a message, or it can run
# and be something else: *silent*. **Predict** which, and write it into `guess`. How many are silent?

# %%
batch = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
adamw = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "max_grad_norm": 1.0}}
clinic = {  # name: (configuration, what its author wanted)
    "A": ({**batch, "zero_optimization": {"stage": 2}}, {"stage": 2}),
    "B": ({**batch, "zero_optimisation": {"stage": 1}}, {"stage": 1}),
    "C": ({**batch, "zero_optimization": {"stage": 2, "reduce_buckets": 1000}}, {"stage": 2}),
    "D": ({**batch, "zero_optimization": {"overlap_comm": False}}, {"stage": 1}),
    "E": ({**batch, "train_batch_size": 7, "gradient_accumulation_steps": 1}, {}),
    "F": ({"train_micro_batch_size_per_gpu": 4}, {"clipping": 0.0}),
    "G": ({**batch, "optimizer": adamw}, {"clipping": 1.0}),
    "H": ({**batch, "bf16": {}, "zero_optimization": {"stage": 1}}, {"dtype": "bfloat16"}),
    "I": ({**batch, "gradient_accumulation": 4}, {"accumulation": 4}),
    "J": ({**batch, "zero_optimization": {"stage": 3}}, {"stage": 3, "whole": 0}),
    "K": ({**batch, "train_batch_size": 8 * world_size}, {"accumulation": 2}),
    "L": ({**batch, "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}, {"stage": 2}),
    "M": ({**batch, "compression_training": {}}, {}),
    "N": ({**batch, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}},
          {"dtype": "bfloat16"}),
}
guess = dict.fromkeys(clinic, "?")  # "right", "refused" or "silent"
silent = predict("silent ones among the clinic's fourteen configurations")

# %%
found = on_ranks("clinic", examine, {name: config for name, (config, _) in clinic.items()})[0]
verdicts = {name: verdict(found[name], wanted) for name, (_, wanted) in clinic.items()}
for name, (what, why) in verdicts.items():
    wrong = "" if guess[name] in ("?", what) else f"(you: {guess[name]}) "
    print(f"{name}  {what:8}{wrong}{why}")

# %% jupyter={"source_hidden": true}
fates = [what for what, _ in verdicts.values()]
assert [fates.count(what) for what in ("right", "refused", "silent")] == [2, 5, 7]
silent.compare(fates.count("silent"))

# %% [markdown]
# **Compare.** Seven are silent, five are refused, one of these (L) with a message that does not help. B trains plain
# data parallelism with twice the optimizer memory, I takes a quarter of the batch, N trains in fp32, and J shards no
# parameter, since none has 100,000 elements. The losses look healthy in all seven.
#
# What counts is *where* the fault is. A section that is a data model has a fixed list of fields, and refuses any other
# key: `zero_optimization`, `bf16`, `fp16`, `comms_logger`, `tensor_parallel`, `compile` and those of monitors. At the
# top level, and in older sections (`activation_checkpointing`, `aio`, `checkpoint`, `flops_profiler`,
# `torch_autocast`), DeepSpeed asks the dictionary for the keys it knows, and never looks at the rest.
#
# Files that were written for Transformers are full of `"auto"`. Given to DeepSpeed alone, a data model drops each of
# them and takes its default, so `"stage": "auto"` trains at stage 0. At the top level the text stays, until somebody
# compares it with a number.
#
# Now mend them. Below is one mend for each; **change `mended` first**, if you like, and look at ours afterwards.

# %% jupyter={"source_hidden": true}
mended = {
    "B": {**batch, "zero_optimization": {"stage": 1}},
    "C": {**batch, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}},
    "D": {**batch, "zero_optimization": {"stage": 1, "overlap_comm": False}},
    "E": {**batch, "train_batch_size": 4 * world_size},
    "F": {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0},
    "G": {**batch, "gradient_clipping": 1.0},
    "H": {**batch, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "I": {**batch, "gradient_accumulation_steps": 4},
    "J": {**batch, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "L": {**batch, "zero_optimization": {"stage": 2}},
    "M": batch,
    "N": {**batch, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
}

# %%
again = on_ranks("mended", examine, mended)[0]
left = {name: verdict(again[name], clinic[name][1]) for name in mended}
wrong = [f"{name}: {why}" for name, (what, why) in left.items() if what != "right"]
print(f"{len(left) - len(wrong)} of {len(left)} are right now", *wrong, sep="\n")

# %% [markdown]
# ## 5. A linter
#
# The library stopped a few of these. The others need somebody who knows which keys exist.
# DeepSpeed has no list of its top-level keys, but there is a way to get one from the library itself: give it a
# dictionary that **notes what it is asked for**, in `get` and in `in`.

# %% jupyter={"source_hidden": true}
folded("A dictionary that notes its keys", Asked)


# %%
def known_keys():
    seen = set()
    deepspeed.runtime.config.DeepSpeedConfig(Asked({"train_batch_size": 8}, seen))
    return sorted(seen)


known = runs("known keys", known_keys, world_size=1)[0]
for key in ("zero_optimisation", "gradient_accumulation", "steps_per_prnt"):
    print(f"{key}: known {key in known}; nearest: {difflib.get_close_matches(key, known, 1)[0]}")

# %% [markdown]
# That is the core of a linter: the keys that are not in the list, and for each the nearest that is. The course has it
# as `check_config`, with the traps of this lesson and the types of values beside it, and as a command: `python -m
# tools check-deepspeed config.json`, whose last line says what will really run. It has three levels: *refused*,
# *silent*, and *note* for what may be meant so.
#
# **Predict** how many of the clinic's twelve wrong configurations it can only note.

# %%
noted = predict("only noted by the linter, among the twelve wrong configurations")

# %%
levels = {}
for name, (config, _) in clinic.items():
    said = check_config(config, world_size)
    levels[name] = [finding.level for finding in said]
    if said:
        print(f"{name}: {said[0]}"[:118])

# %% jupyter={"source_hidden": true}
for name, (what, _) in verdicts.items():
    assert what == "right" or levels[name][0] in (what, "note"), name
    assert what != "right" or set(levels[name]) <= {"note"}, name
wrong_ones = [name for name, (what, _) in verdicts.items() if what != "right"]
noted.compare(sum(levels[name][0] == "note" for name in wrong_ones))

# %% [markdown]
# **Compare.** Two, F and J, because what the author wanted is not in the file: leaving clipping out may be meant.
#
# `"auto"` is right in the hands of Transformers; `--auto` tells the linter that somebody will fill it in. Held so
# against 17 configurations from [DeepSpeedExamples](https://github.com/deepspeedai/DeepSpeedExamples), it raises no
# false alarm. But it does find faults in four of them: three use sections that were removed in 2026, which 0.19.8
# refuses, and one says `cuda_visible_devices`, which is passed over.
#
# What a linter cannot see is code. The clearest example is `batch_dim_idx` of section 12.
#
# ## 6. FSDP2 or DeepSpeed
#
# The comparison, by what was measured here and by sources. Time is not in it, since CPU ranks say nothing of it: time
# both on your own cluster.
#
# | | DeepSpeed 0.19.8 | FSDP2 (PyTorch 2.13) | from |
# |---|---|---|---|
# | losses of this model | equal to DDP, to 1e-6 | equal to DDP, to 1e-6 | section 2 |
# | optimizer state per rank | 1/N from stage 1 on | 1/N | section 2 |
# | ZeRO-1 and 2 as such | yes | no; the nearest is `reshard_after_forward=False` | sections 2, 14 |
# | all-gathers in a step | one, if all may stay; else two a module or leaf | two a unit, one for the root | section 2 |
# | another number of ranks | offline conversion | at loading | section 7 |
# | mistakes in the set-up | silent at the top level | Python: unknown arguments are refused | section 4 |
# | part of the optimizer on the CPU, NVMe | yes | no | sections 9, 13 |
# | `torch.compile` (not run here) | `engine.compile()`; DeepCompile | block by block | section 13 |
# | TP, PP, CP beside it | AutoTP, PipelineModule, Ulysses | DTensor on one mesh | sections 11, 12 |
# | dependencies | 10 packages with itself; C++ compiled at use | none | `pip` |
#
# And what projects with both, or before a move, say. Each is one team's report, not a measurement of ours.
#
# **For FSDP.**
#
# - [verl 221](https://github.com/verl-project/verl/issues/221), February 2025: dropped DeepSpeed for lack of hands;
#   found FSDP as good or better.
# - [SkyRL 827](https://github.com/NovaSky-AI/SkyRL/pull/827), January 2026: three backends were too much to test, and
#   most users did not use DeepSpeed.
#
# **For DeepSpeed.**
#
# - [verl 3361](https://github.com/verl-project/verl/issues/3361), September 2025: a user wants it back, for ZeRO-2 and
#   3 and for offload, and has written the code; it stands on
#   [DeepSpeed's roadmap](https://github.com/deepspeedai/DeepSpeed/issues/7705).
# - [OpenRLHF 1115](https://github.com/OpenRLHF/OpenRLHF/pull/1115), August 2025: proposes FSDP beside DeepSpeed, which
#   stays the default where speed counts.
# - [open-instruct 1095](https://github.com/allenai/open-instruct/issues/1095): a move would gain `torch.compile` and
#   save a dependency, but lose ZeRO-1 and ZeRO-2.
#
# **The trap of any move** is precision. DeepSpeed keeps fp32 master weights of a bf16 model, FSDP takes the model's
# dtype. Accelerate has cast up for FSDP1 since [2674](https://github.com/huggingface/accelerate/pull/2674); for FSDP2
# the cast of version 1.13.0 did nothing ([3979](https://github.com/huggingface/accelerate/issues/3979)), and that
# of 1.15.0 works again. Print the dtype of your parameters.
#
# ### Which one?
#
# 1. Does a Hugging Face configuration for DeepSpeed run and fit? **Keep it**, run the linter over it, and write
#    clipping down.
# 2. Does the model fit on a GPU with its gradients, but not with its optimizer? **ZeRO-1**, or ZeRO-2: no gather in
#    forward. Time it with and without `use_multi_rank_bucket_allreduce` (section 2).
# 3. Is GPU memory short even when all is sharded? **DeepSpeed** for a part of the optimizer on the CPU, or for NVMe.
# 4. Do you want to compile, to combine with TP, PP or CP, to change the number of ranks between runs, or to debug what
#    you have written yourself? **FSDP2**.
# 5. Otherwise **FSDP2**: nothing to install, and mistakes are Python errors.
#
# ### What to take to work
#
# [scripts/train.py](../scripts/train.py) trains with either. With `--engine deepspeed` it takes the stage, the buckets
# and the offload from a [JSON file](../scripts/deepspeed.json), and everything else from its own flags, so that the two
# cannot disagree. The loop is in [engine_deepspeed.py](../scripts/engine_deepspeed.py). On a cluster:
# `torchrun --nproc-per-node=8 scripts/train.py --engine deepspeed --config scripts/deepspeed.json …`. Here the same
# program runs on our ranks, with both engines, clipping and two micro-batches.


# %% jupyter={"source_hidden": true}
def trained(out, *flags):
    """Run the program as torchrun does; returns the loss of each step, from its log."""
    sys.path.insert(0, "../scripts")
    sys.argv = ["train.py", f"--out={out}", f"--data={TEXT}", *flags]
    with contextlib.suppress(SystemExit), quiet():
        runpy.run_path("../scripts/train.py", run_name="__main__")
    return [json.loads(line)["loss"] for line in Path(out, "log.jsonl").read_text().splitlines()]


# %%
small = ["--layers=2", "--hidden=32", "--length=16", "--steps=4", "--log-every=1", "--micro=2"]
small += [f"--batch={4 * world_size}"]
by_json = ["--engine=deepspeed", "--config=../scripts/deepspeed.json"]
with tempfile.TemporaryDirectory() as out:
    ours = on_ranks("train.py", trained, f"{out}/a", *small, init=False)[0]
    theirs = on_ranks("with DeepSpeed", trained, f"{out}/b", *small, *by_json, init=False)[0]
print(f"scripts/train.py, 4 steps, both engines: equal to 1e-5: {largest_gap(ours, theirs) < 1e-5}")
assert len(ours) == 4 and largest_gap(ours, theirs) < 1e-5

# %% [markdown] tags=["deeper"]
# ## 7. Checkpoints · deeper
#
# A sharded run writes sharded checkpoints, and the question is always who can read them. First the same number of
# ranks, 2N of them, and then N.

# %% tags=["deeper"]
folder = Path(tempfile.mkdtemp())


def save(folder):
    engine, _ = engine_for(config_for(3, **ALL))
    train(engine, range(2))
    engine.save_checkpoint(folder, tag="two")
    return train(engine, range(2, 4))


def load(folder, tag="two"):
    """Load a checkpoint and go on; or the reason why not."""
    engine, _ = engine_for(config_for(3, **ALL))
    try:
        engine.load_checkpoint(folder, tag=tag)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return train(engine, range(2, 4))

# %% [markdown] tags=["deeper"]
# A run saves after two steps and trains two more; another engine loads and repeats them. **Predict** how close the
# losses come on as many ranks.

# %% tags=["deeper"]
closeness = ["to about 1e-3", "to about 1e-6", "to the last bit"]
close = predict("losses after loading, on as many ranks", closeness)

# %% tags=["deeper"]
went_on = runs("save", save, str(folder), world_size=2 * world_size)[0]
resumed = runs("load", load, str(folder), world_size=2 * world_size)[0]
on_fewer = on_ranks("load on fewer", load, str(folder))[0]
print(f"on 2N ranks: next losses off by at most {largest_gap(resumed, went_on)}")
print(f"on N ranks:  {on_fewer[:99]} …")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert resumed == went_on and "DP world size" in on_fewer
close.compare("to the last bit")

# %% [markdown] tags=["deeper"]
# **Compare.** To the last bit on the same number of ranks. On another one DeepSpeed refuses: each file holds one rank's
# flat shard, and it does not cut it anew at loading.
#
# The way out is the **universal checkpoint**, a conversion offline. It writes a folder for each parameter, with its
# weights and Adam's two moments whole, and any stage-3 run can take its part from there (`python -m
# deepspeed.checkpoint.ds_to_universal` as a command; here the same function is called on one rank).


# %% tags=["deeper"]
def convert(folder, to):
    """Convert a checkpoint; returns its size and the largest difference from the fp32 export."""
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    sys.argv = ["", "--input_folder", f"{folder}/two", "--output_folder", f"{folder}/{to}"]
    sys.argv += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    with quiet():
        ds_to_universal.main(ds_to_universal.parse_arguments())
        exported = get_fp32_state_dict_from_zero_checkpoint(folder, tag="two")
    gap, numbers = 0.0, 0
    for file in Path(folder, to, "zero").glob("*/fp32.pt"):  # one folder a parameter
        stored = torch.load(file, weights_only=False)
        gap = max(gap, (stored.view(-1) - exported[file.parent.name].view(-1)).abs().max().item())
        numbers += stored.numel()
    return numbers, gap

# %% [markdown] tags=["deeper"]
# Loading is asked for by `"checkpoint": {"load_universal": true}`. After it, weights and Adam's first moments are
# compared with the files, value by value.


# %% tags=["deeper"]
def values_after_loading(folder, tag):
    """Largest difference of weights and first moments from the files, after loading."""
    engine, _ = engine_for(config_for(3, **ALL) | {"checkpoint": {"load_universal": True}})
    engine.load_checkpoint(folder, tag=tag)
    gaps = []
    for name, p in engine.module.named_parameters():
        weight = deepspeed.utils.safe_get_full_fp32_param(p)
        moment = deepspeed.utils.safe_get_full_optimizer_state(p, "exp_avg")
        for kind, value in (("fp32", weight), ("exp_avg", moment)):
            stored = torch.load(f"{folder}/{tag}/zero/{name}/{kind}.pt", weights_only=False)
            gaps.append((value.cpu().view(-1) - stored.view(-1)).abs().max().item())
    return [max(gaps), train(engine, range(2, 4))]


# %% tags=["deeper"]
import shutil

numbers, apart = runs("convert", convert, str(folder), "universal", world_size=1)[0]
print(f"universal checkpoint of {numbers:,} numbers; the fp32 export differs by {apart}")
gap, on_half = on_ranks("load universal", values_after_loading, str(folder), "universal")[0]
print(f"on N ranks: weights and moments differ from the files by {gap}; the run goes on")
assert apart == gap == 0.0 and numbers == gpt.parameter_count
shutil.rmtree(folder)

# %% [markdown] tags=["deeper"]
# Nothing is lost on the way: weights and moments are equal to the last bit on half the ranks. (The losses that follow
# are of other batches, because N ranks take half as many windows.) The same function that exports fp32 weights serves
# for publishing a model; the script `zero_to_fp32.py` that lies in each checkpoint does it without your code, but needs
# the package `huggingface_hub`.
#
# FSDP2 needs no conversion, because its files know each tensor's shape and place.


# %% tags=["deeper"]
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def fsdp2(seed=0):
    model = build_gpt(gpt, seed=seed).to(device())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, adam(model)


def whole_sum(model):
    """The sum of all weights, a fingerprint that does not depend on the number of ranks."""
    return sum(p.full_tensor().double().sum().item() for p in model.parameters())


def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

# %% [markdown] tags=["deeper"]
# Another seed makes sure that what is compared afterwards comes from the files.


# %% tags=["deeper"]
def save_fsdp2(folder):
    model, optimizer = fsdp2()
    loss_of(model, *my_part(0)).backward()
    optimizer.step()
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return whole_sum(model)


def load_fsdp2(folder):
    model, optimizer = fsdp2(seed=1)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)  # each rank reads its part
    weights, moments = state["model"], state["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return whole_sum(model)


with tempfile.TemporaryDirectory() as place:
    saved = launch(save_fsdp2, place, world_size=2 * world_size)[0]
    loaded = launch(load_fsdp2, place, world_size=world_size)[0]
print(f"FSDP2, saved on 2N ranks, loaded on N: same weights {abs(saved - loaded) < 1e-9}")
assert abs(saved - loaded) < 1e-9

# %% [markdown] tags=["deeper"]
# The lines that load on the same ranks load on any.

# %% [markdown] tags=["deeper"]
# ## 8. zero.Init: a model that is never whole · deeper
#
# A model that fits on no rank must never be whole, not even while it is built. `zero.Init` is DeepSpeed's way: each
# parameter is sharded the moment its module has been constructed. Our `GPT` makes all modules in its constructor, and
# *then* draws their weights with `nn.init`.
#
# **Predict** the first loss of a model that is built so under `zero.Init`. Without it the first loss is 4.8.

# %% tags=["deeper"]
first_loss = predict("first loss of a model built under zero.Init")

# %% tags=["deeper"]
sharded = config_for(3, **ALL)


def built_in_shards():
    with deepspeed.zero.Init(config_dict_or_path=sharded):
        model = GPT(gpt)
    p = model.blocks[0].attention.out.weight
    losses = train(engine_for(sharded, model)[0], range(1))
    return list(p.shape), list(p.ds_shape), p.ds_tensor.numel(), losses


shape, full, held, (first,) = on_ranks("zero.Init", built_in_shards)[0]
print(f"a weight of {full} has shape {shape}, and {held} numbers lie on this rank")
print(f"first loss {first:.1f}, without zero.Init {reference[0]:.1f}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert first > 3 * reference[0] and shape == [0]
first_loss.compare(round(first, 1))

# %% [markdown] tags=["deeper"]
# **Compare.** About 40. `nn.init.normal_` found tensors of shape (0,) and filled them, without a complaint. What stayed
# is what each module had drawn in its own constructor; embeddings start with a standard deviation of 1 there, which is
# far too much.
#
# The loss is the only witness. Draw weights inside of each module's constructor, or load them, or fill them: gather a
# parameter, write it on one rank, let it be sharded again.


# %% tags=["deeper"]
def filled():
    whole = build_gpt(gpt)
    with deepspeed.zero.Init(config_dict_or_path=sharded):
        model = GPT(gpt)
    for p, weight in zip(model.parameters(), whole.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
            if dist.get_rank() == 0:
                with torch.no_grad():
                    p.copy_(weight)
    return train(engine_for(sharded, model)[0])


# %% tags=["deeper"]
gap = largest_gap(on_ranks("filled", filled)[0], reference)
print(f"filled through GatheredParameters: losses equal to 1e-6: {gap < 1e-6}")
assert gap < 1e-6

# %% [markdown] tags=["deeper"]
# FSDP2's way is to build on the meta device, `to_empty`, and your own init. It has a guard, but only before `to_empty`.


# %% tags=["deeper"]
def unfilled(materialised):
    with torch.device("meta"):
        model = GPT(gpt)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if materialised:
        model.to_empty(device=device())
    return list(loss_of(model, *my_part(0)).shape)


for materialised in (False, True):
    with attempt():
        launch(unfilled, materialised, world_size=world_size)
        print("no complaint, to_empty called:", materialised)

# %% [markdown] tags=["deeper"]
# After `to_empty` nothing complains: the memory holds whatever bytes lay there, and the loss of such a model may be
# infinite, or look healthy if they were zeros. Buffers such as rotary tables need your init as well.

# %% [markdown] tags=["deeper"]
# ## 9. Offload: estimated, measured · deeper
#
# The library has estimators of the memory that a run needs. By the paper's 16 bytes a parameter, 7·10⁹ parameters on 8
# GPUs under ZeRO-3 are 14.0 GB on each. **Predict** what the estimator says, for a largest layer of 131·10⁶.

# %% tags=["deeper"]
says = ["less", "the same", "more"]
estimate = predict("the estimator of ZeRO-3, against 14.0 GB", says)


# %% tags=["deeper"]
def estimates():
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage_3
    from deepspeed.runtime.zero.stage_1_and_2 import (
        estimate_zero2_model_states_mem_needs as stage_2,
    )

    size, layer = 7e9, 131e6
    rows = {"ZeRO-2": stage_2(size, 8, cpu_offload=False)}
    rows["ZeRO-2, optimizer on CPU"] = stage_2(size, 8)
    rows["ZeRO-3"] = stage_3(size, layer, 8, cpu_offload=False)
    rows["ZeRO-3, optimizer on CPU"] = stage_3(size, layer, 8, cpu_offload_params=False)
    rows["ZeRO-3, both on CPU"] = stage_3(size, layer, 8)
    return {name: [found[1] / 1e9, found[0] / 1e9] for name, found in rows.items()}


for name, (gpu, cpu) in runs("estimates", estimates, world_size=1)[0].items():
    print(f"{name:26} {gpu:6.2f} GB on a GPU, {cpu:6.1f} GB of host memory")

# %% jupyter={"source_hidden": true} tags=["deeper"]
rows = runs.results["estimates"][0]
assert abs(rows["ZeRO-3"][0] - (18 * 7 / 8 + 4 * 0.131)) < 0.01
assert abs(rows["ZeRO-2"][0] - (2 * 7 + 18 * 7 / 8)) < 0.01
assert rows["ZeRO-2"][1] == 1.5 * 4 * 7 * 8
estimate.compare("more")

# %% [markdown] tags=["deeper"]
# **Compare.** More: 16.27 GB. It counts 18 bytes, the paper's states in fp32 (weights, gradients, two moments: 16) and
# a 16-bit copy of the weights (2). To that comes the largest layer with 4 bytes, since its 16-bit weights and gradients
# are whole for a moment. For ZeRO-2 it is 2 bytes for whole weights, and 18/N.
#
# The host memory needs an explanation too. Where nothing is offloaded it is needed only while the model is built: each
# of the 8 processes builds it whole in fp32, 8 · 4 · 7 GB, and half as much is added for buffers. `zero.Init` does
# without. Hold any estimate against a measurement of your own model.
#
# Offload itself: the optimizer, or optimizer and parameters, live in host memory. Here everything is host memory, so
# the memory gained cannot be shown; that the losses stay can. `zero_force_ds_cpu_optimizer` is off so that PyTorch's
# AdamW is taken instead of `DeepSpeedCPUAdam`, which has to be compiled, and which a real run should use.


# %% tags=["deeper"]
def offloaded():
    cpu, out = {"device": "cpu"}, {}
    ways = {"optimizer": config_for(2, offload_optimizer=cpu)}
    both = {"offload_optimizer": cpu, "offload_param": cpu}
    ways["optimizer and parameters"] = config_for(3, **ALL, **both)
    for name, config in ways.items():
        out[name] = train(engine_for(config | {"zero_force_ds_cpu_optimizer": False})[0])
    return out


for name, losses in on_ranks("offload", offloaded)[0].items():
    print(f"{name} offloaded: losses equal to 1e-6: {largest_gap(losses, reference) < 1e-6}")
    assert largest_gap(losses, reference) < 1e-6

# %% [markdown] tags=["deeper"]
# On NVMe (`"device": "nvme"`, with a path and the section `aio`) the same states are written to a drive and read back
# in each step: 12 bytes a parameter both ways, lesson 06, section 14. It needs the extension `async_io`, compiled
# against libaio, and was not run here.

# %% [markdown] tags=["deeper"]
# ## 10. The communication logger, audited · deeper
#
# `comms_logger` times each message. A profiler is checked before it is believed, and a clock around the same calls is
# enough. **Predict**: 20 all-reduces of 1 MiB. How many times the wall clock is the logger's total?

# %% tags=["deeper"]
inflated = predict("the logger's total", unit="times the wall clock")


# %% tags=["deeper"]
def audited(calls=20):
    """Wall time of some all-reduces, and what the communication logger has noted of each, in ms."""
    logger = deepspeed.comm.comm.comms_logger
    x = torch.ones(1 << 18, device=device())
    deepspeed.comm.all_reduce(x)  # a warm-up that is not noted
    logger.comms_dict.clear()
    deepspeed.comm.configure(enabled=True, prof_all=True)
    start = time.perf_counter()
    for _ in range(calls):
        deepspeed.comm.all_reduce(x)
    wall = 1e3 * (time.perf_counter() - start)
    noted = logger.comms_dict["all_reduce"][x.nbytes][1]
    logger.enabled = False
    return [wall, noted]


# %% tags=["deeper", "nbval-ignore-output"]
wall, latencies = on_ranks("logger", audited)[0]
print(f"wall clock {wall:.1f} ms, logger's total {sum(latencies):.1f} ms")
print("its latencies, ms:", *[f"{latency:.1f}" for latency in latencies])

# %% jupyter={"source_hidden": true} tags=["deeper", "nbval-ignore-output"]
growing = all(a < b for a, b in zip(latencies, latencies[1:], strict=False))
assert growing and sum(latencies) > wall and latencies[-1] <= wall
inflated.compare(sum(latencies) / wall)

# %% [markdown] tags=["deeper"]
# **Compare.** About ten times: each entry is the *sum* of all calls up to it, because the timer is read without being
# reset (`elapsed(reset=False)` in `deepspeed/comm/comm.py`). For n equal calls the total is (n + 1)/2 times too large,
# and the bandwidth derived from it as much too small.
#
# The last entry is the one to use: it is the time of all calls together. The logger also waits for the GPU after each
# call, so what overlapped without it does not overlap with it.

# %% [markdown] tags=["deeper"]
# ## 11. Activation checkpointing, and a pipeline · deeper
#
# DeepSpeed has an activation checkpointing of its own, which can also shard or offload what it keeps, and a pipeline
# that is built from a list of layers. The pipeline's engine owns the whole step: `train_batch` takes an iterator, and
# forward, backward and `step` are not yours any more.


# %% tags=["deeper"]
class Recomputed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return deepspeed.checkpointing.checkpoint(self.block, x)


def recomputed():
    options = config_for(2) | {"activation_checkpointing": {}}
    deepspeed.checkpointing.configure(None, deepspeed_config=options)
    model = build_gpt(gpt).to(device())
    model.blocks = nn.ModuleList(map(Recomputed, model.blocks))
    return train(engine_for(config_for(2), model)[0])


# %% tags=["deeper"]
class Embedded(nn.Module):
    """The first layer of the pipeline: tokens (B, T) to (B, T, hidden)."""

    def __init__(self, model):
        super().__init__()
        self.embedding, self.position = model.embedding, model.position

    def forward(self, tokens):
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.embedding(tokens) + self.position(places)


def micro_batches(steps=3, each=2, of=4):
    for first in range(0, steps * each * of, each):
        yield windows.batch(range(first, first + each), device())

# %% [markdown] tags=["deeper"]
# Four micro-batches of two windows make a step. The list of layers is cut into two stages of about equal length.


# %% tags=["deeper"]
def two_stages():
    model = build_gpt(gpt).to(device())
    head = nn.Linear(gpt.hidden, gpt.vocabulary, bias=False).to(device())
    with torch.no_grad():
        head.weight.copy_(model.head.weight)  # untied: see below
    layers = [Embedded(model), *model.blocks, model.norm, head]
    with quiet():
        pipeline = deepspeed.pipe.PipelineModule(
            layers=layers, num_stages=2, loss_fn=next_token_loss, partition_method="uniform"
        )
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(
        model=pipeline, optimizer=adam(pipeline), config=config, dist_init_required=False
    )
    data = micro_batches()
    with record() as ledger:
        losses = [float(engine.train_batch(data_iter=data)) for _ in range(3)]
    return losses, ledger.count("send"), ledger.count("recv")

# %% [markdown] tags=["deeper"]
# One process does the same, with the embedding and the head as two weights.


# %% tags=["deeper"]
def untied():
    """One process, the head a copy of the embedding: what the pipeline must equal."""
    model = build_gpt(gpt).to(device())
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    optimizer, losses, data = adam(model), [], micro_batches()
    for _ in range(3):
        parts = [loss_of(model, *next(data)) for _ in range(4)]
        loss = sum(parts) / 4
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# %% tags=["deeper"]
gap = largest_gap(on_ranks("recomputed", recomputed)[0], reference)
print(f"with activation checkpointing: losses equal to 1e-6: {gap < 1e-6}")
losses, sent, received = runs("pipeline", two_stages, world_size=2)[0]
apart = largest_gap(losses, runs("one process", untied, world_size=1)[0])
print(f"pipeline of 2 stages: losses equal to 1e-5: {apart < 1e-5}")
print(f"rank 0 sent {sent} messages and received {received}")
assert gap < 1e-6 and apart < 1e-5

# %% [markdown] tags=["deeper"]
# Two things are simpler here than in a real run. Each rank builds all layers and keeps its own; with `LayerSpec` it
# builds only those. And the head is untied from the embedding; `TiedLayerSpec` keeps one weight on both stages.
#
# Twelve activations go out in three steps of four micro-batches and twelve gradients come back; the first send
# announces the shapes. PyTorch's own pipeline (lesson 10) leaves you the schedule and the loop.

# %% [markdown] tags=["deeper"]
# ## 12. Ulysses and AutoTP · deeper
#
# Ulysses splits the sequence over ranks, and for attention it changes to heads by all-to-all (lesson 11).
# `DistributedAttention` does it around any attention function. It has to be told which dimension the batch is.


# %% tags=["deeper"]
def attention(q, k, v, *_):
    """Causal attention over (sequence, batch, heads, size)."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.permute(2, 0, 1, 3).contiguous()


def ulysses(batch_dim):
    """Error against one process, and the messages."""
    from deepspeed.sequence.layer import DistributedAttention

    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = torch.randn(3, 8 * ranks, 3, 2 * ranks, 8, device=device())
    mine = [x.chunk(ranks)[rank].contiguous() for x in (q, k, v)]
    split = DistributedAttention(attention, dist.group.WORLD, scatter_idx=2, gather_idx=0)
    with record() as ledger:
        out = split(*mine, batch_dim_idx=batch_dim)
    error = (out - attention(q, k, v).chunk(ranks)[rank]).abs().max().item()
    return error, ledger.count("all_to_all")

# %% [markdown] tags=["deeper"]
# The layout is (sequence, batch, heads, size), so the batch is dimension 1. **Predict** which ranks are wrong with
# `batch_dim_idx=0`.

# %% tags=["deeper"]
which = ["none: it is refused", "only rank 0", "all but rank 0", "all"]
wrong_ranks = predict("ranks that are wrong with batch_dim_idx=0", which)

# %% tags=["deeper"]
right = {}
for batch_dim in (1, 0):
    found = on_ranks(f"ulysses {batch_dim}", ulysses, batch_dim)
    right[batch_dim] = [error < 1e-5 for error, _ in found]
    print(f"batch_dim_idx={batch_dim}: right, by rank: {right[batch_dim]}")
    print(f"  {found[0][1]} all-to-alls")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert all(right[1]) and right[0] == [True] + (world_size - 1) * [False]
wrong_ranks.compare("all but rank 0")

# %% [markdown] tags=["deeper"]
# **Compare.** All but rank 0: the shapes fit, and each rank attends only to its own piece of the sequence. Rank 0 has
# the beginning, and causal attention never looks beyond that, so a check there, or a loss printed there, shows nothing.
#
# **AutoTP** shards linear layers by a rule in the configuration: column or row, by the name. For models that it does
# not know, a pattern for each layer is needed. Our attention takes its number of heads from the module, so that has to
# be halved by hand: AutoTP splits weights, it does not read code.

# %% tags=["deeper"]
RULES = [
    {
        "patterns": [r".*qkv\.weight$"], "partition_type": "column",
        "shape": [3, -1], "partition_dim": 0,  # three matrices in one: each is split
    },
    {"patterns": [r".*up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*(out|down)\.weight$"], "partition_type": "row"},
]

# %% [markdown] tags=["deeper"]
# The rules name layers by patterns. `qkv` is three matrices in one, and the rule has to say so, or heads would be torn
# apart.


# %% tags=["deeper"]
def auto_tp():
    rules = {"use_default_specs": False, "layer_specs": RULES}
    split = {"tensor_parallel": {"autotp_size": 2, "partition_config": rules}}
    config = config_for(0) | {"train_micro_batch_size_per_gpu": 8} | split
    engine, _ = engine_for(config)
    block = engine.module.blocks[0]
    for each in engine.module.blocks:
        each.attention.heads //= 2
    losses = []
    for step in range(3):
        same = windows.batch(range(8 * step, 8 * step + 8), device())  # on both ranks
        loss = loss_of(engine, *same)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return list(block.attention.qkv.weight.shape), list(block.mlp.down.weight.shape), losses


# %% tags=["deeper"]
qkv, down, losses = runs("AutoTP", auto_tp, world_size=2)[0]
print(f"qkv {qkv}, down {down} on each of 2 ranks")
reference_of_8 = runs("DDP on 2", train_ddp, world_size=2)[0]  # 4 windows each: the same 8
print(f"losses equal to data parallelism, to 1e-5: {largest_gap(losses, reference_of_8) < 1e-5}")
assert largest_gap(losses, reference_of_8) < 1e-5

# %% [markdown] tags=["deeper"]
# ## 13. hpZ, and what was not run here · deeper
#
# hpZ is the part of ZeRO++ that moves no fewer bytes but moves them over shorter links. A second copy of the weights is
# kept inside of each node, so that the gather for backward stays there. Here are 4 ranks in nodes of 2.


# %% tags=["deeper"]
def hpz():
    config = config_for(3, **ALL, zero_hpz_partition_size=2) | {"bf16": {"enabled": True}}
    engine, _ = engine_for(config)
    with record() as ledger:
        losses = train(engine)
    groups = sorted({entry.ranks for entry in ledger if entry.op == "all_gather"})
    return losses, groups


losses, groups = runs("hpZ", hpz, world_size=4)[0]
print(f"rank 0 gathers in the groups {groups}; losses {[round(loss, 2) for loss in losses]}")
assert [0, 1] in groups and [0, 1, 2, 3] in groups

# %% [markdown] tags=["deeper"]
# Forward gathers over all ranks, backward in the node. The price is memory: each node holds the weights once more.
#
# The rest needs GPUs, a compiled extension or drives that are not here. What it is, *recorded* from the sources named:
#
# - **ZeRO++**, besides hpZ: qwZ gathers weights in 8 bits, qgZ reduces gradients by quantised all-to-alls. All three
#   together are said to send a quarter of ZeRO-3's bytes
#   ([tutorial](https://deepspeed.ai/tutorials/zeropp)). Both fail on a CPU, since the quantiser is a CUDA extension.
# - **ZeRO-Infinity**: parameters and optimizer on NVMe. Section 9.
# - **SuperOffload**: offload for machines whose CPU and GPU share a fast link (GH200, GB200, MI300A). One key,
#   `super_offload`, and a ratio. Its authors report up to about 500 TFLOP/s on a GH200, half as much again as with
#   ZeRO-Offload
#   ([examples](https://github.com/deepspeedai/DeepSpeedExamples/tree/master/training/DeepSpeed-SuperOffload)).
# - **ALST**: Ulysses for Hugging Face models together with MLP and loss computed in tiles and activations offloaded,
#   said to reach 15 million tokens ([paper](https://arxiv.org/abs/2506.13996)). Transformers takes its Ulysses part.
# - **DeepCompile**: sharding, gathers and offload become passes of a compiler over the graph, scheduled by a profile of
#   the first steps ([description](https://github.com/deepspeedai/DeepSpeed/blob/master/blogs/deepcompile/README.md)).
# - **Newer**: `torch_autocast` (precision by operation), `bf16_master_weights_and_grads` and `bf16_optimizer_states` in
#   the section `bf16` (smaller states), AutoEP (experts over ranks), Muon, ZenFlow (offload that stalls the GPU less).
#
# Some names in older texts lead nowhere since 2026: MiCS, compression, elasticity, sparse attention, Apex AMP and
# others were removed, and 0.19.8 refuses their keys ([8489](https://github.com/deepspeedai/DeepSpeed/issues/8489)).

# %% [markdown] tags=["deeper"]
# ## 14. A configuration moved, both ways · deeper
#
# A configuration of DeepSpeed's becomes a few lines for FSDP2, key by key:
#
# | DeepSpeed | FSDP2 | to know |
# |---|---|---|
# | `"stage": 3` | `fully_shard(block)` …, `fully_shard(model)` | you choose the units |
# | `"stage": 2` | `reshard_after_forward=False` | parameters are sharded between steps, so not the same |
# | `"stage": 1` | none; `ZeroRedundancyOptimizer` around DDP | |
# | `gradient_accumulation_steps` | a loop; loss divided; `set_requires_gradient_sync(False)` | the engine divides |
# | `gradient_clipping` | `clip_grad_norm_(model.parameters(), c)` | write it in both |
# | `bf16` | `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` | on an **fp32** model, for its master weights |
# | `communication_data_type` | `reduce_dtype=torch.float32` in the policy | else FSDP2 reduces in `param_dtype` |
# | `offload_param` and `offload_optimizer` on `"cpu"` | `CPUOffloadPolicy()` | FSDP2: both or none |
# | `offload_*` on `"nvme"`, `ratio` | none | |
# | `zero_hpz_partition_size` | a 2-D mesh (HSDP) is the nearest | hpZ copies weights in a node, HSDP all states |
# | `stage3_prefetch_bucket_size` | `set_modules_to_forward_prefetch` | |
# | `zero.Init()` | `torch.device("meta")`, then `to_empty` and your init | section 8 |
# | `save_checkpoint` | `dcp.save` | section 7 |
# | `tensor_parallel` | `parallelize_module` on a mesh dimension | lesson 09 |
# | `engine.backward`, `engine.step` | `loss.backward()`, `optimizer.step()`, `zero_grad()` | section 1 |
#
# Read from right to left it is the way back. Here is one with accumulation and clipping, on both sides. The engine
# divides the loss by the accumulation steps, your loop has to do it itself.

# %% tags=["deeper"]
moving = config_for(3, **ALL) | {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}


def there(config):
    return train(engine_for(config)[0], range(6))


def moved():
    model, optimizer = fsdp2()
    losses = []
    for step in range(6):
        last = step % 2 == 1
        model.set_requires_gradient_sync(last)
        loss = loss_of(model, *my_part(step))
        (loss / 2).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


# %% tags=["deeper"]
before, after = on_ranks("before the move", there, moving)[0], on_ranks("after the move", moved)[0]
gap = largest_gap(before, after)
print(f"3 steps of 2 micro-batches, clipped at 0.5: losses equal to 1e-5: {gap < 1e-5}")
assert gap < 1e-5

# %% [markdown]
# ## Recap, with the numbers of this run

# %%
wrong = [what for what, _ in verdicts.values() if what != "right"]
for name in ("DDP", "ZeRO-2", "ZeRO-2 owner", "ZeRO-3", "ZeRO-3 freed"):
    print(f"{name:13} sends {table[name]['sent']:.0f} Ψ(N−1)/N numbers in a step")
print(f"clinic: {wrong.count('refused')} refused, {wrong.count('silent')} silent, of {len(clinic)}")

# %% [markdown]
# - The engine takes over `step`, and since 0.18.3 stages 1 to 3 take PyTorch's `backward`. Losses are those of DDP;
#   where they are not, look for clipping first.
# - Stages 1 and 2 reduce gradients by all-reduce unless told otherwise. Stage 3 keeps gathered weights while they are
#   few. The ledger shows both in a minute.
# - Stage 3 gathers by module; `leaf_module` makes it gather by block, and models with experts need it.
# - A key that DeepSpeed does not know is refused inside `zero_optimization` and passed over at the top level. `"auto"`
#   means something to Transformers and Accelerate only.
# - Checkpoints resume exactly on the same number of ranks. For any other there is the universal checkpoint, offline;
#   FSDP2 reshards as it loads.
# - DeepSpeed for ZeRO-1 and 2, partial offload, NVMe, and configurations that exist. Else FSDP2.
#
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# **Now you can answer**
#
# 1. A colleague's run with `"zero_optimisation": {"stage": 2}` trains well, but does not fit where yours does. Why?
# 2. A configuration says nothing of clipping. Why do its losses part from DDP's at the third step only?
# 3. ZeRO-3 on a model of 50 million parameters saves less memory than expected. Which two defaults may be why?
# 4. You have a ZeRO-3 checkpoint of 64 ranks and 48 GPUs tomorrow. What do you do tonight?
# 5. (Section 10.) The communication logger says that 100 equal all-reduces took 5 s together. How long did they take?
#
# <details><summary>Answers</summary>
#
# 1. The key is unknown and was passed over, so the run is plain data parallelism (section 4).
# 2. The first loss comes before any update, and Adam's first update is the same for a scaled gradient (section 3).
# 3. Small parameters stay whole (persistence threshold), and gathered ones stay from forward to backward (sections 2
#    and 4).
# 4. Convert it to a universal checkpoint, and load that with `load_universal` (section 7).
# 5. About 0.1 s: the total is (100 + 1)/2 times too large (section 10).
# </details>
#
# **What to take to work:** `python -m tools check-deepspeed config.json`, and
# [scripts/train.py](../scripts/train.py) with `--engine deepspeed`.
#
# **Exercises:** [exercises/08_deepspeed](../exercises/08_deepspeed_exercises.ipynb). **Next:** [09 tensor
# parallel](09_tensor_parallel.ipynb), for layers that do not fit even when everything else is sharded.
#
# **Worth reading**
# - Rajbhandari and others, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, 2020,
#   [arXiv 1910.02054](https://arxiv.org/abs/1910.02054): what the stages were meant to send.
# - DeepSpeed, [configuration JSON](https://www.deepspeed.ai/docs/config-json/): every key, by the library itself.
# - Hugging Face, [FSDP and DeepSpeed](https://huggingface.co/docs/accelerate/concept_guides/fsdp_and_deepspeed): the
#   move between them, with the precision trap.
