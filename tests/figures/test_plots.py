"""The kits of figures and explorers: what is drawn is what was given, in one style, and what a notebook keeps."""

import base64
import io

import numpy as np
import pytest
import torch
from figures import BEFORE, REFUSED, Opened, contrast_on_white, drawings, texts
from matplotlib.colors import to_rgb
from PIL import Image

from course_utils.draw.controls import checkbox, integer
from course_utils.draw.explorer import TO_USE, Explorer
from course_utils.draw.lanes import before_after
from course_utils.draw.style import RANK_COLORS, WIDTH, new_figure, png, png_width, readable


def stripes(figure, rank, column, panel=1):
    """Ranks whose colours fill a cell, left to right."""
    tints = {tuple(np.round(np.add(0.5, np.multiply(0.5, to_rgb(c))), 3)): r for r, c in enumerate(RANK_COLORS)}
    found = []
    for patch in figure.axes[panel].patches:
        x, y = patch.get_xy()
        color = tuple(np.round(patch.get_facecolor()[:3], 3))
        if column < x < column + 1 and rank < y < rank + 1 and patch.get_facecolor()[3] and color in tints:
            found.append((x, tints[color]))
    return [rank for _, rank in sorted(found)]


def test_cells_carry_the_numbers_and_their_origin():
    """Partial sums and means show who took part."""
    after = [torch.tensor([111, 202, 333]), [1, 74.0], None]
    figure = before_after([torch.tensor(row) for row in BEFORE], after, "mixture")
    assert {"111", "202", "333", "1", "74", "300", "rank 2"} <= set(texts(figure))
    assert [ax.get_title("left") for ax in figure.axes] == ["mixture: before", "after"]
    cells = [stripes(figure, *cell) for cell in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))]
    assert cells == [[0, 1, 2], [0, 2], [0], [0, 1, 2], []]


def test_letters_in_a_colour_can_be_read():
    palettes = [value for name, value in drawings().items() if name.endswith("_COLORS")]
    for color in {tone for one in palettes for tone in (one.values() if isinstance(one, dict) else one)}:
        before, after = np.array(to_rgb(color)), np.array(readable(color))
        assert contrast_on_white(readable(color)) >= 4.5
        assert np.allclose(after / after.max(), before / before.max()), "no other hue"
        assert contrast_on_white(color) < 4.5 or np.array_equal(before, after)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch):
    """What a notebook is given to show, as (data, metadata)."""
    sent = []
    monkeypatch.setattr("IPython.display.display", lambda data, metadata, raw: sent.append((data, metadata)))
    return sent


def drawn():
    figure, (left, right) = new_figure(1, 2, size=(8.4, 3), title="measured: time")
    left.set(xlabel="ranks", ylabel="time (ms)", title='two <b> & "quotes"')
    right.set(xlabel="ranks")
    return figure


def test_a_notebook_stores_a_figure_with_twice_the_pixels_it_takes_up(published):
    figure = drawn()
    figure._ipython_display_()
    ((data, metadata),) = published
    assert data.keys() == {"text/plain", "image/png"}  # here nobody works: outputs are compared
    image = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    width = metadata["image/png"]["width"]
    assert image.width // 2 == width and abs(width - WIDTH * figure.dpi) < 8
    exact = Image.open(io.BytesIO(png(figure, small=False, bbox_inches="tight"))).convert("RGB")
    apart = np.abs(np.asarray(image.convert("RGB"), int) - np.asarray(exact, int))
    assert apart.mean() < 0.5 and apart.max() < 64
    assert png(figure) == png(figure)


def test_a_figure_that_is_looked_at_is_described(published, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("course_utils.draw.style.wanted", lambda: True)
    drawn()._ipython_display_()
    ((data, metadata),) = published
    words = "Figure: measured: time; two &lt;b&gt; &amp; &quot;quotes&quot;; time (ms); ranks"
    look = f'<img alt="{words}" width="{metadata["image/png"]["width"]}" src="data:image/png;base64,'
    assert data["text/html"] == look + data["image/png"] + '">'


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("L"))


def square(side, flat=False):
    if side > 8:
        raise ValueError(f"a side of {side} is too long; <choose> less")
    figure, (ax,) = new_figure(1, 1, size=(3, 1 if flat else 3))
    ax.plot([0, side], [0, side])
    return figure, f"a square of {side}"


def test_an_explorer_draws_once_for_each_change_and_for_all_that_follows_from_it():
    drawn, side, flat = [], integer("side", 2), checkbox("flat")

    def adapt(changed):
        flat.disabled = side.value < 2
        if changed == "flat":
            side.value = 5

    def render(**values):
        drawn.append(values)
        return square(**values)

    explorer = Opened(Explorer([{"side": side}, {"flat": flat}], render, adapt, "a note"))
    explorer.put(flat=True, side=1)
    assert drawn == [{"side": 2, "flat": False}, {"side": 5, "flat": True}, {"side": 1, "flat": True}]
    assert flat.disabled and "a note" in explorer.note.value and explorer.note in explorer.widget.children


def test_what_cannot_be_is_refused_with_its_reason_and_the_picture_turns_pale():
    side = integer("side", 2)
    explorer = Opened(Explorer([{"side": side}], square))
    before = explorer.picture.value
    assert explorer.put(side=9) == f"<p><b>a side of 9 is too long; &lt;choose&gt; less.</b> {REFUSED}</p>"
    pale = pixels(explorer.picture.value)
    assert pale.min() > pixels(before).min() and side.value == 9, "what was typed stays to be mended"
    explorer.put(side=10)
    assert np.array_equal(pixels(explorer.picture.value), pale), "no paler than once"
    assert explorer.put(side=2) == "a square of 2" and explorer.picture.value == before


def test_a_viewer_without_widgets_gets_the_picture_and_what_to_do():
    widget = Explorer([{"side": integer("side", 2)}, {"flat": checkbox("flat")}], square)
    bundle, look = widget._repr_mimebundle_()
    assert bundle["text/plain"] == TO_USE and "application/vnd.jupyter.widget-view+json" in bundle
    stored, live = pixels(base64.b64decode(bundle["image/png"])), pixels(widget.picture.value)
    assert look == {"image/png": {"width": stored.shape[1] // 2}}
    line = len(stored) - len(live)
    assert line > 20 and stored[:line].min() < 100, "words above the picture"
    assert np.abs(stored[line:].astype(int) - live).mean() < 1, "with fewer colours"
    assert [row.layout.flex_flow for row in widget.rows] == ["row wrap"] * 2
    layout = widget.picture.layout
    assert (layout.height, layout.max_width, layout.align_self) == ("auto", "100%", "flex-start")
    assert layout.width == f"{png_width(widget.picture.value)}px"
    assert abs(png_width(widget.picture.value) - widget.picture.figure.get_figwidth() * 110) < 1
