"""Grade exercise notebooks that were handed in: run their checks, fenced in, and report (see docs/teaching.md)."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools import ToolError

if TYPE_CHECKING:
    from .report import Report

ROOT = Path(__file__).resolve().parent.parent.parent
ABOUT = {
    "description": "Run the checks of exercise notebooks that were handed in. This runs learners' code. Each hand-in "
    "gets a temporary folder, the only place it can write to, and processes that it leaves are ended: by bubblewrap "
    "where that is installed, else, for root, as another user. Where neither is possible nothing is run, except with "
    "--no-sandbox. Checks and package are this course's own, whatever lies beside a hand-in.",
    "epilog": "docs/teaching.md says how to collect hand-ins and how to read the table.",
}


def grade(
    folder: Path,
    root: Path = ROOT,
    jobs: int = 1,
    timeout: float = 120,
    limit: float = 600,
    roster: Path | None = None,
    sandbox: str | None = None,
    only: list[str] | None = None,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Run the checks of every exercise notebook below a folder; return a row a person and notebook.

    ``timeout`` and ``limit`` are seconds for a cell, which is then interrupted, and for a notebook, which is then
    ended; ``sandbox`` is one of :data:`tools.grade.fence.KINDS`, by default the first that is possible, never ``none``.
    """
    from .fence import choose
    from .hand_ins import assignments, collect, read_roster
    from .report import Report
    from .run import grade_hand_in

    report = report or Report()
    hand_ins = collect(folder, assignments(root), read_roster(roster) if roster else None, only)
    kind = choose(sandbox) if any(each.gradable for each in hand_ins) else "none"

    async def all_of_them() -> None:
        gate = asyncio.Semaphore(jobs)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)

        async def one(hand_in: Any) -> None:
            async with gate:
                report.add(await grade_hand_in(hand_in, kind, timeout, limit), len(hand_ins))

        await asyncio.gather(*map(one, hand_ins))

    try:
        asyncio.run(all_of_them())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    return report.rows


def add(commands: argparse._SubParsersAction) -> None:
    """Add ``grade``."""
    command = commands.add_parser("grade", help="run the checks of exercise notebooks that were handed in", **ABOUT)
    command.set_defaults(run=_run)
    command.add_argument("folder", type=Path, help="holds one folder a person, or notebooks named after persons")
    command.add_argument("--roster", type=Path, help="CSV file with a column person; says who handed nothing in")
    command.add_argument("--only", nargs="+", metavar="NAME", help="notebooks that were set, such as 02_collectives")
    command.add_argument("--csv", type=Path, help="write the table here as well")
    command.add_argument("--json", type=Path, help="write everything here, with the message of each refused check")
    command.add_argument("--feedback", type=Path, metavar="DIR", help="write one Markdown file a person here")
    command.add_argument("--jobs", type=int, default=1, help="notebooks at a time")
    command.add_argument("--timeout", type=int, default=120, help="seconds for a cell (%(default)g)")
    command.add_argument("--limit", type=float, default=600, help="seconds for a notebook (%(default)g)")
    command.add_argument("--no-sandbox", action="store_true", help="run hand-ins with all your rights")


def _run(given: argparse.Namespace) -> None:
    from .report import Report, table

    report, sandbox = Report(given.csv, given.json, given.feedback), "none" if given.no_sandbox else None
    rows = grade(given.folder, ROOT, given.jobs, given.timeout, given.limit, given.roster, sandbox, given.only, report)
    print(table(rows), end="")
    if not any(row["notebook"] for row in rows):
        raise ToolError(f"no exercise notebook found below {given.folder}")
