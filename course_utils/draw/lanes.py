"""Buffers of ranks before and after a collective, and spans of time in lanes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from . import charts
from .style import CENTRED, FAINT, INK, RANK_COLORS, new_figure, rank_color, tint

Buffer = Sequence[float] | None


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e8 else f"{value:.4g}"


def _contributors(value: float, before: Sequence[Buffer]) -> tuple[int, ...]:
    """Return the ranks whose elements make up `value`: one that held it, or as many as can have this sum or mean."""
    for rank, buffer in enumerate(before):
        if buffer is not None and value in buffer:
            return (rank,)
    held = {rank: buffer for rank, buffer in enumerate(before) if buffer}
    for ranks in _groups(list(held)):
        for column in zip(*(held[rank] for rank in ranks), strict=False):
            if value in (sum(column), sum(column) / len(ranks)):
                return ranks
    return ()


def _groups(ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every choice of at least two of up to eight ranks, the largest first; of more there are too many."""
    for size in range(len(ranks), 1, -1) if len(ranks) <= 8 else ():
        yield from itertools.combinations(ranks, size)


def draw_buffers(ax: Axes, values: Sequence[Buffer], owners: Sequence[Sequence[Sequence[int]]], title: str) -> None:
    """Draw one row of cells for each rank; a cell has one stripe for each rank in its owners, none if it is empty."""
    n, width = len(values), max((len(row) for row in owners), default=1)
    for rank, row in enumerate(owners):
        for column, ranks in enumerate(row):
            for i, owner in enumerate(ranks):
                stripe = (column + 0.04 + 0.92 * i / len(ranks), rank + 0.12), 0.92 / len(ranks), 0.76
                ax.add_patch(Rectangle(*stripe, color=tint(rank_color(owner)), linewidth=0))
            known = values[rank] is not None and column < len(values[rank]) and values[rank][column] is not None
            edge = {"edgecolor": INK, "linewidth": 0.8} if known else {"edgecolor": FAINT, "linestyle": (0, (2, 3))}
            ax.add_patch(Rectangle((column + 0.04, rank + 0.12), 0.92, 0.76, facecolor="none", **edge))
            if known:
                text = _number(values[rank][column])
                ax.text(column + 0.5, rank + 0.5, text, fontsize=min(9.5, 46 / len(text)), zorder=5, **CENTRED)
        ax.text(-0.15, rank + 0.5, f"rank {rank}", ha="right", va="center", fontweight="bold")
        ax.add_patch(Rectangle((-0.1, rank + 0.12), 0.07, 0.76, color=rank_color(rank), linewidth=0))
    ax.set(xlim=(-0.9, max(width, 1) + 0.1), ylim=(n, 0), title=title)
    ax.axis("off")


def before_after(before: Sequence[Buffer], after: Sequence[Buffer], title: str) -> Figure:
    """Draw what every rank holds before and after a collective.

    Parameters
    ----------
    before, after : list, index = rank
        One-dimensional tensors or lists; None for a rank that holds nothing.
    title : str
        Name of the collective.

    Returns
    -------
    matplotlib.figure.Figure
        A cell has the colour of the rank it came from; a sum or mean of several ranks has a stripe for each.
    """
    if len(before) != len(after) or not before:
        raise ValueError(f"before and after need one entry for each rank, got {len(before)} and {len(after)}")
    sides = [[None if b is None else np.asarray(b).ravel().tolist() for b in side] for side in (before, after)]
    width = [max(1, *(len(b or ()) for b in side)) for side in sides]
    size = (2.6 + 0.52 * sum(width), 0.45 + 0.32 * len(before))
    figure, axes = new_figure(1, 2, size=size, width_ratios=[w + 1 for w in width])
    start = [[(rank,)] * len(b) if b else [()] * width[0] for rank, b in enumerate(sides[0])]
    end = [[_contributors(v, sides[0]) for v in b] if b else [()] * width[1] for b in sides[1]]
    draw_buffers(axes[0], sides[0], start, f"{title}: before")
    draw_buffers(axes[1], sides[1], end, "after")
    return figure


def timeline(rows: Mapping[str, Sequence[tuple[str, float, float]]], title: str) -> Figure:
    """Draw spans of time, one row of bars for each key.

    Parameters
    ----------
    rows : dict of row name to list of (label, start, end)
        Seconds. Equal labels have equal colours; a label is written inside its bar.
    title : str
    """
    figure, (ax,) = new_figure(size=(8.4, 0.9 + 0.42 * len(rows)))
    charts.draw_spans(ax, rows, charts.in_turn(label for spans in rows.values() for label, *_ in spans), scale=1e3)
    ax.set(xlabel="time (ms)", title=title, xlim=(0, None))
    figure.draw_without_rendering()
    for y, spans in enumerate(rows.values()):
        for label, start, end in spans:
            charts.write_inside(ax, y, label, 1e3 * start, 1e3 * end)
    return figure

#: One colour for each part of a step, the same in every figure.
_PARTS = {
    "data": "#56B4E9", "compute": "#0072B2", "copies": "#CC79A7", "wait": "#D55E00", "all_reduce": "#E69F00",
    "optimizer": "#009E73", "backward": "#0072B2",
}

_HATCHES = {"wait": "////", "data": "...."}  # beside parts of nearly their hue


def _colors(parts: Sequence[str]) -> dict[str, str]:
    """Return the colour of each part, in the order in which they come first."""
    spare = [color for color in RANK_COLORS if color not in _PARTS.values()] + [FAINT] * len(parts)
    return {part: _PARTS.get(part) or spare.pop(0) for part in dict.fromkeys(parts)}


def step_split(rows: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Draw what a step's seconds went to, one stacked bar for each row.

    Parameters
    ----------
    rows : dict of row name to dict of part to seconds
        Parts keep their order; those of the course have colours of their own.
    title : str
    """
    return _draw_parts({name: charts.end_to_end(row) for name, row in rows.items()}, title, "time in one step (ms)")


def step_spans(rows: Mapping[str, Sequence[tuple[str, float, float]]], title: str) -> Figure:
    """Draw when each part of a step ran, one row of bars for each key, in the colours of `step_split`.

    Parameters
    ----------
    rows : dict of row name to list of (part, start, end)
        Seconds.
    title : str
    """
    return _draw_parts(rows, title, "time (ms)")


def _draw_parts(rows: Mapping[str, Sequence[charts.Span]], title: str, xlabel: str) -> Figure:
    colors = _colors([part for spans in rows.values() for part, *_ in spans])
    figure, (ax,) = new_figure(size=(8.6, 1.15 + 0.35 * len(rows)), title=title)
    charts.draw_spans(ax, rows, colors, scale=1e3, hatches=_HATCHES)
    charts.legend(ax, colors, hatches=_HATCHES)
    ax.set(xlabel=xlabel, xlim=(0, None))
    return figure
