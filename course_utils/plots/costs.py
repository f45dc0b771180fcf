"""Time by model over size and over ranks, and models against what was emulated or recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ..costs import Cluster, all_reduce_seconds, busbw
from ..recorded import Table
from ..units import format_bytes
from ._style import FAINT, HALO, INK, MARKERS, RANK_COLORS, WIDTH, Drawing, label_lines, new_figure, size_axis

__all__ = [
    "ALGORITHM_COLORS", "algorithm_color", "crossings", "crossover", "draw_crossover", "model_against_emulation",
    "predicted_against_recorded", "scale_out", "spoken",
]

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


def _microseconds(ax: Axes) -> None:
    def text(value: float, _) -> str:
        for unit, scale in (("s", 1e6), ("ms", 1e3)):
            if value >= scale:
                return f"{value / scale:g} {unit}"
        return f"{value:g} µs"

    ax.set(yscale="log")
    ax.yaxis.set_major_locator(LogLocator(10))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(text))


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
    ax: Axes, cluster: Cluster, algorithms: Sequence[str], sizes: Sequence[float], title: str,
    pairs: Sequence[tuple[str, str]] | None = None, limits: tuple[float, float] | None = None,
) -> list[tuple[str, float, float]]:
    """Draw one panel of `crossover`; return the fastest algorithm, from which size to which.

    `limits` of the time axis are in microseconds, by default those that `_limits` finds for this cluster.
    """
    times = {name: lambda size, name=name: all_reduce_seconds(name, size, cluster) for name in algorithms}
    grid, labels = np.geomspace(sizes[0], sizes[-1], 200), {}
    for name, time in times.items():
        values = [time(size) * 1e6 for size in grid]
        ax.plot(grid, values, color=algorithm_color(name), linewidth=1.8)
        labels[spoken(name)] = (grid[-1], values[-1], algorithm_color(name))
    spans = _winners(times, sizes[0], sizes[-1])
    if pairs is None:
        marks = [(name, start) for name, start, _ in spans[1:]]
    else:
        marks = [(a, x) for a, b in pairs for x in crossings(times[a], times[b], sizes[0], sizes[-1])]
    ax.set(ylabel="time of one all-reduce", title=title, ylim=limits or _limits([cluster], algorithms, sizes))
    _microseconds(ax)
    size_axis(ax, sizes)
    bottom = ax.get_ylim()[0]
    for name, at in marks:
        height = times[name](at) * 1e6
        ax.plot([at, at], [bottom, height], color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
        ax.plot([at], [height], "o", color=INK, markersize=5)
        ax.annotate(format_bytes(at), (at, bottom), (3, 4), textcoords="offset points", fontsize=8.5,
                    path_effects=HALO)
    label_lines(ax, labels)
    return spans


def _limits(clusters: Sequence[Cluster], algorithms: Sequence[str], sizes: Sequence[float]) -> tuple[float, float]:
    """Return limits in microseconds that hold every line, with room for the names of the crossings below."""
    ends = [all_reduce_seconds(a, s, c) * 1e6 for c in clusters for a in algorithms for s in (sizes[0], sizes[-1])]
    return min(ends) / 2.5, max(ends) * 1.6


def crossover(
    clusters: Cluster | Mapping[str, Cluster], algorithms: Sequence[str], sizes: Sequence[float] = _GRID,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> Figure:
    """Draw the modelled time of several all-reduce algorithms over message size, with the sizes at which lines cross.

    Parameters
    ----------
    clusters : Cluster, or dict of title to Cluster
        One panel each.
    algorithms : list of str
        Names of `costs.ALL_REDUCE_ALGORITHMS`.
    sizes : list of float
        First and last bound the axis; bytes.
    pairs : list of (str, str), optional
        Pairs whose crossings are marked; by default those at which the fastest algorithm changes.
    """
    panels = {"": clusters} if isinstance(clusters, Cluster) else dict(clusters)
    limits = _limits(list(panels.values()), algorithms, sizes)
    figure, axes = new_figure(1, len(panels), size=(1.2 + 5.0 * len(panels), 3.9))
    for ax, (title, cluster) in zip(axes, panels.items(), strict=True):
        where = f"{cluster.nodes} x {cluster.per_node}" if cluster.nodes > 1 else f"{cluster.ranks}"
        draw_crossover(ax, cluster, algorithms, sizes, f"modelled: {title or f'{where} ranks'}", pairs, limits)
    return figure


def scale_out(
    clusters: Sequence[Cluster], algorithms: Sequence[str], sizes: Sequence[float] = (2**12, 2**28)
) -> Figure:
    """Draw the modelled time of all-reduce over the number of ranks, one panel for each message size in bytes."""
    ranks = [cluster.ranks for cluster in clusters]
    figure, axes = new_figure(1, len(sizes), size=(1.2 + 4.4 * len(sizes), 3.7))
    for ax, size in zip(axes, sizes, strict=True):
        labels = {}
        times = {name: [all_reduce_seconds(name, size, cluster) * 1e6 for cluster in clusters] for name in algorithms}
        for name, values in times.items():
            same = [other for other in times if np.allclose(times[other], values, rtol=0.05)]
            dashes = (5 * same.index(name), (5, 5 * len(same) - 5)) if len(same) > 1 else "-"
            ax.plot(ranks, values, color=algorithm_color(name), linewidth=1.8, linestyle=dashes, marker="o",
                    markersize=3)
            labels[spoken(name)] = (ranks[-1], values[-1], algorithm_color(name))
        ax.set(ylabel="time of one all-reduce", xscale="log", xlabel="ranks", title=f"modelled: {format_bytes(size)}")
        _microseconds(ax)
        ticks = ranks[:: max(1, -(-len(ranks) // 5))]
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.grid(True, color="#E5E5E5", linewidth=0.7)
        label_lines(ax, labels)
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
    figure, (ax,) = new_figure(1, 1, size=(7.0, 3.9))
    labels, worst, grid = {}, 0.0, np.geomspace(sizes[0], sizes[-1], 120)
    for i, (name, seconds) in enumerate(emulated.items()):
        color = algorithm_color(name)
        line = [model(name, size) * 1e6 for size in grid]
        ax.plot(grid, line, color=color, linewidth=1.4)
        ax.plot(sizes, [t * 1e6 for t in seconds], MARKERS[i % 8], color=color, markersize=6, markeredgecolor="white")
        labels[spoken(name)] = (grid[-1], line[-1], color)
        worst = max(worst, *(abs(t / model(name, s) - 1) for s, t in zip(sizes, seconds, strict=True)))
    ax.set(ylabel="time of one all-reduce", title=f"points: {kind}; lines: modelled; {worst:.1%} apart at most")
    _microseconds(ax)
    size_axis(ax, sizes)
    label_lines(ax, labels)
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
    figure = plt.figure(figsize=(WIDTH, 6.8), FigureClass=Drawing)
    plt.close(figure)
    grid = figure.add_gridspec(2, 2)
    left, middle, right = (figure.add_subplot(grid[where]) for where in ((0, 0), (0, 1), (1, slice(None))))
    styles = {name: RANK_COLORS[(4, 0, 2, 1, 3, 5)[i % 6]] for i, name in enumerate(predicted)}
    labels, names = {}, {}
    for name, seconds in predicted.items():
        color, width = styles[name], 2.0 if name == list(predicted)[-1] else 1.2
        rates = [busbw(table.op, table.ranks, s, t) / 1e9 for s, t in zip(sizes, seconds, strict=True)]
        wrong = [100 * (p / t - 1) for p, t in zip(seconds, table.seconds, strict=True)]
        median = float(np.median(np.abs(wrong)))
        left.plot(sizes, [t * 1e6 for t in seconds], color=color, linewidth=width)
        middle.plot(sizes, rates, color=color, linewidth=width)
        right.plot(sizes, wrong, color=color, linewidth=width, marker="o", markersize=3.5)
        labels[f"{name}: median {median:.1f} %"] = (sizes[-1], wrong[-1], color)
        names[name] = (sizes[-1], rates[-1], color)
    left.plot(sizes, [t * 1e6 for t in table.seconds], "o", color=INK, markersize=4.5)
    middle.plot(sizes, [b / 1e9 for b in table.busbw], "o", color=INK, markersize=4.5)
    left.set(ylabel="time of one call", title=f"points recorded, lines modelled:\n{table.name}")
    middle.set(ylabel="bus bandwidth (GB/s)", ylim=(0, None), title="bus bandwidth")
    right.set(ylabel="predicted time / recorded time - 1 (%)", title="error of the predicted time")
    right.axhspan(-15, 15, color="#EEEEEE", zorder=0)
    right.axhline(0, color=INK, linewidth=0.8)
    _microseconds(left)
    for ax in (left, middle, right):
        size_axis(ax, sizes)
    for i, choice in enumerate(choices or ()):
        if i == 0 or choice != choices[i - 1]:
            edge = sizes[i] if i == 0 else (sizes[i] * sizes[i - 1]) ** 0.5
            left.axvline(edge, color=FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
            left.annotate(choice, (edge, 0.98), (3, 0), xycoords=("data", "axes fraction"), rotation=90, va="top",
                          textcoords="offset points", fontsize=8, color="#555555")
    label_lines(middle, names)
    label_lines(right, labels)
    return figure
