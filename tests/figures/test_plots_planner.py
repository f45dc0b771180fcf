"""Figures of meshes and layouts: what is drawn is what was given, and figures say what they show."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from figures import apart, rows, texts
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.colors import to_rgb

from course_utils import planner, plots, recorded
from course_utils.planner import Layout
from course_utils.plots.mesh import short_ranks
from course_utils.transformer import PUBLISHED

SIZES = {"pp": 4, "dp": 8, "tp": 8}


def coloured(ax):
    """Ranks by the colour of their cells' edges; those without a colour are left out."""
    numbers = {text.get_position(): text.get_text() for text in ax.texts if text.get_text().isdigit()}
    found = {}
    for cells in (c for c in ax.collections if isinstance(c, PatchCollection)):
        edges = cells.get_edgecolors()
        for path, edge in zip(cells.get_paths(), edges, strict=True):
            box = path.get_extents()
            at = (round((box.x0 + box.x1) / 2, 6), round((box.y0 + box.y1) / 2, 6))
            rank = next(int(text) for (x, y), text in numbers.items() if (round(x, 6), round(y, 6)) == at)
            found.setdefault(tuple(np.round(edge[:3], 6)), []).append(rank)
    return found


def of(color):
    return tuple(np.round(to_rgb(color), 6))


def test_parts_of_time_and_dimensions_have_one_colour_each():
    assert tuple(plots.TIME_COLORS) == planner.PARTS
    assert len(set(plots.TIME_COLORS.values())) == len(planner.PARTS)
    same = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data"}
    assert {name: plots.TIME_COLORS[part] for name, part in same.items()} == plots.DIMENSION_COLORS


class TestMesh:
    @pytest.mark.parametrize("rank", [0, 77, 255])
    def test_groups_of_a_rank_have_the_colours_of_their_dimensions(self, rank):
        (ax,) = plots.mesh_grid(SIZES, "", per_node=8, rank=rank).axes
        found = coloured(ax)
        for name, groups in planner.mesh_groups(SIZES).items():
            group = next(group for group in groups if rank in group)
            assert sorted(found[of(plots.DIMENSION_COLORS[name])]) == sorted(set(group) - {rank})
        assert found[of("#222222")] == [rank]
        assert len(sum(found.values(), [])) == 256

    def test_groups_are_told_with_their_nodes(self):
        (ax,) = plots.mesh_grid(SIZES, "", per_node=8, rank=77).axes
        assert {
            "frame: a node of 8 ranks", "rank 77", "pp: ranks 13, 77, 141, 205, over 4 nodes",
            "dp: ranks 69, 77, 85, 93, 101, 109, 117, 125, over 8 nodes", "tp: ranks 72 to 79, all in one node",
        } <= set(texts(ax))
        assert {"pp 0", "pp 3", "tp →", "dp\n↓"} <= set(texts(ax))

    def test_groups_can_be_named_in_one_line(self):
        (whole,), (ax,) = (plots.mesh_grid(SIZES, "", per_node=8, rank=77, names_only=o).axes for o in (False, True))
        assert whole.figure.get_figheight() - ax.figure.get_figheight() > 0.8  # inches
        told = [text for text in ax.texts if text.get_text() in ("frame: a node of 8 ranks", "rank 77", *SIZES)]
        assert [text.get_text() for text in told] == ["frame: a node of 8 ranks", "rank 77", "pp", "dp", "tp"]
        ax.figure.draw_without_rendering()
        assert apart(told) and len({text.xyann[1] for text in told}) == 1

    def test_without_a_rank_or_nodes_there_are_only_numbers(self):
        (ax,) = plots.mesh_grid({"dp": 2, "tp": 2}, "measured: four ranks").axes
        assert texts(ax) == ["0", "1", "2", "3", "", "tp →", "dp\n↓"]
        assert len(coloured(ax)) == 1 and ax.figure.get_suptitle() == "measured: four ranks"
        assert not any(len(c.get_segments()) for c in ax.collections if isinstance(c, LineCollection))

    def test_only_chosen_dimensions_are_coloured(self):
        (ax,) = plots.mesh_grid(SIZES, "", rank=0, show=["dp"]).axes
        assert [text for text in texts(ax) if ":" in text] == ["dp: ranks 0, 8, 16, 24, 32, 40, 48, 56"]

    @pytest.mark.parametrize(("per_node", "frames"), [(1, 4 * 4), (2, 2 * 6), (4, 8)])
    def test_nodes_are_framed_where_the_neighbour_is_of_another_node(self, per_node, frames):
        (ax,) = plots.mesh_grid({"dp": 2, "tp": 2}, "", per_node=per_node).axes
        (lines,) = (c for c in ax.collections if isinstance(c, LineCollection))
        assert len(lines.get_segments()) == frames

    def test_of_a_large_mesh_the_ends_and_what_lies_beside_the_rank_are_drawn(self):
        (ax,) = plots.mesh_grid({"dp": 64, "tp": 8}, "", rank=8 * 40 + 3).axes
        shown = {int(text) for text in texts(ax) if text.isdigit()}
        assert {n // 8 for n in shown} == {0, 1, 39, 40, 41, 63} and "⋮" in texts(ax)

    def test_four_large_dimensions_fit(self):
        sizes = {"dp": 8, "pp": 16, "cp": 16, "tp": 8}
        figure = plots.mesh_grid(sizes, "modelled: 16,384 ranks", per_node=8, rank=9000)
        assert figure.get_figheight() < 9 and figure.get_figwidth() < 10.6
        assert {"9000", "16383", "dp 4, pp 6"} <= set(texts(figure.axes[0]))

    @pytest.mark.parametrize(("ranks", "words"), [
        ((4,), "4"), ((4, 5), "4, 5"), ((4, 5, 6), "4 to 6"), ((0, 2, 4), "0, 2, 4"),
        (tuple(range(0, 40, 2)), "0, 2, 4, …, 38"),
    ])
    def test_ranks_in_words(self, ranks, words):
        assert short_ranks(ranks) == words


MODEL, MACHINE = PUBLISHED["Llama 3 8B"], planner.cluster("DGX H100", gpus=8)


@pytest.fixture(scope="module")
def found():
    return planner.search(MODEL, MACHINE, 64, zero=(1, 3), recompute=("none", "full"), cp=1)


class TestLayoutBars:
    def test_seconds_are_stacked_in_order_with_rate_and_total_at_the_end(self, found):
        plan = found.plans[0]
        figure = plots.layout_bars({"best": plan, "again": replace(plan, bubble=plan.bubble + 2.0)}, "modelled: a step")
        (ax,) = figure.axes
        widths = [seconds for seconds in plan.parts().values() if seconds]
        first = [bar for bar in ax.patches if round(bar.get_y() + bar.get_height() / 2) == 0]
        assert [bar.get_width() for bar in first] == pytest.approx(widths)
        assert [bar.get_x() for bar in first] == pytest.approx([0, *np.cumsum(widths)[:-1]])
        assert f"{plan.seconds:.3g} s, {plan.tflops:.0f} TFLOP/s" in texts(ax)
        assert rows(ax) == ["best", "again"]
        assert figure.get_suptitle() == "modelled: a step"

    def test_the_rate_may_leave_out_what_is_computed_twice(self, found):
        plan = next(plan for plan in found.plans if plan.layout.recompute == "full")
        (ax,) = plots.layout_bars([plan], "", rate="model_tflops").axes
        assert f"{plan.seconds:.3g} s, {plan.model_tflops:.0f} TFLOP/s" in texts(ax)
        assert plan.model_tflops < plan.tflops

    def test_names_say_what_differs(self):
        layouts = [Layout(tp=2, pp=2, dp=2, virtual=2), Layout(tp=2, pp=2, dp=2, zero=3, sequence_parallel=False)]
        plans = [planner.plan(MODEL, MACHINE, layout, 64) for layout in layouts]
        (ax,) = plots.layout_bars(plans, "").axes
        names = [name.replace("\n", " ") for name in rows(ax)]
        assert names == ["TP 2, PP 2, DP 2, v 2, ZeRO 1, SP", "TP 2, PP 2, DP 2, ZeRO 3, no SP"]
        assert plots.layout_name(Layout(tp=8, cp=2, dp=4, microbatch=2)) == "TP 8, PP 1, DP 4, CP 2, b 2"


@dataclass
class Row:
    name: str
    predicted: float
    published: float
    fitted: bool = False

    @property
    def error(self):
        return self.predicted / self.published - 1


class TestPublished:
    ROWS = (Row("a", 150, 100, True), Row("b", 110, 100), Row("c", 190, 200), Row("d", 100, 125))

    def test_dots_stand_at_the_predicted_and_lines_at_the_published_value(self):
        left, right = plots.predicted_against_published(self.ROWS, "modelled and recorded").axes
        dots = [line for line in left.lines if line.get_marker() == "o"]
        assert [line.get_xdata()[0] for line in dots] == [150, 110, 190, 100]
        assert [line.get_markerfacecolor() == "white" for line in dots] == [True, False, False, False]
        bars = [line.get_xdata()[0] for line in left.lines if line.get_marker() != "o"]
        assert bars == [100, 100, 200, 125]
        assert [(p.get_x(), p.get_x() + p.get_width()) for p in left.patches] == [
            pytest.approx((0.85 * row.published, 1.15 * row.published)) for row in self.ROWS
        ]
        assert texts(right) == ["+50%", "+10%", "-5%", "-20%"]
        assert "median error of 3 runs not seen: 10.0%" in right.get_title(loc="left")

    def test_a_baseline_is_drawn_and_has_its_own_median(self):
        _, right = plots.predicted_against_published(self.ROWS, "", baseline=[0, 0.2, -0.4, 0.1]).axes
        crosses = [line.get_xdata()[0] for line in right.lines if line.get_marker() == "x"]
        assert crosses == pytest.approx([0, 20, -40, 10])
        assert "×: without a model 20.0%" in right.get_title(loc="left")
        assert right.get_xlim()[1] >= 50

    def test_replayed_runs_are_what_it_takes(self):
        runs = recorded.MEGATRON_RUNS[:5]
        replayed = planner.replay(runs)
        figure = plots.predicted_against_published(replayed, "modelled", baseline=planner.guesses(replayed))
        assert rows(figure.axes[0]) == [run.name for run in runs]


class TestSearch:
    def test_every_plan_is_a_point_in_the_colour_of_its_degree(self, found):
        figure = plots.search_picture(found.plans, "modelled: all layouts", slowest=1e9)
        (ax,) = figure.axes
        lines = {line.get_label(): line for line in ax.lines if line.get_label().startswith("TP")}
        points = {(x, y) for line in lines.values() for x, y in zip(*line.get_data(), strict=True)}
        assert points == {(plan.memory.total, plan.seconds) for plan in found.plans}
        assert len({line.get_color() for line in lines.values()}) == len(lines) > 1
        assert figure.get_suptitle() == "modelled: all layouts"

    def test_the_best_and_the_marked_are_named(self, found):
        last = found.plans[-1].layout
        (ax,) = plots.search_picture(found.plans, "", marked={"published": last}, best=2, limit=80e9).axes
        first, second = (plots.layout_name(plan.layout) for plan in found.plans[:2])
        published = f"{len(found.plans)}. published: {plots.layout_name(last)}"
        assert {f"1. {first}", f"2. {second}", published} <= set(texts(ax))
        assert "GPU 80 GB" in texts(ax)

    def test_a_layout_that_is_not_there_is_marked_by_its_degrees(self, found):
        wanted = replace(found.best[3].layout, microbatch=64)
        (ax,) = plots.search_picture(found.best, "", marked={"ours": wanted}, best=0).axes
        assert [text for text in texts(ax) if "ours" in text] == [f"4. ours: {plots.layout_name(found.best[3].layout)}"]

    def test_slow_ones_are_counted(self, found):
        slow = sum(plan.seconds > 1.4 * found.plans[0].seconds for plan in found.plans)
        (ax,) = plots.search_picture(found.plans, "", slowest=1.4).axes
        assert slow and f"{slow:,} slower ones above" in texts(ax)
        assert 1.2 * found.plans[0].seconds < ax.get_ylim()[1] <= 1.4 * found.plans[0].seconds
