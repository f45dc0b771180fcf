"""Flight records of PyTorch: the last collectives of each rank, for the notebook and for the tool `torchfrtrace`.

PyTorch notes the calls of a process group in a ring buffer of ``TORCH_FR_BUFFER_SIZE`` entries. gloo does not note
sends and receives, and not when a call begins or ends; NCCL does.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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
