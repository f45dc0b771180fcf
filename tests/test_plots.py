"""The figures: what is drawn is what was given, in one style."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch

from course_utils.plots import RANK_COLORS, bandwidth, before_after, rank_color, step_picture, timeline
from course_utils.schedules import Message

BEFORE = [[1, 2, 3], [10, 20, 30], [100, 200, 300]]


def texts(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


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


def test_figures_are_shown_once():
    before_after(BEFORE, BEFORE, "nothing")
    assert plt.get_fignums() == []


def test_cells_carry_the_numbers_and_their_origin():
    after = [torch.tensor([111, 222, 333]), torch.tensor([1, 20]), None]
    figure = before_after([torch.tensor(row) for row in BEFORE], after, "mixture")
    assert {"111", "222", "333", "1", "20", "300", "rank 2"} <= set(texts(figure))
    assert figure.axes[0].get_title(loc="left") == "mixture: before"
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


def test_before_and_after_must_have_the_same_ranks():
    with pytest.raises(ValueError, match="each rank"):
        before_after(BEFORE, BEFORE[:2], "short")


def test_step_has_an_arrow_for_each_message():
    state = (BEFORE, [[[r]] * 3 for r in range(3)])
    messages = [Message(0, 1, (2,), (2,), True), Message(1, 2, (0, 1, 2), (0, 1, 2), False)]
    figure = step_picture([state, state], messages, ("left", "right"))
    assert sum(isinstance(patch, FancyArrowPatch) for patch in figure.axes[0].patches) == 2


def test_bandwidth_has_units_labels_and_its_kind():
    sizes = [2**k for k in range(10, 22, 2)]
    seconds = {op: [1e-4 + s * 1e-9 for s in sizes] for op in ("all_reduce", "broadcast")}
    figure = bandwidth(sizes, seconds, 4, kind="modelled", fit=(1e-4, 1e-9))
    left, right = figure.axes
    assert "(ms)" in left.get_ylabel()
    assert "(GB/s)" in right.get_ylabel()
    assert all("modelled" in ax.get_title(loc="left") for ax in (left, right))
    assert {"all_reduce", "broadcast"} <= set(texts(figure))
    assert right.lines[0].get_ydata()[-1] == pytest.approx(sizes[-1] / seconds["all_reduce"][-1] * 1.5 / 1e9)


def test_direct_labels_do_not_overlap():
    sizes, names = [2**10, 2**20], ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
    figure = bandwidth(sizes, {op: [1e-3, 1e-2] for op in names}, 4)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text() in names]
    boxes.sort(key=lambda box: box.y0)
    assert len(boxes) == 5
    assert all(low.y1 <= high.y0 + 3 for low, high in zip(boxes, boxes[1:], strict=False))


def test_timeline_is_in_milliseconds_with_room_for_its_labels():
    figure = timeline({"rank 0": [("compute", 0.0, 0.1), ("wait", 0.1, 0.1001)]}, "measured: a step")
    (ax,) = figure.axes
    assert ax.get_xlabel() == "time (ms)"
    assert ax.patches[0].get_width() == pytest.approx(100)
    assert texts(figure) == ["compute"]  # the second bar is too narrow for its label
