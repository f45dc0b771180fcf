"""The picture of cut matrices: every part is drawn once, to scale, in the colour of its rank."""

import pytest
from figures import edged, titles

from course_utils import plots


def pieces(figure, rank):
    (ax,) = figure.axes
    return edged(ax, plots.rank_color(rank))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_columns_then_rows_of_each_rank(ranks):
    figure = plots.cut_picture(96, 384, 96, ranks, "a title")
    for rank in range(ranks):
        first, product, second = pieces(figure, rank)
        assert first.get_width() == product.get_width() == pytest.approx(4 / ranks), "columns of A, then features"
        assert first.get_height() == pytest.approx(1) and second.get_width() == pytest.approx(1)
        assert second.get_height() == pytest.approx(4 / ranks), "rows of B"
    (ax,) = figure.axes
    assert len(ax.patches) == 3 * ranks + 2 and titles(figure) == ["a title"]


def test_pieces_join_without_gaps_and_uneven_ones_differ_by_one():
    figure = plots.cut_picture(10, 11, 10, 4, "")
    widths = [pieces(figure, rank)[0].get_width() * 10 for rank in range(4)]
    assert widths == pytest.approx([3, 3, 3, 2])
    starts = [pieces(figure, rank)[0].get_x() for rank in range(4)]
    assert starts[1:] == pytest.approx([x + w / 10 for x, w in zip(starts, widths[:3], strict=False)])


def test_f_stands_in_front_of_the_columns_and_g_behind_the_rows():
    (ax,) = plots.cut_picture(4, 16, 4, 2, "").axes
    at = {text.get_text(): text.get_position()[0] for text in ax.texts}
    assert at["x"] < at["f"] < at["upᵀ"] < at["GELU(x upᵀ)"] < at["downᵀ"] < at["g"] < at["y"]
