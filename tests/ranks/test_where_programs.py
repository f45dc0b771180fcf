"""scripts/where.py on programs and patients of the clinic that hang, where it names the rank, and on some that do not.

One torchrun: its ranks import torch once and fork a rank for each program.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from course_utils.programs import SCRIPTS
from lessons.debugging_hangs.clinic import hangs

pytestmark = [pytest.mark.guard(240), pytest.mark.skipif(sys.platform != "linux", reason="where.py reads /proc")]
RANKS = 3
x = torch.ones(4)
folder = ""  # of the programs, in the file below

WARD = """
import contextlib, os, signal, sys, threading, time
sys.path.insert(0, {scripts!r})
import torch
import torch.distributed as dist
import where

folder, x = {folder!r}, torch.ones(4)

{functions}

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for name, program in {programs}.items():
    if os.fork() == 0:
        own = folder + "/" + name
        where.listen(own)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method="file://" + own + "/store", rank=rank, world_size=size)
        dist.barrier()
        open(own + "/began-" + str(rank) + "-" + str(os.getpid()), "w").close()
        program()
        break
time.sleep(600)
"""


def dead():
    if dist.get_rank() == 1:
        time.sleep(0.5)
        if os.fork() == 0:
            time.sleep(100)  # the child keeps the connections, as a loader's process does
        os._exit(0)
    dist.all_reduce(x)


def lock_in_a_thread():
    lock = threading.Lock()
    lock.acquire() if dist.get_rank() == 1 else None

    def log():
        with lock:
            dist.broadcast(x, src=0)

    logger = threading.Thread(target=log)
    logger.start()
    logger.join()


def group_of_some():
    if dist.get_rank() < 2:
        dist.new_group([0, 1])
    dist.new_group([0, 1, 2])


def never_waited():
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3 if dist.get_rank() == 1 else 4)]
    if dist.get_rank() == 1:
        time.sleep(600)  # upload
    for work in works:
        work.wait()


def unused_parameter():
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    rank = dist.get_rank()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return self.layers[0](x) if rank == 1 else self.layers[1](self.layers[0](x))

    net = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=1e-5)
    net(torch.ones(1, 4)).sum().backward()
    time.sleep(600)


def slow_disk():
    if dist.get_rank() == 1:
        os.mkfifo(name := f"{folder}/pipe")
        open(name)
    dist.all_reduce(x)


def trains():
    while True:
        while not os.path.exists(folder + "/trains/go"):  # so that it takes no time of the others
            time.sleep(0.05)
        sum(i for i in range(200_000))
        dist.all_reduce(x)


def computes_long():
    def one(n):
        for i in range(n):
            i * i

    def two(n):
        return [i * i for i in range(n)]

    while True:
        while not os.path.exists(folder + "/computes_long/go"):
            time.sleep(0.05)
        one(300_000)
        two(300_000)


#: The verdict on each.
HANGING = {
    dead: r"look at rank 1: .*rank 1 has ended",
    lock_in_a_thread: r"look at rank 1: .*rank 1 waits at .*with lock \(another thread",
    group_of_some: r"look at rank 2: the process groups differ: ",
    never_waited: r"look at rank 1: .*all_reduce #5.*rank 1 waits at .*upload",
    unused_parameter: r"look at rank 1: .*rank 1 waits at .*time.sleep",
    slow_disk: r"look at rank 1: .*rank 1 waits at .*open\(name\)",
}
#: Patients of the clinic, with the ranks that may be blamed for each.
HANGING |= {
    case.program: rf"look at ranks? {case.details['rank'].accepted[0]}: "
    for case in hangs.CASES if case.cause in ("uneven batches", "order of groups", "error caught on one rank")
}
HEALTHY = {
    trains: "moving: ", computes_long: "moving: |no rank waits",
}


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for each program, with a file for each rank that has begun; its name has the PID."""
    folder = tmp_path_factory.mktemp("ward")
    chosen = [*HANGING, *HEALTHY]
    for function in chosen:
        (folder / function.__name__).mkdir()
    file = folder / "ward.py"
    functions = "\n\n".join(inspect.getsource(function) for function in chosen)
    programs = "{" + ", ".join(f"{f.__name__!r}: {f.__name__}" for f in chosen) + "}"
    file.write_text(WARD.format(scripts=str(SCRIPTS), functions=functions, programs=programs, folder=str(folder)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "log").open("w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    yield folder
    for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.send_signal(signal.SIGKILL)
    agent.wait()


def where(*arguments: object, pause: float = 1) -> str:
    command = [sys.executable, str(SCRIPTS / "where.py"), f"--pause={pause}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout or done.stderr


def begun(ward: Path, name: str) -> list[str]:
    end = time.monotonic() + 100
    while len(files := sorted((ward / name).glob("began-*"))) < RANKS:
        assert time.monotonic() < end, (ward / "log").read_text()[-2000:]
        time.sleep(0.05)
    return [file.name.rpartition("-")[2] for file in files]


@pytest.mark.parametrize("program", HANGING, ids=lambda program: program.__name__)
def test_who_is_at_fault_is_named(ward: Path, program):
    pids, end, said = begun(ward, program.__name__), time.monotonic() + 60, ""
    while not re.search(HANGING[program], said) and time.monotonic() < end:
        said = where(*pids)
    assert re.search(HANGING[program], said), said


def test_ranks_of_a_torchrun_are_found_by_its_command(ward: Path):
    """What they do, these have not prepared to tell. That one is found by its PID, lesson 14 shows."""
    begun(ward, "slow_disk")
    said = where("--torchrun", re.escape(str(ward)))
    assert re.findall(r"^rank (\d)  pid", said, re.MULTILINE) == ["0", "1", "2"], said


def test_hosts_that_were_asked_one_by_one_are_compared(ward: Path, tmp_path: Path):
    """Each sees some of the ranks only, and cannot tell; their answers together can."""
    pids = begun(ward, "slow_disk")
    hosts = [tmp_path / "a.json", tmp_path / "b.json"]
    for host, some in zip(hosts, (pids[::2], pids[1:2]), strict=True):
        host.write_text(where("--json", *some))
    alone, both = where("--merge", hosts[0]), where("--merge", *hosts)
    assert "ranks 0, 2 called all_reduce #2 of the default group, and so must rank 1, not looked at yet" in alone
    assert re.search(HANGING[slow_disk], both), both
    assert "is on" in where("--merge", hosts[0], hosts[0])


@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.__name__)
def test_a_healthy_job_is_not_accused(ward: Path, program):
    pids = begun(ward, program.__name__)
    go = ward / program.__name__ / "go"
    go.touch()
    time.sleep(1)
    said = where(*pids, pause=3)
    go.unlink()
    assert "look at" not in said and re.search(HEALTHY[program], said), said


# --- as NCCL behaves: ranks spin in a call that needs a result, and a thread of C++ answers through a pipe

SPINS = """
import faulthandler, functools, hashlib, os, pickle, signal, sys, threading, time
folder, rank = sys.argv[1], int(os.environ["RANK"])
faulthandler.register(signal.SIGUSR1, file=open(f"{folder}/stack_{rank}", "w"))
os.mkfifo(f"{folder}/pipe_{rank}.pipe")
pipe = os.open(f"{folder}/pipe_{rank}.pipe", os.O_RDONLY | os.O_NONBLOCK)

def call(number, over):
    return {"is_p2p": False, "retired": over, "state": "completed" if over else "started", "record_id": number,
            "process_group": ("0", "default_pg"), "collective_seq_id": number, "profiling_name": "nccl:all_reduce",
            "input_sizes": [[4]], "input_dtypes": ["Float"], "time_created_ns": number,
            "frames": [{"filename": sys.argv[0], "line": 2, "name": "step"}]}

def monitor():  # in place, not at once
    while True:
        time.sleep(0.05)
        if os.read(pipe, 128):
            record = {"entries": [call(1, True)] + [call(2, False)] * (rank != 1),
                      "pg_config": {"0": {"ranks": "[0, 1, 2]"}}}
            data = pickle.dumps(record)
            with open(f"{folder}/rank_{rank}", "wb", buffering=0) as file:
                file.write(data[:40])
                time.sleep(0.2)
                file.write(data[40:])

class Loss:
    item = functools.partial(hashlib.pbkdf2_hmac, "sha256", b"", b"", 2**31 - 1)  # in C, without Python's lock

threading.Thread(target=monitor, daemon=True).start()
open(f"{folder}/ready_{rank}", "w").close()
if rank == 1:
    time.sleep(600)  # reads data
loss = Loss()
loss.item()
"""


def test_a_rank_that_spins_in_a_call_for_a_result_waits(tmp_path: Path):
    (tmp_path / "spins.py").write_text(SPINS)
    command = [sys.executable, str(tmp_path / "spins.py"), str(tmp_path)]
    ranks = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank in range(RANKS)]
    try:
        while len([*tmp_path.glob("ready_*")]) < RANKS:
            time.sleep(0.05)
        said, end = "", time.monotonic() + 60
        while "look at rank 1: " not in said and time.monotonic() < end:
            said = where(*(rank.pid for rank in ranks))
        assert re.search(r"rank 1 waits at spins.py:\d+ in <module>: time.sleep", said), said
        assert re.search(r"^rank 0 .*waits  spins.py:\d+ in <module>: loss.item", said, re.MULTILINE), said
        for told in (said, where("--records", tmp_path)):  # of living ranks, and of what dead ones have left
            assert "look at rank 1: ranks 0, 2 called all_reduce #2 of the default group, rank 1 did not" in told
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_ranks_of_srun_are_found_without_torchrun(tmp_path: Path):
    names = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    clean = {name: value for name, value in os.environ.items() if name != "RANK"}
    sleeps = f"{sys.executable} -c 'import time; time.sleep(600)'; :"
    with subprocess.Popen(["sh", "-c", sleeps], env=clean | names) as task:
        while not (children := psutil.Process(task.pid).children()) or children[0].cmdline()[:1] != [sys.executable]:
            time.sleep(0.05)  # the shell's child becomes Python a moment after it is there
        said = subprocess.run([sys.executable, str(SCRIPTS / "where.py"), "--pause=1"], capture_output=True, text=True,
                              env=clean | names)
        children[0].kill()
    assert f"rank 1  pid {children[0].pid}  waits" in said.stdout and "nothing can be told" in said.stdout, said
    assert "1 more ranks are on other hosts" in said.stderr
