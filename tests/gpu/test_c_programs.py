"""The C programs of ``native/`` on real NCCL; on the CPU with stand-ins for NCCL and CUDA."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lessons.nccl import c_programs

from .kit import Setting, call, measured

_FLOATS = 1 << 20  # numbers that the C program sums: 4 MiB on each GPU
_SUMS = 21  # all-reduces of the C program: one to verify, twenty that it times


def _toolkit() -> tuple[c_programs.Toolkit, str, str]:
    """Headers and libraries of NCCL and CUDA, the compiler, and where they were found; skip without them."""
    try:
        compiler = c_programs.find_compiler()
    except c_programs.MissingToolError as error:
        pytest.skip(str(error))
    try:
        return c_programs.find_nccl(), compiler, "Python packages"
    except c_programs.MissingToolError as error:
        reason = str(error)
    cuda, nccl = _system_cuda(), _nccl()
    if cuda is None or nccl is None:
        missing = "CUDA's headers" if cuda is None else "nccl.h"
        pytest.skip(f"{missing} found neither among the Python packages nor beside nvcc. {reason}")
    runtime = next((cuda / "lib").glob("libcudart.so.*")).name
    return c_programs.Toolkit(nccl, cuda, runtime), compiler, "beside nvcc"


def _system_cuda() -> Path | None:
    """The folder of an installed CUDA that has both include/ and lib/."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        homes.append(Path(nvcc).resolve().parent.parent)
    homes += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    for home in homes:
        for folder in (*home.glob("targets/*-linux"), home):
            if (folder / "include" / "cuda_runtime.h").exists() and [*(folder / "lib").glob("libcudart.so.*")]:
                return folder
    return None


def _nccl() -> Path | None:
    """A folder with include/nccl.h and lib/libnccl.so.2: that of PyTorch's NCCL."""
    packages = Path(torch.__file__).resolve().parents[1]
    for folder in (packages / "nvidia" / "nccl", Path("/usr/local/nccl")):
        if (folder / "include" / "nccl.h").exists() and (folder / "lib" / "libnccl.so.2").exists():
            return folder
    return None


def _build(folder: Path, setting: Setting, facts: dict) -> tuple[Path, Path, dict[str, str]]:
    """Compile both C programs; on the CPU also stand-ins for NCCL and CUDA. Return what to set for a run."""
    toolkit, compiler, where = _toolkit()
    places = {"TMPDIR": str(folder)}
    if not setting.on_gpu:
        c_programs.build("stand_in_nccl.c", folder / "stand_in" / "libnccl.so.2", toolkit)
        c_programs.build("stand_in_cuda.c", folder / "stand_in" / toolkit.runtime, toolkit)
        places |= {"LD_LIBRARY_PATH": str(folder / "stand_in"), "STAND_IN_GPUS": str(setting.ranks)}
    else:
        places["NCCL_DEBUG"] = "WARN"
    program = c_programs.build("all_reduce.c", folder / "all_reduce", toolkit)
    library = c_programs.build("trace_nccl.c", folder / "libtrace_nccl.so", toolkit)
    nccl = setting.choose("real", "stand-in, without a GPU")
    facts |= {"headers": where, "compiler": compiler, "nccl": nccl}
    return program, library, places


@pytest.mark.limit(75)
def test_c_program(setting: Setting, facts: dict):
    """Verdict and bus bandwidth of one process for all GPUs, and of one process for each."""
    with tempfile.TemporaryDirectory() as name:
        program, _, places = _build(Path(name), setting, facts)
        for mode in ("one-process", "per-gpu"):
            done = call(program, mode, str(_FLOATS), "20", **places)
            said = (done.stderr or done.stdout).strip().splitlines()[-3:]
            if done.returncode or "every sum as expected" not in done.stdout:
                raise AssertionError(f"{mode}: exit code {done.returncode}: {' | '.join(said)}")
            us, _, busbw = map(float, re.findall(r"([\d.]+) (?:us|GB/s)", done.stdout)[:3])
            how = f"native/all_reduce.c {mode} {_FLOATS}: CUDA events around 20 all-reduces, rank 0 of {setting.ranks}"
            facts[mode] = {"all_reduce": measured(us / 1e6, "s", how), "busbw": measured(busbw, "GB/s", how)}


_ON_RANK = """
import sys, torch, torch.distributed as dist
n, store, rank = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method="file://" + store, rank=rank, world_size=n)
x = torch.ones(1000, device="cuda")
for _ in range(3):
    dist.all_reduce(x)
assert x[0].item() == n**3
dist.destroy_process_group()
"""


@pytest.mark.limit(75)
def test_tracer(setting: Setting, facts: dict):
    """Lines of the trace of the C program, and of three all-reduces of PyTorch on each rank."""
    n = setting.ranks
    with tempfile.TemporaryDirectory() as name:
        program, library, places = _build(Path(name), setting, facts)
        done = call(program, "one-process", "65536", "20", LD_PRELOAD=library, **places)
        lines = [line for line in done.stderr.splitlines() if re.match(r"#\d+ ", line)]
        calls = _count(lines)
        facts["c_program"] = {"calls": calls, "first_lines": lines[:6]}
        if done.returncode or calls.get("ncclAllReduce") != _SUMS * n:
            raise AssertionError(f"the trace of the C program has {calls}, expected {_SUMS * n} ncclAllReduce")
        if setting.on_gpu:
            facts["pytorch"] = _trace_of_torch(Path(name), library, n)


def _trace_of_torch(folder: Path, library: Path, n: int) -> list[dict[str, Any]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _ON_RANK, str(n), str(folder / "store"), str(rank)], stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
            env=os.environ | {"LD_PRELOAD": str(library), "NCCL_TRACE_FILE": str(folder / f"trace-{rank}")},
        )
        for rank in range(n)
    ]
    errors = [rank.communicate(timeout=50)[1] for rank in ranks]
    found = []
    for rank, process in enumerate(ranks):
        file = folder / f"trace-{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        found.append({"calls": _count(lines), "first_lines": lines[:6]})
        if process.returncode:
            last = [line for line in errors[rank].splitlines() if line.strip()][-1:]
            raise AssertionError(f"rank {rank} of PyTorch under the tracer failed: {' '.join(last)}")
    wrong = [rank for rank, each in enumerate(found) if each["calls"].get("ncclAllReduce", 0) < 3]
    if wrong:
        raise AssertionError(f"the traces of ranks {wrong} of PyTorch lack all-reduces: {json.dumps(found)[:300]}")
    return found


def _count(lines: list[str]) -> dict[str, int]:
    names = [match[0] for line in lines if (match := re.search(r"nccl[A-Z]\w+", line))]
    return {name: names.count(name) for name in dict.fromkeys(names)}
