"""Notebooks come from text, one way, and twice the same; exercises lose their solutions and stay gradable."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import write_lesson

from course_utils import doctor
from tools.author import builder
from tools.author.builder import targets
from tools.author.notebooks import from_text, leaks, normalise
from tools.author.pages import BOX, BOXES, FOLD, boxed, dress

LESSON = """\
# %% [markdown]
# # Does a small notebook build?

# %% tags=["parameters"]
import sys

import ipywidgets as widgets

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTqLlwAAAABJRU5ErkJggg=="
world_size = 4

# %%
print("one")
print("two", file=sys.stderr)
print("three")

# %%
class Explorer(widgets.VBox):
    def _repr_mimebundle_(self, **kwargs):
        return {**super()._repr_mimebundle_(**kwargs), "text/plain": "Run this cell.", "image/png": PIXEL}


Explorer([widgets.IntSlider(value=1, min=0, max=5)])

# %% [markdown]
# **Predict.** What is below?
#
# *The widget: a [slider](x.ipynb) from `0` to 5, and a **pixel**.*

# %%
widgets.IntText()
"""

EXERCISES = '''\
# %% [markdown]
# # Can you add and double?

# %% tags=["parameters"]
class check:
    @staticmethod
    def add(fn):
        assert fn(1, 2) == 3

    @staticmethod
    def double(number):
        assert number == 4

# %%
def add(a, b):
    """Return the sum."""
    ### BEGIN SOLUTION
    total = a + b
    return total
    ### END SOLUTION

# %%
check.add(add)

# %%
### BEGIN SOLUTION
doubled = 2 * 2
### END SOLUTION

# %%
check.double(doubled)
'''

ORIGINALS = [
    "exercises/90_small_exercises.ipynb", "notebooks/90_small.ipynb", "solutions/90_small_solutions.ipynb",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course of one lesson and its exercises, built."""
    root = tmp_path_factory.mktemp("built") / "course"
    write_lesson(root, "90_small", LESSON)
    write_lesson(root, "90_small_exercises", EXERCISES)
    assert builder.build(root) == []
    return root


@pytest.fixture
def course(built: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return shutil.copytree(built, tmp_path / "course")


def read(root: Path, name: str) -> nbformat.NotebookNode:
    return nbformat.read(root / name, as_version=4)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_notebooks_of_the_course_are_what_their_text_says():
    assert builder.check() == []


def test_building_twice_leaves_no_difference(course: Path):
    before = {name: (course / name).read_bytes() for name in ORIGINALS}
    assert builder.build(course, force=True) == []
    assert {name: (course / name).read_bytes() for name in ORIGINALS} == before
    assert builder.check(course) == []


def test_unchanged_text_is_not_executed_again(course: Path, capsys: pytest.CaptureFixture[str]):
    assert builder.build(course) == []
    assert capsys.readouterr().out == "3 of 3 notebooks are up to date\n"


def test_a_changed_program_of_scripts_is_shown_anew(course: Path):
    program, name = course / "scripts" / "hello.py", "notebooks/91_show.ipynb"
    program.parent.mkdir()
    program.write_text("print(1)\n")
    write_lesson(course, "91_show", """# %% [markdown]
# # What is shown?

# %%
from pathlib import Path

from IPython.display import Markdown


def show(name):
    return Markdown("Program:\\n" + Path("../scripts", name).read_text())


# %%
show("hello.py")
""")
    assert builder.build(course) == builder.check(course) == []
    program.write_text("print(2)\n")
    assert builder.check(course) == [f"{name}: shows an older scripts/hello.py"]
    assert builder.build(course) == builder.check(course) == []


def test_new_prose_keeps_the_outputs_and_new_code_does_not(course: Path, capsys: pytest.CaptureFixture[str]):
    source, name = course / "lessons" / "small" / "lesson.py", "notebooks/90_small.ipynb"
    before = read(course, name)
    change(source, "Does a small", "Does one small")
    change(source, "and a **pixel**", "and one dot")
    assert builder.build(course) == []
    assert f"built {name}\n" in capsys.readouterr().out  # without the time of a run
    after = read(course, name)
    assert "Does one small" in after.cells[0].source
    picture = after.cells[3].outputs[0].metadata["image/png"]
    assert picture.pop("alt").endswith("from 0 to 5, and one dot.")
    before.cells[3].outputs[0].metadata["image/png"].pop("alt")
    assert [c.get("outputs") for c in after.cells] == [c.get("outputs") for c in before.cells]
    assert after.metadata == before.metadata and builder.check(course) == []

    source.write_text(source.read_text() + "\n# %%\nprint('five')\n")
    assert builder.build(course) == []
    assert f"built {name} (" in capsys.readouterr().out
    assert read(course, name).cells[-1].outputs[0].text == "five\n"


def test_built_notebook_carries_nothing_of_the_run_but_its_outputs(course: Path):
    nb = read(course, "notebooks/90_small.ipynb")
    nbformat.validate(nb)
    assert nb.metadata.keys() == {"kernelspec", "language_info"}
    assert nb.metadata.language_info == {"name": "python"}
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4]
    assert all(cell.metadata.keys() <= {"tags"} for cell in nb.cells)
    assert [(o.name, o.text) for o in code[1].outputs] == [("stdout", "one\nthree\n"), ("stderr", "two\n")]


def test_a_stored_widget_is_its_picture_with_a_description_and_no_dead_controls(course: Path):
    nb = read(course, "notebooks/90_small.ipynb")
    explorer, _, plain = nb.cells[3:]
    (shown,) = explorer.outputs
    assert shown.data.keys() == {"text/plain", "image/png"} and shown.data["text/plain"] == "Run this cell."
    assert shown.metadata == {"image/png": {"alt": "The widget: a slider from 0 to 5, and a pixel."}}
    assert plain.outputs[0].data == {"text/plain": "IntText(value=0)"}


def test_streams_around_a_rich_output_stay_around_it():
    cell = nbformat.v4.new_code_cell("x", execution_count=7)
    chunk = nbformat.v4.new_output
    image = chunk("display_data", data={"text/plain": "picture"})
    texts = [chunk("stream", name="stdout", text=text) for text in ("a", "b", "c")]
    cell.outputs = [texts[0], texts[1], image, texts[2]]
    nb = nbformat.v4.new_notebook(cells=[cell], metadata=from_text("").metadata)
    assert [o.get("text", "picture") for o in normalise(nb).cells[0].outputs] == ["ab", "picture", "c"]


def test_same_source_in_two_cells_has_two_ids():
    ids = [cell.id for cell in from_text("# %%\nx = 1\n\n# %%\nx = 1\n").cells]
    assert len(set(ids)) == 2


def test_exercises_lose_solutions_and_keep_everything_else(course: Path):
    text = (course / "exercises/90_small_exercises.ipynb").read_text()
    assert "SOLUTION" not in text and "total = a + b" not in text and "2 * 2" not in text
    cells = read(course, "exercises/90_small_exercises.ipynb").cells
    assert cells[2].source.startswith('def add(a, b):\n    """Return the sum."""\n    raise NotImplementedError("')
    assert cells[4].source.startswith('raise NotImplementedError("')
    assert [c.source for c in cells[3::2]] == ["check.add(add)", "check.double(doubled)"]
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in cells)


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        ("notebooks/90_small.ipynb", "Does a small", "Will a small", "cell 1 is not what the text says"),
        ("notebooks/90_small.ipynb", '"execution_count": 2', '"execution_count": null', "not executed"),
        ("notebooks/90_small.ipynb", '"execution_count": 2', '"execution_count": 9', "not in normal form"),
        ("notebooks/90_small.ipynb", "three\\n", "/home/somebody/three\\n", "/home/somebody"),
        ("solutions/90_small_solutions.ipynb", "total = a + b", "total = b + a", "cell 4 is not what the text says"),
        ("exercises/90_small_exercises.ipynb", "check.add(add)", "pass", "cell 4 is not what the text says"),
        ("lessons/small/lesson.py", "print(\"three\")", "print(3)", "cell 3 is not what the text says"),
    ],
    ids=["text", "not-run", "count", "path", "solution", "exercise", "source"],
)
def test_check_names_what_differs(course: Path, name: str, old: str, new: str, complaint: str):
    change(course / name, old, new)
    found = builder.check(course)
    assert len(found) == 1 and complaint in found[0] and "90_small" in found[0]


def test_check_finds_a_notebook_without_source(course: Path):
    (course / "notebooks" / "91_stray.ipynb").write_bytes((course / "notebooks/90_small.ipynb").read_bytes())
    assert builder.check(course) == ["notebooks/91_stray.ipynb: has no source"]


def test_notebooks_say_what_they_are_and_lead_on(tmp_path: Path):
    one = LESSON.replace("build?", "build?\n#\n# **Before this:** nothing.")
    for name, text in {"08_one": one, "08_one_exercises": EXERCISES, "11_two": LESSON}.items():
        write_lesson(tmp_path, name, text)
    made = {path.stem: nb.cells for path, nb in targets(tmp_path).items()}
    one, exercises, solutions, two = made.values()
    link = "[the exercises](../exercises/08_one_exercises.ipynb)"
    assert one[0].source == f"# 08 · Does a small notebook build?\n\n**Before this:** nothing. **Afterwards:** {link}."
    assert two[0].source == "# 11 · Does a small notebook build?"
    assert [cells[0].source for cells in (exercises, solutions)] == [
        f"# {kind} 08 · Can you add and double?" for kind in ("Exercises", "Solutions")
    ]
    assert solutions[1].source.startswith("**These are the solutions.**") and link in solutions[1].source
    onward = "[08 one](../notebooks/08_one.ipynb), and the next lesson is [11 two](../notebooks/11_two.ipynb)."
    assert all(cells[-1].source.endswith(onward) for cells in (exercises, solutions))
    assert "(../solutions/08_one_solutions.ipynb)" in exercises[-1].source and link in solutions[-1].source
    alone = targets(tmp_path, ["08_one"])
    assert {path.stem: nb.cells for path, nb in alone.items()} == {k: v for k, v in made.items() if k != "11_two"}


def box(start: str, text: str) -> str:
    return BOX.format(BOXES[start], text)


@pytest.mark.parametrize(
    ("text", "framed"),
    [
        ("**Predict.** What\nnow?\n\nThen.", box("**Predict", "**Predict.** What\nnow?") + "\n\nThen."),
        ("It is 3. **Predict** (2): how\nmany?", "It is 3.\n\n" + box("**Predict", "**Predict** (2): how\nmany?")),
        ("Where the text says **Predict**, stop.", "Where the text says **Predict**, stop."),
        ("> **Misconception.** \"A\"\n>\n> b", box("> **Misconception", "**Misconception.** \"A\"\n\nb")),
        ("> **word**: meaning", "> **word**: meaning"),
        ("```text\na\n\n**Predict** b\n```", "```text\na\n\n**Predict** b\n```"),
        ("<details><summary>x</summary>\n\n**Predict**\n\n</details>",) * 2,
    ],
)
def test_predictions_and_boxes_are_framed(text: str, framed: str):
    assert boxed(text) == framed


def test_a_fold_away_is_followed_by_a_blank_line():
    text = "<details><summary>a</summary>\n\nb\n</details>\n<details><summary>c</summary>\n\nd\n</details>\nAfter."
    nb = dress(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)]), "notebooks", "01_x", [], [])
    assert nb.cells[0].source == text.replace("</details>\n", "</details>\n\n").replace("<details><summary>", FOLD)


def test_failing_cell_is_named(tmp_path: Path):
    write_lesson(tmp_path, "90_bad", "# %% [markdown]\n# # Bad?\n\n# %%\nx = 1\n\n# %%\nx / 0\n")
    failed = builder.build(tmp_path)
    assert len(failed) == 1
    assert "90_bad.ipynb: cell 3 (In [2]) ends in ZeroDivisionError: division by zero" in failed[0]
    assert "    x / 0" in failed[0]
    assert not (tmp_path / "notebooks/90_bad.ipynb").exists()


def test_machine_paths_are_found_but_pictures_are_not_searched():
    cell = nbformat.v4.new_code_cell("x")
    cell.outputs = [
        nbformat.v4.new_output("stream", name="stdout", text="see /tmp/abc/x.py, object at 0x7f12345678ab\n"),
        nbformat.v4.new_output("display_data", data={"image/png": "aa/tmp/abc/d=="}),
    ]
    found = leaks(nbformat.v4.new_notebook(cells=[cell]))
    assert found == ["cell 1: /tmp/abc/x.py", "cell 1: 0x7f12345678ab"]


@pytest.mark.filterwarnings("ignore::Warning:nbgrader")  # of its own database code
def test_instructors_nbgrader_makes_and_grades_the_assignment(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from nbgrader.apps import NbGraderAPI
    from traitlets.config import Config

    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    config = Config()
    config.CourseDirectory.root = str(tmp_path)
    config.CourseDirectory.db_url = f"sqlite:///{tmp_path}/gradebook.db"
    config.Exchange.root = str(tmp_path)
    solution = (course / "solutions/90_small_solutions.ipynb").read_bytes()
    wrong = solution.replace(b"total = a + b", b"total = a - b")
    for place, content in (("source", solution), ("submitted/ada", solution), ("submitted/bob", wrong)):
        (tmp_path / place / "adding").mkdir(parents=True)
        (tmp_path / place / "adding" / "90_small.ipynb").write_bytes(content)
    api = NbGraderAPI(config=config)
    assert api.generate_assignment("adding")["success"]
    assert "SOLUTION" not in (tmp_path / "release/adding/90_small.ipynb").read_text()
    scores = {}
    for student in ("ada", "bob"):
        done = api.autograde("adding", student)
        assert done["success"], done
        scores[student] = api.get_submission("adding", student)["score"]
    assert scores == {"ada": 2, "bob": 1}


def test_dead_kernel_is_a_failure_not_a_hang(tmp_path: Path):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import os; os._exit(1)")])
    nbformat.write(nb, tmp_path / "dead.ipynb")
    (failed,) = builder.execute([tmp_path / "dead.ipynb"])
    assert "Kernel died" in failed


def test_topology_of_gpus_is_read_by_pair():
    rows = ["\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\x1b[0m", "GPU0\t X \tNV18\tSYS\tPIX"]
    rows += ["GPU1\tNV18\t X \tPHB\tSYS", "GPU2\tSYS\tPHB\t X \tSYS", "NIC0\tPIX\tSYS\tSYS\t X "]
    assert doctor._links("\n".join(rows), 3) == {"0-1": "NV18", "0-2": "SYS", "1-2": "PHB"}
