"""Measure what ``launch(..., verify=True)`` adds to each operation, against the same call without it.

    python benchmarks/verify.py [--quick] [--output FILE]

Both take turns within one call: a block of all-reduces with what the ranks pass written down, and one without. The
smallest tensor is the worst case. Beside it a step of DDP and of FSDP2. Prints a table; nothing is asserted.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import main, table

from course_utils import launch


def all_reduce(elements: int) -> Callable[[], object]:
    x = torch.ones(elements)
    return lambda: dist.all_reduce(x)


def training_step(kind: str) -> Callable[[], object]:
    """A step of four layers, 1 MiB each, by DDP or FSDP2."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
    if kind == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


WORK: dict[str, tuple[Callable[..., Callable[[], object]], object, int]] = {  # what makes it, its argument, in a block
    "all_reduce of 4 B": (all_reduce, 1, 100), "all_reduce of 4 kB": (all_reduce, 1000, 100),
    "all_reduce of 4 MB": (all_reduce, 10**6, 5), "step of DDP": (training_step, "DDP", 2),
    "step of FSDP2": (training_step, "FSDP2", 2),
}


def take_turns(name: str, blocks: int) -> dict[str, list[tuple[float, float]]]:
    """On a rank: seconds of an operation, and CPU seconds of its thread, in each block with and without."""
    from course_utils.ranks import interceptor

    make, argument, count = WORK[name]
    work, announce = make(argument), interceptor.announce
    found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for block in range(2 * blocks + 2):
        how = "with" if block % 2 else "without"
        interceptor.announce = announce if how == "with" else None
        dist.barrier()
        begin, used = time.perf_counter(), time.thread_time()
        for _ in range(count):
            work()
        if block > 1:  # the first of each warm up
            found[how].append(((time.perf_counter() - begin) / count, (time.thread_time() - used) / count))
    interceptor.announce = announce
    return found


def measure(quick: bool) -> dict:
    ranks, blocks, rows = 2, 3 if quick else 40, []
    for name in WORK:
        by_rank = launch(take_turns, name, blocks, world_size=ranks, backend="gloo", verify=True, timeout=600)
        pairs = [*zip(by_rank[0]["without"], by_rank[0]["with"], strict=True)]
        ratios = statistics.quantiles([one[0] / other[0] for other, one in pairs], n=4)
        rows.append({
            "work": name, "without_s": statistics.median(other[0] for other, _ in pairs),
            "cpu_added_s": statistics.median(one[1] - other[1] for other, one in pairs),
            "ratio": ratios[1], "quartiles": [ratios[0], ratios[2]],
        })
    return {"torch": torch.__version__, "ranks": ranks, "blocks": blocks, "rows": rows}


def markdown(result: dict) -> str:
    rows = [
        [row["work"], f"{1e6 * row['without_s']:,.0f} µs", f"{row['ratio']:.2f}",
         " to ".join(f"{value:.2f}" for value in row["quartiles"]), f"{1e6 * row['cpu_added_s']:,.0f} µs"]
        for row in result["rows"]
    ]
    return "\n\n".join([
        f"## Cost of verify=True on {result['ranks']} ranks",
        table(["on rank 0", "without", "with / without (median)", "quartiles", "CPU time added"], rows),
        f"{result['blocks']} pairs of blocks in turns, in one call. torch {result['torch']}.",
    ])


if __name__ == "__main__":
    main(measure, markdown)
