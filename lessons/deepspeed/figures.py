"""What this lesson draws."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from course_utils.draw.bars import bars
from course_utils.draw.style import FAINT, RANK_COLORS


def sent(rows: Mapping[str, float]) -> Figure:
    """Draw what a rank sends in a step, in Ψ(N−1)/N, one bar for each way; DDP is grey."""
    lanes = {name: {name: numbers} for name, numbers in rows.items()}
    colors = dict.fromkeys(rows, RANK_COLORS[0]) | {"DDP": FAINT}
    told = [f"{numbers:.1f}" for numbers in rows.values()]
    figure = bars(lanes, colors, "measured: numbers sent per step and rank", "Ψ(N−1)/N", key=False, behind=told)
    figure.axes[0].set_xticks(range(4))
    return figure
