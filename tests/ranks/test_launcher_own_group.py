"""Promises about programs that make their own process group (`init=False`): ranks as fresh as those of torchrun."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from calls import all_is_well
from kernels import surroundings

from course_utils import WorkerError, launch

pytestmark = pytest.mark.guard(90)

NAMES = {  # what torchrun tells its workers
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
}
NOT_TOLD = {  # what else it sets: for its own agent, the store it serves, NCCL, and threads (ranks have theirs)
    "OMP_NUM_THREADS", "PYTHON_EXEC", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE", "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS",
}
DIFFER = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}


def test_every_program_has_fresh_ranks_also_after_a_failure_and_so_has_the_call_after_it():
    def program(fails=False):
        dist.init_process_group("gloo")
        if fails and dist.get_rank() == 0:
            raise ValueError("stop")
        x = torch.ones(1)
        dist.all_reduce(x)
        return os.getpid(), x.item()

    seen = set(launch(os.getpid, world_size=2))
    for world_size in (2, 3, 2):
        pids, sums = zip(*launch(program, world_size=world_size, init=False), strict=True)
        assert sums == (float(world_size),) * world_size
        assert not seen & set(pids)
        seen |= set(pids)
        if world_size == 3:
            with pytest.raises(WorkerError, match="ValueError: stop"):
                launch(program, True, world_size=2, init=False)
    after = launch(os.getpid, world_size=2)
    assert not seen & set(after)
    all_is_well(2)
    assert launch(os.getpid, world_size=2) == after


PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist


def main():
    environment = dict(os.environ) | {"launched": dist.is_torchelastic_launched()}
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    net = torch.nn.Linear(4, 1)
    for step in range(3):
        loss = net(torch.full((2, 4), float(rank + step))).square().mean()
        net.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.data -= 0.01 * p.grad / dist.get_world_size()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [rank, int(os.environ["LOCAL_RANK"])])
    dist.barrier()
    dist.destroy_process_group()
    return [net.weight.flatten().tolist(), gathered, loss.item()], environment


if __name__ == "__main__":
    with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
        json.dump(main(), file)
"""


def test_an_unchanged_torchrun_program_finds_what_torchrun_tells_it_and_computes_the_same(tmp_path, monkeypatch):
    script = tmp_path / "a_program.py"
    script.write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    import a_program

    clean = surroundings(tmp_path) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run([*command, str(tmp_path)], env=clean, check=True, capture_output=True, timeout=200)
    before = set(os.environ)
    ours = launch(a_program.main, world_size=2, init=False)
    again = launch(a_program.main, world_size=2, init=False)
    assert [result for result, _ in again] == [result for result, _ in ours]
    for rank, (result, here) in enumerate(ours):
        expected, there = json.loads((tmp_path / str(rank)).read_text())
        assert result == expected
        assert here["launched"] is there["launched"] is True
        added = set(there) - set(clean) - {"launched"}
        assert added >= NAMES and added - NOT_TOLD == NAMES
        assert NAMES <= set(here)
        assert {n for n in set(here) - before if n.startswith(("TORCHELASTIC", "ROLE", "GROUP"))} <= NAMES
        for name in NAMES - DIFFER:
            assert here[name] == there[name], name
        assert here["MASTER_ADDR"] in ("127.0.0.1", "localhost") and 0 < int(here["MASTER_PORT"]) < 65536
        assert here["TORCHELASTIC_RUN_ID"]


def test_what_python_does_at_the_end_of_a_program_is_done(tmp_path):
    def program():
        rank = os.environ["RANK"]

        def write(what):
            (tmp_path / f"{what}{rank}").write_text("written")

        def later():
            time.sleep(0.5)
            write("thread")

        atexit.register(write, "exit")
        threading.Thread(target=later).start()
        log = (tmp_path / f"log{rank}").open("w")
        log.write("written")
        atexit.left_open = log  # as a module's variable: nothing closes it

    launch(program, world_size=2, init=False)
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert files == dict.fromkeys(("exit0", "exit1", "log0", "log1", "thread0", "thread1"), "written")
