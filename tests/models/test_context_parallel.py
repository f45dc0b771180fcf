"""Formulas of context parallelism: pairs against a count, bytes and conditions against published figures."""

import itertools

from lessons.long_context_and_experts.context_parallel import (
    METHODS,
    ORDERS,
    Attention,
    overlap_tokens,
    pairs_per_rank,
)


def tokens_of(length, ranks, order):
    t = length // ranks
    runs = [range(i * t // 2, (i + 1) * t // 2) for i in range(2 * ranks)]
    return {
        "contiguous": [range(r * t, (r + 1) * t) for r in range(ranks)],
        "zig-zag": [[*runs[r], *runs[-1 - r]] for r in range(ranks)],
        "striped": [range(r, length, ranks) for r in range(ranks)],
    }[order]


def test_pairs_are_those_of_a_count():
    for order, (length, ranks) in itertools.product(ORDERS, [(8, 1), (64, 4), (48, 3), (120, 5)]):
        counted = [sum(i + 1 for i in tokens) for tokens in tokens_of(length, ranks, order)]
        assert pairs_per_rank(length, ranks, order) == counted, (order, length, ranks)
        assert sum(counted) == length * (length + 1) // 2


def test_methods_compute_the_same_pairs_and_a_balanced_ring_hides_at_its_limit():
    shapes = {"length": 4096, "heads": 32, "kv_heads": 8, "ranks": 8}
    of = {name: Attention(name, **shapes) for name in METHODS}
    assert len({sum(a.pairs) for a in of.values()}) == 1
    tokens = int(overlap_tokens(400e12, 50e9, 4, causal=True)) // 16 * 16
    enough, few = (Attention("ring, zig-zag", 8 * (tokens + more), 32, 8, 8) for more in (16, -16))
    assert enough.exposed_seconds == 0 < few.exposed_seconds
    assert of["gather K and V"].held > of["ring, zig-zag"].held
