"""Data-parallel training in pictures: what the ranks hold, gradients in buckets, steps in time."""

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
from course_utils.draw.bars import name_rows
from course_utils.draw.panels import loss_curves as loss_curves
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

_WIDTHS = {str: 2.6, float: 0.9, tuple: 1.5}  # inches of a column of the kind


def _plain(value: object) -> str | float | tuple[float, ...]:
    if isinstance(value, str):
        return value
    return float(value) if isinstance(value, Real) else tuple(float(x) for x in value)


def replicas(columns: Mapping[str, Sequence], title: str) -> Figure:
    """Draw what every rank holds, one row a rank: grey where all ranks hold the same, else in the rank's colour.

    A column, by its heading, has a text, a number, or a sequence of numbers, which become bars, for each rank.
    """
    columns = {heading: [_plain(value) for value in values] for heading, values in columns.items()}
    ranks = len(next(iter(columns.values())))
    widths = [_WIDTHS[type(values[0])] for values in columns.values()]
    figure, (ax,) = new_figure(size=(0.7 + sum(widths), 0.9 + 0.55 * ranks))
    left = 0.0
    for (heading, values), width in zip(columns.items(), widths, strict=True):
        same = len(set(values)) == 1
        ax.text(left + width / 2, -0.15, heading, ha="center", va="bottom", fontsize=9)
        for rank, value in enumerate(values):
            color = FAINT if same else rank_color(rank)
            charts.cell(ax, left + 0.05, rank + 0.08, width - 0.1, 0.84, color)
            if isinstance(value, tuple):
                top = max(abs(x) for row in values for x in row) or 1.0
                _draw_numbers(ax, [x / top for x in value], left, rank, width, INK if same else color)
            else:
                text = value if isinstance(value, str) else f"{value:.4f}"
                ax.text(left + width / 2, rank + 0.5, text, fontsize=SMALL, **CENTRED)
        left += width
    ax.set(xlim=(0, left), ylim=(ranks, -0.6), xticks=[], title=title)
    ax.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    charts.bare(ax)
    return figure


def _draw_numbers(ax: Axes, value: Sequence[float], left: float, rank: int, width: float, color: str) -> None:
    """Draw numbers from -1 to 1 as bars into one cell."""
    step = (width - 0.3) / len(value)
    for i, x in enumerate(value):
        ax.add_patch(Rectangle((left + 0.15 + i * step, rank + 0.5), 0.8 * step, -0.38 * x, fc=color, ec="none"))
    ax.plot([left + 0.12, left + width - 0.12], [rank + 0.5] * 2, color=color, linewidth=0.6)


def bucket_picture(rows: Mapping[str, Sequence[Sequence[tuple[str, int]]]], title: str) -> Figure:
    """Draw how gradients lie in buckets, one bar for each way of dealing them out, a bucket in one colour.

    A bucket is a list of (parameter, bytes) in the order of sending; neighbours of one name are one piece.
    """
    figure, (ax,) = new_figure(size=(8.4, 0.9 + 1.0 * len(rows)))
    whole = max(sum(size for bucket in row for _, size in bucket) for row in rows.values())
    for y, row in enumerate(rows.values()):
        at = 0
        for number, bucket in enumerate(row):
            start, color = at, RANK_COLORS[number % 6]
            for name, pieces in groupby(bucket, lambda piece: piece[0]):
                size = sum(size for _, size in pieces)
                ax.barh(y, size, left=at, height=0.66, color=tint(color), edgecolor="white", linewidth=0.8)
                upright = size < 0.009 * len(name) * whole
                if not upright or size > 0.013 * whole:  # else it would not fit
                    ax.text(at + size / 2, y, name, fontsize=7, rotation=90 * upright, **CENTRED)
                at += size
            ax.barh(y, at - start, left=start, height=0.66, color="none", edgecolor=color, linewidth=1.6)
    name_rows(ax, rows)
    ax.set(xlabel="bytes of gradients, in the order of sending", xlim=(0, whole), title=title)
    ax.xaxis.set_major_locator(MultipleLocator(2 ** round(log2(whole / 6))))
    ax.xaxis.set_major_formatter(lambda size, _: format_bytes(size) if size else "0")
    return figure


def step_timelines(versions: Mapping[str, Sequence[Mapping]], title: str) -> Figure:
    """Draw the end of a training step, a panel for each version of it, all on one scale, two lanes for each rank.

    For each rank there is a mapping, in seconds since the start of backward: ``"backward"``, its start and end,
    ``"messages"``, a list of those, and ``"end"``, when the gradients were ready.
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
        name_rows(ax, [f"rank {rank}" for rank in range(len(version))])
    axes[-1].set(xlabel="time since the start of backward (ms)", xlim=(0, 1.1 * last))
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


def gpu_timelines(recorded: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], title: str) -> Figure:
    """Draw when GPUs computed (pale) and communicated (dark), in seconds, a panel for each, on its own scale."""
    figure, axes = new_figure(len(recorded), 1, size=(8.8, 0.6 + 1.35 * len(recorded)), title=title)
    for number, (ax, (heading, lanes)) in enumerate(zip(axes, recorded.items(), strict=True)):
        color = rank_color(number)
        for row, spans in enumerate(lanes.values()):
            bars = [(1e3 * start, 1e3 * (end - start)) for start, end in spans]
            ax.broken_barh(bars, (row - 0.38, 0.76), facecolor=color if row else tint(color), linewidth=0)
        ax.set_title(heading, fontsize=9.5)
        name_rows(ax, lanes)
        ax.set(xlabel="time since the step's first kernel (ms)", xlim=(0, None))
    return figure
