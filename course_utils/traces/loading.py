"""Read traces in Chrome's format, as PyTorch's profiler writes them: a file, a folder of all ranks, a recording."""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import math
import os
import re
import sys
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["RECORDED", "Event", "Trace", "load", "rank_of", "read"]

_FOLDER = Path(__file__).resolve().parent / "recorded"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_GZIP = b"\x1f\x8b"
_LARGE, _RATE = 50e6, 20e6  # bytes from which on a reader is told, and bytes a second on a CPU of 2026
#: What each event that took time must have.
_FIELDS = {"name": str, "cat": str, "ts": (int, float), "dur": (int, float), "tid": (int, str), "args": dict}

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
    groups : dict of str to tuple of int
        The process groups of this rank, where the trace lists them: their names and ranks.
    """

    rank: int
    world_size: int
    events: tuple[Event, ...]
    gpu: str = ""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False)

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


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if data[:2] == _GZIP else data
    except (EOFError, OSError, zlib.error):
        raise ValueError(f"{path.name} ends early, or is damaged: it cannot be unpacked") from None
    return data.decode("utf-8-sig", errors="replace").strip()


def _parsed(path: Path) -> dict[str, Any]:
    text = _text(path)
    if not text:
        raise ValueError(f"{path.name} is empty")
    if text[0] not in "[{":
        raise ValueError(f"{path.name} is not a trace in Chrome's JSON format: it begins with {text[:30]!r}")
    try:
        raw = json.loads(text, strict=False)  # names may hold control characters
    except json.JSONDecodeError as error:
        try:  # Chrome's format does not ask for the end of a list
            raw = json.loads(text.rstrip(",") + "]", strict=False) if text[0] == "[" else None
        except ValueError:
            raw = None
        if raw is None and (error.pos > len(text) - 6 or error.msg.startswith("Unterminated")):
            raise ValueError(f"{path.name} ends early: the program was stopped while it wrote, or still does") from None
        if raw is None:
            where = f"line {error.lineno}, column {error.colno}"
            raise ValueError(f"{path.name} is no JSON from {where} on: {error.msg}") from None
    except RecursionError:
        raw = None
    raw = {"traceEvents": raw} if isinstance(raw, list) else raw
    if not isinstance(raw, dict) or not isinstance(raw.get("traceEvents"), list):
        raise ValueError(f"{path.name} is not a trace in Chrome's JSON format")
    raw["distributedInfo"] = raw.get("distributedInfo") or {}
    _check(raw["traceEvents"], path.name)
    return raw


def _check(events: list[Any], file: str) -> None:
    """Make numbers of times written as text; refuse what took time but does not say what it was, when and where."""
    processes = set()
    for place, event in enumerate(events):
        if not isinstance(event, dict):
            raise ValueError(f"{file} is not a trace in Chrome's JSON format: event {place} is {event!r:.30}")
        for key in ("ts", "dur"):
            if isinstance(event.get(key), str):
                with contextlib.suppress(ValueError):
                    event[key] = float(event[key])
        if event.get("ph") != "X" or event.get("cat") == "Trace":
            continue
        event["args"] = event.get("args") or {}
        for key, kinds in _FIELDS.items():
            value = event.get(key)
            if not isinstance(value, kinds) or (key in ("ts", "dur") and not math.isfinite(value)):
                why = " (did the run end inside it?)" if key == "dur" and key not in event else ""
                raise ValueError(f"{file}: event {place}, {event.get('name')!r:.60}, has {key} {value!r:.30}{why}")
        if event["cat"] == "cpu_op":
            processes.add(event.get("pid"))
    if len(processes) > 1:
        raise ValueError(f"{file} holds {len(processes)} processes: each rank's trace needs a file of its own")


def _announce(files: list[Path]) -> None:
    """Say beforehand how long large files will take."""
    size = 0
    for file in files:
        with file.open("rb") as opened:
            packed = opened.read(2) == _GZIP
            opened.seek(-4 if packed else 0, os.SEEK_END)  # gzip ends with the length of what is in it
            size += int.from_bytes(opened.read(4), "little") if packed else opened.tell()
    if size > _LARGE:
        needs = f"about {size / _RATE:.0f} s and {size * 6 / 1e9:.1f} GB of memory"
        print(f"reading {size / 1e6:,.0f} MB of traces: {needs}", file=sys.stderr, flush=True)


def rank_of(raw: dict[str, Any]) -> int:
    """The rank that wrote a trace; 0 where it does not say."""
    return raw["distributedInfo"].get("rank", 0)


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
    _announce(files)
    with _no_collector():  # it would search for garbage among millions of dictionaries that all stay
        raw = [_parsed(file) for file in files]
    owners: dict[int, str] = {}
    for trace, file in zip(raw, files, strict=True):
        if (rank := rank_of(trace)) in owners:
            raise ValueError(f"{owners[rank]} and {file.name} are both of rank {rank}; a folder holds one run")
        owners[rank] = file.name
    return raw if str(path_or_name) in RECORDED else sorted(raw, key=rank_of)


def _groups(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The ranks of each process group of this rank, by its name."""
    world = range(raw["distributedInfo"].get("world_size", 1))
    listed = raw["distributedInfo"].get("pg_config") or []
    return {str(group["pg_name"]): tuple(group.get("ranks") or world) for group in listed if "pg_name" in group}


def _trace(raw: dict[str, Any], base: float) -> Trace:
    timed = [event for event in raw["traceEvents"] if event.get("ph") == "X" and event.get("cat") != "Trace"]
    steps = sorted(
        (e["ts"], e["ts"] + e["dur"], int(step[1]))
        for e in timed
        if e["cat"] == "user_annotation" and (step := re.fullmatch(r"ProfilerStep#(\d+)", e["name"]))
    )
    begins = [begin for begin, _, _ in steps]
    runtime = [e for e in timed if e["cat"].endswith("_runtime") and "correlation" in e["args"]]
    calls = {e["args"]["correlation"]: e["ts"] for e in runtime}
    comms = {e["args"].get("External id"): e["args"] for e in timed if e["name"] == "record_param_comms"}
    events = []
    for e in timed:
        args, start, category, begun = e["args"], e["ts"], e["cat"], e["ts"]
        if category in _ON_GPU:
            begun = calls.get(args.get("correlation"), start)
            if e["name"].startswith("nccl") and (call := comms.get(args.get("External id"))):
                args = call | args
        place = bisect_right(begins, begun) - 1
        step = steps[place][2] if place >= 0 and begun < steps[place][1] else None
        events.append(Event(e["name"], category, base + start, base + start + e["dur"], e["tid"], step, args))
    events.sort(key=lambda e: (e.start, -e.end))
    devices = raw.get("deviceProperties") or [{}]
    gpu = raw.get("gpu") or devices[0].get("name", "")
    return Trace(rank_of(raw), raw["distributedInfo"].get("world_size", 1), tuple(events), gpu, _groups(raw))


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
        A file that is no trace, is cut or damaged, or holds two ranks; or two files of one rank.
    """
    raw = read(path_or_name)
    # Newer profilers count from a base of their own; in one number of microseconds, nanoseconds would be lost.
    bases = [int(trace.get("baseTimeNanoseconds") or 0) for trace in raw]
    later = [(base - min(bases)) / 1e3 for base in bases]
    starts = [e["ts"] + late for trace, late in zip(raw, later, strict=True) for e in trace["traceEvents"]
              if e.get("ph") == "X" and e.get("cat") != "Trace"]  # fmt: skip
    zero = math.floor(min(starts, default=0))
    with _no_collector():
        return [_trace(trace, late - zero) for trace, late in zip(raw, later, strict=True)]
