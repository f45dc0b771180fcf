"""The core edition: lessons without their deeper sections hold together, and fit into the time of a workshop.

That their core runs alone, test_notebooks.py shows: it runs the core of each lesson alone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, write_lesson

from tools import ToolError
from tools.__main__ import main
from tools.author.builder import build_core, targets
from tools.author.core import core_faults, is_deeper
from tools.author.minutes import reading, rounded, sections, update
from tools.author.notebooks import execute, from_text
from tools.author.rooms import lessons

BOTH = [name for name in lessons(ROOT) if any(section.deeper for section in sections(name))]
LESSON = """\
# %% [markdown]
# # Which part is needed?
#
# Section 2 is [deeper](#2.-Links-of-slow-hosts-·-deeper), [section 1](#1.-First) is not, and
# [91](91_other.ipynb) and [the page](../docs/page.md#top) and [the net](https://a.b/c) are elsewhere.
# **Time:** about 1 minutes to read, under a minute to run.

# %% tags=["parameters"]
world_size = 4

# %% [markdown]
# ## 1. First

# %%
base = 2 * world_size

# %% [markdown] tags=["deeper"]
# ## 2. Links of slow hosts · deeper
#
# {words}

# %% tags=["deeper", "nbval-ignore-output"]
more = base + 1

# %% [markdown] tags=["deeper"]
# ## 3. Third · deeper

# %% [markdown]
# ## Recap

# %%
print(base)
"""
WHOLE = "# %% [markdown]\n# # Nothing deeper?\n\n# %%\nx = 1\n"


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course of a lesson with deeper sections and one without."""
    root = tmp_path / "course"
    write_lesson(root, "90_parts", LESSON.format(words="word " * 1300))
    write_lesson(root, "91_other", WHOLE)
    return root


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def text(path: Path) -> str:
    return "\n\n".join(cell.source for cell in read(path).cells)


def lesson(name: str) -> nbformat.NotebookNode:
    return next(nb for path, nb in targets(ROOT, [name]).items() if path.stem == name)


# --- the lessons of the course -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", lessons(ROOT))
def test_headings_and_tags_agree_and_the_core_needs_nothing_deeper(name: str):
    nb = lesson(name)
    assert core_faults(nb) == []
    assert any(map(is_deeper, nb.cells)) == (name in BOTH)


@pytest.mark.parametrize("name", BOTH)
def test_the_core_takes_45_minutes_at_most(name: str):
    assert rounded(reading(name, core=True)) <= 45 and reading(name, core=True) < reading(name)


# --- how it is made ------------------------------------------------------------------------------------------------


def test_the_core_edition_runs_without_what_was_left_out(course: Path, capsys: pytest.CaptureFixture[str]):
    assert build_core(course) == []
    folder = course / "core"
    assert sorted(path.name for path in folder.iterdir()) == ["90_parts.ipynb", "91_other.ipynb"]
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("90_parts.ipynb: 3 of 9 cells left out")
    assert out[1].endswith("91_other.ipynb: the whole lesson, which has no section marked deeper")
    nb = read(folder / "90_parts.ipynb")
    nbformat.validate(nb)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert [cell.source for cell in code] == ["world_size = 4", "base = 2 * world_size", "print(base)"]
    assert not any(is_deeper(cell) for cell in nb.cells)
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert code[0].metadata.tags == ["parameters"]
    asyncio.run(execute(nb, folder / "90_parts.ipynb"))
    assert [output.text for output in nb.cells[-1].outputs] == ["8\n"]


def test_the_core_edition_says_what_is_left_out_and_where_it_is(course: Path):
    build_core(course)
    shown = text(course / "core" / "90_parts.ipynb")
    whole = "../notebooks/90_parts.ipynb"
    assert f"**This is the core edition of lesson 90.** Where the text names section 2 or 3, it means [the whole " \
           f"lesson]({whole})." in shown
    place = f"*Left out of this edition, and in [the whole lesson]({whole}):*\n\n- 2. Links of slow hosts\n- 3. Third"
    assert shown.index("## 1. First") < shown.index(place) < shown.index("## Recap")
    assert f"[deeper]({whole}#2.-Links-of-slow-hosts-·-deeper), [section 1](#1.-First)" in shown
    other = text(course / "core" / "91_other.ipynb")
    assert "core edition" not in other and "Left out" not in other


def test_links_of_the_core_edition_lead_to_the_same_files(course: Path, tmp_path: Path):
    build_core(course, [], tmp_path / "elsewhere" / "core")
    shown = text(tmp_path / "elsewhere" / "core" / "90_parts.ipynb")
    assert "[91](91_other.ipynb)" in shown and "](https://a.b/c)" in shown
    assert "[the page](../../course/docs/page.md#top)" in shown
    assert "[the whole lesson](../../course/notebooks/90_parts.ipynb)" in shown


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('# %% tags=["deeper", "nbval-ignore-output"]', "# %%", "cell 6 is not tagged 'deeper', and its section is"),
        ("hosts · deeper\n", "hosts\n", "cell 5 is tagged 'deeper', and its section is not marked so: 2. Links"),
        ("# ## Recap", "# ## 4. Fourth · deeper\n#\n# ## Recap", "headings of a deeper section and of another one"),
        ("print(base)", "print(base, more)", "cell 9 takes `more` from cell 6, which is deeper"),
        ("print(base)", "def late():\n    return more", "cell 9 takes `more` from cell 6"),
    ],
    ids=["no-tag", "no-mark", "both", "name", "in-a-function"],
)
def test_a_lesson_that_does_not_hold_together_is_refused(course: Path, old: str, new: str, complaint: str):
    source = course / "lessons" / "parts" / "lesson.py"
    assert old in source.read_text()
    source.write_text(source.read_text().replace(old, new))
    failed = build_core(course)
    assert any(complaint in fault and fault.startswith("90_parts: ") for fault in failed), failed
    assert not (course / "core" / "90_parts.ipynb").exists()
    assert (course / "core" / "91_other.ipynb").exists()


def test_a_name_that_the_core_defines_for_itself_is_no_fault():
    nb = from_text(LESSON.replace("print(base)", "more = 1\n\n# %%\n# %%ranks\n# print(base, more)"))
    assert nb.cells[-1].source.startswith("%%ranks")
    assert core_faults(nb) == []


def test_the_command_writes_where_it_is_told_and_not_into_the_course(course: Path, tmp_path: Path):
    assert main(["build", "--core", "00_start_here", "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["00_start_here.ipynb"]
    assert "/core/" in (ROOT / ".gitignore").read_text().splitlines()
    with pytest.raises(ToolError, match="holds the course itself"):
        build_core(course, [], course / "notebooks")


# --- its minutes ---------------------------------------------------------------------------------------------------


def test_minutes_are_given_for_the_core_and_for_the_whole(course: Path):
    root = course
    (root / "docs").mkdir()
    write_lesson(root, "00_start_here", "# %% [markdown]\n# # Where?\n")
    head = "| | lesson | read, min | exercises, min |\n|---|---|---|---|\n"
    (root / "README.md").write_text(head + "| 90 | x | | |\n| 91 | y | | |\n")
    (root / "docs" / "instructor.md").write_text("<!-- minutes by section -->\nold\n<!-- end -->\n")
    core, whole = reading("90", root, core=True), reading("90", root)
    assert whole - core == pytest.approx(sum(section.minutes for section in sections("90", root) if section.deeper))
    assert reading("91", root, core=True) == reading("91", root)
    for _ in range(2):  # what was written is found again
        update(root, write=True)
        assert update(root) == []
        opening = (root / "lessons" / "parts" / "lesson.py").read_text().replace("\n# ", " ")
        assert "about 0 minutes to read the core, 10 with the deeper sections, under a minute to run." in opening
        write_lesson(root, "90_parts",
            (root / "lessons" / "parts" / "lesson.py").read_text().replace("10 with", "70 with"))
    assert "| 90 | x | 0 (10) |  |\n| 91 | y | 0 |  |" in (root / "README.md").read_text()
    guide = (root / "docs" / "instructor.md").read_text()
    assert "**90_parts**, 0 minutes for the core, 10 with the deeper sections" in guide
    assert "**91_other**, 0 minutes\n" in guide
