"""A question of the review: a row of text, numbers to draw, the formula of the course that answers it, and mistakes."""

from __future__ import annotations

import html
import importlib
import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Asked", "Question", "Spoken", "place_of", "rounded", "shown", "value_of"]

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
    style = "white-space: pre-wrap; font-weight: normal"

    def code(match: re.Match) -> str:
        return f"<{(tag := 'pre' if chr(10) in match[1] else 'code')} style='{style}'>{match[1]}</{tag}>"

    return re.sub(r"`([^`]*)`", code, html.escape(text, quote=False))


@dataclass(frozen=True)
class Question:
    """A question whose answer a formula of the course computes, out of numbers that are drawn.

    Attributes
    ----------
    key : str
        Under this name results are kept.
    place : str
        Lesson and section, such as "03.4".
    text : str
        With the drawn values in braces.
    draw : mapping
        Name to the values that it can have.
    answer : str
        Expression of drawn values and functions of the course: a number, or for a choice the place of the right option.
    unit : str
        Of the number; empty for a choice.
    wrong : mapping
        Well-known wrong answers and what is wrong with them: expressions for a number, also of the `answer`; for a
        choice all options, in their order (or one expression that gives this mapping), each with what is told when it
        is not the answer.
    why : str
        The answer in one sentence.
    """

    key: str
    place: str
    text: str
    draw: Mapping[str, tuple]
    answer: str
    unit: str
    wrong: Mapping[str, str] | str
    why: str
    tolerance: float = 0.02

    def draws(self) -> Iterator[dict[str, Any]]:
        """Every case that can be drawn."""
        for values in itertools.product(*self.draw.values()):
            yield dict(zip(self.draw, values, strict=True))

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
        self.answer: float | str = self._value(row.answer)
        wrong = self._value(row.wrong) if isinstance(row.wrong, str) else row.wrong
        if row.unit:
            self.choices: list[str] = []
            known = self.values | {"answer": self.answer}
            self.mistakes = [(value_of(expression, known), self._filled(told)) for expression, told in wrong.items()]
        else:
            self.mistakes = [(self._filled(option), self._filled(told)) for option, told in wrong.items()]
            self.choices = [option for option, _ in self.mistakes]
            self.answer = self.choices[int(self.answer)]

    def _value(self, expression: str) -> Any:
        return value_of(expression, self.values)

    def _filled(self, text: str) -> str:
        def value(match: re.Match) -> str:
            found = self._value(match[1])
            return f"{found:,.6g}" if isinstance(found, int | float) else str(found)

        return re.sub(r"\{([^{}]+)\}", value, text)

    @property
    def told(self) -> str:
        """The answer in words."""
        return self.answer if isinstance(self.answer, str) else f"{rounded(self.answer)} {self.row.unit}"

    def judge(self, said: float | str) -> tuple[bool, str]:
        """Whether an answer is right, and what to tell: why, or what is wrong with it."""
        if isinstance(self.answer, str) or isinstance(said, str):
            known = dict(self.mistakes).get(said, "") if isinstance(said, str) else ""
            return (True, self.why) if said == self.answer else (False, str(known))
        if self._same(said, self.answer):
            return True, self.why
        for value, told in self.mistakes:
            if self._same(said, value):
                return False, told
        way = "large" if said > self.answer else "small"
        for factor, told in _FACTORS.items():
            if any(self._same(said, self.answer * factor**power) for power in (1, -1)):
                return False, told.format(way=way if factor != 2 or way == "large" else "small")
        return False, f"That is too {way}."

    def _same(self, said: float, value: float) -> bool:
        return math.isclose(said, value, rel_tol=self.row.tolerance, abs_tol=1e-9)


@dataclass(frozen=True)
class Spoken:
    """A question to be answered aloud, as in an interview, with the points that are listened for."""

    key: str
    place: str
    text: str
    points: tuple[str, ...]
