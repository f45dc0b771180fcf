"""What all exercise checks share: run an answer on real ranks, compare it, read its ledger, refuse it with a hint."""

from __future__ import annotations

from ._hints import load_hints
from .compare import close, number, show, values, whole_number, whole_numbers
from .formulas import paper, paper_problem, wrong_formulas
from .program import Case, Note, answer_with, exercise
from .runs import BACKEND, COMMON_HINTS, TIMEOUT, CheckFailed, Exercise, Outcome, checked
from .traffic import crosses, message_steps, sent

__all__ = [
    "BACKEND", "COMMON_HINTS", "TIMEOUT", "Case", "CheckFailed", "Exercise", "Note", "Outcome", "answer_with",
    "checked", "close", "crosses", "exercise", "load_hints", "message_steps", "number", "paper", "paper_problem",
    "sent", "show", "values", "whole_number", "whole_numbers", "wrong_formulas",
]
