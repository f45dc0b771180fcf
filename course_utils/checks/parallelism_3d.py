"""Checks of the exercises on three-dimensional parallelism.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Training runs on real ranks in float64, equal to one process to
1e-12; the bytes inside a node and between nodes are then read from the ledger. Wrong weights are compared with what a
simulation of the usual slips gives, so that each gets its own hint.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import planner
from ..costs import bytes_sent
from ..planner import reasons
from . import TIMEOUT, Exercise, Outcome, checked, close, paper_problem, show
from .training import compare, difference, exact

__all__ = [
    "HINTS", "clip_gradients", "hybrid_training", "make_groups", "mesh_groups", "node_order", "plan_70b", "traffic",
    "why_not",
]  # fmt: skip

HINTS: dict[str, dict[str, str]] = {
    "mesh_groups": {
        "form": "Return a dictionary: for each dimension a list of its groups, each a list of ranks.",
        "missing": "Every rank is in one group of each dimension. List all groups of the mesh, not only those of one "
        "rank.",
        "repeated": "A rank is in several groups of the same dimension, or a group is listed more than once.",
        "transposed": "The ranks count in the other direction: here the last dimension changes fastest, as the last "
        "digit of a number does.",
        "same-coordinate": "These ranks have the same coordinate in that dimension. It is the other way round: in a "
        "group of a dimension this coordinate differs, and all the others are the same.",
        "stride": "The groups have the right size, but the step from one rank to the next is another. It is the "
        "product of the sizes of all dimensions behind this one.",
        "any-mesh": "Right for the meshes before, wrong for another number of dimensions or other sizes.",
    },
    "make_groups": {
        "form": "Return a dictionary: for each dimension the process group that this rank is in.",
        "disagree": "The ranks did not make the same groups at the same time. new_group is a call of all ranks: each "
        "one calls it for every group in the same order, also for those that it is not in.",
        "not-a-member": "new_group returns a number that stands for nothing, NON_GROUP_MEMBER, on ranks that are not "
        "in the group. Keep the group only if this rank is in it.",
        "default": "None is not a group: group=None means all ranks.",
        "wrong-group": "That is the group of other ranks, or of another dimension.",
        "too-many": "More groups were made than there are. Each costs connections, and with NCCL memory on the GPU.",
    },
    "node_order": {
        "form": "Return the names of all dimensions, each once: the one that changes slowest first.",
        "node-ignored": "The order is the same for every size of a node. Count which neighbours are on another one.",
        "backwards": "This is the worst order, or the best one from behind. The last dimension changes fastest: its "
        "neighbours are next to each other.",
        "by-degree": "The dimensions are sorted by their number of ranks. What counts is what they send between nodes.",
        "greedy": "The dimension that sends most is innermost. That is right where its group fits into a node; here "
        "another order sends less between nodes. Try all orders.",
        "not-best": "Another order sends less between nodes. Compare these GB with your own count, which takes every "
        "group of every dimension, all the way round.",
    },
    "hybrid_training": {
        "form": "Return two things: the losses, one number for each step, and a dictionary of this rank's weights.",
        "shards": "The form of the weights is not that of a shard: gain whole, up cut by rows, down by columns into as "
        "many parts as a node has GPUs.",
        "tp-across-nodes": "These weights belong to a mesh that is turned: tensor parallelism runs between the nodes, "
        "data parallelism inside. The dimension that sends most belongs inside: ranks of a node are neighbours.",
        "no-f": "Gradients of the shards are right, that of the gain is only this rank's part. Every rank of the "
        "tensor-parallel group used x * gain: copy_to sums its gradient.",
        "sum": "The gradients are added up over the replicas, not averaged: too large by their number.",
        "divided": "The gradients are too small: they are divided by the number of all ranks. Only replicas that saw "
        "other samples count in a mean.",
        "wrong-group": "The gradients were averaged over the wrong group. Ranks of a tensor-parallel group hold "
        "different parts of the weights, whose gradients have nothing to do with each other. Average over ranks that "
        "hold the same part.",
        "gain-twice": "The gradient of the gain was summed over the tensor-parallel group once more. Behind copy_to it "
        "is whole on every rank.",
        "gain-apart": "The gain is the same on every rank, but its gradient comes from the samples of this node alone. "
        "Average it over the replicas like the others.",
        "no-g": "The output lacks what the other GPUs of the node add to it: sum_over, behind down.",
        "x-in-the-sum": "x is counted once for each GPU of the node. It stands outside of sum_over.",
        "not-a-leaf": "copy_to needs a tensor that has a gradient: around x * gain, not around x; and the weights need "
        "requires_grad_().",
        "cut-off": "The loss has lost its way back to the weights. summed detaches what it adds; sum_over keeps the "
        "gradient. And the weights need requires_grad_().",
        "value": "None of the usual slips. Take one step and print on each rank: dist.get_process_group_ranks of both "
        "groups, which samples and which part of the weights it has, then y and the gradients.",
        "not-averaged": "The replicas do not agree: each trains with the gradient of its own samples.",
        "batch-by-rank": "The ranks of a tensor-parallel group had different samples. They compute one layer together: "
        "all of them need the same part of the batch.",
        "own-loss": "That is the loss of this rank's part of the batch. Average it over the replicas.",
        "loss": "The weights are right, the losses are not those of the whole batch before each step.",
        "float32": "Right to a few digits only: somewhere the numbers pass through float32, or GELU is an "
        "approximation.",
        "whole-batch": "Every node computes the whole batch: the result is right, and the second node is of no use.",
        "no-tensor-parallelism": "The result is right, but nothing is sent inside a node: every rank multiplied with "
        "whole weights.",
        "all-ranks": "The result is right, but tensors travel through a group of all ranks. Between the nodes a "
        "gradient needs to meet only those ranks that hold the same part.",
        "between": "The result is right, but more bytes pass between the nodes than the gradients of a rank's shards "
        "and one number for the loss need.",
        "inside": "The result is right, but more bytes travel inside a node than one all-reduce forward and one "
        "backward need.",
        "hang": "Some ranks wait for a call that others never make. new_group is a call of all ranks, for every group "
        "in the same order; and all ranks of a group all-reduce the same tensors in the same order.",
        "sizes": "Right for two nodes with two GPUs. Look for a number, or one size, where the other size belongs.",
    },
    "clip_gradients": {
        "number": "Return the norm, as a float or a tensor of one element.",
        "limited": "That is the limit. Return the norm as it was before the gradients were scaled.",
        "no-grad": "That is the norm of nothing. clip_grad_norm_ takes parameters and reads their .grad; the list "
        "here holds the gradients themselves.",
        "norm-divided": "Divide the square of a tensor's norm by the number of copies, not the norm.",
        "own": "That is the norm of this rank's tensors alone.",
        "twice": "Tensors that several ranks hold alike are counted several times. Count each once: divide its "
        "square by the number of its copies, or let one of the ranks count it.",
        "one-group": "That is the norm of what one group holds. Other stages, and other shards, belong to the model "
        "too.",
        "sum-of-norms": "Norms do not add up, their squares do. Take the root last.",
        "squared": "That is the square of the norm.",
        "mean": "The squares of the ranks are added up, not averaged.",
        "shards-lost": "Tensors that are cut were left out on some ranks. Only copies must not count twice.",
        "copies-lost": "Tensors of which there are copies were left out. Each counts once.",
        "nothing": "A rank without any gradient takes part in the sum all the same: the others wait for it.",
        "not-clipped": "The norm is right. It is larger than the limit, and the gradients have not changed.",
        "always": "The norm is below the limit: then nothing is scaled.",
        "own-scale": "The norm is right, but this rank scaled by another factor. All ranks need the same.",
        "replaced": "The norm is right, but the list holds other tensors now. Scale in place: these tensors are what "
        "the optimizer sees.",
        "scale": "The norm is right, the gradients are not. Multiply all by limit / norm if the norm is larger.",
        "too-many-bytes": "The norm is right. One number from each rank is enough; more travels here.",
        "too-many-messages": "The norm is right. Add up on the rank first, and send one number, over all ranks at "
        "once: not one for each tensor, nor one for each dimension.",
    },
    "traffic": {
        "fraction": "The docstring asks for per cent.",
        "of-ideal": "(p - 1)/m is the bubble's share of the time in which nobody waits. Of all time it is less.",
        "microbatches": "The number of micro-batches is that of one replica: batch / (dp · microbatch).",
        "forward-only": "Tensor parallelism has four all-reduces a layer: attention and MLP, forward and backward. "
        "Each sends 2(n - 1)/n of the activation from a GPU.",
        "all-reduce": "A ring all-reduce sends 2(n - 1)/n of the tensor from each GPU.",
        "one-stage": "Without ranks in a dimension nothing is sent for it: here pp is 1.",
        "part-sent": "The whole activation goes to the next stage. A part of 1/tp is enough with sequence parallelism, "
        "which is not used here.",
        "mean-stage": "That is the mean over the stages. A GPU in the middle sends both ways.",
        "all-layers": "A stage has 1/pp of the layers.",
        "one-microbatch": "That is the traffic of one micro-batch. A step has many.",
        "one-way": "A stage in the middle sends an activation on and a gradient back.",
        "whole-model": "A rank's gradients are those of its shard: 1/(tp · pp) of the parameters.",
        "data-microbatches": "Gradients add up over the micro-batches, and travel once in a step.",
        "bytes": "An element has 2 bytes.",
        "gigabytes": "The docstring asks for GB: 10⁹ bytes.",
        "layers-in-pipeline": "Only the boundary of a stage is crossed, not every layer.",
    },
    "why_not": {
        "form": "Return a set of words, empty if the layout can run: gpus, heads, layers, batch, interleaving, memory.",
        "legal": "This layout can run. Look at the condition that gives this word; a rank's states are those of "
        "1/(tp · pp) of the parameters.",
        "context-batch": "Ranks along cp share the sequences of one replica: cp does not divide the batch.",
        "interleaving-last": "The batch does not divide, so there is no number of micro-batches to look at: one "
        "reason, not two.",
        "zero-ranks": "ZeRO divides among the dp ranks alone: what tp and pp divide is divided already. So it is too "
        "much for this GPU.",
        "gpus": "The product of all degrees has to be the number of GPUs. Context parallelism is one of them.",
        "heads": "Query heads, key-value heads and the width of the MLP all have to divide among tp.",
        "layers": "Each of the pp · virtual chunks gets the same number of layers.",
        "around": "The layers do not divide, but with embedding and head as a layer each they do: so it can run.",
        "batch": "Each replica needs a whole number of micro-batches: dp · microbatch divides the batch.",
        "interleaving": "In Megatron-LM's schedule with virtual stages, the micro-batches of a replica come in groups "
        "of pp.",
        "interleaving-always": "Plain 1F1B takes any number of micro-batches; only virtual stages need a multiple of "
        "pp.",
        "slow": "Nothing forbids tensor parallelism over two nodes. It is slow, and the planner says how slow.",
        "memory": "The model states of a rank are more than the GPU has. A rank has 1/(tp · pp) of the parameters, and "
        "16 bytes for each of them before ZeRO divides.",
        "zero": "ZeRO divides states among the dp ranks: stage 1 the optimizer's, 2 the gradients too, 3 all. With it "
        "this layout fits.",
        "memory-last": "What cannot be cut needs no look at the memory: name it only where nothing else is wrong.",
        "all-reasons": "This is one of the reasons. Name all of them.",
    },
    "plan_70b": {
        "form": "Return a planner.Layout, such as Layout(tp=8, pp=4, dp=2).",
        "illegal": "This layout cannot run at all; the reasons are those of planner.legal.",
        "rules": "cp, precision, sequence_parallel and overlap stay as they are: they are not in the list.",
        "memory": "The fullest GPU holds too much. What takes most? States shrink with ZeRO and with tp · pp, "
        "activations with tp and with recomputation.",
        "compute": "Compute takes the most time that could be saved: backward computes parts of forward again, to save "
        "memory. Does less recomputation fit, if need be with other degrees?",
        "tensor": "Tensor parallelism takes the most time that could be saved: its all-reduces are not hidden. A "
        "smaller tp needs fewer bytes; what else can make the states fit?",
        "bubble": "The bubble takes the most time that could be saved. More micro-batches, fewer stages or virtual "
        "stages make it smaller.",
    },
}  # fmt: skip

# ------------------------------------------------------------------------------------------------ groups of a mesh

Groups = dict[str, list[tuple[int, ...]]]

_MESHES = (  # sizes, hint for a failure that nothing more exact explains
    ({"dp": 2, "tp": 4}, None),
    ({"pp": 2, "dp": 2, "tp": 2}, None),
    ({"pp": 4, "dp": 8, "tp": 8}, None),
    ({"dp": 6}, "any-mesh"),
    ({"pp": 2, "dp": 3, "cp": 2, "tp": 4}, "any-mesh"),
    ({"pp": 3, "dp": 1, "tp": 5}, "any-mesh"),
    ({"tp": 3, "dp": 2}, "any-mesh"),
)


def _groups(sizes: Mapping[str, int]) -> Groups:
    """The groups of each dimension; the last changes fastest."""
    mesh = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    lines = {name: mesh.movedim(at, -1).reshape(-1, size) for at, (name, size) in enumerate(sizes.items())}
    return {name: [tuple(line) for line in some.tolist()] for name, some in lines.items()}


def _coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    groups = _groups(sizes)
    return {name: next(line.index(rank) for line in lines if rank in line) for name, lines in groups.items()}


@checked
def mesh_groups(fn: Callable) -> None:
    """Check ``fn(sizes)``: all groups of all dimensions, in any order."""
    exercise = Exercise("Exercise 1", HINTS["mesh_groups"])
    for sizes, exercise.fallback in _MESHES:
        exercise.case = " × ".join(f"{name} {size}" for name, size in sizes.items())
        got, right = exercise.call(fn, dict(sizes)), _groups(sizes)
        form = isinstance(got, dict) and set(got) == set(sizes) and all(map(_is_lists, got.values()))
        exercise.require(form, "form", f"the function returned {str(got)[:100]}.")
        turned = _groups(dict(reversed(sizes.items())))
        got = {name: [tuple(sorted(line)) for line in lines] for name, lines in got.items()}
        if len(sizes) > 1 and all(sorted(got[name]) == turned[name] for name in sizes):
            name = next(name for name in sizes if got[name] != right[name])
            exercise.refuse("transposed", f"{name} has the groups {got[name]}.")
        for name in sizes:
            _same_groups(exercise, name, got[name], right[name], sizes)
    print("Exercise 1 passed for meshes of one to four dimensions, among them 4 × 8 × 8.")


def _is_lists(value: Any) -> bool:
    """Whether this is a list of groups: sequences of whole numbers."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(line, (list, tuple)) and all(isinstance(r, int) and not isinstance(r, bool) for r in line)
        for line in value
    )


def _same_groups(exercise: Exercise, name: str, got: list, right: list, sizes: Mapping[str, int]) -> None:
    if sorted(got) == sorted(right):
        return
    shown = ", ".join(str(list(line)) for line in got[:3]) + (", …" if len(got) > 3 else "")
    absent = next((list(line) for line in right if line not in got), None)
    what = f"{name} has the groups {shown}; " + (f"there is no {absent}." if absent else f"expected {len(right)}.")
    lines, ranks = set(got), [rank for line in got for rank in line]
    if lines == set(zip(*right, strict=True)):
        key = "same-coordinate"
    elif len(set(ranks)) < len(ranks):
        key = "repeated"
    elif lines < set(right):
        key = "missing"
    else:
        sized = all(len(line) == sizes[name] for line in got)
        key = exercise.fallback or ("stride" if sized else "any-mesh")
    exercise.refuse(key, what)


# ------------------------------------------------------------------------------------------------ process groups


@contextmanager
def _watched_groups():
    """Yield a list of the groups that this rank makes; raises where the ranks disagree, instead of a wait."""
    import torch.distributed as dist

    made, new_group = [], dist.new_group

    def watched(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        asked = None if ranks is None else sorted(int(r) for r in ranks)
        made.append(asked)
        if not kwargs.get("use_local_synchronization"):
            everyone: list = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (len(made), asked))
            if any(other != everyone[0] for other in everyone):
                wishes = ", ".join(f"rank {r}: {ranks}" for r, (_, ranks) in enumerate(everyone))
                raise RuntimeError(f"new_group number {len(made)} was called for different groups ({wishes})")
        return new_group(ranks, *args, **kwargs)

    dist.new_group = watched
    try:
        yield made
    finally:
        dist.new_group = new_group


def _makes_groups(tag: Tensor, fn: Callable, lists: dict[str, list[list[int]]]) -> dict[str, Any]:
    """One rank makes its groups; then each group adds up the numbers of its ranks."""
    import torch.distributed as dist

    with _watched_groups() as made:
        got = fn({name: [list(line) for line in lines] for name, lines in lists.items()})
    if not isinstance(got, dict) or set(got) != set(lists):
        return {"form": str(got)[:100], "made": len(made)}
    found: dict[str, Any] = {}
    for name, group in got.items():
        if isinstance(group, dist.ProcessGroup):
            found[name] = tuple(dist.get_process_group_ranks(group))
        else:
            found[name] = None if group is None else "number" if isinstance(group, int) else str(type(group).__name__)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    sums = {}
    if all(isinstance(line, tuple) and _agreed(rank, name, line, everyone)
           for rank, lines in enumerate(everyone) for name, line in lines.items()):  # fmt: skip
        for name in lists:  # nobody waits in vain
            total = tag.clone()
            dist.all_reduce(total, group=got[name])
            sums[name] = total.item()
    return {"found": found, "sums": sums, "made": len(made)}


def _agreed(rank: int, name: str, line: tuple[int, ...], everyone: list[dict]) -> bool:
    """Whether a rank is in its group, and all others of it have the same one."""
    return rank in line and all(everyone[other].get(name) == line for other in line)


class _Grouping(Exercise):
    """An exercise in which whoever waits does so because the ranks made different groups."""

    def refuse(self, key: str, what: str, rank: int | None = None) -> NoReturn:
        if key == "hang" or (key == "error" and "was called for different groups" in what):
            key = "disagree"
        super().refuse(key, what, rank)


@checked
def make_groups(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(lists)``: the process groups of this rank, of which all ranks together make as many as there are."""
    exercise = _Grouping("Exercise 2", HINTS["make_groups"], timeout)
    for sizes in ({"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}, {"dp": 3, "tp": 2}, {"dp": 1}):
        lists, n = _groups(sizes), math.prod(sizes.values())
        case = " × ".join(f"{name} {size}" for name, size in sizes.items())
        tags = [torch.tensor([2.0**rank]) for rank in range(n)]
        outcomes = exercise.run(_makes_groups, tags, fn, lists, case=case)
        for rank, outcome in enumerate(outcomes):
            _right_groups(exercise, rank, outcome.result, lists)
        count = sum(map(len, lists.values()))
        for rank, outcome in enumerate(outcomes):
            made = outcome.result["made"]
            exercise.require(made <= count, "too-many", f"new_group was called {made} times for {count} groups.", rank)
    exercise.passed("every rank is in its groups, and each group adds up numbers of its own ranks.")


def _right_groups(exercise: Exercise, rank: int, result: dict, lists: Groups) -> None:
    exercise.require("form" not in result, "form", f"the function returned {result.get('form')}.", rank)
    for name, lines in lists.items():
        right, got = next(line for line in lines if rank in line), result["found"][name]
        if got is None:
            exercise.refuse("default", f"{name} is None.", rank)
        if isinstance(got, str):
            member = got == "number"
            exercise.refuse("not-a-member" if member else "form", f"{name} is a {got}, not a process group.", rank)
        what = f"{name} is the group of the ranks {list(got)}; expected {list(right)}."
        exercise.require(tuple(sorted(got)) == right, "wrong-group", what, rank)
    for name, lines in lists.items():
        right = next(line for line in lines if rank in line)
        total = result["sums"].get(name)
        what = f"an all-reduce of {name} gave {total}; expected {sum(2.0**r for r in right)}."
        exercise.require(total == sum(2.0**r for r in right), "wrong-group", what, rank)


# ------------------------------------------------------------------------------------------------ the order for a node

_ORDERS: tuple[tuple[dict[str, int], dict[str, float], int], ...] = (  # sizes, GB to the next rank, GPUs of a node
    ({"tp": 2, "dp": 2}, {"tp": 6, "dp": 1}, 2),
    ({"tp": 4, "pp": 2, "dp": 8}, {"tp": 40, "pp": 3, "dp": 9}, 8),
    ({"tp": 8, "pp": 4, "dp": 8}, {"tp": 90, "pp": 4, "dp": 10}, 8),
    ({"pp": 4, "tp": 2, "dp": 4}, {"pp": 2, "tp": 30, "dp": 20}, 8),
    ({"a": 4, "b": 2}, {"a": 3, "b": 2}, 2),
    ({"dp": 3, "tp": 4, "pp": 2}, {"dp": 5, "tp": 4, "pp": 7}, 4),
    ({"dp": 4, "tp": 2, "cp": 2, "pp": 2}, {"dp": 7, "tp": 11, "cp": 10, "pp": 1}, 4),
    ({"tp": 4, "dp": 4}, {"tp": 3, "dp": 1}, 16),
    ({"tp": 4, "dp": 2}, {"tp": 3, "dp": 1}, 1),
)


def _between(order: Sequence[str], sizes: Mapping[str, int], gigabytes: Mapping[str, float], node: int) -> float:
    """GB that all ranks send to another node in a step, each to the next of its groups."""
    groups = _groups({name: sizes[name] for name in order})
    return sum(
        gigabytes[name]
        for name, lines in groups.items()
        for line in lines
        for a, b in zip(line, (*line[1:], line[0]), strict=True)
        if a // node != b // node
    )


@checked
def node_order(fn: Callable) -> None:
    """Check ``fn(sizes, gigabytes, gpus_per_node)``: any order with the fewest bytes between nodes passes."""
    exercise = Exercise("Exercise 4", HINTS["node_order"])
    answers = []
    for sizes, gigabytes, node in _ORDERS:
        exercise.case = f"sizes {sizes}, GB {gigabytes}, {node} GPUs a node"
        got = exercise.call(fn, dict(sizes), dict(gigabytes), node)
        form = isinstance(got, (list, tuple)) and all(isinstance(name, str) for name in got)
        form = form and sorted(got) == sorted(sizes)
        exercise.require(form, "form", f"the function returned {str(got)[:100]}.")
        answers.append(tuple(got))
    ways = [_by_cost(*case) for case in _ORDERS]
    for (sizes, gigabytes, node), got, costs in zip(_ORDERS, answers, ways, strict=True):
        best = min(costs, key=costs.get)
        if costs[got] > costs[best] + 1e-9:
            exercise.case = f"sizes {sizes}, GB {gigabytes}, {node} GPUs a node"
            what = (
                f"{', '.join(got)} sends {costs[got]:g} GB between nodes; {', '.join(best)} sends {costs[best]:g} GB."
            )
            exercise.refuse(_order_slip(exercise, fn, answers, ways), what)
    print("Exercise 4 passed: no order of the dimensions sends less between nodes.")


def _by_cost(sizes: dict[str, int], gigabytes: dict[str, float], node: int) -> dict[tuple[str, ...], float]:
    return {order: _between(order, sizes, gigabytes, node) for order in itertools.permutations(sizes)}


def _order_slip(exercise: Exercise, fn: Callable, answers: list[tuple], ways: list[dict]) -> str:
    """Which rule all answers follow."""
    degrees = [[sizes[name] for name in got] for (sizes, *_), got in zip(_ORDERS, answers, strict=True)]
    if all(got == tuple(sorted(case[0], key=case[1].get)) for case, got in zip(_ORDERS, answers, strict=True)):
        return "greedy"
    if all(d == sorted(d) for d in degrees) or all(d == sorted(d, reverse=True) for d in degrees):
        return "by-degree"
    if all(
        tuple(exercise.call(fn, dict(s), dict(g), 2)) == got for (s, g, _), got in zip(_ORDERS, answers, strict=True)
    ):
        return "node-ignored"
    pairs = list(zip(answers, ways, strict=True))
    worst = all(costs[got] >= max(costs.values()) - 1e-9 for got, costs in pairs)
    return (
        "backwards"
        if worst or all(costs[got[::-1]] <= min(costs.values()) + 1e-9 for got, costs in pairs)
        else "not-best"
    )


# ------------------------------------------------------------------------------------------------ hybrid training

WIDTH, INNER, BATCH, STEPS, RATE = 6, 12, 120, 3, 0.2

Weights = dict[str, Tensor]


def _whole_weights() -> Weights:
    generator = torch.Generator().manual_seed(1201)
    shapes = {"gain": (WIDTH,), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    return {k: torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for k, shape in shapes.items()}


def _batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1202)
    pairs = torch.randn(STEPS, 2, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return [(x, target) for x, target in pairs]


def _cut(weights: Weights, t: int, parts: int) -> Weights:
    return {
        "gain": weights["gain"].clone(), "up": weights["up"].chunk(parts)[t].clone(),
        "down": weights["down"].chunk(parts, dim=1)[t].clone(),
    }  # fmt: skip


def _loss(weights: Weights, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(x + F.gelu((x * weights["gain"]) @ weights["up"].T) @ weights["down"].T, target)


def _one_process() -> tuple[list[float], Weights]:
    weights, losses = {k: w.requires_grad_() for k, w in _whole_weights().items()}, []
    for x, target in _batches():
        loss = _loss(weights, x, target)
        for w, gradient in zip(weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True):
            w.data -= RATE * gradient
        losses.append(loss.item())
    return losses, {k: w.detach() for k, w in weights.items()}


def _simulated(
    nodes: int,
    gpus: int,
    part: str = "dp",
    f: bool = True,
    over: str = "dp",
    gain_over: str | None = None,
    divisor: int | None = None,
    gain_divisor: int | None = None,
    g: str = "behind down",
) -> list[Weights]:
    """Weights by rank after training in this process as all ranks would, with one thing that can be wrong.

    ``part`` says whose coordinate chooses the samples, ``over`` which ranks add up their gradients,
    ``g`` what is summed over a node.
    """
    ranks = [(d, t) for d in range(nodes) for t in range(gpus)]
    own = {(d, t): _cut(_whole_weights(), t, gpus) for d, t in ranks}
    for batch in _batches():
        gradients = {}
        for d in range(nodes):
            gradients |= _node_gradients(own, batch, d, nodes, gpus, part, f, g)
        for d, t in ranks:
            for name, w in own[d, t].items():
                kind = gain_over if name == "gain" and gain_over else over
                peers = {
                    "dp": [(k, t) for k in range(nodes)], "tp": [(d, k) for k in range(gpus)], "all": ranks,
                    "none": [(d, t)],
                }[kind]  # fmt: skip
                by = (gain_divisor if name == "gain" else None) or divisor or nodes
                w -= RATE * sum(gradients[peer][name] for peer in peers) / by
    return [own[key] for key in ranks]


def _node_gradients(own: dict, batch: tuple, d: int, nodes: int, gpus: int, part: str, f: bool, g: str) -> dict:
    """Gradients of the ranks of one node, by (node, GPU)."""
    kept = []
    for t in range(gpus):
        at, parts = {"dp": (d, nodes), "rank": (d * gpus + t, nodes * gpus), "tp": (t, gpus), "all": (0, 1)}[part]
        x, target = (tensor.chunk(parts)[at] for tensor in batch)
        leaves = [w.clone().requires_grad_() for w in (x * own[d, t]["gain"], own[d, t]["up"], own[d, t]["down"])]
        partial = F.gelu(leaves[0] @ leaves[1].T) @ leaves[2].T
        kept.append((x, target, leaves, x + partial if g == "with x" else partial))
    total, found = sum(partial.detach() for *_, partial in kept), []
    for x, target, leaves, partial in kept:
        inner = partial if g == "nothing" else partial + (total - partial).detach()
        loss = F.mse_loss(inner if g == "with x" else x + inner, target)
        found.append(torch.autograd.grad(loss, leaves))
    summed = sum(h for h, _, _ in found)
    return {
        (d, t): {"gain": ((summed if f else h) * x).sum(0), "up": up, "down": down}
        for t, ((x, *_), (h, up, down)) in enumerate(zip(kept, found, strict=True))
    }


_HYBRIDS = (  # nodes, GPUs of each, hint if it fails first here
    (2, 2, None), (2, 3, "sizes"), (3, 2, "sizes"), (1, 2, "sizes"), (2, 1, "sizes"), (1, 1, None),
)  # fmt: skip


def _trains(tag: Tensor, fn: Callable, gpus: int) -> dict[str, Any]:
    got = fn(_whole_weights(), _batches(), RATE, gpus)
    if not isinstance(got, (tuple, list)) or len(got) != 2 or not isinstance(got[1], dict):
        return {"form": str(got)[:100]}
    losses, weights = got
    try:
        losses = [float(loss) for loss in losses]
    except (TypeError, ValueError):
        return {"form": str(got)[:100]}
    weights = {k: w.detach().clone() for k, w in weights.items() if isinstance(w, Tensor)}
    return {"losses": losses, "weights": weights}


class _Hybrid(Exercise):
    """An exercise in which two errors of autograd come from f and g."""

    def refuse(self, key: str, what: str, rank: int | None = None) -> NoReturn:
        if key == "error" and self.fallback is None and "register a hook on a tensor that doesn't require" in what:
            key = "not-a-leaf"
        if key == "error" and self.fallback is None and "does not require grad and does not have a grad_fn" in what:
            key = "cut-off"
        super().refuse(key, what, rank)


@checked
def hybrid_training(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(weights, batches, lr, gpus_per_node)``: data parallel between nodes, tensor parallel inside."""
    exercise = _Hybrid("Exercise 5", HINTS["hybrid_training"], timeout)
    losses, whole = _one_process()
    for nodes, gpus, fallback in _HYBRIDS:
        tags = [torch.zeros(1) for _ in range(nodes * gpus)]
        case = f"{nodes} node{'s' * (nodes > 1)} with {gpus} GPU{'s' * (gpus > 1)}{' each' * (nodes > 1)}"
        outcomes = exercise.run(_trains, tags, fn, gpus, case=case, fallback=fallback)
        for rank, outcome in enumerate(outcomes):
            exercise.require("form" not in outcome.result, "form", f"the function returned {outcome.result}.", rank)
            exercise.communicates(rank, outcome, nodes * gpus)
        for rank, outcome in enumerate(outcomes):
            _same_weights(exercise, rank, outcome.result["weights"], whole, nodes, gpus)
        for rank, outcome in enumerate(outcomes):
            _same_losses(exercise, rank, outcome.result["losses"], losses, nodes)
        for rank, outcome in enumerate(outcomes):
            _audit_links(exercise, rank, outcome, nodes, gpus)
    exercise.passed("equal to one process to 1e-12, and the fewest bytes between nodes.")


def _same_weights(exercise: Exercise, rank: int, got: Weights, whole: Weights, nodes: int, gpus: int) -> None:
    right = _cut(whole, rank % gpus, gpus)
    shapes = {k: tuple(got[k].shape) if k in got else None for k in right}
    expected = {k: tuple(w.shape) for k, w in right.items()}
    if all(exact(got.get(k), w) for k, w in right.items()):
        return
    turned = _cut(whole, rank // nodes, gpus)
    if exercise.fallback is None and shapes == expected and all(exact(got[k], w) for k, w in turned.items()):
        exercise.refuse("tp-across-nodes", f"this rank holds part {rank // nodes} of the weights.", rank)
    key = exercise.fallback or "shards"
    exercise.require(shapes == expected, key, f"the weights have shapes {shapes}; expected {expected}.", rank)
    if exercise.fallback is None and nodes * gpus > 1:
        slips: dict[str, list[dict]] = {
            "no-f": [{"f": False}],
            "sum": [{"divisor": 1}],
            "divided": [{"divisor": nodes * gpus}],
            "gain-twice": [{"gain_over": "all"}, {"gain_over": "all", "divisor": nodes * gpus}],
            "wrong-group": [{"over": some, "divisor": k} for some in ("tp", "all") for k in (nodes, nodes * gpus)],
            "not-averaged": [{"over": "none", "divisor": k} for k in (1, nodes)],
            "gain-apart": [{"gain_over": "none", "gain_divisor": k} for k in (1, nodes)],
            "no-g": [{"g": "nothing"}, {"g": "nothing", "f": False}],
            "x-in-the-sum": [{"g": "with x"}],
            "batch-by-rank": [
                {"part": "rank"},
                {"part": "tp"},
                {"part": "rank", "over": "all", "divisor": nodes * gpus},
            ],
        }
        for key, some in slips.items():
            if any(_alike(got, _simulated(nodes, gpus, **slip)[rank]) for slip in some):
                name = next(k for k, w in right.items() if not exact(got[k], w))
                exercise.refuse(key, f"the weight {name} is wrong.{difference(got[name], right[name])}", rank)
    compare(exercise, rank, got, right, {}, "the weight")


def _alike(got: Weights, wrong: Weights) -> bool:
    return all(close(got[name], w) for name, w in wrong.items())


def _same_losses(exercise: Exercise, rank: int, got: list[float], right: list[float], nodes: int) -> None:
    if len(got) == len(right) and all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(got, right, strict=True)):
        return
    parts = [_loss(_whole_weights(), *(t.chunk(nodes)[d] for t in _batches()[0])).item() for d in range(nodes)]
    own = nodes > 1 and got and any(math.isclose(got[0], part, rel_tol=1e-6) for part in parts)
    wanted, found = (", ".join(f"{v:.6g}" for v in some) for some in (right, got))
    lines = f"\n  one process  {wanted}\n  this rank    {found}"
    exercise.refuse(exercise.fallback or ("own-loss" if own else "loss"), f"the losses are wrong.{lines}", rank)


def _audit_links(exercise: Exercise, rank: int, outcome: Outcome, nodes: int, gpus: int) -> None:
    """Refuse bytes between nodes beyond the gradients of a shard, and inside beyond two all-reduces a step."""
    inside, between, everywhere = 0.0, 0.0, 0.0
    for entry in outcome.ledger:
        ranks = (rank, entry.peer) if entry.op in ("send", "recv") else entry.ranks
        size = entry.bytes if entry.op == "send" else 0
        if entry.op not in ("send", "recv", "barrier") and len(ranks) > 1:
            size = bytes_sent(entry.op, len(ranks), entry.bytes)
        if len({r // gpus for r in ranks if r is not None}) > 1:
            between += size
            everywhere += size if len(ranks) > max(2, nodes) else 0
        else:
            inside += size
    activation, shard = 8 * BATCH // nodes * WIDTH, 8 * (WIDTH + 2 * WIDTH * INNER // gpus)
    once = STEPS * 2 * bytes_sent("all_reduce", gpus, activation) if gpus > 1 else 0
    least = STEPS * bytes_sent("all_reduce", nodes, shard + 8) if nodes > 1 else 0
    slack = 16 * STEPS
    idle = f"only {inside:,.0f} bytes are sent inside the node."
    exercise.require(gpus == 1 or inside > slack, "no-tensor-parallelism", idle, rank)
    what = f"{between:,.0f} bytes leave this rank for the other nodes; {least:,.0f} are enough."
    if between > least + slack:
        exercise.refuse("all-ranks" if everywhere > slack else "between", what, rank)
    exercise.require(nodes == 1 or between > slack, "whole-batch", "no gradient passes between the nodes.", rank)
    what = f"{inside:,.0f} bytes leave this rank for others of its node; {once:,.0f} are enough."
    if inside > once + slack:
        exercise.refuse("whole-batch" if inside >= nodes * once > once else "inside", what, rank)


# ------------------------------------------------------------------------------------------------ the norm of a mesh

_CUTS = (((4, 3), ("dp",)), ((5,), ("dp", "tp")), ((2, 6), ()), ((3,), ("tp",)))  # shape, dimensions with copies
_ROUNDS = 4  # of these kinds in each stage
_NORM_CASES = (  # sizes, whether the last stage has no gradients, hint if it fails first here
    ({"dp": 2, "tp": 2}, False, None),
    ({"pp": 2, "dp": 2, "tp": 2}, False, None),
    ({"pp": 3, "tp": 2}, False, None),
    ({"pp": 2, "tp": 2}, True, "nothing"),
    ({"dp": 1}, False, None),
)


def _held(rank: int, sizes: Mapping[str, int], bare: bool) -> list[tuple[tuple, Tensor, tuple[str, ...]]]:
    """What a rank holds: for each tensor which it is, its gradient, and the dimensions along which it is copied."""
    place = _coordinates(rank, sizes)
    stage = place.get("pp", 0)
    if bare and stage == sizes.get("pp", 1) - 1:
        return []
    held = []
    for i in range(_ROUNDS + stage):
        for j, (shape, along) in enumerate(_CUTS):
            copies = tuple(name for name in along if name in sizes)
            part = tuple(place.get(name, 0) for name in ("dp", "tp") if name not in copies)
            which = (stage, i, j, *part)
            generator = torch.Generator().manual_seed(hash(which) % 2**31)
            held.append((which, torch.randn(shape, generator=generator), copies))
    return held


def _clips(tag: Tensor, fn: Callable, sizes: dict[str, int], bare: bool, limit: float) -> dict[str, Any]:
    import torch.distributed as dist

    from course_utils import record

    mesh = dist.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    groups = {name: mesh.get_group(name) for name in sizes}
    held = _held(dist.get_rank(), sizes, bare)
    mine = [gradient for _, gradient, _ in held]
    given = list(mine)
    with record() as ledger:
        norm = fn(given, [copies for *_, copies in held], groups, limit)
    kept = len(given) == len(mine) and all(a is b for a, b in zip(given, mine, strict=True))
    return {"norm": norm, "gradients": mine, "kept": kept, "ledger": ledger}


@checked
def clip_gradients(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(gradients, copies, groups, limit)``: the norm of the whole model, and gradients scaled in place."""
    exercise = Exercise("Exercise 6", HINTS["clip_gradients"], timeout)
    for sizes, bare, fallback in _NORM_CASES:
        n = math.prod(sizes.values())
        held = [_held(rank, sizes, bare) for rank in range(n)]
        norm = math.sqrt(sum(_square(g) for g in {which: g for some in held for which, g, _ in some}.values()))
        for limit in (norm * 0.4, norm * 2):
            case = " × ".join(f"{name} {size}" for name, size in sizes.items())
            case += f", limit {limit:.3g}" + ", no gradients on the last stage" * bare
            tags = [torch.zeros(1) for _ in range(n)]
            outcomes = exercise.run(_clips, tags, fn, sizes, bare, limit, case=case, fallback=fallback)
            norms = [outcome.result["norm"] for outcome in outcomes]
            for rank in range(n):
                _same_norm(exercise, rank, norms, norm, limit, held, sizes)
            for rank, outcome in enumerate(outcomes):
                _scaled(exercise, rank, outcome.result, [g for _, g, _ in held[rank]], norm, limit)
            for rank, outcome in enumerate(outcomes):
                _audit_norm(exercise, rank, outcome.result["ledger"], n)
    exercise.passed("the norm of the whole model on every rank, for one number each.")


def _square(gradient: Tensor) -> float:
    return float(gradient.double().pow(2).sum())


def _same_norm(
    exercise: Exercise, rank: int, norms: list, norm: float, limit: float, held: list, sizes: Mapping[str, int]
) -> None:
    """Compare with the norm of the whole model; what usual slips give is computed from what all ranks hold."""
    try:
        got = float(norms[rank])
    except (TypeError, ValueError):
        exercise.refuse("number", f"the function returned {show(norms[rank])}.", rank)
    if math.isclose(got, norm, rel_tol=1e-5):
        return
    places = [_coordinates(r, sizes) for r in range(len(held))]
    alone = [sum(_square(g) for _, g, _ in some) for some in held]  # every tensor counted
    shared = [sum(_square(g) / math.prod(sizes[k] for k in copies) for _, g, copies in some) for some in held]
    firsts = [
        sum(_square(g) for _, g, copies in some if not any(place[k] for k in copies))
        for some, place in zip(held, places, strict=True)
    ]
    once = [s if not any(place.get(k, 0) for k in ("dp", "tp")) else 0 for s, place in zip(alone, places, strict=True)]
    no_copies = [sum(_square(g) for _, g, copies in some if not copies) for some in held]
    no_tp = [s if not place.get("tp", 0) else 0 for s, place in zip(alone, places, strict=True)]
    lines = [line for some in _groups(sizes).values() for line in some if rank in line]
    roots = [math.sqrt(s) for s in alone], [math.sqrt(s) for s in shared], [math.sqrt(s) for s in firsts]
    right, n = norm**2, len(held)
    divided = [sum(_square(g) / math.prod(sizes[k] for k in copies) ** 2 for _, g, copies in some) for some in held]
    squares = {
        "limited": [limit**2] if limit < norm else [],
        "no-grad": [0.0] if held[rank] else [],
        "norm-divided": [sum(divided)],
        "own": [alone[rank], shared[rank], firsts[rank]],
        "twice": [sum(alone)],
        "one-group": [sum(some[r] for r in line) for line in lines for some in (alone, shared, firsts)],
        "mean": [right / n, sum(alone) / n],
        "shards-lost": [sum(once), sum(no_tp)],
        "copies-lost": [sum(no_copies)],
        "sum-of-norms": [sum(some) ** 2 for some in roots] + [sum(some) for some in roots],
        "squared": [right**2, sum(alone) ** 2],
    }
    if all(isinstance(other, (int, float, Tensor)) and math.isclose(float(other), got) for other in norms):
        del squares["own"]  # all ranks agree
    key = "value"
    if exercise.fallback is None:
        alike = (k for k, some in squares.items() if any(math.isclose(got * got, s, rel_tol=1e-5) for s in some))
        key = next(alike, "value")
    exercise.refuse(key, f"the norm is {got:.6g}; expected {norm:.6g}.", rank)


def _scaled(exercise: Exercise, rank: int, result: dict, before: list, norm: float, limit: float) -> None:
    factor = min(1.0, limit / norm)
    if all(torch.allclose(a, factor * b, rtol=1e-5) for a, b in zip(result["gradients"], before, strict=True)):
        return
    exercise.require(result["kept"], "replaced", "some tensors of the list are others than before.", rank)
    ratios = torch.cat([(a / b).flatten() for a, b in zip(result["gradients"], before, strict=True)])
    got = float(ratios[0])
    same = torch.allclose(ratios, ratios[0].expand_as(ratios), rtol=1e-6)
    own = min(1.0, limit / math.sqrt(sum(_square(g) for g in before)))
    key = "scale"
    if same and factor == 1.0 and math.isclose(got, limit / norm, rel_tol=1e-5):
        key = "always"
    elif same and factor < 1.0 and math.isclose(got, 1.0):
        key = "not-clipped"
    elif same and math.isclose(got, own, rel_tol=1e-5):
        key = "own-scale"
    exercise.refuse(key, f"the gradients were multiplied by {got:.4g}; expected {factor:.4g}.", rank)


def _audit_norm(exercise: Exercise, rank: int, ledger: Any, n: int) -> None:
    entries = [e for e in ledger if e.op != "barrier"]
    size, most = sum(e.bytes for e in entries), max((e.bytes for e in entries), default=0)
    exercise.require(n == 1 or len(entries) > 0, "not-distributed", "the ledger of this rank is empty.", rank)
    exercise.require(most <= 8 * max(n, 4), "too-many-bytes", f"{size:,} bytes travel.", rank)
    sums = len(entries)
    exercise.require(sums <= 2, "too-many-messages", f"{sums} messages for one norm.", rank)  # 2: reduce, broadcast


# ------------------------------------------------------------------------------------------------ on paper


def _whole_microbatches(layers, hidden, length, parameters, tp, pp, dp, batch, microbatch) -> bool:
    return batch % (dp * microbatch) == 0 and layers % pp == 0


@paper_problem(
    "Exercise 3",
    cases=[
        (80, 8192, 8192, 70.6e9, 8, 4, 2, 128, 1), (32, 4096, 2048, 6.7e9, 4, 4, 8, 256, 2),
        (96, 12288, 2048, 174.6e9, 8, 8, 16, 1536, 1), (32, 4096, 4096, 6.7e9, 1, 8, 4, 64, 1),
        (40, 5120, 2048, 13e9, 2, 1, 4, 48, 3), (48, 8192, 2048, 39.1e9, 8, 4, 1, 64, 2),
    ],
    slips={
        "fraction": "100 * (pp - 1)  ->  (pp - 1)",
        "of-ideal": "(m + pp - 1)  ->  m",
        "microbatches": [
            "batch / (dp * microbatch)  ->  batch / microbatch", "batch / (dp * microbatch)  ->  batch / dp",
            "batch / (dp * microbatch)  ->  batch",
        ],
        "forward-only": ["layers / pp * 4  ->  layers / pp * 2", "layers / pp * 4  ->  layers / pp"],
        "all-reduce": [
            "2 * (n - 1) / n  ->  (n - 1) / n", "2 * (n - 1) / n  ->  2 * (n > 1)", "2 * (n - 1) / n  ->  (n > 1)",
            "ring(dp)  ->  ring(dp) / 2", "ring(dp)  ->  (dp > 1)",
        ],
        "one-stage": " if pp > 1 else 0  ->  ",
        "part-sent": "2 * activation  ->  2 * activation / tp",
        "mean-stage": "2 * activation  ->  2 * activation * (pp - 1) / pp",
        "all-layers": "layers / pp  ->  layers",
        "one-microbatch": "return 100  ->  tensor, pipeline = tensor / m, pipeline / m\nreturn 100",
        "one-way": "2 * activation  ->  activation",
        "whole-model": [
            "/ (tp * pp)  ->  ", "/ (tp * pp)  ->  / pp", "/ (tp * pp)  ->  / tp",
        ],
        "data-microbatches": "data / 1e9  ->  m * data / 1e9",
        "bytes": ["width = 2  ->  width = 1", "width = 2  ->  width = 4", "width * parameters  ->  4 * parameters"],
        "gigabytes": [
            {"tensor / 1e9, pipeline / 1e9, data / 1e9": f"tensor / {unit}, pipeline / {unit}, data / {unit}"}
            for unit in ("1", "1e6", "2**30")
        ],
        "layers-in-pipeline": "2 * activation  ->  2 * activation * layers / pp",
    },
    units=["% bubble", "GB tensor", "GB pipeline", "GB data"],
    hints=HINTS["traffic"],
    allowed=_whole_microbatches,
)  # fmt: skip
def traffic(layers, hidden, length, parameters, tp, pp, dp, batch, microbatch):
    """Check ``fn(layers, hidden, length, parameters, tp, pp, dp, batch, microbatch)``: bubble, and GB of a GPU."""
    def ring(n):
        return 2 * (n - 1) / n

    width = 2
    m = batch / (dp * microbatch)
    activation = width * microbatch * length * hidden
    tensor = m * layers / pp * 4 * ring(tp) * activation
    pipeline = m * 2 * activation if pp > 1 else 0
    data = ring(dp) * width * parameters / (tp * pp)
    return 100 * (pp - 1) / (m + pp - 1), tensor / 1e9, pipeline / 1e9, data / 1e9


# ------------------------------------------------------------------------------------------------ legality


def _layout(tp: int = 8, pp: int = 4, dp: int = 2, **more: Any) -> planner.Layout:
    return planner.Layout(tp, pp, dp, **more)


_MACHINE = "DGX H100"
_LAYOUTS: tuple[tuple[str, int, planner.Layout, int, str], ...] = (  # model, GPUs, layout, batch, hint if it fails
    ("Llama 3 70B", 64, _layout(8, 4, 2), 128, "legal"),
    ("Llama 3 70B", 64, _layout(8, 4, 4), 128, "gpus"),
    ("Llama 3 405B", 16384, _layout(8, 16, 4, cp=16), 2048, "gpus"),
    ("Llama 3 405B", 16384, _layout(8, 16, 8, cp=16), 2048, "gpus"),
    ("Megatron 18.4B", 64, _layout(32, 1, 2, recompute="full"), 64, "heads"),
    ("Llama 3 70B", 64, _layout(16, 2, 2), 128, "heads"),
    ("Megatron 145.6B", 64, _layout(16, 2, 2), 64, "slow"),
    ("Llama 3 70B", 96, _layout(8, 12, 1, zero=0), 120, "layers"),
    ("Llama 3 70B", 64, _layout(8, 4, 2, virtual=3), 128, "layers"),
    ("Llama 3 405B", 1024, _layout(8, 16, 8), 128, "around"),
    ("Llama 3 70B", 64, _layout(4, 4, 4), 66, "batch"),
    ("Llama 3 70B", 64, _layout(4, 4, 4, microbatch=4), 72, "batch"),
    ("Llama 3 70B", 64, _layout(8, 4, 2, virtual=2), 20, "interleaving"),
    ("Llama 3 70B", 64, _layout(8, 4, 2), 20, "interleaving-always"),
    ("Llama 3 70B", 64, _layout(8, 1, 8, zero=0), 128, "memory"),
    ("Llama 3 70B", 64, _layout(8, 1, 8, zero=1), 128, "zero"),
    ("Llama 3 70B", 64, _layout(1, 1, 64, zero=1), 128, "memory"),
    ("Llama 3 70B", 64, _layout(1, 1, 64, zero=3), 128, "zero"),
    ("Llama 3 70B", 64, _layout(1, 6, 8, zero=0), 128, "memory-last"),
    ("Llama 3 70B", 64, _layout(16, 3, 2), 35, "all-reasons"),
    ("Llama 3 405B", 16384, _layout(8, 16, 8, cp=16), 64, "context-batch"),
    ("Llama 3 70B", 64, _layout(8, 4, 2, virtual=2), 21, "interleaving-last"),
    ("Llama 3 70B", 64, _layout(4, 1, 16, zero=1), 128, "zero-ranks"),
)


def _reasons(model: planner.Model, cluster: planner.Cluster, layout: planner.Layout, batch: int) -> set[str]:
    """The words for what speaks against a layout; memory only where nothing else does."""
    kinds = {kind for kind, _ in reasons(model, cluster, layout, batch)}
    return kinds or ({"memory"} if planner.legal(model, cluster, layout, batch) else set())


@checked
def why_not(fn: Callable) -> None:
    """Check ``fn(model, cluster, layout, batch)``: the reasons of `planner.legal`, one word each."""
    exercise = Exercise("Exercise 7", HINTS["why_not"])
    for name, gpus, layout, batch, key in _LAYOUTS:
        model, cluster = planner.MODELS[name], planner.cluster(_MACHINE, gpus)
        own = ("cp", "microbatch", "virtual", "zero")
        more = [f"{k} {getattr(layout, k)}" for k in own if getattr(layout, k) != 1]
        exercise.case = f"{name} on {gpus} GPUs, {', '.join([str(layout), *more])}, batch {batch}"
        got, right = exercise.call(fn, model, cluster, layout, batch), _reasons(model, cluster, layout, batch)
        form = isinstance(got, (set, frozenset, list, tuple)) and all(isinstance(word, str) for word in got)
        words = {"gpus", "heads", "layers", "batch", "interleaving", "memory"}
        exercise.require(form and set(got) <= words, "form", f"the function returned {str(got)[:100]}.")
        got = set(got)
        if got != right:
            texts = "; ".join(planner.legal(model, cluster, layout, batch)) or "nothing speaks against it"
            key = "memory-last" if got == right | {"memory"} and right else key
            key = "around" if "layers" in got - right else key
            key = "slow" if got > right and layout.tp > cluster.per_node else key
            what = f"expected {_words(right)}, got {_words(got)}. The planner: {texts}."
            exercise.refuse("all-reasons" if got and got < right else key, what)
    print(f"Exercise 7 passed: {len(_LAYOUTS)} layouts, with the reasons of the planner.")


def _words(words: set[str]) -> str:
    return " and ".join(sorted(words)) or "no reason"


# ------------------------------------------------------------------------------------------------ the puzzle

PUZZLE = ("Llama 3 70B", _MACHINE, 64, 128)  # model, machine, GPUs, sequences in a batch
LIMIT, SHARE = 72e9, 1.08  # bytes on the fullest GPU, and time against the best
_GIVEN = ("cp", "precision", "sequence_parallel", "overlap")


@checked
def plan_70b(fn: Callable) -> None:
    """Check ``fn()``: a layout that fits, and is nearly as fast as the planner's best that does."""
    exercise = Exercise("Exercise 8", HINTS["plan_70b"])
    got = exercise.call(fn)
    exercise.require(isinstance(got, planner.Layout), "form", f"the function returned {str(got)[:100]}.")
    changed = [name for name in _GIVEN if getattr(got, name) != getattr(planner.Layout(), name)]
    exercise.require(not changed, "rules", f"the layout changes {', '.join(changed)}.")
    name, machine, gpus, batch = PUZZLE
    model, cluster = planner.MODELS[name], planner.cluster(machine, gpus)
    against = planner.legal(model, cluster, got, batch)
    full = not [kind for kind, _ in reasons(model, cluster, got, batch)]
    exercise.require(not against, "memory" if full else "illegal", f"it cannot run: {'; '.join(against)}.")
    mine, best = planner.plan(model, cluster, got, batch), best_70b()
    held = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in mine.memory.parts().items())
    what = f"the fullest GPU holds {mine.memory.total / 1e9:.1f} GB; the target is {LIMIT / 1e9:.0f} GB. In GB: {held}."
    exercise.require(mine.memory.total <= LIMIT, "memory", what)
    over = mine.seconds / best.seconds
    if over > SHARE:
        rows = [f"{part:9} {mine.parts()[part]:7.2f} s   best {best.parts()[part]:7.2f} s" for part in planner.PARTS]
        what = f"the step takes {mine.seconds:.2f} s; the target is {SHARE * best.seconds:.2f} s."
        exercise.refuse(_dearest(mine, best), "\n".join([f"{what}\n", *rows]))
    print(
        f"Exercise 8 passed: {got}, {mine.seconds:.2f} s a step, {100 * (over - 1):.1f} % above the best; "
        f"{mine.memory.total / 1e9:.1f} GB, {mine.model_tflops:.0f} TFLOP/s a GPU."
    )


def best_70b() -> planner.Plan:
    """The planner's fastest layout for the puzzle that keeps to its rules."""
    name, machine, gpus, batch = PUZZLE
    found = planner.search(planner.MODELS[name], planner.cluster(machine, gpus), batch, cp=1)
    return next(each for each in found.plans if each.memory.total <= LIMIT)


def _dearest(mine: planner.Plan, best: planner.Plan) -> str:
    """The part with the most seconds above the best plan's."""
    excess = {part: mine.parts()[part] - best.parts()[part] for part in HINTS["plan_70b"] if part in planner.PARTS}
    return max(excess, key=excess.get)
