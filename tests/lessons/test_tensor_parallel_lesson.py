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
from lessons import definitions

from course_utils import WorkerError, launch, record, recorded
from course_utils.costs import bytes_sent
from course_utils.data import Windows
from course_utils.models import PUBLISHED, TransformerConfig, build_gpt

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

KINDS = ("parallel", "sequence_parallel", "regathering")
SMALL = TransformerConfig(heads=12, hidden=24, context=12, vocabulary=131)


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    given = {"windows": Windows("train", SMALL.context), "gpt": SMALL, "RATE": 400e12}
    return definitions("09", **given, bsh=4 * SMALL.context * SMALL.hidden)


def on(n: int, fn, *args, **kwargs) -> list:
    return launch(fn, *args, world_size=n, backend="gloo", **kwargs)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_whole_model_equals_one_process(n, tied):
    """Logits, every gradient, losses and weights after three steps, with a vocabulary that only n = 1 divides."""

    def every_kind():
        return {make.__name__: compare(make, config, dtype=torch.float64)[0] for make in kinds}

    compare, kinds = lesson()["compare"], [lesson()[name] for name in KINDS]
    config = TransformerConfig(heads=12, hidden=24, context=12, vocabulary=131, tied=tied)
    for by_kind in on(n, every_kind):
        for name, errors in by_kind.items():
            assert errors.keys() == {"logits", "gradients", "losses", "weights"}
            assert max(errors.values()) < 1e-12, (name, errors)


@pytest.mark.parametrize("version", ["ColumnWithoutF", "RowReducedTwice", "RowWithoutG"])
def test_a_missing_or_doubled_sum_shows_in_gradients(version):
    lessons = lesson()
    column = lessons[version] if version.startswith("Column") else lessons["ColumnParallelLinear"]
    row = lessons[version] if version.startswith("Row") else lessons["RowParallelLinear"]
    for errors in on(3, partial(lessons["compare"], partial(lessons["parallel"], column=column, row=row), rounds=1)):
        assert errors[0]["gradients"] > 0.01
        assert (errors[0]["logits"] < 1e-5) == (version != "RowWithoutG"), "right logits do not prove anything"


def test_gathering_between_the_layers_changes_bytes_only():
    tried = {name: on(3, lesson()["try_mlp"], *(lesson()[part] for part in parts)) for name, parts in {
        "pieces": ("ColumnParallelLinear", "RowParallelLinear"), "gathered": ("GatheredColumn", "SplittingRow"),
    }.items()}
    for ranks in tried.values():
        assert all(max(errors.values()) < 1e-5 for errors, _, _ in ranks)
    sent = {name: sum(bytes_sent(e.op, 3, e.bytes) for e in ranks[0][2]) for name, ranks in tried.items()}
    assert sent["gathered"] == 3 * sent["pieces"]


def test_a_joint_matrix_that_is_cut_naively_is_another_layer():
    for output, gradient, _ in on(2, lesson()["try_attention"], lesson()["NaivelyCut"]):
        assert output > 0.1 and gradient > 0.1


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(WorkerError, match="3 ranks do not divide 4 heads"):
        on(3, lambda parallel: parallel(build_gpt()), lesson()["parallel"])


@pytest.mark.parametrize(("n", "kv_heads"), [(1, 1), (2, 12), (2, 1), (3, 6), (3, 1), (4, 4), (4, 2), (4, 1)])
def test_grouped_attention_equals_one_process_with_copies_or_without(n, kv_heads):
    def try_all():
        torch.manual_seed(0)
        whole = GroupedAttention(24, 12, kv_heads).double()
        split = ParallelGroupedAttention(whole)
        inputs = [torch.ones(2, 5, 24).double().cumsum(1).sin().requires_grad_() for _ in range(2)]
        outputs = [net(x) for net, x in zip((whole, split), inputs, strict=True)]
        for y in outputs:
            y.square().sum().backward()
        t, rank = dist.get_world_size(), dist.get_rank()
        pairs = [outputs, [x.grad for x in inputs], (whole.out.bias.grad, split.out.bias.grad)]
        pairs.append((whole.out.weight.grad.tensor_split(t, 1)[rank], split.out.weight.grad))
        for name in "qkv":
            full, own = getattr(whole, name), getattr(split, name)
            pieces = full.weight.shape[0] // own.weight.shape[0]
            for a, b in zip(full.parameters(), own.parameters(), strict=True):
                pairs.append((a.grad.tensor_split(pieces)[rank * pieces // t], b.grad))
        return max((a - b).abs().max().item() for a, b in pairs), split.k.weight.shape[0]

    GroupedAttention, ParallelGroupedAttention = (lesson()[f"{p}GroupedAttention"] for p in ("", "Parallel"))
    for error, rows in on(n, try_all):
        assert error < 1e-12 and rows == 2 * max(1, kv_heads // n)


def test_key_value_heads_and_ranks_must_divide():
    with pytest.raises(WorkerError, match="3 ranks and 2 key-value heads"):
        on(3, lambda make, split: split(make(24, 12, 2)), lesson()["GroupedAttention"],
           lesson()["ParallelGroupedAttention"])


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
    found = {}
    for name in KINDS:
        for layers in (1, 3):
            config = TransformerConfig(layers, 12, 24, 12, 132)
            _, ledger = on(3, lesson()["compare"], lesson()[name], config, 1)[0]
            found[name, layers] = Counter((e.op, e.bytes) for e in ledger if e.bytes == 4 * 4 * 12 * 24)
    size = 4 * 4 * 12 * 24
    for layers in (1, 3):
        around = 4 * layers + 2
        assert found["parallel", layers] == {("all_reduce", size): around}
        halves = {("all_gather", size): around, ("reduce_scatter", size): around}
        assert found["sequence_parallel", layers] == halves
        again = {("all_gather", size): around + 2 * layers + 1, ("reduce_scatter", size): around}
        assert found["regathering", layers] == again


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_layer_keeps_what_the_formulas_say(n):
    def kept():
        return [kept_by_a_layer(make) for make in makes]

    kept_by_a_layer, makes = lesson()["kept_by_a_layer"], [lesson()[name] for name in ("whole_model", *KINDS)]
    c, h, each = SMALL.hidden, SMALL.heads, 4 * 4 * SMALL.context
    whole = 16 * c + 4 + h
    expected = [whole, 4 * c + 4 + (12 * c + h) / n, 2 * c + (14 * c + 4 + h) / n, whole / n]
    for found in on(n, kept):
        assert found == pytest.approx([each * numbers for numbers in expected], rel=1e-12)


@pytest.mark.parametrize("n", [2, 3])
def test_parameters_of_a_rank(n):
    even = TransformerConfig(heads=12, hidden=24, context=12, vocabulary=132)
    def count(parallel):
        return sum(p.numel() for p in parallel(build_gpt(even)).parameters())

    counts = on(n, count, lesson()["parallel"])
    assert counts == [lesson()["tp_parameters"](even, n)] * n
    assert lesson()["tp_parameters"](even, 1) == even.parameter_count


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ring_of_products_is_a_gather_and_a_product(n):
    for error, ledger in on(n, lesson()["try_ring"]):
        assert error < 1e-5 and ledger.messages == n - 1 == len(ledger) / 2


def test_plans_train_as_one_process_and_send_six_or_four_sums_a_layer():
    size = 4 * lesson()["bsh"]
    sums = {"first_plan": 6 * 2 + 2, "loss_parallel_plan": 6 * 2 + 2, "one_f_plan": 4 * 2 + 2}
    for name in (*sums, "sequence_plan"):
        (of, *_) = on(2, lesson()["train_with"], lesson()[name])
        found = Counter(entry.op for entry in of["ledger"] if entry.bytes == size)
        halves = {"all_gather": 10, "reduce_scatter": 10}
        assert of["error"] < 1e-5 and found == ({"all_reduce": sums[name]} if name in sums else halves)
        logits = 4 * 4 * SMALL.context * SMALL.vocabulary
        gathered = any(e.op == "all_gather" and e.bytes >= logits for e in of["ledger"])
        assert gathered == (name == "first_plan"), "loss parallel gathers no logits"


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
    one, eight = (lesson()["compute_seconds"](big, t, 2048) for t in (1, 8))
    assert one == pytest.approx(8 * eight)
    assert one * 400e12 == 2048 * (6 * 12 * 12288**2 + 12 * 2048 * 12288)
