"""What every figure shares: palette, style, sizes, direct labels."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from math import ceil, floor, log2

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, NullLocator
from PIL import Image

from ..ranks import wanted
from ..units import format_bytes

#: Okabe and Ito's colour-blind-safe palette, in an order that keeps neighbours apart.
RANK_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
MARKERS = "osD^vP*X"
INK, FAINT = "#222222", "#AAAAAA"
#: Inches: with the resolution below, what a notebook's column shows at full size on a screen 1366 pixels wide.
WIDTH = 8.4
#: Pixels of an image for each one it takes up.
SHARPER = 2
#: Keeps lines of a grid, and of other curves, from striking through a label.
HALO = (withStroke(linewidth=3, foreground="white"),)
STYLE = {
    "figure.dpi": 110, "savefig.dpi": "figure", "savefig.pad_inches": 0.05, "figure.constrained_layout.use": True,
    "font.size": 9.5, "axes.titlesize": 10.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False, "axes.titlelocation": "left",
    "text.color": INK, "axes.labelcolor": INK, "axes.prop_cycle": plt.cycler(color=RANK_COLORS[:6]),
}
plt.rcParams.update(STYLE)


def rank_color(rank: int) -> str:
    """Return the colour of `rank`, the same in every figure of the course."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def tint(color: str) -> tuple[float, ...]:
    return tuple(0.5 + 0.5 * channel for channel in to_rgb(color))


def readable(color: str) -> tuple[float, ...]:
    """Return `color` as dark as letters need on white: a contrast of 4.5 to 1 (WCAG 2, level AA)."""
    tone = np.array(to_rgb(color))
    while True:
        linear = np.where(tone <= 0.04045, tone / 12.92, ((tone + 0.055) / 1.055) ** 2.4)
        if 1.05 / (linear @ (0.2126, 0.7152, 0.0722) + 0.05) >= 4.5:
            return tuple(tone.tolist())
        tone = 0.98 * tone


class Drawing(Figure):
    """A figure that notebooks show with twice as many pixels as it takes up, for screens that have them.

    JupyterLab gives an image no description but one that is HTML, so while somebody works the picture is that too.
    What is stored, and compared, is the image alone, which every viewer shows.
    """

    def _ipython_display_(self) -> None:
        from IPython.display import display

        data = png(self, bbox_inches="tight")
        width, encoded = png_width(data), base64.b64encode(data).decode()
        bundle = {"text/plain": repr(self), "image/png": encoded}
        if wanted():
            words = html.escape(self.words())
            bundle["text/html"] = f'<img alt="{words}" width="{width}" src="data:image/png;base64,{encoded}">'
        display(bundle, metadata={"image/png": {"width": width}}, raw=True)

    def words(self) -> str:
        """Return the titles, and what stands at the axes."""
        titles = [self.get_suptitle()] + [title for ax in self.axes for title in (ax.get_title("left"), ax.get_title())]
        labels = [label for ax in self.axes for label in (ax.get_ylabel(), ax.get_xlabel())]
        found = [" ".join(text.split()) for text in dict.fromkeys([*titles, *labels]) if text.strip()]
        return "Figure: " + "; ".join(found)


def png(figure: Figure, small: bool = True, **look: object) -> bytes:
    """Return `figure` as a PNG of twice its size in pixels, the same each time.

    Parameters
    ----------
    small : bool, optional
        Whether 256 colours have to do, which makes the data three times smaller and no difference to the eye.
    look : optional
        Arguments of ``savefig``.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=SHARPER * figure.dpi, metadata={"Software": None}, **look)
    if not small:
        return buffer.getvalue()
    image = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def png_width(data: bytes) -> int:
    """Return how wide the PNG of a figure is meant to be, in pixels of CSS."""
    return int.from_bytes(data[16:20], "big") // SHARPER


def new_figure(*panels: int, size: tuple[float, float], **kwargs) -> tuple[Figure, np.ndarray]:
    """Return a figure of at most `WIDTH` inches that pyplot does not track, and its axes."""
    figure, axes = grid_figure(*panels, size=size, **kwargs)
    return figure, axes[0]


def grid_figure(*panels: int, size: tuple[float, float], **kwargs) -> tuple[Figure, np.ndarray]:
    """As `new_figure`, with the axes in rows and columns."""
    size = (min(WIDTH, size[0]), size[1])
    figure, axes = plt.subplots(*panels, figsize=size, squeeze=False, FigureClass=Drawing, **kwargs)
    plt.close(figure)
    return figure, axes


def label_lines(ax: Axes, labels: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each label at the right end of its line, moved apart where two would overlap, then with a line to it."""
    ax.figure.draw_without_rendering()  # settles limits and layout, also where the figure has no canvas of its own
    height, scale = 12.0, 72 / ax.figure.dpi
    ordered = sorted(labels.items(), key=lambda item: item[1][1])
    wanted = [ax.transData.transform((x, y))[1] * scale for _, (x, y, _) in ordered]
    placed = [max(y + height * (i - j) for j, y in enumerate(wanted[: i + 1])) for i in range(len(wanted))]
    room = ax.bbox.y1 * scale - height / 2
    placed = [min(y, room - height * (len(placed) - 1 - i)) for i, y in enumerate(placed)]
    for (text, (x, y, color)), at, old in zip(ordered, placed, wanted, strict=True):
        moved = abs(at - old) > 5
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2, "relpos": (0, 0.5)}
        ax.annotate(text, (x, y), (16 if moved else 6, at - old), textcoords="offset points", va="center",
                    color=readable(color), fontweight="bold", path_effects=HALO,
                    arrowprops=line if moved else None)


def size_axis(ax: Axes, sizes, label: str = "message size S") -> None:
    """Make the x axis one of bytes: logarithmic, with as many evenly spaced powers of two as fit, and a light grid."""
    low, high = ceil(log2(min(sizes)) - 1e-9), floor(log2(max(sizes)) + 1e-9)
    place = ax.get_subplotspec()
    share = len(place.colspan) / place.get_gridspec().ncols
    room = max(2, int(share * ax.figure.get_figwidth()))  # an inch for each, less what stands beside the axes
    step = next(step for step in (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 60) if (high - low) // step < room)
    ticks = [2.0**power for power in range(low, high + 1, step)] or list(sizes)
    ax.set(xscale="log", xlabel=label)
    ax.set_xticks(ticks)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.grid(True, color="#E5E5E5", linewidth=0.7)
