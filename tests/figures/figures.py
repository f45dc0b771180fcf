"""What tests of figures look at."""

import importlib
from typing import Any

from conftest import ROOT
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from course_utils.draw.explorer import Explorer

REFUSED = "The pale picture is of the last setting that was possible."
BEFORE = [[1, 2, 3], [10, 20, 30], [100, 200, 300]]  # what three ranks hold


def drawings() -> dict[str, Any]:
    """All functions of the course that draw a figure for a cell, and the colours that figures share, by name."""
    folders = ("course_utils/draw/*.py", "lessons/*/*figures.py", "lessons/*/*_pictures.py")
    kit = ("bars", "empty_figure", "new_figure", "panels")
    found = {}
    for file in (file for folder in folders for file in ROOT.glob(folder)):
        module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
        for name, value in vars(module).items():
            drawing = getattr(value, "__annotations__", {}).get("return") == "Figure" and name not in kit
            if not name.startswith("_") and (drawing or name.endswith("_COLORS")):
                found[name] = value
    return found


class Opened:
    """An explorer that is open: its controls by name, and what it shows."""

    def __init__(self, widget: Explorer) -> None:
        self.widget, self.status, self.picture, self.note = widget, widget.status, widget.picture, widget.note

    def __getattr__(self, name: str) -> Any:
        return self.widget.controls[name]

    def put(self, **values: Any) -> str:
        """Set controls, in order; return what is told."""
        for name, value in values.items():
            self.widget.controls[name].value = value
        return self.status.value

    @property
    def shown(self) -> tuple[str, ...]:
        """What is told and drawn."""
        axes = self.picture.figure.axes
        drawn = [str(patch) for ax in axes for patch in ax.patches]
        drawn += [str(line.get_xydata()) for ax in axes for line in ax.lines]
        return self.status.value, self.picture.figure.words(), *texts(self.picture.figure), *drawn

    @property
    def refuses(self) -> bool:
        return REFUSED in self.status.value


def texts(drawn: Axes | Figure) -> list[str]:
    """Return what is written into the axes, or into all axes of a figure."""
    axes = drawn.axes if isinstance(drawn, Figure) else [drawn]
    return [text.get_text() for ax in axes for text in ax.texts]


def letters(figure: Figure) -> list[Text]:
    """Return every text of a figure, as far as it is more than a sign."""
    found = [text for text in figure.findobj(Text) if text.get_visible()]
    return [text for text in found if any(letter.isalnum() for letter in text.get_text())]


def apart(drawn: list[Text], gap: float = 0.0) -> bool:
    """Return whether no two texts that stand level or upright lie over each other, `gap` pixels of them aside."""
    boxes = [Text.get_window_extent(text) for text in drawn if text.get_rotation() % 90 == 0]
    return not any(
        min(a.x1, b.x1) - max(a.x0, b.x0) > gap and min(a.y1, b.y1) - max(a.y0, b.y0) > gap
        for i, a in enumerate(boxes) for b in boxes[:i]
    )


def contrast_on_white(color) -> float:
    """WCAG 2, success criterion 1.4.3."""
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(color)]
    return 1.05 / (sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05)


def inside(figure: Figure) -> None:
    """Everything that is drawn lies inside the figure's edges, which fit a column; letters have 8 pixels or more."""
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert width <= 8.4
    assert min((text.get_fontsize() for text in letters(figure)), default=9) * figure.dpi / 72 >= 8  # pixels
    assert box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < width + 0.02 and box.y1 < height + 0.02, box


def readable_throughout(figure: Figure) -> None:
    """Besides, it is described in words, no letters lie over others, and all have contrast."""
    inside(figure)
    assert len(figure.words()) > len("Figure: "), "what a screen reader says"
    for ax in figure.axes:
        ticks = [axis.get_ticklabels() for axis in (ax.xaxis, ax.yaxis) if ax.axison]
        for group in (*ticks, ax.texts):
            seen = [text for text in letters(figure) if text in group]
            assert apart(seen, 3), [text.get_text() for text in seen]
    pale = [text.get_text() for text in letters(figure)
            if text.get_color() != "white" and contrast_on_white(text.get_color()) < 4.5]
    assert not pale
