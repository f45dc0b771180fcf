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
# Eight GPUs train a model of 7 billion parameters, each on its own data. After every backward pass they average their
# gradients. In the number format bf16, 2 bytes each, these are 14 GB on every GPU. If every GPU sent its gradients to
# every other one, 98 GB would leave each of them at every step. A good all-reduce needs far less, and you can work out
# how little before you rent the GPUs.
#
# **You will be able to**
# - *draw* what every rank holds before and after each collective;
# - *compute* the bytes that each rank must move, *say why*, and *count* them;
# - *read* a benchmark of collectives;
# - *recognise* a broken collective by what it does.
#
# **Before this:** [00 start_here](00_start_here.ipynb). **Time:** about 45 minutes to read the core, 75 with the
# deeper sections, under a minute to run.

# %% [markdown]
# Imports and parameters:

# %% tags=["parameters"]
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_utils import HangError, attempt, device, expect_error, launch, record
from course_utils.costs import COLLECTIVES, algbw, bytes_sent, fit_alpha_beta, format_bytes
from course_utils.draw.lanes import before_after, timeline
from course_utils.predictions import predict, predictions
from course_utils.recorded import A100_ALL_REDUCE
from lessons.collectives import collective_measurements as measured
from lessons.collectives.collective_algorithms import schedule
from lessons.collectives.collective_measurements import held
from lessons.collectives.figures import bandwidth
from lessons.collectives.stepper import collective_stepper

world_size = 4  # ranks, 2 or more
patience = 2.0  # seconds that `launch` waits for the ranks in some cells
counted_bytes = 2**22  # message size S where bytes are counted: 4 MiB
sizes = [2**k for k in range(10, 25, 2)]  # message sizes S where time is measured: 1 KiB to 16 MiB

# %% [markdown]
# ## 1. Point to point: `send` and `recv`
#
# Every collective is made of messages between two ranks, so we begin with one message. Rank 0 sends three numbers,
# and rank 1 receives them into memory that it has prepared. Each call names the rank on the other side.


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
# Many algorithms need a ring, in which each rank sends to its right neighbour and receives from its left one:


# %%
def neighbours():
    rank, n = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % n, (rank - 1) % n


# %% [markdown]
# The obvious program sends first and receives second. (`backend="gloo"` keeps it on CPU tensors, even where there are
# GPUs.)
#
# **Predict.** Every rank runs the same two lines. Which rank is the first to come back from `send`?

# %%
first = predict("first to come back from send", ["rank 0", "none", "the last rank", "all at once"])


# %%
def send_then_recv():
    right, left = neighbours()
    mine = torch.tensor([dist.get_rank()])
    theirs = torch.empty_like(mine)
    dist.send(mine, dst=right)
    dist.recv(theirs, src=left)
    return theirs.item()


with attempt() as outcome:
    launch(send_then_recv, world_size=world_size, timeout=patience, backend="gloo")

# %% jupyter={"source_hidden": true}
assert isinstance(outcome.error, HangError)
first.compare("none")

# %% [markdown]
# **Compare.** None of them. With gloo, `send` returns when the other side has taken the message, so every rank waits in
# `send` for a neighbour that waits in `send` too. No rank is wrong by itself, but together they wait in a circle: a
# **deadlock**.
#
# A safe ring starts both transfers before it waits for either. `batch_isend_irecv` takes a list of sends and receives,
# starts all of them, and returns a **request** for each. `wait()` on a request returns when its transfer is done.


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


from_the_left = [(rank - 1) % world_size for rank in range(world_size)]
assert launch(shift_my_rank, world_size=world_size) == from_the_left
print("received, by rank:", from_the_left)

# %% [markdown]
# > **What changes on real GPUs.** NCCL connects two ranks when they first exchange a message, and Python waits for that
# > on both sides: the unsafe ring hangs in the same line. Later messages go through an NCCL buffer. Small ones may pass
# > before anybody receives them, while large ones wait on the GPU. So never rely on `send` returning before somebody
# > receives. Even `isend` and `irecv` can hang if they are called apart (section 7). In one list for
# > `batch_isend_irecv` they do not, if the ranks' lists match and all ranks of the group join its first call.
# > <small>(NCCL 2.30.7, `group.cc`, `transport.cc`; issues [783](https://github.com/NVIDIA/nccl/issues/783) and
# > [1025](https://github.com/NVIDIA/nccl/issues/1025); PyTorch
# > [129341](https://github.com/pytorch/pytorch/issues/129341).)</small>

# %% [markdown]
# ## 2. Eight collectives in pictures
#
# A **collective** is a call that all ranks of a group make together. Each rank starts with numbers that show their
# origin: rank 0 has 1, 2, 3, …; rank 1 has 10, 20, 30, …, and so on. So 1,011 can only be a sum over ranks 0, 1 and 3.
# Colours say the same: each rank has one, and a sum has stripes. `held(collective, world_size)` runs a function on
# every rank with these numbers, and returns what the ranks held before and after it. Each rank starts with a row of
# numbers, unless `start=` says otherwise.
#
# ### One rank gives: broadcast and scatter
#
# **Broadcast** copies the tensor of one rank, the **root**, into the memory of all others. Training begins with it,
# so that all ranks have the same weights.


# %%
def broadcast(x):
    dist.broadcast(x, src=0)
    return x


before, after = held(broadcast, world_size)
assert all(torch.equal(x, before[0]) for x in after)
before_after(before, after, "broadcast")

# %% [markdown]
# *The figure: every row on the right is rank 0's row.*
#
# **Scatter** deals out instead of copying: piece r of the root's tensor goes to rank r.


# %%
def scatter(x):
    piece = torch.empty(1, dtype=torch.int64, device=device())
    dist.scatter(piece, list(x.split(1)) if dist.get_rank() == 0 else None, src=0)
    return piece


before, after = held(scatter, world_size, start="root")
assert torch.equal(torch.cat(after), before[0])
before_after(before, after, "scatter")

# %% [markdown]
# *The figure: each rank ends with one of rank 0's pieces; dashed cells are empty.*
#
# ### One rank takes: gather and reduce
#
# **Gather** is scatter backwards: the root collects one piece from each rank.


# %%
def gather(piece):
    root, n = dist.get_rank() == 0, dist.get_world_size()
    pieces = [torch.empty_like(piece) for _ in range(n)] if root else None
    dist.gather(piece, pieces, dst=0)
    return torch.cat(pieces) if root else None


before, after = held(gather, world_size, start="piece")
assert torch.equal(after[0], torch.cat(before))
before_after(before, after, "gather")

# %% [markdown]
# *The figure: rank 0 holds one piece of every colour; the others get nothing.*
#
# **Reduce** combines the tensors element by element, here by adding, and leaves the result on the root.
#
# **Predict.** All ranks pass a tensor, and the root's is overwritten with the sum. What do the other ranks hold
# afterwards?

# %%
others = predict("reduce: others hold", ["the sum", "their old numbers", "zeros", "something else"])


# %%
def reduce(x):
    dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)
    return x


before, after = held(reduce, world_size)
before_after(before, after, "reduce (SUM)")

# %% [markdown]
# **Compare.** Nothing that you may rely on. gloo uses their memory as scratch space, and the stripes show which partial
# sums passed through. NCCL writes on the root only, but neither promises anything.
#
# *The figure: rank 0 holds sums of all colours; the other rows hold partial sums or their old numbers.*
#
# Copy the input first if you still need it.

# %% jupyter={"source_hidden": true}
assert torch.equal(after[0], sum(before))
unchanged = all(torch.equal(after[rank], before[rank]) for rank in range(1, world_size))
others.compare("their old numbers" if unchanged else "something else")

# %% [markdown]
# ### All take: all-reduce and all-gather
#
# **All-reduce** is a reduce with the result on every rank. Data-parallel training uses it to add gradients.


# %%
def all_reduce(x):
    dist.all_reduce(x, op=dist.ReduceOp.SUM)
    return x


before, after = held(all_reduce, world_size)
assert all(torch.equal(x, sum(before)) for x in after)
before_after(before, after, "all_reduce (SUM)")

# %% [markdown]
# *The figure: on the right all rows are equal, and each cell has a stripe from every rank.*
#
# > **Misconception.** "`all_reduce` averages." It *sums* unless told otherwise (section 12). To average gradients
# > somebody has to divide by the number of ranks.
#
# **All-gather** is a gather with the result on every rank. FSDP (lesson 07) *shards* weights: each rank keeps a part.
# Before a layer computes, an all-gather brings its parts together. (`all_gather_single` was `all_gather_into_tensor`
# before PyTorch 2.13; `all_gather` fills a list.)


# %%
def all_gather(piece):
    whole = piece.new_empty(dist.get_world_size())
    dist.all_gather_single(whole, piece)
    return whole


before, after = held(all_gather, world_size, start="piece")
assert all(torch.equal(x, torch.cat(before)) for x in after)
before_after(before, after, "all_gather")

# %% [markdown]
# *The figure: every row on the right has one cell of each colour.*
#
# ### Everybody gives and takes a part: reduce-scatter and all-to-all
#
# **Reduce-scatter** adds up and deals out, so rank r gets only piece r of the sum. FSDP and ZeRO (lesson 06) reduce
# gradients this way, because each rank updates only its own part of the weights. (`reduce_scatter_single` was
# `reduce_scatter_tensor` before PyTorch 2.13.)


# %%
def reduce_scatter(x):
    piece = x.new_empty(1)
    dist.reduce_scatter_single(piece, x)
    return piece


before, after = held(reduce_scatter, world_size)
assert torch.equal(torch.cat(after), sum(before))
before_after(before, after, "reduce_scatter (SUM)")

# %% [markdown]
# *The figure: one cell per rank on the right, each with stripes of all colours.*
#
# **All-to-all** adds nothing: every rank sends piece r of its tensor to rank r. In a mixture of experts (lesson 11),
# where small networks on different ranks share the tokens, each token goes to its expert this way.


# %%
def all_to_all(x):
    arriving = torch.empty_like(x)
    dist.all_to_all_single(arriving, x)
    return arriving


before, after = held(all_to_all, world_size)
assert torch.equal(torch.stack(after), torch.stack(before).T)
before_after(before, after, "all_to_all")

# %% [markdown]
# *The figure: each row of one colour on the left has become a column on the right.*
#
# <details><summary>All eight as matrix algebra: which one is the transpose?</summary>
#
# Let X be the square of the numbers before, one row a rank.
#
# | collective | a rank brings | rank r has afterwards | seen on the whole square |
# |---|---|---|---|
# | broadcast | root: a row | X[0] | every row is X[0] |
# | scatter | root: a row | X[0, r] | row 0, dealt out |
# | gather | a piece b | root: all pieces | a column, on the root |
# | reduce | a row | root: X.sum(0) | column sums, on the root |
# | all_gather | a piece b | all pieces | a column, on every rank |
# | all_reduce | a row | X.sum(0) | column sums, on every rank |
# | reduce_scatter | a row | X.sum(0)[r] | column sums, dealt out |
# | all_to_all | a row | X[:, r] | transpose |
#
# </details>

# %% [markdown]
# ## 3. How many bytes must each rank move?
#
# N is the number of ranks, and S is the size in bytes of the *full* tensor: what you pass to all-reduce, broadcast
# and reduce, the output of all-gather, the input of reduce-scatter and all-to-all, all pieces of gather and scatter.
#
# The widget below sends the messages of an all-reduce in a ring, one step at a time. Answer first; then play the first
# half of the steps, in which numbers are added, and then the second half, in which they are copied.
#
# **Predict.** Four ranks all-reduce 1 GB. How many GB must each rank send at least? And if they are a thousand?

# %%
few = predict("sent by each of 4 ranks", unit="GB")
many = predict("sent by each of 1,000 ranks", unit="GB")

# %%
stepper = collective_stepper(min(world_size, 8))
stepper

# %% [markdown]
# **Compare.** Each of four ranks sends 1.5 GB, and each of a thousand 1.998 GB, hardly more. The path of one piece
# shows why.
#
# *The widget: on the left what every rank holds before the chosen step, with an arrow for each message; on the right
# what it holds after it.*
#
# Follow piece 0 through the messages of the widget:

# %%
hops = [m for step in schedule("all_reduce", world_size) for m in step if m.pieces == (0,)]
for step, m in enumerate(hops, start=1):
    print(f"step {step}: from rank {m.src} to {m.dst},", "added" if m.add else "copied")

# %% jupyter={"source_hidden": true}
assert [m.add for m in hops] == [True] * (world_size - 1) + [False] * (world_size - 1)
few.compare(bytes_sent("all_reduce", 4, 1.0))
many.compare(bytes_sent("all_reduce", 1000, 1.0))

# %% [markdown]
# The tensor is cut into N pieces of S/N bytes. To be **summed**, a piece has to visit N−1 other ranks, which all have
# something to add. To be **copied**, the finished sum has to go to N−1 ranks again. That makes 2(N−1) messages per
# piece. There are as many pieces as ranks, so each rank can send one piece in every step: 2(N−1) steps of S/N bytes,
# together 2(N−1)/N · S.
#
# After the first half each rank holds one piece of the sum, so this half is a reduce-scatter, and the second half is
# an all-gather. **An all-reduce is a reduce-scatter followed by an all-gather**, also with the library's calls:


# %%
def all_reduce_in_two(x):
    piece, total = x.new_empty(len(x) // dist.get_world_size()), torch.empty_like(x)
    dist.reduce_scatter_single(piece, x)
    dist.all_gather_single(total, piece)
    return total


before, after = held(all_reduce_in_two, world_size)
assert all(torch.equal(x, sum(before)) for x in after)
print("reduce_scatter, then all_gather:", after[0].tolist(), "on every rank")

# %% [markdown]
# ZeRO and FSDP pull these halves apart, because between them each rank can do 1/N of the optimizer's work. Each half
# moves (N−1)/N · S, and so does all-to-all, in which a rank keeps one of its N pieces and sends the rest. In a
# broadcast, S bytes leave the root; in a reduce, S bytes arrive there. In scatter and gather it is (N−1)/N · S, because
# the root keeps its own piece.
#
# <details><summary>Why does no library promise bit-equal results?</summary>
#
# Floating-point addition depends on the order, and rings, trees and switches add in different orders. All ranks of
# *one* ring or tree agree, because each piece is added up once and then copied; two algorithms, or two world sizes,
# may differ in the last bits. The numbers above are integers, so here the results are equal.
# </details>
#
# For S = 1 GB:

# %%
print(f"{'GB through the busiest rank, at least; N =':42}      4      8   1000")
for op in COLLECTIVES:
    print(f"{op:42}" + "".join(f"{bytes_sent(op, n, 1.0):7.3f}" for n in (4, 8, 1000)))
assert bytes_sent("all_reduce", 8, 14.0) == 24.5  # the model of the opening: 24.5 GB, not 98

# %% [markdown]
# An all-reduce moves at most twice the tensor, however many ranks there are. That is why *data parallelism*, where each
# GPU has its own data, scales at all. The opening's eight GPUs send 24.5 GB each, not 98.
#
# No algorithm does better if only the ranks add. Before any rank knows the sum of one number, the N−1 others must
# have sent theirs, and then each must receive the sum. Count all numbers together: at least 2(N−1) · S bytes must be
# sent. N ranks share this, so one of them sends 2(N−1)/N · S or more (Patarasuk and Yuan, below, prove it).
#
# <details><summary>FSDP all-gathers parameters twice a step and reduce-scatters gradients. Its bytes?</summary>
#
# DDP (lesson 04) all-reduces S bytes of gradients: 2(N−1)/N·S. FSDP gathers S bytes of parameters before the forward
# and again before the backward pass, and then reduce-scatters the gradients: 3(N−1)/N·S, which is 1.5 times as much.
# That is the price of holding 1/N of everything.
# </details>

# %% [markdown]
# ## 4. Ring all-reduce from scratch
#
# Now we write what the widget does, and before it a common mistake, which passes the *whole* tensor round the ring and
# adds whatever arrives. Its sum is right, too. The real ring passes pieces. With four ranks, rank 0 sends piece 3 in
# step 1, as the widget shows, then piece 2, then piece 1: after the first, always the one that it has just received
# and added to. When the sums are complete, a second loop copies them.


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
    for step in range(1, n):  # reduce-scatter: partial sums travel
        leaving, arriving = (rank - step) % n, (rank - step - 1) % n
        pieces[arriving] += shift(pieces[leaving])
    for step in range(n - 1):  # all-gather: finished sums travel
        leaving, arriving = (rank - step) % n, (rank - step - 1) % n
        pieces[arriving] = shift(pieces[leaving])
    return pieces.view(-1)


# %% [markdown]
# We count with the **ledger**: `record()` notes every operation that a rank issues inside the `with` block, with its
# bytes.


# %%
def count(algorithm):
    x = torch.randn(counted_bytes // 4 // world_size * world_size, device=device())
    with record() as ledger:
        result = algorithm(x)
    dist.all_reduce(x)
    assert torch.allclose(result, x, atol=1e-4)
    return {"messages": ledger.messages, "S": ledger.sent / x.nbytes}


# %% [markdown]
# **Predict.** Each of four ranks sends 1.5 S in the real ring. How many S does it send with whole tensors?

# %%
with_whole_tensors = predict("sent by each of 4 ranks with whole tensors", unit="S")

# %%
whole = launch(count, whole_tensors_round_a_ring, world_size=world_size)[0]
ring = launch(count, ring_all_reduce, world_size=world_size)[0]
print(f"whole tensors: {whole['messages']} messages from each rank, {whole['S']:.2f} S")
print(f"pieces:        {ring['messages']} messages from each rank, {ring['S']:.2f} S")

# %% jupyter={"source_hidden": true}
assert whole["messages"] == whole["S"] == world_size - 1
assert ring["messages"] == 2 * (world_size - 1)
assert abs(ring["S"] - bytes_sent("all_reduce", world_size, 1.0)) < 1e-9
with_whole_tensors.compare(3)

# %% [markdown]
# **Compare.** Three messages of S each, against six of S/4: twice as much.
#
# > **Misconception.** "Passing tensors round a ring is ring all-reduce." Ring all-reduce passes *pieces* of S/N. Whole
# > tensors, (N−1) · S, cost 32 times as much with 64 ranks.
#
# > **What changes on real GPUs.** NCCL has this ring, and trees ([lesson 03](03_nccl.ipynb)). Where the switch itself
# > can add (NVLS, SHARP), an all-reduce needs about one S each way, less than the formula.

# %% [markdown]
# ## 5. How long does it take?
#
# If a collective of size S takes t seconds, two rates describe it:
#
# - **algorithm bandwidth**, algbw = S/t, says how fast your tensor is processed;
# - **bus bandwidth**, busbw = algbw × factor, says how fast each rank's link was used. The factor is what each rank
#   must move, divided by S (section 3): 2(N−1)/N for all-reduce.
#
# Only busbw can be compared with a link's speed, and between runs with different N. We time five collectives; the
# slowest rank counts, in the best of several repetitions.

# %%
timed = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
seconds = measured.time_collectives(sizes, timed, world_size)
alpha, beta = fit_alpha_beta(sizes, seconds["all_reduce"])
bandwidth(sizes, seconds, world_size, fit=(alpha, beta))

# %% [markdown]
# *The figure, left: time against size on logarithmic axes, nearly flat at first and rising at the end. Right: bus
# bandwidth, near zero for small messages and high only for large ones.*
#
# The lines are uneven, since ranks share cores; only the shape counts. (reduce_scatter is slow because gloo runs a
# whole all-reduce for it: section 9.) Where they are flat, a call is **latency-bound**: ten times the bytes hardly take
# longer. Far to the right it is **bandwidth-bound**: ten times the bytes take ten times as long. The simplest model of
# both ends is **t = α + β·S**, the dashed line, fitted to all_reduce, with latency α and bandwidth 1/β.
#
# Now real GPUs, eight A100 of one node (*recorded*, Bekman, ml-engineering, network/README.md). Between two such GPUs
# 274 GB/s were measured, of 300 nominal.

# %%
gpus = A100_ALL_REDUCE
at = gpus.sizes.index(2**30)
print(f"1 GiB in {gpus.seconds[at] * 1e3:.1f} ms (recorded)", end=", ")
print(f"algbw {algbw(2**30, gpus.seconds[at]) / 1e9:.0f}, busbw {gpus.busbw[at] / 1e9:.0f} GB/s")
print(f"share of the measured link: {gpus.busbw[at] / 274e9:.0%}")
assert round(gpus.busbw[at] / 274e9, 2) == 0.84
bandwidth(gpus.sizes, {"all_reduce": gpus.seconds}, gpus.ranks, kind="recorded")

# %% [markdown]
# *The figure: time is below 0.1 ms at first, flat from 1 to 4 MiB, then rises; bus bandwidth climbs to 235 GB/s, with
# a dip from 8 to 16 MiB.*
#
# So this all-reduce uses 84 % of the link, which algbw would not have told you. The dip is probably real, because at
# some sizes the library changes its algorithm or protocol, so look at whole curves. (Where the switch adds, busbw can
# even exceed the link: 482 of 450 GB/s on eight H200, *recorded*, same source.)
#
# ### Many small calls
#
# At the latency-bound end a call costs α, whatever its size. **Coalescing** turns many calls into few: copy the small
# tensors into one flat buffer, reduce it, and copy back.


# %%
def one_by_one(tensors):
    for x in tensors:
        dist.all_reduce(x)


def flattened(tensors):
    flat = torch.cat(tensors)
    dist.all_reduce(flat)
    for x, part in zip(tensors, flat.split([len(x) for x in tensors]), strict=True):
        x.copy_(part)


# %% [markdown]
# **Predict.** There are 64 tensors of 4 KiB. How many times as fast is one call for all of them?

# %%
gain = predict("speed-up of one call", unit="times")


# %% tags=["nbval-ignore-output"]
def both_ways():
    tensors = [torch.zeros(1024, device=device()) for _ in range(64)]
    return {
        "64 calls": measured.best_seconds(lambda: one_by_one(tensors)),
        "one call": measured.best_seconds(lambda: flattened(tensors), in_a_row=64),
    }


best = launch(both_ways, world_size=world_size)[0]
for way, took in best.items():
    print(f"{way}: {took * 1e3:.1f} ms (measured)")

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
gain.compare(best["64 calls"] / best["one call"])


def same_sums(way):
    tensors = [torch.full((1024,), float(i), device=device()) for i in range(64)]
    with record() as ledger:
        way(tensors)
    assert all((x == i * world_size).all() for i, x in enumerate(tensors))
    return ledger.count("all_reduce"), ledger.bytes("all_reduce")


assert launch(same_sums, one_by_one, world_size=world_size)[0] == (64, 64 * 4096)
assert launch(same_sums, flattened, world_size=world_size)[0] == (1, 64 * 4096)

# %% [markdown]
# **Compare.** Tens of times. One call pays α once instead of 64 times, but it carries the bytes of all 64 and copies
# them twice. So by the model it gains less than 64 times. (Both take longer here than by the model, as calls follow
# one another; the figure has the best single call.)
#
# DDP (lesson 04) sends gradients like this, in *buckets* of 25 MiB for many parameters. (NCCL's `ncclGroupStart` and
# `ncclGroupEnd` launch all calls between them together, without copying; `batch_isend_irecv` uses them.)
#
# > **What changes on real GPUs.** Latencies are tens of microseconds, and the effect stays: on H200s 4 GB reached 465
# > GB/s (3,722 Gb/s) in one call and 143 GB/s (1,146) in 1,000 calls of 4 MB (*recorded*, same source).

# %% [markdown]
# ## 6. The one rule, and how it is broken
#
# Collectives carry no names: the third call of one rank meets the third call of the others. Hence the rule. **All
# ranks of a group make the same calls, in the same order, with the same sizes, types and operation.** Here it is
# broken in two ways; section 11 has two more.
#
# ### A condition that differs between ranks
#
# A training loop skips batches with a wild loss (10 or more). But the loss is a *local* number, which only one rank
# sees. Here the last rank skips:


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
# The last rank has already returned, so it never notices. In a loop, its *next* call would meet the call that it
# skipped: wrong numbers. As in lesson 00, the error shows on healthy ranks. Without our limit they wait for the group's
# `timeout=`: 10 minutes on NCCL and 30 on gloo unless you set it.
#
# The cure is to decide together. One number tells everybody that somebody wants to skip:


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
# Ask about every `if` around a collective: *can two ranks disagree here?* They can disagree about losses, numbers of
# batches, files, random numbers, clocks and exceptions.
#
# ### Another operation
#
# **Predict.** Rank 0 passes MAX, the others SUM. What comes of it?

# %%
fate = predict("MAX on rank 0", ["the right sum", "wrong numbers", "an error", "a hang"])


# %%
def max_on_rank_0(x):
    dist.all_reduce(x, op=dist.ReduceOp.MAX if dist.get_rank() == 0 else dist.ReduceOp.SUM)
    return x


with attempt():
    before, after = held(max_on_rank_0, world_size, backend="gloo")
    print("the sum is", sum(before).tolist())
    print("the ranks hold", *[x.tolist() for x in after])

# %% jupyter={"source_hidden": true}
assert not torch.equal(after[0], sum(before))
assert all(torch.equal(x, after[0]) for x in after)
fate.compare("wrong numbers")

# %% [markdown]
# **Compare.** Wrong numbers, and this is worse than a hang: PyTorch raises no error, and all ranks agree, so comparing
# them does not help. Look at 1110: the 1 of rank 0 is missing, because where rank 0 had to add, it took the larger
# number. In 3333 and 4444 other ranks did the adding, so they are right. In real gradients nobody would notice.
#
# The warning comes from `launch`, which compares the ranks' calls after all have returned. Under `torchrun` nobody
# does that.
#
# > **What changes on real GPUs.** The CPU does not wait in a collective, so a hang shows in a *later* line, the first
# > that needs a result: `loss.item()`, a print. After the timeout PyTorch's watchdog thread ends the program.

# %% [markdown] tags=["deeper"]
# ## 7. Turns, requests and a barrier · deeper
#
# The deadlock of section 1 has two more cures. The first breaks the circle by order: even ranks send first, odd ranks
# receive first.


# %% tags=["deeper"]
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


assert launch(take_turns, world_size=world_size) == from_the_left
print("even ranks send first: no deadlock")

# %% [markdown] tags=["deeper"]
# <details><summary>Does it still work with three ranks, where ranks 0 and 2 are neighbours, both even?</summary>
#
# Yes, in one more step. Rank 2 waits in its send to rank 0, which is still sending to rank 1. But rank 1 is odd and
# receives, so rank 0 gets on to its own receive and takes rank 2's message. One rank that receives first breaks the
# circle.
# </details>
#
# The second cure does not wait. `isend` and `irecv` (*i* for immediate) start one transfer each and return its
# request.


# %% tags=["deeper"]
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
print("isend and irecv: no order to get wrong")

# %% [markdown] tags=["deeper"]
# > **Misconception.** "`isend` has returned, so the message has been sent." It has been *started*. Changing the
# > tensor before `wait()` may change what arrives.
#
# <details><summary>Why can this hang on GPUs?</summary>
#
# Under NCCL `send` and `isend` put a *GPU kernel*, a function that runs on the GPU, on a *stream*, which is a queue of
# kernels, and return. The kernels of one stream run one after the other. If two ranks first `isend` to each other and
# then `irecv`, a send that is larger than NCCL's buffer occupies its stream until the other side receives, but that
# receive is queued behind *its* send. `batch_isend_irecv` makes the whole list one GPU kernel, in which sends and
# receives progress together.
#
# At the first exchange of two ranks any size can hang, and in Python: NCCL makes the connection then, and each side
# waits for the other, with or without `device_id=` in `init_process_group`. (Without it, PyTorch also makes a
# communicator, NCCL's own group, of the two ranks at their first send outside a batch, with buffers of its own.)
# </details>
#
# ### Barrier
#
# `barrier` moves no data. No rank leaves it before the last one has entered. Here each rank is late by 50 ms times
# its number.


# %% tags=["deeper"]
def be_late():
    time.sleep(0.05 * dist.get_rank())


rows = measured.barrier_spans(be_late, world_size)
assert min(spans[1][2] for spans in rows.values()) >= max(spans[1][1] for spans in rows.values())
timeline(rows, "measured: nobody leaves the barrier before the last rank has entered")

# %% [markdown] tags=["deeper"]
# *The figure: one row per rank. The work bars grow with the rank; the barrier bars fill the rest, so all end almost
# together. The last rank hardly waits.*
#
# All-reduce waits in the same way, because nobody can have the sum before the last summand exists. So a barrier
# before it wastes time. Use one for timing, or before reading another rank's file. (The root of a broadcast may leave
# early.)
#
# <details><summary>Barriers with NCCL, and a barrier that names the missing rank</summary>
#
# Under NCCL `barrier` is an all-reduce on a GPU followed by a wait of the CPU, so it has to know which GPU: pass
# `device_id=` to `init_process_group` once, or `device_ids=[local_rank]` to the barrier.
# `dist.monitored_barrier(timeout=…)` exists on gloo only, and its error names a rank that did not come.
# </details>

# %% [markdown] tags=["deeper"]
# ## 8. Groups and meshes: not always all ranks · deeper
#
# A **process group** is an ordered set of ranks that communicate among themselves. `launch` has made the default
# group of all ranks, and `new_group` makes others. Here even and odd ranks form two teams, each of which adds up its
# own numbers.


# %% tags=["deeper"]
def two_teams(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    teams = [list(range(0, n, 2)), list(range(1, n, 2))]
    groups = [dist.new_group(team) for team in teams]  # every rank makes both, in the same order
    dist.all_reduce(x, group=groups[rank % 2])
    return x


before, after = held(two_teams, world_size)
for rank in range(world_size):
    assert torch.equal(after[rank], sum(before[rank % 2 :: 2]))
before_after(before, after, "all_reduce in two teams")

# %% [markdown] tags=["deeper"]
# *The figure: rows 0, 2, … have the stripes of even ranks only, rows 1, 3, … those of odd ranks only.*
#
# > **Misconception.** "Only members call `new_group`." By default *every* rank of the world has to call it, for every
# > group and in the same order, members or not. If a rank skips a call, that group may even work, but a later
# > `new_group` waits until its timeout, because the ranks disagree on how many groups there are.
#
# Inside a group ranks are numbered from 0 again. `src=` and `dst=` mean ranks of the *world*, `group_src=` and
# `group_dst=` ranks of the *group*.


# %% tags=["deeper"]
def number_in_team():
    team = list(range(1, dist.get_world_size()))  # everybody but rank 0
    group = dist.new_group(team)
    if dist.get_rank() not in team:
        return "rank 0 of the world is not a member"
    x = torch.tensor([100 + dist.get_rank()], device=device())
    dist.broadcast(x, group_src=0, group=group)  # the same as src=1
    return f"rank {dist.get_rank()} is rank {dist.get_rank(group)} of the group and got {x.item()}"


print(*launch(number_in_team, world_size=world_size), sep="\n")

# %% [markdown] tags=["deeper"]
# Real jobs arrange ranks in a grid, say data-parallel × tensor-parallel, and communicate along rows or along columns.
# A `DeviceMesh` makes all those groups at once. A group along dimension `"tp"` has the ranks that differ in their tp
# index only.

# %% tags=["deeper"]
height = max(d for d in range(1, world_size) if world_size % d == 0 and d * d <= world_size)
shape = (height, world_size // height)


def mesh_of_all():
    return init_device_mesh(device().type, shape, mesh_dim_names=("dp", "tp"))


def groups_of_a_mesh():
    mesh = mesh_of_all()
    members = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in ("dp", "tp")}
    print(f"position {mesh.get_coordinate()}, dp group {members['dp']}, tp group {members['tp']}")
    return mesh.mesh.tolist()


print("grid of ranks:", launch(groups_of_a_mesh, world_size=world_size)[0])

# %% [markdown] tags=["deeper"]
# **Predict.** What do the ranks hold after an all-reduce along `tp`, and what if one along `dp` follows?


# %% tags=["deeper"]
def along_tp(x):
    dist.all_reduce(x, group=mesh_of_all().get_group("tp"))
    return x


def along_tp_then_dp(x):
    dist.all_reduce(along_tp(x), group=mesh_of_all().get_group("dp"))
    return x


before, after_both = held(along_tp_then_dp, world_size)
print("after tp and dp:", *[x.tolist() for x in after_both])
before, after = held(along_tp, world_size)
before_after(before, after, "all_reduce along tp")

# %% [markdown] tags=["deeper"]
# **Compare.** After the first each rank holds the sum of its row, and after the second the sum over all ranks.
#
# *The figure: ranks in the same row of the grid share their stripes.*

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert all(torch.equal(x, sum(before)) for x in after_both)
for row in torch.arange(world_size).view(shape).tolist():
    assert all(torch.equal(after[rank], sum(before[other] for other in row)) for rank in row)

# %% [markdown] tags=["deeper"]
# A *hierarchical* all-reduce works like this, first over the fast links inside a node and then over the slow ones
# between nodes. As written, every rank still sends its whole tensor between nodes; Exercise 1 of lesson 16 does
# better.
#
# <details><summary>A mesh of shape (2, 4) with names ("dp", "tp"): how many groups are there, and how large?</summary>
#
# Two tp groups of four ranks, the rows, and four dp groups of two ranks, the columns.
# </details>
#
# > **What changes on real GPUs.** Each group is a communicator of its own, with its own buffers in GPU memory and its
# > own streams. Two groups can communicate at the same time, but all ranks should then start them in the same order.

# %% [markdown] tags=["deeper"]
# ## 9. What gloo really sends · deeper
#
# The ledger sees one `all_reduce`, but it cannot see what gloo makes of it. The operating system can, because Linux
# counts the bytes of every TCP connection. `tcp_traffic` reads these counters before and after each collective.
#
# **Predict.** For which collectives does gloo move no more than section 3 demands?

# %% tags=["deeper"]
wire = measured.tcp_traffic(counted_bytes, world_size)
print("in units of S" if wire else "bytes are counted on Linux only")
for op in COLLECTIVES if wire else ():
    print(f"{op:15} at least {bytes_sent(op, world_size, 1.0):.2f}", end="")
    print("   sent, by rank:", *[f"{rank[op]['sent']:.2f}" for rank in wire], end="")
    print("   received:", *[f"{rank[op]['received']:.2f}" for rank in wire])

# %% jupyter={"source_hidden": true} tags=["deeper"]
for op in COLLECTIVES if wire else ():
    busiest = max(max(rank[op].values()) for rank in wire)
    least = bytes_sent(op, world_size, 1.0)
    assert busiest > least - 0.01
    if op not in ("reduce_scatter", "broadcast", "reduce"):
        assert busiest < least + 0.01
for rank in wire:
    assert abs(rank["reduce_scatter"]["sent"] - rank["all_reduce"]["sent"]) < 0.01

# %% [markdown] tags=["deeper"]
# **Compare.** For all-reduce, all-gather, all-to-all, gather and scatter the busiest rank moves what the formula says.
# For three it moves more:
# - **`reduce_scatter`** *is* an all-reduce, of which each rank keeps a piece. So its busbw is low in section 5, but
#   that is gloo's fault: NCCL has a true ring, at (N−1)/N · S.
# - **`broadcast`** is a binomial tree, in which the ranks that know the data double at each step: with 4 ranks the
#   root sends twice and rank 1 once. That takes few steps but more bytes at the root. (NCCL pipelines it along a
#   ring, at S for every rank but the last.)
# - **`reduce`** is a reduce-scatter, after which every rank sends its piece to the root: hence the left-overs of
#   section 2.
#
# A broadcast of a large tensor can spare the root, because **a broadcast is a scatter followed by an all-gather**.
# Then the root sends 2(N−1)/N · S, always less than 2 S.


# %% tags=["deeper"]
def broadcast_in_two(x):
    piece, whole = x.new_empty(len(x) // dist.get_world_size()), torch.empty_like(x)
    dist.scatter(piece, list(x.split(len(piece))) if dist.get_rank() == 0 else None, src=0)
    dist.all_gather_single(whole, piece)
    return whole


before, after = held(broadcast_in_two, world_size)
assert all(torch.equal(x, before[0]) for x in after)
print("scatter, then all_gather:", after[-1].tolist(), "on every rank")

# %% [markdown] tags=["deeper"]
# ## 10. Communicate while computing · deeper
#
# With `async_op=True` a collective returns at once with a request to wait for. Meanwhile the rank may compute, as
# long as it leaves the tensor alone. This **overlap** hides the shorter of the two.


# %% tags=["deeper"]
def wait_first(x, compute):
    dist.all_reduce(x)
    compute()


def overlap(x, compute):
    request = dist.all_reduce(x, async_op=True)  # starts, and returns at once
    compute()
    request.wait()  # only now may `x` be read


# %% [markdown] tags=["deeper"]
# On a CPU the ranks compute on the cores that carry the messages. A GPU has room for both, though not for nothing:
# NCCL's kernels take some of its processors and of its memory bandwidth. So here a sleep, of the length of the
# all-reduce, stands in for a computation elsewhere. The figure shows the fastest of three runs.

# %% tags=["deeper"]
apart = measured.hidden_step(wait_first, sizes[-1], world_size)
together = measured.hidden_step(overlap, sizes[-1], world_size)
assert together[1][1] < apart[1][1]  # with overlap computing starts while the all-reduce is running
spans = {"wait first": apart, "overlap": together}
timeline(spans, f"measured on rank 0: {format_bytes(sizes[-1])} all-reduce, computing elsewhere")

# %% [markdown] tags=["deeper"]
# *The figure: in the upper row rank 0 waits for the all-reduce and then computes; in the lower row it computes at
# once, waits little afterwards, and the step is shorter.*
#
# > **What changes on real GPUs.** Under NCCL every collective is asynchronous to the CPU, also without `async_op`.
# > `wait()` makes the current *stream* wait, the GPU's queue of work, and not the CPU. Timing without
# > `torch.cuda.synchronize()` measures the launch only. With `async_op=False` the collective itself is put on the
# > current stream, so later kernels of that stream cannot overlap.

# %% [markdown] tags=["deeper"]
# ## 11. Two more broken rules: order and size · deeper
#
# Rank 0 reduces `b` before `a`. Both have the same size.
#
# **Predict.** What comes of it?

# %% tags=["deeper"]
order = predict("b before a on rank 0", ["an error", "a hang", "wrong numbers", "the right sums"])


# %% tags=["deeper"]
def swapped():
    a, b = torch.ones(2, device=device()), torch.full((2,), 100.0, device=device())
    for x in (b, a) if dist.get_rank() == 0 else (a, b):
        dist.all_reduce(x)
    return f"a = {a.tolist()}, b = {b.tolist()}"


with attempt():
    got = launch(swapped, world_size=world_size)
    print(*got, sep="\n")

# %% jupyter={"source_hidden": true} tags=["deeper"]
mixed = 100.0 + world_size - 1
assert f"b = {[mixed] * 2}" in got[0] and f"a = {[mixed] * 2}" in got[1]
order.compare("wrong numbers")

# %% [markdown] tags=["deeper"]
# **Compare.** Wrong numbers, and nobody complains: rank 0's 100 was added to the others' ones.
#
# Different sizes may be noticed. Below, the last rank was started with other settings: rank 0 broadcasts five numbers,
# and the last rank has room for four.


# %% tags=["deeper"]
def uneven():
    weights = torch.ones(4 if dist.get_rank() == dist.get_world_size() - 1 else 5)
    dist.broadcast(weights, src=0)
    return weights


with expect_error():
    launch(uneven, world_size=world_size, backend="gloo")

# %% [markdown] tags=["deeper"]
# gloo notices that more bytes arrive than fit, and ends the *process*: no exception, nothing to catch. When less
# arrives than expected it may not notice: in an all-reduce with five numbers on rank 0 and four elsewhere, rank 0
# waits until the timeout and the others return, some with wrong numbers. NCCL does not compare sizes at all; its
# manual calls the result undefined: a hang, a crash, or corrupted data.
#
# `TORCH_DISTRIBUTED_DEBUG=DETAIL`, set before torch is imported, makes PyTorch compare the kind of collective, size
# and type before each call, at a price.
#
# | broken | gloo, as seen here | found by `DETAIL` |
# |---|---|---|
# | a rank skips a call | the others wait | after the group's timeout; rank 0's message names the missing rank |
# | another order, all else equal | wrong numbers | no |
# | another size | process ends, or one rank waits and others return wrong numbers | yes |
# | another `ReduceOp` | wrong numbers, same on all ranks | no |
#
# Two calls allow different sizes: `all_to_all_single` with split sizes, and under NCCL the `all_gather` that fills a
# list. Then every rank must still know what the others bring.

# %% [markdown] tags=["deeper"]
# ## 12. Objects, and what each backend can do · deeper
#
# Lists, dictionaries and strings travel too: `all_gather_object`, `gather_object`, `broadcast_object_list`,
# `scatter_object_list`.
#
# **Predict.** How many collectives does one `all_gather_object` make?

# %% tags=["deeper"]
calls = predict("collectives in one all_gather_object")


# %% tags=["deeper"]
def share():
    mine = {"rank": dist.get_rank(), "note": "x" * 10 * dist.get_rank()}
    everyone = [None] * dist.get_world_size()
    with record() as ledger:
        dist.all_gather_object(everyone, mine)
    return everyone, ledger


everyone, ledger = launch(share, world_size=world_size)[0]
print(ledger.table())

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert [someone["rank"] for someone in everyone] == list(range(world_size))
calls.compare(len(ledger))

# %% [markdown] tags=["deeper"]
# **Compare.** Two: the first all-gather tells everybody the lengths, and the second carries the pickled objects, each
# padded to the longest.
#
# So object collectives are slow. Unpickling also runs whatever code the sender put in, so use them among
# ranks that you trust, for settings and results. (Under NCCL the bytes travel through GPU memory, so
# `torch.cuda.set_device` must come first, or all ranks use GPU 0. `launch` does it.)
#
# The operation of a reduction is a choice as well. Here rank r brings r + 1:


# %% tags=["deeper"]
def reduce_with(name):
    x = torch.tensor([dist.get_rank() + 1.0], device=device())
    dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
    return x.item()


result = {}
for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
    result[name] = launch(reduce_with, name, world_size=world_size)
    assert len(set(result[name])) == 1  # all ranks agree
    print(f"{name:8}{result[name][0]:6g}")
assert result["AVG"][0] == result["SUM"][0] / world_size

# %% [markdown] tags=["deeper"]
# <details><summary>Does <code>AVG</code> need NCCL, as the documentation of <code>ReduceOp</code> says?</summary>
#
# No: you have just run it on whatever backend this notebook uses. On gloo it needs a floating-point tensor. `BAND`,
# `BOR` and `BXOR` (bitwise, for integers) exist on gloo and not on NCCL; `PREMUL_SUM` (scale, then add) the other way
# round.
# </details>
#
# What works depends on the backend. This cell tries the eight collectives, a barrier and 16-bit integers on gloo:


# %% tags=["deeper"]
def try_everything():
    trials = measured.collective_calls(64) | {"barrier": dist.barrier}
    trials["all_reduce of int16"] = lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16))
    works = {}
    for name, trial in trials.items():
        try:
            trial()
            works[name] = True
        except (RuntimeError, ValueError, TypeError):
            works[name] = False
    return works


works = launch(try_everything, world_size=world_size, backend="gloo")[0]
print("works on gloo:", ", ".join(name for name in works if works[name]))
print("does not:", ", ".join(name for name in works if not works[name]))
assert all(works[op] for op in (*COLLECTIVES, "barrier"))

# %% [markdown] tags=["deeper"]
# Everything but one: gloo does not add 16-bit integers. The rule of thumb is NCCL for GPUs and gloo for CPUs. NCCL
# takes no CPU tensors; gloo takes both, but copies GPU tensors through the CPU. A group made with
# `backend="cpu:gloo,cuda:nccl"` chooses by the tensor's device.
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
# library. The fourth backend of that table, XCCL for Intel's GPUs, is left out here. UCC is not in it: PyTorch calls
# it experimental, and its source
# ([ProcessGroupUCC.hpp](https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupUCC.hpp))
# has all of these operations.</small>
# </details>

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
print(f"each of {world_size} ranks sent {ring['S']:.2f} S in a ring all-reduce")
print(f"alpha {alpha * 1e3:.2f} ms, 1/beta {1 / beta / 1e9:.2f} GB/s (fitted)")
print(f"64 small all-reduces {best['64 calls'] * 1e3:.1f} ms", end=", ")
print(f"as one {best['one call'] * 1e3:.1f} ms")

# %% [markdown]
# - A send may wait for its receive; `batch_isend_irecv` starts both and prevents deadlock.
# - All-reduce = reduce-scatter + all-gather: each piece visits N−1 ranks to be summed and N−1 to be copied. So each
#   rank sends 2(N−1)/N · S, nearly independent of N.
# - Small messages cost α, large ones β·S. Few large calls beat many small ones.
# - All ranks make the same calls in the same order. If not: a hang, a crash, or wrong numbers.
#
# **Now you can answer**
#
# 1. After `reduce` to rank 0, what do the *other* ranks hold?
# 2. A thousand ranks all-reduce 1 GB. How many bytes must each of them send, and why?
# 3. All-reduce of 1 GiB on 8 GPUs: 8.2 ms; the link does 274 GB/s. How much of it is used?
# 4. One rank skips an `all_reduce`. Who notices, and when?
# 5. Rank 0 passes `ReduceOp.MAX`, the others `SUM`. What happens?
#
# <details><summary>Answers</summary>
#
# 1. Nothing defined: left-overs of the algorithm (section 2).
# 2. 1.998 GB: each piece of 1 MB visits 999 ranks to be summed and 999 to be copied (section 3).
# 3. busbw is 131 × 14/8 = 229 GB/s, which is 84 % (section 5).
# 4. The others wait, and raise an error at the timeout; the rank that skips never notices (section 6).
# 5. Wrong numbers, the same ones on all ranks, and no message from PyTorch (section 6).
# </details>
#
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# **What to take to work:** a page to print with all eight (`docs/sheets/collectives.html` in the course's folder), and
# [scripts/train.py](../scripts/train.py), where an all-reduce before each step tells every rank whether one of them
# has been asked to stop.
#
# **Exercises:** [exercises/02_collectives](../exercises/02_collectives_exercises.ipynb). **Next:** [03
# nccl](03_nccl.ipynb), where you find out which algorithm NCCL picks.
#
# **Worth reading**
# - E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, *Collective communication: theory, practice, and
#   experience*, 2007, [doi.org/10.1002/cpe.1206](https://doi.org/10.1002/cpe.1206): the identities and lower bounds,
#   for all but all-to-all.
# - P. Patarasuk, X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009,
#   [doi.org/10.1016/j.jpdc.2008.09.002](https://doi.org/10.1016/j.jpdc.2008.09.002): why 2(N−1)/N·S is the least.
# - NVIDIA, *Performance reported by NCCL tests*,
#   [nccl-tests/doc/PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): the factors
#   of section 5, derived.
