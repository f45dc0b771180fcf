"""Bars in rows: pieces end to end, or spans of time in lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Annotation
from matplotlib.transforms import ScaledTranslation

from ..units import decimal_bytes
from . import charts
from .style import CENTRED, FAINT, GROUND, INK, RANK_COLORS, SMALL, WIDTH, new_figure, tint

if TYPE_CHECKING:
    from ..memory import Memory

    Parts = Memory | Mapping[str, float]

Span = tuple[str, float, float]  # label, start, end
Row = Mapping[str, float] | Sequence[Span]

#: One colour for each part of memory, in the order of `memory.PARTS`, the same in every figure.
PART_COLORS = {
    "parameters": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73", "activations": "#CC79A7",
    "buffers": "#999999",
}
_TOO_MUCH = "#B33C00"


def bars(
    rows: Mapping[str, Row], colors: Mapping[str, str], title: str, xlabel: str, *, head: float = 1.15,
    key: bool = True, **look: object,
) -> Figure:
    """Draw bars as `draw_bars` does, under a title of `head` inches and, if asked for, the `key` of the colours."""
    rows = {fill(name, 34): row for name, row in rows.items()}
    lines = sum(1 + 0.45 * name.count("\n") for name in rows)
    figure, (ax,) = new_figure(size=(WIDTH, head + 0.35 * lines), title=title)
    if key:
        legend(ax, colors, hatches=look.get("hatches"))
    draw_bars(ax, rows, colors, xlabel, **look)
    return figure


def draw_bars(
    ax: Axes, rows: Mapping[str, Row], colors: Mapping[str, str], xlabel: str, *, scale: float = 1.0,
    height: float = 0.72, room: float = 1.05, hatches: Mapping[str, str] | None = None,
    inside: Callable[[str, float, float], str] | None = None, behind: Sequence[str] = (), weight: str = "bold",
) -> None:
    """Draw one bar for each row, the first on top, in pieces of the colours of their labels.

    A row is a dict of label to size, end to end, or a list of (label, start, end), all multiplied by `scale`. A bar is
    `height` of its row, and the axis `room` times the longest row. `hatches` tell labels apart whose colours are
    alike. `inside` (label, size, end of the row) returns what is written into a piece if there is room; `behind` is
    written at the ends of the rows, in letters of that `weight`.
    """
    lanes = [end_to_end(row) if isinstance(row, Mapping) else row for row in rows.values()]
    ends = [max((end for *_, end in lane), default=0.0) for lane in lanes]
    for y, lane in enumerate(lanes):
        for label, start, end in lane:
            ax.barh(y, scale * (end - start), left=scale * start, height=height, color=tint(colors[label]),
                    edgecolor=colors[label], hatch=(hatches or {}).get(label))
    name_rows(ax, rows)
    ax.set(xlabel=xlabel, xlim=(0, room * scale * max(ends) or 1.0))
    if inside:
        ax.figure.draw_without_rendering()
        for y, lane in enumerate(lanes):
            for label, start, end in lane:
                write_inside(ax, y, inside(label, end - start, ends[y]), scale * start, scale * end)
    for y, text in enumerate(behind):
        write_behind(ax, y, text, scale * ends[y], fontweight=weight)


def end_to_end(parts: Mapping[str, float]) -> list[Span]:
    """Return a span for each part that is not 0, each from where the one before ends."""
    spans: list[Span] = []
    for part, size in parts.items():
        if size:
            start = spans[-1][2] if spans else 0.0
            spans.append((part, start, start + size))
    return spans


def name_rows(ax: Axes, names: Iterable[str]) -> None:
    """Make the y axis one of rows, the first on top."""
    names = list(names)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.45, -0.55)
    ax.tick_params(axis="y", length=0)


def write_inside(ax: Axes, y: int, text: str, start: float, end: float, rotation: float = 0) -> bool:
    """Write `text` into the bar of row `y` if it has room there and say whether; the layout must be settled."""
    wide, high = charts.points_per_unit(ax)
    label = ax.text((start + end) / 2, y, text, fontsize=SMALL, rotation=rotation, **CENTRED)
    box, scale = label.get_window_extent(), 72 / ax.figure.dpi
    fits = box.width * scale <= (end - start) * wide - 3 and box.height * scale <= 0.78 * high
    if not fits:
        label.remove()
    return fits


def write_behind(ax: Axes, y: int, text: str, end: float, **look: object) -> Annotation:
    """Write `text` behind the bar of row `y` that ends at `end`."""
    return charts.beside(ax, text, (end, y), (5, 0), **{"va": "center", "fontweight": "bold"} | look)


def legend(ax: Axes, colors: Mapping[str, str], above: float = 0, hatches: Mapping[str, str] | None = None) -> None:
    """Tell what colours mean, `above` points over the upper edge of `ax`; nothing where there are none."""
    patches = [Patch(facecolor=tint(color), edgecolor=color, label=name, hatch=(hatches or {}).get(name))
               for name, color in colors.items()]
    if patches:
        place = ax.transAxes + ScaledTranslation(0, above / 72, ax.figure.dpi_scale_trans)
        ax.legend(handles=patches, ncols=min(6, len(patches)), loc="lower left", bbox_to_anchor=(0, 1), frameon=False,
                  bbox_transform=place, columnspacing=1.2, handlelength=1.2, borderaxespad=0.2)


def parts_of(memory: Parts) -> dict[str, float]:
    """Return bytes by part, in the order of `PART_COLORS`."""
    given = memory if isinstance(memory, Mapping) else memory.parts()
    return {part: float(given.get(part, 0)) for part in PART_COLORS}


def memory_bars(rows: Mapping[str, Parts], title: str, limit: Mapping[str, float] | None = None) -> Figure:
    """Draw bytes by part, one stacked bar for each row with its total at the end.

    Each `limit`, such as a GPU's memory, is a vertical line; totals above a single one are coloured. A limit that is
    more than three times as large as every bar is only told.
    """
    table = {name: parts_of(memory) for name, memory in rows.items()}
    limits, totals = limit or {}, [sum(row.values()) for row in table.values()]
    longest = max(totals) or 1.0
    near = {name: size for name, size in limits.items() if size <= 3 * longest}
    right = max([longest, *near.values()])
    shown = {part: color for part, color in PART_COLORS.items() if any(row[part] for row in table.values())}
    figure = bars(table, shown, title, "", head=1.15 + 0.2 * bool(near), room=1.12 * right / longest,
                  inside=lambda part, size, total: decimal_bytes(size))
    (ax,) = figure.axes
    charts.byte_axis(ax.xaxis, right, "memory of one rank")
    if far := [f"{name} {decimal_bytes(size)}" for name, size in limits.items() if name not in near]:
        ax.set_xlabel(f"{ax.get_xlabel()}\n{fill('far beyond the right edge: ' + ', '.join(far), 100)}")
    for y, total in enumerate(totals):
        over = len(limits) == 1 and total > min(limits.values())
        _write_total(ax, y, total, sorted(limits.values()), _TOO_MUCH if over else INK)
    if near:
        legend(ax, shown, above=12 * _draw_limits(ax, near))
    return figure


def _write_total(ax: Axes, y: int, total: float, limits: Sequence[float], color: str) -> None:
    """Write a total behind its bar, clear of the lines of the limits."""
    text = write_behind(ax, y, decimal_bytes(total), total, color=color, bbox=GROUND)
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
    return max(rows) + 1


def loader_bars(
    rows: Mapping[str, float], title: str, baseline: str, *, strong: Sequence[str] = (),
    times: Mapping[str, float] | None = None, unit: str = "samples/s",
) -> Figure:
    """Draw a rate for each loader, and how many times the rate of the `baseline`, drawn grey, it is.

    `strong` rows have another colour. `times` says how many times, where that is known better than from the rates.
    """
    times = times or {name: rate / rows[baseline] for name, rate in rows.items()}
    colors = {name: RANK_COLORS[name in strong] for name in rows} | {baseline: FAINT}
    told = [f"{rate:,.0f}  {times[name]:.1f}×" for name, rate in rows.items()]
    lanes = {name: {name: rate} for name, rate in rows.items()}
    figure = bars(lanes, colors, title, unit, head=0.95, key=False, room=1.2, behind=told, weight="normal")
    charts.format_ticks(figure.axes[0].xaxis, "{:,.0f}")
    return figure
