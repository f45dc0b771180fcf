"""The planner counts as the papers do, agrees with the course's own simulations, and is held against records."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from course_utils import memory
from course_utils.transformer import PUBLISHED, TransformerConfig
from lessons.parallelism_3d import planner
from lessons.parallelism_3d.planner import CONSTANTS, Layout, cluster, held, plan, rates, reasons_against, search
from lessons.parallelism_3d.planner.held import stage
from lessons.parallelism_3d.planner.layout import chunks
from lessons.parallelism_3d.planner.messages import exposed, half_all_reduce, mates
from lessons.parallelism_3d.planner.step_time import StepModel
from lessons.pipeline_parallel import pipeline

A100, H100 = cluster("DGX A100", 64), cluster("DGX H100", 64)
GPT, LLAMA, LLAMA_70B = (PUBLISHED[name] for name in ("Megatron 7.5B", "Llama 3 8B", "Llama 3 70B"))
OF_2021 = {"zero": 0, "recompute": "full", "sequence_parallel": False, "overlap": False}


# --- counts


def test_llamas_have_the_parameters_of_the_released_models():
    counts = {"Llama 3 8B": 8_030_261_248, "Llama 3 70B": 70_553_706_496, "Llama 3 405B": 405_853_388_800}
    assert {name: PUBLISHED[name].parameter_count for name in counts} == counts


@pytest.mark.parametrize("tp", [1, 4])
def test_activations_are_those_of_korthikanti(tp):
    tokens, h = 2 * GPT.context, GPT.hidden
    scores = 5 * GPT.heads * GPT.context / h
    assert GPT.kept(tokens, "none", tp, False) == tokens * h * (10 + (24 + scores) / tp)
    assert GPT.kept(tokens, "none", tp) == pytest.approx(tokens * h * (34 + scores) / tp)
    assert GPT.kept(tokens, "selective", tp) == tokens * h * 34 / tp
    assert GPT.kept(tokens, "full", tp, False) == tokens * h * 2


def test_traffic_is_that_of_the_formulas():
    sent = planner.traffic(GPT, Layout(tp=4, pp=4, dp=4, zero=1, recompute="none"), 32)
    tokens, layers = 2048, GPT.layers / 4
    assert sent["tp"] == pytest.approx(8 * layers * 8 * 2 * tokens * GPT.hidden * 3 / 4)  # 8 bsh (t-1)/t elements
    assert sent["pp"] == pytest.approx(8 * 2 * 2 * tokens * GPT.hidden / 4)
    assert sent["dp"] == pytest.approx(4 * layers * GPT.layer_parameters / 4 * 3 / 4)
    assert sent["cp"] == 0 and planner.traffic(GPT, Layout(), 1) == {"tp": 0, "cp": 0, "pp": 0, "dp": 0}


def test_states_are_those_of_zero():
    model = PUBLISHED["Megatron 1.7B"]
    for zero in range(4):
        held = plan(model, A100, Layout(dp=64, zero=zero), 64).memory
        formula = memory.model_states(model.parameter_count, stage=zero, ranks=64).total
        assert held.states == pytest.approx(formula, rel=1e-4), f"stage {zero}"


# --- legality


def test_all_reasons_are_given():
    cases = [
        ({"dp": 8}, "makes 32 GPUs, the cluster has 64"),
        ({"tp": 16, "pp": 1, "dp": 4}, "8 key-value heads do not divide among TP 16"),
        ({"tp": 1, "pp": 64, "dp": 1}, "80 layers do not divide among PP 64, nor do 82"),
        ({"dp": 1, "cp": 16, "context": 8208}, "8208 do not divide into 2 x CP 16"),
        ({"microbatch": 8}, "96 sequences do not divide into DP 16 x micro-batches of 8"),
        ({"virtual": 20, "dp": 8, "pp": 4, "microbatch": 2}, "a multiple of PP 4 micro-batches, got 6"),
        ({"virtual": 2, "pp": 1, "dp": 32}, "2 chunks on a rank need a pipeline"),
        ({"recompute": "none", "microbatch": 6, "zero": 0}, "in reserve, more than the 85 of this H100"),
        ({"tp": 1, "pp": 1, "dp": 64, "replicas": 3}, "DP 64 does not divide into 3 replicas"),
        ({"replicas": 2, "zero": 0}, "2 replicas need states that are divided"),
        ({"ep": 2}, "0 experts do not divide among EP 2"),
    ]
    for change, says in cases:
        model = replace(LLAMA_70B, context=change.pop("context", 8192))
        reasons = reasons_against(model, H100, Layout(**{"tp": 2, "pp": 2, "dp": 16} | change), 96)
        assert any(says in reason for reason in reasons), reasons
    layout = Layout(tp=3, pp=7, dp=5)
    assert len(reasons_against(GPT, A100, layout, 32)) == 5
    with pytest.raises(ValueError, match="105 GPUs.*heads.*layers"):
        plan(GPT, A100, layout, 32)


def test_a_reason_says_whose_rule_it_is():
    cases = {
        "impossible": Layout(tp=8, dp=4), "a rule of Megatron-LM": Layout(tp=8, pp=3, dp=4),
        "this planner's convention": Layout(dp=64, order="pp-tp"),
    }
    for whose, layout in cases.items():
        assert reasons_against(LLAMA_70B, H100, layout, 64)[-1].endswith(f"({whose})")
    assert "did you mean 512?" in reasons_against(LLAMA_70B, H100, Layout(dp=64), 512 * 8192)[0]
    assert "A100 has no fp8" in reasons_against(GPT, A100, Layout(dp=64, products="fp8"), 64)[0]
    for change in ({"network": 400}, {"network": 3.2e12}, {"busbw_node": 340}, {"busbw_network": 45}):
        with pytest.raises(ValueError, match="did you mean|divided by its 8 GPUs"):
            planner.own_cluster("h100", 64, **change)
    with pytest.raises(ValueError, match="per_node=64"):
        planner.own_cluster("gb200", 256, per_node=72)
    assert cluster("GB200 NVL72", 256).per_node == 64 and cluster("GB200 NVL72", 72).per_node == 72


def test_stages_of_unequal_size_are_planned_when_asked_for():
    model = replace(GPT, layers=60)
    assert "unequal_stages=True takes them" in reasons_against(model, A100, Layout(tp=8, pp=8), 8)[0]
    assert chunks(model, 8, True) == (7, 8, 8, 8, 8, 8, 7, 6) and sum(chunks(model, 16, True)) == 60
    given = (8, 8, 8, 8, 7, 7, 7, 7)
    assert chunks(model, 8, given) == given and chunks(model, 4, given) is None
    found = plan(model, A100, Layout(tp=8, pp=8, unequal_stages=True, recompute="selective"), 64)
    assert found.bubble > plan(replace(model, layers=56), A100, Layout(tp=8, pp=8, recompute="selective"), 64).bubble
    assert search(model, A100, 64, tp=8, pp=8, unequal_stages=True).plans


def test_the_order_of_ranks_says_who_shares_a_node():
    one = Layout(tp=2, cp=2, dp=4, pp=4)
    near = {name: mates(H100, one, name) for name in ("tp", "cp", "dp", "pp", "data")}
    assert near == {"tp": 2, "cp": 2, "dp": 2, "pp": 1, "data": 4}
    other = replace(one, order="tp-cp-pp-dp")
    assert [mates(H100, other, name) for name in ("dp", "pp", "data")] == [1, 2, 2]
    sums = [plan(LLAMA_70B, H100, replace(each, recompute="full"), 64) for each in (one, other)]
    assert sums[0].data < sums[1].data


def test_models_with_latent_attention_and_experts_in_some_layers():
    deepseek = TransformerConfig(
        61, 128, 7168, 4096, 129280, tied=False, gated=True, fused=True, mlp_ratio=2048 / 7168, experts=256,
        experts_per_token=8, shared_experts=1, head_width=128, latent=(1536, 512, 64, 128), dense_layers=3,
        dense_ratio=18432 / 7168,
    )
    assert deepseek.parameter_count == pytest.approx(671e9, rel=1e-3)  # arXiv 2412.19437: 671 B, 37 B for each token
    active = deepseek.layers * deepseek.layer_weights + 2 * deepseek.vocabulary * deepseek.hidden
    assert active == pytest.approx(37e9, rel=0.02)
    qwen = replace(LLAMA, layers=36, hidden=4096, heads=32, head_width=128, vocabulary=151936, mlp_ratio=3)
    assert qwen.parameter_count == pytest.approx(8.19e9, rel=1e-3)  # Qwen3-8B, arXiv 2505.09388
    assert plan(deepseek, cluster("GB200 NVL72", 256), Layout(pp=4, dp=64, ep=64, unequal_stages=True), 2048).expert > 0


# --- against the simulations of the course


def update(found: planner.Plan) -> float:
    """Seconds of the optimizer: what remains of compute in a step without work."""
    times = StepModel(found.model, found.cluster, CONSTANTS)
    one, two = (times.step(found.layout, batch, (0.0,) * 5).compute for batch in (1, 2))
    return 2 * one - two


@pytest.mark.parametrize(("pp", "virtual"), [(2, 1), (4, 1), (4, 9), (12, 3)])
@pytest.mark.parametrize("groups", [1, 3])
def test_step_takes_as_long_as_the_simulated_schedule(pp, virtual, groups):
    batch = pp * groups
    machine = planner.GpuCluster("a100", pp, pp, (0.0, 0.0), (0.0, 0.0))
    found = plan(replace(GPT, vocabulary=8), machine, Layout(pp=pp, virtual=virtual, **OF_2021), batch)
    chunk = (found.compute - update(found)) / batch / virtual
    costs = pipeline.Costs(forward=chunk * virtual / 3, input=0.0, weight=chunk * virtual / 1.5)
    timeline = pipeline.simulate(pipeline.interleaved(pp, batch, virtual), costs)
    assert found.seconds - update(found) == pytest.approx(timeline.seconds, rel=1e-3)


@pytest.mark.parametrize(("pp", "virtual"), [(1, 1), (4, 1), (4, 3), (6, 6)])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_activations_in_flight_are_those_of_the_simulated_schedule(pp, virtual, groups):
    count = pp * groups
    peak = pipeline.simulate(pipeline.interleaved(pp, count, virtual)).peak
    held = [stage(GPT, pp, virtual, rank, count)[1] for rank in range(pp)]
    assert held == pytest.approx([p * GPT.layers / pp for p in peak])


# --- plans


@pytest.mark.parametrize("batch", [32, 128])
def test_tensor_parallelism_is_best_at_the_size_of_a_node(batch):
    """Figure 13 of Narayanan et al. 2021: 162.2 billion parameters on 64 GPUs without data parallelism."""
    model = replace(GPT, layers=32, hidden=20480, heads=128)
    rates = {tp: plan(model, A100, Layout(tp=tp, pp=64 // tp, **OF_2021), batch).tflops for tp in (2, 4, 8, 16, 32)}
    assert max(rates, key=rates.get) == 8 and rates[32] < 0.75 * rates[8]


def test_software_changes_time_and_memory_as_it_should():
    base = Layout(tp=8, dp=8, zero=3, recompute="none")

    def seconds(**more):
        return plan(LLAMA, H100, replace(base, **more), 64).seconds

    assert seconds(compiled=False) > seconds() > seconds(products="fp8")
    assert seconds(tp_overlap=True) < seconds() and seconds(attention="flash3") < seconds()
    assert seconds(overlap=False) > seconds() and seconds(recompute="half") > seconds()
    whole, pieces = (plan(LLAMA, H100, Layout(dp=64, zero=3, loss_pieces=n), 64).memory for n in (1, 8))
    assert whole.activations - pieces.activations == pytest.approx(12 * 8192 * 128256 * 7 / 8, rel=0.2)


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "b200"])
def test_every_gpu_can_be_planned(gpu):
    machine = planner.own_cluster(gpu, 16, network=100e9)
    assert 0.2 < plan(LLAMA, machine, Layout(dp=16, zero=3), 16).mfu < 0.8


def test_hsdp_gathers_in_the_node_and_holds_more():
    machine = planner.own_cluster("h100", 64, network=50e9)
    plain, hybrid = (plan(LLAMA, machine, Layout(dp=64, zero=3, replicas=n), 64) for n in (1, 8))
    assert hybrid.data < plain.data and hybrid.memory.states == pytest.approx(8 * plain.memory.states)
    assert {x.layout.replicas for x in search(LLAMA, machine, 64, zero=3, pp=1).plans} == {1, 8}


def test_experts_are_divided_among_data_ranks():
    mixtral = PUBLISHED["Mixtral 8x7B"]
    assert mixtral.parameter_count == 46_702_792_704
    whole, divided = (plan(mixtral, H100, Layout(dp=64, zero=3, ep=n), 64) for n in (1, 8))
    assert whole.expert == 0 < divided.expert
    assert planner.traffic(mixtral, divided.layout, 64)["ep"] > 0


def test_a_search_finds_every_legal_layout_and_plans_it():
    found = search(LLAMA_70B, H100, 256)
    seconds, layouts = [each.seconds for each in found.plans], {each.layout for each in found.plans}
    assert seconds == sorted(seconds) and len(layouts) == len(seconds)
    assert set(found.refused) == {"heads", "layers", "batch", "interleaving", "memory"}
    assert all(plan(LLAMA_70B, H100, each.layout, 256) == each for each in found.plans[::97])
    sizes = [2**k for k in range(7)]
    for tp, pp, cp, microbatch in itertools.product(sizes[:4], sizes[:5], sizes[:3], (1, 2)):
        dp, rest = divmod(64, tp * pp * cp)
        if not rest and dp * cp > 1:
            layout = Layout(tp, pp, dp, cp, microbatch, recompute="selective")
            assert (layout in layouts) == (not reasons_against(LLAMA_70B, H100, layout, 256))
    degrees = [each.layout.degrees for each in found.best]
    assert len(set(degrees)) == len(degrees) == len({one.degrees for one in layouts})
    held = search(GPT, A100, 128, tp=8, zero=(0, 1), recompute="full", virtual=1, cp=1).plans
    assert {(each.layout.tp, each.layout.recompute, each.layout.virtual) for each in held} == {(8, "full", 1)}


# --- records


def test_two_constants_are_fitted_to_five_known_runs():
    fitted = planner.fit(planner.published_runs(fitted=True))
    assert {run.role for run in planner.published_runs(fitted=True)} == {"known"}
    rounded = {name: round(getattr(fitted, name), 3) for name in ("matmul", "matmul_hopper")}
    assert replace(fitted, **rounded) == CONSTANTS


def test_messages_are_as_fast_as_the_slower_of_link_and_ports():
    near, far = half_all_reduce(H100, CONSTANTS, 8, 8, 1e9), half_all_reduce(H100, CONSTANTS, 64, 8, 1e9)
    hop, crossing = rates.HOP["Hopper"], H100.inter[0]
    assert near == pytest.approx(7 / 8 * 1e9 / (0.8 * 450e9) + 7 * hop)
    assert far == pytest.approx(max(63 / 64 / 360e9, 7 / 8 / 8 / 45e9) * 1e9 + 56 * hop + 7 * crossing)
    slow = planner.own_cluster("h100", 64, busbw_node=100e9, busbw_network=10e9)
    measured = half_all_reduce(slow, CONSTANTS, 64, 8, 1e9) - 56 * hop - 7 * slow.inter[0]
    assert measured == pytest.approx(7 / 8 / 8 / 10e9 * 1e9)
    assert exposed(1.0, 10.0, 0.25) == pytest.approx(0.2) and exposed(3.0, 1.0, 0.25) == 2


def test_most_layouts_that_ran_out_of_memory_are_foreseen():
    rows = planner.layouts_measured("ran")
    assert len(rows) == 694
    for half in (rows[::2], rows[1::2]):  # a share is fitted to the first
        found = planner.foreseen(half)
        assert found.fitting_ran > 0.9 and found.foreseen > 0.9 and found.refused < 0.02
    runs = planner.replay(planner.published_runs())
    assert sum(run.refused for run in runs) <= 0.02 * len(runs)


@pytest.mark.parametrize(("memory_bytes", "failed"), [(None, 3), (80e9, 0)])
def test_the_fastest_fitting_layout_ran_if_a_little_memory_is_kept_free(memory_bytes, failed):
    groups = {}
    for row in planner.layouts_measured("ran"):
        machine = replace(row.cluster, memory_bytes=memory_bytes)
        if held.fits(row.model, machine, row.layout, row.batch):
            times = StepModel(row.model, machine, CONSTANTS)
            seconds = times.step(row.layout, row.batch, (0.0,) * 5).seconds
            groups.setdefault((row.model.name, machine.gpus, row.batch), []).append((seconds, row.value))
    assert len(groups) == 10
    assert sum(not min(found)[1] for found in groups.values()) == failed


def test_published_peaks_are_met():
    found = planner.scores(planner.layouts_measured("GB"))
    assert found["all"].runs == 101 and found["all"].median < 0.1
    assert max(found[name].median for name in ("fsdp", "tensor", "pipeline")) < 0.065


def test_rates_of_dense_models_are_met_and_those_of_mixtures_are_not():
    rows = [row for row in planner.layouts_measured("tokens/s") if row.cluster.gpu != "h200"]
    dense, mixtures = ([row for row in rows if bool(row.model.experts) == yes] for yes in (False, True))
    assert (len(dense), len(mixtures)) == (30, 79)
    assert planner.score(dense).median < 0.05 and planner.score(mixtures).median > planner.score(mixtures).guess
