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

    def with_answer(self, number: int, source: str) -> nbformat.NotebookNode:
        """All answers right but one, which has this code before the solution's."""
        nb = self.solution()
        cell = [cell for cell in nb.cells if is_answer(cell)][number - 1]
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


DEADLOCK = """def ring_shift(x):
    y = torch.empty_like(x)
    dist.recv(y, src=(dist.get_rank() + 1) % dist.get_world_size())
    return y"""
EXIT_IN_A_RANK = "def ring_shift(x):\n    import os\n    os._exit(3)"
EXIT_IN_A_CHECK = "def bandwidths(*a):\n    import os\n    os._exit(1)"
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
OUTPUT = "# and then\nfor i in range(200):\n    print('x' * 100_000)"
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
OUTSIDE = """import glob
for folder in ("..", "../p01_right", "../../p01_right", {folder!r}, {course!r} + "/exercises", {package!r}):
    try:
        open(folder + "/DEFACED.txt", "w").write("x")
    except OSError:
        pass
seen = glob.glob({folder!r} + "/*") + glob.glob({course!r} + "/*")
if seen:
    raise RuntimeError("sees " + seen[0])"""
STAYS = "import subprocess\nleft = subprocess.Popen(['sleep', '86399'], start_new_session=True)"


def make(desk: Desk) -> dict[str, tuple[int, int, str]]:
    """Write all hand-ins; return by person how many checks must pass, of how many, and what the note must say."""
    expected: dict[str, tuple[int, int, str]] = {}

    def add(person: str, passed: int, note: str, nb, name: str = "90_short.ipynb", of: int = 5) -> Path:
        expected[person] = (passed, of, note)
        return desk.put(person, nb, name)

    for number in range(1, 8):
        add(f"p0{number}_right", 5, "", desk.solution())
    add("p08_right", 11, "", desk.solution("02_collectives"), "02_collectives.ipynb", 11)
    add("p09_one", 1, "", desk.answered(4))
    add("p10_three", 3, "", desk.answered(3, 4, 5))
    add("p11_wrong", 4, "", desk.with_answer(1, "def mean_and_variance(x):\n    return x.mean(), x.var()"))
    add("p12_syntax", 4, "SyntaxError", desk.with_answer(4, "def bandwidths(op, ranks:\n    return 1"))
    add("p13_deadlock", 4, "", desk.with_answer(2, DEADLOCK))
    add("p14_exit_in_a_rank", 4, "", desk.with_answer(2, EXIT_IN_A_RANK))
    add("p15_while_true", 5, "interrupted after", desk.with_answer(3, "# and then\nwhile True:\n    pass"))
    add("p16_killed", 4, "ended its kernel", desk.with_answer(3, KILLED))
    add("p17_exit_in_a_check", 4, "the kernel ended in", desk.with_answer(4, EXIT_IN_A_CHECK))
    add("p18_output", 5, "", desk.with_answer(3, OUTPUT))
    add("p19_sys_exit", 5, "SystemExit", desk.with_answer(3, "# and then\nimport sys\nsys.exit(1)"))
    add("p20_fake_check", 0, "something else under the name check", desk.with_cell(FAKE))
    add("p21_patched_checks", 0, "the checks were changed by the hand-in", desk.with_cell(PATCHED))
    add("p22_handlers", 0, "IPython's exception handlers, IPython's transformers", desk.with_cell(HANDLERS))
    add("p23_own_package", 0, "a folder course_utils/", desk.with_cell("x = 1"))
    _own_package(desk.folder / "p23_own_package" / "course_utils")
    add("p24_own_check_cells", 0, "check cells changed", _own_check_cells(desk))
    add("p25_exec_of_solutions", 0, "names the folder with the solutions", _exec_of_solutions(desk))
    add("p26_pasted", 1, "", _pasted(desk))
    add("p27_writes_outside", 5, "", desk.with_cell(_outside(desk), desk.solution()))
    add("p28_leaves_a_process", 5, "left a process behind", desk.with_cell(STAYS, desk.solution()))
    add("p29_no_grade_id", 5, "", _without_an_id(desk))
    path = add("p30_two_copies", 5, "2 copies", desk.solution())
    old = desk.put("p30_two_copies", desk.answered(4), "old/90_short.ipynb")
    os.utime(old, (path.stat().st_mtime - 60,) * 2)
    add("p31_renamed", 5, "renamed", desk.solution(), "submission final (1).ipynb")
    _clone(desk, "p32_clone")
    expected["p32_clone"] = (2, 5, "a whole copy of the course")
    (desk.folder / "p33_empty").mkdir()
    expected["p33_empty"] = (0, 0, "an empty folder")
    add("p34_truncated", 0, "not a notebook that can be read", nbformat.writes(desk.solution())[:1000])
    add("p35_lesson", 0, "the lesson", read(desk.course / "notebooks/02_collectives.ipynb"), "02_collectives.ipynb", 11)
    add("p36_untouched", 0, "no exercise in it has been answered", desk.exercise())
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


def _exec_of_solutions(desk: Desk) -> nbformat.NotebookNode:
    return desk.with_cell(READ_SOLUTIONS.format(path=str(desk.course / "solutions" / "90_short_solutions.ipynb")))


def _outside(desk: Desk) -> str:
    return OUTSIDE.format(folder=str(desk.folder), course=str(desk.course), package=str(ROOT / "course_utils"))


def _without_an_id(desk: Desk) -> nbformat.NotebookNode:
    nb = desk.solution()
    del next(cell for cell in nb.cells if is_check(cell)).metadata.nbgrader["grade_id"]
    return nb


def _pasted(desk: Desk) -> nbformat.NotebookNode:
    nb, answer = desk.exercise(), [cell.source for cell in desk.solution().cells if is_answer(cell)][3]
    cell = [cell for cell in nb.cells if is_answer(cell)][3]
    cell.source = PASTED.format(source=answer)
    return nb


def _clone(desk: Desk, person: str) -> None:
    place = desk.folder / person / "course-main"
    shutil.copytree(desk.course, place)
    (place / "course_utils").mkdir()
    (place / "course_utils" / "__init__.py").touch()
    nbformat.write(desk.answered(4, 5), place / "exercises" / "90_short_exercises.ipynb")
