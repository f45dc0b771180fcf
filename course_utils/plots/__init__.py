"""Figures of the course: one style, the same colour for the same rank everywhere.

Every function returns a figure that pyplot no longer tracks, so that a cell ending in it shows it once.
"""

from ._style import RANK_COLORS, rank_color
from .collectives import bandwidth, before_after, step_picture, timeline

__all__ = ["RANK_COLORS", "bandwidth", "before_after", "rank_color", "step_picture", "timeline"]
