"""Figures of the course: one style, the same colour for the same rank everywhere.

Every function returns a figure that pyplot no longer tracks, so that a cell ending in it shows it once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from .costs import Message, busbw, format_bytes

__all__ = ["RANK_COLORS", "bandwidth", "before_after", "rank_color", "step_picture", "timeline"]

#: Okabe and Ito's colour-blind-safe palette, in an order that keeps neighbours apart.
RANK_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
_MARKERS = "osD^vP*X"
_INK, _FAINT = "#222222", "#AAAAAA"
_STYLE = {
    "figure.dpi": 110, "savefig.dpi": "figure", "figure.constrained_layout.use": True,
    "font.size": 9.5, "axes.titlesize": 10.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False, "axes.titlelocation": "left",
    "text.color": _INK, "axes.labelcolor": _INK, "axes.prop_cycle": plt.cycler(color=RANK_COLORS[:6]),
}  # fmt: skip
plt.rcParams.update(_STYLE)

Buffer = Sequence[float] | None


def rank_color(rank: int) -> str:
    """Return the colour of `rank`, the same in every figure of the course."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def _tint(color: str) -> tuple[float, ...]:
    return tuple(0.5 + 0.5 * channel for channel in to_rgb(color))


def _figure(*panels: int, size: tuple[float, float], **kwargs) -> tuple[Figure, np.ndarray]:
    figure, axes = plt.subplots(*panels, figsize=size, squeeze=False, **kwargs)
    plt.close(figure)
    return figure, axes[0]


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e8 else f"{value:.4g}"


def _contributors(value: float, before: Sequence[Buffer]) -> tuple[int, ...]:
    """Return the ranks whose elements make up `value`: one that held it, or several with this sum or mean."""
    for rank, buffer in enumerate(before):
        if buffer is not None and value in buffer:
            return (rank,)
    held = [rank for rank, buffer in enumerate(before) if buffer]
    columns = list(itertools.zip_longest(*(before[rank] for rank in held), fillvalue=float("nan")))
    for size in range(len(held), 1, -1) if len(held) <= 8 else ():
        for picked in itertools.combinations(range(len(held)), size):
            sums = [sum(column[i] for i in picked) for column in columns]
            if any(value in (total, total / size) for total in sums):
                return tuple(held[i] for i in picked)
    return ()


def _draw_buffers(ax: Axes, values: Sequence[Buffer], owners: Sequence[Sequence[Sequence[int]]], title: str) -> None:
    """Draw one row of cells for each rank; a cell has one stripe for each rank in its owners, none if it is empty."""
    n, width = len(values), max((len(row) for row in owners), default=1)
    for rank, row in enumerate(owners):
        for column, ranks in enumerate(row):
            for i, owner in enumerate(ranks):
                stripe = (column + 0.04 + 0.92 * i / len(ranks), rank + 0.12), 0.92 / len(ranks), 0.76
                ax.add_patch(Rectangle(*stripe, color=_tint(rank_color(owner)), linewidth=0))
            known = values[rank] is not None and column < len(values[rank]) and values[rank][column] is not None
            edge = {"edgecolor": _INK, "linewidth": 0.8} if known else {"edgecolor": _FAINT, "linestyle": (0, (2, 3))}
            ax.add_patch(Rectangle((column + 0.04, rank + 0.12), 0.92, 0.76, facecolor="none", **edge))
            if known:
                text = _number(values[rank][column])
                size = min(9.5, 46 / len(text))
                ax.text(column + 0.5, rank + 0.5, text, ha="center", va="center", fontsize=size, zorder=5)
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
    figure, axes = _figure(
        1, 2, size=(min(9.0, 2.6 + 0.52 * sum(width)), 0.45 + 0.32 * len(before)),
        gridspec_kw={"width_ratios": [w + 1 for w in width]},
    )  # fmt: skip
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
    figure, axes = _figure(1, 2, size=(min(11.0, 2.8 + 1.15 * n), 0.6 + 0.42 * n))
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


def _label_lines(ax: Axes, labels: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each label at the right end of its line, moved apart where two would overlap."""
    ax.figure.canvas.draw()
    height, scale = 12.0, 72 / ax.figure.dpi
    ordered = sorted(labels.items(), key=lambda item: item[1][1])
    wanted = [ax.transData.transform((x, y))[1] * scale for _, (x, y, _) in ordered]
    placed = [max(y + height * (i - j) for j, y in enumerate(wanted[: i + 1])) for i in range(len(wanted))]
    room = ax.bbox.y1 * scale - height / 2
    placed = [min(y, room - height * (len(placed) - 1 - i)) for i, y in enumerate(placed)]
    for (text, (x, y, color)), at, old in zip(ordered, placed, wanted, strict=True):
        ax.annotate(text, (x, y), (6, at - old), textcoords="offset points", va="center", color=color,
                    fontweight="bold")  # fmt: skip


def bandwidth(
    sizes: Sequence[float], seconds: Mapping[str, Sequence[float]], world_size: int, *, kind: str = "measured",
    fit: tuple[float, float] | None = None,
) -> Figure:  # fmt: skip
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
    figure, (left, right) = _figure(1, 2, size=(9.6, 3.5))
    ends: tuple[dict, dict] = ({}, {})
    for i, (op, times) in enumerate(seconds.items()):
        color, marker = RANK_COLORS[i % 6], _MARKERS[i % 8]
        rates = [busbw(op, world_size, s, t) / 1e9 for s, t in zip(sizes, times, strict=True)]
        left.plot(sizes, [t * 1e3 for t in times], marker=marker, markersize=4, color=color)
        right.plot(sizes, rates, marker=marker, markersize=4, color=color)
        ends[0][op], ends[1][op] = (sizes[-1], times[-1] * 1e3, color), (sizes[-1], rates[-1], color)
    if fit:
        grid = np.geomspace(sizes[0], sizes[-1], 60)
        left.plot(grid, (fit[0] + fit[1] * grid) * 1e3, "--", color=_INK, linewidth=1)
        left.text(0.04, 0.95, "dashed: α + βS, modelled", transform=left.transAxes, va="top")
    left.set(yscale="log", ylabel="time of one call (ms)", title=f"{kind}: time, {world_size} ranks")
    right.set(ylabel="bus bandwidth (GB/s)", ylim=(0, None), title=f"{kind}: bus bandwidth, {world_size} ranks")
    ticks = [sizes[0]]
    for size in sizes:
        if size >= 8 * ticks[-1]:
            ticks.append(size)
    for ax, labels in zip((left, right), ends, strict=True):
        ax.set(xscale="log", xlabel="message size S")
        ax.set_xticks(ticks)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.grid(True, color="#E5E5E5", linewidth=0.7)
        _label_lines(ax, labels)
    return figure


def timeline(rows: Mapping[str, Sequence[tuple[str, float, float]]], title: str) -> Figure:
    """Draw spans of time, one row of bars for each key.

    Parameters
    ----------
    rows : dict of row name to list of (label, start, end)
        Seconds. Equal labels have equal colours; a label is written inside its bar.
    title : str
        Says what is shown and whether it is measured, recorded or modelled.
    """
    kinds = list(dict.fromkeys(label for spans in rows.values() for label, *_ in spans))
    whole = max(end for spans in rows.values() for *_, end in spans)
    figure, (ax,) = _figure(1, 1, size=(8.4, 0.9 + 0.42 * len(rows)))
    for y, spans in enumerate(rows.values()):
        for label, start, end in spans:
            color = RANK_COLORS[kinds.index(label) % 8]
            ax.barh(y, (end - start) * 1e3, left=start * 1e3, height=0.7, color=_tint(color), edgecolor=color)
            if end - start > 0.012 * len(label) * whole:  # else it would not fit
                ax.text((start + end) * 500, y, label, ha="center", va="center", fontsize=8.5)
    ax.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel="time (ms)", title=title, xlim=(0, None))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    return figure
