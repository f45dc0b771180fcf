# %% [markdown]
# # Exercises 10 · How do I split the layers, and where does the bubble go?
#
# Five exercises on [10 Pipeline parallelism](../notebooks/10_pipeline_parallel.ipynb). In the second you build a
# pipeline on real ranks; the others are about orders, cuts and numbers, without ranks. All of them take about 150
# minutes.
#
# **If you do only these:** 1, 2 and 4.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | the order of 1F1B | 2 of 5 | 20 |
# | 2 | an engine for any order | 4 of 5 | 50 |
# | 3 | stages of equal cost | 3 of 5 | 25 |
# | 4 | bubble and activations on paper | 2 of 5 | 15 |
# | 5 | a schedule of your own (puzzle) | 4 of 5 | 40 |
#
# Each stands alone. *Follows* on each card names the section of the lesson to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/10_pipeline_parallel_solutions.ipynb).
#
# **What a check does.** In Exercises 1 and 5 it simulates what you return, and takes every order with the right time
# and memory. In 2 it runs your engine on 1 to 4 real ranks in float64, with stages that note every call, and compares
# gradients with one process on the whole batch to 12 digits. Then it reads the **ledger** of what was sent: one message
# for each micro-batch, boundary and direction. It also counts the micro-batches that autograd keeps in memory. If the
# ranks wait for each other, it stops them within seconds and shows where each one stood.

# %% tags=["parameters"]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_utils import launch, record
from lessons.pipeline_parallel import check, figures
from lessons.pipeline_parallel.pipeline import Costs, Op, Schedule, simulate

WORLD_SIZE = 4  # ranks of the demonstrations; the checks choose their own


# {{receive}}


# %% [markdown]
# ---
# ## Exercise 1 · The order of 1F1B
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 20 | 10, 1F1B: what does it save? | as fast as GPipe; at most p - rank micro-batches held |
#
# A pipeline has p ranks, each with one stage, and m micro-batches. A rank may start a forward when the rank before it
# has done that forward, and a backward when the rank behind it has done that backward. In **1F1B** it runs some
# forwards ahead, and then does one forward and one backward in turn, until nothing is left.
#
# Write down the order of one rank. All ranks' orders are simulated together.


# %%
# {{one_f_one_b_order}}


# %%
check.one_f_one_b_order(one_f_one_b_order)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Draw 3 ranks and 5 micro-batches. The last rank turns round at once: F0 B0 F1 B1 …. How many forwards has the rank
# before it done when B0 reaches it?
# </details>
# <details><summary>Hint 2</summary>
#
# Rank r runs p - r - 1 forwards ahead. Then come pairs of F and B; the F of a pair is that many micro-batches ahead of
# its B. The backwards that are left end the list.
# </details>
# <details><summary>Hint 3</summary>
#
# With fewer micro-batches than that, run ahead by all of them: `ahead = min(microbatches, ranks - rank - 1)`.
# </details>
# <details><summary>Is it faster than GPipe?</summary>
#
# No: both take (m + p - 1)(F + B). GPipe holds m micro-batches on every rank, 1F1B holds p - rank. With the memory that
# this saves you can afford more micro-batches, and these make the bubble smaller.
# </details>

# %% [markdown]
# When your function passes, draw it.

# %%
orders = [one_f_one_b_order(rank, WORLD_SIZE, 6) for rank in range(WORLD_SIZE)]
operations = [tuple(Op(kind, rank, i) for kind, i in ops) for rank, ops in enumerate(orders)]
mine = Schedule("1F1B", 6, tuple(range(WORLD_SIZE)), tuple(operations))
figures.schedule_picture(simulate(mine), "simulated: my order, 6 micro-batches, B = 2 F")

# %% [markdown]
# *The figure: one row a rank, one box an operation with the number of its micro-batch. The first rank starts with
# four forwards, the last one takes a forward and a backward in turn from the beginning. Grey is idle time:
# before the first forward, between the forwards ahead and the first backward, between the last backwards, and after.*

# %% [markdown]
# ---
# ## Backward in two processes
#
# Autograd does not look through a message. So each rank has a graph of its own, which starts at a tensor that came in
# and ends at one that goes out. Below, both parts are in one process. Predict what is printed.

# %%
weight = torch.tensor(5.0, requires_grad=True)
y = weight * 2  # a stage; y is sent

x = y.detach().requires_grad_()  # the next stage; this is what arrives
loss = x**2
loss.backward()
print(f"x.grad {x.grad.item():g}, weight.grad {weight.grad}")

y.backward(x.grad)  # the first stage again; x.grad has been sent back
print(f"weight.grad {weight.grad.item():g}")

# %% [markdown]
# The loss is (2w)², so its derivative is 8w = 40. `x.grad` is the derivative with respect to the stage's input. It is
# all that the stage before needs to go on.

# %% [markdown]
# ---
# ## Exercise 2 · An engine for any order
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 50 | 10, Messages that wait for each other; One engine | equal to one process; m messages a cut each way |
#
# Each rank holds one stage. It gets a list of ("F", i) and ("B", i), such as Exercise 1 makes, and does them in order:
#
# - **F**: receive the activation from the rank before, call the stage, send the output on; the last rank computes the
#   loss;
# - **B**: receive the gradient of the output from the rank behind, continue backward, send the gradient of the input
#   back.
#
# Gradients add up over the micro-batches, and in the end they have to be those of the mean loss of the whole batch.
# Neighbours take forwards in the same order, and backwards too. The checks use the orders of GPipe and 1F1B, and one in
# which micro-batches come back **last in, first out**. After ("B", i) nothing of micro-batch i may stay in memory: not
# its graph, and not its input.
#
# | argument | what it is |
# |---|---|
# | `stage` | this rank's layers |
# | `order` | this rank's operations, such as [("F", 0), ("F", 1), ("B", 0), ("B", 1)] |
# | `inputs` | one entry for each micro-batch; on the first rank whole numbers that the stage embeds, else None |
# | `targets` | one entry for each micro-batch; on the last rank what `loss_fn` needs, else None |
# | `loss_fn` | `loss_fn(output, target)`: the mean loss of one micro-batch |
# | `like` | has the shape and dtype of what passes between stages; its contents mean nothing |
#
# The last rank returns the loss of the whole batch, the mean over the micro-batches; the others return None.


# %%
# {{run_order}}


# %%
check.run_order(run_order)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Loop over the order. In F, put input and output into a dictionary under i; in B, take them out with `pop(i)`. With one
# rank, the rank is the first and the last.
# </details>
# <details><summary>Hint 2</summary>
#
# What arrives: `x = receive(like, rank - 1).requires_grad_()`, with `receive` from the first cell. Backward of a stage
# in the middle: `y.backward(gradient)`, and `x.grad` is what the rank before waits for. On the last rank y is the loss
# of the micro-batch, and backward needs no argument.
# </details>
# <details><summary>Hint 3</summary>
#
# `loss_fn` gives the mean over one micro-batch, and backward adds up: divide by the number of micro-batches. Send with
# `dist.isend`, which starts the message and returns, keep what it returns in a list, and `wait()` for all of it at the
# end. `dist.recv` may wait, because the sender will get there without waiting for you.
# </details>
# <details><summary>Does this work with NCCL?</summary>
#
# Not always. There, all messages of a process group run one after the other on one stream, in the order in which each
# rank asked for them, and in 1F1B the orders of two neighbours do not match. Two process groups help, one for
# activations and one for gradients, or `batch_isend_irecv` for a send and a receive that belong together.
# `Schedule1F1B` of `torch.distributed.pipelining` does the second.
# </details>

# %% [markdown]
# When your function passes, count what it sends.


# %%
def count_messages(micro):
    torch.manual_seed(0)
    rank, n = dist.get_rank(), dist.get_world_size()
    stage = nn.Embedding(50, 16) if rank == 0 else nn.Linear(16, 50 if rank == n - 1 else 16)
    words, nothing = list(torch.arange(24).view(micro, -1)), [None] * micro
    inputs, targets = words if rank == 0 else nothing, words if rank == n - 1 else nothing
    order = [(kind, i) for kind in "FB" for i in range(micro)]  # GPipe's
    with record() as ledger:
        run_order(stage, order, inputs, targets, F.cross_entropy, torch.empty(24 // micro, 16))
    return ledger.messages, ledger.sent


for micro in (1, 4, 12):
    counts = launch(count_messages, micro, world_size=WORLD_SIZE, backend="gloo")
    print(f"{micro:>2} micro-batches:", ", ".join(f"{k} messages {b:,} B" for k, b in counts))

# %% [markdown]
# The bytes stay the same: more micro-batches are more messages, each smaller. The ranks in the middle send twice as
# much as those at the ends, an activation on and a gradient back.

# %% [markdown]
# ---
# ## Exercise 3 · Stages of equal cost
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 10, Stages that are not equal | no cut is better |
#
# All stages wait for the slowest, in every micro-batch. Layers are not alike: the head of a GPT multiplies by the whole
# vocabulary and can cost as much as several blocks. Cut a row of layers into stages so that the slowest stage is as
# fast as it can be. The layers keep their order.


# %%
# {{balance}}


# %%
check.balance(balance)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For the small cases here all places of the cuts can be tried: `itertools.combinations(range(1, layers), stages - 1)`.
# </details>
# <details><summary>Hint 2</summary>
#
# Faster: suppose you know the best way to cut the first k layers into one stage less, for every k. Which k is best if
# the last stage takes all layers from k on?
# </details>
# <details><summary>Hint 3</summary>
#
# Let best[k] be the cost of the slowest stage of the first k layers in s - 1 stages. That of the first n layers in s
# stages is the smallest max(best[k], costs[k] + … + costs[n - 1]) over all k. Begin with one stage, add one at a time,
# and keep the sizes beside each number.
# </details>
# <details><summary>And if the head costs more than a whole stage should?</summary>
#
# Then the best cut leaves the head alone on the last stage, and the others wait for it. Vocabulary parallelism cuts the
# head inside (lesson 09).
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · Bubble and activations on paper
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 15 | 10, Micro-batches: GPipe; Less bubble | per cent and GB, within 1 % |
#
# 32 micro-batches go through 8 ranks of equal speed. Backward takes twice as long as forward; messages take no time.
# What a rank's layers keep of one micro-batch for backward is 0.5 GB. Which share of **all the time** does a rank
# idle, and how much does **rank 0** hold at most, with
#
# - GPipe,
# - 1F1B,
# - interleaved 1F1B with 4 stages on each rank?
#
# The activations of a stage count from the start of its forward to the end of its backward. Interleaved, rank 0 runs
# 2(p - 1) + (v - 1)p forwards ahead before the first pair of forward and backward. Each of these forwards takes one
# micro-batch through one of the rank's v stages.


# %%
# {{bubble}}


# %%
check.bubble(bubble)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Let the forward and the backward of one stage take 1 together. How long does a rank work, and when does the last rank
# get its first input?
# </details>
# <details><summary>Hint 2</summary>
#
# Work takes m, the bubble p - 1: together m + p - 1. With v stages on each rank a step of the pipeline is 1/v as long.
# For the memory, count micro-batches in flight: F adds one, B gives it back; never more than m.
# </details>
# <details><summary>Hint 3</summary>
#
# Bubble: (p - 1)/(vm + p - 1). Memory: m for GPipe, min(m, p) for 1F1B. Interleaved, one forward more than those ahead
# makes v·p + p - 1 forwards, each holding 1/v of 0.5 GB.
# </details>
# <details><summary>What does interleaving cost?</summary>
#
# A little more memory, and more than v times the messages: each micro-batch crosses v·p - 1 boundaries, not p - 1. What
# it allows is a smaller batch: for a bubble of 3 % on 8 ranks 1F1B needs 227 micro-batches, and four stages on each
# rank 64 (in Megatron-LM's schedule their number is a multiple of p).
# </details>

# %% [markdown]
# ---
# ## Exercise 5 · A schedule of your own (puzzle)
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 40 | 10, Less bubble; Zero-bubble: backward in two halves | at most 59 ms and 5 activations on each rank |
#
# Four ranks, eight micro-batches. Backward comes in two parts: **I**, the gradient of the input, which the rank before
# waits for, and **W**, the gradient of the weights, which nobody waits for. F takes 2 ms, I takes 3 ms, W takes 1 ms;
# the products inside attention have no weights, so W is the shortest. F starts to hold one activation, and the end of W
# frees it. A B in one piece takes 4 ms, and holds the activation until its end.
#
# | | time | most activations held on a rank |
# |---|---|---|
# | 1F1B | 66 ms | 4 |
# | ZB-H1 | 60 ms | 4 |
# | ZB-H2 | 57 ms | 7 |
# | **yours** | **≤ 59 ms** | **≤ 5** |
#
# Every rank works for 48 ms. Where does the rest go, and which W can fill it?


# %%
# {{own_schedule}}


# %%
check.own_schedule(own_schedule)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with 1F1B and replace each B by I and W: 63 ms. The last rank decides when everyone else gets an I. What does it
# do between two of them that could wait?
# </details>
# <details><summary>Hint 2</summary>
#
# Describe a rank with two numbers: how many forwards it does before its first I, and how many micro-batches its W comes
# later than I. ZB-H1 has 4, 3, 2, 1 forwards, and 0, 1, 2, 3 for W. Both numbers together are what a rank holds.
# </details>
# <details><summary>Hint 3</summary>
#
# Five activations are one more than ZB-H1 has. Try every way to spend it on each rank, on a forward more or on a W that
# is one later: 2⁴ ways, and `simulate` gives the time of each at once.
# </details>
# <details><summary>What is the price of the last milliseconds?</summary>
#
# Schedules with two such numbers for each rank reach 60, 59 and 58 ms with 4, 5 and 6 activations; ZB-H2 reaches 57
# with 7. What remains is the filling and emptying of the pipeline, which matters less the more micro-batches there are.
# </details>

# %% [markdown]
# When your schedule passes, look at it.

# %%
orders = own_schedule()
operations = [tuple(Op(kind, rank, i) for kind, i in ops) for rank, ops in enumerate(orders)]
mine = Schedule("my own", 8, tuple(range(4)), tuple(operations))
figures.schedule_picture(simulate(mine, Costs(2, 3, 1)), "simulated: my own schedule", "ms")

# %% [markdown]
# *The figure: one row a rank, boxes for F, I and W with the number of the micro-batch. Later ranks do their W in a
# row at the end, where the first rank still has backwards to do. Grey is idle time.*
