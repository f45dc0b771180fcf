"""How fast is a message between each two ranks here, and which pair is the slowest?

    torchrun --standalone --nproc-per-node=8 scripts/links.py
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 scripts/links.py

Each pair plays ping-pong. Rank 0 prints GB/s of a large message and microseconds of a small one, each from half of the
median round trip. Then hold the pairs that are slow against `nvidia-smi topo -m`. Pairs without a common rank play at
the same time, and share the links that they have in common, as in a job; --alone shows what a link gives to one pair.
"""

import argparse
import itertools
import os
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def seconds_of_one_message(x: torch.Tensor, peer: int, first: bool, rounds: int) -> float:
    """Half of the median round trip of x between this rank and its peer; the first two do not count."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        if first:
            dist.send(x, dst=peer)
            dist.recv(x, src=peer)
        else:
            dist.recv(x, src=peer)
            dist.send(x, dst=peer)
        if x.is_cuda:
            torch.cuda.synchronize()  # a call returns when it is in the GPU's queue
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) / 2


def turns(n: int, alone: bool) -> list[list[tuple[int, int]]]:
    """All pairs of n ranks, in turns: each pair alone, or a tournament in which no rank waits if n is even."""
    pairs = [*itertools.combinations(range(n), 2)]
    if alone:
        return [[pair] for pair in pairs]
    last = n - 1 + n % 2
    found: list[list[tuple[int, int]]] = [[] for _ in range(last)]
    for a, b in pairs:
        found[(2 * a if b == last else a + b) % last].append((a, b))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=2**10, help="bytes of the small message (default 1 KiB)")
    parser.add_argument("--large", type=int, default=2**26, help="bytes of the large message (default 64 MiB)")
    parser.add_argument("--rounds", type=int, default=20, help="timed round trips of each pair (default 20)")
    parser.add_argument("--alone", action="store_true", help="one pair at a time: N(N-1)/2 turns instead of N-1 or N")
    options = parser.parse_args()
    if not 1 <= options.small < options.large or options.rounds < 1:
        parser.error("1 <= small < large, and at least one round")

    device, backend = torch.device("cpu"), "gloo"
    if gpus := torch.cuda.device_count():  # all of this host, or only the rank's own
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus), "nccl"
        torch.cuda.set_device(device)
    minute = timedelta(minutes=1)  # not the usual 10 or 30, should a rank not be reached
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None, timeout=minute)
    rank, n = dist.get_rank(), dist.get_world_size()

    found = torch.zeros(n, n, 2, dtype=torch.float64, device=device)
    for pairs in turns(n, options.alone):
        for a, b in pairs:
            if rank in (a, b):
                for which, size in enumerate((options.large, options.small)):
                    x = torch.zeros(size, dtype=torch.uint8, device=device)
                    found[a, b, which] = seconds_of_one_message(x, a + b - rank, rank == a, options.rounds) / 2
        dist.barrier()
    dist.all_reduce(found)  # the mean of what both ranks of a pair saw

    if rank == 0:
        large, small = found.unbind(-1)
        print(f"{n} ranks, {backend}, {'one pair at a time' if options.alone else 'pairs in parallel'}", flush=True)
        for what, table in (("GB/s", options.large / large / 1e9), ("µs", small * 1e6)):
            print(f"{what:>8} " + "".join(f"{f'rank {b}':>9}" for b in range(1, n)))
            for a in range(n - 1):
                print(f"rank {a:3} " + "".join(f"{table[a, b]:9.3g}" if b > a else " " * 9 for b in range(1, n)))
        if n > 1:
            a, b = divmod(int(large.argmax()), n)
            print(f"slowest: ranks {a} and {b}, {options.large / large[a, b] / 1e9:.3g} GB/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
