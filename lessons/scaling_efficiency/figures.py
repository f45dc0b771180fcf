"""Speed-up and efficiency over ranks, where a step's time goes, and what wins some of it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

from course_utils.draw import charts
from course_utils.draw.lanes import step_spans
from course_utils.draw.panels import loss_curves
from course_utils.draw.style import FAINT, INK, RANK_COLORS, WIDTH, naming, new_figure, tint
from course_utils.recorded import Scaling
from course_utils.units import format_bytes

__all__ = [
    "bucket_choice",
    "bucket_sweep",
    "checkpointing",
    "gradient_range",
    "loss_curves",
    "scaling_curves",
    "scaling_models",
    "speedup_laws",
    "step_spans",
]

_IDEAL = {"linestyle": "--", "color": FAINT, "linewidth": 1.2}


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
    ranks = np.geomspace(1, most, 200)
    for ax, (name, law) in zip(axes, laws.items(), strict=True):
        ax.plot(ranks, ranks, **_IDEAL)
        speedups = {f"{100 * share:g} %": [law(n, share) for n in ranks] for share in shares}
        ends = charts.draw_lines(ax, ranks, speedups, linewidth=1.8)
        ax.set(yscale="log", title=f"modelled: {name}", xlim=(1, most), ylim=(1, most))
        charts.format_ticks(ax.yaxis, "{:g}")
        charts.count_axis(ax, [n for n in (1, 10, 100, 1000, 10_000) if n <= most])
        charts.label_lines(ax, ends)
    axes[0].set(ylabel="speed-up")
    return figure


def scaling_curves(
    ranks: Sequence[int], throughput: Mapping[str, Sequence[float]], kind: str, limit: int | None = None,
    unit: str = "ranks",
) -> Figure:
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
    left.plot(ranks, ideal, **_IDEAL)
    right.axhline(1, **_IDEAL)
    speedups = {name: np.divide(rates, rates[0]) for name, rates in throughput.items()}
    speedup_ends: charts.Ends = {"ideal": (ranks[-1], ideal[-1], "#777777")}
    efficiency_ends: charts.Ends = {}
    if limit is not None and limit < ranks[-1]:
        look = {"colors": {f"{limit} cores": INK}, "linestyle": ":", "linewidth": 1.4}
        bound = np.minimum(ranks, limit)
        speedup_ends |= charts.draw_lines(left, ranks, {f"{limit} cores": bound}, **look)
        efficiency_ends |= charts.draw_lines(right, ranks, {f"{limit} cores": np.divide(bound, ranks)}, **look)
    speedup_ends |= charts.draw_lines(left, ranks, speedups, markers=5)
    efficiency_ends |= charts.draw_lines(right, ranks, {name: s / ideal for name, s in speedups.items()}, markers=5)
    against = f"against {ranks[0]} {unit.rstrip('s') if ranks[0] == 1 else unit}"
    left.set(ylabel=f"speed-up {against}", title=f"{kind}: speed-up", yscale="log")
    left.set_yticks(ideal, [f"{s:g}" for s in ideal])
    left.yaxis.set_minor_locator(NullLocator())
    right.set(ylabel="efficiency", title=f"{kind}: efficiency", ylim=(0, None))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    for ax, ends in ((left, speedup_ends), (right, efficiency_ends)):
        charts.count_axis(ax, ranks, unit)
        charts.label_lines(ax, ends)
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
    errors = {name: np.array(values) / rates - 1 for name, values in predicted.items()}
    ends = (charts.draw_lines(left, gpus, predicted, linewidth=1.6),
            charts.draw_lines(right, gpus, errors, markers=4, linewidth=1.6))
    right.axhline(0, color=FAINT, linewidth=1)
    left.set(ylim=(0, None), ylabel="tokens per second and GPU",
             title=f"recorded (points; filled: seen by the fit),\nmodelled: {record.name}")
    right.set(ylabel="prediction above record", title="error of the models")
    charts.format_ticks(left.yaxis, "{:,.0f}")
    right.yaxis.set_major_formatter(PercentFormatter(1))
    for ax, labels in zip((left, right), ends, strict=True):
        charts.count_axis(ax, gpus, "GPUs")
        charts.label_lines(ax, labels)
    return figure










def bucket_sweep(messages: Sequence[int], step: Sequence[float], overlap: Sequence[float]) -> Figure:
    """Draw, over the number of buckets, the seconds of a step, and the share of communication that lies in backward."""
    figure, (left, right) = new_figure(1, 2, size=(9.6, 3.4))
    left.plot(messages, np.multiply(step, 1e3), marker="o", markersize=5, color=RANK_COLORS[0])
    right.plot(messages, overlap, marker="^", markersize=5, color=RANK_COLORS[2])
    left.set(ylabel="forward and backward (ms)", title="measured: time by number of buckets", ylim=(0, None))
    right.set(ylabel="share of communication", title="measured: overlap with backward", ylim=(0, 1))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    for ax in (left, right):
        charts.count_axis(ax, messages, "buckets, one all-reduce each")
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
    figure, (ax,) = new_figure(size=(8.4, 3.7))
    ends = charts.draw_lines(ax, sizes, exposed, scale=1e3, linewidth=1.8)
    for name, seconds in exposed.items():
        best = int(np.argmin(seconds))
        ax.plot(sizes[best], seconds[best] * 1e3, "o", color=ends[name][2], markersize=7)
    ax.set(yscale="log", ylabel="time added to the step (ms)",
           title="modelled: communication that is not hidden; dots: least")
    charts.format_ticks(ax.yaxis, "{:g}")
    charts.size_axis(ax, sizes, "bucket size")
    if default is not None:
        charts.mark(ax, default, format_bytes(default))
    charts.label_lines(ax, ends)
    return figure


def gradient_range(gradients: Mapping[str, Sequence[float]], ranges: Mapping[str, tuple[float, float]]) -> Figure:
    """Draw how large the elements of gradients are, above the numbers that formats can hold.

    Parameters
    ----------
    gradients : dict of name to list of float
        Elements; zeros are left out.
    ranges : dict of format to (exponent of the smallest, exponent of the largest power of two)
    """
    figure, (ax, below) = new_figure(2, 1, size=(WIDTH, 4.0), sharex=True, height_ratios=[2.4, 1])
    edges = np.arange(-60, 17)
    for i, (name, values) in enumerate(gradients.items()):
        size = np.abs(np.asarray(values, float))
        exponents = np.log2(size[size > 0])
        share, _ = np.histogram(exponents, edges)
        share = share / max(1, len(exponents))
        ax.fill_between(edges[:-1] + 0.5, share, color=tint(RANK_COLORS[i]), alpha=0.6, linewidth=0)
        ax.plot(edges[:-1] + 0.5, share, color=RANK_COLORS[i])
        top = int(np.argmax(share))
        charts.beside(ax, name, (edges[top] + 0.5, share[top]), (0, 4), ha="center", **naming(RANK_COLORS[i]))
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
        ends = charts.draw_lines(ax, layers, by_way, scale=scale, markers=5)
        ax.set(xlabel="layers", ylim=(0, None))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        charts.grid(ax)
        charts.label_lines(ax, ends)
    left.set(ylabel="kept for backward (MB)", title="counted: memory of activations")
    right.set(ylabel="forward and backward (ms)", title="measured: time")
    return figure
