"""What runs inside the fence: the cells of one hand-in and its checks, in IPython; what came of each goes to a file.

Started as ``python -m tools.grade.inside``, in a folder that holds ``steps.json``; see :mod:`.run`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell

STEPS, TOLD = "steps.json", "told.jsonl"
GRACE = 10.0  # seconds that an interrupted cell has to end


def main() -> None:
    """Run the steps in order; say of each that it begins, and what came of it."""
    steps = json.loads(Path(STEPS).read_text(encoding="utf-8"))
    nothing = os.open(os.devnull, os.O_RDWR)
    told = open(TOLD, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    shell = InteractiveShell.instance()
    sys.path.append(os.getcwd())  # modules beside the notebook, unless others have their names
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    print(json.dumps({"ready": True}), file=told)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    for step in steps:
        print(json.dumps({"begins": step["position"]}), file=told)
        print(json.dumps({"ended": step["position"], **run(shell, step["source"], step["seconds"])}), file=told)


def run(shell: InteractiveShell, source: str, seconds: float) -> dict[str, str]:
    """Run a cell, interrupted after some seconds; where it goes on all the same, this process ends."""
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        result = shell.run_cell(source, store_history=True)
        error = result.error_before_exec or result.error_in_exec
    except BaseException as outside:  # the interrupt came while IPython was at work
        error = outside
    late = signal.setitimer(signal.ITIMER_REAL, 0)[0] == 0
    faulthandler.cancel_dump_traceback_later()
    if error is None:
        return {}
    hint = getattr(error, "hint", "")
    message = str(error) if hint else "".join(traceback.format_exception(error, limit=-2)).strip()
    line = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    if late:
        line = f"interrupted after {seconds:g} s"
        message = f"{line}\n\n{message}"
    return {"error": line, "hint": hint, "message": message}


if __name__ == "__main__":
    main()
    os._exit(0)  # whatever threads and hooks the hand-in has left
