"""The cost calculator: hours and dollars follow from the numbers that are entered."""

import math

import pytest
from figures import Opened

from lessons.collectives.explorer import cost_calculator, efficiency, goodput


@pytest.fixture
def calculator():
    return Opened(cost_calculator())


def test_two_gpus_at_1_9_times_cost_five_percent_more(calculator):
    calculator.kept.value, calculator.gpus.value = 95, 2
    assert "2 GPUs at 95% efficiency" in calculator.status.value
    assert "on demand: 21.9 days, $1,052.63" in calculator.status.value
    assert "One GPU on demand: $1,000.00" in calculator.status.value


def test_each_doubling_keeps_its_share():
    assert efficiency(1, 0.9) == 1
    assert efficiency(8, 0.9) == pytest.approx(0.9**3)


def test_prices_are_called_examples(calculator):
    assert "example" in calculator.price.description and "example" in calculator.spot.description


def test_every_control_changes_the_result(calculator):
    seen = {calculator.shown}
    for control, value in (
        (calculator.work, 500), (calculator.kept, 90), (calculator.gpus, 64), (calculator.price, 3.0),
        (calculator.spot, 1.0), (calculator.rate, 1.0), (calculator.save, 5), (calculator.restart, 20),
    ):
        control.value = value
        seen.add(calculator.shown)
    assert len(seen) == 9
    assert all(picture.startswith(b"\x89PNG") for _, picture in seen)


def test_goodput_is_best_at_its_interval():
    rate, save, restart = 0.1, 1 / 30, 1 / 6

    def at(every):
        return every / (every + save) * (1 - rate * (restart + every / 2))

    best = max(at(0.01 * k) for k in range(1, 1000))
    assert goodput(rate, save, restart) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize(("case", "expected"), [((0, 1, 1), 1.0), ((0.1, 0, 0), 1.0), ((10, 1, 1), 0.0)])
def test_goodput_at_the_limits(case, expected):
    assert goodput(*case) == expected


def test_a_job_that_only_restarts_has_no_end(calculator):
    calculator.rate.value, calculator.gpus.value = 1000, 1024
    assert "spot: no end, $inf" in calculator.status.value
    assert math.isfinite(calculator.work.value)


def test_free_or_impossible_input_is_kept_within_bounds(calculator):
    calculator.price.value, calculator.kept.value = -1, 150
    assert calculator.price.value == 0 and calculator.kept.value == 100
    assert "$0.00" in calculator.status.value
