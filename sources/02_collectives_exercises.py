# %% [markdown]
# # Exercises 02 · Can you move the data with no byte too many?
#
# Eleven exercises on [02 collectives](../notebooks/02_collectives.ipynb), from easy to hard. In seven you write a
# function that runs on real ranks; in four you work out bytes and seconds on paper and let Python do the arithmetic.
# All of them take about 195 minutes.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | mean and variance in one all-reduce | 1 of 5 | 10 |
# | 2 | a ring shift that does not deadlock | 2 of 5 | 15 |
# | 3 | all-reduce out of reduce-scatter and all-gather | 2 of 5 | 20 |
# | 4 | an all-gather of tensors of different lengths | 3 of 5 | 25 |
# | 5 | row and column sums on a 2-D mesh | 3 of 5 | 25 |
# | 6 | broadcast as a tree of messages | 4 of 5 | 30 |
# | 7 | all-reduce on two levels | 5 of 5 | 40 |
# | 8–11 | paper problems: bytes, time, bandwidth | 2–4 of 5 | 30 |
#
# Each stands alone, except that 7 puts 3 and 5 together. *Follows* on each card names the section of the lesson
# to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/02_collectives_solutions.ipynb).
#
# **What a check does.** It runs your function on real ranks, at several world sizes, with other numbers on each
# rank. It compares the result with that of one process, and then reads the **ledger** of each rank: which
# operations it called, and how many bytes they carried. A right result by the wrong way does not pass. If the
# ranks wait for each other, the check stops them within seconds and shows where each one stood.
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
from torch.distributed.device_mesh import init_device_mesh

from course_utils import expect_error, launch, record
from course_utils.checks import collectives as check

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
def mean_and_variance(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of the numbers on all ranks.

    Parameters
    ----------
    x : tensor of shape (n,), float32
        The numbers of this rank; n differs between ranks and may be 0. Must not be changed.

    Returns
    -------
    mean, variance : scalar tensors, float64
        The same on every rank. The variance is divided by the number of all elements, not by
        that minus one.
    """
    ### BEGIN SOLUTION
    x = x.double()
    sums = torch.stack([x.new_tensor(x.numel()), x.sum(), (x * x).sum()])
    dist.all_reduce(sums)
    count, total, squares = sums
    mean = total / count
    return mean, squares / count - mean**2
    ### END SOLUTION


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
# Each rank should give its tensor to the rank on its right and get that of the rank on its left: the step that
# ring algorithms and pipelines repeat. The function below looks right. Before you run it, say where each rank
# will be after 2 seconds.


# %%
def broken_ring_shift(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    dist.send(x, dst=(rank + 1) % n)
    dist.recv(received, src=(rank - 1) % n)
    return received


def shift_own_rank():
    return broken_ring_shift(torch.tensor([float(dist.get_rank())]))


with expect_error():
    launch(shift_own_rank, world_size=WORLD_SIZE, backend="gloo", timeout=2)

# %% [markdown]
# Write a version out of messages, no collective, that works for every number of ranks, also for one.


# %%
def ring_shift(x: torch.Tensor) -> torch.Tensor:
    """Send x to rank + 1 and return what rank - 1 sent; rank 0 follows the last rank.

    Parameters
    ----------
    x : contiguous tensor of any shape and dtype
        The same shape and dtype on every rank. Must not be changed.

    Returns
    -------
    tensor of the same shape and dtype
        The x of rank - 1; with a single rank its own.
    """
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return x.clone()
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + 1) % n)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % n)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()
    return received
    ### END SOLUTION


# %%
check.ring_shift(ring_shift)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `dist.send` returns when the receiver takes part. Every rank is in `send`; who could receive?
# </details>
# <details><summary>Hint 2</summary>
#
# Either the ranks do not all begin with the same call, or a rank starts both and waits for both afterwards.
# `isend(...).wait()` in one breath is no better than `send`.
# </details>
# <details><summary>Hint 3</summary>
#
# Make two `dist.P2POp`, one with `dist.isend` and one with `dist.irecv`, give both to `dist.batch_isend_irecv`,
# and wait for each request that it returns. A rank cannot send to itself, so one rank is a case of its own.
# </details>
# <details><summary>Is gloo to blame?</summary>
#
# No. Some libraries (many MPI ones, for example) buffer small messages, so that such a program works with small
# tensors and hangs with large ones. None promises it. A program is right only if it does not count on a buffer.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · All-reduce out of two other collectives
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 20 | 02, Two identities | 1 reduce-scatter and 1 all-gather |
#
# The lesson showed that an all-reduce equals a reduce-scatter followed by an all-gather. ZeRO and FSDP live on that:
# they do the first half for the gradients and the second half, later, for the parameters. Build it for tensors of
# **any** shape, also where N does not divide the number of elements. Each rank then has to send 2(N−1)/N · S bytes,
# nearly independent of N. (gloo's reduce-scatter sends twice its share; see the lesson, section 5.)
#
# Use `dist.reduce_scatter_single` and `dist.all_gather_single` (called `reduce_scatter_tensor` and
# `all_gather_into_tensor` before PyTorch 2.13). Pad to the next multiple of N at most.


# %%
def all_reduce_in_two(x: torch.Tensor) -> torch.Tensor:
    """Sum of x over all ranks, by one reduce-scatter and one all-gather.

    Parameters
    ----------
    x : tensor of any shape, float32
        The same shape on every rank; it may have no dimension at all, and need not be contiguous.
        Must not be changed.

    Returns
    -------
    tensor of the same shape
        The sum, the same on every rank.
    """
    ### BEGIN SOLUTION
    n = dist.get_world_size()
    shard_length = -(-x.numel() // n)  # rounded up
    padded = x.new_zeros(n * shard_length)
    padded[: x.numel()] = x.flatten()
    shard = x.new_empty(shard_length)
    dist.reduce_scatter_single(shard, padded)
    dist.all_gather_single(padded, shard)
    return padded[: x.numel()].reshape(x.shape)
    ### END SOLUTION


# %%
check.all_reduce_in_two(all_reduce_in_two)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Forget the shape first: work on a flat tensor, and give it the shape of `x` at the end.
# </details>
# <details><summary>Hint 2</summary>
#
# The shard has ⌈numel / N⌉ elements. Copy the flat `x` into a tensor of N times that length. What stands in the rest
# does not matter, since it is cut off; zeros are tidy.
# </details>
# <details><summary>Hint 3</summary>
#
# `dist.reduce_scatter_single(shard, padded)`, then `dist.all_gather_single(padded, shard)`, then cut and reshape.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · An all-gather of tensors of different lengths
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 02, Eight collectives | 2 collectives: at most 8·N bytes, then N · longest |
#
# Validation results, sentences, detected boxes: ranks often hold different numbers of rows, and everybody needs
# all of them. gloo's all-gather wants equal shapes, so this takes two steps.


# %%
def ragged_all_gather(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, which may differ in their number of rows.

    Parameters
    ----------
    x : tensor of shape (rows, d), float32
        d is the same on every rank, rows is not, and may be 0 on some or all. Must not be changed.

    Returns
    -------
    list of N tensors
        Number r is the x of rank r, of shape (rows of rank r, d).
    """
    ### BEGIN SOLUTION
    n, (rows, d) = dist.get_world_size(), x.shape
    lengths = torch.empty(n, dtype=torch.int64, device=x.device)
    dist.all_gather_single(lengths, torch.tensor([rows], device=x.device))
    longest = int(lengths.max())
    padded = x.new_zeros(longest, d)
    padded[:rows] = x
    gathered = x.new_empty(n * longest, d)
    dist.all_gather_single(gathered, padded)
    parts = gathered.view(n, longest, d)
    return [part[:length] for part, length in zip(parts, lengths.tolist(), strict=True)]
    ### END SOLUTION


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
# ## Exercise 5 · Row and column sums on a 2-D mesh
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 25 | 02, Groups | 2 all-reduces, of 4·m and 4·n bytes |
#
# A matrix is cut into `rows` × `cols` blocks, one per rank, numbered row by row. For 2 × 3:
#
# | | column 0 | column 1 | column 2 |
# |---|---|---|---|
# | **row 0** | rank 0 | rank 1 | rank 2 |
# | **row 1** | rank 3 | rank 4 | rank 5 |
#
# Each rank should know the row sums of the whole matrix for the rows that pass through its block, and the column
# sums for its columns. Tensor parallelism does this in every layer: all groups along one dimension add, side by side.


# %%
def row_and_column_sums(
    block: torch.Tensor, rows: int, cols: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column sums of a matrix that is spread over a mesh of rows × cols ranks.

    Parameters
    ----------
    block : tensor of shape (m, n), float32
        This rank's block, of the same shape on every rank. Must not be changed.
    rows, cols : int
        Shape of the mesh; the world size is rows · cols.

    Returns
    -------
    row_sums, column_sums : tensors of shape (m,) and (n,)
        Sums over whole rows of the matrix, the same on all ranks of a mesh row; sums over whole
        columns, the same on all ranks of a mesh column.
    """
    ### BEGIN SOLUTION
    mesh = init_device_mesh(block.device.type, (rows, cols), mesh_dim_names=("row", "col"))
    row_sums, column_sums = block.sum(dim=1), block.sum(dim=0)
    dist.all_reduce(row_sums, group=mesh.get_group("col"))
    dist.all_reduce(column_sums, group=mesh.get_group("row"))
    return row_sums, column_sums
    ### END SOLUTION


# %%
check.row_and_column_sums(row_and_column_sums)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Add up inside the block first. What is left to send is a vector, not a matrix.
# </details>
# <details><summary>Hint 2</summary>
#
# For the row sums rank 0 has to add with ranks 1 and 2. Their row index is the same; it is the column index that
# runs.
# </details>
# <details><summary>Hint 3</summary>
#
# `init_device_mesh(block.device.type, (rows, cols), mesh_dim_names=("row", "col"))` makes all groups.
# `mesh.get_group("col")` is the group along which the column index runs. With `dist.new_group` instead, every
# rank must make every group, in the same order.
# </details>

# %% [markdown]
# ---
# ## Exercise 6 · Broadcast as a tree
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 30 | 02, Point to point | N−1 messages in ⌈log2 N⌉ steps, from any root |
#
# A root that sends to all others one after another needs N−1 steps. Whoever has the data can help: then the
# number of ranks that have it doubles in every step. Write that with point-to-point calls alone;
# `dist.send` and `dist.recv` will do.
#
# The check counts the steps from the ledgers of all ranks, by this rule: **in one step a rank sends at most one
# message and receives at most one, and it passes on only what came in an earlier step.** At 1, 2, 3, 4, 5 and 8
# ranks that leaves 0, 1, 2, 2, 3 and 3 steps.


# %%
def tree_broadcast(x: torch.Tensor, root: int) -> None:
    """Broadcast x from the root to all ranks, in place, with point-to-point messages.

    Parameters
    ----------
    x : contiguous tensor of any shape and dtype
        On the root the data; elsewhere a tensor of the same shape that is overwritten.
    root : int
        The rank that has the data.
    """
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    place = (rank - root) % n  # the root has place 0
    have = 1  # the places 0 … have - 1 have the data
    while have < n:
        if place < have and place + have < n:
            dist.send(x, dst=(place + have + root) % n)
        elif have <= place < 2 * have:
            dist.recv(x, src=(place - have + root) % n)
        have *= 2
    ### END SOLUTION


# %%
check.tree_broadcast(tree_broadcast)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take root 0 and N = 8 and draw it. Step 1: 0→1. Step 2: 0→2, 1→3. Step 3: 0→4, 1→5, 2→6, 3→7. Before a step,
# which ranks have the data, and how far does each of them send?
# </details>
# <details><summary>Hint 2</summary>
#
# Before step k (from 0) the ranks below 2^k have it; rank r sends to r + 2^k, if there is such a rank. Everybody
# runs the same loop, and in each turn either sends, receives, or does nothing.
# </details>
# <details><summary>Hint 3</summary>
#
# For another root, renumber: `place = (rank - root) % n` runs the algorithm, `(place + root) % n` is the rank to
# talk to.
# </details>
# <details><summary>When is a tree the right choice?</summary>
#
# Each message carries the whole tensor, so the last rank has it after ⌈log2 N⌉ · (α + S/B), with latency α and
# bandwidth B. For small S nothing is faster. For large S the other identity of the lesson wins: scatter and
# all-gather send S/N at a time, and all links work at once, which takes about 2(N−1)/N · S/B however many ranks
# there are.
# </details>

# %% [markdown]
# ---
# ## Exercise 7 · All-reduce on two levels
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 5 of 5 | 40 | exercises 3 and 5 | between nodes 2(M−1)/M · S/G bytes sent by each rank |
#
# M nodes have G GPUs each, and links of two speeds: on an H100 node NVLink carries 450 GB/s each way from every
# GPU, its network port 50. An all-reduce over all M·G ranks that knows nothing of nodes may send nearly 2·S
# through a slow link. Build one in which no rank sends more than 1/G of that between nodes. Node 0 has the ranks
# 0 … G−1, node 1 the next G, and so on.
#
# The check adds up, for each rank, the bytes that its calls must send at least (2(N−1)/N · S for an all-reduce of
# N ranks, (N−1)/N · S for a reduce-scatter or an all-gather), separately for groups inside a node and groups that
# reach over nodes. Inside a node 2(G−1)/G · S are allowed. Think first, then write: it is five lines.


# %%
def two_level_all_reduce(x: torch.Tensor, nodes: int, per_node: int) -> torch.Tensor:
    """Sum of x over all ranks with little traffic between nodes.

    Parameters
    ----------
    x : tensor of shape (n,), float32
        n is a multiple of per_node. Must not be changed.
    nodes, per_node : int
        M nodes with G ranks each; the world size is M · G, and rank // per_node is the node.

    Returns
    -------
    tensor of shape (n,)
        The sum, the same on every rank.
    """
    ### BEGIN SOLUTION
    mesh = init_device_mesh(x.device.type, (nodes, per_node), mesh_dim_names=("node", "local"))
    inside, across = mesh.get_group("local"), mesh.get_group("node")
    shard, result = x.new_empty(x.numel() // per_node), torch.empty_like(x)
    dist.reduce_scatter_single(shard, x, group=inside)
    dist.all_reduce(shard, group=across)
    dist.all_gather_single(result, shard, group=inside)
    return result
    ### END SOLUTION


# %%
check.two_level_all_reduce(two_level_all_reduce)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Exercise 3 in one node: after the reduce-scatter each rank has 1/G of the node's sum. What is missing, and who
# has the other part?
# </details>
# <details><summary>Hint 2</summary>
#
# Local rank 0 of every node holds the first shard, local rank 1 the second, and so on. G all-reduces run side by
# side, one for each local rank, over M ranks each.
# </details>
# <details><summary>Hint 3</summary>
#
# Reduce-scatter inside the node, all-reduce of the shard across nodes, all-gather inside the node. A mesh of
# shape `(nodes, per_node)` has both kinds of group.
# </details>

# %% [markdown]
# ---
# ## Exercises 8 to 11 · On paper
#
# Work out the formula by hand, then write it as a function of its arguments. The check calls it with the numbers
# of the text and with others. Answers within 1 % pass. Units are half of each problem: **GB are bytes, Gb are
# bits**, and in link speeds both count in powers of ten.

# %% [markdown]
# ## Exercise 8 · Gradients over a network
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 5 | 02, How many bytes must each rank move? |
#
# A model of 7 billion parameters is trained on 16 GPUs, one per node, each with an InfiniBand port of 400 Gb/s.
# After every step the gradients, 2 bytes each, are all-reduced by a ring. How long does that take at least, if
# the links run at full speed and latency is nothing?


# %%
def gradient_all_reduce_seconds(
    parameters: float, bytes_per_parameter: float, ranks: int, link_gigabits: float
) -> float:
    """Least time of a ring all-reduce of all gradients, in seconds.

    Parameters
    ----------
    parameters : float
        Number of parameters; each has one gradient.
    bytes_per_parameter : float
        Size of one gradient in bytes.
    ranks : int
        Number of ranks N.
    link_gigabits : float
        What each rank can send, in Gb/s (10⁹ bits per second); it can receive as much meanwhile.
    """
    ### BEGIN SOLUTION
    size = parameters * bytes_per_parameter
    sent = 2 * (ranks - 1) / ranks * size
    return sent / (link_gigabits * 1e9 / 8)
    ### END SOLUTION


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
# ## Exercise 9 · Read a benchmark
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 10 | 02, How long does it take? |
#
# *Recorded* on a node of 8 A100: an all-reduce of 1 GiB takes 8203.9 µs (stas00/ml-engineering,
# network/README.md). What are the **algorithm bandwidth** and the **bus bandwidth**? Write it for the other
# collectives too.


# %%
def bandwidths(op: str, ranks: int, size: float, seconds: float) -> tuple[float, float]:
    """Algorithm and bus bandwidth of one call, in GB/s (10⁹ bytes per second).

    Parameters
    ----------
    op : str
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "reduce".
    ranks : int
        Number of ranks N.
    size : float
        Message size S in bytes, as in nccl-tests.
    seconds : float
        Time t of the call.

    Returns
    -------
    algbw, busbw : float
    """
    ### BEGIN SOLUTION
    share = (ranks - 1) / ranks
    factor = {"all_reduce": 2 * share, "broadcast": 1.0, "reduce": 1.0}.get(op, share)
    algbw = size / seconds / 1e9
    return algbw, algbw * factor
    ### END SOLUTION


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
# ## Exercise 10 · Shards over NVLink
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 3 of 5 | 5 | 02, How many bytes must each rank move? |
#
# The parameters of a model of 8 billion, 2 bytes each, are spread over 8 H100: 2 GB on each. The data sheet
# promises 900 GB/s of NVLink per GPU, the sum of both directions. How long does it take at least until every GPU
# has all parameters?


# %%
def all_gather_seconds(shard: float, ranks: int, both_directions: float) -> float:
    """Least time of an all-gather, in seconds.

    Parameters
    ----------
    shard : float
        Bytes that each rank holds before.
    ranks : int
        Number of ranks N.
    both_directions : float
        Bandwidth of a rank's links as on a data sheet, in GB/s: what it can send plus what it can
        receive.
    """
    ### BEGIN SOLUTION
    received = (ranks - 1) * shard
    return received / (both_directions / 2 * 1e9)
    ### END SOLUTION


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
# of Exercise 9.
# </details>

# %% [markdown]
# ## Exercise 11 · How large is large?
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 4 of 5 | 10 | 02, How long does it take? |
#
# On the node of Exercise 9 a small all-reduce (32 KiB) takes 43.83 µs, and very large ones reach a bus bandwidth of
# 234.89 GB/s (*recorded*, same source). *Model* the time as t(S) = latency + 2(N−1)/N · S / peak. At which size S
# does the bus bandwidth reach **half** of its peak?


# %%
def half_bandwidth_size(ranks: int, latency: float, peak_busbw: float) -> float:
    """Message size of an all-reduce at which the bus bandwidth is half of its peak, in bytes.

    Parameters
    ----------
    ranks : int
        Number of ranks N.
    latency : float
        Time of a whole all-reduce of almost no data, in seconds.
    peak_busbw : float
        Bus bandwidth for very large messages, in GB/s.
    """
    ### BEGIN SOLUTION
    factor = 2 * (ranks - 1) / ranks
    return latency * peak_busbw * 1e9 / factor
    ### END SOLUTION


# %%
check.half_bandwidth_size(half_bandwidth_size)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write busbw(S) = 2(N−1)/N · S / t(S) and set it to peak / 2.
# </details>
# <details><summary>Hint 2</summary>
#
# Half the peak means that half of the time goes into latency: both terms of t(S) are equal.
# </details>
# <details><summary>Hint 3</summary>
#
# latency = 2(N−1)/N · S / peak. Solve for S, and mind that the peak is given in GB/s.
# </details>
# <details><summary>And on the real machine?</summary>
#
# The model says 5.9 MB (5.6 MiB). The recorded table has 72 GB/s at 4 MiB, 110 at 8 MiB, 106 at 16 MiB and 138 at 32
# MiB, so half of the peak, 117 GB/s, comes only between 16 and 32 MiB, and the curve is not even monotone. One
# latency and one bandwidth are not enough: NCCL changes its protocol and algorithm with the size, which is what
# notebook 03 takes apart.
# </details>

# %% [markdown]
# ---
# ## What you have built
#
# - **Sums that can be added** (1): the pattern of synchronised batch normalisation and of every distributed
#   metric.
# - **A shift without deadlock** (2): the step of ring all-reduce, ring attention and pipelines.
# - **All-reduce in two halves** (3): ZeRO and FSDP put the optimizer step between them.
# - **Ragged gathers** (4): evaluation, detection, and the routing of experts.
# - **Sub-groups of a mesh** (5) and **two levels** (7): tensor, pipeline and data parallelism side by side, and
#   hierarchical all-reduce.
# - **A tree** (6): ⌈log2 N⌉ instead of N−1 steps, the idea behind NCCL's tree algorithm.
# - **Bytes before seconds** (8–11): the estimate to make before you believe a measurement.
