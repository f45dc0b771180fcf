"""Describe this machine: what of the course is real on it, and whether ranks start."""

from __future__ import annotations

import os
import platform
import shutil
import time
from typing import Any

__all__ = ["chromium", "doctor", "machine", "report"]


def machine() -> dict[str, Any]:
    """Describe this machine, and what of the course is real on it; never initialises CUDA.

    Returns
    -------
    dict
        ``memory`` in bytes; ``gpus``: list of ``{"name", "memory"}``; ``links``: kind of link by pair of GPUs, in
        nvidia-smi's terms (``NV18`` is 18 NVLinks, ``PIX``, ``PHB`` and ``SYS`` are ever longer ways over PCIe);
        ``world_size`` and ``backend``: what ``launch`` takes by default; ``hosts``: whether ``launch(hosts=…)``
        emulates hosts here, and a sentence that says so or why not; ``real`` and ``emulated``: lists of sentences.
    """
    import psutil
    import torch

    from .ranks import emulation, gpu_count, settle
    from .topology import nvidia_smi

    count = gpu_count()
    listing = nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits") if count else ""
    rows = [line.rsplit(",", 1) for line in listing.splitlines()[:count]]
    gpus = [{"name": name.strip(), "memory": int(mebibytes) * 2**20} for name, mebibytes in rows]
    world_size, _ = settle(None, "gloo")
    backend = "nccl" if count >= world_size else "gloo"
    hosts = emulation().hosts_available()
    real = [f"{world_size} ranks: separate processes in a real process group ({backend})"]
    how = "emulated, with real links, bytes and faults" if hosts[0] else "processes on one host"
    emulated = [f"several hosts: {how} (lesson 16)"]
    if backend == "nccl":
        real.append("the links between GPUs: measured, and used by every collective")
    else:
        real.append("the bytes that ranks exchange, and results equal to one process")
        emulated.insert(0, "GPU links (NVLink, PCIe, InfiniBand): modelled, or quoted from a source")
    if count:
        real.append("GPU kernels and GPU memory: measured" + (" on one GPU at a time" if backend == "gloo" else ""))
    else:
        emulated.insert(0, "GPU speed and GPU memory: modelled, or quoted from a source")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "gpus": gpus + [{"name": "GPU", "memory": 0}] * (count - len(gpus)),
        "links": _links(nvidia_smi("topo", "-m"), count) if count > 1 else {},
        "world_size": world_size,
        "backend": backend,
        "hosts": hosts,
        "real": real,
        "emulated": emulated,
    }


def report(found: dict[str, Any], **more: str) -> str:
    """Return what :func:`machine` found as text: a line for each part, then what is real and what is emulated."""
    gpus = [f"{gpu['name']} ({gpu['memory'] / 1e9:.0f} GB)" for gpu in found["gpus"]]
    parts = {
        "Python": f"{found['python']} on {found['system']}",
        "torch": found["torch"],
        "cores": found["cores"],
        "memory": f"{found['memory'] / 1e9:.0f} GB",
        "GPUs": ", ".join(gpus) or "none (none is needed)",
        "links": ", ".join(f"{pair} {kind}" for pair, kind in found["links"].items()) or "no GPU pairs",
        "ranks": f"{found['world_size']} by default, over {found['backend']}",
    }
    lines = [f"{name:9} {value}" for name, value in (parts | more).items()]
    for kind in ("real", "emulated"):
        lines += ["", f"{kind} here:", *(f"  {sentence}" for sentence in found[kind])]
    return "\n".join(lines)


def _links(topology: str, gpus: int) -> dict[str, str]:
    """Kinds of link by pair of GPUs, from what ``nvidia-smi topo -m`` prints: ``{"0-1": "NV18", …}``."""
    from .topology import parse_matrix

    try:
        cells = parse_matrix(topology).cells
    except ValueError:
        return {}
    pairs = [(a, b) for a in range(gpus) for b in range(a + 1, gpus) if (f"GPU{a}", f"GPU{b}") in cells]
    return {f"{a}-{b}": cells[f"GPU{a}", f"GPU{b}"] for a, b in pairs}


def chromium() -> str | None:
    """Path of a Chromium or Chrome for the browser tests."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    places = [*map(shutil.which, names), "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"]
    return next((place for place in places if place and os.path.exists(place)), None)


def doctor() -> bool:
    """Print a report on this machine, after a real launch of two ranks; return whether the course can run."""
    other = os.environ.get("PYTHONPATH")
    advice = f"PYTHONPATH is set, so packages in {other} come before the course's: unset PYTHONPATH, then try again"
    try:
        found, more = machine(), {"warning": advice} if other else {}
    except Exception as error:  # whatever a package does that was damaged, or made for another Python
        print(f"imports   failed: {type(error).__name__}: {error}")
        print(f"\n{advice if other else 'make clean lab installs the packages again'}")
        return False
    from .ranks import tells_place

    if foreign := sorted(name for name in os.environ if tells_place(name)):
        rank, size = (os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE"))
        names = ", ".join(foreign[:4])
        more["job"] = f"this Python is rank {rank} of {size} of another job ({names}); ranks do not see it"
    start = time.perf_counter()
    try:
        sums = _sum_of_two_ranks()
        more["launch"] = f"2 ranks, one all_reduce: {sums} in {time.perf_counter() - start:.1f} s"
    except Exception as error:
        sums, more["launch"] = [], f"failed: {error}"
    print(report(found, hosts=found["hosts"][1], Chromium="yes" if chromium() else "no (only tests need it)", **more))
    return sums == [3.0, 3.0]


def _sum_of_two_ranks() -> list[float]:
    from . import launch, shutdown

    def add() -> float:
        import torch
        import torch.distributed as dist

        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        return total.item()

    try:
        return launch(add, world_size=2, backend="gloo", timeout=120)
    finally:
        shutdown()
