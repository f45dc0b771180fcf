"""Measure the lessons' algorithms: their ring all-reduce against gloo's, and how well alpha + beta S predicts messages.

    python benchmarks/algorithms.py [--quick] [--output FILE]

Prints a table with the goals beside; nothing is asserted.
"""

import argparse
import ast
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from report import number, table

from course_utils import launch
from course_utils.costs import fit_alpha_beta, format_bytes
from tools.author.notebooks import code_cells

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "nccl" / "lesson.py"
LARGEST = 2**24  # bytes; the goal for the ring is for this size
GOALS = {"ratio": 3.0, "error": 0.2}


def from_lesson(name: str, source: Path = LESSON) -> Callable:
    """The function or class `name` that a lesson defines, with what it uses of the lesson's and nothing else."""
    code = "\n".join(code for _, code in code_cells(source))
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(code).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                one = copy.copy(node)
                one.names = [alias]
                found[alias.asname or alias.name.split(".")[0]] = one
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if not any(isinstance(part, (ast.Call, ast.Name)) for part in ast.walk(node.value)):
                found.setdefault(node.targets[0].id, node)  # a parameter, as the first cell sets it
    if name not in found:
        raise LookupError(f"{source.name} defines no {name}")
    wanted, needed = [name], []
    while wanted:
        node = found.get(wanted.pop())
        if node is not None and node not in needed:
            needed.append(node)
            wanted += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    names: dict = {"__name__": "__main__"}  # so that ranks get the definitions themselves
    exec(compile(ast.Module(sorted(needed, key=lambda node: node.lineno), []), source.name, "exec"), names)
    return names[name]


def alternate(ring: Callable, sizes: list[int], repeats: int) -> dict[int, list[tuple[float, float]]]:
    """On a rank: seconds of `ring` and of the library's all-reduce, by size and repeat, one after the other."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def seconds(algorithm: Callable, x: torch.Tensor) -> float:
        dist.barrier()
        start = time.perf_counter()
        algorithm(x)
        return time.perf_counter() - start

    taken: dict[int, list[tuple[float, float]]] = {}
    for size in sizes:
        x = torch.full((size // 4,), float(rank))
        ring(x)
        if not (x == n * (n - 1) / 2).all():
            raise AssertionError(f"the lesson's ring all-reduce is wrong for {size} bytes on rank {rank}")
        dist.all_reduce(x)
        x = torch.zeros_like(x)
        taken[size] = [(seconds(ring, x), seconds(dist.all_reduce, x)) for _ in range(repeats)]
    return taken


def ring_against_library(ranks: int, sizes: list[int], repeats: int) -> list[dict]:
    """Median seconds of both by size, each repeat counted at its slowest rank, and their ratio."""
    ring = from_lesson("ring_all_reduce")
    by_rank = launch(alternate, ring, sizes, repeats, world_size=ranks, backend="gloo", timeout=600)
    rows = []
    for size in sizes:
        ours, library = (
            statistics.median(max(rank[size][repeat][which] for rank in by_rank) for repeat in range(repeats))
            for which in (0, 1)
        )
        rows.append({"ranks": ranks, "bytes": size, "lesson_s": ours, "library_s": library, "ratio": ours / library})
    return rows


def ping_pong(sizes: list[int], rounds: int) -> dict[int, float]:
    """On a rank: median seconds of one message by size, from round trips, with the sizes in turn."""
    me = dist.get_rank()
    buffers = {size: torch.zeros(size, dtype=torch.uint8) for size in sizes}
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds + 1):
        for size, x in buffers.items():
            trips = max(2, min(20, 2**20 // size))
            start = time.perf_counter()
            for _ in range(trips):
                for sender in (0, 1):
                    (dist.send if me == sender else dist.recv)(x, 1 - me)
            taken[size].append((time.perf_counter() - start) / (2 * trips))
    return {size: statistics.median(times[1:]) for size, times in taken.items()}  # the first round warms up


def prediction(sizes: list[int], rounds: int) -> dict:
    """Alpha and beta fitted to every second size, and the relative error of what they predict for the others."""
    seconds = launch(ping_pong, sizes, rounds, world_size=2, backend="gloo", timeout=600)[0]
    alpha, beta = fit_alpha_beta(sizes[::2], [seconds[size] for size in sizes[::2]])
    errors = {size: abs((alpha + beta * size) / seconds[size] - 1) for size in sizes[1::2]}
    measured = {str(size): taken for size, taken in seconds.items()}
    median = statistics.median(errors.values())
    return {"alpha_s": alpha, "beta_s_per_byte": beta, "seconds": measured, "errors": errors, "median_error": median}


def measure(quick: bool) -> dict:
    if quick:
        worlds, sizes, repeats, messages, rounds = (2,), [2**10, 2**14], 3, [2**k for k in range(8, 14)], 2
    else:
        worlds, sizes, repeats, rounds = (2, 4), [2**k for k in range(12, 25, 3)], 21, 15
        messages = [2**k for k in range(10, LARGEST.bit_length())]
    rings = [row for ranks in worlds for row in ring_against_library(ranks, sizes, repeats)]
    return {"quick": quick, "torch": torch.__version__, "ring": rings, "messages": prediction(messages, rounds)}


def markdown(result: dict) -> str:
    """What was measured, with the goals."""
    goal = f"at most {number(GOALS['ratio'])}×"
    rings = [
        [
            str(row["ranks"]),
            format_bytes(row["bytes"]),
            f"{row['lesson_s'] * 1e3:.3g} ms",
            f"{row['library_s'] * 1e3:.3g} ms",
            f"{row['ratio']:.2f}×",
            goal if row["bytes"] == LARGEST else "",
        ]
        for row in result["ring"]
    ]
    fit = result["messages"]
    sizes = [int(size) for size in fit["seconds"]]
    line = [
        f"{fit['alpha_s'] * 1e6:.3g} µs",
        f"{1e-9 / fit['beta_s_per_byte']:.3g} GB/s" if fit["beta_s_per_byte"] else "unlimited",
        f"{len(sizes)} sizes, {format_bytes(sizes[0])} to {format_bytes(sizes[-1])}",
        f"{fit['median_error']:.1%}, at most {max(fit['errors'].values()):.1%}",
        f"below {GOALS['error']:.0%}",
    ]
    return "\n\n".join(
        [
            "## The lesson's ring all-reduce against gloo's (medians, alternating in one run)",
            table(["ranks", "size S", "lesson", "gloo", "ratio", "goal"], rings),
            "## One message, fitted to every second size and predicted for the others",
            table(["α", "1/β", "measured", "median error of predictions", "goal"], [line]),
            f"Measured with torch {result['torch']}{', a smoke run' if result['quick'] else ''}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 ranks, small sizes, few repeats")
    parser.add_argument("--output", type=Path, help="JSON to write")
    args = parser.parse_args()
    result = measure(args.quick)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))


if __name__ == "__main__":
    main()
