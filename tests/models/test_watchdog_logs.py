"""Watchdog messages of real clusters are read, and say who has to be looked at; more of it is in lesson 14."""

from __future__ import annotations

from course_utils import recordings
from lessons.debugging_hangs.watchdog_logs import Waiting, conclusion, read

LOGS, _ = recordings.load("watchdog_logs")
DEFAULT = "0(default_pg)"


def test_each_rank_waits_in_its_oldest_call_of_a_group():
    waiting = read(LOGS["out_of_step"]["lines"])
    assert waiting == [
        Waiting(0, 420, "_REDUCE_SCATTER_BASE", 8208384, 426, 419, DEFAULT),
        Waiting(1, 423, "_REDUCE_SCATTER_BASE", 64, 424, 422, DEFAULT),
    ]
    assert conclusion(waiting, 2)[0] == "out of step"
    later = LOGS["out_of_step"]["lines"] + [
        line.replace("420", "421") for line in LOGS["out_of_step"]["lines"] if "Rank 0" in line]
    assert read(later) == waiting


def test_who_says_nothing_is_named_and_where_all_wait_in_one_call_nobody_is_blamed():
    kind, why = conclusion(read(LOGS["silent"]["lines"]), 7)
    assert kind == "silent" and why.endswith("nothing from ranks 0, 4.")
    waiting = [Waiting(rank, 808, "ALLREDUCE", 9801523, 811, 807) for rank in range(3)]
    assert conclusion(waiting, 3) == ("alike", "ranks 0, 1, 2 in ALLREDUCE number 808 (9,801,523 elements).")
    assert conclusion([], 3)[0] == "nothing"


def test_numbers_of_different_groups_are_not_compared():
    waiting = read(LOGS["group_not_named"]["lines"])
    assert [(one.rank, one.number) for one in waiting] == [(0, 96117), (0, 96120), (0, 96125), (7, 64088)]
    assert conclusion(waiting, 8)[0] == "several groups"
    assert conclusion(waiting[2:], 8)[0] == "several groups"  # no group is named
    tensor, data = (Waiting(rank, 10 + rank, "ALLREDUCE", group=name) for rank, name in enumerate(("1", "2")))
    assert conclusion([tensor, data], 2)[0] == "several groups"


def test_newer_words_are_read_and_other_lines_passed_over():
    lines = [
        "epoch 3", "[rank118]:[E] [Rank 118] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2398459, "
        "OpType=ALLREDUCE, NumelIn=8652160, NumelOut=8652160, Timeout(ms)=1800000) ran for 1800068 milliseconds",
        "[PG ID 0 PG GUID 0(default_pg) Rank 118]  failure detected by watchdog at work sequence id: 2398459 PG "
        "status: last enqueued work: 2398578, last completed work: 2398458",
    ]
    assert read(lines) == [Waiting(118, 2398459, "ALLREDUCE", 8652160, 2398578, 2398458, DEFAULT)]
    lines[2] = lines[2].replace("ID 0 PG GUID 0(default_pg)", "1")
    assert read(lines)[0].group == "1"
