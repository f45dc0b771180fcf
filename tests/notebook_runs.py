"""Run a lesson as papermill does, its core first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import papermill

from course_utils.authoring.core import is_deeper


def run_core_then_deeper(lesson: Path, folder: Path, first: str = "", **parameters: Any) -> list[nbformat.NotebookNode]:
    """Run a lesson by papermill, its core before its deeper cells, and return its code cells with their outputs.

    So the core runs as the core edition has it, without anything that a deeper cell defines. `first` is code that is
    run before all others.
    """
    nb = nbformat.read(lesson, 4)
    nb.cells.sort(key=is_deeper)
    if first:
        nb.cells.insert(0, nbformat.v4.new_code_cell(first))
    nbformat.write(nb, folder / "core_first.ipynb")
    papermill.execute_notebook(
        folder / "core_first.ipynb", folder / lesson.name, parameters=parameters, cwd=lesson.parent,
        progress_bar=False, execution_timeout=300,
    )
    return [cell for cell in nbformat.read(folder / lesson.name, 4).cells if cell.cell_type == "code"]
