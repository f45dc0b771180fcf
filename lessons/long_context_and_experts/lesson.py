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
# # How do I split a long sequence, and many experts?
#
# Meta put one prompt of a million tokens through Llama 3 405B in 77 seconds, on 128 H100s, with 93 % parallel
# efficiency (*recorded*, [arXiv 2411.01783](https://arxiv.org/abs/2411.01783)). Data parallelism cannot divide a
# sequence, and tensor parallelism ends where the heads end. So its tokens were divided, although in attention every
# token looks at all before it.
#
# **You will be able to**
# - *compute* what a long sequence takes;
# - *write* ring attention, forward and backward, and *balance* it;
# - *choose* between a ring, Ulysses and gathering K and V by numbers;
# - *write* dispatch and combine of a mixture of experts, equal to the dense model.
#
# **Before this:** [02 collectives](02_collectives.ipynb), [09 tensor parallel](09_tensor_parallel.ipynb). **Time:**
# about 45 minutes to read the core, 85 with the deeper sections, under a minute to run.

# %% [markdown]
# Imports and parameters:

# %% tags=["parameters"]
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_utils import WorkerError, attempt, device, launch, record
from course_utils.hardware import GPUS, LINKS
from course_utils.models import PUBLISHED
from course_utils.predictions import predict, predictions
from course_utils.units import decimal_bytes
from lessons.long_context_and_experts import context_parallel as cp
from lessons.long_context_and_experts import experts as ep
from lessons.long_context_and_experts import figures
from lessons.long_context_and_experts.equality import try_attention, try_experts
from lessons.long_context_and_experts.explorer import context_explorer

world_size = 4  # ranks, 2 or more
tokens_per_rank = 16  # of a sequence; an even number

# %% [markdown]
# `try_attention` and `try_experts` run our versions beside one process that has all tokens. They return the largest
# `error` of output and gradients, and the ledgers of both passes.
#
# ## 1. Why a long sequence does not fit
#
# Four things grow with the T tokens of a sequence. Attention compares each token with each other one, which makes T²
# **scores** in every head. The **KV cache** holds keys and values of all tokens for generation. Training keeps
# **activations** for backward, 34 T h bytes a layer of a GPT without the scores (lesson 09; h is the width), and more
# in a Llama: 7 GiB for 32,768 tokens, which is 56 T h (*recorded*,
# [ml-engineering](https://github.com/stas00/ml-engineering)). We count 34 T h. And at the end stand the **logits**, a
# number in fp32 for each token and each of V words.

# %%
llama, million = PUBLISHED["Llama 3 8B"], 1_000_000
layer, inputs = 34 * million * llama.hidden, 2 * million * llama.hidden
print("scores of a head", decimal_bytes(2 * million**2))
print("KV cache", decimal_bytes(2 * 2 * llama.layers * million * llama.kv_width))
print("activations of a layer", decimal_bytes(layer))

# %% [markdown]
# At a million tokens the scores of *one head* are 2 TB in bf16 (*modelled*). Fused attention (FlashAttention) never
# writes the scores: on one H200, 4 sequences of 4,096 tokens and 32 heads took 1.1 GB in place of 35.3 (*recorded*,
# `gpu-check`). Checkpointing keeps only the input of each layer, 2 T h bytes, and computes one layer again at a time.
#
# **Predict**: with both, and one sequence of a million tokens, what takes the most?

# %%
parts = ["the inputs of 32 layers", "one layer computed again", "the logits"]
largest = predict("takes the most at a million tokens", parts)

# %%
per_token = 4 * llama.vocabulary  # bytes of logits
sizes = llama.layers * inputs, layer, million * per_token
for part, size in zip(parts, sizes, strict=True):
    print(f"{part:26} {decimal_bytes(size):>7}")

# %% jupyter={"source_hidden": true}
assert sizes[2] > sizes[0] + sizes[1]
largest.compare(parts[2])

# %% [markdown]
# **Compare.** The logits: a million tokens times 128,256 words are 513 GB, more than all layers keep together.
#
# A **loss in chunks** computes logits, loss and gradients of a few thousand tokens, and only then of the next ones.
# `F.linear_cross_entropy` of PyTorch 2.13 does so when it is given `options`, and Liger has a fused kernel for it.
# Tensor parallelism with sequence parallelism divides what is left by t, here at most 8, the KV heads of Llama.

# %%
kept, chunk = llama.layers * inputs + layer, 8192 * per_token
left = {
    "fused attention, checkpointing": kept + million * per_token,
    "  + loss in chunks of 8,192": kept + chunk,
    "  + TP 8 with sequence parallelism": (kept + chunk) / 8,
    "  + context parallelism over 8": (kept + chunk) / 8 / 8,
}
for name, size in left.items():
    print(f"{name:36}{decimal_bytes(size):>8}")
work = 2 * million * llama.hidden / (2 * llama.layer_weights)
print(f"attention computes {work:.0f} times as much as the matrices of the layer")

# %% [markdown]
# Before the last line 51 GB remain, on a GPU of 80 GB that has the model too. And fused attention removes the scores,
# but not the *work*, which is 19 times that of all matrices here. **Context parallelism** divides both, and the logits
# as well. Each rank holds T/N of the tokens, in every layer. Norms, MLPs and projections treat each token alone. Only
# attention needs keys and values that are elsewhere.

# %% [markdown]
# ## 2. Softmax in pieces
#
# Softmax divides by a sum over all keys, so it seems to need all keys at once. It does not. Suppose a query has seen
# some of the keys. Remember three things: the largest score m, the sum l of exp(score − m), and the output o that is
# not yet divided by l. Another piece of the keys gives another three. Each is relative to its own maximum, so before
# they are added, they are multiplied by exp(own m − common m). This **online softmax**, known from FlashAttention,
# makes attention a sum that can be computed in any order and on any rank.


# %%
def piece(q, k, v, keep):
    """Attention of queries to some keys: (m, l, o). `keep` says which pairs the mask leaves."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~keep, -torch.inf)
    m = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    p = torch.exp(scores - m)
    return m, p.sum(-1, keepdim=True), p @ v


def merge(a, b):
    """Two pieces as one."""
    (m_a, l_a, o_a), (m_b, l_b, o_b) = a, b
    m = torch.maximum(m_a, m_b)
    f_a, f_b = torch.exp(m_a - m), torch.exp(m_b - m)
    return m, f_a * l_a + f_b * l_b, f_a * o_a + f_b * o_b


def finish(total):
    """Output and log-sum-exp of each query, once all pieces are merged."""
    m, sums, o = total
    return o / sums, m + sums.log()


# %% [markdown]
# With three pieces it gives what one gives. Under a causal mask an early query sees no key at all of a late piece; look
# at its m, l and o there.

# %%
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
causal = torch.ones(12, 12, dtype=torch.bool).tril()
total = None
for keys in torch.arange(12).chunk(3):
    part = piece(q, k[:, :, keys], v[:, :, keys], causal[:, keys])
    total = part if total is None else merge(total, part)
out, _ = finish(total)
assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
print("query 0 in the last piece:", *(f"{x[0, 0, 0, 0]:.3g}" for x in part))

# %% [markdown]
# l and o are 0, so the piece adds nothing. Without the clamp m would be −∞, and exp(−∞ − (−∞)) is NaN. This fault shows
# only where a query loses a whole piece. (For bf16 inputs m, l and o stay in fp32, since every merge rounds them anew.)

# %% [markdown]
# ## 3. Ring attention
#
# Now the pieces lie on ranks. Each rank keeps its queries, and K and V move: in each of N steps a rank attends to the
# block that it has, and meanwhile sends it to the next rank and receives one from the rank before (Liu et al. 2023).
# After N steps each query has met every key, and no rank has held more than two blocks.


# %%
def pass_on(tensors, group=None):
    """Send to the next rank, receive from the one before; what arrives, and work to wait for."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    arrive = [torch.empty_like(t) for t in tensors]
    ops = []
    for sent, received in zip(tensors, arrive, strict=True):
        ops.append(dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % n))
        ops.append(dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % n))
    return arrive, dist.batch_isend_irecv(ops)


def wait(work):
    for request in work:
        request.wait()


# %% [markdown]
# Backward goes round as well. To keep all softmax weights would be to keep T² scores, so it computes them again, block
# by block. Forward keeps the **log-sum-exp** of each query, m + log l, and with it the final weight is exp(score − (m +
# log l)) at once, with no merging. The gradient of a query stays with it. Those of K and V travel with their block:
# each rank adds its share, and after N passes they are at home.
#
# `order[r]` has the positions of rank r's tokens, from which each rank knows the mask of each step. Backward is folded
# away, a loop with five products in place of two. K and V travel while it computes, but the gradients only afterwards;
# a faster ring hides them too, a step later.


# %%
def keep_at(order, step, group=None):
    """The pairs that the causal mask leaves in a step, when the block of rank - step is here."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    queries, keys = order[rank], order[(rank - step) % n]
    return queries[:, None] >= keys


def ring_forward(q, k, v, order, pairs, group=None):
    """Output and log-sum-exp of this rank's queries; `pairs` gets the pairs of each step."""
    n, total, block = dist.get_world_size(group), None, [k, v]
    for step in range(n):
        if step < n - 1:
            arrive, work = pass_on(block, group)  # travels while we compute
        keep = keep_at(order, step, group)
        pairs.append(int(keep.sum()))
        if keep.any():
            part = piece(q, *block, keep.to(q.device))
            total = part if total is None else merge(total, part)
        if step < n - 1:
            wait(work)
            block = arrive
    return finish(total)


# %% jupyter={"source_hidden": true}
def ring_backward(q, k, v, out, lse, grad, order, group=None):
    """Gradients of this rank's q, k and v."""
    n, scale = dist.get_world_size(group), q.shape[-1] ** -0.5
    delta = (grad * out).sum(-1, keepdim=True)  # from softmax's derivative
    dq, block, sums = torch.zeros_like(q), [k, v], [torch.zeros_like(k), torch.zeros_like(v)]
    for step in range(n):
        if step < n - 1:
            arrive, work = pass_on(block, group)  # travels while we compute
        (k, v), keep = block, keep_at(order, step, group).to(q.device)
        scores = (q @ k.mT * scale).masked_fill(~keep, -torch.inf)
        p = torch.exp(scores - lse)
        ds = p * (grad @ v.mT - delta) * scale
        dq += ds @ k
        sums = [sums[0] + ds.mT @ q, sums[1] + p.mT @ grad]
        sums, travel = pass_on(sums, group)
        wait(travel)
        if step < n - 1:
            wait(work)
            block = arrive
    return dq, *sums


# %% [markdown]
# An autograd function joins the two.


# %%
class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, order, pairs, group=None):
        out, lse = ring_forward(q, k, v, order, pairs, group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.order, ctx.group = order, group
        return out

    @staticmethod
    def backward(ctx, grad):
        found = ring_backward(*ctx.saved_tensors, grad.contiguous(), ctx.order, ctx.group)
        return *found, None, None, None


# %% [markdown]
# **Predict**: a rank has K and V of 16 tokens, in 2 sequences with 4 heads of 16 numbers in fp32, so 8,192 bytes each.
# With four ranks, how many such tensors does it send in forward, and in backward?

# %%
backward_blocks = predict("sent in backward, with four ranks", unit="tensors")


# %%
def try_ring(order):
    pairs = []
    return try_attention(lambda *qkv: RingAttention.apply(*qkv, order, pairs), order), pairs


length = tokens_per_rank * world_size
contiguous = list(torch.arange(length).chunk(world_size))
found = launch(try_ring, contiguous, world_size=world_size)
trial, _ = found[0]
print(f"bytes sent: forward {trial.forward.sent:,}, backward {trial.backward.sent:,}")

# %% jupyter={"source_hidden": true}
assert max(trial.error for trial, _ in found) < 1e-5
predicted = cp.ring_bytes(2 * tokens_per_rank, 4 * 16, world_size, element=4)
assert (trial.forward.sent, trial.backward.sent) == predicted
backward_blocks.compare(trial.backward.sent / (2 * tokens_per_rank * 4 * 16 * 4))

# %% [markdown]
# **Compare.** With four ranks forward passes K and V on three times, 6 × 8,192 bytes. Backward passes them three times
# again, and two gradients four times: 14 × 8,192.
#
# Output and gradients of q, k and v equal those of one process.

# %% [markdown]
# ## 4. A ring in balance
#
# The bytes are equal on all ranks, but is the work? Under a causal mask the first tokens see little and the last ones
# see everything, so the work of a rank depends on *which* tokens it holds. So far these were neighbours. **Zig-zag**
# cuts the sequence into 2N runs and gives rank r the r-th from the start and the r-th from the end. **Striped** deals
# the tokens out like cards.


# %%
def zigzag(length, n):
    runs = torch.arange(length).chunk(2 * n)
    return [torch.cat([runs[r], runs[2 * n - 1 - r]]) for r in range(n)]


def striped(length, n):
    return [torch.arange(r, length, n) for r in range(n)]


def all_orders(length):
    runs = list(torch.arange(length).chunk(n))
    return {"contiguous": runs, "zig-zag": zigzag(length, n), "striped": striped(length, n)}


n = world_size
figures.mask_picture(all_orders(2 * n), "modelled: who computes which pair, and in which step")

# %% [markdown]
# *The figure: three triangles of pairs, two tokens for each rank. A row has the colour of the rank that holds the
# query, and a pair the number of the ring's step. Contiguous: the last rank has the two longest rows. Zig-zag: each
# rank has a short and a long row. Striped: the colours alternate.*
#
# A step lasts until its slowest rank is done, so the rank with the most pairs counts.
#
# **Predict** for 64 tokens on 4 ranks: how many of the 2,080 pairs has the last rank with contiguous tokens, and each
# rank with zig-zag? And what does the balance cost in bytes?

# %%
pairs_of_last = predict("the last rank, contiguous", unit="pairs")

# %%
orders, most, all_pairs, errors = all_orders(length), {}, {}, {}
for name, order in orders.items():
    found = launch(try_ring, order, world_size=n)
    counted = [sum(pairs) for _, pairs in found]
    all_pairs[name], errors[name] = counted, max(trial.error for trial, _ in found)
    most[name], trial = max(counted), found[0][0]
    print(f"{name:11} pairs {counted}, bytes {trial.forward.sent + trial.backward.sent:,}")

# %% jupyter={"source_hidden": true}
assert all(all_pairs[name] == cp.pairs_per_rank(length, n, name) for name in orders)
assert max(errors.values()) < 1e-5
assert most["contiguous"] / most["zig-zag"] > 2 - 1 / n - 0.1
pairs_of_last.compare(most["contiguous"])

# %% [markdown]
# **Compare.** 904 against 520 pairs with four ranks, 1.74 times, and not one byte more.
#
# For long sequences the factor is 2 − 1/N: almost half of a contiguous ring is waiting. (Fused kernels skip masked
# pairs, `piece` does not.)

# %% [markdown]
# ## 5. When does the ring hide?
#
# The next block travels while this one is computed, so communication is free as long as computing takes longer. In a
# step c queries meet c keys. Scores and mixing are 4c²h FLOPs; K and V of the block are 4ch bytes in bf16. Long blocks
# hide better, because FLOPs grow with c² and bytes with c:
#
# $$\frac{4c^2h}{\text{FLOP/s}} \ge \frac{4ch}{\text{bytes/s}} \quad\Longleftrightarrow\quad c \ge
# \frac{\text{FLOP/s}}{\text{bytes/s}}$$
#
# With **grouped queries** (GQA) g query heads share one KV head, so bytes, and the length that is needed, are g times
# fewer.
#
# **Predict**: how many tokens must a rank have on A100s with NVLink (312 TFLOP/s, 300 GB/s)? And on H100s that reach
# each other over one 400 Gb/s port, with g = 8?

# %%
needed_tokens = predict("needed on A100s with NVLink", unit="tokens a rank")

# %%
links = {
    "A100, NVLink": ("a100", "nvlink3"), "A100, 100 Gb/s port": ("a100", "ib_edr"),
    "H100, NVLink": ("h100", "nvlink4"), "H100, 400 Gb/s port": ("h100", "ib_ndr"),
}  # fmt: skip
for name, (gpu, link) in links.items():
    rates = GPUS[gpu].flops["bf16"], LINKS[link].bandwidth
    alone, grouped = (cp.overlap_tokens(*rates, queries_per_key=g) for g in (1, 8))
    print(f"{name:20} {alone:7,.0f} tokens a rank, with 8 queries to a key {grouped:6,.0f}")

# %% jupyter={"source_hidden": true}
assert round(alone, -2) == 19_800 and round(grouped, -2) == 2_500
needed_tokens.compare(cp.overlap_tokens(GPUS["a100"].flops["bf16"], LINKS["nvlink3"].bandwidth))

# %% [markdown]
# **Compare.** About 1,000 inside a node of A100s, 25,000 over a slow port, and 2,500 with GQA over a fast one
# (*modelled*, at the peak).
#
# A balanced causal ring computes half of each block, which doubles the need, and a kernel is
# slower than the peak, which lowers it: FlashAttention-2 reaches 35 % on an H100 (*recorded*, Shah et al. 2024), and
# cuDNN's attention 636 TFLOP/s on an H200 with 16,384 tokens, but 306 with 512 (*recorded*, `gpu-check`).

# %%
peak, port = GPUS["h100"].flops["bf16"], LINKS["ib_ndr"].bandwidth
for kernel, rate in (("FlashAttention-2", 0.35 * peak), ("cuDNN", 635.8e12)):
    needed = cp.overlap_tokens(rate, port, causal=True)
    print(f"{kernel:16} causal, H100, 400 Gb/s port: {needed:6,.0f} tokens a rank")

# %% [markdown]
# So a good kernel needs *more* tokens than the formula says, and a ring's small blocks make it slower.

# %% [markdown]
# ## 6. All-to-all, or gather: Ulysses and K/V
#
# **Ulysses** (Jacobs et al. 2023) uses that attention treats every *head* alone. An all-to-all turns some tokens with
# all heads into all tokens with some heads. Then attention is local, with any fast kernel, and another all-to-all turns
# back. Our autograd function also takes uneven numbers of rows, as the experts need. Its
# backward is an all-to-all with the two lists swapped.


# %%
class AllToAll(torch.autograd.Function):
    """Rows to each rank, `send` many, and `recv` many from each; without lists, equally many."""

    @staticmethod
    def forward(ctx, x, send=None, recv=None, group=None):
        ctx.options = send, recv, group
        out = x.new_empty(sum(recv) if recv else len(x), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), recv, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, recv, group = ctx.options
        return AllToAll.apply(grad, recv, send, group), None, None, None


# %%
def swap(x, scatter, gather):
    """Split one dimension among the ranks, and collect another from them."""
    pieces = x.unflatten(scatter, (dist.get_world_size(), -1)).movedim(scatter, 0)
    return torch.cat([*AllToAll.apply(pieces)], gather)


def ulysses(q, k, v):
    """q, k and v (batch, heads, tokens of this rank, size), contiguous tokens."""
    q, k, v = (swap(x, scatter=1, gather=2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return swap(out, scatter=2, gather=1)


# %%
def try_ulysses(attend, heads, kv_heads):
    return try_attention(attend, contiguous, heads, kv_heads)


trial = launch(try_ulysses, ulysses, n, n, world_size=n)[0]
print(*(f"{entry.op} {entry.bytes:,}" for entry in trial.forward), sep="\n")
assert trial.error < 1e-5

# %% [markdown]
# Four all-to-alls, three in and one out, and all ranks compute equally many pairs, although tokens are contiguous.
#
# **Predict**: what happens with a model that has half as many KV heads as there are ranks?

# %%
ends = ["the same result", "a wrong result", "an error", "a hang"]
with_few = predict("Ulysses with too few KV heads", ends)

# %%
few = max(1, n // 2)
with attempt() as outcome:
    launch(try_ulysses, ulysses, n, few, world_size=n)

# %% jupyter={"source_hidden": true}
assert isinstance(outcome.error, WorkerError)
with_few.compare(ends[2])

# %% [markdown]
# **Compare.** An error: *the KV heads limit the degree of Ulysses*, and Llama 3 has 8.
#
# Without `unflatten` gloo would divide the numbers anyway, and return wrong results without a word (measured, PyTorch
# 2.13). The remedy is to repeat KV heads until each rank has one (exercise 4).


#
# The third way is the shortest: each rank **gathers K and V** of all tokens and attends with its own queries. It holds
# T keys in place of two blocks and hides nothing, but any mask works as if nothing was split. Section 12 runs it. Which
# way sends the least?

# %%
for method in ("ring, zig-zag", "Ulysses", "gather K and V"):
    alone, grouped = (cp.Attention(method, 131_072, 32, kv, ranks=8).sent for kv in (32, 4))
    print(f"{method:15} {decimal_bytes(alone):>7}, with 8 queries to a key", decimal_bytes(grouped))

# %% [markdown]
# With equal heads Ulysses sends 2/N of a ring, because it splits K and V, and a ring passes all of them on. With GQA K
# and V become small, but Q and the output do not, so on N ≤ g ranks a ring sends less; a gather always sends as much.
#
# What is faster? *Recorded* in training, by two projects that had several ways in one program:
#
# | | ring | Ulysses | gather K and V |
# |---|---|---|---|
# | GLM-4.5-Air, 64k tokens, CP 4 on 8 H200, against no CP ([prime-rl #2418][a]) | −32 % | +1 % | |
# | Llama 2 7B, 32k tokens, CP 16 on 64 TPU v5p, seconds a step ([maxtext #4687][b]) | 16.4 | 8.90 | 8.83 |
#
# The ring loses both times, probably by its N small blocks with a merge after each; the others call one kernel. So try
# a gather or Ulysses first, and a ring where KV heads are few and all K and V do not fit.
#
# Try your own case (*modelled*: one layer, forward, at one rate for all blocks, which favours the ring).
#
# [a]: https://github.com/PrimeIntellect-ai/prime-rl/pull/2418
# [b]: https://github.com/AI-Hypercomputer/maxtext/pull/4687

# %%
context_explorer()

# %% [markdown]
# *The figure: on the left the pairs of each rank for the chosen method, on the right a bar for each method with the
# time of computing and the time of communication that is left over.*
#
# ## 7. Many experts: dispatch and combine
#
# In a **mixture of experts** the MLP of a layer exists many times. A **router**, one small matrix, scores all E experts
# for each token. The token goes to the best k of them, and their outputs are added, weighted by the scores. So a model
# has many more parameters, but computes little more for a token. In one process:


# %%
class MoE(nn.Module):
    """Mixture of experts: (tokens, hidden) -> (tokens, hidden)."""

    def __init__(self, hidden, inner, experts, top_k=2):
        super().__init__()
        self.top_k, self.router = top_k, nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / inner**0.5)

    def route(self, x):
        """Weights and numbers of the experts of each token, both (tokens, top_k)."""
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        return weights / weights.sum(-1, keepdim=True), chosen

    def compute(self, rows, expert):  # each row through its expert
        out = torch.zeros_like(rows)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            own = expert == e
            out[own] = F.gelu(rows[own] @ up) @ down
        return out

    def forward(self, x):
        weights, chosen = self.route(x)
        copies = self.compute(x.repeat_interleave(self.top_k, 0), chosen.flatten())
        return (copies.unflatten(0, chosen.shape) * weights[..., None]).sum(1)


# %% [markdown]
# **Expert parallelism** puts E/N of the experts on each rank. The router is small and stays whole everywhere. A rank's
# tokens choose experts anywhere, so copies of them travel there and back. This gives four moves:
#
# 1. **sort** the copies by expert, which also sorts them by rank;
# 2. exchange the **counts**, because nobody can receive without knowing how much;
# 3. **dispatch** the rows, an all-to-all with uneven splits, and compute;
# 4. **combine**: the same all-to-all the other way, then weigh and add.


# %%
class SomeExperts(MoE):
    """This rank's experts of `whole`, which it shares with the other ranks of `group`."""

    def __init__(self, whole, group=None):
        nn.Module.__init__(self)
        self.top_k, self.router, self.group = whole.top_k, copy.deepcopy(whole.router), group
        rank, self.n = dist.get_rank(group), dist.get_world_size(group)
        self.up = nn.Parameter(whole.up.detach().chunk(self.n)[rank].clone())
        self.down = nn.Parameter(whole.down.detach().chunk(self.n)[rank].clone())


# %%
class ParallelMoE(SomeExperts):
    def copies(self, chosen):
        """Which copies are sent, in the order of their experts."""
        return chosen.argsort(stable=True)

    def forward(self, x):
        weights, chosen = self.route(x)
        chosen = chosen.flatten()
        sent = self.copies(chosen)
        token = sent // self.top_k
        counts = torch.bincount(chosen[sent], minlength=self.router.out_features).view(self.n, -1)
        arriving = torch.empty_like(counts)  # from each rank, for each of my experts
        dist.all_to_all_single(arriving, counts, group=self.group)
        send, recv = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = AllToAll.apply(x[token], send, recv, self.group)
        mine = torch.arange(arriving.shape[1], device=x.device).repeat(self.n)
        rows = self.compute(rows, mine.repeat_interleave(arriving.flatten()))
        rows = AllToAll.apply(rows, recv, send, self.group) * weights.flatten()[sent, None]
        self.load, self.dropped = sum(recv), len(chosen) - len(sent)
        return torch.zeros_like(x).index_add(0, token, rows)


# %% [markdown]
# `try_experts` compares the output and the gradients of the input, the router (summed over ranks) and the experts,
# which need no sum, since all their tokens came to them.
#
# **Predict**: a rank has 256 tokens of 32 numbers in fp32, and each goes to two experts. How large is the input of its
# dispatch?

# %%
dispatched = predict("the input of the dispatch", unit="kB")

# %%
torch.manual_seed(7)
moe = MoE(hidden=32, inner=64, experts=2 * n)
tokens = torch.randn(256 * n, 32)
found = launch(try_experts, ParallelMoE, moe, tokens, world_size=n)
trial, _ = found[0]
print(f"rows for the experts of each rank: {[module.load for _, module in found]}")
print(*(f"{entry.op} {entry.bytes:,}" for entry in trial.forward), sep="\n")

# %% jupyter={"source_hidden": true}
assert trial.forward[1].bytes == 256 * moe.top_k * 32 * 4
assert max(trial.error for trial, _ in found) < 1e-3
assert sum(module.load for _, module in found) == 512 * n
dispatched.compare(trial.forward[1].bytes / 1e3)

# %% [markdown]
# **Compare.** 65,536 bytes: every token is sent twice, and about 1/N of the copies stay on the rank.
#
# The counts take a few bytes,
# but everything waits for them: the host must know the splits before it can start the all-to-all. And a rank whose
# experts get no token still enters all three, and two more in backward: its result must depend on what it
# received, or autograd skips those two.
#
# A router has no reason to be fair, though. If one expert is popular, its rank gets more rows, and all others wait in
# the combine. We shift all tokens toward expert 0:

# %%
skewed = tokens + 1.5 * F.normalize(moe.router.weight[0].detach(), dim=0)
found = launch(try_experts, ParallelMoE, moe, skewed, world_size=n)
loads = [module.load for _, module in found]
factor = max(loads) / (sum(loads) / n)
print(f"rows {loads}: the slowest rank has {factor:.2f} times the mean")

# %% [markdown]
# This is the **straggler factor**: the layer takes so many times longer than with an even router, and the activations
# of that rank grow with it, without a limit. Section 9 sets one, and section 10 makes the router even.

# %% [markdown]
# ## 8. What to take to work
#
# These are the switches of [torchtitan](https://github.com/pytorch/torchtitan) (commit b5bcd76, August 2026).
#
# | switch | what it does | here |
# |---|---|---|
# | `context_parallel_degree` | ranks that share a sequence; K and V are gathered, FlexAttention only | 6, 12 |
# | `context_parallel_load_balancer` | `headtail`: zig-zag, the default; `ptrr` for other masks | 4 |
# | `expert_parallel_degree` | ranks that share the experts; it must divide dp_shard · cp · tp | 7, 13 |
# | `moe_comm_backend` of the model | `standard` (all-to-all), `deepep`, `hybridep` or `minimal_async_ep` | 13 |
#
# The last one belongs to the model, the others are options, such as `--parallelism.context_parallel_degree=4`.
# Ulysses came in September 2026 ([#4450](https://github.com/pytorch/torchtitan/pull/4450)); a ring is not there. In
# Megatron Core you choose by `--context-parallel-size` and `--cp-comm-type`: `p2p` (the ring, its default),
# `all_gather`, `a2a` (Ulysses) or `a2a+p2p`.

# %% [markdown] tags=["deeper"]
# ## 9. Full experts and idle ranks · deeper
#
# The classical answer to a full expert is a **capacity**. Each expert takes at most C = f · (tokens · k / E) copies,
# with a capacity factor f of 1 to 2, and what comes later is dropped: the token gets nothing from this expert and keeps
# its residual.


# %% tags=["deeper"]
class CapacityMoE(ParallelMoE):
    """An expert takes at most `capacity` copies from each rank, and the first ones come first."""

    factor = 1.0

    def copies(self, chosen):
        experts = self.router.out_features
        limit = ep.capacity(len(chosen) // self.top_k, experts, self.top_k, self.factor)
        one = F.one_hot(chosen, experts)
        place = (one.cumsum(0) * one).sum(-1)  # 1, 2, 3, ... in the queue of its expert
        order = super().copies(chosen)
        return order[(place <= limit)[order]]


# %% tags=["deeper"]
for given in (2.0, 1.25, 1.0):
    CapacityMoE.factor = given
    kept = [module for _, module in launch(try_experts, CapacityMoE, moe, skewed, world_size=n)]
    loads, dropped = [m.load for m in kept], sum(m.dropped for m in kept) / (512 * n)
    print(f"factor {given:4}: rows {loads}, {dropped:.0%} of copies dropped")

# %% [markdown] tags=["deeper"]
# With factor 1 every expert has room for exactly an even share. A quarter of the copies is dropped,
# and the load is still not even: what is dropped at a full expert does not move to another.
#
# So capacity bounds time and memory, at the
# price of tokens that learn less. The better answer is a router that is even by itself (section 10), and DeepSeek-V3,
# which has one, drops no tokens at all.
#
# A capacity had another use: with equally many rows for each expert, one batched product computes them all. A
# **grouped product** takes uneven groups, sorted by expert, and replaces the loop in `compute`. On a GPU it wants bf16.

# %% tags=["deeper"]
groups = torch.tensor([5, 0, 3, 8])  # rows of each expert
rows_of_all, weights = torch.randn(16, 32), torch.randn(4, 32, 64)
ends_of_groups = groups.cumsum(0, dtype=torch.int32)
together = F.grouped_mm(rows_of_all, weights, offs=ends_of_groups)
one_by_one = [r @ w for r, w in zip(rows_of_all.split(groups.tolist()), weights, strict=True)]
print("equal to a loop:", torch.allclose(together, torch.cat(one_by_one), atol=1e-4))

# %% [markdown] tags=["deeper"]
# ## 10. Auxiliary loss against bias · deeper
#
# How does a router become even? The Switch Transformer (Fedus et al. 2021) adds an **auxiliary loss**, E · Σ fᵢ pᵢ,
# with fᵢ the share of copies that go to expert i, and pᵢ its mean score. It is 1 if all is even. Its gradient pulls the
# router away from popular experts, and also away from what is best for the token. DeepSeek-V3 uses a **bias** for each
# expert instead. It is added to the scores when experts are *chosen*, but it is not in the weight with which their
# outputs count. After each step the bias of a full expert goes down by u and that of others up. No gradient is
# involved.


# %% tags=["deeper"]
def route_with_bias(scores, bias, top_k):
    """Weights and numbers of each token's experts: the bias chooses, it does not weigh."""
    chosen = (scores + bias).topk(top_k).indices
    weights = scores.gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True), chosen


# %% tags=["deeper"]
def balance(method, steps=100, experts=8, top_k=2, u=0.01):
    """Largest load over mean load at each step, of a router that starts skewed."""
    torch.manual_seed(7)
    gate = nn.Linear(32, experts, bias=False).to(device())
    shift = 1.5 * F.normalize(gate.weight[0].detach(), dim=0)
    optimizer = torch.optim.SGD(gate.parameters(), lr=1.0)
    bias = torch.zeros(experts, device=device())
    torch.manual_seed(100 + dist.get_rank())  # each rank has its own tokens
    history = []
    for _ in range(steps):
        scores = gate(torch.randn(256, 32).to(device()) + shift)
        scores = scores.sigmoid() if method == "bias" else scores.softmax(-1)
        _, chosen = route_with_bias(scores, bias, top_k)
        load = torch.bincount(chosen.flatten(), minlength=experts).float()
        dist.all_reduce(load)
        history.append((load.max() / load.mean()).item())
        if method == "bias":
            bias += u * torch.sign(load.mean() - load)
        if method == "auxiliary loss":
            optimizer.zero_grad()
            (experts * (load / load.sum() * scores.mean(0)).sum()).backward()
            dist.all_reduce(gate.weight.grad)
            gate.weight.grad /= dist.get_world_size()
            optimizer.step()
    return history


# %% [markdown] tags=["deeper"]
# **Predict**: which of them is even first, in the first ten steps?

# %% tags=["deeper"]
even_first = predict("even first", ["nothing", "auxiliary loss", "bias"])

# %% tags=["deeper"]
methods = ("nothing", "auxiliary loss", "bias")
curves = {m: launch(balance, m, world_size=n)[0] for m in methods}
figures.load_over_steps(curves, "measured: the fullest of 8 experts, nothing else is learned")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert all(curves[m][0] > 1.5 and max(curves[m][-20:]) < 1.4 for m in methods[1:])
assert min(curves["nothing"]) > 1.5
assert sum(curves["auxiliary loss"][:10]) < sum(curves["bias"][:10])
even_first.compare("auxiliary loss")

# %% [markdown] tags=["deeper"]
# **Compare.** The auxiliary loss, after one or two steps; the bias needs about ten, and without a remedy nothing
# changes.
#
# *The figure: without a remedy the fullest expert has almost three times the mean load for all 100 steps. With the
# auxiliary loss it is near 1 after one or two steps, with the bias after about ten.*
#
# The loss is faster here because it is strong and has no rival: nothing else is learned in this cell. In a real
# training its weight is small, 0.01 in the Switch Transformer. The bias needs no such bargain. DeepSeek-V3 took u =
# 0.001 for 14.3 trillion tokens, then 0, and a sequence-wise loss with a weight of only 0.0001 beside it ([arXiv
# 2412.19437](https://arxiv.org/abs/2412.19437), section 4.2). The bias needs the load over *all* ranks, one small
# all-reduce: with a bias of its own, each rank would choose by a rule of its own, and the ranks would no longer train
# one model. The loss may do without, since gradients are averaged anyway. Megatron Core counts over a micro-batch
# (`aux_loss`), a sequence (`seq_aux_loss`) or all ranks (`global_aux_loss`).

# %% [markdown] tags=["deeper"]
# ## 11. Table 2 of Ring Attention · deeper
#
# The paper prints the condition of section 5 for five machines. One row does not fit its own formula.

# %% tags=["deeper"]
for name, (tflops, gigabytes, printed) in cp.RING_TABLE_2.items():
    needed = cp.overlap_tokens(tflops * 1e12, gigabytes * 1e9) / 1000
    odd = "  does not fit" if abs(needed - printed) > 0.06 else ""
    print(f"{name:17} printed {printed:5.1f}k, computed {needed:6.2f}k tokens a rank{odd}")

# %% [markdown] tags=["deeper"]
# 312 TFLOP/s over 12.5 GB/s are 24,960 tokens, and the paper has 24.5k (*recorded*, [arXiv
# 2310.01889](https://arxiv.org/abs/2310.01889), table 2). A harmless slip, but it shows how easily published figures
# are checked.

# %% [markdown] tags=["deeper"]
# ## 12. Why Llama 3 gathers K and V · deeper
#
# Llama 3 405B was trained at the end with 131,072 tokens, CP 16 and TP 8. It uses zig-zag, and no ring but a gather
# ([arXiv 2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.2). Two reasons are given: masks that separate
# documents stay simple, and with GQA K and V are much smaller than Q.

# %% tags=["deeper"]
big, long, ranks, tp = PUBLISHED["Llama 3 405B"], 131_072, 16, 8
mib = 2**20
both, queries = 2 * 2 * long * big.kv_width, 2 * long * big.hidden
split = cp.Attention("gather K and V", long, big.heads // tp, big.kv_heads // tp, ranks)
print(f"K and V of a layer {both / mib:.0f} MiB, Q {queries / mib:,.0f} MiB")
print(f"a rank sends {split.sent / mib:.0f} MiB: {1e3 * split.sending_seconds:.1f} ms at 50 GB/s")
print(f"attention of a rank: {1e3 * split.compute_seconds:.1f} ms at 400 TFLOP/s")
assert (both / mib, queries / mib, split.sent / mib) == (512, 4096, 60)

# %% [markdown] tags=["deeper"]
# 1.3 ms against 11 ms (*modelled*): a ring would hide little, and compute in 16 smaller pieces. The run reached 380
# TFLOP/s on each GPU with 131,072 tokens, after 400 with 8,192 tokens on the same 16,384 GPUs (*recorded*, table 4).
#
# The first reason, documents: short ones are **packed** into one sequence, and a token sees only its own document.
#
# **Predict**: a half of our sequence is one document, and two more have a quarter each. In which order of tokens is the
# work nearest to even?

# %% tags=["deeper"]
packed = predict("even with packed documents", ["contiguous", "zig-zag", "striped"])

# %% tags=["deeper"]
positions = torch.arange(length)
document = (positions >= length // 2).long() + (positions >= 3 * length // 4)
visible = (positions[:, None] >= positions) & (document[:, None] == document)
uneven = {}
for name, order in orders.items():
    pairs = [int(visible[mine].sum()) for mine in order]
    uneven[name] = max(pairs) / (sum(pairs) / n)
    print(f"{name:11} pairs {pairs}, at most {uneven[name]:.2f} times the mean")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert min(uneven, key=uneven.get) == "striped"
packed.compare("striped")

# %% [markdown] tags=["deeper"]
# **Compare.** Striped, because every rank has a part of every document. Zig-zag balances one document, and not three.
#
# So libraries deal each document out in zig-zag (`_PerDocumentHeadTailLoadBalancer` in PyTorch 2.13) or search for a
# good order (`_PTRRLoadBalancer`). With a gather, any of these masks is applied to local queries and all keys.
#
# The gather itself is short. Its backward sums the gradients of all ranks, a reduce-scatter.


# %% tags=["deeper"]
class Gather(torch.autograd.Function):
    """All ranks' tensors together; backward sums gradients and gives each rank its own."""

    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
        dist.all_gather_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(len(grad) // dist.get_world_size(), *grad.shape[1:])
        dist.reduce_scatter_single(out, grad.contiguous())
        return out


# %% tags=["deeper"]
def gathering(q, k, v):
    k, v = (torch.cat(Gather.apply(x[None]).unbind(), dim=2) for x in (k, v))
    keys = torch.cat(orders["zig-zag"])
    keep = orders["zig-zag"][dist.get_rank()][:, None] >= keys
    return finish(piece(q, k, v, keep.to(device())))[0]


def try_gather():
    return try_attention(gathering, orders["zig-zag"])


trial = launch(try_gather, world_size=n)[0]
print(*(f"{entry.op} {entry.bytes:,}" for entry in [*trial.forward, *trial.backward]), sep="\n")
assert trial.error < 1e-5

# %% [markdown] tags=["deeper"]
# Each all-gather makes 32,768 bytes of 8,192 on each of 4 ranks, so a rank sends three times its own, as in a ring.
#
# PyTorch has a ring in its `context_parallel`, still experimental in 2.13. Zig-zag is its default order, and it passes
# K and V on in two ways. The entry leads to it only from fused kernels of a GPU (`call_maps` in `_attention.py`), so we
# call the ring itself, with the CPU's kernel:


# %% tags=["deeper"]
def library_ring(q, k, v):
    from torch.distributed.tensor.experimental._context_parallel import _attention

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    ring = _attention._templated_ring_attention
    return ring(dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)[0]


def try_library(way):
    from torch.distributed.tensor.experimental._context_parallel import set_rotate_method

    set_rotate_method(way)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, length, 16)
    mine, whole = (
        orders["zig-zag"][dist.get_rank()],
        piece(q, k, v, positions[:, None] >= positions),
    )
    with record() as ledger:
        out = library_ring(*(x[:, :, mine] for x in (q, k, v)))
    return (out - finish(whole)[0][:, :, mine]).abs().max().item(), ledger


# %% tags=["deeper"]
for way in ("allgather", "alltoall"):
    error, ledger = launch(try_library, way, world_size=n, backend="gloo")[0]
    print(f"{way}: equal {error < 1e-5},", [f"{entry.op} {entry.bytes:,}" for entry in ledger])

# %% [markdown] tags=["deeper"]
# It equals one process, forward. Its default gathers K and V in one buffer and computes block by block all the same,
# with a merge after each; `alltoall` passes the blocks on, one all-to-all a step (measured, gloo).

# %% [markdown] tags=["deeper"]
# ## 13. Experts in the mesh · deeper
#
# Where do the ranks of an expert group come from? Not from new GPUs. The ranks that share experts are *data-parallel*
# ranks for everything else: each has its own tokens, and a whole attention. So **EP lies inside DP**, and DP/EP copies
# of each expert are left, among which its gradients are averaged. (torchtitan and Megatron Core can take ranks from CP
# and TP as well.)
#
# DeepSeek-V3 (*recorded*, [arXiv 2412.19437](https://arxiv.org/abs/2412.19437)) has 671 billion parameters, 58 layers
# with 256 experts and a shared one that sees every token, and was trained on 2,048 H800 with PP 16 and EP 64, without
# tensor parallelism.

# %% tags=["deeper"]
v3 = ep.DEEPSEEK_V3
expert = ep.expert_parameters(v3.hidden, v3.inner)
routed = expert * v3.experts * v3.layers
copies = v3.gpus // v3.pp // v3.ep
print(f"an expert {expert / 1e6:.2f}M, all {routed / 1e9:.1f}B, {routed / v3.parameters:.0%}")
print(f"a GPU holds {routed / v3.ep / v3.pp / 1e9:.2f}B; each expert exists {copies} times")

# %% [markdown] tags=["deeper"]
# 97 % of the model are experts. Divided by 64 and 16 they are 0.64B on a GPU, so no tensor parallelism is needed to
# make them fit.
#
# The price is the all-to-all. A token goes to 8 of 256 experts, the experts of a layer lie on 8 nodes, and the links
# between nodes are the slow ones. DeepSeek-V3 sends a token only once to a node, from where NVLink carries it on, and
# lets the router choose among the experts of at most 4 nodes.
#
# **Predict**: how many nodes would 8 of 256 experts be on without this limit, on average?

# %% tags=["deeper"]
on_nodes = predict("8 of 256 experts are on", unit="nodes of 8")

# %% tags=["deeper"]
without = ep.expected_nodes(v3.experts, v3.top_k, v3.nodes)
ways = {"for each expert": v3.top_k, "for each node": without, "at most 4 nodes": v3.most_nodes}
for name, sends in ways.items():
    print(f"{name:15} {sends:.1f} copies of each of 4,096 tokens,", end="")
    for row in ep.DEEPEP_LOW_LATENCY[0], ep.DEEPEP_LOW_LATENCY[2]:
        ms = 1e3 * 4096 * sends * row.token_bytes / LINKS["ib_ndr"].bandwidth
        print(f" {row.name} {ms:4.1f} ms", end="")
    print()

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert 5 < without < 5.5
on_nodes.compare(without)

# %% [markdown] tags=["deeper"]
# **Compare.** 5.3 of 8 nodes, so sending once for each node saves a third, and the limit a quarter more.
#
# (*Modelled*: rows of 7,392 bytes in FP8 with their scales, and of 14,336 in BF16 on the way back; all nodes counted as
# far ones, one 400 Gb/s port.) Every layer pays both in forward and again in backward. DeepSeek hides them behind the
# computation of another micro-batch.
#
# [DeepEP](https://github.com/deepseek-ai/DeepEP) is their library for it. Its first version measured 51 GB/s for this
# dispatch on 64 ranks (*recorded*, docs/legacy.md), which gives the same 2.4 ms. Its second version of 2026 has one
# buffer for training and generation, and publishes more than the port of 50 GB/s carries. Its note says that local
# traffic is counted. Suppose that this is what stays in the node, one copy in as many as there are nodes:

# %% tags=["deeper"]
for nodes, published in ((2, 90), (4, 61)):
    over_port = published * (nodes - 1) / nodes
    print(f"{nodes} nodes of 8: published {published} GB/s, over the port {over_port:.0f} GB/s")

# %% [markdown] tags=["deeper"]
# ## 14. Both in the small GPT · deeper
#
# Now the pieces go into the GPT of this course, on a mesh of data parallelism and an inner dimension. First **CP ×
# DP**: the inner ranks share each sequence. Only two things of the model change: attention is a ring, and positions are
# those that the rank really holds.


# %% tags=["deeper"]
from torch.distributed.device_mesh import init_device_mesh

from course_utils.data import Windows
from course_utils.models import TransformerConfig, build_gpt, next_token_loss

inner = n // 2 if n % 2 == 0 and n > 2 else n
gpt = TransformerConfig(context=16 * n)
windows = Windows("train", gpt.context)


# %% tags=["deeper"]
class RingSelfAttention(nn.Module):
    """The attention of a block, with this rank's tokens: (B, t, C) -> (B, t, C)."""

    def __init__(self, whole, order, group):
        super().__init__()
        self.heads, self.qkv, self.out = whole.heads, whole.qkv, whole.out
        self.order, self.group = order, group

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).contiguous()
        mixed = RingAttention.apply(*parts, self.order, [], self.group)
        return self.out(mixed.transpose(1, 2).flatten(2))


# %% tags=["deeper"]
class SomePositions(nn.Module):
    """The GPT on tokens that stand at some positions of the sequence."""

    def __init__(self, model, positions):
        super().__init__()
        self.model, self.positions = model, positions.to(device())

    def forward(self, tokens):
        x = self.model.embedding(tokens) + self.model.position(self.positions)
        for block in self.model.blocks:
            x = block(x)
        return self.model.head(self.model.norm(x))


# %% [markdown] tags=["deeper"]
# Then **EP × DP**: experts where the MLP was. Every rank has windows of its own, and the inner ranks share the experts.
# Each `make` returns the model of this rank, and which windows and positions of the batch are its own.


# %% tags=["deeper"]
class TokenWise(nn.Module):
    """A mixture of experts as the MLP of a block: (B, T, C) -> (B, T, C)."""

    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    def forward(self, x):
        return self.moe(x.flatten(0, 1)).view_as(x)


def expert_gpt():
    model = build_gpt(gpt)
    torch.manual_seed(1)
    for block in model.blocks:
        block.mlp = TokenWise(MoE(gpt.hidden, gpt.hidden, 2 * n))
    return model


# %% tags=["deeper"]
def cp_dp(mesh):
    group, order = mesh["inner"].get_group(), zigzag(gpt.context, inner)
    model, positions = build_gpt(gpt), order[dist.get_rank(group)]
    for block in model.blocks:
        block.attention = RingSelfAttention(block.attention, order, group)
    return SomePositions(model, positions), rows(n // inner, mesh["dp"].get_local_rank()), positions


def ep_dp(mesh):
    model = expert_gpt()
    for block in model.blocks:
        block.mlp.moe = ParallelMoE(block.mlp.moe, mesh["inner"].get_group())
    return model, rows(n, dist.get_rank()), slice(None)


def rows(parts, index):
    """The windows of one of some parts of the batch."""
    return torch.arange(2 * n).chunk(parts)[index]


# %% [markdown] tags=["deeper"]
# Gradients are averaged over all ranks, since with CP as well each rank has seen other tokens. Experts are the
# exception: an expert's gradient has the tokens of its whole group already, through the all-to-all. So it is summed
# only over the copies in other groups. All are divided by the number of ranks, because each rank's loss is a mean over
# its own tokens.


# %% tags=["deeper"]
def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.003)


# %% tags=["deeper"]
def train(make, expert_divisor=n, optimizer_of=sgd, steps=5):
    """Mean loss of each step."""
    shape = (n // inner, inner)
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("dp", "inner"))
    model, mine, positions = make(mesh)
    model.to(device())
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(steps):
        x, y = windows.batch(range(2 * n * step, 2 * n * (step + 1)), device())
        loss = next_token_loss(model(x[mine][:, positions]), y[mine][:, positions])
        loss.backward()
        for name, p in model.named_parameters():
            expert = name.endswith(("moe.up", "moe.down"))
            dist.all_reduce(p.grad, group=mesh["dp"].get_group() if expert else None)
            p.grad /= expert_divisor if expert else n
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        dist.all_reduce(losses[-1])
    return [loss.item() / n for loss in losses]


# %% tags=["deeper"]
def alone(make, optimizer_of=sgd, steps=5):
    """The same in one process."""
    model, losses = make().to(device()), []
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        x, y = windows.batch(range(2 * n * step, 2 * n * (step + 1)), device())
        losses.append(next_token_loss(model(x), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


# %% tags=["deeper"]
runs = {
    f"CP {inner} x DP {n // inner}": (cp_dp, lambda: build_gpt(gpt)),
    f"EP {inner} x DP {n // inner}": (ep_dp, expert_gpt),
}
for name, (make, whole) in runs.items():
    losses = launch(train, make, world_size=n)[0]
    expected = launch(alone, whole, world_size=1, backend="gloo")[0]
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-4
    print(f"{name}:", *(f"{loss:.3f}" for loss in losses), " as in one process")

# %% [markdown] tags=["deeper"]
# **Predict**: now suppose that experts' gradients are divided by the number of their copies, since over these they are
# summed. With which optimizer are the losses still those of one process?

# %% tags=["deeper"]
optimizers = ["SGD", "Adam", "both", "neither"]
same_losses = predict("the same losses with", optimizers)

# %% tags=["deeper"]
apart = {}
for name, optimizer_of in (("SGD", sgd), ("Adam", adam)):
    losses = launch(train, ep_dp, n // inner, optimizer_of, world_size=n)[0]
    expected = launch(alone, expert_gpt, optimizer_of, world_size=1, backend="gloo")[0]
    apart[name] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(f"{name}: losses differ by at most {apart[name]:.4f} from those of one process")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert apart["SGD"] > 10 * apart["Adam"]
same_losses.compare("Adam")

# %% [markdown] tags=["deeper"]
# **Compare.** Adam: it divides by the size of the gradients, so a constant factor cancels. With SGD the experts learn
# EP times as fast, and no message says so.
#
# The norm by which gradients are clipped is wrong with both.
#
# One more divisor is often wrong under CP. A prompt or padding does not count in the loss, and a mean over ranks is
# the mean over tokens only if all ranks have equally many that count:

# %% tags=["deeper"]
of_token = torch.rand(length)
counts = torch.arange(length) >= 5 * length // 8  # the prompt does not count
of_ranks = [of_token[mine][counts[mine]].mean() for mine in orders["zig-zag"]]
print(f"mean over tokens {of_token[counts].mean():.3f}, of ranks", end="")
print(*(f" {loss:.3f}" for loss in of_ranks), f"and their mean {torch.stack(of_ranks).mean():.3f}")

# %% [markdown] tags=["deeper"]
# With four ranks one has no counted token, and a mean over nothing is NaN. The cure is to sum the losses of the
# rank's tokens, divide by the number of counted tokens of *all* ranks, one small all-reduce, and sum the gradients
# without dividing again (FSDP: `set_gradient_divide_factor(1)`). torchtitan does so (`global_valid_tokens`), and then
# experts need no divisor either.
#
# > **What changes on real GPUs.** NCCL's messages run on a stream of their own, beside the kernels of attention. But
# > `tolist()` of the counts and the boolean indexing in `compute` make the host wait for the GPU in each layer. The
# > `standard` dispatcher of torchtitan waits as well; to avoid it, its `hybridep` can take buffers of a fixed capacity.

# %% [markdown]
# ## Recap, with the numbers of this run

# %%
print(f"{length:,} tokens in a ring of {n}: at most {most['zig-zag']} pairs with zig-zag,", end="")
print(f" {most['contiguous']} with contiguous tokens, with the same bytes")
print(f"a skewed router: the slowest rank has {factor:.2f} times the mean load")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - Context parallelism divides activations, logits *and* work.
# - Softmax over pieces needs m, l and o. A ring passes K and V round, in backward their gradients as well.
# - Balance is a matter of order, and it costs no bytes.
# - A ring hides if a rank has FLOP/s ÷ (bytes/s) tokens, fewer with GQA. Recorded rings were slower all the same.
# - Ulysses splits heads, so KV heads are its limit. A gather is simple, and cheap with GQA.
# - Experts need counts first, then dispatch and combine. A full expert delays all ranks.
#
# **Now you can answer**
#
# 1. A sequence fits on 8 GPUs with TP, but a step takes too long. Does context parallelism help?
# 2. Your ring gives NaN for some rows only. What do you look at?
# 3. The last ranks of a ring are always late. Which order of tokens do you suspect?
# 4. 64 query heads, 8 KV heads, 16 ranks. What do you do to use Ulysses, and what sends less?
# 5. Why does an expert layer wait for 64 bytes before it sends megabytes?
#
# <details><summary>Answers</summary>
#
# 1. Yes, on more GPUs: it divides attention's work further, where TP ends at the KV heads (section 1).
# 2. Queries that see nothing of a piece: m is −∞ (section 2).
# 3. Contiguous: the ranks at the end of the sequence have most pairs (section 4).
# 4. Repeat KV heads, two copies each. On 16 ranks, more than g = 8, Ulysses sends less (section 6).
# 5. They are the counts, and without them nobody knows how much to receive (section 7).
# </details>
#
# **Exercises:** [exercises/11_long_context_and_experts](../exercises/11_long_context_and_experts_exercises.ipynb).
# **Next:** [12 parallelism 3d](12_parallelism_3d.ipynb), which puts all dimensions into one mesh.
#
# **Worth reading**
# - H. Liu et al., [Ring Attention with Blockwise Transformers](https://arxiv.org/abs/2310.01889), 2023.
# - DeepSeek-AI, [DeepSeek-V3 Technical Report](https://arxiv.org/abs/2412.19437), 2024: sections 2.1.2 and 3.2.
# - Llama Team, [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783), 2024: section 3.3.2.
