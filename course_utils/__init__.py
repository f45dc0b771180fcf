"""Helpers of the course: start ranks from a notebook cell, watch what they send, check exercises."""

from .lazy import attach

__all__ = [
    "Entry", "HangError", "Interrupted", "Ledger", "MismatchError", "WorkerError", "attempt", "device", "expect_error",
    "launch", "record", "shutdown",
]

__getattr__, __dir__ = attach(__name__, {"ranks": __all__})


def load_ipython_extension(shell) -> None:
    """Register ``%%ranks`` and ``%ranks_reset`` (called by ``%load_ext course_utils``)."""
    from .ranks import RankMagics

    shell.register_magics(RankMagics)
