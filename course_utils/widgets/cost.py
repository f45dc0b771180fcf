"""Enter prices and efficiencies; see what a training run takes and costs on few and on many GPUs."""

from __future__ import annotations

import math

import ipywidgets as widgets
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from ..plots import RANK_COLORS, label_lines, new_figure
from ._explorer import Explorer, Picture

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


def _number(value: float, description: str, low: float = 0.0, high: float = 1e9) -> widgets.BoundedFloatText:
    return widgets.BoundedFloatText(
        value=value, min=low, max=high, description=description, style={"description_width": "190px"},
        layout={"width": "300px"},
    )


def cost_calculator() -> widgets.Widget:
    """Work out hours and dollars of a run from your prices, GPUs, scaling and interruptions.

    The prices that it opens with are examples. On-demand GPUs are taken not to be interrupted.
    """
    work = _number(1000, "hours on one GPU", 0.001)
    price, spot = _number(1.00, "$ per GPU hour (example)"), _number(0.50, "$ per spot hour (example)")
    kept = _number(95, "% kept at each doubling", 1, 100)
    rate = _number(5, "stops per 1,000 spot hours", 0, 1e6)
    save, restart = _number(2, "minutes to save", 0, 1e5), _number(10, "minutes to restart", 0, 1e5)
    gpus = widgets.SelectionSlider(options=_GPUS, value=8, description="GPUs", continuous_update=False)
    status, picture = widgets.HTML(), Picture()

    def draw(_=None) -> None:
        share = kept.value / 100

        def useful(n: int) -> float:
            return goodput(n * rate.value / 1000, save.value / 60, restart.value / 60)

        runs = {
            "on demand": [_run(work.value, n, share, price.value, 1.0) for n in _GPUS],
            "spot": [_run(work.value, n, share, spot.value, useful(n)) for n in _GPUS],
        }
        at = _GPUS.index(gpus.value)
        told = [f"{name}: {_span(runs[name][at][0])}, ${runs[name][at][1]:,.2f}" for name in runs]
        status.value = (
            f"{gpus.value:,} GPUs at {efficiency(gpus.value, share):.0%} efficiency, {useful(gpus.value):.0%} of the "
            f"time on spot useful. {'; '.join(told)}. One GPU on demand: ${work.value * price.value:,.2f}."
        )
        picture.show(_draw(gpus.value, runs))

    for control in (work, price, spot, kept, rate, save, restart, gpus):
        control.observe(draw, "value")
    draw()
    return Explorer([[work, kept, gpus], [price, spot], [rate, save, restart]], status, picture)
