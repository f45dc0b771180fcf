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
# # Does my machine work, and how do I run code on many ranks from a cell?
#
# Llama 3 405B was trained on up to 16,384 GPUs (*recorded*: Llama Team 2024, table 4). Behind each stood a process, and
# all of them ran the same program. What made process 7,000 do its own share of the work was one number: its rank. In
# this notebook you start such processes yourself, from a cell, on the machine in front of you. No GPU is needed.
#
# **You will be able to**
# - *run* a function on many ranks from a cell, and *read* what they print and return;
# - *say* what a process, a rank, a local rank and a node are, and *predict* what a rank can and cannot see;
# - *run* the same program with `torchrun`, as real jobs do;
# - *work* on live ranks, step by step, with `%%ranks`;
# - *read* an error and the table of a hang, and *stop* ranks that will not stop by themselves.
#
# **Before this:** Python, and PyTorch tensors on one machine. Nothing about distributed programs. **Time:** about 60
# minutes to read, under half a minute to run.

# %% [markdown]
# ## How to work in these notebooks
#
# Run one cell after the other with *Shift* + *Enter*. When you have just opened a notebook, wait until its kernel is
# ready: the circle at the top right is then empty and the status line at the bottom says *Idle*.
#
# Where the text says **Predict**, write your answer down before you run the cell. A wrong guess that you made is worth
# more than a right answer that you read. `make lab` opens copies without outputs, so that no answer stands below its
# question; where you see outputs before you have run a cell, clear them first (*Edit → Clear Outputs of All Cells*).
#
# Change cells, break them, run them again: `make restore L=02` in a terminal gives you a fresh lesson 02 and puts yours
# into `work/saved/`. Exercises open beside the lesson if you drag their tab to the right half of the window. Each open
# notebook keeps its ranks; *Kernel → Shut Down All Kernels* ends those that you no longer need.
#
# Figures are always one of three kinds: **measured** (on this machine, now), **recorded** (published elsewhere, with
# its source) or **modelled** (computed from a formula). Boxes look like this:
#
# > **Misconception.** What many people believe, and what is the case.
#
# > **What changes on real GPUs.** What you have just seen ran on CPU processes; this says what differs.
#
# ### Seven predictions
#
# They come up again on the way, and the answers are at the end.
#
# 1. Four ranks append to a list that you made in the notebook. What does your list hold afterwards?
# 2. Four ranks print three lines each, at the same time. In which order do you read them?
# 3. Four ranks sleep for 0.3 s each. How long does that take? And if they compute instead, on two cores?
# 4. The numbers 1 to 100 are dealt out to four ranks, and each adds up its own. Who can say that the sum is 5,050?
# 5. One rank fails while the others wait for it. What do the others do, and what do you read?
# 6. Only rank 0 is to print the mean loss, so only rank 0 computes it. What happens?
# 7. A `%%ranks` cell says `mine = 5`. Is there a `mine` in the notebook?

# %% [markdown]
# The first cell imports everything and names every parameter.

# %% tags=["parameters"]
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from IPython import get_ipython

from course_utils import Interrupted, device, expect_error, launch, shutdown
from course_utils.doctor import machine
from course_utils.plots import before_after, timeline

world_size = 4  # ranks, 2 or more
patience = 2.0  # seconds that `launch` waits in one cell of section 8

# %% [markdown]
# It ran without an error? Then the environment is in order: Python, PyTorch and the course's own package are there.
#
# <details><summary>It said "No module named course_utils" or "No module named torch"</summary>
#
# The notebook runs with a Python other than the one that `make setup` prepared. Close JupyterLab and start it with
# `make lab` from the course's folder. In other editors (VS Code, for example) choose the interpreter in `.venv` as the
# notebook's kernel.
# </details>

# %% [markdown]
# ## 1. What is in this machine?
#
# Three things matter for this course: how many **cores** compute, how much **memory** there is, and which **GPUs**
# with which **links** between them. The **backend** is the library that carries messages between processes: **NCCL**
# between GPUs, **gloo** between CPUs.

# %% tags=["nbval-ignore-output"]
here = machine()
gpus = [f"{gpu['name']} ({gpu['memory'] / 1e9:.0f} GB)" for gpu in here["gpus"]]
links = [f"GPUs {pair}: {kind}" for pair, kind in here["links"].items()]
print(f"Python {here['python']}, torch {here['torch']}, {here['system']}")
print(f"cores    {here['cores']}")
print(f"memory   {here['memory'] / 1e9:.0f} GB")
print(f"GPUs     {', '.join(gpus) or 'none (none is needed)'}")
print(f"links    {', '.join(links) or 'no pair of GPUs'}")
print(f"ranks    {here['world_size']} if you do not say how many, over {here['backend']}")
print("\nreal on this machine", *here["real"], sep="\n  ")
print("\nemulated or taken from elsewhere", *here["emulated"], sep="\n  ")
assert dist.is_available() and here["backend"] in ("gloo", "nccl")

# %% [markdown]
# Read the last two lists once more; they decide what you may conclude from a measurement here. Without GPUs, what the
# ranks *say* to each other is real: the processes, the messages, their bytes and their order, the results, and the
# hangs. How *fast* it goes is real too, but for this machine only.
#
# | you have | what the course does |
# |---|---|
# | 2 cores, 4 GB, no GPU | everything runs, with gloo; more cores only make it quicker |
# | 1 GPU | ranks use gloo on the CPU, as there are more ranks than GPUs; cells about one GPU use it |
# | 2 or more GPUs | one rank on each, with NCCL, by the same cells; set `world_size` to at most their number |
# | a Mac | as without a GPU: neither gloo nor NCCL works with Apple's GPUs |
#
# In a terminal, `.venv/bin/python -m course_utils doctor` prints the same report and starts two ranks: the
# first thing to try when something seems broken.

# %% [markdown]
# ## 2. Hello from every rank
#
# First some words. They are used in the same way in the whole course.
#
# | word | meaning | here |
# |---|---|---|
# | **process** | a running program with memory of its own | the notebook's *kernel* is one, each rank is another |
# | **rank** | one process of a job, and its number, from 0 | 0, 1, 2, 3 |
# | **world size** | how many ranks the job has | 4 |
# | **node** | one machine | there is one: yours |
# | **local rank** | the rank's number on its node; it says which GPU to use | equal to the rank, as there is one node |
# | **process group** | the ranks that communicate together | all of them, made by `launch` |
#
# Two more words appear in many boxes about real GPUs:
#
# | word | meaning |
# |---|---|
# | **GPU kernel** | a function that runs on a GPU and is started by the CPU; not the notebook's kernel |
# | **stream** | a queue of work for one GPU, done in order; work on two streams can run at the same time |
#
# `launch(fn)` runs a function on every rank and returns what they returned:
#
# ```text
# your machine = one node
#
#   notebook ──┬── hello() ──▶ rank 0 ──┐
#   (kernel)   ├── hello() ──▶ rank 1 ──┤
#              ├── hello() ──▶ rank 2 ──┼──▶ a list of results, by rank
#              └── hello() ──▶ rank 3 ──┘
# ```
#
# All ranks run the same function. `dist.get_rank()` tells a rank which one it is. (`dist` is the usual short name of
# `torch.distributed`.) Hand over the function itself, without parentheses: `launch` calls it, on the ranks.
#
# <details><summary>It said "Default process group has not been initialized"</summary>
#
# Then the function ran in the notebook, which is not a rank and belongs to no process group: `launch(hello())` calls
# `hello` before `launch` sees it, and `hello()` in a cell does the same. Write `launch(hello)`.
# </details>


# %%
def hello():
    rank, n = dist.get_rank(), dist.get_world_size()
    print("hello")
    print(f"I am rank {rank} of {n}, local rank {os.environ['LOCAL_RANK']}")
    return 10 * rank


results = launch(hello, world_size=world_size)
print("the notebook got", results)
assert results == [10 * rank for rank in range(world_size)]

# %% [markdown]
# `[ranks 0-3] hello` is one line for four: all ranks printed the same. Where they differ, each has its own line with
# its own label. The last line has no label, since the notebook printed it. The result of rank r is `results[r]`.
#
# **Predict** (question 2). The ranks run at the same time and nobody makes them wait for each other. Now each prints
# three lines, and rank 0 is slow. In which order do you read them?


# %%
def three_lines():
    print("first")
    if dist.get_rank() == 0:
        time.sleep(0.3)
    print("second, from an even rank" if dist.get_rank() % 2 == 0 else "second, from an odd rank")
    print("third, with my number:", dist.get_rank())


results = launch(three_lines, world_size=world_size)
assert results == [None] * world_size  # a function without `return` returns None, on every rank

# %% [markdown]
# Always in this order, however slow a rank is. The launcher shows line 1 as soon as all ranks have printed it, then
# line 2, and so on, and merges equal lines into one. So you can compare your screen with the outputs saved in the
# course's folder `notebooks`. If one rank prints an extra line, the lines after it no longer pair up.
#
# > **Misconception.** "The order on the screen is the order in time." Not here, and even less under `torchrun`, where
# > lines of several ranks appear as they come. To know what happened first, print the time, or let one rank print.
#
# <details><summary>A job has 2 nodes with 8 GPUs each. Which local rank, on which node, is rank 11?</summary>
#
# Local rank 3 on node 1:
#
# ```text
#                       node 0                      node 1
# rank         0  1  2  3  4  5  6  7     8  9 10 11 12 13 14 15
# local rank   0  1  2  3  4  5  6  7     0  1  2  3  4  5  6  7
# ```
#
# It takes GPU number 3 of its node. That is the main use of the local rank; nearly everything else goes by the rank.
# </details>

# %% [markdown]
# ## 3. Each rank has its own memory
#
# **Predict** (question 1). Every rank appends a line to `notes`, a list that was made in the notebook. Then it returns
# the list.

# %%
notes = ["written in the notebook"]


def take_a_note():
    notes.append(f"written by rank {dist.get_rank()}")
    return notes


copies = launch(take_a_note, world_size=world_size)
for rank, copy in enumerate(copies):
    print(f"rank {rank} returned  {copy}")
print(f"the notebook has {notes}")
assert notes == ["written in the notebook"]

# %% [markdown]
# Your list is untouched. `launch` *copied* the function to each rank, and with it everything that the function uses:
# the list, other functions, imported modules, `world_size`. Each rank changed its own copy. What a rank returns is
# copied back.
#
# So Python objects have one way in and one way out:
#
# - *into* the ranks: the function, its arguments, and everything it uses by name;
# - *out* of the ranks: what the function returns.
#
# Copies are made anew at every call:

# %%
assert launch(take_a_note, world_size=world_size) == copies  # no rank remembers its earlier note
notes.append("added later")
assert launch(len, notes, world_size=world_size) == [2] * world_size  # all see it as it is now
print("every call starts from the notebook's present state")

# %% [markdown]
# > **Misconception.** "A rank is a thread of my notebook." Threads share memory; no rank sees a byte of another's. That
# > is why a program for 4 processes on one machine can also run as 16,384 processes on two thousand machines.
#
# Copies cost time. A large tensor that a function uses by name is sent to every rank at every call: make it *inside*
# the function instead. Tensors come back on the CPU.
#
# The *processes* themselves stay, however, since starting one takes much longer than calling it. Every process has a
# number from the operating system, the **process id**. Ask for it twice:

# %%
first = launch(os.getpid, world_size=world_size)
second = launch(os.getpid, world_size=world_size)
assert len({os.getpid(), *first}) == world_size + 1  # the notebook and the ranks: all different
assert first == second  # the same processes in both calls
print(f"{world_size + 1} processes: the notebook and {world_size} ranks, the same in both calls")

# %% [markdown]
# One more thing is set at every call: the random generators of torch, NumPy and Python, each from the rank's number.
# Hence different ranks draw different numbers, and a cell that you run again draws the same ones. (This is `launch`'s
# doing; under `torchrun` you seed them yourself.)


# %%
def draw():
    return round(torch.rand(1).item(), 3)


drawn = launch(draw, world_size=world_size)
assert len(set(drawn)) == world_size
assert launch(draw, world_size=world_size) == drawn
print("drawn by each rank, the same at every run:", drawn)

# %% [markdown]
# ## 4. At the same time, but on the same cores
#
# **Predict** (question 3). Every rank sleeps for 0.3 s, then multiplies matrices. A single rank does the same, alone,
# for comparison. Which bars of the ranks will be longer than those of the single one?


# %%
def sleep_then_compute():
    x = torch.ones(256, 256)
    dist.barrier()  # wait until all ranks are here
    marks = [time.monotonic()]
    time.sleep(0.3)
    marks.append(time.monotonic())
    for _ in range(300):
        x = x @ x / 256
    return [*marks, time.monotonic()]


alone = launch(sleep_then_compute, world_size=1)
together = launch(sleep_then_compute, world_size=world_size)
starts, woke, _ = zip(*together, strict=True)
assert max(starts) < min(woke)  # the last rank falls asleep before the first one wakes up
print("all ranks slept at the same time")

# %% [markdown]
# Drawn on one time axis, with the single rank on top:

# %%
rows = {}
names = ["alone", *(f"rank {rank}" for rank in range(world_size))]
for name, run in zip(names, alone + together, strict=True):
    zero = run[0] if name == "alone" else min(starts)
    start, slept, done = (mark - zero for mark in run)
    rows[name] = [("sleep", start, slept), ("compute", slept, done)]
timeline(rows, "measured: ranks sleep together, and share the cores when they compute")

# %% [markdown]
# *The figure: one row of two bars for a rank that is alone and for each of the ranks that run together. All sleep bars
# are equally long; the compute bars are longer together than alone where there are fewer cores than ranks.*
#
# Sleeping needs no core, so that four sleeps take as long as one. Computing does: the ranks share the cores of this
# machine, and four ranks on two cores get half a core each on average. This is why the course never concludes from
# the *speed* of CPU ranks that a method is good. It counts bytes, messages, steps and memory, and takes times from
# real clusters.

# %% tags=["nbval-ignore-output"]
slowdown = max(done - slept for _, slept, done in together) / (alone[0][2] - alone[0][1])
print(f"{world_size} ranks, {here['cores']} cores: the slowest takes {slowdown:.1f} times as long")

# %% [markdown]
# > **What changes on real GPUs.** Each rank has a GPU of its own, and the compute bars stay as short as for a rank
# > alone. What they wait for then is each other, the network and the data.

# %% [markdown]
# ## 5. The first collective: all-reduce
#
# As a boy Gauss is said to have added up the numbers from 1 to 100 in his head. Here the ranks do it together. Rank 0
# takes 1, 5, 9, …, rank 1 takes 2, 6, 10, …: the same program, other data. Then each rank knows a part of the sum.
#
# A **collective** is a call that all ranks make together. `dist.all_reduce` adds up a tensor over all ranks and writes
# the sum into it.
#
# `device()` is the place where a rank's tensors belong: its GPU under NCCL, the CPU under gloo. Write it wherever you
# make a tensor that travels, and the cell runs on both.
#
# **Predict** (question 4). Which ranks hold 5,050 after the call?


# %%
def add_up(last):
    rank, n = dist.get_rank(), dist.get_world_size()
    part = torch.tensor([sum(range(1 + rank, last + 1, n))], device=device())
    total = part.clone()
    dist.all_reduce(total)  # the sum over all ranks replaces what was in `total`
    return part, total


results = launch(add_up, 100, world_size=world_size)  # a pair (part, total) from each rank
parts, totals = zip(*results, strict=True)  # all parts by rank, all totals by rank
assert all(total.item() == sum(range(1, 101)) for total in totals)  # equal to one process
before_after(parts, totals, "all_reduce")

# %% [markdown]
# *The figure: on the left each rank's own part, in the rank's colour; on the right 5,050 on every rank, with a stripe
# of each colour.*
#
# All of them, and the assertion above says more: the result is that of *one* process. Nearly every lesson ends with
# such a line, because it is the only way to know that a distributed program is right.
#
# You have just seen data parallelism in miniature. Put a batch of images in place of the numbers and gradients in
# place of the sums, divide by the world size, and you have data-parallel training. Lesson [02](02_collectives.ipynb)
# shows the other collectives and counts their bytes; lesson 04 (ddp) trains with them.
#
# > **What changes on real GPUs.** The call is the same. NCCL moves the numbers from GPU to GPU, directly where the
# > machine allows it. A tensor that lies on the CPU, or on another rank's GPU, is an error there.

# %% [markdown]
# ## 6. The same program without the notebook: `torchrun`
#
# Real jobs are files, and a **launcher** starts them: `torchrun`, which comes with PyTorch, Slurm, or a cloud service.
# It starts a process for each rank and tells it who it is in **environment variables**: named texts that every process
# gets at its start. `launch` does the same:


# %%
def who_am_i():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {name: os.environ[name] for name in names}


last = launch(who_am_i, world_size=world_size, init=False)[-1]
print(*(f"{name:17} {value}" for name, value in last.items()), sep="\n")
assert last["RANK"] == str(world_size - 1)

# %% [markdown]
# The last one is the address of the **master**, where the ranks of a cluster meet at the start; `127.0.0.1` means this
# machine. The port at that address is in `MASTER_PORT`. The ranks of `launch` meet in a private file instead, which no
# other user of the machine can reach.
#
# Until now `launch` has also made the process group. A program for `torchrun` does it itself, with
# `init_process_group`, and ends it with `destroy_process_group`. Here is one. With `init=False` it runs unchanged in
# the notebook:


# %%
def main():
    dist.init_process_group("gloo")  # meets the other ranks
    _, total = add_up(100)
    if dist.get_rank() == 0:  # one rank speaks for all
        print(f"{dist.get_world_size()} ranks say: 1 + 2 + ... + 100 = {total.item()}")
    dist.destroy_process_group()
    return total.item()


in_the_notebook = launch(main, world_size=world_size, init=False)
assert in_the_notebook == [5050] * world_size

# %% [markdown]
# Now the same two functions become a file. The next cell (its code is folded away) puts their source together with the
# imports they need.

# %% jupyter={"source_hidden": true}
program = f"""\
import torch
import torch.distributed as dist

from course_utils import device


{inspect.getsource(add_up)}

{inspect.getsource(main)}

if __name__ == "__main__":
    main()
"""
print(program, end="")

# %% [markdown]
# In a terminal you would save this as `add_up.py` and type (with `.venv/bin/` in front, unless the environment is
# active)
#
# ```text
# torchrun --standalone --nproc-per-node=2 add_up.py
# ```
#
# `--nproc-per-node` is the number of ranks on this node, `--standalone` says that there is no other node. The next
# cell, also folded, types the command for you, with settings that keep it quiet and on this machine. It takes some
# seconds, as every process imports PyTorch anew.

# %% jupyter={"source_hidden": true}
loopback = "lo0" if sys.platform == "darwin" else "lo"  # leads from this machine to itself
settings = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "add_up.py")
    file.write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, file], env=settings, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
print(done.stdout, end="")
assert done.stdout == f"2 ranks say: 1 + 2 + ... + 100 = {in_the_notebook[0]}\n"

# %% [markdown]
# The same functions, the same answer, without a notebook. On a cluster the file stays as it is and the command line
# grows: `--nnodes=2`, and an address where the nodes meet. Lesson 16 (multi_node) does it.
#
# While it runs, `torchrun` opens a port for the meeting that other machines can reach too. On a computer that you share
# with people you do not trust, run it inside a container or behind a firewall. The ranks of `launch` talk over
# `127.0.0.1` alone.

# %% [markdown]
# ## 7. Live ranks: `%%ranks`
#
# `launch` calls a function, and its variables are gone when it returns. For looking around there is a second way: a
# cell that begins with `%%ranks` runs on every rank, and what it defines stays there for the next one. The line
# below loads it; you need it once in a notebook.

# %%
# %load_ext course_utils

# %% [markdown]
# A cell that makes a tensor on every rank:

# %%
# %%ranks --world-size {world_size}
mine = torch.full((3,), float(rank), device=device)
mine

# %% [markdown]
# If the cell ends with an expression, its value is shown for each rank. Three things to know:
#
# - Five names are there from the start: `torch`, `dist`, `rank`, `world_size` and `device` (without parentheses here).
# - `--world-size` says how many ranks there are; the braces put in the notebook's `world_size`. Another number starts
#   the ranks afresh, without their variables.
# - Without `--world-size` the ranks that live are used, or as many as section 1 printed.
#
# The tensors are still there: the next cell uses them.
#
# **Predict.** How many lines will it show?

# %%
# %%ranks
dist.all_reduce(mine)
mine

# %% [markdown]
# One line, as all ranks now hold the same. A list of ranks in brackets runs the cell on these only:

# %%
# %%ranks [0]
mine *= 10

# %%
# %%ranks
print("sum over all elements:", mine.sum().item())
assert mine[0].item() == sum(range(world_size)) * (10 if rank == 0 else 1)

# %% [markdown]
# Rank 0 differs from the others, as in any program in which one rank does something that the others do not. Such
# differences are the most common fault in distributed programs, and here you can make one and look at it.
#
# **Predict** (question 7). Is there a `mine` in the notebook?

# %%
assert "mine" not in globals()
print("the notebook has no `mine`: it lives on the ranks")

# %% [markdown]
# The other way round it is the same: functions and variables of ordinary cells are unknown on the live ranks. Define
# them in a `%%ranks` cell. (These ranks are also processes of their own, apart from those of `launch`.)
#
# An error in a `%%ranks` cell ends the cell and leaves the ranks alive. Here is one with an error:
#
#     %%ranks
#     if rank == 1:
#         mine.reshape(2, 2)
#
# (The folded cell below runs it inside `expect_error`, which prints an error as you would meet it and lets this
# notebook run on. If there is no error, `expect_error` fails.)

# %% jupyter={"source_hidden": true}
with expect_error():
    get_ipython().run_cell_magic("ranks", "", "if rank == 1:\n    mine.reshape(2, 2)")

# %% [markdown]
# Three numbers do not fill a 2 × 2 matrix. The first line names the rank and what went wrong, the lines below it the
# place (line 3, as line 1 of such a cell is `%%ranks`); the table says where every rank stood. Nothing is lost:

# %%
# %%ranks
mine.shape

# %% [markdown]
# > **Misconception.** "I want the sum on rank 0, so I run `dist.all_reduce(mine)` with `%%ranks [0]`." A collective is
# > a call of *all* ranks. Rank 0 would wait for the others until `--timeout`, 60 s unless you set it. Try it: put
# > `dist.barrier()` into a cell that begins with `%%ranks [0] --timeout 2`, and read what it says.
#
# | | `launch(fn)` | `%%ranks` | `torchrun file.py` |
# |---|---|---|---|
# | what runs | a function | a cell | a program |
# | variables | last for the call | last until `%ranks_reset` | last as long as the program |
# | results | a list in the notebook | shown below the cell | printed, or in files |
# | use it for | experiments and checks | looking around | real jobs |

# %% [markdown]
# ## 8. When something goes wrong
#
# Training Llama 3 was interrupted 419 times in 54 days unexpectedly (*recorded*: Llama Team 2024, table 5): once in
# about three hours. Reading failures is a daily skill. Here are the four cases that you will meet first.
#
# ### An error on one rank
#
# Samples are dealt out to the ranks, each takes the mean of its own, and an all-reduce adds the means up. There
# happens to be one sample fewer than ranks.
#
# **Predict** (question 5). The last rank gets no sample. What does it do, and what do the others?


# %%
def mean_of_my_samples():
    samples = list(range(1, world_size))  # one fewer than ranks
    mine = samples[dist.get_rank() :: world_size]  # dealt out like cards
    mean = sum(mine) / len(mine)
    total = torch.tensor([mean])
    dist.all_reduce(total)
    return total.item()


with expect_error():
    launch(mean_of_my_samples, world_size=world_size, backend="gloo")

# %% [markdown]
# From top to bottom:
#
# - **Which rank, which error.** The rank that failed *first* is the cause. Others often fail because of it, and their
#   messages mislead.
# - **Where.** The line in your cell, and its text.
# - **Where the others stood.** They wait in all-reduce number 1, each in the line that is shown. Nothing is wrong with
#   them: a sum over all ranks needs all ranks.
#
# Left to themselves the others would go on waiting. `launch` noticed the failure and stopped them.
#
# ### A rank that dies
#
# A process can also end without any Python error. If memory runs out, the system kills a process, usually a large
# one, with the signal SIGKILL, which no program can catch. The last rank does this to itself here.


# %%
def die():
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


with expect_error():
    launch(die, world_size=world_size, backend="gloo")
assert launch(len, "alive", world_size=world_size) == [5] * world_size  # the next call works
print("\nall ranks are back")

# %% [markdown]
# There is no traceback, since nobody was left to write one: "killed by signal SIGKILL" is all that the exit status
# tells. If you meet it in your own work, look at memory first. The notebook lives on, because the ranks are processes
# apart from it. The next call starts new processes in the place of the dead one and of those that waited for it: what
# was stopped in the middle of something is not used again.
#
# ### Only one rank calls
#
# **Predict** (question 6). The mean loss is to be printed once, so only rank 0 computes it. What happens? (`timeout=`
# is how long `launch` waits for the ranks.)


# %%
def print_mean_loss():
    loss = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() == 0:  # print once
        dist.all_reduce(loss)
        print("mean loss:", loss.item() / dist.get_world_size())
    return "done"


with expect_error():
    launch(print_mean_loss, world_size=world_size, timeout=patience, backend="gloo")

# %% [markdown]
# No rank has failed; rank 0 waits for a call that never comes. That is a **hang**, the typical fault of distributed
# programs. Read it line by line:
#
# - The first line says how long `launch` waited. This is its `timeout=`, 60 s unless you set it. Without `launch` it
#   would be the process group's: 30 minutes under gloo, 10 under NCCL. The limit also ends a function that is only
#   slow: give a long one a larger `timeout=`.
# - The second sentence names the likely fault: who waits, in which call, and who never joined it.
# - **state**: *waits* is inside a communication, *runs* is in other code, *returned* has left the function.
# - **last operation**: the call, its number, the group, the size of the tensor. The number counts all collectives of
#   this rank in this group, whatever they are called. Calls are matched by it: a rank's third meets the others' third.
# - **line**: where the rank is now, in your cell.
#
# The error shows on rank 0, but the fault lies with the others: look for the ranks that stand *somewhere else*. Here
# they have returned, past an `if` that let only rank 0 in. The rule: **all ranks make the same collective calls; only
# what does not communicate may hide behind `if rank == 0`.**


# %%
def print_mean_loss():
    loss = torch.tensor([1.0 + dist.get_rank()], device=device())
    dist.all_reduce(loss)  # every rank
    if dist.get_rank() == 0:  # print once
        print("mean loss:", loss.item() / dist.get_world_size())
    return loss.item() / dist.get_world_size()


losses = launch(print_mean_loss, world_size=world_size)
assert losses == [(world_size + 1) / 2] * world_size

# %% [markdown]
# ### Stop it yourself
#
# You need not wait for a limit. While a cell runs (its number is then a star, `[*]`), press the stop button ■ above
# the notebook, choose *Kernel → Interrupt Kernel* in the menu, or press *Esc* and then *I* twice. It sends the signal
# SIGINT to the notebook. Here rank 0 presses the button for you, half a second after all ranks have started; without
# that, the cell would sleep for 55 seconds.


# %%
def sleep_until_stopped(notebook):
    dist.barrier()  # all ranks are here
    if dist.get_rank() == 0:
        threading.Timer(0.5, os.kill, (notebook, signal.SIGINT)).start()  # the stop button
    time.sleep(55)


with expect_error(Interrupted):
    launch(sleep_until_stopped, os.getpid(), world_size=world_size, backend="gloo")

# %% [markdown]
# The same table again: it shows where the ranks were when you lost patience. Often this alone tells what was slow. The
# next cell you run works as usual.
#
# > **What changes on real GPUs.** The CPU only hands work to the GPU and goes on, so a rank that hangs is seen in a
# > *later* line, the first that needs a result: `.item()`, a print, a copy. And under NCCL a watchdog ends the process
# > after the group's timeout. Lesson 14 (debugging_hangs) is about finding the fault then.

# %% [markdown]
# ## 9. Stop the ranks, start afresh
#
# Ranks that wait for the next call use no core, but some memory, so after 15 minutes without a call they end by
# themselves. Sooner than that, if you do not trust their state any more, `shutdown()` ends the ranks of `launch`. In
# both cases the next call starts new ones.

# %%
ranks = launch(os.getpid, world_size=world_size)
shutdown()
assert not any(psutil.pid_exists(pid) for pid in ranks)
assert set(launch(os.getpid, world_size=world_size)).isdisjoint(ranks)
print("the old processes are gone, and the call after that ran on new ones")

# %% [markdown]
# `%ranks_reset` does it for `%%ranks` cells. Their variables go with them, which is why they may wait for two hours
# before they end by themselves.

# %%
# %ranks_reset

# %% [markdown]
# And *Kernel → Restart Kernel* ends everything: the notebook's variables and all ranks. The same holds when you close
# JupyterLab or when the kernel is killed. No process stays behind, so you need not clean up.
#
# What does a fresh start cost? The cell measures a call after `shutdown()`, which has to start its ranks, and the best
# of twenty that find them running. The very first call in a notebook takes a second or two more, for PyTorch.


# %% tags=["nbval-ignore-output"]
def seconds_of_a_call():
    start = time.perf_counter()
    launch(dist.barrier, world_size=world_size)
    return time.perf_counter() - start


shutdown()
cold, warm = seconds_of_a_call(), min(seconds_of_a_call() for _ in range(20))
print(f"a call that starts {world_size} ranks: {cold * 1e3:.0f} ms")
print(f"a call that finds them running: {warm * 1e3:.1f} ms")

# %% [markdown]
# ## 10. Where to go from here
#
# Lessons with a link can be opened now; the others are coming. *Read* and *exercises* are in minutes: 130 words or 12
# lines of code count as one, a prediction as one and a half, and an exercise as many as its card says. To run a lesson
# from the first cell to the last takes 17 to 70 s (*recorded*: November 2026, 4 ranks, 2 CPU cores, no GPU,
# torch 2.13.0; the course's README has the time of each).
#
# | lesson | the question it answers | read, min | exercises, min |
# |---|---|---|---|
# | 00 | this notebook | 60 |  |
# | [01](01_gpu_interconnects.ipynb) | How fast can data move, and where is the slow link? | 95 | 95 |
# | [02](02_collectives.ipynb) | What does each collective do, and how many bytes does it move? | 105 | 195 |
# | [03](03_nccl.ipynb) | How does NCCL do it: ring, tree, protocols, tuning, the C API? | 150 | 180 |
# | [04](04_ddp.ipynb) | What happens inside `loss.backward()` under DDP? | 145 | 195 |
# | [05](05_scaling_efficiency.ipynb) | Why is 8 GPUs not 8×, and what wins it back? | 130 | 95 |
# | [06](06_zero.ipynb) | Where does the memory go, and what does each ZeRO stage remove? | 105 | 145 |
# | [07](07_fsdp.ipynb) | How do I train with FSDP2, and checkpoint and reshard it? | 120 | 155 |
# | 08 | What does DeepSpeed do differently, and when do I pick it? | | |
# | [09](09_tensor_parallel.ipynb) | How do I split one layer over ranks? | 120 | 190 |
# | [10](10_pipeline_parallel.ipynb) | How do I split the layers, and where does the bubble go? | 110 | 185 |
# | 11 | How do I split a long sequence, and many experts? | | |
# | [12](12_parallelism_3d.ipynb) | Which TP × PP × CP × DP for this model on this cluster? | 130 | 215 |
# | 13 | Where does a step's time go? | | |
# | 14 | It hangs. Which rank, which call, why? | | |
# | [15](15_ffcv_data_loading.ipynb) | Is the GPU waiting for data, and how does FFCV fix that? | 130 | 180 |
# | 16 | How do I leave this machine: torchrun, elastic, Slurm? | | |
#
# **On your own** take them in this order. If you come with a problem, take the lessons that it needs, after 00 and 02;
# the course's README says which sections:
#
# - *it does not fit in memory*: 06, 07, then 09 to 12;
# - *it is slow, or does not scale*: 04, 05, 13, 15;
# - *it hangs, or one rank is wrong*: 04, 14;
# - *it has to run on a cluster*: 01, 03, 16.
#
# <details><summary>Do you teach?</summary>
#
# `docs/instructor.md` in the course's folder has plans for a workshop, minute by minute: *2 hours*, what distributed
# training is; *4 hours*, train what does not fit on one GPU; *8 hours*, from the first rank to a layout.
# </details>

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
print(f"{here['cores']} cores, {len(gpus)} GPUs, {world_size} ranks")
print(f"a call that starts its ranks: {cold * 1e3:.0f} ms; later calls: {warm * 1e3:.1f} ms")
print(f"computing together takes the slowest rank {slowdown:.1f} times as long as alone")
print(f"1 + 2 + ... + 100 = {totals[0].item()} on {world_size} ranks, and on 2 under torchrun")

# %% [markdown]
# - A job is many processes that run the same program; the rank tells them apart. `launch(fn)` runs a function on all of
#   them and returns a list by rank; `[ranks 0-3]` labels what they print alike.
# - Ranks share no memory. The function and what it uses are copied in, results are copied out.
# - A collective is a call of all ranks. After an all-reduce every rank holds the sum over all ranks, equal to that of
#   one process.
# - The same functions run under `torchrun`, with `init_process_group` in front. `%%ranks` cells run on live ranks.
# - Error, death, hang, interrupt: each tells which rank, which line, and where the others stood. Look for the rank that
#   stands somewhere else.
# - Bytes, order and results are real here; speed belongs to this machine.
#
# <details><summary>Answers to the seven predictions</summary>
#
# 1. What it held before: every rank changed a copy (section 3).
# 2. All first lines, then all second, then all third; equal ones merged (section 2).
# 3. 0.3 s, as sleeping needs no core. For computing, the last rank needs up to ranks ÷ cores times as long as a rank
#    alone, because they share the cores. The recap above prints the factor of this run.
# 4. After the all-reduce every rank; before it nobody (section 5).
# 5. They wait. `launch` reports the first failure, with its line, and stops them (section 8).
# 6. Rank 0 waits in an all-reduce that the others never call: a hang (section 8).
# 7. No: it lives on the ranks, and only there (section 7).
# </details>
#
# **Exercises:** change `world_size` in the first code cell to 3 and run the notebook again; before you do, write down
# which outputs will differ. **Next:** [01 interconnects](01_gpu_interconnects.ipynb), on how fast data
# can move, or straight to [02 collectives](02_collectives.ipynb), where eight collectives are drawn, counted, timed and
# misused.
#
# **Worth reading**
# - W. Constable, W. Feng, *PyTorch Distributed Overview*, 2025,
#   [docs.pytorch.org](https://docs.pytorch.org/tutorials/beginner/dist_overview.html): a map of what PyTorch offers for
#   many processes.
# - PyTorch, *torchrun (Elastic Launch)*, 2021,
#   [docs.pytorch.org](https://docs.pytorch.org/docs/stable/elastic/run.html): every option of section 6's command, and
#   the environment variables it sets.
# - Llama Team, *The Llama 3 Herd of Models*, 2024, [arxiv.org/abs/2407.21783](https://arxiv.org/abs/2407.21783):
#   section 3.3 tells what running 16,384 ranks for weeks is like.
