"""Layouts in pictures: where a step's time goes, predicted against published, all layouts of a search."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_utils.draw import charts
from course_utils.draw.bars import memory_bars
from course_utils.draw.style import HALO, INK, MARKERS, RANK_COLORS, SMALL, new_figure
from course_utils.units import decimal_bytes

from .error_figures import errors_by_family
from .mesh_pictures import DIMENSION_COLORS, mesh_grid

__all__ = [
    "TIME_COLORS",
    "errors_by_family",
    "layout_bars",
    "layout_name",
    "memory_bars",
    "mesh_grid",
    "predicted_against_published",
    "search_picture",
]

if TYPE_CHECKING:
    from .planner import Layout, Plan, Replayed

#: One colour for each part of a step's time, in the order of `planner.PARTS`, the same in every figure.
TIME_COLORS = {
    "compute": RANK_COLORS[0], "tensor": DIMENSION_COLORS["tp"], "context": DIMENSION_COLORS["cp"],
    "expert": RANK_COLORS[5], "pipeline": DIMENSION_COLORS["pp"], "data": DIMENSION_COLORS["dp"], "bubble": "#BBBBBB",
}
_BAND = "#EEEEEE"


def layout_name(layout: Layout) -> str:
    """Return a layout in short, such as ``TP 8, PP 4, DP 8, v 2``; CP, v and b (micro-batch) of 1 are left out."""
    more = {"CP": layout.cp, "v": layout.virtual, "b": layout.microbatch}
    told = {"TP": layout.tp, "PP": layout.pp, "DP": layout.dp} | {name: n for name, n in more.items() if n > 1}
    return ", ".join(f"{name} {n}" for name, n in told.items())


def _names(layouts: Sequence[Layout]) -> list[str]:
    """Return the layouts in short, with what else is not the same in all."""
    told = {
        "zero": "ZeRO {}".format, "recompute": "recompute {}".format, "precision": str,
        "sequence_parallel": ("no SP", "SP").__getitem__, "overlap": ("no overlap", "overlap").__getitem__,
    }
    unequal = [name for name in told if len({getattr(layout, name) for layout in layouts}) > 1]
    return [", ".join([layout_name(x), *(told[name](getattr(x, name)) for name in unequal)]) for x in layouts]


def layout_bars(plans: Mapping[str, Plan] | Sequence[Plan], title: str, *, rate: str = "tflops") -> Figure:
    """Draw what a step's seconds go to, one stacked bar for each plan, with its TFLOP/s at the end.

    Parameters
    ----------
    plans : dict of name to Plan, or list of Plan
        Plans of a list are named by their layouts.
    title : str
    rate : {"tflops", "model_tflops"}
        Whether what is computed a second time counts.
    """
    if isinstance(plans, Mapping):
        named = dict(plans)
    else:
        named = dict(zip(_names([plan.layout for plan in plans]), plans, strict=True))
    rows = {fill(name, 44): plan.parts() for name, plan in named.items()}
    figure, (ax,) = new_figure(size=(9.2, 1.25 + 0.36 * charts.lines_of(rows)), title=title)
    charts.stacked_bars(ax, rows, TIME_COLORS)
    longest = max(sum(row.values()) for row in rows.values()) or 1.0
    ax.set(xlim=(0, 1.24 * longest), xlabel="time of a step (s)")
    charts.legend(ax, {part: color for part, color in TIME_COLORS.items() if any(row[part] for row in rows.values())})
    figure.draw_without_rendering()
    for y, (row, plan) in enumerate(zip(rows.values(), named.values(), strict=True)):
        total = sum(row.values())
        for _, start, end in charts.end_to_end(row):
            charts.write_inside(ax, y, f"{(end - start) / total:.0%}", start, end)
        charts.write_behind(ax, y, f"{total:.3g} s, {getattr(plan, rate):.0f} TFLOP/s", total)
    return figure


def predicted_against_published(
    rows: Sequence[Replayed], title: str, *, baseline: Sequence[float] | None = None, band: float = 0.15
) -> Figure:
    """Draw predicted and published tokens/s of each run's GPUs beside the error, with a band to hold the error against.

    Parameters
    ----------
    rows : list of planner.Replayed
        Runs that the constants were fitted to are drawn hollow and left out of the median error.
    title : str
        Says that published values are recorded and the others modelled.
    baseline : list of float, optional
        The error of a guess without the model for each row, as `planner.guesses` gives it: grey crosses.
    band : float
        Half-width of the band, as a share of the published value.
    """
    figure, (left, right) = new_figure(1, 2, size=(10.4, 1.6 + 0.29 * len(rows)), title=title, sharey=True)
    color = RANK_COLORS[0]
    for y, row in enumerate(rows):
        look = {"marker": "o", "markersize": 7, "color": color, "markerfacecolor": "white" if row.fitted else color}
        left.barh(y, 2 * band * row.published, left=(1 - band) * row.published, height=0.62, color=_BAND, zorder=0)
        left.plot([row.published] * 2, [y - 0.31, y + 0.31], color=INK, linewidth=2)
        left.plot([row.predicted], [y], **look)
        if baseline is not None:
            right.plot([100 * baseline[y]], [y], "x", color="#777777", markersize=6)
        right.plot([0, 100 * row.error], [y, y], color=color, linewidth=1.2)
        right.plot([100 * row.error], [y], **look)
        charts.beside(right, f"{row.error:+.0%}", (1, y), (2, 0), xycoords=("axes fraction", "data"), va="center",
                      fontsize=SMALL)
    right.axvspan(-100 * band, 100 * band, color=_BAND, zorder=0, linewidth=0)
    right.axvline(0, color=INK, linewidth=2)
    for ax in (right, left):
        charts.name_rows(ax, [row.name for row in rows])
        ax.spines["left"].set_visible(False)
    left.set(xlabel="tokens/s of one GPU", xlim=(0, None))
    hint = " (hollow: fitted)" if any(row.fitted for row in rows) else ""
    left.set_title(f"bar: published, grey: ± {band:.0%}\ndot: predicted{hint}", fontsize=9.5)
    furthest = 1.15 * max([band, *(abs(row.error) for row in rows), *map(abs, baseline or ())])
    right.set(xlabel="predicted / published - 1 (%)", xlim=(-100 * furthest, 100 * furthest))
    right.set_title(_errors(rows, baseline), fontsize=9.5)
    return figure


def _errors(rows: Sequence[Replayed], baseline: Sequence[float] | None) -> str:
    """Return the median error of the runs that the fit has not seen, and that of the baseline, in words."""
    unseen = [i for i, row in enumerate(rows) if not row.fitted] or list(range(len(rows)))
    of = "runs not seen" if len(unseen) < len(rows) else "runs"
    told = f"median error of {len(unseen)} {of}: {median(abs(rows[i].error) for i in unseen):.1%}"
    return told if baseline is None else f"{told}\n×: without a model {median(abs(baseline[i]) for i in unseen):.1%}"


def search_picture(
    plans: Sequence[Plan], title: str, *, limit: float | None = None, marked: Mapping[str, Layout] | None = None,
    best: int = 1, slowest: float = 3.0,
) -> Figure:
    """Draw the legal layouts that a search has found: memory of the fullest GPU against the time of a step.

    Parameters
    ----------
    plans : list of Plan
        Fastest first. The tensor-parallel degree has colour and marker.
    title : str
    limit : float, optional
        Memory of a GPU in bytes, drawn as a line.
    marked : dict of name to Layout, optional
        Layouts to name, such as the published one: the plan of that layout, else the first of the same degrees.
    best : int
        How many of the first plans are named.
    slowest : float
        Plans that take more than so many times the time of the fastest are counted, not drawn.
    """
    chosen = _chosen(plans, marked or {}, best)
    top = max([slowest * plans[0].seconds, *(1.05 * plan.seconds for plan in chosen.values())])
    drawn = [plan for plan in plans if plan.seconds <= top]
    top = min(top, 1.08 * max(plan.seconds for plan in drawn))
    figure, (ax,) = new_figure(size=(9.4, 4.2), title=title)
    for degree in sorted({plan.layout.tp for plan in drawn}):
        own, i = [plan for plan in drawn if plan.layout.tp == degree], degree.bit_length() - 1
        ax.plot([plan.memory.total for plan in own], [plan.seconds for plan in own], MARKERS[i % 8], linestyle="none",
                color=RANK_COLORS[i % 8], markersize=5.5, markeredgecolor="white", markeredgewidth=0.4,
                label=f"TP {degree}")
    most = max([plan.memory.total for plan in drawn] + ([limit] if limit else []))
    fastest, least = plans[0].seconds, min(plan.memory.total for plan in drawn)
    ax.set(ylabel="time of a step (s)", ylim=(max(0, fastest - 0.08 * (top - fastest)), top),
           xlim=(max(0, least - 0.06 * (most - least)), most + 0.06 * (most - least) or 1))
    charts.grid(ax)
    charts.byte_axis(ax.xaxis, most, "memory of the fullest GPU")
    if limit:
        ax.axvline(limit, color=INK, linewidth=1, linestyle=(0, (3, 2)))
        charts.beside(ax, f"GPU {decimal_bytes(limit)}", (limit, 1), (-3, -2), xycoords=("data", "axes fraction"),
                      va="top", ha="right", rotation=90, fontsize=SMALL, path_effects=HALO)
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
