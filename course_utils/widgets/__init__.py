"""Interactive explorers: controls that redraw a stored picture, so that a saved notebook shows it too."""

from .stepper import collective_stepper

__all__ = ["collective_stepper"]
