"""The Slurm cluster of lesson 16: two hosts, jobs over both, a job that runs again, and nothing left behind."""

import os
import subprocess
import sys
import time

import pytest

from lessons.multi_node import slurm
from lessons.multi_node.slurm import SlurmCluster

if slurm.missing() and not os.environ.get("CI"):
    pytest.skip(f"needs the packages {', '.join(slurm.missing())}", allow_module_level=True)


@pytest.fixture(scope="module")
def cluster():
    with SlurmCluster(hosts=2) as cluster:
        yield cluster


def namesakes(pid: int) -> list[int]:
    """The processes in the same process-id namespace as `pid`."""
    space = os.readlink(f"/proc/{pid}/ns/pid")
    return [other for other in map(int, filter(str.isdigit, os.listdir("/proc"))) if _space(other) == space]


def _space(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def test_a_command_that_fails_says_why(cluster, tmp_path):
    with pytest.raises(RuntimeError, match="exit status 1\nsbatch: error: .*no-such-file"):
        cluster.submit(tmp_path / "no-such-file")
    job = cluster.submit("--wrap=sleep 60")
    with pytest.raises(RuntimeError, match=rf"Job {job} is (PENDING|RUNNING) \(None\) after 0 s"):
        cluster.wait(job, timeout=0)
    cluster.run(f"scancel {job}")
    assert cluster.wait(job)["JobState"] == "CANCELLED"
    with pytest.raises(RuntimeError, match="sleep 60: no end within 0.5 s"):
        cluster.run("sleep 60", timeout=0.5)


def test_nothing_is_left_when_the_process_is_killed():
    program = ("from lessons.multi_node.slurm import SlurmCluster\n"
               "cluster = SlurmCluster()\n"
               "cluster.run('sbatch --wrap \"sleep 600\"')\n"
               "print(cluster.process, flush=True)\n"
               "input()\n")
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as kernel:
        first = int(kernel.stdout.readline())
        everybody = namesakes(first)
        assert len(everybody) >= 5  # process 1, munged, slurmctld and two slurmd
        space = _space(first)
        kernel.kill()
    while any(_space(pid) == space for pid in everybody):
        time.sleep(0.05)


def test_a_missing_package_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setitem(slurm.PROGRAMS, "no-such-program", "no-such-package")
    with pytest.raises(RuntimeError, match="sudo apt-get install --no-install-recommends no-such-package"):
        SlurmCluster()
