"""Try on a machine with GPUs all of the course that needs one: ``gpu-check`` runs the tests of ``tests/gpu``.

They need PyTorch and pytest; what needs more is skipped, and no network is used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools import ROOT

#: Files of ``tests/gpu`` in the order in which they run: what says most of a machine first.
ORDER = ("machine", "collectives", "launcher", "losses", "speed", "scripts", "profiling", "c_programs", "lessons")


def add(commands: argparse._SubParsersAction) -> None:
    """Add ``gpu-check``."""
    parser = commands.add_parser("gpu-check", help="on a machine with GPUs: try all of the course that needs one")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for JSON and trace (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these checks, such as copies roofline")
    parser.add_argument("--on", choices=["gpu", "cpu"], default="gpu", help=argparse.SUPPRESS)  # cpu: to try the checks
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Run the checks; the status is 0, 1 if one failed, 2 without a GPU or for a name that no check has."""
    import torch

    if given.on == "gpu" and not torch.cuda.is_available():
        print("PyTorch sees no GPU here, and gpu-check is for machines with one: nothing was run.", file=sys.stderr)
        return 2
    folder = ROOT / "tests" / "gpu"
    files = [str(folder / f"test_{name}.py") for name in ORDER]
    only = ["--only", *given.only] if given.only else []
    command = [sys.executable, "-m", "pytest", *files, "-vs", "-rs", "--no-header", f"--confcutdir={folder}",
               f"--out={given.out}", f"--on={given.on}", "-p", "no:cacheprovider", *only]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    status = subprocess.call(command, env=os.environ | {"PYTHONPATH": path})
    if given.on == "cpu":
        print("This was a try on the CPU with small sizes: no number in it says anything of a GPU.")
    return status if status < 2 else 2
