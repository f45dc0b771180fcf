"""What figures are built of: lines with names at their ends, spans in lanes, stacked bars, and the axes for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, log2

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from ..units import byte_unit, format_bytes
from .style import CENTRED, DASHED, MARKERS, RANK_COLORS, SMALL, naming, tint

Ends = dict[str, tuple[float, float, str]]  # of lines, by name: x, y, colour
Span = tuple[str, float, float]  # label, start, end


# Lines with names at their ends


def draw_lines(
    ax: Axes, x: Sequence[float], lines: Mapping[str, Sequence[float]], *, scale: float = 1.0,
    colors: Mapping[str, str] | None = None, markers: float = 0, **look: object,
) -> Ends:
    """Draw a line for each name and return their ends, for `label_lines` once the axes are settled.

    Parameters
    ----------
    x : list of float
        The same for all lines.
    lines : dict of name to list of float
        Multiplied by `scale`.
    colors : dict of name to colour, optional
        By default those of the palette in turn.
    markers : float
        Size of the markers, a different one for each line; none if 0.
    look : optional
        Arguments of ``Axes.plot``.
    """
    ends: Ends = {}
    for i, (name, values) in enumerate(lines.items()):
        color, y = colors[name] if colors else RANK_COLORS[i % 6], np.multiply(values, scale)
        points = {"marker": MARKERS[i % 8], "markersize": markers} if markers else {}
        ax.plot(x, y, color=color, **points, **look)
        ends[name] = (x[-1], y[-1], color)
    return ends


def label_lines(ax: Axes, labels: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each label at the right end of its line, moved apart where two would overlap, then with a line to it."""
    ax.figure.draw_without_rendering()  # settles limits and layout, also where the figure has no canvas of its own
    height, scale = 12.0, 72 / ax.figure.dpi
    ordered = sorted(labels.items(), key=lambda item: item[1][1])
    wanted = [ax.transData.transform((x, y))[1] * scale for _, (x, y, _) in ordered]
    placed = [max(y + height * (i - j) for j, y in enumerate(wanted[: i + 1])) for i in range(len(wanted))]
    room = ax.bbox.y1 * scale - height / 2
    placed = [min(y, room - height * (len(placed) - 1 - i)) for i, y in enumerate(placed)]
    for (text, (x, y, color)), at, old in zip(ordered, placed, wanted, strict=True):
        moved = abs(at - old) > 5
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2, "relpos": (0, 0.5)}
        beside(ax, text, (x, y), (16 if moved else 6, at - old), va="center", arrowprops=line if moved else None,
               **naming(color))


def mark(ax: Axes, x: float, text: str) -> None:
    """Draw a dashed line upwards at `x`, with `text` at its upper end."""
    ax.axvline(x, **DASHED)
    beside(ax, text, (x, 1), (4, -4), xycoords=("data", "axes fraction"), va="top")


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


# Spans in lanes, and bars, which are spans end to end


def end_to_end(parts: Mapping[str, float]) -> list[Span]:
    """Return a span for each part that is not 0, each from where the one before ends."""
    spans: list[Span] = []
    for part, size in parts.items():
        if size:
            start = spans[-1][2] if spans else 0.0
            spans.append((part, start, start + size))
    return spans


def draw_spans(
    ax: Axes, lanes: Mapping[str, Iterable[Span]], colors: Mapping[str, str], *, scale: float = 1.0,
    height: float = 0.72, hatches: Mapping[str, str] | None = None,
) -> None:
    """Draw one lane of bars for each key, the first on top, a bar in the colour of its label.

    Starts and ends are multiplied by `scale`; `hatches` tell parts apart whose colours are alike.
    """
    for y, spans in enumerate(lanes.values()):
        for label, start, end in spans:
            ax.barh(y, scale * (end - start), left=scale * start, height=height, color=tint(colors[label]),
                    edgecolor=colors[label], hatch=(hatches or {}).get(label))
    name_rows(ax, lanes)


def stacked_bars(
    ax: Axes, rows: Mapping[str, Mapping[str, float]], colors: Mapping[str, str], *, scale: float = 1.0,
    hatches: Mapping[str, str] | None = None,
) -> None:
    """Draw one bar for each row, the first on top, its parts end to end in their colours."""
    draw_spans(ax, {name: end_to_end(row) for name, row in rows.items()}, colors, scale=scale, hatches=hatches)


def name_rows(ax: Axes, names: Iterable[str]) -> None:
    """Make the y axis one of rows, the first on top."""
    names = list(names)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.45, -0.55)
    ax.tick_params(axis="y", length=0)


def lines_of(names: Iterable[str]) -> float:
    """Return the height that rows of these names need, in rows of one line."""
    return sum(1 + 0.45 * name.count("\n") for name in names)


def write_inside(ax: Axes, y: int, text: str, start: float, end: float, rotation: float = 0) -> bool:
    """Write `text` into the bar of row `y` from `start` to `end` if it has room there; return whether it has.

    The layout must be settled.
    """
    wide, high = points_per_unit(ax)
    label = ax.text((start + end) / 2, y, text, fontsize=SMALL, rotation=rotation, **CENTRED)
    box, scale = label.get_window_extent(), 72 / ax.figure.dpi
    fits = box.width * scale <= (end - start) * wide - 3 and box.height * scale <= 0.78 * high
    if not fits:
        label.remove()
    return fits


def write_behind(ax: Axes, y: int, text: str, end: float, **look: object) -> Annotation:
    """Write `text` behind the bar of row `y` that ends at `end`."""
    return beside(ax, text, (end, y), (5, 0), **{"va": "center", "fontweight": "bold"} | look)


def legend(ax: Axes, colors: Mapping[str, str], above: float = 0, hatches: Mapping[str, str] | None = None) -> None:
    """Tell what colours mean, `above` points over the upper edge of `ax`; nothing where there are none."""
    patches = [Patch(facecolor=tint(color), edgecolor=color, label=name, hatch=(hatches or {}).get(name))
               for name, color in colors.items()]
    if patches:
        place = ax.transAxes + ScaledTranslation(0, above / 72, ax.figure.dpi_scale_trans)
        ax.legend(handles=patches, ncols=min(6, len(patches)), loc="lower left", bbox_to_anchor=(0, 1), frameon=False,
                  bbox_transform=place, columnspacing=1.2, handlelength=1.2, borderaxespad=0.2)


# Axes


def grid(ax: Axes) -> None:
    """Draw pale lines across, below what is drawn."""
    ax.yaxis.grid(True, color="#E5E5E5", linewidth=0.7)


def format_ticks(axis: Axis, form: str) -> None:
    """Write the numbers of an axis in `form`, such as ``"{:,.0f}"``."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))


def count_axis(ax: Axes, counts: Sequence[int], label: str = "ranks") -> None:
    """Make the x axis one of counts: logarithmic, with exactly these ticks, and a light grid."""
    ax.set(xscale="log", xlabel=label)
    ax.set_xticks(list(counts), [f"{n:,}" for n in counts])
    ax.xaxis.set_minor_locator(NullLocator())
    grid(ax)


def size_axis(ax: Axes, sizes: Sequence[float], label: str = "message size S") -> None:
    """Make the x axis one of bytes: logarithmic, with as many evenly spaced powers of two as fit, and a light grid."""
    low, high = ceil(log2(min(sizes)) - 1e-9), floor(log2(max(sizes)) + 1e-9)
    place = ax.get_subplotspec()
    share = len(place.colspan) / place.get_gridspec().ncols
    room = max(2, int(share * ax.figure.get_figwidth()))  # an inch for each, less what stands beside the axes
    step = next(step for step in (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 60) if (high - low) // step < room)
    ticks = [2.0**power for power in range(low, high + 1, step)] or list(sizes)
    ax.set(xscale="log", xlabel=label)
    ax.set_xticks(ticks, [format_bytes(size) for size in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    grid(ax)


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


def points_per_unit(ax: Axes) -> tuple[float, float]:
    """Return the points of one data unit along x and y, once the layout is settled."""
    box, (left, right), (low, high) = ax.bbox, ax.get_xlim(), ax.get_ylim()
    scale = 72 / ax.figure.dpi
    return box.width * scale / abs(right - left), box.height * scale / abs(high - low)


def bare(ax: Axes) -> None:
    """Leave only the names of the axes: no frame, no ticks."""
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


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
