"""Enter prices and efficiencies; see what a training run takes and costs on few and on many GPUs."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from course_utils.draw.controls import decimal, slider
from course_utils.draw.explorer import Explorer
from course_utils.draw.panels import Panel, dots, panels
from course_utils.draw.style import RANK_COLORS

_GPUS = tuple(2**k for k in range(15))
_COLORS = {"on demand": RANK_COLORS[0], "spot": RANK_COLORS[1]}


def efficiency(gpus: int, kept: float) -> float:
    """Return speed-up over `gpus` where each doubling of the GPUs keeps the share `kept` of a GPU's throughput."""
    return kept ** math.log2(gpus)


def goodput(rate: float, save: float, restart: float) -> float:
    """Return the share of a job's time that becomes progress, at the best interval between checkpoints.

    `rate` is interruptions per hour, `save` the hours of a checkpoint, `restart` those until it runs again after an
    interruption. Work between checkpoints is every / (every + save) of the time, and each interruption costs the
    restart and half an interval; `every` is sqrt(2 save / rate). Zero where nothing would be left.
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
    several = []
    for i, (y, title) in enumerate((("hours", "modelled: time of the run"), ("$", "modelled: cost of the run"))):
        lines = {name: [point[i] for point in points] for name, points in runs.items()}
        points = [dots([at], [values[_GPUS.index(at)]], _COLORS[name], 6) for name, values in lines.items()]
        several.append(Panel(title, y, lines, colors=_COLORS, look={"linewidth": 1.8}, log=True, form="{:,g}",
                             above=points))
    figure = panels(_GPUS, *several, counts="GPUs", ticks=_GPUS[::3], size=(11.0, 3.6))
    figure.axes[1].yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
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
