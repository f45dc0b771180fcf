"""The exercises on FSDP2: what each rank must find, and the usual mistakes with their hints.

Models are in float64, so that the ranks can be compared with one process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import groupby
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from course_utils import record
from course_utils.check import TIMEOUT, Case, Note, crosses, exercise, number, paper, sent, show
from course_utils.memory import track
from course_utils.models import TransformerConfig, build_gpt

from . import answers

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

NO_ROOT = """These parameters are still whole on every rank, because they belong to no unit. Shard the model itself too,
    after its parts and in the same way."""

# --- a model, and what one process makes of it


def gpt(layers: int, hidden: int) -> nn.Module:
    config = TransformerConfig(layers=layers, heads=2, hidden=hidden, context=8, vocabulary=10)
    return build_gpt(config, seed=layers, dtype=torch.float64)


def tokens(n: int, steps: int) -> list[Tensor]:
    """For each rank tokens of shape (steps, 2 sequences, 9)."""
    generator = torch.Generator().manual_seed(70 + n)
    return [torch.randint(10, (steps, 2, 9), generator=generator) for _ in range(n)]


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return model.loss(words[:, :-1], words[:, 1:])


def mean_gradients(model: nn.Module, words: Sequence[Tensor]) -> dict[str, Tensor]:
    """Gradients of the mean loss over the batches of all ranks, in one process."""
    (sum(loss_of(model, batch) for batch in words) / len(words)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def whole_parameters(module: nn.Module) -> list[str]:
    """The parameters that are whole on this rank now."""
    return [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]


def whole_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name, all shards of each together."""
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def padded(module: nn.Module, ranks: int) -> int:
    """Bytes of the parameters when each is padded to equal shards on dimension 0."""
    return sum(-(-len(p) // ranks) * ranks * p.nbytes // len(p) for p in module.parameters())


def all_sharded(note: Note, model: nn.Module, ledger: Any) -> bool:
    """Whether no parameter is whole on every rank."""
    plain = whole_parameters(model)
    if len(plain) == len(list(model.parameters())) and not note.talks(ledger, dist.get_world_size()):
        return False
    return note.holds(not plain, "no-root", f"{', '.join(plain[:3])}: whole on every rank.")


def same_gradients(note: Note, got: dict, right: dict[str, Tensor], hint: str = "value") -> bool:
    """Compare gradients; those that are nearly right have passed through another dtype."""
    near = all(isinstance(got[k], Tensor) and (got[k] - g).norm() < 0.1 * g.norm() for k, g in right.items())
    return note.equal(got, right, "the gradient", "float32" if near and hint == "value" else hint)


# --- exercise 1: units and peak

HIDDEN, RATE = 32, 1e-2
ALLOWED = 8  # blocks that the peak of a step may add to the model states


@cache
def wrapped_in_one_process(n: int, layers: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients of the first of two steps, and the losses of all ranks in both."""
    model, words = gpt(layers, HIDDEN), [w[:, :1, :5] for w in tokens(n, 2)]
    optimizer, gradients = torch.optim.Adam(model.parameters(), RATE), mean_gradients(model, [w[0] for w in words])
    losses = [torch.stack([loss_of(model, w[0]) for w in words]).detach()]
    optimizer.step()
    return gradients, [*losses, torch.stack([loss_of(model, w[1]) for w in words]).detach()]


@exercise("Exercise 1", cases=[(2, "10 blocks", 10), (3, "8 blocks", 8)], tolerance=1e-9, timeout=4 * TIMEOUT,
          passed="{said}.")
def wrap_under_target(note, answer, layers):
    """Few all-gathers and a low peak; says what was measured."""
    rank, n, model = dist.get_rank(), dist.get_world_size(), gpt(layers, HIDDEN)
    right, losses = wrapped_in_one_process(n, layers)
    states = 4 * padded(model, n) / n
    limit, most = states + ALLOWED * sum(p.nbytes for p in model.blocks[0].parameters()), layers + 1
    with record() as ledger:
        optimizer = answer(model, RATE)
    made = isinstance(optimizer, torch.optim.Optimizer)
    if not note.holds(made, "no-optimizer", f"the function returned {show(optimizer)}."):
        return None
    if not all_sharded(note, model, ledger):
        return None
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    note.holds(all(id(p) in stepped for p in model.parameters()), "no-optimizer",
               "some parameters are not in the optimizer.")
    for step, batch in enumerate(tokens(n, 2)[rank][:, :1, :5]):
        optimizer.zero_grad()
        with record() as ledger, track(model, optimizer) if step else nullcontext() as tracker:
            loss = loss_of(model, batch)
            forward, kept = len(ledger), whole_parameters(model)
            loss.backward()
            optimizer.step()
        if step == 0:
            same_gradients(note, whole_gradients(model), right)
        note.equal(loss.detach(), losses[step][rank], f"the loss of step {step + 1}")
    gathers, backward = (sum(e.op == "all_gather" for e in part) for part in (ledger, ledger[forward:]))
    peak = tracker.peak.total
    what = f"a step has {gathers} all-gathers of {most} allowed; the peak is {peak / 1e6:.2f} MB of "
    what += f"{limit / 1e6:.2f} MB allowed."
    note.holds(gathers > 1 or peak <= limit, "only-root", what)
    note.holds(backward > 0 or not any(name.startswith("blocks.") for name in kept), "kept", what)
    note.holds(gathers != most + 1 or bool(kept), "root-again", what)
    note.holds(gathers <= most, "too-many-gathers", what)
    note.holds(peak <= limit, "too-large", what)
    return f"{gathers} all-gathers a step for {layers} blocks, peak {peak / 1e6:.1f} MB of {limit / 1e6:.1f} MB allowed"


MISTAKES["wrap_under_target"] = {
    "no-root": (NO_ROOT, ["fully_shard(model)  ->  pass",
             {"fully_shard(blocks[i : i + 2])": "pass", "fully_shard(model)": "dist.all_reduce(torch.zeros(1))"}]),
    "no-optimizer": ("""Return an Adam optimizer that holds the parameters of the sharded model. fully_shard replaces
        them by DTensors, and an optimizer made before that never updates these.""",
            ["return torch.optim.Adam(model.parameters(), learning_rate)  ->  return model",
             {"return torch.optim.Adam(model.parameters(), learning_rate)": "return optimizer",
              "blocks = list": "optimizer = torch.optim.Adam(model.parameters(), learning_rate)\n"
              "blocks = list"}]),
    "only-root": ("""One unit holds the whole model: it is gathered before the first layer and stays until backward
        ends. Shard parts of the model first, then the model.""", "fully_shard(blocks[i : i + 2])  ->  pass"),
    "too-many-gathers": ("There are so many units that too many messages travel, and each of them pays its latency.",
            "fully_shard(blocks[i : i + 2])  ->  for block in blocks[i : i + 2]:\n    fully_shard(block)"),
    "root-again": ("""What stands outside the blocks is gathered twice in a step: before forward, and again before
        backward. The root of the model, as fully_shard leaves it by default, is gathered once.""",
            "fully_shard(model)  ->  fully_shard(model, reshard_after_forward=True)"),
    "too-large": ("""Too much is whole at once. While backward computes one unit, the next is already gathered, so two
        are there at a time; and what is in no unit of its own belongs to the root, which stays from forward to
        backward.""", {"len(blocks), 2)": "len(blocks), 4)", "i + 2": "i + 4"}),
    "kept": ("""Blocks are still whole after forward. With reshard_after_forward=False there are fewer messages, but at
        the end of forward all units are in memory.""",
            "fully_shard(blocks[i : i + 2])  ->  for block in blocks[i : i + 2]:\n"
            "    fully_shard(block, reshard_after_forward=False)"),
}
RIGHT["wrap_under_target"] = {
    "pairs from the end": "in range(0, len(blocks), 2)  ->  in reversed(range(0, len(blocks), 2))",
    "AdamW without decay": "Adam(model.parameters(), learning_rate)  ->  "
                           "AdamW([*model.parameters()], learning_rate, weight_decay=0, foreach=False)",
}


# --- exercise 2: a two-level cluster


@exercise("Exercise 2", cases=[(6, "3 nodes of 2", 3, 2), (6, "2 nodes of 3", 2, 3)], tolerance=1e-9,
          passed=": 128,256 bytes cross 3 nodes of 2; sharded over all 6 ranks, 238,560 would.")
def fewest_internode_bytes(note, answer, nodes, per_node):
    rank, n, model = dist.get_rank(), dist.get_world_size(), gpt(2, 12)
    words = [w[0] for w in tokens(n, 1)]
    share, right = padded(model, per_node) // per_node, mean_gradients(gpt(2, 12), words)
    with record() as ledger:
        answer(model, nodes, per_node)
    if not all_sharded(note, model, ledger):
        return
    held = sum(p.to_local().nbytes for p in model.parameters())
    with record() as ledger:
        loss_of(model, words[rank]).backward()
    node = tuple(range(rank // per_node * per_node, (rank // per_node + 1) * per_node))
    for group in sorted({e.ranks for e in ledger if e.op in ("all_gather", "reduce_scatter")}):
        what = f"the shards are gathered by ranks {group}; the node has ranks {node}."
        note.holds(group == node, wrong_group(group, nodes, per_node), what)
    note.holds(held <= share, "replicas", f"{held} bytes of parameters are held; the node's share is {share}.")
    crossing = [e for e in ledger if crosses(e, rank, per_node)]
    same_gradients(note, whole_gradients(model), right, "value" if sent(crossing) else "nodes-apart")
    least, most = (2 * (nodes - 1) / nodes * size for size in (held, share))
    note.sent(crossing, sent=(least, most), not_distributed="too-few-bytes")


def wrong_group(group: tuple[int, ...], nodes: int, per_node: int) -> str:
    """The hint for ranks that share one copy of the parameters and are not one node."""
    if len(group) == nodes * per_node:
        return "full-shard"
    one_of_each_node = len(group) == len({r // per_node for r in group}) == nodes
    if len(group) == nodes != per_node and not one_of_each_node:
        return "swapped"
    return "replicas" if len(group) < per_node and not one_of_each_node else "transposed"


MISTAKES["fewest_internode_bytes"] = {
    "no-root": (NO_ROOT, "fully_shard(model, mesh=mesh)  ->  pass"),
    "full-shard": ("""All ranks form one shard group, so its all-gathers cross the nodes. Every fully_shard, the model's
        too, has to know which ranks form a node.""", "fully_shard(model, mesh=mesh)  ->  fully_shard(model)"),
    "transposed": ("""A shard group has ranks of different nodes, so the all-gathers, which are most of the traffic,
        cross the nodes. The first dimension of the mesh replicates, the second one shards; node 0 has the first ranks,
        node 1 the next ones.""",
            [{'"cpu", (nodes, per_node)': f'"cpu", torch.arange(nodes * per_node).view({shape}).T.contiguous()',
              "init_device_mesh": "dist.device_mesh.DeviceMesh"} for shape in ("nodes, per_node", "per_node, nodes")]),
    "swapped": ("""The shard groups have as many ranks as there are nodes. The mesh needs one row for each node, and one
        column for each rank of a node.""", ["(nodes, per_node), mesh  ->  (per_node, nodes), mesh",
             "(nodes, per_node), mesh  ->  sorted((nodes, per_node), reverse=nodes < per_node), mesh"]),
    "replicas": ("A rank holds more than its share of the parameters. Inside a node each rank holds one piece.",
            "(nodes, per_node), mesh  ->  (nodes * per_node, 1), mesh"),
    "nodes-apart": ("Each node trains alone: nothing travels between them, and their gradients differ.",
            'mesh_dim_names=names)  ->  mesh_dim_names=names)["shard"]'),
}
RIGHT["fewest_internode_bytes"] = {
    "the blocks in one unit": {
        "for block in model.blocks:": "if True:", "fully_shard(block,": "fully_shard(list(model.blocks),",
    },
    "own all-reduces between the nodes": {
        "fully_shard(block, mesh=mesh)": 'fully_shard(block, mesh=mesh["shard"])',
        "fully_shard(model, mesh=mesh)": """fully_shard(model, mesh=mesh["shard"])
for p in model.parameters():
    p.register_post_accumulate_grad_hook(
        lambda p: dist.all_reduce(p.grad.to_local().div_(nodes), group=mesh.get_group("replicate")))""",
    },
}

# --- exercise 3: resharding

CHECKPOINTS = (
    (12, 4, 2), (12, 2, 4), (12, 3, 3), (10, 4, 3), (10, 3, 4), (13, 5, 2), (5, 4, 2), (9, 4, 4), (7, 3, 1),
    (7, 1, 3), (5, 2, 4), (2, 3, 5),
)
KINDS = ((3, torch.bfloat16), (1, torch.float64), (4, torch.int64), (2, torch.float32))  # columns and dtype, in turn


def shards_of(whole: Tensor, ranks: int) -> list[Tensor]:
    """The rows of each rank: those of torch.chunk, then empty ones."""
    chunks = list(whole.chunk(ranks))
    return chunks + [whole[:0]] * (ranks - len(chunks))


def checkpoint(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose numbers are all different, in no order, and not zero."""
    numbers = 1 + torch.randperm(200, generator=torch.Generator().manual_seed(rows))
    return numbers[: rows * columns].view(rows, columns).to(dtype)


def reader(files: list[Tensor]) -> tuple[Callable, list[tuple[int, int]], list[str]]:
    """``read(file, start, stop)``; the file and the number of rows of each read; the reads of what does not exist."""
    reads, missing = [], []

    def read(file: SupportsIndex, start: SupportsIndex, stop: SupportsIndex) -> Tensor:
        file, start, stop = map(operator.index, (file, start, stop))
        rows = len(files[file]) if 0 <= file < len(files) else -1
        if not 0 <= start <= stop <= rows:
            has = f"it has {rows} rows" if rows >= 0 else f"files are 0 to {len(files) - 1}"
            missing.append(f"read({file}, {start}, {stop}): {has}.")
            return files[0][:0].clone()
        if stop > start:
            reads.append((file, stop - start))
        return files[file][start:stop].clone()

    return read, reads, missing


RESHARDS = [
    Case(0, f"{rows} rows saved by {saved} ranks, loaded by {ranks}, rank {rank}",
         (*KINDS[i % len(KINDS)], rows, saved, rank, ranks), None if rank * -(-rows // ranks) < rows else "no-rows")
    for i, (rows, saved, ranks) in enumerate(CHECKPOINTS) for rank in range(ranks)
]


@exercise("Exercise 3", cases=RESHARDS, explains=["dtype"],
          passed=f"on {len(CHECKPOINTS)} checkpoints: each rank reads its own rows, and each of them once.")
def reshard(note, answer, columns, dtype, rows, saved, rank, ranks):
    whole = checkpoint(rows, columns, dtype)
    files, right = shards_of(whole, saved), shards_of(whole, ranks)[rank]
    read, reads, missing = reader(files)
    got = answer(rows, saved, rank, ranks, read)
    note.holds(not missing, "past-the-end", f"there is nothing at {''.join(missing[:1])}")
    if not note.holds(isinstance(got, Tensor), "odd", f"the function returned {show(got)}."):
        return
    same = got.shape == right.shape and torch.equal(got.to(right.dtype), right)
    what = f"the shard is wrong.\n  expected  {show(right)}\n  got       {show(got)}"
    note.holds(same, "" if same else wrong_rows(got, right), what, ("the shard", got))
    note.holds(got.dtype == right.dtype, "dtype", f"the dtype is {got.dtype}, in the files {right.dtype}.")
    count, read_from = sum(size for _, size in reads), [file for file, _ in reads]
    note.holds(count <= len(right), "more-rows", f"{count} rows are read; {len(right)} are enough.")
    what = f"{len(reads)} reads of {len(set(read_from))} files."
    note.holds(len(reads) == len(set(read_from)), "more-rows", what)


def wrong_rows(got: Tensor, right: Tensor) -> str:
    """What can be said of the order of these rows, or of their number."""
    if got.dim() != 2 or got.shape[1] != right.shape[1]:
        return "shape"
    found, wanted = ([tuple(row) for row in t.tolist()] for t in (got, right))
    if len(found) < len(wanted) and set(found) <= set(wanted):
        return "dropped"
    return "wrong-rows" if len(found) == len(wanted) else "shape"


MISTAKES["reshard"] = {
    "dropped": ("""Rows are missing. Are they in another file? And if the number of ranks does not divide the rows, the
        shards differ: each has ceil(rows / ranks) rows, the last ones fewer or none.""",
            ["-(-rows // ranks)  ->  rows // ranks", "in range(saved)  ->  in range(rows // old)"]),
    "balanced": ("""These parts are as equal as possible. FSDP2 divides like torch.chunk: ceil(rows / ranks) rows each,
        as long as there are some.""",
            "begin, end = min(rank * new, rows), min((rank + 1) * new, rows)  ->  small, more = divmod(rows, ranks)\n"
            "begin = rank * small + min(rank, more)\n"
            "end = begin + small + (rank < more)"),
    "padding": ("""The shard has rows that the tensor does not have. FSDP2 pads shards when it sends them; a shard
        itself is not padded.""",
            "return torch.cat(pieces)  ->  "
            "return torch.nn.functional.pad(torch.cat(pieces), (0, 0, 0, new - (end - begin)))"),
    "whole": ("This is the whole tensor. It may not fit into the memory of one rank: return this rank's rows.",
            "begin, end = min(rank * new, rows), min((rank + 1) * new, rows)  ->  begin, end = 0, rows"),
    "no-rows": ("""This is right until a rank has no rows. Its shard is then an empty tensor with the columns and the
        dtype of the files, whatever these are.""", ["[read(0, 0, 0)]  ->  []",
             "return torch.cat(pieces)  ->  "
             "return torch.cat(pieces) if begin < end else torch.empty(0, 3, dtype=torch.bfloat16)"]),
    "wrong-rows": ("""There are as many rows as there should be, but from the wrong places or in another order. Shards
        of N ranks begin at multiples of ceil(rows / N), in the files too; start and stop count inside the file.""",
            ["in range(saved)  ->  in reversed(range(saved))",
             "return torch.cat(pieces)  ->  return read(rank, 0, min((rank + 1) * old, rows) - rank * old)",
             "-(-rows // saved)  ->  rows // saved"]),
    "past-the-end": ("""The file does not have these rows, does not exist, or is read from a start behind its stop. The
        last files are shorter or empty, and start and stop count inside the file.""",
            "read(file, start - file * old, stop - file * old)  ->  read(file, start, stop)"),
    "more-rows": ("""This rank reads rows that it does not need, or takes several reads for what one read of the file
        can bring.""",
            ["pieces.append(read(file, start - file * old, stop - file * old))  ->  "
            "pieces += [read(file, row - file * old, row - file * old + 1) for row in range(start, stop)]",
             "read(file, start - file * old, stop - file * old)  ->  "
             "read(file, 0, min(rows - file * old, old))[start - file * old : stop - file * old]"]),
}


def rows_grouped_by_file(rows, saved, rank, ranks, read):
    chunks, size = torch.arange(rows).chunk(ranks), -(-rows // saved)
    own = chunks[rank].tolist() if rank < len(chunks) else []
    groups = [(file, list(group)) for file, group in groupby(own, key=lambda row: row // size)]
    pieces = [read(file, group[0] % size, group[-1] % size + 1) for file, group in groups]
    return torch.cat(pieces) if pieces else read(0, 0, 0)


RIGHT["reshard"] = {
    "rows grouped by file": rows_grouped_by_file,
    "into a tensor made before": {
        "pieces = [read(0, 0, 0)]": "like = read(0, 0, 0)\nout = like.new_empty(end - begin, like.shape[1])",
        "pieces.append(read(file, start - file * old, stop - file * old))":
            "out[start - begin : stop - begin] = read(*torch.tensor([file, start - file * old, stop - file * old]))",
        "return torch.cat(pieces)": "return out",
    },
}

# --- exercise 4: clipping

SHAPES, COPIES = [(5, 3), (7,), (1, 4), (4, 2)], [(3,), (2, 2)]
CLIP_CASES = [  # sharded, replicated, size of the elements, max_norm
    (2, "a norm above max_norm", SHAPES, COPIES, 2.0, 1.0),
    (2, "a norm below max_norm", SHAPES, COPIES, 0.05, 1.0),
    Case(2, "all gradients zero", (SHAPES, COPIES, 0.0, 1.0), "zero", "ZeroDivisionError"),
    (2, "a rank without rows", [(1, 3), (1, 4)], COPIES, 3.0, 0.5),
    (3, "nothing replicated", SHAPES, [], 3.0, 0.5),
    (1, "a norm above max_norm", SHAPES, COPIES, 2.0, 1.0),
]


def gradient_set(seed: int, shapes: Sequence[tuple[int, ...]], size: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@exercise("Exercise 4", cases=CLIP_CASES, tolerance=1e-10,
          passed="one number travels, and every gradient gets the coefficient of one process.")
def clip_sharded(note, answer, shapes, copies, size, max_norm):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole, replicated = gradient_set(n, shapes, size), gradient_set(n + 10, copies, size)
    right = torch.cat([g.flatten() for g in (*whole, *replicated)]).norm()
    sharded = [shards_of(g, n)[rank].clone() for g in whole]
    scaled = [g * min(1.0, max_norm / (right.item() + 1e-6)) for g in (*sharded, *replicated)]
    with record() as ledger:
        got = answer(list(sharded), list(replicated), max_norm)
    note.talks(ledger, n)
    norm = number(got.reshape(()) if isinstance(got, Tensor) and got.numel() == 1 else got)
    if not note.holds(norm is not None, "odd", f"the function returned {show(got)}."):
        return
    note.equal(torch.tensor(norm, dtype=torch.float64), right, "the norm")
    found = [*sharded, *replicated]
    note.holds(not any(bool(g.isnan().any()) for g in found), "zero", "some gradients are nan.")
    note.tolerance = 1e-5  # the small number beside the norm is free
    note.equal(dict(enumerate(found)), dict(enumerate(scaled)), "tensor")
    if n > 1:
        keys = {"object": "gathered", "too_large": "gathered", "too_many_calls": "gathered"}
        note.sent(ledger, calls=1, largest=8 * n, **keys)


MISTAKES["clip_sharded"] = {
    "local": ("""This is the norm of what this rank holds, so each rank would scale by a different coefficient. The
        squares of all ranks have to be added.""", ["dist.all_reduce(squares)  ->  dist.all_reduce(squares.clone())",
             {"dist.all_reduce(squares)": "dist.all_reduce(squares.clone())",
              "squares += sum(g.square().sum() for g in replicated)": "pass"}]),
    "sum-of-norms": ("""Norms do not add up, their squares do: those of all elements on all ranks, without a mean. The
        norm is the root of that sum.""",
            [{"dist.all_reduce(squares)": "squares = squares.sqrt()\ndist.all_reduce(squares)",
              "squares += sum(g.square().sum() for g in replicated)":
                  "squares += sum(g.square().sum() for g in replicated) ** 0.5",
              "norm = squares.sqrt()": "norm = squares"},
             {"sum(g.square().sum() for g in sharded)": "sum(g.norm() for g in sharded)",
              "squares += sum(g.square().sum() for g in replicated)": "squares += sum(g.norm() for g in replicated)",
              "norm = squares.sqrt()": "norm = squares"}, "norm = squares.sqrt()  ->  norm = squares",
             "dist.all_reduce(squares)  ->  dist.all_reduce(squares, op=dist.ReduceOp.AVG)"]),
    "replicated-twice": ("A gradient that every rank holds belongs into the norm, and once only.",
            [{"for g in sharded)": "for g in [*sharded, *replicated])",
             "squares += sum(g.square().sum() for g in replicated)": "pass"},
             "squares += sum(g.square().sum() for g in replicated)  ->  pass"]),
    "not-scaled": ("""The norm is right, but gradients are as they were before. Scale all tensors that you were given in
        place, the replicated ones too.""", ["gradient.mul_(coefficient)  ->  gradient = gradient * coefficient",
             "in (*sharded, *replicated):  ->  in sharded:"]),
    "scaled-up": ("""The norm is below max_norm, and the gradients were made larger. Clipping never does: the
        coefficient is at most 1.""", "min(1.0, max_norm / (norm.item() + 1e-6))  ->  max_norm / (norm.item() + 1e-6)"),
    "each-tensor": ("""Each gradient is clipped by its own norm, which changes the direction of the step. There is one
        coefficient for all.""",
            "gradient.mul_(coefficient)  ->  gradient.mul_(min(1.0, max_norm / (gradient.norm().item() + 1e-6)))"),
    "zero": ("""Where all gradients are zero, so is their norm, and the coefficient divides by it. Add a small number to
        the norm before you divide; PyTorch takes 1e-6.""",
            ["min(1.0, max_norm / (norm.item() + 1e-6))  ->  (max_norm / norm).clamp(max=1) if norm else norm / norm",
             "norm.item() + 1e-6  ->  norm.item()"]),
    "gathered": ("Each rank can add up its own squares, so one number from each, in one message, is enough.",
            ["dist.all_reduce(squares)  ->  everyone = [None] * dist.get_world_size()\n"
            "dist.all_gather_object(everyone, sharded)\n"
            "squares = sum(g.square().sum() for pieces in everyone for g in pieces)",
             "dist.all_reduce(squares)  ->  dist.reduce(squares, 0)\ndist.broadcast(squares, 0)"]),
}
RIGHT["clip_sharded"] = {
    "one number of each rank gathered, a float": {
        "dist.all_reduce(squares)": "everyone = [torch.empty_like(squares) for _ in range(dist.get_world_size())]\n"
                                    "dist.all_gather(everyone, squares)\nsquares = sum(everyone)",
        "return norm": "return norm.item()",
    },
    "rank 0 brings the replicated ones": {
        "for g in sharded)": "for g in [*sharded, *(replicated if dist.get_rank() == 0 else [])])",
        "squares += sum(g.square().sum() for g in replicated)": "pass",
    },
}

# --- on paper

MISTAKES["fsdp_traffic"] = {
    "root-twice": ("The root unit is not freed after forward, because backward begins with it. It is gathered once.",
            [{"(2 * layers + 1)": "2 * (layers + 1)", "(2 * layers * block": "2 * (layers * block"},
             "(2 * layers * block  ->  2 * (layers * block"]),
    "forward-only": ("A block is freed after its forward, so backward has to gather it a second time.",
            {"(2 * layers + 1)": "(layers + 1)", "(2 * layers * block": "(layers * block"}),
    "no-root": ("What stands outside the blocks, embedding and head, is a unit as well: the root.",
            {"2 * layers + 1)": "2 * layers)",
             "2 * layers * block + around": "2 * layers * block",
             "return gathers, layers + 1": "return gathers, layers",
             "(layers * block + around": "(layers * block"}),
    "per-micro-batch": ("With accumulation the gradients are reduced once, with the last micro-batch.",
            {"return gathers, layers + 1": "return gathers, micro_batches * (layers + 1)",
             "reduced = (": "reduced = micro_batches * ("}),
    "gathered-once": ("Blocks are freed after each forward and each backward, so every micro-batch gathers them anew.",
            {"gathers = micro_batches * ": "gathers = ", "gathered = micro_batches * ": "gathered = "}),
    "all-reduce": ("A reduce-scatter sends half of what an all-reduce does: (N-1)/N of the gradients.",
            "reduced = (  ->  reduced = 2 * ("),
    "share": ("A rank already has its own share, so (N-1)/N of a unit travels.", ["(ranks - 1) / ranks  ->  1",
             "(ranks - 1) / ranks  ->  1 / ranks"]),
    "one-dtype": ("""Multiply elements by the bytes of each: parameters travel in one precision, gradients in another.
        And the docstring asks for GB: 10⁹ bytes.""", ["around) * gradient_bytes  ->  around) * parameter_bytes",
             "around) * parameter_bytes  ->  around) * gradient_bytes",
             {") * parameter_bytes": ")", ") * gradient_bytes": ")"}, "/ 1e9  ->  "]),
}


def counted_unit_by_unit(layers, block, around, ranks, parameter_bytes, gradient_bytes, micro_batches):
    gathers, reduces, size = 0, 0, 0
    for micro_batch in range(micro_batches):
        for unit in [around, *[block] * layers]:
            times = 1 if unit == around else 2
            gathers, size = gathers + times, size + times * unit * parameter_bytes
            if micro_batch == 0:
                reduces, size = reduces + 1, size + unit * gradient_bytes
    return gathers, reduces, size * (1 - 1 / ranks) / 1e9


RIGHT["fsdp_traffic"] = {
    "an array": {"return gathers, ": "return torch.tensor([gathers, ", "/ 1e9": "/ 1e9], dtype=torch.float64)"},
    "counted unit by unit": counted_unit_by_unit,
}

fsdp_traffic = paper(
    "Exercise 5", answers.fsdp_traffic, MISTAKES["fsdp_traffic"], cases=[
        (32, 201_379_840, 214_249_472, 64, 2, 4, 1), (12, 7_087_872, 39_385_344, 8, 4, 4, 2),
        (32, 201_379_840, 214_249_472, 64, 2, 4, 4), (5, 1e6, 3e6, 2, 2, 2, 3),
    ],
    units=["all-gathers", "reduce-scatters", "GB"], tolerance=1e-3,
)
