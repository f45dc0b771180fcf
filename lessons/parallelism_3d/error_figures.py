"""How far off the planner is, by family of published runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from course_utils.draw import charts
from course_utils.draw.style import INK, SMALL, new_figure
from course_utils.hardware import GPUS

if TYPE_CHECKING:
    from .planner import Replayed

#: Families of published runs (`planner.published.FAMILIES`), as readers know them.
_FAMILIES = {
    "fsdp": "data parallel\nand FSDP", "3d": "tensor, pipeline,\ncontext", "long_context": "long context",
    "moe": "experts",
}
_GOAL = 0.15


def errors_by_family(
    rows: Sequence[Replayed], title: str, *, goals: Mapping[str, float] | None = None, furthest: float = 0.6
) -> Figure:
    """Draw the errors of published runs, a lane for each family, with their median size, bias, and what the best
    constant guess reaches; runs of the exam have lanes of their own, below. Fitted runs are hollow and not in medians;
    the grey band is a family's goal, or 15 %; errors beyond `furthest` are triangles there.
    """
    from .planner import score  # here, so that a figure of something else does not load the planner

    lanes: dict[str, list[Replayed]] = {}
    for exam in ("", "exam: "):
        for family, name in _FAMILIES.items():
            own = [row for row in rows if row.family == family and (row.run.role == "exam") == bool(exam)]
            lanes |= {exam + name: sorted(own, key=lambda row: row.error)} if own else {}
    used = {row.run.gpu for row in rows}
    colors = charts.in_turn(card.name for key, card in GPUS.items() if key in used)
    figure, (ax,) = new_figure(size=(9.8, 1.5 + 0.85 * len(lanes)), title=title)
    widest = 0.0
    for y, own in enumerate(lanes.values()):
        goal = (goals or {}).get(own[0].family, _GOAL)
        ax.barh(y, 200 * goal, left=-100 * goal, height=0.92, color="#EEEEEE", zorder=0)
        for row, shift in zip(own, _spread([row.error for row in own], 0.014 * furthest), strict=True):
            at, color = min(furthest, row.error), colors[GPUS[row.run.gpu].name]
            ax.plot([100 * at], [y + shift], ">" if row.error > furthest else "o", color=color, markersize=4.2,
                    markeredgewidth=0.8, markerfacecolor="white" if row.fitted else color)
            widest = max(widest, abs(at), goal)
        found = score(own)
        ax.plot([100 * found.bias] * 2, [y - 0.44, y + 0.44], color=INK, linewidth=2)
        many = f"{found.runs} run{'s' * (found.runs > 1)}: median {found.median:.1%}, bias {found.bias:+.1%}"
        told = f"{many}\nbest constant {found.guess:.1%}" if found.runs > 1 else many
        charts.beside(ax, told, (1, y), (4, 0), xycoords=("axes fraction", "data"), va="center", fontsize=SMALL)
    ax.axvline(0, color="#777777", linewidth=0.8, zorder=0.5)
    charts.name_rows(ax, lanes)
    hollow = "; hollow: fitted" if any(row.fitted for row in rows) else ""
    ax.set(xlim=(-108 * widest, 108 * widest), xlabel=f"predicted / published - 1 (%); line: bias, grey: goal{hollow}")
    charts.legend(ax, colors)
    return figure


def _spread(values: Sequence[float], width: float) -> list[float]:
    """Return how far up or down to draw each of the sorted values, so that dots less than `width` apart stand clear."""
    found: list[float] = []
    last = dict.fromkeys([0.0, *(sign * 0.075 * k for k in range(1, 6) for sign in (1, -1))], -np.inf)
    for value in values:
        free = next((step for step in last if value - last[step] >= width), min(last, key=last.get))
        last[free] = value
        found.append(free)
    return found
