"""Figures of pipelines: boxes stand where the simulation puts them, and figures say what they show."""

import pytest
from figures import rows, texts, titles

from course_utils.pipeline import gpipe, interleaved, one_f_one_b, simulate, zero_bubble_h1
from course_utils.plots.pipeline import activation_steps, bubble_curves, real_pipeline, schedule_picture


def boxes(ax):
    """Left and right ends of all boxes, by row."""
    rows: dict[int, list] = {}
    for collection in ax.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            rows.setdefault(round((box.y0 + box.y1) / 2), []).append((round(box.x0, 6), round(box.x1, 6)))
    return {row: sorted(ends) for row, ends in rows.items()}


@pytest.mark.parametrize("schedule", [gpipe(4, 8), interleaved(2, 4, 3), zero_bubble_h1(3, 6)])
def test_every_operation_is_a_box_at_its_time(schedule):
    run = simulate(schedule)
    (ax,) = schedule_picture(run, "modelled").axes
    assert boxes(ax) == {r: [(round(a, 6), round(b, 6)) for _, a, b in spans] for r, spans in enumerate(run.spans)}
    assert rows(ax) == [f"rank {r}" for r in range(schedule.ranks)]


def test_microbatches_are_written_where_there_is_room():
    (ax,) = schedule_picture(simulate(gpipe(2, 3)), "modelled").axes
    assert texts(ax) == ["0", "1", "2"] * 4
    (ax,) = schedule_picture(simulate(gpipe(2, 300)), "modelled").axes
    assert not texts(ax)


def test_schedules_share_the_axis_and_name_time_idle_share_and_activations():
    figure = schedule_picture([simulate(gpipe(4, 8)), simulate(one_f_one_b(4, 8))], "modelled: F = I = W = 1")
    assert titles(figure) == [
        "GPipe: 33 a step, idle 27%, activations at most 8 on every rank",
        "1F1B: 33 a step, idle 27%, activations at most 4, 3, 2, 1",
    ]
    assert len({ax.get_xlim() for ax in figure.axes}) == 1
    assert figure.get_suptitle() == "modelled: F = I = W = 1"


def test_many_ranks_fit():
    figure = schedule_picture(simulate(one_f_one_b(64, 128)), "modelled")
    assert figure.get_figheight() < 6


def test_real_ranks_are_drawn_below_the_simulation():
    run = simulate(one_f_one_b(2, 3))
    measured = [[(op, a / 1000, b / 1000) for op, a, b in spans] for spans in run.spans]
    figure = real_pipeline(run, measured, "two ranks")
    top, bottom = figure.axes
    assert boxes(top) == boxes(bottom)
    assert bottom.get_xlabel() == "time (ms)"
    assert [title.split(":")[0] for title in titles(figure)] == ["modelled", "measured"]


def test_activations_name_the_peak_of_each_rank_once():
    left, right = activation_steps([simulate(gpipe(4, 8)), simulate(one_f_one_b(4, 8))], "modelled").axes
    assert texts(left) == ["ranks 0 to 3: 8"]
    assert texts(right) == ["rank 0: 4", "rank 1: 3", "rank 2: 2", "rank 3: 1"]
    assert left.get_ylim() == right.get_ylim()


def test_equal_curves_share_a_line_and_a_label():
    (ax,) = bubble_curves([4, 8], {"GPipe": [0.4, 0.2], "1F1B": [0.4, 0.2], "naive": [0.7, 0.7]}, "modelled").axes
    assert len(ax.lines) == 2
    assert sorted(texts(ax)) == ["GPipe, 1F1B", "naive"]
