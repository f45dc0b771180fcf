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
# A model with a trillion parameters was trained on 3,072 GPUs. Its 128 layers were cut into 64 **stages** of two layers
# each, and every token went through all 64 in turn, forward and back. If stages take turns, 63 of 64 GPUs should be
# idle. Yet each GPU reached 52 % of its peak (*recorded*, Narayanan et al. 2021, table 1). You cut a model into stages,
# train it in several orders, and see what removing idle time costs.
#
# **You will be able to**
# - *cut* a model into stages of equal cost, and *train* it with messages from stage to stage;
# - *derive* idle time and activations of GPipe, 1F1B, interleaved and zero-bubble schedules;
# - *write* one engine that runs any schedule without deadlock, and *train* with `torch.distributed.pipelining`;
# - *decide* how many micro-batches a pipeline needs, and which traffic may cross nodes.
#
# **Before this:** [02 collectives](02_collectives.ipynb), [04 ddp](04_ddp.ipynb), [06 zero](06_zero.ipynb). **Time:**
# about 45 minutes to read the core, 80 with the deeper sections, under a minute to run.

# %% [markdown]
# Parameters and imports:

# %% tags=["parameters"]
import itertools
import math
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

world_size = 4  # ranks, 2 or more
per_microbatch = 2  # windows of text in a micro-batch
patience = 2.0  # seconds that a cell of section 5 waits for its ranks

# %%
from course_utils import HangError, attempt, device, launch, recorded
from course_utils.data import Windows
from course_utils.hardware import LINKS
from course_utils.models import GPT, Block, TransformerConfig, next_token_loss
from course_utils.predictions import predict, predictions
from course_utils.programs import SCRIPTS, excerpt, folded
from lessons.pipeline_parallel import figures, pipeline_training, stage_costs
from lessons.pipeline_parallel.explorer import schedule_explorer
from lessons.pipeline_parallel.pipeline import SCHEDULES, Costs, partition, simulate
from lessons.pipeline_parallel.pipeline_training import one_process, same_as_one_process, train

# %% jupyter={"source_hidden": true}
folded("The model", Block, GPT, pipeline_training.Start, pipeline_training.pieces)

# %%
gpt = TransformerConfig(layers=7, hidden=96, tied=False)
naive, gpipe, one_f_one_b, interleaved, zero_bubble_h1, zero_bubble_h2 = SCHEDULES.values()
backend = launch(dist.get_backend, world_size=world_size)[0]  # one for the whole lesson
on_ranks = partial(launch, world_size=world_size, backend=backend)
microbatches = 2 * world_size
windows, per_step = Windows("train", gpt.context), microbatches * per_microbatch


def text(step):
    """The windows of a step and their targets, the same on every rank: both (per_step, context)."""
    return windows.batch(range(step * per_step, (step + 1) * per_step), device())


# %% [markdown]
# ## 1. A model in stages
#
# **Pipeline parallelism** cuts the model *between* its layers, where tensor parallelism (lesson 09) cuts *through* each
# of them. A **stage** is a run of neighbouring layers and lives on one rank, with its parameters, gradients and
# optimizer states. So p ranks hold one copy of the model together, and what travels is the activations at p − 1 cuts:
#
# ```text
#            activations (b, s, h)            activations                activations
#  rank 0  ────────────────────────►  rank 1 ─────────────►   rank 2   ─────────────►  rank 3     loss
#  embeddings,                        blocks                  blocks                   block,
#  blocks  ◄────────────────────────         ◄─────────────            ◄─────────────  norm, head
#            their gradient                    gradient                  gradient
# ```
#
# Here b is the number of sequences, s their length in tokens, and h the width of the model. A cut can go between any
# two *pieces*: the embeddings, each block, and the last norm with the head. All ranks wait for the slowest one, so the
# best cut makes the most expensive stage as cheap as possible. `partition` finds it; the FLOPs of each piece (lesson
# 05) are the estimate of its cost.

# %%
costs = stage_costs.piece_flops(gpt)  # of a token, forward
sizes = partition(costs, world_size)
for rank, work in enumerate(stage_costs.stage_sums(costs, sizes)):
    stage = pipeline_training.build_stage(gpt, sizes, rank)
    count = sum(p.numel() for p in stage.parameters())
    print(f"rank {rank}: {sizes[rank]} pieces, {work / 1e6:.2f} MFLOP, {count:,} parameters")

# %% [markdown]
# Four ranks cannot have equal shares of seven blocks, so one has less to do. The head hardly counts here, because this
# vocabulary has only 128 characters. A real one can cost as much as several blocks (section 14).

# %% [markdown]
# ## 2. The first version
#
# The first version is the obvious one: rank 0 computes its stage and sends the output on, the next rank does the same,
# and the last one computes the loss. Then the gradients of these activations travel back. Autograd works within a rank
# but does not see through a message, so you do two things at each cut:
#
# - what a rank receives must require a gradient: `requires_grad_()`;
# - backward starts from the gradient that comes from the next rank: `out.backward(gradient)`.


# %%
def naive_step(stage, x, y):
    """Tokens and targets of a batch, forward and back; the loss on the last rank, else 0."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank > 0:
        x = torch.empty(*x.shape, gpt.hidden, device=device())
        dist.recv(x, rank - 1)
        x.requires_grad_()
    out, gradient = stage(x), None
    if rank < last:
        dist.send(out.detach(), rank + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, rank + 1)
    else:
        out = next_token_loss(out, y)
    out.backward(gradient)
    if rank > 0:
        dist.send(x.grad, rank - 1)
    return out.item() if rank == last else 0.0


# %% [markdown]
# `train` runs this on every rank: three optimizer steps, to be compared with one process, and one more to be timed. In
# the timed step every forward is padded with sleep to 15 ms, and every backward to 30 ms. Sleeping ranks do not compete
# for the cores, so the timing is that of independent GPUs. Messages, order and waiting are real.
#
# **Predict**: the model lies on four ranks and one batch goes through, forward and back. How much faster than one rank
# are they?

# %%
faster = predict("four ranks against one", unit="times as fast")

# %%
pace = (0.015, 0.03)  # seconds of a forward and of a backward, at least


def one_by_one(schedule, stages):
    return partial(naive_step, stages[dist.get_rank()])


reference = launch(one_process, gpt, text, world_size=1, backend=backend)[0]
whole = naive(world_size, 1)  # the batch in one piece
found = on_ranks(train, one_by_one, [whole], gpt, sizes, text, pace=pace)
runs = [by_schedule["naive"] for by_schedule in found]
print(same_as_one_process(runs, reference))
title = f"one batch through {world_size} stages"
figures.real_pipeline(simulate(whole), pipeline_training.measured(runs), title)

# %% jupyter={"source_hidden": true}
faster.compare(round(world_size * (1 - simulate(whole).bubble), 6))

# %% [markdown]
# **Compare.** Not at all: each rank computes for 1/p of the time, so p ranks have the speed of one, and the only gain
# is memory.
#
# *The figure: above as modelled, below as measured, a staircase of forwards down to the last rank and one of backwards
# up again. At any moment one rank has a box, and the rows of all others are empty.*
#
# The time in which a rank waits for what it needs is the **bubble**.
#
# > **Misconception.** "Layers on four GPUs: four times as fast." A library that only places layers on several GPUs lets
# > a model *fit*, but at any moment all GPUs but one are idle.

# %% [markdown]
# ## 3. Micro-batches: GPipe
#
# The cure is an assembly line. Cut the batch into m **micro-batches**, and while rank 1 has the first, rank 0 works on
# the second. Gradients of micro-batches add up, as in gradient accumulation (lesson 04), so the step stays the same.
#
# The order in which ranks work is the **schedule**, a list of operations for each rank. `1F3` is the forward of stage 1
# for micro-batch 3, and B is backward. **GPipe** (Huang et al. 2019) does all forwards, then all backwards, here with 3
# ranks and 4 micro-batches:

# %%
for rank, order in enumerate(gpipe(3, 4).order):
    print(f"rank {rank}:", *order)

# %% [markdown]
# `simulate` runs such lists: a rank starts its next operation as soon as it is free and has what it needs. F takes one
# unit of time and B two, because backward has two matrix products where forward has one.
#
# **Predict**: four ranks, eight micro-batches. For what share of GPipe's time is a rank idle?

# %%
idle = predict("of GPipe's time a rank is idle", unit="%")

# %%
p, m = 4, 8  # in all pictures of simulated schedules
both = [simulate(make(p, m)) for make in (naive, gpipe)]
figures.schedule_picture(both, "modelled: F = 1, B = 2, no time for messages")

# %% jupyter={"source_hidden": true}
idle.compare(100 * both[1].bubble)

# %% [markdown]
# **Compare.** For 27 % of it, while the pipeline fills and drains.
#
# *The figure: rows are ranks, boxes are operations, wide ones with the number of their micro-batch. One micro-batch
# after the other takes 96. GPipe takes 33 and idles 27 %.*
#
# A rank's own work, the **ideal time**, is m(F + B). Before the last rank starts, p − 1 forwards run, and after it ends
# p − 1 backwards. So it waits for (p − 1)(F + B), as does every rank:
#
# $$\frac{\text{bubble}}{\text{ideal time}} = \frac{p-1}{m} \qquad\qquad
# \frac{\text{bubble}}{\text{all time}} = \frac{p-1}{m+p-1}$$
#
# The opening's paper (Megatron-LM) gives the first ratio, GPipe's paper the second, so check which one a number is.

# %%
for count in (1, 4, 8, 32, 128):
    of_ideal, of_all = (p - 1) / count, (p - 1) / (count + p - 1)
    assert math.isclose(simulate(gpipe(p, count), Costs(2, 1, 3)).bubble, of_all, abs_tol=1e-12)
    print(f"4 ranks, {count:3} micro-batches: {of_ideal:4.0%} of ideal, {of_all:3.0%} of all time")

# %% [markdown]
# So why not 128? If the batch must stay the same, because it decides how well the model learns, more micro-batches are
# smaller ones, and small matrices are slow (section 11). If the batch grows, so does memory: when GPipe's first
# backward starts, rank 0 has done *all* forwards, and autograd keeps their activations.

# %% [markdown]
# ## 4. 1F1B: what does it save?
#
# Why wait with the backwards? As soon as the last rank has done the forward of micro-batch 0, it can do its backward.
# In **1F1B** each rank does just enough forwards to bring work to the last one, and then one forward and one backward
# in turn (PipeDream-Flush: Narayanan et al. 2020, [arXiv 2006.09503](https://arxiv.org/abs/2006.09503)).
#
# **Predict**: four ranks, eight micro-batches. Which is smaller than GPipe's: the bubble, the memory, or both?

# %%
smaller = predict("smaller in 1F1B", ["only the bubble", "only the memory", "both"])

# %%
pair = [simulate(make(p, m)) for make in (gpipe, one_f_one_b)]
figures.schedule_picture(pair, "modelled: F = 1, B = 2")

# %% jupyter={"source_hidden": true}
assert math.isclose(pair[0].bubble, pair[1].bubble) and max(pair[1].peak) < max(pair[0].peak)
smaller.compare("only the memory")

# %% [markdown]
# **Compare.** Only the memory: rank 0 holds four micro-batches at most, where GPipe's ranks hold all eight.
#
# *The figure: both schedules end at 33 and idle 27 %. In 1F1B backwards start early and alternate with forwards.*

# %%
figures.activation_steps(pair, "modelled: activations of a rank over the step")

# %% [markdown]
# *The figure: in GPipe every rank climbs to 8 micro-batches held; in 1F1B ranks 0 to 3 climb to 4, 3, 2 and 1.*

# %%
for ranks, count in itertools.product(range(1, 9), (1, 2, 5, 8, 32)):
    all_forward, in_turn = (simulate(make(ranks, count)) for make in (gpipe, one_f_one_b))
    assert math.isclose(in_turn.bubble, (ranks - 1) / (count + ranks - 1), abs_tol=1e-12)
    assert math.isclose(all_forward.period, in_turn.period)
    assert all_forward.peak == [count] * ranks
    assert in_turn.peak == [min(count, ranks - rank) for rank in range(ranks)]

# %% [markdown]
# > **Misconception.** "1F1B has a smaller bubble than GPipe." It has exactly the same one. What it saves is memory: a
# > rank has at most p − rank micro-batches **in flight** (forward begun, backward not ended), and not m. *That* allows
# > more micro-batches of the same size, and these make the bubble smaller.
#
# If the batch is fixed, GPipe keeps activations of the whole batch, whatever m is. In 1F1B rank 0 keeps p/m of them.

# %% [markdown]
# ## 5. Messages that wait for each other
#
# Section 2 used `send`. Under gloo it waits until its message is taken. (Under NCCL the GPU's *stream* waits, and
# Python goes on to the next line.) Here is an engine in its simplest form with such sends: receive, compute, send, in
# the order of the schedule. It computes nothing, because only messages matter here.


# %%
def messages_only(schedule):
    """The messages of a schedule with one stage a rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for op in schedule.order[rank]:
        before, behind = (rank - 1, rank + 1) if op.kind == "F" else (rank + 1, rank - 1)
        message = torch.zeros(per_microbatch, gpt.context, gpt.hidden, device=device())
        if 0 <= before <= last:
            dist.recv(message, before)
        if 0 <= behind <= last:
            dist.send(message, behind)


# %% [markdown]
# **Predict**: it runs the messages of GPipe, and then those of 1F1B. Which of the two come to their end?

# %%
ended = predict("what comes to its end", ["both", "only GPipe", "only 1F1B", "neither"])

# %%
outcomes = {}
for make in (gpipe, one_f_one_b):
    schedule = make(world_size, microbatches)
    print(f"{schedule.name}:")
    with attempt() as outcome:
        on_ranks(messages_only, schedule, timeout=patience, backend="gloo")
        print("all ranks are done")
    outcomes[schedule.name] = outcome.error

# %% jupyter={"source_hidden": true}
assert outcomes["GPipe"] is None and isinstance(outcomes["1F1B"], HangError)
ended.compare("only GPipe")

# %% [markdown]
# **Compare.** GPipe works, because its messages first all go down the pipeline and then all go up, so there is always a
# rank at the end that waits for nobody. In 1F1B both directions are busy at once: the last rank wants to send a
# gradient up while its neighbour wants to send the next activation down, and neither receives before its own message is
# taken.
#
# The schedule is right; the sends are wrong. The cure: **no rank waits for a send**. `isend` hands the message over and
# returns. Then ranks wait only for what they need to compute, as in `simulate`, where 1F1B came to its end.
#
# One danger is left: a message that the receiver needs now can be stuck behind one that it does not want yet. Under
# NCCL the calls of a process group run on a GPU *in the order in which they were made*. (PyTorch warns of it in
# `ProcessGroupNCCL.cpp`: if the group was made with `device_id=`, as `launch` does, all its calls are in *one* order,
# also messages to different ranks.) If rank 0 queues "send activation, receive gradient" and rank 1
# "send gradient, receive activation", both queues begin with a send, and the deadlock is back. So activations and
# gradients get a **process group** each. (PyTorch's schedules instead start a send and the receive that would block it
# *together*, with `batch_isend_irecv`.)

# %% [markdown]
# ## 6. One engine for every schedule
#
# A `Mailbox` knows the neighbours: what an F computes goes to the next stage, what a B computes to the one before.
# `placement[stage]` is the rank of a stage. A rank may have several (section 7), and then activations travel both ways
# between two ranks. So F and B each have a group for each direction, four in all.


# %%
class Mailbox:
    """Messages to and from the stages beside those of this rank; no send waits."""

    def __init__(self, placement):
        self.placement = placement
        ways = itertools.product("FB", (True, False))  # what travels, and whether to a higher rank
        self.groups = {way: dist.new_group() for way in ways}

    def rank_of(self, stage):
        return self.placement[stage] if 0 <= stage < len(self.placement) else None

    def send(self, op, message):
        """Begin to send what `op` computed; return what can be waited for, if anybody wants it."""
        to = self.rank_of(op.stage + 1 if op.kind == "F" else op.stage - 1)
        if to is not None:
            return dist.isend(message, to, self.groups[op.kind, to > dist.get_rank()])

    def receive(self, op, shape):
        """Return what `op` needs from another stage, if anything."""
        source = self.rank_of(op.stage - 1 if op.kind == "F" else op.stage + 1)
        if source is not None:
            message = torch.empty(shape, device=device())
            dist.recv(message, source, self.groups[op.kind, source < dist.get_rank()])
            return message


# %% [markdown]
# F and B are the two halves of `naive_step`. F *keeps* input and output, and B takes them out again. Two things are
# new. The loss is divided by m, so that gradients add up to those of the batch's mean. And a message must stay in
# memory until it is taken. So we wait for each send later: for an activation's send in the matching B, and for a
# gradient's send after the loop.


# %%
class Engine:
    """F and B of this rank's stages, {number: module}."""

    def __init__(self, stages, schedule):
        self.stages, self.schedule, self.last = stages, schedule, schedule.stages - 1
        self.mail, self.kept = Mailbox(schedule.placement), {}

    def F(self, op, x, y):
        if op.stage > 0:
            x = self.mail.receive(op, (*x.shape, gpt.hidden)).requires_grad_()
        out, sent = self.stages[op.stage](x), None
        if op.stage < self.last:
            sent = self.mail.send(op, out.detach())
        else:
            out = next_token_loss(out, y) / self.schedule.microbatches
            self.loss += out.item()
        self.kept[op.stage, op.microbatch] = x, out, sent

    def B(self, op):
        x, out, sent = self.kept.pop((op.stage, op.microbatch))
        gradient = self.mail.receive(op, out.shape)
        if sent:
            sent.wait()
        out.backward(gradient)
        self.sends.append(self.mail.send(op, x.grad))


# %%
def run_schedule(engine, x, y):
    """One step over x, y (per_step, context); the batch's loss on the last stage's rank, else 0."""
    engine.loss, engine.sends = 0.0, []
    xs, ys = (whole.chunk(engine.schedule.microbatches) for whole in (x, y))
    for op in engine.schedule.order[dist.get_rank()]:
        if op.kind == "F":
            engine.F(op, xs[op.microbatch], ys[op.microbatch])
        else:
            engine.B(op)
    for sent in filter(None, engine.sends):
        sent.wait()
    return engine.loss


def with_engine(schedule, stages):
    return partial(run_schedule, Engine(stages, schedule))


# %% [markdown]
# The loop does not know which schedule it runs. Here are three:

# %%
plain = [make(world_size, microbatches) for make in (naive, gpipe, one_f_one_b)]
found = on_ranks(train, with_engine, plain, gpt, sizes, text, pace=pace, weigh=True)
by_name = {each.name: [by_schedule[each.name] for by_schedule in found] for each in plain}
for name, runs in by_name.items():
    print(f"{name:6}", same_as_one_process(runs, reference))

# %% [markdown]
# **Predict**: four ranks, eight micro-batches. How many messages does a step of GPipe send over all ranks, and how many
# does 1F1B? What sets the size of one?

# %%
sent = predict("messages in a step of GPipe", unit="messages")

# %%
for name, runs in by_name.items():
    count, total = pipeline_training.total_messages(runs)
    held = ", ".join(f"{x:.1f}" for x in pipeline_training.weighed(runs, by_name["naive"]))
    print(f"{name:6} {count} messages of {total // count:,} bytes; ranks hold {held} micro-batches")

# %% jupyter={"source_hidden": true}
size = 4 * per_microbatch * gpt.context * gpt.hidden  # b s h numbers of 4 bytes
assert (count, total) == (2 * microbatches * (world_size - 1), count * size)
sent.compare(count)

# %% [markdown]
# **Compare.** At each of the p − 1 cuts every micro-batch sends b·s·h numbers down and as many up: **2m(p − 1) messages
# of b·s·h numbers**, whatever the stage computes. With one stage a rank, a schedule changes only *when* they go.
#
# The last numbers are what autograd keeps on each rank, in units of one micro-batch: about m in GPipe and p − rank in
# 1F1B, as simulated. And when did the ranks work? Here is 1F1B's extra step, with at least 15 and 30 ms for F and B:

# %%
in_ms = Costs(15, 15, 15)  # B is two halves of 15 ms
title = f"1F1B on {world_size} ranks, F of 15 ms and B of 30 ms at least"
real = pipeline_training.measured(by_name["1F1B"])
figures.real_pipeline(simulate(plain[2], in_ms), real, title, "ms")

# %% [markdown]
# *The figure: above the model, below real ranks, with the same boxes in the same order and small gaps between them.*

# %% tags=["nbval-ignore-output"]
for schedule in plain:
    shares = pipeline_training.idle(by_name[schedule.name])
    measured, modelled = sum(shares) / world_size, simulate(schedule, in_ms).bubble
    print(f"{schedule.name:6} idle: modelled {modelled:.0%}, measured {measured:.0%}")

# %% [markdown]
# Ranks idle more than modelled, because messages take time.
#
# > **What changes on real GPUs.** Messages travel while the GPU computes, if it has something to compute. So 1F1B can
# > begin the receive of its *next* operation early, which our engine does not do.

# %% [markdown]
# ## 7. Less bubble: interleaving and zero-bubble
#
# The bubble is p − 1 times the forward and backward *of a stage*, so shorter stages make it shorter. In **interleaved**
# 1F1B each rank has v short stages instead of a long one: with p = 4 and v = 2, rank 0 has stages 0 and 4, and a
# micro-batch goes round the ranks twice (Narayanan et al. 2021, section 2.2).
#
# **Predict**: v = 2. What happens to the bubble, to the number of messages, and to the activations on rank 0?

# %%
on_rank_0 = predict("activations on rank 0, with v = 2", ["fewer", "as many", "more"])

# %%
loops = [simulate(one_f_one_b(p, m)), simulate(interleaved(p, m, 2))]
for v in (1, 2, 4):
    one = simulate(interleaved(p, m, v))
    cuts = sum(a != b for a, b in itertools.pairwise(one.schedule.placement))
    print(f"v = {v}: idle {one.bubble:.1%}, {2 * m * cuts} messages, rank 0 holds {one.peak[0]:g}")
figures.schedule_picture(loops, "modelled: F = 1, B = 2 for all of a rank's layers")

# %% jupyter={"source_hidden": true}
assert math.isclose(loops[1].bubble, (p - 1) / (2 * m + p - 1))
assert loops[1].peak[0] > loops[0].peak[0]
on_rank_0.compare("more")

# %% [markdown]
# **Compare.** The bubble is halved (33 − 24 = 9 units of time become 28.5 − 24 = 4.5), messages are more than doubled,
# and rank 0 holds more, because it starts more forwards first.
#
# *The figure: 1F1B takes 33. Interleaved takes 28.5: boxes, in a shade for each stage of a rank, are half as long, so
# less time is idle.*
#
# The bubble is (p − 1)/(v·m) of the *ideal* time, while the cell prints its share of all time. The price is 2m(pv − 1)
# messages, more than v times as many of the same size, and, if v > 1, p + (p − 1)/v micro-batches on rank 0. In
# Megatron-LM's schedule and in ours m must be a multiple of p.
#
# **Zero-bubble** schedules split B in two: I, the gradient of the **input**, for which the stage before is waiting, and
# W, that of the **weights**, which no rank needs before the optimizer's step. If I is sent on early, W can fill what
# would be bubble (Qi et al. 2023). **ZB-H1** delays W; **ZB-H2** also does more forwards at the beginning.

# %%
makes = (one_f_one_b, zero_bubble_h1, zero_bubble_h2)
figures.schedule_picture([simulate(make(p, m)) for make in makes], "modelled: F = I = W = 1")

# %% [markdown]
# *The figure: 1F1B takes 33 and idles 27 %. ZB-H1, with other colours for I and W, takes 27 and idles 11 %. In ZB-H2 no
# row has a gap, and each begins a little later than the one above: a rank's step takes 24, which is all work. The grey
# before and after a row belongs to the steps before and after.*
#
# > **Misconception.** "Zero-bubble: no rank ever waits." Only in ZB-H2 and ZB-V, only if F, I and W take equally long,
# > and only if nothing waits for all ranks between steps, because they end at different times: no global gradient norm,
# > no check for overflow. ZB-H2 holds up to 2p − 1 micro-batches where 1F1B holds p. ZB-V, of the same authors, folds
# > the pipeline into a V and holds no more than 1F1B, for twice the messages; their code recommends it
# > ([README](https://github.com/sail-sg/zero-bubble-pipeline-parallelism)).
#
# Try it: the explorer simulates any of these schedules. In the pictures above messages take no time; give them some
# with *transfer*, and see which schedule loses most.

# %%
explorer = schedule_explorer()
explorer

# %% [markdown]
# *The explorer: sliders for micro-batches, ranks, stages and times, and a choice of schedule. Below them its picture.*
#
# <details><summary>Four ranks, 1F1B. How many micro-batches until it idles less than 10 %?</summary>
#
# 28: then it is 3/31 = 9.7 %. With 27 it is 3/30, exactly 10 %.
# </details>
#
# <details><summary>Four ranks, 8 micro-batches, F = I = W = 1, transfer 0.5. Are GPipe and 1F1B still equal?</summary>
#
# No: 36 against 41. In 1F1B a rank has started only as many micro-batches as it may hold, so it has nothing to do until
# the next message arrives. In GPipe it has other forwards or backwards to do.
# </details>
#
# <details><summary>The same settings. Up to which transfer is interleaving with v = 2 faster than 1F1B?</summary>
#
# Up to 1.25: it takes 52, and 1F1B 53. At 1.5 it takes 58, and 1F1B 57. Each micro-batch crosses 7 cuts instead of 3,
# and a slow link takes back what interleaving gained.
# </details>

# %% [markdown]
# ## 8. Back to the 64 stages
#
# In the run of the opening eight GPUs shared each layer, so a pipeline had 8 · 64 GPUs, and there were six replicas.
# With 3,072 sequences in a step, each replica had up to 512 micro-batches. What was its bubble? And how long does a
# message take on a port of InfiniBand HDR, compared with a stage's forward?

# %%
largest = recorded.MEGATRON_RUNS[-1]
stage, ranks, link = stage_costs.published_stage(largest), 64, LINKS["ib_hdr"]
for v, count in ((1, 1), (1, stage.microbatches), (2, stage.microbatches)):
    share = (ranks - 1) / (v * count + ranks - 1)
    print(f"{ranks} ranks, v = {v}, {count:3} micro-batches: idle {share:5.1%}")
seconds = link.latency + stage.message / link.bandwidth
print(f"forward {1e3 * stage.forward:.0f} ms, message of {stage.message / 1e6:.0f} MB", end=" ")
print(f"{1e3 * seconds:.1f} ms")

# %% [markdown]
# That answers the question at the top. One batch at a time would leave each GPU idle for 63/64 of the step. With 512
# micro-batches it idles 11 %, or 5.8 % with two stages a rank. (The paper says that it interleaved, section 5.1; a
# script published later does not.) The price is a batch of 3,072 sequences: without a large batch there is no deep
# pipeline.
#
# The message takes (*modelled*) under a tenth of the forward, or with two stages a rank a sixth of the forward of one,
# and can travel while the next micro-batch is computed.
# So **a pipeline may cross nodes**. Tensor
# parallelism, which sends in every layer, gets the links inside a node (section 10).

# %% [markdown]
# ## 9. What to take to work
#
# PyTorch's `PipelineStage` wraps any module, also one that is split by tensor parallelism or sharded by FSDP2. A
# schedule class takes the stage, the number of micro-batches and the loss, and its `step` is our `run_schedule`: the
# first rank passes inputs, and only the last uses targets.


# %%
def with_library(schedule, stages):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    ((number, module),) = stages.items()
    place = PipelineStage(module, number, schedule.stages, device())
    theirs = Schedule1F1B(place, schedule.microbatches, loss_fn=next_token_loss)

    def step(x, y):
        losses = []  # the last stage adds one for each micro-batch
        inputs = [x] if place.is_first else []
        theirs.step(*inputs, target=y, losses=losses, return_outputs=False)
        return sum(loss.item() for loss in losses) / schedule.microbatches

    return step


found = on_ranks(train, with_library, plain[2:], gpt, sizes, text, pace=None)
runs = [by_schedule["1F1B"] for by_schedule in found]
print(same_as_one_process(runs, reference))
print("messages in a step:", pipeline_training.total_messages(runs)[0])

# %% [markdown]
# Two traps. The library divides gradients by m, as we do, so the loss is a mean of the micro-batches' means. If padding
# gives them different numbers of tokens, that is not the mean over all tokens. And `Schedule1F1B` wants at least as
# many micro-batches as stages, m ≥ p; with fewer it raises a `ValueError`.
#
# [scripts/train_3d.py](../scripts/train_3d.py) is the complete program: with `--pp 4 --micro 16` it trains in four
# stages of equally many blocks, and each rank builds only its own. What a pipeline adds to a program is this:

# %%
program = SCRIPTS / "train_3d.py"
print(excerpt(program, "place = PipelineStage", "schedule = "), end="\n...\n")
print(excerpt(program, "losses: list", "schedule.step"))

# %% [markdown] tags=["deeper"]
# ## 10. Which link does a pipeline need? · deeper
#
# Three runs of the opening's paper (*recorded*: shape, parallel sizes and TFLOP/s of Narayanan et al. 2021, table 1, on
# A100s). Let t be the number of ranks that share each layer (lesson 09), and d the number of replicas. A micro-batch is
# one sequence of 2,048 tokens, in 2 bytes a number. How long does its message take on one port of InfiniBand HDR,
# compared with a stage's forward?

# %% tags=["deeper"]
published = [run for run in recorded.MEGATRON_RUNS if run.layout["pp"] in (2, 8, 64)]
stages = {run.model: stage_costs.published_stage(run) for run in published}
link = LINKS["ib_hdr"]  # one port between two nodes
for run in published:
    stage, layout = stages[run.model], run.layout
    seconds = link.latency + stage.message / link.bandwidth
    print(f"{run.model:15} t = {layout['tp']}, p = {layout['pp']}, d = {layout['dp']}:", end=" ")
    print(f"forward {1e3 * stage.forward:.0f} ms, message of {stage.message / 1e6:.0f} MB", end=" ")
    print(f"{1e3 * seconds:.1f} ms, {seconds / stage.forward:.0%} of it")
    assert seconds < 0.25 * stage.forward

# %% [markdown] tags=["deeper"]
# Even on one port a message takes a small part of a stage's forward. With v = 2 a stage is half as long but its message
# is as large as before, so messages take twice the share. Across nodes keep v small.
#
# **Predict**: these runs use all three parallelisms. For one micro-batch, forward and backward, which makes a GPU send
# most, and which least: the pipeline, tensor parallelism, or data parallelism?

# %% tags=["deeper"]
kinds_sent = ["the pipeline", "tensor parallelism", "data parallelism"]
most_sent = predict("a GPU sends most for", kinds_sent)

# %% tags=["deeper"]
for run in published:
    stage = stages[run.model]
    sent = {name: getattr(stage, name) / 1e6 for name in ("pipeline", "tensor", "data")}
    print(f"{run.model:15}", ", ".join(f"{name} {size:,.0f} MB" for name, size in sent.items()))

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert all(stages[run.model].tensor > 10 * stages[run.model].pipeline for run in published)
most_sent.compare("tensor parallelism")

# %% [markdown] tags=["deeper"]
# **Compare.** Tensor parallelism sends 10 to 126 times what the pipeline sends: 8·b·s·h·(t − 1)/t numbers a layer, and
# half as many again because these runs recomputed their activations.
#
# It sends in the middle of every layer. Half of its all-reduces stand between operations that wait for them; those of
# backward's input gradients can run beside the products for the weights' gradients (lesson 09). Data parallelism sends
# least in two of the three runs, because its one all-reduce a step is divided here by the micro-batches; but all of it
# comes at the end. Hence the usual layout: **tensor parallelism inside the node, the pipeline and data parallelism
# across nodes**.

# %% [markdown] tags=["deeper"]
# ## 11. Why not a thousand micro-batches? · deeper
#
# More micro-batches are smaller ones, and a smaller matrix product uses a processor less well. `kernel_prices` takes a
# stage of two blocks and a batch of 16 windows, and does its F and B in 1 to 16 parts, alone on a rank. The formula
# adds the bubble of four ranks.
#
# **Predict**: which m gives the shortest step?

# %% tags=["deeper"]
shortest = predict("the shortest step has m", ["1", "2", "4", "8", "16"])

# %% tags=["deeper"]
counts = [1, 2, 4, 8, 16]
prices = launch(stage_costs.kernel_prices, gpt, counts, world_size=1, backend=backend)[0]

# %% tags=["deeper", "nbval-ignore-output"]
print("micro-batches   windows in each   measured: a rank   modelled: four ranks")
for count, seconds in zip(counts, prices, strict=True):
    step = seconds * (count + p - 1) / count
    print(f"{count:13}{16 // count:18}{1e3 * seconds:16.1f} ms{1e3 * step:20.1f} ms")

# %% jupyter={"source_hidden": true} tags=["deeper", "nbval-ignore-output"]
steps = [one * (n + p - 1) / n for n, one in zip(counts, prices, strict=True)]
shortest.compare(str(counts[steps.index(min(steps))]))

# %% [markdown] tags=["deeper"]
# **Compare.** The work of a rank grows as its micro-batches become small, and the bubble shrinks. At first the bubble
# shrinks by more. Beyond some m the step hardly gets shorter, or gets longer again; that m differs from machine to
# machine.
#
# > **What changes on real GPUs.** Small products cost more, the narrower the layer, the more so. On one H200 a product
# > of 8,192 × 28,672 weights reached 770 TFLOP/s with 512 tokens and 376 with 128 (*recorded*: lesson 12, section 15).
# > And each kernel has to be launched. So the smallest micro-batch is often one sequence of some thousand tokens.
#
# How many are enough? GPipe's authors call the bubble negligible from m ≥ 4p on (Huang et al. 2019, section 2.3). By
# the formula that is up to a fifth of all time. But they recompute activations, and a rank can begin with that before
# the gradient arrives, so their bubble is smaller.

# %% tags=["deeper"]
more = [*counts, 32, 64, 128]
many = {f"{ranks} ranks": [simulate(gpipe(ranks, n)).bubble for n in more]
        for ranks in (2, 4, 8, 16)}  # fmt: skip
assert all((r - 1) / (4 * r + r - 1) < 0.2 for r in range(1, 100))
figures.bubble_curves(more, many, "modelled: bubble of GPipe, share of all time")

# %% [markdown] tags=["deeper"]
# *The figure: idle share over the number of micro-batches, a curve each for 2, 4, 8 and 16 ranks. Each starts at
# (p − 1)/p, the naive case, and falls; the same m/(p − 1) gives the same bubble.*

# %% [markdown] tags=["deeper"]
# ## 12. Interleaving and zero-bubble on real ranks · deeper
#
# The engine of section 6 runs interleaved schedules unchanged, because `placement` says on which rank a stage is. With
# v = 2 there are 2p stages, so the model needs at least 2p pieces (on more than four ranks it gets more layers).

# %% tags=["deeper"]
twice = 2 * world_size
deep = replace(gpt, layers=max(gpt.layers, twice - 2))
short = partition(stage_costs.piece_flops(deep), twice)
loop = interleaved(world_size, microbatches, 2)
alone = launch(one_process, deep, text, world_size=1, backend=backend)[0]
found = on_ranks(train, with_engine, [loop], deep, short, text, pace=None)
runs = [by_schedule["interleaved"] for by_schedule in found]
print("ours:", same_as_one_process(runs, alone))
count, _ = pipeline_training.total_messages(runs)
print(f"{count} messages, where 1F1B sends {2 * microbatches * (world_size - 1)}")
assert count == 2 * microbatches * (twice - 1)

# %% [markdown] tags=["deeper"]
# The library's schedules with several stages a rank take a list of stages. `ScheduleInterleavedZeroBubble` splits
# backward into I and W on real ranks.


# %% tags=["deeper"]
def several_stages(schedule, stages):
    from torch.distributed import pipelining

    places = [pipelining.PipelineStage(s, number, twice, device()) for number, s in stages.items()]
    make = getattr(pipelining, schedule.name)
    theirs = make(places, schedule.microbatches, loss_fn=next_token_loss)

    def step(x, y):
        losses, last = [], {"target": y} if twice - 1 in stages else {}
        theirs.step(*([x] if 0 in stages else []), **last, losses=losses)
        return sum(loss.item() for loss in losses) / schedule.microbatches

    return step


kinds = "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"
named = [replace(loop, name=kind) for kind in kinds]
found = on_ranks(train, several_stages, named, deep, short, text, pace=None)
for kind in kinds:
    runs = [by_schedule[kind] for by_schedule in found]
    print(f"{kind}:", same_as_one_process(runs, alone))
    assert pipeline_training.total_messages(runs)[0] == count

# %% [markdown] tags=["deeper"]
# Losses, gradients, weights and the number of messages are as in our engine. The library's interleaved schedule also
# takes some numbers of micro-batches that p does not divide, as Llama 3's own does. Others in the module are
# `ScheduleLoopedBFS`, in which all micro-batches pass one stage of a rank before its next, and `ScheduleZBVZeroBubble`
# and `ScheduleDualPipeV`, which fold the pipeline into a V, so that first and last stage share a rank.
#
# And on GPUs? torchtitan trained Llama 3.1 405B on 512 H100s, in pipelines of 8 ranks, with 32 sequences of a replica
# in a step. With 1F1B each GPU processed 100 tokens a second (*recorded*, its
# [page of December 2024](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md),
# table 5). The page does not say in how many micro-batches. Its code
# ([commit 9dec370](https://github.com/pytorch/torchtitan/blob/9dec370/torchtitan/parallelisms/pipelining_utils.py))
# takes as many as ranks, here 8, unless told otherwise, and two stages a rank for interleaving.
#
# **Predict** by the bubble alone: how many tokens a second with interleaved 1F1B?

# %% tags=["deeper"]
faster = predict("with interleaved 1F1B on 512 H100s", unit="tokens/s")

# %% tags=["deeper"]
for count in (8, 32):
    schedules = one_f_one_b(8, count), interleaved(8, count, 2)
    slow, fast = (simulate(schedule).period for schedule in schedules)
    print(f"{count:2} micro-batches: 100 × {slow:g}/{fast:g} = {100 * slow / fast:.0f} tokens/s")
print("published: 128 tokens/s")
faster.compare(128)

# %% [markdown] tags=["deeper"]
# **Compare.** With 8 micro-batches the bubble alone foretells 130, 2 % more than was published. With 32 it could not
# have been more than 110. So the default was probably used, and 1F1B idled for 7/15 of its time. By the same count 32
# micro-batches of one sequence would have made 1F1B half as fast again (15/8 against 39/32), if smaller kernels ran at
# the same rate (section 11).

# %% [markdown] tags=["deeper"]
# ## 13. Zero-bubble: backward in two halves · deeper
#
# Backward of a linear layer y = x·Aᵀ is two products of the same size. With ∂y for the gradient of y, I is ∂y·A and W
# is ∂yᵀ·x. Autograd can compute them one by one:

# %% tags=["deeper"]
torch.manual_seed(0)
layer, x, dy = torch.nn.Linear(6, 5), torch.randn(3, 6, requires_grad=True), torch.randn(3, 5)
y = layer(x)
(dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)  # I: now, another rank waits
dw, db = torch.autograd.grad(y, [layer.weight, layer.bias], dy)  # W: any time before the step
layer(x.detach()).backward(dy)
assert torch.allclose(dx, dy @ layer.weight) and torch.allclose(dw, dy.T @ x)
assert torch.allclose(dw, layer.weight.grad) and torch.allclose(db, layer.bias.grad)
print("I and W apart give what B gives together")

# %% [markdown] tags=["deeper"]
# What is left of the bubble? By the paper (*recorded*, Qi et al. 2023) a rank idles (p − 1)(F + I + W) in 1F1B,
# (p − 1)(F + I − W) in ZB-H1, and (p − 1)(F + I − 2W) in ZB-H2. They hold at most p, p, and 2p − 1 micro-batches.
#
# **Predict**: in a real layer I takes longer than W, because the products inside attention have no weights. And with
# full recomputation backward begins with another F, which counts as part of I. What do these two do to the idle shares
# of the three schedules?

# %% tags=["deeper"]
shares_of = ["smaller", "the same", "larger"]
returns = predict("ZB-H1's idle share, if W is shorter than I", shares_of)

# %% tags=["deeper"]
cases = {"equal": (1, 1, 1), "attention": (1, 1.25, 0.75), "recomputed": (1, 2, 1)}
for what, times in cases.items():
    runs = [simulate(make(p, m), Costs(*times)) for make in makes]
    shares = ", ".join(f"{run.schedule.name} {run.bubble:.1%}" for run in runs)
    print(f"{what:10} F, I, W = {times}: idle {shares}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
for ranks, count in itertools.product(range(2, 9), (16, 40)):
    for make, weights, peak in ((zero_bubble_h1, 1, ranks), (zero_bubble_h2, 2, 2 * ranks - 1)):
        zero = simulate(make(ranks, count))
        idle = zero.period - max(zero.busy)
        assert math.isclose(idle, (ranks - 1) * (1 + 1 - weights), abs_tol=1e-9)
        assert max(zero.peak) == peak
returns.compare("larger")

# %% [markdown] tags=["deeper"]
# **Compare.** The share of 1F1B stays, because its bubble is still p − 1 times F + I + W. But W is shorter compared
# with F and I, so in the zero-bubble schedules some bubble comes back. (The two cases agree: F + I − W is half of the
# work in both.)
#
# > **What changes on real GPUs.** Where W comes late, the layer's input and ∂y stay in memory between I and W, and a
# > kernel that computes both halves at once cannot be used. The paper reports up to 23 % more throughput than 1F1B with
# > the same memory, 31 % with more (*recorded*, Qi et al. 2023, abstract). It steps first, checks for overflow
# > afterwards, and undoes a wrong step.

# %% tags=["deeper"]
numbers = [4, 8, 16, 32, 64, 128]
kinds = {"GPipe": gpipe, "1F1B": one_f_one_b, "interleaved, v = 2": interleaved}
kinds |= {"ZB-H1": zero_bubble_h1, "ZB-H2": zero_bubble_h2}
bubbles = {name: [simulate(make(p, n)).bubble for n in numbers] for name, make in kinds.items()}
figures.bubble_curves(numbers, bubbles, "modelled: bubble of four ranks, F = I = W")

# %% [markdown] tags=["deeper"]
# *The figure: GPipe and 1F1B share the highest curve, from 43 % at 4 micro-batches down to 2 % at 128. Interleaved and
# below it ZB-H1 lie lower; ZB-H2 is at zero from 8 micro-batches on.*

# %% [markdown] tags=["deeper"]
# ## 14. Stages that are not equal · deeper
#
# The formulas suppose equal stages. Real ones are not, because the last has the head, a product with the whole
# vocabulary, and the loss. By its published configuration the head of Llama 3 8B has as many weights as 2.4 of its
# blocks. Take our model with a vocabulary of 6,144, whose head costs nearly five blocks.
#
# **Predict**: nine pieces in four stages, cut into equal *numbers* or by cost. For which share of the step do the ranks
# idle, if the numbers are equal?

# %% tags=["deeper"]
waiting = predict("idle with equal numbers of pieces", unit="%")

# %% tags=["deeper"]
wide = replace(gpt, vocabulary=6144)
wide_costs = stage_costs.piece_flops(wide)
block = wide_costs[1]
print(f"the head costs as much as {wide_costs[-1] / block:.1f} blocks")
equal = [len(part) for part in torch.arange(len(wide_costs)).tensor_split(world_size)]
cuts, unequal = {"equal numbers": equal, "by FLOPs": partition(wide_costs, world_size)}, []
for name, cut in cuts.items():
    work = [cost / block for cost in stage_costs.stage_sums(wide_costs, cut)]
    schedule = replace(one_f_one_b(world_size, microbatches), name=f"1F1B, {name}")
    unequal.append(simulate(schedule, Costs(work, work, work)))
    print(f"{name:13}: pieces {cut}, in blocks' work", *(f"{w:.1f}" for w in work))
figures.schedule_picture(unequal, "modelled: forward of a block = 1, B = 2 F")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert unequal[1].period <= unequal[0].period
waiting.compare(100 * unequal[0].bubble)

# %% [markdown] tags=["deeper"]
# **Compare.** For 55 % of it: all ranks wait for the slowest stage, so a step takes about m times the *slowest* and not
# m times the mean.
#
# *The figure: with equal numbers the last rank has no gap in the middle of the step, and all others wait for it again
# and again. Cut by FLOPs, with fewer blocks on the last rank, the step is shorter, and ranks idle 48 % of it instead of
# 55 %.*
#
# Unlike the bubble, this does not go away with more micro-batches. And a block cannot be halved, so some inequality
# stays.
#
# FLOPs are only an estimate. One large product, like the head's, does more FLOPs per second than many small ones, and
# the loss has hardly any FLOPs but takes time. So *measure* the stages, one by one on one rank:

# %% tags=["deeper"]
one_microbatch = [part[:per_microbatch] for part in text(0)]
measure = partial(launch, stage_costs.stage_seconds, wide, world_size=1, backend=backend)
times = {name: measure(cut, one_microbatch)[0] for name, cut in cuts.items()}

# %% tags=["deeper", "nbval-ignore-output"]
for name, pairs in times.items():
    forward, half = [f for f, _ in pairs], [b / 2 for _, b in pairs]
    model = simulate(one_f_one_b(world_size, microbatches), Costs(forward, half, half))
    took = ", ".join(f"{1e3 * sum(pair):.1f}" for pair in pairs)
    print(f"{name:13}: F + B measured {took} ms; 1F1B of these would idle {model.bubble:.0%}")

# %% [markdown] tags=["deeper"]
# With measured times of the *pieces* in place of FLOPs, `partition` gives the cut for your machine. Large runs do it by
# hand: Llama 3 removed one layer from the first stage and one from the last (*recorded*,
# [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.2).
#
# > **Misconception.** "Equal layers on each rank are a balanced pipeline." Time and memory need different cuts: rank 0
# > has the embedding's parameters and the most activations, the last rank the head's FLOPs and the logits.

# %% [markdown] tags=["deeper"]
# ## 15. A weight on two stages · deeper
#
# GPT-2 and many others **tie** embedding and head: one weight, used at both ends of the model. In a pipeline the two
# ends are on different ranks, so each has a copy, and each backward sees only its own part of the gradient. One process
# would add the two. So must the ranks: an all-reduce over a group of two, after every step's last backward.
#
# **Predict**: without it there is no error and no hang. What happens to the copies?

# %% tags=["deeper"]
copies = predict("the two copies", ["stay equal and right", "stay equal and wrong", "drift apart"])


# %% tags=["deeper"]
def tied_training(add, steps=3):
    """Losses, and this rank's copy of the shared weight at the end; `add` sums its gradients."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    schedule, ends = one_f_one_b(last + 1, microbatches), dist.new_group([0, last])
    stage = pipeline_training.build_stage(replace(gpt, tied=True), sizes, rank)
    step = with_engine(schedule, {rank: stage})
    optimizer = pipeline_training.sgd(stage.parameters())
    weight = next(stage.parameters()) if rank == 0 else [*stage.parameters()][-1]
    losses = []
    for number in range(steps):
        losses.append(step(*text(number)))
        if add and rank in (0, last):
            dist.all_reduce(weight.grad, group=ends)  # a sum
        optimizer.step()
        optimizer.zero_grad()
    return losses, weight.detach().cpu()


one = launch(one_process, replace(gpt, tied=True), text, world_size=1, backend=backend)[0]
for add in (True, False):
    first, *_, end = on_ranks(tied_training, add)
    off = max(abs(a - b) for a, b in zip(end[0], one.losses, strict=True))
    equal = torch.equal(first[1], end[1])
    print(f"added: {add!s:5}  copies equal: {equal!s:5}  losses of one process: {off < 1e-5}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
copies.compare("drift apart")

# %% [markdown] tags=["deeper"]
# **Compare.** Without the sum the two copies drift apart. That is another model, and no error says so.
#
# With it, the losses are those
# of one process: both copies start equal, get equal gradients and stay equal, as replicas in DDP do. The message is one
# gradient of the embedding in each step, as many numbers as the vocabulary times h.

# %% [markdown]
# ## Recap, with the numbers of this run

# %%
for schedule in plain:
    runs = by_name[schedule.name]
    held = ", ".join(f"{x:.0f}" for x in pipeline_training.weighed(runs, by_name["naive"]))
    count, _ = pipeline_training.total_messages(runs)
    share = simulate(schedule).bubble
    print(f"{schedule.name:6} idle {share:3.0%} modelled, {count} messages, held: {held}")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - One batch at a time, p stages have the speed of one rank. Micro-batches fill the pipeline: GPipe and 1F1B idle
#   (p − 1)/m of the ideal time, and 1F1B holds p − rank micro-batches where GPipe holds m.
# - Interleaving divides the bubble by v for more than v times the messages; zero-bubble fills it with W.
# - No rank waits for a send, and each direction has its own process group. A message is b·s·h numbers, to a neighbour.
#
# **Now you can answer**
#
# 1. Your pipeline of 8 ranks idles 30 %. Name two ways to halve that, and what each costs.
# 2. Why does 1F1B allow a smaller bubble, if its bubble is GPipe's?
# 3. Your own 1F1B hangs on GPUs, and GPipe does not. What do you look at?
# 4. The last rank is always busy and the others wait. What is wrong?
#
# <details><summary>Answers</summary>
#
# 1. More micro-batches, which needs a larger batch or smaller, slower kernels; or interleaving, which costs messages
#    and some memory (sections 3, 7).
# 2. It holds fewer activations, so more micro-batches fit (section 4).
# 3. Sends that wait for each other, or share a queue with the other direction (section 5).
# 4. The head: give the last stage fewer blocks (sections 1 and 14).
# </details>
#
# **Exercises:** [exercises/10_pipeline_parallel](../exercises/10_pipeline_parallel_exercises.ipynb). **Next:**
# [11 long context and experts](11_long_context_and_experts.ipynb), which splits the sequence.
#
# **Worth reading**
# - Y. Huang et al., *GPipe: efficient training of giant neural networks using pipeline parallelism*, 2019,
#   [arXiv 1811.06965](https://arxiv.org/abs/1811.06965): micro-batches and the bubble.
# - D. Narayanan et al., *Efficient large-scale language model training on GPU clusters using Megatron-LM*, 2021,
#   [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): interleaving, and which parallelism goes where.
# - P. Qi, X. Wan, G. Huang, M. Lin, *Zero bubble pipeline parallelism*, 2023,
#   [arXiv 2401.10241](https://arxiv.org/abs/2401.10241): backward in two halves.
