"""The exercises on several hosts: what ranks and hosts must do, and the usual mistakes with their hints.

Ranks run on emulated hosts, and the counter of each host's interface says what has left it. Where hosts cannot be
emulated the ranks run on one machine, and the ledger says which bytes would have left. The exercises on restarts are
in `restarts`.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils import record
from course_utils.check import (
    TIMEOUT,
    Case,
    CheckFailed,
    Exercise,
    Outcome,
    checked,
    exercise,
    paper,
)
from course_utils.check.compare import values, whole_number
from course_utils.check.groups import DIFFERENT, GroupsInStep
from course_utils.check.program import hints_of
from course_utils.check.traffic import calls, sent
from course_utils.costs import bytes_sent
from lessons.debugging_hangs.clinic_check import ward

from . import answers, restarts
from .clinic import network
from .hosts import hosts_available
from .hosts.network import bytes_left
from .restarts import job_script as job_script
from .restarts import train as train

MISTAKES: dict[str, dict[str, tuple]] = dict(restarts.MISTAKES)
RIGHT: dict[str, dict[str, Any]] = dict(restarts.RIGHT)

# --- exercise 1: an all-reduce on two levels

HEADERS = 1.12  # at most: the bytes of the tensors with headers and acknowledgements, and making groups


def placement(hosts: tuple[int, ...], kind: str, shape: tuple[int, ...], hint: str | None = None) -> Case:
    """The host of each rank, kind and shape of the tensors, the hint of a failure; the large are measured on hosts."""
    def on_hosts() -> dict[str, Any]:
        return {"hosts": {"hosts": len({*hosts})}} if math.prod(shape) > 1 << 18 and hosts_available()[0] else {}

    name = f"hosts {' '.join(map(str, hosts))}, tensor {kind}, {shape[::-1] if 'transposed' in kind else shape}"
    return Case(len(hosts), name, (hosts, kind, shape, hint), hint, "view|stride|dtype", on_hosts)


UNEVEN = (263, 1001)  # a little more than 1 MiB in float32, and odd
PLACEMENTS = [
    placement((0, 0, 1, 1), "float32", (64, 33)),
    placement((0, 0, 1, 1), "float32", (37, 3), "remainder"),
    placement((0, 0, 1, 1), "bfloat16, transposed", (41, 24), "any-tensor"),
    placement((0, 0, 1, 1, 2, 2), "float32", (37, 3), "placement"),
    placement((0, 1, 0, 1), "float64", (7,), "placement"),
    placement((0, 0, 0), "float32", (5, 3), "placement"),
    placement((1, 0), "float32", (5, 3), "placement"),
    placement((0, 0, 1, 1), "float32", UNEVEN),
    placement((0, 0, 1, 1, 2, 2), "float32", UNEVEN),
]


def tensors(n: int, kind: str, shape: tuple[int, ...]) -> list[Tensor]:
    made = [values(*shape, seed=700 + rank) for rank in range(n)]
    if "bfloat16" in kind:  # whole numbers, whose mean over 4 ranks is exact
        return [(4 * x).round().clamp(-9, 9).bfloat16().t() for x in made]
    return [x.double() for x in made] if "float64" in kind else made


def by_level(hosts: Sequence[int], rank: int, ledger: Any) -> tuple[list[Any], list[Any]]:
    """The calls of a rank that stay inside its host, and those that leave it."""
    inside, across = [], []
    for entry in calls(ledger):
        ends = entry.ranks if entry.is_collective else [r for r in (rank, entry.peer) if r is not None]
        (across if len({hosts[r] for r in ends}) > 1 else inside).append(entry)
    return inside, across


def bytes_of(entries: list[Any]) -> float:
    """Bytes that a rank sends; of a call with a root, its share of what all ranks send, for roots may take turns."""
    rooted = [entry for entry in entries if entry.op in ("reduce", "broadcast")]
    others = sent(entry for entry in entries if entry not in rooted)
    return others + sum(entry.bytes * (1 - 1 / len(entry.ranks)) for entry in rooted)


def measured(said: Any) -> str:
    shares = ", ".join(f"{bytes_sent('all_reduce', count, 1):.2f} S for {count} hosts" for count in (2, 3))
    if said:
        return f"what left each host, by its interface, is that of two levels: {shares}, and headers."
    return f"the right bytes by the ledger. They were not measured: {hosts_available()[1]}."


@exercise("Exercise 1", cases=PLACEMENTS, passed=measured, tolerance=1e-5, explained={DIFFERENT: "hang"})
def hierarchical_mean(note, answer, hosts, kind, shape, hint):
    """Only 2(H-1)/H · S bytes may leave each host, by the ledger and, on hosts, by the interface."""
    rank, n, count = dist.get_rank(), len(hosts), len({*hosts})
    data, per_host = tensors(n, kind, shape), n // count
    own, x, emulated = data[rank], data[rank].clone(), socket.gethostname() == f"node{hosts[rank]}"
    dist.barrier()
    before = bytes_left("self") if emulated else 0
    with GroupsInStep(), record() as ledger:
        got = answer(x, [f"node{host}" for host in hosts])
    note.talks(ledger, n)
    got = "a tensor was returned" if isinstance(got, Tensor) else "nothing was returned"
    note.holds(not torch.equal(x, own), "any-tensor", f"tensor still holds this rank's own numbers; {got}.")
    note.equal(x, (sum(t.double() for t in data) / n).to(own.dtype), "the tensor after the call")
    note.holds(x.dtype == own.dtype, "dtype", f"the tensor after the call is {x.dtype}.")
    dist.barrier()
    left = bytes_left("self") - before if emulated else 0
    # a reduce-scatter and an all-gather inside the host, 1/L of the tensor across; padded, if shards are cut again
    size, entries = own.nbytes, by_level(hosts, rank, ledger)
    (inside, across), everyone, padded = map(bytes_of, entries), [None] * n, size + n * own.element_size()
    dist.all_gather_object(everyone, across)
    idle = count > 1 and any(everyone) and not all(everyone)
    most = bytes_sent("all_reduce", count, padded / per_host)
    least = bytes_sent("all_reduce", count, own.numel() // per_host * own.element_size())
    flat = per_host > 1 and any(entry.is_collective and len(entry.ranks) == n for entry in entries[1])
    light = inside < bytes_sent("all_reduce", per_host, 0.75 * size)
    usual = "flat" if flat or light and not idle else "leaders"
    key = {"any-tensor": "too-many-bytes", "placement": "placement"}.get(hint, usual)
    told = f"this rank sends {in_s(across, size)} to other hosts; "
    by_interface = f" {in_s(left, size)} left node{hosts[rank]} by its interface." if emulated else ""
    note.holds(across <= most + 0.5, key, f"{told}{in_s(most, size)} are enough.{by_interface}")
    note.holds(across >= least - 0.5, "leaders" if idle else "too-few-bytes", f"{told}it takes {in_s(least, size)}.")
    within = bytes_sent("all_reduce", per_host, padded)
    told = f"inside its host this rank sends {in_s(inside, size)}; {in_s(within, size)} are enough."
    note.holds(inside <= within + 0.5, "too-many-bytes", told)
    if emulated:
        expected = bytes_sent("all_reduce", count, size)
        told = f"{by_interface[1:-1]}; {in_s(expected, size)} and headers are enough. By the ledger it is right; but"
        told += " gloo makes a reduce-scatter from an all-reduce. Take one all-reduce."
        note.holds(left <= HEADERS * expected, "too-many-bytes", told)
        note.holds(left >= 0.99 * expected, "too-few-bytes", told)
    return emulated or None


def in_s(count: float, size: int) -> str:
    return f"{count:,.0f} bytes ({count / size:.2f} S)"


REDUCE = "dist.reduce_scatter_single(shard, padded, group=inside)"
ACROSS = "dist.all_reduce(shard, group=across)"
MEAN = "shard /= len(host_of)"
GATHER = "dist.all_gather_single(padded, shard, group=inside)"
INTO = "tensor.copy_(padded[:count].view(tensor.shape))"
ROWS, COLUMNS = "rows = list(hosts.values())", "# one rank of each host"
INSIDE = "inside, _ = dist.new_subgroups_by_enumeration(rows)"
OUTSIDE = "across, _ = dist.new_subgroups_by_enumeration(columns)"

MISTAKES["hierarchical_mean"] = {
    "hang": ("""Every rank has to take part in making every group, in the same order, also of groups that it is not in:
        that is how new_group is defined. Otherwise ranks wait for each other, or ranks of different groups are
        connected.""",
            {INSIDE: "inside = dist.new_group(next(row for row in rows if dist.get_rank() in row))",
             OUTSIDE: "across = dist.new_group(next(column for column in columns if dist.get_rank() in column))"}),
    "flat": ("""The heavy part has to run inside the hosts: one collective over all ranks takes no account of hosts, and
        where the two levels are exchanged, little is left inside.""",
            [f"{REDUCE}  ->  return dist.all_reduce(tensor.div_(len(host_of)))",
             f"{COLUMNS}  ->  {COLUMNS}\nrows, columns = columns, rows"]),
    "leaders": ("""After a reduce-scatter inside the host, each of its L ranks has 1/L of the tensor left to talk about
        with other hosts. None needs to carry more, and none should idle.""",
            {REDUCE: "shard = padded\ndist.all_reduce(shard, group=inside)", GATHER: "pass"}),
    "one-level": ("This covers the ranks of one host only: the other level is missing.",
            [{ACROSS: "dist.all_reduce(shard.clone(), group=across)", MEAN: f"shard /= {divisor}"}
             for divisor in ("1", "per_host", "1 * len(host_of)")]),
    "divisor": ("The sum over all ranks is right, but the mean divides it by the number of all ranks.",
            [f"{MEAN}  ->  shard /= {divisor}" for divisor in ("1", "per_host", "len(host_of) ** 2")]),
    "remainder": ("Where the ranks of a host do not divide the elements, something is left over, which counts too.",
            {"count, per_host = tensor.numel()": "count, per_host = tensor.numel() // 2 * 2",
             "= tensor.flatten()": "= tensor.flatten()[:count]",
             INTO: "tensor.view(-1)[:count] = padded[:count]"}),
    "any-tensor": ("""The caller keeps tensor, so the mean has to be written into its memory, whatever dtype and strides
        it has: flatten() and reshape() may make a copy, and writing to a copy changes nothing in tensor.""",
            f"{INTO}  ->  tensor.reshape(-1)[:] = padded[:count]"),
    "placement": ("""It is right for two hosts with two neighboring ranks each. How many hosts there are, and which
        ranks are on which, stands in host_of and nowhere else.""",
            f"{ROWS}  ->  size = len(host_of) // len(hosts)\n"
            "rows = [list(range(r, r + size)) for r in range(0, len(host_of), size)]"),
}
RIGHT["hierarchical_mean"] = {
    "on a mesh, with lists of pieces": {
        INSIDE: "from torch.distributed.device_mesh import DeviceMesh\nmesh = DeviceMesh('cpu', rows)",
        OUTSIDE: "across, inside = mesh.get_all_groups()",
        REDUCE: "dist.reduce_scatter(shard, [piece.clone() for piece in padded.chunk(per_host)], group=inside)",
        GATHER: "dist.all_gather(list(padded.chunk(per_host)), shard, group=inside)",
    },
    "piece by piece, each summed up at one rank of the host": {
        REDUCE: "members = dist.get_process_group_ranks(inside)\npieces = padded.chunk(per_host)\n"
                "for piece, rank in zip(pieces, members, strict=True):\n    dist.reduce(piece, rank, group=inside)\n"
                "shard = pieces[members.index(dist.get_rank())]",
        GATHER: "for piece, rank in zip(pieces, members, strict=True):\n    dist.broadcast(piece, rank, group=inside)",
    },
}

# --- exercise 2: one program on any number of hosts

JOINS = ((4, 2, False), (2, 1, False), (3, 3, True))  # ranks, hosts, whether the last host is number 0
LONG = 60.0  # seconds to meet
GATHERING = 10.0  # seconds that a rank waits for what the others say


@dataclass
class Said:
    """What a rank's program told ``init_process_group``, and where the rank really is."""

    true_rank: int
    host: str
    rank: int
    world_size: int
    address: str
    target: str  # the name of the host that the address stands for
    interface: str


@checked
def join(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn() -> index of this rank's GPU``, which makes the default process group as `torchrun` has told it."""
    run = Exercise("Exercise 2", hints_of(MISTAKES["join"]), timeout, joining)
    emulated, sentence = hosts_available()
    for world_size, hosts, rotated in JOINS if emulated else JOINS[:2]:
        run.options = {"init": False} | ({"hosts": {"hosts": hosts}} if emulated else {})
        one_world(run, fn, world_size, hosts, rotated, emulated)
    said = f"by what the ranks say. Whether they meet over a network was not tried: {sentence}"
    print(f"Exercise 2 passed: one world {'on 1, 2 and 3 hosts' if emulated else said}.")


def one_world(run: Exercise, fn: Callable, world_size: int, hosts: int, rotated: bool, emulated: bool) -> None:
    case = f"{hosts} host{'s' * (hosts > 1)}" + f", rank 0 on node{hosts - 1}" * rotated
    per_host, inputs = world_size // hosts, [torch.zeros(0)] * world_size
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        os.chmod(folder, 0o777)
        try:
            outcomes, failed = run.run(fn, inputs, folder, world_size, hosts, rotated, emulated, case=case), None
        except CheckFailed as refusal:
            if refusal.hint in ("empty", "not-started", "slow"):
                raise
            failed = refusal
        found = problem(notes(folder), world_size)
    if found is not None:
        key, what, rank = found
        run.refuse("nobody-hosts" if rotated else key, what, rank)
    if failed:
        raise failed
    for _, outcome in run.each(outcomes):
        run.require(outcome.result is not None, "no-group", "the function returned, and there is no process group.")
        size, total, _ = outcome.result
        told = f"an all-reduce of ones gives {total:g}, and {world_size} ranks were started."
        run.require(total == world_size == size, "two-worlds", told)
    devices = [outcome.result[2] for outcome in outcomes]
    for host in range(hosts):
        own = devices[host * per_host : (host + 1) * per_host]
        what = f"on node{host} the ranks take the GPUs {', '.join(map(str, own))}; it has 0 to {per_host - 1}."
        run.require(set(own) == set(range(per_host)), "device", what)


def joining(fn: Callable, inputs: list, args: tuple) -> Outcome:
    """The program of a rank: call ``fn`` where `torchrun` would, note what it says to the others, and try the group."""
    folder, world_size, hosts, rotated, emulated = args
    per_host = world_size // hosts
    group, local = divmod(int(os.environ["RANK"]), per_host)
    if rotated:  # the hosts get other numbers than their names say, as an agent may give them
        group, os.environ["MASTER_ADDR"] = (group + 1) % hosts, f"node{hosts - 1}"
    true = group * per_host + local
    numbers = {"GROUP_RANK": group, "GROUP_WORLD_SIZE": hosts, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host,
               "RANK": true, "ROLE_RANK": true}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    usual = dist.init_process_group

    def noted(*arguments: Any, **named: Any) -> Any:
        named = dict(inspect.signature(usual).bind(*arguments, **named).arguments)
        path = Path(folder, f"{true}.json")
        path.with_suffix(".new").write_text(json.dumps(asdict(said_by(true, named))))
        path.with_suffix(".new").rename(path)
        if problem(gathered(folder, world_size), world_size):  # they would wait for each other
            raise RuntimeError("what the ranks say does not fit together")
        return usual(**named | {"timeout": timedelta(seconds=LONG if emulated else GATHERING)})

    dist.init_process_group = noted
    try:
        device = whole_number(fn())
    finally:
        dist.init_process_group = usual
    if not dist.is_initialized():
        Path(folder, f"{true}.without").touch()
        return Outcome(None, None, None, None)
    x = torch.ones(1)
    dist.all_reduce(x)
    joined = dist.get_world_size(), x.item(), device
    dist.destroy_process_group()
    return Outcome(joined, None, None, None)


def said_by(true: int, named: dict[str, Any]) -> Said:
    """Rank, world size and address as PyTorch takes them: arguments come before the URL, and that before variables."""
    url = urlsplit(named.get("init_method") or "env://")
    query = {key: found[0] for key, found in parse_qs(url.query).items()}

    def number(name: str) -> int:
        given = named.get(name, -1)
        return int(given if given not in (-1, None) else query.get(name, os.environ.get(name.upper(), -1)))

    address = (url.hostname if url.scheme == "tcp" else os.environ.get("MASTER_ADDR")) or ""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    own = socket.gethostname()
    return Said(true, own, number("rank"), number("world_size"), address, target_of(address, own), interface)


def target_of(address: str, own: str) -> str:
    """The name of the host that an address means on this one; empty if it means none."""
    try:
        found = socket.gethostbyname(address)
        return own if found.startswith("127.") else socket.gethostbyaddr(found)[0].split(".")[0]
    except OSError:
        return ""


def gathered(folder: str, world_size: int) -> list[Said]:
    """What all ranks say, as soon as all have said it; else, after some time, what there is."""
    deadline = time.monotonic() + GATHERING
    while time.monotonic() < deadline:
        if sum(name.endswith((".json", ".without")) for name in os.listdir(folder)) == world_size:
            break
        time.sleep(0.01)
    return notes(folder)


def notes(folder: str) -> list[Said]:
    found = [Said(**json.loads(path.read_text())) for path in Path(folder).glob("*.json")]
    return sorted(found, key=lambda said: said.true_rank)


def problem(found: list[Said], world_size: int) -> tuple[str, str, int | None] | None:
    """The first thing in what the ranks said that cannot work: a hint, a sentence, a rank; None if all fits."""
    if len(found) < world_size:
        missing = min(set(range(world_size)) - {said.true_rank for said in found})
        some = f"only {len(found)} of {world_size} ranks call init_process_group; rank {missing} does not."
        return ("no-group", some, missing) if found else None
    told: dict[str, list[Said]] = {}
    for said in found:
        told.setdefault(said.host, []).append(said)
    several = len(told) > 1
    lines = "\n\n" + "\n".join(
        f"  {host}: ranks {', '.join(str(said.rank) for said in own)} of {own[0].world_size}, the store on "
        f"{own[0].address}, interface {own[0].interface or 'not named'}" for host, own in told.items()
    )
    wrong = next((said for said in found if said.world_size != world_size), None)
    if wrong:
        what = f"this rank was told a world of {wrong.world_size} ranks; {world_size} were started."
        return "two-worlds", what + lines, wrong.true_rank
    numbers = sorted(said.rank for said in found)
    if numbers != [*range(world_size)]:
        return "rank-twice", f"the ranks call themselves {', '.join(map(str, numbers))}.{lines}", None
    if not several:
        return None
    targets = {said.target for said in found}
    if len(targets) > 1:
        where = "; ".join(f"on {host} they look for it on {own[0].address}" for host, own in told.items())
        return "many-stores", f"the ranks do not agree where the store is: {where}.{lines}", world_size - 1
    first = next(said for said in found if said.rank == 0)
    if first.host not in targets:
        what = f"rank 0 hosts the store and is on {first.host}; all look for it on {first.target or 'no host'}."
        return "nobody-hosts", what + lines, 0
    loopback = next((said.true_rank for said in found if said.interface == "lo"), None)
    if loopback is not None:
        return "loopback", f"the ranks offer each other an address of the interface lo.{lines}", loopback
    return None


INIT = 'dist.init_process_group("gloo")'
DEVICE = 'return int(os.environ["LOCAL_RANK"])'


def told(rank: str = "RANK", world_size: str = "WORLD_SIZE", address: str = "os.environ['MASTER_ADDR']") -> str:
    """An edit: rank and world size from these variables, and the store at this address."""
    return (f"{INIT}  ->  url = 'tcp://' + {address} + ':' + os.environ['MASTER_PORT']\n"
            f"numbers = {{'rank': int(os.environ['{rank}']), 'world_size': int(os.environ['{world_size}'])}}\n"
            "dist.init_process_group('gloo', url, **numbers)")


OWN_NAME = "os.uname().nodename"

MISTAKES["join"] = {
    "two-worlds": ("""The number of all ranks is in the environment, beside that of this host's. With the latter each
        host makes a world of its own, and nothing fails.""",
            [told("LOCAL_RANK", "LOCAL_WORLD_SIZE", OWN_NAME), told(world_size="LOCAL_WORLD_SIZE")]),
    "rank-twice": ("""Ranks count from 0 to the world size less 1, over all hosts, each once. On one host the number of
        a process is its rank; on several it is only its place within the host.""", told("LOCAL_RANK")),
    "many-stores": ("""The ranks meet at a store that rank 0 hosts, so all of them need the same address, and it has to
        mean the same host everywhere. A host's own name and 127.0.0.1 mean another host on each.""",
            [told(address=OWN_NAME), told(address="'127.0.0.1'")]),
    "nobody-hosts": ("""All ranks look for the store on one host, and rank 0, which opens it, runs on another. Who is
        rank 0, and where, only torchrun knows: take it from the environment.""", told(address="'node0'")),
    "loopback": ("""Each rank tells the others an address at which it can be reached, and on the interface lo that is
        127.0.0.1: on another host this means that host itself.""",
            f"{INIT}  ->  os.environ['GLOO_SOCKET_IFNAME'] = 'lo'\n{INIT}"),
    "device": ("The process group is right. But each host counts its GPUs from 0, and each rank needs its own.",
            f"{DEVICE}  ->  return dist.get_rank()"),
    "no-group": ("Every rank of every host has to call dist.init_process_group, which returns when all have.",
            [f"{INIT}  ->  pass", f"{INIT}  ->  if os.environ['LOCAL_RANK'] == '0':\n    {INIT}"]),
}
RIGHT["join"] = {
    "all said in the call": told(),
    "a store of its own": f"{INIT}  ->  rank, count = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        "store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), count, rank == 0)\n"
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=count)",
}

# --- exercise 3: the network clinic

CLINIC = {
    "missing": "Return an entry for each patient, from 1 to 8.",
    "form": """An entry is the number of a patient and a pair: the name of the cause, and the cure as a dictionary, such
        as 3: ("wrong address", {"environment": {"MASTER_ADDR": "node0"}}).""",
    "name": "The names of causes are those of clinic.list_causes().",
    "diagnosis": """Ask for the evidence that is named below, and compare it with what this cause would show. Two causes
        with the same message differ in what a connection says, or in who listens.""",
    "several": "Change one thing for each patient: else nobody knows which of them has healed it.",
    "cure-form": "clinic.list_cures() shows what can be changed, and with which values.",
    "cure": """What the ranks say after the change stands below. Is it the same message as before? Then the change did
        not touch the cause.""",
}


@checked
def diagnoses_and_cures(fn: Callable) -> None:
    """Check ``fn()``: a dictionary from the number of each patient to its cause and its cure, which is tried."""
    run = Exercise("The clinic", {key: " ".join(hint.split()) for key, hint in CLINIC.items()})
    clinic = network.clinic()
    healed, (possible, sentence) = ward(run, fn, clinic, range(1, 9), cure=dict), clinic.available()
    if possible:
        print(f"The clinic passed: {len(clinic)} causes found, {healed} patients healed, each by a run of its program.")
    else:
        print(f"{len(clinic)} causes are right. The cures were not tried: {sentence}.")


# --- exercise 5: how often to checkpoint


def far_apart(hosts: float, days: float, save: float, restart: float) -> bool:
    """Whether saving and restarting are short against the time between failures, as the formula needs it."""
    between = 24 * 60 * days / hosts
    return save <= between / 20 and restart <= between / 4


BETWEEN, ROOT = "days * 24 * 60 / hosts", "math.sqrt(2 * save * between)"
LOST = "save / every + (restart + every / 2) / between"

MISTAKES["checkpoint_plan"] = {
    "one-host": ("The job stops when any of its hosts fails, so more hosts fail more often, not less.",
            f"{BETWEEN}  ->  days * 24 * 60"),
    "units": ("The time between failures is given in days, and all answers are in minutes: a day has 24 · 60 of them.",
            [f"{BETWEEN}  ->  {day} / hosts" for day in ("24 * days", "days")]),
    "no-two": ("Young's interval is a square root, and has a factor of 2: a failure costs half an interval on average.",
            [f"{ROOT}  ->  math.sqrt(save * between)", f"{ROOT}  ->  2 * save * between"]),
    "whole-interval": ("A failure comes at any moment, so it costs half an interval on average.",
            "every / 2  ->  every"),
    "save-free": ("Both cost time: each save, and with each failure the restart and half an interval.",
            [f"{LOST}  ->  (restart + every / 2) / between", f"{LOST}  ->  save / every"]),
    "restart-each-save": ("The restart comes once per failure, not once per checkpoint.",
            f"{LOST}  ->  (save + restart) / every + (every / 2) / between"),
    "fraction": ("The docstring asks for per cent.", "100 * lost  ->  lost"),
}
RIGHT["checkpoint_plan"] = {
    "by search": f"{ROOT}  ->  "
        "math.sqrt(save * between) * min((t / 1000 for t in range(1, 9000)), key=lambda t: 1 / t + t / 2)",
    "in hours": f"{ROOT}  ->  60 * math.sqrt(2 * save / 60 * between / 60)",
}

checkpoint_plan = paper(
    "Exercise 5", answers.checkpoint_plan, MISTAKES["checkpoint_plan"], allowed=far_apart,
    units=["min between failures", "min between checkpoints", "% lost"], cases=[
        (2048, 264, 2, 10), (16, 264, 2, 10), (2048, 264, 0.1, 10), (256, 30, 0.5, 3), (64, 1000, 4, 30),
        (1, 10, 1, 5),
    ],
)
