"""What the watchdog of PyTorch's NCCL process group writes when a collective takes too long, by rank, and what it says.

The messages are in the words of public logs from 2024 to 2026. Numbers count the collectives of one process group, and
ranks are those in the group; so neither is compared between groups. Old messages do not name the group.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

_TIMEOUT = re.compile(
    r"\[Rank (\d+)\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+), NumelOut=(\d+))?"
)
_STATUS = re.compile(
    r"Rank (\d+)\].*?(?:at work|work sequence id): (\d+).*?last enqueued(?: NCCL)? work: (-?\d+), "
    r"last completed(?: NCCL)? work: (-?\d+)"
)
_GROUP = re.compile(r"\[PG (?:ID \d+ PG GUID )?(.+?) Rank \d+\]")


@dataclass(frozen=True)
class Waiting:
    """A collective in which a rank waited when its watchdog gave up."""

    rank: int  # in its group
    number: int  # of the collective in its group
    operation: str  # as the message names it, such as "ALLREDUCE"
    elements: int | None = None  # of the input; None in old messages, which do not say it
    enqueued: int | None = None  # the last collective that the CPU has launched
    completed: int | None = None  # the last one that the GPU has done
    group: str | None = None  # as the messages name it, such as "0(default_pg)"; None if they do not


def read(lines: Iterable[str]) -> list[Waiting]:
    """Find in a log who waited in which collective, in order of ranks; other lines are passed over.

    Of the collectives of a rank in one group it is the oldest. Where the group is not named, all of them are returned,
    because they may be of several groups.
    """
    found: list[Waiting] = []
    for line in lines:
        group = named[1] if (named := _GROUP.search(line)) else None
        if told := _TIMEOUT.search(line):
            found.append(Waiting(int(told[1]), int(told[2]), told[3], int(told[4]) if told[4] else None, group=group))
        elif status := _STATUS.search(line):
            rank, number, enqueued, completed = map(int, status.groups())
            found = [replace(one, enqueued=enqueued, completed=completed, group=group or one.group)
                     if (one.rank, one.number) == (rank, number) and one.enqueued is None else one for one in found]
    oldest: dict[tuple, Waiting] = {}
    for one in sorted(found, key=lambda one: (one.rank, one.number, one.enqueued is None)):
        oldest.setdefault((one.rank, one.group or one.number), one)
    return list(oldest.values())


def conclusion(waiting: Sequence[Waiting], world_size: int) -> tuple[str, str]:
    """Say where to look, for ranks of one process group that has all of `world_size` ranks, and why.

    "silent": all who wait, wait in one call, and somebody has not come. "out of step": they wait in different calls, so
    their programs have taken different ways. "alike": all wait in the same call, so the fault is below the program: a
    link, a GPU, or a rank's kernel that does not end. "several groups": numbers differ and nothing says that they count
    the same group. Else "nothing".
    """
    if not waiting:
        return "nothing", "no rank waits."
    calls: dict[tuple[int, str, int | None], list[int]] = {}
    for one in waiting:
        calls.setdefault((one.number, one.operation, one.elements), []).append(one.rank)
    said = "; ".join(f"{_named(ranks)} in {operation} number {number}{_of(elements)}"
                     for (number, operation, elements), ranks in sorted(calls.items(), key=lambda item: item[0][0]))
    named = {one.group for one in waiting} - {None}
    twice = [rank for rank, count in Counter(one.rank for one in waiting).items() if count > 1]
    if len(named) > 1 or twice or (len(calls) > 1 and any(one.group is None for one in waiting)):
        return "several groups", f"{said}; numbers of different groups cannot be compared."
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
