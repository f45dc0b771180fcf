"""Cut the traces of `course_utils/traces/recorded` out of those that Meta publishes with HTA.

    git clone https://github.com/facebookresearch/HolisticTraceAnalysis
    python docs/recorded_traces.py HolisticTraceAnalysis

What is kept: the steps named below; of them what ran on the GPU, the calls that started it, and named ranges; of each
event its name (without a kernel's arguments), category, times, stream or thread, and the arguments in `KEPT`. Times
count from the first event of the run. Processes are numbered by rank, threads from zero. Everything else is left out,
among it the names of hosts, users, jobs and files.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "course_utils" / "traces" / "recorded"
COMMIT = "f4d0062c382f42bd8a74838bcdad1916c7d5d2da"

#: Name of a run -> its files in tests/data, and how many of their first steps are kept.
RUNS = {
    "host_bound": (["nccl_parser_config/nccl_data"], 3),
    "imbalance": (["trace_filter/sampled_rank-0", "trace_filter/sampled_rank-1"], 2),
    "tiny_all_reduces": (["df_index_resolver/df_index_resolver"], 2),
    "two_machines": (["trace_diff/control/control", "trace_diff/test/test"], 2),
}
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime",)
RANGE = "user_annotation"
KEPT = (
    "stream", "correlation", "bytes", "Collective name", "In msg nelems", "dtype", "Group size", "Input Dims",
    "Input type",
)


def short(name: str) -> str:
    """A kernel's name without its return type, its arguments, and all but the first 100 characters."""
    name = re.sub(r"\((?!anonymous).*", "", name.removeprefix("void ").replace("(anonymous namespace)", "anonymous"))
    return name[:100]


def read(repository: str, path: str) -> dict[str, Any]:
    """One published trace."""
    data = subprocess.run(
        ["git", "-C", repository, "show", f"{COMMIT}:tests/data/{path}.json.gz"], capture_output=True, check=True
    ).stdout
    return json.loads(gzip.decompress(data).decode("utf-8", errors="replace"))


def cut(trace: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """The events of the first steps, as described above; a kernel belongs to the step in which it was launched."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    starts = [e for e in events if e["cat"] == RANGE and e["name"].startswith("ProfilerStep#")]
    starts = sorted(starts, key=lambda event: event["ts"])[:steps]
    begin, end = starts[0]["ts"], starts[-1]["ts"] + starts[-1]["dur"]
    started = {e["args"]["correlation"] for e in events if e["cat"] in GPU}
    calls = [e for e in events if e["cat"] in RUNTIME and e["args"].get("correlation") in started]
    calls = [e for e in calls if begin <= e["ts"] < end]
    called = {e["args"]["correlation"] for e in calls}
    ranges = [e for e in events if e["cat"] == RANGE and begin <= e["ts"] < end]
    kernels = [e for e in events if e["cat"] in GPU and e["args"]["correlation"] in called]
    return [*ranges, *calls, *kernels]


def tidy(event: dict[str, Any], rank: int, threads: dict[int, int], zero: float) -> dict[str, Any]:
    """One event with nothing but what is kept."""
    on_gpu = event["cat"] in GPU
    args = {key: event["args"][key] for key in KEPT if key in event.get("args", {})}
    start = round(event["ts"] - zero, 3)
    return {
        "ph": "X", "cat": event["cat"], "name": short(event["name"]) if event["cat"] == "kernel" else event["name"],
        "pid": 2 * rank + on_gpu, "tid": args["stream"] if on_gpu else threads.setdefault(event["tid"], len(threads)),
        "ts": start, "dur": round(event["dur"], 3), "args": args,
    }


def labels(rank: int, gpu: str) -> list[dict[str, Any]]:
    """What a viewer calls the rows."""
    names = {2 * rank: f"rank {rank}, CPU", 2 * rank + 1: f"rank {rank}, {gpu}"}
    return [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in names.items()]


def make(repository: str) -> None:
    """Write all traces."""
    for old in FOLDER.glob("*.json.gz"):
        old.unlink()
    for run, (paths, steps) in RUNS.items():
        traces = [read(repository, path) for path in paths]
        cuts = [cut(trace, steps) for trace in traces]
        together = run == "imbalance"  # the ranks of one job: one clock
        first = [math.floor(min(event["ts"] for event in events)) for events in cuts]
        for number, (trace, events) in enumerate(zip(traces, cuts, strict=True)):
            info, threads = trace["distributedInfo"], {}
            devices = trace.get("deviceProperties") or [{"name": "GPU"}]
            zero = min(first) if together else first[number]
            rank = info["rank"]
            kept = sorted((tidy(e, rank, threads, zero) for e in events), key=lambda e: (e["ts"], -e["dur"]))
            text = {
                "distributedInfo": {key: info[key] for key in ("backend", "rank", "world_size")},
                "gpu": devices[0]["name"], "source": f"{paths[number]}.json.gz",
                "traceEvents": labels(rank, devices[0]["name"]) + kept,
            }
            data = json.dumps(text, separators=(",", ":")).encode()
            (FOLDER / f"{run}-{number}.json.gz").write_bytes(gzip.compress(data, 9, mtime=0))


if __name__ == "__main__":
    make(sys.argv[1])
