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
# # How do I split the layers, and where does the bubble go?
#
# Training steps of a model with a trillion parameters were measured on 3,072 GPUs. Its 128 layers were cut into 64
# **stages** of two layers each, and every word of every batch went through all 64 in turn, forward and back. Yet each
# GPU did 163 TFLOP/s, 52 % of what it could (*recorded*, Narayanan et al. 2021, table 1). If 64 stages take turns, why
# were 63 of 64 GPUs not idle? This lesson builds the answer.
#
# **You will be able to**
# - *cut* a model into stages, *balance* them, and *train* it on real ranks with messages from stage to stage;
# - *derive* the bubble and the activations of GPipe, 1F1B, interleaved and zero-bubble schedules;
# - *write* one engine that runs naive, GPipe, 1F1B and interleaved schedules without deadlock, equal to one process;
# - *compare* it with `torch.distributed.pipelining`;
# - *decide* which traffic may cross nodes, and how many micro-batches a pipeline needs.
#
# **Before this:** [02 collectives](02_collectives.ipynb), [04 ddp](04_ddp.ipynb), [06 zero](06_zero.ipynb). **Time:**
# about 110 minutes to read, under a minute to run.

# %% [markdown]
# ## Ten predictions
#
# Write down an answer to each, however unsure. They come up again on the way, and the answers are at the end.
#
# 1. A model lies on four GPUs, a quarter of the layers on each. One batch goes forward and back. What share of the
#    time does a GPU compute?
# 2. The batch goes through the four in eight parts, one behind the other. And now?
# 3. 1F1B is the successor of GPipe. What is smaller with it: the idle time, the memory, or both?
# 4. Four ranks, eight micro-batches. Of how many does rank 1 hold the activations, at most, in GPipe and in 1F1B?
# 5. Every `send` waits until its message is taken. Which schedule hangs: GPipe, 1F1B, or both?
# 6. How many messages does a step of four stages and eight micro-batches send, and what sets the size of one?
# 7. Each rank gets two short stages instead of one long one. What happens to the bubble, and what to the messages?
# 8. Backward computes gradients of inputs and gradients of weights. Which of the two does no other rank wait for?
# 9. The last stage has the head too, a product with the whole vocabulary. How would you cut nine pieces in four?
# 10. Data, tensor and pipeline parallelism: which of them has to stay inside a node, and which may cross nodes?

# %% [markdown]
# The first cell imports everything and names every parameter.

# %% tags=["parameters"]
import itertools
import math
import time
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from course_utils import HangError, device, expect_error, launch, plots, record
from course_utils.data import Windows
from course_utils.hardware import LINKS
from course_utils.memory import track
from course_utils.models import PUBLISHED, TransformerConfig, build_gpt, next_token_loss
from course_utils.pipeline import SCHEDULES, Costs, Op, ideal_seconds, partition, simulate
from course_utils.widgets import schedule_explorer

world_size = 4  # ranks, 2 or more
per_microbatch = 2  # windows of text in a micro-batch
patience = 2.0  # seconds until a hang is reported, in the cell that hangs on purpose

# %% [markdown]
# ## 1. A model in stages
#
# **Pipeline parallelism** cuts the model between its layers. A **stage** is a run of neighbouring layers, and lives on
# one rank. The rank holds the parameters, gradients and optimizer states of its stage and of no other: p ranks hold
# one copy of the model together.
#
# Here is the GPT of the other lessons, wider, and with seven blocks, which no number of ranks from two to six divides.
# Its **pieces** are the embeddings, the blocks, and the last norm with the head. Embedding and head have weights of
# their own until section 8.

# %%
gpt = TransformerConfig(layers=7, hidden=128, tied=False)
backend = launch(dist.get_backend, world_size=world_size)[0]  # the same for any number of ranks
windows = Windows("train", gpt.context)
naive, gpipe, one_f_one_b, interleaved, zero_bubble_h1, zero_bubble_h2 = SCHEDULES.values()


class Start(nn.Module):
    """Embedding and position: tokens (b, T) -> (b, T, C)."""

    def __init__(self, model):
        super().__init__()
        self.embedding, self.position = model.embedding, model.position

    def forward(self, tokens):
        return self.embedding(tokens) + self.position.weight[: tokens.shape[1]]


def pieces(model):
    """What a pipeline can be cut between, in order."""
    return [Start(model), *model.blocks, nn.Sequential(model.norm, model.head)]


# %% [markdown]
# Where to cut? All stages should take equally long, because the slowest sets the pace. The FLOPs of each piece are a
# first estimate (`flops_per_token`, lesson 05). `partition` finds the cut whose dearest stage is as cheap as it can be.


# %%
def piece_costs(config):
    """Forward FLOPs of each piece for one token; to look up an embedding takes none."""
    head = 2 * config.vocabulary * config.hidden
    block = (config.flops_per_token(backward=False) - head) / config.layers
    return [0, *[block] * config.layers, head]


def sums(costs, sizes):
    """Costs of stages, from the costs of pieces and the number of pieces of each stage."""
    ends = [*itertools.accumulate(sizes)]
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def stage_of(config, sizes, number):
    """The module of one stage, with weights that are the same in every run."""
    start = sum(sizes[:number])
    return nn.Sequential(*pieces(build_gpt(config))[start : start + sizes[number]]).to(device())


# %%
costs = piece_costs(gpt)
sizes = partition(costs, world_size)
for rank, work in enumerate(sums(costs, sizes)):
    count = sum(p.numel() for p in stage_of(gpt, sizes, rank).parameters())
    print(f"rank {rank}: {sizes[rank]} pieces, {work / 1e6:.2f} MFLOP a token,", end="")
    print(f"{count:10,} parameters")
assert sum(sizes) == len(costs) == gpt.layers + 2

# %% [markdown]
# Seven blocks cannot be equal shares. The head is short here, because the vocabulary has only 128 characters. Section 7
# has one that is not.
#
# (Every rank builds the whole model and keeps its stage. That is fine for a small one. Where the model does not fit,
# each rank builds its stage alone, as lesson 07 does on the meta device.)
#
# ## 2. Naive: one rank works at a time
#
# The first idea takes a few lines. Rank 0 computes its stage and sends the output on, **activations** of shape
# (b, T, C). The next rank does the same, and the last one computes the loss. Then the gradients of the same activations
# travel back. Autograd works within a rank. Across the cut two things have to be done by hand:
#
# - what a rank receives is a leaf that requires a gradient: `requires_grad_()`;
# - backward starts from the gradient that comes from the next rank: `out.backward(gradient)`.


# %%
def now():
    """Seconds on the clock that all processes of a machine share, when the GPU has finished."""
    if device().type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.monotonic()


def batch(step, size):
    """Windows of text and their targets, both (size, T), the same on every rank."""
    return windows.batch(range(step * size, (step + 1) * size), device())


# %%
def naive_step(stage, x, y):
    """One batch forward and back; this rank's loss, if it is the last, and its two operations."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank > 0:
        x = torch.empty(*x.shape, gpt.hidden, device=x.device)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    start, gradient = now(), None
    out = stage(x) if rank < last else next_token_loss(stage(x), y)
    forward = Op("F", rank, 0), start, now()
    if rank < last:
        dist.send(out.detach(), rank + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, rank + 1)
    start = now()
    out.backward(gradient)
    backward = Op("B", rank, 0), start, now()
    if rank > 0:
        dist.send(x.grad, rank - 1)
    return out.item() if rank == last else None, [forward, backward]


# %% [markdown]
# Is it the same as one process? The reference is the model in one piece. To compare, gradients of all stages are
# joined into one vector, in the order of the pieces.


# %%
def flat(tensors):
    """All numbers of some tensors in one vector on the CPU."""
    return torch.cat([t.detach().flatten() for t in tensors]).cpu()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_process(config, size, steps=3):
    """Losses, gradients of the first step, and parameters at the end, of the whole model."""
    model = nn.Sequential(*pieces(build_gpt(config))).to(device())
    optimizer, losses = sgd(model.parameters()), []
    for step in range(steps):
        x, y = batch(step, size)
        loss = next_token_loss(model(x), y)
        loss.backward()
        if step == 0:
            gradients = flat(p.grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, flat(model.parameters())


# %%
def naive_run(size):
    """Loss, gradients and operations of the last of three equal steps; two are to warm up."""
    stage = stage_of(gpt, sizes, dist.get_rank())
    x, y = batch(0, size)
    for _ in range(3):
        stage.zero_grad()
        dist.barrier()
        loss, spans = naive_step(stage, x, y)
    return loss, flat(p.grad for p in stage.parameters()), spans


microbatches = 2 * world_size
size = microbatches * per_microbatch  # windows in a step
reference = launch(one_process, gpt, size, world_size=1, backend=backend)[0]
found = launch(naive_run, size, world_size=world_size, backend=backend)
assert math.isclose(found[-1][0], reference[0][0], rel_tol=1e-5)
assert torch.allclose(torch.cat([gradient for _, gradient, _ in found]), reference[1], atol=1e-5)
print(
    f"loss {found[-1][0]:.4f} and {reference[1].numel():,} gradients equal to those of one process"
)

# %% [markdown]
# **Predict** (question 1). For what share of the step does each rank compute? The spans of every rank say so. Here two
# cores are no excuse: only one rank has anything to do at any moment.


# %%
def from_start(by_rank):
    """Operations with their times counted from the first one of any rank."""
    first = min(start for spans in by_rank for _, start, _ in spans)
    return [[(op, start - first, end - first) for op, start, end in spans] for spans in by_rank]


modelled = simulate(naive(world_size, 1))
assert math.isclose(modelled.bubble, (world_size - 1) / world_size)
measured = from_start([spans for *_, spans in found])
plots.real_pipeline(modelled, measured, f"one batch through {world_size} stages")

# %% [markdown]
# *The figure: above, the model, a staircase of forwards down to the last rank and one of backwards up again. Below, the
# same staircase as it was measured. In each, one box has the time to itself, and the rest of every row is empty.*

# %% tags=["nbval-ignore-output"]
whole = max(end for spans in measured for *_, end in spans)
for rank, spans in enumerate(measured):
    busy = sum(end - start for _, start, end in spans)
    print(f"rank {rank}: computes {1e3 * busy:6.1f} ms of {1e3 * whole:.1f},", end="")
    print(f" idle {1 - busy / whole:.0%}")

# %% [markdown]
# About 1/p of the time, and the rest is the **bubble**: time in which a rank has nothing to do, because what it needs
# is not there yet. p GPUs, the speed of one. What is gained is memory: the model may be p times as large. For a model
# that does not fit anywhere this is a beginning.
#
# > **Misconception.** "Layers on four GPUs: four times as fast." `device_map="auto"` and friends place layers exactly
# > like this. It is a way to *fit* a model, and every GPU but one is idle at any moment.

# %% [markdown]
# ## 3. Micro-batches, and GPipe
#
# The cure is the assembly line. Cut the batch into m **micro-batches**. While rank 1 has the first, rank 0 works on the
# second. A micro-batch's gradients add up with those of the others, as in gradient accumulation (lesson 04), so the
# step is the same.
#
# In which order does a rank work? That is its **schedule**, and it is data: for each rank a list of operations.
# `1F3` is the forward of stage 1 for micro-batch 3. **GPipe** (Huang et al. 2019) does all forwards, then all
# backwards.

# %%
for name, make in (("naive", naive), ("GPipe", gpipe)):
    print(name)
    for rank, order in enumerate(make(3, 4).order):
        print(f"  rank {rank}:", *order)

# %% [markdown]
# `simulate` runs such lists in simulated time. A rank starts its next operation as soon as it is free and has what it
# needs. F takes one unit here and B two: backward multiplies twice where forward multiplies once, for the gradient of
# the input and for that of the weights. (The naive schedule is shown with micro-batches too, to compare.)
#
# **Predict** (question 2). Four ranks, eight micro-batches: what share of GPipe's time is idle?

# %%
p, m = 4, 8  # in all pictures of simulated schedules
plots.schedule_picture(
    [simulate(make(p, m)) for make in (naive, gpipe)],
    "modelled: F = 1, B = 2, no time for messages",
)

# %% [markdown]
# *The figure: two schedules on one axis of time, a row a rank, a box an operation with the number of its micro-batch
# where it fits. The naive one is a long row of staircases, and takes 96. GPipe takes 33: a wedge of idle time where
# the forwards fill the pipeline, one where the backwards drain it, and in the middle the turn from one to the other.*
#
# Count it. Let a rank's forward and backward of one micro-batch take F + B. Its own work, the **ideal time**, takes
# m(F + B). Before rank 3 can start, three other forwards pass, and after its last backward three others follow: (p −
# 1)(F + B) in which every rank waits.
#
# $$\frac{\text{bubble}}{\text{ideal time}} = \frac{p-1}{m} \qquad\qquad
# \frac{\text{bubble}}{\text{all time}} = \frac{p-1}{m+p-1}$$
#
# The two are one fact, divided by different things. (In code: `period` is the longest time that a rank takes from its
# first operation to its last, `bubble` the idle share of it.) Megatron's paper has the first, GPipe's the second.
# Check which is meant before you compare.

# %%
for ranks, count, times in itertools.product(range(1, 9), (1, 2, 5, 8, 32), ((1, 1, 1), (2, 1, 3))):
    for make in (gpipe, one_f_one_b):
        run = simulate(make(ranks, count), Costs(*times))
        ideal = ideal_seconds(run.schedule, Costs(*times))
        assert math.isclose((run.period - ideal) / ideal, (ranks - 1) / count, abs_tol=1e-12)
        assert math.isclose(run.bubble, (ranks - 1) / (count + ranks - 1), abs_tol=1e-12)
for count in (1, 4, 8, 32):
    ideal, all_time = (p - 1) / count, (p - 1) / (count + p - 1)
    print(f"4 ranks, {count:2} micro-batches: {ideal:4.0%} of the ideal time,", end="")
    print(f" {all_time:3.0%} of all time")

# %% [markdown]
# The formula holds for any F and B, as long as all stages are equal and messages take no time. How many micro-batches
# does it take? GPipe's authors call the bubble negligible from m ≥ 4p on (Huang et al. 2019, section 2.3). That is up
# to a fifth of all time. (They recompute activations, which can begin before the gradient arrives, so their bubble is
# smaller than the formula's.)

# %%
counts = [1, 2, 4, 8, 16, 32, 64, 128]
curves = {
    f"{ranks} ranks": [simulate(gpipe(ranks, count)).bubble for count in counts]
    for ranks in (2, 4, 8, 16)
}
assert all((r - 1) / (4 * r + r - 1) < 0.2 for r in range(1, 100))
plots.bubble_curves(counts, curves, "modelled: bubble of GPipe, share of all time")

# %% [markdown]
# *The figure: idle share over the number of micro-batches, a curve each for 2, 4, 8 and 16 ranks. Each starts at
# (p − 1)/p, the naive case, and falls. The same m/(p − 1) gives the same bubble: from 2 to 4 ranks three times the
# micro-batches, later a little more than twice.*
#
# ### Why not a thousand micro-batches?
#
# The batch is given: it decides how well the model learns. So more micro-batches are *smaller* ones, and smaller
# kernels. The next cell takes a stage of two blocks and a batch of 32 windows, and does its F and B in 1 to 32 parts,
# alone on a rank. The bubble of four ranks comes on top by formula.
#
# **Predict.** Which m gives the shortest step?


# %%
def split_work(counts, size=32):
    """Seconds for F and B of two blocks, whole batch, by number of micro-batches: best of four."""
    stage, times = nn.Sequential(*build_gpt(gpt).blocks[:2]).to(device()), {}
    x = torch.randn(size, gpt.context, gpt.hidden, device=device())
    for count in counts * 4:
        start = now()
        for part in x.tensor_split(count):
            stage(part).backward(torch.ones_like(part))
        times[count] = min(times.get(count, math.inf), now() - start)
    return times


parts = launch(split_work, counts[:6], world_size=1, backend=backend)[0]

# %% tags=["nbval-ignore-output"]
print("micro-batches   windows in each   measured: a rank   modelled: four ranks")
for count, seconds in parts.items():
    step = seconds * (count + p - 1) / count
    print(f"{count:13}{32 // count:18}{1e3 * seconds:16.1f} ms{1e3 * step:20.1f} ms")

# %% [markdown]
# The work of a rank grows when its pieces become small, and the bubble shrinks. At first the bubble's part is the
# larger one. Beyond some m the step becomes hardly shorter, or longer again; where that is differs from run to run.
#
# > **What changes on real GPUs.** Small kernels cost more. A micro-batch of a few hundred tokens leaves most of the
# > chip empty, and each kernel has its launch to pay. So the smallest micro-batch is often one sequence of some
# > thousand tokens.
#
# The other price is memory. Look at GPipe's picture again: when the first backward starts, rank 0 has done *all*
# forwards, and autograd keeps the activations of each.

# %% [markdown]
# ## 4. 1F1B: the same bubble, less memory
#
# Why wait with the backwards? As soon as the last rank has done the forward of micro-batch 0 it can do its backward.
# **1F1B** does a few forwards, just enough for the last rank to get work, and then one forward and one backward in
# turn. The end of the step waits for all, so the step is still the same. (PipeDream, 2019, did not wait and computed
# with old weights. PipeDream-Flush waits: Narayanan et al. 2020,
# [arXiv 2006.09503](https://arxiv.org/abs/2006.09503).)
#
# **Predict** (questions 3 and 4). Bubble and activations of both, for 4 ranks and 8 micro-batches.

# %%
pair = [simulate(make(p, m)) for make in (gpipe, one_f_one_b)]
plots.schedule_picture(pair, "modelled: F = 1, B = 2")

# %% [markdown]
# *The figure: GPipe and 1F1B end at the same time, 33, and both idle 27 %. In 1F1B the backwards start early, and
# forwards and backwards alternate in the middle. The head of each panel says how many activations each rank holds: 8
# everywhere in GPipe; 4, 3, 2 and 1 in 1F1B.*

# %%
for ranks, count in itertools.product(range(1, 9), (1, 2, 5, 8, 32)):
    all_forward, in_turn = (simulate(make(ranks, count)) for make in (gpipe, one_f_one_b))
    assert math.isclose(all_forward.period, in_turn.period)
    assert all_forward.peak == [count] * ranks
    assert in_turn.peak == [min(count, ranks - rank) for rank in range(ranks)]
plots.activation_steps(pair, "modelled: activations of a rank over the step")

# %% [markdown]
# *The figure: micro-batches whose activations are held, over time. In GPipe every rank climbs to 8. In 1F1B rank 0
# climbs to 4, rank 1 to 3, and the last never has more than one.*
#
# > **Misconception.** "1F1B has a smaller bubble than GPipe." It has the same, to the last unit, for every p and m in
# > the cell above. It moves the backwards forward in time, and the idle time with them. What it saves is memory: at
# > most p micro-batches are **in flight** on a rank (forward begun, backward not ended), p − rank to be exact, and
# > not m. *That* allows more micro-batches, and more micro-batches make the bubble smaller.
#
# With messages that take time 1F1B is even the slower of the two. A rank that may hold only p − rank micro-batches has
# nothing else to do while a message travels. Section 11 has the numbers.
#
# Mind what is held constant. For a given batch GPipe holds the activations of the whole batch, however it is cut. 1F1B
# holds p/m of them. (GPipe as published keeps only the inputs of its stages and computes the rest again in backward,
# which is checkpointing, lesson 05.)
#
# And memory is uneven: rank 0 holds most. 1F1B has no use for the room that the others have left; ZB-H1 in
# section 6 has.

# %% [markdown]
# ## 5. On real ranks
#
# ### Messages that wait for each other
#
# Section 2 used `send` and `recv` that wait. Here is an engine in its simplest form, with such sends: it receives,
# computes, and sends, in the order of the schedule. To see where messages meet, nothing is computed.
#
# **Predict** (question 5). It runs GPipe, and then 1F1B. Which of them hangs, if one does, and where do the ranks
# stand?


# %%
def messages_only(schedule):
    """The messages of a schedule with one stage a rank, each send waiting until it is taken."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for op in schedule.order[rank]:
        before, behind = (rank - 1, rank + 1) if op.kind == "F" else (rank + 1, rank - 1)
        message = torch.zeros(per_microbatch, gpt.context, gpt.hidden, device=device())
        if 0 <= before <= last:
            dist.recv(message, before)
        if 0 <= behind <= last:
            dist.send(message, behind)
    return len(schedule.order[rank])


quick = {"world_size": world_size, "timeout": patience, "backend": "gloo"}
done = launch(messages_only, gpipe(world_size, microbatches), **quick)
print("GPipe: every rank has done", done[0], "operations")
with expect_error(HangError):
    launch(messages_only, one_f_one_b(world_size, microbatches), **quick)

# %% [markdown]
# GPipe works. In its first half all messages go down the pipeline, in its second all go up, and there is always a last
# rank that has nobody to wait for. In 1F1B both directions are busy at once. The last rank wants to send a gradient up,
# its neighbour wants to send the next activation down, and neither receives before it has sent. The schedule is right,
# and `simulate` says that it ends. The sends are wrong.
#
# The cure: no rank waits for a *send*. `isend` hands the message over and returns, and the rank waits only for what it
# needs to compute. Why is that enough? Suppose that some ranks are stuck. Each waits for a result of a neighbour, and
# the neighbour has not come to that operation, because it waits too. Then `simulate` would be stuck at the same
# operations: there, too, a rank waits for results and for nothing else. It refuses such schedules. So a schedule that
# it accepts comes to its end, for any number of stages and micro-batches, wherever a `recv` of one message does not
# hold up another.
#
# That condition remains. Between two ranks activations and gradients travel in both directions. gloo keeps the two
# apart. In NCCL all messages of a process group form **one queue** on each rank, in the order of the calls (one for
# each pair, if the group was made without naming its device). If rank 0 queues "send activation, receive gradient"
# while rank 1 queues "send gradient, receive activation", the heads of the two queues are two sends: the deadlock is
# back, one level lower. So activations and gradients get a **group** each, which is a communicator, with its own queue.
# On two ranks section 6 sends activations both ways between the pair, so each direction gets a group of its own as
# well. (gloo also looks at a message's `tag`. NCCL does not: a queue must be emptied in the order in which it was
# filled, as all schedules of this lesson do. And several communicators at once need care there, so the library takes
# another way, section 9.)


# %%
class Mailbox:
    """Sends that nobody waits for, receives that wait; the Op that needs a message names it."""

    def __init__(self, placement):
        self.placement = placement  # the rank of every stage
        self.groups = {key: dist.new_group() for key in itertools.product("FB", (True, False))}

    def tag(self, op):
        return op.microbatch * len(self.placement) + op.stage

    def send(self, message, op):
        """Begin to send to the rank that does `op`; what this returns says when it was taken."""
        to = self.placement[op.stage]
        group = self.groups[op.kind, dist.get_rank() < to]
        return dist.isend(message, to, group=group, tag=self.tag(op))

    def receive(self, shape, dtype, op):
        """What `op` needs: from the stage before if it is F, from the one behind if it is B."""
        source = self.placement[op.stage - 1 if op.kind == "F" else op.stage + 1]
        message = torch.empty(shape, dtype=dtype, device=device())
        group = self.groups[op.kind, source < dist.get_rank()]
        dist.recv(message, source, group=group, tag=self.tag(op))
        return message


# %% [markdown]
# ### The engine
#
# A `Worker` knows what F and B do on its rank. F receives, computes, sends on, and *keeps* input and output for
# backward. B takes them out again. Both are those of the naive step, with two additions:
#
# - the last stage's output is the loss, times the micro-batch's share of the batch, so that the gradients add up to
#   those of the mean;
# - a message must not change before it was taken. gloo tells that, and lets go of the memory, only when asked by
#   `wait`. B asks when the answer to the message is there, so it never waits in vain.
#
# The worker notes when it computed, and how many micro-batches it has kept at most. With a `pace`, an operation takes
# so long at least, of which more below. It comes in three cells: `class Worker(Worker)` is the worker so far, with one
# method more.


# %%
class Worker:
    """The stages of this rank, {number: module}; `placement` has the rank of every stage."""

    def __init__(self, modules, placement, hidden, pace=None):
        self.modules, self.hidden = modules, hidden
        self.last, self.pace = len(placement) - 1, pace or {}
        self.parameters = [p for module in modules.values() for p in module.parameters()]
        self.mail = Mailbox(placement)

    def begin(self):
        self.kept, self.gradients, self.spans = {}, [], []
        self.most, self.loss = 0, 0.0

    @contextmanager
    def timed(self, op):
        """Note when the block ran; let it take as long as the pace says."""
        start = now()
        yield
        seconds = self.pace.get((op.kind, op.stage), self.pace.get(op.kind, 0))
        time.sleep(max(0, start + seconds - now()))
        self.spans.append((op, start, now()))


# %%
class Worker(Worker):
    def F(self, op, x, y, share):
        """Forward of a micro-batch: x and y are its tokens and targets (b, T)."""
        stage, m, sent = op.stage, op.microbatch, None
        if stage > 0:
            x = self.mail.receive((*x.shape, self.hidden), self.parameters[0].dtype, op)
            x.requires_grad_()
        with self.timed(op):
            out = self.modules[stage](x)
            out = next_token_loss(out, y) * share if stage == self.last else out
        if stage < self.last:
            sent = self.mail.send(out.detach(), Op("F", stage + 1, m))
        else:
            self.loss += out.item()
        self.kept[stage, m] = x, out, sent
        self.most = max(self.most, len(self.kept))


# %%
class Worker(Worker):
    def B(self, op):
        """Backward of a micro-batch."""
        stage, m, gradient = op.stage, op.microbatch, None
        x, out, sent = self.kept.pop((stage, m))
        if stage < self.last:
            gradient = self.mail.receive(out.shape, out.dtype, op)
            sent.wait()  # the answer is here, so the message was taken
        with self.timed(op):
            out.backward(gradient)
        if stage > 0:
            self.gradients.append((self.mail.send(x.grad, Op("B", stage - 1, m)), x.grad))


# %% [markdown]
# The engine itself is the loop over the schedule. It has no idea which schedule it runs. It knows F and B; a schedule
# with I and W needs a backward in two halves (section 6), which the library runs in section 9.


# %%
def run(worker, schedule, x, y):
    """One step over the whole batch x, y (B, T); its loss on the rank of the last stage, else 0."""
    worker.begin()
    xs, ys = (tensor.tensor_split(schedule.microbatches) for tensor in (x, y))
    for op in schedule.order[dist.get_rank()]:
        if op.kind == "F":
            i = op.microbatch
            worker.F(op, xs[i], ys[i], len(xs[i]) / len(x))
        else:
            worker.B(op)
    for sent, _ in worker.gradients:
        sent.wait()
    return worker.loss


def my_stages(config, sizes, placement):
    """The modules of this rank, by stage."""
    mine = [stage for stage, rank in enumerate(placement) if rank == dist.get_rank()]
    return {stage: stage_of(config, sizes, stage) for stage in mine}


# %% [markdown]
# ### Equal to one process
#
# Three training steps with each of three schedules. Losses, the gradients of the first step, and the parameters after
# the third must be those of one process, which has never heard of stages.


# %%
def train(schedules, config, sizes, size, steps=3, pace=None):
    """Train with each schedule from the same weights; what this rank saw, by schedule."""
    seen = {}
    for schedule in schedules:
        modules = my_stages(config, sizes[schedule.stages], schedule.placement)
        worker = Worker(modules, schedule.placement, config.hidden, pace)
        seen[schedule.name] = train_one(worker, schedule, size, steps)
    return seen


# %%
def train_one(worker, schedule, size, steps):
    """Some steps of one schedule; spans, ledger and what was kept are those of the last step."""
    stages, losses = worker.modules.items(), []
    optimizer = sgd(worker.parameters)
    for step in range(steps):
        x, y = batch(step, size)
        dist.barrier()
        with record() as ledger:
            losses.append(run(worker, schedule, x, y))
        if step == 0:
            gradients = {s: flat(p.grad for p in module.parameters()) for s, module in stages}
        optimizer.step()
        optimizer.zero_grad()
    ends = {s: flat(module.parameters()) for s, module in stages}
    seen = {"losses": losses, "gradients": gradients, "parameters": ends, "ledger": ledger}
    return seen | {"spans": worker.spans, "kept": worker.most}


# %%
def joined(by_rank, name, what):
    """One vector of all stages, from what each rank has of its own."""
    stages = {s: vector for seen in by_rank for s, vector in seen[name][what].items()}
    return torch.cat([stages[s] for s in sorted(stages)])


def compare(by_rank, name, reference):
    """Assert that a schedule's run was that of one process, and say how close."""
    losses = [
        sum(by_step) for by_step in zip(*(seen[name]["losses"] for seen in by_rank), strict=True)
    ]
    for loss, expected in zip(losses, reference[0], strict=True):
        assert abs(loss - expected) < 1e-5
    assert torch.allclose(joined(by_rank, name, "gradients"), reference[1], atol=1e-5)
    assert torch.allclose(joined(by_rank, name, "parameters"), reference[2], atol=1e-5)
    print(f"{name:12} losses", *(f"{loss:.4f}" for loss in losses), " equal to one process")


cuts = {world_size: sizes}  # by number of stages
plain = [make(world_size, microbatches) for make in (naive, gpipe, one_f_one_b)]
by_rank = launch(train, plain, gpt, cuts, size, world_size=world_size, backend=backend)
for schedule in plain:
    compare(by_rank, schedule.name, reference)

# %% [markdown]
# Equal to 1e-5 in single precision, where the order of the sums differs. (The course's tests run this engine for every
# number of stages from 1 to 4 and of micro-batches from 1 to 7, also where the batch cannot be divided equally, in
# double precision to 1e-12.)
#
# ### Messages and bytes
#
# **Predict** (question 6). One micro-batch has b sequences of s tokens, the model is h wide. At every boundary between
# two stages b·s·h numbers go down, and as many come back. How many layers a stage has, and how many parameters, plays
# no part. The ledger has counted.

# %%
message = per_microbatch * gpt.context * gpt.hidden * 4  # b * s * h numbers of 4 bytes
print(
    f"b s h = {per_microbatch} * {gpt.context} * {gpt.hidden} numbers = {message:,} bytes a message"
)
for schedule in plain:
    ledgers = [seen[schedule.name]["ledger"] for seen in by_rank]
    for rank, ledger in enumerate(ledgers):
        neighbours = (rank > 0) + (rank < world_size - 1)
        assert ledger.messages == microbatches * neighbours
        assert ledger.sent == ledger.received == microbatches * neighbours * message
        assert ledger.count() == ledger.messages + ledger.count("recv")  # nothing else
    total, sent = sum(ledger.messages for ledger in ledgers), sum(ledger.sent for ledger in ledgers)
    assert total == 2 * microbatches * (world_size - 1)
    print(f"{schedule.name:6} {total} messages, {sent:,} bytes in a step: 2m(p-1) bsh numbers of 4")

# %% [markdown]
# The same for all three: a schedule changes *when* messages go, and nothing else. With m micro-batches of b sequences
# m·b is the batch, so a finer cut makes more messages of the same bytes in all.
#
# ### Activations, counted and weighed
#
# Each worker counted what it kept. `track` (lesson 06) also weighs it: the bytes of activations that are held after
# each F, in a step of each schedule. The naive schedule never keeps more than one micro-batch, so its bytes are the
# unit.


# %%
class Weighed(Worker):
    def F(self, *arguments):
        super().F(*arguments)
        self.levels.append(self.tracker.mark("after F").activations)


def weigh(schedules, sizes, size):
    """Most bytes of activations that this rank holds after an F, by schedule."""
    most = {}
    for schedule in schedules:
        modules = my_stages(gpt, sizes, schedule.placement)
        worker = Weighed(modules, schedule.placement, gpt.hidden)
        worker.levels = []
        x, y = batch(0, size)
        with track(nn.ModuleList(modules.values())) as worker.tracker:
            run(worker, schedule, x, y)
        most[schedule.name] = max(worker.levels)
    return most


weighed = launch(weigh, plain, sizes, size, world_size=world_size, backend=backend)

# %%
print("            kept: naive  GPipe  1F1B     of naive's bytes: GPipe    1F1B")
for rank, (seen, most) in enumerate(zip(by_rank, weighed, strict=True)):
    kept = [seen[schedule.name]["kept"] for schedule in plain]
    assert kept == [1, microbatches, world_size - rank]
    ratios = [most[name] / most["naive"] for name in ("GPipe", "1F1B")]
    for ratio, expected in zip(ratios, kept[1:], strict=True):
        assert abs(ratio / expected - 1) < 0.02
    print(f"rank {rank} {kept[0]:15}{kept[1]:7}{kept[2]:6}{ratios[0]:28.1f}{ratios[1]:8.1f}")

# %% [markdown]
# GPipe m, 1F1B p − rank, as simulated: in micro-batches, and in bytes. (A little less in bytes, because the tokens of
# the batch are there once, not m times. And the sent gradients are not counted: the engine keeps them to the end of the
# step, up to m·b·s·h numbers.)
#
# ### Real timelines
#
# Here is the last of the three 1F1B steps.

# %%
spans = [seen["1F1B"]["spans"] for seen in by_rank]
plots.real_pipeline(
    simulate(plain[2]),
    from_start(spans),
    f"1F1B, {world_size} ranks that share what cores there are",
)

# %% [markdown]
# *The figure: above, the model of 1F1B. Below, real ranks. The order of the boxes in each row is the same. Their
# lengths and gaps depend on which ranks get a core.*
#
# Be honest about what this shows. The order is right, and so are the results. The gaps are not the bubble of the
# model: where ranks share cores, one goes on faster while another waits, and a rank that is not computing may be
# waiting for a core instead of a message.
#
# A trick gives each rank a processor of its own, in time if not in work. With a **pace** every F takes at least 15 ms
# and every B 30, mostly asleep, and sleeping needs no core. Messages, waiting and order are real.

# %%
pace = {"F": 0.015, "B": 0.03}
paced = launch(
    train, plain, gpt, cuts, size, steps=2, pace=pace, world_size=world_size, backend=backend
)
in_ms = Costs(1e3 * pace["F"], 500 * pace["B"], 500 * pace["B"])  # B is I and W together
at_pace = {schedule.name: simulate(schedule, in_ms) for schedule in plain}
spans = {name: from_start([seen[name]["spans"] for seen in paced]) for name in at_pace}
plots.real_pipeline(at_pace["1F1B"], spans["1F1B"], "1F1B, F of 15 ms and B of 30 ms at least")

# %% [markdown]
# *The figure: now the measured rows look like the modelled ones, wedges of idle time at the beginning and at the end
# included.*

# %% tags=["nbval-ignore-output"]
for name, model in at_pace.items():
    step = max(end for rows in spans[name] for *_, end in rows)
    print(f"{name:6} modelled {model.seconds:6.0f} ms, measured {1e3 * step:6.0f} ms a step")

# %% [markdown]
# What is measured above the model is messages, and operations that need longer than their pace. It differs from run to
# run, and between GPipe and 1F1B, which take the same time in the model.
#
# > **What changes on real GPUs.** Each rank has a processor, so the idle time is real without a pace. `recv` does not
# > stop the program, only the stream, and the CPU runs ahead. Messages travel while the GPU computes, if there is
# > something to compute: in 1F1B the receive of the *next* operation can be posted early, which our worker does not do.

# %% [markdown]
# ## 6. Less bubble
#
# ### Interleaving: more stages than ranks
#
# The bubble is (p − 1) times the forward and backward *of a stage*. Shorter stages, shorter bubble. So give each rank
# v short stages instead of a long one: with p = 4 and v = 2, rank 0 has stages 0 and 4. A micro-batch goes round the
# ranks v times (Narayanan et al. 2021, section 2.2). The bubble becomes (p − 1)/(v·m) of the ideal time.
#
# **Predict** (question 7). And the messages, and the activations?

# %%
loops = [simulate(one_f_one_b(p, m)), simulate(interleaved(p, m, 2))]
plots.schedule_picture(loops, "modelled: F = 1, B = 2 for all of a rank's layers")

# %% [markdown]
# *The figure: 1F1B takes 33. Interleaved, with boxes half as long in two shades, one for each of a rank's stages, takes
# 28.5: the wedges are half as wide.*

# %%
for ranks, groups, v in itertools.product((2, 3, 4, 8), (1, 2, 4), (2, 3, 4)):
    run_v = simulate(interleaved(ranks, ranks * groups, v))
    ideal = ideal_seconds(run_v.schedule)
    assert math.isclose((run_v.period - ideal) / ideal, (ranks - 1) / (v * ranks * groups))
    boundaries = sum(a != b for a, b in itertools.pairwise(run_v.schedule.placement))
    assert boundaries == ranks * v - 1
    assert math.isclose(max(run_v.peak), ranks + (ranks - 1) / v if groups > 1 else ranks)
print("p = 4, m = 8   bubble of ideal   messages   activations, in micro-batches")
for v in (1, 2, 4):
    one = simulate(interleaved(p, m, v))
    idle = one.period / ideal_seconds(one.schedule) - 1
    held = ", ".join(f"{peak:g}" for peak in one.peak)
    print(f"v = {v}{idle:19.1%}{2 * m * (p * v - 1):14}      {held}")

# %% [markdown]
# The price: 2m(pv − 1) messages, more than v times as many, of the same size. And more activations than 1F1B, because a
# rank starts more forwards before its first backward: rank 0 holds p + (p − 1)/v micro-batches instead of p. Groups of
# p micro-batches go through a rank's stages in turn, so in Megatron-LM's schedule and in ours m must be a multiple of
# p. The library (section 9) and Llama 3's schedule take other numbers, too. Longer groups leave the bubble as it is and
# hold more activations; with fewer micro-batches than ranks the bubble is larger than the formula's.
#
# The engine of section 5 runs it as it is: `placement` says which rank a stage is on. With v = 2 there are 2p stages,
# cut from nine pieces. (On more than four ranks the model has too few, and gets more layers.)

# %%
twice = 2 * world_size
deep = gpt if len(costs) >= twice else replace(gpt, layers=twice)
cuts |= {twice: partition(piece_costs(deep), twice)}
loop = interleaved(world_size, microbatches, 2)
looped = launch(train, [loop], deep, cuts, size, world_size=world_size, backend=backend)
expected = (
    reference if deep is gpt else launch(one_process, deep, size, world_size=1, backend=backend)[0]
)
compare(looped, "interleaved", expected)
messages = sum(seen["interleaved"]["ledger"].messages for seen in looped)
assert messages == 2 * microbatches * (twice - 1)
print(f"{messages} messages where 1F1B sends {2 * microbatches * (world_size - 1)}")

# %% [markdown]
# ### Zero-bubble: backward in two halves
#
# Backward of a linear layer y = x·Wᵀ is two products of the same size. The **gradient of the input**, ∂y·W, is what
# the stage before is waiting for. The **gradient of the weights**, ∂yᵀ·x, is for the optimizer's step, and no rank
# waits for it (question 8). Call them I and W; Qi et al. 2023 call them B and W. Autograd will compute them one after
# the other if asked:

# %%
layer, x = nn.Linear(6, 5), torch.randn(3, 6, requires_grad=True)
dy = torch.randn(3, 5)
y = layer(x)
(dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)  # I: now, another rank waits
dw, db = torch.autograd.grad(y, [layer.weight, layer.bias], dy)  # W: any time before the step
assert torch.allclose(dx, dy @ layer.weight) and torch.allclose(dw, dy.T @ x)
whole_layer = nn.Linear(6, 5)
whole_layer.load_state_dict(layer.state_dict())
whole_layer(x.detach()).backward(dy)
assert torch.allclose(dw, whole_layer.weight.grad) and torch.allclose(db, whole_layer.bias.grad)
print("I and W apart give what B gives together")

# %% [markdown]
# So I goes on early, and W fills what would be bubble. **ZB-H1** keeps the activations of 1F1B at its worst rank, p
# micro-batches, and puts W off. **ZB-H2** also does more forwards at the beginning.
#
# **Predict.** How much of the bubble is left, if F = I = W?

# %%
makes = (one_f_one_b, zero_bubble_h1, zero_bubble_h2)
plots.schedule_picture([simulate(make(p, m)) for make in makes], "modelled: F = I = W = 1")

# %% [markdown]
# *The figure: 1F1B takes 33 and idles 27 %. ZB-H1, with input gradients and weight gradients in colours of their own,
# takes 27. In ZB-H2 every row is without a gap, each a little later than the one above, like a parallelogram: a
# rank's step takes 24, which is all work. What is grey before a row's first box and after its last is not part of its
# step: the previous and the next one run there.*
#
# The recorded formulas (Qi et al. 2023): a rank idles (p − 1)(F + I + W) in 1F1B, (p − 1)(F + I − W) in ZB-H1, and
# (p − 1)(F + I − 2W) in ZB-H2. Activations: p micro-batches, p, and 2p − 1. Does our simulation agree?

# %%
for ranks, count in itertools.product(range(2, 9), (16, 17, 40)):
    for make, weights, peak in ((zero_bubble_h1, 1, ranks), (zero_bubble_h2, 2, 2 * ranks - 1)):
        zero = simulate(make(ranks, count), Costs(1, 1, 1))
        idle = zero.period - max(zero.busy)
        assert math.isclose(idle, (ranks - 1) * (1 + 1 - weights), abs_tol=1e-9)
        assert max(zero.peak) == peak
    assert zero.period == ideal_seconds(zero.schedule)  # H2: nothing but work
for make in makes:
    one = simulate(make(p, m))
    idle = one.period - max(one.busy)
    print(f"{one.schedule.name:6} idle {idle:2g} of {one.period:g},", end="")
    print(f" activations at most {max(one.peak):g}")

# %%
for forward, inputs, weights in ((1, 1.25, 0.75), (1, 2, 1)):
    idle = [simulate(make(p, m), Costs(forward, inputs, weights)).bubble for make in makes]
    told = ", ".join(
        f"{make.__name__} {share:.1%}" for make, share in zip(makes, idle, strict=True)
    )
    print(f"F {forward}, I {inputs}, W {weights}: idle {told}")
    assert math.isclose(idle[0], (p - 1) / (m + p - 1)) and idle[1] < idle[0]

# %% [markdown]
# With F = I = W nothing is left of the bubble in ZB-H2. It pays with nearly twice the activations. Real layers are not
# so even: attention has no weights, so I is longer than W (first line). With full recomputation (second line) backward
# begins with another F, which belongs to I. The idle share of 1F1B stays the same, since its bubble grows as its work
# does. But the zero-bubble schedules have less W to fill it with, so some of the bubble comes back. (The two lines
# agree, because F + I − W is half of the work in both.)
#
# > **Misconception.** "Zero-bubble: no rank ever waits." The ranks end at different times, so nothing may wait for all
# > of them before the next step: no global gradient norm, no check for overflow. The paper steps first, checks
# > afterwards, and takes a wrong step back.
#
# > **What changes on real GPUs.** W late means that its inputs and ∂y stay in memory between I and W. Split kernels
# > are smaller ones. What it gains shows where m is small against p; where m ≥ 4p less than a fifth of the time
# > is left to win.
#
# All schedules in one figure: idle share over micro-batches, four ranks, F = I = W.

# %%
many = {"GPipe": gpipe, "1F1B": one_f_one_b, "interleaved, v = 2": interleaved}
many |= {"ZB-H1": zero_bubble_h1, "ZB-H2": zero_bubble_h2}
bubbles = {name: [simulate(make(p, n)).bubble for n in counts[2:]] for name, make in many.items()}
assert bubbles["GPipe"] == bubbles["1F1B"] and bubbles["ZB-H2"][1:] == [0] * 5
plots.bubble_curves(counts[2:], bubbles, "modelled: bubble of four ranks, share of all time")

# %% [markdown]
# *The figure: GPipe and 1F1B share the highest curve, from 43 % at 4 micro-batches down to 2 % at 128. Interleaved and
# below it ZB-H1 lie lower; ZB-H2 is at zero from 8 micro-batches on.*

# %% [markdown]
# ## 7. Stages that are not equal
#
# Formulas assume equal stages. Real ones are not: the last has the head, a product with the whole vocabulary, and the
# loss. Take a vocabulary of 6,144. (By its published configuration the head of Llama 3 8B has
# as many weights as 2.4 of its blocks.)
#
# **Predict** (question 9). Cut the nine pieces into equal *numbers*, or by cost: which stage gets how many blocks?

# %%
wide = replace(gpt, vocabulary=6144)
wide_costs = piece_costs(wide)
ways = {
    "equal numbers": [len(part) for part in torch.arange(len(wide_costs)).tensor_split(world_size)],
    "by FLOPs": partition(wide_costs, world_size),
}
print(f"the head costs as much as {wide_costs[-1] / wide_costs[1]:.1f} blocks")
unequal = {}
for name, cut in ways.items():
    work = [cost / wide_costs[1] for cost in sums(wide_costs, cut)]  # in blocks
    unequal[name] = simulate(one_f_one_b(world_size, microbatches), Costs(work, work, work))
    print(f"{name:13}: pieces {cut}, blocks' worth of work", *(f"{w:.1f}" for w in work), end="")
    print(f", idle {unequal[name].bubble:.0%}")
assert unequal["by FLOPs"].period < unequal["equal numbers"].period

# %%
runs = [
    replace(timeline, schedule=replace(timeline.schedule, name=f"1F1B, {name}"))
    for name, timeline in unequal.items()
]
plots.schedule_picture(runs, "modelled: forward of a block = 1, B = 2 F")

# %% [markdown]
# *The figure: with equal numbers the last rank has no gap in the middle of the step, and all others wait for it again
# and again. Cut by FLOPs, with fewer blocks on the last rank, the step is shorter and the gaps are smaller.*
#
# In every pass the slowest stage takes its time, so the step takes about m times the *slowest* stage and not m times
# the mean. Unlike the bubble, this does not go away with more micro-batches. And a block cannot be halved: the finest
# cut is a whole number of them.
#
# FLOPs are an estimate. One large product, like the head's, is faster for its FLOPs than many small ones, and the loss
# has hardly any FLOPs and takes time. So *measure* the stages: the naive schedule runs one rank at a time, so that its
# times are those of a stage alone. Each is the least of those seen.


# %%
def seconds_of(by_rank, name):
    """Least seconds of F and of B, by stage."""
    return [
        [
            min(end - start for op, start, end in seen[name]["spans"] if op.kind == kind)
            for seen in by_rank
        ]
        for kind in "FB"
    ]


alone = naive(world_size, 4)
stage_seconds = {}
for name, cut in ways.items():
    ranks = launch(
        train, [alone], wide, {world_size: cut}, 4 * per_microbatch, steps=2,
        world_size=world_size, backend=backend,
    )  # fmt: skip
    stage_seconds[name] = seconds_of(ranks, "naive")

# %% tags=["nbval-ignore-output"]
for name, (forward, backward) in stage_seconds.items():
    half = [b / 2 for b in backward]
    model = simulate(one_f_one_b(world_size, microbatches), Costs(forward, half, half))
    both = [1e3 * (f + b) for f, b in zip(forward, backward, strict=True)]
    print(f"{name:13}: F + B", *(f"{ms:5.1f}" for ms in both), "ms measured;", end="")
    print(f" 1F1B of these: {1e3 * model.period:.0f} ms, idle {model.bubble:.0%}")

# %% [markdown]
# With measured times of the *pieces* in place of FLOPs, `partition` gives the cut for this machine. Large runs do it by
# hand: Llama 3 took a layer each off the first and the last stage (*recorded*,
# [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.2).
#
# > **Misconception.** "Equal layers on each rank are a balanced pipeline." Time and memory each want another cut: rank
# > 0 has the embedding's parameters and the most activations, the last rank the head's FLOPs and the logits.

# %% [markdown]
# ## 8. A weight on two stages
#
# GPT-2 and many others **tie** embedding and head: one weight, used at both ends of the model. In a pipeline the two
# ends are on different ranks. Each gets a copy, and each backward sees its own half of the gradient. One process would
# add the two. So must the ranks: an all-reduce over a group of two, the first and the last, after every step's last
# backward.
#
# **Predict.** What happens without it? No error, no hang. And then?


# %%
def tied_training(add, steps=3):
    """Losses, and the embedding's weight at the end, of a tied model; `add` sums its gradients."""
    last, schedule = dist.get_world_size() - 1, one_f_one_b(dist.get_world_size(), microbatches)
    ends = dist.new_group([0, last])
    modules = my_stages(replace(gpt, tied=True), sizes, schedule.placement)
    worker = Worker(modules, schedule.placement, gpt.hidden)
    weight = next(modules[0].parameters()) if 0 in modules else worker.parameters[-1]
    optimizer, losses = sgd(worker.parameters), []
    for step in range(steps):
        losses.append(run(worker, schedule, *batch(step, size)))
        if add and dist.get_rank() in (0, last):
            dist.all_reduce(weight.grad, group=ends)  # a sum
        optimizer.step()
        optimizer.zero_grad()
    return losses, weight.detach().cpu()


one = launch(one_process, replace(gpt, tied=True), size, world_size=1, backend=backend)[0]
for add in (True, False):
    first, *_, end = launch(tied_training, add, world_size=world_size, backend=backend)
    error = max(abs(a - b) for a, b in zip(end[0], one[0], strict=True))
    assert torch.equal(first[1], end[1]) == (error < 1e-5) == add
    how = "added:    " if add else "not added:"
    print(f"gradients {how} copies equal: {add}, losses equal: {add}")

# %% [markdown]
# Without the sum the two copies drift apart: another model, and no error says so. With it, the
# losses are those of one process. The message is one gradient of the embedding, V·h numbers, in each step. Both copies
# start equal, get equal gradients, and stay equal, as replicas in DDP do.

# %% [markdown]
# ## 9. `torch.distributed.pipelining`
#
# PyTorch has all this. A `PipelineStage` wraps a stage's module, a schedule class takes stages and the number of
# micro-batches, and `step` is our `run`: the first rank gives inputs, the last gives targets. It asks the shapes of
# messages from stage to stage in its first step. Gradients are divided by m, because its loss is a mean over each
# micro-batch.


# %%
def library(cases, config, cuts, size, steps=3):
    """Train with the library's schedules; what this rank saw, in the form of `train`."""
    from torch.distributed import pipelining

    seen = {}
    for name, kind, count in cases:
        placement = [s % dist.get_world_size() for s in range(count)]
        modules = my_stages(config, cuts[count], placement)
        stages = [pipelining.PipelineStage(m, s, count, device()) for s, m in modules.items()]
        schedule = getattr(pipelining, kind)(
            stages[0] if len(stages) == 1 else stages, microbatches, loss_fn=next_token_loss
        )
        seen[name] = library_steps(schedule, modules, count - 1 in modules, size, steps)
    return seen


# %%
def library_steps(schedule, modules, is_last, size, steps):
    """Some steps of one schedule."""
    parameters = [p for module in modules.values() for p in module.parameters()]
    optimizer, losses = sgd(parameters), []
    for step in range(steps):
        x, y = batch(step, size)
        each = []
        with record() as ledger:
            schedule.step(
                *([x] if 0 in modules else []),
                **({"target": y, "losses": each} if is_last else {}),
            )
        losses.append(sum(loss.item() for loss in each) / microbatches)
        if step == 0:
            gradients = {s: flat(p.grad for p in m.parameters()) for s, m in modules.items()}
        optimizer.step()
        optimizer.zero_grad()
    ends = {s: flat(m.parameters()) for s, m in modules.items()}
    return {"losses": losses, "gradients": gradients, "parameters": ends, "ledger": ledger}


# %%
single = [("GPipe", "ScheduleGPipe", world_size), ("1F1B", "Schedule1F1B", world_size)]
multi = [
    ("interleaved", "ScheduleInterleaved1F1B", twice),
    ("zero-bubble", "ScheduleInterleavedZeroBubble", twice),
]
theirs = launch(library, single, gpt, cuts, size, world_size=world_size, backend=backend)
theirs_multi = launch(library, multi, deep, cuts, size, world_size=world_size, backend=backend)
for seen, cases, wanted in ((theirs, single, reference), (theirs_multi, multi, expected)):
    for name, _, count in cases:
        compare(seen, name, wanted)
        total = sum(rank[name]["ledger"].messages for rank in seen)
        assert total == 2 * microbatches * (count - 1)

# %% [markdown]
# Losses, gradients, parameters, and the number of messages: all as in our engine. `InterleavedZeroBubble` splits
# backward into I and W on real ranks. (Others in the module: `ScheduleLoopedBFS`, `ScheduleZBVZeroBubble`,
# `ScheduleDualPipeV`. The last two fold the pipeline into a V, so that first and last stage share a rank.)
#
# Where our mailbox has groups, `Schedule1F1B` posts a send and the receive that would block it *together*, with
# `batch_isend_irecv`: NCCL then runs them at the same time. The schedules with several stages a rank put sends and
# receives into the lists beforehand, in orders that match on both ranks. Three cures for one problem.
#
# ### Its lists and ours
#
# The library can list the order of a schedule without running it, by a helper that is not documented. Are they the
# orders of sections 3, 4 and 6?


# %%
def library_order(name, ranks, count):
    """The library's operations of each rank as text, computing only."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    listed = get_schedule_ops(name, ranks, count)
    texts = [[str(op) for op in order if op is not None] for order in listed]
    return [[text for text in order if not text.endswith("GRAD")] for order in texts]


# %%
assert all(library_order("Interleaved1F1B", p, count) for count in (p - 1, p + 1, 2 * p - 1))
for name, make in (("GPipe", gpipe), ("1F1B", one_f_one_b), ("Interleaved1F1B", interleaved)):
    ours = [[str(op) for op in order] for order in make(p, m).order]
    equal = [a == b for a, b in zip(library_order(name, p, m), ours, strict=True)]
    print(f"{name:16} ranks with the same order: {sum(equal)} of {p}")
print(
    "library, rank 3:",
    *library_order("1F1B", p, m)[-1][:6],
    "...",
    library_order("1F1B", p, m)[-1][-2],
)
print(
    "ours, rank 3:   ",
    *map(str, one_f_one_b(p, m).order[-1][:6]),
    "...",
    one_f_one_b(p, m).order[-1][-2],
)

# %% [markdown]
# One differs: the last rank of 1F1B. The *listing* of this version counts its forwards from 1 and ends with a
# micro-batch 8 that does not exist. What *runs* is other code, and right, as the equal losses show. A drawing is not
# proof of what runs. (1F1B of the library also refuses fewer micro-batches than stages; ours runs them. Its interleaved
# schedule also takes some numbers of micro-batches that p does not divide, as the first line of the cell asserts.)
#
# > **What changes on real GPUs.** Use the library, or Megatron-LM's, which also recycle buffers and overlap messages.
# > A stage can itself be sharded by FSDP2 (lesson 07) or split by tensor parallelism: `PipelineStage` takes any module.

# %% [markdown]
# ## 10. Which link does a pipeline need?
#
# A message has b·s·h numbers, whatever the stage computes. So compare two times: the message on a link, and the forward
# of a stage. The stages are those of Megatron-LM's runs (*recorded*: shape, parallel sizes and TFLOP/s per GPU of
# Narayanan et al. 2021, table 1, on A100s; t is the tensor-parallel size, p the pipeline's). b = 1, s = 2,048, and 2
# bytes a number. The links are those of that time: NVLink 3 inside a node, one port of InfiniBand HDR between two.

# %%
MEGATRON = {  # t, p, GPUs, batch, TFLOP/s per GPU
    "39.1B": (8, 2, 512, 1536, 138), "76.1B": (8, 4, 1024, 1792, 140),
    "145.6B": (8, 8, 1536, 2304, 148), "310.1B": (8, 16, 1920, 2160, 155),
    "529.6B": (8, 35, 2520, 2520, 163), "1008B": (8, 64, 3072, 3072, 163),
}  # fmt: skip
print("                                                           IB of the forward")
print("model    layers/stage   forward   message  NVLink 3     IB HDR     v = 1  v = 2")
for name, (t, stages, _, _, tflops) in MEGATRON.items():
    config = PUBLISHED[f"Megatron {name}"]
    flops = config.flops_per_token(backward=False) * config.context / (t * stages)
    forward, sent = flops / (tflops * 1e12), 2 * config.context * config.hidden
    near, far = (LINKS[key].latency + sent / LINKS[key].bandwidth for key in ("nvlink3", "ib_hdr"))
    row = f"{name:8}{config.layers / stages:12.0f}{1e3 * forward:8.1f} ms{sent / 1e6:6.0f} MB"
    row += f"{1e3 * near:8.2f} ms{1e3 * far:8.2f} ms{far / forward:8.0%}{2 * far / forward:7.0%}"
    print(row)
    assert far < 0.25 * forward

# %% [markdown]
# Even on one port of InfiniBand a message takes a small part of a stage's forward, and it can travel while the next
# micro-batch is computed. Interleaving with v = 2 halves the stage and keeps the message, so the share doubles: that is
# the price of its smaller bubble, and why v stays small across nodes.
#
# **Predict** (question 10). Now all three parallelisms of such a run: what does a GPU send for one micro-batch, forward
# and backward? Tensor parallelism needs all-reduces in every layer: 8·b·s·h·(t − 1)/t numbers a layer (*recorded*, same
# source; lesson 09 derives it), and 12 in place of 8 with full recomputation, which these runs used: forward's two come
# again. Data parallelism all-reduces the gradients of the GPU's parameters once a step, here divided by the step's
# micro-batches, of one sequence each.

# %%
print("sent by a GPU for a micro-batch, MB       pipeline   tensor    data")
for name, (t, stages, gpus, whole_batch, _) in MEGATRON.items():
    config = PUBLISHED[f"Megatron {name}"]
    numbers, d = config.context * config.hidden, gpus // (t * stages)
    tensor = 12 * numbers * (t - 1) / t * config.layers / stages
    share = float(name[:-1]) * 1e9 / (t * stages)
    data = 2 * (d - 1) / d * share / (whole_batch / d)
    row = [2 * sent / 1e6 for sent in (2 * numbers, tensor, data)]
    print(
        f"{name:8} t = {t}, p = {stages:2}, d = {d:2}" + f"{row[0]:24.0f}{row[1]:9.0f}{row[2]:8.0f}"
    )
    assert 9.5 < row[1] / row[0] <= 126

# %% [markdown]
# Tensor parallelism sends 10 to 126 times what the pipeline sends (7 to 84 times without recomputation), in the middle
# of every layer, where nothing hides it. Hence the usual layout: tensor parallelism inside the node, on NVLink, and the
# pipeline across nodes, point to point to one neighbour. Data parallelism crosses nodes too. Where a step has hundreds
# of micro-batches it sends even less, but all at once, at the end. (Each of the t GPUs of a tensor-parallel group holds
# the same activations. Megatron lets each send a t-th across nodes and gathers the parts on NVLink, which divides the
# pipeline's column by eight.)
#
# ### Their bubbles
#
# How many micro-batches did they have? At most one per sequence of a replica's share of the batch. Here is what plain
# 1F1B would idle with that many, and interleaving with two stages a rank. Which of the two was it? The paper says that
# all these runs interleaved (section 5.1). A script that was published later gives two or three stages a rank to the
# middle four, but does not interleave the first and the largest (lesson 12).

# %%
for name, (t, stages, gpus, whole_batch, _) in MEGATRON.items():
    d = gpus // (t * stages)
    most = whole_batch // d
    idle = simulate(one_f_one_b(stages, most)).bubble
    halved = (stages - 1) / (2 * most + stages - 1)
    print(f"{name:8} p = {stages:2}, m = {most:3} at most: 1F1B idles {idle:5.1%} or more,", end="")
    print(f" with v = 2 {halved:4.1%}")
    assert math.isclose(idle, (stages - 1) / (most + stages - 1), abs_tol=1e-9)

# %% [markdown]
# That is the answer to the question at the top. With 64 stages each GPU would idle 63 of 64 parts of the time, if each
# replica did one batch at a time. With 512 micro-batches in a step it idles 11 % if the script is right, and 5.8 % if
# the paper is right. The price is a batch of 3,072 sequences: without a large batch there is no deep pipeline.

# %% [markdown]
# ## 11. Try it
#
# The explorer runs `simulate` with any numbers. Its formula line says what section 3 and section 6 derive.

# %%
explorer = schedule_explorer()
explorer

# %% [markdown]
# *The explorer: sliders for micro-batches, ranks, stages per rank, the times F, I, W and of a message, and a choice of
# schedule. Below them the picture, the bubble, the activations and the number of messages. In a notebook that is not
# running it shows one setting.*
#
# Answer with it:
#
# <details><summary>Four ranks, 1F1B. How many micro-batches until it idles less than 10 %?</summary>
#
# 28: then it is 3/31 = 9.7 %. With 27 it is 3/30, exactly 10 %.
# </details>
#
# <details><summary>Four ranks, 8 micro-batches, ZB-H2, F = I = 1. Make W smaller: 0.5. What happens to the bubble, and
# why?</summary>
#
# It comes back: there is less W to fill the gaps with. At W = 0.5 a rank works for 20, and its step takes 23: it idles
# 3, as the formula of section 6 says, or 13 %.
# </details>
#
# <details><summary>Four ranks, 8 micro-batches, F = I = W = 1. A message takes 0.5. Are GPipe and 1F1B still
# equal?</summary>
#
# No: 36 against 41. In 1F1B a rank has started only as many micro-batches as it may hold, and while the next message
# is under way it has nothing else. GPipe has. More forwards at the start of 1F1B would help, for their activations.
# </details>
#
# <details><summary>The same. Up to which time of a message is interleaving with v = 2 faster than 1F1B?</summary>
#
# Up to 1.25: 52 against 53. At 1.5 it is 58 against 57. Each micro-batch crosses 7 boundaries instead of 3, forward and
# back, and a slow link takes back what interleaving gained.
# </details>
#
# ## Recap, with the numbers of this run

# %%
print(f"{world_size} ranks, {microbatches} micro-batches, {gpt.layers} blocks:")
for schedule in plain + [loop]:
    seen = looped if schedule is loop else by_rank
    kept = [rank[schedule.name]["kept"] / schedule.virtual for rank in seen]
    sent = sum(rank[schedule.name]["ledger"].messages for rank in seen)
    line = f"{schedule.name:12} idle {simulate(schedule).bubble:4.0%} modelled, {sent:4} messages,"
    print(line, "activations kept:", *(f"{count:g}" for count in kept))

# %% [markdown]
# - A pipeline cuts the model between layers. Naively p ranks have the speed of one, and 1/p of the model each.
# - Micro-batches fill it. The bubble of GPipe and 1F1B is (p − 1)/m of the ideal time, (p − 1)/(m + p − 1) of all
#   time.
# - 1F1B holds p − rank micro-batches where GPipe holds m, with the same bubble. Interleaving divides the bubble by v
#   for more than v times the messages. Zero-bubble fills it with weight gradients, ZB-H2 for 2p − 1 micro-batches of
#   activations.
# - One engine ran naive, GPipe, 1F1B and interleaved, the library zero-bubble, all equal to one process. Sends that
#   nobody waits for, and a queue for each direction, keep it from deadlock.
# - The slowest stage sets the pace. Cut by cost, with the head counted, and measure.
# - A tied weight needs its gradients added over first and last stage.
# - A message is b·s·h numbers and goes to one neighbour. A pipeline may cross nodes; tensor parallelism should not.
#
# <details><summary>Answers to the ten predictions</summary>
#
# 1. A quarter (section 2).
# 2. 8/11 = 73 %; it idles 27 % (section 3).
# 3. The memory alone (section 4).
# 4. 8 in GPipe, 3 in 1F1B (sections 4 and 5).
# 5. 1F1B, where both directions are busy at once (section 5).
# 6. 2 · 8 · 3 = 48, each of b·s·h numbers (section 5).
# 7. Half the bubble; 112 messages instead of 48 (section 6).
# 8. The gradients of the weights (section 6).
# 9. By cost: the stage of the head gets fewest blocks, or none (section 7).
# 10. Tensor parallelism stays. Pipeline and data parallelism may cross (section 10).
# </details>
#
# **Exercises:** [exercises/10_pipeline_parallel](../exercises/10_pipeline_parallel_exercises.ipynb). **Next:**
# [11 long context and experts](11_long_context_and_experts.ipynb), which splits the sequence, and layers of many
# experts.
#
# **Worth reading**
# - Y. Huang et al., *GPipe: efficient training of giant neural networks using pipeline parallelism*, 2019,
#   [arXiv 1811.06965](https://arxiv.org/abs/1811.06965): micro-batches, and the first analysis of the bubble.
# - D. Narayanan et al., *Efficient large-scale language model training on GPU clusters using Megatron-LM*, 2021,
#   [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): 1F1B, interleaving, and which parallelism goes where.
# - P. Qi, X. Wan, G. Huang, M. Lin, *Zero bubble pipeline parallelism*, 2023,
#   [arXiv 2401.10241](https://arxiv.org/abs/2401.10241): backward in two halves, and the schedules that it allows.
