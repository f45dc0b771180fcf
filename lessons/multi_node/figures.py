"""What this lesson draws."""

from __future__ import annotations

from course_utils.draw.panels import loss_curves

__all__ = [
    "loss_curves",
]

