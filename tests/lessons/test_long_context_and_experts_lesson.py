"""Long sequences and experts as lesson 11 writes them: on other numbers of ranks, and what no cell asserts."""

from __future__ import annotations

import sys
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lesson_cells import definitions

from course_utils import launch
from course_utils.costs import bytes_sent
from lessons.long_context_and_experts import context_parallel as cp
from lessons.long_context_and_experts import experts as ep
from lessons.long_context_and_experts.equality import try_attention, try_experts

pytestmark = pytest.mark.guard(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder


@cache
def lesson(n: int) -> dict:
    return definitions("11", n=n) | {"orders": {}}


def test_pieces_merge_in_any_order_also_where_nothing_is_seen():
    piece, merge, finish = (lesson(2)[name] for name in ("piece", "merge", "finish"))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 8, dtype=torch.float64) for _ in range(3))
    keep = torch.ones(12, 12, dtype=torch.bool).tril()
    parts = [piece(q, k[:, :, keys], v[:, :, keys], keep[:, keys]) for keys in torch.arange(12).chunk(3)]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        a, b, c = (parts[i] for i in order)
        assert torch.allclose(finish(merge(merge(a, b), c))[0], expected, atol=1e-12)
        assert torch.allclose(finish(merge(a, merge(b, c)))[0], expected, atol=1e-12)


@pytest.mark.parametrize("n", [2, 3])
def test_rings_and_ulysses_on_fewer_ranks_with_the_bytes_of_the_formulas(n):
    names = lesson(n)
    tokens, zigzag = 8 * n, names["zigzag"]
    orders = names["all_orders"](tokens)
    RingAttention, ulysses, gathering = (names[name] for name in ("RingAttention", "ulysses_repeating", "gathering"))
    names["orders"] = orders
    gathering.__globals__["orders"] = orders

    def try_all():
        pairs = {name: [] for name in orders}
        found = {name: try_attention(lambda *qkv, o=order, p=pairs[name]: RingAttention.apply(*qkv, o, p), order,
                                     heads=n, size=8) for name, order in orders.items()}
        found["gather"] = try_attention(gathering, zigzag(tokens, n), heads=n, size=8)
        found["Ulysses"] = try_attention(ulysses, orders["contiguous"], heads=n, kv_heads=1, size=8)
        return found, pairs

    ranks = launch(try_all, world_size=n, backend="gloo")
    width, own = n * 8, 2 * 8  # numbers of a token, tokens of a rank in two sequences
    for found, _ in ranks:
        assert max(trial.error for trial in found.values()) < 1e-5
        for name in orders:
            assert (found[name].forward.sent, found[name].backward.sent) == cp.ring_bytes(own, width, n, 4)
        for name, expected in (("gather", cp.gather_bytes(own, width, n, 4)),
                               ("Ulysses", cp.ulysses_bytes(own, width, width, n, 4))):
            for ledger, size in zip((found[name].forward, found[name].backward), expected, strict=True):
                assert sum(bytes_sent(entry.op, n, entry.bytes) for entry in ledger) == size
    for name in orders:
        assert [sum(pairs[name]) for _, pairs in ranks] == cp.pairs_per_rank(tokens, n, name)


@pytest.mark.parametrize("n", [2, 3])
def test_experts_equal_the_dense_model_and_capacity_drops_what_comes_late(n):
    names = lesson(n)
    MoE, ParallelMoE, CapacityMoE = (names[name] for name in ("MoE", "ParallelMoE", "CapacityMoE"))

    def try_both():
        torch.manual_seed(1)
        whole, tokens = MoE(16, 8, 2 * n, top_k=2), torch.randn(24 * n, 16)
        exact, _ = try_experts(ParallelMoE, whole, tokens)
        CapacityMoE.factor = 0.5
        few, module = try_experts(CapacityMoE, whole, tokens)
        with torch.no_grad():
            _, chosen = whole.route(tokens.chunk(n)[dist.get_rank()])
        return exact.error, few.error, module.dropped, torch.bincount(chosen.flatten(), minlength=2 * n)

    limit = ep.capacity(24, 2 * n, 2, 0.5)
    for exact, few, dropped, load in launch(try_both, world_size=n, backend="gloo"):
        assert exact < 1e-4 < few
        assert dropped == (load - limit).clamp(min=0).sum()


def test_an_expert_without_tokens_is_no_fault():
    names = lesson(2)

    def nobody_goes_to_rank_1():
        torch.manual_seed(1)
        whole = names["MoE"](16, 8, 4, top_k=2)
        with torch.no_grad():
            whole.router.weight[2:] = -100 * torch.ones(2, 16)
        trial, module = try_experts(names["ParallelMoE"], whole, torch.rand(12, 16))
        return trial.error, module.load

    (error, load), (other, empty) = launch(nobody_goes_to_rank_1, world_size=2, backend="gloo")
    assert max(error, other) < 1e-4 and (load, empty) == (24, 0)


def test_a_bias_chooses_and_balances():
    balance = lesson(2)["balance"]
    for history in launch(balance, "bias", 40, world_size=2, backend="gloo"):
        assert history[0] > 2 and max(history[-10:]) < 1.5
