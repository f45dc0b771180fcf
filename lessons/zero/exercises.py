# %% [markdown]
# # Exercises 06 · Where does the memory go, and what does each ZeRO stage remove?
#
# Five exercises on [06 ZeRO](../notebooks/06_zero.ipynb). In three you build the stages on real ranks; in two you
# count bytes on paper and let Python do the arithmetic. All of them take about 145 minutes.
# **If you do only these:** 1, 2 and 4.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | the bytes of model states | 2 of 5 | 15 |
# | 2 | an optimizer sharded over the ranks (ZeRO-1) | 3 of 5 | 40 |
# | 3 | gradients sharded as they appear (ZeRO-2) | 3 of 5 | 30 |
# | 4 | a layer with a sharded weight (ZeRO-3) | 4 of 5 | 40 |
# | 5 | the largest model that fits | 3 of 5 | 20 |
#
# Each stands alone. *Follows* on each card names the section of the lesson to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/06_zero_solutions.ipynb).
#
# **What a check does.** In Exercises 2 to 4 it trains a small model in float64 for some steps on real ranks, and the
# same model on all batches in one process. Numbers have to agree to 12 digits. Some models are of the kind that breaks
# things: sizes that the number of ranks does **not divide**, a **frozen** layer, a **tied** weight, and ranks that
# start from different **seeds**. Then the check reads the **ledger** of each rank, and counts the **bytes that are
# alive**. If the ranks wait for each other, it stops them within seconds and shows where each one stood.

# %% tags=["parameters"]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_utils import launch
from course_utils.memory import held_memory, track
from lessons.zero import check

WORLD_SIZE = 4  # ranks of the demonstrations; the checks choose their own

# %% [markdown]
# ---
# ## Exercise 1 · The bytes of model states
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 15 | 06, Model states; ZeRO on paper | GB of each part, within 1 % |
#
# A model with 7.5 billion parameters trains on 64 ranks. How many GB of parameters, of gradients and of the optimizer
# does each rank hold
#
# - at stage 1, in fp32 with Adam,
# - at stage 2, in mixed precision with momentum,
# - at stage 3, in mixed precision with Adam?
#
# | precision | parameters | gradients | master weights, states of the optimizer |
# |---|---|---|---|
# | `"fp32"` | fp32 | fp32 | no master weights; states fp32 |
# | `"mixed"` | bf16 | bf16 | fp32 |
# | `"mixed, fp32 gradients"` | bf16 | fp32 | fp32 |
#
# An optimizer keeps states of each parameter: `"sgd"` none, `"momentum"` one, `"adam"` two. Master weights count as
# the optimizer's.


# %%
# {{state_bytes}}


# %%
check.state_bytes(state_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with one rank and one parameter: how many bytes are its value, its gradient, its master copy and its states?
# fp32 has 4 bytes, bf16 has 2.
# </details>
# <details><summary>Hint 2</summary>
#
# Stage 1 divides the optimizer's part by the number of ranks, stage 2 the gradients as well, stage 3 all three.
# </details>
# <details><summary>Hint 3</summary>
#
# Mixed with Adam: 2, 2 and 4 + 4 + 4 bytes a parameter. At stage 2 each rank holds 2 + (2 + 12)/N of them.
# </details>
# <details><summary>Does mixed precision save memory?</summary>
#
# Not for model states: fp32 needs 4 + 4 + 8 = 16 bytes as well. It saves memory for activations, and time.
# </details>

# %% [markdown]
# When your function passes, compare with the figures that the ZeRO paper prints for this model in mixed precision with
# Adam (Rajbhandari et al. 2020, figure 1): 120, 31.4, 16.6 and 1.9 GB.

# %%
for stage in range(4):
    print(f"stage {stage}: {sum(state_bytes(7.5e9, stage, 64, 'mixed', 'adam')):.1f} GB")

# %% [markdown]
# ---
# ## Flat tensors, and what a slice keeps
#
# All parameters, joined to one flat tensor, can be cut into N equal parts if zeros fill it up. `join` does that, and
# you may use it in what follows. Predict: if 10 elements are cut for 4 ranks, how many does a part have, and what does
# the last one hold? Then predict how many bytes a slice of 3 elements keeps alive.


# %%
# {{join}}


padded = join([torch.arange(1.0, 5), torch.arange(5.0, 11)], WORLD_SIZE)
for part in padded.chunk(WORLD_SIZE):
    print(part.tolist())

first = padded.chunk(WORLD_SIZE)[0]
slices = {"slice": first, "clone": first.clone()}
for name, part in slices.items():
    print(f"{name}: {part.nbytes} bytes, keeps {part.untyped_storage().nbytes()} alive")

# %% [markdown]
# A slice is a **view**: it keeps the whole tensor that it was cut from. Memory is saved only when nothing points to the
# whole any more. The checks count so.

# %% [markdown]
# ---
# ## Exercise 2 · An optimizer sharded over the ranks
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 40 | 06, ZeRO-1 | states of 1/N of the parameters on each rank; one all-gather a step |
#
# After an all-reduce all ranks hold the same mean gradient, and all N of them compute the same step, with N copies of
# the optimizer's states. In **ZeRO-1** rank r has states for part r only. It steps its part; then an all-gather
# brings the new parts to all ranks.
#
# Adam and SGD work on each element by itself, so the parts may cut through parameters. Join the trained parameters to
# one flat tensor, fill it up with zeros, and cut it into N equal parts. The optimizer of a rank gets one tensor, its
# part, and uses the `.grad` of that tensor.
#
# Your function gets a module that every rank made from another seed, and returns what has to be done after each
# backward. The gradients are then already the mean over the ranks.


# %%
# {{shard_optimizer}}


# %%
check.shard_optimizer(shard_optimizer)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Before the first step every rank takes over all parameters of rank 0, with `dist.broadcast(p.detach(), src=0)`. Then
# four things happen in a step: cut this rank's part out of the flat gradient, step, gather, and write the pieces back
# into the parameters. Which of them does the optimizer do by itself?
# </details>
# <details><summary>Hint 2</summary>
#
# `part = nn.Parameter(…)` made of this rank's part of the flat parameters, once. `module.parameters()` yields a tied
# weight once. In a step, `part.grad = …` and `optimizer.step()`. Clone both, or the whole flat tensor stays alive.
# </details>
# <details><summary>Hint 3</summary>
#
# `dist.all_gather_single(flat, part.detach())` joins the parts in the order of the ranks.
# `nn.utils.vector_to_parameters(flat, trained)` hands the pieces back to the parameters, and leaves the zeros at the
# end alone. By hand: `flat.split` with the numbers of elements, and `p.detach().copy_(piece.view_as(p))`.
# </details>
# <details><summary>An all-reduce and an all-gather: is that not 3Ψ of traffic?</summary>
#
# As written here, it is. But a rank needs only its part of the mean gradient, which a reduce-scatter brings at half the
# price: Ψ for it and Ψ for the all-gather make 2Ψ, as in plain data parallelism. This is the next exercise.
# </details>

# %% [markdown]
# When your function passes, count what each rank holds as ranks are added.


# %%
def optimizer_bytes():
    made = []

    def adam(parameters):
        made.append(torch.optim.Adam(parameters))
        return made[0]

    module = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    step = shard_optimizer(module, adam)
    module(torch.ones(1, 100)).sum().backward()
    step()
    return int(held_memory(module, made[0]).optimizer)


for n in (1, 2, WORLD_SIZE):
    counts = launch(optimizer_bytes, world_size=n, backend="gloo")
    print(f"N = {n}: {counts[0]:>7,} bytes of optimizer on each rank")

# %% [markdown]
# The module has 11,110 parameters. For each element of its part, a rank holds two states and the part itself, 12 bytes;
# 4 more are Adam's step counter. The part is where mixed precision keeps its fp32 master weights.

# %% [markdown]
# ---
# ## Exercise 3 · Gradients sharded as they appear
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 30 | 06, ZeRO-2 | never more than one whole gradient in memory; no more bytes sent than gradients have |
#
# A rank that steps one part needs one part of the mean gradient. In **ZeRO-2** it keeps no more: as soon as backward
# has made a gradient, a **reduce-scatter** adds the ranks' gradients, hands each rank its part, and the whole is
# let go. Done after backward it would save nothing, as all gradients would have been in memory at once.
#
# `p.register_post_accumulate_grad_hook(fn)` calls `fn(p)` as soon as `p.grad` is there. Cut each parameter by itself:
# flatten its gradient, fill it up with zeros to N parts of ⌈numel / N⌉ elements, and let rank r keep part r of the
# mean. All ranks have equal modules, and every trained parameter gets a gradient on every rank.


# %%
# {{reduce_scatter_gradients}}


# %%
check.reduce_scatter_gradients(reduce_scatter_gradients)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# All the work is in the hook; the function itself only makes an empty dictionary, registers the hook with each trained
# parameter, and returns.
# </details>
# <details><summary>Hint 2</summary>
#
# In the hook: flatten, fill up, divide by N, reduce-scatter into an empty tensor of one part, `p.grad = None`.
# </details>
# <details><summary>Hint 3</summary>
#
# `dist.reduce_scatter_single(shard, flat)` with `shard = flat.new_empty(size)`. If the dictionary has a shard of `p`
# already, add to it.
# </details>
# <details><summary>One message a parameter: is that a good idea?</summary>
#
# Each pays the latency, so libraries fill buckets: several gradients in one reduce-scatter. A larger bucket means fewer
# messages, and more whole gradients in memory at once.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · A layer with a sharded weight
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 40 | 06, ZeRO-3 | no whole weight alive after forward; 3Ψ of traffic in a step |
#
# In **ZeRO-3** a rank keeps its part of the weights, too. A layer gathers its weight, multiplies, and lets go of
# it. Backward needs the weight once more, gathers it once more, and reduce-scatters the gradient.
#
# Autograd keeps what a multiplication needs for backward: with `F.linear(x, weight)` the whole weight stays alive. And
# it does not differentiate these collectives. So you write both directions yourself, as a `torch.autograd.Function`.
# The one below computes y = x · w² and keeps x and w, but not w². Predict dw, the last number it prints.


# %%
class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w**2

    @staticmethod
    def backward(ctx, dy):  # gets dL/dy, returns dL/dx and dL/dw
        x, w = ctx.saved_tensors
        return dy * w**2, (dy * x * 2 * w).sum()


x, w = torch.ones(3, requires_grad=True), torch.tensor(5.0, requires_grad=True)
Squared.apply(x, w).sum().backward()
print(f"dx {x.grad.tolist()}, dw {w.grad.item():g}")

# %% [markdown]
# w is one number for three elements, so its gradient is the sum of three times 2 · 5. `backward` returns one gradient
# for each argument of `forward`; None for one that needs none.
#
# Now the layer, without bias: y = x Wᵀ. `gathered_layer` gets
#
# - `x` of shape (…, in): this rank's batch. All ranks have the same shape;
# - `shard`, an `nn.Parameter` of ⌈out · in / N⌉ elements: this rank's part of the flat weight, filled up with zeros.
#   After backward its grad is to be this part of the *mean* gradient over the ranks. A frozen one has `requires_grad`
#   False;
# - `shape`: (out, in), that of the whole weight;
#
# and returns y of shape (…, out). This is how a weight is gathered. *When* it is, and who lets go of it, is for you to
# write.


# %%
# {{gather}}


# %%
# {{Gathered}}


# {{gathered_layer}}


# %%
check.gathered_layer(gathered_layer)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Use `gather` in both directions. Save x and the shard with `ctx.save_for_backward`; a shape can be an attribute,
# `ctx.shape = shape`.
# </details>
# <details><summary>Hint 2</summary>
#
# With y = x Wᵀ: dx = dy W, and dW = dyᵀ x. Where x has more dimensions, dW adds over all but the last:
# `dy.flatten(0, -2).T @ x.flatten(0, -2)`.
# </details>
# <details><summary>Hint 3</summary>
#
# The gradient of the shard: dW flattened, divided by N, filled up with zeros, and reduce-scattered into
# `torch.empty_like(shard)`. `ctx.needs_input_grad[1]` says whether it is needed. Return three things: dx, the gradient
# of the shard, and None for the shape.
# </details>
# <details><summary>Where do the 3Ψ come from?</summary>
#
# Two all-gathers and one reduce-scatter of all weights, where plain data parallelism has an all-reduce, which is as
# much as one of each. So at 1.5 times the traffic the parameters take 1/N of the memory.
# </details>

# %% [markdown]
# When your function passes, compare what is alive after the forward pass through four layers, once with whole weights,
# once with shards.


# %%
def alive_after_forward(cut):
    n, width = dist.get_world_size(), 64
    sizes = [-(-width * width // n) if cut else (width, width)] * 4
    weights = nn.ParameterList(torch.ones(size) / width for size in sizes)
    with track(weights) as tracker:
        x = torch.ones(2, width)
        for w in weights:
            x = torch.tanh(gathered_layer(x, w, (width, width)) if cut else F.linear(x, w))
        return int(tracker.mark("after forward").total)


for cut in (False, True):
    count = launch(alive_after_forward, cut, world_size=WORLD_SIZE, backend="gloo")[0]
    print(f"{'shards' if cut else 'whole weights':<13} {count:>6,} bytes after forward")

# %% [markdown]
# In both cases 2,560 bytes are x and the four outputs of tanh. ZeRO does not cut activations. The rest is the weights,
# whole in the first line and 1/N of them in the second.

# %% [markdown]
# ---
# ## Exercise 5 · The largest model that fits
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 20 | 06, Does it fit? | the exact number of layers |
#
# GPUs have 80 GB; 20 GB of each are reserved for activations and everything else. A GPT has layers of 12 · width²
# parameters, and an embedding of vocabulary · width, which the head shares. It trains in mixed precision with Adam:
# 2 bytes of parameter, 2 of gradient and 12 of the optimizer.
#
# Stage 3 needs room for one thing more. While a **unit**, a layer or the embedding, is used, its parameters are
# gathered, and in backward its whole gradient is there as well: 2 + 2 bytes a parameter, for one unit at a time. So
# there must be room for the largest unit.
#
# With width 4,096 and a vocabulary of 128,256, how many layers fit on 64 GPUs at stages 3, 2 and 1? The check also asks
# for stage 0, where nothing is divided.


# %%
# {{largest_model}}


# %%
check.largest_model(largest_model)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three steps: the bytes that are free on one GPU, the bytes a parameter takes on one GPU, and the parameters that fit.
# </details>
# <details><summary>Hint 2</summary>
#
# A parameter takes 2 + 2 + 12/N bytes at stage 1. Of the parameters that fit, take the embedding off before you divide
# by the size of a layer, and round down.
# </details>
# <details><summary>Hint 3</summary>
#
# At stage 3, 4 · max(layer, embedding) bytes are not free, whatever the number of ranks. If the free bytes do not even
# hold the embedding, the answer is 0.
# </details>
# <details><summary>What if ranks are added without end?</summary>
#
# Stage 1 never gets below 4 bytes a parameter, stage 2 not below 2: with 60 GB that is 15 and 30 billion parameters, on
# however many GPUs. Only at stage 3 does the number of layers grow with the number of ranks. What limits the width
# there is one unit, which must fit on a GPU whole.
# </details>
