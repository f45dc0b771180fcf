"""Our reading of flight records agrees with PyTorch's tool on the same records."""

from __future__ import annotations

import argparse
import copy

import pytest
import torch
import torch.distributed as dist
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
    wrong = dist.get_rank() in guilty
    if not wrong or odd == "none":
        kept = dist.all_reduce(torch.ones(8), group=group, async_op=True)
    elif odd == "operation":
        kept = dist.broadcast(torch.ones(8), group_src=0, group=group, async_op=True)
    elif odd == "sizes":
        kept = dist.all_reduce(torch.ones(2, 4), group=group, async_op=True)
    elif odd == "dtypes":
        kept = dist.all_reduce(torch.ones(8, dtype=torch.int32), group=group, async_op=True)
    else:
        kept = None
    found = flight_records.record()
    del kept
    return found


def tool(records):
    """What torchfrtrace finds: group, number, kind, ranks of each collective that does not fit, until the first."""
    details = {f"rank_{one['rank']}": {**copy.deepcopy(one), "host_name": ""} for one in records}
    arguments = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10, selected_ranks=None,
    )
    found = []
    for call in build_db(details, arguments, records[0]["version"]).collectives:
        if call.missing_ranks:
            found.append((call.group_id, call.collective_seq_id, "missing", tuple(sorted(call.missing_ranks))))
        elif call.mismatch_collectives:
            states = {KINDS[one.type_of_mismatch.state] for one in call.mismatch_collectives.values()}
            ranks = tuple(sorted(call.mismatch_collectives))
            found.append((call.group_id, call.collective_seq_id, states.pop(), ranks))
    return found


def both(records):
    """The first fault of each group by `faults`, and by the tool."""
    ours = [(fault.group, fault.number, fault.kind, fault.ranks) for fault in flight_records.faults(records)]
    theirs = {}
    for group, *fault in tool(records):
        theirs.setdefault(group, (group, *fault))
    return ours, [*theirs.values()]


@pytest.mark.parametrize("guilty", [(0,), (1, 2)], ids=str)
@pytest.mark.parametrize("odd", ["missing", "operation", "sizes", "dtypes"])
def test_faults_are_those_of_the_tool(odd, guilty):
    ours, theirs = both(launch(two_collectives, odd, guilty, world_size=3))
    differing = guilty if odd == "missing" or 0 not in guilty else (1, 2)  # both compare with the lowest rank
    assert [fault[1:] for fault in ours] == [fault[1:] for fault in theirs] == [(4, odd, differing)]


@pytest.mark.parametrize("odd", ["missing", "sizes"])
def test_a_fault_in_a_group_of_some_ranks_is_found_too(odd):
    ours, theirs = both(launch(two_collectives, odd, (2,), [1, 2], world_size=3))
    assert ours == [("1", 3, odd, (2,))]
    assert [fault[1:] for fault in theirs] == [(3, odd, (2,))]


def test_nothing_is_found_where_all_agree():
    records = launch(two_collectives, "none", (), world_size=3)
    assert both(records) == ([], [])


def test_files_are_those_that_the_tool_reads(tmp_path):
    from torch.distributed.flight_recorder.components.loader import read_dir

    records = launch(two_collectives, "operation", (1,), world_size=2)
    flight_records.save(records, tmp_path)
    details, version = read_dir(argparse.Namespace(trace_dir=str(tmp_path), prefix="rank_"))
    assert sorted(details) == ["rank_0", "rank_1"] and version == records[0]["version"]
    assert [details[f"rank_{rank}"]["entries"] for rank in range(2)] == [one["entries"] for one in records]
    assert str(flight_records.faults(records)[0]) == (
        "collective 4 of group 0, operation: rank 0: all_reduce 8; rank 1: broadcast 8"
    )


def all_to_all(splits):
    rank = dist.get_rank()
    kept = dist.all_to_all_single(
        torch.empty(sum(splits[source][rank] for source in range(len(splits)))), torch.ones(sum(splits[rank])),
        [splits[source][rank] for source in range(len(splits))], splits[rank], async_op=True,
    )
    kept.wait()
    return flight_records.record()


def test_what_an_earlier_call_left_in_the_ranks_is_left_out():
    launch(two_collectives, "none", (), world_size=2)
    records = launch(two_collectives, "none", (), world_size=2)
    assert [sorted(flight_records.calls(one)) for one in records] == [[("0", n) for n in range(1, 5)]] * 2


def test_an_all_to_all_may_have_other_sizes_on_each_rank():
    assert both(launch(all_to_all, [[1, 3], [2, 5]], world_size=2)) == ([], [])


def test_a_rank_without_a_record_is_told_what_to_set(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    with pytest.raises(WorkerError, match="set TORCH_FR_BUFFER_SIZE=2000 before the process group is made"):
        launch(flight_records.record, world_size=1)
