"""Formulas of mixtures of experts: small cases by hand, and the published figures of DeepSeek."""

from itertools import combinations

import pytest

from lessons.long_context_and_experts.experts import (
    DEEPEP_LOW_LATENCY,
    DEEPSEEK_V3,
    capacity,
    dispatch_bytes,
    expected_nodes,
    expert_parameters,
)


def test_capacity_and_bytes():
    assert [capacity(256, 8, 2, factor) for factor in (1.0, 1.25, 2.0)] == [64, 80, 128]
    assert capacity(10, 3, 1, 1.0) == 4, "rounded up"
    assert dispatch_bytes(256, 2, 128, 4) == 49_152


def test_nodes_are_those_of_a_count():
    reached = [len({e // 3 for e in chosen}) for chosen in combinations(range(9), 4)]
    assert expected_nodes(9, 4, 3) == pytest.approx(sum(reached) / len(reached))


def test_deepseek_v3():
    v3 = DEEPSEEK_V3
    assert expert_parameters(v3.hidden, v3.inner) == 44_040_192
    assert expert_parameters(v3.hidden, v3.inner) * v3.experts * v3.layers == pytest.approx(653.9e9, rel=1e-4)
    for one in DEEPEP_LOW_LATENCY:
        assert one.tokens * one.top_k * one.token_bytes / one.seconds == pytest.approx(one.bandwidth, rel=0.02)
