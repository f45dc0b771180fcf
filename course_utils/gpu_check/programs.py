"""Checks of programs: those of ``scripts/`` under torchrun, and the C programs of ``native/`` on real NCCL."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lessons.nccl import c_programs

from ..programs import SCRIPTS, TEXT, read_log
from .machine import data_sheet
from .report import measured
from .setting import CheckError, Setting, Skip, need

_FLOATS = 1 << 20  # numbers that the C program sums: 4 MiB on each GPU
_SUMS = 21  # all-reduces of the C program: one to verify, twenty that it times


def _call(*command: str | Path, seconds: float = 60, **environment: str | Path) -> subprocess.CompletedProcess:
    names = os.environ | {name: str(value) for name, value in environment.items()}
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, env=names, timeout=seconds)


def _torchrun(setting: Setting, script: str, *options: str | Path) -> list[str]:
    """The command that runs a program of ``scripts/`` with one rank for each GPU."""
    ranks = f"--nproc-per-node={setting.ranks}"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, SCRIPTS / script]
    return [str(part) for part in (*start, *options)]


def _error(said: str) -> str:
    """The last line of what a program wrote that names an error."""
    return " ".join([line for line in said.splitlines() if re.search(r"(Error|Exit)\b.*:", line)][-1:])[:400]


def scripts(setting: Setting) -> dict[str, Any]:
    """Exit codes and last lines of the other programs; on the CPU, where tests run them all, of the first one."""
    need("scripts/", "numpy")
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    fast = ["--bf16"] if bf16 else []
    with tempfile.TemporaryDirectory() as name:
        data, batch = ["--data", TEXT, "--steps", "12"], f"--batch={8 * setting.ranks}"
        runs = {
            "hello.py": [], "links.py": [], "busbw.py": ["--largest", str(2**26)], "scaling_curve.py": fast,
            "train_ddp.py": ["--steps", "12", batch, "--compile", "--checkpoint", f"{name}/ddp.pt"],
            "train_3d.py": [*data, f"--batch={16 * setting.ranks}", "--out", f"{name}/3d", *fast],
            "train.py": [*data, batch, "--out", f"{name}/1d", "--profile", f"{name}/traces", "--compile", *fast],
        }
        if setting.on == "cpu":
            runs = {"hello.py": []}
        begun = {
            script: subprocess.Popen(
                _torchrun(setting, script, *options), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for script, options in runs.items()
        }
        said = {script: process.communicate(timeout=setting.choose(100, 200)) for script, process in begun.items()}
    facts = {script: printed.strip().splitlines()[-3:] for script, (printed, _) in said.items()}
    for script, process in begun.items():
        if process.returncode:
            raise CheckError(f"{script} ended with exit code {process.returncode}: {_error(said[script][1])}", facts)
    return facts


def resume(setting: Setting) -> dict[str, Any]:
    """Losses of a run of ``train.py`` that nothing disturbs, and of one that SIGTERM stops and that then goes on."""
    setting.need_gpu("on the CPU the tests of the course do this")
    need("scripts/train.py", "numpy")
    steps = "400"
    options = ["--data", TEXT, "--steps", steps, "--log-every", "1", "--save-every", steps, "--dropout", "0.1",
               "--deterministic", f"--batch={8 * setting.ranks}"]
    with tempfile.TemporaryDirectory() as name:
        whole, divided = ([*_torchrun(setting, "train.py", *options), "--out", f"{name}/{n}"] for n in ("1", "2"))
        runs = [_call(*whole)]
        process = subprocess.Popen(divided, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        log, end = Path(name, "2", "log.jsonl"), time.monotonic() + 60
        while not (log.exists() and log.read_text().count("\n") >= 20) and time.monotonic() < end:
            time.sleep(0.05)
        process.terminate()  # torchrun hands it on to the ranks
        process.wait(60)
        stopped = len(read_log(log.parent))
        runs.append(_call(*divided))
        if failed := [run for run in runs if run.returncode]:
            raise CheckError(f"train.py ended with exit code {failed[0].returncode}: {_error(failed[0].stderr)}")
        losses = [{line["step"]: line["loss"] for line in read_log(Path(name, n))} for n in ("1", "2")]
    off = [abs(losses[0][step] - losses[1].get(step, math.inf)) for step in losses[0]]
    facts = {"steps": len(off), "stopped_after": stopped, "steps_that_differ": sum(map(bool, off))}
    facts["largest_difference"] = max(off) if math.isfinite(max(off)) else "a step is missing"
    if any(off) or not 0 < stopped < len(off):
        raise CheckError(f"losses differ in {facts['steps_that_differ']} of {len(off)} steps", facts)
    return facts


def train(setting: Setting) -> dict[str, Any]:
    """Train, and go on from the checkpoint: a line of the log without one, and whether the loss has fallen."""
    need("scripts/train.py", "numpy")
    shape = setting.choose(
        ["--layers=8", "--hidden=1024", "--heads=16", "--length=512", f"--batch={16 * setting.ranks}"],
        ["--layers=1", "--hidden=32", "--heads=2", "--length=32", f"--batch={4 * setting.ranks}"],
    )
    steps, facts = setting.choose((40, 70), (4, 8)), {}
    peak = math.nan
    if setting.on == "gpu":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        shape += ["--bf16"] if bf16 else []
        sheet = data_sheet(torch.cuda.get_device_name(0))
        peak = (sheet.flops.get("bf16" if bf16 else "fp32", math.nan) if sheet else math.nan) / 1e12
    every = str(setting.choose(10, 2))
    with tempfile.TemporaryDirectory() as folder:
        for until in steps:
            options = ["--out", folder, "--data", TEXT, "--steps", str(until), "--log-every", every, *shape]
            command = _torchrun(setting, "train.py", *options, "--peak-tflops", str(peak), "--warmup=2")
            done = _call(*command, seconds=setting.choose(60, 150))
            if done.returncode:
                raise CheckError(f"train.py ended with exit code {done.returncode}: {_error(done.stderr)}")
        log = read_log(folder)
    how = f"log of scripts/train.py: {' '.join(shape)}, {setting.ranks} ranks, mean of {every} steps"
    line = log[-2]  # the last one waits for the checkpoint at the end
    facts |= {"steps": [line["step"] for line in log], "losses": [round(line["loss"], 4) for line in log]}
    facts["tokens_per_s"] = measured(line["tokens_per_s"], "1/s", how)
    facts["ms"] = {part: measured(ms, "ms", how) for part, ms in line["ms"].items()}
    if math.isfinite(peak):
        facts["mfu"] = measured(line["mfu"], "1", f"{how}; of {peak:g} TFLOP/s a GPU")
    if facts["steps"][-1] != steps[1] or len(facts["steps"]) != len(set(facts["steps"])):
        raise CheckError(f"it did not go on to step {steps[1]}: {facts['steps']}", facts)
    if not facts["losses"][-1] < facts["losses"][0]:
        raise CheckError("the loss has not fallen", facts)
    return facts


def _toolkit() -> tuple[c_programs.Toolkit, str, str]:
    """Headers and libraries of NCCL and CUDA, the compiler, and where they were found; raise `Skip` without them."""
    try:
        compiler = c_programs.find_compiler()
    except c_programs.MissingToolError as error:
        raise Skip(str(error)) from None
    try:
        return c_programs.find_nccl(), compiler, "Python packages"
    except c_programs.MissingToolError as error:
        reason = str(error)
    cuda, nccl = _system_cuda(), _nccl()
    if cuda is None or nccl is None:
        missing = "CUDA's headers" if cuda is None else "nccl.h"
        raise Skip(f"{missing} found neither among the Python packages nor beside nvcc. {reason}")
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


def _build(folder: Path, setting: Setting) -> tuple[Path, Path, dict[str, str], dict[str, Any]]:
    """Compile both C programs; on the CPU also stand-ins for NCCL and CUDA. Return what to set for a run."""
    toolkit, compiler, where = _toolkit()
    places = {"TMPDIR": str(folder)}
    if setting.on == "cpu":
        c_programs.build("stand_in_nccl.c", folder / "stand_in" / "libnccl.so.2", toolkit)
        c_programs.build("stand_in_cuda.c", folder / "stand_in" / toolkit.runtime, toolkit)
        places |= {"LD_LIBRARY_PATH": str(folder / "stand_in"), "STAND_IN_GPUS": str(setting.ranks)}
    else:
        places["NCCL_DEBUG"] = "WARN"
    program = c_programs.build("all_reduce.c", folder / "all_reduce", toolkit)
    library = c_programs.build("trace_nccl.c", folder / "libtrace_nccl.so", toolkit)
    nccl = setting.choose("real", "stand-in, without a GPU")
    return program, library, places, {"headers": where, "compiler": compiler, "nccl": nccl}


def c_program(setting: Setting) -> dict[str, Any]:
    """Verdict and bus bandwidth of one process for all GPUs, and of one process for each."""
    with tempfile.TemporaryDirectory() as name:
        program, _, places, facts = _build(Path(name), setting)
        for mode in ("one-process", "per-gpu"):
            done = _call(program, mode, str(_FLOATS), "20", **places)
            said = (done.stderr or done.stdout).strip().splitlines()[-3:]
            if done.returncode or "every sum as expected" not in done.stdout:
                raise CheckError(f"{mode}: exit code {done.returncode}: {' | '.join(said)}", facts)
            us, _, busbw = map(float, re.findall(r"([\d.]+) (?:us|GB/s)", done.stdout)[:3])
            how = f"native/all_reduce.c {mode} {_FLOATS}: CUDA events around 20 all-reduces, rank 0 of {setting.ranks}"
            facts[mode] = {"all_reduce": measured(us / 1e6, "s", how), "busbw": measured(busbw, "GB/s", how)}
    return facts


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


def tracer(setting: Setting) -> dict[str, Any]:
    """Lines of the trace of the C program, and of three all-reduces of PyTorch on each rank."""
    n = setting.ranks
    with tempfile.TemporaryDirectory() as name:
        program, library, places, facts = _build(Path(name), setting)
        done = _call(program, "one-process", "65536", "20", LD_PRELOAD=library, **places)
        lines = [line for line in done.stderr.splitlines() if re.match(r"#\d+ ", line)]
        calls = _count(lines)
        facts["c_program"] = {"calls": calls, "first_lines": lines[:6]}
        if done.returncode or calls.get("ncclAllReduce") != _SUMS * n:
            raise CheckError(f"the trace of the C program has {calls}, expected {_SUMS * n} ncclAllReduce", facts)
        if setting.on == "gpu":
            facts["pytorch"] = _trace_of_torch(Path(name), library, n, facts)
    return facts


def _trace_of_torch(folder: Path, library: Path, n: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
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
            raise CheckError(f"rank {rank} of PyTorch under the tracer failed: {' '.join(last)}", facts)
    wrong = [rank for rank, each in enumerate(found) if each["calls"].get("ncclAllReduce", 0) < 3]
    if wrong:
        raise CheckError(f"the traces of ranks {wrong} of PyTorch lack all-reduces: {json.dumps(found)[:300]}", facts)
    return found


def _count(lines: list[str]) -> dict[str, int]:
    names = [match[0] for line in lines if (match := re.search(r"nccl[A-Z]\w+", line))]
    return {name: names.count(name) for name in dict.fromkeys(names)}
