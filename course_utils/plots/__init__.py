"""Figures of the course: one style, the same colour for the same rank everywhere.

Every function returns a figure that pyplot no longer tracks, so that a cell ending in it shows it once.
"""

from ._style import RANK_COLORS, rank_color
from .collectives import bandwidth, before_after, step_picture, timeline
from .costs import (
    ALGORITHM_COLORS,
    algorithm_color,
    crossover,
    model_against_emulation,
    predicted_against_recorded,
    scale_out,
)
from .roofline import generations, ladder, latency_fit, roofline
from .topologies import topology_picture

__all__ = [
    "ALGORITHM_COLORS", "RANK_COLORS", "algorithm_color", "bandwidth", "before_after", "crossover", "generations",
    "ladder", "latency_fit", "model_against_emulation", "predicted_against_recorded", "rank_color", "roofline",
    "scale_out", "step_picture", "timeline", "topology_picture",
]  # fmt: skip
