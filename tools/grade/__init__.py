"""Grade exercise notebooks that were handed in: run their checks, fenced in, and report (see docs/teaching.md)."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from tools import ROOT, ToolError

ABOUT = {
    "description": "Run the checks of exercise notebooks that were handed in. This runs learners' code. Each hand-in "
    "gets a temporary folder, the only place it can write to, and processes that it leaves are ended: by bubblewrap "
    "where that is installed, else, for root, as another user. Where neither is possible nothing is run, except with "
    "--no-sandbox. Checks and package are this course's own, whatever lies beside a hand-in.",
    "epilog": "docs/teaching.md says how to collect hand-ins and how to read the table.",
}


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
    command.add_argument("--no-sandbox", action="store_const", const="none", dest="sandbox",
                         help="run hand-ins with all your rights")
    command.add_argument("--course", type=Path, default=ROOT, help=argparse.SUPPRESS)  # in tests a small one


def _run(given: argparse.Namespace) -> None:
    """Grade every hand-in below a folder; results are on disk before the next one ends."""
    from .fence import choose
    from .hand_ins import assignments, collect, read_roster
    from .report import row, table, write_all
    from .run import grade_hand_in

    roster = read_roster(given.roster) if given.roster else None
    hand_ins = collect(given.folder, assignments(given.course), roster, given.only)
    kind = choose(given.sandbox) if any(each.gradable for each in hand_ins) else "none"
    rows: list[dict[str, Any]] = []

    async def all_of_them() -> None:
        gate = asyncio.Semaphore(given.jobs)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)

        async def one(hand_in: Any) -> None:
            async with gate:
                if hand_in.gradable:
                    await grade_hand_in(hand_in, kind, given.timeout, given.limit)
            rows.append(new := row(hand_in))
            write_all(rows, given.csv, given.json, given.feedback)
            what = f"{new['person']}  {new['notebook']}  {new['passed']} of {new['total']}  {new['note'][:100]}"
            print(f"{len(rows)} of {len(hand_ins)}  {what}", file=sys.stderr, flush=True)

        await asyncio.gather(*map(one, hand_ins))

    try:
        asyncio.run(all_of_them())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    print(table(rows), end="")
    if not any(each["notebook"] for each in rows):
        raise ToolError(f"no exercise notebook found below {given.folder}")
