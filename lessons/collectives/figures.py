"""A step of a collective with its messages; time and bandwidth over message size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from course_utils.costs import busbw
from course_utils.draw.lanes import draw_buffers
from course_utils.draw.panels import Panel, panels
from course_utils.draw.style import INK, new_figure, rank_color

from .collective_algorithms import Message


def step_picture(states: Sequence[tuple], messages: Sequence[Message], titles: tuple[str, str]) -> Figure:
    """Draw every rank's slots before and after one step, with an arrow for each message.

    `states` are two pairs: values by rank and slot (None: empty), and the ranks that contributed to each.
    """
    n = len(states[0][0])
    figure, axes = new_figure(1, 2, size=(2.8 + 1.15 * n, 0.6 + 0.42 * n))
    for ax, (values, owners), title in zip(axes, states, titles, strict=True):
        draw_buffers(ax, values, owners, title)
    for m in messages:
        many = len(m.pieces) > 1  # the whole row: one thick arrow in the sender's column
        columns = (m.src % n, m.src % n) if many else (m.pieces[0], m.into[0])
        ends = [(columns[0] + 0.5, m.src + 0.5), (columns[1] + 0.5, m.dst + 0.5)]
        bend = 0.25 * (abs(m.src - m.dst) > 1 or columns[0] != columns[1])
        side = -1 if columns[0] == columns[1] and m.src > m.dst else 1  # pairs that swap keep their arrows apart
        look = {"arrowstyle": "-|>", "mutation_scale": 13, "shrinkA": 9, "shrinkB": 9, "zorder": 4}
        look |= {"color": rank_color(m.src), "linewidth": 3.5 if many else 2}
        axes[0].add_patch(FancyArrowPatch(*ends, connectionstyle=f"arc3,rad={side * bend}", **look))
    return figure


def bandwidth(
    sizes: Sequence[float], seconds: Mapping[str, Sequence[float]], world_size: int, *, kind: str = "measured",
    fit: tuple[float, float] | None = None,
) -> Figure:
    """Draw seconds and bus bandwidth of collectives over message size in bytes; `fit` is alpha and beta, dashed."""
    rates = {op: [busbw(op, world_size, s, t) / 1e9 for s, t in zip(sizes, times, strict=True)]
             for op, times in seconds.items()}
    many = np.geomspace(sizes[0], sizes[-1], 60)
    dashed = [(many, 1e3 * (fit[0] + fit[1] * many), {"color": INK, "linestyle": "--", "linewidth": 1})] if fit else []
    figure = panels(
        sizes,
        Panel(f"{kind}: time, {world_size} ranks", "time of one call (ms)", seconds, 1e3, markers=4, log=True,
              above=dashed),
        Panel(f"{kind}: bus bandwidth, {world_size} ranks", "bus bandwidth (GB/s)", rates, markers=4),
        sizes="message size S",
    )
    if fit:
        figure.axes[0].text(0.04, 0.95, "dashed: α + βS, modelled", transform=figure.axes[0].transAxes, va="top")
    return figure
