"""Evidence that a rank gives of itself: where it is, and what went wrong, as plain data (private)."""

from __future__ import annotations

import bdb
import linecache
import os
import sys
import threading
import time
import traceback

import torch
import torch.distributed

from ..torch_internals import C10D_FILE, group_names
from .intercept import interceptor
from .learner_code import PACKAGES, is_learner
from .ledger import Entry
from .settings import extra_threads
from .state import state

_PREPARES = ("init_process_group", "destroy_process_group", "set_device")  # what a rank calls before a function
_TORCH = os.path.dirname(torch.__file__) + os.sep
WORKER = os.path.join(os.path.dirname(__file__), "worker.py")


def _frame(filename: str, line: int, function: str) -> dict:
    try:
        text = linecache.getline(filename, line).strip()
    except Exception:  # the other thread is at the same cache
        text = ""
    return {"file": filename, "line": line, "function": function, "learner": is_learner(filename), "text": text}


def _parts(error: BaseException) -> list[BaseException]:
    """An exception, and what an exception group holds."""
    return [error, *(leaf for part in getattr(error, "exceptions", ()) for leaf in _parts(part))]


def describe(error: BaseException) -> dict:
    """An exception as plain data: its classes need not exist in the notebook."""
    frames = [_frame(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    while frames and frames[0]["file"].startswith(PACKAGES) and len(frames) > 1:
        frames.pop(0)
    text = "\n".join("".join(traceback.format_exception_only(part)).strip() for part in _parts(error))
    before, chain = error, []
    while before := before.__cause__ or (None if before.__suppress_context__ else before.__context__):
        chain.append("".join(traceback.format_exception_only(before)).strip())
    return {
        "text": text,
        "frames": frames,
        "cause": "\n  after ".join(chain),
        "connection": isinstance(error, RuntimeError) and _is_consequence(text),
        "time": time.monotonic(),
        **({"phase": "quit"} if isinstance(error, bdb.BdbQuit) else {}),  # the learner has ended the debugger
    }


def _is_consequence(message: str) -> bool:
    """Whether an error only says that another rank has gone."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed",
             "Failed to recv", "failed to recv", "Connection refused", "Application timeout caused pair closure",
             "Pair closure", "remote process exited", "aborted")
    return any(sign in message for sign in signs)


def entry_data(entry: Entry | None) -> dict | None:
    if entry is None:
        return None
    return {"op": entry.op, "group": _group_label(entry), "bytes": entry.bytes, "peer": entry.peer,
            "dtype": entry.dtype, "ranks": entry.ranks, "number": entry.number, "key": entry.key, "where": entry.where,
            "stream": entry.stream, "place": entry.place}


def _group_label(entry: Entry) -> str:
    """The group's name; which it is, if there are several without a name of the same ranks."""
    if not entry.group.startswith("ranks "):
        return entry.group
    names = group_names(entry.ranks)
    name = entry.key.partition("|")[0]
    return f"{entry.group}, group {1 + names.index(name)}" if len(names) > 1 and name in names else entry.group


def latest() -> dict[str, dict]:
    """The last collective of each group."""
    return {key: entry_data(entry) for key, entry in interceptor.latest.items()}


def _meeting(frames: list[dict]) -> str:
    """What a rank is doing that makes a process group over emulated hosts: where each of them waits then."""
    functions = {frame["function"] for frame in frames}
    if state.meeting_limit is None or "init_process_group" not in functions:
        return ""
    if "_create_c10d_store" in functions:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return f"waits for others at {place}" if os.environ.get("RANK") == "0" else f"connects to {place}"
    return "connects to other ranks"


def _in_thread(unfinished: list[Entry], frames: list[dict]) -> Entry | None:
    """An operation in which another thread waits, while the main thread waits for that thread."""
    if not frames or frames[0]["file"] != threading.__file__:
        return None
    tops = {thread: frame.f_code.co_filename for thread, frame in sys._current_frames().items()}
    return next((entry for entry in unfinished if tops.get(entry.thread, "").startswith(_TORCH)), None)


def standing(phase: str, running: bool) -> dict:
    """Where this rank is now: its phase, the operation it waits in, the last one it started, the learner's line.

    Beside it what tells whether the rank can go on: ``unfinished`` operations, messages begun by ``streams``, the
    number of operations begun (``begun``), other ``threads`` of the function, whether it surely waits and does not
    compute (``held``), whether it ``meets`` others to make a group (on emulated hosts also how, ``meeting``), what it
    ``calls`` of PyTorch as it starts, whether it is ``importing`` a module.
    """
    frame = sys._current_frames().get(threading.main_thread().ident)
    frames = []
    while frame is not None and frame.f_code.co_filename != WORKER:  # below are only the server's frames
        frames.append(_frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    line = next((f for f in frames if f["learner"]), None)
    unfinished = interceptor.unfinished()
    in_torch = bool(frames) and frames[0]["file"].startswith(_TORCH)
    on_wait = line is not None and (".wait(" in line["text"] or ".synchronize(" in line["text"])
    on_stream = torch.cuda.is_initialized()  # NCCL waits on the GPU, wherever Python is
    here = [entry for entry in unfinished if line is not None and entry.where == (line["file"], line["line"])]
    oldest = (unfinished if on_stream else here or unfinished)[:1]  # what this line has started, if anything
    inside = interceptor.inside
    waiting = inside or (oldest[0] if oldest and (in_torch or on_wait or on_stream) else _in_thread(unfinished, frames))
    return {
        "phase": "asks" if state.asks else phase, "line": line if phase == "running" else None,
        "waiting": entry_data(waiting) if running else None, "last": entry_data(interceptor.last),
        "latest": latest(), "made": interceptor.made(),
        "unfinished": [entry_data(e) for e in unfinished + [inside] * (inside is not None)],
        "streams": dict(interceptor.streams), "begun": sum(interceptor.numbers.values()),
        "threads": len(extra_threads()),
        "held": inside is not None or on_wait or bool(frames) and frames[0]["file"].startswith(C10D_FILE),
        "meets": any(f["function"] == "_new_process_group_helper" for f in frames),
        "meeting": _meeting(frames), "calls": next((f["function"] for f in frames if f["function"] in _PREPARES), ""),
        "importing": any(f["file"].startswith("<frozen importlib") for f in frames),
    }
