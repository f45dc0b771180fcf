"""Time by model over size and over ranks, and models against what was emulated or recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from course_utils.costs import TwoLevelCluster, all_reduce_seconds, busbw
from course_utils.draw import charts
from course_utils.draw.style import (
    DASHED,
    FAINT,
    HALO,
    INK,
    MARKERS,
    RANK_COLORS,
    SMALL,
    WIDTH,
    empty_figure,
    new_figure,
)
from course_utils.recorded import Table
from course_utils.units import format_bytes

#: One colour for each algorithm of all-reduce, the same in every figure.
ALGORITHM_COLORS = {
    "root": "#999999", "ring": "#0072B2", "tree": "#009E73", "recursive_doubling": "#E69F00",
    "halving_doubling": "#CC79A7", "hierarchical": "#D55E00", "double_tree": "#56B4E9", "in_network": INK,
    "nvls": INK,
}
_GRID = tuple(2.0**k for k in range(8, 31))


def algorithm_color(name: str) -> str:
    """Return the colour of the algorithm `name`; a name that is not an algorithm's has one of the others."""
    return ALGORITHM_COLORS.get(name, RANK_COLORS[sum(map(ord, name)) % 6])


def spoken(name: str) -> str:
    """Return the name of an algorithm as it is written in figures."""
    return {"halving_doubling": "halving/doubling", "in_network": "in network"}.get(name, name.replace("_", " "))


def _microseconds(algorithm: str, cluster: TwoLevelCluster, size: float) -> float:
    return all_reduce_seconds(algorithm, size, cluster) * 1e6


def _time_axis(ax: Axes) -> None:
    """Make the y axis one of microseconds, a power of ten a tick, in the unit that fits each."""
    def text(value: float, _) -> str:
        unit, scale = ("s", 1e6) if value >= 1e6 else ("ms", 1e3) if value >= 1e3 else ("µs", 1)
        return f"{value / scale:g} {unit}"

    ax.set(yscale="log")
    ax.yaxis.set_major_locator(LogLocator(10))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(text))


def _draw_algorithms(ax: Axes, x: Sequence[float], times: Mapping[str, Sequence[float]], **look: object) -> charts.Ends:
    """Draw a line for each algorithm, with its name as it is written and in its colour."""
    colors = {spoken(name): algorithm_color(name) for name in times}
    lines = {spoken(name): values for name, values in times.items()}
    return charts.draw_lines(ax, x, lines, colors=colors, **{"linewidth": 1.8} | look)


def crossings(
    first: Callable[[float], float], second: Callable[[float], float], low: float, high: float, points: int = 400
) -> list[float]:
    """Return the sizes between `low` and `high` at which two times are equal, found on a grid and by bisection."""
    grid = np.geomspace(low, high, points)
    ahead = [first(x) < second(x) for x in grid]
    found = []
    for i in range(points - 1):
        if ahead[i] != ahead[i + 1]:
            a, b = grid[i], grid[i + 1]
            for _ in range(40):
                middle = (a * b) ** 0.5
                a, b = (middle, b) if (first(middle) < second(middle)) == ahead[i] else (a, middle)
            found.append(float(a))
    return found


def _winners(times: Mapping[str, Callable[[float], float]], low: float, high: float) -> list[tuple[str, float, float]]:
    """Return which name is the fastest from where to where, from the smallest size on."""
    edges = sorted({low, high, *(x for a in times for b in times if a < b
                                 for x in crossings(times[a], times[b], low, high))})
    spans: list[tuple[str, float, float]] = []
    for a, b in zip(edges, edges[1:], strict=False):
        middle = (a * b) ** 0.5
        best = min(times, key=lambda name: times[name](middle))
        if spans and spans[-1][0] == best:
            spans[-1] = (best, spans[-1][1], b)
        else:
            spans.append((best, a, b))
    return spans


def draw_crossover(
    ax: Axes, cluster: TwoLevelCluster, algorithms: Sequence[str], sizes: Sequence[float], title: str,
    pairs: Sequence[tuple[str, str]] | None = None, limits: tuple[float, float] | None = None,
) -> list[tuple[str, float, float]]:
    """Draw one panel of `crossover`; return the fastest algorithm, from which size to which.

    `limits` of the time axis are in microseconds, by default those that `_limits` finds for this cluster.
    """
    times = {name: partial(_microseconds, name, cluster) for name in algorithms}
    many = np.geomspace(sizes[0], sizes[-1], 200)
    ends = _draw_algorithms(ax, many, {name: [time(size) for size in many] for name, time in times.items()})
    spans = _winners(times, sizes[0], sizes[-1])
    if pairs is None:
        marks = [(start, name) for name, start, _ in spans[1:]]
    else:
        marks = sorted((x, a) for a, b in pairs for x in crossings(times[a], times[b], sizes[0], sizes[-1]))
    ax.set(ylabel="time of one all-reduce", title=title, ylim=limits or _limits([cluster], algorithms, sizes))
    _time_axis(ax)
    charts.size_axis(ax, sizes)
    charts.label_lines(ax, ends)
    bottom = ax.get_ylim()[0]
    rows = charts.rows_for(ax, [(at, format_bytes(at)) for at, _ in marks])
    for (at, name), row in zip(marks, rows, strict=True):
        height = times[name](at)
        ax.plot([at, at], [bottom, height], **DASHED)
        ax.plot([at], [height], "o", color=INK, markersize=5)
        charts.beside(ax, format_bytes(at), (at, bottom), (3, 4 + 12 * row), fontsize=SMALL, path_effects=HALO)
    return spans


def _limits(
    clusters: Sequence[TwoLevelCluster], algorithms: Sequence[str], sizes: Sequence[float]
) -> tuple[float, float]:
    """Return limits in microseconds that hold every line, with room for the names of the crossings below."""
    ends = [_microseconds(a, c, s) for c in clusters for a in algorithms for s in (sizes[0], sizes[-1])]
    return min(ends) / 2.5, max(ends) * 1.6


def crossover(
    clusters: TwoLevelCluster | Mapping[str, TwoLevelCluster], algorithms: Sequence[str],
    sizes: Sequence[float] = _GRID, pairs: Sequence[tuple[str, str]] | None = None,
) -> Figure:
    """Draw the modelled time of several all-reduce algorithms over message size, with the sizes at which lines cross.

    Parameters
    ----------
    clusters : TwoLevelCluster, or dict of title to TwoLevelCluster
        One panel each.
    algorithms : list of str
        Names of `costs.ALL_REDUCE_ALGORITHMS`.
    sizes : list of float
        First and last bound the axis; bytes.
    pairs : list of (str, str), optional
        Pairs whose crossings are marked; by default those at which the fastest algorithm changes.
    """
    panels = {"": clusters} if isinstance(clusters, TwoLevelCluster) else dict(clusters)
    limits = _limits(list(panels.values()), algorithms, sizes)
    figure, axes = new_figure(1, len(panels), size=(1.2 + 5.0 * len(panels), 3.9))
    for ax, (title, cluster) in zip(axes, panels.items(), strict=True):
        where = f"{cluster.nodes} x {cluster.per_node}" if cluster.nodes > 1 else f"{cluster.ranks}"
        draw_crossover(ax, cluster, algorithms, sizes, f"modelled: {title or f'{where} ranks'}", pairs, limits)
    return figure


def scale_out(
    clusters: Sequence[TwoLevelCluster], algorithms: Sequence[str], sizes: Sequence[float] = (2**12, 2**28)
) -> Figure:
    """Draw the modelled time of all-reduce over the number of ranks, one panel for each message size in bytes."""
    ranks = [cluster.ranks for cluster in clusters]
    figure, axes = new_figure(1, len(sizes), size=(1.2 + 4.4 * len(sizes), 3.7))
    for ax, size in zip(axes, sizes, strict=True):
        ends: charts.Ends = {}
        times = {name: [_microseconds(name, cluster, size) for cluster in clusters] for name in algorithms}
        for name, values in times.items():
            same = [other for other in times if np.allclose(times[other], values, rtol=0.05)]
            dashes = (5 * same.index(name), (5, 5 * len(same) - 5)) if len(same) > 1 else "-"
            ends |= _draw_algorithms(ax, ranks, {name: values}, linestyle=dashes, marker="o", markersize=3)
        ax.set(ylabel="time of one all-reduce", title=f"modelled: {format_bytes(size)}")
        _time_axis(ax)
        charts.count_axis(ax, ranks[:: max(1, -(-len(ranks) // 5))])
        charts.label_lines(ax, ends)
    return figure


def model_against_emulation(
    sizes: Sequence[float], emulated: Mapping[str, Sequence[float]], model: Callable[[str, float], float],
    kind: str = "emulated",
) -> Figure:
    """Draw points and the lines a model predicts for them, and say how far they are apart at most.

    Parameters
    ----------
    sizes : list of float
        Message sizes in bytes.
    emulated : dict of algorithm to list of float
        Seconds at each size.
    model : callable
        Seconds from an algorithm's name and a size.
    kind : str
        What the points are: ``"emulated"`` or ``"measured"``.
    """
    figure, (ax,) = new_figure(size=(7.0, 3.9))
    many, worst = np.geomspace(sizes[0], sizes[-1], 120), 0.0
    ends = _draw_algorithms(ax, many, {name: [model(name, size) * 1e6 for size in many] for name in emulated},
                            linewidth=1.4)
    for i, (name, seconds) in enumerate(emulated.items()):
        ax.plot(sizes, [t * 1e6 for t in seconds], MARKERS[i % 8], color=algorithm_color(name), markersize=6,
                markeredgecolor="white")
        worst = max(worst, *(abs(t / model(name, s) - 1) for s, t in zip(sizes, seconds, strict=True)))
    ax.set(ylabel="time of one all-reduce", title=f"points: {kind}; lines: modelled; {worst:.1%} apart at most")
    _time_axis(ax)
    charts.size_axis(ax, sizes)
    charts.label_lines(ax, ends)
    return figure


def predicted_against_recorded(
    table: Table, predicted: Mapping[str, Sequence[float]], choices: Sequence[str] | None = None
) -> Figure:
    """Draw recorded time and bus bandwidth, the predicted ones, and the error of the time at each size.

    Parameters
    ----------
    table : recorded.Table
        What was measured.
    predicted : dict of name to list of float
        Seconds at each size of the table, one line for each model; the last one is drawn strongest.
    choices : list of str, optional
        What the library is predicted to choose at each size, written where it changes.
    """
    sizes = list(table.sizes)
    figure = empty_figure((WIDTH, 6.8))
    panels = figure.subplot_mosaic([["time", "rate"], ["error", "error"]])
    left, right, below = panels["time"], panels["rate"], panels["error"]
    rates = {name: [busbw(table.op, table.ranks, s, t) / 1e9 for s, t in zip(sizes, seconds, strict=True)]
             for name, seconds in predicted.items()}
    errors = {name: 100 * (np.divide(seconds, table.seconds) - 1) for name, seconds in predicted.items()}
    tones = cycle(RANK_COLORS[i] for i in (4, 0, 2, 1, 3, 5))
    look = {"colors": dict(zip(predicted, tones, strict=False)), "linewidth": 1.2}
    charts.draw_lines(left, sizes, predicted, scale=1e6, **look)
    rate_ends = charts.draw_lines(right, sizes, rates, **look)
    error_ends = charts.draw_lines(below, sizes, errors, marker="o", markersize=3.5, **look)
    for ax in panels.values():
        ax.lines[-1].set_linewidth(2.0)
    left.plot(sizes, [t * 1e6 for t in table.seconds], "o", color=INK, markersize=4.5)
    right.plot(sizes, [b / 1e9 for b in table.busbw], "o", color=INK, markersize=4.5)
    left.set(ylabel="time of one call", title=f"points recorded, lines modelled:\n{table.name}")
    right.set(ylabel="bus bandwidth (GB/s)", ylim=(0, None), title="bus bandwidth")
    below.set(ylabel="predicted time / recorded time - 1 (%)", title="error of the predicted time")
    below.axhspan(-15, 15, color="#EEEEEE", zorder=0)
    below.axhline(0, color=INK, linewidth=0.8)
    _time_axis(left)
    for ax in panels.values():
        charts.size_axis(ax, sizes)
    for i, choice in enumerate(choices or ()):
        if i == 0 or choice != choices[i - 1]:
            edge = sizes[i] if i == 0 else (sizes[i] * sizes[i - 1]) ** 0.5
            left.axvline(edge, **DASHED | {"color": FAINT})
            charts.beside(left, choice, (edge, 0.98), (3, 0), xycoords=("data", "axes fraction"), rotation=90, va="top",
                          fontsize=8, color="#555555")
    charts.label_lines(right, rate_ends)
    charts.label_lines(below, {f"{name}: median {np.median(np.abs(errors[name])):.1f} %": end
                               for name, end in error_ends.items()})
    return figure
