"""Make the notebooks from their texts, check that both agree, and run notebooks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools import ROOT, ToolError

from . import notebooks
from .core import core_edition, core_faults, is_deeper, moved_links
from .notebooks import NotebookFailed, leaks, normalise
from .pages import dress
from .rooms import lesson_of, lessons, read, texts

FOLDERS = {"notebooks": "", "exercises": "_exercises", "solutions": "_solutions"}  # and how their notebooks' names end
_SHOWN = re.compile(r"^show\(\"([\w./-]+)\"", re.MULTILINE)  # a cell that shows a program of scripts/


def targets(root: Path, names: Sequence[str] = ()) -> dict[Path, NotebookNode]:
    """Every notebook that the texts give, without outputs; or those of the lessons named."""
    sources, made = texts(root), {}
    exercises = [name for name in lessons(root) if f"{name}_exercises" in sources]
    for name in lessons(root):
        if names and name not in names:
            continue
        given = {"notebooks": notebooks.from_text(read(sources[name]))}
        if name in exercises:
            nb = notebooks.mark_exercises(notebooks.from_text(read(sources[f"{name}_exercises"])))
            given |= {"exercises": notebooks.strip(nb), "solutions": nb}
        for folder, nb in given.items():
            path = root / folder / f"{name}{FOLDERS[folder]}.ipynb"
            made[path] = notebooks.with_ids(dress(nb, folder, name, lessons(root), exercises))
    if not made:
        raise ToolError(f"no text in {root.name}/lessons" + (f" for {', '.join(names)}" if names else ""))
    return made


def _is_executed(path: Path) -> bool:
    return path.parent.name != "exercises"


def _together(work: Sequence[Coroutine], jobs: int) -> list[str]:
    """Run them, at most ``jobs`` at a time; return the messages of notebooks that failed."""

    async def one(gate: asyncio.Semaphore, item: Coroutine) -> str:
        async with gate:
            try:
                await item
            except NotebookFailed as error:
                return str(error)
            return ""

    async def everything() -> list[str]:
        gate = asyncio.Semaphore(jobs)
        return await asyncio.gather(*(one(gate, item) for item in work))

    return [message for message in asyncio.run(everything()) if message]


def _older_programs(path: Path, built: NotebookNode) -> str:
    """Say which programs of ``scripts/`` a built notebook shows as they are no more; empty if none."""
    older = []
    for cell in built.cells:
        shown = [str(data) for output in cell.get("outputs", []) for data in output.get("data", {}).values()]
        for name in _SHOWN.findall(cell.source) if shown else []:
            program = path.parents[1] / "scripts" / name
            if program.exists() and not any(program.read_text("utf-8") in text for text in shown):
                older.append(name)
    return f"shows an older scripts/{', scripts/'.join(older)}" if older else ""


def _state(path: Path, text: NotebookNode) -> str:
    """Say what is wrong with a built notebook; empty if it is up to date."""
    if not path.exists():
        return "missing"
    built = nbformat.read(path, as_version=4)
    if found := notebooks.differences(built, text) or (_is_executed(path) and notebooks.unfinished(built)):
        return found
    if nbformat.writes(normalise(built)) != path.read_text(encoding="utf-8").rstrip("\n"):
        return "not in normal form"
    return _older_programs(path, built) or "; ".join(leaks(built))


def check(root: Path = ROOT) -> list[str]:
    """List the notebooks that differ from their text, without running anything."""
    made = targets(root)
    wrong = {path: _state(path, nb) for path, nb in made.items()}
    numbered = {path for folder in FOLDERS for path in (root / folder).glob("[0-9][0-9]_*.ipynb")}
    wrong |= {path: "has no source" for path in numbered - made.keys()}
    return [f"{path.relative_to(root)}: {state}" for path, state in sorted(wrong.items()) if state]


def build(root: Path = ROOT, names: Sequence[str] = (), force: bool = False, jobs: int = 1) -> list[str]:
    """Make notebooks from texts; run those whose code changed, or all with ``force``. Returns what failed."""

    async def make(path: Path, nb: NotebookNode) -> None:
        start, runs = time.perf_counter(), _is_executed(path)
        path.parent.mkdir(exist_ok=True)
        if runs and not force and path.exists():
            before = nbformat.read(path, as_version=4)
            runs = bool(_older_programs(path, before)) or not notebooks.take_outputs(nb, before)
        nb = normalise(await notebooks.execute(nb, path) if runs else nb)
        if found := leaks(nb):
            raise NotebookFailed(f"{path.relative_to(root)}: belongs to this machine: {'; '.join(found)}")
        path.write_text(nbformat.writes(nb) + "\n", encoding="utf-8")
        took = f" ({time.perf_counter() - start:.0f} s)" if runs else ""
        print(f"built {path.relative_to(root)}{took}", flush=True)

    made = targets(root, names)
    stale = [make(path, nb) for path, nb in made.items() if force or _state(path, nb)]
    print(f"{len(made) - len(stale)} of {len(made)} notebooks are up to date")
    return _together(stale, jobs)


def build_core(root: Path = ROOT, names: Sequence[str] = (), folder: Path | None = None) -> list[str]:
    """Write the core edition of lessons, without outputs, to ``folder`` (``core/``). Returns what is wrong.

    A lesson without deeper sections is written whole, and a printed line says so. A lesson in which headings and tags
    disagree, or whose core needs a deeper cell, is not written.
    """
    source, folder = root / "notebooks", folder or root / "core"
    if folder.resolve() in {(root / name).resolve() for name in (*FOLDERS, "lessons")}:
        raise ToolError(f"{folder} holds the course itself; name another folder for the core edition")
    given = {path: nb for path, nb in targets(root, names).items() if path.parent == source}
    failed = []
    for path, nb in given.items():
        if wrong := core_faults(nb):
            failed += [f"{path.stem}: {fault}" for fault in wrong]
            continue
        left = sum(map(is_deeper, nb.cells))
        core = moved_links(nb, source, folder, {path.stem for path in given})
        whole = Path(os.path.relpath(path, folder.resolve())).as_posix()
        folder.mkdir(parents=True, exist_ok=True)
        text = nbformat.writes(core_edition(core, path.stem, whole)) + "\n"
        (folder / path.name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / path.name}: " + (f"{left} of {len(nb.cells)} cells left out" if left else
                                                 "the whole lesson, which has no section marked deeper"))
    return failed


def execute(paths: Sequence[Path], jobs: int = 1, timeout: int = 300) -> list[str]:
    """Run notebooks without changing them, ``timeout`` seconds a cell at most. Returns what failed."""

    async def one(path: Path) -> None:
        start = time.perf_counter()
        await notebooks.execute(nbformat.read(path, as_version=4), path, timeout)
        print(f"passed {path} ({time.perf_counter() - start:.0f} s)", flush=True)

    return _together([one(path) for path in paths], jobs)


def test_lesson(number: str, root: Path = ROOT) -> int:
    """Build a lesson and its exercises, compare their outputs, and run their tests and what the course promises of
    each lesson; returns the exit status.

    What has passed runs again only after a change in it, in the core or in the lesson's room.
    """
    name = lesson_of(number, root)
    if failed := build(root, [name]):
        print("\n".join(failed), file=sys.stderr)
        return 1
    room, store = name[3:], root / ".pytest_cache" / "lessons.json"
    files = [*root.glob(f"tests/lessons/test_{room}_*.py"), root / "tests/lessons/test_exercises.py",
             *(root / f"tests/promises/test_{kind}.py" for kind in ("conventions", "core", "notebooks", "predictions")),
             root / f"notebooks/{name}.ipynb", root / f"solutions/{name}_solutions.ipynb"]
    files = [file for file in sorted(files) if file.exists()]
    text = hashlib.sha256((root / f"notebooks/{name}.ipynb").read_bytes()).hexdigest()
    now = {f"{room}: {file.relative_to(root)}": _foundation(file, room, root) + text for file in files}
    passed = json.loads(store.read_text()) if store.exists() else {}
    to_run = [key.partition(": ")[2] for key, state in now.items() if passed.get(key) != state]
    for key in sorted({key.partition(": ")[2] for key in now} - {*to_run}):
        print(f"unchanged since it passed: {key}")
    if not to_run:
        return 0
    compare = ["--nbval", "--nbval-cell-timeout=300", "--nbval-sanitize-with", "tests/sanitise.cfg"]
    own = ["-k", f"not test_exercises and not promises or {room}"]  # of modules that are about all lessons
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", *compare, *own]
    status = subprocess.call([*command, *to_run], cwd=root)
    if status == 0:
        store.parent.mkdir(exist_ok=True)
        store.write_text(json.dumps(passed | now, indent=0))
    return status


def _foundation(file: Path, room: str, root: Path) -> str:
    """A hash of a file of tests or notebook, and of what it runs: the core, and modules of its room and of others."""
    rooms, unused = {room}, {"lesson.py", "exercises.py"} | ({"check.py"} if file.parent.name == "notebooks" else set())
    for path in (root / "lessons" / room).rglob("*.py"):
        rooms |= {*re.findall(r"from lessons\.(\w+)", path.read_text("utf-8"))}
    folders = [root / "course_utils", *(root / "lessons" / other for other in sorted(rooms))]
    modules = [path for folder in folders for path in sorted(folder.rglob("*.py")) if path.name not in unused]
    return hashlib.sha256(b"".join(path.read_bytes() for path in [file, *modules])).hexdigest()
