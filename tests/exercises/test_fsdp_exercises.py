"""The exercises on FSDP2: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import wrong_fsdp
from exercise_cases import ExerciseTests
from torch import nn

from course_utils import launch
from course_utils.checks import fsdp as fsdp

pytestmark = pytest.mark.guard(90)


def _local_rows(sizes):
    from torch.distributed.fsdp import fully_shard

    return [len(fully_shard(nn.Linear(2, rows, bias=False)).weight.to_local()) for rows in sizes]


def _clipped_by_pytorch():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = fully_shard(nn.Linear(3, 5).double())
    (100 * layer(torch.ones(2, 3).double())).square().sum().backward()
    before = [p.grad.to_local().clone() for p in layer.parameters()]
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0).full_tensor().item()
    return before, norm, [p.grad.to_local().clone() for p in layer.parameters()]


class TestShardedTraining(ExerciseTests):
    checks, mutants = fsdp, wrong_fsdp

    def passes(self, name, answer):
        getattr(fsdp, name)(answer)

    def test_checkpoints_are_divided_as_fsdp_does(self):
        sizes = sorted({rows for rows, _, _ in fsdp._CHECKPOINTS})
        by_rank = launch(_local_rows, sizes, world_size=4, backend="gloo")
        for i, rows in enumerate(sizes):
            assert [got[i] for got in by_rank] == [len(f) for f in fsdp._Files(torch.empty(rows, 2), 4).files]

    def test_clipping_agrees_with_pytorch_on_sharded_parameters(self):
        answer = self.answer("clip_sharded")
        outcomes = launch(_clipped_by_pytorch, world_size=3, backend="gloo")

        def clip():
            gradients = [g.clone() for g in outcomes[dist.get_rank()][0]]
            return float(answer(gradients, [], 1.0)), gradients

        for (norm, gradients), (_, right_norm, right) in zip(
            launch(clip, world_size=3, backend="gloo"), outcomes, strict=True
        ):
            assert norm == pytest.approx(right_norm, rel=1e-12)
            assert all(torch.allclose(g, r, rtol=1e-9, atol=0) for g, r in zip(gradients, right, strict=True))

    def test_clipping_with_a_message_from_one_rank_only_passes(self):
        def clip_sharded(sharded, replicated, max_norm):
            own = [*sharded, *(replicated if dist.get_rank() == 0 else [])]
            squares = torch.tensor([sum(float(g.square().sum()) for g in own)], dtype=torch.float64)
            dist.all_reduce(squares)
            norm = squares.sqrt()
            for gradient in (*sharded, *replicated):
                gradient *= torch.clamp(max_norm / (norm + 1e-6), max=1)
            return norm

        self.passes("clip_sharded", clip_sharded)

    def test_two_level_mesh_from_a_table_of_ranks_passes(self):
        def fewest_internode_bytes(model, nodes, per_node):
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import fully_shard

            ranks = torch.arange(nodes * per_node).view(nodes, per_node)
            fully_shard(model, mesh=DeviceMesh("cpu", ranks, mesh_dim_names=("between", "inside")))

        self.passes("fewest_internode_bytes", fewest_internode_bytes)

    def test_refusal_names_the_ranks_of_a_wrong_group(self):
        wrong = next(m for m in wrong_fsdp.MUTANTS if m.answer.__name__ == "transposed_mesh")
        text = str(self.refusal(wrong.exercise, wrong.answer))
        assert text.startswith("Exercise 2, 6 ranks, 3 nodes of 2, rank 0: the shards are gathered by ranks (0, 2, 4)")

    def test_refusal_of_the_peak_says_what_was_measured(self):
        wrong = next(m for m in wrong_fsdp.MUTANTS if m.answer.__name__ == "four_blocks_a_unit")
        text = str(self.refusal(wrong.exercise, wrong.answer))
        assert re.search(r"7 all-gathers of 11 allowed; the peak is [\d.]+ MB of [\d.]+ MB allowed", text)
