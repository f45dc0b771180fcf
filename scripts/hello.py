"""Who is where, and do all ranks reach each other? Run this first on a new cluster.

    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 scripts/hello.py

Rank 0 prints a line for each rank, and one line if a sum over all ranks is right. Ranks that do not reach each other
say so within a minute. Does nothing appear at all? Then the agents wait for each other: see on node0, by
`ss -ltnp 'sport = :29500'`, who has the port; if it is not torchrun, take another one in --rdzv-endpoint.
"""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    device, backend = torch.device("cpu"), "gloo"
    if gpus := torch.cuda.device_count():  # of this host, or only the rank's own, as the launcher has it
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus), "nccl"
        torch.cuda.set_device(device)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, master = socket.gethostname(), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    line = f"rank {rank} is local rank {os.environ['LOCAL_RANK']} on {host}, master {master}"
    lines, minute = [""] * world_size, timedelta(minutes=1)
    try:
        dist.init_process_group(backend, device_id=device if backend == "nccl" else None, timeout=minute)
        dist.all_gather_object(lines, line)
        ranks = torch.tensor([float(rank)], device=device)
        dist.all_reduce(ranks)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank} on {host} does not reach all other ranks within a minute. Look first at a host whose ranks "
            f"print another error, or nothing. Else a port is closed: {master}, or one of those that {backend} chooses"
        ) from error
    if ranks.item() != sum(range(world_size)):
        raise RuntimeError(f"rank {rank}: the sum of all ranks is {sum(range(world_size))}, got {ranks.item():g}")
    if rank == 0:
        print("\n".join(lines), f"{world_size} ranks over {backend}: the sum is right", sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
