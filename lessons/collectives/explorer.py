"""Enter prices and efficiencies; see what a training run takes and costs on few and on many GPUs."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from course_utils.draw.charts import label_lines
from course_utils.draw.controls import decimal, slider
from course_utils.draw.explorer import Explorer
from course_utils.draw.style import RANK_COLORS, new_figure

__all__ = ["cost_calculator", "efficiency", "goodput"]

_GPUS = tuple(2**k for k in range(15))
_COLORS = {"on demand": RANK_COLORS[0], "spot": RANK_COLORS[1]}


def efficiency(gpus: int, kept: float) -> float:
    """Return speed-up over `gpus` where each doubling of the GPUs keeps the share `kept` of a GPU's throughput."""
    return kept ** math.log2(gpus)


def goodput(rate: float, save: float, restart: float) -> float:
    """Return the share of a job's time that becomes progress, at the best interval between checkpoints.

    Parameters
    ----------
    rate : float
        Interruptions of the job per hour.
    save, restart : float
        Hours that one checkpoint takes, and that it takes to be running again after an interruption.

    Returns
    -------
    float
        every / (every + save) of the time is work between checkpoints, and each interruption costs the restart and
        half an interval; `every` is sqrt(2 save / rate). Zero where nothing would be left. 1 without interruptions.
    """
    if not rate:
        return 1.0
    every = math.sqrt(2 * save / rate)
    return (every / (every + save) if every else 1.0) * max(0.0, 1 - rate * (restart + every / 2))


def _run(work: float, gpus: int, kept: float, price: float, useful: float) -> tuple[float, float]:
    """Return hours and dollars of a run of `work` GPU hours; both infinite where nothing is useful."""
    hours = work / (gpus * efficiency(gpus, kept) * useful) if useful else math.inf
    return hours, hours * gpus * price


def _span(hours: float) -> str:
    if math.isinf(hours):
        return "no end"
    if hours < 1:
        return f"{hours * 60:.0f} min"
    return f"{hours:,.1f} hours" if hours < 96 else f"{hours / 24:,.1f} days"


def _draw(at: int, runs: dict[str, list[tuple[float, float]]]) -> Figure:
    """Draw hours and dollars of each way to pay over the number of GPUs, with a dot at `at` GPUs."""
    figure, axes = new_figure(1, 2, size=(11.0, 3.6))
    for i, (ax, label) in enumerate(zip(axes, ("hours", "$"), strict=True)):
        labels = {}
        for name, points in runs.items():
            shown = [(n, point[i]) for n, point in zip(_GPUS, points, strict=True) if math.isfinite(point[i])]
            if not shown:
                continue
            ax.plot(*zip(*shown, strict=True), color=_COLORS[name], linewidth=1.8)
            ax.plot(*zip(*[p for p in shown if p[0] == at], strict=True) or ([], []), "o", color=_COLORS[name])
            labels[name] = (*shown[-1], _COLORS[name])
        ax.set(xscale="log", yscale="log", xlabel="GPUs", ylabel=label)
        ax.set_xticks(_GPUS[::3], [f"{n:,}" for n in _GPUS[::3]])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        if label == "$":
            ax.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        ax.yaxis.grid(True, color="#E5E5E5", linewidth=0.7)
        label_lines(ax, labels)
    axes[0].set_title("modelled: time of the run")
    axes[1].set_title("modelled: cost of the run")
    return figure


def _render(
    work: float, price: float, spot: float, kept: float, rate: float, save: float, restart: float, gpus: int
) -> tuple[Figure, str]:
    share = kept / 100

    def useful(n: int) -> float:
        return goodput(n * rate / 1000, save / 60, restart / 60)

    runs = {
        "on demand": [_run(work, n, share, price, 1.0) for n in _GPUS],
        "spot": [_run(work, n, share, spot, useful(n)) for n in _GPUS],
    }
    at = _GPUS.index(gpus)
    told = [f"{name}: {_span(runs[name][at][0])}, ${runs[name][at][1]:,.2f}" for name in runs]
    words = (
        f"{gpus:,} GPUs at {efficiency(gpus, share):.0%} efficiency, {useful(gpus):.0%} of the "
        f"time on spot useful. {'; '.join(told)}. One GPU on demand: ${work * price:,.2f}."
    )
    return _draw(gpus, runs), words


def cost_calculator() -> Explorer:
    """Work out hours and dollars of a run from your prices, GPUs, scaling and interruptions.

    The prices that it opens with are examples. On-demand GPUs are taken not to be interrupted.
    """
    rows = [
        {
            "work": decimal("hours on one GPU", 1000, 0.001, 1e9),
            "kept": decimal("% kept at each doubling", 95, 1, 100),
            "gpus": slider("GPUs", _GPUS, 8),
        },
        {
            "price": decimal("$ per GPU hour (example)", 1.00, 0, 1e9),
            "spot": decimal("$ per spot hour (example)", 0.50, 0, 1e9),
        },
        {
            "rate": decimal("stops per 1,000 spot hours", 5, 0, 1e6),
            "save": decimal("minutes to save", 2, 0, 1e5),
            "restart": decimal("minutes to restart", 10, 0, 1e5),
        },
    ]
    return Explorer(rows, _render)
