"""What tests of figures look at."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from course_utils.draw.explorer import Explorer

REFUSED = "The pale picture is of the last setting that was possible."
#: Data that several tests draw: what three ranks hold, the parts of a file of FFCV, a step under FSDP.
MIB = 2**20
BEFORE = [[1, 2, 3], [10, 20, 30], [100, 200, 300]]
BETON = [
    ("header", 0, 24), ("field descriptors", 24, 2082), ("data table", 2106, 64_000),
    *(("heap page", 8 * MIB * (i + 1), 8 * MIB) for i in range(47)), ("allocation table", 48 * 8 * MIB, 48_000),
]
LANES = {
    "all-gather": [("block 0", 0.0, 1.0), ("block 1", 1.0, 2.0)],
    "compute": [("block 0", 1.0, 2.0), ("block 1", 2.0, 3.0)],
}


class Opened:
    """An explorer that is open: its controls by name, and what it shows."""

    def __init__(self, widget: Explorer) -> None:
        self.widget, self.status, self.picture, self.note = widget, widget.status, widget.picture, widget.note

    def __getattr__(self, name: str) -> Any:
        return self.widget.controls[name]

    @property
    def shown(self) -> tuple[str, bytes]:
        return self.status.value, bytes(self.picture.value)

    @property
    def refuses(self) -> bool:
        return REFUSED in self.status.value


def texts(drawn: Axes | Figure) -> list[str]:
    """Return what is written into the axes, or into all axes of a figure."""
    axes = drawn.axes if isinstance(drawn, Figure) else [drawn]
    return [text.get_text() for ax in axes for text in ax.texts]


def titles(figure: Figure) -> list[str]:
    return [ax.get_title(loc="left") for ax in figure.axes]


def rows(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def key(ax: Axes) -> list[str]:
    """Return the names of a legend."""
    return [text.get_text() for text in ax.get_legend().get_texts()]


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
