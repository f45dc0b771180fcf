"""Lesson 12: meshes as PyTorch makes them, 2-D and 3-D training equal to one process for any degrees, what it sends."""

from __future__ import annotations

import itertools
import math
import sys
from functools import cache, partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions

from course_utils import launch, record
from course_utils.data import Windows
from course_utils.models import PUBLISHED, TransformerConfig, build_gpt
from lessons.parallelism_3d import planner
from lessons.parallelism_3d.mesh_training import (
    DIMENSIONS,
    Stage,
    crossing,
    expected_bytes,
    largest_difference,
    one_process,
    same_as_one_process,
    sent_by_dimension,
)

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


def sizes_of(*degrees: int) -> dict[str, int]:
    return dict(zip(DIMENSIONS, degrees, strict=True))


# --- meshes


@pytest.mark.parametrize("sizes", [{"pp": 3, "tp": 2}, {"d": 2, "c": 2, "b": 1, "a": 2}, {"a": 5}], ids=str)
def test_groups_of_the_planner_are_those_that_pytorch_makes(sizes):
    def groups(lesson, sizes):
        mesh = lesson["mesh_of"](sizes)
        return {name: tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in sizes}

    found = run(groups, {"mesh_of": lesson()["mesh_of"]}, sizes, ranks=math.prod(sizes.values()))
    for name, lines in planner.mesh_groups(sizes).items():
        assert {groups_of[name] for groups_of in found} == set(lines)


def test_groups_of_a_cluster_that_does_not_exist():
    sizes = {"pp": 3, "dp": 5, "tp": 4}
    for rank in (0, 37, 59):
        (found,) = launch(lesson()["pretend"], rank, sizes, world_size=1, init=False)
        for name, lines in planner.mesh_groups(sizes).items():
            assert tuple(found[name]) == next(line for line in lines if rank in line)


@pytest.mark.parametrize("name", ["Megatron 39.1B", "Megatron 145.6B"])
def test_table_of_bytes_is_what_the_planner_counts(name):
    config, (t, p, d), batch = PUBLISHED[name], (8, 4, 8), 64
    layout = planner.Layout(tp=t, pp=p, dp=d, zero=0, recompute="none", sequence_parallel=False)
    sent, n = planner.traffic(config, layout, batch), batch / d * config.context
    assert sent["tp"] == pytest.approx(2 * 8 * n * config.hidden * config.layers / p * (t - 1) / t)
    assert sent["pp"] == pytest.approx(2 * 2 * n * config.hidden / t)
    parameters = config.parameter_count / (t * p)
    assert sent["dp"] == pytest.approx(2 * 2 * parameters * (d - 1) / d, rel=0.05)  # without embeddings


# --- training


def test_stages_have_the_weights_of_the_whole_model_each_once():
    whole = {name: p for name, p in Stage(SMALL).named_parameters()}
    parts = [Stage(SMALL, number, 3) for number in range(3)]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(whole)
    assert all(torch.equal(p, whole[name]) for part in parts for name, p in part.named_parameters())
    x = Windows("train", 8).batch(range(2))[0]
    y = parts[2](parts[1](parts[0](x)))
    torch.testing.assert_close(y, build_gpt(SMALL)(x))


def test_pieces_are_cut_by_both_dimensions():
    (found, *_) = run("pieces", {"dp": 2, "tp": 2}, ranks=4)
    shapes = {name: shape for name, (_, shape) in found.items()}
    assert shapes["blocks.0.mlp.up.weight"] == (16, 16) and shapes["blocks.0.mlp.down.weight"] == (8, 32)
    assert shapes["blocks.0.norm1.weight"] == (8,)


THREE = [
    (2, 2, 1, True), (2, 1, 2, False), (1, 2, 2, True), (3, 1, 2, False), (2, 3, 1, False), (2, 1, 4, True),
    (1, 1, 1, False), (1, 3, 2, False), (1, 1, 4, False),
]


@pytest.mark.parametrize(("pp", "dp", "tp", "free"), THREE)
def test_a_mesh_trains_like_one_process_and_sends_what_the_formula_says(pp, dp, tp, free):
    sizes = sizes_of(pp, dp, tp)
    runs = run("on_mesh", sizes, free=free, ranks=pp * dp * tp)
    assert "equal to one process" in same_as_one_process(runs, reference())
    if SMALL.hidden % dp or SMALL.layers % pp or math.prod(sizes.values()) in (dp, tp, 1):
        return  # the formula has equal pieces; a dimension of all ranks is the default group
    gathers = 5 if free else 1
    for found in runs:
        expected = expected_bytes(SMALL, sizes, 24, found.stage, gathers)
        assert sent_by_dimension(found.ledger) == expected


def test_states_of_all_ranks_are_those_of_the_model_and_copies():
    runs, whole = run("on_mesh", CUBE, ranks=8), reference().states
    assert whole / 10 < min(found.states for found in runs) and max(found.states for found in runs) < whole / 6
    assert whole < sum(found.states for found in runs) < 1.2 * whole


def test_what_differs_from_one_process_is_told():
    right = reference()
    assert largest_difference([right], right) == (0, 0)
    wrong = reference(limit=0.1)
    loss, weight = largest_difference([wrong], right)
    assert loss > 1e-4 and weight > 1e-3
    with pytest.raises(AssertionError, match="losses differ by up to .* weights by up to"):
        same_as_one_process([wrong], right)
    runs = [found for found in run("on_mesh", sizes_of(2, 1, 1), ranks=2) if found.stage == 1]
    with pytest.raises(ValueError, match="no rank has .*embedding"):
        largest_difference(runs, right)


# --- clipping


@pytest.mark.parametrize("degrees", [(2, 2, 2), (2, 1, 2), (1, 2, 2), (3, 2, 1)], ids=str)
def test_norm_over_all_stages_is_that_of_one_process_and_clips_alike(degrees):
    clip = partial(lesson()["clipped"], lesson()["all_stages"], 0.5)
    runs = run("on_mesh", sizes_of(*degrees), clip=clip, ranks=math.prod(degrees))
    same_as_one_process(runs, reference(0.5))
    for found in runs:
        assert found.norms == pytest.approx(reference(0.5).norms, rel=1e-5)


@pytest.mark.parametrize("wrong", ["own_pieces", "all_pieces", "own_stage"])
def test_other_norms_are_wrong_and_fail_nowhere(wrong):
    clip = partial(lesson()["clipped"], lesson()[wrong], 0.5)
    runs = run("on_mesh", CUBE, clip=clip, ranks=8)
    assert max(largest_difference(runs, reference(0.5))) > 1e-4
    right = reference(0.5).norms[0]
    assert all((found.norms[0] > right) == (wrong == "all_pieces") for found in runs)


def test_a_backward_leaves_a_freed_stage_gathered_and_its_gradients_whole():
    """So freeing after forward saves no memory at the peak of a pipeline: what section 12 and the planner say."""

    def work(lesson):
        from torch.distributed.pipelining import PipelineStage

        seen, backward = [], PipelineStage.backward_one_chunk

        def watched(self, chunk, *args, **kwargs):
            found = backward(self, chunk, *args, **kwargs)
            groups = [block._get_fsdp_state()._fsdp_param_group for block in self.submod.blocks.values()]
            parameters = [p for group in groups for p in group.fsdp_params]
            seen.append(
                (
                    chunk,
                    all(group.is_unsharded for group in groups),
                    all(p.unsharded_param.grad is not None for p in parameters),
                )
            )
            return found

        PipelineStage.backward_one_chunk = watched
        try:
            lesson["on_mesh"](CUBE, steps=1, free=True)
        finally:
            PipelineStage.backward_one_chunk = backward
        return seen

    for seen in run(work, lesson(), ranks=8):
        assert [chunk for chunk, *_ in seen] == [0, 1, 2, 3]
        assert all(gathered for _, gathered, _ in seen) and all(whole for *_, whole in seen[:3])


# --- links


def test_two_machines_send_what_the_formula_says():
    pairs = [*itertools.combinations(CUBE, 2)]
    by_rank = run("in_turn", pairs, ranks=4)
    for pair in pairs:
        runs = [found[pair] for found in by_rank]
        sizes = {name: 2 if name in pair else 1 for name in DIMENSIONS}
        for across, node in zip(pair, ([0, 0, 1, 1], [0, 1, 0, 1]), strict=True):
            expected = sum(expected_bytes(SMALL, sizes, 24, found.stage)[across] for found in runs)
            assert crossing([found.ledger for found in runs], node) == expected


def test_bytes_between_nodes():
    def work():
        """Inside each node 800 bytes, between them 4,000 by one pair and a message of 100."""
        rank = dist.get_rank()
        pairs = [dist.new_group(list(pair)) for pair in ((0, 1), (2, 3), (0, 2))]
        with record() as ledger:
            for pair, size in zip(pairs, (800, 800, 4000), strict=True):
                if rank in dist.get_process_group_ranks(pair):
                    dist.all_reduce(torch.zeros(size, dtype=torch.uint8), group=pair)
            if rank == 1:
                dist.send(torch.zeros(100, dtype=torch.uint8), 3)
            if rank == 3:
                dist.recv(torch.zeros(100, dtype=torch.uint8), 1)
        return ledger

    ledgers = run(work, ranks=4)
    assert crossing(ledgers, node=[0, 0, 1, 1]) == 2 * 4000 + 100
    assert crossing(ledgers, node=[0, 1, 0, 1]) == 2 * 2 * 800
    assert crossing(ledgers, node=[0, 0, 0, 0]) == 0


def test_layouts_are_weighed_and_what_cannot_run_is_left_out(capsys):
    model, machine = PUBLISHED["Llama 3 8B"], planner.cluster("DGX H100", 8)
    layouts = {"fits": planner.Layout(dp=8, zero=3), "does not": planner.Layout(dp=8, zero=0)}
    found = lesson()["weigh"](model, machine, 64, layouts)
    assert found == {"fits": planner.plan(model, machine, layouts["fits"], 64).seconds}
    assert "cannot run: the fullest GPU needs" in capsys.readouterr().out
