"""The exercises on interconnects: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import pytest
import torch
import wrong_interconnects
from exercise_cases import ExerciseTests

from course_utils.checks import CheckFailed
from course_utils.checks import interconnects as interconnects
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


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_fit_to_any_of_the_best_times_of_each_size_passes(place):
    def fit(sizes, seconds, unseen):
        t = seconds.sort(dim=1).values[:, place]
        relative = torch.stack([1 / t, sizes / t], dim=1)
        alpha, beta = torch.linalg.lstsq(relative, torch.ones_like(t)[:, None]).solution.flatten()
        return alpha.item(), beta.item(), alpha + beta * unseen

    interconnects.fit_and_predict(fit)
