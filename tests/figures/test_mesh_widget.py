"""The mesh explorer: groups are torch's, bytes are the planner's, what cannot be is refused with the reason."""

import re

import pytest
import torch.distributed as dist
from figures import Opened
from torch.distributed.device_mesh import init_device_mesh

from course_utils import launch
from course_utils.transformer import PUBLISHED
from course_utils.units import decimal_bytes
from lessons.parallelism_3d import planner
from lessons.parallelism_3d.explorer import groups_of, mesh_explorer

SIZES = {"pp": 4, "dp": 8, "tp": 8}


class Explorer(Opened):
    def __init__(self):
        super().__init__(mesh_explorer())

    @property
    def table(self):
        """The cells of each dimension, by its name."""
        rows = re.findall("<tr>(.*?)</tr>", self.status.value)
        cells = [[re.sub("<[^>]*>", "", cell) for cell in re.findall("<td[^>]*>(.*?)</td>", row)] for row in rows]
        return {row[0].split()[-1]: row[1:] for row in cells if row}

    def become(self, tp, pp, dp, cp=1):
        for control, value in ((self.tp, tp), (self.pp, pp), (self.dp, dp), (self.cp, cp)):
            control.value = value


@pytest.fixture
def explorer():
    return Explorer()


def test_it_opens_on_256_gpus_and_says_where_each_group_talks(explorer):
    table = explorer.table
    assert list(table) == ["pp", "dp", "cp", "tp"]
    assert table["tp"][:3] == ["72 to 79", "in one node", "NVLink, 450 GB/s"]
    assert table["dp"][:3] == ["69, 77, 85, …, 125", "on 8 nodes", "network, 50 GB/s"]
    assert table["pp"][:3] == ["13, 77, 141, 205", "on 4 nodes", "network, 50 GB/s"]
    assert table["cp"][0] == "77 alone"
    assert explorer.shown[1].startswith(b"\x89PNG")


def test_bytes_are_those_of_the_planner(explorer):
    explorer.model.value, explorer.batch.value, explorer.microbatch.value = "Llama 3 8B", 256, 2
    layout = planner.Layout(tp=8, pp=4, dp=8, microbatch=2, recompute="none")
    sent = planner.traffic(PUBLISHED["Llama 3 8B"], layout, 256)
    assert {name: row[4] for name, row in explorer.table.items() if row[4]} == {
        name: decimal_bytes(sent[name]) for name in ("pp", "dp", "tp")
    }


def test_with_the_order_turned_round_tensor_parallelism_leaves_the_node(explorer):
    inside = explorer.table["tp"]
    explorer.order.value = ("tp", "dp", "pp", "cp")
    outside = explorer.table["tp"]
    assert outside[1] == "on 8 nodes" and outside[4] == inside[4], "the same bytes over another link"
    assert outside[2] == "network, 50 GB/s" and inside[2] == "NVLink, 450 GB/s"
    assert explorer.table["dp"][1] == "on 4 nodes, 2 on each"


def test_every_control_changes_what_is_shown(explorer):
    seen = {explorer.shown}
    for control, value in (
        (explorer.rank, 5), (explorer.model, "GPT-3 175B"), (explorer.machine, "DGX A100"), (explorer.batch, 256),
        (explorer.microbatch, 2), (explorer.recompute, "full"), (explorer.per_node, 4),
        (explorer.order, ("dp", "pp", "cp", "tp")), (explorer.tp, 4), (explorer.cp, 2), (explorer.pp, 2),
        (explorer.dp, 4),
    ):
        control.value = value
        assert explorer.shown not in seen, control.description
        seen.add(explorer.shown)


@pytest.mark.parametrize(("control", "value", "message"), [
    ("tp", 0, "tp must be at least 1, got 0"), ("dp", -2, "dp must be at least 1, got -2"),
    ("per_node", 0, "GPUs in a node must be at least 1, got 0"),
    ("per_node", 7, "pp 4 x dp 8 x cp 1 x tp 8 makes 256 ranks, which do not fill nodes of 7"),
    ("dp", 10**6, "makes 32,000,000 ranks; the explorer takes up to 65,536"),
])
def test_impossible_meshes_are_refused_and_the_picture_comes_back(explorer, control, value, message):
    before = explorer.shown
    field = getattr(explorer, control)
    good, field.value = field.value, value
    assert message in explorer.status.value and explorer.refuses
    assert explorer.shown[1] != before[1]
    field.value = good
    assert explorer.shown == before


@pytest.mark.parametrize(("control", "value", "message"), [
    ("pp", 3, "layers do not divide"), ("microbatch", 3, "512 sequences do not divide into DP 8 x micro-batches of 3"),
    ("batch", 0, "batch"), ("microbatch", 0, "micro-batch"), ("tp", 16, "8 key-value heads"),
    ("model", "Llama 3 405B", "the fullest GPU needs"),
])
def test_what_the_model_cannot_do_is_told_with_the_planners_reasons(explorer, control, value, message):
    getattr(explorer, control).value = value
    assert "cannot run so: " in explorer.status.value and message in explorer.status.value
    assert {len(row) for row in explorer.table.values()} == {4}, "groups without bytes"


def test_the_rank_stays_in_the_mesh(explorer):
    explorer.rank.value = 255
    explorer.become(tp=2, pp=2, dp=2)
    assert (explorer.rank.max, explorer.rank.value) == (7, 7)
    assert explorer.table["pp"][0] == "3, 7"
    explorer.become(tp=1, pp=1, dp=1)
    assert explorer.rank.value == 0 and {row[0] for row in explorer.table.values()} == {"0 alone"}


def test_groups_know_their_nodes():
    pp, dp, tp = groups_of(77, SIZES, 8)
    assert (tp.ranks, tp.nodes, tp.inside) == (tuple(range(72, 80)), 1, True)
    assert (dp.ranks, dp.nodes, dp.inside) == (tuple(range(69, 126, 8)), 8, False)
    assert (pp.ranks, pp.nodes) == ((13, 77, 141, 205), 4)


@pytest.mark.guard(120)
@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2, "tp": 2}, {"tp": 2, "dp": 4}])
def test_groups_are_those_of_torch_on_real_ranks(sizes):
    def run():
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return {name: tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in sizes}

    for rank, expected in enumerate(launch(run, world_size=8)):
        assert {group.dimension: group.ranks for group in groups_of(rank, sizes, 4)} == expected


def test_answers_that_lesson_12_gives():
    explorer = Explorer()
    assert explorer.table["tp"][-1] == "2.67 s"
    explorer.order.value = ("pp", "cp", "tp", "dp")
    assert explorer.table["tp"][-1] == "24.1 s"
    explorer = Explorer()
    for sequences, tensor in ((32, "167 ms"), (24, "125 ms"), (16, "83.5 ms")):
        explorer.batch.value = sequences
        assert (explorer.table["dp"][-1], explorer.table["tp"][-1]) == ("150 ms", tensor)
    explorer.batch.value = 28  # what lies between is no batch
    assert "cannot run so" in explorer.status.value
