"""Interactive explorers: controls that redraw a stored picture, so that a saved notebook shows it too."""

from .bits import bits_explorer
from .chooser import algorithm_chooser
from .context import context_explorer
from .cost import cost_calculator
from .memory import memory_calculator
from .mesh import mesh_explorer
from .pipeline_schedules import schedule_explorer
from .stepper import all_reduce_stepper, collective_stepper
from .topology import topology_explorer

__all__ = [
    "algorithm_chooser",
    "all_reduce_stepper",
    "bits_explorer",
    "collective_stepper",
    "context_explorer",
    "cost_calculator",
    "memory_calculator",
    "mesh_explorer",
    "schedule_explorer",
    "topology_explorer",
]
