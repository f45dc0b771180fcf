"""Run a function on every rank, and know what it did: the launcher, its processes, and the ledger of what ranks send.

`launcher` is the notebook's entry, `pool` runs one call on warm ranks, `worker` is the process of one rank. What other
parts of the course may use stands here; it is imported when it is asked for, because `launcher` starts a process.
"""

from __future__ import annotations

import importlib

_HOME = {
    "launch": "launcher", "run": "launcher", "device": "launcher", "shutdown": "launcher", "gpu_count": "launcher",
    "on_a_rank": "launcher", "settle": "launcher",
    "WorkerError": "errors", "HangError": "errors", "Interrupted": "errors", "expect_error": "errors",
    "record": "ledger", "Ledger": "ledger", "Entry": "ledger", "interceptor": "ledger",
    "share": "processes", "Watch": "watch", "is_learner": "learner_code", "wanted": "status_line",
    "RankMagics": "magics",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
