"""The house keeps its rules: who may import what, and which parts start no process."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT

from tools.author.rooms import texts

#: Rooms in the order of their lessons.
ROOMS = list(dict.fromkeys(path.parent.name for path in texts(ROOT).values()))
FORMULAS = (
    "course_utils.costs", "course_utils.hardware", "course_utils.memory", "course_utils.recorded",
    "course_utils.topology", "course_utils.traces", "course_utils.transformer", "lessons.nccl.nccl_tuner",
    "lessons.parallelism_3d.planner", "lessons.pipeline_parallel.pipeline",
)


def imported(file: Path) -> Iterator[tuple[str, ...]]:
    """What a file imports of the course, as words: ("lessons", "zero", "check")."""
    package = list(file.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            words = [*base, *(node.module.split(".") if node.module else [])]
            yield from (tuple([*words, alias.name]) for alias in node.names)


def allowed(user: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """Whether the file at `user` may import `words`."""
    if words[0] == "tools":
        return user[0] == "tools"
    if words[0] != "lessons" or user[0] == "tools":
        return True
    if user[0] == "course_utils" or len(words) < 2 or words[1] not in ROOMS:
        return False
    return ROOMS.index(words[1]) <= ROOMS.index(user[1])


def test_who_imports_what():
    """`course_utils` imports no lesson, a lesson none that comes after it, and nobody `tools`."""
    files = [path for folder in ("course_utils", "lessons", "tools") for path in ROOT.glob(f"{folder}/**/*.py")]
    wrong = [
        f"{file.relative_to(ROOT)}: {'.'.join(words)}"
        for file in files
        for words in imported(file)
        if not allowed(file.relative_to(ROOT).parts, words)
    ]
    assert not wrong


def test_formulas_start_no_process_and_load_no_torch():
    """So each is there in well under a second: torch alone takes one to three."""
    code = (
        f"import sys, {', '.join(FORMULAS)}\n"
        "from multiprocessing import forkserver\n"
        "import psutil\n"
        "assert forkserver._forkserver._forkserver_pid is None and not psutil.Process().children(True)\n"
        "assert 'torch' not in sys.modules, 'loads torch'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
