"""Run the team's program on ranks, and count what it did: calls, bytes over the cable, messages, modelled seconds."""

from __future__ import annotations

import contextlib
import io
import linecache
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from course_utils import record
from course_utils.costs import bytes_sent
from course_utils.models import GPT
from course_utils.ranks import Ledger, Watch, run

from .faults import RANKS, text


@dataclass(frozen=True)
class Cable:
    """Between two hosts: bits a second, and seconds of a message; inside a host 5 GB/s and 10 us are assumed."""

    rate: float
    latency: float


@dataclass(frozen=True)
class Counts:
    """What ranks have sent: bytes that left the busiest host, messages one after the other over the cable, calls and
    bytes of the busiest rank."""

    cable_bytes: float
    messages: int
    calls: int
    sent: float

    def seconds(self, cable: Cable) -> float:
        """Modelled: nothing overlaps, and what a rank sends inside its host is passed on at 5 GB/s, each call 10 us."""
        over = self.messages * cable.latency + 8 * self.cable_bytes / cable.rate
        return over + 10e-6 * self.calls + self.sent / 5e9


@dataclass(frozen=True)
class Seen:
    """What a run of the program gave: of each rank losses by step, evaluation, weights, ledger and windows computed."""

    losses: list[dict[int, float]]
    evaluated: list[float]
    weights: list[torch.Tensor]
    ledgers: list[Ledger]
    windows: list[int]

    def __repr__(self) -> str:
        """A table with a line for each rank; of the weights, their norm."""
        lines = ["rank  last loss  evaluated  |weights|  calls  MB sent  windows computed"]
        for rank, (losses, weights) in enumerate(zip(self.losses, self.weights, strict=True)):
            ledger = self.ledgers[rank]
            sent = f"{len(ledger):6}{ledger.bytes_sent() / 1e6:9.2f}{self.windows[rank]:18}"
            lines.append(f"{rank:4}{losses[max(losses)]:11.4f}{self.evaluated[rank]:11.4f}{weights.norm():11.4f}{sent}")
        return "\n".join(lines)


def host_of(rank: int) -> int:
    """The host of a rank: two in a row share one."""
    return rank // 2


def counts_of(ledgers: Sequence[Iterable[Any]]) -> Counts:
    """Count the ledgers of all ranks, those of a step or of a run."""
    left: dict[int, float] = {}
    messages, calls, sent = [0], [0], [0.0]
    for rank, entries in enumerate(ledgers):
        ledger = Ledger([entry for entry in entries if entry.op != "barrier"])
        between = [host_of(r) for r in range(len(ledgers))]
        left[host_of(rank)] = left.get(host_of(rank), 0) + ledger.bytes_sent(between=between)
        ends = [(entry, entry.ranks if entry.is_collective else (rank, entry.peer)) for entry in ledger]
        messages.append(sum(_rounds(e.op, len(e.ranks)) for e, met in ends if len({host_of(r) for r in met}) > 1))
        calls.append(len([*entries]))
        sent.append(sum(bytes_sent(e.op, len(e.ranks), e.bytes) for e in ledger if e.op != "recv"))
    return Counts(max(left.values()), max(messages), max(calls), max(sent))


def _rounds(op: str, ranks: int) -> int:
    """Messages one after the other, in a ring."""
    if op in ("send", "recv"):
        return int(op == "send")
    return (2 if op == "all_reduce" else 1) * (ranks - 1)


def loaded(program_text: str) -> Callable[..., Any]:
    """The function ``train`` of a text, its lines known to stacks as those of ``program.py``."""
    file = f"program-{zlib.crc32(program_text.encode()):08x}.py"
    linecache.cache[file] = (len(program_text), None, program_text.splitlines(True), file)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program_text, file, "exec"), names)
    return names["train"]


def _observed(program_text: str) -> tuple:
    """On a rank: run the text; what `Seen` has of it."""
    computed = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, given: computed.append(len(given[0])) if isinstance(module, GPT) else None)
    try:
        with record() as ledger:
            losses, evaluated, weights = loaded(program_text)()
    finally:
        hook.remove()
    return losses, evaluated, weights, ledger, sum(computed)


def quietly(fn: Callable, *args: Any, ranks: int, verify: bool = False, shown: bool = False) -> list[Any]:
    """Run a function on ranks, what they print not `shown`; those that can never go on are told at once."""
    watch = Watch(math.inf, math.inf, look=0.1)
    with contextlib.nullcontext() if shown else contextlib.redirect_stdout(io.StringIO()):
        return run(fn, args, {}, ranks, 60.0, "gloo", watch=watch, verify=verify)


def run_text(program_text: str, ranks: int = RANKS, verify: bool = False) -> Seen:
    """Run a text of the program on ranks; those that can never go on are told with their lines, after 60 s at most."""
    loaded(program_text)
    found = quietly(_observed, program_text, ranks=ranks, verify=verify, shown=True)
    return Seen(*map(list, zip(*found, strict=True)))


@cache
def undisturbed(ranks: int = RANKS) -> Seen:
    """A run of the program as it was meant."""
    return run_text(text(), ranks)


def same(seen: Seen, other: Seen, tolerance: float = 1e-4) -> str:
    """What of two runs differs first, on any rank; empty if nothing does."""
    expected, right = other.losses[0], other.weights[0]
    for rank, losses in enumerate(seen.losses):
        for step, loss in expected.items():
            if step not in losses or not math.isclose(losses[step], loss, rel_tol=tolerance):
                return f"the loss of step {step} on rank {rank} is {losses.get(step)}, and should be {loss:.5f}"
        if not torch.allclose(seen.weights[rank], right, tolerance, tolerance):
            return f"the weights of rank {rank} are not those of one process"
        if expected and not math.isclose(seen.evaluated[rank] or 0, other.evaluated[0], rel_tol=tolerance):
            return f"the evaluation of rank {rank} is {seen.evaluated[rank]}, and should be {other.evaluated[0]:.5f}"
    return ""
