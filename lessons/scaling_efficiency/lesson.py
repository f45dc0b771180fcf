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
# In a training job on eight GPUs, each GPU processes 40,150 tokens a second. On 256 GPUs, each processes 15,700
# (*recorded*, [Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook)). So 256 GPUs do the
# work of 100, and the other 156 are paid for as well. Where does their time go, and what wins it back?
#
# **You will be able to**
# - *measure* strong and weak scaling, and *predict* both from a serial share;
# - *tell* waiting from transfer, and *find* the rank that all others wait for;
# - *say* when communication hides behind computation, and what fewer bits save and lose;
# - *use* MFU and HFU without mixing them up;
# - *turn* an efficiency into the price of a run.
#
# **Before this:** [02 collectives](02_collectives.ipynb), [04 ddp](04_ddp.ipynb). **Time:** about 45 minutes to read
# the core, 100 with the deeper sections, under a minute to run.

# %% [markdown]
# First PyTorch and every parameter, then what comes from the course.

# %% tags=["parameters"]
import math
import os
import time
from functools import partial

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

world_size = 4  # ranks, 2 or more
whole_batch, rank_batch = 24, 12  # windows of text in a step: of all ranks, or of each rank
late = 0.04  # seconds by which the slow rank is late

# %%
from course_utils import device, launch, recorded
from course_utils.costs import bytes_sent
from course_utils.hardware import GPUS, LINKS
from course_utils.models import GPT, Block, TransformerConfig, build_gpt, loss_of
from course_utils.predictions import predict, predictions
from course_utils.programs import SCRIPTS, excerpt, folded, torchrun
from course_utils.step_log import StepLog
from lessons.scaling_efficiency import figures, scaling
from lessons.scaling_efficiency.explorer import bits_explorer
from lessons.scaling_efficiency.number_formats import FORMATS, store
from lessons.scaling_efficiency.scaling import fixed_batch, my_windows

# %% [markdown]
# ## 1. Strong and weak scaling, measured
#
# Three numbers describe how a job grows. **Throughput** is the tokens per second of all ranks together. **Speed-up**
# is the throughput on N ranks divided by that on one. **Efficiency** is the speed-up divided by N: the useful share of
# each rank's time. There are two ways to grow:
#
# ```text
#                  one rank     four ranks
# strong scaling   [  24  ]     [ 6 ] [ 6 ] [ 6 ] [ 6 ]         the same batch, sooner
# weak scaling     [ 12 ]       [ 12 ] [ 12 ] [ 12 ] [ 12 ]     more data in the same time
# ```
#
# The job is the small GPT of lesson 04 under DDP. A rank's batch is some windows of 64 characters of *Alice in
# Wonderland*, which `my_windows(step, size)` fetches.

# %% jupyter={"source_hidden": true}
folded("The model", Block, GPT)

# %%
backend = launch(dist.get_backend, world_size=world_size)[0]  # the same for any number of ranks
on_ranks = partial(launch, world_size=world_size, backend=backend)


def ddp_step():
    """On a rank: a model under DDP, as a function that trains it on a batch."""
    model = DDP(build_gpt().to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# %% [markdown]
# `scaling.step_seconds` runs such steps and takes the time. A step ends when the *slowest* rank ends it, and the
# fastest of the eight steps counts.


# %%
def throughput(size, n):
    """Tokens per second of n ranks together, with `size` windows each."""
    seconds = on_ranks(scaling.step_seconds, ddp_step, size, world_size=n)
    return n * size * scaling.CONTEXT / scaling.slowest_step(seconds)


# %% [markdown]
# **Predict**: ranks without GPUs compute on the cores of this machine. What is the best speed-up that four ranks can
# show on two cores?

# %%
best_of_four = predict("best speed-up of four ranks on two cores", unit="times")

# %% tags=["nbval-ignore-output"]
counts = scaling.counts(world_size)
strong = [throughput(whole_batch // n, n) for n in counts]
weak = [throughput(rank_batch, n) for n in counts]
print(f"cores: {os.cpu_count()}, ranks on {backend}")
print(f"{'strong scaling':>20}{'weak scaling':>28}")
print("ranks" + "  tokens/s speed-up efficiency" * 2)
for n, a, b in zip(counts, strong, weak, strict=True):
    pairs = (a, strong[0]), (b, weak[0])
    row = [f"{t:10,.0f}{t / one:9.2f}{t / one / n:11.0%}" for t, one in pairs]
    print(f"{n:5}" + "".join(row))

# %%
cores = os.cpu_count() if backend == "gloo" else None
figures.scaling_curves(counts, {"strong": strong, "weak": weak}, "measured", limit=cores)

# %% jupyter={"source_hidden": true}
best_of_four.compare(2)

# %% [markdown]
# **Compare.** Two, in strong and in weak scaling: two cores compute twice as fast as one, whatever the program does.
# So the efficiency of four ranks is at most 50 %.
#
# *The figure, left: speed-up over ranks, with the ideal as a dashed line and, where ranks share cores, a dotted line
# that ends at the number of cores. Right: the same as efficiency.*
#
# (On a busy machine points can lie above the dotted line: more ranks get more of the cores.) The rest goes into
# messages, copies and waiting. In strong scaling each rank computes less, but its messages stay as large. So on many
# ranks it loses more, and can be slower than one rank alone.
#
# > **Misconception.** "Throughput goes up, so the job scales." With a processor for each rank, throughput nearly
# > always goes up. Only efficiency says what that costs.
#
# > **What changes on real GPUs.** The dotted line goes. But few tokens do not fill a GPU, so its kernels take as long
# > for less work. With fewer still, it waits for the CPU to start them. A **CUDA graph** starts all kernels of a step
# > with one call; `torch.compile(model, mode="reduce-overhead")` makes one.

# %% [markdown]
# ## 2. Two laws
#
# **Amdahl: the work is fixed.** Let one rank take the time 1 for a job. A share s of it is *serial*, which means that
# it takes as long on N ranks as on one. The rest is divided, so
#
# $$\text{speed-up} = \frac{1}{s + \frac{1-s}{N}} \;<\; \frac{1}{s}$$
#
# **Gustafson: the time is fixed.** Now let N ranks take the time 1, of which a share s is serial. One rank would need
# s + (1 − s)·N for the same work, so
#
# $$\text{speed-up} = s + (1-s)\,N$$
#
# **Predict**: s is 5 %. What speed-up does each law allow for a thousand ranks?

# %%
fixed_work = predict("speed-up by Amdahl on 1,000 ranks", unit="times")
fixed_time = predict("speed-up by Gustafson on 1,000 ranks", unit="times")


# %%
def amdahl(n, s):
    """Speed-up on n ranks if a share s of one rank's time is serial."""
    return 1 / (s + (1 - s) / n)


def gustafson(n, s):
    """Speed-up on n ranks if a share s of the n ranks' time is serial."""
    return s + (1 - s) * n


print(f"1,000 ranks: Amdahl {amdahl(1000, 0.05):.1f}, Gustafson {gustafson(1000, 0.05):.0f}")
laws = {"Amdahl": amdahl, "Gustafson": gustafson}
figures.speedup_laws(laws, (0.001, 0.01, 0.05, 0.2), most=1000)

# %% jupyter={"source_hidden": true}
fixed_work.compare(amdahl(1000, 0.05))
fixed_time.compare(gustafson(1000, 0.05))

# %% [markdown]
# **Compare.** With fixed work less than 20, because the serial 5 % alone take a twentieth of one rank's time. With
# fixed time 950, because one rank alone would need 1,000 times as long for the other 95 %.
#
# *The figure, left: by Amdahl each curve bends away from the dashed ideal, towards its limit 1/s. Right: by Gustafson
# all curves keep climbing, close to the ideal.*
#
# The laws do not contradict each other, because they measure s in different runs. Serial work that is 5 % of the run
# on a thousand ranks is a tiny share of the far longer run on one:


# %%
def share_on_one_rank(n, s):
    """The serial share of a run on one rank, if it is s of the same run on n ranks."""
    return s / (s + (1 - s) * n)


tiny = share_on_one_rank(1000, 0.05)
assert math.isclose(amdahl(1000, tiny), gustafson(1000, 0.05))
print(f"{tiny:.5%} of the run on one rank: by Amdahl, too, {amdahl(1000, tiny):.0f} times as fast")

# %% [markdown]
# Amdahl describes strong scaling. Gustafson describes weak scaling, which large training runs rely on. But it has a
# price that timing does not show: the batch grows with the ranks. A larger batch gives a less noisy gradient, and from
# some size on that hardly helps. At the **critical batch size** a run needs twice as many samples to reach a loss as
# it does with very small batches ([McCandlish et al. 2018](https://arxiv.org/abs/1812.06162)). Far beyond it, more
# ranks are wasted, however well they scale. Section 10 estimates this size.

# %% [markdown]
# ## 3. Who waits for whom?
#
# Now we divide a step into parts. This one averages the gradients after backward, in one flat buffer. It is not the
# fastest way (lesson 04), but its parts follow one another, so each can be timed. `log.part` notes when a part begins
# and ends.


# %%
def average_gradients(model, log, apart):
    gradients = [p.grad for p in model.parameters()]
    with log.part("copies"):
        flat = torch.cat([g.flatten() for g in gradients])
    if apart:
        with log.part("wait"):
            dist.barrier()
    with log.part("all_reduce"):
        dist.all_reduce(flat)
    with log.part("copies"):
        flat /= dist.get_world_size()
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))


# %% [markdown]
# The last rank can be made late by a sleep, which stands for a hot GPU, a longer sequence or a slow disk.


# %%
def logged_steps(delay, apart):
    """On a rank: the log of six steps; the last rank is late by `delay` seconds in each."""
    model = build_gpt().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = StepLog(synchronize=True)
    for step in range(6):
        dist.barrier()
        with log.part("data"):
            x, y = my_windows(step, size=4)
        with log.part("compute"):
            loss_of(model, x, y).backward()
            if dist.get_rank() == dist.get_world_size() - 1:
                time.sleep(delay)
        average_gradients(model, log, apart)
        with log.part("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        log.end_step()
    return log


def picture(logs, title):
    return figures.step_spans(scaling.shortest_step([log.spans for log in logs], skip=2), title)


# %% [markdown]
# **Predict**: the last rank is 40 ms late. On which part do the *other* ranks spend these 40 ms?

# %%
spent = predict("the others spend the 40 ms in", ["data", "compute", "all_reduce", "copies"])

# %%
together = on_ranks(logged_steps, late, apart=False)
picture(together, "measured: one step; the last rank is late")

# %% jupyter={"source_hidden": true}
assert any(log.mean(skip=2)["all_reduce"] > late / 2 for log in together[:-1])
spent.compare("all_reduce")

# %% [markdown]
# **Compare.** On `all_reduce`: they begin it in time, and it cannot end before the last rank has begun.
#
# *The figure: one row a rank. The last rank has the longest bar of compute and a short all_reduce; the others have
# shorter bars of compute and long ones of all_reduce. Where ranks share cores, some start later than others.*
#
# So the delay shows on the ranks that are *not* late. A profile of rank 0 alone suggests a faster network, although
# the network is idle most of the time.
#
# To tell waiting from transfer, we put a **barrier** in front of the all-reduce. It carries no data, so the time in the
# barrier is waiting, and the all-reduce after it is transfer.

# %%
apart = on_ranks(logged_steps, late, apart=True)
picture(apart, "measured: one step with a barrier before the all-reduce")

# %% [markdown]
# *The figure: the same step. The long bars of the other ranks are `wait`, and the all_reduce is short on all.*
#
# So nothing is wrong with the network. The step has four overheads, in bold:
#
# | part | overhead | what helps |
# |---|---|---|
# | all_reduce | **communication** | fewer bytes (section 14), overlap (sections 4 and 11), faster links |
# | wait | **imbalance**; by **synchronization** every rank pays for it | equal batches, a cure for the slow rank |
# | copies | **copies** into and out of buffers | gradients that live in the buffer (lesson 04) |
# | optimizer | serial in strong scaling, since every rank repeats it | sharded optimizer (lesson 06) |
# | data | none, unless ranks share a disk or cores | loader processes (lesson 15) |
#
# To find the slow rank, compare the ranks' *compute* and *data* (lesson 13 does this for a job in production). A long
# *wait* is never the cause, and ranks that share cores wait a little, because they take turns.
#
# > **What changes on real GPUs.** Python does not wait for kernels, so each part has to end in
# > `torch.cuda.synchronize()`, which `StepLog` calls here. Both this and the barrier prevent overlap, so remove them
# > afterwards. And NCCL waits in a running kernel, so a GPU that waits for a late rank shows 100 % utilization.

# %% [markdown]
# ## 4. Computing against communicating
#
# How much communication is there to begin with? A rank computes about 6 FLOPs for each parameter and token, 2 in
# forward and 4 in backward. Then it all-reduces a gradient of 2 bytes, in bf16, for each parameter.
#
# **Predict**: a model becomes ten times as large, and each GPU has as many tokens as before. Does data parallelism
# scale better or worse?

# %%
larger = predict("a larger model scales", ["worse", "better", "equally well"])


# %%
def compute_over_communication(parameters, tokens, flops, bandwidth, n):
    """Seconds of computing over seconds of the all-reduce, in one step."""
    computing = 6 * parameters * tokens / flops
    return computing * bandwidth / bytes_sent("all_reduce", n, 2 * parameters)


for parameters in (1e9, 10e9):
    ratio = compute_over_communication(parameters, 8192, 400e12, 50e9, n=64)
    print(f"{parameters / 1e9:2.0f} billion parameters: ratio {ratio:.2f} (modelled)")

# %% jupyter={"source_hidden": true}
of_one, of_ten = (compute_over_communication(p, 8192, 400e12, 50e9, n=64) for p in (1e9, 10e9))
assert math.isclose(of_one, of_ten)
larger.compare("equally well")

# %% [markdown]
# **Compare.** Equally well: computing and communicating grow by the same factor. With Ψ parameters, N ranks, T tokens a
# rank, F FLOP/s and bus bandwidth B, the ratio is 6ΨT/F over 2(N−1)/N · 2Ψ/B seconds, and Ψ cancels.
#
# What remains is 3/2 · T · B/F · N/(N−1). So the number of *tokens* of each GPU counts, and the ratio B/F of the
# machine. How many tokens must a GPU have for the all-reduce to fit behind the backward pass? The cell takes
# 400 TFLOP/s, which Llama 3 reached on an H100 (*recorded*, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783),
# table 4), and one link for each GPU.


# %%
def tokens_to_hide(flops, bandwidth, n):
    """Tokens of a rank whose backward takes as long as the all-reduce of its bf16 gradients."""
    return bytes_sent("all_reduce", n, 2) / bandwidth * flops / 4


print("tokens a GPU, from which on the all-reduce hides (modelled)")
for key, n in (("nvlink4", 8), ("ib_ndr", 64), ("eth_100g", 64), ("eth_25g", 64)):
    tokens = tokens_to_hide(400e12, LINKS[key].bandwidth, n)
    print(f"{LINKS[key].name:15} {n:3} GPUs {tokens:9,.0f}")

# %% [markdown]
# Within a node, fewer than a thousand tokens are enough. Over 25-gigabit Ethernet a GPU would need more than a
# hundred thousand, for which its memory has no room (section 6). Then it helps to accumulate gradients without
# communicating (`no_sync`, lesson 04), or to compress them (section 14).
#
# Hidden communication is not free: its kernels take multiprocessors and memory bandwidth from the computation.
#
# > **Misconception.** "Large models scale worse because they send more." They send more and compute more, by the same
# > factor. They scale worse when the memory leaves room for fewer tokens.

# %% [markdown]
# ## 5. Fewer bits
#
# A number of half the bits takes half the bytes, on a wire and in memory, and tensor cores multiply it much faster.
# But something is lost. A floating-point number is a sign, an **exponent** that says how large it is, and a
# **fraction** that holds its digits. Exponent bits give **range**, fraction bits give **precision**.

# %%
print("format    bits exponent fraction  largest smallest  next after 1")
for f in FORMATS:
    bits, ends = f"{f.width:4}{f.exponent:9}{f.fraction:9}", (f.largest, 2.0**f.lowest_power)
    print(f"{f.name:10}{bits}{ends[0]:9.3g}{ends[1]:9.2g}  1 + {2.0**-f.fraction:.2g}")

# %% [markdown]
# bf16 has the exponent of fp32 and so its range, but its steps are eight times as coarse as fp16's. fp16 ends at
# 65,504. tf32 saves time but no memory: its numbers take 32 bits, of which the multiplication ignores 13. Here is what
# each format makes of four numbers.

# %%
print(" " * 6 + "".join(f"{f.name:>11}" for f in FORMATS))
for number in (1.001, 500, 70_000, 1e-8):
    print(f"{number:<6.5g}" + "".join(f"{store(number, f).value:11.5g}" for f in FORMATS))

# %%
explorer = bits_explorer()
explorer

# %% [markdown]
# *The widget: the bits of a number in each format, with sign, exponent and fraction in colors of their own, and the
# value that is kept.*
#
# 1.001 is 1 in bf16 and in both kinds of fp8. 70,000 is infinite in fp16 and in e5m2. e4m3 has no infinity: PyTorch
# makes 448 of a number that is too large, and before version 2.12 it made NaN ([pull request
# 178817](https://github.com/pytorch/pytorch/pull/178817)). 1e-8 is zero in fp16 and in fp8. So small gradients vanish
# in fp16, and it needs **loss scaling**: the loss is multiplied by a large number before backward, and the gradients
# are divided by it afterwards (section 12). bf16 does not need it.
#
# **Predict**: a weight of 1.0 in bf16 gets an update of +0.001, a thousand times. What is it then?

# %%
at_the_end = predict("the weight in bf16 after 1,000 updates")

# %%
short, long = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0)
for _ in range(1000):
    short += 0.001
    long += 0.001
print(f"in bf16: {short.item():.3f}   in fp32, then as bf16: {long.bfloat16().item():.3f}")

# %% jupyter={"source_hidden": true}
assert short == 1 and long.bfloat16() == 2
at_the_end.compare(short.item())

# %% [markdown]
# **Compare.** It is still 1. The next number after 1 is 1.0078, and 0.001 is less than half of the way, so each sum is
# rounded back.
#
# A **master weight** in fp32 collects the small updates. With it, mixed precision takes 2 bytes of weight, 2 of
# gradient, 4 of master weight and 8 of Adam's moments for each parameter. That is 16 bytes, as many as plain fp32 with
# 4 + 4 + 8.
#
# So mixed precision does not shrink the model states: it saves time, and memory of activations. (Under `torch.autocast`
# gradients, and so messages, keep 32 bits.)
#
# How much time? Here are dense TFLOP/s from the data sheets (*recorded*; brochures often print twice as much, for
# matrices with 2:4 sparsity). fp32 runs on ordinary cores, the others on tensor cores.

# %%
formats = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
print("TFLOP/s" + "".join(f"{p:>8}" for p in formats))
for key in ("v100", "a100", "h100", "b200"):
    flops = GPUS[key].flops
    row = [f"{flops[p] / 1e12:8.0f}" if p in flops else f"{'-':>8}" for p in formats]
    print(f"{GPUS[key].name:7}" + "".join(row))

# %% [markdown]
# ## 6. Memory for time, and two utilizations
#
# More tokens on each GPU improve the ratio of section 4. But they need memory for **activations**, which forward keeps
# for backward. **Activation checkpointing** keeps only the input of each block, and computes the rest again when
# backward comes to it:
#
# ```text
# keep all     forward 1 2 3 4  |             backward 4 |             backward 3 | …
# checkpoint   forward 1 2 3 4  |  forward 4, backward 4 |  forward 3, backward 3 | …
# ```
#
# The course's GPT calls `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` in place of `block(x)`.
#
# **Predict**: forward costs 1 and backward 2. How much longer does a step take with checkpointing?

# %%
longer = predict("a step with checkpointing takes", unit="times as long")

# %%
torch.set_num_threads(1)  # in this process as on the ranks
widths, kept = [64, 128, 256], {"keep all": [], "checkpoint": []}
ratios, same = {"CPU time": [], "FLOPs": []}, []
for width in widths:
    shapes = [TransformerConfig(layers=4, hidden=width, checkpoint=c) for c in (False, True)]
    usual, again = (scaling.forward_backward(shape) for shape in shapes)
    same.append(torch.equal(usual.gradients, again.gradients))
    kept["keep all"].append(usual.kept)
    kept["checkpoint"].append(again.kept)
    ratios["CPU time"].append(again.seconds / usual.seconds)
    ratios["FLOPs"].append(shapes[1].flops_per_token() / shapes[0].flops_per_token())
figures.checkpointing(widths, kept, ratios)

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
assert all(same)
saved = kept["keep all"][-1] / kept["checkpoint"][-1]
slower = ratios["CPU time"][-1]
longer.compare(slower)

# %% [markdown]
# **Compare.** Where blocks are wide it is a fifth to a third longer: 1 + 2 + 1 in place of 1 + 2, but the head and
# the last product of a block are not repeated. Narrow blocks pay more, because `checkpoint` also runs Python code for
# every tensor that it does not keep, whatever the width.
#
# *The figure, left: memory of activations over the width of the model, about a tenth with checkpointing. Right: FLOPs
# are 1.2 times as many at any width; CPU time is far above that at width 64, and comes near it at 256.*
#
# The gradients are the same to the last bit. On a GPU the Python code costs time if the GPU has to wait for it.
# Here is a GPT with 12 layers of width 1,024 (`gpu-check`):

# %%
record = recorded.gpu_check("mfu_gpt")
for name in ("12 layers of 1,024, bf16", "12 layers of 1,024, bf16, checkpointed"):
    ms, gb = 1e3 * record[name]["step"]["value"], record[name]["peak_memory"]["value"] / 1e9
    print(f"H200, recorded: {ms:.1f} ms, {gb:4.1f} GB   {name}")

# %% [markdown]
# A forward pass is at most a third of the first step, so repeating it explains 10 ms of the 22 that were added. The
# record does not say where the others went; a trace (lesson 13) shows whether the GPU waits for Python. So 1.7 times is
# not the price of checkpointing. That is a third, or less with **selective** checkpointing, which keeps what takes
# longest to compute again
# ([`create_selective_checkpoint_contexts`](https://docs.pytorch.org/docs/stable/checkpoint.html)). It pays if the
# model does not fit otherwise, or if more tokens then fit and the step waited for communication.
#
# ### MFU and HFU
#
# Repeated FLOPs do not train the model further. So there are two ways to say how well a GPU is used, both as a share
# of its peak. **HFU**, hardware FLOPs utilization, counts every FLOP that is computed. **MFU**, model FLOPs
# utilization, counts only what the model needs, however it is computed ([Chowdhery et al.
# 2022](https://arxiv.org/abs/2204.02311), section 4.1):
#
# $$\text{MFU} = \frac{\text{tokens/s} \times \text{FLOPs a token}}{N \times \text{peak}}, \qquad
#   \text{FLOPs a token} \approx 6\,\Psi$$
#
# **Predict**: Megatron-LM reports 140 TFLOP/s on each A100, 45 % of its peak, counting what checkpointing repeats.
# Llama 3 reports 400 on each H100, 41 % of its peak, counting the model only. Which job uses its GPUs better?

# %%
better = predict("uses its GPUs better", ["Megatron-LM", "both equally", "Llama 3"])

# %%
hfu = 140e12 / GPUS["a100"].flops["bf16"]
mfu, mfu_llama = hfu * 6 / 8, 400e12 / GPUS["h100"].flops["bf16"]
print(f"Megatron-LM: HFU {hfu:.0%}, MFU {mfu:.0%};  Llama 3: MFU {mfu_llama:.0%}")

# %% jupyter={"source_hidden": true}
assert mfu < mfu_llama < hfu
better.compare("Llama 3")

# %% [markdown]
# **Compare.** Llama 3 does. Of each 8 FLOPs that Megatron-LM counts, 2 are a repeated forward (*recorded*, [arXiv
# 2104.04473](https://arxiv.org/abs/2104.04473)). Llama 3's paper prints 41 %, and 400 of 989 TFLOP/s are 40.
#
# Compare jobs by MFU or by tokens per second, and use HFU only to judge kernels. Three comparisons are wrong: HFU with
# MFU; a peak that counts sparsity, which halves the result; and a job in fp8 against the peak of bf16.

# %% [markdown]
# ## 7. What does it cost?
#
# GPUs are paid by the hour, busy or not. On N GPUs, the time of a run is divided by the speed-up, but each hour costs
# N times as much. So the cost is proportional to N/speed-up, which is 1/efficiency.
#
# **Predict**: two GPUs train 1.9 times as fast as one. What does the run cost, against one GPU? And the opening job on
# 256 GPUs, against 8?

# %%
on_two = predict("the run on 2 GPUs costs", unit="times as much as on 1")
on_256 = predict("the run on 256 GPUs costs", unit="times as much as on 8")


# %%
def run_cost(hours_on_one, n, speedup, price=1.0):
    """Hours and dollars of a run on n GPUs."""
    hours = hours_on_one / speedup
    return hours, hours * n * price


hours, dollars = run_cost(100, 2, 1.9)
print(f"two GPUs, 1.9x: {hours / 100 - 1:+.1%} time, {dollars / 100 - 1:+.1%} cost")
dp = recorded.ULTRASCALE_DP
for n, e in zip(dp.gpus, dp.efficiency, strict=True):
    hours, dollars = run_cost(1000, n, n * e)
    print(f"{n:4} GPUs, efficiency {e:4.0%}: {hours:6.1f} h, {dollars:,.0f} GPU hours")

# %% jupyter={"source_hidden": true}
on_two.compare(2 / 1.9)
on_256.compare(1 / dp.efficiency[-1])

# %% [markdown]
# **Compare.** 5 % more for 47 % less time, which is worth it, because people wait as well. On 256 GPUs the recorded job
# costs 2.6 times as much as on 8, because each GPU does 39 % of what it did there.
#
# From 8 to 64 GPUs the job becomes 6 times as fast for 29 % more. From 128 to 256 it becomes 1.2 times as fast and
# costs two thirds more.
#
# > **Misconception.** "More GPUs finish sooner, so the cost stays the same." Only at 100 % efficiency.

# %% [markdown]
# ## 8. The whole curve in one job
#
# [scripts/scaling_curve.py](../scripts/scaling_curve.py) is what to take to work. Started once on N ranks, it measures
# 1, 2, 4 … N of them, each in a group of its own, while the others wait. It also measures how much of a step waits for
# messages, without a profiler: it compares with the same step inside `no_sync`, which sends nothing.

# %%
program = SCRIPTS / "scaling_curve.py"
print(excerpt(program, "def train(messages", "optimizer.zero_grad"))

# %% tags=["nbval-ignore-output"]
print(torchrun(program, "--steps=8", "--peak-tflops=0.1", ranks=2, gpus=False), end="")

# %% [markdown]
# The peak is an example; on an H100 in bf16 it is 989. With one rank, *waits* is overhead or noise. Put
# your model into `build` and your batch into `run`. If efficiency falls while *waits* stays small, each rank computes
# more slowly than alone: it shares cores, a disk, or power. If *waits* grows, look for a late rank first (section 3),
# then at the network.

# %% [markdown] tags=["deeper"]
# ## 9. A recorded curve, and three models of it · deeper
#
# Here is the whole curve of the opening job (*recorded*, Ultra-Scale Playbook, which does not say whether the batch
# grew with the GPUs).

# %% tags=["deeper"]
dp = recorded.ULTRASCALE_DP
figures.scaling_curves(dp.gpus, {"Playbook": dp.throughput}, "recorded", unit="GPUs")

# %% [markdown] tags=["deeper"]
# *The figure, left: the speed-up against eight GPUs climbs to 10.5 at 128 GPUs and ends at 12.5 of the possible 32.
# Right: efficiency falls slowly to 66 % at 128 GPUs, and then to 39 %.*
#
# A step takes as long as computing does, plus something that grows with N. Lesson 03 offers three candidates, if
# every step all-reduces the gradients: the **bytes** of a ring, ∝ (N−1)/N, which hardly grow at all; the **hops of a
# tree**, ∝ log₂ N; and the **hops of a ring**, ∝ N. Each model has two unknowns, which we fit to the first three
# points only.
#
# **Predict**: which of the three comes nearest at 256 GPUs?

# %% tags=["deeper"]
nearest = predict("nearest at 256 GPUs", ["bytes", "hops of a tree", "hops of a ring"])


# %% tags=["deeper"]
def fit(growth, seen):
    """Fit seconds per token = a + b * growth(n) to the first points, by least relative squares."""
    n, t = numpy.array(dp.gpus, float), 1 / numpy.array(dp.tokens_per_gpu)
    columns = numpy.stack([numpy.ones(seen), growth(n[:seen])], axis=1) / t[:seen, None]
    a, b = numpy.linalg.lstsq(columns, numpy.ones(seen), rcond=None)[0]
    return a, b, 1 / (a + b * growth(n))


models = {"bytes": lambda n: (n - 1) / n, "tree": numpy.log2, "ring": lambda n: n}
fits = {name: fit(growth, seen=3) for name, growth in models.items()}
off = {name: rates / numpy.array(dp.tokens_per_gpu) - 1 for name, (*_, rates) in fits.items()}
print("GPUs    " + "".join(f"{n:8}" for n in dp.gpus) + "   ms for 1,000 tokens")
for name, errors in off.items():
    a, b, _ = fits[name]
    row = "".join(f"{error:8.1%}" for error in errors)
    print(f"{name:8}{row}   {1e6 * a:.1f} {1e6 * b:+.2f} x growth")
figures.scaling_models(dp, {name: rates for name, (*_, rates) in fits.items()}, fitted=3)

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert max(abs(off["ring"])) < 0.1 and off["tree"][-1] > 0.5 and fits["bytes"][0] < 0
nearest.compare("hops of a ring")

# %% [markdown] tags=["deeper"]
# **Compare.** The hops of a ring: 8 % off at 256 GPUs, where the bytes are wrong by a factor of 2.2 and the tree by
# 1.9.
#
# *The figure, left: recorded throughput per GPU as points, three fitted and three open. The curves of bytes and tree
# pass far above the last point; the ring's curve passes near all six. Right: the error of each model.*
#
# All three fit the first three points within 2 %, so a fit that is good where it was fitted proves little. The ring's
# model is Amdahl's law in other words, since its throughput, N/(a + b·N), is Amdahl's curve for s = b/(a + b). So a
# curve cannot tell a serial part from an overhead that grows with N.
#
# Solved for s, Amdahl's law gives the serial share that would explain a speed-up (Karp and Flatt, 1990). If this share
# grows with N, something else grows: communication, or waiting.


# %% tags=["deeper"]
def serial_share(n, speedup):
    """The s for which Amdahl's law gives this speed-up on n ranks."""
    return (1 / speedup - 1 / n) / (1 - 1 / n)


for n, e in zip(dp.gpus[1:], dp.efficiency[1:], strict=True):
    m = n / dp.gpus[0]  # in units of eight GPUs
    print(f"{n:4} GPUs: {m * e:5.2f} times 8 GPUs, serial share {serial_share(m, m * e):.1%}")

# %% [markdown] tags=["deeper"]
# The share is about 5 %. It falls at first and rises at the end, but names no cause. Waiting grows with N, too, even
# where no rank is slow: if each rank's step varies a little, all wait for the slowest. The next cell draws random step
# times with a mean of 1 and a standard deviation of 5 % (*modelled*).

# %% tags=["deeper"]
generator = torch.Generator().manual_seed(0)
for n in (8, 64, 512, 4096):
    steps = 1 + 0.05 * torch.randn(400, n, generator=generator)
    slowest = steps.max(1).values.mean().item()
    print(f"{n:5} ranks: a step takes {slowest:.2f}, efficiency at most {1 / slowest:.0%}")

# %% [markdown] tags=["deeper"]
# To know the cause you need the parts of a step (section 3) or a trace (lesson 13). Not every curve bends:
# Llama 3.1 8B under FSDP keeps 97 % on 16 times the GPUs (lesson 07).

# %% [markdown] tags=["deeper"]
# ## 10. How large a batch still pays · deeper
#
# The gradient of a batch is a signal, the gradient of the true loss, plus noise that shrinks as the batch grows. The
# **noise scale** is the batch at which both are equally long. By the theory of McCandlish et al. it is a first
# estimate of the critical batch size: a run with batches of x times that size needs 1 + x times as many samples as
# one with tiny batches, and 1 + 1/x times as many steps as one with huge batches.
#
# Data parallelism measures the noise scale at no cost, because it has gradients of two batch sizes: each rank's own, of
# `size` windows, and their mean, of N·`size`. Squared lengths are signal + noise/batch, so two of them give both
# unknowns. A **communication hook** sees a bucket before it is averaged, and may send it in its own way.


# %% tags=["deeper"]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def note_squares(squares, bucket):
    squares.append(bucket.buffer().square().sum())
    return default_hooks.allreduce_hook(None, bucket)


def noise_scale(own, mean, size, n):
    """Batch at which noise and signal are equal, from mean squared lengths of gradients.

    `own` of the ranks' gradients, of `size` samples each; `mean` of their mean over n ranks.
    """
    signal = (n * mean - own) / (n - 1)
    noise = (own - mean) * n * size / (n - 1)
    return noise / signal


# %% [markdown] tags=["deeper"]
# **Predict**: as the loss falls, does the noise scale shrink or grow?

# %% tags=["deeper"]
scale = predict("the noise scale, as the loss falls", ["shrinks", "grows", "stays as it is"])


# %% tags=["deeper"]
def squared_lengths(steps, size):
    """On a rank: for each step the loss, squared lengths of own gradients and of their mean."""
    model, squares, seen = DDP(build_gpt().to(device())), [], []
    model.register_comm_hook(squares, note_squares)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        loss = loss_of(model, *my_windows(step, size))
        loss.backward()
        own = torch.stack([loss.detach(), sum(squares)])
        dist.all_reduce(own)
        mean = sum(p.grad.square().sum() for p in model.parameters())
        seen.append([*(own / dist.get_world_size()).tolist(), mean.item()])
        squares.clear()
        optimizer.step()
        optimizer.zero_grad()
    return seen


# %% tags=["deeper", "nbval-ignore-output"]
seen = numpy.array(on_ranks(squared_lengths, 60, size=4)[0])
noise = []
for first in (0, 20, 40):
    loss, own, mean = seen[first : first + 20].mean(axis=0)
    noise.append(noise_scale(own, mean, 4, world_size))
    print(f"steps from {first:2}: loss {loss:.2f}, noise scale {noise[-1]:.1f} windows")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert 0 < noise[0] < noise[1] < noise[2]
scale.compare("grows")

# %% [markdown] tags=["deeper"]
# **Compare.** It grows. At first all windows teach the same, namely which characters are frequent, so one window is
# enough. Later they disagree.
#
# Still, a batch of 48 windows, as in our weak scaling, is larger than the noise scale of this small model. So a run may
# begin with a small batch and enlarge it later. The noise scale is an estimate, because it
# supposes the best learning rate for each batch and a loss that curves alike in all directions. But it gives an order
# of magnitude before you rent the GPUs.

# %% [markdown] tags=["deeper"]
# ## 11. Buckets, and what hides behind backward · deeper
#
# DDP starts a bucket's all-reduce as soon as its gradients are there (lesson 04). The **overlap fraction** is the
# share of communication that lies within the backward pass. `scaling.bucket_sweep` reads it, for several sizes of
# buckets, from a trace of `torch.profiler`.
#
# **Predict**: how much of the communication lies within backward, if all gradients are in one bucket?

# %% tags=["deeper"]
in_one = predict("within backward, with one bucket", unit="%")

# %% tags=["deeper"]
caps = [25, 0.125, 0.0625, 0.0001]  # MiB
sweep = launch(scaling.bucket_sweep, caps, rank_batch, world_size=world_size, backend="gloo")[0]
for cap, run in zip(caps, sweep, strict=True):
    print(f"bucket_cap_mb={cap:<7}{run.messages:3} messages, {run.bytes:,} bytes")

# %% tags=["deeper"]
messages, _, seconds, _, hidden = zip(*sweep, strict=True)
figures.bucket_sweep(messages, seconds, hidden)

# %% jupyter={"source_hidden": true} tags=["deeper", "nbval-ignore-output"]
assert {run.bytes for run in sweep} == {4 * TransformerConfig().parameter_count}
assert hidden[0] < max(hidden)
in_one.compare(100 * hidden[0])

# %% [markdown] tags=["deeper"]
# **Compare.** Next to nothing: one bucket is full only when the last gradient has come, and then backward ends.
#
# *The figure, left: time of forward and backward over the number of buckets. Right: the overlap fraction, close to zero
# for one bucket and highest for a few.*

# %% tags=["deeper"]
figures.step_spans(sweep[2].rows, "measured: buckets of 64 KiB, rank 0, from the profiler's trace")

# %% [markdown] tags=["deeper"]
# *The figure: the upper bar is the backward pass. Below it the all-reduces run on gloo's threads; the first start
# during backward, the last end after it.*
#
# The bytes never change. Many buckets start early, and each pays the latency α (lesson 02). Where ranks compute on the
# cores that carry the messages, hidden communication slows the computation down, and few buckets are faster.
#
# ### Choosing the size
#
# Cut S bytes into k buckets that become ready at equal intervals during a backward pass of t seconds. Each takes
# c = α + βS/k seconds, one after the other. Either the link keeps up, so only the last all-reduce ends after backward,
# at t + c. Or the link is the bottleneck, so it is never idle after the first bucket, and all ends at t/k + k·c. The
# later of the two counts:


# %% tags=["deeper"]
def exposed(k, each, backward):
    """Seconds that k all-reduces of `each` seconds add to a backward pass of `backward` seconds."""
    return max(backward + each, backward / k + k * each) - backward


rows = {}
for k in (1, 5, 40):
    case = (k, 1e-3 + 1.2e-9 * 2e7 / k, 0.05)
    spans = scaling.bucket_schedule(*case)
    assert math.isclose(spans[-1][1] - 0.05, exposed(*case))
    bars = [("all_reduce", *span) for span in spans]
    rows |= {f"{k}: backward": [("backward", 0, 0.05)], f"{k}: all-reduce": bars}
figures.step_spans(rows, "modelled: 1, 5 and 40 buckets; α is 1 ms, backward 50 ms")

# %% [markdown] tags=["deeper"]
# *The figure: with one bucket the all-reduce starts when backward ends. With five most of it hides. With forty the
# latencies, 40 ms in all, leave no gap on the link, and the end moves out again.*
#
# When the link is the bottleneck, t/k + kα + βS is least at k = √(t/α). Now a real size: 1.3 billion parameters, 4,096
# tokens for each of eight A100s at 140 TFLOP/s, gradients in bf16. How long an all-reduce takes over NVLink comes from
# the table of lesson 03 (*recorded*), interpolated between its rows in logarithms. The second curve puts the same job
# on eight nodes of one GPU, each with a port of 100-gigabit Ethernet.

# %% tags=["deeper"]
size, backward = 2 * 1.3e9, 4 * 1.3e9 * 4096 / 140e12
table, eth = recorded.A100_ALL_REDUCE, LINKS["eth_100g"]


def on_nvlink(size):
    """Seconds of an all-reduce over 8 A100s, from the record."""
    return math.exp(numpy.interp(math.log(size), numpy.log(table.sizes), numpy.log(table.seconds)))


def on_ethernet(size):
    return 14 * eth.latency + bytes_sent("all_reduce", 8, size) / eth.bandwidth  # a ring of 8


sizes = [2.0 ** (e / 4) for e in range(72, 117)]  # of a bucket: 256 KiB to 512 MiB
curves = {}
print(f"backward takes {backward * 1e3:.0f} ms (modelled)")
for name, of in {"NVLink": on_nvlink, "Ethernet": on_ethernet}.items():
    buckets = [round(size / b) for b in sizes]
    curves[name] = [exposed(k, of(size / k), backward) for k in buckets]
    best, default = min(curves[name]), exposed(99, of(size / 99), backward)  # 99 of 25 MiB
    print(f"{name}: one message {of(size) * 1e3:.0f} ms; buckets add", end="")
    print(f" {best * 1e3:.1f} at best, {default * 1e3:.1f} at 25 MiB")
figures.bucket_choice(sizes, curves, default=25 * 2**20)

# %% [markdown] tags=["deeper"]
# *The figure: over NVLink the added time is a valley with a cliff on its left, where the latencies of too small
# buckets no longer fit behind backward; too large ones stick out. Over Ethernet it is nearly flat from about 16 MiB
# on.*
#
# DDP's default of 25 MiB lies on the gentle side of the valley, a fraction of a millisecond from the best. Over the
# slow link the size hardly matters: when communication is the bottleneck, only fewer bytes help.

# %% [markdown] tags=["deeper"]
# ## 12. Loss scaling, and weights that stand still · deeper
#
# Our small model has large gradients. Large models with long sequences have smaller ones; a loss multiplied by 2⁻²⁰
# stands for them.


# %% tags=["deeper"]
shrink = 2.0**-20


def gradients_of(scale):
    model = build_gpt()
    (loss_of(model, *fixed_batch(0)) * scale).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


by_loss = {"loss": gradients_of(1.0), "shrunken loss": gradients_of(shrink)}
for name, gradient in by_loss.items():
    lost = (gradient.half() == 0).float().mean() - (gradient == 0).float().mean()
    print(f"{name:14}{lost:6.1%} of the gradient's elements become 0 in fp16")
limits = {f.name: (f.lowest_power, math.log2(f.largest)) for f in FORMATS if f.dtype}
figures.gradient_range(by_loss, limits)

# %% [markdown] tags=["deeper"]
# *The figure, above: for each loss, the share of gradient elements at each power of two; the shrunken loss moves all
# elements to the left by 20. Below: a bar for each format. The left hill stands within the bars of fp32 and bf16, and
# left of the beginning of fp16's.*
#
# Loss scaling moves the hill back. Under `torch.autocast` matrix products run in the short format, while parameters
# stay in fp32; `GradScaler` multiplies the loss, and divides the gradients before the optimizer's step.
#
# **Predict**: four runs on the shrunken loss, in fp32, bf16, fp16, and fp16 with a scaler. Which learn?

# %% tags=["deeper"]
learners = ["only fp32", "fp32 and fp16 with a scaler", "all but fp16", "all four"]
learning = predict("of the four runs learn", learners)


# %% tags=["deeper"]
def train(dtype=None, scaler=None, steps=12):
    """Losses of one process; autocast to `dtype` if given."""
    model, losses = build_gpt(), []
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-30)
    for step in range(steps):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model, *fixed_batch(step))
        losses.append(loss.item())
        scaler.scale(loss * shrink).backward()
        scaler.step(optimizer)  # divides the gradients; skips the step if any is not finite
        scaler.update()
        optimizer.zero_grad()
    return losses


# %% tags=["deeper"]
runs = {
    "fp32": train(),
    "bf16": train(torch.bfloat16),
    "fp16": train(torch.float16),
    "fp16, scaler": train(torch.float16, torch.amp.GradScaler("cpu")),
}
for name, losses in runs.items():
    print(f"{name:13} loss {losses[0]:.1f} -> {losses[-1]:.1f}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert runs["fp16"][-1] > 4.5 > 4 > max(runs[name][-1] for name in runs if name != "fp16")
learning.compare("all but fp16")

# %% [markdown] tags=["deeper"]
# **Compare.** All but fp16, which learns nothing, without an error or a warning: its loss is finite, its gradients are
# zero.
#
# (AdamW's `eps` is small here, since it must stay below tiny gradients in fp32 too.) The scaler finds the factor by
# trying. If a gradient is infinite, it skips the step and halves the scale; after 2,000 good steps it doubles it. Under
# DDP all ranks skip the same step (lesson 04).
#
# > **Misconception.** "`torch.cuda.amp.GradScaler` for every low precision." It is deprecated for `torch.amp`, and
# > bf16 needs no scaler.
#
# In the GPT, the **gains** (weights) of the layer norms start at 1, like the weight of section 5. The next cell trains
# it in pure bf16, without master weights.


# %% tags=["deeper"]
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
    return torch.cat([*same.values()]).mean().item(), torch.cat(gains).mean().item()


for lr in (1e-3, 1e-5):
    every, gains = unchanged(torch.bfloat16, lr)
    print(f"learning rate {lr:g}: {every:4.0%} of all weights stand still,", end="")
    print(f" {gains:.0%} of the gains")
assert gains == 1 and unchanged(torch.float32, lr)[0] < 0.01

# %% [markdown] tags=["deeper"]
# The smaller the learning rate, the more of the model stands still, and learning rates fall during training.
#
# <details><summary>What else helps, besides a second copy of all weights?</summary>
#
# **Stochastic rounding**: round up with a probability that is the distance to the lower neighbour, divided by the gap
# between both. Then the thousand updates make 2 on average. Or keep only the 16 bits that bf16 drops, beside the bf16
# weight: together they are the master weight.
# </details>

# %% [markdown] tags=["deeper"]
# ## 13. fp8 and fp4: a scale for every block · deeper
#
# With 8 bits, a number needs a **scale** beside it: e4m3 ends at 448, and anything far below 2⁻⁹ is zero. The first
# recipes had one scale a tensor, chosen so that its largest element lands at the end of the range. With 4 bits
# the usual format is e2m1, which has only the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
#
# The **MX** formats, a standard of the Open Compute Project
# ([Rouhani et al. 2023](https://arxiv.org/abs/2310.10537)), give each block of 32 neighbours in a row its own scale,
# a power of two in 8 bits. **NVFP4** takes blocks of 16 with a scale in e4m3, and one more in fp32 for the tensor.
# Blackwell's tensor cores multiply all of these directly.
#
# **Predict**: one element of a weight is multiplied by a thousand. How large is the error of all *other* elements, in
# fp8 and in fp4, with one scale for the tensor?

# %% tags=["deeper"]
in_fp8 = predict("error of the others in fp8, one element × 1,000", unit="%")
in_fp4 = predict("error of the others in fp4, one element × 1,000", unit="%")


# %% tags=["deeper"]
from lessons.scaling_efficiency.number_formats import BLOCK_FORMATS, BlockFormat

weight = build_gpt().blocks[0].mlp.up.weight.detach().reshape(1, -1)
whole = weight.numel()
one_scale = (BlockFormat("fp8", "e4m3", whole, "e8m0"), BlockFormat("fp4", "e2m1", whole, "e8m0"))


def error_of_others(form, factor):
    """Relative error (root mean square) of a format, one element grown but not counted."""
    grown, others = weight.clone(), torch.arange(whole) != 1000
    grown[0, 1000] *= factor
    kept = form.keep(grown)
    return ((kept - grown)[:, others].norm() / grown[:, others].norm()).item()


errors = {}
print("format   bits        x 1     x 1,000 x 1,000,000")
for form in (*one_scale, *BLOCK_FORMATS):
    errors[form.name] = [error_of_others(form, factor) for factor in (1, 1e3, 1e6)]
    row = "".join(f"{error:12.1%}" for error in errors[form.name])
    print(f"{form.name:6}{form.bits:7.2f}{row}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert errors["fp8"][1] < 0.05 < 0.3 < errors["fp8"][2] and errors["fp4"][1] > 0.9
assert max(errors["MXFP8"]) < 0.05 and max(errors["MXFP4"] + errors["NVFP4"]) < 0.2
in_fp8.compare(100 * errors["fp8"][1])
in_fp4.compare(100 * errors["fp4"][1])

# %% [markdown] tags=["deeper"]
# **Compare.** In fp8 a few percent, because the exponent of e4m3 gives some range; a factor of a million is too much
# for it. fp4 has almost no range, so everything else becomes 0.
#
# Without an outlier one scale is nearly as good as many. With a scale for each block, an outlier affects only its
# block. What remains is the rounding: a tenth in fp4.
#
# What block scales change in training, by the [documentation of Transformer
# Engine](https://docs.nvidia.com/deeplearning/transformer-engine/features/low_precision_training/index.html):
#
# - Gradients no longer need the wider range of e5m2, so MXFP8 uses e4m3 in both directions.
# - Blocks lie along the rows of a product, and backward multiplies the transpose. So a tensor is rounded twice, from
#   the original: in blocks of rows and in blocks of columns.
# - fp4 rounds gradients stochastically (section 12), and spreads outliers over their block by a Hadamard transform
#   before it rounds.
# - Master weights, optimizer states, norms, sums inside products and gradient messages stay in 16 or 32 bits.
#
# How much faster? Products with an MLP matrix of Llama 3 70B were *recorded* on an H200 in bf16 and in fp8 with a scale
# a tensor. So was the time to convert a factor, which must first be read for its largest element. The data sheet
# promises twice the FLOP/s.

# %% tags=["deeper"]
by_shape = {
    check: {(p["rows"], p["inner"]): p for p in recorded.gpu_check(check)["products"]}
    for check in ("layer_products", "fp8_products")
}
print("tokens  inner   TFLOP/s: bf16   fp8   faster: alone   activations   both")
faster = {}
for (tokens, inner), each in by_shape["fp8_products"].items():
    usual = by_shape["layer_products"][tokens, inner]
    rates = usual["rate"]["value"], each["rate"]["a scale a tensor"]["value"]
    bf16, fp8 = (2 * tokens * inner * each["columns"] / rate / 1e12 for rate in rates)
    activations = each["convert"]["value"]
    weight = by_shape["fp8_products"][8192, inner]["convert"]["value"]
    row = [bf16 / (fp8 + more) for more in (0, activations, activations + weight)]
    faster[tokens, inner] = row
    print(f"{tokens:6}{inner:7}{rates[0]:16.0f}{rates[1]:6.0f}", end="")
    print(f"{row[0]:16.2f}{row[1]:14.2f}{row[2]:7.2f}")
alone, converted, both = faster[8192, 28672]
assert both < 1.1 < converted < 1.5 and alone > 1.9 and faster[128, 28672][0] < 1.4
assert 0.45 < (1 / converted - 1 / alone) / (1 - 1 / alone) < 0.5  # of the time that fp8 saves

# %% [markdown] tags=["deeper"]
# Large products are 1.8 to 2 times as fast. Thin ones gain 1.3: the smaller a product, the less of the faster tensor
# cores it can use. Of the *time* that fp8 saves in the largest product, half goes into converting the activations, and
# nearly all of the rest into converting the weight. With 128 tokens and both conversions fp8 takes ten times as long as
# bf16. So convert a weight once for all micro-batches of a step, and the activations in the operation before the
# product, as the layers of Transformer Engine can.
#
# In a whole step, 8 H100s train Llama 3.1 8B at 8,532 tokens/s a GPU in fp8, instead of 6,667 in bf16 (*recorded*,
# [torchtitan](https://github.com/pytorch/torchtitan), both compiled): 28 % faster.

# %% [markdown] tags=["deeper"]
# ## 14. Compressed gradients · deeper
#
# A communication hook can also send something smaller. Here is one for bf16. It divides before the sum, as DDP does. In
# fp16 the order matters: a sum over many ranks could pass 65,504, but divided gradients are smaller, and more of them
# become zero. (FSDP2 divides by about √N before the sum and by the rest afterwards.)


# %% tags=["deeper"]
def bf16_hook(state, bucket):
    """Average a bucket in bf16."""
    short = bucket.buffer().bfloat16() / dist.get_world_size()

    def widen(future):
        return bucket.buffer().copy_(future.value()[0])

    return dist.all_reduce(short, async_op=True).get_future().then(widen)


# %% [markdown] tags=["deeper"]
# **Top-k** sends only the largest elements, say 1 % of them, as pairs of place (index) and value. What was not sent
# must not be thrown away, because small gradients that always point the same way add up. So the rest is kept and added
# to the next gradient, which is called **error feedback**.


# %% tags=["deeper"]
def largest(gradient, left, share):
    """Values and places of the largest elements of gradient + left, and what is left then."""
    left = gradient + left
    places = left.abs().topk(max(1, int(share * left.numel()))).indices
    values = left[places]
    left[places] = 0
    return values, places, left


class TopK:
    """State of the hook: which share to send, whether to keep the rest, and what is left."""

    def __init__(self, share, feedback):
        self.share, self.feedback, self.left = share, feedback, {}


# %% [markdown] tags=["deeper"]
# Each rank picks other places, so an all-reduce cannot add them on the way. Instead, the hook all-gathers values and
# places in one tensor. What is left is kept for each parameter, because DDP puts parameters into other buckets after
# its first step.


# %% tags=["deeper"]
def top_k_hook(state, bucket):
    """Average a bucket of which every rank sends its largest elements."""
    buffer, n, owners = bucket.buffer(), dist.get_world_size(), bucket.parameters()
    left = torch.cat([state.left.get(p, torch.zeros_like(p)).flatten() for p in owners])
    values, places, left = largest(buffer, left, state.share)
    if state.feedback:
        state.left |= zip(owners, left.split([p.numel() for p in owners]), strict=True)
    mine = torch.cat([values, places.int().view(torch.float32)])  # bits of integers, as floats
    everyone = mine.new_empty(n * mine.numel())

    def add_up(_):
        values, places = everyone.view(n, 2, -1).unbind(1)
        places = places.reshape(-1).view(torch.int32)
        return buffer.zero_().index_add_(0, places, values.reshape(-1) / n)

    return dist.all_gather_single(everyone, mine, async_op=True).get_future().then(add_up)


# %% [markdown] tags=["deeper"]
# **PowerSGD** approximates each gradient matrix by a product of two thin ones, which have r columns or r rows, and
# all-reduces those two: r · (rows + columns) numbers instead of rows · columns. r is called the *rank* of the
# approximation, a rank that has nothing to do with processes. PowerSGD has error feedback built in. (On gloo, with more
# than one bucket, PyTorch 2.13 aborts the process, so `train_with_hook` makes one bucket of everything.)
#
# The optimizer is plain SGD, for which error feedback was made. **Predict**: how many times fewer bytes does each of
# four ranks send with the top 1 %?

# %% tags=["deeper"]
fewer = predict("fewer bytes with the top 1 %", unit="times")


# %% tags=["deeper"]
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook


def power_sgd():
    options = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
    return powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook


hooks = {
    "none": None,
    "bf16": lambda: (None, bf16_hook),
    "PowerSGD": power_sgd,
    "top 1 %, feedback": lambda: (TopK(0.01, feedback=True), top_k_hook),
    "top 1 %": lambda: (TopK(0.01, feedback=False), top_k_hook),
}
steps = dict.fromkeys(hooks, 120) | {"bf16": 20}  # enough to compare
trained = {name: on_ranks(scaling.train_with_hook, hooks[name], steps[name]) for name in hooks}
sent = {name: by_rank[0].sent for name, by_rank in trained.items()}
for name, size in sent.items():
    print(f"{name:18}{size:10,.0f} bytes sent in a step, {sent['none'] / size:5.1f} times fewer")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert math.isclose(sent["bf16"], sent["none"] / 2)
assert sent["top 1 %"] == (world_size - 1) * 8 * int(0.01 * TransformerConfig().parameter_count)
fewer.compare(sent["none"] / sent["top 1 %"])

# %% [markdown] tags=["deeper"]
# **Compare.** 25 times fewer, not 100. Each element needs its place too, which halves the saving. And in the all-gather
# a rank's elements go to all three others, where an all-reduce sends 1.5 numbers for each.

# %% tags=["deeper"]
curves = {name: scaling.smooth_losses(by_rank) for name, by_rank in trained.items()}
still = {name: by_rank[0].unchanged for name, by_rank in trained.items()}
final = {name: losses[-1] for name, (_, losses) in curves.items()}
assert max(abs(a - b) for a, b in zip(curves["bf16"][1], curves["none"][1], strict=False)) < 0.05
assert final["top 1 %, feedback"] < final["top 1 %"] - 0.15
assert still["top 1 %"] > still["top 1 %, feedback"] > still["none"]
del curves["bf16"]  # it would lie on the uncompressed one
title = "measured: loss with compressed gradients, mean of five steps"
figures.loss_curves(curves, title, wide=["none"])

# %% [markdown] tags=["deeper"]
# *The figure: the curves of PowerSGD and of top-k with feedback are close to the uncompressed one. Top-k without
# feedback leaves them and stays behind.*

# %% tags=["deeper", "nbval-ignore-output"]
for name, loss in final.items():
    print(f"{name:18} loss {loss:.2f} after {steps[name]:3} steps,", end="")
    print(f" {still[name]:3.0%} never updated")

# %% [markdown] tags=["deeper"]
# bf16 halves the bytes, and the loss hardly changes. PowerSGD sends an order of magnitude less, and the larger the
# matrices, the more it saves. Without feedback, top-k has never updated most of the weights; with it, the same bytes
# bring the loss close to the uncompressed one.
#
# The all-gather grows with N, where an all-reduce does not:

# %% tags=["deeper"]
for n in (4, 16, 50, 100):
    dense, sparse = bytes_sent("all_reduce", n, 4), (n - 1) * 8 * 0.01  # of a parameter
    share = sparse / dense
    print(f"{n:4} ranks: top 1 % sends {share:5.1%} of fp32, {2 * share:6.1%} of bf16")

# %% [markdown] tags=["deeper"]
# PowerSGD's factors are *added* on the way, so its saving does not shrink; its authors chose the form for that reason.
# On a GPU, compressing takes multiprocessors from backward, so over NVLink it can take longer than the all-reduce that
# it shortens. It pays where the link is slow: between sites, over Ethernet.
#
# <details><summary>And with momentum?</summary>
#
# Then a late gradient, which arrives as one large number, pushes on for many steps, and clipping the mean afterwards
# throws away a part of what was kept so carefully. Lin et al., *Deep gradient compression*, 2017 ([arXiv
# 1712.01887](https://arxiv.org/abs/1712.01887)), solve both: each rank applies momentum and clips *before* it chooses
# what to send.
# </details>

# %% [markdown] tags=["deeper"]
# ## 15. Time to train, and spot · deeper
#
# A model of Ψ parameters computes 6 FLOPs for each parameter and token, and 8 if the forward pass is repeated. With D
# tokens on N GPUs, of which each reaches F FLOP/s, that is 8DΨ/(NF) seconds. For GPT-3, with 175 billion parameters
# and 300 billion tokens, on 1,024 A100s at 140 TFLOP/s, Narayanan et al. give 34 days (*recorded*, arXiv 2104.04473):

# %% tags=["deeper"]
days = 8 * 300e9 * 175e9 / (1024 * 140e12) / 86_400
print(f"{days:.1f} days, {1024 * 24 * days:,.0f} GPU hours (modelled)")
assert round(days) == 34

# %% [markdown] tags=["deeper"]
# F includes what is repeated here, as an HFU does, and so the factor is 8. With the F of an MFU it is 6.
#
# **Spot** or preemptible GPUs are cheap because they can be taken away. A job on N of them is interrupted N times as
# often as one GPU. Each time it loses the time of the restart, and the work since the last checkpoint (of the model,
# not of activations), which is half an interval on average.
#
# **Predict**: a job is stopped every ten hours, and takes two minutes to save and ten to restart. Should it save
# every six minutes, every hour, or every four hours?

# %% tags=["deeper"]
intervals = ["every six minutes", "every hour", "every four hours"]
saving = predict("the job should save", intervals)


# %% tags=["deeper"]
def goodput(rate, save, restart, every):
    """Share of the time that becomes progress. Hours, and interruptions of the job per hour."""
    return every / (every + save) * max(0.0, 1 - rate * (restart + every / 2))


rate, save, restart = 0.1, 2 / 60, 10 / 60  # examples
progress = {every: goodput(rate, save, restart, every) for every in (0.1, 1.0, 4.0)}
for every, share in progress.items():
    print(f"checkpoint every {every:.1f} h: {share:.0%} of the time is progress (modelled)")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert max(progress, key=progress.get) == 1
saving.compare("every hour")

# %% [markdown] tags=["deeper"]
# **Compare.** Every hour. Who saves too often spends the time on saving, and who saves too rarely on repeating work.
#
# The lost share of the time is about save/every + rate·every/2, which is least at every = √(2·save/rate) (J. W. Young,
# 1974; lesson 16 derives it):


# %% tags=["deeper"]
def best_interval(rate, save):
    return math.sqrt(2 * save / rate)


best = best_interval(rate, save)
share = goodput(rate, save, restart, best)
others = [goodput(rate, save, restart, factor * best) for factor in (0.7, 1.4)]
assert share > max(others)
print(f"checkpoint every {best:.2f} h: {share:.0%} of the time is progress (modelled)")

# %% [markdown] tags=["deeper"]
# Interruptions are not for spot only: Llama 3's 16,384 GPUs met 419 unexpected ones in 54 days, one every three hours
# (*recorded*, arXiv 2407.21783). Now enter your prices; those shown are examples.

# %% tags=["deeper"]
from lessons.collectives.explorer import cost_calculator

calculator = cost_calculator()
calculator

# %% [markdown] tags=["deeper"]
# *The calculator: hours on one GPU, the efficiency kept at each doubling, prices and interruptions; below it hours and
# cost of the run over the number of GPUs, on demand and on spot.*
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
waits = [log.mean(skip=2)["wait"] for log in apart]
print("waiting for the late rank, ms:", *(f"{1e3 * wait:.0f}" for wait in waits))
print(f"checkpointing, width 256: {saved:.1f} times less memory, {slower:.2f} times the time")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - A late rank's delay shows on the others, as communication. A barrier before the all-reduce tells waiting from
#   transfer.
# - Computing over communicating depends on tokens per GPU and on the machine, not on the size of the model.
# - Fewer bits save time, and checkpointing saves memory; HFU counts what is computed twice, MFU does not.
# - Cost is proportional to 1/efficiency.
#
# **Now you can answer**
#
# 1. Of each step 5 % cannot be divided. What is the largest speed-up with the same batch?
# 2. A profile of rank 0 says that 60 % of a step is all-reduce. What do you do before you buy a faster network?
# 3. Why does fp16 need loss scaling and bf16 does not, and why do both need master weights?
# 4. You switch checkpointing on, and HFU rises. Is the job faster?
# 5. The batch grows with the GPUs. Up to which batch is that worth it?
#
# <details><summary>Answers</summary>
#
# 1. Less than 20 (section 2).
# 2. Put a barrier before the all-reduce, on all ranks, and see whether it is waiting (section 3).
# 3. fp16's range ends at small gradients, bf16 has fp32's. Both round small updates away (section 5).
# 4. Not necessarily: look at MFU or tokens per second (section 6).
# 5. Up to the critical batch size, which grows as the loss falls (sections 2 and 10).
# </details>
#
# **What to take to work:** [scripts/scaling_curve.py](../scripts/scaling_curve.py), and the barrier of section 3.
#
# **Exercises:** [exercises/05_scaling_efficiency](../exercises/05_scaling_efficiency_exercises.ipynb). **Next:** [06
# zero](06_zero.ipynb), which divides the 16 bytes among ranks.
#
# **Worth reading**
# - S. McCandlish, J. Kaplan, D. Amodei, *An empirical model of large-batch training*, 2018, [arXiv
#   1812.06162](https://arxiv.org/abs/1812.06162): the noise scale, and how batch, steps and samples trade.
# - P. Micikevicius et al., *Mixed precision training*, 2017, [arXiv 1710.03740](https://arxiv.org/abs/1710.03740):
#   loss scaling and master weights.
# - T. Vogels, S. P. Karimireddy, M. Jaggi, *PowerSGD*, 2019, [arXiv 1905.13727](https://arxiv.org/abs/1905.13727):
#   why a compressor should be linear, so that it can be all-reduced.
