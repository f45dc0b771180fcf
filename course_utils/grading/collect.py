"""Which notebook is whose, and which exercises it answers, whatever it is called."""

from __future__ import annotations

import csv
import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from .assignments import Assignment, normal

__all__ = ["HandIn", "NothingToGrade", "collect", "read_roster"]


class NothingToGrade(ValueError):
    """The folder is not one of hand-ins; the message says what it looks like."""


@dataclass
class HandIn:
    """A notebook of a person, or the reason why there is none.

    Attributes
    ----------
    assignment : Assignment or None
        What it answers; None if it was not recognised, and ``notes`` then say why.
    gradable : bool
        Whether its checks are to be run.
    modules : list of Path
        Python files beside it, which it may import.
    """

    person: str
    path: Path | None = None
    assignment: Assignment | None = None
    notebook: Any = None
    notes: list[str] = field(default_factory=list)
    gradable: bool = False
    modules: list[Path] = field(default_factory=list)


def read_roster(path: Path) -> list[str]:
    """Names in the column ``person`` of a CSV file, or in its first column if there is none of that name."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    titles = [title.strip().casefold() for title in rows[0]] if rows else []
    column = titles.index("person") if "person" in titles else 0
    return [row[column].strip() for row in rows["person" in titles :] if len(row) > column and row[column].strip()]


def collect(
    folder: Path, known: dict[str, Assignment], roster: list[str] | None = None, only: list[str] | None = None
) -> list[HandIn]:
    """Every hand-in below a folder, at least one a person.

    The first folder's name, or that of a notebook without a folder, is the person; where a roster is given, the one
    name of it that this name contains. ``only`` names the notebooks that were set; others are left out.

    Raises
    ------
    NothingToGrade
        There is no such folder, nothing in it, or a copy of the course.
    """
    if not folder.is_dir():
        raise NothingToGrade(f"{folder} is not a folder")
    if _is_course(folder):
        raise NothingToGrade(f"{folder} is a copy of the course; give the folder that holds one folder a person")
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    entries = [path for path in entries if path.is_dir() or path.suffix == ".ipynb"]
    if not entries:
        raise NothingToGrade(f"{folder} holds neither folders nor notebooks")
    found: dict[str, list[HandIn]] = {}
    for entry in entries:
        name = entry.name if entry.is_dir() else _without_notebook(entry.stem, known)
        person, note = _on_roster(name, roster)
        found.setdefault(person, []).extend(_of_person(person, entry, known, [note] if note else []))
    for person in roster or []:
        found.setdefault(person, [HandIn(person, notes=["on the roster, but handed nothing in"])])
    kept = [each for person in found for each in _one_each(found[person])]
    return [each for each in kept if not only or each.assignment is None or each.assignment.name in only]


def _is_course(folder: Path) -> bool:
    """True for the course itself and for a learner's copy of it, ``work/``."""
    others = (folder / "course_utils" / "__init__.py", folder / "solutions")
    return (folder / "exercises").is_dir() and any(path.exists() for path in others)


def _without_notebook(stem: str, known: dict[str, Assignment]) -> str:
    """``ada`` of ``ada_02_collectives``; a name that is nothing but the notebook's stays."""
    for name in known:
        for whole in (f"{name}_exercises", f"{name}_solutions", name):
            stem = stem.replace(whole, " ") if stem != whole else stem
    return stem.strip(" _-") or stem


def _on_roster(name: str, roster: list[str] | None) -> tuple[str, str]:
    """The person of a roster that a name contains, or the name itself and a note."""
    if roster is None:
        return name, ""
    words = _plain(name)
    fits = [person for person in roster if f" {_plain(person)} " in f" {words} "]
    longest = [person for person in fits if len(person) == max(map(len, fits))]
    return (longest[0], "") if len(longest) == 1 else (name, "not on the roster")


def _plain(name: str) -> str:
    letters = unicodedata.normalize("NFKD", name).casefold()
    return " ".join(re.findall(r"[^\W_]+", "".join(c for c in letters if not unicodedata.combining(c))))


def _of_person(person: str, entry: Path, known: dict[str, Assignment], notes: list[str]) -> list[HandIn]:
    paths = [entry] if entry.is_file() else _notebooks(entry)
    clone = entry.is_dir() and any(map(_is_course, (entry, *(p for p in entry.iterdir() if p.is_dir()))))
    if clone:
        paths = [path for path in paths if path.parent.name == "exercises"]
        notes = [*notes, "a whole copy of the course; only its exercises count"]
    elif entry.is_dir() and (entry / "course_utils").is_dir():
        notes = [*notes, "a folder course_utils/ beside the notebook, which was not used"]
    if not paths:
        names = sorted(path.name for path in entry.rglob("*") if path.is_file())[:5]
        what = f"no notebook, only {', '.join(names)}" if names else "an empty folder"
        return [HandIn(person, notes=[*notes, what])]
    read = [_read(person, path, known, notes) for path in paths]
    for each in read:
        each.modules = sorted(each.path.parent.glob("*.py")) if entry.is_dir() else []
    if clone:
        answered = [each for each in read if each.gradable]
        read = answered or [HandIn(person, notes=[*notes, "no exercise in it has been answered"])]
    return read


def _notebooks(folder: Path) -> list[Path]:
    paths = folder.rglob("*.ipynb")
    return sorted(p for p in paths if p.is_file() and not any(q.startswith(".") for q in p.relative_to(folder).parts))


def _read(person: str, path: Path, known: dict[str, Assignment], notes: list[str]) -> HandIn:
    """One notebook: what it is, by its content if that can be read, else by its name."""
    named = next((known[name] for name in known if name in path.stem), None)
    hand_in = HandIn(person, path, named, notes=list(notes))
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            hand_in.notes.append("the file is empty")
            return hand_in
        hand_in.notebook = nbformat.reads(text, as_version=4)
        cells = [cell for cell in hand_in.notebook.cells if cell.cell_type == "code"]
        sources = [cell.source for cell in cells]
        titles = [cell.source for cell in hand_in.notebook.cells[:1]]
    except Exception as error:  # whatever a broken file makes a library say
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        hand_in.notes.append(f"not a notebook that can be read: {what[:200]}")
        return hand_in
    if any(each.lesson and titles and titles[0].startswith(each.lesson) for each in known.values()):
        hand_in.assignment = named
        hand_in.notes.append("the lesson, not its exercises")
        return hand_in
    if not any(source.strip() for source in sources):
        hand_in.notes.append("no code in it")
        return hand_in
    hand_in.assignment = _recognised(cells, known) or named
    if hand_in.assignment is None:
        hand_in.notes.append("not an exercise notebook of the course")
    elif set(map(normal, sources)) <= hand_in.assignment.sources:
        hand_in.notes.append("no exercise in it has been answered")
    else:
        hand_in.gradable = True
        if hand_in.assignment is not named:
            hand_in.notes.append(f"renamed: {path.name}")
    return hand_in


def _recognised(cells: list[Any], known: dict[str, Assignment]) -> Assignment | None:
    """The assignment that most check cells and names of answers belong to, and of which they are the larger part."""
    ids = {cell.metadata.get("nbgrader", {}).get("grade_id") for cell in cells}
    text = "\n".join(cell.source for cell in cells)

    def marks(each: Assignment) -> int:
        answers = sorted({name for check in each.checks.values() for name in check.solution})
        calls = [check.source.strip() for check in each.checks.values()]
        defined = sum(bool(re.search(rf"^(def|class) {name}\b", text, re.MULTILINE)) for name in answers)
        return len(ids & each.checks.keys()) + sum(call in text for call in calls) + defined

    best = max(known.values(), key=lambda each: (marks(each), -len(each.checks)), default=None)
    return best if best is not None and marks(best) > 0 else None


def _one_each(hand_ins: list[HandIn]) -> list[HandIn]:
    """Of several copies of one notebook the newest that has been answered; what is said of a person only, once."""
    groups: dict[str, list[HandIn]] = {}
    for each in hand_ins:
        groups.setdefault(each.assignment.name if each.assignment else f"? {each.path}", []).append(each)
    kept = []
    for copies in groups.values():
        copies.sort(key=lambda each: (each.gradable, each.path.stat().st_mtime if each.path else 0))
        newest = copies[-1]
        if len(copies) > 1:
            newest.notes.append(f"{len(copies)} copies, of which {newest.path.name} counts: the newest with answers")
        kept.append(newest)
    return sorted(kept, key=lambda each: each.assignment.name if each.assignment else "")
