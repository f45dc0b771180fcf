"""Checks of the exercises on FSDP2.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Models are in float64, so that the ranks can be compared with one
process to 1e-12.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from course_utils.check import (
    TIMEOUT,
    Exercise,
    Outcome,
    checked,
    crosses,
    load_hints,
    number,
    paper_problem,
    sent,
    show,
)
from course_utils.check.training import difference, exact

__all__ = ["HINTS", "clip_sharded", "fewest_internode_bytes", "fsdp_traffic", "reshard", "wrap_under_target"]

HINTS = load_hints(__file__)

# ------------------------------------------------------------------------------------------------ models and numbers


def _is_sharded(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _unsharded(module: nn.Module) -> list[str]:
    """The parameters that are whole on this rank now."""
    return [name for name, p in module.named_parameters() if not _is_sharded(p)]


def _whole_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name, all shards of each together."""
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {name: g.full_tensor() if _is_sharded(g) else g for name, g in gradients.items()}


def _gpt(layers: int, hidden: int = 12) -> nn.Module:
    from course_utils.models import TransformerConfig, build_gpt

    config = TransformerConfig(layers=layers, heads=2, hidden=hidden, context=8, vocabulary=10)
    return build_gpt(config, seed=layers, dtype=torch.float64)


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
    from course_utils.memory import track

    model = _gpt(layers, HIDDEN)
    optimizer = fn(model, RATE)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {"optimizer": show(optimizer)}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    plain = _unsharded(model)
    if plain:
        return {"optimizer": None, "plain": plain, "sharded": len(plain) < len(list(model.parameters()))}
    out = {
        "optimizer": None, "plain": [], "stepped": all(id(p) in stepped for p in model.parameters()), "losses": [],
    }
    for step, batch in enumerate(words):
        optimizer.zero_grad()
        with record() as ledger, track(model, optimizer) if step else nullcontext() as tracker:
            loss = _loss(model, batch)
            forward = len(ledger)
            kept = _unsharded(model)
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
        words = [w[:, :1, :5] for w in _tokens(n, 2)]
        outcomes = exercise.run(_wrapped_steps, words, fn, layers, case=f"{layers} blocks")
        model = _gpt(layers, HIDDEN)
        gradients = _mean_gradients(model, [w[0] for w in words])
        losses = [_loss(model, w[0]).item() for w in words]
        torch.optim.Adam(model.parameters(), RATE).step()
        after = [_loss(model, w[1]).item() for w in words]
        for rank, outcome in exercise.each(outcomes):
            got = outcome.result
            exercise.require(not got["optimizer"], "no-optimizer", f"the function returned {got['optimizer']}.")
            if not (got["plain"] and got["sharded"]):
                exercise.communicates(rank, outcome, n)
            _all_sharded(exercise, got["plain"])
            exercise.require(got["stepped"], "optimizer-before", "some parameters are not in the optimizer.")
            _same_step(exercise, got, gradients, (losses[rank], after[rank]))
        said.append(_audit_units(exercise, outcomes, layers, n))
    exercise.passed(f"{said[0]}.")


def _all_sharded(exercise: Exercise, plain: list[str]) -> None:
    exercise.require(not plain, "no-root", f"{', '.join(plain[:3])}: whole on every rank.")


def _same_step(exercise: Exercise, got: dict, gradients: dict, losses: tuple[float, float]) -> None:
    """Compare gradients of the first step, and the losses of both, with those of one process."""
    for name, right in gradients.items():
        if not exact(got["gradients"][name], right):
            near = (got["gradients"][name] - right).norm() < 0.1 * right.norm()
            what = f"the gradient of {name} is wrong.{difference(got['gradients'][name], right)}"
            exercise.refuse("precision" if near else "value", what)
    for step, (loss, right) in enumerate(zip(got["losses"], losses, strict=True)):
        what = f"the loss of step {step + 1} is {loss:.9g}, in one process {right:.9g}."
        exercise.require(math.isclose(loss, right, rel_tol=1e-9), "value", what)


def _audit_units(exercise: Exercise, outcomes: list[Outcome], layers: int, n: int) -> str:
    """Refuse units that are too many, too large or never freed; says what was measured."""
    model = _gpt(layers, HIDDEN)
    states = 4 * _padded(list(model.parameters()), n) / n
    limit = states + ALLOWED * sum(p.nbytes for p in model.blocks[0].parameters())
    most = layers + 1
    for _, outcome in exercise.each(outcomes):
        forward, backward = outcome.result["gathers"]
        gathers, peak = forward + backward, outcome.result["peak"].total
        blocks_kept = any(name.startswith("blocks.") for name in outcome.result["kept"])
        what = f"a step has {gathers} all-gathers of {most} allowed; the peak is {peak / 1e6:.2f} MB of "
        what += f"{limit / 1e6:.2f} MB allowed."
        exercise.require(gathers > 1 or peak <= limit, "only-root", what)
        exercise.require(backward > 0 or not blocks_kept, "kept", what)
        exercise.require(gathers != most + 1 or outcome.result["kept"], "root-again", what)
        exercise.require(gathers <= most, "too-many-gathers", what)
        exercise.require(peak <= limit, "too-large", what)
    return f"{gathers} all-gathers a step for {layers} blocks, peak {peak / 1e6:.1f} MB of {limit / 1e6:.1f} MB allowed"


# ------------------------------------------------------------------------------------------------ two-level cluster


def _hybrid_step(words: Tensor, fn: Callable, nodes: int, per_node: int) -> dict:
    from course_utils import record

    model = _gpt(2)
    fn(model, nodes, per_node)
    plain = _unsharded(model)
    held = sum(p.nbytes if name in plain else p.to_local().nbytes for name, p in model.named_parameters())
    with record() as ledger:
        _loss(model, words[0]).backward()
    return {"ledger": ledger, "held": held, "plain": plain, "gradients": _whole_gradients(model)}


def _shard_group(exercise: Exercise, group: tuple[int, ...], nodes: int, per_node: int) -> None:
    """Refuse a group of ranks that share one copy of the parameters, unless it is the rank's node."""
    first = exercise.rank // per_node * per_node
    node = tuple(range(first, first + per_node))
    if group == node:
        return
    touched = [r // per_node for r in group]
    one_of_each = len(set(touched)) == len(touched) == nodes
    if len(group) == nodes * per_node:
        key = "full-shard"
    elif one_of_each:
        key = "transposed"
    elif len(group) == nodes != per_node:
        key = "swapped"
    else:
        key = "replicas" if len(group) < per_node else "wrong-ranks"
    exercise.refuse(key, f"the shards are gathered by ranks {group}; the node has ranks {node}.")


@checked
def fewest_internode_bytes(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(model, nodes, per_node)``: shards inside a node, the fewest bytes between nodes."""
    exercise = Exercise("Exercise 2", HINTS["fewest_internode_bytes"], timeout)
    said = []
    for nodes, per_node in ((3, 2), (2, 3)):
        n, model = nodes * per_node, _gpt(2)
        words = _tokens(n, 1)
        outcomes = exercise.run(_hybrid_step, words, fn, nodes, per_node, case=f"{nodes} nodes of {per_node}")
        share = _padded(list(model.parameters()), per_node) // per_node
        for rank, outcome in exercise.each(outcomes):
            exercise.communicates(rank, outcome, n)
            got = outcome.result
            _all_sharded(exercise, got["plain"])
            for group in sorted({e.ranks for e in got["ledger"] if e.op in ("all_gather", "reduce_scatter")}):
                _shard_group(exercise, group, nodes, per_node)
            what = f"{got['held']} bytes of parameters are held; the node's share is {share}."
            exercise.require(got["held"] <= share, "replicas", what)
        said.append(_audit_nodes(exercise, outcomes, _mean_gradients(model, [w[0] for w in words]), share, per_node))
        blocks, whole = (_padded(list(module.parameters()), n) for module in (model.blocks, model))
        said.append(nodes * (n - 1) / n * (2 * whole + blocks))  # over all ranks: only blocks are gathered twice
    few, all_ranks, *_ = said
    print(f"Exercise 2 passed: {few:,.0f} bytes cross 3 nodes of 2; sharded over all 6 ranks, {all_ranks:,.0f} would.")


def _audit_nodes(
    exercise: Exercise, outcomes: list[Outcome], right: dict[str, Tensor], share: int, per_node: int
) -> float:
    """Refuse wrong gradients, and more than one all-reduce of each shard between nodes; the bytes that cross them."""
    crossing = [[e for e in out.result["ledger"] if crosses(e, rank, per_node)] for rank, out in enumerate(outcomes)]
    total, nodes = sum(map(sent, crossing)), len(outcomes) // per_node
    factor = 2 * (nodes - 1) / nodes
    for rank, outcome in exercise.each(outcomes):
        wrong = next((name for name, g in right.items() if not exact(outcome.result["gradients"][name], g)), None)
        if wrong:
            less = total < 0.99 * factor * share * len(outcomes)
            key = "nodes-apart" if total == 0 else "precision" if less else "value"
            got = outcome.result["gradients"][wrong]
            exercise.refuse(key, f"the gradient of {wrong} is wrong.{difference(got, right[wrong])}")
        limits = (factor * outcome.result["held"], factor * share)
        exercise.audit(
            crossing[rank], sent=limits, where="between the nodes ", keys={"not-distributed": "too-few-bytes"}
        )
    return total


# ------------------------------------------------------------------------------------------------ resharding


def _shards(whole: Tensor, ranks: int) -> list[Tensor]:
    """The rows of each rank: those of torch.chunk, then empty ones."""
    chunks = list(whole.chunk(ranks))
    return chunks + [whole[:0]] * (ranks - len(chunks))


def _reader(files: list[Tensor]) -> tuple[Callable, list[tuple[int, int]], list[str]]:
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


_CHECKPOINTS = (
    (12, 4, 2), (12, 2, 4), (12, 3, 3), (10, 4, 3), (10, 3, 4), (13, 5, 2), (5, 4, 2), (9, 4, 4), (7, 3, 1),
    (7, 1, 3), (5, 2, 4), (2, 3, 5),
)
_KINDS = ((3, torch.bfloat16), (1, torch.float64), (4, torch.int64), (2, torch.float32))  # columns and dtype, in turn


def _checkpoint(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose numbers are all different, in no order, and not zero."""
    numbers = 1 + torch.randperm(200, generator=torch.Generator().manual_seed(rows))
    return numbers[: rows * columns].view(rows, columns).to(dtype)


@checked
def reshard(fn: Callable) -> None:
    """Check ``fn(rows, saved, rank, ranks, read) -> rows of this rank``, read from the fewest bytes."""
    exercise = Exercise("Exercise 3", HINTS["reshard"])
    for i, (rows, saved, ranks) in enumerate(_CHECKPOINTS):
        whole = _checkpoint(rows, *_KINDS[i % len(_KINDS)])
        exercise.case = f"{rows} rows saved by {saved} ranks, loaded by {ranks}"
        for rank, right in exercise.each(_shards(whole, ranks)):
            exercise.fallback = "no-rows" if not len(right) else None
            read, reads, missing = _reader(_shards(whole, saved))
            got = exercise.call(fn, rows, saved, rank, ranks, read)
            exercise.require(not missing, "past-the-end", f"there is nothing at {''.join(missing[:1])}")
            exercise.require(isinstance(got, Tensor), "tensor", f"the function returned {show(got)}.")
            if got.shape != right.shape or not torch.equal(got.to(right.dtype), right):
                _refuse_shard(exercise, got, right, whole, saved, ranks)
            key = exercise.fallback or "dtype"
            exercise.require(got.dtype == right.dtype, key, f"the dtype is {got.dtype}, in the files {right.dtype}.")
            _audit_reads(exercise, reads, len(right), rows)
    print(f"Exercise 3 passed on {len(_CHECKPOINTS)} checkpoints: each rank reads its own rows, and each of them once.")


def _refuse_shard(exercise: Exercise, got: Tensor, right: Tensor, whole: Tensor, saved: int, ranks: int) -> None:
    """Refuse wrong rows with the hint of the division, or the order, that gives them."""
    what = f"the shard is wrong.\n  expected  {show(right)}\n  got       {show(got)}"
    exercise.require(got.dim() == 2 and got.shape[1] == whole.shape[1], "shape", what)
    rank, (floor, rest), width = exercise.rank, divmod(len(whole), ranks), -(-len(whole) // ranks)
    own = _shards(whole, saved)[rank] if rank < saved else whole[:0]
    found, wanted, known, own, even = (
        [tuple(row) for row in t.tolist()] for t in (got, right, whole, own, whole.tensor_split(ranks)[rank])
    )
    causes = (
        ("order", sorted(found) == sorted(wanted)),
        ("padding", found == wanted + [(0,) * whole.shape[1]] * (width - len(wanted))),
        ("whole", ranks > 1 and found == known),
        ("dropped", found == known[rank * floor : (rank + 1) * floor]),
        ("own-file", own and found == own),
        ("balanced", rest and found == even),
        ("dropped", len(found) < len(wanted) and set(found) <= set(wanted)),
        ("wrong-rows", len(found) == len(wanted) and set(found) <= set(known)),
    )
    alike = "value" if got.shape == right.shape else "shape"
    exercise.refuse(next((key for key, holds in causes if holds), alike), what)


def _audit_reads(exercise: Exercise, reads: list[tuple[int, int]], needed: int, rows: int) -> None:
    count = sum(size for _, size in reads)
    what = f"{count} rows are read; {needed} are enough."
    exercise.require(count <= needed, "every-file" if count >= rows else "more-rows", what)
    files = [file for file, _ in reads]
    exercise.require(len(files) == len(set(files)), "many-reads", f"{len(files)} reads of {len(set(files))} files.")


# ------------------------------------------------------------------------------------------------ clipping


def _pieces(whole: Sequence[Tensor], ranks: int, rank: int) -> list[Tensor]:
    return [_shards(g, ranks)[rank].clone() for g in whole]


def _gradient_set(seed: int, shapes: Sequence[tuple[int, ...]], size: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _clip(x: Tensor, fn: Callable, sharded: list, replicated: list, max_norm: float) -> dict:
    import torch.distributed as dist

    own = _pieces(sharded, dist.get_world_size(), dist.get_rank())
    copies = [g.clone() for g in replicated]
    sharded.clear()  # the rows of other ranks have to be sent
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
        explained = {"fallback": fallback, "errors": "ZeroDivisionError"}
        outcomes = exercise.run(_clip, inputs, fn, sharded, replicated, max_norm, case=case, **explained)
        for rank, outcome in exercise.each(outcomes):
            exercise.communicates(rank, outcome, n)
            _clipped_norm(exercise, n, outcome.result["norm"], sharded, replicated, max_norm)
            _clipped(exercise, n, outcome.result, sharded, replicated, max_norm)
            exercise.audit(
                outcome.ledger, calls=1, largest=8 * n,
                keys={"too-large": "gathered", "too-many-calls": "too-many-messages"},
            )
    exercise.passed("one number travels, and every gradient gets the coefficient of one process.")


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def _near(got: float, expected: float, tolerance: float = 1e-5) -> bool:
    return math.isclose(got, expected, rel_tol=tolerance, abs_tol=1e-12)


def _clipped_norm(exercise: Exercise, n: int, got: Any, sharded: list, replicated: list, max_norm: float) -> None:
    value = number(got.reshape(()) if isinstance(got, Tensor) and got.numel() == 1 else got)
    exercise.require(value is not None, "tensor", f"the function returned {show(got)}.")
    right = _norm([*sharded, *replicated])
    if _near(value, right, 1e-10):
        return
    by_rank = [_norm([*_pieces(sharded, n, r), *replicated]) for r in range(n)]
    shards = [_norm(_pieces(sharded, n, r)) for r in range(n)]
    pieces = sum(_norm([piece]) for r in range(n) for piece in _pieces(sharded, n, r))
    parts, copies = [_norm([g]) for g in (*sharded, *replicated)], _norm(replicated)
    traps = {
        "float32": [right],
        "no-root": [right**2],
        "replicated-forgotten": [math.hypot(*shards)],
        "norm-after": [min(right, max_norm)],
    }
    if n > 1:
        traps |= {
            "local": [by_rank[exercise.rank], shards[exercise.rank]],
            "replicated-twice": [math.hypot(*by_rank)],
            "mean": [math.hypot(*by_rank) / math.sqrt(n), math.hypot(math.hypot(*shards) / math.sqrt(n), copies)],
            "sum-of-norms": [sum(by_rank), sum(shards), sum(shards) + copies, sum(parts), math.fsum(by_rank) / n,
                             pieces, pieces + copies, pieces + sum(map(_norm, ([g] for g in replicated)))],
        }
    key = next((key for key, some in traps.items() if any(_near(value, wrong) for wrong in some)), "value")
    exercise.refuse(key, f"the norm is wrong.\n  one process  {right:.10g}\n  this rank    {value:.10g}")


def _clipped(exercise: Exercise, n: int, got: dict, sharded: list, replicated: list, max_norm: float) -> None:
    """Compare the gradients with those that one process clips."""
    whole, before = [*sharded, *replicated], [*_pieces(sharded, n, exercise.rank), *replicated]
    found, norm = [*got["sharded"], *got["replicated"]], _norm(whole)
    exercise.require(not any(bool(g.isnan().any()) for g in found), "zero", "some gradients are nan.")

    def coefficient(norm: float) -> float:
        return min(1.0, max_norm / (norm + 1e-6))

    def scaled(i: int, by: float) -> bool:
        right = by * before[i]
        return found[i].shape == right.shape and torch.allclose(found[i], right, rtol=1e-5, atol=1e-12)

    factor = coefficient(norm)
    i = next((i for i in range(len(found)) if not scaled(i, factor)), None)
    if i is None:
        return
    causes = (
        ("replicated-not-scaled", i >= len(sharded) and scaled(i, 1.0)),
        ("not-scaled", scaled(i, 1.0)),
        ("scaled-up", norm < max_norm and scaled(i, max_norm / norm)),
        ("each-tensor", any(scaled(i, coefficient(_norm([g]))) for g in (before[i], *whole))),
    )
    what = f"a gradient is wrong.\n  expected  {show(factor * before[i])}\n  got       {show(found[i])}"
    exercise.refuse(next((key for key, holds in causes if holds), "value"), what)


# ------------------------------------------------------------------------------------------------ paper problem


@paper_problem(
    "Exercise 5",
    cases=[
        (32, 201_379_840, 214_249_472, 64, 2, 4, 1), (12, 7_087_872, 39_385_344, 8, 4, 4, 2),
        (32, 201_379_840, 214_249_472, 64, 2, 4, 4), (5, 1e6, 3e6, 2, 2, 2, 3),
    ],
    slips={
        "root-twice": [
            {"(2 * layers + 1)": "2 * (layers + 1)", "(2 * layers * block": "2 * (layers * block"},
            "(2 * layers * block  ->  2 * (layers * block",
        ],
        "forward-only": {"(2 * layers + 1)": "(layers + 1)", "(2 * layers * block": "(layers * block"},
        "no-root": [
            {
                "2 * layers + 1)": "2 * layers)", "2 * layers * block + around": "2 * layers * block",
                "return gathers, layers + 1": "return gathers, layers", "(layers * block + around": "(layers * block",
            },
            {"return gathers, layers + 1": "return gathers, layers", "(layers * block + around": "(layers * block"},
        ],
        "per-micro-batch": {
            "return gathers, layers + 1": "return gathers, micro_batches * (layers + 1)",
            "reduced = (": "reduced = micro_batches * (",
        },
        "gathered-once": {"gathers = micro_batches * ": "gathers = ", "gathered = micro_batches * ": "gathered = "},
        "all-reduce": "reduced = (  ->  reduced = 2 * (",
        "share": ["(ranks - 1) / ranks  ->  1", "(ranks - 1) / ranks  ->  1 / ranks"],
        "one-dtype": [
            "around) * gradient_bytes  ->  around) * parameter_bytes",
            "around) * parameter_bytes  ->  around) * gradient_bytes",
        ],
        "elements": {") * parameter_bytes": ")", ") * gradient_bytes": ")"},
        "giga": ["/ 1e9  ->  ", "/ 1e9  ->  / 1e6", "/ 1e9  ->  / 2**30"],
    },
    units=["all-gathers", "reduce-scatters", "GB"],
    hints=HINTS["fsdp_traffic"],
    tolerance=1e-3,
)
def fsdp_traffic(layers, block, around, ranks, parameter_bytes, gradient_bytes, micro_batches):
    """Check ``fn(layers, block, around, ranks, parameter, gradient, micro) -> (all-gathers, reduce-scatters, GB)``."""
    gathers = micro_batches * (2 * layers + 1)
    gathered = micro_batches * (2 * layers * block + around) * parameter_bytes
    reduced = (layers * block + around) * gradient_bytes
    return gathers, layers + 1, (ranks - 1) / ranks * (gathered + reduced) / 1e9
