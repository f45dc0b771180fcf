"""Command line for those who run or write the course: ``python -m course_utils doctor|build|check|…``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .programs import ROOT

GRADING = {
    "description": "Run the checks of exercise notebooks that were handed in. This runs learners' code. Each hand-in "
    "gets a temporary folder, the only place it can write to, and processes that it leaves are ended: by bubblewrap "
    "where that is installed, else, for root, as another user. Where neither is possible nothing is run, except with "
    "--no-sandbox. Checks and package are this course's own, whatever lies beside a hand-in.",
    "epilog": "docs/teaching.md says how to collect hand-ins and how to read the table.",
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m course_utils``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m course_utils", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="report on this machine and start two ranks")
    gpus = commands.add_parser("gpu-check", help="on a machine with GPUs: try all of the course that needs one")
    gpus.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for JSON and trace (%(default)s)")
    gpus.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these checks, such as copies roofline")
    gpus.add_argument("--on", choices=["gpu", "cpu"], default="gpu", help=argparse.SUPPRESS)  # cpu: tests of the kit
    opened = commands.add_parser("lab", help="open JupyterLab on the learner's copy; its own options can follow")
    copied = commands.add_parser("copy", help="bring the learner's copy up to date; what was changed stays")
    fresh = commands.add_parser("restore", help="give fresh lessons, moving changed ones to saved/ in the copy")
    fresh.add_argument("names", nargs="*", help="such as 02 or 02_collectives; default: all")
    for command, name in ((opened, "folder"), (copied, "folder"), (fresh, "--folder")):
        extra = {"nargs": "?"} if name == "folder" else {}
        command.add_argument(name, type=Path, default=ROOT / "work", help="the learner's copy (%(default)s)", **extra)
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
    marks = commands.add_parser("grade", help="run the checks of exercise notebooks that were handed in", **GRADING)
    marks.add_argument("folder", type=Path, help="holds one folder a person, or notebooks named after persons")
    marks.add_argument("--roster", type=Path, help="CSV file with a column person; says who handed nothing in")
    marks.add_argument("--only", nargs="+", metavar="NAME", help="notebooks that were set, such as 02_collectives")
    marks.add_argument("--csv", type=Path, help="write the table here as well")
    marks.add_argument("--json", type=Path, help="write everything here, with the message of each refused check")
    marks.add_argument("--feedback", type=Path, metavar="DIR", help="write one Markdown file a person for the learners")
    marks.add_argument("--limit", type=float, default=600, help="seconds for a notebook (%(default)g)")
    marks.add_argument("--no-sandbox", action="store_true", help="run hand-ins with all your rights")
    linter = commands.add_parser("check-deepspeed", help="say what is wrong with a DeepSpeed configuration, and what "
                                 "it leaves to surprising defaults; fails on more than notes")
    linter.add_argument("config", type=Path, help="JSON file")
    linter.add_argument("--world-size", type=int, help="ranks that share the batch, to check its size")
    linter.add_argument("--auto", action="store_true", help='Transformers or Accelerate fill in each "auto"')
    clock = commands.add_parser("minutes", help="fail when the minutes that the course states are not the clock's")
    clock.add_argument("--write", action="store_true", help="put them right, in sources, README.md and docs")
    for command in (make, run, marks):
        command.add_argument("--jobs", type=int, default=1, help="notebooks at a time")
    for command, seconds in ((run, 300), (marks, 120)):
        command.add_argument("--timeout", type=int, default=seconds, help="seconds for a cell (%(default)g)")
    given, further = parser.parse_known_args(arguments)
    if further and given.command != "lab":
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    if given.command == "build" and given.out and not given.core:
        parser.error("--out goes with --core: notebooks of the course have their places")

    failed: list[str] = []
    if given.command == "doctor":
        from .doctor import doctor

        return 0 if doctor() else 1
    if given.command == "gpu-check":
        from .gpu_check import command

        return command(given.out, given.on, given.only)
    if given.command in ("lab", "copy", "restore"):
        from .learner import run_command

        failed = run_command(given.command, given.folder, further or getattr(given, "names", []))
    elif given.command == "lesson":
        from .authoring import test_lesson

        return test_lesson(given.number)
    elif given.command in ("build", "check", "execute"):
        failed = _notebooks(given)
    elif given.command == "check-deepspeed":
        return _check_deepspeed(given.config, given.world_size, given.auto)
    elif given.command == "minutes":
        failed = _minutes(given.write)
    elif given.command == "grade":
        failed = _grade(given)
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


def _grade(given: argparse.Namespace) -> list[str]:
    """Run ``grade`` as the command line says; return what went wrong with it as a whole."""
    from .grading import NothingToGrade, Report, SandboxMissing, grade, table

    report, sandbox = Report(given.csv, given.json, given.feedback), "none" if given.no_sandbox else None
    try:
        rows = grade(
            given.folder, ROOT, given.jobs, given.timeout, given.limit, given.roster, sandbox, given.only, report
        )
    except (NothingToGrade, SandboxMissing, OSError) as error:
        return [str(error)]
    print(table(rows), end="")
    return [] if any(row["notebook"] for row in rows) else [f"no exercise notebook found below {given.folder}"]


if __name__ == "__main__":
    sys.exit(main())
