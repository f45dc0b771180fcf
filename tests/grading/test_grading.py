"""What a right hand-in gets never depends on load; what a hand-in does to checks or to others is told."""

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

import hand_ins
import nbformat
import psutil
import pytest
from conftest import ROOT, missing
from hand_ins import CHECKS, Desk

from course_utils import grading
from course_utils.__main__ import main
from course_utils.grading.assignments import assignments
from course_utils.grading.collect import NothingToGrade
from course_utils.grading.report import Report
from course_utils.grading.run import Result
from course_utils.grading.sandbox import Sandbox, SandboxMissing

PAPER = 4  # the number of an answer that needs no ranks


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course of one real exercise notebook and a short one."""
    return hand_ins.make_course(tmp_path_factory.mktemp("course") / "course")


@pytest.fixture
def desk(course: Path, tmp_path: Path) -> Desk:
    (tmp_path / "in").mkdir()
    return Desk(course, tmp_path / "in")


@pytest.fixture(params=["bubblewrap", "user"])
def sandbox(request: pytest.FixtureRequest) -> str:
    """Each kind that fences a hand-in."""
    try:
        Sandbox(request.param)
    except SandboxMissing as error:
        missing(str(error))
    return request.param


class BesideALoad(Report):
    """A report during which three busy loops run, until the first two hand-ins have been graded."""

    def __enter__(self) -> BesideALoad:
        self._loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
        return self

    def __exit__(self, *error: object) -> None:
        for loop in self._loops:
            loop.kill()
            loop.wait()

    def add(self, new: dict, done: int, of: int) -> None:
        super().add(new, done, of)
        if done == 2:
            self.__exit__()


def running(text: str) -> list[int]:
    """Processes whose command contains a text."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if text in " ".join(process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def by_person(rows: list[dict]) -> dict[str, dict]:
    return {row["person"]: row for row in rows}


def verdicts(row: dict) -> dict[str, dict]:
    return {check["name"].removeprefix("check_"): check for check in row["checks"]}


@pytest.mark.guard(600)
def test_hand_ins_of_every_kind_the_right_ones_beside_a_load(desk: Desk, tmp_path: Path):
    expected = hand_ins.make(desk)
    files = {"csv": tmp_path / "out" / "grades.csv", "json": tmp_path / "out" / "grades.json"}
    with BesideALoad(**files) as report:
        rows = by_person(grading.grade(desk.folder, jobs=2, root=desk.course, report=report))
    got = {person: (row["passed"], row["total"]) for person, row in rows.items()}
    assert got == {person: (passed, of) for person, (passed, of, _) in expected.items()}
    notes = {person: row["note"] for person, row in rows.items()}
    assert not [(person, note) for person, (*_, said) in expected.items() for note in said if note not in notes[person]]
    assert all(row["points"] == row["of"] for row in rows.values() if row["passed"] == row["total"])
    assert not [
        each for each in psutil.Process().children(recursive=True) if "grading.kernel" in " ".join(each.cmdline())
    ]
    told = json.loads(files["json"].read_text())
    assert by_person(told["rows"]) == rows

    wrong, ends = verdicts(rows["05_wrong"]), verdicts(rows["06_ends"])
    deadlock = wrong["ring_shift"]
    assert deadlock["tried_again"] and deadlock["hint"] in ("hang", "deadlock") and "rank" in deadlock["message"]
    assert not wrong["mean_and_variance"]["tried_again"]
    assert "SyntaxError" in wrong["bandwidths"]["message"]
    assert ends["ring_shift"]["message"].count("exit code 3")
    failed = ["check_ring_shift", "check_gradient_all_reduce_seconds", "check_bandwidths"]
    assert rows["06_ends"]["failed"].split() == failed
    assert verdicts(rows["10_pasted"])["ring_shift"]["hint"] == "empty"
    assert rows["01_right"]["same_as_solution"].split() == CHECKS
    assert rows["10_pasted"]["same_as_solution"] == "check_bandwidths"
    assert rows["05_wrong"]["same_as_solution"].split() == [CHECKS[2], CHECKS[4]]


def test_answer_in_other_words_is_not_the_solution_and_one_with_other_names_is(desk: Desk):
    nb = desk.answered(1, PAPER)
    for cell in filter(hand_ins.is_answer, nb.cells):
        cell.source = cell.source.replace("sums", "values").replace("total", "whole").replace('"""Algorithm', '"""My')
        cell.source = cell.source.replace("return op", "op = str(op)\n    return op")
    words = nb.cells[[hand_ins.is_answer(cell) for cell in nb.cells].index(True) :]
    answers = [cell for cell in words if hand_ins.is_answer(cell)]
    answers[3].source = answers[3].source.replace('"""\n    ', '"""\n    ranks = int(ranks)\n    ')
    desk.put("ada", nb)
    (row,) = grading.grade(desk.folder, root=desk.course)
    assert (row["passed"], row["same_as_solution"]) == (2, "check_mean_and_variance")


LOOK = """import os, socket
seen = [place for place in {hidden!r} if os.path.exists(place)]
names = [name for _, name in socket.if_nameindex()]
raise RuntimeError(f"sees {{seen}}, {{names}}, {{os.getuid()}}")"""


def test_hand_in_writes_nowhere_but_its_folder_and_leaves_nothing(desk: Desk, tmp_path: Path, sandbox: str):
    """And with bubblewrap it sees neither solutions nor other hand-ins nor a network."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # pytest makes them private; that is not what is to keep a hand-in out
    other = desk.put("eve", desk.exercise())
    places = {"folder": other.parent, "course": desk.course, "package": ROOT / "course_utils"}
    outside = hand_ins.OUTSIDE.format(**{name: str(path) for name, path in places.items()})
    hidden = [desk.course, desk.folder, ROOT / "solutions", ROOT / "sources", ROOT / "tests"]
    hidden += [path for path in Path.home().iterdir() if not sys.base_prefix.startswith(str(path))]
    look = LOOK.format(hidden=[*map(str, hidden)])
    desk.put("ada", desk.with_cell(f"{hand_ins.STAYS}\n{outside}\n{look}", desk.answered(PAPER)))
    row = by_person(grading.grade(desk.folder, root=desk.course, sandbox=sandbox))["ada"]
    assert row["failed"].split() == [name for name in CHECKS if name != "check_bandwidths"]
    assert "left a process behind, which was ended: sleep 86397" in row["note"]
    assert "RuntimeError: sees " in row["note"]
    if sandbox == "bubblewrap":
        assert "RuntimeError: sees [], ['lo'], 1000" in row["note"]
    assert not running("sleep 86397")
    assert not list(tmp_path.rglob("DEFACED.txt")) and not list(ROOT.glob("*/DEFACED.txt"))
    assert not list(Path("/tmp").glob("course-grade-*/DEFACED.txt"))


def test_without_a_fence_nothing_is_run_unless_asked(desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    desk.put("ada", desk.answered(PAPER))
    with monkeypatch.context() as inside:
        inside.setenv("PATH", str(tmp_path))  # neither bwrap nor setpriv
        with pytest.raises(SandboxMissing, match=r"(?s)sudo apt install bubblewrap.*container.*--no-sandbox"):
            grading.grade(desk.folder, root=desk.course)
    (row,) = grading.grade(desk.folder, root=desk.course, sandbox="none")
    assert row["passed"] == 1


@pytest.fixture
def without_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bubblewrap that says what it says where the system refuses namespaces."""
    (tmp_path / "bin").mkdir()
    bwrap = tmp_path / "bin" / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def test_where_namespaces_are_refused_solutions_get_all_points_as_another_user_or_without_a_fence(
    desk: Desk, without_namespaces: None
):
    desk.put("ada", desk.solution())
    try:
        kind = Sandbox().kind
        assert kind == "user"
    except SandboxMissing as error:
        assert re.search("No permissions to create new namespace; .*(chmod o\\+x|only root can)", str(error))
        kind = "none"
    (row,) = grading.grade(desk.folder, root=desk.course, sandbox=kind)
    assert (row["points"], row["of"], row["not_graded"]) == (10, 10, ""), row["checks"]


def test_a_check_whose_ranks_do_not_start_is_not_graded_and_takes_no_points(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """What a machine does that lets Python start no other Python."""
    desk.put("ada", desk.with_cell(hand_ins.NO_RANKS, desk.solution()))
    desk.put("bob", desk.exercise())
    files = {"csv": tmp_path / "g.csv", "feedback": tmp_path / "feedback"}
    grading.grade(desk.folder, root=desk.course, report=Report(**files), sandbox="none")
    rows = [
        [each[key] for key in ("person", "passed", "total", "points", "of", "not_graded")]
        for each in csv.DictReader(files["csv"].open())
    ]
    ranks = "check_mean_and_variance check_ring_shift"
    assert rows == [["ada", "3", "3", "7", "7", ranks], ["ada", "3", "3", "7", "7", ""],
                    ["bob", "0", "5", "0", "10", ""], ["bob", "0", "5", "0", "10", ""]]
    assert f"3 of 3, not graded: {ranks}" in capsys.readouterr().err
    feedback = (files["feedback"] / "ada.md").read_text()
    assert "**not graded**: check_ring_shift, 2 points" in feedback and "the ranks cannot be started" in feedback


def test_cell_without_end_costs_only_itself_even_if_it_ignores_the_interrupt(desk: Desk):
    stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    nb = desk.answered(3, PAPER)
    [cell for cell in nb.cells if hand_ins.is_answer(cell)][2].source += f"\n\n{hand_ins.ENDLESS}"
    desk.put("ada", desk.with_cell(stubborn, nb))
    (row,) = grading.grade(desk.folder, timeout=3, root=desk.course)
    assert row["passed"] == 2 and "cell 2 ended its kernel" in row["note"] and "interrupted after 3 s" in row["note"]


def test_notebook_is_ended_at_its_limit_and_what_was_not_reached_is_tried_again(desk: Desk):
    nb = desk.answered(PAPER)
    third = [number for number, cell in enumerate(nb.cells) if hand_ins.is_check(cell)][2]
    del nb.cells[1 : third + 1]  # little is run before it, so that a busy machine gets there in time
    nb.cells.insert(len(nb.cells) - 1, nbformat.v4.new_code_cell("import time\ntime.sleep(600)"))
    desk.put("ada", nb)
    (row,) = grading.grade(desk.folder, limit=20, root=desk.course)
    assert row["passed"] == 1 and "ended after 20 s" in row["note"]
    last = row["checks"][-1]
    assert last["tried_again"] and last["message"] == "The check was not reached."


def test_check_that_passes_when_tried_again_counts_and_says_so(course: Path, desk: Desk):
    from course_utils.grading.collect import collect

    desk.put("ada", desk.solution())
    (hand_in,) = collect(desk.folder, assignments(course))
    first, second = Result.empty(hand_in), Result.empty(hand_in)
    for name in CHECKS:
        first.verdicts[name].passed = name != "check_ring_shift"
    first.verdicts["check_ring_shift"].slow = True
    assert first.slow() == ["check_ring_shift"]
    second.verdicts = {"check_ring_shift": second.verdicts["check_ring_shift"]}
    second.verdicts["check_ring_shift"].passed = True
    first.take(second)
    assert all(verdict.passed for verdict in first.verdicts.values()) and not first.slow()
    assert first.notes == ["check_ring_shift passed when it was tried again, alone"]


def test_killed_grading_keeps_its_rows_and_leaves_no_process(desk: Desk, tmp_path: Path, sandbox: str):
    desk.put("ada", desk.answered(PAPER))
    sleeping = "import subprocess\nsubprocess.run(['sleep', '86396'])"
    desk.put("bob", desk.with_cell(sleeping, desk.answered(PAPER)))
    program = (
        "from pathlib import Path; from course_utils.grading import Report, grade\n"
        f"grade(Path({str(desk.folder)!r}), root=Path({str(desk.course)!r}), sandbox={sandbox!r}, "
        f"report=Report(json=Path({str(tmp_path / 'grades.json')!r})))"
    )
    grader = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        until = time.monotonic() + 120
        while not running("sleep 86396") and time.monotonic() < until:
            time.sleep(0.2)
        started = psutil.Process(grader.pid).children(recursive=True)
        folders = {
            place for each in started for place in re.findall(r"/\S*/course-grade-\w+", " ".join(each.cmdline()))
        }
    finally:
        grader.send_signal(signal.SIGTERM if sandbox == "user" else signal.SIGKILL)
        grader.wait()
    rows = by_person(json.loads((tmp_path / "grades.json").read_text())["rows"])
    assert {person: row["passed"] for person, row in rows.items()} == {"ada": 1}
    for place in folders:  # a killed grader cannot remove them itself
        shutil.rmtree(place, ignore_errors=True)
    _, left = psutil.wait_procs(started, timeout=90)
    assert started and not left and not running("sleep 86396")


# -------------------------------------------------------------------------- who, what and where: nothing is run


def test_roster_finds_persons_and_says_who_is_missing_or_unknown(desk: Desk, tmp_path: Path):
    roster = tmp_path / "names.csv"
    roster.write_text("e-mail,person\na@x,Ann Müller\nb@x,Bob Ray\nc@x,Cyd Fox\n", "utf-8")
    for place in ("ann muller_12345_assignsubmission_file_", "Zed"):
        desk.put(place, desk.exercise())
    (desk.folder / "submission BOB RAY final (1).ipynb").write_text(nbformat.writes(desk.exercise()))
    rows = by_person(grading.grade(desk.folder, root=desk.course, roster=roster))
    assert set(rows) == {"Ann Müller", "Bob Ray", "Cyd Fox", "Zed"}
    assert "not on the roster" in rows["Zed"]["note"] and "not on the roster" not in rows["Bob Ray"]["note"]
    assert rows["Cyd Fox"]["note"] == "on the roster, but handed nothing in"
    assert rows["Bob Ray"]["notebook"] == "90_short"


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("notes.ipynb", '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "no code in it"),
        ("90_short.ipynb", "", "the file is empty"),
        ("90_short.ipynb", "[1, 2]", "not a notebook that can be read"),
        ("90_short.ipynb", b"\xff\xfe\x00", "not a notebook that can be read"),
        ("own.ipynb", None, "not an exercise notebook of the course"),
        ("answers.zip", "PK", "no notebook, only answers.zip"),
    ],
    ids=["no-cells", "empty", "other-json", "binary", "own", "zip"],
)
def test_every_folder_gets_a_row_that_says_what_is_in_it(desk: Desk, name: str, content: str | bytes | None, note: str):
    own = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1")]))
    (desk.folder / "ada").mkdir()
    (desk.folder / "ada" / name).write_bytes(content if isinstance(content, bytes) else (content or own).encode())
    if content == "":
        (desk.folder / "ada" / name).touch()
        (desk.folder / "ada" / name).write_text("")
    (row,) = grading.grade(desk.folder, root=desk.course)
    assert row["person"] == "ada" and note in row["note"] and row["passed"] == 0


def test_wrong_folder_is_said(desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for folder, what in (
        (tmp_path / "none", "is not a folder"),
        (ROOT, "is a copy of the course"),
        (desk.folder, "neither"),
    ):
        with pytest.raises(NothingToGrade, match=what):
            grading.grade(folder, root=desk.course)
        assert main(["grade", str(folder)]) == 1
        assert what in capsys.readouterr().err
    (desk.folder / "ada").mkdir()
    assert main(["grade", str(desk.folder)]) == 1
    assert "no exercise notebook found" in capsys.readouterr().err


def test_table_sums_points_by_person_over_all_notebooks(desk: Desk, tmp_path: Path):
    desk.put("ada", desk.exercise())
    released = nbformat.read(desk.course / "exercises" / "02_collectives_exercises.ipynb", 4)
    desk.put("bob", released, "02_collectives_exercises.ipynb")
    files = {"csv": tmp_path / "g.csv", "json": tmp_path / "g.json", "feedback": tmp_path / "feedback"}
    grading.grade(desk.folder, root=desk.course, report=Report(**files))
    rows = list(csv.DictReader(files["csv"].open()))
    assert [(row["person"], row["notebook"], row["of"]) for row in rows] == [
        ("ada", "90_short", "10"), ("ada", "sum", "23"), ("bob", "02_collectives", "13"), ("bob", "sum", "23"),
    ]
    told = json.loads(files["json"].read_text())
    assert [entry["of"] for entry in told["sums"]] == [23, 23]
    feedback = (files["feedback"] / "ada.md").read_text()
    assert "## 90_short: 0 of 10 points" in feedback and "check_ring_shift, 2 points" in feedback
    only = grading.grade(desk.folder, root=desk.course, only=["90_short"])
    assert [row["person"] for row in only] == ["ada"]


@pytest.mark.parametrize("name", sorted(assignments(ROOT)))
def test_points_of_each_check_are_on_its_card(name: str):
    text = (ROOT / "sources" / f"{name}_exercises.py").read_text()
    _, *parts = re.split(r"^# \| difficulty .*\n# \|[-| ]+\n# \| (\d) of 5 ", text, flags=re.MULTILINE)
    cards = zip(map(int, parts[::2]), parts[1::2], strict=True)
    on_cards = [points for points, cells in cards for _ in re.findall(r"^check\.\w+\(", cells, re.MULTILINE)]
    checks = assignments(ROOT)[name].checks.values()
    assert on_cards and [check.points for check in checks] == on_cards
    assert all(check.solution for check in checks)


def test_help_says_that_it_runs_learners_code_and_how_it_is_fenced(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["grade", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "runs learners' code" in text and "bubblewrap" in text and "--no-sandbox" in text
