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
# # How do I split one layer over ranks?
#
# One layer of GPT-3 175B has 1.8 billion parameters. FSDP (lesson 07) divides where they are *kept*, and brings them
# together again for each use. **Tensor parallelism** divides the *computation*: a rank keeps a part of each matrix,
# multiplies with this part only, and never sees the rest. The price is an exchange of activations in the middle of
# every layer. Within a node of eight GPUs that price can be borne. On 32 GPUs of four nodes a GPU did less than a
# sixth of what it did on two (*recorded*, [Ultra-Scale
# Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook): 2,146 against 13,923 tokens/s). This lesson
# builds all of it, and computes where the line is.
#
# **You will be able to**
# - *split* linear layers, attention, embedding and loss over ranks, so that gradients are right too;
# - *count* what it sends, and *predict* it from the shape of the layer;
# - *write* a plan for PyTorch's `parallelize_module`, and *find* what it sends too much;
# - *add* sequence parallelism, and *measure* the activations that it saves;
# - *decide* from links and FLOP/s how many ranks may share a layer.
#
# **Before this:** [02 collectives](02_collectives.ipynb), [05 scaling efficiency](05_scaling_efficiency.ipynb),
# [06 zero](06_zero.ipynb), [07 fsdp](07_fsdp.ipynb). **Time:** about 120 minutes to read, under a minute to run.

# %% [markdown]
# ## Ten predictions
#
# Write down an answer to each, however unsure. They come up again on the way, and the answers are at the end.
#
# 1. Four ranks share a layer. Do they read the same text, or each its own?
# 2. A linear layer is split by output features. Which part of its forward or backward needs communication?
# 3. The loss of a split model is right. Can its gradients be wrong?
# 4. An MLP has two linear layers. How many all-reduces does it need in forward and backward together?
# 5. Queries, keys and values come from one joint matrix. Is a quarter of its rows what a rank of four needs?
# 6. Two key-value heads, four ranks. Who gets what?
# 7. The loss needs a softmax over the whole vocabulary. What must be sent, if each rank has a quarter of the logits?
# 8. Sequence parallelism replaces each all-reduce by an all-gather and a reduce-scatter. Does it send more?
# 9. By what factor do activations shrink on 8 ranks with tensor parallelism alone?
# 10. Eight GPUs, joined by NVLink or by InfiniBand: what share of a layer's time is communication?

# %% [markdown]
# The first cell imports everything and names every parameter. The number of ranks must divide the 12 heads of the
# model below.

# %% tags=["parameters"]
import copy
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from course_utils import device, launch, plots, record, recorded
from course_utils.costs import TwoLevelCluster, all_reduce_seconds, bytes_sent, flat_cluster
from course_utils.data import Windows
from course_utils.hardware import GPUS, LINKS
from course_utils.memory import held_memory, model_states
from course_utils.models import PUBLISHED, SeparateQKVAttention, TransformerConfig, build_gpt

world_size = 4  # ranks that share each layer: 2, 3, 4 or 6
per_step = 4  # windows of text in a step, the same ones on every rank
steps = 3  # training steps of each comparison

# %% [markdown]
# ## 1. Two ways to cut a matrix
#
# A linear layer computes y = xAᵀ + c. In PyTorch the **weight** A has a row for each output feature and a column for
# each input feature; the field calls the two cuts by those of Aᵀ:
#
# - **column parallel**: each rank has some *output* features, rows of PyTorch's weight (`dim=0`);
# - **row parallel**: each rank has some *input* features, columns of PyTorch's weight (`dim=1`).
#
# In this lesson t is the number of ranks that share a layer.
#
# No ranks are needed to see what each cut asks for. The cell takes a layer apart on one process.
#
# **Predict** (question 2). Which results are complete in each part, and which must be added up?

# %%
t = world_size
generator = torch.Generator().manual_seed(0)
x = torch.randn(5, 24, generator=generator, dtype=torch.float64)
A = torch.randn(48, 24, generator=generator, dtype=torch.float64)
dy = torch.randn(5, 48, generator=generator, dtype=torch.float64)  # gradient of the output
y, dx, dA = x @ A.T, dy @ A, dy.T @ x  # what one process computes

parts = [*zip(A.tensor_split(t, 0), dy.tensor_split(t, 1), strict=True)]
assert torch.allclose(y, torch.cat([x @ part.T for part, _ in parts], 1))
assert torch.allclose(dx, sum(d @ part for part, d in parts))  # a sum over ranks
assert torch.allclose(dA, torch.cat([d.T @ x for _, d in parts], 0))
print("column parallel: y in pieces, dA in pieces, dx is a sum over ranks")

parts = [*zip(A.tensor_split(t, 1), x.tensor_split(t, 1), strict=True)]
assert torch.allclose(y, sum(piece @ part.T for part, piece in parts))  # a sum over ranks
assert torch.allclose(dx, torch.cat([dy @ part for part, _ in parts], 1))
assert torch.allclose(dA, torch.cat([dy.T @ piece for _, piece in parts], 1))
print("row parallel:    y is a sum over ranks, dA in pieces, dx in pieces")

# %% [markdown]
# | | input x | output y | gradient of x | gradient of A |
# |---|---|---|---|---|
# | column parallel | whole on each rank | in pieces | **sum over ranks** | own piece, complete |
# | row parallel | in pieces | **sum over ranks** | in pieces | own piece, complete |
#
# The two are mirror images. What one leaves in pieces the other wants in pieces. And gradients of weights need no
# communication at all: each rank has all that its own piece depends on.
#
# Unlike in data parallelism, all ranks read **the same text** (question 1): together they are one replica.

# %% [markdown]
# ## 2. f and g
#
# Two functions hold all the communication of tensor parallelism. Shoeybi et al. 2019 call them f and g:
#
# - **f** stands where a whole tensor enters a column-parallel layer: *identity in forward, all-reduce in backward*;
# - **g** stands where a row-parallel layer ends: *all-reduce in forward, identity in backward*.
#
# They are **conjugate**: each does in backward what the other does in forward. `dist.all_reduce` writes into a tensor
# and autograd knows nothing of it, so both are written as autograd functions. In this course f is called `Copy` and
# g `Reduce`, as in Megatron-LM.


# %%
def summed(x, group=None):
    """The sum of a tensor over ranks, in a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class Copy(torch.autograd.Function):
    """f: identity in forward, all-reduce in backward."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group), None


# %%
class Reduce(torch.autograd.Function):
    """g: all-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# %% [markdown]
# Why is the backward of a sum over ranks the *identity*? After g every rank goes on with the same numbers, and the
# loss that each computes is a copy of *one* loss, not one of t losses to be added. So the gradient of the one sum is
# on every rank already.
#
# Now the two layers. They take their shards out of a whole `nn.Linear`, so that the result can be compared. A row
# parallel layer adds its bias after the sum; before it, the bias would be added t times.


# %%
def mine(tensor, dim):
    """This rank's piece of a tensor, as a copy; the first ranks have one more if it is uneven."""
    return tensor.detach().tensor_split(dist.get_world_size(), dim)[dist.get_rank()].clone()


class ColumnParallelLinear(nn.Module):
    """The output features of a linear layer that this rank has: (..., in) -> (..., out / t)."""

    enter = Copy

    def __init__(self, whole):
        super().__init__()
        self.weight = nn.Parameter(mine(whole.weight, 0))
        self.bias = None if whole.bias is None else nn.Parameter(mine(whole.bias, 0))

    def forward(self, x):
        return F.linear(self.enter.apply(x), self.weight, self.bias)


# %%
class RowParallelLinear(nn.Module):
    """The input features of a linear layer that this rank has: (..., in / t) -> (..., out)."""

    leave = Reduce

    def __init__(self, whole):
        super().__init__()
        self.weight = nn.Parameter(mine(whole.weight, 1))
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        return self.leave.apply(F.linear(x, self.weight)) + self.bias


# %% [markdown]
# ### An MLP with one all-reduce each way
#
# `up` is column parallel, and leaves each rank some of the inner features. GELU works feature by feature. `down` is
# row parallel, and wants some of the inner features. Nothing is sent between the two.

# %%
gpt = TransformerConfig(heads=12, hidden=96, context=60)  # heads, tokens: by 2, 3, 4, 6
title = f"an MLP on {world_size} ranks, a colour each; grey: whole on every rank"
plots.cut_picture(gpt.hidden, 4 * gpt.hidden, gpt.hidden, world_size, title)

# %% [markdown]
# *The figure: x, whole and grey; f; the matrix A of `up`, cut by columns into one stripe a rank; the inner features,
# in stripes of the same widths; the matrix B of `down`, cut by rows; g; and y, whole. The stripes of A, of the inner
# features and of B fit together. Matrices stand as in y = x A B: this A is the Aᵀ of section 1, so its columns are rows
# of PyTorch's weight.*
#
# **Predict** (question 4).


# %%
class ParallelMLP(nn.Module):
    """A rank's part of `models.MLP`: (B, T, C) -> (B, T, C)."""

    def __init__(self, whole, column=ColumnParallelLinear, row=RowParallelLinear):
        super().__init__()
        self.up, self.down = column(whole.up), row(whole.down)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


# %% [markdown]
# Four versions are tried on real ranks, each against one process. Two of them leave f or g out. The last keeps the
# all-reduce of g, and gives it the backward that one gets by differentiating a sum of t separate losses: an all-reduce
# again.
#
# **Predict** (question 3). Which versions compute the right loss, and which the right gradients? Look at three
# gradients: of the input x, which the layers below need, of `up` and of `down`.


# %%
class Identity(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, gradient: gradient)


class ReduceTwice(Reduce):
    backward = staticmethod(lambda ctx, gradient: summed(gradient))


class ColumnWithoutF(ColumnParallelLinear):
    enter = Identity


class RowWithoutG(RowParallelLinear):
    leave = Identity


class RowReducedTwice(RowParallelLinear):
    leave = ReduceTwice


# %%
windows = Windows("train", gpt.context)
backend = launch(dist.get_backend, world_size=world_size)[0]
VERSIONS = {
    "f and g": (ColumnParallelLinear, RowParallelLinear),
    "without f": (ColumnWithoutF, RowParallelLinear),
    "without g": (ColumnParallelLinear, RowWithoutG),
    "g reduces twice": (ColumnParallelLinear, RowReducedTwice),
}


on_ranks = partial(launch, world_size=world_size, backend=backend)


def off(a, b):
    """Largest difference, relative to the largest number of the second."""
    return ((a - b).abs().max() / b.abs().max()).item()


# %%
def try_mlp(column, row):
    """Relative errors of a split MLP, all-reduces in forward and in backward, and the ledger."""
    whole = build_gpt(gpt).blocks[0].mlp.to(device())
    split = ParallelMLP(whole, column, row)
    x = torch.randn(2, gpt.context, gpt.hidden, generator=torch.Generator().manual_seed(1))
    inputs = [x.to(device()).clone().requires_grad_() for _ in range(2)]
    expected = whole(inputs[0]).square().mean()
    expected.backward()
    with record() as ledger:
        loss = split(inputs[1]).square().mean()
        sent_forward = len(ledger)
        loss.backward()
    errors = {
        "loss": off(loss, expected),
        "x": off(inputs[1].grad, inputs[0].grad),
        "up": off(split.up.weight.grad, mine(whole.up.weight.grad, 0)),
        "down": off(split.down.weight.grad, mine(whole.down.weight.grad, 1)),
    }
    return errors, (sent_forward, len(ledger) - sent_forward), ledger


# %%
tried = {name: on_ranks(try_mlp, *of)[0] for name, of in VERSIONS.items()}
print("                 all-reduces               right, or wrong by")
print("                 fwd   bwd       loss   gradient of x     up     down")
for name, (errors, (forward, backward), _) in tried.items():
    said = ["right" if error < 1e-5 else f"{error:.0%}" for error in errors.values()]
    print(f"{name:17}{forward:3}{backward:6}{said[0]:>11}{said[1]:>16}{said[2]:>7}{said[3]:>9}")
errors = {name: of[0] for name, of in tried.items()}
assert max(errors["f and g"].values()) < 1e-5
if world_size > 1:
    for name in ("without f", "g reduces twice"):
        assert errors[name]["loss"] < 1e-5 < 0.01 < errors[name]["x"]
    assert abs(errors["g reduces twice"]["up"] - (world_size - 1)) < 1e-3
    assert errors["without g"]["loss"] > 0.01

# %% [markdown]
# One all-reduce in forward, that of g, and one in backward, that of f.
#
# - **Without f** the loss is right, and so are the gradients of this layer's weights. The gradient of x is only this
#   rank's share of it, so every layer *below* gets a wrong gradient, another one on each rank. Nothing fails; the model
#   learns badly, and the copies of its norms drift apart.
# - **Without g** the output is one rank's share, and the loss is wrong.
# - **g reduces twice**: the loss is right, the gradients are t times too large. (100 % too large is twice.) Adam
#   divides by their size and would hide that. In a model each branch gets the factor and the residual stream does not:
#   below it, gradients have another direction, too.
#
# > **Misconception.** "The loss is equal, so the parallel model is right." The forward of f is the identity: before
# > the first update no loss can show that it is missing. Compare *gradients*, of every parameter, and losses after
# > several steps.

# %% [markdown]
# ### When a gather is needed
#
# A column-parallel layer leaves its output in pieces. Libraries offer to gather it (`gather_output=True` in Megatron,
# `output_layouts=Replicate()` in PyTorch). What would that cost inside the MLP? `Gather` puts pieces together in
# forward, and takes its own piece of the gradient in backward; `Split` is its conjugate.


# %%
def gathered(x, dim=-1):
    """All-gather: the pieces of all ranks, one after the other along `dim`."""
    pieces = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, x.contiguous())
    return torch.cat(pieces, dim)


class Gather(torch.autograd.Function):
    """All-gather of the last dimension in forward, own piece in backward."""

    forward = staticmethod(lambda ctx, x: gathered(x))
    backward = staticmethod(lambda ctx, gradient: mine(gradient, -1))


class Split(torch.autograd.Function):
    """Own piece of the last dimension in forward, all-gather in backward."""

    forward = staticmethod(lambda ctx, x: mine(x, -1))
    backward = staticmethod(lambda ctx, gradient: gathered(gradient))


# %%
class GatheredColumn(ColumnParallelLinear):
    def forward(self, x):
        return Gather.apply(super().forward(x))


class SplittingRow(RowParallelLinear):
    def forward(self, x):
        return super().forward(Split.apply(x))


def ring_bytes(ledger, n=world_size):
    """Bytes that a rank sends for these operations by rings."""
    return sum(bytes_sent(entry.op, n, entry.bytes) for entry in ledger)


tried["gathered between"] = on_ranks(try_mlp, GatheredColumn, SplittingRow)[0]
for name in ("f and g", "gathered between"):
    errors, _, ledger = tried[name]
    assert max(errors.values()) < 1e-5
    calls = ", ".join(f"{k} {op}" for op, k in Counter(entry.op for entry in ledger).items())
    print(f"{name:17} {calls}: {ring_bytes(ledger):,.0f} bytes sent by a rank")

# %% [markdown]
# The same result for three times the bytes: the inner features are four times as wide, and travel in forward and in
# backward.
#
# > **Misconception.** "A column-parallel layer must gather its output." Only if what comes next needs the whole. A
# > row-parallel layer wants exactly the pieces that are there. It is the *row*-parallel layer that must
# > communicate.

# %% [markdown]
# ## 3. Attention by heads
#
# Heads do not look at each other until the output layer mixes them. So heads are what attention is split by:
# queries, keys and values are column parallel, each rank runs its heads, and the output layer is row parallel. One
# all-reduce each way, as in the MLP.
#
# In the course's GPT one joint matrix makes queries, keys and values: 3h rows (h is the hidden size), first all of q,
# then all of k, then all of v.
#
# **Predict** (question 5). What does rank 0 get, if the joint matrix is cut into t pieces?
#
# <details><summary>With four ranks</summary>
#
# The first 3h/4 rows: three quarters of the queries, and no key at all. The code then takes a third of that for its
# keys. Shapes fit, nothing fails.
# </details>
#
# The rows must be put in the order of ranks first: q, k and v of rank 0's heads, then those of rank 1's.


# %%
def by_ranks(qkv):
    """The joint layer with its rows in the order of ranks: q, k, v of the first heads, ..."""
    t = dist.get_world_size()
    order = torch.arange(len(qkv.weight)).view(3, t, -1).transpose(0, 1).flatten()
    ordered = copy.deepcopy(qkv)
    ordered.weight.data, ordered.bias.data = qkv.weight.data[order], qkv.bias.data[order]
    return ordered


# %%
class ParallelAttention(nn.Module):
    """A rank's heads of `models.Attention`: (B, T, C) -> (B, T, C)."""

    order = staticmethod(by_ranks)

    def __init__(self, whole, column=ColumnParallelLinear, row=RowParallelLinear):
        super().__init__()
        if whole.heads % dist.get_world_size():
            raise ValueError(f"{dist.get_world_size()} ranks do not divide {whole.heads} heads")
        self.heads = whole.heads // dist.get_world_size()
        self.qkv, self.out = column(self.order(whole.qkv)), row(whole.out)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class NaivelyCut(ParallelAttention):
    order = staticmethod(lambda qkv: qkv)


# %%
def try_attention(version):
    """Relative errors of output and input gradient, and the ledger."""
    whole = build_gpt(gpt).blocks[0].attention.to(device())
    split = version(whole)
    x = torch.randn(2, gpt.context, gpt.hidden, generator=torch.Generator().manual_seed(1))
    inputs = [x.to(device()).clone().requires_grad_() for _ in range(2)]
    expected = whole(inputs[0])
    expected.square().mean().backward()
    with record() as ledger:
        output = split(inputs[1])
        output.square().mean().backward()
    return off(output, expected), off(inputs[1].grad, inputs[0].grad), ledger


for name, version in {"by heads": ParallelAttention, "joint matrix cut": NaivelyCut}.items():
    output, gradient, ledger = on_ranks(try_attention, version)[0]
    said = "output and gradient of x equal" if output < 1e-5 else f"output off by {output:.0%}"
    print(f"{name:17} {len(ledger)} all-reduces, {said}")
    assert len(ledger) == 2 and (max(output, gradient) < 1e-5) == (version is ParallelAttention)

# %% [markdown]
# The naive cut sends the same bytes and makes something else of them. A gated MLP (Llama's) with gate and up in one
# joint matrix meets the same trap, and so do checkpoints: to load a model on another number of ranks, a joint matrix
# must be taken apart first.
#
# ### Grouped-query attention
#
# Many newer models have fewer **key-value heads** than query heads: each serves a group of query heads
# ([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)). Llama 3 has 8 of them at all its sizes
# ([arXiv 2407.21783](https://arxiv.org/abs/2407.21783), table 3).
#
# **Predict** (question 6). What if there are fewer of them than ranks?
#
# Then they are **copied**: several ranks hold the same key-value head, and each uses it for its own query heads. In
# backward each copy gets the gradient of these only. The copies' gradients must be added up, among the ranks that
# share a head. That is f again, on a *weight* and in a smaller group.


# %%
class GroupedAttention(nn.Module):
    """Causal attention in which `kv_heads` heads of keys and values serve `heads` of queries."""

    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.size, self.kv_heads = hidden // heads, kv_heads
        self.q, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.k, self.v = (nn.Linear(hidden, kv_heads * self.size) for _ in range(2))

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


# %%
class Part(nn.Module):
    """Some output features of a linear layer; the ranks of `group`, if given, have the same."""

    def __init__(self, whole, pieces, index, group=None):
        super().__init__()
        self.group = group
        for name, tensor in whole.named_parameters():
            piece = tensor.detach().tensor_split(pieces)[index].clone()
            self.register_parameter(name, nn.Parameter(piece))

    def forward(self, x):
        if self.group is None:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, *(Copy.apply(p, self.group) for p in (self.weight, self.bias)))


# %% [markdown]
# All three layers share one f, in front of them. Three column-parallel layers would have one each, and all-reduce
# three gradients where their sum is enough.


# %%
class ParallelGroupedAttention(GroupedAttention):
    """A rank's heads of `GroupedAttention`, with copies where there are fewer than ranks."""

    def __init__(self, whole):
        nn.Module.__init__(self)
        t, rank, self.size = dist.get_world_size(), dist.get_rank(), whole.size
        copies = max(1, t // whole.kv_heads)  # ranks that have the same key-value head
        pieces, group = t // copies, None
        if whole.kv_heads % pieces or t % copies:
            raise ValueError(f"{t} ranks and {whole.kv_heads} key-value heads do not divide")
        for first in range(0, t if copies > 1 else 0, copies):  # every rank makes every group
            made = dist.new_group([*range(first, first + copies)])
            group = made if first <= rank < first + copies else group
        self.q, self.out = Part(whole.q, t, rank), RowParallelLinear(whole.out)
        self.k, self.v = (Part(p, pieces, rank // copies, group) for p in (whole.k, whole.v))

    def forward(self, x):
        return super().forward(Copy.apply(x))


# %%
def try_grouped(kv_heads):
    """Errors against the whole layer, output and gradients, and what rank 0 holds and sends."""
    torch.manual_seed(0)
    whole = GroupedAttention(gpt.hidden, gpt.heads, kv_heads).to(device())
    split, t = ParallelGroupedAttention(whole), dist.get_world_size()
    copies = max(1, t // kv_heads)
    x = torch.randn(2, gpt.context, gpt.hidden, device=device())
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected = whole(inputs[0])
    expected.square().mean().backward()
    with record() as ledger:
        output = split(inputs[1])
        output.square().mean().backward()
    pieces = [p.weight.grad.tensor_split(t // copies)[dist.get_rank() // copies]
              for p in (whole.k, whole.v)]  # fmt: skip
    errors = [off(output, expected), off(inputs[1].grad, inputs[0].grad)]
    errors += [off(p.weight.grad, g) for p, g in zip((split.k, split.v), pieces, strict=True)]
    return max(errors), split.k.weight.numel() // (split.size * gpt.hidden), ledger


# %%
for kv_heads in dict.fromkeys((gpt.heads, world_size, max(1, world_size // 2), 1)):
    if world_size % kv_heads and kv_heads % world_size:
        continue
    error, kept, ledger = on_ranks(try_grouped, kv_heads)[0]
    assert error < 1e-5
    big = sum(entry.bytes == 2 * gpt.context * gpt.hidden * 4 for entry in ledger)
    print(f"{kv_heads:2} key-value heads, {kept} on a rank: {big} large all-reduces,", end="")
    print(f" {len(ledger) - big} of gradients of copies; equal")

# %% [markdown]
# As long as t divides the key-value heads nothing changes. Beyond that copies cost memory, and a small all-reduce of
# their gradients. Therefore 8 key-value heads and t = 8 go well together.
#
# > **What changes on real GPUs.** In fp16 and bf16 FlashAttention takes fewer key-value heads than query heads as they
# > are (`enable_gqa=True`) and repeats nothing in memory. In fp32, as here, that option falls back to attention that is
# > not fused, and repeats them. The groups are NCCL communicators of their own; they are made once, when the model is
# > built.

# %% [markdown]
# ## 4. Embedding and loss: the vocabulary is split
#
# The embedding and the head have a row for each word of the vocabulary. They are split by these rows.
#
# **The embedding**: a rank looks up the tokens whose rows it has, puts zeros for all others, and g adds up.
# Exactly one rank adds something that is not zero.
#
# **The head** is column parallel: each rank gets the logits of its words. They must not be gathered. With a large
# vocabulary they are the largest tensor of the whole model (lesson 06, section 10).


# %%
def own_rows(tokens, first, count):
    """Which tokens lie in rows first to first + count, and their row counted from there (or 0)."""
    row = tokens - first
    here = (row >= 0) & (row < count)
    return here, row * here


class VocabParallelEmbedding(nn.Module):
    """A rank's rows of an embedding: (B, T) -> (B, T, C)."""

    leave = Reduce

    def __init__(self, whole):
        super().__init__()
        self.weight = nn.Parameter(mine(whole.weight, 0))
        pieces = whole.weight.tensor_split(dist.get_world_size())
        self.first = sum(map(len, pieces[: dist.get_rank()]))

    def forward(self, tokens):
        here, row = own_rows(tokens, self.first, len(self.weight))
        return self.leave.apply(F.embedding(row, self.weight) * here.unsqueeze(-1))


# %% [markdown]
# The loss of a token with target y is log Σⱼ exp(zⱼ) − z_y, computed with the maximum m taken off: log Σⱼ exp(zⱼ − m) −
# (z_y − m).
#
# **Predict** (question 7). Which numbers must ranks exchange, and how many?
#
# <details><summary>Hint</summary>
#
# Three things in the formula look at the whole vocabulary: the maximum, the sum, and the target's logit, which one
# rank has.
# </details>


# %%
def vocab_parallel_cross_entropy(logits, targets, first):
    """Mean cross-entropy, each rank with the logits (B, T, V / t) of its words from `first` on."""
    highest = logits.detach().amax(-1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    shifted = logits - highest.unsqueeze(-1)
    total = Reduce.apply(shifted.exp().sum(-1))
    here, row = own_rows(targets, first, logits.shape[-1])
    target = Reduce.apply(shifted.gather(-1, row.unsqueeze(-1)).squeeze(-1) * here)
    return (total.log() - target).mean()


# %%
def try_loss():
    """Errors of loss and gradient against one process, and the ledger."""
    torch.manual_seed(0)
    logits = torch.randn(per_step, gpt.context, gpt.vocabulary)
    logits = (10 * logits).to(device()).requires_grad_()
    targets = torch.stack([windows[i][1] for i in range(per_step)]).to(device())
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    own = mine(logits, -1).requires_grad_()
    pieces = [len(p) for p in torch.arange(gpt.vocabulary).tensor_split(dist.get_world_size())]
    with record() as ledger:
        loss = vocab_parallel_cross_entropy(own, targets, sum(pieces[: dist.get_rank()]))
        loss.backward()
    return off(loss, expected), off(own.grad, mine(logits.grad, -1)), ledger


error, gradient_error, ledger = on_ranks(try_loss)[0]
assert max(error, gradient_error) < 1e-5
together = 4 * per_step * gpt.context * gpt.vocabulary  # all logits, fp32
assert ledger.count() == ledger.count("all_reduce") == 3
assert ledger.bytes() == 3 * 4 * per_step * gpt.context
print(f"loss and gradients equal; {len(ledger)} all-reduces of {ledger[0].bytes:,} bytes")
n = max(2, world_size)
print(f"a rank sends {ring_bytes(ledger, n):,.0f} bytes;", end="")
print(f" to gather the logits: {bytes_sent('all_gather', n, together):,.0f}")

# %% [markdown]
# Three all-reduces of one number a token, in forward only. In backward, the gradient of a logit is its softmax, less
# one for the target. Each rank has all that this needs: its exponentials, and the total. Autograd finds that by
# itself, because the backward of g is the identity.
#
# How much is it for a real vocabulary? Gathering also asks for *memory* on each rank.

# %%
vocabulary, tokens, ranks = 128_256, 8192, 8  # Llama 3's published vocabulary, one sequence of 8k
gathering = bytes_sent("all_gather", ranks, 2 * tokens * vocabulary)  # bf16 logits
small = 3 * bytes_sent("all_reduce", ranks, 4 * tokens)  # fp32 numbers
print(f"{ranks} ranks, {tokens:,} tokens, {vocabulary:,} words:")
print(f"to gather, a rank sends {gathering / 1e9:.2f} GB and has", end="")
print(f" {2 * tokens * vocabulary / 1e9:.2f} GB of logits then;")
print(f"three all-reduces send {small / 1e6:.2f} MB, {gathering / small:,.0f} times less")

# %% [markdown]
# ## 5. The whole GPT
#
# `parallel` replaces the layers of a model by its rank's parts. Norms and position embeddings stay whole on each
# rank. All ranks compute the same with them and get the same gradients, so nothing keeps the copies equal, and
# nothing needs to.
#
# Embedding and head are tied. Both are split by the same rows, so they stay tied, shard by shard.


# %%
def parallel(
    model, column=ColumnParallelLinear, row=RowParallelLinear, embedding=VocabParallelEmbedding
):
    """Put this rank's parts in the place of a GPT's layers; return the model."""
    for block in model.blocks:
        block.attention = ParallelAttention(block.attention, column, row)
        block.mlp = ParallelMLP(block.mlp, column, row)
    model.embedding, model.head = embedding(model.embedding), column(model.head)
    model.tie()
    return model


def parallel_loss(model, x, y):
    return vocab_parallel_cross_entropy(model(x), y, model.embedding.first)


# %% [markdown]
# Is it the same model? `compare` trains it beside one process and looks at logits, at the gradient of *every*
# parameter in the first step, and at all losses. Which piece of a gradient belongs to this rank? The gradients are put
# in the place of the weights of another model, and that model is split by the same function.
#
# (`eps` is larger than Adam's default for one reason: the bias of the keys. It adds the same number to all scores of a
# query, which softmax does not see. Its gradient is rounding error and nothing else, and Adam, which divides by the
# size of a gradient, would make steps of it.)


# %%
def take(step):
    """The windows of a step, the same on every rank: tokens and targets, (per_step, context)."""
    return windows.batch(range(step * per_step, (step + 1) * per_step), device())


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, foreach=False)


def gradients_as_weights(model):
    """A copy of a model whose weights are the gradients of the original."""
    copied = copy.deepcopy(model)
    for p, original in zip(copied.parameters(), model.parameters(), strict=True):
        p.data.copy_(original.grad)
    return copied


# %%
def first_errors(model, alone, make, step=0):
    """Errors of logits, and of the gradient of every parameter, in one forward and backward."""
    x, y = take(step)
    logits = model(x)
    vocab_parallel_cross_entropy(logits, y, model.embedding.first).backward()
    alone.loss(x, y).backward()
    shards = make(gradients_as_weights(alone)).parameters()
    pairs = [*zip(model.parameters(), shards, strict=True)]
    found = {"logits": off(logits, mine(alone(x), -1))}
    found["gradients"] = max(off(p.grad, gradient) for p, gradient in pairs)
    for net in (model, alone):
        net.zero_grad()
    return found


# %%
def compare(make=parallel, config=gpt, rounds=steps, dtype=torch.float32):
    """Errors against one process: logits, gradients, losses, weights; ledger of the last step."""
    alone = build_gpt(config, dtype=dtype).to(device())
    model = make(copy.deepcopy(alone))
    errors, optimizers = first_errors(model, alone, make), (adam(model), adam(alone))
    for step in range(rounds):
        x, y = take(step)
        expected = alone.loss(x, y)
        expected.backward()
        with record() as ledger:
            loss = parallel_loss(model, x, y)
            loss.backward()
        errors["losses"] = max(errors.get("losses", 0), off(loss, expected))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), make(alone).parameters(), strict=True)
    errors["weights"] = max((p - q).abs().max().item() for p, q in pairs)
    return errors, ledger


# %%
errors, ledger = on_ranks(compare)[0]
for name in ("logits", "gradients", "losses", "weights"):
    print(f"{name:9} equal to one process")
    assert errors[name] < 1e-5, (name, errors[name])

# %% [markdown]
# Losses of three steps, and the weights after them, are equal to 10⁻⁵. The tests of this lesson do the same in
# float64, to 10⁻¹².

# %% [markdown]
# > **What changes on real GPUs.** A vocabulary is padded, so that all ranks have equally many rows and products are of
# > sizes that are fast. (Megatron's table has 51,200 words, 400 times 128.) Weights are not cut out of a whole model,
# > which no GPU could hold: each rank makes or loads its own piece. In bf16, results agree to its precision, 2⁻⁸, and
# > the loss is taken in fp32.

# %% [markdown]
# ## 6. What it sends
#
# Each layer has two f and two g. Each is one all-reduce of b·s·h numbers: batch, sequence, hidden size. By a ring, an
# all-reduce sends 2(t−1)/t times its size. So a rank sends for each layer, forward and backward together,
#
# $$4 \cdot 2\,\frac{t-1}{t}\,bsh = 8\,bsh\,\frac{t-1}{t}$$
#
# numbers (Narayanan et al. 2021). The embedding adds a g, the head an f, and the loss three small ones.
# Does the ledger say the same? The cell runs a model with one layer more, and takes the difference.

# %%
_, deeper = on_ranks(compare, parallel, replace(gpt, layers=gpt.layers + 1), 1)[0]
bs = per_step * gpt.context
bsh = bs * gpt.hidden
for layers, of in ((gpt.layers, ledger), (gpt.layers + 1, deeper)):
    sizes = Counter(entry.bytes for entry in of)
    assert sizes == {4 * bsh: 4 * layers + 2, 4 * bs: 3}
    print(f"{layers} layers: {sizes[4 * bsh]} all-reduces of {4 * bsh:,} bytes, 3 of {4 * bs:,}")
measured = ring_bytes(deeper) - ring_bytes(ledger)
formula = 4 * 8 * bsh * (world_size - 1) / world_size
assert measured == formula
print(f"one layer: {measured:,.0f} bytes sent by a rank; 4 · 8bsh(t-1)/t = {formula:,.0f}")

# %% [markdown]
# Equal. Two things set it apart from data parallelism:
#
# - the formula has the batch in it, not the parameters: DDP sends *gradients*, tensor parallelism *activations*;
# - an all-reduce stands **between** operations that wait for it. DDP's all-reduce can run while backward goes on
#   (lesson 04); the next layer's norm cannot begin before g has ended.
#
# For one layer of GPT-3 175B and one sequence of 2,048 tokens in bf16:

# %%
big = PUBLISHED["GPT-3 175B"]
tokens = big.context
per_layer = 8 * tokens * big.hidden * 7 / 8 * 2
weights = 12 * big.hidden**2 * 2
print(f"t = 8: a rank sends {per_layer / 1e6:.0f} MB of activations a layer and sequence,", end="")
print(f" {big.layers * per_layer / 1e9:.1f} GB in {big.layers} layers")
print(f"DDP: twice the {weights / 1e9:.1f} GB of gradients of a layer, once a step")

# %% [markdown]
# ## 7. What a rank holds
#
# **Predict** (question 9). Parameters, gradients and Adam's moments of the split layers become t times less. And the
# activations? Two functions count on real ranks: `held_memory` what there is after a training step, and `saved` what
# autograd keeps for backward, each block of memory once.


# %%
def whole_model(model):
    return model


def states(make):
    """Bytes of model states on this rank after a training step."""
    model = make(build_gpt(gpt).to(device()))
    optimizer, (x, y) = adam(model), take(0)
    if make is whole_model:
        model.loss(x, y).backward()
    else:
        parallel_loss(model, x, y).backward()
    optimizer.step()
    return held_memory(model, optimizer).states


# %%
def saved(make, layers):
    """Bytes that autograd keeps when the model has run forward, parameters apart."""
    model = make(build_gpt(replace(gpt, layers=layers)).to(device()))
    own, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(take(0)[0])
    assert logits.requires_grad
    return sum(found.values())


# %%
def tp_parameters(config, t):
    """Parameters of a rank: norms, positions and biases of row-parallel layers are not split."""
    c = config.hidden
    block = (12 * c**2 + 7 * c) / t + 6 * c
    return config.layers * block + config.vocabulary * c / t + (config.context + 2) * c


# %%
one, split = (on_ranks(states, make)[0] for make in (whole_model, parallel))
print(f"model states: {one:,} bytes whole, {split:,} on a rank of {world_size},", end="")
print(f" {one / split:.2f} times less")
expected = 16 * tp_parameters(gpt, world_size)
assert abs(split / expected - 1) < 0.02, "but for step counters and an uneven vocabulary"
print(f"formula {expected:,.0f}")

# %% [markdown]
# Not quite t times less, since norms, positions and the biases of row-parallel layers are whole on each rank. In a
# large model these are next to nothing.
#
# For activations a layer is looked at as lesson 06 does (section 10): for each token it keeps 16 C numbers and some
# statistics. C is the hidden size, h above. Which of these are in pieces?
#
# | kept for backward | numbers a token | with tensor parallelism |
# |---|---|---|
# | inputs of two norms | 2 C | whole |
# | outputs of two norms, inputs of the column-parallel layers | 2 C | whole |
# | q, k, v and the output of attention | 4 C | 1/t |
# | input and output of GELU | 8 C | 1/t |


# %%
def kept_by_a_layer(make):
    """Bytes of activations that one layer more keeps."""
    return saved(make, 2) - saved(make, 1)


def multiples(make):
    """The same as numbers per token, in units of the hidden size C."""
    return on_ranks(kept_by_a_layer, make)[0] / (4 * per_step * gpt.context * gpt.hidden)


kept = {"one process": multiples(whole_model), "tensor parallel": multiples(parallel)}
c, heads, t = gpt.hidden, gpt.heads, world_size
by_formula = {
    "one process": 16 + (4 + heads) / c,
    "tensor parallel": 4 + 4 / c + (12 + heads / c) / t,
}
for name, numbers in by_formula.items():
    print(f"{name:16} {kept[name]:6.3f} C a token and layer, formula {numbers:6.3f} C")
    assert abs(kept[name] / numbers - 1) < (1e-9 if backend == "gloo" else 0.05)

# %% [markdown]
# (4/C are the statistics of two norms, and one number a head is attention's.) On 8 ranks it is 4 + 12/8 = 5.5 of 16: a
# factor of 2.9, and less than 4 however many ranks there are. What stands between the split parts is repeated t times.
#
# > **Misconception.** "Tensor parallelism divides the memory by t." It divides matrices and what is inside of attention
# > and MLP. Norms and residual stream are kept, *and computed*, by every rank in full.

# %% [markdown]
# ## 8. Sequence parallelism: the rest is split by tokens
#
# Between g and the next f each rank does the same: add to the residual stream, norm. These work on each token by
# itself. So let each rank do it for 1/t of the *tokens* (Korthikanti et al. 2022):
#
# - g becomes a **reduce-scatter** along the sequence: a rank gets the sums of its own tokens;
# - f becomes an **all-gather** along the sequence, in front of the column-parallel layer.
#
# In backward they change places: they are conjugate too.
#
# **Predict** (question 8). An all-reduce is a reduce-scatter and an all-gather (lesson 02). What is sent now?


# %%
def scattered(x, dim=1):
    """Reduce-scatter: this rank's piece, along `dim`, of the sum over ranks."""
    stacked = torch.cat(x.chunk(dist.get_world_size(), dim))
    piece = torch.empty_like(stacked.chunk(dist.get_world_size())[0])
    dist.reduce_scatter_single(piece, stacked)
    return piece


class GatherSequence(torch.autograd.Function):
    """All-gather of the tokens in forward, reduce-scatter in backward."""

    forward = staticmethod(lambda ctx, x: gathered(x, 1))
    backward = staticmethod(lambda ctx, gradient: scattered(gradient))


class ScatterSequence(torch.autograd.Function):
    """Reduce-scatter of the tokens in forward, all-gather in backward."""

    forward = staticmethod(lambda ctx, x: scattered(x))
    backward = staticmethod(lambda ctx, gradient: gathered(gradient, 1))


# %% [markdown]
# What changes against section 5 is short: another f, another g, and positions of the rank's own tokens.


# %%
class SequenceColumn(ColumnParallelLinear):
    enter = GatherSequence


class SequenceRow(RowParallelLinear):
    leave = ScatterSequence


class SequenceEmbedding(VocabParallelEmbedding):
    leave = ScatterSequence


class OwnPositions(nn.Module):
    """Position embeddings of this rank's tokens."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, positions):
        return self.whole(mine(positions, 0))


# %% [markdown]
# One thing is new. Norms, positions and the biases of row-parallel layers are the same on each rank, but each rank
# now sees only its own tokens through them. So their gradients are shares, and must be **summed over ranks**. A hook on
# the parameter does it. (Megatron-LM joins them in one all-reduce.)


# %%
def replicated(model):
    """Parameters that every rank has whole."""
    norms = [model.norm, *(norm for block in model.blocks for norm in (block.norm1, block.norm2))]
    rows = [row for block in model.blocks for row in (block.attention.out, block.mlp.down)]
    kept = [p for part in (model.position, *norms) for p in part.parameters()]
    return kept + [row.bias for row in rows]


def sequence_parallel(model, column=SequenceColumn, sum_gradients=True):
    """As `parallel`, and what is between the split layers works on this rank's tokens."""
    parallel(model, column, SequenceRow, SequenceEmbedding)
    model.position = OwnPositions(model.position)
    for p in replicated(model):
        if sum_gradients:
            p.register_hook(summed)
    return model


def forgetful(model):
    return sequence_parallel(model, sum_gradients=False)


# %%
ours = ledger
runs = {"tensor parallel": (errors, ours)}
runs["sequence parallel"] = on_ranks(compare, sequence_parallel)[0]
runs["gradients not summed"] = on_ranks(compare, forgetful)[0]
for name, (wrong, _) in runs.items():
    by_part = [wrong[part] for part in ("logits", "gradients", "weights")]
    said = ["equal" if error < 1e-5 else "wrong" for error in by_part]
    print(f"{name:21} logits {said[0]}, gradients {said[1]}, weights after steps {said[2]}")
assert max(runs["sequence parallel"][0].values()) < 1e-5
wrong = runs["gradients not summed"][0]
assert wrong["logits"] < 1e-5 < 0.01 < wrong["gradients"]

# %% [markdown]
# Again the logits of the first step are right when the gradients are not.
#
# The traffic, without the small gradients and the loss:


# %%
def large(ledger):
    """Operations on activations: those of b·s·h numbers."""
    return [entry for entry in ledger if entry.bytes == 4 * bsh]


for name in ("tensor parallel", "sequence parallel"):
    entries = large(runs[name][1])
    calls = ", ".join(f"{k} {op}" for op, k in sorted(Counter(e.op for e in entries).items()))
    print(f"{name:18} {ring_bytes(entries):10,.0f} bytes sent by a rank: {calls}")
assert ring_bytes(large(runs["sequence parallel"][1])) == ring_bytes(large(ours))

# %% [markdown]
# The same bytes to the last one, in halves.
#
# ### What is kept now
#
# The two inputs of norms are split. But the *outputs* of norms are gathered, and the linear layer keeps its whole
# input for backward. Korthikanti et al. keep the rank's tokens only, and **gather again in backward**. For that the
# all-gather and the product must be one function.


# %%
class GatherLinear(torch.autograd.Function):
    """All-gather of the tokens and linear layer; keeps this rank's tokens, and gathers again."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(gathered(x, 1), weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return scattered(gradient @ weight), rows.T @ gathered(x, 1).flatten(0, -2), bias


class RegatherColumn(ColumnParallelLinear):
    def forward(self, x):
        return GatherLinear.apply(x, self.weight, self.bias)


def regathering(model):
    return sequence_parallel(model, RegatherColumn)


# %%
runs["gathered again"] = on_ranks(compare, regathering)[0]
assert max(runs["gathered again"][0].values()) < 1e-5
for name, make in {"sequence parallel": sequence_parallel, "gathered again": regathering}.items():
    kept[name] = multiples(make)
by_formula |= {
    "sequence parallel": 2 + (14 + (4 + heads) / c) / t,
    "gathered again": (16 + (4 + heads) / c) / t,
}
for name, numbers in by_formula.items():
    sent = f"; {ring_bytes(large(runs[name][1])):,.0f} bytes sent" if name in runs else ""
    print(f"{name:18} {kept[name]:6.3f} C a token and layer, formula {numbers:6.3f} C{sent}")
    assert abs(kept[name] / numbers - 1) < (1e-9 if backend == "gloo" else 0.05)

# %% [markdown]
# Now *everything* is divided by t, for one all-gather more for each column-parallel layer: a quarter more bytes. That
# all-gather can hide behind the product `gradient @ weight`, which does not need it.
#
# Korthikanti et al. count the same in bytes, 16-bit and with dropout: of 34 for each token and hidden unit, tensor
# parallelism divides 24 and leaves 10; with sequence parallelism it is 34/t (attention scores apart, which a fused
# kernel does not keep).
#
# What that is worth at full size: GPT-3 13B in mixed precision, a batch of four sequences of 2,048 tokens.

# %%
thirteen, sequences = PUBLISHED["GPT-3 13B"], 4
unit = 2 * sequences * thirteen.context * thirteen.hidden * thirteen.layers  # C for all tokens
rows = {"one GPU": replace(model_states(thirteen.parameter_count), activations=16 * unit)}
for t in (2, 4, 8):
    on_rank = model_states(tp_parameters(thirteen, t))
    rows[f"t = {t}"] = replace(on_rank, activations=(4 + 12 / t) * unit)
    rows[f"t = {t}, SP"] = replace(on_rank, activations=16 / t * unit)
limit = {"H100": GPUS["h100"].memory_bytes}
title = "modelled: GPT-3 13B, its states and the activations of its blocks; one rank"
plots.memory_bars(rows, title, limit=limit)

# %% [markdown]
# *The figure: bars of parameters, gradients, optimizer and activations for one GPU, and for 2, 4 and 8 with and without
# sequence parallelism (SP, here with gathering again). One GPU needs 259 GB; of two each needs 136, or 130 with SP.
# Those of 4 and 8 ranks end before the H100's 80 GB. With SP the piece of activations is shorter, on 8 ranks by more
# than half.*
#
# > **What changes on real GPUs.** NCCL has a reduce-scatter of its own. gloo runs it as an all-reduce inside; the
# > ledger counts the call that was made. A sequence that t does not divide must be padded.

# %% [markdown]
# ## 9. Dropout and seeds
#
# The course's GPT has no dropout. A model with dropout needs two kinds of random numbers under tensor parallelism:
#
# - **inside** attention and MLP each rank has other features: masks should be *different* on each rank;
# - **between** them, without sequence parallelism, each rank has the same tensor: masks must be *the same*, or the
#   copies of the residual stream are copies no more. With sequence parallelism each rank has other tokens: different
#   again.
#
# Megatron-LM keeps two states of the random generator, and switches. Ranks of this course are seeded with their rank.


# %%
def dropout_masks():
    """Whether all ranks drop the same: with the rank's own seed, and with one seed for all."""
    own = F.dropout(torch.ones(100, device=device()))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        common = F.dropout(torch.ones(100, device=device()))
    return [torch.equal(summed(mask), dist.get_world_size() * mask) for mask in (own, common)]


assert on_ranks(dropout_masks) == [[False, True]] * world_size
print("own seeds: other masks on each rank; one seed: the same mask on all")

# %% [markdown]
# The same holds when weights are *made* on each rank, not cut out of a whole: shards need different seeds, or the
# matrix repeats itself; norms, positions and the biases of row-parallel layers the same.
#
# > **Misconception.** "Clipping by the gradient norm works as before." A rank's norm has only its shards in it. Squares
# > of shards must be summed over ranks, squares of what is whole on each rank counted once. With plain
# > `clip_grad_norm_` each rank scales by another factor, and even the copies part.

# %% [markdown]
# ## 10. The same from a plan: `parallelize_module`
#
# PyTorch does all of this with **DTensor** (lesson 07): a tensor that knows how it lies on a mesh of ranks. A *plan*
# names modules and how each is split:
#
# - `ColwiseParallel()`: weight `Shard(0)`; takes a whole input, leaves its output in pieces of the last dimension;
# - `RowwiseParallel()`: weight `Shard(1)`; takes pieces, gives the whole. For an embedding: rows.
#
# It splits `nn.Linear` as it is, so the joint qkv must become three layers: `SeparateQKVAttention` copies its weights
# into them. The rest of the model needs no change. Inside attention the number of heads must not be written down,
# because each rank has fewer; `-1` leaves it open.


# %%
def build_apart(config=gpt):
    model = build_gpt(config)
    for block in model.blocks:
        block.attention = SeparateQKVAttention(block.attention)
    return model.to(device())


import inspect

from torch.distributed.tensor.debug import CommDebugMode

print(inspect.getsource(SeparateQKVAttention.forward))

# %% [markdown]
# A first plan, the shortest that does it all, and three refinements that come one by one.


# %%
def first_plan(layers=gpt.layers):
    """Split every matrix; logits are gathered for an ordinary loss."""
    plan = {
        "embedding": tp.RowwiseParallel(input_layouts=Replicate()),
        "head": tp.ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(layers):
        plan |= {f"blocks.{i}.attention.{name}": tp.ColwiseParallel() for name in "qkv"}
        plan[f"blocks.{i}.attention.out"] = tp.RowwiseParallel()
        plan[f"blocks.{i}.mlp.up"] = tp.ColwiseParallel()
        plan[f"blocks.{i}.mlp.down"] = tp.RowwiseParallel()
    return plan


def loss_parallel_plan():
    """The same, and logits stay in pieces, as a DTensor."""
    head = tp.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return first_plan() | {"head": head}


# %% [markdown]
# With logits that are a DTensor in pieces, the context `loss_parallel` makes `F.cross_entropy` do what section 4 does.
#
# `parallelize_module` makes new parameters, so that embedding and head are no longer tied; `tie` does it again.
# **Predict.** How many all-reduces of activations will the ledger show for each layer?


# %%
def train_with(make_plan):
    """Error of the losses; ledgers of the last step and its optimizer; CommDebugMode's counts."""
    model, whole = build_apart(), build_gpt(gpt).to(device())
    plan = make_plan()
    tp.parallelize_module(model, init_device_mesh(device().type, (dist.get_world_size(),)), plan)
    model.tie()
    in_pieces = not plan["head"].use_local_output
    optimizers, errors = (adam(model), adam(whole)), []
    with CommDebugMode() as counts, torch.no_grad():
        model(take(0)[0])
    for step in range(steps):
        x, y = take(step)
        expected = whole.loss(x, y)
        expected.backward()
        with record() as ledger, tp.loss_parallel() if in_pieces else nullcontext():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
        with record() as stepping:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        errors.append(off(loss.full_tensor() if in_pieces else loss, expected))
    forward = {str(op): n for op, n in counts.get_comm_counts().items()}
    return {"error": max(errors), "ledger": ledger, "stepping": stepping, "forward": forward}


# %%
def row_of(name, of):
    big = large(of["ledger"])
    rest = [entry for entry in of["ledger"] if entry.bytes != 4 * bsh]
    calls = ", ".join(f"{k} {op}" for op, k in sorted(Counter(e.op for e in big).items()))
    print(f"{name:18}{ring_bytes(big):10,.0f} bytes of activations sent,", end="")
    print(f"{ring_bytes(rest):7,.0f} of others; {calls}")


# %%
plans = {"first plan": first_plan, "loss parallel": loss_parallel_plan}
library = {name: on_ranks(train_with, plan)[0] for name, plan in plans.items()}
for name, of in library.items():
    assert of["error"] < 1e-5
    row_of(name, of)
for op, count in library["first plan"]["forward"].items():
    print(f"CommDebugMode, forward of the first plan: {count} {op}")

# %% [markdown]
# Equal losses. But each layer has **six** all-reduces of activations, not four: 14 in all, where section 6 counted 10.
# Where are the other two? q, k and v are three column-parallel layers now. Each has an f of its own, and each
# all-reduces a gradient of the same input. Section 3 met that in grouped-query attention.
#
# The cure: the *attention module* turns its input into a DTensor once. The three gradients are then added as partial
# sums, and reduced together. (`CommDebugMode` ran without gradients: it counts the g of each layer and of the
# embedding, and the gather of the logits.)


# %%
def one_f_plan():
    """One f for the three layers of each attention."""
    once = tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    return loss_parallel_plan() | {f"blocks.{i}.attention": once for i in range(gpt.layers)}


# %% [markdown]
# The last plan adds sequence parallelism. The residual stream becomes `Shard(1)`, split by tokens; norms work on that
# (`SequenceParallel`); attention and MLP gather it once at their entrance; row-parallel layers scatter.


# %%
def sequence_plan():
    """Sequence parallelism: between attention and MLP each rank has its own tokens."""
    enter = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    own = tp.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    ends = {
        "embedding": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "position": own,
        "norm": tp.SequenceParallel(),
        "head": tp.ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    plan = first_plan() | ends
    for i in range(gpt.layers):
        plan |= {f"blocks.{i}.norm{k}": tp.SequenceParallel() for k in (1, 2)}
        plan |= {f"blocks.{i}.{part}": enter for part in ("attention", "mlp")}
        for row in ("attention.out", "mlp.down"):
            plan[f"blocks.{i}.{row}"] = tp.RowwiseParallel(output_layouts=Shard(1))
    return plan


# %%
plans = {"one f for q, k, v": one_f_plan, "sequence parallel": sequence_plan}
library |= {name: on_ranks(train_with, plan)[0] for name, plan in plans.items()}
for name, of in library.items():
    assert of["error"] < 1e-5
    row_of(name, of)
layers = gpt.layers
assert len(large(library["first plan"]["ledger"])) == 6 * layers + 2
assert len(large(library["one f for q, k, v"]["ledger"])) == 4 * layers + 2
for name in ("one f for q, k, v", "sequence parallel"):
    assert ring_bytes(large(library[name]["ledger"])) == ring_bytes(large(ours))

# %% [markdown]
# `loss_parallel` replaces the gather of the logits by three small all-reduces, as section 4 did. With one f the plan
# sends what our own version sends, to the byte; with sequence parallelism the activations too, in halves. (There the
# smaller messages differ: we sum gradients in backward, the plan only gathers those of the positions.)
#
# And where does DTensor sum the gradients of norms, which each rank has from its own tokens only? It leaves them
# *partial* until someone needs their values:

# %%
for name in ("one f for q, k, v", "sequence parallel"):
    stepping = library[name]["stepping"]
    print(f"{name:18} optimizer.step(): {len(stepping)} operations, {stepping.bytes():,} bytes")
norm_parameters = 4 * gpt.layers + 2
assert len(library["sequence parallel"]["stepping"]) == 3 * norm_parameters

# %% [markdown]
# Thirty small all-reduces: the ten weights and biases of norms, three times each. Adam uses a gradient in three places,
# and each use adds up the partial sums anew. The result is right. It is a count that one would not guess, and a reason
# to look at the ledger of a whole step, not only of forward.

# %% [markdown]
# > **What changes on real GPUs.** Nothing in the plans. NCCL does the collectives; `torch.compile` can fuse and
# > overlap them (section 11). Small all-reduces by the dozen cost latency there: look for them in a profile.

# %% [markdown]
# ## 11. Async tensor parallelism: products while pieces travel
#
# The all-gather in front of a product and the reduce-scatter behind it leave the GPU's arithmetic idle. **Async tensor
# parallelism** cuts both in t pieces. A rank multiplies the piece that it has while it sends it to its neighbour, and
# then the one that has come. After t − 1 exchanges all products are there, and the whole input was never together.
#
# The mirror image works for the reduce-scatter: compute the piece that others wait for, add, pass on.


# %%
def ring_linear(x, weight):
    """F.linear(gathered(x, 1), weight), each piece multiplied while it is sent on."""
    t, rank, piece, products = dist.get_world_size(), dist.get_rank(), x.contiguous(), {}
    for k in range(t):
        coming, works = torch.empty_like(piece), []
        if k < t - 1:
            send = dist.P2POp(dist.isend, piece, (rank + 1) % t)
            receive = dist.P2POp(dist.irecv, coming, (rank - 1) % t)
            works = dist.batch_isend_irecv([send, receive])
        products[(rank - k) % t] = F.linear(piece, weight)
        for work in works:
            work.wait()
        piece = coming
    return torch.cat([products[i] for i in range(t)], dim=1)


# %%
def try_ring():
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, gpt.context // dist.get_world_size(), gpt.hidden, device=device())
    weight = torch.randn(32, gpt.hidden, device=device())
    with record() as ledger:
        output = ring_linear(x, weight)
    return off(output, F.linear(gathered(x, 1), weight)), ledger


error, ledger = on_ranks(try_ring)[0]
assert error < 1e-5 and ledger.messages == world_size - 1
print(f"equal; {ledger.messages} messages of {ledger.sent // ledger.messages:,} bytes")

# %% [markdown]
# What does it win on paper? A step takes as long as the longer of product and message, and one product is left at the
# end. Take queries, keys and values of GPT-3 175B, one sequence of 2,048 tokens, on H100s that compute at 400 TFLOP/s,
# what Llama 3 reached (*recorded*, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), table 4). That is the rate of
# whole steps, communication included. Computing alone is faster, and the share of communication then larger than shown
# here and in section 12. The links are taken at the data sheet's full rate.

# %%
RATE = 400e12  # FLOP/s of an H100 in training
print("a piece:             product (us)  message (us)  all (ms)  overlapped (ms)")
for t in (4, 8):
    for key in ("nvlink4", "ib_ndr"):
        link, c = LINKS[key], big.hidden
        product = 2 * (tokens / t) * c * (3 * c / t) / RATE
        message = link.latency + 2 * (tokens / t) * c / link.bandwidth
        plain = (t - 1) * message + t * product
        ring = (t - 1) * max(message, product) + product
        print(f"t = {t}, {link.name:14}{product * 1e6:13.0f}{message * 1e6:14.0f}", end="")
        print(f"{plain * 1e3:10.2f}{ring * 1e3:17.2f}")

# %% [markdown]
# Over NVLink the messages vanish behind the products. Over InfiniBand four ranks can just hide them, and eight cannot:
# a product shrinks with t², a message only with t. Overlap moves the line; it does not remove it.
#
# > **What changes on real GPUs.** Pieces of a product are smaller, and small products run at fewer FLOP/s. Copies
# > between GPUs can run without the multiprocessors. PyTorch does this under `torch.compile` with symmetric memory,
# > buffers that every GPU of a node can read and write directly (`torch._inductor.config._micro_pipeline_tp`, an
# > option that may change).

# %% [markdown]
# ## 12. Why it stays inside of the node
#
# Now the whole layer: what it computes against what it sends. Forward and backward of a layer take 72 C² FLOPs a token
# for the matrices and 12 s C for attention (lesson 05), divided by t. The four all-reduces are not divided:
# 2(t−1)/t only goes from 1 at t = 2 towards 2.
#
# **Predict** (question 10). GPT-3 175B, one sequence of 2,048 tokens, 8 ranks: what share of a layer's time is
# communication over NVLink 4, and over InfiniBand with one NDR port for each GPU? (Large all-reduces reach 0.6 of an
# A100's NVLink (*recorded*, lesson 03), and lesson 12 uses that share. So the table has NVLink twice.)


# %%
def compute_seconds(config, t, tokens):
    """Forward and backward of one layer on one of t ranks."""
    c = config.hidden
    return tokens * (72 * c**2 + 12 * config.context * c) / t / RATE


def exchange_seconds(config, tokens, cluster):
    """The four all-reduces of one layer, in bf16, not overlapped."""
    way = "ring" if cluster.nodes == 1 else "hierarchical"
    return 4 * all_reduce_seconds(way, 2 * tokens * config.hidden, cluster)


def ranks_on(key, t, share=1.0):
    """t ranks of which each two are joined by a link of this kind, or a share of it."""
    return flat_cluster(t, LINKS[key].latency, 1 / (share * LINKS[key].bandwidth))


# %%
rows = {}
print("share of the time that is communication")
print(f"{'':16}" + "".join(f"{f't = {t}':>10}" for t in (2, 4, 8, 16, 32)))
for key, share in (("nvlink4", 1), ("nvlink4", 0.6), ("ib_ndr", 1)):
    cells, name = [], LINKS[key].name + (f" at {share}" if share < 1 else "")
    for t in (2, 4, 8, 16, 32):
        compute = compute_seconds(big, t, tokens)
        exchange = exchange_seconds(big, tokens, ranks_on(key, t, share))
        if share == 1:
            rows[f"{name}, t = {t}"] = {"compute": compute, "all_reduce": exchange}
        cells.append(f"{exchange / (compute + exchange):10.0%}")
    print(f"{name:16}" + "".join(cells))

# %%
title = "modelled: a layer of GPT-3 175B on H100s, forward and backward of one sequence"
plots.step_split(rows, title)

# %% [markdown]
# *The figure: for each link five bars, t from 2 to 32. Computing halves from bar to bar. Communication grows, from the
# first bar to the last 3.6 times over NVLink and 2.7 times over InfiniBand: the bytes nearly double, and the latency of
# 2(t−1) steps comes on top. Over NVLink both are equal at t = 32; over InfiniBand at t = 8, and at t = 32 six sevenths
# of the bar are communication.*
#
# Why do more ranks help so little? Computing goes with 1/t, sending does not. The number of FLOPs for each byte sent is
#
# $$\frac{72\,bsh^2/t}{2 \cdot 8\,bsh\,(t-1)/t} = \frac{4.5\,h}{t-1}$$
#
# (attention apart, 2 bytes a number). Batch and sequence cancel: a larger batch helps only in that it
# shares the latency. A wider model does help.
# A GPU does a certain number of FLOPs in the time in which a link carries a byte. That gives the largest t for which
# sending takes no longer than computing, latency apart.

# %%
print(f"{'':16}   FLOPs a byte; largest t if h = 4,096  h = 8,192  h = 12,288")
for key, share in (("nvlink4", 1), ("nvlink4", 0.6), ("pcie5", 1), ("ib_ndr", 1)):
    needed = RATE / (share * LINKS[key].bandwidth)
    largest = {c: int(1 + 4.5 * c / needed) for c in (4096, 8192, 12288)}
    small, middle, large_one = largest.values()
    name = LINKS[key].name + (f" at {share}" if share < 1 else "")
    print(f"{name:16}{needed:15,.0f}{small:24}{middle:11}{large_one:12}")

# %% [markdown]
# For h = 12,288 these are limits for many sequences. With latency and one sequence NVLink reaches equality at t = 32
# already, as the figure shows.
#
# Half of the time for communication is a bad bargain already. Within a node of eight GPUs NVLink, at 0.6 of its rate,
# keeps it near a sixth for wide models. The next GPU is on the other side of a network port. That is why the layouts
# that Megatron-LM (table 1) and Llama 3 (table 4) publish stop at t = 8, and take pipelines (lesson 10) and data
# parallelism for the rest.
#
# > **Misconception.** "InfiniBand NDR has 400, NVLink 4 has 900: a factor of two." InfiniBand's 400 are giga*bits*, 50
# > GB/s each way. NVLink's 900 GB/s are both directions together, 450 each way: nine times as much.
#
# ### Beside a recorded curve
#
# The Ultra-Scale Playbook measured one model of 3 billion parameters with t = 2 to 32 (*recorded*). Its text says that
# the step from 8 to 16 leaves the node. A model of it, with one unknown:
#
# - a layer of a token takes its FLOPs at a rate R, and four all-reduces;
# - up to 8 ranks by NVLink 4, beyond by NVLink inside of nodes of eight and one NDR port a GPU between them (an
#   assumption: the text names Amazon's EFA);
# - R is such that t = 2 comes out right. The other four points are predictions.
#
# The shape is not given with the chart. The cell takes that of Megatron's 3.6B, with sequences of 4,096 tokens, as in
# its later chart of the same kind, with sequence parallelism. The batch was as large as would fit. It does not change
# what a token costs in bytes, but many sequences in one all-reduce share its latency: two curves, for 1 sequence and
# for 16.
#
# **Predict.** Where will the model be furthest off, and on which side?


# %%
def nodes_of_eight(t):
    """t ranks on as few nodes of eight H100s as there must be."""
    near, far = (LINKS[key] for key in ("nvlink4", "ib_ndr"))
    links = (near.latency, 1 / near.bandwidth), (far.latency, 1 / far.bandwidth)
    return TwoLevelCluster(max(1, t // 8), min(t, 8), *links)


def predict(curve, config, sequences):
    """Tokens per second and GPU, the first point given; and GPU seconds to compute a token."""
    batch = sequences * config.context
    of_layer = [exchange_seconds(config, batch, nodes_of_eight(t)) for t in curve.gpus]
    exchange = [config.layers * seconds / batch for seconds in of_layer]
    compute = 1 / curve.tokens_per_gpu[0] - curve.gpus[0] * exchange[0]
    rates = [1 / (compute + t * sent) for t, sent in zip(curve.gpus, exchange, strict=True)]
    return rates, compute


# %%
curve = recorded.ULTRASCALE_TP
three = replace(PUBLISHED["Megatron 3.6B"], context=4096)
predicted = {}
for sequences in (1, 16):
    name = f"{sequences} sequence{'s' if sequences > 1 else ''}"
    predicted[name], compute = predict(curve, three, sequences)
    flops = three.layers * (72 * three.hidden**2 + 12 * three.context * three.hidden)
    print(f"{name}: the blocks' {flops / 1e9:.1f} GFLOP a token", end="")
    print(f" in {compute * 1e6:.1f} us, {flops / compute / 1e12:.0f} TFLOP/s")
print("GPUs  recorded" + "".join(f"{name:>21}" for name in predicted))
for i, (t, rate) in enumerate(zip(curve.gpus, curve.tokens_per_gpu, strict=True)):
    row = "".join(f"{of[i]:13,.0f} {of[i] / rate - 1:+6.1%}" for of in predicted.values())
    print(f"{t:4}{rate:10,}{row}   {'fitted' if i == 0 else 'predicted'}")

# %%
plots.scaling_models(curve, predicted, fitted=1)

# %% [markdown]
# *The figure, left: recorded points falling from 13,900 to 2,100 tokens/s and GPU, and two modelled curves through the
# first. Right: their errors, within 11 % up to 16 GPUs, and positive at 32.*
#
# Up to 8 GPUs both curves lie within 11 % of the record. At 16, the first point outside of the node, one is 11 %
# below and the other 10 % above. The fall from 8 to 16 is 43 % in the record, and 43 % and 37 % in the models. How much
# of it comes from leaving the node? The model can do without: sixteen GPUs, all on NVLink.

# %%
for sequences in (1, 16):
    (_, compute), batch = predict(curve, three, sequences), sequences * three.context
    seconds = [
        compute + t * three.layers * exchange_seconds(three, batch, ranks_on("nvlink4", t)) / batch
        for t in (8, 16)
    ]
    print(f"all on NVLink, {sequences:2} in a batch: from 8 to 16 GPUs", end="")
    print(f" {1 - seconds[0] / seconds[1]:.0%} less for each GPU")

# %% [markdown]
# More than half of the fall would come without leaving NVLink: the bytes stay, and the computing is halved.
#
# At 32 the model is 25 % and 82 % too fast. Two things grow there that it leaves out: matrices become thin (3,072 / 32
# = 96 features on a rank) and run at fewer FLOP/s, and every rank repeats the norms and the residual stream. And the
# network was another than the one assumed.
#
# ## Recap, with the numbers of this run

# %%
print(f"{world_size} ranks, GPT with {gpt.parameter_count:,} parameters, forward and backward:")
for name in ("tensor parallel", "sequence parallel", "gathered again"):
    sent = ring_bytes(large(runs[name][1]))
    print(f"{name:18}{sent:10,.0f} bytes sent by a rank;", end="")
    print(f" kept: {kept[name]:5.2f} of {kept['one process']:.2f} C")
for name in ("first plan", "one f for q, k, v", "sequence parallel"):
    sent = ring_bytes(large(library[name]["ledger"]))
    print(f"plan, {name:18}{sent:10,.0f} bytes of activations sent by a rank")

# %% [markdown]
# - A column-parallel layer needs a sum in backward, f; a row-parallel layer needs one in forward, g. A pair of them
#   needs nothing in between.
# - MLP and attention cost one all-reduce each way: four a layer, 8bsh(t−1)/t numbers. The ledger agrees.
# - Without f the loss is right and gradients are not. Comparing gradients shows it, the loss of a first step does not.
# - Heads are split, not rows of a joint matrix. Fewer key-value heads than ranks are copied, and the copies' gradients
#   summed.
# - The loss over a split vocabulary takes three numbers a token; logits are never gathered.
# - Sequence parallelism sends the same bytes in halves, and with one gather more it divides all activations by t.
#   Gradients of norms then need a sum.
# - `parallelize_module` does the same; three layers for q, k and v cost six all-reduces a layer instead of four, until
#   the plan says otherwise.
# - FLOPs for each byte are 4.5 h/(t−1), whatever the batch. NVLink bears t = 8, a network port does not.
#
# <details><summary>Answers to the ten predictions</summary>
#
# 1. The same: together they are one replica (section 1).
# 2. Backward: the gradient of the input is a sum over ranks (section 1).
# 3. Yes: without f, or with a g that reduces twice (section 2).
# 4. Two: one in forward, one in backward (section 2).
# 5. No: these would be queries only. Rows must be sorted by heads first (section 3).
# 6. Two ranks each have a copy of the same head, and sum its gradients (section 3).
# 7. Three numbers a token: a maximum, a sum, and the target's logit (section 4).
# 8. No, the same bytes (section 8).
# 9. By 2.9: 5.5 of 16 are left. With sequence parallelism and gathering again by 8 (sections 7 and 8).
# 10. 12 % (17 % at 0.6 of NVLink's rate) and 52 %, with one sequence of 2,048 tokens at 400 TFLOP/s (section 12).
# </details>
#
# **Exercises:** [exercises/09_tensor_parallel](../exercises/09_tensor_parallel_exercises.ipynb). **Next:** [10 pipeline
# parallel](10_pipeline_parallel.ipynb), which splits between layers and sends little.
#
# **Worth reading**
# - M. Shoeybi et al., *Megatron-LM: training multi-billion parameter language models using model parallelism*, 2019,
#   [arXiv 1909.08053](https://arxiv.org/abs/1909.08053): f and g, MLP and attention, embedding and loss.
# - D. Narayanan et al., *Efficient large-scale language model training on GPU clusters using Megatron-LM*, 2021,
#   [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): what it costs, and how to combine it with pipelines.
# - V. Korthikanti et al., *Reducing activation recomputation in large transformer models*, 2022,
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): sequence parallelism, and activations counted.
