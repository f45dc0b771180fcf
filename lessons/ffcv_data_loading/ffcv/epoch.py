"""One loop over FFCV's batches, which ends whatever happens on either side (why: see `fixes`)."""

from __future__ import annotations

import contextlib
import queue
import weakref
from dataclasses import dataclass

running: weakref.WeakSet = weakref.WeakSet()  # threads


def close_all() -> None:
    for thread in list(running):
        thread.close()
        thread.join(2)


class Closed(Exception):
    """The loop that wanted the batches has ended."""


@dataclass
class Failure:
    error: BaseException


class Batches(queue.Queue):
    """FFCV's queue of batches that are ready: it never waits for a loop or for a thread that is not there any more."""

    def __init__(self, thread) -> None:
        super().__init__(thread.loader.batches_ahead)
        self.thread, self.last = weakref.ref(thread), False
        self.closed = thread.terminate_event

    def put(self, item, block: bool = True, timeout: float | None = None) -> None:
        while not self.closed.is_set():
            with contextlib.suppress(queue.Full):
                return super().put(item, timeout=0.2)
        raise Closed

    def get(self, block: bool = True, timeout: float | None = None):
        while self.last is False:
            alive = self.thread().is_alive()  # looked at before the queue
            with contextlib.suppress(queue.Empty):
                item = super().get(timeout=0.5)
                if item is not None and not isinstance(item, Failure):
                    return item
                self.last = item
            if self.last is False and (not alive or self.closed.is_set()):
                self.last = None if self.closed.is_set() else Failure(RuntimeError("the pipeline's thread has ended"))
        if self.last is None:
            return None
        error = self.last.error
        raise RuntimeError(f"FFCV failed in the pipeline: {type(error).__name__}: {error}") from error


class Epoch:
    """What a loop over a Loader holds; when it lets go of it, the thread behind it ends."""

    def __init__(self, thread) -> None:
        self.thread = thread

    def __iter__(self) -> Epoch:
        return self

    def __next__(self):
        return next(self.thread)

    def close(self) -> None:
        self.thread.close()

    __del__ = close
