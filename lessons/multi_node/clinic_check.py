"""Check of the network clinic of lesson 16: causes and cures of its eight patients.

It takes the learner's function, prints one line if that passes, and raises :class:`CheckFailed` with a hint if not.
Every cure is tried: the patient's program runs again on emulated hosts, with the change. Any cure that heals is
accepted, also one that nobody thought of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_utils.check import Exercise, checked, load_hints
from lessons.debugging_hangs.clinic_check import treat

from .clinic import network

__all__ = ["HINTS", "diagnoses_and_cures"]

HINTS = load_hints(__file__)


def _answer(exercise: Exercise, answers: dict, number: int) -> tuple[str, dict[str, Any]]:
    """The answer for one patient; refuses another form."""
    exercise.require(number in answers, "missing", "the answers have no entry for it.")
    answer = answers[number]
    pair = isinstance(answer, tuple | list) and len(answer) == 2
    form = pair and isinstance(answer[0], str) and isinstance(answer[1], dict)
    exercise.require(form, "form", f"the answer is {str(answer)[:100]}.")
    return answer[0], answer[1]


@checked
def diagnoses_and_cures(fn: Callable) -> None:
    """Check ``fn()``: a dictionary from the number of each patient to its cause and the cure, a dict with one entry."""
    exercise = Exercise("The clinic", HINTS["diagnoses_and_cures"])
    answers = exercise.call(fn)
    exercise.require(isinstance(answers, dict), "form", f"the function returned {str(answers)[:100]}.")
    clinic = network.clinic()
    possible, sentence = clinic.available()
    for patient in clinic:
        exercise.case = f"patient {patient.number}"
        cause, cure = _answer(exercise, answers, patient.number)
        known = ", ".join(clinic.causes)
        exercise.require(cause in clinic.causes, "name", f"{cause!r} is no cause; allowed are {known}.")
        verdict = patient.diagnose(cause)
        exercise.require(bool(verdict), "cause", f"the cause is not {cause!r}.\n\n{verdict}")
        if possible:
            treat(exercise, patient, cure)
    count = len(clinic.patients)
    if possible:
        print(f"The clinic passed: {count} causes found, {count} patients healed, each by a run of its program.")
    else:
        print(f"{count} causes are right. The cures were not tried: {sentence}.")
