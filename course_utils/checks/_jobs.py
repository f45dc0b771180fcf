"""Training jobs on a clock of their own, in which a stage can be made faster and the waiting be measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["HIDDEN", "JOBS", "MEASURED", "STAGES", "Job", "steady"]

STAGES = ("read", "decode", "augment", "copy", "step")


@dataclass
class Job:
    """A training job on a clock of its own, which no other work on this machine disturbs.

    A batch is read, decoded and augmented by ``threads`` threads that share its images, copied, and used in a step. In
    the background a disk, the threads and a copier work on up to three batches ahead of the step; in the foreground
    everything waits for everything. ``compile_seconds`` are added to one stage of the first batch.
    """

    milliseconds: dict[str, float]
    threads: int
    background: bool = True
    compiled: str = "augment"
    compile_seconds: float = 2
    now: float = 0.0

    def clock(self) -> float:
        """Seconds since the job was made."""
        return self.now

    def halved(self, stage: str) -> Job:
        """A new job of the same kind in which one stage takes half as long."""
        if stage not in STAGES:
            raise ValueError(f"there is no stage {stage!r}; there are {', '.join(STAGES)}")
        times = self.milliseconds | {stage: self.milliseconds[stage] / 2}
        compiling = self.compile_seconds / (2 if stage == self.compiled else 1)
        return replace(self, milliseconds=times, compile_seconds=compiling, now=0.0)

    def alone(self, stage: str) -> None:
        """Run one stage on one batch in one thread, with nothing beside it."""
        self.now += self.milliseconds[stage] * 1e-3

    def step(self, batch: int) -> None:
        """One training step."""
        self.now += self.milliseconds["step"] * 1e-3

    def batches(self, count: int) -> Iterator[int]:
        """Start a loader, and give ``count`` batches, each as soon as it is ready."""
        free = dict.fromkeys(("disk", "threads", "copier"), self.now)
        taken: list[float] = []
        work = {name: self.milliseconds[name] * 1e-3 for name in STAGES}
        shared = (work["decode"] + work["augment"]) / self.threads
        for batch in range(count):
            first = self.compile_seconds if batch == 0 else 0.0
            if self.background:
                ready = max(free["disk"], taken[batch - 3] if batch >= 3 else 0.0)
                for place, time in (("disk", work["read"]), ("threads", shared + first), ("copier", work["copy"])):
                    ready = free[place] = max(ready, free[place]) + time
                self.now = max(self.now, ready)
            else:
                self.now += work["read"] + shared + first + work["copy"]
            taken.append(self.now)
            yield batch


def _job(read: float, decode: float, augment: float, copy: float, step: float, threads: int, **more: Any) -> Job:
    return Job(dict(zip(STAGES, (read, decode, augment, copy, step), strict=True)), threads, **more)


JOBS = {
    "A": _job(4.5, 16, 12, 2, 4, threads=4, compile_seconds=5),
    "B": _job(3, 20, 4, 2, 9, threads=4, compile_seconds=6),
    "C": _job(12, 20, 8, 1, 5, threads=8, compile_seconds=1),
}
HIDDEN = {
    "D, which compiles for 9 s": _job(2, 8, 6, 9, 5, threads=4, compile_seconds=9),
    "E, with its loader in the foreground": _job(2, 8, 3, 1, 7, threads=1, background=False),
    "F, with its loader in the foreground": _job(1, 10, 2, 1, 9, threads=3, background=False),
}
_SKIPPED, MEASURED = 20, 200  # batches


def steady(job: Job, skipped: int = _SKIPPED) -> tuple[float, float]:
    """Seconds of the loop after ``skipped`` batches, and per cent of them spent in next()."""
    job = replace(job, now=0.0)
    begin = waited = 0.0
    batches = job.batches(skipped + MEASURED)
    for n in range(skipped + MEASURED):
        if n == skipped:
            begin = job.clock()
        start = job.clock()
        batch = next(batches)
        if n >= skipped:
            waited += job.clock() - start
        job.step(batch)
    return job.clock() - begin, 100 * waited / (job.clock() - begin)
