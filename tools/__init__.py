"""Tools of authors, instructors and of those with a GPU machine; lessons do not need them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class ToolError(Exception):
    """Something that a tool cannot do; the message says why, and what to do."""


def write(path: Path, content: str | bytes) -> None:
    """Write a file in one go: whoever reads it finds the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(half, path)
