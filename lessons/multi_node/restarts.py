"""The exercises on stopping and starting again: a training loop and its job script, with the usual mistakes.

The loop runs on ranks that get real signals. The job script runs with stand-ins for Slurm's commands.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from course_utils.check import Exercise, checked, exercise, whole_number
from course_utils.check.program import Done, hints_of

from .batch import HOSTS, JOB, TASKS, Directives, Run, directives, with_stand_ins

MISTAKES: dict[str, dict[str, tuple]] = {}
RIGHT: dict[str, dict[str, Any]] = {}

# --- exercise 4: the training loop

LAST = 6  # steps of a whole run


def step_of(step: int, state: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """What one step makes of a rank's state and the sum of all ranks' states."""
    return state / 2 + total + step


def trajectory(n: int) -> list[list[torch.Tensor]]:
    """The states of all ranks before each step and after the last, of a run that nobody disturbs."""
    states = [[torch.tensor([1.0 + rank, 0.5 * rank], dtype=torch.float64) for rank in range(n)]]
    for step in range(LAST):
        states.append([step_of(step, state, sum(states[-1])) for state in states[-1]])
    return states


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of all ranks, which is gone afterwards."""
    names = [tempfile.mkdtemp(prefix="run-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
    except Done:
        dist.barrier()  # others may still read what is there
        raise
    finally:
        shutil.rmtree(names[0], ignore_errors=True)


@exercise("Exercise 4", passed="all ranks stop after the same step, and go on with the next one.", explained={
    "killed by signal SIGTERM": "no-handler", "SystemExit|KeyboardInterrupt": "no-handler",
}, cases=[
    (2, "rank 1 is told to stop in step 1, later rank 0 in step 3", {1: 1}, {0: 3}, {}, {}),
    (3, "ranks 0 and 2 are told to stop in step 2, later all in the last step", {0: 2, 2: 2}, {0: 5, 1: 5, 2: 5}, {}),
])
def train(note, answer, *calls):
    """Of each call: which ranks get SIGTERM, and in which step. One more call comes when all is done."""
    packed, done = cloudpickle.dumps(answer), 0
    with shared_folder() as folder:
        for number, told in enumerate(calls, 1):
            loop = cloudpickle.loads(packed)  # a job that starts again has none of the variables of the last one
            done += one_call(note, loop, folder, f"call {number}: ", told, done)


def one_call(note, loop: Callable, folder: Path, call: str, told: dict[int, int], done: int) -> int:
    """Note whether a call does the right steps and returns the right code on all ranks; return how many steps."""
    rank, n, steps = dist.get_rank(), dist.get_world_size(), []
    states = trajectory(n)

    def do_step(step, state):
        due = done + len(steps)
        key = "done-again" if done == LAST else "steps"
        note.holds(step == due, key, f"{call}it does step {step}, and steps 0 to {due - 1} of {LAST} are done.")
        steps.append(step)
        note.equal(state, states[min(due, LAST)][rank], f"{call}the state that step {step} begins with")
        if told.get(rank) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        total = state.clone()
        dist.all_reduce(total)
        return step_of(step, state, total)

    before, codes = signal.getsignal(signal.SIGTERM), [None] * n
    try:
        code = loop(folder, LAST, states[0][rank].clone(), do_step)
    finally:
        signal.signal(signal.SIGTERM, before)
    dist.all_gather_object(codes, whole_number(code))  # which waits: a job starts again when all its ranks have ended
    now, last = done + len(steps), max(told.values(), default=LAST)
    finished, said = now >= LAST, f"{call}steps 0 to {now - 1} of {LAST} are done"
    note.holds(bool(steps) or done == LAST, "steps", f"{said}, and none of them in this call.")
    note.holds({*codes} <= {0, 75}, "code", f"{said}, and the function returned {code!r}; 0 or 75 is expected.")
    note.holds(finished or now > min(told.values(), default=LAST), "ignored", f"{said}, and no rank was told to stop.")
    late = f"{said}, and a rank was told to stop in step {last}."
    note.holds(now <= last + 2, "ignored", late)  # that step, and perhaps one more
    said = f"{said}, and the ranks returned {', '.join(map(str, codes))}."
    note.holds(len({*codes}) == 1, "code", said)
    note.holds(code == (0 if finished else 75), "code", said)
    return len(steps)


HANDLER = "signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))"
AGREE = "stop = torch.tensor(len(told))\n        dist.all_reduce(stop)"
ASKED, CODE = "if stop > 0 or step == steps:", "return 0 if step == steps else 75"
SAVE, LOAD, FILE = "torch.save((step, state), saved)", "step, state = torch.load(saved)", 'f"rank-{dist.get_rank()}.pt"'
STEP = "state = do_step(step, state)\n        step += 1"

MISTAKES["train"] = {
    "same-file": ("All ranks share the folder, and every one has a state of its own: each needs a file of its own.",
            {FILE: '"all.pt"', SAVE: f"if dist.get_rank() == 0:\n    {SAVE}\ndist.barrier()"}),
    "state-lost": ("""The state that a step begins with is the one that the step before returned on the same rank, also
        in a later call. Save the state beside the number of the step.""", [f"{LOAD}  ->  step, _ = torch.load(saved)",
             "state = do_step(step, state)  ->  do_step(step, state)"]),
    "code": ("""All ranks return the same: 0 when all steps are done, also if the signal came in the last one, and 75
        when the loop was told to stop before.""",
            [f"{CODE}  ->  return 75 if told and step < steps else 0", f"{CODE}  ->  return 0"]),
    "steps": ("""Over all calls every step is done once, in order. A later call finds in the folder what was saved and
        goes on with the next step.""", [f"{SAVE}  ->  pass", f"{LOAD}  ->  {LOAD}\nstep += 1"]),
    "no-handler": ("""SIGTERM ended this rank, or its step, and the other ranks wait in it. Every rank needs a handler,
        which should only note that the signal came.""",
            [f"{HANDLER}  ->  if dist.get_rank() == 0:\n    {HANDLER}", "told.append(number))  ->  exit(75))"]),
    "hang": ("Some ranks left the loop and others did not: all ranks decide together, with a collective.",
            f"{ASKED}  ->  if told or step == steps:"),
    "ignored": ("""A signal to any one of the ranks stops all of them, and nothing else does. The step in which it comes
        may be finished, and one more begun.""", "dist.all_reduce(stop)  ->  dist.broadcast(stop, 0)"),
    "done-again": ("""Called when all steps are done, the loop should find that out and do nothing. Save after the last
        step, too, and look at what was saved.""", {ASKED: "if stop > 0 and step < steps:"}),
}
RIGHT["train"] = {
    "a gather of flags, and rank 0 saves what it gathers": {
        AGREE: "flags = [None] * dist.get_world_size()\ndist.all_gather_object(flags, bool(told))\n"
               "stop = sum(flags)",
        FILE: '"all.pt"', LOAD: "step, states = torch.load(saved)\nstate = states[dist.get_rank()]",
        SAVE: "states = [torch.empty_like(state) for _ in flags]\ndist.all_gather(states, state)\n"
              "if dist.get_rank() == 0:\n    torch.save((step, states), saved)\ndist.barrier()",
    },
    "the ranks agree before a step": {f"{STEP}\n        {AGREE}": f"{AGREE}\n{STEP}".replace("        ", "")},
}

# --- exercise 4: the job script

PROGRAM = "python -u train.py --out run"


@checked
def job_script(fn: Callable) -> None:
    """Check ``fn(program) -> str``: a job script that stops, is requeued and goes on."""
    run = Exercise("Exercise 4", hints_of(MISTAKES["job_script"]))
    script = run.call(fn, PROGRAM)
    run.require(isinstance(script, str), "form", f"the function returned {type(script).__name__}, not a text.")
    options = read(run, script)
    all_done(run, with_stand_ins(script, PROGRAM, "done", options))
    told_to_stop(run, with_stand_ins(script, PROGRAM, "told", options), options)
    failed = with_stand_ins(script, PROGRAM, "fails", options)
    run.case = "a rank fails with exit code 1"
    run.require(not failed.requeued, "requeued-done", f"the job was requeued.{said(failed)}")
    what = f"a rank returned 1, and the script {failed.code}.{said(failed)}"
    run.require(failed.code not in (0, None), "requeued-done", what)
    run.passed("with stand-ins for Slurm's commands: stopped, requeued, and ended with the code of the program.")


def read(run: Exercise, script: str) -> Directives:
    """What the directives say; refuses what a job cannot survive with."""
    run.case = "reading the script"
    first = script.split("\n", 1)[0]
    run.require(bool(re.match(r"#! ?/\S*bash|#! ?/usr/bin/env bash", first)), "form", f"it begins with {first!r}.")
    run.require(PROGRAM in script, "form", f"{PROGRAM!r}, the program that was given, is not in the script.")
    bash = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    run.require(bash.returncode == 0, "form", f"bash cannot read it.\n\n{bash.stderr.strip()}")
    found = directives(script)
    for line in found.late:
        run.refuse("form", f"{line!r} stands behind the first command.")
    asked = found.options
    again = "requeue" in asked and "no-requeue" not in asked
    run.require(again, "requeue", "the job does not ask to be requeued.")
    mode = asked.get("open-mode", "not said")
    run.require(mode in ("append", "a"), "requeue", f"the log's open mode is {mode}.")
    run.require("time" in asked, "requeue", "there is no time limit.")
    try:
        known, shape = found.signal is not None and hasattr(signal, f"SIG{found.signal[0]}"), found.tasks
    except ValueError:
        known, shape = False, (0, 0)
    run.require(known, "signal", f"the signal before the time limit is {asked.get('signal', 'not said')}.")
    what = f"the signal comes {found.notice} seconds before the time is up."
    run.require(60 <= found.notice <= 120, "signal", what)
    what = f"{shape[0]} hosts with {shape[1]} tasks each are asked for; {len(HOSTS)} with {TASKS} are expected."
    run.require(shape == (len(HOSTS), TASKS), "srun", what)
    return found


def said(script: Run) -> str:
    return f"\n\n{script.said.strip()[-1500:]}"


def all_done(run: Exercise, script: Run) -> None:
    run.case = "all steps are done"
    run.require(script.code is not None, "requeued-done", f"the script does not come to an end.{said(script)}")
    what = f"the program never ran; the script ended with {script.code}.{said(script)}"
    run.require(bool(script.ranks), "srun", what)
    count = len(HOSTS) * TASKS
    what = f"the program ran {len(script.ranks)} times; {count} ranks are expected.{said(script)}"
    run.require(len(script.ranks) == count, "srun", what)

    def of_ranks(name: str) -> list[str]:
        return [environment.get(name, "unset") for environment in script.ranks]

    table = {"RANK": range(count), "LOCAL_RANK": [r % TASKS for r in range(count)], "WORLD_SIZE": [count] * count}
    for name, numbers in table.items():
        got, right = of_ranks(name), [str(number) for number in numbers]
        if got != right:
            run.differs("rank", f"{name} is wrong.", ", ".join(right), ", ".join(got))
    got = of_ranks("MASTER_ADDR")
    if not {*got} <= {HOSTS[0], "10.0.0.3"} or len({*got}) > 1:
        run.differs("master", "MASTER_ADDR is wrong.", ", ".join([HOSTS[0]] * count), ", ".join(got))
    ports = {*of_ranks("MASTER_PORT")}
    one = len(ports) == 1 and all(port.isdigit() and 1024 <= int(port) < 65536 for port in ports)
    run.require(one, "master", f"MASTER_PORT is {', '.join(sorted(ports))}.")
    run.require(not script.requeued, "requeued-done", f"the job was requeued although all is done.{said(script)}")
    what = f"the program returned 0, and the script {script.code}.{said(script)}"
    run.require(script.code == 0, "requeued-done", what)


def told_to_stop(run: Exercise, script: Run, asked: Directives) -> None:
    name, batch = asked.signal
    run.case = f"{'the batch shell gets' if batch else 'the ranks get'} SIG{name} before the time is up"
    if script.code is None or script.code < 0:
        what = "the script ends" if script.code else "the script goes on"
        run.refuse("signal", f"{what}, and no rank was told to stop.{said(script)}")
    right = batch or name == "TERM"
    run.require(right, "signal", f"SIG{name} ended the ranks, which save on SIGTERM.{said(script)}")
    what = f"the program returned 75, the script {script.code}.{said(script)}"
    run.require(bool(script.requeued), "requeued-done", what)
    what = f"asked for were {', '.join(map(repr, script.requeued))}; the job's number is {JOB}.{said(script)}"
    run.require(script.requeued == [JOB], "requeued-done", what)


MASTER = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
TASK = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec"
REQUEUE, ONLY_75 = 'scontrol requeue "$SLURM_JOB_ID"', "if [ $code = 75 ]"
TRAP = "trap 'scancel --signal=TERM $SLURM_JOB_ID' USR1\nsrun bash"

MISTAKES["job_script"] = {
    "form": ("""Return the text of a bash script: its first line is #!/bin/bash, and the program stands in it as it was
        given. Directives stand before the first command. `bash -n` finds errors.""",
            [f"{ONLY_75}; then  ->  {ONLY_75}", "#!/bin/bash  ->  #!/bin/bash\nset -u"]),
    "requeue": ("""Ask for what a second start needs: --requeue, because some clusters set JobRequeue=0;
        --open-mode=append, or the log of the first run is lost; and --time, without which no signal can come before the
        end.""", [{"#SBATCH --requeue\n": ""}, {"#SBATCH --open-mode=append\n": ""}, {"#SBATCH --time=1:00:00\n": ""}]),
    "signal": ("""The ranks have to get SIGTERM about a minute before the limit, in which they save. Ask for it by
        --signal: the name of the signal, an @, and the seconds. With B: only the batch shell gets it, which then has to
        pass it on (`trap`, and srun in the background).""", [{"#SBATCH --signal=TERM@60\n": ""},
             "TERM@60  ->  TERM@7200", "TERM@60  ->  B:TERM@60"]),
    "srun": ("""One task is one rank: --nodes and --ntasks-per-node say how many there are. The script itself runs once,
        on the first host, and srun starts what follows it once for each task.""",
            ["--ntasks-per-node=2  ->  --ntasks-per-node=4", "srun bash  ->  bash"]),
    "rank": ("""RANK counts the ranks of all hosts: SLURM_PROCID. LOCAL_RANK counts those of one host: SLURM_LOCALID.
        WORLD_SIZE is the number of all: SLURM_NTASKS. In the batch script, outside of srun, the first two are 0.""",
            [{"srun bash -c '": 'srun bash -c "', "{program}'": '{program}"'},
             "LOCAL_RANK=$SLURM_LOCALID  ->  LOCAL_RANK=$SLURM_PROCID"]),
    "master": ("""All ranks need the same MASTER_PORT, from 1024 on, and the same MASTER_ADDR, the host of rank 0: the
        first in SLURM_JOB_NODELIST, in each run another one. A list such as gpu[3,7] is no host, and a variable that is
        not exported does not reach the ranks.""", ["export MASTER_ADDR  ->  MASTER_ADDR",
             {MASTER: "$SLURM_JOB_NODELIST"}, {MASTER: "localhost"}, {TASK: f"MASTER_PORT=$RANDOM {TASK}"}]),
    "requeued-done": ("""Only 75 says that the program was told to stop: keep the code of srun at once, and requeue this
        job, SLURM_JOB_ID, once. The script ends with the code of srun, because Slurm shows it.""",
            ["code=$?  ->  date\ncode=$?", "srun bash  ->  set -e\nsrun bash", {ONLY_75: "if [ $code != 0 ]"}]),
}
RIGHT["job_script"] = {
    "the shell passes the signal on": {
        "TERM@60": "B:USR1@60", "srun bash": TRAP, "{program}'": "{program}' &",
        "code=$?": "step=$!\nwait $step\ncode=$?\nwhile [ $code -gt 128 ]; do\n    wait $step\n    code=$?\ndone",
    },
    "short options, all variables in the task": {
        "#SBATCH --nodes=2 --ntasks-per-node=2": "# who and where\n#SBATCH -N 2 -n 4 # tasks\n#SBATCH -J train",
        "#SBATCH --time=1:00:00": "#SBATCH -t 60", "TERM@60": "SIGTERM@120", "export WORLD_SIZE=$SLURM_NTASKS\n": "",
        MASTER: "$(hostname)", "MASTER_PORT=29500": "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "srun bash -c 'RANK": "srun --wait=60 --kill-on-bad-exit=0 bash -c 'export WORLD_SIZE=$SLURM_NTASKS; RANK",
    },
}
