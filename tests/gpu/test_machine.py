"""Describe a machine for the report: GPUs, driver and versions; no name of host, user or folder."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess

import pytest
import torch


@pytest.mark.limit(60)
def test_machine(setting, facts: dict):
    """What this machine is."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    facts |= {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "driver": tell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or None,
        "nvcc": next(iter(re.findall(r"release ([\d.]+)", tell("nvcc", "--version"))), None),
        "compiler": next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), None),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [],
    }
    for index in range(torch.cuda.device_count() if setting.on_gpu else 0):
        properties = torch.cuda.get_device_properties(index)
        facts["gpus"].append({
            "name": properties.name, "memory_bytes": properties.total_memory, "sms": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        })
    if len(facts["gpus"]) > 1:
        facts["topology"] = _matrix(tell("nvidia-smi", "topo", "-m"))
        pairs = [(a, b) for a in range(setting.ranks) for b in range(setting.ranks) if a != b]
        facts["peer_access"] = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


def _matrix(text: str) -> list[str]:
    """The rows of the matrix of links, without the legend."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    return [line.rstrip() for line in text.splitlines() if re.match(r"\s*GPU\d|\s+GPU0|\s*NIC\d", line)]


def tell(*command: str) -> str:
    """What a program prints, or nothing where there is no such program, it fails, or takes longer than 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
