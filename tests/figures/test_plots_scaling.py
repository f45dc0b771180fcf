"""The figures of lesson 05: what is drawn is what was given."""

import numpy as np
import pytest
from figures import bars, edge, key, texts

from course_utils import plots
from course_utils.recorded import ULTRASCALE_DP, Scaling


def amdahl(n, s):
    return 1 / (s + (1 - s) / n)


def test_laws_have_a_panel_each_and_a_line_for_each_share():
    figure = plots.speedup_laws({"Amdahl": amdahl, "flat": lambda n, s: 1.0}, (0.001, 0.05), most=1000)
    left, right = figure.axes
    assert left.get_title(loc="left") == "modelled: Amdahl"
    assert texts(left) == ["5 %", "0.1 %"], "from the lowest line to the highest"
    assert left.lines[2].get_ydata()[-1] == pytest.approx(amdahl(1000, 0.05))
    assert set(right.lines[1].get_ydata()) == {1.0}


def test_scaling_curves_show_speedup_and_efficiency_against_the_first():
    left, right = plots.scaling_curves([2, 4, 8], {"strong": [10, 18, 20]}, "measured").axes
    assert left.lines[1].get_ydata().tolist() == pytest.approx([1, 1.8, 2])
    assert right.lines[1].get_ydata().tolist() == pytest.approx([1, 0.9, 0.5])
    assert left.get_ylabel() == "speed-up against 2 ranks"
    assert "measured" in left.get_title(loc="left")


def test_shared_cores_limit_the_speedup_of_more_ranks_only():
    left, right = plots.scaling_curves([1, 2, 4], {"weak": [1, 2, 2]}, "measured", limit=2).axes
    (dotted,) = [line for line in left.lines if line.get_linestyle() == ":"]
    assert dotted.get_ydata().tolist() == [1, 2, 2]
    assert "2 cores" in texts(left) and "2 cores" in texts(right)
    left, _ = plots.scaling_curves([1, 2], {"weak": [1, 2]}, "measured", limit=2).axes
    assert not [line for line in left.lines if line.get_linestyle() == ":"]


def test_models_are_held_against_the_record():
    record = Scaling("a job", (8, 16, 32), (100, 80, 50), "a test")
    left, right = plots.scaling_models(record, {"line": [100, 80, 60]}, fitted=2).axes
    seen, unseen = left.lines[:2]
    assert seen.get_xdata().tolist() == [8, 16] and unseen.get_xdata().tolist() == [32]
    assert right.lines[0].get_ydata().tolist() == pytest.approx([0, 0, 0.2])
    assert "recorded" in left.get_title(loc="left") and "modelled" in left.get_title(loc="left")


def test_parts_of_a_step_are_stacked_in_colours_of_their_own():
    rows = {"rank 0": {"compute": 0.03, "wait": 0.01}, "rank 1": {"compute": 0.04, "idle": 0.002}}
    (ax,) = plots.step_split(rows, "measured: parts").axes
    assert bars(ax) == [pytest.approx(bar) for bar in ((0, 30), (30, 10), (0, 40), (40, 2))]
    assert key(ax) == ["compute", "wait", "idle"] and len({edge(bar) for bar in ax.patches}) == 3


def test_spans_have_the_colours_of_the_parts():
    (split,) = plots.step_split({"a": {"wait": 1.0}}, "t").axes
    (spans,) = plots.step_spans({"a": [("compute", 0.0, 0.5), ("wait", 0.5, 1.0)]}, "t").axes
    assert spans.patches[1].get_edgecolor() == split.patches[0].get_edgecolor()
    assert spans.patches[1].get_x() == 500


def test_bucket_sweep_shows_milliseconds_and_shares():
    left, right = plots.bucket_sweep([1, 4], [0.04, 0.05], [0, 0.5]).axes
    assert left.lines[0].get_ydata() == pytest.approx([40, 50])
    assert right.lines[0].get_ydata() == pytest.approx([0, 0.5])


def test_bucket_choice_marks_the_least_of_each_curve():
    sizes = [2.0**k for k in range(20, 26)]
    (ax,) = plots.bucket_choice(sizes, {"a": [3, 2, 1, 2, 3, 4]}, default=2**24).axes
    (dot,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (2**22, 1000)
    assert "16 MiB" in texts(ax)


def test_gradients_stand_above_the_range_of_formats():
    gradients = {"g": np.array([0.0, 2.0**-20, 2.0**-20, -(2.0**-3)])}
    above, below = plots.gradient_range(gradients, {"fp16": (-24, 16), "fp32": (-149, 128)}).axes
    x, y = above.lines[0].get_data()
    assert dict(zip(x, y, strict=True))[-19.5] == pytest.approx(2 / 3), "zeros are not counted"
    assert [bar.get_width() for bar in below.patches] == [40, 76]
    assert texts(below) == ["fp16", "fp32"]


def test_checkpointing_counts_megabytes_and_measures_milliseconds():
    kept, seconds = {"all": [1e6, 2e6], "checkpoint": [1e5, 2e5]}, {"all": [0.01, 0.02], "checkpoint": [0.02, 0.03]}
    left, right = plots.checkpointing([1, 2], kept, seconds).axes
    assert left.lines[0].get_ydata() == pytest.approx([1, 2])
    assert right.lines[1].get_ydata() == pytest.approx([20, 30])
    assert "counted" in left.get_title(loc="left") and "measured" in right.get_title(loc="left")


def test_recorded_scaling_gives_throughput_and_efficiency():
    assert ULTRASCALE_DP.throughput[-1] / ULTRASCALE_DP.tokens_per_gpu[0] == pytest.approx(100, abs=0.2)
    assert ULTRASCALE_DP.efficiency[0] == 1
    assert "https://" in ULTRASCALE_DP.source
    with pytest.raises(ValueError, match="2 GPU counts and 1 throughputs"):
        Scaling("a job", (1, 2), (3.0,), "a test")
