"""What the checks on GPUs share: where they run, how they measure, and ranks that torch alone starts."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from course_utils.hardware import GPU, GPUS

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 10
_PATH = re.compile(r"(?<![\w.:/<])/(?:home|root|Users|tmp|var|opt|usr|work|mnt|data|scratch|workspace)/[\w.@+/-]*")


@dataclass(frozen=True)
class Setting:
    """Where checks run: "gpu", or "cpu" with small sizes; one rank for each GPU; the folder of files that are kept."""

    on: str
    ranks: int
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.on == "gpu"

    @property
    def backend(self) -> str:
        return "nccl" if self.on_gpu else "gloo"

    @property
    def device(self) -> str:
        return "cuda:0" if self.on_gpu else "cpu"

    @property
    def clock(self) -> str:
        return "CUDA events" if self.on_gpu else "time.perf_counter"

    def choose(self, gpu: Any, cpu: Any) -> Any:
        """One of two values: for GPUs, or for a try on the CPU."""
        return gpu if self.on_gpu else cpu

    def need_gpu(self, why: str) -> None:
        """Skip the check on the CPU."""
        if not self.on_gpu:
            pytest.skip(f"needs a GPU: {why}")

    def wait(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.on_gpu:
            torch.cuda.synchronize()


def measured(
    value: float | Sequence[float], unit: str, how: str, at: Sequence[float] | None = None, at_unit: str = ""
) -> dict[str, Any]:
    """A measurement as the report has it: a number, or a list of numbers with their places; four digits are kept."""
    if at is None:
        return {"value": _short(value), "unit": unit, "how": how}
    values = [_short(each) for each, _ in zip(value, at, strict=True)]
    return {"value": values, "unit": unit, "how": how, "at": list(at), "at_unit": at_unit}


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def seconds(action: Callable[[], object], on_gpu: bool) -> list[float]:
    """Seconds of each of `REPEATS` runs, after two that do not count; on a GPU between CUDA events."""
    for _ in range(2):
        action()
    found = []
    for _ in range(REPEATS):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            action()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            action()
            found.append(time.perf_counter() - start)
    return found


def call(*command: str | Path, seconds: float = 60, **environment: str | Path) -> subprocess.CompletedProcess:
    """Run a program for `seconds` at most, with more variables set."""
    names = os.environ | {name: str(value) for name, value in environment.items()}
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, env=names, timeout=seconds)


def data_sheet(name: str) -> GPU | None:
    """The entry of `hardware.GPUS` for a GPU by CUDA's name of it, but not for the slower PCIe cards of that name."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    if {"pcie", "nvl", "mig"} & set(words):
        return None
    return next((gpu for key, gpu in GPUS.items() if key in words), None)


def scrub(value: Any) -> Any:
    """The value with the names of host and user, and folders, taken out of all its texts."""
    if isinstance(value, dict):
        return {scrub(key): scrub(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(each) for each in value]
    if not isinstance(value, str):
        return value
    value = _PATH.sub("<path>", value.replace(str(ROOT), "<course>"))
    for name in _names():
        value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<name>", value)
    return value


@cache
def _names() -> list[str]:
    """Of this host and this user, where they are not everybody's."""
    host = socket.gethostname()
    found = [host, host.split(".")[0]]
    try:
        found.append(getpass.getuser())
    except (KeyError, OSError):  # a user without a name
        pass
    return [name for name in found if len(name) > 2 and name not in ("root", "localhost", "user", "ubuntu")]


class RankError(RuntimeError):
    """A rank failed; the message says which and why."""


def run_ranks(
    fn: Callable[..., Any], *args: Any, ranks: int, backend: str, timeout: float = 60, one_gpu: bool = False
) -> list[Any]:
    """Run a function of a module on ranks of a default process group; its results, by rank, go through JSON.

    With NCCL rank r uses GPU r, or all use GPU 0. On the CPU ranks are forked, so call it before this process computes
    gradients.
    """
    method = "spawn" if backend == "nccl" else "fork"  # who has used CUDA cannot fork
    with TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        try:
            mp.start_processes(_rank, (fn, args, ranks, backend, name, timeout, one_gpu), ranks, start_method=method)
        except mp.ProcessExitedException as error:
            said = [file.read_text() for file in sorted(folder.glob("error-*"), key=lambda file: file.stat().st_mtime)]
            raise RankError(said[0] if said else str(error)) from None
        return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(ranks)]


def _rank(
    rank: int, fn: Callable[..., Any], args: tuple, ranks: int, backend: str, folder: str, timeout: float, one_gpu: bool
) -> None:
    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        device = None
        if backend == "nccl":
            device = torch.device("cuda", 0 if one_gpu else rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, device_id=device,
            timeout=timedelta(seconds=timeout),
        )
        Path(folder, f"result-{rank}").write_text(json.dumps(fn(*args)))
        dist.destroy_process_group()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = f"rank {rank}: {type(error).__name__}: {' | '.join(lines[:6])[:700]}"
        Path(folder, f"error-{rank}").write_text(said)
        os._exit(1)  # a group that failed may wait for ever when it is destroyed


def own_device() -> torch.device:
    """This rank's device, by the backend of its group."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
