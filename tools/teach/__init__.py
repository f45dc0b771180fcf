"""An instructor's day: a dashboard of the class, slides and handouts, the answer key, what a room needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools import ROOT


def add(commands: argparse._SubParsersAction) -> None:
    """Add ``dashboard``, ``slides`` and ``key``."""
    board = commands.add_parser("dashboard", help="show the checks and predictions of learners who have joined")
    board.add_argument("--host", default="", help="the address of this machine in the room's network")
    board.add_argument("--port", type=int, default=8700, help="(%(default)s)")
    board.add_argument("--people", type=int, default=100, help="no more can join (%(default)s)")
    board.add_argument("--keep", type=Path, metavar="FILE", help="keep what was told here, and go on from it")
    board.add_argument("--only", nargs="+", default=[""], metavar="LESSON", help="such as 02 04; starts sooner")
    board.set_defaults(run=_dashboard)
    deck = commands.add_parser("slides", help="make slides of a lesson, one HTML file that needs no network")
    deck.add_argument("--pdf", action="store_true", help="and a handout, by Chromium's printer")
    key = commands.add_parser("key", help="make the answer key of a lesson: solutions, usual mistakes, hints")
    key.add_argument("--seen", type=Path, nargs="*", default=[], metavar="FILE",
                     help="JSON of `grade --json` or `dashboard --keep`, from which mistakes are counted")
    for command, run in ((deck, _slides), (key, _key)):
        command.add_argument("lessons", nargs="+", help="such as 04")
        command.add_argument("--out", type=Path, default=ROOT / "build" / "teach", metavar="FOLDER",
                             help="(build/teach)")
        command.add_argument("--core", action="store_true", help="without the sections marked deeper")
        command.set_defaults(run=run)


def _dashboard(given: argparse.Namespace) -> None:
    from .dashboard import serve

    serve(given.host, given.port, given.people, given.keep, tuple(given.only))


def _slides(given: argparse.Namespace) -> None:
    from .slides import write

    for lesson in given.lessons:
        print(*write(ROOT, lesson, given.out, given.core, given.pdf), sep="\n")


def _key(given: argparse.Namespace) -> None:
    from .key import write

    for lesson in given.lessons:
        print(write(ROOT, lesson, given.out, given.seen))
