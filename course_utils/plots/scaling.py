"""Speed-up and efficiency over ranks, where a step's time goes, and what wins some of it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from ..recorded import Scaling
from ..units import format_bytes
from ._style import (
    FAINT,
    HALO,
    INK,
    MARKERS,
    RANK_COLORS,
    WIDTH,
    grid_figure,
    label_lines,
    new_figure,
    readable,
    size_axis,
    tint,
)  # fmt: skip

__all__ = [
    "bucket_choice", "bucket_sweep", "checkpointing", "gradient_range", "scaling_curves", "scaling_models",
    "speedup_laws", "step_spans", "step_split",
]  # fmt: skip

_GRID = {"color": "#E5E5E5", "linewidth": 0.7}
#: One colour for each part of a step, the same in every figure.
_PARTS = {
    "data": "#56B4E9", "compute": "#0072B2", "copies": "#CC79A7", "wait": "#D55E00", "all_reduce": "#E69F00",
    "optimizer": "#009E73", "backward": "#0072B2",
}  # fmt: skip
_HATCHES = {"wait": "////", "data": "...."}  # beside parts of nearly their hue


def _ranks_axis(ax: Axes, ranks: Sequence[int], label: str = "ranks") -> None:
    ax.set(xscale="log", xlabel=label)
    ax.set_xticks(list(ranks), [str(n) for n in ranks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.grid(True, **_GRID)


def speedup_laws(laws: Mapping[str, Callable[[float, float], float]], shares: Sequence[float], most: int) -> Figure:
    """Draw the speed-up that each law gives for 1 to `most` ranks, one panel a law, one line a serial share.

    Parameters
    ----------
    laws : dict of name to function of (ranks, serial share)
    shares : list of float
        Serial shares, between 0 and 1.
    most : int
        The largest number of ranks.
    """
    figure, axes = new_figure(1, len(laws), size=(4.6 * len(laws), 3.5), sharey=True)
    n = np.geomspace(1, most, 200)
    for ax, (name, law) in zip(axes, laws.items(), strict=True):
        ax.plot(n, n, "--", color=FAINT, linewidth=1.2)
        labels = {}
        for i, share in enumerate(shares):
            speedup = [law(x, share) for x in n]
            ax.plot(n, speedup, color=RANK_COLORS[i], linewidth=1.8)
            labels[f"{100 * share:g} %"] = (n[-1], speedup[-1], RANK_COLORS[i])
        ax.set(yscale="log", title=f"modelled: {name}", xlim=(1, most), ylim=(1, most))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _ranks_axis(ax, [n for n in (1, 10, 100, 1000, 10_000) if n <= most])
        label_lines(ax, labels)
    axes[0].set(ylabel="speed-up")
    return figure


def scaling_curves(
    ranks: Sequence[int], throughput: Mapping[str, Sequence[float]], kind: str, limit: int | None = None,
    unit: str = "ranks",
) -> Figure:  # fmt: skip
    """Draw speed-up and efficiency of one or several ways to grow.

    Parameters
    ----------
    ranks : list of int
        Growing; the first is the base of comparison.
    throughput : dict of name to list of float
        Tokens per second of all ranks together.
    kind : str
        ``"measured"`` or ``"recorded"``, written on the figure.
    limit : int, optional
        Cores that the ranks share: no speed-up can be larger. Drawn as a dotted line.
    unit : str
        What is counted along the x axis.
    """
    figure, (left, right) = new_figure(1, 2, size=(9.6, 3.5))
    ideal = [n / ranks[0] for n in ranks]
    left.plot(ranks, ideal, "--", color=FAINT, linewidth=1.2)
    right.axhline(1, linestyle="--", color=FAINT, linewidth=1.2)
    ends: tuple[dict, dict] = ({"ideal": (ranks[-1], ideal[-1], "#777777")}, {})
    if limit is not None and limit < ranks[-1]:
        left.plot(ranks, [min(n, limit) for n in ranks], ":", color=INK, linewidth=1.4)
        right.plot(ranks, [min(n, limit) / n for n in ranks], ":", color=INK, linewidth=1.4)
        for panel, value in zip(ends, (limit, limit / ranks[-1]), strict=True):
            panel[f"{limit} cores"] = (ranks[-1], value, INK)
    for i, (name, rates) in enumerate(throughput.items()):
        color, look = RANK_COLORS[i], {"marker": MARKERS[i], "markersize": 5, "color": RANK_COLORS[i]}
        speedup = [rate / rates[0] for rate in rates]
        efficiency = [s / x for s, x in zip(speedup, ideal, strict=True)]
        left.plot(ranks, speedup, **look)
        right.plot(ranks, efficiency, **look)
        ends[0][name], ends[1][name] = (ranks[-1], speedup[-1], color), (ranks[-1], efficiency[-1], color)
    against = f"against {ranks[0]} {unit.rstrip('s') if ranks[0] == 1 else unit}"
    left.set(ylabel=f"speed-up {against}", title=f"{kind}: speed-up", yscale="log")
    left.set_yticks(ideal, [f"{s:g}" for s in ideal])
    left.yaxis.set_minor_locator(NullLocator())
    right.set(ylabel="efficiency", title=f"{kind}: efficiency", ylim=(0, None))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    for ax, labels in zip((left, right), ends, strict=True):
        _ranks_axis(ax, ranks, unit)
        label_lines(ax, labels)
    return figure


def scaling_models(record: Scaling, predicted: Mapping[str, Sequence[float]], fitted: int) -> Figure:
    """Draw a recorded throughput per GPU and what models say, with the points that the models have seen marked.

    Parameters
    ----------
    record : Scaling
    predicted : dict of name to list of float
        Tokens per second and GPU at each number of GPUs of the record.
    fitted : int
        How many points, from the first, the models were fitted to.
    """
    figure, (left, right) = new_figure(1, 2, size=(10.4, 3.7))
    gpus, rates = record.gpus, np.array(record.tokens_per_gpu)
    left.plot(gpus[:fitted], rates[:fitted], "o", color=INK, markersize=7)
    left.plot(gpus[fitted:], rates[fitted:], "o", color=INK, markersize=7, markerfacecolor="white")
    ends: tuple[dict, dict] = ({}, {})
    for i, (name, values) in enumerate(predicted.items()):
        color, error = RANK_COLORS[i], np.array(values) / rates - 1
        left.plot(gpus, values, color=color, linewidth=1.6)
        right.plot(gpus, error, marker=MARKERS[i], markersize=4, color=color, linewidth=1.6)
        ends[0][name], ends[1][name] = (gpus[-1], values[-1], color), (gpus[-1], error[-1], color)
    right.axhline(0, color=FAINT, linewidth=1)
    left.set(ylim=(0, None), ylabel="tokens per second and GPU",
             title=f"recorded (points; filled: seen by the fit),\nmodelled: {record.name}")  # fmt: skip
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.set(ylabel="prediction above record", title="error of the models")
    for ax, labels in zip((left, right), ends, strict=True):
        _ranks_axis(ax, gpus, "GPUs")
        label_lines(ax, labels)
    return figure


def _colors(parts: Sequence[str]) -> dict[str, str]:
    """Return the colour of each part, in the order in which they come first."""
    spare = [color for color in RANK_COLORS if color not in _PARTS.values()] + [FAINT] * len(parts)
    return {part: _PARTS.get(part) or spare.pop(0) for part in dict.fromkeys(parts)}


def _finish_bars(ax: Axes, rows: Mapping[str, object], color: Mapping[str, str], title: str, xlabel: str) -> None:
    for part, tone in color.items():
        ax.barh(0, 0, color=tint(tone), edgecolor=tone, label=part, hatch=_HATCHES.get(part))
    ax.legend(ncols=len(color), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, columnspacing=1.2,
              handlelength=1.2)  # fmt: skip
    ax.figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    ax.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel=xlabel, xlim=(0, None))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)


def step_split(rows: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Draw what a step's seconds went to, one stacked bar for each row.

    Parameters
    ----------
    rows : dict of row name to dict of part to seconds
        Parts keep their order; those of the course have colours of their own.
    title : str
        Says what is shown and whether it is measured, recorded or modelled.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    color = _colors(parts)
    figure, (ax,) = new_figure(1, 1, size=(8.6, 1.15 + 0.34 * len(rows)))
    for y, row in enumerate(rows.values()):
        left = 0.0
        for part, seconds in row.items():
            look = {"color": tint(color[part]), "edgecolor": color[part], "height": 0.72, "hatch": _HATCHES.get(part)}
            ax.barh(y, seconds * 1e3, left=left * 1e3, **look)
            left += seconds
    _finish_bars(ax, rows, color, title, "time in one step (ms)")
    return figure


def step_spans(rows: Mapping[str, Sequence[tuple[str, float, float]]], title: str) -> Figure:
    """Draw when each part of a step ran, one row of bars for each key, in the colours of `step_split`.

    Parameters
    ----------
    rows : dict of row name to list of (part, start, end)
        Seconds.
    title : str
        Says what is shown and whether it is measured, recorded or modelled.
    """
    color = _colors([part for spans in rows.values() for part, *_ in spans])
    figure, (ax,) = new_figure(1, 1, size=(8.6, 1.15 + 0.36 * len(rows)))
    for y, spans in enumerate(rows.values()):
        for part, start, end in spans:
            look = {"color": tint(color[part]), "edgecolor": color[part], "height": 0.72, "hatch": _HATCHES.get(part)}
            ax.barh(y, (end - start) * 1e3, left=start * 1e3, **look)
    _finish_bars(ax, rows, color, title, "time (ms)")
    return figure


def bucket_sweep(
    messages: Sequence[int], step: Sequence[float], communication: Sequence[float], overlap: Sequence[float]
) -> Figure:
    """Draw, over the number of buckets in a step, the step's seconds, those of communication, and how much overlaps."""
    figure, (left, right) = new_figure(1, 2, size=(9.6, 3.4))
    ends = {}
    for i, (name, values) in enumerate({"forward and backward": step, "communication": communication}.items()):
        left.plot(messages, [t * 1e3 for t in values], marker=MARKERS[i], markersize=5, color=RANK_COLORS[i])
        ends[name] = (messages[-1], values[-1] * 1e3, RANK_COLORS[i])
    right.plot(messages, overlap, marker="^", markersize=5, color=RANK_COLORS[2])
    left.set(ylabel="time (ms)", title="measured: time by number of buckets", ylim=(0, None))
    right.set(ylabel="share of communication", title="measured: overlap with backward", ylim=(0, 1))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    for ax in (left, right):
        _ranks_axis(ax, messages, "buckets, one all-reduce each")
    label_lines(left, ends)
    return figure


def bucket_choice(
    sizes: Sequence[float], exposed: Mapping[str, Sequence[float]], default: float | None = None
) -> Figure:
    """Draw the modelled seconds that communication adds to a step, over bucket size, with the best size of each curve.

    Parameters
    ----------
    sizes : list of float
        Bucket sizes in bytes.
    exposed : dict of name to list of float
        Seconds that backward alone does not hide.
    default : float, optional
        A bucket size to mark.
    """
    figure, (ax,) = new_figure(1, 1, size=(8.4, 3.7))
    labels = {}
    for i, (name, seconds) in enumerate(exposed.items()):
        color, best = RANK_COLORS[i], int(np.argmin(seconds))
        ax.plot(sizes, [t * 1e3 for t in seconds], color=color, linewidth=1.8)
        ax.plot(sizes[best], seconds[best] * 1e3, "o", color=color, markersize=7)
        labels[name] = (sizes[-1], seconds[-1] * 1e3, color)
    ax.set(yscale="log", ylabel="time added to the step (ms)",
           title="modelled: communication that is not hidden; dots: least")  # fmt: skip
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    size_axis(ax, sizes, "bucket size")
    if default is not None:
        ax.axvline(default, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
        look = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
        ax.annotate(format_bytes(default), (default, 1), (4, -4), **look)
    label_lines(ax, labels)
    return figure


def gradient_range(gradients: Mapping[str, Sequence[float]], ranges: Mapping[str, tuple[float, float]]) -> Figure:
    """Draw how large the elements of gradients are, above the numbers that formats can hold.

    Parameters
    ----------
    gradients : dict of name to list of float
        Elements; zeros are left out.
    ranges : dict of format to (exponent of the smallest, exponent of the largest power of two)
    """
    figure, axes = grid_figure(2, 1, size=(WIDTH, 4.0), sharex=True, height_ratios=[2.4, 1])
    ax, below = axes[:, 0]
    edges = np.arange(-60, 17)
    for i, (name, values) in enumerate(gradients.items()):
        size = np.abs(np.asarray(values, float))
        exponents = np.log2(size[size > 0])
        share, _ = np.histogram(exponents, edges)
        share = share / max(1, len(exponents))
        ax.fill_between(edges[:-1] + 0.5, share, color=tint(RANK_COLORS[i]), alpha=0.6, linewidth=0)
        ax.plot(edges[:-1] + 0.5, share, color=RANK_COLORS[i])
        top = int(np.argmax(share))
        ax.annotate(name, (edges[top] + 0.5, share[top]), (0, 4), textcoords="offset points", ha="center",
                    color=readable(RANK_COLORS[i]), fontweight="bold", path_effects=HALO)  # fmt: skip
    for y, (name, (low, high)) in enumerate(ranges.items()):
        start, end = max(low, edges[0]), min(high, edges[-1])
        below.barh(y, end - start, left=start, height=0.6, color="#DDDDDD", edgecolor=INK, linewidth=0.6)
        below.text(edges[-1] + 0.8, y, name, va="center", fontweight="bold")
    ax.set(ylabel="share of elements", title="measured: size of gradient elements; bars: what a format holds")
    ax.margins(y=0.15)
    ax.set_ylim(0, None)
    below.set(xlabel="power of two", ylim=(len(ranges) - 0.4, -0.6), yticks=[], xlim=(edges[0], edges[-1]))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def checkpointing(
    layers: Sequence[int], kept: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]]
) -> Figure:
    """Draw bytes kept for backward (counted) and seconds of a step (measured) over the number of layers, by way."""
    figure, (left, right) = new_figure(1, 2, size=(9.6, 3.4))
    for ax, by_way, scale in ((left, kept, 1e-6), (right, seconds, 1e3)):
        ends = {}
        for i, (name, values) in enumerate(by_way.items()):
            scaled = [value * scale for value in values]
            ax.plot(layers, scaled, marker=MARKERS[i], markersize=5, color=RANK_COLORS[i])
            ends[name] = (layers[-1], scaled[-1], RANK_COLORS[i])
        ax.set(xlabel="layers", ylim=(0, None))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.grid(True, **_GRID)
        label_lines(ax, ends)
    left.set(ylabel="kept for backward (MB)", title="counted: memory of activations")
    right.set(ylabel="forward and backward (ms)", title="measured: time")
    return figure
