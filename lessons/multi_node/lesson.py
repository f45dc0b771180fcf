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
# # How do I leave this machine: torchrun, elastic, Slurm?
#
# When Llama 3 was trained on 16,384 GPUs, something unexpected stopped the job 419 times in 54 days, once every three
# hours, and 35 of these failures were in the network (*recorded*, [Llama 3](https://arxiv.org/abs/2407.21783), table
# 5). A job on two hosts fails in the same ways, only less often: a name stands for the wrong address, a firewall
# drops a port, a host dies, a scheduler wants its hosts back. Each has a message, a cause and a cure, and you can
# meet all of them this evening: two hosts and a network fit into one Linux computer.
#
# **You will be able to**
# - *start* one program on one host and on several, with `torchrun` and under Slurm, and *say* who meets at which
#   address;
# - *predict* how many bytes of a collective leave each host, and *read* the true number from the interface;
# - *tell* from its message which part of a network is broken, and *mend* it;
# - *keep* a run alive when a host dies or a scheduler stops it, and *say* how many steps that costs;
# - *take* a complete training program and its job files to your own cluster.
#
# **Before this:** [02 collectives](02_collectives.ipynb), [04 ddp](04_ddp.ipynb). **Time:** about 45 minutes to read
# the core, 140 with the deeper sections, about two to run.

# %% [markdown]
# Imports and parameters:

# %% tags=["parameters"]
import os
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from IPython.display import Markdown
from torch.distributed.device_mesh import init_device_mesh

from course_utils import WorkerError, launch, shutdown
from course_utils.predictions import predict, predictions
from course_utils.programs import ROOT, SCRIPTS, TEXT, folded, read_log, run_program, wait_for_step
from course_utils.recordings import real_or_recorded
from lessons.multi_node import slurm
from lessons.multi_node.clinic import network
from lessons.multi_node.hosts import hosts_available, run_on_hosts
from lessons.multi_node.slurm import SlurmCluster

world_size = 4  # ranks: a multiple of the hosts
hosts = 2
link = "100mbit"  # rate of the cable between the hosts, in each direction

# %% [markdown]
# ## 1. Two hosts in one computer
#
# A program on a cluster sees its host (Slurm and torchrun say *node*) as a name, an address and a network interface.
# Linux can give these to a group of processes: a **network namespace** has interfaces, addresses and firewall rules
# that nothing outside it sees. `launch(…, hosts=2)` makes two of them, joins them by a cable, the *link*, with a
# limited rate, and puts half of the ranks on each:
#
# ```text
#            node0                          node1
#     rank 0       rank 1            rank 2       rank 3
#       └── loopback ──┘               └── loopback ──┘
#       eth0  10.0.0.1 ── 100 Mbit/s ── eth0  10.0.0.2
# ```
#
# Ranks of one host talk over its *loopback* interface, which ends inside the host. What goes to the other host leaves
# by `eth0`, where it is slow, and where it is counted (`left_host` below, bytes per host). The network is real; only
# the processors are shared, and the backend is gloo.

# %%
emulated, sentence = hosts_available()
print("The hosts are emulated." if emulated else "There is one host only.")


def place():
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR")
    return [socket.gethostname() if emulated else "here", *(f"{n}={os.environ[n]}" for n in names)]


for rank in launch(place, world_size=world_size, hosts=hosts):
    print(*rank)

# %% [markdown]
# If your computer cannot do this (macOS, some containers, hardened systems), the cell has said why. Then the ranks of
# this lesson run on one host, and what needs two is *recorded*.
#
# The variables are those that `torchrun` sets on a cluster. `RANK` counts the processes of the job, `LOCAL_RANK`
# those of one host, `GROUP_RANK` the hosts, and `MASTER_ADDR` is where the ranks meet. The classic mistake on the
# second host is to choose the GPU by `RANK`: on one host the two numbers are equal, so nobody notices until rank 8
# asks a host with GPUs 0 to 7 for number 8.

# %% [markdown]
# ## 2. What leaves a host
#
# N is the number of ranks, H the number of hosts, and S the size of a tensor in bytes. In a ring all-reduce every rank
# sends 2(N−1)/N · S bytes to its neighbour ([lesson 02](02_collectives.ipynb)), which may be on the same host.
# **Predict** for four ranks on two hosts: what leaves each host, in units of S?

# %%
flat_leaves = predict("what leaves a host: a ring of four ranks on two hosts", unit="S")


# %%
def reduce_once(size):
    """All-reduce `size` bytes over all ranks, and return one element of the result."""
    x = torch.ones(size // 4)
    dist.all_reduce(x)
    return x[-1].item()


S = 3 * 2**20
on_hosts = partial(launch, world_size=world_size, hosts=hosts)
flat = on_hosts(reduce_once, S)
for host, left in enumerate(flat.left_host or []):
    print(f"{left / S:.1f} S left node{host}")

# %% jupyter={"source_hidden": true}
expected = {"flat": 2 * (world_size - 1) / world_size}
assert flat == [world_size] * world_size
for left in flat.left_host or []:
    assert 1 <= left / (expected["flat"] * S) < 1.1  # the rest: headers, packets sent again
flat_leaves.compare(expected["flat"])

# %% [markdown]
# **Compare.** Only one rank of each host has its right-hand neighbour on the other host, so what leaves a host is what
# one rank sends: 1.5 S. With many ranks on each host it approaches 2 S.
#
# But the hosts need only exchange their *sums*. So each host should first add up its own tensors, inside, where it is
# cheap. A **hierarchical** all-reduce, built from rings in [lesson 03](03_nccl.ipynb), takes three calls of the
# library, in groups along the two dimensions of a mesh:
#
# ```text
#                inside node0   inside node1   over the cable
# reduce-scatter    0 ⇄ 1          2 ⇄ 3                       each rank has half of its host's sum
# all-reduce                                  0 ⇄ 2   1 ⇄ 3    of each half, with the other host
# all-gather        0 ⇄ 1          2 ⇄ 3                       each rank has all
# ```
#
# **Predict** what leaves each host now. Does the number of its ranks matter?

# %%
hierarchical_leaves = predict("what leaves a host: three calls, by hosts", unit="S")


# %%
def groups():
    """This rank's groups: the ranks of its host, and those with its local rank on all hosts."""
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    shape = (dist.get_world_size() // per_host, per_host)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "inside"))
    return mesh["inside"].get_group(), mesh["hosts"].get_group()


def hierarchical_all_reduce(x, inside, across):
    """Sum x over all ranks, in place; a host's number of ranks must divide the length of x."""
    piece = x.new_empty(x.numel() // inside.size())
    dist.reduce_scatter_single(piece, x, group=inside)
    dist.all_reduce(piece, group=across)
    dist.all_gather_single(x, piece, group=inside)


# %%
def reduce_by_hosts(size):
    x = torch.ones(size // 4)
    hierarchical_all_reduce(x, *groups())
    return x[-1].item()


by_hosts = on_hosts(reduce_by_hosts, S)
for host, left in enumerate(by_hosts.left_host or []):
    print(f"{left / S:.1f} S left node{host}")

# %% jupyter={"source_hidden": true}
expected["hierarchical"] = 2 * (hosts - 1) / hosts
assert by_hosts == [world_size] * world_size
for left in by_hosts.left_host or []:
    assert 1 <= left / (expected["hierarchical"] * S) < 1.1
hierarchical_leaves.compare(expected["hierarchical"])

# %% [markdown]
# **Compare.** Over the cable it is an all-reduce among H hosts, 2(H−1)/H · S, which is S here, for any number of ranks.
#
# Section 9 measures the time that this saves, finds the sizes for which the flat ring is faster after all, and shows
# what happens when ranks are numbered badly.
#
# > **On real GPUs.** A node has a network port for each GPU or for two, and NCCL builds several rings and trees that
# > enter and leave a node through different ports, and chooses among them by size ([lesson 03](03_nccl.ipynb)). You
# > will rarely write a hierarchical all-reduce yourself. But the same arithmetic decides where tensor, data and
# > pipeline parallelism belong ([lesson 12](12_parallelism_3d.ipynb)), and whether FSDP should shard across hosts
# > (section 10).

# %% [markdown]
# ## 3. One program, one host or several
#
# On a cluster nobody calls `launch`. Every host runs an **agent**, `torchrun`, which starts the ranks of its host and
# watches them. The program stays the same on one host and on many. What changes is the command line, because the
# agents have to find each other first. The program here, [scripts/hello.py](../scripts/hello.py), is the one to run
# first on any new cluster: every rank says where it is, and a sum shows that all ranks reach each other.

# %% jupyter={"source_hidden": true}
folded("scripts/hello.py", SCRIPTS / "hello.py")

# %% [markdown]
# There are two ways to tell the agents who meets where. In the **static** form you number the hosts and name the
# address and port of the **store**, where all *ranks* meet and leave their addresses. `run_on_hosts` types the
# command on each host, with the host's number for `{host}`:

# %% tags=["nbval-ignore-output"]
static = "torchrun --nnodes=2 --node-rank={host} --master-addr=node0 --master-port=29500 "
run_on_hosts(static + "--nproc-per-node=1 ../scripts/hello.py", recorded="torchrun_static")

# %% [markdown]
# With a **c10d rendezvous** every host gets the same command. It names one address where the *agents* meet, and the
# job (`--rdzv-id`). The agents agree there who takes part, in which order, and they can agree anew when a host is
# lost. Here the rendezvous is on the *second* host, on purpose, at port 29500. **Predict** at which host and port the
# *ranks* meet, `MASTER_ADDR` and `MASTER_PORT`.

# %%
places = ["node0:29500", "node1:29500", "node0, a free port", "node1, a free port"]
ranks_meet = predict("where ranks meet, with the rendezvous at node1:29500", places)

# %% tags=["nbval-ignore-output"]
meet = "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29500 --rdzv-id=1 "
run_on_hosts(meet + "--nproc-per-node=1 ../scripts/hello.py", recorded="torchrun_c10d")

# %% jupyter={"source_hidden": true}
ranks_meet.compare("node0, a free port")

# %% [markdown]
# **Compare.** There are [two masters](https://github.com/pytorch/pytorch/issues/73656). The agents meet at
# node1:29500, in a store that node1's agent opens because it finds its own name in the endpoint. They sort the hosts
# by name and number the ranks. Then a second store opens for the ranks, on the host of rank 0, node0, at a port that is
# free there; its address becomes `MASTER_ADDR` and `MASTER_PORT`.
#
# Three consequences break real jobs:
#
# - If no host recognizes its own name in the endpoint, no agent opens the store, and all of them wait.
# - `MASTER_PORT` differs in each run, and gloo and NCCL open random ports besides. It is not enough to open 29500.
# - `MASTER_ADDR` is the name that rank 0's host has for itself. All other hosts must be able to look it up.
#
# | | static | c10d |
# |---|---|---|
# | command | differs by `--node-rank` | the same on all hosts |
# | order of the hosts | yours | by name |
# | `MASTER_ADDR` and port | yours | host of rank 0, a free port |
# | a host is lost | the job ends | the others, or they and a new host, can go on (section 5) |
#
# On one host, `--standalone` is a rendezvous of its own.
#
# > **Misconception.** "The rendezvous endpoint is the host of rank 0." It often is, because people write the first host
# > there. But names decide the order, so code that expects rank 0 at the endpoint works on one cluster and fails on the
# > next ([milabench#282](https://github.com/mila-iqia/milabench/issues/282)).

# %% [markdown]
# ## 4. The network clinic
#
# Four things must work before two nodes can train, and ranks pass them in this order. A rank looks up a *name* and
# gets an *address*. It reaches that address over an *interface*. There it meets the others, on the *port of the
# store*. Last, gloo or NCCL connects the ranks directly with each other, on *ports of their own*, at addresses that
# the ranks have written into the store. So the first question is how far the ranks came. The message answers it only
# in part, because it says where a rank gave up, and seldom why.
#
# | the ranks came as far as | and then | what you read |
# |---|---|---|
# | the name | it is unknown, or means the host itself | `client socket has timed out` |
# | the interface | it is down, or there is no route | `Network is unreachable`, `No route to host` |
# | the port of the store | nobody listens, or a firewall drops what comes | `client socket has timed out`, for both |
# | each other's ports | wrong address or interface, firewall | `connectFullMesh failed`, `Unable to find`, nothing |
# | the end | something outside the network, such as a disk | an error from elsewhere, much later |
# | the end | a slow cable, or TCP in place of InfiniBand | nothing: every step is slow (section 16) |
#
# The clinic has eight patients: programs on two hosts with one fault each, all modeled on public reports. Everything
# about them is run for real on emulated hosts: what the ranks say, what you ask for, and your cure.

# %%
clinic = network.clinic()
clinic

# %% [markdown]
# We do one together; the other seven are yours, in the exercises. Here is the fifth, with its settings and its
# program. It waits 2 s for other ranks where PyTorch's default for gloo is 30 minutes, so that we need not wait.
# Then its symptom:

# %%
patient = clinic[5]
patient

# %%
symptom = patient.symptom()
symptom

# %% [markdown]
# Neither rank says anything in 3 s, although the program asks for an error after 2 s. The time-out holds for the store
# and for collectives, but gloo is more patient when it connects ranks: it gave up with `Connect timeout` after 5, 10
# and 15 s where the time-out was 1, 2 and 3 s (*recorded*, PyTorch 2.13).
#
# Evidence has a price: roughly the minutes that it takes to log in to a cluster and look.

# %%
clinic.list_evidence()

# %% [markdown]
# Silence is a finding too: compare it with the table above. **Predict.** What does a connection from node1 to port
# 29500 of node0, the port of the store, come to?

# %%
answers = ["refused", "timed out", "connected"]
connection = predict("a connection from node1 to the port of the store", answers)

# %%
patient.ask("ports")

# %% jupyter={"source_hidden": true}
connection.compare("connected")

# %% [markdown]
# **Compare.** It connects: the store is on node0, and node1 reaches it. A rank that does not reach the store complains,
# and nobody did. A dropped connection would have timed out, because nobody answers; *refused* is an answer, from a
# host on which nobody listens.
#
# The clinic uses your evidence against a diagnosis that does not fit:

# %%
patient.diagnose("firewall drops the port")

# %% [markdown]
# So the name, the address, the interface and the store's port are in order. What is left are the ports on which the
# ranks connect with each other. To test one, something has to listen there: `nc -l 41234` on one node, and `nc node0
# 41234` on the other. `ask` does the same.

# %%
patient.ask("other port")

# %%
patient.diagnose("firewall opens only the port")

# %% [markdown]
# `treat` changes a setting and runs the same program again. Which ports to open? gloo asks the system for one for
# each connection, and Linux gives out those from 32768 to 60999.

# %%
treated = patient.treat(open_ports="32768-60999")
assert treated or not emulated
treated

# %% [markdown]
# Usually there is no firewall between the nodes, and one around all of them. You need that one, because whoever reaches
# these ports [can run code as you](https://github.com/pytorch/pytorch/blob/main/SECURITY.md).
#
# Try the other seven before section 8, which tells all eight apart.

# %% [markdown]
# ## 5. A host dies
#
# A run that needs all its hosts stops with the first one that fails. `torchrun` can do better: it notices that a host
# is gone, lets the others meet again as a smaller world, and starts the program anew there. It does not know what the
# program had computed. So the program must find its newest checkpoint when it starts, and must be able to go on with
# a different number of ranks. `scripts/train.py` does both, and therefore the same command is a first start, a
# restart and a start on fewer hosts.
#
# We train for 20 steps and save at every fifth. First the reference: two hosts, nothing goes wrong.

# %%
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
flags = f"--data={TEXT} --layers=2 --batch=8 --steps=20 --save-every=5 --log-every=1"
program = [SCRIPTS / "train.py", *flags.split(), f"--out={folder / 'undisturbed'}"]

launch(run_program, *program, silent=True, world_size=2, hosts=2, init=False)
undisturbed = [line["loss"] for line in read_log(folder / "undisturbed")]
print(f"{len(undisturbed)} steps, loss {undisturbed[0]:.2f} to {undisturbed[-1]:.2f}")

# %% [markdown]
# Now the same training, started as on a cluster, and all processes of node1 are killed when step 8 is printed. Two
# flags and a variable make the command elastic. **`--nnodes=1:2`** says that two hosts are wanted and one is enough.
# **`--max-restarts=3`** says how often an agent may start its ranks again. With
# **`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`** the agents tell each other a new address in *every* rendezvous, not only
# in the first. A dead host cannot report its end, so the other agent waits for its heartbeats: `keep_alive_interval`
# seconds times `keep_alive_max_attempt`. We shorten this to 1 × 4; a cluster should keep the default, 5 × 3.
# **Predict**: with which step does node0 go on?

# %%
goes_on = predict("the step with which the host that is left goes on")

# %% tags=["nbval-ignore-output"]
torchrun = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun "
torchrun += "--nnodes=1:2 --nproc-per-node=1 --max-restarts=3 "
torchrun += "--rdzv-backend=c10d --rdzv-endpoint=node0:29500 --rdzv-id=16 --rdzv-conf="
torchrun += "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1 "

elastic = run_on_hosts(
    f"{torchrun} {SCRIPTS / 'train.py'} {flags} --out={folder / 'elastic'}",
    when=[(r"step 8 ", "kill node1")],
    recorded="torchrun_elastic",
)
elastic.show(r"^--|Error:|exitcode|step ([1-9]|20) ")

# %% tags=["nbval-ignore-output"]
done = elastic.numbers(r"step (\d+) +loss (\S+)")
turn = next(i for i in range(1, len(done)) if done[i][0] <= done[i - 1][0])
last, resumed = int(done[turn - 1][0]), int(done[turn][0])
print(f"before: steps 1 to {last}; after: {resumed} to {int(done[-1][0])}")
print(f"computed twice: {last - resumed + 1} steps")

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
assert elastic.exit_codes == [0, 137] and done[-1][0] == 20
assert resumed % 5 == 1 and 0 <= last - resumed + 1 < 10
assert all(abs(loss / undisturbed[int(step) - 1] - 1) < 1e-3 for step, loss in done)
goes_on.compare(resumed)

# %% [markdown]
# **Compare.** It goes on after the last checkpoint, that of step 5, and computes steps 6 to 8 again. That work is lost,
# and nothing else: every loss equals that of the undisturbed run to 0.1 %, although half of the ranks are missing.
#
# How node0 came to know: Linux closes the connections of a killed process, so node0's rank fails at once (`Connection
# reset by peer`). A host that loses power does not even do that; then the time-out of the process group ends the
# wait. The agent sees exit code 1 and asks for a new rendezvous, which begins only when the heartbeats of node1 are
# overdue. Then node0 is alone, and the program starts from the top.
#
# <details><summary>Two decisions in <code>train.py</code> that make this so</summary>
#
# `--batch` counts the windows of a step *over all ranks*, so one rank takes all eight where two took four each; a
# program whose batch is per rank would silently halve the batch and need another learning rate. And the checkpoint
# holds the number of samples seen, so no sample is skipped or seen twice.
# </details>
#
# More often the scheduler gives you another host, or the lost one comes back. With `--nnodes=2` node0 would wait for
# it. Here it may go on alone, as before, and node1 starts again while node0 trains. **Predict** what becomes of the
# run.

# %%
fates = ["node1 waits until node0 is done", "both go on and repeat some steps of node0"]
fates += ["both go on and repeat no step of node0", "both end with an error"]
comes_back = predict("a host that comes back while the other one trains", fates)

# %% tags=["nbval-ignore-output"]
more_steps = flags.replace("--steps=20", "--steps=100")
grown = run_on_hosts(
    f"{torchrun} {SCRIPTS / 'train.py'} {more_steps} --out={folder / 'grown'}",
    when=[(r"step 8 ", "kill node1"), (r"node0 . step 1?8 ", "start node1")],
    recorded="torchrun_grown",
)
grown.show(r"^--|exitcode|SIGTERM|checkpoint|step (1|8|100) ")

# %% tags=["nbval-ignore-output"]
steps = [int(step) for step, loss in grown.numbers(r"step (\d+) +loss (\S+)")]
twice = sorted({step for step in steps if steps.count(step) > 1})
print(f"steps 1 to {max(steps)}; in the log twice: {twice}")

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
((saved,),) = grown.numbers(r"checkpoint step-(\d+) is complete")
assert grown.exit_codes == [0, 0] and set(steps) == {*range(1, 101)}
assert max(twice, default=0) < saved
comes_back.compare(fates[2])

# %% [markdown]
# **Compare.** Both go on together, and none of the steps that node0 took alone is repeated; 6 to 8 were, when node1
# died. A host that waits at the rendezvous makes every agent stop its ranks with SIGTERM and start them anew, in the
# larger world. `train.py` takes SIGTERM as an order to save first. A program that does not would have lost the steps
# since its last checkpoint, on the healthy host too.
#
# This kind of restart does not count for `--max-restarts`. And without the variable, which PyTorch 2.13 needs, both
# agents would have died of `DistStoreError: wait timeout after 60000ms`.
#
# Two things to know before you rely on it:
#
# - **Who keeps the rendezvous?** The agent whose host is the endpoint, here node0. When *that* host dies, the others
#   lose the store, and their agents end too ([pytorch#67742](https://github.com/pytorch/pytorch/issues/67742)). Any
#   other host may be lost. So you need a scheduler that starts the job again anyway.
# - **Heartbeats that are too fast kill the healthy.** An agent that cannot run for a few seconds, on a host that
#   swaps or waits for a disk, looks dead. What two worlds then do to one checkpoint is in section 12.
#
# > **Misconception.** "`--max-restarts` makes my training fault-tolerant." It starts the program again. A program
# > without checkpoints begins again at step 0, as often as you allow.

# %% [markdown]
# ## 6. A batch job: Slurm
#
# On a shared cluster you do not start ranks yourself. You hand a script to a **batch scheduler** and
# say what it needs: hosts, ranks, time. It waits until they are free, and ends the job when its time is up. In Slurm,
# `sbatch` queues the script, which runs on the first of its hosts; `srun` inside it starts a program on all of them,
# each copy as one **task**.
#
# Slurm does not set `RANK`. It numbers tasks in variables of its own, and these have to be translated:
#
# | Slurm | PyTorch |
# |---|---|
# | `SLURM_PROCID` | `RANK` |
# | `SLURM_LOCALID` | `LOCAL_RANK` |
# | `SLURM_NTASKS` | `WORLD_SIZE` |
# | the first name in `SLURM_JOB_NODELIST` | `MASTER_ADDR` |
# | any free port, the same for all; here from `SLURM_JOB_ID` | `MASTER_PORT` |
#
# `SlurmCluster` runs Slurm's own daemons on emulated hosts: `login`, where commands are typed, `node0` and `node1`.
# What do four tasks on two hosts see?


# %% tags=["nbval-ignore-output"]
def what_tasks_see():
    names = "$(hostname) $SLURM_PROCID $SLURM_LOCALID $SLURM_NTASKS $SLURM_LAUNCH_NODE_IPADDR"
    with SlurmCluster(hosts=2) as cluster:
        return cluster.run(f"srun --nodes=2 --ntasks-per-node=2 sh -c 'echo {names}'")


seen = real_or_recorded("slurm_tasks", what_tasks_see, slurm.available())
seen = sorted(line.split() for line in seen.splitlines())
for host, rank, local_rank, tasks, address in seen:
    print(f"{host}: RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={tasks}, launched by {address}")
assert [task[:4] for task in seen] == [[f"node{r // 2}", f"{r}", f"{r % 2}", "4"] for r in range(4)]
assert {task[4] for task in seen} == {"10.97.0.254"}  # the address of login, which runs no rank

# %% [markdown]
# The last column is a trap. `SLURM_LAUNCH_NODE_IPADDR` looks like an address for all to meet at, but it is that of
# the host where `srun` was *typed*. In a batch script this is the first host; here it is `login`, where no rank
# listens. An automated review warned of this in [pith-train#47](https://github.com/mlc-ai/pith-train/pull/47).
# Another classic is [pytorch#76069](https://github.com/pytorch/pytorch/issues/76069): `localhost` and a free port of
# its own on every host, so each waits for the others at its own address. All ranks need *one* host and *one* port.
#
# The script, folded below, names one of each, and decides three more things:
#
# - **`--signal=TERM@180`**: three to four minutes before the time is up, every rank gets SIGTERM. `train.py` finishes
#   the step, saves and ends with code 75.
# - **`scontrol requeue`** after a 75, at most 50 times, and `--requeue` after the failure of a host: the job goes back
#   into the queue under the same number. The same `--out` makes it go on.
# - **`--open-mode=append`** keeps what the first run printed.

# %% jupyter={"source_hidden": true}
folded("scripts/slurm/train.sbatch", SCRIPTS / "slurm/train.sbatch", language="bash")

# %% [markdown]
# Now submit it, on two hosts with one rank each, and send SIGTERM once the log has step 20 of 100, as Slurm does when
# the time runs out. (Folded: the flags, and a run without interruption.)

# %% jupyter={"source_hidden": true}
job_flags = [f"--data={TEXT}", "--layers=2", "--hidden=32", "--length=32", "--batch=8"]
job_flags += ["--steps=100", "--log-every=1", "--save-every=1000"]


def without_stop(out):
    """The same training with no scheduler and no interruption."""
    program = [SCRIPTS / "train.py", *job_flags, f"--out={out}"]
    launch(run_program, *program, silent=True, world_size=2, hosts=2, init=False)


# %%
def stopped_and_requeued(out):
    """Run the job, stop it in the middle, and return what Slurm says of it at the end."""
    options = ["--ntasks-per-node=1", f"--chdir={ROOT}", f"--output={out}.txt"]
    variables = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    with SlurmCluster(hosts=2) as cluster:
        script = SCRIPTS / "slurm" / "train.sbatch"
        job = cluster.submit(*options, script, *job_flags, f"--out={out}", env=variables)
        wait_for_step(out, 20, timeout=200)
        cluster.run(f"scancel --signal=TERM {job}")
        return cluster.wait(job, timeout=200)

# %% [markdown]
# **Predict.** The log has a line for each step that was computed. How many lines does it have at the end?

# %%
log_lines = predict("lines in the log of 100 steps, stopped after 20 or so")


# %% tags=["nbval-ignore-output"]
def both():
    with tempfile.TemporaryDirectory() as folder:
        out, alone = Path(folder, "job"), Path(folder, "alone")
        job = stopped_and_requeued(out)
        without_stop(alone)
        saved = sorted(int(path.name[5:]) for path in out.glob("step-*"))
        logs = [[(at["step"], at["loss"]) for at in read_log(log)] for log in (out, alone)]
        return {"end": [job["JobState"], job["Restarts"]], "saved": saved, "logs": logs}


run = real_or_recorded("slurm_job", both, slurm.available())
print(f"{run['end'][0]}, restarts: {run['end'][1]}, checkpoints: {run['saved']}")
for name, log in zip(("the job", "a run that nobody stops"), run["logs"], strict=True):
    print(f"{name}: {len(log)} lines, the last loss is {log[-1][1]:.4f}")

# %% jupyter={"source_hidden": true}
stopped, last = run["saved"]
assert run["end"] == ["COMPLETED", "1"] and 20 <= stopped < last == 100
assert [step for step, loss in run["logs"][0]] == [*range(1, 101)]
assert run["logs"][0] == run["logs"][1]  # of the job, and of the run without a stop
log_lines.compare(len(run["logs"][0]))

# %% [markdown]
# **Compare.** A hundred lines, each step once, and the losses are those of a run that nobody stopped, to the last
# digit. The checkpoint has the weights, the optimizer and the number of samples seen; the order of the data follows
# from the seed and that number.

# %% [markdown]
# ## 7. What to take to work
#
# [`scripts/train.py`](../scripts/train.py) is one file of plain PyTorch that you can copy and change. Whatever the
# lessons built by hand is in it once, in its final form:
#
# | in `train.py` | from lesson |
# |---|---|
# | shares of each step, the mean over all tokens, accumulation | [04](04_ddp.ipynb) |
# | bf16, recomputation, MFU | [05](05_scaling_efficiency.ipynb) |
# | `fully_shard`, meta device, clipping, distributed checkpoints | [06](06_zero.ipynb), [07](07_fsdp.ipynb) |
# | layers split over ranks, and the mesh | [09](09_tensor_parallel.ipynb), [12](12_parallelism_3d.ipynb) |
# | order of the data from a seed, resume by the number of samples | [15](15_ffcv_data_loading.ipynb) |
# | SIGTERM, exit code 75, checkpoints that are renamed when complete | this lesson |
#
# The same program under each launcher (`--replicate`: section 10):
#
# ```text
# one host      torchrun --standalone --nproc-per-node=8 train.py --out run --data text.txt
# two hosts     torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 \
#                   --rdzv-id=1 train.py --out /shared/run --data /shared/text.txt --replicate 2
# Slurm         sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 scripts/slurm/train.sbatch \
#                   --out /shared/run --data /shared/text.txt --replicate 2
# Kubernetes    kubectl apply -f scripts/kubernetes/trainjob.yaml
# ```

# %% jupyter={"source_hidden": true}
folded("scripts/train.py", SCRIPTS / "train.py")

# %% [markdown] tags=["deeper"]
# ## 8. Eight symptoms, and what tells them apart · deeper
#
# Here are the symptoms of all eight patients of section 4, from running them side by side, which takes about ten
# seconds.
#
# **Predict.** How many of the eight will show `client socket has timed out`?

# %% tags=["deeper"]
timed_out = predict("patients, of eight, that show 'client socket has timed out'")

# %% tags=["deeper", "nbval-ignore-output"]
clinic.symptoms()

# %% tags=["deeper"]
late = []
for patient in clinic:
    if any("client socket has timed out" in text for text in patient.symptom().said):
        late.append(patient.number)
print("patients:", *late)

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert late == [1, 4, 7]
timed_out.compare(len(late))

# %% [markdown] tags=["deeper"]
# **Compare.** Three patients say the same and have three different diseases: a firewall that drops the port, a store
# that nobody hosts, and an address at which nobody listens. A time-out says only that somebody waited. What separates
# them is cheap to find out: does anything listen on that port of that host, and does a connection from the other one
# time out or get refused?
#
# The remaining ones differ in *who* speaks.
#
# - **All ranks, at once, with the same words** (patient 3): a setting that is wrong in the same way everywhere.
# - **One waits for a client, the other cannot connect** (1, 8): the way between them. `Network is unreachable` comes
#   from the rank's own host.
# - **One fails, the other says nothing** (2): they have met, and the address that one has told the other is wrong.
#   Which of the two fails is left to chance, so do not look for the fault on the node that reports.
# - **Nobody says anything** (5): they have met, and packets vanish.
# - **Everything works, and a later step fails** (6): look at what the earlier step left, on every host.
#
# **What changes under NCCL.** The store and its messages are the same. For the data, NCCL skips the loopback and
# Docker's interfaces by itself unless there are no others, so patient 2 is rare with it; but on nodes with several
# networks it may choose one that does not lead to the others. `NCCL_SOCKET_IFNAME` takes a list of prefixes,
# where `^docker,lo` excludes and `=eth0` is exact
# ([NVIDIA](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)). Name `lo` there, too: once you
# choose, NCCL no longer passes over it ([a report](https://github.com/aws/deep-learning-containers/issues/4756)).
# `GLOO_SOCKET_IFNAME` takes whole names, one or several with commas, and finds no interface for an exclusion
# ([a report](https://github.com/aws-samples/aws-do-eks/pull/51)). NCCL's ports are chosen by the system too, so
# patient 5 exists there: `Connect to 192.168.1.9<54263> failed : No route to host`
# ([nccl#1105](https://github.com/NVIDIA/nccl/issues/1105)). `NCCL_DEBUG=INFO` prints which interface each rank has
# taken, and it shows a fault that raises no error, `NET/Socket` in place of `NET/IB` (section 16).
#
# In the exercises you name the cause of each, and cure it.

# %% [markdown] tags=["deeper"]
# ## 9. Where the flat ring wins, and how ranks are numbered · deeper
#
# If the cable is what takes the time, the time follows from the bytes of section 2: at 100 Mbit/s, which is 12.5
# MB/s, it is the factor times S divided by 12.5 MB/s. This model can fail, because it leaves out latency, the
# processors and the steps inside the hosts.


# %% tags=["deeper", "nbval-ignore-output"]
def seconds(size, by_host, times=2):
    """The fastest of some all-reduces of `size` bytes, after one to warm up."""
    x, fastest = torch.ones(size // 4), float("inf")
    inside_and_across = groups()
    for trial in range(1 + times):
        dist.barrier()
        start = time.perf_counter()
        hierarchical_all_reduce(x, *inside_and_across) if by_host else dist.all_reduce(x)
        dist.barrier()
        if trial:
            fastest = min(fastest, time.perf_counter() - start)
    return fastest


measured = {name: max(on_hosts(seconds, S, name != "flat", link="100mbit")) for name in expected}
for name, factor in expected.items():
    modelled = 1e3 * factor * S / 12.5e6
    print(f"{name}: modelled {modelled:.0f} ms, measured {1e3 * measured[name]:.0f} ms")
modelled, ratio = (times["flat"] / times["hierarchical"] for times in (expected, measured))
print(f"ratio: modelled {modelled:.2f}, measured {ratio:.2f}")

# %% [markdown] tags=["deeper"]
# On two quiet cores the times are 5 to 15 % above the model, the hierarchical form's further than the flat ring's,
# because it does more work inside the hosts, which the model leaves out. When ranks wait for a core, both are longer.
#
# That work and two more calls are the price of sending less, and every call has a latency of its own. So there should
# be a size below which the flat ring is faster. Write each time as α + βS ([lesson 01](01_gpu_interconnects.ipynb)), α
# being the time of an empty call. The lines cross where the bytes saved are worth the calls added.

# %% tags=["deeper", "nbval-ignore-output"]
from course_utils.costs import fit_alpha_beta


def sweep(sizes):
    """Milliseconds of both all-reduces for each size."""
    return {size: [1e3 * seconds(size, by_host) for by_host in (False, True)] for size in sizes}


sizes = [3 * 2**power for power in (11, 13, 15, 17, 19)]
for rate in ("100mbit", "1gbit"):
    times = on_hosts(sweep, sizes, link=rate)[0]
    fits = [fit_alpha_beta(sizes, [times[size][i] for size in sizes]) for i in range(2)]
    print(f"{rate:>12} " + "  ".join(f"{size / 1024:7.0f} KiB" for size in sizes))
    for i, name in enumerate(expected):
        print(f"{name:>12} " + "  ".join(f"{times[size][i]:8.1f} ms" for size in sizes))
    (alpha, beta), (other_alpha, other_beta) = fits
    if beta > other_beta:
        print(f"the lines cross at {(other_alpha - alpha) / (beta - other_beta) / 1024:.0f} KiB")

# %% [markdown] tags=["deeper"]
# On a cable ten times as fast the bytes saved are worth a tenth, while the added calls cost what they cost, so the
# crossing moves to *larger* sizes. (Four ranks share two cores here, so times are noisy. A crossing that is negative or
# outside of the sizes says that the lines are too close to tell.)
#
# NCCL answers the same question from a table of measured constants ([lesson 03](03_nccl.ipynb)).
#
# ### The order of the ranks
#
# A ring is as good as its order. So far neighbours were on one host, because ranks were given out host by host. Some
# schedulers give them out in turn instead (Slurm's `--distribution=cyclic`), and a program does so by accident when it
# computes its own rank. **Predict** what leaves each host if rank 0 is on the first host, rank 1 on the second, rank 2
# on the first again, and so on.

# %% tags=["deeper"]
in_turn_leaves = predict("what leaves a host: a ring of ranks given out in turn", unit="S")


# %% tags=["deeper"]
def reduce_in_turn(size):
    """The flat all-reduce, with ranks that were given out to the hosts in turn."""
    names = ("LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
    local_rank, host, all_hosts, n = (int(os.environ[name]) for name in names)
    dist.init_process_group("gloo", rank=local_rank * all_hosts + host, world_size=n)
    result = reduce_once(size)
    dist.destroy_process_group()
    return result


in_turn = on_hosts(reduce_in_turn, S, init=False)
for host, left in enumerate(in_turn.left_host or []):
    print(f"{left / S:.1f} S left node{host}")

# %% tags=["deeper"] jupyter={"source_hidden": true}
expected_in_turn = world_size // hosts * expected["flat"]  # each rank's neighbour is elsewhere
assert in_turn == [world_size] * world_size
for left in in_turn.left_host or []:
    assert 1 <= left / (expected_in_turn * S) < 1.1
in_turn_leaves.compare(expected_in_turn)

# %% [markdown] tags=["deeper"]
# **Compare.** Every hop of the ring crosses the cable, so each host sends what *all* of its ranks send, 3 S: twice as
# much with two ranks on a host, eight times as much with eight.
#
# The result is the same, which is why nobody notices. gloo builds
# its ring in the order of the ranks. NCCL looks at the topology and orders its rings by host, whatever the ranks are
# called; but groups of your own, such as those of tensor parallelism, are made from rank numbers with every backend.

# %% [markdown] tags=["deeper"]
# ## 10. FSDP or HSDP between hosts · deeper
#
# The commands of section 7 say `--replicate 2`, and here is why. FSDP (lesson 07) over all ranks gathers every weight
# in a ring through all of them, twice a step, and reduces the gradients in the same ring; each time the slow link
# carries most of the tensor. **HSDP**, hybrid sharding, keeps one full copy *in each host*, sharded over the host's
# own ranks: weights are gathered inside the host, and only the gradients have to be averaged across.

# %% tags=["deeper"]
steps = 2
small = [f"--data={TEXT}", "--layers=2", "--hidden=128", "--length=16", "--log-every=1"]
small += [f"--batch={4 * world_size}", f"--steps={steps}"]


def train_on_hosts(*more):
    """Run train.py; return its losses, and the bytes a step that left the busiest host."""
    with tempfile.TemporaryDirectory() as out:
        program = [SCRIPTS / "train.py", *small, *more, f"--out={out}"]
        place = {"world_size": world_size, "hosts": hosts, "link": link, "init": False}
        codes = launch(run_program, *program, silent=True, **place)
        assert [*codes] == [0] * world_size
        return [line["loss"] for line in read_log(out)], max(codes.left_host or [0]) / steps

# %% [markdown] tags=["deeper"]
# Let S be the bytes of all gradients. In a ring of N ranks, an all-gather sends (N−1)/N of its size out of each host,
# and an all-reduce twice that. gloo carries out a reduce-scatter as an all-reduce. **Predict**, for N = 4, how many
# times as much leaves a host in a step of FSDP as in one of HSDP.

# %% tags=["deeper"]
fsdp_sends = predict("what leaves a host with FSDP, as a multiple of HSDP's, four ranks")

# %% tags=["deeper", "nbval-ignore-output"]
losses, left = {}, {}
for name, more in {"FSDP": [], "HSDP": ["--replicate=2"]}.items():
    losses[name], left[name] = train_on_hosts(*more)
    print(f"{name}: {left[name] / 1e6:.2f} MB leave a host in a step, losses", *losses[name])

# %% tags=["deeper", "nbval-ignore-output"] jupyter={"source_hidden": true}
block = 4 * (12 * 128**2 + 2 * 128)  # bytes of the gradients of one block
rest = 4 * (2 * 256 * 128 + 16 * 128 + 128)  # and of embeddings, last norm and head
size, ring = 2 * block + rest, (world_size - 1) / world_size
derived = {"FSDP": ring * (4 * block + rest) + 2 * ring * size, "HSDP": size}
for name, bytes_derived in derived.items():
    print(f"{name}: {bytes_derived / size:.2f} S derived")
    assert not emulated or bytes_derived <= left[name] <= 1.2 * bytes_derived
assert all(abs(a - b) < 1e-4 for a, b in zip(*losses.values(), strict=True))
fsdp_sends.compare(derived["FSDP"] / derived["HSDP"])

# %% [markdown] tags=["deeper"]
# **Compare.** Nearly three times as much, for the same losses. FSDP gathers the blocks twice and the rest once, each
# time 3/4 of it, and then reduces the gradients, which is 3/2 S with gloo; with NCCL it is 3/4 S, and FSDP sends about
# 2.1 S. HSDP sends S between two hosts, on any number of ranks: each rank averages its shard with the one rank that has
# the same shard in the other host, and all shards together are one copy. (Measured is some 5 % more than derived,
# because packets have headers and the ranks agree on the checkpoint at the end.)
#
# What HSDP costs is memory, since every host holds a full copy: twice as much per rank on two hosts, H times on H. So
# as long as the model fits into one host, shard inside it and replicate across. When it does not fit, shard across
# hosts, and then only with a network that keeps up. Lesson 07 counts the case of many hosts.

# %% [markdown] tags=["deeper"]
# ## 11. Training over a slow link: local SGD and DiLoCo · deeper
#
# Hosts with a slow link between them need not average gradients in every step. In **local SGD** ([Stich
# 2018](https://arxiv.org/abs/1805.09767)) each host trains on its own for H steps (in this section H counts steps,
# not hosts), and then the hosts average their weights. **DiLoCo** ([Douillard et al.
# 2023](https://arxiv.org/abs/2311.08105)) takes the progress since the last exchange, old weights minus new ones,
# averages it over the hosts, and gives it as a gradient to a second optimizer: an outer SGD with Nesterov momentum
# around the inner AdamW. With learning rate 1 and no momentum, the outer step is the mean of the weights, so one
# function serves both. Inside a host the link is fast, so its ranks average gradients in every step, under DDP.

# %% tags=["deeper"]
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_utils.data import Windows
from course_utils.models import build_gpt, loss_of
from lessons.multi_node import figures


# %% tags=["deeper"]
def mean_over_hosts(tensor, mesh):
    """In place: one rank of each host uses the link, then tells the others of its host."""
    if mesh.get_local_rank("local") == 0:
        dist.all_reduce(tensor, group=mesh.get_group("host"))
        tensor /= mesh["host"].size()
    dist.broadcast(tensor, group=mesh.get_group("local"), group_src=0)


def outer_step(model, outer, mesh):
    """Move the common weights by the hosts' mean progress, and go on from there."""
    (common,) = outer.param_groups[0]["params"]  # one vector: the weights after the last exchange
    common.grad = common - parameters_to_vector(model.parameters()).detach()
    mean_over_hosts(common.grad, mesh)
    outer.step()
    vector_to_parameters(common.clone(), model.parameters())
    for buffer in model.buffers():  # such as running means, which no optimizer steps
        if buffer.is_floating_point():
            mean_over_hosts(buffer, mesh)

# %% [markdown] tags=["deeper"]
# Three details matter. The vector is cloned: parameters become views of it, and inner steps would change `common` too.
# The inner optimizer's state is never sent; each host keeps its own. And all hosts must start from equal weights:
# DDP ensures that only within its group, here one host.
#
# The training loop, folded below, differs from the usual one in two places: `DDP(model,
# process_group=mesh.get_group("local"))`, and `outer_step` after every H-th step.


# %% tags=["deeper"] jupyter={"source_hidden": true}
def learn(inner, every=None, lr=1.0, momentum=0.0, steps=60, batch=12):
    """Average gradients over all ranks in each step; with `every`, exchange every so many steps."""
    mesh = init_device_mesh("cpu", (hosts, world_size // hosts), mesh_dim_names=("host", "local"))
    model = build_gpt()
    start = parameters_to_vector(model.parameters()).detach()
    outer = torch.optim.SGD([start.clone()], lr, momentum, nesterov=momentum > 0)
    replica = DDP(model, process_group=mesh.get_group("local") if every else None)
    optimizer = inner(model.parameters())
    losses, seconds, began, text = [], [], time.perf_counter(), Windows("train")
    for step in range(steps):
        mine = range(step * batch + dist.get_rank(), (step + 1) * batch, world_size)
        loss = loss_of(replica, *text.batch(mine))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if every and (step + 1) % every == 0:
            outer_step(model, outer, mesh)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return losses, seconds, start, parameters_to_vector(model.parameters()).detach()

# %% [markdown] tags=["deeper"]
# First a proof: with H = 1, plain SGD inside, and an outer learning rate of 1 without momentum, this must be the same
# as averaging the gradients in every step.


# %% tags=["deeper"]
def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


ranks = [*on_hosts(learn, plain_sgd, steps=4), *on_hosts(learn, plain_sgd, every=1, steps=4)]
starts, ends = zip(*[rank[2:] for rank in ranks], strict=True)
assert all(start.equal(starts[0]) for start in starts)  # all hosts start from equal weights
assert max((end - ends[0]).abs().max() for end in ends) < 1e-6
assert (ends[0] - starts[0]).abs().max() > 1e-3  # and they moved
print("H = 1 equals averaged gradients, to 1e-6")

# %% [markdown] tags=["deeper"]
# Now AdamW on the slow link, 60 steps each: averaging in every step over all N ranks, local SGD with H = 12, and DiLoCo
# with H = 12 and an outer momentum of 0.3 or 0.9. S is the size of the weights, 449,536 bytes. First the bytes:

# %% tags=["deeper"]
model_bits = 32 * build_gpt().config.parameter_count
rate = 1e6 * int(link.removesuffix("mbit"))  # bits a second
sends = {"every step": 60 * 2 * (world_size - 1) / world_size}  # flat all-reduce on two hosts
sends |= dict.fromkeys(["local SGD", "DiLoCo 0.3", "DiLoCo 0.9"], 60 / 12)
for name, sent in sends.items():
    print(f"{name}: {sent:g} S, modelled {sent * model_bits / rate:.2f} s on the link")

# %% [markdown] tags=["deeper"]
# **Predict.** Which run has the lowest loss after 60 steps, however long they take?

# %% tags=["deeper"]
ways = ["local SGD", "DiLoCo 0.9", "every step", "DiLoCo 0.3"]
lowest = predict("the lowest loss after 60 steps", ways)

# %% tags=["deeper", "nbval-ignore-output"]
options = {"every step": {}, "local SGD": {"every": 12}}
options |= {f"DiLoCo {m}": {"every": 12, "lr": 0.7, "momentum": m} for m in (0.3, 0.9)}
curves, same_weights, left_hosts = {}, [], {}
for name, how in options.items():
    ranks = on_hosts(learn, torch.optim.AdamW, link=link, **how)
    losses = torch.tensor([rank[0] for rank in ranks]).mean(0).unflatten(0, (5, 12)).mean(1)
    curves[name] = ranks[0][1][11::12], losses.tolist()  # a point for every 12 steps
    same_weights += [rank[3].equal(ranks[0][3]) for rank in ranks]
    left_hosts[name] = [8 * size / model_bits for size in ranks.left_host or []]
    print(f"{name}:", *(f"{left:.1f} S left node{i}" for i, left in enumerate(left_hosts[name])))

# %% tags=["deeper", "nbval-ignore-output"]
where = f"{hosts} hosts, link of {link}" if emulated else "one host, a link without limit"
figures.loss_curves(curves, f"measured: 60 steps, {where}", "time (s)")

# %% tags=["deeper", "nbval-ignore-output"] jupyter={"source_hidden": true}
last_losses = {name: losses[-1] for name, (_, losses) in curves.items()}
best, local, gentle, strong = last_losses.values()
assert all(same_weights)  # all hosts end with equal weights
for name, left in left_hosts.items():
    assert all(sends[name] < part < 1.1 * sends[name] for part in left)
assert best < min(local, gentle) and max(local, gentle) < best + 0.15 < strong
slow, fast = (curves[name][0][-1] for name in ("every step", "local SGD"))
print(f"seconds: every step {slow:.1f}, local SGD {fast:.1f}; last losses:")
print(", ".join(f"{name} {loss:.2f}" for name, loss in last_losses.items()))
lowest.compare(min(last_losses, key=last_losses.get))

# %% [markdown] tags=["deeper"]
# **Compare.** Step for step, averaging every time is best: between exchanges the hosts drift apart, and the mean of
# their weights is not where 12 common steps lead. But most of its seconds go to the link, so at any earlier second
# local SGD is ahead.
#
# *The figure: loss against seconds. Local SGD and DiLoCo 0.3 end at nearly the same loss; averaging in every step
# ends a little lower, and last. DiLoCo 0.9 falls fastest at first, and ends highest.*
#
# With four ranks, 90 S become 5: a factor of 12 from H, and of 1.5 because one rank a host uses the link.
#
# Each difference is applied lr/(1 − momentum) times in the long run: 0.7/0.7 = 1, or 0.7/0.1 = 7. The second pair is
# the default of [OpenDiLoCo](https://github.com/PrimeIntellect-ai/OpenDiloco), with H = 500 and 88,000 steps; eight
# exchanges are too few to recover from such leaps. So tune H, learning rate and momentum together. The common weights
# and their momentum cost 8 more bytes a parameter in fp32.
#
# The paper reports, for 8 workers on C4, the quality of synchronous training with 500 times less communication. What
# you saw, 112,384 parameters and 60 steps, shows the mechanism and says nothing about quality at scale.

# %% [markdown] tags=["deeper"]
# ## 12. A host that is told to leave, and one that is silent · deeper
#
# Many hosts leave in good order: a spot machine is taken back, or the time of the job is up. Then SIGTERM comes
# first, and some seconds later SIGKILL. A rank must not stop on its own, or the others wait for it in their next
# collective. So `train.py` sums a flag over all ranks in each step. Here only node1 gets the signal, when step 8 is
# printed. We leave out torchrun, and set what it would set, because its own exit code is 1 for every failure.
# **Predict** the exit codes of node0 and node1.

# %% tags=["deeper"]
pairs = ["1 and 75", "0 and 75", "75 and 75", "1 and 143"]
told_codes = predict("exit codes of node0 and node1, when node1 is told to stop", pairs)

# %% tags=["deeper", "nbval-ignore-output"]
place = "RANK={host} WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "
place += "MASTER_ADDR=node0 MASTER_PORT=29500"
stopped = run_on_hosts(
    f"{place} python {SCRIPTS / 'train.py'} {flags} --out={folder / 'stopped'}",
    when=[(r"step 8 ", "terminate node1")],
    recorded="graceful_stop",
)
stopped.show("^--|step ([89]|1[0-9]) ")
if not stopped.recorded:
    print("checkpoints:", *sorted(path.name for path in (folder / "stopped").glob("step-*")))

# %% tags=["deeper"] jupyter={"source_hidden": true}
steps = [int(step) for step, loss in stopped.numbers(r"step (\d+) +loss (\S+)")]
assert stopped.exit_codes == [75, 75]
assert stopped.recorded or (folder / "stopped" / f"step-{steps[-1]:09}").exists()
told_codes.compare("75 and 75")

# %% [markdown] tags=["deeper"]
# **Compare.** Both end with 75: when one of the ranks has got the signal, *all* finish this step and save. The newest
# checkpoint is that of the last step that was done, one or two after the signal, because the flag is summed once in a
# step. No step is lost, and the same command goes on from there.
#
# Code 75 (`EX_TEMPFAIL`) tells the scheduler that nothing is broken and that the job wants to run again; Slurm did that
# in section 6.

# %% [markdown] tags=["deeper"]
# ### A host that is silent: split brain
#
# Silence has two causes: the host is dead, or only the way to it is. Whoever waits for heartbeats cannot tell them
# apart. If the host is alive and still reaches the disk, there are soon two worlds with one checkpoint, a **split
# brain**. The program below is reduced to what matters: it trains (a short sleep stands for the step) and saves every
# tenth step. node0 sends a heartbeat with each step; node1 is a spare that takes over after a second of silence.
# Hosts often reach storage over another network than each other, and so do ours.

# %% tags=["deeper"]
job = """
import socket, sys, time
from pathlib import Path
out, fenced, spare = Path(sys.argv[1]), "--fenced" in sys.argv, socket.gethostname() == "node1"
saved, heartbeats = out / "checkpoint", socket.socket(type=socket.SOCK_DGRAM)
if spare:
    heartbeats.bind(("", 4000))
    try:
        while heartbeats.recv(16):
            heartbeats.settimeout(1)
    except TimeoutError:
        print("node0 is silent, so it must be dead: taking over", flush=True)
generation = len([*out.glob("generation-*")])
(out / f"generation-{generation}").touch(exist_ok=False)
step = int(saved.read_text()) if saved.exists() else 0
time.sleep(0.5)  # the ranks start, and load the weights
for step in range(step + 1, 121):
    time.sleep(0.02)
    if not spare:
        heartbeats.sendto(b"alive", ("node1", 4000))
    if fenced and (out / f"generation-{generation + 1}").exists():
        sys.exit("a newer generation has begun: this one stops")
    if step % 10 == 0:
        saved.write_text(str(step))
        print(f"saved step {step}", flush=True)"""

# %% [markdown] tags=["deeper"]
# The cable of node0 is pulled after step 10, and put back as soon as node1 has taken over. The part about generations
# is switched off for now. **Predict** the exit codes of node0 and node1.

# %% tags=["deeper"]
pairs = ["1 and 0", "0 and 1", "0 and 0", "1 and 1"]
split_codes = predict("exit codes of node0 and node1, when the cable is back", pairs)


# %% tags=["deeper", "nbval-ignore-output"]
def two_hosts(name, *more):
    out = folder / name
    out.mkdir()
    (out / "job.py").write_text(job)
    command = " ".join(["python", str(out / "job.py"), str(out), *more])
    happens = [("node0 . saved step 10$", "unplug node0"), ("taking over", "plug node0")]
    return run_on_hosts(command, when=happens, recorded=name)


split = two_hosts("split_brain")
split.show("^--|taking over|saved")

# %% tags=["deeper"] jupyter={"source_hidden": true}
order = [step for (step,) in split.numbers(r"saved step (\d+)")]
assert split.exit_codes == [0, 0]
assert any(later < earlier for earlier, later in zip(order, order[1:], strict=False))
split_codes.compare("0 and 0")

# %% [markdown] tags=["deeper"]
# **Compare.** Both worlds finish with exit code 0, and nothing in the logs of either host is wrong. The checkpoint ends
# at step 120, but before that it jumped back and forth between the worlds, to steps that were long done.
#
# A reader that came in the middle would have got one world's weights or the other's; with sharded checkpoints, whose
# files have equal names, some of each.
#
# torchrun gets there too. With the rendezvous on a third host, the same cable makes a second world of one host, while
# the first trains on, and both end with 0 (a test of the course does this with real agents). torchrun's 15 seconds
# only make that rare. The cure is not a better detector, because from afar a silent host looks like a dead one. It is
# a **fence** at what both want. Every world takes a number when it starts, its *generation*, one higher than any
# before. Whoever is about to write looks first whether a newer generation has begun, and then stops.

# %% tags=["deeper", "nbval-ignore-output"]
fenced = two_hosts("fenced", "--fenced")
fenced.show("^--|taking over|saved|generation")
order = [step for (step,) in fenced.numbers(r"saved step (\d+)")]
assert fenced.exit_codes == [1, 0] and order == sorted(order)

# %% [markdown] tags=["deeper"]
# node0 meets the newer generation and ends, and the saved steps only rise. A gap is left between the look and the
# write. A storage system closes it if it refuses writes with an old number (object stores can: a write that is valid
# only if the version is still the one that was read). On a file system, write each generation's checkpoints into a
# folder of its own, and read only the newest.

# %% [markdown] tags=["deeper"]
# ## 13. Checkpoints: how often, when, and on which disk · deeper
#
# ### How often?
#
# [Lesson 05](05_scaling_efficiency.ipynb) used Young's interval; here is where it comes from. Let M be the mean time
# between failures and C the time for which a checkpoint holds up the training. Saving every T costs the share C/T of
# the time. A failure comes once in M and throws away T/2 on average, which is the share T/(2M). The sum is least where
# its derivative, 1/(2M) − C/T², is zero: T = √(2CM), and there the two shares are equal. Llama 3 had 419 unexpected
# interruptions in 54 days on 16,384 GPUs (*recorded*). **Predict**: saving gets 100 times cheaper. By which factor
# does the share of the time that is lost shrink?

# %% tags=["deeper"]
shrinks = predict("the factor by which the loss shrinks, if saving costs a hundredth")

# %% tags=["deeper"]
import logging
import threading
from math import sqrt

import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

from course_utils.recorded import LLAMA3_INTERRUPTIONS

stops, days, gpus = LLAMA3_INTERRUPTIONS
M = days * 24 * 60 / stops  # minutes
lost = {}
for to_save in (300, 30, 3):
    C = to_save / 60
    T = sqrt(2 * C * M)
    lost[to_save] = C / T + T / (2 * M)
    print(f"{to_save:3} s to save: every {T:4.1f} minutes, {lost[to_save]:5.1%} lost (modelled)")
years = M * gpus / (365 * 24 * 60)
print(f"one interruption in {M / 60:.1f} hours, which is one per GPU in {years:.0f} years")

# %% tags=["deeper"] jupyter={"source_hidden": true}
for to_save, least in lost.items():
    C, T = to_save / 60, sqrt(2 * to_save / 60 * M)
    assert least < min(C / t + t / (2 * M) for t in (T / 1.2, 1.2 * T))
shrinks.compare(lost[300] / lost[3])

# %% [markdown] tags=["deeper"]
# **Compare.** By 10, the root of 100, and so does the interval. The times to save are examples; what a restart itself
# takes comes on top, and no interval changes it.
#
# The last line is why a large job needs this and a small one hardly does.
#
# ### Asynchronous saving
#
# C is not the time to write but the time for which training stands still. `dcp.async_save` copies the state,
# returns, and writes in a thread. To see that, we hold the writer until the training has changed the weights from 1
# to 2. **Predict** which values the checkpoint has.

# %% tags=["deeper"]
values = ["1, as at the call", "2, as when it is written"]
saved_value = predict("the values in the checkpoint", values)


# %% tags=["deeper"]
def save_while_training(path):
    go = threading.Event()

    class HeldWriter(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            go.wait()
            return super().write_data(plan, planner)

    weights = torch.ones(1000)
    writing = dcp.async_save({"weights": weights}, storage_writer=HeldWriter(path))
    there = [Path(path, ".metadata").exists()]
    weights += 1  # the training goes on
    go.set()
    writing.result()
    there.append(Path(path, ".metadata").exists())
    dcp.load(loaded := {"weights": torch.zeros(1000)}, checkpoint_id=path)
    return there, loaded["weights"][0].item(), weights[0].item()


seen = launch(save_while_training, folder / "async", world_size=2)
print("checkpoint there after the call, after result():", *seen[0][0])
print(f"the checkpoint has {seen[0][1]}, the training {seen[0][2]}")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert seen == [([False, True], 1.0, 2.0)] * 2
saved_value.compare("1, as at the call")

# %% [markdown] tags=["deeper"]
# **Compare.** The call returned before anything was on the disk, and the checkpoint has the values of the call. So C is
# the time of a copy to CPU memory.
#
# It costs that memory, and a failure before `result()` leaves you with the previous checkpoint. The thread calls
# collectives, so give it a process group of its own (`process_group=`), as `train.py` does: two threads on one group
# mix up their messages.
#
# ### Two disks
#
# Each rank writes its own shards. If every host writes to a disk of its own, saving is fast, local, and looks right.
# **Predict**: which call fails, and where?

# %% tags=["deeper"]
fails = ["save on node0", "save on node1", "load on node0", "load on node1"]
two_disks_fail = predict("what fails with a disk for each host", fails)


# %% tags=["deeper"]
def save_and_load(folder, shared):
    logging.disable()  # PyTorch reports each attempt at length
    disk = folder / ("shared" if shared else f"disk{os.environ['GROUP_RANK']}")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = torch.arange(dist.get_world_size() * 4.0)
    state = {"weights": distribute_tensor(weights, mesh, [Shard(0)])}
    call = "save"
    try:
        dcp.save(state, checkpoint_id=disk)
        state["weights"] = distribute_tensor(torch.zeros_like(weights), mesh, [Shard(0)])
        call = "load"
        dcp.load(state, checkpoint_id=disk)
        outcome = "done" if state["weights"].full_tensor().equal(weights) else "wrong values"
    except dcp.CheckpointException as error:
        outcome = f"{call} fails on ranks {sorted(error.failures)}"
    logging.disable(logging.NOTSET)
    return sorted(path.name for path in disk.iterdir()), outcome


per_host = world_size // hosts
two_disks = launch(save_and_load, folder, False, world_size=world_size, hosts=hosts)
for host in range(hosts):
    print(f"node{host}:", *two_disks[host * per_host])

# %% tags=["deeper"] jupyter={"source_hidden": true}
without_list = [*range(per_host, world_size)]
assert {outcome for files, outcome in two_disks} == {f"load fails on ranks {without_list}"}
two_disks_fail.compare("load on node1")

# %% [markdown] tags=["deeper"]
# **Compare.** `save` succeeds everywhere, because nobody compares the disks. Rank 0 writes `.metadata`, the list of
# what is where, so the other hosts have pieces without a list, and loading fails there: days later, when you need it.
#
# Copying the list does not help, because a load on other ranks needs pieces of the other disk. People meet it again and
# again ([Megatron-LM#1530](https://github.com/NVIDIA/Megatron-LM/issues/1530),
# [accelerate#3010](https://github.com/huggingface/accelerate/issues/3010),
# [SimDINO#24](https://github.com/RobinWu218/SimDINO/issues/24)). The cure is one place that all hosts see: a shared
# file system or an object store. Ask for it *before* the first step: rank 0 writes a file, and all look for it.
# `train.py` does so when it starts.


# %% tags=["deeper"]
def train_on_two_disks():
    out = folder / f"train{os.environ['GROUP_RANK']}"
    return run_program(SCRIPTS / "train.py", *flags.split(), f"--out={out}")


one_disk = launch(save_and_load, folder, True, world_size=world_size, hosts=hosts)
print("shared:", *one_disk[0])
assert all(outcome == "done" for files, outcome in one_disk)
try:
    launch(train_on_two_disks, world_size=2, hosts=2, init=False)
except WorkerError as error:
    print(error.exception)
    assert "rank 1 does not see rank 0's files: share --out" in error.exception

# %% [markdown] tags=["deeper"]
# With one folder the same function loads, and the list names the pieces of all ranks. On two disks `train.py` refuses
# to begin, which costs a second now instead of a run later.
#
# A shared disk can go wrong, too, and nothing in these files would show it. Here one bit changes between save and
# load:


# %% tags=["deeper"]
def flip_a_bit(path):
    dcp.save({"weights": torch.ones(1000)}, checkpoint_id=path)
    (file,) = path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.find(torch.ones(4).numpy().tobytes()) + 3] ^= 0x40
    file.write_bytes(content)
    dcp.load(loaded := {"weights": torch.zeros(1000)}, checkpoint_id=path)
    return loaded["weights"][:3].tolist()


flipped = launch(flip_a_bit, folder / "flipped", world_size=1)[0]
print(flipped)
assert flipped == [float("inf"), 1.0, 1.0]

# %% [markdown] tags=["deeper"]
# The load succeeds, and the first weight is infinite instead of 1: PyTorch's distributed checkpoints have no checksum
# that a load would look at. Write one beside each file when you copy a checkpoint (`sha256sum`), and compare before a
# restart that matters.

# %% [markdown] tags=["deeper"]
# ## 14. Kubernetes, SkyPilot and frameworks · deeper
#
# Slurm hands out hosts and leaves the rest to your script. Kubernetes and SkyPilot take a *description* of the job in
# YAML instead, and bring the hosts into that state. The questions stay the same: which image, how many ranks, who
# tells them the address, where are checkpoints kept, how long do ranks have after SIGTERM? Neither can run here, so
# this section reads the files, and checks them offline as far as that goes.
#
# ### A container image
#
# An **image** is a file system with the program and its libraries; every host starts the same one.
# [`scripts/kubernetes/Dockerfile`](../scripts/kubernetes/Dockerfile) has five instructions:
#
# | line | what it is for |
# |---|---|
# | `FROM pytorch/pytorch:2.13.0-cuda13.0-…` | PyTorch, CUDA and NCCL in exact versions. The driver is the host's |
# | `RUN pip install … numpy==2.4.6 py-spy==0.4.1` | exact too: a restart in a month must be the same run |
# | `COPY train.py where.py … /` | the programs. Data and checkpoints are not in an image: they are mounted |
# | `ENV OMP_NUM_THREADS=1` | the ranks of a host share its cores |
# | `CMD ["torchrun", …]` | a list, not a line of shell: SIGTERM must reach torchrun and not a shell that ignores it |
#
# ### A Kubernetes training job
#
# Kubernetes knows *pods*: containers that run together on one host. An extension, [Kubeflow
# Trainer](https://github.com/kubeflow/trainer), teaches it what a training job is: a `TrainJob` makes one pod per
# node, and tells each, in variables that `torchrun` reads, its number and the address of the first. Unfold the file
# first:

# %% tags=["deeper"] jupyter={"source_hidden": true}
folded("scripts/kubernetes/trainjob.yaml", SCRIPTS / "kubernetes/trainjob.yaml", language="yaml")

# %% [markdown] tags=["deeper"]
# | field | what it decides |
# |---|---|
# | `runtimeRef: torch-distributed` | Trainer's template: one node, torchrun's flags as variables (`PET_NNODES`, …) |
# | `image`, `command`, `args` | the image above; torchrun, the program and its flags; numbers are quoted, as text |
# | `numNodes`, `numProcPerNode` | torchrun's `--nnodes` and `--nproc-per-node` |
# | `resourcesPerNode` | what the scheduler must find free on one host, all of it, before the pod starts |
# | `terminationGracePeriodSeconds: 120` | until SIGKILL (default 30); a variable lifts torchrun's own limit, 30 too |
# | `activeDeadlineSeconds` | a job that hangs gives its GPUs back |
# | `capabilities: {add: [SYS_PTRACE]}` | py-spy, and so `where.py`, may read the stacks of a job that hangs |
# | `persistentVolumeClaim` at `/checkpoints` | one disk that all nodes see (ReadWriteMany), for checkpoints |
# | `emptyDir: {medium: Memory}` at `/dev/shm` | data loaders and NCCL need shared memory; a container has 64 MB of it |
#
# And after the SIGTERM? torchrun makes 1 of our 75, so the pod has *failed*, and Kubernetes starts it again only until
# `backoffLimit`, 6 failures unless the runtime says more ([scripts/README.md](../scripts/README.md) has the lines).
#
# Pods are placed one by one. Without [gang
# scheduling](https://www.kubeflow.org/docs/components/trainer/operator-guides/job-scheduling/overview/), which the
# cluster must have, one pod can hold its GPUs and wait for another that finds none.
#
# The file has many lines, and one that is misspelt is easy to overlook:

# %% tags=["deeper"]
import json

import yaml
from jsonschema import Draft202012Validator

manifest = (SCRIPTS / "kubernetes" / "trainjob.yaml").read_text()
schema = json.loads((SCRIPTS / "kubernetes" / "trainjob.schema.json").read_text())


def faults(text):
    """What is wrong with a manifest, by the schema of TrainJob made strict."""
    job = yaml.safe_load(text)
    return [error.message for error in Draft202012Validator(schema).iter_errors(job)]


print("the file itself:", faults(manifest))
for slip in (("numNodes: 2", "numNode: 2"), ('"10000"', "10000"), ("  runtimeRef:", "  runtime:")):
    print(f"{slip[0].strip()} -> {slip[1].strip()}:", *faults(manifest.replace(*slip)))
assert faults(manifest) == []
assert "'numNode' was unexpected" in faults(manifest.replace("numNodes: 2", "numNode: 2"))[0]

# %% [markdown] tags=["deeper"]
# Unless told otherwise, Kubernetes *drops* an unknown field of such an extension (it calls this **pruning**), and the
# job runs as if the line were not there: on one node, which is what the template says. Whether you hear of it depends
# on who sends the file. `kubectl apply` asks the server to refuse unknown fields
# ([KEP-2885](https://github.com/kubernetes/enhancements/issues/2885), stable since 1.27); a client that does not ask
# gets a warning at most. So check files before you send them. The schema here is Trainer's own definition, cut to the
# fields in use and made strict.
#
# ### SkyPilot
#
# [SkyPilot](https://docs.skypilot.co) looks for GPUs in several clouds and clusters, starts the nodes, runs your
# commands on each, and shuts the nodes down. `scripts/skypilot/train.yaml` asks for two nodes with eight GPUs each. The
# cell checks it against the fields of SkyPilot's own schema:

# %% tags=["deeper"]
skypilot = (SCRIPTS / "skypilot" / "train.yaml").read_text()
task_schema = json.loads((SCRIPTS / "skypilot" / "task.schema.json").read_text())
task = yaml.safe_load(skypilot)
assert not [*Draft202012Validator(task_schema).iter_errors(task)]
Markdown(f"```yaml\n{skypilot}```")

# %% [markdown] tags=["deeper"]
# - SkyPilot sets `SKYPILOT_NODE_RANK`, `SKYPILOT_NUM_NODES`, `SKYPILOT_NUM_GPUS_PER_NODE` and `SKYPILOT_NODE_IPS` on
#   each node. The first line of the last one is the address to meet at. `run` translates them into torchrun's flags.
# - `sky jobs launch` makes it a **managed job**: when a spot node is taken away, SkyPilot starts new nodes, and the
#   same command goes on from the newest checkpoint. Errors of the program itself are retried only
#   `max_restarts_on_errors` times. Its `recover_on_exit_codes` could name our 75, but torchrun has turned that into 1
#   (section 12).
# - `use_spot` has an effect on Kubernetes only where nodes carry the spot label of GKE or Karpenter. `network_tier:
#   best` asks for GPUDirect or InfiniBand, where the cloud has it.
# - `--out` lies on a **volume**, a shared file system. A bucket mounted as a folder looks like one and is not:
#   `train.py` publishes a checkpoint by *renaming* a folder, and most buckets cannot rename one in a single step.
# - `--replicate 2` is for the slow link between the nodes (section 10).
#
# ### `srun python` or `srun torchrun`?
#
# The script of section 6 starts one task per rank. Many start one per *host*, `srun torchrun --nproc-per-node=8 …`,
# and torchrun makes the ranks. That is right too, and differs in what gets through:
#
# | | `srun python`, a task per rank | `srun torchrun`, a task per host |
# |---|---|---|
# | a rank's exit code | reaches the script | becomes 1 |
# | SIGTERM | Slurm sends it to each rank | goes to torchrun, which passes it on and kills after 30 s |
# | a rank dies | the job ends | torchrun can start all ranks again within the job |
#
# Under torchrun that script could not tell "stopped in time", 75, from "failed". Choose torchrun for restarts
# within a job (section 5), and then give the ranks longer with `--shutdown-timeout`.
#
# ### What frameworks set for you
#
# Below all of them lies the same interface: each rank needs RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
# MASTER_PORT, and somebody has to notice when a rank dies.
#
# | | starts the ranks of a host | who knows the address | after a failure |
# |---|---|---|---|
# | `torchrun` (PyTorch 2.13) | yes | rendezvous, or you: `--master-addr` | all ranks anew, `--max-restarts` times (0) |
# | `srun` (Slurm 22.05) | one per task | your script: `SLURM_JOB_NODELIST` | the job ends; requeued if a host failed |
# | `accelerate launch` 1.15 | calls torchrun | you: `--machine_rank`, `--main_process_ip` on each host | as torchrun |
# | Lightning 2.6 | not under Slurm | Slurm's or torchrun's variables | under Slurm: requeues its job on SIGUSR1 |
# | Ray Train 2.43 or newer | yes, on its cluster | Ray | all workers anew, `max_failures` times (0) |
#
# (In brackets: the default. Sources: `accelerate launch --help`; Lightning,
# [SLURMEnvironment](https://lightning.ai/docs/pytorch/latest/api/lightning.pytorch.plugins.environments.SLURMEnvironment.html);
# Ray, [fault tolerance](https://docs.ray.io/en/latest/train/user-guides/fault-tolerance.html). The last two were read,
# not run.) No line says that your model, optimizer and data are *where they were*: save and load are yours in every
# row.

# %% [markdown] tags=["deeper"]
# ## 15. What it costs, and cleaning up · deeper
#
# Lesson 05 showed that the cost of a given job goes with 1/efficiency. With several hosts, three more things are on
# the bill: spot nodes that are taken away together with the work since the last checkpoint, hosts that wait, and what
# stays when the job is over. All prices below are *assumed*, and stand in one cell: put in yours.

# %% tags=["deeper"]
import math

from course_utils import recorded
from course_utils.transformer import PUBLISHED

gpu_hour = 2.50  # dollars for an hour of one GPU, assumed
spot_share = 0.4  # price of spot as a share of that, assumed
disk_month = 0.10  # dollars a month for a GB on a disk or file system, assumed
egress = 0.09  # dollars for a GB that leaves the cloud, assumed

# %% [markdown] tags=["deeper"]
# ### The run
#
# torchtitan trains Llama 3.1 8B with FSDP on 8 GPUs, one host, and on 128, sixteen hosts (*recorded*: 5,762 and 5,605
# tokens a second per GPU). Say you want to train it further, on 10 billion tokens.

# %% tags=["deeper"]
tokens, fsdp = 10e9, recorded.TORCHTITAN_FSDP
runs = {}
for gpus, speed in zip(fsdp.gpus, fsdp.tokens_per_gpu, strict=True):
    hours = tokens / (gpus * speed * 3600)
    runs[gpus] = hours, gpus * hours * gpu_hour
    print(f"{gpus:3} GPUs: {hours:5.1f} hours, {runs[gpus][1]:,.0f} dollars (modelled)")
(long, cost_of_one), (short, cost_of_16) = runs[8], runs[128]
more = cost_of_16 / cost_of_one - 1
print(f"{long / short:.1f} times as fast for {more:.1%} more")
assert 15 < long / short < 16 and 0.02 < more < 0.03

# %% [markdown] tags=["deeper"]
# Fifteen more hosts cost almost nothing, because the network of that cluster keeps up, and because the batch is sixteen
# times as large, which a training run must be able to use (lesson 05).
#
# The same calculation with your own tokens per second on one and on two hosts tells you whether your network does,
# before you rent sixteen.
#
# ### Spot, and the work that is lost
#
# A job stops when *any* of its hosts is taken away, so H hosts stop it H times as often. Each stop costs the restart
# and, on average, half the time between two checkpoints. On spot the hour is cheap, and some of the hours count for
# nothing:
#
# $$\text{cost of useful work} = \frac{\text{spot price}}{\text{share of the time that is progress}}$$
#
# **Predict.** Each host is taken away once in 50 hours (assumed), saving takes 2 minutes and restarting 15. For which
# jobs is spot, at 40 % of the price, cheaper?

# %% tags=["deeper"]
sizes_of_jobs = ["of 64 and of 128 hosts", "of 64 hosts only", "of neither size"]
cheaper = predict("jobs for which spot is cheaper", sizes_of_jobs)


# %% tags=["deeper"]
def progress(hosts, per_host=1 / 50, save=2 / 60, restart=15 / 60):
    """Share of the time that is progress, with checkpoints as often as is best. Times in hours."""
    rate = hosts * per_host
    every = math.sqrt(2 * save / rate)  # Young's interval
    paid = math.exp(rate * restart) * math.expm1(rate * (every + save)) / rate
    return every / paid


for hosts_rented in (1, 4, 16, 64, 128):
    share = progress(hosts_rented)
    price = f"{spot_share / share:.2f} of the price on demand"
    print(f"hosts: {hosts_rented:3}, progress {share:.0%} of the time, {price}")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert spot_share / progress(64) < 1 < spot_share / progress(128)
cheaper.compare("of 64 hosts only")

# %% [markdown] tags=["deeper"]
# **Compare.** For 64 yes, for 128 no: from about a hundred hosts on, the discount is used up by restarts.
#
# (`paid` is the time that
# an interval takes with all its stops, if they come at random: J. T. Daly, 2006. The simpler sum of section 13 counts
# every stop in full, also one in the middle of a restart, and so it is too dark where stops are frequent: it says
# sixty.) There, short restarts help most: an image that is already on the host, data that need no copy, a checkpoint
# that loads in parallel. The model leaves out that a host taken away must first be *found* again, and that several
# may go at once.
#
# ### What keeps costing
#
# **Predict.** The run above on 16 hosts ends on Friday at 18:00. Nobody looks before Monday at 9:00. How many times the
# cost of the run does the weekend cost?

# %% tags=["deeper"]
idle_times = predict("the weekend's cost, as a multiple of the run's")

# %% tags=["deeper"]
weekend = (6 + 24 + 24 + 9) * 128 * gpu_hour
print(f"the run {cost_of_16:,.0f} dollars; 128 idle GPUs over the weekend {weekend:,.0f} dollars")
size = 12 * PUBLISHED["Llama 3 8B"].parameter_count / 1e9  # fp32 weights and two moments of Adam
kept = {"one every half hour of the 60": 120, "the newest two": 2}
for how, number in kept.items():
    cost = number * size * disk_month
    print(f"checkpoints, {how}: {number * size:6,.0f} GB, {cost:5,.0f} dollars a month")
print(f"to take one of {size:.0f} GB out of the cloud: {size * egress:.0f} dollars")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert weekend > 10 * cost_of_16
idle_times.compare(weekend / cost_of_16)

# %% [markdown] tags=["deeper"]
# **Compare.** The weekend costs many times the run, because it has many times the hours.
#
# All checkpoints of the 60 hours on one host cost nearly as much as that run,
# each month: `train.py` keeps the newest two unless you say otherwise. What else stays on the bill when the ranks
# have ended (providers have lists of their own, such as
# [AWS](https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/checklistforunwantedcharges.html)):
#
# | what | why it is forgotten | how to see it |
# |---|---|---|
# | disks of hosts that were stopped, not deleted | a disk is billed by its size | volumes that are not attached |
# | snapshots and old images | they are made by scripts | list by date |
# | reserved or minimum nodes of a cluster | autoscaling stops at a minimum | nodes where nothing asks for a GPU |
# | notebooks on GPU hosts | a browser tab is closed, the kernel lives on | sessions without activity for an hour |
# | load balancers, public addresses, gateways | made once, billed by the hour | those without a target |
# | traffic out of the cloud or between regions | many small downloads add up | the bill, by region |
#
# **To take away**, before and after every run:
#
# - a budget with an alarm, before the first host; a limit of time on the job (`--time`, `activeDeadlineSeconds`);
# - one label on all that belongs to the run, so that one query finds it;
# - hosts end with the job: managed jobs, `sky down`, autostop; never a host that only you remember;
# - the newest checkpoint copied once to cheap storage, the others deleted;
# - the next day: a look at the list of hosts, disks, addresses and at the bill.

# %% [markdown] tags=["deeper"]
# ## 16. A ninth patient, who says nothing, and a gate before training · deeper
#
# The eight patients of the clinic fail or fall silent. The most expensive one does neither: the job runs, its losses
# fall, and every step takes as long as on its worst host. In [a
# report](https://github.com/areal-project/AReaL/issues/639) NCCL took `NET/Socket` in place of `NET/IB`: 5 GB/s of bus
# bandwidth where 25 were expected (*recorded* there), and no error. A bad cable, a GPU that is too hot or a port at
# half of its rate do the same, on one host of many.
#
# Nothing between "the scheduler has given us hosts" and "we train" looks for that, unless you put a **gate** there: a
# program that measures the hosts and leaves out those that are slow. Here are four hosts, one of which has a cable
# with a third of the rate of the others. An all-reduce over all of them tells that something is slow. To know *who*,
# measure pairs: in each round every host works with one partner, and after three rounds each has met all.

# %% tags=["deeper"]
from statistics import median


def rounds(count):
    """Rounds of pairs of hosts, an even number of them, until each has met each other one."""
    order = list(range(count))
    for _ in range(count - 1):
        yield [tuple(sorted((order[i], order[-1 - i]))) for i in range(count // 2)]
        order.insert(1, order.pop())


def megabytes_a_second(group, size=2**20):
    """Bytes over seconds of an all-reduce in a group, after one to warm up."""
    x = torch.ones(size // 4)
    dist.all_reduce(x, group=group)
    start = time.perf_counter()
    dist.all_reduce(x, group=group)
    return size / 1e6 / (time.perf_counter() - start)


for pairs in rounds(4):
    print(*pairs)

# %% [markdown] tags=["deeper"]
# **Predict.** In how many of the six pairs will the rate be low?

# %% tags=["deeper"]
low_pairs = predict("slow pairs among four hosts, one of which has a slow cable")


# %% tags=["deeper", "nbval-ignore-output"]
def measure_pairs():
    """On each host: the rate with every partner, by the pair's name."""
    all_rounds = [*rounds(dist.get_world_size())]
    groups = {pair: dist.new_group(pair) for pairs in all_rounds for pair in pairs}
    found = {}
    for pairs in all_rounds:
        dist.barrier()
        for pair in pairs:
            if dist.get_rank() in pair:
                found[f"node{pair[0]} node{pair[1]}"] = megabytes_a_second(groups[pair])
    return found


def gate():
    return [*launch(measure_pairs, world_size=4, hosts=4, link=link, fault="slow cable")]


reports = real_or_recorded("gate", gate, (emulated, f"{sentence}."))
rates = {pair: rate for found in reports for pair, rate in found.items()}
for pair, rate in sorted(rates.items()):
    print(f"{pair}: {rate:4.1f} MB/s")

# %% [markdown] tags=["deeper"]
# **Compare.** In three, all those of the slow host, because a pair is as slow as its slower member.
#
# So look at the *best* rate of each host. As long as most hosts are sound, a sound one was fast with somebody:

# %% tags=["deeper", "nbval-ignore-output"]
best = {f"node{host}": 0.0 for host in range(4)}
for pair, rate in rates.items():
    for host in pair.split():
        best[host] = max(best[host], rate)
sound = [host for host, rate in best.items() if rate > 0.6 * median(best.values())]
print({host: round(rate, 1) for host, rate in best.items()})
print("train on:", *sound)

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert sound == ["node0", "node1", "node3"]
low_pairs.compare(sum(rate < 0.6 * median(best.values()) for rate in rates.values()))

# %% [markdown] tags=["deeper"]
# On GPUs a gate has four steps, from cheap to expensive. (The first and its times are from [NVIDIA's
# documentation](https://docs.nvidia.com/datacenter/dcgm/latest/reference/command-line-reference/dcgmi/dcgmi-diag.html);
# neither it nor the second was run here, and `busbw.py` only on CPUs.)
#
# | step | on | give it | a host is left out if |
# |---|---|---|---|
# | `dcgmi diag -r 1`; after a failed job `-r 2` | each host alone | seconds; 2 minutes | a test fails |
# | `NCCL_NET=IB`, with `NCCL_DEBUG=INFO` in the log | all | nothing | NCCL ends, where it would have taken TCP |
# | `scripts/busbw.py`, one large size | each host alone | half a minute | its rate is below the others' |
# | the same with `--nnodes=2` | pairs, as above | half a minute a round | its best rate is below the others' |
#
# What the second step finds is mostly a container that does not see the cards (`ls /dev/infiniband`): Kubernetes needs
# the resource of the RDMA plugin and `IPC_LOCK`, and clouds with networks of their own need their plugin for NCCL.
# [Lesson 03](03_nccl.ipynb) has the lines of the log, and what `GDRDMA` is about.
#
# A gate needs hosts to choose from. So ask for some more than you train on, start with `srun --exclude=node2 …` or a
# smaller `--nnodes`, and report the host that was left out, or the next job gets it. Of the 419 stops of Llama 3, 220
# were faults of GPUs or their memory (*recorded*, table 5 of the paper): a gate at the start finds those that are there
# already, and a restart without a gate may get the same host again.
#
# ### Beyond the restart
#
# Section 5 starts all ranks anew after a failure, on the healthy hosts too. Newer packages do with less: two are in
# NVIDIA's resiliency extension ([`ft_launcher`](https://nvidia.github.io/nvidia-resiliency-ext/release-notes.html) and
# [in-process restart](https://nvidia.github.io/nvidia-resiliency-ext/inprocess/usage_guide.html)), the third is
# [torchft](https://github.com/meta-pytorch/torchft). None was run here; the table is from their documentation.
#
# | | what goes on after a failure | it asks for |
# |---|---|---|
# | `ft_launcher` | the job: spare hosts wait for it, and sick hosts are left out | spare hosts |
# | in-process restart | the processes: your training function is called again in them | NCCL 2.26.2 |
# | torchft | the other copies of the model, which agree in every step on who takes part | DDP or HSDP |
#
# In torchft a host that comes back gets its weights from a healthy one. That is section 10's layout once more: where
# each host has a full copy, losing a host loses no weights, and no checkpoint has to be read. NCCL itself can make a
# communicator of those that are left (`ncclCommShrink`, [lesson 03](03_nccl.ipynb)).

# %% [markdown] tags=["deeper"]
# ## 17. From the cell to the cluster · deeper
#
# A notebook's `launch` needs three things from a cluster: somebody who finds places for the ranks, carries messages to
# them, and notices that a node has gone. [Ray](https://docs.ray.io/en/latest/cluster/getting-started.html) does these
# three, so `launch(fn, on="ray")` leaves them to it. It asks for one CPU per rank, with NCCL for one GPU, on as few
# nodes as possible. On each of them a process of Ray's, an **actor**, starts the ranks exactly as your notebook does
# on its own machine. Therefore the rest stays as you know it: labelled output, the first error with its rank and
# line, exit codes and signals, the table of where each rank stands at a time-out or an interrupt, `record`, and ranks
# that stay warm. With `COURSE_ON=ray` in its environment, a notebook does so in every cell.
#
# ```text
# one machine   ray start --head
# Slurm         srun --nodes=2 --ntasks-per-node=1 ray symmetric-run --address HOST:6379 -- jupyter lab
# Kubernetes    a RayCluster made by KubeRay; the notebook runs in its network, from the same image
# ```
#
# The second line starts Ray on all hosts of a job and the command after `--` on HOST, the first of them; Ray ends
# with the command. (On the Slurm of section 6 it was run, with a program in the place of JupyterLab; the third line was
# read only.) A notebook elsewhere finds its cluster by `RAY_ADDRESS`.
#
# What differs: ranks use the nodes' network and not only loopback, so ports between nodes must be open (section 4).
# `hosts=`, `verify=` and `%%ranks` stay on the notebook's machine. Ranks that stay warm keep their places, for 15
# minutes without a call or until `shutdown()`. All nodes need the same Python, PyTorch and course; a difference is
# told before anything runs.
#
# **Predict.** Four ranks on two nodes have answered one call. How long does the next take, if its function does
# nothing?

# %% tags=["deeper"]
warm = predict("milliseconds of an empty warm call, four ranks on two nodes", unit="ms")

# %% tags=["deeper"]
from statistics import median

if os.environ.get("COURSE_ON") == "ray":
    on_ray = True, "Ray 2.60.0, two nodes that share a machine of two cores"
else:
    on_ray = False, "COURSE_ON is not ray."


def seconds_of(size, on):
    """Seconds of a call with an argument of so many bytes."""
    argument = bytes(size)
    start = time.perf_counter()
    launch(len, argument, world_size=4, on=on)
    return time.perf_counter() - start


def what_calls_cost(on):
    """Seconds of a first call, then the median of warm ones, by the size of the argument."""
    shutdown()
    costs = {"first call": seconds_of(0, on)}
    for name, size, times in (("warm call", 0, 20), ("1 MB", 10**6, 10), ("100 MB", 10**8, 3)):
        costs[name] = median(seconds_of(size, on) for _ in range(times))
    return costs


# %% tags=["deeper", "nbval-ignore-output"]
def on_both():
    return {on: what_calls_cost(on) for on in ("here", "ray")}


costs = real_or_recorded("ray_calls", on_both, on_ray)
print(f"{'':12}{'here':>10}{'on Ray':>10}")
for name, here in costs["here"].items():
    print(f"{name:12}{1000 * here:7.0f} ms{1000 * costs['ray'][name]:7.0f} ms")

# %% tags=["deeper"] jupyter={"source_hidden": true}
assert 20 * costs["ray"]["warm call"] < costs["ray"]["first call"]
assert costs["ray"]["100 MB"] > 5 * costs["ray"]["1 MB"]
warm.compare(1000 * costs["ray"]["warm call"])

# %% [markdown] tags=["deeper"]
# **Compare.** Some milliseconds: a message to each rank and two ways back through Ray, on top of what the call costs
# here. The first call costs seconds, because an actor starts on each node and imports PyTorch there, once for all its
# ranks. (`here` its import was over before the clock began.) A large argument is stored once by Ray and fetched by
# every node, then copied to every rank.
#
# So send what is small, a configuration or a path, and let the ranks read data where they are.
#
# ### A function as a Slurm job
#
# On a cluster without Ray you can still send a function. [submitit](https://github.com/facebookincubator/submitit)
# stores it in a file, writes the batch script of section 6, and reads what each task has returned. Here it runs on
# `login`, where `sbatch` is:

# %% tags=["deeper"]
program = """
import logging
import submitit

logging.disable()  # of accounts, which this Slurm does not keep

def total(value):
    import torch
    import torch.distributed as dist

    place = submitit.helpers.TorchDistributedEnvironment()
    place.export(set_cuda_visible_devices=False)
    dist.init_process_group("gloo")
    x = torch.tensor(value + place.rank)
    dist.all_reduce(x)
    return f"rank {place.rank} of {place.world_size}, all met at {place.master_addr}: {x.item()}"


executor = submitit.AutoExecutor("jobs")
executor.update_parameters(nodes=2, tasks_per_node=1, timeout_min=10)
print(*executor.submit(total, 10).results(), sep="\\n")
"""


# %% tags=["deeper", "nbval-ignore-output"]
from importlib.util import find_spec


def as_a_job():
    with tempfile.TemporaryDirectory() as folder, SlurmCluster(hosts=2) as cluster:
        Path(folder, "submit.py").write_text(program)
        return cluster.run(f"cd {folder} && {sys.executable} submit.py 2> warnings", timeout=200)


no_submitit = False, "submitit is not installed (make ray)."
available = slurm.available() if find_spec("submitit") else no_submitit
said = real_or_recorded("submitit_job", as_a_job, available).splitlines()
print(*said, sep="\n")
assert said == [f"rank {rank} of 2, all met at node0: 21" for rank in range(2)]

# %% [markdown] tags=["deeper"]
# `export` sets the variables of section 1 from those of Slurm. Nothing is warm: each call waits in the queue and
# imports PyTorch in every task. Output is in files (`job.stdout()`), and the limit has a trap: submitit has Slurm send
# SIGUSR2 90 s before the end (`--signal=USR2@90`), so that `timeout_min=2` leaves a function half a minute.
#
# | | you send | ranks between calls | several hosts | a failure |
# |---|---|---|---|---|
# | `launch(fn, on="ray")` | a function, from a cell | stay warm | by Ray | first cause, table of all ranks |
# | submitit 1.5 | a function, as a batch job | end | by Slurm | the task's traceback, as text |
# | Monarch | method calls to a mesh of actors | keep their state | by jobs of its own | goes up a tree of supervisors |
# | jupyter-distributed 0.1 | each cell: the kernel is N processes | have all variables | no | each rank's traceback |
#
# (The last two from their own descriptions, [Monarch](https://github.com/meta-pytorch/monarch) and
# [jupyter-distributed](https://pypi.org/project/jupyter-distributed/), in November 2026.) Monarch turns the picture
# round: one program, the controller, says what each mesh of actors does next, which suits work whose parts differ,
# such as reinforcement learning. jupyter-distributed has no controller: all variables are on the ranks.

# %% [markdown]
# ## Recap, with the numbers of this run

# %%
for name, factor in expected.items():
    print(f"{name} all-reduce, {world_size} ranks on {hosts} hosts: {factor:.2f} S leave each host")

# %% [markdown]
# How your predictions came out:

# %%
predictions()

# %% [markdown]
# - A host is a name, an address and an interface. Network problems are one of these, or a port.
# - A flat ring sends 2(N−1)/N · S from each host, the hierarchical form 2(H−1)/H · S. The order of the ranks decides
#   how many hops cross.
# - The agents meet at the rendezvous, the ranks at `MASTER_ADDR`, at a port that nobody chose. Between hosts all
#   ports must be open.
# - Read a network failure from the name to the address, the interface, the port of the store, and the other ports.
# - When a host dies, the others meet again, alone or with a new one, and go on from the last checkpoint. One that comes
#   back stops the others by SIGTERM, so a program should save then. A graceful stop saves, too, and says by its exit
#   code that it is not done.
# - A batch script translates the scheduler's variables, passes the signal on, and asks to be requeued.
#
# **Now you can answer**
#
# 1. Rank 8 is the first rank of the second host. Which GPU does it take?
# 2. A tensor of S bytes is all-reduced among 64 ranks on 8 hosts. How many bytes leave a host in a flat ring, and how
#    many at least?
# 3. Which host is `MASTER_ADDR` if the rendezvous endpoint is on another host than rank 0?
# 4. (Section 8.) `Connection refused, remote=[127.0.0.1]`, on the second host only. What is wrong?
# 5. Port 29500 is open between the hosts, and the job hangs in its first collective. Why?
# 6. A host dies at step 57; checkpoints are written at every tenth step. Where do the others go on?
# 7. Why does a job that was told to stop end with 75 and not with 0?
#
# <details><summary>Answers</summary>
#
# 1. GPU 0, its `LOCAL_RANK` (section 1).
# 2. 2 · 63/64 S = 1.97 S, against 2 · 7/8 S = 1.75 S (section 2).
# 3. The host of rank 0, at a free port; the endpoint is the agents' (section 3).
# 4. gloo took the loopback interface, because the host's own name resolves to 127.0.0.1 or no interface was named:
#    set `GLOO_SOCKET_IFNAME`, or mend the name (section 8, patient 2).
# 5. The store is at that port. The data go through ports chosen at random, and these are closed (section 4).
# 6. After step 50 (section 5).
# 7. The scheduler has to tell "not done yet" from "done", and from a failure that would come back (section 6).
# </details>
#
# **Exercises:** [exercises/16_multi_node](../exercises/16_multi_node_exercises.ipynb). **Next:**
# [17 serving](17_serving.ipynb), on many GPUs and people who wait.
#
# **Worth reading**
# - PyTorch, [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html): every flag, and what a restart is.
# - Llama team, *The Llama 3 herd of models*, 2024, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), section 3.3:
#   what fails on 16,384 GPUs, and how often.
# - S. Bekman, [ML engineering](https://github.com/stas00/ml-engineering), the parts on networks, Slurm and fault
#   tolerance: a practitioner's notes.
