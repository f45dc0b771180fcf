"""How fast is an all-reduce here, at the sizes of my job? Hold the last column against nccl-tests on the same hosts.

    torchrun --standalone --nproc-per-node=8 scripts/busbw.py
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 scripts/busbw.py

Rank 0 prints a line for each size: the time of the slowest rank, S/t, and the bus bandwidth, S/t times 2(N-1)/N.
It times sums of float32, as nccl-tests does by default: of this type, NVSwitches (NVLS) add sums and nothing else.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def seconds_of_one_call(x: torch.Tensor, calls: int, warm_up: int = 5) -> float:
    """Mean time of an all-reduce of x, on the slowest rank; the calls are queued back to back."""
    for _ in range(warm_up):
        dist.all_reduce(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(x)
    if x.is_cuda:
        torch.cuda.synchronize()  # a call returns when it is in the GPU's queue, not when it is done
    slowest = torch.tensor((time.perf_counter() - start) / calls, device=x.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smallest", type=int, default=2**10, help="bytes of the first tensor (default 1 KiB)")
    parser.add_argument("--largest", type=int, default=2**30, help="bytes of the last tensor at most (default 1 GiB)")
    parser.add_argument("--calls", type=int, default=20, help="timed calls at each size (default 20)")
    options = parser.parse_args()
    if options.smallest < 4 or options.largest < options.smallest or options.calls < 1:
        parser.error("4 <= smallest <= largest, and at least one call")

    device, backend = torch.device("cpu"), "gloo"
    if gpus := torch.cuda.device_count():  # all of this host, or only the rank's own
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus), "nccl"
        torch.cuda.set_device(device)
    # With device_id the communicator is made here, so a broken network shows now and not in the first all-reduce.
    dist.init_process_group(
        backend, device_id=device if backend == "nccl" else None, timeout=timedelta(minutes=5)
    )
    rank, n = dist.get_rank(), dist.get_world_size()

    if rank == 0:
        print(f"{n} ranks, {backend}\n{'bytes':>12} {'µs':>10} {'S/t GB/s':>10} {'busbw GB/s':>11}", flush=True)
    size = options.smallest
    while size <= options.largest:
        x = torch.zeros(size // 4, device=device)  # whose sums stay zero
        t = seconds_of_one_call(x, options.calls)
        dist.all_reduce(x.fill_(1))
        if not bool((x == n).all()):
            raise RuntimeError(f"rank {rank}: an all-reduce of {size} bytes gives a wrong sum")
        if rank == 0:
            rate = x.nbytes / t / 1e9
            print(f"{x.nbytes:12} {t * 1e6:10.1f} {rate:10.3f} {rate * 2 * (n - 1) / n:11.3f}", flush=True)
        size *= 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
