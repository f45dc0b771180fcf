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
# # What does each collective do, and how many bytes does it move?
#
# Eight GPUs train a model of 7 billion parameters, each on its own data (their optimizer states are sharded, as in
# lesson 06, or they would not fit). After every backward pass they average their gradients: 14 GB in bf16 on each GPU.
# If every GPU sent its gradients to every other, 98 GB would leave each of them, at every step. A good all-reduce
# needs 24.5 GB. A program that picks the wrong collective pays the difference for as long as it runs.
#
# **You will be able to**
# - *draw* what every rank holds before and after each collective, and choose the one a task needs;
# - *compute* the bytes each rank must move, and *check* the figure against what was really sent;
# - *read* a bandwidth table: latency end, bandwidth end, algorithm and bus bandwidth;
# - *recognise* the four usual mistakes by what they do.
#
# **Before this:** [00 start_here](00_start_here.ipynb). **Time:** about 105 minutes to read, under a minute to run.
# Sections 10 and 11 can wait.

# %% [markdown]
# ## Eight predictions
#
# Write down an answer to each, however unsure. They come up again on the way, and the answers are at the end.
#
# 1. After `reduce` to rank 0, what do the *other* ranks hold?
# 2. Four ranks all-reduce 1 GB. How many bytes must each rank send? And with a thousand ranks?
# 3. Which moves more for the same S bytes: `all_reduce` of S, or the `all_gather` that puts S together?
# 4. Every rank calls `send` to its right neighbour, then `recv` from its left one. What happens?
# 5. One rank of four skips an `all_reduce`. Who notices, and when?
# 6. Rank 0 passes `ReduceOp.MAX`, the others `SUM`. Error, hang, or wrong numbers?
# 7. Sixty-four all-reduces of 4 KiB or one of 256 KiB: which is faster, and roughly by how much?
# 8. A table says: all-reduce, 1 GiB, 8 GPUs, 8.2 ms. The link was measured at 274 GB/s. How much of it was used? (A
#    guess; section 6 has the formula.)

# %% [markdown]
# The first cell imports everything and names every parameter.

# %% tags=["parameters"]
import os
import socket
import struct
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_utils import device, expect_error, launch, record
from course_utils.costs import algbw, busbw, bytes_sent, fit_alpha_beta, format_bytes
from course_utils.plots import bandwidth, before_after, timeline
from course_utils.widgets import collective_stepper

world_size = 4  # ranks, 2 or more
patience = 2.0  # seconds that `launch` waits for the ranks in some cells
counted_bytes = 2**22  # message size S where bytes are counted: 4 MiB
sizes = [2**k for k in range(10, 25, 2)]  # message sizes S where time is measured: 1 KiB to 16 MiB

# %% [markdown]
# ## 1. Point to point: `send` and `recv`
#
# Everything in this lesson is made of messages between two ranks. Rank 0 sends three numbers; rank 1 receives them
# into memory that it has prepared. Nothing but the rank numbers connects the two calls.


# %%
def hand_over():
    x = torch.arange(3.0, device=device()) + 10 * dist.get_rank()
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
    else:
        dist.recv(x, src=0)
    return x.tolist()


received = launch(hand_over, world_size=2)[1]
assert received == [0.0, 1.0, 2.0]
print("rank 1 had [10, 11, 12] and now has", received)

# %% [markdown]
# Now a ring: each rank hands a number to its right neighbour and takes one from the left. The obvious program sends
# first and receives second.
#
# **Predict** (question 4). Every rank runs the same two lines. Which rank is the first to come back from `send`?
#
# The next cell runs it, on CPU tensors even where there are GPUs (`backend="gloo"`), with a limit of two seconds.
# (`expect_error` shows what goes wrong and lets the notebook run on.)


# %%
def neighbours():
    rank, n = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % n, (rank - 1) % n


def send_then_recv():
    right, left = neighbours()
    mine = torch.tensor([dist.get_rank()])
    theirs = torch.empty_like(mine)
    dist.send(mine, dst=right)
    dist.recv(theirs, src=left)
    return theirs.item()


with expect_error():
    launch(send_then_recv, world_size=world_size, timeout=patience, backend="gloo")

# %% [markdown]
# None of them. `send` returns when the message has been taken, so every rank stands at line 10 and waits for a
# neighbour that stands at line 10. This is a **deadlock**: no rank is wrong alone, the circle is. Read the table once
# more: each rank's last operation, and the line it waits in. You will see such tables again.
#
# A program like this is called *unsafe*: with a library that copies small messages away it even works, until the
# messages grow. There are two cures. The first breaks the circle by order: even ranks send first, odd ranks receive
# first.


# %%
def take_turns():
    right, left = neighbours()
    mine = torch.tensor([dist.get_rank()], device=device())
    theirs = torch.empty_like(mine)
    if dist.get_rank() % 2 == 0:
        dist.send(mine, dst=right)
        dist.recv(theirs, src=left)
    else:
        dist.recv(theirs, src=left)
        dist.send(mine, dst=right)
    return theirs.item()


from_the_left = [(rank - 1) % world_size for rank in range(world_size)]
assert launch(take_turns, world_size=world_size) == from_the_left
print("received, by rank:", from_the_left)

# %% [markdown]
# <details><summary>Does it still work with three ranks, where ranks 0 and 2 are neighbours, both even?</summary>
#
# Yes, in one more step. Rank 2 waits in its send to rank 0, which is still sending to rank 1. But rank 1 is odd and
# receives, so rank 0 gets on to its own receive and takes rank 2's message. One rank that receives first breaks the
# circle.
# </details>
#
# The second cure does not wait. `isend` and `irecv` (*i* for immediate) only start the transfer and return a
# **request**; `wait()` on it ends it. Both requests are under way before anybody waits.


# %%
def start_both_then_wait():
    right, left = neighbours()
    mine = torch.tensor([dist.get_rank()], device=device())
    theirs = torch.empty_like(mine)
    receiving = dist.irecv(theirs, src=left)
    sending = dist.isend(mine, dst=right)
    receiving.wait()  # only now may `theirs` be read
    sending.wait()  # only now may `mine` be changed
    return theirs.item()


assert launch(start_both_then_wait, world_size=world_size, backend="gloo") == from_the_left
print("isend and irecv: no order to get wrong, result as before")

# %% [markdown]
# `batch_isend_irecv` takes a list of such operations and starts them together. On a GPU this is the one to use.


# %%
def shift(x):
    """Send `x` to the right neighbour and return what the left one sent."""
    right, left = neighbours()
    arriving = torch.empty_like(x)
    both = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, arriving, left)]
    for request in dist.batch_isend_irecv(both):
        request.wait()
    return arriving


def shift_my_rank():
    return shift(torch.tensor([dist.get_rank()], device=device())).item()


assert launch(shift_my_rank, world_size=world_size) == from_the_left
print("batch_isend_irecv: the same, in one call")

# %% [markdown]
# > **What changes on real GPUs.** The deadlock moves from Python to the GPU, and even `isend` before `irecv` can cause
# > it. `batch_isend_irecv` with the send *and* the receive in one list cannot, if the lists of the ranks match and all
# > ranks of the group take part in its first call.
#
# <details><summary>Why?</summary>
#
# Under NCCL `send` and `isend` only put a GPU kernel on a stream and return. (In lesson 00's words: they put a function
# that runs on the GPU into a queue. The first one to a peer is another matter in a program that has not passed
# `device_id=` to `init_process_group`: it has to make a communicator of two, and blocks Python until the peer comes.)
# But GPU kernels on one stream run one after the other: if two ranks first `isend` to each other and
# then `irecv`, each send can occupy its stream until the other side receives, which is queued behind *its* send.
# `batch_isend_irecv` puts the whole list between `ncclGroupStart` and `ncclGroupEnd`: they become one GPU kernel, and
# in it sends and receives progress together.
# </details>
#
# > **Misconception.** "`isend` has returned, so the message is gone." It has been *started*. Changing the tensor
# > before `wait()` may change what arrives.
#
# ### Barrier
#
# `barrier` moves no data. No rank leaves it before the last one has entered. Each rank is now late by 50 ms times its
# number.


# %%
def arrive_late():
    dist.barrier()  # a common starting line
    start = time.monotonic()
    time.sleep(0.05 * dist.get_rank())
    entered = time.monotonic()
    dist.barrier()
    return start, entered, time.monotonic()


start, entered, left = zip(*launch(arrive_late, world_size=world_size), strict=True)
assert min(left) >= max(entered)
zero = min(start)
rows = {
    f"rank {r}": [
        ("work", start[r] - zero, entered[r] - zero),
        ("barrier", entered[r] - zero, left[r] - zero),
    ]
    for r in range(world_size)
}
timeline(rows, "measured: nobody leaves the barrier before the last rank has entered")

# %% [markdown]
# *The figure: one row a rank. The work bars grow with the rank; the barrier bars fill the rest, so that all end
# together. The last rank does not wait.*
#
# Everyone runs at the speed of the slowest. All-reduce and all-gather wait like this too: nobody can have the sum
# before the last summand exists. A broadcast does not: its root may leave early. So a barrier before an all-reduce is
# wasted time; its honest uses are timing and files.
#
# <details><summary>Barriers with NCCL, and a barrier that names the missing rank</summary>
#
# Under NCCL `barrier` is an all-reduce on a GPU followed by a wait of the CPU, so it has to know which GPU: pass
# `device_id=` to `init_process_group` once, or `device_ids=[local_rank]` to the barrier.
# `dist.monitored_barrier(timeout=…)` exists on gloo only, and its error names a rank that did not come.
# </details>

# %% [markdown]
# ## 2. Eight collectives in pictures
#
# A **collective** is a call that all ranks of a group make together. The pictures below come from real runs, and the
# numbers tell where they were: rank 0 writes 1, 2, 3, …, rank 1 writes 10, 20, 30, …, rank 2 hundreds. So 3 comes
# from rank 0, and 1,011 is a sum of what ranks 0, 1 and 3 had. Colours say the same: one for each rank, stripes for a
# sum.


# %%
def numbers(count=None):
    """Digits 1, 2, 3 … in this rank's own decimal place: rank 2 gets 100, 200, 300 …"""
    rank, n = dist.get_rank(), dist.get_world_size()
    return torch.tensor([(i % 9 + 1) * 10**rank for i in range(count or n)], device=device())


def run(collective):
    """Return what the ranks held before and after `collective`."""
    return zip(*launch(collective, world_size=world_size), strict=True)


# %% [markdown]
# ### One rank gives: broadcast and scatter
#
# **Broadcast** copies the tensor of one rank, the **root**, to all. Others must bring memory of the same shape and
# type; what it held is overwritten.


# %%
def broadcast():
    x = numbers()
    before = x.clone()
    dist.broadcast(x, src=0)
    return before, x


before, after = run(broadcast)
assert all(torch.equal(x, before[0]) for x in after)
before_after(before, after, "broadcast")

# %% [markdown]
# *The figure: every row of the right side is rank 0's row.* Used to give all ranks the same initial weights.
#
# **Scatter** deals out instead of copying: piece r of the root goes to rank r.


# %%
def scatter():
    root = dist.get_rank() == 0
    whole = numbers() if root else None
    piece = torch.empty(1, dtype=torch.int64, device=device())
    dist.scatter(piece, list(whole.split(1)) if root else None, src=0)
    return whole, piece


before, after = run(scatter)
assert torch.equal(torch.cat(after), before[0])
before_after(before, after, "scatter")

# %% [markdown]
# *The figure: rank 0's four pieces end on four ranks, one each.*
#
# ### One rank takes: gather and reduce
#
# **Gather** is scatter backwards: the root collects one piece from each rank, in rank order.


# %%
def gather():
    piece, root, n = numbers(1), dist.get_rank() == 0, dist.get_world_size()
    pieces = [torch.empty_like(piece) for _ in range(n)] if root else None
    dist.gather(piece, pieces, dst=0)
    return piece, torch.cat(pieces) if root else None


before, after = run(gather)
assert torch.equal(after[0], torch.cat(before))
before_after(before, after, "gather")

# %% [markdown]
# *The figure: rank 0 holds one piece of every colour; the others hold nothing new.*
#
# **Reduce** combines element by element, here by adding, and leaves the result on the root.
#
# **Predict** (question 1). All ranks pass a tensor and the root's is overwritten with the sum. What about the
# others'?


# %%
def reduce():
    x = numbers()
    before = x.clone()
    dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)
    return before, x


before, after = run(reduce)
assert torch.equal(after[0], sum(before))
before_after(before, after, "reduce (SUM)")

# %% [markdown]
# *The figure: rank 0 holds sums of all colours; the other rows hold partial sums or their old numbers.*
#
# gloo uses the memory of the other ranks as scratch space: look at the stripes, and you see which partial sums came by.
# NCCL leaves it as it was. No backend promises what is left there.
#
# > **Misconception.** "After `reduce` the other ranks still have their input." With gloo parts of it are gone. Copy
# > it first if you need it.
#
# ### All take: all-reduce and all-gather
#
# **All-reduce** is reduce with the result on every rank. It is the collective of data-parallel training.


# %%
def all_reduce():
    x = numbers()
    before = x.clone()
    dist.all_reduce(x, op=dist.ReduceOp.SUM)
    return before, x


before, after = run(all_reduce)
assert all(torch.equal(x, sum(before)) for x in after)
before_after(before, after, "all_reduce (SUM)")

# %% [markdown]
# *The figure: on the right all rows are equal, and each cell has a stripe from every rank.*
#
# The operation is a choice. The next cell runs the common ones on one number a rank: rank r brings r + 1.


# %%
def reduce_with(name):
    x = torch.tensor([dist.get_rank() + 1.0], device=device())
    dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
    return x.item()


result = {
    op: launch(reduce_with, op, world_size=world_size)
    for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
}
for op, by_rank in result.items():
    assert len(set(by_rank)) == 1  # all ranks agree
    print(f"{op:8}{by_rank[0]:6g}")
assert result["AVG"][0] == result["SUM"][0] / world_size

# %% [markdown]
# > **Misconception.** "`all_reduce` averages." It *sums* unless told otherwise; averaging gradients is a division by
# > the world size that somebody has to do (DDP does).
#
# <details><summary>Does <code>AVG</code> need NCCL, as the documentation of <code>ReduceOp</code> says?</summary>
#
# No: you have just run it on whatever backend this notebook uses. On gloo it needs a floating-point tensor. `BAND`,
# `BOR` and `BXOR` (bitwise, for integers) exist on gloo and not on NCCL; `PREMUL_SUM` (scale, then add) the other way
# round.
# </details>
#
# **All-gather** is gather with the result on every rank: one piece in, the whole out. (`all_gather_single` fills one
# tensor; before PyTorch 2.13 it was `all_gather_into_tensor`. `all_gather` fills a list of tensors.)


# %%
def all_gather():
    piece = numbers(1)
    whole = piece.new_empty(dist.get_world_size())
    dist.all_gather_single(whole, piece)
    return piece, whole


before, after = run(all_gather)
assert all(torch.equal(x, torch.cat(before)) for x in after)
before_after(before, after, "all_gather")

# %% [markdown]
# *The figure: every row on the right has one cell of each colour.* FSDP calls it to put a layer's sharded weights
# together.
#
# ### Everybody gives, everybody takes a part: reduce-scatter and all-to-all
#
# **Reduce-scatter** adds up and deals out: rank r keeps piece r of the sum. (`reduce_scatter_single` was
# `reduce_scatter_tensor` before PyTorch 2.13.)


# %%
def reduce_scatter():
    x = numbers()
    piece = x.new_empty(1)
    dist.reduce_scatter_single(piece, x)
    return x, piece


before, after = run(reduce_scatter)
assert torch.equal(torch.cat(after), sum(before))
before_after(before, after, "reduce_scatter (SUM)")

# %% [markdown]
# *The figure: one cell a rank on the right, each with stripes of all colours.* ZeRO and FSDP reduce gradients this
# way.
#
# **All-to-all** has no sum. Every rank cuts its tensor into one piece for each rank and sends piece 0 to rank 0, piece
# 1 to rank 1, and so on. What comes from rank r is kept in place r.
#
# **Predict.** Write the numbers as a square, one row a rank. Which operation on a square is this?


# %%
def all_to_all():
    x = numbers()
    arriving = torch.empty_like(x)
    dist.all_to_all_single(arriving, x)
    return x, arriving


before, after = run(all_to_all)
assert torch.equal(torch.stack(after), torch.stack(before).T)
before_after(before, after, "all_to_all")

# %% [markdown]
# *The figure: each row of one colour on the left has become a column on the right.*
#
# It is the transpose. Mixture-of-experts layers use it to bring each token to the rank that holds its expert, and
# back.
#
# ### All eight as matrix algebra
#
# Call the numbers before B, one row a rank. Then each collective is one expression:
#
# | collective | brings | after, on rank r | on the whole grid B |
# |---|---|---|---|
# | broadcast | root: a row | B[0] | every row is B[0] |
# | scatter | root: a row | B[0, r] | row 0, dealt out |
# | gather | a piece b | root: all pieces | column on the root |
# | reduce | a row | root: B.sum(0) | column sums on the root |
# | all_gather | a piece b | all pieces | column on every rank |
# | all_reduce | a row | B.sum(0) | column sums on every rank |
# | reduce_scatter | a row | B.sum(0)[r] | column sums, dealt out |
# | all_to_all | a row | B[:, r] | transpose |
#
# ### Look inside
#
# How do they do it? Choose a collective, step through its messages, change the numbers. The messages are real ones
# between ranks: a ring, a tree or pairs, and at the end the result is compared with the library's collective.

# %%
stepper = collective_stepper(min(world_size, 8))
stepper

# %% [markdown]
# *The widget: on the left what every rank holds before the chosen step, with an arrow for each message; on the right
# what it holds after it. In a notebook that is not running it shows the first step of an all-reduce.*
#
# Things to look for: how many steps `broadcast` takes (a tree doubles the ranks that know, each step); which rank is
# busy in every step of `gather`; and that the second half of `all_reduce` looks like `all_gather`.

# %% [markdown]
# ## 3. Two identities
#
# **Predict.** Which two collectives, one after the other, make an all-reduce? And a broadcast?
#
# The next cell tries reduce-scatter + all-gather on random numbers, different on each rank.


# %%
def all_reduce_in_two():
    x = torch.randn(1000 * dist.get_world_size(), device=device())
    piece, again, once = x.new_empty(1000), torch.empty_like(x), x.clone()
    dist.reduce_scatter_single(piece, x)
    dist.all_gather_single(again, piece)
    dist.all_reduce(once)
    return torch.allclose(once, again, rtol=1e-5, atol=1e-5)


assert all(launch(all_reduce_in_two, world_size=world_size))
print("all_reduce == reduce_scatter + all_gather")


# %%
def broadcast_in_two():
    x = torch.randn(1000 * dist.get_world_size(), device=device())
    piece, again = x.new_empty(1000), torch.empty_like(x)
    dist.scatter(piece, list(x.split(1000)) if dist.get_rank() == 0 else None, src=0)
    dist.all_gather_single(again, piece)
    dist.broadcast(x, src=0)
    return torch.equal(x, again)


assert all(launch(broadcast_in_two, world_size=world_size))
print("broadcast == scatter + all_gather")

# %% [markdown]
# The first identity carries half of this course. ZeRO and FSDP pull the two halves apart and do something useful in
# between, when each of the N ranks holds 1/N of the sum: an optimizer step on 1/N of the parameters, with 1/N of the
# optimizer state.
#
# <details><summary>Why must a library not promise bit-equal results?</summary>
#
# Floating-point addition depends on the order, and ring, tree and network switch add in different orders. All ranks
# of *one* ring or tree all-reduce agree, because each piece is added up once and then copied; two algorithms, or two
# world sizes, differ in the last bits. Hence `allclose` above. The second identity only copies, hence `equal`.
# </details>

# %% [markdown]
# ## 4. Groups: not always all ranks
#
# A **process group** is an ordered set of ranks that communicate among themselves. `launch` has made the default
# group of all ranks; `new_group` makes others. Here even and odd ranks form two teams, and each team adds up its own
# numbers.


# %%
def two_teams():
    rank, n = dist.get_rank(), dist.get_world_size()
    teams = [list(range(0, n, 2)), list(range(1, n, 2))]
    groups = [dist.new_group(team) for team in teams]  # every rank makes both, in the same order
    x = numbers()
    before = x.clone()
    dist.all_reduce(x, group=groups[rank % 2])
    return before, x


before, after = run(two_teams)
for rank in range(world_size):
    assert torch.equal(after[rank], sum(before[rank % 2 :: 2]))
before_after(before, after, "all_reduce in two teams")

# %% [markdown]
# *The figure: rows 0, 2, … have the stripes of even ranks only, rows 1, 3, … those of odd ranks only.*
#
# > **Misconception.** "Only members call `new_group`." By default *every* rank of the world has to call it, for every
# > group and in the same order, members or not. If a rank leaves one out, that group may even
# > work, and a later `new_group` waits for ever: the ranks disagree on how many groups there are.
#
# Inside a group ranks are counted anew. `src=` and `dst=` mean ranks of the *world*, `group_src=` and `group_dst=`
# ranks of the *group*. Mixing them up is easy as long as the first group starts at 0.


# %%
def number_in_team():
    team = list(range(1, dist.get_world_size()))  # everybody but rank 0
    group = dist.new_group(team)
    if dist.get_rank() not in team:
        return "rank 0 of the world is not a member"
    x = torch.tensor([100 + dist.get_rank()], device=device())
    dist.broadcast(x, group_src=0, group=group)  # the same as src=1
    ranks = f"rank {dist.get_rank()} of the world is rank {dist.get_rank(group)} of the group"
    return f"{ranks} and got {x.item()}"


print(*launch(number_in_team, world_size=world_size), sep="\n")

# %% [markdown]
# ### DeviceMesh: groups in a grid
#
# Real jobs arrange ranks in a grid, say data-parallel × tensor-parallel, and communicate along rows or along columns.
# A `DeviceMesh` makes all those groups at once. Along dimension `"tp"`, a group is the ranks that differ in their tp
# index only.

# %%
rows = max(d for d in range(1, world_size) if world_size % d == 0 and d * d <= world_size)
shape = (rows, world_size // rows)


def groups_of_a_mesh():
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("dp", "tp"))
    members = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in ("dp", "tp")}
    print(f"position {mesh.get_coordinate()}, dp group {members['dp']}, tp group {members['tp']}")
    return mesh.mesh.tolist()


grid = launch(groups_of_a_mesh, world_size=world_size)[0]
print("grid of ranks:", grid)

# %% [markdown]
# **Predict.** What do the ranks hold after an all-reduce along `tp`, and what if one along `dp` follows?


# %%
def along_tp_then_dp():
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("dp", "tp"))
    x = numbers()
    before = x.clone()
    dist.all_reduce(x, group=mesh.get_group("tp"))
    between = x.clone()
    dist.all_reduce(x, group=mesh.get_group("dp"))
    return before, between, x


before, between, after = run(along_tp_then_dp)
assert all(torch.equal(x, sum(before)) for x in after)
before_after(before, between, "all_reduce along tp")

# %% [markdown]
# *The figure: ranks in the same row of the grid share their stripes.* After the second all-reduce, along `dp`, every
# rank holds the sum over all ranks: the assertion says so. This is the idea of a *hierarchical* all-reduce: first
# over the fast links inside a node, then over the slow ones between nodes. As written, every rank still carries all
# of its tensor between nodes; exercise 7 does better.
#
# <details><summary>A mesh of shape (2, 4) with names ("dp", "tp"): how many groups are there, and how large?</summary>
#
# Two tp groups of four ranks, the rows, and four dp groups of two ranks, the columns.
# </details>
#
# > **What changes on real GPUs.** Each group is a communicator of its own, with its own buffers in GPU memory and its
# > own streams. Two groups can communicate at the same time, but all ranks should then start them in the same order.

# %% [markdown]
# ## 5. How many bytes must each rank move?
#
# S is the size in bytes of the whole tensor: the one you pass to all-reduce, broadcast and reduce; the *output* of
# all-gather; the *input* of reduce-scatter and all-to-all; all pieces together for gather and scatter. There are N
# ranks.
#
# - **All-gather.** A rank has 1/N of the whole. The other (N−1)/N must come in, so each rank receives (N−1)/N·S.
# - **Reduce-scatter.** Cut the tensor into N pieces; rank r has to end with the sum of piece r. Let each piece travel
#   from rank to rank in a ring and collect a summand at each: N−1 hops until it is complete. There are N pieces and N
#   ranks, so in each of the N−1 steps every rank sends one piece of S/N: (N−1)/N·S.
# - **All-to-all.** A rank keeps one of its N pieces and sends the others: (N−1)/N·S.
# - **All-reduce.** Reduce-scatter, then all-gather: 2(N−1)/N·S. Play it in the widget of section 2: on 4 ranks steps 1
#   to 3 add, steps 4 to 6 copy.
# - **Broadcast, reduce.** S must leave the root, or reach it: S.
# - **Gather, scatter.** The root keeps its own piece: (N−1)/N·S at the root.
#
# **Predict** (questions 2 and 3). All-reduce of 1 GB on 4 ranks, and on 1,000? Then run the formulas:

# %%
collectives = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
]
print(
    f"{'GB through the busiest rank, at least; N =':42}"
    + "".join(f"{n:7}" for n in (2, 4, 8, 64, 1000))
)
for op in collectives:
    print(f"{op:42}" + "".join(f"{bytes_sent(op, n, 1.0):7.3f}" for n in (2, 4, 8, 64, 1000)))
assert bytes_sent("all_reduce", 8, 14.0) == 24.5  # the 7-billion-parameter model from the start

# %% [markdown]
# (S is 1 GB in this table; what S is for each collective stands above.) An all-reduce moves twice the size, nearly
# independent of the number of ranks: that is why data parallelism scales at all.
#
# Why can it not be less, as long as only the ranks add? Follow one number of the tensor. Before the first rank can know
# its sum, each of the other N−1 ranks must have sent its own value on: N−1 messages at least. Then each of these N−1
# ranks still has to receive the result: N−1 more. So 2(N−1) messages for each number, 2(N−1)·S bytes in all, and if N
# ranks share them evenly, each sends 2(N−1)/N·S (Patarasuk and Yuan, below, prove it). The figures are bounds: many
# algorithms move more. In the widget's broadcast, for example, the root sends S several times.
#
# <details><summary>FSDP all-gathers parameters twice a step and reduce-scatters gradients. Its bytes?</summary>
#
# DDP all-reduces S bytes of gradients: 2(N−1)/N·S. FSDP gathers S bytes of parameters before the forward and again
# before the backward pass, and then reduce-scatters the gradients: 3(N−1)/N·S, half as much again. That is the price
# of holding 1/N of everything.
# </details>
#
# Here are two all-gathers from scratch. The first makes rank 0 a **hub**: everybody sends to it, and it sends the
# whole to everybody.


# %%
def hub_all_gather(piece):
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [torch.empty_like(piece) for _ in range(n)]
    pieces[rank] = piece
    if rank == 0:
        for peer in range(1, n):
            dist.recv(pieces[peer], src=peer)
        for peer in range(1, n):
            dist.send(torch.cat(pieces), dst=peer)
        return torch.cat(pieces)
    dist.send(piece, dst=0)
    whole = torch.cat(pieces)
    dist.recv(whole, src=0)
    return whole


# %% [markdown]
# The second is a **ring**: N − 1 times, every rank passes on to the right what last came from the left. It uses
# `shift` from section 1.


# %%
def ring_all_gather(piece):
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [piece] * n
    for step in range(1, n):
        piece = shift(piece)  # now the piece of the rank `step` places to the left
        pieces[(rank - step) % n] = piece
    return torch.cat(pieces)


# %% [markdown]
# Both are compared with the library, and their bytes are counted by the **ledger**: `record()` notes every operation
# that a rank issues inside the block.
#
# **Predict.** Rank 0 of the hub sends how many times S? And a rank of the ring?


# %%
def counted(algorithm):
    piece = torch.randn(counted_bytes // 4 // dist.get_world_size(), device=device())
    with record() as ledger:
        whole = algorithm(piece)
    expected = torch.empty_like(whole)
    dist.all_gather_single(expected, piece)
    assert torch.equal(whole, expected)
    size = whole.numel() * 4
    return ledger.sent / size, ledger.received / size


for algorithm in (hub_all_gather, ring_all_gather):
    sent, received = zip(*launch(counted, algorithm, world_size=world_size), strict=True)
    print(f"{algorithm.__name__:16} sent by each rank, in S:", *(f"{x:.2f}" for x in sent))
    print(f"{'':16} received by each rank:  ", *(f"{x:.2f}" for x in received))
assert all(abs(x - bytes_sent("all_gather", world_size, 1.0)) < 1e-4 for x in sent)

# %% [markdown]
# The hub sends (N−1)·S through one link while the other links idle. The ring sends (N−1)/N·S through every link, N
# times less through the busiest. Same result, and the hub's other ranks receive only one piece more (their own comes
# back): what matters is the *busiest rank*.
#
# ### The wrong ring and the right one
#
# For all-reduce there is a well-known wrong turn: pass the *whole* tensor round the ring and add what comes by. The
# right ring passes *pieces*: first sums that grow as they travel (a reduce-scatter), then the finished pieces. Its
# first half on four ranks:

# %%
print("sends: rank 0   rank 1   rank 2   rank 3")
for step in range(1, 4):
    print(f"step {step}", *(f"piece {(rank - step) % 4} " for rank in range(4)))
print("after it: rank r has the sum of piece r")

# %% [markdown]
# Follow piece 0: it starts at rank 1, and ranks 2, 3 and 0 add theirs to it.


# %%
def whole_tensors_round_a_ring(x):
    total = x.clone()
    for _ in range(dist.get_world_size() - 1):
        x = shift(x)
        total += x
    return total


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = x.clone().view(n, -1)
    for step in range(1, n):
        so_far = shift(pieces[(rank - step) % n])  # the sum of `step` ranks, from the left
        pieces[(rank - step - 1) % n] += so_far  # and now of one more
    return ring_all_gather(pieces[rank])  # the sum of all


# %% [markdown]
# **Predict.** For four ranks: steps, and bytes sent by each rank, of the one and the other?


# %%
def counted_all_reduce(algorithm):
    n = dist.get_world_size()
    x = torch.randn(counted_bytes // 4 // n * n, device=device())
    with record() as ledger:
        result = algorithm(x)
    dist.all_reduce(x)
    assert torch.allclose(result, x, atol=1e-4)
    return ledger.messages, ledger.sent / (x.numel() * 4)


for algorithm in (whole_tensors_round_a_ring, ring_all_reduce):
    messages, sent = launch(counted_all_reduce, algorithm, world_size=world_size)[0]
    print(f"{algorithm.__name__:28}{messages:3} messages a rank, {sent:.2f} S sent")
assert messages == 2 * (world_size - 1)
assert abs(sent - bytes_sent("all_reduce", world_size, 1.0)) < 1e-9

# %% [markdown]
# > **Misconception.** "Passing tensors round a ring is ring all-reduce." Ring all-reduce passes *pieces* of S/N, in
# > 2(N−1) steps: 2(N−1)/N·S in all. Whole tensors cost (N−1)·S: at 4 ranks twice as much, at 64 ranks 32 times as
# > much.
#
# ### And the library?
#
# The ledger sees one `all_reduce`; it cannot see what gloo makes of it. The operating system can. Linux counts the
# bytes of every TCP connection, and a process may ask for its own. The function in the folded cell adds them up.


# %% jupyter={"source_hidden": true}
def tcp_bytes():
    """Bytes this process has sent, and seen acknowledged, and received over TCP; Linux only."""
    sent = received = 0
    for descriptor in os.scandir("/proc/self/fd"):
        if not os.readlink(descriptor.path).startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
            if (
                connection.family in (socket.AF_INET, socket.AF_INET6)
                and connection.type == socket.SOCK_STREAM
            ):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                # at byte 120 of the kernel's struct tcp_info: tcpi_bytes_acked, tcpi_bytes_received
                acknowledged, arrived = struct.unpack_from("QQ", info, 120)
                sent, received = sent + acknowledged, received + arrived
    return sent, received


# %% [markdown]
# These are the eight calls, on messages of a given size. The measurements of section 6 use them too.


# %%
def calls(size):
    """The eight collectives, ready to call, on messages of about `size` bytes."""
    n, root = dist.get_world_size(), dist.get_rank() == 0
    count = max(1, size // 4 // n)
    whole, other = torch.zeros(2, n * count, device=device())
    piece = torch.zeros(count, device=device())
    pieces = list(whole.split(count)) if root else None
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, piece),
        "reduce_scatter": lambda: dist.reduce_scatter_single(piece, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "reduce": lambda: dist.reduce(whole, dst=0),
        "gather": lambda: dist.gather(piece, pieces, dst=0),
        "scatter": lambda: dist.scatter(piece, pieces, src=0),
    }


# %% [markdown]
# **Predict.** For which collectives will the library reach the least possible?


# %%
def bytes_on_the_wire():
    """What this rank sends and receives in each collective, in S."""
    counts = {}
    for op, call in calls(counted_bytes).items():
        call()  # connections are made at the first call
        time.sleep(0.1)  # until everything is acknowledged
        sent, received = tcp_bytes()
        dist.barrier()
        call()
        dist.barrier()
        time.sleep(0.1)
        sent_now, received_now = tcp_bytes()
        counts[op] = (sent_now - sent) / counted_bytes, (received_now - received) / counted_bytes
    return counts


# %%
on_tcp = sys.platform == "linux" and launch(dist.get_backend, world_size=world_size)[0] == "gloo"
wire = launch(bytes_on_the_wire, world_size=world_size) if on_tcp else []
if not on_tcp:
    print("bytes are counted on Linux, on CPU only")
for op in wire and wire[0]:
    least = bytes_sent(op, world_size, 1.0)
    print(f"{op:15} at least {least:.2f} S", end="")
    print("   sent by each rank:", *(f"{rank[op][0]:4.2f}" for rank in wire))
    print(f"{'received:':>51}", *(f"{rank[op][1]:4.2f}" for rank in wire))
    assert max(max(rank[op]) for rank in wire) > least - 0.01

# %% [markdown]
# Compare the bound with what the busiest rank sends or receives. For all-reduce, all-gather and all-to-all gloo moves
# what the formula says, to two decimals. Elsewhere it tells a story:
#
# - **`reduce_scatter`** costs as much as `all_reduce`. It *is* one, of which each rank keeps a piece. The formula is
#   right, this implementation is not optimal; do not conclude from gloo's time that reduce-scatter is slow.
# - **`broadcast`** is the binomial tree of the widget: with 4 ranks the root sends twice and rank 1 once. Few steps,
#   more bytes at the root.
# - **`reduce`** is a reduce-scatter, after which every rank sends its piece to the root: hence the left-overs that
#   you saw.
# - **`gather`** and **`scatter`**: everything passes the root once, in or out.

# %%
for rank in wire:
    for op in ("all_reduce", "all_gather", "all_to_all"):
        assert abs(rank[op][0] - bytes_sent(op, world_size, 1.0)) < 0.01
    assert abs(rank["reduce_scatter"][0] - rank["all_reduce"][0]) < 0.01
print("gloo's reduce_scatter moves the bytes of an all_reduce" if wire else "not counted")

# %% [markdown]
# > **What changes on real GPUs.** NCCL has a true ring reduce-scatter, at (N−1)/N·S, and pipelines its broadcast
# > along a ring, at S for every rank but the last. Where the switch itself can add (NVLS, SHARP), an all-reduce needs
# > less than the formula: about one S each way instead of nearly two. Lesson 03 (nccl) builds these algorithms.

# %% [markdown]
# ## 6. How long does it take?
#
# Two numbers describe a measurement of a collective of size S that took t seconds on N ranks:
#
# - **algorithm bandwidth** algbw = S/t: how fast your data gets done;
# - **bus bandwidth** busbw = algbw × factor: how fast each rank's link was used. The factor is the number of bytes
#   each rank must move, in S: 2(N−1)/N for all-reduce, (N−1)/N for all-gather, reduce-scatter and all-to-all, 1 for
#   broadcast and reduce.
#
# Only busbw can be compared with the speed of a link, and between world sizes and collectives. (Where the switch
# adds, the factor promises too much, and busbw can exceed the link: 482 of 450 GB/s on eight H200, *recorded* in
# stas00/ml-engineering, network/README.md.)
#
# **Predict.** Sizes go from 1 KiB to 16 MiB, each four times the one before. Where will the time grow by four at each
# step, and where not at all?


# %%
def finish():
    if device().type == "cuda":
        torch.cuda.synchronize()  # a call on CUDA tensors returns before the work is done


def timed(call):
    dist.barrier()
    start = time.perf_counter()
    call()
    finish()
    return time.perf_counter() - start


def all_times():
    """Seconds of every repetition, by collective and size."""
    times = {op: [] for op in collectives[:5]}
    for size in sizes:
        call = calls(size)
        for op in times:
            call[op]()  # warm up
            times[op].append([timed(call[op]) for _ in range(15 if size < 2**20 else 4)])
    return times


# %% [markdown]
# A collective has ended when it has ended everywhere: the slowest rank counts, in each repetition. The figures below
# are the best repetition.


# %%
def best(by_rank):
    """The best repetition, where in each repetition the slowest rank counts."""
    return min(max(of_all_ranks) for of_all_ranks in zip(*by_rank, strict=True))


times_of = launch(all_times, world_size=world_size)
seconds = {}
for op in collectives[:5]:
    seconds[op] = [best([rank[op][i] for rank in times_of]) for i in range(len(sizes))]
assert all(t > 0 for times in seconds.values() for t in times)

# %% tags=["nbval-ignore-output"]
print(f"all_reduce on {world_size} ranks, measured")
print(f"{'S':>8} {'time (ms)':>10} {'algbw (GB/s)':>13} {'busbw (GB/s)':>13}")
for size, t in zip(sizes, seconds["all_reduce"], strict=True):
    rates = algbw(size, t) / 1e9, busbw("all_reduce", world_size, size, t) / 1e9
    print(f"{format_bytes(size):>8} {t * 1e3:10.3f} {rates[0]:13.3f} {rates[1]:13.3f}")

# %% [markdown]
# Small sizes jump about, since four ranks share a few cores with everything else; only the shape counts. All-reduce,
# its two halves, all-to-all and broadcast in one figure (the other three would only crowd it):

# %%
alpha, beta = fit_alpha_beta(sizes, seconds["all_reduce"])
bandwidth(sizes, seconds, world_size, fit=(alpha, beta))

# %% [markdown]
# *The figure, left: time against size on logarithmic axes. The lines are nearly flat at first; beyond about α/β (below)
# they rise, by a factor of about three to four at the last step. Right: bus bandwidth, near zero at the small end,
# highest between 1 and 16 MiB.*
#
# The two ends have names. Where the lines are flat, the call is **latency-bound**: a message ten times as large
# hardly takes longer. Far to the right it is **bandwidth-bound**: a message ten times as large takes ten times as
# long. The dashed line is the simplest model of both, **t = α + β·S**, fitted to the all-reduce: α is the latency,
# 1/β the bandwidth at the far end, and α/β the size at which both cost the same.

# %% tags=["nbval-ignore-output"]
print(f"alpha = {alpha * 1e3:.2f} ms, 1/beta = {1 / beta / 1e9:.2f} GB/s")
print(f"alpha/beta = {format_bytes(alpha / beta)}")

# %% [markdown]
# <details><summary>Reduce-scatter is not faster than all-reduce here, so its busbw is low. Why?</summary>
#
# Because busbw counts what the collective *must* move, and gloo moves twice that (section 5): this alone halves it.
# gloo also copies the whole input before and a piece of it after. A low busbw asks for an explanation: a wasteful
# algorithm, a slow path, or a busy machine. That is what busbw is for.
# </details>
#
# > **What changes on real GPUs.** The shape stays, the numbers change: α is some tens of microseconds, and the
# > bandwidth hundreds of GB/s, so that α/β is several MB.
#
# ### A recorded table
#
# Eight A100 GPUs of one node, all-reduce with nccl-tests (*recorded*: stas00/ml-engineering, network/README.md). The
# cell recomputes its busbw column from size and time.

# %%
recorded = {  # S in MiB: (time in µs, busbw in GB/s)
    1 / 32: (43.83, 1.31), 1 / 8: (51.76, 4.43), 1 / 2: (80.40, 11.41), 1: (101.9, 18.00),
    2: (101.4, 36.18), 4: (101.5, 72.33), 8: (133.5, 109.93), 16: (276.6, 106.16),
    32: (424.0, 138.49), 64: (684.6, 171.54), 128: (1327.6, 176.92), 256: (2420.6, 194.07),
    512: (4218.4, 222.72), 1024: (8203.9, 229.04), 4096: (32136, 233.88), 16384: (127997, 234.89),
}  # fmt: skip
a100_sizes = [mib * 2**20 for mib in recorded]
a100_seconds = [t / 1e6 for t, _ in recorded.values()]
for size, t, (_, printed) in zip(a100_sizes, a100_seconds, recorded.values(), strict=True):
    assert abs(busbw("all_reduce", 8, size, t) / 1e9 / printed - 1) < 0.01
bandwidth(a100_sizes, {"all_reduce": a100_seconds}, 8, kind="recorded")

# %% [markdown]
# *The figure: time is flat near 0.1 ms from 1 to 4 MiB, then rises; bus bandwidth climbs to 235 GB/s, with a dip from
# 8 to 16 MiB.*
#
# > **Misconception.** "More bytes, more bandwidth, always." The dip is real: at some sizes the library changes
# > algorithm or protocol. Look at whole curves, not at one point.
#
# **Question 8.** 1 GiB in 8.2 ms: algbw is 131 GB/s, busbw 131 × 14/8 = 229 GB/s. A pair of A100s was measured at 274
# GB/s (same source, of 300 nominal), so the all-reduce used 84 % of the link.

# %%
share = busbw("all_reduce", 8, 2**30, 8203.9e-6) / 274e9
assert round(share, 2) == 0.84
print(f"share of the measured link: {share:.0%}")

# %% [markdown]
# ## 7. Many small calls
#
# At the latency-bound end a call costs α whatever its size. By the model 64 calls of 4 KiB cost 64 α, and one of 256
# KiB little more than one α. (Our α is fitted to best repetitions. The cell below takes the middle one of five, so both
# of its times may be several times as long.) **Coalescing** is making few calls of many: copy the small tensors into
# one flat buffer, reduce it, copy back.


# %%
def one_by_one(tensors):
    for x in tensors:
        dist.all_reduce(x)


def flattened(tensors):
    flat = torch.cat(tensors)
    dist.all_reduce(flat)
    for x, part in zip(tensors, flat.split([len(x) for x in tensors]), strict=True):
        x.copy_(part)


def compare(way):
    tensors = [torch.full((1024,), float(i), device=device()) for i in range(64)]
    with record() as ledger:
        way(tensors)
    n = dist.get_world_size()
    assert all(torch.equal(x, torch.full_like(x, float(i * n))) for i, x in enumerate(tensors))
    typical = sorted(timed(lambda: way(tensors)) for _ in range(5))[2]
    return ledger.count("all_reduce"), ledger.bytes("all_reduce"), typical


# %% [markdown]
# **Predict** (question 7). Equal bytes, equal results, and how many times faster?

# %% tags=["nbval-ignore-output"]
loose, flat = (launch(compare, way, world_size=world_size)[0] for way in (one_by_one, flattened))
assert (loose[0], flat[0]) == (64, 1)
assert loose[1] == flat[1] == 64 * 4096
for name, (count, total, t) in {"one by one": loose, "flattened": flat}.items():
    print(f"{name:12}{count:3} calls, {total:,} bytes, {t * 1e3:6.2f} ms")
print(f"{loose[2] / flat[2]:.0f} times faster")

# %% [markdown]
# The bytes are the same; the calls are not. DDP's *buckets* are this idea: it does not reduce each parameter's
# gradient but flat buckets of 25 MiB.
#
# Some libraries take a whole batch, and the copying need not be yours. NCCL's `ncclGroupStart` and `ncclGroupEnd`
# collect calls in between and launch them together, with no copy; `batch_isend_irecv` is its point-to-point face. For
# collectives PyTorch has a private context manager, `_coalescing_manager`. Under NCCL it makes such a group; gloo
# flattens and copies back itself, as the folded cell shows:

# %% jupyter={"source_hidden": true}
from torch.distributed.distributed_c10d import _coalescing_manager  # noqa: E402


def grouped(tensors):
    with _coalescing_manager(async_ops=True) as batch:
        for x in tensors:
            dist.all_reduce(x)  # noted, not yet started
    batch.wait()


together = launch(compare, grouped, world_size=world_size)[0]
print(f"grouped: {together[0]} call, {together[1]:,} bytes")
assert together[:2] == flat[:2]

# %% [markdown]
# > **What changes on real GPUs.** A kernel launch and a handshake between GPUs cost tens of microseconds
# > rather than milliseconds, and the effect stays: recorded on a node of H200s, 4 GB reached a bus bandwidth of
# > 3,722 Gb/s in one call and 1,146 Gb/s in 1,000 calls of 4 MB (stas00/ml-engineering, network/README.md).

# %% [markdown]
# ## 8. Communicate while computing
#
# With `async_op=True` a collective returns at once, like `isend`, with a request to wait for. In between the rank may
# compute, as long as it leaves the tensor alone:
#
# ```python
# request = dist.all_reduce(x, async_op=True)  # starts, and returns at once
# compute_something_else()
# request.wait()  # only now may `x` be read
# ```
#
# The **overlap** hides the shorter of the two.
#
# On this CPU ranks compute on the same cores that carry the messages, and the two would fight for them. A GPU does
# both at once (NCCL's kernels take a few of its multiprocessors). So here a sleep stands in for a computation
# elsewhere, as long as the all-reduce takes alone. The function takes these three steps and notes the time of each;
# with `overlap=False` it waits before it computes.


# %%
def one_step(overlap):
    x = torch.zeros(sizes[-1] // 4, device=device())
    timed(lambda: dist.all_reduce(x))  # warm up
    begin, arrived = time.monotonic(), None
    request = dist.all_reduce(x, async_op=True)
    if not overlap:
        request.wait()
        finish()
        arrived = time.monotonic()
    start = time.monotonic()
    while (
        time.monotonic() < start + seconds["all_reduce"][-1]
    ):  # computing elsewhere; we look up now and then
        time.sleep(0.001)
        if request.is_completed():
            arrived = arrived or time.monotonic()
    stop = time.monotonic()
    request.wait()  # only now may `x` be read
    arrived = arrived or time.monotonic()
    return {"all_reduce": (0, arrived - begin), "compute": (start - begin, stop - begin)}


# %% [markdown]
# Each way runs three times; the figure shows the best.


# %%
def length(step):
    return max(stop for _, stop in step.values())


apart, overlapped = (
    min((launch(one_step, overlap, world_size=world_size)[0] for _ in range(3)), key=length)
    for overlap in (False, True)
)
assert apart["compute"][0] >= apart["all_reduce"][1]  # starts when the all-reduce has ended
assert overlapped["compute"][0] < overlapped["all_reduce"][1]  # starts while it is running
bars = {f"wait first: {what}": [(what, *span)] for what, span in apart.items()}
bars |= {f"overlap: {what}": [(what, *span)] for what, span in overlapped.items()}
timeline(
    bars, f"measured on rank 0: {format_bytes(sizes[-1])} all-reduce beside a computation elsewhere"
)

# %% [markdown]
# *The figure: in the upper two rows the computation starts when the all-reduce has ended; in the lower two both start
# together, and the step is shorter.*
#
# > **What changes on real GPUs.** Not the CPU waits but the stream, and timing without `torch.cuda.synchronize()`
# > measures the launch only.
#
# <details><summary>What does <code>wait()</code> do, then?</summary>
#
# Under NCCL every collective is asynchronous to the CPU, also without `async_op`. `wait()` makes the current CUDA
# stream wait. With `async_op=False` the stream waits at once, so that later kernels cannot overlap.
# </details>

# %% [markdown]
# ## 9. The one rule, and four ways to break it
#
# Collectives carry no names. The third call of one rank meets the third call of the others. Hence the rule: **all
# ranks of a group make the same calls, in the same order, with the same sizes, types and operation.** (Two calls are
# made for different sizes: `all_to_all_single` with split sizes, and under NCCL the `all_gather` that fills a list.
# Then every rank must still know what the others bring.) Now break it, four times.
#
# ### A condition that differs between ranks
#
# A training loop skips batches with a wild loss. The loss is a *local* number: one rank sees it, the others do not.
#
# **Predict** (question 5). The last rank skips. What happens on it, and what on the others?


# %%
def skip_wild_batches():
    loss = 99.0 if dist.get_rank() == dist.get_world_size() - 1 else 1.0
    gradient = torch.ones(4)
    if loss < 10:
        dist.all_reduce(gradient)
    return gradient


with expect_error():
    launch(skip_wild_batches, world_size=world_size, timeout=patience, backend="gloo")

# %% [markdown]
# The last rank has already returned, so it never notices. The others wait in their first all-reduce, and nothing is
# wrong with them. The error shows on healthy ranks; look for the one that is *not* in the table's majority. Without a
# limit of our own this takes the group's `timeout=`: 10 minutes on NCCL and 30 on gloo unless you set it.
#
# The cure is to make the decision itself collective. One number tells everybody that somebody skips:


# %%
def skip_together():
    loss = 99.0 if dist.get_rank() == dist.get_world_size() - 1 else 1.0
    gradient = torch.ones(4, device=device())
    wild = torch.tensor([float(loss >= 10)], device=device())
    dist.all_reduce(wild, op=dist.ReduceOp.MAX)
    if wild.item() == 0:  # the same on all ranks
        dist.all_reduce(gradient)
        return "stepped"
    return "skipped"


print(launch(skip_together, world_size=world_size))

# %% [markdown]
# Any `if` around a collective deserves the question: *can two ranks disagree here?* Losses, batch counts, file
# checks, random numbers, clocks and exceptions can. Epoch numbers and configuration should not, but do when one rank
# starts from another file or checkpoint.
#
# ### Another order
#
# Rank 0 reduces `b` before `a`. Both have the same size. **Predict:** error, hang, or wrong numbers?


# %%
def swapped():
    a, b = torch.ones(2, device=device()), torch.full((2,), 100.0, device=device())
    for x in (b, a) if dist.get_rank() == 0 else (a, b):
        dist.all_reduce(x)
    return f"a = {a.tolist()}, b = {b.tolist()}"


print(*launch(swapped, world_size=world_size), sep="\n")

# %% [markdown]
# Nobody complains. Rank 0's 100 was added to the others' ones. With different sizes it might have been noticed, as
# the next mistake is.
#
# ### Another size
#
# The last rank was started with another configuration. Rank 0 broadcasts five numbers; the last rank has room for
# four.


# %%
def uneven():
    weights = torch.ones(4 if dist.get_rank() == dist.get_world_size() - 1 else 5)
    dist.broadcast(weights, src=0)
    return weights


with expect_error():
    launch(uneven, world_size=world_size, timeout=patience, backend="gloo")

# %% [markdown]
# gloo notices that more bytes arrive than fit, and ends the *process*: no exception, nothing to catch. This is one
# reason why ranks never live inside your notebook's kernel. When less arrives than expected it may not notice: in an
# all-reduce with five numbers on rank 0 and four elsewhere, rank 0 waits for ever and the others return, some with
# wrong numbers. NCCL does not compare sizes at all; its manual calls what follows undefined: a hang, a crash, or
# corrupted data.
#
# ### Another operation
#
# **Predict** (question 6). Rank 0 passes MAX, the others SUM, over the numbers of section 2.


# %%
def max_on_rank_0():
    x = numbers()
    before = x.clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX if dist.get_rank() == 0 else dist.ReduceOp.SUM)
    return before, x


before, after = zip(*launch(max_on_rank_0, world_size=world_size, backend="gloo"), strict=True)
assert not torch.equal(after[0], sum(before))
assert all(torch.equal(x, after[0]) for x in after)  # they even agree
print("right:", sum(before).tolist(), "  got, on every rank:", after[0].tolist())

# %% [markdown]
# The worst of the four: PyTorch raises no error, nothing hangs, and all ranks agree, so that comparing ranks does not
# help. Read the digits: wherever rank 0 did the adding, one summand was lost. The numbers chosen at the start of
# section 2 show it; gradients would not. The warning comes from `launch`, which compares what the ranks called after
# they have all returned. Under `torchrun` nobody does that.
#
# `TORCH_DISTRIBUTED_DEBUG=DETAIL`, set before torch is imported, makes PyTorch compare the kind of collective, size
# and type before each call, at a price. The swap above and this one pass. Lesson 14 (debugging hangs) is about
# finding such faults in programs that you did not write.
#
# | broken | gloo, as seen here | found by `DETAIL` |
# |---|---|---|
# | a rank skips a call | the others wait | after the group's timeout; rank 0's message names the missing rank |
# | another order, all else equal | wrong numbers | no |
# | another size | process ends, or one rank waits and others return wrong numbers | yes |
# | another `ReduceOp` | wrong numbers, same on all ranks | no |
#
# > **What changes on real GPUs.** The CPU does not wait in a collective, so a hang shows in a *later* line, the first
# > that needs a result: `loss.item()`, a print. After the timeout the process group's watchdog ends the program.

# %% [markdown]
# ## 10. Objects
#
# Lists, dictionaries and strings travel too: `all_gather_object`, `gather_object`, `broadcast_object_list`,
# `scatter_object_list`. **Predict:** how many collectives does one `all_gather_object` make?


# %%
def share():
    mine = {"rank": dist.get_rank(), "note": "x" * 10 * dist.get_rank()}
    everyone = [None] * dist.get_world_size()
    with record() as ledger:
        dist.all_gather_object(everyone, mine)
    return everyone, ledger


everyone, ledger = launch(share, world_size=world_size)[0]
assert [someone["rank"] for someone in everyone] == list(range(world_size))
print(ledger.table())

# %% [markdown]
# Two: the first all-gather tells everybody the lengths, the second carries the pickled objects, each padded to the
# longest. So object collectives are slow, one long object makes all of them long, and unpickling runs whatever code
# the sender put in: use them among ranks you trust, for settings and results, never in the training loop.
#
# > **What changes on real GPUs.** Under NCCL the pickled bytes travel through GPU memory, and set-up of the current
# > device (`torch.cuda.set_device`) must come first, or all ranks use GPU 0. `launch` does it.

# %% [markdown]
# ## 11. Which backend can do what?
#
# The cell tries everything of this lesson on gloo, on CPU tensors, as the documentation's table does.


# %%
def try_everything():
    rank, n = dist.get_rank(), dist.get_world_size()
    x, peer = torch.ones(2), rank ^ 1
    trials = calls(64) | {"barrier": dist.barrier}
    if peer < n:
        trials["send"] = trials["recv"] = lambda: (
            dist.send(x, peer) if rank < peer else dist.recv(x, peer)
        )
    trials["all_reduce, int16"] = lambda: dist.all_reduce(x.to(torch.int16))
    works = {}
    for name, trial in trials.items():
        try:
            trial()
            works[name] = "yes"
        except (RuntimeError, ValueError, TypeError):
            works[name] = "no"
    return works


works = launch(try_everything, world_size=world_size, backend="gloo")[0]
for answer in ("yes", "no"):
    print(f"{answer}:", "; ".join(name for name in works if works[name] == answer))
assert all(works[op] == "yes" for op in (*collectives, "barrier", "send", "recv"))

# %% [markdown]
# Everything but one: gloo does not add 16-bit integers. The rule of thumb: NCCL for GPUs, gloo for CPUs. NCCL takes no
# CPU tensors; gloo takes both, but copies GPU tensors through the CPU. A group made with
# `backend="cpu:gloo,cuda:nccl"` picks by the tensor's device.
#
# <details><summary>A table of the backends, MPI and UCC too (recorded)</summary>
#
# | | gloo, CPU | gloo, GPU | NCCL, GPU | MPI, CPU | UCC |
# |---|---|---|---|---|---|
# | send, recv | yes | no | yes | yes | yes |
# | broadcast, all_reduce | yes | yes | yes | yes | yes |
# | reduce, all_gather, gather, scatter | yes | yes | yes | yes | yes |
# | reduce_scatter | yes | yes | yes | no | yes |
# | all_to_all | yes | yes | yes | yes | yes |
# | barrier | yes | no | yes | yes | yes |
# | comes with PyTorch | yes | yes | CUDA builds | build from source | build from source |
#
# <small>Source: PyTorch documentation ([torch.distributed,
# Backends](https://docs.pytorch.org/docs/stable/distributed.html#backends)). MPI on GPU tensors depends on the MPI
# library. The fourth backend of that table, XCCL for Intel's GPUs, is left out here. UCC is not in it: PyTorch calls it
# experimental, and its source
# ([ProcessGroupUCC.hpp](https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupUCC.hpp))
# has all of these operations.</small>
# </details>

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
peak = max(
    busbw("all_reduce", world_size, s, t) for s, t in zip(sizes, seconds["all_reduce"], strict=True)
)
moved = [bytes_sent(op, world_size, 1.0) for op in ("all_reduce", "all_gather")]
print(f"each of {world_size} ranks must move {moved[0]:.2f} S in an all-reduce,")
print(f"{moved[1]:.2f} S in an all-gather")
print(f"all-reduce: alpha {alpha * 1e3:.2f} ms; best bus bandwidth {peak / 1e9:.2f} GB/s")
print(f"64 small all-reduces: {loose[2] * 1e3:.1f} ms one by one, {flat[2] * 1e3:.1f} ms as one")
print(f"all-reduce and computation: {length(apart) * 1e3:.0f} ms one after the other,")
print(f"{length(overlapped) * 1e3:.0f} ms overlapped")

# %% [markdown]
# - Point-to-point calls wait for each other; order or `batch_isend_irecv` prevents deadlock.
# - The eight collectives are copies, column sums and a transpose. All-reduce = reduce-scatter + all-gather.
# - Each rank must move 2(N−1)/N·S for an all-reduce and (N−1)/N·S for its halves: nearly independent of N. The ring
#   reaches it; a hub, or whole tensors in a ring, do not; gloo's reduce-scatter does not either.
# - Small messages cost α, large ones β·S. Few large calls beat many small ones, and waiting can overlap with
#   computing.
# - All ranks make the same calls in the same order. If not: a hang, a crash, or numbers that are wrong and agree.
#
# <details><summary>Answers to the eight predictions</summary>
#
# 1. Nothing defined: left-overs of the algorithm (section 2).
# 2. 2·3/4 = 1.5 GB; with a thousand ranks 1.998 GB (section 5).
# 3. `all_reduce`, exactly twice as much: it contains an all-gather (sections 3 and 5).
# 4. With blocking sends: deadlock; every rank waits in `send` (section 1).
# 5. The others wait; nobody raises anything until a timeout, and the skipping rank never notices (section 9).
# 6. Wrong numbers, the same ones on all ranks, and no message (section 9).
# 7. The single one, by tens of times: 64 latencies against one. This run's factor is printed in section 7.
# 8. 229 of 274 GB/s: 84 % (section 6).
# </details>
#
# **Exercises:** [exercises/02_collectives](../exercises/02_collectives_exercises.ipynb). **Next:** [03
# nccl](03_nccl.ipynb), where you build trees and two-level algorithms too and find out which one NCCL picks.
#
# **Worth reading**
# - E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, *Collective communication: theory, practice, and
#   experience*, 2007, [doi.org/10.1002/cpe.1206](https://doi.org/10.1002/cpe.1206): the identities and lower bounds
#   of sections 3 and 5, for all but all-to-all.
# - P. Patarasuk, X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009,
#   [doi.org/10.1016/j.jpdc.2008.09.002](https://doi.org/10.1016/j.jpdc.2008.09.002): why 2(N−1)/N·S is the least, and
#   the ring that reaches it.
# - NVIDIA, *Performance reported by NCCL tests*,
#   [nccl-tests/doc/PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): the factors
#   of section 6, derived.
