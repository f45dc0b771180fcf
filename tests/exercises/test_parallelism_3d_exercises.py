"""The exercises on 3-D parallelism: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import wrong_parallelism_3d
from exercise_cases import ExerciseTests

from course_utils import planner, recorded
from course_utils.checks import parallelism_3d as parallelism_3d

pytestmark = pytest.mark.guard(60)


class Sum(torch.autograd.Function):
    """The sum over a group on the way there or on the way back."""

    @staticmethod
    def forward(ctx, x, group, there):
        ctx.group, ctx.there = group, there
        y = x.clone()
        if there:
            dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        if not ctx.there:
            dist.all_reduce(dy, group=ctx.group)
        return dy, None, None


class TestParallelism(ExerciseTests):
    checks, mutants = parallelism_3d, wrong_parallelism_3d

    def passes(self, name, answer):
        getattr(parallelism_3d, name)(answer)

    def refused_with(self, name):
        wrong = next(m for m in wrong_parallelism_3d.MUTANTS if m.answer.__name__ == name)
        return str(self.refusal(wrong.exercise, wrong.answer))

    def test_groups_of_the_planner_and_of_a_loop_pass(self):
        def mesh_groups(sizes):
            """Collects the ranks that agree in all other coordinates, in another order."""
            names, found = list(sizes), {name: {} for name in sizes}
            for rank in reversed(range(math.prod(sizes.values()))):
                rest, place = rank, {}
                for name in reversed(names):
                    rest, place[name] = divmod(rest, sizes[name])
                for name in names:
                    others = tuple(v for k, v in place.items() if k != name)
                    found[name].setdefault(others, []).append(rank)
            return {name: list(lines.values()) for name, lines in found.items()}

        self.passes("mesh_groups", mesh_groups)
        self.passes("mesh_groups", planner.mesh_groups)

    def test_groups_known_by_their_ranks_pass(self):
        def make_groups(lists):
            rank, mine = dist.get_rank(), {}
            for name, lines in lists.items():
                (ranks,) = (line for line in lines if rank in line)
                mine[name] = dist.new_group(ranks, use_local_synchronization=True)
            return mine

        self.passes("make_groups", make_groups)

    def test_groups_by_enumeration_pass(self):
        def make_groups(lists):
            return {name: dist.new_subgroups_by_enumeration(lines)[0] for name, lines in lists.items()}

        self.passes("make_groups", make_groups)

    def test_order_built_from_inside_out_passes(self):
        def node_order(sizes, gigabytes, gpus_per_node):
            """Looks for the order without a mesh: a step of `stride` ranks, counted in every ring."""
            names = list(sizes)

            def cost(order):
                stride, total = 1, 0
                for name in reversed(order):
                    size = sizes[name]
                    for rank in range(math.prod(sizes.values())):
                        last = rank // stride % size == size - 1
                        following = rank - (size - 1) * stride if last else rank + stride
                        total += gigabytes[name] * (rank // gpus_per_node != following // gpus_per_node)
                    stride *= size
                return total

            orders = [[]]
            for _ in names:
                orders = [[name, *order] for order in orders for name in names if name not in order]
            return min(orders, key=cost)

        self.passes("node_order", node_order)

    def test_hybrid_training_on_a_device_mesh_with_an_optimizer_passes(self):
        def hybrid_training(weights, batches, lr, gpus_per_node):
            shape = dist.get_world_size() // gpus_per_node, gpus_per_node
            mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("node", "gpu"))
            (node, gpu), tp, dp = mesh.get_coordinate(), mesh.get_group("gpu"), mesh.get_group("node")
            gain = weights["gain"].clone().requires_grad_()
            up = weights["up"].chunk(gpus_per_node)[gpu].clone().requires_grad_()
            down = weights["down"].chunk(gpus_per_node, 1)[gpu].clone().requires_grad_()
            optimizer, losses = torch.optim.SGD([gain, up, down], lr), []
            for x, target in batches:
                x, target = x.chunk(shape[0])[node], target.chunk(shape[0])[node]
                inner = F.gelu(F.linear(Sum.apply(x * gain, tp, False), up))
                loss = F.mse_loss(x + Sum.apply(F.linear(inner, down), tp, True), target) / shape[0]
                optimizer.zero_grad()
                loss.backward()
                flat = torch.cat([p.grad.flatten() for p in (gain, up, down)] + [loss.detach()[None]])
                dist.all_reduce(flat, group=dp)
                parts = flat.split([gain.numel(), up.numel(), down.numel(), 1])
                for p, part in zip((gain, up, down), parts, strict=False):
                    p.grad.copy_(part.view_as(p))
                losses.append(parts[-1].item())
                optimizer.step()
            return torch.tensor(losses), {"gain": gain, "up": up, "down": down}

        self.passes("hybrid_training", hybrid_training)

    def test_norm_reduced_to_one_rank_and_sent_back_passes(self):
        def clip_gradients(gradients, copies, groups, limit):
            """One rank of each group of copies counts."""
            total = torch.zeros((), dtype=torch.float64)
            for gradient, names in zip(gradients, copies, strict=True):
                if all(dist.get_rank(groups[name]) == 0 for name in names):
                    total += gradient.norm() ** 2
            dist.reduce(total, 0)
            dist.broadcast(total, 0)
            norm = total.sqrt()
            torch._foreach_mul_(gradients, min(1.0, (limit / (norm + 1e-6)).item())) if gradients else None
            return norm

        self.passes("clip_gradients", clip_gradients)

    def test_norm_in_single_precision_passes(self):
        def clip_gradients(gradients, copies, groups, limit):
            """Nothing asks for more than the gradients' own precision; ranks without any add a plain zero."""
            total = torch.tensor(0.0)
            for gradient, names in zip(gradients, copies, strict=True):
                total += (gradient**2).sum() / math.prod(groups[name].size() for name in names)
            dist.all_reduce(total)
            norm = total.sqrt()
            for gradient in gradients:
                gradient *= (limit / (norm + 1e-6)).clamp(max=1.0)
            return norm.item()

        self.passes("clip_gradients", clip_gradients)

    def test_loss_averaged_over_all_ranks_passes(self):
        def hybrid_training(*case):
            return wrong_parallelism_3d._hybrid(
                *case,
                losses=lambda loss, dp, nodes: wrong_parallelism_3d._summed(loss, None).item() / dist.get_world_size(),
            )

        self.passes("hybrid_training", hybrid_training)

    def test_layouts_of_the_check_are_judged_as_the_planner_does(self):
        for name, gpus, layout, batch, _ in parallelism_3d._LAYOUTS:
            model, cluster = planner.MODELS[name], planner.cluster(parallelism_3d._MACHINE, gpus)
            found = parallelism_3d._reasons(model, cluster, layout, batch)
            assert bool(found) == bool(planner.legal(model, cluster, layout, batch))
            assert found <= {"gpus", "heads", "layers", "batch", "interleaving", "memory"}

    def test_the_planners_own_best_passes_the_puzzle(self):
        self.passes("plan_70b", lambda: parallelism_3d.best_70b().layout)

    def test_other_layouts_than_the_solution_pass_the_puzzle(self):
        name, machine, gpus, batch = parallelism_3d.PUZZLE
        found = planner.search(planner.MODELS[name], planner.cluster(machine, gpus), batch, cp=1)
        enough = parallelism_3d.SHARE * found.plans[0].seconds
        fits = [p for p in found.plans if p.seconds <= enough and p.memory.total <= parallelism_3d.LIMIT]
        degrees = {p.layout.degrees for p in fits}
        assert len(degrees) > 1

    def test_refusals_name_ranks_bytes_and_seconds(self):
        turned = self.refused_with("mesh_turned")
        assert "2 nodes with 2 GPUs each, rank 1: this rank holds part 0 of the weights" in turned
        gathered = self.refused_with("gradients_gathered")
        assert "bytes leave this rank for the other nodes; 1,896 are enough" in gathered
        wishes = "rank 0: [0, 2], rank 1: [1, 3], rank 2: [0, 2], rank 3: [1, 3]"
        assert wishes in self.refused_with("only_its_own")
        assert re.search(r"the norm is \d+\.\d+; expected \d+\.\d+", self.refused_with("copies_counted_twice"))
        assert re.search(r"compute +\d+\.\d\d s   best +\d+\.\d\d s", self.refused_with("computed_twice"))

    def test_misprint_is_found_by_the_solution(self):
        why_not = self.answer("why_not")
        assert why_not(*planner.of_run(recorded.LLAMA3_MISPRINT)) == {"gpus"}
        assert not any(why_not(*planner.of_run(run)) for run in recorded.LLAMA3_RUNS)
