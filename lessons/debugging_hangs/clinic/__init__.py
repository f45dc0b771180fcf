"""Clinics: broken programs as patients, each from a public report, to be diagnosed by evidence and cured by a change.

`hangs` is the one of lesson 14: programs whose ranks wait for each other in vain, or are wrong in silence. `servers` is
a ward of it for lesson 17. Lesson 16 has one of faults between two hosts, made of the same parts.
"""

from __future__ import annotations

from . import hangs
from ._wards import Clinic, Patient

__all__ = ["Clinic", "Patient", "hangs"]
