"""What a machine can do at best: its roofline, the ladder of its links, GPU generations, latency and bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from course_utils.draw import charts
from course_utils.draw.lanes import step_split
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

__all__ = [
    "generations",
    "ladder",
    "latency_fit",
    "roofline",
    "step_split",
]

_RATES = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"))


def _rate(value: float) -> str:
    factor, unit = next((pair for pair in _RATES if value >= pair[0]), _RATES[-1])
    return f"{value / factor:.4g} {unit}"


def generations(names: Sequence[str], figures: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw how several figures grew from one GPU generation to the next, each as a multiple of its first value.

    Parameters
    ----------
    names : list of str
        Generations, oldest first.
    figures : dict of label to list of float
        One value a generation, any unit.
    title : str
    """
    figure, (ax,) = new_figure(size=(8.4, 3.6))
    growth = {f"{label}: ×{values[-1] / values[0]:.0f}": np.divide(values, values[0])
              for label, values in figures.items()}
    ends = charts.draw_lines(ax, range(len(names)), growth, markers=5)
    ax.set(yscale="log", ylabel=f"multiple of {names[0].split()[0]}", title=title, xlim=(-0.2, len(names) + 0.9))
    ax.set_xticks(range(len(names)), names)
    charts.format_ticks(ax.yaxis, "×{:g}")
    charts.grid(ax)
    charts.label_lines(ax, ends)
    return figure


def ladder(rungs: Mapping[str, float], title: str, groups: Mapping[str, str] | None = None) -> Figure:
    """Draw bandwidths as bars on a logarithmic scale, fastest on top, with their figures beside them.

    Parameters
    ----------
    rungs : dict of label to float
        Bytes per second, in one direction.
    title : str
    groups : dict of label to group name, optional
        Rungs of one group have one colour.
    """
    groups = groups or {}
    colors = charts.in_turn(groups.values())
    ordered = sorted(rungs.items(), key=lambda rung: rung[1])[::-1]
    low = 10 ** np.floor(np.log10(ordered[-1][1]))
    figure, (ax,) = new_figure(size=(8.4, 0.9 + 0.26 * len(rungs)))
    for y, (label, speed) in enumerate(ordered):
        ax.barh(y, speed - low, left=low, height=0.72, color=colors.get(groups.get(label, ""), RANK_COLORS[0]))
        ax.text(speed * 1.08, y, _rate(speed), va="center", fontsize=SMALL)
    charts.name_rows(ax, [label for label, _ in ordered])
    ax.set(xscale="log", xlim=(low, ordered[0][1] * 5), title=title, xlabel="bandwidth, one direction (logarithmic)")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _rate(value)))
    ax.xaxis.set_minor_locator(NullLocator())
    return figure


def roofline(
    peak: float, bandwidth: float, points: Mapping[str, tuple[float, float]], title: str, *, modelled: bool = False
) -> Figure:
    """Draw a roofline: attainable FLOP/s against arithmetic intensity (Williams, Waterman, Patterson 2009).

    Parameters
    ----------
    peak : float
        FLOP/s.
    bandwidth : float
        Bytes per second.
    points : dict of label to (intensity, FLOP/s)
        Intensity in FLOP per byte.
    title : str
    modelled : bool
        Draw the points hollow: they stand where the roof lets them, nobody measured them.
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
    sizes: Sequence[float],
    seconds: Sequence[float],
    fits: np.ndarray,
    unseen: tuple[Sequence[float], Sequence[float]] | None = None,
    *,
    title: str,
) -> Figure:
    """Draw times of messages over their size, the fitted alpha + beta * S with its uncertainty, and unseen sizes.

    Parameters
    ----------
    sizes, seconds : list of float
        The points that were fitted; bytes and seconds.
    fits : array, shape (n, 2)
        Pairs (alpha, beta), one for each resampling; the line is the median, the band holds 95 %.
    unseen : (sizes, seconds), optional
        Points that were predicted before they were measured.
    title : str
    """
    figure, (ax,) = new_figure(size=(8.4, 3.8))
    both = sorted([*sizes, *(unseen[0] if unseen else [])])
    many = np.geomspace(both[0], both[-1], 80)
    lines = np.asarray(fits)[:, :1] + np.asarray(fits)[:, 1:] * many
    low, middle, high = np.percentile(lines, [2.5, 50, 97.5], axis=0) * 1e3
    ax.fill_between(many, low, high, color=RANK_COLORS[0], alpha=0.2, linewidth=0)
    ends = charts.draw_lines(ax, many, {"α + βS": middle})
    ax.plot(sizes, np.multiply(seconds, 1e3), "o", color=RANK_COLORS[0], markersize=5)
    ax.text(0.03, 0.93, "● fitted", transform=ax.transAxes, color=readable(RANK_COLORS[0]))
    if unseen:
        ax.plot(unseen[0], np.multiply(unseen[1], 1e3), "D", color=RANK_COLORS[5], markersize=6)
        ax.text(0.03, 0.85, "◆ predicted first, then measured", transform=ax.transAxes, color=readable(RANK_COLORS[5]))
    ax.set(yscale="log", ylabel="time of one message (ms)", title=title)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    charts.format_ticks(ax.yaxis, "{:g}")
    charts.size_axis(ax, both)
    charts.label_lines(ax, ends)
    return figure
