"""What the memory of ranks holds: a step over time, activations over length, who holds which part of the state.

Sizes are decimal, as on the data sheets of GPUs and in the ZeRO paper: 1 GB is 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from course_utils.draw import charts
from course_utils.draw.bars import PART_COLORS, end_to_end, legend, parts_of
from course_utils.draw.bars import memory_bars as memory_bars
from course_utils.draw.panels import Panel, dots, panels
from course_utils.draw.style import CENTRED, GROUND, INK, MARKERS, SMALL, new_figure, tint
from course_utils.units import decimal_bytes

if TYPE_CHECKING:
    from course_utils.draw.bars import Parts

_STATES = ("parameters", "gradients", "optimizer")


def memory_over_time(history: Sequence[tuple[str, Parts]], title: str) -> Figure:
    """Draw bytes by part at each mark of a step, in order and stacked, with the largest total marked.

    Neighbours with equal labels are one phase, labelled once.
    """
    sizes = [parts_of(memory) for _, memory in history]
    phases = [(label, [i for i, _ in group]) for label, group in groupby(enumerate(history), lambda item: item[1][0])]
    upright = sum(max(len(word) for word in label.split()) + 2 for label, _ in phases) > 110
    figure, (ax,) = new_figure(size=(8.6, 4.0 if upright else 3.4), title=title)
    edges, top, bands = np.arange(len(history) + 1) - 0.5, np.zeros(len(history)), {}
    for part, color in PART_COLORS.items():
        if any(row[part] for row in sizes):
            below, top = top, top + [row[part] for row in sizes]
            bands[part] = (below, top)
            shown = np.where(top > below, top, np.nan)  # no line where there is nothing
            ax.stairs(shown, edges, baseline=below, fill=True, facecolor=tint(color), edgecolor=color, linewidth=0.8)
    peak = float(max(top)) or 1.0
    ax.set(xlim=(edges[0], edges[-1]), ylim=(0, 1.14 * peak))
    charts.byte_axis(ax.yaxis, peak, "memory of one rank")
    _phase_axis(ax, phases, upright, lines=len(history) > len(phases))
    figure.draw_without_rendering()
    names = [_name_band(ax, part, *band) for part, band in bands.items()]
    if None in names:  # then all of them in one place
        for name in filter(None, names):
            name.remove()
        legend(ax, {part: PART_COLORS[part] for part in bands})
    at = int(np.argmax(top))
    side = "left" if at < 0.15 * len(top) else "right" if at > 0.85 * len(top) else "center"
    x, shift = {"left": (edges[at], 4), "right": (edges[at + 1], 0), "center": (at, 0)}[side]
    charts.beside(ax, f"peak {decimal_bytes(peak)}", (x, peak), (shift, 4), ha=side, fontweight="bold", bbox=GROUND)
    return figure


def _phase_axis(ax: Axes, phases: Sequence[tuple[str, list[int]]], upright: bool, lines: bool) -> None:
    """Label each phase below its middle, every other one or fewer where they are many, and draw lines between them."""
    shown = phases[:: -(-len(phases) // 45)]
    names = [label if upright else fill(label, max(6, 110 // len(shown))) for label, _ in shown]
    look = {"rotation": 60, "ha": "right", "va": "top", "rotation_mode": "anchor"} if upright else {}
    ax.set_xticks([sum(at) / len(at) for _, at in shown], names, fontsize=SMALL, **look)
    ax.tick_params(axis="x", length=0)
    for _, at in phases[1:] if lines else ():
        ax.axvline(at[0] - 0.5, color=INK, linewidth=0.6, linestyle=(0, (2, 2)))


def _name_band(ax: Axes, part: str, below: np.ndarray, top: np.ndarray) -> Text | None:
    """Write the name of a part where its band is thickest over the width of the name, if there is room."""
    wide, high = charts.points_per_unit(ax)
    columns = min(len(top), max(1, int(np.ceil((5.6 * len(part) + 6) / wide))))
    room = [(min(top[i : i + columns]) - max(below[i : i + columns]), i) for i in range(len(top) - columns + 1)]
    thick, start = max(room)
    if columns * wide < 5.6 * len(part) or thick * high < 12:
        return None
    middle = (min(top[start : start + columns]) + max(below[start : start + columns])) / 2
    return ax.text(start + (columns - 1) / 2, middle, part, fontweight="bold", **CENTRED)


def memory_over_length(
    lengths: Sequence[int], measured: Mapping[str, Sequence[float]], formula: Mapping[str, Sequence[float]], title: str
) -> Figure:
    """Draw bytes of activations over tokens in a sequence: points measured, lines by formula, by name."""
    colors = charts.in_turn([*measured, *formula])
    points = [dots(lengths, sizes, colors[name], 6.5, marker=marker, markeredgecolor="white")
              for (name, sizes), marker in zip(measured.items(), MARKERS, strict=False)]
    figure = panels(lengths, Panel(title, "activations", formula, colors=colors, look={"linewidth": 1.8}, log=True,
                                   above=points), counts="tokens in a sequence")
    axis = figure.axes[0].yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda size, _: decimal_bytes(size)))
    axis.set_minor_locator(NullLocator())
    return figure


def partition_picture(stages: Mapping[str, Sequence[Parts]], title: str) -> Figure:
    """Draw which parameters, gradients and optimizer states each rank holds, one panel for each stage.

    A column is a rank, its height the whole training state; what the rank holds is filled. The whole of a part is the
    most that any rank holds. Where all ranks together hold it about once, each is drawn at its place in rank order,
    else from the bottom. Of more than eight ranks the first three and the last are drawn.
    """
    table = {name: [parts_of(memory) for memory in ranks] for name, ranks in stages.items()}
    whole = {part: max(row[part] for ranks in table.values() for row in ranks) for part in _STATES}
    shown = {name: charts.few(len(ranks)) for name, ranks in table.items()}
    ratios = [max(3, len(columns)) for columns in shown.values()]
    width = 2.2 + 0.42 * sum(ratios) + 0.3 * len(ratios)
    figure, axes = new_figure(1, len(table), size=(width, 3.7), title=title, sharey=True, width_ratios=ratios)
    high = sum(whole.values())
    for ax, (name, ranks) in zip(axes, table.items(), strict=True):
        for part, bottom, end in end_to_end(whole):
            color, starts = PART_COLORS[part], _places([row[part] for row in ranks], whole[part])
            for x, rank in enumerate(shown[name]):
                if rank is not None:
                    frame = {"facecolor": "none", "edgecolor": tint(color), "linewidth": 0.8}
                    charts.cell(ax, x - 0.4, bottom, 0.8, end - bottom, color, **frame)
                    held = {"facecolor": color, "linewidth": 0.8 * bool(ranks[rank][part])}
                    charts.cell(ax, x - 0.4, bottom + starts[rank], 0.8, ranks[rank][part], color, **held)
        held = [sum(row[part] for part in _STATES) for row in ranks]
        least, most = decimal_bytes(min(held)), decimal_bytes(max(held))
        told = f"{most} a rank" if least == most else f"{least} to\n{most} a rank"
        ax.set_title(f"{fill(name, 16)}\n{told}", fontsize=9.5, loc="center")
        ax.set(xlim=(-0.6, len(shown[name]) - 0.4), ylim=(-0.01 * high, 1.02 * high), xlabel="rank")
        ax.set_xticks(range(len(shown[name])), ["…" if rank is None else str(rank) for rank in shown[name]])
        charts.bare(ax)
    _name_blocks(axes[0], whole, high)
    return figure


def _places(held: Sequence[float], whole: float) -> list[float]:
    """Return where in the whole each rank's bytes lie: one after the other if the ranks share it, else at the start."""
    shared = max(held) < 0.999 * whole and sum(held) <= 1.25 * whole
    ends = np.cumsum(held)
    return [max(0.0, min(end, whole) - size) if shared else 0.0 for end, size in zip(ends, held, strict=True)]


def _name_blocks(ax: Axes, whole: Mapping[str, float], high: float) -> None:
    """Write the name and bytes of each part to the left of `ax`, moved apart where two would overlap."""
    names = end_to_end(whole)
    middles = [(start + end) / 2 for _, start, end in names]
    for i in range(1, len(middles)):
        middles[i] = max(middles[i], middles[i - 1] + 0.11 * high)
    labels = [f"{part}\n{decimal_bytes(whole[part])}" for part, *_ in names]
    ax.set_yticks(middles, labels, fontweight="bold", fontsize=SMALL)
