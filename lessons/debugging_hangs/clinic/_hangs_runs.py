"""Run a patient of the hang clinic on real ranks, so that what each says and calls is kept (private)."""

from __future__ import annotations

import _thread
import contextlib
import json
import linecache
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from course_utils.ranks import HangError, MismatchError, Watch, WorkerError, run

from ._cases import Symptom
from ._hangs_lines import Way

FILE = "patient.py"  # under which a program stands in stacks
_WAIT = 2.0  # seconds that PyTorch waits for other ranks where its own message is asked for
_TELL = 0.05  # seconds between two times at which a rank leaves what it knows
_DIED = "(its process has died)"
_PATIENCE = 1.0  # seconds that a monitored barrier waits
_LINGER = 8.0  # seconds that a rank stays after its end, so that no connection breaks under another one


def function_of(source: str, name: str) -> Callable[[], Any]:
    """The function that a program defines, with its lines known to stacks."""
    import torch
    import torch.distributed as dist

    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    names: dict[str, Any] = {"torch": torch, "dist": dist, "__name__": "patient"}
    exec(compile(source, FILE, "exec"), names)
    return names[name]


def _on_rank(source: str, name: str) -> Any:
    return function_of(source, name)()


def _counted(source: str, name: str) -> tuple[Any, int]:
    """On a rank: what the program returns, and how often it has communicated."""
    from course_utils.ranks import record

    with record() as ledger:
        result = _on_rank(source, name)
    return result, len(ledger)


def _run(*args: Any, **kwargs: Any) -> list[Any]:
    """`ranks.run` without the launcher's own warnings, which would tell what the learner has to find."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        return run(*args, **kwargs)


def _watch() -> Watch:
    """Tells ranks that provably can never go on as soon as they stand."""
    return Watch(math.inf, math.inf, look=0.1)


def run_program(source: str, name: str, world_size: int) -> Symptom:
    """Run a program until it ends, fails, or can provably never end; which line each rank stands in is its log."""
    function_of(source, name)
    try:
        results = _run(_counted, (source, name), {}, world_size, 30.0, "gloo", watch=_watch())
    except HangError as error:
        said = ("(waits, and nothing comes)",) * world_size if error.kind == "stuck" else (error.fault,) * world_size
        return Symptom(said, log=tuple(error.states), blamed=error.rank)
    except WorkerError as error:
        said = tuple(_stable(error.exception) if rank == error.rank else "(stopped when another rank failed)"
                     for rank in range(world_size))
        return Symptom(said, log=tuple(error.states) or ("",) * world_size)
    values = tuple(result for result, _ in results)
    said = tuple(f"finished with {value}" for value in values)
    return Symptom(said, values, log=("ended",) * world_size, operations=sum(count for _, count in results))


@cache
def compared(source: str, name: str, world_size: int) -> str:
    """What ``launch(..., verify=True)`` says, in a sentence; empty if nothing is wrong."""
    function_of(source, name)
    try:
        _run(_on_rank, (source, name), {}, world_size, 30.0, "gloo", verify=True)
    except MismatchError as error:
        return error.exception
    except HangError as error:
        return _stable(error.fault)
    except WorkerError as error:  # of several ranks that fail, the first is another each time
        return f"a rank {'failed' if error.traceback else 'died'}: {_stable(error.exception)}"
    return ""


@dataclass(frozen=True)
class Trace:
    """What a rank leaves: its last words, the collectives in its flight record, and its `Way` through the program."""

    said: str
    calls: tuple[str, ...]
    way: Mapping[str, Any]


def _in_short(error: BaseException) -> str:
    lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return _stable(lines[0].split("] ", 1)[-1]) if lines else type(error).__name__


def _stable(text: str) -> str:
    """Without addresses in memory and chosen ports, which are others in each run."""
    text = re.sub(r"\s+", " ", re.sub(r"group <[^>]*>", "group", text, flags=re.DOTALL))
    text = re.sub(r"<\S*\.(\w+) object at 0x\w+>", r"<\1>", text)
    text = re.sub(r"(\d+\.\d+\.\d+\.\d+\]):\d+", r"\1:(a port)", text)
    return text.partition(". This is typically")[0]


def _tell(base: str, rank: int, said: str, way: Way) -> None:
    """On a rank: leave what is known now in its file, at one stroke."""
    from course_utils.torch_internals import flight_record

    told = {"said": said, "record": flight_record().get("entries", []), "way": way.told()}
    new = Path(base, f"new.{rank}.{threading.get_ident()}")
    new.write_text(json.dumps(told))
    new.replace(Path(base, f"told.{rank}"))


def _with_record(base: str, source: str, name: str, detail: bool, wait: float) -> None:
    """On a rank: run with a time-out and a flight record, and say now and then what there is, for ranks that die."""
    os.environ |= {"TORCH_FR_BUFFER_SIZE": "200", "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if detail else "OFF"}
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=wait))
    rank, size = dist.get_rank(), dist.get_world_size()
    usual, way, said, over, lock = dist.new_group, Way(FILE, name), "", threading.Event(), threading.Lock()
    dist.new_group = lambda *args, **kwargs: usual(*args, **{"timeout": timedelta(seconds=wait)} | kwargs)
    program = function_of(source, name)

    def repeat() -> None:
        while not over.wait(_TELL):
            with lock:
                if not over.is_set():
                    _tell(base, rank, _DIED, way.now(main))

    main = threading.get_ident()
    _thread.start_new_thread(repeat, ())  # not one of threading's: a rank with such threads may go on, for the launcher
    sys.settrace(way.trace)
    try:
        program()
    except BaseException as error:  # noqa: BLE001  also what the program would end with, and an interrupt
        said = _in_short(error)
    finally:
        sys.settrace(None)
    with lock:
        over.set()
    dist.new_group = usual
    _tell(base, rank, said, way)
    Path(base, f"over.{rank}").touch()
    end = time.monotonic() + (_LINGER if wait == _WAIT else _PATIENCE)
    while len([*Path(base).glob("over.*")]) < size and time.monotonic() < end:
        time.sleep(0.02)


@cache
def traced(source: str, name: str, world_size: int, detail: bool = False, wait: float = _WAIT) -> tuple[Trace, ...]:
    """Run with a time-out; what each rank says, and what it has called."""
    function_of(source, name)
    with tempfile.TemporaryDirectory(prefix="clinic-") as base:
        with contextlib.suppress(WorkerError):  # what it left is read below
            args = base, source, name, detail, wait
            _run(_with_record, args, {}, world_size, 30.0, "gloo", init=False, watch=_watch() if wait > _WAIT else None)
        told = [_read(Path(base, f"told.{rank}")) for rank in range(world_size)]
    return tuple(Trace(one["said"], tuple(_calls(one["record"])), one["way"]) for one in told)


def stopped(source: str, name: str, world_size: int) -> tuple[Trace, ...]:
    """The same without the wait for a time-out: ranks that can never go on are stopped, and asked what they have."""
    return traced(source, name, world_size, wait=60.0)


def _met(base: str, source: str, name: str) -> None:
    """On a rank: run, and meet the others in a monitored barrier."""
    import torch.distributed as dist

    def meet(*args: Any, **kwargs: Any) -> None:
        Path(base, f"came.{dist.get_rank()}").touch()
        dist.monitored_barrier(aside, timedelta(seconds=_PATIENCE), wait_all_ranks=True)

    usual, dist.barrier = dist.barrier, meet
    aside = dist.new_group()  # else its messages could be taken for those of the program
    try:
        _on_rank(source, name)
        meet()
    finally:
        dist.barrier = usual


@cache
def absent(source: str, name: str, world_size: int) -> tuple[str, str]:
    """What a monitored barrier says in the place of each barrier, and at the end; who does not come."""
    function_of(source, name)
    for watch in (_watch(), None):
        with tempfile.TemporaryDirectory(prefix="clinic-") as base:
            try:
                _run(_met, (base, source, name), {}, world_size, 30.0, "gloo", watch=watch)
            except HangError:
                came = sorted(int(file.suffix[1:]) for file in Path(base).glob("came.*"))
                if 0 not in came:
                    text = f"rank 0, which collects the names, does not come; there are: {came}"
                    return text if came else "nobody comes to it", "0, so that nobody is named" if came else "nobody"
            except WorkerError as error:
                said = f"rank {error.rank}: {_stable(error.exception.splitlines()[0].rpartition('] ')[2])}"
                found = re.search(r"Ranks ([\d, ]+) failed to pass", said)
                return said, found[1] if found else "an error"
            else:
                return "all ranks come", "none"
    raise RuntimeError(f"rank 0 came to the monitored barrier of {name}, and it did not end")


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {"said": _DIED, "record": [], "way": Way("", "").told()}


def _calls(record: list[dict]) -> list[str]:
    names = [entry["profiling_name"].rpartition(":")[2] for entry in record]
    groups = [str(entry["process_group"][0]) for entry in record]
    return [name if group == "0" else f"{name} in group {group}" for name, group in zip(names, groups, strict=True)]
