"""Every notebook, and the code beside it, keeps the conventions of the course that a program can check."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT

from tools.author.notebooks import below
from tools.author.rooms import texts

FOLDERS = ("notebooks", "exercises", "solutions")
LESSONS, EXERCISES, SOLUTIONS = (sorted((ROOT / folder).glob("[0-9][0-9]_*.ipynb")) for folder in FOLDERS)
EVERYWHERE = (LESSONS, EXERCISES, SOLUTIONS)
EMOJI = re.compile("[\U0001f000-\U0001faff\u2600-\u27bf\ufe0f]")
FILLERS = re.compile(r"\b(simply|obviously|as we all know|of course|trivially)\b", re.IGNORECASE)


def notebooks(*paths: list[Path]):
    return pytest.mark.parametrize("path", sum(paths, []), ids=lambda path: f"{path.parent.name}/{path.stem}")


@cache
def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def text_cells(path: Path) -> list:
    return [cell for cell in read(path).cells if cell.cell_type == "markdown"]


def text(cells: list) -> str:
    return "\n".join(cell.source for cell in cells)


def prose(path: Path) -> str:
    """The text without code, formulas, links' targets, pictures and HTML tags."""
    found = "\n\n".join(cell.source for cell in text_cells(path))
    for pattern in (r"```.*?```", r"`[^`]*`", r"\$\$.*?\$\$", r"\$[^$\n]*\$", r"!\[", r"\]\([^)]*\)", r"<[^>]*>"):
        found = re.sub(pattern, " ", found, flags=re.DOTALL)
    return found


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def linked(cells: list) -> set[str]:
    """Paths of links in Markdown to other files of the course."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text(cells))
    return {link for link in links if not re.match(r"https?:|mailto:", link)}


def test_every_lesson_and_exercise_was_built():
    sources = texts(ROOT)
    assert {path.stem for path in LESSONS} == {name for name in sources if not name.endswith("_exercises")}
    exercises = {name.removesuffix("_exercises") for name in sources if name.endswith("_exercises")}
    assert {path.stem.removesuffix("_exercises") for path in EXERCISES} == exercises
    assert {path.stem.removesuffix("_solutions") for path in SOLUTIONS} == exercises
    assert LESSONS and EXERCISES


@notebooks(LESSONS)
def test_lesson_opens_with_a_question_aims_prerequisites_and_time(path: Path):
    first, opening = read(path).cells[0], text(cell for cell in read(path).cells[:3] if cell.cell_type == "markdown")
    assert re.match(rf"# {path.name[:2]} · [^\n]*\?(\n|$)", first.source), first.source.splitlines()[0]
    assert sum(len(re.findall(r"^# ", cell.source, re.MULTILINE)) for cell in text_cells(path)) == 1
    aims = re.search(r"\*{1,2}You will be able to[^\n]*\n+((?:[-*] .*\n?(?:  .*\n?)*)+)", opening)
    assert aims, "no list after 'You will be able to'"
    assert 3 <= len(re.findall(r"^[-*] ", aims[1], re.MULTILINE)) <= 5
    assert re.search(r"\b(Before this|Prerequisites?)\b", opening)
    assert re.search(r"\bminutes?\b", opening)


@notebooks(LESSONS)
def test_lesson_ends_with_recap_exercises_references_and_the_next_lesson(path: Path):
    headings = re.findall(r"^## (.*)$", text(text_cells(path)), re.MULTILINE)
    assert any(heading.startswith("Recap") for heading in headings), headings
    ending = text(text_cells(path)[-3:])
    references = re.split(r"Worth reading|References|Further reading", ending)
    assert len(references) == 2, "no list under 'Worth reading'"
    assert len(re.findall(r"^[-*\d]+\.? ", references[1], re.MULTILINE)) in (2, 3)
    assert len(re.findall(r"\]\((https://[^)]+)\)", references[1])) in (2, 3), "each with a link"
    following = {other.name for other in LESSONS if other.stem > path.stem}
    assert not following or following & linked(text_cells(path)[-1:])
    exercises = f"../exercises/{path.stem}_exercises.ipynb"
    if (path.parent / exercises).exists():
        assert exercises in linked(text_cells(path)[:3]) and exercises in linked(text_cells(path)[-1:])


@notebooks(*EVERYWHERE)
def test_cells_are_short_enough_to_see_at_once_and_every_tool_can_run_them(path: Path):
    cells = code_cells(path)
    assert [cell for cell in cells if "parameters" in tags(cell)] == cells[:1]
    assert not [cell.source.splitlines()[0] for cell in cells if len(cell.source.splitlines()) > 25]
    assert not [line for cell in cells for line in cell.source.splitlines() if len(line) > 100]
    for cell in cells:
        assert not {"raises-exception", "nbval-raises-exception"} & {*tags(cell)}, "papermill ignores it: expect_error"
        assert not re.search(r"\binteract(ive)?\(|\bOutput\(|clear_output\(", cell.source), "nbval cannot compare it"
    assert path.stat().st_size < 1_500_000


@notebooks(LESSONS)
def test_there_is_enough_text_for_the_code(path: Path):
    """Folded cells, and those in which one commits to a prediction, need none."""
    code = [cell for cell in code_cells(path) if not re.search(r"= predict\(|^predictions\(\)", cell.source)]
    assert len(text_cells(path)) >= 0.7 * sum(not cell.metadata.get("jupyter") for cell in code)


@notebooks(*EVERYWHERE)
def test_links_lead_somewhere_and_folds_and_stored_widgets_are_shown(path: Path):
    assert not [link for link in linked(text_cells(path)) if not (path.parent / link).exists()]
    assert not [cell.source[:80] for cell in text_cells(path) if re.search(r"</details>\n[^\n]", cell.source)]
    shown = [output for cell in code_cells(path) for output in cell.outputs]
    assert "widgets" not in read(path).metadata, "without a kernel controls would be dead"
    assert not [output for output in shown if any("widget" in kind for kind in output.get("data", {}))]
    assert path not in EXERCISES or not shown and "BEGIN SOLUTION" not in text(code_cells(path)), "for the learner"


@notebooks(*EVERYWHERE)
def test_prose_is_plain(path: Path):
    words = prose(path)
    assert not EMOJI.findall(text(read(path).cells))
    assert not re.findall(r"[^\n]*!(?!=)[^\n]*", words)
    assert not FILLERS.findall(words)


@notebooks(LESSONS, SOLUTIONS)
def test_half_of_the_cells_are_compared_and_none_warns(path: Path):
    cells = code_cells(path)
    ignored = [cell for cell in cells if {"nbval-ignore-output", "nbval-skip"} & {*tags(cell)}]
    assert len(ignored) <= 0.5 * len(cells)
    streams = [output.text for cell in cells for output in cell.outputs if output.output_type == "stream"]
    assert not [stream for stream in streams if re.search(r"\w+Warning:|\[W\d+ ", stream)]


@notebooks(*EVERYWHERE)
def test_pictures_are_described_in_words_and_fit_into_a_column(path: Path):
    """Below a cell with a picture stands text, for a reader who cannot see it.

    On a screen 1366 pixels wide, JupyterLab's column has 934 of them: what is wider is shrunk, and its letters.
    Pictures have twice the pixels that they take up, for screens with small ones.
    """
    cells = read(path).cells
    for place, cell in enumerate(cells):
        for output in [each for each in cell.get("outputs", []) if "image/png" in each.get("data", {})]:
            first, following = cell.source.splitlines()[0], below(cells, place)
            look = output.metadata.get("image/png", {})
            assert len(look.get("alt", "")) > 20, first
            assert path not in LESSONS or following is not None and following.cell_type == "markdown", first
            header = base64.b64decode(output.data["image/png"][:64])
            pixels = int.from_bytes(header[16:20], "big")
            photograph = output.data["text/plain"].startswith("<PIL")
            assert look.get("width", pixels) <= 934 and (photograph or pixels // 2 == look["width"]), first


@notebooks(EXERCISES, SOLUTIONS)
def test_exercises_and_solutions_say_which_they_are(path: Path):
    kind = path.parent.name.capitalize()
    assert read(path).cells[0].source.startswith(f"# {kind} {path.name[:2]} · ")
    assert ("**These are the solutions.**" in text(text_cells(path)[:3])) == (kind == "Solutions")


@notebooks(EXERCISES)
def test_every_exercise_has_a_card_a_stub_a_check_and_hints(path: Path):
    words, marks = text(text_cells(path)), [cell.metadata.get("nbgrader") for cell in code_cells(path)]
    marks = [mark for mark in marks if mark]
    assert marks and marks[0].solution and len({mark.grade_id for mark in marks}) == len(marks)
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        assert mark.grade or (following is not None and following.grade), f"no check after {mark.grade_id}"
    cards = re.findall(r"^\| difficulty \| minutes ", words, re.MULTILINE)
    assert len(cards) == len(re.findall(r"^## Exercise \d", words, re.MULTILINE)) > 0
    assert words.count("<details") == words.count("</details>") >= sum(mark.grade for mark in marks)


def test_code_is_clean():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet", ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_are_short_and_say_why_they_exist():
    """Texts and checks may be long, and so may the program that other environments run as one file."""
    folders = [ROOT / name for name in ("course_utils", "lessons", "tools")]
    modules = {path: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    long = [path for path, code in modules.items() if code.count("\n") > 400 and "check" not in path.parts]
    assert {path.name for path in long} <= {"lesson.py", "exercises.py", "check.py", "loader_ways.py"}
    texts_of_lessons = ("lesson.py", "exercises.py", "smallest.py")  # the last is shown as one would write it
    without = [path for path, code in modules.items() if code.strip() and not code.startswith('"""')]
    assert not [path for path in without if path.name not in texts_of_lessons]
