"""Checks of the exercises on ZeRO.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Models are in float64, so that the ranks can be compared with one
process to 1e-12. A model that is ``odd`` has no size that 2 ranks can divide evenly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import TIMEOUT, Exercise, checked, close, paper_problem
from .training import average, compare, difference, exact, gradients_of, trained_parameters, weights_of

__all__ = ["HINTS", "gathered_layer", "largest_model", "reduce_scatter_gradients", "shard_optimizer", "state_bytes"]

_LEFTOVER = {"leftover": "The first step is right and a later one is not. What is kept from one step to the next?"}
_SHARDED = {
    "uneven": "Right until the number of ranks does not divide the number of elements. Round the share up, and fill "
    "the end with zeros: no element may be dropped, and no rank may get another size than the others.",
    "frozen": "The layer is frozen (requires_grad is False): it is neither stepped, nor are its gradients there to be "
    "sent.",
    "tied": "Right until a weight is used in two places. It is one parameter all the same: module.parameters() yields "
    "it once, and autograd adds up its gradients by itself if you let it.",
    "float32": "Right to 7 digits only: somewhere the numbers pass through float32. new_empty, zeros_like and cat keep "
    "the dtype.",
    "too-many-bytes": "The result is right, but more bytes travel than the target says. record() shows each call.",
}

HINTS: dict[str, dict[str, str]] = {
    "state_bytes": {
        "everything": "Stages 1 and 2 do not divide everything: stage 1 the optimizer's part, stage 2 the gradients as "
        "well, and only stage 3 the parameters too.",
        "stage-ignored": "Nothing is divided by the number of ranks. From which stage on is which part?",
        "not-cumulative": "Each stage keeps what the one before it has divided: stage 2 divides the optimizer's part "
        "and the gradients.",
        "stage-order": "The stages take the largest part first: optimizer, then gradients, then parameters.",
        "limits": "4 times and 8 times less are limits for ever more ranks. With 64 of them, 1/64 of what is divided "
        "is still there.",
        "no-master": "In mixed precision the optimizer steps an fp32 copy of the weights. These 4 bytes a parameter "
        "are missing.",
        "master-whole": "The fp32 master weights belong to the optimizer, and are divided with its states from stage "
        "1 on.",
        "master-place": "The master weights are with the parameters here. They are the optimizer's: counted with its "
        "states, and divided with them.",
        "master-in-fp32": "In fp32 the weights are their own master copy. There is no second one.",
        "gradients-half": "With 'mixed, fp32 gradients' a gradient has 4 bytes, not 2.",
        "gradients-fp32": "In the paper's mixed precision gradients have the 2 bytes of the parameters; 4 only where "
        "the name says so.",
        "states-half": "The optimizer's states are fp32 here, also where the parameters are bf16.",
        "optimizer-ignored": "Adam keeps two states of each parameter, momentum one, plain SGD none.",
        "one-state": "Adam keeps two states of each parameter: the mean of the gradient and that of its square.",
        "bytes": "These are bytes. The docstring asks for GB.",
        "gib": "These are GiB of 2³⁰ bytes. 1 GB = 10⁹ bytes.",
    },
    "shard_optimizer": _SHARDED | _LEFTOVER | {
        "no-broadcast": "Ranks start with other weights here, as after different seeds. Before the first step every "
        "rank has to take over those of rank 0, frozen ones too.",
        "replaced": "The module has other parameters than before. Write into a parameter (p.detach().copy_(…)); do "
        "not put another in its place.",
        "step": "Return a function without arguments. The check calls it after each backward.",
        "make-optimizer": "make_optimizer was not called, or more than once. Make one optimizer, for one tensor: this "
        "rank's part.",
        "new-optimizer": "A new optimizer is made in a step, so that its states are lost. Make it once, before the "
        "first step.",
        "not-updated": "No weight has moved. The optimizer steps the tensors that it was given, along their .grad: "
        "this rank's part of the gradient has to be there.",
        "not-gathered": "The weights of this rank's part are right, the others are those from before the step. All "
        "parts have to reach all ranks.",
        "order": "The numbers are right and in wrong places. Part r of the flat tensor is rank r's, and the pieces go "
        "back in the order in which they were joined.",
        "averaged-again": "The gradient is the mean over the ranks already. It was divided or summed once more.",
        "all-states": "The optimizer's states are those of all parameters: every rank keeps what all others keep too. "
        "Give make_optimizer this rank's part only.",
        "whole-parameters": "This rank's states are larger than its share. Whole parameters cannot be dealt out "
        "evenly: join all of them to one flat tensor, and cut that.",
        "whole-copy": "More than a share stays alive with the optimizer. A slice is a view: as long as it lives, so "
        "does the tensor it was cut from. clone() keeps the slice alone.",
        "other-calls": "One all-gather in a step is all that is needed. An all-reduce of a tensor that is zero outside "
        "of the own part moves twice as much.",
        "too-many-messages": "More than one all-gather in a step. Join the parameters to one flat tensor.",
    },
    "reduce_scatter_gradients": _SHARDED | _LEFTOVER | {
        "shards": "Return a dictionary from each trained parameter to a tensor. It may be empty at first: backward "
        "fills it.",
        "sum": "reduce_scatter sums. Divide by the number of ranks, once.",
        "divided-twice": "The gradient is too small by a factor of N: it is divided by the number of ranks twice.",
        "own-gradient": "This is this rank's own gradient, cut out, and not the mean over the ranks.",
        "wrong-part": "The mean is right, and it is another part of it. Rank r has the elements from r·s on, where s "
        "is the size of a part.",
        "whole": "The whole gradient is there. A rank keeps its own part only.",
        "padding": "The elements of the gradient are right, what is behind its end is not. Fill up with zeros: whoever "
        "computes a norm from the parts would add what stands there.",
        "all-reduce": "The result is right, but an all-reduce brings the whole mean to every rank, only to throw most "
        "of it away. It moves twice as much as a reduce-scatter.",
        "other-calls": "A reduce-scatter for each parameter is enough.",
        "grads-kept": "After backward whole gradients are still there, in p.grad. Let go of each as soon as it is "
        "reduced.",
        "freed-late": "The gradients wait for the end of backward, so that all of them are in memory at once. A hook "
        "can reduce each as soon as it is there.",
        "view": "The parts are right, but whole gradients stay alive. A slice is a view, and keeps what it was cut "
        "from.",
        "accumulate": "Two backward passes in one step have to add up, as they do in p.grad.",
    },
    "gathered_layer": _SHARDED | {
        "frozen": "The shard is frozen (requires_grad is False): the gradient of its weight is neither computed nor "
        "sent. ctx.needs_input_grad says so in backward.",
        "order": "The output is that of a weight in wrong order. Part r of the flat weight is rank r's; then comes the "
        "shape.",
        "transposed": "The layer multiplies by the transpose: y = x Wᵀ, as nn.Linear does.",
        "batch-dims": "Right until x has more than two dimensions. The gradient of the weight adds over all of them "
        "but the last.",
        "no-gradient": "After backward a shard has no gradient. Autograd does not look into collectives: write the "
        "backward of the layer, and return the gradient of the shard from it.",
        "input-gradient": "The gradient of x is missing or wrong, so that the layers before this one learn nothing or "
        "the wrong thing.",
        "not-gathered-again": "Backward multiplies by the weight too, and this rank has only its part. Gather it once "
        "more.",
        "weight-kept": "After forward, whole weights are still alive: what one rank saves by cutting them is gone. "
        "Save x and the shard for backward, not the weight.",
        "gradient-kept": "After backward more than the shards' gradients is still alive. A slice is a view, and keeps "
        "what it was cut from; so does an attribute or a list.",
        "sum": "reduce_scatter sums. Divide by the number of ranks, once.",
        "divided-twice": "The gradient is too small by a factor of N: it is divided by the number of ranks twice.",
        "own-gradient": "The gradient is that of this rank's batch. It has to be the mean over the ranks.",
        "wrong-part": "The gradient is that of another rank's part.",
        "all-reduce": "The result is right, but an all-reduce brings the whole gradient to every rank. It moves twice "
        "as much as a reduce-scatter.",
        "other-calls": "All-gathers in forward, all-gathers and reduce-scatters in backward are enough.",
    },
    "largest_model": {
        "whole": "Return a whole number: how many layers fit, 0 if none does.",
        "round": "One layer less: what fits in part does not fit. Round down.",
        "parameters": "That is the number of parameters. The docstring asks for layers of 12·width² each.",
        "reserve-ignored": "reserved_gb of every GPU is not free for model states.",
        "reserve-divided": "What is reserved is reserved on every GPU. ZeRO does not divide activations.",
        "gib": "1 GB = 10⁹ bytes, not 2³⁰.",
        "no-table": "The embedding is part of the model, and of its states: vocabulary · width parameters.",
        "no-sharding": "That is what fits on one GPU alone.",
        "pooled": "The memory of all GPUs was added up. That is right at stage 3 only: before, every GPU holds all "
        "parameters.",
        "limits": "What is divided does not vanish: with N ranks, 1/N of it is left.",
        "not-cumulative": "Stage 2 divides the optimizer's part as well, stage 3 all three.",
        "stage-0": "Stage 0 is DDP: nothing is divided.",
        "no-gathered": "At stage 3 a unit is gathered while it is used. These bytes have to be free, too.",
        "gathered-divided": "What is gathered is whole, on every rank.",
        "gathered-always": "Only stage 3 gathers: before, the parameters are there anyway.",
        "no-gradient": "In backward the unit's whole gradient is there beside its gathered parameters, in 2 bytes each "
        "as well.",
        "largest-unit": "The embedding is a unit as well, and sometimes larger than a layer. Room is needed for the "
        "largest.",
        "negative": "Nothing fits here. Return 0, not a negative number.",
    },
}  # fmt: skip

SLACK = 256  # bytes of counters and scalars that nobody counts

# ------------------------------------------------------------------------------------------------ models and numbers

STEPS = 3


class Net(nn.Module):
    """Embedding, three linear layers and a head; in an odd one no size is even, and there is a single number more."""

    def __init__(self, seed: int, odd: bool = False, frozen: bool = False, tied: bool = False):
        super().__init__()
        words, width = (7, 5) if odd else (8, 6)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2000 + seed)
            self.embedding = nn.Embedding(words, width)
            self.frozen, self.first, self.last = (nn.Linear(width, width) for _ in range(3))
            self.head = nn.Linear(width, words, bias=False)
            self.gain = nn.Parameter(1 + torch.rand(1)) if odd else 1.0
        self.frozen.requires_grad_(not frozen)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def loss(self, words: Tensor) -> Tensor:
        """Mean loss of predicting each next word."""
        x = torch.tanh(self.first(torch.tanh(self.frozen(self.embedding(words[:, :-1])))))
        logits = self.head(torch.tanh(self.last(x)) * self.gain)
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def _words(n: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(7, (STEPS, 4, 6), generator=generator) for _ in range(n)]


def _share(numel: int, n: int) -> int:
    return -(-numel // n)


def _parts(tensor: Tensor, n: int) -> list[Tensor]:
    """The n equal parts of the flat tensor, with zeros behind its end."""
    flat = tensor.detach().flatten()
    return list(F.pad(flat, (0, n * _share(flat.numel(), n) - flat.numel())).chunk(n))


def _part(tensors: dict[str, Tensor], n: int, rank: int) -> dict[str, Tensor]:
    return {name: _parts(t, n)[rank] for name, t in tensors.items()}


def _own_gradients(module: nn.Module, words: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    module.loss(words).backward()
    return gradients_of(module)


# ------------------------------------------------------------------------------------------------ ZeRO-1

OPTIMIZERS = {
    "momentum": (lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9), 1),
    "Adam": (lambda parameters: torch.optim.Adam(parameters, lr=0.02), 2),
}
_SHARD_CASES = (  # ranks, name, options of the model, optimizer, hint if it fails first
    (2, "a plain model", {}, "momentum", None),
    (2, "a plain model", {}, "Adam", None),
    (2, "a frozen layer", {"frozen": True}, "Adam", "frozen"),
    (2, "an odd number of elements", {"odd": True}, "momentum", "uneven"),
    (2, "tied weights", {"tied": True}, "momentum", "tied"),
    (3, "all of that together", {"odd": True, "frozen": True, "tied": True}, "Adam", None),
    (1, "all of that together", {"odd": True, "frozen": True, "tied": True}, "Adam", None),
)


def _mean_gradients(module: nn.Module) -> None:
    import torch.distributed as dist

    for p in trained_parameters(module).values():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def _shard_steps(words: Tensor, fn: Callable, options: dict, kind: str) -> dict:
    """Some steps of one rank with what the learner's ``fn(module, make_optimizer)`` returns."""
    import torch.distributed as dist

    from course_utils import record
    from course_utils.memory import held

    module, made = Net(dist.get_rank(), **options), []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(OPTIMIZERS[kind][0](parameters))
        return made[-1]

    parameters = list(module.parameters())
    step = fn(module, make_optimizer)
    out = {"callable": callable(step), "made": len(made), "start": weights_of(module), "steps": []}
    for batch in words if callable(step) and len(made) == 1 else ():
        module.zero_grad()
        module.loss(batch).backward()
        _mean_gradients(module)
        with record() as ledger:
            step()
        states = [t for s in made[0].state.values() for t in s.values() if isinstance(t, Tensor) and t.dim()]
        memory, gradients = held(module, made[0]), held(module).gradients
        out["steps"].append({
            "weights": weights_of(module), "ledger": ledger, "made": len(made), "states": sum(t.nbytes for t in states),
            "held": memory.optimizer + memory.gradients - gradients,
            "kept": all(p is q for p, q in zip(parameters, module.parameters(), strict=False)),
        })  # fmt: skip
    return out


def _steps_in_one(data: list[Tensor], options: dict, kind: str, factor: float = 1) -> list[dict[str, Tensor]]:
    """Weights after each step of one process on the batches of all ranks; ``factor`` times the mean gradient."""
    module, steps = Net(0, **options), []
    optimizer = OPTIMIZERS[kind][0](list(trained_parameters(module).values()))
    for step in range(STEPS):
        mean = average([_own_gradients(module, words[step]) for words in data], len(data) / factor)
        for name, gradient in mean.items():
            module.get_parameter(name).grad = gradient
        optimizer.step()
        steps.append(weights_of(module))
    return steps


@checked
def shard_optimizer(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(module, make_optimizer) -> step``: each rank steps its part, one all-gather brings the parts together.

    The states that the optimizers hold are counted on each rank.
    """
    exercise = Exercise("Exercise 2", HINTS["shard_optimizer"], timeout)
    for n, name, options, kind, fallback in _SHARD_CASES:
        data = _words(n, 60 + n)
        case = f"{name}, {kind}"
        outcomes = exercise.run(_shard_steps, data, fn, options, kind, case=case, fallback=fallback)
        root = weights_of(Net(0, **options))
        numel = sum(p.numel() for p in trained_parameters(Net(0, **options)).values())
        for rank, outcome in enumerate(outcomes):
            got = outcome.result
            exercise.require(got["callable"], "step", "the function returned nothing that can be called.", rank)
            what = f"make_optimizer was called {got['made']} times."
            exercise.require(got["made"] == 1, "make-optimizer", what, rank)
            steps = got["steps"]
            talks = n == 1 or any(len(step["ledger"]) for step in steps) or _exact_all(got["start"], root)
            exercise.require(talks, "not-distributed", "no step sends anything.", rank)
            compare(exercise, rank, got["start"], root, {}, "before the first step the weight", "no-broadcast")
        right = _steps_in_one(data, options, kind)
        for step in range(STEPS):
            for rank, outcome in enumerate(outcomes):
                _sharded_step(exercise, rank, outcome.result["steps"], step, right, (data, options, kind))
        for audit in (_audit_states, _audit_gather):
            for rank, outcome in enumerate(outcomes):
                for step, result in enumerate(outcome.result["steps"]):
                    audit(exercise, rank, result, numel, kind, n, f"step {step + 1}: ")
    exercise.passed("equal to one process to 1e-12, with 1/N of the optimizer's states on each rank.")


def _exact_all(got: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(exact(got[name], value) for name, value in right.items())


def _sharded_step(exercise: Exercise, rank: int, steps: list[dict], step: int, right: list, case: tuple) -> None:
    result, n, where = steps[step], len(case[0]), f"step {step + 1}: "
    what = f"{where}{result['made']} optimizers have been made."
    exercise.require(result["made"] == 1, "new-optimizer", what, rank)
    exercise.require(result["kept"], "replaced", f"{where}some parameters are not those that the module had.", rank)
    got, traps = result["weights"], {}
    if step == 0 and n > 1 and exercise.fallback is None:
        start = weights_of(Net(0, **case[1]))
        half = {name: _mixed(got[name], right[0][name], start[name]) for name in start}
        moved = any(half[name] is not None and not close(got[name], start[name]) for name in start)
        still = _exact_all(got, start)
        traps = {
            "not-updated": start if still else {},
            "not-gathered": half if moved else {},
            "order": {name: got[name] if _same_numbers(got, right[0]) else None for name in got},
            "averaged-again": [_steps_in_one(*case, factor=f)[0] for f in (1 / n, n)],
        }  # fmt: skip
        traps = {key: some for key, some in traps.items() if some}
    default = "leftover" if step and exercise.fallback is None else "value"
    compare(exercise, rank, got, right[step], traps, f"{where}the weight", default)


def _mixed(got: Tensor, right: Tensor, start: Tensor) -> Tensor | None:
    """``got`` if each of its numbers is right or as before the step."""
    near = torch.isclose(got, right, rtol=1e-9, atol=1e-9) | torch.isclose(got, start, rtol=1e-9, atol=1e-9)
    return got if bool(near.all()) else None


def _same_numbers(got: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    a, b = (torch.cat([t.flatten() for t in some.values()]).sort().values for some in (got, right))
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def _audit_states(exercise: Exercise, rank: int, result: dict, numel: int, kind: str, n: int, where: str) -> None:
    """Refuse states of more than a share, and what else stays alive with the optimizer."""
    share, states, size = 8 * _share(numel, n), OPTIMIZERS[kind][1], result["states"]
    what = f"{where}the optimizer's states have {size} bytes; a share has {states * share}."
    key = exercise.fallback or ("all-states" if n > 1 and size >= states * 8 * numel else "whole-parameters")
    exercise.require(size <= states * share, key, what, rank)
    size, enough = result["held"], (states + 2) * share
    what = f"{where}{size} bytes stay alive with the optimizer; states, part and its gradient have {enough}."
    exercise.require(size <= enough + SLACK, "whole-copy", what, rank)


def _audit_gather(exercise: Exercise, rank: int, result: dict, numel: int, kind: str, n: int, where: str) -> None:
    """Refuse other operations than one all-gather, and more bytes than it takes."""
    entries = [e for e in result["ledger"] if e.op != "barrier"]
    if n > 1:
        others = sorted({e.op for e in entries} - {"all_gather"})
        exercise.require(not others, "other-calls", f"{where}the ledger shows {', '.join(others)}.", rank)
        exercise.require(len(entries) <= 1, "too-many-messages", f"{where}{len(entries)} all-gathers.", rank)
        size, enough = sum(e.bytes for e in entries), 8 * n * _share(numel, n)
        what = f"{where}{size} bytes travel; {enough} are enough."
        exercise.require(size <= enough, exercise.fallback or "too-many-bytes", what, rank)


# ------------------------------------------------------------------------------------------------ ZeRO-2

_REDUCE_CASES = (
    (2, "a plain model", {}, None),
    (2, "a frozen layer", {"frozen": True}, "frozen"),
    (2, "tied weights", {"tied": True}, "tied"),
    (2, "odd numbers of elements", {"odd": True}, "uneven"),
    (3, "all of that together", {"odd": True, "frozen": True, "tied": True}, None),
    (1, "all of that together", {"odd": True, "frozen": True, "tied": True}, None),
)
PASSES = (1, 1, 2)  # backward passes in each step


def _gradient_bytes(parameters: dict[str, nn.Parameter]) -> int:
    return sum(p.grad.nbytes for p in parameters.values() if p.grad is not None)


def _reduce_steps(words: Tensor, fn: Callable, options: dict) -> dict:
    """Some steps of one rank with the dictionary that the learner's ``fn(module)`` returns."""
    from course_utils import record
    from course_utils.memory import track

    module = Net(0, **options)
    trained, waiting = trained_parameters(module), []
    shards = fn(module)
    out = {"dictionary": isinstance(shards, dict), "steps": []}
    for p in trained.values():
        p.register_post_accumulate_grad_hook(lambda _: waiting.append(_gradient_bytes(trained)))
    for step, passes in enumerate(PASSES if out["dictionary"] else ()):
        shards.clear()
        module.zero_grad()
        waiting.clear()
        batch = words[step].clone()
        with track(module) as tracker:
            with record() as ledger:
                for part in batch.chunk(passes):
                    module.loss(part).backward()
            memory = tracker.mark("after backward")
        got = {name: shards.get(p) for name, p in trained.items()}
        out["steps"].append({
            "shards": {name: t.clone() if isinstance(t, Tensor) else None for name, t in got.items()},
            "ledger": ledger, "waiting": max(waiting), "left": _gradient_bytes(trained),
            "alive": memory.total - memory.parameters - batch.nbytes,
        })  # fmt: skip
    return out


@checked
def reduce_scatter_gradients(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(module) -> shards``: during backward each gradient is reduced to this rank's part, and freed."""
    exercise = Exercise("Exercise 3", HINTS["reduce_scatter_gradients"], timeout)
    for n, name, options, fallback in _REDUCE_CASES:
        data, module = _words(n, 80 + n), Net(0, **options)
        outcomes = exercise.run(_reduce_steps, data, fn, options, case=name, fallback=fallback)
        for rank, outcome in enumerate(outcomes):
            exercise.require(outcome.result["dictionary"], "shards", "the function returned no dictionary.", rank)
            exercise.communicates(rank, outcome, n)
        for step, passes in enumerate(PASSES):
            parts = [[_own_gradients(module, b) for b in words[step].chunk(passes)] for words in data]
            for rank, outcome in enumerate(outcomes):
                _reduced(exercise, rank, outcome.result["steps"][step], parts, step)
            for rank, outcome in enumerate(outcomes):
                _audit_reduced(exercise, rank, step, outcome.result["steps"][step], trained_parameters(module), n)
    exercise.passed("the mean gradient to 1e-12, and never more than one whole gradient in memory.")


def _reduced(exercise: Exercise, rank: int, result: dict, parts: list[list[dict]], step: int) -> None:
    """Compare a rank's shards after a step with the mean over the ranks, summed over the backward passes."""
    n, m, where = len(parts), len(parts[0]), f"step {step + 1}: "
    sums = [average(own, 1) for own in parts]
    mean, got = average(sums), result["shards"]
    missing = [name for name in mean if got[name] is None]
    if missing:
        exercise.refuse(exercise.fallback or "shards", f"{where}there is no tensor for {missing[0]}.", rank)
    right, traps = _part(mean, n, rank), {}
    if n > 1 and exercise.fallback is None and step == 0:
        others = [_part(mean, n, r) for r in range(n) if r != rank]
        traps = {
            "sum": _part(average(sums, 1), n, rank), "divided-twice": _part(average(sums, n * n), n, rank),
            "own-gradient": [_part(sums[rank], n, rank), _part(average([sums[rank]], n), n, rank)],
            "wrong-part": [*others, {name: g.flatten()[rank::n] for name, g in mean.items()}],
            "whole": [mean, {name: g.flatten() for name, g in mean.items()}],
        }  # fmt: skip
    elif m > 1:
        last = average([own[-1] for own in parts])
        traps = {"accumulate": [_part(last, n, rank), _part(average([mean], m), n, rank)]}
    for name, value in mean.items():
        valid = max(0, min(value.numel() - rank * len(right[name]), len(right[name])))
        same = got[name].shape == right[name].shape and exact(got[name][:valid], right[name][:valid])
        behind = same and not exact(got[name], right[name])
        lines = difference(got[name], right[name]) if behind else ""
        exercise.require(not behind, "padding", f"{where}the part of {name} is wrong behind its end.{lines}", rank)
    default = "leftover" if step and exercise.fallback is None else "value"
    compare(exercise, rank, got, right, traps, f"{where}the part", default)


def _audit_reduced(
    exercise: Exercise, rank: int, step: int, result: dict, trained: dict[str, nn.Parameter], n: int
) -> None:
    """Refuse whole gradients that stay, other operations than reduce-scatters, and more bytes than they take."""
    where, largest = f"step {step + 1}: ", max(p.nbytes for p in trained.values())
    left, waiting = result["left"], result["waiting"]
    exercise.require(left == 0, "grads-kept", f"{where}after backward p.grad still holds {left} bytes.", rank)
    what = f"{where}during backward p.grad holds {waiting} bytes; the largest gradient has {largest}."
    exercise.require(waiting <= largest, "freed-late", what, rank)
    enough = sum(8 * _share(p.numel(), n) for p in trained.values())
    if n > 1:
        entries = [e for e in result["ledger"] if e.op != "barrier"]
        seen = {e.op for e in entries}
        exercise.require("all_reduce" not in seen, "all-reduce", f"{where}the ledger shows an all-reduce.", rank)
        what = f"{where}the ledger shows {', '.join(sorted(seen))}."
        exercise.require(seen <= {"reduce_scatter"}, "other-calls", what, rank)
        size, most = sum(e.bytes for e in entries), n * enough * PASSES[step]
        what = f"{where}{size} bytes travel; {most} are enough."
        exercise.require(size <= most, exercise.fallback or "too-many-bytes", what, rank)
    what = f"{where}{result['alive']:.0f} bytes stay alive after backward; the parts have {enough}."
    exercise.require(result["alive"] <= enough + SLACK, "view", what, rank)


# ------------------------------------------------------------------------------------------------ ZeRO-3

USES = (0, 1, 2, 3)  # which weight each layer has
_GATHER_CASES = (  # ranks, name, width, shape of a batch without its width, frozen weight, uses, hint
    (2, "weights of 40 × 40", 40, (4,), None, USES, None),
    (2, "a frozen layer", 40, (4,), 1, USES, "frozen"),
    (2, "x of three dimensions", 40, (2, 2), None, USES, "batch-dims"),
    (2, "tied weights", 40, (4,), None, (0, 1, 2, 1, 3), "tied"),
    (2, "weights of 39 × 39", 39, (4,), None, USES, "uneven"),
    (3, "all of that together", 40, (2, 2), 1, (0, 1, 2, 2, 3), None),
    (1, "all of that together", 39, (2, 2), 1, (0, 1, 2, 2, 3), None),
)


def _matrices(width: int) -> list[Tensor]:
    """Weights (out, in) of four layers; the first and the last are not square."""
    generator = torch.Generator().manual_seed(width)
    shapes = ((width, width - 2), (width, width), (width, width), (width + 2, width))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) / width**0.5 for shape in shapes]


def _inputs(n: int, width: int, batch: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(width + n)
    return [torch.randn(STEPS, *batch, width - 2, generator=generator, dtype=torch.float64) for _ in range(n)]


def _stack(x: Tensor, weights: Sequence[Any], uses: Sequence[int], layer: Callable) -> Tensor:
    for i in uses:
        x = torch.tanh(layer(x, weights[i]))
    return x


def _settled(tracker: Any, label: str, most: float) -> Any:
    """Mark what is held; on a busy machine gloo's threads drop their tensors late, so wait if it is too much."""
    until = time.monotonic() + 1
    while True:
        memory = tracker.mark(label)
        if memory.total - memory.parameters < most or time.monotonic() > until:
            return memory
        time.sleep(0.01)


def _gather_steps(x: Tensor, fn: Callable, width: int, frozen: int | None, uses: Sequence[int]) -> list[dict]:
    """Some steps of one rank through layers of the learner's ``fn(x, shard, shape)``."""
    import torch.distributed as dist

    from course_utils import record
    from course_utils.memory import track

    whole, out = _matrices(width), []
    rank, n = dist.get_rank(), dist.get_world_size()
    most = min(w.nbytes for w in whole) if n > 1 else math.inf
    shards = nn.ParameterList([nn.Parameter(_parts(w, n)[rank].clone(), i != frozen) for i, w in enumerate(whole)])
    layers = [(shard, tuple(w.shape)) for shard, w in zip(shards, whole, strict=True)]
    for batch in map(Tensor.clone, x):
        shards.zero_grad()
        with track(shards) as tracker:
            with record() as forward:
                y = _stack(batch, layers, uses, lambda h, weight: fn(h, *weight))
            before = _settled(tracker, "after forward", most)
            output = y.detach().clone()
            with record() as backward:
                if y.requires_grad:
                    y.square().mean().backward()
            del y
            own = sum(p.grad.nbytes for p in shards if p.grad is not None)
            after = _settled(tracker, "after backward", most + own)
        left = after.total - after.parameters - own
        gradients = {f"weight {i}": None if p.grad is None else p.grad.clone() for i, p in enumerate(shards)}
        out.append({
            "y": output, "forward": forward, "backward": backward, "gradients": gradients,
            "kept": before.total - before.parameters, "left": left,
        })  # fmt: skip
        with torch.no_grad():
            for p in shards:
                p -= 0 if p.grad is None else p.grad
    return out


def _gathered_in_one(data: list[Tensor], width: int, frozen: int | None, uses: Sequence[int]) -> list[dict]:
    """By step, the weights, and outputs and gradients of each rank's batch in one process with whole weights."""
    weights = [w.requires_grad_(i != frozen) for i, w in enumerate(_matrices(width))]
    trained, steps = [i for i in range(len(weights)) if i != frozen], []
    for step in range(STEPS):
        result = {"weights": [w.detach().clone() for w in weights], "x": [x[step] for x in data], "gradients": []}
        for x in result["x"]:
            loss = _stack(x, weights, uses, F.linear).square().mean()
            gradients = torch.autograd.grad(loss, [weights[i] for i in trained])
            result["gradients"].append({f"weight {i}": g for i, g in zip(trained, gradients, strict=True)})
        for i in trained:
            weights[i].data -= average(result["gradients"])[f"weight {i}"]
        steps.append(result)
    return steps


@checked
def gathered_layer(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, shard, shape) -> y``: a linear layer whose weight is there only while it is used."""
    exercise = Exercise("Exercise 4", HINTS["gathered_layer"], timeout)
    for n, name, width, batch, frozen, uses, fallback in _GATHER_CASES:
        data = _inputs(n, width, batch)
        outcomes = exercise.run(_gather_steps, data, fn, width, frozen, uses, case=name, fallback=fallback)
        for step, right in enumerate(_gathered_in_one(data, width, frozen, uses)):
            for rank, outcome in enumerate(outcomes):
                exercise.communicates(rank, outcome, n)
                _gathered_output(exercise, rank, outcome.result[step], right, uses, step)
            for rank, outcome in enumerate(outcomes):
                _gathered_gradients(exercise, rank, outcome.result[step], right, uses, step)
                _audit_gathered(exercise, rank, outcome.result[step], right["weights"], uses, frozen, n, step)
    exercise.passed("equal to one process to 1e-12, and no whole weight stays alive.")


def _gathered_output(exercise: Exercise, rank: int, result: dict, right: dict, uses: Sequence[int], step: int) -> None:
    """Compare the output, and refuse whole weights that are still alive after forward."""
    x, weights, where = right["x"][rank], right["weights"], f"step {step + 1}: "
    n, y = len(right["x"]), _stack(x, weights, uses, F.linear)
    if not exact(result["y"], y):
        traps: dict[str, list] = {}
        if n > 1 and exercise.fallback is None:
            traps["order"] = [
                [_joined(parts[::-1], w), _joined([*parts[1:], parts[0]], w), _joined([torch.stack(parts, 1)], w)]
                for w, parts in ((w, _parts(w, n)) for w in weights)
            ]
            traps["order"] = [list(some) for some in zip(*traps["order"], strict=True)]
            traps["transposed"] = [[w.reshape(w.shape[::-1]).T for w in weights]]
        keys = (key for key, some in traps.items() for w in some if close(result["y"], _stack(x, w, uses, F.linear)))
        form = "value" if result["y"].shape == y.shape else "shape"
        key = "float32" if close(result["y"], y) else next(keys, form)
        exercise.refuse(key, f"{where}the output is wrong.{difference(result['y'], y)}", rank)
    if n > 1 and {e.op for e in result["forward"]} <= {"all_gather"}:  # of others `_audit_gathered` tells
        one, kept = min(w.nbytes for w in weights), result["kept"]
        what = f"{where}{kept:.0f} bytes are alive after forward, besides the shards; one weight has {one}."
        exercise.require(kept < one, "weight-kept", what, rank)


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in parts])[: like.numel()].view_as(like)


def _gathered_gradients(
    exercise: Exercise, rank: int, result: dict, right: dict, uses: Sequence[int], step: int
) -> None:
    """Compare the gradients of a rank's shards with the mean over the ranks."""
    own, got, where = right["gradients"], result["gradients"], f"step {step + 1}: "
    n, mean = len(own), average(own)
    expected, last = _part(mean, n, rank), f"weight {uses[-1]}"
    missing, traps = [name for name in expected if got[name] is None], {}
    if missing and exercise.fallback is None:
        key = "input-gradient" if last not in missing else "no-gradient"
        exercise.refuse(key, f"{where}the shard of {missing[0]} has no gradient.", rank)
    if n > 1 and exercise.fallback is None:
        others = [_part(mean, n, r) for r in range(n) if r != rank]
        traps = {
            "sum": _part(average(own, 1), n, rank), "divided-twice": _part(average(own, n * n), n, rank),
            "own-gradient": [_part(own[rank], n, rank), _part(average([own[rank]], n), n, rank)],
            "wrong-part": others,
        }  # fmt: skip
    default, backwards = "value", {name: expected[name] for name in sorted(expected, reverse=True)}
    if exercise.fallback is None and exact(got[last], expected[last]):
        again = n == 1 or result["backward"].count("all_gather")
        traps, default = {}, "input-gradient" if again else "not-gathered-again"
    compare(exercise, rank, got, backwards, traps, f"{where}the gradient of the shard", default)


def _audit_gathered(
    exercise: Exercise, rank: int, result: dict, weights: list[Tensor], uses: Sequence[int], frozen: int | None,
    n: int, step: int,
) -> None:  # fmt: skip
    """Refuse other operations than gathers and reduce-scatters, more bytes than they take, and what stays alive."""
    one, where, special = min(w.nbytes for w in weights), f"step {step + 1}: ", exercise.fallback
    if n == 1:
        return
    forward, backward = result["forward"], result["backward"]
    seen = {e.op for ledger in (forward, backward) for e in ledger} - {"barrier"}
    exercise.require("all_reduce" not in seen, "all-reduce", f"{where}the ledger shows an all-reduce.", rank)
    others = sorted(seen - {"all_gather", "reduce_scatter"})
    exercise.require(not others, "other-calls", f"{where}the ledger shows {', '.join(others)}.", rank)
    sizes = {i: 8 * n * _share(weights[i].numel(), n) for i in uses}
    gather, scatter = sum(sizes[i] for i in uses), sum(sizes[i] for i in uses if i != frozen)
    for size, enough, what in (
        (forward.bytes(), gather, "forward gathers"), (backward.bytes("all_gather"), gather, "backward gathers"),
        (backward.bytes("reduce_scatter"), scatter, "backward reduces"),
    ):  # fmt: skip
        text = f"{where}{what} {size} bytes; {enough} are enough."
        exercise.require(size <= enough, special or "too-many-bytes", text, rank)
    what = f"{where}{result['left']:.0f} bytes are alive after backward, besides the shards and their gradients."
    exercise.require(result["left"] < one, "gradient-kept", what, rank)


# ------------------------------------------------------------------------------------------------ paper problems

GB = 1e9


@paper_problem(
    "Exercise 1",
    cases=[
        (7.5e9, 1, 64, "fp32", "adam"), (7.5e9, 2, 64, "mixed", "momentum"), (7.5e9, 3, 64, "mixed", "adam"),
        (1.5e9, 0, 8, "fp32", "momentum"), (6.7e9, 2, 16, "mixed, fp32 gradients", "adam"),
        (1.3e10, 1, 4, "mixed", "sgd"), (3e8, 3, 2, "fp32", "adam"),
    ],
    slips={
        "everything": "(3, 2, 1)  ->  (1, 1, 1)",
        "stage-ignored": "(3, 2, 1)  ->  (4, 4, 4)",
        "not-cumulative": "stage >= first  ->  stage == first",
        "stage-order": ["(3, 2, 1)  ->  (1, 2, 3)", "(3, 2, 1)  ->  (3, 1, 2)"],
        "limits": [
            "ranks if  ->  float('inf') if",
            {"(ranks if stage >= first else 1)": "(1, 4, 8, ranks)[stage]"},
        ],
        "no-master": 'master = 0 if precision == "fp32" else 4  ->  master = 0',
        "master-whole": "o * (master + 4 * states)  ->  o * 4 * states + parameters / 1e9 * master",
        "master-place": {"p * parameter,": "p * (parameter + master),", "(master + 4 * states)": "4 * states"},
        "master-in-fp32": 'master = 0 if precision == "fp32" else 4  ->  master = 4',
        "gradients-half": '2 if precision == "mixed" else 4  ->  parameter',
        "gradients-fp32": '2 if precision == "mixed" else 4  ->  4',
        "states-half": "4 * states  ->  parameter * states",
        "one-state": '"adam": 2  ->  "adam": 1',
        "optimizer-ignored": "[optimizer]  ->  ['adam']",
        "bytes": "1e9  ->  1",
        "gib": "1e9  ->  2**30",
    },
    units=["GB of parameters", "GB of gradients", "GB of the optimizer"],
    hints=HINTS["state_bytes"],
)  # fmt: skip
def state_bytes(parameters, stage, ranks, precision, optimizer):
    """Check ``fn(parameters, stage, ranks, precision, optimizer) -> (parameters, gradients, optimizer)`` in GB."""
    parameter = 4 if precision == "fp32" else 2
    gradient = 2 if precision == "mixed" else 4
    master = 0 if precision == "fp32" else 4
    states = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
    p, g, o = (parameters / 1e9 / (ranks if stage >= first else 1) for first in (3, 2, 1))
    return p * parameter, g * gradient, o * (master + 4 * states)


@checked
def largest_model(fn: Callable) -> None:
    """Check ``fn(gpu_gb, reserved_gb, ranks, stage, width, vocabulary) -> layers``."""
    layer_size, sizes = 12, (2, 2, 12)

    def fits(
        free: Callable[[float, float, int], float] = lambda gpu, reserved, ranks: gpu - reserved,
        divided: Callable[[int], Sequence[bool]] = lambda stage: (stage >= 3, stage >= 2, stage >= 1),
        share: Callable[[int], float] = lambda ranks: 1 / ranks,
        table: Callable[[int], int] = lambda table: table,
        gathered: Callable[..., float] = lambda stage, ranks, layer, table: 4 * max(layer, table) * (stage == 3),
        finish: Callable[[float, int, int], float] = lambda layers, layer, table: max(0, math.floor(layers)),
        unit: float = GB,
    ) -> Callable[..., float]:
        def answer(gpu: float, reserved: float, ranks: int, stage: int, width: int, vocabulary: int) -> float:
            layer, words = layer_size * width**2, vocabulary * width
            each = sum(b * (share(ranks) if cut else 1) for b, cut in zip(sizes, divided(stage), strict=True))
            room = free(gpu, reserved, ranks) * unit - gathered(stage, ranks, layer, words)
            return finish((room / max(each, 1e-9) - table(words)) / layer, layer, words)

        return answer

    def rounded(layers: float, layer: int, table: int) -> int:
        return max(0, math.ceil(layers))

    def whole(layers: float, layer: int, table: int) -> float:
        return max(0.0, layers)

    def counted(layers: float, layer: int, table: int) -> float:
        return layers * layer + table

    def pooled(gpu: float, reserved: float, ranks: int, stage: int, width: int, vocabulary: int) -> float:
        return fits(lambda gpu, reserved, ranks: ranks * gpu - reserved, lambda stage: (False,) * 3)(
            gpu, reserved, ranks, stage, width, vocabulary
        )

    gather = {
        "no-gathered": lambda stage, ranks, layer, table: 0,
        "gathered-divided": lambda stage, ranks, layer, table: 4 * max(layer, table) / ranks * (stage == 3),
        "gathered-always": lambda stage, ranks, layer, table: 4 * max(layer, table),
        "no-gradient": lambda stage, ranks, layer, table: 2 * max(layer, table) * (stage == 3),
        "largest-unit": lambda stage, ranks, layer, table: 4 * layer * (stage == 3),
    }
    paper_problem(
        "Exercise 5", fn, fits(),
        [
            (80, 20, 64, 3, 4096, 128256), (80, 20, 64, 2, 4096, 128256), (80, 20, 64, 1, 4096, 128256),
            (80, 30, 16, 3, 8192, 128256), (24, 6, 8, 3, 2048, 128256), (16, 4, 4, 0, 1024, 50257),
            (180, 60, 256, 3, 16384, 128256), (16, 14, 2, 0, 4096, 128256),
        ],
        {
            "parameters": fits(finish=counted),
            "round": [fits(finish=rounded), fits(finish=lambda layers, layer, table: max(0, round(layers)))],
            "whole": fits(finish=whole),
            "reserve-ignored": fits(lambda gpu, reserved, ranks: gpu),
            "reserve-divided": fits(lambda gpu, reserved, ranks: gpu - reserved / ranks),
            "gib": fits(unit=2**30),
            "no-table": fits(table=lambda table: 0),
            "no-sharding": fits(divided=lambda stage: (False,) * 3),
            "pooled": [fits(divided=lambda stage: (True,) * 3), pooled],
            "limits": fits(share=lambda ranks: 0),
            "not-cumulative": fits(divided=lambda stage: (stage == 3, stage == 2, stage == 1)),
            "stage-0": fits(divided=lambda stage: (stage >= 3, stage >= 2, True)),
            "negative": fits(finish=lambda layers, layer, table: math.floor(layers)),
            **{key: fits(gathered=slip) for key, slip in gather.items()},
        },
        HINTS["largest_model"], ["layers"], tolerance=1e-9,
    )  # fmt: skip
