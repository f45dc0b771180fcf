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
# Llama 3 405B was trained on up to 16,384 GPUs (*recorded*: Llama Team 2024, table 4). Each GPU had a process
# of its own, and all processes ran the same program. One number made process 7,000 do its own share of the work: its
# rank. The process is called a rank, too. Here you start ranks yourself, from a cell, on your machine. Then you break
# them on purpose, because in real jobs they break by themselves. No GPU is needed.
#
# **You will be able to**
# - *run* a function on many ranks from a cell, and *read* what they print and return;
# - *predict* what a rank can and cannot see;
# - *read* the report of an error or a hang (endless waiting), and *stop* ranks that do not stop by themselves;
# - *turn* a cell into a program that `torchrun`, PyTorch's launcher, starts like a real job.
#
# **Before this:** Python, and PyTorch tensors on one machine. Nothing about distributed programs. **Time:** about 40
# minutes to read the core, 50 with the deeper sections, under half a minute to run.

# %% [markdown]
# ## How to work in these notebooks
#
# When the status line at the bottom says *Idle*, run the cells one after the other with *Shift* + *Enter*. Where the
# text says *Predict*, write your answer down before you run the next cell, because your own wrong guess teaches more
# than a right answer that you read. Some questions have a field for your answer; it is compared after the cell, and the
# end of the lesson lists how you did. The answer stands behind the fold *Compare* below the output. Folded cells check
# it with `assert`. Sections marked *deeper* can wait.
#
# Every figure, number or plot, is **measured** (on this machine, now), **recorded** (published elsewhere, with its
# source) or **modelled** (computed from a formula).
#
# <details><summary>Outputs that are already there, fresh copies, exercises beside the lesson</summary>
#
# `make lab` opens copies without outputs, so no answer stands below its question. If you see outputs before you run a
# cell, clear them: *Edit → Clear Outputs of All Cells*.
#
# Change cells, break them, run them again: `make restore L=02` in a terminal gives you a fresh lesson 02 and puts the
# changed one into `work/saved/`. Exercises open beside the lesson if you drag their tab to the right half of the
# window. Each open notebook keeps its ranks; *Kernel → Shut Down All Kernels* ends those that you no longer need.
# </details>
#
# The first cell imports what the core needs, and names the parameters that you can change.

# %% tags=["parameters"]
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from course_utils import HangError, Interrupted, attempt, device, expect_error, launch
from course_utils.doctor import machine, report
from course_utils.draw.lanes import before_after, timeline
from course_utils.predictions import predict, predictions
from course_utils.programs import as_program, torchrun
from course_utils.step_log import all_inside, longest, side_by_side, spans_of

world_size = 4  # ranks, 2 or more
patience = 2.0  # seconds that `launch` waits for ranks in section 6

# %% [markdown]
# If it ran without an error, Python, PyTorch and the course's package are in place.
#
# <details><summary>It said "No module named course_utils" or "No module named torch"</summary>
#
# The notebook does not run with the Python of `make setup`. Close JupyterLab and start it with `make lab` from
# the course's folder. In other editors (VS Code, for example) choose the interpreter in `.venv` as the notebook's
# kernel.
# </details>

# %% [markdown]
# ## 1. What is in this machine?
#
# What you may conclude from a measurement depends on the machine, so look at yours first: its cores, memory, GPUs and
# the links between them. The line *ranks* below names the **backend**, the library that carries messages between
# processes: **NCCL** between GPUs, **gloo** between CPUs.

# %% tags=["nbval-ignore-output"]
here = machine()
print(report(here))
assert dist.is_available() and here["backend"] in ("gloo", "nccl")

# %% [markdown]
# The two lists at the end matter most: what is real here, and what is imitated. Without GPUs, the *messages* between
# ranks are real, with their bytes and their order, and so are the results and the hangs. The *speed* of messages is
# measured too, but for this machine only. (*Hosts* are machines.)
#
# <details><summary>What the course does with no GPU, one GPU, several GPUs, or a Mac</summary>
#
# | you have | what the course does |
# |---|---|
# | 2 cores, 4 GB, no GPU | everything runs, with gloo; more cores only make it quicker |
# | 1 GPU | ranks use gloo on the CPU, as there are more ranks than GPUs; cells about a single GPU run on that GPU |
# | 2 or more GPUs | one rank on each, with NCCL, by the same cells; set `world_size` to at most the number of GPUs |
# | a Mac | as without a GPU: neither gloo nor NCCL works with Apple's GPUs |
#
# In a terminal, `.venv/bin/python -m tools doctor` prints the same report and starts two ranks: the
# first thing to try when something seems broken.
# </details>

# %% [markdown]
# ## 2. Hello from every rank
#
# These words mean the same in the whole course.
#
# | word | meaning | here |
# |---|---|---|
# | **process** | a running program with memory of its own | the notebook's *kernel* is one, each rank is another |
# | **rank** | one process of a job; also its number, from 0 | 0, 1, 2, 3 |
# | **world size** | how many ranks the job has | 4 |
# | **node** | one machine | there is one: yours |
# | **local rank** | the rank's number on its node; it says which GPU to use | equal to the rank, as there is one node |
# | **process group** | the ranks that communicate together | all of them, made by `launch` |
#
# `launch`, the launcher of this course, runs a function on every rank and returns a list of what they returned:
#
# ```text
#              ┌── hello() on rank 0 ──┐
# notebook ────┼── hello() on rank 1 ──┼────▶  [0, 10, 20, 30]
# (kernel)     ├── hello() on rank 2 ──┤       results, by rank
#              └── hello() on rank 3 ──┘
# ```
#
# All ranks run the same function, and `dist.get_rank()` tells a rank which one it is. (`dist` is the usual short name
# of `torch.distributed`.) The local rank stands in `os.environ` (section 7). Hand over the function itself, without
# parentheses, because it is to run on the ranks, not in the notebook.
#
# **Predict**: `hello` prints two lines, and four ranks run it. How many lines will you read from the ranks?

# %%
lines = predict("lines that you read from all ranks")


# %%
def hello():
    rank, n = dist.get_rank(), dist.get_world_size()
    print("hello")
    print(f"I am rank {rank} of {n}, local rank {os.environ['LOCAL_RANK']}")
    return 10 * rank


results = launch(hello, world_size=world_size)
print("the notebook got", results)

# %% jupyter={"source_hidden": true}
assert results == [10 * rank for rank in range(world_size)]
lines.compare(1 + world_size)

# %% [markdown]
# **Compare.** With four ranks you read five: a single line for the first `print`, because all ranks printed the same,
# and one line for each rank for the second. (The last line, without a label, is the notebook's own.)
#
# `launch` labels, merges and sorts what the ranks print, so your screen looks the same at every run, whichever rank is
# the fastest.
#
# <details><summary>It said "Default process group has not been initialized"</summary>
#
# Then the function ran in the notebook, which is no rank and has no process group: `launch(hello())` calls `hello`
# before `launch` sees it, and `hello()` in a cell does the same. Write `launch(hello)`.
# </details>
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
# It takes GPU number 3 of its node. That is the main use of the local rank; nearly everything else uses the rank.
# </details>

# %% [markdown]
# ## 3. What does a rank see of the notebook?
#
# The next function uses a list that was made in the notebook: every rank appends a line to it, and returns the list.
# **Predict**: what does the list hold in the notebook afterwards?

# %%
may_hold = ["its own line only", "one line more", "a line more for each rank"]
held = predict("the notebook's list", may_hold)

# %%
notes = ["written in the notebook"]


def take_a_note():
    notes.append(f"written by rank {dist.get_rank()}")
    return notes


copies = launch(take_a_note, world_size=world_size)
for rank, copy in enumerate(copies):
    print(f"rank {rank} returned  {copy}")
print(f"the notebook has {notes}")

# %% jupyter={"source_hidden": true}
assert notes == ["written in the notebook"]
held.compare("its own line only")

# %% [markdown]
# **Compare.** Only what the list held before. `launch` *copied* the function to each rank, together with every variable
# and function that it mentions, so each rank changed a copy of its own. What a rank returns is copied back.
#
# ```text
# notebook                                            rank 2
#   take_a_note, notes   ─── a copy at each call ───▶   take_a_note, notes
#                                                       notes.append(...)
#   copies[2]            ◀── a copy of the result ───   return notes
# ```
#
# So Python objects have one way *into* the ranks (the function, its arguments, and what it mentions) and one way *out*
# (what it returns). Copies cost time, so make a large tensor inside the function.
#
# > **Misconception.** "A rank is a thread of my notebook." Threads share memory, but no rank sees a byte of another's.
# > That is why a program for 4 processes on one machine can also run as 16,384 processes on two thousand machines.

# %% [markdown]
# ## 4. Are four ranks four times as fast?
#
# The ranks run at the same time. Does that make them fast? Every rank sleeps for 0.3 s and then multiplies matrices:
# first a single rank, then all at once. `launch(spans_of, sleep, compute)` calls `spans_of(sleep, compute)` on each
# rank, which runs both and notes the times; the other helpers show them.
#
# **Predict**: which takes longer together than alone: the sleeping, the computing, both, or neither?

# %%
longer = predict("what takes longer together", ["sleeping", "computing", "both", "neither"])


# %%
def sleep():
    time.sleep(0.3)


def compute():
    x = torch.ones(256, 256)
    for _ in range(300):
        x = x @ x / 256


alone = launch(spans_of, sleep, compute, world_size=1)
together = launch(spans_of, sleep, compute, world_size=world_size)
timeline(side_by_side(alone=alone, together=together), "measured: a rank alone, and ranks together")

# %% jupyter={"source_hidden": true}
assert all_inside(together, "sleep")  # at some moment all ranks were asleep
longer.compare("computing" if here["cores"] < world_size else "neither")

# %% [markdown]
# **Compare.** If there are more ranks than cores, only the computing. Sleeping needs no core, so four sleeps take as
# long as one. Computing needs a core, which the ranks then have to share; with a core for each, it takes about as long
# as alone.
#
# *The figure: a row for each rank, first the one that was alone, then those that ran together, with a bar for sleeping
# and one for computing. All sleep bars are about equally long. Where there are fewer cores than ranks, most compute
# bars are longer together than alone.*
#
# The slowest rank, compared with the rank alone:

# %% tags=["nbval-ignore-output"]
slowdown = longest(together, "compute") / longest(alone, "compute")
print(f"{world_size} ranks, {here['cores']} cores: the slowest takes {slowdown:.1f} times as long")

# %% [markdown]
# Each rank did the whole computation: four times the work in all. But where ranks share cores they are not four times
# as fast. This is why the course never concludes from the *speed* of CPU ranks that a method is good. It counts bytes,
# messages, steps and memory, and takes times from real clusters.
#
# > **What changes on real GPUs.** Each rank has a GPU of its own, so the compute bars stay as short as for a rank
# > alone. There, ranks wait for each other, the network and the data.

# %% [markdown]
# ## 5. The first collective: all-reduce
#
# Ranks that share no memory have to send each other messages. A **collective** is a call that all ranks make together.
# The best-known one, `dist.all_reduce`, adds up one tensor from each rank.
#
# Here the ranks add up the numbers from 1 to 100. Rank 0 takes 1, 5, 9, …, rank 1 takes 2, 6, 10, …, and so on.
# `device()` is the place where a rank's tensors belong: its GPU under NCCL, the CPU under gloo.
#
# **Predict**: how many of the ranks hold 5,050 after the call?

# %%
holders = predict("ranks that hold 5,050", ["rank 0 only", "the last rank only", "all ranks"])


# %%
def add_up(last):
    rank, n = dist.get_rank(), dist.get_world_size()
    part = torch.tensor([sum(range(1 + rank, last + 1, n))], device=device())
    total = part.clone()
    dist.all_reduce(total)  # the sum over all ranks replaces what was in `total`
    return part, total


results = launch(add_up, 100, world_size=world_size)
parts = [part for part, total in results]
totals = [total for part, total in results]
before_after(parts, totals, "all_reduce")

# %% jupyter={"source_hidden": true}
assert all(total.item() == sum(range(1, 101)) for total in totals)  # equal to one process
holders.compare("all ranks")

# %% [markdown]
# **Compare.** All do: all-reduce writes the sum into the tensor of every rank.
#
# *The figure: on the left each rank's own part, in the rank's colour; on the right 5,050 on every rank, with a stripe
# of each colour.*
#
# The folded cell asserts that the result equals what *one* process computes. Nearly every lesson has such a line: it is
# the best check of a distributed program.
#
# The same program on other data: this is data-parallel training in miniature. Put images in place of the numbers and
# gradients in place of the sums, and you are close to what lesson 04 builds.
#
# > **What changes on real GPUs.** The call is the same, and NCCL moves the numbers from GPU to GPU. A tensor that lies
# > on the CPU, or on another rank's GPU, is an error there.

# %% [markdown]
# ## 6. When something goes wrong
#
# Training Llama 3 was interrupted unexpectedly 419 times in 54 days (*recorded*: Llama Team 2024, table 5): once in
# about three hours. So failures are daily work there. `launch` makes three promises about them: the cell ends, the
# error names the rank and the line, and your next cell works.
#
# `attempt` prints an error, if there is one, as you would meet it, and lets this notebook run on. `backend="gloo"`
# keeps these cells on the CPU, so that they look the same everywhere; `timeout` is how long `launch` waits for ranks.
#
# ### An error on one rank
#
# Samples are given to the ranks in turn: the first to rank 0, the second to rank 1, … Each rank takes the mean of its
# own, and an all-reduce adds up the means. There is one sample fewer than ranks.
#
# **Predict**: the last rank gets no sample and fails. What do the others do?

# %%
others = predict("the other ranks", ["return a mean", "fail as well", "wait for the last one"])


# %%
def mean_of_my_samples():
    samples = list(range(1, world_size))  # one fewer than ranks
    mine = samples[dist.get_rank() :: world_size]
    mean = sum(mine) / len(mine)
    total = torch.tensor([mean])
    dist.all_reduce(total)
    return total.item()


with attempt() as outcome:
    launch(mean_of_my_samples, world_size=world_size, timeout=patience, backend="gloo")

# %% jupyter={"source_hidden": true}
assert outcome.error.rank == world_size - 1 and "ZeroDivisionError" in outcome.error.exception
others.compare("wait for the last one")

# %% [markdown]
# **Compare.** The last rank divides by zero and fails. The others wait for it: they are in all-reduce number 1, and a
# sum over all ranks needs all ranks. They would go on waiting, so `launch` stopped them.
#
# The first line names the rank that failed *first*, since that is the cause. Below it stands the line of your cell
# (`cell [n]` is the one with `[n]` at its left). The table, explained below, shows where every rank stood.
#
# ### A value that is printed once
#
# The mean loss is to be printed once, so only rank 0 calls the all-reduce and prints. **Predict**: what happens?

# %%
fates = ["the mean is printed", "a wrong mean is printed", "rank 0 fails", "rank 0 waits"]
fate = predict("the call", fates)


# %%
def print_mean_loss():
    loss = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() == 0:  # print once
        dist.all_reduce(loss)
        print("mean loss:", loss.item() / dist.get_world_size())
    return "done"


with attempt() as outcome:
    launch(print_mean_loss, world_size=world_size, timeout=patience, backend="gloo")

# %% jupyter={"source_hidden": true}
assert isinstance(outcome.error, HangError)
fate.compare("rank 0 waits")

# %% [markdown]
# **Compare.** No rank has failed. Rank 0 waits for a call that never comes: a **hang**, the typical fault of
# distributed programs.
#
# After the `timeout` (60 s unless you set it) `launch` stops the ranks and says who waits, in which call, and who
# never joined it. Then comes the table:
#
# - **state**: a rank *waits* inside a communication, *runs* other code, has *returned* from the function, or has
#   *failed* with an error;
# - **last operation**: the last collective that the rank called, its number after `#`, and in parentheses the group
#   (*default* means all ranks) and the bytes. Calls are paired by this number: the third call of one rank goes with the
#   third of the others, even if that is another collective;
# - **line**: where the rank is now, in your cell.
#
# The wait shows on rank 0; its cause is what the others did *not* do, call all-reduce. So look for the ranks that stand
# *somewhere else*. Here they have returned, because the `if` let only rank 0 in. The rule is: **all ranks make the same
# collective calls; only what does not communicate may stand under `if rank == 0`.** The cure is only that the call
# stands in front of the `if`:


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
# You need not wait for the timeout. Add a cell with `launch(time.sleep, 60)`, run it, and press the stop button ■ above
# the notebook, or choose *Kernel → Interrupt Kernel*. The next cell, folded away, does this without you: all ranks meet
# at `dist.barrier()`, a collective without data, and begin to sleep. Half a second later rank 0 presses the button.

# %% jupyter={"source_hidden": true}
import signal
import threading


def sleep_until_stopped(notebook):
    dist.barrier()  # all ranks are here
    if dist.get_rank() == 0:
        threading.Timer(0.5, os.kill, (notebook, signal.SIGINT)).start()  # the stop button
    time.sleep(55)


with expect_error(Interrupted):
    launch(sleep_until_stopped, os.getpid(), world_size=world_size, backend="gloo")

# %% [markdown]
# The same table again: it shows where the ranks were when they were stopped. The next cell works as usual, on new
# ranks. *Kernel → Restart Kernel* ends all of them, and so does closing JupyterLab; no process stays behind.
#
# > **What changes on real GPUs.** The CPU only hands work over: it puts **GPU kernels**, functions that run on the GPU,
# > into a **stream**, a queue of work that the GPU does in order. Then the CPU goes on. (Work on two streams can run at
# > the same time.) So Python shows a hang too late: in the first line that needs a result, not where its cause is.
# > Lesson 14 finds the cause even so.

# %% [markdown]
# ## 7. What to take to work: the same program under `torchrun`
#
# A real job is a file, and another launcher starts it: `torchrun` (part of PyTorch), Slurm (which shares a cluster
# among jobs) or a cloud service. The launcher starts one process for each rank, and tells each one who it is in
# **environment variables**, named texts that a process gets at its start: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, and the
# address where all ranks meet, in `MASTER_ADDR` and `MASTER_PORT`.
#
# Until now `launch` has also made the process group. Under `torchrun` the program does this itself, with
# `init_process_group`. With `init=False`, `launch` leaves that to the program too, so that you can try a whole program
# from a cell:


# %%
def main():
    dist.init_process_group("gloo")  # meets the other ranks
    _, total = add_up(100)
    if dist.get_rank() == 0:  # one rank speaks for all
        print(f"{dist.get_world_size()} ranks say: 1 + 2 + ... + 100 = {total.item()}")
    dist.destroy_process_group()
    return total.item()


from_launch = launch(main, world_size=world_size, init=False)
assert from_launch == [5050] * world_size

# %% [markdown]
# Now the two functions become a file. `as_program` writes the imports above them, and the call of `main` below:

# %%
program = as_program(add_up, main)
print(program)

# %% [markdown]
# You would save this as `add_up.py`, and type in a terminal, in the course's folder, because `device` needs the
# course's Python:
#
# ```text
# .venv/bin/torchrun --standalone --nproc-per-node=2 add_up.py
# ```
#
# `--nproc-per-node` is the number of ranks on this node, and `--standalone` says that there is no other node. The next
# cell does both for you. It takes some seconds, as every process imports PyTorch anew.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "add_up.py")
    path.write_text(program)
    printed = torchrun(path, ranks=2)
print(printed, end="")
assert printed == f"2 ranks say: 1 + 2 + ... + 100 = {from_launch[0]}\n"

# %% [markdown]
# The same functions give the same answer, without a notebook and on another number of ranks. Every program of this
# course has this shape: make the group, compute on your share, communicate, let one rank print, end the group. On a
# cluster the command line grows (lesson 16); in the file only `"gloo"` becomes `"nccl"` where ranks have GPUs. A rank
# must then take its GPU before it communicates, or all ranks of a node meet on GPU 0, which NCCL refuses. Here
# `device()` does it. A program without the course takes its GPU with the line below, and puts its tensors there with
# `device="cuda"`. (Its `%` is for launchers that show each rank only its own GPU: it gives 0 there.)
#
# ```python
# torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
# ```
#
# [`scripts/hello.py`](../scripts/hello.py) is such a program for you to keep. It needs nothing from the course, chooses
# GPU and backend itself, and says which rank runs on which machine. Run it first on every new cluster. Under `torchrun`
# nobody prints a table when ranks wait for each other: lesson 14 shows how to find out.
#
# <details><summary>On a computer that you share with others</summary>
#
# While `torchrun` runs, the port where its ranks meet is open to other machines too. Among people whom you do not
# trust, run it inside a container or behind a firewall. The ranks of `launch` communicate inside the machine only
# (`127.0.0.1`), and find each other through a private file.
# </details>
#
# This is all that the next lessons need. Go to the recap at the end, or on to the deeper sections.

# %% [markdown] tags=["deeper"]
# ## 8. Live ranks: `%%ranks` · deeper
#
# `launch` calls a function, and its variables are gone when it returns. For looking around there is a second way: a
# cell that begins with `%%ranks` runs on every rank, and what it defines stays there for the next such cell.
# This line makes `%%ranks` known, once in a notebook.

# %% tags=["deeper"]
# %load_ext course_utils

# %% [markdown] tags=["deeper"]
# The first cell makes a tensor on every rank. If such a cell ends with an expression, its value is shown for each
# rank.

# %% tags=["deeper"]
# %%ranks --world-size {world_size}
mine = torch.full((3,), float(rank), device=device)
mine

# %% [markdown] tags=["deeper"]
# Five names are there from the start: `torch`, `dist`, `rank`, `world_size` and `device` (without parentheses here).
# `--world-size` says how many ranks there are, and the braces put in the notebook's `world_size`. The next cell leaves
# it out, so it runs on the same ranks and finds their tensors.
#
# **Predict**: how many lines will it show?

# %% tags=["deeper"]
shown = predict("lines of the next cell")

# %% tags=["deeper"]
# %%ranks
dist.all_reduce(mine)
mine

# %% jupyter={"source_hidden": true} tags=["deeper"]
shown.compare(1)

# %% [markdown] tags=["deeper"]
# **Compare.** One, as all ranks now hold the same.
#
# A list of ranks in brackets runs a cell on these only:

# %% tags=["deeper"]
# %%ranks [0]
mine *= 10

# %% tags=["deeper"]
# %%ranks
print("sum over all elements:", mine.sum().item())
assert mine[0].item() == sum(range(world_size)) * (10 if rank == 0 else 1)

# %% [markdown] tags=["deeper"]
# Rank 0 differs now, as in any program in which one rank does something that the others do not. Such differences are
# the most common fault in distributed programs, and here you can make one and look at it.
#
# The notebook itself has no `mine`, because it is not a rank; and functions and variables of ordinary cells are
# unknown on the live ranks, which are other processes than those of `launch`.

# %% tags=["deeper"]
assert "mine" not in globals()
print("the notebook has no `mine`: it lives on the ranks")

# %% [markdown] tags=["deeper"]
# An error ends the cell, and leaves the ranks alive with all their variables. This cell has one:
#
#     %%ranks
#     if rank == 1:
#         mine.reshape(2, 2)
#
# It runs in the folded cell below, where its error is expected.

# %% jupyter={"source_hidden": true} tags=["deeper"]
from IPython import get_ipython

with expect_error():
    get_ipython().run_cell_magic("ranks", "", "if rank == 1:\n    mine.reshape(2, 2)")

# %% [markdown] tags=["deeper"]
# Three numbers do not fill a 2 × 2 matrix. The error says line 3, because `%%ranks` counts as line 1. Nothing is lost:

# %% tags=["deeper"]
# %%ranks
mine.shape

# %% [markdown] tags=["deeper"]
# > **Misconception.** "I want the sum on rank 0, so I run `dist.all_reduce(mine)` with `%%ranks [0]`." A collective
# > is a call of *all* ranks, so rank 0 would wait until `--timeout` (60 s unless you set it). Try it: put
# > `dist.barrier()` into a cell that begins with `%%ranks [0] --timeout 2`, and read what it says.
#
# | | `launch(fn)` | `%%ranks` | `torchrun file.py` |
# |---|---|---|---|
# | what runs | a function | a cell | a program |
# | variables | last for the call | last until `%ranks_reset` | last as long as the program |
# | results | a list in the notebook | shown below the cell | printed, or in files |
# | use it for | experiments and checks | looking around | real jobs |
#
# The live ranks end with `%ranks_reset`, or after two hours without a cell:

# %% tags=["deeper"]
# %ranks_reset

# %% [markdown] tags=["deeper"]
# ## 9. What stays from call to call · deeper
#
# Variables do not survive a call of `launch`. The function and what it uses are copied anew each time, so every call
# starts from the notebook's present state. Here is the list of section 3 again:

# %% tags=["deeper"]
assert launch(take_a_note, world_size=world_size) == copies  # no rank remembers its earlier note
notes.append("added later")
assert launch(len, notes, world_size=world_size) == [2] * world_size  # all see it as it is now
print("every call starts from the notebook's present state")

# %% [markdown] tags=["deeper"]
# The *processes* stay, since starting one takes much longer than calling it. Their **process ids**, numbers from the
# operating system, show this:

# %% tags=["deeper"]
first = launch(os.getpid, world_size=world_size)
second = launch(os.getpid, world_size=world_size)
assert len({os.getpid(), *first}) == world_size + 1  # the notebook and the ranks: all different
assert first == second  # the same processes in both calls
print(f"{world_size + 1} processes: the notebook and {world_size} ranks, the same in both calls")

# %% [markdown] tags=["deeper"]
# One thing is set at every call: the random generators of torch, NumPy and Python, each seeded from the rank's number.
# So different ranks draw different numbers, and a cell that you run again draws the same ones. Under `torchrun` you
# seed them yourself.


# %% tags=["deeper"]
def draw():
    return round(torch.rand(1).item(), 3)


drawn = launch(draw, world_size=world_size)
assert len(set(drawn)) == world_size
assert launch(draw, world_size=world_size) == drawn
print("drawn by each rank, the same at every run:", drawn)

# %% [markdown] tags=["deeper"]
# If you do not trust the state of the processes, `shutdown()` ends them, and the next call starts new ones. After 15
# minutes without a call they end by themselves.

# %% tags=["deeper"]
import psutil

from course_utils import shutdown

shutdown()
assert not any(psutil.pid_exists(pid) for pid in first)
assert set(launch(os.getpid, world_size=world_size)).isdisjoint(first)
print("the old processes are gone, and the call after that ran on new ones")

# %% [markdown] tags=["deeper"]
# ## 10. In which order lines appear · deeper
#
# The ranks run at the same time, and nobody makes them wait for each other. In the next cell each prints three lines,
# and rank 0 is slow.
#
# **Predict**: in which order do you read them?

# %% tags=["deeper"]
orders = ["by time: rank 0's lines last", "line by line, all ranks together", "rank by rank"]
order = predict("the lines", orders)


# %% tags=["deeper"]
def three_lines():
    print("first")
    if dist.get_rank() == 0:
        time.sleep(0.3)
    print("second, from an even rank" if dist.get_rank() % 2 == 0 else "second, from an odd rank")
    print("third, with my number:", dist.get_rank())


results = launch(three_lines, world_size=world_size)

# %% jupyter={"source_hidden": true} tags=["deeper"]
order.compare("line by line, all ranks together")

# %% [markdown] tags=["deeper"]
# **Compare.** Line by line, however slow a rank is. The launcher shows line 1 as soon as all ranks have printed it,
# then line 2, and so on, and it merges equal lines.
#
# If one rank prints an extra line, its later lines no longer match those of the others.
#
# > **Misconception.** "The order on the screen is the order in time." Not here, and even less under `torchrun`, where
# > lines of several ranks appear as they come. To know what happened first, print the time, or let one rank print.

# %% [markdown] tags=["deeper"]
# ## 11. A rank that dies · deeper
#
# A process can also end without any Python error. If memory runs out, the system kills a process, usually a large
# one, with the signal SIGKILL, which no program can catch. The last rank does this to itself here.


# %% tags=["deeper"]
def die():
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


with expect_error():
    launch(die, world_size=world_size, backend="gloo")
assert launch(len, "alive", world_size=world_size) == [5] * world_size  # it has 5 letters
print("\nall ranks are back")

# %% [markdown] tags=["deeper"]
# There is no traceback, since nobody was left to write one: the signal is all that the system tells. If you meet
# SIGKILL in your own work, look at memory first. The notebook lives on, because the ranks are separate processes. The
# next call replaces the dead rank and those that waited for it, because a process stopped during its work is not used
# again.

# %% [markdown]
# ## Recap, with the numbers of this run

# %% tags=["nbval-ignore-output"]
print(f"{here['cores']} cores, {len(here['gpus'])} GPUs, {world_size} ranks over {here['backend']}")
print(f"computing together takes the slowest rank {slowdown:.1f} times as long as alone")
print(f"1 + 2 + ... + 100 = {totals[0].item()} on {world_size} ranks, and on 2 under torchrun")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - A job is many processes that run the same program; the rank tells them apart. `launch(fn)` runs a function on all of
#   them and returns a list by rank.
# - Ranks share no memory: the function and what it uses are copied in, results are copied out.
# - A collective is a call of all ranks. After an all-reduce every rank holds the sum.
# - Errors, hangs and interrupts report which rank, which line, and where the others stood.
# - Bytes, order and results are real here; speed is that of this machine only.
#
# **Now you can answer**
#
# 1. A function appends to a list of the notebook, on four ranks. How do you get what they have appended?
# 2. Four ranks on two cores take twice as long as one. Does that say anything about four GPUs?
# 3. In a table ranks 0 to 2 wait in all-reduce number 8. Rank 3 runs, and its last operation has number 7. Where do you
#    look?
# 4. Only rank 0 is to write a log line with the mean loss. What must stand before the `if`?
#
# <details><summary>Answers</summary>
#
# 1. Return the list: the copies come back as results, and nothing else does (section 3).
# 2. No. Each GPU computes for itself; the ranks here share cores (section 4).
# 3. At the line of rank 3, because it stands somewhere else than the others (section 6).
# 4. The all-reduce, because all ranks have to call it (section 6).
# </details>
#
# **Exercises:** set `world_size = 3` in the first code cell and run the notebook again; before you do, write down
# which outputs will differ. **Next:** [01 interconnects](01_gpu_interconnects.ipynb), on how fast data can move.
#
# Take the lessons in their order or, if you come with a problem, only those that it needs.
#
# <details><summary>Which lessons for which problem, and all lessons with their questions and minutes</summary>
#
# After 00 and [02](02_collectives.ipynb), by problem (the course's README says which sections):
#
# - *it does not fit in memory*: 06, 07, then 09 to 12;
# - *it is slow, or does not scale*: 04, 05, 13, 15;
# - *it hangs, or one rank is wrong*: 04, 14;
# - *it has to run on a cluster*: 01, 03, 16;
# - *it has to answer people*: 09, 17;
# - *it is a whole job, and you want to see whether you can do it*: 18.
#
# *Read* and *exercises* are in minutes: 130 words or 12 lines of code count as one, a prediction as one and a half, and
# an exercise has its minutes above it. 45 (100) means 45 minutes for the core, which everybody needs, and 100 with
# the sections marked *deeper*. To run a whole lesson takes 9 to 107 s (*recorded*: November 2026, 4 ranks, 2 CPU
# cores, no GPU, torch 2.13.0; the README has the time of each).
#
# | lesson | the question it answers | read, min | exercises, min |
# |---|---|---|---|
# | 00 | this notebook | 40 (50) |  |
# | [01](01_gpu_interconnects.ipynb) | How fast can data move, and where is the slow link? | 45 (85) | 90 |
# | [02](02_collectives.ipynb) | What does each collective do, and how many bytes does it move? | 45 (75) | 70 |
# | [03](03_nccl.ipynb) | How does NCCL do it: ring, tree, protocols, tuning, the C API? | 45 (115) | 180 |
# | [04](04_ddp.ipynb) | What happens inside `loss.backward()` under DDP? | 45 (110) | 220 |
# | [05](05_scaling_efficiency.ipynb) | Why is 8 GPUs not 8×, and what wins it back? | 45 (100) | 135 |
# | [06](06_zero.ipynb) | Where does the memory go, and what does each ZeRO stage remove? | 45 (80) | 145 |
# | [07](07_fsdp.ipynb) | How do I train with FSDP2, and checkpoint and reshard it? | 45 (100) | 140 |
# | [08](08_deepspeed.ipynb) | What does DeepSpeed do differently, and when do I pick it? | 45 (95) | 125 |
# | [09](09_tensor_parallel.ipynb) | How do I split one layer over ranks? | 45 (80) | 170 |
# | [10](10_pipeline_parallel.ipynb) | How do I split the layers, and where does the bubble go? | 45 (80) | 150 |
# | [11](11_long_context_and_experts.ipynb) | How do I split a long sequence, and many experts? | 45 (85) | 215 |
# | [12](12_parallelism_3d.ipynb) | Which TP × PP × CP × DP for this model on this cluster? | 45 (95) | 200 |
# | [13](13_profiling.ipynb) | Where does a step's time go? | 45 (90) | 85 |
# | [14](14_debugging_hangs.ipynb) | It hangs. Which rank, which call, why? | 45 (70) | 135 |
# | [15](15_ffcv_data_loading.ipynb) | Is the GPU waiting for data, and how does FFCV fix that? | 45 (85) | 160 |
# | [16](16_multi_node.ipynb) | How do I leave this machine: torchrun, elastic, Slurm? | 45 (140) | 125 |
# | [17](17_serving.ipynb) | How many GPUs serve one model, and who waits for what? | 45 (60) | 160 |
# | [18](18_capstone.ipynb) | Can you take a job from a model and a budget to a report? | 20 | 305 |
# | [19](19_a_run_that_went_wrong.ipynb) | The loss falls. Is the run all right? | 45 | 65 |
# | [20](20_review.ipynb) | What do you still know? | 5 |  |
# </details>
#
# <details><summary>Do you teach?</summary>
#
# `docs/instructor.md` in the course's folder has plans for a workshop, minute by minute: *2 hours*, what distributed
# training is; *4 hours*, train what does not fit on one GPU; *8 hours*, from the first rank to a layout.
# </details>
#
# **Worth reading**
# - W. Constable, W. Feng, *PyTorch Distributed Overview*, 2025,
#   [docs.pytorch.org](https://docs.pytorch.org/tutorials/beginner/dist_overview.html): a map of what PyTorch offers for
#   many processes.
# - PyTorch, *torchrun (Elastic Launch)*, 2021,
#   [docs.pytorch.org](https://docs.pytorch.org/docs/stable/elastic/run.html): every option of section 7's command, and
#   the environment variables it sets.
# - Llama Team, *The Llama 3 Herd of Models*, 2024, [arxiv.org/abs/2407.21783](https://arxiv.org/abs/2407.21783):
#   section 3.3 tells what running 16,384 ranks for weeks is like.
