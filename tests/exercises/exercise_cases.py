"""What the tests of all exercises share: answers made from the text, wrong and right ones, one class of tests.

Wrong and right answers stand beside the tests of a lesson as ``{exercise: {hint or name: answer}}``. An answer is

- an edit of the solution, ``"old  ->  new"``, or several that belong together, ``{old: new, …}``;
- a function, where the algorithm is another one;
- either of them in ``hangs(…)``, if its ranks wait for each other for ever;
- a list of such answers, one test each.

An edit is for the cell of the exercise, without the markers. An old text that is not there is looked for in the cells
before it, whose functions the solution calls. In both it must stand exactly once.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from course_utils.check import COMMON_HINTS, CheckFailed
from course_utils.check.edits import EditError, edited

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
SOLUTION = re.compile(r"### BEGIN SOLUTION.*?### END SOLUTION", re.DOTALL)
MARKER = re.compile(r"^ *### (BEGIN|END) SOLUTION\n?", re.MULTILINE)


@dataclass
class Hanging:
    """An answer whose ranks wait for each other for ever."""

    answer: Any


def hangs(answer: str | Mapping[str, str] | Callable) -> Hanging:
    """Mark an answer as one whose ranks wait for each other for ever."""
    return Hanging(answer)


@dataclass
class Case:
    """One answer to ``exercise``; ``name`` is the hint that a wrong one is refused with, or what a right one does."""

    exercise: str
    name: str
    answer: str | Mapping[str, str] | Callable
    hangs: bool = False
    number: int = 1

    def __str__(self) -> str:
        return f"{self.exercise}-{self.name}" + (f"-{self.number}" if self.number > 1 else "")


def cases(answers: Mapping[str, Mapping[str, Any]]) -> list[Case]:
    """The answers of a lesson one by one."""
    found = []
    for exercise, named in answers.items():
        for name, some in named.items():
            for number, answer in enumerate(some if isinstance(some, list) else [some], 1):
                hanging = isinstance(answer, Hanging)
                found.append(Case(exercise, name, answer.answer if hanging else answer, hanging, number))
    return found


def functions_in(code: str) -> str:
    """The functions and classes that a cell defines, without what it does with them."""
    given = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return "\n\n\n".join(ast.get_source_segment(code, node) or "" for node in given)


class ExerciseTests:
    """Tests of one exercise notebook; a subclass names the module of its checks, its wrong and its right answers."""

    checks: ModuleType
    WRONG: Mapping[str, Mapping[str, Any]] = {}
    RIGHT: Mapping[str, Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        cloudpickle.register_pickle_by_value(sys.modules[cls.__module__])  # ranks cannot import from this folder

    @classmethod
    def exercises(cls) -> list[str]:
        """The names of the checks: those public functions of the module itself that take an answer ``fn``."""
        public = {name: getattr(cls.checks, name) for name in cls.checks.__all__}
        own = {name: each for name, each in public.items() if getattr(each, "__module__", "") == cls.checks.__name__}
        return [name for name, check in own.items() if "fn" in getattr(check, "__annotations__", ())]

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "exercise" in metafunc.fixturenames:
            metafunc.parametrize("exercise", cls.exercises())
        for name, answers in {"wrong": cls.WRONG, "right": cls.RIGHT}.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, cases(answers), ids=str)

    @classmethod
    def cells(cls) -> list[tuple[list[str], str]]:
        """The code cells of the exercise text: their tags, and the code."""
        from tools.author.notebooks import code_cells  # here, for ranks import this module too

        calls = [f"\ncheck.{name}({name})\n" for name in cls.exercises()]
        texts = {path: path.read_text("utf-8") for path in LESSONS.glob("*/exercises.py")}
        (source,) = (path for path, text in texts.items() if all(call in text for call in calls))
        return code_cells(source)

    @classmethod
    def program(cls, name: str, edits: str | Mapping[str, str] = (), stub: bool = False) -> str:
        """The parameters, the functions that the text gives and the solutions, with edits for exercise ``name``."""
        from tools.author.notebooks import STUB

        parts, own = [], None
        for tags, code in cls.cells():
            if SOLUTION.search(code):
                if f"def {name}(" in code:
                    own = len(parts)
                parts.append(SOLUTION.sub(STUB, code) if stub else MARKER.sub("", code))
            elif "parameters" in tags:
                parts.append(code)
            elif code.startswith(("def ", "class ")):
                parts.append(functions_in(code))
        if own is None:
            raise LookupError(f"no cell between markers defines {name}")
        before, answer, after = "\n\n\n".join(parts[:own]), parts[own], "\n\n\n".join(parts[own + 1 :])
        for edit in [edits] if isinstance(edits, str) else [{old: new} for old, new in dict(edits).items()]:
            old = edit.split("  ->")[0].rstrip() if isinstance(edit, str) else next(iter(edit))
            if old in answer or old not in before:
                answer = edited(answer, edit)
            else:
                before = edited(before, edit)
        return "\n\n\n".join([before, answer, after])

    @classmethod
    def answer(cls, name: str, edits: str | Mapping[str, str] = (), stub: bool = False) -> Callable:
        """The function between the markers, as it is or with edits; or its empty stub."""
        names: dict = {"__name__": "__main__"}  # so that ranks get what it uses by value
        program = cls.program(name, edits, stub)
        file = f"<{name}, {zlib.crc32(program.encode()):08x}>"
        linecache.cache[file] = (len(program), None, program.splitlines(True), file)  # its lines are known, as a cell's
        exec(compile(program, file, "exec"), names)
        return names[name]

    @classmethod
    def answer_of(cls, case: Case) -> Callable:
        return case.answer if callable(case.answer) else cls.answer(case.exercise, case.answer)

    @classmethod
    def wrong(cls, exercise: str, hint: str, number: int = 1) -> Callable:
        """A wrong answer that stands in WRONG, for a test of what the refusal says."""
        return cls.answer_of(
            next(c for c in cases(cls.WRONG) if (c.exercise, c.name, c.number) == (exercise, hint, number))
        )

    @classmethod
    def refusal(cls, name: str, answer: Callable) -> CheckFailed:
        with pytest.raises(CheckFailed) as caught:
            getattr(cls.checks, name)(answer)
        return caught.value

    @classmethod
    def misfits(cls) -> Iterator[str]:
        """What is wrong with the edits of the class, all at once."""
        for kind, answers in {"WRONG": cls.WRONG, "RIGHT": cls.RIGHT}.items():
            seen: dict[str, str] = {}
            for case in cases(answers):
                if callable(case.answer):
                    continue
                try:
                    program = cls.program(case.exercise, case.answer)
                    compile(program, str(case), "exec")
                except (EditError, SyntaxError, LookupError) as error:
                    yield f"{kind} {case}: {error}"
                else:
                    other = seen.setdefault(f"{case.exercise} {program}", str(case))
                    if other != str(case):
                        yield f"{kind} {case}: the same program as {other}"

    def test_every_exercise_has_solution_and_check_side_by_side(self):
        found = [code for _, code in self.cells()]
        matches = ((i, re.match(r"check\.(\w+)\((\w+)\)$", cell)) for i, cell in enumerate(found))
        checked = [(i, match[1]) for i, match in matches if match and match[1] in self.exercises()]
        assert sorted(name for _, name in checked) == sorted(self.exercises())
        for i, name in checked:
            assert f"def {name}(" in found[i - 1] and SOLUTION.search(found[i - 1])

    def test_edits_fit_the_solutions(self):
        assert not list(self.misfits())

    def test_answers_are_to_exercises_that_exist(self):
        assert set(self.WRONG) | set(self.RIGHT) <= set(self.exercises())

    def test_solution_passes_and_says_so_in_one_line(self, exercise, capsys):
        getattr(self.checks, exercise)(self.answer(exercise))
        said = capsys.readouterr().out
        assert re.fullmatch(r"Exercise \d+ passed.*\n", said), said

    def test_empty_stub_fails_with_a_clear_message(self, exercise):
        error = self.refusal(exercise, self.answer(exercise, stub=True))
        assert error.hint == "empty"
        assert "there is no answer yet" in str(error)

    def test_wrong_answer_is_refused_with_its_own_hint(self, wrong):
        error = self.refusal(wrong.exercise, self.answer_of(wrong))
        assert error.hint == wrong.name, str(error)
        text = (COMMON_HINTS | self.checks.HINTS[wrong.exercise]).get(wrong.name)
        if text:
            assert " ".join(text.split()) in " ".join(str(error).split())
        if wrong.hangs:
            assert re.search("do not finish:|wait for others", str(error)) and "last operation" in str(error)

    def test_right_answer_in_another_style_passes(self, right):
        getattr(self.checks, right.exercise)(self.answer_of(right))

    def test_every_hint_has_a_wrong_answer_that_gets_it(self, exercise):
        slips = getattr(getattr(self.checks, exercise), "slips", ())  # of a problem on paper
        assert set(self.checks.HINTS[exercise]) <= {*self.WRONG.get(exercise, ()), *slips}

    def test_two_right_answers_in_other_styles_stand_here(self, exercise):
        assert len(cases({exercise: self.RIGHT.get(exercise, {})})) >= 2
