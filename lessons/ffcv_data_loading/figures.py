"""Data loading in pictures: a file to scale, pages that an order reads, what loading and a step wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, groupby
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from course_utils.draw import charts
from course_utils.draw.bars import bars
from course_utils.draw.lanes import step_split as step_split
from course_utils.draw.style import CENTRED, FAINT, RANK_COLORS, SMALL, WIDTH, new_figure, tint
from course_utils.units import format_bytes

#: One colour for each part of loading, those of a step as in `draw.lanes.step_split`.
LOADING_COLORS = {
    "read": "#999999", "decode": "#009E73", "augment": "#E69F00", "copy": "#CC79A7", "load": "#56B4E9",
    "step": "#0072B2", "wait": "#D55E00",
}
_TINY = 0.012  # of a row: what is narrower is enlarged


class _Block(NamedTuple):
    """Neighbouring segments of one label."""

    label: str
    segments: tuple[tuple[int, int], ...]  # (start, size)

    @property
    def start(self) -> int:
        return self.segments[0][0]

    @property
    def end(self) -> int:
        return sum(self.segments[-1])

    @property
    def words(self) -> str:
        each = {size for _, size in self.segments}
        if len(self.segments) == 1:
            return f"{self.label}, {format_bytes(*each)}"
        size = format_bytes(*each) if len(each) == 1 else f"{format_bytes(sum(s for _, s in self.segments))} in all"
        return f"{len(self.segments):,} x {self.label}, {size}"


class _Row(NamedTuple):
    """A stretch of the file: its first and last byte, its blocks, and the row of which it enlarges a part."""

    start: int
    end: int
    blocks: list[_Block]
    above: int | None


def file_layout(segments: Sequence[tuple[str, int, int]], title: str) -> Figure:
    """Draw a file (label, start, size), to scale, with neighbours too small to see enlarged below.

    Each row is to scale in itself and says which bytes it shows. Segments of one label have one colour; the label is
    written into the segment where there is room, else above the row. What no segment covers is left white.
    """
    segments = [(label, int(start), int(size)) for label, start, size in segments]
    rows = _rows(segments)
    colors = charts.in_turn(label for label, *_ in segments)
    figure, axes = new_figure(len(rows), 1, size=(WIDTH, 0.35 + 1.15 * len(rows)), title=title)
    for ax, row in zip(axes, rows, strict=True):
        _draw_row(ax, row, colors)
    figure.draw_without_rendering()
    for i, (ax, row) in enumerate(zip(axes, rows, strict=True)):
        enlarged = {block for other in rows if other.above == i for block in other.blocks}
        _name_blocks(ax, [block for block in row.blocks if block not in enlarged], colors)
        if row.above is None:
            continue
        for at, corner in ((row.start, 0), (row.end, 1)):
            look = {"color": FAINT, "linewidth": 0.9, "linestyle": (0, (3, 2)), "zorder": 0}
            ends = ((at, -0.5), (corner, 1), axes[row.above].transData, ax.transAxes)
            figure.add_artist(ConnectionPatch(*ends, **look))
        times = (rows[0].end - rows[0].start) / (row.end - row.start)
        charts.beside(ax, f"enlarged {times:,.0f} times", (0.5, 0), (0, -4), xycoords="axes fraction", fontsize=SMALL,
                      ha="center", va="top")
    return figure


def _rows(segments: Sequence[tuple[str, int, int]]) -> list[_Row]:
    """Return the whole file, then each run of blocks too small to see in a row before it."""
    blocks = [_Block(label, tuple((start, size) for _, start, size in group))
              for label, group in groupby(segments, lambda segment: segment[0])]
    rows = [_Row(0, blocks[-1].end, blocks, None)]
    for i, row in enumerate(rows):  # which grows
        wide = row.end - row.start
        run: list[_Block] = []
        for block in [*row.blocks, None]:
            if block and block.end - block.start < _TINY * wide and block.end - (run or [block])[0].start < 0.05 * wide:
                run.append(block)
                continue
            if len(run) > 1:
                rows.append(_Row(run[0].start, run[-1].end, run, i))
            run = []
    return rows


def _draw_row(ax: Axes, row: _Row, colors: Mapping[str, str]) -> None:
    for block in row.blocks:
        color = colors[block.label]
        ax.broken_barh(block.segments, (-0.5, 1), facecolor=tint(color), edgecolor=color, linewidth=0.7)
    ax.set(xlim=(row.start, row.end), ylim=(-0.5, 0.5), yticks=[])
    ax.spines[:].set_visible(False)
    ax.spines[["left", "right", "top", "bottom"]].set(visible=True, color=FAINT, linewidth=0.6)
    ax.set_xticks([row.start, row.end], [f"byte {row.start:,}", f"byte {row.end:,}"], fontsize=SMALL)
    ax.tick_params(axis="x", length=3)
    for tick, side in zip(ax.get_xticklabels(), ("left", "right"), strict=True):
        tick.set_horizontalalignment(side)
    ax.set_title(" ", fontsize=SMALL)  # room for names


def _name_blocks(ax: Axes, blocks: Sequence[_Block], colors: Mapping[str, str]) -> None:
    """Write each block's name into it where there is room, else above it, none over another."""
    wide, _ = charts.points_per_unit(ax)
    left, right = ax.get_xlim()
    outside = []
    for block in blocks:
        middle, room = (block.start + block.end) / 2, (block.end - block.start) * wide
        if 5.4 * len(block.words) < room:
            ground = {"facecolor": tint(colors[block.label]), "edgecolor": "none", "pad": 1.5}
            ax.text(middle, 0, block.words, bbox=ground if len(block.segments) > 1 else None, fontsize=SMALL, **CENTRED)
        else:
            outside.append(((middle - left) * wide, block))
    width, end = (right - left) * wide, 0.0
    lengths = [5.2 * len(block.words) for _, block in outside]
    for i, (at, block) in enumerate(outside):
        after = sum(length + 12 for length in lengths[i + 1 :])
        start = max(end, min(at - lengths[i] / 2, width - lengths[i] - after))
        end = start + lengths[i] + 12
        line = {"arrowstyle": "-", "color": colors[block.label], "shrinkB": 0}
        charts.beside(ax, block.words, (at / width, 1), (start + lengths[i] / 2 - at, 12), xycoords="axes fraction",
                      fontsize=SMALL, arrowprops=line, **CENTRED)


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
    figure = bars(shares, colors, title, "share of the time", room=1.14, behind=[charts.duration(t) for t in totals],
                  inside=lambda part, share, whole: f"{share:.0%}")
    figure.axes[0].set_xticks([0, 0.25, 0.5, 0.75, 1])
    figure.axes[0].xaxis.set_major_formatter(PercentFormatter(1))
    return figure
