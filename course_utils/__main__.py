"""Command line for those who run or write the course: ``python -m course_utils doctor|build|check|…``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .programs import ROOT


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m course_utils``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m course_utils", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="report on this machine and start two ranks")
    make = commands.add_parser("build", help="make notebooks from sources, executing what changed")
    make.add_argument("names", nargs="*", help="such as 02_collectives; default: all")
    make.add_argument("--force", action="store_true", help="execute even where the text is unchanged")
    make.add_argument("--core", action="store_true", help="write lessons without the sections marked deeper, "
                      "and without outputs, for workshops; nothing is executed")
    make.add_argument("--out", type=Path, metavar="FOLDER", help="where --core writes (core/ in the course's folder)")
    one = commands.add_parser("lesson", help="build one lesson and run what concerns it: its notebooks and its tests")
    one.add_argument("number", help="such as 04")
    commands.add_parser("check", help="fail when notebooks and sources differ")
    run = commands.add_parser("execute", help="run notebooks and report the first failing cell of each")
    run.add_argument("paths", nargs="*", type=Path, help="default: all lessons and solutions")
    linter = commands.add_parser("check-deepspeed", help="say what is wrong with a DeepSpeed configuration, and what "
                                 "it leaves to surprising defaults; fails on more than notes")
    linter.add_argument("config", type=Path, help="JSON file")
    linter.add_argument("--world-size", type=int, help="ranks that share the batch, to check its size")
    linter.add_argument("--auto", action="store_true", help='Transformers or Accelerate fill in each "auto"')
    clock = commands.add_parser("minutes", help="fail when the minutes that the course states are not the clock's")
    clock.add_argument("--write", action="store_true", help="put them right, in sources, README.md and docs")
    for command in (make, run):
        command.add_argument("--jobs", type=int, default=1, help="notebooks at a time")
    run.add_argument("--timeout", type=int, default=300, help="seconds for a cell (%(default)g)")
    given = parser.parse_args(arguments)
    if given.command == "build" and given.out and not given.core:
        parser.error("--out goes with --core: notebooks of the course have their places")

    failed: list[str] = []
    if given.command == "doctor":
        from .doctor import doctor

        return 0 if doctor() else 1
    if given.command == "lesson":
        from .authoring import test_lesson

        return test_lesson(given.number)
    elif given.command in ("build", "check", "execute"):
        failed = _notebooks(given)
    elif given.command == "check-deepspeed":
        return _check_deepspeed(given.config, given.world_size, given.auto)
    elif given.command == "minutes":
        failed = _minutes(given.write)
    print("\n".join(failed), file=sys.stderr, end="\n" if failed else "")
    return 1 if failed else 0


def _notebooks(given: argparse.Namespace) -> list[str]:
    """Build, compare or execute notebooks as the command line says; return what went wrong."""
    from .authoring import build, build_core, check, execute

    if given.command == "check":
        return check()
    if given.command == "execute":
        paths = given.paths or [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("solutions/*.ipynb")]
        return execute(sorted(paths), given.jobs, given.timeout)
    if given.core:
        return build_core(ROOT, given.names, given.out)
    return build(ROOT, given.names, given.force, given.jobs)


def _check_deepspeed(path: Path, world_size: int | None, filled: bool) -> int:
    """Print what there is to say about a DeepSpeed configuration; return 1 if that is more than notes."""
    from lessons.deepspeed.deepspeed_tools import check_file, read_file, report, what_runs

    try:
        found = check_file(path, world_size, filled)
    except (OSError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    print(report(found))
    refused = any(finding.level == "refused" for finding in found)
    print("refused; without these errors it runs" if refused else "it runs", what_runs(read_file(path)[0], world_size))
    return 1 if any(finding.level != "note" for finding in found) else 0


def _minutes(write: bool) -> list[str]:
    """Compare the course's minutes with its clock; return the files that differ, unless they have been put right."""
    from .authoring import update_minutes

    wrong = [str(path.relative_to(ROOT)) for path in update_minutes(write=write)]
    print("\n".join(f"wrote {path}" for path in wrong) if write else f"{len(wrong)} files differ from the clock")
    return [] if write else wrong


if __name__ == "__main__":
    sys.exit(main())
