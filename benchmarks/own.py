"""What is measured of this course's launcher alone: many ranks, and the cost of the ledger."""

import json
from pathlib import Path

from kernel import kernel
from scenarios import Effort, first_result_cold, first_result_ready, must

import tools

LEDGER = """
import statistics, time
import torch
from course_utils import launch, record

def overhead(blocks, steps):
    from course_utils.ranks import interceptor

    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    batch = torch.randn(32, 512)

    def block():
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - start) / steps

    def without():
        interceptor.uninstall()
        return block()

    def installed():
        interceptor.install()
        return block()

    def recorded():
        with record():
            return block()

    kinds = [without, installed, recorded]
    times = {kind.__name__: [] for kind in kinds}
    block()
    for i in range(blocks):
        for kind in kinds[i % 3:] + kinds[: i % 3]:
            times[kind.__name__].append(kind())
    interceptor.install()
    return {name: statistics.median(values) for name, values in times.items()}
"""


def ledger_overhead(python: Path, ranks: int, blocks: int, steps: int) -> dict:
    """Seconds of a step of DDP on rank 0 without the ledger, with it watching, and while recording; and the ratios."""
    with kernel(python) as k:
        call = (
            f"import json\nprint(json.dumps(launch(overhead, {blocks}, {steps}, world_size={ranks}, timeout=300)[0]))"
        )
        cell = must(k.run(LEDGER, call, limit=330), "ledger")
    step = json.loads(cell.text.strip().splitlines()[-1])
    return {
        "ranks": ranks,
        "step_s": step,
        "ratio_watching": step["installed"] / step["without"],
        "ratio_recording": step["recorded"] / step["without"],
    }


WARM = """
import json, statistics, time
import torch, torch.distributed as dist
from course_utils import launch

def collective():
    x = torch.ones(1000)
    start = time.perf_counter()
    dist.all_reduce(x)
    return time.perf_counter() - start

def calls(fn, ranks, count):
    took, inside = [], []
    for _ in range(count):
        start = time.perf_counter()
        inside.append(max(launch(fn, world_size=ranks)))
        took.append(time.perf_counter() - start)
    return statistics.median(took), statistics.median(inside)
"""


def warm_shares(python: Path, ranks: int, count: int) -> dict:
    """Seconds of a warm call of an empty function, of one with an all-reduce, and of that all-reduce alone."""
    with kernel(python) as k:
        empty = f"calls(lambda: 0.0, {ranks}, {count})[0]"
        cell = must(
            k.run(WARM, f"print(json.dumps([{empty}, *calls(collective, {ranks}, {count})]))", limit=120), "warm"
        )
    empty_s, with_collective_s, collective_s = json.loads(cell.text.strip().splitlines()[-1])
    return {"ranks": ranks, "empty_s": empty_s, "with_all_reduce_s": with_collective_s, "all_reduce_s": collective_s}


def many_ranks(python: Path, ranks: int, effort: Effort) -> dict:
    """Seconds to the first result on many ranks, from a cold kernel and when the server is ready."""
    return {
        "ranks": ranks,
        "cold_s": first_result_cold(tools.course, python, ranks),
        "ready_s": first_result_ready(tools.course, python, ranks, effort),
    }
