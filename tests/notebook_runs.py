"""Run a lesson as papermill does, its core first."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat
import papermill

from course_utils.authoring.core import is_deeper
from course_utils.authoring.notebooks import local_sockets


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


def run_notebook(notebook: Path, out: Path, *, cwd: Path, **options: Any) -> None:
    """Run a notebook by papermill, whose errors it raises, with ``parameters``."""
    with tempfile.TemporaryDirectory() as sockets:
        papermill.execute_notebook(
            notebook, out, cwd=cwd, progress_bar=False, execution_timeout=300, start_timeout=180,
            config=local_sockets(sockets), **options,
        )
