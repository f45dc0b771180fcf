"""Command line of the course's tools: ``python -m tools lab|grade|doctor|…``."""

from __future__ import annotations

import argparse
import importlib
import sys

from tools import ToolError

# Each of these modules has a function ``add(commands)``, which adds its commands and sets ``run`` for each of them: a
# function that takes the parsed arguments and returns the exit status; None and False are 0.
MODULES = ("tools.learner", "tools.grade", "tools.gpu", "tools.author", "tools.teach", "tools.deepspeed")


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m tools``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in MODULES:
        importlib.import_module(name).add(commands)
    given, given.further = parser.parse_known_args(arguments)
    if given.further and not hasattr(given, "passes_on"):
        parser.error(f"unrecognized arguments: {' '.join(given.further)}")
    try:
        return int(given.run(given) or 0)
    except ToolError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}" if error.filename else error, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
