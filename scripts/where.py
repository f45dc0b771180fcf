"""Say who waits for whom in a training job that hangs, by stacks and flight records; say "moving" if it does not.

    python where.py                   # all ranks of yours on this host, under torchrun, srun or started by hand
    python where.py --torchrun NAME   # those of the torchrun whose command line matches a regular expression
    python where.py PID …             # of these processes: ranks, or what has started them
    python where.py --records FOLDER  # of a job that is dead: what it has dumped, by default into ~/.cache/torch

Several hosts, under Slurm (job J on N nodes) or Kubernetes (the pods of one job): collect first, then compare all.

    srun --jobid=J --overlap -N N --ntasks-per-node=1 -o 'where-%N.json' python where.py --json
    for p in $(kubectl get pods -l SELECTOR -o name); do kubectl exec $p -- python where.py --json; done > where-k.json
    python where.py --merge where-*.json

It needs Linux and no root, and ends nothing. It looks three times within --pause seconds. What it can tell depends on
what a program prepares. Best is one line in a rank, before ``init_process_group``, with this file beside the program:
``import where; where.listen("run/flight")``. Then a rank writes the stacks of its threads when it gets SIGUSR1, even
while it waits in C++, and its flight records (its last collectives; gloo and NCCL have one each) when it is asked
through a pipe. Without this file a program gets the same from NCCL, and its stacks, by

    TORCH_NCCL_DEBUG_INFO_PIPE_FILE=FOLDER/pipe_  TORCH_FR_DUMP_TEMP_FILE=FOLDER/rank_
    faulthandler.register(signal.SIGUSR1, file=open(f"{folder}/stack_{rank}", "w"))

If a program has prepared nothing, py-spy reads the stacks where it is installed and may (root, CAP_SYS_PTRACE, or your
own processes if kernel.yama.ptrace_scope is 0). Else /proc still tells which rank is gone, stopped or computing. Under
NCCL, Python stands in the first line that needs a result, on all ranks alike: records tell, stacks say little.

PyTorch 2.13 has a debug server: ``torch.distributed.debug.start_debug_server()`` on all ranks shows stacks, records and
profiles of all hosts in a browser (port 25999 of rank 0), without a shell on each host. It needs jinja2, aiohttp and
tabulate, and has no protection: whoever reaches the port can use it. It names no culprit.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import linecache
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

PATIENCE = 15.0  # seconds that a rank has to answer; NCCL's monitor looks at its pipe now and then
SAMPLES = 10  # in a look, of whether a rank computes
LIBRARIES = ("-packages" + os.sep, f"{os.sep}lib{os.sep}python3", "<frozen")
DUMPS = "~/.cache/torch/comm_lib_trace_rank_"  # where NCCL's watchdog writes by default
AGENT = r"torchrun|torch\.distributed\.(run|launch)"
WAITS = r"\.(wait|synchronize|backward)\("
NEEDS_GPU = r"\.(item|tolist|numpy|nonzero|cpu|cuda|to|(?:_cuda_)?synchronize)\("  # a rank that waits in it may spin


def listen(folder: str) -> None:
    """In a rank, before `init_process_group`: be ready to say where it stands, in files of this folder."""
    rank, folder = os.environ.get("RANK") or os.environ["SLURM_PROCID"], os.path.abspath(folder)
    os.makedirs(folder, exist_ok=True)
    for name, value in (("FR_BUFFER_SIZE", "2000"), ("FR_DUMP_TEMP_FILE", f"{folder}/rank_"),
                        ("NCCL_DEBUG_INFO_PIPE_FILE", f"{folder}/pipe_"), ("NCCL_DUMP_ON_TIMEOUT", "1")):
        os.environ.setdefault(f"TORCH_{name}", value)
    faulthandler.register(signal.SIGUSR1, file=open(f"{folder}/stack_{rank}", "w"))
    pipe = Path(folder, f"ask_{rank}")
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)

    def answer() -> None:
        while True:
            pipe.read_bytes()  # waits until somebody asks
            import torch
            c10d = torch.distributed.distributed_c10d
            for kind, name in (("nccl", "_dump_nccl_trace"), ("cpu", "_dump_fr_trace")):
                with contextlib.suppress(AttributeError, RuntimeError):  # PyTorch without NCCL; groups being made
                    record = pickle.loads(getattr(torch._C._distributed_c10d, name)(includeStackTraces=False))
                    if kind == "cpu":  # gloo leaves the groups empty
                        record["made"], record["pg_config"] = c10d._world.group_count, {
                            name: {"ranks": str([*c10d._world.pg_group_ranks.get(group, ())])}
                            for group, name in [*c10d._world.pg_names.items()]}
                    new = Path(folder, f"{kind}_{rank}.new")
                    new.write_bytes(pickle.dumps(record))
                    new.rename(new.with_suffix(""))  # it is complete as soon as it is there

    threading.Thread(target=answer, daemon=True, name="where").start()


class Frame(NamedTuple):
    file: str
    line: int
    function: str
    text: str = ""

    @property
    def own(self) -> bool:
        """Whether it is a line of the program."""
        return not any(part in self.file for part in LIBRARIES)


@dataclass
class Rank:
    """What is known of a rank. ``state``: gone, stopped, computes or waits; ``unknown`` of a job that is dead."""

    number: int
    pid: int | None
    state: str = "gone"
    threads: list[list[Frame]] = field(default_factory=list)  # their stacks, innermost frame first; main comes first
    entries: list[dict] = field(default_factory=list)  # its last collectives
    groups: dict[str, list[int]] = field(default_factory=dict)  # ranks of the process groups, by name
    made: int = 0  # process groups that it has made
    called: int = 0  # collectives and messages so far
    missing: list[str] = field(default_factory=list)
    host: str = socket.gethostname()
    calls: int = 0  # made between the looks
    was: str = ""  # where it stood at an earlier look, if it has moved since

    @property
    def stack(self) -> list[Frame]:
        """Of the thread that stands in torch.distributed, or for which the main thread waits."""
        main, *others = self.threads or [[]]
        if told := [stack for stack in self.threads if distributed(stack)]:
            return told[0]
        waits = main and main[0].file.endswith("threading.py")
        return next((stack for stack in others if waits and any(f.own for f in stack)), main)

    @property
    def line(self) -> Frame | None:
        """The innermost frame of the program itself."""
        return next((frame for frame in self.stack if frame.own), None)

    @property
    def call(self) -> str:
        """In what it waits for others: a function of torch.distributed, or one that needs a result of the GPU."""
        event = self.stack and self.stack[0].file.endswith("threading.py")  # which waits for a thread, not for a rank
        line = self.line.text if self.line and self.state == "waits" and not event else ""
        names = re.findall(WAITS, line) or [name for f in self.stack[:1] for name in re.findall(NEEDS_GPU, f.text)]
        return (distributed(self.stack)[-1:] or names or [""])[0]

    @property
    def pending(self) -> dict | None:
        """The oldest collective that is not over."""
        return next((entry for entry in self.entries if not entry["retired"]), None)

    def at(self) -> str:
        frame = self.line or Frame("", 0, "")
        where = f"{os.path.basename(frame.file)}:{frame.line} in {frame.function}: {frame.text}".rstrip(": ")
        return where + " (another thread than the main one)" * (self.stack is not (self.threads or [[]])[0] != [])

    def doing(self) -> str:
        verb = f"stands in {self.call}" if self.call else self.state
        verb = {"gone": "has ended", "stopped": "is stopped (SIGCONT lets it go on)",
                "unknown": "called its last collective"}.get(self.state, verb)
        return f"{verb} at {self.at()}" if self.line else verb


def distributed(stack: list[Frame]) -> list[str]:
    """The functions of torch.distributed that the program has called in this stack, innermost first."""
    own = next((n for n, frame in enumerate(stack) if frame.own), len(stack))
    return [f.function for f in stack[:own] if f.file.endswith(("distributed_c10d.py", "_functional_collectives.py"))
            and not f.function.startswith(("get_", "is_"))]


# --- what a process tells


def read(pid: int | None, name: str) -> str:
    try:
        return Path("/proc", str(pid), name).read_text(errors="replace")
    except OSError:
        return ""


def environment(pid: int | None) -> dict[str, str]:
    """The variables of a process, as it was started; those of Slurm's tasks under torchrun's names too."""
    found = dict(re.findall(r"(?:^|\0)(\w+)=([^\0]*)", read(pid, "environ")))
    if "SLURM_STEP_ID" in found:  # srun's, and not the batch script itself
        found = {"RANK": found.get("SLURM_PROCID", ""), "WORLD_SIZE": found.get("SLURM_STEP_NUM_TASKS", "")} | found
    return found


def status(pid: int) -> tuple[str, int]:
    """State (R: it runs or could, S: it waits, T: stopped, Z: gone) and parent of a process."""
    fields = read(pid, "stat").rpartition(")")[2].split() or ["Z", "0"]
    return fields[0].upper(), int(fields[1])


def find(pids: list[int], pattern: str) -> list[Rank]:
    """The ranks among these processes and below them; without any, all on this host, or those of a torchrun."""
    os.path.exists("/proc/self") or sys.exit("ranks are found on Linux only, in /proc; --merge and --records need none")
    commands = {int(n): read(int(n), "cmdline").replace("\0", " ") for n in os.listdir("/proc") if n.isdigit()}
    parents = {pid: status(pid)[1] for pid in commands}
    agents = [pid for pid, text in commands.items() if re.search(AGENT, text)]
    starters = set()  # this program, agents and what has started them: no ranks, although some have a variable RANK
    for pid in [os.getpid(), *agents]:
        while pid in parents and pid not in starters:
            starters.add(pid)
            pid = parents[pid]
    if not pids:
        chosen = [pid for pid in agents if re.search(pattern, commands[pid])]
        pids = chosen if pattern else [pid for pid, parent in parents.items() if parent not in parents]
    found, seen, job, asked = {}, {}, os.environ.get("SLURM_JOB_ID"), pids
    while pids:
        pid, *pids = pids
        names = environment(pid)
        number = names.get("RANK", "")
        python = os.path.exists(f"/proc/{pid}/exe") and "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
        if pid in starters or not number.isdigit() or not python:
            pids += [child for child, parent in parents.items() if parent == pid and child != os.getpid()]
        elif job in (None, names.get("SLURM_JOB_ID")):
            seen = names
            if found.setdefault(int(number), pid) != pid:
                raise SystemExit(f"{found[int(number)]} and {pid} are both rank {number}: give one job by its PID")
    if not found:
        raise SystemExit("no rank found: no Python process of yours has RANK, which torchrun sets, or srun's variables")
    local, size = sorted(found), {name: int(value) for name, value in seen.items() if value.isdigit()}
    if {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= size.keys() and not {*asked} <= {*found.values()}:
        first = size["RANK"] - size["LOCAL_RANK"]
        local = range(first, first + size["LOCAL_WORLD_SIZE"])  # also those that have ended
    if (more := size.get("WORLD_SIZE", 0) - len(local)) > 0:
        print(f"{more} more ranks are on other hosts: run this there too, and --merge (see --help)", file=sys.stderr)
    return [Rank(number, found.get(number)) for number in local]


def wait_for(something, pid: int):
    """What ``something()`` returns as soon as that is true, or its last answer; for a process that has gone at once."""
    end = time.monotonic() + PATIENCE
    while not (answer := something()) and time.monotonic() < end and status(pid)[0] not in "ZX":
        time.sleep(0.05)
    return answer


def ask_for_stacks(rank: Rank, file: str) -> None:
    caught = int((re.findall(r"SigCgt:\s*(\w+)", read(rank.pid, "status")) or ["0"])[0], 16)
    if file and caught >> (signal.SIGUSR1 - 1) & 1:  # else the signal would end it
        sizes = [os.path.getsize(file)]
        os.kill(rank.pid, signal.SIGUSR1)

        def complete() -> bool:  # as soon as nothing has been added for a moment
            sizes.append(os.path.getsize(file))
            return sizes[0] < sizes[-1] and len(sizes) > 3 and len({*sizes[-3:]}) == 1

        if not wait_for(complete, rank.pid):
            rank.missing.append(f"no stack: the rank did not answer SIGUSR1 within {PATIENCE:g} s")
        with open(file, errors="replace") as dump:
            dump.seek(sizes[0])
            said = re.split(r"^.*\(most recent call first\):$", dump.read(), flags=re.MULTILINE)[:0:-1]  # main was last
        stacks = [re.findall(r'File "(.*?)", line (\d+) in (.+)', text) for text in said]
    elif spy := shutil.which("py-spy"):
        command = [spy, "dump", "--nonblocking", "--json", "--pid", str(rank.pid)]  # else it would pause the rank
        done = subprocess.run(command, capture_output=True, text=True)
        threads = json.loads(done.stdout) if done.returncode == 0 else []
        threads.sort(key=lambda thread: thread["thread_name"] != "MainThread")
        stacks = [[(f["filename"], f["line"], f["name"]) for f in thread["frames"]] for thread in threads]
        rank.missing += [] if stacks else [f"no stack: py-spy: {done.stderr.strip()}"]
    else:
        rank.missing.append("no stack: the program has not called where.listen, and py-spy is not installed")
        return
    root = f"/proc/{rank.pid}/root"  # as a container sees it
    for stack in stacks:
        frames = [Frame(f, int(line), name, linecache.getline(root + os.path.abspath(f), int(line)).strip())
                  for f, line, name in stack]
        mine = any(os.path.basename(f.file) == "where.py" and f.function == "answer" for f in frames)
        if not rank.threads or not mine and (any(f.own for f in frames) or distributed(frames)):
            rank.threads.append(frames)


class Plain(pickle.Unpickler):
    """A record is lists, numbers and text; nothing else is loaded from a file."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"{module}.{name} in a flight record")


def load(file: str) -> dict | None:
    """The record in a file, if it is there and complete: NCCL writes in place."""
    try:
        record = Plain(io.BytesIO(Path(file).read_bytes())).load()
        return record if isinstance(record, dict) and "entries" in record else None
    except (OSError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError, pickle.UnpicklingError):
        return None


def add_record(rank: Rank, record: dict) -> None:
    """Of gloo or NCCL, to what the other has recorded."""
    entries, done = [entry for entry in record["entries"] if not entry["is_p2p"]], {}
    for entry in reversed(entries):  # NCCL's collectives of a group run in order, gloo's need not
        over = entry["retired"] or entry.get("state") == "completed" or done.get(entry["process_group"][0], False)
        entry["retired"] = bool(over)
        done[entry["process_group"][0]] = over and entry["profiling_name"].startswith("nccl")
    names = ("process_group", "collective_seq_id", "profiling_name", "input_sizes", "input_dtypes", "retired")
    rank.entries += [{name: entry[name] for name in names} | {"began": entry.get("time_created_ns") or 0}
                     for entry in entries]
    rank.entries.sort(key=lambda entry: entry["began"])
    rank.called += record["entries"][-1].get("record_id", 0) + 1 if record["entries"] else 0
    rank.made = max(rank.made, record.get("made", 0))
    rank.groups |= {name: json.loads(group["ranks"]) for name, group in record.get("pg_config", {}).items()
                    if group["ranks"] not in ("", "[]")}
    if rank.state == "unknown" and (frames := (rank.pending and next(
            e for e in entries if not e["retired"]) or (entries or [{}])[-1]).get("frames")):
        rank.threads = [[Frame(f["filename"], f["line"], f["name"],
                               linecache.getline(f["filename"], f["line"]).strip()) for f in frames]]


def ask_for_records(rank: Rank, files: list[str], folder: str) -> None:
    """Of gloo and NCCL: from where.listen both, from NCCL itself its own."""
    root, number = f"/proc/{rank.pid}/root", rank.number
    pipe = next((f for f in files if f.endswith(f"_{number}.pipe")), "")
    names = environment(rank.pid)
    usual = DUMPS if "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in names else f"{os.path.dirname(pipe)}/rank_"
    dump = os.path.expanduser(names.get("TORCH_FR_DUMP_TEMP_FILE", usual)).removeprefix(root)
    answers = {f"{folder}/ask_{number}": [f"{folder}/cpu_{number}", f"{folder}/nccl_{number}"],  # written last, first
               pipe: [f"{root}{dump}{number}"]}
    for asked, where in answers.items():
        if rank.groups and any(entry["profiling_name"].startswith("nccl") for entry in rank.entries):
            continue  # NCCL's is there
        stamps = {file: stamp(file) for file in where}
        try:
            with open(os.open(asked, os.O_WRONLY | os.O_NONBLOCK), "wb") as fifo:  # refused if nobody reads
                fifo.write(b"1\n")
        except OSError:
            continue
        wait_for(lambda file=where[0], old=stamps[where[0]]: stamp(file) != old and load(file), rank.pid)
        records = [record for f in where if stamp(f) != stamps[f] and (record := load(f))]
        rank.missing += [] if records else [f"no flight record: the rank did not answer within {PATIENCE:g} s"]
        for record in records:
            add_record(rank, record)
    if not rank.called and not rank.groups and not any("flight record" in reason for reason in rank.missing):
        rank.missing.append("no flight record: where.listen was not called")


def stamp(file: str) -> tuple | None:
    with contextlib.suppress(OSError):
        found = os.stat(file)
        return found.st_ino, found.st_mtime_ns, found.st_size


def look(before: Rank) -> Rank:
    """What can be found out about a rank now."""
    rank = Rank(before.number, before.pid)
    if rank.pid is None:
        return rank
    states = ""
    while len(states) < SAMPLES:
        states += status(rank.pid)[0]
        time.sleep(0.02)
    often = "computes" if states.count("R") > SAMPLES / 2 else "waits"
    rank.state = {"Z": "gone", "X": "gone", "T": "stopped"}.get(states[-1], often)
    if rank.state in ("gone", "stopped"):
        return rank
    files = []
    try:
        for fd in os.listdir(f"/proc/{rank.pid}/fd"):
            with contextlib.suppress(OSError):  # a file that was closed meanwhile
                files.append(f"/proc/{rank.pid}/root" + os.readlink(f"/proc/{rank.pid}/fd/{fd}"))
        stack = next((f for f in files if os.path.basename(f) == f"stack_{rank.number}"), "")
        ask_for_stacks(rank, stack)
        if any("did not answer within" in reason for reason in before.missing):
            rank.missing = before.missing  # do not wait for it again
        else:
            ask_for_records(rank, files, os.path.dirname(stack))
    except OSError as error:
        rank.state = "gone" if status(rank.pid)[0] in "ZX" else rank.state
        rank.missing += [f"neither stack nor record: {error}"] if rank.state != "gone" else []
    if rank.call and rank.state == "computes":
        rank.state = "waits"  # it spins
    return rank


def examine(ranks: list[Rank], pause: float) -> list[Rank]:
    """Look at all ranks three times, and note which of them move."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        looks = [[*pool.map(look, ranks)]]
        for _ in range(2):
            time.sleep(pause / 2)
            looks.append([*pool.map(look, looks[-1])])
    for first, middle, last in zip(*looks, strict=True):
        last.calls = max(last.called, middle.called) - first.called if first.called else 0
        seen = [[f for f in rank.stack if f.own or "-packages" in f.file] for rank in (first, middle, last)]
        if all(seen) and not seen[0] == seen[1] == seen[2]:  # a line of the standard library may only wait anew
            last.was = first.at() if seen[0] != seen[2] else middle.at()
        if last.state == "waits" and not last.call and "computes" == first.state == middle.state:
            last.state = "computes"
    return looks[-1]


# --- the verdict


def named(numbers) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"


def place(entry: dict) -> str:
    name, label = entry["process_group"]
    group = "the default group" if label == "default_pg" else f"group {name if label == 'undefined' else label}"
    return f"#{entry['collective_seq_id']} of {group}"


def same(one: dict, other: dict) -> bool:
    """Whether two entries have one place: a group counts for each backend."""
    backends = [entry["profiling_name"].partition(":")[0] for entry in (one, other)]
    return place(one) == place(other) and backends[0] == backends[1]


def title(entry: dict) -> str:
    return f"{entry['profiling_name'].rpartition(':')[2]} {place(entry)}"


def disagreement(values: dict[int, str]) -> tuple[set[int], str] | None:
    """The ranks that have another value than most, and who has which; nothing if all have the same."""
    sides: dict[str, list[int]] = {}
    for n, value in values.items():
        sides.setdefault(value, []).append(n)
    odd = min(sides.values(), key=lambda who: (len(who), -who[0]), default=[])
    return ({*odd}, ", ".join(f"{named(who)} {value}" for value, who in sides.items())) if len(sides) > 1 else None


def from_groups(ranks: dict[int, Rank]) -> tuple[set[int], str] | None:
    """Ranks to blame because they make other process groups than the others."""
    differ = None
    for name in sorted({name for rank in ranks.values() for name in rank.groups}):
        differ = differ or disagreement({n: f"{r.groups[name]}" for n, r in ranks.items() if name in r.groups})
    making = [n for n, rank in ranks.items() if "group" in rank.call or "mesh" in rank.call]
    if making and not differ:
        differ = disagreement({n: f"has made {rank.made}" for n, rank in ranks.items() if rank.made and n in making})
    if differ and making:
        where = "; ".join(f"{named([n])} {ranks[n].doing()}" for n in ranks)
        rule = "All ranks must make all groups, in the same order, also those to which they do not belong"
        return differ[0], f"the process groups differ: {differ[1]}. {rule}: {where}."


def from_records(ranks: dict[int, Rank]) -> tuple[set[int], str] | None:
    """Ranks to blame and why, by the numbers of their collectives; nothing if the records do not tell."""
    waiting = {n: rank.pending for n, rank in ranks.items() if rank.pending and rank.state != "gone"}
    behind: dict[int, list[int]] = {}  # who waits for each
    elsewhere: set[int] = set()
    for number, entry in waiting.items():
        members = ranks[number].groups.get(entry["process_group"][0], ranks)
        calls = {n: next((e for e in ranks[n].entries if same(e, entry)), None) for n in members if n in ranks}
        elsewhere |= {n for n in members if n not in ranks}
        sizes = [] if re.search(":_?(all_?to_?all|gather|scatter)", entry["profiling_name"]) else ["input_sizes"]
        for what in ("profiling_name", "input_dtypes", *sizes):
            values = {n: str(call[what]).rpartition(":")[2] for n, call in calls.items() if call}
            if differ := disagreement(values):
                where = "; ".join(f"{named([n])} {ranks[n].doing()}" for n in sorted(calls))
                return differ[0], f"collective {place(entry)} differs: {differ[1]}. {where}."
        for n, call in calls.items():
            if call is None and (ranks[n].entries or ranks[n].state == "gone" or ranks[n].groups):
                behind.setdefault(n, []).append(number)
    if free := [n for n in behind if n not in waiting]:
        why = "; ".join(f"{named([n])} {ranks[n].doing()}" for n in free)
        who, entry = behind[free[0]], waiting[behind[free[0]][0]]
        return {*free}, f"{named(who)} called {title(entry)}, {named(free)} did not: {why}."
    if behind:
        text = "; ".join(f"{named([n])} waits in {title(entry)}" for n, entry in waiting.items())
        odd = min(behind, key=lambda n: (text.count(title(waiting[n])), -n))
        return {odd}, f"the ranks wait for each other, so the order of their calls differs: {text}."
    entry = next(iter(waiting.values()), None)
    if elsewhere:
        return set(), f"{named(waiting)} called {title(entry)}, and so must {named(elsewhere)}, not looked at yet."
    if over := {n for n in ranks if n not in waiting and entry and any(same(e, entry) for e in ranks[n].entries)}:
        text = f"{title(entry)}, which is over on {named(over)} and not on {named(waiting)}"
        return set(), f"all ranks have called {text}: compare what no record holds, the root and the reduction."


def from_stacks(ranks: dict[int, Rank]) -> tuple[set[int], str]:
    """The same by where the ranks stand."""
    gone = {n for n, rank in ranks.items() if rank.state in ("gone", "stopped")}
    apart = {n for n in ranks.keys() - gone if not ranks[n].call and (ranks[n].stack or ranks[n].state == "computes")}
    places: dict[tuple, set[int]] = {}
    for n, rank in ranks.items():
        places.setdefault((rank.call, rank.line) if rank.stack else (), set()).add(n)
    few = min(places.values(), key=lambda who: (len(who), -min(who))) if () not in places else set()
    said = [f"{named([n])} {rank.doing()}" for n, rank in ranks.items()]
    if {rank.call for rank in ranks.values()} <= {"recv", "send"}:
        return {*ranks}, f"all of them wait for a message of another, in a circle: {'; '.join(said)}."
    odd = next((some for some in (gone, apart) if some and len(some) < len(ranks)), set())
    if not odd and not apart and 0 < len(few) < len(ranks):
        odd = few if [len(who) for who in places.values()].count(len(few)) == 1 else {*ranks}
    said = [f"{named([n])} {ranks[n].doing()}" for n in sorted(ranks, key=lambda n: (n not in odd, n))]
    if odd:
        return odd, "; ".join(said) + "."
    if all(n in apart for n in ranks):
        return odd, f"no rank waits for another: {'; '.join(said)}."
    return odd, f"nothing can be told: {said[0]}, and so do all. Flight records could tell more (see --help)."


def verdict(ranks: dict[int, Rank]) -> str:
    odd, why = from_groups(ranks) or from_records(ranks) or from_stacks(ranks)
    if calls := {n: rank.calls for n, rank in ranks.items() if rank.calls > 0}:
        return f"moving: {named(calls)} called {min(calls.values())} or more collectives between the looks."
    moved = {n for n, rank in ranks.items() if rank.was}
    goes = "; ".join(f"{named([n])} was at {ranks[n].was}, is at {ranks[n].at()}" for n in sorted(moved))
    if moved and not any(rank.entries for rank in ranks.values()):
        return f"moving: {goes}."
    if odd & moved:
        return f"moving: {why} It moves: {goes}. A long computation, or an endless loop: look again later."
    if odd and all(ranks[n].state == "computes" for n in odd):
        why += " If its work is only long, it moves on: look again later."
    return f"look at {named(odd)}: {why}" if odd else why


def report(ranks: list[Rank], stacks: bool = False) -> str:
    """A line for each rank, what is missing, and the verdict."""
    lines, reasons, hosts = [], {}, len({rank.host for rank in ranks}) > 1
    for rank in ranks:
        last = rank.pending or (rank.entries or [None])[-1]
        over = f"  [{title(last)}, {'not over' if rank.pending else 'over'}]" if last else ""
        pid = f"{rank.host} " * hosts + f"pid {rank.pid}  " if rank.pid else ""
        state = rank.state + ", moving" * bool(rank.calls > 0 or rank.was)
        lines.append(f"rank {rank.number}  {pid}{state}  {rank.at() if rank.line else ''}{over}".rstrip())
        for stack in rank.threads if stacks else []:
            lines += [f"        {f.file}:{f.line} in {f.function}" for f in stack] + [""]
        for reason in rank.missing:
            reasons.setdefault(reason, []).append(rank.number)
    lines += [f"missing for {named(who)}: {reason}" for reason, who in reasons.items()]
    return "\n".join([*lines, "", verdict({rank.number: rank for rank in ranks})])


# --- ranks of other hosts, and of a job that is dead


def merged(texts: list[str]) -> list[Rank]:
    """The ranks of several hosts, from what --json has said there."""
    found: dict[int, Rank] = {}
    for line in "\n".join(texts).splitlines():
        for one in json.loads(line) if line.startswith("[") else []:
            rank = Rank(**one | {"threads": [[Frame(*frame) for frame in stack] for stack in one["threads"]]})
            if found.setdefault(rank.number, rank) is not rank:
                raise SystemExit(f"rank {rank.number} is on {found[rank.number].host} and on {rank.host}: one job only")
    return [found[number] for number in sorted(found)]


def recorded(folder: str) -> list[Rank]:
    """The ranks of a job that is dead, from the flight records in a folder."""
    found: dict[int, Rank] = {}
    for file in sorted(Path(folder).expanduser().glob("*_*")):
        if (number := file.name.rpartition("_")[2]).isdigit() and (record := load(str(file))):
            add_record(found.setdefault(int(number), Rank(int(number), None, "unknown")), record)
    return [found[number] for number in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pids", metavar="PID", type=int, nargs="*", help="ranks, or processes that have started them")
    parser.add_argument("--torchrun", metavar="PATTERN", default="", help="which torchrun")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between the first look and the last")
    parser.add_argument("--stacks", action="store_true", help="show whole stacks")
    parser.add_argument("--json", action="store_true", help="what is known of this host's ranks, for --merge")
    parser.add_argument("--merge", metavar="FILE", nargs="*", help="compare what --json has said (default: stdin)")
    parser.add_argument("--records", metavar="FOLDER", nargs="?", const=os.path.dirname(DUMPS), help="of a dead job")
    args = parser.parse_args()
    if args.merge is not None:
        ranks = merged([Path(file).read_text() for file in args.merge] or [sys.stdin.read()])
    elif args.records:
        ranks = recorded(args.records)
    else:
        ranks = examine(find(args.pids, args.torchrun), args.pause)
    if not ranks:
        raise SystemExit("nothing to compare: no rank in what was given")
    print(json.dumps([asdict(rank) for rank in ranks]) if args.json else report(ranks, args.stacks))


if __name__ == "__main__":
    main()
