"""What an instructor gets: a table, everything as JSON, one file a person for the learners, and progress on the way."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from .run import Result

__all__ = ["COLUMNS", "Report", "row", "table"]

COLUMNS = ("person", "notebook", "passed", "total", "points", "of", "failed", "not_graded", "same_as_solution", "note",
           "file")


def row(result: Result) -> dict[str, Any]:
    """A hand-in as a row of the table, with its verdicts under ``checks``."""
    hand_in, verdicts = result.hand_in, list(result.verdicts.values())
    graded = [verdict for verdict in verdicts if verdict.graded]
    passed = [verdict for verdict in graded if verdict.passed]
    return {
        "person": hand_in.person,
        "notebook": hand_in.assignment.name if hand_in.assignment else "",
        "passed": len(passed),
        "total": len(graded),
        "points": sum(verdict.points for verdict in passed),
        "of": sum(verdict.points for verdict in graded),
        "failed": " ".join(verdict.id for verdict in graded if not verdict.passed),
        "not_graded": " ".join(verdict.id for verdict in verdicts if not verdict.graded),
        "same_as_solution": " ".join(verdict.id for verdict in verdicts if verdict.same_as_solution),
        "note": "; ".join([*hand_in.notes, *result.notes]),
        "file": str(hand_in.path or ""),
        "seconds": round(result.seconds, 1),
        "checks": [
            {"name": v.id, "passed": v.passed, "points": v.points, "hint": v.hint, "message": v.message,
             "graded": v.graded, "tried_again": v.again, "same_as_solution": v.same_as_solution} for v in verdicts
        ],
    }


def _sums(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a person, named ``sum``: out of every notebook that anybody handed in, less what was not graded."""
    worth = {each["notebook"]: (len(each["checks"]), sum(check["points"] for check in each["checks"])) for each in rows}
    total, of = (sum(values) for values in zip(*worth.values(), strict=True)) if worth else (0, 0)
    sums: dict[str, dict[str, Any]] = {}
    for each in rows:
        entry = {"person": each["person"], "notebook": "sum", "passed": 0, "total": total, "points": 0, "of": of}
        own = sums.setdefault(each["person"], entry)
        for key in ("passed", "points"):
            own[key] += each[key]
        for key, whole in zip(("total", "of"), worth[each["notebook"]], strict=True):
            own[key] -= whole - each[key]
    return list(sums.values())


def table(rows: list[dict[str, Any]]) -> str:
    """Rows and sums as CSV, by person."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted([*rows, *_sums(rows)], key=lambda each: (each["person"], each["notebook"] == "sum")))
    return text.getvalue()


class Report:
    """Rows as they come: each new one is on disk before the next hand-in ends.

    Parameters
    ----------
    csv, json : Path, optional
        Files with the table and with everything.
    feedback : Path, optional
        Folder for one Markdown file a person.
    """

    def __init__(self, csv: Path | None = None, json: Path | None = None, feedback: Path | None = None) -> None:
        self._csv, self._json, self._feedback = csv, json, feedback
        self.rows: list[dict[str, Any]] = []

    def add(self, new: dict[str, Any], done: int, of: int) -> None:
        """Add a row, or replace the one of the same file, and say so on stderr."""
        key = (new["person"], new["notebook"], new["file"])
        self.rows = [each for each in self.rows if (each["person"], each["notebook"], each["file"]) != key] + [new]
        self.rows.sort(key=lambda each: (each["person"], each["notebook"]))
        if self._csv:
            _write(self._csv, table(self.rows))
        if self._json:
            _write(self._json, json.dumps({"rows": self.rows, "sums": _sums(self.rows)}, indent=1, ensure_ascii=False))
        if self._feedback:
            own = [each for each in self.rows if each["person"] == new["person"]]
            name = re.sub(r"[^\w .()-]", "_", new["person"]).strip(". ") or "_"
            _write(self._feedback / f"{name}.md", _feedback(new["person"], own))
        what = f"{new['passed']} of {new['total']}" if new["checks"] else "no checks"
        if new["not_graded"]:
            what += f", not graded: {new['not_graded']}"
        took = f" ({new['seconds']:.0f} s)" if new["seconds"] else ""
        note = f"; {new['note'][:100]}" if new["note"] else ""
        line = f"{done} of {of}  {new['person']}  {new['notebook'] or '-'}  {what}{took}{note}"
        print(line, file=sys.stderr, flush=True)


def _feedback(person: str, rows: list[dict[str, Any]]) -> str:
    parts = [f"# {person}"]
    for each in rows:
        if not each["notebook"]:
            parts.append(f"{each['note']}.")
            continue
        parts.append(f"## {each['notebook']}: {each['points']} of {each['of']} points")
        if each["note"]:
            parts.append(f"{each['note']}.")
        for check in each["checks"]:
            how = "passed" if check["passed"] else "**not passed**" if check["graded"] else "**not graded**"
            parts.append(f"- {how}: {check['name']}, {_points(check['points'])}")
            if not check["passed"]:
                fence = "~" * max([3, *(len(run) + 1 for run in re.findall("~+", check["message"]))])
                parts.append(f"{fence}text\n{check['message']}\n{fence}")
    return "\n\n".join(parts) + "\n"


def _points(number: int) -> str:
    return f"{number} point{'s' * (number != 1)}"


def _write(path: Path, text: str) -> None:
    """Write a file in one go: whoever reads it finds the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(partial, 0o644)
    os.replace(partial, path)
