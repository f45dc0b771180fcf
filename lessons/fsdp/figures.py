"""Sharded training in pictures: a step of one rank in lanes with what it has gathered, and a mesh of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_utils.draw import charts
from course_utils.draw.bars import PART_COLORS, Span, draw_bars, legend, write_inside
from course_utils.draw.bars import memory_bars as memory_bars
from course_utils.draw.style import CENTRED, INK, RANK_COLORS, SMALL, WIDTH, new_figure, tint
from course_utils.units import decimal_bytes


def shard_timeline(
    lanes: Mapping[str, Sequence[Span]], held: Sequence[tuple[float, float]], title: str, order: bool = False
) -> Figure:
    """Draw a step of one rank, one row of bars for each lane, and below it the bytes of gathered parameters.

    Spans (label, start, end) and sizes (from when on, bytes) are in seconds, or by `order` in numbers of events. Equal
    labels have equal colours in all lanes. A label is written into its bar where there is room, or its last word, such
    as the 3 of "block 3"; up to eight that nowhere have room for the whole are told above.
    """
    spans = [span for lane in lanes.values() for span in lane]
    first = min([start for _, start, _ in spans] + [when for when, _ in held])
    last = max([end for *_, end in spans] + [when for when, _ in held])
    unit, scale = ("events, in order", 1.0) if order else ("time (ms)", 1e3) if last >= 1e-3 else ("time (µs)", 1e6)
    lanes = {fill(name, 20): [(label, scale * start, scale * end) for label, start, end in lane]
             for name, lane in lanes.items()}
    heights = [0.42 * len(lanes) + 0.2, 1.3] if held else [1.0]
    size = (WIDTH, 1.0 + 0.42 * len(lanes) + 1.5 * bool(held))
    figure, axes = new_figure(len(heights), 1, size=size, title=title, sharex=True, height_ratios=heights)
    colors = charts.in_turn(label for label, *_ in sorted(spans, key=lambda span: span[1]))
    draw_bars(axes[0], lanes, colors, "", height=0.78)
    axes[0].set_xlim(scale * first, scale * (last + 0.003 * (last - first)))  # the last bar is not cut
    axes[-1].set_xlabel(unit)
    if order:
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if held:
        _draw_held(axes[-1], [(scale * when, size) for when, size in held], scale * last)
    figure.draw_without_rendering()
    if _write_labels(axes[0], lanes) != colors.keys() and len(colors) <= 8:
        legend(axes[0], colors)
    return figure


def _write_labels(ax: Axes, lanes: Mapping[str, Sequence[Span]]) -> set[str]:
    """Write into each bar its label, level or upright, else the last word of it; return the labels written whole."""
    labels = {label for lane in lanes.values() for label, *_ in lane}
    short = {label: label.replace(".", " ").split()[-1] for label in labels}
    told_apart = len(set(short.values())) == len(short)
    whole = set()
    for y, lane in enumerate(lanes.values()):
        for label, start, end in lane:
            if any(write_inside(ax, y, label, start, end, rotation) for rotation in (0, 90)):
                whole.add(label)
            elif told_apart:
                write_inside(ax, y, short[label], start, end)
    return whole


def _draw_held(ax: Axes, held: Sequence[tuple[float, float]], last: float) -> None:
    """Draw steps of bytes over time and write the largest at its place."""
    x, y = [when for when, _ in held] + [last], [size for _, size in held] + [held[-1][1]]
    ax.fill_between(x, y, step="post", facecolor=tint(PART_COLORS["buffers"]), linewidth=0)
    ax.step(x, y, where="post", color="#666666", linewidth=1.2)
    most = max(y)
    at = y.index(most)
    left, right = ax.get_xlim()
    late = x[at] > left + 0.8 * (right - left)
    shift, side = (-2, "right") if late else (2, "left")
    charts.beside(ax, f"most: {decimal_bytes(most)}", (x[at], most), (shift, 3), ha=side, fontweight="bold",
                  fontsize=SMALL)
    ax.set_ylim(0, 1.28 * (most or 1))
    charts.byte_axis(ax.yaxis, most or 1.0, "gathered")


def who_holds_what(moments: Mapping[str, Sequence[str]], units: Sequence[str], ranks: int, title: str) -> Figure:
    """Draw at each moment, one below the other, which weights each rank holds; `moments` lists what is gathered.

    A row for each rank, and for each unit as many pieces as ranks. A piece has the colour of the rank that stores it:
    full where it is stored, pale where it is a gathered copy, and it is empty where a rank does not have it.
    """
    figure, axes = new_figure(len(moments), 1, size=(WIDTH, 0.3 + (0.5 + 0.17 * ranks) * len(moments)), title=title)
    for ax, (moment, gathered) in zip(axes, moments.items(), strict=True):
        for x, unit in enumerate(units):
            for rank in range(ranks):
                for piece in range(ranks):
                    color = RANK_COLORS[piece % len(RANK_COLORS)]
                    face = color if piece == rank else tint(color) if unit in gathered else "white"
                    frame = color if piece == rank or unit in gathered else "#DDDDDD"
                    left = x + 0.9 * piece / ranks
                    charts.cell(ax, left, rank + 0.1, 0.9 / ranks, 0.8, frame, facecolor=face, linewidth=0.7)
        ax.set(xlim=(-0.05, len(units)), ylim=(ranks, 0))
        ax.set_title(moment, fontsize=SMALL + 0.5)
        ax.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)], fontsize=SMALL)
        ax.set_xticks([x + 0.45 for x in range(len(units))], units, fontsize=SMALL)
        charts.bare(ax)
    return figure


def mesh_picture(
    grid: Sequence[Sequence[int]], names: tuple[str, str], title: str, nodes: Mapping[int, int]
) -> Figure:
    """Draw a mesh of ranks: down a column runs its first dimension, along a row its second, by their `names`.

    Ranks of one column have one colour: they hold the same shard where the second dimension shards. Ranks of a row
    that are of one node share a frame. Of more than eight rows or columns the first three and the last are drawn.
    """
    rows, columns = charts.few(len(grid)), charts.few(len(grid[0]))
    size = (max(5.0, 1.6 + 1.05 * len(columns)), 1.3 + 0.72 * len(rows))
    figure, (ax,) = new_figure(size=size, title=title)
    for y, row in enumerate(rows):
        places = {x: None if None in (row, column) else grid[row][column] for x, column in enumerate(columns)}
        for node, run in groupby(places, lambda x, places=places: nodes.get(places[x])):
            left, *_, right = [*run] * 2
            if node is not None:
                frame = {"facecolor": "#EEEEEE", "linewidth": 1.4}
                charts.cell(ax, left - 0.46, y - 0.46, right - left + 0.92, 0.92, INK, **frame)
        for x, rank in places.items():
            if rank is None:
                ax.text(x, y, "⋮" if row is None else "…", fontsize=12, **CENTRED)
                continue
            charts.cell(ax, x - 0.38, y - 0.36, 0.76, 0.72, RANK_COLORS[columns[x] % 8], zorder=2)
            ax.text(x, y - 0.12, f"rank {rank}", fontweight="bold", **CENTRED)
            ax.text(x, y + 0.2, f"node {nodes[rank]}", fontsize=SMALL, **CENTRED)
    ax.set(xlim=(-0.62, len(columns) - 0.38), ylim=(len(rows) - 0.38, -0.62))
    ax.set_xticks(range(len(columns)), ["" if column is None else str(column) for column in columns])
    ax.set_yticks(range(len(rows)), ["" if row is None else str(row) for row in rows])
    ax.xaxis.set_label_position("top")
    ax.xaxis.tick_top()
    ax.set_xlabel(f"{names[1]} →  ({len(grid[0])})")
    ax.set_ylabel(f"← {names[0]}  ({len(grid)})")
    charts.bare(ax)
    return figure
