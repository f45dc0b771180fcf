"""Programs of ``scripts/`` under torchrun."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from course_utils.programs import SCRIPTS, TEXT, read_log

from .kit import Setting, call, data_sheet, measured


def _torchrun(setting: Setting, script: str, *options: str | Path) -> list[str]:
    """The command that runs a program of ``scripts/`` with one rank for each GPU."""
    ranks = f"--nproc-per-node={setting.ranks}"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, SCRIPTS / script]
    return [str(part) for part in (*start, *options)]


def _error(said: str) -> str:
    """The last line of what a program wrote that names an error."""
    return " ".join([line for line in said.splitlines() if re.search(r"(Error|Exit)\b.*:", line)][-1:])[:400]


@pytest.mark.limit(110)
def test_scripts(setting: Setting, facts: dict):
    """Exit codes and last lines of the other programs; on the CPU, where tests run them all, of the first one."""
    pytest.importorskip("numpy")
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
        if not setting.on_gpu:
            runs = {"hello.py": []}
        begun = {
            script: subprocess.Popen(
                _torchrun(setting, script, *options), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for script, options in runs.items()
        }
        said = {script: process.communicate(timeout=setting.choose(100, 200)) for script, process in begun.items()}
    facts |= {script: printed.strip().splitlines()[-3:] for script, (printed, _) in said.items()}
    for script, process in begun.items():
        if process.returncode:
            raise AssertionError(f"{script} ended with exit code {process.returncode}: {_error(said[script][1])}")


@pytest.mark.limit(120)
def test_resume(setting: Setting, facts: dict):
    """Losses of a run of ``train.py`` that nothing disturbs, and of one that SIGTERM stops and that then goes on."""
    setting.need_gpu("on the CPU the tests of the course do this")
    pytest.importorskip("numpy")
    steps = "400"
    options = ["--data", TEXT, "--steps", steps, "--log-every", "1", "--save-every", steps, "--dropout", "0.1",
               "--deterministic", f"--batch={8 * setting.ranks}"]
    with tempfile.TemporaryDirectory() as name:
        whole, divided = ([*_torchrun(setting, "train.py", *options), "--out", f"{name}/{n}"] for n in ("1", "2"))
        runs = [call(*whole)]
        process = subprocess.Popen(divided, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        log, end = Path(name, "2", "log.jsonl"), time.monotonic() + 60
        while not (log.exists() and log.read_text().count("\n") >= 20) and time.monotonic() < end:
            time.sleep(0.05)
        process.terminate()  # torchrun hands it on to the ranks
        process.wait(60)
        stopped = len(read_log(log.parent))
        runs.append(call(*divided))
        if failed := [run for run in runs if run.returncode]:
            raise AssertionError(f"train.py ended with exit code {failed[0].returncode}: {_error(failed[0].stderr)}")
        losses = [{line["step"]: line["loss"] for line in read_log(Path(name, n))} for n in ("1", "2")]
    off = [abs(losses[0][step] - losses[1].get(step, math.inf)) for step in losses[0]]
    facts |= {"steps": len(off), "stopped_after": stopped, "steps_that_differ": sum(map(bool, off))}
    facts["largest_difference"] = max(off) if math.isfinite(max(off)) else "a step is missing"
    if any(off) or not 0 < stopped < len(off):
        raise AssertionError(f"losses differ in {facts['steps_that_differ']} of {len(off)} steps")


@pytest.mark.limit(110)
def test_train_program(setting: Setting, facts: dict):
    """Train, and go on from the checkpoint: a line of the log without one, and whether the loss has fallen."""
    pytest.importorskip("numpy")
    shape = setting.choose(
        ["--layers=8", "--hidden=1024", "--heads=16", "--length=512", f"--batch={16 * setting.ranks}"],
        ["--layers=1", "--hidden=32", "--heads=2", "--length=32", f"--batch={4 * setting.ranks}"],
    )
    steps = setting.choose((40, 70), (4, 8))
    peak = math.nan
    if setting.on_gpu:
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        shape += ["--bf16"] if bf16 else []
        sheet = data_sheet(torch.cuda.get_device_name(0))
        peak = (sheet.flops.get("bf16" if bf16 else "fp32", math.nan) if sheet else math.nan) / 1e12
    every = str(setting.choose(10, 2))
    with tempfile.TemporaryDirectory() as folder:
        for until in steps:
            options = ["--out", folder, "--data", TEXT, "--steps", str(until), "--log-every", every, *shape]
            command = _torchrun(setting, "train.py", *options, "--peak-tflops", str(peak), "--warmup=2")
            done = call(*command, seconds=setting.choose(60, 150))
            if done.returncode:
                raise AssertionError(f"train.py ended with exit code {done.returncode}: {_error(done.stderr)}")
        log = read_log(folder)
    how = f"log of scripts/train.py: {' '.join(shape)}, {setting.ranks} ranks, mean of {every} steps"
    line = log[-2]  # the last one waits for the checkpoint at the end
    facts |= {"steps": [line["step"] for line in log], "losses": [round(line["loss"], 4) for line in log]}
    facts["tokens_per_s"] = measured(line["tokens_per_s"], "1/s", how)
    facts["ms"] = {part: measured(ms, "ms", how) for part, ms in line["ms"].items()}
    if math.isfinite(peak):
        facts["mfu"] = measured(line["mfu"], "1", f"{how}; of {peak:g} TFLOP/s a GPU")
    if facts["steps"][-1] != steps[1] or len(facts["steps"]) != len(set(facts["steps"])):
        raise AssertionError(f"it did not go on to step {steps[1]}: {facts['steps']}")
    if not facts["losses"][-1] < facts["losses"][0]:
        raise AssertionError("the loss has not fallen")
