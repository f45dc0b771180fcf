"""What cells returned where a program was there that other machines lack: stored as JSON, shown as *recorded*."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["load", "real_or_recorded", "save"]

FOLDER = Path(__file__).parent


def save(name: str, result: Any, made_with: str) -> None:
    """Store a result of numbers, texts, lists and dictionaries as the recording `name`.

    Parameters
    ----------
    name : str
        Of the file, without its ending, such as "slurm_job".
    result : object
        What JSON can hold. It names no host, path or process of the machine that made it; the caller takes care.
    made_with : str
        Programs and versions, such as "Slurm 22.05.8".
    """
    text = json.dumps({"made_with": made_with, "result": result}, indent=None, separators=(",", ":"))
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def load(name: str) -> tuple[Any, str]:
    """Return the result of a recording, and what it was made with.

    Raises
    ------
    FileNotFoundError
        If there is no recording of that name.
    """
    stored = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return stored["result"], stored["made_with"]


def real_or_recorded(name: str, run: Callable[[], Any], available: tuple[bool, str]) -> Any:
    """Call `run` where that is possible; elsewhere say why not, and return what it returned when it was recorded.

    Where the environment variable ``COURSE_RECORD`` is set, a real result becomes the recording.

    Parameters
    ----------
    name : str
        Of the recording.
    run : callable
        Called without arguments; what it returns has to be what JSON can hold.
    available : (bool, str)
        Whether `run` can be called here; and what it is made with, or why it cannot, as `slurm.available` says.
    """
    there, sentence = available
    if not there:
        result, made_with = load(name)
        print(f"{sentence} What follows was recorded with {made_with}.")
        return result
    result = json.loads(json.dumps(run()))  # tuples are lists in a recording, so they are here, too
    if os.environ.get("COURSE_RECORD"):
        save(name, result, sentence)
    return result
