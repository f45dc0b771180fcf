# %% [markdown]
# # Exercises 16 · How do I leave this machine: torchrun, elastic, Slurm?
#
# Five exercises on [16 Multi node](../notebooks/16_multi_node.ipynb). Four run on emulated hosts, on real ranks and
# in Slurm; one is on paper. All of them take about 125 minutes. **If you do only these:** 2, 3 and 4.
#
# | | you write | difficulty | minutes |
# |---|---|---|---|
# | 1 | an all-reduce on two levels | 3 of 5 | 30 |
# | 2 | a rendezvous, mended | 2 of 5 | 20 |
# | 3 | causes and cures of eight sick networks | 3 of 5 | 30 |
# | 4 | a job that loses no step when it is preempted | 3 of 5 | 30 |
# | 5 | how often to checkpoint, on paper | 2 of 5 | 15 |
#
# *Follows* on each card names the section of the lesson to look things up in.

# %% [markdown]
# **How to work.** Replace the `raise NotImplementedError` line, run the cell, run the check below it. The hints
# fold open one by one; solutions are in [the solutions notebook](../solutions/16_multi_node_solutions.ipynb).
#
# **What a check does.** In Exercises 1 and 2 it runs your function on real ranks on emulated hosts, each with a
# network interface of its own. In 1 it reads the **ledger** of each rank, and from the counter of each interface what
# has left the host. In 2 it notes what each rank tells `init_process_group`, and then lets them meet. Where hosts
# cannot be emulated, the check says what it did not try. If the ranks wait for each other, it stops them within
# seconds and shows where each one stood. In 3 it runs each patient with your cure, in 4 your script with stand-ins for
# Slurm's commands.

# %% tags=["parameters"]
import math
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from course_utils import launch
from lessons.multi_node import check
from lessons.multi_node.clinic import network
from lessons.multi_node.hosts import hosts_available

WORLD_SIZE = 4  # ranks of the demonstrations, on two hosts; the checks choose their own
LINK = "100mbit"  # of the demonstrations

# %% [markdown]
# ---
# ## Exercise 1 · An all-reduce that knows the hosts
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 30 | 16, What leaves a host | 2(H−1)/H · S leave each host, 1/L of it from each rank |
#
# H hosts have L ranks each. In a ring through all N = H·L ranks each host sends 2(N−1)/N · S, nearly 2 S: with two
# hosts and two ranks each, 1.5 S. Two levels need less, 2(H−1)/H · S: with two hosts 1.0 S. Write the mean of a tensor
# over all ranks in this way, as data parallelism uses it for gradients, for any tensor and any placement of the ranks.
#
# The mean replaces the tensor's numbers: the caller keeps `tensor`. It may have any shape and dtype, a number of
# elements that L does not divide, and elements that do not lie in a row.
#
# `host_of[rank]` is the name of the host that a rank runs on. With `torchrun` neighbours share a host; other launchers
# deal ranks out like cards, `["node0", "node1", "node0", "node1"]`. All hosts have the same number of ranks. In a
# training loop the groups would be made once; here each call may make its own.


# %%
# {{hierarchical_mean}}


# %%
check.hierarchical_mean(hierarchical_mean)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write the placement as a table: one row for each host, with its ranks. Which ranks reduce-scatter with each other, a
# row or a column? After that a rank has the host's sum of 1/L of the tensor. Who has the same part of other hosts?
# </details>
# <details><summary>Hint 2</summary>
#
# Three calls: reduce-scatter in the row, all-reduce of the shard in the column, all-gather in the row. All ranks call
# `dist.new_group` for all rows and then for all columns, and keep the two groups that they are in;
# `dist.new_subgroups_by_enumeration` does that for a list of lists.
# </details>
# <details><summary>Hint 3</summary>
#
# Copy the tensor into a flat one with zeros at its end, as long as the next multiple of L: `-count % L` zeros. At the
# end `tensor.copy_(…)` writes into the caller's memory, whatever its strides.
# </details>
# <details><summary>Does NCCL do this by itself?</summary>
#
# It knows which GPUs share a host, and its trees use that: a chain in each host, a tree between them (lesson 03).
# FSDP's hybrid sharding, HSDP, sends in the pattern of this exercise (lesson 07): a reduce-scatter inside, an
# all-reduce of the shards across.
# </details>

# %% [markdown]
# When your function passes, let both run over a link of 100 Mbit/s. 4 MiB are 33.6 Mbit: 1.5 S would take 0.50 s on an
# idle link, 1.0 S 0.34 s.


# %% tags=["nbval-ignore-output"]
def seconds(two_levels):
    host_of = [None] * dist.get_world_size()
    dist.all_gather_object(host_of, socket.gethostname())
    gradients = torch.ones(1 << 20)
    dist.barrier()
    start = time.perf_counter()
    if two_levels:
        hierarchical_mean(gradients, host_of)
    else:
        dist.all_reduce(gradients)
    return time.perf_counter() - start


emulated, sentence = hosts_available()
if emulated:
    for name, two_levels in (("flat", False), ("two levels", True)):
        results = launch(seconds, two_levels, world_size=WORLD_SIZE, hosts=2, link=LINK)
        share = max(results.left_host) / (4 << 20)
        print(f"measured, {LINK}: {name:>10}  {max(results):.2f} s, {share:.2f} S left each host")
else:
    print(f"Not measured here. {sentence}.")

# %% [markdown]
# Both times follow the bytes. In the second, making the groups is included. On a link without a limit, or with a small
# tensor, the flat call may win, because it is one call and not three.

# %% [markdown]
# ---
# ## Exercise 2 · Debug this: a program that ran for a year
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 2 of 5 | 20 | 16, One program, one host or several | one world on 1, 2 and 3 hosts; each rank its own GPU |
#
# Somebody's training program begins like this. It ran for a year on a machine with two GPUs, and now there are two such
# machines. It returns the number of the GPU that the process is to use. Four things are wrong. Predict what happens on
# two hosts: an error, a hang, or a result?


# %%
def join_as_found():
    rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    address = f"tcp://{socket.gethostname()}:{os.environ['MASTER_PORT']}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", address, timedelta(seconds=5), world_size, rank)
    return rank


def try_it(join):
    device = join()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    place = f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}"
    dist.destroy_process_group()
    return f"{place}, GPU {device}: the ranks add up to {ones.item():.0f}"


emulated, sentence = hosts_available()
if emulated:
    print(*launch(try_it, join_as_found, world_size=4, hosts=2, init=False), sep="\n")
else:
    print(f"Not shown here. {sentence}.")

# %% [markdown]
# A result, and no word of a problem: each host has a rank 0 and a rank 1 of a world of 2, and its ranks add up to 2
# instead of 4. Write a version that works on any number of hosts. Hosts are numbered by the launcher, so do not rely on
# their names. `torchrun` sets these variables, and so does `launch(hosts=…)`:
#
# | variable | what it is |
# |---|---|
# | `RANK`, `WORLD_SIZE` | among all processes of all hosts |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | among those of this host |
# | `GROUP_RANK` | the number of this host |
# | `MASTER_ADDR`, `MASTER_PORT` | where rank 0 opens the store |
#
# `GLOO_SOCKET_IFNAME`, the interface that gloo uses, is set by whoever knows the network; here it is `eth0`.


# %%
# {{join}}


# %%
check.join(join)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Ask four questions of the version above: who am I, how many are we, where do we meet, and on which network? On one
# host each of its answers is right.
# </details>
# <details><summary>Hint 2</summary>
#
# Two worlds can form only because all answers are wrong together. If you mend them one by one, you get the errors that
# people report: two ranks with one number, a rank beyond the world size, a store that nobody hosts, a connection that
# is refused at 127.0.0.1.
# </details>
# <details><summary>Hint 3</summary>
#
# `init_process_group` without `init_method` reads all it needs from the variables of `torchrun`. The only number to
# read yourself is the one for the GPU, and that is counted on each host.
# </details>
# <details><summary>How would you have noticed?</summary>
#
# By one line at the start of each run: rank, world size, host, and the sum of an all-reduce of ones. Two worlds also
# write each checkpoint twice, to the same name, and both go through the same data.
# </details>

# %% [markdown]
# ---
# ## Exercise 3 · The network clinic
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 30 | 16, The network clinic | 8 causes, 8 cures of one change each; 25 minutes of evidence are enough |
#
# Eight programs on two hosts do not do what their users want. Find the cause of each, and heal it.
#
# | you write | it does |
# |---|---|
# | `clinic[3]` | complaint, settings and program of patient 3 |
# | `clinic[3].symptom()` | runs the program: what each rank says |
# | `clinic[3].ask("names")` | evidence, which has a price |
# | `clinic[3].diagnose("wrong address")` | names a cause; a wrong one is answered with evidence |
# | `clinic[3].treat(environment={"MASTER_ADDR": "node0"})` | changes something and runs the program again |
#
# One change is to be enough for each. In the lesson you have seen patient 5.

# %%
clinic = network.clinic()
clinic

# %%
clinic.list_causes()

# %%
clinic.list_evidence()

# %%
clinic.list_cures()

# %% [markdown]
# Work here, in as many cells as you like. `clinic.symptoms()` shows all symptoms, in about ten seconds.

# %% tags=["nbval-ignore-output"]
clinic[1].symptom()

# %%
clinic[1].ask("link")

# %% [markdown]
# Then write down what you have found.


# %%
# {{diagnoses_and_cures}}


# %%
check.diagnoses_and_cures(diagnoses_and_cures)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with the cheap evidence: `addresses`, `names`, `link` and `files` cost a minute each, and two patients need no
# more. For those that time out, `ports` tells whether anything listens, and whether a connection is refused or lost.
# </details>
# <details><summary>Hint 2</summary>
#
# Patients 1, 4 and 7 say nearly the same. In one, a connection to the port times out; in the two others it is refused,
# and on one of these nobody listens at all. Patients 2 and 4 have the same file `/etc/hosts`, and fail at different
# places: which of them has a store?
# </details>
# <details><summary>Hint 3</summary>
#
# A name that stands for 127.0.1.1 can be cured in `/etc/hosts`, or by not depending on it: name the interface for gloo,
# name the endpoint by the host's own name for torchrun. Firewalls want `open_ports`, disks a `folder` below `shared`.
# </details>
# <details><summary>Which cures go around the cause?</summary>
#
# Patient 1 is healed by `MASTER_PORT=29501` as well, because its firewall drops 29500 only, and patient 7 by giving
# node1 the address of node0, which will puzzle whoever comes next. The clinic accepts both and says so. On a cluster
# they cost more than they save.
# </details>

# %%
clinic.score()

# %% [markdown]
# ---
# ## Exercise 4 · A job that loses no step when it is preempted
#
# | difficulty | minutes | follows | target |
# |---|---|---|---|
# | 3 of 5 | 30 | 16, A batch job: Slurm; A host that is told to leave | each step done once, over any number of stops |
#
# A preempted job gets SIGTERM, and some seconds or minutes later SIGKILL. To lose nothing in between you need two
# pieces: a training loop that stops in good order, and a job script by which Slurm tells the loop to stop and starts
# the job again. They communicate by the exit code: **0** means that all steps are done, **75** that the job was told
# to stop and should go on later (`EX_TEMPFAIL` in `sysexits.h`, a temporary failure), and anything else that it
# failed.
#
# **First the loop.** When any rank has been told to stop, all ranks finish the step they are in, save, and return 75.
# At most one more step may begin. The next call finds what was saved and goes on with the next step. The signal may
# reach a single rank, because a cloud provider that takes back one host tells only the ranks on it. Each rank has a
# state of its own, as under FSDP.


# %%
# {{train}}


# %%
check.train(train)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A signal handler runs between any two lines of Python, also in the middle of a step. So let it do as little as
# possible: it notes that the signal came. The loop looks at the note when a step is done.
# </details>
# <details><summary>Hint 2</summary>
#
# A rank that looks only at its own note leaves the loop while the others start the next step and wait for it. Ranks
# agree with a collective: sum the notes of all ranks once in each step.
# </details>
# <details><summary>Hint 3</summary>
#
# Save the number of the *next* step together with the state, in a file of this rank: `folder / f"rank-{rank}.pt"`.
# Save also after the last step, so that one more call has nothing to do.
# </details>
# <details><summary>What does an all-reduce in each step cost?</summary>
#
# Little, if the GPU does not wait for it: `scripts/train.py` starts the sum on the CPU, over gloo, before the forward
# pass, and waits for it at the end of the step.
# </details>

# %% [markdown]
# **Now the job script.** It runs a program that behaves like your loop. It needs to
#
# - get two hosts with two tasks each, one task for each rank, and a time limit;
# - ask Slurm to send SIGTERM to the *ranks* a minute before the time is up;
# - allow to be requeued, and keep what is in the log when that happens;
# - give each rank `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` (the host of rank 0) and `MASTER_PORT`;
# - requeue itself with `scontrol requeue` if the program ended with 75, and not if it is done or has failed;
# - end with 0 if all is well, and with another code if the program failed, because this is what Slurm shows.
#
# The check reads the directives, then runs the script three times with stand-ins for `srun`, `scontrol`, `scancel`
# and `hostname`: undisturbed, told to stop as your `--signal` asks, and with a rank that fails. On a cluster, submit it
# with `sbatch`.


# %%
# {{job_script}}


# %% tags=["nbval-ignore-output"]
check.job_script(job_script)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The directives: `--nodes`, `--ntasks-per-node`, `--time`, `--signal`, `--requeue`, `--open-mode`. All stand before
# the first command. In `--signal`, a `B:` in front of the name would send the signal to the batch shell alone.
# </details>
# <details><summary>Hint 2</summary>
#
# The script itself runs once, on the first host. Only what `srun` starts runs as each rank, so the variables that
# differ between ranks are set there: `srun bash -c 'RANK=$SLURM_PROCID … exec program'`, in single quotes. `scontrol
# show hostnames "$SLURM_JOB_NODELIST"` prints the hosts, one a line, that of rank 0 first.
# </details>
# <details><summary>Hint 3</summary>
#
# `srun` ends with the highest exit code of its tasks. Keep it (`code=$?`) on the very next line, compare it with 75,
# call `scontrol requeue "$SLURM_JOB_ID"` only then, and end with `exit $code`.
# </details>
# <details><summary>What is missing for real work?</summary>
#
# A save over the last one leaves nothing whole if SIGKILL comes in the middle: write to a new name and rename, as
# `scripts/train.py` does. And `--signal` is about the time limit. At a preemption Slurm sends SIGTERM itself, and
# SIGKILL after `GraceTime`, which is 0 unless the partition sets it, and `KillWait`, 30 s by default. When `GraceTime`
# is over, the job script gets SIGTERM as well and cannot requeue the job any more: Slurm has to, by
# `PreemptMode=REQUEUE`.
# </details>
# <details><summary>Why not torchrun?</summary>
#
# `srun torchrun …` works, too, with one task on each host. But then a process stands between Slurm and the ranks, and
# it does not hand on the exit code 75: `torchrun` ends with 1 whatever a rank returned, if it is not 0. With one task
# for each rank, signals and exit codes pass straight through.
# </details>

# %% [markdown]
# ---
# ## Exercise 5 · How often to checkpoint, on paper
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 2 of 5 | 15 | 16, Checkpoints: how often |
#
# Llama 3 was trained on 16,384 GPUs, 2,048 hosts of eight. In 54 days it met 419 unexpected interruptions (*recorded*,
# arXiv 2407.21783): one for every 264 days of a host. Suppose that a host fails once in 264 days, that
# training stands still for 2 minutes while it saves, and that a restart takes 10 minutes (*assumed*).
#
# A job on many hosts fails when one of them fails. It then loses the restart, and the work since the last checkpoint,
# which is half an interval on average. How often does it fail, how often should it save, and what share of its time is
# lost? Count the losses to first order: what saving costs of an interval, plus what failures cost of the time between
# two of them. Take the interval at which this sum is least (J. W. Young, CACM 1974). Then try 16 hosts; and 2,048 with
# a save that stops training for 6 seconds only, because it is written in the background.


# %%
# {{checkpoint_plan}}


# %%
check.checkpoint_plan(checkpoint_plan)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# 2,048 hosts fail 2,048 times as often as one. How many minutes do 264 days have?
# </details>
# <details><summary>Hint 2</summary>
#
# With an interval T and a time M between failures, the loss is save/T + (restart + T/2)/M. Saving more often makes the
# first term larger and the second smaller. Set the derivative with respect to T to zero.
# </details>
# <details><summary>Hint 3</summary>
#
# T = √(2 · save · M). At that interval saving costs as much as the half interval that a failure loses.
# </details>

# %% [markdown]
# When your function passes, compare the three cases.

# %%
for hosts, save in ((16, 2), (2048, 2), (2048, 0.1)):
    between, every, lost = checkpoint_plan(hosts, 264, save, 10)
    print(f"{hosts:>5} hosts, {save:>3} min to save: a failure every {between / 60:6.1f} h, "
          f"a checkpoint every {every:5.1f} min, {lost:4.1f} % lost, "
          f"{1000 / between:.1f} by restarts")  # fmt: skip

# %% [markdown]
# What is lost is √(2 · save/M) + restart/M. The first part grows with the root of the number of hosts, the second in
# proportion to it. On 2,048 hosts the save in the background brings the first part from 14.7 to 3.3 %; 5.4 % are the
# restart's.
