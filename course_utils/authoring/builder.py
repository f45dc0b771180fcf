"""Make the notebooks from their sources, check that both agree, and run notebooks."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["FOLDERS", "ROOT", "build", "check", "execute", "test_lesson"]

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("notebooks", "exercises", "solutions")


def _targets(root: Path, names: list[str]) -> dict[Path, tuple[Any, bool]]:
    """Every notebook that the sources give: path, notebook without outputs, whether it is executed."""
    from .notebooks import from_text, mark_exercises, strip, with_ids
    from .pages import dress

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

    from .notebooks import differences, leaks, normalise

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

    from .notebooks import NotebookFailed, leaks, limited, normalise, take_outputs
    from .notebooks import execute as run

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

    from .notebooks import execute as run
    from .notebooks import limited

    async def one(path: Path) -> None:
        start = time.perf_counter()
        await run(nbformat.read(path, as_version=4), path, timeout)
        print(f"passed {path} ({time.perf_counter() - start:.0f} s)", flush=True)

    return [message for message in asyncio.run(limited(jobs, [one(path) for path in paths])) if message]


def test_lesson(number: str, root: Path = ROOT) -> int:
    """Build a lesson and its exercises, compare their outputs, and run their tests; returns the exit status."""
    sources = sorted((root / "sources").glob(f"{number}_*.py")) if number else []
    if not sources:
        numbers = sorted({path.name[:2] for path in (root / "sources").glob("[0-9][0-9]_*.py")})
        raise SystemExit(f"which lesson? one of {', '.join(numbers)}, such as make lesson L=04")
    name = sources[0].stem.removesuffix("_exercises")
    if failed := build(root, [name]):
        print("\n".join(failed), file=sys.stderr)
        return 1
    topics = [re.search(r"course_utils\.checks import (\w+) as check", path.read_text("utf-8")) for path in sources]
    topic = next((found[1] for found in topics if found), name[3:])
    tests = f"tests/lessons/test_{topic}_lesson.py", f"tests/exercises/test_{topic}_exercises.py"
    files = [*tests, f"notebooks/{name}.ipynb", f"solutions/{name}_solutions.ipynb"]
    compare = ["--nbval", "--nbval-cell-timeout=300", "--nbval-sanitize-with", "tests/sanitise.cfg"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", *compare]
    return subprocess.call([*command, *(file for file in files if (root / file).exists())], cwd=root)
