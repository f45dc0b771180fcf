"""A question of the review: a row of text, numbers to draw, the formula of the course that answers it, and mistakes."""

from __future__ import annotations

import html
import importlib
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Asked", "Question", "place_of", "rounded", "shown"]

#: Where expressions find their names; the answers of lesson NN are ``aNN``.
_ALL_OF = ("course_utils.costs", "course_utils.memory", "course_utils.transformer", "course_utils.hardware")
_MODULES = {
    "context": "lessons.long_context_and_experts.context_parallel",
    "experts": "lessons.long_context_and_experts.experts",
    "formats": "lessons.scaling_efficiency.number_formats", "hangs": "lessons.debugging_hangs.clinic.hangs",
    "network": "lessons.multi_node.clinic.network", "planner": "lessons.parallelism_3d.planner",
    "recorded": "course_utils.recorded", "scaling": "lessons.scaling_efficiency.scaling",
    "schedules": "lessons.pipeline_parallel.pipeline", "serving": "lessons.serving.helpers",
    "tensor": "lessons.tensor_parallel.helpers", "tuner": "lessons.nccl.nccl_tuner",
    "watchdog": "lessons.debugging_hangs.watchdog_logs",
}
_FACTORS = {
    8: "That is 8 times too {way}: bits and bytes?", 1000: "That is 1,000 times too {way}: look at the unit.",
    1e6: "That is a million times too {way}: look at the unit.", 2: "That is twice as {way} as it should be.",
    1.024: "1 GB is 10⁹ bytes here, not 2³⁰.",
}


@cache
def _everywhere() -> dict[str, Any]:
    """Names that every expression may use without a module's: bytes, seconds and memory, shapes, GPUs and links."""
    found: dict[str, Any] = {"math": math}
    for module in map(importlib.import_module, _ALL_OF):
        found |= {name: getattr(module, name) for name in module.__all__}
    return found


def value_of(expression: str, values: Mapping[str, Any]) -> Any:
    """The value of an expression of the course's functions and drawn values; only modules that it names are loaded."""
    modules = _MODULES | {f"a{number}": f"lessons.{room}.answers" for number, room in _rooms().items()}
    named = {*re.findall(r"\w+", expression)} & modules.keys()
    return eval(expression, _everywhere() | {name: importlib.import_module(modules[name]) for name in named} | values)


@cache
def _rooms() -> dict[str, str]:
    """Names of the lessons' rooms by their number, such as "02"."""
    found = {}
    for room in sorted(Path(__file__).parents[1].glob("*/__init__.py")):
        if number := re.match(r'"""Lesson (\d\d)\b', room.read_text(encoding="utf-8")):
            found[number[1]] = room.parent.name
    return found


def place_of(place: str) -> str:
    """Lesson and section in words: of "03.4", "lesson 03 nccl, section 4"."""
    number, _, section = place.partition(".")
    return f"lesson {number} {_rooms()[number].replace('_', ' ')}, section {section}"


def rounded(value: float) -> str:
    """A number to four digits, or to one where it is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def shown(text: str) -> str:
    """Text as HTML; what stands between backticks is code, and keeps its lines."""
    code = r"<code style='white-space: pre-wrap; font-weight: normal'>\1</code>"
    return re.sub(r"`([^`]*)`", code, html.escape(text, quote=False))


@dataclass(frozen=True)
class Question:
    """A question whose answer a formula of the course computes, out of numbers that are drawn.

    Results are kept under its `key`. `text` and `why` have expressions in braces. `answer` is an expression of drawn
    values and functions of the course: a number in `unit`, or without a unit the place of the right option. `wrong` has
    usual wrong answers and what to tell about them: expressions for a number, also of the `answer`; for a choice all
    options in their order, or one expression that gives this mapping.
    """

    key: str
    place: str  # lesson and section, such as "03.4"
    text: str
    draw: Mapping[str, tuple]  # name to the values that it can have
    answer: str
    unit: str
    wrong: Mapping[str, str] | str
    why: str
    tolerance: float = 0.02

    def drawn(self, random: random.Random) -> Asked:
        """The question with values at random; options of a choice come in an order at random too."""
        asked = Asked(self, {name: random.choice(values) for name, values in self.draw.items()})
        random.shuffle(asked.choices)
        return asked


class Asked:
    """A question with its numbers: `text`, `choices` (none for a number), `answer`, and `judge`."""

    def __init__(self, row: Question, values: Mapping[str, Any]):
        self.row, self.values = row, dict(values)
        self.text, self.why = self._filled(row.text), self._filled(row.why)
        self.answer: Any = value_of(row.answer, values)
        known = self.values | {"answer": self.answer}
        value = self._filled if not row.unit else lambda expression: value_of(expression, known)
        wrong = value_of(row.wrong, values) if isinstance(row.wrong, str) else row.wrong
        self.mistakes = [(value(mistake), self._filled(told)) for mistake, told in wrong.items()]
        self.choices: list[str] = [] if row.unit else [option for option, _ in self.mistakes]
        if self.choices:
            self.answer = self.choices[int(self.answer)]

    def _filled(self, text: str) -> str:
        def value(match: re.Match) -> str:
            found = value_of(match[1], self.values)
            return f"{found:,.6g}" if isinstance(found, int | float) else str(found)

        return re.sub(r"\{([^{}]+)\}", value, text)

    def judge(self, said: float | str) -> tuple[bool, str]:
        """Whether an answer is right, and what to tell: why, or what is wrong with it."""
        if self._same(said, self.answer):
            return True, self.why
        for value, told in self.mistakes:
            if self._same(said, value):
                return False, told
        if self.choices:
            return False, ""
        way = "large" if said > self.answer else "small"
        for factor, told in _FACTORS.items():
            if any(self._same(said, self.answer * factor**power) for power in (1, -1)):
                return False, told.format(way=way)
        return False, f"That is too {way}."

    def _same(self, said: Any, value: Any) -> bool:
        return said == value if self.choices else math.isclose(said, value, rel_tol=self.row.tolerance, abs_tol=1e-9)
