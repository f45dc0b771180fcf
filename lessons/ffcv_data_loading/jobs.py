"""Training jobs on a clock of their own, in which a stage can be made faster and the waiting be measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["HIDDEN", "JOBS", "PLANS", "STAGES", "Job", "Plan"]

STAGES = ("read", "decode", "augment", "copy", "step")


@dataclass(frozen=True)
class Plan:
    """What a job is made of, which its measurement has to bring out.

    A batch is read, decoded and augmented by ``threads`` threads that share its images, copied, and used in a step. In
    the background a disk, the threads and a copier work on up to three batches ahead of the step; in the foreground
    everything waits for everything. In the first batch ``compile_seconds`` are added to the augmentation.
    """

    milliseconds: dict[str, float]
    threads: int
    background: bool = True
    compile_seconds: float = 2

    def halved(self, stage: str) -> Plan:
        times = self.milliseconds | {stage: self.milliseconds[stage] / 2}
        return replace(self, milliseconds=times, compile_seconds=self.compile_seconds / (1 + (stage == "augment")))


class Job:
    """A training job on a clock of its own, which no other work on this machine disturbs.

    How long its stages take is no attribute: it has to be measured.

    Attributes
    ----------
    threads : int
        Threads that share the decoding and the augmentation of a batch.
    """

    def __init__(self, plan: Plan, looks: list[float] | None = None):
        self.threads = plan.threads
        self._plan, self._now = plan, 0.0
        self._looks = [] if looks is None else looks  # shared with the jobs in which a stage is halved

    def clock(self) -> float:
        """Seconds since the job was made."""
        self._looks.append(self._now)
        return self._now

    def halved(self, stage: str) -> Job:
        """A new job of the same kind in which one stage takes half as long."""
        return Job(self._plan.halved(stage), self._looks)

    def alone(self, stage: str) -> None:
        """Run one stage on one batch in one thread, with nothing beside it."""
        self._now += self._plan.milliseconds[stage] / 1e3

    def step(self, batch: int) -> None:
        """One training step."""
        self.alone("step")

    def batches(self, count: int) -> Iterator[int]:
        """Start a loader, and give ``count`` batches, each as soon as it is ready."""
        plan, times = self._plan, {stage: time / 1e3 for stage, time in self._plan.milliseconds.items()}
        shared = (times["decode"] + times["augment"]) / plan.threads
        free = dict.fromkeys(("disk", "threads", "copier"), self._now)
        taken: list[float] = []
        for batch in range(count):
            compiling = plan.compile_seconds if batch == 0 else 0.0
            if plan.background:
                ready = max(free["disk"], taken[batch - 3] if batch >= 3 else 0.0)
                work = (("disk", times["read"]), ("threads", shared + compiling), ("copier", times["copy"]))
                for place, time in work:
                    ready = free[place] = max(ready, free[place]) + time
                self._now = max(self._now, ready)
            else:
                self._now += times["read"] + shared + compiling + times["copy"]
            taken.append(self._now)
            yield batch


def _plan(read: float, decode: float, augment: float, copy: float, step: float, threads: int, **more: Any) -> Plan:
    return Plan(dict(zip(STAGES, (read, decode, augment, copy, step), strict=True)), threads, **more)


PLANS = {
    "A": _plan(4.5, 16, 12, 2, 4, threads=4, compile_seconds=5),
    "B": _plan(3, 20, 4, 2, 9, threads=4, compile_seconds=6),
    "C": _plan(12, 20, 8, 1, 5, threads=8, compile_seconds=1),
}
JOBS = {name: Job(plan) for name, plan in PLANS.items()}
HIDDEN = {
    "D, which compiles for 9 s": _plan(2, 8, 6, 9, 5, threads=4, compile_seconds=9),
    "E, with its loader in the foreground": _plan(2, 8, 3, 1, 7, threads=1, background=False),
    "F, with its loader in the foreground": _plan(1, 10, 2, 1, 9, threads=3, background=False),
}
