"""The figures of memory and sharding: what is drawn is what was given."""

import pytest
from figures import LANES, bars, columns, edge, key, rows, texts
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from course_utils import memory, plots
from course_utils.memory import Memory
from course_utils.plots import PART_COLORS
from course_utils.units import decimal_bytes


@pytest.mark.parametrize(("size", "expected"), [
    (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (1.5e6, "1.5 MB"), (31.4e9, "31.4 GB"),
    (120e9, "120 GB"), (1.875e9, "1.88 GB"), (2.8e12, "2.8 TB"), (3e18, "3,000 PB"),
])
def test_sizes_are_decimal_with_three_digits(size, expected):
    assert decimal_bytes(size) == expected


def test_every_part_of_memory_has_a_colour_of_its_own():
    assert tuple(PART_COLORS) == memory.PARTS
    assert len(set(PART_COLORS.values())) == len(memory.PARTS)


def test_parts_are_stacked_in_order_with_their_total_at_the_end():
    held = {"formula": Memory(2e6, 2e6, 12e6), "measured": {"parameters": 2e6, "activations": 1e6}}
    figure = plots.memory_bars(held, "measured and modelled: a GPT")
    (ax,) = figure.axes
    assert bars(ax) == [(0, 2e6), (2e6, 2e6), (4e6, 12e6), (0, 2e6), (2e6, 1e6)]
    assert {"16 MB", "3 MB", "12 MB"} <= set(texts(ax))
    assert key(ax) == list(PART_COLORS)[:4], "what is there"
    assert figure.get_suptitle() == "measured and modelled: a GPT" and "(MB)" in ax.get_xlabel()


def test_a_limit_is_a_line_and_totals_above_it_are_coloured():
    (ax,) = plots.memory_bars({"a": Memory(120e9), "b": Memory(40e9)}, "", ("H100", 80e9)).axes
    (line,) = ax.lines
    assert set(line.get_xdata()) == {80e9} and "H100 80 GB" in texts(ax)
    colors = {text.get_text(): text.get_color() for text in ax.texts if text.get_fontweight() == "bold"}
    assert colors["120 GB"] != colors["40 GB"]


@pytest.mark.parametrize("limits", [{"H100": 80e9}, {"V100": 32e9, "H100": 80e9, "H200": 141e9, "B200": 143e9}])
@pytest.mark.parametrize("size", [60e9, 75e9, 78.2e9, 79.9e9, 80e9, 80.1e9, 140e9])
def test_no_limit_strikes_through_a_total(size, limits):
    figure = plots.memory_bars({"a": Memory(size), "b": Memory(150e9)}, "", limits)
    figure.draw_without_rendering()
    (ax,) = figure.axes
    totals = [text.get_window_extent() for text in ax.texts if text.get_fontweight() == "bold"]
    assert len(totals) == 2
    for line in ax.lines:
        at = ax.transData.transform((line.get_xdata()[0], 0))[0]
        assert not any(box.x0 < at < box.x1 for box in totals)


def test_limits_far_from_every_bar_are_told_and_do_not_squeeze_the_bars():
    (ax,) = plots.memory_bars({"a": Memory(1e6)}, "", {"near": 2e6, "H100": 80e9}).axes
    assert len(ax.lines) == 1 and ax.get_xlim()[1] < 3e6
    assert "H100 80 GB" in ax.get_xlabel()


def test_names_of_limits_close_together_stand_in_rows():
    (ax,) = plots.memory_bars({"a": Memory(150e9)}, "", {"B200": 180e9, "GB200": 186e9, "T4": 16e9}).axes
    raised = {text.get_text(): text.xyann[1] for text in ax.texts if text.get_text()[0] in "BGT"}
    assert raised["GB200 186 GB"] > raised["B200 180 GB"] == raised["T4 16 GB"]


def test_memory_over_time_is_stacked_and_its_peak_is_told():
    history = [("before", Memory(4e6)), ("forward", Memory(4e6, activations=6e6)), ("step", Memory(4e6, 4e6))]
    figure = plots.memory_over_time(history, "measured: a step")
    (ax,) = figure.axes
    tops = [patch.get_data() for patch in ax.patches]
    nothing = float("nan")
    expected = [[4e6] * 3, [nothing, nothing, 8e6], [nothing, 10e6, nothing]]
    for data, values in zip(tops, expected, strict=True):
        assert data.values.tolist() == pytest.approx(values, nan_ok=True)
    assert tops[2].baseline.tolist() == [4e6, 4e6, 8e6]
    assert "peak 10 MB" in texts(ax)
    assert {"parameters", "gradients", "activations"} <= set(texts(ax)), "named where they are"
    assert columns(ax) == ["before", "forward", "step"]


def test_neighbours_with_one_label_are_one_phase_and_thin_parts_are_named_above():
    history = [("forward", Memory(1e3, activations=i * 1e6)) for i in range(40)] + [("backward", Memory(1e3))] * 9
    (ax,) = plots.memory_over_time(history, "measured").axes
    assert columns(ax) == ["forward", "backward"]
    assert ax.get_xticks().tolist() == [19.5, 44]
    assert key(ax) == ["parameters", "activations"]
    assert "activations" not in texts(ax)  # all names in one place


def test_many_marks_are_thinned_and_one_is_enough():
    history = [(f"operation {i}", Memory(i)) for i in range(200)]
    (ax,) = plots.memory_over_time(history, "measured").axes
    assert 0 < len(ax.get_xticks()) <= 45
    (ax,) = plots.memory_over_time([("only", Memory())], "measured").axes
    assert "peak 0 B" in texts(ax)


def test_activations_over_length_are_points_and_lines_of_one_colour():
    lengths = [64, 128, 256]
    (ax,) = plots.memory_over_length(
        lengths, {"keep all": [1e6, 2e6, 4e6]}, {"keep all": [1e6, 2e6, 4.1e6], "checkpoint": [1e5, 2e5, 4e5]}, "t"
    ).axes
    line, other, points = ax.lines
    assert line.get_color() == points.get_color() != other.get_color()
    assert line.get_ydata()[-1] == 4.1e6 and points.get_ydata()[-1] == 4e6
    assert texts(ax) == ["checkpoint", "keep all"]
    assert columns(ax) == ["64", "128", "256"]


def partition(ranks=4, whole=400):
    shard = Memory(whole, whole, 2 * whole / ranks)
    return {"DDP": [Memory(whole, whole, 2 * whole)] * ranks, "ZeRO-1": [shard] * ranks}


def filled(ax, part):
    return [(p.get_x(), p.get_y(), p.get_height()) for p in ax.patches
            if isinstance(p, Rectangle) and p.get_facecolor()[:3] == pytest.approx(to_rgb(PART_COLORS[part]))
            and p.get_facecolor()[3]]


def test_shards_lie_at_their_places_and_replicas_are_whole():
    figure = plots.partition_picture(partition(), "measured: bytes by rank")
    ddp, zero = figure.axes
    assert [(y, height) for _, y, height in filled(ddp, "optimizer")] == [(800, 800)] * 4
    assert [(y, height) for _, y, height in filled(zero, "optimizer")] == [(800 + 200 * r, 200) for r in range(4)]
    assert [(y, height) for _, y, height in filled(zero, "parameters")] == [(0, 400)] * 4
    assert ddp.get_title() == "DDP\n1.6 kB a rank" and zero.get_title() == "ZeRO-1\n1 kB a rank"
    assert [name.split("\n")[0] for name in rows(ddp)] == list(PART_COLORS)[:3]
    assert figure.get_suptitle() == "measured: bytes by rank"


def test_uneven_shards_stay_inside_the_whole():
    stages = {"DDP": [Memory(100)] * 3, "ZeRO-3": [Memory(34), Memory(34), Memory(32)]}
    _, zero = plots.partition_picture(stages, "").axes
    assert [(y, height) for _, y, height in filled(zero, "parameters")] == [(0, 34), (34, 34), (68, 32)]
    assert "32 B to\n34 B a rank" in zero.get_title()


def test_of_many_ranks_the_first_and_the_last_are_drawn():
    ddp, zero = plots.partition_picture(partition(64, 6400), "").axes
    assert columns(zero) == ["0", "1", "2", "…", "63"]
    assert [y for _, y, _ in filled(zero, "optimizer")][-1] == 12800 + 12600
    (alone,) = plots.partition_picture({"one rank": [Memory(1, 1, 2)]}, "").axes
    assert len(filled(alone, "optimizer")) == 1


def test_lanes_have_one_colour_for_each_unit_and_held_bytes_below():
    figure = plots.shard_timeline(LANES, [(0, 0), (1, 4e6), (3, 0)], "measured: a step", order=True)
    lanes, held = figure.axes
    assert bars(lanes) == [(0, 1), (1, 1), (1, 1), (2, 1)]
    assert edge(lanes.patches[0]) == edge(lanes.patches[2]) != edge(lanes.patches[1])
    assert texts(lanes) == ["block 0", "block 1"] * 2
    assert "most: 4 MB" in texts(held) and "(MB)" in held.get_ylabel()
    assert held.get_xlabel() == "events, in order" and figure.get_suptitle() == "measured: a step"
    assert held.lines[0].get_ydata().tolist() == [0, 4e6, 0, 0]


def test_seconds_become_milliseconds_and_held_bytes_may_be_left_out():
    (ax,) = plots.shard_timeline({"compute": [("a", 0.0, 0.5)]}, [], "measured").axes
    assert ax.patches[0].get_width() == 500 and ax.get_xlabel() == "time (ms)"
    (ax,) = plots.shard_timeline({"compute": [("a", 0.0, 5e-5)]}, [], "measured").axes
    assert ax.patches[0].get_width() == pytest.approx(50) and ax.get_xlabel() == "time (µs)"


def test_labels_without_room_are_shortened_and_told_above():
    spans = [("block 0", i, i + 1) for i in range(20)] + [("block 1", 20, 21), ("root", 21, 60)]
    (ax,) = plots.shard_timeline({"compute": spans}, [], "", order=True).axes
    assert "root" in texts(ax) and "0" in texts(ax) and "block 0" not in texts(ax)
    assert key(ax) == ["block 0", "block 1", "root"]


def test_a_mesh_shows_ranks_by_shard_and_frames_nodes():
    figure = plots.mesh_picture([[0, 1], [2, 3]], ("replicate", "shard"), "HSDP", {0: 0, 1: 0, 2: 1, 3: 1})
    (ax,) = figure.axes
    assert {"rank 0", "rank 3", "node 0", "node 1"} <= set(texts(ax))
    boxes = [patch for patch in ax.patches if patch.get_zorder() == 2]
    assert edge(boxes[0]) != edge(boxes[1])
    assert len({edge(box) for box in boxes}) == 2, "one colour a column"
    assert len(ax.lines) == 2 * 6, "two nodes of two ranks: no border between the ranks of one"
    assert "shard" in ax.get_xlabel() and "replicate" in ax.get_ylabel()


def test_a_large_mesh_is_cut_short_and_one_rank_is_a_mesh():
    (ax,) = plots.mesh_picture([[8 * i + j for j in range(8)] for i in range(128)], ("a", "b"), "").axes
    shown = set(texts(ax))
    assert {"rank 0", "rank 23", "⋮", "rank 1023"} <= shown and "rank 24" not in shown
    (ax,) = plots.mesh_picture([[0]], ("a", "b"), "").axes
    assert texts(ax) == ["rank 0"]
