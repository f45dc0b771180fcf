"""Interactive explorers: controls that redraw a stored picture, so that a saved notebook shows it too."""

from .chooser import algorithm_chooser
from .explorer import topology_explorer
from .stepper import all_reduce_stepper, collective_stepper

__all__ = ["algorithm_chooser", "all_reduce_stepper", "collective_stepper", "topology_explorer"]
