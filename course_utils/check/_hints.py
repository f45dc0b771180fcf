"""Hints of the exercises, read from the TOML file beside a lesson's check.

A table for each exercise has its hints by key. A table whose name begins with an underscore is a family, which
exercises share: ``extends = ["replicas"]`` adds the hints of ``[_replicas]``; a hint of the exercise's own comes before
one of a family. Line breaks and repeated spaces count as one space.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

__all__ = ["COMMON", "HintError", "load_hints", "read_hints"]

#: Hints of all exercises.
COMMON = Path(__file__).with_name("hints.toml")
_KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class HintError(ValueError):
    """A file of hints says something that it may not, or does not exist."""


def load_hints(module: str) -> dict[str, dict[str, str]]:
    """The hints beside a module: ``hints.toml`` for ``check.py``, else those named after it (its ``__file__``)."""
    path = Path(module)
    return read_hints(path.with_name("hints.toml" if path.stem == "check" else f"{path.stem}_hints.toml"))


def read_hints(path: Path) -> dict[str, dict[str, str]]:
    """The hints of all exercises of a file: exercise to hint key to text.

    Raises
    ------
    HintError
        There is no such file, it is no TOML, a key or text is none, an exercise extends a family that does not exist,
        or nobody extends a family.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HintError(f"there are no hints at {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise HintError(f"{path.name}: {error}") from None
    families = {name[1:]: _texts(path, name, table) for name, table in tables.items() if name.startswith("_")}
    hints, used = {}, set()
    for name, table in tables.items():
        if name.startswith("_"):
            continue
        extends = table.pop("extends", []) if isinstance(table, dict) else []
        unknown = [family for family in extends if family not in families]
        if unknown or not isinstance(extends, list):
            raise HintError(f"{path.name}, [{name}] extends {unknown or extends}; families are {sorted(families)}")
        used.update(extends)
        shared = {key: text for family in extends for key, text in families[family].items()}
        hints[name] = shared | _texts(path, name, table)
    if unused := sorted(set(families) - used):
        raise HintError(f"{path.name}: no exercise extends {', '.join(unused)}")
    return hints


def _texts(path: Path, name: str, table: Any) -> dict[str, str]:
    if not isinstance(table, dict):
        raise HintError(f"{path.name}: {name} stands outside of the tables of the exercises")
    for key, text in table.items():
        if not _KEY.fullmatch(key) or not isinstance(text, str) or not text.strip():
            raise HintError(f'{path.name}, [{name}]: {key} = {text!r} is no hint; write some-key = "some text"')
    return {key: " ".join(text.split()) for key, text in table.items()}
