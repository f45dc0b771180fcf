"""Traces of the profiler: read them, and split a rank's time into compute, communication and idle."""

from __future__ import annotations

from .analysis import (
    aligned,
    breakdown,
    ending_together,
    kind,
    last_to_arrive,
    length,
    matched,
    merge,
    numbered,
    spans,
)
from .loading import RECORDED, Event, Trace, load
from .viewer import View, merged_trace, view

__all__ = [
    "RECORDED", "Event", "Trace", "View", "aligned", "breakdown", "ending_together", "kind", "last_to_arrive", "length",
    "load", "matched", "merge", "merged_trace", "numbered", "spans", "view",
]
