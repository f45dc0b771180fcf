"""A sentence below the error of a cell that needed a process group in the notebook, where there is none (private)."""

from __future__ import annotations

import re
import traceback

from .learner_code import is_learner

_SIGN = "Default process group has not been initialized"


def install(shell) -> None:
    """Look at each cell that has ended in this IPython shell."""
    if _after_cell not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _after_cell)


def _after_cell(result) -> None:
    error = getattr(result, "error_in_exec", None)
    if isinstance(error, ValueError) and _SIGN in str(error):
        frames = traceback.extract_tb(error.__traceback__)
        called = [frame.name for frame in frames if is_learner(frame.filename) and not frame.name.startswith("<")]
        print(advice(called[0] if called else "", getattr(result.info, "raw_cell", "") or ""))


def advice(function: str, cell: str) -> str:
    """What to write instead; ``function`` is the one that the cell called, empty if it used the group itself."""
    if not function:
        return "Only ranks have a process group: put this into a function to launch, or begin the cell with %%ranks."
    if re.search(rf"\blaunch\(\s*{re.escape(function)}\s*\(", cell):
        return f"Only ranks have a process group: write launch({function}), without brackets behind {function}."
    return f"Only ranks have a process group: write launch({function}) to run {function} on them."
