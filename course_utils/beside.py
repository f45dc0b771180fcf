"""What ranks compute and train, beside one process that does all of it: one way for all lessons to compare."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .memory import Memory, held_memory
from .models import loss_of
from .ranks import Ledger, device, record

__all__ = ["TOLERANCE", "Comparison", "Run", "Trial", "beside", "differences", "full", "one_process", "sgd", "train",
           "train_beside"]

#: Of what is equal but for rounding, in float32.
TOLERANCE = 1e-5

Batches = Callable[[int], tuple[Tensor, Tensor]]
Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """How far a rank is off one process: the largest difference by what was compared, and what the rank sent."""

    errors: dict[str, float]
    ledger: Ledger = field(default_factory=Ledger)  # in forward and backward of the last step
    stepping: Ledger = field(default_factory=Ledger)  # while the optimizer made it

    @property
    def error(self) -> float:
        return max(self.errors.values())

    @property
    def equal(self) -> bool:
        return self.error < TOLERANCE

    @property
    def said(self) -> str:
        return ", ".join(f"{name} {'equal' if e < TOLERANCE else 'WRONG'}" for name, e in self.errors.items())

    def same_as_one_process(self) -> str:
        """Say that everything is equal; raises `AssertionError` if anything is not."""
        if not self.equal:
            raise AssertionError(f"not as in one process: {self.said}")
        return f"equal to one process: {', '.join(self.errors)}"


@dataclass(frozen=True)
class Trial(Comparison):
    """A comparison of one forward and one backward, and what this rank sent in each."""

    forward: Ledger = field(default_factory=Ledger)
    backward: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True)
class Run:
    """What one process has found in training `part` of a model, or all of it; tensors are whole, and on the CPU."""

    part: Any
    losses: list[float | None]  # of each step; None or 0 where this rank has no loss
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]  # after the last step
    ledger: Ledger  # forward and backward of the last step
    stepping: Ledger = field(default_factory=Ledger)  # while the optimizer made it
    norms: list[float] = field(default_factory=list)  # that `clip` found
    held: Memory = field(default_factory=Memory)  # after the last step, its gradients included


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """SGD with momentum, which, unlike Adam, makes no steps out of rounding errors."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def full(tensor: Tensor) -> Tensor:
    """Return a whole tensor; for that of a `DTensor` all ranks of its mesh must ask."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()  # imports no DTensor


def _off(got: Tensor, expected: Tensor, relative: bool, least: float = 0.0) -> float:
    difference = (full(got) - expected).detach().abs().max().item()
    return difference / max(expected.detach().abs().max().item(), least, 1e-30) if relative else difference


def _off_by_name(pairs: Mapping[str, tuple[Tensor, Tensor]], relative: bool) -> dict[str, float]:
    """A tensor that is nothing but rounding, as is the gradient of keys' bias, is measured by larger ones."""
    least = 0.01 * max((expected.abs().max().item() for _, expected in pairs.values()), default=0.0)
    return {name: _off(*pair, relative, least) for name, pair in pairs.items()}


def beside(
    whole: Callable, part: Callable, inputs: Sequence[Tensor], *, mine: Callable[[Tensor], Tensor] = lambda t: t,
    loss: Callable[[Tensor], Tensor] | None = None,
    gradients: Callable[[], Mapping[str, tuple[Tensor, Tensor]]] = dict, relative: bool = False,
) -> Trial:
    """On each rank: forward and backward of its part of a module, beside the whole module with all inputs.

    Parameters
    ----------
    whole, part : callable
        Each takes the inputs and returns one tensor.
    inputs : sequence of tensor
        Of all ranks.
    mine : callable
        What this rank has of an input, of its gradient, and of the output.
    loss : callable, optional
        Makes a number of an output; without it both outputs get one random gradient.
    gradients : callable
        Gives, after backward, what else must agree, by name: this rank's tensor and the expected one.
    relative : bool
        Whether a difference is a share of the largest number expected.

    Returns
    -------
    Trial
        Its `errors` are of "loss" or "y", of "x", "x1", ... (gradients of inputs), and of `gradients`.
    """
    every = [x.detach().to(device(), copy=True).requires_grad_(x.is_floating_point()) for x in inputs]
    own = [mine(x.detach()).clone().requires_grad_(x.requires_grad) for x in every]
    expected = whole(*every)
    random = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(expected)
    (loss(expected) if loss else (expected * random).sum()).backward()
    with record() as forward:
        got = part(*own)
        end = loss(got) if loss else (got * mine(random)).sum()
    with record() as backward:
        end.backward()
    pairs = {"loss": (end, loss(expected))} if loss else {"y": (got, mine(expected))}
    pairs |= {f"x{i or ''}": (a.grad, mine(b.grad)) for i, (a, b) in enumerate(zip(own, every, strict=True))
              if b.requires_grad}
    errors = {name: _off(*pair, relative) for name, pair in pairs.items()} | _off_by_name(gradients(), relative)
    return Trial(errors, forward=forward, backward=backward)


def train(
    model: nn.Module, step: Callable[[Tensor, Tensor], Any], batches: Batches, steps: int = 2, *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    clip: Callable[[list[nn.Parameter]], Any] | None = None, names: Mapping[str, str] | None = None, part: Any = None,
) -> Run:
    """On a rank, or in one process: train a model, and note what happens.

    Parameters
    ----------
    step : callable
        ``step(x, y)`` leaves the gradients of a batch in the model, and returns the loss if this rank has one.
    batches : callable
        ``batches(number)`` -> what this process reads at a step: tokens and targets.
    optimizer : callable
        Of the parameters.
    clip : callable, optional
        ``clip(parameters)`` scales the gradients, and returns their norm.
    names : dict of str to str, optional
        The names that the model's parameters have in the whole model, if others.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # two gathers are slow
    named = {(names or {}).get(name, name): p for name, p in model.named_parameters()}
    made, losses, norms, gradients, held = optimizer(named.values()), [], [], {}, Memory()
    for number in range(steps):
        batch = batches(number)
        with record() as ledger:
            loss = step(*batch)
        losses.append(full(loss).item() if isinstance(loss, Tensor) else loss)
        if number == 0:
            zero = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
            gradients = {name: full(gradient).cpu().clone() for name, gradient in zero.items()}
        norms += [clip([*named.values()])] if clip else []
        with record() as stepping:
            made.step()
        held = held_memory(model, made)
        made.zero_grad()
    weights = {name: full(p).cpu().clone() for name, p in named.items()}
    return Run(part, losses, gradients, weights, ledger, stepping, norms, held)


def one_process(model: nn.Module, batches: Batches, steps: int = 2, **options: Any) -> Run:
    """Train the whole model with whole batches; options are those of `train`."""

    def step(x: Tensor, y: Tensor) -> float:
        loss = loss_of(model, x, y)
        loss.backward()
        return loss.item()

    return train(model, step, batches, steps, **options)


def differences(runs: Sequence[Run], reference: Run, relative: Sequence[str] = ()) -> dict[str, float]:
    """Return the largest difference of all ranks from one process, of "losses", "gradients" and "weights".

    The loss of a step is the mean over the ranks that have one. What `relative` names is a share of the largest number.

    Raises
    ------
    ValueError
        If the ranks do not have all the weights of the model.
    """
    if missing := reference.weights.keys() - {name for run in runs for name in run.weights}:
        raise ValueError(f"no rank has {', '.join(sorted(missing))}")
    each = [[loss for loss in losses if loss] for losses in zip(*(run.losses for run in runs), strict=True)]
    means = [torch.tensor(sum(losses) / max(1, len(losses)), dtype=torch.float64) for losses in each]
    right = torch.tensor(reference.losses, dtype=torch.float64)
    found = {"losses": max(_off(*pair, "losses" in relative) for pair in zip(means, right, strict=True))}
    for what in ("gradients", "weights"):
        expected = getattr(reference, what)
        pairs = [{name: (t, expected[name]) for name, t in getattr(run, what).items()} for run in runs]
        found[what] = max(max(_off_by_name(of_rank, what in relative).values()) for of_rank in pairs)
    return found


def train_beside(
    model: nn.Module, step: Callable[[Tensor, Tensor], Any], whole: nn.Module, batches: Batches, steps: int = 2, *,
    mine: Batches | None = None, part_of: Callable[[Named], Named] = dict, relative: Sequence[str] = (),
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
) -> Comparison:
    """On each rank: train its part of a model with its part of the batches, beside the whole model with all of them.

    Parameters
    ----------
    model, step
        As `train` takes them.
    whole : nn.Module
        Trained by this process alone, with ``batches(number)``.
    mine : callable, optional
        ``mine(number)`` -> this rank's part of a batch; by default all of it.
    part_of : callable
        What a rank has of gradients or weights of the whole model, by name.
    relative
        As `differences` takes it.
    """
    run = train(model, step, mine or batches, steps, optimizer=optimizer)
    alone = one_process(whole, batches, steps, optimizer=optimizer)
    reference = Run(None, alone.losses, part_of(alone.gradients), part_of(alone.weights), alone.ledger)
    return Comparison(differences([run], reference, relative), run.ledger, run.stepping)
