"""What a check is told of the machine, and how it says that it cannot run there."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CheckError", "Setting", "Skip", "need"]


class Skip(Exception):
    """A check cannot run here; the message says why, in one sentence."""


@dataclass(frozen=True)
class Setting:
    """Where a check runs.

    Attributes
    ----------
    on : {"gpu", "cpu"}
        On the CPU the same code runs with small sizes, to see that it works; what it measures says nothing of GPUs.
    ranks : int
        One for each GPU; two on the CPU.
    folder : pathlib.Path
        Where files that are kept go.
    """

    on: str
    ranks: int
    folder: Path

    @property
    def backend(self) -> str:
        """NCCL on GPUs, else gloo."""
        return "nccl" if self.on == "gpu" else "gloo"

    @property
    def device(self) -> str:
        """The first device, as torch names it."""
        return "cuda:0" if self.on == "gpu" else "cpu"

    def choose(self, gpu: Any, cpu: Any) -> Any:
        """One of two values: for GPUs, or for a try on the CPU."""
        return gpu if self.on == "gpu" else cpu

    def need_gpu(self, why: str) -> None:
        """Raise `Skip` on the CPU."""
        if self.on != "gpu":
            raise Skip(f"needs a GPU: {why}")


def need(what: str, *modules: str) -> None:
    """Raise `Skip` if Python has not all of these modules, for the sake of `what`."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise Skip(f"{what} needs {', '.join(missing)}, which this Python does not have")


class CheckError(AssertionError):
    """What a check found is wrong; ``facts`` is what it had found until then."""

    def __init__(self, reason: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.facts = facts or {}
