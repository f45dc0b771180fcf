"""Attention over a sequence that ranks share, and the load of experts: who computes what, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_utils.draw import charts
from course_utils.draw.panels import Panel, panels
from course_utils.draw.style import CENTRED, SMALL, new_figure, rank_color, tint


def mask_picture(orders: Mapping[str, Sequence[Iterable[int]]], title: str) -> Figure:
    """Draw which rank computes which pair of a causal mask, and in which step of a ring, for the tokens of each rank.

    A row is a query and a column a key, both from token 0 on. A pair has the colour of the rank that holds the query,
    and the number of the step in which the key comes to that rank: 0 is its own. What the mask hides stays white.
    """
    orders = {name: [[int(token) for token in tokens] for tokens in order] for name, order in orders.items()}
    length = sum(map(len, next(iter(orders.values()))))
    figure, axes = new_figure(1, len(orders), size=(2.8 * len(orders), 3.3), title=title)
    for ax, (name, order) in zip(axes, orders.items(), strict=True):
        rank_of = {token: rank for rank, tokens in enumerate(order) for token in tokens}
        for query in range(length):
            for key in range(query + 1):
                step = (rank_of[query] - rank_of[key]) % len(order)
                charts.cell(ax, key, query, 1, 1, rank_color(rank_of[query]), linewidth=0.6)
                if length <= 12:
                    ax.text(key + 0.5, query + 0.5, str(step), fontsize=SMALL, **CENTRED)
        ax.set(xlim=(0, length), ylim=(length, 0), aspect="equal", title=name, xlabel="key", xticks=[], yticks=[])
    axes[0].set_ylabel("query")
    ranks = range(max(map(len, orders.values())))
    if len(ranks) <= 8:  # colours come again for more
        patches = [Patch(facecolor=tint(rank_color(r)), edgecolor=rank_color(r), label=f"rank {r}") for r in ranks]
        figure.legend(handles=patches, loc="outside lower center", ncols=2 * len(orders), frameon=False)
    return figure


def load_over_steps(curves: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw the load of the fullest expert at each step, as a multiple of the mean load."""
    steps = range(max(map(len, curves.values())))
    mean = [(steps, [1] * len(steps), {"color": "#AAAAAA", "linewidth": 0.8})]
    shown = Panel(title, "fullest expert / mean", curves, look={"linewidth": 1.6}, above=mean)
    return panels(steps, shown, along="step")
