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
    for sender in (0, 1):
        if dist.get_rank() == sender:
            dist.send(buffer, dst=1 - sender)
        else:
            dist.recv(buffer, src=sender)


def test_every_size_gets_one_time():
    seconds = measured.time_messages(exchange, [64, 4096, 2**20])
    assert len(seconds) == 3 and all(0 < t < 5 for t in seconds)


def test_each_timed_exchange_follows_one_that_is_not_and_sizes_take_turns():
    def on_this_rank():
        seen = []
        times = measured._times(lambda buffer: seen.append(buffer.numel()), [1, 2, 3])
        return seen, len(times)

    assert launch(on_this_rank, world_size=1) == [([1, 1, 2, 2, 3, 3] * measured.ROUNDS, 3)]


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.03, 5, 5), (0.002, 6, 50)])
def test_calls_are_repeated_five_times_and_until_enough_time_has_passed(seconds, least, most):
    calls = []
    assert seconds <= measured.best_seconds(lambda: calls.append(time.sleep(seconds + (not calls)))) < 1
    assert least <= len(calls) - 1 <= most  # the slow first does not count


def test_a_line_says_what_was_fitted_and_how_sure_it_is():
    sizes = [2.0**k for k in range(10, 24, 2)]
    line = measured.fit_line(sizes, [50e-6 + size / 2e9 for size in sizes])
    assert line.seconds(2e9) == pytest.approx(1 + 50e-6)
    assert str(line).splitlines() == [
        "alpha         50 µs,   95 % interval 50 to 50 µs", "1 / beta    2.00 GB/s, 95 % interval 2.00 to 2.00 GB/s",
    ]


def test_a_draw_without_bandwidth_makes_no_warning(recwarn: pytest.WarningsRecorder):
    line = measured.Line(1e-5, 0.0, np.array([[1e-5, 0.0], [2e-5, 1e-9]]))
    assert "inf GB/s" in str(line) and not recwarn.list


def test_a_roof_is_made_of_what_was_measured():
    roof = measured.measured_roof("cpu", [32, 64])
    assert list(roof.points) == ["add", "matrix × vector", "matmul 32", "matmul 64"]
    assert [intensity for intensity, _ in roof.points.values()] == pytest.approx([1 / 12, 1 / 2, 64 / 12, 128 / 12])
    assert roof.peak == max(rate for _, rate in roof.points.values()) and roof.ridge == roof.peak / roof.bandwidth
    assert roof.bandwidth == pytest.approx(max(rate / intensity for intensity, rate in [*roof.points.values()][:2]))


def test_copies_that_this_machine_can_make_have_a_rate():
    rates = measured.copy_rates(2**16)
    assert ("pinned to GPU" in rates) == torch.cuda.is_available() and rates["in host memory"] > 0
