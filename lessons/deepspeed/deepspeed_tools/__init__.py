"""What lesson 08 needs of DeepSpeed: whether it is here, a clean start on each rank, results, a configuration check."""

from __future__ import annotations

from course_utils.lazy import attach

from .config_check import check_config, check_file, report
from .config_reading import Finding, read_file, what_runs

__all__ = [
    "Finding", "Runs", "check_config", "check_file", "missing", "prepare", "quiet", "read_file", "report", "what_runs",
]

#: This loads torch, which the check of a configuration does without.
__getattr__, __dir__ = attach(__name__, {"runs": ("Runs", "missing", "prepare", "quiet")})
