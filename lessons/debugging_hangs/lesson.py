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
# In one public report eight GPUs stop during training, and every rank writes that a collective has timed out. Seven of
# them wait in calls near number 96,120. The eighth is 32,000 calls behind them, and its message looks like all the
# others ([pytorch#118369](https://github.com/pytorch/pytorch/issues/118369)). That is how most hangs look. One rank
# does something else than the others, the others wait for it, and the error comes from those that did nothing wrong. In
# this lesson you make programs hang, collect what each rank knows, and find the rank, the call and the line.
#
# **You will be able to**
# - *say* what a time-out proves, and what it does not;
# - *read* the stacks of all ranks, and *notice* when they cannot help;
# - *compare* the flight records of all ranks with 40 lines of your own;
# - *choose* the check that names a fault, and know the faults that it misses;
# - *diagnose* and *mend* programs that were reported in public, and *examine* a job that hangs on a cluster.
#
# **Before this:** [02 collectives](02_collectives.ipynb), [04 ddp](04_ddp.ipynb). **Time:** about 35 minutes to read
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
# **Predict**: which ranks report an error, and does any message name rank 1?


# %% tags=["nbval-ignore-output"]
def collect(program):
    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"  # for section 3
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    try:
        said = str(program())
    except RuntimeError as error:
        said = str(error).split("] ")[-1]
    return said, flight_records.record()


with redirect_stdout(StringIO()):  # without the launcher's remark
    found = launch(collect, train, world_size=world_size, init=False)
for rank, (said, _) in enumerate(found):
    print(f"rank {rank}: {said}")
assert not any("done" in said or "rank 1" in said for said, _ in found)

# %% [markdown]
# Every rank reports, and no message names a rank or the branch. Rank 1 complains as well, because it waits too: it has
# gone on to the barrier, which the others have not reached. So a time-out proves one thing only, that *somebody* did
# not come. Which rank writes first depends on who began to wait first, and that says nothing about guilt. The number
# of seconds says how long a rank waited. It does not say when the fault happened, which may have been much earlier.
#
# > **Misconception.** "The rank with the error is the broken one." It is a witness. The rank at fault often waits
# > somewhere else, still computes, or has written nothing at all.

# %% [markdown]
# ## 2. Stacks, and when all of them are equal
#
# The first question at a job that hangs is where each rank stands. `py-spy dump --nonblocking --pid PID` prints the
# Python stack of a process without pausing it, and `faulthandler` makes a rank write its own. The launcher of this
# course collects stacks when ranks wait for too long, and shows the innermost line of your code. Here is the same
# program again.

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
# **Predict**: all ranks stand in the same line, in the same function. What could still differ between them? The next
# cell shows what each rank has called so far.

# %%
clinic[8].ask("flight record")

# %% [markdown]
# The group. A stack has lines of code, but it does not have the *values* of variables. Here `group` is one group on
# rank 1 and another one on the other ranks, so they wait in two different collectives that stand in one line. The same
# happens in any loop: one rank may be in its fifth round and the others in their sixth. So we need to know what each
# rank has *called*, in which group, and how often. Where does this record come from?

# %% [markdown]
# ## 3. The flight record, and torchfrtrace in 40 lines
#
# PyTorch can note the last calls of each process group in a ring buffer, the **flight record**. In PyTorch 2.13
# it is on by default with 2,000 entries; `TORCH_FR_BUFFER_SIZE`, set before the group is made, changes their number, as
# `collect` did in section 1. gloo and NCCL each have a record of their own. An entry has the group, the name of the
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
# `flight_records.faults` is the same rule with two details added: a buffer that has already lost its oldest calls, and
# operations whose shapes may differ between ranks, such as gather.

# %%
fault = flight_records.faults(records)[0]
print(fault)
assert (fault.group, fault.number, fault.kind, fault.ranks) == first_faults(records)[0]

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
# No rank had to wait for a time-out, and the message has both calls. The price is an exchange before every collective,
# so `DETAIL` is for a second run rather than for production.
#
# **Predict**: in the next program one rank passes another reduction. Will `DETAIL` find it?


# %%
def worst_latency():
    mine = torch.tensor([dist.get_rank() + 1.0])
    operation = dist.ReduceOp.SUM if dist.get_rank() == 1 else dist.ReduceOp.MAX
    dist.all_reduce(mine, op=operation)
    return mine.item()


with redirect_stdout(StringIO()):
    results = launch(collect_in_detail, worst_latency, world_size=world_size, init=False)
print(results, "where the largest value is", float(world_size))
assert all("mismatch" not in text for text in results)

# %% [markdown]
# It does not. All ranks finish, with a wrong number, because `DETAIL` compares operation, shape and dtype, but not
# *how* values are reduced (measured, gloo, PyTorch 2.13). Such a fault costs more than a hang, since nobody notices.
# The launcher of this course goes further: with `verify=True` it also compares the reduction, the root and the order of
# the groups.

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
# **Predict** before you ask: which line can two ranks reach differently, and what does that depend on?

# %%
patient.ask("stacks")

# %% [markdown]
# Rank 1 stands in the branch and rank 0 behind it, so they decided differently. But this does not say who was wrong. A
# first idea could be that the save belongs to one rank only, and should not be a collective:

# %%
verdict = patient.diagnose("one rank only", rank=1, call="all_gather")
assert not verdict
verdict

# %% [markdown]
# The clinic answers a wrong diagnosis with evidence. So look at what the ranks had *called* before they came to the
# branch:

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
# evidence has been saved, because a restart destroys it.
#
# | minute | look at | it tells |
# |---|---|---|
# | 0 | are all processes there? memory, disk, kernel log of the hosts | a rank that died needs no further theory |
# | 1 | the log's last step of each rank | since when, and who is behind |
# | 2 | stacks of all ranks, twice, some seconds apart | who waits, who computes, who stands elsewhere |
# | 5 | flight records of all ranks | the first call that differs |
# | 8 | the watchdog's messages: the lowest sequence number | the rank that is behind |
# | 10 | save all of it, then restart, with `DETAIL` on few ranks | whether it comes back |
#
# What has to be on *before* it happens costs little: a place for the dumps that outlives the job
# (`TORCH_FR_DUMP_TEMP_FILE`) with `TORCH_NCCL_DUMP_ON_TIMEOUT=1`, a time-out that fits the longest healthy step instead
# of the default, and `faulthandler.register(signal.SIGUSR1)` so that a rank can be asked for its stack.
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
#
# **Predict**: all ranks wait. What does `where.py` have to know, beside the stacks, to tell which of them is at fault?

# %%
with torchrun_job(train, world_size) as pid:
    said = examine(pid)  # python scripts/where.py PID
print(said)
assert "look at rank 1" in said

# %% [markdown]
# It knows what each rank has called, from the flight records, and it names rank 1 with both lines. Had the program not
# prepared anything, it would still have found ranks that are gone, stopped or computing, and the stacks where py-spy
# is installed. Try it on your next job while that still runs well: a tool that you first start during an outage is
# a tool that is not installed.

# %% [markdown] tags=["deeper"]
# ## 7. Symptom and cause, computed · deeper
#
# Which tool names which fault? Such tables are often copied from one text to the next, so here it is computed: the
# clinic asks some patients for each kind of evidence, and notes whether it tells the ranks apart. The tools are those
# of the sections before, and three more. A *monitored barrier* names the ranks that do not come to it, as long as rank
# 0, which collects the names, comes itself (section 9). A *fingerprint* is a checksum of each tensor, to be compared
# between the ranks. `verify` is the launcher's comparison.
#
# **Predict** for patient 6, in which two neighbours both receive first, and for patient 12, which ends without an
# error: which of the six will notice anything?

# %% tags=["deeper"]
chosen = [hangs.clinic()[number] for number in (2, 6, 8, 9, 12)]
names = hangs.who_names_it(chosen)
names

# %% tags=["deeper"]
marks = {row[0]: row[1:] for row in names.rows}
assert marks["6"] == ["no", "yes", "no", "no", "no", "no"]
assert marks["12"] == ["no", "no", "no", "no", "yes", "no"]
for patient in chosen:
    print(f"{patient.number}: {patient.complaint}")

# %% [markdown] tags=["deeper"]
# A yes is not yet a fault: in patient 2 the fingerprints differ because each rank has a shard of its own, as it should.
#
# In patient 6 both ranks stand in the same line and have called no collective, so stacks and records are alike, and
# `DETAIL` compares collectives only. `verify` sees the circle of messages. Patient 8 has equal stacks too, but its
# records differ because a record knows the group. Patient 9 does not hang, and only a comparison of the reductions
# finds it. In patient 12 all ranks call the same things with the same arguments. What is wrong is what they do *not*
# call, and only the weights show it.
#
# So no tool finds everything. A test of this course computes the rows of all fifteen patients; this is what they
# have in common:
#
# | what you see | look for | patients |
# |---|---|---|
# | ranks in different lines | a condition on the rank, on data, on chance; the number of rounds | 1 to 5, 11, 14 |
# | all in one line of a collective | groups used in another order, another round of a loop | 8 |
# | all in `recv` | both receive first | 6 |
# | one rank waits, another has ended | a message or a root that only one side knows | 10, 13 |
# | an error on one rank, the others wait | the error, before anything else | 7, 15 |
# | no hang, an impossible number | another reduction | 9 |
# | no hang, ranks drift apart | gradients that were never reduced, other seeds | 12 |

# %% [markdown] tags=["deeper"]
# ## 8. Watchdog logs of real clusters · deeper
#
# With NCCL a thread in each rank, the **watchdog**, waits beside the program. When a collective has not ended in time,
# it writes the number of the call, its operation and its size, and then the numbers of the last call that was enqueued
# and of the last one that was completed. These lines are from a public log of two ranks (*recorded*,
# [torchtune#2266](https://github.com/meta-pytorch/torchtune/pull/2266)).

# %% tags=["deeper"]
logs, _ = load_recording("watchdog_logs")
print(*logs["out_of_step"]["lines"], sep="\n\n")

# %% [markdown] tags=["deeper"]
# **Predict**: both ranks wait in a reduce-scatter. Why does it not end?

# %% tags=["deeper"]
waiting = read(logs["out_of_step"]["lines"])
kind, why = conclusion([*waiting.values()], world_size=2)
print(kind, why, sep=": ")
assert kind == "out of step"

# %% [markdown] tags=["deeper"]
# They are in different calls: 420 and 423, with 8,208,384 elements and 64. Rank 1 has gone through three calls for
# which rank 0 never came, or rank 0 took a longer way through the layers. A log cannot tell which of the two was meant,
# and the program can.
#
# The log of the opening is from a job with 8 GPUs. Its last step is known, so the numbers can be divided by it.

# %% tags=["deeper"]
log = logs["two_a_step"]
for rank, one in read(log["lines"]).items():
    per_step = one.number / log["step"]
    print(f"rank {rank}: call {one.number:,} at step {log['step']:,}, {per_step:.3f} a step")
    assert round(per_step, 2) == {0: 3, 7: 2}[rank]

# %% [markdown] tags=["deeper"]
# Rank 7 makes two calls in a step where rank 0 makes three. So the fault did not happen in the last step: the ranks
# have been out of step since the first one, and what stopped the job was only its end. This division takes a minute,
# and it needs the number of the step in the log.

# %% [markdown] tags=["deeper"]
# ## 9. Time-outs of sub-groups, and a barrier that names the absent · deeper
#
# The time-out that you pass to `init_process_group` holds for the default group.
#
# **Predict**: what is the time-out of a group that `new_group` makes afterwards?


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
assert [*limits.values()] == ["0:00:04", "0:30:00", "0:00:04"]

# %% [markdown] tags=["deeper"]
# Half an hour, the default (gloo, PyTorch 2.13). A job that was told to give up after four seconds waits for 30
# minutes as soon as its fault lies in a sub-group, and tensor, pipeline and expert parallelism use nothing but
# sub-groups. vLLM has met this too ([vllm#45159](https://github.com/vllm-project/vllm/pull/45159)). So pass `timeout=`
# to each `new_group`; `scripts/train.py` sets it for all groups of its mesh.
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
# Rank 0 has the name, and the others are sent to its log. Use it where ranks should be together and often are not:
# after loading a checkpoint, before the first step, at the end of an epoch. It is no cure for a missing call.

# %% [markdown] tags=["deeper"]
# ## 10. NaN on one rank · deeper
#
# One corrupt sample makes one loss NaN on one rank. **Predict**: after one step of DDP, on which ranks are there NaNs
# in the weights, and which weights are hit?


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
assert [loss_fine for loss_fine, _ in after] == [rank != 1 for rank in range(world_size)]
assert all(weights_fine == [False, True] for _, weights_fine in after)

# %% [markdown] tags=["deeper"]
# On all ranks: a sum with a NaN is NaN, so one all-reduce carries it to everybody. The loss was NaN on rank 1 only, and
# one step later nobody can say where it began. The weight that is hit belongs to the corrupt feature; the next forward
# makes everything NaN.
#
# Who wants to skip such a batch is tempted to write `if not loss.isfinite(): continue`. That is patient 4 again: rank
# 1 leaves out the all-reduces of backward, and the others wait. The decision has to be taken by all, on a value that
# all of them have. The norm of the *reduced* gradients is such a value, because it is equal on all ranks.


# %% tags=["deeper"]
def skip_by_all():
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bad = 0
    for step in range(3):
        x = torch.ones(1, 2)
        if dist.get_rank() == 1 and step == 1:
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        model(x).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        bad += not norm.isfinite()
        if norm.isfinite():
            optimizer.step()
    return int(bad), bool(model.module.weight.isfinite().all())


skips = launch(skip_by_all, world_size=world_size, backend="gloo")
print("batches skipped, weights finite:", *skips)
assert skips == [(1, True)] * world_size

# %% [markdown] tags=["deeper"]
# All ranks skip the same batch, without a collective of its own. To find the rank, log each rank's own loss *before*
# the reduction, because after it the evidence is gone.

# %% [markdown] tags=["deeper"]
# ## 11. DDP that outlives its group · deeper
#
# (Patient 15 is about the same fault. If you want to find it by yourself, do that first.)
#
# A program that starts again inside its process, as tests and notebooks do, destroys the process group and makes a new
# one. **Predict**: a model that was wrapped by DDP before is used afterwards. Will it take the new group?


# %% tags=["deeper"]
def outlive():
    module = torch.nn.Linear(2, 1)
    model = DDP(module)
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    try:
        model(torch.ones(1, 2)).sum().backward()
        said = "worked"
    except KeyError as error:
        said = "KeyError: " + ("ProcessGroup" if "ProcessGroup" in str(error) else str(error))
    del model
    module.zero_grad()
    model = DDP(module)  # made anew, for the new group
    model(torch.ones(1, 2)).sum().backward()
    return said, module.weight.grad.tolist()


said, gradient = launch(with_four_seconds, outlive, world_size=world_size, init=False)[0]
print(f"the old DDP: {said}; made anew: gradient {gradient}")
assert said == "KeyError: ProcessGroup" and gradient == [[1.0, 1.0]]

# %% [markdown] tags=["deeper"]
# No: DDP keeps the group that it was made with, and PyTorch 2.13 has already forgotten that one. The message is a bare
# `KeyError` with an address, which says nothing to whoever reads it. Wrap the module anew after each
# `init_process_group`; its weights stay. The order at the end matters as well: let go of the wrapped model first, and
# destroy the group after that. Reports on making groups twice go back to 2021
# ([pytorch#55967](https://github.com/pytorch/pytorch/issues/55967)).

# %% [markdown] tags=["deeper"]
# ## 12. Before the first collective · deeper
#
# A job can also hang before it begins. Ranks find each other in a **store**, a small server on the first rank's host,
# and wait there until as many have come as they were told to expect. **Predict**: `WORLD_SIZE` says one more than there
# are processes. Which ranks notice, and do they say how many are missing?


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
assert f"{world_size}/{world_size + 1} clients joined" in said[0]

# %% [markdown] tags=["deeper"]
# Only the first rank, which counts the others; its message has both numbers. So before the first collective look at the
# log of rank 0, and compare the two numbers with what the scheduler has started: a process too few, a stale
# `WORLD_SIZE`, or a rank that died on the way. What else can go wrong here (names, addresses, interfaces, ports that
# are taken or closed) is in the network clinic of [lesson 16](16_multi_node.ipynb).

# %% [markdown] tags=["deeper"]
# ## 13. In production · deeper
#
# At 16,384 GPUs something breaks every few hours. Meta counted 419 unexpected interruptions in 54 days of training
# Llama 3 405B (*recorded*, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4). **Predict**: if each
# of them were noticed only by a time-out of 30 minutes, how many GPU-hours would be spent on waiting?

# %% tags=["deeper"]
stops, days, gpus = LLAMA3_INTERRUPTIONS
for minutes in (30, 10, 1):
    lost = stops * gpus * minutes / 60
    share = lost / (days * 24 * gpus)
    print(f"after {minutes:2} min: {lost / 1e6:.2f} million GPU-hours, {share:.1%} of the run")
assert round(stops * gpus * 0.5 / 1e6, 2) == 3.43

# %% [markdown] tags=["deeper"]
# 3.4 million GPU-hours, or 16 % of the run (*modelled*: every stop a silent one, and nothing else lost). That is why
# large jobs do not wait for a time-out. They watch a heartbeat, such as the step number of each rank, and collect
# evidence by program as soon as it stands still.
#
# - NCCL's **RAS** (reliability, availability, serviceability) is a thread in every rank that listens on a port of the
#   host, from NCCL 2.24 on. `ncclras` asks it which communicators there are and which ranks are behind or do not answer
#   ([NVIDIA](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html)). It was not run here.
# - The watchdog has a watchdog: PyTorch's **heartbeat monitor** ends a rank whose watchdog thread itself is stuck
#   (`TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`). Its message is about this thread, and not about your program.
# - A slow GPU is no hang, and all others wait for it all the same. [Lesson 13](13_profiling.ipynb) finds it, and
#   [lesson 16](16_multi_node.ipynb) is about starting again without the host that failed.

# %% [markdown]
# ## Recap, with the numbers of this run

# %%
group, number, kind, ranks = first_faults(records)[0]
print(f"collective {number} of group {group}: {kind} differs on rank {ranks[0]}")
healed = sum(patient.healed for patient in clinic)
print(f"healed here: {healed} of {len(clinic)} patients")

# %% [markdown]
# - A time-out proves that somebody did not come. Who reports it is a witness.
# - Stacks show lines. They cannot show which group, which round or which value.
# - A flight record numbers the calls of each group. The first number at which ranks differ is the fault.
# - `DETAIL` compares operation, shape and dtype before each call. It does not compare the reduction.
# - Save the evidence before you restart, and have the settings on before it happens.
#
# **Now you can answer**
#
# 1. Seven of eight ranks report a time-out. Which one do you look at?
# 2. All stacks are equal. Name two things that may still differ.
# 3. Rank 0 is at collective 412, all the others are at 415. Who is behind, and who is to blame?
# 4. A job hangs only in epochs in which the loss improves. What do you look for?
# 5. An all-reduce is SUM on one rank and MAX on the others. What do DETAIL and the flight record say?
#
# <details><summary>Answers</summary>
#
# 1. First at the eighth, and then at the first call in which records differ (sections 1 and 3).
# 2. The group in which they wait, and the number of the call, such as the round of a loop (section 2).
# 3. Rank 0 is behind. Whether it left out calls or the others made too many, the program must tell (section 3).
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
