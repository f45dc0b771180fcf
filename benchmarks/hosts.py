"""What emulated hosts cost, and how close their links come to what was asked for: times, rates and bytes.

``python benchmarks/hosts.py`` prints a table a question. Every rate is a ratio: measured over asked for.
"""

import statistics

import torch
import torch.distributed as dist
from common import median, seconds

from course_utils import launch, shutdown
from lessons.multi_node.hosts import hosts_available

ROUNDS = 5
SIZE = 1 << 20  # bytes that are reduced
RATES = {"10mbit": 1e7, "100mbit": 1e8, "1gbit": 1e9}


def reduce(size: int, rounds: int) -> float:
    """Seconds of one all-reduce of ``size`` bytes, the median; all ranks begin together."""
    x, times = torch.ones(size // 4), []
    for _ in range(rounds):
        dist.barrier()
        times.append(seconds(lambda: dist.all_reduce(x)))
    return statistics.median(times)


def cold(**options) -> None:
    shutdown()
    launch(dist.get_rank, world_size=4, **options)


def start_and_call() -> None:
    launch(dist.get_rank, world_size=4)  # the fork server is ready
    for name, options in (("one host", {}), ("two hosts", {"hosts": 2})):
        first = median(lambda options=options: cold(**options), ROUNDS)
        warm = median(lambda options=options: launch(dist.get_rank, world_size=4, **options), 10 * ROUNDS)
        print(f"4 ranks on {name:9}  first call {1e3 * first:7.0f} ms   warm call {1e3 * warm:7.1f} ms")


def links() -> None:
    """A ring of 4 ranks on 2 hosts sends 1.5 of the tensor from each host."""
    print("\nlink      all_reduce of 1 MiB   measured/asked rate   bytes left each host / 1.5 S")
    for link, rate in RATES.items():
        took = max(launch(reduce, SIZE, ROUNDS, world_size=4, hosts=2, link=link, timeout=300))
        results = launch(reduce, SIZE, 1, world_size=4, hosts=2, link=link, timeout=300)
        ratio = 1.5 * SIZE * 8 / took / rate
        bytes_ratio = ", ".join(f"{left / (1.5 * SIZE):.3f}" for left in results.left_host)
        print(f"{link:9} {1e3 * took:17.0f} ms   {ratio:19.2f}   {bytes_ratio}")
    took = max(launch(reduce, SIZE, ROUNDS, world_size=4, hosts=2))
    print(f"no limit  {1e3 * took:17.1f} ms")


if __name__ == "__main__":
    made = seconds(hosts_available)
    there, sentence = hosts_available()
    print(sentence)
    if there:
        print(f"two hosts made and ended                 {1e3 * made:7.0f} ms")
        start_and_call()
        links()
