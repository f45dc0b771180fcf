"""Bytes on one rank by part, as the formulas, the tracker and the simulation give them."""

from __future__ import annotations

from dataclasses import astuple, dataclass

#: What memory is counted by.
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Attributes
    ----------
    parameters : float
        What the rank keeps of the model's parameters between steps: a shard under FSDP.
    gradients : float
        What it keeps of their gradients between backward and the optimizer step.
    optimizer : float
        States of the optimizer and, in mixed precision, the fp32 master weights.
    activations : float
        What forward leaves for backward, and what lives during forward.
    buffers : float
        The rest: gathered parameters, buckets, gradients of activations, temporaries, buffers of modules.
    """

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    buffers: float = 0

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer: the model states of the ZeRO paper."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(astuple(self))

    def parts(self) -> dict[str, float]:
        """Return the bytes by name, in the order of `PARTS`."""
        return dict(zip(PARTS, astuple(self), strict=True))


@dataclass(frozen=True)
class Simulated:
    """What `memory.simulate` saw on rank 0.

    Attributes
    ----------
    states : Memory
        Held after the optimizer step, gradients included: no activations, and no gathered parameters.
    peak : Memory
        At the largest total of the step.
    history : tuple of (str, Memory)
        After forward, backward and the optimizer step.
    seconds : float
        Time the simulation took on its rank.
    """

    states: Memory
    peak: Memory
    history: tuple[tuple[str, Memory], ...]
    seconds: float
