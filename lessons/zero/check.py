"""Checks of the exercises on ZeRO.

Each takes the learner's function, and ``timeout`` in seconds if it runs on ranks; it prints one line if that passes,
and raises :class:`CheckFailed` with a hint if not. Models are in float64, so that the ranks can be compared with one
process to 1e-12. A model that is ``odd`` has no size that 2 ranks can divide evenly.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_utils.check import TIMEOUT, Exercise, checked, load_hints, paper_problem
from course_utils.check.training import (
    average,
    compare,
    compare_tensor,
    difference,
    exact,
    gradients_of,
    trained_parameters,
    weights_of,
)

__all__ = ["HINTS", "gathered_layer", "largest_model", "reduce_scatter_gradients", "shard_optimizer", "state_bytes"]

HINTS = load_hints(__file__)

ERRORS = {  # that a case is to blame for, by its hint; SIGABRT is gloo's answer to sizes that do not match
    "frozen": "NoneType|require grad", "tied": "NoneType", "uneven": "AssertionError|SIGABRT",
}
STEPS = 3
SLACK = 256  # bytes of counters and scalars that nobody counts
PATIENCE = 1.0  # seconds; on a busy machine gloo's threads drop their tensors late

# ------------------------------------------------------------------------------------------------ models and numbers


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
    """Batches of each rank for all steps, of shape (STEPS, samples, length)."""
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


def _part_slips(own: list[dict[str, Tensor]], rank: int) -> dict[str, Any]:
    """What usual slips make of a rank's part of the mean of ``own``, the ranks' tensors by name."""
    n, mean = len(own), average(own)
    return {
        "sum": _part(average(own, 1), n, rank), "divided-twice": _part(average(own, n * n), n, rank),
        "own-gradient": [_part(own[rank], n, rank), _part(average([own[rank]], n), n, rank)],
        "wrong-part": [_part(mean, n, r) for r in range(n) if r != rank],
    }


def _own_gradients(module: nn.Module, words: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    module.loss(words).backward()
    return gradients_of(module)


class _Settled:
    """Bytes of all that is held; while that is too much, a little is waited for what goes by itself.

    What has not gone within PATIENCE in all is held by the answer, so the rest of the run waits for less.
    """

    def __init__(self) -> None:
        self.patience = PATIENCE

    def __call__(self, tracker: Any, most: float) -> float:
        start = time.monotonic()
        while (total := tracker.mark("").total) > most and time.monotonic() - start < self.patience:
            time.sleep(0.01)
        self.patience = max(0.1, self.patience - (time.monotonic() - start))
        return total


def _array_bytes(step: Callable) -> int:
    """Bytes of the arrays of NumPy that ``step`` keeps in its closure and attributes, and in what these hold."""
    found, todo, size = set(), [step], 0
    while todo:
        value = todo.pop()
        if id(value) in found or isinstance(value, type | ModuleType | Tensor | nn.Module):
            continue
        found.add(id(value))
        if isinstance(value, np.ndarray):
            size += value.nbytes if value.flags.owndata else 0
        elif isinstance(value, FunctionType):
            todo += [value.__closure__, vars(value)]
        elif isinstance(value, CellType | MethodType | dict | list | tuple | set) or hasattr(value, "__dict__"):
            todo += gc.get_referents(value)
    return size


def _keys(exercise: Exercise, **keys: str) -> dict[str, str]:
    """For an audit: bytes that are too many stem from what the case adds, if it adds anything."""
    return keys | {"too-many-bytes": exercise.fallback or "too-many-bytes"}


# ------------------------------------------------------------------------------------------------ ZeRO-1

OPTIMIZERS = {  # and how many states it keeps of each parameter
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


def _started(words: Tensor, options: dict) -> Net:
    """A rank's module as it is before anything is sent: no rank can know the seed of another."""
    return Net(int(words.flatten()[:9] @ 7 ** torch.arange(9)), **options)


def _share_bytes(module: nn.Module, n: int) -> int:
    return 8 * _share(sum(p.numel() for p in trained_parameters(module).values()), n)


def _mean_gradients(module: nn.Module) -> None:
    import torch.distributed as dist

    for p in trained_parameters(module).values():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def _shard_steps(words: Tensor, fn: Callable, options: dict, kind: str) -> dict:
    """Some steps of one rank with what the learner's ``fn(module, make_optimizer)`` returns."""
    import torch.distributed as dist

    from course_utils import record
    from course_utils.memory import track

    module, made = _started(words, options), []
    make, states = OPTIMIZERS[kind]

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(make(parameters))
        return made[-1]

    parameters = list(module.parameters())
    module_bytes = sum(p.nbytes for p in (*parameters, *trained_parameters(module).values()))  # and of the gradients
    settled, enough = _Settled(), (states + 2) * _share_bytes(module, dist.get_world_size())
    with record() as ledger:
        step = fn(module, make_optimizer)
    out = {"callable": callable(step), "made": len(made), "ledger": ledger, "start": weights_of(module), "steps": []}
    for batch in words if callable(step) and len(made) == 1 else ():
        module.zero_grad()
        module.loss(batch).backward()
        _mean_gradients(module)
        with track(module) as tracker:
            with record() as ledger:
                step()
            beside = settled(tracker, module_bytes + enough + SLACK) - module_bytes + _array_bytes(step)
        held = [t for s in made[0].state.values() for t in s.values() if isinstance(t, Tensor) and t.dim()]
        out["steps"].append({
            "weights": weights_of(module), "ledger": ledger, "made": len(made), "beside": beside,
            "states": sum(t.nbytes for t in held),
            "kept": all(p is q for p, q in zip(parameters, module.parameters(), strict=False)),
        })
    return out


@cache
def _steps_in_one(n: int, kind: str, factor: float = 1, **options: bool) -> list[dict[str, Tensor]]:
    """Weights of one process on the batches of ``n`` ranks, at the start and after each step.

    ``factor`` times the mean gradient is what the optimizer gets.
    """
    data = _words(n, 60 + n)
    module = _started(data[0], options)
    optimizer = OPTIMIZERS[kind][0](list(trained_parameters(module).values()))
    moments = [weights_of(module)]
    for step in range(STEPS):
        mean = average([_own_gradients(module, words[step]) for words in data], n / factor)
        for name, gradient in mean.items():
            module.get_parameter(name).grad = gradient
        optimizer.step()
        moments.append(weights_of(module))
    return moments


@checked
def shard_optimizer(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(module, make_optimizer) -> step``: each rank steps its part, one all-gather brings the parts together.

    ``step`` takes no arguments. The states that the optimizers hold are counted on each rank, and all that is alive
    after a step.
    """
    exercise = Exercise("Exercise 2", HINTS["shard_optimizer"], timeout)
    for n, name, options, kind, fallback in _SHARD_CASES:
        data = _words(n, 60 + n)
        case, errors = f"{name}, {kind}", ERRORS.get(fallback)
        outcomes = exercise.run(_shard_steps, data, fn, options, kind, case=case, fallback=fallback, errors=errors)
        results = [outcome.result for outcome in outcomes]
        start = _steps_in_one(n, kind, **options)[0]
        for rank, result in exercise.each(results):
            exercise.require(result["callable"], "step", "the function returned nothing that can be called.")
            what = f"make_optimizer was called {result['made']} times."
            exercise.require(result["made"] == 1, "make-optimizer", what)
            ledgers = [result["ledger"], *(step["ledger"] for step in result["steps"])]
            exercise.audit([entry for ledger in ledgers for entry in ledger], calls=(1, None))
            compare(exercise, rank, result["start"], start, {}, "before the first step the weight", "no-broadcast")
        for step in range(STEPS):
            for rank, result in exercise.each(results, f"step {step + 1}: "):
                _sharded_step(exercise, rank, result["steps"][step], step, n, kind, options)
        module = _started(data[0], options)
        for audit in (_audit_states, _audit_gather):
            for step in range(STEPS):
                for _, result in exercise.each(results, f"step {step + 1}: "):
                    audit(exercise, result["steps"][step], module, kind, n)
    exercise.passed("equal to one process to 1e-12, with 1/N of the optimizer's states on each rank.")


def _sharded_step(
    exercise: Exercise, rank: int, result: dict, step: int, n: int, kind: str, options: dict
) -> None:
    """Compare a rank's weights after a step with those of one process."""
    got, slips, default = result["weights"], {}, "value"
    start, *right = _steps_in_one(n, kind, **options)
    exercise.require(result["made"] == 1, "new-optimizer", f"{result['made']} optimizers have been made.")
    exercise.require(result["kept"], "replaced", "some parameters are not those that the module had.")
    if exercise.fallback is None and step:
        default = "leftover"
    elif exercise.fallback is None and n > 1:
        slips = _first_step_slips(got, start, right[0])
        slips["averaged-again"] = [_steps_in_one(n, kind, factor=f, **options)[1] for f in (1 / n, n)]
    compare(exercise, rank, got, right[step], slips, "the weight", default)


def _first_step_slips(got: dict, start: dict, right: dict) -> dict[str, Any]:
    """``got`` under the hint that tells where its numbers come from, if all of them do; else nothing."""
    old, new, now = (torch.cat([some[name].flatten() for name in start]) for some in (start, right, got))
    if exact(now, old):
        return {"not-updated": got}
    if (torch.isclose(now, new, 1e-9, 1e-9) | torch.isclose(now, old, 1e-9, 1e-9)).all():
        return {"not-gathered": got}
    return {"order": got} if torch.allclose(now.sort().values, new.sort().values, 1e-9, 1e-9) else {}


def _audit_states(exercise: Exercise, figures: dict, module: nn.Module, kind: str, n: int) -> None:
    """Refuse states of another size than a share, and what else stays alive beside the module."""
    share, states, size = _share_bytes(module, n), OPTIMIZERS[kind][1], figures["states"]
    what = "the optimizer that make_optimizer returned has no states, so it never stepped."
    exercise.require(size > 0, "make-optimizer", what)
    key = "all-states" if n > 1 and size >= states * _share_bytes(module, 1) else "whole-parameters"
    what = f"the optimizer's states have {size} bytes; a share has {states * share}."
    exercise.require(size <= states * share, exercise.fallback or key, what)
    size, enough = figures["beside"], (states + 2) * share
    what = f"{size:.0f} bytes are alive beside the module and its gradients; states, part and gradient have {enough}."
    exercise.require(size <= enough + SLACK, "whole-copy", what)


def _audit_gather(exercise: Exercise, figures: dict, module: nn.Module, kind: str, n: int) -> None:
    """Refuse other operations than one all-gather of the parts."""
    sizes = _share_bytes(module, 1), n * _share_bytes(module, n)
    exercise.audit(figures["ledger"], {"all_gather"}, calls=(1, 1), carried=sizes, keys=_keys(exercise))


# ------------------------------------------------------------------------------------------------ ZeRO-2

_REDUCE_CASES = (  # ranks, name, options of the model, hint if it fails first
    (2, "a plain model", {}, None),
    (2, "a frozen layer", {"frozen": True}, "frozen"),
    (2, "tied weights", {"tied": True}, "tied"),
    (2, "odd numbers of elements", {"odd": True}, "uneven"),
    (3, "all of that together", {"odd": True, "frozen": True, "tied": True}, None),
    (1, "all of that together", {"odd": True, "frozen": True, "tied": True}, None),
)
PASSES = (1, 1, 2)  # backward passes in each step
FEW = 64  # bytes of scalars, as a gradient arrives


def _least_alive(module: nn.Module, batch: Tensor, passes: int) -> list[float]:
    """Bytes that are alive as each gradient arrives if every earlier one is gone at once, and after the last."""
    from course_utils.memory import track

    alive = []

    def arrive(p: nn.Parameter) -> None:
        alive.append(tracker.mark("").total)
        p.grad = None

    for p in trained_parameters(module).values():
        p.register_post_accumulate_grad_hook(arrive)
    with track(module) as tracker:
        for part in batch.chunk(passes):
            module.loss(part).backward()
        alive.append(tracker.mark("").total)
    return alive


def _reduce_steps(words: Tensor, fn: Callable, options: dict) -> dict:
    """Some steps of one rank with the dictionary that the learner's ``fn(module)`` returns."""
    import torch.distributed as dist

    from course_utils import record
    from course_utils.memory import track

    module, n = Net(0, **options), dist.get_world_size()
    trained = trained_parameters(module)
    part_bytes = {name: 8 * _share(p.numel(), n) for name, p in trained.items()}
    reduced, late, settled = set(), [], _Settled()

    def arrive(name: str) -> None:
        most = least.pop(0) + sum(part_bytes[other] for other in reduced)
        reduced.add(name)
        if not late and (size := settled(tracker, most + FEW) - most) > FEW:
            late.append(f"as the gradient of {name} arrives, {size:.0f} bytes more are alive than it and the parts.")

    for name, p in trained.items():  # before the learner's hooks
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrive(name))
    shards = fn(module)
    out = {"dictionary": isinstance(shards, dict), "steps": []}
    for step, passes in enumerate(PASSES if out["dictionary"] else ()):
        shards.clear()
        module.zero_grad()
        reduced.clear()
        late.clear()
        batch, enough = words[step].clone(), sum(part_bytes.values()) + SLACK
        least = _least_alive(Net(0, **options), batch, passes)
        with track(module) as tracker:
            with record() as ledger:
                for part in batch.chunk(passes):
                    module.loss(part).backward()
            alive = settled(tracker, least[-1] + enough) - least[-1]
        got = {name: shards.get(p) for name, p in trained.items()}
        out["steps"].append({
            "shards": {name: t.clone() if isinstance(t, Tensor) else None for name, t in got.items()},
            "ledger": ledger, "late": list(late), "alive": alive,
            "left": sum(p.grad.nbytes for p in trained.values() if p.grad is not None),
        })
    return out


@checked
def reduce_scatter_gradients(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(module) -> shards``: during backward each gradient is reduced to this rank's part, and freed.

    ``shards`` is a dictionary from each trained parameter to ⌈numel / N⌉ elements. What is alive is counted as each
    gradient arrives, and after backward.
    """
    exercise = Exercise("Exercise 3", HINTS["reduce_scatter_gradients"], timeout)
    for n, name, options, fallback in _REDUCE_CASES:
        data, module = _words(n, 80 + n), Net(0, **options)
        outcomes = exercise.run(
            _reduce_steps, data, fn, options, case=name, fallback=fallback, errors=ERRORS.get(fallback)
        )
        for rank, outcome in exercise.each(outcomes):
            exercise.require(outcome.result["dictionary"], "shards", "the function returned no dictionary.")
            exercise.communicates(rank, outcome, n)
        for step, passes in enumerate(PASSES):
            parts = [[_own_gradients(module, b) for b in words[step].chunk(passes)] for words in data]
            results, where = [outcome.result["steps"][step] for outcome in outcomes], f"step {step + 1}: "
            for rank, result in exercise.each(results, where):
                _reduced(exercise, rank, result["shards"], parts, step)
            for _, result in exercise.each(results, where):
                _audit_reduced(exercise, result, passes, trained_parameters(module), n)
    exercise.passed("the mean gradient to 1e-12, and never more than one whole gradient in memory.")


def _reduced(exercise: Exercise, rank: int, got: dict, parts: list[list[dict]], step: int) -> None:
    """Compare a rank's shards after a step with the mean over the ranks, summed over the backward passes."""
    n, m = len(parts), len(parts[0])
    sums = [average(own, 1) for own in parts]
    mean, slips = average(sums), {}
    right = _part(mean, n, rank)
    missing = [name for name in mean if got[name] is None]
    exercise.require(not missing, "shards", f"there is no tensor for {', '.join(missing)}.")
    if n > 1 and exercise.fallback is None and step == 0:
        slips = _part_slips(sums, rank)
        slips["wrong-part"].append({name: g.flatten()[rank::n] for name, g in mean.items()})
        slips["whole"] = [mean, {name: g.flatten() for name, g in mean.items()}]
    elif m > 1:
        last = average([own[-1] for own in parts])
        slips = {"accumulate": [_part(last, n, rank), _part(average([mean], m), n, rank)]}
    for name, value in mean.items():
        valid = max(0, min(value.numel() - rank * len(right[name]), len(right[name])))
        same = got[name].shape == right[name].shape and exact(got[name][:valid], right[name][:valid])
        if same and not exact(got[name], right[name]):
            lines = difference(got[name], right[name])
            exercise.refuse("padding", f"the part of {name} is wrong behind its end.{lines}")
    compare(exercise, rank, got, right, slips, "the part", "leftover" if step and not exercise.fallback else "value")


def _audit_reduced(exercise: Exercise, result: dict, passes: int, trained: dict[str, nn.Parameter], n: int) -> None:
    """Refuse whole gradients that stay, and other calls than the reduce-scatters."""
    left, alive, late = result["left"], result["alive"], result["late"]
    parts = sum(8 * _share(p.numel(), n) for p in trained.values())
    exercise.require(left == 0, "grads-kept", f"after backward p.grad still holds {left} bytes.")
    sizes = passes * sum(p.nbytes for p in trained.values()), passes * n * parts
    exercise.audit(result["ledger"], {"reduce_scatter"}, carried=sizes, keys=_keys(exercise, all_reduce="all-reduce"))
    what = f"{alive:.0f} bytes stay alive after backward; the parts have {parts}."
    exercise.require(alive <= parts + SLACK, "view", what)
    exercise.require(not late, "freed-late", "".join(late))


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


def _stack(x: Tensor, weights: Sequence[Any], uses: Sequence[int], layer: Callable = F.linear) -> Tensor:
    for i in uses:
        x = torch.tanh(layer(x, weights[i]))
    return x


def _gather_steps(x: Tensor, fn: Callable, width: int, frozen: int | None, uses: Sequence[int]) -> list[dict]:
    """Some steps of one rank through layers of the learner's ``fn(x, shard, shape)``."""
    import torch.distributed as dist

    from course_utils import record
    from course_utils.memory import track

    whole, out = _matrices(width), []
    rank, n = dist.get_rank(), dist.get_world_size()
    shards = nn.ParameterList([nn.Parameter(_parts(w, n)[rank].clone(), i != frozen) for i, w in enumerate(whole)])
    layers = [(shard, tuple(w.shape)) for shard, w in zip(shards, whole, strict=True)]
    own = sum(shard.nbytes for shard in shards)
    most, settled = min(w.nbytes for w in whole) if n > 1 else math.inf, _Settled()
    for batch in map(Tensor.clone, x):
        shards.zero_grad()
        with track(shards) as tracker:
            with record() as forward:
                y = _stack(batch, layers, uses, lambda h, weight: fn(h, *weight))
            kept = settled(tracker, own + most) - own
            output = y.detach().clone()
            with record() as backward:
                if y.requires_grad:
                    y.square().mean().backward()
            del y
            expected = own + sum(p.grad.nbytes for p in shards if p.grad is not None)
            left = settled(tracker, expected + most) - expected
        gradients = {f"weight {i}": None if p.grad is None else p.grad.clone() for i, p in enumerate(shards)}
        out.append({
            "y": output, "gradients": gradients, "forward": forward, "backward": backward, "kept": kept, "left": left,
        })
        with torch.no_grad():
            for p in shards:
                p -= 0 if p.grad is None else p.grad
    return out


@cache
def _gathered_in_one(
    n: int, width: int, batch: tuple[int, ...], frozen: int | None, uses: Sequence[int]
) -> list[dict]:
    """By step, the weights, and inputs and gradients of each rank's batch in one process with whole weights."""
    data = _inputs(n, width, batch)
    weights = [w.requires_grad_(i != frozen) for i, w in enumerate(_matrices(width))]
    trained, steps = [i for i in range(len(weights)) if i != frozen], []
    for step in range(STEPS):
        result = {"weights": [w.detach().clone() for w in weights], "x": [x[step] for x in data], "gradients": []}
        for x in result["x"]:
            loss = _stack(x, weights, uses).square().mean()
            gradients = torch.autograd.grad(loss, [weights[i] for i in trained])
            result["gradients"].append({f"weight {i}": g for i, g in zip(trained, gradients, strict=True)})
        for i in trained:
            weights[i].data -= average(result["gradients"])[f"weight {i}"]
        steps.append(result)
    return steps


@checked
def gathered_layer(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(x, shard, shape) -> y``: a linear layer whose weight is there only while it is used.

    ``x`` has the shape (…, in) and ``y`` (…, out) for ``shape`` (out, in); ``shard`` has ⌈out · in / N⌉ elements. What
    is alive is counted after forward and after backward.
    """
    exercise = Exercise("Exercise 4", HINTS["gathered_layer"], timeout)
    for n, name, width, batch, frozen, uses, fallback in _GATHER_CASES:
        data = _inputs(n, width, batch)
        outcomes = exercise.run(
            _gather_steps, data, fn, width, frozen, uses, case=name, fallback=fallback, errors=ERRORS.get(fallback)
        )
        for rank, outcome in exercise.each(outcomes):
            exercise.communicates(rank, outcome, n)
        for step, right in enumerate(_gathered_in_one(n, width, batch, frozen, uses)):
            results, where = [outcome.result[step] for outcome in outcomes], f"step {step + 1}: "
            for rank, result in exercise.each(results, where):
                _gathered_output(exercise, rank, result["y"], right, uses)
            for rank, result in exercise.each(results, where):
                _gathered_gradients(exercise, rank, result, right["gradients"], uses)
                _audit_gathered(exercise, result, right["weights"], uses, frozen, n)
    exercise.passed("equal to one process to 1e-12, and no whole weight stays alive.")


def _gathered_output(exercise: Exercise, rank: int, got: Tensor, right: dict, uses: Sequence[int]) -> None:
    """Compare a rank's output with that of whole weights."""
    x, weights, n = right["x"][rank], right["weights"], len(right["x"])
    y, slips = _stack(x, weights, uses), {}
    if n > 1 and exercise.fallback is None and not exact(got, y):
        slips = {
            "order": [
                [_joined(_parts(w, n)[::-1], w) for w in weights],
                [_joined([torch.stack(_parts(w, n), 1)], w) for w in weights],
            ],
            "transposed": [[w.reshape(w.shape[::-1]).T for w in weights]],
        }
    outputs = {key: [_stack(x, w, uses) for w in wrong] for key, wrong in slips.items()}
    compare_tensor(exercise, got, y, outputs, "the output of the layers")


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in parts])[: like.numel()].view_as(like)


def _gathered_gradients(exercise: Exercise, rank: int, result: dict, own: list[dict], uses: Sequence[int]) -> None:
    """Compare the gradients of a rank's shards with the mean over the ranks, from the last layer to the first."""
    n, got, last = len(own), result["gradients"], f"weight {uses[-1]}"
    expected, slips, default = _part(average(own), n, rank), {}, "value"
    missing = [name for name in expected if got[name] is None]
    if exercise.fallback is None:
        key = "input-gradient" if last not in missing else "no-gradient"
        exercise.require(not missing, key, f"the shard of {', '.join(missing)} has no gradient.")
        if exact(got[last], expected[last]):
            again = n == 1 or result["backward"].count("all_gather")
            nothing = not any(gradient.any() for name, gradient in got.items() if name != last and gradient is not None)
            default = "input-gradient" if again or nothing else "not-gathered-again"
        elif n > 1:
            slips = _part_slips(own, rank)
    backwards = {name: expected[name] for name in sorted(expected, reverse=True)}
    compare(exercise, rank, got, backwards, slips, "the gradient of the shard", default)


def _audit_gathered(
    exercise: Exercise, result: dict, weights: list[Tensor], uses: Sequence[int], frozen: int | None, n: int
) -> None:
    """Refuse other calls than gathers and reduce-scatters of these sizes, and what stays alive after each pass."""

    def size(uses: Iterable[int]) -> int:
        return sum(8 * n * _share(weights[i].numel(), n) for i in uses)

    forward, backward, one = result["forward"], result["backward"], min(w.nbytes for w in weights)
    trained = [i for i in uses if i != frozen]
    first = size(uses[1:])  # the input of the first layer needs no gradient, so nor does that need its weight
    kept = {"not-distributed": "weight-kept", "too-few-bytes": "weight-kept"}
    exercise.audit([*forward, *backward], {"all_gather", "reduce_scatter"}, keys={"all_reduce": "all-reduce"})
    for key, left, when in (
        ("weight-kept", result["kept"], "after forward, besides the shards"),
        ("gradient-kept", result["left"], "after backward, besides the shards and their gradients"),
    ):
        what = f"{left:.0f} bytes are alive {when}; one weight has {one}."
        exercise.require(n == 1 or left < one, key, what)
    for phase, op, limits, keys in (
        ("forward", "all_gather", (size(uses), size(uses)), {}),
        ("backward", "all_gather", (first, size(uses)), kept),
        ("backward", "reduce_scatter", (size(set(trained)), size(trained)), {}),
    ):
        calls = [entry for entry in result[phase] if entry.op == op]
        exercise.audit(calls, carried=limits, where=f"{op} in {phase}: ", keys=_keys(exercise, **keys))


# ------------------------------------------------------------------------------------------------ paper problems


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
)
def state_bytes(parameters, stage, ranks, precision, optimizer):
    """Check ``fn(parameters, stage, ranks, precision, optimizer) -> (parameters, gradients, optimizer)`` in GB."""
    parameter = 4 if precision == "fp32" else 2
    gradient = 2 if precision == "mixed" else 4
    master = 0 if precision == "fp32" else 4
    states = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
    p, g, o = (parameters / 1e9 / (ranks if stage >= first else 1) for first in (3, 2, 1))
    return p * parameter, g * gradient, o * (master + 4 * states)


@paper_problem(
    "Exercise 5",
    cases=[
        (80, 20, 64, 3, 4096, 128256), (80, 20, 64, 2, 4096, 128256), (80, 20, 64, 1, 4096, 128256),
        (80, 30, 16, 3, 8192, 128256), (24, 6, 8, 3, 2048, 128256), (16, 4, 4, 0, 1024, 50257),
        (180, 60, 256, 3, 16384, 128256), (16, 14, 2, 0, 4096, 128256),
    ],
    slips={
        "parameters": "(free / each - embedding) // layer  ->  free / each",
        "round": [
            "int((free / each - embedding) // layer)  ->  -int((embedding - free / each) // layer)",
            "int((free / each - embedding) // layer)  ->  round((free / each - embedding) / layer)",
        ],
        "whole": "int((free / each - embedding) // layer)  ->  (free / each - embedding) / layer",
        "reserve-ignored": "gpu_gb - reserved_gb  ->  gpu_gb",
        "reserve-divided": "gpu_gb - reserved_gb  ->  gpu_gb - reserved_gb / ranks",
        "gib": "1e9  ->  2**30",
        "no-table": "free / each - embedding  ->  free / each",
        "no-sharding": "ranks if stage >= first else 1  ->  1",
        "pooled": [
            "ranks if stage >= first else 1  ->  ranks",
            {"ranks if stage >= first else 1": "1", "gpu_gb - reserved_gb": "ranks * gpu_gb - reserved_gb"},
        ],
        "limits": "ranks if stage >= first else 1  ->  1e18 if stage >= first else 1",
        "not-cumulative": "stage >= first  ->  stage == first",
        "stage-0": "(12, 1))  ->  (12, 0))",
        "no-gathered": "if stage == 3 else 0  ->  * 0",
        "gathered-divided": "if stage == 3 else 0  ->  / ranks if stage == 3 else 0",
        "gathered-always": "if stage == 3 else 0  ->  ",
        "no-gradient": "4 * max(  ->  2 * max(",
        "largest-unit": "max(layer, embedding)  ->  layer",
        "negative": "max(0, int((free / each - embedding) // layer))  ->  int((free / each - embedding) // layer)",
    },
    units=["layers"],
    hints=HINTS["largest_model"],
    tolerance=1e-9,
    allowed=lambda gpu_gb, reserved_gb, *_: gpu_gb > reserved_gb,
)
def largest_model(gpu_gb, reserved_gb, ranks, stage, width, vocabulary):
    """Check ``fn(gpu_gb, reserved_gb, ranks, stage, width, vocabulary) -> layers``."""
    layer, embedding = 12 * width**2, vocabulary * width
    each = sum(size / (ranks if stage >= first else 1) for size, first in ((2, 3), (2, 2), (12, 1)))
    gathered = 4 * max(layer, embedding) if stage == 3 else 0
    free = (gpu_gb - reserved_gb) * 1e9 - gathered
    return max(0, int((free / each - embedding) // layer))
