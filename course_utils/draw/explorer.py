"""The explorer that every widget is: rows of controls above words and a picture, and what a notebook stores of them."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from .controls import view
from .style import png, png_width

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
    """Rows of controls above words and a picture that follow them. A notebook also stores the picture as an image.

    Controls are given by name. ``render(**values) -> (figure, html)`` draws one setting and tells of it; its arguments
    are the controls that have a value, so no buttons. A `ValueError` refuses the setting: its message stands below the
    controls, which stay as they are, and the last picture turns pale. ``adapt(changed)`` is called before each drawing
    with the name of the control that has changed, None at the start; it sets what follows in other controls, such as
    options and limits, and may refuse too. `note` is HTML below the picture.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, widgets.Widget]], render: Callable[..., tuple[Figure, str]],
        adapt: Callable[[str | None], None] = lambda changed: None, note: str = "",
    ) -> None:
        self.controls = {name: control for row in rows for name, control in row.items()}
        self.rows = [widgets.HBox(list(row.values()), layout={"flex_flow": "row wrap"}) for row in rows]
        self.status, self.picture = widgets.HTML(), Picture()
        self.note = widgets.HTML(f"<div style='line-height: 1.4; font-size: 85%'>{note}</div>")
        super().__init__([*self.rows, self.status, self.picture, *([self.note] if note else [])])
        self._names = {control: name for name, control in self.controls.items() if control.has_trait("value")}
        self._render, self._adapt, self._adapting = render, adapt, False
        for control in self._names:
            control.observe(self._changed, "value")
        self._draw(None)

    def _changed(self, change: Mapping[str, Any]) -> None:
        if not self._adapting:  # what `adapt` sets is drawn with the change that it follows
            self._draw(self._names[change["owner"]])

    def _draw(self, changed: str | None) -> None:
        self._adapting = True
        try:
            self._adapt(changed)
            figure, words = self._render(**{name: control.value for control, name in self._names.items()})
        except ValueError as error:
            why = html.escape(str(error).rstrip("."))
            self.status.value = f"<p><b>{why}.</b> The pale picture is of the last setting that was possible.</p>"
            self.picture.fade()
        else:
            self.status.value = words
            self.picture.show(figure)
        finally:
            self._adapting = False

    _ipython_display_ = None  # of ipywidgets 7, which would show no picture

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict[str, object], dict[str, dict[str, int]]]:
        """What IPython shows; viewers that know no widgets take the image, which says what to do."""
        image = headed(self.picture.figure, TO_USE)
        encoded = base64.b64encode(image).decode()
        data = {**view(self), "text/plain": TO_USE, "image/png": encoded}
        return data, {"image/png": {"width": png_width(image)}}
