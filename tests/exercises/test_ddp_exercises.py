"""The exercises on data parallelism: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import wrong_ddp
from exercise_cases import ExerciseTests

from course_utils.checks import ddp as ddp

pytestmark = pytest.mark.guard(60)


class TestDataParallelism(ExerciseTests):
    checks, mutants = ddp, wrong_ddp

    def passes(self, name, answer):
        getattr(ddp, name)(answer)

    def test_mean_taken_by_the_library_passes(self):
        def data_parallel(module):
            for tensor in module.state_dict().values():  # a tied weight twice, which costs but is right
                dist.broadcast(tensor, src=0)

            def finish():
                for p in module.parameters():
                    if p.requires_grad:
                        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)

            return finish

        self.passes("data_parallel", data_parallel)

    def test_buckets_may_be_filled_in_forward_order(self):
        same_start, start = self.answer("data_parallel"), self.answer("start_bucket")
        fill = self.answer("in_buckets")

        def forward_order(module, bucket_bytes):
            same_start(module)
            buckets = fill([p for p in module.parameters() if p.requires_grad], bucket_bytes)
            return lambda: [start(bucket)() for bucket in buckets]

        self.passes("bucketed", forward_order)

    def test_overlapped_buckets_are_buckets_too(self):
        self.passes("bucketed", self.answer("overlapped"))

    def test_accumulation_without_no_sync_but_with_as_few_bytes_passes(self):
        def accumulate(model, batches):
            samples = sum(len(x) for x, _ in batches)
            for x, y in batches:
                (F.mse_loss(model.module(x), y) * len(x) / samples / dist.get_world_size()).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)

        self.passes("accumulate", accumulate)

    def test_asking_in_every_step_whether_anybody_goes_on_passes(self):
        def uneven_epoch(module, optimizer, batches):
            step = 0
            while True:
                x, y = batches[step] if step < len(batches) else (torch.empty(0, 5), torch.empty(0, 3))
                samples = torch.tensor(float(len(x)), dtype=torch.float64)
                dist.all_reduce(samples)
                if not samples:
                    return
                module.zero_grad()
                (F.mse_loss(module(x.double()), y.double(), reduction="sum") / 3 / samples).backward()
                for p in module.parameters():
                    dist.all_reduce(p.grad)
                optimizer.step()
                step += 1

        self.passes("uneven_epoch", uneven_epoch)

    def test_refusal_says_where_one_process_and_the_rank_part(self):
        wrong = next(m for m in wrong_ddp.MUTANTS if m.answer.__name__ == "sum_instead_of_mean")
        text = str(self.refusal(wrong.exercise, wrong.answer))
        assert text.startswith("Exercise 1, 2 ranks, a plain model, rank 0: step 1: the gradient of embedding.weight")
        assert re.search(r"one process  shape \(8, 6\): .*\n  this rank    shape \(8, 6\): ", text)
