"""Exercises whose mistakes are rows of a table: right answers of another style pass, each mistake gets its hint."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import ModuleType

import pytest
from conftest import ROOT, missing

from course_utils.check import COMMON_HINTS, CheckFailed, answer_with
from course_utils.check.compare import listed
from course_utils.check.edits import EditError
from course_utils.check.program import hints_of

pytestmark = pytest.mark.guard(300)

EMPTY = {"### BEGIN SOLUTION": '### BEGIN SOLUTION\nraise NotImplementedError("Replace this line with your answer.")'}


def tables() -> dict[str, tuple[ModuleType, str]]:
    """Check module and name of each exercise that has a table, by room and name."""
    rooms = [path.parent.name for path in sorted(ROOT.glob("lessons/*/check.py"))]
    checks = {room: importlib.import_module(f"lessons.{room}.check") for room in rooms}
    found = {room: getattr(module, "MISTAKES", {}) for room, module in checks.items()}
    return {f"{room}.{name}": (checks[room], name) for room, names in found.items() for name in names}


EXERCISES = tables()


def found(exercise: str) -> tuple[ModuleType, str, Callable]:
    """Module, name and check of an exercise; skips one whose library is not there."""
    module, name = EXERCISES[exercise]
    check = getattr(module, name)
    if sentence := getattr(check, "missing", lambda: None)():
        missing(sentence)
    return module, name, check


def refusal(check, answer) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        check(answer)
    return caught.value


@pytest.mark.parametrize("exercise", EXERCISES)
def test_right_answers_pass_and_each_mistake_gets_its_own_hint(exercise, capsys):
    """That solutions pass is proven by their notebooks."""
    module, name, check = found(exercise)
    answers, right, mistakes = module.__name__.replace(".check", ".answers"), module.RIGHT[name], module.MISTAKES[name]
    assert len(right) >= 2 and len(mistakes) <= 8
    for answer in right.values():
        check(answer if callable(answer) else answer_with(answers, name, answer))
        assert re.search(r"^Exercise \d+ passed.*\n\Z", capsys.readouterr().out, re.MULTILINE)
    wrong = []
    for key, (_, *edits) in mistakes.items():
        for edit in listed(edits[0]) if edits else []:
            error = refusal(check, answer_with(answers, name, edit))
            hint = (COMMON_HINTS | hints_of(mistakes))[key]
            if error.hint != key or hint not in " ".join(str(error).split()):
                wrong.append(f"{key} by {edit!r}: {error.hint}\n{error}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_an_empty_stub_is_told(exercise):
    module, name, check = found(exercise)
    try:
        stub = answer_with(module.__name__.replace(".check", ".answers"), name, EMPTY)
    except EditError:  # the marks stand in a class beside the function
        return
    assert refusal(check, stub).hint == "empty"
