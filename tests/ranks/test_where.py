"""scripts/where.py names the rank to look at in jobs that hang, under torchrun as it stands."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shutil
import signal
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
import os, sys, time
case, folder = sys.argv[1:]
import where
if case != "unprepared":
    where.listen(folder)
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(4)

def ready():
    open(f"{folder}/ready-{rank}", "w").close()

def spin():
    ready()
    while True:
        pass

dist.all_reduce(x)
if case == "skips a collective":
    ready()
    if rank != 1:
        dist.all_reduce(x)  # skipped by one
    dist.barrier()
    dist.all_reduce(x)
elif case == "another order":
    first, second = dist.new_group(), dist.new_group()
    ready()
    for group in (second, first) if rank == 1 else (first, second):
        dist.all_reduce(x, group=group)
elif case == "dies":
    if rank == 1:
        if os.fork() == 0:  # as a loader's process does, it keeps the connections open
            ready()
            time.sleep(600)
        while not os.path.exists(f"{folder}/ready-1"):
            time.sleep(0.01)
        os._exit(0)
    ready()
    dist.all_reduce(x)
elif case == "recv without send":
    ready()
    if rank == 0:
        dist.recv(x, src=1)
    dist.barrier()
else:  # an endless loop
    if rank == 1:
        spin()
    ready()
    dist.all_reduce(x)
"""


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The process of torchrun, once all ranks are about to hang; its ranks are ended afterwards."""
    shutil.copy(WHERE, tmp_path / "where.py")
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = tmp_path / "flight"
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
               str(tmp_path / "program.py"), request.param, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with open(tmp_path / "log", "w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    ranks: list[psutil.Process] = []
    try:
        while len([*folder.glob("ready-*")]) < RANKS:
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


def settled(expected: str, *arguments: object) -> str:
    """The same, once a rank that has just said that it is ready has come to where it hangs."""
    end = time.monotonic() + 30
    while not re.search(expected, said := where(*arguments)) and time.monotonic() < end:
        time.sleep(0.2)
    assert re.search(expected, said), said
    return said


@pytest.mark.parametrize(("job", "expected", "line"), [
    ("skips a collective", r"look at rank 1: collective #2 of the default group differs: ranks 0, 2 all_reduce, "
                           r"rank 1 barrier", "rank 1 .*dist.barrier"),
    ("another order", r"look at rank 1: the ranks wait for each other, so the order of their calls differs: "
                      r"rank 0 waits in all_reduce #1 of group 1; rank 1 waits in all_reduce #1 of group 2", "group="),
    ("an endless loop", r"look at rank 1: ranks 0, 2 called all_reduce #2 of the default group, rank 1 did not: "
                        r"rank 1 computes at program.py:\d+ in spin: ", "rank 1 .*computes"),
    ("dies", r"look at rank 1: ranks 0, 2 called all_reduce #2 of the default group, rank 1 did not: rank 1 has ended",
     "rank 1 +gone"),
    ("recv without send", r"look at rank 0: ranks 1, 2 called barrier #2 of the default group, rank 0 did not: "
                          r"rank 0 stands in recv at program.py:\d+ in <module>: dist.recv\(x, src=1\)", "rank 0 .*"),
], indirect=["job"])
def test_the_odd_rank_is_named_with_its_line(job: int, expected: str, line: str):
    said = settled(expected, job)
    assert re.search(line, said), said
    living = 2 if "gone" in said else RANKS
    assert len(re.findall(r"^rank \d  pid \d+", said, re.MULTILINE)) == living


@pytest.mark.parametrize("job", ["unprepared"], indirect=True)
def test_a_job_that_has_prepared_nothing_still_shows_who_computes_or_is_stopped(job: int, tmp_path: Path):
    said = settled("look at rank 1: rank 1 computes", "--torchrun", re.escape(str(tmp_path)))
    assert "missing for ranks 0, 1, 2: no flight record: where.listen was not called" in said
    if shutil.which("py-spy") is None:
        assert "missing for ranks 0, 1, 2: no stack: " in said
    ranks = {child.environ()["RANK"]: child.pid for child in psutil.Process(job).children()}
    os.kill(ranks["1"], signal.SIGSTOP)
    assert "look at rank 1: rank 1 is stopped (SIGCONT lets it go on); rank 0 waits; " in where(*ranks.values())


def test_without_a_job_it_says_so():
    done = subprocess.run([sys.executable, str(WHERE), str(os.getpid())], capture_output=True, text=True)
    assert done.returncode == 1 and "no rank found" in done.stderr


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


def test_another_size_is_told_but_not_where_sizes_may_differ():
    over = entry("all_reduce", 1)
    said = verdict(*[([over, entry("all_reduce", 2, False, sizes=[[n]])], stack("all_reduce", 9)) for n in (4, 4, 8)])
    assert said.startswith("look at rank 2: collective #2 of the default group differs: ranks 0, 1 [[4]], rank 2 [[8]]")
    said = verdict(*[([over, entry("scatter", 2, False, sizes=[[n]])], stack("scatter", 9)) for n in (4, 0)])
    assert said.startswith("nothing can be told")


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


def test_what_a_line_has_called_is_the_function_that_programs_call():
    names, inner = runpy.run_path(str(WHERE)), stack("all_gather", 3)[0]
    frames = [names["Frame"](*frame) for frame in [inner, *stack("all_gather_object", 3)]]
    assert names["Rank"](0, 1, "waits", [frames]).call == "all_gather_object"


def test_the_program_to_take_to_work_is_short_and_needs_no_course():
    text = WHERE.read_text()
    assert text.count("\n") <= 570 and "course_utils" not in text
    assert runpy.run_path(str(WHERE))["find"]
