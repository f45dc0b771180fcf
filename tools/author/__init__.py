"""Make the course: new lessons, notebooks from their texts, in one way only, the minutes that it states, its site."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools import ROOT, ToolError


def add(commands: argparse._SubParsersAction) -> None:
    """Add ``new``, ``build``, ``lesson``, ``check``, ``execute``, ``minutes`` and ``site``."""
    room = commands.add_parser("new", help="make the room of a new lesson, which builds and passes as it is")
    room.add_argument("number", help="such as 17")
    room.add_argument("topic", help="such as symmetric_memory")
    room.set_defaults(run=_new)
    make = commands.add_parser("build", help="make notebooks from their texts, executing what changed")
    make.add_argument("names", nargs="*", help="such as 02_collectives; default: all")
    make.add_argument("--force", action="store_true", help="execute even where the text is unchanged")
    make.add_argument("--core", action="store_true", help="write lessons without the sections marked deeper, "
                      "and without outputs, for workshops; nothing is executed")
    make.add_argument("--out", type=Path, metavar="FOLDER", help="where --core writes (core/ in the course's folder)")
    make.set_defaults(run=_build)
    lesson = commands.add_parser("lesson", help="build a lesson, compare its outputs, and run its tests")
    lesson.add_argument("number", help="such as 04")
    lesson.set_defaults(run=_lesson)
    commands.add_parser("check", help="fail when notebooks and their texts differ").set_defaults(run=_check)
    execute = commands.add_parser("execute", help="run notebooks and report the first failing cell of each")
    execute.add_argument("paths", nargs="*", type=Path, help="default: all lessons and solutions")
    execute.add_argument("--timeout", type=int, default=300, help="seconds for a cell (%(default)g)")
    execute.set_defaults(run=_execute)
    for command in (make, execute):
        command.add_argument("--jobs", type=int, default=1, help="notebooks at a time")
    clock = commands.add_parser("minutes", help="fail when the minutes that the course states are not the clock's")
    clock.add_argument("--write", action="store_true", help="put them right, in lessons, README.md and docs")
    clock.set_defaults(run=_minutes)
    site = commands.add_parser("site", help="build the course's site and its ePub")
    site.add_argument("--out", type=Path, default=ROOT / "build" / "site", metavar="FOLDER", help="%(default)s")
    site.add_argument("--no-epub", action="store_true", help="pages only")
    site.set_defaults(run=_site)


# What makes notebooks is imported here: it needs packages that learners and machines with GPUs may not have.


def _new(given: argparse.Namespace) -> None:
    from .new import new

    print(f"made {new(given.number, given.topic, ROOT)}; now: make lesson L={given.number}, its row in the tables of "
          "README.md and lessons/start_here/lesson.py, the *Next* of the lesson before, and CHANGELOG.md;\n"
          "then `python -m tools minutes --write`, and last `python -m tools build`, which links it from the others")


def _build(given: argparse.Namespace) -> int:
    from . import builder, hosted
    from .site import settings

    if given.core:
        return _told(builder.build_core(ROOT, given.names, given.out))
    if given.out:
        raise ToolError("--out goes with --core: notebooks of the course have their places")
    hosted.update_readme(ROOT / "README.md", settings(ROOT)["repository"], write=True)
    return _told(builder.build(ROOT, given.names, given.force, given.jobs))


def _lesson(given: argparse.Namespace) -> int:
    from . import builder

    return builder.test_lesson(given.number)


def _check(given: argparse.Namespace) -> int:
    from . import builder, hosted
    from .site import settings

    return _told([*builder.check(), *hosted.update_readme(ROOT / "README.md", settings(ROOT)["repository"])])


def _execute(given: argparse.Namespace) -> int:
    from . import builder

    paths = given.paths or [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("solutions/*.ipynb")]
    return _told(builder.execute(sorted(paths), given.jobs, given.timeout))


def _minutes(given: argparse.Namespace) -> int:
    from .minutes import update

    wrong = [str(path.relative_to(ROOT)) for path in update(write=given.write)]
    if given.write:
        print(*(f"wrote {path}" for path in wrong), sep="\n", end="\n" if wrong else "")
        return 0
    print(f"{len(wrong)} files differ from the clock")
    return _told(wrong)


def _site(given: argparse.Namespace) -> int:
    from . import site

    status = site.build(ROOT, given.out.resolve(), not given.no_epub)
    print(f"{'built' if not status else 'warnings in'} {given.out / 'html' / 'index.html'}")
    return status


def _told(failed: list[str]) -> int:
    """Print what failed, and return the exit status."""
    for message in failed:
        print(message, file=sys.stderr)
    return 1 if failed else 0
