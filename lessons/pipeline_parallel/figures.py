"""Pipelines in pictures: schedules over time, the activations that ranks hold, simulated against real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from course_utils.draw import charts
from course_utils.draw.bars import name_rows
from course_utils.draw.panels import Panel, panels
from course_utils.draw.style import INK, RANK_COLORS, SMALL, WIDTH, naming, new_figure, rank_color

from .pipeline import Op, Timeline

#: By kind of operation: forward, full backward, gradient of the input, gradient of the weights.
PIPELINE_COLORS = {"F": RANK_COLORS[0], "B": RANK_COLORS[2], "I": RANK_COLORS[1], "W": RANK_COLORS[3]}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_HEIGHT = 0.86  # of a box, in rows
_ROW, _HEAD = 0.27, 0.42  # inches
_IDLE = "#F1F1F1"

Box = tuple[Op, float, float]


def _shade(kind: str, chunk: int) -> tuple[float, ...]:
    """The colour of an operation, lighter for a rank's later stages."""
    keep = (0.55, 0.25, 0.8, 0.4)[chunk % 4]
    return tuple(1 - keep * (1 - channel) for channel in to_rgb(PIPELINE_COLORS[kind]))


def _draw_rows(ax: Axes, rows: Sequence[Sequence[Box]], end: float, title: str) -> None:
    """One row of boxes for each rank; the micro-batch is written where it has room."""
    ranks = len(rows)
    for rank, boxes in enumerate(rows):
        kinds = {(op.kind, op.stage // ranks) for op, *_ in boxes}
        for kind, chunk in sorted(kinds):
            bars = [(a, b - a) for op, a, b in boxes if (op.kind, op.stage // ranks) == (kind, chunk)]
            ax.broken_barh(bars, (rank - _HEIGHT / 2, _HEIGHT), facecolor=_shade(kind, chunk), edgecolor="white",
                           linewidth=0.6 if len(boxes) < 200 else 0)
        for op, a, b in boxes:
            text = str(op.microbatch)
            if (b - a) / end * (WIDTH - 1) * 72 > 5.0 * len(text) + 3:
                ax.text((a + b) / 2, rank, text, ha="center", va="center_baseline", fontsize=SMALL)
    name_rows(ax, [f"rank {rank}" if ranks <= 16 else "" for rank in range(ranks)])
    ax.set(ylim=(ranks - 0.5, -0.5), xlim=(0, end))
    ax.axvspan(0, max(b for boxes in rows for *_, b in boxes), color=_IDLE, zorder=0, linewidth=0)
    ax.spines[:].set_visible(False)
    ax.set_title(title, fontsize=9.5)


def _legend(figure: Figure, rows: Sequence[Sequence[Box]], stages: int = 1) -> None:
    """Tell the colours of the operations in rows, and the shades of a rank's `stages`."""
    used = {op.kind for boxes in rows for op, *_ in boxes}
    of = [f", stage {chunk + 1} of a rank" if stages > 1 else "" for chunk in range(stages)]
    handles = [Patch(facecolor=_shade(kind, chunk), label=f"{kind} {_NAMES[kind]}{of[chunk]}")
               for kind in PIPELINE_COLORS if kind in used for chunk in range(stages)]
    handles.append(Patch(facecolor=_IDLE, edgecolor="#CCCCCC", label="idle"))
    columns = len(handles) if stages == 1 else 3
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=SMALL + 0.5)


def _panels(heights: Sequence[float], title: str, **subplots: object) -> tuple[Figure, Sequence[Axes]]:
    size = (WIDTH, sum(heights) + 0.75)
    return new_figure(len(heights), 1, size=size, title=title, height_ratios=heights, **subplots)


def _in_flight(peak: Sequence[float]) -> str:
    shown = [f"{value:.3g}" for value in peak]
    if len(set(shown)) == 1:
        return f"{shown[0]} on every rank"
    return ", ".join(shown) if len(shown) <= 8 else f"{shown[0]} (rank 0) to {shown[-1]} (rank {len(shown) - 1})"


def schedule_picture(timelines: Timeline | Sequence[Timeline], title: str, unit: str = "") -> Figure:
    """Draw schedules below each other on one axis of time: a row a rank, a box an operation with its micro-batch.

    Above each stand the time from step to step, the share of it that ranks idle, and the most activations that each
    rank holds. Of a rank's stages the later ones have another shade. Time is in `unit`, or in units of the costs.
    """
    timelines = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    most = max(t.schedule.ranks for t in timelines)
    row = _ROW if most <= 16 else 3.6 / most
    figure, axes = _panels([_HEAD + row * t.schedule.ranks for t in timelines], title, sharex=True)
    end = max(t.seconds for t in timelines)
    for ax, timeline in zip(axes, timelines, strict=True):
        _draw_rows(
            ax, timeline.spans, end, f"{timeline.schedule.name}: {timeline.period:.3g}{unit and ' ' + unit} a step, "
            f"idle {timeline.bubble:.0%}, activations at most {_in_flight(timeline.peak)}",
        )
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=end >= 12))
    axes[-1].set_xlabel(f"time ({unit or 'modelled'})")
    _legend(figure, [boxes for t in timelines for boxes in t.spans], max(t.schedule.virtual for t in timelines))
    return figure


def real_pipeline(simulated: Timeline, measured: Sequence[Sequence[Box]], title: str, unit: str = "") -> Figure:
    """Draw a simulated schedule, in `unit`, above the same one on real ranks, each on its own axis of time.

    Measured are boxes (Op, start, end) by rank, in seconds since the first operation of any rank began.
    """
    height = _HEAD + _ROW * len(measured)
    figure, (top, bottom) = _panels([height, height + 0.25], title)
    idle = f"modelled: {simulated.schedule.name}, idle {simulated.bubble:.0%}"
    _draw_rows(top, simulated.spans, simulated.seconds, idle)
    rows = [[(op, 1e3 * a, 1e3 * b) for op, a, b in boxes] for boxes in measured]
    end = max(b for boxes in rows for *_, b in boxes)
    busy = sum(b - a for boxes in rows for _, a, b in boxes)
    idle = f"measured: the same on real ranks, not computing {1 - busy / (len(rows) * end):.0%}"
    _draw_rows(bottom, rows, end, idle)
    top.set_xlabel(f"time ({unit or 'modelled'})")
    bottom.set_xlabel("time (ms)")
    _legend(figure, rows)
    return figure


def activation_steps(timelines: Sequence[Timeline], title: str) -> Figure:
    """Draw the activations that each rank holds over time, one panel a schedule, all with the same scale."""
    figure, axes = new_figure(1, len(timelines), size=(1.4 + 3.4 * len(timelines), 2.9), title=title, sharey=True)
    for ax, timeline in zip(axes, timelines, strict=True):
        peaks: dict[str, list[int]] = {}
        for rank, steps in enumerate(timeline.memory):
            when, held = zip(*steps, strict=True)
            dashes = ("-", (0, (5, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1, 1.5)))[rank % 4]
            ax.step([*when, timeline.seconds], [*held, held[-1]], color=rank_color(rank), linewidth=1.6, where="post",
                    linestyle=dashes)
            peaks.setdefault(f"{timeline.peak[rank]:.3g}", []).append(rank)
        for peak, ranks in peaks.items() if len(peaks) <= 8 else []:
            first = next(t for t, value in timeline.memory[ranks[0]] if f"{value:.3g}" == peak)
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            color = rank_color(ranks[0]) if len(ranks) == 1 else INK
            charts.beside(ax, f"{who}: {peak}", (first, float(peak)), (3, 3), fontsize=SMALL, **naming(color))
        ax.set(xlim=(0, timeline.seconds), xlabel="time (modelled)", title=timeline.schedule.name)
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[0].set(ylabel="activations held\n(micro-batches)", ylim=(0, 1.15 * max(max(t.peak) for t in timelines)))
    return figure


def bubble_curves(microbatches: Sequence[int], bubbles: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw the share of idle time over the number of micro-batches, one line for schedules that are always equal."""
    equal: dict[tuple[float, ...], list[str]] = {}
    for name, shares in bubbles.items():
        equal.setdefault(tuple(round(share, 9) for share in shares), []).append(name)
    top = 105 * max(map(max, equal))
    curves = {", ".join(names): shares for shares, names in equal.items()}
    panel = Panel(title, "idle (%)", curves, 100, look={"marker": "o", "markersize": 4}, limits=(-0.05 * top, top))
    return panels(microbatches, panel, counts="micro-batches m", size=(7.6, 3.4))
