"""Run a job script with stand-ins for Slurm's commands, on any machine.

The stand-ins are small programs named ``srun``, ``scontrol``, ``scancel`` and ``hostname``, which come first on the
script's PATH. They start the tasks as processes of this machine, with the variables that Slurm sets, and write down
what is asked of them. All rules for signals and exit codes are Slurm's (22.05, as measured in its own cluster here).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HOSTS, ADDRESSES = ("gpu3", "gpu7"), ("10.0.0.3", "10.0.0.7")
JOB, TASKS = "4711", 2  # the job's number, tasks on each host
PATIENCE = 8.0  # seconds in which a script that was told to stop does nothing
LIMIT = 60.0  # seconds by the clock for a script whose tasks are still busy

# ------------------------------------------------------------------------------------------------ directives

_SHORT = {"N": "nodes", "n": "ntasks", "t": "time", "o": "output", "e": "error", "J": "job-name", "D": "chdir"}


@dataclass
class Directives:
    """What the lines ``#SBATCH`` of a script ask for: long names of options to values, ``""`` where there is none."""

    options: dict[str, str]
    late: list[str] = field(default_factory=list)  # lines behind the first command, which Slurm does not read

    @property
    def signal(self) -> tuple[str, bool] | None:
        """Name of the signal without SIG, and whether it goes to the batch shell alone."""
        if not (form := re.fullmatch(r"(?:([RB]+):)?(?:SIG)?(\w+)(?:@\d+)?", self.options.get("signal", ""))):
            return None
        name = signal.Signals(int(form[2])).name[3:] if form[2].isdigit() else form[2]
        return name, "B" in (form[1] or "")

    @property
    def notice(self) -> int:
        """Seconds from the signal to the end of the time limit; 60 where the directive does not say."""
        return int(self.options.get("signal", "").partition("@")[2] or 60)

    @property
    def tasks(self) -> tuple[int, int]:
        """Hosts, and tasks on each; 1 where nothing is said."""
        return shape_of(self.options)


def shape_of(options: dict[str, str], nodes: int = 1, each: int = 1) -> tuple[int, int]:
    """Hosts and tasks on each host that options of sbatch or srun ask for."""
    nodes = int(options.get("nodes", nodes))
    if "ntasks-per-node" in options:
        each = int(options["ntasks-per-node"])
    elif "ntasks" in options:
        each = -(-int(options["ntasks"]) // nodes)
    return nodes, each


def parsed(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options at the beginning of ``words``, as sbatch and srun read them, and the words that follow them."""
    options: dict[str, str] = {}
    while words and words[0].startswith("-") and words[0] != "-":
        word, *words = words
        if word == "--":
            break
        if word.startswith("--"):
            name, equal, value = word[2:].partition("=")
            takes = name in ("nodes", "ntasks", "ntasks-per-node", "time", "signal", "open-mode", "output", "wait")
            if not equal and takes and words:
                value, *words = words
        else:
            name, value = _SHORT.get(word[1], word[1]), word[2:]
            if not value and word[1] in _SHORT and words:
                value, *words = words
        options[name] = value
    return options, words


def directives(script: str) -> Directives:
    """The directives of a job script; Slurm stops to read at the first line that is a command."""
    found, started = Directives({}), False
    for line in script.splitlines()[1:]:
        if re.match(r"#SBATCH\b", line):
            if started:
                found.late.append(line)
            else:
                found.options |= parsed(shlex.split(line[7:], comments=True))[0]
        elif line.strip() and not line.lstrip().startswith("#"):
            started = True
    return found


# ------------------------------------------------------------------------------------------------ stand-ins

# A task of the job: it notes where it believes to be, and ends as the case has it.
_TASK = r"""
import json, os, signal, sys
folder, case = sys.argv[1:]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
task = os.environ.get("STAND_IN_TASK", "0")  # 0 without srun
path = os.path.join(folder, "task-" + task)
with open(path + ".tmp", "w") as file:
    json.dump({"pid": os.getpid(), "environment": dict(os.environ)}, file)
os.rename(path + ".tmp", path)
if case == "told":
    signal.sigwait([signal.SIGTERM])
    raise SystemExit(75)
raise SystemExit(1 if case == "fails" and task == "1" else 0)
"""

_SRUN = r"""
import os, signal, subprocess, sys
sys.path.insert(0, os.environ["STAND_IN_PATH"])
from batch import ADDRESSES, HOSTS, parsed, shape_of
options, command = parsed(sys.argv[1:])
nodes, each = shape_of(options, int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"]))
tasks = []
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
for name in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(name, lambda number, _: [task.send_signal(number) for task in tasks])
for rank in range(nodes * each):
    node = rank // each
    own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % each, "SLURM_NODEID": node, "SLURM_STEP_ID": 0,
           "SLURMD_NODENAME": HOSTS[node % 2], "SLURM_LAUNCH_NODE_IPADDR": ADDRESSES[0], "SLURM_NTASKS": nodes * each,
           "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"], "STAND_IN_TASK": rank}
    tasks.append(subprocess.Popen(command, env={**os.environ, **{name: str(value) for name, value in own.items()}}))
codes = [task.wait() for task in tasks]
raise SystemExit(max(code if code >= 0 else 128 - code for code in codes))
"""

_SCONTROL = r"""
import os, sys
words = sys.argv[1:]
if words[:2] == ["show", "hostnames"]:
    asked = words[2] if len(words) > 2 else os.environ["SLURM_JOB_NODELIST"]
    print("gpu3\ngpu7" if asked == "gpu[3,7]" else asked)
elif words[:1] == ["requeue"]:
    with open(os.path.join(os.environ["STAND_IN_FOLDER"], "requeued"), "a") as file:
        file.write(" ".join(words[1:]) + "\n")
"""

_SCANCEL = r"""
import glob, json, os, signal, sys
words = " ".join(sys.argv[1:]).replace("=", " ").split()
name = words[[word in ("-s", "--signal") for word in words].index(True) + 1].removeprefix("SIG")
for path in glob.glob(os.path.join(os.environ["STAND_IN_FOLDER"], "task-*[0-9]")):
    with open(path) as file:
        os.kill(json.load(file)["pid"], signal.Signals["SIG" + name])
"""

_HOSTNAME = r"""
import os, sys
from socket import gethostname
node = os.environ["SLURMD_NODENAME"]
print({"gpu3": "10.0.0.3", "gpu7": "10.0.0.7"}[node] if {"-i", "-I", "--ip-address"} & {*sys.argv} else node)
"""


@dataclass
class Run:
    """What came of a script that ran with the stand-ins."""

    code: int | None  # None: it did not end
    ranks: list[dict[str, str]]  # the environment of each task
    requeued: list[str]  # what scontrol was asked to requeue
    said: str


def with_stand_ins(script: str, program: str, case: str, options: Directives) -> Run:
    """Run a script, in place of its ``program`` tasks that are ``done`` at once, of which one ``fails``, or that wait
    until they are ``told``."""
    with tempfile.TemporaryDirectory(prefix="job-") as name:
        folder = Path(name)
        for command, text in (("srun", _SRUN), ("scontrol", _SCONTROL), ("scancel", _SCANCEL), ("hostname", _HOSTNAME)):
            _command(folder, command, text)
        (folder / "script").write_text(script.replace(program, f"{_command(folder, 'task', _TASK)} {folder} {case}"))
        with (folder / "log").open("w") as log:
            shell = subprocess.Popen(
                ["bash", folder / "script"], env=_environment(folder, options), cwd=folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )
            try:
                code = _watched(shell, folder, case, options)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
        asked = folder / "requeued"
        tasks = sorted(folder.glob("task-*[0-9]"), key=lambda path: int(path.name[5:]))
        return Run(
            code, [json.loads(path.read_text())["environment"] for path in tasks],
            asked.read_text().split("\n")[:-1] if asked.exists() else [],
            (folder / "log").read_text(errors="replace").replace(name, ""),
        )


def _command(folder: Path, name: str, text: str) -> Path:
    """Make a program of Python a command; its path is safe to stand in a script without quotes."""
    (folder / f"{name}.py").write_text(text)
    (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS {folder}/{name}.py "$@"\n')
    (folder / name).chmod(0o755)
    return folder / name


def _environment(folder: Path, options: Directives) -> dict[str, str]:
    """The variables of a batch script, as Slurm sets them on the first host."""
    nodes, each = options.tasks
    own = {
        "SLURM_JOB_ID": JOB, "SLURM_JOBID": JOB, "SLURM_JOB_NODELIST": f"gpu[{HOSTS[0][3:]},{HOSTS[1][3:]}]",
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": nodes * each, "SLURM_NPROCS": nodes * each,
        "SLURM_NTASKS_PER_NODE": each, "SLURM_TASKS_PER_NODE": f"{each}(x{nodes})", "SLURMD_NODENAME": HOSTS[0],
        "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "STAND_IN_FOLDER": folder,
        "STAND_IN_PATH": Path(__file__).parent, "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}",
    }
    own["SLURM_NODELIST"] = own["SLURM_JOB_NODELIST"]
    theirs = ("SLURM", "SBATCH", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "BASH_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    return kept | {name: str(value) for name, value in own.items()}


def _watched(shell: subprocess.Popen, folder: Path, case: str, options: Directives) -> int | None:
    """Wait for the end of a script; tell it to stop as its directive has it, once all its tasks run."""
    end, told = time.monotonic() + LIMIT, False
    while shell.poll() is None and time.monotonic() < end:
        pids = [json.loads(path.read_text())["pid"] for path in folder.glob("task-*[0-9]")]
        if case == "told" and not told and options.signal and len(pids) == len(HOSTS) * TASKS:
            name, batch = options.signal
            for pid in [shell.pid] if batch else pids:
                os.kill(pid, signal.Signals[f"SIG{name}"])
            end, told = time.monotonic() + PATIENCE, True
        if pids and not any(map(_runs, pids)):
            end = min(end, time.monotonic() + PATIENCE)
        time.sleep(0.01)
    return shell.returncode


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
