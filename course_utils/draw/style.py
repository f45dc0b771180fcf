"""What every figure shares: palette, style, size, and how a notebook shows it."""

from __future__ import annotations

import base64
import html
import io

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from PIL import Image

from ..ranks import wanted

#: Okabe and Ito's colour-blind-safe palette, in an order that keeps neighbours apart.
RANK_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
MARKERS = "osD^vP*X"
INK, FAINT = "#222222", "#AAAAAA"
#: Inches: with the resolution below, what a notebook's column shows at full size on a screen 1366 pixels wide.
WIDTH = 8.4
#: Pixels of an image for each one it takes up.
SHARPER = 2
#: Of letters inside bars and beside marks; 8 pixels or more stay of it on a small screen.
SMALL = 8.5
#: Keeps lines of a grid, and of other curves, from striking through a label.
HALO = (withStroke(linewidth=3, foreground="white"),)
#: What figures say of letters and lines again and again; `GROUND` lies below letters that lines may cross.
CENTRED = {"ha": "center", "va": "center"}
DASHED = {"color": INK, "linewidth": 0.8, "linestyle": (0, (2, 2))}
GROUND = {"facecolor": "white", "edgecolor": "none", "pad": 1}
plt.rcParams.update({
    "figure.dpi": 110, "savefig.dpi": "figure", "savefig.pad_inches": 0.05, "figure.constrained_layout.use": True,
    "font.size": 9.5, "axes.titlesize": 10.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False, "axes.titlelocation": "left",
    "text.color": INK, "axes.labelcolor": INK, "axes.prop_cycle": plt.cycler(color=RANK_COLORS[:6]),
})


def rank_color(rank: int) -> str:
    """Return the colour of `rank`, the same in every figure of the course."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def tint(color: str) -> tuple[float, ...]:
    """Return `color` half as strong: what surfaces are filled with, so that letters on them can be read."""
    return tuple(0.5 + 0.5 * channel for channel in to_rgb(color))


def readable(color: str) -> tuple[float, ...]:
    """Return `color` as dark as letters need on white: a contrast of 4.5 to 1 (WCAG 2, level AA)."""
    tone = np.array(to_rgb(color))
    while True:
        linear = np.where(tone <= 0.04045, tone / 12.92, ((tone + 0.055) / 1.055) ** 2.4)
        if 1.05 / (linear @ (0.2126, 0.7152, 0.0722) + 0.05) >= 4.5:
            return tuple(tone.tolist())
        tone = 0.98 * tone


def naming(color: str) -> dict[str, object]:
    """Return the look of letters that name what is drawn in `color`."""
    return {"color": readable(color), "fontweight": "bold", "path_effects": HALO}


class Drawing(Figure):
    """A figure that notebooks show with twice as many pixels as it takes up, for screens that have them.

    JupyterLab gives no image a description but one that is HTML, so while somebody works the picture is that too.
    What is stored, and compared, is the image alone.
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
    """Return `figure` as a PNG of twice its size in pixels, the same each time; `look` is for ``savefig``.

    If it is to be `small` it has 256 colours: three times less data and no difference to the eye.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=SHARPER * figure.dpi, metadata={"Software": None}, **look)
    if small:
        image = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        buffer = io.BytesIO()
        image.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def png_width(data: bytes) -> int:
    """Return how wide the PNG of a figure is meant to be, in pixels of CSS."""
    return int.from_bytes(data[16:20], "big") // SHARPER


def empty_figure(size: tuple[float, float], title: str = "") -> Figure:
    """Return a figure of at most `WIDTH` inches that pyplot does not track, with `title` above all its panels."""
    figure = plt.figure(figsize=(min(WIDTH, size[0]), size[1]), FigureClass=Drawing)
    plt.close(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    return figure


def new_figure(*panels: int, size: tuple[float, float], title: str = "", **kwargs) -> tuple[Figure, np.ndarray]:
    """Return a figure as `empty_figure` makes it, and its axes, row by row; `panels` are rows and columns."""
    figure = empty_figure(size, title)
    return figure, figure.subplots(*panels, squeeze=False, **kwargs).ravel()
