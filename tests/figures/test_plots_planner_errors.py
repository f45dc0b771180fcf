"""Errors of the planner by family: what is drawn is what was given."""

from types import SimpleNamespace

import pytest
from figures import rows, texts

from course_utils import plots
from course_utils.planner import published_runs


def erring(**chosen):
    runs = published_runs(**chosen)
    return [SimpleNamespace(run=run, family=run.family, fitted=False, error=0.1, share=0.4) for run in runs]


def test_each_family_has_a_lane_with_its_medians_and_the_exam_has_its_own():
    some, exam = erring(table="torchtitan-cp"), erring(role="exam", table="llm-foundry-h100-fp8")
    for row, error, share in zip(some, (-0.2, 0.1, 0.3, 2.0), (0.9, 0.2, 0.4, 0.5), strict=True):
        row.error, row.share = error, share
    some[0].fitted = True
    (ax,) = plots.errors_by_family([*exam, *some], "m", goals={"long_context": 0.2}).axes
    assert rows(ax) == ["long context", "exam: data parallel\nand FSDP", "exam: long context"]
    assert texts(ax)[0] == "3 runs: median 30.0%, bias +30.0%\nbest constant 20.0%"
    lane = [line for line in ax.lines if line.get_marker() in "o>" and line.get_ydata()[0] < 0.5]
    dots = {line.get_xdata()[0]: line for line in lane}
    assert sorted(dots) == [-20, 10, 30, 60] and dots[60].get_marker() == ">"
    assert [dots[at].get_markerfacecolor() == "white" for at in (-20, 10)] == [True, False]
    assert [(bar.get_x(), bar.get_width()) for bar in ax.patches[:2]] == [(-20, 40), (-15, 30)]


def test_dots_of_one_error_stand_apart():
    (ax,) = plots.errors_by_family(erring(table="bloom-bf16")[:9], "m").axes
    places = {line.get_ydata()[0] for line in ax.lines if line.get_marker() == "o"}
    assert len(places) == 9 and max(map(abs, places)) < 0.42


def test_there_must_be_a_run():
    with pytest.raises(ValueError, match="at least one run"):
        plots.errors_by_family([], "")
