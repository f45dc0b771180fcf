"""What lesson 16 and its exercises say of hosts that fail, here and where there are no hosts and no Slurm."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT, missing
from notebook_runs import run_core

from course_utils.check import CheckFailed, answer_with
from lessons.multi_node import check
from lessons.multi_node.hosts import hosts_available, run_on_hosts

pytestmark = pytest.mark.guard(90)

AGENT = ("torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=node2:29500 "
         "--rdzv-id=1 --rdzv-conf=is_host=0,keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1 ")
STORE = """
import time
from torch.distributed import TCPStore
store = TCPStore("node2", 29500, is_master=True, wait_for_workers=False)
print("store is open", flush=True)
time.sleep(1000)
"""
STEPS = """
import os, pathlib, socket, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / socket.gethostname()).touch()
step = together = 0
while together < 30:
    step += 1
    print("step", step, "in a world of", os.environ["WORLD_SIZE"], flush=True)
    time.sleep(0.1)
    together += (folder / "node1").exists()
"""


def test_torchrun_makes_two_worlds_when_a_living_host_is_silent(tmp_path):
    """The rendezvous is on a third host, as a service of its own would be; both worlds go on to the end."""
    there, sentence = hosts_available()
    if not there:
        missing(sentence)
    (tmp_path / "store.py").write_text(STORE)
    (tmp_path / "steps.py").write_text(STEPS)
    agent = f"{AGENT}{tmp_path}/steps.py {tmp_path}"
    run = run_on_hosts([agent, agent, f"python {tmp_path}/store.py"], hosts=3, timeout=80, when=[
        ("store is open", "start node0"), ("node0 . step 3 in a world of 1", "unplug node0"),
        ("node0 unplugged", "start node1"), ("node1 . step 3 in a world of 1", "plug node0"),
        ("node[01] ended", "plug node2"), ("node[01] ended", "kill node2"),
    ])
    assert run.exit_codes == [0, 0, 137]
    lines = run.lines()
    assert len(run.lines("node0 . step")) > 30 and len(run.lines("node1 . step")) == 30
    back = lines.index("-- node0 plugged in: its cable is back")
    assert all(any(f"{host} | step" in line for line in lines[back:]) for host in ("node0", "node1"))


WITHOUT = """
from lessons.multi_node import slurm
from lessons.multi_node.hosts import results
results._trial = lambda: "this system has no network for hosts"
slurm.missing = lambda: ["munge", "slurm-wlm"]
"""


@pytest.mark.guard(300)
def test_lesson_runs_without_hosts_and_slurm(tmp_path, pytestconfig):
    """On one host with one rank for each of two; what needs more is recorded, and says so."""
    lesson_file = ROOT / "notebooks" / "16_multi_node.ipynb"
    cells = run_core(lesson_file, tmp_path, deeper=pytestconfig.getoption("thorough"), first=WITHOUT, world_size=2)
    text = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    assert any("this system has no network for hosts" in part for part in text[:4])
    assert len([part for part in text if "recorded" in part]) >= 4


# --- the checks of the exercises ----------------------------------------------------------------------------------


def refusal(name: str, edits: str | dict[str, str]) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        getattr(check, name)(answer_with("lessons.multi_node.answers", name, edits))
    return caught.value


FLAT = check.MISTAKES["hierarchical_mean"]["flat"][1][1]
AS_FOUND = check.told("LOCAL_RANK", "LOCAL_WORLD_SIZE", check.OWN_NAME)


def test_without_hosts_the_ledger_and_what_ranks_say_decide(monkeypatch, capsys):
    monkeypatch.setattr(check, "hosts_available", lambda: (False, "hosts need Linux"))
    assert refusal("hierarchical_mean", FLAT).hint == "flat"
    assert refusal("join", AS_FOUND).hint == "two-worlds"
    for name in ("hierarchical_mean", "join"):
        getattr(check, name)(answer_with("lessons.multi_node.answers", name))
        assert re.fullmatch(r"Exercise \d passed.* not (measured|tried): hosts need Linux\.\n", capsys.readouterr().out)
