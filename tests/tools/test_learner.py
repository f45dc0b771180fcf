"""The learner's copy of the course: nothing that was changed is ever lost, and the rest is kept up to date."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import conftest
import nbformat
import psutil
import pytest
from conftest import ROOT, missing

from tools import ToolError, learner

LESSON, EXERCISE, SCRIPT = "notebooks/02_small.ipynb", "exercises/02_small_exercises.ipynb", "scripts/slurm/train.py"
TOLD = f"{EXERCISE} is yours and stays; for its new version: make restore L=02_small_exercises"


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course of one lesson with its outputs, its exercise and a program."""
    root = tmp_path / "course"
    put(root / LESSON, "# Does it work?", "print('yes')", output="yes\n")
    put(root / EXERCISE, "# Write it", "raise NotImplementedError")
    (root / SCRIPT).parent.mkdir(parents=True)
    (root / SCRIPT).write_text("print(1)\n")
    return root


@pytest.fixture
def work(course: Path) -> Path:
    """A copy of that course."""
    learner.copy(course / "work", course)
    return course / "work"


def put(path: Path, text: str, code: str, output: str = "") -> None:
    """Write a notebook of one text and one code cell."""
    cell = nbformat.v4.new_code_cell(code, id="code", execution_count=1 if output else None)
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=output)] if output else []
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text, id="text"), cell]), path)


def answer(path: Path, code: str = "return 42") -> bytes:
    """Write into the last code cell, as a learner does; return the file."""
    nb = nbformat.read(path, as_version=4)
    nb.cells[-1].source = code
    nbformat.write(nb, path)
    return path.read_bytes()


def open_and_run(path: Path) -> bytes:
    """Leave in a notebook what JupyterLab leaves when it is opened, run with Shift+Enter and saved; return the file."""
    nb = nbformat.read(path, as_version=4)
    nb.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    nb.cells[-1] |= {"metadata": {"trusted": True}, "execution_count": 7}
    nb.cells[-1].outputs = [nbformat.v4.new_output("stream", name="stdout", text="yes\n")]
    nb.cells.append(nbformat.v4.new_code_cell(""))
    nbformat.write(nb, path)
    return path.read_bytes()


def texts(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {learner.MANIFEST}


def test_copy_has_every_file_without_outputs(course: Path, work: Path):
    assert files(work) == {LESSON, EXERCISE, SCRIPT}
    cell = nbformat.read(work / LESSON, as_version=4).cells[-1]
    assert (cell.source, cell.outputs, cell.execution_count) == ("print('yes')", [], None)
    assert nbformat.read(course / LESSON, as_version=4).cells[-1].outputs, "the committed notebook keeps its own"


def test_second_copy_writes_nothing_and_brings_back_what_is_missing(course: Path, work: Path):
    ran, mine = open_and_run(work / LESSON), answer(work / EXERCISE)
    assert learner.copy(work, course) == []
    assert [(work / name).read_bytes() for name in (LESSON, EXERCISE)] == [ran, mine]
    (work / SCRIPT).unlink()
    assert learner.copy(work, course) == [f"new in {work}: {SCRIPT}"]


def test_new_version_replaces_what_was_only_run_and_is_told_once_of_what_was_changed(course: Path, work: Path):
    open_and_run(work / LESSON)
    mine = answer(work / EXERCISE)
    put(course / LESSON, "# Does it still work?", "print('yes')", output="yes\n")
    put(course / EXERCISE, "# Write it well", "raise NotImplementedError")
    assert learner.copy(work, course) == [f"updated in {work}: {LESSON}", TOLD]
    assert texts(work / LESSON) == ["# Does it still work?", "print('yes')"]
    assert (work / EXERCISE).read_bytes() == mine and learner.copy(work, course) == []
    learner.restore(work, ["02_small_exercises"], course)
    assert texts(work / EXERCISE)[0] == "# Write it well"
    (kept,) = (work / "saved").rglob("*.ipynb")
    assert kept.read_bytes() == mine


def test_lesson_that_the_course_drops_is_removed_unless_it_was_changed(course: Path, work: Path):
    open_and_run(work / LESSON)
    mine, original = answer(work / EXERCISE), (course / EXERCISE).read_bytes()
    for name in (LESSON, EXERCISE):
        (course / name).unlink()
    learner.copy(work, course)
    assert files(work) == {EXERCISE, SCRIPT} and (work / EXERCISE).read_bytes() == mine
    (course / EXERCISE).write_bytes(original)
    assert learner.copy(work, course) == [TOLD] and (work / EXERCISE).read_bytes() == mine


@pytest.mark.parametrize("manifest", [None, "[]"])
def test_lost_or_damaged_manifest_loses_no_answers(course: Path, work: Path, manifest: str | None):
    mine = answer(work / EXERCISE)
    (work / learner.MANIFEST).unlink()
    if manifest is not None:
        (work / learner.MANIFEST).write_text(manifest)
    assert learner.copy(work, course) == [TOLD]
    assert (work / EXERCISE).read_bytes() == mine and learner.copy(work, course) == []


def test_restore_gives_fresh_lessons_and_keeps_changed_and_broken_ones(course: Path, work: Path):
    mine = answer(work / EXERCISE)
    (work / SCRIPT).write_text("not Python")
    (work / "own.ipynb").write_text("{}")
    open_and_run(work / LESSON)
    said = learner.restore(work, (), course)[-1]
    saved = Path(re.fullmatch(r"yours are in (\S+): .*", said)[1])
    assert files(saved) == {EXERCISE, SCRIPT} and (saved / EXERCISE).read_bytes() == mine
    assert saved.parent == work / "saved" and (saved / SCRIPT).read_text() == "not Python"
    assert texts(work / EXERCISE)[-1] == "raise NotImplementedError" and (work / "own.ipynb").exists()
    assert nbformat.read(work / LESSON, as_version=4).cells[-1].outputs == []
    assert learner.restore(work, (), course)[-1] == "none of them was changed, so nothing was put aside"


@pytest.mark.parametrize("given", ["2", EXERCISE])
def test_restore_takes_a_lesson_by_number_or_name_twice_a_second(course: Path, work: Path, given: str):
    put(course / "exercises/03_other_exercises.ipynb", "# Other", "pass")
    learner.copy(work, course)
    other, kept = answer(work / "exercises/03_other_exercises.ipynb"), []
    for number in (1, 2):
        kept.append(answer(work / EXERCISE, f"return {number}"))
        learner.restore(work, [given], course)
    assert sorted(path.read_bytes() for path in (work / "saved").rglob("*.ipynb")) == sorted(kept)
    assert (work / "exercises/03_other_exercises.ipynb").read_bytes() == other


def test_what_cannot_be_done_is_said_in_a_sentence(course: Path, work: Path, tmp_path: Path):
    with pytest.raises(ToolError, match="the course has no lesson 17; it has 02"):
        learner.restore(work, ["17"], course)
    for place in ("", "notebooks", "exercises/mine", ".."):
        with pytest.raises(ToolError, match="holds the course itself; choose another folder, such as .*/course/work"):
            learner.copy(course / place, course)
    command = [sys.executable, "-m", "tools", "restore", "99", "--folder", tmp_path / "new"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"the course has no lesson 99; it has 00, 01, .*\n", done.stderr)


def test_everything_that_notebooks_reach_by_relative_path_is_in_the_copy(tmp_path: Path):
    learner.copy(tmp_path)
    lost = set()
    for path in tmp_path.glob("*/*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            reached = re.findall(r"""["'`(](\.\./[\w./-]+)""", source)
            if cell["cell_type"] == "markdown":
                reached += re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", source)
            lost |= {(path.name, name) for name in reached if not (path.parent / name).exists()}
    assert lost == set()


def test_one_course_serves_many_learners_who_cannot_write_to_it(tmp_path: Path):
    """As on a shared server: course and environment can only be read, and here the home folder is closed as well."""
    if not shutil.which("bwrap") or subprocess.run(["bwrap", "--ro-bind", "/", "/", "true"]).returncode:
        missing("bubblewrap")
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    command = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--bind", tmp_path, tmp_path, "--unshare-user"]
    command += ["--uid", "1000", sys.executable, "-m", "tools", "copy"]
    for folder, code, said in ((tmp_path / "ann", 0, "new in "), (tmp_path / "ann", 0, "is up to date"),
                               (ROOT / "work", 1, "work cannot be written to; choose a folder of yours")):
        done = subprocess.run([*command, folder], env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code and said in done.stdout + done.stderr, done.stderr


@pytest.mark.guard(60)
def test_notebooks_are_compared_in_a_copy_outside_of_the_course():
    """In `make test` every lesson runs where a learner's does: with the files that a copy has, and no others."""
    manager, folder = conftest._kernel_manager(kernel_name="python3"), "notebooks"
    manager.start_kernel(cwd=str(ROOT / folder))
    try:
        place = Path(psutil.Process(manager.provisioner.pid).cwd())
    finally:
        manager.shutdown_kernel(now=True)
    assert place.name == folder and not place.is_relative_to(ROOT)
    assert (place.parent / "scripts").is_dir() and not (place.parent / "course_utils").exists()
