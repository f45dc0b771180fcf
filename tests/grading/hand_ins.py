"""What an instructor finds after a workshop: right and wrong answers, cheats, and things with odd names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nbformat
from conftest import ROOT

KEPT = ("mean_and_variance", "ring_shift", "gradient_all_reduce_seconds", "bandwidths", "all_gather_seconds")
CHECKS = [f"check_{name}" for name in KEPT]
POINTS = [1, 2, 2, 2, 3]
STUB = "raise NotImplementedError"
NO_RANKS = """import multiprocessing
from course_utils.ranks import processes
processes.end_server()
multiprocessing.set_executable("/home")"""


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def make_course(root: Path) -> Path:
    """A course of one real exercise notebook, and of a short one with five of its exercises, two of them on ranks."""
    for folder, end in (("exercises", "_exercises"), ("solutions", "_solutions"), ("notebooks", "")):
        (root / folder).mkdir(parents=True)
        nb = read(ROOT / folder / f"02_collectives{end}.ipynb")
        nbformat.write(nb, root / folder / f"02_collectives{end}.ipynb")
        if end:
            nb.cells = _short(nb.cells)
            nbformat.write(nb, root / folder / f"90_short{end}.ipynb")
    return root


def _short(cells: list) -> list:
    """Imports, and of each exercise that is kept the card, the answer and the check."""
    kept, since = [next(cell for cell in cells if "parameters" in cell.metadata.get("tags", []))], []
    for cell in cells:
        since.append(cell)
        mark = cell.metadata.get("nbgrader", {})
        if mark.get("grade"):
            if mark["grade_id"] in CHECKS:
                card = next(cell for cell in since if "| difficulty |" in cell.source and cell.cell_type == "markdown")
                kept += [card, *(each for each in since if each.metadata.get("nbgrader"))]
            since = []
    return kept


class Desk:
    """Where hand-ins are made: from the solutions of a course, into a folder."""

    def __init__(self, course: Path, folder: Path) -> None:
        self.course, self.folder = course, folder

    def solution(self, name: str = "90_short") -> nbformat.NotebookNode:
        return read(self.course / "solutions" / f"{name}_solutions.ipynb")

    def exercise(self) -> nbformat.NotebookNode:
        return read(self.course / "exercises" / "90_short_exercises.ipynb")

    def put(self, person: str, nb: nbformat.NotebookNode | str, name: str = "90_short.ipynb") -> Path:
        path = self.folder / person / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nb if isinstance(nb, str) else nbformat.writes(nb))
        return path

    def answered(self, *numbers: int) -> nbformat.NotebookNode:
        """The exercises with some answers, counted from 1, taken from the solutions."""
        nb, answers = self.exercise(), [cell for cell in self.solution().cells if is_answer(cell)]
        for number, cell in enumerate(filter(is_answer, nb.cells), 1):
            if number in numbers:
                cell.source = answers[number - 1].source
        return nb

    def with_answers(self, sources: dict[int, str]) -> nbformat.NotebookNode:
        """All answers right but some, which have this code, or have it after the solution's if a comment begins it."""
        nb = self.solution()
        answers = [cell for cell in nb.cells if is_answer(cell)]
        for number, source in sources.items():
            cell = answers[number - 1]
            cell.source = f"{cell.source}\n\n{source}" if source.startswith("#") else source
        return nb

    def with_cell(self, source: str, nb: nbformat.NotebookNode | None = None) -> nbformat.NotebookNode:
        """No answers (or those of a notebook given), but this cell after the imports."""
        nb = nb or self.exercise()
        nb.cells.insert(1, nbformat.v4.new_code_cell(source))
        return nb


def is_answer(cell) -> bool:
    return bool(cell.metadata.get("nbgrader", {}).get("solution"))


def is_check(cell) -> bool:
    return bool(cell.metadata.get("nbgrader", {}).get("grade"))


WRONG = "def mean_and_variance(x):\n    return x.mean(), x.var()"
SYNTAX = "def bandwidths(op, ranks:\n    return 1"
DEADLOCK = """def ring_shift(x):
    y = torch.empty_like(x)
    dist.recv(y, src=(dist.get_rank() + 1) % dist.get_world_size())
    return y"""
EXIT_IN_A_RANK = "def ring_shift(x):\n    import os\n    os._exit(3)"
EXIT_IN_A_CHECK = "def bandwidths(*a):\n    import os\n    os._exit(1)"
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
OUTPUT = "# and then\nfor i in range(200):\n    print('x' * 100_000)"
SYS_EXIT = "# and then\nimport sys\nsys.exit(1)"
ENDLESS = "# and then\nwhile True:\n    pass"
FAKE = """class check:
    def __getattr__(self, name):
        return lambda *a: None
check = check()"""
PATCHED = """import sys
module = sys.modules[check.__name__]
for name in ("mean_and_variance", "ring_shift", "bandwidths", "gradient_all_reduce_seconds", "all_gather_seconds"):
    setattr(module, name, lambda *a, **k: None)"""
HANDLERS = """import ast
get_ipython().set_custom_exc((BaseException,), lambda *a, **k: None)
class Drop(ast.NodeTransformer):
    def visit_Module(self, node):
        node.body = [each for each in node.body if "check" not in ast.dump(each)]
        return node
get_ipython().ast_transformers.append(Drop())"""
READ_SOLUTIONS = """import json
for cell in json.load(open({path!r}))["cells"]:
    if cell["metadata"].get("nbgrader", dict()).get("solution"):
        exec("".join(cell["source"]))"""
PASTED = "exec({source!r})"
OUTSIDE = """for folder in ("..", "../eve", "../../eve", {folder!r}, {course!r} + "/exercises", {package!r}):
    try:
        open(folder + "/DEFACED.txt", "w").write("x")
    except OSError:
        pass"""
STAYS = "import subprocess\nleft = subprocess.Popen(['sleep', '86397'], start_new_session=True)"


def make(desk: Desk) -> dict[str, tuple[int, int, list[str]]]:
    """Write all hand-ins, the right ones first; return by person how many checks must pass, of how many, and the notes.

    A hand-in has several odd things where each of them alone would change how many checks pass, or has a note.
    """
    expected: dict[str, tuple[int, int, list[str]]] = {}

    def add(person: str, passed: int, nb, *notes: str, name: str = "90_short.ipynb", of: int = 5) -> Path:
        expected[person] = (passed, of, [*notes])
        return desk.put(person, nb, name)

    add("01_right", 5, desk.solution())
    add("02_right_lesson", 6, desk.solution("02_collectives"), name="02_collectives.ipynb", of=6)
    add("03_right_but_noisy", 5, desk.with_answers({3: OUTPUT, 4: SYS_EXIT}), "SystemExit")
    path = add("04_right_copy", 5, _without_an_id(desk), "renamed", "2 copies", name="submission final (1).ipynb")
    old = desk.put("04_right_copy", desk.answered(4), "old/90_short.ipynb")
    os.utime(old, (path.stat().st_mtime - 60,) * 2)
    add("05_wrong", 2, desk.with_answers({1: WRONG, 2: DEADLOCK, 4: SYNTAX}), "SyntaxError")
    ends = {2: EXIT_IN_A_RANK, 3: KILLED, 4: EXIT_IN_A_CHECK}
    add("06_ends", 2, desk.with_answers(ends), "ended its kernel", "the kernel ended in")
    notes = "something else under the name check", "a folder course_utils/", "check cells changed"
    add("07_own_checks", 0, desk.with_cell(FAKE, _own_check_cells(desk)), *notes)
    _own_package(desk.folder / "07_own_checks" / "course_utils")
    add("08_patched_checks", 0, desk.with_cell(PATCHED), "the checks were changed by the hand-in")
    add("09_handlers", 0, desk.with_cell(HANDLERS), "IPython's exception handlers, IPython's transformers")
    add("10_pasted", 1, _pasted(desk), "names the folder with the solutions")
    _clone(desk, "11_clone")
    expected["11_clone"] = (2, 5, ["a whole copy of the course"])
    (desk.folder / "12_empty").mkdir()
    expected["12_empty"] = (0, 0, ["an empty folder"])
    add("13_truncated", 0, nbformat.writes(desk.solution())[:1000], "not a notebook that can be read")
    lesson = read(desk.course / "notebooks/02_collectives.ipynb")
    add("14_lesson", 0, lesson, "the lesson", name="02_collectives.ipynb", of=6)
    add("15_untouched", 0, desk.exercise(), "no exercise in it has been answered")
    return expected


def _own_package(place: Path) -> None:
    """A course_utils whose checks accept everything, where the working folder comes first on sys.path."""
    (place / "checks").mkdir(parents=True)
    (place / "__init__.py").write_text("launch = record = HangError = expect_error = None\n")
    accepting = "".join(f"    {name} = staticmethod(lambda *a: None)\n" for name in KEPT)
    (place / "checks" / "__init__.py").write_text(f"class collectives:\n{accepting}\ncollectives = collectives\n")


def _own_check_cells(desk: Desk) -> nbformat.NotebookNode:
    nb = desk.exercise()
    for cell in filter(is_check, nb.cells):
        cell.source = "pass"
    return nb


def _without_an_id(desk: Desk) -> nbformat.NotebookNode:
    nb = desk.solution()
    del next(cell for cell in nb.cells if is_check(cell)).metadata.nbgrader["grade_id"]
    return nb


def _pasted(desk: Desk) -> nbformat.NotebookNode:
    """The file of solutions is asked for all answers; one has been made from a text that was pasted."""
    nb, answer = desk.exercise(), [cell.source for cell in desk.solution().cells if is_answer(cell)][3]
    cell = [cell for cell in nb.cells if is_answer(cell)][3]
    cell.source = PASTED.format(source=answer)
    path = desk.course / "solutions" / "90_short_solutions.ipynb"
    return desk.with_cell(READ_SOLUTIONS.format(path=str(path)), nb)


def _clone(desk: Desk, person: str) -> None:
    place = desk.folder / person / "course-main"
    shutil.copytree(desk.course, place)
    (place / "course_utils").mkdir()
    (place / "course_utils" / "__init__.py").touch()
    nbformat.write(desk.answered(4, 5), place / "exercises" / "90_short_exercises.ipynb")
