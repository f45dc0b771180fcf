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
from .scaling import (
    bucket_choice,
    bucket_sweep,
    checkpointing,
    gradient_range,
    scaling_curves,
    scaling_models,
    speedup_laws,
    step_spans,
    step_split,
)
from .topologies import topology_picture
from .training import bucket_picture, loss_curves, replicas, step_timelines

__all__ = [
    "ALGORITHM_COLORS", "RANK_COLORS", "algorithm_color", "bandwidth", "before_after", "bucket_choice",
    "bucket_picture", "bucket_sweep", "checkpointing", "crossover", "generations", "gradient_range", "ladder",
    "latency_fit", "loss_curves", "model_against_emulation", "predicted_against_recorded", "rank_color", "replicas",
    "roofline", "scale_out", "scaling_curves", "scaling_models", "speedup_laws", "step_picture", "step_spans",
    "step_split", "step_timelines", "timeline", "topology_picture",
]  # fmt: skip
