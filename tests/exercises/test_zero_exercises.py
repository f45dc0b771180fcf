"""The exercises on ZeRO: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import wrong_zero
from exercise_cases import ExerciseTests
from torch import nn

from course_utils.checks import zero as zero
from course_utils.memory import model_states

pytestmark = pytest.mark.guard(60)


class TestZero(ExerciseTests):
    checks, mutants = zero, wrong_zero

    def passes(self, name, answer):
        getattr(zero, name)(answer)

    def test_formula_of_the_package_passes(self):
        def state_bytes(parameters, stage, ranks, precision, optimizer):
            memory = model_states(parameters, stage=stage, ranks=ranks, precision=precision, optimizer=optimizer)
            return memory.parameters / 1e9, memory.gradients / 1e9, memory.optimizer / 1e9

        self.passes("state_bytes", state_bytes)

    def test_parameters_that_are_views_of_one_flat_tensor_pass(self):
        def shard_optimizer(module, make_optimizer):
            rank, n = dist.get_rank(), dist.get_world_size()
            for p in module.parameters():
                dist.broadcast(p.detach(), src=0)
            trained = [p for p in module.parameters() if p.requires_grad]
            numels = [p.numel() for p in trained]
            size = -(-sum(numels) // n)
            padding = n * size - sum(numels)

            def flat_of(tensors):
                return F.pad(torch.cat([t.detach().flatten() for t in tensors]), (0, padding))

            flat = flat_of(trained)
            for p, piece in zip(trained, flat.split([*numels, padding]), strict=False):
                p.data = piece.view_as(p)
            part = nn.Parameter(flat.chunk(n)[rank])
            optimizer = make_optimizer([part])

            def step():
                part.grad = flat_of([p.grad for p in trained]).chunk(n)[rank].clone()
                optimizer.step()
                part.grad = None
                dist.all_gather(list(flat.chunk(n)), part.detach().clone())

            return step

        self.passes("shard_optimizer", shard_optimizer)

    def test_list_of_parts_and_mean_taken_afterwards_pass(self):
        def reduce_scatter_gradients(module):
            n, shards = dist.get_world_size(), {}

            def arrive(p):
                flat = p.grad.new_zeros(-(-p.numel() // n) * n)
                flat[: p.numel()] = p.grad.flatten()
                parts = list(flat.chunk(n))
                shard = torch.empty_like(parts[0])
                dist.reduce_scatter(shard, parts)
                shards[p] = shards.get(p, 0) + shard / n
                p.grad = None

            for p in module.parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(arrive)
            return shards

        self.passes("reduce_scatter_gradients", reduce_scatter_gradients)

    def test_layer_with_hooks_on_what_autograd_saves_passes(self):
        def gather(shard, shape):
            flat = shard.new_empty(dist.get_world_size() * len(shard))
            dist.all_gather_single(flat, shard.detach())
            return flat[: shape[0] * shape[1]].view(shape)

        class Gather(torch.autograd.Function):
            @staticmethod
            def forward(ctx, shard, shape):
                ctx.numel = len(shard)
                return gather(shard, shape)

            @staticmethod
            def backward(ctx, gradient):
                part, n = gradient.new_empty(ctx.numel), dist.get_world_size()
                dist.reduce_scatter_single(part, F.pad(gradient.flatten(), (0, n * ctx.numel - gradient.numel())) / n)
                return part, None

        def gathered_layer(x, shard, shape):
            weight = Gather.apply(shard, shape)
            place = weight.data_ptr()

            def pack(t):
                return (t.shape, t.stride()) if t.data_ptr() == place else t

            def unpack(packed):
                return packed if isinstance(packed, torch.Tensor) else gather(shard, shape).as_strided(*packed)

            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return F.linear(x, weight)

        self.passes("gathered_layer", gathered_layer)

    def test_refusals_name_the_bytes_that_are_too_many(self):
        def text(name):
            wrong = next(m for m in wrong_zero.MUTANTS if m.answer.__name__ == name)
            return str(self.refusal(wrong.exercise, wrong.answer))

        start = "Exercise 2, 2 ranks, a plain model, momentum, rank 0: step 1: the optimizer's states have 1776 bytes"
        assert text("optimizer_state_on_every_rank").startswith(f"{start}; a share has 888.")
        assert re.search(
            r"\d+ bytes are alive after forward, .* one weight has 12160\.", text("parameters_never_freed")
        )
