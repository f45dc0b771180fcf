"""Modules of the learner's own in a rank: imported again once a file of theirs has been edited (private)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from itertools import islice

from .learner_code import is_learner


class Modules:
    """The learner's modules that this process has imported, with what their files were like then."""

    def __init__(self) -> None:
        self._before = len(sys.modules)  # these are libraries, and stay
        self._libraries: set[str] = set()
        self._files: dict[str, tuple | None] = {}

    def _learners(self) -> list[tuple[str, str]]:
        """Names and files of the learner's modules."""
        found = []
        for name in list(islice(reversed(sys.modules), max(0, len(sys.modules) - self._before))):  # the newest
            if name in self._libraries:
                continue
            path = getattr(sys.modules[name], "__file__", None)
            if path and is_learner(path):
                found.append((name, path))
            else:
                self._libraries.add(name)
        return found

    def note(self, since: float) -> None:
        """Remember the files as they are; one that was written after ``since`` (seconds of the system's clock) may have
        been edited after its import, so it counts as edited."""
        for _, path in self._learners():
            if path not in self._files:
                stamp = _stamp(path)
                self._files[path] = stamp if stamp and stamp[0] < since * 1e9 else None

    def forget_edited(self, names: dict | None = None) -> list[str]:
        """Forget all of the learner's modules if a file of one was edited, since others hold what they took from it.

        ``names`` is a namespace in which names of such modules are bound to the new ones. Returns the names of the
        modules whose files have changed.
        """
        found = self._learners()
        edited = [name for name, path in found if path in self._files and self._files[path] != _stamp(path)]
        if not edited:
            return []
        told = [name for name, path in found if name in edited and self._files[path] is not None]
        modules = {id(sys.modules[name]): name for name, _ in found}
        held = {key: modules[id(value)] for key, value in (names or {}).items() if id(value) in modules}
        for name, path in found:
            del sys.modules[name]
            with contextlib.suppress(OSError, NotImplementedError, ValueError):
                os.unlink(importlib.util.cache_from_source(path))  # taken for current within a second of the edit
        self._files.clear()
        importlib.invalidate_caches()
        for key, name in held.items():
            with contextlib.suppress(Exception):  # told when the cell imports it itself
                names[key] = importlib.import_module(name)
        return sorted(told)


def _stamp(path: str) -> tuple | None:
    """What changes when a file is edited: time in nanoseconds, size, and the file itself."""
    try:
        found = os.stat(path)
    except OSError:  # an editor is just replacing it
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def clock() -> float:
    """Seconds of the clock by which files are stamped, which goes in steps of some milliseconds."""
    return time.time() - 0.05
