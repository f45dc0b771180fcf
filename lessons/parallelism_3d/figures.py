"""Layouts in pictures: where a step's time goes, and all layouts of a search."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_utils.draw import charts
from course_utils.draw.bars import bars
from course_utils.draw.bars import memory_bars as memory_bars
from course_utils.draw.style import HALO, INK, MARKERS, RANK_COLORS, SMALL, new_figure
from course_utils.units import decimal_bytes

from .error_figures import errors_by_family as errors_by_family
from .mesh_pictures import DIMENSION_COLORS
from .mesh_pictures import mesh_grid as mesh_grid
from .planner import Layout, Plan

#: One colour for each part of a step's time, in the order of `planner.PARTS`, the same in every figure.
TIME_COLORS = {
    "compute": RANK_COLORS[0], "tensor": DIMENSION_COLORS["tp"], "context": DIMENSION_COLORS["cp"],
    "expert": RANK_COLORS[5], "pipeline": DIMENSION_COLORS["pp"], "data": DIMENSION_COLORS["dp"], "bubble": "#BBBBBB",
}


def layout_name(layout: Layout) -> str:
    """Return a layout in short, such as ``TP 8, PP 4, DP 8, v 2``; CP, v and b (micro-batch) of 1 are left out."""
    more = {"CP": layout.cp, "v": layout.virtual, "b": layout.microbatch}
    told = {"TP": layout.tp, "PP": layout.pp, "DP": layout.dp} | {name: n for name, n in more.items() if n > 1}
    return ", ".join(f"{name} {n}" for name, n in told.items())


def layout_bars(plans: Mapping[str, Plan], title: str) -> Figure:
    """Draw what a step's seconds go to, one stacked bar for each plan, with its TFLOP/s at the end."""
    rows = {name: plan.parts() for name, plan in plans.items()}
    used = {part: color for part, color in TIME_COLORS.items() if any(row[part] for row in rows.values())}
    told = [f"{sum(row.values()):.3g} s, {plan.tflops:.0f} TFLOP/s"
            for row, plan in zip(rows.values(), plans.values(), strict=True)]
    return bars(rows, used, title, "time of a step (s)", room=1.24, behind=told,
                inside=lambda part, seconds, total: f"{seconds / total:.0%}")


def search_picture(
    plans: Sequence[Plan], title: str, *, limit: float, marked: Mapping[str, Layout], best: int, slowest: float
) -> Figure:
    """Draw the legal layouts that a search has found, fastest first: memory of the fullest GPU against time of a step.

    Named are the `best` first plans and those of the layouts in `marked`. Plans that take more than `slowest` times the
    time of the fastest are counted, not drawn. `limit` is the memory of a GPU in bytes.
    """
    chosen = _chosen(plans, marked, best)
    top = max([slowest * plans[0].seconds, *(1.05 * plan.seconds for plan in chosen.values())])
    drawn = [plan for plan in plans if plan.seconds <= top]
    top = min(top, 1.08 * max(plan.seconds for plan in drawn))
    figure, (ax,) = new_figure(size=(9.4, 4.2), title=title)
    for degree in sorted({plan.layout.tp for plan in drawn}):
        own, i = [plan for plan in drawn if plan.layout.tp == degree], degree.bit_length() - 1
        ax.plot([plan.memory.total for plan in own], [plan.seconds for plan in own], MARKERS[i % 8], linestyle="none",
                color=RANK_COLORS[i % 8], markersize=5.5, markeredgecolor="white", markeredgewidth=0.4,
                label=f"TP {degree}")
    most = max(limit, *(plan.memory.total for plan in drawn))
    fastest, least = plans[0].seconds, min(plan.memory.total for plan in drawn)
    ax.set(ylabel="time of a step (s)", ylim=(max(0, fastest - 0.08 * (top - fastest)), top),
           xlim=(max(0, least - 0.06 * (most - least)), most + 0.06 * (most - least)))
    charts.grid(ax)
    charts.byte_axis(ax.xaxis, most, "memory of the fullest GPU")
    ax.axvline(limit, color=INK, linewidth=1, linestyle=(0, (3, 2)))
    charts.beside(ax, f"GPU {decimal_bytes(limit)}", (limit, 1), (-3, -2), xycoords=("data", "axes fraction"), va="top",
                  ha="right", rotation=90, fontsize=SMALL, path_effects=HALO)
    if len(drawn) < len(plans):
        charts.beside(ax, f"{len(plans) - len(drawn):,} slower ones above", (1, 1), (0, 5), xycoords="axes fraction",
                      ha="right", fontsize=SMALL, color="#555555")
    ax.legend(ncols=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, columnspacing=1.0, handletextpad=0.2)
    _name_plans(ax, chosen)
    return figure


def _chosen(plans: Sequence[Plan], marked: Mapping[str, Layout], best: int) -> dict[str, Plan]:
    """Return the plans to name, by their labels: place in the search, layout, and whose it is."""
    whose: dict[int, list[str]] = {i: [] for i in range(min(best, len(plans)))}
    for name, layout in marked.items():
        exact = (i for i, plan in enumerate(plans) if plan.layout == layout)
        alike = (i for i, plan in enumerate(plans) if plan.layout.degrees == layout.degrees)
        place = next(itertools.chain(exact, alike), None)
        if place is not None:
            whose.setdefault(place, []).append(name)
    return {
        f"{i + 1}. {', '.join(names)}{': ' if names else ''}{layout_name(plans[i].layout)}": plans[i]
        for i, names in sorted(whose.items())
    }


def _name_plans(ax: Axes, chosen: Mapping[str, Plan]) -> None:
    """Ring the plans and write their names to the right of the axes, with a line to each, none over another."""
    room = ax.annotate("\n".join(chosen), (1.03, 0), xycoords="axes fraction", alpha=0, fontsize=SMALL,
                       fontweight="bold")
    ax.figure.draw_without_rendering()  # settles the layout with room for the names
    room.remove()
    ax.figure.set_layout_engine("none")
    height, (low, high) = ax.bbox.height * 72 / ax.figure.dpi, ax.get_ylim()
    free = -np.inf
    for name, plan in sorted(chosen.items(), key=lambda item: item[1].seconds):
        point = (plan.memory.total, plan.seconds)
        ax.plot(*point, "o", color="none", markeredgecolor=INK, markersize=10, markeredgewidth=1.3)
        free = max(height * (plan.seconds - low) / (high - low), free + 13)
        ax.annotate(name, point, (1.03, free / height), textcoords="axes fraction", va="center", fontsize=SMALL,
                    fontweight="bold", annotation_clip=False,
                    arrowprops={"arrowstyle": "-", "color": "#777777", "linewidth": 0.7, "shrinkB": 5,
                                "relpos": (0, 0.5)})
