"""What holds of every figure: all of it can be seen and read, and it is described in words."""

from functools import cache
from inspect import isfunction
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from figures import BEFORE, drawings, readable_throughout

from course_utils import recorded
from course_utils.costs import bootstrap_alpha_beta, flat_cluster
from course_utils.memory import Memory
from course_utils.topology import reference
from course_utils.transformer import PUBLISHED
from lessons.collectives.collective_algorithms import Message
from lessons.parallelism_3d.planner import cluster, published_runs, replay, search
from lessons.pipeline_parallel.pipeline import gpipe, interleaved, one_f_one_b, simulate, zero_bubble_h1

plots = SimpleNamespace(**drawings())
SIZES = [2**k for k in range(10, 22, 2)]
GPUS = {"T4, P100": 16e9, "V100": 32e9, "A100, H100": 80e9, "H200": 141e9, "B200": 180e9, "GB200": 186e9}
STEP = {"backward": (0, 0.01), "messages": [(0.0, 0.01), (0.005, 0.02)], "end": 0.02}
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@cache
def found():
    machine = cluster("DGX H100", gpus=8)
    return search(PUBLISHED["Llama 3 8B"], machine, 64, zero=(1, 3), recompute=("none", "full"), cp=1)


def fit():
    seconds = [1e-4 * (1 + 0.1 * (-1) ** i) + 1e-9 * size for i, size in enumerate(SIZES)]
    return SIZES, seconds, bootstrap_alpha_beta(SIZES, seconds, 50), ([3e3, 3e5], [1.1e-4, 4e-4])


def real(run):
    return [[(op, a / 1000, b / 1000) for op, a, b in spans] for spans in run.spans]


ONE = simulate(one_f_one_b(4, 8))
STATE = (BEFORE, [[[r]] * 3 for r in range(3)])
CLUSTERS = [flat_cluster(2**k, 1e-5, 2e-11) for k in range(1, 13)]
MACHINE = reference("dgx h100")
MESHES = (
    {"tp": 1}, {"dp": 8}, {"pp": 2, "dp": 2, "tp": 2}, {"tp": 8, "dp": 8, "pp": 4}, {"replicate": 3, "shard": 5},
    {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
)
MIB = 2**20
BETON = [
    ("header", 0, 24), ("field descriptors", 24, 2082), ("data table", 2106, 64_000),
    *(("heap page", 8 * MIB * (i + 1), 8 * MIB) for i in range(47)), ("allocation table", 48 * 8 * MIB, 48_000),
]
LANES = {
    "all-gather": [("block 0", 0.0, 1.0), ("block 1", 1.0, 2.0)],
    "compute": [("block 0", 1.0, 2.0), ("block 1", 2.0, 3.0)],
}
RUNGS = {f"a link of kind {i}": 10.0**i for i in range(6, 13)}
PARTS = [f"a long name of a part of a step {i}" for i in range(3)]

#: By function, figures that are hard to lay out.
FIGURES = {
    "activation_steps": [lambda: plots.activation_steps([simulate(gpipe(4, 8)), ONE], "modelled")],
    "bandwidth": [lambda: plots.bandwidth(SIZES, dict.fromkeys(OPS, [1e-3] * 6), 4, fit=(1e-4, 1e-9))],
    "before_after": [
        lambda: plots.before_after(BEFORE, [[111, 222, 333], [37.0], None], "a collective"),
        lambda: plots.before_after([[123456, 0.123456]] * 8, [[1.0] * 8] * 8, "many ranks"),
    ],
    "bubble_curves": [lambda: plots.bubble_curves([4, 8, 512], {"GPipe, 1F1B": [0.4, 0.2, 0.01]}, "modelled")],
    "bucket_choice": [lambda: plots.bucket_choice(SIZES, dict.fromkeys(PARTS, range(1, 7)), default=2**18)],
    "bucket_picture": [lambda: plots.bucket_picture({"ours": [[("norm", 100), ("up", 80)], [("in", 9)]]}, "here")],
    "bucket_sweep": [lambda: plots.bucket_sweep([1, 4, 28], [4e-2] * 3, [0, 0.5, 1])],
    "checkpointing": [lambda: plots.checkpointing([1, 2], {"all": [1e6, 2e6], "half": [1e6, 2e6]}, {"all": [1, 2]})],
    "crossover": [lambda: plots.crossover({"a": CLUSTERS[2], "b": CLUSTERS[9]}, ["ring", "tree", "root"], SIZES)],
    "cut_picture": [lambda: plots.cut_picture(96, 384, 96, 6, "six"), lambda: plots.cut_picture(4, 4, 4, 1, "one")],
    "errors_by_family": [lambda: plots.errors_by_family(replay(published_runs(role=("known", "held_out"))), "m")],
    "file_layout": [
        lambda: plots.file_layout(BETON, "measured: a file"), lambda: plots.file_layout(BETON[:3], "its start"),
        lambda: plots.file_layout([("all", 0, 1)], "one"), lambda: plots.file_layout([("a", 10**12, 10**12)], "2 TB"),
        lambda: plots.file_layout([("first", 0, 1), *((f"a name {i}", 100_000 * i, 99_000 if i % 2 else 1)
                                                      for i in range(1, 6)), ("the last", 600_000, 1)], "small parts"),
    ],
    "generations": [lambda: plots.generations(["P100\n2016", "B200\n2024"], {"FLOP/s": [1, 106], "B/s": [1, 105]}, "")],
    "gpu_timelines": [lambda: plots.gpu_timelines(
        {job: {"compute": [(0, 0.1)], "all-reduces": [(0.05, 0.1)]} for job in ("after backward", "DDP")}, "recorded")],
    "gradient_range": [lambda: plots.gradient_range({"loss": np.geomspace(1e-9, 1, 99)}, {"fp16": (-24, 16)})],
    "ladder": [lambda: plots.ladder(RUNGS, "recorded: links", dict.fromkeys(RUNGS, "kind"))],
    "latency_fit": [lambda: plots.latency_fit(*fit(), title="measured: pairs")],
    "layout_bars": [
        lambda: plots.layout_bars({f"plan {i}": plan for i, plan in enumerate(found().best)}, "modelled: a step")],
    "load_over_steps": [lambda: plots.load_over_steps({"nothing": [3.0, 2.9], "bias": [3, 1], "aux": [3, 1]}, "t")],
    "loader_bars": [lambda: plots.loader_bars({"DataLoader": 1e3, "FFCV raw": 4210.0}, "recorded", "DataLoader")],
    "loss_curves": [lambda: plots.loss_curves(
        {"whole": (range(1, 31), [4 - i / 10 for i in range(30)]), "resumed": ([16, 30], [2.5, 1.1])},
        "measured: loss", wide=["whole"])],
    "mask_picture": [
        lambda: plots.mask_picture(
            {order: [[2 * r, 2 * r + 1] for r in range(6)] for order in ("contiguous", "zig-zag", "striped")}, "t"),
        lambda: plots.mask_picture({"one": [range(r, 40, 20) for r in range(20)]}, "many tokens, without numbers"),
    ],
    "memory_bars": [
        lambda: plots.memory_bars({"a name of a row that needs two lines": Memory(120e9), "b": Memory(1)}, "t", GPUS),
        *(lambda rows=rows: plots.memory_bars(rows, "modelled: extremes", {"T4": 16e9}) for rows in (
            {"nothing": Memory()}, {"tiny": Memory(3)}, {str(i): Memory(1e12) for i in range(14)})),
    ],
    "memory_over_length": [
        lambda: plots.memory_over_length([64, 4096], {}, {"keep all": [1, 1e9], "checkpoint": [1, 0.9e9]}, "t")],
    "memory_over_time": [lambda: plots.memory_over_time(
        [(f"after operation {i}", Memory(i, i * i)) for i in range(30)], "measured: a step")],
    "mesh_grid": [
        lambda: plots.mesh_grid({"pp": 4, "dp": 8, "tp": 8}, "modelled: a mesh", per_node=8, rank=77, names_only=True),
        lambda: plots.mesh_grid({"dp": 8, "pp": 16, "cp": 16, "tp": 8}, "modelled", per_node=8, rank=9000),
        *(lambda sizes=sizes: plots.mesh_grid(sizes, "modelled: ranks and their groups", rank=0, per_node=1)
          for sizes in MESHES),
    ],
    "mesh_picture": [lambda: plots.mesh_picture([list(range(8))] * 3, ("a", "b"), "t", {r: 100 + r for r in range(8)})],
    "model_against_emulation": [lambda: plots.model_against_emulation(
        SIZES, dict.fromkeys(("ring", "tree", "root"), SIZES), lambda name, size: 1.1 * size)],
    "page_accesses": [lambda: plots.page_accesses(
        {"sequential": [(i, i // 2) for i in range(6)], "random": [(0, 2)]}, "measured", notes={"random": "0 %"})],
    "partition_picture": [lambda: plots.partition_picture(
        {f"a long name of stage {i}": [Memory(1e6, 2e6, 3e6)] * 8 for i in range(5)}, "t")],
    "predicted_against_recorded": [lambda: plots.predicted_against_recorded(
        recorded.A100_ALL_REDUCE, {"published": recorded.A100_ALL_REDUCE.seconds},
        ["ring / LL"] * 9 + ["ring / Simple"] * 99)],
    "real_pipeline": [lambda: plots.real_pipeline(ONE, real(ONE), "four ranks")],
    "replicas": [lambda: plots.replicas({"loss": [1.0, 2.0], "weights": [[1, -1], [1, -1]], "text": ["a", "b"]}, "t")],
    "roofline": [lambda: plots.roofline(1e12, 1e11, {"add": (0.1, 9e9), "matmul": (200, 9e11)}, "measured")],
    "scale_out": [lambda: plots.scale_out(CLUSTERS, ["root", "ring", "tree", "double_tree"], (2**12, 2**28))],
    "scaling_curves": [lambda: plots.scaling_curves([1, 2, 4], dict.fromkeys(PARTS, [1, 2, 2]), "measured", limit=2)],
    "scaling_models": [lambda: plots.scaling_models(
        recorded.ULTRASCALE_DP, {"line": recorded.ULTRASCALE_DP.tokens_per_gpu}, fitted=2)],
    "schedule_picture": [
        lambda: plots.schedule_picture([ONE, simulate(zero_bubble_h1(4, 8)), simulate(interleaved(4, 8, 3))], "three"),
        lambda: plots.schedule_picture(simulate(one_f_one_b(64, 128)), "modelled"),
    ],
    "search_picture": [lambda: plots.search_picture(
        found().plans, "modelled", limit=80e9, marked={"x": found().plans[30].layout}, best=6, slowest=3)],
    "shard_timeline": [lambda: plots.shard_timeline(LANES, [(0, 1e12), (2, 0)], "measured: a step")],
    "speedup_laws": [lambda: plots.speedup_laws({"A": lambda n, s: 1 / (s + (1 - s) / n)}, (0.001, 0.05), 1000)],
    "step_picture": [lambda: plots.step_picture([STATE] * 2, [Message(0, 1, (2,), (2,), True)], ("before", "after"))],
    "step_spans": [lambda: plots.step_spans({"a": [(name, i, i + 1) for i, name in enumerate(PARTS)]}, "measured")],
    "step_split": [lambda: plots.step_split({"a": {"data": 1.0, "compute": 2.0, "wait": 1e-4, "mine": 1}}, "measured")],
    "step_timelines": [lambda: plots.step_timelines({"calm": [STEP] * 4, "busy": [STEP] * 4}, "measured: steps")],
    "time_shares": [lambda: plots.time_shares({"one": {"decode": 3e-3, "copy": 1e-3}, "two": {"wait": 1}}, "measured")],
    "timeline": [lambda: plots.timeline({"rank 0": [("compute", 0.0, 0.1), ("wait", 0.1, 0.1001)]}, "measured")],
    "topology_picture": [lambda: plots.topology_picture(MACHINE, MACHINE.path(0, 1)),
                         lambda: plots.topology_picture(reference("gb200 nvl72"))],
}


CASES = [pytest.param(make, id=f"{name}-{i}") for name, makes in FIGURES.items() for i, make in enumerate(makes)]


def test_all_figures_are_looked_at():
    assert {name for name, value in vars(plots).items() if isfunction(value)} == FIGURES.keys()


@pytest.mark.parametrize("make", CASES)
def test_a_figure_can_be_seen_read_and_heard(make):
    figure = make()
    assert plt.get_fignums() == [], "it would be shown twice"
    readable_throughout(figure)
