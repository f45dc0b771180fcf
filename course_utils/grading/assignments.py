"""What was set: an exercise notebook with its checks, their points, and what its solution looks like."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from . import likeness

__all__ = ["Assignment", "Check", "assignments", "normal"]

_CARD = re.compile(r"^\|\s*difficulty\s*\|.*\n\|[-:| ]+\|\n\|\s*(\d)\b", re.MULTILINE)
_IMPORTS = re.compile(r"^from course_utils\.checks\b.*$", re.MULTILINE)


@dataclass
class Check:
    """A check cell.

    Attributes
    ----------
    id : str
        nbgrader's ``grade_id``, such as ``check_ring_shift``.
    points : int
        The difficulty that its card states, from 1 to 5.
    solution : dict
        Names of what the solution defines for it, each with its digests (see :mod:`.likeness`).
    """

    id: str
    source: str
    points: int
    solution: dict[str, set[str]] = field(default_factory=dict)

    def is_solution(self, digests: dict[str, str]) -> bool:
        """Whether all that a hand-in defines for this check is as in the solution."""
        return bool(self.solution) and all(digests.get(name) in known for name, known in self.solution.items())


@dataclass
class Assignment:
    """An exercise notebook as it was handed out.

    Attributes
    ----------
    name : str
        Of its file, such as ``02_collectives``.
    imports : str
        The lines by which it gets its checks.
    sources : set of str
        Of its code cells, in the form of `normal`.
    lesson : str
        The title of the lesson that it belongs to.
    """

    name: str
    imports: str
    checks: dict[str, Check]
    sources: set[str]
    lesson: str

    @property
    def points(self) -> int:
        """The sum over its checks."""
        return sum(check.points for check in self.checks.values())


def normal(source: str) -> str:
    """The code of a cell without comments and layout; code that Python cannot read without the blanks around it."""
    try:
        return ast.dump(ast.parse(source))
    except (SyntaxError, ValueError):
        return source.strip()


def assignments(root: Path) -> dict[str, Assignment]:
    """All exercise notebooks of a course by name."""
    paths = sorted((root / "exercises").glob("*_exercises.ipynb"))
    return {path.stem.removesuffix("_exercises"): _read(path, root) for path in paths}


def _read(path: Path, root: Path) -> Assignment:
    cells = nbformat.read(path, as_version=4).cells
    name = path.stem.removesuffix("_exercises")
    solutions = _answers(root / "solutions" / f"{name}_solutions.ipynb")
    checks: dict[str, Check] = {}
    points, solution = 1, {}
    for cell in cells:
        if cell.cell_type == "markdown":
            card = _CARD.search(cell.source)
            points = int(card[1]) if card else points
            continue
        marks = cell.metadata.get("nbgrader", {})
        if marks.get("solution"):
            solution |= likeness.of_source(solutions.get(marks["grade_id"], cell.source), cell.source)
        elif marks.get("grade"):
            checks[marks["grade_id"]] = Check(marks["grade_id"], cell.source, points, solution)
            solution = {}
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    imports = "\n".join(line for source in code for line in _IMPORTS.findall(source))
    lesson = _title(root / "notebooks" / f"{name}.ipynb")
    return Assignment(name, imports, checks, set(map(normal, code)), lesson)


def _answers(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    marked: list[tuple[Any, str]] = [
        (cell.metadata.get("nbgrader", {}), cell.source) for cell in nbformat.read(path, as_version=4).cells
    ]
    return {marks["grade_id"]: source for marks, source in marked if marks.get("solution")}


def _title(path: Path) -> str:
    if not path.exists():
        return ""
    return next((cell.source.partition("\n")[0] for cell in nbformat.read(path, as_version=4).cells), "")
