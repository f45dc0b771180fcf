"""What this lesson draws."""

from __future__ import annotations

from course_utils.draw.lanes import step_spans

__all__ = [
    "step_spans",
]

