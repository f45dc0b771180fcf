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
# # Where does a step's time go?
#
# Meta has published a trace of an A100 in a small data-parallel job (*recorded*). Over its three steps, two thirds of
# a second, the GPU computes during 18 % of the time, and for 76 % it does nothing at all. Nothing failed in these
# steps, and no loss curve would show it. Where in the step did the time go, on which rank, how much of it is the
# recording's own fault, and what would you change first? A trace holds thousands of events, and it is easy to blame the
# wrong rank. In this lesson you write the 60 lines that read it.
#
# **You will be able to**
# - *choose* what to log at every step, and *say* what each stronger tool costs;
# - *record* a trace on every rank, and *check* what is in it;
# - *compute* idle time, exposed communication and overlap from any trace, of CPU ranks or of GPUs;
# - *name* the rank that makes all others wait, also when the clocks of the hosts differ;
# - *mend* a slow program in the order in which its faults cost time.
#
# **Before this:** [04 ddp](04_ddp.ipynb), [05 scaling efficiency](05_scaling_efficiency.ipynb). **Time:** about 45
# minutes to read the core, 90 with the deeper sections, under a minute to run.

# %% [markdown]
# Imports and parameters:

# %% tags=["parameters"]
import inspect
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import profile, record_function, schedule, supported_activities

world_size = 2  # ranks, 2 or more
activities = supported_activities()  # to record: the CPU, and CUDA where there is a GPU
os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler says nothing on the side

# %%
import course_utils.traces as course_traces
from course_utils import launch
from course_utils.data import Windows
from course_utils.models import TransformerConfig, build_gpt, loss_of
from course_utils.predictions import predict, predictions
from course_utils.programs import SCRIPTS, TEXT, read_log
from course_utils.recorded import gpu_check
from course_utils.step_log import LateRank, StepLog, matmul_flops, slowdown
from course_utils.traces import RECORDED, ending_together, load, numbered, view
from lessons.profiling import figures

# %% [markdown]
# ## 1. What to watch: one line a step
#
# The first tool is not a profiler but a log, because a log is there on the day when the job becomes slow. It has one
# line for each step, or for each tenth, with the time of the step's parts. We train the small GPT of
# [lesson 04](04_ddp.ipynb) under DDP, and `StepLog` notes how long each part takes. It also gives the part its
# name in a trace, through `record_function`, which we need in section 2. (On a GPU, write `StepLog(synchronize=True)`;
# section 2 shows why, and what is better.)


# %%
config = TransformerConfig(layers=4, hidden=64)
windows = Windows("train", config.context)
rank_batch = 8  # windows of text of each rank in a step


def prepare():
    """This rank's model, with gradients in buckets of 128 KiB, and its optimizer."""
    model = DDP(build_gpt(config), bucket_cap_mb=0.125)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# %%
def train_step(model, optimizer, log, step, disk=None):
    with log.part("data"):
        first = (step * dist.get_world_size() + dist.get_rank()) * rank_batch
        x, y = windows.batch(range(first, first + rank_batch))
        if disk:
            disk.hold(step)  # in section 4: where the data are late
    with log.part("forward"):
        loss = loss_of(model, x, y)
        if disk:
            disk.reached(step)
    with log.part("backward"):
        loss.backward()
    with log.part("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    log.end_step()


# %% tags=["nbval-ignore-output"]
def logged(steps):
    model, optimizer = prepare()
    log = StepLog()
    for step in range(steps):
        train_step(model, optimizer, log, step)
    return log.mean(skip=2)


split = launch(logged, 8, world_size=world_size, backend="gloo")
step_seconds = max(sum(row.values()) for row in split)
tokens_per_second = world_size * rank_batch * config.context / step_seconds
for rank, row in enumerate(split):
    print(f"rank {rank}", *(f"{part} {1e3 * seconds:.1f} ms" for part, seconds in row.items()))
print(f"{tokens_per_second:,.0f} tokens/s (measured, gloo on CPU)")

# %% [markdown]
# Tokens per second is the number that costs money, but it cannot say whether it is good. **MFU**, model FLOPs
# utilization, can: the FLOPs that the model needs for these tokens, as a share of what the hardware could compute.
# A GPU's peak stands in its data sheet. For CPU ranks we measure one, by large matrix products on all of them at once.

# %% tags=["nbval-ignore-output"]
peak = sum(launch(matmul_flops, world_size=world_size, backend="gloo"))
model_flops = config.flops_per_token("none")
mfu = tokens_per_second * model_flops / peak
print(f"peak of all ranks {peak / 1e9:.0f} GFLOP/s, MFU {mfu:.0%} (measured, gloo on CPU)")
assert 0 < mfu < 1

# %% [markdown]
# The rest goes to small operations and to waiting. A large model that is trained well reaches about 40 %: Llama 3 405B
# reports 38 to 43 % (*recorded*, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), table 4). Compare runs by MFU or
# by tokens per second, not by HFU, which counts recomputation as work ([lesson 05](05_scaling_efficiency.ipynb)).
#
# The log has a blind spot. DDP communicates *during* backward, so the part `backward` holds computing and waiting for
# other ranks, and a stopwatch cannot separate them. Communication that no computing hides is called **exposed**. To
# see it, we need every operation with its start and its end, from all threads, which is a **trace**. Stronger tools
# cost more. First the log itself:

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
log = StepLog()
start = time.perf_counter()
for _ in range(1000):
    with log.part("nothing"):
        pass
print(f"a part of the log: {1e3 * (time.perf_counter() - start):.0f} µs (measured)")

# %% [markdown]
# The profiler makes an entry for every operation, and on request also notes the Python lines that called it, its shapes
# and its memory.
#
# **Predict**: how many times as long does a step take with all that switched on?

# %%
everything_on = predict("how many times as long a step takes with everything on")


# %% tags=["nbval-ignore-output"]
def costs():
    model, optimizer = prepare()
    log = StepLog()
    more = {"with_stack": True, "record_shapes": True, "profile_memory": True}
    tools = {
        "no tool": nullcontext,
        "profiler": lambda: profile(activities=activities),
        "profiler, everything on": lambda: profile(activities=activities, **more),
    }
    return slowdown(lambda: train_step(model, optimizer, log, 0), tools, rounds=40)


factors = launch(costs, world_size=world_size, backend="gloo")[0]
for tool, factor in factors.items():
    print(f"{tool}: {factor:.2f} times the step (measured, gloo on CPU)")

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
everything_on.compare(factors["profiler, everything on"])

# %% [markdown]
# **Compare.** Read the factors against the first line, which is what chance makes of no tool at all on this machine.
# A factor of this kind holds for one program: the shorter its operations, the more an entry for each of them costs.
#
# > **The observer effect.** The profiler makes its entries on the CPU. So it slows the host more than the GPU, and a
# > GPU that waits for its host looks idler than it is. Take the *length* of a step from the log, without a profiler.
#
# So record a few steps, and Python's stacks only when the question is "which line called this?".
#
# | tool | what it answers | what it costs | when |
# |---|---|---|---|
# | a per-step log, tokens/s, MFU | is the job slower than last week? | the time of a part, above | always |
# | counters of the GPU (section 9) | is a GPU idle, hot, throttled? | read from outside, not measured here | always |
# | `torch.profiler` | which operation, waiting for whom? | the factors above | a few steps, each rank |
# | Nsight Systems (section 9) | what do CUDA and the drivers do? | not measured here | a few steps, one host |

# %% [markdown]
# ## 2. A trace of every rank
#
# A profiler that runs all day fills the disk, and one that starts with the first step records start-up. So
# `torch.profiler` takes a **schedule**, in steps: `wait` does nothing, `warmup` records and throws away, because the
# profiler is slow at its start ([kineto#328](https://github.com/pytorch/kineto/issues/328)), and `active` keeps.
# `profiler.step()` ends a step. The obvious program writes the file at the end.
#
# **Predict** for `wait=1, warmup=1, active=2` and programs of 4, 5 and 6 steps, numbered from 0: which steps are in the
# file? Commit to the program of five.

# %%
kept = predict("of five steps, the file has", ["2 to 3", "3 to 4", "2 to 4", "none"])


# %%
def export_at_the_end(folder, steps):
    warnings.simplefilter("ignore")  # of the profiler
    plan = schedule(wait=1, warmup=1, active=2)
    with profile(activities=activities, schedule=plan) as profiler:
        for _ in range(steps):
            dist.all_reduce(torch.ones(4))
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json")


recorded_steps = {}
for steps in (4, 5, 6):
    with tempfile.TemporaryDirectory() as folder:
        launch(export_at_the_end, folder, steps, world_size=world_size, backend="gloo")
        recorded_steps[steps] = load(folder)[0].steps
    print(f"{steps} steps: recorded {recorded_steps[steps]}")

# %% jupyter={"source_hidden": true}
assert recorded_steps == {4: [2, 3], 5: [], 6: [6]}
kept.compare("none")

# %% [markdown]
# **Compare.** Only the program of four steps gives what you meant. With five, the schedule has begun its next cycle and
# waits, so the file is written without an error and holds no step. With six, it holds step 6, which the program never
# ran: its last `profiler.step()` began it.
#
# The cure has two parts. `repeat=1` ends the schedule after one cycle, and `on_trace_ready` is called at the moment
# when the last active step is complete. Without any `profiler.step()` this function is never called and there is no
# file at all ([pytorch#91682](https://github.com/pytorch/pytorch/issues/91682)).
#
# One trace is not enough, because a wait on one rank has its reason on another. So every rank writes its own. And
# `activities` has to hold `ProfilerActivity.CUDA` where there is a GPU, or the trace has no kernels; it is in
# `supported_activities()`, which is also the default.


# %%
def traced(folder, late=None):
    """Train, and record steps 2 to 4 of this rank; the data of rank `late` are late."""
    rank = dist.get_rank()
    disk = LateRank(folder, late)
    model, optimizer = prepare()
    log = StepLog()

    def save(profiler):
        profiler.export_chrome_trace(f"{folder}/rank{rank}.json.gz")

    plan = schedule(wait=1, warmup=1, active=3, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=save) as profiler:
        for step in range(7):
            late_now = late is not None and step >= 2  # in step 1 DDP builds its buckets anew
            train_step(model, optimizer, log, step, disk if late_now else None)
            profiler.step()


temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
launch(traced, str(folder), world_size=world_size, backend="gloo")
traces = load(folder)
print(f"{len(traces)} traces, each with steps {traces[0].steps}")

# %% jupyter={"source_hidden": true}
assert [trace.rank for trace in traces] == list(range(world_size))
assert all(trace.steps == [2, 3, 4] for trace in traces)

# %% [markdown]
# The file is JSON in the format of Chrome's tracing page: a list of events, each with a name, a category, a start and a
# duration in microseconds. `load` makes a `Trace` of each file. What is in one of a CPU rank, and in the recorded one
# of an A100?

# %% tags=["nbval-ignore-output"]
host_bound = load("host_bound")[0]
for name, trace in {"rank 0, live": traces[0], "A100, recorded": host_bound}.items():
    print(name, dict(Counter(event.category for event in trace.events)))

# %%
calls = [e for e in traces[0].events if e.name.startswith("c10d::allreduce")]
work = [e for e in traces[0].events if e.name.startswith("gloo:")]
print(f"per step: {len(calls) // 3} calls, {len(work) // 3} all-reduces")
print("on the same threads:", bool({e.row for e in work} & {e.row for e in calls}))

# %% jupyter={"source_hidden": true}
assert len(work) == len(calls) > 0
assert not {e.row for e in work} & {e.row for e in calls}

# %% [markdown]
# A collective stands in the trace twice. `c10d::allreduce_` is the *call*: it puts the work into a queue and returns.
# `gloo:all_reduce` is the *work*, on a thread of gloo's own, and its length includes the wait for other ranks. On a GPU
# the work is a **kernel**, a function that runs on the GPU; its name begins with `nccl`, and its row is a **stream**, a
# queue of kernels that run in order. Whoever adds up the calls finds that communication costs nothing.
#
# On a GPU *every* operation stands there twice: the CPU only **launches** kernels, that is, it puts them into the
# queue (category `cuda_runtime`). A kernel and its launch have the same number, `correlation`, so a trace tells which
# kernels were launched in forward, the range that a stopwatch on the CPU would time.
#
# **Predict** for a V100 that is busy for most of its step (*recorded*): when the CPU leaves forward, how many of the
# kernels that it launched there have begun?

# %%
begun = predict("of forward's kernels have begun", ["all", "about half", "none"])


# %%
v100 = load("two_machines")[1].of_steps([1009])
forward = next(e for e in v100.events if e.name == "## forward ##")
launches = [e for e in v100.events if e.category == "cuda_runtime"]
numbers = {e.args["correlation"] for e in launches if forward.start <= e.start < forward.end}
kernels = [e for e in v100.events if e.category == "kernel" and e.args["correlation"] in numbers]
print(f"the CPU is in forward from {forward.start / 1e3:.0f} to {forward.end / 1e3:.0f} ms;")
first, last = min(e.start for e in kernels), max(e.end for e in kernels)
print(f"the GPU runs these {len(kernels)} kernels from {first / 1e3:.0f} to {last / 1e3:.0f} ms")

# %% jupyter={"source_hidden": true}
assert forward.end < first and v100.gpu.startswith("Tesla V100")
begun.compare("none")

# %% [markdown]
# **Compare.** None. The stopwatch would say 24 ms, and when it has stopped, another 14 ms pass before the first of
# these kernels begins.
#
# **CUDA is asynchronous**: a call returns when its kernel is in the queue
# ([PyTorch](https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution)). So a time on a GPU needs one
# of two things. `StepLog(synchronize=True)` waits at the end of each part until the queue is empty. That is right, but
# the CPU can no longer run ahead, so the step gets longer. **Events** are marks in the queue, and cost no wait:
#
# ```python
# begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
# begin.record()
# loss = loss_of(model, x, y)
# end.record()
# ...  # the rest of the step
# torch.cuda.synchronize()  # once, when the log is written
# forward_ms = begin.elapsed_time(end)
# ```
#
# [`scripts/train.py`](../scripts/train.py) does it so. `.item()`, `.cpu()` and `print(loss)` wait for the GPU, too.

# %% [markdown]
# ## 3. An analyser in 60 lines
#
# We want five numbers of a rank: how long it computed, communicated, did both (**overlap**), communicated without
# computing (**exposed**), and did nothing (**idle**). First: what kind of work is an event?


# %%
def kind(event, on_gpu):
    """Compute, communication, copy, or other."""
    is_work = event.name.startswith(("nccl", "gloo:"))
    if is_work and (event.category == "kernel" or not on_gpu):
        return "communication"
    if event.category in ("gpu_memcpy", "gpu_memset"):
        return "copy"
    is_call = event.name.startswith(("c10d::", "record_param_comms"))
    if event.category == ("kernel" if on_gpu else "cpu_op") and not is_call:
        return "compute"
    return "other"


# %% [markdown]
# Where there is a GPU, only what runs on it counts, and the operators on the CPU, which start kernels, are "other".
# Libraries that communicate by kernels or copies of their own (DeepEP, NVSHMEM, PyTorch's symmetric memory) need their
# names added here, or they count as compute and copies.
#
# Is adding up durations enough?
#
# **Predict**: add up the durations of all compute events of rank 0 in a step, and divide by the time during which at
# least one of them runs. What do you get?

# %%
added_up = predict("durations added up, divided by the time of computing")

# %% tags=["nbval-ignore-output"]
one_step = traces[0].of_steps([3])
compute = [e for e in one_step.events if kind(e, one_step.on_gpu) == "compute"]
added = sum(e.end - e.start for e in compute)
computing = course_traces.length(course_traces.spans(one_step, "compute"))  # ours comes next
print(f"{len(compute):,} durations, together {added / 1e3:.0f} ms, in {computing / 1e3:.0f} ms")

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
assert added > computing
added_up.compare(added / computing)

# %% [markdown]
# **Compare.** More than 1, because events overlap: an operator calls operators, and each of them has its own event.
#
# On a GPU several streams run at a time. So we treat each kind of work as a set of intervals, merge those that overlap,
# and measure lengths of sets. Sorted by their starts, an interval either begins within the last merged one and extends
# it, or begins a new one.


# %%
def merge(intervals):
    """Disjoint intervals that cover the same time."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals):
    return sum(end - start for start, end in intervals)


def spans(trace, *kinds):
    """When a rank did something of these kinds."""
    return merge((e.start, e.end) for e in trace.events if kind(e, trace.on_gpu) in kinds)


# %% [markdown]
# The overlap needs no further algorithm. Time in which a rank does both is counted twice in the sum of the two
# lengths and once in the length of the union, so the difference is the overlap.


# %%
def breakdown(trace):
    """Microseconds of a rank's time, by what it did."""
    compute, communication = spans(trace, "compute"), spans(trace, "communication")
    busy = spans(trace, "compute", "communication", "copy")
    total = busy[-1][1] - busy[0][0] if busy else 0.0
    overlap = length(compute) + length(communication) - length(merge(compute + communication))
    return {
        "total": total,
        "idle": total - length(busy),
        "compute": length(compute),
        "communication": length(communication),
        "overlap": overlap,
        "exposed": length(communication) - overlap,
    }


# %% jupyter={"source_hidden": true}
for trace in [*traces, host_bound]:
    assert all(kind(e, trace.on_gpu) == course_traces.kind(e, trace.on_gpu) for e in trace.events)
    assert breakdown(trace) == course_traces.breakdown(trace)

# %% [markdown]
# Now the live ranks:

# %% tags=["nbval-ignore-output"]
for trace in traces:
    times = breakdown(trace)
    shares = {name: times[name] / times["total"] for name in ("idle", "compute", "exposed")}
    hidden = times["overlap"] / times["communication"]
    text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    print(f"rank {trace.rank}: {text}; {hidden:.0%} of communication overlaps (measured)")


# %% tags=["nbval-ignore-output"]
figures.lanes(traces, 3, "measured: one step under DDP, gloo on CPU")

# %% [markdown]
# *The figure (measured; milliseconds from the start of the step): two rows a rank, above when it computes and below
# when it communicates. Communication begins during backward, when the first bucket is full. Where the row above has no
# bar, it is exposed.*
#
# On CPU ranks overlap saves little, because gloo's threads take processor time from computing. But the analyser can be
# checked on traces whose answer is known. HTA, Meta's tool for traces, computes the share of communication that
# overlaps. On two ranks of a job of 128 it says 11.81 % and 20.05 %, and on the A100 14.31 % (HTA 0.5.0, which leaves
# out a trace's last step, *recorded*).


# %%
def overlap_percent(trace):
    times = breakdown(trace.of_steps(trace.steps[:-1]))
    return round(100 * times["overlap"] / times["communication"], 2)


imbalance = load("imbalance")
ours = [overlap_percent(trace) for trace in [*imbalance, host_bound]]
print("ours:", ours, " HTA: [11.81, 20.05, 14.31]")

# %% [markdown]
# Two agree to the last digit, and one does not. Of these traces only the A100's has fractions of a microsecond, and
# HTA rounds them away: starts up, ends down. The folded cell does so, too.


# %% jupyter={"source_hidden": true}
def whole_microseconds(trace):
    events = [e._replace(start=math.ceil(e.start), end=math.floor(e.end)) for e in trace.events]
    return course_traces.Trace(trace.rank, trace.world_size, tuple(events))


assert ours == [11.81, 20.05, 14.76]
rounded = overlap_percent(whole_microseconds(host_bound))
kernels = [e for e in host_bound.events if e.category == "kernel"]
median_us = sorted(e.end - e.start for e in kernels)[len(kernels) // 2]
print(f"rounded: {rounded} %; half of the {len(kernels):,} kernels take at most {median_us:.1f} µs")
assert rounded == 14.31
assert all(e.start == int(e.start) for trace in imbalance for e in trace.events)

# %% [markdown]
# So little turns 14.76 % into 14.31 %, because the kernels are so short. When two tools disagree, find the definition
# in which they differ before you trust either. This GPU waits for its host; section 6 finds out what the host does.

# %% [markdown]
# ## 4. Who arrives last?
#
# Now the last rank gets its data late, from step 2 on: `LateRank` holds it back until the others have ended their
# forward pass. We record all ranks again and add up, on each of them, how long it communicates.
#
# **Predict**: which rank communicates longest without computing?

# %%
longest = predict("communication is exposed longest on", ["the late rank", "the others"])

# %% tags=["nbval-ignore-output"]
late_rank = world_size - 1
slow_folder = tempfile.TemporaryDirectory()
launch(traced, slow_folder.name, late_rank, world_size=world_size, backend="gloo")
slow = load(slow_folder.name)
for trace in slow:
    times = breakdown(trace)
    print(f"rank {trace.rank}: communication {times['communication'] / 3e3:.1f} ms a step", end="")
    print(f", exposed {times['exposed'] / 3e3:.1f} ms (measured)")

# %% jupyter={"source_hidden": true}
exposed = [breakdown(trace)["exposed"] for trace in slow]
assert exposed.index(min(exposed)) == late_rank  # it is held back for at least 50 ms a step
longest.compare("the others")

# %% [markdown]
# **Compare.** The others do. The late rank comes to the first all-reduce when everybody else is there, so it waits
# least. The wait in a collective belongs to the rank that came *late*, not to the one that waits.
#
# > **Misconception.** "Rank 0 spends most of its time in all-reduce, so the network is slow." It may be waiting.
#
# So compare *starts*. All ranks of a process group call its collectives in the same order, so within a group the n-th
# call of a name on one rank is the n-th on every other. The rank that starts it last is the one the others wait for,
# and the difference from the first start is what that cost. Each NCCL kernel says its group in the trace. gloo's calls
# do not, so on CPU ranks there may be only one group.


# %%
def group(event):
    """The process group of a call: its name and ranks."""
    return event.args.get("Process Group Name"), str(event.args.get("Process Group Ranks"))


def matched(ranks):
    """For each collective of one group its event on each of the group's ranks."""
    by_rank = []
    for trace in ranks:
        calls, counts = {}, Counter()
        for event in trace.events:
            if kind(event, trace.on_gpu) == "communication":
                call = group(event), event.name
                calls[*call, counts[call]] = event
                counts[call] += 1
        by_rank.append(calls)
    shared = [call for call in by_rank[0] if all(call in calls for calls in by_rank)]
    return [[calls[call] for calls in by_rank] for call in shared]


# %%
def last_to_arrive(rows):
    """For each rank how often it came last, and the microseconds that the first one waited."""
    times, waited = [0] * len(rows[0]), [0.0] * len(rows[0])
    for row in rows:
        starts = [event.start for event in row]
        late = starts.index(max(starts))
        times[late] += 1
        waited[late] += max(starts) - min(starts)
    return times, waited


def culprit(ranks):
    """The rank for which the others waited longest in all."""
    _, waited = last_to_arrive(matched(ranks))
    return waited.index(max(waited))


print("the others wait for rank", culprit(slow))

# %% jupyter={"source_hidden": true}
assert matched(slow) == course_traces.matched(slow)
assert last_to_arrive(matched(slow)) == course_traces.last_to_arrive(matched(slow))
assert culprit(slow) == late_rank
elsewhere = []  # two TP groups of one name
for rank, members in ((0, [0, 1]), (1, [0, 1]), (2, [2, 3])):
    said = {"Process Group Name": "1", "Process Group Ranks": members}
    call = course_traces.Event("ncclDevKernel_AllReduce", "kernel", rank, 9, 7, 1, said)
    elsewhere.append(course_traces.Trace(rank, 4, (call,)))
assert len(matched(elsewhere[:2])) == 1 and matched(elsewhere[1:]) == []

# %% [markdown]
# This rests on one assumption: all ranks read the same clock. On one host they do. The clocks of two hosts can differ
# by more than a collective lasts.
#
# **Predict**: the clock of rank 0's host is three seconds fast. Which rank does the analyser name?

# %%
named = predict("the analyser names", ["the rank that is late", "rank 0"])

# %%
elsewhere = [slow[0].shifted(3e6), *slow[1:]]
print("the analyser names rank", culprit(elsewhere))

# %% jupyter={"source_hidden": true}
assert culprit(elsewhere) == 0
named.compare("rank 0")

# %% [markdown]
# **Compare.** Rank 0, with a wait of three seconds for each collective.
#
# The trace itself helps here. An all-reduce cannot end on any rank before the last rank has begun it, and from then on
# little is left to do, so it ends on all ranks at nearly the same moment. (The same holds for the all-gather and the
# reduce-scatter of FSDP.) If the *ends* of matched rows differ by much more, and all alike, the clocks differ, and the
# median over all rows says by how much.


# %%
def aligned(ranks):
    """The traces on the clock of the first rank."""
    rows = matched(ranks)
    moved = []
    for place, trace in enumerate(ranks):
        ahead = sorted(row[place].end - row[0].end for row in rows)
        middle = (ahead[(len(rows) - 1) // 2] + ahead[len(rows) // 2]) / 2
        moved.append(trace.shifted(-middle))
    return moved


print("on one clock the analyser names rank", culprit(aligned(elsewhere)))
figures.lanes(aligned(elsewhere), 3, "measured: one step, last rank late")

# %% jupyter={"source_hidden": true}
assert aligned(elsewhere) == course_traces.aligned(elsewhere)
assert culprit(aligned(elsewhere)) == late_rank

# %% [markdown]
# *The figure (measured; milliseconds): the same two rows a rank. The computing of the last rank begins late, and the
# communication bars of the others reach from their own start to its arrival.*
#
# <details><summary>On a mesh of HSDP × TP, with several groups</summary>
#
# On a mesh each rank is in several groups, and ranks of different TP groups never wait for each other, although they
# call the same kernels. So give our `matched` the ranks of one group, or take `course_traces.matched`, which takes all
# ranks and leaves a gap where a rank is not in the group; on several groups of gloo it refuses. `course_traces.aligned`
# leaves out broadcasts and sends, in which nobody waits for all, and goes from group to group.
# </details>
#
# To look around in a trace, use a viewer; Perfetto is the usual one. `view`
# puts the ranks into one trace and serves Perfetto's page from this machine alone, without the internet. Look for the
# rows named `gloo`, and use W, A, S and D to zoom and move.

# %% tags=["nbval-ignore-output"]
view(slow_folder.name)

# %% [markdown]
# > **What changes on real GPUs.** An NCCL kernel that waits for another rank spins on the GPU and is shown as running
# > ([nccl#1025](https://github.com/NVIDIA/nccl/issues/1025)). So a GPU that waits counts as busy, in a trace and in
# > `nvidia-smi` ([cupy#3557](https://github.com/cupy/cupy/issues/3557)). The kernel's length is wait plus transfer;
# > what the *last* rank's kernel takes is close to the transfer alone. It can also slow the computing beside it (see
# > nccl#1025 again), so exposed time is the *least* that communication costs.

# %% [markdown] tags=["deeper"]
# ## 5. A slow program, mended in the order of its costs · deeper
#
# The same GPT again, now with data parallelism written by hand, and with two common faults. Each step has two
# micro-batches for each rank, but rank 0 takes more than its share: the other ranks take one each, and rank 0 takes the
# rest. And each gradient tensor has an all-reduce of its own. Both faults can be switched off, one after the other.


# %% tags=["deeper"]
def prepare_by_hand():
    model = build_gpt(config)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def micro_batches(balanced):
    """The numbers of this rank's micro-batches of a step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if balanced:
        return [rank, ranks + rank]
    return range(ranks + 1) if rank == 0 else [ranks + rank]


def sum_gradients(model, one_call):
    gradients = [parameter.grad for parameter in model.parameters()]
    if not one_call:
        for gradient in gradients:
            dist.all_reduce(gradient)
        return
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat, gradients)


# %% tags=["deeper"]
def by_hand(folder, one_call, balanced):
    """Train, and record steps 2 to 4; returns the weights."""
    count = 2 * dist.get_world_size()
    model, optimizer = prepare_by_hand()

    def save(profiler):
        profiler.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json.gz")

    plan = schedule(wait=1, warmup=1, active=3, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=save) as profiler:
        for step in range(5):
            for number in micro_batches(balanced):
                first = (step * count + number) * rank_batch
                x, y = windows.batch(range(first, first + rank_batch))
                (loss_of(model, x, y) / count).backward()
            sum_gradients(model, one_call)
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    return parameters_to_vector(model.parameters()).detach()


# %% tags=["deeper"]
def run_by_hand(one_call, balanced):
    """A trace of each rank, and the weights of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        how = {"world_size": world_size, "backend": "gloo"}
        weights = launch(by_hand, folder, one_call, balanced, **how)
        return load(folder), weights[0]


# %% [markdown] tags=["deeper"]
# A count is the same in every run, on every machine, while seconds are not. So we first count, per step and rank: the
# all-reduces, and the matrix products, as a measure of how much a rank has to compute. Then come the times, and who was
# waited for.


# %% tags=["deeper"]
def counts(ranks):
    """Per step, of three: all-reduces of rank 0, and matrix products of each rank."""
    names = [Counter(event.name for event in trace.events) for trace in ranks]
    products = [(n["aten::mm"] + n["aten::addmm"]) // 3 for n in names]
    return names[0]["gloo:all_reduce"] // 3, products


def print_times(ranks):
    late, waited = last_to_arrive(matched(ranks))
    step_ms = max(breakdown(trace)["total"] for trace in ranks) / 3e3
    print(f"{step_ms:.0f} ms a step (measured, gloo on CPU)")
    for rank in range(world_size):
        print(f"rank {rank} came last {late[rank]} times in 3 steps", end="")
        print(f", others waited {waited[rank] / 3e3:.1f} ms a step for it")


both_faults, weights = run_by_hand(one_call=False, balanced=False)
all_reduces, products = counts(both_faults)
tensors = sum(1 for _ in build_gpt(config).parameters())
print(f"{all_reduces} all-reduces a step for {tensors} tensors; matrix products a step: {products}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert all_reduces == tensors
assert products == [(world_size + 1) * products[1]] + [products[1]] * (world_size - 1)

# %% tags=["deeper", "nbval-ignore-output"]
print_times(both_faults)

# %% [markdown] tags=["deeper"]
# Here *how often* a rank came last says little. A step has dozens of collectives, and only in the first of them do the
# others wait for rank 0's computing; in the rest the ranks run side by side and one or the other is last by a little,
# which adds up. The *time waited* says more, because that first wait weighs as much as the computing that causes it.
#
# **Predict**: we put all gradients of a step into one all-reduce and leave the shares of the ranks as they are. Do the
# others still wait for rank 0?

# %% tags=["deeper"]
waiting = predict("the wait for rank 0", ["is nearly gone", "is still there"])

# %% tags=["deeper"]
one_fault, weights_1 = run_by_hand(one_call=True, balanced=False)
all_reduces, products = counts(one_fault)
print(f"all-reduces a step: {all_reduces}; matrix products a step: {products}")

# %% tags=["deeper", "nbval-ignore-output"]
print_times(one_fault)

# %% jupyter={"source_hidden": true} tags=["deeper", "nbval-ignore-output"]
assert all_reduces == 1 and products[0] == (world_size + 1) * products[1]
assert torch.allclose(weights, weights_1, rtol=0, atol=1e-5)
for_rank_0 = [last_to_arrive(matched(ranks))[1][0] for ranks in (both_faults, one_fault)]
waiting.compare("is nearly gone" if for_rank_0[1] < 0.1 * for_rank_0[0] else "is still there")

# %% [markdown] tags=["deeper"]
# **Compare.** They do. The small waits are gone, and what is left is the wait for rank 0's computing, which one call
# instead of many does not change.
#
# Now every rank takes two micro-batches.

# %% tags=["deeper"]
mended, weights_2 = run_by_hand(one_call=True, balanced=True)
all_reduces, products = counts(mended)
print(f"all-reduces a step: {all_reduces}; matrix products a step: {products}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert all_reduces == 1 and len(set(products)) == 1
assert torch.allclose(weights, weights_2, rtol=0, atol=1e-5)

# %% tags=["deeper", "nbval-ignore-output"]
print_times(mended)

# %% [markdown] tags=["deeper"]
# All ranks multiply equally often, and the weights are those of the slow program. Some waiting remains: ranks that have
# equally much to do still do not take equally long.
#
# The order matters. Mend what costs most, measure again, and only then choose the next: the first cure changes what the
# others are worth. And compare numbers, not only times, because a program that computes something else may well be
# faster. The exercise notebook has a program with seven such faults.

# %% [markdown] tags=["deeper"]
# ## 6. Real traces from GPUs · deeper
#
# gloo on a CPU shows how a trace is read, but not what a GPU's trace looks like. The four runs here are *recorded*:
# Meta publishes them with its tool HTA ([commit
# f4d0062](https://github.com/facebookresearch/HolisticTraceAnalysis/tree/f4d0062c382f42bd8a74838bcdad1916c7d5d2da)),
# and the course carries excerpts of them. The shares are those of a rank's whole time. The profiler was on, so idle
# time is an upper bound. `imbalance` gets no shares: it is a sample (of the numbers that CUDA gave to its calls it has
# 0.5 %, the others have 8 to 9 %), and between the kernels that were kept the GPU need not be idle.

# %% tags=["deeper"]
recorded = {run: load(run) for run in RECORDED}
for run in ("host_bound", "tiny_all_reduces", "two_machines"):
    for trace in recorded[run]:
        times = breakdown(trace)
        parts = ("idle", "compute", "communication")
        shares = "  ".join(f"{part} {times[part] / times['total']:4.0%}" for part in parts)
        print(f"{run:>16}, rank {trace.rank} of {trace.world_size}: {shares}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
for run, ranks in recorded.items():  # CUDA numbers its calls, so gaps show what is missing
    for trace in ranks:
        numbers = [e.args["correlation"] for e in trace.events if e.category == "cuda_runtime"]
        there = len(numbers) / (max(numbers) - min(numbers))
        assert round(there, 3) in (0.004, 0.005) if run == "imbalance" else 0.08 < there < 0.095

# %% [markdown] tags=["deeper"]
# **`host_bound`**, under DDP on an A100, leaves its GPU idle for three quarters of the time. Communication is 7 %, so
# a faster network cannot save more than that. The GPU waits for its host. But what does the host do: load data, read
# numbers from the GPU, or launch kernels?

# %% tags=["deeper"]
a100, tiny = recorded["host_bound"][0], recorded["tiny_all_reduces"][0]
lasts = Counter()
for event in a100.events:
    if event.name.startswith(("ProfilerStep", "## ")):
        lasts["model" if event.name.startswith("## ") else "step"] += event.end - event.start
read = sum("DtoH" in event.name for event in a100.events)
print(f"of the steps, {lasts['model'] / lasts['step']:.1%} are forward, backward and optimizer")
print(f"copies from the GPU to the host: {read}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert lasts["model"] > 0.99 * lasts["step"] and read == 0
h200 = gpu_check("profiler_trace")["breakdown"]
share = h200["idle"]["value"] / h200["total"]["value"]
print(f"an H200 with the course's small GPT, also under the profiler: idle {share:.0%}")

# %% [markdown] tags=["deeper"]
# It hardly loads data and reads nothing; it launches kernels, and serves the profiler. So the cures are fewer and
# larger kernels (`torch.compile`, CUDA graphs), a larger batch, or less work in Python between the launches. A model
# too small for its GPU is the extreme case, such as the course's on an H200 (*recorded*, PyTorch 2.11).
#
# **`tiny_all_reduces`**, on a V100, communicates for 17 % of its time in very many calls.
#
# **Predict**: which share of that time is hidden behind compute?

# %% tags=["deeper"]
covered = predict("of the small all-reduces, hidden behind compute", unit="%")

# %% tags=["deeper"]
calls = list(numbered(tiny).values())
lasting = median(call.end - call.start for call in calls)
per_step = len(calls) // len(tiny.steps)
overlap = breakdown(tiny)["overlap"]
print(f"{per_step} all-reduces a step, half of them take {lasting:.0f} µs or less")
print(f"overlap {overlap:.0f} µs")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert (per_step, lasting, overlap) == (404, 8, 0)
covered.compare(100 * overlap / breakdown(tiny)["communication"])

# %% [markdown] tags=["deeper"]
# **Compare.** None of it: all 404 small all-reduces of a step lie in one stretch in which nothing is computed.
#
# Half of the calls take at most 8 µs, which is mostly latency (α of [lesson 01](01_gpu_interconnects.ipynb)). So put
# many small tensors into one call, as DDP does with its buckets ([lesson 04](04_ddp.ipynb)), and start that call while
# there is compute left.
#
# **`imbalance`** has two ranks of 128 that train a recommendation model. In the sample rank 0 communicates longer, and
# rank 1 computes longer.
#
# **Predict**: which one makes the other wait?

# %% tags=["deeper"]
made_to_wait = predict("the other waits for", ["rank 0", "rank 1"])

# %% tags=["deeper"]
ranks = recorded["imbalance"]
for trace in ranks:
    times = breakdown(trace)
    compute, communication = times["compute"] / 1e3, times["communication"] / 1e3
    print(f"rank {trace.rank}: compute {compute:.0f} ms, communication {communication:.0f} ms")
rows = ending_together(ranks, within=1000)
times_last, waited = last_to_arrive(rows)
for rank in (0, 1):
    print(f"rank {rank} comes last in {times_last[rank]} of {len(rows)} calls", end="")
    print(f", the other waits {waited[rank] / 1e3:.0f} ms")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert times_last == [0, 5]
made_to_wait.compare("rank 1")

# %% [markdown] tags=["deeper"]
# **Compare.** Rank 1 comes last in each of the five calls that can be matched, so a part of rank 0's communication is
# waiting.
#
# In rank 0's own trace that looks like a slow network; only the other rank's trace tells. The cure is to share the work
# more evenly. By how much, a sample cannot say, nor which of 128 ranks all the others wait for.
#
# **`two_machines`** holds the same annotations in two jobs, one on an A100 and one on a V100. It is *not* one program
# before and after a change. Only what is counted per step can be compared, not the milliseconds:

# %% tags=["deeper"]
for trace in recorded["two_machines"]:
    copies = sum(event.name == "cudaMemcpyAsync" for event in trace.of_steps([1009]).events)
    print(f"{trace.gpu}: {copies} copies are started in step 1009")

# %% [markdown] tags=["deeper"]
# 38 copies on one and 802 on the other. That number needs no clock and no equal machines, and it says where to look
# first: in the code that copies.
#
# | what the trace shows | likely cause | what to do |
# |---|---|---|
# | idle is large, communication small | the host is late | rule out data, checkpoints, `.item()`; then fewer launches |
# | many calls of a few µs, none hidden | a call for each tensor | buckets, started earlier |
# | one rank computes more, the others communicate longer | uneven work | balance; look at that rank |
# | counts that differ between two jobs | other code ran | find the calls by their names |

# %% [markdown] tags=["deeper"]
# ## 7. Before and after a change · deeper
#
# The job has become slower, and somebody has changed something. The times of two traces are hard to compare, because
# other jobs, clocks and the profiler change them, too. What a program *does* in a step can be compared exactly, so
# count the events by name and subtract. The folded cell below adds one line to our step. Do not unfold it.


# %% jupyter={"source_hidden": true} tags=["deeper"]
def recorded_step(folder, change, model, optimizer):
    """Train five steps, with a change after each, and record steps 2 and 3."""
    path = f"{folder}/rank{dist.get_rank()}.json.gz"
    plan = schedule(wait=1, warmup=1, active=2, repeat=1)

    def save(profiler):
        profiler.export_chrome_trace(path)

    log = StepLog()
    with profile(activities=activities, schedule=plan, on_trace_ready=save) as profiler:
        for step in range(5):
            train_step(model, optimizer, log, step)
            change(model)
            profiler.step()


def before_and_after(folders):
    def nothing(model):
        pass

    def weight_norms(model):
        return torch.stack([p.detach().double().norm() for p in model.parameters()])

    for folder, change in zip(folders, (nothing, weight_norms), strict=True):
        recorded_step(folder, change, *prepare())


# %% tags=["deeper", "nbval-ignore-output"]
with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
    launch(before_and_after, (before, after), world_size=world_size, backend="gloo")
    pair = [load(before)[0], load(after)[0]]
counts = [Counter(event.name for event in trace.of_steps([3]).events) for trace in pair]
for name in sorted(counts[0] | counts[1]):
    if counts[0][name] != counts[1][name]:
        print(f"{name:30} {counts[0][name]:4} -> {counts[1][name]:4}")
collectives = [len(numbered(trace.of_steps([3]))) for trace in pair]
print("all-reduces:", *collectives)
assert collectives[0] == collectives[1] > 0

# %% [markdown] tags=["deeper"]
# **Predict** from the table alone: what does the new line go through, and what does it do with each element?

# %% tags=["deeper"]
things = ["the layers", "the parameters", "the windows of the batch"]
loops = predict("the new line goes through", things)

# %% tags=["deeper"]
model = build_gpt(config)
tensors = len([*model.parameters()])
print(f"{len(model.blocks)} layers, {tensors} parameters, {rank_batch} windows")

# %% jupyter={"source_hidden": true} tags=["deeper"]
added = counts[1] - counts[0]
assert added["aten::linalg_vector_norm"] == added["aten::_to_copy"] == tensors
assert not counts[0] - counts[1]
loops.compare("the parameters")

# %% [markdown] tags=["deeper"]
# **Compare.** The parameters, as many as there are new norms. It copies each to another dtype (`_to_copy`), takes its
# norm, and joins the norms with one `stack`.
#
# Somebody logs the norms of the weights at every step. Nothing has disappeared and the all-reduces are as
# many as before, so the cause is neither the model nor the network. On a GPU each copy and each norm would start a
# kernel. Log at every hundredth step, or, if one number is enough, use `torch.nn.utils.get_total_norm`, which takes all
# tensors at once.
#
# A difference is a *change* only if everything else is equal. HTA publishes the traces of `two_machines` as control and
# test, but their difference holds the machine, the job and the program at once.

# %% [markdown] tags=["deeper"]
# ## 8. What peaks when: memory · deeper
#
# Memory is full at one moment of the step, and only what is alive at that moment is worth making smaller. With
# `profile_memory=True` the trace gets an event `[memory]` for each allocation (bytes above 0) and each release (below
# 0), with the total after it. The total counts from the start of the recording, so weights, which were there before,
# are missing in it.
#
# **Predict**: at which point of the step is the peak?

# %% tags=["deeper"]
moments = ["end of forward", "early in backward", "end of backward", "optimizer"]
fullest = predict("memory peaks at", moments)


# %% tags=["deeper"]
def with_memory(path):
    model, optimizer = prepare()
    log = StepLog()
    for step in range(2):  # after the first one, DDP makes its buckets anew
        train_step(model, optimizer, log, step)
    with profile(activities=activities, profile_memory=True) as profiler:
        train_step(model, optimizer, log, step=2)
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(path)


with tempfile.TemporaryDirectory() as memory_folder:
    path = Path(memory_folder, "rank0.json")
    launch(with_memory, str(path), world_size=world_size, backend="gloo")
    events = json.loads(path.read_text())["traceEvents"]
memory = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
parts = ("data", "forward", "backward", "optimizer")
ranges = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in parts}

# %% tags=["deeper", "nbval-ignore-output"]
total, timeline = 0, []  # (time, bytes alive)
for event in memory:
    total += event["args"]["Bytes"]
    timeline.append((event["ts"], total))
for part, (start, end) in ranges.items():
    inside = [size for moment, size in timeline if start <= moment < end]
    print(f"{part:9}: at most {max(inside) / 1e6:5.2f} MB, at its end {inside[-1] / 1e6:5.2f} MB")

# %% jupyter={"source_hidden": true} tags=["deeper", "nbval-ignore-output"]
peak_time, peak = max(timeline, key=lambda moment: moment[1])
backward_start = ranges["backward"][0]
early = sum(backward_start <= moment < peak_time for moment, _ in timeline)
late = sum(peak_time < moment < ranges["backward"][1] for moment, _ in timeline)
assert peak_time > backward_start and early < late / 4
print(f"the peak comes after {early} of {early + late + 1} memory events of backward")
fullest.compare("early in backward")

# %% [markdown] tags=["deeper"]
# **Compare.** Early in backward (measured on CPU). Forward ends with all activations alive. Backward begins with the
# loss: it adds gradients with respect to the log-probabilities and the logits, and only then does each layer release
# what forward had kept for it.
#
# The end of backward holds little more than the gradients of the parameters. So a larger vocabulary or longer windows
# raise the peak, and recomputation ([lesson 05](05_scaling_efficiency.ipynb)) lowers it.

# %% tags=["deeper", "nbval-ignore-output"]
at_end = [size for moment, size in timeline if moment < backward_start][-1]
logits = rank_batch * config.context * config.vocabulary * 4
times_logits = (peak - at_end) / logits
print(f"end of forward to peak: {times_logits:.1f} times the logits, {logits / 1e6:.2f} MB")
assert round(times_logits, 1) == 2

# %% [markdown] tags=["deeper"]
# On GPUs a **snapshot** says more, because it has the Python stack of each allocation. These lines are PyTorch's
# ([Understanding CUDA Memory Usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html)); they need CUDA
# and were not run here.
#
# ```python
# torch.cuda.memory._record_memory_history(max_entries=100_000)  # the latest of them
# train_step(model, optimizer, log, step)
# torch.cuda.memory._dump_snapshot(f"rank{dist.get_rank()}.pickle")
# torch.cuda.memory._record_memory_history(enabled=None)  # off
# ```
#
# Drop the file on [pytorch.org/memory_viz](https://pytorch.org/memory_viz), which works in your browser and uploads
# nothing. The same page warns that it sees PyTorch's own allocator only. What NCCL allocates is not in it, so
# `nvidia-smi` shows more than the snapshot does.

# %% [markdown] tags=["deeper"]
# ## 9. Nsight Systems, NVTX, and counters in production · deeper
#
# `torch.profiler` knows PyTorch's operators and the GPU's kernels. Nsight Systems also sees the CUDA driver and the
# operating system, but it does not know what a forward pass is. **NVTX** ranges tell it: named spans that the program
# opens and closes. Here is one function for both tools.


# %% tags=["deeper"]
@contextmanager
def named(name):
    """A named range for torch.profiler and, where there is CUDA, for Nsight."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext()
    with record_function(name), nvtx:
        yield


with profile(activities=activities) as profiler:
    with named("forward"):
        torch.ones(4, 4) @ torch.ones(4, 4)
assert "forward" in {event.name for event in profiler.events()}
print("torch.profiler has the range")

# %% [markdown] tags=["deeper"]
# Ranges can stay in the code: they cost close to nothing while no tool is attached
# ([NVIDIA](https://docs.nvidia.com/nvtx/overview/index.html)). Under `with torch.autograd.profiler.emit_nvtx():`
# PyTorch opens one for each operator, too. NVIDIA's Megatron Bridge [starts Nsight with these
# options](https://docs.nvidia.com/nemo/megatron-bridge/latest/training/profiling.html) (nothing of this was run here,
# as it needs a GPU). With `--no-python`, `torchrun` starts one `nsys` a rank, and `%q{RANK}` puts the rank into the
# file's name:
#
# ```sh
# torchrun --nproc-per-node=8 --no-python \
#     nsys profile -s none -t cuda,nvtx -o report_%q{RANK} --force-overwrite true \
#     --capture-range=cudaProfilerApi --capture-range-end=stop python train.py
# nsys stats report_0.nsys-rep
# ```
#
# | option | why |
# |---|---|
# | `-t cuda,nvtx` | records calls of CUDA, kernels and named ranges |
# | `-s none` | no sampling of CPU stacks, which keeps the report small |
# | `--capture-range…` | records from `torch.cuda.profiler.start()` to `stop()`: you choose the steps |
#
# Here are the first five columns of the first line of a report that vLLM shows for serving Llama 3.1 8B
# ([vLLM](https://docs.vllm.ai/en/stable/contributing/profiling/), *recorded*). The kernel multiplies matrices; its name
# begins with `sm90`, so the GPU is of the H100's generation:
#
# | Time (%) | Total Time (ns) | Instances | Avg (ns) | Med (ns) |
# |---|---|---|---|---|
# | 46.3 | 10,327,352,338 | 17,505 | 589,965.9 | 144,383.0 |
#
# From left to right: its share of the time of all kernels, the sum over its calls, their number, the mean and the
# median.
#
# **Predict**: which share of the sum can the faster half of the calls take at most?

# %% tags=["deeper"]
faster = predict("the faster half takes at most", unit="%")

# %% tags=["deeper"]
total_ns, instances, average, middle = 10_327_352_338, 17_505, 589_965.9, 144_383
faster_half = instances / 2 * middle / total_ns
print(f"the faster half takes at most {faster_half:.0%}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert round(faster_half, 2) == 0.12 and abs(total_ns / instances - average) < 0.1
faster.compare(100 * faster_half)

# %% [markdown] tags=["deeper"]
# **Compare.** At most 12 %, because no call of this half is longer than the median. One name stands for very different
# calls, and the mean describes none of them.
#
# The report cannot say which calls are the long ones, but ranges can: `nsys stats --report
# cuda_gpu_kern_sum:nvtx-name` puts the innermost NVTX range before a kernel's name
# ([NVIDIA](https://docs.nvidia.com/nsight-systems/AnalysisGuide/index.html)).
#
# A job that already runs can still be traced, if it was started with `KINETO_USE_DAEMON=1`: the daemon dynolog then
# starts PyTorch's profiler from outside ([its
# guide](https://github.com/facebookincubator/dynolog/blob/main/docs/pytorch_profiler.md)).
#
# No trace is recorded all day, so production watches **counters**. NVIDIA's exporter reads them from DCGM, the Data
# Center GPU Manager, and has [this
# list](https://github.com/NVIDIA/dcgm-exporter/blob/main/etc/dcp-metrics-included.csv):
#
# | field | what it says | read it as |
# |---|---|---|
# | `DCGM_FI_DEV_GPU_UTIL` | utilization in % | also high while NCCL waits: do not stop here |
# | `DCGM_FI_PROF_PIPE_TENSOR_ACTIVE` | share of cycles in which the tensor cores work | falls when a job waits |
# | `DCGM_FI_PROF_DRAM_ACTIVE` | share of cycles in which memory is read or written | high: bound by memory |
# | `DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL` | NVLink traffic of all lanes | against the model's bytes |
# | `DCGM_FI_PROF_PCIE_RX_BYTES`, `…_TX_BYTES` | bytes per second over PCIe | copies from and to the host |
# | `DCGM_FI_DEV_SM_CLOCK`, `…_GPU_TEMP`, `…_POWER_USAGE` | clock, temperature, power | one GPU unlike the others |
# | `DCGM_FI_DEV_XID_ERRORS` | last error of the driver | not 0: look at the host |
#
# Some useful ones, `DCGM_FI_PROF_SM_ACTIVE` and the times of throttling (`DCGM_FI_DEV_POWER_VIOLATION`,
# `…_THERMAL_VIOLATION`), stand in that file behind a `#`, so they have to be switched on.
#
# Whether communication is slow needs a **baseline** without your program: busbw, as nccl-tests gives it on the same
# hosts ([lesson 03](03_nccl.ipynb)). For a collective of your trace, take the *last* rank's kernel as its time. If your
# busbw at this size is that of nccl-tests, the network is not to blame.

# %% [markdown] tags=["deeper"]
# ## 10. What to take to work · deeper
#
# [`scripts/train.py`](../scripts/train.py) has what this lesson built: the parts of a step by `record_function`, one
# line of a log, the waits of each rank, and `--profile`, which writes a trace of every rank. (In each step it reads one
# number from the GPU, the norm of the gradients, which decides whether the step counts.) We start it as on a cluster,
# with `torchrun`, and ask for the third and the fourth step.

# %% tags=["deeper"]
work = tempfile.TemporaryDirectory()
out, trace_folder = Path(work.name, "run"), Path(work.name, "traces")
command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node={world_size}"
command += f" {SCRIPTS / 'train.py'} --data={TEXT} --layers=2 --hidden=64 --steps=8"
command += f" --batch={4 * world_size} --log-every=1 --out={out}"
command += f" --profile={trace_folder} --profile-steps 3 4"
one_thread = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
done = subprocess.run(command.split(), env=os.environ | one_thread, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
at_work = load(trace_folder)
print(f"{len(read_log(out))} lines of log, {len(at_work)} traces with steps {at_work[0].steps}")

# %% jupyter={"source_hidden": true} tags=["deeper"]
assert [trace.rank for trace in at_work] == [*range(world_size)]
assert all(trace.steps == [3, 4] for trace in at_work)

# %% tags=["deeper", "nbval-ignore-output"]
line = read_log(out)[-1]
print("parts of a step in ms:", *(f"{part} {ms:.1f}" for part, ms in line["ms"].items()))
print("each rank waited", *(f"{ms:.2f} ms" for ms in line["wait_ms"]), f"for rank {line['last']}")
for trace in at_work:
    times = breakdown(trace)
    share = times["exposed"] / times["total"]
    print(f"rank {trace.rank}: exposed {share:.0%} of two steps (measured)")

# %% [markdown] tags=["deeper"]
# These waits are measured at one place, before a step of the log. Inside a step all ranks wait for each other many
# times, so forward and backward take equally long on all of them, whoever is slow. PyTorch's flight recorder
# ([lesson 14](14_debugging_hangs.ipynb)) notes when each rank called each collective. All ranks of a group
# may go on when the last one has come, so the time from there to a rank's next call is *its own*.

# %% tags=["deeper", "nbval-ignore-output"]
stragglers = runpy.run_path(str(SCRIPTS / "stragglers.py"))
report = stragglers["report"]
print(inspect.getsource(stragglers["outside"]))
print(*report(read_log(out)), sep="\n")

# %% [markdown] tags=["deeper"]
# Some rank is last at every step, so being last is no fault, and it is not evenly shared either: gloo's all-reduce
# does not end on all ranks at once, so in most runs here rank 0 comes last in more than half of the steps. So blame a
# rank only if its own time is far above all others'. `product` is the time of a matrix product that needs no other
# rank, against the median of the ranks: well above 1, the processor itself is slow. Here is the same log, had the last
# rank taken three times as long (*modelled*):

# %% tags=["deeper"]
late_lines = []
for line in read_log(out):
    *others, _ = line["own_ms"]
    late_lines.append(line | {"own_ms": [*others, 3 * max(others)]})
print(report(late_lines)[-1])
assert report(late_lines)[-1].startswith(f"rank {world_size - 1} holds up the others")
work.cleanup()

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
temporary.cleanup()
slow_folder.cleanup()
times = breakdown(host_bound)
shares = (f"{name} {times[name] / times['total']:.0%}" for name in ("idle", "compute"))
print("an A100 that waits for its host:", *shares, "(recorded)")
for trace in slow:
    share = breakdown(trace)["exposed"] / breakdown(trace)["total"]
    print(f"rank {trace.rank}, rank {late_rank} late: exposed {share:.0%} (measured, gloo on CPU)")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - A log with a line for each step is always on; it says that a job has become slow, and in which part of the step.
# - CUDA is asynchronous: on a GPU take the log's times from events, or synchronize. Record CPU *and* CUDA.
# - Record a trace on every rank, for a few steps, with `repeat=1` and `on_trace_ready`. An empty trace is no error. The
#   profiler slows the host, so idle time in a trace is an upper bound.
# - Durations overlap, so merge intervals first. *Exposed* communication is the least that communication costs.
# - The rank that waits longest in a collective is innocent. Compare starts, on clocks that the ends have aligned.
#
# **Now you can answer**
#
# 1. On a GPU, a stopwatch around `loss_of(model, x, y)` says 24 ms. What does it time?
# 2. `schedule(wait=1, warmup=1, active=2)`, five steps, exported at the end: what is in the file?
# 3. In a step of 10 ms a rank computes for 6 and communicates for 5, 3 of them at the same time. What is idle, what is
#    exposed?
# 4. Rank 3 spends 40 % of its step in all-reduce, rank 5 only 5 %. Which one do you look at?
# 5. The clocks of two hosts differ by a second. How does a trace tell you?
# 6. A GPU is idle for three quarters of the time, and communication is 7 %. Does a faster network help?
#
# <details><summary>Answers</summary>
#
# 1. How long the CPU took to put forward's kernels into the queue (section 2).
# 2. No step: the second cycle has begun and waits (section 2).
# 3. Busy are 6 + 5 − 3 = 8 ms, so 2 ms are idle; 2 ms of communication are exposed (section 3).
# 4. Rank 5: the one that waits least comes last (section 4).
# 5. The ends of matched all-reduces differ by about a second, all of them alike (section 4).
# 6. Hardly, 7 % at most; the host is too slow (section 6).
# </details>
#
# **What to take to work:** the analyser is `course_utils.traces`; [scripts/train.py](../scripts/train.py) writes traces
# with `--profile`, and [scripts/stragglers.py](../scripts/stragglers.py) reads its log.
#
# **Exercises:** [exercises/13_profiling](../exercises/13_profiling_exercises.ipynb). **Next:**
# [14 debugging hangs](14_debugging_hangs.ipynb), for jobs that do not even become slow.
#
# **Worth reading**
# - PyTorch, [torch.profiler](https://docs.pytorch.org/docs/stable/profiler.html): the schedule and every flag.
# - Meta, [Holistic Trace Analysis](https://github.com/facebookresearch/HolisticTraceAnalysis): the tool for traces of
#   many GPUs that this lesson is checked against.
# - Llama team, *The Llama 3 herd of models*, 2024, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4:
#   how slow GPUs that still work were found.
