"""What every figure shares: palette, style, sizes, direct labels."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from ..costs import format_bytes

#: Okabe and Ito's colour-blind-safe palette, in an order that keeps neighbours apart.
RANK_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
MARKERS = "osD^vP*X"
INK, FAINT = "#222222", "#AAAAAA"
STYLE = {
    "figure.dpi": 110, "savefig.dpi": "figure", "figure.constrained_layout.use": True,
    "font.size": 9.5, "axes.titlesize": 10.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False, "axes.titlelocation": "left",
    "text.color": INK, "axes.labelcolor": INK, "axes.prop_cycle": plt.cycler(color=RANK_COLORS[:6]),
}  # fmt: skip
plt.rcParams.update(STYLE)


def rank_color(rank: int) -> str:
    """Return the colour of `rank`, the same in every figure of the course."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def tint(color: str) -> tuple[float, ...]:
    return tuple(0.5 + 0.5 * channel for channel in to_rgb(color))


def new_figure(*panels: int, size: tuple[float, float], **kwargs) -> tuple[Figure, np.ndarray]:
    figure, axes = plt.subplots(*panels, figsize=size, squeeze=False, **kwargs)
    plt.close(figure)
    return figure, axes[0]


def label_lines(ax: Axes, labels: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each label at the right end of its line, moved apart where two would overlap."""
    ax.figure.draw_without_rendering()  # settles limits and layout, also where the figure has no canvas of its own
    height, scale = 12.0, 72 / ax.figure.dpi
    ordered = sorted(labels.items(), key=lambda item: item[1][1])
    wanted = [ax.transData.transform((x, y))[1] * scale for _, (x, y, _) in ordered]
    placed = [max(y + height * (i - j) for j, y in enumerate(wanted[: i + 1])) for i in range(len(wanted))]
    room = ax.bbox.y1 * scale - height / 2
    placed = [min(y, room - height * (len(placed) - 1 - i)) for i, y in enumerate(placed)]
    for (text, (x, y, color)), at, old in zip(ordered, placed, wanted, strict=True):
        ax.annotate(text, (x, y), (6, at - old), textcoords="offset points", va="center", color=color,
                    fontweight="bold")  # fmt: skip


def size_axis(ax: Axes, sizes, label: str = "message size S") -> None:
    """Make the x axis one of bytes: logarithmic, with a tick at every third power of two or so, and a light grid."""
    ticks = [sizes[0]]
    for size in sizes:
        if size >= 8 * ticks[-1]:
            ticks.append(size)
    ax.set(xscale="log", xlabel=label)
    ax.set_xticks(ticks)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.grid(True, color="#E5E5E5", linewidth=0.7)
