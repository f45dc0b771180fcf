"""The solutions of the exercises of lesson 16; what stands between the marks is what a learner writes."""

import math
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist


def hierarchical_mean(tensor: torch.Tensor, host_of: list[str]) -> None:
    """Put the mean over all ranks into tensor, with few bytes between hosts.

    tensor: any shape, strides and floating-point dtype, in which the numbers travel.
    host_of: the name of the host of each rank.
    """
    ### BEGIN SOLUTION
    hosts = {}
    for rank, host in enumerate(host_of):
        hosts.setdefault(host, []).append(rank)
    rows = list(hosts.values())  # the ranks of each host
    columns = [list(column) for column in zip(*rows, strict=True)]  # one rank of each host
    inside, _ = dist.new_subgroups_by_enumeration(rows)
    across, _ = dist.new_subgroups_by_enumeration(columns)
    count, per_host = tensor.numel(), len(rows[0])
    padded = tensor.new_zeros(count + -count % per_host)
    padded[:count] = tensor.flatten()
    shard = padded.new_empty(padded.numel() // per_host)
    dist.reduce_scatter_single(shard, padded, group=inside)
    dist.all_reduce(shard, group=across)
    shard /= len(host_of)
    dist.all_gather_single(padded, shard, group=inside)
    tensor.copy_(padded[:count].view(tensor.shape))
    ### END SOLUTION


def join() -> int:
    """Make the default process group, with gloo, of all ranks of all hosts.

    Returns
    -------
    int
        The number of this rank's GPU among those of its host, which has one for each of its ranks.
    """
    ### BEGIN SOLUTION
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    return int(os.environ["LOCAL_RANK"])
    ### END SOLUTION


def diagnoses_and_cures() -> dict[int, tuple[str, dict]]:
    """For each patient, from 1 to 8: the cause, and the cure as keywords of `treat`.

    For example {3: ("wrong address", {"environment": {"MASTER_ADDR": "node0"}}), ...}.
    """
    ### BEGIN SOLUTION
    return {
        1: ("firewall drops the port", {"open_ports": 29500}),
        2: ("gloo takes the loopback", {"environment": {"GLOO_SOCKET_IFNAME": "eth0"}}),
        3: ("no such interface", {"environment": {"GLOO_SOCKET_IFNAME": "eth0"}}),
        4: ("nobody hosts the store", {"environment": {"RDZV_ENDPOINT": "node0:29500"}}),
        5: ("firewall opens only the port", {"open_ports": "all"}),
        6: ("no shared disk", {"folder": "shared/checkpoint"}),
        7: ("wrong address", {"environment": {"MASTER_ADDR": "node0"}}),
        8: ("interface down", {"link": "up"}),
    }
    ### END SOLUTION


def train(folder: Path, steps: int, state: torch.Tensor, do_step) -> int:
    """Do the steps that are left, of 0 to steps - 1; return 0 if all are done, 75 if told to stop.

    folder: shared by all ranks, and empty in the first call.
    state: what this rank begins step 0 with; every rank has another one.
    do_step(step, state) -> the state after that step. All ranks have to call it together.
    A call after the last step does nothing, and returns 0.
    """
    ### BEGIN SOLUTION
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    saved, step = folder / f"rank-{dist.get_rank()}.pt", 0
    if saved.exists():
        step, state = torch.load(saved)
    while step < steps:
        state = do_step(step, state)
        step += 1
        stop = torch.tensor(len(told))
        dist.all_reduce(stop)
        if stop > 0 or step == steps:
            torch.save((step, state), saved)
            break
    return 0 if step == steps else 75
    ### END SOLUTION


def job_script(program: str) -> str:
    """A job script for sbatch, in bash, that runs `program` (a command line) as each rank.

    The program finds the other ranks by the variables that torchrun sets. It saves on SIGTERM and
    returns 75; it returns 0 when all steps are done, and another code when it fails.
    """
    ### BEGIN SOLUTION
    return f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2
#SBATCH --time=1:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
export WORLD_SIZE=$SLURM_NTASKS
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec {program}'
code=$?
if [ $code = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""
    ### END SOLUTION


def checkpoint_plan(
    hosts: int, days: float, save: float, restart: float
) -> tuple[float, float, float]:
    """Minutes between failures of the job, minutes between checkpoints, per cent of time lost.

    Parameters
    ----------
    hosts : int
    days : float
        Days between two failures of one host, on average.
    save, restart : float
        Minutes for which training stands still in a save, and until it goes on after a failure.
    """
    ### BEGIN SOLUTION
    between = days * 24 * 60 / hosts
    every = math.sqrt(2 * save * between)
    lost = save / every + (restart + every / 2) / between
    return between, every, 100 * lost
    ### END SOLUTION
