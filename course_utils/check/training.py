"""What the checks of training steps share: a small net with data, what one process computes, exact comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Exercise, close, show
from .compare import listed, slip_of

__all__ = [
    "EXACT", "INPUTS", "OUTPUTS", "ROUNDS", "Passes", "average", "batches_of", "compare", "compare_tensor",
    "difference", "exact", "gradients_of", "loss_gradient", "regression_net", "sample_table", "trained_parameters",
    "weighted_sum", "weights_of",
]

EXACT = 1e-12  # tolerance in float64, relative and absolute
INPUTS, OUTPUTS = 5, 3  # of the net
ROUNDS = 2  # how often a check of accumulation calls the answer, with other samples each time

# ------------------------------------------------------------------------------------------------ a model by name


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the gradients by name; zeros where there is none."""
    trained = trained_parameters(module).items()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters by name."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def weighted_sum(parts: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The sum of tensors of the same name, each part times its weight."""
    return {name: sum(w * part[name] for w, part in zip(weights, parts, strict=True)) for name in parts[0]}


def average(parts: Sequence[dict[str, Tensor]], divisor: float | None = None) -> dict[str, Tensor]:
    """The sum of tensors of the same name, divided by ``divisor``: the number of parts if None."""
    return {name: sum(part[name] for part in parts) / (divisor or len(parts)) for name in parts[0]}


# ------------------------------------------------------------------------------------------------ comparison


def exact(got: Any, expected: Tensor) -> bool:
    """Whether a tensor has the expected shape, and the expected numbers to 1e-12."""
    same = isinstance(got, Tensor) and got.shape == expected.shape
    return same and torch.allclose(got.double(), expected, rtol=EXACT, atol=EXACT)


def difference(got: Any, expected: Tensor) -> str:
    """Two lines for a message: the numbers of one process and of this rank, from the first that differs on."""
    start = 0
    if isinstance(got, Tensor) and got.shape == expected.shape:
        near = torch.isclose(got.double(), expected, rtol=EXACT, atol=EXACT)
        start = int((~near).flatten().nonzero()[0])
    return f"\n  one process  {show(expected, start)}\n  this rank    {show(got, start)}"


def compare_tensor(
    exercise: Exercise, got: Any, expected: Tensor, slips: Mapping[str, Any], what: str, default: str = ""
) -> None:
    """Refuse a tensor that is not equal to 1e-12.

    Parameters
    ----------
    exercise : Exercise
    got, expected : tensor
    slips : mapping
        Hint key to the tensor that a usual slip leads to, or a list of such: they say which hint is given.
    what : str
        What the tensor is, for the message.
    default : str
        Hint key of all other wrong tensors; if there is none, *shape* or *value*.
    """
    if exact(got, expected):
        return
    alike = "value" if isinstance(got, Tensor) and got.shape == expected.shape else "shape"
    key = slip_of(slips, lambda wrong: close(got, wrong), default or alike)
    if "float32" in exercise.hints and close(got, expected):
        key = "float32"
    exercise.refuse(key, f"{what} is wrong.{difference(got, expected)}")


def compare(
    exercise: Exercise, rank: int, got: dict, expected: dict, traps: dict[str, Any], what: str, default: str = "value"
) -> None:
    """Refuse tensors, by name, that are not equal to 1e-12; of ``rank``, with hints as `compare_tensor` gives them."""
    with exercise.on_rank(rank, exercise.where):
        for name, right in expected.items():
            if not exact(got[name], right):
                slips = {key: [wrong[name] for wrong in listed(some)] for key, some in traps.items()}
                compare_tensor(exercise, got[name], right, slips, f"{what} of {name}", default)


# ------------------------------------------------------------------------------------------------ a net with data


def regression_net() -> nn.Sequential:
    """A net of two layers in float64, the same with every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(INPUTS, 7), nn.Tanh(), nn.Linear(7, OUTPUTS)).double()


def sample_table(count: int, seed: int) -> Tensor:
    """Inputs and targets side by side, of shape (count, INPUTS + OUTPUTS), float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, INPUTS + OUTPUTS, generator=generator, dtype=torch.float64)


def batches_of(table: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Consecutive batches (x, y) of the given sizes."""
    rows = table[: sum(sizes)].split(list(sizes)) if sizes else []
    return [(part[:, :INPUTS].clone(), part[:, INPUTS:].clone()) for part in rows]


def loss_gradient(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradient of the mean loss of a batch, by name."""
    net.zero_grad()
    F.mse_loss(net(x), y).backward()
    return gradients_of(net)


class Passes:
    """What goes through a module from now on.

    Attributes
    ----------
    largest : int
        Samples of the largest batch.
    alive : int
        The most forwards at a time whose backward had not begun, so that their activations were all in memory.
    """

    def __init__(self, module: nn.Module):
        self.largest = self.alive = 0
        self._open: set[int] = set()
        self._calls = 0
        module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        self.largest = max(self.largest, len(inputs[0]))
        if output.requires_grad:
            self._calls += 1
            call = self._calls
            self._open.add(call)
            self.alive = max(self.alive, len(self._open))
            output.register_hook(lambda gradient: self._open.discard(call))
