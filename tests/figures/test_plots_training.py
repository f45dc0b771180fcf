"""The figures of data-parallel training: what is drawn is what was given."""

import pytest
from figures import edged, rows, texts, titles

from course_utils.plots import RANK_COLORS, bucket_picture, gpu_timelines, loss_curves, replicas, step_timelines


def test_replicas_are_grey_where_ranks_agree_and_in_their_colour_where_not():
    figure = replicas({"loss": [1.0, 2.0], "weights": [[1, -1], [1, -1]], "text": ["a", "b"]}, "measured: a step")
    assert [len(edged(figure.axes[0], color)) for color in ("#AAAAAA", *RANK_COLORS[:2])] == [2, 2, 2]
    assert {"1.0000", "2.0000", "a", "b", "weights"} <= set(texts(figure))
    assert titles(figure) == ["measured: a step"]


def test_bars_of_a_column_share_one_scale():
    figure = replicas({"gradient": [[0.5, 0.0], [0.0, -1.0]]}, "")
    heights = [patch.get_height() for patch in figure.axes[0].patches if patch.get_width() < 1]
    assert heights == pytest.approx([-0.19, 0, 0, 0.38])  # the axis points down


def test_buckets_lie_one_after_the_other_with_their_bytes():
    row = [[("norm", 100), ("norm", 100), ("up", 800)], [("embedding", 1000)]]
    figure = bucket_picture({"ours": row, "DDP": [sum(row, [])]}, "computed")
    pieces = sorted((p.get_y(), p.get_x(), p.get_width()) for p in figure.axes[0].patches if p.get_facecolor()[3])
    assert [(x, width) for _, x, width in pieces] == [(0, 200), (200, 800), (1000, 1000)] * 2
    borders = [(p.get_x(), p.get_width()) for p in figure.axes[0].patches if not p.get_facecolor()[3]]
    assert borders == [(0, 1000), (1000, 1000), (0, 2000)]
    assert rows(figure.axes[0]) == ["ours", "DDP"]
    assert "embedding" in texts(figure)


def test_timelines_share_a_scale_and_messages_that_overlap_have_lanes_of_their_own():
    calm = [{"backward": (0, 0.01), "messages": [(0.01, 0.02), (0.02, 0.03)], "end": 0.03}] * 2
    busy = [{"backward": (0, 0.01), "messages": [(0.0, 0.01), (0.005, 0.02)], "end": 0.02}] * 2
    figure = step_timelines({"calm": calm, "busy": busy}, "measured: steps")
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim() and second.get_xlabel().endswith("(ms)")
    assert titles(figure) == ["calm", "busy"]
    lanes = [{round(p.get_y(), 3) for p in ax.patches if p.get_y() > 0 and p.get_y() < 0.5} for ax in figure.axes]
    assert [len(lane) for lane in lanes] == [1, 2]
    assert {"30 ms", "20 ms"} <= set(texts(figure))


def test_gpus_have_a_panel_and_a_scale_each_and_a_lane_for_each_kind():
    jobs = {"slow": {"compute": [(0.0, 0.2)], "all-reduces": [(0.2, 0.25), (0.26, 0.3)]},
            "fast": {"compute": [(0.0, 0.1)], "all-reduces": [(0.05, 0.1)]}}
    figure = gpu_timelines(jobs, "recorded: steps")
    assert titles(figure) == ["slow", "fast"]
    for ax, lanes in zip(figure.axes, jobs.values(), strict=True):
        assert rows(ax) == [*lanes] and ax.get_xlabel().endswith("(ms)")
        for drawn, spans in zip(ax.collections, lanes.values(), strict=True):
            boxes = [path.get_extents() for path in drawn.get_paths()]
            assert [(box.x0, box.x1) for box in boxes] == [pytest.approx((1e3 * a, 1e3 * b)) for a, b in spans]


def test_loss_curves_are_labelled_at_their_ends_inside_the_figure():
    figure = loss_curves(
        {"whole": (range(1, 31), [4 - i / 10 for i in range(30)]), "resumed": ([16, 30], [2.5, 1.1])},
        "measured: loss", wide=["whole"], marks={"checkpoint": 15.5},
    )
    ax = figure.axes[0]
    assert {"whole", "resumed", "checkpoint"} <= set(texts(figure)) and "nats" in ax.get_ylabel()
    widths = [line.get_linewidth() for line in ax.lines[:2]]
    assert widths[0] > 2 * widths[1]
    ends = [text for text in ax.texts if text.get_text() in ("whole", "resumed")]
    assert all(abs(text.xyann[1]) < 30 for text in ends), "labels stay beside their lines"
