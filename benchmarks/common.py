"""What the small programs share: clocks, a table, and a run that prints one and may store what was measured."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path


def seconds(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def median(do: Callable[[], object], count: int) -> float:
    return statistics.median(seconds(do) for _ in range(count))


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def main(measure: Callable[[bool], dict], markdown: Callable[[dict], str]) -> None:
    """Measure, print a table, and write JSON if asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a smoke run: the smallest setting")
    parser.add_argument("--output", type=Path, help="JSON to write")
    args = parser.parse_args()
    result = measure(args.quick)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(markdown(result))
