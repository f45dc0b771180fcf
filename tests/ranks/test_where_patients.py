"""scripts/where.py names the rank at fault in every patient of the clinic that hangs, under plain torchrun.

One torchrun for each number of ranks: what it has started imports torch and forks a rank for each patient.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from course_utils.programs import SCRIPTS, examine, torchrun_job
from lessons.debugging_hangs.clinic import hangs

pytestmark = [pytest.mark.guard(180), pytest.mark.skipif(sys.platform != "linux", reason="where.py reads /proc")]

HANGING = [number for number, case in enumerate(hangs.CASES, 1) if "failed" not in case.facts["differs"]
           and case.facts["stands"].count("ended") < case.conditions]

WARD = """
import os, sys, time
sys.path.insert(0, {scripts!r})
import torch
import torch.distributed as dist
import where

{functions}

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for number, program in {programs}.items():
    if os.fork() == 0:
        folder = {folder!r} + "/" + str(number)
        where.listen(folder)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=rank, world_size=size)
        dist.barrier()
        open(folder + "/began-" + str(rank) + "-" + str(os.getpid()), "w").close()
        program()
        break
time.sleep(600)
"""


@pytest.fixture(scope="module")
def wards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for each patient, with a file for each rank that has begun; its name has the PID."""
    folder, agents = tmp_path_factory.mktemp("wards"), []
    for size in {hangs.CASES[number - 1].conditions for number in HANGING}:
        cases = {n: hangs.CASES[n - 1] for n in HANGING if hangs.CASES[n - 1].conditions == size}
        programs = ", ".join(f"{number}: {case.program.__name__}" for number, case in cases.items())
        functions = "\n\n".join(inspect.getsource(case.program) for case in cases.values())
        file = folder / f"ward{size}.py"
        file.write_text(WARD.format(scripts=str(SCRIPTS), functions=functions, programs=f"{{{programs}}}",
                                    folder=str(folder)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (folder / f"log{size}").open("w") as log:
            agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
    yield folder
    for agent in agents:
        for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        agent.wait()


def test_most_patients_hang():
    assert HANGING == [1, 2, 3, 4, 5, 6, 8, 10, 11, 13, 14]


@pytest.mark.parametrize("number", HANGING)
def test_the_culprit_is_named_under_torchrun(wards: Path, number: int):
    case = hangs.CASES[number - 1]
    end = time.monotonic() + 100
    while len(began := [*(wards / str(number)).glob("began-*")]) < case.conditions:
        assert time.monotonic() < end, (wards / f"log{case.conditions}").read_text()[-2000:]
        time.sleep(0.05)
    command = [sys.executable, str(SCRIPTS / "where.py"), *(file.name.rpartition("-")[2] for file in began)]
    ranks, said = set(case.details["rank"].accepted), ""
    while not _told(case.cause, ranks, said):  # a rank that has just begun may not have come to where it hangs
        assert time.monotonic() < end, said
        said = subprocess.run(command, capture_output=True, text=True).stdout


def _told(cause: str, guilty: set[int], said: str) -> bool:
    """Whether the rank at fault is named, or, of different roots, the call: a flight record holds no roots."""
    found = re.search(r"^look at ranks? ([\d, ]+):", said, re.MULTILINE)
    if cause == "different roots":
        return found is None and "compare what no record holds, the root" in said and "have called reduce" in said
    return found is not None and {int(rank) for rank in found[1].split(", ")} <= guilty


def test_a_job_that_ends_at_once_is_told():
    def fails():
        raise ValueError("no data")

    with pytest.raises(RuntimeError, match="ValueError: no data|no rank found"), torchrun_job(fails, 2) as pid:
        examine(pid)
