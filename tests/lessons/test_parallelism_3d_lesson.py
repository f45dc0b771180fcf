"""Lesson 12: meshes as PyTorch makes them, 2-D and 3-D training equal to one process for any degrees, what it sends."""

from __future__ import annotations

import itertools
import math
import sys
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lessons import definitions

from course_utils import launch, planner, record
from course_utils.costs import bytes_sent
from course_utils.data import Windows
from course_utils.models import PUBLISHED, TransformerConfig
from course_utils.topology import two_level

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = TransformerConfig(layers=4, hidden=16, heads=4, context=8, tied=False)
CUBE = {"pp": 2, "dp": 2, "tp": 2}


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("12", gpt=SMALL, windows=Windows("train", 8), microbatches=4, cube=CUBE, backend="gloo")


def run(fn: str, *args, ranks: int, **options) -> list:
    return launch(lesson()[fn], *args, world_size=ranks, backend="gloo", timeout=100, **options)


@cache
def one_process(limit: float = math.inf) -> dict:
    return run("alone", limit, ranks=1)[0]


MESHES = [
    {"pp": 3, "tp": 2},
    {"dp": 2, "pp": 1, "tp": 3},
    {"a": 5},
    {"d": 2, "c": 2, "b": 1, "a": 2},
    {"pp": 2, "dp": 3},
]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_groups_by_hand_are_those_of_pytorch_and_of_the_planner(sizes):
    ranks = math.prod(sizes.values())
    hand = [{name: lesson()["group_of"](rank, sizes, name) for name in sizes} for rank in range(ranks)]
    assert run("torch_groups", sizes, ranks=ranks) == hand
    for name, groups in planner.mesh_groups(sizes).items():
        assert set(groups) == {groups_of[name] for groups_of in hand}
    for rank in range(ranks):
        at, place = lesson()["coordinates"](rank, sizes), 0
        for name, size in sizes.items():
            place = place * size + at[name]
        assert place == rank


def test_groups_of_a_cluster_that_does_not_exist():
    sizes = {"pp": 3, "dp": 5, "tp": 4}
    for rank in (0, 37, 59):
        (found,) = launch(lesson()["pretend"], rank, sizes, world_size=1, init=False)
        assert found == {name: lesson()["group_of"](rank, sizes, name) for name in sizes}


@pytest.mark.parametrize("name", ["Megatron 39.1B", "Megatron 145.6B"])
def test_bytes_of_a_gpu_are_those_of_the_planner(name):
    layout = planner.Layout(tp=8, pp=4, dp=8, zero=0, recompute="none", sequence_parallel=False)
    ours = lesson()["sent_by_a_gpu"](PUBLISHED[name], {"tp": 8, "pp": 4, "dp": 8}, 64)
    theirs = planner.traffic(PUBLISHED[name], layout, 64)
    assert ours["tp"] == pytest.approx(theirs["tp"])
    assert ours["dp"] == pytest.approx(theirs["dp"], rel=0.05)  # without embeddings
    assert ours["pp"] == pytest.approx(8 * theirs["pp"])  # the planner's ranks send an eighth each


@pytest.mark.parametrize(
    "sizes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}, {"dp": 3, "tp": 1}, {"dp": 3, "tp": 2}], ids=str
)
def test_two_dimensions_are_one_process(sizes):
    runs = run("two_dimensions", sizes, ranks=math.prod(sizes.values()))
    assert max(lesson()["apart"](runs, one_process())) < 1e-5
    formula = lesson()["expected"](SMALL, sizes, 24)
    sent = lesson()["sent_by"](runs[0])
    if "default" in sent:  # the group of a dimension with all ranks
        assert sum(sent.values()) == pytest.approx(sum(formula.values()), rel=0.1)  # rows of FSDP are padded
    elif SMALL.hidden % sizes["dp"] == 0:
        assert sent == {name: formula[name] for name in sent}


THREE = [
    (2, 2, 1, True), (2, 1, 2, False), (1, 2, 2, True), (3, 1, 2, False), (2, 3, 1, False), (2, 1, 4, True),
    (4, 2, 1, True), (4, 2, 1, False), (1, 1, 1, True),
]


@pytest.mark.parametrize(("pp", "dp", "tp", "freed"), THREE)
def test_three_dimensions_are_one_process_and_send_what_the_formula_says(pp, dp, tp, freed):
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    runs = run("three_dimensions", sizes, ranks=pp * dp * tp, reshard_after_forward=freed)
    assert max(lesson()["apart"](runs, one_process())) < 1e-5
    if SMALL.hidden % sizes["dp"] or SMALL.layers % sizes["pp"]:
        return  # the formula has equal pieces
    for of in runs:
        formula = lesson()["expected"](SMALL, sizes, 24, of["stage"], 5 if freed else 1)
        sent = lesson()["sent_by"](of)
        assert {name: sent.get(name, 0) for name in formula} == formula


@pytest.mark.parametrize("order", list(itertools.permutations(CUBE)), ids=str)
def test_order_of_a_mesh_moves_the_groups_and_changes_nothing_else(order):
    def where(lesson, order):
        mesh = lesson["mesh_of"](CUBE, order)
        return {name: tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in CUBE}

    groups = launch(where, lesson_parts("mesh_of"), list(order), world_size=8, backend="gloo")
    sizes = {name: CUBE[name] for name in order}
    assert groups == [{name: lesson()["group_of"](rank, sizes, name) for name in CUBE} for rank in range(8)]


def lesson_parts(*names: str) -> dict:
    return {name: lesson()[name] for name in names}


@pytest.mark.parametrize("degrees", [(2, 2, 2), (2, 1, 2), (1, 2, 2), (3, 2, 1)], ids=str)
def test_norm_over_all_stages_is_that_of_one_process_and_clips_alike(degrees):
    sizes, limit = dict(zip(("pp", "dp", "tp"), degrees, strict=True)), 0.5
    clip = lesson()["Clip"](lesson()["all_stages"], limit)
    runs = run("three_dimensions", sizes, clip, ranks=math.prod(degrees))
    wanted = one_process(limit)
    assert max(lesson()["apart"](runs, wanted)) < 1e-5
    for of in runs:
        assert of["norms"] == pytest.approx(wanted["norms"], rel=1e-5)


@pytest.mark.parametrize("wrong", ["own_pieces", "all_pieces", "own_stage"])
def test_other_norms_are_wrong_and_fail_nowhere(wrong):
    clip = lesson()["Clip"](lesson()[wrong], 0.5)
    runs = run("three_dimensions", CUBE, clip, ranks=8)
    assert max(lesson()["apart"](runs, one_process(0.5))) > 1e-4
    right = one_process(0.5)["norms"][0]
    assert all((of["norms"][0] > right) == (wrong == "all_pieces") for of in runs)


def test_a_backward_leaves_a_freed_stage_gathered_and_its_gradients_whole():
    """So freeing after forward saves no memory at the peak of a pipeline: what section 3 and the planner say."""

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
            lesson["three_dimensions"](CUBE, steps=1)
        finally:
            PipelineStage.backward_one_chunk = backward
        return seen

    for seen in launch(work, lesson(), world_size=8, backend="gloo", timeout=100):
        assert [chunk for chunk, *_ in seen] == [0, 1, 2, 3]
        assert all(gathered for _, gathered, _ in seen) and all(whole for *_, whole in seen[:3])


def test_a_checkpoint_of_three_dimensions_is_loaded_into_another_layout(tmp_path):
    """Parameters keep the names that they have in one process, so DCP finds the pieces of each."""

    def stage_of(lesson, sizes):
        mesh = lesson["mesh_of"](sizes)
        number = mesh.get_local_rank("pp")
        return lesson["split"](lesson["Stage"](SMALL, number, sizes["pp"]), mesh)

    def save(lesson, sizes, path):
        import torch.distributed.checkpoint as dcp

        stage = stage_of(lesson, sizes)
        with torch.no_grad():
            for name, p in stage.named_parameters():
                p.mul_(1 + len(name))
        dcp.save(dict(stage.named_parameters()), checkpoint_id=path)
        return lesson["weights_of"](stage)

    def load(lesson, sizes, path):
        import torch.distributed.checkpoint as dcp

        stage = stage_of(lesson, sizes)
        dcp.load(dict(stage.named_parameters()), checkpoint_id=path)
        return lesson["weights_of"](stage)

    path = str(tmp_path / "checkpoint")
    saved = {}
    for weights in launch(save, lesson(), CUBE, path, world_size=8, backend="gloo", timeout=100):
        saved |= weights
    for sizes in ({"pp": 1, "dp": 2, "tp": 1}, {"pp": 4, "dp": 1, "tp": 1}):
        seen = {}
        for weights in launch(load, lesson(), sizes, path, world_size=math.prod(sizes.values()), backend="gloo"):
            seen |= weights
        assert seen.keys() == saved.keys()
        assert all(torch.equal(seen[name], saved[name]) for name in saved)


def test_states_of_all_ranks_are_those_of_the_model_and_copies():
    runs = run("three_dimensions", CUBE, ranks=8)
    whole = one_process()["held"]
    assert whole / 10 < min(of["held"] for of in runs) and max(of["held"] for of in runs) < whole / 6
    assert whole < sum(of["held"] for of in runs) < 1.2 * whole


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ring_sends_as_many_bytes_as_the_collective(op, ranks):
    def as_ring(ring, op, size):
        entry = type("Entry", (), {"op": op, "bytes": size, "ranks": tuple(range(dist.get_world_size()))})()
        with record() as ledger:
            ring(entry)
        return ledger.sent

    size = 24 * ranks
    sent = launch(as_ring, lesson()["ring"], op, size, world_size=ranks, backend="gloo")
    assert sent == [bytes_sent(op, ranks, size)] * ranks


def test_bytes_between_nodes_and_their_emulated_time():
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

    ledgers = launch(work, world_size=4, backend="gloo")
    assert lesson()["crossing"](ledgers) == 2 * 4000 + 100
    assert lesson()["crossing"](ledgers, per_node=4) == 0
    topology = two_level(2, 2, (0.0, 1e-9), (0.0, 1e-6))
    seconds = run("replayed", ledgers, topology, ranks=4)
    assert max(seconds) == pytest.approx(800e-9 + 4000e-6)


def test_layouts_are_weighed_and_what_cannot_run_is_left_out(capsys):
    model, machine = PUBLISHED["Llama 3 8B"], planner.cluster("DGX H100", 8)
    layouts = {"fits": planner.Layout(dp=8, zero=3), "does not": planner.Layout(dp=8, zero=0)}
    found = lesson()["weigh"](model, machine, 64, layouts)
    assert found == {"fits": planner.plan(model, machine, layouts["fits"], 64).seconds}
    assert "cannot run: the fullest GPU needs" in capsys.readouterr().out
