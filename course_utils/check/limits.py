"""A limit for answers that run in the notebook's own process, which does not depend on how busy the machine is."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["COMPUTING", "LIMIT", "Endless", "limited"]

COMPUTING = 20.0  # seconds of processor time; right answers need less than one, and a few with their first imports
LIMIT = 180.0  # seconds by the clock, for what computes nothing and does not come back


class Endless(BaseException):
    """Strikes a thread that has run too long; not an Exception, which a learner's code may catch."""


def limited(fn: Callable[[], Any], computing: float | None = None, limit: float | None = None) -> Any:
    """The result of ``fn()``, which runs in a thread of its own.

    Parameters
    ----------
    computing, limit : float
        Seconds of processor time of that thread, and seconds by the clock; default `COMPUTING` and `LIMIT`.

    Raises
    ------
    Endless
        It did not end within the limits.
    BaseException
        What ``fn`` raised.
    """
    computing, limit = computing or COMPUTING, limit or LIMIT
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = fn()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline, period = time.monotonic() + limit, 0.05
    try:
        while thread.is_alive() and time.monotonic() < deadline and _used(thread) < computing:
            thread.join(period)
            period = min(2 * period, 1.0)
    finally:
        if thread.is_alive():  # ends at its next line of Python
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Endless))
    if "error" in outcome:
        raise outcome["error"]
    if "result" not in outcome:
        raise Endless
    return outcome["result"]


def _used(thread: threading.Thread) -> float:
    """Processor time of a thread, in seconds; 0 where the system does not tell."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except (AttributeError, OSError):
        return 0.0
