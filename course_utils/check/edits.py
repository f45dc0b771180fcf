"""Wrong and other right answers as edits of a solution's text: what is replaced, and by what."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["EditError", "edited"]

_ARROW = re.compile(r"\s{2,}->\s+")


class EditError(ValueError):
    """An edit does not fit the text that it is for."""


def edited(text: str, edits: str | Mapping[str, str]) -> str:
    """Apply edits to a program's text.

    Parameters
    ----------
    text : str
        The program.
    edits : str or mapping
        One edit as ``"old  ->  new"``, with two spaces before the arrow at least; or several, ``{old: new}``. The old
        text may span lines. Lines of the new text after its first are indented as far as the line where it begins.

    Raises
    ------
    EditError
        An old text does not stand in ``text`` exactly once, where edits are counted one after the other; or an edit
        changes nothing.
    """
    if isinstance(edits, str):
        parts = _ARROW.split(edits)
        if len(parts) != 2:
            raise EditError(f"write an edit as 'old  ->  new', with two spaces before one arrow: {edits!r}")
        edits = dict([parts])
    for old, new in edits.items():
        found = text.count(old)
        if found != 1 or old == new:
            what = "changes nothing" if old == new else f"stands in the text {found} times, and not once"
            raise EditError(f"{old!r} {what}")
        start = text.index(old)
        line = text[text.rfind("\n", 0, start) + 1 :]
        indent = line[: len(line) - len(line.lstrip())]
        text = text.replace(old, new.replace("\n", "\n" + indent))
    return text
