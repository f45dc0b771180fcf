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
# # What happens inside `loss.backward()` under DDP?
#
# Four ranks train a small GPT. The obvious version makes 28 all-reduces per step, one after the other, and waits for
# each. PyTorch's `DistributedDataParallel` sends the same bytes in a few all-reduces, and starts them while the
# backward pass is still running. The weights are the same afterwards, and the gradients are ready several times sooner,
# also on the two CPU cores that built this lesson (section 6 measures it). This lesson builds that class in three
# versions.
#
# **You will be able to**
# - *prove* that N ranks take the same step as one process with an N-times larger batch, and *name* what breaks it;
# - *build* data parallelism: after backward, in buckets, and overlapped with backward;
# - *read* what `DistributedDataParallel` sends and when, and *choose* among its options;
# - *train* as one does for real: sampler, accumulation, uneven data, checkpoints, seeds, learning rate, `torchrun`;
# - *recognise* the usual mistakes by their message, and those that have none.
#
# **Before this:** [02 collectives](02_collectives.ipynb). **Time:** about 145 minutes to read, under a minute to run.
# Sections 9, 11 and 14 to 17 can wait for a second evening.

# %% [markdown]
# ## Eight predictions
#
# Write down an answer to each, however unsure. They come up again on the way, and the answers are at the end.
#
# 1. Each of N ranks computes the mean loss of its own part of a batch. What has to be done to the gradients so that
#    all ranks take the step of one process with the whole batch?
# 2. Ranks start from *different* weights and average their gradients at every step. Do the weights grow together,
#    stay apart, or drift further apart?
# 3. The GPT's gradients are 28 tensors, 449,536 bytes, and PyTorch's DDP is told to make buckets of 128 KiB. How many
#    all-reduces does it make in its first step, and how many later?
# 4. In which order do gradients become ready, and which comes last if the output layer shares the embedding's
#    weight?
# 5. Four micro-batches are accumulated under DDP without `no_sync`. Is the result wrong?
# 6. One rank has two batches more than the others. What happens when the others have none left?
# 7. Ten samples, four ranks. How many samples does one epoch visit?
# 8. A run on four ranks is resumed from its checkpoint, once on four ranks, once on two. Does the loss curve go on
#    to the last bit as if nothing had happened?

# %% [markdown]
# The first cell imports everything and names every parameter.

# %% tags=["parameters"]
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from course_utils import device, expect_error, launch, record
from course_utils.data import Windows
from course_utils.models import build
from course_utils.plots import bucket_picture, loss_curves, replicas, step_timelines

world_size = 4  # ranks, 2 or more
backend = "gloo"  # the CPU; None takes the GPUs, if there is one for every rank
per_rank = 4  # windows of text that a rank takes in one step
bucket_bytes = 2**17  # gradients in one message: 128 KiB
patience = 2.0  # seconds that `launch` waits for the ranks in some cells

# %% [markdown]
# With `backend = "gloo"` every cell runs on the CPU, also on a machine with GPUs, so that your numbers agree with the
# text.

# %% [markdown]
# ## 1. Data parallelism in one picture
#
# Every rank holds the whole model. In a step each takes *its own part* of the batch and runs forward and backward
# alone. Before the optimizer's step the ranks exchange their gradients, so that all optimizers see the same one and
# take the same step. **Predict** (question 1): what has to be done to the gradients?
#
# The model is the small GPT of `course_utils.models`: two blocks, 64 wide, and its output layer shares the
# embedding's weight. `build()` makes it, from seed 0 if you give no other: the same weights on every rank.

# %% jupyter={"source_hidden": true}
import inspect

from IPython.display import Markdown

from course_utils import models

parts = [
    inspect.getsource(part) for part in (models.Attention, models.MLP, models.Block, models.GPT)
]
source = "\n\n".join(parts)
Markdown(f"<details><summary>The model's source</summary>\n\n```python\n{source}```\n\n</details>")

# %% [markdown]
# The data is *Alice in Wonderland* by characters, in windows of 64. These helpers come back in the whole lesson:
#
# | helper | what it does |
# |---|---|
# | `on_ranks(fn)` | runs `fn` on all ranks, as `launch` does |
# | `whole_batch(step)`, `my_part(step)` | the numbers of the windows of a step: of all ranks, of this one |
# | `take(numbers)` | fetches windows by their numbers: inputs and targets |
# | `loss_of(model, x, y)` | the mean loss of these windows |


# %%
windows = Windows("train")


def on_ranks(fn, *args, n=world_size, **kwargs):
    return launch(fn, *args, world_size=n, backend=backend, **kwargs)


def take(numbers):
    """Windows by number, and the same text one character later: both (len(numbers), 64)."""
    x, y = zip(*(windows[i] for i in numbers), strict=True)
    return torch.stack(x).to(device()), torch.stack(y).to(device())


def whole_batch(step):
    size = dist.get_world_size() * per_rank
    return range(step * size, (step + 1) * size)


def my_part(step):
    return whole_batch(step)[dist.get_rank() * per_rank :][:per_rank]


def loss_of(model, x, y):
    """Mean cross-entropy of the next character."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# %% [markdown]
# One step, written out. The picture shows for each rank a few of its weights, the text it has, its loss, and six of
# its 112,384 gradients, before and after the average.


# %%
def one_step():
    model = build(seed=0).to(device())
    weight = model.position.weight
    x, y = take(my_part(0))
    row = {"weights": weight[0, :6].tolist()}
    row["its part of the batch begins"] = f"{bytes(x[0, :22].tolist()).decode()!r}"
    loss = loss_of(model, x, y)
    loss.backward()
    row |= {"loss": loss.item(), "gradient": weight.grad[0, :6].tolist()}
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    row["mean gradient"] = weight.grad[0, :6].tolist()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return row | {"weights after": weight[0, :6].tolist()}


rows = on_ranks(one_step)
columns = {name: [row[name] for row in rows] for name in rows[0]}
assert all(columns["weights after"][0] == other for other in columns["weights after"])
replicas(columns, "measured: one step of data parallelism")

# %% [markdown]
# *The figure: one row a rank. Grey is the same on all ranks: the weights before, the mean gradient, the weights
# after. Coloured is the rank's own: text, loss and gradient. The only communication lies between the two gradient
# columns.*
#
# Note what does not move in a step: text, activations, weights.

# %% [markdown]
# ## 2. The mean of the gradients is the gradient of the large batch
#
# The loss of a batch is a mean over its windows, of losses ℓᵢ. Split N·b windows into N parts of b:
#
# $$\frac{1}{Nb}\sum_{i=1}^{Nb}\ell_i \;=\; \frac1N\sum_{r=1}^{N}\Big(\frac1b\sum_{i\,\in\,\text{part }r}\ell_i\Big)$$
#
# The gradient of a sum is the sum of the gradients. So the *mean over ranks* of the gradients of their *mean
# losses* is the gradient of the whole batch. **Predict** the largest difference between the two, in float32 and in
# float64: zero?


# %%
def gradient(model, numbers):
    """All gradients of the mean loss over these windows, as one vector."""
    loss_of(model, *take(numbers)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def parts_against_whole(dtype):
    alone = gradient(build(dtype=dtype).to(device()), whole_batch(0))  # one process, N-times batch
    mean = gradient(build(dtype=dtype).to(device()), my_part(0))
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return (mean - alone).abs().max().item()


for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
    difference = max(on_ranks(parts_against_whole, dtype))
    assert 0 < difference < bound
    print(f"{dtype}: mean of {world_size} gradients = gradient of the large batch, to {bound:g}")

# %% [markdown]
# Small, but not zero, as the `assert` says: the sum is taken in another order, and floating-point sums depend on the
# order. That it shrinks with the precision shows that it is rounding and nothing else.
#
# The equation has three conditions. Each of the next three cells breaks one.
#
# **The mean, not the sum.** `all_reduce` sums. **Predict:** what does a rank get that forgets to divide?


# %%
def sum_of_gradients():
    alone = gradient(build().to(device()), whole_batch(0))
    total = gradient(build().to(device()), my_part(0))
    dist.all_reduce(total)
    return (total.norm() / alone.norm()).item()


factor = on_ranks(sum_of_gradients)[0]
assert abs(factor - world_size) < 1e-3
print(f"the gradient is {factor:.2f} times too large")

# %% [markdown]
# With plain SGD this is a learning rate N times too large, and one that changes with the number of ranks. Adam divides
# each gradient by its own running size, so there the factor cancels and the mistake stays hidden. It shows where a
# gradient is compared with something else: clipping at a fixed norm, or a weight decay that is added to the gradient
# (`Adam` does that, `AdamW` does not).
#
# > **Misconception.** "DDP sums the gradients", or "`all_reduce` averages." It is the other way round: `all_reduce`
# > sums, and DDP divides by the world size. A loop that divides once more takes steps N times too short, with SGD.
#
# **Equal parts.** The last rank now has a single window, as at the end of an epoch. A mean of means weighs that
# window as much as the `per_rank` windows of another rank together. The cure weighs each rank by its share.


# %%
def unequal_parts(weighted):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = whole_batch(0)[: (n - 1) * per_rank + 1]
    mine = whole[rank * per_rank :][:per_rank]
    alone = gradient(build().to(device()), whole)
    mean = gradient(build().to(device()), mine)
    if weighted:
        mean *= len(mine) * n / len(whole)
    dist.all_reduce(mean)
    return ((mean / n - alone).norm() / alone.norm()).item()


plain, weighted = (on_ranks(unequal_parts, weighted)[0] for weighted in (False, True))
assert plain > 0.01 and weighted < 1e-5
print(f"mean of unequal parts: off by {plain:.0%}; weighted by their sizes: equal to rounding")

# %% [markdown]
# Language models meet this at every step: their loss is a mean over *tokens that count*, and padding or masking
# makes that number differ between ranks. The cure is the same: divide each rank's summed loss by the global number
# of tokens (one more all-reduce, of one number) and multiply by N.
#
# **Samples that do not see each other.** Batch normalisation subtracts the mean of *its batch*, so the loss of a
# sample depends on its neighbours. Then the parts are other functions than the whole.


# %%
def net_with(norm):
    torch.manual_seed(0)  # the same net on all ranks
    layers = [torch.nn.Linear(8, 8), norm(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*layers).to(device())


def norm_against_whole(norm, norm_of_one_process):
    """Relative difference of the mean gradient of parts to the gradient of the whole batch."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.randn(4 * n, 8, generator=torch.Generator().manual_seed(1)).to(device())

    def gradient_of(net, part):
        net(part).pow(2).mean().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    alone = gradient_of(net_with(norm_of_one_process), x)
    mean = gradient_of(net_with(norm), x[4 * rank :][:4])
    dist.all_reduce(mean)
    return ((mean / n - alone).norm() / alone.norm()).item()


# %%
norms = torch.nn.Identity, torch.nn.BatchNorm1d
without, with_norm = (on_ranks(norm_against_whole, norm, norm)[0] for norm in norms)
assert without < 1e-5 and with_norm > 0.01
print(f"without batch norm: equal to rounding; with it: off by {with_norm:.0%}")

# %% [markdown]
# No weighting helps here; the statistics themselves have to be shared (section 11). Layer norm, which transformers
# use, works within a sample and is safe. Other losses that couple samples, such as contrastive ones, break it
# alike.

# %% [markdown]
# ## 3. The same start, other data
#
# The picture began with grey weights. Here they are not: each rank builds its model from its own seed, and all then
# average their gradients at every step. **Predict** (question 2): together, apart, or further apart?


# %%
def spread(model):
    """Largest difference between any two ranks in any weight."""
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    largest, smallest = weights.clone(), weights.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return (largest - smallest).max().item()


def train_from_own_seed(equal_start, steps=3):
    model = build(seed=dist.get_rank()).to(device())
    if equal_start:
        for p in model.parameters():
            dist.broadcast(p.detach(), src=0)
    before = spread(model)
    for step in range(steps):
        model.zero_grad()
        loss_of(model, *take(my_part(step))).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.data -= 0.1 * p.grad / dist.get_world_size()
    return before, spread(model)


# %%
apart, together = (on_ranks(train_from_own_seed, equal)[0] for equal in (False, True))
assert apart[0] > 0.05 and abs(apart[1] - apart[0]) < 1e-5
assert together == (0.0, 0.0)
print(f"spread of the weights over ranks: {apart[0]:.3f} before, {apart[1]:.3f} after")
print(f"with a broadcast from rank 0:     {together[0]:.3f} before, {together[1]:.3f} after")

# %% [markdown]
# They stay as far apart as they were, but for rounding. All ranks subtract the *same* mean gradient, so differences
# between them neither shrink nor grow. And that gradient belongs to none of the models: each rank's part of it was
# computed at other weights. The loss may even fall for a while, and no message ever says what is wrong.
#
# A broadcast of the weights cures it, and then the spread is zero after every step, not only small: an all-reduce
# leaves the same bits on every rank (lesson 03), and the same bits minus the same bits are the same.
#
# <details><summary>Is it enough to give every rank the same seed instead?</summary>
#
# For weights drawn from that seed, yes, as long as all ranks draw the same numbers in the same order. A broadcast
# also covers weights from a file that one rank read half-written, another version of a library, or a layer that a
# rank built under an `if`. It happens once, costs the bytes of the weights, and DDP does it.
# </details>
#
# <details><summary>The opposite mistake: the same weights, and the same data on every rank. What happens?</summary>
#
# All ranks compute the same gradient, and the mean is that gradient. N ranks do the work of one. Loss, spread and
# speed look right; only each rank goes through the whole data set, so an epoch has N times the steps that it should.
# The sampler of section 12 prevents it.
# </details>

# %% [markdown]
# ## 4. From scratch, first version: after backward
#
# The loops of the last two sections become a class. It wraps a model, is called like it, and has one method more:
# `finish()`, to be called between `backward()` and the optimizer's step. Written so, training code hardly changes.
#
# Besides parameters a model may have **buffers**: tensors that are saved with it and computed, not trained, such as the
# running mean of batch norm (section 11). They are broadcast at the start, too.
#
# Three kinds of parameters need special handling. A **tied** weight is one tensor under two names; `parameters()`
# gives it once. A **frozen** one has no gradient, on any rank, and is left out. An **unused** one has none *in this
# step*, and perhaps has one on another rank: the call must be made on all ranks or on none, so zeros stand in for
# it.


# %%
class AfterBackward(torch.nn.Module):
    """Data parallelism, first version: after backward, average one gradient after the other."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        self.trained = [p for p in module.parameters() if p.requires_grad]

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish(self):
        """Average the gradients over the ranks; call it after backward."""
        for p in self.trained:
            if p.grad is None:  # not used on this rank
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# %% [markdown]
# A plain model has no `finish()`, and PyTorch's DDP needs none. So the training loop calls it through a helper:


# %%
def finish(model):
    """Between backward and the optimizer's step: what our versions still have to do."""
    if hasattr(model, "finish"):
        model.finish()


# %% [markdown]
# Two tools will judge every version. The first proves that three steps with momentum, on parts of the batch and
# from *another seed on each rank*, end at the weights of one process that took the whole batches.


# %%
def train(model, parameters, numbers, batch=take, steps=3):
    """Steps of SGD; `numbers(step)` are the windows."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(numbers(step))).backward()
        finish(model)
        optimizer.step()


def against_one_process(wrap, make=build, batch=take, dtype=torch.float32):
    """Largest difference in any weight after training."""
    alone = make(seed=0).to(device(), dtype)
    replica = make(seed=dist.get_rank()).to(device(), dtype)
    train(alone, [*alone.parameters()], whole_batch, batch)
    train(wrap(replica), [*replica.parameters()], my_part, batch)
    pairs = zip(alone.parameters(), replica.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


# %%
def prove(wrap, **kwargs):
    """Train in both precisions on all ranks; every rank must end where one process does."""
    bounds = {torch.float32: 1e-6, torch.float64: 1e-12}

    def both():
        return [against_one_process(wrap, dtype=dtype, **kwargs) for dtype in bounds]

    for differences in on_ranks(both):
        assert all(d < bound for d, bound in zip(differences, bounds.values(), strict=True))
    return "equal to one process: 1e-6 in float32, 1e-12 in float64"


# %% [markdown]
# <details><summary>Why SGD, and not Adam, in a proof of equality?</summary>
#
# Adam divides each gradient by its own running size. Where the true gradient is zero, both are rounding errors, and
# their quotient can be anything up to 1. The keys' bias in attention is such a place: it shifts all scores of a
# query alike, and softmax does not notice. Two runs that differ by rounding alone then walk apart there, without
# any effect on the loss.
# </details>
#
# The second tool reads the ledger of the third step: how many all-reduces, how many bytes.


# %%
def third_step(wrap):
    """On a rank: the ledger of the third step, from the start of backward."""
    model = wrap(build(seed=0).to(device()))
    for step in range(3):
        loss = loss_of(model, *take(my_part(step)))
        with record() as ledger:
            loss.backward()
            finish(model)
    return ledger


def count(wrap):
    ledger = on_ranks(third_step, wrap)[0]
    assert {entry.op for entry in ledger} == {"all_reduce"}
    return f"{len(ledger)} all-reduces, {ledger.bytes():,} bytes"


print(f"AfterBackward: {prove(AfterBackward)}")
print(f"AfterBackward: {count(AfterBackward)}")

# %% [markdown]
# Right, and 28 messages (in this lesson a **message** is one all-reduce, whatever a ring makes of it). Most are tiny:
# 18 of the 28 gradients are biases and norms of 64 to 256 numbers. Each message costs its α, the latency of lesson
# 02, and meanwhile the rank computes nothing.

# %% [markdown]
# ## 5. Second version: flat buckets
#
# Copy many gradients into one flat tensor, average that, and hand the parts back. The flat tensor is a **bucket**.
# What changes:
#
# - buckets are filled once, at the start. All ranks must agree on them, so they follow the order of the model, but
#   backwards, *from the last parameter to the first*: the next version needs that;
# - a bucket is full when it has reached `cap` bytes, and it holds one dtype only;
# - the division comes *before* the sum, as in DDP (section 7 shows it). In float16 a sum of N gradients overflows
#   earlier than their mean; the price is that small gradients become zero earlier.


# %%
def in_buckets(parameters, cap):
    """Deal parameters out to buckets, the last one first; a bucket is full once it has `cap`."""
    full, filling = [], {}
    for p in reversed(parameters):
        kind = p.dtype, p.device
        filling.setdefault(kind, []).append(p)
        if sum(q.nbytes for q in filling[kind]) >= cap:
            full.append(filling.pop(kind))
    return full + [*filling.values()]


# %% [markdown]
# `start_next` starts the all-reduce of the next bucket and does not wait for it. `finish` starts all that have not
# started, then waits for each and hands the parts back: every gradient becomes a view of its bucket.


# %%
class FlatBuckets(AfterBackward):
    """Second version: after backward, average whole buckets of gradients."""

    def __init__(self, module, cap=bucket_bytes):
        super().__init__(module)
        self.buckets = in_buckets(self.trained, cap)
        self.under_way = []  # for each bucket that has started: its flat tensor, and a request

    def start_next(self):
        bucket = self.buckets[len(self.under_way)]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([g.flatten() for g in gradients]) / dist.get_world_size()
        self.under_way.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        while len(self.under_way) < len(self.buckets):
            self.start_next()
        for bucket, (flat, request) in zip(self.buckets, self.under_way, strict=True):
            request.wait()
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = mean.view_as(p)
        self.under_way = []


# %% [markdown]
# **Predict:** how many all-reduces of how many bytes, with buckets of 128 KiB?

# %%
print(f"FlatBuckets: {prove(FlatBuckets)}")
print(f"FlatBuckets: {count(FlatBuckets)}")

# %% [markdown]
# The same bytes in four messages. The picture shows which gradients share one. (`short` cuts the parameters'
# names.)


# %%
def short(name):
    """`blocks.1.mlp.up.weight` becomes `up 1`."""
    found = re.fullmatch(r"blocks\.(\d+)\.(?:.*\.)?(\w+)\.\w+", name)
    return f"{found[2]} {found[1]}" if found else name.split(".")[0]


layout = build()
names = {p: short(name) for name, p in layout.named_parameters()}
dealt = in_buckets([*layout.parameters()], bucket_bytes)
by_definition = [[(names[p], p.nbytes) for p in bucket] for bucket in dealt]
bucket_picture({"last to first": by_definition}, "computed: the buckets of FlatBuckets")

# %% [markdown]
# *The figure: all gradients in one bar, from the last layers on the left to the embedding on the right, cut into
# four coloured buckets. Each is full at 128 KiB or a little more, and the last one has what is left. Norms and biases
# are too thin to be seen.*

# %% [markdown]
# ## 6. Third version: while backward goes on
#
# The backward pass walks from the loss to the input, so the last layer's gradients are ready long before the first
# one's. **Predict** (question 4): the order for this GPT. Where does the tied weight come?
#
# `register_post_accumulate_grad_hook` calls a function as soon as a parameter's gradient is complete.


# %%
def order_of_gradients():
    model, arrived = build().to(device()), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: arrived.append(name))
    loss_of(model, *take(my_part(0))).backward()
    return arrived


arrived = on_ranks(order_of_gradients)[0]
print(" -> ".join(dict.fromkeys(map(short, arrived))))
assert len(arrived) == len(set(arrived)) == len(names)  # each once, also the tied one

# %% [markdown]
# The reverse of the forward pass. The tied weight is the *first* that backward meets, in the output layer, and the
# *last* to be complete, because the embedding adds its share at the very end. Autograd adds up both shares before
# it calls the hook, so the hook fires once.
#
# So a bucket can leave when its last gradient has come, and travel while backward computes the next ones. The third
# version counts what is missing, and keeps one rule: **buckets start in the same order on all ranks**. Collectives
# have no names (lesson 02, section 9). If a bucket is complete early on one rank, because a layer in the bucket
# before it was not used there, it waits for its turn. `finish` is inherited: it starts what is left, and waits.


# %%
class Overlapped(FlatBuckets):
    """Third version: each bucket's all-reduce starts while backward is still running."""

    def __init__(self, module, cap=bucket_bytes):
        super().__init__(module, cap)
        self.home = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients that have not come yet
        self.listening = True
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p):  # the hook: this gradient is complete
        if not self.listening:
            return
        if self.missing[self.home[p]] == 0:
            raise RuntimeError("a gradient came twice: call finish() between two backward passes")
        self.missing[self.home[p]] -= 1
        for missing in self.missing[len(self.under_way) :]:  # of the buckets not yet started
            if missing:
                break
            self.start_next()

    def finish(self):
        super().finish()
        self.missing = [len(bucket) for bucket in self.buckets]


# %%
print(f"Overlapped: {prove(Overlapped)}")
print(f"Overlapped: {count(Overlapped)}")

# %% [markdown]
# The same four messages. What differs is when they start. Count those that had started when `backward()` came back;
# `DistributedDataParallel`, with buckets of the same size, comes along as a fourth.

# %%
versions = {
    "AfterBackward": AfterBackward,
    "FlatBuckets": FlatBuckets,
    "Overlapped": Overlapped,
    "DistributedDataParallel": lambda m: DDP(m, bucket_cap_mb=bucket_bytes / 2**20),
}


def started_in_backward(wrap):
    """On a rank: messages of the third step that start before backward is over."""
    model = wrap(build().to(device()))
    for step in range(3):
        loss = loss_of(model, *take(my_part(step)))
        with record() as ledger:
            loss.backward()
        finish(model)
    return len(ledger)


started = {name: on_ranks(started_in_backward, wrap)[0] for name, wrap in versions.items()}
print(started)
assert [*started.values()] == [0, 0, 4, 4]

# %% [markdown]
# Now by the clock: when does each rank compute its gradients, and when is each message under way? The four take
# turns, eight steps each. Three warm up, and the figure shows each version's median of the other five. (The folded
# cells read the clocks.)


# %% jupyter={"source_hidden": true}
def backward_by_clock(model, step):
    """On a rank: spans of the gradients' computation and of every message, in seconds."""
    ready, parameters = [], [*model.module.parameters()]
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: ready.append(time.monotonic()))
        for p in parameters
    ]
    for p in parameters:
        p.grad = None
    loss = loss_of(model, *take(my_part(step)))
    dist.barrier()
    with record() as ledger:
        begin = time.monotonic()
        loss.backward()
        finish(model)
        end = time.monotonic()
    for hook in hooks:
        hook.remove()
    messages = [(entry.start - begin, (entry.end or end) - begin) for entry in ledger]
    return {"backward": (0, ready[-1] - begin), "messages": messages, "end": end - begin}


# %% jupyter={"source_hidden": true}
def in_turns(versions, make, steps=8, warm_up=3):
    """On a rank: the spans of every step but the first ones, by version."""
    wrapped = {name: wrap(make()) for name, wrap in versions.items()}
    spans = {name: [] for name in versions}
    for step in range(steps):
        for name, model in wrapped.items():
            spans[name].append(backward_by_clock(model, step))
    return {name: by_step[warm_up:] for name, by_step in spans.items()}


def typical_step(versions, make, **kwargs):
    """By version: the step of median length, as a list of spans by rank."""
    by_rank, typical = on_ranks(in_turns, versions, make, **kwargs), {}
    for name in versions:
        steps = list(zip(*(rank[name] for rank in by_rank), strict=True))
        steps.sort(key=lambda ranks: max(rank["end"] for rank in ranks))
        typical[name] = steps[len(steps) // 2]
    return typical


# %% tags=["nbval-ignore-output"]
steps = typical_step(versions, lambda: build().to(device()))
step_timelines(steps, "measured: backward (pale) and all-reduces (dark) of one step")

# %% [markdown]
# *The figure: four panels, two lanes a rank. Above, pale, is the backward pass; below, dark, are the messages. In
# the first panel a long row of small messages follows a short backward pass. In the second a few larger ones follow
# it. In the third and fourth the first messages start while backward is still running.*
#
# How much of the communication is hidden? The **overlap** is the share of the messages' time that lies inside the
# backward pass.


# %% tags=["nbval-ignore-output"]
def overlap(ranks):
    """The hidden share of all messages of a step."""
    inside = outside = 0.0
    for rank in ranks:
        until = rank["backward"][1]
        for start, end in rank["messages"]:
            inside += max(0.0, min(end, until) - start)
            outside += max(0.0, end - max(start, until))
    return inside / (inside + outside)


def show_times(steps):
    for name, ranks in steps.items():
        ready = max(rank["end"] for rank in ranks)
        print(
            f"{name:24} gradients ready after {1e3 * ready:4.0f} ms, overlap {overlap(ranks):.0%}"
        )


show_times(steps)

# %% [markdown]
# The large step is from 28 messages to four. Overlap gains little where messages need the same few cores as the
# backward pass (four ranks on two cores when this lesson was built): hiding one behind the other is mostly sharing,
# and any of the last three versions can come out first.
#
# On a GPU the backward pass does not need the cores that carry messages. A stand-in: let the ranks sleep for a moment
# whenever a gradient is complete, as if something else had computed it. Now the backward pass takes long and leaves
# the cores free. Compare the same 28 messages, first after backward and then each as soon as its gradient is there
# (`cap=1` makes every gradient a bucket of its own).


# %% tags=["nbval-ignore-output"]
def computed_elsewhere():
    model = build().to(device())
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: time.sleep(0.006))
    return model


pair = {"AfterBackward": AfterBackward, "Overlapped, cap=1": lambda m: Overlapped(m, cap=1)}
show_times(typical_step(pair, computed_elsewhere, steps=4, warm_up=1))

# %% [markdown]
# This is what overlap is for: most of the messages disappear behind the backward pass. The last bucket cannot, because
# it is complete only when backward is over.
#
# <details><summary>How can DDP do without <code>finish()</code>?</summary>
#
# The autograd engine takes callbacks that run when the whole backward pass is done. DDP queues one as soon as its last
# bucket is complete, and that one waits for the buckets and hands out the gradients. If a bucket never becomes
# complete, nothing is queued and nothing waits: remember that in section 9. In Python it is
# `torch.autograd.Variable._execution_engine.queue_callback(self.finish)`, a private name.
# </details>
#
# > **What changes on real GPUs.** Messages travel on a stream of their own, beside the stream that computes, and take a
# > few of the GPU's multiprocessors. (A stream is a queue of work for the GPU; lesson 00.) `wait()` makes one stream
# > wait for the other, not the CPU. There the backward pass of a large model takes far longer than one bucket. Lesson
# > 05 measures and chooses the bucket size.

# %% [markdown]
# ### Tied, frozen, unused, and used on one rank only
#
# The GPT has a tied weight already. This relative of it adds a frozen block, a parameter that nobody uses, and one
# that only sequences with a rare first character use, as an expert or a language adapter would be. In the whole
# batch there is one such sequence, and rank 0 has it. **Predict:** what is the gradient of that parameter on one
# process, and what must each rank contribute to it?


# %%
class Awkward(torch.nn.Module):
    """A GPT with a frozen block, an unused parameter, and one for sequences that start with 0."""

    def __init__(self, seed):
        super().__init__()
        self.gpt = build(seed=seed)
        self.gpt.blocks[0].requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.zeros(8))
        self.rare = torch.nn.Parameter(torch.zeros(128))

    def forward(self, tokens):
        logits = self.gpt(tokens)
        is_rare = tokens[:, 0] == 0
        return logits + is_rare[:, None, None] * self.rare if is_rare.any() else logits


def take_one_rare(numbers):
    """As `take`, but the first window of each whole batch begins with 0, and all others with 1."""
    x, y = take(numbers)
    for row, number in enumerate(numbers):
        first_of_its_batch = number % len(whole_batch(0)) == 0
        x[row, 0] = 0 if first_of_its_batch else 1
    return x, y


# %%
for wrap in (AfterBackward, FlatBuckets, Overlapped):
    print(f"{wrap.__name__:13} {prove(wrap, make=Awkward, batch=take_one_rare)}")

# %% [markdown]
# A rank whose sequences do not use the parameter contributes zero: in the mean over the whole batch those windows
# add nothing. The sum is rank 0's gradient, and the division is by N as everywhere.
#
# One difference from single-process training remains. A parameter that *no* rank used has a gradient of zero here, and
# none in one process: plain SGD does not care, but AdamW shrinks such a parameter by its weight decay. DDP tells the
# two cases apart with one more message (section 9).

# %% [markdown]
# ## 7. `DistributedDataParallel`
#
# Now PyTorch's own. It wraps the model in the same way and needs no `finish()`.

# %%
small_buckets = {"bucket_cap_mb": bucket_bytes / 2**20}
print(f"DDP: {prove(lambda model: DDP(model, **small_buckets))}")

# %% [markdown]
# **Predict** (question 3): what does it send, when it is built, in its first step, and later? The ledger sees it
# all, although DDP communicates from C++.


# %%
def watch_ddp(options):
    seen = {}
    with record() as seen["built"]:
        model = DDP(build().to(device()), **options)
    for step in (1, 2, 3, 4):
        with record() as seen[f"step {step}"]:
            loss_of(model, *take(my_part(step))).backward()
    return seen, model._get_ddp_logging_data()


def show(seen):
    for when, ledger in seen.items():
        print(f"{when:7}", ", ".join(f"{entry.op} {entry.bytes:,}" for entry in ledger))


seen, log = on_ranks(watch_ddp, small_buckets)[0]
show(seen)

# %% [markdown]
# Line by line:
#
# - **Built.** An all-gather of 8 bytes a rank compares the number of parameters, a broadcast compares their shapes,
#   and another hands out rank 0's weights, all 449,536 bytes. That is section 3, done for you.
# - **Step 1.** One all-reduce with everything, as in no version of ours. DDP does not know yet in which order gradients
#   come, so it waits for all, and watches.
# - **Step 2** starts by making buckets in the order it has seen. Ranks might have seen different orders, so rank 0
#   broadcasts its own: 28 numbers and how many buckets, 4 bytes each, then the buckets' sizes.
# - **From then on** four all-reduces a step.
#
# And *when* does DDP divide by N? Take a gradient of 40,000 on every rank, in float16, whose largest number is 65,504:


# %%
def mean_of_large_gradients():
    x = torch.full((1, 1), 40_000.0, dtype=torch.float16, device=device())
    net = DDP(torch.nn.Linear(1, 1, bias=False, dtype=torch.float16, device=device()))
    net(x).sum().backward()  # the gradient is x
    by_hand = x.clone()
    dist.all_reduce(by_hand)
    by_hand /= dist.get_world_size()
    return net.module.weight.grad.item(), by_hand.item()


by_ddp, sum_first = on_ranks(mean_of_large_gradients)[0]
print(f"mean by DDP: {by_ddp:,.0f}; sum first, then divide: {sum_first}")
assert abs(by_ddp - 40_000) < 100 and sum_first == float("inf")

# %% [markdown]
# Before the sum, as our buckets do: afterwards would be too late.
#
# `_get_ddp_logging_data()` tells which parameters went where, by number. (It is a private name, and documented
# nowhere; it answers what no public function does. The folded cell turns its answer into names.)


# %% jupyter={"source_hidden": true}
def read_buckets(text):
    """`"3 2, 1 0"` becomes buckets of (name, bytes)."""
    parameters = [(short(name), p.nbytes) for name, p in layout.named_parameters()]
    return [[parameters[int(i)] for i in bucket.split()] for bucket in text.split(", ")]


rebuilt = read_buckets(log["rebuilt_per_bucket_param_indices"])
first = read_buckets(" ".join(map(str, range(len(names)))))
rows = {"DDP, step 1": first, "DDP, then": rebuilt, "FlatBuckets": by_definition}
totals = {name: [sum(size for _, size in bucket) for bucket in row] for name, row in rows.items()}
assert totals["DDP, step 1"] == [entry.bytes for entry in seen["step 1"]]
assert totals["DDP, then"] == [e.bytes for e in seen["step 4"]] == totals["FlatBuckets"]
bucket_picture(rows, "measured on DDP, and computed: which gradients share a message")

# %% [markdown]
# *The figure: three bars of the same length. In the first step one bucket from the embedding on the left to the
# last layers on the right; afterwards four, in the opposite order, with the same borders as our own.*
#
# The order in which gradients came is the reverse of the definition, nearly. Where a model calls its layers in
# another order than it defines them, ours would wait, and DDP's would not.
#
# ### Its hooks, live
#
# A **communication hook** stands in for the all-reduce of a bucket. This one notes what it is given and then does
# the usual. Lesson 05 puts compression here.


# %%
def watch_hooks():
    model, lines = DDP(build().to(device()), **small_buckets), []

    def hook(state, bucket):
        size, count = bucket.buffer().nbytes, len(bucket.parameters())
        last = ", the last" if bucket.is_last() else ""
        state.append(f"bucket {bucket.index()}: {count:2} gradients, {size:,} bytes{last}")
        mean = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda f: f.value()[0])

    model.register_comm_hook(lines, hook)
    for step in range(2):
        lines.append(f"step {step + 1}")
        loss_of(model, *take(my_part(step))).backward()
    return lines


print(*on_ranks(watch_hooks)[0], sep="\n")

# %% [markdown]
# ### Three options
#
# - `gradient_as_bucket_view=True`: gradients are views of the buckets, as in our `finish()`, instead of copies of
#   them. That saves memory of the size of all gradients.
# - `static_graph=True` promises that every step uses the same parameters in the same way. DDP looks once which
#   ones.
# - `find_unused_parameters=True` makes no such promise: before each backward DDP walks the graph and marks what
#   cannot get a gradient as ready.
#
# **Predict** from the ledger's view: which of them change what is sent?


# %%
def storages(options):
    """In how many pieces of memory do the gradients lie?"""
    model = DDP(build().to(device()), **small_buckets, **options)
    for step in range(3):
        loss_of(model, *take(my_part(step))).backward()
    return len({p.grad.untyped_storage().data_ptr() for p in model.parameters()})


for option in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters"):
    seen, _ = on_ranks(watch_ddp, small_buckets | {option: True})[0]
    print(f"{option}: gradients in {on_ranks(storages, {option: True})[0]} pieces of memory")
    show({when: ledger for when, ledger in seen.items() if when != "built"})

# %% [markdown]
# - With views nothing else is sent. But the gradients lie in four pieces of memory instead of 28: the buckets are the
#   gradients.
# - A static graph exchanges in its first step which parameters were used (28 flags of 4 bytes), and makes its
#   buckets a step later.
# - Looking for unused parameters exchanges such flags, 112 bytes, in *every* step. There are several buckets from the
#   start, and they stay for ever: what is used may change, so no order can be learnt.
#
# PyTorch 2.13 has three more. `forward_sync_buffers=False` turns off the broadcast of buffers in forward (section 11;
# before, `broadcast_buffers=False` did), `batched_grad_copy=True` copies all gradients of a bucket at once instead of
# one by one (lesson 05 counts those copies), and `skip_all_reduce_unused_params=True` leaves out parameters that no
# rank ever uses.
#
# <details><summary>Clipping, mixed precision, checkpointing and torch.compile under DDP</summary>
#
# *Clipping.* After `backward()` every rank holds the same mean gradient, so `clip_grad_norm_` computes the same norm
# everywhere and needs no communication. With accumulation it comes after the last micro-batch.
#
# *Mixed precision.* Autocast goes around forward and loss, as on one GPU. With a `GradScaler` call
# `unscale_(optimizer)` before clipping. An infinity on one rank is one in the mean, so all ranks skip the same step.
#
# *Activation checkpointing* works with `use_reentrant=False`. The other kind needs a model without unused parameters,
# in which each layer is checkpointed at most once.
#
# *`torch.compile`* cuts the graph where a bucket ends (`torch._dynamo.config.optimize_ddp`), because a backward pass
# that is compiled in one piece hands out all its gradients at its end, and nothing could overlap. Compile the wrapped
# model: `torch.compile(DDP(model))`. Sources:
# [DDP](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html) and its
# [design notes](https://docs.pytorch.org/docs/stable/notes/ddp.html).
# </details>
#
# > **What changes on real GPUs.** One process drives one GPU: `torch.cuda.set_device(local_rank)`, then
# > `DDP(model.cuda(), device_ids=[local_rank])`. The default bucket is 25 MiB, with a first one of 1 MiB so that
# > communication starts early; the GPT of this lesson would fit into that, which is why we set 128 KiB.

# %% [markdown]
# ## 8. Accumulation: many micro-batches, one message
#
# A batch that does not fit into memory is taken in **micro-batches**: several backward passes add up their
# gradients, then one optimizer step. **Predict** (question 5): under DDP, is the result of the plain loop wrong?
# And how many bytes does it send with four micro-batches?
#
# Each loss is divided by the number of micro-batches, because `backward()` adds: the sum of four means, each over a
# quarter of the windows, has to become the mean over all. Without it the step is four times too long.
#
# `no_sync()` is a context in which DDP does not communicate. Three loops: without it, with it around all but the
# last micro-batch, and with it around `backward()` only.


# %%
def accumulate(how, micro=4):
    """On a rank: the gradient of one step, and what was sent for it."""
    model = DDP(build().to(device()), **small_buckets)
    for _ in range(3):  # until the buckets are there
        loss_of(model, *take(my_part(0))).backward()
    model.zero_grad()
    with record() as ledger:
        for i in range(micro):
            x, y = take([my_part(0)[i % per_rank]])
            quiet = model.no_sync() if how != "always" and i < micro - 1 else nullcontext()
            if how == "no_sync around backward":
                loss = loss_of(model, x, y) / micro
                with quiet:
                    loss.backward()
            else:
                with quiet:
                    (loss_of(model, x, y) / micro).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), ledger


# %%
results, sent_by = {}, {}
for how in ("always", "no_sync", "no_sync around backward"):
    results[how], ledger = on_ranks(accumulate, how)[0]
    sent_by[how] = ledger.bytes()
    print(f"{how:24}{len(ledger):3} all-reduces, {ledger.bytes():9,} bytes")
for other in results.values():
    assert torch.allclose(other, results["no_sync"], rtol=0, atol=1e-6)
print("all three gradients are equal")

# %% [markdown]
# > **Misconception.** "Without `no_sync` the gradients are wrong." They are right, but cost four times as much. After
# > the first micro-batch every rank holds the mean; adding its own next gradient and averaging again leaves the old
# > mean as it was and averages the new part.
#
# The third loop is the trap: it *has* a `no_sync` and sends everything. DDP decides in its *forward* whether the
# coming backward communicates, so the context must hold both. Only counting shows that.
#
# In our own classes accumulation is `finish()` after the last micro-batch. `Overlapped` has to be told that its
# hooks should not count yet, and that is all there is to `no_sync`:


# %%
def accumulate_overlapped(micro=4):
    model = Overlapped(build().to(device()))
    with record() as ledger:
        for i in range(micro):
            model.listening = i == micro - 1
            (loss_of(model, *take([my_part(0)[i % per_rank]])) / micro).backward()
        model.finish()
    return torch.cat([p.grad.flatten() for p in model.module.parameters()]), ledger


result, ledger = on_ranks(accumulate_overlapped)[0]
assert torch.allclose(result, results["no_sync"], rtol=0, atol=1e-6)
print(f"Overlapped: {len(ledger)} all-reduces, {ledger.bytes():,} bytes")

# %% [markdown]
# ## 9. Parameters that get no gradient
#
# Section 6's awkward model, under plain DDP. **Predict:** which of its oddities does DDP accept, and which not? In
# which step do you see it?


# %%
def train_awkward(**options):
    model = DDP(Awkward(seed=0).to(device()), **options)
    for step in range(2):
        loss_of(model, *take_one_rare(my_part(step))).backward()
    rare, unused = model.module.rare.grad, model.module.unused.grad
    return rare.norm().item(), "none" if unused is None else "zeros"


# %% tags=["nbval-ignore-output"]
with expect_error():
    on_ranks(train_awkward, timeout=10)

# %% [markdown]
# DDP accepts the tied parameter (section 7 trained one) and the frozen one, for which it does not wait. It fails when a
# parameter is unused, and says so in the *next* step, when it finds that the last one never ended: a bucket still waits
# for a gradient. (Which rank is named differs from run to run. Numbers of the parameters follow; with
# `TORCH_DISTRIBUTED_DEBUG=INFO` in the environment their names.)
#
# The message offers the cure for a model that means it. **Predict** the gradient of the rare parameter on the ranks
# that did not use it, and of the one that nobody used.

# %%
rare, unused = zip(*on_ranks(train_awkward, find_unused_parameters=True), strict=True)
assert len({*rare}) == 1 and rare[0] > 0 and {*unused} == {"none"}
print("the rare parameter: the same gradient on all ranks; the unused one: none on any")
patient = {"find_unused_parameters": True}
print("DDP:", prove(lambda m: DDP(m, **patient), make=Awkward, batch=take_one_rare))

# %% [markdown]
# As in our classes, ranks that did not use the rare parameter count as zeros in the mean. The flags of section 7 (4
# bytes a parameter, at the end of the step) are what tells apart *not used here* and *not used anywhere*: in the
# second case DDP leaves `grad` alone.
#
# Use it only for models that need it. It walks the graph in every step, sends the flags, and gives up learning the
# order. A layer that nobody uses *by mistake* is better found than tolerated.

# %% [markdown]
# ## 10. Uneven data
#
# Every rank trains on the batches it has, and the last one has two more. **Predict** (question 6).


# %%
def uneven(joined=False):
    rank, n = dist.get_rank(), dist.get_world_size()
    net = DDP(torch.nn.Linear(1, 1, bias=False, device=device()))
    seen = []
    with net.join() if joined else nullcontext():
        for _ in range(3 + 2 * (rank == n - 1)):
            net.zero_grad()
            net(torch.ones(1, 1, device=device())).sum().backward()  # every rank's gradient is 1
            seen.append(round(net.module.weight.grad.item(), 4))
    return seen


# %%
with expect_error():
    on_ranks(uneven, timeout=patience)

# %% [markdown]
# The last rank waits in an all-reduce that nobody joins; the others have returned. Without our limit it would wait for
# the group's timeout (lesson 02).
#
# That was the end of *training*. **Predict:** what happens at the end of an epoch, if another one follows? Here the
# last rank has two batches in an epoch and the others three. To tell epochs apart, the gradient of every batch is 1 in
# epoch 0 and 10 in epoch 1. Each rank takes four steps:


# %%
def into_the_next_epoch():
    rank, n = dist.get_rank(), dist.get_world_size()
    net = DDP(torch.nn.Linear(1, 1, bias=False, device=device()))
    batches = 2 if rank == n - 1 else 3
    seen = []
    for step in range(4):
        epoch = step // batches
        x = torch.tensor([[1.0 if epoch == 0 else 10.0]], device=device())
        net.zero_grad()
        net(x).sum().backward()
        seen.append((epoch, net.module.weight.grad.item()))
    return seen


by_rank = on_ranks(into_the_next_epoch)
for rank, seen in enumerate(by_rank):
    print(f"rank {rank}:", ", ".join(f"epoch {epoch} gradient {mean:g}" for epoch, mean in seen))
assert {seen[2][1] for seen in by_rank} == {(world_size - 1 + 10) / world_size}
assert by_rank[0][2][0] == 0 and by_rank[-1][2][0] == 1

# %% [markdown]
# No error and no hang: in the third step the last rank is in epoch 1 already, and its batch is averaged with the last
# batches of the others' epoch 0. In the fourth step all are in epoch 1, but at different batches of it, and from the
# fifth step on they are never again in the same epoch. The replicas stay equal, so no check of the weights finds it.
# The hang comes after the last epoch, perhaps days later. So uneven data has to be made even *in every epoch*.
#
# > **Misconception.** "Uneven batches hang at the end of the epoch." If DDP alone communicates, they hang at the end of
# > training. Until then they mix epochs in silence.
#
# `join()` helps: a rank that has finished its batches answers the others' all-reduces with zeros until all have
# finished. **Predict** the mean gradient in the steps that only the last rank computes.

# %%
gradients = on_ranks(uneven, joined=True)
for rank, seen in enumerate(gradients):
    print(f"rank {rank}: {seen}")
assert gradients[-1][-1] == round(1 / world_size, 4)

# %% [markdown]
# One over N: the sum has one summand left and is still divided by the world size. So late batches count less. That
# is as if the windows that are missing had a gradient of zero; `join(divide_by_initial_world_size=False)` divides
# by the ranks that are left. Inside the context two more all-reduces of one number each are made in every step: who is
# still there, and does this step synchronise (it does not under `no_sync`)? At the end the weights of the last rank are
# broadcast to all.
#
# Better than to join is not to need it: a sampler gives all ranks equally many batches (section 12). `join` is for
# data that nobody has counted, such as streams.

# %% [markdown]
# ## 11. Buffers, and batch norm
#
# The buffers (section 4) of batch norm are a running mean, a running variance and a count of batches. Each rank
# computes them from its own part. Here the data of rank r has the mean 10 (r + 1), and in each forward a running mean
# moves a tenth of the way from where it is to there. **Predict:** what do ranks 0 and 1 hold after three forwards, and
# what is sent for it?


# %%
def batch_norm_under_ddp():
    torch.manual_seed(dist.get_rank())
    norm = torch.nn.BatchNorm1d(4).to(device())
    model, means = DDP(norm), []
    for _ in range(3):
        x = torch.randn(64, 4, device=device()) + 10 * (dist.get_rank() + 1)
        with record() as ledger:
            y = model(x)
        means.append(round(norm.running_mean[0].item(), 1))
        y.sum().backward()
    return means, ledger


means, ledgers = zip(*on_ranks(batch_norm_under_ddp), strict=True)
for rank, mean in enumerate(means):
    print(f"rank {rank}: running mean after forward 1, 2, 3: {mean}")
print("sent in forward 3:", ", ".join(f"{e.op} {e.bytes}" for e in ledgers[0]))
assert len({mean[-1] for mean in means}) == world_size

# %% [markdown]
# Alone, rank 1 would go 2, 3.8, 5.4. But before a forward DDP broadcasts rank 0's buffers (32 bytes of floats, 8 of
# integers), unless the forward before it ran under `no_sync` or without gradients. So ranks differ by their last
# forward only. Then each normalises by its own batch, and moves the running values by it. What rank 0 holds at the end
# has seen one Nth of the data, and it is what a checkpoint saves.
#
# DDP does not ask whether the model is in training mode. So with buffers an evaluation on rank 0 alone must call
# `model.module`, or its first forward waits for the others.
#
# ### Sharing the statistics
#
# (Optional: it uses an autograd function of its own, and nothing later builds on it.) With enough samples on a rank its
# statistics are good anyway, and this is what plain DDP does. With one or two they are noise, and it helps to share
# them. By hand: every rank sums x and x² over its part, and an all-reduce turns that into the sums over all parts.
# Backward needs a second one: each rank's loss depends on the sums, so their gradient is summed over the ranks too.


# %%
class SumOverRanks(torch.autograd.Function):
    """An all-reduce whose backward is an all-reduce."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.forward(ctx, gradient)


class SharedBatchNorm(torch.nn.BatchNorm1d):
    """Batch norm in training, with the mean and variance of all ranks' parts (equally large)."""

    def forward(self, x):
        sums = SumOverRanks.apply(torch.stack([x.sum(0), x.square().sum(0)]))
        mean, square = sums / (len(x) * dist.get_world_size())
        return (x - mean) / (square - mean**2 + self.eps).sqrt() * self.weight + self.bias


# %% [markdown]
# **Predict.** Section 2 compared parts with the whole batch, and batch norm was the condition that no weighting could
# mend. With shared statistics?


# %%
def shared_statistics(norm):
    with record() as ledger:
        off = norm_against_whole(norm, torch.nn.BatchNorm1d)
    return off, ledger


off, ledger = on_ranks(shared_statistics, SharedBatchNorm)[0]
assert off < 1e-5
print("shared statistics: equal to the whole batch, to rounding")
print("sent:", ", ".join(f"{entry.op} {entry.bytes}" for entry in ledger))

# %% [markdown]
# Equal: 64 bytes in forward, 64 in backward, and then the gradients. (Running values are left out here.) PyTorch's
# class for this is `SyncBatchNorm`. It is made for GPUs only. The next cell puts it to the same proof if this machine
# has a GPU for every rank. If not, it shows what the class says on a CPU:

# %%
if torch.cuda.device_count() >= world_size:
    off, _ = launch(shared_statistics, torch.nn.SyncBatchNorm, world_size=world_size)[0]
    assert off < 1e-4
    print("SyncBatchNorm: equal to the whole batch, to rounding")
else:
    with expect_error():
        on_ranks(shared_statistics, torch.nn.SyncBatchNorm)

# %% [markdown]
# > **What changes on real GPUs.** `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` before `DDP(model)` replaces
# > every batch norm of a model. It costs each layer one small collective in forward and one in backward, and nothing
# > hides them: the layer waits. Group norm and layer norm need none.

# %% [markdown]
# ## 12. Who gets which data: the sampler
#
# A **sampler** gives a data loader the numbers of the samples to load. The distributed one deals a shuffled epoch
# out to the ranks like cards. All ranks shuffle *the same way*, from a seed and the epoch's number, so they need
# not speak. **Predict** (question 7): ten samples, four ranks?


# %%
class Sampler:
    """Numbers of this rank's samples; `start` of the epoch are already done, by all ranks."""

    def __init__(self, length, ranks, rank, seed=0, start=0):
        self.length, self.ranks, self.rank = length, ranks, rank
        self.seed, self.epoch, self.start = seed, 0, start

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        shuffled = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.length, generator=shuffled).tolist()
        rounds = (self.length + self.ranks - 1) // self.ranks  # rounded up
        padded = rounds * self.ranks
        while len(order) < padded:
            order = order + order  # padded with the beginning of the epoch
        return iter(order[self.start + self.rank : padded : self.ranks])


# %%
length = 2 * world_size + world_size // 2
dealt = [[*Sampler(length, world_size, rank)] for rank in range(world_size)]
for rank, numbers in enumerate(dealt):
    print(f"rank {rank}: {numbers}")
visited = sum(dealt, [])
twice = sorted(number for number in set(visited) if visited.count(number) == 2)
print(f"{length} samples, {len(visited)} visits, twice: {twice}")

# %% [markdown]
# Twelve visits for ten samples: all ranks must make the same number of steps, so the last round is **padded** with
# the epoch's first samples. In training this does no harm. In an evaluation it counts some samples twice, and the
# result then depends on the number of ranks: leave the repeats out there. (`drop_last=True` cuts the rest off
# instead of padding it.)
#
# Is it the same as PyTorch's? Element by element, for many lengths, ranks and epochs:

# %%
cases = 0
for length in (1, 2, 7, 10, 64, 101):
    for ranks in range(1, 9):
        for rank in range(ranks):
            ours = Sampler(length, ranks, rank, seed=5)
            theirs = DistributedSampler(range(length), ranks, rank, seed=5)
            for epoch in (0, 1, 17):
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert [*ours] == [*theirs]
                cases += 1
print(f"equal to DistributedSampler in {cases} cases")

# %% [markdown]
# **`set_epoch`.** A sampler does not count epochs itself. **Predict:** what does a loop do that forgets the call?


# %%
def two_epochs(tell):
    sampler = DistributedSampler(range(20), dist.get_world_size(), dist.get_rank())
    loader, epochs = DataLoader(range(20), batch_size=2, sampler=sampler), []
    for epoch in range(2):
        if tell:
            sampler.set_epoch(epoch)
        epochs.append(torch.cat([*loader]).tolist())
    return epochs


for tell in (False, True):
    first, second = on_ranks(two_epochs, tell)[0]
    print(f"{'with' if tell else 'without':7} set_epoch rank 0 sees {first}, then {second}")
    assert (first == second) != tell

# %% [markdown]
# Without the call every epoch has the same order, and every rank sees the same samples for ever. No message says so.
#
# **In the middle of an epoch.** A job that resumes after half an epoch should go on with the other half. The
# epoch's number gives the order, and one more number says how many samples are done, by all ranks together:
# `start`.

# %%
length, steps_done = 16 * world_size, 5


def deal(ranks, done=0):
    return [[*Sampler(length, ranks, rank, start=done)] for rank in range(ranks)]


whole, rest = deal(world_size), deal(world_size, done=steps_done * world_size)
assert all(a[steps_done:] == b for a, b in zip(whole, rest, strict=True))
fewer = max(ranks for ranks in range(1, world_size) if world_size % ranks == 0)
again = deal(fewer, done=steps_done * world_size)
assert {*sum(again, [])} == {*sum(rest, [])}
print(f"resumed on {world_size} ranks: the same order; on {fewer}: the same samples are left")

# %% [markdown]
# Because samples are dealt like cards, k·N consecutive cards form one step of N ranks with k windows each,
# *whatever N is*. So `start` means the same for another number of ranks. With contiguous shards, one a rank, it
# would not.

# %% [markdown]
# ## 13. Checkpoint and resume
#
# A checkpoint holds what the rest of the run depends on: weights, the optimizer's state, the epoch and the place in it,
# and the state of random generators if the model draws random numbers (this one does not). A learning-rate scheduler
# and a `GradScaler` have a state too: save their `state_dict()` with the rest. All ranks hold the same weights, so one
# writes. Two habits: write to another name and rename, so that a crash leaves the old file
# whole; and let the others wait, so that nobody reads too early. If the machine may crash too, call `os.fsync` on the
# file before the rename: until then its bytes may be only in the operating system's memory.


# %%
def save(path, state):
    """Rank 0 writes; when any rank returns, the file is there."""
    if dist.get_rank() == 0:
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)
    dist.barrier()


def load(path, model, optimizer):
    """All ranks read. Returns how many samples of the epoch are done."""
    state = torch.load(path, map_location=device())
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["samples"]


# %%
def fit(wrap, steps, batch, read=None, write=None):
    """Train; the global batch does not depend on the number of ranks. Returns the loss curve."""
    rank, n = dist.get_rank(), dist.get_world_size()
    replica = build(seed=0).to(device())
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3)
    done = load(read, replica, optimizer) if read else 0
    model, curve = wrap(replica), []
    numbers = iter(Sampler(len(windows), n, rank, start=done))
    for _ in range(steps):
        loss = loss_of(model, *take([*islice(numbers, batch // n)]))
        optimizer.zero_grad()
        loss.backward()
        finish(model)
        optimizer.step()
        done += batch
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        curve.append(mean.item() / n)
    if write:
        state = {"model": replica.state_dict(), "optimizer": optimizer.state_dict()}
        save(write, state | {"samples": done})
    return curve


# %% [markdown]
# (One epoch is enough here, so its number is left out. The GPT is saved from `replica`, the model inside.
# `DDP(model).state_dict()` has `module.` before every name; section 17 meets that.)
#
# **Predict** (question 8). Ten steps go on to twenty, once without a break, once from the checkpoint on as many
# ranks, once on fewer. To the last bit?

# %%
folder = tempfile.TemporaryDirectory()
file = f"{folder.name}/checkpoint.pt"
batch = 2 * world_size
before = on_ranks(fit, Overlapped, 10, batch, write=file)[0]
unbroken = on_ranks(fit, Overlapped, 20, batch)[0]
same_ranks = on_ranks(fit, Overlapped, 10, batch, read=file)[0]
others = {n: on_ranks(fit, Overlapped, 10, batch, read=file, n=n)[0] for n in {fewer, 1}}

assert unbroken[:10] == before and unbroken[10:] == same_ranks  # every bit
print(f"resumed on {world_size} ranks: the same loss curve to the last bit")
for n in sorted(others, reverse=True):
    assert max(abs(a - b) for a, b in zip(unbroken[10:], others[n], strict=True)) < 1e-4
    print(f"resumed on {n}: the same to 1e-4 over 10 steps")

# %%
curves = {
    "without a break": (range(1, 21), unbroken),
    f"resumed on {world_size}": (range(11, 21), same_ranks),
    f"resumed on {fewer}": (range(11, 21), others[fewer]),
}
loss_curves(
    curves,
    "measured: loss",
    wide=["without a break", f"resumed on {world_size}"],
    marks={"checkpoint": 10.5},
)

# %% [markdown]
# *The figure: a broad pale curve falls over 20 steps. From step 11 on a narrower one and a thin one lie on it.*
#
# On as many ranks every bit is the same: same numbers, added in the same order. On fewer ranks each takes more
# windows, so means are taken over other groups, and the last digits differ. It is the same training all the same.
#
# > **What changes on real GPUs.** Some kernels add in an order that changes from run to run. The function
# > `torch.use_deterministic_algorithms` forbids them and names those that have no other way, at a price in speed.
# > And NCCL may choose another algorithm on another machine.
#
# **Predict:** the run above used `Overlapped`. Does DDP also resume to the last bit? And with
# `find_unused_parameters=True`?

# %% tags=["nbval-ignore-output"]
for look in (False, True):

    def wrap(model, look=look):
        return DDP(model, **small_buckets, find_unused_parameters=look)

    on_ranks(fit, wrap, 10, batch, write=file)
    resumed = on_ranks(fit, wrap, 10, batch, read=file)[0]
    pairs = [*zip(on_ranks(fit, wrap, 20, batch)[0][10:], resumed, strict=True)]
    differ, most = sum(a != b for a, b in pairs), max(abs(a - b) for a, b in pairs)
    print(f"find_unused_parameters={look}: {differ} of 10 losses differ, by at most {most:.1g}")
    assert most < 1e-4 and (differ == 0 or not look)

# %% [markdown]
# | class | resumes to the last bit | because its buckets |
# |---|---|---|
# | `Overlapped` | yes | are the same in every step |
# | DDP | not with more than two ranks | differ in the first step after each start |
# | DDP, `find_unused_parameters=True` | yes | are the same in every step |
#
# Every *start* of plain DDP begins with a step of one bucket (section 7). In another bucket a gradient lies at another
# place, a ring adds its summands in another order there, and the last bit can differ: in the weights from the first
# resumed step on, and in a loss wherever that shows. (Two ranks have one order only.) Nothing is wrong, but if you
# compare runs bit by bit, this is where the difference comes from.

# %% [markdown]
# ## 14. Seeds
#
# | must be the same on all ranks | must differ between ranks |
# |---|---|
# | the sampler's seed and epoch | what dropout and augmentation draw |
# | weights (by broadcast) | worker seeds of the data loaders |
# | decisions around a collective | |
#
# One `torch.manual_seed(0)` on all ranks gets the left column right and the right one wrong. **Predict** the
# dropout masks (the cell prints those of ranks 0 and 1, and its assertion looks at all):


# %%
def dropout_mask(seed_differs):
    torch.manual_seed(7 + dist.get_rank() if seed_differs else 7)
    return F.dropout(torch.ones(12)).bool().int().tolist()


for seed_differs in (False, True):
    masks = on_ranks(dropout_mask, seed_differs)
    print("seed + rank:" if seed_differs else "one seed:   ", *masks[:2], sep="\n  ")
    assert (len({tuple(mask) for mask in masks}) == 1) != seed_differs

# %% [markdown]
# With one seed all ranks drop the same units: N ranks try one mask in a step instead of N, and averaging removes less
# of dropout's noise than it could. So seed with
# `seed + rank` *after* the model is built or broadcast; give the sampler the plain `seed`. A checkpoint of a model
# with dropout keeps each rank's generator state (`torch.get_rng_state()`, for dropout on GPUs
# `torch.cuda.get_rng_state()`), gathered to the rank that writes or in a file of its own. A run on another number of
# ranks draws other masks in any case.

# %% [markdown]
# ## 15. The learning rate
#
# N ranks that each keep their batch take N times fewer steps for the same epoch. If each step is as long as before,
# the model gets about N times less far. Two rules for a batch k times larger:
#
# | | learning rate | for | source |
# |---|---|---|---|
# | linear | × k | SGD | Goyal et al. 2017, with a warm-up over the first epochs |
# | square root | × √k | Adam, RMSprop | [Malladi et al. 2022](https://arxiv.org/abs/2205.10287) |
#
# (The second changes Adam's other settings too.) The linear rule has a picture: k small steps from nearly the same
# place are about one step k times as long. It fails where the place is not nearly the same: early, when the loss
# falls fast (hence the warm-up), and for large k.
#
# An N-times batch in one process *is* N ranks, as section 2 has proved. So four processes can try four settings at
# the same time, each for itself, with plain SGD. **Predict** the order of the curves, over the text that was read.


# %%
def alone(settings):
    """On a rank: SGD with this rank's batch and learning rate, over 512 windows."""
    batch, lr = settings[dist.get_rank()]
    model, losses = build(seed=0).to(device()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    numbers = iter(Sampler(len(windows), 1, 0))
    for _ in range(512 // batch):
        loss = loss_of(model, *take([*islice(numbers, batch)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
k, batch, lr = 8, 4, 0.02
settings = [(batch, lr), (k * batch, lr), (k * batch, k**0.5 * lr), (k * batch, k * lr)]
names_of = ["batch 4", "batch 32, same rate", "batch 32, × √8", "batch 32, × 8"]
curves = {
    name: ([batch * (i + 1) for i in range(len(losses))], losses)
    for name, (batch, _), losses in zip(
        names_of, settings, launch(alone, settings, world_size=4, backend=backend), strict=True
    )
}
loss_curves(curves, "measured: four ways to read 512 windows", xlabel="windows", wide=["batch 4"])

# %% [markdown]
# *The figure: the broad curve of the small batch falls. The large batch with eight times its rate starts behind, meets
# it after some steps and stays with it; with √8 times it lags, and with the same rate it lags most.*

# %%
small, *large = (sum(y[-len(y) // 4 :]) / len(y[-len(y) // 4 :]) for _, y in curves.values())
behind = [loss - small for loss in large]  # in the mean loss of the last quarter
for name, loss in zip(names_of[1:], behind, strict=True):
    print(f"{name:22} {loss:+.2f} behind batch 4")
assert abs(behind[2]) < behind[1] < behind[0]

# %% [markdown]
# So for plain SGD and k = 8 the linear rule holds here once the first steps are over. In those the loss falls fast, and
# eight small steps lead further than one long one: the case for a warm-up, although nothing diverges here. The square
# root is a rule for Adam: with SGD its steps are too short.
#
# > **Misconception.** "With DDP I must multiply the learning rate by the number of GPUs." Only if the *global*
# > batch grew with them, and then it is a rule of thumb to be checked. DDP's gradient is a mean: at the same global
# > batch, nothing changes. Goyal et al. scaled from 256 to 8,192 images with it, and saw accuracy fall beyond that.

# %% [markdown]
# ## 16. Launching it for real
#
# | | starts | ranks meet by | use it for |
# |---|---|---|---|
# | `torchrun` | a process a rank, on every node | environment variables | real jobs, restarts (lesson 16) |
# | `torch.multiprocessing.spawn` | a process a rank, here | what you pass | programs that start their own ranks |
# | `launch`, in a notebook | a process a rank, here | the same variables | learning, looking inside |
#
# `spawn` starts new Python processes, which import the program and look the function up by its name. So it needs the
# guard in the last two lines below, and it cannot start a function that was defined in a cell; `launch` sends a
# function by value. A rank gets its number as the first argument, and whatever else it needs has to be passed: how
# many ranks there are, and where they meet. Here they meet in a file.

# %%
program = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing

def main(rank, n, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=n)
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    if rank == 0:
        print(f"{n} ranks, sum {x.item():g}")
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(2, sys.argv[1]), nprocs=2)
"""

# %%
loopback = "lo0" if sys.platform == "darwin" else "lo"  # leads from this machine to itself
quiet = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}


def run_program(*words):
    done = subprocess.run([sys.executable, *words], env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


script = f"{folder.name}/spawned.py"
with open(script, "w") as out:
    out.write(program)
print(run_program(script, f"file://{folder.name}/meeting"), end="")

# %% [markdown]
# What the ranks talk through is the backend, whatever started them:
#
# | | gloo | NCCL |
# |---|---|---|
# | tensors | CPU (GPU by way of the CPU) | GPU |
# | under DDP | CPU training, tests, this lesson | always, on GPUs |
# | a collective returns | when it is done | when it is queued on a stream |
#
# The training of section 13 is also a program, [scripts/train_ddp.py](../scripts/train_ddp.py): process group,
# sampler, DDP, accumulation, checkpoint and resume, in the order in which a real one has them. In a terminal:
#
# ```text
# torchrun --standalone --nproc-per-node=2 scripts/train_ddp.py --steps 20 --backend gloo
# ```
#
# Here is all of it:

# %% jupyter={"source_hidden": true}
with open("../scripts/train_ddp.py") as script:
    source = script.read()
Markdown(
    f"<details><summary>scripts/train_ddp.py</summary>\n\n```python\n{source}```\n\n</details>"
)

# %% [markdown]
# The next cell runs it. `--nproc-per-node` counts the ranks of *one* node: 2 here, and with GPUs as many as the
# node has. That is 1 on a node with a single GPU, and `gpu` stands for the right number. Leave out `--backend gloo`
# there.

# %%
torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
arguments = ["../scripts/train_ddp.py", "--steps=20", "--backend=gloo"]
output = run_program(*torchrun, *arguments)
print(output, end="")

# %% [markdown]
# **Predict:** is it the same training as `fit`, on two ranks of `launch`? (The script's batch has 16 windows unless
# you set another size.)

# %%
curve = launch(fit, DDP, 20, 16, world_size=2, backend="gloo")[0]
printed = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
assert all(abs(a - b) < 1e-3 for a, b in zip(curve[4::5], printed, strict=True))
print("the same losses:", [round(loss, 3) for loss in curve[4::5]])

# %% [markdown]
# ## 17. Five more mistakes
#
# Unused layers (section 9) and uneven batches (section 10) have shown their messages. Here are five more that
# everyone makes once: three with a message, two without.
#
# **No process group.** DDP is built before `init_process_group`. (A program started with `python` instead of `torchrun`
# stops earlier, in `init_process_group`: *environment variable RANK expected, but not set*.)


# %%
def no_group():
    DDP(torch.nn.Linear(2, 2))


with expect_error():
    launch(no_group, world_size=2, init=False)


# %% [markdown]
# **Another model on one rank.** A flag, a config file or a version differs.


# %% tags=["nbval-ignore-output"]
def other_model():
    layers = 2 + (dist.get_rank() == dist.get_world_size() - 1)
    DDP(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers))))


with expect_error():
    launch(other_model, world_size=2, backend="gloo", timeout=10)

# %% [markdown]
# This is what the 8 bytes a rank are for (section 7). Had the layers the same number and other shapes, the
# broadcast after it would have noticed.
#
# **Names in a checkpoint.** Saved from the wrapper, loaded into the model.


# %%
def wrong_names():
    saved = DDP(torch.nn.Linear(2, 2)).state_dict()
    torch.nn.Linear(2, 2).load_state_dict(saved)


with expect_error():
    launch(wrong_names, world_size=2, backend="gloo")

# %% [markdown]
# Save `ddp.module.state_dict()`. For a file that is already there,
# `torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, "module.")` removes the prefix.
#
# **Past the wrapper.** The model is called through `ddp.module`, perhaps for a method like `loss` that the wrapper does
# not have. **Predict:** what does DDP do?
#
# **Unfrozen too late.** A layer is frozen when DDP is built and released later, for fine-tuning. DDP looked for
# parameters that want a gradient once, when it was built.
#
# The cell trains with each of the two and then calls the `spread` of section 3: a check to put into any training loop,
# every thousand steps.


# %%
def check_same(model):
    if apart := spread(model):
        raise RuntimeError(f"weights differ between ranks, by up to {apart:.1g}")


def silent(mistake):
    replica = build(seed=0).to(device())
    replica.blocks[0].requires_grad_(mistake != "unfrozen too late")
    model = DDP(replica)
    replica.requires_grad_(True)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for step in range(3):
        x, y = take(my_part(step))
        loss = replica.loss(x, y) if mistake == "past the wrapper" else loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    check_same(replica)


on_ranks(silent, "none")  # passes
for mistake in ("past the wrapper", "unfrozen too late"):
    with expect_error():
        on_ranks(silent, mistake)

# %% [markdown]
# DDP says nothing in either case; only the check does. When the model is called past the wrapper, DDP's forward never
# runs, so its hooks are not armed: every rank trains alone. A parameter unfrozen too late is trained by every rank
# alone, while the others are averaged: build DDP *after* the last change of `requires_grad`.

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
for name, ranks in steps.items():
    ready = max(rank["end"] for rank in ranks)
    sent = f"{len(ranks[0]['messages']):2} messages"
    print(f"{name:24} {sent}, gradients ready after {1e3 * ready:4.0f} ms")
print(f"4 micro-batches: {sent_by['always']:,} bytes, with no_sync {sent_by['no_sync']:,}")

# %% [markdown]
# - The mean of the ranks' gradients is the gradient of the N-times batch: to 1e-6 in float32 and 1e-12 in float64,
#   if it is a mean, parts are equal or weighted, and samples do not see each other.
# - The same start by a broadcast, other data by a sampler. Without the broadcast ranks stay apart for ever.
# - DDP is a hook on every gradient, a bucket that leaves when its last gradient has come, and one rule: the same order
#   on all ranks.
# - Its first step is one bucket; then it learns the order. Unused parameters need a flag, uneven data a sampler or
#   `join`, accumulation a `no_sync` around forward *and* backward.
# - A checkpoint has weights, optimizer, scheduler, scaler, place in the epoch and generators. It can be resumed on
#   another number of ranks.
#
# <details><summary>Answers to the eight predictions</summary>
#
# 1. An all-reduce, and a division by N: the mean (section 2).
# 2. They stay as far apart as they were (section 3).
# 3. One in the first step, then one a bucket: four here. With its default buckets of 25 MiB it is one (section 7).
# 4. Reverse to the forward pass. The tied weight comes last: the embedding has the final share (section 6).
# 5. No. It costs four times the bytes (section 8).
# 6. It waits for an all-reduce that nobody joins: a hang, if training ends there. If another epoch follows, epochs are
#    mixed in silence (section 10).
# 7. Twelve: two samples twice (section 12).
# 8. On four ranks to the last bit if buckets lie as before, which those of plain DDP do not in its first step; on two
#    to rounding (section 13).
# </details>
#
# **Exercises:** [exercises/04_ddp](../exercises/04_ddp_exercises.ipynb). **Next:** [05 scaling
# efficiency](05_scaling_efficiency.ipynb): why eight GPUs are not eight times as fast, and what wins it back.
#
# **Worth reading**
# - S. Li et al., *PyTorch Distributed: experiences on accelerating data parallel training*, VLDB 2020,
#   [arxiv.org/abs/2006.15704](https://arxiv.org/abs/2006.15704): the design that sections 5 to 9 rebuild, by its
#   authors.
# - P. Goyal et al., *Accurate, large minibatch SGD: training ImageNet in 1 hour*, 2017,
#   [arxiv.org/abs/1706.02677](https://arxiv.org/abs/1706.02677): the linear rule, the warm-up, and a list of
#   mistakes with normalisation and averaging.
# - PyTorch documentation, *DistributedDataParallel*,
#   [docs.pytorch.org](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html):
#   every option, and its conditions.
