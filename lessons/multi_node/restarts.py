"""Checks of the exercises on stopping and starting again: a training loop, and its job script.

Each takes the learner's function; it prints one line if that passes, and raises :class:`CheckFailed` with a hint if
not. The loop runs on ranks that get real signals. The job script runs with stand-ins for Slurm's commands, and then as
a job of a real Slurm cluster where Slurm is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from course_utils.check import TIMEOUT, CheckFailed, Exercise, checked, load_hints, whole_number

from .batch import (
    HOSTS,
    JOB,
    STEPS,
    STOP,
    TASKS,
    Directives,
    Job,
    Run,
    directives,
    on_a_cluster,
    undisturbed,
    with_stand_ins,
)
from .slurm import SlurmCluster, missing

__all__ = ["HINTS", "job_script", "train"]

HINTS = load_hints(__file__)

# ------------------------------------------------------------------------------------------------ the training loop

_STEPS = 6


def _do(step: int, state: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """What one step makes of a rank's state and the sum of all ranks' states."""
    return state / 2 + total + step


def _trajectory(first: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The states of all ranks before each step and after the last, of a run that nobody disturbs."""
    states = [first]
    for step in range(_STEPS):
        total = torch.stack(states[-1]).sum(0)
        states.append([_do(step, state, total) for state in states[-1]])
    return states


def _call(state: torch.Tensor, fn: Callable, folder: Path, told: dict[int, int], times: int) -> dict[str, Any]:
    """On a rank: run the loop, ``times`` times; ``told`` says which ranks get SIGTERM, and in which step.

    What the rank does is written down at once, so that it is known of a rank that never comes back, too.
    """
    import torch.distributed as dist

    rank, calls = dist.get_rank(), []

    def do_step(step: int, state: torch.Tensor) -> torch.Tensor:
        note = {"rank": rank, "step": step, "ended": False}
        calls.append((step, state.clone()))
        with (folder.parent / f"notes-{rank}").open("a") as notes:
            notes.write(json.dumps(note) + "\n")
        if told.get(rank) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        total = state.clone()
        dist.all_reduce(total)
        with (folder.parent / f"notes-{rank}").open("a") as notes:
            notes.write(json.dumps(note | {"ended": True}) + "\n")
        return _do(step, state, total)

    before, codes, counts = signal.getsignal(signal.SIGTERM), [], []
    try:
        for _ in range(times):
            codes.append(fn(folder, _STEPS, state.clone(), do_step))
            counts.append(len(calls))
            dist.barrier()  # a job starts again when all its ranks have ended
    finally:
        signal.signal(signal.SIGTERM, before)
    return {"codes": codes, "calls": calls, "counts": counts}


class _Loop:
    """One training run, over as many calls as it is stopped and started again, compared step by step."""

    def __init__(self, exercise: Exercise, fn: Callable, ranks: int, folder: Path):
        self.exercise, self.fn, self.ranks, self.folder = exercise, fn, ranks, folder / "run"
        self.folder.mkdir()
        self.first = [torch.tensor([1.0 + rank, 0.5 * rank], dtype=torch.float64) for rank in range(ranks)]
        self.states, self.done = _trajectory(self.first), 0

    def call(self, told: dict[int, int], case: str, times: int = 1) -> None:
        """One call by all ranks (or several), with what has to come of it."""
        for notes in self.folder.parent.glob("notes-*"):
            notes.unlink()
        try:
            outcomes = self.exercise.run(_call, self.first, self.fn, self.folder, told, times, case=case)
        except CheckFailed as failed:
            self._explain(failed, told)
            raise
        results = [outcome.result for outcome in outcomes]
        for _, result in self.exercise.each(results):
            codes = [whole_number(code) for code in result["codes"]]
            what = f"the function returned {result['codes'][0]!r}; 0 or 75 is expected."
            self.exercise.require(None not in codes and {*codes} <= {0, 75}, "code", what)
            self._steps(result)
        self._states(results)
        counts = [result["counts"][0] for result in results]
        what = f"the ranks did {', '.join(map(str, counts))} steps."
        self.exercise.require(len({*counts}) == 1, "alone", what)
        self.done += counts[0]
        codes = [result["codes"][0] for result in results]
        finished = self.done == _STEPS
        if told:
            first = min(told.values())
            what = f"the ranks stopped after step {self.done - 1}, and none was told before step {first}."
            self.exercise.require(finished or self.done > first, "stops", what)
            due = max(told.values()) + 2  # the step in which it is told is finished, and perhaps one more
            what = f"a rank was told to stop in step {max(told.values())}, and step {self.done - 1} was still done."
            self.exercise.require(self.done <= due, "ignored" if finished else "too-late", what)
        what = f"the ranks returned {', '.join(map(str, codes))}; steps 0 to {self.done - 1} of {_STEPS} are done."
        self.exercise.require(len({*codes}) == 1, "codes-differ", what)
        key = "done-is-0" if finished else "zero" if told else "stops"
        self.exercise.require(codes[0] == (0 if finished else 75), key, what)
        for rank, result in self.exercise.each(results):
            again = result["counts"][-1] - result["counts"][0]
            what = f"all steps are done; called again, the function does {again} more."
            self.exercise.require(again == 0 and result["codes"][-1] == codes[0], "done-again", what, rank)

    def _steps(self, result: dict[str, Any]) -> None:
        """The steps of a rank's first call: the next ones of the run, each once."""
        calls = result["calls"][: result["counts"][0]]
        steps = [step for step, _ in calls]
        expected = list(range(self.done, self.done + len(steps)))
        if steps != expected:
            began = steps[0] if steps else self.done
            what = f"steps 0 to {self.done - 1} were done before. Now it did steps {', '.join(map(str, steps))}."
            first = self.done == 0
            key = "steps" if first else "from-start" if began == 0 else "again" if began < self.done else "skipped"
            self.exercise.refuse(key, what)
        what = f"steps 0 to {self.done - 1} of {_STEPS} were done before, and no step was done now."
        self.exercise.require(bool(steps) or self.done == _STEPS, "steps", what)

    def _states(self, results: list[dict[str, Any]]) -> None:
        """The states of the first call, step by step: each rank has to begin with its own."""
        calls = sorted((step, r, state) for r, result in enumerate(results)
                       for step, state in dict(result["calls"][: result["counts"][0]]).items())
        for step, rank, state in calls:
            right = self.states[step]
            if state.shape == right[rank].shape and torch.equal(state, right[rank]):
                continue
            others = any(state.shape == other.shape and torch.equal(state, other) for other in right)
            initial = step == self.done > 0 and torch.equal(state, self.first[rank])
            key = "same-file" if others else "state-lost" if initial else "state"
            what = f"step {step} began with a state that is not this rank's after step {step - 1}."
            self.exercise.differs(key, what, right[rank].tolist(), state.tolist(), rank)

    def _explain(self, failed: CheckFailed, told: dict[int, int]) -> None:
        """Refuse with a hint that tells more, from what the ranks have written down."""
        if failed.hint == "empty":
            return
        _, _, evidence = str(failed).partition("Hint: ")
        evidence = evidence.partition("\n\n")[2]
        notes = []
        for rank in range(self.ranks):
            path = self.folder.parent / f"notes-{rank}"
            notes.append([json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [])
        last = [own[-1]["step"] if own else None for own in notes]
        broken = [rank for rank, own in enumerate(notes) if own and not own[-1]["ended"]]
        what = f"the last steps that ranks began are {', '.join(map(str, last))}"
        if any(told.get(rank) == last[rank] for rank in broken) and failed.rank in (*told, None):
            rank = next(rank for rank in broken if told.get(rank) == last[rank])
            killed = "killed by signal SIGTERM" in str(failed)
            what = f"it was told to stop in step {last[rank]}, and ended before the step was done."
            self.exercise.refuse("no-handler" if killed else "at-once", f"{what}\n\n{evidence}", rank)
        if failed.hint == "hang" and told:
            self.exercise.refuse("alone", f"{what}, and some ranks wait for others.\n\n{evidence}")


@checked
def train(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(folder, steps, state, do_step) -> 0 or 75``: told to stop, all ranks stop and lose no step."""
    exercise = Exercise("Exercise 4", HINTS["train"], timeout)
    for ranks in (2, 3):
        with tempfile.TemporaryDirectory(prefix="run-") as folder:
            loop = _Loop(exercise, fn, ranks, Path(folder))
            if ranks == 2:
                loop.call({1: 1}, "rank 1 is told to stop in step 1")
                loop.call({0: 3}, "it goes on, and rank 0 is told to stop in step 3")
                loop.call({}, "it goes on, and nobody stops it", times=2)
            else:
                loop.call({0: 2, 2: 2}, "ranks 0 and 2 are told to stop in step 2")
                loop.call({0: 5, 1: 5, 2: 5}, "it goes on, and all ranks are told to stop in the last step")
    exercise.passed("all ranks stop after the same step, and go on with the next one.")


# ------------------------------------------------------------------------------------------------ the job script

_PROGRAM = "python -u train.py --out run"


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster | None]:
    """A cluster of two hosts; None where Slurm cannot run."""
    cluster = None
    with contextlib.suppress(RuntimeError):  # as in a container without namespaces
        cluster = None if missing() else SlurmCluster(hosts=2)
    with cluster or contextlib.nullcontext():
        yield cluster


@checked
def job_script(fn: Callable, cluster: SlurmCluster | None = None) -> None:
    """Check ``fn(program) -> str``: a job script that stops, is requeued and goes on; ``cluster`` is one that runs."""
    exercise = Exercise("Exercise 4", HINTS["job_script"])
    script = exercise.call(fn, _PROGRAM)
    exercise.require(isinstance(script, str), "form", f"the function returned {type(script).__name__}, not a text.")
    options = _read(exercise, script)
    _undisturbed(exercise, with_stand_ins(script, _PROGRAM, "done", options))
    _told(exercise, with_stand_ins(script, _PROGRAM, "told", options), options)
    _fails(exercise, with_stand_ins(script, _PROGRAM, "fails", options))
    exercise.case = ""
    with contextlib.nullcontext(cluster) if cluster else slurm_cluster() as real:
        if real is None:
            print("Exercise 4 passed with stand-ins for Slurm's commands: stopped and requeued. Slurm did not run.")
            return
        exercise.case = "a Slurm job on two hosts"
        try:
            job = on_a_cluster(real, script, _PROGRAM, options)
        except RuntimeError as error:
            exercise.refuse("slurm", f"Slurm refuses it.\n\n{error}")
        _as_a_job(exercise, job)
    steps = f"stopped after step {STOP - 1}, requeued, steps 0 to {STEPS - 1} once each"
    print(f"Exercise 4 passed as a Slurm job on {len(HOSTS)} hosts: {steps}.")


def _read(exercise: Exercise, script: str) -> Directives:
    """What the directives say; refuses what a job cannot survive with."""
    exercise.case = "reading the script"
    first = script.split("\n", 1)[0]
    exercise.require(bool(re.match(r"#! ?/\S*bash|#! ?/usr/bin/env bash", first)), "form", f"it begins with {first!r}.")
    exercise.require(_PROGRAM in script, "form", f"{_PROGRAM!r}, the program that was given, is not in the script.")
    said = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    exercise.require(said.returncode == 0, "syntax", f"bash cannot read it.\n\n{said.stderr.strip()}")
    options = directives(script)
    for line in options.late:
        exercise.refuse("late", f"{line!r} stands behind the first command.")
    asked = options.options
    again = "requeue" in asked and "no-requeue" not in asked
    exercise.require(again, "requeue", "the job does not ask to be requeued.")
    mode = asked.get("open-mode", "")
    what = f"the log's open mode is {mode or 'not said'}."
    exercise.require(mode in ("append", "a"), "open-mode", what)
    exercise.require("time" in asked, "time", "there is no time limit.")
    try:
        told, shape = options.signal, options.tasks
        known = told is not None and hasattr(signal, f"SIG{told[0]}")
    except ValueError:
        known, told, shape = False, None, (0, 0)
    exercise.require(known, "signal", f"the signal before the time limit is {asked.get('signal') or 'not said'}.")
    what = f"the signal comes {options.notice} seconds before the time is up."
    exercise.require(60 <= options.notice <= 120, "notice", what)
    what = f"{shape[0]} hosts with {shape[1]} tasks each are asked for; {len(HOSTS)} with {TASKS} are expected."
    exercise.require(shape == (len(HOSTS), TASKS), "tasks", what)
    return options


def _undisturbed(exercise: Exercise, run: Run) -> None:
    exercise.case = "all steps are done"
    said = f"\n\n{run.said.strip()[-1500:]}"
    exercise.require(run.code is not None, "endless-script", f"the script does not come to an end.{said}")
    exercise.require(bool(run.ranks), "not-started", f"the program never ran; the script ended with {run.code}.{said}")
    count = len(HOSTS) * TASKS
    what = f"the program ran {len(run.ranks)} times; {count} ranks are expected.{said}"
    exercise.require(len(run.ranks) == count, "srun", what)
    table = {"RANK": range(count), "LOCAL_RANK": [r % TASKS for r in range(count)], "WORLD_SIZE": [count] * count}
    for name, values in table.items():
        got, right = [env.get(name, "unset") for env in run.ranks], [str(value) for value in values]
        if got != right:
            key = "rank" if name == "RANK" else "local-rank" if name == "LOCAL_RANK" else "world-size"
            exercise.differs(key, f"{name} is wrong.", ", ".join(right), ", ".join(got))
    got = [env.get("MASTER_ADDR", "unset") for env in run.ranks]
    if not {*got} <= {HOSTS[0], "10.0.0.3"} or len({*got}) > 1:
        typed = any(re.match(r"node\d|localhost|127\.", each) for each in got)
        key = "typed" if typed else "empty" if {*got} <= {"", "unset"} else "master"
        exercise.differs(key, "MASTER_ADDR is wrong.", ", ".join([HOSTS[0]] * count), ", ".join(got))
    ports = {env.get("MASTER_PORT", "unset") for env in run.ranks}
    one = len(ports) == 1 and all(port.isdigit() and 1024 <= int(port) < 65536 for port in ports)
    exercise.require(one, "port", f"MASTER_PORT is {', '.join(sorted(ports))}.")
    what = f"the job was requeued although all steps are done.{said}"
    exercise.require(not run.requeued, "requeued-done", what)
    exercise.require(run.code == 0, "script-code", f"the program returned 0, and the script {run.code}.{said}")


def _told(exercise: Exercise, run: Run, options: Directives) -> None:
    name, batch = options.signal or ("", False)
    exercise.case = f"{'the batch shell gets' if batch else 'the ranks get'} SIG{name} before the time is up"
    said = f"\n\n{run.said.strip()[-1500:]}"
    if run.code is None or run.code < 0:
        what = "the script ends" if run.code else "the script goes on"
        exercise.refuse("batch-only" if batch else "signal", f"{what}, and no rank was told to stop.{said}")
    if not batch and name != "TERM":
        exercise.refuse("signal", f"SIG{name} ended the ranks, which save on SIGTERM.{said}")
    exercise.require(bool(run.requeued), "not-requeued", f"the program returned 75, the script {run.code}.{said}")
    what = f"asked for were {', '.join(map(repr, run.requeued))}; the job's number is {JOB}.{said}"
    exercise.require(run.requeued == [JOB], "requeue-what", what)


def _fails(exercise: Exercise, run: Run) -> None:
    exercise.case = "a rank fails with exit code 1"
    said = f"\n\n{run.said.strip()[-1500:]}"
    exercise.require(not run.requeued, "requeue-always", f"the job was requeued.{said}")
    exercise.require(run.code not in (0, None), "script-code", f"a rank returned 1, and the script {run.code}.{said}")


def _as_a_job(exercise: Exercise, job: Job) -> None:
    said = f"\n\n{job.log.strip()[-1500:]}"
    what = f"the job is {job.state} after {job.restarts} restarts, with steps {', '.join(map(str, job.steps))}.{said}"
    exercise.require(job.state == "COMPLETED" and job.restarts == 1, "slurm", what)
    exercise.require(job.steps == list(range(STEPS)) and job.values == undisturbed(), "slurm", what)
    exercise.require(job.log.count("run begins at step") == 2, "slurm", f"the log does not tell of both runs.{said}")
