"""Run a program on two emulated hosts, under given conditions, so that each rank's last words are kept (private)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_utils.ranks import HangError, WorkerError, run
from lessons.debugging_hangs.clinic._cases import Symptom
from lessons.multi_node.hosts import Conditions

from ._network_programs import import_first

HOSTS = 2  # with one rank each
_PATIENCE = 2.5  # seconds that a rank which has failed waits for what the others say
_START = 20.0  # seconds that ranks wait for each other before they begin


@dataclass(frozen=True)
class Work:
    """What a run needs: the variables that the ranks are started with, and the state of the network."""

    settings: Mapping[str, str | None]
    conditions: Conditions = field(default_factory=Conditions)


@contextlib.contextmanager
def folders():
    """A temporary folder with a disk for each host and one that all share, which each sees as ``shared``."""
    with tempfile.TemporaryDirectory(prefix="clinic-") as base:
        shared = Path(base, "shared")
        shared.mkdir()
        for host in range(HOSTS):
            disk = Path(base, f"node{host}")
            disk.mkdir()
            (disk / "shared").symlink_to(shared)
        yield base


def launched(fn: Callable[..., Any], base: str, work: Work, *args: Any, timeout: float = 30.0) -> list[Any]:
    """Call ``fn(base, settings, *args)`` on a rank of each host, without a process group."""
    hosts = {"hosts": HOSTS}
    if work.conditions != Conditions():
        hosts["fault"] = work.conditions
    return run(fn, (base, dict(work.settings), *args), {}, HOSTS, timeout, "gloo", init=False, hosts=hosts)


def set_variables(settings: Mapping[str, str | None]) -> None:
    """Set the variables of this process; None removes one."""
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def called(base: str, event: str, limit: float, everyone: bool = True) -> bool:
    """Tell the other ranks of an event, and wait until they have come there too; whether all have."""
    Path(base, f"{event}.{os.environ['RANK']}").touch()
    end = time.monotonic() + limit
    while time.monotonic() < end:
        there = [os.path.exists(f"{base}/{event}.{rank}") for rank in range(HOSTS)]
        if all(there) or not everyone:
            return all(there)
        time.sleep(0.01)
    return False


def _in_short(error: BaseException) -> str:
    """An error in one line: type and first line, the error behind it, and the last line of a long text."""
    text = f"{type(error).__name__}: {error}".strip()
    lines = [line for line in text.splitlines() if line.strip()]
    short = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
    cause = error.__cause__
    return f"{short} Caused by {type(cause).__name__}: {cause}".splitlines()[0] if cause else short


def _stable(text: str) -> str:
    """Without what is another in each run or version: places in sources, ports that the system has chosen."""
    text = re.sub(r"\[?(?:enforce fail at )?/\S*/third_party/gloo/gloo/\S*/(\w+\.(?:cc|h)):\d+\]?", r"[\1]", text)
    text = re.sub(r"ranks:dict_keys\(\[([\d, ]+)\]\)\S*", r"on rank \1", text)
    text = re.sub(r"(remote=\[[\d.]+\]):\d+(\$\d+)?", r"\1:(a port)", text)
    text = re.sub(r" The client socket has failed to connect to \S+ (\(errno)", r" \1", text)
    text = re.sub(r"\[c10d\] ", "", text)
    text = re.sub(r"has connected to \S+ on SocketImpl\(.*\)", "has connected", text)  # to addresses printed wrongly
    return text.replace("Traceback (most recent call last):", "").replace("  ", " ").strip()


def _run(base: str, settings: dict[str, str | None], program: Callable[[], Any]) -> None:
    """On a rank: run the program in the folder of its host; what it says, returns and leaves goes into a file."""
    rank = os.environ["RANK"]
    os.chdir(f"{base}/node{os.environ['GROUP_RANK']}")
    set_variables(settings)
    log = os.open(f"{base}/log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    import_first(program)
    called(base, "begun", _START)
    told: dict[str, Any] = {"said": "", "result": None}
    try:
        told["result"] = program()
    except BaseException as error:  # noqa: BLE001  CheckpointException is one
        told["said"] = _stable(_in_short(error))
    told["files"] = _tree()
    Path(f"{base}/told.{rank}.new").write_text(json.dumps(told))
    os.rename(f"{base}/told.{rank}.new", f"{base}/told.{rank}")
    all_told = called(base, "over", _PATIENCE if told["said"] else _START)
    if told["said"] and not all_told:
        raise RuntimeError("this rank has failed, and others say nothing")  # ends the run
    sys.stderr.flush()


def _tree() -> str:
    """Files below the working folder, in lines."""
    found = []
    for place, _, names in os.walk(".", followlinks=True):
        found += [os.path.join(place, name).removeprefix("./") for name in names]
    return "\n".join(sorted(found)) or "(no file)"


def run_program(program: Callable[[], Any], work: Work, limit: float) -> Symptom:
    """Run a program on both hosts; what each rank says, also where some say nothing within ``limit`` seconds."""
    with folders() as base:
        standing = {}
        try:
            launched(_run, base, work, program, timeout=limit)
        except (HangError, WorkerError) as error:
            standing = {int(row.split()[0]): row for row in error.states if row.split()[0].isdigit()}
        told = [_told(base, rank) for rank in range(HOSTS)]
        silence = "(says nothing)" if any(told) else f"(says nothing in {limit:g} s)"
        said = tuple(_words(one, silence) for one in told)
        results = tuple(one["result"] for one in told if one and not one["said"])
        return Symptom(
            said, results if len(results) == HOSTS else None,
            log=tuple(_log(base, rank, standing.get(rank, "")) for rank in range(HOSTS)),
            files=tuple(one["files"] if one else "(still running)" for one in told),
        )


def _told(base: str, rank: int) -> dict[str, Any] | None:
    file = Path(base, f"told.{rank}")
    return json.loads(file.read_text()) if file.exists() else None


def _words(told: dict[str, Any] | None, silence: str) -> str:
    """What a rank says, or that it says nothing."""
    return silence if told is None else told["said"] or f"finished with {told['result']}"


def _log(base: str, rank: int, row: str) -> str:
    """What a rank has written, without native stacks and repetitions, and where it stood if it did not end."""
    file = Path(base, f"log.{rank}")
    text = readable(file.read_text(errors="replace")) if file.exists() else ""
    if row and ("connects" in row or "waits" in row):
        text += "\nstands: " + re.split(r"\s{2,}", row.strip())[3]
    return text.strip() or "(nothing)"


_NOISE = re.compile(r"LibUv|trace\]|The hostname of the client|^(?!\[|.*(?:Error|Exception|metadata|stands:))")
_STACK = re.compile(r"\s*(frame #|Exception raised from|<omitting|File \"|\^|return |raise |with |metadata = |~)")
_STAMP = re.compile(r"^\[([EWI])\d+ [\d:.]+ (\w+\.cpp):\d+\]")


def readable(log: str) -> str:
    """A log without stacks, times and repetitions."""
    kept: list[str] = []
    for line in log.splitlines():
        if not _STACK.match(line) and not _NOISE.search(line):
            line = _stable(_STAMP.sub(r"[\1 \2]", line))
            if line and line not in kept:
                kept.append(line)
    return "\n".join(kept)
