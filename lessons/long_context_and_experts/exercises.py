# %% [markdown]
# # Exercises 11 · How do I split a long sequence, and many experts?
#
# Eight exercises on [11 long context and experts](../notebooks/11_long_context_and_experts.ipynb). The first four split
# a sequence, the next two split experts, and two are on paper. All of them take about 215 minutes.
# **If you do only these:** 1, 3 and 5.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | the merge of two pieces of attention | 2 of 5 | 20 |
# | 2 | which tokens a rank holds, so that all have equal work | 2 of 5 | 15 |
# | 3 | causal ring attention | 3 of 5 | 35 |
# | 4 | Ulysses with few KV heads | 3 of 5 | 35 |
# | 5 | tokens to experts and back, with a capacity | 4 of 5 | 45 |
# | 6 | a router that balances its experts by a bias | 3 of 5 | 30 |
# | 7 | when a ring hides its messages, on paper | 2 of 5 | 20 |
# | 8 | the bytes of expert parallelism, on paper | 2 of 5 | 15 |
#
# Exercise 3 uses `piece` and `merge` of Exercise 1, and Exercise 5 uses the given cell of Exercise 4. Otherwise each
# stands alone. *Follows* on each card names the section of the lesson to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in
# [the solutions notebook](../solutions/11_long_context_and_experts_solutions.ipynb).
#
# **What a check does.** In Exercises 3 to 6 it runs your function on 1 to 4 real ranks, and the same layer in one
# process. Outputs have to agree, and gradients where there are any. Then it reads the ledger of each rank, and counts
# calls and bytes. If ranks wait for each other, it stops them and shows where each one stood.

# %% tags=["parameters"]
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_utils import launch
from lessons.long_context_and_experts import check

# %% [markdown]
# ---
# ## Exercise 1 · Merge two pieces of attention
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 20 | 11, Softmax in pieces |
#
# Attention to some of the keys gives a piece, which consists of three tensors. For each query they hold
#
# - m, the largest score;
# - l, the sum of exp(score − m) over these keys;
# - o, the sum of exp(score − m) · v over these keys, which is not yet divided by l.
#
# Make one piece out of two over different keys, as if the keys had never been split. Scores may be in the thousands,
# but nothing may overflow. A query may see no key at all. Then its m is −inf, and l and o are 0. Unlike the `piece` of
# the lesson, this one does not clamp m, so `merge` has to cope with −inf, in one of the pieces or in both.
#
# The next cell computes a piece, for your tests. Exercise 3 uses it, too.


# %%
# {{piece}}


# %%
Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# {{merge}}


# %%
check.merge(merge)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The new m is the larger one of the two, query by query. What do l and o become if their m is replaced by a larger one?
# </details>
# <details><summary>Hint 2</summary>
#
# exp(score − m) = exp(score − m1) · exp(m1 − m). So both sums of the first piece are multiplied by exp(m1 − m), those
# of the second by exp(m2 − m).
# </details>
# <details><summary>Hint 3</summary>
#
# If both are −inf, m1 − m is −inf − (−inf), which is nan. Subtract 0 in place of −inf:
# `m.masked_fill(m == -torch.inf, 0)`.
# </details>

# %% [markdown]
# ---
# ## Exercise 2 · Zig-zag
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 15 | 11, A ring in balance | the same number of pairs on each rank |
#
# In causal attention a token at position p attends to p + 1 tokens, so late tokens are more work. Cut the sequence
# into 2N runs of consecutive tokens, whose lengths differ by 1 at most. Rank r takes the r-th run from the start and
# the r-th from the end. The lesson does this for multiples of 2N; write it for any number of tokens.


# %%
# {{zigzag}}


# %%
check.zigzag(zigzag)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `torch.arange(length)` holds all positions. Cut it into 2 · n runs and pair them.
# </details>
# <details><summary>Hint 2</summary>
#
# `chunk(8)` of 10 tokens makes 5 runs of 2. Which method makes exactly as many runs as you ask for?
# </details>
# <details><summary>Hint 3</summary>
#
# `tensor_split(2 * n)`, then `torch.cat` of run r and run 2 · n − 1 − r.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · Causal ring attention
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 35 | 11, Ring attention; A ring in balance | K, V and positions sent N − 1 times, to one neighbour |
#
# Write forward of ring attention, with two things that the lesson's version does not have:
#
# - A rank does not know which tokens the others hold, only the positions of its own. So the positions travel round the
#   ring with K and V. All ranks have the same number of tokens, but these may be any tokens of the sequence.
# - There may be fewer KV heads than heads: `heads // kv_heads` consecutive heads use the same KV head. So a rank
#   computes with more heads than it has to send.
#
# A query at position p sees the keys at positions up to p. The check needs no gradients. Use `piece` and `merge` of
# Exercise 1. If you skipped that exercise, copy `merge` of the lesson into a cell. It is enough here, because the first
# piece has a key for each query.
#
# The next cell is given. It starts to send tensors to the next rank, and to receive those of the rank before. What
# arrives may be read when each entry of the list `work` has been waited for.


# %%
# {{pass_on}}


# %%
# {{ring_attention}}


# %%
check.ring_attention(ring_attention)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In step 0 a rank uses its own block, and in step i the block of the rank that is i places before it. That makes N
# blocks to use and N − 1 to receive.
# </details>
# <details><summary>Hint 2</summary>
#
# Whether a query sees a key is decided by their positions in the whole sequence:
# `positions[:, None] >= positions_of_the_block`.
# </details>
# <details><summary>Hint 3</summary>
#
# Send K and V as they are, and repeat the heads just before `piece`: `t.repeat_interleave(heads // kv_heads, dim=1)`.
# Divide o by l once, at the end.
# </details>

# %% [markdown]
# ---
# ## Exercise 4 · Ulysses with few KV heads
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 35 | 11, All-to-all, or gather: Ulysses and K/V | 4 all-to-alls in forward, 4 in backward |
#
# Rank r holds the r-th part of the sequence, with all heads. After all-to-alls of q, k and v each rank holds all
# tokens, with some consecutive heads. Causal attention is local there, and one more all-to-all brings the output back.
#
# In the lesson, KV heads are repeated if there are fewer than ranks. That is not enough for 3 KV heads on 2 ranks.
# Write it for any number of them. `heads` is a multiple of the number of ranks and of `kv_heads`, and
# `heads // kv_heads` consecutive heads use the same KV head. Copy each KV head as often as necessary, but not more
# often, because all copies are sent.
#
# The next two cells are given. `exchange` sends rows, a number of its own to each rank, and in backward it sends the
# gradients the opposite way. The second cell shows it at work: rank 0 keeps a row and sends two to rank 1. **Predict**
# what both ranks return.


# %%
# {{AllToAll}}


# {{exchange}}


# %%
def try_exchange():
    rank = dist.get_rank()
    send, recv = [([1, 2], [1, 0]), ([0, 3], [2, 3])][rank]
    rows = 10 * rank + torch.arange(3)
    return exchange(rows, send, recv).tolist()


launch(try_exchange, world_size=2, backend="gloo")


# %%
# {{ulysses}}


# %%
check.ulysses(ulysses)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Stack the N parts that go to N ranks in a new first dimension, and exchange one row with each rank:
# `exchange(torch.stack(x.chunk(n, dim=1)), [1] * n, [1] * n)`.
# </details>
# <details><summary>Hint 2</summary>
#
# What arrives has the parts of the sequence in the order of the ranks: join them along the tokens. On the way back cut
# along the tokens and join along the heads.
# </details>
# <details><summary>Hint 3</summary>
#
# Copy each head until the number of ranks divides them: 3 heads on 2 ranks become 6, `math.lcm(2, 3)`.
# `repeat_interleave(2, dim=1)` keeps copies next to each other, and
# `F.scaled_dot_product_attention(…, enable_gqa=True)` takes fewer KV heads than heads.
# </details>

# %% [markdown]
# ---
# ## Exercise 5 · Tokens to experts, and back
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 4 of 5 | 45 | 11, Many experts: dispatch and combine; Full experts and idle ranks | 3 all-to-alls, 2 in backward |
#
# Of the E experts in a layer, each of N ranks has E/N: rank r has those from number r · E/N on. A router has chosen k
# experts for each token. Send a copy of the token to each of them, let them compute, send the results back, and add
# them up with the weights of the router. Ranks may have different numbers of tokens, and a rank or an expert may have
# none.
#
# With a capacity, an expert takes at most so many copies *from each rank*, those of the first tokens. A copy that is
# dropped is not sent, and adds nothing.
#
# `exchange` of Exercise 4 sends the rows: run its cell first. The counts need no gradient, so `dist.all_to_all_single`
# can exchange them.


# %%
# {{expert_layer}}


# %%
check.expert_layer(expert_layer)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Number the copies: copy c belongs to token c // k. If they are sorted by expert, they are sorted by rank, too. First
# exchange how many copies there are for each expert.
# </details>
# <details><summary>Hint 2</summary>
#
# Rows arrive sorted by rank, and by expert only within a rank. From the counts you know which expert each row is for:
# `repeat_interleave` writes it out. The results go back in the order in which the rows came.
# </details>
# <details><summary>Hint 3</summary>
#
# With `flat = chosen.flatten()`, `(flat == e).nonzero()[:capacity, 0]` has the copies that expert e takes. In the end
# `index_add` adds each result times its weight to its token.
# </details>

# %% [markdown]
# ---
# ## Exercise 6 · A bias instead of a loss
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 30 | 11, Auxiliary loss against bias | two all-reduces |
#
# DeepSeek-V3 balances its experts by a bias for each of them, which is added to the scores for the *choice* only. Write
# one step of such a router, on ranks with different tokens and the same gate:
#
# - The scores are sigmoid(x · gate). The `top_k` experts with the largest score plus bias are chosen.
# - Their weights are their scores, divided by the sum of the scores of the chosen.
# - `use(chosen, weights)` returns the loss. Its gradient has to be that of the tokens of all ranks.
# - After that, the bias of an expert grows by `rate` if its load is below the mean, and falls by `rate` if it is above.
#   The load of an expert counts how often the tokens of all ranks have chosen it.


# %%
# {{balanced_step}}


# %%
check.balanced_step(balanced_step)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `(scores + bias).topk(top_k, dim=1).indices` chooses. `scores.gather(1, chosen)` reads the scores of the chosen,
# without the bias.
# </details>
# <details><summary>Hint 2</summary>
#
# A rank sees its own tokens only. Two things have to be added up over the ranks: the gradient of the gate, and how
# often each expert was chosen.
# </details>
# <details><summary>Hint 3</summary>
#
# `torch.bincount(chosen.flatten(), minlength=len(bias))` counts. `torch.sign(load.mean() - load)` is +1 for an expert
# that has too little to do.
# </details>

# %% [markdown]
# ---
# ## Exercise 7 · When does the ring hide?
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 20 | 11, When does the ring hide? |
#
# A rank computes the attention of its c tokens to a block of c keys while the next K and V arrive. If computing takes
# longer, the messages cost no time. Attention consists of two matrix products. Each costs 2 FLOP for each pair of a
# query and a key, for each head and each of its d elements. With zig-zag and causal attention half of the pairs of a
# step are masked, and a good kernel leaves them out.
#
# Take 4,096 tokens on each rank, 32 heads and 8 KV heads of 128 elements of 2 bytes, 989 TFLOP/s (an H100's peak in
# BF16) and a link of 400 Gb/s. How long does a rank compute in one step of the ring, and how long do K and V take? How
# many tokens must a rank have at least, so that the ring hides its messages?


# %%
# {{ring_hides}}


# %%
check.ring_hides(ring_hides)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Computing: pairs · heads · d · 4 FLOP. What moves: K and V of c tokens, with the KV heads only.
# </details>
# <details><summary>Hint 2</summary>
#
# Computing grows with c², moving with c. So their ratio grows with c.
# </details>
# <details><summary>Hint 3</summary>
#
# At c tokens moving takes moving / computing times as long. At c · moving / computing tokens they take equally long.
# </details>

# %% [markdown]
# ---
# ## Exercise 8 · The bytes of experts
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 15 | 11, Experts in the mesh |
#
# [DeepEP](https://github.com/deepseek-ai/DeepEP) sends copies of tokens to experts in FP8, which takes 1 byte an
# element and a scale of 4 bytes for every 128 elements. It brings the results back in BF16. Its authors publish how
# long this takes for 128 tokens of 7,168 elements on each of 64 ranks, with 8 experts a token: 173 µs to the experts
# and 314 µs back. What bandwidth is that for a rank, each way? Count every copy.
#
# In the training of DeepSeek-V3 the experts of a token lie on 4 nodes at most. One copy goes to each of these nodes,
# and is copied again inside it. How many MB does a rank send between nodes on the way to the experts, at most?


# %%
# {{expert_traffic}}


# %%
check.expert_traffic(expert_traffic)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A token in FP8 with its scales takes 7,392 bytes, and in BF16 14,336.
# </details>
# <details><summary>Hint 2</summary>
#
# Each token is sent once for each of its experts, and each expert sends a result back.
# </details>
# <details><summary>Hint 3</summary>
#
# With 8 experts on 4 nodes, 4 copies cross. With 2 experts it cannot be more than 2.
# </details>
