"""Data loading in pictures: a file to scale, pages that an order reads, what loading and a step wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from course_utils.draw import charts
from course_utils.draw.bars import bars
from course_utils.draw.style import CENTRED, FAINT, RANK_COLORS, SMALL, WIDTH, new_figure, tint
from course_utils.units import format_bytes

#: One colour for each part of loading.
LOADING_COLORS = {
    "read": "#999999", "decode": "#009E73", "augment": "#E69F00", "copy": "#CC79A7", "load": "#56B4E9",
    "step": "#0072B2", "wait": "#D55E00",
}

Pieces = list[tuple[int, int]]  # start and size of neighbours of one label


def file_layout(segments: Sequence[tuple[str, int, int]], title: str) -> Figure:
    """Draw a file (label, start, size), to scale, and below it, enlarged, its first parts, too small to see."""
    blocks = [(label, [(int(start), int(size)) for _, start, size in group])
              for label, group in groupby(segments, lambda segment: segment[0])]
    whole = sum(blocks[-1][1][-1])
    small = [block for block in blocks if sum(block[1][-1]) < 0.01 * whole]
    part = sum(small[-1][1][-1])
    colors = charts.in_turn(label for label, _ in blocks)
    figure, axes = new_figure(2, 1, size=(WIDTH, 2.65), title=title)
    for ax, end in zip(axes, (whole, part), strict=True):
        for label, pieces in blocks:
            color = colors[label]
            ax.broken_barh(pieces, (-0.5, 1), facecolor=tint(color), edgecolor=color, linewidth=0.7)
        ax.set(xlim=(0, end), ylim=(-0.5, 0.5), yticks=[])
        ax.spines[["left", "right", "top", "bottom"]].set(visible=True, color=FAINT, linewidth=0.6)
        ax.set_xticks([0, end], ["byte 0", f"byte {end:,}"], fontsize=SMALL)
        ax.tick_params(axis="x", length=3)
        for tick, side in zip(ax.get_xticklabels(), ("left", "right"), strict=True):
            tick.set_horizontalalignment(side)
        ax.set_title(" ", fontsize=SMALL)  # room for names
    figure.draw_without_rendering()
    for ax, row in zip(axes, (blocks[len(small) :], small), strict=True):
        for label, pieces in row:
            _name(ax, label, pieces, colors[label])
    for at, corner in ((0, 0), (part, 1)):
        look = {"color": FAINT, "linewidth": 0.9, "linestyle": (0, (3, 2)), "zorder": 0}
        figure.add_artist(ConnectionPatch((at, -0.5), (corner, 1), axes[0].transData, axes[1].transAxes, **look))
    charts.beside(axes[1], f"enlarged {whole / part:,.0f} times", (0.5, 0), (0, -4), xycoords="axes fraction",
                  fontsize=SMALL, ha="center", va="top")
    return figure


def _name(ax: Axes, label: str, pieces: Pieces, color: str) -> None:
    """Write what neighbouring pieces are into them where there is room, else above them, away from the nearer edge."""
    sizes, (start, end) = [size for _, size in pieces], (pieces[0][0], sum(pieces[-1]))
    each = format_bytes(sizes[0]) if len(set(sizes)) == 1 else f"{format_bytes(sum(sizes))} in all"
    words = f"{len(pieces):,} x {label}, {each}" if len(pieces) > 1 else f"{label}, {each}"
    middle, (wide, _) = (start + end) / 2, charts.points_per_unit(ax)
    if 5.4 * len(words) < (end - start) * wide:
        ground = {"facecolor": tint(color), "edgecolor": "none", "pad": 1.5}
        ax.text(middle, 0, words, bbox=ground if len(pieces) > 1 else None, fontsize=SMALL, **CENTRED)
    else:
        right = middle > ax.get_xlim()[1] / 2
        line = {"arrowstyle": "-", "color": color, "shrinkB": 0}
        charts.beside(ax, words, (middle, 0.5), (-5 if right else 5, 12), fontsize=SMALL, arrowprops=line, va="center",
                      ha="right" if right else "left")


def page_accesses(
    orders: Mapping[str, Sequence[tuple[float, int]]], title: str, *, notes: Mapping[str, str] | None = None
) -> Figure:
    """Draw which page of a file each step reads (step, page), one panel an order, with a note below its name."""
    size = (1.4 + 3.1 * len(orders), 3.1)
    figure, axes = new_figure(1, len(orders), size=size, title=title, sharex=True, sharey=True)
    most = max(len(order) for order in orders.values())
    large = 5 if most <= 100 else 3 if most <= 600 else 2.2 if most <= 1500 else 1.6
    for ax, (name, order), color in zip(axes, orders.items(), RANK_COLORS, strict=False):
        ax.plot(*zip(*order, strict=True), "s", markersize=large, color=color, markeredgewidth=0)
        ax.set(xlabel="sample, in order of reading")
        ax.set_title("\n".join([name, *filter(None, [(notes or {}).get(name)])]), fontsize=9.5)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
    axes[0].set_ylabel("page of the file")
    return figure


def time_shares(rows: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Draw what share of its time each row spends on what, one bar of 100 % a row with its seconds at the end."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    spare = cycle(color for color in RANK_COLORS if color not in {LOADING_COLORS.get(part) for part in parts})
    colors = {part: LOADING_COLORS.get(part) or next(spare) for part in parts}
    totals = [sum(row.values()) for row in rows.values()]
    shares = {name: {part: seconds / total for part, seconds in row.items()}
              for (name, row), total in zip(rows.items(), totals, strict=True)}
    figure = bars(shares, colors, title, "share of the time", room=1.14, behind=list(map(charts.duration, totals)),
                  weight="normal", inside=lambda part, share, whole: f"{share:.0%}")
    figure.axes[0].set_xticks([0, 0.25, 0.5, 0.75, 1])
    figure.axes[0].xaxis.set_major_formatter(PercentFormatter(1))
    return figure
