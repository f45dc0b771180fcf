"""How far off the planner is, by family of published runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from course_utils.draw import charts
from course_utils.draw.bars import legend, name_rows
from course_utils.draw.style import INK, SMALL, WIDTH, new_figure
from course_utils.hardware import GPUS

from .planner import Tried, score

#: Families of published runs (`planner.published.FAMILIES`), as readers know them.
_FAMILIES = {
    "fsdp": "data parallel\nand FSDP", "3d": "tensor, pipeline,\ncontext", "long_context": "long context",
    "moe": "experts",
}
_GOAL, _FURTHEST = 15, 60  # percent


def errors_by_family(rows: Sequence[Tried], title: str) -> Figure:
    """Draw the errors of published runs by family; fitted ones are hollow, and those beyond 60 % triangles."""
    lanes = {name: sorted((row for row in rows if row.family == family), key=lambda row: row.error)
             for family, name in _FAMILIES.items()}
    lanes = {name: own for name, own in lanes.items() if own}
    used = {row.run.gpu for row in rows}
    colors = charts.in_turn(card.name for key, card in GPUS.items() if key in used)
    figure, (ax,) = new_figure(size=(WIDTH, 1.5 + 0.85 * len(lanes)), title=title)
    for y, own in enumerate(lanes.values()):
        for row, shift in zip(own, _spread([100 * row.error for row in own]), strict=True):
            at, color = min(_FURTHEST, 100 * row.error), colors[GPUS[row.run.gpu].name]
            ax.plot([at], [y + shift], "o" if at < _FURTHEST else ">", color=color, markersize=4.2,
                    markeredgewidth=0.8, markerfacecolor="white" if row.fitted else color)
        found = score(own)
        ax.plot([100 * found.bias] * 2, [y - 0.44, y + 0.44], color=INK, linewidth=2)
        told = f"{found.runs} run{'s' * (found.runs > 1)}: median {found.median:.1%}, bias {found.bias:+.1%}"
        told += f"\nbest constant {found.guess:.1%}" * (found.runs > 1)
        charts.beside(ax, told, (1, y), (4, 0), xycoords=("axes fraction", "data"), va="center", fontsize=SMALL)
    ax.barh(range(len(lanes)), 2 * _GOAL, left=-_GOAL, height=0.92, color="#EEEEEE", zorder=0)
    ax.axvline(0, color="#777777", linewidth=0.8, zorder=0.5)
    name_rows(ax, lanes)
    widest = 1.08 * max(_GOAL, *(min(_FURTHEST, abs(100 * row.error)) for row in rows))
    hollow = "; hollow: fitted" if any(row.fitted for row in rows) else ""
    ax.set(xlim=(-widest, widest), xlabel=f"predicted / published - 1 (%); line: bias, grey: goal{hollow}")
    legend(ax, colors)
    return figure


def _spread(values: Sequence[float]) -> list[float]:
    """Return how far up or down to draw each of the sorted values, so that dots that are close stand clear."""
    found: list[float] = []
    last = dict.fromkeys([0.0, *(sign * 0.075 * k for k in range(1, 6) for sign in (1, -1))], -np.inf)
    for value in values:
        free = next((step for step in last if value - last[step] >= 0.014 * _FURTHEST), min(last, key=last.get))
        last[free] = value
        found.append(free)
    return found
