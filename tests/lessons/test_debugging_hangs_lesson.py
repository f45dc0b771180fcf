"""What lesson 14 makes of flight records agrees with PyTorch's tool on the same records."""

from __future__ import annotations

import argparse
import copy

import pytest
import torch
import torch.distributed as dist
from lesson_cells import definitions
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.types import MatchState

from course_utils import WorkerError, launch, shutdown
from lessons.debugging_hangs import flight_records

pytestmark = pytest.mark.guard(120)

KINDS = {
    MatchState.COLLECTIVE_TYPE_MISMATCH: "operation", MatchState.SIZE_OR_SYNTAX_MISMATCH: "sizes",
    MatchState.COLLECTIVE_DTYPE_MISMATCH: "dtypes",
}


@pytest.fixture(autouse=True)
def recording(monkeypatch):
    """Ranks that are forked while the variable is set; no test gets those of another, which may still wait."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")
    shutdown()
    yield
    shutdown()


def two_collectives(odd, guilty, group_ranks=None):
    """Two all-reduces of which the second is another call on the guilty ranks; nothing waits for it.

    Its bytes are as many on all ranks, because gloo ends a process that is sent more than it expects.
    """
    group = dist.new_group(group_ranks) if group_ranks else None
    dist.barrier()
    if group_ranks and dist.get_rank() not in group_ranks:
        return flight_records.record()
    dist.all_reduce(torch.ones(8), group=group)
    dist.barrier(group=group)
    call, x = dist.all_reduce, torch.ones(8)
    if dist.get_rank() in guilty:
        x = {"sizes": torch.ones(2, 4), "dtypes": torch.ones(8, dtype=torch.int32)}.get(odd, x)
        call = {"missing": None, "operation": dist.broadcast}.get(odd, call)
    root = {"group_src": 0} if call is dist.broadcast else {}
    kept = call(x, group=group, async_op=True, **root) if call else None
    found = flight_records.record()
    del kept
    return found


def tool(records):
    """The first fault of each group by torchfrtrace: group, number, kind, ranks."""
    details = {f"rank_{one['rank']}": {**copy.deepcopy(one), "host_name": ""} for one in records}
    arguments = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10, selected_ranks=None,
    )
    found = {}
    for call in build_db(details, arguments, records[0]["version"]).collectives:
        if call.missing_ranks:
            fault = call.collective_seq_id, "missing", tuple(sorted(call.missing_ranks))
        elif call.mismatch_collectives:
            states = {KINDS[one.type_of_mismatch.state] for one in call.mismatch_collectives.values()}
            fault = call.collective_seq_id, states.pop(), tuple(sorted(call.mismatch_collectives))
        else:
            continue
        found.setdefault(call.group_id, fault)
    return [*found.values()]


def ours(records):
    return [fault[1:] for fault in definitions("14")["first_faults"](records)]


@pytest.mark.parametrize(("odd", "guilty"), [
    ("missing", (1, 2)), ("operation", (0,)), ("sizes", (1, 2)), ("dtypes", (0,)),
])
def test_faults_are_those_of_the_tool(odd, guilty):
    records = launch(two_collectives, odd, guilty, world_size=3)
    differing = guilty if odd == "missing" or 0 not in guilty else (1, 2)  # both compare with the lowest rank
    assert ours(records) == tool(records) == [(4, odd, differing)]


def test_a_fault_in_a_group_of_some_ranks_is_found_and_what_an_earlier_call_left_is_not():
    assert ours(launch(two_collectives, "none", (), world_size=3)) == []
    records = launch(two_collectives, "sizes", (2,), [1, 2], world_size=3)
    assert ours(records) == tool(records) == [(3, "sizes", (2,))]
    assert len(records[0]["entries"]) == 1


def test_a_rank_without_a_record_is_told_what_to_set(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    with pytest.raises(WorkerError, match="set TORCH_FR_BUFFER_SIZE=2000 before the process group is made"):
        launch(flight_records.record, world_size=1)
