"""Say what is wrong with a DeepSpeed configuration, and what will run: ``check-deepspeed`` of lesson 08."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add(commands: argparse._SubParsersAction) -> None:
    """Add ``check-deepspeed``."""
    parser = commands.add_parser("check-deepspeed", help="say what is wrong with a DeepSpeed configuration, and what "
                                 "it leaves to surprising defaults; fails on more than notes")
    parser.add_argument("config", type=Path, help="JSON file")
    parser.add_argument("--world-size", type=int, help="ranks that share the batch, to check its size")
    parser.add_argument("--auto", action="store_true", help='Transformers or Accelerate fill in each "auto"')
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print what there is to say; the status is 0, 1 if that is more than notes, 2 for a file that cannot be read."""
    from lessons.deepspeed.deepspeed_tools import check_file, read_file, report, what_runs

    try:
        found = check_file(given.config, given.world_size, given.auto)
    except (OSError, ValueError) as error:
        print(f"{given.config}: {error}", file=sys.stderr)
        return 2
    print(report(found))
    refused = any(finding.level == "refused" for finding in found)
    outcome = "refused; without these errors it runs" if refused else "it runs"
    print(outcome, what_runs(read_file(given.config)[0], given.world_size))
    return 1 if any(finding.level != "note" for finding in found) else 0
