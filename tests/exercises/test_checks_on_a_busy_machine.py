"""A right answer is never refused because the machine is slow: the official solutions, as a learner on one would run
them. The ranks are cold for the first check of a lesson (for each with --thorough), the limits are the learner's own,
and four other programs want the two cores.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from exercise_cases import ExerciseTests

from course_utils import shutdown

pytestmark = pytest.mark.guard(600)

LOOPS = 4
#: The lessons whose answers wait most and import most; the others with --thorough.
ALWAYS = ("ddp",)
TESTS = sorted(path.stem[5:-10] for path in Path(__file__).parent.glob("test_*_exercises.py"))


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Programs that never rest."""
    loop = "import os, time\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


def exercises_of(lesson: str) -> type[ExerciseTests]:
    module = importlib.import_module(f"test_{lesson}_exercises")
    found = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, ExerciseTests)]
    (tests,) = (each for each in found if each is not ExerciseTests)
    return tests


@pytest.mark.parametrize("lesson", TESTS)
def test_solutions_pass_beside_other_programs(lesson, request, monkeypatch):
    thorough = request.config.getoption("--thorough")
    if lesson not in ALWAYS and not thorough:
        pytest.skip("only with --thorough")
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(os.environ, "COURSE_STATUS", "0")
    tests = exercises_of(lesson)
    with busy_machine():
        for number, exercise in enumerate(tests.exercises()):
            if thorough or number == 0:
                shutdown()
            getattr(tests.checks, exercise)(tests.answer(exercise))
