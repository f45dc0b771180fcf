"""Make the course: notebooks from their sources, in one way only, and the minutes that it states."""

from __future__ import annotations

from .builder import FOLDERS, ROOT, build, check, execute, test_lesson
from .minutes import update as update_minutes
from .notebooks import code_cells

__all__ = ["FOLDERS", "ROOT", "build", "check", "code_cells", "execute", "test_lesson", "update_minutes"]
