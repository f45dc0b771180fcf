"""Pipelines in pictures: schedules over time, the activations that ranks hold, simulated against real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from course_utils.draw import charts
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


def _draw_rows(ax: Axes, rows: Sequence[Sequence[Box]], ranks: int, inches: float, end: float) -> None:
    """One row of boxes for each rank; the micro-batch is written where it has room."""
    for rank, boxes in enumerate(rows):
        kinds = {(op.kind, op.stage // ranks) for op, *_ in boxes}
        for kind, chunk in sorted(kinds):
            bars = [(a, b - a) for op, a, b in boxes if (op.kind, op.stage // ranks) == (kind, chunk)]
            ax.broken_barh(bars, (rank - _HEIGHT / 2, _HEIGHT), facecolor=_shade(kind, chunk), edgecolor="white",
                           linewidth=0.6 if len(boxes) < 200 else 0)
        for op, a, b in boxes:
            text = str(op.microbatch)
            if (b - a) / end * inches * 72 > 5.0 * len(text) + 3:
                ax.text((a + b) / 2, rank, text, ha="center", va="center_baseline", fontsize=SMALL)
    charts.name_rows(ax, [f"rank {rank}" if len(rows) <= 16 else "" for rank in range(len(rows))])
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, end))
    ax.axvspan(0, max(b for boxes in rows for *_, b in boxes), color=_IDLE, zorder=0, linewidth=0)
    ax.spines[:].set_visible(False)


def _legend(figure: Figure, kinds: Sequence[str], stages: int = 1) -> None:
    """Tell the colours of operations, and the shades of a rank's `stages`."""
    of = [f", stage {chunk + 1} of a rank" if stages > 1 else "" for chunk in range(stages)]
    handles = [Patch(facecolor=_shade(kind, chunk), label=f"{kind} {_NAMES[kind]}{of[chunk]}")
               for kind in kinds for chunk in range(stages)]
    handles.append(Patch(facecolor=_IDLE, edgecolor="#CCCCCC", label="idle"))
    columns = len(handles) if stages == 1 else 3
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=SMALL + 0.5)


def _panels(heights: Sequence[float], title: str, shared: bool) -> tuple[Figure, Sequence[Axes]]:
    size = (WIDTH, sum(heights) + 0.75)
    return new_figure(len(heights), 1, size=size, title=title, sharex=shared, height_ratios=heights)


def _number(value: float) -> str:
    return f"{value:.3g}"


def _in_flight(peak: Sequence[float]) -> str:
    shown = [_number(value) for value in peak]
    if len(set(shown)) == 1:
        return f"{shown[0]} on every rank"
    return ", ".join(shown) if len(shown) <= 8 else f"{shown[0]} (rank 0) to {shown[-1]} (rank {len(shown) - 1})"


def schedule_picture(timelines: Timeline | Sequence[Timeline], title: str, unit: str = "") -> Figure:
    """Draw schedules below each other on one axis of time: a row a rank, a box an operation with its micro-batch.

    Above each stand the time from step to step, the share of it that ranks idle, and the most activations that each
    rank holds. Of a rank's stages the later ones have another shade. Numbers are written where the boxes have room.

    Parameters
    ----------
    timelines : Timeline or sequence of Timeline
    title : str
    unit : str
        Of time; empty for the units of the costs.
    """
    timelines = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    row = _ROW if max(t.schedule.ranks for t in timelines) <= 16 else 3.6 / max(t.schedule.ranks for t in timelines)
    figure, axes = _panels([_HEAD + row * t.schedule.ranks for t in timelines], title, shared=True)
    end = max(t.seconds for t in timelines)
    for ax, timeline in zip(axes, timelines, strict=True):
        _draw_rows(ax, timeline.spans, timeline.schedule.ranks, WIDTH - 1, end)
        ax.set_title(
            f"{timeline.schedule.name}: {_number(timeline.period)}{unit and ' ' + unit} a step, idle "
            f"{timeline.bubble:.0%}, activations at most {_in_flight(timeline.peak)}", fontsize=9.5,
        )
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=end >= 12))
    axes[-1].set_xlabel(f"time ({unit or 'modelled'})")
    used = {span.op.kind for t in timelines for spans in t.spans for span in spans}
    stages = max(t.schedule.virtual for t in timelines)
    _legend(figure, [kind for kind in PIPELINE_COLORS if kind in used], stages)
    return figure


def real_pipeline(
    simulated: Timeline, measured: Sequence[Sequence[Box]], title: str, unit: str = ""
) -> Figure:
    """Draw a simulated schedule above the same one on real ranks, each on its own axis of time.

    Parameters
    ----------
    simulated : Timeline
    measured : by rank, list of (Op, start, end)
        Seconds since the first operation of any rank began.
    title : str
    unit : str
        That of the simulated costs, if they have one.
    """
    height = _HEAD + _ROW * len(measured)
    figure, (top, bottom) = _panels([height, height + 0.25], title, shared=False)
    _draw_rows(top, simulated.spans, len(measured), WIDTH - 1, simulated.seconds)
    top.set_title(f"modelled: {simulated.schedule.name}, idle {simulated.bubble:.0%}", fontsize=9.5)
    rows = [[(op, 1e3 * a, 1e3 * b) for op, a, b in boxes] for boxes in measured]
    end = max(b for boxes in rows for *_, b in boxes)
    busy = sum(b - a for boxes in rows for _, a, b in boxes)
    _draw_rows(bottom, rows, len(measured), WIDTH - 1, end)
    idle = 1 - busy / (len(rows) * end)
    bottom.set_title(f"measured: the same on real ranks, not computing {idle:.0%}", fontsize=9.5)
    top.set_xlabel(f"time ({unit or 'modelled'})")
    bottom.set_xlabel("time (ms)")
    used = {op.kind for boxes in measured for op, *_ in boxes}
    _legend(figure, [kind for kind in PIPELINE_COLORS if kind in used])
    return figure


def activation_steps(timelines: Sequence[Timeline], title: str) -> Figure:
    """Draw the activations that each rank holds over time, one panel a schedule, all with the same scale."""
    figure, axes = new_figure(1, len(timelines), size=(1.4 + 3.4 * len(timelines), 2.9), title=title, sharey=True)
    highest = max(max(t.peak) for t in timelines)
    for ax, timeline in zip(axes, timelines, strict=True):
        peaks: dict[str, list[int]] = {}
        for rank, steps in enumerate(timeline.memory):
            when, held = zip(*steps, strict=True)
            dashes = ("-", (0, (5, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1, 1.5)))[rank % 4]
            ax.step([*when, timeline.seconds], [*held, held[-1]], color=rank_color(rank), linewidth=1.6, where="post",
                    linestyle=dashes)
            peaks.setdefault(_number(timeline.peak[rank]), []).append(rank)
        for peak, ranks in peaks.items() if len(peaks) <= 8 else []:
            first = next(t for t, value in timeline.memory[ranks[0]] if _number(value) == peak)
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            color = rank_color(ranks[0]) if len(ranks) == 1 else INK
            charts.beside(ax, f"{who}: {peak}", (first, float(peak)), (3, 3), fontsize=SMALL, **naming(color))
        ax.set(ylim=(0, highest * 1.15), xlim=(0, timeline.seconds), xlabel="time (modelled)")
        ax.set_title(timeline.schedule.name)
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[0].set_ylabel("activations held\n(micro-batches)")
    return figure


def bubble_curves(microbatches: Sequence[int], bubbles: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw the share of idle time over the number of micro-batches, one line for schedules that are equal throughout.

    Parameters
    ----------
    microbatches : sequence of int
    bubbles : dict of name to list of float
        Idle share, 0 to 1, for each number of micro-batches.
    """
    equal: dict[tuple[float, ...], list[str]] = {}
    for name, shares in bubbles.items():
        equal.setdefault(tuple(round(share, 9) for share in shares), []).append(name)
    figure, (ax,) = new_figure(size=(7.6, 3.4))
    curves = {", ".join(names): shares for shares, names in equal.items()}
    ends = charts.draw_lines(ax, microbatches, curves, scale=100, marker="o", markersize=4)
    top = 105 * max(max(shares) for shares in equal)
    ax.set(ylabel="idle (%)", ylim=(-0.05 * top, top), title=title)
    charts.count_axis(ax, microbatches, "micro-batches m")
    charts.label_lines(ax, ends)
    return figure
