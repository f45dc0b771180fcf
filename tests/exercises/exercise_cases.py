"""What the tests of all exercises share: answers out of the text, a register of wrong answers, one class of tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

from course_utils.checks import COMMON_HINTS, CheckFailed

SOURCES = Path(__file__).resolve().parents[2] / "sources"
STUB = 'raise NotImplementedError("Replace this line with your answer, then run the check below.")'
SOLUTION = re.compile(r"### BEGIN SOLUTION.*?### END SOLUTION", re.DOTALL)


@dataclass
class Mutant:
    """A wrong answer to ``exercise``, refused with ``hint``; ``hangs`` if its ranks wait for each other for ever."""

    exercise: str
    hint: str
    hangs: bool
    answer: Callable


def register_of(mutants: list[Mutant]) -> Callable[..., Callable[[Callable], Callable]]:
    """A decorator ``mutant(exercise, hint, hangs=False)`` that adds the function to ``mutants``."""

    def mutant(exercise: str, hint: str, hangs: bool = False) -> Callable[[Callable], Callable]:
        def register(answer: Callable) -> Callable:
            mutants.append(Mutant(exercise, hint, hangs, answer))
            return answer

        return register

    return mutant


class ExerciseTests:
    """Tests of one exercise notebook; a subclass names the modules of its checks and of its wrong answers."""

    checks: ModuleType
    mutants: ModuleType

    def __init_subclass__(cls) -> None:
        cloudpickle.register_pickle_by_value(cls.mutants)  # ranks cannot import from this folder

    @classmethod
    def exercises(cls) -> list[str]:
        """The names of the checks: those public functions that take an answer ``fn``."""
        public = {name: getattr(cls.checks, name) for name in cls.checks.__all__}
        return [name for name, check in public.items() if "fn" in getattr(check, "__annotations__", ())]

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "exercise" in metafunc.fixturenames:
            metafunc.parametrize("exercise", cls.exercises())
        if "mutant" in metafunc.fixturenames:
            ids = [f"{m.exercise}-{m.answer.__name__}" for m in cls.mutants.MUTANTS]
            metafunc.parametrize("mutant", cls.mutants.MUTANTS, ids=ids)

    @classmethod
    def cells(cls) -> list[tuple[str, str]]:
        """The code cells of the exercise text: what stands behind ``# %%``, and the code."""
        topic = cls.checks.__name__.rpartition(".")[2]
        (source,) = (p for p in SOURCES.glob("*_exercises.py") if f"import {topic} as check" in p.read_text("utf-8"))
        parts = re.split(r"^# %%(.*)$", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
        cells = zip(parts[1::2], parts[2::2], strict=True)
        return [(head.strip(), code.strip()) for head, code in cells if "[markdown]" not in head]

    @classmethod
    def answer(cls, name: str, stub: bool = False) -> Callable:
        """The function between the markers, or its empty stub; functions that the text gives are there."""
        names: dict = {"__name__": "__main__"}
        for head, code in cls.cells():
            if "parameters" in head or SOLUTION.search(code):
                exec(SOLUTION.sub(STUB, code) if stub else code, names)
            elif code.startswith("def "):  # a function that the text gives
                given = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
                exec(compile(ast.Module(given, []), head, "exec"), names)
        return names[name]

    @classmethod
    def refusal(cls, name: str, answer: Callable) -> CheckFailed:
        with pytest.raises(CheckFailed) as caught:
            getattr(cls.checks, name)(answer)
        return caught.value

    def test_every_exercise_has_solution_and_check_side_by_side(self):
        found = [code for _, code in self.cells()]
        matches = ((i, re.match(r"check\.(\w+)\((\w+)\)$", cell)) for i, cell in enumerate(found))
        checked = [(i, match[1]) for i, match in matches if match]
        assert sorted(name for _, name in checked) == sorted(self.exercises())
        for i, name in checked:
            assert f"def {name}(" in found[i - 1] and SOLUTION.search(found[i - 1])

    def test_solution_passes_and_says_so_in_one_line(self, exercise, capsys):
        getattr(self.checks, exercise)(self.answer(exercise))
        said = capsys.readouterr().out
        assert re.fullmatch(r"Exercise \d+ passed.*\n", said), said

    def test_empty_stub_fails_with_a_clear_message(self, exercise):
        error = self.refusal(exercise, self.answer(exercise, stub=True))
        assert error.hint == "empty"
        assert "there is no answer yet" in str(error)

    def test_wrong_answer_is_refused_with_its_own_hint(self, mutant):
        error = self.refusal(mutant.exercise, mutant.answer)
        assert error.hint == mutant.hint, str(error)
        text = (COMMON_HINTS | self.checks.HINTS[mutant.exercise]).get(mutant.hint)
        if text:
            assert " ".join(text.split()) in " ".join(str(error).split())
        if mutant.hangs:
            assert re.search("do not finish:|wait for others", str(error)) and "last operation" in str(error)

    def test_every_hint_has_a_wrong_answer_that_gets_it(self, exercise):
        given = {m.hint for m in self.mutants.MUTANTS if m.exercise == exercise}
        assert set(self.checks.HINTS[exercise]) <= given
