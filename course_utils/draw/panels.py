"""Panels of lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from . import charts
from .style import RANK_COLORS, new_figure, tint


def loss_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, xlabel: str = "step",
    wide: Sequence[str] = (), marks: Mapping[str, float] | None = None,
) -> Figure:
    """Draw loss curves with their names at their ends.

    Parameters
    ----------
    curves : dict of name to (x, loss)
        Loss in nats per token.
    title : str
    xlabel : str
        What x counts.
    wide : sequence of names
        Curves drawn broad and pale, each narrower than the one before, so that others can be seen on top of them.
    marks : dict of text to x, optional
        Vertical lines, such as the step of a checkpoint.
    """
    figure, (ax,) = new_figure(size=(8.0, 3.5))
    ends: charts.Ends = {}
    for i, (name, (x, loss)) in enumerate(curves.items()):
        color, look = RANK_COLORS[i % 6], {"linewidth": 1.6}
        if name in wide:
            order = wide.index(name)
            look = {"linewidth": 3.5 + 2 * (len(wide) - 1 - order), "zorder": 1 + order / len(wide)}
        ax.plot(x, loss, color=tint(color) if name in wide else color, **look)
        ends[name] = (x[-1], loss[-1], color)
    for text, at in (marks or {}).items():
        charts.mark(ax, at, text)
    ax.set(xlabel=xlabel, ylabel="loss (nats per token)", title=title)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_axisbelow(True)
    charts.grid(ax)
    charts.label_lines(ax, ends)
    return figure
