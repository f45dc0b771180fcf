"""Panels side by side: lines over one x axis, with their names at their ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from . import charts
from .style import FAINT, INK, MARKERS, RANK_COLORS, naming, new_figure, tint

Ends = dict[str, tuple[float, float, str]]  # of lines, by name: x, y, colour

#: Of lines that say what would be ideal.
IDEAL = {"linestyle": "--", "color": FAINT, "linewidth": 1.2}


def dots(x: Sequence[float], y: Sequence[float], color: str = INK, size: float = 5, **look: object) -> tuple:
    """Return points as `Panel.below` and `Panel.above` take them."""
    return x, y, {"linestyle": "none", "marker": "o", "color": color, "markersize": size} | look


@dataclass
class Panel:
    """What one panel shows: lines over the x of the figure, with their names at their ends."""

    title: str
    y: str  # what stands at the y axis
    lines: Mapping[str, Sequence[float]]  # what is not finite is left out; the name may be empty
    scale: float = 1.0  # that the lines are multiplied by
    colors: Mapping[str, str] | None = None  # by name; by default those of the palette in turn
    markers: float = 0  # size of markers, a different one for each line
    look: dict[str, object] = field(default_factory=dict)  # for ``Axes.plot``
    looks: Mapping[str, dict[str, object]] = field(default_factory=dict)  # the same, for single lines by name
    below: Sequence[tuple] = ()  # (x, y, look) of what is drawn before the lines
    above: Sequence[tuple] = ()  # (x, y, look) of what is drawn after them
    names: Ends = field(default_factory=dict)  # of other ends
    log: bool = False  # of y
    limits: tuple[float | None, float | None] = (0, None)  # of y; without both, or with `log`, what fits
    form: str = ""  # of the numbers along y, such as "{:g}"; "%" for shares
    then: Callable[[Axes], object] = lambda ax: None  # draws what else there is


def panels(
    x: Sequence[float], *several: Panel, counts: str = "", sizes: str = "", along: str = "",
    ticks: Sequence[float] = (), size: tuple[float, float] | None = None, **subplots: object,
) -> Figure:
    """Draw panels over `counts` of what is named, over `sizes` of it in bytes, both logarithmic, or over whole numbers,
    named `along`.

    The x axis has a tick at each x, or at `ticks`. `size` is in inches; `subplots` are arguments of
    ``Figure.subplots``.
    """
    figure, axes = new_figure(1, len(several), size=size or (8.4, 3.7 if len(several) == 1 else 3.5), **subplots)
    ends = [draw_panel(ax, x, panel, counts=counts, sizes=sizes, along=along, ticks=ticks)
            for ax, panel in zip(axes, several, strict=True)]
    for ax, labels in zip(axes, ends, strict=True):
        label_lines(ax, labels)
    return figure


def draw_panel(
    ax: Axes, x: Sequence[float], panel: Panel, *, counts: str = "", sizes: str = "", along: str = "",
    ticks: Sequence[float] = (),
) -> Ends:
    """Draw one panel as `panels` does; return the ends of its lines, for `label_lines` once the axes are settled."""
    for at, value, look in panel.below:
        ax.plot(at, value, **look)
    ends = dict(panel.names)
    for i, (name, values) in enumerate(panel.lines.items()):
        color, y = panel.colors[name] if panel.colors else RANK_COLORS[i % 6], np.multiply(values, panel.scale)
        points = {"marker": MARKERS[i % 8], "markersize": panel.markers} if panel.markers else {}
        ax.plot(x, np.where(np.isfinite(y), y, np.nan), color=color, **points | panel.look | panel.looks.get(name, {}))
        if name and np.isfinite(y).any():
            last = np.flatnonzero(np.isfinite(y))[-1]
            ends[name] = (x[last], y[last], color)
    for at, value, look in panel.above:
        ax.plot(at, value, **look)
    ax.set(ylabel=panel.y, title=panel.title, yscale="log" if panel.log else "linear")
    if panel.limits != (None, None) and not (panel.log and panel.limits == (0, None)):
        ax.set_ylim(panel.limits)
    if panel.form == "%":
        ax.yaxis.set_major_formatter(PercentFormatter(1))
    elif panel.form:
        charts.format_ticks(ax.yaxis, panel.form)
    charts.grid(ax)
    if sizes:
        charts.size_axis(ax, ticks or x, sizes)
    elif counts:
        charts.count_axis(ax, ticks or x, counts)
    else:
        ax.set_xlabel(along or ax.get_xlabel())
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    panel.then(ax)
    return ends


def label_lines(ax: Axes, labels: Ends) -> None:
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
        charts.beside(ax, text, (x, y), (16 if moved else 6, at - old), va="center", arrowprops=line if moved else None,
                      **naming(color))


def loss_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, xlabel: str = "step",
    wide: Sequence[str] = (),
) -> Figure:
    """Draw loss curves by name, each (x, nats per token), those in `wide` broad and pale, so that others are seen."""
    figure, (ax,) = new_figure(size=(8.0, 3.5))
    ends: Ends = {}
    for i, (name, (x, loss)) in enumerate(curves.items()):
        color, broad = RANK_COLORS[i % 6], name in wide
        ax.plot(x, loss, color=tint(color) if broad else color, linewidth=3.5 if broad else 1.6, zorder=1 + (not broad))
        ends[name] = (x[-1], loss[-1], color)
    ax.set(xlabel=xlabel, ylabel="loss (nats per token)", title=title)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    charts.grid(ax)
    label_lines(ax, ends)
    return figure
