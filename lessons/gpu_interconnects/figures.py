"""What a machine can do at best: its roofline, the ladder of its links, GPU generations, latency and bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from course_utils.draw import charts
from course_utils.draw.bars import name_rows
from course_utils.draw.lanes import step_split as step_split
from course_utils.draw.panels import Panel, dots, panels
from course_utils.draw.style import (
    FAINT,
    INK,
    MARKERS,
    RANK_COLORS,
    SMALL,
    naming,
    new_figure,
    readable,
)


def _rate(value: float) -> str:
    factor, unit = (1e12, "TB/s") if value >= 1e12 else (1e9, "GB/s") if value >= 1e9 else (1e6, "MB/s")
    return f"{value / factor:.4g} {unit}"


def generations(names: Sequence[str], figures: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw how figures of any unit grew from one GPU generation to the next, as multiples of their first values."""
    growth = {f"{label}: ×{values[-1] / values[0]:.0f}": np.divide(values, values[0])
              for label, values in figures.items()}
    first = names[0].split()[0]
    figure = panels(range(len(names)), Panel(title, f"multiple of {first}", growth, markers=5, log=True, form="×{:g}"))
    figure.axes[0].set_xlim(-0.2, len(names) + 0.9)
    figure.axes[0].set_xticks(range(len(names)), names)
    return figure


def ladder(rungs: Mapping[str, float], title: str, groups: Mapping[str, str]) -> Figure:
    """Draw bandwidths in bytes/s, fastest on top, on a logarithmic scale; rungs of one group have one colour."""
    colors = charts.in_turn(groups.values())
    ordered = sorted(rungs.items(), key=lambda rung: rung[1])[::-1]
    low = 10 ** np.floor(np.log10(ordered[-1][1]))
    figure, (ax,) = new_figure(size=(8.4, 0.9 + 0.26 * len(rungs)))
    for y, (label, speed) in enumerate(ordered):
        ax.barh(y, speed - low, left=low, height=0.72, color=colors[groups[label]])
        ax.text(speed * 1.08, y, _rate(speed), va="center", fontsize=SMALL)
    name_rows(ax, [label for label, _ in ordered])
    ax.set(xscale="log", xlim=(low, ordered[0][1] * 5), title=title, xlabel="bandwidth, one direction (logarithmic)")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _rate(value)))
    ax.xaxis.set_minor_locator(NullLocator())
    return figure


def roofline(
    peak: float, bandwidth: float, points: Mapping[str, tuple[float, float]], title: str, *, modelled: bool = False
) -> Figure:
    """Draw attainable FLOP/s against arithmetic intensity (Williams, Waterman, Patterson 2009).

    `peak` is in FLOP/s, `bandwidth` in bytes/s; points are (FLOP per byte, FLOP/s), hollow where they are `modelled`.
    """
    ridge = peak / bandwidth
    intensities = [intensity for intensity, _ in points.values()]
    low, high = min([ridge / 30, *intensities]) / 2, max([ridge * 30, *intensities]) * 3
    figure, (ax,) = new_figure(size=(8.4, 3.9))
    ax.plot([low, ridge, high], [low * bandwidth, peak, peak], color=INK, linewidth=1.6)
    ax.plot([ridge, ridge], [low * bandwidth, peak], ":", color=FAINT)
    charts.beside(ax, f"ridge: {ridge:.3g} FLOP/byte", (ridge, low * bandwidth), (5, 4))
    scale, unit = (1e12, "TFLOP/s") if peak >= 1e12 else (1e9, "GFLOP/s")
    charts.beside(ax, f"{peak / scale:.4g} {unit}", (high, peak), (-4, 4), ha="right")
    slope = (low * ridge**2) ** (1 / 3)
    charts.beside(ax, _rate(bandwidth), (slope, slope * bandwidth), (-8, 4), ha="right")
    for i, (label, (intensity, rate)) in enumerate(points.items()):
        color = RANK_COLORS[i % 6]
        fill = {"markerfacecolor": "white", "markeredgewidth": 1.8} if modelled else {}
        ax.plot(intensity, rate, MARKERS[i % 8], color=color, markersize=7, **fill)
        charts.beside(ax, label, (intensity, rate), (7, -11), **naming(color))
    ax.set(
        xscale="log", yscale="log", xlim=(low, high), title=title,
        xlabel="arithmetic intensity (FLOP per byte of memory traffic)", ylabel="FLOP/s",
    )
    ax.set_ylim(min([low * bandwidth, *(rate for _, rate in points.values())]) / 2, peak * 3)
    ax.grid(True, color="#EEEEEE", linewidth=0.6)
    return figure


def latency_fit(
    sizes: Sequence[float], seconds: Sequence[float], fits: np.ndarray,
    unseen: tuple[Sequence[float], Sequence[float]], *, title: str,
) -> Figure:
    """Draw times of messages over their size, the fitted alpha + beta * S, and sizes that were `unseen` by the fit.

    `fits` are pairs (alpha, beta), one for each resampling; the line is their median, the band holds 95 %.
    """
    both = sorted([*sizes, *unseen[0]])
    many = np.geomspace(both[0], both[-1], 80)
    lines = np.asarray(fits)[:, :1] + np.asarray(fits)[:, 1:] * many
    low, middle, high = np.percentile(lines, [2.5, 50, 97.5], axis=0) * 1e3
    blue, red = RANK_COLORS[0], RANK_COLORS[5]
    points = [dots(sizes, np.multiply(seconds, 1e3), blue),
              dots(unseen[0], np.multiply(unseen[1], 1e3), red, 6, marker="D")]
    figure = panels(many, Panel(title, "time of one message (ms)", {"α + βS": middle}, above=points, log=True,
                                form="{:g}"), sizes="message size S", ticks=both)
    (ax,) = figure.axes
    ax.fill_between(many, low, high, color=blue, alpha=0.2, linewidth=0)
    ax.text(0.03, 0.93, "● fitted", transform=ax.transAxes, color=readable(blue))
    ax.text(0.03, 0.85, "◆ predicted first, then measured", transform=ax.transAxes, color=readable(red))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    return figure
