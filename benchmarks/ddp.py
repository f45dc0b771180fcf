"""Measure the step of lesson 04's data parallelism, each version against PyTorch's DistributedDataParallel.

    python benchmarks/ddp.py [--quick] [--ranks N] [--output FILE]

All versions take turns in one run. Prints a table with the goal beside; nothing is asserted.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from algorithms import from_lesson
from report import table
from torch.nn.parallel import DistributedDataParallel

from course_utils import launch, record
from course_utils.models import build_gpt

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "ddp" / "lesson.py"
KINDS = ("AfterBackward", "FlatBuckets", "Overlapped")
GOAL = 1.3  # step of Overlapped as a multiple of DistributedDataParallel's


def take_turns(kinds: dict, cap: int, batch: int, repeats: int) -> dict:
    """On a rank: seconds of every step, and messages and bytes of the last one, by version."""
    ways = {
        name: kind(build_gpt(), cap) if hasattr(kind, "start_next") else kind(build_gpt())
        for name, kind in kinds.items()
    }
    ways["DistributedDataParallel"] = DistributedDataParallel(build_gpt(), bucket_cap_mb=cap / 2**20)
    optimizers = {name: torch.optim.SGD(model.module.parameters(), lr=0.01) for name, model in ways.items()}
    x = torch.randint(0, 128, (batch, 64), generator=torch.Generator().manual_seed(dist.get_rank()))
    found: dict = {name: {"seconds": []} for name in ways}
    for _ in range(repeats + 3):  # the first three warm up
        for name, model in ways.items():
            optimizers[name].zero_grad()
            dist.barrier()
            with record() as ledger:
                start = time.perf_counter()
                torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
                getattr(model, "finish", lambda: None)()
                optimizers[name].step()
                taken = time.perf_counter() - start
            found[name]["seconds"].append(taken)
            found[name] |= {"messages": len(ledger), "bytes": ledger.bytes()}
    weights = [torch.cat([p.detach().flatten() for p in model.module.parameters()]) for model in ways.values()]
    for name, mine in zip(ways, weights, strict=True):
        found[name]["difference"] = (mine - weights[-1]).abs().max().item()
        found[name]["seconds"] = found[name]["seconds"][3:]
    return found


def measure(ranks: int, cap: int, batch: int, repeats: int) -> dict:
    """Median step by version, each step counted at its slowest rank, and its ratio to DDP's of the same turn."""
    kinds = {name: from_lesson(name, LESSON) for name in KINDS}
    by_rank = launch(take_turns, kinds, cap, batch, repeats, world_size=ranks, backend="gloo", timeout=600)
    slowest = {
        name: [max(rank[name]["seconds"][turn] for rank in by_rank) for turn in range(repeats)] for name in by_rank[0]
    }
    base = slowest["DistributedDataParallel"]
    rows = {}
    for name, seconds in slowest.items():
        first = by_rank[0][name]
        if first["difference"] > 1e-5:
            raise AssertionError(f"{name} ends at other weights than DDP: off by {first['difference']:.1g}")
        ratios = sorted(mine / theirs for mine, theirs in zip(seconds, base, strict=True))
        rows[name] = {
            "step_s": statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]],
            "messages": first["messages"],
            "bytes": first["bytes"],
        }
    return {
        "torch": torch.__version__, "ranks": ranks, "bucket_bytes": cap, "windows_per_rank": batch, "repeats": repeats,
        "versions": rows,
    }


def markdown(result: dict) -> str:
    """What was measured, with the goal."""
    rows = [
        [
            name,
            str(row["messages"]),
            f"{row['bytes']:,}",
            f"{row['step_s'] * 1e3:.1f} ms",
            f"{row['ratio']:.2f}× ({row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f})",
            f"overlapped within {GOAL}×" if name == "Overlapped" else "",
        ]
        for name, row in result["versions"].items()
    ]
    return "\n\n".join(
        [
            f"## Step of data parallelism on {result['ranks']} ranks, buckets of {result['bucket_bytes'] // 1024} KiB",
            table(["version", "messages", "bytes", "step (median)", "against DDP (quartiles)", "goal"], rows),
            f"{result['repeats']} steps each, in turns, {result['windows_per_rank']} windows of 64 characters a rank; "
            f"a step is forward, backward, averaging and SGD, at its slowest rank. torch {result['torch']}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 ranks, few steps")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="windows a rank takes in a step")
    parser.add_argument("--bucket", type=int, default=2**17, help="bytes of a bucket")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--output", type=Path, help="JSON to write")
    args = parser.parse_args()
    result = measure(2, args.bucket, 2, 4) if args.quick else measure(args.ranks, args.bucket, args.batch, args.repeats)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))


if __name__ == "__main__":
    main()
