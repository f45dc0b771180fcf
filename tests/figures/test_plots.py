"""The figures: what is drawn is what was given, in one style."""

import base64
import io

import numpy as np
import plots
import pytest
import torch
from figures import BEFORE, apart, contrast_on_white, texts, titles
from matplotlib.colors import to_rgb
from PIL import Image

from course_utils.draw.charts import label_lines, size_axis
from course_utils.draw.lanes import before_after
from course_utils.draw.style import RANK_COLORS, WIDTH, new_figure, png, rank_color, readable


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


def test_every_rank_has_one_colour_everywhere():
    assert len(set(RANK_COLORS)) == len(RANK_COLORS) == 8
    assert rank_color(3) == rank_color(11) == RANK_COLORS[3]


def test_cells_carry_the_numbers_and_their_origin():
    after = [torch.tensor([111, 222, 333]), torch.tensor([1, 20]), None]
    figure = before_after([torch.tensor(row) for row in BEFORE], after, "mixture")
    assert {"111", "222", "333", "1", "20", "300", "rank 2"} <= set(texts(figure))
    assert titles(figure) == ["mixture: before", "after"]
    assert stripes(figure, 0, 0) == [0, 1, 2]
    assert stripes(figure, 1, 0) == [0]
    assert stripes(figure, 1, 1) == [1]
    assert stripes(figure, 2, 0) == []


def test_partial_sums_and_means_show_who_took_part():
    figure = before_after(BEFORE, [[110, 202], [37.0], [999]], "parts")
    assert stripes(figure, 0, 0) == [1, 2]
    assert stripes(figure, 0, 1) == [0, 2]
    assert stripes(figure, 1, 0) == [0, 1, 2]
    assert stripes(figure, 2, 0) == []


PALETTES = [value for name, value in vars(plots).items() if name.endswith("_COLORS")]
COLORS = sorted({tone for palette in PALETTES for tone in (palette.values() if isinstance(palette, dict) else palette)})


@pytest.mark.parametrize("color", COLORS)
def test_labels_in_a_colour_can_be_read(color):
    figure, (ax,) = new_figure(1, 1, size=(4, 3))
    ax.plot([0, 1], [0, 1], color=color)
    label_lines(ax, {"line": (1, 1, color)})
    (label,) = ax.texts
    assert contrast_on_white(label.get_color()) >= 4.5
    assert to_rgb(ax.lines[0].get_color()) == to_rgb(color)  # lines keep theirs
    if contrast_on_white(color) >= 4.5:
        assert readable(color) == to_rgb(color)
    else:  # darker, but of the same hue
        before, after = np.array(to_rgb(color)), np.array(readable(color))
        assert np.allclose(after / after.max(), before / before.max())


def test_no_figure_is_wider_than_a_column():
    figure, _ = new_figure(1, 3, size=(13.2, 3.9))
    assert figure.get_figwidth() == WIDTH and WIDTH * figure.dpi <= 934


@pytest.mark.parametrize("panels", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[2**10, 2**20], [2**k for k in range(8, 35)], [1000, 3000, 50_000_000], [5, 6]])
def test_sizes_along_an_axis_do_not_overlap(panels, sizes):
    figure, axes = new_figure(1, panels, size=(8.4, 3))
    for ax in axes:
        ax.plot(sizes, sizes)
        size_axis(ax, sizes)
    figure.draw_without_rendering()
    low, high = axes[0].get_xlim()
    shown = [label for label in axes[0].get_xticklabels() if low <= label.get_position()[0] <= high]
    assert shown and apart(shown, -4)
    steps = np.diff(np.log2(axes[0].get_xticks()))
    assert np.allclose(steps, steps[0]) if len(steps) else True


def test_a_label_that_was_moved_is_joined_to_its_line():
    figure, (ax,) = new_figure(1, 1, size=(8.4, 3))
    ax.plot([0, 1], [0, 1])
    label_lines(ax, {"at its line": (1, 0, "#0072B2"), "here": (1, 1, "#009E73"), "there": (1, 1, "#D55E00")})
    joined = [text.arrow_patch is not None for text in ax.texts]
    assert not joined[0] and sum(joined) == 1


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch):
    """What a notebook is given to show, as (data, metadata)."""
    sent = []
    monkeypatch.setattr("IPython.display.display", lambda data, metadata, raw: sent.append((data, metadata)))
    return sent


def drawn():
    figure, (left, right) = new_figure(1, 2, size=(8.4, 3))
    left.set(xlabel="ranks", ylabel="time (ms)", title='two <b> & "quotes"')
    right.set(xlabel="ranks")
    figure.suptitle("measured: time")
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
