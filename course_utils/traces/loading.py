"""Read traces in Chrome's format, as PyTorch's profiler writes them: a file, a folder of all ranks, a recording."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["RECORDED", "Event", "Trace", "load", "rank_of", "read"]

_FOLDER = Path(__file__).resolve().parent / "recorded"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")

#: Traces that Meta publishes with its tool HTA, cut to what the course needs (see ``recorded/NOTICE``).
RECORDED = {
    "host_bound": "A100, rank 0 of 2: a ResNet under DDP, whose GPU waits for the CPU most of the time; three steps",
    "imbalance": "ranks 0 and 1 of 128: a recommendation model; two steps, and only a sample of their kernels",
    "tiny_all_reduces": "V100, rank 1 of 2: 404 all-reduces in each of two steps",
    "two_machines": "the same annotations in two jobs: A100, rank 3 of 8, and V100, rank 1 of 2; two steps of each",
}


class Event(NamedTuple):
    """Something that took time.

    Attributes
    ----------
    name, category : str
        As in the trace. Categories: ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` ran on the GPU; ``cuda_runtime``
        started them; ``cpu_op`` is an operator of PyTorch; ``user_annotation`` is a named range.
    start, end : float
        Microseconds from the first event of the run.
    row : int
        The GPU's stream or the CPU's thread.
    step : int or None
        The profiler's step in which it began; of what ran on the GPU, in which it was launched.
    args : dict
        What else the trace says of it.
    """

    name: str
    category: str
    start: float
    end: float
    row: int
    step: int | None
    args: dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """What one rank did.

    Attributes
    ----------
    rank, world_size : int
    events : tuple of Event
        In the order of their starts.
    gpu : str
        The GPU's name, where the trace has it.
    """

    rank: int
    world_size: int
    events: tuple[Event, ...]
    gpu: str = ""

    @cached_property
    def on_gpu(self) -> bool:
        """Whether something ran on a GPU."""
        return any(event.category in _ON_GPU for event in self.events)

    @cached_property
    def steps(self) -> list[int]:
        """Numbers of the profiler's steps."""
        return sorted({event.step for event in self.events if event.step is not None})

    def of_steps(self, steps: Iterable[int]) -> Trace:
        """The part of the trace that belongs to these steps."""
        wanted = set(steps)
        return replace(self, events=tuple(event for event in self.events if event.step in wanted))

    def shifted(self, microseconds: float) -> Trace:
        """The same trace on another clock."""
        moved = (e._replace(start=e.start + microseconds, end=e.end + microseconds) for e in self.events)
        return replace(self, events=tuple(moved))


def _parsed(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8", errors="replace")
    try:
        raw = json.loads(text)
    except ValueError:
        raise ValueError(f"{path.name} is not a trace in Chrome's JSON format") from None
    raw = {"traceEvents": raw} if isinstance(raw, list) else raw
    if not isinstance(raw, dict) or not isinstance(raw.get("traceEvents"), list):
        raise ValueError(f"{path.name} is not a trace in Chrome's JSON format")
    return raw


def rank_of(raw: dict[str, Any]) -> int:
    """The rank that wrote a trace; 0 where it does not say."""
    return raw.get("distributedInfo", {}).get("rank", 0)


def read(path_or_name: str | Path) -> list[dict[str, Any]]:
    """Read the traces of a run as they are; arguments, order and errors as for :func:`load`."""
    path = Path(path_or_name)
    if str(path_or_name) in RECORDED:
        files = sorted(_FOLDER.glob(f"{path_or_name}-*.json.gz"))
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
    else:
        files = [path] if path.is_file() else []
    if not files:
        names = ", ".join(RECORDED)
        raise FileNotFoundError(f"no trace at {path_or_name}; recorded ones are {names}")
    raw = [_parsed(file) for file in files]
    return raw if str(path_or_name) in RECORDED else sorted(raw, key=rank_of)


def _trace(raw: dict[str, Any], base: float) -> Trace:
    timed = [event for event in raw["traceEvents"] if event.get("ph") == "X" and event.get("cat") != "Trace"]
    steps = sorted(
        (e["ts"], e["ts"] + e["dur"], int(e["name"].split("#")[1]))
        for e in timed
        if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")
    )
    runtime = [e for e in timed if str(e.get("cat", "")).endswith("_runtime") and "correlation" in e.get("args", {})]
    calls = {e["args"]["correlation"]: e["ts"] for e in runtime}

    def event(raw_event: dict[str, Any]) -> Event:
        args, start, category = raw_event.get("args", {}), raw_event["ts"], raw_event.get("cat", "")
        begun = calls.get(args.get("correlation"), start) if category in _ON_GPU else start
        step = next((number for begin, end, number in steps if begin <= begun < end), None)
        row, end = raw_event["tid"], start + raw_event.get("dur", 0)
        return Event(raw_event["name"], category, base + start, base + end, row, step, args)

    devices = raw.get("deviceProperties") or [{}]
    events = sorted((event(e) for e in timed), key=lambda e: (e.start, -e.end))
    gpu = raw.get("gpu") or devices[0].get("name", "")
    world_size = raw.get("distributedInfo", {}).get("world_size", 1)
    return Trace(rank_of(raw), world_size, tuple(events), gpu)


def load(path_or_name: str | Path) -> list[Trace]:
    """Read the traces of a run, ordered by rank; times count from the first event of all of them.

    Parameters
    ----------
    path_or_name : str or Path
        A trace (``.json`` or ``.json.gz``), a folder with one trace of each rank, or a name of `RECORDED`, whose
        traces come in the order in which its text names them.

    Raises
    ------
    FileNotFoundError
        No such file or recording, or a folder without traces.
    ValueError
        A file that is no trace.
    """
    raw = read(path_or_name)
    # Newer profilers count from a base of their own; in one number of microseconds, nanoseconds would be lost.
    bases = [int(trace.get("baseTimeNanoseconds", 0)) for trace in raw]
    traces = [_trace(trace, (base - min(bases)) / 1e3) for trace, base in zip(raw, bases, strict=True)]
    zero = math.floor(min((trace.events[0].start for trace in traces if trace.events), default=0))
    return [trace.shifted(-zero) for trace in traces]
