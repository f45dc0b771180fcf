"""Checks of the exercises on three-dimensional parallelism.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Training runs on real ranks in float64, equal to one process to
1e-12; the bytes inside a node and between nodes are then read from the ledger. What the ranks together should compute
is also a short program for one process: with an edit it makes the usual slips, so that each gets its own hint.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from course_utils.check import (
    TIMEOUT,
    Exercise,
    Outcome,
    checked,
    crosses,
    load_hints,
    paper_problem,
    sent,
)
from course_utils.check.compare import close, listed, number, show, whole_numbers
from course_utils.check.edits import edited_function
from course_utils.check.groups import DIFFERENT, GroupsInStep
from course_utils.check.training import compare, difference, exact
from course_utils.costs import bytes_sent
from course_utils.transformer import PUBLISHED, TransformerConfig

from . import planner
from .planner import broken_rules

__all__ = [
    "HINTS", "clip_gradients", "hybrid_training", "mesh_groups", "node_order", "plan_70b", "traffic",
    "why_not",
]

HINTS = load_hints(__file__)

Groups = dict[str, list[tuple[int, ...]]]
Slips = dict[str, str | dict[str, str] | list]  # hint key to an edit of a program for one process, or several


def _named(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in sizes.items())


def _groups(sizes: Mapping[str, int]) -> Groups:
    """The groups of each dimension; the last changes fastest."""
    mesh = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    lines = {name: np.moveaxis(mesh, at, -1).reshape(-1, size) for at, (name, size) in enumerate(sizes.items())}
    return {name: [tuple(line) for line in some.tolist()] for name, some in lines.items()}


def _groups_of(rank: int, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The group of a rank in each dimension."""
    return {name: next(line for line in lines if rank in line) for name, lines in _groups(sizes).items()}


def _coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: line.index(rank) for name, line in _groups_of(rank, sizes).items()}


# ------------------------------------------------------------------------------------------------ groups of a mesh

_MESHES = (  # sizes, hint for a failure that nothing more exact explains
    ({"dp": 2, "tp": 4}, None),
    ({"pp": 2, "dp": 2, "tp": 2}, None),
    ({"pp": 4, "dp": 8, "tp": 8}, None),
    ({"dp": 6}, "any-mesh"),
    ({"pp": 2, "dp": 3, "cp": 2, "tp": 4}, "any-mesh"),
    ({"pp": 3, "dp": 1, "tp": 5}, "any-mesh"),
    ({"tp": 3, "dp": 2}, "any-mesh"),
)


@checked
def mesh_groups(fn: Callable) -> None:
    """Check ``fn(sizes)``: all groups of all dimensions, in any order."""
    exercise = Exercise("Exercise 1", HINTS["mesh_groups"])
    for sizes, exercise.fallback in _MESHES:
        exercise.case = _named(sizes)
        answer = exercise.call(fn, dict(sizes))
        named = isinstance(answer, dict) and set(answer) == set(sizes)
        got = {name: _sorted_groups(answer[name]) for name in sizes} if named else {"": None}
        exercise.require(None not in got.values(), "form", f"the function returned {str(answer)[:100]}.")
        right, turned = _groups(sizes), _groups(dict(reversed(sizes.items())))
        transposed = len(sizes) > 1 and all(sorted(got[name]) == turned[name] for name in sizes)
        for name in sizes:
            if sorted(got[name]) != sorted(right[name]):
                key = "transposed" if transposed else _slip_of_groups(got[name], right[name])
                unexplained = exercise.fallback and key in ("stride", "sizes")
                exercise.refuse("any-mesh" if unexplained else key, _first_difference(name, got[name], right[name]))
    print("Exercise 1 passed for meshes of one to four dimensions, among them 4 × 8 × 8.")


def _sorted_groups(value: Any) -> list[tuple[int, ...]] | None:
    """A list of groups, each sorted; None if it is none."""
    lines = [whole_numbers(line) for line in value] if isinstance(value, (list, tuple)) else [None]
    return None if None in lines else [tuple(sorted(line)) for line in lines]


def _slip_of_groups(got: list, right: list) -> str:
    """The hint for the groups of one dimension."""
    ranks = [rank for line in got for rank in line]
    if set(got) == set(zip(*right, strict=True)):
        return "same-coordinate"
    if len(set(ranks)) < len(ranks):
        return "repeated"
    if set(got) < set(right):
        return "missing"
    return "stride" if {len(line) for line in got} == {len(right[0])} else "sizes"


def _first_difference(name: str, got: list, right: list) -> str:
    shown = ", ".join(str(list(line)) for line in got[:3]) + (", …" if len(got) > 3 else "")
    absent = next((list(line) for line in right if line not in got), None)
    return f"{name} has the groups {shown}; " + (f"there is no {absent}." if absent else f"expected {len(right)}.")


# ------------------------------------------------------------------------------------------------ the order for a node

_ORDERS: tuple[tuple[dict[str, int], dict[str, float], int], ...] = (  # sizes, GB to the next rank, GPUs of a node
    ({"tp": 2, "dp": 2}, {"tp": 6, "dp": 1}, 2),
    ({"tp": 4, "pp": 2, "dp": 8}, {"tp": 40, "pp": 3, "dp": 9}, 8),
    ({"tp": 8, "pp": 4, "dp": 8}, {"tp": 90, "pp": 4, "dp": 10}, 8),
    ({"pp": 4, "tp": 2, "dp": 4}, {"pp": 2, "tp": 30, "dp": 20}, 8),
    ({"a": 4, "b": 2}, {"a": 3, "b": 2}, 2),
    ({"dp": 3, "tp": 4, "pp": 2}, {"dp": 5, "tp": 4, "pp": 7}, 4),
    ({"dp": 4, "tp": 2, "cp": 2, "pp": 2}, {"dp": 7, "tp": 11, "cp": 10, "pp": 1}, 4),
    ({"tp": 4, "pp": 2, "dp": 4, "cp": 2}, {"tp": 12, "pp": 7, "dp": 7, "cp": 11}, 4),  # swaps of two get stuck
    ({"tp": 3, "pp": 2, "dp": 2}, {"tp": 9, "pp": 1, "dp": 10}, 4),  # the best innermost one has a bad rest
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
    exercise = Exercise("Exercise 3", HINTS["node_order"])
    answers, names = [], [f"sizes {sizes}, GB {gigabytes}, {node} GPUs a node" for sizes, gigabytes, node in _ORDERS]
    for exercise.case, (sizes, gigabytes, node) in zip(names, _ORDERS, strict=True):
        got = exercise.call(fn, dict(sizes), dict(gigabytes), node)
        form = isinstance(got, (list, tuple)) and all(isinstance(name, str) for name in got)
        exercise.require(form and sorted(got) == sorted(sizes), "form", f"the function returned {str(got)[:100]}.")
        answers.append(tuple(got))
    every = [{order: _between(order, *case) for order in itertools.permutations(case[0])} for case in _ORDERS]
    for exercise.case, got, costs in zip(names, answers, every, strict=True):
        best = min(costs, key=costs.get)
        if costs[got] > costs[best] + 1e-9:
            least = f"{', '.join(best)} sends {costs[best]:g} GB"
            what = f"{', '.join(got)} sends {costs[got]:g} GB between nodes; {least}."
            exercise.refuse(_order_slip(exercise, fn, answers, every), what)
    print("Exercise 3 passed: no order of the dimensions sends less between nodes.")


def _order_slip(exercise: Exercise, fn: Callable, answers: list[tuple], every: list[dict]) -> str:
    """The hint for the rule that all answers follow."""

    def sizes_of(case: tuple, got: tuple) -> list[int]:
        return [case[0][name] for name in got]

    rules = (
        ("greedy", lambda case, got, costs: got == tuple(sorted(case[0], key=case[1].get))),
        ("by-degree", lambda case, got, costs: sizes_of(case, got) == sorted(case[0].values())),
        ("by-degree", lambda case, got, costs: sizes_of(case, got[::-1]) == sorted(case[0].values())),
        ("node-ignored", lambda case, got, costs: tuple(exercise.call(fn, dict(case[0]), dict(case[1]), 2)) == got),
        ("backwards", lambda case, got, costs: costs[got] >= max(costs.values()) - 1e-9),
        ("backwards", lambda case, got, costs: costs[got[::-1]] <= min(costs.values()) + 1e-9),
    )
    return next((key for key, rule in rules if all(map(rule, _ORDERS, answers, every))), "not-best")


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


def _cut(weights: Weights, gpu: int, gpus: int) -> Weights:
    """The part of a GPU of a node."""
    up, down = weights["up"].chunk(gpus)[gpu], weights["down"].chunk(gpus, dim=1)[gpu]
    return {"gain": weights["gain"].clone(), "up": up.clone(), "down": down.clone()}


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


def _all_ranks(nodes: int, gpus: int) -> list[Weights]:
    """Weights by rank after training as all ranks would do it, in one process; `_SLIPS` are edits of this program."""
    ranks = range(nodes * gpus)
    tp = [range(r - r % gpus, r - r % gpus + gpus) for r in ranks]
    dp = [range(r % gpus, nodes * gpus, gpus) for r in ranks]
    own = [_cut(_whole_weights(), r % gpus, gpus) for r in ranks]
    for whole_x, whole_target in _batches():
        x = [whole_x.chunk(nodes)[r // gpus] for r in ranks]
        target = [whole_target.chunk(nodes)[r // gpus] for r in ranks]
        h = [(x[r] * own[r]["gain"]).requires_grad_() for r in ranks]
        up, down = ([own[r][name].clone().requires_grad_() for r in ranks] for name in ("up", "down"))
        part = [F.gelu(h[r] @ up[r].T) @ down[r].T for r in ranks]
        others = [sum(part[q].detach() for q in tp[r] if q != r) for r in ranks]
        sum(F.mse_loss(x[r] + part[r] + others[r], target[r]) for r in ranks).backward()
        gain = [(sum(h[q].grad for q in tp[r]) * x[r]).sum(0) for r in ranks]
        gradients = [{"gain": gain[r], "up": up[r].grad, "down": down[r].grad} for r in ranks]
        for r in ranks:
            for name, w in own[r].items():
                w -= RATE * sum(gradients[q][name] for q in dp[r]) / nodes
    return own


_MEAN = "sum(gradients[q][name] for q in dp[r]) / nodes"
_ALL_RANKS = "sum(g[name] for g in gradients) / len(ranks)"
_BY_RANK = {
    "whole_x.chunk(nodes)[r // gpus]": "whole_x.chunk(len(ranks))[r]",
    "whole_target.chunk(nodes)[r // gpus]": "whole_target.chunk(len(ranks))[r]",
}
_BY_GPU = {
    "whole_x.chunk(nodes)[r // gpus]": "whole_x.chunk(gpus)[r % gpus]",
    "whole_target.chunk(nodes)[r // gpus]": "whole_target.chunk(gpus)[r % gpus]",
}
_SLIPS: Slips = {
    "no-f": "sum(h[q].grad for q in tp[r])  ->  h[r].grad",
    "sum": "dp[r]) / nodes  ->  dp[r])",
    "divided": "dp[r]) / nodes  ->  dp[r]) / len(ranks)",
    "gain-twice": [
        "for q in dp[r])  ->  for q in (ranks if name == 'gain' else dp[r]))",
        "for q in dp[r]) / nodes  ->  for q in (ranks if name == 'gain' else dp[r])) / len(ranks)",
    ],
    "wrong-group": [
        *(f"dp[r]) / nodes  ->  tp[r]) / {count}" for count in ("nodes", "gpus", "len(ranks)")),
        *(f"dp[r]) / nodes  ->  ranks) / {count}" for count in ("nodes", "len(ranks)")),
    ],
    "not-averaged": [f"{_MEAN}  ->  gradients[r][name]", f"{_MEAN}  ->  gradients[r][name] / nodes"],
    "gain-apart": [
        f"{_MEAN}  ->  (gradients[r][name] if name == 'gain' else {_MEAN})",
        "for q in dp[r])  ->  for q in ([r] if name == 'gain' else dp[r]))",
    ],
    "no-g": [
        " + others[r]  ->  ",
        {" + others[r]": "", "sum(h[q].grad for q in tp[r])": "h[r].grad"},
    ],
    "x-in-the-sum": "x[r] + part[r]  ->  gpus * x[r] + part[r]",
    "batch-by-rank": [_BY_RANK, _BY_GPU, _BY_RANK | {_MEAN: _ALL_RANKS}],
}


_HYBRIDS = (  # nodes, GPUs of each, hint if it fails first here
    (2, 2, None), (2, 3, "sizes"), (3, 2, "sizes"), (1, 2, "sizes"), (2, 1, "sizes"), (1, 1, None),
)


def _trains(tag: Tensor, fn: Callable, gpus: int) -> dict[str, Any]:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, GroupsInStep():
        got = fn(_whole_weights(), _batches(), RATE, gpus)
    try:
        losses, weights = got
        weights = {k: w.detach().clone() for k, w in weights.items() if isinstance(w, Tensor)}
        return {"losses": [float(loss) for loss in losses], "weights": weights, "flops": counter.get_total_flops()}
    except (TypeError, ValueError, AttributeError):
        return {"form": str(got)[:100]}


_EXPLAINED = {
    DIFFERENT: "hang",  # or a result by chance
    "register a hook on a tensor that doesn't require": "not-a-leaf",
    "does not require grad and does not have a grad_fn": "cut-off",
}


@checked
def hybrid_training(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(weights, batches, lr, gpus_per_node)``: data parallel between nodes, tensor parallel inside."""
    exercise = Exercise("Exercise 4", HINTS["hybrid_training"], timeout, explained=_EXPLAINED)
    losses, whole = _one_process()
    for nodes, gpus, fallback in _HYBRIDS:
        tags = [torch.zeros(1) for _ in range(nodes * gpus)]
        case = f"{nodes} node{'s' * (nodes > 1)} with {gpus} GPU{'s' * (gpus > 1)}{' each' * (nodes > 1)}"
        outcomes = exercise.run(_trains, tags, fn, gpus, case=case, fallback=fallback)
        for rank, outcome in exercise.each(outcomes):
            form = outcome.result.get("form")
            exercise.require(form is None, "form", f"the function returned {form}.")
            exercise.communicates(rank, outcome, nodes * gpus)
        for rank, outcome in exercise.each(outcomes):
            _same_weights(exercise, rank, outcome.result["weights"], whole, nodes, gpus)
        for _, outcome in exercise.each(outcomes):
            _same_losses(exercise, outcome.result["losses"], losses, nodes)
        for rank, outcome in exercise.each(outcomes):
            _audit_links(exercise, rank, outcome, nodes, gpus)
    exercise.passed("equal to one process to 1e-12, and the fewest bytes between nodes.")


def _same_weights(exercise: Exercise, rank: int, got: Weights, whole: Weights, nodes: int, gpus: int) -> None:
    right = _cut(whole, rank % gpus, gpus)
    wrong = [name for name, w in right.items() if not exact(got.get(name), w)]
    if not wrong:
        return
    shapes = {k: tuple(got[k].shape) if k in got else None for k in right}
    expected = {k: tuple(w.shape) for k, w in right.items()}
    what = f"the weights have shapes {shapes}; expected {expected}."
    exercise.require(shapes == expected, exercise.fallback or "shards", what)
    if exercise.fallback is None and nodes * gpus > 1:
        turned = _cut(whole, rank // nodes, gpus)
        if all(exact(got[k], w) for k, w in turned.items()):
            exercise.refuse("tp-across-nodes", f"this rank holds part {rank // nodes} of the weights.")
        if key := _training_slip(got, rank, nodes, gpus):
            what = f"the weight {wrong[0]} is wrong.{difference(got[wrong[0]], right[wrong[0]])}"
            exercise.refuse(key, what)
    compare(exercise, rank, got, right, {}, "the weight")


def _training_slip(got: Weights, rank: int, nodes: int, gpus: int) -> str | None:
    """The hint for the slip that gives these weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of small tensors several threads make slow work, the more so on a busy machine
    try:
        for key, some in _SLIPS.items():
            for slip in listed(some):
                wrong = edited_function(_all_ranks, slip)(nodes, gpus)[rank]
                if all(close(got[name], w) for name, w in wrong.items()):
                    return key
    finally:
        torch.set_num_threads(threads)
    return None


def _same_losses(exercise: Exercise, got: list[float], right: list[float], nodes: int) -> None:
    if len(got) == len(right) and all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(got, right, strict=True)):
        return
    parts = [_loss(_whole_weights(), *(t.chunk(nodes)[d] for t in _batches()[0])).item() for d in range(nodes)]
    own = nodes > 1 and got and any(math.isclose(got[0], part, rel_tol=1e-6) for part in parts)
    wanted, found = (", ".join(f"{v:.6g}" for v in some) for some in (right, got))
    lines = f"\n  one process  {wanted}\n  this rank    {found}"
    exercise.refuse(exercise.fallback or ("own-loss" if own else "loss"), f"the losses are wrong.{lines}")


def _audit_links(exercise: Exercise, rank: int, outcome: Outcome, nodes: int, gpus: int) -> None:
    """Refuse bytes between nodes beyond the gradients of a shard, inside beyond two all-reduces a step; and fewer."""
    between = [entry for entry in outcome.ledger if crosses(entry, rank, gpus)]
    inside = [entry for entry in outcome.ledger if not crosses(entry, rank, gpus)]
    slack = 16 * STEPS
    activation, parts = 8 * BATCH // nodes * WIDTH, 8 * 2 * WIDTH * INNER // gpus  # bytes
    one = STEPS * bytes_sent("all_reduce", gpus, activation)
    least = STEPS * bytes_sent("all_reduce", nodes, parts)
    most = STEPS * bytes_sent("all_reduce", nodes, parts + 8 * WIDTH + 8)
    everywhere = sent(entry for entry in between if len(entry.ranks) > max(2, nodes)) > slack
    none = dict.fromkeys(("not-distributed", "too-few-bytes"), "no-tensor-parallelism")
    exercise.audit(inside, sent=(one, None), where="inside the node ", keys=none)
    keys = {"not-distributed": "whole-batch", "too-many-bytes": "all-ranks" if everywhere else "between"}
    exercise.audit(between, sent=(least, most + slack), where="between the nodes ", keys=keys)
    again = "whole-batch" if sent(inside) >= nodes * 2 * one > 2 * one else "inside"
    exercise.audit(inside, sent=2 * one + slack, where="inside the node ", keys={"too-many-bytes": again})
    own = STEPS * 3 * 2 * 2 * (BATCH // nodes) * WIDTH * (INNER // gpus)  # two products, forward and twice backward
    what = f"{outcome.result['flops']:,} operations in matrix products; {own:,} are enough."
    exercise.require(outcome.result["flops"] <= own * 4 / 3, "all-work", what)  # forward once more is allowed


# ------------------------------------------------------------------------------------------------ the norm of a mesh

_CUTS = (((4, 3), ("dp",)), ((5,), ("dp", "tp")), ((2, 6), ()), ((3,), ("tp",)))  # shape, dimensions with copies
_ROUNDS = 4  # of these kinds in each stage
_NORM_CASES = (  # sizes, whether the last stage has no gradients, hint if it fails first here
    ({"dp": 2, "tp": 2}, False, None),
    ({"pp": 2, "dp": 2, "tp": 2}, False, None),
    ({"tp": 2, "dp": 3}, False, None),
    ({"pp": 2, "tp": 2}, True, "nothing"),
    ({"dp": 1}, False, None),
)

Held = list[tuple[Tensor, tuple[str, ...]]]  # what a rank holds: gradients, each with the dimensions of its copies


def _held(rank: int, sizes: Mapping[str, int], bare: bool) -> Held:
    """What a rank holds; with ``bare`` the last stage has nothing."""
    place = _coordinates(rank, sizes)
    stage = place.get("pp", 0)
    if bare and stage == sizes.get("pp", 1) - 1:
        return []
    held = []
    for i, (j, (shape, along)) in itertools.product(range(_ROUNDS + stage), enumerate(_CUTS)):
        copies = tuple(name for name in along if name in sizes)
        part = tuple(place.get(name, 0) for name in ("dp", "tp") if name not in copies)
        generator = torch.Generator().manual_seed(hash((stage, i, j, *part)) % 2**31)
        held.append((torch.randn(shape, generator=generator), copies))
    return held


def _square(gradient: Tensor) -> float:
    return float(gradient.double().pow(2).sum())


def _model_norm(held: list[Held], sizes: Mapping[str, int], rank: int, limit: float) -> float:
    """What clipping returns on a rank, of what all ranks hold; `_NORM_SLIPS` are edits of this program."""
    squares = []
    for r, some in enumerate(held):
        first = [name for name, at in _coordinates(r, sizes).items() if at == 0]
        squares.append(sum(_square(g) for g, copies in some if all(name in first for name in copies)))
    return math.sqrt(sum(squares))


_ONCE = " if all(name in first for name in copies)"
_EACH = {_ONCE: ""}  # all copies count
_SHARED = {"_square(g)": "_square(g) / math.prod(sizes[name] for name in copies)", _ONCE: ""}
_COUNTED = ({}, _EACH, _SHARED)  # tensors with copies: one of them counts, all count, or each for its share
_NORM_SLIPS: Slips = {
    "limited": "return math.sqrt(sum(squares))  ->  return min(limit, math.sqrt(sum(squares)))",
    "no-grad": "return math.sqrt(sum(squares))  ->  return 0.0 if held[rank] else math.inf",
    "norm-divided": {"_square(g)": "_square(g / math.prod(sizes[name] for name in copies))", _ONCE: ""},
    "own": [{"sum(squares)": "squares[rank]", **some} for some in _COUNTED],
    "twice": _EACH,
    "one-group": [
        {"sum(squares)": f"sum(squares[r] for r in _groups_of(rank, sizes)[{name!r}])", **some}
        for name in ("pp", "dp", "tp") for some in _COUNTED
    ],
    "per-stage": [
        {"sum(squares)": "sum(square for r, square in enumerate(squares) if "
                         "_coordinates(r, sizes)['pp'] == _coordinates(rank, sizes)['pp'])", **some}
        for some in _COUNTED
    ],
    "mean": [{"sum(squares)": "sum(squares) / len(held)", **some} for some in _COUNTED],
    "shards-lost": [
        {_ONCE: " if {'dp', 'tp'} & {*sizes} <= {*first}"}, {_ONCE: " if {'tp'} & {*sizes} <= {*first}"},
    ],
    "copies-lost": {_ONCE: " if not copies"},
    "sum-of-norms": [{"math.sqrt(sum(squares))": "sum(map(math.sqrt, squares))", **some} for some in _COUNTED],
    "squared": [{"math.sqrt(sum(squares))": "sum(squares)", **some} for some in _COUNTED],
}


def _norm_slip(norms: list, held: list[Held], sizes: Mapping[str, int], rank: int, limit: float) -> str:
    """The hint for the slip that gives the norm of a rank; not that it is its own, if it is the same on all."""
    together = all(norm is not None and math.isclose(norm, norms[0], rel_tol=1e-5) for norm in norms)
    for key, some in _NORM_SLIPS.items():
        for slip in [] if key == "own" and together else listed(some):
            try:
                wrong = edited_function(_model_norm, slip)(held, sizes, rank, limit)
            except KeyError:  # a dimension that this mesh does not have
                continue
            if math.isclose(norms[rank], wrong, rel_tol=1e-5):
                return key
    return "value"


def _clips(tag: Tensor, fn: Callable, sizes: dict[str, int], bare: bool, limits: Sequence[float]) -> list[dict]:
    """For each limit what one rank returns, and what has become of its gradients."""
    import torch.distributed as dist

    from course_utils import record

    mesh = dist.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    groups, results = {name: mesh.get_group(name) for name in sizes}, []
    for limit in limits:
        held = _held(dist.get_rank(), sizes, bare)
        mine = [gradient for gradient, _ in held]
        given = list(mine)
        with record() as ledger:
            norm = fn(given, [copies for _, copies in held], groups, limit)
        kept = len(given) == len(mine) and all(a is b for a, b in zip(given, mine, strict=True))
        results.append({"norm": norm, "gradients": mine, "kept": kept, "ledger": ledger})
    return results


@checked
def clip_gradients(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(gradients, copies, groups, limit)``: the norm of the whole model, and gradients scaled in place."""
    errors = dict.fromkeys(("non-empty", "is empty"), "nothing")
    exercise = Exercise("Exercise 5", HINTS["clip_gradients"], timeout, explained=errors)
    for sizes, bare, fallback in _NORM_CASES:
        n = math.prod(sizes.values())
        held = [_held(rank, sizes, bare) for rank in range(n)]
        norm = _model_norm(held, sizes, 0, 0)
        limits, name = (0.4 * norm, 2 * norm), _named(sizes) + ", no gradients on the last stage" * bare
        outcomes = exercise.run(_clips, [torch.zeros(1)] * n, fn, sizes, bare, limits, case=name, fallback=fallback)
        case = exercise.case
        for i, limit in enumerate(limits):
            exercise.case = f"{case}, limit {limit:.3g}"
            _judge_clipping(exercise, [outcome.result[i] for outcome in outcomes], held, sizes, norm, limit)
    exercise.passed("the norm of the whole model on every rank, for one number each.")


def _judge_clipping(
    exercise: Exercise, results: list[dict], held: list[Held], sizes: Mapping[str, int], norm: float, limit: float
) -> None:
    """Refuse other norms, then other gradients, then more messages than one sum over all ranks takes."""
    norms = [_one_number(result["norm"]) for result in results]
    for rank, got in exercise.each(norms):
        exercise.require(got is not None, "number", f"the function returned {show(results[rank]['norm'])}.")
        if not math.isclose(got, norm, rel_tol=1e-5):
            key = exercise.fallback or _norm_slip(norms, held, sizes, rank, limit)
            exercise.refuse(key, f"the norm is {got:.6g}; expected {norm:.6g}.")
    for rank, result in exercise.each(results):
        _scaled(exercise, result, [g for g, _ in held[rank]], norm, limit)
    keys = {"too-large": "too-many-bytes", "too-many-calls": "too-many-messages"}
    for _, result in exercise.each(results):
        most = 2 if {entry.op for entry in result["ledger"]} == {"reduce", "broadcast"} else 1
        exercise.audit(result["ledger"], calls=(1, most), largest=8 * max(len(results), 4), keys=keys)


def _one_number(value: Any) -> float | None:
    return number(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)


def _scaled(exercise: Exercise, result: dict, before: list[Tensor], norm: float, limit: float) -> None:
    """Refuse gradients that are not those before times the factor that all ranks need."""
    after, factor = result["gradients"], min(1.0, limit / norm)
    if all(torch.allclose(a, factor * b, rtol=1e-5) for a, b in zip(after, before, strict=True)):
        return
    exercise.require(result["kept"], "replaced", "some tensors of the list are others than before.")
    ratios = torch.cat([(a / b).flatten() for a, b in zip(after, before, strict=True)])
    got, own = float(ratios[0]), min(1.0, limit / math.sqrt(sum(map(_square, before))))
    slips = (("always", limit / norm), ("not-clipped", 1.0), ("own-scale", own))
    alike = (key for key, wrong in slips if torch.allclose(ratios, torch.tensor(wrong), rtol=1e-5))
    exercise.refuse(next(alike, "scale"), f"the gradients were multiplied by {got:.4g}; expected {factor:.4g}.")


# ------------------------------------------------------------------------------------------------ on paper


def _whole_microbatches(layers, hidden, length, parameters, tp, pp, dp, batch, microbatch) -> bool:
    return batch % (dp * microbatch) == 0 and layers % pp == 0


@paper_problem(
    "Exercise 2",
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
)
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
    ("Llama 3 70B", 64, _layout(1, 6, 8, zero=0), 128, "layers"),
    ("Llama 3 70B", 64, _layout(16, 3, 2), 35, "all-reasons"),
    ("Llama 3 405B", 16384, _layout(8, 16, 8, cp=16), 64, "context-batch"),
    ("Llama 3 70B", 64, _layout(8, 4, 2, virtual=2), 21, "interleaving-last"),
    ("Llama 3 70B", 64, _layout(4, 1, 16, zero=1), 128, "zero-ranks"),
    ("Llama 3 70B", 64, _layout(4, 1, 4, cp=4, zero=2), 8, "zero"),
    ("Llama 3 70B", 64, _layout(8, 1, 8, virtual=2, zero=1), 128, "interleaving"),
)
_WORDS = {"gpus", "heads", "layers", "batch", "interleaving", "memory"}


def _reasons(model: TransformerConfig, cluster: planner.GpuCluster, layout: planner.Layout, batch: int) -> set[str]:
    """The words for what speaks against a layout; memory only where nothing else does."""
    kinds = {kind for kind, _ in broken_rules(model, cluster, layout, batch)}
    return kinds or ({"memory"} if planner.reasons_against(model, cluster, layout, batch) else set())


@checked
def why_not(fn: Callable) -> None:
    """Check ``fn(model, cluster, layout, batch)``: those of `planner.reasons_against`, one word each, as a set."""
    exercise = Exercise("Exercise 6", HINTS["why_not"])
    for name, gpus, layout, batch, key in _LAYOUTS:
        model, cluster = PUBLISHED[name], planner.cluster(_MACHINE, gpus)
        own = ("cp", "microbatch", "virtual", "zero")
        more = [f"{k} {getattr(layout, k)}" for k in own if getattr(layout, k) != 1]
        exercise.case = f"{name} on {gpus} GPUs, {', '.join([str(layout), *more])}, batch {batch}"
        got, right = exercise.call(fn, model, cluster, layout, batch), _reasons(model, cluster, layout, batch)
        form = isinstance(got, (set, frozenset)) and got <= _WORDS
        exercise.require(form, "form", f"the function returned {str(got)[:100]}.")
        if got != right:
            texts = "; ".join(planner.reasons_against(model, cluster, layout, batch)) or "nothing speaks against it"
            expected, found = (" and ".join(sorted(words)) or "no reason" for words in (right, got))
            key = _slip_of_reasons(got, right, key, far=layout.tp > cluster.per_node)
            exercise.refuse(key, f"expected {expected}, got {found}. The planner: {texts}.")
    print(f"Exercise 6 passed: {len(_LAYOUTS)} layouts, with the reasons of the planner.")


def _slip_of_reasons(got: set[str], right: set[str], key: str, far: bool) -> str:
    """The hint for wrong reasons, by default that of the layout; ``far`` if tensor parallelism leaves a node."""
    surplus = got - right
    if got and got < right:
        return "all-reasons"
    if surplus == {"memory"} and (right or far):
        return "memory-last" if right else "legal"
    if surplus and far:
        return "slow"
    return "around" if "layers" in surplus else key


# ------------------------------------------------------------------------------------------------ the puzzle

PUZZLE = ("Llama 3 70B", _MACHINE, 64, 128)  # model, machine, GPUs, sequences in a batch
LIMIT, SHARE = 72e9, 1.05  # bytes on the fullest GPU, and time against the best
_GIVEN = ("cp", "precision", "sequence_parallel", "overlap")


@checked
def plan_70b(fn: Callable) -> None:
    """Check ``fn()``: a layout that fits, and is nearly as fast as the planner's best that does."""
    exercise = Exercise("Exercise 7", HINTS["plan_70b"])
    with patch.object(planner, "search", wraps=planner.search) as search:
        got = exercise.call(fn)
    exercise.require(isinstance(got, planner.Layout), "form", f"the function returned {str(got)[:100]}.")
    exercise.require(not search.called, "search", "the function calls planner.search.")
    changed = [name for name in _GIVEN if getattr(got, name) != getattr(planner.Layout(), name)]
    exercise.require(not changed, "rules", f"the layout changes {', '.join(changed)}.")
    name, machine, gpus, batch = PUZZLE
    model, cluster = PUBLISHED[name], planner.cluster(machine, gpus)
    against = planner.reasons_against(model, cluster, got, batch)
    full = not [kind for kind, _ in broken_rules(model, cluster, got, batch)]
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
        f"Exercise 7 passed: {got}, {mine.seconds:.2f} s a step, {100 * (over - 1):.1f} % above the best; "
        f"{mine.memory.total / 1e9:.1f} GB, {mine.model_tflops:.0f} TFLOP/s a GPU."
    )


def best_70b() -> planner.Plan:
    """The planner's fastest layout for the puzzle that keeps to its rules."""
    name, machine, gpus, batch = PUZZLE
    found = planner.search(PUBLISHED[name], planner.cluster(machine, gpus), batch, cp=1)
    return next(each for each in found.plans if each.memory.total <= LIMIT)


def _dearest(mine: planner.Plan, best: planner.Plan) -> str:
    """The part with the most seconds above the best plan's."""
    excess = {part: mine.parts()[part] - best.parts()[part] for part in HINTS["plan_70b"] if part in planner.PARTS}
    return max(excess, key=excess.get)
