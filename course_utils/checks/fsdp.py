"""Checks of the exercises on FSDP2.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Models are in float64, so that the ranks can be compared with one
process to 1e-12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from . import BACKEND, TIMEOUT, Exercise, Outcome, checked, paper_problem, show
from .training import (
    ROUNDS,
    average,
    batches_of,
    compare,
    difference,
    exact,
    loss_gradient,
    regression_net,
    sample_table,
    weighted_sum,
)  # fmt: skip

__all__ = [
    "HINTS", "accumulate", "clip_sharded", "fewest_internode_bytes", "fsdp_traffic", "reshard", "wrap_under_target",
]  # fmt: skip

HINTS: dict[str, dict[str, str]] = {
    "wrap_under_target": {
        "no-optimizer": "Return the optimizer: torch.optim.Adam with the learning rate that was given.",
        "no-root": "The parameters outside of the blocks are still whole on every rank, and nobody averages their "
        "gradients. Shard the model itself too, after its parts.",
        "only-root": "One unit holds the whole model: it is gathered before the first layer and stays until backward "
        "ends. Shard parts of the model first, then the model.",
        "too-many-gathers": "The peak is low, but the units are so small that too many messages travel, and each pays "
        "its latency. fully_shard also takes a list of modules, and makes one unit of them.",
        "too-large": "The units are too large: while backward computes one, the next is gathered already, so that two "
        "are there at once. What is in no unit of its own belongs to the root, which stays from forward to backward.",
        "kept": "Blocks are still whole after forward. With reshard_after_forward=False the messages get fewer, but at "
        "the end of forward all units are held.",
        "optimizer-before": "The optimizer holds the parameters that were there before the sharding. fully_shard "
        "replaces them by DTensors, so that these are never updated. Make the optimizer last.",
        "precision": "The parameters or the gradients pass through another dtype. That saves bytes, but it is not the "
        "same step as that of one process.",
    },
    "fewest_internode_bytes": {
        "no-root": "Some parameters are still whole on every rank. Shard the model itself too, after its blocks, with "
        "the same mesh.",
        "replicas": "A rank holds more than its share of the parameters. Inside a node each rank holds one piece: the "
        "second dimension of the mesh has as many ranks as a node.",
        "full-shard": "All ranks form one shard group, so that these all-gathers cross the nodes. Shard inside a "
        "node, replicate across nodes: a mesh with two dimensions, given to every fully_shard, the model's too.",
        "transposed": "A shard group has one rank of each node, so that the all-gathers, which are most of the "
        "traffic, cross the nodes. The first dimension of the mesh replicates, the second one shards.",
        "swapped": "The shard groups have as many ranks as there are nodes. The mesh has one row for each node, and "
        "a column for each rank of a node.",
        "wrong-ranks": "The groups have the right sizes, but ranks of different nodes are in one shard group. Node 0 "
        "has the first ranks, node 1 the next ones: row by row, as torch.arange counts.",
        "nodes-apart": "Each node trains alone: nothing travels between them, and their gradients differ. Give "
        "fully_shard the mesh with both dimensions.",
        "precision": "Fewer bytes than the gradients have in float64: they pass through a smaller dtype, and the step "
        "is another one.",
        "too-many-bytes": "The groups are right, but more bytes cross the nodes than the all-reduce of each rank's "
        "shard of the gradients needs.",
    },
    "reshard": {
        "tensor": "Return a tensor with the rows of this rank.",
        "dtype": "The rows have another dtype than in the files. torch.cat and slices keep it; torch.empty and "
        "torch.zeros make float32 unless told.",
        "dropped": "Rows are missing. If the number of ranks does not divide the rows, the shards differ: each has "
        "ceil(rows / ranks) rows, the last ones less or none.",
        "balanced": "That is the division into parts as equal as possible. FSDP2 divides like torch.chunk: "
        "ceil(rows / ranks) rows each, as long as there are some.",
        "padding": "There are rows that the tensor does not have. FSDP2 pads shards when it sends them; a shard "
        "itself is not padded.",
        "order": "The right rows in another order. Row i of the tensor comes before row i + 1.",
        "own-file": "This is the file of the same number, as if the number of ranks had not changed.",
        "whole": "This is the whole tensor. It may not fit into the memory of one rank: return this rank's rows.",
        "no-rows": "Right until a rank has no rows. Its shard is an empty tensor with the right number of columns: "
        "read(0, 0, 0) gives one.",
        "wrong-rows": "As many rows as there should be, from wrong places. Shards of N ranks begin at multiples of "
        "ceil(rows / N), also those in the files; start and stop count inside of the file.",
        "past-the-end": "There is no such row, or no such file. Shards of N ranks begin at multiples of ceil(rows / "
        "N); the last files are shorter or empty. start and stop count inside of the file.",
        "every-file": "Every rank reads the whole checkpoint. With many ranks the storage has to deliver it as many "
        "times. Read the rows that this rank needs.",
        "more-rows": "Rows are read that this rank does not need. Read a part of a file where a part is enough.",
        "many-reads": "A file is read in several pieces. Rows that follow each other come with one read.",
    },
    "clip_sharded": {
        "tensor": "Return the norm as a tensor with one element, or as a number.",
        "local": "This is the norm of what this rank holds. Each rank would then scale by another coefficient. The "
        "squares of all ranks have to be added.",
        "sum-of-norms": "Norms do not add up, their squares do: add the squares, and take one root at the end.",
        "no-root": "This is the square of the norm.",
        "mean": "The squares are averaged over the ranks. Each rank holds other elements: add them.",
        "replicated-twice": "A gradient that every rank holds is counted once for every rank. Add its squares after "
        "the all-reduce, or let one rank bring them.",
        "replicated-forgotten": "The replicated gradients are not in the norm.",
        "norm-after": "The norm before clipping is asked for. It is what one watches during training.",
        "not-scaled": "The norm is right, and the gradients are as before. Scale them in place: gradient.mul_(…).",
        "replicated-not-scaled": "All gradients have to be scaled, the replicated ones too.",
        "scaled-up": "The norm is below max_norm, and the gradients were made larger. Clipping never does: the "
        "coefficient is at most 1.",
        "each-tensor": "Each gradient is clipped by its own norm, which changes their direction. There is one "
        "coefficient for all.",
        "zero": "All gradients are zero, and the coefficient is 0 / 0. Add a small number to the norm before you "
        "divide by it; PyTorch takes 1e-6.",
        "gathered": "The gradients themselves travel. The squares can be added where they are; one number is enough.",
        "too-many-messages": "More than one message. Add the squares of all tensors before you send.",
        "hang": "Some ranks skip the all-reduce. A rank without any rows must take part as well, with zero.",
    },
    "accumulate": {
        "every-micro-batch": "The gradients are reduce-scattered after each micro-batch: the result is right, the "
        "traffic is wasted. model.set_requires_gradient_sync(False) lets backward only accumulate.",
        "recurse": "The root waits, the units below it do not. set_requires_gradient_sync works on all of them unless "
        "recurse is False.",
        "never": "The gradients were never reduced: the parameters have none. Turn synchronisation on again before "
        "the last backward.",
        "too-early": "The gradients were reduced before the last micro-batch, and not after it, so that some are "
        "missing. Which backward has to synchronise?",
        "not-scaled": "backward adds up the gradients of all micro-batches. The mean is asked for: scale each loss.",
        "mean-of-means": "The last micro-batch is smaller, so its samples weigh too much. Scale each loss by its "
        "share of the samples.",
        "divided-twice": "FSDP divides by the number of ranks already.",
        "only-last": "Only the last micro-batch is in the gradient. Which call throws away what was accumulated?",
        "one-batch": "All micro-batches went through the model at once. Accumulation is there because that does not "
        "fit into memory.",
        "one-micro-batch": "With one micro-batch there is nothing to accumulate; the answer must work all the same.",
    },
    "fsdp_traffic": {
        "root-twice": "The root unit is not freed after forward: backward begins with it. It is gathered once.",
        "forward-only": "A block is freed after its forward, so that backward has to gather it a second time.",
        "no-root": "What stands outside of the blocks, embedding and head, forms a unit as well: the root.",
        "per-micro-batch": "In accumulation the gradients are reduced once, with the last micro-batch.",
        "gathered-once": "Blocks are freed after each forward and each backward, so that every micro-batch gathers "
        "them anew.",
        "all-reduce": "A reduce-scatter sends half of what an all-reduce does: (N-1)/N of the gradients.",
        "share": "A rank has its own share already: (N-1)/N of a unit travels.",
        "one-dtype": "Parameters travel in one precision, gradients in another. Take the bytes of each.",
        "elements": "These are numbers of elements. Multiply by the bytes of each.",
        "giga": "GB are 10⁹ bytes.",
    },
}  # fmt: skip

# ------------------------------------------------------------------------------------------------ models and numbers


def _first_use() -> None:
    """One step of FSDP2. The first of a process imports for seconds, which are not the answer's."""
    from torch.distributed.fsdp import fully_shard

    layer = fully_shard(nn.Linear(1, 1))
    layer(torch.zeros(1, 1)).sum().backward()
    layer.weight.full_tensor()


def _ready(n: int) -> None:
    from course_utils import launch

    launch(_first_use, world_size=n, backend=BACKEND, timeout=120)


def _whole(value: Tensor | None) -> Tensor | None:
    """A tensor without DTensor around it, all shards together."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def _local(value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def _is_sharded(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _whole_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else _whole(p.grad).clone() for name, p in module.named_parameters()}


def _gpt(layers: int, hidden: int = 12) -> nn.Module:
    from ..models import GPTConfig, build

    config = GPTConfig(layers=layers, heads=2, hidden=hidden, context=8, vocabulary=10)
    return build(config, seed=layers, dtype=torch.float64)


def _tokens(n: int, steps: int) -> list[Tensor]:
    """For each rank tokens of shape (steps, 2 sequences, 9)."""
    generator = torch.Generator().manual_seed(70 + n)
    return [torch.randint(10, (steps, 2, 9), generator=generator) for _ in range(n)]


def _loss(model: nn.Module, words: Tensor) -> Tensor:
    return model.loss(words[:, :-1], words[:, 1:])


def _mean_gradients(model: nn.Module, words: Sequence[Tensor]) -> dict[str, Tensor]:
    """Gradients of the mean loss over the batches of all ranks, in one process."""
    model.zero_grad()
    (sum(_loss(model, batch) for batch in words) / len(words)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def _padded(parameters: Sequence[Tensor], ranks: int) -> int:
    """Bytes of the parameters when each is padded to equal shards on dimension 0."""
    return sum(-(-len(p) // ranks) * ranks * p.nbytes // len(p) for p in parameters)


# ------------------------------------------------------------------------------------------------ units and peak

HIDDEN, RATE = 32, 1e-2
ALLOWED = 8  # blocks that the peak of a step may add to the model states


def _wrapped_steps(words: Tensor, fn: Callable, layers: int) -> dict:
    """Two steps of one rank; ``words`` has shape (2, sequences, length)."""
    from course_utils import record

    from ..memory import track

    model = _gpt(layers, HIDDEN)
    optimizer = fn(model, RATE)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {"optimizer": show(optimizer)}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    out = {
        "optimizer": None, "stepped": all(id(p) in stepped for p in model.parameters()), "losses": [],
        "plain": [name for name, p in model.named_parameters() if not _is_sharded(p)],
    }  # fmt: skip
    if out["plain"]:
        return out | {"some": len(out["plain"]) < len(list(model.parameters()))}
    for step, batch in enumerate(words):
        optimizer.zero_grad()
        with record() as ledger, track(model, optimizer) if step else nullcontext() as tracker:
            loss = _loss(model, batch)
            forward = len(ledger)
            kept = [name for name, p in model.blocks.named_parameters() if not _is_sharded(p)]
            loss.backward()
            optimizer.step()
        out["losses"].append(loss.item())
        if step == 0:
            out["gradients"] = _whole_gradients(model)
    out["gathers"] = [sum(e.op == "all_gather" for e in part) for part in (ledger[:forward], ledger[forward:])]
    return out | {"kept": kept, "peak": tracker.peak}


@checked
def wrap_under_target(fn: Callable, timeout: float = 4 * TIMEOUT) -> None:
    """Check ``fn(model, learning_rate) -> optimizer``: few all-gathers and a low peak."""
    exercise = Exercise("Exercise 1", HINTS["wrap_under_target"], timeout)
    said = []
    for n, layers in ((2, 10), (3, 8)):
        _ready(n)
        words = [w[:, :1, :5] for w in _tokens(n, 2)]
        outcomes = exercise.run(_wrapped_steps, words, fn, layers, case=f"{layers} blocks")
        model = _gpt(layers, HIDDEN)
        gradients = _mean_gradients(model, [w[0] for w in words])
        losses = [_loss(model, w[0]).item() for w in words]
        torch.optim.Adam(model.parameters(), RATE).step()
        after = [_loss(model, w[1]).item() for w in words]
        for rank, outcome in enumerate(outcomes):
            got = outcome.result
            exercise.require(not got["optimizer"], "no-optimizer", f"the function returned {got['optimizer']}.", rank)
            what = f"{', '.join(got['plain'][:3])}: whole on every rank."
            exercise.require(not got.get("some"), "no-root", what, rank)
            exercise.communicates(rank, outcome, n)
            exercise.require(got["stepped"], "optimizer-before", "some parameters are not in the optimizer.", rank)
            _same_step(exercise, rank, got, gradients, (losses[rank], after[rank]))
        said.append(_audit_units(exercise, outcomes, layers, n))
    exercise.passed(f"{said[0]}.")


def _same_step(exercise: Exercise, rank: int, got: dict, gradients: dict, losses: tuple[float, float]) -> None:
    """Compare gradients of the first step, and the losses of both, with those of one process."""
    for name, right in gradients.items():
        if not exact(got["gradients"][name], right):
            near = (got["gradients"][name] - right).norm() < 0.1 * right.norm()
            what = f"the gradient of {name} is wrong.{difference(got['gradients'][name], right)}"
            exercise.refuse("precision" if near else "value", what, rank)
    for step, (loss, right) in enumerate(zip(got["losses"], losses, strict=True)):
        what = f"the loss of step {step + 1} is {loss:.9g}, in one process {right:.9g}."
        exercise.require(math.isclose(loss, right, rel_tol=1e-9), "value", what, rank)


def _audit_units(exercise: Exercise, outcomes: list[Outcome], layers: int, n: int) -> str:
    """Refuse units that are too many, too large or never freed; says what was measured."""
    model = _gpt(layers, HIDDEN)
    states = 4 * _padded(list(model.parameters()), n) / n
    limit = states + ALLOWED * sum(p.nbytes for p in model.blocks[0].parameters())
    for rank, outcome in enumerate(outcomes):
        got = outcome.result
        forward, backward = got["gathers"]
        gathers, peak = forward + backward, got["peak"].total
        what = f"a step has {gathers} all-gathers of {layers + 1} allowed; the peak is {peak / 1e6:.2f} MB of "
        what += f"{limit / 1e6:.2f} MB allowed."
        exercise.require(gathers > 1 or peak <= limit, "only-root", what, rank)
        exercise.require(backward > 0 or not got["kept"], "kept", what, rank)
        exercise.require(gathers <= layers + 1, "too-many-gathers", what, rank)
        exercise.require(peak <= limit, "too-large", what, rank)
    return f"{gathers} all-gathers a step for {layers} blocks, peak {peak / 1e6:.1f} MB of {limit / 1e6:.1f} MB allowed"


# ------------------------------------------------------------------------------------------------ two-level cluster


def _hybrid_step(words: Tensor, fn: Callable, nodes: int, per_node: int) -> dict:
    from course_utils import record

    model = _gpt(2)
    fn(model, nodes, per_node)
    with record() as ledger:
        _loss(model, words[0]).backward()
    parameters = dict(model.named_parameters())
    return {
        "ledger": ledger, "held": sum(_local(p).nbytes for p in parameters.values()),
        "plain": [name for name, p in parameters.items() if not _is_sharded(p)],
        "gradients": _whole_gradients(model),
    }  # fmt: skip


def _crossing(rank: int, entry: Any, per_node: int) -> float:
    """Bytes that ``rank`` sends to another node if the group's ring runs in the order of its ranks."""
    size = len(entry.ranks)
    after = entry.ranks[(entry.ranks.index(rank) + 1) % size]
    if rank // per_node == after // per_node:
        return 0.0
    return {"all_reduce": 2, "broadcast": 0, "barrier": 0}.get(entry.op, 1) * (size - 1) / size * entry.bytes


def _shard_group(exercise: Exercise, rank: int, group: tuple[int, ...], nodes: int, per_node: int) -> None:
    """Refuse a group of ranks that share one copy of the parameters, unless it is the rank's node."""
    node = range(rank // per_node * per_node, (rank // per_node + 1) * per_node)
    if group == tuple(node):
        return
    touched = [r // per_node for r in group]
    key = "wrong-ranks"
    if len(group) == nodes * per_node:
        key = "full-shard"
    elif len(group) == nodes != per_node or len(set(touched)) == len(touched) == nodes:
        key = "transposed" if len(set(touched)) == len(touched) else "swapped"
    elif len(group) < per_node:
        key = "replicas"
    exercise.refuse(key, f"the shards are gathered by ranks {group}; the node has ranks {tuple(node)}.", rank)


@checked
def fewest_internode_bytes(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(model, nodes, per_node)``: shards inside a node, the fewest bytes between nodes."""
    exercise = Exercise("Exercise 2", HINTS["fewest_internode_bytes"], timeout)
    said = []
    for nodes, per_node in ((3, 2), (2, 3)):
        n, model = nodes * per_node, _gpt(2)
        _ready(n)
        words = _tokens(n, 1)
        case = f"{nodes} nodes of {per_node}"
        outcomes = exercise.run(_hybrid_step, words, fn, nodes, per_node, case=case)
        padded = _padded(list(model.parameters()), per_node)
        right = _mean_gradients(model, [w[0] for w in words])
        crossing = [0.0] * n
        for rank, outcome in enumerate(outcomes):
            exercise.communicates(rank, outcome, n)
            got = outcome.result
            what = f"{', '.join(got['plain'][:3])}: whole on every rank."
            exercise.require(not got["plain"], "no-root", what, rank)
            groups = {e.ranks for e in got["ledger"] if e.op in ("all_gather", "reduce_scatter")}
            for group in sorted(groups):
                _shard_group(exercise, rank, group, nodes, per_node)
            what = f"{got['held']} bytes of parameters are held; the node's share is {padded // per_node}."
            exercise.require(got["held"] <= padded // per_node, "replicas", what, rank)
            crossing[rank] = sum(_crossing(rank, e, per_node) for e in got["ledger"])
        enough, total = 2 * (nodes - 1) * padded, sum(crossing)
        what = f"{total:,.0f} bytes cross the nodes in a step; {enough:,} are enough."
        for rank, outcome in enumerate(outcomes):
            wrong = next((k for k, g in right.items() if not exact(outcome.result["gradients"][k], g)), None)
            if wrong:
                key = "nodes-apart" if total == 0 else "precision" if total < 0.99 * enough else "value"
                got = outcome.result["gradients"][wrong]
                exercise.refuse(key, f"the gradient of {wrong} is wrong.{difference(got, right[wrong])}", rank)
        exercise.require(total <= 1.001 * enough, "too-many-bytes", what)
        blocks, whole = (_padded(list(module.parameters()), n) for module in (model.blocks, model))
        said.append((total, nodes * (n - 1) / n * (2 * whole + blocks)))  # all ranks: only blocks are gathered twice
    few, all_ranks = said[0]
    print(f"Exercise 2 passed: {few:,.0f} bytes cross 3 nodes of 2; sharded over all 6 ranks, {all_ranks:,.0f} would.")


# ------------------------------------------------------------------------------------------------ resharding


class _Files:
    """The shards that N ranks have saved; counts what is read."""

    def __init__(self, whole: Tensor, saved: int):
        chunks = list(whole.chunk(saved))
        self.files = chunks + [whole[:0]] * (saved - len(chunks))
        self.reads: list[tuple[int, int]] = []
        self.missing = ""

    def __call__(self, file: int, start: int, stop: int) -> Tensor:
        rows = len(self.files[file]) if 0 <= file < len(self.files) else -1
        if not 0 <= start <= stop <= rows:
            has = f"it has {rows} rows" if rows >= 0 else f"files are 0 to {len(self.files) - 1}"
            self.missing = self.missing or f"read({file}, {start}, {stop}): {has}."
            return self.files[0][:0].clone()
        if stop > start:
            self.reads.append((file, stop - start))
        return self.files[file][start:stop].clone()


_CHECKPOINTS = (
    (12, 4, 2), (12, 2, 4), (12, 3, 3), (10, 4, 3), (10, 3, 4), (13, 5, 2), (5, 4, 2), (9, 4, 4), (7, 3, 1),
    (7, 1, 3), (5, 2, 4), (2, 3, 5),
)  # fmt: skip
COLUMNS = 3


@checked
def reshard(fn: Callable) -> None:
    """Check ``fn(rows, saved, rank, ranks, read) -> rows of this rank``, read from the fewest bytes."""
    exercise = Exercise("Exercise 3", HINTS["reshard"])
    for rows, saved, ranks in _CHECKPOINTS:
        whole = (1 + torch.arange(rows * COLUMNS)).view(rows, COLUMNS).to(torch.bfloat16)
        shards = _Files(whole, ranks).files
        for rank, right in enumerate(shards):
            exercise.case = f"{rows} rows saved by {saved} ranks, loaded by {ranks}"
            exercise.fallback = "no-rows" if not len(right) else None
            read = _Files(whole, saved)
            got = exercise.call(fn, rows, saved, rank, ranks, read)
            exercise.require(not read.missing, "past-the-end", f"there is nothing at {read.missing}", rank)
            exercise.require(isinstance(got, Tensor), "tensor", f"the function returned {show(got)}.", rank)
            if got.shape != right.shape or not torch.equal(got.to(right.dtype), right):
                _refuse_shard(exercise, rank, got, right, whole, (saved, ranks))
            what = f"the dtype is {got.dtype}, in the files {right.dtype}."
            exercise.require(got.dtype == right.dtype, "dtype", what, rank)
            _audit_reads(exercise, rank, read, len(right), rows)
    print(f"Exercise 3 passed on {len(_CHECKPOINTS)} checkpoints: each rank reads its own rows, and each of them once.")


def _refuse_shard(exercise: Exercise, rank: int, got: Tensor, right: Tensor, whole: Tensor, sizes: tuple) -> None:
    saved, ranks = sizes
    rows, small = len(whole), len(whole) // ranks
    floor = whole[rank * small : (rank + 1) * small]
    balanced = whole.tensor_split(ranks)[rank]
    same = got.dim() == 2 and got.shape[1] == COLUMNS
    listed, wanted = ([tuple(row) for row in t.tolist()] if same else [] for t in (got, right))
    own = _Files(whole, saved).files[rank] if rank < saved else whole[:0]
    width = -(-rows // ranks)
    traps = {
        "order": sorted(listed) == sorted(wanted) and listed != wanted,
        "padding": len(listed) == width > len(wanted) and listed == wanted + [(0.0,) * COLUMNS] * (width - len(wanted)),
        "whole": same and ranks > 1 and torch.equal(got, whole),
        "equal split": same and torch.equal(got, floor),
        "own-file": same and len(own) and torch.equal(got, own),
        "balanced": same and rows % ranks and torch.equal(got, balanced),
        "dropped": same and len(listed) < len(wanted) and set(listed) <= set(wanted),
        "wrong-rows": same and len(listed) == len(wanted) and set(listed) <= {tuple(row) for row in whole.tolist()},
    }  # fmt: skip
    key = next((key for key, found in traps.items() if found), "value" if got.shape == right.shape else "shape")
    key = "dropped" if key == "equal split" else key
    lines = f"\n  expected  {show(right)}\n  got       {show(got)}"
    exercise.refuse(key, f"the shard is wrong.{lines}", rank)


def _audit_reads(exercise: Exercise, rank: int, read: _Files, needed: int, rows: int) -> None:
    count = sum(size for _, size in read.reads)
    what = f"{count} rows are read; {needed} are enough."
    exercise.require(count <= needed, "every-file" if count >= rows else "more-rows", what, rank)
    files = [file for file, _ in read.reads]
    what = f"{len(files)} reads of {len(set(files))} files."
    exercise.require(len(files) == len(set(files)), "many-reads", what, rank)


# ------------------------------------------------------------------------------------------------ clipping


def _pieces(whole: Sequence[Tensor], ranks: int, rank: int) -> list[Tensor]:
    return [_Files(g, ranks).files[rank].clone() for g in whole]


def _gradient_set(seed: int, shapes: Sequence[tuple[int, ...]], size: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _clip(x: Tensor, fn: Callable, sharded: list, replicated: list, max_norm: float) -> dict:
    import torch.distributed as dist

    own = _pieces(sharded, dist.get_world_size(), dist.get_rank())
    copies = [g.clone() for g in replicated]
    norm = fn(list(own), list(copies), max_norm)
    return {"norm": norm, "sharded": own, "replicated": copies}


_SHAPES, _COPIES = [(5, 3), (7,), (1, 4), (4, 2)], [(3,), (2, 2)]
_CLIPS = (  # ranks, sharded, replicated, size of the elements, max_norm, hint if it fails first
    (2, _SHAPES, _COPIES, 2.0, 1.0, None),
    (2, _SHAPES, _COPIES, 0.05, 1.0, None),
    (2, _SHAPES, _COPIES, 0.0, 1.0, "zero"),
    (2, [(1, 3), (1, 4)], _COPIES, 3.0, 0.5, None),
    (3, _SHAPES, [], 3.0, 0.5, None),
    (1, _SHAPES, _COPIES, 2.0, 1.0, None),
)


@checked
def clip_sharded(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(sharded, replicated, max_norm) -> norm``: one coefficient for all, one number travels."""
    exercise = Exercise("Exercise 4", HINTS["clip_sharded"], timeout)
    for n, shapes, copies, size, max_norm, fallback in _CLIPS:
        sharded, replicated = _gradient_set(n, shapes, size), _gradient_set(n + 10, copies, size)
        norm = _norm([*sharded, *replicated])
        case = f"a norm of {norm:.4g}, max_norm {max_norm:g}" + ", nothing replicated" * (not copies)
        inputs = [torch.zeros(1)] * n
        outcomes = exercise.run(_clip, inputs, fn, sharded, replicated, max_norm, case=case, fallback=fallback)
        for rank, outcome in enumerate(outcomes):
            exercise.communicates(rank, outcome, n)
            _clipped_norm(exercise, rank, n, outcome.result["norm"], sharded, replicated, max_norm)
            _clipped(exercise, rank, n, outcome.result, sharded, replicated, max_norm)
            if n > 1:
                _audit_clip(exercise, rank, outcome)
    exercise.passed("one number travels, and every gradient gets the coefficient of one process.")


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def _near(got: float, expected: float) -> bool:
    return math.isclose(got, expected, rel_tol=1e-5, abs_tol=1e-12)


def _clipped_norm(
    exercise: Exercise, rank: int, n: int, got: Any, sharded: list, replicated: list, max_norm: float
) -> None:
    number = isinstance(got, (int, float)) or isinstance(got, Tensor) and got.numel() == 1
    exercise.require(number, "tensor", f"the function returned {show(got)}.", rank)
    got, right = float(got), _norm([*sharded, *replicated])
    if _near(got, right):
        return
    by_rank = [_norm([*_pieces(sharded, n, r), *replicated]) for r in range(n)]
    shards = [_norm(_pieces(sharded, n, r)) for r in range(n)]
    parts, copies = [_norm([g]) for g in (*sharded, *replicated)], _norm(replicated)
    traps = {
        "local": [by_rank[rank], shards[rank]],
        "no-root": [right**2],
        "replicated-twice": [math.hypot(*by_rank)],
        "replicated-forgotten": [math.hypot(*shards)],
        "mean": [math.hypot(*by_rank) / math.sqrt(n), math.hypot(math.hypot(*shards) / math.sqrt(n), copies)],
        "sum-of-norms": [sum(by_rank), sum(shards), sum(shards) + copies, sum(parts), math.fsum(by_rank) / n],
        "norm-after": [min(right, max_norm)],
    }  # fmt: skip
    if n == 1:
        traps = {key: wrong for key, wrong in traps.items() if key in ("no-root", "norm-after", "replicated-forgotten")}
    key = next((key for key, some in traps.items() if any(_near(got, w) for w in some)), "value")
    exercise.refuse(key, f"the norm is wrong.\n  one process  {right:.6g}\n  this rank    {got:.6g}", rank)


def _clipped(
    exercise: Exercise, rank: int, n: int, got: dict, sharded: list, replicated: list, max_norm: float
) -> None:
    """Compare the gradients with those that one process clips."""
    own, norm = _pieces(sharded, n, rank), _norm([*sharded, *replicated])
    factor = min(1.0, max_norm / (norm + 1e-6))
    found, before = [*got["sharded"], *got["replicated"]], [*own, *replicated]
    lost = any(bool(g.isnan().any()) for g in found)
    exercise.require(not lost, "zero", "some gradients are nan.", rank)
    for tensor, old in zip(found, before, strict=True):
        right = factor * old
        if tensor.shape == right.shape and torch.allclose(tensor, right, rtol=1e-5, atol=1e-12):
            continue

        def scaled(by: float, old: Tensor = old, tensor: Tensor = tensor) -> bool:
            return torch.allclose(tensor, by * old, rtol=1e-4, atol=1e-12)

        kept, alone = scaled(1.0), [_norm([old]), *(_norm([g]) for g in (*sharded, *replicated))]
        sharded_right = all(torch.allclose(a, factor * b, rtol=1e-5) for a, b in zip(got["sharded"], own, strict=True))
        key = "value"
        if kept:
            key = "replicated-not-scaled" if sharded_right else "not-scaled"
        elif norm < max_norm and scaled(max_norm / norm):
            key = "scaled-up"
        elif any(scaled(min(1.0, max_norm / (v + 1e-6))) for v in alone):
            key = "each-tensor"
        exercise.refuse(key, f"a gradient is wrong.\n  expected  {show(right)}\n  got       {show(tensor)}", rank)


def _audit_clip(exercise: Exercise, rank: int, outcome: Outcome) -> None:
    calls = [e for e in outcome.ledger if e.op != "barrier"]
    size = sum(e.bytes for e in calls)
    largest = max(e.bytes for e in calls)
    exercise.require(largest <= 16, "gathered", f"a message has {largest} bytes; 8 are enough.", rank)
    what = f"{len(calls)} messages with {size} bytes; one is enough."
    exercise.require(len(calls) <= 1, "too-many-messages", what, rank)


# ------------------------------------------------------------------------------------------------ accumulation


UNITS = 2


def _sharded_net() -> tuple[nn.Module, list[int]]:
    """The small net, its first layer a unit, its last one in the root; and a list of the samples of each forward."""
    from torch.distributed.fsdp import fully_shard

    net, seen = regression_net(), []
    fully_shard(net[0])
    fully_shard(net)
    net.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    return net, seen


def _accumulate(table: Tensor, fn: Callable, sizes: list[int]) -> list[dict]:
    """Two rounds of one rank; each has its own half of the table."""
    from course_utils import record

    net, seen = _sharded_net()
    out = []
    for half in table.chunk(ROUNDS):
        net.zero_grad()
        with record() as ledger:
            fn(net, batches_of(half, sizes))
        out.append({"gradients": _whole_gradients(net), "ledger": ledger, "largest": max(seen, default=0)})
    return out


@checked
def accumulate(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(model, batches)``: the gradient of all samples, reduce-scattered once."""
    exercise = Exercise("Exercise 5", HINTS["accumulate"], timeout)
    for n, sizes, fallback in (
        (2, [4, 4, 4], None), (2, [4, 4, 2], "mean-of-means"), (2, [4], "one-micro-batch"), (3, [3, 3, 3, 1], None),
    ):  # fmt: skip
        _ready(n)
        data = [sample_table(ROUNDS * sum(sizes), 500 + 10 * n + rank) for rank in range(n)]
        case = f"{len(sizes)} micro-batch{'es' * (len(sizes) > 1)} of {', '.join(map(str, sizes))} samples"
        outcomes = exercise.run(_accumulate, data, fn, sizes, case=case, fallback=fallback)
        for rank, outcome in enumerate(outcomes):
            for number, result in enumerate(outcome.result):
                halves = [batches_of(table.chunk(ROUNDS)[number], sizes) for table in data]
                _accumulated(exercise, rank, result, halves, sizes, f"round {number + 1}: ")
    exercise.passed("the gradients are reduce-scattered once, whatever the number of micro-batches.")


def _accumulated(exercise: Exercise, rank: int, result: dict, halves: list, sizes: list[int], where: str) -> None:
    n, m, net = len(halves), len(sizes), regression_net()
    got, largest = result["gradients"], result["largest"]
    none = [name for name, g in got.items() if g is None]
    reduced = result["ledger"].count("reduce_scatter")
    exercise.require(not none, "never", f"{where}{', '.join(none)} has no gradient.", rank)
    parts = [[loss_gradient(net, x, y) for x, y in batches] for batches in halves]
    share = [size / sum(sizes) for size in sizes]
    right = average([weighted_sum(own, share) for own in parts])
    traps: dict[str, Any] = {"divided-twice": weighted_sum([right], [1 / n])}
    if m > 1:
        plain, last = average([weighted_sum(own, [1] * m) for own in parts]), average([own[-1] for own in parts])
        heads = [average([weighted_sum(own[:k], share[:k]) for own in parts]) for k in range(1, m)]
        traps |= {
            "not-scaled": plain, "mean-of-means": weighted_sum([plain], [1 / m]),
            "only-last": [weighted_sum([last], [w]) for w in (1, 1 / m, share[-1])], "too-early": heads,
        }  # fmt: skip
    compare(exercise, rank, got, right, traps, f"{where}the gradient")
    what = f"{where}the model saw {largest} samples at once; a micro-batch has {max(sizes)} at most."
    exercise.require(largest <= max(sizes), "one-batch", what, rank)
    size, enough = result["ledger"].bytes("reduce_scatter"), _padded(list(net.parameters()), n)
    key = "every-micro-batch" if reduced >= UNITS * m else "recurse"
    what = f"{where}{size} bytes are reduce-scattered in {reduced} calls; {enough} bytes in {UNITS} calls are enough."
    exercise.require(size <= enough, key, what, rank)
    others = sum(e.bytes for e in result["ledger"] if e.op not in ("all_gather", "reduce_scatter", "barrier"))
    exercise.require(others < enough, "too-many-bytes", f"{where}{others} bytes travel in other calls.", rank)


# ------------------------------------------------------------------------------------------------ paper problem


@checked
def fsdp_traffic(fn: Callable) -> None:
    """Check ``fn(layers, block, around, ranks, parameter, gradient, micro) -> (all-gathers, reduce-scatters, GB)``."""

    def traffic(
        gathers: Callable[[int, int], float] = lambda layers, m: m * (2 * layers + 1),
        elements: Callable[[int, float, float, int], float] = lambda layers, p, root, m: m * (2 * layers * p + root),
        reduces: Callable[[int, int], float] = lambda layers, m: layers + 1,
        reduced: Callable[[int, float, float, int], float] = lambda layers, p, root, m: layers * p + root,
        share: Callable[[int], float] = lambda n: (n - 1) / n,
        widths: Callable[[float, float], tuple[float, float]] = lambda parameter, gradient: (parameter, gradient),
        giga: float = 1e9,
        times: float = 1,
    ) -> Callable[..., tuple[float, ...]]:
        def answer(layers: int, p: float, root: float, n: int, parameter: float, gradient: float, m: int):
            a, b = widths(parameter, gradient)
            sent = elements(layers, p, root, m) * a + times * reduced(layers, p, root, m) * b
            return gathers(layers, m), reduces(layers, m), share(n) * sent / giga

        return answer

    first = (32, 201_379_840, 214_249_472, 64, 2, 4, 1)
    paper_problem(
        "Exercise 6", fn, traffic(),
        [first, (12, 7_087_872, 39_385_344, 8, 4, 4, 2), (*first[:-1], 4), (5, 1e6, 3e6, 2, 2, 2, 3)],
        {
            "root-twice": [
                traffic(lambda x, m: 2 * m * (x + 1), lambda x, p, r, m: 2 * m * (x * p + r)),
                traffic(elements=lambda x, p, r, m: 2 * m * (x * p + r)),
            ],
            "forward-only": [traffic(lambda x, m: m * (x + 1), lambda x, p, r, m: m * (x * p + r))],
            "no-root": [
                traffic(
                    lambda x, m: 2 * m * x, lambda x, p, r, m: 2 * m * x * p, lambda x, m: x, lambda x, p, r, m: x * p
                ),
                traffic(reduces=lambda x, m: x, reduced=lambda x, p, r, m: x * p),
            ],
            "per-micro-batch": traffic(
                reduces=lambda x, m: m * (x + 1), reduced=lambda x, p, r, m: m * (x * p + r)
            ),
            "gathered-once": traffic(lambda x, m: 2 * x + 1, lambda x, p, r, m: 2 * x * p + r),
            "all-reduce": traffic(times=2),
            "share": [traffic(share=lambda n: 1), traffic(share=lambda n: 1 / n)],
            "one-dtype": [traffic(widths=lambda a, b: (a, a)), traffic(widths=lambda a, b: (b, b))],
            "elements": traffic(widths=lambda a, b: (1, 1)),
            "giga": [traffic(giga=1), traffic(giga=1e6), traffic(giga=2**30)],
        },
        HINTS["fsdp_traffic"], ["all-gathers", "reduce-scatters", "GB"], tolerance=1e-3,
    )  # fmt: skip
