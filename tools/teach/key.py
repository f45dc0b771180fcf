"""The answer key of a lesson: of each exercise the solution, and its usual mistakes, those seen most first."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import nbformat

from course_utils.check.hints import COMMON_HINTS, PAPER_HINTS
from tools import ToolError
from tools import write as write_text
from tools.author.notebooks import CHECK_CELL
from tools.author.rooms import lesson_of

from .classroom import NO_TRIES, hints


def write(root: Path, lesson: str, folder: Path, seen: Sequence[Path] = ()) -> Path:
    """Write the key of a lesson as Markdown; mistakes are counted in files of `grade --json` and `dashboard --keep`."""
    name = lesson_of(lesson, root)
    path = root / "solutions" / f"{name}_solutions.ipynb"
    if not path.exists():
        raise ToolError(f"lesson {name} has no exercises")
    counts, cells = counted(seen), nbformat.read(path, as_version=4).cells
    parts = [f"# {name.replace('_', ' ')}: the answer key", "Mistakes seen most come first." if seen else
             "Mistakes are counted where `--seen` names results of `grade --json` or `dashboard --keep`."]
    title, code = "", {}
    for cell in cells:
        if cell.cell_type == "markdown":
            title = (re.findall(r"^## (Exercise .*)$", cell.source, re.MULTILINE) or [title])[-1]
            continue
        code |= dict.fromkeys(re.findall(r"^(?:def|class) (\w+)", cell.source, re.MULTILINE), cell.source)
        for check in CHECK_CELL.findall(cell.source):
            known = hints(name, [check])[check]
            found = counts[f"{name[3:]}.{check}"]
            solution = re.sub(r"^ *### (BEGIN|END) SOLUTION\n?", "", code.get(check, ""), flags=re.MULTILINE).strip()
            parts += [f"## {title}", f"`check.{check}`" + (f": {found.pop('', 0)} have passed." if seen else "")]
            told, rows = COMMON_HINTS | PAPER_HINTS | known, ["| seen | key | what learners read |", "|---|---|---|"]
            for key in sorted({**known, **found}, key=lambda key: -found[key]):
                words = " ".join(told.get(key, "").split()).replace("|", "\\|")
                rows.append(f"| {found[key] or ''} | {key} | {words} |")
            parts += [f"```python\n{solution}\n```", *(["\n".join(rows)] if rows[2:] else [])]
    write_text(folder / f"{name}_key.md", "\n\n".join(parts) + "\n")
    return folder / f"{name}_key.md"


def counted(seen: Sequence[Path]) -> defaultdict[str, Counter]:
    """How often each hint was given, by check, such as ``zero.state_bytes``; the hint of those who passed is empty."""
    counts: defaultdict[str, Counter] = defaultdict(Counter)
    for path in seen:
        data = json.loads(path.read_text(encoding="utf-8"))
        for row in data.get("rows", ()):
            for one in row["checks"]:
                if one["passed"] or one["hint"]:
                    check = f"{row['notebook'][3:]}.{one['name'].removeprefix('check_')}"
                    counts[check]["" if one["passed"] else one["hint"]] += 1
        for own in data.get("learners", {}).values():
            for check, tries in own["checks"].items():
                counts[check].update(tries)
    for found in counts.values():
        for key in NO_TRIES:
            found.pop(key, None)
    return counts
