"""A trace of the profiler, and a memory snapshot in numbers."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from .kit import Setting, measured, own_device, run_ranks, scrub

TRACE = "trace.json.gz"
_STEPS = 3
_KEPT = ("schemaVersion", "deviceProperties", "distributedInfo", "displayTimeUnit", "baseTimeNanoseconds")
_POINTS = 400  # of the memory timeline that the report keeps


def _profiled(file: str) -> dict[str, Any]:
    """Train under DDP with batches copied to the device; rank 0 profiles the last steps and writes their trace."""
    from torch.profiler import ProfilerActivity, profile, schedule

    from course_utils.data import Windows
    from course_utils.models import build_gpt, loss_of

    device, rank = own_device(), dist.get_rank()
    on_gpu = device.type == "cuda"
    model = nn.parallel.DistributedDataParallel(build_gpt().to(device), bucket_cap_mb=1)
    optimizer, windows = torch.optim.SGD(model.parameters(), lr=0.1), Windows()
    batch = [x.pin_memory() if on_gpu else x for x in windows.batch(range(64))]
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, schedule=schedule(wait=2, warmup=2, active=_STEPS, repeat=1)) as profiler:
        for _ in range(4 + _STEPS):
            loss_of(model, *(x.to(device, non_blocking=True) for x in batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize() if on_gpu else None
            profiler.step()
    if rank == 0:
        profiler.export_chrome_trace(file)
    return {"steps": _STEPS}


@pytest.mark.limit(60)
def test_profiler_trace(setting: Setting, facts: dict):
    """Write rank 0's trace, without names of host and folders, and say how its time divides."""
    from course_utils.traces import breakdown, load

    raw, target = Path(os.environ.get("TMPDIR", setting.folder), "raw.json"), setting.folder / TRACE
    run_ranks(_profiled, str(raw), ranks=setting.ranks, backend=setting.backend, timeout=setting.choose(50, 150))
    whole = json.loads(raw.read_text(encoding="utf-8", errors="replace"))
    kept = {key: whole[key] for key in _KEPT if key in whole} | {"traceEvents": _events(whole["traceEvents"])}
    with gzip.GzipFile(target, "wb", mtime=0) as file:
        file.write(json.dumps(scrub(kept)).encode())
    read = load(target)[0]
    categories: dict[str, int] = {}
    for event in read.events:
        categories[event.category] = categories.get(event.category, 0) + 1
    how = f"traces.breakdown of rank 0 of {setting.ranks}, {_STEPS} steps of the course's GPT under DDP, torch.profiler"
    facts |= {
        "file": TRACE, "bytes": target.stat().st_size, "events": categories, "steps": len(read.steps),
        "communication_kernels": sorted({e.name[:80] for e in read.events if e.name.startswith(("nccl", "gloo:"))}),
        "breakdown": {part: measured(us, "us", how) for part, us in breakdown(read).items()},
    }
    assert len(read.steps) == _STEPS and read.on_gpu == setting.on_gpu, "it has not all steps, or no work of the GPU"
    assert not read.on_gpu or "gpu_memcpy" in categories


def _events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the names of processes and threads, which can hold those of folders and users."""
    return [event for event in events if event.get("name") not in ("process_name", "thread_name", "process_labels")]


@pytest.mark.limit(45)
def test_memory_snapshot(setting: Setting, facts: dict):
    """Allocated bytes over two training steps, from the events of PyTorch's memory snapshot."""
    setting.need_gpu("the snapshot is that of CUDA's allocator")
    from course_utils.data import Windows
    from course_utils.models import build_gpt, loss_of

    device = torch.device("cuda", 0)
    x, y = Windows().batch(range(256), device)
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
    model = build_gpt().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    marks = []
    for _ in range(2):
        loss = loss_of(model, x, y)
        marks.append(("after forward", torch.cuda.memory_allocated()))
        loss.backward()
        marks.append(("after backward", torch.cuda.memory_allocated()))
        optimizer.step()
        marks.append(("after the optimizer", torch.cuda.memory_allocated()))
        optimizer.zero_grad()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    held, line = 0, []
    for event in events:
        change = {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        if change:
            held += change * event["size"]
            line.append(held)
    assert line, "the snapshot has no allocation"
    stride = -(-len(line) // _POINTS)
    peaks = [max(line[i : i + stride]) for i in range(0, len(line), stride)]
    how = "torch.cuda.memory._record_memory_history and _snapshot: running sum of alloc and free_completed"
    grown = f"{how}; the most within each {stride} events"
    facts |= {
        "events": len(events), "largest": measured(max(line), "bytes", how),
        "allocated": measured(peaks, "bytes", grown, [*range(0, len(line), stride)], "event"),
        "marks": [{"when": when, "allocated": measured(count, "bytes", "torch.cuda.memory_allocated()")}
                  for when, count in marks],
    }
