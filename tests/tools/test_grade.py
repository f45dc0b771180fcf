"""What an instructor finds after a workshop: right and wrong answers, programs that go wrong, things with odd names."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from conftest import ROOT, missing

from tools import ToolError
from tools.__main__ import main
from tools.grade import fence
from tools.grade.hand_ins import assignments

KEPT = ("mean_and_variance", "ring_shift", "gradient_all_reduce_seconds", "bandwidths", "all_gather_seconds")
CHECKS = [f"check_{name}" for name in KEPT]
PAPER = 4  # the number of an answer that needs no ranks


class Desk:
    """A course with a short exercise notebook, five exercises of lesson 02, two of them on ranks; and hand-ins."""

    def __init__(self, place: Path) -> None:
        self.course, self.folder = place / "course", place / "in"
        self.folder.mkdir()
        for folder, name in (("exercises", "02_collectives_exercises"), ("solutions", "02_collectives_solutions")):
            (self.course / folder).mkdir(parents=True)
            nb = nbformat.read(ROOT / folder / f"{name}.ipynb", 4)
            nb.cells = self._short(nb.cells)
            nbformat.write(nb, self.course / folder / f"{name.replace('02_collectives', '90_short')}.ipynb")
        self.exercise = nbformat.read(self.course / "exercises" / "90_short_exercises.ipynb", 4)

    @staticmethod
    def _short(cells: list) -> list:
        """Imports, and of each exercise that is kept the card, the answer and the check."""
        kept, since = [next(cell for cell in cells if "parameters" in cell.metadata.get("tags", []))], []
        for cell in cells:
            since.append(cell)
            mark = cell.metadata.get("nbgrader", {})
            if mark.get("grade"):
                if mark["grade_id"] in CHECKS:
                    kept += [each for each in since if each.metadata.get("nbgrader") or "| difficulty |" in each.source]
                since = []
        return kept

    def answered(self, numbers: range | tuple[int, ...] = range(1, 6), first: str = "", **other: str):
        """The notebook with some answers of the solution, counted from 1, others as given, and perhaps a cell before.

        An answer that begins with a comment is the solution's, and then this code.
        """
        nb = nbformat.read(self.course / "solutions" / "90_short_solutions.ipynb", 4)
        stubs = [cell.source for cell in self.exercise.cells if is_answer(cell)]
        for number, cell in enumerate(filter(is_answer, nb.cells), 1):
            if new := other.get(KEPT[number - 1]):
                cell.source = f"{cell.source}\n\n{new}" if new.startswith("#") else new
            elif number not in numbers:
                cell.source = stubs[number - 1]
        if first:
            nb.cells.insert(1, nbformat.v4.new_code_cell(first))
        return nb

    def put(self, person: str, nb: nbformat.NotebookNode | str, name: str = "90_short.ipynb") -> Path:
        path = self.folder / person / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nb if isinstance(nb, str) else nbformat.writes(nb))
        return path

    def grade(self, *options: str) -> dict[str, dict]:
        """The rows of all hand-ins by person, of several the last."""
        path = self.folder.parent / "grades.json"
        main(["grade", str(self.folder), "--course", str(self.course), "--json", str(path), *options])
        return {row["person"]: row for row in json.loads(path.read_text())["rows"]}


def is_answer(cell) -> bool:
    return bool(cell.metadata.get("nbgrader", {}).get("solution"))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # pytest makes them private; that is not what is to keep a hand-in out
    return Desk(tmp_path)


@pytest.fixture(params=["bubblewrap", "user"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kind of fence."""
    monkeypatch.setattr(fence, "KINDS", (request.param,))
    try:
        return fence.choose()
    except ToolError as error:
        missing(str(error))


def running(text: str) -> list[int]:
    """Processes whose command contains a text."""
    return [each.pid for each in psutil.process_iter(["cmdline"]) if text in " ".join(each.info["cmdline"] or [])]


def messages(row: dict) -> dict[str, str]:
    return {check["name"].removeprefix("check_"): check["message"] for check in row["checks"]}


DEADLOCK = """def ring_shift(x, by):
    y = torch.empty_like(x)
    dist.recv(y, src=(dist.get_rank() + 1) % dist.get_world_size())
    return y"""
ENDS = {
    "ring_shift": "def ring_shift(x, by):\n    import os\n    os._exit(3)",
    "gradient_all_reduce_seconds": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "bandwidths": "def bandwidths(*a):\n    import os\n    os._exit(1)",
}
STUBBORN = "import time\nwhile True:\n    try:\n        time.sleep(1)\n    except BaseException: pass"


@pytest.mark.guard(400)
def test_right_answers_get_all_points_wrong_ones_a_reason_and_what_ends_python_costs_only_itself(desk: Desk):
    noisy = {"ring_shift": "# and\nfor i in range(200):\n    print('x' * 100_000)", "bandwidths": "# and\nexit(1)"}
    desk.put("right", desk.answered(**noisy))
    path = desk.put("copies", desk.answered((PAPER,)), "submission final (1).ipynb")
    os.utime(desk.put("copies", desk.answered(()), "old/90_short.ipynb"), (path.stat().st_mtime - 60,) * 2)
    wrong = {"mean_and_variance": "def mean_and_variance(x):\n    return x.mean(), x.var()",
             "ring_shift": DEADLOCK, "bandwidths": "def bandwidths(op, ranks:\n    return 1"}
    desk.put("wrong", desk.answered(**wrong))
    desk.put("ends", desk.answered(**ENDS))
    own_checks = desk.answered((PAPER,), "check = 3")
    for cell in [cell for cell in own_checks.cells if cell.metadata.get("nbgrader", {}).get("grade")]:
        cell.source = "pass"
        if cell.metadata.nbgrader.grade_id == "check_bandwidths":
            own_checks.cells.remove(cell)
    desk.put("own_checks", own_checks)
    rows = desk.grade("--jobs", "2")
    got = {person: (row["passed"], row["total"]) for person, row in rows.items()}
    assert got == {"right": (5, 5), "copies": (1, 5), "wrong": (2, 5), "ends": (2, 5), "own_checks": (1, 5)}
    assert (rows["right"]["points"], rows["right"]["of"], rows["right"]["failed"]) == (10, 10, "")
    assert "of 2 copies the newest" in rows["copies"]["note"] and rows["copies"]["file"] == str(path)
    assert "rank" in messages(rows["wrong"])["ring_shift"] and "SyntaxError" in messages(rows["wrong"])["bandwidths"]
    assert rows["ends"]["failed"].split() == [f"check_{name}" for name in ENDS]
    assert "exit code 3" in messages(rows["ends"])["ring_shift"] and "ended Python" in rows["ends"]["note"]
    assert "check cells changed" in rows["own_checks"]["note"] and "missing: check_band" in rows["own_checks"]["note"]
    assert not running("tools.grade.inside")


LOOK = """import os, socket, subprocess
left = subprocess.Popen(['sleep', '86397'], start_new_session=True)
for folder in ("..", {other!r}, {course!r} + "/exercises", {package!r}):
    try:
        open(folder + "/DEFACED.txt", "w").write("x")
    except OSError:
        pass
seen = [place for place in {hidden!r} if os.path.exists(place)]
raise RuntimeError(f"sees {{seen}}, {{[name for _, name in socket.if_nameindex()]}}, {{os.getuid()}}")"""


def test_hand_in_writes_nowhere_but_its_folder_and_leaves_nothing(desk: Desk, tmp_path: Path, kind: str):
    """And with bubblewrap it sees neither other hand-ins nor the home folder nor a network."""
    other = desk.put("eve", desk.exercise)
    hidden = [desk.course, desk.folder, ROOT / "solutions", ROOT / "tests"]
    hidden += [path for path in Path.home().iterdir() if not sys.base_prefix.startswith(str(path))]
    look = LOOK.format(other=str(other.parent), course=str(desk.course), package=str(ROOT / "course_utils"),
                       hidden=[*map(str, hidden)])
    desk.put("ada", desk.answered((PAPER,), look))
    row = desk.grade()["ada"]
    assert row["failed"].split() == [name for name in CHECKS if name != "check_bandwidths"]
    assert "RuntimeError: sees " in row["note"]
    assert kind != "bubblewrap" or "RuntimeError: sees [], ['lo'], 1000" in row["note"]
    assert not running("sleep 86397")
    assert not [*tmp_path.rglob("DEFACED.txt"), *ROOT.glob("*/DEFACED.txt")]


def test_without_a_fence_nothing_is_run_unless_asked(desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Neither where the programs are missing, nor where the system refuses namespaces, unless another user can be."""
    desk.put("ada", desk.answered())
    (tmp_path / "bin").mkdir()
    with monkeypatch.context() as inside:
        inside.setenv("PATH", str(tmp_path / "bin"))
        with pytest.raises(ToolError, match=r"(?s)sudo apt install bubblewrap.*container.*--no-sandbox"):
            fence.choose()
        with pytest.raises(FileNotFoundError):  # of the results: nothing has been run
            desk.grade()
    bwrap = tmp_path / "bin" / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    try:
        assert fence.choose() == "user"
    except ToolError as error:
        assert re.search("No permissions to create new namespace; .*(chmod o\\+x|only root can)", str(error))


def test_a_check_whose_ranks_do_not_start_is_not_graded_and_takes_no_points(desk: Desk, tmp_path: Path):
    """What a machine does that lets Python start no other Python."""
    no_ranks = """import multiprocessing
from course_utils.ranks import processes
processes.end_server()
multiprocessing.set_executable("/home")"""
    desk.put("ada", desk.answered(first=no_ranks))
    desk.put("bob", desk.exercise)
    desk.put("cyd", "", "90_short.ipynb")
    desk.grade("--csv", str(tmp_path / "g.csv"), "--feedback", str(tmp_path / "feedback"), "--no-sandbox")
    rows = [[each[key] for key in ("person", "notebook", "passed", "total", "points", "of", "not_graded")]
            for each in csv.DictReader((tmp_path / "g.csv").open())]
    ranks = "check_mean_and_variance check_ring_shift"
    assert rows == [["ada", "90_short", "3", "3", "7", "7", ranks], ["ada", "sum", "3", "3", "7", "7", ""],
                    ["bob", "90_short", "0", "5", "0", "10", ""], ["bob", "sum", "0", "5", "0", "10", ""],
                    ["cyd", "90_short", "0", "5", "0", "10", ""], ["cyd", "sum", "0", "5", "0", "10", ""]]
    feedback = (tmp_path / "feedback" / "ada.md").read_text()
    assert "## 90_short: 7 of 7 points" in feedback and "**not graded**: check_ring_shift, 2 points" in feedback


@pytest.mark.guard(200)
def test_cell_without_end_costs_only_itself_and_a_notebook_ends_at_its_limit(desk: Desk):
    endless = "# and\nimport time\ntime.sleep(600)"
    desk.put("endless", desk.answered((PAPER,), STUBBORN, gradient_all_reduce_seconds=endless))
    row = desk.grade("--timeout", "10")["endless"]  # a busy machine needs some for the right ones
    assert row["passed"] == 2 and "cell 2 ended Python" in row["note"] and "interrupted after 10 s" in row["note"]
    shutil.rmtree(desk.folder / "endless")
    desk.put("slow", desk.answered((1,), "import time\ntime.sleep(600)"))
    row = desk.grade("--limit", "8")["slow"]
    assert row["passed"] == 0 and "ended after 8 s" in row["note"]
    assert row["checks"][0]["message"] == "The check was not reached."


def test_killed_grading_keeps_its_rows_and_leaves_no_process(desk: Desk, tmp_path: Path):
    desk.put("ada", desk.answered((PAPER,)))
    desk.put("bob", desk.answered((PAPER,), "import subprocess\nsubprocess.run(['sleep', '86396'])"))
    arguments = ["grade", desk.folder, "--course", desk.course, "--json", tmp_path / "grades.json"]
    grader = subprocess.Popen([sys.executable, "-m", "tools", *arguments], cwd=ROOT)
    try:
        until = time.monotonic() + 120
        while not running("sleep 86396") and time.monotonic() < until:
            time.sleep(0.2)
        started = psutil.Process(grader.pid).children(recursive=True)
    finally:
        grader.send_signal(signal.SIGTERM)
        grader.wait()
    rows = json.loads((tmp_path / "grades.json").read_text())["rows"]
    assert [(row["person"], row["passed"]) for row in rows] == [("ada", 1)]
    _, left = psutil.wait_procs(started, timeout=60)
    assert started and not left and not running("sleep 86396")


# -------------------------------------------------------------------------- who, what and where: nothing is run


def test_roster_finds_persons_and_says_who_is_missing_or_unknown(desk: Desk, tmp_path: Path):
    roster = tmp_path / "names.csv"
    roster.write_text("e-mail,person\na@x,Ann Müller\nb@x,Bob Ray\nc@x,Cyd Fox\n", "utf-8")
    for place in ("ann muller_12345_assignsubmission_file_", "Zed"):
        desk.put(place, desk.exercise)
    (desk.folder / "submission BOB RAY final (1).ipynb").write_text(nbformat.writes(desk.exercise))
    (desk.folder / "ada_90_short_exercises.ipynb").write_text(nbformat.writes(desk.exercise))
    notes = {person: row["note"] for person, row in desk.grade("--roster", str(roster)).items()}
    assert set(notes) == {"Ann Müller", "Bob Ray", "Cyd Fox", "Zed", "ada"}
    assert "not on the roster" in notes["Zed"] and "not on the roster" not in notes["Bob Ray"]
    assert notes["Cyd Fox"] == "not handed in"
    assert "not an exercise notebook that was set" in desk.grade("--only", "02_collectives")["Zed"]["note"]


def test_every_folder_gets_a_row_that_says_what_is_in_it(desk: Desk):
    own = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1")]))
    for person, name, content in (
        ("empty", "90_short.ipynb", ""), ("json", "90_short.ipynb", "[1, 2]"), ("own", "own.ipynb", own),
        ("zip", "answers.zip", "PK"), ("untouched", "90_short.ipynb", desk.exercise),
    ):
        desk.put(person, content, name)
    (desk.folder / "nothing").mkdir()
    shutil.copytree(desk.course, desk.folder / "clone" / "course-main")
    wanted = {"empty": "the file is empty", "json": "not a notebook that can", "own": "not an exercise notebook",
              "zip": "no notebook, only answers.zip", "untouched": "no exercise in it has been answered",
              "nothing": "an empty folder", "clone": "a whole copy of the course; only its exercises count"}
    assert desk.grade().keys() == wanted.keys()
    rows = json.loads((desk.folder.parent / "grades.json").read_text())["rows"]
    notes = {person: [row["note"] for row in rows if row["person"] == person] for person in wanted}
    assert all(text in notes[person][0] for person, text in wanted.items())
    assert notes["zip"][1:] == ["not handed in"] and not any(row["passed"] for row in rows)


def test_a_wrong_folder_is_told(desk: Desk, capsys: pytest.CaptureFixture[str]):
    for folder, what in ((desk.folder / "none", "is not a folder"), (ROOT, "is a copy of the course"),
                         (desk.folder, "neither")):
        assert main(["grade", str(folder)]) == 1
        assert what in capsys.readouterr().err


def test_points_of_each_check_are_on_its_card():
    for name, assignment in assignments(ROOT).items():
        text = (ROOT / "lessons" / name[3:] / "exercises.py").read_text()
        _, *parts = re.split(r"^# \| difficulty .*\n# \|[-| ]+\n# \| (\d) of 5 ", text, flags=re.MULTILINE)
        cards = zip(map(int, parts[::2]), parts[1::2], strict=True)
        on_cards = [points for points, cells in cards for _ in re.findall(r"^check\.\w+\(", cells, re.MULTILINE)]
        assert on_cards and [*assignment.points.values()] == on_cards and assignment.imports, name
