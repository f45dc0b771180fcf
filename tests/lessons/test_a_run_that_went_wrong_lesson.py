"""What lesson 19 says of a run, and no cell of it asserts."""

from __future__ import annotations

import sys

import cloudpickle
import pytest

from course_utils import WorkerError, launch
from lessons.a_run_that_went_wrong import runs

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


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
