"""The exercises on three-dimensional parallelism: what each check looks at, and the usual mistakes with their hints.

Training runs on real ranks in float64, equal to one process to 1e-12; the bytes inside a node and between nodes are
then read from the ledger. Layouts are judged by the planner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_utils import record
from course_utils.check import Case, Exercise, checked, exercise, paper
from course_utils.check.compare import number, show, whole_numbers
from course_utils.check.groups import DIFFERENT, GroupsInStep
from course_utils.check.program import hints_of
from course_utils.check.traffic import by_node
from course_utils.costs import bytes_sent
from course_utils.ranks import share
from course_utils.transformer import PUBLISHED, TransformerConfig

from . import answers, planner
from .planner import Layout

share("torch._dynamo")  # every optimizer imports it as it is made: a second on each rank

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}


def named(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in sizes.items())


# --- exercise 1: the groups of a mesh

MESHES = [
    Case(0, named(sizes), (sizes,), hint) for sizes, hint in (
        ({"dp": 2, "tp": 4}, None),
        ({"pp": 2, "dp": 2, "tp": 2}, None),
        ({"pp": 4, "dp": 8, "tp": 8}, None),
        ({"dp": 6}, "any-mesh"),
        ({"pp": 2, "dp": 3, "cp": 2, "tp": 4}, "any-mesh"),
        ({"pp": 3, "dp": 1, "tp": 5}, "any-mesh"),
        ({"tp": 3, "dp": 2}, "any-mesh"),
    )
]


@exercise("Exercise 1", cases=MESHES, passed="for meshes of one to four dimensions, among them 4 × 8 × 8.")
def mesh_groups(note, answer, sizes):
    got, right = answer(dict(sizes)), planner.mesh_groups(sizes)
    complete = isinstance(got, dict) and set(got) == set(sizes)
    found = {name: sorted_groups(got[name]) for name in sizes} if complete else {"": None}
    if not note.holds(None not in found.values(), "odd", f"the function returned {str(got)[:100]}."):
        return
    for name, groups in found.items():
        ranks = [rank for group in groups for rank in group]
        lost = "missing" if set(groups) < set(right[name]) else "value"
        key = "repeated" if len(set(ranks)) < len(ranks) else lost
        shown = ", ".join(str(list(group)) for group in groups[:3]) + ", …" * (len(groups) > 3)
        absent = [list(group) for group in right[name] if group not in groups]
        told = f"there is no {absent[0]}" if absent else f"expected {len(right[name])}"
        same = groups == sorted(right[name])
        note.holds(same, key, f"{name} has the groups {shown}; {told}.", ("all groups", found))


def sorted_groups(value: Any) -> list[tuple[int, ...]] | None:
    lines = [whole_numbers(line) for line in value] if isinstance(value, list | tuple) else [None]
    return None if None in lines else sorted(tuple(sorted(line)) for line in lines)


MISTAKES["mesh_groups"] = {
    "odd": ("Return a dictionary with a list of groups for each dimension; each group is a list of ranks.",
            "return groups  ->  return {name: sum(lines, []) for name, lines in groups.items()}"),
    "missing": ("Some groups are missing: in each dimension every rank is in one.",
            "groups[name] =  ->  firsts = firsts[:1]\ngroups[name] ="),
    "repeated": ("A rank is in several groups of the same dimension, or a group is listed more than once.",
            "for first in firsts]  ->  for first in firsts for _ in range(size)]"),
    "transposed": ("The ranks count in the other direction: the last dimension changes fastest, as a last digit.",
            "in reversed(sizes.items())  ->  in sizes.items()"),
    "same-coordinate": ("Within a group the coordinate in its dimension differs, and all the others are the same.",
            {"for k in range(size)] for first in firsts]": "for first in firsts] for k in range(size)]"}),
    "sizes": ("A dimension of size 4 has groups of 4 ranks, whatever the other sizes.",
            "for k in range(size)]  ->  for k in range(2)]"),
    "value": ("These are not the right ranks. Look at where the groups begin, and at the step between their ranks.",
            "stride *= size  ->  pass"),
    "any-mesh": ("The groups have to come out right for any number of dimensions and any sizes.",
            "stride *= size  ->  stride *= size if len(groups) < 3 else 1"),
}


RIGHT["mesh_groups"] = {
    "tuples in another order": "return groups  ->  "
        "return {name: tuple(map(tuple, lines[::-1])) for name, lines in groups.items()}",
    "whole numbers of NumPy": "return groups  ->  import numpy as np\n\n"
        "return {name: [list(np.array(line)) for line in lines] for name, lines in groups.items()}",
}

# --- exercise 2: on paper

SENT = "tensor / 1e9, pipeline / 1e9, data / 1e9"

MISTAKES["traffic"] = {
    "of-ideal": ("""(p - 1)/m is the bubble's share of the time in which nobody waits. Of all time it is less; and the
        docstring asks for per cent.""", ["(count + pp - 1)  ->  count", "100 * (pp - 1)  ->  (pp - 1)"]),
    "microbatches": ("The micro-batches are those of one replica: its sequences divided by those of a micro-batch.",
            [f"batch / (dp * microbatch)  ->  batch{rest}" for rest in (" / microbatch", " / dp", "")]),
    "forward-only": ("""Tensor parallelism has four all-reduces a layer: attention and MLP, forward and backward; and a
        stage has 1/pp of the layers.""", ["pp * 4 *  ->  pp * 2 *", "layers / pp  ->  layers"]),
    "all-reduce": ("A ring all-reduce sends 2(n - 1)/n of the tensor from each GPU.",
            [{"2 * (tp - 1) / tp": ring.format("tp"), "2 * (dp - 1) / dp": ring.format("dp")}
             for ring in ("({0} - 1) / {0}", "2 * ({0} > 1)")]),
    "one-way": ("""For each micro-batch a stage in the middle sends the whole activation on and a gradient back, at its
        boundary and not in every layer. With pp = 1 there is no other stage.""", [" if pp > 1 else 0  ->  ",
             "2 * activation if  ->  activation if", "2 * activation if  ->  2 * activation * layers / pp if"]),
    "whole-model": ("These are the gradients of more of the model than a rank has. It sends those of its own shard.",
            [f"/ (tp * pp)  ->  {part}" for part in ("", "/ pp", "/ tp")]),
    "data-microbatches": ("Gradients add up over the micro-batches, and travel once in a step.",
            "data / 1e9  ->  count * data / 1e9"),
    "bytes": ("An element has 2 bytes, and the docstring asks for GB: 10⁹ bytes.",
            [{"activation = 2": "activation = 4", "dp * 2 * parameters": "dp * 4 * parameters"},
             {SENT: SENT.replace("1e9", "2**30")}]),
}


RIGHT["traffic"] = {
    "a list": {SENT: "*(x * 1e-9 for x in (tensor, pipeline, data))]", "return 100": "return [100"},
    "rings in another form": {"2 * (tp - 1) / tp": "2 * (1 - 1 / tp)", "2 * (dp - 1) / dp": "(2 - 2 / dp)"},
}

traffic = paper(
    "Exercise 2", answers.traffic, MISTAKES["traffic"], units=["% bubble", "GB tensor", "GB pipeline", "GB data"],
    cases=[
        (80, 8192, 8192, 70.6e9, 8, 4, 2, 128, 1), (32, 4096, 2048, 6.7e9, 4, 4, 8, 256, 2),
        (96, 12288, 2048, 174.6e9, 8, 8, 16, 1536, 1), (32, 4096, 4096, 6.7e9, 1, 8, 4, 64, 1),
        (40, 5120, 2048, 13e9, 2, 1, 4, 48, 3), (48, 8192, 2048, 39.1e9, 8, 4, 1, 64, 2),
    ],
    allowed=lambda layers, hidden, length, parameters, tp, pp, dp, batch, microbatch:
        batch % (dp * microbatch) == 0 and layers % pp == 0,
)

# --- exercise 3: the order for a node

ORDERS = [
    (0, f"sizes {case[0]}, GB {case[1]}, {case[2]} GPUs a node", *case) for case in (
        ({"dp": 4, "tp": 2, "cp": 2, "pp": 2}, {"dp": 7, "tp": 11, "cp": 10, "pp": 1}, 4),
        ({"tp": 4, "pp": 2, "dp": 4, "cp": 2}, {"tp": 12, "pp": 7, "dp": 7, "cp": 11}, 4),  # swaps of two get stuck
        ({"tp": 2, "dp": 2}, {"tp": 6, "dp": 1}, 2),
        ({"tp": 4, "pp": 2, "dp": 8}, {"tp": 40, "pp": 3, "dp": 9}, 8),
        ({"tp": 8, "pp": 4, "dp": 8}, {"tp": 90, "pp": 4, "dp": 10}, 8),
        ({"pp": 4, "tp": 2, "dp": 4}, {"pp": 2, "tp": 30, "dp": 20}, 8),
        ({"a": 4, "b": 2}, {"a": 3, "b": 2}, 2),
        ({"dp": 3, "tp": 4, "pp": 2}, {"dp": 5, "tp": 4, "pp": 7}, 4),
        ({"tp": 3, "pp": 2, "dp": 2}, {"tp": 9, "pp": 1, "dp": 10}, 4),  # the best innermost one has a bad rest
        ({"tp": 4, "dp": 4}, {"tp": 3, "dp": 1}, 16),
        ({"tp": 4, "dp": 2}, {"tp": 3, "dp": 1}, 1),
    )
]


def between_nodes(order: Sequence[str], sizes: Mapping[str, int], gigabytes: Mapping[str, float], node: int) -> float:
    """GB that all ranks send to another node, each to the next of its groups."""
    return sum(
        gigabytes[name]
        for name, lines in planner.mesh_groups({name: sizes[name] for name in order}).items()
        for line in lines
        for a, b in zip(line, (*line[1:], line[0]), strict=True)
        if a // node != b // node
    )


@exercise("Exercise 3", cases=ORDERS, passed=": no order of the dimensions sends less between nodes.")
def node_order(note, answer, sizes, gigabytes, node):
    got = answer(dict(sizes), dict(gigabytes), node)
    form = isinstance(got, list | tuple) and all(isinstance(name, str) for name in got) and sorted(got) == sorted(sizes)
    if note.holds(form, "odd", f"the function returned {str(got)[:100]}."):
        costs = {order: between_nodes(order, sizes, gigabytes, node) for order in itertools.permutations(sizes)}
        best, mine = min(costs, key=costs.get), tuple(got)
        least = f"{', '.join(best)} sends {costs[best]:g} GB"
        what = f"{', '.join(mine)} sends {costs[mine]:g} GB between nodes; {least}."
        note.holds(costs[mine] <= costs[best] + 1e-9, "not-best", what, ("order", mine))


BEST = "min(itertools.permutations(sizes), key=between_nodes)"

MISTAKES["node_order"] = {
    "odd": ("Return the names of all dimensions, each once, beginning with the one that changes slowest.",
            f"return {BEST}  ->  return [sizes[name] for name in {BEST}]"),
    "node-ignored": ("The size of a node decides which neighbours are on another node.",
            "def between_nodes(order):  ->  gpus_per_node = 2\n\ndef between_nodes(order):"),
    "backwards": ("This is the best order reversed. The last dimension changes fastest: its ranks are neighbours.",
            f"{BEST}  ->  {BEST}[::-1]"),
    "by-degree": ("The dimensions are sorted by their number of ranks. What counts is what they send between nodes.",
            f"{BEST}  ->  sorted(sizes, key=sizes.get)"),
    "greedy": ("""The dimensions are sorted by what they send, with the largest innermost. That is often right, but here
        another order sends less between nodes.""", f"{BEST}  ->  sorted(sizes, key=gigabytes.get)"),
    "not-best": ("""Another order sends less between nodes. Compare these GB with your own count, which has to take
        every group of every dimension, all the way round.""", "return min(  ->  return max("),
}


RIGHT["node_order"] = {
    "the last of the best": f"{BEST}  ->  min(list(itertools.permutations(sizes))[::-1], key=between_nodes)",
    "a list, sorted": f"{BEST}  ->  list(sorted(itertools.permutations(sizes), key=between_nodes)[0])",
}

# --- exercise 4: hybrid training

WIDTH, INNER, BATCH, STEPS, RATE = 6, 12, 120, 3, 0.2
HYBRIDS = [
    Case(nodes * gpus, f"nodes × GPUs: {nodes} × {gpus}", (nodes, gpus), hint) for nodes, gpus, hint in (
        (2, 2, None), (2, 3, "sizes"), (3, 2, "sizes"), (1, 2, "sizes"), (2, 1, "sizes"), (1, 1, None),
    )
]
EXPLAINED = {
    DIFFERENT: "hang",  # or a result by chance
    "register a hook on a tensor that doesn't require|does not require grad and does not have a grad_fn": "cut-off",
}

Weights = dict[str, Tensor]


def whole_weights() -> Weights:
    generator = torch.Generator().manual_seed(1201)
    shapes = {"gain": (WIDTH,), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    return {k: torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for k, shape in shapes.items()}


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1202)
    pairs = torch.randn(STEPS, 2, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return [(x, target) for x, target in pairs]


@cache
def in_one_process() -> tuple[list[float], Weights]:
    weights, losses = {k: w.requires_grad_() for k, w in whole_weights().items()}, []
    for x, target in batches():
        loss = F.mse_loss(x + F.gelu((x * weights["gain"]) @ weights["up"].T) @ weights["down"].T, target)
        for w, gradient in zip(weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True):
            w.data -= RATE * gradient
        losses.append(loss.item())
    return losses, {k: w.detach() for k, w in weights.items()}


@exercise("Exercise 4", cases=HYBRIDS, explains=("shards", "loss"), explained=EXPLAINED,
          passed="equal to one process to 1e-12, and the fewest bytes between nodes.")
def hybrid_training(note, answer, nodes, gpus):
    from torch.utils.flop_counter import FlopCounterMode

    rank = dist.get_rank()
    with FlopCounterMode(display=False) as counter, GroupsInStep(), record() as ledger:
        got = answer(whole_weights(), batches(), RATE, gpus)
    try:
        losses, weights = [float(loss) for loss in got[0]], {k: w.detach() for k, w in got[1].items()}
    except (TypeError, ValueError, AttributeError, LookupError):
        note.holds(False, "odd", f"the function returned {str(got)[:100]}.")
        return
    note.talks(ledger, nodes * gpus)
    losses_of_one, whole = in_one_process()
    up, down = whole["up"].chunk(gpus)[rank % gpus], whole["down"].chunk(gpus, dim=1)[rank % gpus]
    right = {"gain": whole["gain"], "up": up, "down": down}
    shapes, expected = ({k: tuple(w.shape) for k, w in some.items()} for some in (weights, right))
    if note.holds(shapes == expected, "shards", f"the weights have shapes {shapes}; expected {expected}."):
        note.equal(weights, right, "the weight")
    same = len(losses) == STEPS and np.allclose(losses, losses_of_one, rtol=1e-6)
    expected, found = (", ".join(f"{v:.6g}" for v in some) for some in (losses_of_one, losses))
    note.holds(same, "loss", f"the losses are wrong.\n  expected  {expected}\n  got       {found}")
    note_links(note, ledger, nodes, gpus)
    own = STEPS * 3 * 2 * 2 * (BATCH // nodes) * WIDTH * (INNER // gpus)  # two products, forward and twice backward
    note.at_most("too-many-bytes", counter.get_total_flops(), own * 4 / 3,  # forward once more is allowed
                 "{number:,} operations in matrix products; " + f"{own:,} are enough.")


def note_links(note, ledger, nodes, gpus):
    """Between nodes the gradients of a shard and the loss, inside two all-reduces a step; and no fewer."""
    inside, between = by_node(ledger, dist.get_rank(), gpus)
    slack = 16 * STEPS
    activation, parts = 8 * BATCH // nodes * WIDTH, 8 * 2 * WIDTH * INNER // gpus  # bytes
    one = STEPS * bytes_sent("all_reduce", gpus, activation)
    least, most = (STEPS * bytes_sent("all_reduce", nodes, size) for size in (parts, parts + 8 * WIDTH + 8))
    none = dict.fromkeys(("not_distributed", "too_few_bytes"), "too-many-bytes")
    note.sent(inside, sent=(one, None), **none)
    note.sent(between, sent=(least, most + slack), **none)
    note.sent(inside, sent=2 * one + slack)


PART = "x, target = x.chunk(nodes)[node], target.chunk(nodes)[node]"
COPY = 'copy_to(x * own["gain"], groups["tp"])'
PARTIAL = 'F.linear(inner, own["down"])'
SUM_OVER = f'sum_over({PARTIAL}, groups["tp"])'
MEAN = 'summed(gradient, groups["dp"]) / nodes'
EVERYWHERE = "summed(gradient, None) / dist.get_world_size()"
LOSS = 'summed(loss, groups["dp"]).item() / nodes'
MESH = 'mesh = dist.init_device_mesh("cpu", (nodes, gpus_per_node), mesh_dim_names=("dp", "tp"))'
GROUPS = 'groups = {name: mesh.get_group(name) for name in ("dp", "tp")}'
RETURN = "return losses, {name: w.detach() for name, w in own.items()}"

MISTAKES["hybrid_training"] = {
    "shards": ("""These are not the weights of a shard: gain is whole, up is cut by rows and down by columns, into as
        many parts as a node has GPUs. Tensor parallelism belongs inside a node, where ranks are neighbours.""",
            [{"node, gpu = divmod(dist.get_rank(), gpus_per_node)": "gpu, node = divmod(dist.get_rank(), nodes)",
              MESH: 'mesh = dist.init_device_mesh("cpu", (gpus_per_node, nodes), mesh_dim_names=("tp", "dp"))'}]),
    "no-f": ("""Every rank of the tensor-parallel group used x * gain, so the gradient of it is a sum over them. Behind
        down the outputs of all of them are added up, and then x, once.""", [f'{COPY}  ->  x * own["gain"]',
             f"{SUM_OVER}  ->  {PARTIAL}"]),
    "sum": ("""Every gradient, that of the gain too, has to be the mean over the replicas: those ranks saw different
        samples. It is not their sum, nor divided by the number of all ranks.""",
            [f'{MEAN}  ->  summed(gradient, groups["dp"])', f"{MEAN}  ->  gradient"]),
    "wrong-group": ("""Two groups are confused. Ranks of a tensor-parallel group compute one layer together: they need
        the same samples, and hold different parts of the weights.""",
            [f'{MEAN}  ->  summed(gradient, groups["tp"]) / gpus_per_node', f"{MEAN}  ->  {EVERYWHERE}"]),
    "cut-off": ("""The loss has lost its way back to the weights. What summed returns is detached; sum_over keeps the
        gradient, and copy_to needs a tensor that has one.""", "sum_over(F.linear  ->  summed(F.linear"),
    "loss": ("""The weights are right, but the losses are not those of the whole batch before each step: each rank knows
        the loss of one part of it.""", [f"{LOSS}  ->  loss.item()", f'{LOSS}  ->  summed(loss, groups["dp"]).item()']),
    "too-many-bytes": ("""The result is right, but the work or the traffic is not that of both kinds of parallelism:
        each rank multiplies its part of the weights with its node's part of the batch. Between nodes go the gradients
        of a rank's shards, among the ranks that hold the same part, and one number for the loss.""",
            [f"{PART}  ->  pass", f'w -= lr * {MEAN}  ->  w -= lr * {MEAN}\nsummed(gradient, groups["dp"])']),
    "sizes": ("""This is right for two nodes with two GPUs each. Look for a fixed number, or for one of the two sizes
        where the other belongs.""", f'{MEAN}  ->  summed(gradient, groups["dp"]) / 2'),
}

RIGHT["hybrid_training"] = {
    "groups by hand, tensors returned": {
        MESH: "pass",
        GROUPS: "lines = mesh_groups({'dp': nodes, 'tp': gpus_per_node})\n"
            "made = {name: [dist.new_group(line) for line in some] for name, some in lines.items()}\n"
            "groups = {'dp': made['dp'][gpu], 'tp': made['tp'][node]}",
        RETURN: "return torch.tensor(losses), own",
    },
    "samples dealt like cards": f"{PART}  ->  x, target = x[node::nodes], target[node::nodes]",
}

# --- exercise 5: the norm of a mesh

CUTS = (((4, 3), ("dp",)), ((5,), ("dp", "tp")), ((2, 6), ()), ((3,), ("tp",)))  # shape, dimensions with copies
ROUNDS = 4  # of these kinds in each stage
NORM_CASES = [
    Case(math.prod(sizes.values()), named(sizes) + ", no gradients on the last stage" * bare, (sizes, bare), hint)
    for sizes, bare, hint in (
        ({"dp": 2, "tp": 2}, False, None), ({"pp": 2, "dp": 2, "tp": 2}, False, None),
        ({"tp": 2, "dp": 3}, False, None), ({"pp": 2, "tp": 2}, True, "nothing"), ({"dp": 1}, False, None),
    )
]


def place_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    return dict(zip(sizes, map(int, np.unravel_index(rank, tuple(sizes.values()))), strict=True))


def held(rank: int, sizes: Mapping[str, int], bare: bool) -> list[tuple[Tensor, tuple[str, ...]]]:
    """The gradients of a rank, each with the dimensions of its copies; with ``bare`` the last stage has none."""
    place = place_of(rank, sizes)
    stage = place.get("pp", 0)
    if bare and stage == sizes.get("pp", 1) - 1:
        return []
    found = []
    for i, (j, (shape, along)) in itertools.product(range(ROUNDS + stage), enumerate(CUTS)):
        copies = tuple(name for name in along if name in sizes)
        part = tuple(place.get(name, 0) for name in ("dp", "tp") if name not in copies)
        generator = torch.Generator().manual_seed(hash((stage, i, j, *part)) % 2**31)
        found.append((torch.randn(shape, generator=generator), copies))
    return found


def norm_of_all(sizes: Mapping[str, int], bare: bool) -> float:
    """Of what all ranks hold; of copies the first one counts."""
    squares = (
        gradient.double().pow(2).sum().item()
        for rank in range(math.prod(sizes.values())) for gradient, copies in held(rank, sizes, bare)
        if all(place_of(rank, sizes)[name] == 0 for name in copies)
    )  # fmt: skip
    return math.sqrt(sum(squares))


@exercise("Exercise 5", cases=NORM_CASES, explained=dict.fromkeys(("non-empty", "is empty"), "nothing"),
          passed="the norm of the whole model on every rank, for one number each.")
def clip_gradients(note, answer, sizes, bare):
    n, own = dist.get_world_size(), held(dist.get_rank(), sizes, bare)
    mesh = dist.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    groups, norm = {name: mesh.get_group(name) for name in sizes}, norm_of_all(sizes, bare)
    before, copies = [gradient for gradient, _ in own], [names for _, names in own]
    results = []
    for limit in (0.4 * norm, 2 * norm):
        mine = [gradient.clone() for gradient in before]
        given = list(mine)
        with record() as ledger:
            got = answer(given, copies, groups, limit)
        results.append((limit, got, mine, given, ledger))
    for limit, got, mine, given, _ in results:
        found = number(got.item() if isinstance(got, Tensor) and got.numel() == 1 else got)
        if not note.holds(found is not None, "odd", f"the function returned {show(got)}."):
            return
        what = f"limit {limit:.3g}: the norm is {found:.6g}; expected {norm:.6g}."
        note.holds(math.isclose(found, norm, rel_tol=1e-5), "value", what, ("norm", f"{found:.5g}"))
        factor = min(1.0, limit / norm)
        right = all(torch.allclose(a, factor * b, rtol=1e-5) for a, b in zip(mine, before, strict=True))
        kept = list(map(id, given)) == list(map(id, mine))
        note.holds(right or kept, "not-clipped", "some tensors of the list are others than before.")
        scaled = float(mine[0].flatten()[0] / before[0].flatten()[0]) if mine else 1.0
        what = f"limit {limit:.3g}: the gradients were multiplied by {scaled:.4g}; expected {factor:.4g}."
        note.holds(right, "value", what, ("factor", f"{scaled:.4g}"))
    for *_, ledger in results if n > 1 else []:
        most = 2 if {entry.op for entry in ledger} == {"reduce", "broadcast"} else 1
        note.sent(ledger, calls=(1, most), largest=8 * max(n, 4), too_large="too-many-messages",
                  too_many_calls="too-many-messages")


START = "total = torch.zeros((), dtype=torch.float64)"
ADD = "total += gradient.double().pow(2).sum() / count"
ALL_REDUCE = "dist.all_reduce(total)"
SCALE = """for gradient in gradients:
            gradient *= limit / norm"""

MISTAKES["clip_gradients"] = {
    "no-grad": ("clip_grad_norm_ takes parameters and reads their .grad; this list holds the gradients themselves.",
            f"{START}  ->  return torch.nn.utils.clip_grad_norm_(gradients, limit)\n{START}"),
    "own": ("""That is the norm of a part: of this rank's tensors, of one group or one pipeline stage. All other stages
        and shards belong to the model, too.""", [f"{ALL_REDUCE}  ->  dist.all_reduce(total.clone())",
             *[f'{ALL_REDUCE}  ->  dist.all_reduce(total, group=groups.get("{name}"))' for name in ("tp", "dp")]]),
    "twice": ("""Tensors that several ranks hold alike count once: divide their squares, and not their norms, by the
        number of copies. Those that are cut count on each rank.""", ["/ count  ->  / count**2", " / count  ->  "]),
    "sum-of-norms": ("Norms do not add up, their squares do, and the norm is the root of that sum.",
            {ALL_REDUCE: f"total = total.sqrt()\n{ALL_REDUCE}", "total.sqrt().item()": "total.item()"}),
    "nothing": ("A rank without any gradient still takes part in the sum: the others wait for it.",
            f"{START}  ->  if not gradients:\n    return 0.0\n{START}"),
    "not-clipped": ("""The norm is right and larger than the limit, but the tensors that were given have not changed:
        they are what the optimizer sees.""", ["if norm > limit:  ->  if False:",
             {SCALE: "gradients[:] = [gradient * (limit / norm) for gradient in gradients]"}]),
    "always": ("""The norm is right, but the factor is not: below the limit nothing is scaled, and above it all ranks
        need the same factor.""", ["if norm > limit:  ->  if True:",
             {"if norm > limit:": "own = sum(g.double().pow(2).sum().item() for g in gradients) ** 0.5\n"
              "if own > limit:", "limit / norm": "limit / own"}]),
    "too-many-messages": ("""The norm is right, but one sum of one number from each rank, over all ranks at once, is
        enough: not one for each tensor, nor one for each dimension.""",
            [f"{ALL_REDUCE}  ->  {ALL_REDUCE}\ndist.all_reduce(torch.zeros(1000))",
             f"{ALL_REDUCE}  ->  for group in groups.values():\n    dist.all_reduce(total, group=group)"]),
}

RIGHT["clip_gradients"] = {
    "gathered": {ALL_REDUCE: "squares = [torch.empty_like(total) for _ in range(dist.get_world_size())]\n"
        "dist.all_gather(squares, total)\ntotal = torch.stack(squares).sum()"},
    "reduced to one rank, in single precision, a tensor": {
        START: "total = torch.tensor(0.0)", ADD: "total += (gradient**2).sum() / count",
        ALL_REDUCE: "dist.reduce(total, 0)\ndist.broadcast(total, 0)", "return norm": "return torch.tensor([norm])",
        SCALE: "torch._foreach_mul_(gradients, limit / norm) if gradients else None",
    },
}

# --- exercise 6: legality

MACHINE = "DGX H100"
LAYOUTS: tuple[tuple[str, int, Layout, int, str], ...] = (  # model, GPUs, layout, batch, hint if it fails
    ("Llama 3 70B", 64, Layout(8, 4, 2), 128, "memory"),
    ("Llama 3 405B", 1024, Layout(8, 16, 8), 128, "layers"),
    ("Llama 3 70B", 64, Layout(8, 4, 4), 128, "gpus"),
    ("Llama 3 405B", 16384, Layout(8, 16, 4, cp=16), 2048, "gpus"),
    ("Llama 3 405B", 16384, Layout(8, 16, 8, cp=16), 2048, "gpus"),
    ("Megatron 145.6B", 64, Layout(16, 2, 2), 64, "heads"),
    ("Megatron 18.4B", 64, Layout(32, 1, 2), 64, "heads"),
    ("Llama 3 70B", 64, Layout(16, 2, 2), 128, "heads"),
    ("Llama 3 70B", 96, Layout(8, 12, 1, zero=0), 120, "layers"),
    ("Llama 3 70B", 64, Layout(8, 4, 2, virtual=3), 128, "layers"),
    ("Llama 3 70B", 64, Layout(4, 4, 4), 66, "batch"),
    ("Llama 3 70B", 64, Layout(4, 4, 4, microbatch=4), 72, "batch"),
    ("Llama 3 70B", 64, Layout(16, 3, 2), 35, "all-reasons"),
    ("Llama 3 70B", 64, Layout(8, 4, 2), 20, "interleaving"),
    ("Llama 3 405B", 16384, Layout(8, 16, 8, cp=16), 64, "batch"),
    ("Llama 3 70B", 64, Layout(8, 4, 2, virtual=2), 20, "interleaving"),
    ("Llama 3 70B", 64, Layout(8, 4, 2, virtual=2), 21, "interleaving"),
    ("Llama 3 70B", 64, Layout(8, 1, 8, virtual=2, zero=1), 128, "interleaving"),
    ("Llama 3 70B", 64, Layout(1, 6, 8, zero=0), 128, "memory"),
    ("Llama 3 70B", 64, Layout(8, 1, 8, zero=0), 128, "memory"),
    ("Llama 3 70B", 64, Layout(8, 1, 8, zero=1), 128, "zero"),
    ("Llama 3 70B", 64, Layout(1, 1, 64, zero=1), 128, "memory"),
    ("Llama 3 70B", 64, Layout(1, 1, 64, zero=3), 128, "zero"),
    ("Llama 3 70B", 48, Layout(4, 1, 12, zero=1), 96, "zero"),
    ("Llama 3 70B", 64, Layout(4, 1, 4, cp=4, zero=2), 8, "zero"),
)
WORDS = {"gpus", "heads", "layers", "batch", "interleaving", "memory"}


def described(name: str, gpus: int, layout: Layout, batch: int) -> str:
    more = [f"{k} {getattr(layout, k)}" for k in ("cp", "microbatch", "virtual", "zero") if getattr(layout, k) != 1]
    return f"{name} on {gpus} GPUs, {', '.join([str(layout), *more])}, batch {batch}"


def words_against(model: TransformerConfig, cluster: planner.GpuCluster, layout: Layout, batch: int) -> set[str]:
    """The words for what speaks against a layout; memory only where nothing else does."""
    kinds = {kind for kind, _ in planner.broken_rules(model, cluster, layout, batch)}
    return kinds or ({"memory"} if planner.reasons_against(model, cluster, layout, batch) else set())


@exercise("Exercise 6", cases=[(0, described(*case), *case, key) for *case, key in LAYOUTS],
          passed=f": {len(LAYOUTS)} layouts, with the reasons of the planner.")
def why_not(note, answer, name, gpus, layout, batch, key):
    case = PUBLISHED[name], planner.cluster(MACHINE, gpus), layout, batch
    got, right = answer(*case), words_against(*case)
    form = isinstance(got, set | frozenset) and got <= WORDS
    if note.holds(form, "odd", f"the function returned {str(got)[:100]}."):
        texts = "; ".join(planner.reasons_against(*case)) or "nothing speaks against it"
        expected, found = (" and ".join(sorted(words)) or "no reason" for words in (right, got))
        key = "all-reasons" if got and got < right else "layers" if "layers" in got - right else key
        note.holds(got == right, key, f"expected {expected}, got {found}. The planner: {texts}.")


INTERLEAVING = "layout.virtual > 1 and (pp == 1 or not rest and count % pp)"

MISTAKES["why_not"] = {
    "gpus": ("The product of all degrees has to be the number of GPUs. Context parallelism is one of them.",
            " * layout.cp != cluster.gpus  ->  != cluster.gpus"),
    "heads": ("tp has to divide the query heads, the key-value heads and the width of the MLP.",
            " or model.kv_heads % tp  ->  "),
    "layers": ("""Each of the pp · virtual chunks gets the same number of layers, where embedding and head may count as
        a layer each.""", ["layout.pp * layout.virtual  ->  layout.pp", " and (model.layers + 2) % chunks  ->  "]),
    "batch": ("""Each replica needs a whole number of micro-batches: dp · microbatch divides the batch. Ranks along cp
        share the sequences of one replica.""", "dp * layout.microbatch  ->  dp"),
    "interleaving": ("""Only virtual stages ask for this: there has to be a pipeline, and the micro-batches of a replica
        come in groups of pp.""", [f"{INTERLEAVING}  ->  False", "not rest and count % pp  ->  count % pp"]),
    "memory": ("""Compare the model states of a rank with its GPU: it has 1/(tp · pp) of the parameters, and 16 bytes
        for each before ZeRO divides. Name memory only where nothing else is wrong.""",
            "model.parameter_count / (tp * pp)  ->  model.parameter_count"),
    "zero": ("ZeRO divides states among the dp · cp ranks: stage 1 the optimizer's, 2 the gradients too, 3 all.",
            ["stage=layout.zero  ->  stage=0", "ranks = dp * layout.cp  ->  ranks = dp"]),
    "all-reasons": ("That is not every reason. Name all of them.", "return words  ->  return set(sorted(words)[:1])"),
}

RIGHT["why_not"] = {
    "any, frozen": {
        "model.heads % tp or model.kv_heads % tp or model.ffn % tp":
            "any(size % tp for size in (model.heads, model.kv_heads, model.ffn))",
        "return words": "return frozenset(words)",
    },
    "a float": {"count, rest = divmod(batch, dp * layout.microbatch)": "count = batch / (dp * layout.microbatch)\n"
        "rest = count % 1"},
}

# --- exercise 7: the puzzle

PUZZLE = (PUBLISHED["Llama 3 70B"], planner.cluster(MACHINE, 64))
SEQUENCES = 128
LIMIT, SHARE = 72e9, 1.05  # bytes on the fullest GPU, and time against the best
GIVEN = ("cp", "precision", "sequence_parallel", "overlap")


@checked
def plan_70b(fn: Callable) -> None:
    """A layout that fits, and is nearly as fast as the planner's best that does."""
    run = Exercise("Exercise 7", hints_of(MISTAKES["plan_70b"]))
    with patch.object(planner, "search", wraps=planner.search) as search:
        got = run.call(fn)
    run.require(isinstance(got, Layout), "form", f"the function returned {str(got)[:100]}.")
    run.require(not search.called, "search", "the function calls planner.search.")
    changed = [name for name in GIVEN if getattr(got, name) != getattr(Layout(), name)]
    run.require(not changed, "rules", f"the layout changes {', '.join(changed)}.")
    against = planner.reasons_against(*PUZZLE, got, SEQUENCES)
    full = words_against(*PUZZLE, got, SEQUENCES) == {"memory"}
    run.require(not against, "memory" if full else "illegal", f"it cannot run: {'; '.join(against)}.")
    mine, found = planner.plan(*PUZZLE, got, SEQUENCES), planner.search(*PUZZLE, SEQUENCES, cp=1)
    best = next(each for each in found.plans if each.memory.total <= LIMIT)
    held = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in mine.memory.parts().items())
    what = f"the fullest GPU holds {mine.memory.total / 1e9:.1f} GB; the target is {LIMIT / 1e9:.0f} GB. In GB: {held}."
    run.require(mine.memory.total <= LIMIT, "memory", what)
    over = mine.seconds / best.seconds
    rows = [f"{part:9} {mine.parts()[part]:7.2f} s   best {best.parts()[part]:7.2f} s" for part in planner.PARTS]
    what = f"the step takes {mine.seconds:.2f} s; the target is {SHARE * best.seconds:.2f} s."
    dearest = max(("compute", "tensor", "bubble"), key=lambda part: mine.parts()[part] - best.parts()[part])
    run.require(over <= SHARE, dearest, "\n".join([f"{what}\n", *rows]))
    print(
        f"Exercise 7 passed: {got}, {mine.seconds:.2f} s a step, {100 * (over - 1):.1f} % above the best; "
        f"{mine.memory.total / 1e9:.1f} GB, {mine.model_tflops:.0f} TFLOP/s a GPU."
    )


DEGREES, MORE = "tp=4, pp=1, dp=16", 'zero=3, recompute="selective"'

MISTAKES["plan_70b"] = {
    "form": ("Return a planner.Layout, such as Layout(tp=8, pp=4, dp=2).",
            f"planner.Layout({DEGREES}, {MORE})  ->  4, 1, 16"),
    "search": ("planner.search found it for you. Here you are the one to search, with plan.",
            "return planner.Layout(  ->  run = planner.published_runs(fitted=True)[0]\n"
            "planner.search(*planner.plan_inputs(run)[:2], run.batch, tp=1)\nreturn planner.Layout("),
    "illegal": ("This layout cannot run at all; the reasons are those of planner.reasons_against.",
            f"{DEGREES}  ->  tp=8, pp=4, dp=1"),
    "rules": ("cp, precision, sequence_parallel and overlap stay as they are: they are not in the list.",
            f"{DEGREES}  ->  tp=1, pp=2, dp=8, cp=4"),
    "memory": ("""The fullest GPU holds too much. What takes most? States shrink with ZeRO and with tp · pp, activations
        with tp and with recomputation.""", f"{MORE}  ->  zero=0"),
    "compute": ("Compute takes the most time that could be saved. Recomputation computes parts of forward again.",
            {DEGREES: "tp=1, pp=1, dp=64", '"selective"': '"full"'}),
    "tensor": ("Tensor parallelism takes the most time that could be saved: its communication is not hidden.",
            f"{DEGREES}  ->  tp=8, pp=1, dp=8"),
    "bubble": ("The bubble takes the most time that could be saved: GPUs wait for the first micro-batches.",
            {DEGREES: "tp=4, pp=4, dp=4", MORE: 'zero=1, recompute="selective"'}),
}
RIGHT["plan_70b"] = {
    "a pipeline with virtual stages": {DEGREES: "tp=4, pp=4, dp=4, virtual=5", "zero=3": "zero=1"},
    "with fewer of them": {DEGREES: "tp=4, pp=4, dp=4, virtual=4", "zero=3": "zero=1"},
}
