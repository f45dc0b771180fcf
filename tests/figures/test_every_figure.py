"""What holds of every figure: all of it can be seen and read, and it is described in words."""

from functools import partial
from inspect import isfunction
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from figures import BEFORE, drawings, readable_throughout

from course_utils.costs import bootstrap_alpha_beta, flat_cluster
from course_utils.memory import Memory
from course_utils.recorded import A100_ALL_REDUCE, ULTRASCALE_DP
from course_utils.topology import reference
from course_utils.transformer import PUBLISHED
from lessons.collectives.collective_algorithms import Message
from lessons.parallelism_3d.planner import cluster, published_runs, replay, search
from lessons.pipeline_parallel.pipeline import gpipe, interleaved, one_f_one_b, simulate, zero_bubble_h1
from lessons.serving.engine import Blocks, Request

draw = SimpleNamespace(**drawings())
SIZES = [2**k for k in range(10, 22, 2)]
SECONDS = [1e-4 * (1 + 0.1 * (-1) ** i) + 1e-9 * size for i, size in enumerate(SIZES)]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
PARTS = [f"a long name of a part of a step {i}" for i in range(3)]
GPUS = {"T4, P100": 16e9, "V100": 32e9, "A100, H100": 80e9, "H200": 141e9, "B200": 180e9, "GB200": 186e9}
RUNGS = {f"a link of kind {i}": 10.0**i for i in range(6, 13)}
CLUSTERS = [flat_cluster(2**k, 1e-5, 2e-11) for k in range(1, 13)]
MACHINE = reference("dgx h100")
ONE = simulate(one_f_one_b(4, 8))
STEP = {"backward": (0, 0.01), "messages": [(0.0, 0.01), (0.005, 0.02)], "end": 0.02}
STATE = (BEFORE, [[[r]] * 3 for r in range(3)])
BLOCKS = [("block 0", 0.0, 1.0), ("block 1", 1.0, 2.0)]
BETON = [
    ("header", 0, 24), ("fields", 24, 2082), ("metadata", 2106, 576),
    *(("image", 2**21 + 2**17 * i, 2**17 - 5) for i in range(24)), ("allocation table", 2**23, 576),
]
FOUND = search(PUBLISHED["Llama 3 8B"], cluster("DGX H100", gpus=8), 64, zero=(1, 3), recompute=("none", "full"), cp=1)
MESHES = {"tp": 1}, {"tp": 8, "dp": 8, "pp": 4}, {"dp": 8, "pp": 16, "cp": 16, "tp": 8}

#: Figures that are hard to lay out, by name of the function.
FIGURES = [
    partial(draw.activation_steps, [simulate(gpipe(4, 8)), ONE], "modelled"),
    partial(draw.bandwidth, SIZES, dict.fromkeys(OPS, [1e-3] * 6), 4, fit=(1e-4, 1e-9)),
    partial(draw.batch_curves, lambda batch: (1e-4 * batch, 3e-3), {"sheet": (1, 1), "reached": (0.8, 0.5)}, {8: 99}),
    partial(draw.before_after, BEFORE, [[111, 222, 333], [37.0], None], "a collective"),
    partial(draw.before_after, [[123456, 0.123456]] * 8, [[1.0] * 8] * 8, "many ranks"),
    partial(draw.block_picture, Blocks(12, 4), [Request("a", range(120, 128), 2, table=[0, 3], done=8)], "blocks"),
    partial(draw.bubble_curves, [4, 8, 512], {"GPipe, 1F1B": [0.4, 0.2, 0.01]}, "modelled"),
    partial(draw.bucket_choice, SIZES, dict.fromkeys(PARTS, range(1, 7)), default=2**18),
    partial(draw.bucket_picture, {"ours": [[("norm", 100), ("up", 80)], [("in", 9)]]}, "here"),
    partial(draw.bucket_sweep, [1, 4, 28], [4e-2] * 3, [0, 0.5, 1]),
    partial(draw.channels, {"one": [range(8)], "two": [range(8), range(7, -1, -1)]}, per_node=4),
    partial(draw.checkpointing, [1, 2], {"all": [1e6, 2e6], "half": [1e6, 2e6]}, {"all": [1, 2]}),
    partial(draw.crossover, {"a": CLUSTERS[2], "b": CLUSTERS[9]}, ["ring", "tree", "root"], SIZES),
    partial(draw.cut_picture, 96, 384, 96, 6, "six"),
    partial(draw.errors_by_family, replay(published_runs(role=("known", "held_out"))), "m"),
    partial(draw.file_layout, BETON, "measured: a file"),
    partial(draw.generations, ["P100\n2016", "B200\n2024"], {"FLOP/s": [1, 106], "B/s": [1, 105]}, ""),
    partial(draw.gpu_timelines, {job: {"compute": [(0, 0.1)], "messages": [(0.05, 0.1)]} for job in OPS}, "recorded"),
    partial(draw.gradient_range, {"loss": np.geomspace(1e-9, 1, 99)}, {"fp16": (-24, 16)}),
    partial(draw.ladder, RUNGS, "recorded: links", dict.fromkeys(RUNGS, "kind")),
    partial(draw.latency_fit, SIZES, SECONDS, bootstrap_alpha_beta(SIZES, SECONDS, 50), ([3e3], [4e-4]), title="t"),
    partial(draw.layout_bars, {f"plan {i}": plan for i, plan in enumerate(FOUND.best)}, "modelled: a step"),
    partial(draw.load_over_steps, {"nothing": [3.0, 2.9], "bias": [3, 1], "aux": [3, 1]}, "t"),
    partial(draw.loader_bars, {"DataLoader": 1e3, "FFCV raw": 4210.0}, "recorded", "DataLoader"),
    partial(draw.loss_curves, {"whole": (range(30), range(30)), "resumed": ([16, 30], [2, 1])}, "t", wide=["whole"]),
    partial(draw.mask_picture, {order: [[2 * r, 2 * r + 1] for r in range(6)] for order in PARTS}, "t"),

    partial(draw.memory_bars, {"a name of a row that needs two lines": Memory(120e9), "b": Memory(1)}, "t", GPUS),

    partial(draw.memory_bars, {str(i): Memory(1e12) for i in range(14)}, "modelled: extremes", {"T4": 16e9}),
    partial(draw.memory_over_length, [64, 4096], {}, {"keep all": [1, 1e9], "checkpoint": [1, 0.9e9]}, "t"),
    partial(draw.memory_over_time, [(f"after operation {i}", Memory(i, i * i)) for i in range(30)], "measured: a step"),
    partial(draw.mesh_grid, {"pp": 4, "dp": 8, "tp": 8}, "modelled: a mesh", per_node=8, rank=77, names_only=True),
    *(partial(draw.mesh_grid, sizes, "modelled: ranks and their groups", rank=0, per_node=1) for sizes in MESHES),
    partial(draw.mesh_picture, [list(range(8))] * 3, ("a", "b"), "t", {r: 100 + r for r in range(8)}),
    partial(draw.model_against_emulation, SIZES, dict.fromkeys(("ring", "tree", "root"), SIZES), lambda _, size: size),
    partial(draw.page_accesses, {"a": [(i, i // 2) for i in range(6)], "b": [(0, 2)]}, "measured", notes={"b": "0 %"}),
    partial(draw.partition_picture, {f"a long name of stage {i}": [Memory(1e6, 2e6, 3e6)] * 8 for i in range(5)}, "t"),
    partial(draw.predicted_against_recorded, A100_ALL_REDUCE, {"published": A100_ALL_REDUCE.seconds},
            ["ring / LL"] * 9 + ["ring / Simple"] * 99),
    partial(draw.real_pipeline, ONE, [[(op, a / 1000, b / 1000) for op, a, b in rank] for rank in ONE.spans], "t"),
    partial(draw.replicas, {"loss": [1.0, 2.0], "weights": [[1, -1], [1, -1]], "text": ["a", "b"]}, "t"),
    partial(draw.roofline, 1e12, 1e11, {"add": (0.1, 9e9), "matmul": (200, 9e11)}, "measured"),
    partial(draw.scale_out, CLUSTERS, ["root", "ring", "tree", "double_tree"], (2**12, 2**28)),
    partial(draw.scaling_curves, [1, 2, 4], dict.fromkeys(PARTS, [1, 2, 2]), "measured", limit=2),
    partial(draw.scaling_models, ULTRASCALE_DP, {"line": ULTRASCALE_DP.tokens_per_gpu}, fitted=2),
    partial(draw.schedule_picture, [ONE, simulate(zero_bubble_h1(4, 8)), simulate(interleaved(4, 8, 3))], "three"),
    partial(draw.schedule_picture, simulate(one_f_one_b(64, 128)), "modelled"),
    partial(draw.search_picture, FOUND.plans, "modelled", limit=80e9, marked={"x": FOUND.plans[30].layout}, best=6,
            slowest=3),
    partial(draw.sent, {"DDP": 2.0, "ZeRO-3, a long name of a way": 2.94}),
    partial(draw.shard_timeline, {"all-gather": BLOCKS, "compute": BLOCKS}, [(0, 1e12), (2, 0)], "measured: a step"),
    partial(draw.speedup_laws, {"A": lambda n, s: 1 / (s + (1 - s) / n)}, (0.001, 0.05), 1000),
    partial(draw.step_picture, [STATE] * 2, [Message(0, 1, (2,), (2,), True)], ("before", "after")),
    partial(draw.step_spans, {"a": [(name, i, i + 1) for i, name in enumerate(PARTS)]}, "measured"),
    partial(draw.step_split, {"a": {"data": 1.0, "compute": 2.0, "wait": 1e-4, "mine": 1}}, "measured"),
    partial(draw.step_timelines, {"calm": [STEP] * 4, "busy": [STEP] * 4}, "measured: steps"),
    partial(draw.switch_adds, 8, piece=7),
    partial(draw.time_shares, {"one": {"decode": 3e-3, "copy": 1e-3}, "two": {"wait": 1}}, "measured"),
    partial(draw.timeline, {"rank 0": [("compute", 0.0, 0.1), ("wait", 0.1, 0.1001)]}, "measured"),
    partial(draw.topology_picture, MACHINE, MACHINE.path(0, 1)),
    partial(draw.topology_picture, reference("gb200 nvl72")),
    partial(draw.who_holds_what, {"before": [], "in forward": ["root"]}, ["root", *PARTS], 8, "modelled: eight ranks"),
]


def test_all_figures_are_looked_at():
    assert {name for name, value in vars(draw).items() if isfunction(value)} == {make.func.__name__ for make in FIGURES}


@pytest.mark.parametrize("make", FIGURES, ids=lambda make: make.func.__name__)
def test_a_figure_can_be_seen_read_and_heard(make):
    figure = make()
    assert plt.get_fignums() == [], "it would be shown twice"
    readable_throughout(figure)
