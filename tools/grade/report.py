"""What an instructor gets: a table, everything as JSON, one file a person for the learners."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools import write

from .hand_ins import HandIn

COLUMNS = ("person", "notebook", "passed", "total", "points", "of", "failed", "not_graded", "note", "file")


def row(hand_in: HandIn) -> dict[str, Any]:
    """A hand-in as a row of the table, with its verdicts under ``checks``."""
    verdicts = list(hand_in.verdicts.values())
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
        "note": "; ".join(hand_in.notes),
        "file": str(hand_in.path or ""),
        "seconds": round(hand_in.seconds, 1),
        "checks": [asdict(verdict) for verdict in verdicts],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as CSV, by person, each person's with a row ``sum`` at the end."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for person in sorted({each["person"] for each in rows}):
        own = [each for each in rows if each["person"] == person]
        writer.writerows(sorted(own, key=lambda each: each["notebook"]))
        sums = {key: sum(each[key] for each in own) for key in ("passed", "total", "points", "of")}
        writer.writerow({"person": person, "notebook": "sum", **sums})
    return text.getvalue()


def feedback(person: str, rows: list[dict[str, Any]]) -> str:
    """What a person gets, in Markdown: the message of each check that was refused."""
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


def write_all(rows: list[dict[str, Any]], csv: Path | None, json_file: Path | None, folder: Path | None) -> None:
    """Write what was asked for, anew after every hand-in."""
    if csv:
        write(csv, table(rows))
    if json_file:
        write(json_file, json.dumps({"rows": rows}, indent=1, ensure_ascii=False))
    for person in {each["person"] for each in rows} if folder else ():
        name = re.sub(r"[^\w .()-]", "_", person).strip(". ") or "_"
        write(folder / f"{name}.md", feedback(person, [each for each in rows if each["person"] == person]))
