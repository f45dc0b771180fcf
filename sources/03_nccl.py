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
# sends everything to one GPU, which adds and sends the sum back. Over the same links, measured at 274 GB/s, it needs
# 55 ms (*modelled*), and on a thousand GPUs 8 seconds. Eight H200 GPUs do something stranger: their links carry 450
# GB/s each way, and NCCL reports 482 GB/s (*recorded*, same file).
#
# **You will be able to**
# - *build* the algorithms of a communication library out of messages between two ranks, and *prove* their bytes and
#   steps;
# - *predict* the time of each on one node, on two levels and on thousands of ranks, and say where they cross;
# - *explain* which algorithm and protocol NCCL picks for a size, and where a table departs from the model;
# - *call* NCCL from C, *watch* the calls of a running program, and *read* what NCCL says about itself;
# - *judge* whether a bandwidth is what the machine should give.
#
# **Before this:** [01 interconnects](01_gpu_interconnects.ipynb), [02 collectives](02_collectives.ipynb). **Time:**
# about 150 minutes to read (sections 1 to 6: 75 minutes; 7 to 11 stand alone), under a minute to run.

# %% [markdown]
# ## Eight predictions
#
# Write down an answer to each, however unsure. They come up again on the way, and the answers are at the end.
#
# 1. Eight ranks all-reduce S bytes through rank 0. How many bytes does rank 0 send?
# 2. A ring of eight: how many steps follow one another, and how many bytes does each rank send? And a ring of 1,000?
# 3. 4 KiB on 1,024 ranks: is a ring or a tree faster, and by what factor?
# 4. Two nodes with four GPUs each, and the link between them is nine times slower. Which is better for 4 MiB: one
#    ring over all eight, or a ring in each node and another between the nodes? By what factor?
# 5. How can a protocol that sends as many flags as data be the faster one?
# 6. Eight A100s need 133.5 µs for 8 MiB and 276.6 µs for 16 MiB, more than twice as long. Is that a broken
#    measurement?
# 7. How can eight GPUs with links of 450 GB/s show a bus bandwidth of 482 GB/s?
# 8. With four GPUs instead of eight the same machine shows 363 GB/s. Is it broken?

# %% [markdown]
# The first cell imports everything and names every parameter.

# %% tags=["parameters"]
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from IPython.display import Markdown

from course_utils import c_programs, costs, device, launch, nccl_tuner, plots, record, recorded
from course_utils.checks import message_steps
from course_utils.costs import algbw, all_reduce_seconds, busbw, format_bytes
from course_utils.fabric import emulate
from course_utils.topology import two_level
from course_utils.widgets import algorithm_chooser, all_reduce_stepper

world_size = 4  # ranks of sections 1 to 3, 7, 8 and 10: 2 to 8
virtual = (2, 4)  # nodes, and GPUs in each, of the emulated cluster
emulated_sizes = [2**k for k in (12, 15, 18, 21, 24)]  # bytes: 4 KiB to 16 MiB
slowdown = 5000  # how much slower than the clock the slow motion is

# %% [markdown]
# ## 1. Through one rank, or round a ring
#
# NCCL is a library of algorithms that are made of messages between two GPUs. So is this section. Each function below
# is an **all-reduce** of x, in place: afterwards every rank holds the sum over all ranks. Nothing in it is allowed to
# call a collective.
#
# ### The root
#
# **Predict** (question 1). Everybody sends x to rank 0. Rank 0 adds and sends the sum to everybody. How many bytes
# does it send, and how many messages follow one another?


# %%
def root_all_reduce(x):
    """Sum x over all ranks, in place, at rank 0."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
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
# A result that is right proves little: many wasteful programs give it. So the next two functions compare with the
# library *and* count. The **ledger** notes each message of a rank (`record()`, lesson 02). A **step** is a round of
# messages that can be under way at the same time: in one step a rank sends at most one message and receives at most
# one, and it can pass on only what came in an earlier step. `message_steps` finds the number from the ledgers of all
# ranks, from the order of the messages and not from any clock.


# %%
def checked(algorithm, numel, dtype=torch.float32):
    """On a rank: run `algorithm`, compare with the library, return what was communicated."""
    x = torch.randint(-99, 100, (numel,), device=device()).to(dtype)  # another x on each rank
    expected = x.clone()
    dist.all_reduce(expected)
    with record() as ledger:
        algorithm(x)
    assert torch.equal(x, expected)  # whole numbers: no rounding, so equal to the last bit
    return ledger


numel = 840 * 300  # numbers in the counted tensors, float32; 840 divides by every number up to 8


def count(name, algorithm):
    """Steps, and bytes that the busiest rank sends, as a multiple of S."""
    ledgers = launch(checked, algorithm, numel, world_size=world_size)
    sent = [ledger.sent / (4 * numel) for ledger in ledgers]
    steps = message_steps(ledgers)
    print(f"{name:18}{steps:3} steps; sent by each rank, in S:", *(f"{s:.2f}" for s in sent))
    return steps, max(sent)


# %%
counted = {"root": count("root", root_all_reduce)}

# %% [markdown]
# Everything passes rank 0: (N−1)·S in, then (N−1)·S out, one message after the other. The other ranks wait most of
# the time.
#
# ### The ring
#
# Put the ranks in a circle; everyone sends to the right and receives from the left, all at once. The two helpers name
# the neighbours and do one such exchange. `ranks` is a list of ranks that form the circle, all of them unless we say
# otherwise: section 3 makes small circles.


# %%
def place(ranks=None):
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
# First the wrong turn of lesson 02, because it is so common: pass whole tensors round the circle and add what comes
# by.


# %%
def whole_tensors_round_a_ring(x):
    """Sum x over all ranks, in place, at (n-1) S bytes a rank: right and wasteful."""
    _, n, right, left = place()
    passing = x.clone()
    for _ in range(n - 1):
        arriving = torch.empty_like(x)
        exchange(passing, right, arriving, left)
        x += arriving
        passing = arriving


_ = count("whole tensors", whole_tensors_round_a_ring)

# %% [markdown]
# > **Misconception.** "Passing tensors round a ring is ring all-reduce." The result is right, no rank is a
# > bottleneck, and each sends (N−1)·S: as much as the root did, now from everywhere. On real numbers it has a second
# > fault. Every rank adds in another order, so their sums differ in the last bits, and models that should be equal
# > drift apart. Libraries have it too: gloo lists such an `allreduce_ring`, P−1 steps and P·S bytes
# > ([docs/algorithms.md](https://github.com/pytorch/gloo/blob/main/docs/algorithms.md)).
#
# The ring that libraries use cuts x into N **pieces** and sends pieces only. In its first half a piece travels round
# the circle and collects a summand at each rank: a **reduce-scatter**. After N−1 steps rank r holds piece r of the
# sum.
#
# `tensor_split` cuts into N pieces whose lengths differ by one at most. They are views: adding to a piece changes x.


# %%
def ring_reduce_scatter(x, ranks=None):
    """Sum over `ranks`, in place: piece i of x is complete on the i-th of them. Return my piece."""
    me, n, right, left = place(ranks)
    pieces = x.view(-1).tensor_split(n)
    for step in range(1, n):
        leaving, staying = pieces[(me - step) % n], pieces[(me - step - 1) % n]
        arriving = torch.empty_like(staying)
        exchange(leaving, right, arriving, left)
        staying += arriving  # now the sum of step + 1 ranks
    return pieces[me]


# %% [markdown]
# <details><summary>Follow one piece: where does piece 0 start, and who adds what?</summary>
#
# In step 1, rank r sends piece r−1: rank 1 sends piece 0 to rank 2, which adds its own. In step 2 rank 2 sends it to
# rank 3, and so on round the circle, until rank 0 adds the last summand in step N−1. Each piece starts one place to
# the right of the rank where it will end, and meets every rank once.
# </details>
#
# In the second half the finished pieces go round and are copied: an **all-gather**. Then all-reduce is two lines.


# %%
def ring_all_gather(x, ranks=None):
    """Piece i of x is right on the i-th of `ranks`; copy it to all of them, in place."""
    me, n, right, left = place(ranks)
    pieces = x.view(-1).tensor_split(n)
    for step in range(n - 1):
        exchange(pieces[(me - step) % n], right, pieces[(me - step - 1) % n], left)


def ring_all_reduce(x, ranks=None):
    """Sum x over `ranks`, in place, in 2(n-1) steps of 1/n of x."""
    ring_reduce_scatter(x, ranks)
    ring_all_gather(x, ranks)


# %% [markdown]
# **Predict** (question 2). Steps, and bytes that each rank sends?

# %%
counted["ring"] = count("ring", ring_all_reduce)
assert counted["ring"] == (2 * (world_size - 1), 2 * (world_size - 1) / world_size)

# %% [markdown]
# Each half takes N−1 steps of S/N bytes: 2(N−1) steps, and 2(N−1)/N·S bytes from every rank. No all-reduce in which
# only ranks add can send less (lesson 02, section 5). The price is in the steps: they grow with N. The halves are
# collectives of their own, so they are held against the library one by one:


# %%
def halves(numel):
    """On a rank: each half of the ring against the library. Return a ledger of each."""
    x = torch.randint(-99, 100, (numel,), device=device()).float()
    total = x.clone()
    dist.all_reduce(total)
    with record() as scattering:
        piece = ring_reduce_scatter(x)
    assert torch.equal(piece, total.tensor_split(dist.get_world_size())[dist.get_rank()])
    with record() as gathering:
        ring_all_gather(x)
    assert torch.equal(x, total)
    return scattering, gathering


by_half = zip(*launch(halves, numel, world_size=world_size), strict=True)
for name, ledgers in zip(("reduce-scatter", "all-gather"), by_half, strict=True):
    steps, share = message_steps(ledgers), max(ledger.sent for ledger in ledgers) / (4 * numel)
    print(f"ring {name:15}{steps:3} steps, {share:.2f} S from each rank")
    assert (steps, share) == (world_size - 1, (world_size - 1) / world_size)

# %% [markdown]
# > **What changes on real GPUs.** One kernel does the whole ring, in slices: a rank adds one slice while the next is
# > arriving, so the steps overlap. And NCCL lays several rings, called **channels**, through the same GPUs, each with
# > its own part of the data and its own links.

# %% [markdown]
# ## 2. Trees and exchanges
#
# ### A tree
#
# A small message does not care about bytes, only about steps. So let pairs add first, then pairs of pairs: after
# ⌈log₂ N⌉ steps rank 0 has the sum, and the same way back hands it out. The messages form a **binomial tree**: rank 0
# has log₂ N children, and these have log₂ N − 1, log₂ N − 2, … and 0 children of their own.


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


counted["tree"] = count("tree", tree_all_reduce)

# %% [markdown]
# 2⌈log₂ N⌉ steps instead of 2(N−1), and the root sends the whole of x in each step down.
#
# ### Recursive doubling
#
# In the tree at most half of the ranks send in any step. Let both partners send, and both add: after each step twice
# as many ranks share a sum, and nobody has to be told the result. Partners differ in one bit of their rank: `rank ^
# reach`.
#
# That needs a power of two. Other world sizes are **folded**: ranks beyond the largest power of two give x to a
# partner before, and get the sum from it after.


# %%
def folded(x, algorithm):
    """Run algorithm(x, power) on the first 2^k ranks; each other rank lets a partner act for it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    power = 2 ** (n.bit_length() - 1)  # the largest power of two up to n
    if rank >= power:
        dist.send(x, dst=rank - power)
        dist.recv(x, src=rank - power)
        return
    if rank + power < n:
        arriving = torch.empty_like(x)
        dist.recv(arriving, src=rank + power)
        x += arriving
    algorithm(x, power)
    if rank + power < n:
        dist.send(x, dst=rank + power)


# %%
def doubling(x, power):
    """Sum x over the first `power` ranks, in place: log2(power) exchanges of all of x."""
    rank, reach = dist.get_rank(), 1
    arriving = torch.empty_like(x)
    while reach < power:
        exchange(x, rank ^ reach, arriving, rank ^ reach)
        x += arriving
        reach *= 2


def recursive_doubling_all_reduce(x):
    """Sum x over all ranks, in place."""
    folded(x, doubling)


counted["recursive_doubling"] = count("recursive doubling", recursive_doubling_all_reduce)

# %% [markdown]
# Half the steps of the tree. Each carries all of x, from every rank.
#
# ### Recursive halving and doubling
#
# Both ideas at once. Partners exchange *halves*: each keeps one half of what it has and gives the other away. The
# parts shrink, S/2, S/4, …, to S/N, where each rank holds the sum of one piece: a reduce-scatter in log₂ N steps. The
# same messages backwards are the all-gather.


# %%
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


def halving_doubling_all_reduce(x):
    """Sum x over all ranks, in place."""
    folded(x, halving_and_doubling)


counted["halving_doubling"] = count("halving/doubling", halving_doubling_all_reduce)

# %% [markdown]
# For a power of two: the ring's bytes in the tree's steps. This looks like the end of the search. Section 4 says what
# speaks against it.
#
# <details><summary>What does folding cost with three ranks, or with 1,000?</summary>
#
# Two more steps of S, whatever comes between: the partner of a folded rank sends S more. With 1,000 ranks 488 are
# folded, and the bytes of the busiest rank grow from 2 S to 3 S.
# </details>

# %% [markdown]
# ## 3. Two levels
#
# A cluster has fast links in a node and slow ones between nodes. A **hierarchical** all-reduce keeps most bytes where
# links are fast:
#
# 1. in each node, a ring reduce-scatter: each GPU holds one piece of the node's sum;
# 2. GPUs with the same place in their nodes all-reduce their pieces, S/g bytes for g GPUs a node, over the slow
#    links;
# 3. in each node, a ring all-gather.


# %%
def hierarchical_all_reduce(x, per_node):
    """Sum x over all ranks, in place; ranks 0 … per_node - 1 are on the first node, and so on."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if n % per_node:
        raise ValueError(f"{n} ranks do not fill nodes of {per_node}")
    place_in_node = rank % per_node
    node = range(rank - place_in_node, rank - place_in_node + per_node)
    same_place = range(place_in_node, n, per_node)
    piece = ring_reduce_scatter(x, node)
    ring_all_reduce(piece, same_place)
    ring_all_gather(x, node)


# %% [markdown]
# **Predict.** Two nodes with two ranks each. How many bytes does a rank send, and how many of them to the other node?


# %%
def halved(n):
    """Nodes, and ranks in each, as which n ranks are seen here: two nodes, or n where n is odd."""
    return (2, n // 2) if n % 2 == 0 else (n, 1)


def hierarchical(x):
    hierarchical_all_reduce(x, halved(dist.get_world_size())[1])


counted["hierarchical"] = count("hierarchical", hierarchical)

# %% [markdown]
# (g−1)/g·S in the node for each half, and 2(m−1)/m·S/g between m nodes. Add up and it is the ring's 2(N−1)/N·S: no
# byte saved, but only S/g·2(m−1)/m of them, here S/2, take the slow link.
#
# ### The whole table
#
# The same counts beside the formulas. `all_reduce_steps` and `all_reduce_bytes` give, for any number of ranks, steps
# and the bytes that the busiest rank sends.


# %%
def grid(n):
    return costs.Cluster(*halved(n), intra=(0.0, 0.0), inter=(0.0, 0.0))


print(f"{world_size} ranks" + f"{'steps':>17}{'formula':>9}{'S sent':>9}{'formula':>9}")
for name, (steps, sent) in counted.items():
    shape = grid(world_size)
    formula = costs.all_reduce_steps(name, shape), costs.all_reduce_bytes(name, shape, 1.0)
    print(f"{name:20}{steps:5}{formula[0]:9}{sent:9.3f}{formula[1]:9.3f}")
    assert steps == formula[0]
    assert abs(sent - formula[1]) < 1e-9

# %% [markdown]
# One world size and one tidy tensor prove little. The next cell runs every function on 1 to 5 ranks, on
# tensors of 0, 1, N−1, N, N+1 and 1,000 numbers of three types. Where N does not divide the size, pieces differ by
# one number, so the bytes may differ from the formula by a few numbers; the steps may not.

# %%
algorithms = {
    "root": root_all_reduce,
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "recursive_doubling": recursive_doubling_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
    "hierarchical": hierarchical,
}


def all_cases():
    """On a rank: every algorithm, awkward sizes, three types. Return the ledgers by case."""
    n = dist.get_world_size()
    return {
        (name, numel, dtype): checked(algorithm, numel, dtype)
        for name, algorithm in algorithms.items()
        for numel in (0, 1, n - 1, n, n + 1, 1000)
        for dtype in (torch.float32, torch.float64, torch.int64)
    }


# %%
for n in range(1, 6):
    by_rank = launch(all_cases, world_size=n)
    for name, length, dtype in by_rank[0]:
        ledgers = [cases[name, length, dtype] for cases in by_rank]
        sent = max(ledger.sent for ledger in ledgers) / dtype.itemsize
        assert message_steps(ledgers) == costs.all_reduce_steps(name, grid(n))
        assert abs(sent - costs.all_reduce_bytes(name, grid(n), length)) <= 2 * n.bit_length()
    print(f"n = {n}: {len(by_rank[0])} runs, all equal to the library, steps and bytes as computed")

# %% [markdown]
# ### Look inside
#
# Choose an algorithm and step through its messages. They are sent between real ranks.

# %%
stepper = all_reduce_stepper(min(world_size, 8))
stepper

# %% [markdown]
# *The widget: what every rank holds before and after the chosen step, with an arrow for each message. In a notebook
# that is not running it shows the first step of the ring.*
#
# Things to look for: in the ring every arrow is there in every step; in the tree half of the arrows or fewer; in
# halving and doubling the arrows get longer while what they carry gets smaller.

# %% [markdown]
# ## 4. What it costs
#
# Lesson 01 fitted the cost of one message: **t = α + β·S**, a latency and a time per byte. A step takes as long as
# its messages, and an algorithm as long as its steps. With the counts above, on N ranks that are all equally far
# apart:
#
# | | latency | bytes | time |
# |---|---|---|---|
# | root | 2 α | 2(N−1) S at rank 0 | 2α + 2(N−1)·βS |
# | ring | 2(N−1) α | 2(N−1)/N S | 2(N−1)·(α + βS/N) |
# | tree | 2⌈log₂N⌉ α | 2⌈log₂N⌉ S in a row | 2⌈log₂N⌉·(α + βS) |
# | recursive doubling | log₂N α | log₂N S | log₂N·(α + βS) |
# | halving/doubling | 2 log₂N α | 2(N−1)/N S | 2 log₂N·α + 2(N−1)/N·βS |
# | hierarchical, m nodes of g | 2(g−1) a + 2(m−1) A | 2(g−1)/g S; 2(m−1)/N S | 2(g−1)(a + bS/g) + 2(m−1)(A + BS/N) |
#
# <small>Doubling: N a power of two. Hierarchical: in a node; between nodes. a, b: α and β in a node; A, B: between
# nodes. The root has 2(N−1) steps and only two latencies: all ranks send at once, the latencies pass side by side,
# and only the bytes queue at rank 0.</small>
#
# **Predict** (question 3). 4 KiB on 1,024 ranks: ring against tree?
#
# The cell takes α = 14 µs, NCCL's own constant for a hop over the network (src/graph/tuning.cc, protocol Simple of
# section 6), and 50 GB/s, one port of 400 Gb/s InfiniBand. Figures are *modelled* up to *When the switch adds*.

# %%
hop, wire = 14e-6, 50e9  # seconds, bytes per second
thousand = costs.flat(1024, hop, 1 / wire)
for name in ("ring", "tree", "halving_doubling"):
    t = all_reduce_seconds(name, 4096, thousand)
    print(f"{name:18}{t * 1e3:8.2f} ms for 4 KiB on 1,024 ranks")
ratio = all_reduce_seconds("ring", 4096, thousand) / all_reduce_seconds("tree", 4096, thousand)
assert 100 < ratio < 104
print(f"the ring takes {ratio:.0f} times as long as the tree")

# %% [markdown]
# 2,046 latencies against 20. For large messages the ring wins, since it sends 2 S and the tree 20 S. Where do they
# cross?
#
# Set the two times of the table equal, with L = ⌈log₂N⌉: **S = α/β · (N−1−L) / (L − (N−1)/N)**. On 8 ranks that is
# 1.9 α/β, on 1,024 it is 113 α/β.

# %%
few_and_many = {f"{n:,} ranks": costs.flat(n, hop, 1 / wire) for n in (8, 1024)}
for title, cluster in few_and_many.items():
    n, levels = cluster.ranks, (cluster.ranks - 1).bit_length()
    factor = (n - 1 - levels) / (levels - (n - 1) / n)
    crossing = factor * hop * wire
    both = [all_reduce_seconds(name, crossing, cluster) for name in ("ring", "tree")]
    assert abs(both[0] / both[1] - 1) < 1e-9
    print(f"{title}: {factor:.1f} alpha/beta, {format_bytes(crossing)}")
shown = [2**k for k in (10, 15, 20, 25, 30)]
plots.crossover(few_and_many, ["ring", "tree", "halving_doubling"], shown, pairs=[("ring", "tree")])

# %% [markdown]
# *The figure: time over size for 8 and for 1,024 ranks. The tree is below the ring to the left of the dotted line and
# above it to the right; with more ranks the line moves from 1.3 MiB to 75 MiB. Halving/doubling runs below both.*
#
# ### Thousands of ranks
#
# A bucket of DDP holds 25 MiB. How long does its all-reduce take on more and more ranks? (`double_tree` is the subject
# of the next heading.)

# %%
bucket = 25 * 2**20
names = ("root", "ring", "tree", "halving_doubling", "double_tree")
print(f"{'ms, N =':18}" + "".join(f"{n:>10,}" for n in (8, 64, 512, 4096)))
for name in names:
    row = [
        all_reduce_seconds(name, bucket, costs.flat(n, hop, 1 / wire)) for n in (8, 64, 512, 4096)
    ]
    print(f"{name:18}" + "".join(f"{t * 1e3:10.2f}" for t in row))
large = costs.flat(4096, hop, 1 / wire)
waiting = all_reduce_seconds("ring", 0, large) / all_reduce_seconds("ring", bucket, large)
print(f"share of latency in the ring on 4,096 ranks: {waiting:.0%}")

# %%
growing = [costs.flat(2**k, hop, 1 / wire) for k in range(1, 13)]
plots.scale_out(growing, names, sizes=(4096, bucket))

# %% [markdown]
# *The figure: time over ranks. For 4 KiB the ring rises in proportion to N, trees and halving/doubling hardly (their
# lines coincide), the root late; for 25 MiB root and ring rise, and halving/doubling and the double tree stay near 1
# ms.*
#
# For 4 KiB the root seems best up to a thousand ranks. Believe that with care: the model lets any number of messages
# arrive at one time and charges nothing for handling them.
#
# The root needs O(N·S): on 4,096 ranks the bytes alone take 4 seconds. The ring's bytes stay at 2 S for ever, and its
# latencies grow until nothing else is left. This is **Amdahl's law** with latency as the part that more ranks do not
# shorten: 99 % of the ring's time on 4,096 ranks would remain on links of infinite speed. Hence trees, hence two
# levels, hence larger buckets.
#
# ### Two trees at once
#
# A tree can do better than 2⌈log₂N⌉·βS. Cut S into blocks and let them follow each other: while one block goes up
# from the second level, the next leaves the leaves. Then the latency is paid once, and what counts is the busiest
# rank: in a **binary** tree it receives S from each of two children and sends S to its parent. Half of the ranks are
# leaves, which receive nothing on the way up.
#
# The **double binary tree** (Sanders, Speck and Träff 2009) uses two trees, each for one half of S. Whoever works in
# one tree is a leaf of the other. The next cell builds both for an even number of ranks: a tree in which leaves and
# inner ranks take turns, and its mirror image. (For an odd number the second tree is the first, shifted by one rank.)


# %%
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
    print(f"{name:7} parent of each rank: {tree}, inner ranks: {sorted(inner)}")
assert not {up for up in first if up >= 0} & {up for up in second if up >= 0}

# %% [markdown]
# No rank has children in both. So on the way up a rank receives at most two halves and sends two, one in each tree,
# and on the way down likewise: at most 2 S each way, as in a ring, with the latency of a tree. The model of
# `double_tree` takes the blocks as so small that no gap is left between them, which real blocks do not reach. This is
# NCCL's `Tree`. It connects *nodes*; in a node the GPUs form a chain (NVIDIA/nccl issues
# [448](https://github.com/NVIDIA/nccl/issues/448), [1103](https://github.com/NVIDIA/nccl/issues/1103)).
#
# <details><summary>Halving/doubling has the ring's bytes and the tree's latency. Why does NCCL not use it?</summary>
#
# Much of the answer lies outside this model, so take it as reasoning, not as measurement. Rings and trees give a GPU
# two or three neighbours for good, each a connection with its own buffers, through which a kernel streams small
# slices without a pause. In halving/doubling the partner changes at every step, there are log₂N of them, far ones
# included, and the next exchange can only start when the last is complete. Other world sizes than powers of two send
# S more. For all-gather and reduce-scatter NCCL has since got an algorithm with logarithmically many steps, PAT
# ([arXiv 2506.20252](https://arxiv.org/abs/2506.20252)), so far only for nodes of one GPU.
# </details>
#
# ### When the switch adds
#
# So far only ranks add. NVLink switches of Hopper and later can add too (**NVLS**, NVLink SHARP), as can InfiniBand
# switches (**SHARP**). For an all-reduce, each GPU asks the switch for the sum of one piece: every GPU sends that
# piece, and one sum comes back. Then it hands the sum to the switch once, which copies it to all. For N pieces a GPU
# sends S for the sums and S/N of results, and receives S/N of sums and S of results: **(N+1)/N·S each way**
# (NVIDIA/nccl issue [1083](https://github.com/NVIDIA/nccl/issues/1083)) instead of 2(N−1)/N·S. NCCL takes NVLS by
# itself. The switches of an InfiniBand network it reaches by the algorithm **CollNet**, only with a plugin of the
# network's vendor and `NCCL_COLLNET_ENABLE=1`.
#
# Bus bandwidth knows nothing of this. It multiplies S/t by 2(N−1)/N, whoever adds. The next cell takes recorded bus
# bandwidths of H200 GPUs at 8 GiB apart again (stas00/ml-engineering, network/README.md).

# %%
nvls = {n: rate / 1e9 for n, rate in recorded.H200_NVLS_BY_GPUS.items() if n > 4}  # below: a ring
print("GPUs   busbw (recorded)   S/t   on the wire, (N+1)/N of it")
for n, shown in nvls.items():
    speed = shown / costs.busbw_factor("all_reduce", n)
    print(f"{n:4}{shown:14.0f} GB/s{speed:11.0f}{speed * (n + 1) / n:15.0f} GB/s of 450")
carried = speed * 9 / 8  # by each GPU of eight
alone = carried / (5 / 4) * costs.busbw_factor("all_reduce", 4)
print(f"so 4 GPUs would show {alone:.0f} GB/s with NVLS; recorded, with a ring: 363 GB/s")

# %% [markdown]
# The last column answers question 7, the last line question 8. The wire carries 304 to 310 GB/s whatever N is, 68 or
# 69 % of its rate, and bus bandwidth is 2(N−1)/(N+1) times that: 1.56 times with eight GPUs, 1.2 times with four. So
# it falls with fewer GPUs because the ring, its yardstick, needs fewer bytes then, not because anything is broken. A
# ring uses the wire better, 367.6 of 450 GB/s (*recorded*, same file), but with eight GPUs it has to send 1.56 times
# the bytes. At four GPUs NVLS and ring would tie, and NCCL takes the ring.
#
# > **Misconception.** "482 of 450 GB/s: the table is wrong, or the link is faster than its data sheet." Bus bandwidth
# > is the speed a link would need *if ranks alone did the adding*. Where the network adds, it is not the speed of any
# > wire.

# %% [markdown]
# ## 5. A cluster in a notebook
#
# Formulas say what should happen. Few of us have two nodes with NVLink and InfiniBand, so the next cells **emulate**
# them. The functions of sections 1 to 3 run unchanged on eight real ranks and send real messages. A virtual clock
# decides how long each would have taken: every link carries one message at a time in each direction, and a message
# takes the latency of its path and S over its bandwidth. The clock depends on program and topology alone, so the
# result is the same on any machine.
#
# The cluster: two nodes of four GPUs, NVLink 4 inside, one 400 Gb/s InfiniBand port for each GPU between. The
# latencies are NCCL's constants for a hop (section 6).

# %%
from course_utils.hardware import LINKS

links = [
    (LINKS[kind].latency, 1 / LINKS[kind].bandwidth)
    for kind in ("nvlink4", "ib_ndr")
]
two_nodes = two_level(*virtual, *links)
for other in (1, virtual[1]):
    path = two_nodes.path(0, other)
    rate = f"{path.bandwidth / 1e9:.0f} GB/s"
    print(f"GPU 0 to GPU {other}: {path.latency * 1e6:.1f} µs, {rate}")

# %% [markdown]
# **Predict** (question 4). 4 MiB. One ring over all eight GPUs, a tree, or the hierarchical algorithm? Which is
# first, by what factor? And 4 KiB?


# %%
def hierarchical_on_nodes(x):
    hierarchical_all_reduce(x, virtual[1])


contenders = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "hierarchical": hierarchical_on_nodes,
}


def race(topology, sizes):
    """On a rank: emulated seconds of every contender at every size."""
    seconds = {}
    for name, algorithm in contenders.items():
        for size in sizes:
            x = torch.ones(size // 4)
            with emulate(topology) as clock:
                algorithm(x)
            assert x[0] == dist.get_world_size()
            seconds[name, size] = clock.seconds
    return seconds


# %%
def run_race(topology, sizes):
    """Emulated seconds by contender and size: the slowest rank counts."""
    ranks = virtual[0] * virtual[1]
    by_rank = launch(race, topology, sizes, world_size=ranks, backend="gloo")
    return {key: max(rank[key] for rank in by_rank) for key in by_rank[0]}


emulated = run_race(two_nodes, emulated_sizes)
cluster = costs.cluster_of(two_nodes)

# %%
errors = {}
print("µs, emu./model" + "".join(f"{format_bytes(size):>13}" for size in emulated_sizes))
for name in contenders:
    row = ""
    for size in emulated_sizes:
        model = all_reduce_seconds(name, size, cluster)
        errors[name, size] = emulated[name, size] / model - 1
        row += f"{emulated[name, size] * 1e6:7.1f}/{model * 1e6:5.1f}"
    print(f"{name:14}{row}")
worst = max(map(abs, errors.values()))
assert worst < 0.01
print(f"largest difference between emulation and model: {worst:.1%}")

# %%
points = {name: [emulated[name, size] for size in emulated_sizes] for name in contenders}
plots.model_against_emulation(
    emulated_sizes, points, lambda name, size: all_reduce_seconds(name, size, cluster)
)

# %% [markdown]
# *The figure: three curves, flat to the left and straight to the right. The tree is lowest up to about 160 KiB, the
# hierarchical algorithm from there on. The ring begins highest and passes the tree between 1 and 2 MiB.*
#
# The ring's line has a bend near 3.5 MiB: to the left latency counts, to the right the one port between the nodes.
#
# The model was written down before anything ran, and no number in it was fitted to the emulation. The bound asserted
# is 1 %. Do not read too much into the agreement: both follow the same rules. It says that the formulas count the
# messages of the programs correctly, not that real links keep the rules.
#
# Why does the ring lose? All 14 pieces it sends, 1.75 S, pass the same port from one node to the other, three more
# ports are idle, and two rounds of latency cross the slow link. The hierarchical algorithm sends S/4 through each of
# the four ports. The tree crosses once each way with all of S.
#
# Microseconds are hard to feel. With `slowdown` the ranks also *sleep*, so that one emulated microsecond lasts as
# many microseconds as `slowdown` says.


# %% tags=["nbval-ignore-output"]
def in_slow_motion(name):
    x = torch.ones(2**20)  # 4 MiB
    with emulate(two_nodes, slowdown=slowdown) as clock:
        contenders[name](x)
    return clock.seconds


for name in contenders:
    start = time.monotonic()
    slowest = max(launch(in_slow_motion, name, world_size=virtual[0] * virtual[1], backend="gloo"))
    print(f"{name:13}{slowest * 1e6:6.1f} µs emulated; you waited {time.monotonic() - start:.1f} s")

# %% [markdown]
# ### One network card for the whole node
#
# **Predict.** Cheaper nodes have one port for all four GPUs. Which of the three gets slower at 4 MiB, and by how
# much?

# %%
shared = two_level(*virtual, *links, nics="node")
four_mib = [2**22]
own_card, one_card = (run_race(cards, four_mib) for cards in (two_nodes, shared))
sharing = costs.cluster_of(shared)
print(f"{'µs, 4 MiB':14}{'a port each':>12}{'one port':>12}{'model of it':>12}")
for name in contenders:
    times = own_card[name, 2**22], one_card[name, 2**22], all_reduce_seconds(name, 2**22, sharing)
    print(f"{name:14}" + "".join(f"{t * 1e6:12.1f}" for t in times))
assert abs(one_card["ring", 2**22] / own_card["ring", 2**22] - 1) < 1e-6
assert one_card["hierarchical", 2**22] > 1.5 * own_card["hierarchical", 2**22]

# %% [markdown]
# Only the hierarchical algorithm: it was the only one to use the other ports. It still sends S through the port,
# where the ring sends 1.75 S, so it stays ahead. What an algorithm gains depends on the wires; there is no best one
# without them.
#
# Here the model is 11 % too slow. It adds up two latencies between the nodes, one for each step. But while the port
# is busy with the message of one GPU, the latency of another passes unnoticed: one of the two, 14 µs, is hidden. A
# simple formula stops being exact where messages queue.
#
# > **What changes on real GPUs.** NCCL's rings do use all ports. It lays one ring for each port, each through another
# > GPU of the node and with its share of S. On four nodes with eight H200 each a ring reached 364.7 GB/s bus
# > bandwidth at 4 GiB, nearly the 367.6 of a single node, and `NVLSTree` 310.1 (*recorded*, stas00/ml-engineering,
# > network/README.md). That was on AWS, where Amazon's own tuner plugin takes the ring. Elsewhere it can be the other
# > way round, so look at what your NCCL takes: `NCCL_DEBUG_SUBSYS=TUNING`.
#
# <details><summary>Then what is left of the advantage of two levels?</summary>
#
# With g rings, one for each port, a port carries 2(N−1)/N·S/g. With two levels it carries 2(m−1)/m·S/g for m nodes.
# For two nodes that is 1.75 against 1, for 32 nodes 1.98 against 1.94: nothing. What is left is latency: 2(N−1) hops
# against 2(g−1) + 2(m−1). NCCL's tree is the two-level algorithm in this sense: a chain in each node, a tree between
# nodes, and one such pair for each port, which together make a reduce-scatter, an all-reduce and an all-gather
# (NVIDIA/nccl issue [530](https://github.com/NVIDIA/nccl/issues/530)).
# </details>

# %% [markdown]
# ### Try it
#
# Choose size, nodes and links: what does each algorithm take, and which is the fastest from which size on?

# %%
chooser = algorithm_chooser()
chooser

# %% [markdown]
# *The widget, left: the modelled time of each algorithm at one size, the fastest on top. Right: time over size, with
# a dot where the fastest algorithm changes. In a notebook that is not running it shows one setting.*

# %% [markdown]
# ## 6. Protocols, and how NCCL chooses
#
# ### Three ways to say "it is there"
#
# A GPU writes into the memory of its neighbour. How does the neighbour know that everything has arrived? Writes may
# become visible in another order than they were made. NCCL has three answers, its **protocols**:
#
# - **Simple** writes a slice of data, waits until all of it is visible (a *memory fence*), and then sets a flag. All
#   bytes on the wire are data. Each step pays for the fence.
# - **LL**, low latency, stores 8 bytes at a time: 4 of data and 4 of flag. Such a store arrives as a whole, so
#   whoever sees the flag has the data. No fence. Half the bytes are flags.
# - **LL128** does the same with lines of 128 bytes, 120 of data and 8 of flag. It counts on 128 bytes arriving in
#   order. NCCL uses it only on paths known to keep the order; elsewhere it could hand over wrong numbers in silence,
#   so nobody should force it.
#
# <small>Source: NCCL's author in NVIDIA/nccl issues [281](https://github.com/NVIDIA/nccl/issues/281) and
# [786](https://github.com/NVIDIA/nccl/issues/786).</small>
#
# NCCL knows what they cost from a table of constants, *recorded* here from src/graph/tuning.cc. Ring, microseconds:
#
# | | LL | LL128 | Simple |
# |---|---|---|---|
# | once, before the first hop | 6.6 | 14 | 8.4 |
# | each hop over NVLink | 0.6 | 1.9 | 3.4 |
# | each hop over PCIe | 1.0 | 2.5 | 5.7 |
# | each hop over the network | 2.7 | 4.0 | 14 |
# | share of the bandwidth | 1/2 | 0.92 | 1 |
#
# **Predict** (question 5). A ring of eight over NVLink has 14 hops. How long does each protocol take before the first
# byte counts?

# %%
a100 = nccl_tuner.MACHINES["8 x A100"]
for protocol in ("LL", "LL128", "Simple"):
    ring = "ring", protocol
    start, rate = nccl_tuner.latency(ring, a100), nccl_tuner.bandwidth(ring, a100)
    print(f"{protocol:7}{start * 1e6:5.1f} µs, then {rate / 1e9:5.1f} GB/s of x")

# %% [markdown]
# 15 µs against 56 µs. At 64 KiB the bytes take about one microsecond, so LL wins with half its bytes wasted. That is
# why there are three protocols: each is the best for some size. (LL shows less than half of 137 GB/s: NCCL also caps
# it, on one node of Ampere GPUs at 87.7 GB/s, times N/(2(N−1)) for the data in x.)
#
# ### The tuner
#
# Before every collective NCCL computes for each pair of algorithm and protocol t = latency + S/bandwidth, and takes the
# least. `course_utils.nccl_tuner` is the same calculation with the same constants, except for what its docstring lists
# as left out. The bandwidth begins with what NCCL counts on, 20 GB/s for each of an A100's 12 NVLinks; the nodes of the
# larger machines have eight ports of 200 Gb/s each.

# %%
for choice, t in sorted(nccl_tuner.predict(2**20, a100).items(), key=lambda item: item[1]):
    print(f"1 MiB: {' / '.join(choice):14}{t * 1e6:6.1f} µs")
two_a100, cluster_64 = (
    nccl_tuner.Machine(nodes, 8, "nvlink", a100.bandwidth, network=8 * 25e9) for nodes in (2, 64)
)
for title, machine in {"1 node": a100, "2 nodes": two_a100, "64 nodes": cluster_64}.items():
    previous = None
    for size in (2**k for k in range(10, 35)):
        if (now := nccl_tuner.choose(size, machine)) != previous:
            print(f"{title}, from {format_bytes(size):>7}: {' / '.join(now)}")
        previous = now
assert nccl_tuner.choose(2**20, cluster_64)[0] == "tree"

# %% [markdown]
# In one node of eight the tree never wins: its chain has as many hops as the ring, and less bandwidth. On two nodes it
# takes turns with the ring up to 16 MiB, and from there on the ring wins. On 64 nodes the tree wins up to gigabytes,
# because its hops grow with log₂ of the nodes and the ring's with their number. (The choices for several nodes are
# *modelled*; no record was at hand to hold against them.)
#
# ### Against a real table
#
# Now the test. Eight A100s, sixteen sizes, *recorded* (stas00/ml-engineering, network/README.md). The constants are
# NCCL's own; none was fitted to this table.

# %%
a100_table = recorded.A100_ALL_REDUCE
published = nccl_tuner.errors(a100_table, a100)
print("S        recorded        choice   published")
for size, t, e in zip(a100_table.sizes, a100_table.seconds, published, strict=True):
    choice = " / ".join(nccl_tuner.choose(size, a100))
    print(f"{format_bytes(size):8}{t * 1e6:9.1f} µs{choice:>14}{e:12.0%}")
print(f"median error, without sign: {np.median(abs(published)):.1%}")

# %% [markdown]
# Large messages are right within a few percent. Small ones take three times as long as NCCL believes. Why? A choice
# needs no true times, only a true order: if LL and LL128 are both 20 µs late, the better one is the better one. To
# *predict*, look for what the constants leave out, and take its size from other measurements:
#
# 1. The table was made with `-g 8`: one thread starts the kernels of eight GPUs, one after the other. A DGX A100 in
#    the same mode needs 10 µs with two GPUs and 33.7 µs with eight for a few bytes (nccl-tests issue
#    [123](https://github.com/NVIDIA/nccl-tests/issues/123)).
# 2. A hop that forwards a slice takes longer than an empty one. Two other nodes of eight A100s, measured by others
#    with `-g 8` too, say how much (the sources are in `recorded.OTHER_A100_ALL_REDUCE`).
#
# How blind is the prediction? No number in it comes from this table. The *method* has seen it: estimates by hand had
# been held against the table before the method was fixed, so whoever chose these two corrections knew roughly how
# large the misses were, and where. And the second takes whatever the two other nodes need beyond the first, so both
# together predict the same as the second alone: the first explains a part, the second predicts. Read the last column
# as what three machines of one kind have in common, not as a forecast.

# %%
models = {"published": published}
for number, correction in enumerate(nccl_tuner.CORRECTIONS, start=1):
    models[correction.name] = nccl_tuner.errors(a100_table, a100, nccl_tuner.corrected(number))
print("S       " + "".join(f"{name:>22}" for name in models))
for i, size in enumerate(a100_table.sizes):
    print(f"{format_bytes(size):8}" + "".join(f"{of[i]:22.0%}" for of in models.values()))
medians = {name: float(np.median(abs(of))) for name, of in models.items()}
print("median  " + "".join(f"{m:22.1%}" for m in medians.values()))
assert medians[nccl_tuner.CORRECTIONS[-1].name] < 0.15

# %%
drawn = {
    name: (1 + of) * np.array(a100_table.seconds)
    for name, of in models.items()
    if name in ("published", nccl_tuner.CORRECTIONS[-1].name)
}
plots.predicted_against_recorded(
    a100_table, drawn, [" / ".join(nccl_tuner.choose(size, a100)) for size in a100_table.sizes]
)

# %% [markdown]
# *The figure, left: recorded times as points, predicted ones as lines. Middle: the same as bus bandwidth, with the
# dip of the points at 16 MiB. Right: the error; the grey band is 15 %. The pale line uses the published constants,
# the dark one both corrections.*

# %% [markdown]
# The median error is 10.5 %. It hides two things.
#
# **From 4 to 16 MiB** the model is first 50 % too slow, then 9 % too fast. The recorded time hardly changes from 1 to
# 4 MiB and doubles from 8 to 16 (question 6). No latency + S/bandwidth does that: it takes a switch. The model has
# one near by, from LL128 to Simple, and its bus bandwidth dips there too, one doubling later. So the dip looks like a
# switch that came too early. It belongs to this node and its version of NCCL: on the two other nodes 16 MiB takes 1.6
# times as long as 8 MiB.
#
# **From 16 to 256 MiB** the published constants are 17 to 37 % too fast: real bandwidth builds up slowly. A ring has
# to fill and to drain; slices wait for slices. The second correction pays for that with longer hops, which is too
# much at 32 MiB and too little at 256 MiB.
#
# > **Misconception.** "Bus bandwidth grows with the size." It dips wherever the library switches too early or too
# > late. Measure the sizes that your job sends.
#
# ### Eight H200s
#
# With a switch that adds there is one more pair, NVLS with Simple. **Predict.** From what size on?

# %%
h200 = nccl_tuner.MACHINES["8 x H200"]
chosen = {size: nccl_tuner.choose(size, h200) for size in recorded.H200_ALL_REDUCE.sizes}
for size, choice in chosen.items():
    assert choice == (("ring", "LL") if size <= 2**20 else ("nvls", "Simple"))
print("predicted, and recorded: ring / LL up to 1 MiB, nvls / Simple from 2 MiB")

# %%
h200_errors = nccl_tuner.errors(recorded.H200_ALL_REDUCE, h200)
print("error of the time in %, 32 KiB to 16 GiB:")
print(*(f"{e * 100:.0f}" for e in h200_errors))
print(f"median without sign {np.median(abs(h200_errors)):.0%}")
for_choosing = nccl_tuner.bandwidth(("nvls", "Simple"), h200) * costs.busbw_factor("all_reduce", 8)
wire_rate = nccl_tuner.nvls_busbw(h200)
largest = recorded.H200_LARGEST["all_reduce, nvls"]
print(f"busbw of NVLS: {for_choosing / 1e9:.0f} GB/s in NCCL's comparison, good for choosing only;")
print(f"{wire_rate / 1e9:.0f} GB/s from the bytes on the wire, {largest / 1e9:.1f} recorded")
assert abs(wire_rate / largest - 1) < 0.05 < for_choosing / largest - 1
assert max(abs(h200_errors[-7:])) < 0.08 and max(abs(h200_errors)) < 0.33

# %% [markdown]
# Every choice is right. NCCL's bandwidth for NVLS, 591 GB/s, serves for choosing and for nothing else: 8 GPUs would
# have to send 380 GB/s each, and NCCL itself counts on 371. The bytes of section 4 say more: (N+1)/N·S at NCCL's rate
# for the link and 85 % efficiency give 490 GB/s, 2 % from the record. `nccl_tuner.estimate` takes that rate for the
# time of NVLS. The time is then right within 8 % from 256 MiB on. Around 8 MiB it is still up to 32 % too short,
# because real bandwidth builds up slowly here too.
#
# > **What changes on real GPUs.** Nothing has to be rebuilt: `NCCL_DEBUG=INFO` with `NCCL_DEBUG_SUBSYS=TUNING` prints
# > NCCL's own table (section 9). `NCCL_ALGO` and `NCCL_PROTO` force a choice, for an experiment. In a job they freeze
# > a decision that the next version, the next size or the next node count would take better.


# %% [markdown]
# ## 7. The C API
#
# Everything so far went through PyTorch. NCCL itself has an interface in C, and it is small: fifty functions
# (`nccl.h` of version 2.29), of which a dozen do the daily work. Knowing them pays three times. Error messages and
# traces name them. Other programs than PyTorch use them. And PyTorch's own rules, such as "call in the same order",
# are theirs.
#
# [native/all_reduce.c](../native/all_reduce.c) is a complete program: it sums an array over all GPUs of the machine,
# checks every element of the sum, and prints algorithm and bus bandwidth. It can do so in two ways: one process that
# drives all GPUs, or one process for each GPU, as PyTorch does.
#
# | PyTorch | NCCL and CUDA in C |
# |---|---|
# | `init_process_group("nccl")` | `ncclGetUniqueId` on rank 0, then `ncclCommInitRank` on every rank |
# | (one process drives one GPU) | `ncclCommInitAll`: one process, all its GPUs |
# | `dist.all_reduce(x)` | `ncclAllReduce(x, x, count, ncclFloat, ncclSum, comm, stream)` |
# | `work.wait()` | `cudaEventRecord`, `cudaStreamWaitEvent` |
# | `torch.cuda.synchronize()` | `cudaDeviceSynchronize` |
# | `torch.cuda.Event(enable_timing=True)` | `cudaEventCreate`, `cudaEventElapsedTime` |
# | `batch_isend_irecv`, coalescing | `ncclGroupStart` … `ncclGroupEnd` |
# | `timeout=` and the watchdog | `ncclCommGetAsyncError` and your own clock |
# | `destroy_process_group()` | `ncclCommDestroy`, or `ncclCommAbort` after an error |
#
# The next cell looks for what a compiler needs. The CPU build of PyTorch has neither NCCL nor CUDA, but both come as
# Python packages that also install on machines without a GPU.

# %%
folder = tempfile.TemporaryDirectory(prefix="nccl-")  # goes away with the kernel
work = Path(folder.name)
try:
    toolkit, compiler = c_programs.find_nccl(), c_programs.find_compiler()
    print("found nccl.h, libnccl.so.2, the CUDA runtime and a C compiler")
except c_programs.MissingToolError as error:
    toolkit = None
    print(error, "Until then the cells below only show code.", sep="\n")


def c(*names, source="all_reduce.c"):
    """Show functions of a C file of the folder native/."""
    return Markdown(f"```c\n{c_programs.excerpt(source, *names)}\n```")


# %% [markdown]
# ### Communicators: one process for all GPUs, or one each
#
# A **communicator** (`ncclComm_t`) is what a process group is in PyTorch: a fixed set of ranks that can call
# collectives together. Each rank holds its own end of it, tied to one GPU. So a rank owns five things:

# %%
c("Rank")

# %% [markdown]
# With one process for all GPUs, one call makes all ends at once. Nothing has to be agreed on with other processes:

# %%
c("init_all", "one_process")

# %% [markdown]
# With one process for each GPU they have to find each other first. Rank 0 asks for a **unique id**: 128 bytes that
# say where the ranks meet. Every other rank needs the same bytes, and *how they get there is not NCCL's business*.
# This program uses a pipe between processes of one machine; MPI programs broadcast the id; PyTorch puts it into the
# store that `init_process_group` has opened, which is what `MASTER_ADDR` and `MASTER_PORT` are for.

# %%
c("init_rank", "one_rank")

# %% [markdown]
# `ncclCommInitRank` returns when all ranks have called it: it is a collective itself. A rank that never comes leaves
# the others waiting, as in lesson 02. This is why the program asks for a communicator that does not block
# (`config.blocking = 0`): calls return at once with `ncclInProgress`, and the program can look at its watch.
#
# > **Misconception.** "`init_process_group` sets up NCCL." PyTorch makes the communicator when the first collective
# > runs, unless you pass it `device_id=`. So a broken network shows in the first `all_reduce`, not before. If you pass
# > `device_id=`, it shows at the start, and `barrier` knows its GPU. (Source:
# > [`init_process_group`](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group).)
#
# ### A group: many calls, one launch
#
# **Predict.** The process that drives four GPUs runs `for` over its ranks and calls `ncclAllReduce` for each. What
# happens without `ncclGroupStart` and `ncclGroupEnd` around the loop?

# %%
c("all_reduce")

# %% [markdown]
# <details><summary>Answer</summary>
#
# A call may block until the other ranks have called too. The first call would wait for rank 1, whose call comes next
# in the same loop: a deadlock of one process with itself. Between start and end, calls only note what is wanted;
# `ncclGroupEnd` then launches everything together.
# </details>
#
# Groups have three uses: several GPUs in one process, several small operations in one launch, and sends with
# receives that must make progress together. The last is `batch_isend_irecv` of lesson 02. (Source: NCCL user guide,
# [Group Calls](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/groups.html).)
#
# The two pointers are equal here, so `ncclAllReduce` works **in place**, as `dist.all_reduce` always does. For an
# all-gather, in place means that a rank's piece already lies where it belongs in the whole:
# `ncclAllGather(whole + rank * n, whole, n, …)`. (Source:
# [In-place Operations](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/inplace.html).)
#
# ### Streams and events
#
# The last argument of every NCCL call is a **stream**: a queue of work for one GPU, done in order. The call returns
# when the work is in the queue, long before it is done. So the CPU's clock around `ncclAllReduce` measures nothing
# of interest. The program puts **events** into the queue, and the GPU notes when it gets to them:

# %%
c("measure")

# %% [markdown]
# In PyTorch, `async_op=True` puts the collective on a stream that belongs to the process group, and `work.wait()`
# makes the current stream wait for it; with `async_op=False` it goes to the current stream directly (since
# [pull request 150398](https://github.com/pytorch/pytorch/pull/150398)).
#
# ### Errors, and who cleans up
#
# Three kinds of failure need three answers:
#
# - *A call returns an error.* `ncclGetErrorString` says what it means. After `ncclInvalidArgument` the communicator
#   is still good; after any other error it is not.
# - *A call has returned, and the operation fails later*, most often in the network. `ncclCommGetAsyncError` tells.
# - *Nothing fails and nothing comes*: another rank has died or called something else. Only a clock can tell.
#
# In the last two cases `cudaStreamSynchronize` would never return, so the program asks again and again:

# %%
c("wait_for")

# %% [markdown]
# Every function leaves at its first error and says where; none of them cleans up. One function does, for success and
# for failure, and gives back what exists:

# %%
c("release")

# %% [markdown]
# The order matters: first the communicator, because the GPU may still be reading the memory, then the rest.
# `ncclCommDestroy` may wait for work under way; `ncclCommAbort` ends it, and **every** rank has to call it. (Source:
# user guide,
# [Creating a Communicator](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html), with
# the table of errors.)
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
# <details><summary>Newer calls: communicators out of others, and buffers that NCCL knows</summary>
#
# `ncclCommSplit` makes communicators out of an existing one, as groups of a mesh need them. `ncclCommShrink` (2.27)
# makes one of the ranks that are left after a failure ([communicator
# functions](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/comms.html)).
#
# Normally NCCL copies through buffers of its own. Memory from `ncclMemAlloc` that is registered (`ncclCommRegister`,
# or as a symmetric window with `ncclCommWindowRegister`) is used directly, which takes fewer multiprocessors ([user
# buffer registration](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/bufferreg.html)).
# </details>
#
# ### Compile it
#
# The package has a `libnccl.so.2` and no `libnccl.so`, so the linker is told the exact name (`-l:`), and the program
# remembers the folder (`-rpath`).

# %%
if toolkit:
    c_programs.build("all_reduce.c", work / "all_reduce")
    line = " ".join(c_programs.command("all_reduce.c", "all_reduce", toolkit))
    shorter = {toolkit.nccl: "$NCCL", toolkit.cuda: "$CUDA", c_programs.NATIVE: "native"}
    for path, name in shorter.items():
        line = line.replace(str(path), name)
    print(re.sub(r" (?=-isystem|native|-o|-L|-Wl)", " \\\n    ", line))

# %% [markdown]
# No warning, with all warnings turned into errors. **Predict:** what will it say on a machine without a GPU?


# %% tags=["nbval-ignore-output"]
def execute(*command, **environment):
    """Run a program and return what became of it, its output as text."""
    env = os.environ | {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=env, timeout=60
    )


if toolkit:
    for mode in ("one-process", "per-gpu"):
        done = execute(work / "all_reduce", mode)
        assert done.returncode in (0, 2)  # 2: no GPU
        print(f"{mode}: exit code {done.returncode}", done.stdout, done.stderr, sep="\n")

# %% [markdown]
# Without a GPU, CUDA complains about its driver, which comes with the GPU and not with a Python package. With GPUs
# you have just read two lines for each way: the time of one all-reduce of 64 MiB with its bandwidths, and the
# verdict on the sums. Eight A100s show 172 GB/s bus bandwidth at this size (*recorded*, the table of section 6).
#
# <details><summary>Why does the program count the GPUs in a child process?</summary>
#
# A process that has used CUDA cannot use it again after `fork`: the driver's state does not survive. Counting GPUs is
# a use. The parent that forks the ranks must not have touched CUDA itself. PyTorch has the same rule: with CUDA,
# start processes by *spawn* or by torchrun, not by fork.
# </details>
#
# ### Break it
#
# Error paths are the part of a C program that nobody runs. Here they can be run: `native/stand_in_nccl.c` and
# `native/stand_in_cuda.c` are **stand-ins**, libraries with the same functions as NCCL and CUDA, over ordinary
# memory. They really add, they use no GPU, and any chosen call of theirs can be made to fail. The program file is
# the same; only `LD_LIBRARY_PATH`, where the loader looks first, differs.

# %%
if toolkit:
    c_programs.build("stand_in_nccl.c", work / "stand_in" / "libnccl.so.2")
    c_programs.build("stand_in_cuda.c", work / "stand_in" / toolkit.runtime)


def on_stand_ins(mode, floats, seconds=30, **environment):
    """Run the program on `world_size` pretended GPUs."""
    places = {"LD_LIBRARY_PATH": work / "stand_in", "TMPDIR": work, "STAND_IN_GPUS": world_size}
    return execute(work / "all_reduce", mode, floats, seconds, **places, **environment)


if toolkit:
    for mode in ("one-process", "per-gpu"):
        done = on_stand_ins(mode, 1000)
        assert done.returncode == 0, done.stderr
        print(done.stdout.splitlines()[-1])

# %% [markdown]
# Both ways give the right sums. Now one call fails in each run: the second `cudaMalloc`, the fifth `ncclAllReduce`,
# and so on. In the last run the GPU never finishes, and the program is told to wait for half a second.

# %%
faults = ["cudaMalloc:2", "ncclCommInitAll:1", "ncclAllReduce:5", "ncclCommGetAsyncError:9"]
for fault in [*faults, "cudaStreamQuery:hang"] if toolkit else []:
    done = on_stand_ins("one-process", 1000, 0.5, STAND_IN_FAIL=fault)
    assert done.returncode == 1 and "left behind" not in done.stderr  # all was given back
    said = re.sub(r"all_reduce: line \d+: ", "", done.stderr.strip())
    print(f"{fault:24} {said}")

# %% [markdown]
# Each run ended with exit code 1, none hung, and the stand-ins count what is created and given back: nothing was
# left. (`each` is the result of one `ncclAllReduce` in the group, `communicator` the state that
# `ncclCommGetAsyncError` reported.)
#
# > **What changes on real GPUs.** The same program file runs on NCCL and its figures mean something. A fault there is
# > no return value that somebody ordered but a cable or a dead node, and most often shows as the third kind: nothing
# > comes. After the abort a process may make a new communicator with the ranks that are left and go on from its last
# > checkpoint, without a new start.

# %% [markdown]
# ## 8. Tracing NCCL calls
#
# A training step is slow, and you did not write the code. Which collectives does it make, how large, and in which
# order? The program need not be changed to find out. Five ways follow, from the least effort to the most detail.
#
# ### Ask NCCL
#
# `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL` makes NCCL log each collective with its count, type and operation as
# numbers of the C API, and with pointers, but without a time. Nothing to build: try this first.
#
# ### Step between: LD_PRELOAD
#
# When a program calls `ncclAllReduce`, the loader looks for that name in a list of libraries, and the first that has
# it wins. `LD_PRELOAD` puts a library in front. [native/trace_nccl.c](../native/trace_nccl.c) is such a library: its
# `ncclAllReduce` notes the arguments, calls the real one, and writes a line.

# %%
c("next", "TRACE", "ncclAllReduce", source="trace_nccl.c")

# %% [markdown]
# `dlsym(RTLD_NEXT, …)` means "the next library that has this name". It looks only among libraries that the program
# was linked with. Python loads PyTorch later, privately, so for PyTorch the second way is needed: ask for the
# library by name. (NCCL was made with this in mind: each function has a second name, `pncclAllReduce`, for tools that
# define the first; see [pull request 232](https://github.com/NVIDIA/nccl/pull/232).)
#
# **Predict.** The program sums once to check and twenty times to measure, here in one process. How many calls will
# the trace show for `world_size` ranks?

# %%
if toolkit:
    c_programs.build("trace_nccl.c", work / "libtrace_nccl.so")
    done = on_stand_ins("one-process", 65536, LD_PRELOAD=work / "libtrace_nccl.so")
    assert done.returncode == 0 and "every sum as expected" in done.stdout
    trace = done.stderr.splitlines()
    for line in trace[: world_size + 3]:
        print(re.sub(" us=.*", "", line))
    print("…")
    called = Counter(re.search(r"nccl\w+", line)[0] for line in trace)
    assert called["ncclAllReduce"] == 21 * world_size and called["ncclGroupEnd"] == 21
    print(*(f"{n:4} {name}" for name, n in called.items()), sep="\n")

# %% [markdown]
# Check and measurements are 21 calls on each of `world_size` GPUs, in 21 groups. Read line `#2`: an all-reduce of
# 65,536 numbers of 4 bytes, 256 KiB, on communicator `c0`, where this process has rank 0; it went into stream `s0`
# without an error. Inside a group the lines are indented. `ncclGetUniqueId` and `ncclCommGetAsyncError` are missing
# because the library does not step between there: a trace shows what its author thought of.
#
# `bytes` is the size of the argument, S of lesson 02. What travels over the links is 2(N−1)/N·S, and no caller sees
# it.
#
# **Predict.** Each line also has a time. Is it the time of the all-reduce?

# %% tags=["nbval-ignore-output"]
if toolkit:
    spent = {name: [] for name in ("ncclAllReduce", "ncclGroupEnd")}
    for line in trace:
        name, us = re.search(r"(nccl\w+).* us=([\d.]+)", line).groups()
        spent.get(name, []).append(float(us))
    for name, us in spent.items():
        middle = sorted(us)[len(us) // 2]
        print(f"{name:14} {len(us):3} calls, median {middle:.1f} µs")

# %% [markdown]
# No. It is the time for which the call kept the *CPU*. In a group `ncclAllReduce` only takes a note; the launch
# happens in `ncclGroupEnd`. On a GPU both are over before the data has moved: a long time here means a slow launch,
# or a rank that waited for others to call, never a slow link. (The stand-in adds at once, within `ncclGroupEnd`, so
# here that call is longer than a launch would be.)
#
# The same on real NCCL, if this machine has a GPU:

# %% tags=["nbval-ignore-output"]
if toolkit:
    real = execute(work / "all_reduce", "one-process", 65536, LD_PRELOAD=work / "libtrace_nccl.so")
    assert real.returncode in (0, 2)  # 2: no GPU
    print(*real.stderr.splitlines()[:6], sep="\n")

# %% [markdown]
# It works on any program that loads NCCL as a shared library. PyTorch's packages do; it would see nothing of a program
# with NCCL linked in statically.
#
# ```bash
# gcc -shared -fPIC -I$NCCL/include -I$CUDA/include native/trace_nccl.c -o libtrace_nccl.so
# LD_PRELOAD=$PWD/libtrace_nccl.so NCCL_TRACE_FILE=trace.%p.txt torchrun --nproc-per-node=8 train.py
# ```
#
# `%p` becomes the process number, so that every rank writes its own file. Two files of one step, compared with
# `diff` without their times, show where ranks stop agreeing: the mistakes of lesson 02, section 9, in a program that
# you cannot change.
#
# ### From outside: uprobes
#
# `LD_PRELOAD` must be there when the program starts. An **uprobe** can be set while it runs: the kernel puts a
# breakpoint on the first instruction of a function, in every process that has loaded that file, and runs a small
# verified program (eBPF) when it is hit. `bpftrace` compiles one line into such a program. It needs root.
#
# ```bash
# LIB=$(python -c "import nvidia.nccl as p; print(p.__path__[0])")/lib/libnccl.so.2
# sudo bpftrace -l "uprobe:$LIB:nccl*"                     # what can be watched
# sudo bpftrace -e "uprobe:$LIB:ncclAllReduce {            // arguments in registers: arg0, arg1, …
#     printf(\"%d: count %lu type %d op %d\n\", tid, arg2, arg3, arg4); }"
# sudo bpftrace -e "uprobe:$LIB:ncclAllReduce { @count[pid] = hist(arg2); }"
# sudo bpftrace -e "uprobe:$LIB:ncclGroupEnd { @start[tid] = nsecs; }
#     uretprobe:$LIB:ncclGroupEnd /@start[tid]/ {
#         @launch_us = hist((nsecs - @start[tid]) / 1000); delete(@start[tid]); }"
# ```
#
# `arg2` is the third argument, `count`. The third command adds up in the kernel and prints one histogram a process
# when it is stopped, at little cost even for many calls. On x86-64 six arguments fit into registers; the seventh,
# the stream, lies on the stack (`sarg0`). These lines were tried with bpftrace 0.17 and Linux 6.18 on the stand-in.
# (Source for the language:
# [bpftrace reference guide](https://github.com/iovisor/bpftrace/blob/master/docs/reference_guide.md).)
#
# ### From inside: the profiler plugin
#
# No caller can see when the GPU works. NCCL can: since 2.23 it loads a **profiler plugin** and calls it at the start
# and end of events, which form a tree: group, collective or point-to-point, then below it the work of each channel's
# kernel and of each network transfer. A collective's event also names the algorithm and protocol chosen.
#
# ```bash
# git clone --branch v2.29.7-1 https://github.com/NVIDIA/nccl && make -C nccl/plugins/profiler/inspector
# export NCCL_PROFILER_PLUGIN=$PWD/nccl/plugins/profiler/inspector/libnccl-profiler-inspector.so
# export NCCL_INSPECTOR_ENABLE=1 NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS=500
# torchrun --nproc-per-node=8 train.py           # JSON: time, algbw and busbw of each collective
# ```
#
# (In older versions the folder is `ext-profiler`.) Even here the end of a *collective* event only means "is in the
# queue". The true end comes from the events below it: the kernel's, or the network's where one is used.
# (Source: [NCCL's description of the plugin](https://github.com/NVIDIA/nccl/tree/master/plugins/profiler).)
#
# > **Misconception.** "I traced NCCL, and each all-reduce takes 20 µs." Of host time. Ask of every trace: *whose
# > clock, and what ended?*
#
# ### Which of them sees what
#
# | | needs | arguments | where in the code | GPU time | algorithm, protocol |
# |---|---|---|---|---|---|
# | `NCCL_DEBUG_SUBSYS=COLL` | restart | yes | no | no | no (`TUNING` has) |
# | LD_PRELOAD | restart, shared library | yes | no | no | no |
# | uprobe | root | yes | C stack (`ustack`) | no | no |
# | profiler plugin | restart, NCCL 2.23 | yes | no | yes | yes |
# | `torch.profiler` | change of the code | PyTorch's | Python | yes | in the kernel's name |
# | PyTorch's Flight Recorder | nothing, on by default | PyTorch's | Python | after a restart | no |
#
# The last two know Python but see only what goes through PyTorch. The Flight Recorder keeps the last 2,000 operations
# and writes them out at a timeout. Its times need a start with `TORCH_NCCL_ENABLE_TIMING=1`. Lesson 13 (profiling) uses
# the profiler, lesson 14 (debugging hangs) the recorder.

# %% [markdown]
# ## 9. Reading a log: what did NCCL decide?
#
# A job on two nodes is slow. NCCL knows why: before the first collective it writes down which network it found, who
# its neighbours are, and by which way it reaches each of them. It stays silent unless asked:
#
# ```bash
# NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH NCCL_DEBUG_FILE=nccl.%h.%p.log torchrun ...
# ```
#
# `NCCL_DEBUG=INFO` makes it talk, `NCCL_DEBUG_SUBSYS` says about what (default `INIT,BOOTSTRAP,ENV`), and
# `NCCL_DEBUG_FILE` gives each process a file of its own (`%h` host, `%p` process), because the lines of many ranks in
# one terminal are hard to follow. Such a log has thousands of lines. About ten of them matter.
#
# Two *recorded* logs follow, each of two nodes with two GPUs. Host names, process numbers and addresses are
# replaced, lines are shortened, and repeated ones are left out. The beginning comes from A100 PCIe cards with
# NCCL 2.19.3 ([nccl-tests issue 182](https://github.com/NVIDIA/nccl-tests/issues/182)).

# %%
beginning = """
nodeB:20:20 [0] NCCL INFO Bootstrap : Using ibs65:192.0.2.2<0>
nodeB:20:20 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation
nodeB:20:20 [1] NCCL INFO cudaDriverVersion 12030
NCCL version 2.19.3+cuda12.3
nodeB:20:28 [1] NCCL INFO NCCL_IB_DISABLE set by environment to 0.
nodeB:20:28 [1] NCCL INFO NCCL_IB_HCA set to mlx5_0
nodeB:20:28 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ibs65:192.0.2.2<0>
nodeB:20:28 [1] NCCL INFO Using network IB
nodeB:20:27 [0] NCCL INFO === System : maxBw 12.0 totalBw 12.0 ===
nodeB:20:27 [0] NCCL INFO CPU/0 (1/2/-1)
nodeB:20:27 [0] NCCL INFO + PCI[12.0] - GPU/3000 (0)
nodeB:20:27 [0] NCCL INFO + PCI[12.0] - NIC/3010
nodeB:20:28 [1] NCCL INFO Pattern 3, nChannels 1, bw 24.000000/12.000000, type LOC/PHB
nodeB:20:28 [1] NCCL INFO  0 : NET/0 GPU/1 NET/0
"""
version = re.search(r"NCCL version (\S+)", beginning)[1]
network = re.search(r"Using network (\S+)", beginning)[1]
assert (version, network) == ("2.19.3+cuda12.3", "IB")
print(f"NCCL {version}, network {network}")

# %% [markdown]
# Every line begins with `host:process:thread [CUDA device]`.
#
# | line | what it tells |
# |---|---|
# | `Bootstrap : Using ibs65:…` | interface over which ranks find each other; little data flows here |
# | `NET/Plugin : No plugin found` | no vendor's network code, NCCL uses its own: normal on plain InfiniBand |
# | `NCCL version` | what really runs; a framework may bring its own |
# | `… set by environment to …` | each variable that NCCL obeys: who set it, and why? |
# | `NET/IB : Using [0]mlx5_0:1/IB` | network cards found, as name:port/kind. Are **all** there? Here one |
# | `[RO]; OOB ibs65` | PCIe relaxed ordering is on; interface that sets up connections |
# | `Using network IB` | **the verdict**: RDMA by *verbs*, the API of RDMA cards. `Socket` means TCP |
# | `=== System : maxBw 12.0` | the topology that NCCL sees; GB/s in one direction on each link |
# | `Pattern 3, … nChannels 1` | a search for rings or trees has found one channel |
# | `bw 24/12, type LOC/PHB` | GB/s and kind of path: in the node / to the network card |
#
# The owner asked why the bandwidth is below what InfiniBand promises. The topology answers before any benchmark. NCCL
# counts 12 GB/s on the way to the card, where PCIe 4 has 31: lines left out here say that it could not read the speed
# of the link, and assumed one. And `PHB` means a way through the CPU, where `PIX`, one PCIe switch, is hoped for.

# %% [markdown]
# The connections come from two nodes with two H20 each, NVLink inside and InfiniBand between
# ([nccl issue 1189](https://github.com/NVIDIA/nccl/issues/1189), comment of April 2025).
#
# **Predict**, before you run the parser: which ring goes through the four ranks on channel 6, which on channel 7, and
# why are there two?

# %%
connections = """
nodeB:41:53 [1] NCCL INFO comm 0x5b0bc60 rank 3 nRanks 4 nNodes 2 localRanks 2 localRank 1 MNNVL 0
nodeA:24:35 [0] NCCL INFO Ring 06 : 2 -> 0 -> 1
nodeA:24:35 [0] NCCL INFO Ring 07 : 1 -> 0 -> 2
nodeA:25:36 [1] NCCL INFO Ring 06 : 0 -> 1 -> 3
nodeA:25:36 [1] NCCL INFO Ring 07 : 3 -> 1 -> 0
nodeA:24:35 [0] NCCL INFO Trees [0] 1/2/-1->0->-1 [1] -1/-1/-1->0->1 [4] 1/-1/-1->0->2
nodeA:24:35 [0] NCCL INFO P2P Chunksize set to 131072
nodeB:40:52 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
nodeB:41:53 [1] NCCL INFO Channel 04/0 : 1[1] -> 3[1] [receive] via NET/IB/2/GDRDMA
nodeB:41:53 [1] NCCL INFO Channel 06/0 : 1[1] -> 3[1] [receive] via NET/IB/2/GDRDMA
nodeB:41:53 [1] NCCL INFO Channel 05/0 : 3[1] -> 1[1] [send] via NET/IB/2/GDRDMA
nodeB:41:53 [1] NCCL INFO Channel 07/0 : 3[1] -> 1[1] [send] via NET/IB/2/GDRDMA
nodeB:41:53 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
nodeA:25:36 [1] NCCL INFO Channel 05/0 : 1[1] -> 0[0] via P2P/CUMEM
nodeA:25:36 [1] NCCL INFO Channel 07/0 : 1[1] -> 0[0] via P2P/CUMEM
nodeB:40:52 [0] NCCL INFO threadThresholds 8/8/64 | 32/8/64 | 512 | 512
nodeB:41:53 [1] NCCL INFO 8 coll channels, 0 nvls channels, 8 p2p channels, 2 p2p channels per peer
nodeA:24:35 [0] NCCL INFO comm 0x5b41750 rank 0 nranks 4 cudaDev 0 busId 18000 - Init COMPLETE
"""

# %% [markdown]
# A parser needs two patterns: one for rings, one for connections. In `Channel 04/0 : 1[1] -> 3[1]` the first number
# is the channel; `1[1]` is rank 1 on CUDA device 1 of its node (in older versions the brackets hold the PCI address).
# Each rank prints only its own place in a ring, so the parser puts the places together.

# %%
HOP = re.compile(r"Channel (\d+)(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via (\S+)")
PLACE = re.compile(r"Ring (\d+) : (\d+) -> (\d+) -> (\d+)")


def transports(log):
    """What each pair of ranks talks over, and on which channels."""
    found = {}
    for channel, sender, receiver, via in HOP.findall(log):
        found.setdefault((int(sender), int(receiver), via), set()).add(int(channel))
    return found


def ring_order(log, channel):
    """The ranks of a channel's ring in order, from 0."""
    following = {}
    for number, before, here, after in PLACE.findall(log):
        if int(number) == channel:
            following |= {int(before): int(here), int(here): int(after)}
    ends = set(following) - set(following.values())  # where a log with lines left out begins
    order = [min(ends, default=0)]
    while following.get(order[-1], order[0]) not in order:
        order.append(following[order[-1]])
    return order[order.index(0) :] + order[: order.index(0)]


# %%
print("from -> to   over                channels")
for (sender, receiver, via), channels in sorted(transports(connections).items()):
    print(f"{sender:4} -> {receiver}    {via:18}  {', '.join(map(str, sorted(channels)))}")
for channel in (6, 7):
    print(f"ring {channel}: {' -> '.join(map(str, [*ring_order(connections, channel), 0]))}")

assert ring_order(connections, 6) == [0, 1, 3, 2]
assert ring_order(connections, 7) == [0, 2, 3, 1]
assert {v for s, r, v in transports(connections) if (s < 2) == (r < 2)} == {"P2P/CUMEM"}
assert all("GDRDMA" in v for s, r, v in transports(connections) if (s < 2) != (r < 2))

# %% [markdown]
# Ranks 0 and 1 are node A, 2 and 3 are node B. Ring 6 leaves A from rank 1 and enters B at rank 3; ring 7 runs the
# other way. With both, each direction of each link carries data, and node B uses two network cards: number 2 beside
# rank 3, number 3 beside rank 2. One ring alone would leave half of the wires idle.
#
# | line | what it tells |
# |---|---|
# | `rank 3 nRanks 4 nNodes 2` | who this is. **`nNodes 1` on two machines: two separate jobs** |
# | `Ring 06 : 2 -> 0 -> 1` | on channel 6, rank 0 receives from 2 and sends to 1 |
# | `Trees [0] 1/2/-1->0->-1` | on channel 0, rank 0 has the children 1 and 2, and no parent: the root |
# | `[4] 1/-1/-1->0->2` | on channel 4 its parent is 2: the second of the two trees |
# | `via P2P/CUMEM` | GPU to GPU directly; so is `P2P/IPC` (older), and `P2P/direct pointer` inside one process |
# | `via SHM/direct/direct` | through host memory: P2P was not possible, or forbidden |
# | `via NET/IB/2/GDRDMA` | network card 2 reads and writes GPU memory itself: GPUDirect RDMA |
# | `via NET/IB/2` | RDMA, but from buffers in host memory: one more copy |
# | `via NET/Socket/0` | TCP |
# | `threadThresholds 8/8/64` … | bytes per thread (tree, then ring; LL/LL128/Simple): below, fewer threads |
# | `8 coll channels, 0 nvls channels` | eight blocks of each GPU at work; no NVLink SHARP |
# | `MNNVL 0` | no NVLink between nodes; in a rack that has it (multi-node NVLink, GB200 NVL72) the rack is one node |
# | `Init COMPLETE` | this rank is ready; a rank without the line is the one to look at |
#
# Rank 0 also prints whole rings, as `Channel 06/08 : 0 1 3 2`. The ring's threshold for LL is 8 bytes times the
# number of ranks, which gives the 32 in the log (NCCL's source,
# [src/graph/tuning.cc](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc)).
#
# Which algorithm and protocol a call takes is not decided at this point. `NCCL_DEBUG_SUBSYS=TUNING` prints the table
# of section 6 now and, later, one line per call: `AllReduce: 33554432 Bytes -> Algo RING proto SIMPLE
# channel{Lo..Hi}={0..31}` ([NCCL user guide,
# Logging](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html)).

# %% [markdown]
# ### Is this job using RDMA?
#
# Three more logs, two lines each, all *recorded*. **Predict**: which of them uses RDMA, and which copies through host
# memory?

# %%
others = {
    "nccl issue 952": """
[7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
[2] NCCL INFO Channel 00/0 : 10[2] -> 9[1] via P2P/IPC/read""",
    "nccl issue 1412": """
[5] NCCL INFO Channel 03/0 : 5[5] -> 12[4] [send] via NET/IB/3
[7] NCCL INFO Channel 00/0 : 7[7] -> 6[6] via P2P/direct pointer/read""",
    "nccl-tests issue 228": """
[7] NCCL INFO Channel 00 : 7[ca000] -> 6[c7000] via SHM/direct/direct
[1] NCCL INFO Channel 00 : 1[2a000] -> 0[27000] via SHM/direct/direct""",
}


def verdict(log):
    """How the nodes talk, and whether something inside a node is odd."""
    ways = {via for _, _, via in transports(log)}
    network = "one node"
    for sign, says in (("NET/Socket", "TCP"), ("NET/IB", "RDMA from host memory")):
        if any(way.startswith(sign) for way in ways):
            network = says
    if any(way.startswith("NET/IB") and way.endswith("GDRDMA") for way in ways):
        network = "GPUDirect RDMA"
    return network + (", GPUs through host memory" if any("SHM" in way for way in ways) else "")


# %%
logs = {"nccl issue 1189": connections} | others
verdicts = {name: verdict(log) for name, log in logs.items()}
for name, says in verdicts.items():
    print(f"{name:21} {says}")

assert list(verdicts.values()) == [
    "GPUDirect RDMA",
    "TCP",
    "RDMA from host memory",
    "one node, GPUs through host memory",
]

# %% [markdown]
# The owner of issue 952 has InfiniBand cards, but the log says `NET/IB : No device found`
# ([952](https://github.com/NVIDIA/nccl/issues/952)), so NCCL falls back to TCP without an error. The next one has
# RDMA, and misses GPUDirect ([1412](https://github.com/NVIDIA/nccl/issues/1412)). The last has eight GPUs on
# NVSwitch that talk through host memory ([228](https://github.com/NVIDIA/nccl-tests/issues/228)). None of the three
# jobs fails. They are slow, and only the log tells.
#
# <details><summary>Question: your log says <code>Using network IB</code>. Is that enough?</summary>
#
# No. It says that NCCL will use RDMA. Whether the card reads the GPU's memory itself stands in the connections, as
# `/GDRDMA`. And a job inside one node prints `Using network IB` too, although no byte goes there. Look at the lines
# between ranks of different nodes, and at all of them: one pair without `/GDRDMA` slows the whole ring.
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
# Each was somebody's real problem: issues [952](https://github.com/NVIDIA/nccl/issues/952),
# [1510](https://github.com/NVIDIA/nccl/issues/1510) of nccl; [228](https://github.com/NVIDIA/nccl-tests/issues/228),
# [373](https://github.com/NVIDIA/nccl-tests/issues/373), [213](https://github.com/NVIDIA/nccl-tests/issues/213) of
# nccl-tests.

# %% [markdown]
# ## 10. Environment variables, by purpose
#
# NCCL has more than a hundred. NVIDIA sorts them into two kinds: **system configuration**, which may stay in scripts,
# and **debugging**, which "should generally not be set for production code", because a forced value keeps NCCL from
# choosing, today and in every later version. Names and defaults below are those of the
# [NCCL user guide](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html); † marks the ones that may
# stay.
#
# **Logging**
#
# | variable (default) | what it is for | when to touch it |
# |---|---|---|
# | `NCCL_DEBUG` (unset) † | `VERSION`, `WARN`, `INFO`, `TRACE` | `WARN` always, `INFO` to look at a start |
# | `NCCL_DEBUG_SUBSYS` (`INIT,BOOTSTRAP,ENV`) † | what `INFO` talks about | `NET`, `GRAPH`, `TUNING` for a question |
# | `NCCL_DEBUG_FILE` (stdout) † | where to write: `%h` host, `%p` process | more than a few ranks |
#
# **Which network**
#
# | variable (default) | what it is for | when to touch it |
# |---|---|---|
# | `NCCL_SOCKET_IFNAME` (not `lo`, `docker*`) † | IP interface: bootstrap, TCP | nodes pick different networks |
# | `NCCL_IB_HCA` (all) † | RDMA cards, `card:port` | cards for storage are there too |
# | `NCCL_IB_GID_INDEX` (−1: chosen) † | address index on RoCE | RoCE does not connect; see `show_gids` |
# | `NCCL_NET` (chosen) † | one network by name: `IB`, `Socket`, … | to fail rather than fall back to TCP |
# | `NCCL_CROSS_NIC` (2) † | other cards on other nodes? 0 no, 1 yes, 2 if faster | 0 where each card has its switch |
# | `NCCL_IB_DISABLE` (unset) | 1: no verbs, so TCP | experiment; leave alone in production |
#
# Names are prefixes: `eth` also means `eth1`, and `mlx5_1` also `mlx5_10`. `=eth0` is exact, `^docker` excludes.
#
# **Transports inside a node, and to the card**
#
# | variable (default) | what it is for | when to touch it |
# |---|---|---|
# | `NCCL_P2P_DISABLE` (unset) | 1: never GPU to GPU | is P2P at fault? Leave alone in production |
# | `NCCL_P2P_LEVEL` (chosen) | how far: `LOC NVL PIX PXB PHB SYS` | the same, finer |
# | `NCCL_SHM_DISABLE` (unset) | 1: never through host memory | the same |
# | `NCCL_NET_GDR_LEVEL` (chosen) | how far GPUDirect RDMA reaches, as above | NCCL misjudges a topology: measure both |
# | `NCCL_NVLS_ENABLE` (2) | NVLink SHARP; 0: off | to compare; its memory cannot be had |
# | `NCCL_MNNVL_ENABLE` (2: if it works) | NVLink between nodes; 0: off, 1: or fail | a rack falls back to its network |
# | `NCCL_COLLNET_ENABLE` (0) † | 1: let the network's switches add, by a plugin | SHARP is there and set up |
# | `NCCL_PXN_DISABLE` (0) | 1: no card of another GPU by way of NVLink | experiment |

# %% [markdown]
# **Algorithm and protocol; buffers and channels**
#
# | variable (default) | what it is for | when to touch it |
# |---|---|---|
# | `NCCL_ALGO` (chosen) | allow or exclude `Ring`, `Tree`, `NVLS`, … | to compare; leave alone in production |
# | `NCCL_PROTO` (chosen) | the same for `LL`, `LL128`, `Simple` | **only to exclude one**, a bug suspected |
# | `NCCL_TUNER_PLUGIN` (looked for) | a library that chooses instead of NCCL | what it chooses is slower: compare |
# | `NCCL_BUFFSIZE` (4194304) | bytes of buffer between two GPUs | memory is short, or the network far |
# | `NCCL_MIN_CTAS`, `NCCL_MAX_CTAS` (chosen) | GPU blocks used, taken from your kernels | benchmarks |
# | `NCCL_IB_QPS_PER_CONNECTION` (1) | queue pairs between two ranks | fabrics of several levels, RoCE: measure |
#
# Allowing LL128 where it is not supported can corrupt data. Since 2.24 the first two can differ by operation:
# `NCCL_ALGO=allreduce:^tree`. The `_CTAS` replace `NCCL_MIN_NCHANNELS` and `NCCL_MAX_NCHANNELS`; for one
# communicator, set them in its `ncclConfig_t`.
#
# **Faults**
#
# | variable (default) | what it is for | when to touch it |
# |---|---|---|
# | `NCCL_IB_TIMEOUT` (20) † | a card's wait for one answer: 4.096 µs · 2^20 = 4.3 s | very large networks |
# | `NCCL_IB_RETRY_CNT` (7) † | so often, hence an error after about 30 s | leave alone |
# | `NCCL_RAS_ENABLE` (1) | service that tells `ncclras` about a job that hangs | leave on |
#
# **Topology files**
#
# | variable (default) | what it is for | when to touch it |
# |---|---|---|
# | `NCCL_TOPO_DUMP_FILE` (unset) † | write the topology found, as XML | to attach to a question |
# | `NCCL_TOPO_FILE` (see below) † | read a topology before looking | machines that hide it, as in the first log |
#
# `NCCL_TOPO_FILE` is `/var/run/nvidia-topologyd/virtualTopology.xml` where there is such a file. All variables can
# also stand in `/etc/nccl.conf`, one `NAME=value` a line. That is where a forgotten one hides.

# %% [markdown]
# A variable must be there **before** the communicator is made, on **every** rank, with the same value. NCCL keeps
# most values from the first time it looks (`NCCL_PARAM` in
# [src/include/param.h](https://github.com/NVIDIA/nccl/blob/master/src/include/param.h)), so a change in a running
# process may do nothing. `torchrun` hands its environment to its ranks, `mpirun` needs `-x NAME`, and `launch`
# gives the ranks the notebook's environment at each call.
#
# The next cell runs on gloo, which reads none of these: it shows that they arrive, not what they do.


# %%
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

# %% [markdown]
# **On a GPU**, run `shutdown()` before you change one, so that new processes look again.
#
# > **Misconception: `NCCL_TIMEOUT`.** Many scripts export it, and NCCL's guide has no such variable. How long a
# > collective may take belongs to the **process group** of PyTorch: `init_process_group(timeout=...)` or
# > `new_group(timeout=...)`. What looks similar is something else: `NCCL_IB_TIMEOUT` is a network card's wait for one
# > answer, and `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC` the patience of a thread that watches PyTorch's own watchdog.


# %%
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

# %% [markdown]
# PyTorch's own variables for NCCL begin with `TORCH_NCCL_`. `TORCH_NCCL_ASYNC_ERROR_HANDLING` (default 3: an error
# or a timeout ends the process) and `TORCH_NCCL_BLOCKING_WAIT` (`wait()` blocks the CPU) decide what a fault does;
# `TORCH_FR_BUFFER_SIZE` (until recently `TORCH_NCCL_TRACE_BUFFER_SIZE`, which still works) and
# `TORCH_NCCL_DUMP_ON_TIMEOUT` belong to the Flight Recorder of lesson 14. See the
# [PyTorch documentation](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html).

# %% [markdown]
# ## 11. nccl-tests: is it the machine or my program?
#
# [nccl-tests](https://github.com/NVIDIA/nccl-tests) times NCCL's collectives with no framework around them. If it is
# slow, the machine is; if it is fast and training is slow, the program is. The commands follow its
# [README](https://github.com/NVIDIA/nccl-tests/blob/master/README.md). On one node, eight GPUs in one process:
#
# ```bash
# git clone https://github.com/NVIDIA/nccl-tests && cd nccl-tests
# make CUDA_HOME=/path/to/cuda NCCL_HOME=/path/to/nccl
# ./build/all_reduce_perf -b 8 -e 8G -f 2 -g 8
# ```
#
# On several nodes it needs MPI. Clean first, or the old binaries stay:
#
# ```bash
# make clean && make MPI=1 MPI_HOME=/path/to/mpi CUDA_HOME=/path/to/cuda NCCL_HOME=/path/to/nccl
# mpirun -np 16 -H nodeA:8,nodeB:8 -x NCCL_DEBUG=WARN ./build/all_reduce_perf -b 8 -e 8G -f 2 -g 1
# ```
#
# GPUs = processes (`-np`) × threads (`-t`, default 1) × GPUs per thread (`-g`, default 1). `-b` and `-e` are the
# first and last size, `-f 2` doubles it. Each row averages `-n` calls (default 20) that are queued back to back,
# launches included, after `-w` untimed ones of every size (default 1; before August 2025 it was 5, of two sizes only).
# `-c 1` checks results, `-m` puts several calls into one group, `-G` replays a CUDA graph.

# %% [markdown]
# One row, *recorded* ([nccl-tests issue 152](https://github.com/NVIDIA/nccl-tests/issues/152)). The left half is
# **out-of-place** (result into another buffer), the right half **in-place**. `#wrong` counts wrong elements; anything
# but 0 makes the rest worthless, and `N/A` means that it was not checked.
#
# **Predict**: the command that made it is not shown. How many GPUs were there?

# %%
row = "67108864 16777216 float sum -1 1367.2 49.09 92.04 0 1362.3 49.26 92.36 0".split()
size, elements = int(row[0]), int(row[1])
time_us, algbw_shown, busbw_shown, wrong = map(float, row[5:9])

factor = busbw_shown / algbw_shown  # 2(n-1)/n for an all-reduce
ranks = round(2 / (2 - factor))
assert size == 4 * elements and wrong == 0
assert abs(algbw(size, time_us * 1e-6) / 1e9 - algbw_shown) < 0.02
assert abs(busbw("all_reduce", ranks, size, time_us * 1e-6) / 1e9 - busbw_shown) < 0.02
print(f"S/t = {size / time_us / 1e3:.1f} GB/s; factor {factor:.3f}, so {ranks} GPUs")

# %% [markdown]
# ### Are my numbers right?
#
# Each question with a number in brackets was asked in that issue. The answers are in our words; figures are *recorded*
# there, and computed again in the cells.
#
# **1. "H100 reaches 370 GB/s. The data sheet says 900."**
# ([nccl-tests 212](https://github.com/NVIDIA/nccl-tests/issues/212),
# [nccl 1442](https://github.com/NVIDIA/nccl/issues/1442)) 900 adds both directions; one is 450. Each packet carries a
# header beside its data, so that about 370 are left. A bus bandwidth counts one direction
# ([189](https://github.com/NVIDIA/nccl-tests/pull/189)).

# %%
sheet, reached = 900.0, 370.0  # GB/s
print(f"{reached:.0f} of {sheet / 2:.0f} GB/s: {reached / (sheet / 2):.0%} of the line")
assert 0.80 < reached / (sheet / 2) < 0.85

# %% [markdown]
# **2. "Mine shows 480 of 450 GB/s. Faster than the wire?"**
# ([nccl-tests 272](https://github.com/NVIDIA/nccl-tests/issues/272),
# [312](https://github.com/NVIDIA/nccl-tests/issues/312), [239](https://github.com/NVIDIA/nccl-tests/pull/239)) The
# switch adds: section 4 took such figures apart. nccl-tests does not know which algorithm ran and takes the factor of
# rings. Read the column as "a ring would need 480 to be as fast".
#
# **3. "Two nodes with 2 × 100 Gb/s cards: 41.55 GB/s, where 25 are possible."**
# ([nccl-tests 251](https://github.com/NVIDIA/nccl-tests/issues/251),
# [nccl 812](https://github.com/NVIDIA/nccl/issues/812)) Between exactly two nodes a tree sends S, a ring nearly 2·S.
# The column again takes the ring's factor. On four nodes the effect is gone; `NCCL_ALGO=Ring` shows it on two.
#
# **4. "Four 200 Gb/s cards, and only 96 GB/s."** ([nccl-tests 119](https://github.com/NVIDIA/nccl-tests/issues/119))
# Bits are not bytes: 4 × 200 Gb/s are 100 GB/s. 24 of 25 per card is the usual peak, so 96 is all there is.

# %%
line = 2 * 100 / 8  # GB/s of a node in question 3
gpus = 2 * 4  # supposing that four of each node took part
print(f"question 3: tree on 2 nodes, at most {line * 2 * (gpus - 1) / gpus:.2f} GB/s in the column")
assert line < 41.55 < line * 2 * (gpus - 1) / gpus

cards, gigabits = 4, 200
print(f"question 4: line {cards * gigabits / 8:.0f} GB/s, usual peak {cards * 24} GB/s")

# %% [markdown]
# **5. "Two nodes are as fast as one."** ([nccl-tests 213](https://github.com/NVIDIA/nccl-tests/issues/213),
# [27](https://github.com/NVIDIA/nccl-tests/issues/27)) Look at the head: two tables, rank 0 twice, `nNodes 1`. Each
# node ran alone. In the second issue the binary had been built without MPI, and `make clean` had to come first.
#
# **6. "`mpirun -np 40 … -g 4` says *invalid device ordinal*."**
# ([nccl-tests 54](https://github.com/NVIDIA/nccl-tests/issues/54)) 40 processes × 4 GPUs are 160 GPUs; the owner had
# 4. An old README had that line for 40 GPUs. Today's says `-np 10`.


# %%
def gpus_needed(processes, per_thread, threads=1):
    return processes * threads * per_thread


print(f"-np 40 -g 4 needs {gpus_needed(40, 4)} GPUs, -np 10 -g 4 needs {gpus_needed(10, 4)}")
assert gpus_needed(10, 4) == 40

# %% [markdown]
# **7. "2 GPUs take 10 µs where I expect 6, and 8 take 34 where I expect 42."** ([nccl-tests
# 123](https://github.com/NVIDIA/nccl-tests/issues/123)) The owner expected 2(N−1) steps of 3 µs each on a DGX A100.
# Fit a line through all seven measurements instead.

# %%
gpus = np.array(list(recorded.A100_LATENCY))
microseconds = 1e6 * np.array(list(recorded.A100_LATENCY.values()))
per_step, launch_cost = np.polyfit(2 * (gpus - 1), microseconds, 1)
miss = np.abs(launch_cost + per_step * 2 * (gpus - 1) - microseconds).max()
print(f"{launch_cost:.1f} µs once + {per_step:.2f} µs a step; off by {miss:.1f} µs at most")
assert miss < 1

# %% [markdown]
# A line fits, with other constants than the owner's. What it cannot say is *why*: one GPU more means two steps more,
# and in this mode also one launch more by the same thread. Two causes that grow together look like one slope. Section
# 6 took NCCL's 0.6 µs for a step and gave the rest, 2.8 µs a GPU, to the launch; that is an assumption, not a
# measurement.
#
# **8. "16 MiB have less bus bandwidth than 8 MiB."** So in the table of section 6, 106.16 GB/s after 109.93
# (*recorded*), and in many others. A switch of algorithm or protocol that comes too early or too late is no fault of
# the machine unless the dip is deep. To look closer, force one with `NCCL_ALGO` or `NCCL_PROTO` and plot both.
#
# **9. "My program gets a third of what the table says."** One call of 4 GB reached 3722 Gb/s, 1000 calls of 4 MB
# 1146, and without warm-up 561 (*recorded*, stas00/ml-engineering, network/README.md). A benchmark's last row is a
# promise about large messages after a warm-up. Compare the row of **your** size.

# %%
one_call, many_calls, cold = 3722, 1146, 561  # Gb/s
print(f"{one_call / 8:.0f}, {many_calls / 8:.0f}, {cold / 8:.0f} GB/s")
print(f"small calls lose {1 - many_calls / one_call:.0%}")

# %% [markdown]
# **10. "256 MB give 250 GB/s; is that the peak?"** ([nccl-tests
# 212](https://github.com/NVIDIA/nccl-tests/issues/212), [149](https://github.com/NVIDIA/nccl-tests/issues/149)) No.
# While the bandwidth still grows from row to row, go on: `-e 8G` at least.
#
# <details><summary>Question: 400 Gb/s for each of eight GPUs a node, many nodes. What is good?</summary>
#
# 400 Gb/s are 50 GB/s; by the rule of question 4 about 48 are left. Eight such ports carry 8 · 48 = 384 GB/s for a
# node, if rings enter and leave it through each of them. NVLink gives 370 inside. So with rings a bus bandwidth
# of about 370, and NVLink is the limit. (*Recorded*: 364.7 GB/s by ring on 4 nodes of 8 H200, stas00/ml-engineering.)
# </details>

# %% [markdown]
# ## Recap, with the numbers of this run

# %%
for name, (steps, sent) in counted.items():
    print(f"{name:20}{steps:3} steps, {sent:.2f} S from the busiest of {world_size} ranks")
fastest = min(contenders, key=lambda name: own_card[name, 2**22])
gain = own_card["ring", 2**22] / own_card[fastest, 2**22]
print(
    f"4 MiB on {virtual[0]} emulated nodes: {fastest} first, {gain:.1f} times as fast as one ring"
)
print(f"emulation and model differ by {worst:.1%} at most")
for name, m in medians.items():
    print(f"median error of the tuner, {name}: {m:.1%}")

# %% [markdown]
# - An all-reduce is a pattern of messages. Right results do not prove it: count its bytes and its steps.
# - Ring: 2(N−1) steps, 2(N−1)/N·S, so bandwidth for ever and latency that grows with N. Trees: log N steps.
#   Halving/doubling: both, in a model without distance. Two levels: few bytes on the slow links.
# - α + β·S for each message gives the time of each algorithm; ring and tree cross at a size that grows with N.
# - Where the switch adds, bus bandwidth is no longer the speed of a wire: 482 of 450 GB/s is 310 on the wire.
# - A protocol trades bandwidth for latency: LL and LL128 send flags with the data, Simple waits for a fence.
# - NCCL computes a time for each algorithm and protocol from a table of constants and takes the least. The table can
#   be rebuilt, and errs where the constants do. The corrections came from other machines, chosen knowing the errors.
# - In C: a communicator, a stream, a group around calls of one process. Errors come in three kinds; the third, that
#   nothing comes, only a clock finds. One function gives everything back.
# - A trace by LD_PRELOAD shows which calls a program makes and how many bytes it hands over; its time is the CPU's.
# - In a log look at the connections between nodes: `NET/IB/…/GDRDMA` is GPUDirect RDMA, `NET/Socket` TCP. The slow
#   way is no error.
# - Variables must be there before the communicator, the same on every rank. A timeout belongs to the process group.
# - nccl-tests tells the machine from the program. Its bus bandwidth takes rings for granted; read the row of your
#   size.
#
# <details><summary>Answers to the eight predictions</summary>
#
# 1. 7 S, to seven ranks one after the other, and receives as much (section 1).
# 2. 14 steps and 1.75 S; 1,998 steps and 1.998 S (section 1).
# 3. The tree, about 100 times: 20 latencies against 2,046 (section 4).
# 4. Two levels, about twice as fast (section 5).
# 5. It need not wait for a memory fence at each hop. For small messages that is most of the time (section 6).
# 6. Not broken: it looks like a switch of protocol at the wrong size. NCCL computes its choice from constants
#    (section 6).
# 7. The switch adds: each GPU sends (N+1)/N·S instead of 2(N−1)/N·S, and bus bandwidth assumes the latter (section
#    4).
# 8. No. With four GPUs a ring sends 1.5 S at 82 % of the wire's rate, in-network reduction 1.25 S at 68 %: they tie,
#    and a ring's bus bandwidth cannot pass the wire's (section 4).
# </details>
#
# **Exercises:** [exercises/03_nccl](../exercises/03_nccl_exercises.ipynb). **Next:** [04
# ddp](04_ddp.ipynb), where these all-reduces hide behind `loss.backward()`.
#
# **Worth reading**
# - R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of collective communication operations in MPICH*, 2005,
#   [doi.org/10.1177/1094342005051521](https://doi.org/10.1177/1094342005051521): recursive doubling, halving, and
#   when to switch between them.
# - P. Sanders, J. Speck, J. L. Träff, *Two-tree algorithms for full bandwidth broadcast, reduction and scan*, 2009,
#   [doi.org/10.1016/j.parco.2009.09.001](https://doi.org/10.1016/j.parco.2009.09.001): the two trees of section 4.
# - Z. Hu et al., *Demystifying NCCL*, 2025, [arXiv 2507.04786](https://arxiv.org/abs/2507.04786): protocols, channels
#   and algorithms, read from NCCL's source by people who know it.
