"""A sign of life from ranks that print nothing: one line that is overwritten and at the end erased (private)."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from .labels import rank_label

TICK = 0.5  # seconds between two looks at whether there is something to write
_SILENCE = 3.0  # seconds without output after which the line appears
_PERIOD = 1.0  # seconds between its changes,
_BAR_PERIOD = 0.3  # and between those of a progress bar
_WIDTH = 100


def wanted() -> bool:
    """Whether there is somebody to see it: a notebook or a terminal, and no test that compares the output."""
    if os.environ.get("COURSE_STATUS") == "0" or "PYTEST_CURRENT_TEST" in os.environ:
        return False
    in_notebook = "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None
    return in_notebook or (sys.stdout is not None and sys.stdout.isatty())


def can_answer() -> bool:
    """Whether there is somebody to answer `input`: a terminal, or a notebook's page (papermill and nbval have none)."""
    if threading.current_thread() is not threading.main_thread():
        return False
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if kernel := getattr(shell, "kernel", None):
        return getattr(kernel, "_allow_stdin", False)
    return sys.stdin is not None and sys.stdin.isatty()


class Status:
    """The line of one call. ``write`` takes text; output of the ranks has to go through `show`."""

    def __init__(self, show: Callable[[str | dict], None], enabled: bool | None = None):
        self._show = show
        self._enabled = wanted() if enabled is None else enabled
        self._began = self._changed = self._written = time.monotonic()
        self._width = 0

    def show(self, item: str | dict) -> None:
        """Show output of the ranks, in the place of the line."""
        self.erase()
        self._changed = time.monotonic()
        self._show(item)

    def update(self, running: list[int], unended: tuple[str, str] | None, doing: str = "running") -> None:
        """Write the line anew if it is time: an unended line of a rank's if there is one, else who still runs."""
        now = time.monotonic()
        if not self._enabled or now - self._written < (_BAR_PERIOD if unended else _PERIOD):
            return
        if unended is not None:
            line = "[{}] {}".format(*unended)
        elif now - self._changed >= _SILENCE and running:
            line = f"… {now - self._began:.0f} s: {rank_label(running)} {'is' if len(running) == 1 else 'are'} {doing}"
        else:
            return
        line = line[:_WIDTH]
        self._show(f"\r{line.ljust(self._width)}")
        self._written, self._width = now, len(line)

    def stand_still(self, seconds: float) -> None:
        """Do not count so much of the time: the ranks waited for the learner."""
        self._began += seconds
        self._changed += seconds

    def erase(self) -> None:
        """Take the line away."""
        if self._width:
            self._show(f"\r{' ' * self._width}\r")
            self._width = 0
