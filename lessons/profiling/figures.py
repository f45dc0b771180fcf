"""What this lesson draws."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from course_utils.draw.lanes import step_spans
from course_utils.traces import Trace, spans


def lanes(ranks: Sequence[Trace], step: int, title: str) -> Figure:
    """Draw when each rank computed and communicated in a step."""
    parts = [trace.of_steps([step]) for trace in ranks]
    zero = min(spans(part, "compute", "communication")[0][0] for part in parts)
    rows = {}
    for part in parts:
        for name in ("compute", "communication"):
            row = [(name, (a - zero) / 1e6, (b - zero) / 1e6) for a, b in spans(part, name)]
            rows[f"rank {part.rank}, {name}"] = row
    return step_spans(rows, title)
