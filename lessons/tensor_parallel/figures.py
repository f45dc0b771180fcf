"""How tensor parallelism cuts the matrices of a layer: which rank has which part."""

from __future__ import annotations

from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_utils.draw import charts
from course_utils.draw.bars import memory_bars as memory_bars
from course_utils.draw.lanes import step_split as step_split
from course_utils.draw.style import CENTRED, INK, new_figure, rank_color
from lessons.scaling_efficiency.figures import scaling_models as scaling_models

_GAP = 1.0  # between two matrices, in units of the input's width


def cut_picture(inputs: int, inner: int, outputs: int, ranks: int, title: str) -> Figure:
    """Draw a column-parallel layer and a row-parallel one behind it, every part in the colour of the rank that has it.

    Weights stand as in y = x upᵀ downᵀ: `up` cut by columns, `down` by rows, as evenly as can be; widths and heights
    are to scale, but for the number of tokens. What each rank has whole is grey.
    """
    figure, (ax,) = new_figure(size=(9.0, 3.6))
    unit, tokens = 1 / inputs, 0.8
    edges = [unit * sum(inner // ranks + (r < inner % ranks) for r in range(k)) for k in range(ranks + 1)]
    matrices = [
        ("x", (1, tokens), None), ("upᵀ", (inner * unit, 1), "columns"),
        ("GELU(x upᵀ)", (inner * unit, tokens), "columns"), ("downᵀ", (outputs * unit, inner * unit), "rows"),
        ("y", (outputs * unit, tokens), None),
    ]
    left, between = 0.0, ("f", "=", "", "g", "")
    for (name, (width, height), cut), sign in zip(matrices, between, strict=True):
        _draw(ax, left, width, height, cut, edges)
        ax.text(left + width / 2, -height / 2 - 0.12, name, ha="center", va="top", fontweight="bold")
        left += width + _GAP
        ax.text(left - _GAP / 2, 0, sign, fontsize=13, fontweight="bold", color=INK, **CENTRED)
    half = max(1.0, inner * unit) / 2 + 0.5
    ax.set(xlim=(-0.1, left - _GAP + 0.1), ylim=(-half, half), aspect="equal", title=title)
    ax.axis("off")
    return figure


def _draw(ax: Axes, left: float, width: float, height: float, cut: str | None, edges: list[float]) -> None:
    """Draw a matrix in the middle of the line, whole or in one piece for each rank."""
    bottom = -height / 2
    if cut is None:
        charts.cell(ax, left, bottom, width, height, INK, facecolor="#EEEEEE", linewidth=0.8)
        return
    for rank, (start, end) in enumerate(pairwise(edges)):
        if cut == "columns":
            (x, y), (wide, high) = (left + start, bottom), (end - start, height)
        else:
            (x, y), (wide, high) = (left, height / 2 - end), (width, end - start)
        charts.cell(ax, x, y, wide, high, rank_color(rank), linewidth=1.2)
        if min(wide, high) > 0.2:
            ax.text(x + wide / 2, y + high / 2, str(rank), **CENTRED)
