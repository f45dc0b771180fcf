"""Who is where, and do all ranks reach each other? Run this first on a new cluster.

    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 scripts/hello.py

Rank 0 prints a line for each rank, and one line if a sum over all ranks is right.
"""

import os
import socket

import torch
import torch.distributed as dist


def main() -> None:
    device, backend = torch.device("cpu"), "gloo"
    if gpus := torch.cuda.device_count():  # of this host, or only the rank's own, as the launcher has it
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    line = f"rank {rank} is local rank {os.environ['LOCAL_RANK']} on {socket.gethostname()}, master {master}"
    lines = [""] * world_size
    dist.all_gather_object(lines, line)

    ranks = torch.tensor([float(rank)], device=device)
    dist.all_reduce(ranks)
    if ranks.item() != sum(range(world_size)):
        raise RuntimeError(f"rank {rank}: the sum of all ranks is {sum(range(world_size))}, got {ranks.item():g}")
    if rank == 0:
        print("\n".join(lines), f"{world_size} ranks over {backend}: the sum is right", sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
