"""Ranks on the nodes of a real Ray cluster, from a real kernel: the contract of `launch`, and what differs there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from calls import says
from conftest import ROOT, missing
from kernels import MARK, Kernel, Script, marked, surroundings
from notebook_runs import run_core
from ray_cluster import LOOPBACK

from course_utils import launch

pytestmark = pytest.mark.guard(120)

IMPORTS = f"""{LOOPBACK}
import os, re, signal, sys, time
import torch
import torch.distributed as dist
from course_utils import launch, record

def add():
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)
"""


class Cluster:
    """Two nodes, in a process of their own."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of sockets in it may not be long
        self.env = surroundings(self.folder, RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0")
        command = [sys.executable, str(ROOT / "tests" / "ray_cluster.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=self.env, text=True, start_new_session=True, **pipes)
        self.address = self.line_with("address").split()[1]
        self.for_drivers = {"RAY_ADDRESS": self.address, "RAY_USAGE_STATS_ENABLED": "0", "COURSE_ON": "ray"}

    def line_with(self, text: str) -> str:
        for line in self.process.stdout:
            if text in line:
                return line
        raise AssertionError(f"the cluster ended without {text!r}")

    def end_second_node(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def servers(self) -> int:
        """Fork servers on its nodes."""
        return sum("forkserver" in " ".join(process.cmdline()) for process in marked(self.env[MARK]))

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(20)
        finally:
            for process in marked(self.env[MARK]):
                process.kill()
            self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster():
    try:
        import ray  # noqa: F401
    except ImportError:
        missing("Ray: make ray")
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def kernel(cluster):
    with Kernel(**cluster.for_drivers) as kernel:
        kernel.good(IMPORTS)
        yield kernel


def fails(kernel: Kernel, code: str, *parts) -> str:
    """A call that must fail and say so, after which the next works with the same four ranks."""
    cell = kernel.run(code)
    says(cell.error, *parts)
    assert "course_utils" not in cell.error and "raylet" not in cell.out + cell.err, cell
    assert kernel.good("launch(add, world_size=4)").value == "[4, 4, 4, 4]"
    return cell.out


@pytest.mark.guard(300)
@pytest.mark.parametrize("lesson", ["02_collectives", "04_ddp", "07_fsdp"])
def test_lessons_run_on_it(cluster, lesson, tmp_path, monkeypatch, pytestconfig):
    if not pytestconfig.getoption("thorough"):
        pytest.skip("--thorough runs lessons on Ray")
    for name, value in cluster.for_drivers.items():
        monkeypatch.setenv(name, value)
    run_core(ROOT / "notebooks" / f"{lesson}.ipynb", tmp_path, first=LOOPBACK)


# --- the contract --------------------------------------------------------------------------------------------------


def test_ranks_fill_one_node_after_the_other_and_are_told_as_by_torchrun(kernel):
    kernel.good("names = 'RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE'")
    kernel.good("def where():\n    print('here')\n    return [int(os.environ[name]) for name in names]")
    cell = kernel.good("launch(where, world_size=4)")
    assert cell.value == "[[0, 0, 3, 0, 2], [1, 1, 3, 0, 2], [2, 2, 3, 0, 2], [3, 0, 1, 1, 2]]"
    assert cell.out == "[ranks 0-3] here\n"


def test_ranks_stay_warm_are_counted_and_may_be_programs(kernel):
    kernel.good("pids = launch(os.getpid, world_size=4)")
    assert kernel.good("pids == launch(os.getpid, world_size=4)").value == "True"
    kernel.good("def count():\n    with record() as ledger:\n        add()\n    return ledger.bytes_sent()")
    assert kernel.good("launch(count, world_size=4)").value == "[6.0, 6.0, 6.0, 6.0]"
    kernel.good("def program():\n    dist.init_process_group('gloo')\n    return add()")
    assert kernel.good("launch(program, world_size=4, init=False)").value == "[4, 4, 4, 4]"


def test_the_first_error_a_death_and_an_exit_are_told_with_their_rank(kernel):
    kernel.good("def wrong():\n    if dist.get_rank() == 3:\n        raise ValueError('bad batch')\n    add()")
    table = "3     node1  failed", "0     node0  waits   all_reduce #1"
    fails(kernel, "launch(wrong, world_size=4)", "rank 3 on node1 failed: ValueError: bad batch", "line 3", *table)
    kernel.good("def die():\n    if dist.get_rank() == 2:\n        print('last')\n        os.kill(os.getpid(), 9)")
    out = fails(kernel, "launch(die, world_size=4)", "rank 2 on node0 died: killed by signal SIGKILL")
    assert "[rank 2] last" in out
    kernel.good("def end():\n    if dist.get_rank() == 3:\n        os._exit(5)\n    add()")
    fails(kernel, "launch(end, world_size=4)", "rank 3 on node1 died: the process ended itself with exit code 5")


def test_ranks_that_hang_or_hold_the_interpreter_are_shown_where_they_stand(kernel):
    kernel.good("def leave_out():\n    if dist.get_rank() != 1:\n        add()")
    head = "ranks 0,2,3 wait in all_reduce number 1; rank 1 never joined it"
    fails(kernel, "launch(leave_out, world_size=4, timeout=4)", "HangError: no result after 4 s", head)
    kernel.good("def hold():\n    if dist.get_rank() == 3:\n        re.match('(a+)+$', 'a' * 40 + 'b')")
    fails(kernel, "launch(hold, world_size=4, timeout=1)", "3     node1  no answer", "line 3: re.match")


def test_an_interrupt_stops_the_ranks_with_the_table(kernel):
    kernel.good("def sleep():\n    print('asleep')\n    time.sleep(60)")
    cell = kernel.interrupt(kernel.start_until("launch(sleep, world_size=4)", "asleep"))
    says(cell.error, "Interrupted: the ranks were stopped where they stood", "3     node1  runs")
    assert kernel.good("launch(add, world_size=4)").value == "[4, 4, 4, 4]"


# --- what is different there ---------------------------------------------------------------------------------------


def test_what_needs_the_notebooks_machine_says_so(kernel):
    refused = kernel.run("launch(add, world_size=4, verify=True, on='ray')")
    says(refused.error, "ValueError: verify= needs the notebook's own machine: leave out on='ray'")
    here = kernel.good("launch(add, world_size=2, verify=True)")
    assert here.value == "[2, 2]"
    assert here.out == "COURSE_ON=ray: a call with verify= runs on the notebook's own machine\n"


def test_another_torch_is_told_before_anything_runs(cluster):
    text = f"""{IMPORTS}
import importlib.metadata as metadata
usual, metadata.distribution = metadata.distribution, lambda name: Other if name == "torch" else usual(name)

class Other:
    version = "9.9.9"
try:
    launch(add, world_size=1)
except RuntimeError as error:
    print(error)
"""
    with Script(text, **cluster.for_drivers) as script:
        says(script.finish(), "(127.0.0.1) has torch 2.", ", the notebook has torch 9.9.9. Nothing has run.")


def test_a_second_notebook_waits_for_room_runs_beside_the_first_and_leaves_nothing_when_it_is_killed(cluster, kernel):
    assert kernel.good("launch(add, world_size=4)").value == "[4, 4, 4, 4]"
    servers = cluster.servers()
    text = f"""{IMPORTS}
try:
    launch(add, world_size=3, timeout=1)
except RuntimeError as error:
    print(error, flush=True)
launch(lambda: (print("beside", flush=True), time.sleep(100)), world_size=2, timeout=100)
"""
    with Script(text, **cluster.for_drivers) as second:
        second.read("no room on the cluster within 1 s: 3 ranks need a CPU each, and 2 of 6 are free.")
        second.read("[ranks 0,1] beside")
        assert kernel.good("launch(add, world_size=4)").value == "[4, 4, 4, 4]"
        assert cluster.servers() > servers
        second.process.kill()
        deadline = time.monotonic() + 60
        while cluster.servers() > servers and time.monotonic() < deadline:
            time.sleep(0.1)
        assert cluster.servers() == servers


def test_a_node_that_goes_is_told_and_the_rest_serves_the_next_call(cluster, kernel):
    assert kernel.good("launch(add, world_size=4)").value == "[4, 4, 4, 4]"
    kernel.good("def stay():\n    print('up')\n    time.sleep(100)\n    add()")
    cell = kernel.start_until("launch(stay, world_size=4, timeout=100)", "up")
    cluster.end_second_node()
    cell = kernel.pump(cell)
    says(cell.error, re.compile(r"rank \d on (node\d) died: its node \1 has gone, or Ray"), " runs  ")
    assert kernel.good("launch(add, world_size=3)").value == "[3, 3, 3]"


def test_when_its_kernel_is_killed_nothing_stays_on_the_nodes(cluster, kernel):
    assert kernel.good("launch(add, world_size=2)").value == "[2, 2]"
    kernel.kill()
    deadline = time.monotonic() + 60
    while cluster.servers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cluster.servers() == 0
    assert not list(Path(cluster.folder).glob("course-*"))


# --- without a cluster ---------------------------------------------------------------------------------------------


def test_other_engines_and_a_missing_ray_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="on is 'slurm'; allowed are 'ray' and 'here'"):
        launch(os.getpid, on="slurm")
    monkeypatch.setenv("COURSE_ON", "spark")
    with pytest.raises(ValueError, match="COURSE_ON is 'spark'"):
        launch(os.getpid)
    assert len(launch(os.getpid, world_size=1, on="here")) == 1
    monkeypatch.setattr("course_utils.ranks.on_ray.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="on='ray' needs Linux, and Ray, which `make ray` installs"):
        launch(os.getpid, on="ray")
