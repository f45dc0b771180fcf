"""Data-parallel training in pictures: what the ranks hold, gradients in buckets, steps in time, loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import log2
from numbers import Real

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MultipleLocator

from course_utils.draw import charts
from course_utils.draw.panels import loss_curves
from course_utils.draw.style import (
    CENTRED,
    DASHED,
    FAINT,
    INK,
    RANK_COLORS,
    SMALL,
    new_figure,
    rank_color,
    tint,
)
from course_utils.units import format_bytes

__all__ = [
    "bucket_picture",
    "gpu_timelines",
    "loss_curves",
    "replicas",
    "step_timelines",
]

_WIDTHS = {str: 2.6, float: 0.9, tuple: 1.5}  # inches of a column of the kind


def _kind(value) -> type:
    return str if isinstance(value, str) else float if isinstance(value, Real) else tuple


def _plain(value):
    return value if _kind(value) is not tuple else tuple(float(x) for x in value)


def replicas(columns: Mapping[str, Sequence], title: str) -> Figure:
    """Draw what every rank holds, one row a rank: grey where all ranks hold the same, else in the rank's colour.

    Parameters
    ----------
    columns : dict of heading to list by rank
        Texts, numbers, or sequences of numbers, which become bars. All columns have one value for each rank.
    title : str
    """
    ranks = len(next(iter(columns.values())))
    widths = [_WIDTHS[_kind(values[0])] for values in columns.values()]
    figure, (ax,) = new_figure(size=(0.7 + sum(widths), 0.9 + 0.55 * ranks))
    left = 0.0
    for (heading, values), width in zip(columns.items(), widths, strict=True):
        values = [_plain(value) for value in values]
        same = len(set(values)) == 1
        ax.text(left + width / 2, -0.15, heading, ha="center", va="bottom", fontsize=9)
        for rank, value in enumerate(values):
            color = FAINT if same else rank_color(rank)
            charts.cell(ax, left + 0.05, rank + 0.08, width - 0.1, 0.84, color)
            _fill(ax, value, left, rank, width, INK if same else color, values)
        left += width
    ax.set(xlim=(0, left), ylim=(ranks, -0.6), xticks=[], title=title)
    ax.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    charts.bare(ax)
    return figure


def _fill(ax: Axes, value, left: float, rank: int, width: float, color: str, column: Sequence) -> None:
    """Write or draw one value into its cell; bars share the scale of their column."""
    if _kind(value) is not tuple:
        text = value if isinstance(value, str) else f"{value:.4f}"
        ax.text(left + width / 2, rank + 0.5, text, fontsize=SMALL, **CENTRED)
        return
    top = max(abs(x) for values in column for x in values) or 1.0
    step = (width - 0.3) / len(value)
    for i, x in enumerate(value):
        ax.add_patch(Rectangle((left + 0.15 + i * step, rank + 0.5), 0.8 * step, -0.38 * x / top, fc=color, ec="none"))
    ax.plot([left + 0.12, left + width - 0.12], [rank + 0.5] * 2, color=color, linewidth=0.6)


def bucket_picture(rows: Mapping[str, Sequence[Sequence[tuple[str, int]]]], title: str) -> Figure:
    """Draw how gradients lie in buckets, one bar for each way of dealing them out.

    Parameters
    ----------
    rows : dict of name to list of buckets
        Each bucket is a list of (parameter, bytes), all in the order of sending. A bucket has one colour, and
        neighbouring parameters of the same name are drawn as one piece.
    title : str
    """
    figure, (ax,) = new_figure(size=(8.4, 0.9 + 1.0 * len(rows)))
    whole = max(sum(size for bucket in row for _, size in bucket) for row in rows.values())
    for y, row in enumerate(rows.values()):
        at = 0
        for number, bucket in enumerate(row):
            start, color = at, RANK_COLORS[number % 6]
            for name, size in _merged(bucket):
                ax.barh(y, size, left=at, height=0.66, color=tint(color), edgecolor="white", linewidth=0.8)
                upright = size < 0.009 * len(name) * whole
                if not upright or size > 0.013 * whole:  # else it would not fit
                    ax.text(at + size / 2, y, name, fontsize=7, rotation=90 * upright, **CENTRED)
                at += size
            ax.barh(y, at - start, left=start, height=0.66, color="none", edgecolor=color, linewidth=1.6)
    charts.name_rows(ax, rows)
    ax.set(xlabel="bytes of gradients, in the order of sending", xlim=(0, whole), title=title)
    ax.xaxis.set_major_locator(MultipleLocator(2 ** round(log2(whole / 6))))
    ax.xaxis.set_major_formatter(lambda size, _: format_bytes(size) if size else "0")
    return figure


def _merged(bucket: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the parameters of a bucket, neighbours of one name as one piece."""
    return [(name, sum(size for _, size in pieces)) for name, pieces in groupby(bucket, lambda piece: piece[0])]


def step_timelines(versions: Mapping[str, Sequence[Mapping]], title: str) -> Figure:
    """Draw the end of a training step, a panel for each version of it, all on one scale, two lanes for each rank.

    Parameters
    ----------
    versions : dict of name to list by rank
        For each rank a mapping with ``"backward"``, a (start, end) in seconds, ``"messages"``, a list of them, and
        ``"end"``, when the gradients were ready. Zero is the start of the backward pass.
    title : str
    """
    ranks = max(len(version) for version in versions.values())
    size = (8.8, 0.7 + len(versions) * (0.45 + 0.36 * ranks))
    figure, axes = new_figure(len(versions), 1, size=size, sharex=True, title=title)
    last = max(rank["end"] for version in versions.values() for rank in version) * 1e3
    for ax, (name, version) in zip(axes, versions.items(), strict=True):
        for rank, spans in enumerate(version):
            color = rank_color(rank)
            start, end = (1e3 * t for t in spans["backward"])
            ax.barh(rank - 0.2, end - start, left=start, height=0.36, color=tint(color), edgecolor=color)
            lanes = _lanes(spans["messages"])
            height = 0.42 / (1 + max(lanes, default=0))
            for lane, (start, end) in zip(lanes, spans["messages"], strict=True):
                ax.barh(rank + 0.04 + (lane + 0.5) * height, 1e3 * (end - start), left=1e3 * start, height=height,
                        color=color, edgecolor="white", linewidth=0.3)
        done = max(rank["end"] for rank in version) * 1e3
        ax.axvline(done, **DASHED)
        ax.text(done + 0.008 * last, (len(version) - 1) / 2, f"{done:.0f} ms", va="center")
        ax.set_title(name, fontsize=9.5)
        charts.name_rows(ax, [f"rank {rank}" for rank in range(len(version))])
    axes[-1].set(xlabel="time since the start of backward (ms)", xlim=(0, 1.1 * last))
    return figure


def gpu_timelines(recorded: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], title: str) -> Figure:
    """Draw when GPUs computed and communicated, a panel for each, two lanes in it, each panel on its own scale.

    Parameters
    ----------
    recorded : dict of heading to dict of lane to list of (start, end)
        Seconds. The first lane is drawn pale, the second dark, as in `step_timelines`.
    title : str
    """
    figure, axes = new_figure(len(recorded), 1, size=(8.8, 0.6 + 1.35 * len(recorded)), title=title)
    for number, (ax, (heading, lanes)) in enumerate(zip(axes, recorded.items(), strict=True)):
        color = rank_color(number)
        for row, spans in enumerate(lanes.values()):
            bars = [(1e3 * start, 1e3 * (end - start)) for start, end in spans]
            ax.broken_barh(bars, (row - 0.38, 0.76), facecolor=color if row else tint(color), linewidth=0)
        ax.set_title(heading, fontsize=9.5)
        charts.name_rows(ax, lanes)
        ax.set(xlabel="time since the step's first kernel (ms)", xlim=(0, None))
    return figure


def _lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Give each span the first lane in which it does not overlap an earlier one."""
    free: list[float] = []
    lanes = []
    for start, end in spans:
        lane = next((i for i, until in enumerate(free) if until <= start), len(free))
        free[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


