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
# # Why is 8 GPUs not 8×, and what wins it back?
#
# One training job, on eight GPUs: each does 40,150 tokens a second. The same job on 256 GPUs: each does 15,700
# (*recorded*, Ultra-Scale Playbook). So 256 GPUs do the work of 100. The other 156 are paid for as well.
#
# **You will be able to**
# - *measure* strong and weak scaling, and *compare* them with Amdahl's and Gustafson's laws;
# - *find out* which part of a step is computing, communicating, waiting and copying;
# - *choose* a bucket size, a precision and a compression, and *say* what each saves and what it does not;
# - *weigh* memory against time with activation checkpointing;
# - *turn* an efficiency into the price of a training run.
#
# **Before this:** [02 collectives](02_collectives.ipynb), [04 ddp](04_ddp.ipynb); sections 3 and 5 borrow from
# [03 nccl](03_nccl.ipynb). **Time:** about 130 minutes to read, under a minute to run.

# %% [markdown]
# ## Ten predictions
#
# Write down an answer to each, however unsure. They come up again on the way, and the answers are at the end.
#
# 1. Of each step 5 % cannot be divided among ranks. What is the largest speed-up, on any number of ranks?
# 2. Four ranks share two cores. What is the best speed-up that four can show?
# 3. One of four ranks is 40 ms late in every step. In which operation of the *other* ranks do the 40 ms show?
# 4. A model becomes ten times as large. Does its data parallelism scale better or worse?
# 5. Many small buckets or one large one: what speaks for each?
# 6. Mixed precision with fp32 master weights, and plain fp32, both with Adam. Bytes for each parameter?
# 7. A weight of 1.0 in bf16 gets an update of +0.001, a thousand times. What is it then?
# 8. Top-k sends the largest 1 % of the gradients. How many times fewer bytes than an all-reduce, on 4 ranks and on
#    100?
# 9. Activation checkpointing runs each block's forward pass twice. How much longer does a step take?
# 10. Two GPUs train 1.9 times as fast as one. What does the run cost, against one GPU?

# %% [markdown]
# The first cell imports everything and names every parameter.

# %% tags=["parameters"]
import math
import os
import time

import numpy
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

from course_utils import device, launch, plots, record, recorded
from course_utils.costs import bytes_sent, fit_alpha_beta, format_bytes
from course_utils.data import Windows
from course_utils.hardware import GPUS, LINKS
from course_utils.models import TransformerConfig, build_gpt, loss_of
from course_utils.number_formats import FORMATS, store
from course_utils.widgets import bits_explorer, cost_calculator

world_size = 4  # ranks, 2 or more
whole_batch, rank_batch = 24, 12  # windows of text in a step: of all ranks, or of each rank
late = 0.04  # seconds by which the slow rank is late
training_steps = 120  # steps of the runs with compressed gradients
shrink = 2.0**-20  # factor on the loss that makes its gradients small

# %% [markdown]
# ## 1. Strong and weak scaling, measured
#
# Three numbers describe how a job grows:
#
# - **throughput**: tokens per second of all ranks together;
# - **speed-up** S(N): throughput on N ranks over throughput on one;
# - **efficiency** E(N) = S(N)/N: the share of a rank's time that counts.
#
# There are two ways to grow. **Strong scaling** keeps the whole batch: N ranks share the same work, and each gets
# less of it. **Weak scaling** keeps the batch of each rank: N ranks do N times the work.
#
# The job is the small GPT of lesson 04 under `DistributedDataParallel`, on the text of *Alice*. A rank's batch is
# some windows of 64 characters. `batch` fetches them in the whole lesson; `loss_of`, the mean loss, is from
# `course_utils.models`, as in lesson 04.

# %%
torch.set_num_threads(1)  # in this process as on the ranks: threads share busy cores badly
windows = Windows("train", TransformerConfig().context)
backend = launch(dist.get_backend, world_size=world_size)[0]  # the same for any number of ranks


def batch(step, size):
    """The windows of this rank in this step: inputs and targets, both (size, context)."""
    first = (step * dist.get_world_size() + dist.get_rank()) * size
    return windows.batch((i % len(windows) for i in range(first, first + size)), device())


print(f"{TransformerConfig().parameter_count:,} parameters, {len(windows):,} windows")

# %% [markdown]
# A step ends when it has ended on the slowest rank, and the figure is the best of 16 steps. DDP rebuilds its
# buckets after the first step, so three steps come first that do not count.


# %%
def finish():
    if device().type == "cuda":
        torch.cuda.synchronize()


def timed_steps(size):
    """Seconds of each of 16 training steps of this rank."""
    model = DDP(build_gpt().to(device()))
    optimizer, seconds = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(19):
        x, y = batch(step, size)
        dist.barrier()
        start = time.perf_counter()
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        finish()
        seconds.append(time.perf_counter() - start)
    return seconds[3:]


# %% [markdown]
# Throughput follows from the slowest rank of each step.


# %%
def throughput(size, ranks):
    """Tokens per second of `ranks` ranks together, `size` windows each."""
    by_rank = launch(timed_steps, size, world_size=ranks, backend=backend)
    step = min(max(seconds) for seconds in zip(*by_rank, strict=True))
    return ranks * size * TransformerConfig().context / step


# %% [markdown]
# **Predict** (question 2). Speed-up and efficiency on this machine, at each number of ranks. The number of cores is
# printed first: ranks without GPUs compute on them.

# %% tags=["nbval-ignore-output"]
ranks = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < world_size] + [world_size]
strong = [throughput(whole_batch // n, n) for n in ranks]
weak = [throughput(rank_batch, n) for n in ranks]
print(f"cores: {os.cpu_count()}, ranks on {backend}")
print(f"{'strong scaling':>21}{'weak scaling':>30}")
print("ranks" + "  tokens/s  speed-up  efficiency" * 2)
for n, a, b in zip(ranks, strong, weak, strict=True):
    print(
        f"{n:5}{a:10,.0f}{a / strong[0]:10.2f}{a / strong[0] / n:12.0%}"
        f"{b:10,.0f}{b / weak[0]:10.2f}{b / weak[0] / n:12.0%}"
    )

# %%
cores = os.cpu_count() if backend == "gloo" else None
plots.scaling_curves(ranks, {"strong": strong, "weak": weak}, "measured", limit=cores)

# %% [markdown]
# *The figure, left: speed-up over ranks, with the ideal as a dashed line and, where ranks share cores, a dotted
# line that ends at the number of cores. Right: the same as efficiency.*
#
# Read it with the machine in mind. Where ranks are processes on a few cores, the speed-up ends at the number of
# cores, and four ranks on two cores *cannot* be four times as fast: their efficiency is at most 50 %, and nothing
# in the program can change that. A point above the dotted line is no counterexample: timings scatter, and if the one
# rank that it is divided by came out slow, everything after looks better. The rest of the loss is real:
# messages, copies, and waiting for ranks whose turn on a core comes later. That is what this lesson takes apart.
#
# On 2 ranks both are the same job, 12 windows each: if their throughputs differ, that is scatter of the timings. The
# efficiencies differ for another reason too: each is divided by its own run on one rank, of 24 windows or of 12. From
# there on strong scaling gives each rank less work for the same message, and weak scaling does better. Where ranks
# share cores neither gets past the cores, and strong scaling can be slower than one rank alone.
#
# > **Misconception.** "Throughput goes up, so the job scales." Where each rank has a processor it nearly always
# > goes up. Efficiency says what it costs.
#
# > **What changes on real GPUs.** Each rank has a processor of its own, so the dotted line goes. Strong scaling
# > meets another limit: a GPU with few tokens is not full, and its kernels take as long for less work. With fewer
# > still, it waits for the CPU to launch the next kernel. A **CUDA graph** records the kernels of a step once, and then
# > launches all of them in one call; `torch.compile(model, mode="reduce-overhead")` makes one where shapes stay the
# > same.

# %% [markdown]
# ## 2. Two laws
#
# ### Amdahl: the work is fixed
#
# Let one rank need time 1 for a job. A share s of it is **serial**: it takes as long on N ranks as on one. The rest
# is divided. Then the time on N ranks is s + (1 − s)/N, and
#
# $$S(N) = \frac{1}{s + \frac{1-s}{N}} \;<\; \frac{1}{s}$$
#
# ### Gustafson: the time is fixed
#
# Now let N ranks need time 1, of which a share s is serial. One rank would need s + (1 − s)·N for the same work, so
#
# $$S(N) = s + (1-s)\,N = N - s\,(N-1)$$
#
# **Predict** (question 1). s = 5 %: what do the laws allow for a thousand ranks?


# %%
def amdahl(n, s):
    """Speed-up on n ranks if a share s of one rank's time is serial."""
    return 1 / (s + (1 - s) / n)


def gustafson(n, s):
    """Speed-up on n ranks if a share s of the n ranks' time is serial."""
    return n - s * (n - 1)


print(
    f"1,000 ranks, s = 5 %: Amdahl {amdahl(1000, 0.05):.1f}, Gustafson {gustafson(1000, 0.05):.0f}"
)
plots.speedup_laws({"Amdahl": amdahl, "Gustafson": gustafson}, (0.001, 0.01, 0.05, 0.2), most=1000)

# %% [markdown]
# *The figure, left: by Amdahl each curve bends away from the dashed ideal, towards its limit 1/s. Right: by Gustafson
# all curves keep climbing, close to the ideal, which they cover; only the one of 20 % is seen to run below it.*
#
# 19.6 against 950: do the laws contradict each other? They measure s in different runs. Take a job that spends 5 %
# of its time on a thousand ranks in serial work. On *one* rank the same serial work is a tiny share of a far longer
# run:


# %%
def share_on_one_rank(n, s):
    """The serial share of a run on one rank, if it is s of the run on n ranks."""
    return s / (s + (1 - s) * n)


small = share_on_one_rank(1000, 0.05)
assert math.isclose(amdahl(1000, small), gustafson(1000, 0.05))
print(f"5 % of the run on 1,000 ranks is {small:.5%} of the run on one: Amdahl agrees, 950")

# %% [markdown]
# One law, two questions. Amdahl is strong scaling: the same batch, sooner. Gustafson is weak scaling: more data in
# the same time. Large training runs live by the second, up to where a larger batch hardly helps the loss: the
# **critical batch size**, which grows as the loss falls ([McCandlish et al. 2018](https://arxiv.org/abs/1812.06162)).
#
# ### Backwards
#
# From a measured speed-up, Amdahl's law gives the serial share that would explain it. (Karp and Flatt proposed this
# in 1990.) If that share is the same for all N, it looks like a serial part. If it grows with N, something else
# grows: communication, or waiting. If it falls, something was paid once, early, that does not grow further, such as the
# first step out of a node.
#
# **Predict.** What does the recorded job show?


# %%
def serial_share(n, speedup):
    """The s for which Amdahl's law gives `speedup` on n ranks."""
    return (1 / speedup - 1 / n) / (1 - 1 / n)


assert math.isclose(serial_share(64, amdahl(64, 0.05)), 0.05)
dp = recorded.ULTRASCALE_DP
for n, e in zip(dp.gpus[1:], dp.efficiency[1:], strict=True):
    m = n / dp.gpus[0]  # in units of eight GPUs
    share = serial_share(m, m * e)
    print(f"{n:4} GPUs: {m * e:5.2f} x 8 GPUs, efficiency {e:4.0%}, share {share:5.1%}")

# %% [markdown]
# Between 3.5 % and 6.8 %, falling at first and rising at the end: seen from outside the job looks as if about one
# part in twenty of its work on eight GPUs could not be divided. The source does not say whether the whole batch stayed
# the same. If it grew with the GPUs, the same numbers mean an overhead of each step that grows with N. Section 3 finds
# that the two give one curve.

# %% [markdown]
# ## 3. A recorded curve, and models of it
#
# Here is the whole curve. Six numbers of GPUs, *recorded* (Hugging Face, [The Ultra-Scale
# Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook)).

# %%
plots.scaling_curves(dp.gpus, {"Playbook, DP": dp.throughput}, "recorded", unit="GPUs")

# %% [markdown]
# *The figure, left: the speed-up against eight GPUs climbs to 10.5 at 128 GPUs and ends at 12.5 of the possible 32.
# Right: efficiency falls slowly to 66 % at 128 GPUs, and then to 39 %.*
#
# A model in one line: a step takes as long as computing does, plus something that grows with N. Lesson 03 offers
# three candidates for what grows, if every step all-reduces the gradients:
#
# - the **bytes** of a ring, ∝ (N−1)/N, which hardly grow at all;
# - the **hops of a tree**, ∝ log₂ N;
# - the **hops of a ring**, ∝ N.
#
# Each has two unknowns. Fit them to the first three points only, up to 32 GPUs, and let them predict the other
# three.
#
# **Predict.** Which of the three will be nearest at 256 GPUs, and how near?


# %%
def fit(growth, seen):
    """Fit seconds per token = a + b * growth(n) to the first points, by least relative squares."""
    n, t = numpy.array(dp.gpus, float), 1 / numpy.array(dp.tokens_per_gpu)
    columns = numpy.stack([numpy.ones(seen), growth(n[:seen])], axis=1) / t[:seen, None]
    a, b = numpy.linalg.lstsq(columns, numpy.ones(seen), rcond=None)[0]
    return a, b, 1 / (a + b * growth(n))


candidates = {
    "bytes": lambda n: (n - 1) / n,
    "tree": numpy.log2,
    "ring": lambda n: n,
}
fits = {name: fit(growth, seen=3) for name, growth in candidates.items()}
print("GPUs     recorded" + "".join(f"{name:>16}" for name in fits))
for i, (n, rate) in enumerate(zip(dp.gpus, dp.tokens_per_gpu, strict=True)):
    row = "".join(f"{of[2][i]:9,.0f} {of[2][i] / rate - 1:+6.1%}" for of in fits.values())
    print(f"{n:4}{rate:13,}{row}   {'fitted' if i < 3 else 'predicted'}")

# %%
ring_errors = fits["ring"][2] / numpy.array(dp.tokens_per_gpu) - 1
assert max(abs(ring_errors)) < 0.1 and fits["bytes"][0] < 0
assert fits["tree"][2][-1] > 1.5 * dp.tokens_per_gpu[-1]
plots.scaling_models(dp, {name: of[2] for name, of in fits.items()}, fitted=3)

# %% [markdown]
# *The figure, left: recorded throughput per GPU as points, three fitted and three open. The curves of bytes and
# tree pass far above the last point; the ring's curve passes near all six. Right: the error of each model.*
#
# All three fit the first three points within 2 %. At 256 GPUs the bytes are wrong by a factor of 2.2, the tree by
# 1.9, and the ring by 8 %. The fit of the bytes even makes computing take less than no time (as the
# assertion says). A fit that is good where it was fitted says little. What the ring model says:

# %%
a, b, _ = fits["ring"]
for n in (8, 256):
    print(f"{n:3} GPUs: {b * n / (a + b * n):.0%} of the step is the part that grows with N")
print(f"half of the step at {a / b:.0f} GPUs")

# %% [markdown]
# This is Amdahl's law in other words. N GPUs do the work of N/(a + b·N), and that is Amdahl's curve for s = b/(a +
# b). A serial part, and an overhead of each GPU that grows with N, cannot be told apart by a curve: hence the
# share of about one part in twenty in section 2.
#
# What does it miss? At 128 GPUs it is 9 % too slow and at 256 it is 8 % too fast: between them something happens
# that no straight line has, such as traffic that meets in the network. It also gives no cause. Waiting grows with N
# too (section 4), and would be fitted just as well. And no overlap is in it: a real step hides communication behind
# backward until it no longer fits, and only then does the step grow. To know the cause you need the trace of a
# step.
#
# Not every job looks like this. Llama-3-8B with FSDP (lesson 07) does 5,762 tokens/s on each of 8 H100s and 5,605 on
# each of 128 (*recorded*, [torchtitan](https://github.com/pytorch/torchtitan)):

# %%
fsdp = recorded.TORCHTITAN_FSDP
print(f"{fsdp.name}: {fsdp.efficiency[-1]:.0%} efficiency on 16 times the GPUs")

# %% [markdown]
# ## 4. Where does the time go?
#
# ### A stopwatch in every step
#
# The step below averages the gradients after backward, in one flat buffer, like the first versions of lesson 04. It
# is not the fastest, but its parts follow one another, so each can be timed. A **lap** of the watch ends a part.


# %%
class Stopwatch:
    """What this rank did from when to when: a list of (part, start, end) in seconds."""

    def __init__(self):
        self.spans, self.now = [], time.monotonic()

    def lap(self, part):
        finish()
        start, self.now = self.now, time.monotonic()
        self.spans.append((part, start, self.now))


# %%
def average_gradients(model, watch, apart):
    """All-reduce the gradients; with `apart`, wait for all ranks first and time that by itself."""
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in gradients])
    watch.lap("copies")
    if apart:
        dist.barrier()
        watch.lap("wait")
    dist.all_reduce(flat)
    watch.lap("all_reduce")
    flat /= dist.get_world_size()
    for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(part.view_as(g))
    watch.lap("copies")


# %% [markdown]
# One rank can be made late, by a sleep in its computation: a hotter GPU, a longer sequence, a slower disk.


# %%
def watched_steps(delay, apart, steps=6):
    """The spans of each step of this rank; the last rank is late by `delay` seconds."""
    model = build_gpt().to(device())
    optimizer, all_spans = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        dist.barrier()
        watch = Stopwatch()
        x, y = batch(step, rank_batch)
        watch.lap("data")
        loss_of(model, x, y).backward()
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(delay)
        watch.lap("compute")
        average_gradients(model, watch, apart)
        optimizer.step()
        optimizer.zero_grad()
        watch.lap("optimizer")
        all_spans.append(watch.spans)
    return all_spans[2:]


def run_watched(delay, apart):
    return launch(watched_steps, delay, apart, world_size=world_size, backend=backend)


# %% [markdown]
# **Predict** (question 3). The last rank is 40 ms late. What will the other ranks' time be spent on? (The figure
# shows the shortest of four steps.)


# %%
def one_step(by_rank):
    """The shortest step as rows for a timeline, from the moment the first rank starts."""

    def begin_and_end(ranks):
        return min(spans[0][1] for spans in ranks), max(spans[-1][2] for spans in ranks)

    steps = [(*begin_and_end(ranks), ranks) for ranks in zip(*by_rank, strict=True)]
    zero, _, ranks = min(steps, key=lambda step: step[1] - step[0])
    return {
        f"rank {r}": [(part, start - zero, end - zero) for part, start, end in spans]
        for r, spans in enumerate(ranks)
    }


together = run_watched(late, apart=False)
plots.step_spans(one_step(together), "measured: one step; the last rank is late")

# %% [markdown]
# *The figure: one row a rank. The last rank has the longest bar of compute and a short all_reduce; the others have
# shorter bars of compute and long ones of all_reduce. Where ranks share cores, some begin later than others, and have
# that much less to wait.*
#
# The 40 ms show as `all_reduce`, on the ranks that are *not* late. A profile of rank 0 would say: "communication
# takes most of the step, buy a faster network." The network is idle.
#
# ### Waiting is not transfer
#
# An all-reduce cannot end before its last rank has begun (lesson 02). So put a **barrier** in front of it. The
# barrier carries no data: the time in it is waiting. What the all-reduce takes after it is transfer.

# %%
apart = run_watched(late, apart=True)
plots.step_spans(one_step(apart), "measured: one step with a barrier before the all-reduce")

# %% [markdown]
# *The figure: the same step. Now the long bars of the other ranks are `wait`, and the all_reduce is short on every
# rank.*
#
# The next cell adds the parts up, over four steps, for a job without a late rank and for this one.


# %%
def parts_of(by_rank):
    """Seconds of each part in a step, by rank: the mean over the steps."""
    rows = {}
    for rank, all_spans in enumerate(by_rank):
        row = rows[f"rank {rank}"] = {}
        for part, start, end in (span for spans in all_spans for span in spans):
            row[part] = row.get(part, 0) + (end - start) / len(all_spans)
    return rows


even = run_watched(0, apart=True)
rows = {f"even: {rank}": row for rank, row in parts_of(even).items()}
rows |= {f"one late: {rank}": row for rank, row in parts_of(apart).items()}
plots.step_split(rows, "measured: the parts of a step, with a barrier before the all-reduce")

# %% [markdown]
# *The figure: a bar for each rank. In the upper half the bars differ as far as ranks share cores and take turns, and
# none stands out as in the lower half: there the late rank's bar is filled with compute and the others' with wait.*

# %% tags=["nbval-ignore-output"]
for name, by_rank in {"even": even, "one late": apart}.items():
    split = list(parts_of(by_rank).values())
    mean = {part: numpy.mean([row[part] for row in split]) for part in split[0]}
    whole = sum(mean.values())
    imbalance = max(row["compute"] for row in split) / mean["compute"] - 1
    print(f"{name:9}" + "".join(f" {part} {t / whole:.0%}," for part, t in mean.items()), end="")
    print(f" imbalance {imbalance:.0%}")

# %% [markdown]
# The four overheads are in bold. One rank alone has none of them, so all their time is efficiency lost. Of the last two
# rows only a part is:
#
# | part | overhead | what helps |
# |---|---|---|
# | all_reduce | **communication** | fewer bytes (section 7), overlap (section 5), faster links |
# | wait | **imbalance** of work, which **synchronisation** makes everybody pay | equal batches, find the slow rank |
# | copies | **copies** into and out of buffers | gradients that live in the buffer |
# | optimizer | work that every rank repeats: serial if the batch stays (section 2) | sharded optimizer (lesson 06) |
# | data | work that one rank has too; a loss where ranks share a disk or cores | loader processes (lesson 15) |
#
# **Imbalance** is max/mean − 1 of the compute times: by that much computing takes longer than if the same seconds were
# spread evenly over the ranks. Even ranks wait as well where there are fewer cores than ranks: they take turns.
#
# <details><summary>Why not leave the barrier in?</summary>
#
# It adds a round of messages to each step, and under DDP, placed after backward as here, it would end the overlap. It
# is an instrument, to be taken out again.
# </details>
#
# ### Nobody is slow, and still all wait
#
# No rank need be broken. If each rank's step varies a little, N ranks wait for the unluckiest at each step. The
# cell draws times from a normal distribution with a mean of 1 and a standard deviation of 5 % (*modelled*).

# %%
generator = torch.Generator().manual_seed(0)
for n in (1, 8, 64, 512, 4096):
    steps = 1 + 0.05 * torch.randn(400, n, generator=generator)
    print(
        f"{n:5} ranks: a step takes {steps.max(1).values.mean():.2f}, so efficiency is at most",
        end="",
    )
    print(f" {1 / steps.max(1).values.mean():.0%}")

# %% [markdown]
# Five percent of jitter costs 15 % at 4,096 ranks. The wait grows like √(2 ln N) here: slowly, and without end. Real
# times have longer tails, and cost more. Some ranks are slow for a reason: a GPU that is hot and lowers its clock, or a
# busy disk. One such **straggler** sets the pace of all. Compare the ranks' compute and data times, as the figure above
# does, and look at the slowest; a long *wait* is never the culprit. (A bad link shows in neither: lesson 03.)
#
# > **What changes on real GPUs.** Kernels run behind Python, so each lap needs a `torch.cuda.synchronize()` (`finish`
# > here), which itself ends the overlap. And NCCL waits in a kernel that spins: a GPU that waits for a late rank shows
# > 100 % utilisation.
#
# ### Copies in DDP, from a trace
#
# `torch.profiler` records every operation of a rank, and what gloo does on its own threads. The cell takes one step
# of DDP and counts the copies between gradients and buckets. With `gradient_as_bucket_view=True` the gradients live
# in the bucket, as long as nobody drops them: `zero_grad()` does, by default, and `set_to_none=False` does not.
# **Predict** the copies of the three cases.


# %%
def traced_step(none=True, **options):
    """Every operation of one DDP step of this rank: (name, thread, start, end), seconds."""
    model = DDP(build_gpt().to(device()), **options)
    for step in range(4):
        x, y = batch(step, rank_batch)
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=False) as profiler:
            loss_of(model, x, y).backward()
        model.zero_grad(set_to_none=none)
    spans = ((e.name, e.thread, e.time_range.start, e.time_range.end) for e in profiler.events())
    return [(name, thread, start / 1e6, end / 1e6) for name, thread, start, end in spans]


# %%
os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler says nothing on the side
copies = {}
for view, none in ((False, True), (True, True), (True, False)):
    options = {"gradient_as_bucket_view": view, "none": none}
    trace = launch(traced_step, world_size=world_size, backend="gloo", **options)[0]
    names = [name.rpartition("::")[2] for name, *_ in trace]
    into, out = names.count("mul_out"), names.count("copy_bucket_to_grad")
    copies[view, none] = into, out
    print(f"gradient_as_bucket_view={view!s:5}, set_to_none={none!s:5}:", end="")
    print(f" {into} copies in, {out} back")
assert [*copies.values()] == [(28, 28), (28, 0), (0, 0)]

# %% [markdown]
# One copy each way for every parameter. With views the way back is saved; but after the default `zero_grad()` backward
# makes new gradients, which DDP copies into the bucket all the same. Only gradients that are set to zero instead stay
# in the bucket. Each copy reads and writes the whole gradient; on a GPU that is memory bandwidth, and without the views
# the gradients exist twice.

# %% [markdown]
# ## 5. Communication: how much, and how much of it hides
#
# ### The ratio
#
# A rank computes 6 FLOPs for each parameter and token, 2 in forward and 4 in backward (`flops_per_token` counts the
# matrix products, attention's too), and all-reduces b bytes for each parameter. **Predict** (question 4): how does the
# ratio of the two change for a model of ten times the parameters?
#
# With Ψ parameters, N ranks, B tokens a rank, b bytes for each gradient, speed F and bus bandwidth W:
#
# $$\frac{\text{compute}}{\text{communication}} = \frac{6\,\Psi B / F}{2\frac{N-1}{N}\, b \Psi / W}
#   = \frac{3\,B\,W}{b\,F}\cdot\frac{N}{N-1}$$
#
# Ψ is gone. Data parallelism of a large model scales as well as that of a small one, as long as each GPU gets as
# many *tokens*. What counts is B, and the ratio of the machine W/F. So ask: from how many tokens on does the
# all-reduce fit behind the backward pass? The cell takes 400 TFLOP/s, what Llama 3 reached on an H100 (*recorded*,
# [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), table 4), gradients in bf16, and the rate of one link for each
# GPU (*modelled*).


# %%
def tokens_to_hide(flops, bandwidth, n, width=2):
    """Tokens of a rank whose backward pass takes as long as the all-reduce."""
    return bytes_sent("all_reduce", n, width) / bandwidth * flops / 4


for key, n in (("nvlink4", 8), ("ib_ndr", 64), ("eth_100g", 64), ("eth_25g", 64)):
    link = LINKS[key]
    print(
        f"{link.name:15} {n:3} GPUs: {tokens_to_hide(400e12, link.bandwidth, n):9,.0f} tokens a GPU"
    )
gpt = TransformerConfig()
print(f"our GPT: {gpt.flops_per_token() / gpt.parameter_count:.1f} FLOPs per parameter and token")

# %% [markdown]
# Within a node fewer than a thousand tokens do. Over 25-gigabit Ethernet a GPU would need more than a hundred
# thousand in each step, and the activations of a large model leave no room for so many (section 8). Accumulating
# gradients without communicating (`no_sync`, lesson 04) is one way to get there, compressing them (section 7)
# another. (Our GPT needs 6.6 FLOPs instead of 6: attention multiplies without having weights for it.)
#
# > **Misconception.** "Large models scale worse because they send more." They send more and compute more, by the
# > same factor. They scale worse when the memory leaves room for fewer tokens.
#
# ### Buckets: three quantities at once
#
# DDP starts a bucket's all-reduce as soon as its gradients are there, while backward goes on. The **overlap
# fraction** is the share of communication during backward. The cell changes `bucket_cap_mb` and reads messages and
# bytes from the ledger, and times from DDP's own log. That counts communication from the start of the first all-reduce
# to the end of the last, with the gaps between, as a mean over all steps.
#
# **Predict** (question 5). What will one bucket hide, and what will one bucket for each parameter cost? (α is the
# latency that each all-reduce pays whatever its size, β its seconds for each further byte: lesson 02.)


# %%
def bucketed(cap):
    """Messages, bytes; seconds of forward and backward, of communication, of that in backward."""
    model = DDP(build_gpt().to(device()), bucket_cap_mb=cap, gradient_as_bucket_view=True)
    seconds = []
    for step in range(9):
        x, y = batch(step, rank_batch)
        dist.barrier()
        start = time.perf_counter()
        loss = loss_of(model, x, y)
        with record() as ledger:
            loss.backward()
        finish()
        seconds.append(time.perf_counter() - start)
        model.zero_grad()
    log, names = model._get_ddp_logging_data(), ("comm", "compute_comm_overlap")
    times = [log.get(f"avg_backward_{name}_time", 0) / 1e9 for name in names]
    return ledger.count(), ledger.bytes(), numpy.median(seconds[3:]), *times


# %%
caps = [25, 0.25, 0.125, 0.0625, 0.0001]  # MiB
sweep = [launch(bucketed, cap, world_size=world_size, backend=backend)[0] for cap in caps]
for cap, (messages, size, *_) in zip(caps, sweep, strict=True):
    print(f"bucket_cap_mb={cap:<7}{messages:3} messages, {size:,} bytes")
assert {size for _, size, *_ in sweep} == {4 * gpt.parameter_count}

# %% [markdown]
# The bytes never change. A bucket closes when it has *passed* its cap, so the largest parameter sets a limit of its
# own, and the smallest cap gives one bucket for each parameter.

# %% tags=["nbval-ignore-output"]
messages, _, step_seconds, communication, both = zip(*sweep, strict=True)
overlap = [o / c if c else 0 for o, c in zip(both, communication, strict=True)]
print("bucket_cap_mb  messages  step (ms)  communication (ms)  of it in backward")
for cap, count, s, c, o in zip(caps, messages, step_seconds, communication, overlap, strict=True):
    print(f"{cap:<13}{count:10}{s * 1e3:11.1f}{c * 1e3:20.1f}{o:19.0%}")

# %%
plots.bucket_sweep(messages, step_seconds, communication, overlap)

# %% [markdown]
# *The figure, left: time of forward and backward, and of communication, over the number of buckets. Right: the overlap
# fraction. As stored, from two cores: both times are longest with a bucket for each parameter. With one bucket little
# overlaps; with two to seven more does, and with a bucket for each parameter less again.*
#
# One bucket is full only when the last gradient has come: nothing is left to hide behind. (DDP's log lets backward end
# a moment later, when autograd calls back. Hence the overlap of a single bucket.) Many buckets start early, and pay
# α each. Where ranks compute on the cores that carry the messages, α is large and hidden communication slows the
# computation down, so few buckets win.
#
# The same from a trace, for rank 0: when the backward pass ran, and when all-reduces were under way on gloo's threads.
# Under way is not busy (section 4): an all-reduce that was begun early also waits in there for the other ranks.


# %%
def overlap_of(trace):
    """Rows for a timeline of one traced step, and the share of communication during backward."""
    backward = [
        (start, end) for name, _, start, end in trace if name.startswith("autograd::engine")
    ]
    window = backward[0][0], backward[-1][1]
    busy = [(thread, start, end) for name, thread, start, end in trace if name.startswith("gloo:")]
    zero = window[0]
    rows = {"backward": [("backward", 0, window[1] - zero)]}
    for thread, start, end in busy:
        rows.setdefault(f"gloo, thread {thread}", []).append(
            ("all_reduce", start - zero, end - zero)
        )
    edges = sorted({t for _, *span in busy for t in span} | {window[1]})
    lengths = [  # of stretches in which some thread communicates
        (b - a, b <= window[1])
        for a, b in zip(edges, edges[1:], strict=False)
        if any(start <= a and b <= end for _, start, end in busy)
    ]
    return rows, sum(t for t, inside in lengths if inside) / sum(t for t, _ in lengths)


trace = launch(traced_step, bucket_cap_mb=0.0625, world_size=world_size, backend="gloo")[0]
rows, hidden = overlap_of(trace)
plots.step_spans(rows, "measured: buckets of 64 KiB, rank 0, from the profiler's trace")

# %% [markdown]
# *The figure: the upper bar is the backward pass. Below it the all-reduces of the buckets run on gloo's threads;
# the first start during backward, the last end after it.*
#
# The share below need not be that of the table: it counts only the time in which an all-reduce is under way, it is a
# single step, and the profiler takes time of its own.

# %% tags=["nbval-ignore-output"]
print(f"from the trace: {hidden:.0%} of the communication during backward")

# %% [markdown]
# ### Choosing the size
#
# The best size can be computed. Cut S bytes into k buckets, that become ready at equal distances during a backward
# pass of T seconds. Each takes c seconds, one after the other; with α and β, c = α + βS/k. Two things can happen:
#
# - the link keeps up: only the last bucket sticks out, and the step ends at T + c;
# - the link is the bottleneck: after the first bucket it is never idle, and the step ends at T/k + k·c.
#
# The later of the two counts. The cell compares the formula with the schedule, bucket by bucket.


# %%
def exposed(k, each, backward):
    """Seconds that k all-reduces of `each` seconds add to a backward pass of `backward` seconds."""
    return max(backward + each, backward / k + k * each) - backward


def schedule(k, each, backward):
    """When each bucket's all-reduce starts and ends."""
    spans, free = [], 0.0
    for i in range(1, k + 1):
        start = max(free, backward * i / k)
        free = start + each
        spans.append((start, free))
    return spans


for k in (1, 2, 3, 10, 100):
    for beta in (1e-9, 1e-8):  # a link that keeps up, and one that does not
        case = (k, 1e-3 + beta * 1e7 / k, 0.05)
        assert math.isclose(schedule(*case)[-1][1] - 0.05, exposed(*case))
print("the formula gives the end of the schedule")

# %%
rows = {}
for k in (1, 5, 40):
    case = (k, 1e-3 + 1.2e-9 * 2e7 / k, 0.05)
    bars = [("all_reduce", *span) for span in schedule(*case)]
    rows |= {f"{k}: backward": [("backward", 0, 0.05)], f"{k}: all-reduce": bars}
plots.step_spans(rows, "modelled: 1, 5 and 40 buckets; α is 1 ms, backward 50 ms")

# %% [markdown]
# *The figure: with one bucket the all-reduce starts when backward ends. With five most of it hides. With forty the
# latencies, 40 ms in all, leave no gap on the link, and the end moves out again.*
#
# When the link is the bottleneck, T/k + kα + βS is least at k = √(T/α). When it keeps up, more buckets help until
# the first case becomes the second. Now with real numbers: a model of 1.3 billion parameters, 4,096 tokens for each of
# eight A100s at 140 TFLOP/s (Narayanan et al., table 1, give 135 to 163), gradients in bf16. How long an all-reduce
# takes over NVLink comes from the recorded table of lesson 03, between its rows on a straight line of logarithms. The
# second curve puts the same job on eight nodes of one GPU, each with a port of 100-gigabit Ethernet.

# %%
size, backward = 2 * 1.3e9, 4 * 1.3e9 * 4096 / 140e12
table, eth = recorded.A100_ALL_REDUCE, LINKS["eth_100g"]


def on_nvlink(size):
    """Seconds of an all-reduce over 8 A100s, from the record."""
    return math.exp(numpy.interp(math.log(size), numpy.log(table.sizes), numpy.log(table.seconds)))


def on_ethernet(size):
    return 14 * eth.latency + 2 * 7 / 8 * size / eth.bandwidth  # a ring of 8


sizes = [2.0 ** (e / 4) for e in range(72, 117)]  # of a bucket: 256 KiB to 512 MiB
settings, curves = {"NVLink": on_nvlink, "Ethernet": on_ethernet}, {}
for name, of in settings.items():
    counts = [round(size / b) for b in sizes]
    curves[name] = [exposed(k, of(size / k), backward) for k in counts]
    best = sizes[int(numpy.argmin(curves[name]))]
    print(f"{name}: one all-reduce {of(size) * 1e3:.0f} ms beside a backward pass of", end="")
    print(f" {backward * 1e3:.0f} ms; best {format_bytes(best)}, which adds", end="")
    default = exposed(99, of(size / 99), backward)  # 99 buckets of 25 MiB
    print(f" {min(curves[name]) * 1e3:.1f} ms, 25 MiB {default * 1e3:.1f}")
plots.bucket_choice(sizes, curves, default=25 * 2**20)

# %% [markdown]
# *The figure: over NVLink the added time is a valley with a cliff on its left: with too small buckets the latencies no
# longer fit behind the backward pass; too large ones stick out. Over Ethernet it is nearly flat from about 16 MiB on:
# whatever the size, most of the communication does not fit.*
#
# DDP's default of 25 MiB stands on the gentle side of the valley, a fraction of a millisecond from the best. Stay on
# that side: near the cliff a straight line through the table would mislead. It makes an all-reduce of 1.2 MiB a third
# faster than the table does, and has two thousand of them hide where by the table they add 38 % of a backward pass:

# %%
alpha, beta = fit_alpha_beta(table.sizes, table.seconds)
small = 1.2 * 2**20
for name, each in (("α and β", alpha + beta * small), ("the table", on_nvlink(small))):
    added = exposed(round(size / small), each, backward)
    print(f"by {name}: an all-reduce of 1.2 MiB {each * 1e6:3.0f} µs, added {added * 1e3:5.1f} ms")

# %% [markdown]
# Over the slow link the size hardly matters once it is large enough. When communication is the bottleneck, no bucket
# size helps: only fewer bytes do.
#
# > **What changes on real GPUs.** Communication kernels take multiprocessors and memory bandwidth from the computation
# > beside them, so overlapped time is not free either; the model of this section leaves that out. And NCCL's α depends
# > on the size (lesson 03).

# %% [markdown]
# ## 6. Precision
#
# A number of half the bits takes half the bytes, on a wire and in memory, and tensor cores multiply it many times as
# fast as other cores multiply fp32 (the table at the end of this section). What is lost?
#
# ### Six formats
#
# A floating-point number is a sign, an **exponent** that says how large it is, and a **fraction** that says exactly
# how much. Exponent bits buy **range**, fraction bits buy **precision**. In the table `smallest` is the smallest
# number above zero.

# %%
print("format     bits  exponent  fraction    largest   smallest  next after 1")
for f in FORMATS:
    print(
        f"{f.name:10}{f.width:5}{f.exponent:10}{f.fraction:10}{f.largest:11.3g}"
        f"{2.0**f.lowest_power:11.2g}      1 + {2.0**-f.fraction:.2g}"
    )

# %% [markdown]
# Three things to see. bf16 has the exponent of fp32: its range, in steps eight times as coarse as fp16's. fp16 has
# the finer steps and ends at 65,504. tf32 is no storage format: it lies in 32 bits, and only the tensor core's
# multiplication drops 13 of them, so it saves time and not a byte.
#
# **Predict.** Which formats keep 1.001 apart from 1? Which hold 70,000? Which hold 1e-8?

# %%
print(f"{'':8}" + "".join(f"{f.name:>12}" for f in FORMATS))
for number in (1 / 3, 1.001, 500, 70_000, 1e-6, 1e-8):
    print(f"{number:<8.6g}" + "".join(f"{store(number, f).value:12.6g}" for f in FORMATS))

# %% [markdown]
# 1.001 is 1 in bf16 and in both kinds of fp8. 70,000 is infinite in fp16 and in e5m2; e4m3 has no infinity, and the
# cast stops at its largest number, 448 (since PyTorch 2.12; before that it gave NaN). 1e-8 is zero in fp16 and in both
# kinds of fp8, and so is every smaller gradient. Try other numbers:

# %%
explorer = bits_explorer()
explorer

# %% [markdown]
# *The widget: the bits of a number in each format, with sign, exponent and fraction in colours of their own, the
# value that is kept, and the relative error. In a notebook that is not running it shows one number.*
#
# ### Gradients underflow in fp16
#
# How large are gradients? The next cells compute those of the GPT in fp32 and count the powers of two. Our model is
# small and its gradients are large. Large models with long sequences, and accumulation that divides each loss, have
# smaller ones; a loss multiplied by `shrink` stands for them.


# %%
def fixed_batch(step, size=4):
    """Inputs and targets of one process, without ranks."""
    return windows.batch(range(step * size, (step + 1) * size))


def gradients_of(scale):
    model = build_gpt()
    (loss_of(model, *fixed_batch(0)) * scale).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


plain, tiny = gradients_of(1.0), gradients_of(shrink)
assert torch.allclose(plain * shrink, tiny, rtol=1e-3)
for name, gradient in {"loss": plain, "shrunken loss": tiny}.items():
    lost = (gradient.half() == 0).float().mean() - (gradient == 0).float().mean()
    print(f"{name:14}{lost:6.1%} of the gradient's elements become 0 in fp16")

# %%
limits = {f.name: (f.lowest_power, math.log2(f.largest)) for f in FORMATS if f.dtype}
plots.gradient_range({"loss": plain, "shrunken loss": tiny}, limits)

# %% [markdown]
# *The figure, above: two hills, each with a smaller one beside it, the share of gradient elements at each power of
# two; the shrunken loss moves all to the left by 20. Below: a bar for each format that numbers are stored in. The
# left hill stands within the bars of fp32 and bf16 and left of the beginning of fp16's.*
#
# ### Failing, and mended by loss scaling
#
# The figure shows the cure as well: move the hill back. **Loss scaling** multiplies the loss by a large number
# before backward, so that all gradients grow by it, and divides the gradients by it before the optimizer's step, in
# fp32.
#
# Under `torch.autocast` matrix products run in the short format and their inputs are cast on the way; the
# parameters stay in fp32. `GradScaler` does the scaling.
#
# **Predict.** Four runs on the shrunken loss: fp32, bf16, fp16, fp16 with a scaler. Which learn?


# %%
def train(dtype=None, scaler=None, steps=16):
    """Losses of one process; autocast to `dtype` if given, `scaler` a GradScaler or None."""
    model, losses = build_gpt(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-30)
    for step in range(steps):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model, *fixed_batch(step))
        losses.append(loss.item())
        if scaler is None:
            (loss * shrink).backward()
            optimizer.step()
        else:
            scaler.scale(loss * shrink).backward()
            # Divides the gradients by the scale; skips the step if any of them is not finite.
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return losses


# %%
runs = {
    "fp32": train(),
    "bf16": train(torch.bfloat16),
    "fp16": train(torch.float16),
    "fp16, scaler": train(torch.float16, torch.amp.GradScaler("cpu")),
}
for name, losses in runs.items():
    print(f"{name:13} loss {losses[0]:.1f} -> {losses[-1]:.1f}")

# %%
assert runs["fp16"][-1] > 4.5 > 4 > max(runs[name][-1] for name in runs if name != "fp16")
assert max(abs(a - b) for a, b in zip(runs["fp32"], runs["fp16, scaler"], strict=True)) < 0.05
curves = {name: (range(len(losses)), losses) for name, losses in runs.items()}
plots.loss_curves(curves, "measured: a loss with small gradients", wide=["fp32"])

# %% [markdown]
# *The figure: the curves of fp32, bf16 and scaled fp16 fall together; that of fp16 without a scaler is flat.*
#
# The flat run raised no error and no warning. Its loss is finite, its gradients are zero. bf16 needs no scaler: it
# has fp32's range. (AdamW's `eps` is small here, so that it does not swallow tiny gradients in fp32 too.)
#
# How does the scaler know the right factor? It tries. If any gradient is infinite, it skips the step and halves the
# scale; after 2,000 good steps it doubles it.

# %%
scaler, model = torch.amp.GradScaler("cpu", init_scale=2.0**30), build_gpt()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scales, moved = [], []
for step in range(16):
    earlier = model.head.weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(model, *fixed_batch(step, 1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scales.append(math.log2(scaler.get_scale()))
    moved.append(not torch.equal(earlier, model.head.weight))
print("scale after each step, as a power of two:", *(f"{s:.0f}" for s in scales))
print("steps that changed the weights:", *("x" if m else "-" for m in moved))
assert scales[0] == 29 and not moved[0] and moved[-1]

# %% [markdown]
# > **Misconception.** "`torch.cuda.amp.GradScaler` for every low precision." It is deprecated for `torch.amp`, and
# > bf16 needs no scaler at all.
#
# ### Master weights
#
# **Predict** (question 7). A weight of 1.0 in bf16, and a thousand updates of 0.001.

# %%
weight, master = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0)
for _ in range(1000):
    weight += 0.001
    master += 0.001
print(f"bf16: {weight.item():.3f}   fp32 master, then cast to bf16: {master.bfloat16().item():.3f}")
assert weight == 1 and master.bfloat16() == 2

# %% [markdown]
# The next number after 1 in bf16 is 1.0078. An update of 0.001 is less than half of the way, so the sum is rounded
# back to 1, a thousand times. A **master weight** in fp32 collects the small updates.
#
# In the GPT the gains of the layer norms are such weights: they start at 1. The cell trains it in pure bf16 and
# counts the weights that are after eight steps what they were.


# %%
def unchanged(dtype, lr):
    """Shares of all weights, and of the gains, that are what they were after eight steps."""
    model, first = build_gpt(dtype=dtype), build_gpt(dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
    for step in range(8):
        loss_of(model, *fixed_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.named_parameters(), first.parameters(), strict=True)
    same = {name: (p == q).flatten().float() for (name, p), q in pairs}
    gains = [s for name, s in same.items() if "norm" in name and name.endswith("weight")]
    return torch.cat([*same.values()]).mean(), torch.cat(gains).mean()


# %%
print("unchanged after eight steps       fp32: all    gains    bf16: all    gains")
for lr in (1e-3, 1e-4, 1e-5):
    shares = [s for dtype in (torch.float32, torch.bfloat16) for s in unchanged(dtype, lr)]
    shares = [f"{s:9.0%}" for s in shares]
    print(f"learning rate {lr:<20g}{shares[0]}{shares[1]}    {shares[2]}{shares[3]}")

# %% [markdown]
# The smaller the learning rate, the more of the model stands still, and learning rates fall during training. The
# gains do not move at all.
#
# <details><summary>What else helps, besides a second copy of all weights?</summary>
#
# **Stochastic rounding**: round up with a probability that is the distance to the lower neighbour, as a share of the
# gap. Then the thousand updates above make 2 on average. Or keep only the 16 bits that bf16 drops, beside the bf16
# weight: together they are the master weight, without storing its upper half twice.
# </details>
#
# ### What it saves, counted
#
# **Predict** (question 6). Bytes per parameter of weights, gradients, Adam's two moments and master weights.


# %%
def state_bytes(dtype, master):
    """Bytes per parameter: weights, gradients, moments, master weights; counted after one step."""
    model = build_gpt(dtype=dtype)
    loss_of(model, *fixed_batch(0)).backward()
    copies = [p.detach().float().requires_grad_() for p in model.parameters()] if master else None
    for copy, p in zip(copies or [], model.parameters(), strict=bool(copies)):
        copy.grad = p.grad.float()
    optimizer = torch.optim.Adam(copies or model.parameters())
    optimizer.step()
    n = sum(p.numel() for p in model.parameters())
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    kinds = (list(model.parameters()), [p.grad for p in model.parameters()], moments, copies or [])
    return [sum(t.nbytes for t in kind) / n for kind in kinds]


# %%
print("bytes per parameter       weights  gradients  moments  master      sum")
for name, case in {
    "fp32": (torch.float32, False),
    "bf16, fp32 master": (torch.bfloat16, True),
    "pure bf16": (torch.bfloat16, False),
}.items():
    counted = state_bytes(*case)
    print(f"{name:24}" + "".join(f"{c:9.0f}" for c in counted) + f"{sum(counted):9.0f}")
    assert name == "pure bf16" or sum(counted) == 16

# %% [markdown]
# 16 and 16. Mixed precision moves bytes from weights and gradients to the master copy. (With gradients summed in
# fp32 it is 18, and under `torch.autocast`, where parameters and gradients stay fp32, 16 and the casts besides.)
# Pure bf16 has 8, and loses updates.
#
# > **Misconception.** "Mixed precision halves the memory." Not that of the model states. It saves **activations**
# > and **time**.
#
# Activations can be counted as well. Autograd keeps tensors for backward; a hook sees each. The function counts
# every memory block once and leaves parameters out.


# %%
def kept_for_backward(config, size, dtype=None):
    """Bytes that the forward pass keeps for backward, besides the parameters."""
    model, kept = build_gpt(config), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        block = tensor.untyped_storage()
        if block.data_ptr() not in own:
            kept[block.data_ptr()] = block.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model, *fixed_batch(0, size))
    assert loss.requires_grad  # keeps the graph, and so the blocks, until here
    return sum(kept.values())


in_fp32, in_bf16 = (kept_for_backward(gpt, 16, dtype) for dtype in (None, torch.bfloat16))
print(f"kept for backward, 16 windows: fp32 {in_fp32 / 1e6:.1f} MB,", end="")
print(f" autocast to bf16 {in_bf16 / 1e6:.1f} MB")

# %% [markdown]
# Less, but not half: under autocast the layer norms, the residual stream and the loss stay in fp32, and the cast
# copies of the weights are kept too.
#
# **And the wire?** Under autocast the gradients are those of fp32 parameters. How many bytes does DDP all-reduce?


# %%
def autocast_bytes(dtype):
    model = DDP(build_gpt())
    with torch.autocast("cpu", dtype=dtype):
        loss = loss_of(model, *batch(0, 1))
    with record() as ledger:
        loss.backward()
    return ledger.bytes("all_reduce") / gpt.parameter_count


on_wire = launch(autocast_bytes, torch.bfloat16, world_size=world_size, backend="gloo")[0]
print(f"{on_wire:.0f} bytes per parameter in the all-reduce, under autocast to bf16")
assert on_wire == 4

# %% [markdown]
# Four. Autocast makes computing cheaper and communication not. Section 7 changes that.
#
# ### fp8
#
# With 8 bits one scale for all is not enough: e4m3 ends at 448 and has three bits of fraction. So each tensor, or today
# each row or block of 32 to 128 elements, gets its own **scale**, chosen so that its largest element lands at the end
# of the range. Here it is one scale a tensor.


# %%
def error_in_fp8(x, scale, dtype=torch.float8_e4m3fn):
    """Relative error (root mean square) of storing x in fp8 after multiplying it by `scale`."""
    kept = (x * scale).to(dtype).float() / scale
    return ((kept - x).norm() / x.norm()).item()


weight = build_gpt().blocks[0].mlp.up.weight.detach()
for name, x in {"weight": weight, "gradient": plain, "shrunken": tiny}.items():
    scale = torch.finfo(torch.float8_e4m3fn).max / x.abs().max().item()
    errors = error_in_fp8(x, 1.0), error_in_fp8(x, scale)
    print(f"{name:9} error without scale {errors[0]:6.1%}, with {errors[1]:.1%}")

# %% [markdown]
# With a scale the error is a few percent of the tensor's length, however small the tensor is; without one it depends,
# up to everything. It is an error of the whole: with one scale a tensor, an element half a million times smaller than
# the largest still becomes 0, which is why blocks have scales of their own now. Libraries such as Transformer Engine
# and torchao keep such scales, and use fp8 for matrix products.
#
# > **What changes on real GPUs.** Time. Dense FLOP/s by format, fp32 on the ordinary cores and the others on tensor
# > cores, from the data sheets (*recorded*; the figures in brochures that are twice these count 2:4 sparsity). fp4 has
# > 4 bits:

# %%
formats = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
print("TFLOP/s" + "".join(f"{p:>8}" for p in formats))
for key in ("v100", "a100", "h100", "b200"):
    flops = GPUS[key].flops
    row = [f"{flops[p] / 1e12:8.0f}" if p in flops else f"{'-':>8}" for p in formats]
    print(f"{GPUS[key].name:7}" + "".join(row))

# %% [markdown]
# ## 7. Compressed gradients
#
# ### A hook on each bucket
#
# DDP calls a **communication hook** instead of its all-reduce: it gets a bucket and returns a future of the
# averaged bucket. So everything about the wire can be changed without touching the model. PyTorch brings some
# hooks. Here is one for bf16 (the built-in one is refused by a PyTorch that was built without CUDA):


# %%
def bf16_hook(state, bucket):
    """Average a bucket in bf16."""
    short = bucket.buffer().bfloat16() / dist.get_world_size()

    def widen(future):
        return bucket.buffer().copy_(future.value()[0])

    return dist.all_reduce(short, async_op=True).get_future().then(widen)


# %% [markdown]
# Dividing *before* the sum matters more in fp16, where a sum over many ranks could pass 65,504; PyTorch's fp16 hook
# does the same.
#
# ### Top-k with error feedback
#
# Most elements of a gradient are small. **Top-k** sends only the k largest, as pairs of place and value. The rest
# must not be thrown away: small gradients that always point the same way are how a model learns the fine things. So
# what was not sent is kept, and added to the next gradient: **error feedback**.


# %%
def largest(gradient, left, share):
    """Values and places of the largest elements of gradient + left, and what is left then."""
    left = gradient + left
    places = left.abs().topk(max(1, int(share * left.numel()))).indices
    values = left[places]
    left[places] = 0
    return values, places, left


sent, received, left = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
for step in range(50):
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(step))
    values, places, left = largest(gradient, left, 0.01)
    sent[places] += values
    received += gradient
assert torch.allclose(sent + left, received, atol=1e-5)
print(
    "50 steps: what was sent and what is left make up all gradients. Nothing is lost, it is late."
)

# %% [markdown]
# As a hook. Every rank picks other places, so there is nothing to add on the way: it is an all-gather, of values
# and places in one tensor. (`view` lets the bits of an integer travel as a float.)
#
# What is left is kept for each parameter, not for each bucket. DDP rebuilds its buckets after the first step
# (lesson 04), and the elements change places: a hook that overlooks this adds one layer's left-overs to another's
# gradient, and nobody complains.


# %%
class TopK:
    """State of the hook: which share to send, whether to keep the rest, and what is left."""

    def __init__(self, share, feedback):
        self.share, self.feedback, self.left = share, feedback, {}


def top_k_hook(state, bucket):
    """Average a bucket of which every rank sends its largest elements."""
    buffer, n, owners = bucket.buffer(), dist.get_world_size(), bucket.parameters()
    left = torch.cat([state.left.get(p, torch.zeros_like(p)).flatten() for p in owners])
    values, places, left = largest(buffer, left, state.share)
    if state.feedback:
        state.left |= zip(owners, left.split([p.numel() for p in owners]), strict=True)
    mine = torch.cat([values, places.int().view(torch.float32)])
    everyone = mine.new_empty(n * mine.numel())

    def add_up(_):
        values, places = everyone.view(n, 2, -1).unbind(1)
        places = places.reshape(-1).view(torch.int32)
        return buffer.zero_().index_add_(0, places, values.reshape(-1) / n)

    return dist.all_gather_single(everyone, mine, async_op=True).get_future().then(add_up)


# %% [markdown]
# **PowerSGD** takes each gradient matrix, m×n, as a product of an m×r and an n×r matrix and all-reduces those two:
# r(m + n) numbers instead of m·n ([Vogels et al.](https://arxiv.org/abs/1905.13727)). It has error feedback built
# in. On gloo, with more than one bucket, PyTorch 2.13 aborts the process, hence `bucket_cap_mb_list`: one bucket for
# everything. All runs below have it, so that they are compared on the same messages.


# %%
def register(model, name):
    """Put the hook `name` on a DDP model."""
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "bf16":
        model.register_comm_hook(None, bf16_hook)
    elif name.startswith("top"):
        model.register_comm_hook(TopK(0.01, feedback="feedback" in name), top_k_hook)
    elif name == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


# %%
def learn(name, steps):
    """Loss of each step, bytes this rank must send in the last, share of weights never changed."""
    model = DDP(build_gpt().to(device()), bucket_cap_mb_list=[100])
    register(model, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses, n = [], dist.get_world_size()
    for step in range(steps):
        loss = loss_of(model, *batch(step, 4))
        with record() as ledger:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.barrier()  # on every rank gloo's threads are done with the hooks' futures
    pairs = zip(model.parameters(), build_gpt().to(device()).parameters(), strict=True)
    same = torch.cat([(p == q).flatten() for p, q in pairs]).float().mean().item()
    return losses, sum(bytes_sent(entry.op, n, entry.bytes) for entry in ledger), same


# %% [markdown]
# **Predict** (question 8). Bytes sent by a rank in a step: fp16, PowerSGD of rank 4, top 1 %? Which learn as well
# as the uncompressed run? The optimizer is plain SGD, for which error feedback was made.

# %%
steps = dict.fromkeys(["none", "PowerSGD", "top 1 %, feedback", "top 1 %"], training_steps)
steps |= {"fp16": training_steps // 4, "bf16": training_steps // 4}  # enough to compare
learned = {
    name: launch(learn, name, count, world_size=world_size, backend=backend)
    for name, count in steps.items()
}
sent = {name: by_rank[0][1] for name, by_rank in learned.items()}
for name, size in sent.items():
    fewer = sent["none"] / size
    print(f"{name:18}{size:12,.0f} bytes sent by a rank in a step, {fewer:5.1f} times fewer")

# %% [markdown]
# The formulas give the same numbers. For PowerSGD, what has one dimension goes uncompressed:

# %%
shapes = [p.shape for p in build_gpt().parameters()]
numbers = sum(4 * sum(s) if len(s) > 1 else s.numel() for s in shapes)
assert math.isclose(sent["PowerSGD"], bytes_sent("all_reduce", world_size, 4 * numbers))
assert math.isclose(sent["bf16"], sent["none"] / 2) and sent["fp16"] == sent["bf16"]
assert sent["top 1 %"] == (world_size - 1) * 8 * int(0.01 * gpt.parameter_count)
print(f"PowerSGD: {numbers:,} of {gpt.parameter_count:,} numbers")

# %% tags=["nbval-ignore-output"]
counts = torch.stack([y for _, y in windows]).flatten().bincount().double()
entropy = torch.distributions.Categorical(counts).entropy().item()
losses = {name: numpy.mean([of[0] for of in by_rank], axis=0) for name, by_rank in learned.items()}
final = {name: of[-5:].mean() for name, of in losses.items()}
same = {name: by_rank[0][2] for name, by_rank in learned.items()}
for name, value in final.items():
    print(f"{name:18} loss {value:.2f} after {steps[name]:3} steps,", end="")
    print(f" {same[name]:3.0%} of the weights never changed")
print(f"{entropy:.2f} is the loss of knowing how frequent each character is, and no more")

# %%
for name in ("fp16", "bf16"):
    assert abs(losses[name] - losses["none"][: steps[name]]).max() < 0.05
assert final["top 1 %, feedback"] < final["top 1 %"] - 0.1
assert same["top 1 %"] > same["top 1 %, feedback"] > same["none"]
shown = {name: of for name, of in losses.items() if len(of) == training_steps}
smooth = {name: numpy.convolve(of, numpy.ones(5) / 5, "valid") for name, of in shown.items()}
plots.loss_curves(
    {name: (range(5, len(of) + 5), of) for name, of in smooth.items()},
    "measured: loss with compressed gradients, mean of five steps",
    wide=["none"],
)

# %% [markdown]
# *The figure: the curves of PowerSGD and of top-k with feedback are close to the uncompressed one. Top-k without
# feedback leaves them where the model begins to learn more than how frequent each character is, and stays there.*
#
# - **fp16, bf16**: half the bytes, the same losses in all steps that were run, hence not drawn. bf16 rounds more,
#   fp16 can overflow.
# - **PowerSGD**: an order of magnitude fewer bytes here, and the larger the matrices, the more. A close curve.
# - **top-k without feedback**: most weights have never been updated. Its loss is about that of knowing how frequent
#   each character is, and no more.
# - **top-k with feedback**: the same bytes, and another curve. What one step leaves out adds up until it is among the
#   largest.
#
# Stich et al. (below) prove, under the conditions of their theorem, that SGD with error feedback converges at the rate
# of SGD without compression.
#
# <details><summary>And with momentum?</summary>
#
# Then the comparison is not so clear. Momentum makes a late gradient, which arrives as one large number, push on for
# many steps; and clipping the mean afterwards throws away a part of what was kept so carefully. In such a run top-k
# without feedback can end lower than with it. Try it: `SGD(…, momentum=0.9)` and `clip_grad_norm_(model.parameters(),
# 0.3)`. Lin et al., *Deep gradient compression*, 2017 ([arXiv 1712.01887](https://arxiv.org/abs/1712.01887)), mend
# both: each rank applies momentum and clips *before* it chooses what to send.
# </details>
#
# > **Misconception.** "The top 1 % is 100 times fewer bytes." Each element needs its place too, which halves that.
# > And an all-gather grows with N where an all-reduce does not:

# %%
n_parameters = gpt.parameter_count
for n in (2, 4, 16, 100, 256):
    dense = bytes_sent("all_reduce", n, 4 * n_parameters)
    sparse = (n - 1) * 8 * 0.01 * n_parameters
    print(f"{n:4} ranks: top 1 % sends {sparse / dense:5.1%} of the bytes of an all-reduce")

# %% [markdown]
# At a hundred ranks nothing is saved compared with an all-reduce in fp32, and at fifty nothing compared with bf16.
# PowerSGD's factors are *added* on the way, so its saving stays: its authors chose the form for that.
#
# > **What changes on real GPUs.** Compressing costs time too: a top-k over millions of elements, or an
# > orthogonalisation, on the same GPU that computes backward. Over NVLink that can take longer than the all-reduce
# > that it shortens. Compression pays where the link is slow: between sites, over Ethernet.

# %% [markdown]
# ## 8. Activation checkpointing
#
# More tokens on each GPU improve the ratio of section 5. What limits them is the memory of activations.
# **Activation checkpointing** keeps only the input of each block, and computes the rest of the block again when
# backward comes to it.
#
# **Predict** (question 9). Forward costs 1, backward 2. What does a step cost with every block's forward repeated?
#
# First: is the gradient the same?

# %%
gradients = []
for again in (False, True):
    model = build_gpt(TransformerConfig(checkpoint=again))
    loss_of(model, *fixed_batch(0)).backward()
    gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
assert torch.equal(*gradients)
print("the same gradients, to the last bit")

# %% [markdown]
# Now memory, counted by `kept_for_backward` of section 6, and time, over the number of layers.

# %%
def of_depth(layers, checkpoint):
    return TransformerConfig(layers=layers, checkpoint=checkpoint)


layers = [1, 2, 4, 8]
ways = {"keep all": False, "checkpoint": True}
kept = {
    name: [kept_for_backward(of_depth(depth, again), 8) for depth in layers]
    for name, again in ways.items()
}
for i, depth in enumerate(layers):
    print(
        f"{depth} layers:" + "".join(f"  {name} {of[i] / 1e6:6.2f} MB" for name, of in kept.items())
    )
config = TransformerConfig()
block = 8 * config.context * config.hidden * 4  # bytes of one block's input
assert (kept["checkpoint"][3] - kept["checkpoint"][2]) == 4 * block
more = (kept["keep all"][3] - kept["keep all"][2]) / 4 / block
print(f"each further layer keeps {more:.1f} times its input, or its input only")

# %% [markdown]
# With checkpointing a layer costs one tensor, its input. The memory that backward needs on top is that of *one*
# block, while it is computed again.


# %%
def seconds_of(config, size=8):
    """CPU seconds of the best of five forward and backward passes; this process has one thread."""
    model, (x, y), times = build_gpt(config), fixed_batch(0, size), []
    for _ in range(6):
        start = time.process_time()
        loss_of(model, x, y).backward()
        times.append(time.process_time() - start)
    return min(times[1:])


took = {
    name: [seconds_of(of_depth(depth, again)) for depth in layers]
    for name, again in ways.items()
}
plots.checkpointing(layers, kept, took)

# %% [markdown]
# *The figure, left: memory grows with the layers, steeply without checkpointing and slowly with it. Right: CPU time
# grows with the layers too, faster with checkpointing.*

# %% tags=["nbval-ignore-output"]
memory, extra = (
    kept["keep all"][-1] / kept["checkpoint"][-1],
    took["checkpoint"][-1] / took["keep all"][-1],
)
print(f"8 layers: {memory:.1f} times less memory, {extra:.2f} times the time (measured)")
counted = [of_depth(8, again).flops_per_token() for again in (True, False)]
print(f"{counted[0] / counted[1]:.2f} times the FLOPs")

# %% [markdown]
# The FLOPs say 1 + 2 + 1 instead of 1 + 2, a third more at most. They are less where the end of a block need not be
# repeated: here that is its last product, a third of the block's weights. The clock can say more on a model this
# small, where each call costs time beside its FLOPs. Is it worth it? It is, if the memory goes into more tokens for
# each GPU and the step was waiting for communication; or if the model does not fit at all. At 32k tokens Llama-3-8B
# keeps 240 GiB without checkpointing and 31 GiB with it: 8 for the inputs of the blocks, 7 for the block that is
# computed again, and 16 for the logits, which checkpointing does not shrink (*recorded*,
# [stas00/ml-engineering](https://github.com/stas00/ml-engineering)).
#
# <details><summary>And if only every second block is checkpointed?</summary>
#
# Half the saving, half the price. **Selective** checkpointing chooses better: repeat what is large and cheap, such
# as the GELU and the attention scores, and keep what is small and costly to repeat, such as the outputs of matrix
# products.
# </details>

# %% [markdown]
# ## 9. What does it cost?
#
# GPUs are paid by the hour, busy or not. A run that one GPU would finish in T₁ hours takes T₁/S(N) hours on N, and
# each of these hours costs N times the price:
#
# $$\text{cost} = \text{price}\cdot N\cdot\frac{T_1}{S(N)} = \text{price}\cdot\frac{T_1}{E(N)}$$
#
# For a given job and price the cost goes with 1/efficiency, and with nothing else.
#
# **Predict** (question 10). 1.9 times on two GPUs?


# %%
def run_cost(hours_on_one, n, speedup, price=1.0):
    """Hours and dollars of a run."""
    hours = hours_on_one / speedup
    return hours, hours * n * price


hours, dollars = run_cost(100, 2, 1.9)
print(f"two GPUs, 1.9x: {hours / 100 - 1:+.1%} time, {dollars / 100 - 1:+.1%} cost")
for n, e in zip(dp.gpus, dp.efficiency, strict=True):
    hours, dollars = run_cost(1000 / 8, n / 8, n / 8 * e, price=8.0)  # units of eight GPUs
    print(
        f"{n:4} GPUs: 1,000 GPU hours' work takes {hours:6.1f} h and costs {dollars:,.0f} GPU hours"
    )

# %% [markdown]
# 47 % sooner for 5 % more is a bargain: people wait as well. The recorded job tells a longer story. From 8 to 64
# GPUs the run becomes 6 times as fast for 29 % more. From 128 to 256 it becomes 1.2 times as fast and costs two thirds
# more.
#
# > **Misconception.** "More GPUs finish sooner, so the hours cancel." They do at 100 % efficiency only.
#
# ### Time to train
#
# How long does a whole run take? A model of Ψ parameters computes 6 FLOPs for each parameter and token, and 8 if the
# forward pass is repeated (section 8). With T tokens on N GPUs, of which each reaches X FLOP/s, that is 8TΨ/(NX)
# seconds. For GPT-3, with 175 billion parameters and 300 billion tokens, on 1,024 A100s at 140 TFLOP/s Narayanan et al.
# give 34 days (*recorded*, [arXiv 2104.04473](https://arxiv.org/abs/2104.04473), section 5.1):

# %%
days = 8 * 300e9 * 175e9 / (1024 * 140e12) / 86_400
gpu_hours = 1024 * 24 * days
print(f"{days:.1f} days, {gpu_hours:,.0f} GPU hours;", end="")
print(f" at 2 dollars an hour {2 * gpu_hours:,.0f} dollars")
assert round(days) == 34

# %% [markdown]
# (The price is an example.) X holds all the efficiency that this lesson is about: what scales worse has a smaller X.
#
# As a share of the peak, X has two names. **HFU** (hardware FLOPs utilisation) counts every FLOP that is computed, also
# those of a repeated forward pass, as the 140 above do. **MFU** (model FLOPs utilisation) counts only what the model
# needs, 6 of the 8, and is the one to compare jobs by ([Chowdhery et al.
# 2022](https://arxiv.org/abs/2204.02311), section 4.1, proposed it). Llama 3's 400 TFLOP/s is MFU:

# %%
hfu = 140e12 / GPUS["a100"].flops["bf16"]
mfu_llama = 400e12 / GPUS["h100"].flops["bf16"]
print(
    f"GPT-3 on A100s: HFU {hfu:.0%}, MFU {hfu * 6 / 8:.0%}; Llama 3 on H100s: MFU {mfu_llama:.0%}"
)
assert hfu * 6 / 8 < mfu_llama < hfu

# %% [markdown]
# ### Spot
#
# **Spot** or preemptible GPUs are cheap because they can be taken away. A job on N of them is interrupted N times
# as often as one GPU. Each time it loses the **restart** and the work since the last **checkpoint** (of the model,
# not of activations), on average half an interval. Short intervals lose little, and spend more time saving.
#
# With `rate` interruptions an hour, the loss for an interval `every` is about save/every + rate·every/2. The sum is
# least where the two are equal: every = √(2·save/rate) (J. W. Young, 1974).


# %%
def goodput(rate, save, restart, every):
    """Share of the time that becomes progress. Hours, and interruptions of the job per hour."""
    return every / (every + save) * max(0.0, 1 - rate * (restart + every / 2))


def best_interval(rate, save):
    return math.sqrt(2 * save / rate)


rate, save, restart = 0.1, 2 / 60, 10 / 60  # examples: every ten hours; two and ten minutes
best = best_interval(rate, save)
for every in (0.1, best, 4.0):
    share = goodput(rate, save, restart, every)
    print(f"checkpoint every {every:4.2f} h: {share:.0%} of the time is progress")
grid = numpy.linspace(0.1, 4, 400)
found = grid[numpy.argmax([goodput(rate, save, restart, t) for t in grid])]
assert abs(found / best - 1) < 0.1

# %% [markdown]
# Interruptions are not for spot only. Llama 3's 16,384 GPUs met 419 unexpected ones in 54 days (*recorded*, arXiv
# 2407.21783).

# %%
stops, days, gpus = recorded.LLAMA3_INTERRUPTIONS
between = days * 24 / stops
print(
    f"one every {between:.1f} hours; {stops / (days * 24 * gpus) * 1e6:.0f} per million GPU hours"
)
every = best_interval(1 / between, save)
share = goodput(1 / between, save, restart, every)
print(f"modelled, {save * 60:.0f} minutes to save and {restart * 60:.0f} to restart:", end="")
print(f" a checkpoint every {every * 60:.0f} minutes, {share:.0%} is progress")

# %% [markdown]
# ### Your prices
#
# Enter what you pay. The prices that it opens with are examples, not offers.

# %%
calculator = cost_calculator()
calculator

# %% [markdown]
# *The calculator: hours on one GPU, what each doubling of the GPUs keeps, prices and interruptions; below it the
# hours and the cost of the run over the number of GPUs, on demand and on spot. In a notebook that is not running it
# shows one setting.*
#
# Things to try: the recorded job keeps 94 % at each of the first two doublings and 59 % at the last.
#
# <details><summary>With the numbers that it opens with, from how many GPUs on does spot cost more?</summary>
#
# From 512 on: the job is then stopped 2.6 times an hour, and spends most of its time on saving, restarting and
# repeating. Beyond that it makes no progress at all.
# </details>

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
print(f"{world_size} ranks on {os.cpu_count()} cores ({backend}): strong scaling", end="")
print(f" {strong[-1] / strong[0]:.2f}x, weak {weak[-1] / weak[0]:.2f}x")
print(f"one bucket: {overlap[0]:.0%} of the communication during backward;", end="")
print(f" {messages[-2]} buckets: {overlap[-2]:.0%}")
print(f"loss after {training_steps} steps: {final['none']:.2f};", end="")
print(f" with PowerSGD {final['PowerSGD']:.2f} and", end="")
print(f" {sent['none'] / sent['PowerSGD']:.0f} times fewer bytes;")
print(f"with the top 1 % {final['top 1 %, feedback']:.2f}, without error feedback", end="")
print(f" {final['top 1 %']:.2f}")
print(f"checkpointing 8 layers: {memory:.1f} times less memory, {extra:.2f} times the time")

# %% [markdown]
# - Efficiency is speed-up over ranks. Amdahl's law is strong scaling, Gustafson's is weak scaling, and they agree.
# - A model that fits the first points proves little; the ring's predicts the recorded curve within 10 %.
# - A late rank's delay shows on the others, as communication. A barrier before the all-reduce tells them apart.
# - Compute over communication depends on tokens per GPU and on the machine, not on the size of the model.
# - A bucket size trades latency against overlap; √(T/α) buckets where the link is the bottleneck.
# - fp16 needs loss scaling, bf16 does not; both need master weights. 16 bytes per parameter, mixed or not.
# - Error feedback makes what top-k leaves out late instead of lost: with it the loss went on falling, without it the
#   loss stood still. Compression pays only where the link is slow.
# - Checkpointing keeps one tensor a block and costs up to a third more FLOPs. Cost goes with 1/efficiency.
#
# <details><summary>Answers to the ten predictions</summary>
#
# 1. Below 20 = 1/0.05 (section 2).
# 2. 2: the ranks share two cores (section 1).
# 3. In their all-reduce, as waiting (section 4).
# 4. Neither: the number of parameters cancels. With the same tokens for each GPU it scales the same (section 5).
# 5. Small ones start early and overlap; each pays α (section 5).
# 6. 16 and 16 (section 6).
# 7. 1.0: each update is rounded away (section 6).
# 8. 25 times on 4 ranks, not at all on 100 (section 7).
# 9. A third by the FLOPs, or a little less; more where a model is so small that calls count (section 8).
# 10. 5.3 % more (section 9).
# </details>
#
# **Exercises:** [exercises/05_scaling_efficiency](../exercises/05_scaling_efficiency_exercises.ipynb). **Next:** [06
# zero](06_zero.ipynb), which takes the 16 bytes apart.
#
# **Worth reading**
# - P. Micikevicius et al., *Mixed precision training*, 2017, [arXiv 1710.03740](https://arxiv.org/abs/1710.03740):
#   loss scaling and master weights.
# - T. Vogels, S. P. Karimireddy, M. Jaggi, *PowerSGD*, 2019, [arXiv 1905.13727](https://arxiv.org/abs/1905.13727):
#   why a compressor should be linear, so that it can be all-reduced.
# - S. Stich, J.-B. Cordonnier, M. Jaggi, *Sparsified SGD with memory*, 2018, [arXiv
#   1809.07599](https://arxiv.org/abs/1809.07599): top-k with error feedback, and why it converges.
