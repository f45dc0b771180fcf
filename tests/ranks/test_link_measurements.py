"""What the lesson on links measures: times in the order of sizes, a line and its intervals, a roof, copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from course_utils import launch
from lessons.gpu_interconnects import link_measurements as measured


def test_each_timed_exchange_follows_one_that_is_not_and_sizes_take_turns():
    def on_this_rank():
        seen = []
        times = measured._times(lambda buffer: seen.append(buffer.numel()), [1, 2, 3])
        return seen, len(times)

    assert launch(on_this_rank, world_size=1) == [([1, 1, 2, 2, 3, 3] * measured.ROUNDS, 3)]


@pytest.mark.parametrize(("seconds", "count"), [(1 / 32, 5), (1 / 512, 52)])
def test_calls_are_repeated_five_times_and_until_enough_time_has_passed(monkeypatch, seconds, count):
    now = [0.0]
    monkeypatch.setattr(measured, "time", SimpleNamespace(perf_counter=lambda: sum(now)))
    assert measured.best_seconds(lambda: now.append(seconds if len(now) > 1 else 1.0)) == seconds
    assert len(now) - 2 == count  # the slow first does not count


def test_a_line_says_what_was_fitted_and_how_sure_it_is():
    sizes = [2.0**k for k in range(10, 24, 2)]
    line = measured.fit_line(sizes, [50e-6 + size / 2e9 for size in sizes])
    assert line.seconds(2e9) == pytest.approx(1 + 50e-6)
    assert str(line).splitlines() == [
        "alpha         50 µs,   95 % interval 50 to 50 µs", "1 / beta    2.00 GB/s, 95 % interval 2.00 to 2.00 GB/s",
    ]
