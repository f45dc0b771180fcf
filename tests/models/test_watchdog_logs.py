"""Watchdog messages of real clusters are read, and say who has to be looked at."""

from __future__ import annotations

import pytest

from course_utils import recordings
from lessons.debugging_hangs import watchdog_logs
from lessons.debugging_hangs.watchdog_logs import Waiting, conclusion, read

LOGS, _ = recordings.load("watchdog_logs")


def test_each_rank_waits_in_its_oldest_call():
    found = read(LOGS["out_of_step"]["lines"])
    assert found == {
        0: Waiting(0, 420, "_REDUCE_SCATTER_BASE", 8208384, 426, 419),
        1: Waiting(1, 423, "_REDUCE_SCATTER_BASE", 64, 424, 422),
    }
    assert {rank: one.number for rank, one in read(LOGS["two_a_step"]["lines"]).items()} == {0: 96117, 7: 64088}


def test_ranks_in_different_calls_are_out_of_step():
    kind, why = conclusion([*read(LOGS["out_of_step"]["lines"]).values()], LOGS["out_of_step"]["world_size"])
    assert kind == "out of step"
    assert why == (
        "rank 0 in _REDUCE_SCATTER_BASE number 420 (8,208,384 elements); "
        "rank 1 in _REDUCE_SCATTER_BASE number 423 (64 elements)."
    )


def test_one_rank_made_two_calls_a_step_where_another_made_three():
    log = LOGS["two_a_step"]
    per_step = {rank: one.number / log["step"] for rank, one in read(log["lines"]).items()}
    assert per_step == {0: pytest.approx(3, abs=1e-3), 7: pytest.approx(2, abs=1e-3)}


def test_who_says_nothing_is_named():
    waiting = [*read(LOGS["silent"]["lines"]).values()]
    kind, why = conclusion(waiting, 7)
    assert kind == "silent" and why.endswith("nothing from ranks 0, 4.")
    assert conclusion(waiting[:1], 2) == ("silent", "rank 1 in BROADCAST number 4 (112 elements); nothing from rank 0.")


def test_where_all_wait_in_one_call_nobody_is_blamed():
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
    with pytest.raises(ValueError, match=r"ranks \[118\] are not among 0 to 7"):
        conclusion([*watchdog_logs.read(lines).values()], 8)
