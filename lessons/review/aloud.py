"""Questions to be answered aloud, as in an interview, with the points that are listened for: read from aloud.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["QUESTIONS", "Spoken"]


@dataclass(frozen=True)
class Spoken:
    """A question, under the name by which results are kept, with its lesson and section."""

    key: str
    place: str
    text: str
    points: tuple[str, ...]


def _questions(part: str) -> tuple[Spoken, ...]:
    """The questions of a topic: a name, a place and a text each, then a list of points."""
    found = []
    for block in re.split(r"\n\n(?=\*\*)", part.strip())[1:]:
        text, *points = re.split(r"\n- ", block)
        key, place, asked = re.fullmatch(r"\*\*(.+)\*\* \((.+?)\) (.+)", " ".join(text.split())).groups()
        found.append(Spoken(key, place, asked, tuple(" ".join(point.split()) for point in points)))
    return tuple(found)


_TOPICS = Path(__file__).with_name("aloud.md").read_text(encoding="utf-8").split("\n## ")[1:]
QUESTIONS = {part.partition("\n")[0]: _questions(part) for part in _TOPICS}
