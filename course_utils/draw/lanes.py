"""Buffers of ranks before and after a collective, and spans of time in lanes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from . import charts
from .bars import Row, Span, bars
from .style import CENTRED, FAINT, INK, RANK_COLORS, new_figure, rank_color, tint

Buffer = Sequence[float] | None

#: One colour for each part of a step, the same in every figure.
_PARTS = {
    "data": "#56B4E9", "compute": "#0072B2", "copies": "#CC79A7", "wait": "#D55E00", "all_reduce": "#E69F00",
    "optimizer": "#009E73", "backward": "#0072B2",
}
_HATCHES = {"wait": "////", "data": "...."}  # beside parts of nearly their hue


def timeline(rows: Mapping[str, Sequence[Span]], title: str) -> Figure:
    """Draw spans of time (label, start, end), in seconds, one row of bars for each key, with their labels inside."""
    colors = charts.in_turn(label for spans in rows.values() for label, *_ in spans)
    return bars(rows, colors, title, "time (ms)", head=0.9, key=False, scale=1e3,
                inside=lambda label, size, end: label)


def step_split(rows: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Draw what a step's seconds went to, by part; parts of the course have colours of their own."""
    return _draw_parts(rows, title, "time in one step (ms)")


def step_spans(rows: Mapping[str, Sequence[Span]], title: str) -> Figure:
    """Draw when each part of a step ran (part, start, end), in seconds, in the colours of `step_split`."""
    return _draw_parts(rows, title, "time (ms)")


def _draw_parts(rows: Mapping[str, Row], title: str, xlabel: str) -> Figure:
    spare = [color for color in RANK_COLORS if color not in _PARTS.values()] + [FAINT] * 99
    parts = dict.fromkeys(part if isinstance(part, str) else part[0] for row in rows.values() for part in row)
    colors = {part: _PARTS.get(part) or spare.pop(0) for part in parts}
    return bars(rows, colors, title, xlabel, scale=1e3, hatches=_HATCHES)


def before_after(before: Sequence[Buffer], after: Sequence[Buffer], title: str) -> Figure:
    """Draw what every rank holds before and after a collective: a tensor or list by rank, None for nothing.

    A cell has the colour of the rank it came from; a sum or mean of several ranks has a stripe for each.
    """
    sides = [[None if b is None else np.asarray(b).ravel().tolist() for b in side] for side in (before, after)]
    width = [max(1, *(len(b or ()) for b in side)) for side in sides]
    size = (2.6 + 0.52 * sum(width), 0.45 + 0.32 * len(before))
    figure, axes = new_figure(1, 2, size=size, width_ratios=[w + 1 for w in width])
    start = [[(rank,)] * len(b) if b else [()] * width[0] for rank, b in enumerate(sides[0])]
    end = [[_contributors(v, sides[0]) for v in b] if b else [()] * width[1] for b in sides[1]]
    draw_buffers(axes[0], sides[0], start, f"{title}: before")
    draw_buffers(axes[1], sides[1], end, "after")
    return figure


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
