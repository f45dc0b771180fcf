"""Measure `launch` against other ways to start ranks from a notebook; prints tables, writes JSON and a figure.

What else is measured (`algorithms.py`, `ddp.py`, `memory.py`, `planner.py`, `train_overhead.py`, `verify.py`) follows:
tables, and JSON with the environments.

    python benchmarks/run.py [--quick] [--tools course,ipyparallel] [--ranks 2,4] [--store]

Each tool has a virtual environment of its own, made once under `.bench` (or COURSE_BENCH_ENVS). Nothing is asserted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import environments
import own
import scenarios
from figure import draw
from report import KINDS, markdown, targets

from tools import TOOLS, Tool

DOCS = environments.ROOT / "docs" / "benchmark.json"
OF_LESSONS = ("algorithms", "ddp", "memory", "planner", "train_overhead", "verify")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 ranks, one repeat, short limits")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"comma-separated; of {', '.join(TOOLS)}")
    parser.add_argument("--ranks", default="", help="comma-separated world sizes; default 2,4")
    parser.add_argument("--output", type=Path, help="JSON to write, with the figure next to it")
    parser.add_argument("--store", action="store_true", help="write docs/benchmark.json and .png, for the README")
    parser.add_argument("--render", type=Path, help="measure nothing: tables and figure from this JSON")
    args = parser.parse_args()
    args.tools = args.tools.split(",")
    if unknown := set(args.tools) - set(TOOLS):
        parser.error(f"unknown tools {sorted(unknown)}; allowed are {', '.join(TOOLS)}")
    args.ranks = [int(n) for n in (args.ranks or ("2" if args.quick else "2,4")).split(",")]
    args.output = DOCS if args.store else args.output or environments.CACHE / "benchmark.json"
    return args


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """The error in one line without paths of this machine."""
    text = " ".join(str(error).split())
    for folder, name in ((environments.CACHE, "…"), (environments.ROOT, "."), (Path.home(), "~")):
        text = text.replace(str(folder), name)
    return f"{type(error).__name__}: {text[-300:]}"


def attempt(at: dict, part: str, measure_part: Callable[[], dict]) -> None:
    """Add to `at` what is measured. A scenario that fails is tried three times in all; the reasons are kept."""
    for _ in range(3):
        try:
            at.update(measure_part())
            return
        except Exception as error:
            at.setdefault("failed_attempts", {}).setdefault(part, []).append(reason(error))
            say(f"  {part}: {reason(error)}")
    at.setdefault("unavailable", {})[part] = at["failed_attempts"].pop(part)[-1]


def measure(tool: Tool, python: Path, ranks: int, effort: scenarios.Effort) -> dict:
    """All scenarios of one tool at one world size. What the tool said after failures goes to text files."""

    def median(first_result: Callable[..., float], *more) -> float:
        values, end = [], time.monotonic() + effort.repeat_seconds
        while len(values) < effort.repeats and (not values or time.monotonic() < end):
            values.append(first_result(tool, python, ranks, *more))
        return statistics.median(values)

    def after(kind: str) -> dict:
        outcome = scenarios.failure(kind, tool, python, ranks, effort)
        messages = environments.CACHE / "messages"
        messages.mkdir(parents=True, exist_ok=True)
        (messages / f"{tool.name}, {ranks} ranks, {kind}.txt").write_text(outcome.pop("text") + "\n")
        return {kind: outcome}

    at, failures = {}, {}
    attempt(at, "first result, cold", lambda: {"first_cold_s": median(scenarios.first_result_cold)})
    attempt(at, "first result, ready", lambda: {"first_ready_s": median(scenarios.first_result_ready, effort)})
    attempt(at, "further calls", lambda: scenarios.warm_calls(tool, python, ranks, effort))
    attempt(at, "kernel killed", lambda: scenarios.kernel_killed(tool, python, ranks, effort))
    for kind, title in KINDS.items():
        attempt(failures, title, lambda kind=kind: after(kind))
    for key in ("failed_attempts", "unavailable"):
        at[key] = at.get(key, {}) | failures.pop(key, {})
    return at | {"failures": failures}


def prepare(keys: list[str], ranks: int, quick: bool) -> tuple[dict[str, dict], dict[str, Path]]:
    """Entries of the report and interpreters; each tool is run once, which brings its files into the page cache.

    For a smoke run only its environment is made.
    """
    entries, pythons = {}, {}
    for key in keys:
        tool, found = TOOLS[key], {}

        def try_out(tool: Tool = tool) -> dict:
            python = environments.python_of(tool)
            if not quick:
                scenarios.first_result_cold(tool, python, ranks)
            return {"python": python, "versions": environments.versions(python, tool)}

        say(f"{tool.name}: environment and first run")
        attempt(found, "first run", try_out)
        entries[key] = {"name": tool.name, "keeps_workers": tool.keeps_workers, "note": tool.note}
        if "python" in found:
            pythons[key] = found["python"]
            entries[key]["versions"] = found["versions"]
        else:
            entries[key]["unavailable"] = found["unavailable"]["first run"]
    return entries, pythons


def measure_own(python: Path, ranks: int, effort: scenarios.Effort) -> dict:
    own_result, quick = {}, effort == scenarios.QUICK
    many, blocks, steps = (8, 3, 3) if quick else (32, 30, 10)
    attempt(own_result, "warm calls", lambda: {"warm": own.warm_shares(python, ranks, 20 if quick else 200)})
    attempt(own_result, "many ranks", lambda: {"many": own.many_ranks(python, many, effort)})
    attempt(own_result, "ledger", lambda: {"ledger": own.ledger_overhead(python, ranks, blocks, steps)})
    return own_result


def measure_all(args: argparse.Namespace) -> dict:
    effort = scenarios.QUICK if args.quick else scenarios.Effort()
    entries, pythons = prepare(args.tools, min(args.ranks), args.quick)
    result = {
        "machine": {"cores": os.cpu_count(), "torch": version("torch"), "python": sys.version.split()[0]},
        "quick": args.quick,
        "ranks": args.ranks,
        "tools": entries,
    }
    for key, python in pythons.items():
        entries[key]["ranks"] = {}
        for ranks in args.ranks:
            say(f"{TOOLS[key].name}, {ranks} ranks")
            entries[key]["ranks"][str(ranks)] = measure(TOOLS[key], python, ranks, effort)
    if "course" in pythons:
        say("this course: many ranks, ledger")
        result["own"] = measure_own(pythons["course"], max(args.ranks), effort)
    return rounded(result)


def rounded(value):
    """Four significant digits are enough for a stored figure."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    args = arguments()
    begin = time.monotonic()
    result = json.loads(args.render.read_text()) if args.render else measure_all(args)
    output = args.render or args.output
    result["targets"] = targets(result)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    draw(result, output.with_suffix(".png"))
    print(markdown(result), flush=True)
    if not args.render:
        environments.CACHE.mkdir(parents=True, exist_ok=True)
        for name in OF_LESSONS:
            command = [sys.executable, Path(__file__).with_name(f"{name}.py"), *["--quick"] * args.quick]
            subprocess.run([*command, "--output", environments.CACHE / f"{name}.json"])
    say(f"{output.name} and its figure written after {(time.monotonic() - begin) / 60:.1f} min")


if __name__ == "__main__":
    main()
