"""The room of a new lesson: short texts, an exercise and its check, which build and pass as they are."""

from __future__ import annotations

import re
from pathlib import Path

from tools import ToolError

from .rooms import texts

ROOM = Path(__file__).parent / "room"  # in its texts NUMBER, TOPIC and WORDS stand for "17", "slow_links", "slow links"


def new(number: str, topic: str, root: Path) -> Path:
    """Make the room of a new lesson, and return its folder."""
    if not re.fullmatch(r"\d\d", number) or not re.fullmatch(r"[a-z][a-z0-9_]*", topic):
        raise ToolError("a lesson has a number of two digits and a topic in small letters, as in new 17 slow_links")
    room = root / "lessons" / topic
    taken = [name for name in texts(root) if name.startswith(f"{number}_")]
    if taken or room.exists():
        raise ToolError(f"there is a lesson {taken[0] if taken else topic} already")
    room.mkdir(parents=True)
    for file in ROOM.glob("*.txt"):
        text = file.read_text(encoding="utf-8").replace("NUMBER", number).replace("TOPIC", topic)
        (room / file.stem).write_text(text.replace("WORDS", topic.replace("_", " ")), encoding="utf-8")
    return room
