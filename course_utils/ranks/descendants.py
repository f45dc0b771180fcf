"""Processes that ranks have started, in whatever session they are: none outlives its rank (private)."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterable

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, so that they can be found (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pids: Iterable[int]) -> list:
    """All processes below these, as ``psutil.Process``; one look at the process table."""
    import psutil

    children: dict[int, list] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
    found, below = [], list(pids)
    while below:
        some = children.pop(below.pop(), [])
        found += some
        below += [process.pid for process in some]
    return found


def children(pid: int) -> list:
    """The processes that one is the parent of, as ``psutil.Process``."""
    import psutil

    return [process for process in psutil.process_iter(["ppid"]) if process.info["ppid"] == pid]


def end(processes: Iterable) -> None:
    """Kill processes, some of which may have ended."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def end_descendants(*pids: int) -> None:
    """Kill all processes below these."""
    end(descendants(pids))
