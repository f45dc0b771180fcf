"""Pipeline schedules: activations are those of the papers, wrong schedules are refused with the reason.

Bubbles are compared with the papers' formulas where the explorer shows them (`tests/figures/test_explorers.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from lessons.pipeline_parallel.pipeline import (
    SCHEDULES,
    Costs,
    Op,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    partition,
    simulate,
    zero_bubble_h1,
    zero_bubble_h2,
)

RANKS = (1, 2, 3, 4, 7, 8)


class TestMemory:
    def test_activations_in_flight(self):
        for p, m in itertools.product(RANKS, (1, 3, 8, 33)):
            assert simulate(naive(p, m)).peak == [1] * p
            assert simulate(gpipe(p, m)).peak == [m] * p
            assert simulate(one_f_one_b(p, m)).peak == [min(m, p - rank) for rank in range(p)]

    def test_zero_bubble_holds_p_or_twice_p(self):
        for p in RANKS:
            assert simulate(zero_bubble_h1(p, 3 * p)).peak == [p] * p
            assert simulate(zero_bubble_h2(p, 3 * p)).peak == [2 * p - 1] * p


class TestOrder:
    @pytest.mark.parametrize("name", SCHEDULES)
    @pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (3, 9), (4, 4), (8, 16)])
    def test_operations_follow_what_they_need(self, name, p, m):
        run = simulate(SCHEDULES[name](p, m), Costs(transfer=0.3))
        end = {span.op: span.end for spans in run.spans for span in spans}
        for spans in run.spans:
            assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
            for (kind, stage, i), start, _ in spans:
                if kind == "F" and stage:
                    assert start >= end[Op("F", stage - 1, i)]
                if kind in "BI":
                    assert start >= end[Op("F", stage, i)]
                    if stage + 1 < run.schedule.stages:
                        assert start >= end[Op(kind, stage + 1, i)]

    @pytest.mark.parametrize(
        ("name", "schedule", "virtual"),
        [("GPipe", gpipe, 1), ("1F1B", one_f_one_b, 1), ("Interleaved1F1B", interleaved, 2)],
    )
    def test_order_is_that_of_torch(self, name, schedule, virtual):
        listed = get_schedule_ops(name, 4, 8, virtual)
        if name == "1F1B":
            listed = listed[:-1]  # torch 2.13 lists the last rank's wrongly
        own = [[str(op) for op in ops] for ops in schedule(4, 8, *[virtual] * (virtual > 1)).order]
        actions = [[str(action) for action in ops if action] for ops in listed]
        assert [[a for a in ops if "REDUCE_GRAD" not in a] for ops in actions] == own[: len(listed)]


def changed(schedule, change):
    """`schedule` with another list of operations of each rank."""
    return dataclasses.replace(schedule, order=tuple(tuple(ops) for ops in change(*map(list, schedule.order))))


class TestRefusals:
    @pytest.mark.parametrize(
        ("schedule", "change", "says"),
        [
            (gpipe(2, 3), lambda a, b: (a, b[:-1]), "stage 1, micro-batch 2: needs F and B, or F, I and W, has F"),
            (one_f_one_b(2, 2), lambda a, b: (b, a), "rank 0: 1F0 belongs to rank 1"),
            # rank 0's first backward waits for that of rank 1, which waits for a second forward
            (gpipe(2, 2), lambda a, b: (a[::2] + a[1::2], b), "wait for each other: rank 0 at 0B0, rank 1 at 1F1"),
        ],
    )
    def test_orders_that_cannot_run(self, schedule, change, says):
        with pytest.raises(ValueError, match=says):
            simulate(changed(schedule, change))

    def test_interleaving_needs_whole_groups(self):
        with pytest.raises(ValueError, match="multiple of 4 micro-batches, got 6"):
            interleaved(4, 6)

class TestPartition:
    def test_no_cut_is_better(self):
        def dearest(costs, cuts):
            return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))

        draw = random.Random(0)
        for _ in range(20):
            costs = [draw.randint(1, 9) for _ in range(draw.randint(1, 9))]
            stages = draw.randint(1, len(costs))
            best = min(dearest(costs, cuts) for cuts in itertools.combinations(range(1, len(costs)), stages - 1))
            sizes = partition(costs, stages)
            assert len(sizes) == stages and min(sizes) > 0 and sum(sizes) == len(costs), costs
            assert dearest(costs, list(itertools.accumulate(sizes))[:-1]) == best, costs
