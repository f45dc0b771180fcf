"""Problems for paper: a solution's formula makes the check, and its mistakes are the formula with an edit."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .compare import listed
from .hints import PAPER_HINTS
from .program import answer_with, hints_of
from .runs import Exercise, checked

__all__ = ["paper"]

Formula = Callable[..., Any]
Result = tuple[float | str, ...]

_TRIES = 100  # draws of a case that the formula can compute and that is none of the fixed ones


def paper(
    title: str,
    solution: Formula,
    mistakes: Mapping[str, tuple],
    *,
    cases: Sequence[tuple],
    units: Sequence[str],
    tolerance: float = 0.01,
    allowed: Callable[..., bool] | None = None,
) -> Any:
    """The check of a problem for paper, ``check(fn)``, whose formula is its solution.

    It compares the answer with the formula on the fixed cases, and on one more that is drawn at each call. An answer
    that equals a mistake of the formula gets that mistake's hint.

    Parameters
    ----------
    title : str
        Such as ``Exercise 3``.
    mistakes : mapping
        Key to a hint and the edits of the formula that make the mistake: see `program`.
    cases : sequence of tuple
        Arguments. The first are those of the text; the others refuse an answer that was typed, not computed, and tell
        the mistakes apart. The drawn case takes each argument from one of them at random.
    units : sequence of str
        Of each number that the formula returns, for the messages; a word instead of a number has an empty unit.
    tolerance : float
        Relative.
    allowed : callable
        Says of drawn arguments whether they make sense together.
    """
    hints = PAPER_HINTS | hints_of(mistakes)

    @functools.cache
    def wrong_formulas() -> list[tuple[str, Formula]]:
        edits = ((key, edit) for key, (_, *some) in mistakes.items() for edit in (listed(some[0]) if some else []))
        return [(key, answer_with(solution.__module__, solution.__name__, edit)) for key, edit in edits]

    def check(fn: Callable) -> None:
        run, answers, drawn = Exercise(title, hints), [], _drawn(solution, cases, allowed)
        for case in [*cases, *([drawn] if drawn else [])]:
            run.case = f"arguments {_arguments(fn, case)}"
            got, right = _numbers(run.call(fn, *case)), _numbers(solution(*case))
            told = _quantities(got or (), units)
            complete = got is not None and len(got) == len(units)
            run.require(complete, "number", f"the function returned {told or 'no number'}.")
            kinds = [isinstance(g, str) == isinstance(r, str) for g, r in zip(got, right, strict=True)]
            run.require(all(kinds), "number", f"the function returned {told}.")
            answers.append(got)
            if not _agree(got, right, tolerance):
                key = _mistake(fn, wrong_formulas(), [case, *cases], tolerance)
                key = key or ("drawn" if len(answers) > len(cases) else "numbers")
                typed = len(answers) > 1 and got == answers[0]
                run.differs("typed" if typed else key, "the answer is wrong.", _quantities(right, units), told)
        run.passed(f": {_quantities(answers[0], units)}.")

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(check, name, getattr(solution, name))
    check = checked(check)
    check.formula, check.cases = solution, list(cases)
    return check


def _drawn(formula: Formula, cases: Sequence[tuple], allowed: Callable[..., bool] | None) -> tuple | None:
    """A case with each argument from one of ``cases``, which ``formula`` can compute; None if there is no new one."""
    known, rng = list(cases), random.Random()
    for _ in range(_TRIES):
        case = tuple(rng.choice(column) for column in zip(*cases, strict=True))
        if case in known or allowed is not None and not allowed(*case):
            continue
        try:
            result = _numbers(formula(*case))
        except (ArithmeticError, ValueError, LookupError):
            continue
        if result is not None and all(isinstance(v, str) or math.isfinite(v) for v in result):
            return case
    return None


def _mistake(fn: Callable, wrongs: list[tuple[str, Formula]], cases: Sequence[tuple], tolerance: float) -> str | None:
    """The key of the mistake that gives the first case's answer; where several do, of one that gives the others' too.

    The case in the text may not tell two mistakes apart: the second of two factors of 2, and the 2 bytes of an element.
    """
    fitting = wrongs
    for number, case in enumerate(cases):
        got = _result(fn, case)
        fit = [pair for pair in fitting if _agree(got or (), _result(pair[1], case) or (math.nan,), tolerance)]
        fitting = fit if number == 0 else fit or fitting
        if len({key for key, _ in fitting}) < 2:
            break
    return fitting[0][0] if fitting else None


def _result(wrong: Formula, case: tuple) -> Result | None:
    """What a mistake, or an answer, gives for a case; None where it divides by zero, or the like."""
    try:
        return _numbers(wrong(*case))
    except Exception:
        return None


def _arguments(fn: Callable, case: tuple) -> str:
    """The arguments of a case in words, by the names that the answer gives them."""
    values = [f"{v:.6g}" if isinstance(v, int | float) else str(getattr(v, "name", "") or v) for v in case]
    code = getattr(fn, "__code__", None)
    if code and code.co_argcount == len(values):
        values = [f"{name} {value}" for name, value in zip(code.co_varnames, values, strict=False)]
    return ", ".join(values)


def _numbers(value: Any) -> Result | None:
    """Numbers and words of a result: one, a list or tuple, or an array of them; None for anything else."""
    try:
        if isinstance(value, np.ndarray | torch.Tensor):
            value = value.tolist()
        several = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(str(v) if isinstance(v, str) else float(v) for v in several)
    except (TypeError, ValueError, OverflowError):
        return None


def _agree(got: Result, expected: Result, tolerance: float) -> bool:
    return len(got) == len(expected) and all(
        g == e if isinstance(e, str) or isinstance(g, str) else math.isclose(g, e, rel_tol=tolerance)
        for g, e in zip(got, expected, strict=True)
    )


def _quantities(numbers: Sequence[float | str], units: Sequence[str]) -> str:
    labels = [*units, *[""] * len(numbers)]
    texts = [number if isinstance(number, str) else f"{number:.4g}" for number in numbers]
    return ", ".join(f"{text} {unit}".strip() for text, unit in zip(texts, labels, strict=False))
