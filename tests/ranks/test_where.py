"""scripts/where.py names the rank to look at in jobs that hang, under torchrun as it stands."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

pytestmark = [
    pytest.mark.guard(180), pytest.mark.skipif(sys.platform != "linux", reason="where.py reads /proc"),
]
WHERE = ROOT / "scripts" / "where.py"
RANKS = 3

#: A rank says that it is about to hang by a file of its name; the test asks only then.
PROGRAM = """
import sys
import where
where.listen(sys.argv[1])
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
open(f"{sys.argv[1]}/ready-{dist.get_rank()}", "w").close()
if dist.get_rank() != 1:
    dist.all_reduce(x)  # skipped by one
dist.barrier()
dist.all_reduce(x)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[int]:
    """The process of torchrun, once all ranks are about to hang; its ranks are ended afterwards."""
    shutil.copy(WHERE, tmp_path / "where.py")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
               str(tmp_path / "program.py"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with open(tmp_path / "log", "w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    ranks: list[psutil.Process] = []
    try:
        while len([*tmp_path.glob("ready-*")]) < RANKS:
            assert agent.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        ranks = psutil.Process(agent.pid).children(recursive=True)
        yield agent.pid
    finally:
        for process in [agent, *ranks]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        agent.wait()


def where(*arguments: object) -> str:
    """What where.py says."""
    command = [sys.executable, str(WHERE), "--pause=1", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_is_found_by_torchruns_process_or_command_and_the_odd_rank_named(job: int, tmp_path: Path):
    expected = "look at rank 1: collective #2 of the default group differs: ranks 0, 2 all_reduce, rank 1 barrier"
    end, said = time.monotonic() + 60, ""
    while expected not in said and time.monotonic() < end:  # a rank that has just said so may not have come there
        said = where(job)
    assert expected in said and len(re.findall(r"^rank \d  pid \d+", said, re.MULTILINE)) == RANKS, said
    assert re.search("rank 1 .*dist.barrier", said), said
    assert expected in where("--torchrun", re.escape(str(tmp_path)))


def test_a_signal_goes_only_to_who_expects_it():
    """Nobody is ended: a process that has not prepared anything gets no SIGUSR1."""
    command, environment = [sys.executable, "-c", "import time; time.sleep(600)"], {**os.environ, "RANK": "0"}
    with subprocess.Popen(command, env=environment) as rank:
        said = where(rank.pid)
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
