"""Promises about programs that make their own process group (`init=False`): ranks as fresh as those of torchrun."""

from __future__ import annotations

import atexit
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

from course_utils import launch, record

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


def test_every_program_has_fresh_ranks_and_so_has_the_call_after_it():
    def program():
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        return os.getpid(), x.item()

    seen = set(launch(os.getpid, world_size=2))
    for world_size in (2, 2, 3):
        pids, sums = zip(*launch(program, world_size=world_size, init=False), strict=True)
        assert sums == (float(world_size),) * world_size
        assert not seen & set(pids)
        seen |= set(pids)
    after = launch(os.getpid, world_size=2)
    assert not seen & set(after)
    all_is_well(2)
    assert launch(os.getpid, world_size=2) == after


def test_state_that_a_library_keeps_is_gone_the_next_time():
    def program():
        import this_library_keeps_state as library

        library.used = getattr(library, "used", 0) + 1
        torch.utils.used = getattr(torch.utils, "used", 0) + 1
        return library.used, torch.utils.used

    def make():
        import sys
        import types

        sys.modules["this_library_keeps_state"] = types.ModuleType("this_library_keeps_state")
        return program()

    for init in (False, False, True, False):
        assert launch(make, world_size=2, init=init) == [(1, 1)] * 2


def test_a_program_that_fails_leaves_nothing_to_the_next():
    def program(fails):
        dist.init_process_group("gloo")
        if fails and dist.get_rank() == 0:
            raise ValueError("stop")
        dist.barrier()
        return os.getpid()

    with pytest.raises(Exception, match="ValueError: stop"):
        launch(program, True, world_size=2, init=False)
    first = launch(program, False, world_size=2, init=False)
    assert not set(first) & set(launch(program, False, world_size=2, init=False))
    all_is_well(2)


def test_the_environment_of_a_program_is_that_of_torchrun(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, json, torch.distributed as dist\n"
        "env = dict(os.environ) | {'launched': dist.is_torchelastic_launched()}\n"
        f"json.dump(env, open({str(tmp_path)!r} + '/' + env['RANK'], 'w'))\n"
    )
    clean = surroundings(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run(command, env=clean, check=True, capture_output=True, timeout=80)

    def program():
        return dict(os.environ) | {"launched": dist.is_torchelastic_launched()}

    import json

    before = set(os.environ)
    for rank, here in enumerate(launch(program, world_size=2, init=False)):
        there = json.loads((tmp_path / str(rank)).read_text())
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
        cycle = [log]
        cycle.append(cycle)

    for _ in range(2):
        launch(program, world_size=2, init=False)
        files = sorted(tmp_path.iterdir())
        assert [file.name for file in files] == ["exit0", "exit1", "log0", "log1", "thread0", "thread1"]
        for file in files:
            assert file.read_text() == "written"
            file.unlink()


def test_a_program_chooses_how_processes_start_and_how_much_torch_checks():
    def program():
        torch.multiprocessing.set_start_method("spawn")
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.init_process_group("gloo")
        return dist.get_debug_level().name

    def other():
        dist.init_process_group("gloo")
        return torch.multiprocessing.get_start_method(allow_none=True), dist.get_debug_level().name

    assert launch(program, world_size=2, init=False) == ["DETAIL"] * 2
    assert launch(other, world_size=2, init=False) == [(None, "OFF")] * 2
    all_is_well(2)


# --- what keeps a group of an earlier call in mind -----------------------------------------------------------------


def test_differentiable_collectives_work_on_other_numbers_of_ranks():
    def work():
        import torch.distributed.nn.functional as functional

        x = torch.tensor([2.0 + dist.get_rank()], requires_grad=True)
        total = functional.all_reduce(x)
        total.backward()
        parts = functional.all_gather(x)
        return total.item(), x.grad.item(), len(parts)

    for n in (2, 3, 2):
        assert launch(work, world_size=n) == [(2.0 * n + n * (n - 1) / 2, float(n), n)] * n


@pytest.mark.parametrize("recorded", [False, True])
def test_a_sparse_all_reduce_works(recorded):
    def work():
        rank = dist.get_rank()
        x = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 5.0], (4,))
        if recorded:
            with record() as ledger:
                dist.all_reduce(x)
            return x.to_dense().tolist(), len(ledger.entries)
        dist.all_reduce(x)
        return x.to_dense().tolist(), 1

    assert launch(work, world_size=2) == [([2.0, 5.0, 5.0, 0.0], 1)] * 2
    all_is_well(2)
