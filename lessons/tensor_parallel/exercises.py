# %% [markdown]
# # Exercises 09 · How do several GPUs compute one layer?
#
# Five exercises on [09 tensor parallelism](../notebooks/09_tensor_parallel.ipynb). In four you cut layers over real
# ranks; in one you compute the price. All of them take about 170 minutes.
#
# **If you do only these:** 1, 2 and 4.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | an MLP: column parallel, then row parallel | 2 of 5 | 30 |
# | 2 | attention, a part of the heads on each rank | 3 of 5 | 40 |
# | 3 | the loss, without gathering the logits | 4 of 5 | 45 |
# | 4 | the price of a layer, on NVLink and between nodes | 2 of 5 | 20 |
# | 5 | a norm on a part of the sequence | 4 of 5 | 35 |
#
# Exercises 2, 3 and 5 use f and g of Exercise 1. If you begin there, copy `summed`, `Copy` and `Reduce` of lesson 09
# into a new cell and set `f, g = Copy.apply, Reduce.apply`. Exercise 5 also needs `with_backward`. Nothing else is
# shared. *Follows* on each card names the section of the lesson to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/09_tensor_parallel_solutions.ipynb).
#
# **What a check does** (except in Exercise 4, which compares numbers). It runs your function forward and backward on 1
# to 3 or 4 real ranks, and the whole layer in one process. The output and **every gradient** have to agree to 12 digits
# in float64. A right output proves little here: a missing all-reduce in backward shows only in the gradients. Then the
# check reads the **ledger** of each rank, and counts calls and bytes in each direction. If the ranks wait for each
# other, it stops them within seconds and shows where each one stood.

# %% tags=["parameters"]
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_utils import launch, record
from lessons.tensor_parallel import check

WORLD_SIZE = 4  # ranks of the demonstrations; the checks choose their own

# %% [markdown]
# ---
# ## Exercise 1 · Column parallel, then row parallel
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 30 | 09, f and g; An MLP | one all-reduce in forward, one in backward |
#
# An MLP computes y = GELU(x Upᵀ + up_bias) Downᵀ + down_bias. Rank r has some of the inner features: the rows of Up
# that make them, and the **columns** of Down that use them. The first product needs no communication, because each rank
# makes its own features. The second gives a partial sum on each rank, and an all-reduce adds these up.
#
# Backward is the mirror image. Every rank used the whole x, so the gradient of x is a sum over the ranks. Two functions
# tell autograd so. **f** is the identity in forward and an all-reduce in backward; **g** is an all-reduce in forward
# and the identity in backward.
#
# The next two cells are for your use. `with_backward` makes such a function from two others. Predict what its cell
# prints.


# %%
# {{summed}}


# %%
# {{with_backward}}


x = torch.ones(2, requires_grad=True)
with_backward(lambda x: 5 * x, lambda dy: 7 * dy)(x).sum().backward()
print(x.grad.tolist())

# %% [markdown]
# Autograd takes our word for it, right or wrong. Now the layer. `column_row_mlp` gets
#
# - `x` of shape (b, s, h), the same on every rank. The caller may use it elsewhere, as in x + column_row_mlp(x, …);
# - `up` and `up_bias` of shapes (m, h) and (m): this rank's m inner features. Ranks may have different m;
# - `down` of shape (h, m): the same features as columns;
# - `down_bias` of shape (h): the whole bias, the same on every rank,
#
# and returns y of shape (b, s, h), whole on every rank. Gradients flow to all five.


# %%
# {{f}}


# {{g}}


# {{column_row_mlp}}


# %%
check.column_row_mlp(column_row_mlp)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write it for one rank first: two `F.linear` with `F.gelu` between them. Then ask of each tensor: is it whole, is it a
# part, or is it one term of a sum? Only the last kind has to be reduced.
# </details>
# <details><summary>Hint 2</summary>
#
# f goes in front of the first product, g behind the second. The second bias comes after g, or it is added t times.
# </details>
# <details><summary>Hint 3</summary>
#
# `with_backward(identity, summed)(x)` is f, and g has the two the other way round. As identity in forward take
# `x.view_as(x)`, a new tensor with a history of its own.
# </details>
# <details><summary>Why is the bias not cut?</summary>
#
# It has h numbers, next to nothing. Every rank adds it after the sum, and so every rank computes the same gradient of
# it: the copies stay equal without a message.
# </details>

# %% [markdown]
# When your function passes, count what travels for one MLP as it becomes wider inside.


# %%
def traffic(m):
    t, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(2, 8, 16, requires_grad=True)
    up, down = torch.ones(m, 16).chunk(t)[rank], torch.ones(16, m).chunk(t, 1)[rank]
    with record() as ledger:
        column_row_mlp(x, up, torch.ones(len(up)), down, torch.ones(16)).sum().backward()
    return ledger.count("all_reduce"), ledger.bytes()


for m in (64, 256):
    calls, size = launch(traffic, m, world_size=WORLD_SIZE, backend="gloo")[0]
    print(f"{m:>3} inner features: {calls} all-reduces, {size:,} bytes")

# %% [markdown]
# The 2 · 8 · 16 numbers of x travel twice, in 4 bytes each. The width inside does not matter.

# %% [markdown]
# ---
# ## Exercise 2 · Attention by heads
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 40 | 09, Attention by heads | 1/t of the work; one all-reduce each way |
#
# Heads do not see each other until the output weight mixes them. So rank r takes heads/t heads, from head r · heads/t
# on: their rows of the joint weight, and their columns of the output weight.
#
# The joint weight `qkv` has one block of d rows for each head: first all of q, then all of k, then all of v. Predict
# which blocks rank 0 of 2 gets if the weight of 4 heads is cut with `chunk`.

# %%
blocks = [f"{part}{head}" for part in "qkv" for head in range(4)]
print("chunk:", blocks[: len(blocks) // 2])
print("heads:", [block for block in blocks if block[1] in "01"])

# %% [markdown]
# With `chunk`, rank 0 has all of q, half of k, and no v. The shapes fit, so there is no error.
#
# In **grouped-query attention** there are fewer k/v heads than q heads: q head i uses k/v head
# i // (heads // kv_heads). There may even be fewer k/v heads than ranks. Then ranks whose q heads use the same k/v
# head each keep a copy of it.
#
# `head_attention` gets
#
# - `x` of shape (b, s, h), the same on every rank. The caller may use it elsewhere, too;
# - `qkv` of shape ((heads + 2 · kv_heads) · d, h), and `out` of shape (h, heads · d), whole on every rank;
# - `heads` and `kv_heads`: the number of ranks divides heads, and kv_heads divides heads,
#
# and returns y of shape (b, s, h), whole on every rank. Each rank uses its own heads of the weights. The gradient of a
# weight is then what these heads give, and zero elsewhere; added up over the ranks, it is the whole gradient.


# %%
# {{head_attention}}


# %%
check.head_attention(head_attention)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `qkv.unflatten(0, (-1, d))` makes one block of each head. q has blocks 0 to heads - 1, k the next kv_heads, v the
# last. Which blocks are this rank's?
# </details>
# <details><summary>Hint 2</summary>
#
# For `F.scaled_dot_product_attention(q, k, v, is_causal=True)` all three have the shape (b, heads, s, d):
# `F.linear(x, rows).unflatten(-1, (-1, d)).transpose(1, 2)`. Apply f to x once, and use its result three times.
# </details>
# <details><summary>Hint 3</summary>
#
# `mine // (heads // kv_heads)` says for each of this rank's q heads which k/v head it uses. `unique` with
# `return_inverse=True` gives each of them once, and for each q head its place among them.
# </details>
# <details><summary>What of the gradients of k/v heads that ranks share?</summary>
#
# Each copy gets a part of the gradient. In training, the ranks that share a head add their parts up, or the copies
# drift apart.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · The loss, without gathering the logits
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 45 | 09, Embedding and loss, then the whole model | two all-reduces, of three numbers a token together |
#
# With 128,256 words, the logits of a token have half a megabyte in fp32. If the head is column parallel, each
# rank has those of its own words. The loss of a token is
#
# $$ \log \sum_v e^{z_v - m} + m - z_{\text{target}}, \qquad m = \max_v z_v $$
#
# m, the sum, and the target's logit are one number each. Without m the loss is the same on paper, but not in floating
# point. Predict what each line of the next cell prints.

# %%
z = torch.tensor([1000.0, 999.0])
print(f"without m: {z.exp().sum().log().item():g}")
print(f"with m:    {((z - z.max()).exp().sum().log() + z.max()).item():.4f}")

# %% [markdown]
# The lesson sends three messages. Two are enough, because of the three numbers only one is needed before the other two.
# Take care with words that a rank does not have, as in the lesson's embedding. `vocab_parallel_loss` gets
#
# - `logits` of shape (tokens, v), of this rank's v words; v may differ between ranks. They must not be changed;
# - `targets` of shape (tokens): the right words, the same on every rank, counted in the whole vocabulary;
# - `first`: this rank has words first to first + v - 1,
#
# and returns the mean over the tokens, a scalar, the same on every rank. After backward the gradient of the logits is
# this rank's part of the gradient that one process has.


# %%
# {{vocab_parallel_loss}}


# %%
check.vocab_parallel_loss(vocab_parallel_loss)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take m off all logits, the target's as well: then m need not be added again. m is a maximum over the shard, and then
# over the ranks.
# </details>
# <details><summary>Hint 2</summary>
#
# Exactly one rank has the target. The others must not read outside of their shard: let them read word 0, and put zero
# in its place with `torch.where`. The sum over the ranks is then the target's logit.
# </details>
# <details><summary>Hint 3</summary>
#
# m comes from `logits.detach()`, with `op=dist.ReduceOp.MAX`. Then two sums, one g: `g(torch.stack([a, b]))`
# with `shifted.exp().sum(1)` and the target's logit.
# </details>
# <details><summary>Why does backward need no message?</summary>
#
# The gradient of a logit is its softmax, minus 1 at the target. Of the other ranks' logits it needs only the sum, and
# that is there since forward.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · The price of a layer
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 20 | 09, What it sends; Why it stays inside the node | within 0.1 % |
#
# A layer has an attention and an MLP, each with one all-reduce of its (b, s, h) output in forward and one in backward.
# A ring all-reduce of S bytes sends 2(t-1)/t · S from each GPU. For b = 1, s = 2,048, h = 12,288 (GPT-3's), t = 8 and
# 2 bytes an element: how many MB does one GPU send for a layer in a training step, how long does that take, and what
# share of the layer's time is it
#
# - over NVLink with 900 GB/s, both directions together,
# - over InfiniBand with 400 Gb/s in each direction?
#
# In forward, the layer takes 24·b·s·h² operations for its weights, and 4·b·s²·h for attention, scores and mixing; in
# backward twice as many. The t GPUs share them, and each does 400 TFLOP/s. Latency is left out, and nothing overlaps.
#
# `unit` is "GB/s" or "Gb/s"; `directions` is 2 if the bandwidth counts both directions together, else 1. The answer is
# a tuple: MB (10⁶ bytes), ms, and communication as a share (0 to 1) of communication plus computation.


# %%
# {{tp_traffic}}


# %%
check.tp_traffic(tp_traffic)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with the tensor of one all-reduce: b · s · h elements. Four of them are reduced in a step.
# </details>
# <details><summary>Hint 2</summary>
#
# You need bytes per second in the direction of sending. So divide by 2 if both directions are counted, and divide bits
# by 8.
# </details>
# <details><summary>Hint 3</summary>
#
# Computation takes 3 · (24·b·s·h² + 4·b·s²·h) operations, divided by t · tflops · 10¹² a second.
# </details>
# <details><summary>What if t grows?</summary>
#
# From t = 2 on, the traffic of a GPU at most doubles, because (t-1)/t tends to 1, but its computation shrinks with 1/t.
# So the share grows with t, and a wide layer can use more ranks than a narrow one.
# </details>

# %% [markdown]
# When your function passes, see how many ranks pay on either link.

# %%
LINKS = {"NVLink, 900 GB/s": (900, "GB/s", 2), "InfiniBand, 400 Gb/s": (400, "Gb/s", 1)}
for name, link in LINKS.items():
    shares = [tp_traffic(1, 2048, 12288, t, 2, *link, 400)[2] for t in (2, 4, 8, 16)]
    print(f"{name:<20} t = 2, 4, 8, 16: {', '.join(f'{share:.0%}' for share in shares)}")

# %% [markdown]
# Without overlap a ring cannot do better: this counts bandwidth alone, no latency. (A switch that adds needs less,
# lesson 03.) It is why tensor parallelism stays inside the node.

# %% [markdown]
# ---
# ## Exercise 5 · A norm on a part of the sequence
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 35 | 09, Sequence parallelism (8, 13) | no more bytes than all-reduces, but for the gain's gradient |
#
# Between the parallel layers every rank computes the same norm of the same tokens, and keeps the same activations. In
# **sequence parallelism** each rank has s/t of the tokens there. Around the MLP, an all-gather replaces f and a
# reduce-scatter replaces g. Together they send as much as one all-reduce. (The ledger shows the size S twice, but each
# of the two sends (t-1)/t · S, and an all-reduce sends 2(t-1)/t · S.)
#
# In backward each turns into the other: the gradient of an all-gather is a reduce-scatter, and the gradient of a
# reduce-scatter is an all-gather. The sequence is the first dimension here, so that its parts follow each other in
# memory. `sequence_parallel_norm` gets
#
# - `x` of shape (s/t, b, h): part r of the sequence on rank r;
# - `gain` of shape (h): the weight of the norm `F.rms_norm(x, x.shape[-1:], gain)`, whole on every rank. After backward
#   every rank has its whole gradient, over all tokens;
# - `up` and `down` of shapes (m, h) and (h, m): this rank's inner features, as in Exercise 1, without biases,
#
# and returns GELU(norm(x) Upᵀ) Downᵀ of this rank's tokens, of shape (s/t, b, h). No rank norms the tokens of others.


# %%
# {{gathered}}


# {{scattered}}


# {{sequence_parallel_norm}}


# %%
check.sequence_parallel_norm(sequence_parallel_norm)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The order is norm, all-gather, MLP, reduce-scatter. `dist.all_gather_single(whole, part)` and
# `dist.reduce_scatter_single(part, whole)` work along the first dimension.
# </details>
# <details><summary>Hint 2</summary>
#
# `with_backward(gathered, scattered)` is the way in, and the way out has the two the other way round.
# </details>
# <details><summary>Hint 3</summary>
#
# Every rank uses the whole gain for its own tokens. So its gradient is a sum over the ranks, and this is what f
# does: `f(gain)`.
# </details>
# <details><summary>What is gained, if as many bytes travel?</summary>
#
# Memory: what norm and residual keep for backward is 1/t. Also time, because no rank repeats what others do. The
# gathered tokens are still kept whole here, for the gradient of Up; gathered a second time in backward, they need not
# be.
# </details>
