"""Try on a machine with GPUs all of the course that needs one, and write what was found: ``gpu-check``.

`runner` runs one check after the other, each in a process of its own with a time limit; `catalogue` lists them; the
modules with checks import torch, the standard library, and parts of the course that need nothing else. `report` says
what the JSON holds.
"""

from __future__ import annotations

from .catalogue import CHECKS
from .report import FAILED, PASSED, SCHEMA, SKIPPED, TIMED_OUT, faults, measured
from .runner import REPORT, TRACE, Check, command, run
from .setting import CheckError, Setting, Skip

__all__ = [
    "CHECKS", "FAILED", "PASSED", "REPORT", "SCHEMA", "SKIPPED", "TIMED_OUT", "TRACE", "Check", "CheckError",
    "Setting", "Skip", "command", "faults", "measured", "run",
]
