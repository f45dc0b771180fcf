"""Run a function on every rank, and know what it did: the launcher, its processes, and the ledger of what ranks send.

`launcher` is the notebook's entry, `pool` runs one call on warm ranks, `worker` is the process of one rank. What other
parts of the course may use stands here; it is imported when it is asked for, because `launcher` starts a process.
"""

from __future__ import annotations

from ..lazy import attach

_HOMES = {
    "launcher": ("launch", "run", "device", "shutdown", "gpu_count", "on_a_rank", "settle", "emulation"),
    "errors": ("WorkerError", "HangError", "MismatchError", "Interrupted", "attempt", "expect_error"),
    "ledger": ("Ledger", "Entry"), "intercept": ("record", "interceptor"),
    "processes": ("share",), "watch": ("Watch",), "learner_code": ("is_learner",), "status_line": ("Status", "wanted"),
    "labels": ("tells_place",), "magics": ("RankMagics",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)

__getattr__, __dir__ = attach(__name__, _HOMES)
