"""What a class has told: checks and predictions of its learners, what of it is refused, and its sums."""

from __future__ import annotations

import ast
import importlib
import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import nbformat

from course_utils.check import hints_of
from course_utils.check.hints import COMMON_HINTS, PAPER_HINTS
from course_utils.classroom import SURVEY
from tools.grade.hand_ins import assignments

SAID = {"anyOf": [{"type": "number", "minimum": -1e15, "maximum": 1e15}, {"type": "string", "maxLength": 120}]}
EVENT = {
    "type": "object", "additionalProperties": False, "required": ["who", "name"],
    "properties": {
        "who": {"type": "string", "pattern": "^[0-9a-f]{32}$"}, "name": {"type": "string", "maxLength": 40},
        "check": {"type": "string"}, "hint": {"type": "string", "maxLength": 40}, "question": {"type": "string"},
        "said": SAID, "result": {"anyOf": [*SAID["anyOf"], {"type": "null"}]},
    },
    "dependentRequired": {"check": ["hint"], "question": ["said"], "said": ["question"], "hint": ["check"]},
}
VALID = jsonschema.Draft202012Validator(EVENT).is_valid
NO_TRIES = ("empty", "not-started")  # hints of cells that nobody has filled in, and of machines


class Refused(ValueError):
    """What was told is not what a learner's notebook tells."""


def hints(lesson: str, checks: list[str]) -> dict[str, dict[str, str]]:
    """Of each check of a lesson, such as ``02_collectives``, the hints of its mistakes by their keys."""
    mistakes = importlib.import_module(f"lessons.{lesson[3:]}.check").MISTAKES
    return {check: hints_of(mistakes.get(check, {})) for check in checks}


def questions(root: Path, only: tuple[str, ...] = ("",)) -> dict[str, list[str] | None]:
    """Predictions and survey of each lesson: choices, none where a number is asked for; None: any text."""
    found: dict[str, list[str] | None] = {}
    paths = [path for path in (root / "notebooks").glob("*.ipynb") if path.name.startswith(only)]
    for path in sorted(paths):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code" and "predict(" in cell.source and not cell.source.startswith("%"):
                found |= dict(_asked(cell.source))
        found |= {f"{path.name[:2]} {about}": choices for about, choices in SURVEY.items()}
    return found | SURVEY


def _asked(code: str) -> list[tuple[str, list[str] | None]]:
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "predict" and call.args]
    found: list[tuple[str, list[str] | None]] = []
    for call in calls:
        try:
            about, choices = ast.literal_eval(call.args[0]), call.args[1:2]
            found.append((about, []))
            found[-1] = (about, ast.literal_eval(choices[0]) if choices else [])
        except ValueError:  # choices that the lesson computes
            found[-1:] = [(found[-1][0], None)] if found else []
    return found


class Classroom:
    """What learners have told; at most ``most``, and of lessons whose names begin as ``only`` says."""

    def __init__(self, root: Path, most: int = 100, only: tuple[str, ...] = ("",)):
        known = {lesson: each for lesson, each in assignments(root).items() if lesson.startswith(only)}
        self.hints: dict[str, dict[str, str]] = {}  # of each check, such as "zero.state_bytes"
        self.titles: dict[str, str] = {}
        for lesson, each in known.items():
            names = [mark.removeprefix("check_") for mark in each.checks]
            for name, own in hints(lesson, names).items():
                self.hints[f"{lesson[3:]}.{name}"] = COMMON_HINTS | PAPER_HINTS | own
                self.titles[f"{lesson[3:]}.{name}"] = f"{lesson[:2]} {name.replace('_', ' ')}"
        self.questions, self.most = questions(root, only), most
        self.learners: dict[str, dict[str, Any]] = {}
        self.shown: dict[str, int] = {}  # of questions: 1 where the answers are on the page, 2 with what it is

    def take(self, text: bytes) -> None:
        """Take what one notebook tells, as JSON; raises Refused."""
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            raise Refused("not JSON") from None
        if not VALID(event) or not self._fits(event):
            raise Refused("not a check or a prediction of this course")
        if event["who"] not in self.learners and len(self.learners) >= self.most:
            raise Refused("the class is full")
        name = _plain(event["name"])[:30] or f"somebody {len(self.learners) + 1}"
        own = self.learners.setdefault(event["who"], {"name": name, "checks": {}, "said": {}})
        own["name"] = _plain(event["name"])[:30] or own["name"]
        if "check" in event and event["hint"] not in NO_TRIES:
            key = event["hint"] if event["hint"] in ("", *self.hints[event["check"]]) else "other"
            tries = own["checks"].setdefault(event["check"], {})
            if "" not in tries:  # what comes after the pass is play
                tries[key] = tries.get(key, 0) + 1
        if "question" in event:
            kept = own["said"].get(event["question"], [None, None])
            result = event.get("result")
            own["said"][event["question"]] = [event["said"], kept[1] if result is None else result]

    def _fits(self, event: dict[str, Any]) -> bool:
        if "check" in event:
            return event["check"] in self.hints and "question" not in event
        if "question" not in event:
            return True
        said, result = event["said"], event.get("result")
        if any(isinstance(value, float) and not math.isfinite(value) for value in (said, result)):
            return False
        if result is not None and isinstance(result, str) != isinstance(said, str):
            return False
        choices = self.questions.get(event["question"], ())
        if isinstance(said, str):
            event |= {"said": _plain(said), "result": result and _plain(result)}
            return choices is None and bool(event["said"]) or bool(choices) and said in choices
        return choices == []

    def joined(self) -> dict[str, dict[str, Any]]:
        """Learners by name."""
        return dict(sorted(self.learners.items(), key=lambda item: item[1]["name"].casefold()))

    def board(self) -> list[dict[str, Any]]:
        """Exercises that somebody has tried, in the course's order: title, who passed, tries and the usual mistake."""
        rows = []
        for check, title in self.titles.items():
            tried = {who: own["checks"][check] for who, own in self.learners.items() if check in own["checks"]}
            if tried:
                wrong = sum(map(Counter, tried.values()), Counter())
                passed = wrong.pop("", 0)
                (usual, times), *_ = wrong.most_common(1) or [("", 0)]
                told = self.hints[check].get(usual, "an error")
                rows.append({"title": title, "passed": passed, "of": len(tried), "usual": usual, "times": times,
                             "hint": told, "tries": {who: (sum(t.values()), "" in t) for who, t in tried.items()}})
        return rows

    def answers(self) -> list[tuple[str, list[Any], Any]]:
        """Questions that somebody has answered, the latest of the course first: what was said, and what it is."""
        found = []
        for about in reversed(self.questions):
            pairs = [own["said"][about] for own in self.learners.values() if about in own["said"]]
            results = [result for _, result in pairs if result is not None]
            if pairs:
                numbers = all(isinstance(result, int | float) for result in results)
                right = (statistics.median if numbers else statistics.mode)(results) if results else None
                found.append((about, [said for said, _ in pairs], right))
        return found

    def kept(self) -> dict[str, Any]:
        """All that was told and shown."""
        return {"learners": self.learners, "shown": self.shown}


def _plain(text: str) -> str:
    """Without what a page cannot show, or would show in another direction."""
    return "".join(letter for letter in text if letter.isprintable()).strip()
