"""What the lesson on links measures: times in the order of sizes, a line and its intervals, a roof, copies."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_utils import launch
from lessons.gpu_interconnects import link_measurements as measured


def exchange(buffer):
    if dist.get_rank() == 0:
        dist.send(buffer, dst=1)
        dist.recv(buffer, src=1)
    else:
        dist.recv(buffer, src=0)
        dist.send(buffer, dst=0)


def test_every_size_gets_one_time():
    seconds = measured.time_messages(exchange, [64, 4096, 2**20], rounds=3)
    assert len(seconds) == 3 and all(0 < t < 5 for t in seconds)


def test_each_timed_exchange_follows_one_that_is_not_and_sizes_take_turns():
    def on_this_rank():
        seen = []
        times = measured._times(lambda buffer: seen.append(buffer.numel()), [1, 2, 3], rounds=2)
        return seen, len(times)

    assert launch(on_this_rank, world_size=1) == [([1, 1, 2, 2, 3, 3] * 2, 3)]


def test_the_first_call_does_not_count():
    calls = []
    assert 0 <= measured.best_seconds(lambda: calls.append(1), repeats=4, least=0.0) < 1
    assert len(calls) == 5


def test_short_calls_are_repeated_until_enough_time_has_passed():
    calls = []
    measured.best_seconds(lambda: calls.append(time.sleep(0.001)), repeats=1, least=0.01)
    assert 2 <= len(calls) <= 12


def test_a_line_says_what_was_fitted_and_how_sure_it_is():
    sizes = [2.0**k for k in range(10, 24, 2)]
    line = measured.fit_line(sizes, [50e-6 + size / 2e9 for size in sizes])
    assert line.alpha == pytest.approx(50e-6) and 1 / line.beta == pytest.approx(2e9)
    assert line.seconds(2e9) == pytest.approx(1 + 50e-6)
    low, high = line.interval()
    assert np.allclose(low, high) and str(line).splitlines() == [
        "alpha         50 µs,   95 % interval 50 to 50 µs", "1 / beta    2.00 GB/s, 95 % interval 2.00 to 2.00 GB/s",
    ]


def test_a_draw_without_bandwidth_makes_no_warning(recwarn: pytest.WarningsRecorder):
    line = measured.Line(1e-5, 0.0, np.array([[1e-5, 0.0], [2e-5, 1e-9]]))
    assert "inf GB/s" in str(line) and not recwarn.list


def test_a_roof_holds_what_was_measured():
    threads = torch.get_num_threads()
    roof = measured.measured_roof("cpu", [32, 64])
    assert torch.get_num_threads() == threads
    assert list(roof.points) == ["add", "matrix × vector", "matmul 32", "matmul 64"]
    assert roof.points["add"][0] == pytest.approx(1 / 12) and roof.points["matrix × vector"][0] == 0.5
    assert [roof.points[f"matmul {side}"][0] for side in (32, 64)] == pytest.approx([2 * 32 / 12, 2 * 64 / 12])
    assert roof.peak == max(rate for _, rate in roof.points.values()) and roof.ridge == roof.peak / roof.bandwidth
    rates = [roof.points[name][1] / roof.points[name][0] for name in ("add", "matrix × vector")]
    assert roof.bandwidth == pytest.approx(max(rates))


def test_copies_that_this_machine_can_make_have_a_rate():
    rates = measured.copy_rates(2**16)
    assert ("pinned to GPU" in rates) == torch.cuda.is_available()
    assert rates["in host memory"] > 0
