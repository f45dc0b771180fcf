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
# # Exercises 08 · What does DeepSpeed do differently, and when do I pick it?
#
# Five exercises on [08 DeepSpeed](../notebooks/08_deepspeed.ipynb). Four of them train a small GPT with the real
# DeepSpeed on real ranks, the last asks for decisions. All of them take about 125 minutes. **If you do only these:**
# 1, 3 and 5.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | three configurations that work, out of three that do not | 2 of 5 | 25 |
# | 2 | one step by the engine, and its messages | 2 of 5 | 25 |
# | 3 | a function that turns a set-up of FSDP2 into a configuration | 3 of 5 | 35 |
# | 4 | a checkpoint of 3 ranks that goes on with 2 | 3 of 5 | 25 |
# | 5 | decisions in five situations | 2 of 5 | 15 |
#
# *Follows* on each card names the section of the lesson to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/08_deepspeed_solutions.ipynb).
#
# **What a check does.** It starts 2 real ranks, on which DeepSpeed trains a GPT of two blocks with what you wrote. Then
# it compares the losses with those of one process, and reads how many bytes the ranks hold and which messages they
# sent. Exercises 1 to 4 need DeepSpeed. If it is not installed, their checks say how to get it. The last one works
# without it.

# %% tags=["parameters"]
import inspect
from collections import Counter

import torch.distributed as dist

from course_utils import launch, record
from course_utils.models import build_gpt, loss_of
from lessons.deepspeed import check
from lessons.deepspeed.deepspeed_tools import missing, prepare

WORLD_SIZE = 2  # ranks of the demonstrations; the checks choose their own

# %%
print(missing() or "DeepSpeed is installed")

# %% [markdown]
# ---
# ## Exercise 1 · Mend three configurations
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 25 | 08, The clinic | losses of one process; states and weights shared by the ranks |
#
# Three people wrote a configuration for 2 ranks. None of the three does what it is meant for. In all three a step is
# meant to take 8 samples, and **no gradient is clipped**.
#
# | | what it is meant for |
# |---|---|
# | A | stage 2, micro-batches of 4 samples: each rank holds half of the optimizer's states |
# | B | stage 1, micro-batches of 2 samples: the losses of one process, exactly |
# | C | stage 3, micro-batches of 4 samples: each rank holds half of *all* parameters between two steps |
#
# **Predict** for each of them, before you run the second cell: does DeepSpeed stop with an error? If not, what differs
# from what it is meant for?

# %%
BROKEN = {
    "A": {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimisation": {"stage": 2},
    },
    "B": {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
    },
    "C": {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3},
    },
}

# %%
print(check.tried(BROKEN))

# %% [markdown]
# The whole model has 27,776 parameters, which are 111,104 bytes in fp32. Adam's states of all of them have twice as
# many.
#
# Now return three configurations that do what they are meant for. Change only what is needed; one of them has two
# faults. `check.tried` works on yours, too.


# %%
# {{mended}}


# %%
check.mended(mended)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# One key is spelled in a way that DeepSpeed does not know. What does it do with a key of that kind?
# </details>
# <details><summary>Hint 2</summary>
#
# Samples of a step = samples of a micro-batch · micro-batches · ranks. Then compare the keys of B with those of A: what
# does DeepSpeed do where nothing is said?
# </details>
# <details><summary>Hint 3</summary>
#
# Stage 3 keeps a parameter whole if it has fewer elements than `stage3_param_persistence_threshold`. The default is
# made for large models; here every parameter is below it.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · One step by the engine
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 25 | 08, One engine around the model | at stage 2: one collective per micro-batch, and two more |
#
# DeepSpeed's engine takes care of model, optimizer, gradient accumulation and clipping together. Write one step of
# training, that is, one update of the weights, for an engine that is configured with as many
# `gradient_accumulation_steps` as there are micro-batches. The engine then
#
# - divides each loss by the number of micro-batches itself, in `engine.backward(loss)`;
# - counts the calls of `engine.step()`, and updates the weights at the last micro-batch only, which it calls the
#   *boundary* of gradient accumulation. It also clears the gradients.
#
# Return the mean loss of this rank's micro-batches, and how often each collective was called during the step.
# `record()` gives a ledger, and each entry of it has its name in `entry.op`.


# %%
# {{train_step}}


# %%
check.train_step(train_step)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The loop has three lines for each micro-batch: loss, backward, step. Both backward and step belong to the engine.
# </details>
# <details><summary>Hint 2</summary>
#
# Call `engine.step()` after *every* micro-batch. Between boundaries it does nothing but count.
# </details>
# <details><summary>Hint 3</summary>
#
# `Counter(entry.op for entry in ledger)` counts the collectives, and a `Counter` is a dictionary.
# </details>

# %% [markdown]
# Now let your function count what the stages send.
#
# **Predict:** with 4 micro-batches, how many more collectives does stage 2 make than stage 1? And does stage 3 gather
# the weights once or four times?


# %%
def messages(stage: int, count: int) -> dict[str, int]:
    """Collectives of the second step with `count` micro-batches."""
    import deepspeed
    import torch

    prepare()
    model = build_gpt()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10**6}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": count,
              "gradient_clipping": 0.0, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config,
        dist_init_required=False,
    )
    tokens = torch.arange(8).repeat(1, 1)
    train_step(engine, [(tokens, tokens)] * count)
    return dict(train_step(engine, [(tokens, tokens)] * count)[1])


GLOO = {"world_size": WORLD_SIZE, "backend": "gloo"}

if not missing():
    for stage in (1, 2, 3):
        print(f"stage {stage}:", launch(messages, stage, 4, **GLOO)[0])

# %% [markdown]
# Stage 1 keeps the gradients of all parameters, adds up four micro-batches, and reduces them once. Stage 2 keeps only a
# part of the gradients, so it has to reduce after each micro-batch: four times. In both, one more all-reduce carries a
# single number, and one all-gather brings the new weights to all ranks. Stage 3 also gathers the weights in each
# micro-batch. What saves memory costs messages, and with gradient accumulation it costs them in every micro-batch.
# A larger model needs several messages where this one needs one, because its gradients fill more than one bucket.

# %% [markdown]
# ---
# ## Exercise 3 · From FSDP2 to DeepSpeed
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 35 | 08, FSDP2 or DeepSpeed | losses to 2e-5, the same bytes held, as many bytes gathered |
#
# A team trains with FSDP2 and wants to try DeepSpeed. What is computed must not change. This is their program. The
# dictionary `setup` says how it runs; the two helpers that it calls make a torch AdamW and compute the loss.

# %%
print(inspect.getsource(check.fsdp2_training))

# %% [markdown]
# Write a function that turns such a dictionary into a configuration of DeepSpeed. The check begins with this one:
#
# ```python
# {"reshard_after_forward": True, "cpu_offload": False, "max_norm": None, "micro_batch": 4, "micro_batches": 1}
# ```
#
# The optimizer stays torch's. As with FSDP2, a rank must hold only its part of the parameters between two steps,
# whatever the set-up says.
#
# | key of the dictionary | values | in DeepSpeed |
# |---|---|---|
# | `micro_batch`, `micro_batches` | numbers | two keys at the top |
# | `max_norm` | a number, or None for no clipping | one key at the top, with the default that Exercise 1 met |
# | `cpu_offload` | True, False | two keys of `zero_optimization`, and one at the top |
# | `reshard_after_forward` | True, False | two keys of `zero_optimization` |
#
# - **`cpu_offload`** moves parameters and optimizer. In DeepSpeed `offload_param` and `offload_optimizer` get the
#   value `{"device": "cpu", "pin_memory": False}`. The optimizer is torch's, so DeepSpeed also wants
#   `"zero_force_ds_cpu_optimizer": False` at the top.
# - **`reshard_after_forward`**: if True, FSDP2 lets the weights of a block go after forward, and gathers them once more
#   for backward; if False, they stay until backward. DeepSpeed keeps gathered weights as long as their number is below
#   `stage3_max_live_parameters`, and their next use is nearer than `stage3_max_reuse_distance`. Both are counted in
#   elements, and both defaults are 10⁹.


# %%
# {{to_deepspeed}}


# %%
check.to_deepspeed(to_deepspeed)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# FSDP2 always cuts the parameters, so it is stage 3 for every set-up. Think of the threshold of Exercise 1.
# </details>
# <details><summary>Hint 2</summary>
#
# No clipping is `"gradient_clipping": 0.0`. Without the key, DeepSpeed 0.19.8 clips to 1.0.
# </details>
# <details><summary>Hint 3</summary>
#
# To let go of weights after forward, set both `stage3_max_live_parameters` and `stage3_max_reuse_distance` to 0. For
# weights that stay until backward, leave the defaults.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · Saved by 3 ranks, loaded by 2
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 08, Checkpoints | weights and Adam's states bit by bit, converted once |
#
# Three ranks have trained at stage 3 and saved. Now there are two. DeepSpeed refuses the checkpoint on another number
# of ranks, unless it is converted to a **universal checkpoint** first, which holds whole tensors. In a terminal the
# conversion is `python -m deepspeed.checkpoint.ds_to_universal --input_folder run/step2 --output_folder
# run/step2_universal`.
#
# Your function runs on both of the new ranks and gets
#
# - `convert(source, target)`, which does what that command does: rank 0 calls it once, and no other rank does, before
#   the engines are made;
# - `make_engine(config)`, which returns the engine of this rank: all ranks call it together;
# - `config` for 2 ranks, which does not say yet that the checkpoint is universal. The key for that is
#   `"checkpoint": {"load_universal": True}`;
# - `folder`, the checkpoint's folder, and `tag`, the name of the folder in it that was saved.
#
# Return the engine with everything loaded: the weights and both of Adam's states.


# %%
# {{resume}}


# %%
check.resume(resume)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `dist.get_rank()` says which rank this is, and `dist.barrier()` lets all of them wait for each other.
# </details>
# <details><summary>Hint 2</summary>
#
# `config | {"checkpoint": …}` is a new dictionary with one key more. Both are needed: the converted folder, and the
# configuration that says what kind of folder it is.
# </details>
# <details><summary>Hint 3</summary>
#
# `engine.load_checkpoint(folder, tag="…")` takes the checkpoint's folder and the name of the folder inside it, here
# the converted one.
# </details>

# %% [markdown]
# ---
# ## Exercise 5 · Five situations
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 15 | 08, FSDP2 or DeepSpeed |
#
# Choose one answer for each situation. An answer is a choice with its reason, and both have to be right.
#
# **1. A model of 70 billion parameters** is trained with tensor parallelism inside the node, pipeline stages between
# nodes, and sharded states over the rest. The team compiles its blocks with `torch.compile`.
#
# - a: ZeRO-3, because it splits up everything, so the other two are not needed.
# - b: FSDP2, because it takes parameters that tensor parallelism has already cut (DTensors), and cuts them further.
# - c: DDP, because with tensor parallelism each rank has only a part of the model already.
# - d: FSDP2, because it sends fewer bytes than ZeRO-3.
#
# **2. One machine with two GPUs.** The optimizer's states of the model fit neither in the GPUs nor in the CPU's memory,
# but there is a large fast NVMe disk. A slow step is acceptable.
#
# - a: FSDP2 with CPUOffloadPolicy, because it needs no second library.
# - b: ZeRO-3 with NVMe offload, because it can put the states on the disk.
# - c: ZeRO-2 with offload of the optimizer to the CPU, because its gradients are cut.
# - d: ZeRO-3 without offload, because each rank holds only a part.
#
# **3. A model of 1.5 billion parameters on 8 GPUs of 16 GB**, bf16 with Adam, 16 micro-batches in each step. The
# network is slow, so each message hurts. Activations take 4 GB.
#
# - a: ZeRO-1, because 2 + 2 + 12/8 bytes a parameter fit, and a step reduces the gradients once.
# - b: ZeRO-2, because it holds less than ZeRO-1 and sends the same.
# - c: FSDP2 in its default, because it holds the least.
# - d: DDP, because it sends the fewest messages.
#
# **4. A job on cheap machines that the provider can take back at any time.** It restarts by itself from its newest
# checkpoint, with 8 ranks, then 6, then 12, and each minute until training goes on counts.
#
# - a: ZeRO-3 with `save_checkpoint`, because each rank writes only its own part.
# - b: ZeRO-3 with a universal checkpoint, because that can be loaded on any number of ranks.
# - c: FSDP2 with torch's distributed checkpoint (DCP), because each rank reads its new part while it loads.
# - d: FSDP2 with a full state dictionary that rank 0 writes, because a whole tensor fits any number of ranks.
#
# **5. A model of 125 million parameters on 4 GPUs of 24 GB**, fp32 with Adam, activations of 10 GB. The shortest step
# wins.
#
# - a: DDP, because 2 GB of states fit, and its all-reduces overlap with backward.
# - b: ZeRO-3, because less memory is always better.
# - c: ZeRO-1, because the optimizer's step is cut over the ranks.
# - d: FSDP2 with `reshard_after_forward=False`, because it sends as many bytes as DDP.


# %%
# {{choices}}


# %%
check.choices(choices)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For 3 and 5, compute the bytes first: 16 for each parameter with Adam. A stage divides some of them by the number of
# ranks.
# </details>
# <details><summary>Hint 2</summary>
#
# In 3, think of what you counted in Exercise 2. In 4, think of what Exercise 4 needed before it could load.
# </details>
# <details><summary>Hint 3</summary>
#
# In 1, two answers name the same library. Would its reason still hold if you counted the messages?
# </details>
