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
# The weights of a model with 7.5 billion parameters take 15 GB in 16 bits. To train it with Adam under DDP each GPU
# needs 120 GB before it has seen the first token, and 64 GPUs hold 64 copies of that. ZeRO's three stages bring it
# to 31.4, to 16.6, and to 1.9 GB a GPU (*recorded*, Rajbhandari et al. 2020, figure 1). This lesson finds the bytes,
# and builds the three stages.
#
# **You will be able to**
# - *say* to the byte what a training step holds, and *measure* it on real ranks, tensor by tensor;
# - *derive* the model states of any model, and what each ZeRO stage leaves of them on a rank;
# - *build* ZeRO-1, ZeRO-2 and ZeRO-3, and *count* the bytes that they hold and send;
# - *estimate* activations over sequence length, with and without checkpointing, and the price of offload;
# - *decide* whether a model fits on a cluster, before anyone buys it.
#
# **Before this:** [02 collectives](02_collectives.ipynb), [04 ddp](04_ddp.ipynb),
# [05 scaling efficiency](05_scaling_efficiency.ipynb). **Time:** about 105 minutes to read, under a minute to run.

# %% [markdown]
# ## Ten predictions
#
# Write down an answer to each, however unsure. They come up again on the way, and the answers are at the end.
#
# 1. When in a training step is the most memory in use: after forward, after backward, or in the optimizer's step?
# 2. A parameter is trained with Adam. How many bytes does it take in fp32, and how many in mixed precision?
# 3. Seven billion parameters in mixed precision. On how many GPUs of 80 GB do the model states fit, if nothing is
#    held twice?
# 4. The sequence becomes twice as long. What happens to the activations, and what with checkpointing?
# 5. ZeRO-1 "saves a factor of 4". What factor is it on 4 ranks?
# 6. ZeRO-2 divides gradients and optimizer states. Does it send more than DDP, less, or the same?
# 7. ZeRO-3 never keeps the parameters together. How much more than DDP does it send?
# 8. Four micro-batches are accumulated for each step. Which stage pays most for that?
# 9. The model states of 175 billion parameters, divided among 1,024 ranks. How many GB has each?
# 10. Adam's states of a 7B model move to an NVMe drive. How long do they travel in each step, at least?

# %% [markdown]
# The first cell imports everything and names every parameter. `course_utils` is the course's own package. Of its module
# `memory`, `model_states`, `activations` and `training` are formulas, `held` and `track` measure, `simulate` simulates.

# %% tags=["parameters"]
import mmap
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils import device, launch, plots, record
from course_utils.costs import bytes_sent
from course_utils.data import Windows
from course_utils.hardware import GPUS, LINKS
from course_utils.memory import Memory, activations, held, model_states, simulate, track, training
from course_utils.models import PUBLISHED, GPTConfig, build, parameters
from course_utils.widgets import memory_calculator

world_size = 4  # ranks, 2 or more
per_rank = 4  # windows of text that a rank takes in one step
steps = 4  # training steps of each run
cluster = 64  # ranks of the simulated cluster

# %% [markdown]
# ## 1. One training step, watched
#
# Five kinds of tensors fill the memory of a rank:
#
# - **parameters**, the model itself;
# - **gradients**, one number for each parameter;
# - **optimizer states**: for Adam two moments of each parameter, and in mixed precision the master weights;
# - **activations**: what forward leaves for backward;
# - **buffers**: everything else: gathered parameters, gradients of activations and temporaries, which live for a
#   moment, and the buckets of DDP, which stay.
#
# The first three are the **model states**. They depend on the model and the optimizer. Activations depend on the
# batch too.
#
# `track` follows every tensor of a process from its creation to its end, and sorts its bytes into these five parts.
# The model is the small GPT of lesson 04, with its 112,384 parameters; the text is *Alice*, by characters.
#
# **Predict** (question 1). When does the step hold the most?

# %%
backend = launch(dist.get_backend, world_size=world_size)[0]  # the same for any number of ranks
windows = Windows("train")
gpt = GPTConfig()
n_parameters = parameters(gpt)


def loss_of(model, x, y):
    """Mean cross-entropy of the next character."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def take(numbers):
    """Windows by number, and the same text one character later: both (len(numbers), 64)."""
    x, y = zip(*(windows[i] for i in numbers), strict=True)
    return torch.stack(x).to(device()), torch.stack(y).to(device())


# %%
def watched_steps(config=gpt, size=16):
    """Bytes by part at the marks of two training steps of one process."""
    model = build(config).to(device())
    optimizer, (x, y) = adam(model.parameters()), take(range(size))
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


history, peak = launch(watched_steps, world_size=1, backend=backend)[0]
plots.memory_over_time(history, "measured: two steps of one process, 16 windows")

# %% [markdown]
# *The figure: bytes by part over two training steps. Parameters are there throughout. Activations rise during
# forward and are gone after backward, when the gradients have taken their place. The optimizer's states appear with
# its first step, and stay.*

# %%
print(f"{'':15}" + "".join(f"{part:>13}" for part in history[0][1].parts()))
for label, memory in history:
    print(f"{label:15}" + "".join(f"{size:13,.0f}" for size in memory.parts().values()))
assert max(history, key=lambda mark: mark[1].total)[0] == "forward"

# %% [markdown]
# Read it row by row. `parameters` is 4 bytes times 112,384. The gradients are as large, and exist between backward
# and `zero_grad`. Adam's two moments are twice that, and exist from the first step on: a program that fits in step
# 1 can run out of memory in step 2. The activations are the largest part of *this* run, because 16 windows are many
# for so small a model.

# %% tags=["nbval-ignore-output"]
print(f"peak {peak.total / 1e6:.2f} MB, of which")
print("  " + ", ".join(f"{part} {size / 1e6:.2f}" for part, size in peak.parts().items()))

# %% [markdown]
# That is more than the figure's peak, which is only the highest of its marks: `track` looks between them too. The
# peak lies at the beginning of backward. All activations are still there, and the gradients of the last ones come on
# top, as buffers; no parameter has its gradient yet.
#
# > **Misconception.** "If the model fits, it trains." The parameters are a quarter of the model states here, and the
# > peak of a step comes from what is no model state at all.

# %% [markdown]
# ## 2. Model states: bytes per parameter
#
# How many bytes does one parameter cost? With Adam in **fp32**: 4 for itself, 4 for its gradient, 4 and 4 for the
# moments.
#
# In **mixed precision** (lesson 05, section 6) parameter and gradient take 2 bytes each, and the optimizer keeps in
# fp32 a master weight and the two moments: 4 + 4 + 4 = 12, the K of the ZeRO paper. Many programs sum gradients in
# fp32, which makes 18 of it (*recorded*, [stas00/ml-engineering](https://github.com/stas00/ml-engineering)). FSDP2's
# **bf16 policy** (lesson 07) keeps parameters, gradients and moments in fp32; only what it gathers for computing is
# bf16.
#
# **Predict** (question 2) the sums. Then the cell counts them: `model_states` is the formula, `held` looks at every
# tensor that the model and the optimizer have at this moment, and counts each block of memory once.


# %%
def held_in(dtype, master=False):
    """What is held at the end of backward in the second step; fp32 master weights if wanted."""
    model = build(dtype=dtype)
    stepped = [p.detach().float().requires_grad_() for p in model.parameters()] if master else None
    optimizer = adam(stepped or model.parameters())
    for _ in range(2):
        model.zero_grad()
        loss_of(model, *take(range(4))).backward()
        now = held(model, optimizer)
        if not master:
            optimizer.step()
            continue
        for copy, p in zip(stepped, model.parameters(), strict=True):
            copy.grad = p.grad.float()
        optimizer.step()
        for copy, p in zip(stepped, model.parameters(), strict=True):
            copy.grad = None
            p.data.copy_(copy)
    return now


# %%
def alone(fn, *args):
    """Run on one rank, on the CPU."""
    return launch(fn, *args, world_size=1, backend="gloo")[0]


cases = {"fp32": (torch.float32,), "mixed": (torch.bfloat16, True), "bf16": (torch.bfloat16,)}
counted = {name: alone(held_in, *case) for name, case in cases.items()}

# %%
print("bytes per parameter     parameter  gradient  optimizer   formula  measured")
for name in ("fp32", "mixed", "mixed, fp32 gradients", "bf16 policy", "bf16"):
    formula = model_states(1, precision=name)
    row = f"{name:22}{formula.parameters:11.0f}{formula.gradients:10.0f}{formula.optimizer:11.0f}"
    row += f"{formula.states:10.0f}"
    if name in counted:
        measured = counted[name].states / n_parameters
        row += f"{measured:10.3f}"
        assert abs(measured / formula.states - 1) < 0.01
    print(row)

# %% [markdown]
# 16 and 16. The thousandths are Adam's step counters, one number for each tensor. Mixed precision moves bytes from
# parameters and gradients to the master copy. The third row takes 2 bytes more. The last one, pure bf16, takes half,
# but loses updates (lesson 05, section 6). Another way to a smaller K is an optimizer that keeps less: 8-bit
# moments, or factored ones as in Adafactor.
#
# > **Misconception.** "Mixed precision halves the memory." It saves activations and time, and not a byte of the
# > model states. ZeRO does.
#
# Now a real size. **Predict** (question 3), then derive: seven billion parameters at 2 + 2 + 12 bytes.

# %%
seven = model_states(7e9, precision="mixed")
assert seven.states == 7e9 * (2 + 2 + 12) == 112e9
for part in ("parameters", "gradients", "optimizer"):
    print(f"{part:12}{getattr(seven, part) / 1e9:6.0f} GB")
print(f"{'together':12}{seven.states / 1e9:6.0f} GB")
rows = {"model states of 7B, mixed precision": seven}
sizes = {GPUS[key].name: GPUS[key].memory_bytes for key in ("v100", "h100", "h200")}
plots.memory_bars(rows, "modelled: 7 billion parameters with Adam", limit=sizes)

# %% [markdown]
# *The figure: one bar of 112 GB. Three quarters of it are the optimizer's. It ends beyond the lines of V100 and
# H100, and before that of H200.*
#
# 112 GB: two GPUs of 80 GB would hold them, if only each did not need a copy of its own. Under DDP all of them do.
#
# ### Published models
#
# `PUBLISHED` has the shapes of GPT-2 and GPT-3 (Radford et al. 2019; Brown et al. 2020, table 2.1) and of
# Megatron-LM's table (Narayanan et al. 2021, table 1). The number of parameters follows from the shape.

# %%
SHOWN = ("GPT-2", "GPT-2 XL", "GPT-3 6.7B", "GPT-3 13B", "GPT-3 175B")
print("            parameters (10⁹)  states (GB)  kinds of GPU that hold them")
for name in SHOWN:
    count = parameters(PUBLISHED[name])
    states = model_states(count, precision="mixed").states
    fits = [gpu.name for gpu in GPUS.values() if gpu.memory_bytes >= states]
    print(f"{name:12}{count / 1e9:16.2f}{states / 1e9:13.1f}{len(fits):7} of {len(GPUS)}")

# %% [markdown]
# > **What changes on real GPUs.** The formulas count tensors. A GPU has more to hold: the CUDA context and the kernels,
# > NCCL's own buffers, workspaces of the matrix libraries, and in the optimizer's step up to 4 bytes a local parameter,
# > unless Adam is built with `fused=True`. And PyTorch's caching allocator takes memory in blocks and does not give
# > them back, so `nvidia-smi` shows what was *reserved*, not what is in use; `torch.cuda.memory_allocated` counts as
# > this lesson does. Gaps between blocks cannot be used either (*fragmentation*); with
# > `PYTORCH_ALLOC_CONF=expandable_segments:True` there are fewer. Leave a few GB free. And a GB is 10⁹ bytes here;
# > `torch.cuda.mem_get_info` says how many bytes a GPU sold as "80 GB" really has, and how many are free.

# %% [markdown]
# ## 3. Activations: the part that grows with the batch
#
# Autograd keeps for backward what each operation needs to compute its gradient: a linear layer its input, GELU its
# input, a norm its input and two statistics, attention its queries, keys, values and output. `activations` adds
# that up for the GPT, operation by operation, and knows nothing of the run. `track` measures.
#
# Attention scores would be a square of the sequence length for each head. The fused kernels behind
# `scaled_dot_product_attention` never store it: they keep one number a row, and compute the scores again in
# backward. So all that is kept grows in proportion to the number of tokens.
#
# **Activation checkpointing** (lesson 05, section 8) keeps the input of each block only, and what stands outside of
# the blocks. **Predict** (question 4) both curves: sequences from 64 to 1,024, one sequence in the batch.


# %%
def kept_after_forward(configs):
    """Bytes of activations at the end of forward, one sequence of full length each."""
    kept = []
    for config in configs:
        model = build(config)
        x, y = (torch.zeros(1, config.context, dtype=torch.int64) for _ in range(2))
        with track(model) as tracker:
            loss = loss_of(model, x, y)
            kept.append(tracker.mark("forward").activations)
            del loss
    return kept


lengths, ways = [64, 128, 256, 512, 1024], {"keep all": False, "checkpoint": True}
shapes = {
    way: [GPTConfig(layers=8, context=t, checkpoint=again) for t in lengths]
    for way, again in ways.items()
}
kept = {way: alone(kept_after_forward, of) for way, of in shapes.items()}
by_formula = {way: [activations(config, 1) for config in of] for way, of in shapes.items()}

# %%
print("tokens   " + "".join(f"{way:>14}: formula  measured" for way in ways))
for i, length in enumerate(lengths):
    row = "".join(f"{by_formula[w][i] / 1e6:20.3f} MB{kept[w][i] / 1e6:7.3f}" for w in ways)
    print(f"{length:6}   {row}")
for way in ways:
    for formula, measured in zip(by_formula[way], kept[way], strict=True):
        assert formula == measured
plots.memory_over_length(lengths, kept, by_formula, "measured and computed: 8 layers, one sequence")

# %% [markdown]
# *The figure: activations over sequence length, as points where they were measured and as a line where they were
# computed. Both ways grow in proportion to the length. Checkpointing lies several times lower.*
#
# The formula is right to the byte.

# %%
ratio = kept["keep all"][-1] / kept["checkpoint"][-1]
longest = shapes["checkpoint"][-1]
inputs = longest.layers * 4 * longest.context * longest.hidden
print(f"checkpointing keeps {ratio:.1f} times less: {kept['checkpoint'][-1] / 1e6:.2f} MB,", end="")
print(f" of which {inputs / 1e6:.2f} are the inputs of the blocks")
outside = 1 - inputs / kept["checkpoint"][-1]
print(f"{outside:.0%} stand outside of the blocks: embeddings, last norm, logits, loss")
six, seven_layers = (activations(GPTConfig(layers=n, context=1024), 1) for n in (6, 7))
one_block, one_input = seven_layers - six, inputs / longest.layers
assert 16 < one_block / one_input < 16.2

# %% [markdown]
# Twice the tokens, twice the activations, either way. With checkpointing the largest single thing left can be the
# **logits**: one number for each token and each word of the vocabulary. The loss keeps their log-softmax, and backward
# makes their gradient, each as large again: with a vocabulary of 128,256, in fp32, these two take 1 MB a token.
#
# Recorded at full size: Llama-3-8B, one sequence of 32k tokens, takes 7 GiB of activations a layer and 224 GiB in
# all, or 8 GiB with checkpointing, and 15.7 GiB of logits in fp32 (*recorded*,
# [stas00/ml-engineering](https://github.com/stas00/ml-engineering)). Two of these figures follow from the model's
# shape alone: 32 layers, hidden size 4,096, a vocabulary of 128,256 ([Llama 3](https://arxiv.org/abs/2407.21783),
# table 3, and the published configuration). **Predict** them first.

# %%
layers, hidden, vocabulary, tokens = 32, 4096, 128_256, 32 * 1024
print(f"7 GiB a layer, {layers} layers: {7 * layers} GiB")
block_inputs = layers * tokens * hidden * 2  # bf16
logits = tokens * vocabulary * 4  # fp32
print(f"the inputs of all blocks in bf16: {block_inputs / 2**30:.1f} GiB")
print(f"the logits in fp32: {logits / 2**30:.1f} GiB")
assert block_inputs == 8 * 2**30 and round(logits / 2**30, 1) == 15.7

# %% [markdown]
# Checkpointing takes the 224 GiB to 8, and leaves the logits, now twice as large as all that is kept of the blocks.
# Programs for long sequences therefore compute the loss in pieces.
#
# ZeRO divides *model states*. Activations it leaves alone: each rank has those of its own batch. What shrinks them is
# checkpointing, a smaller batch, splitting the sequence (lesson 11), or tensor and pipeline parallelism (lessons 09 and
# 10). ZeRO-R, of the same paper, also divides the checkpoints.
#
# <details><summary>By what factor do the activations of one layer exceed its input, and does the hidden size
# matter?</summary>
#
# By 16, and a little for the statistics. Everything that a block keeps is proportional to tokens times hidden size:
# two inputs and two outputs of norms, queries, keys, values, attention's output, and 4 + 4 around the GELU. So the
# factor is the same for any hidden size. Korthikanti et al. 2022 count 34 bytes a
# token and hidden unit for 16-bit activations and dropout, without the attention scores; without dropout's masks it
# is less, and in fp32 it is twice that.
# </details>
#
# > **What changes on real GPUs.** The fused attention of a GPU is another kernel and keeps slightly other things.
# > Under autocast the kept tensors are in 16 bits, but for norms and loss (lesson 05, section 6).

# %% [markdown]
# ## 4. ZeRO on paper
#
# Under DDP the model states are the same on all ranks: N copies of one thing. **ZeRO**, the *zero redundancy
# optimizer* (Rajbhandari et al. 2020), keeps one. Each of N ranks owns a **shard**, one Nth:
#
# | | parameters | gradients | optimizer | bytes on a rank, mixed precision |
# |---|---|---|---|---|
# | DDP (stage 0) | whole | whole | whole | (2 + 2 + K) Ψ |
# | ZeRO-1 | whole | whole | shard | (2 + 2 + K/N) Ψ |
# | ZeRO-2 | whole | shard | shard | (2 + (2 + K)/N) Ψ |
# | ZeRO-3 | shard | shard | shard | (2 + 2 + K)/N · Ψ |
#
# Ψ is the number of parameters and K = 12 the optimizer's bytes for each. The paper's first figure has Ψ = 7.5
# billion and N = 64 (*recorded*: 120, 31.4, 16.6 and 1.9 GB). Does the formula give the printed digits?

# %%
NAMES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
printed = ("120", "31.4", "16.6", "1.9")  # GB, Rajbhandari et al. 2020, figure 1
stages = {name: model_states(7.5e9, stage=i, ranks=64) for i, name in enumerate(NAMES)}
for name, digits in zip(NAMES, printed, strict=True):
    places = len(digits.partition(".")[2])
    assert f"{stages[name].states / 1e9:.{places}f}" == digits
    print(f"{name}: {stages[name].states / 1e9:.{places}f} GB")
gpus = {GPUS[key].name: GPUS[key].memory_bytes for key in ("v100", "h100")}
plots.memory_bars(stages, "modelled: 7.5 billion parameters on 64 ranks, one rank", limit=gpus)

# %% [markdown]
# *The figure: four bars. Stage 1 cuts the optimizer's part, three quarters of DDP's bar, to a sliver; stage 2 the
# gradients; stage 3 the parameters. DDP fits on neither a V100 nor an H100. ZeRO-1 fits on both, and hardly on the
# V100.*
#
# **Predict** (questions 5 and 9). The factors on 2, 4, 8, 64 and 1,024 ranks? And 175 billion parameters on 1,024?

# %%
print("times less than DDP" + "".join(f"{n:9,}" for n in (2, 4, 8, 64, 1024)) + " ranks")
for stage in (1, 2, 3):
    factors = [16 / model_states(1, stage=stage, ranks=n).states for n in (2, 4, 8, 64, 1024)]
    print(f"{NAMES[stage]:19}" + "".join(f"{factor:9.2f}" for factor in factors))
largest = model_states(175e9, stage=3, ranks=1024).states
print(f"175 billion parameters, ZeRO-3 on 1,024 ranks: {largest / 1e9:.1f} GB each")

# %% [markdown]
# > **Misconception.** "ZeRO-1 saves 4×, ZeRO-2 saves 8×." These are limits for many ranks: 16/4 and 16/2, when the
# > divided part has become nothing. On 4 ranks it is 2.3 and 2.9. ZeRO-3 alone has no limit: N times less on N
# > ranks.
#
# The 4 and 8 also belong to mixed precision. In fp32 the optimizer has 8 of 16 bytes, and the limits are 2 and 4:
# that is what the small GPT will show.

# %% [markdown]
# ## 5. Before ZeRO: what DDP holds
#
# The comparison is PyTorch's DDP. It gets an optimizer and a method `step`, so that all versions can be called
# alike: forward, `backward()`, `step()`.


# %%
class Stage0(DDP):
    """DDP: every rank holds all parameters, gradients and optimizer states."""

    def __init__(self, module, make_optimizer, views=True):
        super().__init__(module, gradient_as_bucket_view=views)
        self.optimizer = make_optimizer(self.parameters())

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


# %% [markdown]
# One function trains any version and returns what this lesson asks about: losses, what is held when backward has
# ended, the peak of the last step, and its ledger. Every rank builds its model from another seed, so that a version
# that forgets the first broadcast fails.


# %%
def batch(step, part=0, parts=1):
    """The windows of this rank in this step, or one of several parts of them."""
    first = (step * dist.get_world_size() + dist.get_rank()) * per_rank
    share = per_rank // parts
    return take(range(first + part * share, first + (part + 1) * share))


def run(version, micro=1, config=gpt, rounds=steps):
    """On a rank: losses of all ranks together; memory and ledger of the last step."""
    model, losses = version(build(config, seed=dist.get_rank()).to(device()), adam), []
    for step in range(rounds):
        total = torch.zeros((), device=device())
        with record() as ledger, track(model, model.optimizer) as tracker:
            for i in range(micro):
                loss = loss_of(model, *batch(step, i, micro)) / micro
                loss.backward()
                total += loss.detach()
            states, ended = held(model, model.optimizer), tracker.mark("backward")
            model.step()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    found = {"losses": losses, "held": states, "ended": ended}
    return found | {"peak": tracker.peak, "ledger": ledger}


# %%
def on_ranks(version, n=world_size, **options):
    return launch(run, version, world_size=n, backend=backend, **options)


runs = {"DDP": on_ranks(Stage0)}
apart = on_ranks(lambda *args: Stage0(*args, views=False))
for name, of in {"gradients apart from buckets": apart, "views into them": runs["DDP"]}.items():
    ended = of[0]["ended"]
    print(f"{name:29} gradients {ended.gradients:9,.0f}, buffers {ended.buffers:9,.0f} bytes")

# %% [markdown]
# The first row is DDP as it comes: its buckets are a second copy of the gradients. `gradient_as_bucket_view=True` makes
# the gradients views into the buckets. They cannot be detached in place then, and nothing else changes. From here on
# "DDP" has it on.

# %% [markdown]
# ## 6. ZeRO-1: each rank updates its own shard
#
# Adam works element by element. So a rank can update one Nth of the parameters on its own, if it has the mean
# gradient of that Nth, and needs the moments of that Nth only. Afterwards all ranks exchange what they updated.
#
# What changes against DDP:
#
# | DDP | ZeRO-1 |
# |---|---|
# | all-reduce the gradients | **reduce-scatter** them: each rank gets the mean of its shard |
# | optimizer over all parameters | optimizer over the **shard** |
# | | **all-gather** the parameters |
#
# **Predict** (question 6): an all-reduce is a reduce-scatter and an all-gather (lesson 02). What does ZeRO-1 send?
#
# A shard need not follow the borders of tensors. A **unit** joins the parameters of one block in a flat tensor,
# padded so that it divides by N; the parameters become views of it. So does the rank's shard, which is the
# parameter that the optimizer sees: what the optimizer writes there is already in its place. (All is fp32 here. In
# mixed precision the flat tensor is bf16, and the shard a copy of its part in fp32: the master weights.)
#
# Before PyTorch 2.13 `reduce_scatter_single` was `reduce_scatter_tensor`, and `all_gather_single` was
# `all_gather_into_tensor`.


# %%
class Unit:
    """Parameters of one type in a flat tensor, and the shard of it that this rank owns."""

    def __init__(self, parameters):
        n, rank = dist.get_world_size(), dist.get_rank()
        self.parameters, self.sizes = parameters, [p.numel() for p in parameters]
        self.padding = -sum(self.sizes) % n
        self.flat = self.join([p.detach() for p in parameters])
        *pieces, _ = self.flat.split([*self.sizes, self.padding])
        for p, piece in zip(parameters, pieces, strict=True):
            p.data = piece.view_as(p)
        self.shard = nn.Parameter(self.flat.chunk(n)[rank])

    def join(self, tensors):
        return F.pad(torch.cat([t.flatten() for t in tensors]), (0, self.padding))

    @torch.no_grad()
    def reduce_gradients(self):
        """Reduce-scatter: add the mean over ranks of the shard's gradient; let go of the rest."""
        mean = self.join([p.grad for p in self.parameters]) / dist.get_world_size()
        for p in self.parameters:
            p.grad = None
        mine = torch.empty_like(self.shard)
        dist.reduce_scatter_single(mine, mean)
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine


# %% [markdown]
# The units are the blocks, and one more for what stands around them: embeddings, last norm and head. The head is
# *tied* to the embedding, and a tensor can live in one unit only; these two share one. Frozen parameters stay as they
# are on every rank: they have neither gradients nor states.


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
# That is all. Is it DDP? The losses must be equal to rounding: sums are taken in another order. `describe` reads the
# ledger. It counts logical sizes S, as lesson 02 does: the whole tensor of an all-reduce, the whole input of a
# reduce-scatter, the whole output of an all-gather. What a ring sends for them is `bytes_sent`: 2(N−1)/N·S for the
# first, (N−1)/N·S for the other two.


# %%
def equal_losses(name):
    pairs = zip(runs[name][0]["losses"], runs["DDP"][0]["losses"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-4
    return f"{name}: {steps} losses equal to those of DDP"


def ring_bytes(ledger, n=world_size):
    """Bytes that a rank sends for these operations by rings."""
    return sum(bytes_sent(entry.op, n, entry.bytes) for entry in ledger)


def psi_sent(name):
    """The same as a multiple of one copy of the gradients, less the rank's own part of it."""
    return ring_bytes(runs[name][0]["ledger"]) / (4 * n_parameters * (world_size - 1) / world_size)


def describe(name):
    states, ledger = runs[name][0]["held"], runs[name][0]["ledger"]
    ops = sorted({entry.op for entry in ledger}, reverse=True)
    calls = [f"{ledger.count(op)} {op} ({ledger.bytes(op):,} bytes)" for op in ops]
    print(f"{name}: {', '.join(calls)}: {psi_sent(name):.2f} Ψ")
    parts = [f"{part} {size:,.0f}" for part, size in states.parts().items() if size]
    print(f"{'':{len(name)}}  holds {', '.join(parts)}")


# %%
runs["ZeRO-1"] = on_ranks(Zero1)
print(equal_losses("ZeRO-1"))
for name in runs:
    describe(name)

# %% [markdown]
# (What a rank sends is given in multiples of Ψ. Here 1Ψ means the bytes of Ψ numbers, times (N−1)/N, because the rank's
# own part never travels.)
#
# The same traffic: 2Ψ, in two halves. DDP's all-reduce has them next to each other; ZeRO-1 puts the optimizer's step
# between them. The optimizer's states are divided by the number of ranks, and it costs
# nothing.
#
# It costs nothing if it is done so. Keeping DDP's all-reduce and adding the all-gather of the parameters is as
# right, and sends half as much again, 3Ψ. It is the usual first attempt.
#
# <details><summary>Which optimizers cannot be sharded in this way?</summary>
#
# Those that look at more than one element: LAMB and Adafactor want norms or means of whole tensors, Shampoo and Muon
# whole matrices. They need shards along the borders of tensors, or one more collective. Clipping by the norm of all
# gradients needs one: every rank squares and sums its shard, and one number is all-reduced.
# </details>
#
# <details><summary>And the padding?</summary>
#
# Its gradient is zero on every rank, so Adam's moments stay zero and it never moves. It costs at most N − 1 numbers
# a unit.
# </details>

# %% [markdown]
# ## 7. ZeRO-2: gradients leave as soon as they are complete
#
# After the reduce-scatter a rank needs its shard of the gradients only. ZeRO-1 still has all of them at the end of
# backward, because it reduces them in `step`. ZeRO-2 does it **during backward**: when the last gradient of a unit
# has come, it is reduced and let go.
#
# What changes against ZeRO-1: *when* `reduce_gradients` is called. The hook is that of lesson 04, section 6.
#
# **Predict.** What does a rank hold at the end of backward, and what at the peak?


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
        """The hook: one more gradient of this unit is complete."""
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
print(equal_losses("ZeRO-2"))
for name in ("ZeRO-1", "ZeRO-2"):
    describe(name)

# %% [markdown]
# The same operations with the same bytes, earlier. At the end of backward a rank has its share of the gradients only.
# While a unit is reduced, it has that unit's gradients and their flat copy too. Section 9 measures the peak.
#
# The order matters now: all ranks must complete their units in
# the same order, or they would reduce one rank's block with another's. Backward goes the same way on all ranks, so
# they do, as long as each rank uses every parameter. (DDP asks for that too, by default.)
#
# The units do what DDP's buckets do. Were all parameters one unit, it would be complete at the very end of backward,
# and nothing would be saved at the peak.
#
# ### What accumulation costs
#
# **Predict** (question 8). Each rank's batch is cut into four micro-batches, and one step follows four backward
# passes. What is sent now?

# %%
for name, version in {"ZeRO-1": Zero1, "ZeRO-2": Zero2}.items():
    runs[f"{name}, 4 micro-batches"] = on_ranks(version, micro=4)
for name in runs:
    if name.endswith("micro-batches"):
        print(equal_losses(name))
        describe(name)

# %% [markdown]
# ZeRO-1 adds up whole gradients and reduces them once: 2Ψ. ZeRO-2 has no place for whole gradients. It reduces in
# every backward pass, and adds up shards: 4Ψ and the all-gather. DDP's `no_sync` has a price here, and it is memory.

# %% [markdown]
# ## 8. ZeRO-3: parameters come when they are needed
#
# A parameter is needed twice in a step: when its block runs forward, and when its block runs backward. In between, a
# rank can do with its shard.
#
# What changes against ZeRO-2:
#
# | ZeRO-2 | ZeRO-3 |
# |---|---|
# | all-gather after the optimizer's step | all-gather **before each use**, in forward and in backward |
# | | **free** the gathered parameters after each use |
#
# **Predict** (question 7). How many all-gathers, and how many bytes?
#
# Three hooks say when. One runs before a module's forward, one after it, and one when the gradient of the module's
# output is there, which is when its backward begins. And its end is known already: when the last gradient of a unit
# is complete, every operation that used the unit's parameters has had its backward.
#
# To free memory that views point to, the *storage* is resized to zero: the parameters keep shape and place, and have
# no bytes. FSDP does the same.


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

    def __init__(self, module, make_optimizer):
        super().__init__(module, make_optimizer)
        for part, unit in self.units.items():
            unit.shard.data = unit.shard.data.clone()  # what it was a view of is freed
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


# %%
runs["ZeRO-3"] = on_ranks(Zero3)
runs["ZeRO-3, 4 micro-batches"] = on_ranks(Zero3, micro=4)
print(equal_losses("ZeRO-3"))
print(equal_losses("ZeRO-3, 4 micro-batches"))
for name in ("ZeRO-2", "ZeRO-3", "ZeRO-3, 4 micro-batches"):
    describe(name)

# %% [markdown]
# 3Ψ: two all-gathers and one reduce-scatter of everything, half as much again as DDP. With four micro-batches it is
# 12Ψ, for all three happen for every micro-batch. Activation checkpointing adds none: a block is computed again while
# its weights are there for its backward.
#
# All messages of one step, in their order:

# %%
ledger = runs["ZeRO-3"][0]["ledger"]
sizes = sorted({entry.bytes for entry in ledger})
called = {sizes[0]: "around", sizes[-1]: "a block"}  # the unit around the blocks is the smallest
print(*(f"{entry.op} {called[entry.bytes]}" for entry in ledger), sep="\n")
for name, psi in zip(NAMES, (2, 2, 2, 3), strict=True):
    assert abs(psi_sent(name) - psi) < 0.01

# %% [markdown]
# Forward gathers the unit around the blocks, and then each block. Backward gathers them in the reverse order, each
# followed by its reduce-scatter; the unit around the blocks is needed from the first to the last moment. (FSDP does
# not free and gather that one in between, which saves one message.)
#
# > **Misconception.** "ZeRO-3 is model parallelism: each rank computes its part of the model." Every rank computes
# > the whole model, on its own data, with whole parameters. Only their *home* is divided. It is data parallelism.

# %% [markdown]
# ## 9. The stages side by side
#
# What each rank held at the end of backward, tensor by tensor, against the formulas for fp32.

# %%
bytes_held = {name: [of["held"] for of in runs[name]] for name in NAMES}
print(f"{world_size} ranks      formula    measured (rank 0)")
for stage, name in enumerate(NAMES):
    formula = model_states(n_parameters, stage=stage, ranks=world_size, precision="fp32").states
    for memory in bytes_held[name]:
        assert abs(memory.states / formula - 1) < 0.01
    print(f"{name:10}{formula:12,.0f}{bytes_held[name][0].states:12,.0f}")
plots.partition_picture(bytes_held, f"measured: {world_size} ranks at the end of backward")

# %% [markdown]
# *The figure: one panel for each version, one column for each rank, one row for parameters, gradients and optimizer
# states. Under DDP all is filled. ZeRO-1 leaves each rank one part of the optimizer's row, ZeRO-2 of the gradients'
# too, ZeRO-3 of all three.*
#
# Within one percent on every rank, as promised. The rest are Adam's step counters and the padding.
#
# States are what lasts. The **peak** of a step has activations and buffers too. The cell takes six layers, so that one
# unit is a small part of the model, and checkpointing, so that activations do not hide the rest. **Predict:** is
# the order of the peaks that of the states?

# %%
versions = dict(zip(NAMES, (Stage0, Zero1, Zero2, Zero3), strict=True))
tall = GPTConfig(layers=6, checkpoint=True)
peaks = {
    name: on_ranks(version, config=tall, rounds=2)[0]["peak"] for name, version in versions.items()
}
plots.memory_bars(peaks, f"measured: peak of a step, 6 layers, rank 0 of {world_size}")

# %% [markdown]
# *The figure: the peak of a step for each version, by part. The bars shrink from DDP to ZeRO-3, by less than the
# states do: activations stay, and buffers come.*
#
# So the order is the same. The parts of two bars are not to be compared one by one, for each peak lies at its own
# moment. Under ZeRO-1 it comes late in backward, when most gradients are there and many activations gone; under ZeRO-2
# and 3 it comes early.

# %% tags=["nbval-ignore-output"]
print("bytes   " + "".join(f"{part:>13}" for part in peaks["DDP"].parts()))
for name, memory in peaks.items():
    print(f"{name:8}" + "".join(f"{size:13,.0f}" for size in memory.parts().values()))

# %% [markdown]
# At these peaks the buffers are gradients of activations, and in ZeRO-3 the gathered parameters besides: a block and
# what is around the blocks. The flat gradients of a unit come a moment later, when its block's activations are gone.
# One block is about a sixth of this model, so one gathered unit is a lot. Of a model with 96 blocks it is about one
# percent.
#
# ### Ranks that do not divide the model
#
# 112,384 parameters on three ranks. The units are padded:

# %%
three = launch(run, Zero3, world_size=3, backend="gloo")
numbers = [n_parameters - gpt.layers * (12 * gpt.hidden**2 + 13 * gpt.hidden)]
numbers += [12 * gpt.hidden**2 + 13 * gpt.hidden] * gpt.layers
for count in numbers[:2]:
    print(f"a unit of {count:,} parameters: {-count % 3} of padding, shards of {-(-count // 3):,}")
whole = sum(-(-count // 3) for count in numbers)
assert {memory["held"].parameters for memory in three} == {4 * whole}
print(f"each rank holds {4 * whole:,} bytes of parameters; a third of all would be", end="")
print(f" {4 * n_parameters / 3:,.0f}")

# %% [markdown]
# <details><summary>What goes wrong without padding, if each rank takes <code>len // N</code> elements?</summary>
#
# The last one or two elements belong to nobody. Nothing fails: they are never updated, and the loss hardly shows it.
# Compare weights, not losses, when testing such code.
# </details>
#
# ### What PyTorch has
#
# - `ZeroRedundancyOptimizer` is ZeRO-1 beside DDP. It deals out whole tensors instead of shards of a flat one, and
#   each rank broadcasts what it has updated.
# - `fully_shard`, FSDP2, is ZeRO-3. With `reshard_after_forward=False` gathered parameters stay until backward has
#   used them, which is near to ZeRO-2: [lesson 07](07_fsdp.ipynb).
# - DeepSpeed has all three stages, and offload (lesson 08).
#
# The first one in place of ours:


# %%
class Library1(DDP):
    """ZeRO-1 by PyTorch."""

    def __init__(self, module, make_optimizer):
        super().__init__(module, gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=1e-3)

    step = Stage0.step


runs["library"] = on_ranks(Library1)
print(equal_losses("library"))
for name in ("ZeRO-1", "library"):
    shares = [f"{of['held'].optimizer:,.0f}" for of in runs[name]]
    print(f"{name:8} optimizer states on each rank: {', '.join(shares)} bytes")
ledger = runs["library"][0]["ledger"]
for op, psi in {"all_reduce": 2, "broadcast": 1}.items():
    assert ledger.bytes(op) == 4 * n_parameters
    print(f"{ledger.count(op):4} {op}, {ledger.bytes(op):,} bytes: {psi} Ψ")

# %% [markdown]
# The sum is the same but for padding and step counters; the shares are not: a tensor is not cut. And it sends 3Ψ, not
# our 2Ψ: DDP has already all-reduced all gradients, which is 2Ψ, and then every parameter is broadcast by the rank that
# updated it. (In a broadcast a tensor is sent N − 1 times, so each rank sends (N−1)/N of it on average.) In PyTorch
# FSDP is the better way today. Stage 1 for 2Ψ, which suits accumulation and pipelines, is in DeepSpeed and in
# Megatron-LM's distributed optimizer.
#
# > **What changes on real GPUs.** NCCL has a real reduce-scatter; gloo runs it as an all-reduce inside, so on the
# > CPU only the logical sizes show ZeRO's advantage. All-gathers and reduce-scatters run on streams of their own and
# > overlap with computing: the next block is gathered while this one computes. Lesson 07 looks at when.

# %% [markdown]
# ## 10. Clusters that are not there
#
# Four ranks on a laptop do not show what 1,024 GPUs hold. A simulation does, and needs neither GPUs nor time:
#
# - a **fake process group** says that it has 1,024 ranks. Its collectives return at once and move nothing;
# - **fake tensors** have shape and type and no memory. Operations on them compute shapes only;
# - the same FSDP code that trains for real runs on them, forward, backward and optimizer's step, and `track` counts.
#
# `simulate` shows one rank of such a cluster. Nothing in it knows the formulas, so it can disagree with them.
#
# First the small GPT, all three ways side by side: by formula, measured on real ranks, measured on the simulated
# cluster.

# %%
print(f"ZeRO-3, {world_size} ranks   parameters  gradients  optimizer   together")
three_ways = {
    "formula": model_states(n_parameters, stage=3, ranks=world_size, precision="fp32"),
    "real ranks": runs["ZeRO-3"][0]["held"],
    "simulated": simulate(gpt, world_size, stage=3).states,
}
for name, memory in three_ways.items():
    row = [memory.parameters, memory.gradients, memory.optimizer, memory.states]
    print(f"{name:17}" + "".join(f"{size:11,.0f}" for size in row))
    bound = 0.01 if name == "real ranks" else 0.05  # FSDP2 does not cut rows (below)
    assert abs(memory.states / three_ways["formula"].states - 1) < bound

# %% [markdown]
# **Predict.** The same model on 64, 256 and 1,024 ranks: does a rank hold a quarter each time?

# %%
print(f"{'ranks':>6}{'formula':>12}{'simulated, rank 0':>20}")
for n in (64, 256, 1024):
    formula = model_states(n_parameters, stage=3, ranks=n, precision="fp32").states
    print(f"{n:6,}{formula:12,.0f}{simulate(gpt, n, stage=3).states.states:20,.0f}")

# %% [markdown]
# It stops. FSDP2 cuts every tensor along its first dimension (or one that `shard_placement_fn` names) into whole rows.
# Our largest tensors have 256 rows: from 256 ranks on rank 0 has one row of every tensor, and on 1,024 most ranks have
# nothing at all. A small model on a large cluster is not what ZeRO-3 is for.
#
# ### From GPT-2 to 175 billion
#
# Now shapes that belong there, with checkpointing and one sequence a rank. Layers are alike, so a few of them are
# enough: simulate three and four, and the difference is what each further one adds. That this is right is checked on
# GPT-2 and on GPT-3 6.7B, all their layers simulated.


# %%
def by_two_depths(config):
    """States and peak of any number of layers, from simulations of three and of four."""
    few, more = (simulate(replace(config, layers=n), cluster) for n in (3, 4))

    def of(layers):
        found = []
        for a, b in ((few.states, more.states), (few.peak, more.peak)):
            pairs = zip(a.parts().items(), b.parts().values(), strict=True)
            found.append(Memory(**{part: x + (layers - 3) * (y - x) for (part, x), y in pairs}))
        return found

    return of


# %%
big = {name: replace(PUBLISHED[name], checkpoint=True) for name in SHOWN}
deeper = {name: by_two_depths(config) for name, config in big.items()}
found = {name: deeper[name](config.layers) for name, config in big.items()}
for name, layers in (("GPT-2", 12), ("GPT-3 6.7B", 32)):
    states, peak = deeper[name](layers)
    simulated = simulate(replace(big[name], layers=layers), cluster)
    assert abs(states.states - simulated.states.states) < 1
    assert abs(peak.total / simulated.peak.total - 1) < 0.01
    print(f"{name}: two depths agree with {layers} layers simulated")

# %%
print(f"states of one of {cluster} ranks, fp32   formula    simulated")
for name, (states, _) in found.items():
    count = parameters(big[name])
    formula = model_states(count, stage=3, ranks=cluster, precision="fp32").states
    print(f"{name:31}{formula / 1e9:9.3f} GB{states.states / 1e9:10.3f} GB")
    assert abs(states.states / formula - 1) < 0.01

# %% [markdown]
# Within one percent, up to 175 billion. What these formulas do not know is the peak: how much is gathered at a time,
# and what else lives then. The simulation has it.

# %%
plots.memory_bars(
    {name: peak for name, (_, peak) in found.items()},
    f"measured on a simulated cluster: peak of one of {cluster} ranks, fp32",
    limit={GPUS["h100"].name: GPUS["h100"].memory_bytes},
)

# %% [markdown]
# *The figure: the peak of a step by part, from GPT-2 to 175 billion parameters. Up to 13 billion most of it are
# buffers. At 175 billion more than half are model states, the buffers come second, and the whole bar ends just left of
# the line of 80 GB.*

# %%
print(f"one of {cluster} ranks, fp32, GB".ljust(32) + "formula   less gradients   simulated peak")
for name, (_, peak) in found.items():
    formula = training(big[name], 1, stage=3, ranks=cluster, precision="fp32")
    most, least = formula.total, formula.total - formula.gradients
    print(f"{name:22}{most / 1e9:17.2f}{least / 1e9:17.2f}{peak.total / 1e9:17.2f}")
    assert 0.99 * least < peak.total < 1.01 * most

# %% [markdown]
# The buffers of the largest are not a mistake. One of its blocks has 1.8 billion parameters, 7.2 GB in fp32, and
# several blocks' worth is alive at the peak: gathered parameters, their gradients, and copies on their way. Dividing
# states among more ranks does not change that; 16-bit parameters and smaller units do (lesson 07).
#
# > **Misconception.** "With enough ranks ZeRO-3 fits anything." What is gathered at a time is as large on a thousand
# > ranks as on two. The largest unit must fit, whole, beside its gradients.
#
# The formula's peak is higher because it counts all gradients beside all activations, as in a second micro-batch. The
# simulated step has only one micro-batch, so its peak lies between the formula with gradients and without:
#
# - up to 13 billion parameters it comes early in backward, when few gradients are there: near the second column;
# - with 175 billion it comes late, with nearly all gradients there and hardly any activations. The formula has 9.7 GB
#   of activations on top.
#
# > **What changes on real GPUs.** A simulation counts what PyTorch allocates. It knows nothing of fragmentation, and
# > its peak is that of CPU kernels, some of which take other temporaries than a GPU's.

# %% [markdown]
# ## 11. Offload: memory that is not on the GPU
#
# The host of a GPU has memory too, usually more, and an NVMe drive has more again. **Offload** keeps there what a step
# needs only once: the optimizer's states and the gradients ([ZeRO-Offload](https://arxiv.org/abs/2101.06840), Ren et
# al. 2021), and then the parameters too, on drives as well (ZeRO-Infinity, Rajbhandari et al. 2021).
#
# ### On paper
#
# The optimizer runs on the host. In each step gradients travel down and new parameters up, 2 bytes each for a
# parameter, in both directions of PCIe at once. On a drive lie the 12 bytes of K for each parameter, and each step
# reads and writes them all.
#
# **Predict** (question 10) for one GPU and 7 billion parameters. An NVMe drive has 4 lanes of PCIe where a GPU has
# 16, so a quarter of its bandwidth is the most that the slot allows; drives are slower.

# %%
psi = 7e9
print("7 billion parameters, one GPU     host: 2 bytes     drive: 12 bytes, each way")
for key in ("pcie4", "pcie5"):
    link = LINKS[key]
    host, drive = 2 * psi / link.bandwidth, 12 * psi / (link.bandwidth / 4)
    print(f"{link.name:31}{host:10.2f} s{drive:18.1f} s")

# %% [markdown]
# Is that much? It depends on how long the step computes. As in lesson 05, section 5, the size of the model cancels:
# 6 FLOPs a parameter and token, at 400 TFLOP/s (what Llama 3 reached on an H100, *recorded*,
# [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), table 4).

# %%
for where, width, bandwidth in (
    ("host, PCIe 5 x16", 2, LINKS["pcie5"].bandwidth),
    ("drive, PCIe 5 x4", 12, LINKS["pcie5"].bandwidth / 4),
):
    tokens = width / bandwidth * 400e12 / 6
    print(f"{where}: travels as long as the GPU computes on {tokens:,.0f} tokens")
pcie, h100 = LINKS["pcie5"].bandwidth, GPUS["h100"]
nvlink, hbm = LINKS[h100.nvlink].bandwidth / pcie, h100.memory_bandwidth / pcie
print(f"of an H100, in PCIe 5 x16: NVLink {nvlink:.0f}, HBM {hbm:.0f}")

# %% [markdown]
# Two thousand tokens a GPU are few, fifty thousand are many: the host is near, the drive is far. N ranks with a
# shard each have N links, and perhaps N drives, so ZeRO and offload go together. And the host must also *compute*
# Adam, which reads and writes all states: over its own memory bandwidth that can take longer than the journey.
#
# ### For real
#
# `OffloadedAdam` keeps master weights and both moments in host memory. Where there is a GPU, its tensors cross PCIe
# and the GPU's own counter shows what it saves. Without one, host and device are the same memory, and only the
# result is checked.


# %%
class OffloadedAdam:
    """Adam on the CPU for parameters that live elsewhere."""

    def __init__(self, parameters, lr):
        self.parameters = [*parameters]
        self.masters = [p.detach().to("cpu", torch.float32, copy=True) for p in self.parameters]
        self.optimizer = torch.optim.Adam(self.masters, lr=lr)

    def step(self):
        for master, p in zip(self.masters, self.parameters, strict=True):
            master.grad = p.grad.to("cpu", torch.float32)  # down
        self.optimizer.step()
        for master, p in zip(self.masters, self.parameters, strict=True):
            p.data.copy_(master)  # up
            master.grad = p.grad = None


# %%
def offloaded(make):
    """Losses, and bytes on the GPU after the last step, or None where there is no GPU."""
    model, losses = build(gpt).to(device()), []
    optimizer = make(model.parameters())
    for step in range(steps):
        loss = loss_of(model, *take(range(per_rank * step, per_rank * (step + 1))))
        loss.backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = None
        losses.append(loss.item())
        del loss
    on_gpu = torch.cuda.memory_allocated() if device().type == "cuda" else None
    return losses, on_gpu


here, there = (
    launch(offloaded, make, world_size=1)[0]
    for make in (adam, lambda parameters: OffloadedAdam(parameters, lr=1e-3))
)
assert max(abs(a - b) for a, b in zip(here[0], there[0], strict=True)) < 1e-4
print(f"{steps} losses equal to those of Adam on the device")

# %% tags=["nbval-ignore-output"]
if here[1] is None:
    print("no GPU here: host memory was exchanged with host memory")
else:
    print(f"on the GPU after a step: {here[1]:,} bytes, offloaded {there[1]:,} bytes")

# %% [markdown]
# ### The idea of a drive, on any machine
#
# A file can be **mapped** into memory: it looks like an array, and the operating system reads a page of it when it
# is touched. Put Adam's moments there, step one unit after the other, and tell the system after each that its pages
# are no longer needed. Then the file holds all moments, and memory those of one unit.
#
# `mapped_moments` gives an Adam its states in such a file before its first step, so Adam itself needs no change.


# %%
def mapped_moments(optimizer, mapped, offset):
    """Give Adam zero moments in a mapped file, from `offset` on; returns where they end."""
    for p in optimizer.param_groups[0]["params"]:
        state = {"step": torch.zeros(())}
        for moment in ("exp_avg", "exp_avg_sq"):
            flat = torch.frombuffer(mapped, dtype=p.dtype, count=p.numel(), offset=offset)
            state[moment] = flat.view_as(p)
            offset += flat.nbytes
        optimizer.state[p] = state
    return offset


def resident(path):
    """Bytes of the mapped file in this process's memory; None if the system does not say."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        return None
    _, _, rest = maps.read_text().partition(str(path))
    return 1024 * int(rest.partition("Rss:")[2].split()[0]) if rest else 0


# %%
def by_units(folder, config, drop):
    """Losses of Adam with moments in a file, its size, and the most of it that was in memory."""
    model, losses, most = build(config), [], []
    parts = [*model.blocks, nn.ModuleList([model.embedding, model.position, model.norm])]
    optimizers = [adam(part.parameters()) for part in parts]
    path, size = folder / "moments", 8 * parameters(config)
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        mapped, offset = mmap.mmap(file.fileno(), size), 0
    for optimizer in optimizers:
        offset = mapped_moments(optimizer, mapped, offset)
    for step in range(3):
        loss = loss_of(model, *take(range(per_rank * step, per_rank * (step + 1))))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            most.append(resident(path))
            if drop:
                mapped.madvise(mmap.MADV_DONTNEED)
        losses.append(loss.item())
    return losses, size, most


# %%
def in_memory(config):
    """Losses of Adam with moments in memory."""
    model, losses = build(config), []
    optimizer = adam(model.parameters())
    for step in range(3):
        loss = loss_of(model, *take(range(per_rank * step, per_rank * (step + 1))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


deep = GPTConfig(layers=8, hidden=192)
plain = alone(in_memory, deep)
with tempfile.TemporaryDirectory() as folder:
    found = {drop: alone(by_units, Path(folder), deep, drop) for drop in (False, True)}
assert all(losses == plain for losses, _, _ in found.values())
print(f"{parameters(deep):,} parameters, moments in a file of {found[True][1]:,} bytes:", end="")
print(" equal losses, to the last bit")

# %% tags=["nbval-ignore-output"]
for drop, (_, size, in_use) in found.items():
    if None in in_use:
        print("this system does not say how much of a file is in memory")
        break
    print(f"pages {'dropped' if drop else 'kept'} after each unit: at most", end="")
    print(f" {max(in_use) / 1e6:.1f} of {size / 1e6:.1f} MB in memory ({max(in_use) / size:.0%})")
    assert not drop or max(in_use) < 0.5 * size

# %% [markdown]
# One block of eight at a time, and what the system reads ahead, instead of all. (The pages dropped may still lie in
# the system's file cache, which gives them up as soon as anyone needs the memory.) A real system starts to read the
# next unit's states while it computes this one's, in large pieces and past the cache.
#
# > **Misconception.** "Offload makes large models trainable for free." It trades memory for time on a link that is a
# > seventh as fast as NVLink and a fiftieth as fast as HBM (PCIe 5 on an H100, lesson 01). It pays where memory is
# > what is missing: fine-tuning a large model on one GPU.
#
# > **What changes on real GPUs.** Host memory must be *pinned* (lesson 01), or the copies are slow and block. The
# > copies run on a stream of their own, gradients of one block downwards while backward computes the next.
# > ZeRO-Offload brings a fast Adam for CPUs; PyTorch's FSDP has `CPUOffloadPolicy` (lesson 07).

# %% [markdown]
# ## 12. Does it fit?
#
# `training` puts all parts together: states, activations and buffers, of a shape, a batch, a stage, and a number of
# ranks.
#
# **Predict.** GPT-3 13B in mixed precision on 64 ranks, one sequence on each, with checkpointing. From which stage on
# does it fit on an 80 GB GPU?

# %%
thirteen = replace(PUBLISHED["GPT-3 13B"], checkpoint=True)
needs = {name: training(thirteen, 1, stage=i, ranks=64) for i, name in enumerate(NAMES)}
assert [round(memory.total / 1e9) for memory in needs.values()] == [207, 55, 31, 8]
plots.memory_bars(needs, "modelled: GPT-3 13B on 64 ranks, one rank", limit=gpus)

# %% [markdown]
# *The figure: DDP needs 207 GB, more than an H100 has, and ZeRO-1 55. ZeRO-2 ends just below the V100's 32 GB, and
# ZeRO-3 needs 8.*
#
# It fits from stage 1 on, if gradients are views into the buckets, as this lesson assumes since section 5. With DDP's
# default there is a second copy of them, 26 GB more (`gradient_copy=True`): ZeRO-1 would need 81 GB, one more than an
# H100 has.
#
# The calculator calls the same function for any of these shapes, or for one of your own, and says which GPUs have the
# room.

# %%
calculator = memory_calculator()
calculator

# %% [markdown]
# *The calculator: model, precision, optimizer, stage, ranks, sequence, batch, checkpointing and buckets; below them a
# bar of the five parts, and for each GPU whether it fits and why. In a notebook that is not running it shows one
# setting.*
#
# Answer with it:
#
# <details><summary>GPT-3 13B as above, mixed precision, ZeRO-1: on how many H100s does it fit, with a tenth free? And
# with buckets apart from gradients?</summary>
#
# On 16, with 63 GB on each. On 8 it is 72.2, just over the 72 that leave a tenth free. On 4,096, where the optimizer's
# share is next to nothing, it is still 53, since parameters and gradients are whole. With buckets apart no number
# leaves a tenth free: even on 4,096 it is 79 GB.
# </details>
#
# <details><summary>GPT-3 175B, mixed precision, ZeRO-3, one sequence a rank: the least number of H100s, of those that
# the slider has? And without checkpointing?</summary>
#
# 64, with about 66 GB each; on 32 it would be 109. Without checkpointing there is no such number: activations and
# gathered units do not become less with more ranks, and on 4,096 ranks it is still 94 GB.
# </details>
#
# The next cell holds these answers against `training`.

# %%
def total(name, again=False, **layout):
    """GB on one rank, one sequence; `again` for checkpointing."""
    return training(replace(PUBLISHED[name], checkpoint=again), 1, **layout).total / 1e9


thirteen_on = {n: round(total("GPT-3 13B", True, stage=1, ranks=n), 1) for n in (8, 16, 4096)}
assert thirteen_on == {8: 72.2, 16: 62.6, 4096: 52.9}
apart = {n: total("GPT-3 13B", True, stage=1, ranks=n, gradient_copy=True) for n in (64, 4096)}
assert {n: round(size) for n, size in apart.items()} == {64: 81, 4096: 79}
third = {n: round(total("GPT-3 175B", True, stage=3, ranks=n)) for n in (32, 64, 1024)}
assert third == {32: 109, 64: 66, 1024: 25}
assert round(total("GPT-3 175B", stage=3, ranks=4096)) == 94

# %% [markdown]
#
# ## Recap, with the numbers of this run

# %%
print(f"small GPT, {n_parameters:,} parameters, fp32 Adam, {world_size} ranks:")
for name in NAMES:
    states, ledger = runs[name][0]["held"].states, runs[name][0]["ledger"]
    print(f"{name:7}{states:12,.0f} bytes of model states on a rank,", end="")
    print(f"{ring_bytes(ledger):10,.0f} bytes sent in a step")

# %% [markdown]
# - Five parts fill a rank: parameters, gradients, optimizer, activations, buffers. Where activations are most of it,
#   the peak of a step comes when backward begins.
# - With Adam 16 bytes a parameter are kept, in fp32 and in mixed precision; with fp32 gradients 18. Seven billion
#   parameters are 112 GB.
# - ZeRO-1 divides the optimizer's states and ZeRO-2 the gradients, for the traffic of DDP: 2Ψ. ZeRO-3 divides the
#   parameters too, for 3Ψ. Losses are those of DDP.
# - Every micro-batch costs ZeRO-2 one reduce-scatter more, and ZeRO-3 all its traffic again.
# - Activations grow with tokens and no stage divides them. Checkpointing leaves the inputs of blocks, and the logits.
# - A simulated cluster shows what one of a thousand ranks holds, rows that cannot be divided included.
# - Offload moves states to the host, or a drive, over a slow link. It needs many tokens a step to hide.
#
# <details><summary>Answers to the ten predictions</summary>
#
# 1. In this run when backward begins: all activations are there (section 1). Where states outweigh activations, late in
#    backward or in the optimizer's step (section 9).
# 2. 16 and 16 (section 2).
# 3. Two hold the 112 GB; one H200 does too. Activations come on top (section 2).
# 4. Both double (section 3).
# 5. 2.3; 4 is the limit for many ranks (section 4).
# 6. The same, 2Ψ (sections 6 and 7).
# 7. Half as much again, 3Ψ (section 8).
# 8. ZeRO-3: 12Ψ. ZeRO-2: 5Ψ, ZeRO-1: 2Ψ (sections 7 and 8).
# 9. 175 · 16 / 1,024 = 2.7 GB (section 4). At the peak of a step it is nine times that, 25 GB, most of it gathered
#    parameters and whole gradients of a few blocks (section 12).
# 10. 84 GB each way: 11 s over 4 lanes of PCIe 4, 5 s over PCIe 5 (section 11).
# </details>
#
# **Exercises:** [exercises/06_zero](../exercises/06_zero_exercises.ipynb). **Next:** [07 fsdp](07_fsdp.ipynb), ZeRO-3
# as one uses it.
#
# **Worth reading**
# - S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, *ZeRO: memory optimizations toward training trillion parameter
#   models*, 2020, [arXiv 1910.02054](https://arxiv.org/abs/1910.02054): the three stages, with their analysis of
#   memory and communication.
# - S. Rajbhandari et al., *ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning*, 2021,
#   [arXiv 2104.07857](https://arxiv.org/abs/2104.07857): what offload to drives needs in bandwidth.
# - V. Korthikanti et al., *Reducing activation recomputation in large transformer models*, 2022,
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): activations counted, and what to compute again.
