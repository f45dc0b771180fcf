"""Measure the launcher: the first call of a process, further ones, many ranks, an error, and what the ledger adds.

    python benchmarks/launcher.py [--quick] [--output FILE]

Prints a table with the goals beside; nothing is asserted.
"""

import statistics
import time

import torch
import torch.distributed as dist
from common import main, median, table

from course_utils import launch, record, shutdown

GOALS = {
    "first all-reduce, from nothing": 2.0, "first all-reduce on 32 ranks": 6.0, "warm call of an empty function": 3e-3,
    "warm call with an all-reduce": 3e-3, "error on a rank reported": 2.0,
}
LEDGER_GOAL = 1.05  # a step of DDP with the ledger watching, against one without


def reduce() -> float:
    x = torch.ones(10)
    dist.all_reduce(x)
    return x[0].item()


def nothing() -> None:
    pass


def fail() -> float:
    if dist.get_rank() == 0:
        raise ValueError("bad batch")
    return reduce()


def from_nothing(ranks: int) -> None:
    shutdown()
    launch(reduce, world_size=ranks)


def reported(ranks: int) -> None:
    """Call a function that fails on one rank."""
    try:
        launch(fail, world_size=ranks)
    except Exception as error:
        if "bad batch" not in str(error):
            raise


def ledger_step(blocks: int, steps: int) -> dict[str, float]:
    """On a rank: seconds of a step of DDP without the ledger, with it watching, and while recording."""
    from course_utils.ranks import interceptor

    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    batch = torch.randn(32, 512)

    def block() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - start) / steps

    def without() -> float:
        interceptor.uninstall()
        return block()

    def watching() -> float:
        interceptor.install()
        return block()

    def recording() -> float:
        interceptor.install()
        with record():
            return block()

    kinds = [without, watching, recording]
    times: dict[str, list[float]] = {kind.__name__: [] for kind in kinds}
    block()
    for turn in range(blocks):
        for kind in kinds[turn % 3 :] + kinds[: turn % 3]:
            times[kind.__name__].append(kind())
    interceptor.install()
    return {name: statistics.median(values) for name, values in times.items()}


def measure(quick: bool) -> dict:
    ranks, many, repeats, calls, blocks = (2, 4, 1, 20, 3) if quick else (4, 32, 5, 200, 30)
    launch(nothing, world_size=ranks)
    step = launch(ledger_step, blocks, 10, world_size=ranks, backend="gloo", timeout=300)[0]
    measured = {
        "first all-reduce, from nothing": median(lambda: from_nothing(ranks), repeats),
        "warm call of an empty function": median(lambda: launch(nothing, world_size=ranks), calls),
        "warm call with an all-reduce": median(lambda: launch(reduce, world_size=ranks), calls),
        "error on a rank reported": median(lambda: reported(ranks), repeats),
        f"first all-reduce on {many} ranks": median(lambda: from_nothing(many), repeats),
    }
    return {"torch": torch.__version__, "ranks": ranks, "seconds": measured, "ledger": step}


def markdown(result: dict) -> str:
    rows = [
        [name, f"{taken * 1e3:.1f} ms", f"at most {GOALS[name] * 1e3:.0f} ms" if name in GOALS else ""]
        for name, taken in result["seconds"].items()
    ]
    step = result["ledger"]
    for name, goal in (("watching", f"at most {LEDGER_GOAL}×"), ("recording", "")):
        rows.append([f"step of DDP, ledger {name}", f"{step[name] / step['without']:.2f}×", goal])
    return f"## The launcher on {result['ranks']} ranks\n\n" + table(["", "median", "goal"], rows)


if __name__ == "__main__":
    main(measure, markdown)
