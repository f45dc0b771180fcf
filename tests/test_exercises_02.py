"""The exercises on collectives: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import mutants_02
import pytest

from course_utils.checks import COMMON_HINTS, CheckFailed, message_steps
from course_utils.checks import c02 as checks
from course_utils.ledger import Entry

pytestmark = pytest.mark.guard(60)
cloudpickle.register_pickle_by_value(mutants_02)  # ranks cannot import from this folder

SOURCE = Path(__file__).resolve().parent.parent / "sources" / "02_collectives_exercises.py"
STUB = 'raise NotImplementedError("Replace this line with your answer, then run the check below.")'
EXERCISES = [name for name in checks.__all__ if name != "HINTS"]
ON_RANKS = [name for name in EXERCISES if "timeout" in getattr(checks, name).__annotations__]
HANG_SECONDS = 1.5  # enough for a right answer to end, short enough for a suite
PATIENCE = {name: {"timeout": 30.0} for name in ON_RANKS}


def cells() -> list[str]:
    """The code cells of the exercise text."""
    parts = re.split(r"^# %%(.*)$", SOURCE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [code.strip() for head, code in zip(parts[1::2], parts[2::2], strict=True) if "[markdown]" not in head]


def answers(stubs: bool) -> dict[str, Callable]:
    """The functions between the markers by name, or their empty stubs."""
    solutions = [cell for cell in cells() if "### BEGIN SOLUTION" in cell]
    if stubs:
        solutions = [
            re.sub(r"### BEGIN SOLUTION.*?### END SOLUTION", STUB, cell, flags=re.DOTALL) for cell in solutions
        ]
    names: dict = {"__name__": "__main__"}
    exec(next(cell for cell in cells() if cell.startswith("import torch")), names)
    for cell in solutions:
        exec(cell, names)
    return {name: names[name] for name in EXERCISES}


def refusal(name: str, answer: Callable, **options: float) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        getattr(checks, name)(answer, **options)
    return caught.value


def test_every_exercise_has_solution_and_check_side_by_side():
    found = cells()
    checked = [(i, match[1]) for i, cell in enumerate(found) if (match := re.match(r"check\.(\w+)\((\w+)\)$", cell))]
    assert sorted(name for _, name in checked) == sorted(EXERCISES)
    for i, name in checked:
        assert f"def {name}(" in found[i - 1] and "### BEGIN SOLUTION" in found[i - 1]


@pytest.mark.parametrize("name", EXERCISES)
def test_solution_passes_and_says_so_in_one_line(name, capsys):
    getattr(checks, name)(answers(stubs=False)[name], **PATIENCE.get(name, {}))
    said = capsys.readouterr().out
    assert re.fullmatch(r"Exercise \d+ passed.*\n", said), said


@pytest.mark.parametrize("name", EXERCISES)
def test_empty_stub_fails_with_a_clear_message(name):
    error = refusal(name, answers(stubs=True)[name], **PATIENCE.get(name, {}))
    assert error.hint == "empty"
    assert "there is no answer yet" in str(error)


@pytest.mark.parametrize("case", mutants_02.MUTANTS, ids=lambda m: f"{m.exercise}-{m.answer.__name__}")
def test_wrong_answer_is_refused_with_its_own_hint(case):
    options = {"timeout": HANG_SECONDS} if case.hangs else PATIENCE.get(case.exercise, {})
    error = refusal(case.exercise, case.answer, **options)
    assert error.hint == case.hint, str(error)
    text = (COMMON_HINTS | checks.HINTS[case.exercise]).get(case.hint)
    if text:
        assert " ".join(text.split()) in " ".join(str(error).split())
    if case.hangs:
        assert re.search("do not finish within|wait for others", str(error)) and "last operation" in str(error)


@pytest.mark.parametrize("name", EXERCISES)
def test_every_hint_has_a_wrong_answer_that_gets_it(name):
    given = {m.hint for m in mutants_02.MUTANTS if m.exercise == name}
    assert set(checks.HINTS[name]) <= given


def test_refusal_names_exercise_ranks_and_both_values():
    wrong = next(m for m in mutants_02.MUTANTS if m.answer.__name__ == "mean_not_sum")
    text = str(refusal(wrong.exercise, wrong.answer, timeout=30.0))
    assert text.startswith("Exercise 3, 2 ranks, x of shape (2, 3), rank 0: the result is wrong.")
    assert re.search(r"expected  shape \(2, 3\): [-\d.]+, .*\n  got       shape \(2, 3\): [-\d.]+, ", text)


def ledgers(*ranks: str) -> list[list[Entry]]:
    """Ledgers from text: ``s1 r2`` is a send to rank 1, then a receive from rank 2."""
    names = {"s": "send", "r": "recv"}
    return [[Entry(names[word[0]], "default", 8, int(word[1]), (), 1, 0.0) for word in text.split()] for text in ranks]


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [
        (("", ""), 0),
        (("s1", "r0"), 1),
        (("s1 s2 s3", "r0", "r0", "r0"), 3),  # hub
        (("r1 r2 r3", "s0", "s0", "s0"), 3),  # hub that receives
        (("s1", "r0 s2", "r1 s3", "r2"), 3),  # chain
        (("s1 s2", "r0 s3", "r0", "r1"), 2),  # tree
        (("s1 r1", "r0 s0"), 2),  # there and back
        (("s1 r1", "s0 r0"), 1),  # both at once
    ],
)
def test_steps_are_counted_from_the_order_of_messages(ranks, steps):
    assert message_steps(ledgers(*ranks)) == steps
