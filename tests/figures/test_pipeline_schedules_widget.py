"""The schedule explorer: time, bubble and activations are those of the simulation, impossible settings are refused."""

import re

import pytest
from figures import REFUSED, Opened

from lessons.pipeline_parallel.explorer import _formula, schedule_explorer
from lessons.pipeline_parallel.pipeline import SCHEDULES, Costs, simulate


@pytest.fixture
def explorer():
    return Opened(schedule_explorer())


def test_1f1b_as_it_opens(explorer):
    assert "a step takes 33, of which a rank idles 9 (27.3%)" in explorer.status.value
    assert "(p − 1)(F + I + W) = 9" in explorer.status.value
    assert "at most 4 micro-batches" in explorer.status.value and "48 messages" in explorer.status.value
    assert explorer.shown[1].startswith(b"\x89PNG")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12)])
def test_simulation_and_formula_agree(explorer, name, p, m):
    explorer.ranks.value, explorer.microbatches.value, explorer.name.value = p, m, name
    idle, formula = re.search(r"rank idles ([\d.]+) .*= ([\d.]+)\.", explorer.status.value).groups()
    assert float(idle) == pytest.approx(float(formula))


def test_every_control_changes_the_result(explorer):
    explorer.name.value = "interleaved"
    seen = {explorer.shown}
    for control, value in (
        (explorer.microbatches, 4), (explorer.ranks, 2), (explorer.virtual, 3), (explorer.transfer, 0.5),
        (explorer.forward, 2.0), (explorer.input, 2.0), (explorer.weight, 2.0), (explorer.name, "ZB-H1"),
    ):
        control.value = value
        seen.add(explorer.shown)
    assert len(seen) == 9


def test_virtual_stages_belong_to_interleaving(explorer):
    assert explorer.virtual.disabled
    explorer.name.value = "interleaved"
    assert not explorer.virtual.disabled


def test_impossible_setting_says_why_and_fades_the_picture(explorer):
    explorer.name.value = "interleaved"
    before = explorer.picture.value
    explorer.microbatches.value = 9
    assert explorer.status.value == f"<p><b>interleaving needs a multiple of 4 micro-batches, got 9.</b> {REFUSED}</p>"
    assert explorer.picture.value != before
    explorer.microbatches.value = 8
    assert explorer.picture.value == before


def test_no_formula_is_claimed_where_none_holds(explorer):
    explorer.name.value, explorer.weight.value = "ZB-H1", 2.0
    assert "formula holds for m ≥ p and W ≤ F only" in explorer.status.value
    explorer.forward.value = 2.0
    assert "(p − 1)(F + I − W) = 3" in explorer.status.value
    explorer.name.value = "ZB-H2"
    assert "formula holds for m ≥ 2p − 1, W ≤ F and 2W ≤ F + I only" in explorer.status.value
    explorer.transfer.value = 0.5
    assert "the formulas know no transfer times" in explorer.status.value


TIMES = [(f, i, w) for f in (1, 2, 3) for i in (0, 1, 2, 4) for w in (1, 2, 3)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_the_formula_is_shown_exactly_where_it_holds(name, p):
    """Over a grid: where the widget shows a formula it is what the simulation gives, where it shows none it is not."""
    paper = {"ZB-H1": lambda f, i, w: (p - 1) * (f + i - w), "ZB-H2": lambda f, i, w: (p - 1) * (f + i - 2 * w)}
    counts = {p, 2 * p} if name == "interleaved" else {p - 1, p, 2 * p - 2, 2 * p - 1, 2 * p + 1}
    for m in sorted(counts - {0}):
        schedule = SCHEDULES[name](p, m)
        for times in TIMES:
            costs = Costs(*map(float, times))
            run = simulate(schedule, costs)
            idle, told = run.period - max(run.busy), _formula(name, p, m, schedule.virtual, costs)
            if told:
                assert idle == pytest.approx(told[1], abs=1e-9), (m, times)
            else:
                assert abs(idle - paper[name](*times)) > 0.5, (m, times)
