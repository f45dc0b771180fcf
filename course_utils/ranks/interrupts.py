"""When an interrupt (the stop button, Ctrl-C) may strike while ranks run (private)."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interrupts:
    """Takes SIGINT for the time of a call: at once where nothing can break, else when the next wait begins.

    A message that is cut in the middle would garble all that follow. A second interrupt always strikes at once.
    """

    def __init__(self):
        self.count = 0
        self._at_once = True

    def _handle(self, _signal, _frame) -> None:
        self.count += 1
        if self._at_once or self.count > 1:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Install the handler; other threads never see signals, and whoever ignores interrupts goes on doing so."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
            yield
            return
        self.count, self._at_once = 0, True
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def at_once(self, value: bool) -> Iterator[None]:
        """Whether an interrupt strikes at once inside the block."""
        before, self._at_once = self._at_once, value
        try:
            if value:
                self.check()
            yield
        finally:
            self._at_once = before

    def check(self) -> None:
        """Raise KeyboardInterrupt if an interrupt has been held back."""
        if self.count == 1:
            raise KeyboardInterrupt


@contextlib.contextmanager
def held_back(strikes: bool = True) -> Iterator[None]:
    """A bounded clean-up that an interrupt must not tear apart: it ``strikes`` at the end of the block, or never."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and strikes:
        raise KeyboardInterrupt
