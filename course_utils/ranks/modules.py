"""Modules of the learner's own: a rank that has imported one which was edited since is not used again (private)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from itertools import islice

from .learner_code import is_learner


class Modules:
    """The learner's modules that this process has imported: by file, its stamp then."""

    def __init__(self) -> None:
        self._before = len(sys.modules)  # these are libraries, and stay
        self._libraries: set[str] = set()
        self.files: dict[str, tuple | None] = {}

    def note(self, since: float) -> None:
        """Remember the files of new modules; one that was written after ``since`` (seconds of the system's clock) may
        have been edited after its import, so it counts as edited.
        """
        for name in list(islice(reversed(sys.modules), max(0, len(sys.modules) - self._before))):  # the newest
            path = getattr(sys.modules[name], "__file__", None) if name not in self._libraries else None
            if not path or not is_learner(path):
                self._libraries.add(name)
            elif path not in self.files:
                found = stamp(path)
                self.files[path] = found if found and found[0] < since * 1e9 else None


def stamp(path: str) -> tuple | None:
    """What changes when a file is edited: time in nanoseconds, size, and the file itself."""
    try:
        found = os.stat(path)
    except OSError:  # an editor is just replacing it
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def edited(files: dict[str, tuple | None]) -> list[str]:
    """Those of these files that have been edited since they had these stamps."""
    return [path for path, before in files.items() if before is None or before != stamp(path)]


def forget_bytecode(path: str) -> None:
    """Remove what Python has compiled of a file: it is taken for current within a second of the edit."""
    with contextlib.suppress(OSError, NotImplementedError, ValueError):
        os.unlink(importlib.util.cache_from_source(path))


def clock() -> float:
    """Seconds of the clock by which files are stamped, which goes in steps of some milliseconds."""
    return time.time() - 0.05
