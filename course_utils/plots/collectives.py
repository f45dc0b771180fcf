"""Buffers before and after a collective, bandwidth over size, spans of time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from ..collective_algorithms import Message
from ..costs import busbw
from . import _charts as charts
from ._style import CENTRED, FAINT, INK, new_figure, rank_color, tint

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


def _draw_buffers(ax: Axes, values: Sequence[Buffer], owners: Sequence[Sequence[Sequence[int]]], title: str) -> None:
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
    _draw_buffers(axes[0], sides[0], start, f"{title}: before")
    _draw_buffers(axes[1], sides[1], end, "after")
    return figure


def step_picture(states: Sequence[tuple], messages: Sequence[Message], titles: tuple[str, str]) -> Figure:
    """Draw every rank's slots before and after one step, with an arrow for each message.

    `states` are two pairs: values by rank and slot (None: empty), and the ranks that contributed to each.
    """
    n = len(states[0][0])
    figure, axes = new_figure(1, 2, size=(2.8 + 1.15 * n, 0.6 + 0.42 * n))
    for ax, (values, owners), title in zip(axes, states, titles, strict=True):
        _draw_buffers(ax, values, owners, title)
    for m in messages:
        many = len(m.pieces) > 1  # the whole row: one thick arrow in the sender's column
        columns = (m.src % n, m.src % n) if many else (m.pieces[0], m.into[0])
        ends = [(columns[0] + 0.5, m.src + 0.5), (columns[1] + 0.5, m.dst + 0.5)]
        bend = 0.25 * (abs(m.src - m.dst) > 1 or columns[0] != columns[1])
        side = -1 if columns[0] == columns[1] and m.src > m.dst else 1  # pairs that swap keep their arrows apart
        look = {"arrowstyle": "-|>", "mutation_scale": 13, "shrinkA": 9, "shrinkB": 9, "zorder": 4}
        look |= {"color": rank_color(m.src), "linewidth": 3.5 if many else 2}
        axes[0].add_patch(FancyArrowPatch(*ends, connectionstyle=f"arc3,rad={side * bend}", **look))
    return figure


def bandwidth(
    sizes: Sequence[float], seconds: Mapping[str, Sequence[float]], world_size: int, *, kind: str = "measured",
    fit: tuple[float, float] | None = None,
) -> Figure:
    """Draw time and bus bandwidth against message size for several collectives.

    Parameters
    ----------
    sizes : list of float
        Message sizes S in bytes.
    seconds : dict of op to list of float
        Time of one call at each size.
    world_size : int
        Ranks that took part.
    kind : str
        ``"measured"``, ``"recorded"`` or ``"modelled"``, written on the figure.
    fit : (alpha, beta), optional
        Drawn as a dashed line alpha + beta * S.
    """
    figure, (left, right) = new_figure(1, 2, size=(9.6, 3.5))
    rates = {op: [busbw(op, world_size, s, t) / 1e9 for s, t in zip(sizes, times, strict=True)]
             for op, times in seconds.items()}
    ends = (charts.draw_lines(left, sizes, seconds, scale=1e3, markers=4),
            charts.draw_lines(right, sizes, rates, markers=4))
    if fit:
        many = np.geomspace(sizes[0], sizes[-1], 60)
        left.plot(many, (fit[0] + fit[1] * many) * 1e3, "--", color=INK, linewidth=1)
        left.text(0.04, 0.95, "dashed: α + βS, modelled", transform=left.transAxes, va="top")
    left.set(yscale="log", ylabel="time of one call (ms)", title=f"{kind}: time, {world_size} ranks")
    right.set(ylabel="bus bandwidth (GB/s)", ylim=(0, None), title=f"{kind}: bus bandwidth, {world_size} ranks")
    for ax, labels in zip((left, right), ends, strict=True):
        charts.size_axis(ax, sizes)
        charts.label_lines(ax, labels)
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
