"""The solutions of the exercises of lesson 12; what stands between the marks is what a learner writes."""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_utils import memory
from course_utils.transformer import TransformerConfig
from lessons.parallelism_3d import planner


def mesh_groups(sizes: dict[str, int]) -> dict[str, list[list[int]]]:
    """For each dimension, all its groups of ranks.

    `sizes` has the dimensions in order, the last changes fastest: {"pp": 2, "dp": 2, "tp": 2}.
    Its tp groups are [0, 1], [2, 3], [4, 5] and [6, 7].
    """
    ### BEGIN SOLUTION
    world, stride, groups = 1, 1, {}
    for size in sizes.values():
        world *= size
    for name, size in reversed(sizes.items()):
        firsts = [rank for rank in range(world) if rank // stride % size == 0]
        groups[name] = [[first + k * stride for k in range(size)] for first in firsts]
        stride *= size
    return groups
    ### END SOLUTION


def traffic(
    layers: int, hidden: int, length: int, parameters: float,
    tp: int, pp: int, dp: int, batch: int, microbatch: int,
) -> tuple[float, float, float, float]:  # fmt: skip
    """Bubble in per cent of all the time; GB that a GPU sends in a step for tp, pp and dp.

    `batch` counts the sequences of a step on all GPUs, `microbatch` those of one micro-batch.
    Without ranks in a dimension (1) nothing is sent for it.
    """
    ### BEGIN SOLUTION
    count = batch / (dp * microbatch)
    activation = 2 * microbatch * length * hidden
    tensor = count * layers / pp * 4 * 2 * (tp - 1) / tp * activation
    pipeline = count * 2 * activation if pp > 1 else 0
    data = 2 * (dp - 1) / dp * 2 * parameters / (tp * pp)
    return 100 * (pp - 1) / (count + pp - 1), tensor / 1e9, pipeline / 1e9, data / 1e9
    ### END SOLUTION


def node_order(
    sizes: dict[str, int], gigabytes: dict[str, float], gpus_per_node: int
) -> tuple[str, ...]:
    """The names of the dimensions in the best order; the last one changes fastest.

    `gigabytes` says for each dimension what a rank sends to the next rank of its group.
    """

    ### BEGIN SOLUTION
    def between_nodes(order):
        groups = mesh_groups({name: sizes[name] for name in order})
        total = 0
        for name, lines in groups.items():
            for line in lines:
                for rank, following in zip(line, line[1:] + line[:1], strict=True):
                    if rank // gpus_per_node != following // gpus_per_node:
                        total += gigabytes[name]
        return total

    return min(itertools.permutations(sizes), key=between_nodes)
    ### END SOLUTION


def summed(x, group):
    """The sum of a tensor over the ranks of a group, in a new tensor."""
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def copy_to(x, group):
    """f: x itself; on the way back its gradient is summed over the group."""
    y = x.view_as(x)
    y.register_hook(lambda gradient: summed(gradient, group))
    return y


def sum_over(x, group):
    """g: the sum of x over the group; its gradient goes back to every rank unchanged."""
    return x + (summed(x, group) - x).detach()


def hybrid_training(weights, batches, lr, gpus_per_node):
    """Train on all ranks; the losses of the whole batches, and this rank's trained weights."""
    ### BEGIN SOLUTION
    nodes = dist.get_world_size() // gpus_per_node
    node, gpu = divmod(dist.get_rank(), gpus_per_node)
    mesh = dist.init_device_mesh("cpu", (nodes, gpus_per_node), mesh_dim_names=("dp", "tp"))
    groups = {name: mesh.get_group(name) for name in ("dp", "tp")}
    own = {
        "gain": weights["gain"].clone(),
        "up": weights["up"].chunk(gpus_per_node)[gpu].clone(),
        "down": weights["down"].chunk(gpus_per_node, dim=1)[gpu].clone(),
    }
    parameters, losses = [w.requires_grad_() for w in own.values()], []
    for x, target in batches:
        x, target = x.chunk(nodes)[node], target.chunk(nodes)[node]
        inner = F.gelu(F.linear(copy_to(x * own["gain"], groups["tp"]), own["up"]))
        y = x + sum_over(F.linear(inner, own["down"]), groups["tp"])
        loss = F.mse_loss(y, target)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for w, gradient in zip(parameters, gradients, strict=True):
                w -= lr * summed(gradient, groups["dp"]) / nodes
        losses.append(summed(loss, groups["dp"]).item() / nodes)
    return losses, {name: w.detach() for name, w in own.items()}
    ### END SOLUTION


def clip_gradients(
    gradients: list[torch.Tensor], copies: list[tuple[str, ...]],
    groups: dict[str, dist.ProcessGroup], limit: float,
) -> float:  # fmt: skip
    """The norm of the whole model's gradients; then scales them in place if it is above the limit.

    `copies` has for each gradient the dimensions along which every rank of the group holds the
    same. `groups` has this rank's process group of each dimension; all ranks together are the
    default group.
    """
    ### BEGIN SOLUTION
    total = torch.zeros((), dtype=torch.float64)
    for gradient, names in zip(gradients, copies, strict=True):
        count = 1
        for name in names:
            count *= groups[name].size()
        total += gradient.double().pow(2).sum() / count
    dist.all_reduce(total)
    norm = total.sqrt().item()
    if norm > limit:
        for gradient in gradients:
            gradient *= limit / norm
    return norm
    ### END SOLUTION


def why_not(
    model: TransformerConfig, cluster: planner.GpuCluster, layout: planner.Layout, batch: int
) -> set[str]:
    """All reasons why the layout cannot run: gpus, heads, layers, batch, interleaving, memory."""
    ### BEGIN SOLUTION
    tp, pp, dp, chunks = layout.tp, layout.pp, layout.dp, layout.pp * layout.virtual
    words = set()
    if tp * pp * dp * layout.cp != cluster.gpus:
        words.add("gpus")
    if model.heads % tp or model.kv_heads % tp or model.ffn % tp:
        words.add("heads")
    if model.layers % chunks and (model.layers + 2) % chunks:
        words.add("layers")
    count, rest = divmod(batch, dp * layout.microbatch)
    if rest:
        words.add("batch")
    if layout.virtual > 1 and (pp == 1 or not rest and count % pp):
        words.add("interleaving")
    ranks = dp * layout.cp
    states = memory.model_states(model.parameter_count / (tp * pp), stage=layout.zero, ranks=ranks)
    if not words and states.total > cluster.card.memory_bytes:
        words.add("memory")
    return words
    ### END SOLUTION


def plan_70b() -> planner.Layout:
    """A layout for the task above."""
    ### BEGIN SOLUTION
    # FSDP leaves memory for selective recomputation; half a node of tp, and no pipeline
    return planner.Layout(tp=4, pp=1, dp=16, zero=3, recompute="selective")
    ### END SOLUTION
