"""The process that imports torch once and forks another for each check; the runner speaks with it in lines."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from .report import FAILED, PASSED, SKIPPED, scrub
from .setting import Setting, Skip

_LINES, _WIDTH = 4, 300  # of an error's message that the report keeps


def serve() -> None:
    """For each line of standard input, log, environment and values, fork a check; write its PID, then its exit code."""
    import torch  # noqa: F401  for all checks; nothing here uses a GPU, so that those who are forked may

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            code = 1
            try:
                _begin(*json.loads(line))
                code = 0
            except BaseException:  # noqa: BLE001  the process must end here
                traceback.print_exc()
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _begin(log: str, environment: Mapping[str, str], values: Sequence[str]) -> None:
    """In a new process: an environment and a file for what is printed of its own; then the check."""
    with open(log, "wb") as output, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [part for part in environment["PYTHONPATH"].split(os.pathsep) if part not in sys.path]
    main(*values)


def main(target: str, on: str, ranks: str, folder: str, result: str) -> None:
    """Run the check and write status, reason, seconds and facts to the file `result`."""
    start, facts, reason = time.perf_counter(), {}, ""
    try:
        module, _, name = target.partition(":")
        facts = getattr(importlib.import_module(module), name)(Setting(on, int(ranks), Path(folder)))
        status = PASSED
    except Skip as skip:
        status, reason = SKIPPED, str(skip)
    except Exception as error:
        traceback.print_exc()
        status, reason, facts = FAILED, _first_lines(error), getattr(error, "facts", {})
    found = {"status": status, "reason": reason, "seconds": time.perf_counter() - start, "facts": facts}
    Path(result).write_text(json.dumps(scrub(found)), encoding="utf-8")


def _first_lines(error: BaseException) -> str:
    """The kind of error, the beginning of its message, and the line of this package that it came through last."""
    lines = [line.strip()[:_WIDTH] for line in str(error).splitlines() if line.strip()]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent.name == __package__[13:]]
    where = f" (in {Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' | '.join(lines[:_LINES]) or 'without a message'}{where}"


if __name__ == "__main__":
    serve()
