"""The all-reduce algorithms of lesson 03, as its text defines them: right for any ranks, sizes, types."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions

from course_utils import launch, record
from course_utils.check import message_steps
from course_utils.costs import TwoLevelCluster, all_reduce_bytes, all_reduce_steps

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import from this folder

FLAT = ("root", "ring", "tree", "recursive_doubling", "halving_doubling")
DTYPES = (torch.float32, torch.float64, torch.int64)
NODES = ((4, 2), (6, 3))  # ranks, ranks on a node
ROUNDING = 2  # pieces differ by one number where n does not divide the size, once in each half


@cache
def lesson() -> dict:
    """What the lesson defines, by name."""
    return definitions("03")


def numbers(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers that differ between ranks: their sums need no rounding, so any order gives the same bits."""
    return torch.randint(-99, 100, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def run_cases(algorithms: dict[str, Callable]) -> dict:
    """On a rank: every algorithm, size and type; whether the result is right, and the ledger."""
    rank, n, cases = dist.get_rank(), dist.get_world_size(), {}
    for name, algorithm in algorithms.items():
        for numel in {0, 1, n - 1, n, n + 1, 1000}:
            for dtype in DTYPES:
                x = numbers(rank, numel, dtype)
                with record() as ledger:
                    algorithm(x)
                expected = sum(numbers(r, numel, dtype) for r in range(n))
                cases[name, numel, dtype] = torch.equal(x, expected), ledger
    return cases


def prove(algorithms: dict[str, Callable], n: int, cluster: int | TwoLevelCluster) -> None:
    """Run the cases on n ranks; results, steps and bytes of the busiest rank must be those of the formulas."""
    by_rank = launch(run_cases, algorithms, world_size=n, backend="gloo")
    for case in by_rank[0]:
        name, numel, dtype = case
        assert all(cases[case][0] for cases in by_rank), case
        ledgers = [cases[case][1] for cases in by_rank]
        assert not any(entry.is_collective for ledger in ledgers for entry in ledger), case
        assert message_steps(ledgers) == all_reduce_steps(name, cluster), case
        sent = max(ledger.sent for ledger in ledgers) / dtype.itemsize
        assert abs(sent - all_reduce_bytes(name, cluster, numel)) <= ROUNDING, (case, sent)


@pytest.mark.parametrize("n", [1, 3, 4, 6])
def test_algorithms_are_right_for_any_size_and_type_at_their_cost(n):
    prove({name: lesson()[f"{name}_all_reduce"] for name in FLAT}, n, n)


@pytest.mark.parametrize(("n", "per_node"), NODES)
def test_hierarchical_is_right_on_any_nodes_at_its_cost(n, per_node):
    def on_nodes(x):
        hierarchical(x, per_node)

    hierarchical = lesson()["hierarchical_all_reduce"]
    prove({"hierarchical": on_nodes}, n, TwoLevelCluster(n // per_node, per_node, (0.0, 0.0), (0.0, 0.0)))
