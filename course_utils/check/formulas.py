"""Problems for paper: a formula and its usual slips make the check, and the slips are the formula with an edit."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ._hints import COMMON, read_hints
from .compare import listed
from .edits import edited_function
from .program import hints_of
from .runs import Exercise, checked

__all__ = ["draw_mixed", "paper", "paper_problem", "wrong_formulas"]

Formula = Callable[..., Any]
Slip = str | Mapping[str, str] | Formula

_HINTS = read_hints(COMMON)["paper"]
_TRIES = 100  # draws of a case that the formula can compute and that is none of the fixed ones


def paper_problem(
    title: str,
    *,
    cases: Sequence[tuple],
    slips: Mapping[str, Slip | list[Slip]],
    hints: Mapping[str, str],
    units: Sequence[str],
    tolerance: float = 0.01,
    allowed: Callable[..., bool] | None = None,
    draw: Callable[[random.Random], tuple | None] | None = None,
) -> Callable[[Formula], Callable[[Callable], None]]:
    """Decorate the right formula of a problem: what it is decorated to is the check, ``check(fn)``.

    The check compares the answer ``fn`` with the formula on the fixed cases, and on one more that is drawn at each
    call. An answer that equals a slip of the formula gets that slip's hint.

    Parameters
    ----------
    title : str
        Such as ``Exercise 3``.
    cases : sequence of tuple
        Arguments. The first are those of the text; the others refuse an answer that was typed, not computed, and tell
        the slips apart.
    hints : mapping
        Hint key to text.
    units : sequence of str
        Of each number that the formula returns, for the messages; a word instead of a number has an empty unit.
    tolerance : float
        Relative.
    slips : mapping
        Hint key to a slip, or a list of several. A slip is an edit of the formula's body, as `edits.edited` takes it:
        ``"batch / (dp * b)  ->  batch / b"`` or ``{old: new, …}``; or a function of the same arguments.
    allowed : callable
        Says of arguments whether they make sense together. By default the drawn case takes each argument from one of
        the fixed cases at random.
    draw : callable
        Draws a case itself, given a `random.Random`; ``None`` in place of a case means none.

    Notes
    -----
    The check has the attributes ``formula``, ``slips``, ``cases``, ``hints`` and ``tolerance``; `wrong_formulas` makes
    its slips into functions.
    """
    texts = _HINTS | dict(hints)

    def decorate(formula: Formula) -> Callable[[Callable], None]:
        def check(fn: Callable) -> None:
            drawn = (draw or functools.partial(draw_mixed, formula, cases, allowed=allowed))(random.Random())
            wrongs = functools.partial(_pairs, check)
            _judge(title, fn, formula, cases, wrongs, texts, units, tolerance, drawn)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(check, name, getattr(formula, name))
        check = checked(check)
        check.formula, check.slips, check.cases = formula, dict(slips), list(cases)
        check.hints, check.tolerance = dict(hints), tolerance
        return check

    return decorate


def paper(title: str, solution: Formula, mistakes: Mapping[str, tuple], **keys: Any) -> Any:
    """The check of a problem for paper, whose formula is its solution; ``keys`` are those of `paper_problem`.

    A mistake is a hint, and the edits of the solution that make it: see `program`.
    """
    slips = {key: edits[0] for key, (_, *edits) in mistakes.items() if edits}
    return paper_problem(title, slips=slips, hints=hints_of(mistakes), **keys)(solution)


def wrong_formulas(check: Any) -> dict[str, list[Formula]]:
    """Of a check that `paper_problem` made: hint key to the functions that make its slips, in the order of the table.

    Raises
    ------
    EditError
        An edit does not fit the formula.
    """
    return {
        key: [slip if callable(slip) else edited_function(check.formula, slip) for slip in listed(some)]
        for key, some in check.slips.items()
    }


def draw_mixed(
    formula: Formula, cases: Sequence[tuple], rng: random.Random, allowed: Callable[..., bool] | None = None
) -> tuple | None:
    """A case with each argument from one of ``cases``, which ``formula`` can compute; None if there is no new one."""
    known = list(cases)
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


def _pairs(check: Any) -> Iterator[tuple[str, Formula]]:
    return ((key, wrong) for key, some in wrong_formulas(check).items() for wrong in some)


def _judge(
    title: str,
    fn: Callable,
    right: Formula,
    cases: Sequence[tuple],
    wrongs: Callable[[], Iterator[tuple[str, Formula]]],
    hints: dict[str, str],
    units: Sequence[str],
    tolerance: float,
    drawn: tuple | None = None,
) -> None:
    exercise = Exercise(title, hints)
    answers = []
    for case in [*cases, *([] if drawn is None else [drawn])]:
        exercise.case = f"arguments {_arguments(fn, case)}"
        got, expected = _numbers(exercise.call(fn, *case)), _numbers(right(*case))
        text = _quantities(got or (), units)
        complete = got is not None and len(got) == len(units)
        exercise.require(complete, "number", f"the function returned {text or 'no number'}.")
        words = [(isinstance(g, str), isinstance(e, str)) for g, e in zip(got, expected, strict=True)]
        exercise.require(all(g == e for g, e in words), "number", f"the function returned {text}.")
        answers.append(got)
        if not _agree(got, expected, tolerance):
            key = _slip(fn, wrongs(), [case, *cases], tolerance)
            key = key or ("drawn" if len(answers) > len(cases) else "numbers")
            if len(answers) > 1 and got == answers[0]:
                key = "typed"
            exercise.refuse(
                key, f"the answer is wrong.\n  expected  {_quantities(expected, units)}\n  got       {text}"
            )
    print(f"{title} passed: {_quantities(answers[0], units)}.")


def _slip(fn: Callable, wrongs: Iterable[tuple[str, Formula]], cases: Sequence[tuple], tolerance: float) -> str | None:
    """The hint key of the slip that gives the first case's answer; where several do, of one that gives the others' too.

    The case in the text may not tell two slips apart: the second of two factors of 2, and the 2 bytes of an element.
    """
    fitting = list(wrongs)
    for number, case in enumerate(cases):
        got = _result(fn, case)
        fit = [pair for pair in fitting if _agree(got or (), _result(pair[1], case) or (math.nan,), tolerance)]
        fitting = fit if number == 0 else fit or fitting
        if len({key for key, _ in fitting}) < 2:
            break
    return fitting[0][0] if fitting else None


def _result(wrong: Formula, case: tuple) -> tuple[float | str, ...] | None:
    """What a slip, or an answer, gives for a case; None where it divides by zero, or the like."""
    try:
        return _numbers(wrong(*case))
    except Exception:
        return None


def _arguments(fn: Callable, case: tuple) -> str:
    """The arguments of a case in words, by the names that the answer gives them."""
    values = [f"{v:.6g}" if isinstance(v, int | float) else str(v) for v in case]
    code = getattr(fn, "__code__", None)
    if code and code.co_argcount == len(values):
        values = [f"{name} {value}" for name, value in zip(code.co_varnames, values, strict=False)]
    return ", ".join(values)


def _numbers(value: Any) -> tuple[float | str, ...] | None:
    """Numbers and words of a result: one, a list or tuple, or an array of them; None for anything else."""
    try:
        if isinstance(value, np.ndarray | torch.Tensor):
            value = value.tolist()
        several = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(str(v) if isinstance(v, str) else float(v) for v in several)
    except (TypeError, ValueError, OverflowError):
        return None


def _agree(got: tuple[float | str, ...], expected: tuple[float | str, ...], tolerance: float) -> bool:
    return len(got) == len(expected) and all(
        g == e if isinstance(e, str) or isinstance(g, str) else math.isclose(g, e, rel_tol=tolerance)
        for g, e in zip(got, expected, strict=True)
    )


def _quantities(numbers: Sequence[float | str], units: Sequence[str]) -> str:
    labels = [*units, *[""] * len(numbers)]
    texts = [number if isinstance(number, str) else f"{number:.4g}" for number in numbers]
    return ", ".join(f"{text} {unit}".strip() for text, unit in zip(texts, labels, strict=False))
