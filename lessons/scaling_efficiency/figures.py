"""Speed-up and efficiency over ranks, where a step's time goes, and what wins some of it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from course_utils.draw import charts
from course_utils.draw.lanes import step_spans as step_spans
from course_utils.draw.panels import IDEAL, Panel, dots, panels
from course_utils.draw.panels import loss_curves as loss_curves
from course_utils.draw.style import DASHED, FAINT, INK, RANK_COLORS, WIDTH, naming, new_figure, tint
from course_utils.recorded import Scaling
from course_utils.units import format_bytes


def speedup_laws(laws: Mapping[str, Callable[[float, float], float]], shares: Sequence[float], most: int) -> Figure:
    """Draw the speed-up that each law gives for 1 to `most` ranks, one panel a law, one line a serial share."""
    ranks = np.geomspace(1, most, 200)
    several = [
        Panel(f"modelled: {name}", "speed-up", {f"{100 * s:g} %": [law(n, s) for n in ranks] for s in shares}, log=True,
              form="{:g}", limits=(1, most), look={"linewidth": 1.8}, below=[(ranks, ranks, IDEAL)])
        for name, law in laws.items()
    ]
    figure = panels(ranks, *several, counts="ranks", ticks=[n for n in (1, 10, 100, 1000) if n <= most], sharey=True)
    for ax in figure.axes:
        ax.set_xlim(1, most)
        ax.label_outer()
    return figure


def scaling_curves(
    ranks: Sequence[int], throughput: Mapping[str, Sequence[float]], kind: str, limit: int | None = None,
    unit: str = "ranks",
) -> Figure:
    """Draw speed-up and efficiency of ways to grow, from their tokens/s at each number of ranks.

    No speed-up can be larger than the `limit` of cores that the ranks share, a dotted line.
    """
    ideal = np.divide(ranks, ranks[0])
    speed = {name: np.divide(rates, rates[0]) for name, rates in throughput.items()}
    left, right = [(ranks, ideal, IDEAL)], [(ranks, ideal / ideal, IDEAL)]
    left_names, right_names = {"ideal": (ranks[-1], ideal[-1], "#777777")}, {}
    if limit is not None and limit < ranks[-1]:
        bound, look = np.minimum(ranks, limit), {"color": INK, "linestyle": ":", "linewidth": 1.4}
        left.append((ranks, bound, look))
        right.append((ranks, bound / ranks, look))
        left_names[f"{limit} cores"] = (ranks[-1], limit, INK)
        right_names[f"{limit} cores"] = (ranks[-1], limit / ranks[-1], INK)
    against = f"speed-up against {ranks[0]} {unit.rstrip('s') if ranks[0] == 1 else unit}"
    efficiency = {name: values / ideal for name, values in speed.items()}
    figure = panels(
        ranks, Panel(f"{kind}: speed-up", against, speed, markers=5, log=True, below=left, names=left_names),
        Panel(f"{kind}: efficiency", "efficiency", efficiency, markers=5, form="%", below=right, names=right_names),
        counts=unit,
    )
    figure.axes[0].set_yticks(ideal, [f"{s:g}" for s in ideal])
    figure.axes[0].yaxis.set_minor_locator(NullLocator())
    return figure


def scaling_models(record: Scaling, predicted: Mapping[str, Sequence[float]], fitted: int) -> Figure:
    """Draw a recorded throughput per GPU and what models predict, which have seen the first `fitted` points."""
    gpus, rates = record.gpus, np.array(record.tokens_per_gpu)
    points = [dots(gpus[:fitted], rates[:fitted], size=7),
              dots(gpus[fitted:], rates[fitted:], size=7, markerfacecolor="white")]
    errors = {name: np.array(values) / rates - 1 for name, values in predicted.items()}
    return panels(
        gpus, Panel(f"recorded (points; filled: seen by the fit),\nmodelled: {record.name}",
                    "tokens per second and GPU", predicted, form="{:,.0f}", look={"linewidth": 1.6}, below=points),
        Panel("error of the models", "prediction above record", errors, form="%", markers=4, look={"linewidth": 1.6},
              limits=(None, None), then=lambda ax: ax.axhline(0, color=FAINT, linewidth=1)),
        counts="GPUs", size=(WIDTH, 3.7),
    )


def bucket_sweep(messages: Sequence[int], step: Sequence[float], overlap: Sequence[float]) -> Figure:
    """Draw, over the number of buckets, the seconds of a step, and the share of communication that lies in backward."""
    return panels(
        messages, Panel("measured: time by number of buckets", "forward and backward (ms)", {"": step}, 1e3, markers=5),
        Panel("measured: overlap with backward", "share of communication", {"": overlap}, colors={"": RANK_COLORS[2]},
              look={"marker": "^", "markersize": 5}, limits=(0, 1), form="%"),
        counts="buckets, one all-reduce each",
    )


def bucket_choice(sizes: Sequence[float], exposed: Mapping[str, Sequence[float]], default: float) -> Figure:
    """Draw the modelled seconds that communication adds to a step over bucket size, with the best size of each curve.

    Seconds are those that backward alone does not hide; the size `default` is marked.
    """
    best = [dots(sizes[int(np.argmin(seconds))], 1e3 * min(seconds), color, 7)
            for seconds, color in zip(exposed.values(), RANK_COLORS, strict=False)]
    title = "modelled: communication that is not hidden; dots: least"
    figure = panels(sizes, Panel(title, "time added to the step (ms)", exposed, 1e3, log=True, form="{:g}", above=best,
                                 look={"linewidth": 1.8}), sizes="bucket size")
    figure.axes[0].axvline(default, **DASHED)
    charts.beside(figure.axes[0], format_bytes(default), (default, 1), (4, -4), xycoords=("data", "axes fraction"),
                  va="top")
    return figure


def gradient_range(gradients: Mapping[str, Sequence[float]], ranges: Mapping[str, tuple[float, float]]) -> Figure:
    """Draw how large the elements of gradients are, zeros left out, above the numbers that formats can hold.

    A range goes from the exponent of the smallest power of two to that of the largest.
    """
    figure, (ax, below) = new_figure(2, 1, size=(WIDTH, 4.0), sharex=True, height_ratios=[2.4, 1])
    edges = np.arange(-60, 17)
    for i, (name, values) in enumerate(gradients.items()):
        size = np.abs(np.asarray(values, float))
        exponents = np.log2(size[size > 0])
        share = np.histogram(exponents, edges)[0] / max(1, len(exponents))
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
    widths: Sequence[int], kept: Mapping[str, Sequence[float]], ratios: Mapping[str, Sequence[float]]
) -> Figure:
    """Draw, over the width of a model, bytes kept for backward by way, and what grows by which factor."""
    figure = panels(
        widths, Panel("counted: memory of activations", "kept for backward (MB)", kept, 1e-6, markers=5),
        Panel("time measured, FLOPs counted", "times as much as without", ratios, markers=5,
              limits=(1, None)),
    )
    for ax in figure.axes:
        ax.set_xlabel("width of the model")
        ax.set_xticks(widths)
    return figure
