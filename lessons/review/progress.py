"""What a learner has read, predicted, passed and reviewed, from what the notebooks of the copy have saved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from course_utils.predictions import kept, learners_copy

from .ask import QUESTIONS, SPOKEN, known

__all__ = ["progress"]

_PREDICTION = re.compile(r'= predict\(\s*"([^"]+)"')
_CHECK = re.compile(r"^check\.\w+\(", re.MULTILINE)


def progress() -> None:
    """Print, lesson by lesson, cells that have run, predictions made, and checks passed; keep it in ``progress.txt``.

    Only what JupyterLab has saved counts: *File → Save All* brings it up to date. Nothing leaves this machine.
    """
    copy = learners_copy()
    if copy is None:
        print("This notebook does not lie in a learner's copy of the course, so nothing is kept. `make lab` opens one.")
        return
    lines = [f"{'lesson':32}{'cells run':>12}{'predicted':>12}{'checks passed':>16}"]
    for lesson in sorted(copy.glob("notebooks/[0-9][0-9]_*.ipynb")):
        cells, exercises = _cells(lesson), _cells(copy / "exercises" / f"{lesson.stem}_exercises.ipynb")
        run = sum(cell.get("execution_count") is not None for cell in cells)
        about = _PREDICTION.findall("\n".join(map(_source, cells)))
        checks = [cell for cell in exercises if _CHECK.search(_source(cell))]
        row = [f"{run} of {len(cells)}", _of(sum(name in kept() for name in about), about),
               _of(sum(map(_passed, checks)), checks)]
        lines.append(f"{lesson.stem.replace('_', ' '):32}{row[0]:>12}{row[1]:>12}{row[2]:>16}")
    for what, topics in (("questions", QUESTIONS), ("questions aloud", SPOKEN)):
        rows = [row for some in topics.values() for row in some]
        asked = sum(f"review: {row.key}" in kept() for row in rows)
        lines.append(f"review: {asked} of {len(rows)} {what} asked, {known(rows)} known (answered well twice in a row)")
    text = "\n".join(lines)
    (copy / "progress.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


def _of(count: int, all_of: list) -> str:
    return f"{count} of {len(all_of)}" if all_of else ""


def _cells(notebook: Path) -> list[dict[str, Any]]:
    if not notebook.exists():
        return []
    return [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def _passed(cell: dict[str, Any]) -> bool:
    """Whether the last run of a check's cell said that it passed."""
    texts = ["".join(output.get("text", "")) for output in cell["outputs"]]
    return any(re.search(r"^.+ passed\b", text, re.MULTILINE) for text in texts)
