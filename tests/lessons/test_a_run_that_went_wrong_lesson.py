"""What lesson 19 says of a run, and no cell of it asserts."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from lesson_cells import definitions

from course_utils import WorkerError, launch
from lessons.a_run_that_went_wrong import runs

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


def searched(node: int, nodes: int, spare: int) -> int:
    """Restarts until it is known which node is slow: groups are left out in turn, then halves of the slow group."""
    count, group = 0, range(0)
    for first in range(0, nodes, spare):
        group, count = range(first, min(first + spare, nodes)), count + 1
        if node in group:
            break
    while len(group) > 1:
        half = group[: len(group) // 2]
        group, count = half if node in half else group[len(half) :], count + 1
    return count


@pytest.mark.parametrize("spare", [1, 2, 3, 24])
def test_a_slow_node_is_found_in_as_many_restarts_as_the_lesson_says(spare: int):
    at_most = definitions("19")["restarts_at_most"]
    assert max(searched(node, 48, spare) for node in range(48)) == at_most(48, spare)


def test_a_run_that_is_resumed_by_copying_learns_on():
    model, optimizer, log = launch(resumed, world_size=2)[0]
    assert model == optimizer == 28 and log


def resumed() -> tuple[int, int, bool]:
    model, optimizer, log = runs.day_3(4, assign=False)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    weights = [norm for _, _, norm in log.lines.values()]
    return len([*model.parameters()]), sum(id(p) in held for p in model.parameters()), len({*weights}) == 4


def test_with_trained_embeddings_the_reentrant_checkpoint_is_refused():
    with pytest.raises(WorkerError, match="marked as ready twice"):
        launch(runs.day_4, 1, frozen=False, world_size=2)
