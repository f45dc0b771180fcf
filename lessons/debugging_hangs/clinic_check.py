"""What the checks of clinics share: a cure is one change, tried by a run (private)."""

from __future__ import annotations

from typing import Any

from course_utils.check.runs import Exercise

from .clinic import Patient

__all__ = ["treat"]


def treat(exercise: Exercise, patient: Patient, cure: dict[str, Any]) -> None:
    """Try a cure on a patient whose cause is known; refuse one that cannot be applied, or does not heal."""
    exercise.require(len(cure) <= 1, "several", f"the cure changes {len(cure)} things: {', '.join(map(str, cure))}.")
    try:
        verdict = patient.treat(**cure)
    except (TypeError, ValueError) as error:
        exercise.refuse("cure-form", f"the cure cannot be applied: {error}.")
    exercise.require(bool(verdict), "cure", f"the cause is right, the cure {cure} does not heal.\n\n{verdict}")
