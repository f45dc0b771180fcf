"""What this lesson draws: tokens over the batch, and the blocks of a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from course_utils.draw import charts
from course_utils.draw.panels import Panel, dots, panels
from course_utils.draw.style import FAINT, SMALL, new_figure, rank_color

from .engine import Blocks, Request


def batch_curves(
    times: Callable[[int], tuple[float, float]], rates: Mapping[str, tuple[float, float]], points: Mapping[int, float]
) -> Figure:
    """Draw tokens a second over the batch, with published points; `rates` are the shares of FLOP/s and bytes/s that a
    curve reaches."""
    batches = [2**k for k in range(11)]
    curves = {
        name: [batch / max(t / share for t, share in zip(times(batch), shares, strict=True)) for batch in batches]
        for name, shares in rates.items()
    }
    shown = Panel("tokens of all sequences: lines modelled, dots published", "tokens a second", curves, log=True,
                  markers=3, above=[dots([*points], [*points.values()], size=7)])
    return panels(batches, shown, counts="sequences in the batch")


def block_picture(blocks: Blocks, requests: Sequence[Request], title: str) -> Figure:
    """Draw the blocks of a cache in the colours of the requests that use them, and their tokens; free ones are grey."""
    count, (figure, (ax,)) = len(blocks.users), new_figure(size=(9.0, 1.6))
    for block in range(count):
        users = [i for i, request in enumerate(requests) if block in request.table]
        for part, color in enumerate([rank_color(i) for i in users] or [FAINT]):
            charts.cell(ax, block, part / max(1, len(users)), 0.9, 1 / max(1, len(users)), color)
        for request in [requests[i] for i in users[:1]]:
            start = request.table.index(block) * blocks.size
            tokens = " ".join(map(str, request.tokens[start : min(start + blocks.size, request.done)]))
            ax.text(block + 0.45, 1.1, tokens, fontsize=SMALL, va="bottom", ha="center")
        names = ", ".join(str(requests[i].name) for i in users) or "free"
        ax.text(block + 0.45, -0.1, f"{block}: {names}", fontsize=SMALL, va="top", ha="center")
    ax.set(xlim=(-0.1, count), ylim=(-0.45, 1.45), title=title)
    ax.axis("off")
    return figure
