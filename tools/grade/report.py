"""What an instructor gets: a table, everything as JSON, one file a person for the learners, and progress on the way."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .run import Result

COLUMNS = ("person", "notebook", "passed", "total", "points", "of", "failed", "not_graded", "note", "file")


class Report:
    """Rows as they come: each new one is on disk before the next hand-in ends."""

    def __init__(self, csv: Path | None = None, json: Path | None = None, feedback: Path | None = None) -> None:
        self._csv, self._json, self._feedback = csv, json, feedback
        self.rows: list[dict[str, Any]] = []

    def add(self, result: Result, of: int) -> None:
        """Add a hand-in, and say so on stderr."""
        new = row(result)
        self.rows = sorted([*self.rows, new], key=lambda each: (each["person"], each["notebook"]))
        if self._csv:
            _write(self._csv, table(self.rows))
        if self._json:
            _write(self._json, json.dumps({"rows": self.rows, "sums": _sums(self.rows)}, indent=1, ensure_ascii=False))
        if self._feedback:
            name = re.sub(r"[^\w .()-]", "_", new["person"]).strip(". ") or "_"
            own = [each for each in self.rows if each["person"] == new["person"]]
            _write(self._feedback / f"{name}.md", _feedback(new["person"], own))
        what = f"{new['passed']} of {new['total']}" if new["checks"] else "no checks"
        what += f", not graded: {new['not_graded']}" if new["not_graded"] else ""
        note = f"; {new['note'][:100]}" if new["note"] else ""
        who = f"{len(self.rows)} of {of}  {new['person']}  {new['notebook'] or '-'}"
        print(f"{who}  {what} ({new['seconds']:.0f} s){note}", file=sys.stderr, flush=True)


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
        "failed": " ".join(verdict.name for verdict in graded if not verdict.passed),
        "not_graded": " ".join(verdict.name for verdict in verdicts if not verdict.graded),
        "note": "; ".join([*hand_in.notes, *result.notes]),
        "file": str(hand_in.path or ""),
        "seconds": round(result.seconds, 1),
        "checks": [asdict(verdict) for verdict in verdicts],
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


def _feedback(person: str, rows: list[dict[str, Any]]) -> str:
    parts = [f"# {person}"]
    for each in rows:
        parts += [f"## {each['notebook']}: {each['points']} of {each['of']} points"] if each["notebook"] else []
        parts += [f"{each['note']}."] if each["note"] else []
        for check in each["checks"]:
            how = "passed" if check["passed"] else "**not passed**" if check["graded"] else "**not graded**"
            parts.append(f"- {how}: {check['name']}, {check['points']} point{'s' * (check['points'] != 1)}")
            if not check["passed"]:
                fence = "~" * max([3, *(len(run) + 1 for run in re.findall("~+", check["message"]))])
                parts.append(f"{fence}text\n{check['message']}\n{fence}")
    return "\n\n".join(parts) + "\n"


def _write(path: Path, text: str) -> None:
    """Write a file in one go: whoever reads it finds the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(text, encoding="utf-8")
    os.replace(half, path)
