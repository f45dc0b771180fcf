"""Usual wrong answers to the exercises on 3-D parallelism, each with the hint that it must be given."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercise_cases import Mutant, register_of

from course_utils import memory, planner

MUTANTS: list[Mutant] = []
mutant = register_of(MUTANTS)

# ------------------------------------------------------------------------------------------------ groups of a mesh


def _groups(sizes):
    mesh = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    return {k: mesh.movedim(i, -1).reshape(-1, n).tolist() for i, (k, n) in enumerate(sizes.items())}


@mutant("mesh_groups", "form")
def groups_without_names(sizes):
    return list(_groups(sizes).values())


@mutant("mesh_groups", "form")
def one_flat_list_each(sizes):
    return {name: [r for line in lines for r in line] for name, lines in _groups(sizes).items()}


@mutant("mesh_groups", "form")
def groups_printed_only(sizes):
    _groups(sizes)


@mutant("mesh_groups", "missing")
def groups_of_rank_0(sizes):
    return {name: [line for line in lines if 0 in line] for name, lines in _groups(sizes).items()}


@mutant("mesh_groups", "missing")
def last_group_forgotten(sizes):
    return {name: lines[: max(1, len(lines) - 1)] for name, lines in _groups(sizes).items()}


@mutant("mesh_groups", "repeated")
def groups_once_for_each_rank(sizes):
    return {k: [line for line in lines for _ in line] for k, lines in _groups(sizes).items()}


@mutant("mesh_groups", "transposed")
def groups_transposed(sizes):
    return _groups(dict(reversed(sizes.items())))


@mutant("mesh_groups", "same-coordinate")
def ranks_of_one_coordinate(sizes):
    groups = _groups(sizes)
    return {k: [[line[i] for line in lines] for i in range(sizes[k])] for k, lines in groups.items()}


@mutant("mesh_groups", "stride")
def blocks_for_all_dimensions(sizes):
    world = math.prod(sizes.values())
    return {k: torch.arange(world).view(-1, n).tolist() for k, n in sizes.items()}


@mutant("mesh_groups", "stride")
def strides_of_the_first_dimension(sizes):
    world = math.prod(sizes.values())
    return {k: [list(range(i, world, world // n)) for i in range(world // n)] for k, n in sizes.items()}


@mutant("mesh_groups", "any-mesh")
def three_dimensions_only(sizes):
    names = ("pp", "dp", "tp")
    a, b, c = (sizes.get(name, 1) for name in names)
    mesh = torch.arange(a * b * c).view(a, b, c)
    lines = [mesh.movedim(i, -1).reshape(-1, n).tolist() for i, n in enumerate((a, b, c))]
    return {name: dict(zip(names, lines, strict=True)).get(name, []) for name in sizes}


# ------------------------------------------------------------------------------------------------ process groups


def _make(lists, keep=lambda ranks: dist.get_rank() in ranks, order=lambda lines: lines):
    """The right way, with one thing that can be made wrong."""
    mine = {}
    for name, lines in lists.items():
        for ranks in order(lines):
            group = dist.new_group(ranks)
            if keep(ranks):
                mine[name] = group
    return mine


@mutant("make_groups", "form")
def list_of_groups(lists):
    return list(_make(lists).values())


@mutant("make_groups", "form")
def ranks_for_groups(lists):
    return {name: next(line for line in lines if dist.get_rank() in line) for name, lines in lists.items()}


@mutant("make_groups", "disagree")
def only_its_own(lists):
    rank = dist.get_rank()
    return {name: dist.new_group(line) for name, lines in lists.items() for line in lines if rank in line}


@mutant("make_groups", "disagree")
def its_own_first(lists):
    return _make(lists, order=lambda lines: sorted(lines, key=lambda line: dist.get_rank() not in line))


@mutant("make_groups", "disagree", hangs=True)
def rank_0_makes_them(lists):
    if dist.get_rank() == 0:
        return _make(lists)
    return {}


@mutant("make_groups", "not-a-member")
def last_group_of_all(lists):
    return _make(lists, keep=lambda ranks: True)


@mutant("make_groups", "default")
def nothing_kept(lists):
    return dict.fromkeys(lists) | _make(lists, keep=lambda ranks: False)


@mutant("make_groups", "wrong-group")
def all_ranks_for_each(lists):
    return {name: dist.new_group(list(range(dist.get_world_size()))) for name in lists}


@mutant("make_groups", "wrong-group")
def dimensions_exchanged(lists):
    mine = _make(lists)
    return dict(zip(mine, reversed(mine.values()), strict=True))


@mutant("make_groups", "too-many")
def once_for_each_rank(lists):
    return _make(lists, order=lambda lines: [line for line in lines for _ in line])


# ------------------------------------------------------------------------------------------------ on paper


def _traffic(
    layers, hidden, length, parameters, tp, pp, dp, batch, microbatch, share=lambda p, m: (p - 1) / (m + p - 1),
    count=lambda batch, dp, b: batch / (dp * b), calls=4, ring=lambda n: 2 * (n - 1) / n, stages=True, ways=2,
    shard=lambda n, t, p: n / (t * p), width=2, unit=1e9, percent=100, rounds=True, data_rounds=False, boundaries=1,
    boundary=lambda t, p: p > 1, data_width=None, data_ring=None,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    m, activation = count(batch, dp, microbatch), width * microbatch * length * hidden
    own = layers / pp if stages else layers
    tensor = (m if rounds else 1) * own * calls * ring(tp) * activation if tp > 1 else 0
    pipeline = (m if rounds else 1) * ways * activation * (own if boundaries == "layers" else 1) * boundary(tp, pp)
    gradients = (data_width or width) * shard(parameters, tp, pp) * (m if data_rounds else 1)
    data = (data_ring or ring)(dp) * gradients if dp > 1 else 0
    return percent * share(pp, m), tensor / unit, pipeline / unit, data / unit


@mutant("traffic", "fraction")
def fraction_for_per_cent(*case):
    return _traffic(*case, percent=1)


@mutant("traffic", "of-ideal")
def share_of_the_ideal_time(*case):
    return _traffic(*case, share=lambda p, m: (p - 1) / m)


@mutant("traffic", "microbatches")
def micro_batches_of_all_replicas(*case):
    return _traffic(*case, count=lambda batch, dp, b: batch / b)


@mutant("traffic", "forward-only")
def two_all_reduces_a_layer(*case):
    return _traffic(*case, calls=2)


@mutant("traffic", "all-reduce")
def half_a_ring(*case):
    return _traffic(*case, ring=lambda n: (n - 1) / n)


@mutant("traffic", "all-reduce")
def whole_tensor_twice(*case):
    return _traffic(*case, ring=lambda n: 2)


@mutant("traffic", "all-reduce")
def gradients_reduced_and_not_gathered(*case):
    return _traffic(*case, data_ring=lambda n: (n - 1) / n)


@mutant("traffic", "bytes")
def gradients_in_float32(*case):
    return _traffic(*case, data_width=4)


@mutant("traffic", "one-stage")
def one_stage_sends_to_nobody(*case):
    return _traffic(*case, boundary=lambda t, p: 1)


@mutant("traffic", "part-sent")
def a_part_of_the_activation(*case):
    return _traffic(*case, boundary=lambda t, p: (p > 1) / t)


@mutant("traffic", "mean-stage")
def mean_over_the_stages(*case):
    return _traffic(*case, boundary=lambda t, p: (p - 1) / p)


@mutant("traffic", "all-layers")
def layers_of_all_stages(*case):
    return _traffic(*case, stages=False)


@mutant("traffic", "one-microbatch")
def one_micro_batch(*case):
    return _traffic(*case, rounds=False)


@mutant("traffic", "one-way")
def activations_only(*case):
    return _traffic(*case, ways=1)


@mutant("traffic", "whole-model")
def gradients_of_the_whole_model(*case):
    return _traffic(*case, shard=lambda n, t, p: n)


@mutant("traffic", "data-microbatches")
def gradients_of_each_micro_batch(*case):
    return _traffic(*case, data_rounds=True)


@mutant("traffic", "bytes")
def four_bytes(*case):
    return _traffic(*case, width=4)


@mutant("traffic", "gigabytes")
def plain_bytes(*case):
    return _traffic(*case, unit=1)


@mutant("traffic", "layers-in-pipeline")
def every_layer_sends_on(*case):
    return _traffic(*case, boundaries="layers")


@mutant("traffic", "number")
def tensor_alone(*case):
    return _traffic(*case)[1]


@mutant("traffic", "typed")
def typed_numbers(*case):
    return 100 * 3 / 67, 1202.590842, 17.179869, 4.4125


# ------------------------------------------------------------------------------------------------ the order for a node


def _between(order, sizes, gigabytes, node):
    groups = _groups({name: sizes[name] for name in order})
    pairs = [(k, a, b) for k, lines in groups.items() for x in lines for a, b in zip(x, x[1:] + x[:1], strict=True)]
    return sum(gigabytes[k] for k, a, b in pairs if a // node != b // node)


def _best(sizes, gigabytes, node, choose=min):
    return choose(itertools.permutations(sizes), key=lambda order: _between(order, sizes, gigabytes, node))


@mutant("node_order", "form")
def innermost_only(*case):
    return _best(*case)[-1]


@mutant("node_order", "form")
def sizes_for_names(sizes, *case):
    return [sizes[name] for name in _best(sizes, *case)]


@mutant("node_order", "backwards")
def fastest_first(*case):
    return _best(*case)[::-1]


@mutant("node_order", "backwards")
def most_between_nodes(*case):
    return _best(*case, choose=max)


@mutant("node_order", "by-degree")
def smallest_innermost(sizes, gigabytes, node):
    return sorted(sizes, key=sizes.get, reverse=True)


@mutant("node_order", "greedy")
def most_bytes_innermost(sizes, gigabytes, node):
    return sorted(sizes, key=gigabytes.get)


@mutant("node_order", "node-ignored")
def as_if_nodes_had_two(sizes, gigabytes, node):
    return _best(sizes, gigabytes, 2)


@mutant("node_order", "not-best")
def half_a_node(sizes, gigabytes, node):
    return _best(sizes, gigabytes, max(1, node // 2))


@mutant("node_order", "not-best")
def one_chain_instead_of_rings(sizes, gigabytes, node):
    """Looks at the first group of each dimension only."""

    def cost(order):
        lines = {k: x[0] for k, x in _groups({name: sizes[name] for name in order}).items()}
        return sum(gigabytes[k] for k, x in lines.items() for a, b in itertools.pairwise(x) if a // node != b // node)

    return min(itertools.permutations(sizes), key=cost)


# ------------------------------------------------------------------------------------------------ hybrid training


def _summed(x, group):
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def _copy_to(x, group):
    y = x.view_as(x)
    y.register_hook(lambda gradient: _summed(gradient, group))
    return y


def _sum_over(x, group):
    return x + (_summed(x, group) - x).detach()


def _two(nodes, gpus):
    groups = _make(_groups({"dp": nodes, "tp": gpus}))
    return groups["dp"], groups["tp"], *divmod(dist.get_rank(), gpus)


def _turned(nodes, gpus):
    groups = _make(_groups({"tp": gpus, "dp": nodes}))
    return groups["dp"], groups["tp"], *divmod(dist.get_rank(), nodes)[::-1]


def _hybrid(
    weights, batches, lr, gpus, places=_two, part=lambda node, gpu, nodes, gpus: (node, nodes), f=_copy_to,
    mean=lambda name, g, dp, tp, nodes, gpus: _summed(g, dp) / nodes, whole=False,
    losses=lambda loss, dp, nodes: _summed(loss, dp).item() / nodes, dtype=None, own_part=lambda node, gpu: gpu,
    g=lambda x, inner, tp: x + _sum_over(inner, tp), gelu=F.gelu,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    nodes = dist.get_world_size() // gpus
    dp, tp, node, gpu = places(nodes, gpus)
    t = own_part(node, gpu)
    own = {
        "gain": weights["gain"].clone(), "up": weights["up"].chunk(gpus)[t].clone(),
        "down": weights["down"].chunk(gpus, dim=1)[t].clone(),
    }  # fmt: skip
    if whole:
        own = {name: w.clone() for name, w in weights.items()}
    own = {name: w.to(dtype or w.dtype).requires_grad_() for name, w in own.items()}
    history, (at, parts) = [], part(node, gpu, nodes, gpus)
    for x, target in batches:
        x, target = (tensor.chunk(parts)[at].to(dtype or tensor.dtype) for tensor in (x, target))
        h = x * own["gain"]
        inner = gelu((h if whole else f(h, tp)) @ own["up"].T) @ own["down"].T
        loss = F.mse_loss(x + inner if whole else g(x, inner, tp), target)
        gradients = torch.autograd.grad(loss, list(own.values()))
        for (name, w), gradient in zip(own.items(), gradients, strict=True):
            w.data -= lr * mean(name, gradient, dp, tp, nodes, gpus)
        history.append(losses(loss, dp, nodes))
    return history, {name: w.detach() for name, w in own.items()}


@mutant("hybrid_training", "form")
def weights_alone(*case):
    return _hybrid(*case)[1]


@mutant("hybrid_training", "form")
def losses_not_kept(*case):
    return None, _hybrid(*case)[1]


@mutant("hybrid_training", "shards")
def shards_gathered(weights, batches, lr, gpus):
    history, own = _hybrid(weights, batches, lr, gpus)
    return history, weights | {"gain": own["gain"]}


@mutant("hybrid_training", "tp-across-nodes")
def mesh_turned(*case):
    return _hybrid(*case, places=_turned)


@mutant("hybrid_training", "no-f")
def no_copy_to(*case):
    return _hybrid(*case, f=lambda x, group: x)


@mutant("hybrid_training", "sum")
def gradients_summed(*case):
    return _hybrid(*case, mean=lambda name, g, dp, tp, nodes, gpus: _summed(g, dp))


@mutant("hybrid_training", "divided")
def divided_by_all_ranks(*case):
    return _hybrid(*case, mean=lambda name, g, dp, tp, nodes, gpus: _summed(g, dp) / dist.get_world_size())


@mutant("hybrid_training", "wrong-group")
def mean_over_the_tensor_group(*case):
    return _hybrid(*case, mean=lambda name, g, dp, tp, nodes, gpus: _summed(g, tp) / gpus)


@mutant("hybrid_training", "wrong-group")
def mean_over_all_ranks(*case):
    return _hybrid(*case, mean=lambda name, g, dp, tp, nodes, gpus: _summed(g, None) / dist.get_world_size())


@mutant("hybrid_training", "gain-twice")
def gain_over_all_ranks(*case):
    def mean(name, g, dp, tp, nodes, gpus):
        return _summed(g, None if name == "gain" else dp) / nodes

    return _hybrid(*case, mean=mean)


@mutant("hybrid_training", "not-averaged")
def replicas_go_their_own_way(*case):
    return _hybrid(*case, mean=lambda name, g, *_: g)


@mutant("hybrid_training", "gain-apart")
def gain_of_its_own_node(*case):
    return _hybrid(*case, mean=lambda name, g, dp, tp, nodes, gpus: g if name == "gain" else _summed(g, dp) / nodes)


@mutant("hybrid_training", "no-g")
def no_sum_over(*case):
    return _hybrid(*case, g=lambda x, inner, tp: x + inner)


@mutant("hybrid_training", "x-in-the-sum")
def x_once_for_each_gpu(*case):
    return _hybrid(*case, g=lambda x, inner, tp: _sum_over(x + inner, tp))


@mutant("hybrid_training", "cut-off")
def summed_for_sum_over(*case):
    return _hybrid(*case, g=lambda x, inner, tp: x + _summed(inner, tp))


@mutant("hybrid_training", "not-a-leaf")
def copy_to_around_x(*case):
    return _hybrid(*case, f=lambda h, tp: _copy_to(h.detach(), tp))


@mutant("hybrid_training", "value")
def groups_exchanged(*case):
    def places(nodes, gpus):
        dp, tp, node, gpu = _two(nodes, gpus)
        return tp, dp, node, gpu

    return _hybrid(*case, places=places)


@mutant("hybrid_training", "float32")
def approximate_gelu(*case):
    return _hybrid(*case, gelu=lambda h: F.gelu(h, approximate="tanh"))


@mutant("hybrid_training", "batch-by-rank")
def samples_by_rank(*case):
    return _hybrid(*case, part=lambda node, gpu, nodes, gpus: (node * gpus + gpu, nodes * gpus))


@mutant("hybrid_training", "batch-by-rank")
def samples_by_gpu(*case):
    return _hybrid(*case, part=lambda node, gpu, nodes, gpus: (gpu, gpus))


@mutant("hybrid_training", "own-loss")
def loss_of_its_own_part(*case):
    return _hybrid(*case, losses=lambda loss, dp, nodes: loss.item())


@mutant("hybrid_training", "loss")
def loss_not_divided(*case):
    return _hybrid(*case, losses=lambda loss, dp, nodes: _summed(loss, dp).item())


@mutant("hybrid_training", "float32")
def single_precision(*case):
    return _hybrid(*case, dtype=torch.float32)


@mutant("hybrid_training", "whole-batch")
def every_node_computes_all(*case):
    return _hybrid(*case, part=lambda *_: (0, 1))


@mutant("hybrid_training", "whole-batch")
def no_data_parallelism(*case):
    return _hybrid(*case, part=lambda *_: (0, 1), mean=lambda name, g, *_: g, losses=lambda loss, *_: loss.item())


def _whole_weights(weights, batches, lr, gpus, **wrong):
    """Trains the whole model on each rank, and cuts it at the end."""
    history, own = _hybrid(weights, batches, lr, gpus, whole=True, **wrong)
    gpu = dist.get_rank() % gpus
    return history, own | {"up": own["up"].chunk(gpus)[gpu], "down": own["down"].chunk(gpus, dim=1)[gpu]}


@mutant("hybrid_training", "no-tensor-parallelism")
def whole_weights_on_each_rank(*case):
    return _whole_weights(*case)


@mutant("hybrid_training", "no-tensor-parallelism")
def data_parallel_on_all_ranks(*case):
    return _whole_weights(
        *case, part=lambda node, gpu, nodes, gpus: (node * gpus + gpu, nodes * gpus),
        mean=lambda name, g, *_: _summed(g, None) / dist.get_world_size(),
        losses=lambda loss, *_: _summed(loss, None).item() / dist.get_world_size(),
    )  # fmt: skip


@mutant("hybrid_training", "not-distributed")
def one_process_on_each_rank(*case):
    return _whole_weights(*case, part=lambda *_: (0, 1), mean=lambda name, g, *_: g, losses=lambda x, *_: x.item())


@mutant("hybrid_training", "all-ranks")
def mean_of_the_gain_over_all_ranks(*case):
    def mean(name, g, dp, tp, nodes, gpus):
        return _summed(g, None) / dist.get_world_size() if name == "gain" else _summed(g, dp) / nodes

    return _hybrid(*case, mean=mean)


@mutant("hybrid_training", "between")
def gradients_gathered(*case):
    def mean(name, g, dp, tp, nodes, gpus):
        both = [torch.empty_like(g) for _ in range(nodes)]
        dist.all_gather(both, g.contiguous(), group=dp)
        return _summed(g, dp) / nodes if name == "gain" else sum(both) / nodes + 0 * _summed(g, dp)

    return _hybrid(*case, mean=mean)


@mutant("hybrid_training", "inside")
def gain_averaged_inside_as_well(*case):
    def mean(name, g, dp, tp, nodes, gpus):
        return _summed(_summed(g, dp) / nodes, tp) / gpus if name == "gain" else _summed(g, dp) / nodes

    return _hybrid(*case, mean=mean)


@mutant("hybrid_training", "sizes")
def divided_by_two(*case):
    return _hybrid(*case, mean=lambda name, g, dp, tp, nodes, gpus: _summed(g, dp) / 2)


@mutant("hybrid_training", "sizes")
def shards_of_two(*case):
    return _hybrid(*case, own_part=lambda node, gpu: dist.get_rank() % 2)


@mutant("hybrid_training", "hang", hangs=True)
def groups_of_its_own_only(*case):
    def places(nodes, gpus):
        node, gpu = divmod(dist.get_rank(), gpus)
        dp = dist.new_group([gpu + gpus * k for k in range(nodes)])
        return dp, dist.new_group([node * gpus + k for k in range(gpus)]), node, gpu

    return _hybrid(*case, places=places)


# ------------------------------------------------------------------------------------------------ the norm of a mesh


def _clip(
    gradients, copies, groups, limit, count=lambda sizes: math.prod(sizes), share=lambda g: g.pow(2).sum(),
    total=lambda x, groups: _summed(x, None), root=torch.sqrt, factor=lambda norm, own, limit: min(1, limit / norm),
    use=lambda names, groups: True, scale=torch.Tensor.mul_,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    own = torch.zeros((), dtype=torch.float64)
    for g, names in zip(gradients, copies, strict=True):
        if use(names, groups):
            own += share(g) / count([groups[name].size() for name in names])
    norm = root(total(own, groups)).item()
    alone = math.sqrt(sum(g.pow(2).sum().item() for g in gradients))
    for i, g in enumerate(gradients):
        gradients[i] = scale(g, factor(norm, alone, limit))
    return norm


@mutant("clip_gradients", "number")
def norm_not_returned(*case):
    _clip(*case)


@mutant("clip_gradients", "limited")
def norm_after_clipping(gradients, copies, groups, limit):
    return min(limit, _clip(gradients, copies, groups, limit))


@mutant("clip_gradients", "no-grad")
def gradients_taken_for_parameters(gradients, copies, groups, limit):
    return torch.nn.utils.clip_grad_norm_(gradients, limit)


@mutant("clip_gradients", "norm-divided")
def norms_divided_by_copies(*case):
    return _clip(*case, count=lambda sizes: math.prod(sizes) ** 2)


@mutant("clip_gradients", "own")
def norm_of_its_own(*case):
    return _clip(*case, total=lambda x, groups: _summed(x, None) * 0 + x)


@mutant("clip_gradients", "twice")
def copies_counted_twice(*case):
    return _clip(*case, count=lambda sizes: 1)


@mutant("clip_gradients", "one-group")
def norm_over_the_tensor_group(*case):
    return _clip(*case, total=lambda x, groups: _summed(x, groups.get("tp")))


@mutant("clip_gradients", "one-group")
def norm_over_replicas(*case):
    return _clip(*case, total=lambda x, groups: _summed(x, groups.get("dp")), count=lambda sizes: 1)


@mutant("clip_gradients", "sum-of-norms")
def norms_added_up(*case):
    return _clip(*case, total=lambda x, groups: _summed(x.sqrt(), None), root=lambda x: x)


@mutant("clip_gradients", "squared")
def root_forgotten(*case):
    return _clip(*case, root=lambda x: x)


@mutant("clip_gradients", "mean")
def squares_averaged(*case):
    return _clip(*case, total=lambda x, groups: _summed(x, None) / dist.get_world_size())


@mutant("clip_gradients", "shards-lost")
def first_of_each_group_counts(*case):
    def first(names, groups):
        return all(dist.get_rank(group) == 0 for name, group in groups.items() if name in ("dp", "tp"))

    return _clip(*case, use=first, count=lambda sizes: 1)


@mutant("clip_gradients", "copies-lost")
def copies_left_out(*case):
    return _clip(*case, use=lambda names, groups: not names)


@mutant("clip_gradients", "nothing", hangs=True)
def returns_early_without_gradients(gradients, *case):
    return _clip(gradients, *case) if gradients else 0.0


@mutant("clip_gradients", "nothing")
def stack_of_nothing(gradients, copies, groups, limit):
    counts = [math.prod(groups[k].size() for k in names) for names in copies]
    squares = [g.pow(2).sum() / count for g, count in zip(gradients, counts, strict=True)]
    norm = _summed(torch.stack(squares).sum(), None).sqrt().item()
    for g in gradients:
        g *= min(1, limit / norm)
    return norm


@mutant("clip_gradients", "not-clipped")
def norm_only(*case):
    return _clip(*case, factor=lambda norm, own, limit: 1)


@mutant("clip_gradients", "always")
def scaled_up_as_well(*case):
    return _clip(*case, factor=lambda norm, own, limit: limit / norm)


@mutant("clip_gradients", "own-scale")
def scaled_by_its_own_norm(*case):
    return _clip(*case, factor=lambda norm, own, limit: min(1, limit / own))


@mutant("clip_gradients", "replaced")
def new_tensors(*case):
    return _clip(*case, scale=torch.Tensor.mul)


@mutant("clip_gradients", "scale")
def scaled_twice(*case):
    return _clip(*case, factor=lambda norm, own, limit: min(1, limit / norm) ** 2)


@mutant("clip_gradients", "too-many-bytes")
def whole_tensors_travel(gradients, copies, groups, limit):
    flat = torch.cat([g.flatten() for g in gradients] + [torch.zeros(1000, dtype=torch.float64)])[:1000]
    dist.all_reduce(flat)
    return _clip(gradients, copies, groups, limit)


@mutant("clip_gradients", "too-many-messages")
def one_message_for_each_tensor(gradients, copies, groups, limit):
    """Ranks have different numbers of tensors: they first agree on the largest."""
    most = torch.tensor(len(gradients))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    norm = torch.zeros((), dtype=torch.float64)
    for i in range(int(most)):
        square = torch.zeros((), dtype=torch.float64)
        if i < len(gradients):
            square += gradients[i].pow(2).sum() / math.prod(groups[name].size() for name in copies[i])
        norm += _summed(square, None)
    norm = norm.sqrt().item()
    for g in gradients:
        g *= min(1, limit / norm)
    return norm


@mutant("clip_gradients", "too-many-messages")
def one_sum_for_each_dimension(*case):
    def total(x, groups):
        for group in groups.values():
            x = _summed(x, group)
        return x

    return _clip(*case, total=total)


# ------------------------------------------------------------------------------------------------ legality


def _why_not(
    model, cluster, layout, batch, degrees=("tp", "pp", "dp", "cp"), widths=("heads", "kv_heads", "ffn"), extra=2,
    virtual=True, microbatch=True, groups=lambda layout: layout.virtual > 1, states=memory.model_states, stage=None,
    last=True, node=False, first=False, unit=1.0, divided=("tp", "pp"), ranks=("dp",), replicas=("dp",), either=True,
):  # fmt: skip
    """The right way, with one thing that can be made wrong."""
    tp, pp, words = layout.tp, layout.pp, []
    chunks = pp * (layout.virtual if virtual else 1)
    if math.prod(getattr(layout, name) for name in degrees) != cluster.gpus:
        words.append("gpus")
    if any(getattr(model, name) % tp for name in widths) or (node and tp > cluster.per_node):
        words.append("heads")
    if model.layers % chunks and (not extra or (model.layers + extra) % chunks):
        words.append("layers")
    product = lambda names: math.prod(getattr(layout, name) for name in names)  # noqa: E731
    count, rest = divmod(batch, product(replicas) * (layout.microbatch if microbatch else 1))
    if rest:
        words.append("batch")
    if groups(layout) and count % pp and not (either and rest):
        words.append("interleaving")
    stage = layout.zero if stage is None else stage
    held = states(model.parameters / product(divided), stage=stage, ranks=product(ranks)).total
    if held * unit > cluster.card.memory_bytes and (not last or not words):
        words.append("memory")
    return set(words[:1] if first else words)


@mutant("why_not", "form")
def one_word(*case):
    return " ".join(_why_not(*case))


@mutant("why_not", "form")
def words_of_its_own(*case):
    return {f"too many {word}" for word in _why_not(*case)} or {"legal"}


@mutant("why_not", "form")
def nothing_returned(*case):
    _why_not(*case)


@mutant("why_not", "legal")
def whole_model_on_each_rank(*case):
    return _why_not(*case, divided=())


@mutant("why_not", "legal")
def stages_hold_all_layers(*case):
    return _why_not(*case, divided=("tp",))


@mutant("why_not", "context-batch")
def context_ranks_as_replicas(*case):
    return _why_not(*case, replicas=("dp", "cp"))


@mutant("why_not", "interleaving-last")
def micro_batches_of_a_batch_that_does_not_divide(*case):
    return _why_not(*case, either=False)


@mutant("why_not", "zero-ranks")
def zero_over_all_gpus(*case):
    return _why_not(*case, ranks=("tp", "pp", "dp", "cp"))


@mutant("why_not", "gpus")
def context_forgotten(*case):
    return _why_not(*case, degrees=("tp", "pp", "dp"))


@mutant("why_not", "heads")
def query_heads_only(*case):
    return _why_not(*case, widths=("heads", "ffn"))


@mutant("why_not", "slow")
def refuses_two_nodes(*case):
    return _why_not(*case, node=True)


@mutant("why_not", "layers")
def virtual_stages_forgotten(*case):
    return _why_not(*case, virtual=False)


@mutant("why_not", "around")
def layers_alone(*case):
    return _why_not(*case, extra=0)


@mutant("why_not", "batch")
def micro_batch_forgotten(*case):
    return _why_not(*case, microbatch=False)


@mutant("why_not", "interleaving")
def any_number_of_micro_batches(*case):
    return _why_not(*case, groups=lambda layout: False)


@mutant("why_not", "interleaving-always")
def groups_without_virtual_stages(*case):
    return _why_not(*case, groups=lambda layout: True)


@mutant("why_not", "memory")
def parameters_alone(*case):
    return _why_not(*case, unit=1 / 8)


@mutant("why_not", "memory")
def no_look_at_the_memory(*case):
    return _why_not(*case, unit=0.0)


@mutant("why_not", "zero")
def no_zero(*case):
    return _why_not(*case, stage=0)


@mutant("why_not", "memory-last")
def memory_beside_others(*case):
    return _why_not(*case, last=False)


@mutant("why_not", "all-reasons")
def first_reason_only(*case):
    return _why_not(*case, first=True)


# ------------------------------------------------------------------------------------------------ the puzzle


def _plans():
    from course_utils.checks import parallelism_3d as parallelism_3d

    name, machine, gpus, batch = parallelism_3d.PUZZLE
    model, cluster = planner.MODELS[name], planner.cluster(machine, gpus)
    return [p for p in planner.search(model, cluster, batch, cp=1, virtual=(1, 2)).plans], parallelism_3d


def _slow(part):
    """A layout that fits, whose time is too long most of all because of one part."""
    plans, parallelism_3d = _plans()
    best = parallelism_3d.best_70b()
    fits = (p for p in plans if p.memory.total <= parallelism_3d.LIMIT)
    slow = (p for p in fits if p.seconds > parallelism_3d.SHARE * best.seconds)
    return next(p.layout for p in slow if parallelism_3d._dearest(p, best) == part)


@mutant("plan_70b", "form")
def degrees_only():
    return 4, 1, 16


@mutant("plan_70b", "illegal")
def sixteen_of_eight_heads():
    return planner.Layout(16, 4, 1, zero=0)


@mutant("plan_70b", "illegal")
def half_of_the_gpus():
    return planner.Layout(8, 4, 1, zero=0)


@mutant("plan_70b", "rules")
def weights_in_bf16_alone():
    return planner.Layout(4, 1, 16, zero=3, recompute="none", precision="bf16")


@mutant("plan_70b", "rules")
def context_parallel():
    return planner.Layout(1, 2, 8, 4, zero=3, recompute="none")


@mutant("plan_70b", "memory")
def plain_replicas():
    return planner.Layout(4, 1, 16, zero=0)


@mutant("plan_70b", "memory")
def fits_without_room_to_spare():
    plans, parallelism_3d = _plans()
    return next(p.layout for p in plans if p.memory.total > parallelism_3d.LIMIT)


@mutant("plan_70b", "compute")
def computed_twice():
    return _slow("compute")


@mutant("plan_70b", "tensor")
def all_of_a_node():
    return _slow("tensor")


@mutant("plan_70b", "bubble")
def deep_pipeline():
    return _slow("bubble")
