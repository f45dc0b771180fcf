"""Where the texts of lessons stand: in a room a lesson, whose ``__init__`` begins with "Lesson" and a number."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tools import ToolError


def texts(root: Path) -> dict[str, Path]:
    """Texts of lessons and of exercises by name, such as ``02_collectives`` and ``02_collectives_exercises``."""
    found = {}
    for room in (root / "lessons").glob("*/__init__.py"):
        number = re.match(r'"""Lesson (\d\d)\b', room.read_text(encoding="utf-8"))
        for file, ending in (("lesson.py", ""), ("exercises.py", "_exercises")) if number else ():
            if (room.parent / file).exists():
                found[f"{number[1]}_{room.parent.name}{ending}"] = room.parent / file
    return dict(sorted(found.items()))


def lessons(root: Path) -> list[str]:
    """Names of the lessons, such as ``02_collectives``."""
    return [name for name in texts(root) if not name.endswith("_exercises")]


def lesson_of(number: str, root: Path) -> str:
    """The name of a lesson that is given by its number, or by its name."""
    names = lessons(root)
    found = [name for name in names if number in (name, name[:2])]
    if not found:
        raise ToolError(f"there is no lesson {number}; there are {', '.join(name[:2] for name in names)}")
    return found[0]


def read(path: Path) -> str:
    """A text, in which a line ``# {{name}}`` stands for that function or class of ``answers.py`` beside it.

    Raises
    ------
    LookupError
        There is none of that name.
    """
    text, answers = path.read_text(encoding="utf-8"), path.with_name("answers.py")
    found = {}
    if answers.exists():
        lines = answers.read_text(encoding="utf-8").splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                end = node.end_lineno or first
                end += "".join(lines[end : end + 1]).strip() == "### END SOLUTION"
                found[node.name] = "\n".join(lines[first - 1 : end])

    def solution(match: re.Match) -> str:
        if match[1] not in found:
            raise LookupError(f"{path.parent.name}/{path.name}: there is no {match[1]} in answers.py")
        return found[match[1]]

    return re.sub(r"^# \{\{(\w+)\}\}$", solution, text, flags=re.MULTILINE)
