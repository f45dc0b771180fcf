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


def test_each_host_has_its_name_and_address(cluster):
    said = cluster.run("srun --nodes=2 --label sh -c 'hostname; ip -4 -o address show eth0'").splitlines()
    assert {line.partition(": ")[2] for line in said if "eth0" not in line} == {"node0", "node1"}
    assert sorted(line.split()[4] for line in said if "eth0" in line) == ["10.97.0.1/24", "10.97.0.2/24"]


def test_a_job_that_asks_for_it_runs_again(cluster, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/bash\n'
                      f'#SBATCH --nodes=2 --requeue --open-mode=append --output={tmp_path}/%j.out\n'
                      'echo "restart ${SLURM_RESTART_COUNT:-0} with $1 and $WORD"\n'
                      'if [ -z "$SLURM_RESTART_COUNT" ]; then scontrol requeue $SLURM_JOB_ID; sleep 60; fi\n'
                      'srun hostname\n')
    job = cluster.submit("--time=5", script, "argument", env={"WORD": "environment"})
    said = cluster.wait(job)
    assert (said["JobState"], said["Restarts"], said["TimeLimit"]) == ("COMPLETED", "1", "00:05:00")
    first, second, *hosts = (tmp_path / f"{job}.out").read_text().splitlines()
    assert first == "restart 0 with argument and environment"
    assert "restart 1 with argument and environment" in [second, *hosts]
    assert {"node0", "node1"} <= {second, *hosts}


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
