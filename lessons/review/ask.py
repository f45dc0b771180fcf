"""What the review's cells call: questions that are due, questions to be answered aloud, and a mock interview."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from course_utils.draw.controls import view
from course_utils.predictions import buttons, keep, kept, number

from . import aloud, moving, running, splitting, training
from .aloud import Spoken
from .question import Asked, Question, place_of, rounded, shown

__all__ = ["GAPS", "QUESTIONS", "SPOKEN", "interview", "known", "review", "say_aloud"]

QUESTIONS: Mapping[str, tuple[Question, ...]] = {
    **moving.QUESTIONS, **training.QUESTIONS, **splitting.QUESTIONS, **running.QUESTIONS,
}
SPOKEN: Mapping[str, tuple[Spoken, ...]] = aloud.QUESTIONS
GAPS = (0, 1, 3, 7, 21, 60)  # days until a question comes again, by how often in a row it was answered well
SAID = ("all of the points", "some of them", "none yet")


def review(count: int = 10, topic: str = "", lesson: str = "", until: str = "99", seed: int = 1) -> None:
    """Ask so many questions: first those that are due again, then new ones, of all topics in turn.

    Only of one topic of `QUESTIONS`, or one lesson, such as "06", if it is given, and up to the lesson `until`. The
    seed chooses the order of new questions, and the numbers in all of them.
    """
    for row in _chosen(QUESTIONS, count, topic, lesson, until, seed):
        Box(row, row.drawn(random.Random(f"{seed} {row.key} {_record(row.key).get('times', 0)}"))).show()


def say_aloud(count: int = 3, topic: str = "", until: str = "99", seed: int = 1) -> None:
    """Ask so many questions that are to be answered aloud; the points of a strong answer are in a fold."""
    for row in _chosen(SPOKEN, count, topic, "", until, seed):
        Box(row).show()


def interview(seed: int = 1) -> None:
    """Six questions of six topics to be answered aloud, in 45 minutes by a clock that stops nobody."""
    draw = random.Random(seed)
    print("45 minutes: about seven for each question, three to spare.")
    _show_clock()
    for topic in draw.sample(list(SPOKEN), 6):
        Box(draw.choice(SPOKEN[topic])).show()


def known(rows: Sequence[Question | Spoken]) -> int:
    """How many of these questions were answered well at least twice in a row, with days between."""
    return sum(_record(row.key).get("right", 0) > 1 for row in rows)


def _record(key: str) -> dict[str, Any]:
    return kept().get(f"review: {key}", {})


def _due(key: str) -> date | None:
    """The day on which a question comes again; None for one that was never answered."""
    record = _record(key)
    return record and date.fromisoformat(record["on"]) + timedelta(GAPS[min(record["right"], len(GAPS) - 1)]) or None


def _chosen(topics: Mapping[str, Sequence], count: int, topic: str, lesson: str, until: str, seed: int) -> list:
    """The rows to ask now; prints how many of them come again."""
    if topic and topic not in topics:
        raise ValueError(f"there is no topic {topic!r}; there are {', '.join(topics)}")
    draw = random.Random(seed)
    mixed = [draw.sample(rows, len(rows)) for name, rows in topics.items() if topic in ("", name)]
    draw.shuffle(mixed)
    turns = itertools.zip_longest(*mixed)  # one question of each topic, then the next of each
    rows = [row for turn in turns for row in turn if row and row.place.startswith(lesson) and row.place[:2] <= until]
    if not rows:
        raise ValueError("there is no such question; a lesson is named by two digits, such as '06'")
    due = {row.key: day for row in rows if (day := _due(row.key))}
    again = sorted((row for row in rows if due.get(row.key, date.max) <= date.today()), key=lambda row: due[row.key])
    new = [row for row in rows if row.key not in due]
    chosen = [*again, *new][:count]
    print(f"{len(chosen)} of {len(rows)} questions; {min(len(again), count)} of them come again, "
          f"{known(rows)} are known.")
    if not chosen:
        print(f"All have been asked; the next one is due on {min(due.values())}.")
    return chosen


class Box:
    """A question on the screen: text, a field for the answer, what is told about it, and a fold with the answer."""

    def __init__(self, row: Question | Spoken, asked: Asked | None = None):
        self.row, self.asked, self.counts = row, asked, True
        self.choices = asked.choices if asked else list(SAID)
        self.text = asked.text if asked else row.text

    def say(self, value: float | str) -> str:
        """Take an answer, keep the first one, and return what to tell."""
        right, told = self.asked.judge(value) if self.asked else (value == SAID[0], "")
        if self.counts:
            before, self.counts = _record(self.row.key), False
            keep(f"review: {self.row.key}", {
                "said": value, "is": self.asked.answer if self.asked else SAID[0],
                "unit": self.asked.row.unit if self.asked else "", "on": f"{date.today()}",
                "right": before.get("right", 0) + 1 if right else 0, "times": before.get("times", 0) + 1,
            })
            days = (_due(self.row.key) or date.today()) - date.today()
            told += f" It comes again in {days.days or 'less than 1'} day{'s' * (days.days > 1)}." if right else ""
        return f"<b>{'Right.' if right else 'Not yet.'}</b> {shown(told)}"

    @property
    def question(self) -> str:
        """The question as HTML."""
        words = f"<b>{shown(self.text)}</b><br><small>{place_of(self.row.place)}</small>"
        return f"<div style='max-width: 60em; line-height: 1.4'>{words}</div>"

    @property
    def fold(self) -> str:
        """The answer as HTML that is folded away."""
        if self.asked is None:
            summary, body = "What a strong answer has", ""
            listed = list(map(shown, self.row.points))
        else:
            asked, summary = self.asked, "Answer"
            drawn = ", ".join(f"{name} = {value}" for name, value in asked.values.items())
            answer = asked.answer if asked.choices else f"{rounded(asked.answer)} {asked.row.unit}"
            body = f"<p><b>{shown(answer)}</b> – {shown(asked.why)}</p>"
            if asked.row.unit:
                body += f"<p>Computed: {shown(f'`{asked.row.answer}`')}, {shown(drawn)}</p>"
            listed = [f"{shown(wrong if isinstance(wrong, str) else rounded(wrong))}: {shown(told)}"
                      for wrong, told in asked.mistakes if wrong != asked.answer]
        body += f"<ul>{''.join(f'<li>{each}</li>' for each in listed)}</ul>"
        style = "max-width: 60em; margin: 4px 0 1em"
        return f"<details style='{style}'><summary style='cursor: pointer'>{summary}</summary>{body}</details>"

    def show(self) -> None:
        """Display it: as a widget, and for readers without a kernel in words."""
        options = "".join(f"<br>– {shown(option)}" for option in self.choices) if self.asked else ""
        words = {"text/html": f"{self.question}{options}{self.fold}", "text/plain": self.text}
        display(view(self.field()) | words, raw=True)

    def field(self) -> Any:
        """The widget. A number counts when Enter is pressed, or *Check*; an option when it is pressed."""
        told, button = widgets.HTML(""), widgets.Button(description="Check")
        entry: Any = buttons(self.choices) if self.choices else widgets.Text(
            placeholder=f"a number, {self.asked.row.unit}", continuous_update=False)

        def check(_: Any) -> None:
            value = entry.value if self.choices else number(entry.value)
            told.value = "Please enter a number, such as 12.5." if value is None else self.say(value)

        entry.observe(check, "value")
        button.on_click(check)
        row = entry if self.choices else widgets.HBox([entry, button])
        return widgets.VBox([widgets.HTML(self.question), row, told, widgets.HTML(self.fold)])


def _show_clock() -> None:
    """Minutes and seconds since a click; without a kernel words only."""
    play, told = widgets.Play(max=7200, interval=1000), widgets.Label("0:00 of 45:00")

    def tick(change: dict[str, Any]) -> None:
        told.value = f"{change['new'] // 60}:{change['new'] % 60:02} of 45:00"

    play.observe(tick, "value")
    words = "Start the clock, then read the first question."
    display(view(widgets.HBox([play, told])) | {"text/plain": words}, raw=True)
