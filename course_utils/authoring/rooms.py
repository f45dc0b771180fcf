"""Where the texts of lessons stand: in a room a lesson, whose ``__init__`` begins with "Lesson" and a number."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["texts"]


def texts(root: Path) -> dict[str, Path]:
    """Texts of lessons and of exercises by name, such as ``02_collectives`` and ``02_collectives_exercises``."""
    found = {}
    for room in (root / "lessons").glob("*/__init__.py"):
        number = re.match(r'"""Lesson (\d\d)\b', room.read_text(encoding="utf-8"))
        for file, ending in (("lesson.py", ""), ("exercises.py", "_exercises")) if number else ():
            if (room.parent / file).exists():
                found[f"{number[1]}_{room.parent.name}{ending}"] = room.parent / file
    return dict(sorted(found.items()))
