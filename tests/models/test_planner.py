"""The planner counts as the papers do, agrees with the course's own simulations, and is held against published runs."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import numpy as np
import pytest

from course_utils import memory, models, pipeline, planner, recorded
from course_utils.planner import CONSTANTS, FITTED, MODELS, PARTS, Layout, cluster, legal, plan, search
from course_utils.planner.layout import _stage

A100, H100 = cluster("DGX A100", 64), cluster("DGX H100", 64)
GPT = MODELS["Megatron 7.5B"]
PUBLISHED = recorded.MEGATRON_RUNS + recorded.LLAMA3_RUNS
OF_2021 = {"zero": 0, "recompute": "full", "sequence_parallel": False, "overlap": False}


@pytest.fixture(scope="module")
def replayed():
    return planner.replay(PUBLISHED)


@pytest.fixture(scope="module")
def found():
    return search(MODELS["Llama 3 70B"], H100, 256)


# --- counts -----------------------------------------------------------------------------------------------------------


class TestModels:
    @pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("Megatron")])
    def test_gpts_have_the_parameters_of_the_course_and_of_the_paper(self, name):
        m = MODELS[name]
        assert m.parameters == models.parameters(models.PUBLISHED[name])
        h, layers = m.hidden, m.layers
        paper = 12 * layers * h**2 * (1 + 13 / (12 * h) + (m.vocabulary + m.length) / (12 * layers * h))
        assert m.parameters == pytest.approx(paper, rel=1e-5)
        assert f"{m.parameters / 1e9:.1f}".removesuffix(".0") + "B" == name.split()[1]

    @pytest.mark.parametrize(
        ("name", "count"),
        [("Llama 3 8B", 8_030_261_248), ("Llama 3 70B", 70_553_706_496), ("Llama 3 405B", 405_853_388_800)],
    )
    def test_llamas_have_the_parameters_of_the_released_models(self, name, count):
        assert MODELS[name].parameters == count

    @pytest.mark.parametrize("name", ["Megatron 1.7B", "Megatron 1008B", "GPT-3 175B"])
    def test_flops_are_equation_3_of_the_paper(self, name):
        m, batch = MODELS[name], 512
        s, h, layers, v = m.length, m.hidden, m.layers, m.vocabulary
        paper = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        assert m.flops(batch * s, "full") == pytest.approx(paper, rel=1e-12)

    def test_flops_without_recomputation_are_those_of_the_course(self):
        assert GPT.flops(1) == models.flops_per_token(models.PUBLISHED["Megatron 7.5B"])

    def test_fused_attention_counts_the_half_that_the_mask_leaves(self):
        attention = 12 * GPT.layers * GPT.length * GPT.hidden
        assert GPT.flops(1) - replace(GPT, fused=True).flops(1) == attention / 2

    @pytest.mark.parametrize("tp", [1, 4])
    def test_activations_are_those_of_korthikanti(self, tp):
        tokens, h = 2 * GPT.length, GPT.hidden
        scores = 5 * GPT.heads * GPT.length / h
        assert GPT.kept(tokens, "none", tp, False) == tokens * h * (10 + (24 + scores) / tp)
        assert GPT.kept(tokens, "none", tp) == pytest.approx(tokens * h * (34 + scores) / tp)
        assert GPT.kept(tokens, "selective", tp) == tokens * h * 34 / tp
        assert GPT.kept(tokens, "full", tp, False) == tokens * h * 2

    def test_activations_are_those_of_the_course_but_for_masks_of_dropout(self):
        config = models.PUBLISHED["Megatron 7.5B"]
        blocks = [memory.activations(replace(config, layers=n), 1, precision="mixed") for n in (1, 2)]
        masks = 2 * config.context * config.hidden
        kept = replace(GPT, fused=True).kept(config.context, "none")
        assert kept - masks == pytest.approx(blocks[1] - blocks[0], rel=2e-3)

    def test_unknown_recomputation_is_refused(self):
        with pytest.raises(ValueError, match="none, selective, full"):
            GPT.flops(1, "some")


# --- legality ---------------------------------------------------------------------------------------------------------


class TestLegal:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"dp": 8}, "makes 32 GPUs, the cluster has 64"),
            ({"tp": 16, "pp": 1, "dp": 4}, "8 key-value heads do not divide among TP 16"),
            ({"tp": 1, "pp": 64, "dp": 1}, "80 layers do not divide among PP 64, nor do 82"),
            ({"dp": 1, "cp": 16, "length": 8208}, "8208 do not divide into 2 x CP 16"),
            ({"microbatch": 8}, "96 sequences do not divide into DP 16 x micro-batches of 8"),
            ({"virtual": 20, "dp": 8, "pp": 4, "microbatch": 2}, "a multiple of PP 4 micro-batches, got 6"),
            ({"virtual": 2, "pp": 1, "dp": 32}, "2 chunks on a rank need a pipeline"),
            ({"zero": 4}, "zero must be one of 0, 1, 2, 3, got 4"),
            ({"recompute": "all"}, "recompute must be one of 'none', 'selective', 'full', got 'all'"),
            ({"tp": 0}, "integers of at least 1"),
            ({"recompute": "none", "microbatch": 6, "zero": 0}, "GB, more than the 80 of this H100"),
        ],
    )
    def test_each_reason_is_given(self, change, says):
        model = replace(MODELS["Llama 3 70B"], length=change.pop("length", 8192))
        fields = {"tp": 2, "pp": 2, "dp": 16} | change
        reasons = legal(model, H100, Layout(**fields), 96)
        assert any(says in reason for reason in reasons), reasons

    def test_all_reasons_are_given_at_once(self):
        layout = Layout(tp=3, pp=7, dp=5)
        reasons = legal(GPT, A100, layout, 32)
        assert len(reasons) == 5
        with pytest.raises(ValueError, match="105 GPUs.*heads.*layers.*batch|105 GPUs.*heads.*layers"):
            plan(GPT, A100, layout, 32)

    @pytest.mark.parametrize("run", PUBLISHED + recorded.PTD_RUNS, ids=lambda run: f"{run.model} {run.gpus}")
    def test_published_runs_are_legal(self, run):
        assert legal(*planner.of_run(run)) == []

    def test_the_misprint_in_llama_3s_table_is_found(self):
        (reason,) = legal(*planner.of_run(recorded.LLAMA3_MISPRINT))
        assert reason == "TP 8 x CP 16 x PP 16 x DP 4 makes 8192 GPUs, the cluster has 16384"

    def test_llama_3_without_any_recomputation_does_not_fit(self):
        model, machine, layout, batch = planner.of_run(recorded.LLAMA3_RUNS[0])
        (reason,) = legal(model, machine, replace(layout, recompute="none"), batch)
        assert reason.endswith("GB, more than the 80 of this H100")

    def test_tensor_parallelism_beyond_the_node_is_legal_and_slow(self):
        inside, across = (plan(GPT, A100, Layout(tp=tp, dp=64 // tp, microbatch=2), 128, CONSTANTS) for tp in (8, 16))
        assert across.tensor > 3 * inside.tensor

    def test_clusters_have_whole_nodes(self):
        with pytest.raises(ValueError, match="whole nodes"):
            cluster("DGX A100", 12)
        with pytest.raises(ValueError, match="choose one of"):
            cluster("TPU", 8)


# --- against the simulations of the course ----------------------------------------------------------------------------


def schedule(layout: Layout, count: int) -> pipeline.Schedule:
    return pipeline.interleaved(layout.pp, count, layout.virtual)


class TestPipeline:
    @pytest.mark.parametrize(("pp", "virtual"), [(2, 1), (4, 1), (4, 3), (4, 9), (12, 3)])
    @pytest.mark.parametrize("groups", [1, 3])
    def test_step_takes_as_long_as_the_simulated_schedule(self, pp, virtual, groups):
        layout = Layout(tp=1, pp=pp, virtual=virtual, **OF_2021)
        batch = pp * groups
        machine = planner.Cluster("one port each", "a100", pp, pp, (0.0, 0.0), (0.0, 0.0))
        found = plan(replace(GPT, vocabulary=8), machine, layout, batch)
        chunk = (found.compute - update(found)) / batch / virtual
        costs = pipeline.Costs(forward=chunk * virtual / 3, input=0.0, weight=chunk * virtual / 1.5)
        timeline = pipeline.simulate(schedule(layout, batch), costs)
        assert found.seconds - update(found) == pytest.approx(timeline.seconds, rel=1e-3)

    @pytest.mark.parametrize(("pp", "virtual"), [(1, 1), (4, 1), (4, 3), (6, 6)])
    @pytest.mark.parametrize("groups", [1, 2, 5])
    def test_activations_in_flight_are_those_of_the_simulated_schedule(self, pp, virtual, groups):
        layout, count = Layout(pp=pp, virtual=virtual), pp * groups
        peak = pipeline.simulate(schedule(layout, count)).peak
        layers = GPT.layers / pp
        assert [_stage(GPT, pp, virtual, rank, count)[1] for rank in range(pp)] == pytest.approx(
            [p * layers for p in peak]
        )

    def test_embedding_and_head_count_as_layers_where_layers_do_not_divide(self):
        model, layout = MODELS["Llama 3 405B"], Layout(tp=8, pp=16, dp=64, virtual=8)
        layers = [_stage(model, 16, 8, rank, 32)[0] for rank in range(16)]
        assert layers == [7, *[8] * 14, 7] and sum(layers) == model.layers
        held = [_stage(model, 16, 8, rank, 32)[1] for rank in range(16)]
        order = schedule(layout, 32).order
        for rank in (0, 1, 15):  # chunk 0 of the first rank and the last chunk of the last have no layer
            now = most = 0
            for op in order[rank]:
                now += (op.stage not in (0, 127)) * (1 if op.kind == "F" else -1)
                most = max(most, now)
            assert held[rank] == pytest.approx(most, abs=1)  # counted when the first backward starts

    def test_the_last_rank_sets_the_pace_where_it_has_the_head_too(self):
        small, large = (plan(replace(GPT, vocabulary=v), A100, Layout(pp=4, dp=16), 512) for v in (8, 51200))
        assert large.compute > small.compute


def update(found: planner.Plan) -> float:
    """Seconds of the optimizer: what remains of compute in a step without work."""
    none = replace(found.layout, microbatch=1)
    one, two = (planner.step(found.model, found.cluster, none, batch, CONSTANTS, (0,) * 5).compute for batch in (1, 2))
    return 2 * one - two


class TestMemory:
    @pytest.mark.parametrize("zero", [0, 1, 2, 3])
    def test_states_are_those_of_zero(self, zero):
        model, held = MODELS["Megatron 1.7B"], plan(MODELS["Megatron 1.7B"], A100, Layout(dp=64, zero=zero), 64).memory
        assert held.states == pytest.approx(memory.model_states(model.parameters, stage=zero, ranks=64).total, rel=1e-4)

    def test_every_dimension_takes_its_share(self):
        def states(**degrees: int) -> float:
            return plan(GPT, A100, Layout(**degrees, zero=0), 64).memory.states

        assert states(tp=4, dp=16) / states(tp=8, dp=8) == pytest.approx(2)
        assert states(tp=4, dp=8, pp=2) < 0.53 * states(tp=4, dp=16)

    def test_the_loss_of_a_llama_takes_what_the_lesson_says(self):
        assert MODELS["Llama 3 70B"].kept_around(8192) == pytest.approx(8.7e9, rel=0.005)

    def test_recomputation_trades_memory_for_time(self):
        plans = [plan(GPT, A100, Layout(tp=8, dp=8, recompute=how), 64) for how in planner.RECOMPUTE]
        assert [p.memory.activations for p in plans] == sorted((p.memory.activations for p in plans), reverse=True)
        assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)


class TestPlan:
    def test_parts_add_up(self):
        found = plan(GPT, A100, Layout(tp=2, pp=4, dp=8, **OF_2021), 64)
        assert list(found.parts()) == list(PARTS)
        assert sum(found.parts().values()) == pytest.approx(found.seconds)
        assert all(seconds > 0 for part, seconds in found.parts().items() if part != "context")

    def test_rates_follow_from_seconds(self):
        found = plan(GPT, A100, Layout(tp=2, dp=32), 64)
        assert found.tflops * 1e12 * found.seconds * 64 == pytest.approx(GPT.flops(64 * 2048, "full"))
        assert found.model_tflops == pytest.approx(found.tflops * GPT.flops(1) / GPT.flops(1, "full"))
        assert found.mfu == pytest.approx(found.model_tflops / 312)
        assert found.hfu == pytest.approx(found.tflops / 312)

    def test_a_plan_says_what_it_costs(self):
        found = plan(GPT, A100, Layout(tp=2, dp=32), 64)
        text = f"{found.seconds:.3g} s a step, {found.model_tflops:.0f} model TFLOP/s a GPU, "
        assert str(found) == f"Megatron 7.5B as TP 2 x PP 1 x DP 32: {text}{found.memory.total / 1e9:.1f} GB"

    def test_fewer_gpus_than_a_node_has_need_no_network(self):
        machine = cluster("DGX A100", 6)
        one, none = (
            plan(MODELS["Megatron 1.7B"], c, Layout(dp=6, zero=0, overlap=False), 6)
            for c in (machine, replace(machine, inter=(9.0, 9.0)))
        )
        assert one.data == none.data > 0

    def test_traffic_is_that_of_the_formulas(self):
        layout, batch = Layout(tp=4, pp=4, dp=4, zero=1, recompute="none"), 32
        sent = planner.traffic(GPT, layout, batch)
        tokens, layers = 2048, GPT.layers / 4
        assert sent["tp"] == pytest.approx(8 * layers * 8 * 2 * tokens * GPT.hidden * 3 / 4)  # 8 bsh (t-1)/t elements
        assert sent["pp"] == pytest.approx(8 * 2 * 2 * tokens * GPT.hidden / 4)
        assert sent["dp"] == pytest.approx(4 * layers * GPT.layer_parameters / 4 * 3 / 4)
        assert sent["cp"] == 0 and planner.traffic(GPT, Layout(), 1) == {"tp": 0, "cp": 0, "pp": 0, "dp": 0}

    @pytest.mark.parametrize("batch", [32, 128])
    def test_tensor_parallelism_is_best_at_the_size_of_a_node(self, batch):
        """Figure 13 of Narayanan et al. 2021: 162.2 billion parameters on 64 GPUs without data parallelism."""
        model = replace(GPT, layers=32, hidden=20480, heads=128, kv_heads=128, ffn=4 * 20480)
        rates = {tp: plan(model, A100, Layout(tp=tp, pp=64 // tp, **OF_2021), batch).tflops for tp in (2, 4, 8, 16, 32)}
        assert max(rates, key=rates.get) == 8 and rates[32] < 0.75 * rates[8]


# --- search -----------------------------------------------------------------------------------------------------------


class TestSearch:
    def test_plans_are_legal_and_sorted(self, found):
        model = MODELS["Llama 3 70B"]
        assert [p.seconds for p in found.plans] == sorted(p.seconds for p in found.plans)
        assert not any(legal(model, H100, p.layout, 256) for p in found.plans[::97])
        assert len({p.layout for p in found.plans}) == len(found.plans)
        assert set(found.refused) == {"heads", "layers", "batch", "interleaving", "memory"}

    def test_plans_are_those_of_plan(self, found):
        for each in found.plans[:3]:
            assert plan(MODELS["Llama 3 70B"], H100, each.layout, 256) == each

    def test_nothing_legal_is_left_out(self, found):
        of = {p.layout for p in found.plans}
        sizes = [2**k for k in range(7)]
        for tp, pp, cp, microbatch in itertools.product(sizes[:4], sizes[:5], sizes[:3], (1, 2)):
            dp, rest = divmod(64, tp * pp * cp)
            if not rest and dp * cp > 1:
                layout = Layout(tp, pp, dp, cp, microbatch, recompute="selective")
                assert (layout in of) == (not legal(MODELS["Llama 3 70B"], H100, layout, 256))

    def test_best_has_each_choice_of_degrees_once(self, found):
        degrees = [p.layout.degrees for p in found.best]
        assert len(set(degrees)) == len(degrees) == len({p.layout.degrees for p in found.plans})
        assert found.best[0] is found.plans[0]
        assert found.rank(found.best[2].layout) == 3 and found.rank(Layout(tp=64)) is None

    def test_fields_can_be_held(self):
        held = search(GPT, A100, 128, tp=8, zero=(0, 1), recompute="full", virtual=1, cp=1)
        assert held.plans
        for p in held.plans:
            layout = p.layout
            assert layout.tp == 8 and layout.zero in (0, 1) and layout.recompute == "full" and layout.virtual == 1

    def test_bad_restrictions_are_refused(self):
        with pytest.raises(ValueError, match="unknown.*stages"):
            search(GPT, A100, 128, stages=2)
        with pytest.raises(ValueError, match="recompute must be one of"):
            search(GPT, A100, 128, recompute="some")


def held_by_the_rule_of_lesson_12(found: planner.Plan) -> float:
    """Bytes of the fullest GPU, counted along the schedule: with a pipeline weights and gradients of a stage are whole
    (section 3), without one ZeRO-3 holds two layers, the flat copy of one, and what is around the layers."""
    m, layout = found.model, found.layout
    parts, most = layout.pp * layout.virtual, []
    assert m.layers % parts == 0 and not m.tied and layout.precision == "mixed"
    tokens, unit = layout.microbatch * m.length / layout.cp, m.layer_parameters / layout.tp
    table = m.vocabulary * m.hidden / layout.tp
    kept, whole = (m.kept(tokens, how, layout.tp) for how in (layout.recompute, "none"))
    orders = pipeline.interleaved(layout.pp, layout.microbatches(found.batch), layout.virtual).order
    for rank, order in enumerate(orders):
        around = table * ((rank == 0) + (rank == layout.pp - 1))
        parameters = m.layers / layout.pp * unit + around
        ranks = layout.dp * layout.cp
        weights = gradients = 2 * parameters
        if layout.pp == 1 and layout.zero == 3:
            weights = 2 * (parameters / ranks + 3 * unit + around)
        if layout.pp == 1 and layout.zero >= 2:
            gradients = 2 * (parameters / ranks + 2 * max(unit, around))
        now = peak = 0
        for op in order:
            now += m.layers // parts * (1 if op.kind == "F" else -1)
            peak = max(peak, now)
        loss = m.kept_around(tokens, layout.tp) if rank == layout.pp - 1 else 0
        keys = 4 * tokens * layout.cp * m.kv_width / layout.tp * (layout.cp > 1)
        activations = peak * kept + whole - kept + loss + m.working(tokens, layout.tp) + keys
        most.append(weights + gradients + 12 * parameters / (ranks if layout.zero else 1) + activations)
    return max(most)


@pytest.mark.parametrize("batch", [128, 512])
@pytest.mark.parametrize("context", [{}, {"cp": 1}], ids=["all", "whole sequences"])
def test_the_first_places_fit_by_the_rule_of_the_lesson(batch, context):
    best = search(MODELS["Llama 3 70B"], H100, batch, **context).best[:5]
    held = [held_by_the_rule_of_lesson_12(each) for each in best]
    assert len(held) == 5 and max(held) <= H100.card.memory_bytes, held
    assert held == pytest.approx([each.memory.total for each in best], rel=0.12)


def test_words_of_lesson_12_on_places_and_on_the_guess():
    """"In 37th place, nearly a third longer", and errors of "2 to 15 %" without a model."""
    found = search(MODELS["Llama 3 70B"], H100, 512)
    place = found.rank(Layout(tp=8, pp=4, dp=2))
    assert place == 37 and 1.28 < found.best[place - 1].seconds / found.best[0].seconds < 1.34
    errors = [abs(error) for error in planner.baseline(recorded.PTD_RUNS)]
    assert round(100 * min(errors)) == 2 and round(100 * max(errors)) == 15


@pytest.mark.parametrize(
    "degrees", [{"tp": 1, "pp": 2, "dp": 4, "cp": 8, "virtual": 8}, {"tp": 1, "pp": 4, "dp": 4, "cp": 4, "virtual": 5}]
)
def test_a_pipeline_holds_its_weights_and_gradients_whole_at_any_stage(degrees):
    model, layout = MODELS["Llama 3 70B"], Layout(**degrees, recompute="full")
    sent = [planner.traffic(model, replace(layout, zero=zero), 512)["dp"] for zero in (1, 2, 3)]
    assert sent[0] == sent[1] == sent[2]
    (reason,) = legal(model, H100, replace(layout, zero=3, recompute="none"), 512)
    assert "the fullest GPU needs" in reason


# --- published runs ---------------------------------------------------------------------------------------------------


class TestPublished:
    def test_constants_are_fitted_to_three_runs(self):
        fitted = planner.fit(FITTED)
        assert len(FITTED) == 3
        assert (round(fitted.matmul, 3), round(fitted.hbm, 3)) == (CONSTANTS.matmul, CONSTANTS.hbm)
        with pytest.raises(ValueError, match="two or three"):
            planner.fit(PUBLISHED[:1])

    def test_shares_of_links_are_the_recorded_ones(self):
        table = recorded.A100_ALL_REDUCE
        reached = [b / 300e9 for size, b in zip(table.sizes, table.busbw, strict=True) if 2**26 <= size <= 2**28]
        assert statistics.median(reached) == pytest.approx(CONSTANTS.nvlink, abs=0.02)
        assert recorded.FOUR_H200_NODES["ring"] / 400e9 == pytest.approx(CONSTANTS.network, abs=0.02)

    def test_runs_that_were_not_fitted_are_predicted(self, replayed):
        errors = [abs(r.error) for r in replayed if not r.fitted]
        guesses = [abs(e) for e, r in zip(planner.baseline(PUBLISHED), replayed, strict=True) if not r.fitted]
        assert len(errors) == 10 and statistics.median(errors) < 0.15 and max(errors) < 0.2
        assert statistics.median(errors) < statistics.median(guesses)

    def test_other_runs_of_the_same_software_are_predicted(self):
        assert all(abs(r.error) < 0.1 for r in planner.replay(recorded.PTD_RUNS, ranks=False))

    def test_it_does_not_matter_much_which_three_are_fitted(self):
        runs = recorded.MEGATRON_RUNS
        medians = []
        for three in itertools.islice(itertools.combinations(runs, 3), 0, None, 7):
            others = [r for r in runs if r not in three]
            errors = planner.replay(others, planner.fit(three), fitted=three, ranks=False)
            medians.append(statistics.median(abs(r.error) for r in errors))
        assert statistics.median(medians) < 0.05 and max(medians) < 0.15

    def test_published_degrees_are_among_the_first_five_for_most(self, replayed):
        assert sum(r.rank is not None and r.rank <= 5 for r in replayed) >= 9
        assert all(r.behind >= 0 for r in replayed)

    def test_zero_3_of_2021_is_where_the_planner_fails(self):
        """What is planned as hidden was not. The lesson tells it, so it is to stay known."""
        rows = planner.replay(recorded.ZERO3_RUNS, ranks=False)
        assert all(r.error > 0.4 for r in rows)

    def test_memory_of_fsdp_is_that_of_torchtitan_and_its_time_is_not(self):
        rows = planner.replay(recorded.TORCHTITAN_RUNS, ranks=False)
        short, long = rows[:2], rows[2:]
        assert all(0 < r.plan.memory.total / r.run.held - 1 < 0.07 for r in short)
        assert all(-0.25 < r.plan.memory.total / r.run.held - 1 < -0.15 for r in long)
        assert all(0.8 < r.error < 1 for r in short) and long[0].error < 0.4 and long[-1].error > 0.9

    def test_memory_of_529b_on_640_gpus_is_over_counted(self):
        (row,) = planner.replay(recorded.ZERO3_RUNS[3:4], ranks=False)
        assert row.run.gpus == 640 and row.refused == ("the fullest GPU needs 103.0 GB, more than the 80 of this A100",)

    def test_both_readings_of_what_was_interleaved(self):
        """Paper against script: which part is largest, and how much of a decline is seen, depends on it."""

        def with_chunks(run, virtual):
            return replace(run, layout={**run.layout, "virtual": virtual})

        plain, looped = (
            planner.replay([with_chunks(recorded.MEGATRON_RUNS[-1], v)], ranks=False)[0].plan for v in (1, 2)
        )
        assert plain.bubble > plain.tensor and looped.bubble < looped.tensor
        again = planner.replay([with_chunks(run, 1) for run in recorded.PTD_RUNS], ranks=False)
        assert all(abs(r.error) < 0.04 for r in again)

    def test_an_illegal_run_is_not_replayed(self):
        with pytest.raises(ValueError, match="makes 8192 GPUs"):
            planner.replay([recorded.LLAMA3_MISPRINT])


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2, "tp": 2}, {"dp": 3, "tp": 4}, {"a": 1, "b": 5}])
def test_mesh_groups_are_row_major(sizes):
    ranks = np.arange(np.prod(list(sizes.values()))).reshape(*sizes.values())
    for axis, (name, size) in enumerate(sizes.items()):
        expected = {tuple(map(int, row)) for row in np.moveaxis(ranks, axis, -1).reshape(-1, size)}
        groups = planner.mesh_groups(sizes)[name]
        assert set(groups) == expected and len(groups) == len(expected)


def test_empty_meshes_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        planner.mesh_groups({"dp": 0})
