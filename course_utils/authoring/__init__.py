"""Make the course: notebooks from their sources, in one way only, and the minutes that it states."""

from __future__ import annotations

from .builder import FOLDERS, ROOT, build, build_core, check, execute, test_lesson
from .minutes import update as update_minutes
from .notebooks import STUB, code_cells
from .rooms import texts

__all__ = [
    "FOLDERS", "ROOT", "STUB", "build", "build_core", "check", "code_cells", "execute", "test_lesson", "texts",
    "update_minutes",
]
