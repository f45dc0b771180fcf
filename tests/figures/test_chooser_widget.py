"""The algorithm chooser and the figures of time by model: what is drawn is what the model says."""

import pytest
from figures import Opened, texts

from course_utils.costs import ALL_REDUCE_ALGORITHMS, TwoLevelCluster, all_reduce_seconds, flat_cluster
from course_utils.recorded import A100_ALL_REDUCE
from lessons.nccl import nccl_tuner
from lessons.nccl.explorer import algorithm_chooser
from lessons.nccl.figures import (
    ALGORITHM_COLORS,
    crossings,
    crossover,
    model_against_emulation,
    predicted_against_recorded,
    scale_out,
)

NEAR, FAR = (3.4e-6, 1 / 450e9), (14e-6, 1 / 50e9)
TWO_NODES = TwoLevelCluster(2, 4, NEAR, FAR)


def test_every_algorithm_has_a_colour_of_its_own():
    assert set(ALL_REDUCE_ALGORITHMS) <= set(ALGORITHM_COLORS)
    assert len({ALGORITHM_COLORS[name] for name in ALL_REDUCE_ALGORITHMS}) == len(ALL_REDUCE_ALGORITHMS)


def test_crossings_are_found_exactly():
    assert crossings(lambda s: 3.0, lambda s: s / 1000, 1, 1e6) == [pytest.approx(3000)]
    assert crossings(lambda s: s, lambda s: s, 1, 1e6) == []


def test_crossover_marks_where_another_algorithm_wins():
    figure = crossover({"a": TWO_NODES, "b": flat_cluster(8, *NEAR)}, ["ring", "tree", "hierarchical"])
    left, right = figure.axes
    (dot,) = [line for line in left.lines if line.get_marker() == "o"]
    size, height = dot.get_xdata()[0], dot.get_ydata()[0]
    for name in ("tree", "hierarchical"):
        assert height == pytest.approx(all_reduce_seconds(name, size, TWO_NODES) * 1e6)
    assert {"ring", "tree", "hierarchical"} <= set(texts(left))
    assert all("modelled" in ax.get_title(loc="left") for ax in (left, right))
    assert left.get_ylim() == right.get_ylim()


def test_crossover_marks_the_pairs_it_is_asked_for():
    (ax,) = crossover(TWO_NODES, ["ring", "tree", "hierarchical"], pairs=[("ring", "tree")]).axes
    (dot,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert 2**20 < dot.get_xdata()[0] < 2**21


def test_scale_out_has_one_panel_for_each_size():
    figure = scale_out([flat_cluster(2**k, *FAR) for k in range(1, 13)], ["root", "ring", "tree"], sizes=(4096, 2**28))
    small, large = figure.axes
    assert small.lines[0].get_xdata()[-1] == 4096
    assert "4 KiB" in small.get_title(loc="left")
    last = {line.get_color(): line.get_ydata()[-1] for line in large.lines}
    assert last[ALGORITHM_COLORS["root"]] > 100 * last[ALGORITHM_COLORS["ring"]]


def test_emulation_figure_states_the_greatest_difference():
    sizes = [2**12, 2**20]

    def model(name, size):
        return all_reduce_seconds(name, size, TWO_NODES)

    emulated = {"ring": [model("ring", s) for s in sizes], "tree": [1.03 * model("tree", s) for s in sizes]}
    (ax,) = model_against_emulation(sizes, emulated, model).axes
    title = ax.get_title(loc="left")
    assert "emulated" in title and "modelled" in title and "3.0%" in title


def test_recorded_figure_shows_time_bandwidth_and_error():
    machine = nccl_tuner.MACHINES["8 x A100"]
    predicted = {"published": [nccl_tuner.estimate(s, machine) for s in A100_ALL_REDUCE.sizes]}
    choices = [" / ".join(nccl_tuner.choose(s, machine)) for s in A100_ALL_REDUCE.sizes]
    time, rate, error = predicted_against_recorded(A100_ALL_REDUCE, predicted, choices).axes
    assert "recorded" in time.get_title(loc="left")
    assert texts(time) == ["ring / LL", "ring / LL128", "ring / Simple"]
    assert rate.lines[-1].get_ydata()[-1] == pytest.approx(234.89, rel=1e-4)
    assert texts(error) == ["published: median 24.7 %"]


@pytest.fixture
def chooser():
    return Opened(algorithm_chooser())


def test_a_stored_notebook_shows_a_picture(chooser):
    assert bytes(chooser.picture.value).startswith(b"\x89PNG")
    assert "is fastest" in chooser.status.value


def test_every_control_changes_the_picture(chooser):
    seen = {bytes(chooser.picture.value)}
    for control, value in (
        (chooser.size, 4096), (chooser.nodes, 64), (chooser.gpus, 8), (chooser.near, "pcie4"),
        (chooser.far, "eth_25g"), (chooser.adds, True),
    ):
        control.value = value
        seen.add(bytes(chooser.picture.value))
    assert len(seen) == 7


def test_winner_is_the_shortest_time(chooser):
    chooser.size.value = 2**28
    assert "halving/doubling is fastest" in chooser.status.value
    chooser.adds.value, chooser.size.value = True, 256
    assert "in network is fastest" in chooser.status.value


def test_one_node_has_no_network_and_one_rank_nothing_to_do(chooser):
    chooser.nodes.value = 1
    assert chooser.far.disabled
    picture = bytes(chooser.picture.value)
    chooser.gpus.value = 1
    assert "nothing to reduce" in chooser.status.value and chooser.refuses
    assert bytes(chooser.picture.value) != picture
    chooser.gpus.value = 4
    assert bytes(chooser.picture.value) == picture
