"""Command line for those who run or write the course: ``python -m course_utils.workshop doctor|build|check|…``."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["build", "check", "chromium", "doctor", "execute", "grade", "machine", "main"]

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("notebooks", "exercises", "solutions")
GRADING = {
    "description": "Run the checks of exercise notebooks that were handed in. This runs learners' code. Each hand-in "
    "gets a temporary folder, the only place it can write to, and processes that it leaves are ended: by bubblewrap "
    "where that is installed, else, for root, as another user. Where neither is possible nothing is run, except with "
    "--no-sandbox. Checks and package are this course's own, whatever lies beside a hand-in.",
    "epilog": "docs/teaching.md says how to collect hand-ins and how to read the table.",
}


def _smi(*arguments: str) -> str:
    """Output of nvidia-smi, empty where there is none."""
    smi = shutil.which("nvidia-smi") or "/usr/lib/wsl/lib/nvidia-smi"
    if not os.path.exists(smi):
        return ""
    return subprocess.run([smi, *arguments], capture_output=True, text=True, timeout=60, check=False).stdout


def _links(topology: str, gpus: int) -> dict[str, str]:
    """Read the GPU part of ``nvidia-smi topo -m``: ``{"0-1": "NV18", …}``."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    kinds = {row[0]: row[1 : gpus + 1] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and len(row) > gpus}
    return {f"{a}-{b}": kinds[f"GPU{a}"][b] for a in range(gpus) for b in range(a + 1, gpus) if f"GPU{a}" in kinds}


def machine() -> dict[str, Any]:
    """Describe this machine, and what of the course is real on it; never initialises CUDA.

    Returns
    -------
    dict
        ``python``, ``torch`` and ``system``: versions; ``cores``: those this process may use; ``memory``: bytes;
        ``gpus``: list of ``{"name", "memory"}`` (bytes); ``links``: kind of link by pair of GPUs, in nvidia-smi's
        terms (``NV18`` is 18 NVLinks, ``PIX``, ``PHB`` and ``SYS`` are ever longer ways over PCIe);
        ``world_size`` and ``backend``: what ``launch`` takes by default; ``real`` and ``emulated``: lists of sentences.
    """
    import psutil
    import torch

    from .launcher import gpu_count, settle

    count = gpu_count()
    listing = _smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits") if count else ""
    rows = [line.rsplit(",", 1) for line in listing.splitlines()[:count]]
    gpus = [{"name": name.strip(), "memory": int(mebibytes) * 2**20} for name, mebibytes in rows]
    gpus += [{"name": "GPU", "memory": 0}] * (count - len(gpus))
    world_size, _ = settle(None, "gloo")
    backend = "nccl" if count >= world_size else "gloo"
    real = [f"{world_size} ranks: separate processes in a real process group ({backend})"]
    emulated = ["several hosts: played by processes on this one"]
    if backend == "nccl":
        real += ["the links between GPUs: measured, and used by every collective"]
    else:
        real += ["the bytes that ranks exchange, and results equal to one process"]
        emulated = ["GPU links (NVLink, PCIe, InfiniBand): modelled, or quoted from a source", *emulated]
    if count:
        real += ["GPU kernels and GPU memory: measured" + (" on one GPU at a time" if backend == "gloo" else "")]
    else:
        emulated = ["GPU speed and GPU memory: modelled, or quoted from a source", *emulated]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "gpus": gpus,
        "links": _links(_smi("topo", "-m"), count) if count > 1 else {},
        "world_size": world_size,
        "backend": backend,
        "real": real,
        "emulated": emulated,
    }


def chromium() -> str | None:
    """Path of a Chromium or Chrome for the browser tests."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    places = [*map(shutil.which, names), "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"]
    return next((place for place in places if place and os.path.exists(place)), None)


def doctor() -> bool:
    """Print a report on this machine, after a real launch of two ranks; return whether the course can run."""
    other = os.environ.get("PYTHONPATH")
    advice = f"PYTHONPATH is set, so packages in {other} come before the course's: unset PYTHONPATH, then try again"
    try:
        found = machine()
    except Exception as error:  # whatever a package does that was damaged, or made for another Python
        print(f"imports   failed: {type(error).__name__}: {error}")
        print(f"\n{advice if other else 'make clean lab installs the packages again'}")
        return False
    gpus = [f"{gpu['name']} ({gpu['memory'] / 1e9:.0f} GB)" for gpu in found["gpus"]]
    report = {
        "Python": f"{found['python']} on {found['system']}",
        "torch": found["torch"],
        "cores": found["cores"],
        "memory": f"{found['memory'] / 1e9:.0f} GB",
        "GPUs": ", ".join(gpus) or "none (none is needed)",
        "links": ", ".join(f"{pair} {kind}" for pair, kind in found["links"].items()) or "no GPU pairs",
        "ranks": f"{found['world_size']} by default, over {found['backend']}",
        "Chromium": "yes" if chromium() else "no (only tests need it)",
    }
    report |= {"warning": advice} if other else {}
    print("\n".join(f"{name:9} {value}" for name, value in report.items()))
    start = time.perf_counter()
    try:
        sums = _sum_of_two_ranks()
    except Exception as error:
        print(f"launch    failed\n\n{error}" + (f"\n\n{advice}" if other else ""))
        return False
    print(f"launch    2 ranks, one all_reduce: {sums} in {time.perf_counter() - start:.1f} s")
    print("\n".join(["", "real here:", *found["real"], "", "emulated here:", *found["emulated"]]))
    return sums == [3.0, 3.0]


def _sum_of_two_ranks() -> list[float]:
    from . import launch, shutdown

    def add() -> float:
        import torch
        import torch.distributed as dist

        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        return total.item()

    try:
        return launch(add, world_size=2, backend="gloo", timeout=120)
    finally:
        shutdown()


def _targets(root: Path, names: list[str]) -> dict[Path, tuple[Any, bool]]:
    """Every notebook that the sources give: path, notebook without outputs, whether it is executed."""
    from ._notebooks import from_text, mark_exercises, strip, with_ids
    from ._pages import dress

    sources = sorted((root / "sources").glob("[0-9][0-9]_*.py"))
    exercises = [path.stem.removesuffix("_exercises") for path in sources if path.stem.endswith("_exercises")]
    lessons = [path.stem for path in sources if not path.stem.endswith("_exercises")]
    targets: dict[Path, tuple[Any, bool]] = {}

    def add(folder: str, name: str, suffix: str, nb: Any) -> None:
        nb = with_ids(dress(nb, folder, name, lessons, exercises))
        targets[root / folder / f"{name}{suffix}.ipynb"] = (nb, folder != "exercises")

    for source in sources:
        name = source.stem.removesuffix("_exercises")
        if names and name not in names:
            continue
        nb = from_text(source.read_text(encoding="utf-8"))
        if source.stem == name:
            add("notebooks", name, "", nb)
        else:
            nb = mark_exercises(nb)
            add("exercises", name, "_exercises", strip(nb))
            add("solutions", name, "_solutions", nb)
    if not targets:
        raise SystemExit(f"no source in {root.name}/sources" + (f" for {', '.join(names)}" if names else ""))
    return targets


def _state(path: Path, text: Any, executed: bool) -> str:
    """Say what is wrong with a built notebook; empty if it is up to date."""
    import nbformat

    from ._notebooks import differences, leaks, normalise

    if not path.exists():
        return "missing"
    built = nbformat.read(path, as_version=4)
    if found := differences(built, text):
        return found
    code = [cell for cell in built.cells if cell.cell_type == "code" and cell.source.strip()]
    if executed and not all(cell.execution_count for cell in code):
        return "not executed from top to bottom"
    if any(output.output_type == "error" for cell in code for output in cell.outputs):
        return "a cell ends in an error"
    if nbformat.writes(normalise(built)) != path.read_text(encoding="utf-8").rstrip("\n"):
        return "not in normal form"
    return "; ".join(leaks(built))


def check(root: Path = ROOT) -> list[str]:
    """List the notebooks that differ from their text, without running anything."""
    targets = _targets(root, [])
    wrong = {path: _state(path, nb, executed) for path, (nb, executed) in targets.items()}
    numbered = {path for folder in FOLDERS for path in (root / folder).glob("[0-9][0-9]_*.ipynb")}
    wrong |= {path: "has no source" for path in numbered - targets.keys()}
    return [f"{path.relative_to(root)}: {state}" for path, state in sorted(wrong.items()) if state]


def build(root: Path = ROOT, names: list[str] | None = None, force: bool = False, jobs: int = 1) -> list[str]:
    """Make notebooks from sources; run those whose code changed, or all with ``force``. Returns what failed."""
    import nbformat

    from ._notebooks import NotebookFailed, leaks, limited, normalise, take_outputs
    from ._notebooks import execute as run

    async def make(path: Path, nb: Any, executed: bool) -> None:
        start = time.perf_counter()
        path.parent.mkdir(exist_ok=True)
        if executed and not force and path.exists():
            executed = not take_outputs(nb, nbformat.read(path, as_version=4))
        nb = normalise(await run(nb, path) if executed else nb)
        if found := leaks(nb):
            raise NotebookFailed(f"{path.relative_to(root)}: belongs to this machine: {'; '.join(found)}")
        path.write_text(nbformat.writes(nb) + "\n", encoding="utf-8")
        took = f" ({time.perf_counter() - start:.0f} s)" if executed else ""
        print(f"built {path.relative_to(root)}{took}", flush=True)

    targets = _targets(root, names or [])
    stale = [make(path, *what) for path, what in targets.items() if force or _state(path, *what)]
    print(f"{len(targets) - len(stale)} of {len(targets)} notebooks are up to date")
    return [message for message in asyncio.run(limited(jobs, stale)) if message]


def execute(paths: list[Path], jobs: int = 1, timeout: int = 300) -> list[str]:
    """Run notebooks without changing them, ``timeout`` seconds a cell at most. Returns what failed."""
    import nbformat

    from ._notebooks import execute as run
    from ._notebooks import limited

    async def one(path: Path) -> None:
        start = time.perf_counter()
        await run(nbformat.read(path, as_version=4), path, timeout)
        print(f"passed {path} ({time.perf_counter() - start:.0f} s)", flush=True)

    return [message for message in asyncio.run(limited(jobs, [one(path) for path in paths])) if message]


def grade(
    folder: Path,
    jobs: int = 1,
    timeout: float = 120,
    limit: float = 600,
    root: Path = ROOT,
    roster: Path | None = None,
    sandbox: str | None = None,
    only: list[str] | None = None,
    report: Any = None,
) -> list[dict[str, Any]]:
    """Run the checks of every exercise notebook below a folder.

    A hand-in is recognised by its content. It runs in a folder of its own, fenced in (see
    :class:`course_utils.grading.sandbox.Sandbox`), with the checks of this course, whatever it brings along. A check
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
    report : course_utils.grading.report.Report, optional
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
    from .grading import grade as run

    return run(folder, root, jobs, timeout, limit, roster, sandbox, only, report)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m course_utils.workshop``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m course_utils.workshop", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="report on this machine and start two ranks")
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
    clock = commands.add_parser("minutes", help="fail when the minutes that the course states are not the clock's")
    clock.add_argument("--write", action="store_true", help="put them right, in sources, README.md and docs")
    for command in (make, run, marks):
        command.add_argument("--jobs", type=int, default=1, help="notebooks at a time")
    for command, seconds in ((run, 300), (marks, 120)):
        command.add_argument("--timeout", type=int, default=seconds, help="seconds for a cell (%(default)g)")
    given, further = parser.parse_known_args(arguments)
    if further and given.command != "lab":
        parser.error(f"unrecognized arguments: {' '.join(further)}")

    failed: list[str] = []
    if given.command == "doctor":
        return 0 if doctor() else 1
    if given.command in ("lab", "copy", "restore"):
        from .learner import run_command

        failed = run_command(given.command, given.folder, further or getattr(given, "names", []))
    elif given.command == "build":
        failed = build(ROOT, given.names, given.force, given.jobs)
    elif given.command == "check":
        failed = check()
    elif given.command == "execute":
        paths = given.paths or [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("solutions/*.ipynb")]
        failed = execute(sorted(paths), given.jobs, given.timeout)
    elif given.command == "minutes":
        failed = _minutes(given.write)
    elif given.command == "grade":
        failed = _grade(given)
    print("\n".join(failed), file=sys.stderr, end="\n" if failed else "")
    return 1 if failed else 0


def _minutes(write: bool) -> list[str]:
    """Compare the course's minutes with its clock; return the files that differ, unless they have been put right."""
    from .minutes import update

    wrong = [str(path.relative_to(ROOT)) for path in update(write=write)]
    print("\n".join(f"wrote {path}" for path in wrong) if write else f"{len(wrong)} files differ from the clock")
    return [] if write else wrong


def _grade(given: argparse.Namespace) -> list[str]:
    """Run ``grade`` as the command line says; return what went wrong with it as a whole."""
    from .grading.collect import NothingToGrade
    from .grading.report import Report, table
    from .grading.sandbox import SandboxMissing

    report, sandbox = Report(given.csv, given.json, given.feedback), "none" if given.no_sandbox else None
    try:
        rows = grade(
            given.folder, given.jobs, given.timeout, given.limit, ROOT, given.roster, sandbox, given.only, report
        )
    except (NothingToGrade, SandboxMissing, OSError) as error:
        return [str(error)]
    print(table(rows), end="")
    return [] if any(row["notebook"] for row in rows) else [f"no exercise notebook found below {given.folder}"]


if __name__ == "__main__":
    sys.exit(main())
