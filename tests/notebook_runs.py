"""Run a lesson in a learner's copy, as papermill does, its core first."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import papermill

from tools import learner
from tools.author.core import is_deeper
from tools.author.notebooks import local_sockets


def run_core(
    lesson: Path, folder: Path, *, deeper: bool = True, first: str = "", **parameters: Any
) -> list[nbformat.NotebookNode]:
    """Run a lesson's core by papermill, and then its deeper cells or not; return its code cells with their outputs.

    So the core runs as the core edition has it, without anything that a deeper cell defines. `first` is code that is
    run before all others.
    """
    nb = nbformat.read(lesson, 4)
    nb.cells = sorted((cell for cell in nb.cells if deeper or not is_deeper(cell)), key=is_deeper)
    if first:
        nb.cells.insert(0, nbformat.v4.new_code_cell(first))
    nbformat.write(nb, folder / "core_first.ipynb")
    run_notebook(folder / "core_first.ipynb", folder / lesson.name, cwd=lesson.parent, parameters=parameters)
    return [cell for cell in nbformat.read(folder / lesson.name, 4).cells if cell.cell_type == "code"]


@functools.cache
def learners_copy() -> Path:
    """A learner's copy of the course, outside of it, as `make lab` makes one: in its folders notebooks run."""
    folder = Path(tempfile.mkdtemp(prefix="course-copy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    learner.copy(folder / "work")
    return folder / "work"


def run_notebook(notebook: Path, out: Path, *, cwd: Path, **options: Any) -> None:
    """Run a notebook by papermill, whose errors it raises, with ``parameters``, in the copy's folder of that name."""
    cwd = learners_copy() / cwd.name
    with tempfile.TemporaryDirectory() as sockets:
        papermill.execute_notebook(
            notebook, out, cwd=cwd, progress_bar=False, execution_timeout=300, start_timeout=180,
            config=local_sockets(sockets), **options,
        )
