# %% [markdown]
# # Exercises 02 · Can you move the data with no byte too many?
#
# Six exercises on [02 collectives](../notebooks/02_collectives.ipynb). In three you write a function that runs on
# real ranks; in three you work out bytes and seconds on paper and let Python do the arithmetic. All of them take
# about 70 minutes. **If you do only these:** 1, 2 and 4.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | mean and variance in one all-reduce | 1 of 5 | 10 |
# | 2 | a shift round a ring, by any distance | 2 of 5 | 15 |
# | 3 | an all-gather of tensors of different lengths | 3 of 5 | 25 |
# | 4 | gradients over a network, on paper | 2 of 5 | 5 |
# | 5 | read a benchmark, on paper | 2 of 5 | 10 |
# | 6 | shards over NVLink, on paper | 3 of 5 | 5 |
#
# *Follows* on each card names the section of the lesson to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/02_collectives_solutions.ipynb).
#
# **What a check does.** It runs your function on real ranks, at several world sizes, with other numbers on each rank.
# It compares the result with that of one process, and then reads the **ledger** of each rank: which operations it
# called, and how many bytes they carried. A right result reached in the wrong way does not pass. If the ranks wait
# for each other, the check stops them within seconds and shows where each one stood.
#
# **How to look inside.** Run the function yourself, with prints, before you check it:
#
# ```python
# def look():
#     x = torch.arange(3.0) + dist.get_rank()
#     print(x, mean_and_variance(x))
#
# launch(look, world_size=2, backend="gloo")
# ```

# %% tags=["parameters"]
import torch
import torch.distributed as dist

from course_utils import attempt, launch, record
from lessons.collectives import check

WORLD_SIZE = 4  # ranks of the two demonstrations; the checks choose their own

# %% [markdown]
# Targets are given in the units of the ledger, so read one first: 1,000 float32 numbers are 4,000 bytes. How many
# bytes will the ledger note for each of the three calls?


# %%
def three_calls():
    x = torch.ones(1000)
    shards = torch.empty(dist.get_world_size() * 1000)
    with record() as ledger:
        dist.all_reduce(x)
        dist.broadcast(x, src=0)
        dist.all_gather_single(shards, x)
    return ledger


launch(three_calls, world_size=WORLD_SIZE, backend="gloo")[0]

# %% [markdown]
# The ledger counts the **message size** S of each call as nccl-tests does: the tensor for all-reduce and
# broadcast, the whole output for all-gather, the whole input for reduce-scatter, one tensor for send and recv.

# %% [markdown]
# ---
# ## Exercise 1 · Mean and variance in one all-reduce
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 1 of 5 | 10 | 02, Eight collectives | one all-reduce of 24 bytes |
#
# Every rank holds some numbers of one large data set: perhaps fewer than the others, perhaps none. Each rank
# should know the mean and the variance **of the whole data set**. Batch normalisation over ranks and logged
# training metrics need exactly this.
#
# A latency-bound call costs the same for 4 bytes and for 400, so put everything into one. Convert to float64
# before you square: the variance is a small difference of large sums.


# %%
# {{mean_and_variance}}


# %%
check.mean_and_variance(mean_and_variance)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which numbers can be added over ranks and still mean something? A mean cannot, a variance cannot. Three others
# can.
# </details>
# <details><summary>Hint 2</summary>
#
# Count, sum of x, and sum of x². The variance is the mean of the squares minus the square of the mean.
# </details>
# <details><summary>Hint 3</summary>
#
# `sums = torch.stack([x.new_tensor(x.numel()), x.sum(), (x * x).sum()])` after `x = x.double()`, then one
# `dist.all_reduce(sums)`.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · Debug this: a ring shift
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 15 | 02, Point to point | one message out, one in, on every rank |
#
# Each rank should give its tensor to the rank that stands `by` places to its right, and get that of the rank `by`
# places to its left. Ring algorithms repeat this step with `by=1`, and algorithms that double their reach take 2, 4,
# 8 … Somebody has cured the deadlock of the lesson with turns: even ranks send first, odd ranks receive first. With
# `by=1` it works. Before you run it with `by=2`, say where each of four ranks will be after 2 seconds.


# %%
def broken_ring_shift(x, by):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, dst=(rank + by) % n)
        dist.recv(received, src=(rank - by) % n)
    else:
        dist.recv(received, src=(rank - by) % n)
        dist.send(x, dst=(rank + by) % n)
    return received


def shift_own_rank(by):
    return broken_ring_shift(torch.tensor([dist.get_rank()]), by).item()


print("by 1:", launch(shift_own_rank, 1, world_size=WORLD_SIZE, backend="gloo"))
with attempt():
    print("by 2:", launch(shift_own_rank, 2, world_size=WORLD_SIZE, backend="gloo", timeout=2))

# %% [markdown]
# Write a version with messages only, without a collective. It must work for every number of ranks, also for one, and
# for every distance, also for one that leads round the ring and back to the rank itself.


# %%
# {{ring_shift}}


# %%
check.ring_shift(ring_shift)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# With gloo, `dist.send` returns when the receiver takes part. For `by=2`, draw an arrow from each of four ranks to the
# one that it sends to. Who of a circle of arrows receives first?
# </details>
# <details><summary>Hint 2</summary>
#
# Ranks 0 and 2 are a circle, and both send first; 1 and 3 are another, and both receive first. Either one rank of
# every circle begins with the other call, or each rank starts both and waits for both afterwards.
# `isend(...).wait()` in one line is no better than `send`.
# </details>
# <details><summary>Hint 3</summary>
#
# Make two `dist.P2POp`, one with `dist.isend` and one with `dist.irecv`, give both to `dist.batch_isend_irecv`,
# and wait for each request that it returns. A rank cannot send to itself, so `by % n == 0` is a case of its own.
# </details>
# <details><summary>Is gloo to blame?</summary>
#
# No. Some libraries buffer small messages: many MPI ones, and NCCL after the first exchange of two ranks. With them
# such a program works with small tensors and hangs with large ones. None promises it. A program is right only if it
# does not rely on a buffer.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · An all-gather of tensors of different lengths
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 02, Eight collectives | 2 collectives: at most 8·N bytes, then N times the longest tensor |
#
# Validation results, sentences, detected boxes: ranks often hold different numbers of rows, and everybody needs
# all of them. gloo's all-gather wants equal shapes, so this takes two steps.


# %%
# {{ragged_all_gather}}


# %%
check.ragged_all_gather(ragged_all_gather)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A rank cannot know how much to receive. What has to be exchanged first?
# </details>
# <details><summary>Hint 2</summary>
#
# Gather the N lengths as int64. Their maximum is the size to pad to, and they tell you where to cut afterwards.
# </details>
# <details><summary>Hint 3</summary>
#
# After the second `all_gather_single`, view the result as `(n, longest, d)` and take `part[:length]` of each.
# Give the shape in full: `-1` cannot be worked out when `longest` is 0.
# </details>

# %% [markdown]
# ---
# ## Exercises 4 to 6 · On paper
#
# Work out the formula by hand, then write it as a function of its arguments. The check calls it with the numbers of
# the text and with others. Answers within 1 % pass. Watch the units: **GB are bytes, Gb are bits**, and in link
# speeds both count in powers of ten.

# %% [markdown]
# ## Exercise 4 · Gradients over a network
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 5 | 02, How many bytes must each rank move? |
#
# A model of 7 billion parameters is trained on 16 GPUs, one per node, each with an InfiniBand port of 400 Gb/s. After
# every step the gradients, 2 bytes each, are all-reduced by a ring. How long does that take at least, if the links
# run at full speed and latency is zero?


# %%
# {{gradient_all_reduce_seconds}}


# %%
check.gradient_all_reduce_seconds(gradient_all_reduce_seconds)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three steps: S in bytes; the bytes that each rank sends in a ring; the bytes per second of a link.
# </details>
# <details><summary>Hint 2</summary>
#
# S = 14 GB. A ring all-reduce is a reduce-scatter and an all-gather; each sends (N−1)/N · S.
# </details>
# <details><summary>Hint 3</summary>
#
# 400 Gb/s are 50 GB/s.
# </details>

# %% [markdown]
# ## Exercise 5 · Read a benchmark
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 10 | 02, How long does it take? |
#
# *Recorded* on a node of 8 A100: an all-reduce of 1 GiB takes 8203.9 µs (stas00/ml-engineering,
# network/README.md). What are the **algorithm bandwidth** and the **bus bandwidth**? Write it for the other
# collectives too.


# %%
# {{bandwidths}}


# %%
check.bandwidths(bandwidths)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# algbw = S/t says how fast *your* data got done. busbw says how fast the busiest link had to be.
# </details>
# <details><summary>Hint 2</summary>
#
# busbw = algbw × factor, where the factor is the bytes that a rank sends divided by S. 1 GiB is 2³⁰ bytes; a GB/s
# is 10⁹ bytes per second.
# </details>
# <details><summary>Hint 3</summary>
#
# The factor is 2(N−1)/N for all-reduce; (N−1)/N for all-gather, reduce-scatter and all-to-all; 1 for broadcast
# and reduce.
# </details>

# %% [markdown]
# ## Exercise 6 · Shards over NVLink
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 3 of 5 | 5 | 02, How many bytes must each rank move? |
#
# The parameters of a model of 8 billion, 2 bytes each, are spread over 8 H100: 2 GB on each. The data sheet
# promises 900 GB/s of NVLink per GPU, the sum of both directions. How long does it take at least until every GPU
# has all parameters?


# %%
# {{all_gather_seconds}}


# %%
check.all_gather_seconds(all_gather_seconds)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Stand at one GPU and count the bytes that have to come in.
# </details>
# <details><summary>Hint 2</summary>
#
# Seven shards come in. While they do, the outgoing direction cannot help.
# </details>
# <details><summary>Hint 3</summary>
#
# (N−1) · shard divided by half the figure of the data sheet. With S = N · shard that is (N−1)/N · S: the factor
# of Exercise 5.
# </details>

# %% [markdown]
# ---
# ## What you have built
#
# - **Sums that can be added** (1): the pattern of synchronised batch normalisation and of every distributed
#   metric.
# - **A shift without deadlock** (2): the step of ring all-reduce, ring attention and pipelines.
# - **Ragged gathers** (3): evaluation, detection, and the routing of experts.
# - **Bytes before seconds** (4–6): the estimate to make before you believe a measurement.
