"""What scripts/where.py says of records and stacks, and that it disturbs nobody."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest

from course_utils.programs import SCRIPTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="where.py reads /proc")
WHERE = SCRIPTS / "where.py"


def test_a_signal_goes_only_to_who_expects_it():
    """Nobody is ended: a process that has not prepared anything gets no SIGUSR1."""
    command, environment = [sys.executable, "-c", "import time; time.sleep(600)"], {**os.environ, "RANK": "0"}
    with subprocess.Popen(command, env=environment) as rank:
        said = subprocess.check_output([sys.executable, WHERE, "--pause=1", str(rank.pid)], text=True)
        assert rank.poll() is None and "rank 0  pid" in said and "missing for rank 0: no stack" in said
        rank.kill()


# --- the verdict, from records and stacks as ranks give them


def entry(op: str, number: int, over: bool = True, group: str = "0", sizes: list | None = None) -> dict:
    return {"process_group": (group, "default_pg" if group == "0" else "undefined"), "collective_seq_id": number,
            "profiling_name": f"nccl:{op}", "input_sizes": sizes or [[4]], "input_dtypes": ["Float"], "retired": over}


def verdict(*ranks: tuple[list[dict], list[tuple[str, int, str]]], groups: dict[str, list[int]] | None = None) -> str:
    """What is said of ranks that all wait, with these collectives and stacks."""
    names = runpy.run_path(str(WHERE))
    groups = groups or {"0": [*range(len(ranks))]}
    everybody = [names["Rank"](n, 100 + n, "waits", [[names["Frame"](*frame) for frame in stack]], entries, groups)
                 for n, (entries, stack) in enumerate(ranks)]
    return names["report"](everybody).splitlines()[-1]


def stack(function: str, line: int) -> list[tuple[str, int, str]]:
    library = "/x/site-packages/torch/distributed/"
    frames = [(library + "distributed_c10d.py", 1, function), (library + "c10d_logger.py", 1, "wrapper")]
    return [*frames, ("/home/train.py", line, "step")]


def test_a_rank_that_is_behind_in_a_sub_group_is_told_by_its_members():
    waits = [entry("all_reduce", 1), entry("all_gather", 3, False, group="5")], stack("all_gather", 4)
    behind = [entry("all_reduce", 1), entry("all_gather", 2, group="5")], stack("barrier", 7)
    outside = [entry("all_reduce", 1)], stack("all_reduce", 9)
    said = verdict(outside, waits, behind, groups={"0": [0, 1, 2], "5": [1, 2]})
    assert said == ("look at rank 2: rank 1 called all_gather #3 of group 5, rank 2 did not: "
                    "rank 2 stands in barrier at train.py:7 in step.")


def test_ranks_that_all_wait_for_a_message_are_shown():
    assert verdict(([], stack("recv", 5)), ([], stack("recv", 5))).startswith(
        "look at ranks 0, 1: all of them wait for a message of another, in a circle: "
        "rank 0 stands in recv at train.py:5 in step")


def test_the_program_to_take_to_work_is_short_and_needs_no_course():
    text = WHERE.read_text()
    assert text.count("\n") <= 570 and "course_utils" not in text
    assert runpy.run_path(str(WHERE))["find"]
