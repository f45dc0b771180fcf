"""Figures of the course: one style, the same colour for the same rank everywhere.

Every function returns a figure that pyplot no longer tracks, so that a cell ending in it shows it once. Its title says
what is shown and whether it is measured, recorded (with the source beside it) or modelled.
"""

from ._charts import byte_axis, label_lines
from ._style import FAINT, INK, RANK_COLORS, new_figure, png, png_width, rank_color, readable, tint
from .attention import load_over_steps, mask_picture
from .collectives import bandwidth, before_after, step_picture, timeline
from .costs import (
    ALGORITHM_COLORS,
    algorithm_color,
    crossover,
    draw_crossover,
    model_against_emulation,
    predicted_against_recorded,
    scale_out,
    spoken,
)
from .loading import LOADING_COLORS, file_layout, loader_bars, page_accesses, time_shares
from .memory import (
    PART_COLORS,
    memory_bars,
    memory_over_length,
    memory_over_time,
    partition_picture,
)
from .mesh import DIMENSION_COLORS, dimension_color, mesh_grid, short_ranks
from .pipeline import PIPELINE_COLORS, activation_steps, bubble_curves, real_pipeline, schedule_picture
from .planner import TIME_COLORS, layout_bars, layout_name, predicted_against_published, search_picture
from .planner_errors import errors_by_family
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
from .sharding import mesh_picture, shard_timeline
from .tensor import cut_picture
from .topologies import topology_picture
from .training import bucket_picture, gpu_timelines, loss_curves, replicas, step_timelines

__all__ = [
    "ALGORITHM_COLORS", "DIMENSION_COLORS", "LOADING_COLORS", "PART_COLORS", "PIPELINE_COLORS", "RANK_COLORS",
    "TIME_COLORS", "activation_steps", "algorithm_color", "bandwidth", "before_after", "bubble_curves", "bucket_choice",
    "bucket_picture", "bucket_sweep", "checkpointing", "crossover", "cut_picture", "errors_by_family", "file_layout",
    "generations", "gpu_timelines",
    "gradient_range", "ladder", "latency_fit", "layout_bars", "layout_name", "load_over_steps",
    "loader_bars", "loss_curves", "mask_picture", "memory_bars", "memory_over_length", "memory_over_time", "mesh_grid",
    "mesh_picture", "model_against_emulation", "page_accesses", "partition_picture", "predicted_against_published",
    "predicted_against_recorded", "rank_color", "real_pipeline", "replicas", "roofline", "scale_out", "scaling_curves",
    "scaling_models", "schedule_picture", "search_picture", "shard_timeline", "speedup_laws", "step_picture",
    "step_spans", "step_split", "step_timelines", "time_shares", "timeline", "topology_picture",
    # What the widgets draw with.
    "FAINT", "INK", "byte_axis", "dimension_color", "draw_crossover", "label_lines", "new_figure", "png", "png_width",
    "readable", "short_ranks", "spoken", "tint",
]
