"""Pieces of figures, and the axes that they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, floor, log2

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from ..units import byte_unit, format_bytes
from .style import RANK_COLORS, tint

# Pieces


def beside(ax: Axes, text: str, point: tuple[float, float], shift: tuple[float, float], **look: object) -> Annotation:
    """Write `text` beside `point`, `shift` in points away from it."""
    return ax.annotate(text, point, shift, **{"textcoords": "offset points"} | look)


def cell(ax: Axes, left: float, low: float, width: float, height: float, color: str, **look: object) -> None:
    """Draw a box filled pale and framed in `color`."""
    ax.add_patch(Rectangle((left, low), width, height, **{"facecolor": tint(color), "edgecolor": color} | look))


def in_turn(labels: Iterable[str]) -> dict[str, str]:
    """Return a colour of the palette for each label, in the order in which they come first."""
    return {label: RANK_COLORS[i % len(RANK_COLORS)] for i, label in enumerate(dict.fromkeys(labels))}


def few(count: int, most: int = 8) -> list[int | None]:
    """Return the numbers up to `count`; of more than `most` the first three, None for those left out, the last."""
    return list(range(count)) if count <= most else [0, 1, 2, None, count - 1]


def duration(seconds: float) -> str:
    """Return a time to three digits, such as ``5.73 µs``."""
    unit, scale = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * scale:.3g} {unit}"


def points_per_unit(ax: Axes) -> tuple[float, float]:
    """Return the points of one data unit along x and y, once the layout is settled."""
    box, (left, right), (low, high) = ax.bbox, ax.get_xlim(), ax.get_ylim()
    scale = 72 / ax.figure.dpi
    return box.width * scale / abs(right - left), box.height * scale / abs(high - low)


def rows_for(ax: Axes, names: Iterable[tuple[float, str]]) -> list[int]:
    """Return for each text that begins at x, from left to right, the first row in which it is clear of the others."""
    ends: list[float] = []  # in points, by row
    rows = []
    for x, text in names:
        at = ax.get_xaxis_transform().transform((x, 0))[0] * 72 / ax.figure.dpi
        row = next((i for i, end in enumerate(ends) if end + 8 <= at), len(ends))
        ends[row : row + 1] = [at + 5.2 * len(text)]
        rows.append(row)
    return rows


# Axes


def grid(ax: Axes) -> None:
    """Draw pale lines across, below what is drawn."""
    ax.set_axisbelow(True)
    ax.yaxis.grid(True, color="#E5E5E5", linewidth=0.7)


def format_ticks(axis: Axis, form: str) -> None:
    """Write the numbers of an axis in `form`, such as ``"{:,.0f}"``."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))


def count_axis(ax: Axes, counts: Sequence[int], label: str) -> None:
    """Make the x axis one of counts: logarithmic, with exactly these ticks."""
    ax.set(xscale="log", xlabel=label)
    ax.set_xticks(list(counts), [f"{n:,}" for n in counts])
    ax.xaxis.set_minor_locator(NullLocator())


def size_axis(ax: Axes, sizes: Sequence[float], label: str) -> None:
    """Make the x axis one of bytes: logarithmic, with as many evenly spaced powers of two as fit."""
    low, high = ceil(log2(min(sizes)) - 1e-9), floor(log2(max(sizes)) + 1e-9)
    place = ax.get_subplotspec()
    share = len(place.colspan) / place.get_gridspec().ncols
    room = max(2, int(share * ax.figure.get_figwidth()))  # an inch for each, less what stands beside the axes
    step = next(step for step in (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 60) if (high - low) // step < room)
    ticks = [2.0**power for power in range(low, high + 1, step)] or list(sizes)
    ax.set(xscale="log", xlabel=label)
    ax.set_xticks(ticks, [format_bytes(size) for size in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


def byte_axis(axis: Axis, largest: float, label: str) -> None:
    """Make `axis` one of bytes in the decimal unit that fits `largest`, with round numbers."""
    scale, unit = byte_unit(largest)
    axis.set_major_locator(_Round(scale))
    axis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / scale:,.6g}"))
    axis.set_label_text(f"{label} ({unit})")


class _Round(MaxNLocator):
    """Ticks that are round numbers of a unit of `scale` bytes."""

    def __init__(self, scale: float) -> None:
        super().__init__(nbins=7, steps=[1, 2, 2.5, 5, 10], integer=scale == 1)
        self.scale = scale

    def tick_values(self, vmin: float, vmax: float) -> np.ndarray:
        return super().tick_values(vmin / self.scale, vmax / self.scale) * self.scale


def bare(ax: Axes) -> None:
    """Leave only the names of the axes: no frame, no ticks."""
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
