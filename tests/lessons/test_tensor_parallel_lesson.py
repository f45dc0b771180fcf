"""Tensor parallelism as lesson 09 writes it: equal to one process in float64, and what it sends and keeps."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache, partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lesson_cells import definitions

from course_utils import WorkerError, device, launch, record, recorded
from course_utils.data import Windows
from course_utils.models import PUBLISHED, TransformerConfig, build_gpt
from lessons.tensor_parallel import helpers as tensor_parallel
from lessons.tensor_parallel.helpers import compare, held_by_formula, held_for_backward, large, ring_bytes, try_layer

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

SMALL = TransformerConfig(heads=12, hidden=24, context=12, vocabulary=131)
BSH = 4 * SMALL.context * SMALL.hidden


@cache
def lesson() -> dict:
    """What the lesson defines, by name; f and g, which defaults are made from, come from a first reading."""
    first = definitions("09", f=None, g=None)
    f, g, both = (first[name].apply for name in ("Copy", "Reduce", "SumBothWays"))
    return definitions("09", gpt=SMALL, f=f, g=g, both=both, same=torch.nn.Identity())


def text(step):
    return Windows("train", SMALL.context).batch(range(4 * step, 4 * step + 4), device())


def on(n: int, fn, *args, **kwargs) -> list:
    return launch(fn, *args, world_size=n, backend="gloo", **kwargs)


def trial(n: int, make, layer) -> list:
    return on(n, try_layer, make, layer, SMALL.hidden)


def mlp(dtype=torch.float64):
    return build_gpt(SMALL, dtype=dtype).blocks[0].mlp


def kinds() -> dict:
    """The lesson's models of a rank, and how each makes a step."""
    of = lesson()
    by_plan = {name: (partial(of["by_plan"], of[name]), of["plan_step"])
               for name in ("first_plan", "one_f_plan", "sequence_plan")}
    own = {name: (of[name], of["step"]) for name in ("parallel", "sequence_parallel")}
    return own | by_plan


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_whole_model_equals_one_process(n, tied):
    """Logits, every gradient, losses and weights after three steps, with a vocabulary that only n = 1 divides."""
    config = TransformerConfig(heads=12, hidden=24, context=12, vocabulary=131, tied=tied)

    def every_kind():
        return {name: compare(make, step, text, config, 3, torch.float64) for name, (make, step) in every.items()}

    every = {name: kinds()[name] for name in ("parallel", "sequence_parallel")}
    for by_kind in on(n, every_kind):
        for name, run in by_kind.items():
            assert run.errors.keys() == {"logits", "gradients", "losses", "weights"}
            assert max(run.errors.values()) < 1e-12, (name, run.errors)


@pytest.mark.parametrize("version", ["without f", "without g", "both ways"])
def test_a_missing_or_doubled_sum_shows_in_gradients(version):
    of = lesson()
    f, g = of["f"], of["g"]
    none = torch.nn.Identity()
    enter, leave = {"without f": (none, g), "without g": (f, none), "both ways": (f, of["both"])}[version]
    for run in on(3, compare, partial(of["parallel"], enter=enter, leave=leave), of["step"], text, SMALL, 1):
        assert not run.equal and run.errors["gradients"] > 0.01
        assert (run.errors["logits"] < 1e-5) == (version != "without g"), "right logits do not prove anything"
        with pytest.raises(AssertionError, match="gradients WRONG"):
            run.same_as_one_process()


def test_both_cuts_put_together():
    x, y = torch.ones(2, 4), torch.ones(2, 2)
    assert tensor_parallel.joined([y, y], x) == "in pieces"
    assert tensor_parallel.joined([y, 2 * y], 3 * y) == "a sum over ranks"
    with pytest.raises(AssertionError):
        tensor_parallel.joined([y, y], 3 * y)


def test_trials_of_the_mlp_name_what_is_wrong():
    of = lesson()
    right = trial(2, of["split_mlp"], mlp())
    wrong = trial(2, partial(of["split_mlp"], enter=torch.nn.Identity()), mlp())
    assert all(max(found.errors.values()) < 1e-12 for found in right)
    assert all(found.errors["loss"] < 1e-12 < 0.01 < found.errors["x"] for found in wrong)
    rows = tensor_parallel.trial_table({"f and g": right[0], "without f": wrong[0]}, ["up", "down"]).splitlines()
    assert rows[1].split() == ["f", "and", "g", "1", "+", "1", *["right"] * 4]
    assert "off" in rows[2] and "1 + 0" in rows[2]


def test_gathering_between_the_layers_changes_bytes_only():
    sent = []
    for make in (lesson()["split_mlp"], lesson()["GatheredBetween"]):
        ranks = trial(3, make, mlp())
        assert all(max(found.errors.values()) < 1e-12 for found in ranks)
        sent.append(ring_bytes([*ranks[0].forward, *ranks[0].backward]))
    assert sent[1] == 3 * sent[0]


def test_a_joint_matrix_that_is_cut_naively_is_another_layer():
    attention = build_gpt(SMALL, dtype=torch.float64).blocks[0].attention
    for found in trial(2, lesson()["split_joint"], attention):
        assert found.errors["loss"] > 0.01 and found.errors["x"] > 0.1
    for found in trial(2, lesson()["ParallelAttention"], attention.float()):
        assert found.equal and (len(found.forward), len(found.backward)) == (1, 1)


@pytest.mark.parametrize(("n", "kv_heads"), [(1, 1), (2, 12), (2, 1), (3, 6), (3, 1), (4, 4), (4, 2), (4, 1)])
def test_grouped_attention_equals_one_process_with_copies_or_without(n, kv_heads):
    torch.manual_seed(0)
    whole = lesson()["GroupedAttention"](24, 12, kv_heads).double()
    for found in trial(n, lesson()["ParallelGroupedAttention"], whole):
        assert max(found.errors.values()) < 1e-12
        assert len(found.backward) == 1 + 4 * (n > kv_heads)


def test_key_value_heads_and_ranks_must_divide():
    with pytest.raises(WorkerError, match="3 ranks and 2 key-value heads"):
        trial(3, lesson()["ParallelGroupedAttention"], lesson()["GroupedAttention"](24, 12, 2))


@pytest.mark.parametrize("scale", [1, 1e4], ids=["small", "that would overflow"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_loss_over_a_split_vocabulary(n, scale):
    def try_it():
        torch.manual_seed(0)
        whole = (scale * torch.randn(2, 7, 17).double()).requires_grad_()
        targets = torch.randint(17, (2, 7))
        expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
        expected.backward()
        pieces, rank = torch.arange(17).tensor_split(dist.get_world_size()), dist.get_rank()
        own = whole.detach()[..., pieces[rank]].requires_grad_()
        with record() as ledger:
            loss = cross_entropy(own, targets, int(pieces[rank][0]))
            loss.backward()
        errors = (loss - expected).abs().item(), (own.grad - whole.grad[..., pieces[rank]]).abs().max().item()
        return max(errors), [(e.op, e.bytes) for e in ledger]

    cross_entropy = lesson()["vocab_parallel_cross_entropy"]
    for error, ledger in on(n, try_it):
        assert error < 1e-12 * scale and ledger == [("all_reduce", 2 * 7 * 8)] * 3


def test_traffic_of_a_layer_is_the_formula_and_comes_in_halves_with_sequence_parallelism():
    for layers in (1, 3):
        config, around = TransformerConfig(layers, 12, 24, 12, 132), 4 * layers + 2
        for name, expected in {
            "parallel": {"all_reduce": around}, "sequence_parallel": {"all_gather": around, "reduce_scatter": around},
        }.items():
            entries = large(on(3, compare, *kinds()[name], text, config, 1)[0].ledger, BSH)
            assert Counter(e.op for e in entries) == expected
            assert ring_bytes(entries) == pytest.approx(around * 2 * 2 / 3 * 4 * BSH)


def test_plans_train_as_one_process_and_send_six_or_four_sums_a_layer():
    halves = {"all_gather": 10, "reduce_scatter": 10}
    for name, sums in {"first_plan": 6 * 2 + 2, "one_f_plan": 4 * 2 + 2, "sequence_plan": 0}.items():
        run = on(2, compare, *kinds()[name], text, SMALL)[0]
        assert run.same_as_one_process() == "equal to one process: logits, gradients, losses, weights"
        assert Counter(e.op for e in large(run.ledger, BSH)) == ({"all_reduce": sums} if sums else halves)
        logits = 4 * 4 * SMALL.context * SMALL.vocabulary
        assert not any(e.op == "all_gather" and e.bytes >= logits for e in run.ledger), "no logits are gathered"
        assert len(run.stepping) == (0 if sums else 3 * (4 * SMALL.layers + 2))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_layer_keeps_what_the_formulas_say(n):
    def kept():
        return [held_for_backward(make, text(0)[0], SMALL) for make in makes]

    makes = [tensor_parallel.separate_qkv, *(kinds()[name][0] for name in ("one_f_plan", "sequence_plan", "parallel"))]
    found = on(n, kept)
    formula = [held_by_formula(f"{kind} parallel", SMALL, n) for kind in ("tensor", "sequence", "tensor")]
    assert found == [pytest.approx([held_by_formula("one process", SMALL, n), *formula], rel=1e-12)] * n
    with pytest.raises(ValueError, match="kind must be one of"):
        held_by_formula("plan", SMALL, n)


@pytest.mark.parametrize("n", [2, 3])
def test_parameters_of_a_rank(n):
    even = TransformerConfig(heads=12, hidden=24, context=12, vocabulary=132)

    def count(parallel):
        return sum(p.numel() for p in parallel(build_gpt(even)).parameters())

    assert on(n, count, lesson()["parallel"]) == [tensor_parallel.parameters_of_rank(even, n)] * n
    assert tensor_parallel.parameters_of_rank(even, 1) == even.parameter_count


def test_memory_of_a_rank_has_the_activations_of_the_formulas():
    config = PUBLISHED["GPT-3 13B"]
    unit = 2 * 4 * config.context * config.hidden * config.layers
    assert tensor_parallel.rank_memory(config, 1, 4).activations == pytest.approx(16 * unit)
    assert tensor_parallel.rank_memory(config, 8, 4).activations == pytest.approx(5.5 * unit)
    assert tensor_parallel.rank_memory(config, 8, 4, sequence_parallel=True).activations == pytest.approx(3.75 * unit)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ring_of_products_is_a_gather_and_a_product(n):
    assert max(on(n, lesson()["try_ring"])) < 1e-4


def test_model_of_the_recorded_curve_bends_where_the_node_ends():
    curve = recorded.ULTRASCALE_TP
    assert curve.efficiency[-1] == pytest.approx(0.154, abs=1e-3) and "https://" in curve.source
    three = TransformerConfig(30, 32, 3072, 4096, 51200)
    rates, compute = lesson()["predict"](curve, three, 1)
    assert rates[0] == pytest.approx(curve.tokens_per_gpu[0]) and 0 < compute < 1 / rates[0]
    drops = [b / a for a, b in zip(rates, rates[1:], strict=False)]
    assert min(drops[:2]) > 0.75 > drops[2], "the step from 8 to 16 leaves the node"


def test_time_of_a_layer_follows_its_flops():
    big = PUBLISHED["GPT-3 175B"]
    one, eight = (tensor_parallel.compute_seconds(big, t, 2048, 400e12) for t in (1, 8))
    assert one == pytest.approx(8 * eight)
    assert one * 400e12 == 2048 * (6 * 12 * 12288**2 + 12 * 2048 * 12288)
