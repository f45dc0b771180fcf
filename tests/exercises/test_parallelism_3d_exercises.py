"""The exercises on 3-D parallelism: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exercise_cases import ExerciseTests, hangs

from course_utils import recorded
from course_utils.check.compare import listed
from course_utils.check.edits import edited_function
from course_utils.transformer import PUBLISHED
from lessons.parallelism_3d import check as parallelism_3d
from lessons.parallelism_3d import planner

pytestmark = pytest.mark.guard(60)

WRONG: dict[str, dict] = {}
RIGHT: dict[str, dict] = {}

BEYOND_THE_LEDGER = "dist.group.WORLD._get_backend(torch.device('cpu')).allreduce"

# ------------------------------------------------------------------------------------------------ groups of a mesh

WRONG["mesh_groups"] = {
    "form": [
        "return groups  ->  return {name: sum(lines, []) for name, lines in groups.items()}",
        "stride *= size  ->  stride *= size\nif size == 1:\n    del groups[name]",
    ],
    "missing": "groups[name] =  ->  firsts = firsts[:1]\ngroups[name] =",
    "repeated": [
        "for first in firsts]  ->  for first in firsts for _ in range(size)]",
        "rank // stride % size == 0  ->  rank & stride * (size - 1) == 0",
    ],
    "transposed": "in reversed(sizes.items())  ->  in sizes.items()",
    "same-coordinate": {"for k in range(size)] for first in firsts]": "for first in firsts] for k in range(size)]"},
    "stride": ["stride *= size  ->  pass", "first + k * stride  ->  1 + first + k * stride"],
    "sizes": "for k in range(size)]  ->  for k in range(2)]",
    "any-mesh": "stride *= size  ->  stride *= size if len(groups) < 3 else 1",
}


def mesh_of_numpy(sizes):
    mesh = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    lines = {name: np.moveaxis(mesh, at, -1).reshape(-1, size) for at, (name, size) in enumerate(sizes.items())}
    return {name: [list(line) for line in some] for name, some in lines.items()}


RIGHT["mesh_groups"] = {
    "the planner's": planner.mesh_groups,
    "tuples in another order": "return groups  ->  "
    "return {name: tuple(map(tuple, lines[::-1])) for name, lines in groups.items()}",
    "whole numbers of NumPy": mesh_of_numpy,
}

# ------------------------------------------------------------------------------------------------ on paper

WRONG["traffic"] = {
    "number": "return 100 * (pp - 1) / (count + pp - 1), tensor / 1e9, pipeline / 1e9, data / 1e9  ->  "
    "return tensor / 1e9",
    "typed": "return 100 * (pp - 1) / (count + pp - 1), tensor / 1e9, pipeline / 1e9, data / 1e9  ->  "
    "return 100 * 3 / 67, 1202.590842, 17.179869, 4.4125",
}


def a_whole_step_at_once(layers, hidden, length, parameters, tp, pp, dp, batch, microbatch):
    """Counts the tokens of a replica, and no micro-batches but for the bubble."""
    tokens, slots = batch / dp * length, batch // (dp * microbatch) + pp - 1
    ring = np.array([tp, dp])
    ring = 4 * (1 - 1 / ring)  # bytes per element
    through = 4 * tokens * hidden * (pp > 1)
    return np.array([
        100 - 100 * (slots - pp + 1) / slots, 4e-9 * layers / pp * ring[0] * tokens * hidden, through / 1e9,
        ring[1] * parameters / tp / pp / 1e9,
    ])


RIGHT["traffic"] = {
    "a list": "return 100 * (pp - 1) / (count + pp - 1), tensor / 1e9, pipeline / 1e9, data / 1e9  ->  "
    "return [100 * (pp - 1) / (count + pp - 1), *(x * 1e-9 for x in (tensor, pipeline, data))]",
    "NumPy": a_whole_step_at_once,
}

# ------------------------------------------------------------------------------------------------ the order for a node

BEST = "min(itertools.permutations(sizes), key=between_nodes)"
CLIMB = """order, moved = sorted(sizes, key=gigabytes.get), True
while moved:
    moved = False
    for i in range(len(order) - 1):
        other = [*order[:i], order[i + 1], order[i], *order[i + 2 :]]
        if between_nodes(other) < between_nodes(order):
            order, moved = other, True
return order"""


def greedy_from_inside(sizes, gigabytes, gpus_per_node):
    """The dimension that keeps the most inside the nodes goes next, from the innermost on."""
    order, stride, ranks = [], 1, range(math.prod(sizes.values()))
    while len(order) < len(sizes):
        kept = {}
        for name in sizes.keys() - order:
            wrap = stride * sizes[name]
            neighbours = [(r, r - r % wrap + (r + stride) % wrap) for r in ranks]
            kept[name] = gigabytes[name] * sum(a // gpus_per_node == b // gpus_per_node for a, b in neighbours)
        order.insert(0, max(sorted(kept), key=kept.get))
        stride *= sizes[order[0]]
    return order


WRONG["node_order"] = {
    "form": f"return {BEST}  ->  return [sizes[name] for name in {BEST}]",
    "node-ignored": "def between_nodes(order):  ->  gpus_per_node = 2\n\ndef between_nodes(order):",
    "backwards": [f"{BEST}  ->  {BEST}[::-1]", "return min(  ->  return max("],
    "by-degree": [
        f"{BEST}  ->  sorted(sizes, key=sizes.get, reverse=True)",
        f"{BEST}  ->  sorted(sizes, key=sizes.get)",
    ],
    "greedy": f"{BEST}  ->  sorted(sizes, key=gigabytes.get)",
    "not-best": [f"return {BEST}  ->  {CLIMB}", greedy_from_inside],
}


def order_by_rolling(sizes, gigabytes, gpus_per_node):
    """The mesh of nodes, and the same rolled along each dimension; a list."""

    def cost(order):
        nodes = np.arange(math.prod(sizes.values())).reshape([sizes[name] for name in order]) // gpus_per_node
        return sum(gigabytes[name] * int((nodes != np.roll(nodes, -1, at)).sum()) for at, name in enumerate(order))

    return sorted(map(list, itertools.permutations(sizes)), key=cost)[0]


RIGHT["node_order"] = {
    "the last of the best": f"{BEST}  ->  min(list(itertools.permutations(sizes))[::-1], key=between_nodes)",
    "by rolling": order_by_rolling,
}

# ------------------------------------------------------------------------------------------------ hybrid training

PART = "x, target = x.chunk(nodes)[node], target.chunk(nodes)[node]"
COPY = 'copy_to(x * own["gain"], groups["tp"])'
PARTIAL = 'F.linear(inner, own["down"])'
SUM_OVER = f'sum_over({PARTIAL}, groups["tp"])'
MEAN = 'summed(gradient, groups["dp"]) / nodes'
UPDATE = "for w, gradient in zip(parameters, gradients, strict=True):"
STEP = f"w -= lr * {MEAN}"
LOSS = 'summed(loss, groups["dp"]).item() / nodes'
OWN = "own = {\n"
MESH = 'mesh = dist.init_device_mesh("cpu", (nodes, gpus_per_node), mesh_dim_names=("dp", "tp"))'
GROUPS = 'groups = {name: mesh.get_group(name) for name in ("dp", "tp")}'
BY_HAND = """groups = {}
for name, lines in mesh_groups({"dp": nodes, "tp": gpus_per_node}).items():
    for ranks in lines:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            groups[name] = group"""
RETURN = "return losses, {name: w.detach() for name, w in own.items()}"
UP, DOWN = 'weights["up"].chunk(gpus_per_node)[gpu]', 'weights["down"].chunk(gpus_per_node, dim=1)[gpu]'
OVER_ALL = "summed({}, None) / dist.get_world_size()"
BY_RANK = "x, target = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in (x, target))"
WHOLE_WEIGHTS = {  # cut at the end
    UP: 'weights["up"]', DOWN: 'weights["down"]', COPY: 'x * own["gain"]', SUM_OVER: PARTIAL,
    RETURN: 'own["up"] = own["up"].chunk(gpus_per_node)[gpu]\n'
    f'own["down"] = own["down"].chunk(gpus_per_node, dim=1)[gpu]\n{RETURN}',
}
ALONE = {**WHOLE_WEIGHTS, PART: "pass", MEAN: "gradient", LOSS: "loss.item()"}
ZEROS = """for x, _ in batches:
    for t in (x[: len(x) // nodes], x[: len(x) // nodes]):
        dist.all_reduce(torch.zeros_like(t), group=groups["tp"])
    for w in [*own.values(), x[0, 0]]:
        dist.all_reduce(torch.zeros_like(w), group=groups["dp"])
"""
WRONG["hybrid_training"] = {
    "form": "return losses,  ->  return None,",
    "shards": "in own.items()}  ->  in (weights | {'gain': own['gain']}).items()}",
    "tp-across-nodes": {
        "node, gpu = divmod(dist.get_rank(), gpus_per_node)": "gpu, node = divmod(dist.get_rank(), nodes)",
        MESH: 'mesh = dist.init_device_mesh("cpu", (gpus_per_node, nodes), mesh_dim_names=("tp", "dp"))',
    },
    "no-f": f'{COPY}  ->  x * own["gain"]',
    "sum": f'{MEAN}  ->  summed(gradient, groups["dp"])',
    "divided": f'{MEAN}  ->  summed(gradient, groups["dp"]) / dist.get_world_size()',
    "wrong-group": [
        f'{MEAN}  ->  summed(gradient, groups["tp"]) / gpus_per_node',
        f"{MEAN}  ->  {OVER_ALL.format('gradient')}",
    ],
    "gain-twice": f'{MEAN}  ->  summed(gradient, None if w is own["gain"] else groups["dp"]) / nodes',
    "gain-apart": f'{MEAN}  ->  (gradient if w is own["gain"] else {MEAN})',
    "not-averaged": f"{MEAN}  ->  gradient",
    "no-g": f"{SUM_OVER}  ->  {PARTIAL}",
    "x-in-the-sum": f'x + {SUM_OVER}  ->  sum_over(x + {PARTIAL}, groups["tp"])',
    "not-a-leaf": f'{COPY}  ->  copy_to(x, groups["tp"])',
    "cut-off": "sum_over(F.linear  ->  summed(F.linear",
    "value": f'{OWN}  ->  groups = {{"dp": groups["tp"], "tp": groups["dp"]}}\n{OWN}',
    "batch-by-rank": f"{PART}  ->  {BY_RANK}",
    "own-loss": f"{LOSS}  ->  loss.item()",
    "loss": f'{LOSS}  ->  summed(loss, groups["dp"]).item()',
    "float32": 'own["up"]))  ->  own["up"]), approximate="tanh")',
    "whole-batch": [f"{PART}  ->  pass", {PART: "pass", MEAN: "gradient", LOSS: "loss.item()"}],
    "no-tensor-parallelism": WHOLE_WEIGHTS,
    "not-distributed": ALONE,
    "all-work": {**ALONE, RETURN: WHOLE_WEIGHTS[RETURN].replace("return losses", f"{ZEROS}return losses")},
    "all-ranks": f'{MEAN}  ->  ({OVER_ALL.format("gradient")} if w is own["gain"] else {MEAN})',
    "between": f'{STEP}  ->  {STEP}\nsummed(gradient, groups["dp"])',
    "too-few-bytes": {
        STEP: "gradient = gradient.contiguous() / nodes\n"
        'groups["dp"]._get_backend(torch.device("cpu")).allreduce([gradient]).wait()\nw -= lr * gradient'
    },
    "inside": f'{STEP}  ->  mean = {MEAN}\nif w is own["gain"]:\n'
    '    mean = summed(mean, groups["tp"]) / gpus_per_node\nw -= lr * mean',
    "sizes": [
        f'{MEAN}  ->  summed(gradient, groups["dp"]) / 2',
        {UP: UP.replace("[gpu]", "[dist.get_rank() % 2]"), DOWN: DOWN.replace("[gpu]", "[dist.get_rank() % 2]")},
    ],
    "hang": [
        {  # each rank makes only its own groups: gloo would wait, or connect ranks of different groups
            MESH: "pass",
            GROUPS: 'groups = {\n    "dp": dist.new_group([gpu + gpus_per_node * k for k in range(nodes)]),\n'
            '    "tp": dist.new_group([node * gpus_per_node + k for k in range(gpus_per_node)]),\n}',
        },
        hangs(f"{RETURN}  ->  if dist.get_rank() == 0:\n    dist.barrier()\n{RETURN}"),
    ],
}


def backward_by_hand(weights, batches, lr, gpus_per_node):
    """Groups of torch, and each gradient as a formula."""
    world, rank = dist.get_world_size(), dist.get_rank()
    nodes, node, gpu = world // gpus_per_node, rank // gpus_per_node, rank % gpus_per_node
    tp, _ = dist.new_subgroups(gpus_per_node)
    dp, _ = dist.new_subgroups_by_enumeration([list(range(g, world, gpus_per_node)) for g in range(gpus_per_node)])
    gain, up = weights["gain"].clone(), weights["up"].tensor_split(gpus_per_node)[gpu].clone()
    down, losses = weights["down"].tensor_split(gpus_per_node, 1)[gpu].clone(), []
    for x, target in batches:
        x, target = (t.unflatten(0, (nodes, -1))[node] for t in (x, target))
        h = (x * gain) @ up.T
        cumulative = torch.special.ndtr(h)
        y = h * cumulative @ down.T
        dist.all_reduce(y, group=tp)
        error = x + y - target
        slope = cumulative + h * torch.exp(-h * h / 2) / math.sqrt(2 * math.pi)
        d_y = 2 * error / error.numel()
        d_h = d_y @ down * slope
        d_x = d_h @ up
        dist.all_reduce(d_x, group=tp)
        pieces = [(d_x * x).sum(0), d_h.T @ x * gain, d_y.T @ (h * cumulative), error.square().mean()[None]]
        flat = torch.cat([piece.flatten() for piece in pieces]) / nodes
        dist.all_reduce(flat, group=dp)
        for w, piece in zip((gain, up, down), flat.split([p.numel() for p in pieces]), strict=False):
            w -= lr * piece.view_as(w)
        losses.append(flat[-1])
    return losses, dict(gain=gain, up=up, down=down)


HOOKED = """optimizer = torch.optim.SGD(parameters, lr=lr)

def average(w):
    dist.all_reduce(w.grad, group=groups["dp"])
    w.grad /= nodes

for w in parameters:
    w.register_post_accumulate_grad_hook(average)
for x, target in batches:"""
RIGHT["hybrid_training"] = {
    "groups by hand, tensors returned": {
        MESH: "pass",
        GROUPS: BY_HAND,
        RETURN: "return torch.tensor(losses, dtype=torch.float64), own",
    },
    "backward by hand": backward_by_hand,
    "hooks and an optimizer": {
        "for x, target in batches:": HOOKED,
        "gradients = torch.autograd.grad(loss, parameters)": "optimizer.zero_grad()\nloss.backward()",
        f"with torch.no_grad():\n            {UPDATE}\n                {STEP}": "optimizer.step()",
    },
    "loss averaged over all ranks": f"{LOSS}  ->  summed(loss, None).item() / dist.get_world_size()",
    "in the given weights": {
        f"{UP}.clone()": UP,
        f"{DOWN}.clone()": DOWN,
        'weights["gain"].clone()': 'weights["gain"]',
    },
    "samples dealt like cards": f"{PART}  ->  x, target = x[node::nodes], target[node::nodes]",
    "reduce-scatter and all-gather": {
        STEP: "flat = F.pad(gradient.flatten(), (0, -gradient.numel() % nodes))\n"
        "part = torch.empty_like(flat[: len(flat) // nodes])\n"
        'dist.reduce_scatter_tensor(part, flat, group=groups["dp"])\n'
        'dist.all_gather_into_tensor(flat, part / nodes, group=groups["dp"])\n'
        "w -= lr * flat[: gradient.numel()].view_as(w)",
    },
}

# ------------------------------------------------------------------------------------------------ the norm of a mesh

START = "total = torch.zeros((), dtype=torch.float64)"
ADD = "total += gradient.double().pow(2).sum() / count"
ALL_REDUCE = "dist.all_reduce(total)"
SCALE = """for gradient in gradients:
            gradient *= limit / norm"""
OWN_SQUARE = "sum(g.double().pow(2).sum().item() for g in gradients)"
WRONG["clip_gradients"] = {
    "number": "return norm  ->  pass",
    "limited": "return norm  ->  return min(limit, norm)",
    "no-grad": f"{START}  ->  return torch.nn.utils.clip_grad_norm_(gradients, limit)\n{START}",
    "norm-divided": "/ count  ->  / count**2",
    "own": f"{ALL_REDUCE}  ->  dist.all_reduce(total.clone())",
    "twice": " / count  ->  ",
    "one-group": f'{ALL_REDUCE}  ->  dist.all_reduce(total, group=groups.get("tp"))',
    "per-stage": f'{ALL_REDUCE}  ->  stages = groups["pp"].size() if "pp" in groups else 1\n'
                 "stage, _ = dist.new_subgroups(dist.get_world_size() // stages)\ndist.all_reduce(total, group=stage)",
    "sum-of-norms": {ALL_REDUCE: f"total = total.sqrt()\n{ALL_REDUCE}", "total.sqrt().item()": "total.item()"},
    "squared": "total.sqrt().item()  ->  total.item()",
    "mean": f"{ALL_REDUCE}  ->  {ALL_REDUCE}\ntotal /= dist.get_world_size()",
    "shards-lost": {
        ADD: 'if all(dist.get_rank(group) == 0 for name, group in groups.items() if name in ("dp", "tp")):\n'
        "    total += gradient.double().pow(2).sum()"
    },
    "copies-lost": 'count *= groups[name].size()  ->  count = float("inf")',
    "nothing": [
        hangs(f"{START}  ->  if not gradients:\n    return 0.0\n{START}"),
        f"{ALL_REDUCE}  ->  torch.stack([g.sum() for g in gradients])\n{ALL_REDUCE}",
    ],
    "not-clipped": "if norm > limit:  ->  if False:",
    "always": "if norm > limit:  ->  if True:",
    "own-scale": {"if norm > limit:": f"own = {OWN_SQUARE} ** 0.5\nif own > limit:", "limit / norm": "limit / own"},
    "replaced": {SCALE: "gradients[:] = [gradient * (limit / norm) for gradient in gradients]"},
    "scale": "limit / norm  ->  (limit / norm) ** 2",
    "too-many-bytes": f"{ALL_REDUCE}  ->  {ALL_REDUCE}\ndist.all_reduce(torch.zeros(1000))",
    "too-many-messages": f"{ALL_REDUCE}  ->  for group in groups.values():\n    dist.all_reduce(total, group=group)",
    "value": "dtype=torch.float64  ->  dtype=torch.float16",
    "not-distributed": f"{ALL_REDUCE}  ->  {BEYOND_THE_LEDGER}([total]).wait()",
}


def gathered_in_numpy(gradients, copies, groups, limit):
    """Every rank gets the squares of all, and adds them up itself."""
    first = [all(dist.get_rank(groups[name]) == 0 for name in names) for names in copies]
    own = sum(
        np.square(g.numpy().astype(np.float64)).sum() for g, counts in zip(gradients, first, strict=True) if counts
    )
    squares = torch.empty(dist.get_world_size(), dtype=torch.float64)
    dist.all_gather_into_tensor(squares, torch.tensor([own], dtype=torch.float64))
    norm = np.sqrt(squares.numpy().sum())
    for gradient in gradients:
        array = gradient.numpy()
        np.multiply(array, min(1, limit / norm), out=array)
    return norm


RIGHT["clip_gradients"] = {
    "reduced to one rank": {
        ALL_REDUCE: "dist.reduce(total, 0)\ndist.broadcast(total, 0)",
        SCALE: "torch._foreach_mul_(gradients, limit / norm) if gradients else None",
    },
    "single precision": {START: "total = torch.tensor(0.0)", ADD: "total += (gradient**2).sum() / count"},
    "gathered, in NumPy": gathered_in_numpy,
    "a tensor": "return norm  ->  return torch.tensor([norm])",
}

# ------------------------------------------------------------------------------------------------ legality

INTERLEAVING = "layout.virtual > 1 and (pp == 1 or not rest and count % pp)"
WRONG["why_not"] = {
    "form": [
        "return words  ->  return {f'too many {word}' for word in words} or {'legal'}",
        "return words  ->  return list(words)",
    ],
    "legal": [
        "model.parameter_count / (tp * pp)  ->  model.parameter_count",
        "cluster.card.memory_bytes  ->  cluster.card.memory_bytes / 2",
    ],
    "gpus": " * layout.cp != cluster.gpus  ->  != cluster.gpus",
    "heads": " or model.kv_heads % tp  ->  ",
    "slow": "if model.heads % tp  ->  if tp > cluster.per_node or model.heads % tp",
    "layers": "layout.pp * layout.virtual  ->  layout.pp",
    "around": " and (model.layers + 2) % chunks  ->  ",
    "batch": "dp * layout.microbatch  ->  dp",
    "context-batch": "dp * layout.microbatch  ->  dp * layout.cp * layout.microbatch",
    "interleaving": [
        f"{INTERLEAVING}  ->  False",
        "pp == 1 or not rest and count % pp  ->  not rest and count % pp",
    ],
    "interleaving-always": f"{INTERLEAVING}  ->  not rest and count % pp",
    "interleaving-last": "not rest and count % pp  ->  count % pp",
    "memory": "if not words and states.total  ->  if False and states.total",
    "memory-last": "if not words and states.total  ->  if states.total",
    "zero": ["stage=layout.zero  ->  stage=0", "ranks = dp * layout.cp  ->  ranks = dp"],
    "zero-ranks": "ranks = dp * layout.cp  ->  ranks = cluster.gpus",
    "all-reasons": "return words  ->  return set(sorted(words)[:1])",
}


def a_table_of_conditions(model, cluster, layout, batch):
    """The states by hand: 2 bytes for weights, 2 for gradients and 12 for the optimizer."""
    replicas, share = layout.dp * layout.cp, model.parameter_count / layout.tp / layout.pp
    bytes_each = sum(b / (replicas if layout.zero >= stage else 1) for stage, b in ((3, 2), (2, 2), (1, 12)))
    microbatches = batch / layout.dp / layout.microbatch
    chunks = layout.pp * layout.virtual
    found = {
        "gpus": math.prod((layout.tp, layout.pp, layout.dp, layout.cp)) != cluster.gpus,
        "heads": math.gcd(model.heads, model.kv_heads, model.ffn) % layout.tp > 0,
        "layers": 0 not in (model.layers % chunks, (model.layers + 2) % chunks),
        "batch": not microbatches.is_integer(),
        "interleaving": layout.virtual > 1 and (layout.pp == 1 or microbatches % layout.pp in range(1, layout.pp)),
    }
    words = {word for word, holds in found.items() if holds}
    return frozenset(words or {"memory"} if share * bytes_each > cluster.card.memory_bytes else words)


def the_planners_words(model, cluster, layout, batch):
    words = {word for word, _ in planner.broken_rules(model, cluster, layout, batch)}
    return words or ({"memory"} if planner.reasons_against(model, cluster, layout, batch) else set())


RIGHT["why_not"] = {"a table of conditions": a_table_of_conditions, "the planner's words": the_planners_words}

# ------------------------------------------------------------------------------------------------ the puzzle

DEGREES, MORE = "tp=4, pp=1, dp=16", 'zero=3, recompute="none"'
WRONG["plan_70b"] = {
    "form": f"planner.Layout({DEGREES}, {MORE})  ->  4, 1, 16",
    "search": "return planner.Layout(  ->  "
    "planner.search(*planner.plan_inputs(recorded.LLAMA3_RUNS[0])[:2], 2048)\nreturn planner.Layout(",
    "illegal": f"{DEGREES}  ->  tp=8, pp=4, dp=1",
    "rules": f"{DEGREES}  ->  tp=1, pp=2, dp=8, cp=4",
    "memory": [
        f"{MORE}  ->  zero=0",
        {DEGREES: "tp=4, pp=2, dp=8", MORE: 'zero=1, recompute="selective"'},  # legal, but more than 72 GB
    ],
    "compute": {DEGREES: "tp=1, pp=1, dp=64", '"none"': '"full"'},
    "tensor": f"{DEGREES}  ->  tp=8, pp=1, dp=8",
    "bubble": {DEGREES: "tp=4, pp=4, dp=4", MORE: 'zero=1, recompute="selective"'},
}
RIGHT["plan_70b"] = {
    "some recomputation": '"none"  ->  "selective"',
    "a pipeline with virtual stages": {DEGREES: "tp=4, pp=4, dp=4, virtual=10", MORE: 'zero=1, recompute="selective"'},
}


class TestParallelism(ExerciseTests):
    checks = parallelism_3d
    WRONG, RIGHT = WRONG, RIGHT

    def refused_with(self, exercise, hint, number=1):
        return str(self.refusal(exercise, self.wrong(exercise, hint, number)))

    @pytest.mark.parametrize(("nodes", "gpus"), [(2, 2), (3, 2)])
    def test_slips_of_training_differ_from_the_right_weights_and_from_each_other(self, nodes, gpus):
        right = flat_weights(parallelism_3d._all_ranks(nodes, gpus))
        wrongs = {
            (hint, number): flat_weights(edited_function(parallelism_3d._all_ranks, slip)(nodes, gpus))
            for hint, slips in parallelism_3d._SLIPS.items()
            for number, slip in enumerate(listed(slips))
        }
        assert not any(torch.allclose(right, wrong, rtol=1e-4) for wrong in wrongs.values())
        for (one, first), (other, second) in itertools.combinations(wrongs.items(), 2):
            assert one[0] == other[0] or not torch.allclose(first, second, rtol=1e-4), (one, other)

    def test_all_ranks_in_one_process_train_like_one(self):
        _, whole = parallelism_3d._one_process()
        for rank, weights in enumerate(parallelism_3d._all_ranks(2, 3)):
            for name, right in parallelism_3d._cut(whole, rank % 3, 3).items():
                torch.testing.assert_close(weights[name], right, rtol=1e-12, atol=1e-12)

    def test_layouts_of_the_check_are_judged_as_the_planner_does(self):
        for name, gpus, layout, batch, _ in parallelism_3d._LAYOUTS:
            model, cluster = PUBLISHED[name], planner.cluster(parallelism_3d._MACHINE, gpus)
            found = parallelism_3d._reasons(model, cluster, layout, batch)
            assert bool(found) == bool(planner.reasons_against(model, cluster, layout, batch))
            assert found <= {"gpus", "heads", "layers", "batch", "interleaving", "memory"}

    def test_the_planners_own_best_passes_the_puzzle(self):
        best = parallelism_3d.best_70b().layout
        parallelism_3d.plan_70b(lambda: best)

    def test_other_layouts_than_the_solution_pass_the_puzzle(self):
        name, machine, gpus, batch = parallelism_3d.PUZZLE
        found = planner.search(PUBLISHED[name], planner.cluster(machine, gpus), batch, cp=1)
        enough = parallelism_3d.SHARE * found.plans[0].seconds
        fits = [p for p in found.plans if p.seconds <= enough and p.memory.total <= parallelism_3d.LIMIT]
        degrees = {p.layout.degrees for p in fits}
        assert len(degrees) > 1

    def test_refusals_name_ranks_bytes_and_seconds(self):
        turned = self.refused_with("hybrid_training", "tp-across-nodes")
        assert "2 nodes with 2 GPUs each, rank 1: this rank holds part 0 of the weights" in turned
        between = self.refused_with("hybrid_training", "between")
        assert "between the nodes 3768 bytes are sent; 1944 are enough" in between
        assert "there is no [0, 1, 2, 3]" in self.refused_with("mesh_groups", "sizes")
        twice = self.refused_with("clip_gradients", "twice")
        assert re.search(r"the norm is \d+\.\d+; expected \d+\.\d+", twice)
        assert re.search(r"compute +\d+\.\d\d s   best +\d+\.\d\d s", self.refused_with("plan_70b", "compute"))

    def test_misprint_is_found_by_the_solution(self):
        why_not = self.answer("why_not")
        assert why_not(*planner.plan_inputs(recorded.LLAMA3_MISPRINT)) == {"gpus"}
        assert not any(why_not(*planner.plan_inputs(run)) for run in recorded.LLAMA3_RUNS)


def flat_weights(ranks):
    return torch.cat([w.flatten() for weights in ranks for w in weights.values()])
