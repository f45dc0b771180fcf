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
# # It hangs. Which rank, which call, why?
#
# A public report has these lines: three times `[Rank 0]` says that a collective has timed out, in calls 96,117, 96,120
# and 96,125, and once `[Rank 7]` says the same of call 64,088
# ([pytorch#118369](https://github.com/pytorch/pytorch/issues/118369)). So is rank 7 the one to blame, because it is
# 32,000 calls behind? In section 7 you can tell. In most hangs one rank does something else than the others. Then many
# messages appear, and what they say of the rank at fault is easily misread. In this lesson you make programs hang,
# collect what each rank knows, and find the rank, the call and the line.
#
# **You will be able to**
# - *say* what a time-out proves, and what it does not;
# - *read* the stacks of all ranks, and *notice* when they cannot help;
# - *compare* the flight records of all ranks with 40 lines of your own;
# - *choose* the check that names a fault, and know the faults that it misses;
# - *diagnose* and *mend* programs that were reported in public, *read* the log of a job, and *examine* one that hangs.
#
# **Before this:** [02 collectives](02_collectives.ipynb), [04 ddp](04_ddp.ipynb). **Time:** about 45 minutes to read
# the core, 70 with the deeper sections, about one to run.

# %% [markdown]
# Imports and parameters:

# %% tags=["parameters"]
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

world_size = 3  # ranks, 2 or more

# %%
from course_utils import HangError, MismatchError, expect_error, launch
from course_utils.predictions import predict, predictions
from course_utils.programs import examine, torchrun_job
from course_utils.recorded import LLAMA3_INTERRUPTIONS
from course_utils.recordings import load as load_recording
from lessons.debugging_hangs import flight_records
from lessons.debugging_hangs.clinic import hangs
from lessons.debugging_hangs.watchdog_logs import conclusion, read

# %% [markdown]
# ## 1. What a hang looks like from each rank
#
# A collective ends when all ranks of its group have called it. If one of them never calls it, the others wait, and
# nothing in the operation itself will ever end this wait. This program has such a fault: the second all-reduce stands
# in a branch that rank 1 does not take.


# %%
def train():
    x = torch.ones(4)
    dist.all_reduce(x)
    if dist.get_rank() != 1:
        dist.all_reduce(x)
    dist.barrier()
    return "done"


# %% [markdown]
# What ends the wait is a **time-out**: a limit that was given to the process group when it was made. PyTorch's default
# is 30 minutes for gloo and 10 for NCCL ([PyTorch](https://docs.pytorch.org/docs/stable/distributed.html)); here we
# make the group ourselves, with 2 s. `collect` is for looking only: it catches the error, so that we can compare what
# the ranks would have written into their logs. The launcher of this course adds a remark of its own to such a run, and
# we hide it for now, because no cluster has it.
#
# **Predict**: which ranks report an error, and does any message name the branch?

# %%
reporting = predict("ranks that report an error", ["rank 1", "all but rank 1", "all ranks"])


# %% tags=["nbval-ignore-output"]
def collect(program):
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    try:
        said = str(program())
    except RuntimeError as error:
        said = str(error).split("] ")[-1]
    return said, flight_records.record()  # the record is for section 3


with redirect_stdout(StringIO()):  # without the launcher's remark
    found = launch(collect, train, world_size=world_size, init=False)
for rank, (said, _) in enumerate(found):
    print(f"rank {rank}: {said}")

# %% jupyter={"source_hidden": true}
assert not any("done" in said or "rank 1" in said for said, _ in found)
reporting.compare("all ranks")

# %% [markdown]
# **Compare.** Every rank reports, and no message names a rank or the branch. Rank 1 complains as well, because it waits
# too: it has gone on to the barrier, which the others have not reached.
#
# So a time-out proves one thing only, that *somebody* did not come. Which rank writes first depends on who began to
# wait first, and that says nothing about guilt. The number of seconds says how long a rank waited. It does not say when
# the fault happened, which may have been much earlier.
#
# > **Misconception.** "The rank with the error is the broken one." It is a witness. The rank at fault often waits
# > somewhere else, still computes, or has written nothing at all.

# %% [markdown]
# ## 2. Stacks, and when all of them are equal
#
# The first question at a job that hangs is where each rank stands. `py-spy dump --pid PID` prints the Python stack of a
# process. It pauses the process for that moment, unless you add `--nonblocking`, and in a container it needs the
# capability `SYS_PTRACE`. `faulthandler` makes a rank write its own stack. The launcher of this course collects stacks
# when ranks wait for too long, and shows the innermost line of your code. Here is the same program again.

# %%
with expect_error(HangError):
    launch(train, world_size=world_size, timeout=5)

# %% [markdown]
# One rank stands in another line, and with three ranks or more the odd one out is easy to see. With two ranks there is
# no majority, so you have to read the program: which of the two lines should not have been reached?
#
# > **Under NCCL.** Here, with gloo, a rank stands in the collective that does not end. With NCCL a call only puts the
# > collective into the GPU's queue and returns, so Python continues to the first line that needs a result, such as
# > `.item()`, `.cpu()` or `torch.cuda.synchronize()`, perhaps many layers later, and *on all waiting ranks alike*. It
# > may spin there at 100 % of a core, which looks like work
# > ([CUDA runtime API](https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__DEVICE.html),
# > `cudaSetDeviceFlags`). Then stacks say who stands elsewhere, and little more. Which collective it is, the records of
# > section 3 say.
#
# So stacks are enough as long as they differ. The next program comes from the clinic that we open in section 5, and
# there each program is called a patient. Its user says:

# %%
clinic = hangs.clinic()
clinic[8]

# %%
clinic[8].ask("stacks")

# %% [markdown]
# The next cell shows what each rank has called so far. **Predict**: all ranks stand in the same line, in the same
# function. What could still differ between them?

# %%
clinic[8].ask("flight record")

# %% [markdown]
# **Compare.** The group. `group` is one group on rank 1 and another one on the other ranks, so they wait in two
# different collectives that stand in one line.
#
# A stack has lines of code, but not the *values* of variables. The same happens in any loop: one rank may be in its
# fifth round and the others in their sixth. So we need to know what each rank has *called*, in which group, and how
# often. Where does this record come from?

# %% [markdown]
# ## 3. The flight record, and torchfrtrace in 40 lines
#
# PyTorch notes the last calls of each process group in a ring buffer, the **flight record**. In PyTorch 2.13 it is on
# by default with 2,000 entries; `TORCH_FR_BUFFER_SIZE`, set before the group is made, changes their number. gloo and
# NCCL each have a record of their own. `collect` in section 1 has kept it. An entry has the group, the name of the
# operation, shapes, dtypes and a **sequence number**: each rank counts its own collectives of a group, from 1.

# %%
records = [record for _, record in found]
for one in records:
    names = [f"{entry['collective_seq_id']} {entry['profiling_name']}" for entry in one["entries"]]
    print(f"rank {one['rank']}:", *names, sep="  ")

# %% [markdown]
# Reading this by eye works for three ranks and two calls. With 64 ranks and 2,000 calls a program has to do it, and
# its rule is short. Ranks count the collectives of a group independently, but in a program without a fault they call
# the same ones in the same order. So number 1 must be the same call on all ranks, and number 2, and so on. The first
# number at which they differ is the fault. Everything after it means little, because the ranks are out of step.
#
# First we bring the records into a form in which one call is found by group and number. Sends and receives are left out
# (`is_p2p`), because they are counted in another way.


# %%
def calls_of(record):
    """Calls of one rank: (group, number) -> (operation, shapes, dtypes)."""
    found = {}
    for entry in record["entries"]:
        if not entry["is_p2p"]:
            group = entry["process_group"][0]
            operation = entry["profiling_name"].split(":")[-1]
            shapes, dtypes = entry["input_sizes"], entry["input_dtypes"]
            found[group, entry["collective_seq_id"]] = operation, str(shapes), str(dtypes)
    return found


def members_of(records):
    """Ranks of each group, as any rank knows them."""
    members = {}
    for record in records:
        for name, group in record["pg_config"].items():
            members[name] = [int(rank) for rank in group["ranks"].strip("[]").split(",")]
    return members


# %% [markdown]
# Now the comparison itself. A rank that has not called a number is *missing*; otherwise the calls are compared with the
# one of the lowest rank, first by operation, then by shapes, then by dtypes.


# %%
def first_faults(records):
    """The first fault of each group: (group, number, kind, ranks that differ)."""
    calls = {record["rank"]: calls_of(record) for record in records}
    faults = []
    for group, ranks in sorted(members_of(records).items()):
        numbers = [key[1] for made in calls.values() for key in made if key[0] == group]
        for number in range(1, max(numbers, default=0) + 1):
            made = {rank: calls[rank].get((group, number)) for rank in ranks}
            kind, differing = difference(made)
            if kind:
                faults.append((group, number, kind, differing))
                break
    return faults


def difference(made):
    missing = tuple(rank for rank, call in made.items() if call is None)
    if missing:
        return "missing", missing
    first = made[min(made)]
    for place, kind in enumerate(["operation", "sizes", "dtypes"]):
        differing = tuple(rank for rank, call in made.items() if call[place] != first[place])
        if differing:
            return kind, differing
    return "", ()


# %%
print(first_faults(records))
assert first_faults(records) == [("0", 2, "operation", (1,))]

# %% [markdown]
# Collective number 2 of the default group, and rank 1 differs. The barrier counts as a collective too, and that is why
# rank 1 has a number 2 at all. PyTorch has a tool for this, `torchfrtrace`, which is installed with it and reads one
# file for each rank. With NCCL the ranks write these files themselves when a collective times out: rank 3 writes
# `~/.cache/torch/comm_lib_trace_rank_3` on its own host, unless `TORCH_FR_DUMP_TEMP_FILE` names another place. So look
# there first when a job that had prepared nothing has died. gloo does not write any, so we save them.

# %%
folder = tempfile.TemporaryDirectory()
flight_records.save(records, folder.name)
tool = [Path(sys.executable).with_name("torchfrtrace"), folder.name, "--prefix", "rank_"]
done = subprocess.run(tool, capture_output=True, text=True)
folder.cleanup()
lines = (done.stdout + done.stderr).splitlines()
told = [line for line in lines if "ulprit" in line or "rror" in line]
print(*told, sep="\n")
assert "number: 2 has errors" in told[0] and "Culprit rank 1;" in told[1]

# %% [markdown]
# The tool and our 40 lines say the same. Both share a weakness that is worth knowing: they compare with the *lowest*
# rank. If rank 0 is the one that left the common path, they name all the others. So with three ranks or more look at
# the majority, and with two read the program.
#
# Two details are left out here: a buffer that has already lost its oldest calls, and operations whose shapes may differ
# between ranks, such as gather.

# %% [markdown]
# ## 4. Calls compared before they run
#
# A flight record is read after the fact. PyTorch can also compare the calls of all ranks *before* each collective: with
# `TORCH_DISTRIBUTED_DEBUG=DETAIL` every collective is preceded by an exchange of operation, shape and dtype, and a
# difference is an error at once. It is switched on without a change of the program.


# %% tags=["nbval-ignore-output"]
def collect_in_detail(program):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return collect(program)[0]


with redirect_stdout(StringIO()):
    said = launch(collect_in_detail, train, world_size=world_size, init=False)
print(said[0][:400])
assert all("Detected mismatch between collectives" in text for text in said)

# %% [markdown]
# No rank had to wait for a time-out, and the message has both calls (its `SequenceNumber` counts from 0). The price is
# an exchange before every collective. The next cell, folded, measures it on a small all-reduce.

# %% tags=["nbval-ignore-output"] jupyter={"source_hidden": true}
def microseconds(setting, value):
    os.environ[setting] = value
    dist.init_process_group("gloo")
    x, times = torch.ones(4), []
    for _ in range(100):
        begin = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - begin)
    return sorted(times)[10] * 1e6  # a quick one: this machine may have other work


settings = {
    "neither": ("TORCH_FR_BUFFER_SIZE", "0"),
    "flight record": ("TORCH_FR_BUFFER_SIZE", "2000"),
    "flight record and DETAIL": ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
}
took = {name: [] for name in settings}
for _ in range(2):
    for name, setting in settings.items():
        took[name] += launch(microseconds, *setting, world_size=world_size, init=False)[:1]
for name, times in took.items():
    print(f"{min(times):6.0f} µs  {name}")

# %% [markdown]
# With `DETAIL` a small collective takes several times as long, and a large one feels it less; the record costs
# little and can stay on (gloo, 16 bytes). So `DETAIL` is for a second run, rather than for production.
#
# **Predict**: in the next program one rank passes another reduction. What does the run with `DETAIL` end with?

# %%
fates = ["an error at once", "a time-out", "wrong numbers", "the right numbers"]
fate = predict("DETAIL, with another reduction on one rank", fates)


# %%
def worst_latency():
    mine = torch.tensor([dist.get_rank() + 1.0])
    operation = dist.ReduceOp.SUM if dist.get_rank() == 1 else dist.ReduceOp.MAX
    dist.all_reduce(mine, op=operation)
    return mine.item()


with redirect_stdout(StringIO()):
    results = launch(collect_in_detail, worst_latency, world_size=world_size, init=False)
print(results)

# %% jupyter={"source_hidden": true}
largest = float(world_size)  # what MAX on all ranks would give; two ranks come to it by chance
wrong = any(float(text) != largest for text in results)
assert wrong or world_size == 2
fate.compare("wrong numbers" if wrong else "the right numbers")

# %% [markdown]
# **Compare.** Wrong numbers: no rank has measured more than the number of ranks. `DETAIL` compares operation, shape and
# dtype, but not *how* values are reduced (measured, gloo, PyTorch 2.13).
#
# Such a fault costs more than a hang, since nobody notices. The launcher of this course goes further: with
# `verify=True` it also compares the reduction, the root and the order of the groups.

# %%
with expect_error(MismatchError):
    launch(worst_latency, world_size=world_size, verify=True)

# %% [markdown]
# ## 5. The clinic
#
# Now it is your turn. The clinic has fifteen patients: programs that hang, or are wrong without an error. Each is made
# from a public report and runs on real ranks of this machine. You see the program and what its user says. You ask for
# evidence, and each kind has a price: roughly the minutes that it costs on a cluster. Then you name the cause, the rank
# and the call, and at last you change the program, which is run again.

# %%
clinic.list_evidence()

# %% [markdown]
# We do the first one together.

# %%
patient = clinic[1]
patient

# %% [markdown]
# **Predict**, before you ask for evidence: which line can one rank reach and another not? On what does that depend?

# %%
patient.ask("stacks")

# %% [markdown]
# **Compare.** The branch of the save, which depends on `loss`: rank 1 stands in it and rank 0 behind it, so they
# decided differently.
#
# But this does not say who was wrong. A first idea could be that the save belongs to one rank only, and should not be a
# collective:

# %%
verdict = patient.diagnose("one rank only", rank=1, call="all_gather")
assert not verdict
verdict

# %% [markdown]
# The clinic answers with evidence. `verify` exists only here, so look at what the ranks had *called* before the branch:

# %%
patient.ask("flight record")

# %% [markdown]
# Before the branch both ranks call `reduce`, and this operation leaves its result on one rank only. Rank 0 has the sum
# of both losses. Rank 1 still has its own, and compares that with the best one. The rank with the wrong value is rank
# 1, and the call at fault is neither of the two in which they wait.

# %%
verdict = patient.diagnose("decision on a local value", rank=1, call="reduce")
assert verdict
verdict

# %% [markdown]
# A cure is an edit of the program: old text and new text. Every cure is run.

# %%
cure = patient.treat(edit={"dist.reduce(loss, dst=0)": "dist.all_reduce(loss)"})
assert cure and patient.healed
cure

# %% [markdown]
# The other patients wait for you. Take two or three now; 2, 4 and 6 are good ones to begin with, and 10 to 15 are
# harder. `clinic.list_causes()` shows the names that `diagnose` takes, and `clinic.score()` adds up what your evidence
# has cost. One well-known fault is missing here, a wrong network interface, because it needs a second host: it waits in
# the clinic of [lesson 16](16_multi_node.ipynb).

# %%
patient = clinic[2]  # your choice
patient

# %%
# patient.ask("stacks")
# patient.diagnose("…", rank=0, call="…")
# patient.treat(edit={"old text": "new text"})
clinic.score()

# %% [markdown]
# ## 6. The first ten minutes
#
# On a cluster nobody has a launcher that collects stacks, and a job that hangs is expensive as long as it stands. So
# know the order in which you look before it happens. The cheap looks come first, and nothing is killed before the
# evidence has been saved.
#
# | minute | look at | it tells |
# |---|---|---|
# | 0 | each node: are all processes there? memory, disk, hardware (below) | a dead rank explains all the others |
# | 1 | the log's last step of each rank | since when, and who is behind |
# | 2 | stacks of all ranks, twice, some seconds apart | who waits, who computes, who stands elsewhere |
# | 5 | flight records of all ranks (unprepared: after the time-out) | the first call that differs |
# | 8 | the watchdog's messages, group by group (section 7) | who is silent, who has called less |
# | 10 | save all of it, then restart; for a second try use few ranks, all with `DETAIL` | whether it comes back |
#
# Four looks at a node say whether the hardware has failed (from NVIDIA's documents on
# [Xid](https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), [errors of
# memory](https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/user-visible-statistics.html) and
# [DCGM](https://docs.nvidia.com/datacenter/dcgm/latest/reference/command-line-reference/dcgmi/dcgmi-diag.html); they
# were not run here):
#
# | look | what is bad |
# |---|---|
# | `dmesg -T`, lines with `Xid` | 79, the GPU is off the bus; 48, 94, 95, memory errors that ECC cannot correct |
# | `nvidia-smi -q -d ECC,ROW_REMAPPER` | uncorrectable errors; *Pending*: a bad row is replaced at the next reset |
# | `ibstat`, `perfquery` | an InfiniBand port that is not *Active*; counters of errors that grow |
# | `dcgmi diag -r 1`, `-r 2`, `-r 3` | a test that fails: in seconds, in about 2 minutes, in about 15 |
#
# The last one uses the GPUs, so run it when the job is gone. A node that fails is taken out, and the job starts again
# without it.
#
# What has to be on *before* it happens costs little: a place for the dumps that outlives the job
# (`TORCH_FR_DUMP_TEMP_FILE`; an older PyTorch needs `TORCH_NCCL_DUMP_ON_TIMEOUT=1`), a time-out that fits the longest
# healthy step, and `faulthandler.register(signal.SIGUSR1)` so that a rank can be asked for its stack.
# [`scripts/train.py`](../scripts/train.py) has the time-out, and gets the rest from the next program, beside it.
#
# [`scripts/where.py`](../scripts/where.py) takes the two looks in the middle. It finds the ranks on a host, asks them
# for stacks and flight records, looks again some seconds later, and says *moving* or who waits for whom. It needs
# neither root nor the course. A program gets ready for it with one line, `where.listen(folder)`, before it makes its
# process group. Then a rank answers with the records of gloo and of NCCL (the latter was tested with a stand-in, and
# not on a GPU). `python where.py --help` has the line that asks all hosts of a Slurm or Kubernetes job, and `--merge`,
# which compares their answers.
#
# PyTorch 2.13 has a tool of its own, `torch.distributed.debug.start_debug_server()`, called on all ranks. It shows
# stacks, both records and profiles of all hosts in a browser, so it is better where you have no shell on the hosts, or
# look at a job that is only slow. It needs jinja2 and aiohttp, names no culprit, and is insecure by design: whoever
# reaches its port can use it.
#
# We try it on the program of section 1, as a job that plain `torchrun` starts. `torchrun_job` writes the program with
# this line to a file, starts it, and ends it after the block.

# %%
with torchrun_job(train, world_size) as pid:
    said = examine(pid)  # python scripts/where.py PID
print(said)
assert "look at rank 1" in said

# %% [markdown]
# From the flight records it knows what each rank has called, and it names rank 1 with both lines. (The number is 3
# rather than 2, because this job begins with a barrier.) Had the program not
# prepared anything, it would still have found ranks that are gone, stopped or computing, and the stacks where py-spy
# is installed. Try it on your next job while that still runs well: a tool that you first start during an outage is
# a tool that is not installed.

# %% [markdown]
# ## 7. Watchdog logs of real clusters
#
# With NCCL a thread in each rank, the **watchdog**, waits beside the program. When a collective has not ended in time,
# it writes the number of the call in its group, its operation and its size, and in a second line the group and the
# numbers of the last call that was enqueued and of the last one that was completed. `read` collects these lines. First
# a log that looks as most do (*recorded*, an excerpt,
# [open-r1#620](https://github.com/huggingface/open-r1/issues/620)).

# %%
logs, _ = load_recording("watchdog_logs")
for one in read(logs["silent"]["lines"]):
    print(f"rank {one.rank} waits in number {one.number}: {one.operation}, {one.elements} elements")

# %% [markdown]
# All numbers are equal, as they nearly always are: an all-reduce ends on no rank before all ranks of its group have
# joined it, so nobody gets far ahead (in a broadcast or a reduce some ranks may end early). So look for the rank that
# does *not* report, here 0, 4, or one above 6. If all report, compare the last *enqueued* numbers: the lowest is the
# rank that has called least. In the next log the numbers differ
# ([torchtune#2266](https://github.com/meta-pytorch/torchtune/pull/2266)).
#
# **Predict**: rank 1 has completed three reduce-scatters that rank 0 has not. How can that be?

# %%
for one in read(logs["out_of_step"]["lines"]):
    print(f"rank {one.rank}, group {one.group}: waits in {one.number}, {one.elements:,} elements")
    print(f"    last completed {one.completed}, last enqueued {one.enqueued}")

# %% jupyter={"source_hidden": true}
kind, why = conclusion(read(logs["out_of_step"]["lines"]), world_size=2)
assert kind == "out of step"
print(kind, why, sep=": ")

# %% [markdown]
# **Compare.** The calls of rank 1 are small. NCCL does not compare sizes, so they could complete with bytes of rank 0's
# large call 420, which were not meant for them.
#
# That is our reading, because the thread does not say it; NCCL's guide says that different sizes may end in hangs,
# crashes or corrupt data
# ([NVIDIA](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html)). So calls that do not fit
# can *end*, and the hang comes later. Which of the two ranks took the wrong way, the program must tell. Now the log of
# the opening, with the number of the step in which it was written.

# %%
log = logs["group_not_named"]
print(*log["lines"], sep="\n")

# %% [markdown]
# **Predict**: what has rank 7 left out?

# %%
omitted = ["32,000 calls", "one call in each step", "nothing that these lines show"]
left_out = predict("rank 7 has left out", omitted)

# %%
for one in read(log["lines"]):
    per_step = one.number / log["step"]
    print(f"rank {one.rank}, group {one.group}: call {one.number:,}, {per_step:.3f} a step")

# %% jupyter={"source_hidden": true}
waiting = read(log["lines"])
assert [round(one.number / log["step"], 2) for one in waiting] == [3, 3, 3, 2]
assert conclusion(waiting, world_size=8)[0] == "several groups"
assert "ran for 25624887 " in log["lines"][0] and round(25624887 / 3.6e6, 1) == 7.1
left_out.compare("nothing that these lines show")

# %% [markdown]
# **Compare.** Nothing that these lines show. In one group rank 0 could not be past call 64,089 while rank 7 is in
# 64,088. So the numbers count different groups: one has three calls in a step, the other has two.
#
# That there are several groups shows in rank 0 too, which waits in three calls. Messages of that time do not name the
# group, and their rank is the rank *in* the group, so several processes can be called rank 0. Newer ones name it, as
# `PG GUID 0(default_pg)`. So **compare numbers inside one group only**, and where the log names none, use the flight
# records. These lines have another riddle: they waited for 7.1 hours, with a limit of half an hour. A watchdog that
# notices so late has been standing still itself, or its clock has, so perhaps no program was at fault.

# %% [markdown] tags=["deeper"]
# ## 8. Symptom and cause, computed · deeper
#
# Which tool names which fault? The clinic asks some patients for each kind of evidence, and notes whether it tells the
# ranks apart. The tools are those of the sections before, and three more. A *monitored barrier* names the ranks that do
# not come to it, as long as rank 0, which collects the names, comes itself (section 9). A *fingerprint* is a checksum
# of each tensor, to be compared between the ranks. `verify` is the launcher's comparison.
#
# **Predict**: patient 12 ends without an error, but its ranks no longer have the same model. How many of the six will
# notice anything?

# %% tags=["deeper"]
noticing = predict("tools that notice patient 12", unit="of six")

# %% tags=["deeper"]
chosen = [hangs.clinic()[number] for number in (2, 6, 8, 9, 12)]
names = hangs.who_names_it(chosen)
names

# %% tags=["deeper"] jupyter={"source_hidden": true}
marks = {row[0]: row[1:] for row in names.rows}
assert marks["6"] == ["no", "yes", "no", "no", "no", "no"]
assert marks["12"] == ["no", "no", "no", "no", "yes", "no"]
noticing.compare(marks["12"].count("yes"))
for patient in chosen:
    print(f"{patient.number}: {patient.complaint}")

# %% [markdown] tags=["deeper"]
# **Compare.** One, the fingerprint. In patient 12 all ranks call the same things with the same arguments. What is wrong
# is what they do *not* call, and only the weights show it.
#
# A yes is not yet a fault: in patient 2 the fingerprints differ because each rank has a shard of its own, as it should.
# In patient 6 both ranks stand in the same line and have called no collective, so stacks and records are alike, and
# `DETAIL` compares collectives only. `verify` sees the circle of messages. Patient 8 has equal stacks too, but its
# records differ because a record knows the group. Patient 9 does not hang, and only a comparison of the reductions
# finds it.
#
# So no tool finds everything. This is what all fifteen patients have in common (a test of the course computes their
# rows). What differs under NCCL is from public threads, and was not run here:
#
# | what you see, with gloo | under NCCL | look for | patients |
# |---|---|---|---|
# | ranks in different lines | often all in one `.item()` | a condition; the rounds of a loop | 1-5, 11, 14 |
# | all in one line of a collective | may go on, or hang later (a) | order of groups; another round | 8 |
# | all in `recv` | all in `send` hangs too (b) | both receive, or both send, first | 6 |
# | one waits, another has ended | perhaps the other one (c), or later (d) | a message or root of one side | 10, 13 |
# | an error on one, the others wait | the same | the error, before anything else | 7, 15 |
# | no hang, an impossible number | the same; other sizes too (section 7) | another reduction | 9 |
# | no hang, ranks drift apart | the same | gradients not reduced, other seeds | 12 |
#
# (a) Two groups may run at once on a GPU; the job stands still when a rank also waits for its GPU in between
# ([torchrec#4149](https://github.com/meta-pytorch/torchrec/pull/4149)). (b)
# [nccl#479](https://github.com/NVIDIA/nccl/issues/479). (c)
# [nccl#2130](https://github.com/NVIDIA/nccl/issues/2130). (d)
# [pytorch#39706](https://github.com/pytorch/pytorch/issues/39706).

# %% [markdown] tags=["deeper"]
# ## 9. Time-outs of sub-groups, and a barrier that names the absent · deeper
#
# A program passes a time-out of 4 s to `init_process_group`, and then makes a second group.
#
# **Predict**: what is the time-out of that group, if `new_group` gets none?

# %% tags=["deeper"]
inherited = predict("time-out of the second group", unit="s")


# %% tags=["deeper"]
def time_outs():
    ranks, four = [*range(dist.get_world_size())], timedelta(seconds=4)
    groups = {"default": dist.group.WORLD, "new_group": dist.new_group(ranks),
              "new_group with a time-out": dist.new_group(ranks, timeout=four)}
    cpu = torch.device("cpu")
    return {name: str(group._get_backend(cpu).options._timeout) for name, group in groups.items()}


def with_four_seconds(program):
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    return program()


limits = launch(with_four_seconds, time_outs, world_size=world_size, init=False)[0]
for name, limit in limits.items():
    print(f"{limit}  {name}")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert [*limits.values()] == ["0:00:04", "0:30:00", "0:00:04"]
inherited.compare(30 * 60)

# %% [markdown] tags=["deeper"]
# **Compare.** Half an hour, the default (gloo, PyTorch 2.13): it does not inherit.
#
# A job that was told to give up after four seconds waits for 30 minutes as soon as its fault lies in a sub-group, and
# tensor, pipeline and expert parallelism use nothing but sub-groups. vLLM has met this too
# ([vllm#45159](https://github.com/vllm-project/vllm/pull/45159)). So pass `timeout=` to each `new_group`;
# `scripts/train.py` sets it for all groups of its mesh.
#
# One operation names those who did not come: `monitored_barrier`. Rank 0 collects a message from each rank, and knows
# after the time-out who is missing. It is part of gloo, so with NCCL you need a second group, made with
# `backend="gloo"`.


# %% tags=["deeper", "nbval-ignore-output"]
def absent():
    if dist.get_rank() == 1:
        time.sleep(2)
        return "came late"
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    except RuntimeError as error:
        time.sleep(1.5)  # a rank that left at once would break the connections of the others
        return str(error).splitlines()[0]


answers = launch(with_four_seconds, absent, world_size=world_size, init=False)
print(*answers[:2], sep="\n")
assert "Ranks 1 failed to pass monitoredBarrier" in answers[0]

# %% [markdown] tags=["deeper"]
# Rank 0 has the name, and the others are sent to its log. Use it where ranks should be together and often are not, as
# after loading a checkpoint.

# %% [markdown] tags=["deeper"]
# ## 10. NaN on one rank · deeper
#
# One corrupt sample makes one loss NaN on one rank. **Predict**: after one step of DDP, on which ranks are there NaNs
# in the weights, and which weights are hit?

# %% tags=["deeper"]
spread = predict("NaN in the weights of", ["no rank", "rank 1", "all ranks"])


# %% tags=["deeper"]
def corrupt_sample():
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 2)
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return bool(loss.isfinite()), model.module.weight.isfinite().flatten().tolist()


after = launch(corrupt_sample, world_size=world_size, backend="gloo")
for rank, (loss_fine, weights_fine) in enumerate(after):
    print(f"rank {rank}: loss finite {loss_fine}, weights finite {weights_fine}")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert [loss_fine for loss_fine, _ in after] == [rank != 1 for rank in range(world_size)]
assert all(weights_fine == [False, True] for _, weights_fine in after)
spread.compare("all ranks")

# %% [markdown] tags=["deeper"]
# **Compare.** On all ranks: a sum with a NaN is NaN, so one all-reduce carries it to everybody. The weight that is hit
# belongs to the corrupt feature; the next forward makes everything NaN.
#
# The loss was NaN on rank 1 only, and one step later nobody can say where it began.
#
# To find the rank, log each rank's own loss *before* the reduction, because after it the evidence is gone. Under NCCL
# `TORCH_NCCL_NAN_CHECK=1` stops the rank that is about to send a NaN
# ([PyTorch](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html); not run here).
#
# If you want to skip such a batch, it is tempting to write `if not loss.isfinite(): continue`. That is patient 4 again:
# rank 1 leaves out the all-reduces of backward, and the others wait. All ranks have to decide alike, on a value that is
# equal on all of them. The norm of the *reduced* gradients is such a value and costs no collective of its own: call
# `optimizer.step()` only if `clip_grad_norm_` has returned a finite norm.

# %% [markdown] tags=["deeper"]
# ## 11. Before the first collective · deeper
#
# A job can also hang before it begins. Ranks find each other in a **store**, a small server on the first rank's host,
# and wait there until as many have come as they were told to expect. **Predict**: `WORLD_SIZE` says one more than there
# are processes. Which ranks notice?

# %% tags=["deeper"]
ranks = ["all ranks", "the first rank", "the last rank"]
notice = predict("a process too few is noticed by", ranks)


# %% tags=["deeper", "nbval-ignore-output"]
def one_too_many(port):
    first, count = dist.get_rank() == 0, dist.get_world_size() + 1
    try:
        dist.TCPStore("127.0.0.1", port, count, is_master=first, timeout=timedelta(seconds=2))
    except dist.DistError as error:
        return str(error).splitlines()[0]
    return "has joined"


with socket.create_server(("127.0.0.1", 0)) as server:
    free_port = server.getsockname()[1]
said = launch(one_too_many, free_port, world_size=world_size, backend="gloo")
for rank, text in enumerate(said):
    print(f"rank {rank}: {text}")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert f"{world_size}/{world_size + 1} clients joined" in said[0]
assert set(said[1:]) == {"has joined"}
notice.compare("the first rank")

# %% [markdown] tags=["deeper"]
# **Compare.** Only the first rank, which counts the others; its message has both numbers.
#
# So before the first collective look at the log of rank 0, and compare the two numbers with what the scheduler has
# started: a process too few, a stale `WORLD_SIZE`, or a rank that died on the way. What else can go wrong here (names,
# addresses, interfaces, ports that are taken or closed) is in the network clinic of [lesson 16](16_multi_node.ipynb).

# %% [markdown] tags=["deeper"]
# ## 12. In production · deeper
#
# At 16,384 GPUs something breaks every few hours. Meta counted 419 unexpected interruptions in 54 days of training
# Llama 3 405B (*recorded*, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4). **Predict**: if each
# of them were noticed only by a time-out of 30 minutes, how many GPU-hours would be spent on waiting?

# %% tags=["deeper"]
waited = predict("spent on waiting", unit="million GPU-hours")

# %% tags=["deeper"]
stops, days, gpus = LLAMA3_INTERRUPTIONS
for minutes in (30, 10, 1):
    lost = stops * gpus * minutes / 60
    share = lost / (days * 24 * gpus)
    print(f"after {minutes:2} min: {lost / 1e6:.2f} million GPU-hours, {share:.1%} of the run")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert round(stops * gpus * 0.5 / 1e6, 2) == 3.43
waited.compare(stops * gpus * 0.5 / 1e6)

# %% [markdown] tags=["deeper"]
# **Compare.** 3.4 million GPU-hours, or 16 % of the run (*modelled*: every stop a silent one, and nothing else lost).
#
# That is why large jobs do not wait for a time-out. They watch a heartbeat, such as the step number of each rank, and
# collect evidence by program as soon as it stands still.
#
# - NCCL's **RAS** (reliability, availability, serviceability) is a thread in every process, from NCCL 2.24 on.
#   `ncclras` on any host of the job asks it, at port 28028. An answer in [NVIDIA's
#   guide](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html) (*recorded* there) says
#   `26 ranks have launched up to operation 6650`, `6 ranks have launched up to operation 6649`, and lists the six. That
#   is harmless while the numbers grow. If they are the same when you ask again, look at the six. A process that does
#   not answer is named with its host and GPU.
# - Before a job gets a node, a quick `dcgmi diag` and a short measurement of bus bandwidth find a bad one more cheaply
#   than the job does. 220 of the 419 stops were faults of GPUs or their memory (the same paper).
# - The watchdog has a watchdog: PyTorch's **heartbeat monitor** ends a rank whose watchdog thread itself is stuck
#   (`TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`). Its message is about this thread, and not about your program.
# - A slow GPU is no hang, and all others wait for it all the same. [Lesson 13](13_profiling.ipynb) finds it, and
#   [lesson 16](16_multi_node.ipynb) is about starting again without the host that failed.

# %% [markdown] tags=["deeper"]
# ## 13. A debugger on one rank · deeper
#
# A debugger answers questions that come up while you look. A rank that calls `breakpoint()` opens pdb in the cell's own
# prompt, and no time-out runs meanwhile. With `post_mortem=True` pdb opens on a rank that has failed, with its
# variables. Here one rank fails: set `look = True`, run the cell, and type `p mine`, then `q`. What does not fit?

# %% tags=["deeper"]
look = False  # True: examine the rank that fails


def average_sample():
    n = dist.get_world_size()
    mine = torch.ones(3 * n + 1).chunk(n)[dist.get_rank()]
    batch = torch.zeros(4) + mine
    dist.all_reduce(batch)
    return batch / n


with expect_error():
    launch(average_sample, world_size=world_size, post_mortem=look)

# %% [markdown] tags=["deeper"]
# Its share is too short, which a data loader avoids with `drop_last=True`. Under `torchrun`, in a terminal,
# `torch.distributed.breakpoint(rank=2)` stops one rank
# ([PyTorch](https://docs.pytorch.org/docs/stable/distributed.html)).

# %% [markdown]
# ## Recap, with the numbers of this run

# %%
group, number, kind, ranks = first_faults(records)[0]
print(f"collective {number} of group {group}: {kind} differs on rank {ranks[0]}")
healed = sum(patient.healed for patient in clinic)
print(f"healed here: {healed} of {len(clinic)} patients")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - A time-out proves that somebody did not come. Who reports it is a witness.
# - Stacks show lines. They cannot show which group, which round or which value.
# - A flight record numbers the calls of each group. The first number at which ranks differ is the fault.
# - Numbers are compared inside one group only. Old logs do not name it.
# - `DETAIL` compares operation, shape and dtype before each call. It does not compare the reduction.
# - Save the evidence before you restart, and have the settings on before it happens.
#
# **Now you can answer**
#
# 1. Seven of eight ranks report a time-out. Which one do you look at?
# 2. All stacks are equal. Name two things that may still differ.
# 3. The last collective that rank 0 has *enqueued* is 412, that of all others 415, in one group. Who is behind, and who
#    is to blame?
# 4. A job hangs only in epochs in which the loss improves. What do you look for?
# 5. An all-reduce is SUM on one rank and MAX on the others. What do DETAIL and the flight record say?
#
# <details><summary>Answers</summary>
#
# 1. First at the eighth, and then at the first call in which records differ (sections 1 and 3).
# 2. The group in which they wait, and the number of the call, such as the round of a loop (section 2).
# 3. Rank 0 is behind. Whether it left out calls or the others made too many, the program must tell (section 7).
# 4. A decision on a value that is not equal on all ranks (section 5).
# 5. Nothing. The result is wrong on all ranks (section 4).
# </details>
#
# **What to take to work:** [scripts/where.py](../scripts/where.py), which needs neither root nor this course.
#
# **Exercises:** [exercises/14_debugging_hangs](../exercises/14_debugging_hangs_exercises.ipynb). **Next:**
# [15 ffcv data loading](15_ffcv_data_loading.ipynb), which asks whether the GPU waits for its data.
#
# **Worth reading**
# - PyTorch, [Flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html): variables,
#   file format and `torchfrtrace`.
# - NVIDIA, [NCCL's RAS](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html): what a
#   running NCCL can tell about its communicators.
# - S. Bekman, [ML engineering](https://github.com/stas00/ml-engineering), on debugging: a practitioner's notes.
