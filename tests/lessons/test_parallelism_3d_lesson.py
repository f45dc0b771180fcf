"""Lesson 12: meshes as PyTorch makes them, training on any of them equal to one process."""

from __future__ import annotations

import math
import sys
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions

from course_utils import launch, record
from course_utils.data import Windows
from course_utils.models import TransformerConfig
from lessons.parallelism_3d import planner
from lessons.parallelism_3d.mesh_training import DIMENSIONS, one_process, same_as_one_process

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = TransformerConfig(layers=4, hidden=16, heads=4, context=8, tied=False)
CUBE = {"pp": 2, "dp": 2, "tp": 2}


@cache
def lesson() -> dict:
    """What the lesson defines, by name; four micro-batches, so that four stages are possible."""
    names = definitions("12", gpt=SMALL, windows=Windows("train", 8), cube=CUBE, backend="gloo")
    names["microbatches"] = 4
    return names


def run(fn, *args, ranks: int, **options) -> list:
    fn = lesson()[fn] if isinstance(fn, str) else fn
    return launch(fn, *args, world_size=ranks, backend="gloo", timeout=100, **options)


@cache
def reference(limit: float = math.inf):
    return run(one_process, SMALL, lesson()["text"], limit=limit, ranks=1)[0]


def test_groups_of_the_planner_are_those_that_pytorch_makes():
    def groups():
        mesh = mesh_of(sizes)
        return {name: tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in sizes}

    mesh_of, sizes = lesson()["mesh_of"], {"d": 3, "c": 2, "b": 1}
    found = run(groups, ranks=6)
    for name, lines in planner.mesh_groups(sizes).items():
        assert {groups_of[name] for groups_of in found} == set(lines)


@pytest.mark.parametrize("degrees", [(3, 1, 2), (2, 3, 1), (1, 1, 4)], ids=str)
def test_a_mesh_trains_like_one_process(degrees):
    runs = run("on_mesh", dict(zip(DIMENSIONS, degrees, strict=True)), ranks=math.prod(degrees))
    assert "equal to one process" in same_as_one_process(runs, reference())


def test_what_differs_from_one_process_is_told():
    with pytest.raises(AssertionError, match="losses differ by up to .* weights by up to"):
        same_as_one_process([reference(limit=0.1)], reference())


def test_the_norm_of_a_stage_takes_an_all_reduce_for_each_dimension_of_a_mesh_and_not_for_each_parameter():
    """What section 5 says: 3 on two replicas with two slices, where one `DTensor` after the other takes 111."""

    def one_by_one(mesh, parameters):
        return torch.stack([p.grad.norm().full_tensor() for p in parameters]).norm()

    def norms(mesh, parameters):
        found = []
        for norm_of in (own_stage, one_by_one):
            with record() as ledger:
                norm = norm_of(mesh, parameters).item()
            found.append((norm, [entry.op for entry in ledger]))
        return found

    own_stage = lesson()["own_stage"]
    for found in run("on_mesh", {"pp": 1, "dp": 2, "tp": 2}, ranks=4, steps=1, clip=norms):
        (norm, ops), (same, one_each) = found.norms[0]
        assert ops == ["all_reduce"] * 3 and one_each == ["all_reduce"] * 111
        assert norm == pytest.approx(same, rel=1e-5)
