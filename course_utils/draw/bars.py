"""Bars: bytes of one rank by part, and rates beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..units import decimal_bytes
from . import charts
from .style import FAINT, GROUND, INK, RANK_COLORS, SMALL, new_figure, tint

if TYPE_CHECKING:
    from ..memory import Memory

    Parts = Memory | Mapping[str, float]

#: One colour for each part of memory, in the order of `memory.PARTS`, the same in every figure.
PART_COLORS = {
    "parameters": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73", "activations": "#CC79A7",
    "buffers": "#999999",
}

_TOO_MUCH = "#B33C00"


def parts_of(memory: Parts) -> dict[str, float]:
    """Return bytes by part, in the order of `PART_COLORS`.
    """
    given = dict(memory) if isinstance(memory, Mapping) else memory.parts()
    if unknown := set(given) - set(PART_COLORS):
        raise ValueError(f"no part of memory is called {sorted(unknown)[0]!r}; allowed are {', '.join(PART_COLORS)}")
    return {part: float(given.get(part, 0)) for part in PART_COLORS}


def memory_bars(
    rows: Mapping[str, Parts], title: str, limit: tuple[str, float] | Mapping[str, float] | None = None
) -> Figure:
    """Draw bytes by part, one stacked bar for each row with its total at the end.

    Parameters
    ----------
    rows : dict of row name to Memory, or to dict of part to bytes
    title : str
    limit : (name, bytes) or dict of name to bytes, optional
        Sizes to hold against, such as a GPU's memory: vertical lines. Totals above a single one are coloured. A limit
        that is more than three times as large as every bar is only told.
    """
    table = {fill(name, 30): parts_of(memory) for name, memory in rows.items()}
    limits = dict(limit if isinstance(limit, Mapping) else [limit] if limit else [])
    longest = max(sum(row.values()) for row in table.values()) or 1.0
    near = {name: size for name, size in limits.items() if size <= 3 * longest}
    right = max([longest, *near.values()])
    size = (8.6, 1.25 + 0.36 * charts.lines_of(table) + 0.2 * bool(near))
    figure, (ax,) = new_figure(size=size, title=title)
    charts.stacked_bars(ax, table, PART_COLORS)
    ax.set_xlim(0, 1.12 * right)
    charts.byte_axis(ax.xaxis, right, "memory of one rank")
    if far := [f"{name} {decimal_bytes(size)}" for name, size in limits.items() if name not in near]:
        ax.set_xlabel(f"{ax.get_xlabel()}\n{fill('far beyond the right edge: ' + ', '.join(far), 100)}")
    figure.draw_without_rendering()
    for y, row in enumerate(table.values()):
        _write_sizes(ax, y, row, sorted(limits.values()))
    rows_of_names = _draw_limits(ax, near)
    shown = {part: color for part, color in PART_COLORS.items() if any(row[part] for row in table.values())}
    charts.legend(ax, shown, above=12 * rows_of_names)
    return figure


def _write_sizes(ax: Axes, y: int, row: Mapping[str, float], limits: Sequence[float]) -> None:
    """Write each part's bytes into its piece where there is room, and the total behind the bar, clear of the limits."""
    for _, start, end in charts.end_to_end(row):
        charts.write_inside(ax, y, decimal_bytes(end - start), start, end)
    total = sum(row.values())
    over = len(limits) == 1 and total > limits[0]
    text = charts.write_behind(ax, y, decimal_bytes(total), total, color=_TOO_MUCH if over else INK, bbox=GROUND)
    wide, _ = charts.points_per_unit(ax)
    length, start = text.get_window_extent().width * 72 / ax.figure.dpi, 5.0
    for limit in limits:
        if start - 3 < (limit - total) * wide < start + length:
            start = (limit - total) * wide + 5
    text.set_position((start, 0))


def _draw_limits(ax: Axes, limits: Mapping[str, float]) -> int:
    """Draw a line for each limit, its name above it, raised where it would meet another; return the rows of names."""
    names = [(size, f"{name} {decimal_bytes(size)}") for name, size in sorted(limits.items(), key=lambda item: item[1])]
    rows = charts.rows_for(ax, names)
    for (size, text), row in zip(names, rows, strict=True):
        ax.axvline(size, color=INK, linewidth=1, linestyle=(0, (3, 2)), zorder=0.5)
        charts.beside(ax, text, (size, 1), (2, 3 + 12 * row), xycoords=("data", "axes fraction"), fontsize=SMALL)
    return max(rows, default=-1) + 1


def loader_bars(
    rows: Mapping[str, float], title: str, baseline: str | None = None, *, strong: Sequence[str] = (),
    times: Mapping[str, float] | None = None, unit: str = "samples/s",
) -> Figure:
    """Draw a rate for each loader, with how many times the rate of `baseline` it is.

    Parameters
    ----------
    rows : dict of name to samples per second
    title : str
    baseline : str, optional
        The row that is 1.0×; drawn grey.
    strong : list of str
        Rows in another colour, such as those of one library.
    times : dict of name to float, optional
        How many times the rate of `baseline` each row is, where that is known better than from the rates.
    unit : str
    """
    times = times or {name: rate / rows[baseline] for name, rate in rows.items() if baseline}
    names = [fill(name, 34) for name in rows]
    figure, (ax,) = new_figure(size=(8.6, 0.95 + 0.33 * charts.lines_of(names)), title=title)
    for y, (name, rate) in enumerate(rows.items()):
        color = FAINT if name == baseline else RANK_COLORS[1] if name in strong else RANK_COLORS[0]
        ax.barh(y, rate, height=0.7, color=tint(color), edgecolor=color)
        factor = f"  {times[name]:.1f}×" if baseline else ""
        charts.write_behind(ax, y, f"{rate:,.0f}{factor}", rate, fontweight="bold" if name in strong else "normal")
    charts.name_rows(ax, names)
    ax.set(xlim=(0, 1.2 * max(rows.values())), xlabel=unit)
    charts.format_ticks(ax.xaxis, "{:,.0f}")
    return figure
