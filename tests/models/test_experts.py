"""Formulas of mixtures of experts: small cases by hand, and the published figures of DeepSeek."""

from itertools import combinations

import pytest

from lessons.long_context_and_experts.experts import (
    expected_nodes,
)


def test_nodes_are_those_of_a_count():
    reached = [len({e // 3 for e in chosen}) for chosen in combinations(range(9), 4)]
    assert expected_nodes(9, 4, 3) == pytest.approx(sum(reached) / len(reached))
