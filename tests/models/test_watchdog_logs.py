"""Watchdog messages of real clusters are read, and say who has to be looked at; more of it is in lesson 14."""

from __future__ import annotations

from course_utils import recordings
from lessons.debugging_hangs.watchdog_logs import Waiting, conclusion, read

LOGS, _ = recordings.load("watchdog_logs")


def test_each_rank_waits_in_its_oldest_call():
    assert read(LOGS["out_of_step"]["lines"]) == {
        0: Waiting(0, 420, "_REDUCE_SCATTER_BASE", 8208384, 426, 419),
        1: Waiting(1, 423, "_REDUCE_SCATTER_BASE", 64, 424, 422),
    }


def test_who_says_nothing_is_named_and_where_all_wait_in_one_call_nobody_is_blamed():
    kind, why = conclusion([*read(LOGS["silent"]["lines"]).values()], 7)
    assert kind == "silent" and why.endswith("nothing from ranks 0, 4.")
    waiting = [Waiting(rank, 808, "ALLREDUCE", 9801523, 811, 807) for rank in range(3)]
    assert conclusion(waiting, 3) == ("alike", "ranks 0, 1, 2 in ALLREDUCE number 808 (9,801,523 elements).")
    assert conclusion([], 3)[0] == "nothing"


def test_newer_words_are_read_and_other_lines_passed_over():
    lines = [
        "epoch 3", "[rank118]:[E] [Rank 118] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2398459, "
        "OpType=ALLREDUCE, NumelIn=8652160, NumelOut=8652160, Timeout(ms)=1800000) ran for 1800068 milliseconds",
        "[PG ID 0 PG GUID 0(default_pg) Rank 118]  failure detected by watchdog at work sequence id: 2398459 PG "
        "status: last enqueued work: 2398578, last completed work: 2398458",
    ]
    assert read(lines) == {118: Waiting(118, 2398459, "ALLREDUCE", 8652160, 2398578, 2398458)}
