"""What lesson 16 and its exercises say of hosts that fail, here and where there are no hosts and no Slurm."""

from __future__ import annotations

import math
import re
import time

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, missing
from notebook_runs import run_core

from course_utils import launch, recorded
from course_utils.check import CheckFailed, answer_with
from lessons.multi_node import check
from lessons.multi_node.hosts import hosts_available, run_on_hosts

pytestmark = pytest.mark.guard(90)

TORCHRUN = "torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 "
QUICK = "--rdzv-id=1 --rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1 "
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
MEET = """
import pathlib, sys, time
import torch, torch.distributed as dist
worlds = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    with worlds.open("a") as file:
        file.write(str(dist.get_world_size()))
dist.barrier()
last, step = worlds.read_text().endswith(sys.argv[2]), 0
while not last or step < 3:
    step += 1
    dist.all_reduce(sum := torch.ones(1))
    print(f"step {step} in a world of {sum.item():g}", flush=True)
    time.sleep(0.1)
"""
SLEEP = "import os, time\nprint('world of', os.environ['WORLD_SIZE'], flush=True)\ntime.sleep(1000)\n"


@pytest.fixture
def real_hosts():
    there, sentence = hosts_available()
    if not there:
        missing(sentence)


@pytest.mark.usefixtures("real_hosts")
def test_when_the_host_of_the_rendezvous_dies_the_others_end_too(tmp_path):
    (tmp_path / "program.py").write_text(SLEEP)
    run = run_on_hosts(TORCHRUN + QUICK + str(tmp_path / "program.py"), timeout=80,
                       when=[("node1 . world of 2", "kill node0")])
    assert run.exit_codes[0] == 137 and run.exit_codes[1] != 0
    assert run.lines("node1 .*Rendezvous(Connection|Closed)Error"), run


@pytest.mark.usefixtures("real_hosts")
@pytest.mark.parametrize(("hosts", "least", "worlds", "when"), [
    (2, 1, "212", [("node1 . step 3 in a world of 2", "kill node1"),
                   ("node0 . step 3 in a world of 1", "start node1")]),
    (3, 2, "32", [("node0 . step 3 in a world of 3", "kill node0")]),
], ids=["killed_host_comes_back", "host_of_rank_0_dies"])
def test_elastic_agents_meet_again(tmp_path, hosts, least, worlds, when):
    """Without the variable, in PyTorch 2.13: `DistStoreError: wait timeout after 60000ms`; the survivors never meet."""
    (tmp_path / "meet.py").write_text(MEET)
    agent = TORCHRUN.replace("=1:2", f"={least}:{hosts}").replace("node0:", f"node{2 * hosts - 4}:")
    run = run_on_hosts(f"{agent}{QUICK}{tmp_path}/meet.py {tmp_path}/worlds {worlds}", hosts, timeout=80, when=when,
                       env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    assert (tmp_path / "worlds").read_text().endswith(worlds)
    assert run.exit_codes == ([0, 0] if hosts == 2 else [137, 0, 0])


@pytest.mark.usefixtures("real_hosts")
def test_a_slow_cable_raises_no_error_and_has_a_third_of_the_rate():
    def seconds():
        x = torch.ones(2**17)
        dist.all_reduce(x)
        start = time.perf_counter()
        dist.all_reduce(x)
        return x[0].item(), time.perf_counter() - start

    sound, slow = (launch(seconds, world_size=2, hosts=2, link="50mbit", fault=fault) for fault in (None, "slow cable"))
    assert {value for value, _ in [*sound, *slow]} == {4.0}
    assert max(time for _, time in slow) > 2 * 2**19 / (50e6 / 8), "three times, and sound ones take one"
    with pytest.raises(ValueError, match="needs a rate to be slower than: give link="):
        launch(seconds, world_size=2, hosts=2, fault="slow cable")


@pytest.mark.usefixtures("real_hosts")
def test_torchrun_makes_two_worlds_when_a_living_host_is_silent(tmp_path):
    """The rendezvous is on a third host, as a service of its own would be; both worlds go on to the end."""
    (tmp_path / "store.py").write_text(STORE)
    (tmp_path / "steps.py").write_text(STEPS)
    agent = TORCHRUN.replace("node0:", "node2:") + QUICK.replace("conf=", "conf=is_host=0,")
    agent += f"{tmp_path}/steps.py {tmp_path}"
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


@pytest.mark.usefixtures("real_hosts")
def test_torchrun_turns_every_failure_into_1(tmp_path):
    (tmp_path / "program.py").write_text("raise SystemExit(75)")
    run = run_on_hosts(f"torchrun --standalone {tmp_path}/program.py", hosts=1)
    assert run.exit_codes == [1] and run.lines(r"exitcode: 75|exitcode +: 75")


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


@pytest.mark.usefixtures("real_hosts")
def test_a_refusal_quotes_what_left_a_host_and_what_each_rank_said():
    text = str(refusal("hierarchical_mean", {  # by the ledger as cheap as an all-reduce
        "-count % per_host": "-count % len(host_of)",
        check.ACROSS: "piece = shard.new_empty(len(shard) // len(rows))\n"
                      "dist.reduce_scatter_single(piece, shard, group=across)\n"
                      "dist.all_gather_single(shard, piece, group=across)",
    }))
    assert re.search(r"bytes \(1\.5\d S\) left node0 by its interface", text)
    text = str(refusal("join", AS_FOUND))
    assert "a world of 2 ranks; 4 were started" in text
    assert "node1: ranks 0, 1 of 2, the store on node1, interface eth0" in text


def test_without_hosts_the_ledger_and_what_ranks_say_decide(monkeypatch, capsys):
    monkeypatch.setattr(check, "hosts_available", lambda: (False, "hosts need Linux"))
    assert refusal("hierarchical_mean", FLAT).hint == "flat"
    assert refusal("join", AS_FOUND).hint == "two-worlds"
    for name in ("hierarchical_mean", "join"):
        getattr(check, name)(answer_with("lessons.multi_node.answers", name))
        assert re.fullmatch(r"Exercise \d passed.* not (measured|tried): hosts need Linux\.\n", capsys.readouterr().out)


def test_numbers_of_the_exercise_on_checkpoints():
    stops, days, gpus = recorded.LLAMA3_INTERRUPTIONS
    assert (stops, days, gpus) == (419, 54, 16384) and round(days / stops * gpus / 8) == 264
    parts = [(100 * math.sqrt(2 * save / m), 100 * 10 / m) for save in (2, 0.1) for m in [264 * 1440 / 2048]]
    assert [[round(x, 1) for x in part] for part in parts] == [[14.7, 5.4], [3.3, 5.4]]
