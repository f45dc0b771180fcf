"""Helpers of the course: start ranks from a notebook cell, watch what they send, check exercises."""

import importlib

_HOME = {
    "launch": "launcher", "device": "launcher", "shutdown": "launcher",
    "WorkerError": "errors", "HangError": "errors", "Interrupted": "errors", "expect_error": "errors",
    "record": "ledger", "Ledger": "ledger", "Entry": "ledger",
}  # fmt: skip

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def load_ipython_extension(shell) -> None:
    """Register ``%%ranks`` and ``%ranks_reset`` (called by ``%load_ext course_utils``)."""
    from . import magics

    shell.register_magics(magics.RankMagics)
