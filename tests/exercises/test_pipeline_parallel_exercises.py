"""The exercises on pipelines: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.distributed as dist
import wrong_pipeline_parallel
from exercise_cases import ExerciseTests

from course_utils import pipeline
from course_utils.checks import pipeline_parallel as pipeline_parallel

pytestmark = pytest.mark.guard(60)

# Greedy: at every moment I first, then F while fewer than 5 activations are held, then W.
GREEDY = (
    "F0 F1 F2 F3 F4 I0 W0 F5 I1 I2 W1 F6 I3 W2 F7 I4 W3 W4 I5 W5 I6 W6 I7 W7",
    "F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 F5 I3 W2 F6 I4 W3 F7 I5 W4 W5 I6 W6 I7 W7",
    "F0 F1 F2 F3 I0 F4 I1 W0 I2 W1 W2 I3 F5 I4 W3 F6 I5 W4 F7 I6 W5 W6 I7 W7",
    "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 F6 I6 W2 F7 I7 W3 W4 W5 W6 W7",
)


def schedule_of(name, ranks, microbatches, virtual):
    more = (virtual,) if name == "interleaved" else ()
    return pipeline.SCHEDULES[name](ranks, microbatches, *more)


class TestPipeline(ExerciseTests):
    checks, mutants = pipeline_parallel, wrong_pipeline_parallel

    def passes(self, name, answer):
        getattr(pipeline_parallel, name)(answer)

    def test_order_of_the_package_passes(self):
        def one_f_one_b_order(rank, ranks, microbatches):
            return [(op.kind, op.microbatch) for op in pipeline.one_f_one_b(ranks, microbatches).order[rank]]

        self.passes("one_f_one_b_order", one_f_one_b_order)

    def test_micro_batches_in_another_order_pass(self):
        def one_f_one_b_order(rank, ranks, microbatches):
            """Counts from the last micro-batch down: the numbers mean nothing."""
            ops = pipeline.one_f_one_b(ranks, microbatches).order[rank]
            return tuple([op.kind, microbatches - 1 - op.microbatch] for op in ops)

        self.passes("one_f_one_b_order", one_f_one_b_order)

    def test_gpipe_with_one_backward_for_all_losses_passes(self):
        def run_gpipe(stage, inputs, targets, loss_fn, like):
            rank, n = dist.get_rank(), dist.get_world_size()
            xs, ys, works, loss = list(inputs), [], [], None
            if rank:
                xs = [torch.empty_like(like) for _ in inputs]
                receives = [dist.irecv(x, rank - 1) for x in xs]
            for i, x in enumerate(xs):
                if rank:
                    receives[i].wait()
                    x.requires_grad_()
                ys.append(stage(x))
                if rank < n - 1:
                    works.append(dist.isend(ys[-1], rank + 1))
            if rank == n - 1:
                loss = torch.stack([loss_fn(y, target) for y, target in zip(ys, targets, strict=True)]).mean()
                loss.backward()
            for x, y in zip(xs, ys, strict=True):
                if rank < n - 1:
                    gradient = torch.empty_like(y)
                    dist.recv(gradient, rank + 1)
                    torch.autograd.backward([y], [gradient])
                if rank:
                    works.append(dist.isend(x.grad, rank - 1))
            for work in works:
                work.wait()
            return None if loss is None else loss.item()

        self.passes("run_gpipe", run_gpipe)

    def test_gpipe_may_come_back_as_soon_as_it_can(self):
        run_order = self.answer("run_order")

        def run_gpipe(stage, inputs, *rest):
            ops = pipeline.one_f_one_b(dist.get_world_size(), len(inputs)).order[dist.get_rank()]
            return run_order(stage, [(op.kind, op.microbatch) for op in ops], inputs, *rest)

        self.passes("run_gpipe", run_gpipe)

    def test_order_with_batched_operations_passes(self):
        def run_order(stage, order, inputs, targets, loss_fn, like):
            rank, n, m = dist.get_rank(), dist.get_world_size(), len(inputs)
            kept, works, total = {}, [], 0.0

            def start(op, tensor, peer):
                return dist.batch_isend_irecv([dist.P2POp(op, tensor, peer)])

            def received(peer):
                tensor = torch.empty_like(like)
                for work in start(dist.irecv, tensor, peer):
                    work.wait()
                return tensor

            for kind, i in order:
                if kind == "F":
                    x = inputs[i] if rank == 0 else received(rank - 1).requires_grad_()
                    y = stage(x)
                    if rank == n - 1:
                        y = loss_fn(y, targets[i]) / m
                        total += y.item()
                    else:
                        works += start(dist.isend, y.detach(), rank + 1)
                    kept[i] = [x, y]
                else:
                    y = kept[i].pop()
                    y.backward(received(rank + 1) if rank < n - 1 else None)
                    if rank:
                        works += start(dist.isend, kept[i][0].grad, rank - 1)
                    del kept[i]
            for work in works:
                work.wait()
            return total if rank == n - 1 else None

        self.passes("run_order", run_order)

    def test_any_best_cut_passes(self):
        def balance(costs, stages):
            """The last of the best cuts, by trying all."""
            best, found = float("inf"), None
            for ends in itertools.combinations(range(1, len(costs)), stages - 1):
                places = [0, *ends, len(costs)]
                dearest = max(sum(costs[a:b]) for a, b in itertools.pairwise(places))
                if dearest <= best + 1e-9:
                    best, found = dearest, [b - a for a, b in itertools.pairwise(places)]
            return found

        self.passes("balance", balance)
        self.passes("balance", pipeline.partition)

    def test_formulas_are_those_of_the_simulation(self):
        def bubble(schedule, ranks, microbatches, virtual, gb):
            timeline = pipeline.simulate(schedule_of(schedule, ranks, microbatches, virtual))
            return 100 * timeline.bubble, gb * timeline.peak[0]

        def enough_microbatches(ranks, virtual, percent):
            step, name = (ranks, "interleaved") if virtual > 1 else (1, "1F1B")
            low, high = 0, 1  # in steps
            while True:
                bubbles = pipeline.simulate(schedule_of(name, ranks, high * step, virtual)).bubble
                if 100 * bubbles <= percent:
                    break
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                bubbles = pipeline.simulate(schedule_of(name, ranks, middle * step, virtual)).bubble
                low, high = (low, middle) if 100 * bubbles <= percent else (middle, high)
            return high * step

        self.passes("bubble", bubble)
        self.passes("enough_microbatches", enough_microbatches)

    def test_other_schedule_that_meets_the_target_passes(self, capsys):
        self.passes("own_schedule", lambda: [[(op[0], int(op[1:])) for op in ops.split()] for ops in GREEDY])
        assert capsys.readouterr().out == "Exercise 7 passed: 59 ms, activations 5, 5, 5, 5.\n"

    def test_table_of_the_puzzle_is_what_the_simulation_says(self):
        for name, seconds, peak in (("1F1B", 66, 4), ("ZB-H1", 60, 4), ("ZB-H2", 57, 7)):
            schedule = pipeline.SCHEDULES[name](pipeline_parallel.RANKS, pipeline_parallel.COUNT)
            timeline = pipeline.simulate(schedule, pipeline_parallel.TARGET)
            assert (timeline.seconds, max(timeline.peak)) == (seconds, peak)

    def test_refusals_name_time_memory_and_who_waits(self):
        def text(name):
            wrong = next(m for m in wrong_pipeline_parallel.MUTANTS if m.answer.__name__ == name)
            return str(self.refusal(wrong.exercise, wrong.answer))

        slow = text("zero_bubble_h1")
        assert "the step takes 60 ms; the target is 59 ms" in slow
        assert re.search(r"rank \d waits \d+ ms for I\d, until \d+ ms", slow)
        assert "rank 0: 7 activations are held at a time; the target is 5." in text("zero_bubble_h2")
        odd = text("deadlock_for_odd_stages")
        assert "3 ranks, 6 micro-batches: the ranks wait for each other: rank 0 at B0, rank 1 at F3, rank 2 at" in odd
        assert "rank 0: 3 micro-batches are held at a time; the target is 2." in text("one_forward_too_many")
        assert "4 micro-batches are in memory at a time; the order needs 2." in text("graphs_kept")
