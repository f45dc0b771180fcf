"""Measure `launch` against other ways to start ranks from a notebook; prints tables, writes JSON and a figure.

    python tests/benchmarks/run.py [--quick] [--tools course,ipyparallel] [--ranks 2,4] [--store]

Each tool has a virtual environment of its own, made once under `.bench` (or COURSE_BENCH_ENVS). Nothing is asserted.
"""

import argparse
import json
import os
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import environments
import own
import scenarios
from figure import draw
from report import KINDS, markdown, targets
from tools import TOOLS, Tool

DOCS = environments.ROOT / "docs" / "benchmark.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 ranks, one repeat, short limits")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"comma-separated; of {', '.join(TOOLS)}")
    parser.add_argument("--ranks", default="", help="comma-separated world sizes; default 2,4")
    parser.add_argument(
        "--output",
        type=Path,
        default=environments.CACHE / "benchmark.json",
        help="JSON to write; the figure goes next to it",
    )
    parser.add_argument(
        "--store", action="store_true", help="write what the README shows: docs/benchmark.json and .png"
    )
    parser.add_argument("--render", type=Path, help="measure nothing: tables and figure from this JSON")
    args = parser.parse_args()
    args.tools = args.tools.split(",")
    if unknown := set(args.tools) - set(TOOLS):
        parser.error(f"unknown tools {sorted(unknown)}; allowed are {', '.join(TOOLS)}")
    args.ranks = [int(n) for n in (args.ranks or ("2" if args.quick else "2,4")).split(",")]
    if args.store:
        args.output = DOCS
    return args


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def attempt(at: dict, part: str, measure) -> None:
    """Put what `measure` returns into `at`; if it cannot be had, the reason."""
    try:
        at.update(measure())
    except Exception as error:
        reason = " ".join(str(error).split()).replace(os.path.expanduser("~"), "~")
        at.setdefault("unavailable", {})[part] = f"{type(error).__name__}: {reason[-300:]}"
        say(f"  {part}: {reason[-300:]}")


def measure(tool: Tool, python: Path, ranks: int, effort: scenarios.Effort, messages: Path) -> dict:
    """All scenarios of one tool at one world size. What the tool said goes to text files under `messages`."""

    def first(function) -> list[float]:
        return [function(tool, python, ranks) for _ in range(effort.repeats)]

    def failed(kind: str) -> dict:
        outcome = scenarios.failure(kind, tool, python, ranks, effort)
        (messages / f"{tool.name} {ranks} {kind}.txt").write_text(outcome.pop("text") + "\n")
        return outcome

    at, failures = {}, {}
    attempt(at, "first result, cold", lambda: {"first_cold_s": statistics.median(first(scenarios.first_result_cold))})
    attempt(
        at, "first result, ready", lambda: {"first_ready_s": statistics.median(first(scenarios.first_result_ready))}
    )
    attempt(at, "further calls", lambda: scenarios.warm_calls(tool, python, ranks, effort))
    attempt(at, "kernel killed", lambda: scenarios.kernel_killed(tool, python, ranks))
    for kind in KINDS:
        attempt(at, f"after: {KINDS[kind]}", lambda kind=kind: failures.update({kind: failed(kind)}) or {})
    return at | {"failures": failures}


def measure_all(args: argparse.Namespace) -> dict:
    effort = scenarios.QUICK if args.quick else scenarios.Effort()
    messages = args.output.parent / "messages" if not args.store else environments.CACHE / "messages"
    messages.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": {"cores": os.cpu_count(), "torch": version("torch"), "python": sys.version.split()[0]},
        "quick": args.quick,
        "ranks": args.ranks,
        "tools": {},
    }
    pythons = {}
    for key in args.tools:
        tool = TOOLS[key]
        entry = result["tools"][key] = {"name": tool.name, "keeps_workers": tool.keeps_workers, "note": tool.note}
        try:
            pythons[key] = environments.python_of(tool)
            entry["versions"] = environments.versions(pythons[key], tool)
            scenarios.first_result_cold(tool, pythons[key], min(args.ranks))  # brings the files into the page cache
        except Exception as error:
            entry["unavailable"] = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
            say(f"{tool.name}: {entry['unavailable']}")
    for key, python in pythons.items():
        if "unavailable" not in result["tools"][key]:
            result["tools"][key]["ranks"] = {}
            for ranks in args.ranks:
                say(f"{TOOLS[key].name}, {ranks} ranks")
                result["tools"][key]["ranks"][str(ranks)] = measure(TOOLS[key], python, ranks, effort, messages)
    if "course" in pythons:
        say("this course: many ranks, ledger")
        result["own"] = {}
        attempt(
            result["own"], "many ranks", lambda: {"many": own.many_ranks(pythons["course"], 8 if args.quick else 32)}
        )
        blocks, steps = (3, 3) if args.quick else (30, 10)
        ranks = max(args.ranks)
        attempt(
            result["own"], "ledger", lambda: {"ledger": own.ledger_overhead(pythons["course"], ranks, blocks, steps)}
        )
    result["targets"] = targets(result)
    return result


def rounded(value):
    """Four significant digits are enough for a stored figure."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    args = arguments()
    begin = time.monotonic()
    if args.render:
        result, figure = json.loads(args.render.read_text()), args.render.with_suffix(".png")
    else:
        result, figure = rounded(measure_all(args)), args.output.with_suffix(".png")
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, figure)
    print(markdown(result))
    say(f"{figure.with_suffix('.json').name} and {figure.name} written after {(time.monotonic() - begin) / 60:.1f} min")


if __name__ == "__main__":
    main()
