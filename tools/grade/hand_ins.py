"""Which notebook is whose, and which exercises it answers, whatever it is called."""

from __future__ import annotations

import csv
import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from tools import ToolError

_CARD = re.compile(r"^\|\s*difficulty\s*\|.*\n\|[-:| ]+\|\n\|\s*(\d)\b", re.MULTILINE)
_IMPORTS = re.compile(r"^from lessons\.\w+ import .*\bcheck\b.*$", re.MULTILINE)


@dataclass
class Assignment:
    """An exercise notebook as it was handed out: its check cells with their points, the source of every code cell."""

    name: str
    imports: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)


@dataclass
class Verdict:
    """What one check said; where it is not graded the machine is at fault, and it takes no points."""

    name: str
    points: int
    passed: bool = False
    hint: str = ""
    message: str = "The check was not reached."
    graded: bool = True


class HandIn:
    """A notebook of a person, or why there is none, and what became of it; only if it is ``gradable`` it is run."""

    def __init__(self, person: str, notes: list[str], path: Path | None = None, answers: Assignment | None = None):
        self.person, self.path, self.notes = person, path, [*notes]
        self.cells: list[tuple[str, str]] = []  # code and nbgrader's id, of every cell; both empty for text
        self.gradable, self.seconds = False, 0.0
        self.answer(answers)

    def answer(self, assignment: Assignment | None) -> None:
        """Note what it answers, with no check passed."""
        self.assignment = assignment
        points = assignment.points if assignment else {}
        self.verdicts = {name: Verdict(name, number) for name, number in points.items()}


def assignments(root: Path) -> dict[str, Assignment]:
    """All exercise notebooks of a course by name; a check is worth the difficulty on the card before it."""
    found = {}
    for path in sorted((root / "exercises").glob("*_exercises.ipynb")):
        name = path.stem.removesuffix("_exercises")
        each = found[name] = Assignment(name)
        points = 1
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                card = _CARD.search(cell.source)
                points = int(card[1]) if card else points
                continue
            each.sources.add(cell.source.strip())
            each.imports += "".join(f"{line}\n" for line in _IMPORTS.findall(cell.source))
            marks = cell.metadata.get("nbgrader", {})
            if marks.get("grade"):
                each.checks[marks["grade_id"]], each.points[marks["grade_id"]] = cell.source, points
    return found


def read_roster(path: Path) -> list[str]:
    """Names in the column ``person`` of a CSV file, or in its first column if there is none of that name."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file) if any(row)]
    titles = [title.casefold() for title in rows[0]] if rows else []
    column = titles.index("person") if "person" in titles else 0
    return [row[column] for row in rows["person" in titles :] if len(row) > column and row[column]]


def collect(
    folder: Path, known: dict[str, Assignment], roster: list[str] | None = None, only: list[str] | None = None
) -> list[HandIn]:
    """Every hand-in below a folder: of each person the notebooks that anybody handed in, of those named in ``only``.

    The first folder's name, or that of a notebook without a folder, is the person; where a roster is given, the one
    name of it that this name contains.
    """
    if not folder.is_dir():
        raise ToolError(f"{folder} is not a folder")
    if _is_course(folder):
        raise ToolError(f"{folder} is a copy of the course; give the folder that holds one folder a person")
    entries = sorted(path for path in folder.iterdir() if path.name[0] != "." and (path.is_dir() or _notebook(path)))
    if not entries:
        raise ToolError(f"{folder} holds neither folders nor notebooks")
    known = {name: each for name, each in known.items() if not only or name in only}
    found: dict[str, list[HandIn]] = {person: [] for person in roster or ()}
    for entry in entries:
        person, notes = _on_roster(_person(entry, known), roster)
        found.setdefault(person, []).extend(_of_person(person, entry, known, notes))
    names = sorted({each.assignment.name for own in found.values() for each in own if each.assignment})
    hand_ins = []
    for person, own in found.items():
        hand_ins += [each for each in own if not each.assignment]
        for name in names:
            copies = [each for each in own if each.assignment and each.assignment.name == name]
            copies.sort(key=lambda each: (each.gradable, each.path.stat().st_mtime))
            if len(copies) > 1:
                copies[-1].notes.append(f"of {len(copies)} copies the newest answered one counts: {copies[-1].path}")
            hand_ins.append(copies[-1] if copies else HandIn(person, ["not handed in"], None, known[name]))
    return hand_ins


def _is_course(folder: Path) -> bool:
    """True for the course itself and for a learner's copy of it."""
    return (folder / "exercises").is_dir() and (folder / "solutions").is_dir()


def _notebook(path: Path) -> bool:
    return path.suffix == ".ipynb" and path.is_file()


def _person(entry: Path, known: dict[str, Assignment]) -> str:
    """``ada`` of ``ada_02_collectives.ipynb``; a name that is nothing but the notebook's stays."""
    names = "|".join(map(re.escape, known)) or "$"
    return entry.is_file() and re.sub(rf"({names})(_exercises|_solutions)?", " ", entry.stem).strip(" _-") or entry.stem


def _on_roster(name: str, roster: list[str] | None) -> tuple[str, list[str]]:
    """The person of a roster that a name contains, or the name itself and a note."""
    fits = [person for person in roster or () if f" {_plain(person)} " in f" {_plain(name)} "]
    longest = [person for person in fits if len(person) == max(map(len, fits))]
    return (longest[0], []) if len(longest) == 1 else (name, [] if roster is None else ["not on the roster"])


def _plain(name: str) -> str:
    letters = unicodedata.normalize("NFKD", name).casefold()
    return " ".join(re.findall(r"[^\W_]+", "".join(c for c in letters if not unicodedata.combining(c))))


def _of_person(person: str, entry: Path, known: dict[str, Assignment], notes: list[str]) -> list[HandIn]:
    """What a person's folder or notebook holds; of a whole copy of the course only its exercises, if answered."""
    paths = [entry] if entry.is_file() else [path for path in sorted(entry.rglob("*.ipynb")) if _notebook(path)]
    paths = [path for path in paths if not any(part[0] == "." for part in path.relative_to(entry.parent).parts)]
    copies = [path for path in paths if entry.is_dir() and _is_course(path.parent.parent)]
    if copies:
        notes = [*notes, "a whole copy of the course; only its exercises count"]
        paths = [path for path in paths if path not in copies or path.parent.name == "exercises"]
    if not paths:
        names = ", ".join(sorted(path.name for path in entry.rglob("*") if path.is_file())[:5])
        return [HandIn(person, [*notes, f"no notebook, only {names}" if names else "an empty folder"])]
    read = [_read(person, path, known, notes) for path in paths]
    return [each for each in read if each.gradable or each.path not in copies] or read[:1]


def _read(person: str, path: Path, known: dict[str, Assignment], notes: list[str]) -> HandIn:
    """One notebook: what it is, by its check cells if it can be read, else by its name."""
    hand_in = HandIn(person, notes, path, next((known[name] for name in known if name in path.stem), None))
    try:
        for cell in nbformat.read(path, as_version=4).cells:
            marks = cell.metadata.get("nbgrader", {})
            hand_in.cells.append((cell.source, marks.get("grade_id", "")) if cell.cell_type == "code" else ("", ""))
    except Exception as error:  # whatever a broken file makes a library say
        what = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        hand_in.notes.append(f"not a notebook that can be read: {what if path.stat().st_size else 'the file is empty'}")
        return hand_in
    ids, sources = {mark for _, mark in hand_in.cells}, {source.strip() for source, _ in hand_in.cells} - {""}
    marks = {name: len(ids & each.checks.keys()) + sum(check.strip() in sources for check in each.checks.values())
             for name, each in known.items()}
    best = max(marks, key=lambda name: marks[name], default="")
    if not marks.get(best):
        hand_in.notes.append("not an exercise notebook that was set: no check cell in it")
        return hand_in
    hand_in.answer(known[best])
    hand_in.gradable = not sources <= known[best].sources
    if not hand_in.gradable:
        hand_in.notes.append("no exercise in it has been answered")
    return hand_in
