"""What lesson 16 says of batch jobs without a cell that asserts it, and recordings in place of what cannot be."""

from __future__ import annotations

import time

import pytest
from conftest import missing

from course_utils import recordings
from course_utils.programs import SCRIPTS
from lessons.multi_node import answers, slurm
from lessons.multi_node.slurm import SlurmCluster

pytestmark = pytest.mark.guard(120)
SBATCH = SCRIPTS / "slurm" / "train.sbatch"


@pytest.fixture(scope="module")
def cluster():
    there, sentence = slurm.available()
    if not there:
        missing(sentence)
    with SlurmCluster(hosts=2) as cluster:
        yield cluster


# --- Slurm --------------------------------------------------------------------------------------------------------


def test_the_script_turns_slurms_variables_into_those_of_pytorch(cluster, tmp_path):
    program = tmp_path / "program"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    program.write_text("#!/bin/sh\necho $(hostname) " + " ".join(f"${name}" for name in names)
                       + " $SLURM_CPUS_PER_TASK $3 $4\n")
    program.chmod(0o755)
    said = tmp_path / "said"
    job = cluster.submit("--ntasks-per-node=2", f"--output={said}", SBATCH, "--out", "a folder",
                         env={"PYTHON": str(program)})
    assert cluster.job(job)["Requeue"] == "1"
    assert cluster.wait(job)["ExitCode"] == "0:0"
    port = str(20000 + job % 10000)
    assert sorted(said.read_text().splitlines()) == [
        f"node{rank // 2} {rank} {rank % 2} 4 2 node0 {port} 8 --out a folder" for rank in range(4)
    ]


def test_a_job_that_is_always_told_to_stop_does_not_start_for_ever(cluster, tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 75\n")
    program.chmod(0o755)
    variables = {"PYTHON": str(program), "MOST_RESTARTS": "1"}
    job = cluster.submit(f"--output={tmp_path / 'said'}", SBATCH, env=variables)
    ended = cluster.wait(job, timeout=100)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "75:0", "1")


def test_the_solution_of_the_exercise_is_requeued_by_slurm(cluster, tmp_path):
    program, said = tmp_path / "program", tmp_path / "said"
    program.write_text("#!/bin/bash\n[ -n \"$SLURM_RESTART_COUNT\" ] && exit 0\n"
                       "trap 'exit 75' TERM\necho ready\nwhile :; do sleep 0.1; done\n")
    program.chmod(0o755)
    (tmp_path / "job").write_text(answers.job_script(str(program)))
    job = cluster.submit(f"--output={said}", tmp_path / "job")
    while not said.exists() or 4 * "ready\n" not in said.read_text():
        time.sleep(0.05)
    cluster.run(f"scancel --signal=TERM {job}")
    ended = cluster.wait(job, timeout=100)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")


# --- recordings ---------------------------------------------------------------------------------------------------


def test_a_recording_stands_in_where_the_real_thing_cannot_be(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recordings, "FOLDER", tmp_path)
    monkeypatch.setenv("COURSE_RECORD", "1")
    assert recordings.real_or_recorded("name", lambda: {"pair": (1, 2)}, (True, "Program 1.2")) == {"pair": [1, 2]}
    monkeypatch.delenv("COURSE_RECORD")
    assert recordings.real_or_recorded("name", lambda: "another", (True, "Program 1.3")) == "another"
    assert capsys.readouterr().out == ""
    assert recordings.real_or_recorded("name", lambda: 1 / 0, (False, "There is no Program.")) == {"pair": [1, 2]}
    assert capsys.readouterr().out == "There is no Program. What follows was recorded with Program 1.2.\n"
