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
# # How does NCCL do it?
#
# Eight A100 GPUs add up 1 GiB in 8.2 ms (*recorded*, stas00/ml-engineering, network/README.md). The obvious program
# sends everything to one GPU, which adds it and sends the sum back. Over the same links, measured at 274 GB/s, that
# would take 55 ms (*modelled*), and with a thousand GPUs 8 seconds. So NCCL, NVIDIA's library of collectives, must do
# something better: one thing for small messages, another for large ones, and a third between nodes. You will build
# these algorithms, compute which of them NCCL picks, and read in its log how it uses your network.
#
# **You will be able to**
# - *build* the algorithms of a communication library out of messages between two ranks, and *prove* their bytes and
#   steps;
# - *predict* the time of each on one node, on two levels and on thousands of ranks, and say where they cross;
# - *explain* which algorithm and protocol NCCL picks for a size;
# - *read* in its log whether a job uses RDMA, and *judge* whether a bandwidth is what the machine should give;
# - *call* NCCL from C, and *watch* the calls of a running program (deeper).
#
# **Before this:** [01 interconnects](01_gpu_interconnects.ipynb), [02 collectives](02_collectives.ipynb). **Time:**
# about 45 minutes to read the core, 120 with the deeper sections, under a minute to run.

# %% [markdown]
# Imports and parameters:

# %% tags=["parameters"]
import numpy as np
import torch
import torch.distributed as dist

world_size = 4  # ranks of sections 1, 2, 7 and of most deeper ones: 2 to 8
virtual = (2, 4)  # nodes, and GPUs in each, of the emulated cluster
emulated_sizes = [2**k for k in (12, 15, 18, 21, 22, 24)]  # bytes: 4 KiB to 16 MiB
slowdown = 5000  # how much slower than the clock the slow motion is

# %%
from IPython.display import Markdown

from course_utils import costs, recorded
from course_utils.costs import all_reduce_seconds, format_bytes
from course_utils.hardware import LINKS
from course_utils.programs import SCRIPTS, torchrun
from course_utils.topology import two_level
from lessons.collectives.stepper import all_reduce_stepper
from lessons.nccl import c_programs, figures, nccl_logs, nccl_tuner
from lessons.nccl.explorer import algorithm_chooser
from lessons.nccl.fabric import emulated_seconds, slow_motion
from lessons.nccl.message_counts import as_nodes, count_messages, formula

# %% [markdown]
# ## 1. Through one rank, or round a ring
#
# A collective is a pattern of messages, each between two GPUs, and the pattern decides how long it takes. So we write
# the patterns ourselves. Each function below is an **all-reduce** of x, in place: afterwards every rank holds the sum
# over all ranks. None of them may call a collective. N is the number of ranks, S the bytes of the whole tensor.
#
# ### The root
#
# **Predict.** Everybody sends x to rank 0, which adds and sends the sum back to everybody. With eight ranks, how many
# bytes does rank 0 send?


# %%
def root_all_reduce(x):
    """Sum x over all ranks, in place, at rank 0."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(x, dst=0)
        dist.recv(x, src=0)
        return
    arriving = torch.empty_like(x)
    for peer in range(1, n):
        dist.recv(arriving, src=peer)
        x += arriving
    for peer in range(1, n):
        dist.send(x, dst=peer)


# %% [markdown]
# A right sum proves little, because wasteful programs give it too. So `count_messages` runs the function on real
# ranks, compares each sum with the library's to the last bit, and counts bytes and **steps** in the ledgers of lesson
# 02. A step is a round of messages that can travel at the same time: a rank sends at most one and receives at most one,
# and passes on only what came in an earlier step.

# %%
counted = {"root": count_messages(root_all_reduce, world_size)}
print(counted["root"])
assert counted["root"].busiest == world_size - 1

# %% [markdown]
# Rank 0 sends (N−1)·S: 3 S with four ranks, 7 S with eight, and as much arrives. Its link carries everything while
# the others wait, so the time grows in proportion to N.
#
# ### The ring
#
# To use all links at once, we put the ranks in a circle. Everyone sends to the neighbour on the right and receives
# from the one on the left, at the same time. The argument `ranks` lists who is in the circle, because section 4 makes
# smaller ones.


# %%
def neighbours(ranks=None):
    """My position in `ranks`, how many there are, and who is on my right and on my left."""
    ranks = list(ranks or range(dist.get_world_size()))
    me, n = ranks.index(dist.get_rank()), len(ranks)
    return me, n, ranks[(me + 1) % n], ranks[(me - 1) % n]


def exchange(outgoing, to, incoming, source):
    """Send `outgoing` to one rank while `incoming` is filled by another."""
    both = [dist.P2POp(dist.isend, outgoing, to), dist.P2POp(dist.irecv, incoming, source)]
    for request in dist.batch_isend_irecv(both):
        request.wait()


# %% [markdown]
# What should travel? Whole tensors would give the right sum, but then each rank sends (N−1)·S, as much as the root
# did. So the ring cuts x into N **pieces** and sends only pieces. In the first half, each piece goes round the circle
# and collects a summand at every rank, until the last one holds it complete: a **reduce-scatter**. In the second
# half, the complete pieces go round once more and are copied: an **all-gather**. With four ranks, piece 0 travels
# like this:
#
# ```text
# reduce-scatter: rank 1 ──> rank 2 ──> rank 3 ──> rank 0    each adds its own numbers
# all-gather:     rank 0 ──> rank 1 ──> rank 2 ──> rank 3    each keeps a copy
# ```
#
# So in the first step rank r sends piece r−1 (modulo N), and after N−1 steps piece r is complete on rank r.
# `tensor_split` makes the pieces. They are views, so adding to a piece changes x.


# %%
def ring_reduce_scatter(x, ranks=None):
    """Sum over `ranks`, in place: piece i of x is complete on the i-th of them. Return my piece."""
    me, n, right, left = neighbours(ranks)
    pieces = x.view(-1).tensor_split(n)
    for step in range(1, n):
        leaving, staying = pieces[(me - step) % n], pieces[(me - step - 1) % n]
        arriving = torch.empty_like(staying)
        exchange(leaving, right, arriving, left)
        staying += arriving  # now the sum of step + 1 ranks
    return pieces[me]


# %%
def ring_all_gather(x, ranks=None):
    """Piece i of x is right on the i-th of `ranks`; copy it to all of them, in place."""
    me, n, right, left = neighbours(ranks)
    pieces = x.view(-1).tensor_split(n)
    for step in range(n - 1):
        exchange(pieces[(me - step) % n], right, pieces[(me - step - 1) % n], left)


def ring_all_reduce(x, ranks=None):
    """Sum x over `ranks`, in place."""
    ring_reduce_scatter(x, ranks)
    ring_all_gather(x, ranks)


# %% [markdown]
# **Predict.** A ring of eight: how many steps, and how many bytes does each rank send? And a ring of 1,000?

# %%
counted["ring"] = count_messages(ring_all_reduce, world_size)
print(counted["ring"])
assert counted["ring"].steps == 2 * (world_size - 1)
assert set(counted["ring"].sent) == {2 * (world_size - 1) / world_size}

# %% [markdown]
# Follow one piece to see why. It must visit N−1 ranks to be summed, and then N−1 ranks to be copied. So each of the N
# pieces makes 2(N−1) hops of S/N bytes, and the N ranks share this work equally: **2(N−1) steps, and 2(N−1)/N·S from
# every rank**. With four ranks that is 6 steps and 1.5 S, with eight 14 and 1.75 S, with 1,000 it is 1,998 and 1.998
# S. If only ranks add, no algorithm lets its busiest rank send less (lesson 02). The price is the number of steps,
# which grows with N.
#
# Step through the messages and watch one piece:

# %%
stepper = all_reduce_stepper(min(world_size, 8))
stepper

# %% [markdown]
# *The widget: what every rank holds before and after the chosen step, with an arrow for each message. In a notebook
# that is not running it shows the first step of the ring.*
#
# > **What changes on real GPUs.** One **kernel**, a function that runs on the GPU, does the whole ring. It works in
# > slices, so that a rank adds one slice while the next one is arriving. And NCCL lays several rings, called
# > **channels**, through the same GPUs, each with its own part of the data and its own links.

# %% [markdown]
# ## 2. A tree, for small messages
#
# A message of a few bytes costs its latency, the time until it arrives at all, and almost nothing for the bytes. So
# for small tensors only the steps count, and a ring of 1,000 ranks has 1,998. A tree has far fewer, because first
# pairs add, then pairs of pairs, and after ⌈log₂ N⌉ steps rank 0 has the sum. The same messages backwards hand it
# out:
#
# ```text
# step 1:   0 <── 1    2 <── 3    4 <── 5    6 <── 7
# step 2:   0 <─────── 2          4 <─────── 6
# step 3:   0 <────────────────── 4                    then the same arrows backwards, the last first
# ```


# %%
def tree_all_reduce(x):
    """Sum x over all ranks, in place: up a binomial tree to rank 0, and down again."""
    rank, n, reach = dist.get_rank(), dist.get_world_size(), 1
    arriving = torch.empty_like(x)
    while reach < n:  # up: add what comes from `reach` places to the right
        if rank % (2 * reach) == reach:
            dist.send(x, dst=rank - reach)
        elif rank % (2 * reach) == 0 and rank + reach < n:
            dist.recv(arriving, src=rank + reach)
            x += arriving
        reach *= 2
    while reach > 1:  # down: the same messages backwards
        reach //= 2
        if rank % (2 * reach) == reach:
            dist.recv(x, src=rank - reach)
        elif rank % (2 * reach) == 0 and rank + reach < n:
            dist.send(x, dst=rank + reach)


counted["tree"] = count_messages(tree_all_reduce, world_size)
print(counted["tree"])
assert counted["tree"].steps == 2 * (world_size - 1).bit_length()

# %% [markdown]
# 2⌈log₂ N⌉ steps instead of 2(N−1): 20 instead of 1,998 for 1,000 ranks. But every message carries all of S, and
# after the first step half of the ranks wait. The ring has few bytes, the tree few steps. Section 9 builds algorithms
# that have both, and says why NCCL does not use them.

# %% [markdown]
# ## 3. What it costs
#
# Which one is faster, and from which size on? Lesson 01 fitted the time of one message: **t = α + β · its bytes**,
# with the latency α and the time per byte β. A step takes as long as its slowest message, and an algorithm as long as
# all its steps:
#
# | | latencies | bytes in sequence | time |
# |---|---|---|---|
# | root | 2 α | 2(N−1) S at rank 0 | 2α + 2(N−1)·βS |
# | ring | 2(N−1) α | 2(N−1)/N S | 2(N−1)·(α + βS/N) |
# | tree | 2⌈log₂N⌉ α | 2⌈log₂N⌉ S | 2⌈log₂N⌉·(α + βS) |
#
# <small>N ranks, S bytes of the whole tensor. The root has many steps but only two latencies: all ranks send at once,
# and only their bytes queue at rank 0.</small>
#
# The cell takes α = 14 µs, NCCL's own constant for a hop over the network, and 50 GB/s, one port of 400 Gb/s
# InfiniBand. All figures of this section are *modelled*.
#
# **Predict.** 4 KiB on 1,024 ranks: which is faster, ring or tree, and by what factor?

# %%
hop, wire = 14e-6, 50e9  # seconds, bytes per second
thousand = costs.flat_cluster(1024, hop, 1 / wire)
ring, tree = (all_reduce_seconds(name, 4096, thousand) for name in ("ring", "tree"))
print(f"4 KiB on 1,024 ranks: ring {ring * 1e3:.1f} ms, tree {tree * 1e3:.2f} ms")
print(f"the ring takes {ring / tree:.0f} times as long")
assert 100 < ring / tree < 104

# %% [markdown]
# The tree, by a factor of 102, because it waits for 20 latencies and the ring for 2,046. For large messages the ring
# wins, since it sends 2 S where the tree sends 20 S, one after another. In between they cross. Set the two times
# equal, with L = ⌈log₂N⌉, and you get **S = α/β · (N−1−L) / (L − (N−1)/N)**.

# %%
few_and_many = {f"{n:,} ranks": costs.flat_cluster(n, hop, 1 / wire) for n in (8, 1024)}
for title, cluster in few_and_many.items():
    n, levels = cluster.ranks, (cluster.ranks - 1).bit_length()
    crossing = hop * wire * (n - 1 - levels) / (levels - (n - 1) / n)
    ring, tree = (all_reduce_seconds(name, crossing, cluster) for name in ("ring", "tree"))
    assert abs(ring / tree - 1) < 1e-9
    print(f"{title}: the tree is faster up to {format_bytes(crossing)}")
figures.crossover(few_and_many, ["ring", "tree"], [2**k for k in (10, 15, 20, 25, 30)])

# %% [markdown]
# *The figure: time over size for 8 and for 1,024 ranks. The tree is below the ring to the left of the dotted line,
# and above it to the right. With more ranks the line moves from 1.3 MiB to 75 MiB.*
#
# ### Thousands of ranks
#
# Data-parallel training (DDP, lesson 04) sends gradients in buckets of 25 MiB. What happens to one bucket as the job
# grows? The figure also has NCCL's `double_tree`: S is cut into blocks that follow one another through two trees, so
# that a rank sends about 2 S, as in a ring, with the latency of a tree (section 10).

# %%
bucket = 25 * 2**20
growing = [costs.flat_cluster(2**k, hop, 1 / wire) for k in range(1, 13)]
largest = growing[-1]
waiting = all_reduce_seconds("ring", 0, largest) / all_reduce_seconds("ring", bucket, largest)
print(f"share of latency in a ring on {largest.ranks:,} ranks: {waiting:.0%}")
assert 0.98 < waiting < 1
figures.scale_out(growing, ["root", "ring", "tree", "double_tree"], sizes=(4096, bucket))

# %% [markdown]
# *The figure: time over ranks. For 4 KiB the ring rises in proportion to N and the trees hardly rise; for 25 MiB root
# and ring rise most, and the double tree stays near 1 ms.*
#
# The root needs O(N·S), and on 4,096 ranks the bytes alone take 4 seconds. The ring's bytes stay at 2 S, but its
# latencies grow until nothing else is left. This is **Amdahl's law** with latency as the part that faster links do
# not shorten: links of infinite speed would save only 1 % of the ring's time on 4,096 ranks. Hence trees, larger
# buckets, and two levels, which come next. (Do not believe the root's line for 4 KiB: the model lets any number of
# messages arrive at once.)

# %% [markdown]
# ## 4. Two levels, and a cluster in a notebook
#
# On a real cluster links are not equal: they are fast inside a node and slow between nodes. A **hierarchical**
# all-reduce keeps most bytes where the links are fast. With m nodes of g GPUs each it has three phases:
#
# ```text
#    node 0: GPUs 0 1 2 3                 node 1: GPUs 4 5 6 7
# 1. ring reduce-scatter in the node      the same                  each GPU then holds S/g of its node's sum
# 2. 0 <──> 4   1 <──> 5   2 <──> 6   3 <──> 7                      all-reduce of S/g over the slow links
# 3. ring all-gather in the node          the same
# ```


# %%
def hierarchical_all_reduce(x, per_node):
    """Sum x over all ranks, in place; ranks 0 … per_node - 1 are on the first node, and so on."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if n % per_node:
        raise ValueError(f"{n} ranks do not fill nodes of {per_node}")
    first = rank - rank % per_node
    node = range(first, first + per_node)
    same_place = range(rank % per_node, n, per_node)
    piece = ring_reduce_scatter(x, node)
    ring_all_reduce(piece, same_place)
    ring_all_gather(x, node)


# %% [markdown]
# Each rank sends as much as in a flat ring, 2(N−1)/N·S. But only 2(m−1)/m·S/g of it crosses the slow link, and every
# GPU uses its own network port for that. So the time is 2(g−1)·(α + βS/g) with α and β of the link in the node, plus
# 2(m−1)·(α + βS/N) with those of the link between nodes.
#
# Few of us have two nodes to try this on, so we **emulate** them. The functions run unchanged on eight real ranks and
# send real messages, while a virtual clock decides how long each would have taken: a link carries the bytes of one
# message at a time in each direction, and the message arrives one latency later. Our cluster has two nodes of four
# GPUs, NVLink 4 inside, and one 400 Gb/s InfiniBand port for each GPU between them.
#
# **Predict.** 4 MiB: one ring over all eight GPUs, a tree, or the hierarchical algorithm? Which is fastest, and by
# what factor?


# %%
def hierarchical_on_nodes(x):
    hierarchical_all_reduce(x, virtual[1])


links = [(LINKS[kind].latency, 1 / LINKS[kind].bandwidth) for kind in ("nvlink4", "ib_ndr")]
two_nodes = two_level(*virtual, *links)
contenders = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "hierarchical": hierarchical_on_nodes,
}
emulated = emulated_seconds(contenders, two_nodes, emulated_sizes)
at_4_mib = {name: seconds[emulated_sizes.index(2**22)] for name, seconds in emulated.items()}
for name, seconds in at_4_mib.items():
    print(f"4 MiB, {name:13}{seconds * 1e6:6.1f} µs (emulated)")
assert 1.9 < at_4_mib["ring"] / at_4_mib["hierarchical"] < 2.3

# %% [markdown]
# Two levels, about twice as fast as one ring. Why does the ring lose? All 14 messages from one node to the other,
# 1.75 S, leave by the same port, while three ports send nothing. The hierarchical algorithm sends S/4 through each of
# the four ports. Microseconds are hard to feel, so here are the same messages in slow motion:

# %% tags=["nbval-ignore-output"]
slow_motion(contenders, two_nodes, 2**22, slowdown)

# %% [markdown]
# And over all sizes, with the formulas as lines:

# %%
cluster = costs.cluster_of(two_nodes)


def model(name, size):
    return all_reduce_seconds(name, size, cluster)


for name, seconds in emulated.items():
    for size, t in zip(emulated_sizes, seconds, strict=True):
        assert abs(t / model(name, size) - 1) < 0.01
figures.model_against_emulation(emulated_sizes, emulated, model)

# %% [markdown]
# *The figure: three curves, flat to the left and straight to the right. The tree is lowest up to about 160 KiB, the
# hierarchical algorithm from there on. The ring begins highest; above 1 to 2 MiB the tree is highest.*
#
# The formulas were written down before anything ran, and they agree within 1 %. So they count the messages of our
# programs correctly. Whether real links obey the emulation's rules is another question.
#
# > **What changes on real GPUs.** NCCL's rings use all ports: it lays one ring through each port, with a share of S.
# > Then two levels only save latency: 2(g−1) + 2(m−1) hops instead of 2(N−1). NCCL's `Tree` has two levels too, with
# > a chain of GPUs in each node and a tree between the nodes.

# %% [markdown]
# ## 5. Protocols, and how NCCL chooses
#
# A GPU writes into the memory of its neighbour. How does the neighbour know that everything has arrived? Writes may
# become visible out of order. NCCL has three answers, its **protocols**:
#
# ```text
# Simple   [ data data data … data ]  wait until all is visible, then  [flag]
# LL       [data flag] [data flag] [data flag] …    stores of 4 + 4 bytes, each arrives as a whole
# LL128    [data data … data flag] …                lines of 120 + 8 bytes
# ```
#
# **Simple** sends almost only data, but each step has to wait: a *memory fence*. **LL** (low latency) needs no fence,
# because whoever sees a flag has the data beside it, but half of its bytes are flags. **LL128** wastes little, but
# needs its 128 bytes to arrive in order. Where they do not, it silently delivers wrong numbers, so never force it
# (NVIDIA/nccl issues [281](https://github.com/NVIDIA/nccl/issues/281),
# [786](https://github.com/NVIDIA/nccl/issues/786)).
#
# NCCL knows their costs from a table of constants, *recorded* here from src/graph/tuning.cc. For rings:
#
# | microseconds | LL | LL128 | Simple |
# |---|---|---|---|
# | once, before the first hop | 6.6 | 14 | 8.4 |
# | each hop over NVLink | 0.6 | 1.9 | 3.4 |
# | each hop over the network | 2.7 | 4.0 | 14 |
# | share of the bandwidth | 1/2 | 0.92 | 1 |
#
# Before every collective NCCL computes for each pair of algorithm and protocol t = latency + S/bandwidth, and takes
# the pair with the smallest. `nccl_tuner` does the same with the same constants; its docstring lists what it leaves
# out. **Predict**: which protocol does it take for 64 KiB on eight A100s, and why?

# %%
a100 = nccl_tuner.MACHINES["8 x A100"]
for protocol in ("LL", "LL128", "Simple"):
    start = nccl_tuner.latency(("ring", protocol), a100)
    rate = nccl_tuner.bandwidth(("ring", protocol), a100)
    t = nccl_tuner.predict(2**16, a100)["ring", protocol]
    parts = f"{start * 1e6:5.1f} µs, then {rate / 1e9:5.1f} GB/s"
    print(f"ring / {protocol:7}{parts}: {t * 1e6:5.1f} µs for 64 KiB")
assert nccl_tuner.choose(2**16, a100) == ("ring", "LL")

# %% [markdown]
# LL, although half of its bytes are flags. (Its bandwidth is below half of Simple's, because NCCL caps it.) The
# ring's 14 hops take 15 µs without a fence and 56 µs with one, and the bytes about one microsecond. Larger messages
# pay for wasted bytes, so each protocol is best for some size. Is the model right about real time, too? Here are
# sixteen sizes on eight A100s, *recorded* (stas00/ml-engineering, network/README.md), beside times from NCCL's own
# constants, of which none was fitted to this table.

# %%
a100_table = recorded.A100_ALL_REDUCE
published = nccl_tuner.errors(a100_table, a100)
choices = [" / ".join(nccl_tuner.choose(size, a100)) for size in a100_table.sizes]
predicted = {"published": (1 + published) * np.array(a100_table.seconds)}
print(f"median error, without sign: {np.median(abs(published)):.0%}")
assert min(published) > -0.75 and max(abs(published[-3:])) < 0.05
figures.predicted_against_recorded(a100_table, predicted, choices)

# %% [markdown]
# *The figure, left: recorded times as points, the prediction as a line, with NCCL's choice where it changes. Right:
# the same as bus bandwidth, with a dip of the points at 16 MiB. Below: the error of the time; the grey band is 15 %.*
#
# The largest messages are right within a few percent, but small ones really take three times as long as NCCL
# believes. That does little harm, because a choice needs only the right order: if LL and LL128 both take 20 µs more,
# the same one wins. And 16 MiB take more than twice as long as 8 MiB (276.6 and 133.5 µs), which no latency +
# S/bandwidth explains. It looks like a switch of protocol that comes too early (section 12).
#
# > **Misconceptions.** "Bus bandwidth grows with the size." It dips wherever the library switches too early or too
# > late, so measure the sizes that your job sends. "Bus bandwidth is the speed of a wire." Where switches add, as
# > NVLink's can, it may be higher (section 8).
#
# Leave `NCCL_ALGO` and `NCCL_PROTO` alone in a job. They force a choice. That is good for an experiment, but the next
# version, size or node count may need another one.

# %% [markdown]
# ## 6. What did NCCL decide? Its log
#
# A job on two nodes is slow. NCCL knows why, because before the first collective it finds out which network there is
# and how to reach each neighbour. But it stays silent unless asked:
#
# ```bash
# NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH NCCL_DEBUG_FILE=nccl.%h.%p.log torchrun ...
# ```
#
# Such a log has thousands of lines, in one file per process. Those that matter most show connections. In
# `Channel 04/0 : 1[1] -> 3[1] … via NET/IB/2` rank 1 sends to rank 3 on channel 4, through network card 2; brackets
# hold the GPU. `SHM` is shared host memory. **RDMA** means that a card reads and writes memory without the processor
# (lesson 01).
#
# **Predict.** Four jobs from public reports (linked in section 15), two *recorded* lines of each. Which of them use
# RDMA? Which one is as fast as it should be?

# %%
for name, log in nccl_logs.LOGS.items():
    print(f"{name}:", *log.splitlines(), sep="\n   ")

# %%
verdicts = {name: nccl_logs.network(log) for name, log in nccl_logs.LOGS.items()}
for name, says in verdicts.items():
    print(f"{name:15} {says}")
assert [*verdicts.values()] == [
    "GPUDirect RDMA",
    "TCP",
    "RDMA from host memory",
    "one node, GPUs through host memory",
]

# %% [markdown]
# Only the first is as fast as it should be. `GDRDMA` means that the card reads the GPU's memory itself. In the second
# job NCCL found no InfiniBand device and fell back to TCP, without an error. The third has RDMA, but its bytes make a
# detour through host memory. In the last, eight GPUs on an NVSwitch talk through host memory. None of these jobs
# fails. They are slow, and only the log says why. Section 15 reads more lines, and section 16 has the variables to
# change.
#
# PyTorch makes NCCL's **communicator**, the connections between a fixed set of ranks, when the first collective runs.
# So a broken network shows only somewhere in the first step. With this start it shows at once:
#
# ```python
# device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
# torch.cuda.set_device(device)
# dist.init_process_group("nccl", device_id=device, timeout=timedelta(minutes=5))
# ```
#
# With `device_id=`, `barrier` also knows its GPU, and sub-groups are split from this communicator
# ([documentation](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group)). The
# timeout belongs here too: NCCL has no variable for it.

# %% [markdown]
# ## 7. What to take to work
#
# [`scripts/busbw.py`](../scripts/busbw.py) is a complete program that needs only PyTorch. It starts as above,
# measures all-reduces of growing sizes and prints algorithm and bus bandwidth. If these are what the machine should
# give (section 17), the network is not to blame. It times *sums* of float32, as nccl-tests does by default. If
# nccl-tests gets more on the same hosts, look at PyTorch.
#
# <details><summary>Why sums?</summary>
#
# For float32, NCCL lets NVLink switches add (section 8), but not compare or average: `ncclNvlsSupported` in
# [device.h](https://github.com/NVIDIA/nccl/blob/master/src/include/device.h), NCCL 2.30. Whoever times a maximum
# measures a ring or a tree instead, and eight H100s look too slow.
# </details>

# %%
Markdown(f"```python\n{(SCRIPTS / 'busbw.py').read_text()}```")

# %% [markdown]
# Here it runs under `torchrun`, on CPU ranks:

# %% tags=["nbval-ignore-output"]
said = torchrun("busbw.py", "--largest", 2**22, "--calls", 5, ranks=world_size, gpus=False)
print(said)
assert said.startswith(f"{world_size} ranks, gloo") and len(said.splitlines()) == 9

# %% [markdown] tags=["deeper"]
# ## 8. When the switch adds · deeper
#
# Eight H200 GPUs have links of 450 GB/s each way. At 16 GiB NCCL's benchmark reports a bus bandwidth of 482 GB/s for
# them (*recorded*, stas00/ml-engineering). **Predict**: how can that be?
#
# Bus bandwidth is S/t times 2(N−1)/N, whatever the library did. The cell divides recorded values at 8 GiB by that
# factor to get S/t. Its last column multiplies S/t by another factor, (N+1)/N. What could that one stand for?

# %% tags=["deeper"]
print("GPUs   busbw (recorded)   S/t   (N+1)/N of it")
for n, rate in recorded.H200_NVLS_BY_GPUS.items():
    if n > 4:  # with four GPUs NCCL took a ring
        speed = rate / 1e9 / costs.busbw_factor("all_reduce", n)
        on_the_wire = speed * (n + 1) / n
        print(f"{n:4}{rate / 1e9:14.0f} GB/s{speed:11.0f}{on_the_wire:15.0f} GB/s of 450")
        assert 0.67 < on_the_wire / 450 < 0.70
as_if_ring = on_the_wire / (5 / 4) * costs.busbw_factor("all_reduce", 4)
print(f"so 4 GPUs would show {as_if_ring:.0f} GB/s with NVLS; recorded, with a ring: 363 GB/s")

# %% [markdown] tags=["deeper"]
# (N+1)/N·S is what a GPU sends if the *switch* adds. The NVLink switches of Hopper and later GPUs can do that
# (**NVLS**, or NVLink SHARP), and some InfiniBand switches too (**SHARP**). Every GPU sends all of S to the switch,
# and S/N of sums comes back to each. Then each GPU sends its finished piece to the switch, which copies it to
# everybody. Together that is **(N+1)/N·S** (NVIDIA/nccl issue [1083](https://github.com/NVIDIA/nccl/issues/1083))
# instead of 2(N−1)/N·S. So the wire carries 304 to 310 GB/s whatever N is, and bus bandwidth shows 2(N−1)/(N+1) times
# that: 1.56 times with eight GPUs, 1.2 times with four. A ring uses the wire better, 367.6 of 450 GB/s (*recorded*,
# same file), but with eight GPUs it has to send 1.56 times the bytes. With four the two tie, and NCCL takes the ring.
#
# > **Misconception.** "482 of 450 GB/s: the table is wrong, or the link is faster than its data sheet." Bus bandwidth
# > is the speed that a link would need *if ranks alone did the adding*. Where the network adds, it is not the speed of
# > any wire.

# %% [markdown] tags=["deeper"]
# ## 9. Few bytes and few steps: exchanges · deeper
#
# First the mistake that section 1 only named, because it is so common: pass whole tensors round the circle and add
# each one that arrives.


# %% tags=["deeper"]
def whole_tensors_round_a_ring(x):
    """Sum x over all ranks, in place, at (n-1) S bytes a rank: right and wasteful."""
    _, n, right, left = neighbours()
    passing = x.clone()
    for _ in range(n - 1):
        arriving = torch.empty_like(x)
        exchange(passing, right, arriving, left)
        x += arriving
        passing = arriving


wasteful = count_messages(whole_tensors_round_a_ring, world_size)
print(wasteful)
assert set(wasteful.sent) == {world_size - 1}

# %% [markdown] tags=["deeper"]
# > **Misconception.** "Passing tensors round a ring is ring all-reduce." The result is right and no rank is a
# > bottleneck, but each sends (N−1)·S. And with floating-point numbers every rank adds in another order, so their
# > sums differ in the last bits, and models that should be equal drift apart.
#
# ### Recursive doubling
#
# In a tree half of the ranks wait. If two partners *exchange* instead, both add in each step: first at distance 1,
# then 2, 4, and so on. After log₂ N steps everybody has the sum. This needs a power of two, so other numbers of ranks
# are **folded** first: each rank beyond the power of two sends its x to a partner first, and gets the result from it
# at the end.


# %% tags=["deeper"]
def folded(x, algorithm):
    """Run `algorithm(x, power)` on the largest power of two; others have a partner there."""
    rank, n = dist.get_rank(), dist.get_world_size()
    power = 1 << (n.bit_length() - 1)
    if rank >= power:
        dist.send(x, dst=rank - power)
        dist.recv(x, src=rank - power)
        return
    partner = rank + power
    if partner < n:
        arriving = torch.empty_like(x)
        dist.recv(arriving, src=partner)
        x += arriving
    algorithm(x, power)
    if partner < n:
        dist.send(x, dst=partner)


# %% tags=["deeper"]
def doubling(x, power):
    """Sum x over the first `power` ranks, in place: partners exchange everything."""
    rank, reach = dist.get_rank(), 1
    arriving = torch.empty_like(x)
    while reach < power:
        exchange(x, rank ^ reach, arriving, rank ^ reach)
        x += arriving
        reach *= 2


# %% [markdown] tags=["deeper"]
# That has half the steps of the tree, but every rank sends all of x in each.
#
# ### Recursive halving and doubling
#
# To save bytes, partners exchange *halves*: each keeps one half of what it has and sends the other one to its
# partner. The messages shrink from S/2 to S/N. Then each rank holds the sum of one piece, so this is a reduce-scatter
# in log₂ N steps. The same messages backwards are the all-gather.


# %% tags=["deeper"]
def halving_and_doubling(x, power):
    """Sum x over the first `power` ranks, in place: halves, quarters, … and back."""
    rank, flat, reach, done = dist.get_rank(), x.view(-1), 1, []
    low, high = 0, x.numel()
    while reach < power:
        middle = (low + high) // 2
        kept, given = slice(low, middle), slice(middle, high)
        if rank & reach:
            kept, given = given, kept
        arriving = torch.empty_like(flat[kept])
        exchange(flat[given], rank ^ reach, arriving, rank ^ reach)
        flat[kept] += arriving
        done.append((rank ^ reach, kept, given))
        low, high, reach = kept.start, kept.stop, 2 * reach
    for partner, kept, given in reversed(done):
        exchange(flat[kept], partner, flat[given], partner)


# %% tags=["deeper"]
def recursive_doubling_all_reduce(x):
    """Sum x over all ranks, in place."""
    folded(x, doubling)


def halving_doubling_all_reduce(x):
    """Sum x over all ranks, in place."""
    folded(x, halving_and_doubling)


# %% [markdown] tags=["deeper"]
# **Predict** for `world_size` ranks: steps and bytes of the busiest rank, for each of the two. The cell counts all
# algorithms (the hierarchical one as if the ranks were on several nodes), and compares the counts with the formulas
# of `costs`.


# %% tags=["deeper"]
def hierarchical(x):
    hierarchical_all_reduce(x, as_nodes(dist.get_world_size())[1])


algorithms = {
    "root": root_all_reduce,
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "recursive_doubling": recursive_doubling_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
    "hierarchical": hierarchical,
}
print(f"{world_size} ranks{'steps':>18}{'S sent by the busiest':>24}")
for name, all_reduce in algorithms.items():
    count = count_messages(all_reduce, world_size)
    steps, sent = formula(name, world_size)
    assert count.steps == steps and abs(count.busiest - sent) < 1e-9
    print(f"{name:20}{count.steps:5}{count.busiest:20.3f}")

# %% [markdown] tags=["deeper"]
# For a power of two, recursive doubling takes log₂ N steps of S, and halving/doubling 2 log₂ N steps with the ring's
# 2(N−1)/N·S: the ring's bytes in the tree's steps. In time they are log₂N·(α + βS) and 2 log₂N·α + 2(N−1)/N·βS. The
# course's tests run all of these functions on 1 to 6 ranks, with tensors of 0 to 1,000 numbers of three types.
#
# <details><summary>What does folding cost with three ranks, or with 1,000?</summary>
#
# Two more steps of S, whichever algorithm runs in between, and the partner of a folded rank sends S more. With 1,000
# ranks, 488 are folded onto 488 of the others, and the bytes of the busiest rank grow from 2 S to 3 S.
# </details>
#
# So why does NCCL not use halving/doubling? The answer lies outside this model, so take it as reasoning, not as
# measurement. In a ring or a tree a GPU keeps the same two or three neighbours, and a kernel streams small slices to
# them without a pause. In halving/doubling the partner changes at every step, far ones are among them, and the next
# exchange can start only when the one before is complete. (NCCL's PAT has logarithmically many steps for all-gather
# and reduce-scatter, so far only on nodes of one GPU, [arXiv 2506.20252](https://arxiv.org/abs/2506.20252).)

# %% [markdown] tags=["deeper"]
# ## 10. Two trees at once · deeper
#
# A tree can do better than 2⌈log₂N⌉·βS. Cut S into blocks and let them follow each other: while one block goes up
# from the second level, the next one starts at the lowest level. Then the latency of the whole tree is paid once, and
# the time depends on the busiest rank. In a **binary** tree this rank receives S from each of two children, while
# half of the ranks are leaves and receive nothing on the way up. The **double binary tree** (Sanders, Speck and Träff
# 2009) puts these leaves to work: it has two trees, each for one half of S, and a rank that has children in one is a
# leaf of the other. For an even number of ranks the second tree is the mirror image of the first; for an odd one it
# would be shifted by one rank.


# %% tags=["deeper"]
def parents(n):
    """A binary tree of n ranks, the even ones its leaves: each rank's parent, -1 for the root."""
    tree = []
    for place_from_1 in range(1, n + 1):
        bit = place_from_1 & -place_from_1  # the lowest 1 among its bits: the level
        above = (place_from_1 ^ bit) | (2 * bit)
        tree.append((above if above <= n else place_from_1 ^ bit) - 1)
    return tree


def mirrored(tree):
    return [-1 if up < 0 else len(tree) - 1 - up for up in reversed(tree)]


first = parents(8)
second = mirrored(first)
for name, tree in {"first": first, "second": second}.items():
    inner = {up for up in tree if up >= 0}
    print(f"{name:7} parent of each rank: {tree}, ranks with children: {sorted(inner)}")
assert not {up for up in first if up >= 0} & {up for up in second if up >= 0}

# %% [markdown] tags=["deeper"]
# No rank has children in both. So a rank sends at most two halves on the way up and two on the way down: 2 S, as in a
# ring, with the latency of a tree. (The `double_tree` of section 3 assumes no gap between blocks.) This is NCCL's
# `Tree`. It connects *nodes*; in a node the GPUs form a chain (NVIDIA/nccl issues
# [448](https://github.com/NVIDIA/nccl/issues/448), [1103](https://github.com/NVIDIA/nccl/issues/1103)).

# %% [markdown] tags=["deeper"]
# ## 11. Other wires: one network card for the node · deeper
#
# In section 4 every GPU had a port of its own. Cheaper nodes have one for all four GPUs. **Predict**: which of the
# three algorithms gets slower at 4 MiB?

# %% tags=["deeper"]
shared = two_level(*virtual, *links, nics="node")
one_card = emulated_seconds(contenders, shared, [2**22])
print(f"{'µs, 4 MiB':14}{'a port each':>12}{'one port':>12}{'model of it':>12}")
for name in contenders:
    modelled = all_reduce_seconds(name, 2**22, costs.cluster_of(shared))
    times = at_4_mib[name], one_card[name][0], modelled
    print(f"{name:14}" + "".join(f"{t * 1e6:12.1f}" for t in times))
assert abs(one_card["ring"][0] / at_4_mib["ring"] - 1) < 1e-6
assert one_card["hierarchical"][0] > 1.5 * at_4_mib["hierarchical"]
assert one_card["hierarchical"][0] < one_card["ring"][0]

# %% [markdown] tags=["deeper"]
# Only the hierarchical one, because only it used the other ports. But it still sends only S through the port where
# the ring sends 1.75 S, so it stays ahead. What an algorithm gains depends on the wires.
#
# Here the model is 11 % too slow. It adds up two latencies between the nodes, one for each step. But while the port
# is busy with the message of one GPU, the latency of another GPU's message passes at the same time, so one of the two
# latencies, 14 µs, is hidden. A simple formula stops being exact where messages queue.
#
# > **What changes on real GPUs.** On four nodes with eight H200 each a ring reached 364.7 GB/s bus bandwidth at 4 GiB,
# > nearly the 367.6 of a single node, and `NVLSTree` 310.1 (*recorded*, stas00/ml-engineering, network/README.md). That
# > was on AWS, whose tuner plugin takes the ring. Elsewhere it can be the other way round.
#
# <details><summary>With a ring through each port, what is left of the advantage of two levels?</summary>
#
# With g rings, one for each port, a port carries 2(N−1)/N·S/g. With two levels it carries 2(m−1)/m·S/g. For two nodes
# that is 1.75 against 1, for 32 nodes of eight 1.99 against 1.94: almost nothing. What is left is latency.
# </details>
#
# Try other sizes, nodes and links:

# %% tags=["deeper"]
chooser = algorithm_chooser()
chooser

# %% [markdown] tags=["deeper"]
# *The widget, left: the modelled time of each algorithm at one size, the fastest on top. Right: time over size, with
# a dot where the fastest algorithm changes. In a notebook that is not running it shows one setting.*

# %% [markdown] tags=["deeper"]
# ## 12. The tuner against real tables · deeper
#
# ### Several nodes
#
# `nccl_tuner` starts from the bandwidth that NCCL assumes: 20 GB/s for each of an A100's 12 NVLinks. Between the
# nodes there are eight ports of 200 Gb/s per node. **Predict**: up to which size does the tree win on 2 nodes, and on
# 64?

# %% tags=["deeper"]
eight_a100 = nccl_tuner.MACHINES["8 x A100"]
machines = {"1 node": eight_a100} | {
    f"{nodes} nodes": nccl_tuner.Machine(nodes, 8, "nvlink", eight_a100.bandwidth, network=8 * 25e9)
    for nodes in (2, 64)
}
for title, machine in machines.items():
    previous = None
    for size in (2**k for k in range(10, 35)):
        if (now := nccl_tuner.choose(size, machine)) != previous:
            print(f"{title}, from {format_bytes(size):>7}: {' / '.join(now)}")
        previous = now
assert nccl_tuner.choose(2**20, machines["64 nodes"])[0] == "tree"

# %% [markdown] tags=["deeper"]
# In one node of eight the tree never wins: its chain has as many hops as the ring, and less bandwidth. On two nodes
# it takes turns with the ring up to 16 MiB. On 64 nodes it wins up to gigabytes, because its hops grow with log₂ of
# the nodes and the ring's with the number of nodes. (*Modelled*; there was no recorded table to compare with.)
#
# ### Why small messages take longer
#
# Section 5 found that eight A100s take three times as long for small messages as NCCL's constants say. To *predict*
# the time, look for what the constants leave out, and take its size from other measurements:
#
# 1. The table was made with `-g 8`: one thread starts the kernels of eight GPUs, one after the other. For a few
#    bytes, a DGX A100 in the same mode needs 10 µs with two GPUs and 33.7 µs with eight (nccl-tests issue
#    [123](https://github.com/NVIDIA/nccl-tests/issues/123)).
# 2. A hop that forwards a slice takes longer than an empty one. Two other nodes of eight A100s say how much
#    (`recorded.OTHER_A100_ALL_REDUCE`).
#
# Do not take the result for a forecast. No number in it comes from the table, but these two corrections were chosen
# by somebody who knew roughly how large the errors were. And the second correction is all the time that the two other
# nodes need beyond the first, so both together give the same times as the second alone would.

# %% tags=["deeper"]
table = recorded.A100_ALL_REDUCE
misses = {"published": nccl_tuner.errors(table, eight_a100)}
for number, correction in enumerate(nccl_tuner.CORRECTIONS, start=1):
    misses[correction.name] = nccl_tuner.errors(table, eight_a100, nccl_tuner.corrected(number))
for name, of in misses.items():
    print(f"{name:22} median error, without sign: {np.median(abs(of)):6.1%}")
assert np.median(abs(of)) < 0.15
drawn = {name: (1 + of) * np.array(table.seconds) for name, of in misses.items()}
figures.predicted_against_recorded(
    table, drawn, [" / ".join(nccl_tuner.choose(size, eight_a100)) for size in table.sizes]
)

# %% [markdown] tags=["deeper"]
# *The figure: as in section 5, with a line for each correction; the thick one ("hops under load") has both.*
#
# The median error of 10.5 % hides two things. **From 4 to 16 MiB** the model is first 50 % too slow, then 9 % too
# fast, because the recorded time doubles from 8 to 16 MiB. The model switches from LL128 to Simple only at 32 MiB, so
# its bus bandwidth dips one doubling later. On the two other nodes 16 MiB takes only 1.6 times as long as 8 MiB, so
# the early switch belongs to this node and its version of NCCL. **From 16 to 256 MiB** the published constants are 17
# to 37 % too fast, probably because a ring has to fill and to drain, so that real bandwidth builds up slowly.
#
# ### Eight H200s
#
# With a switch that adds (section 8) there is one more pair, NVLS with Simple. **Predict**: from what size on does
# NCCL choose it?

# %% tags=["deeper"]
h200 = nccl_tuner.MACHINES["8 x H200"]
for size in recorded.H200_ALL_REDUCE.sizes:
    expected = ("ring", "LL") if size <= 2**20 else ("nvls", "Simple")
    assert nccl_tuner.choose(size, h200) == expected
print("predicted, and recorded: ring / LL up to 1 MiB, nvls / Simple from 2 MiB")

h200_errors = nccl_tuner.errors(recorded.H200_ALL_REDUCE, h200)
for_choosing = nccl_tuner.bandwidth(("nvls", "Simple"), h200) * costs.busbw_factor("all_reduce", 8)
wire_rate = nccl_tuner.nvls_busbw(h200)
shown = recorded.H200_LARGEST["all_reduce, nvls"]
print(f"median error of the time, without sign: {np.median(abs(h200_errors)):.0%}")
print(f"busbw of NVLS: {for_choosing / 1e9:.0f} GB/s in NCCL's comparison, good for choosing only;")
print(f"{wire_rate / 1e9:.0f} GB/s from the bytes on the wire, {shown / 1e9:.1f} recorded")
assert abs(wire_rate / shown - 1) < 0.05 < for_choosing / shown - 1
assert max(abs(h200_errors[-7:])) < 0.08 and max(abs(h200_errors)) < 0.33

# %% [markdown] tags=["deeper"]
# Every choice is right. NCCL's bandwidth for NVLS, 591 GB/s, is good for choosing only. The bytes of section 8 give a
# better one: (N+1)/N·S at NCCL's rate for the link and 85 % efficiency give 490 GB/s, 2 % above the recorded value.
# With that rate the time is right within 8 % from 256 MiB on, and around 8 MiB up to 32 % too short.

# %% [markdown] tags=["deeper"]
# ## 13. The C API · deeper
#
# NCCL's own interface is in C: fifty functions (`nccl.h` of version 2.29), of which a dozen do the daily work. Error
# messages and traces contain their names. [native/all_reduce.c](../native/all_reduce.c) is a complete program that
# sums an array over all GPUs of the machine, checks every element, and prints algorithm and bus bandwidth, either
# with one process for all GPUs or with one for each, as PyTorch does.
#
# | PyTorch | NCCL and CUDA in C |
# |---|---|
# | `init_process_group("nccl", device_id=…)` | `ncclGetUniqueId` on rank 0, then `ncclCommInitRank` on every rank |
# | (one process drives one GPU) | `ncclCommInitAll`: one process, all its GPUs |
# | `dist.all_reduce(x)` | `ncclAllReduce(x, x, count, ncclFloat, ncclSum, comm, stream)` |
# | `work.wait()` | `cudaEventRecord`, `cudaStreamWaitEvent` |
# | `batch_isend_irecv`, coalescing | `ncclGroupStart` … `ncclGroupEnd` |
# | `timeout=` and the watchdog | `ncclCommGetAsyncError` and your own clock |
# | `destroy_process_group()` | `ncclCommDestroy`, or `ncclCommAbort` after an error |
#
# NCCL and CUDA's headers come as Python packages that also install on machines without a GPU. Are they here?

# %% tags=["deeper"]
import tempfile
from pathlib import Path

folder = tempfile.TemporaryDirectory(prefix="nccl-")  # goes away with the kernel
work = Path(folder.name)
if toolkit := c_programs.toolkit_or_none():
    print("found nccl.h, libnccl.so.2, the CUDA runtime and a C compiler")

# %% [markdown] tags=["deeper"]
# ### Communicators: one process for all GPUs, or one each
#
# A **communicator** (`ncclComm_t`) is what a process group is in PyTorch. Each rank holds its own end of it, tied to
# one GPU. So a rank owns five things:

# %% tags=["deeper"]
c_programs.show("all_reduce.c", "Rank")

# %% [markdown] tags=["deeper"]
# With one process for all GPUs, one call makes all ends at once:

# %% tags=["deeper"]
c_programs.show("all_reduce.c", "init_all", "one_process")

# %% [markdown] tags=["deeper"]
# With one process for each GPU they have to find each other first. Rank 0 asks for a **unique id**: 128 bytes that
# say where the ranks meet. How they get to the other ranks is not NCCL's business: this program uses a pipe, and
# PyTorch puts them into the store behind `MASTER_ADDR` and `MASTER_PORT`.

# %% tags=["deeper"]
c_programs.show("all_reduce.c", "init_rank", "one_rank")

# %% [markdown] tags=["deeper"]
# `ncclCommInitRank` is a collective itself, so a rank that never comes leaves the others waiting. That is why the
# program asks for a communicator that does not block (`config.blocking = 0`): calls return at once with
# `ncclInProgress`, and the program can check how long it has waited.
#
# ### A group: many calls, one launch
#
# **Predict.** The process that drives four GPUs runs `for` over its ranks and calls `ncclAllReduce` for each. What
# happens without `ncclGroupStart` and `ncclGroupEnd` around the loop?

# %% tags=["deeper"]
c_programs.show("all_reduce.c", "all_reduce")

# %% [markdown] tags=["deeper"]
# It may wait for ever. A call may block until the other ranks have called too. Then the first call waits for rank 1,
# whose call comes only later in the same loop: a deadlock of one process with itself. Between start and end, calls
# only note what is to be done, and `ncclGroupEnd` launches everything together. That also makes several small
# operations one launch, and lets sends and receives make progress together ([Group
# Calls](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/groups.html)).
#
# The two pointers are equal here, so `ncclAllReduce` works **in place**, as `dist.all_reduce` always does. An
# all-gather is in place if a rank's piece already lies where it belongs: `ncclAllGather(whole + rank * n, whole, n, …)`
# ([In-place Operations](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/inplace.html)).
#
# ### Streams and events
#
# The last argument of every NCCL call is a **stream**: a queue of work for one GPU, done in order. The call returns
# when the work is in the queue, so the CPU's clock measures only that. The program puts **events** into the queue
# instead, and the GPU notes when it gets to them:

# %% tags=["deeper"]
c_programs.show("all_reduce.c", "measure")

# %% [markdown] tags=["deeper"]
# ### Errors, and who cleans up
#
# Three kinds of failure need three answers:
#
# - *A call returns an error.* `ncclGetErrorString` says what it means. After `ncclInvalidArgument` the communicator
#   is still good; after any other error it is not.
# - *A call has returned, and the operation fails later*, most often in the network. `ncclCommGetAsyncError` tells.
# - *Nothing fails and nothing comes*: another rank has died or called something else. Only a clock can tell.
#
# In the last two cases `cudaStreamSynchronize` would never return, so the program keeps asking:

# %% tags=["deeper"]
c_programs.show("all_reduce.c", "wait_for")

# %% [markdown] tags=["deeper"]
# Every function returns at its first error and says where. One function cleans up, for success and for failure:

# %% tags=["deeper"]
c_programs.show("all_reduce.c", "release")

# %% [markdown] tags=["deeper"]
# First the communicator, because the GPU may still be reading the memory, then the rest. `ncclCommDestroy` may wait
# for work under way; `ncclCommAbort` ends it, and **every** rank has to call it
# ([user guide](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html)).
#
# <details><summary>What does PyTorch do after an error?</summary>
#
# A watchdog thread asks `ncclCommGetAsyncError` and looks at the group's timeout, 10 minutes for NCCL.
# `TORCH_NCCL_ASYNC_ERROR_HANDLING` says what follows: 0 nothing, 1 abort the communicators and end the process, 2
# abort only, 3 end the process without the abort. The default is 3, because the abort itself was seen to hang
# ([documentation](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html), pull requests
# [102599](https://github.com/pytorch/pytorch/pull/102599) and
# [110723](https://github.com/pytorch/pytorch/pull/110723)). A process that ends takes its communicators with it.
# </details>
#
# Newer calls are worth knowing by name:
#
# | call | what for |
# |---|---|
# | `ncclCommSplit` | communicators out of an existing one, as the groups of a mesh need them |
# | `ncclCommShrink` (2.27) | after a failure, a new one of the remaining ranks, which continue without a restart |
# | `ncclMemAlloc`, `ncclCommRegister` | **registered buffers**: NCCL uses your memory directly and copies less |
# | `ncclCommWindowRegister` (2.27) | **symmetric memory**: all ranks register alike; faster for smaller sizes |
#
# Normally NCCL copies through buffers of its own. Registered memory saves these copies, so NCCL leaves more of the
# GPU's multiprocessors to your kernels ([communicator
# functions](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/comms.html), [buffer
# registration](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/bufferreg.html), [release
# 2.27.3](https://github.com/NVIDIA/nccl/releases/tag/v2.27.3-1)).
#
# ### Compile it
#
# The package has no `libnccl.so`, so the linker is told the exact name (`-l:`), and the program remembers the folder.

# %% tags=["deeper"]
if toolkit:
    c_programs.build("all_reduce.c", work / "all_reduce")
    print(c_programs.shown_command("all_reduce.c", "all_reduce", toolkit))

# %% [markdown] tags=["deeper"]
# No warning, with all warnings turned into errors. **Predict:** what will it say on a machine without a GPU?

# %% tags=["deeper", "nbval-ignore-output"]
if toolkit:
    for mode in ("one-process", "per-gpu"):
        done = c_programs.run(work / "all_reduce", mode)
        assert done.returncode in (0, 2)  # 2: no GPU
        print(f"{mode}: exit code {done.returncode}", done.stdout, done.stderr, sep="\n")

# %% [markdown] tags=["deeper"]
# Without a GPU, CUDA complains about its driver. With GPUs you have just read the time of one all-reduce of 64 MiB
# with its bandwidths, and the verdict on the sums. Eight A100s show 172 GB/s bus bandwidth at this size (*recorded*,
# the table of section 5).
#
# ### Break it
#
# Nobody runs the error paths of a C program. Here they can be run, on **stand-ins**: libraries with the same
# functions as NCCL and CUDA over ordinary memory, in which any chosen call can be made to fail. First without a
# fault:

# %% tags=["deeper"]
if toolkit:
    c_programs.build_stand_ins(work / "stand_in", toolkit)
    on_stand_ins = work / "all_reduce", work / "stand_in", world_size
    for mode in ("one-process", "per-gpu"):
        done = c_programs.run_on_stand_ins(*on_stand_ins, mode, 1000)
        assert done.returncode == 0, done.stderr
        print(done.stdout.splitlines()[-1])

# %% [markdown] tags=["deeper"]
# Now one chosen call fails in each run: the second `cudaMalloc`, the fifth `ncclAllReduce`, and so on. In the last
# run the GPU never finishes, and the program is told to wait for half a second.

# %% tags=["deeper"]
faults = ["cudaMalloc:2", "ncclCommInitAll:1", "ncclAllReduce:5", "ncclCommGetAsyncError:9"]
for fault in [*faults, "cudaStreamQuery:hang"] if toolkit else []:
    done = c_programs.run_on_stand_ins(*on_stand_ins, "one-process", 1000, 0.5, STAND_IN_FAIL=fault)
    assert done.returncode == 1 and "left behind" not in done.stderr  # all was given back
    print(f"{fault:24} {done.stderr.strip().partition(': ')[2]}")

# %% [markdown] tags=["deeper"]
# Each run ended with exit code 1, none hung, and the stand-ins found nothing that was not given back.

# %% [markdown] tags=["deeper"]
# ## 14. Tracing NCCL calls · deeper
#
# A training step is slow, and you did not write the code. Which collectives does it make, how large, and in which
# order? You can find out without changing the program. The least effort is to ask NCCL: with
# `NCCL_DEBUG_SUBSYS=COLL` it logs each collective with its count, type and operation, but without a time.
#
# ### Step between: LD_PRELOAD
#
# `LD_PRELOAD` puts a library in front of all others. Of several functions with one name, the first is called.
# [native/trace_nccl.c](../native/trace_nccl.c) is such a library: its `ncclAllReduce` notes the arguments, calls the
# real one, and writes a line.

# %% tags=["deeper"]
c_programs.show("trace_nccl.c", "next", "TRACE", "ncclAllReduce")

# %% [markdown] tags=["deeper"]
# `dlsym(RTLD_NEXT, …)` means "the next library that has this name". But Python loads PyTorch's libraries later and
# privately, where `RTLD_NEXT` does not look. So for PyTorch the function asks for the library by its name.
#
# We trace `native/all_reduce.c`, the C program of section 13, on stand-ins for NCCL and CUDA that need no GPU.
# **Predict.** It sums once to check and twenty times to measure, in one process. How many calls of `ncclAllReduce`
# will the trace show for `world_size` GPUs?

# %% tags=["deeper"]
import re
import tempfile
from collections import Counter
from pathlib import Path

trace_folder = tempfile.TemporaryDirectory(prefix="nccl-")
built = Path(trace_folder.name)
if toolkit := c_programs.toolkit_or_none():
    c_programs.build("trace_nccl.c", built / "libtrace_nccl.so")
    c_programs.build("all_reduce.c", built / "program")
    c_programs.build_stand_ins(built / "stand_in", toolkit)

# %% tags=["deeper"]
if toolkit:
    traced = built / "program", built / "stand_in", world_size, "one-process", 65536
    done = c_programs.run_on_stand_ins(*traced, LD_PRELOAD=built / "libtrace_nccl.so")
    assert done.returncode == 0 and "every sum as expected" in done.stdout
    trace = done.stderr.splitlines()
    for line in trace[: world_size + 3]:
        print(re.sub(" us=.*", "", line))
    print("…")
    called = Counter(re.search(r"nccl\w+", line)[0] for line in trace)
    assert called["ncclAllReduce"] == 21 * world_size and called["ncclGroupEnd"] == 21
    print(*(f"{n:4} {name}" for name, n in called.items()), sep="\n")

# %% [markdown] tags=["deeper"]
# Check and measurements are 21 calls on each of `world_size` GPUs, in 21 groups. Line `#2` is an all-reduce of 65,536
# numbers of 4 bytes, 256 KiB, on communicator `c0`, where this process has rank 0, in stream `s0`. `bytes` is S, the
# size of the argument. No caller sees what travels over the links, in a ring 2(N−1)/N·S.
#
# **Predict.** Each line also has a time. Is it the time of the all-reduce?

# %% tags=["deeper", "nbval-ignore-output"]
for name in ("ncclAllReduce", "ncclGroupEnd") if toolkit else ():
    spent = [float(line.partition(" us=")[2].split()[0]) for line in trace if name in line]
    print(f"{name:14} {len(spent):3} calls, median {np.median(spent):.1f} µs")

# %% [markdown] tags=["deeper"]
# No. It is the time for which the call kept the *CPU*. In a group `ncclAllReduce` only takes a note, and the launch
# happens in `ncclGroupEnd`. On a GPU both are over before the data has moved. So a long time here means a slow
# launch, or a rank that waited for others to call, never a slow link. (The stand-in adds within `ncclGroupEnd`, which
# takes longer than a launch.) The same on real NCCL, if this machine has a GPU:

# %% tags=["deeper", "nbval-ignore-output"]
if toolkit:
    preload = {"LD_PRELOAD": built / "libtrace_nccl.so"}
    real = c_programs.run(built / "program", "one-process", 65536, **preload)
    assert real.returncode in (0, 2)  # 2: no GPU
    print(*real.stderr.splitlines()[:6], sep="\n")

# %% [markdown] tags=["deeper"]
# It works on PyTorch too:
#
# ```bash
# gcc -shared -fPIC -I$NCCL/include -I$CUDA/include native/trace_nccl.c -o libtrace_nccl.so
# LD_PRELOAD=$PWD/libtrace_nccl.so NCCL_TRACE_FILE=trace.%p.txt torchrun --nproc-per-node=8 train.py
# ```
#
# `%p` becomes the process number. Two files of one step, compared with `diff` without their times, show where ranks
# stop agreeing.
#
# ### From outside: uprobes
#
# `LD_PRELOAD` must be there when the program starts. An **uprobe** can be set while it runs, by root: the kernel puts
# a breakpoint on the first instruction of a function, in every process that has loaded that file, and runs a small
# program (eBPF) when it is hit. `bpftrace` compiles one line into such a program.
#
# ```bash
# LIB=$(python -c "import nvidia.nccl as p; print(p.__path__[0])")/lib/libnccl.so.2
# sudo bpftrace -e "uprobe:$LIB:ncclAllReduce {            // arguments in registers: arg0, arg1, …
#     printf(\"%d: count %lu type %d op %d\n\", tid, arg2, arg3, arg4); }"
# sudo bpftrace -e "uprobe:$LIB:ncclAllReduce { @count[pid] = hist(arg2); }"
# ```
#
# `arg2` is the third argument, `count`. The second command counts inside the Linux kernel and prints one histogram
# for each process. These lines were tried with bpftrace 0.17 and Linux 6.18 on the stand-in. (Source: [bpftrace
# reference guide](https://github.com/iovisor/bpftrace/blob/master/docs/reference_guide.md).)
#
# ### From inside: the profiler plugin
#
# A caller cannot see when the GPU works, but NCCL can: since version 2.23 it calls a **profiler plugin** at the start
# and end of events, from the collective, with its algorithm and protocol, down to each network transfer.
#
# ```bash
# git clone --branch v2.29.7-1 https://github.com/NVIDIA/nccl && make -C nccl/plugins/profiler/inspector
# export NCCL_PROFILER_PLUGIN=$PWD/nccl/plugins/profiler/inspector/libnccl-profiler-inspector.so
# export NCCL_INSPECTOR_ENABLE=1 NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS=500
# torchrun --nproc-per-node=8 train.py           # JSON: time, algbw and busbw of each collective
# ```
#
# The end of a *collective* event only means "is in the queue"; the true end comes from the events below it
# ([NCCL's description](https://github.com/NVIDIA/nccl/tree/master/plugins/profiler)).
#
# > **Misconception.** "I traced NCCL, and each all-reduce takes 20 µs." That is time on the host. Ask of every trace:
# > *whose clock, and what ended?*
#
# | | needs | where in the code | GPU time | algorithm, protocol |
# |---|---|---|---|---|
# | `NCCL_DEBUG_SUBSYS=COLL` | restart | no | no | no (`TUNING` has) |
# | LD_PRELOAD | restart, shared library | no | no | no |
# | uprobe | root | C stack (`ustack`) | no | no |
# | profiler plugin | restart, NCCL 2.23 | no | yes | yes |
# | `torch.profiler` (lesson 13) | change of the code | Python | yes | in the kernel's name |
# | PyTorch's Flight Recorder (lesson 14) | nothing, on by default | Python | after a restart | no |

# %% [markdown] tags=["deeper"]
# ## 15. A log, line by line · deeper
#
# Section 6 looked at connections only. Here is more of two *recorded* logs, each of two nodes with two GPUs, with
# names and addresses replaced and lines left out. The beginning comes from A100 PCIe cards
# ([nccl-tests issue 182](https://github.com/NVIDIA/nccl-tests/issues/182)).

# %% tags=["deeper"]
print(nccl_logs.BEGINNING)
assert "NCCL version 2.19.3+cuda12.3" in nccl_logs.BEGINNING
assert "Using network IB" in nccl_logs.BEGINNING

# %% [markdown] tags=["deeper"]
# Every line begins with `host:process:thread [CUDA device]`.
#
# | line | what it tells |
# |---|---|
# | `Bootstrap : Using ibs65:…` | interface over which ranks find each other; little data flows here |
# | `NCCL version` | what really runs; a framework may bring its own |
# | `… set by environment to …` | each variable that NCCL obeys: who set it, and why? |
# | `NET/IB : Using [0]mlx5_0:1/IB` | network cards found, as name:port/kind. Are **all** there? Here one |
# | `Using network IB` | **the verdict**: RDMA by *verbs*, the API of RDMA cards. `Socket` means TCP |
# | `=== System : maxBw 12.0` | the topology that NCCL sees; GB/s in one direction on each link |
# | `bw 24/12, type LOC/PHB` | GB/s and kind of path: in the node / to the network card |
#
# The owner asked why the bandwidth is below what InfiniBand promises. NCCL counts 12 GB/s on the way to the card,
# where PCIe 4 has 31, because it could not read the speed of the link and assumed one. And `PHB` means a way through
# the CPU, where `PIX`, a way through one PCIe switch, would be better.
#
# The connections come from two nodes with two H20 each, NVLink inside and InfiniBand between
# ([nccl issue 1189](https://github.com/NVIDIA/nccl/issues/1189), comment of April 2025). **Predict** from the lines
# `Ring`: which ring goes through the four ranks on channel 6, which on channel 7, and why are there two?

# %% tags=["deeper"]
print(nccl_logs.CONNECTIONS)

# %% tags=["deeper"]
print(nccl_logs.table(nccl_logs.CONNECTIONS))
for channel in (6, 7):
    order = nccl_logs.ring_order(nccl_logs.CONNECTIONS, channel)
    print(f"ring {channel}: {' -> '.join(map(str, [*order, 0]))}")
assert nccl_logs.ring_order(nccl_logs.CONNECTIONS, 6) == [0, 1, 3, 2]
assert nccl_logs.ring_order(nccl_logs.CONNECTIONS, 7) == [0, 2, 3, 1]
for sender, receiver, via in nccl_logs.transports(nccl_logs.CONNECTIONS):
    assert via == "P2P/CUMEM" if (sender < 2) == (receiver < 2) else "GDRDMA" in via

# %% [markdown] tags=["deeper"]
# Ranks 0 and 1 are node A, 2 and 3 are node B. Ring 6 leaves A from rank 1 and enters B at rank 3; ring 7 runs the
# other way. One ring alone would leave half of the wires idle.
#
# | line | what it tells |
# |---|---|
# | `rank 3 nRanks 4 nNodes 2` | who writes this. **`nNodes 1` on two machines: two separate jobs** |
# | `Ring 06 : 2 -> 0 -> 1` | on channel 6, rank 0 receives from 2 and sends to 1 |
# | `Trees [0] 1/2/-1->0->-1` | on channel 0, rank 0 has the children 1 and 2, and no parent: the root |
# | `[4] 1/-1/-1->0->2` | on channel 4 its parent is 2: the second of the two trees |
# | `via P2P/CUMEM` | GPU to GPU directly; so is `P2P/IPC` (older), and `P2P/direct pointer` inside one process |
# | `via SHM/direct/direct` | through host memory: P2P was not possible, or forbidden |
# | `8 coll channels, 0 nvls channels` | eight blocks of each GPU at work; no NVLink SHARP |
# | `MNNVL 0` | no NVLink between nodes; in a rack that has it (GB200 NVL72) the rack counts as one node |
# | `Init COMPLETE` | this rank is ready; a rank without the line is the one to look at |
#
# The algorithm of a call is not decided at this point. `NCCL_DEBUG_SUBSYS=TUNING` prints the table of section 5 now
# and, later, one line per call: `AllReduce: 33554432 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..31}`
# ([NCCL user guide, Logging](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html)).
#
# <details><summary>Question: your log says <code>Using network IB</code>. Is that enough?</summary>
#
# No. It says that NCCL will use RDMA. Whether the card reads the GPU's memory itself stands in the connections, as
# `/GDRDMA`. And a job inside one node prints `Using network IB` too, although no byte goes there. Look at all lines
# between ranks of different nodes: one pair without `/GDRDMA` slows the whole ring.
# </details>
#
# | you see | it means, and where to look |
# |---|---|
# | `NET/IB : No device found` | container without the devices, or `NCCL_IB_DISABLE=1` |
# | `GPU Direct RDMA Disabled for HCA` | GPU and card too far apart, or no `nvidia-peermem` and no DMA-BUF |
# | `via SHM` between GPUs with NVLink | `NCCL_P2P_DISABLE`, `NCCL_P2P_LEVEL`, virtualisation |
# | `NCCL_P2P_LEVEL set by … to LOC` | somebody switched P2P off, in an image or a start script |
# | rank 0 once per node, `nNodes 1` | each node runs alone: launcher, `MASTER_ADDR`, MPI build |
# | cards missing in `NET/IB : Using` | that share of the bandwidth is lost: `NCCL_IB_HCA`, link state |
#
# All from real reports: issues [952](https://github.com/NVIDIA/nccl/issues/952),
# [1412](https://github.com/NVIDIA/nccl/issues/1412), [1510](https://github.com/NVIDIA/nccl/issues/1510) of nccl;
# [228](https://github.com/NVIDIA/nccl-tests/issues/228), [373](https://github.com/NVIDIA/nccl-tests/issues/373),
# [213](https://github.com/NVIDIA/nccl-tests/issues/213) of nccl-tests.

# %% [markdown] tags=["deeper"]
# ## 16. Environment variables, by purpose · deeper
#
# NCCL has more than a hundred, of two kinds: **system configuration** (marked †) may stay in scripts, and
# **debugging** "should generally not be set for production code", because a forced value keeps NCCL from choosing,
# today and in every later version
# ([NCCL user guide](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)).
#
# | variable (default) | what it is for | when to touch it |
# |---|---|---|
# | **Logging** | | |
# | `NCCL_DEBUG` (unset) † | `VERSION`, `WARN`, `INFO`, `TRACE` | `WARN` always, `INFO` to examine how a job starts |
# | `NCCL_DEBUG_SUBSYS` (`INIT,BOOTSTRAP,ENV`) † | what `INFO` logs | `NET`, `GRAPH`, `TUNING` for a question |
# | `NCCL_DEBUG_FILE` (stdout) † | where to write: `%h` host, `%p` process | more than a few ranks |
# | **Which network** | | |
# | `NCCL_SOCKET_IFNAME` (not `lo`, `docker*`) † | IP interface: bootstrap, TCP | nodes pick different networks |
# | `NCCL_IB_HCA` (all) † | RDMA cards, `card:port` | cards for storage are there too |
# | `NCCL_IB_GID_INDEX` (−1: chosen) † | address index on RoCE | RoCE does not connect; see `show_gids` |
# | `NCCL_NET` (chosen) † | one network by name: `IB`, `Socket`, … | to fail rather than fall back to TCP |
# | `NCCL_IB_DISABLE` (unset) | 1: no verbs, so TCP | experiment |
# | **Ways inside a node, and to the card** | | |
# | `NCCL_P2P_DISABLE`, `NCCL_P2P_LEVEL` | never GPU to GPU; how far: `LOC NVL PIX PXB PHB SYS` | is P2P at fault? |
# | `NCCL_NET_GDR_LEVEL` (chosen) | how far GPUDirect RDMA reaches | NCCL misjudges a topology: measure both |
# | `NCCL_NVLS_ENABLE` (2) | NVLink SHARP; 0: off | to compare; when its memory cannot be allocated |
# | `NCCL_MNNVL_ENABLE` (2: if it works) | NVLink between nodes; 0: off, 1: required | a rack uses its network instead |
# | `NCCL_COLLNET_ENABLE` (0) † | 1: let the network's switches add, by a plugin | SHARP is installed and set up |
# | **Algorithm, protocol, buffers, channels** | | |
# | `NCCL_ALGO` (chosen) | allow or exclude `Ring`, `Tree`, `NVLS`, … | to compare |
# | `NCCL_PROTO` (chosen) | the same for `LL`, `LL128`, `Simple` | **only to exclude one** that you suspect of a bug |
# | `NCCL_TUNER_PLUGIN` (looked for) † | a library that chooses instead of NCCL | to compare: is it slower? |
# | `NCCL_MIN_CTAS`, `NCCL_MAX_CTAS` (chosen) | GPU blocks used, taken from your kernels | benchmarks |
# | **Faults** | | |
# | `NCCL_IB_TIMEOUT` (20) † | a card's wait for one answer: 4.096 µs · 2^20 = 4.3 s | very large networks |
# | `NCCL_RAS_ENABLE` (1) | service that tells `ncclras` about a job that hangs | leave on |
# | **Topology files** | | |
# | `NCCL_TOPO_DUMP_FILE` (unset) † | write the topology found, as XML | to attach to a question |
# | `NCCL_TOPO_FILE` (looked for) † | read a topology before looking | machines that hide it, as in section 15 |
#
# Names of interfaces and cards are prefixes: `eth` also means `eth1`; `=eth0` is exact, `^docker` excludes. All
# variables can also stand in `/etc/nccl.conf`, and that is where a forgotten one hides.

# %% [markdown] tags=["deeper"]
# A variable must be set **before** the communicator is made, on **every** rank, with the same value. NCCL keeps most
# values from the first time it looks
# ([src/include/param.h](https://github.com/NVIDIA/nccl/blob/master/src/include/param.h)), so a change in a running
# process may do nothing; in a notebook, call `shutdown()` first. `torchrun` and `launch` pass their environment on to
# the ranks, but `mpirun` needs `-x NAME`. The next cell shows, on gloo, that the values arrive, not what they do.

# %% tags=["deeper"]
import os
from datetime import timedelta

from course_utils import launch


def settings():
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_P")}


os.environ |= {"NCCL_P2P_LEVEL": "PXB", "NCCL_PROTO": "^LL128"}
try:
    arrived = launch(settings, world_size=world_size, backend="gloo")
finally:
    for name in ("NCCL_P2P_LEVEL", "NCCL_PROTO"):
        del os.environ[name]
assert all(each["NCCL_P2P_LEVEL"] == "PXB" for each in arrived)
assert all(each == arrived[0] for each in arrived), "ranks that differ here hang later"
print(f"the same on all {world_size} ranks: NCCL_P2P_LEVEL=PXB, NCCL_PROTO=^LL128")

# %% [markdown] tags=["deeper"]
# > **Misconception: `NCCL_TIMEOUT`.** Many scripts export it, and NCCL's guide has no such variable. How long a
# > collective may take is set for a **process group** of PyTorch: `init_process_group(timeout=...)` or
# > `new_group(timeout=...)`. `NCCL_IB_TIMEOUT` is something else, a network card's wait for one answer.


# %% tags=["deeper"]
def timeouts():
    def seconds(group):
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    os.environ["NCCL_TIMEOUT"] = "7"  # nobody reads it
    plain = dist.new_group()
    patient = dist.new_group(timeout=timedelta(minutes=45))
    return seconds(plain), seconds(patient)


plain, patient = launch(timeouts, world_size=world_size, backend="gloo")[0]
assert plain != 7 and patient == 45 * 60
print(f"NCCL_TIMEOUT=7 changes nothing; timeout=timedelta(minutes=45) gives {patient:.0f} s")

# %% [markdown] tags=["deeper"]
# ## 17. nccl-tests: are my numbers right? · deeper
#
# [nccl-tests](https://github.com/NVIDIA/nccl-tests) times NCCL's collectives with no framework around them. If it is
# slow, look at the machine; if it is fast and training is slow, look at the program. The commands follow its
# [README](https://github.com/NVIDIA/nccl-tests/blob/master/README.md):
#
# ```bash
# git clone https://github.com/NVIDIA/nccl-tests && cd nccl-tests
# make CUDA_HOME=/path/to/cuda NCCL_HOME=/path/to/nccl
# ./build/all_reduce_perf -b 8 -e 8G -f 2 -g 8                # one node, eight GPUs in one process
# make clean && make MPI=1 MPI_HOME=/path/to/mpi CUDA_HOME=/path/to/cuda NCCL_HOME=/path/to/nccl
# mpirun -np 16 -H nodeA:8,nodeB:8 -x NCCL_DEBUG=WARN ./build/all_reduce_perf -b 8 -e 8G -f 2 -g 1
# ```
#
# GPUs = processes (`-np`) × GPUs per thread (`-g`), if `-t` is 1. `-b` and `-e` are the first and last size, `-f 2`
# doubles it. Each row averages `-n` calls (default 20) that are queued back to back, after `-w` untimed ones of every
# size (default 1; before August 2025 it was 5, of two sizes only).
#
# One row, *recorded* ([nccl-tests issue 152](https://github.com/NVIDIA/nccl-tests/issues/152)). The left half is
# **out-of-place** (result into another buffer), the right half **in-place**. `#wrong` counts wrong elements; anything
# but 0 makes the rest worthless. **Predict**: the command that made it is not shown. How many GPUs were there?

# %% tags=["deeper"]
row = "67108864 16777216 float sum -1 1367.2 49.09 92.04 0 1362.3 49.26 92.36 0".split()
size, elements = int(row[0]), int(row[1])
time_us, algbw_shown, busbw_shown, wrong = map(float, row[5:9])

factor = busbw_shown / algbw_shown  # 2(N-1)/N for an all-reduce
ranks = round(2 / (2 - factor))
assert size == 4 * elements and wrong == 0
assert abs(costs.algbw(size, time_us * 1e-6) / 1e9 - algbw_shown) < 0.02
assert abs(costs.busbw("all_reduce", ranks, size, time_us * 1e-6) / 1e9 - busbw_shown) < 0.02
print(f"S/t = {size / time_us / 1e3:.1f} GB/s; factor {factor:.3f}, so {ranks} GPUs")

# %% [markdown] tags=["deeper"]
# The factor busbw/algbw tells it: 2(N−1)/N = 1.875 means 16 GPUs.
#
# ### Six questions from users
#
# Each was asked in the issue named; figures are *recorded* there, and computed again in the cell below.
#
# **1. "H100 reaches 370 GB/s. The data sheet says 900."**
# ([nccl-tests 212](https://github.com/NVIDIA/nccl-tests/issues/212)) 900 adds both directions; one is 450. Each
# packet carries a header beside its data, so that about 370 are left, 82 % of the line.
#
# **2. "Mine shows 480 of 450 GB/s. Faster than the wire?"**
# ([nccl-tests 272](https://github.com/NVIDIA/nccl-tests/issues/272)) The switch adds, as section 8 shows.
#
# **3. "Two nodes with 2 × 100 Gb/s cards: 41.55 GB/s, where 25 are possible."** ([nccl-tests
# 251](https://github.com/NVIDIA/nccl-tests/issues/251)) Between exactly two nodes a tree sends S, a ring nearly 2·S,
# and the column takes the ring's factor. On four nodes the effect is gone, and on two nodes `NCCL_ALGO=Ring` removes
# it.
#
# **4. "Four 200 Gb/s cards, and only 96 GB/s."** ([nccl-tests 119](https://github.com/NVIDIA/nccl-tests/issues/119))
# 4 × 200 Gb/s are 100 GB/s, and 24 of 25 per card is the usual peak.
#
# **5. "2 GPUs take 10 µs where I expect 6, and 8 take 34 where I expect 42."** ([nccl-tests
# 123](https://github.com/NVIDIA/nccl-tests/issues/123)) The owner expected 2(N−1) steps of 3 µs. A line through all
# seven measurements has other constants, but it cannot say *why*: in this mode one GPU more means two steps more and
# also one launch more by the same thread, and two causes that grow together look like one slope.
#
# **6. "My program gets a third of what the table says."** One call of 4 GB reached 3722 Gb/s, 1000 calls of 4 MB
# 1146, and without warm-up 561 (*recorded*, stas00/ml-engineering, network/README.md). A benchmark's last row holds
# only for large messages after a warm-up. Compare the row of **your** size, and go on (`-e 8G`) while the bandwidth
# still grows from row to row.

# %% tags=["deeper"]
print(f"1: {370 / 450:.0%} of the line")
line = 2 * 100 / 8  # GB/s of a node in question 3, with four GPUs of each node
print(f"3: a tree on 2 nodes shows at most {line * 2 * (8 - 1) / 8:.2f} GB/s in the column")
assert line < 41.55 < line * 2 * (8 - 1) / 8
print(f"4: line {4 * 200 / 8:.0f} GB/s, usual peak {4 * 24} GB/s")
gpus = np.array(list(recorded.A100_LATENCY))
microseconds = 1e6 * np.array(list(recorded.A100_LATENCY.values()))
per_step, once = np.polyfit(2 * (gpus - 1), microseconds, 1)
off = np.abs(once + per_step * 2 * (gpus - 1) - microseconds).max()
print(f"5: {once:.1f} µs once + {per_step:.2f} µs a step; off by {off:.1f} µs at most")
assert off < 1
print(f"6: {3722 / 8:.0f}, {1146 / 8:.0f}, {561 / 8:.0f} GB/s", end="; ")
print(f"small calls lose {1 - 1146 / 3722:.0%}")

# %% [markdown]
# ## Recap, with the numbers of this run

# %%
for name, count in counted.items():
    print(f"{name:5} {count.steps:2} steps, {count.busiest:.2f} S from the busiest rank")
fastest = min(at_4_mib, key=at_4_mib.get)
gain = at_4_mib["ring"] / at_4_mib[fastest]
print(f"4 MiB on {virtual[0]} emulated nodes: {fastest}, {gain:.1f} times as fast as one ring")

# %% [markdown]
# - An all-reduce is a pattern of messages. A right sum does not show which: count bytes and steps.
# - Ring: 2(N−1) steps and 2(N−1)/N·S, so its bytes hardly grow, but its latency does. Trees: log N steps. Two levels:
#   few bytes on the slow links. Ring and tree cross at a size that grows with N.
# - NCCL computes a time for each algorithm and protocol from a table of constants, and takes the smallest.
# - A slow network raises no error. Look for `GDRDMA` in the log, pass `device_id=`, and measure the sizes of your
#   job.
#
# **Now you can answer**
#
# 1. Eight ranks all-reduce S bytes through rank 0. How many bytes does it send? And each rank of a ring?
# 2. 4 KiB on 1,024 ranks: ring or tree, and why?
# 3. Two nodes with one port for each GPU: why does one ring over all GPUs lose?
# 4. How can a protocol that sends as many flags as data be the fastest?
# 5. 16 MiB take more than twice as long as 8 MiB. Is the measurement broken?
# 6. A log says `via NET/IB/3` between nodes, without `GDRDMA`. What is wrong?
# 7. Deeper: how can links of 450 GB/s show a bus bandwidth of 482?
#
# <details><summary>Answers</summary>
#
# 1. 7 S; 1.75 S (section 1).
# 2. The tree, about 100 times: 20 latencies against 2,046 (section 3).
# 3. Nearly all its bytes pass one port, and the others are idle (section 4).
# 4. It does not wait for a fence at each hop, and for small messages that is most of the time (section 5).
# 5. Not necessarily: it looks like a switch of protocol at the wrong size (section 5).
# 6. The bytes go through host memory, so the network runs below its rate (section 6).
# 7. The switch adds: a GPU sends (N+1)/N·S, and bus bandwidth assumes 2(N−1)/N·S (section 8).
# </details>
#
# **What to take to work:** [scripts/busbw.py](../scripts/busbw.py), and `lessons.nccl.nccl_logs` to read a log.
#
# **Exercises:** [exercises/03_nccl](../exercises/03_nccl_exercises.ipynb). **Next:** [04 ddp](04_ddp.ipynb), where
# these all-reduces run inside `loss.backward()`.
#
# **Worth reading**
# - R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of collective communication operations in MPICH*, 2005,
#   [doi.org/10.1177/1094342005051521](https://doi.org/10.1177/1094342005051521): recursive doubling, halving, and
#   when to switch between them.
# - P. Sanders, J. Speck, J. L. Träff, *Two-tree algorithms for full bandwidth broadcast, reduction and scan*, 2009,
#   [doi.org/10.1016/j.parco.2009.09.001](https://doi.org/10.1016/j.parco.2009.09.001): the two trees of section 10.
# - Z. Hu et al., *Demystifying NCCL*, 2025, [arXiv 2507.04786](https://arxiv.org/abs/2507.04786): protocols, channels
#   and algorithms, read from NCCL's source by people who know it.
