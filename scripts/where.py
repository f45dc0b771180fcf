"""Say who waits for whom in a training job that hangs: the stacks and flight records of this host's ranks.

    python where.py                   # the ranks of every torchrun of yours on this host
    python where.py --torchrun NAME   # of those whose command line matches a regular expression
    python where.py PID …             # of these processes: ranks, or what has started them

It needs Linux and no root, and ends nothing. What it can tell depends on what a program prepares. Best is one line in a
rank, before ``init_process_group``, with this file beside the program: ``import where; where.listen("run/flight")``.
Then a rank writes its stack when it gets SIGUSR1, even while it waits in C++, and its flight record (the last
collectives) when it is asked through a pipe. The stack alone costs one line too, which scripts/train.py has:

    faulthandler.register(signal.SIGUSR1, file=open(f"{folder}/stack_{rank}", "w"))

With NCCL, TORCH_NCCL_DEBUG_INFO_PIPE_FILE=FOLDER/pipe_ and TORCH_FR_DUMP_TEMP_FILE=FOLDER/rank_ give the record. If a
program has prepared nothing, py-spy reads the stacks where it is installed and may (root, CAP_SYS_PTRACE, or your own
processes if kernel.yama.ptrace_scope is 0). Else /proc still tells which rank is gone, stopped or computing.
"""

import argparse
import contextlib
import faulthandler
import json
import linecache
import os
import pickle
import re
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

PATIENCE = 15.0  # seconds that a rank has to answer; NCCL's monitor looks at its pipe now and then
LOOKS = 20  # at whether a rank computes
LIBRARIES = ("-packages" + os.sep, f"{os.sep}lib{os.sep}python3", "<frozen")


def listen(folder: str) -> None:
    """In a rank, before `init_process_group`: be ready to say where it stands, in files of this folder."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.makedirs(folder, exist_ok=True)
    stack, pipe, file = (os.path.abspath(f"{folder}/{what}_{os.environ['RANK']}") for what in ("stack", "ask", "rank"))
    faulthandler.register(signal.SIGUSR1, file=open(stack, "w"))
    Path(pipe).unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)

    def answer() -> None:
        while True:
            Path(pipe).read_bytes()  # waits until somebody asks
            import torch.distributed
            record = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=False))
            world = torch.distributed.distributed_c10d._world
            record["pg_config"] = {  # which gloo leaves empty
                name: {"name": name, "desc": group.group_desc, "ranks": str([*world.pg_group_ranks[group]])}
                for group, name in world.pg_names.items()}
            Path(file + ".new").write_bytes(pickle.dumps(record))
            os.replace(file + ".new", file)  # it is complete as soon as it is there

    threading.Thread(target=answer, daemon=True, name="where").start()


@dataclass
class Rank:
    """What is known of a rank. ``state``: gone, stopped, computes or waits; ``entries``: its last collectives."""

    number: int
    pid: int | None
    state: str = "gone"
    stack: list[tuple[str, int, str]] = field(default_factory=list)  # file, line, function; innermost first
    entries: list[dict] = field(default_factory=list)
    groups: dict[str, list[int]] = field(default_factory=dict)  # ranks of the process groups, by name
    missing: list[str] = field(default_factory=list)

    @property
    def line(self) -> tuple[str, int, str] | None:
        """The innermost frame of the program itself."""
        return next((f for f in self.stack if not any(part in f[0] for part in LIBRARIES)), None)

    @property
    def call(self) -> str:
        """What the program's line has called in torch.distributed; ``backward``, where DDP waits in C++."""
        inside = self.stack[: self.stack.index(self.line)] if self.line else self.stack
        names = [f[2] for f in inside if f[0].endswith(("distributed_c10d.py", "_functional_collectives.py"))]
        line = linecache.getline(*self.line[:2]) if self.line and self.state == "waits" else ""
        return (names[-1:] or re.findall(r"\.(wait|synchronize|backward)\(", line) or [""])[0]

    @property
    def pending(self) -> dict | None:
        """The oldest collective that is not over."""
        return next((entry for entry in self.entries if not entry["retired"]), None)

    def at(self) -> str:
        file, number, name = self.line or ("", 0, "")
        return f"{os.path.basename(file)}:{number} in {name}: {linecache.getline(file, number).strip()}".rstrip(": ")

    def doing(self) -> str:
        verb = f"stands in {self.call}" if self.call else self.state
        verb = {"gone": "has ended", "stopped": "is stopped (SIGCONT lets it go on)"}.get(self.state, verb)
        return f"{verb} at {self.at()}" if self.line else verb


def read(pid: int | None, name: str) -> str:
    try:
        return Path("/proc", str(pid), name).read_text(errors="replace")
    except OSError:
        return ""


def environment(pid: int | None) -> dict[str, int]:
    """The variables of a process, as it was started, that are numbers."""
    return {name: int(value) for name, value in re.findall(r"(?:^|\0)(\w+)=(\d+)(?=\0|$)", read(pid, "environ"))}


def status(pid: int) -> tuple[str, int]:
    """State (R: it runs or could, S: it waits, T: stopped, Z: gone) and parent of a process."""
    fields = read(pid, "stat").rpartition(")")[2].split() or ["Z", "0"]
    return fields[0].upper(), int(fields[1])


def find(pids: list[int], pattern: str) -> list[Rank]:
    """The ranks among these processes and below them; without any, those of torchrun."""
    below: dict[int, list[int]] = {}
    commands = {int(n): read(int(n), "cmdline").replace("\0", " ") for n in os.listdir("/proc") if n.isdigit()}
    for pid in commands:
        below.setdefault(status(pid)[1], []).append(pid)
    pids = pids or [pid for pid, text in commands.items() if re.search(
        r"torchrun|torch\.distributed\.(run|launch)", text) and re.search(pattern, text) and pid != os.getpid()]
    found: dict[int, int] = {}
    while pids:
        pid, *pids = pids
        number = environment(pid).get("RANK")
        if number is None:
            pids += below.get(pid, [])
        elif found.setdefault(number, pid) != pid:
            raise SystemExit(f"{found[number]} and {pid} are both rank {number}: name one job by PID or --torchrun")
    local, names = sorted(found), environment(next(iter(found.values()), None))
    if {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"} <= names.keys():
        first = names["RANK"] - names["LOCAL_RANK"]
        local = range(first, first + names["LOCAL_WORLD_SIZE"])  # also those that have ended
        if len(local) < names["WORLD_SIZE"]:
            print(f"{names['WORLD_SIZE'] - len(local)} more ranks are on other hosts: run this there too")
    if not local:
        raise SystemExit("no rank found: no such process of yours has a variable RANK, which torchrun sets")
    return [Rank(number, found.get(number)) for number in local]


def wait_for(something, pid: int):
    """What ``something()`` returns as soon as that is true, or its last answer; for a process that has gone at once."""
    end = time.monotonic() + PATIENCE
    while not (answer := something()) and time.monotonic() < end and status(pid)[0] not in "ZX":
        time.sleep(0.05)
    return answer


def ask_for_stack(rank: Rank, file: str) -> None:
    caught = int((re.findall(r"SigCgt:\s*(\w+)", read(rank.pid, "status")) or ["0"])[0], 16)
    if file and caught >> (signal.SIGUSR1 - 1) & 1:  # else the signal would end it
        size = before = os.path.getsize(file)
        os.kill(rank.pid, signal.SIGUSR1)

        def complete() -> str:  # as soon as nothing has been added for a moment
            nonlocal size
            last, size = size, os.path.getsize(file)
            return Path(file).read_text(errors="replace")[before:] if before < last == size else ""

        main = wait_for(complete, rank.pid).rpartition("(most recent call first)")[2]  # the main thread comes last
        rank.stack = [(f[0], int(f[1]), f[2]) for f in re.findall(r'File "(.*?)", line (\d+) in (.+)', main)]
    elif spy := shutil.which("py-spy"):
        said = subprocess.run([spy, "dump", "--json", "--pid", str(rank.pid)], capture_output=True, text=True)
        threads = json.loads(said.stdout) if said.returncode == 0 else []
        mains = [thread for thread in threads if thread["thread_name"] == "MainThread"] or threads[-1:]
        rank.stack = [(f["filename"], f["line"], f["name"]) for thread in mains[:1] for f in thread["frames"]]
        rank.missing += [] if mains else [f"py-spy: {said.stderr.strip()}"]
    else:
        rank.missing.append("no stack: the program has not called where.listen, and py-spy is not installed")


def ask_for_record(rank: Rank, pipe: str) -> None:
    record, begin = Path(os.path.dirname(pipe), f"rank_{rank.number}"), time.time() - 0.01
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # refused if nobody reads
        os.write(fd, b"1\n")
        os.close(fd)
        if not wait_for(lambda: record.exists() and record.stat().st_mtime > begin, rank.pid):
            raise OSError("it does not answer")
        dump = pickle.loads(record.read_bytes())
        rank.entries = [entry for entry in dump["entries"] if not entry["is_p2p"]]
        rank.groups = {name: json.loads(group["ranks"]) for name, group in dump["pg_config"].items()}
    except (OSError, EOFError, pickle.UnpicklingError):
        rank.missing.append("no flight record: where.listen was not called, or the rank does not answer")


def examine(ranks: list[Rank]) -> list[Rank]:
    """Fill in what can be found out."""
    for rank in [rank for rank in ranks if rank.pid is not None]:
        seen = ""
        while len(seen) < LOOKS:
            seen += status(rank.pid)[0]
            time.sleep(0.02)
        often = "computes" if seen.count("R") > LOOKS / 2 else "waits"
        rank.state = {"Z": "gone", "X": "gone", "T": "stopped"}.get(seen[-1], often)
        with contextlib.suppress(OSError):  # it has gone
            files = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{rank.pid}/fd")]
            stack = next((f for f in files if os.path.basename(f) == f"stack_{rank.number}"), "")
            if rank.state != "stopped":
                ask_for_stack(rank, stack)
                pipe = os.path.join(os.path.dirname(stack), f"ask_{rank.number}")
                ask_for_record(rank, next((f for f in files if f.endswith(f"_{rank.number}.pipe")), pipe))
    return ranks


def named(numbers) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"


def place(entry: dict) -> str:
    name, label = entry["process_group"]
    group = "the default group" if label == "default_pg" else f"group {name if label == 'undefined' else label}"
    return f"#{entry['collective_seq_id']} of {group}"


def title(entry: dict) -> str:
    return f"{entry['profiling_name'].rpartition(':')[2]} {place(entry)}"


def from_records(ranks: dict[int, Rank]) -> tuple[set[int], str] | None:
    """Ranks to blame and why, by the numbers of their collectives; nothing if the records do not tell."""
    waiting = {n: rank.pending for n, rank in ranks.items() if rank.pending and rank.state != "gone"}
    behind: dict[int, list[int]] = {}  # who waits for each
    for number, entry in waiting.items():
        calls = {n: next((e for e in ranks[n].entries if place(e) == place(entry)), None)
                 for n in ranks[number].groups.get(entry["process_group"][0], ranks) if n in ranks}
        sizes = [] if re.search(":(all_?to_?all|gather|scatter)", entry["profiling_name"]) else ["input_sizes"]
        for what in ("profiling_name", "input_dtypes", *sizes):
            values: dict[str, list[int]] = {}
            for n, call in calls.items():
                if call:
                    values.setdefault(str(call[what]).rpartition(":")[2], []).append(n)
            if len(values) > 1:
                text = ", ".join(f"{named(who)} {value}" for value, who in values.items())
                where = "; ".join(f"{named([n])} {ranks[n].doing()}" for n in sorted(calls))
                odd = min(values.values(), key=lambda who: (len(who), -who[0]))
                return {*odd}, f"collective {place(entry)} differs: {text}. {where}."
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
    if over := {n for n in ranks if n not in waiting and place(entry) in map(place, ranks[n].entries)} if entry else ():
        text = f"{title(entry)}, which is over on {named(over)} and not on {named(waiting)}"
        return set(), f"all ranks have called {text}: compare what no record holds, the root and the reduction."


def from_stacks(ranks: dict[int, Rank]) -> tuple[set[int], str]:
    """The same by where the ranks stand."""
    gone = {n for n, rank in ranks.items() if rank.state in ("gone", "stopped")}
    busy = {n for n, rank in ranks.items() if rank.state == "computes" and not rank.call}
    apart = {n for n, rank in ranks.items() if rank.stack and not rank.call}
    places: dict[tuple, set[int]] = {}
    for n, rank in ranks.items():
        places.setdefault((rank.call, rank.line) if rank.stack else (), set()).add(n)
    few = min(places.values(), key=lambda who: (len(who), -min(who))) if () not in places else set()
    odd = next((some for some in (gone, busy, apart, few) if some and len(some) < len(ranks)), set())
    said = [f"{named([n])} {ranks[n].doing()}" for n in sorted(ranks, key=lambda n: (n not in odd, n))]
    alike = f"all ranks look alike: {said[0]}. Collectives, flight records could tell apart (see --help)."
    if {rank.call for rank in ranks.values()} == {"recv"}:
        return {*ranks}, f"all of them wait for a message, and none sends one: {said[0]}."
    return odd, "; ".join(said) + "." if odd else alike


def report(ranks: list[Rank], stacks: bool = False) -> str:
    """A line for each rank, what is missing, and the verdict."""
    lines, reasons, by_number = [], {}, {rank.number: rank for rank in ranks}
    for rank in ranks:
        last = rank.pending or (rank.entries or [None])[-1]
        over = f"  [{title(last)}, {'not over' if rank.pending else 'over'}]" if last else ""
        pid = f"pid {rank.pid}  " if rank.pid else ""
        lines.append(f"rank {rank.number}  {pid}{rank.state}  {rank.at() if rank.line else ''}{over}".rstrip())
        lines += [f"        {file}:{line} in {name}" for file, line, name in rank.stack if stacks]
        for reason in rank.missing:
            reasons.setdefault(reason, []).append(rank.number)
    lines += [f"missing for {named(who)}: {reason}" for reason, who in reasons.items()]
    odd, why = from_records(by_number) or from_stacks(by_number)
    return "\n".join([*lines, "", f"look at {named(odd)}: {why}" if odd else why])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pids", metavar="PID", type=int, nargs="*", help="ranks, or processes that have started them")
    parser.add_argument("--torchrun", metavar="PATTERN", nargs="?", const="", default="", help="which torchrun")
    parser.add_argument("--stacks", action="store_true", help="show whole stacks")
    args = parser.parse_args()
    print(report(examine(find(args.pids, args.torchrun)), args.stacks))


if __name__ == "__main__":
    main()
