"""The exercises on interconnects: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import wrong_interconnects
from exercise_cases import ExerciseTests

from course_utils.checks import CheckFailed, interconnects
from course_utils.topology import REFERENCES, reference

pytestmark = pytest.mark.guard(60)


class TestInterconnects(ExerciseTests):
    checks, mutants = interconnects, wrong_interconnects

    @pytest.mark.parametrize("name", REFERENCES)
    def test_widest_path_of_the_solution_is_that_of_the_topology(self, name):
        machine = reference(name)
        links = [(link.a, link.b, link.bandwidth) for link in machine.links]
        for other in machine.gpus[1:9]:
            found, _ = self.answer("widest_path")(links, machine.gpus[0], other)
            assert found == machine.path(machine.gpus[0], other).bandwidth


    @pytest.mark.parametrize("posted_before_the_clock", [False, True])
    def test_a_receive_posted_before_the_send_passes(self, posted_before_the_clock):
        def ping_pong(x, repeats, clock):
            rank, times, echo = dist.get_rank(), [], torch.empty_like(x)
            for _ in range(repeats + 1):
                if rank == 0:
                    start = clock()
                    arrival = dist.irecv(echo, 1)
                    start = clock() if posted_before_the_clock else start
                    departure = dist.isend(x, 1)
                    departure.wait()
                    arrival.wait()
                    times.append(clock() - start)
                elif rank == 1:
                    dist.recv(echo, 0)
                    dist.send(echo, 0)
            return torch.tensor(times[1:], dtype=torch.float64).quantile(0.5) / 2 if rank == 0 else None

        interconnects.ping_pong(ping_pong)

    def test_other_pairs_of_ranks_are_no_bystanders(self):
        right = self.answer("ping_pong")

        def in_pairs(x, repeats, clock):
            n, rank = dist.get_world_size(), dist.get_rank()
            result = right(x, repeats, clock)
            for _ in range(repeats if rank >= 2 and n == 4 else 0):
                dist.send(x, 5 - rank) if rank == 2 else dist.recv(x, 5 - rank)
            return result

        assert self.refusal("ping_pong", in_pairs).hint == "bystander"

    def test_a_time_on_other_ranks_is_refused(self):
        right = self.answer("ping_pong")
        error = self.refusal("ping_pong", lambda *arguments: right(*arguments) or 0.0)
        assert error.hint == "seconds" and error.rank == 1


def test_any_of_several_slowest_links_is_a_bottleneck_but_no_dead_end():
    links = [("A", "B", 5e9), ("B", "C", 5e9), ("B", "D", 5e9)]
    for ends, right in ((("A", "B"), True), (("C", "B"), True), (("B", "D"), False)):
        exercise = interconnects.Exercise("Exercise 5", interconnects.HINTS["widest_path"])
        try:
            interconnects._widest_path(exercise, links, "A", "C", (5e9, ends))
        except CheckFailed as error:
            assert not right and error.hint == "bottleneck"
        else:
            assert right


def test_measurements_are_the_same_each_time_and_exact_without_noise():
    first, second = (interconnects.measurements(1e-5, 1e-9, 0.03)[1] for _ in range(2))
    assert torch.equal(first, second)
    sizes, exact = interconnects.measurements(1e-5, 1e-9, 0.0)
    assert torch.allclose(exact, (1e-5 + 1e-9 * sizes)[:, None].expand(-1, 7), rtol=1e-12)


def test_a_median_of_each_size_is_told_from_one_of_each_repeat():
    right = TestInterconnects.answer("fit_and_predict")

    def wrong_if_square(sizes, seconds, unseen):
        return right(sizes, seconds.T if seconds.shape == (7, 7) else seconds, unseen)

    assert TestInterconnects.refusal("fit_and_predict", wrong_if_square).hint == "value"


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_fit_to_any_of_the_best_times_of_each_size_passes(place):
    def fit(sizes, seconds, unseen):
        t = seconds.sort(dim=1).values[:, place]
        relative = torch.stack([1 / t, sizes / t], dim=1)
        alpha, beta = torch.linalg.lstsq(relative, torch.ones_like(t)[:, None]).solution.flatten()
        return alpha.item(), beta.item(), alpha + beta * unseen

    interconnects.fit_and_predict(fit)
