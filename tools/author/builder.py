"""Make the notebooks from their sources, check that both agree, and run notebooks."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools import ToolError

__all__ = ["FOLDERS", "ROOT", "build", "build_core", "check", "execute", "test_lesson"]

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("notebooks", "exercises", "solutions")
_SHOWN = re.compile(r"^show\(\"([\w./-]+)\"", re.MULTILINE)  # a cell that shows a program of scripts/


def _targets(root: Path, names: list[str]) -> dict[Path, tuple[Any, bool]]:
    """Every notebook that the sources give: path, notebook without outputs, whether it is executed."""
    from .notebooks import from_text, mark_exercises, strip, with_ids
    from .pages import dress
    from .rooms import read, texts

    sources = texts(root)
    exercises = [name.removesuffix("_exercises") for name in sources if name.endswith("_exercises")]
    lessons = [name for name in sources if not name.endswith("_exercises")]
    targets: dict[Path, tuple[Any, bool]] = {}

    def add(folder: str, name: str, suffix: str, nb: Any) -> None:
        nb = with_ids(dress(nb, folder, name, lessons, exercises))
        targets[root / folder / f"{name}{suffix}.ipynb"] = (nb, folder != "exercises")

    for stem, source in sources.items():
        name = stem.removesuffix("_exercises")
        if names and name not in names:
            continue
        nb = from_text(read(source))
        if stem == name:
            add("notebooks", name, "", nb)
        else:
            nb = mark_exercises(nb)
            add("exercises", name, "_exercises", strip(nb))
            add("solutions", name, "_solutions", nb)
    if not targets:
        raise ToolError(f"no text in {root.name}/lessons" + (f" for {', '.join(names)}" if names else ""))
    return targets


def _older_programs(path: Path, built: Any) -> str:
    """Say which programs of ``scripts/`` a built notebook shows as they are no more; empty if none."""
    older = []
    for cell in built.cells:
        shown = [str(data) for output in cell.get("outputs", []) for data in output.get("data", {}).values()]
        for name in _SHOWN.findall(cell.source) if shown else []:
            program = path.parents[1] / "scripts" / name
            if program.exists() and not any(program.read_text("utf-8") in text for text in shown):
                older.append(name)
    return f"shows an older scripts/{', scripts/'.join(older)}" if older else ""


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
    if older := _older_programs(path, built):
        return older
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
            before = nbformat.read(path, as_version=4)
            executed = bool(_older_programs(path, before)) or not take_outputs(nb, before)
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


def build_core(root: Path = ROOT, names: list[str] | None = None, folder: Path | None = None) -> list[str]:
    """Write the core edition of lessons, without outputs, to ``folder`` (``core/``). Returns what is wrong.

    A lesson without deeper sections is written whole, and a printed line says so. A lesson in which headings and tags
    disagree, or whose core needs a deeper cell, is not written.
    """
    import nbformat

    from .core import core_edition, core_faults, is_deeper, moved_links

    folder = folder or root / "core"
    if folder.resolve() in {(root / name).resolve() for name in (*FOLDERS, "lessons")}:
        raise ToolError(f"{folder} holds the course itself; name another folder for the core edition")
    lessons = {path.stem: nb for path, (nb, _) in _targets(root, names or []).items() if path.parent.name == FOLDERS[0]}
    failed = []
    for name, nb in lessons.items():
        if wrong := core_faults(nb):
            failed += [f"{name}: {fault}" for fault in wrong]
            continue
        left = sum(map(is_deeper, nb.cells))
        core = moved_links(nb, root / FOLDERS[0], folder, set(lessons))
        whole = Path(os.path.relpath(root / FOLDERS[0] / f"{name}.ipynb", folder.resolve())).as_posix()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.ipynb"
        path.write_text(nbformat.writes(core_edition(core, name, whole)) + "\n", encoding="utf-8")
        print(f"wrote {path}: " + (f"{left} of {len(nb.cells)} cells left out" if left else
                                   "the whole lesson, which has no section marked deeper"))
    return failed


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
    from .rooms import texts

    name = next((name for name in texts(root) if number and name.startswith(f"{number}_")), None)
    if not name:
        numbers = sorted({name[:2] for name in texts(root)})
        raise ToolError(f"which lesson? one of {', '.join(numbers)}, such as make lesson L=04")
    if failed := build(root, [name]):
        print("\n".join(failed), file=sys.stderr)
        return 1
    tests = [path for folder in ("lessons", "exercises") for path in root.glob(f"tests/{folder}/test_{name[3:]}_*.py")]
    files = [*map(str, sorted(tests)), f"notebooks/{name}.ipynb", f"solutions/{name}_solutions.ipynb"]
    compare = ["--nbval", "--nbval-cell-timeout=300", "--nbval-sanitize-with", "tests/sanitise.cfg"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", *compare]
    return subprocess.call([*command, *(file for file in files if (root / file).exists())], cwd=root)
