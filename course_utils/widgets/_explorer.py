"""What every explorer shares: rows of controls above words and a picture, and what a notebook stores of them."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import ipywidgets as widgets
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from ..plots import png, png_width

__all__ = ["TO_USE", "Explorer", "Picture", "headed"]

TO_USE = "Run this cell to use the controls."
_LINE = 0.3  # inches


def headed(figure: Figure, heading: str) -> bytes:
    """Return `figure` as a PNG below a line of `heading`."""
    width, height = figure.get_size_inches()
    line = figure.text(0.01, 1 + 0.3 * _LINE / height, heading, fontstyle="italic", fontweight="bold")
    line.set_in_layout(False)
    data = png(figure, bbox_inches=Bbox([[0, 0], [width, height + _LINE]]))
    line.remove()
    return data


class Picture(widgets.Image):
    """A figure at its own size, smaller where there is no room."""

    def __init__(self) -> None:
        layout = {"height": "auto", "max_width": "100%", "align_self": "flex-start"}
        super().__init__(format="png", layout=layout)
        self.figure: Figure | None = None

    def show(self, figure: Figure) -> None:
        self.figure = figure
        self._draw()

    def fade(self) -> None:
        """Show the last figure pale, because the controls ask for one that cannot be."""
        if self.figure is not None:
            veil = Rectangle((0, 0), 1, 1, transform=self.figure.transFigure, color="white", alpha=0.7, zorder=100)
            self.figure.add_artist(veil)
            self._draw()
            veil.remove()

    def _draw(self) -> None:
        data = png(self.figure, small=False)  # at once: to find few colours takes longer than to send many
        with self.hold_sync():
            self.layout.width, self.value = f"{png_width(data)}px", data


class Explorer(widgets.VBox):
    """Rows of controls above `status`, in words, and `picture`. A notebook also stores the picture as an image."""

    def __init__(
        self, rows: Sequence[Sequence[widgets.Widget]], status: widgets.HTML, picture: Picture, note: str = ""
    ) -> None:
        boxes = [widgets.HBox(row, layout={"flex_flow": "row wrap"}) for row in rows]
        below = [widgets.HTML(f"<div style='line-height: 1.4; font-size: 85%'>{note}</div>")] if note else []
        super().__init__([*boxes, status, picture, *below])
        self._picture = picture

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict[str, object], dict[str, dict[str, int]]]:
        """What IPython shows; viewers that know no widgets take the image, which says what to do."""
        image = headed(self._picture.figure, TO_USE)
        encoded = base64.b64encode(image).decode()
        data = {**super()._repr_mimebundle_(**kwargs), "text/plain": TO_USE, "image/png": encoded}
        return data, {"image/png": {"width": png_width(image)}}
