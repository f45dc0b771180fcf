"""The exercises on tensor parallelism: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import wrong_tensor_parallel
from exercise_cases import ExerciseTests

from course_utils.checks import tensor_parallel as tensor_parallel

pytestmark = pytest.mark.guard(60)


class TestTensorParallelism(ExerciseTests):
    checks, mutants = tensor_parallel, wrong_tensor_parallel

    def passes(self, name, answer):
        getattr(tensor_parallel, name)(answer)

    def test_mlp_with_a_hook_instead_of_f_passes(self):
        g = self.answer("g")

        def column_row_mlp(x, up, up_bias, down, down_bias):
            branch = x.view_as(x)

            def add_up(gradient):
                whole = gradient.clone()
                dist.all_reduce(whole)
                return whole

            branch.register_hook(add_up)
            return g(F.gelu(branch @ up.T + up_bias) @ down.T) + down_bias

        self.passes("column_row_mlp", column_row_mlp)

    def test_attention_by_matrix_products_passes(self):
        f, g = self.answer("f"), self.answer("g")

        def head_attention(x, qkv, out, heads, kv_heads):
            rank, t = dist.get_rank(), dist.get_world_size()
            d, group = len(qkv) // (heads + 2 * kv_heads), heads // kv_heads
            x, length = f(x), x.shape[1]
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            y = 0
            for head in range(rank * heads // t, (rank + 1) * heads // t):
                places = (head, heads + head // group, heads + kv_heads + head // group)
                q, k, v = (x @ qkv[place * d : (place + 1) * d].T for place in places)
                scores = (q @ k.transpose(1, 2) / d**0.5).masked_fill(later, -torch.inf)
                y = y + scores.softmax(-1) @ v @ out[:, head * d : (head + 1) * d].T
            return g(y)

        self.passes("head_attention", head_attention)

    def test_loss_with_a_backward_by_hand_passes(self):
        class Loss(torch.autograd.Function):
            @staticmethod
            def forward(ctx, logits, targets, first):
                top = logits.amax(1)
                dist.all_reduce(top, op=dist.ReduceOp.MAX)
                powers, local = (logits - top[:, None]).exp(), targets - first
                hit = torch.zeros_like(logits)
                rows = ((local >= 0) & (local < logits.shape[1])).nonzero().flatten()
                hit[rows, local[rows]] = 1
                total, target = sums = torch.stack([powers.sum(1), (logits * hit).sum(1)])
                dist.all_reduce(sums)
                ctx.save_for_backward((powers / total[:, None] - hit) / len(targets))
                return (total.log() + top - target).mean()

            @staticmethod
            def backward(ctx, dy):
                return dy * ctx.saved_tensors[0], None, None

        def vocab_parallel_loss(logits, targets, first):
            return Loss.apply(logits, targets, first)

        self.passes("vocab_parallel_loss", vocab_parallel_loss)

    def test_embedding_with_a_row_of_zeros_passes(self):
        g = self.answer("g")

        def vocab_parallel_embedding(tokens, weight, first):
            padded = F.pad(weight, (0, 0, 0, 1))
            local = tokens - first
            outside = (local < 0) | (local >= len(weight))
            return g(padded[local.masked_fill(outside, len(weight))])

        self.passes("vocab_parallel_embedding", vocab_parallel_embedding)

    def test_sequence_parallel_norm_with_lists_of_parts_passes(self):
        def gathered(x):
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x.contiguous())
            return torch.cat(parts)

        def scattered(x):
            parts = [part.contiguous() for part in x.chunk(dist.get_world_size())]
            dist.reduce_scatter(part := torch.empty_like(parts[0]), parts)
            return part

        class Gather(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return gathered(x)

            @staticmethod
            def backward(ctx, dy):
                return scattered(dy)

        class Scatter(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return scattered(x)

            @staticmethod
            def backward(ctx, dy):
                return gathered(dy)

        def sequence_parallel_norm(x, gain, up, down):
            whole_gain = gain.view_as(gain)

            def add_up(gradient):
                whole = gradient.clone()
                dist.all_reduce(whole)
                return whole

            whole_gain.register_hook(add_up)
            normed = F.rms_norm(x, x.shape[-1:], whole_gain)
            return Scatter.apply(F.gelu(Gather.apply(normed) @ up.T) @ down.T)

        self.passes("sequence_parallel_norm", sequence_parallel_norm)

    def test_refusals_name_gradient_rank_and_bytes(self):
        def text(name):
            wrong = next(m for m in wrong_tensor_parallel.MUTANTS if m.answer.__name__ == name)
            return str(self.refusal(wrong.exercise, wrong.answer))

        assert text("f_forgotten").startswith("Exercise 1, 2 ranks, an MLP, rank 0: the gradient of x is wrong.")
        assert re.search(r"rank 0: 480 bytes travel; 3 numbers a token are 120\.", text("logits_gathered"))
