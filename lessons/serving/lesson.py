# %% [markdown]
# # How do many GPUs serve one model, and who waits for what?
#
# One B200 makes 11,253 tokens a second with Llama 3.3 70B. Two that share every layer make 1.6 times as many, and eight
# make 2.4 times (*recorded*, [TensorRT-LLM
# 0.19](https://nvidia.github.io/TensorRT-LLM/0.19.0/performance/perf-overview.html), FP4, 128 tokens in and 128 out).
# Why so little, and why does anybody do it? Because somebody waits: for the first token, then for each further one.
#
# **You will be able to**
# - *compute* what bounds a token, and how many people one GPU can serve at once;
# - *count* what ranks exchange for a token, and *decide* how many share a layer, or a cache;
# - *follow* requests through blocks, pieces and batches of an engine that you can read;
# - *run* a server on ranks that loses nothing without a word.
#
# **Before this:** [09 tensor parallel](09_tensor_parallel.ipynb),
# [11 long context and experts](11_long_context_and_experts.ipynb). **Time:** about 45 minutes to read the core, 60
# with the deeper sections, under a minute to run.

# %% tags=["parameters"]
import random
import timeit
from dataclasses import replace

import torch
import torch.distributed as dist

from course_utils import device, launch, record
from course_utils.hardware import GPUS
from course_utils.models import PUBLISHED
from course_utils.predictions import predict, predictions
from course_utils.programs import SCRIPTS, folded
from course_utils.recorded import A100_LATENCY
from course_utils.units import decimal_bytes
from lessons.serving import figures, helpers
from lessons.serving.engine import Blocks, Engine, PagedGPT, Request, Scheduler, attend
from lessons.serving.helpers import alone, cache_bytes, requests, serving_gpt, storm

world_size = 4  # ranks that share each layer and the model's 12 heads: 2, 3, 4 or 6

# %% [markdown]
# ## 1. Two phases, two limits
#
# A model answers in two phases. **Prefill** computes all tokens of the prompt at once, and gives the first new token.
# **Decode** computes one token, the last one, to get the next, again and again. What earlier tokens have left behind,
# their keys and values in every layer, stands in the **KV cache** (lesson 11), so nothing is computed twice.
#
# The two phases do not have the same limit. A step reads every weight once, whether it computes one token or a
# thousand. With each weight of two bytes it does two FLOPs for each token. So a step with t tokens does t FLOPs per
# byte, while an H200 can do 206 in the time in which it reads one byte (lesson 01). Prefill has thousands of tokens and
# is bound by **FLOP/s**. Decode has one token for each of b **sequences**, and is bound by the **bytes** of the weights
# and of the cache: for any b, unless texts are short, since each sequence has a cache of its own.


# %%
def step_times(shape, gpu, batch, length, new=1, element=2):
    """Seconds of a step by FLOP/s, and by bytes: `new` tokens for each sequence of `length`."""
    weights = shape.layers * shape.layer_weights + shape.hidden * shape.vocabulary
    scores = 4 * shape.layers * shape.query_width * length
    flops = batch * new * (2 * weights + scores)
    size = element * shape.parameter_count + batch * length * cache_bytes(shape, element)
    peak = gpu.flops["bf16" if element == 2 else "fp8"]
    return flops / peak, size / gpu.memory_bandwidth


# %% [markdown]
# **Predict**: Llama 3 8B has 16 GB of weights, an H200 reads 4.8 TB/s. How many tokens a second does *one* reader get?

# %%
one_reader = predict("at most, for one reader of Llama 3 8B on an H200", unit="tokens a second")

# %%
llama, h200 = PUBLISHED["Llama 3 8B"], GPUS["h200"]
for phase, batch, new in (*(("decode", b, 1) for b in (1, 8, 64, 256)), ("prefill", 1, 1000)):
    computing, reading = step_times(llama, h200, batch, 1000, new)
    limits = f"FLOP/s {1e3 * computing:6.2f} ms, bytes {1e3 * reading:6.2f} ms"
    print(f"{phase:8}{batch:4} x {limits}, {batch * new / max(computing, reading):7,.0f} tokens/s")

# %% jupyter={"source_hidden": true}
one_reader.compare(1 / max(step_times(llama, h200, 1, 1000)))

# %% [markdown]
# **Compare.** About 300, however many FLOP/s the GPU has: 3.4 ms for each token are the bytes.
#
# Sixty-four sequences take 1.5 times as long and get 42 times the tokens, so a server puts strangers in one **batch**.
# On this machine's CPU computing takes longer with a few rows already:

# %% tags=["nbval-ignore-output"]
weight, seconds = torch.randn(4096, 4096), {}
for rows in (1, 16, 64):
    x = torch.randn(rows, 4096)
    seconds[rows] = min(timeit.repeat(lambda: x @ weight, number=1, repeat=20))  # noqa: B023
    print(f"a batch of {rows:2}: {seconds[rows] / seconds[1]:.1f} times as long as of one")

# %%
reached = {"data sheet": (1, 1), "rates of the record": (helpers.COMPUTING, helpers.READING)}
published = dict(helpers.MEASURED["batches"]["rows"])
figures.batch_curves(lambda batch: step_times(llama, h200, batch, 1500), reached, published)

# %% [markdown]
# *The figure: tokens a second of all sequences over the batch, 1 to 1,024, for Llama 3 8B on an H200 with 1,500 tokens
# each. Both curves (modelled) rise with the batch, then bend as the cache of the batch becomes larger than the weights.
# One takes the data sheet's rates, the lower one those that one H200 reached: 2.5 TB/s for a matrix times a vector, 769
# TFLOP/s for a large product (recorded, `gpu-check`). The dots are
# [NVIDIA's](https://docs.nvidia.com/nim/llama-3-1-nemotron-safety-guard-8b/performance.md) (recorded: a fine-tuned
# Llama 3.1 8B in bf16 on a GH200, 1,000 tokens in and out), within a tenth of the lower curve at 1 and at 100 requests.
# At 250 the server makes no more than at 100; why, the page does not say.*
#
# ## 2. The cache decides how many
#
# A token leaves 2 · layers · KV width numbers behind. How many sequences fit is what is left of the memory, divided by
# their cache. Grouped queries (GQA) make the KV width smaller. DeepSeek's **latent attention** (MLA) keeps one vector
# of 576 numbers a layer, from which every head computes its keys and values anew.

# %%
for shape in (PUBLISHED["GPT-3 175B"], llama, PUBLISHED["Llama 3 70B"], helpers.DEEPSEEK_V3):
    print(f"{shape.name:12} {decimal_bytes(cache_bytes(shape)):>7} for each token")

# %% [markdown]
# **Predict**: how many sequences of 8,192 tokens fit beside the 16 GB of Llama 3 8B into the 80 GB of an H100?

# %%
sequences = predict("beside Llama 3 8B on an H100", unit="sequences of 8,192 tokens")

# %%
h100 = GPUS["h100"]
left = h100.memory_bytes - 2 * llama.parameter_count
fit = int(left // (8192 * cache_bytes(llama)))
_, reading = step_times(llama, h100, fit, 8192)
print(f"{fit} sequences: {1e3 * reading:.0f} ms a step, {fit / reading:,.0f} tokens/s")

# %% jupyter={"source_hidden": true}
sequences.compare(fit)

# %% [markdown]
# **Compare.** 59, at 1.07 GB each (*modelled*; activations take some of it).
#
# The ridge of 295 is out of reach, since each sequence brings bytes of its own. Memory limits decode by rate and size.
#
# ## 3. Tensor parallelism when each message is small
#
# Tensor parallelism (lesson 09) gives each of t GPUs 1/t of every matrix, and of the heads with their cache. So each
# reads 1/t of the bytes, and that is the way to make one reader's tokens come faster. The price is two all-reduces in
# each layer, one after attention and one after the MLP, of b · h numbers, where h is the width. In decode b is small.
#
# The engine of this lesson does so with the course's GPT, in float64, so that rounding cannot change what it chooses.
# The weights are random: the text has no sense, but every mistake shows in the next token.

# %%
model = serving_gpt()
folded("One step of the model on a rank", PagedGPT, attend)


# %%
def decode_once(batch):
    """The ledger of a step in which each of `batch` sequences computes one token."""
    engine = Engine(model.to(device()))
    for name in range(batch):
        engine.add(Request(name, [name, 7], 2))
    engine.step()  # their prompts
    with record() as ledger:
        engine.step()
    return ledger


ledger = launch(decode_once, 4, world_size=world_size)[0]
for op in ("all_reduce", "broadcast"):
    print(f"{op}: {ledger.count(op)} calls, {ledger.bytes(op):,} bytes")
assert [entry.bytes for entry in ledger if entry.op == "all_reduce"] == [4 * 96 * 8] * 4

# %% [markdown]
# Four messages of 3 kB, and the tokens that rank 0 has chosen for all. Llama 3 70B has 80 layers, so 160 all-reduces of
# 16 kB for one reader. At 450 GB/s that many bytes take 0.04 µs, but nothing on a GPU is done in so short a time: these
# messages cost their **latency** only. In a ring pieces move 2(N−1) times, and each move waits for the one before. In a
# **one-shot** all-reduce each rank sends everything to everybody at once, and adds up itself.


# %%
def exchange(out, into, ahead, behind):
    """Send `out` to the ranks `ahead`, receive `into` from those `behind`; one round."""
    ops = [dist.P2POp(dist.isend, out, peer) for peer in ahead]
    ops += [dist.P2POp(dist.irecv, t, peer) for t, peer in zip(into, behind, strict=True)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def one_shot(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    parts, others = [torch.empty_like(x) for _ in range(n)], [r for r in range(n) if r != rank]
    parts[rank] = x
    exchange(x, [parts[r] for r in others], others, others)
    return torch.stack(parts).sum(0), 1  # in the order of the ranks, so all get the same


def ring(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    pieces = [piece.clone() for piece in x.chunk(n)]
    for step in range(2 * (n - 1)):
        at = (rank - step - 1) % n
        arrived = torch.empty_like(pieces[at])
        exchange(pieces[(rank - step) % n], [arrived], [(rank + 1) % n], [(rank - 1) % n])
        pieces[at] = pieces[at] + arrived if step < n - 1 else arrived
    return torch.cat(pieces), step + 1


# %% [markdown]
# **Predict**: on eight GPUs, how many times as many bytes as in a ring does a rank send in one shot?

# %%
more_bytes = predict("sent in one shot on eight GPUs, against a ring", unit="times as many bytes")


# %%
def try_all_reduce(way):
    x = torch.full((24 * 60,), dist.get_rank() + 1.0, device=device())
    with record() as ledger:
        total, rounds = way(x)
    return rounds, ledger.sent / x.nbytes, total.unique().tolist()


for way in (ring, one_shot):
    rounds, sent, totals = launch(try_all_reduce, way, world_size=world_size)[0]
    print(f"{way.__name__:9}{rounds} rounds, {sent:.1f} times the tensor sent by each rank")

# %% jupyter={"source_hidden": true}
assert (rounds, sent, totals) == (1, world_size - 1, [sum(range(world_size + 1))])
more_bytes.compare(7 / (2 * 7 / 8))

# %% [markdown]
# **Compare.** 7 S against 2 · 7/8 · S: four times, N/2 in general.
#
# So one shot is for small messages. On eight H100 vLLM takes it up to 256 KiB; then the switch copies and adds (lesson
# 03), and beyond 64 MiB it is NCCL ([its table][ar], where an H100 is "9.0").
#
# [ar]: https://github.com/vllm-project/vllm/blob/00d618aab60448acdf3fac3e9c4e2e22d0c6c753/vllm/distributed/device_communicators/all_reduce_utils.py
#
# **Predict**: an all-reduce of few bytes takes 33.7 µs as a ring of eight A100 (*recorded*, nccl-tests #123). Suppose
# the same on eight H100. How many times as fast as with one (if it had the memory) does Llama 3 70B answer one reader?

# %%
tp_speedup = predict("TP 8 with a ring, against one GPU", unit="times as fast")

# %%
large = PUBLISHED["Llama 3 70B"]
whole = max(step_times(large, h100, 1, 1000))
for name, latency in (("a ring", A100_LATENCY[8]), ("one shot, 7 µs", 7e-6), ("no messages", 0)):
    shared = whole / 8 + 2 * large.layers * latency
    print(f"TP 8, {name:15} {1e3 * shared:5.1f} ms a token, {whole / shared:.1f} times as fast")

# %% jupyter={"source_hidden": true}
tp_speedup.compare(whole / (whole / 8 + 2 * large.layers * A100_LATENCY[8]))

# %% [markdown]
# **Compare.** Four times: of 10.7 ms half are messages, and no faster memory shortens them (*modelled*).
#
# 7 µs is what vLLM's one shot took for 48 kB on eight MI355X (*recorded*,
# [#39080](https://github.com/vllm-project/vllm/pull/39080)). Is the formula right? For Llama 2 70B on A100, which read
# 1.7 TB/s there, [gpt-fast](https://github.com/pytorch-labs/gpt-fast) measured it (*recorded*):

# %%
llama2 = replace(large, vocabulary=32_000)  # all else is as in Llama 3
for gpus, rate in helpers.MEASURED["one reader"]["rows"]:
    token = 2 * llama2.parameter_count / gpus / 1.7e12 + 2 * llama2.layers * A100_LATENCY[gpus]
    print(f"TP {gpus}: {1 / token:4.1f} tokens/s by the formula, {rate:4.1f} measured")

# %% [markdown]
# Within 15 %, always too fast. Four times as many GPUs make 2.9 times as many tokens.
#
# > **What changes on real GPUs.** Here the host starts each operation. Engines record a step of decode as a *CUDA
# > graph*, one for each of some batch sizes ([vLLM](https://docs.vllm.ai/en/latest/design/cuda_graphs/)), and start
# > that: between 160 all-reduces of 7 µs there is no time to start kernels one by one.
#
# ## 4. When heads end, split the sequence
#
# A cache is divided by its KV heads. Llama 3 has 8; on 16 GPUs each head lies on two. MLA has one vector for all heads,
# so with TP 8 all eight GPUs hold the *same* cache, and seven eighths of the memory are wasted ([vLLM's
# guide](https://docs.vllm.ai/en/latest/serving/context_parallel_deployment/)). The sequence can be split instead: each
# rank holds T/N of the tokens, and attends to these. Lesson 11 has what is needed: pieces of softmax merge, if each
# comes with its maximum m and its sum l. In training K and V moved. Here queries are few, and what moves is (m, l, o).


# %%
def split_attention(q, k, v):
    """One query of each head, (heads, size); keys and values of this rank (heads, tokens, size)."""
    scores = (k @ q[:, :, None])[..., 0] * q.shape[-1] ** -0.5
    m = scores.amax(-1, keepdim=True)
    highest = m.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    p = torch.exp(scores - highest)
    both = torch.cat([(p[:, None] @ v)[:, 0], p.sum(-1, keepdim=True)], -1)
    dist.all_reduce(both)
    return both[:, :-1] / both[:, -1:]


# %%
def try_split(tokens=48, heads=4, size=16):
    torch.manual_seed(0)  # all ranks make the same, and keep their part
    q, k, v = (torch.randn(heads, rows, size).to(device()) for rows in (1, tokens, tokens))
    own = [t.chunk(dist.get_world_size(), 1)[dist.get_rank()] for t in (k, v)]
    with record() as ledger:
        got = split_attention(q[:, 0], *own)
    expected = torch.softmax(q @ k.mT * size**-0.5, -1) @ v
    return float((got - expected[:, 0]).abs().max()), ledger.bytes("all_reduce")


found = launch(try_split, world_size=world_size)
assert max(error for error, _ in found) < 1e-5
print(f"equal to one process; {found[0][1]} bytes for each sequence and layer")

# %% [markdown]
# 4 heads of 16 + 2 numbers in fp32 make 288 bytes, whether the sequence has 48 tokens or a million, and so the split is
# cheap where a sequence is long. New tokens are dealt out in turn, or one rank would fill up (exercise 2).
#
# ## 5. A cache in blocks
#
# Nobody knows how long an answer will be. If each gets room for the longest, shorter ones waste it, and pieces of
# different sizes leave holes. So the cache is cut into **blocks** of a few tokens, all alike (PagedAttention, Kwon et
# al. 2023). A request has a **table** with the numbers of its blocks, in the order of its tokens, and takes a new block
# when the last is full. Any free block will do.
#
# A block also may belong to several. Many prompts begin alike: a chat's instructions, a document, the conversation so
# far. Keys and values of a token depend on *all* tokens up to it, so full blocks are found again by the whole text up
# to their end: a **prefix cache**. Each block counts its users, is free when the last has left, and keeps its tokens.

# %%
folded("Blocks, and requests with their tables", Request, Blocks)

# %%
blocks = Blocks(count=12, size=4)
scheduler = Scheduler(blocks, budget=16, most=4)
a, b = Request("a", [1, 2, 3, 4, 5, 6], 5), Request("b", [1, 2, 3, 4, 9], 3)
scheduler.add(a)
scheduler.advance(scheduler.plan(), [7])
scheduler.add(b)
scheduler.advance(scheduler.plan(), [8, 8])
print("a:", a.table, "b:", b.table, "users of block 0:", blocks.users[0])
figures.block_picture(blocks, [a, b], "computed: who uses which block of the cache")

# %% [markdown]
# *The figure: twelve blocks in a row, above each its tokens. Block 0 with the tokens 1, 2, 3, 4 has the colours of a
# and of b; block 1 has a's, block 2 b's; the others are grey, and free.*
#
# What may go wrong is bookkeeping: a block that is given back twice, or never. A thousand requests come at random, a
# tenth of the time one is cancelled, and blocks run out again and again. Who has lost what at the end?

# %%
blocks = Blocks(count=24, size=4)
print(storm(Scheduler(blocks, budget=16, most=8), count=1000))
print(f"blocks lost: {24 - len(blocks.free)}, still in use: {sum(blocks.users)}")
assert sorted(blocks.free) == [*range(24)] and not any(blocks.users)

# %% [markdown]
# ## 6. A scheduler, and the engine on ranks
#
# A step may compute tokens of different requests, and different numbers of each. So the batch can change at *every*
# step: who is finished leaves, who waits comes in at once: **continuous batching** (Yu et al. 2022). Three rules:
#
# 1. A step computes at most `budget` tokens. Those who decode come first, since they need one each.
# 2. What is left goes to prompts, cut into pieces: **chunked prefill**. Without pieces a prompt of 10,000 tokens would
#    make everybody wait for its step.
# 3. If blocks run out, the *youngest* gives its blocks back and queues again. Its tokens are computed again later, so
#    the oldest always gets on, and nobody waits for ever.

# %%
folded("The scheduler, and the engine around it", Scheduler, Engine)


# %%
def serve(asked, in_turn=False):
    """Answer all requests on the ranks; the texts, tokens computed, and free blocks."""
    engine = Engine(model.to(device()))
    for request in asked:
        engine.add(request)
        if in_turn:
            engine.run()
    engine.run()
    return [request.tokens for request in asked], engine.computed, len(engine.scheduler.blocks.free)


asked = requests(12)
texts, computed, free = launch(serve, asked, world_size=world_size)[0]
assert texts == [alone(model, request) for request in asked]
print(f"12 texts, each as alone; {computed} tokens computed, {free} of 24 blocks free")

# %% [markdown]
# Every token is the one that the request gets alone, in one process, without a cache. All ranks run the same scheduler
# on the same requests, so they need no message to agree on a batch. What *would* part them is anything that is their
# own: a clock, a random number, the order in which requests arrive.
#
# **Predict**: eight requests begin with the same 16 tokens, and have 1 to 12 of their own. They come one after the
# other. How many of the 16 · 8 = 128 tokens of the beginnings are computed?

# %%
beginnings = predict("of the 128 tokens of equal beginnings, computed", unit="tokens")

# %%
asked = requests(8, shared=16)
texts, computed, _ = launch(serve, asked, True, world_size=world_size)[0]
own = sum(len(request.prompt) - 16 + request.new - 1 for request in asked)
print(f"computed {computed} tokens, {own} of which are their own")

# %% jupyter={"source_hidden": true}
assert texts == [alone(model, request) for request in asked]
beginnings.compare(computed - own)

# %% [markdown]
# **Compare.** 16: the first request fills four blocks, and the seven others find them.
#
# DeepSeek found 56 % of its input in such a cache, on disks (*recorded*, [day
# 6](https://github.com/deepseek-ai/open-infra-index)).
#
# What does continuous batching gain? The older way, **static batching**, fills a batch and lets nobody in until all
# have left. `Static` closes the door once the batch is full. We count in steps, not seconds: 100 requests come at
# random, one in three steps, and each wants 1 to 40 tokens.


# %%
class Static(Scheduler):
    open = True

    def plan(self):
        self.open = not self.running or self.open and len(self.running) < 8
        self.most = 8 if self.open else 0
        return super().plan()


def simulate(scheduler, count=100, every=3):
    """Steps in all, steps until the first token of each request, and tokens of each step."""
    arrivals, draw = requests(count, longest=40), random.Random(1)
    came, waits, sizes, step = {}, {}, [], 0
    while arrivals or scheduler.waiting or scheduler.running:
        if arrivals and draw.random() < 1 / every:
            came[arrivals[-1].name] = step
            scheduler.add(arrivals.pop())
        batch = scheduler.plan()
        sizes.append(sum(count for _, count in batch))
        step += 1
        for request in scheduler.advance(batch, [0] * len(batch)):
            waits.setdefault(request.name, step - came[request.name])
    return step, sorted(waits.values()), sizes


# %% [markdown]
# **Predict**: how many times as many steps does the *median* request wait for its first token, if batches are static?

# %%
static_waits = predict("static batching, until the first token", unit="times as many steps")

# %%
kinds, waited = {"static": Static, "continuous": Scheduler, "pieces of 16": Scheduler}, {}
for name, kind in kinds.items():
    budget = 16 if name == "pieces of 16" else 64
    steps, waits, sizes = simulate(kind(Blocks(count=200, size=4), budget, most=8))
    waited[name] = 1 + waits[len(waits) // 2]
    size = f"{steps} steps of {sum(sizes) / steps:4.1f} tokens, at most {max(sizes)}"
    first = f"first after {waited[name]} (median), {1 + waits[-1]} (worst)"
    print(f"{name:13}{size}; {first}; {sum(w < 10 for w in waits)} in ten")

# %% jupyter={"source_hidden": true}
static_waits.compare(waited["static"] / waited["continuous"])

# %% [markdown]
# **Compare.** Some sixteen times at this load, where six of eight places are taken on average: between two batches the
# door is closed for as long as the longest answer takes. With half as many requests nothing is gained.
#
# The last column counts first tokens within ten steps. Pieces of 16 tokens make the first token later, but no step has
# more than 16, so those who decode wait less between theirs.
#
# ## 7. What to take to work
#
# `scripts/serve.py` puts this engine behind HTTP, in 250 lines. Requests come to rank 0 only, so in each step it tells
# the others who has come and gone. Everything else follows from three rules: every limit is checked **at the door**,
# where a reason can still be given; an answer without its last line is not whole; whoever waits is told when something
# ends. `scripts/load.py` is the other side: clients that ask, read to the end and ask again, and a table of waits.

# %%
folded("scripts/serve.py", SCRIPTS / "serve.py")

# %% [markdown]
# **Predict**: 16 requests run at the same time, at most. With 32 clients in place of 16, what grows most?

# %%
grows = predict("with 32 clients, what grows most", ["tokens/s", "first token", "between tokens"])

# %% tags=["nbval-ignore-output"]
with helpers.server(2, "--most=16", "--queue=40") as (port, process):
    status, lines = helpers.ask(port, prompt="Alice was", new=3)
    refusal = helpers.ask(port, prompt="Alice " * 50, new=3)
    helpers.load(port, "--clients=1,16,32", "--answers=48")
print(status, *lines, *refusal, sep="\n")

# %% jupyter={"source_hidden": true}
grows.compare("first token")

# %% [markdown]
# **Compare.** The first token: 16 clients wait outside until others have their whole answers.
#
# The columns are clients, how their answers ended, tokens a second of all, and for both waits the median and what 95 of
# 100 stay within. A late first token has one of four reasons inside the engine, and `/health` says which, as vLLM's
# [metrics](https://docs.vllm.ai/en/stable/usage/metrics/) do. There look first which of two histograms has grown,
# `request_queue_time_seconds` (the first three) or `request_prefill_time_seconds` (the last). And `put_back`, there
# `num_preemptions`, grows only if answers outgrow the blocks: who waits at the door puts nobody back.
#
# | reason | `/health` | vLLM | what helps |
# |---|---|---|---|
# | all places are taken | `waiting`; as many `running` as may | `num_requests_running` | more at once; copies |
# | prompts use up the budget | `waiting`; fewer run; many `free` | the same | budget, prefix cache, copies, section 9 |
# | too few blocks | `free` near 0; `put_back` may grow | `kv_cache_usage_perc` near 1 | GPUs, FP8, fewer at once |
# | a long prompt | `waiting` is 0 | `prefix_cache_hits`, `_queries` | prefix cache, budget, TP, section 9 |
#
# Start it with `torchrun --standalone --nproc-per-node=2 scripts/serve.py`, and replace the function `load` by your
# model. For a model that is not small, take an engine of section 13, and this as a map of it.

# %% [markdown] tags=["deeper"]
# ## 8. Stages, copies, experts · deeper
#
# Tensor parallelism is one of four ways to use eight GPUs. In a **pipeline** (lesson 10) each GPU has an eighth of the
# layers, and messages are few. But a token still passes all layers one after the other, so one reader waits as long as
# with one GPU, and eight batches have to be on their way. **Copies** of the model share nothing at all.

# %% tags=["deeper"]
def eight_gpus(stages, shared, batch=64, length=2000):
    """Of Llama 3 70B: seconds to the first token, those of its messages, and between tokens."""
    at_once = batch * shared // 8  # of each copy and stage
    computing, reading = step_times(large, h100, at_once, length)
    between = max(computing / helpers.COMPUTING, reading / helpers.READING) / shared
    between += helpers.all_reduces(large, shared, at_once)
    prompt = step_times(large, h100, 1, length / 2, length)[0] / helpers.COMPUTING / shared
    messages = helpers.all_reduces(large, shared, length)
    return prompt + messages, messages, between


for stages, shared in ((1, 8), (8, 1), (4, 2), (1, 4)):
    first, messages, between = eight_gpus(stages, shared)
    name = f"{8 // (stages * shared)} x PP {stages} x TP {shared}: first token"
    times = f"{1e3 * first:3.0f} ms ({1e3 * messages:2.0f} messages), then {1e3 * between:2.0f} ms"
    print(f"{name} {times}; {8 / shared / first:2.0f} prompts/s, {64 / between:5,.0f} tokens/s")
for length, shared in ((500, 8), (500, 4), (2000, 8), (2000, 4)):
    room = shared * h100.memory_bytes - 2 * large.parameter_count
    most = 8 // shared * int(room // (length * cache_bytes(large)))
    rate = most / eight_gpus(1, shared, most, length)[2]
    print(f"{8 // shared} x TP {shared}: {most:5,} of {length:4} tokens, {rate:6,.0f} tokens/s")

# %% [markdown] tags=["deeper"]
# All *modelled*, with the rates that one H200 reached. For these 64 readers, and a prompt that finds nobody before it,
# TP 8 is best, though messages take 27 of 73 ms. But two copies with TP 4 begin 17 prompts a second, and TP 8 only 14:
# near that rate the copies have the earlier first token. With prompts of 2,048 tokens and short answers two copies made
# 18 % more in BF16 and 27 % in FP8 (*recorded*, vLLM on eight H100, [poster at ISC
# 2026](https://app.swapcard.com/event/isc-high-performance-2026/planning/UGxhbm5pbmdfNDQwOTk3Ng==)). With as many
# readers as fit, copies win where sequences are short, TP 8 where they are long: two copies hold the weights twice.
#
# A mixture of **experts** has one more reason to spread. Of 256 experts a token goes to 8, so each expert sees few
# tokens, and its weights are read for these few. DeepSeek runs decode on 144 GPUs, with 32 experts doubled, and reports
# 14,800 tokens a second from each node of eight H800, 20 to 22 for each reader (*recorded*,
# [overview, day 6](https://github.com/deepseek-ai/open-infra-index)).

# %% tags=["deeper"]
readers, deepseek = 14_800 / 8 / 21, helpers.DEEPSEEK_V3
rows = 144 * readers * deepseek.experts_per_token / (deepseek.experts + 32)
dispatch, combine = (t.seconds for t in helpers.DEEPEP_LOW_LATENCY if t.ep == 64)
print(f"{(deepseek.experts + 32) / 144:.0f} experts and {readers:.0f} readers on a GPU")
ridge = h100.ridge("fp8") / 2  # FLOPs a byte of weights, 2 for each row
print(f"{rows:.0f} rows for an expert; from {ridge:.0f} on an H100 is bound by FLOP/s in FP8")
print(f"all-to-alls {58e3 * (dispatch + combine):.0f} ms of {1e3 / 21:.0f} ms between two tokens")

# %% [markdown] tags=["deeper"]
# Two halves of the batch take turns: one computes while the other travels. So a product has 176 rows, not yet bound by
# FLOP/s, but each byte of weights serves 176 rows. (The all-to-alls are DeepEP's times for 64 ranks, in 58 layers.)

# %% [markdown] tags=["deeper"]
# ## 9. Prefill here, decode there · deeper
#
# A long prefill makes everybody who decodes wait, even in pieces. So prefill may get GPUs of its own, and send the
# cache to those that decode (**disaggregation**: Splitwise, DistServe). It adds no tokens a second, says [vLLM's
# guide](https://github.com/vllm-project/vllm/blob/main/docs/features/disagg_prefill.md) in capitals; it makes the time
# between tokens even. The price is the cache on a network, here between two emulated hosts (lesson 16): the rank on
# host 0 computes 60 tokens, and that on host 1 goes on, to the same text as alone.

# %% tags=["deeper"]
def prefill_or_decode(request):
    """Rank 0 computes the prompt and sends its cache; rank 1 generates, and returns the text."""
    engine = Engine(model, budget=64, shared=False)
    scheduler, length = engine.scheduler, len(request.prompt)
    if dist.get_rank() == 0:
        engine.add(request)
        engine.step()
        slots = engine.model.slots(request.table, length)
        dist.send(torch.tensor(request.tokens), 1)
        return dist.send(engine.model.cache[:, :, slots].contiguous(), 1)
    tokens = torch.empty(length + 1, dtype=torch.int64)
    dist.recv(tokens, 0)
    request.tokens, request.done = tokens.tolist(), length
    request.table = [scheduler.blocks.take() for _ in range(scheduler.missing(request, 0))]
    slots = engine.model.slots(request.table, length)
    arrived = torch.empty_like(engine.model.cache[:, :, slots])
    dist.recv(arrived, 0)
    engine.model.cache[:, :, slots] = arrived
    scheduler.running.append(request)
    engine.run()
    return request.tokens


# %% tags=["deeper"]
question = Request("q", requests(1, longest=60, shared=59)[0].prompt[:60], 12)
hosts = 2 if helpers.hosts_available()[0] else None
found = launch(prefill_or_decode, question, world_size=2, hosts=hosts, backend="gloo")
expected = 60 * cache_bytes(model.config, 8)  # 2 layers, keys and values, 96 numbers of 8 bytes
for left in (found.left_host or [])[:1]:
    print(f"left host 0: {left / 1e3:.0f} kB, {expected / 1e3:.0f} kB predicted for the cache")
assert found[1] == alone(model, question)
assert hosts is None or expected < found.left_host[0] < 1.3 * expected
sending = cache_bytes(large) / (8 * 50e9)
computing = 2 * large.parameter_count / (8 * h100.flops["bf16"])
print(f"Llama 3 70B: a token travels {1e6 * sending:.1f} µs, computed in {1e6 * computing:.0f} µs")

# %% [markdown] tags=["deeper"]
# A token's cache takes cache bytes / link to travel, 2 · parameters / FLOP/s to compute. So it hides behind prefill if
#
# $$\frac{\text{bytes of the cache of a token}}{\text{bytes/s of the link}} < \frac{2 \Psi}{\text{FLOP/s}}$$
#
# whatever the length is. Llama 3 70B on 8 H100, with one port of 50 GB/s each, is on the good side by far.

# %% [markdown] tags=["deeper"]
# ## 10. Speculative decoding · deeper
#
# Decode is bound by bytes, so a step with γ + 1 tokens of one sequence takes hardly longer than with one. A small
# *draft* model guesses γ tokens; the model computes all of them in one step and keeps the beginning that it agrees
# with. With probability min(1, p/q) a token drafted with probability q is accepted, where p is the model's; the first
# one that is not is drawn anew from what is missing, max(0, p − q). Then the text has *exactly* the distribution of the
# model (Leviathan et al. 2023). With probability α for each, a step yields 1 + … + α^γ = (1 − α^(γ+1)) / (1 − α).


# %% tags=["deeper"]
def speculate(p, q, drafted, draw):
    """The tokens of one step, for a model and a draft that do not look at the text."""
    out, words = [], range(len(p))
    for _ in range(drafted):
        (token,) = draw.choices(words, q)
        if draw.random() >= p[token] / q[token]:
            return out + draw.choices(words, [max(0, a - b) for a, b in zip(p, q, strict=True)])
        out.append(token)
    return out + draw.choices(words, p)


def expected_tokens(alpha, drafted):
    return (1 - alpha ** (drafted + 1)) / (1 - alpha)


p, q, draw = [0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25], random.Random(0)
steps = [speculate(p, q, 4, draw) for _ in range(20_000)]
text, alpha = sum(steps, []), sum(map(min, p, q))
shares = [text.count(word) / len(text) for word in range(4)]
print(f"a step gives {len(text) / len(steps):.2f} tokens, expected {expected_tokens(alpha, 4):.2f}")
print("shares", *(f"{share:.2f}" for share in shares), "of the model", *p)
assert max(abs(a - b) for a, b in zip(shares, p, strict=True)) < 0.01

# %% [markdown] tags=["deeper"]
# The draft costs something: with c of a step for each of its tokens, the speed-up is (1 − α^(γ+1)) / ((1 − α)(γc + 1)).
# The paper's table 2 (*recorded*, read in transcriptions) has α, γ and the speed-up for T5-XXL (11 billion parameters,
# one sequence on a TPU v4), so we can ask which c it implies, and compare with the ratio of the parameters.

# %% tags=["deeper"]
for name, millions, drafted, alpha, measured in helpers.MEASURED["speculated"]["rows"]:
    most = expected_tokens(alpha, drafted)
    cost, ratio = (most / measured - 1) / drafted, millions / 11_000
    print(f"{name:19} {measured} times of {most:.1f}: c = {cost:5.1%}, parameters {ratio:.1%}")

# %% [markdown] tags=["deeper"]
# A draft that is right more often gains less here, because it costs more: 1.5 to 4 times what its parameters say, but
# for the smallest. (A negative c is rounding.) And all this holds where a step is bound by bytes. In a large batch
# drafted tokens cost FLOP/s, and of seven with α = 0.75 more than four are thrown away.

# %% [markdown] tags=["deeper"]
# ## 11. Who is told what: three patients · deeper
#
# Three public threads became patients for the clinic of lesson 14: short programs in which ranks or requests share too
# much, or too little. The first comes from SGLang ([#27221](https://github.com/sgl-project/sglang/issues/27221)):

# %% tags=["deeper"]
patient = helpers.servers.clinic()[1]
print(patient, patient.ask("stacks"), sep="\n\n")

# %% [markdown] tags=["deeper"]
# Rank 0 computes a step for the request that rank 1 has dropped. Their clocks differ by a millisecond, and for one of
# many requests the limit lies in between. So one rank decides, and the others are told, as in `serve.py`:

# %% tags=["deeper"]
print(patient.diagnose("own clock"))
cured = patient.treat(edit={"came, answers =": "dist.broadcast(clock, src=0)\n    came, answers ="})
assert cured
cured

# %% [markdown] tags=["deeper"]
# The same cure is proposed for TensorRT-LLM ([#12024](https://github.com/NVIDIA/TensorRT-LLM/pull/12024)), where each
# rank drew its own tokens at random. Two patients are left for exercise 6: a rank out of memory in the cache, and wrong
# text that no log has. The last kind is the worst. A test like that of section 5 finds it, and so does a comparison
# with what requests get alone, in fp32 or fp64. In bf16 sums depend on the batch, so texts differ without a fault;
# vLLM's way out is *batch invariance* ([#50136](https://github.com/vllm-project/vllm/issues/50136)).

# %% [markdown] tags=["deeper"]
# ## 12. Measures, and a published table · deeper
#
# TTFT is the time to the first token, waiting and prefill. TPOT is a request's mean time between tokens, ITL each of
# these times: its tail shows a long prefill that came between, which a mean hides. Throughput is the tokens a
# second of all, for which one pays: DeepSeek's 14,800 from eight GPUs at 2 dollars an hour each (its assumption) make
# 8 · 2 / 3600 / 14,800 = 0.30 dollars for a million tokens of output, and prefill and idle nodes come to it.
# **Goodput** counts only requests that keep a limit, as `load.py --limit` does.
#
# TensorRT-LLM publishes throughput at full load. Can we predict it? Memory says how many sequences run, `step_times`
# how long a step takes, the messages of a large batch come to it, and prefill takes its share. We allow 73 % of FLOP/s
# (a product in FP8) and 52 % of bytes/s, as one H200 reached (*recorded*), 90 % of the memory, and 80 % of NVLink.


# %% tags=["deeper"]
def at_full_load(shape, gpu, gpus, prompt, new):
    """Sequences, and output tokens a second, weights and cache in FP8."""
    middle, room = prompt + new / 2, 0.9 * gpus * gpu.memory_bytes - shape.parameter_count
    batch = int(room // (middle * cache_bytes(shape, 1)))
    computing, reading = step_times(shape, gpu, batch, middle, element=1)
    step = max(computing / 0.73, reading / 0.52) / gpus + helpers.all_reduces(shape, gpus, batch)
    computing = step_times(shape, gpu, 1, prompt / 2, prompt, element=1)[0]
    prefill = computing / 0.73 / gpus + helpers.all_reduces(shape, gpus, prompt)
    return batch, batch * new / (new * step + batch * prefill)


for name, gpu, gpus, prompt, new, published in helpers.MEASURED["full load"]["rows"]:
    batch, rate = at_full_load(PUBLISHED[name], GPUS[gpu], gpus, prompt, new)
    case = f"{name}, {gpus} {gpu.upper()}, {prompt}/{new}"
    print(f"{case:32} {batch:5} at once, {rate:7,.0f} for {published:6,}: {rate / published:.2f}")

# %% [markdown] tags=["deeper"]
# On one or two GPUs we are off by a third at most: too low where sequences are long, too high where they are short and
# batches large, and where what we leave out may count: sampling, the scheduler, small kernels. On eight GPUs we are 1.2
# to 1.6 times too high, and do not know why. A formula tells what is *possible*, and which limit is near. Then measure.

# %% [markdown] tags=["deeper"]
# ## 13. What people use · deeper
#
# | here | vLLM ([listed by Cloudera][v]) | SGLang ([arguments][s]) | TensorRT-LLM ([a configuration][t]) |
# |---|---|---|---|
# | TP, PP (3, 8) | `-tp`, `-pp` | `--tp-size`, `--pp-size` | `tensor_parallel_size`, `pipeline_parallel_size` |
# | one shot or NCCL (3) | `--disable-custom-all-reduce` | the same | `allreduce_strategy` |
# | cache split by sequence (4) | `-dcp` | `--dcp-size` (MLA) | `context_parallel_size`, `HELIX` ([MLA][h]) |
# | memory for blocks (5) | `--gpu-memory-utilization` | `--mem-fraction-static` | `free_gpu_memory_fraction` |
# | tokens of a block (5) | `--block-size` | `--page-size` | `tokens_per_block` |
# | FP8 in the cache (7) | `--kv-cache-dtype` | the same | `dtype` |
# | prefix cache (5) | on; `--no-enable-prefix-caching` | on; `--disable-radix-cache` | `enable_block_reuse` |
# | budget (6) | `--max-num-batched-tokens` | `--max-prefill-tokens` | `max_num_tokens` |
# | pieces (6) | on; `--enable-chunked-prefill` | `--chunked-prefill-size` | `enable_chunked_prefill` |
# | most at once (6) | `--max-num-seqs` | `--max-running-requests` | `max_batch_size` |
# | copies, of attention (8) | `--data-parallel-size` | `--dp-size`, `--enable-dp-attention` | `enable_attention_dp` |
# | experts (8) | `--enable-expert-parallel` | `--ep-size` | `moe_expert_parallel_size` |
# | prefill apart (9) | `--kv-transfer-config` | `--disaggregation-mode` | [`cache_transceiver_config`][d] |
#
# vLLM's are those of 0.27.1, and from its guides (commit 020505c) `-dcp`, custom all-reduce, copies, experts, and
# prefill apart; SGLang's as of commit 004813e; TensorRT-LLM's guides as of 04c8822 and 0434b98. vLLM plans for all
# ranks in one process and sends them the plan; SGLang runs its scheduler on every rank, as we do.
#
# [v]: https://docs.cloudera.com/machine-learning/latest/release-notes-privatecloud/topics/ml-caii-supported-vllm-command-line-arguments-sp4.html
# [s]: https://docs.sglang.io/advanced_features/server_arguments.html
# [t]: https://nvidia.github.io/TensorRT-LLM/_downloads/ddd5dad53c23c1710152570087d6d424/qwen3.8-low-latency.yaml
# [h]: https://nvidia.github.io/TensorRT-LLM/features/helix.html
# [d]: https://nvidia.github.io/TensorRT-LLM/features/disagg-serving.html

# %% [markdown]
# ## Recap, with the numbers of this run

# %%
print(f"{fit} sequences of 8,192 tokens fit beside Llama 3 8B on an H100, by data sheet")
print(f"steps to the first token: {waited['continuous']}, static {waited['static']} (medians)")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - Prefill is bound by FLOP/s, decode by the bytes of weights and cache; a batch shares the weights' bytes.
# - The cache says how many sequences fit. GQA and MLA make it smaller, more GPUs make room for more.
# - Tensor parallelism sends two small messages a layer. Their latency, not their bytes, bounds one reader's speed-up.
# - Where heads end, the cache splits by sequence, and (m, l, o) merge.
# - Blocks have users that are counted; a batch changes at every step. All ranks decide alike, and who waits is told.
#
# **Now you can answer**
#
# 1. A GPU with twice the FLOP/s and the same memory: what changes for a chat with few readers?
# 2. You double the GPUs that share a model with 8 KV heads from 8 to 16. How many more sequences fit?
# 3. The first token is late, and no request waits. What can you change?
#
# <details><summary>Answers</summary>
#
# 1. Prefill takes half as long, and decode as long as before (section 1).
# 2. Only as many as the smaller share of the weights makes room for: each KV head lies on two GPUs then (section 4).
# 3. What the prompt costs: a prefix cache, a larger budget, more GPUs that share layers, or prefill apart (section 7).
# </details>
#
# **Exercises:** [exercises/17_serving](../exercises/17_serving_exercises.ipynb). **Next:**
# [18 capstone](18_capstone.ipynb).
#
# **Worth reading**
# - W. Kwon et al., [PagedAttention](https://arxiv.org/abs/2309.06180), 2023: blocks and tables.
# - A. Agrawal et al., [Sarathi-Serve](https://arxiv.org/abs/2403.02310), 2024: prompts in pieces.
# - Y. Zhong et al., [DistServe](https://arxiv.org/abs/2401.09670), 2024: prefill and decode apart, and goodput.
