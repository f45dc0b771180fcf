"""How long the course takes to read: one clock for every lesson, section, exercise and plan, in minutes.

What counts: 130 words of prose a minute, 12 lines of code a minute, a minute and a half for each prediction, and an
exercise what its card says. Words are those of the text and its tables, without headings' and tables' marks, formulas
and targets of links. Lines of code are those in cells and in fenced blocks that are neither empty nor imports. What is
folded away, text or code, does not count: it is there for those who want it.

The figures in README.md, the pages of docs/ and the openings of the lessons come from here; :func:`update` writes them.
In tables of lessons it fills the columns *read, min* and *exercises, min*; where a table has a column *lessons:
sections*, it fills *by the clock* and *titles*. A lesson with sections marked *deeper* has two figures: its core's, and
the whole's.
"""

from __future__ import annotations

import re
import symtable
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tools import ROOT, ToolError

from .rooms import lesson_of, lessons, texts

WORDS, LINES, PREDICTION = 130, 12, 1.5  # words and lines a minute, minutes a prediction
MARK = " · deeper"  # at the end of the heading of a section that is not of the core
TIME = r"(\*\*Time:\*\* about) .*? (?:minutes|hours) to read(?: the core, \d+ with the deeper sections)?"
LISTED = r"<!-- minutes by section -->\n.*?<!-- end -->"


@dataclass(frozen=True)
class Section:
    """What stands between one second-level heading of a lesson and the next."""

    number: int | None  # of the heading; None for the opening, the recap and the like
    title: str
    words: int
    lines: int  # of code
    predictions: int
    folded: int  # words that are folded away, and not in the minutes
    needs: tuple[int, ...] = ()  # numbers of the sections whose functions and variables its code uses

    @property
    def minutes(self) -> float:
        return self.words / WORDS + self.lines / LINES + self.predictions * PREDICTION

    @property
    def deeper(self) -> bool:
        return self.title.endswith(MARK)


def _cells(source: Path) -> list[tuple[bool, str]]:
    """Cells of percent text that are in sight: whether it is text, and its content."""
    parts = re.split(r"^# %%(.*)$", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    cells = []
    for head, body in zip(parts[1::2], parts[2::2], strict=True):
        text = "[markdown]" in head
        if "source_hidden" not in head:
            cells.append((text, re.sub(r"^# ?", "", body, flags=re.MULTILINE) if text else body))
    return cells


def _lines(code: str) -> int:
    code = re.sub(r"^(?:from \S+ import \([^)]*\)|(?:from|import) .*)$", "", code, flags=re.MULTILINE)
    return sum(bool(line.strip()) for line in code.splitlines())


def _words(text: str) -> int:
    for pattern in (r"\$\$.*?\$\$", r"\$[^$\n]*\$", r"<[^>]*>", r"\]\([^)]*\)", r"^\|[-:| ]+\|$"):
        text = re.sub(pattern, " ", text, flags=re.DOTALL | re.MULTILINE)
    return len(re.findall(r"\S*\w\S*", text))


def names(code: str) -> tuple[set[str], set[str]]:
    """What code defines for cells after it, and what it takes from cells before it."""
    table = symtable.symtable(code, "cells", "exec")
    defined = {name.get_name() for name in table.get_symbols() if name.is_assigned() or name.is_imported()}
    used, tables = set(), [table]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {name.get_name() for name in table.get_symbols() if name.is_global() and name.is_referenced()}
    return defined, used - defined


def _section(heading: str, cells: list[tuple[bool, str]]) -> Section:
    words = lines = predictions = folded = 0
    for text, content in cells:
        if not text:
            lines += _lines(content)
            continue
        hidden = "\n".join(re.findall(r"<details.*?</details>", content, re.DOTALL))
        content = re.sub(r"<details.*?</details>", "", content, flags=re.DOTALL)
        fenced = re.findall(r"^[ >]*```\w*\n(.*?)^[ >]*```", content, re.DOTALL | re.MULTILINE)
        content = re.sub(r"^[ >]*```\w*\n.*?^[ >]*```", "", content, flags=re.DOTALL | re.MULTILINE)
        lines += sum(map(_lines, fenced))
        words, folded = words + _words(content), folded + _words(hidden)
        predictions += content.count("**Predict")
    number = re.match(r"(\d+)\. ", heading)
    return Section(int(number[1]) if number else None, heading[number.end() if number else 0 :], words, lines,
                   predictions, folded)


def sections(lesson: str, root: Path = ROOT) -> list[Section]:
    """Sections of a lesson in their order, the opening first; ``lesson`` is its number or name."""
    found: list[tuple[str, list[tuple[bool, str]]]] = [("Opening", [])]
    for text, content in _cells(texts(root)[lesson_of(lesson, root)]):
        parts = re.split(r"^## (.*)$", content, flags=re.MULTILINE) if text else [content]
        found[-1][1].append((text, parts[0]))
        found += [(title, [(True, rest)]) for title, rest in zip(parts[1::2], parts[2::2], strict=True)]
    made: dict[str, int | None] = {}  # a name, and the section that defined it last
    result = []
    for heading, cells in found:
        section = _section(heading, cells)
        defined, used = names("\n".join(content for text, content in cells if not text))
        result.append(replace(section, needs=tuple(sorted({made[name] for name in used if made.get(name)}))))
        made |= dict.fromkeys(defined, section.number)
    return result


def _cards(lesson: str, root: Path) -> dict[int, tuple[str, int]]:
    source = texts(root).get(f"{lesson_of(lesson, root)}_exercises")
    text = source.read_text(encoding="utf-8") if source else ""
    card = r"^# ## Exercise (\d+) · (.*)\n#\n# \| difficulty \| minutes .*\n.*\n# \|[^|]*\| *(\d+) "
    return {int(number): (title, int(minutes)) for number, title, minutes in re.findall(card, text, re.MULTILINE)}


def exercises(lesson: str, root: Path = ROOT) -> dict[int, int]:
    """Minutes on the card of each exercise of a lesson; empty where it has none."""
    return {number: minutes for number, (_, minutes) in _cards(lesson, root).items()}


def reading(lesson: str, root: Path = ROOT, core: bool = False) -> float:
    """Minutes to read a lesson from its title to its references, or its ``core``: all that is not marked *deeper*."""
    return sum(section.minutes for section in sections(lesson, root) if not (core and section.deeper))


def rounded(minutes: float) -> int:
    """To five minutes, as the figures of whole lessons are given."""
    return 5 * round(minutes / 5)


def _figures(lesson: str, root: Path) -> tuple[int, int | None]:
    """Rounded minutes of a lesson's core, and of the whole if that takes more."""
    core, whole = rounded(reading(lesson, root, core=True)), rounded(reading(lesson, root))
    return core, whole if whole > core else None


def _numbers(text: str) -> list[int]:
    """``"1, 3-5"`` as a list; also with an en dash."""
    ranges = [part.replace("–", "-").split("-") for part in re.findall(r"\d+(?:[-–]\d+)?", text)]
    return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]


def chosen(text: str, root: Path = ROOT) -> list[tuple[str, float]]:
    """Title and minutes of each lesson, section and exercise named in one line.

    Parts are joined by semicolons: ``02`` is a whole lesson, ``02: 1, 3-5`` are sections of it, ``exercises 02: 1, 7``
    are exercises. Links count as their text.

    Raises
    ------
    ToolError
        A lesson, section or exercise that does not exist is named.
    """
    found = []
    for part in re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).split(";"):
        named = re.fullmatch(r"\s*(exercises? )?(\d\d)(?:: *([\d, –-]+))?\s*", part)
        if not named:
            raise ToolError(f"not lessons, sections or exercises: {part.strip()!r}")
        if named[1]:
            there = _cards(named[2], root)
        elif named[3]:
            numbered = (section for section in sections(named[2], root) if section.number)
            there = {section.number: (section.title, section.minutes) for section in numbered}
        else:
            found.append((lesson_of(named[2], root), reading(named[2], root)))
            continue
        wanted = _numbers(named[3]) if named[3] else list(there)
        if missing := [number for number in wanted if number not in there]:
            raise ToolError(f"{part.strip()!r} names {missing}; there are {list(there)}")
        found += [there[number] for number in wanted]
    return found


def selection(text: str, root: Path = ROOT) -> float:
    """Minutes of all that one line names; see :func:`chosen`."""
    return sum(minutes for _, minutes in chosen(text, root))


def _wrapped(paragraph: str) -> str:
    """A paragraph as percent text of 118 columns; links are not broken."""
    held = re.sub(r"\[[^]]*\]\([^)]*\)", lambda link: link[0].replace(" ", "\0"), paragraph)
    lines = textwrap.wrap(held, 116, break_on_hyphens=False, break_long_words=False)
    return "".join(f"# {line}\n" for line in lines).replace("\0", " ")


def _replaced(text: str, pattern: str, new: str | Callable[[re.Match], str]) -> str:
    """Replace a pattern in the paragraph of percent text that holds it, across its lines."""
    for paragraph in re.findall(r"(?:^# \S.*\n)+", text, re.MULTILINE):
        joined = " ".join(line.removeprefix("# ") for line in paragraph.splitlines())
        changed = re.sub(pattern, new, joined)
        if changed != joined:
            text = text.replace(paragraph, _wrapped(changed), 1)
    return text


def _rows(text: str, root: Path) -> str:
    """Fill the clock's columns in the tables of a text."""
    lines, columns = text.split("\n"), []
    for at, line in enumerate(lines):
        bare = line.removeprefix("# ")
        if not bare.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in bare.strip("|").split("|")]
        columns = columns or cells
        if not {"read, min", "by the clock"} & {*columns}:
            continue
        row = dict(zip(columns, cells, strict=True))
        lesson = re.match(r"\[?(\d\d)\b", cells[0])
        if "read, min" in row and lesson and any(name.startswith(lesson[1]) for name in lessons(root)):
            core, whole = _figures(lesson[1], root)
            row["read, min"] = f"{core} ({whole})" if whole else f"{core}"
            row["exercises, min"] = str(sum(exercises(lesson[1], root).values()) or "")
        elif re.match(r"(exercises? )?\[?\d\d\b", row.get("lessons: sections", "")):
            row["by the clock"] = str(round(selection(row["lessons: sections"], root)))
            if "titles" in row:
                row["titles"] = "; ".join(title for title, _ in chosen(row["lessons: sections"], root))
        if list(row.values()) != cells:
            lines[at] = line[: len(line) - len(bare)] + "| " + " | ".join(row.values()) + " |"
    return "\n".join(lines)


def _listing(root: Path) -> str:
    """Every section with its minutes, a table for each lesson."""
    parts = []
    for name in lessons(root):
        rows = []
        for section in sections(name, root):
            uses = ", ".join(map(str, section.needs))
            rows.append(f"| {section.number or ''} | {section.title} | {section.minutes:.0f} | {uses} |")
        head = ["| | section | min | uses |", "|---|---|---|---|"]
        core, whole = _figures(name, root)
        time = f"{core} minutes for the core, {whole} with the deeper sections" if whole else f"{core} minutes"
        parts += [f"**{name}**, {time}", "\n".join([*head, *rows])]
    return "\n\n".join(["<!-- minutes by section -->", *parts, "<!-- end -->"])


def _stated(text: str, lesson: str, root: Path) -> str:
    """The text of a lesson, with its minutes in its opening."""
    core, whole = _figures(lesson, root)
    more = f" the core, {whole} with the deeper sections" if whole else ""
    text = _replaced(text, TIME, rf"\1 {core} minutes to read{more}")
    return _replaced(
        text, r"(\*\*Time:\*\*.*\bsections (\d+) to (\d+):) \d+ minutes",
        lambda part: f"{part[1]} {rounded(selection(f'{lesson[:2]}: {part[2]}-{part[3]}', root))} minutes",
    )


def _texts(root: Path) -> dict[Path, str]:
    """Every file with figures of the clock, as it should be."""
    found = {}
    for name, path in texts(root).items():
        text, lesson = path.read_text(encoding="utf-8"), name.removesuffix("_exercises")
        if name == lesson:
            found[path] = _stated(text, lesson, root)
        else:
            minutes = sum(exercises(lesson, root).values())
            found[path] = _replaced(text, r"All of them take about [^.]*\.",
                                    f"All of them take about {minutes} minutes.")
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    for path in [root / "lessons" / "start_here" / "lesson.py", *pages]:
        text = found.get(path) or path.read_text(encoding="utf-8")
        found[path] = _rows(re.sub(LISTED, lambda _: _listing(root), text, flags=re.DOTALL), root)
    return found


def update(root: Path = ROOT, write: bool = False) -> list[Path]:
    """Files whose figures differ from the clock's; with ``write`` they are put right."""
    wrong = {path: text for path, text in _texts(root).items() if text != path.read_text(encoding="utf-8")}
    for path, text in wrong.items():
        if write:
            path.write_text(text, encoding="utf-8")
    return sorted(wrong)
