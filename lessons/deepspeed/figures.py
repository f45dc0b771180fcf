"""What this lesson draws."""

from __future__ import annotations

from course_utils.draw.bars import loader_bars

__all__ = [
    "loader_bars",
]

