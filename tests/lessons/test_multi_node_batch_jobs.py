"""What lesson 16 says of batch jobs, of clusters and of frameworks without a cell that asserts it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import pytest
from conftest import missing

from course_utils import WorkerError, launch, recordings
from course_utils.programs import SCRIPTS, run_program
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


def until_running(cluster: SlurmCluster, path: Path, text: str) -> None:
    while not path.exists() or text not in path.read_text():
        time.sleep(0.05)


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


def test_the_launch_address_is_that_of_the_host_where_srun_was_typed(cluster, tmp_path):
    show = "srun --nodes=2 sh -c 'echo $SLURM_LAUNCH_NODE_IPADDR'"
    assert cluster.run(show).split() == 2 * ["10.97.0.254"]
    cluster.wait(cluster.submit("--nodes=2", f"--output={tmp_path / 'said'}", f"--wrap={show}"))
    assert (tmp_path / "said").read_text().split() == 2 * ["10.97.0.1"]


def test_torchrun_passes_sigterm_on_and_hides_the_exit_code(cluster, tmp_path):
    said = tmp_path / "said"
    worker = tmp_path / "worker"
    worker.write_text("#!/bin/bash\ntrap 'echo got TERM; exit 75' TERM\necho ready\nwhile :; do sleep 0.1; done\n")
    worker.chmod(0o755)
    torchrun = f"srun {sys.executable} -m torch.distributed.run --no-python {worker}"
    job = cluster.submit(f"--output={said}", f"--wrap={torchrun}")
    until_running(cluster, said, "ready")
    cluster.run(f"scancel --signal=TERM {job}")
    assert cluster.wait(job)["ExitCode"] == "1:0"
    assert "got TERM" in said.read_text()


@pytest.mark.parametrize(("signal", "ends"), [("TERM@60", ("COMPLETED", "1")), ("B:TERM@60", ("FAILED", "0"))])
def test_the_solution_is_requeued_by_slurm_and_what_the_check_refuses_is_not(cluster, tmp_path, signal, ends):
    program, said = tmp_path / "program", tmp_path / "said"
    program.write_text("#!/bin/bash\n[ -n \"$SLURM_RESTART_COUNT\" ] && exit 0\n"
                       "trap 'exit 75' TERM\necho ready\nwhile :; do sleep 0.1; done\n")
    program.chmod(0o755)
    (tmp_path / "job").write_text(answers.job_script(str(program)).replace("TERM@60", signal))
    job = cluster.submit(f"--output={said}", tmp_path / "job")
    until_running(cluster, said, 4 * "ready\n")
    cluster.run(f"scancel --signal=TERM {'--batch ' * signal.startswith('B')}{job}")
    ended = cluster.wait(job, timeout=100)
    assert (ended["JobState"], ended["Restarts"]) == ends


def test_whether_slurm_can_run_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setitem(slurm.PROGRAMS, "no-such-program", "no-such-package")
    there, sentence = slurm.available.__wrapped__()
    assert not there and sentence.startswith("Slurm ") and sentence.endswith(".") and sentence.count(".") == 1


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


# --- programs on ranks --------------------------------------------------------------------------------------------


def test_a_program_runs_on_ranks_as_under_torchrun(tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nprint('argument', sys.argv[1])\nrank = int(os.environ['RANK'])\n"
                       "if sys.argv[1] == 'sentence': sys.exit('it does not fit')\nif rank: sys.exit(75)\n")
    assert launch(run_program, program, "one", silent=True, world_size=2, init=False) == [0, 75]
    assert "argument" not in capsys.readouterr().out
    assert launch(run_program, program, "one", world_size=2, init=False) == [0, 75]
    assert "argument one" in capsys.readouterr().out
    with pytest.raises(WorkerError, match="it does not fit"):
        launch(run_program, program, "sentence", world_size=2, init=False)


# --- descriptions and frameworks ----------------------------------------------------------------------------------


def test_accelerate_calls_torchrun_with_the_place_that_you_give_it(monkeypatch):
    """The arguments that its launcher hands to torchrun, for the second of two hosts."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import launch as accelerate_launch

    place = ["--multi_gpu", "--num_machines=2", "--num_processes=4", "--machine_rank=1", "--main_process_ip=node0",
             "--main_process_port=29500", "--same_network", "--mixed_precision=no", "--dynamo_backend=no", "train.py"]
    args: argparse.Namespace = launch_command_parser().parse_args(place)
    accelerate_launch.prepare_multi_gpu_env(args)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "2", 1)
    assert (args.master_addr, args.master_port, args.rdzv_backend) == ("node0", "29500", "static")
