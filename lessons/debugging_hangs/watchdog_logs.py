"""What the watchdog of PyTorch's NCCL process group writes when a collective takes too long, by rank, and what it says.

The messages are in the words of public logs from 2024 to 2026; numbers count the collectives of one process group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["Waiting", "conclusion", "read"]

_TIMEOUT = re.compile(
    r"\[Rank (\d+)\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+), NumelOut=(\d+))?"
)
_STATUS = re.compile(
    r"Rank (\d+)\].*?(?:at work|work sequence id): (\d+).*?last enqueued(?: NCCL)? work: (-?\d+), "
    r"last completed(?: NCCL)? work: (-?\d+)"
)


@dataclass(frozen=True)
class Waiting:
    """The oldest collective in which a rank waited when its watchdog gave up."""

    rank: int
    number: int  # of the collective in its group
    operation: str  # as the message names it, such as "ALLREDUCE"
    elements: int | None = None  # of the input; None in old messages, which do not say it
    enqueued: int | None = None  # the last collective that the CPU has launched
    completed: int | None = None  # the last one that the GPU has done


def read(lines: Iterable[str]) -> dict[int, Waiting]:
    """Find in a log, by rank in order, the oldest collective in which each rank waited; other lines are passed over."""
    found: dict[int, Waiting] = {}
    for line in lines:
        if told := _TIMEOUT.search(line):
            rank, number, elements = int(told[1]), int(told[2]), int(told[4]) if told[4] else None
            if rank not in found or number < found[rank].number:
                found[rank] = Waiting(rank, number, told[3], elements)
        elif status := _STATUS.search(line):
            rank, number, enqueued, completed = map(int, status.groups())
            if rank in found and found[rank].number == number:
                found[rank] = replace(found[rank], enqueued=enqueued, completed=completed)
    return dict(sorted(found.items()))


def conclusion(waiting: Sequence[Waiting], world_size: int) -> tuple[str, str]:
    """Say where to look, for ranks of one process group that has all of `world_size` ranks, and why.

    "silent": all who wait, wait in one call, and somebody has not come. "out of step": they wait in different calls, so
    their programs have taken different ways. "alike": all wait in the same call, so the fault is below the program: a
    link, a GPU, or a rank's kernel that does not end. Else "nothing".
    """
    if not waiting:
        return "nothing", "no rank waits."
    calls: dict[tuple[int, str, int | None], list[int]] = {}
    for one in waiting:
        calls.setdefault((one.number, one.operation, one.elements), []).append(one.rank)
    said = "; ".join(f"{_named(ranks)} in {operation} number {number}{_of(elements)}"
                     for (number, operation, elements), ranks in sorted(calls.items(), key=lambda item: item[0][0]))
    if len(calls) > 1:
        return "out of step", f"{said}."
    silent = sorted({*range(world_size)} - {one.rank for one in waiting})
    if silent:
        return "silent", f"{said}; nothing from {_named(silent)}."
    return "alike", f"{said}."


def _of(elements: int | None) -> str:
    return "" if elements is None else f" ({elements:,} elements)"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
