"""Flight records of PyTorch: the last collectives of each rank, and the first of each group that do not fit together.

PyTorch notes the calls of a process group in a ring buffer of ``TORCH_FR_BUFFER_SIZE`` entries. `torchfrtrace` reads
the files of all ranks; :func:`faults` is how it finds a fault, for collectives. gloo does not note sends and receives,
and not when a call begins or ends; NCCL does.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Fault", "faults", "record", "save"]

_OWN_INPUT = ("scatter", "all_to_all", "alltoall")  # each rank may pass sizes of its own
_OWN_OUTPUT = ("gather", "all_to_all", "alltoall")


@dataclass(frozen=True)
class Call:
    """A collective as one rank called it."""

    operation: str  # such as "all_reduce"
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    dtypes: list[str]  # of inputs and outputs, such as "Float"

    def __str__(self) -> str:
        return f"{self.operation} {' '.join('x'.join(map(str, size)) or 'scalar' for size in self.input_sizes)}"

    def compared(self) -> dict[str, Any]:
        """What has to be alike on all ranks, in the order in which it is looked at."""
        given = None if any(word in self.operation for word in _OWN_INPUT) else self.input_sizes
        returned = None if any(word in self.operation for word in _OWN_OUTPUT) else self.output_sizes
        return {"operation": self.operation, "sizes": (given, returned), "dtypes": self.dtypes}


@dataclass(frozen=True)
class Fault:
    """The first collective of a group that the ranks do not agree on."""

    group: str  # name of the process group: "0" is the default one
    number: int  # in its group, from 1
    kind: str  # what differs; "missing": some ranks have not called it
    ranks: tuple[int, ...]  # ranks that differ from the lowest rank that called it, or have not called it
    said: dict[int, str]  # what each rank called, by rank

    def __str__(self) -> str:
        told = "; ".join(f"rank {rank}: {call}" for rank, call in self.said.items())
        return f"collective {self.number} of group {self.group}, {self.kind}: {told}"


def record() -> dict[str, Any]:
    """On a rank: its flight record as PyTorch writes it, and its rank; RuntimeError if nothing was recorded.

    Stacks are left out because PyTorch needs seconds to find the lines of C++ code. gloo's record does not say which
    ranks are in a group; that is filled in from the groups themselves.
    """
    import torch.distributed as dist

    from course_utils.torch_internals import flight_record, groups_by_name

    found = flight_record()
    if not (entries := found.get("entries", [])):
        raise RuntimeError("the flight record is empty: set TORCH_FR_BUFFER_SIZE=2000 before the process group is made")
    config = {name: {"name": name, "desc": group.group_desc, "ranks": str(ranks)}
              for name, (group, ranks) in groups_by_name().items()}
    # A rank that lives on has had several default groups; what the earlier ones left is not of this call.
    first = max((entry["pg_id"] for entry in entries if entry["process_group"][0] == "0"), default=0)
    entries = [entry for entry in entries if entry["pg_id"] >= first]
    return {"rank": dist.get_rank(), "version": found["version"], "pg_config": config, "entries": entries}


def save(records: Sequence[Mapping[str, Any]], folder: str | Path) -> None:
    """Write the records of all ranks as the files that ``torchfrtrace FOLDER --prefix rank_`` reads."""
    for one in records:
        (Path(folder) / f"rank_{one['rank']}").write_bytes(pickle.dumps(dict(one)))


def calls(one: Mapping[str, Any]) -> dict[tuple[str, int], Call]:
    """The collectives in a rank's record, by group and number; sends and receives are left out."""
    return {
        (entry["process_group"][0], entry["collective_seq_id"]): Call(
            entry["profiling_name"].rpartition(":")[2], entry["input_sizes"], entry["output_sizes"],
            [*entry["input_dtypes"], *entry["output_dtypes"]],
        )
        for entry in one["entries"] if not entry["is_p2p"]
    }


def faults(records: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """The first collective of each group that some of its ranks have not called, or not alike; of records of all ranks.

    Calls before the oldest one that every rank's buffer still holds are not compared. What comes after the first fault
    of a group means little, since the ranks are out of step. A rank that differs need not be the one that is wrong:
    with three ranks or more, believe the majority.
    """
    by_rank = {one["rank"]: calls(one) for one in records}
    found = []
    for group, ranks in _members(records).items():
        numbers = {rank: [number for name, number in by_rank[rank] if name == group] for rank in ranks}
        held = [min(some) for some in numbers.values() if some]
        last = max((max(some) for some in numbers.values() if some), default=0)
        for number in range(max(held, default=1), last + 1):
            made = {rank: by_rank[rank].get((group, number)) for rank in ranks}
            kind, differing = _difference(made)
            if kind:
                said = {rank: str(call) if call else "not called" for rank, call in made.items()}
                found.append(Fault(group, number, kind, differing, said))
                break
    return found


def _members(records: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The ranks of each group of which there are records."""
    there, members = {one["rank"] for one in records}, {}
    for one in records:
        for name, group in one["pg_config"].items():
            ranks = [int(rank) for rank in group["ranks"].strip("[] ").split(",") if rank.strip()]
            members.setdefault(name, [rank for rank in ranks if rank in there])
    return dict(sorted(members.items(), key=lambda item: (len(item[0]), item[0])))


def _difference(made: Mapping[int, Call | None]) -> tuple[str, tuple[int, ...]]:
    """What differs in one collective, and the ranks that differ from the first that called it."""
    compared = {rank: call.compared() for rank, call in made.items() if call}
    if missing := tuple(rank for rank in made if rank not in compared):
        return "missing", missing
    first = next(iter(compared.values()))
    for kind, right in first.items():
        if differing := tuple(rank for rank, one in compared.items() if one[kind] != right):
            return kind, differing
    return "", ()
