"""Clinics: broken programs as patients, each from a public report, to be diagnosed by evidence and cured by a change.

A `Clinic` does not know what its patients suffer from. `hangs` is the one of lesson 14: programs whose ranks wait for
each other in vain, or are wrong in silence. Lesson 16 has one of faults between two hosts.
Another is made from cases, causes, evidence, cures, and a function that runs a case.
"""

from __future__ import annotations

from . import hangs
from ._cases import Case, Cause, Detail, Evidence, Finding, Symptom, Verdict
from ._tables import Table
from ._wards import Clinic, Patient

__all__ = [
    "Case", "Cause", "Clinic", "Detail", "Evidence", "Finding", "Patient", "Symptom", "Table", "Verdict", "hangs",
]
