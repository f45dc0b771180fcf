"""Checks of the exercises on several hosts.

Those of code run the answer on ranks on emulated hosts, and read from the counter of each host's interface what has
left it. Where hosts cannot be emulated the ranks run on one machine, and the ledger says which bytes would have left.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist

from course_utils.check import (
    TIMEOUT,
    CheckFailed,
    Exercise,
    Outcome,
    checked,
    load_hints,
    paper_problem,
    sent,
    values,
    whole_number,
)
from course_utils.check.groups import DIFFERENT, GroupsInStep
from course_utils.check.traffic import calls
from course_utils.costs import bytes_sent
from lessons.multi_node.hosts import hosts_available

from .clinic_check import diagnoses_and_cures
from .restarts import job_script, train

__all__ = [
    "HINTS", "checkpoint_plan", "diagnoses_and_cures", "hierarchical_mean", "job_script", "join", "train",
]

HINTS = load_hints(__file__)

_MOST = 1.12  # of the bytes of the tensors: headers and acknowledgements, and making groups


# ------------------------------------------------------------------------------------------------ all-reduce by hosts


@dataclass
class _Placement:
    """A case of `hierarchical_mean`: the host of each rank, and the tensors."""

    hosts: Sequence[int]
    shape: tuple[int, ...]
    kind: str  # of the tensor, in words
    fallback: str | None = None

    def tensors(self) -> list[torch.Tensor]:
        made = [values(*self.shape, seed=700 + rank) for rank in range(len(self.hosts))]
        if "bfloat16" in self.kind:  # whole numbers, whose mean over 4 ranks is exact
            made = [(4 * x).round().clamp(-9, 9).bfloat16() for x in made]
        if "float64" in self.kind:
            made = [x.double() for x in made]
        return [x.t() for x in made] if "transposed" in self.kind else made

    @property
    def in_order(self) -> bool:
        """Whether it is the order in which `launch` places ranks on several hosts."""
        count, n = len(set(self.hosts)), len(self.hosts)
        return count > 1 and [rank * count // n for rank in range(n)] == list(self.hosts)


_EVEN, _UNEVEN = (512, 516), (263, 1001)  # a little more than 1 MiB in float32; the second is odd
_PLACEMENTS = (
    _Placement((0, 0, 1, 1), _EVEN, "float32"),
    _Placement((0, 0, 1, 1), _UNEVEN, "float32", "remainder"),
    _Placement((0, 0, 1, 1), (1025, 600), "bfloat16, transposed", "any-tensor"),
    _Placement((0, 0, 1, 1, 2, 2), _UNEVEN, "float32", "three-hosts"),
    _Placement((0, 1, 0, 1), (7,), "float64", "placement"),
    _Placement((0, 0, 0), (5, 3), "float32", "one-level-only"),
    _Placement((1, 0), (5, 3), "float32", "one-level-only"),
)


@checked
def hierarchical_mean(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn(tensor, host_of)``, in place, tensors of any shape and dtype: 2(H-1)/H · S bytes leave each host."""
    exercise = Exercise("Exercise 1", HINTS["hierarchical_mean"], timeout, explained={DIFFERENT: "hang"})
    emulated, sentence = hosts_available()
    shares: dict[int, float] = {}
    for case in _PLACEMENTS:
        data, count = case.tensors(), len(set(case.hosts))
        measured = emulated and case.in_order and data[0].nbytes > 1 << 20
        exercise.options = {"hosts": {"hosts": count}} if measured else {}
        names = [f"node{host}" for host in case.hosts]
        where = f"hosts {' '.join(map(str, case.hosts))}, tensor {case.kind}, {tuple(data[0].shape)}"
        circumstances = {"case": where, "fallback": case.fallback, "errors": "view|stride|dtype"}
        outcomes = exercise.run(_in_step, data, fn, names, **circumstances)
        _hierarchical_mean(exercise, case, data, outcomes)
        if measured:
            shares[count] = _left_hosts(exercise, case, data[0].nbytes, outcomes)
    if shares:
        told = ", ".join(f"{share:.2f} S for {count} hosts" for count, share in shares.items())
        exercise.passed(f"what left each host, by its interface, is that of two levels: {told}, and headers.")
    else:
        exercise.passed(f"the right bytes by the ledger. They were not measured: {sentence}.")


def _in_step(tensor: torch.Tensor, fn: Callable, host_of: list[str]) -> Any:
    with GroupsInStep():
        return fn(tensor, host_of)


def _hierarchical_mean(
    exercise: Exercise, case: _Placement, data: list[torch.Tensor], outcomes: list[Outcome]
) -> None:
    n = len(data)
    wide = [x.double() for x in data]
    mean = (sum(wide) / n).to(data[0].dtype)
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(case.hosts):
        by_host.setdefault(host, []).append(rank)
    total, per_host = sum(wide), n // len(by_host)
    for rank, outcome in exercise.each(outcomes):
        exercise.communicates(rank, outcome, n)
        returned, own = outcome.result, sum(wide[r] for r in by_host[case.hosts[rank]])
        if torch.equal(outcome.after, outcome.before) and n > 1:
            got = "a tensor was returned" if isinstance(returned, torch.Tensor) else "nothing was returned"
            key = "any-tensor" if case.fallback == "any-tensor" else "not-in-place"
            exercise.refuse(key, f"tensor still holds this rank's own numbers; {got}.")
        traps = {
            "sum": total, "one-level": [own / per_host, own / n, own],
            "divisor": [total / count for count in (per_host, len(by_host), n * n, n * per_host) if count != n],
        }
        traps = {} if exercise.fallback else {key: _like(some, mean) for key, some in traps.items()}
        exercise.equal(rank, outcome.after, mean, traps, "the tensor after the call", dtype=mean.dtype)
    _two_levels(exercise, case, data[0], outcomes)


def _like(some: Any, mean: torch.Tensor) -> Any:
    return [_like(x, mean) for x in some] if isinstance(some, list) else some.to(mean.dtype)


def _by_host(case: _Placement, rank: int, outcome: Outcome) -> tuple[list[Any], list[Any]]:
    """The calls of a rank that stay inside its host, and those that leave it."""
    inside, across = [], []
    for entry in calls(outcome.ledger):
        ends = entry.ranks if entry.is_collective else [r for r in (rank, entry.peer) if r is not None]
        (across if len({case.hosts[r] for r in ends}) > 1 else inside).append(entry)
    return inside, across


def _sent(entries: list[Any]) -> float:
    """Bytes that a rank sends; of a call with a root, its share of what all ranks send, for roots may take turns."""
    rooted = [entry for entry in entries if entry.op in ("reduce", "broadcast")]
    others = sent(entry for entry in entries if entry not in rooted)
    return others + sum(entry.bytes * (1 - 1 / len(entry.ranks)) for entry in rooted)


def _two_levels(exercise: Exercise, case: _Placement, tensor: torch.Tensor, outcomes: list[Outcome]) -> None:
    """Refuse other traffic than a reduce-scatter and an all-gather inside hosts, and 1/L of the tensor across them."""
    n, hosts, size = len(case.hosts), len(set(case.hosts)), tensor.nbytes
    per_host = n // hosts
    padding = per_host * hosts * tensor.element_size()  # at most, for shards that are cut again
    shard = (size + padding) / per_host
    traffic = [_by_host(case, rank, outcome) for rank, outcome in enumerate(outcomes)]
    sizes = [_sent(across) for _, across in traffic]
    idle = hosts > 1 and any(sizes) and not all(sizes)
    for rank, (inside, across) in exercise.each(traffic):
        most = bytes_sent("all_reduce", hosts, shard)
        if sizes[rank] > most + 0.5:
            flat = any(entry.is_collective and len(entry.ranks) == n for entry in across)
            light = _sent(inside) < bytes_sent("all_reduce", per_host, 0.75 * size)
            key = "flat" if flat and per_host > 1 else "leaders" if idle else "axis" if light else "whole-tensor-across"
            key = "upcast" if "bfloat16" in case.kind else "placement" if case.fallback == "placement" else key
            told = f"this rank sends {_in_s(sizes[rank], size)} to other hosts; {_in_s(most, size)} are enough."
            measured = getattr(outcomes, "left_host", None)
            if measured:
                host = case.hosts[rank]
                told += f" {_in_s(measured[host], size)} left node{host} by its interface."
            exercise.refuse(key, told)
        least = bytes_sent("all_reduce", hosts, tensor.numel() // per_host * tensor.element_size())
        told = f"this rank sends {_in_s(sizes[rank], size)} to other hosts; it takes {_in_s(least, size)}."
        exercise.require(sizes[rank] >= least - 0.5, "leaders" if idle else "too-few-bytes", told)
        limit = bytes_sent("all_reduce", per_host, size + padding)
        told = f"inside its host this rank sends {_in_s(_sent(inside), size)}; {_in_s(limit, size)} are enough."
        exercise.require(_sent(inside) <= limit + 0.5, "inside-too-much", told)


def _in_s(count: float, size: int) -> str:
    return f"{count:,.0f} bytes ({count / size:.2f} S)"


def _left_hosts(exercise: Exercise, case: _Placement, size: int, outcomes: Any) -> float:
    """The share of S that has to leave each host; refuses what has left by the interface, if that is not so."""
    expected = bytes_sent("all_reduce", len(set(case.hosts)), size)
    for host, left in enumerate(outcomes.left_host):
        told = f"{_in_s(left, size)} left node{host} by its interface; {_in_s(expected, size)} and headers are enough."
        exercise.require(left <= _MOST * expected, "interface", told)
        exercise.require(left >= 0.99 * expected, "too-few-bytes", told)
    return expected / size


# ------------------------------------------------------------------------------------------------ one program on hosts


@dataclass
class _Said:
    """What a rank's program told ``init_process_group``, and where the rank really is."""

    true_rank: int
    host: str
    rank: int
    world_size: int
    address: str
    target: str  # the name of the host that the address stands for
    interface: str


_SHORT, _LONG = 2.0, 60.0  # seconds to meet where what the ranks say does not fit, and where it does
_GATHER = 10.0  # seconds that a rank waits for what the others say, and for a store that its program opens itself


@dataclass
class _Joined:
    """What a rank found after ``fn`` had returned."""

    rank: int
    world_size: int
    total: float
    device: Any
    initialized: bool = True


def _join(fn: Callable, inputs: list, args: tuple) -> Outcome:
    """The program of a rank: call ``fn`` where `torchrun` would, note what it says to the others, and try the group."""
    folder, world_size, hosts, rotate, emulated = args
    per_host, true = world_size // hosts, int(os.environ["RANK"])
    if not emulated:  # the variables say several hosts
        group, local = divmod(true, per_host)
        names = {"GROUP_RANK": group, "GROUP_WORLD_SIZE": hosts, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host}
        os.environ.update({name: str(value) for name, value in names.items()})
    if rotate:  # the hosts get other numbers than their names say, as an agent may give them
        group = (int(os.environ["GROUP_RANK"]) + 1) % hosts
        true = group * per_host + int(os.environ["LOCAL_RANK"])
        names = {"GROUP_RANK": group, "RANK": true, "ROLE_RANK": true, "MASTER_ADDR": f"node{hosts - 1}"}
        os.environ.update({name: str(value) for name, value in names.items()})
    usual, usual_store = dist.init_process_group, dist.TCPStore

    def store(*arguments: Any, **named: Any) -> Any:
        waits = {} if len(arguments) > 4 else {"timeout": timedelta(seconds=_GATHER)}
        return usual_store(*arguments, **waits | named)

    def noted(*arguments: Any, **named: Any) -> Any:
        named = dict(inspect.signature(usual).bind(*arguments, **named).arguments)
        said = _said(true, named)
        path = Path(folder, f"{true}.json")
        path.with_suffix(".new").write_text(json.dumps(asdict(said)))
        path.with_suffix(".new").rename(path)
        fits = _problem(_gathered(folder, world_size), world_size, per_host) is None
        named["timeout"] = timedelta(seconds=_SHORT if not fits else _LONG if emulated else _GATHER)
        return usual(**named)

    dist.init_process_group, dist.TCPStore = noted, store
    try:
        device = fn()
    finally:
        dist.init_process_group, dist.TCPStore = usual, usual_store
    if not dist.is_initialized():
        Path(folder, f"{true}.without").touch()
        return Outcome(_Joined(0, 0, 0.0, device, False), None, None, None)
    x = torch.ones(1)
    dist.all_reduce(x)
    joined = _Joined(dist.get_rank(), dist.get_world_size(), x.item(), whole_number(device))
    dist.destroy_process_group()
    return Outcome(joined, None, None, None)


def _said(true: int, named: dict[str, Any]) -> _Said:
    """Rank, world size and address as PyTorch takes them: arguments come before the URL, and that before variables."""
    url = urlsplit(named.get("init_method") or "env://")
    query = {key: found[0] for key, found in parse_qs(url.query).items()}

    def number(name: str) -> int:
        given = named.get(name, -1)
        return int(given if given not in (-1, None) else query.get(name, os.environ.get(name.upper(), -1)))

    address = url.hostname if url.scheme == "tcp" else os.environ.get("MASTER_ADDR", "")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return _Said(true, socket.gethostname(), number("rank"), number("world_size"), address or "",
                 _target(address or ""), interface)


def _target(address: str) -> str:
    """The name of the host that an address means on this one; empty if it means none."""
    try:
        found = socket.gethostbyname(address)
        if found.startswith("127."):
            return socket.gethostname()
        return socket.gethostbyaddr(found)[0].split(".")[0]
    except OSError:
        return ""


def _gathered(folder: str, world_size: int) -> list[_Said]:
    """What all ranks say, as soon as all have said it; else, after some time, what there is."""
    deadline = time.monotonic() + _GATHER
    while time.monotonic() < deadline:
        if sum(name.endswith((".json", ".without")) for name in os.listdir(folder)) == world_size:
            break
        time.sleep(0.01)
    return _notes(folder)


def _notes(folder: str) -> list[_Said]:
    found = [_Said(**json.loads(path.read_text())) for path in Path(folder).glob("*.json")]
    return sorted(found, key=lambda said: said.true_rank)


def _ranks(some: Iterable[_Said]) -> str:
    return ", ".join(str(said.rank) for said in some)


def _problem(notes: list[_Said], world_size: int, per_host: int) -> tuple[str, str, int] | None:
    """The first thing in what the ranks said that cannot work: a hint, a sentence, a rank; None if all fits."""
    if len(notes) < world_size:
        missing = sorted(set(range(world_size)) - {said.true_rank for said in notes})
        some = f"only {len(notes)} of {world_size} ranks call init_process_group; rank {missing[0]} does not."
        return ("some-only", some, missing[0]) if notes else None
    hosts = list(dict.fromkeys(said.host for said in notes))
    several = len(hosts) > 1
    told = {host: [said for said in notes if said.host == host] for host in hosts}
    lines = "\n\n" + "\n".join(
        f"  {host}: ranks {_ranks(some)} of {some[0].world_size}, the store on {some[0].address}, interface "
        f"{some[0].interface or 'not named'}" for host, some in told.items()
    )
    wrong = next((said for said in notes if said.world_size != world_size), None)
    if wrong:
        apart = several and all(said.target == said.host and said.rank < said.world_size for said in notes)
        what = (f"{len(hosts)} worlds of {wrong.world_size} ranks have formed, one on each host." if apart
                else f"this rank was told a world of {wrong.world_size} ranks; {world_size} were started.")
        return "two-worlds" if apart else "world-size", what + lines, wrong.true_rank
    seen: dict[int, _Said] = {}
    for said in notes:
        if said.rank in seen or not 0 <= said.rank < world_size:
            first = seen.get(said.rank)
            what = f"rank {said.rank} exists twice, on {first.host} and on {said.host}." if first else (
                f"a rank {said.rank} was asked for in a world of {world_size}.")
            return "rank-twice" if first else "rank-range", what + lines, said.true_rank
        seen[said.rank] = said
    if not several:
        return None
    targets = dict.fromkeys(said.target for said in notes)
    if len(targets) > 1:
        where = "; ".join(f"on {said[0].host} they look for it on {said[0].address}" for said in told.values())
        return "many-stores", f"the ranks do not agree where the store is: {where}.{lines}", world_size - 1
    if seen[0].host not in targets:
        what = f"rank 0 hosts the store and is on {seen[0].host}; all look for it on {seen[0].target or 'no host'}."
        return "nobody-hosts", what + lines, 0
    loopback = next((said for said in notes if said.interface == "lo"), None)
    if loopback:
        return "loopback", f"the ranks offer each other an address of the interface lo.{lines}", loopback.true_rank
    return None


_JOINS = ((4, 2, False), (2, 1, False), (3, 3, True))  # ranks, hosts, whether the last host is number 0


@checked
def join(fn: Callable, timeout: float = TIMEOUT) -> None:
    """Check ``fn() -> index of this rank's GPU``, which makes the default process group as `torchrun` has told it."""
    exercise = Exercise("Exercise 2", HINTS["join"], timeout, _join)
    emulated, sentence = hosts_available()
    for world_size, hosts, rotate in _JOINS if emulated else _JOINS[:2]:
        exercise.options = {"init": False} | ({"hosts": {"hosts": hosts}} if emulated else {})
        _run_join(exercise, fn, world_size, hosts, rotate, emulated)
    said = f"by what the ranks say. Whether they meet over a network was not tried: {sentence}"
    print(f"Exercise 2 passed: one world {'on 1, 2 and 3 hosts' if emulated else said}.")


def _run_join(exercise: Exercise, fn: Callable, world_size: int, hosts: int, rotate: bool, emulated: bool) -> None:
    per_host = world_size // hosts
    case = f"{hosts} host{'s' * (hosts > 1)}" + f", rank 0 on node{hosts - 1}" * rotate
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        os.chmod(folder, 0o777)
        inputs = [torch.zeros(0) for _ in range(world_size)]
        try:
            outcomes = exercise.run(fn, inputs, folder, world_size, hosts, rotate, emulated, case=case)
            evidence = ""
        except CheckFailed as refusal:
            outcomes, evidence = None, "\n\n".join(str(refusal).split("\n\n")[2:])
            if refusal.hint in ("empty", "not-started", "slow"):
                raise
            failed = refusal
        problem = _problem(_notes(folder), world_size, per_host)
    if problem is not None:
        key, what, rank = problem
        exercise.refuse("fixed-address" if rotate else key, f"{what}\n\n{evidence}".rstrip(), rank)
    if outcomes is None:
        raise failed
    devices: dict[int, list[Any]] = {}
    for rank, outcome in exercise.each(outcomes):
        joined = outcome.result
        exercise.require(joined.initialized, "no-group", "the function returned, and there is no process group.")
        exercise.require(joined.total == world_size == joined.world_size, "world-size",
                         f"an all-reduce of ones gives {joined.total:g}, and {world_size} ranks were started.")
        devices.setdefault(rank // per_host, []).append(joined.device)
    for host, found in devices.items():
        what = f"on node{host} the ranks take the GPUs {', '.join(map(str, found))}; it has 0 to {per_host - 1}."
        exercise.require(sorted(map(str, found)) == sorted(map(str, range(per_host))), "device", what)


# ------------------------------------------------------------------------------------------------ paper problems


def _far_apart(hosts: float, days: float, save: float, restart: float) -> bool:
    """Whether saving and restarting are short against the time between failures, as the formula needs it."""
    between = 24 * 60 * days / hosts
    return save <= between / 20 and restart <= between / 4


@paper_problem(
    "Exercise 5",
    cases=[
        (2048, 264, 2, 10), (16, 264, 2, 10), (2048, 264, 0.1, 10), (256, 30, 0.5, 3), (64, 1000, 4, 30),
        (1, 10, 1, 5),
    ],
    slips={
        "one-host": "24 * 60 * days / hosts  ->  24 * 60 * days",
        "sum-of-times": "24 * 60 * days / hosts  ->  24 * 60 * days * hosts",
        "units": ["24 * 60 * days  ->  24 * days", "24 * 60 * days  ->  days", "24 * 60 * days  ->  86400 * days"],
        "no-two": "2 * save * between  ->  save * between",
        "no-root": "math.sqrt(2 * save * between)  ->  2 * save * between",
        "whole-interval": "every / 2  ->  every",
        "save-free": "save / every +  ->  ",
        "failures-free": "save / every + (restart + every / 2) / between  ->  save / every",
        "restart-free": "(restart + every / 2)  ->  (every / 2)",
        "restart-each-save": {"save / every": "(save + restart) / every", "(restart + every / 2)": "(every / 2)"},
        "fraction": "100 * lost  ->  lost",
    },
    units=["min between failures", "min between checkpoints", "% lost"],
    hints=HINTS["checkpoint_plan"],
    allowed=_far_apart,
)
def checkpoint_plan(hosts, days, save, restart):
    """Check ``fn(hosts, days, save, restart)``: minutes between failures and between checkpoints, per cent lost.

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (9), 1974.
    """
    between = 24 * 60 * days / hosts
    every = math.sqrt(2 * save * between)
    lost = save / every + (restart + every / 2) / between
    return between, every, 100 * lost
