"""Whoever makes a mistake with FFCV gets a clear error soon, right programs get what they wrote, compiled once.

The programs, expressions in `ffcv_mistakes`, run in a process of their own. One that waits for ever is killed at its
time limit and counts as a failure; the next one gets a new process.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, missing

from lessons.ffcv_data_loading.ffcv import fixes

pytestmark = pytest.mark.guard(600)

LIMIT = 240  # seconds for a program; most need one, the first to compile a hundred on a busy machine
LONG = 100_000  # samples: the list of what is left to do is longer than a pipe holds
ENDS = {  # what FFCV waits for ever in, or (the last two) reads wrongly: the error that says what to do
    "write(lambda: np.zeros((40, 40), np.uint8))":
        "RuntimeError: writing failed at sample 17: IndexError.*image.convert.'RGB'.",
    "write(lambda: np.zeros((1000, 1000, 3), np.uint8))":
        "RuntimeError: .* at sample 17: .*3000000 but page size is 2097152.*page_size=",
    f"write(not_found, {LONG})": "RuntimeError: writing failed at sample 17: FileNotFoundError: n01440764_18.JPEG",
    "list(loader([DECODE(), Own(does_not_compile), ToTensor()]))":
        "RuntimeError: FFCV failed in the pipeline: TypingError.*there_is_no_such_thing",
    "loader([DECODE(), ToTensor(), ToTorchImage(), NORMALISE])":
        "ValueError: NormalizeImage works on NumPy arrays: put it before ToTensor",
    "list(loader([DECODE(), ToTorchImage()]))": "ValueError: ToTorchImage works on tensors: put ToTensor.. before it",
}
RETURNS = {  # what went wrong silently, and what is right
    "loop_left_by_break()": [],
    "images_come_back()": True,
    "nothing_is_compiled_again()": [0, 0],
    "leaves_quietly()": True,
}


def run(folder: Path, *programs: str) -> Iterator[dict]:
    """Yield what each program says. One that does not end is killed, and those after it run in another process."""
    left = list(programs)
    while left:
        command = [sys.executable, ROOT / "tests" / "models" / "ffcv_mistakes.py", folder, *left]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1, env=environment,
            start_new_session=True,
        )
        with child, selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            try:
                while left and selector.select(LIMIT) and (line := child.stdout.readline()):
                    left.pop(0)
                    yield json.loads(line)
                if left:  # it hangs or has died
                    yield {"program": left.pop(0), "error": f"no answer within {LIMIT} s, exit code {child.poll()}"}
                    child.kill()
                else:
                    errors = child.communicate(timeout=LIMIT)[1]
                    yield {"program": "end", "value": [child.returncode, errors]}
            finally:
                child.kill()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    if reason := fixes.missing():
        missing(f"FFCV ({reason})")
    said = run(tmp_path_factory.mktemp("ffcv"), *ENDS, *RETURNS)
    return {answer["program"]: answer for answer in said}


@pytest.mark.parametrize("program", ENDS)
def test_what_would_hang_ends_with_a_clear_error(answers: dict, program: str):
    said = answers[program].get("error", "no error")
    assert re.search(ENDS[program], said, re.DOTALL), said


@pytest.mark.parametrize("program", RETURNS)
def test_programs_get_what_they_should(answers: dict, program: str):
    assert answers[program].get("value", answers[program]) == RETURNS[program]


def test_the_process_ends_quietly_in_the_middle_of_a_loop(answers: dict):
    assert answers["end"]["value"] == [0, ""]


def test_the_next_process_compiles_nothing(answers: dict, tmp_path: Path):
    assert next(run(tmp_path, "nothing_is_compiled_again()"))["value"] == [0, 0]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch):
    """`missing` asked afresh, on a machine that is told to be another."""
    fixes.missing.cache_clear()
    yield monkeypatch
    fixes.missing.cache_clear()


@pytest.mark.parametrize(("version", "says"), [((3, 11, 9), "not installed"), ((3, 13, 1), "needs Python 3.11")])
def test_what_is_missing_comes_with_the_command(ask, version: tuple, says: str):
    ask.setattr(sys, "platform", "linux")
    ask.setattr(sys, "version_info", version)
    ask.setattr(fixes.importlib.util, "find_spec", lambda name: None)
    assert says in fixes.missing()
    assert "make ffcv" in fixes.missing()
