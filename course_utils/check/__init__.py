"""What all exercise checks share: run an answer on real ranks, compare it, read its ledger, refuse it with a hint."""

from __future__ import annotations

from .compare import close, number, show, values, whole_number, whole_numbers
from .formulas import paper
from .hints import COMMON_HINTS
from .program import Case, Note, answer_with, exercise, hints_of
from .runs import BACKEND, TIMEOUT, CheckFailed, Exercise, Outcome, checked
from .traffic import crosses, fault, message_steps, sent

__all__ = [
    "BACKEND", "COMMON_HINTS", "TIMEOUT", "Case", "CheckFailed", "Exercise", "Note", "Outcome", "answer_with",
    "checked", "close", "crosses", "exercise", "fault", "hints_of", "message_steps", "number", "paper", "sent", "show",
    "values", "whole_number", "whole_numbers",
]
