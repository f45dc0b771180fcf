"""Every figure of minutes in the course is what its one clock computes, and the plans for workshops hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT, write_lesson

from tools import ToolError
from tools.author.minutes import chosen, exercises, reading, sections, selection, update
from tools.author.rooms import lessons

GUIDE = (ROOT / "docs" / "instructor.md").read_text(encoding="utf-8")
LESSON = """\
# %% [markdown]
# # How long?
#
# {words}

# %% [markdown]
# ## 1. First
#
# **Predict** the `sum`.
#
# <details><summary>More</summary>
#
# seven words that nobody has to read
# </details>

# %%
a = 1

print(a)

# %% [markdown]
# ## 2. Second
#
# ```text
# one
# two
# ```
#
# | a | b |
# |---|---|

# %% jupyter={{"source_hidden": true}}
hidden = 1

# %%
print(a)
"""
CARD = """\
# %% [markdown]
# ## Exercise 1 · A title
#
# | difficulty | minutes | follows |
# |---|---|---|
# | 1 of 5 | 25 | 01, First |
"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course of one lesson, with figures that are wrong."""
    (tmp_path / "docs").mkdir()
    opening = "word " * 1285 + "[a link](x.ipynb). **Time:** about 5 minutes to read, under a minute to run."
    write_lesson(tmp_path, "00_start_here", LESSON.format(words=opening))
    card = CARD.replace("# ## Ex", "# All of them\n# take about two hours.\n#\n# ## Ex")
    write_lesson(tmp_path, "00_start_here_exercises", card)
    (tmp_path / "README.md").write_text(
        "| | lesson | read, min | exercises, min |\n|---|---|---|---|\n| 00 | x | 1 | 2 |\n| 01 | coming | | |\n"
    )
    (tmp_path / "docs" / "instructor.md").write_text(
        "| minutes | lessons: sections | by the clock | titles |\n|---|---|---|---|\n| 9 | break | | |\n"
        "| 30 | 00: 1-2; exercises 00: 1 | | |\n\n<!-- minutes by section -->\nold\n<!-- end -->\n"
    )
    return tmp_path


def test_clock_counts_words_lines_and_predictions_in_sight(course: Path):
    opening, first, second = sections("00", course)
    assert (opening.words, opening.lines) == (1300, 0)  # How long; 1,285; a link; Time: about … to run
    assert (first.number, first.title) == (1, "First")
    assert (first.words, first.lines, first.predictions, first.folded) == (3, 2, 1, 8)
    assert first.minutes == pytest.approx(3 / 130 + 2 / 12 + 1.5)
    assert (second.words, second.lines, second.needs) == (2, 3, (1,))
    assert reading("00", course) == sum(section.minutes for section in (opening, first, second))
    assert exercises("00", course) == {1: 25}


def test_selection_is_the_sum_of_what_it_names(course: Path):
    _, first, second = sections("00", course)
    assert selection("00: 1-2; exercises 00: 1", course) == first.minutes + second.minutes + 25
    assert selection("[00](notebooks/x.ipynb)", course) == reading("00", course)
    assert [title for title, _ in chosen("00: 2; exercises 00", course)] == ["Second", "A title"]
    for wrong, message in {"00: 3": r"names \[3\]", "07": "no lesson 07", "soon": "not lessons"}.items():
        with pytest.raises(ToolError, match=message):
            selection(wrong, course)


def test_update_writes_every_figure_and_then_finds_nothing(course: Path):
    assert len(update(course)) == 4
    assert "about 5 minutes" in (course / "lessons" / "start_here" / "lesson.py").read_text()
    update(course, write=True)
    assert update(course) == []
    text = (course / "lessons" / "start_here" / "lesson.py").read_text()
    assert "**Time:** about 10 minutes to read, under" in text.replace("\n# ", " ")
    assert max(map(len, text.splitlines())) <= 120
    assert "All of them take about 25 minutes." in (course / "lessons" / "start_here" / "exercises.py").read_text()
    assert "| 00 | x | 10 | 25 |\n| 01 | coming | | |" in (course / "README.md").read_text()
    guide = (course / "docs" / "instructor.md").read_text()
    assert "| 30 | 00: 1-2; exercises 00: 1 | 27 | First; Second; A title |" in guide
    assert "| 2 | Second | 0 | 1 |" in guide and "old" not in guide


def test_the_course_states_the_minutes_of_its_clock():
    wrong = [str(path.relative_to(ROOT)) for path in update()]
    assert not wrong, "python -m tools minutes --write"


@pytest.mark.parametrize("name", lessons(ROOT))
def test_every_lesson_says_its_minutes_once_and_its_table_of_exercises_agrees_with_their_cards(name: str):
    """Rows of the table at the top, of which one may stand for several exercises, add up to the cards."""
    room = ROOT / "lessons" / name[3:]
    text = (room / "lesson.py").read_text(encoding="utf-8").replace("\n# ", " ")
    assert len(re.findall(r"\*\*Time:\*\* about \d+ minutes to read", text)) == 1
    if (cards := exercises(name)) or (room / "exercises.py").exists():
        text = (room / "exercises.py").read_text(encoding="utf-8")
        assert len(re.findall(r"All of them take about \d+ minutes\.", text.replace("\n# ", " "))) == 1
        rows = re.findall(r"^# \| [\d–]+ \| .* \| (\d+) \|$", text, re.MULTILINE)
        assert sum(map(int, rows)) == sum(cards.values())


def test_each_part_of_the_capstone_fits_into_an_hour():
    parts = exercises("18").values()
    assert len(parts) == 6 and all(45 <= minutes <= 60 for minutes in parts) and 240 <= sum(parts) <= 360


def plans() -> dict[str, list[list[str]]]:
    """Rows of the tables of plans by their heading, without the heads."""
    found = {}
    for title, body in re.findall(r"^### (\w+ hours|Half a day): .*\n\n((?:\|.*\n)+)", GUIDE, re.MULTILINE):
        found[title] = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]]
    return found


HOURS = {"Two hours": 2, "Four hours": 4, "Eight hours": 8, "Half a day": 4}


@pytest.mark.parametrize(("title", "hours"), HOURS.items())
def test_plan_fills_its_time_and_no_block_is_too_short(title: str, hours: int):
    rows = plans()[title]
    assert sum(int(row[0]) for row in rows) == 60 * hours
    for minutes, what, clock, *_ in rows:
        if clock:
            needed = selection(what) * (1.0 if what.startswith("exercises") else 1.1)
            assert int(minutes) >= needed, f"{what}: {needed:.0f} minutes"
    assert {"arrive", "break", "end"} <= {row[1] for row in rows}
    stretches = " ".join("|" if row[1] in ("break", "lunch") else row[0] for row in rows).split("|")
    assert max(sum(map(int, stretch.split())) for stretch in stretches) <= 90  # nobody sits longer without a break
    assert any(row[1].startswith("exercises") for row in rows)


def test_term_fits_its_weeks():
    """A class has ten minutes of 90 for questions and a tenth more than the clock, and what is at home two hours."""
    rows = re.findall(r"^\| (\d+) \| (class|home) \| (.+?) \|", GUIDE, re.MULTILINE)
    assert [row[:2] for row in rows] == [(f"{week}", where) for week in range(1, 13) for where in ("class", "home")]
    for _, where, what in rows:
        parts = [(1.1 if where == "class" and part[0] != "e" else 1) * selection(part) for part in what.split("; ")]
        assert sum(parts) <= (80 if where == "class" else 120), what
    taken = re.findall(r"(?:\| |; )(?:exercises )?(\d\d)\b", "".join(f"| {row[2]}" for row in rows))
    assert {f"{number:02}" for number in range(18)} <= {*taken}


PATHS = re.findall(r"^## (.*): (\d+) weeks of (\d+) hours\n(?:[^#|]*\n)((?:\|.*\n)+)",
                   (ROOT / "docs" / "paths.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", ["Overview", "Deep", "Hands-on mastery"])
def test_path_fits_its_weeks(name: str):
    """Each week has reading, exercises or both, and review, within its hours; the longer paths leave no lesson out."""
    ((weeks, hours, body),) = [path[1:] for path in PATHS if path[0] == name]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]]
    assert [row[0] for row in rows] == [f"{week}" for week in range(1, int(weeks) + 1)]
    for _, what, _, review in rows:
        assert 30 * int(hours) < selection(what) + int(review) <= 60 * int(hours), what
    every = "; ".join(row[1] for row in rows)
    if name != "Overview":
        assert {name[:2] for name in lessons(ROOT)} - {"20"} <= set(re.findall(r"(?:^|; )(\d\d)", every))
    if name == "Hands-on mastery":
        names = [name for name in lessons(ROOT) if name[:2] != "20"]
        parts = [*names, *(part for name in names if exercises(name) for part, _ in chosen(f"exercises {name[:2]}"))]
        assert sorted(parts) == sorted(part for part, _ in chosen(every))


def table(path: str) -> list[list[str]]:
    """Cells of the rows of the table of lessons, links as their text."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", (ROOT / path).read_text(encoding="utf-8"))
    lines = re.findall(r"^(?:# )?\| (\d\d \| .*[?k] \|.*) ?\|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_tables_of_lessons_agree():
    """README.md and lesson 00 list the same lessons with the same questions and minutes; run times agree everywhere."""
    readme, lesson = table("README.md"), table("lessons/start_here/lesson.py")
    assert [row[0] for row in readme] == [row[0] for row in lesson] == [name[:2] for name in lessons(ROOT)]
    for (number, _, question, *minutes, _), theirs in zip(readme[1:], lesson[1:], strict=True):
        assert [number, question, *minutes] == theirs
    seconds = [int(row[-1].removesuffix(" s")) for row in readme if row[-1].endswith(" s")]
    assert [row[0] for row in readme if row[-1].endswith(" s")] == [name[:2] for name in lessons(ROOT)]
    for place in ("lessons/start_here/lesson.py", "docs/instructor.md"):
        text = (ROOT / place).read_text(encoding="utf-8").replace("\n# ", " ")
        assert f"{min(seconds)} to {max(seconds)} s" in text, place
