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
from nbformat.sign import NotebookNotary

from course_utils import learner
from course_utils.grading.assignments import assignments
from course_utils.grading.collect import collect
from course_utils.learner import CourseError

LESSON, EXERCISE, SCRIPT = "notebooks/02_small.ipynb", "exercises/02_small_exercises.ipynb", "scripts/slurm/train.py"
TOLD = f"{EXERCISE} is yours and stays; for its new version: make restore L=02_small_exercises"


@pytest.fixture(autouse=True)
def own_signatures(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path_factory.mktemp("data")))


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


@pytest.mark.guard(60)
@pytest.mark.parametrize("folder", ["notebooks", "solutions"])
def test_notebooks_are_compared_in_a_copy_outside_of_the_course(folder: str):
    """In `make test` every lesson runs where a learner's does: with the files that a copy has, and no others."""
    manager = conftest._kernel_manager(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT / folder))
    try:
        place = Path(psutil.Process(manager.provisioner.pid).cwd())
    finally:
        manager.shutdown_kernel(now=True)
    assert place.name == folder and not place.is_relative_to(ROOT)
    assert (place.parent / "scripts").is_dir() and not (place.parent / "course_utils").exists()


def put(path: Path, text: str, code: str, output: str = "") -> None:
    """Write a notebook of one text and one code cell."""
    cell = nbformat.v4.new_code_cell(code, id="code", execution_count=1 if output else None)
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=output)] if output else []
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text, id="text"), cell])
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)


def texts(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


def answer(path: Path, code: str = "return 42") -> bytes:
    """Write into the last code cell, as a learner does; return the file."""
    nb = nbformat.read(path, as_version=4)
    [cell for cell in nb.cells if cell.cell_type == "code"][-1].source = code
    nbformat.write(nb, path)
    return path.read_bytes()


def open_and_run(path: Path) -> None:
    """Leave in a notebook what JupyterLab leaves when it is opened, run with Shift+Enter, folded and saved."""
    nb = nbformat.read(path, as_version=4)
    nb.metadata.language_info = {"name": "python", "version": "3.11.7", "file_extension": ".py"}
    nb.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    nb.cells[-1].metadata = {"trusted": True, "scrolled": False, "execution": {"iopub.status.busy": "now"}}
    nb.cells[-1].execution_count = 7
    nb.cells[-1].outputs = [nbformat.v4.new_output("stream", name="stdout", text="yes\n")]
    nb.cells.append(nbformat.v4.new_code_cell(""))
    nbformat.write(nb, path)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {learner.MANIFEST}


def test_copy_has_every_file_without_outputs(course: Path, work: Path):
    assert files(work) == {LESSON, EXERCISE, SCRIPT}
    cell = nbformat.read(work / LESSON, as_version=4).cells[-1]
    assert (cell.source, cell.outputs, cell.execution_count) == ("print('yes')", [], None)
    assert nbformat.read(course / LESSON, as_version=4).cells[-1].outputs, "the committed notebook keeps its own"
    assert (work / SCRIPT).read_text() == "print(1)\n"


def test_copied_notebooks_are_trusted(work: Path):
    notary = NotebookNotary(data_dir=os.environ["JUPYTER_DATA_DIR"])
    assert notary.check_signature(nbformat.read(work / LESSON, as_version=4))


def test_second_copy_writes_no_lesson_and_says_nothing(course: Path, work: Path):
    open_and_run(work / LESSON)
    before = {name: (work / name).read_bytes() for name in files(work)}
    assert learner.copy(work, course) == []
    assert {name: (work / name).read_bytes() for name in files(work)} == before


def test_unchanged_copy_is_replaced_even_if_it_was_opened_run_and_saved(course: Path, work: Path):
    open_and_run(work / LESSON)
    put(course / LESSON, "# Does it still work?", "print('yes')", output="yes\n")
    assert learner.copy(work, course) == [f"updated in {work}: {LESSON}"]
    assert texts(work / LESSON) == ["# Does it still work?", "print('yes')"]
    assert files(work) == {LESSON, EXERCISE, SCRIPT}


def test_new_outputs_in_the_course_change_nothing(course: Path, work: Path):
    answer(work / LESSON)
    put(course / LESSON, "# Does it work?", "print('yes')", output="yes, indeed\n")
    assert learner.copy(work, course) == []


def test_changed_copy_stays_and_the_new_version_is_told_once(course: Path, work: Path):
    mine = answer(work / EXERCISE)
    put(course / EXERCISE, "# Write it well", "raise NotImplementedError")
    assert learner.copy(work, course) == [TOLD]
    assert (work / EXERCISE).read_bytes() == mine and files(work) == {LESSON, EXERCISE, SCRIPT}
    assert learner.copy(work, course) == []
    learner.restore(work, ["02_small_exercises"], course)
    assert texts(work / EXERCISE)[0] == "# Write it well"
    (kept,) = (work / "saved").rglob("*.ipynb")
    assert kept.read_bytes() == mine


def test_changed_copy_without_a_new_version_is_left_alone(course: Path, work: Path):
    mine = answer(work / EXERCISE)
    assert learner.copy(work, course) == []
    assert (work / EXERCISE).read_bytes() == mine


def test_deleted_copy_comes_back_fresh(course: Path, work: Path):
    answer(work / EXERCISE)
    (work / EXERCISE).unlink()
    assert learner.copy(work, course) == [f"new in {work}: {EXERCISE}"]
    assert texts(work / EXERCISE)[-1] == "raise NotImplementedError"


def test_lesson_that_the_course_drops_is_removed_unless_it_was_changed(course: Path, work: Path):
    open_and_run(work / LESSON)
    mine = answer(work / EXERCISE)
    for name in (LESSON, EXERCISE):
        (course / name).unlink()
    assert learner.copy(work, course) == [
        f"{EXERCISE} is no longer part of the course; your copy, which you have changed, stays",
        f"removed, because the course no longer has it: {LESSON}",
    ]
    assert files(work) == {EXERCISE, SCRIPT} and (work / EXERCISE).read_bytes() == mine
    assert learner.copy(work, course) == []


def test_dropped_lesson_that_returns_does_not_overwrite_what_was_kept(course: Path, work: Path):
    mine, original = answer(work / EXERCISE), (course / EXERCISE).read_bytes()
    (course / EXERCISE).unlink()
    learner.copy(work, course)
    (course / EXERCISE).write_bytes(original)
    assert learner.copy(work, course) == [TOLD]
    assert (work / EXERCISE).read_bytes() == mine
    assert learner.copy(work, course) == []


def test_file_of_the_learners_own_under_a_new_lessons_name_stays(course: Path, work: Path):
    put(work / "notebooks/03_next.ipynb", "# Mine", "pass")
    put(course / "notebooks/03_next.ipynb", "# The course's", "pass")
    (said,) = learner.copy(work, course)
    assert said == "notebooks/03_next.ipynb is yours and stays; for its new version: make restore L=03_next"
    assert texts(work / "notebooks/03_next.ipynb")[0] == "# Mine"


@pytest.mark.parametrize("manifest", [None, "", "[]", '{"notebooks/02_small.ipynb": 3}'])
def test_lost_or_damaged_manifest_loses_no_answers(course: Path, work: Path, manifest: str | None):
    mine = answer(work / EXERCISE)
    (work / learner.MANIFEST).unlink()
    if manifest is not None:
        (work / learner.MANIFEST).write_text(manifest)
    assert learner.copy(work, course) == [TOLD]
    assert (work / EXERCISE).read_bytes() == mine
    assert learner.copy(work, course) == []


@pytest.mark.parametrize("content", ["", "{}", "not a notebook"])
def test_broken_notebook_of_the_learner_counts_as_changed(course: Path, work: Path, content: str):
    (work / LESSON).write_text(content)
    assert learner.copy(work, course) == []
    assert (work / LESSON).read_text() == content
    learner.restore(work, ["02"], course)
    (kept,) = (work / "saved").rglob("*.ipynb")
    assert kept.read_text() == content and texts(work / LESSON)[0] == "# Does it work?"


def test_program_that_the_learner_has_changed_stays(course: Path, work: Path):
    (work / SCRIPT).write_text("print(2)\n")
    (course / SCRIPT).write_text("print(3)\n")
    learner.copy(work, course)
    assert (work / SCRIPT).read_text() == "print(2)\n"


def test_restore_gives_fresh_lessons_and_keeps_changed_ones(course: Path, work: Path):
    mine = answer(work / EXERCISE)
    open_and_run(work / LESSON)
    (work / "own.ipynb").write_text("{}")
    (saved,) = {line.split()[3].rstrip(":") for line in learner.restore(work, (), course) if line.startswith("yours")}
    assert files(Path(saved)) == {EXERCISE} and (Path(saved) / EXERCISE).read_bytes() == mine
    assert Path(saved).parent == work / "saved"
    assert texts(work / EXERCISE)[-1] == "raise NotImplementedError"
    assert nbformat.read(work / LESSON, as_version=4).cells[-1].outputs == []
    assert (work / "own.ipynb").exists()
    assert learner.restore(work, (), course)[1] == "none of them was changed, so nothing was put aside"


@pytest.mark.parametrize("given", ["02", "2", "02_small_exercises", EXERCISE])
def test_restore_takes_a_lesson_by_number_or_name(course: Path, work: Path, given: str):
    put(course / "exercises/03_other_exercises.ipynb", "# Other", "pass")
    learner.copy(work, course)
    mine = answer(work / EXERCISE), answer(work / "exercises/03_other_exercises.ipynb")
    learner.restore(work, [given], course)
    (kept,) = (work / "saved").rglob("*.ipynb")
    assert kept.read_bytes() == mine[0] and kept.name == Path(EXERCISE).name
    assert (work / "exercises/03_other_exercises.ipynb").read_bytes() == mine[1]


def test_two_restores_in_one_second_keep_both(course: Path, work: Path):
    kept = []
    for number in (1, 2):
        kept.append(answer(work / EXERCISE, f"return {number}"))
        learner.restore(work, ["02"], course)
    assert sorted(path.read_bytes() for path in (work / "saved").rglob("*.ipynb")) == sorted(kept)


def test_unknown_lesson_is_refused_with_those_there_are(course: Path, work: Path):
    with pytest.raises(CourseError, match="the course has no lesson 17; it has 02"):
        learner.restore(work, ["17"], course)
    assert files(work) == {LESSON, EXERCISE, SCRIPT}


@pytest.mark.parametrize("place", ["", "notebooks", "exercises/mine", ".."])
def test_course_itself_is_not_taken_for_a_copy(course: Path, place: str):
    with pytest.raises(CourseError, match="holds the course itself; choose another folder, such as .*/course/work"):
        learner.copy(course / place, course)


def test_folder_that_cannot_be_written_to_is_named(course: Path):
    (course / "work").write_text("a file")
    with pytest.raises(CourseError, match=r"work cannot be written to \(File exists\); choose a folder of yours"):
        learner.copy(course / "work", course)


def test_damaged_notebook_of_the_course_is_named(course: Path, work: Path):
    (course / LESSON).write_text("<<<<<<< HEAD")
    with pytest.raises(CourseError, match=f"{LESSON} is not a notebook any more; get it again: git checkout HEAD -- "):
        learner.copy(work, course)


def test_command_line_says_what_is_wrong_in_a_sentence(tmp_path: Path):
    command = [sys.executable, "-m", "course_utils", "restore", "99", "--folder", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r"the course has no lesson 99; it has 00, 01, .*\n", done.stderr)


def test_everything_that_notebooks_reach_by_relative_path_is_in_the_copy(tmp_path: Path):
    learner.copy(tmp_path)
    lost = set()
    for path in tmp_path.glob("*/*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert not cell.get("outputs")
            source = "".join(cell["source"])
            reached = re.findall(r"""["'`(](\.\./[\w./-]+)""", source)
            if cell["cell_type"] == "markdown":
                reached += re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", source)
            lost |= {(path.name, name) for name in reached if not (path.parent / name).exists()}
    assert lost == set()


def test_whole_copy_that_is_handed_in_counts_by_its_exercises(tmp_path: Path):
    learner.copy(tmp_path / "ann")
    answered = tmp_path / "ann" / "exercises" / "02_collectives_exercises.ipynb"
    answer(answered)
    (hand_in,) = collect(tmp_path, assignments(ROOT))
    assert (hand_in.person, hand_in.path) == ("ann", answered)
    assert hand_in.notes == ["a whole copy of the course; only its exercises count"]


def test_one_course_serves_many_learners_who_cannot_write_to_it(tmp_path: Path):
    """As on a shared server: course and environment can only be read, and here the home folder is closed as well."""
    if not shutil.which("bwrap") or subprocess.run(["bwrap", "--ro-bind", "/", "/", "true"]).returncode:
        missing("bubblewrap")
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    command = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--bind", tmp_path, tmp_path, "--unshare-user"]
    command += ["--uid", "1000", sys.executable, "-m", "course_utils", "copy"]

    def copy(*folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *folder], env=environment, cwd=ROOT, capture_output=True, text=True)

    for folder in ("ann", "bob"):
        done = copy(tmp_path / folder)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(rf"new in {tmp_path / folder}: \d+ files\n", done.stdout)
        mine = answer(tmp_path / folder / "exercises" / "02_collectives_exercises.ipynb", f"'{folder}'")
        assert copy(tmp_path / folder).stdout == f"{tmp_path / folder} is up to date\n"
        assert (tmp_path / folder / "exercises" / "02_collectives_exercises.ipynb").read_bytes() == mine
    done = copy()
    assert done.returncode == 1 and done.stdout == ""
    assert "work cannot be written to (" in done.stderr and "-m course_utils lab ~/course" in done.stderr
