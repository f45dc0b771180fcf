"""The exercises on scaling: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import wrong_scaling
from exercise_cases import ExerciseTests

from course_utils.checks import scaling as scaling

pytestmark = pytest.mark.guard(60)


class TestScaling(ExerciseTests):
    checks, mutants = scaling, wrong_scaling

    def test_indices_of_four_bytes_and_a_list_of_parts_pass(self):
        def top_k_mean(gradient, residual, k):
            total = gradient + residual
            indices = total.flatten().abs().topk(k).indices.int()
            values = total.flatten()[indices.long()]
            residual[:] = total
            residual.view(-1)[indices.long()] = 0
            n, mean = dist.get_world_size(), torch.zeros_like(total).flatten()
            parts = [[torch.empty_like(x) for _ in range(n)] for x in (values, indices)]
            dist.all_gather(parts[0], values)
            dist.all_gather(parts[1], indices)
            for part, where in zip(*parts, strict=True):
                mean[where.long()] += part / n
            return mean.view_as(gradient)

        scaling.top_k_mean(top_k_mean, timeout=30.0)

    def test_formula_for_the_number_of_buckets_passes(self):
        def best_buckets(size, tensors, backward_ms, ranks, us, gigabits):
            """As the text says below the hints, with the next whole numbers tried."""
            backward, latency = backward_ms * 1e-3, 2 * (ranks - 1) * us * 1e-6
            rest = 2 * (ranks - 1) / ranks * size * 8 / (gigabits * 1e9)

            def finish(n):
                one = latency + rest / n
                return backward / n + (n - 1) * max(backward / n, one) + one

            n = max(math.sqrt(backward / latency), (backward - rest) / latency if rest < backward else 0)
            n = min((min(tensors, max(1, k)) for k in (math.floor(n), math.ceil(n))), key=finish)
            return n, 1e3 * finish(n)

        scaling.best_buckets(best_buckets)
