"""Grade exercise notebooks that were handed in: run their checks, fenced in, and report (see docs/teaching.md)."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..lazy import attach

if TYPE_CHECKING:
    from .report import Report

_HOMES = {  # imported when asked for: a hand-in's kernel lives in this package, and needs none of it
    "collect": ("NothingToGrade",), "report": ("Report", "table"), "sandbox": ("Sandbox", "SandboxMissing"),
}

__all__ = ["grade", *(name for names in _HOMES.values() for name in names)]

__getattr__, __dir__ = attach(__name__, _HOMES)

PATIENCE = 4.0  # by which checks wait longer when they are tried again


def grade(
    folder: Path,
    root: Path,
    jobs: int = 1,
    timeout: float = 120,
    limit: float = 600,
    roster: Path | None = None,
    sandbox: str | None = None,
    only: list[str] | None = None,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Run the checks of every exercise notebook below a folder.

    A hand-in is recognised by its content. It runs in a folder of its own, fenced in (see
    :class:`course_utils.grading.Sandbox`), with the checks of this course, whatever it brings along. A check
    that is refused for want of time is tried again when nothing else is running, with four times the time.

    Parameters
    ----------
    folder : Path
        Holds one folder a person, or notebooks named after persons.
    timeout, limit : float
        Seconds allowed for a cell, which is then interrupted, and for a notebook, which is then ended.
    roster : Path, optional
        CSV file with a column ``person``, or names in its first column.
    sandbox : {"bubblewrap", "user", "none"}, optional
        Default: the first that is possible here, but never ``none``.
    only : list of str, optional
        Names of the notebooks that were set; default: all.
    report : course_utils.grading.Report, optional
        Gets each row as it comes.

    Returns
    -------
    list of dict
        One a person and notebook: ``person``, ``notebook``, ``passed``, ``total``, ``points``, ``of``, ``failed`` and
        ``same_as_solution`` (names of checks), ``note``, ``file``, ``seconds``, and ``checks`` with each message.

    Raises
    ------
    NothingToGrade
        The folder holds no hand-ins.
    SandboxMissing
        There is no way to fence them in; the message says what to install.
    """
    from .assignments import assignments
    from .collect import collect, read_roster
    from .report import Report
    from .sandbox import Sandbox

    report = report or Report()
    hand_ins = collect(folder, assignments(root), read_roster(roster) if roster else None, only)
    place = Sandbox(sandbox) if any(each.gradable for each in hand_ins) else None
    try:
        asyncio.run(_all(hand_ins, place, jobs, timeout, limit, report))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    return report.rows


async def _all(hand_ins: list, sandbox: Any, jobs: int, timeout: float, limit: float, report: Report) -> None:
    from .report import row
    from .run import Result, grade_hand_in

    gate, done, again = asyncio.Semaphore(jobs), 0, []
    with suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)

    async def one(hand_in: Any) -> None:
        nonlocal done
        async with gate:
            result = Result.empty(hand_in)
            if hand_in.gradable:
                try:
                    result = await grade_hand_in(hand_in, sandbox, timeout, limit)
                except Exception as error:  # the others go on
                    result.fail(error)
            if result.slow():
                again.append(result)
            done += 1
            report.add(row(result), done, len(hand_ins))

    await asyncio.gather(*map(one, hand_ins))
    for result in again:
        try:
            result.take(await grade_hand_in(result.hand_in, sandbox, timeout, limit, result.slow(), PATIENCE))
        except Exception as error:
            result.fail(error)
        report.add(row(result), done, len(hand_ins))
