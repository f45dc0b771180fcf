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
# Four ranks train a small GPT. The obvious way to combine their gradients makes 28 all-reduces per step, one after
# the other, when the backward pass is over. PyTorch's `DistributedDataParallel`, **DDP** for short, sends the same
# bytes in a few large messages while backward is still running. In this lesson you build DDP yourself, in three
# versions.
#
# **You will be able to**
# - *prove* that N ranks take the same step as one process with an N-times larger batch;
# - *build* data parallelism: after backward, in buckets, and overlapped with backward;
# - *read* what `DistributedDataParallel` sends, and when;
# - *recognize* silent mistakes with accumulation and with uneven data;
# - *write* a complete DDP program, choose its batch, and run it with `torchrun`.
#
# **Before this:** [02 collectives](02_collectives.ipynb). **Time:** about 45 minutes to read the core, 110 with the
# deeper sections, under a minute to run.

# %% [markdown]
# The first cell names every parameter.

# %% tags=["parameters"]
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

from course_utils import HangError, attempt, device, expect_error, launch, record
from course_utils.models import build_gpt, loss_of
from course_utils.predictions import predict, predictions
from course_utils.programs import ROOT, SCRIPTS, folded, torchrun
from lessons.ddp import data_parallel, figures

world_size = 4  # ranks, 2 or more
backend = "gloo"  # the CPU, as in the text; None takes the GPUs, if there is one for every rank
per_rank = 4  # windows of text that a rank takes in one step
bucket_bytes = 2**17  # gradients in one message: 128 KiB
patience = 5.0  # seconds that `launch` waits for the ranks in some cells

# %% [markdown]
# ## 1. Data parallelism in one picture
#
# Every rank holds the whole model. In each step it takes *its own part* of the batch and runs forward and backward on
# it alone. Before the optimizer's step the ranks exchange their gradients, so all optimizers take the same step, and
# the weights stay equal, although nobody sends them.
#
# `build_gpt()` makes a small GPT of two blocks, from seed 0 unless you name another. The data is *Alice in
# Wonderland*, in windows of 64 characters.
#
# | helper | what it does |
# |---|---|
# | `on_ranks(fn)` | runs `fn` on all ranks, as `launch` does |
# | `my_batch(step)`, `whole_batch(step)` | inputs and targets of a step: of this rank, of all ranks together |
# | `loss_of(model, x, y)` | the mean loss of these windows |

# %% jupyter={"source_hidden": true}
from course_utils import models

classes = (models.Attention, models.MLP, models.Block, models.GPT)
folded("The model's source", *classes, models.next_token_loss, models.loss_of)

# %%
on_ranks = partial(launch, world_size=world_size, backend=backend)
my_batch = partial(data_parallel.my_batch, per_rank=per_rank)
whole_batch = partial(data_parallel.whole_batch, per_rank=per_rank)

# %% [markdown]
# The next cell is one step, written out. It notes what every rank holds.


# %%
def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def one_step():
    model = build_gpt().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = model.position.weight
    x, y = my_batch(step=0)
    seen = {"weights": weight[0, :6].tolist()}
    seen["its part of the batch begins"] = data_parallel.as_text(x[0, :22])
    loss = loss_of(model, x, y)
    loss.backward()
    seen.update(loss=loss.item(), gradient=weight.grad[0, :6].tolist())
    average_gradients(model)
    seen["mean gradient"] = weight.grad[0, :6].tolist()
    optimizer.step()
    seen["weights after"] = weight[0, :6].tolist()
    return seen


# %%
rows = on_ranks(one_step)
columns = {name: [row[name] for row in rows] for name in rows[0]}
figures.replicas(columns, "measured: one step of data parallelism")

# %% jupyter={"source_hidden": true}
assert all(row["weights after"] == rows[0]["weights after"] for row in rows)

# %% [markdown]
# *The figure: one row a rank; a bar is a number. Grey is the same on all ranks: weights before and after, and the
# mean gradient. Colored belongs to one rank: text, loss and gradient.*
#
# An all-reduce sums the gradients, and a division by N, the number of ranks, makes the sum a mean. Nothing else is
# communicated.

# %% [markdown]
# ## 2. The mean of the gradients is the gradient of the large batch
#
# Why the mean? The loss of a batch is a mean over its windows, of losses ℓᵢ. If N·b windows are divided into N parts
# of b, the mean of the parts' means is the mean of the whole:
#
# $$\frac{1}{Nb}\sum_{i=1}^{Nb}\ell_i \;=\; \frac1N\sum_{r=1}^{N}\Big(\frac1b\sum_{i\,\in\,\text{part }r}\ell_i\Big)$$
#
# The gradient of a sum is the sum of the gradients, so the same holds for gradients. In two precisions:


# %% tags=["nbval-ignore-output"]
def gradient(model, x, y):
    """All gradients of the mean loss of these windows, in one vector."""
    loss_of(model, x, y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def parts_against_whole(dtype):
    alone = gradient(build_gpt(dtype=dtype).to(device()), *whole_batch(0))  # one process
    total = gradient(build_gpt(dtype=dtype).to(device()), *my_batch(0))
    dist.all_reduce(total)
    mean = total / dist.get_world_size()
    return (mean - alone).abs().max().item(), (total.norm() / alone.norm()).item()


for dtype, bound in data_parallel.BOUNDS.items():
    difference, ratio = on_ranks(parts_against_whole, dtype)[0]
    print(f"{dtype}: mean off by {difference:.0e}; the sum is {ratio:.2f} times the gradient")
    assert 0 < difference < bound and abs(ratio - world_size) < 1e-3

# %% [markdown]
# The two sides are equal to rounding, since their difference shrinks with the precision. Without the division the
# gradient is N times too large: with plain SGD an N-times larger learning rate. Adam divides each gradient by its own
# running size and so hides the mistake, until you clip at a fixed norm.
#
# > **Misconception.** "`all_reduce` averages", or "DDP sums the gradients." `all_reduce` sums, and DDP divides.
#
# The equation asks for equally large parts, and for windows whose losses do not depend on each other. (With batch
# normalization they do: section 11.)

# %% [markdown]
# ## 3. The same start, other data
#
# Suppose each rank builds its model from *its own* seed, and all average their gradients at every step. `spread` is
# the largest difference between any two ranks in any weight. **Predict**: what becomes of it in three steps?

# %%
fate = predict("the spread after three steps", ["smaller", "the same", "larger"])


# %%
def train_from_own_seed():
    model = build_gpt(seed=dist.get_rank()).to(device())
    before = data_parallel.spread(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *my_batch(step)).backward()
        average_gradients(model)
        optimizer.step()
    return before, data_parallel.spread(model)


before, after = on_ranks(train_from_own_seed)[0]
print(f"spread before {before:.3f}, after {after:.3f}")

# %% jupyter={"source_hidden": true}
assert before > 0.05 and abs(after - before) < 1e-5
fate.compare("the same")

# %% [markdown]
# **Compare.** It stays the same, because all ranks subtract the *same* mean gradient. And the mean is not the
# gradient of any of these models: each rank computed its part with different weights. A broadcast of the weights
# cures it: from then on the spread is exactly zero, because an all-reduce leaves the same bits on every rank.
#
# <details><summary>Is it enough to give every rank the same seed instead?</summary>
#
# For weights drawn from that seed, yes, as long as all ranks draw the same numbers in the same order. A broadcast
# also covers weights from a file that one rank read half-written, or a layer that one rank built under an `if`. It
# happens once, costs the bytes of the weights, and DDP does it.
# </details>
#
# <details><summary>The opposite mistake: the same weights, and the same data on every rank. What happens?</summary>
#
# All ranks compute the same gradient, and the mean is that gradient, so N ranks do the work of one. Loss, spread and
# speed look right. The sampler of section 10 prevents it.
# </details>

# %% [markdown]
# ## 4. From scratch, first version: after backward
#
# Now the broadcast that cures section 3 and the averaging become a class that you can wrap around any model. It
# broadcasts rank 0's weights at the start and is called like the model. Its method `finish()` averages the gradients:
# call it between `backward()` and the optimizer's step. **Buffers**, tensors that belong to a model but are not
# trained, are broadcast too. And where a layer was not used *on this rank*, zeros stand in for the gradient, because
# all ranks must make the same calls.


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
        for p in self.trained:
            if p.grad is None:  # not used on this rank
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# %% [markdown]
# `judge` trains each version for three steps, from another seed on each rank, and compares all weights with those of
# one process with the whole batches, in both precisions. Then it counts what a step sends, and how much of it starts
# before `backward()` returns.

# %%
judge = partial(data_parallel.judge, on_ranks, my_batch, whole_batch)

print(f"AfterBackward: {judge(AfterBackward)}")

# %% [markdown]
# It is right, and it sends 28 messages. (Here a **message** is one all-reduce.) 18 of them are biases and norms of
# only 64 to 256 numbers, but each costs at least the **latency**, the time of an empty message (α in lesson 02). So
# first we make them fewer, and then we stop waiting for them.

# %% [markdown]
# ## 5. Second version: flat buckets
#
# If many gradients are copied into one flat tensor, a **bucket**, a single all-reduce averages all of them. Ranks
# must agree on what lies where, so `in_buckets` (folded away) deals the parameters out once, at the start. A
# bucket takes parameters of one dtype until it has reached `cap` bytes, *from the last parameter to the first*, which
# section 6 explains.


# %% jupyter={"source_hidden": true}
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
# `start_next` fills the next bucket and starts its all-reduce. With `async_op=True` the call does not wait: it
# returns a request, and `request.wait()` waits. `finish` does so, and hands the parts back: every gradient becomes a
# view of its bucket.


# %%
class FlatBuckets(AfterBackward):
    """Second version: after backward, average whole buckets of gradients."""

    def __init__(self, module, cap=bucket_bytes):
        super().__init__(module)
        self.buckets = in_buckets(self.trained, cap)
        self.started, self.under_way = 0, []  # how many buckets; their flat tensors and requests

    def start_next(self):
        bucket = self.buckets[self.started]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([g.flatten() for g in gradients]) / dist.get_world_size()
        self.under_way.append((flat, dist.all_reduce(flat, async_op=True)))
        self.started += 1

    def finish(self):
        while self.started < len(self.buckets):
            self.start_next()
        for bucket, (flat, request) in zip(self.buckets, self.under_way, strict=True):
            request.wait()
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = mean.view_as(p)
        self.started, self.under_way = 0, []


# %%
print(f"FlatBuckets: {judge(FlatBuckets)}")

# %% [markdown]
# The same bytes in four messages (drawn in section 14).

# %% [markdown]
# ## 6. Third version: while backward goes on
#
# The backward pass walks from the loss to the input, so the gradients of the last layers are ready long before those
# of the first ones. A bucket with the last layers could travel while backward computes the rest:
#
# ```text
# FlatBuckets   | backward ........................ | 1 | 2 | 3 | 4 |
# Overlapped    | backward ........................ | 4 |
#                         | 1 |    | 2 |    | 3 |
# ```
#
# `register_post_accumulate_grad_hook` calls a function as soon as a parameter's gradient is complete. One weight of
# the GPT is used at both ends: as embedding, and as output layer. **Predict**: when does the hook call for this
# weight?

# %%
when = predict("the shared weight's gradient arrives", ["first", "twice, at both ends", "last"])


# %%
def order_of_gradients():
    model, arrived = build_gpt().to(device()), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: arrived.append(name))
    loss_of(model, *my_batch(0)).backward()
    return arrived


arrived = on_ranks(order_of_gradients)[0]
print(" -> ".join(dict.fromkeys(map(data_parallel.short, arrived))))

# %% jupyter={"source_hidden": true}
assert len(arrived) == len(set(arrived)) == 28 and arrived[-1] == "embedding.weight"
when.compare("last")

# %% [markdown]
# **Compare.** Last, and once. The output layer's part is ready first, but the gradient is complete only when the
# embedding has added its part, at the very end. All others arrive in the reverse order of the forward pass, which is
# why buckets are filled from the end.
#
# The third version counts how many gradients of each bucket are missing, and starts the bucket when none is missing.
# It keeps one rule: **buckets start in the same order on all ranks**, because collectives are matched by their order
# (lesson 02). `finish` is inherited: it starts what is left, and waits.


# %%
class Overlapped(FlatBuckets):
    """Third version: each bucket's all-reduce starts while backward is still running."""

    def __init__(self, module, cap=bucket_bytes):
        super().__init__(module, cap)
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients still to come
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p):  # the hook: this gradient is complete
        number = self.bucket_of[p]
        if self.missing[number] == 0:
            raise RuntimeError("a gradient came twice: call finish() between two backward passes")
        self.missing[number] -= 1
        while self.started < len(self.buckets) and self.missing[self.started] == 0:
            self.start_next()

    def finish(self):
        super().finish()
        self.missing = [len(bucket) for bucket in self.buckets]


# %%
def ddp_with_small_buckets(model):
    return DDP(model, bucket_cap_mb=bucket_bytes / 2**20)


print(f"Overlapped: {judge(Overlapped)}")

# %% [markdown]
# Now all four start before `backward()` returns, the fourth at its very end. Does it help? CPU ranks share a few cores,
# so in the next cell they sleep for 6 ms before each gradient is complete, as if a GPU computed it. The last panel is
# PyTorch's DDP.

# %% tags=["nbval-ignore-output"]
versions = [AfterBackward, FlatBuckets, Overlapped, ddp_with_small_buckets]
steps = data_parallel.typical_steps(on_ranks(data_parallel.time_versions, versions, my_batch))
figures.step_timelines(steps, "measured: backward (pale), all-reduces (dark); a stand-in for GPUs")

# %% [markdown]
# *The figure: four panels, two lanes a rank, with backward above. In the first panel 28 small messages follow backward,
# in the second four larger ones. In the third and fourth, the first ones end before backward does.*
#
# What counts is how long ranks still wait *after* the slowest backward: one slow rank holds up all. The last bucket is
# complete only at the end of backward, so backward cannot *hide* it.
#
# GPUs take their work from queues, called **streams**. NCCL has its own, so all-reduces can run beside backward,
# though not for free: they take a part of the GPU's processors and memory bandwidth (lesson 05). Here is a step of
# two jobs, with different models on different GPUs (*recorded*,
# [HTA](https://github.com/facebookresearch/HolisticTraceAnalysis)).

# %%
jobs = data_parallel.recorded_jobs()
for name, job in jobs.items():
    print(f"{name}: within {job.lasting:.0f} ms, running for {job.running:.0f}")
figures.gpu_timelines({name: job.lanes for name, job in jobs.items()}, "recorded: a training step")

# %% [markdown]
# *The figure: a lane for computing and one for all-reduces. In the upper panel, all-reduces lie between 182 and 305
# ms, when the GPU computes nothing. In the lower one, computing goes on beside four of the five bars of all-reduces.*
#
# For a third of its step the upper job does nothing but all-reduces, and half of this time not even that: most run for
# about 8 µs, and the CPU needs 200 µs to start the next. It pays for the *number* of messages. The lower job is a
# ResNet of 25.6 million parameters in five buckets of 8 to 32 MB. Four of them travel while backward computes, and the
# fifth starts when it is over, at 184 ms. (This GPU, too, waits for its CPU most of the time.)
#
# <details><summary>How can DDP do without <code>finish()</code>?</summary>
#
# The autograd engine takes callbacks that run when the whole backward pass is done. DDP queues one as soon as its
# last bucket is complete. This callback waits for the buckets and hands out the gradients. If a bucket never becomes
# complete, nothing is queued and nothing waits: section 13 shows what follows. In Python:
# `torch.autograd.Variable._execution_engine.queue_callback(self.finish)`, a private name.
# </details>

# %% [markdown]
# ## 7. `DistributedDataParallel`
#
# PyTorch's class wraps a model as ours does and needs no `finish()`. The next cell notes what it sends. **Predict**:
# how many all-reduces does its *first* step make?

# %%
count = predict("all-reduces in the first step of DDP")


# %%
def watch_ddp():
    seen = {}
    with record() as ledger:
        model = ddp_with_small_buckets(build_gpt().to(device()))
    seen["built"] = ledger
    for step in (1, 2, 3, 4):
        with record() as ledger:
            loss_of(model, *my_batch(step)).backward()
        seen[f"step {step}"] = ledger
    return seen


seen = on_ranks(watch_ddp)[0]
for what, ledger in seen.items():
    print(f"{what:7}", ", ".join(f"{entry.op} {entry.bytes:,}" for entry in ledger))
print("DDP:", judge(ddp_with_small_buckets))

# %% jupyter={"source_hidden": true}
buckets = in_buckets([*build_gpt().parameters()], bucket_bytes)
assert [e.bytes for e in seen["step 4"]] == [sum(p.nbytes for p in bucket) for bucket in buckets]
count.compare(seen["step 1"].count("all_reduce"))

# %% [markdown]
# **Compare.** One, with everything: DDP does not know yet in which order gradients arrive, so it waits for all of
# them, and watches. Step 2 makes buckets in the order that was seen; ranks might have seen different orders, so rank
# 0 broadcasts its own. From then on there are four all-reduces a step, of the same sizes as ours.
#
# | when | what DDP does | what it sends |
# |---|---|---|
# | constructor | compares the parameters' shapes, takes rank 0's weights, sets the hooks | all weights and buffers |
# | forward | decides whether the coming backward communicates | buffers, if there are any |
# | backward | divides gradients by N, fills buckets, starts full ones, waits at the end | all gradients |
# | `optimizer.step()` | nothing: each rank takes the same step by itself | nothing |
#
# > **What changes on real GPUs.** By default a bucket is full at 25 MiB, and the first one at 1 MiB, so that
# > communication starts early.

# %% [markdown]
# ## 8. Accumulation: many micro-batches, one exchange
#
# A batch that does not fit into memory is taken in **micro-batches**, whose backward passes add up their gradients
# before the optimizer takes one step. So the batch has three factors:
#
# *batch = micro-batch × accumulation × ranks*
#
# The batch is chosen for the training's sake, the micro-batch is the largest that fits, and accumulation is what is
# left: for 1,024 sequences a step on 64 GPUs with room for 2, it is 1,024 / (2 · 64) = 8. **Predict**: the job gets
# 256 GPUs, and the training is to stay as it was. How many micro-batches are there in a step?

# %%
accumulation = predict("micro-batches on 256 GPUs")

# %%
for gpus in (64, 256, 512, 1024):
    print(f"{gpus:5} GPUs: 1,024 sequences = 2 x {1024 / (2 * gpus):g} x {gpus}")

# %% jupyter={"source_hidden": true}
accumulation.compare(1024 / (2 * 256))

# %% [markdown]
# **Compare.** Two on each GPU. On 1,024 GPUs it is half a micro-batch: a GPU takes a single sequence, or the batch
# has to grow.
#
# Each loss is divided by the number of micro-batches, so that the sum is the mean over all. DDP communicates in
# *every* backward pass, but only the last one has to. The context `ddp.no_sync()` switches communication off.


# %%
micro = per_rank  # micro-batches in a step, of one window each


def every_time(ddp, parts):
    for x, y in parts:
        (loss_of(ddp, x, y) / micro).backward()


def no_sync(ddp, parts):
    with ddp.no_sync():
        every_time(ddp, parts[:-1])
    every_time(ddp, parts[-1:])


def no_sync_around_backward(ddp, parts):
    for x, y in parts[:-1]:
        loss = loss_of(ddp, x, y) / micro
        with ddp.no_sync():
            loss.backward()
    every_time(ddp, parts[-1:])


# %% [markdown]
# **Predict**: which of the three get the gradient of one process? And how many bytes does each send?

# %%
right = predict("the right gradient", ["only no_sync", "every_time and no_sync", "all three"])


# %%
def accumulate(way):
    """On a rank: how far a step's gradient is off one process, and what was sent for it."""
    ddp = ddp_with_small_buckets(build_gpt().to(device()))
    x, y = my_batch(0)
    for _ in range(3):  # until the buckets are there
        loss_of(ddp, x, y).backward()
    ddp.zero_grad()
    with record() as ledger:
        way(ddp, [(x[i : i + 1], y[i : i + 1]) for i in range(micro)])
    alone = gradient(build_gpt().to(device()), *whole_batch(0))
    mine = torch.cat([p.grad.flatten() for p in ddp.parameters()])
    return {"off": (mine - alone).abs().max().item(), "sent": ledger}


ways = every_time, no_sync, no_sync_around_backward
found = {way.__name__: on_ranks(accumulate, way)[0] for way in ways}
for name, row in found.items():
    print(f"{name:24}{row['sent'].bytes():9,} bytes, right: {row['off'] < 1e-6}")

# %% jupyter={"source_hidden": true}
assert max(row["off"] for row in found.values()) < 1e-6
often, once, trapped = [row["sent"].bytes() for row in found.values()]
assert often == trapped == micro * once
right.compare("all three")

# %% [markdown]
# **Compare.** All three are right, but two send four times as much. After the first exchange all ranks hold the same
# mean. The next one averages this mean plus what was added since: it leaves the mean as it is, because it is equal on
# all ranks. The third way *has* a `no_sync` and sends everything, because DDP decides in its *forward* whether the
# coming backward communicates: the context must contain both. Only counting shows it.

# %% [markdown]
# ## 9. Uneven data
#
# Suppose the last rank has two batches in an epoch and the other ranks have three. **Predict**: the ranks train for two
# epochs. What happens in the third step, when the last rank has no batch left in epoch 0? And when it has none left at
# all?

# %%
third = predict("the third step", ["an error", "a hang", "it goes on"])

# %%
end = predict("the end", ["an error", "a hang", "nothing special"])


# %%
def two_epochs():
    last = dist.get_rank() == dist.get_world_size() - 1
    epochs = [0, 0, 1, 1] if last else [0, 0, 0, 1, 1, 1]  # one for each batch
    net = DDP(torch.nn.Linear(1, 1, bias=False, device=device()))
    for step, epoch in enumerate(epochs, start=1):
        x = torch.tensor([[1.0 if epoch == 0 else 10.0]], device=device())
        net.zero_grad()
        net(x).sum().backward()  # the gradient is x
        if dist.get_rank() == 0:
            print(f"step {step}, epoch {epoch}: mean gradient {net.module.weight.grad.item()}")


with attempt() as outcome:
    on_ranks(two_epochs, timeout=patience)

# %% jupyter={"source_hidden": true}
assert isinstance(outcome.error, HangError)
third.compare("it goes on")
end.compare("a hang")

# %% [markdown]
# **Compare.** In the third step the last rank is in epoch 1 already, and its batch is averaged with those of the
# others' epoch 0, to (1 + 1 + 1 + 10)/4 = 3.25: no error, no hang, and equal weights. The hang comes when the last rank
# has no batch left at all, perhaps days later, unless there is another collective between epochs.
#
# So all ranks need equally many batches *in every epoch*, and a sampler ensures that. For data that nobody has
# counted, there is `join` (section 17).

# %% [markdown]
# ## 10. The complete program
#
# A **sampler** tells a data loader which samples to load. `DistributedSampler` deals a shuffled epoch out to the
# ranks, like cards. All ranks shuffle alike, from a seed and the epoch's number, so they need not communicate.

# %%
for rank in range(4):
    print(f"rank {rank}: {[*DistributedSampler(range(10), num_replicas=4, rank=rank)]}")

# %% [markdown]
# All ranks must make the same number of steps, so two of the ten samples come twice. The sampler does not count
# epochs: without `sampler.set_epoch(epoch)` every epoch has the same order, and no error says so (section 16).
#
# Here is a whole program in plain PyTorch. The program for one process does not have the lines that end in *new*, and
# *was* says what it has instead.
#
# ```python
# import os  # new
#
# import torch
# import torch.distributed as dist  # new
# from torch.nn.parallel import DistributedDataParallel as DDP  # new
# from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
#
# gpu = torch.cuda.is_available()
# device = f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu"  # was "cuda"
# if gpu:  # new
#     torch.cuda.set_device(device)  # new
# dist.init_process_group("nccl" if gpu else "gloo")  # new
#
# torch.manual_seed(0)
# inputs = torch.randn(1024, 16)
# data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
# sampler = DistributedSampler(data)  # new
# loader = DataLoader(data, 64 // dist.get_world_size(), sampler=sampler)  # was 64, shuffle=True
# model = torch.nn.Linear(16, 1).to(device)
# ddp = DDP(model, device_ids=[device] if gpu else None)  # new
# optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
#
# for epoch in range(3):
#     sampler.set_epoch(epoch)  # new
#     for x, y in loader:
#         loss = torch.nn.functional.mse_loss(ddp(x.to(device)), y.to(device))  # was model(…)
#         optimizer.zero_grad()
#         loss.backward()
#         optimizer.step()
#
# if dist.get_rank() == 0:  # new
#     print(f"last loss of rank 0: {loss.item():.4f}")
#     torch.save(model.state_dict(), "model.pt")
# del ddp  # new: it must not outlive the group
# dist.destroy_process_group()  # new
# ```
#
# Each process takes the GPU of its `LOCAL_RANK`, its number on this host. A loader's batch is its rank's share. Rank 0
# saves `model`, so that any program can load the file; in `ddp` every name begins with `module.`.
#
# Saved as `smallest.py`, it starts with `torchrun --standalone --nproc-per-node=gpu smallest.py`: a process for each
# GPU, with its rank in environment variables. The next cell starts one rank on the CPU, then two, and compares their
# checkpoints.

# %%
from contextlib import chdir
from tempfile import TemporaryDirectory

program, weights = ROOT / "lessons" / "ddp" / "smallest.py", {}
with TemporaryDirectory() as folder, chdir(folder):
    for ranks in (1, 2):
        print(torchrun(program, ranks=ranks, gpus=False), end="")
        weights[ranks] = torch.load("model.pt")
off = max((weights[1][name] - weights[2][name]).abs().max().item() for name in weights[1])
print("the weights are equal to rounding" if off < 1e-5 else f"the weights are off by {off}")

# %% [markdown]
# [scripts/train_ddp.py](../scripts/train_ddp.py) adds accumulation, 16 bits, clipping and resuming.
#
# **When data parallelism stops paying.** With more ranks each computes less in a step, but still sends 2(N−1)/N times
# the bytes of all gradients, so at some N backward is too short to hide the messages. In one *recorded* job, each GPU
# processed 40,150 tokens a second in a job of 8 GPUs, and 15,700 in one of 256 ([Ultra-Scale
# Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook)); [lesson 05](05_scaling_efficiency.ipynb) asks
# why. The batch sets a second limit (section 8), and memory a third: every rank holds the whole model, until lessons
# [06](06_zero.ipynb) and [07](07_fsdp.ipynb) divide it.

# %% [markdown] tags=["deeper"]
# ## 11. What breaks the equation · deeper
#
# The equation of section 2 has two conditions. The first is that all parts are **equally large**. In the next cell
# the last rank has a single window, as at the end of an epoch. A mean of means weighs that window as much as all
# windows of another rank together. The cure is to weigh each rank by its share of the batch.


# %% tags=["deeper"]
def unequal_parts(weighted):
    n = dist.get_world_size()
    x, y = whole_batch(0)
    size = (n - 1) * per_rank + 1  # one window for the last rank
    alone = gradient(build_gpt().to(device()), x[:size], y[:size])
    rows = slice(dist.get_rank() * per_rank, min(size, (dist.get_rank() + 1) * per_rank))
    mean = gradient(build_gpt().to(device()), x[rows], y[rows])
    if weighted:
        mean *= len(x[rows]) * n / size
    dist.all_reduce(mean)
    return ((mean / n - alone).norm() / alone.norm()).item()


plain, weighted = (on_ranks(unequal_parts, weighted)[0] for weighted in (False, True))
assert plain > 0.01 and weighted < 1e-5
print(f"mean of unequal parts: off by {plain:.0%}; weighted by their sizes: equal to rounding")

# %% [markdown] tags=["deeper"]
# Language models meet this at every step, because their loss is a mean over all tokens *but the padding*, and their
# number differs between ranks. The cure is the same: divide each rank's summed loss by the number of tokens of all
# ranks, which takes an all-reduce of one number, and multiply by N, by which DDP divides.
#
# The second condition is that **samples do not see each other**. Batch normalization subtracts the mean of *its
# batch*, so the loss of a sample depends on the others in its batch, and changes when the batch is cut into parts.


# %% tags=["deeper"]
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


# %% tags=["deeper"]
norms = torch.nn.Identity, torch.nn.BatchNorm1d
without, with_norm = (on_ranks(norm_against_whole, norm, norm)[0] for norm in norms)
assert without < 1e-5 and with_norm > 0.01
print(f"without batch norm: equal to rounding; with it: off by {with_norm:.0%}")

# %% [markdown] tags=["deeper"]
# No weighting helps here. With enough samples on a rank its statistics are good anyway, and plain DDP is what people
# use. With one or two samples they are noise, and it helps to share them: every rank sums x and x² over its part, and
# an all-reduce adds up these sums. Backward needs an all-reduce too, since through them each rank's loss depends on
# all ranks' x. The next cells build this, and compare the gradient with that of the whole batch.


# %% tags=["deeper"]
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


# %% tags=["deeper"]
def shared_statistics(norm):
    with record() as ledger:
        off = norm_against_whole(norm, torch.nn.BatchNorm1d)
    return off, ledger


off, ledger = on_ranks(shared_statistics, SharedBatchNorm)[0]
assert off < 1e-5
print("equal to rounding; sent:", ", ".join(f"{entry.op} {entry.bytes}" for entry in ledger))

# %% [markdown] tags=["deeper"]
# It takes 64 bytes in forward, 64 in backward, and then the gradients. PyTorch's class for this is `SyncBatchNorm`,
# which is made for GPUs only. The next cell tests it in the same way if there is a GPU for every rank; if not, it shows
# what the class says on a CPU.

# %% tags=["deeper"]
if torch.cuda.device_count() >= world_size:
    off, _ = launch(shared_statistics, torch.nn.SyncBatchNorm, world_size=world_size)[0]
    assert off < 1e-4
    print("SyncBatchNorm: equal to the whole batch, to rounding")
else:
    with expect_error():
        on_ranks(shared_statistics, torch.nn.SyncBatchNorm)

# %% [markdown] tags=["deeper"]
# > **What changes on real GPUs.** `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` before `DDP(model)` replaces
# > every batch norm of a model. It costs each layer one small collective in forward and one in backward, and nothing
# > hides them, because the layer waits. Group norm and layer norm need none.

# %% [markdown] tags=["deeper"]
# ## 12. Buffers · deeper
#
# The **buffers** of batch norm are a running mean, a running variance and a count of batches, and each rank computes
# them from its own part. In the next cell the data of rank r has the mean 10 (r + 1), and in each forward the running
# mean moves a tenth of the way to it. Alone, rank 0 would go to 1, 1.9 and 2.7, and rank 1 to 2, 3.8 and 5.4.
# **Predict**: what does rank 1 hold after three forwards under DDP?

# %% tags=["deeper"]
running = predict("the running mean on rank 1")


# %% tags=["deeper"]
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


found = on_ranks(batch_norm_under_ddp)
for rank, (means, _) in enumerate(found):
    print(f"rank {rank}: running mean after forward 1, 2, 3: {means}")
print("sent in forward 3:", ", ".join(f"{entry.op} {entry.bytes}" for entry in found[0][1]))

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert len({means[-1] for means, _ in found}) == world_size
running.compare(found[1][0][-1])

# %% [markdown] tags=["deeper"]
# **Compare.** 3.7, a tenth of the way from rank 0's 1.9 (after two forwards) to its own 20. Before a forward DDP
# broadcasts rank 0's buffers, unless the forward before it ran under `no_sync` or without gradients. So ranks differ
# by their last forward only, and what rank 0 holds at the end, which is what a checkpoint saves, has seen one Nth of
# the data.
#
# `forward_sync_buffers=False` turns the broadcast off (before PyTorch 2.13 `broadcast_buffers=False` did).
#
# DDP does not ask whether the model is in training mode. With buffers, an evaluation on rank 0 alone must therefore
# call `model.module`, or its first forward waits for the others.

# %% [markdown] tags=["deeper"]
# ## 13. Tied, frozen and unused parameters · deeper
#
# The GPT has a **tied** weight already, the one that two layers share. The next model adds a frozen block, a
# parameter that nobody uses, and one that only sequences with a rare first character use. In the whole batch there is
# one such sequence, and rank 0 has it.


# %% tags=["deeper"]
class Awkward(torch.nn.Module):
    """A GPT with a frozen block, an unused parameter, and one for sequences that start with 0."""

    def __init__(self, seed):
        super().__init__()
        self.gpt = build_gpt(seed=seed)
        self.gpt.blocks[0].requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.zeros(8))
        self.rare = torch.nn.Parameter(torch.zeros(128))

    def forward(self, tokens):
        logits = self.gpt(tokens)
        is_rare = tokens[:, 0] == 0
        return logits + is_rare[:, None, None] * self.rare if is_rare.any() else logits


# %% tags=["deeper"]
def whole_with_rare(step):
    """The whole batch, whose first window begins with 0, and all others with 1."""
    x, y = whole_batch(step)
    x[:, 0] = 1
    x[0, 0] = 0
    return x, y


def mine_with_rare(step):
    x, y = whole_with_rare(step)
    rows = slice(dist.get_rank() * per_rank, (dist.get_rank() + 1) * per_rank)
    return x[rows], y[rows]


judge_awkward = partial(data_parallel.judge, on_ranks, mine_with_rare, whole_with_rare)
for wrap in (AfterBackward, FlatBuckets, Overlapped):
    print(f"{wrap.__name__:13} {judge_awkward(wrap, make=Awkward)}")

# %% [markdown] tags=["deeper"]
# Our versions are right, since a rank that does not use a parameter contributes zeros to the mean. But `Overlapped`
# can start only one of its two messages in backward, because the bucket of the unused parameter is never complete
# before `finish()`. **Predict**: the next cell trains two steps under plain DDP. Which oddity does it not accept?

# %% tags=["deeper"]
oddities = ["the tied weight", "the frozen block", "the unused parameter", "none"]
refused = predict("plain DDP refuses", oddities)


# %% tags=["deeper"]
def train_awkward(**options):
    model = DDP(Awkward(seed=0).to(device()), **options)
    for step in range(2):
        loss_of(model, *mine_with_rare(step)).backward()
    rare, unused = model.module.rare.grad, model.module.unused.grad
    return rare.norm().item(), "none" if unused is None else "zeros"


# %% tags=["deeper", "nbval-ignore-output"]
with attempt() as outcome:
    on_ranks(train_awkward, timeout=10)

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert outcome.error is not None
refused.compare("the unused parameter")

# %% [markdown] tags=["deeper"]
# **Compare.** It accepts the tied parameter and the frozen ones, for which it does not wait. It fails when a
# parameter is unused, and says so in the *next* step, when it finds that a bucket of the step before still waits for
# a gradient.
#
# With `TORCH_DISTRIBUTED_DEBUG=INFO` in the environment the error names the parameters. It also names an option for
# models that skip parameters on purpose:

# %% tags=["deeper"]
rare, unused = zip(*on_ranks(train_awkward, find_unused_parameters=True), strict=True)
assert len({*rare}) == 1 and rare[0] > 0 and {*unused} == {"none"}
print("the rare parameter: the same gradient on all ranks; the unused one: none on any")
patient_ddp = partial(DDP, find_unused_parameters=True)
print("DDP:", judge_awkward(patient_ddp, make=Awkward))

# %% [markdown] tags=["deeper"]
# With `find_unused_parameters=True` DDP walks the graph before each backward and marks what cannot get a gradient as
# ready. After backward the ranks exchange one flag per parameter (4 bytes). If some ranks used the parameter, the
# others count as zeros. If no rank used it, DDP leaves `grad` alone, which matters to AdamW: its weight decay shrinks
# a parameter whose gradient is zero. Use the option only for models that need it: a layer that is unused *by mistake*
# should be found, not tolerated.

# %% [markdown] tags=["deeper"]
# ## 14. Inside DDP: buckets, hooks, options · deeper
#
# DDP's log says which parameters went where. (`_get_ddp_logging_data` is a private name.) The picture shows its
# buckets in the first step and afterwards, and ours.


# %% tags=["deeper"]
def buckets_of_ddp():
    model = ddp_with_small_buckets(build_gpt().to(device()))
    for step in range(3):
        loss_of(model, *my_batch(step)).backward()
    return model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]


gpt = build_gpt()
ours = data_parallel.named_buckets(gpt, in_buckets([*gpt.parameters()], bucket_bytes))
first = " ".join(map(str, range(28)))  # all in one, as they are defined
rebuilt = data_parallel.read_buckets(gpt, on_ranks(buckets_of_ddp)[0])
rows = {
    "DDP, step 1": data_parallel.read_buckets(gpt, first),
    "DDP, then": rebuilt,
    "FlatBuckets": ours,
}
assert [sum(n for _, n in b) for b in rebuilt] == [sum(n for _, n in b) for b in ours]
figures.bucket_picture(rows, "measured on DDP, and computed: which gradients share a message")

# %% [markdown] tags=["deeper"]
# *The figure: three bars of the same length. In the first step one bucket from the embedding on the left to the last
# layers on the right; afterwards four, in the opposite order, with the same borders as our own.*
#
# Where a model calls its layers in another order than it defines them, our buckets would wait for each other, and
# DDP's would not.
#
# A **communication hook** replaces the all-reduce of a bucket. This one notes what it is given and then averages as
# usual; lesson 05 puts compression here.


# %% tags=["deeper"]
def watch_hooks():
    model, lines = ddp_with_small_buckets(build_gpt().to(device())), []

    def hook(state, bucket):
        size, count = bucket.buffer().nbytes, len(bucket.parameters())
        last = ", the last" if bucket.is_last() else ""
        state.append(f"bucket {bucket.index()}: {count:2} gradients, {size:,} bytes{last}")
        mean = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda f: f.value()[0])

    model.register_comm_hook(lines, hook)
    for step in range(2):
        lines.append(f"step {step + 1}")
        loss_of(model, *my_batch(step)).backward()
    return lines


print(*on_ranks(watch_hooks)[0], sep="\n")

# %% [markdown] tags=["deeper"]
# Three options change how DDP keeps or sends gradients. `gradient_as_bucket_view=True` makes gradients views of the
# buckets, as our `finish()` does, and so saves as much memory as all gradients take. `static_graph=True` promises
# that every step uses the same parameters in the same way, so DDP finds out only once which ones.
# `find_unused_parameters=True` is for models that do not (section 13).


# %% tags=["deeper"]
def watch_option(option):
    model = DDP(build_gpt().to(device()), bucket_cap_mb=bucket_bytes / 2**20, **{option: True})
    for step in range(3):
        with record() as ledger:
            loss_of(model, *my_batch(step)).backward()
    pieces = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    return len(pieces), [entry.bytes for entry in ledger]


for option in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters"):
    pieces, sizes = on_ranks(watch_option, option)[0]
    print(f"{option:24} gradients in {pieces:2} pieces of memory, step 3 sends {sizes}")

# %% [markdown] tags=["deeper"]
# With views the 28 gradients lie in four pieces of memory: the buckets are the gradients. A static graph makes its
# buckets a step later, here in step 3. With `find_unused_parameters` each step has one more message, the flags of 112
# bytes, and the buckets are never rebuilt, because what is used may change.

# %% [markdown] tags=["deeper"]
# ## 15. Clipping, mixed precision and `torch.compile` · deeper
#
# Three parts of most programs must work with DDP. **Clipping** scales the gradients down if their norm is above a
# limit, so it needs the norm of the *averaged* gradients. After `backward()` every rank has them, and all ranks
# compute the same norm without any communication. With accumulation, clip after the last micro-batch.
#
# **Mixed precision** runs forward and loss in 16 bits, in the context `torch.autocast`, as on one GPU. In float32,
# DDP sends 450 kB a step. **Predict**: how much is it under bf16?

# %% tags=["deeper"]
in_bf16 = predict("sent under bf16", unit="kB")


# %% tags=["deeper"]
def clipping_and_autocast():
    model = ddp_with_small_buckets(build_gpt().to(device()))
    for step in range(3):
        with record() as ledger:
            with torch.autocast(device().type, torch.bfloat16):
                loss = loss_of(model, *my_batch(step))
            loss.backward()
        if step < 2:
            model.zero_grad()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    return norm.item(), ledger.bytes(), {str(p.grad.dtype) for p in model.parameters()}


found = on_ranks(clipping_and_autocast)
norms, sizes, dtypes = zip(*found, strict=True)
print(f"norms {[round(norm, 4) for norm in norms]}; {sizes[0]:,} bytes, gradients in {dtypes[0]}")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert len({*norms}) == 1
in_bf16.compare(sizes[0] / 1e3)

# %% [markdown] tags=["deeper"]
# **Compare.** As much as before: autocast leaves the parameters in float32, so gradients and messages are float32
# too. To send less, use a communication hook (lesson 05).
#
# float16 needs a `GradScaler`, which multiplies the loss so that small gradients do not vanish, and skips a step
# whose gradients are not finite. Call `scaler.unscale_(optimizer)` before clipping. **Predict**: the batch of the
# last rank overflows. Which ranks skip the step?

# %% tags=["deeper"]
skipping = predict("the step is skipped by", ["the last rank", "the others", "all ranks", "none"])


# %% tags=["deeper"]
def overflow_on_the_last_rank():
    last = dist.get_rank() == dist.get_world_size() - 1
    model = DDP(torch.nn.Linear(2, 1).to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device().type, init_scale=1024.0)
    before = model.module.weight.detach().clone()
    x = torch.full((1, 2), float("inf") if last else 1.0, device=device())
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(before, model.module.weight), scaler.get_scale()


found = on_ranks(overflow_on_the_last_rank)
print("weights as before, next scale:", *found)

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert found == [(True, 512.0)] * world_size
skipping.compare("all ranks")

# %% [markdown] tags=["deeper"]
# **Compare.** All of them: an infinity on one rank is an infinity in the sum. So all ranks skip the same step and
# halve the same scale, without any extra message.
#
# The scale belongs to the checkpoint, like the state of the scheduler. In float16 it also matters *when* DDP divides.
# A sum of large gradients overflows, where their mean would not: the largest float16 is 65,504.


# %% tags=["deeper"]
def mean_of(gradient):
    x = torch.full((1, 1), gradient, dtype=torch.float16, device=device())
    net = DDP(torch.nn.Linear(1, 1, bias=False, dtype=torch.float16, device=device()))
    net(x).sum().backward()  # the gradient is x
    return net.module.weight.grad.item()


print("the mean of 40,000 and 40,000:", on_ranks(mean_of, 40_000.0, world_size=2)[0])
print("the mean of 6e-8 and 6e-8:", on_ranks(mean_of, 6e-8, world_size=2)[0])

# %% [markdown] tags=["deeper"]
# So DDP divides *before* the sum, and the price is at the other end: halves of the smallest number round to zero.
#
# **`torch.compile`** turns forward and backward into graphs. A backward pass compiled in one piece would hand out all
# its gradients at its end, and nothing could overlap. So with DDP the graph is cut where a bucket ends. The next cell
# counts the graphs of a wider GPT. It needs no compiler, because it keeps the graphs as they are.

# %% tags=["deeper"]
from course_utils.models import TransformerConfig


def graphs():
    wide = TransformerConfig(layers=4, hidden=256)  # 12.7 MB of weights
    plain = data_parallel.compiled_graphs(build_gpt(wide).to(device()), my_batch(0))
    ddp = DDP(build_gpt(wide).to(device()), bucket_cap_mb=4)
    return plain, data_parallel.compiled_graphs(ddp, my_batch(0))


plain, under_ddp = on_ranks(graphs, world_size=2)[0]
print(f"torch.compile makes {plain} graph of the model, and {under_ddp} under DDP")
assert plain == 1 and under_ddp > 1

# %% [markdown] tags=["deeper"]
# To get these cuts, compile the wrapped model: `torch.compile(DDP(model))`, as the program does with `--compile`.
# (The option behind it is `torch._dynamo.config.optimize_ddp`; see PyTorch's [design
# notes](https://docs.pytorch.org/docs/stable/notes/ddp.html).) *Activation checkpointing* needs
# `use_reentrant=False`. With `True`, a layer that is used twice makes DDP fail (*marked as ready twice*) or, worse,
# leaves different gradients on the ranks without an error (PyTorch 2.13).

# %% [markdown] tags=["deeper"]
# ## 16. The sampler, and seeds · deeper
#
# `DistributedSampler` in 15 lines: all ranks shuffle in the same way, the last round is **padded** with samples from
# the beginning, and the ranks take turns. Ours has one parameter more, `start`, the number of samples of the epoch
# that are already done, by all ranks together.


# %% tags=["deeper"]
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


# %% tags=["deeper"]
cases = 0
for length in (1, 7, 10, 64, 101):
    for ranks in range(1, 9):
        for rank in range(ranks):
            ours_now = Sampler(length, ranks, rank, seed=5)
            theirs = DistributedSampler(range(length), ranks, rank, seed=5)
            for epoch in (0, 1, 17):
                ours_now.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert [*ours_now] == [*theirs]
                cases += 1
print(f"equal to DistributedSampler in {cases} cases")

# %% [markdown] tags=["deeper"]
# Padding does no harm in training, but what does it do in an evaluation? Here a model is right on sample 0 of 21, and
# on no other. **Predict**: two ranks sum up their right answers and their samples. Which accuracy do they report?

# %% tags=["deeper"]
accuracy = predict("accuracy of two ranks", unit="%")


# %% tags=["deeper"]
def evaluate(length, ranks, repeats):
    right = count = 0
    for rank in range(ranks):
        mine = [*DistributedSampler(range(length), ranks, rank, shuffle=False)]
        if not repeats:
            mine = mine[: len(range(rank, length, ranks))]  # this rank's cards, before padding
        right += mine.count(0)
        count += len(mine)
    return right, count


for repeats in (True, False):
    right, count = evaluate(21, 2, repeats)
    print(f"{right} of {count}: {right / count:.1%}")

# %% tags=["deeper"] jupyter={"source_hidden": true}
accuracy.compare(200 / 22)
assert evaluate(21, 2, repeats=True) == (2, 22) and evaluate(21, 2, repeats=False) == (1, 21)

# %% [markdown] tags=["deeper"]
# **Compare.** 2 of 22, because sample 0 is also the padding. Without the repeats it is 1 of 21, as on one process.
# (`drop_last=True` leaves samples out instead.)
#
# A job that stops within an epoch can go on with fewer ranks: `start` skips what is done.

# %% tags=["deeper"]
length, done = 16 * world_size, 5 * world_size


def deal(ranks, done=0):
    return [[*Sampler(length, ranks, rank, start=done)] for rank in range(ranks)]


fewer = max(ranks for ranks in range(1, world_size) if world_size % ranks == 0)
left = [rank[5:] for rank in deal(world_size)]
assert deal(world_size, done) == left
assert sorted(sum(deal(fewer, done), [])) == sorted(sum(left, []))
print(f"on {world_size} ranks the same order, on {fewer} the same samples")

# %% [markdown] tags=["deeper"]
# Because samples are dealt like cards, b·N consecutive cards are one step of N ranks with b windows each. The new
# number of ranks has to divide what is left of the epoch, or they get unequal numbers of batches (section 9).
#
# **Seeds** serve two purposes. What decides who does what must be equal on all ranks: the sampler's seed and epoch,
# the weights, every decision around a collective. Noise must differ: dropout, augmentation, the workers of data
# loaders. One `torch.manual_seed(0)` on all ranks gets the second kind wrong:


# %% tags=["deeper"]
def dropout_mask(seed_differs):
    torch.manual_seed(7 + dist.get_rank() if seed_differs else 7)
    return torch.nn.functional.dropout(torch.ones(12)).bool().int().tolist()


for seed_differs in (False, True):
    masks = on_ranks(dropout_mask, seed_differs)
    print("seed + rank:" if seed_differs else "one seed:   ", *masks[:2], sep="\n  ")
    assert (len({tuple(mask) for mask in masks}) == 1) != seed_differs

# %% [markdown] tags=["deeper"]
# With one seed all ranks drop the same units, so averaging removes less of dropout's noise than it could. Seed with
# `seed + rank` *after* the model is built or broadcast, and give the sampler the plain `seed`.

# %% [markdown] tags=["deeper"]
# ## 17. `join`: ranks that have finished · deeper
#
# For data that nobody has counted there is `join()`: a rank that has finished its batches answers the others'
# all-reduces with zeros until all have finished. Here every gradient is 1, and the last rank has two batches more.
# **Predict**: what is the mean gradient in the steps that only the last rank computes, with four ranks?

# %% tags=["deeper"]
alone_at_last = predict("the mean gradient of the last steps")


# %% tags=["deeper"]
def uneven():
    rank, n = dist.get_rank(), dist.get_world_size()
    net = DDP(torch.nn.Linear(1, 1, bias=False, device=device()))
    seen = []
    with net.join():
        for _ in range(3 + 2 * (rank == n - 1)):
            net.zero_grad()
            net(torch.ones(1, 1, device=device())).sum().backward()
            seen.append(round(net.module.weight.grad.item(), 4))
    return seen


joined = on_ranks(uneven)
for rank, gradients_seen in enumerate(joined):
    print(f"rank {rank}: {gradients_seen}")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert joined[-1][-1] == round(1 / world_size, 4)
alone_at_last.compare(joined[-1][-1])

# %% [markdown] tags=["deeper"]
# **Compare.** One over N: only one summand is not zero, and the sum is still divided by N.
#
# So late batches count less, as if the missing windows had a gradient of zero;
# `join(divide_by_initial_world_size=False)` divides by the ranks that are left. Each step costs two more all-reduces
# of one number, and at the end the weights of the last rank are broadcast.

# %% [markdown] tags=["deeper"]
# ## 18. Checkpoint and resume · deeper
#
# Rank 0 writes, since all ranks hold the same weights. It writes under another name and renames the file at the end,
# so that a crash leaves the old one whole. The others wait at a barrier, so that nobody reads too early. These are
# `save` and `load` of [scripts/train_ddp.py](../scripts/train_ddp.py):

# %% tags=["deeper"]
from course_utils.programs import excerpt

program = SCRIPTS / "train_ddp.py"
print(excerpt(program, "def save(", 'return states["step"]'))

# %% [markdown] tags=["deeper"]
# The next cell makes 20 steps on two ranks, and then ten steps on two ranks, which one rank resumes.

# %% tags=["deeper"]
from contextlib import redirect_stdout
from io import StringIO
from tempfile import TemporaryDirectory

from course_utils.programs import run_program


def train_on_a_rank(*arguments):
    with redirect_stdout(StringIO()) as printed:
        run_program(program, "--backend=gloo", *arguments)
    return printed.getvalue()


with TemporaryDirectory() as folder:
    file = f"--checkpoint={folder}/run.pt"
    unbroken, _ = launch(train_on_a_rank, "--steps=20", world_size=2, init=False)
    launch(train_on_a_rank, "--steps=10", file, world_size=2, init=False)
    (resumed,) = launch(train_on_a_rank, "--steps=20", file, world_size=1, init=False)
print(unbroken, resumed, sep="\n", end="")
for one, two in zip(resumed.splitlines(), unbroken.splitlines()[2:], strict=True):
    assert abs(float(one.split()[-1]) - float(two.split()[-1])) < 2e-3

# %% [markdown] tags=["deeper"]
# The losses of steps 15 and 20 are equal to rounding: the batch stays 16, and the samples are the same. In later
# epochs, too: the saved number of samples tells epoch and place, because the program drops none: a batch may begin in
# one epoch and end in the next. (The number of ranks has to divide the 2,016 windows of an epoch.) Without a saved
# scheduler, the second half would warm up once more. A model with dropout also needs each rank's generator state
# (`torch.get_rng_state()`, on GPUs `torch.cuda.get_rng_state()`), gathered to the rank that writes or in a file of
# its own.
#
# And on the *same* number of ranks, to the last bit? The next cell goes on with copies of model and optimizer under a
# new DDP.


# %% tags=["deeper"]
import copy


def weights_after(steps, restart_at, look):
    """On a rank: all weights after training; at one step, go on as after a restart."""
    model = build_gpt().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp = DDP(model, bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=look)
    for step in range(steps):
        if step == restart_at:
            model, state = copy.deepcopy(model), optimizer.state_dict()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer.load_state_dict(state)
            ddp = DDP(model, bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=look)
        optimizer.zero_grad()
        loss_of(ddp, *my_batch(step)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# %% tags=["deeper", "nbval-ignore-output"]
for look in (False, True):
    whole, restarted = [on_ranks(weights_after, 8, at, look)[0] for at in (None, 4)]
    most = (whole - restarted).abs().max().item()
    print(f"find_unused_parameters={look}: weights differ by at most {most:.1g}")
    assert most < 1e-4 and (most == 0 or not look)

# %% [markdown] tags=["deeper"]
# Every start of plain DDP begins with a step of one bucket (section 7). In another bucket a gradient lies at another
# place, where a ring adds in another order, so with more than two ranks the last bits can differ. With
# `find_unused_parameters=True`, and in our `Overlapped`, buckets are the same in every step, and so are the bits.
#
# > **What changes on real GPUs.** Some kernels add in an order that changes from run to run.
# > `torch.use_deterministic_algorithms` forbids them, at a price in speed.

# %% [markdown] tags=["deeper"]
# ## 19. The learning rate · deeper
#
# N ranks that each keep their batch take N times fewer steps for the same epoch. At the same learning rate, the
# weights move about N times less far. One process with an N-times batch takes the step of N ranks (section 2), so
# here each of four processes tries one setting with plain SGD: a batch of 4, and one of 32, eight times larger, with
# three learning rates. **Predict**: with which of them is the large batch closest to the small one in the end?

# %% tags=["deeper"]
rate = predict("the learning rate for an 8 times larger batch", ["× 1", "× √8", "× 8"])


# %% tags=["deeper"]
from course_utils.data import Windows

windows = Windows("train")


def alone(settings):
    """On a rank: SGD with this rank's batch and learning rate, over 512 windows."""
    batch, lr = settings[dist.get_rank()]
    model, losses = build_gpt(seed=0).to(device()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).tolist()
    for first in range(0, 512, batch):
        loss = loss_of(model, *windows.batch(order[first : first + batch], device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% tags=["deeper"]
k, batch, lr = 8, 4, 0.02
settings = {
    "batch 4": (batch, lr),
    "batch 32, same rate": (k * batch, lr),
    "batch 32, × √8": (k * batch, k**0.5 * lr),
    "batch 32, × 8": (k * batch, k * lr),
}
found = launch(alone, [*settings.values()], world_size=4, backend=backend)
curves = {}
for (name, (size, _)), losses in zip(settings.items(), found, strict=True):
    curves[name] = ([size * (i + 1) for i in range(len(losses))], losses)
figures.loss_curves(curves, "measured: four ways to read 512 windows", "windows", ["batch 4"])

# %% tags=["deeper"] jupyter={"source_hidden": true}
late = {name: sum(y[-len(y) // 4 :]) / len(y[-len(y) // 4 :]) for name, (_, y) in curves.items()}
behind = [late[name] - late["batch 4"] for name in [*settings][1:]]  # in the last quarter
print("behind batch 4, with the same rate, × √8, × 8:", *(f"{loss:+.2f}" for loss in behind))
assert abs(behind[2]) < behind[1] < behind[0]
rate.compare("× 8")

# %% [markdown] tags=["deeper"]
# **Compare.** With × 8, once the first steps are over. In those it lags behind, since eight small steps lead further
# than one long one.
#
# *The figure: the thick curve of the small batch falls first. The large batch with eight times its rate starts
# behind, meets it after some steps and stays with it; with √8 times it lags, and with the same rate it lags most.*
#
# | rule | learning rate for a k times larger batch | for | source |
# |---|---|---|---|
# | linear | × k | SGD | Goyal et al. 2017, with a warm-up over the first epochs |
# | square root | × √k | Adam, RMSprop | [Malladi et al. 2022](https://arxiv.org/abs/2205.10287) |
#
# The idea of the linear rule: k small steps from nearly the same place are about one step that is k times as long. It
# fails early, when the loss falls fast (hence the warm-up), and for large k.
#
# > **Misconception.** "With DDP I must multiply the learning rate by the number of GPUs." Only if the *global* batch
# > grew with them, and then as a rule of thumb. DDP's gradient is a mean: at the same global batch,
# > nothing changes. Goyal et al. scaled from 256 to 8,192 images with it, and saw accuracy fall beyond that.

# %% [markdown] tags=["deeper"]
# ## 20. Other ways to start ranks · deeper
#
# | | starts | ranks meet by | use it for |
# |---|---|---|---|
# | `torchrun` | a process a rank, on every node | environment variables | real jobs, restarts (lesson 16) |
# | `torch.multiprocessing.spawn` | a process a rank, here | what you pass | programs that start their own ranks |
# | `launch`, in a notebook | a process a rank, here | the same variables | learning, looking inside |
#
# `spawn` starts new Python processes, which import the program and look the function up by its name. So it needs the
# guard in the last two lines, and it cannot start a function that was defined in a cell; `launch` sends a function by
# value. Here the ranks meet in a file.

# %% tags=["deeper"]
import subprocess
import sys
from tempfile import TemporaryDirectory

spawned = """
import sys
import torch
import torch.distributed as dist

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
with TemporaryDirectory() as folder:
    with open(f"{folder}/spawned.py", "w") as out:
        out.write(spawned)
    command = [sys.executable, f"{folder}/spawned.py", f"file://{folder}/meeting"]
    print(subprocess.run(command, capture_output=True, text=True).stdout, end="")

# %% [markdown] tags=["deeper"]
# What the ranks talk through is the **backend**, whatever started them. With gloo a collective returns when it is
# done. NCCL takes tensors on GPUs only, and a collective returns when it is queued on a stream. gloo takes GPU
# tensors too, but it is for CPU training, tests and this lesson.
#
# Two habits: `torchrun` sets `OMP_NUM_THREADS=1` where it is not set; set it to cores by ranks if the CPU has much to
# do. And download on one rank of a host first, then `dist.barrier()`, or all ranks write the same files.

# %% [markdown] tags=["deeper"]
# ## 21. Four more mistakes · deeper
#
# Unused layers and uneven batches are the usual ones (sections 13 and 9). Here are four more, two with an error and
# two without.
#
# **Another model on one rank**, because a flag, a config file or a version differs. This is why DDP compares the
# number of parameters (section 7).


# %% tags=["deeper", "nbval-ignore-output"]
def other_model():
    layers = 2 + (dist.get_rank() == dist.get_world_size() - 1)
    DDP(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers))))


with expect_error():
    launch(other_model, world_size=2, backend="gloo", timeout=10)

# %% [markdown] tags=["deeper"]
# **Names in a checkpoint**: saved from the wrapper, loaded into the model.


# %% tags=["deeper"]
def wrong_names():
    saved = DDP(torch.nn.Linear(2, 2)).state_dict()
    torch.nn.Linear(2, 2).load_state_dict(saved)


with expect_error():
    launch(wrong_names, world_size=2, backend="gloo")

# %% [markdown] tags=["deeper"]
# Save `ddp.module.state_dict()`. For a file saved the other way,
# `torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, "module.")` removes the prefix.
#
# Two mistakes raise no error. **Past the wrapper**: the model is called through `ddp.module`, perhaps for a method
# that the wrapper does not have. **Unfrozen too late**: a layer is frozen when DDP is built and released later, for
# fine-tuning. The cell trains with each of the two. **Predict**: which weights differ between the ranks afterwards?

# %% tags=["deeper"]
past = predict("past the wrapper", ["all weights differ", "some differ", "none differ"])

# %% tags=["deeper"]
late_thaw = predict("unfrozen too late", ["all weights differ", "some differ", "none differ"])


# %% tags=["deeper"]
def weights_that_differ(mistake):
    replica = build_gpt(seed=0).to(device())
    replica.blocks[0].requires_grad_(mistake != "unfrozen too late")
    model = DDP(replica)
    replica.requires_grad_(True)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for step in range(3):
        x, y = my_batch(step)
        loss = replica.loss(x, y) if mistake == "past the wrapper" else loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    parts = {name: torch.nn.ParameterList([p]) for name, p in replica.named_parameters()}
    return [name for name, part in parts.items() if data_parallel.spread(part)]


differ = {}
for mistake in ("no mistake", "past the wrapper", "unfrozen too late"):
    differ[mistake] = on_ranks(weights_that_differ, mistake)[0]
    print(f"{mistake}: {len(differ[mistake])} of 28 weights differ")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert [len(names) for names in differ.values()] == [0, 28, 12]
assert all(name.startswith("blocks.0.") for name in differ["unfrozen too late"])
past.compare("all weights differ")
late_thaw.compare("some differ")

# %% [markdown] tags=["deeper"]
# **Compare.** Past the wrapper, all: DDP's forward never runs, so its hooks are not armed, and every rank trains
# alone. Unfrozen too late, only the released ones, because the other gradients are averaged: build DDP *after* the
# last change of `requires_grad`.
#
# DDP says nothing. The `spread` of section 3 finds both; put it into your training loop, every thousand steps.

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
for name, ranks in steps.items():
    backward = max(rank["backward"][1] for rank in ranks)  # the slowest rank's
    waiting = max(rank["end"] for rank in ranks) - backward
    print(f"{name:24} gradients are there {1e3 * waiting:3.0f} ms after the last backward")

# %% [markdown]
# DDP is a hook on every gradient, a bucket that leaves when its last gradient has come, and the same order on all
# ranks. What comes out, the mean, is the gradient of the N-times larger batch. How your predictions came out:

# %%
predictions()

# %% [markdown]
# **Now you can answer**
#
# 1. Ranks start with different weights and average their gradients. What becomes of the weights?
# 2. Why are buckets filled from the last parameter on, and which one is never hidden?
# 3. Why does DDP's first step make one all-reduce?
# 4. `no_sync` is there, and yet all bytes are sent. Where is the mistake?
# 5. One rank has one batch fewer in every epoch. When does it show?
#
# <details><summary>Answers</summary>
#
# 1. They stay as far apart as they were (section 3).
# 2. Backward finishes the last parameters first. The last bucket is complete when backward is over (section 6).
# 3. It does not know yet in which order gradients arrive (section 7).
# 4. The forward pass is outside of it (section 8).
# 5. After the last epoch, as a hang. Until then, epochs are mixed (section 9).
# </details>
#
# **What to take to work:** the program of section 10, [scripts/train_ddp.py](../scripts/train_ddp.py), and for
# sharded models [scripts/train.py](../scripts/train.py).
#
# **Exercises:** [exercises/04_ddp](../exercises/04_ddp_exercises.ipynb). **Next:** [05 scaling
# efficiency](05_scaling_efficiency.ipynb): why eight GPUs are not eight times as fast, and what helps.
#
# **Worth reading**
# - S. Li et al., [PyTorch Distributed](https://arxiv.org/abs/2006.15704), VLDB 2020: the design, by its
#   authors.
# - P. Goyal et al., [Training ImageNet in 1 hour](https://arxiv.org/abs/1706.02677), 2017: the linear rule and the
#   warm-up.
# - PyTorch,
#   [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html):
#   every option.
