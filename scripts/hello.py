"""Who is where, and do all ranks reach each other? Run this first on a new cluster.

    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 scripts/hello.py

Rank 0 prints a line for each rank, and one line if a sum over all ranks is right. Ranks that do not reach each other
say so within a minute. Does nothing appear at all? Then the agents wait for each other: see on node0, by
`ss -ltnp 'sport = :29500'`, who has the port; if it is not torchrun, take another one in --rdzv-endpoint.
"""

import os
import socket
import sys
import threading

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
    lines = [""] * world_size

    def give_up() -> None:
        print(f"rank {rank} on {host} has not reached all other ranks within a minute. Look first at a host whose "
              f"ranks print another error, or nothing. Else a port is closed between hosts: {master}, or one of those "
              f"that {backend} chooses for itself", file=sys.stderr, flush=True)
        os._exit(1)

    clock = threading.Timer(60, give_up)  # sooner than the time-outs of PyTorch and of the operating system
    clock.daemon = True
    clock.start()
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    dist.all_gather_object(lines, line)
    ranks = torch.tensor([float(rank)], device=device)
    dist.all_reduce(ranks)
    if ranks.item() != sum(range(world_size)):
        raise RuntimeError(f"rank {rank}: the sum of all ranks is {sum(range(world_size))}, got {ranks.item():g}")
    clock.cancel()
    if rank == 0:
        print("\n".join(lines), f"{world_size} ranks over {backend}: the sum is right", sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
