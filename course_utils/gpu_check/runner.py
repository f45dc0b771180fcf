"""Run checks one after the other, each in a process with a time limit, and write the report after each."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..programs import ROOT
from .report import FAILED, PASSED, SCHEMA, SKIPPED, TIMED_OUT, scrub, write
from .setting import Setting

__all__ = ["REPORT", "TRACE", "Check", "command", "run"]

REPORT, TRACE = "gpu_check.json", "trace.json.gz"
_ALL = 450  # seconds for all checks together; with the last clean-up that is below 8 minutes
_ON_CPU = 3  # times as long where few cores do the work of GPUs
_LEAST = 10  # seconds that must be left to begin a check
_MARKS = {PASSED: "passed", FAILED: "FAILED", SKIPPED: "skipped", TIMED_OUT: "TIMED OUT"}


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes
    ----------
    name, what : str
        A word for the command line, and a sentence for the report.
    target : str
        ``module:function``; the function takes a `Setting` and returns a dictionary of facts, raises `Skip`, or raises
        anything else, which is a failure. It runs in a process of its own.
    limit : float
        Seconds until it is stopped.
    """

    name: str
    what: str
    target: str
    limit: float


def run(checks: Sequence[Check], on: str, ranks: int, folder: Path, seconds: float = _ALL) -> dict[str, Any]:
    """Run the checks and return the report, which also stands in `folder` as `REPORT`, anew after each check.

    The first check, if it is named "machine", describes the machine. A check that fails, hangs or takes its process
    down is reported, and the next one runs. After `seconds` no more are begun; those left count as timed out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRACE).unlink(missing_ok=True)  # of an earlier call
    setting, end = Setting(on, ranks, folder.resolve()), time.monotonic() + seconds
    report: dict[str, Any] = {
        "schema": SCHEMA, "made_by": "python -m course_utils gpu-check", "on": on, "complete": False, "machine": {},
        "checks": [],
    }
    write(report, folder / REPORT)
    starter = _Starter()
    try:
        _run_all(checks, setting, end, report, starter)
    finally:
        starter.close()
    report["complete"] = True
    write(report, folder / REPORT)
    return report


def _run_all(
    checks: Sequence[Check], setting: Setting, end: float, report: dict[str, Any], starter: _Starter
) -> None:
    for check in checks:
        left = end - time.monotonic()
        if left < _LEAST:
            reason = "not begun: the time for all checks was over"
            found = {"status": TIMED_OUT, "reason": reason, "seconds": 0.0, "facts": {}}
        else:
            found = _run_one(check, setting, min(check.limit, left), starter)
        report["checks"].append(scrub({"name": check.name, "what": check.what, **found}))
        if check.name == "machine":
            report["machine"] = report["checks"][-1]["facts"]
        write(report, setting.folder / REPORT)
        reason = f": {report['checks'][-1]['reason']}" if found["reason"] else ""
        print(f"{_MARKS[found['status']]:9} {found['seconds']:6.1f} s  {check.name}{reason}", flush=True)


def _run_one(check: Check, setting: Setting, limit: float, starter: _Starter) -> dict[str, Any]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as place:
        result, log = Path(place, "result.json"), Path(place, "log.txt")
        values = (check.target, setting.on, str(setting.ranks), str(setting.folder), str(result))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TMPDIR": place, "PYTHONUNBUFFERED": "1",
        }
        if setting.on == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        code = starter.run(str(log), environment, values, limit)
        seconds = time.monotonic() - start
        if result.exists() and code is not None:
            with contextlib.suppress(ValueError):  # half written, as it died
                return {**json.loads(result.read_text(encoding="utf-8")), "seconds": round(seconds, 1)}
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        last = [line for line in said.splitlines() if line.strip()][-1:]
    if code is None:
        found = {"status": TIMED_OUT, "reason": f"stopped after {limit:.0f} s"}
    else:
        found = {"status": FAILED, "reason": f"its process ended with {_code(code)}"}
    found["reason"] += f"; it printed last: {last[0][:300]}" if last else ""
    return {**found, "seconds": round(seconds, 1), "facts": {}}


def _code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


class _Starter:
    """Starts each check in a process forked from one that has imported torch, and has never used a GPU."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path}, start_new_session=True,
            bufsize=0,  # reading a line takes nothing of the next one, for which `run` waits
        )

    def run(self, log: str, environment: dict[str, str], values: Sequence[str], limit: float) -> int | None:
        """The exit code of the check, or None if it was stopped after `limit` seconds. Nothing of it is left."""
        self._process.stdin.write(json.dumps([log, environment, values]).encode() + b"\n")
        pid = int(self._process.stdout.readline())
        try:
            in_time, _, _ = select.select([self._process.stdout], [], [], limit)
        finally:
            _end(pid)
        code = int(self._process.stdout.readline())
        return code if in_time else None

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def _end(check: int) -> None:
    """Kill what is left of a check: its process, its session, and sessions that processes below it have opened."""
    below = list(_below(check))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(check, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> Iterator[int]:
    """The processes below one, where the system lists them in /proc."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    waiting = [pid]
    while waiting:
        found = parents.pop(waiting.pop(), [])
        waiting += found
        yield from found


def _gpus() -> int | str:
    """How many GPUs torch sees, asked in a process of its own, or a sentence that says why none is usable."""
    code = "import torch; print('GPUs', torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "PyTorch did not say within 120 s how many GPUs there are."
    word, _, number = done.stdout.strip().rpartition("\n")[2].partition(" ")
    if done.returncode or word != "GPUs":
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"PyTorch cannot be used here: {last}"
    return int(number) or "PyTorch sees no GPU here, and gpu-check is for machines with one: nothing was run."


def command(folder: Path, on: str, names: Sequence[str]) -> int:
    """Run ``python -m course_utils gpu-check``; return 0, 1 if a check failed or took too long, 2 without a GPU."""
    from .catalogue import CHECKS

    known = {check.name: check for check in CHECKS}
    if unknown := [name for name in names if name not in known]:
        print(f"there is no check {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    gpus = _gpus() if on == "gpu" else 0
    if isinstance(gpus, str):
        print(gpus, file=sys.stderr)
        return 2
    chosen = [check for check in CHECKS if not names or check.name in ("machine", *names)]
    slower = 1 if on == "gpu" else _ON_CPU
    chosen = [replace(check, limit=slower * check.limit) for check in chosen]
    report = run(chosen, on, gpus or 2, folder, slower * _ALL)
    states = [check["status"] for check in report["checks"]]
    kept = " and ".join(name for name in (REPORT, TRACE) if (folder / name).exists())
    print(f"{', '.join(f'{states.count(s)} {s}' for s in _MARKS if s in states)}; {kept} in {folder}")
    if on == "cpu":
        print("This was a try on the CPU with small sizes: no number in it says anything of a GPU.")
    return int(any(state in (FAILED, TIMED_OUT) for state in states))
