"""Checks of copies and of arithmetic on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from .machine import data_sheet
from .report import measured
from .setting import Setting

_REPEATS = 10


def _best(action: Callable[[], object], on_gpu: bool, device: int = 0) -> float:
    """Seconds of the fastest of `_REPEATS` runs, after two that do not count; on a GPU between CUDA events."""
    for _ in range(2):
        action()
    seconds = []
    for _ in range(_REPEATS):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            begin.record()
            action()
            end.record()
            torch.cuda.synchronize(device)
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def copies(setting: Setting) -> dict[str, Any]:
    """Bytes copied a second, by where from and where to, and by size."""
    on_gpu, device = setting.on == "gpu", setting.device
    sizes = [2**k for k in setting.choose((12, 16, 20, 24, 28), (12, 16, 20))]
    most = sizes[-1]
    there, other = (torch.empty(most, dtype=torch.uint8, device=device) for _ in range(2))
    pageable = torch.ones(most, dtype=torch.uint8)
    ways = {"pageable to device": (there, pageable), "device to pageable": (pageable, there)}
    ways["within the device"] = other, there
    if on_gpu:
        pinned = torch.ones(most, dtype=torch.uint8, pin_memory=True)
        ways |= {"pinned to device": (there, pinned), "device to pinned": (pinned, there)}
        if torch.cuda.device_count() > 1:
            ways["GPU 0 to GPU 1"] = torch.empty(most, dtype=torch.uint8, device="cuda:1"), there
    found, clock = {}, setting.choose("CUDA events", "time.perf_counter")
    for name, (target, source) in ways.items():
        target.copy_(source)
        rates = []
        for size in sizes:
            to, of = target[:size], source[:size]
            rates.append(size / _best(lambda to=to, of=of: to.copy_(of, non_blocking=True), on_gpu) / 1e9)
        how = f"bytes copied / seconds of the fastest of {_REPEATS} copies, {clock}"
        found[name] = measured(rates, "GB/s", how, sizes, "bytes")
    if not torch.equal(there.cpu(), torch.ones(most, dtype=torch.uint8)):
        raise AssertionError("a copy arrived changed")
    if on_gpu:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()["segment.all.allocated"]
        for _ in range(100):
            torch.empty(most, dtype=torch.uint8, device=device)
        found["segments_for_100_tensors"] = torch.cuda.memory_stats()["segment.all.allocated"] - before
    return found


def roofline(setting: Setting) -> dict[str, Any]:
    """Operations with their FLOP per byte and FLOP/s, by precision, and what the data sheet says of the GPU."""
    on_gpu = setting.on == "gpu"
    precisions = {"fp32": torch.float32}
    if on_gpu:
        precisions |= {"tf32": torch.float32} if torch.cuda.get_device_capability(0) >= (8, 0) else {}
        precisions |= {"fp16": torch.float16}
        precisions |= {"bf16": torch.bfloat16} if torch.cuda.is_bf16_supported(including_emulation=False) else {}
    found: dict[str, Any] = {"points": []}
    for precision, dtype in precisions.items():
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        found["points"] += _points(precision, dtype, setting)
    if on_gpu and (sheet := data_sheet(torch.cuda.get_device_name(0))):
        peaks = {name: rate / 1e12 for name, rate in sheet.flops.items() if name in precisions}
        found["data_sheet"] = {"gpu": sheet.name, "source": sheet.source, "tflops": peaks,
                               "memory_gb_per_s": sheet.memory_bandwidth / 1e9}
    return found


def _points(precision: str, dtype: torch.dtype, setting: Setting) -> list[dict[str, Any]]:
    """Addition, matrix x vector, and square products; each input is read once, each output written once."""
    device, width = setting.device, dtype.itemsize
    new = {"device": device, "dtype": dtype}
    count, found = setting.choose(2**27, 2**20), []
    clock = setting.choose("CUDA events", "time.perf_counter")

    def add(name: str, work: float, moved: float, call: Callable[[], object]) -> None:
        seconds = _best(call, setting.on == "gpu")
        how = f"FLOP counted by formula / seconds of the fastest of {_REPEATS}, {clock}"
        found.append({
            "precision": precision, "operation": name, "flop_per_byte": work / moved,
            "rate": measured(work / seconds / 1e12, "TFLOP/s", how),
            "memory": measured(moved / seconds / 1e9, "GB/s", how.replace("FLOP", "bytes")),
        })

    if precision != "tf32":  # it is a way to multiply matrices only
        x, y, out = (torch.ones(count, **new) for _ in range(3))
        add("add", count, 3 * width * count, lambda: torch.add(x, y, out=out))
        del x, y, out
        side = setting.choose(8192, 512)
        a, v = torch.randn(side, side, **new), torch.randn(side, **new)
        add("matrix x vector", 2 * side**2, width * (side**2 + 2 * side), lambda: torch.mv(a, v))
        del a, v
    for side in setting.choose((256, 512, 1024, 2048, 4096, 8192), (64, 256)):
        a, b, c = (torch.randn(side, side, **new) for _ in range(3))
        call = lambda a=a, b=b, c=c: torch.mm(a, b, out=c)  # noqa: E731
        add(f"matmul {side}", 2 * side**3, 3 * width * side**2, call)
    return found
