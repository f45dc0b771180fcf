# %% [markdown]
# # Exercises 01 · Can you say how long it takes before you run it?
#
# Five exercises on [01 GPU interconnects](../notebooks/01_gpu_interconnects.ipynb). One runs on real ranks, two work
# on data, and two are sums with the figures of a data sheet, which are easy to misread. All of them take about 90
# minutes. **If you do only these:** 2, 3 and 5.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | a matrix product on the roofline | 2 of 5 | 15 |
# | 2 | α and β out of noisy measurements | 3 of 5 | 20 |
# | 3 | ping-pong between two ranks | 3 of 5 | 20 |
# | 4 | the widest path and its slowest link | 4 of 5 | 20 |
# | 5 | gradients on one node and on many | 3 of 5 | 15 |
#
# Each stands alone. *Follows* on each card names the section of the lesson that explains it.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints open
# one by one; solutions are in [the solutions notebook](../solutions/01_gpu_interconnects_solutions.ipynb).
#
# **What a check does.** It calls your function with other numbers than those of the text, so a result typed in by
# hand does not pass. In exercise 3 it runs your function on real ranks and reads the **ledger**: how many messages
# each rank sent, and how large they were. If ranks wait for each other, it stops them within seconds and shows where
# each one stood.

# %% tags=["parameters"]
import statistics
import time

import torch
import torch.distributed as dist

from course_utils import launch, record
from course_utils.topology import cluster, reference
from lessons.gpu_interconnects import check

WORLD_SIZE = 2  # ranks of the demonstration, 2 or more; the checks choose their own

# %% [markdown]
# ---
# ## Exercise 1 · A matrix product on the roofline
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 15 | 01, The roofline: who waits for whom? |
#
# An H100 multiplies a matrix of m × k by one of k × n, in bf16 (2 bytes a number). In training m is the number of
# tokens in a batch, thousands; when a language model writes one word after another for 8 users, m is 8. Weights of
# 4096 × 4096 make both. The data sheet says 1979 TFLOP/s in bf16, *with sparsity*, which doubles the figure of
# dense matrices, and a memory bandwidth of 3350 GB/s.
#
# Where is the **ridge point**, where is this product on the axis of arithmetic intensity, and how many TFLOP/s can it
# reach? Count each number of the three matrices as moved once, and a multiplication with its addition as two FLOP.


# %%
# {{roofline_point}}


# %%
check.roofline_point(roofline_point)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Each of the m·n results is a sum of k products: 2·m·n·k FLOP. Two matrices are read, one is written.
# </details>
# <details><summary>Hint 2</summary>
#
# Intensity is FLOP divided by **bytes**, and a number has two of them. The ridge is the dense peak divided by the
# bandwidth.
# </details>
# <details><summary>Hint 3</summary>
#
# Attainable is the lower of two roofs: the dense peak, and intensity × bandwidth.
# </details>
# <details><summary>What follows from the result?</summary>
#
# With 8 rows the product reaches under 3 % of what the GPU could do: to write one word the whole matrix is read.
# From about 345 rows on arithmetic is the limit. That is why servers gather requests into batches, and why more
# FLOP/s do not make a small batch faster.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · α and β out of noisy measurements
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 20 | 01, Measure: a message between two processes | α, β and predictions within 10 % |
#
# A message of S bytes takes about t(S) = α + β·S. Somebody has measured each size seven times. Now and then something
# else used the machine, and then a measurement took ten times as long. Here are some rows and columns of such a table,
# in microseconds:

# %%
sizes, seconds = check.measurements(alpha=20e-6, beta=1 / 50e9, noise=0.05)
for size, row in list(zip(sizes.tolist(), seconds, strict=True))[::3]:
    print(f"{size:>11,.0f} B  " + "  ".join(f"{t * 1e6:8.1f}" for t in row[:5].tolist()))

# %% [markdown]
# From the first row to the last the size grows 262,144 times, and the time about 270 times. So a line that is only 1
# % off at the last row is wrong there by more than twice α. **Predict**, before you write: what does an ordinary
# least-squares fit say about α?


# %%
# {{fit_and_predict}}


# %%
check.fit_and_predict(fit_and_predict)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# There are two problems. First make one time out of each row, so that a measurement that took ten times as long does
# not count.
# </details>
# <details><summary>Hint 2</summary>
#
# Then make every size count alike. 3 % of a second and 3 % of a microsecond should weigh the same: look at
# (α + β·S) / t, which should be 1 for every row.
# </details>
# <details><summary>Hint 3</summary>
#
# Rows (1/t, S/t), right-hand side all ones, `torch.linalg.lstsq(columns, ones[:, None]).solution`.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · Ping-pong between two ranks
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 20 | 01, Measure: a message between two processes | repeats + 1 messages of full size each way |
#
# In the lesson the package kept the time; here you do. The clocks of two machines do not agree to a microsecond, so
# you cannot note when a message leaves here and when it arrives there. But you can send it there **and back**, look
# at one clock, and take half. The first round trip also opens connections and warms caches, so it does not count. And
# the median of the others is not moved by a single slow round.
#
# This is what one such round trip leaves in the ledger of rank 0:


# %%
def there_and_back():
    x = torch.ones(1000)
    with record() as ledger:
        if dist.get_rank() == 0:
            dist.send(x, dst=1)
            dist.recv(x, src=1)
        elif dist.get_rank() == 1:
            dist.recv(x, src=0)
            dist.send(x, dst=0)
    return ledger


launch(there_and_back, world_size=WORLD_SIZE, backend="gloo")[0]

# %% [markdown]
# Write the measurement. The clock is an argument: `clock()` returns seconds, like `time.perf_counter`. The check
# passes one of its own, which a busy machine does not disturb, so it can tell whether your arithmetic is right.


# %%
# {{ping_pong}}


# %%
check.ping_pong(ping_pong)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Rank 0 sends and then receives; rank 1 receives and then sends. Other ranks have nothing to do.
# </details>
# <details><summary>Hint 2</summary>
#
# Note the time before and after **each** round trip, on rank 0. A `send` that has returned says little: the message
# may still be under way.
# </details>
# <details><summary>Hint 3</summary>
#
# `statistics.median(times[1:]) / 2`: without the first, and half, because a round trip is two messages.
# </details>
# <details><summary>And on GPUs?</summary>
#
# There a call returns when it is queued, not when it is done. `torch.cuda.synchronize()` belongs before each look
# at the clock, or CUDA events take its place. Otherwise you measure how fast Python can queue.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · The widest path and its slowest link
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 4 of 5 | 20 | 01, The path, and its slowest link |
#
# A machine is a list of links: two devices and the bandwidth one way, the same in both directions. Data may take
# any path. A path is as fast as its slowest link, the **bottleneck**. Find the path whose bottleneck is the fastest
# of all: a detour over NVLinks is better than a straight PCIe link. (NCCL looks for a way between two GPUs in the
# same spirit, but it goes through one other GPU at most, and it looks at the kind of link before its bandwidth.)
#
# These are the links of a reference machine from the lesson. The check uses small graphs first, and then two such
# machines.

# %%
workstation = [(link.a, link.b, link.bandwidth) for link in reference("pcie workstation").links]
print(*workstation, sep="\n")
nodes = cluster("dgx h100", 2)
print(f"two DGX H100: {len(nodes.devices)} devices, {len(nodes.links)} links")


# %%
# {{widest_path}}


# %%
check.widest_path(widest_path)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Forget hops. Imagine that you build the machine by plugging in one link after another, the fastest first. When are
# start and end connected for the first time?
# </details>
# <details><summary>Hint 2</summary>
#
# Or grow a set of devices from start: of all links that lead **out of the set**, always take the fastest, until end
# is in.
# </details>
# <details><summary>Hint 3</summary>
#
# A link leads out of the set if exactly one of its ends is in it: `(a in reached) != (b in reached)`. That also takes
# care of links that are listed the other way round, and of circles.
# </details>
# <details><summary>Which of the links taken is the bottleneck?</summary>
#
# Some were detours that led nowhere. So note for each device the link by which it was reached, walk back from end to
# start, and take the slowest link on the way.
# </details>

# %% [markdown]
# ---
# ## Exercise 5 · Gradients on one node and on many
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 3 of 5 | 15 | 01, What it costs training: one all-reduce |
#
# In each step N GPUs add up their gradients, 7 billion numbers of 2 bytes, which are S bytes on each GPU. The usual
# way lays **rings** through all GPUs. Then 2(N−1)/N · S bytes leave every GPU, as lesson 02 shows, and just as many
# leave every **node**, because each ring leaves it once. The rings spread over its ports.
#
# How long does that take, at least, on one node of 8 H100s with 900 GB/s of NVLink (as on the data sheet, both
# directions added)? How long on 16 such nodes with a single port of 100 Gb/s per node, as in some clouds? And with
# eight ports of 400 Gb/s each? GB are 10⁹ bytes; leave out latency.


# %%
# {{gradient_seconds}}


# %%
check.gradient_seconds(gradient_seconds)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Bytes first: how many leave a GPU with N = 8, and with N = 128? Then bring all bandwidths to bytes per second, one
# way: eight bits are a byte, and of the 900 GB/s half is for the other direction.
# </details>
# <details><summary>Hint 2</summary>
#
# On many nodes the data passes NVLink **and** the ports, at the same time, like water through two pipes in a row.
# Which one sets the pace?
# </details>
# <details><summary>Hint 3</summary>
#
# `min(450, 8 · 50)` GB/s on many nodes; 450 GB/s on one.
# </details>
# <details><summary>What follows from the result?</summary>
#
# With eight fast ports 16 nodes take 28 % longer than one: the time of a ring hardly grows with the number of GPUs,
# as long as bandwidth is all that counts. With one port of 100 Gb/s the same step takes 41 times as long as on one
# node. Then it pays to send less, or less often (lessons 04 and 05).
# </details>

# %% [markdown]
# ---
# ## What you have learnt
#
# - **Two roofs** (1): the dense peak, and bandwidth times intensity. A peak with sparsity is not for dense matrices.
# - **Two constants** (2) predict a link, if small and large messages weigh alike and single slow rounds do not count.
# - **Half of a round trip** (3) is the only honest way to time a message with clocks that do not agree.
# - **The slowest link** (4) of the best path sets the pace, and (5) a ring over nodes is as fast as its slowest link,
#   once all units agree: bits or bytes, one direction or both, one port or all.
