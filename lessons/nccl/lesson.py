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
# would take 55 ms (*modelled*), and with a thousand GPUs 8 seconds. NCCL, NVIDIA's library of collectives, does it
# better: in one way for small messages, in another for large ones, in a third between nodes, and in a fourth where
# the switch can add. You will see these ways, compute which of them NCCL picks, and read in its log what it does with
# your network.
#
# **You will be able to**
# - *draw* how an all-reduce passes through GPUs, ports and switches, and *count* its bytes and steps;
# - *predict* its time on one node, on two levels and on thousands of ranks;
# - *explain* which algorithm and protocol NCCL picks for a size;
# - *read* in its log whether a job uses RDMA, and *judge* whether a bandwidth is what the machine should give;
# - *call* NCCL from C, and *watch* the calls of a running program (deeper).
#
# **Before this:** [01 interconnects](01_gpu_interconnects.ipynb), [02 collectives](02_collectives.ipynb). **Time:**
# about 45 minutes to read the core, 115 with the deeper sections, under a minute to run.

# %% [markdown]
# Imports and parameters:

# %% tags=["parameters"]
import numpy as np
import torch
import torch.distributed as dist

world_size = 4  # ranks of sections 1, 2, 8 and of most deeper ones: 2 to 8
emulated_sizes = [2**k for k in (12, 15, 18, 21, 22, 24)]  # bytes: 4 KiB to 16 MiB
slowdown = 5000  # how much slower than the clock the slow motion is

# %%
from IPython.display import Markdown

from course_utils import costs, recorded
from course_utils.costs import all_reduce_seconds, format_bytes
from course_utils.hardware import LINKS
from course_utils.predictions import predict, predictions
from course_utils.programs import SCRIPTS, torchrun
from course_utils.topology import two_level
from lessons.nccl import c_programs, figures, nccl_logs, nccl_tuner
from lessons.nccl.explorer import algorithm_chooser
from lessons.nccl.fabric import emulated_seconds, slow_motion
from lessons.nccl.message_counts import as_nodes, count_messages, formula

# %% [markdown]
# ## 1. From one ring to many channels
#
# N is the number of ranks, S the bytes of the whole tensor. The algorithms of this lesson are **all-reduces** made of
# messages between two ranks: they sum x over all ranks, in place, and call no collective.
#
# ### The ring
#
# Lesson 02 built one
# ([section 4](02_collectives.ipynb#4.-Ring-all-reduce-from-scratch)): x is cut into N **pieces**, which go round the
# circle of ranks once to be summed, a *reduce-scatter*, and once more to be copied, an *all-gather*. That takes
# 2(N−1) steps, and every rank sends 2(N−1)/N·S.
#
# The folded cells have the same ring, for any list of ranks, and the program of the opening, which adds at rank 0.


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
def ring_reduce_scatter(x, ranks=None):
    """Sum x over `ranks`, in place: piece i is complete on the i-th of them. Return my piece."""
    me, n, right, left = neighbours(ranks)
    pieces = x.view(-1).tensor_split(n)
    for step in range(1, n):
        leaving, staying = pieces[(me - step) % n], pieces[(me - step - 1) % n]
        arriving = torch.empty_like(staying)
        exchange(leaving, right, arriving, left)
        staying += arriving  # now the sum of step + 1 ranks
    return pieces[me]


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


# %% jupyter={"source_hidden": true}
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
# A right sum proves little, because wasteful programs give it too. So `count_messages` runs a function on real ranks,
# compares its sum with the library's to the last bit, and counts bytes and **steps**. A step is a round of messages
# that can travel at the same time: a rank sends at most one and receives at most one, and passes on only what came in
# an earlier step.

# %%
counted = {
    "root": count_messages(root_all_reduce, world_size),
    "ring": count_messages(ring_all_reduce, world_size),
}
for name, count in counted.items():
    print(f"{name:5}{count}")
assert counted["root"].busiest == world_size - 1
assert set(counted["ring"].sent) == {2 * (world_size - 1) / world_size}

# %% [markdown]
# ### Channels
#
# Two nodes have four GPUs each. Inside a node NVLink joins all GPUs, and each GPU has a network port of its own. A
# single ring through all eight GPUs leaves each node once, so three of a node's four ports never send. NCCL therefore
# lays several rings through the same GPUs, each with its own share of x. It calls them **channels**. Here is one way
# to lay four:

# %%
rings = [
    [0, 1, 2, 3, 7, 6, 5, 4],
    [4, 5, 6, 7, 3, 2, 1, 0],  # the first one backwards
    [1, 0, 3, 2, 6, 7, 4, 5],
    [5, 4, 7, 6, 2, 3, 0, 1],  # the third one backwards
]
figures.channels({"one ring": rings[:1], "four rings, each with S/4": rings}, per_node=4)

# %% [markdown]
# *The figure: GPUs 0 to 3 in node 0, GPUs 4 to 7 in node 1. Left: one ring, which leaves node 0 through the port of
# GPU 3 and node 1 through the port of GPU 4. Right: four rings in four colours; every port sends in one of them and
# receives in one.*

# %% jupyter={"source_hidden": true}
hops = [(a, b) for ring in rings for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
far = [(a, b) for a, b in hops if a // 4 != b // 4]
assert sorted(a for a, b in far) == sorted(b for a, b in far) == list(range(8))

# %% [markdown]
# Every ring still crosses the network once in each direction, but now with a quarter of the bytes, and through
# another port than the others. Section 15 reads such rings out of a real log.
#
# On the GPU, all of this is *one* **kernel**, a function that runs on the GPU. Each channel is one *block* of it, a
# group of threads that works on its own. So channels also decide how much of the GPU an all-reduce takes away from
# your own kernels ([NCCL user guide](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)). A block
# works in slices: it adds one slice of a piece while the next one is arriving, so links are busy all the time.

# %% [markdown]
# ## 2. A tree, for small messages
#
# A message of a few bytes costs its latency (the time until it arrives at all) and almost nothing for the bytes. So
# for small tensors only the steps count, and a ring of 1,000 ranks has 1,998. A tree has far fewer: first pairs add,
# then pairs of pairs, and after ⌈log₂ N⌉ steps rank 0 has the sum. The same messages backwards hand it out:
#
# ```text
# step 1:   0 <── 1    2 <── 3    4 <── 5    6 <── 7
# step 2:   0 <─────── 2          4 <─────── 6
# step 3:   0 <────────────────── 4                    then the same arrows backwards, the last first
# ```
#
# The code is in a folded cell. **Predict.** Every message carries all of x. With four ranks, how many S does the
# busiest rank send? (In the ring each rank sends 1.5 S.)

# %%
busiest = predict("sent by the busiest of 4 ranks in a tree", unit="S")


# %% jupyter={"source_hidden": true}
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


# %%
counted["tree"] = count_messages(tree_all_reduce, world_size)
print(counted["tree"])

# %% jupyter={"source_hidden": true}
assert counted["tree"].steps == 2 * (world_size - 1).bit_length()
busiest.compare(costs.all_reduce_bytes("tree", 4, 1.0))

# %% [markdown]
# **Compare.** Two: on the way down rank 0 sends the sum to rank 2 and then to rank 1. Rank 2 sends twice as well, the
# others once.
#
# A tree has 2⌈log₂ N⌉ steps instead of 2(N−1): 20 instead of 1,998 for 1,000 ranks. But all of S travels in each, one
# step after the other. The ring has few bytes, the tree few steps. Section 9 builds algorithms that have both, and
# says why NCCL does not use them.

# %% [markdown]
# ## 3. What it costs
#
# Which one is faster, and from which size on? Lesson 01 fitted the time of one message: **t = α + β · its bytes**,
# with the latency α and the time per byte β. A step takes as long as its slowest message, and an algorithm as long as
# all its steps:
#
# | | latencies | bytes in sequence | time |
# |---|---|---|---|
# | root | 2(N−1) α | 2(N−1) S, all at rank 0 | 2(N−1)·(α + βS) |
# | ring | 2(N−1) α | 2(N−1)/N S | 2(N−1)·(α + βS/N) |
# | tree | 2⌈log₂N⌉ α | 2⌈log₂N⌉ S | 2⌈log₂N⌉·(α + βS) |
#
# The cell takes α = 14 µs, NCCL's own constant for a hop over the network when it sends large messages, and 50 GB/s,
# one port of 400 Gb/s InfiniBand. All figures of this section are *modelled*.
#
# **Predict.** 4 MiB on 1,024 ranks: which is faster, ring or tree, and how many times as fast?

# %%
factor = predict("speed-up of the faster of ring and tree", unit="times")

# %%
hop, wire = 14e-6, 50e9  # seconds, bytes per second
thousand = costs.flat_cluster(1024, hop, 1 / wire)
ring, tree = (all_reduce_seconds(name, 2**22, thousand) for name in ("ring", "tree"))
print(f"4 MiB on 1,024 ranks: ring {ring * 1e3:.1f} ms, tree {tree * 1e3:.1f} ms")

# %% jupyter={"source_hidden": true}
factor.compare(ring / tree)
assert round(ring / tree) == 15
ring, tree = (all_reduce_seconds(name, 2**12, thousand) for name in ("ring", "tree"))
assert round(ring / tree) == 102
far = nccl_tuner.PUBLISHED.hop["network"]  # what NCCL itself would take for 4 KiB, protocol LL
assert round(2046 * far["ring"]["LL"] / (20 * far["tree"]["LL"])) == 55

# %% [markdown]
# **Compare.** The tree, about 15 times. The ring has to wait for 2,046 latencies, 29 ms, whatever it sends. The tree
# waits for 20, and its 20 · 4 MiB, one after another, take only 1.7 ms.
#
# For 4 KiB, where only latencies are left, the tree is 102 times as fast. For very large messages the ring wins, since
# 2 S pass one after the other where in the tree 20 S do. In between they cross. Set the two times equal, with L =
# ⌈log₂N⌉, and you get **S = α/β · (N−1−L) / (L − (N−1)/N)**.

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
at_rank_0 = 2 * (largest.ranks - 1) * (hop + bucket / wire)
print(f"share of latency in a ring on {largest.ranks:,} ranks: {waiting:.0%}")
print(f"all through rank 0: {at_rank_0:.1f} s")
assert 0.98 < waiting < 1
figures.scale_out(growing, ["ring", "tree", "double_tree"], sizes=(4096, bucket))

# %% [markdown]
# *The figure: time over ranks. For 4 KiB the ring rises in proportion to N and the trees rise with log N only; for 25
# MiB the ring rises most at the end, and the double tree stays near 1 ms.*
#
# Through one rank the time is O(N·S): 4.4 s for one bucket on 4,096 ranks. The ring's bytes stay at 2 S, but its
# latencies grow until nothing else is left. (**Amdahl's law**: the part that you cannot speed up limits the whole.)
# Even links of infinite speed would save only 1 % of the ring's time on 4,096 ranks. Hence trees, larger buckets, and
# two levels, which come next.

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
# message at a time in each direction, and the message arrives one latency later. Between steps no rank waits for the
# others, unlike in section 3. The cluster is that of section 1, with NVLink 4 inside, and one 400 Gb/s InfiniBand port
# for each GPU between the nodes.
#
# Here a rank handles one message after the other, but the blocks of a GPU's kernel work side by side. So the four
# rings of section 1 are *modelled*: together they take as long as one ring with a quarter of S.
#
# **Predict.** 4 MiB on these eight GPUs: which is the fastest of one ring, four rings, the tree and the hierarchical
# all-reduce?

# %%
first = predict("4 MiB on two nodes", ["one ring", "four rings", "a tree", "the hierarchical one"])


# %%
def two_levels(x):
    hierarchical_all_reduce(x, 4)


links = [(LINKS[kind].latency, 1 / LINKS[kind].bandwidth) for kind in ("nvlink4", "ib_ndr")]
two_nodes = two_level(2, 4, *links)
cluster = costs.cluster_of(two_nodes)
contenders = {"ring": ring_all_reduce, "tree": tree_all_reduce, "hierarchical": two_levels}
emulated = emulated_seconds(contenders, two_nodes, emulated_sizes)
at_4_mib = {name: seconds[emulated_sizes.index(2**22)] for name, seconds in emulated.items()}
for name, seconds in at_4_mib.items():
    print(f"4 MiB, {name:13}{seconds * 1e6:6.1f} µs (emulated)")
four_rings = all_reduce_seconds("ring", 2**22 / 4, cluster)
print(f"4 MiB, four rings   {four_rings * 1e6:6.1f} µs (modelled)")

# %% jupyter={"source_hidden": true}
assert 1.9 < at_4_mib["ring"] / at_4_mib["hierarchical"] < 2.3
assert at_4_mib["hierarchical"] < four_rings < at_4_mib["ring"] < at_4_mib["tree"]
first.compare("the hierarchical one")

# %% [markdown]
# **Compare.** The hierarchical one, about twice as fast as one ring. All 14 messages of a ring from one node to the
# other, 1.75 S, leave by the same port, while three ports send nothing. Two levels send S/4 through each of the four
# ports, and four rings 0.44 S. And a piece of a ring has to cross the network four times, so it waits for four long
# latencies, where two levels wait for two.
#
# The same messages in slow motion:

# %% tags=["nbval-ignore-output"]
slow_motion(contenders, two_nodes, 2**22, slowdown)

# %% [markdown]
# And over all sizes. The lines are formulas: the one above, and those that `help(all_reduce_seconds)` gives.


# %%
def model(name, size):
    if name == "four rings":
        return all_reduce_seconds("ring", size / 4, cluster)
    return all_reduce_seconds(name, size, cluster)


figures.model_against_emulation(emulated_sizes, emulated, model, also=["four rings"])

# %% jupyter={"source_hidden": true}
for name, seconds in emulated.items():
    for size, t in zip(emulated_sizes, seconds, strict=True):
        assert abs(t / model(name, size) - 1) < 0.01
assert model("four rings", 2**24) < model("hierarchical", 2**24)
assert model("tree", 2**17) < model("hierarchical", 2**17)
assert model("tree", 2**18) > model("hierarchical", 2**18)

# %% [markdown]
# *The figure: four curves, flat to the left and straight to the right. The tree is lowest up to about 160 KiB, two
# levels from there to about 8 MiB, and four rings for larger sizes. Points lie on their lines.*
#
# For 16 MiB the four rings win, because NVLink and network are busy at the same time, while the three phases of two
# levels take turns. NCCL has these **rings through all ports**, and a `Tree` with two levels in another way: a chain
# of GPUs in each node, and a tree between the nodes. Its `NVLSTree` comes closest to the three phases: in each node
# the switch adds, as the next section shows.

# %% [markdown]
# ## 5. When the switch adds
#
# In rings and trees the GPUs add. The NVLink switches of Hopper and later GPUs can add, too: **NVLS**, for NVLink
# SHARP. (**SHARP** is the same in some InfiniBand switches.) Here is the way of piece 1 of an all-reduce among four
# GPUs:

# %%
figures.switch_adds(4, piece=1)

# %% [markdown]
# *The figure, left: every GPU sends its piece 1 to the switch, and their sum comes back to GPU 1. Right: GPU 1 sends
# the sum to the switch, which copies it to all GPUs.*
#
# The other pieces go the same way at the same time, each by way of the GPU of its number. So a GPU sends all pieces
# of its x once, and then one finished piece: **(N+1)/N·S** (NVIDIA/nccl issue
# [1083](https://github.com/NVIDIA/nccl/issues/1083)) instead of the ring's 2(N−1)/N·S.
#
# Bus bandwidth is always S/t times 2(N−1)/N, a ring's bytes, so with NVLS it is not the speed of any wire. Eight GiB on
# five to eight H200s, *recorded* (stas00/ml-engineering, network/README.md), and what the wire carried:

# %%
print("GPUs   busbw (recorded)   S/t   (N+1)/N of it")
for n, rate in recorded.H200_NVLS_BY_GPUS.items():
    if n > 4:
        speed = rate / 1e9 / costs.busbw_factor("all_reduce", n)
        on_the_wire = speed * (n + 1) / n
        print(f"{n:4}{rate / 1e9:14.0f} GB/s{speed:11.0f}{on_the_wire:15.0f} GB/s of 450")
        assert 0.67 < on_the_wire / 450 < 0.70

# %% [markdown]
# The wire carries 304 to 310 GB/s, whatever N is. A ring fills it better: 367.6 of 450 GB/s (*recorded*, same file).
#
# **Predict.** Only four of these GPUs all-reduce 8 GiB. Which is faster, ring or NVLS?

# %%
four_gpus = predict("among four H200s", ["the ring", "NVLS", "both take about as long"])

# %%
ring_rate = recorded.H200_LARGEST["all_reduce, ring"] / 1e9
for n in (8, 4):
    with_nvls = on_the_wire / ((n + 1) / n)
    with_ring = ring_rate / costs.busbw_factor("all_reduce", n)
    print(f"{n} GPUs, S/t (modelled): NVLS {with_nvls:.0f} GB/s, ring {with_ring:.0f} GB/s")

# %% jupyter={"source_hidden": true}
assert abs(with_nvls / with_ring - 1) < 0.03
four_gpus.compare("both take about as long")

# %% [markdown]
# **Compare.** Both take about as long. With eight GPUs the ring has to send 1.56 times the bytes, with four only 1.2
# times, and it fills the wire 1.2 times as well. NCCL takes the ring there (*recorded*: 363 GB/s bus
# bandwidth).
#
# ### 370 or 480?
#
# On eight H100s, a large all-reduce shows about 480 GB/s bus bandwidth with NVLS and about 370 with a ring
# (nccl-tests issues [212](https://github.com/NVIDIA/nccl-tests/issues/212) and
# [309](https://github.com/NVIDIA/nccl-tests/issues/309)); on H200s it is the same. So **370 is a good value for a
# ring**, and for an all-gather or a reduce-scatter. But if your all-reduce shows it, NVLS is off. Look for `nvls
# channels` in the log (section 7) and for `NCCL_NVLS_ENABLE`.
#
# Look at the operation, too. For float32 NCCL lets these switches add, but not take a maximum or an average
# (`ncclNvlsSupported` in [device.h](https://github.com/NVIDIA/nccl/blob/master/src/include/device.h), NCCL 2.30.7).
# So whoever times `all_reduce(x, op=ReduceOp.MAX)` measures a ring or a tree, and good GPUs look slow.

# %% [markdown]
# ## 6. Protocols, and how NCCL chooses
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
# **Simple** sends almost only data, but each step has to wait in a *memory fence*, until all earlier writes are
# visible. **LL** (low latency) needs no fence, because whoever sees a flag has the data beside it, but half of its
# bytes are flags. **LL128** wastes little, but needs its 128 bytes to arrive in order. Where they do not, it silently
# delivers wrong numbers, so never force it (NVIDIA/nccl issues [281](https://github.com/NVIDIA/nccl/issues/281),
# [786](https://github.com/NVIDIA/nccl/issues/786)).
#
# NCCL knows their costs from a table of constants, *recorded* here from src/graph/tuning.cc. For rings:
#
# | microseconds | LL | LL128 | Simple |
# |---|---|---|---|
# | once, before the first hop | 6.6 | 14 | 8.4 |
# | each hop over NVLink | 0.6 | 1.9 | 3.4 |
# | each hop over the network | 2.7 | 4.0 | 14 |
# | share of the bandwidth | at most 1/2 | 0.92 | 1 |
#
# Before every collective NCCL's **tuner** computes for each pair of algorithm and protocol t = latency + S/bandwidth,
# and takes the pair with the smallest. `nccl_tuner` does the same with the same constants; its docstring lists what
# it leaves out.
#
# **Predict.** Which protocol does a ring take for 64 KiB on eight A100s?

# %%
protocol_of_64_kib = predict("64 KiB on eight A100s", ["Simple", "LL128", "LL"])

# %%
a100 = nccl_tuner.MACHINES["8 x A100"]
for protocol in ("LL", "LL128", "Simple"):
    start = nccl_tuner.latency(("ring", protocol), a100)
    rate = nccl_tuner.bandwidth(("ring", protocol), a100)
    t = nccl_tuner.predict(2**16, a100)["ring", protocol]
    parts = f"{start * 1e6:5.1f} µs, then {rate / 1e9:5.1f} GB/s"
    print(f"ring / {protocol:7}{parts}: {t * 1e6:5.1f} µs for 64 KiB")

# %% jupyter={"source_hidden": true}
assert nccl_tuner.choose(2**16, a100) == ("ring", "LL")
protocol_of_64_kib.compare("LL")

# %% [markdown]
# **Compare.** LL, although half of its bytes are flags. The start and the ring's 14 hops take 15 µs without a fence
# and 56 µs with one, and the bytes about one microsecond.
#
# Larger messages pay for wasted bytes. So the same node goes over to LL128 and then to Simple as S grows. Where a
# switch adds, there is one more pair, NVLS with Simple: 25 µs once, no hops, and then, as NCCL assumes, 338 GB/s on
# eight H200s. There ring / LL has 15 µs and 81 GB/s.
#
# **Predict.** The sizes are powers of two. From which one on does NCCL take NVLS on eight H200s?

# %%
nvls_from = predict("NVLS on eight H200s from", unit="MiB")

# %%
for name in ("8 x A100", "8 x H200"):
    for size, pair in nccl_tuner.switch_points(nccl_tuner.MACHINES[name]).items():
        print(f"{name}, from {format_bytes(size):>7}: {' / '.join(pair)}")

# %% jupyter={"source_hidden": true}
h200 = nccl_tuner.MACHINES["8 x H200"]
switches = nccl_tuner.switch_points(h200)
assert [*switches.values()] == [("ring", "LL"), ("nvls", "Simple")]
fast, adds = ("ring", "LL"), ("nvls", "Simple")
starts = [round(nccl_tuner.latency(pair, h200) * 1e6) for pair in (fast, adds)]
rates = [round(nccl_tuner.bandwidth(pair, h200) / 1e9) for pair in (fast, adds)]
assert starts == [15, 25] and rates == [81, 338]
nvls_from.compare([*switches][1] / 2**20)

# %% [markdown]
# **Compare.** From 2 MiB. Ring / LL starts 10 µs earlier, and loses that after 10 µs · 81·338/(338−81) GB/s ≈ 1.06 MB,
# just above 1 MiB (1.05 MB), so 1 MiB is a good answer, too. On a real node NCCL 2.30.7 changed at the same size
# (*recorded*, stas00/ml-engineering, benchmarks/README.md).
#
# Many nodes change the picture once more, because a ring's hops grow with the number of nodes, a tree's only with its
# logarithm (section 12).
#
# ### Is it right about real time?
#
# Here are sixteen sizes on eight A100s, *recorded* (stas00/ml-engineering, network/README.md). The line is NCCL's own
# prediction. Its constants were not fitted to these measurements.

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
# The largest messages are right within a few percent, but small ones really take three times as long as NCCL believes.
# That does little harm, because a choice needs only the right order: if LL and LL128 both take 20 µs more, the same one
# wins. And 16 MiB take more than twice as long as 8 MiB (276.6 and 133.5 µs), which no latency + S/bandwidth explains.
# It looks as if NCCL went over to another protocol at 16 MiB already, too early (section 12). So bus bandwidth does not
# always grow with the size: measure the sizes that your job sends.
#
# Leave `NCCL_ALGO` and `NCCL_PROTO` alone in a job. They force a choice, and the next version, size or node count may
# need another one.

# %% [markdown]
# ## 7. What did NCCL decide? Its log
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
# (lesson 01). Here are four jobs from public reports (linked in section 15), two *recorded* lines of each:

# %%
for name, log in nccl_logs.LOGS.items():
    print(f"{name}:", *log.splitlines(), sep="\n   ")

# %% [markdown]
# **Predict.** Which of them use RDMA? And which one is as fast as it should be?

# %%
sound = predict("as fast as it should be", [*nccl_logs.LOGS])

# %%
verdicts = {name: nccl_logs.network(log) for name, log in nccl_logs.LOGS.items()}
for name, says in verdicts.items():
    print(f"{name:15} {says}")

# %% jupyter={"source_hidden": true}
assert [*verdicts.values()] == [
    "GPUDirect RDMA",
    "TCP",
    "RDMA from host memory",
    "one node, GPUs through host memory",
]
sound.compare("nccl 1189")

# %% [markdown]
# **Compare.** Two use RDMA, but only the first job is as fast as it should be. `GDRDMA` means that the card reads the
# GPU's memory itself. In the second job NCCL found no InfiniBand device and fell back to TCP, without an error. The
# third has RDMA, but its bytes make a detour through host memory. In the last, eight GPUs on an NVSwitch talk through
# host memory.
#
# None of these jobs fails. Some are slow, and only the log says why (more of it in section 15).
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
# ## 8. What to take to work
#
# [`scripts/busbw.py`](../scripts/busbw.py) is a complete program that needs only PyTorch. It starts as above,
# measures all-reduces of growing sizes and prints algorithm and bus bandwidth. If these are what the machine should
# give (sections 5 and 17), the network is not to blame. It times *sums* of float32, as nccl-tests does by default, so
# NVLS may be used. If nccl-tests gets more on the same hosts, look at PyTorch.

# %%
Markdown(f"```python\n{(SCRIPTS / 'busbw.py').read_text()}```")

# %% [markdown]
# Here it runs under `torchrun`, on CPU ranks:

# %% tags=["nbval-ignore-output"]
said = torchrun("busbw.py", "--largest", 2**22, "--calls", 5, ranks=world_size, gpus=False)
print(said)
assert said.startswith(f"{world_size} ranks, gloo") and len(said.splitlines()) == 9

# %% [markdown] tags=["deeper"]
# ## 9. Few bytes and few steps: exchanges · deeper
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
# The next cell counts all algorithms (the hierarchical one as if the ranks were on several nodes). **Predict** for
# four ranks: how many steps has each of these two, and how many S does the busiest rank send?


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
counts = {name: count_messages(all_reduce, world_size) for name, all_reduce in algorithms.items()}
print(f"{world_size} ranks{'steps':>18}{'S sent by the busiest':>24}")
for name, count in counts.items():
    print(f"{name:20}{count.steps:5}{count.busiest:20.3f}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
for name, count in counts.items():
    steps, sent = formula(name, world_size)
    assert count.steps == steps and abs(count.busiest - sent) < 1e-9

# %% [markdown] tags=["deeper"]
# **Compare.** Recursive doubling has 2 steps and sends 2 S; halving and doubling has 4 steps and sends 1.5 S.
#
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
    tree = [-1] * n
    reach = 1  # ranks reach-1, 3*reach-1, 5*reach-1, … are on one level; the leaves have reach 1
    while reach <= n:
        for place, rank in enumerate(range(reach - 1, n, 2 * reach)):
            right, left = rank + reach, rank - reach
            up = right if place % 2 == 0 and right < n else left
            tree[rank] = max(up, -1)
        reach *= 2
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
# In section 4 every GPU had a port of its own. Cheaper nodes have one for all four GPUs.
#
# **Predict**: which of the three emulated algorithms get slower at 4 MiB?

# %% tags=["deeper"]
slower = predict(
    "slower with one port", ["ring and tree", "the hierarchical one", "all three", "none"]
)

# %% tags=["deeper"]
shared = two_level(2, 4, *links, nics="node")
one_card = emulated_seconds(contenders, shared, [2**22])
print(f"{'µs, 4 MiB':14}{'a port each':>12}{'one port':>12}")
for name in contenders:
    print(f"{name:14}{at_4_mib[name] * 1e6:12.1f}{one_card[name][0] * 1e6:12.1f}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert abs(one_card["ring"][0] / at_4_mib["ring"] - 1) < 1e-6
assert one_card["hierarchical"][0] > 1.5 * at_4_mib["hierarchical"]
assert one_card["hierarchical"][0] < one_card["ring"][0]
slower.compare("the hierarchical one")

# %% [markdown] tags=["deeper"]
# **Compare.** Only the hierarchical one, because only it used the other ports. But it still sends only S through the
# port where the ring sends 1.75 S, so it stays ahead.
#
# What an algorithm gains depends on the wires.
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
# nodes there are eight ports of 200 Gb/s per node. **Predict**: up to which size does the tree win on 64 nodes?

# %% tags=["deeper"]
tree_until = predict("the tree wins on 64 nodes up to", ["1 MiB", "64 MiB", "some GiB"])

# %% tags=["deeper"]
eight_a100 = nccl_tuner.MACHINES["8 x A100"]
for nodes in (2, 64):
    machine = nccl_tuner.Machine(nodes, 8, "nvlink", eight_a100.bandwidth, network=8 * 25e9)
    for size, pair in nccl_tuner.switch_points(machine).items():
        print(f"{nodes} nodes, from {format_bytes(size):>7}: {' / '.join(pair)}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert nccl_tuner.choose(2**32, machine)[0] == "tree"
assert nccl_tuner.choose(2**33, machine)[0] == "ring"
tree_until.compare("some GiB")

# %% [markdown] tags=["deeper"]
# **Compare.** On 64 nodes it wins up to gigabytes, because its hops grow with log₂ of the nodes and the ring's with
# the number of nodes. On two nodes it takes turns with the ring up to 16 MiB.
#
# In one node of eight the tree never wins (section 6): its chain has as many hops as the ring, and less bandwidth.
# (*Modelled*; there was no recorded table to compare with.)
#
# ### Why small messages take longer
#
# Section 6 found that eight A100s take three times as long for small messages as NCCL's constants say. To *predict*
# the time, look for what the constants leave out, and take its size from other measurements:
#
# 1. The table was made with `-g 8`: one thread starts the kernels of eight GPUs, one after the other. For a few
#    bytes, a DGX A100 in the same mode needs 10 µs with two GPUs and 33.7 µs with eight (nccl-tests issue
#    [123](https://github.com/NVIDIA/nccl-tests/issues/123)).
# 2. A hop that forwards a slice takes longer than an empty one. Two other nodes of eight A100s say how much
#    (`recorded.OTHER_A100_ALL_REDUCE`).
#
# Do not take the result for a forecast. No number in it comes from the table, but these two corrections were chosen
# by somebody who knew roughly how large the errors were. And the second correction is *defined* as the time that is
# still missing on the two other nodes, so it would take up the first one as well: only their sum means something.

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
# *The figure: as in section 6, with a line for each correction; the thick one ("hops under load") has both.*
#
# The median error of 10.5 % hides two things. **From 4 to 16 MiB** the model is first 50 % too slow, then 9 % too
# fast, because the recorded time doubles from 8 to 16 MiB. The model switches from LL128 to Simple only at 32 MiB, so
# its bus bandwidth dips one doubling later. On the two other nodes 16 MiB takes only 1.6 times as long as 8 MiB, so
# the early switch belongs to this node and its version of NCCL. **From 16 to 256 MiB** the published constants are 17
# to 37 % too fast, probably because a ring has to fill and to drain, so that real bandwidth builds up slowly.
#
# ### Eight H200s
#
# Section 6 found NCCL's choice, and it is right for all twenty sizes of the recorded table. Is the time right, too?

# %% tags=["deeper"]
h200 = nccl_tuner.MACHINES["8 x H200"]
for size in recorded.H200_ALL_REDUCE.sizes:
    expected = ("ring", "LL") if size <= 2**20 else ("nvls", "Simple")
    assert nccl_tuner.choose(size, h200) == expected

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
# NCCL's bandwidth for NVLS, 591 GB/s, is good for choosing only. The bytes of section 5 give a better one: (N+1)/N·S
# at NCCL's rate for the link and 85 % efficiency give 490 GB/s, 2 % above the recorded value. With that rate the time
# is right within 8 % from 256 MiB on, and around 8 MiB up to 32 % too short.

# %% [markdown] tags=["deeper"]
# ## 13. The C API · deeper
#
# NCCL's own interface is in C: some sixty functions (`nccl.h` of version 2.30), of which a dozen do the daily work.
# Error messages and traces contain their names. [native/all_reduce.c](../native/all_reduce.c) is a complete program
# that sums an array over all GPUs of the machine, checks every element, and prints algorithm and bus bandwidth,
# either with one process for all GPUs or with one for each, as PyTorch does.
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
# The process that drives four GPUs runs `for` over its ranks and calls `ncclAllReduce` for each. **Predict**: the
# next cell shows the loop. What happens without `ncclGroupStart` and `ncclGroupEnd` around it?

# %% tags=["deeper"]
ungrouped = predict("the loop without a group", ["an error", "a hang", "wrong sums"])

# %% tags=["deeper"]
c_programs.show("all_reduce.c", "all_reduce")

# %% jupyter={"source_hidden": true} tags=["deeper"]
ungrouped.compare("a hang")

# %% [markdown] tags=["deeper"]
# **Compare.** It may wait for ever. A call may block until the other ranks have called too. Then the first call waits
# for rank 1, whose call comes only later in the same loop: a deadlock of one process with itself.
#
# Between start and end, calls only note what is to be done, and `ncclGroupEnd` launches everything together. That
# also makes several small operations one launch, and lets sends and receives make progress together ([Group
# Calls](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/groups.html)).
#
# The two pointers are equal here, so `ncclAllReduce` works **in place**, as `dist.all_reduce` always does. An
# all-gather is in place if a rank's piece already lies where it belongs: `ncclAllGather(whole + rank * n, whole, n,
# …)` ([In-place Operations](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/inplace.html)).
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
# | `ncclCommRevoke` (2.28) | after a failure: stop what is under way |
# | `ncclCommShrink` (2.27) | a new communicator of the remaining ranks, which continue without a restart |
# | `ncclCommGrow` (2.29) | a new communicator that takes in further ranks, without a restart |
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
# No warning, with all warnings turned into errors. Now run it, here:

# %% tags=["deeper", "nbval-ignore-output"]
if toolkit:
    for mode in ("one-process", "per-gpu"):
        done = c_programs.run(work / "all_reduce", mode)
        assert done.returncode in (0, 2)  # 2: no GPU
        print(f"{mode}: exit code {done.returncode}", done.stdout, done.stderr, sep="\n")

# %% [markdown] tags=["deeper"]
# Without a GPU, CUDA complains about its driver. With GPUs you have just read the time of one all-reduce of 64 MiB
# with its bandwidths, and the verdict on the sums. Eight A100s show 172 GB/s bus bandwidth at this size (*recorded*,
# the table of section 6).
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

# %% [markdown] tags=["deeper"]
# **Predict.** The program sums once to check and twenty times to measure, in one process that drives four GPUs. How
# many calls of `ncclAllReduce` will the trace show?

# %% tags=["deeper"]
calls = predict("calls of ncclAllReduce for four GPUs")

# %% tags=["deeper"]
if toolkit:
    traced = built / "program", built / "stand_in", world_size, "one-process", 65536
    done = c_programs.run_on_stand_ins(*traced, LD_PRELOAD=built / "libtrace_nccl.so")
    trace = done.stderr.splitlines()
    for line in trace[: world_size + 3]:
        print(re.sub(" us=.*", "", line))
    print("…")
    called = Counter(re.search(r"nccl\w+", line)[0] for line in trace)
    print(*(f"{n:4} {name}" for name, n in called.items()), sep="\n")

# %% jupyter={"source_hidden": true} tags=["deeper"]
if toolkit:
    assert done.returncode == 0 and "every sum as expected" in done.stdout
    assert called["ncclAllReduce"] == 21 * world_size and called["ncclGroupEnd"] == 21
calls.compare(21 * 4)

# %% [markdown] tags=["deeper"]
# **Compare.** 84: check and measurements are 21 calls on each of four GPUs, in 21 groups.
#
# Line `#2` is an all-reduce of 65,536
# numbers of 4 bytes, 256 KiB, on communicator `c0`, where this process has rank 0, in stream `s0`. `bytes` is S, the
# size of the argument. No caller sees what travels over the links, in a ring 2(N−1)/N·S.
#
# **Predict.** Each line also has a time, `us=`. What took so long?

# %% tags=["deeper"]
timed = predict(
    "the time in a line", ["data on the links", "the call, on the CPU", "both together"]
)

# %% tags=["deeper", "nbval-ignore-output"]
for name in ("ncclAllReduce", "ncclGroupEnd") if toolkit else ():
    spent = [float(line.partition(" us=")[2].split()[0]) for line in trace if name in line]
    print(f"{name:14} {len(spent):3} calls, median {np.median(spent):.1f} µs")

# %% jupyter={"source_hidden": true} tags=["deeper"]
timed.compare("the call, on the CPU")

# %% [markdown] tags=["deeper"]
# **Compare.** The call: it is the time for which it kept the *CPU*. In a group `ncclAllReduce` only takes a note, and
# the launch happens in `ncclGroupEnd`. On a GPU both are over before the data has moved.
#
# So a long time here means a slow launch, or a rank that waited for others to call, never a slow link. (The stand-in
# adds within `ncclGroupEnd`, which takes longer than a launch.) The same on real NCCL, if this machine has a GPU:

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
# Section 7 looked at connections only. Here is more of two *recorded* logs, each of two nodes with two GPUs, with
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
# ([nccl issue 1189](https://github.com/NVIDIA/nccl/issues/1189), comment of April 2025).

# %% tags=["deeper"]
print(nccl_logs.CONNECTIONS)

# %% [markdown] tags=["deeper"]
# **Predict** from the lines `Ring`: in which order does channel 6 go through the four ranks, in which channel 7, and
# why are there two?

# %% tags=["deeper"]
print(nccl_logs.table(nccl_logs.CONNECTIONS))
for channel in (6, 7):
    order = nccl_logs.ring_order(nccl_logs.CONNECTIONS, channel)
    print(f"ring {channel}: {' -> '.join(map(str, [*order, 0]))}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert nccl_logs.ring_order(nccl_logs.CONNECTIONS, 6) == [0, 1, 3, 2]
assert nccl_logs.ring_order(nccl_logs.CONNECTIONS, 7) == [0, 2, 3, 1]
for sender, receiver, via in nccl_logs.transports(nccl_logs.CONNECTIONS):
    assert via == "P2P/CUMEM" if (sender < 2) == (receiver < 2) else "GDRDMA" in via

# %% [markdown] tags=["deeper"]
# **Compare.** Ranks 0 and 1 are node A, 2 and 3 are node B. Ring 6 leaves A from rank 1 and enters B at rank 3; ring
# 7 runs the other way. One ring alone would leave half of the wires idle.
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
# The algorithm of a call is not decided at this point. `NCCL_DEBUG_SUBSYS=TUNING` prints the table of section 6 now
# and, later, one line per call: `AllReduce: 33554432 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..31}` ([NCCL
# user guide, Logging](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html)).
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
# In a row of its table, the left half is **out-of-place** (result into another buffer), the right half **in-place**.
# `#wrong` counts wrong elements; anything but 0 makes the rest worthless. The next cell holds one row, *recorded*
# ([nccl-tests issue 152](https://github.com/NVIDIA/nccl-tests/issues/152)).
#
# **Predict**: the command that made it is not shown. How many GPUs were there?

# %% tags=["deeper"]
took_part = predict("GPUs of the recorded row")

# %% tags=["deeper"]
row = "67108864 16777216 float sum -1 1367.2 49.09 92.04 0 1362.3 49.26 92.36 0".split()
size, elements = int(row[0]), int(row[1])
time_us, algbw_shown, busbw_shown, wrong = map(float, row[5:9])
print(f"{size} bytes in {time_us} µs: S/t = {size / time_us / 1e3:.2f} GB/s")
print(f"algbw {algbw_shown}, busbw {busbw_shown}: factor {busbw_shown / algbw_shown:.3f}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
ranks = round(2 / (2 - busbw_shown / algbw_shown))  # the factor of an all-reduce is 2(N-1)/N
assert size == 4 * elements and wrong == 0
assert abs(costs.algbw(size, time_us * 1e-6) / 1e9 - algbw_shown) < 0.02
assert abs(costs.busbw("all_reduce", ranks, size, time_us * 1e-6) / 1e9 - busbw_shown) < 0.02
took_part.compare(ranks)

# %% [markdown] tags=["deeper"]
# **Compare.** Sixteen: the factor busbw/algbw is 2(N−1)/N = 1.875.
#
# ### Six questions from users
#
# Each follows the issue named; figures are *recorded* there, and computed again in the cell below.
#
# **1. "Eight H100s should reach 450 GB/s, and mine show an algbw of 250."** ([nccl-tests
# 212](https://github.com/NVIDIA/nccl-tests/issues/212)) 250 is 438 in the column busbw, by NVLS. Larger sizes reach
# about 480. With a ring about 370 is good, 82 % of the line; the rest is overhead of the links' protocol. So 370 for
# an all-reduce means that NVLS is off (section 5).
#
# **2. "Mine shows 480 of 450 GB/s. Faster than the wire?"**
# ([nccl-tests 272](https://github.com/NVIDIA/nccl-tests/issues/272)) The switch adds, as section 5 shows.
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
# **6. "My program gets a third of what the table says."** One call of 4 GB reached 3722 Gb/s, but only 561
# without a warm-up before it. 1000 calls of 4 MB reached 1146 (*recorded*, stas00/ml-engineering, network/README.md).
# A benchmark's last row holds only for large messages after a warm-up. Compare the row of **your** size, and go on
# (`-e 8G`) while the bandwidth still grows from row to row.

# %% tags=["deeper"]
print(f"1: a ring {370 / 450:.0%} of the line; algbw 250 is busbw {250 * 2 * (8 - 1) / 8:.0f}")
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
print(f"6: one call {3722 / 8:.0f} GB/s, without warm-up {561 / 8:.0f}", end="; ")
print(f"small calls {1146 / 8:.0f}, {1 - 1146 / 3722:.0%} less")

# %% [markdown]
# ## Recap, with the numbers of this run

# %%
for name, count in counted.items():
    print(f"{name:5} {count.steps:2} steps, {count.busiest:.2f} S from the busiest rank")
fastest = min(at_4_mib, key=at_4_mib.get)
gain = at_4_mib["ring"] / at_4_mib[fastest]
print(f"4 MiB on two emulated nodes: {fastest}, {gain:.1f} times as fast as one ring")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - An all-reduce is a pattern of messages. A right sum does not show which: count bytes and steps.
# - Ring: 2(N−1) steps and 2(N−1)/N·S, so its bytes hardly grow, but its latency does. Trees: about 2·log₂ N steps. They
#   cross at a size that grows with N. NCCL lays several rings, its channels, so that every port has work.
# - Where the switch adds (NVLS), a GPU sends (N+1)/N·S. Eight H100s then show about 480 GB/s bus bandwidth, and about
#   370 with a ring.
# - NCCL computes a time for each algorithm and protocol from a table of constants, and takes the smallest.
# - A slow network raises no error. Look for `GDRDMA` in the log, pass `device_id=`, and measure the sizes of your
#   job.
#
# **Now you can answer**
#
# 1. Why does NCCL lay several rings through the same GPUs?
# 2. 4 KiB on 1,024 ranks: ring or tree, and why?
# 3. Two nodes with one port for each GPU: why does one ring over all GPUs lose?
# 4. Eight H100s show 370 GB/s for an all-reduce. Is that good? And a program that times a maximum of float32?
# 5. How can a protocol that sends as many flags as data be the fastest?
# 6. From about which size on does NCCL take NVLS on eight H200s, and what decides it?
# 7. A log says `via NET/IB/3` between nodes, without `GDRDMA`. What is wrong?
#
# <details><summary>Answers</summary>
#
# 1. One ring leaves each node through one port; several rings use all ports, each with a share of the data (section 1).
# 2. The tree: 20 latencies against 2,046 (section 3).
# 3. All that leaves a node passes one port, and the others are idle (section 4).
# 4. It is good for a ring, but NVLS should give about 480. For a maximum of float32 there is no NVLS (section 5).
# 5. It does not wait for a fence at each hop, and for small messages that is most of the time (section 6).
# 6. 2 MiB: NVLS starts 10 µs later than a ring with LL, and has four times the bandwidth (section 6).
# 7. The bytes go through host memory, so the network runs below its rate (section 7).
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
