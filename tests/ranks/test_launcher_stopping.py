"""Promises about ranks that were stopped: in the middle of an import, while they start, while they end."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from calls import all_is_well, failure
from kernels import Kernel

from course_utils import WorkerError, launch, shutdown
from course_utils.ranks import processes

pytestmark = pytest.mark.guard(90)

TALK = """
def talk():
    x = torch.tensor([dist.get_rank()])
    dist.all_reduce(x)
    return x.item()
"""
IMPORTS = "import os, signal, threading, time\nimport torch\nimport torch.distributed as dist\n"
IMPORTS += "from course_utils import launch, shutdown\n%load_ext course_utils\n" + TALK


def works(kernel: Kernel, world_size: int = 3) -> None:
    total = world_size * (world_size - 1) // 2
    for _ in range(2):
        assert kernel.good(f"launch(talk, world_size={world_size})").value == str([total] * world_size)


@pytest.fixture(scope="module")
def kernel():
    with Kernel() as kernel:
        kernel.good(IMPORTS)
        yield kernel


# --- in the middle of an import ------------------------------------------------------------------------------------


def half_importable(folder: Path, kind: str) -> Path:
    """Write a package `halfway` that is imported only once a file is there, which is returned.

    A second attempt finds its sub-module imported, but not as its attribute: as sympy and torch._dynamo do.
    """
    package, gate = folder / kind / "halfway", folder / "gate"
    package.mkdir(parents=True)
    (package / "part.py").write_text("value = 7\n")
    (package / "__init__.py").write_text(f"""
import os, time
import halfway.part
open({str(folder / "begun")!r}, "w").close()
print("half", flush=True)
while not os.path.exists({str(gate)!r}):
    time.sleep(0.01)
value = halfway.part.value
""")
    return gate


def test_a_rank_stopped_in_the_middle_of_an_import_can_import_afterwards(tmp_path, monkeypatch):
    gate = half_importable(tmp_path, "site-packages")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    shutdown()  # ranks that have imported another of that name

    def use():
        import halfway

        return halfway.value

    def stops():
        if dist.get_rank() == 2:
            time.sleep(0.5)
            raise ValueError("my bug")
        use()

    assert failure(WorkerError, stops).rank == 2
    gate.touch()
    assert launch(use, world_size=4) == launch(use, world_size=4) == [7] * 4


# --- in cells on ranks, which keep their names ---------------------------------------------------------------------

AFRESH = r"rank 1\b[^\n]*\bstarts? afresh[^\n]*names"


def test_a_cell_says_which_rank_starts_afresh_without_its_names(kernel):
    kernel.good("%%ranks --world-size 3\nimport sys, time\nx = rank * 2")
    body = "    while True:\n        try: time.sleep(1000)\n        except BaseException: pass"
    cell = kernel.run(f"%%ranks --timeout 1\nif rank == 1:\n{body}\ndist.barrier()")
    assert cell.error_name == "HangError"
    after = kernel.good("%%ranks\nprint(globals().get('x', 'no x'))\nsum = torch.ones(1)\ndist.all_reduce(sum)\nsum")
    told = cell.out + cell.error + after.out
    assert len(re.findall(AFRESH, told)) == 1, told
    assert not re.search(r"ranks? [02]\b[^\n]*afresh", told), told
    for line in ("[rank 0] 0", "[rank 1] no x", "[rank 2] 4", "[ranks 0-2] tensor([3.])"):
        assert line in after.out
    again = kernel.good("%%ranks\nrank")
    assert "afresh" not in again.out


# --- interrupts while ranks end, start and are sent to -------------------------------------------------------------


def test_an_interrupt_of_shutdown_strikes_when_the_ranks_have_ended(monkeypatch):
    pids = launch(os.getpid, world_size=2)
    kill = processes.kill

    def interrupted(workers):
        os.kill(os.getpid(), signal.SIGINT)
        kill(workers)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(processes, "kill", interrupted)
        shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    all_is_well()


def test_shutdown_ends_the_call_of_another_thread(tmp_path):
    said = []

    def stay():
        (tmp_path / str(dist.get_rank())).touch()
        time.sleep(80)

    def call():
        try:
            launch(stay, world_size=2)
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.05)
    with pytest.raises(RuntimeError, match=r"another launch is running on the ranks; .* end it: shutdown\(\)"):
        launch(os.getpid)
    shutdown()
    thread.join()
    assert said == ["shutdown() has ended the ranks of this call"]
    all_is_well()
