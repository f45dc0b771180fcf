"""Training jobs on a clock of their own, in which a stage can be made faster and the waiting be measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

STAGES = ("read", "decode", "augment", "copy", "step")


class Job:
    """A training job on a clock of its own, which no other work on this machine disturbs.

    A batch is read, decoded and augmented by ``threads`` threads that share its images, copied, and used in a step; in
    the background up to three batches ahead. In the first batch ``compile_seconds`` are added to the augmentation.
    """

    def __init__(
        self, milliseconds: dict[str, float], threads: int, background: bool = True, compile_seconds: float = 2,
        looks: list[float] | None = None,
    ) -> None:
        self.threads = threads
        self._milliseconds, self._background, self._compile_seconds = milliseconds, background, compile_seconds
        self._now, self._looks = 0.0, [] if looks is None else looks  # shared with the jobs in which a stage is halved

    def clock(self) -> float:
        """Seconds since the job was made."""
        self._looks.append(self._now)
        return self._now

    def halved(self, stage: str) -> Job:
        """A new job of the same kind in which one stage takes half as long."""
        times = self._milliseconds | {stage: self._milliseconds[stage] / 2}
        compiling = self._compile_seconds / (1 + (stage == "augment"))
        return Job(times, self.threads, self._background, compiling, self._looks)

    def alone(self, stage: str) -> None:
        """Run one stage on one batch in one thread, with nothing beside it."""
        self._now += self._milliseconds[stage] / 1e3

    def step(self, batch: int) -> None:
        """One training step."""
        self.alone("step")

    def batches(self, count: int) -> Iterator[int]:
        """Start a loader, and give ``count`` batches, each as soon as it is ready."""
        times = {stage: time / 1e3 for stage, time in self._milliseconds.items()}
        shared = (times["decode"] + times["augment"]) / self.threads
        free = dict.fromkeys(("disk", "threads", "copier"), self._now)
        taken: list[float] = []
        for batch in range(count):
            compiling = self._compile_seconds if batch == 0 else 0.0
            if self._background:
                ready = max(free["disk"], taken[batch - 3] if batch >= 3 else 0.0)
                work = (("disk", times["read"]), ("threads", shared + compiling), ("copier", times["copy"]))
                for place, time in work:
                    ready = free[place] = max(ready, free[place]) + time
                self._now = max(self._now, ready)
            else:
                self._now += times["read"] + shared + compiling + times["copy"]
            taken.append(self._now)
            yield batch


def _plan(*milliseconds: float, **more: Any) -> dict[str, Any]:
    """The arguments of a job, from the times of its stages."""
    return {"milliseconds": dict(zip(STAGES, milliseconds, strict=True)), **more}


PLANS = {
    "A": _plan(4.5, 16, 12, 2, 4, threads=4, compile_seconds=5),
    "B": _plan(3, 20, 4, 2, 9, threads=4, compile_seconds=6),
    "C": _plan(12, 20, 8, 1, 5, threads=8, compile_seconds=1),
}
JOBS = {name: Job(**plan) for name, plan in PLANS.items()}
HIDDEN = {
    "D, which compiles for 9 s": _plan(2, 8, 6, 9, 5, threads=4, compile_seconds=9),
    "E, with its loader in the foreground": _plan(2, 8, 3, 1, 7, threads=1, background=False),
    "F, with its loader in the foreground": _plan(1, 10, 2, 1, 9, threads=3, background=False),
}
