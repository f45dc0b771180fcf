"""Cures of the hang clinic: edits of a program, or another program in its place (private)."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CURES", "check_cure", "cured"]

CURES = {
    "edit": "texts of the program and what stands there instead, such as {'reduce(loss, dst=0)': 'all_reduce(loss)'}",
    "program": "a function of yours, without arguments, that is run in place of the program",
}


def check_cure(cure: Mapping[str, Any]) -> None:
    """Raise TypeError, with what is allowed, for a cure that cannot be applied."""
    if "edit" in cure:
        edit = cure["edit"]
        texts = [text for pair in edit.items() for text in pair] if isinstance(edit, dict) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"edit is {edit!r}; allowed is a dictionary from old text to new text")
    if "program" in cure and not inspect.isfunction(cure["program"]):
        raise TypeError(f"program is {cure['program']!r}; allowed is a function")
    if len(cure) > 1:
        raise ValueError("edit and program are both given; allowed is one of them")


def cured(source: str, name: str, cure: Mapping[str, Any]) -> tuple[str, str]:
    """Source and name of the program after a cure. Raises ValueError if a text to edit is not there exactly once."""
    if "program" in cure:
        program: Callable[[], Any] = cure["program"]
        return textwrap.dedent(inspect.getsource(program)), program.__name__
    for old, new in cure["edit"].items():
        if source.count(old) != 1:
            count = source.count(old)
            raise ValueError(f"{old!r} stands {count} times in the program; allowed are texts that stand once")
        source = source.replace(old, new)
    return source, name
