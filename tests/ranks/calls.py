"""What tests of the launcher share: tables of functions, what every failure must be like, what a screen would show."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from course_utils import WorkerError, launch


def case(table: list, *expected: Any) -> Callable:
    """Add the function that follows, and what is expected of it, to a table of tests, under its own name."""

    def add(function: Callable) -> Callable:
        table.append(pytest.param(function, *expected, id=function.__name__))
        return function

    return add


def says(text: str, *parts: str | re.Pattern) -> None:
    """A text must hold all these strings, and match all these patterns."""
    for part in parts:
        found = part.search(text) if isinstance(part, re.Pattern) else part in text
        assert found, f"{part!r} is missing in:\n{text}"


def all_is_well(world_size: int = 4) -> None:
    """The next call: every rank answers, and they can talk to each other."""

    def total():
        x = torch.tensor([dist.get_rank()])
        dist.all_reduce(x)
        return x.item()

    assert launch(total, world_size=world_size) == [world_size * (world_size - 1) // 2] * world_size


def failure(kind: type[Exception], function: Callable, *args, **options) -> WorkerError:
    """The error that `launch` raises, after what holds for every one of them; the next call must work."""
    options.setdefault("world_size", 4)
    with pytest.raises(kind) as caught:
        launch(function, *args, **options)
    all_is_well(options["world_size"])
    error, text = caught.value, str(caught.value)
    assert len(error.states) == options["world_size"]
    assert "course_utils" not in text and "site-packages" not in text, text
    assert not re.search(r"\bpid\b|0x[0-9a-f]{6,}", text), text
    assert not re.search(r"(?<![\w.<:/])/(?:home|tmp|usr|work|root|var|opt|Users|private)/", text), text
    assert "Connection closed by peer" not in text and "Connection reset by peer" not in text, text
    return error


def ended(pids: list[int], seconds: float = 60.0) -> bool:
    """Whether all these processes end within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_lives(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def screen(text: str) -> list[str]:
    """The lines that a terminal or a notebook shows in the end: a carriage return begins the line anew."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in line.split("\r"):
            part = re.sub(r"\x1b\[[0-9;]*m", "", part)
            if "\x1b[K" in part or "\x1b[2K" in part:
                shown, part = "", re.sub(r"\x1b\[2?K", "", part)
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines
