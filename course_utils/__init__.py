"""Helpers of the course: start ranks from a notebook cell, watch what they send, check exercises."""

import importlib

__all__ = [
    "Entry", "HangError", "Interrupted", "Ledger", "WorkerError", "device", "expect_error", "launch", "record",
    "shutdown",
]


def __getattr__(name: str):
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.ranks"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def load_ipython_extension(shell) -> None:
    """Register ``%%ranks`` and ``%ranks_reset`` (called by ``%load_ext course_utils``)."""
    from .ranks import RankMagics

    shell.register_magics(RankMagics)
