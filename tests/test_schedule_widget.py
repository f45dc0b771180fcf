"""The schedule explorer: time, bubble and activations are those of the simulation, impossible settings are refused."""

import re

import pytest

from course_utils.pipeline import SCHEDULES
from course_utils.widgets.schedules import schedule_explorer


class Explorer:
    def __init__(self):
        first, second, third, self.status, self.picture = schedule_explorer().children
        self.microbatches, self.ranks, self.name = first.children
        self.virtual, self.transfer = second.children
        self.forward, self.input, self.weight = third.children

    @property
    def shown(self):
        return self.status.value, bytes(self.picture.value)


@pytest.fixture
def explorer():
    return Explorer()


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
    ):  # fmt: skip
        control.value = value
        seen.add(explorer.shown)
    assert len(seen) == 9


def test_virtual_stages_belong_to_interleaving(explorer):
    assert explorer.virtual.disabled
    explorer.name.value = "interleaved"
    assert not explorer.virtual.disabled


def test_impossible_setting_says_why_and_keeps_the_picture(explorer):
    explorer.name.value = "interleaved"
    before = explorer.picture.value
    explorer.microbatches.value = 9
    assert explorer.status.value == (
        "Not possible: interleaving needs a multiple of 4 micro-batches, got 9. The picture is the last one."
    )
    assert explorer.picture.value == before


def test_no_formula_is_claimed_where_none_holds(explorer):
    for name, value in (("transfer", 0.5), ("weight", 2.0)):
        explorer.name.value = "ZB-H1"
        getattr(explorer, name).value = value
        assert "no closed formula" in explorer.status.value
