"""Ways through nodes and a switch; time by model over size and ranks, and against what was emulated or recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from course_utils.costs import TwoLevelCluster, all_reduce_seconds, busbw
from course_utils.draw import charts
from course_utils.draw.panels import Ends, Panel, dots, draw_panel, label_lines, panels
from course_utils.draw.style import (
    CENTRED,
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
    "nvls": INK, "four rings": "#CC79A7",
}
_SIZE = "message size S"

Time = Callable[[float], float]  # seconds over size


def algorithm_color(name: str) -> str:
    """Return the colour of the algorithm `name`; a name that is not an algorithm's has one of the others."""
    return ALGORITHM_COLORS.get(name, RANK_COLORS[sum(map(ord, name)) % 6])


def spoken(name: str) -> str:
    """Return the name of an algorithm as it is written in figures."""
    return {"halving_doubling": "halving/doubling", "in_network": "in network"}.get(name, name.replace("_", " "))


def _panel(title: str, seconds: Mapping[str, Sequence[float]], **more: object) -> Panel:
    """A line for each algorithm, with its name as it is written and in its colour, in microseconds."""
    colors = {spoken(name): algorithm_color(name) for name in seconds}
    lines = {spoken(name): values for name, values in seconds.items()}
    usual = {"colors": colors, "log": True, "look": {"linewidth": 1.8}, "then": _time_axis}
    return Panel(title, "time of one all-reduce", lines, 1e6, **usual | more)


def _time_axis(ax: Axes) -> None:
    """Make the y axis one of microseconds, a power of ten a tick, in the unit that fits each."""
    def text(value: float, _) -> str:
        unit, scale = ("s", 1e6) if value >= 1e6 else ("ms", 1e3) if value >= 1e3 else ("µs", 1)
        return f"{value / scale:g} {unit}"

    ax.yaxis.set_major_locator(LogLocator(10))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(text))


def _winners(times: Mapping[str, Time], low: float, high: float) -> list[tuple[str, float, float]]:
    """Return which name is the fastest from where to where, from the smallest size on: by a grid and bisection."""
    def fastest(size: float) -> str:
        return min(times, key=lambda name: times[name](size))

    starts = [(fastest(low), low)]
    for a, b in pairwise(np.geomspace(low, high, 400).tolist()):
        if fastest(b) != starts[-1][0]:
            for _ in range(40):
                middle = (a * b) ** 0.5
                a, b = (middle, b) if fastest(middle) == starts[-1][0] else (a, middle)
            starts.append((fastest(b), b))
    return [(name, at, end) for (name, at), (_, end) in zip(starts, [*starts[1:], ("", high)], strict=True)]


def draw_crossover(
    ax: Axes, cluster: TwoLevelCluster, algorithms: Sequence[str], sizes: Sequence[float], title: str,
    limits: tuple[float, float] | None = None,
) -> list[tuple[str, float, float]]:
    """Draw one panel of `crossover`; return the fastest algorithm, from which size to which."""
    times = {name: partial(all_reduce_seconds, name, cluster=cluster) for name in algorithms}
    many = np.geomspace(sizes[0], sizes[-1], 200)
    lines = {name: [time(size) for size in many] for name, time in times.items()}
    panel = _panel(title, lines, limits=limits or _limits([cluster], algorithms, sizes))
    label_lines(ax, draw_panel(ax, many, panel, sizes=_SIZE, ticks=sizes))
    spans, bottom = _winners(times, sizes[0], sizes[-1]), ax.get_ylim()[0]
    rows = charts.rows_for(ax, [(at, format_bytes(at)) for _, at, _ in spans[1:]])
    for (name, at, _), row in zip(spans[1:], rows, strict=True):
        height = 1e6 * times[name](at)
        ax.plot([at, at], [bottom, height], **DASHED)
        ax.plot([at], [height], "o", color=INK, markersize=5)
        charts.beside(ax, format_bytes(at), (at, bottom), (3, 4 + 12 * row), fontsize=SMALL, path_effects=HALO)
    return spans


def _limits(
    clusters: Sequence[TwoLevelCluster], algorithms: Sequence[str], sizes: Sequence[float]
) -> tuple[float, float]:
    """Return limits in microseconds that hold every line, with room for the names of the crossings below."""
    ends = [1e6 * all_reduce_seconds(a, s, c) for c in clusters for a in algorithms for s in (sizes[0], sizes[-1])]
    return min(ends) / 2.5, max(ends) * 1.6


def crossover(clusters: Mapping[str, TwoLevelCluster], algorithms: Sequence[str], sizes: Sequence[float]) -> Figure:
    """Draw the modelled time of all-reduce algorithms over message size, with the sizes where the fastest changes."""
    limits = _limits(list(clusters.values()), algorithms, sizes)
    figure, axes = new_figure(1, len(clusters), size=(WIDTH, 3.9))
    for ax, (title, cluster) in zip(axes, clusters.items(), strict=True):
        draw_crossover(ax, cluster, algorithms, sizes, f"modelled: {title}", limits)
    return figure


def scale_out(clusters: Sequence[TwoLevelCluster], algorithms: Sequence[str], sizes: Sequence[float]) -> Figure:
    """Draw the modelled time of all-reduce over the number of ranks, one panel for each message size in bytes."""
    ranks = [cluster.ranks for cluster in clusters]
    several = []
    for size in sizes:
        times = {name: [all_reduce_seconds(name, size, cluster) for cluster in clusters] for name in algorithms}
        looks = {}
        for name, values in times.items():  # lines that are nearly the same are dashed in turn
            same = [other for other in times if np.allclose(times[other], values, rtol=0.05)]
            dashes = (5 * same.index(name), (5, 5 * len(same) - 5)) if len(same) > 1 else "-"
            looks[spoken(name)] = {"linestyle": dashes, "marker": "o", "markersize": 3}
        several.append(_panel(f"modelled: {format_bytes(size)}", times, looks=looks))
    ticks = ranks[:: max(1, -(-len(ranks) // 5))]
    return panels(ranks, *several, counts="ranks", ticks=ticks, size=(WIDTH, 3.7))


def model_against_emulation(
    sizes: Sequence[float], emulated: Mapping[str, Sequence[float]], model: Callable[[str, float], float],
    also: Sequence[str] = (),
) -> Figure:
    """Draw emulated seconds of algorithms as points, and what a model says of them, and `also` of others, as lines."""
    many = np.geomspace(sizes[0], sizes[-1], 120)
    points = [dots(sizes, np.multiply(seconds, 1e6), algorithm_color(name), 6, marker=marker, markeredgecolor="white")
              for (name, seconds), marker in zip(emulated.items(), MARKERS, strict=False)]
    panel = _panel("points: emulated; lines: modelled",
                   {name: [model(name, size) for size in many] for name in (*emulated, *also)}, above=points,
                   look={"linewidth": 1.4})
    return panels(many, panel, sizes=_SIZE, ticks=sizes, size=(7.0, 3.9))


def channels(by_title: Mapping[str, Sequence[Sequence[int]]], per_node: int) -> Figure:
    """Draw rings through two nodes, in a panel for each title: `per_node` GPUs in a node, with a network port each."""
    figure, axes = new_figure(1, len(by_title), size=(WIDTH, 3.3))
    for ax, (title, rings) in zip(axes, by_title.items(), strict=True):
        ax.set(title=title, xlim=(-1.5, 5.5), ylim=(per_node - 0.15, -0.8), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        for node, (left, gpu_x, port_x) in enumerate(((-1.45, 0, 0.75), (2.75, 4, 3.25))):
            charts.cell(ax, left, -0.45, 2.7, per_node - 0.1, FAINT, facecolor="none")
            ax.text(left + 1.35, -0.6, f"node {node}", **CENTRED)
            for x, name in ((gpu_x, "GPUs"), (port_x, "ports")):
                ax.text(x, per_node - 0.35, name, fontsize=SMALL, **CENTRED)
            for row in range(per_node):
                charts.cell(ax, gpu_x - 0.28, row - 0.3, 0.56, 0.6, INK, facecolor="white", zorder=3)
                ax.text(gpu_x, row, f"{node * per_node + row}", zorder=4, **CENTRED)
                charts.cell(ax, port_x - 0.15, row - 0.3, 0.3, 0.6, FAINT, facecolor="#E6E6E6", zorder=1)
        for i, ring in enumerate(rings):
            look = {"arrowstyle": "-|>", "mutation_scale": 11, "color": RANK_COLORS[i], "linewidth": 1.8, "zorder": 5}
            for a, b in zip(ring, [*ring[1:], ring[0]], strict=True):
                (far, row), (to, below) = divmod(a, per_node), divmod(b, per_node)
                if far == to:  # by NVLink, on the outer side
                    x, side = (-0.28, 1) if far == 0 else (4.28, -1)
                    bend = side * (0.35 + 0.15 * i) * (1 if below > row else -1)
                    shift = 0.15 * (i - (len(rings) - 1) / 2)
                    ends = [(x, row + shift), (x, below + shift)]
                    style = f"arc3,rad={bend / abs(below - row) ** 0.5}"
                else:  # by the network, on the inner side
                    shift = 0.14 if far else -0.14
                    ends = [(0.28, row + shift), (3.72, below + shift)][:: -1 if far else 1]
                    style = "arc3"
                ax.add_patch(FancyArrowPatch(*ends, connectionstyle=style, shrinkA=1, shrinkB=1, **look))
    return figure


def switch_adds(n: int, piece: int) -> Figure:
    """Draw how one piece of an all-reduce of `n` GPUs passes a switch that adds, and comes back to all of them."""
    figure, axes = new_figure(1, 2, size=(WIDTH, 3.0))
    for ax, title in zip(axes, ("1. the switch adds", "2. the switch copies"), strict=True):
        adds = title.endswith("adds")
        ax.set(title=f"{title} piece {piece}", xlim=(-0.6, n - 0.4), ylim=(-0.75, 3.1), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        charts.cell(ax, -0.45, 2.3, n - 0.1, 0.6, FAINT, facecolor="#E6E6E6")
        ax.text((n - 1) / 2, 2.6, "NVSwitch: " + ("+" if adds else "copy"), **CENTRED)
        for gpu in range(n):
            ax.text(gpu, -0.5, f"GPU {gpu}", **CENTRED)
            for i in range(n):
                known = i == piece and (adds or gpu == piece)
                color = INK if i == piece else FAINT
                charts.cell(ax, gpu - 0.4 + 0.8 * i / n, -0.2, 0.8 / n, 0.5, color, zorder=3 if i == piece else 2,
                            facecolor=("#D8EEE6" if adds else RANK_COLORS[2]) if known else "white")
            at = gpu - 0.4 + 0.8 * (piece + 0.5) / n
            sends, gets = adds or gpu == piece, gpu == piece or not adds
            shift = 0.06 if sends and gets else 0
            for wanted, x, ends, color in ((sends, at - shift, (0.35, 2.25), RANK_COLORS[0]),
                                           (gets, at + shift, (2.25, 0.35), RANK_COLORS[5])):
                if wanted:
                    ax.add_patch(FancyArrowPatch((x, ends[0]), (x, ends[1]), arrowstyle="-|>", mutation_scale=12,
                                                 color=color, linewidth=1.8, shrinkA=0, shrinkB=0, zorder=4))
    return figure


def predicted_against_recorded(
    table: Table, predicted: Mapping[str, Sequence[float]], choices: Sequence[str]
) -> Figure:
    """Draw recorded and predicted time and bus bandwidth, and the error of the time, over the sizes of the table, with
    what the library is predicted to choose."""
    sizes = list(table.sizes)
    rates = {name: [busbw(table.op, table.ranks, s, t) / 1e9 for s, t in zip(sizes, seconds, strict=True)]
             for name, seconds in predicted.items()}
    errors = {name: 100 * (np.divide(seconds, table.seconds) - 1) for name, seconds in predicted.items()}
    tones = dict(zip(predicted, [RANK_COLORS[i] for i in (4, 0, 2, 1, 3, 5)], strict=False))
    look = {"colors": tones, "look": {"linewidth": 1.2}, "looks": {list(predicted)[-1]: {"linewidth": 2.0}}}
    told = {f"{name}: median {np.median(np.abs(errors[name])):.1f} %": tones[name] for name in errors}
    shown = {
        "time": Panel(f"points recorded, lines modelled:\n{table.name}", "time of one call", predicted, 1e6, log=True,
                      above=[dots(sizes, np.multiply(table.seconds, 1e6), size=4.5)], then=_time_axis, **look),
        "rate": Panel("bus bandwidth", "bus bandwidth (GB/s)", rates,
                      above=[dots(sizes, np.divide(table.busbw, 1e9), size=4.5)], **look),
        "error": Panel("error of the predicted time", "predicted time / recorded time - 1 (%)",
                       dict(zip(told, errors.values(), strict=True)), limits=(None, None),
                       **look | {"colors": told, "looks": {list(told)[-1]: {"linewidth": 2.0}},
                                 "look": {"linewidth": 1.2, "marker": "o", "markersize": 3.5}}),
    }
    figure = empty_figure((WIDTH, 6.8))
    axes = figure.subplot_mosaic([["time", "rate"], ["error", "error"]])
    ends: dict[str, Ends] = {name: draw_panel(axes[name], sizes, panel, sizes=_SIZE) for name, panel in shown.items()}
    axes["error"].axhspan(-15, 15, color="#EEEEEE", zorder=0)
    axes["error"].axhline(0, color=INK, linewidth=0.8)
    for i, choice in enumerate(choices):
        if i == 0 or choice != choices[i - 1]:
            edge = (sizes[i] * sizes[max(0, i - 1)]) ** 0.5
            axes["time"].axvline(edge, **DASHED | {"color": FAINT})
            charts.beside(axes["time"], choice, (edge, 0.98), (3, 0), xycoords=("data", "axes fraction"), rotation=90,
                          va="top", fontsize=8, color="#555555")
    for name in ("rate", "error"):
        label_lines(axes[name], ends[name])
    return figure
