"""Promises of ranks on emulated hosts: real networks and faults, every promise of the launcher, nothing left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from calls import ended
from conftest import missing
from kernels import Script, left_behind, marked

from course_utils import HangError, launch, shutdown
from lessons.multi_node.hosts import hosts_available

pytestmark = pytest.mark.guard(90)

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
            "MASTER_PORT", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True, scope="module")
def real_hosts():
    there, sentence = hosts_available()
    if not there:
        missing(sentence)


def place() -> tuple:
    """Where a rank is: its host's name, its network, its process."""
    return socket.gethostname(), os.readlink("/proc/self/ns/net"), os.getpid()


def total() -> float:
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def all_is_well_on_hosts() -> list[int]:
    """The next call on hosts works; the processes of its ranks."""
    assert launch(total, world_size=4, hosts=2) == [10.0] * 4
    return [pid for _, _, pid in launch(place, world_size=4, hosts=2)]


def holders(processes: list[psutil.Process]) -> list[int]:
    """Those that hold hosts. A network lasts as long as a process in it, a file or a mount that refers to it."""
    return [p.pid for p in processes if any("hosts/namespaces" in part for part in p.cmdline())]


def networks_outside() -> tuple[set[str], str, list[str]]:
    """What of emulated networks would show outside of them: interfaces, names, mounts."""
    named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "nsfs" in line]
    return set(os.listdir("/sys/class/net")), named, mounts


# --- what a rank sees ----------------------------------------------------------------------------------------------


def test_hosts_have_names_addresses_networks_and_the_variables_of_torchrun(tmp_path, monkeypatch):
    """The learner's folder, user and environment stay, and nothing outside is reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_LEARNER", "7")

    def look():
        variables = [os.environ[name] for name in TORCHRUN]
        shown = subprocess.run(["ip", "-br", "-4", "address"], capture_output=True, text=True).stdout.split()
        names = [socket.gethostbyname("node0"), socket.gethostbyname("node1"), socket.getfqdn("10.0.0.2")]
        with socket.socket() as connection:
            reached = connection.connect_ex(("192.0.2.1", 80)) == 0
        kept = os.getcwd(), os.getuid(), os.getgid(), os.environ["OF_THE_LEARNER"], reached
        return variables, (place()[0], shown[-1]), place()[1], names, kept, total()

    found = launch(look, world_size=4, hosts=2)
    for rank, (variables, where, _, names, kept, added) in enumerate(found):
        local, host = rank % 2, rank // 2
        assert variables == [str(rank), "4", str(local), "2", str(host), "2", "node0", "29500", "eth0"]
        assert where == (f"node{host}", f"10.0.0.{host + 1}/24") and names == ["10.0.0.1", "10.0.0.2", "node1"]
        assert kept == (str(tmp_path), os.getuid(), os.getgid(), "7", False) and added == 10
    networks = {network for _, _, network, *_ in found}
    assert len(networks) == 2 and os.readlink("/proc/self/ns/net") not in networks


# --- warm and cold ranks -------------------------------------------------------------------------------------------


def test_ranks_stay_warm_while_other_calls_come_between():
    plain = launch(os.getpid, world_size=4)
    hosts = all_is_well_on_hosts()
    assert launch(os.getpid, world_size=4) == plain
    assert all_is_well_on_hosts() == hosts


# --- failures ------------------------------------------------------------------------------------------------------


def test_a_hang_says_on_which_host_each_rank_waits():
    def hang():
        if dist.get_rank() != 3:
            dist.all_reduce(torch.ones(4))
        else:
            time.sleep(1000)

    with pytest.raises(HangError) as caught:
        launch(hang, world_size=4, hosts=2, timeout=4)
    assert caught.value.rank == 3 and "rank 3 never joined it" in caught.value.fault
    states = [state.split()[:4] for state in caught.value.states[:4]]
    assert states[:3] == [[str(rank), f"node{rank // 2}", "waits", "all_reduce"] for rank in range(3)]
    assert states[3][:3] == ["3", "node1", "runs"]
    all_is_well_on_hosts()


# --- faults --------------------------------------------------------------------------------------------------------


def test_one_open_port_is_not_enough_and_the_launcher_says_how_far_the_ranks_came(capsys):
    with pytest.raises(HangError) as caught:
        launch(total, world_size=4, hosts=2, fault="only one port open", timeout=6)
    assert "The ranks have met at their store, but do not reach each other" in caught.value.fault
    assert all("connects to other ranks" in state for state in caught.value.states)
    all_is_well_on_hosts()


def test_ranks_that_wait_at_the_store_and_ranks_that_do_not_reach_it_are_told_apart(capsys):
    def program():
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))

    with pytest.raises(HangError) as caught:
        launch(program, world_size=4, hosts=2, fault="port closed", init=False, timeout=6)
    assert "ranks 2,3 on node1 connect to node0:29500" in caught.value.fault and caught.value.rank == 2
    assert "frame #" not in capsys.readouterr().out  # of native stacks
    assert [state.split()[:2] for state in caught.value.states] == [[str(r), f"node{r // 2}"] for r in range(4)]


# --- nothing left behind -------------------------------------------------------------------------------------------


def test_shutdown_ends_ranks_hosts_and_networks():
    shutdown()
    before = networks_outside()
    places = launch(place, world_size=4, hosts=2)
    holding = holders(psutil.Process().children(recursive=True))
    assert len(holding) == 3 and networks_outside() == before
    shutdown()
    assert ended([pid for _, _, pid in places] + holding)
    assert networks_outside() == before
    open_files = [file.resolve().name for file in Path("/proc/self/fd").iterdir()]
    assert not [name for name in open_files if name.startswith("net:[")]


SCRIPT = """
import os, socket, time
from course_utils import launch
import torch, torch.distributed as dist

def work(wait):
    x = torch.ones(1)
    dist.all_reduce(x)
    print(socket.gethostname(), os.readlink("/proc/self/ns/net"), flush=True)
    time.sleep(wait)
    return x.item()

print(launch(work, 0, world_size=4, hosts=2, link="100mbit"), flush=True)
"""


def test_nothing_is_left_when_the_notebook_is_killed_in_a_call():
    before = networks_outside()
    with Script(f"{SCRIPT}launch(work, 1000, world_size=4, hosts=2, link='100mbit', timeout=2000)") as script:
        script.read("[4.0, 4.0, 4.0, 4.0]")
        script.read("node1")
        assert len(holders(marked(script.mark))) == 3
        os.kill(script.process.pid, signal.SIGKILL)
        assert not left_behind(script.mark, script.temporary)
        assert networks_outside() == before


def test_an_ordinary_user_may_emulate_hosts_too():
    """Without the rights of root, by a user namespace; in it ranks have no rights that they had not before."""
    drop = ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all"] if os.getuid() == 0 else []
    rights = "\nprint(launch(lambda: open('/proc/self/status').read().split('CapEff:')[1].split()[0], hosts=2))"
    users = "\nprint(os.readlink('/proc/self/ns/user') in launch(os.readlink, '/proc/self/ns/user', hosts=2))"
    with Script(SCRIPT + rights + users, prefix=drop) as script:
        out = script.finish()
        assert "[4.0, 4.0, 4.0, 4.0]" in out and f"{['0000000000000000'] * 4}" in out and "False" in out
        assert "not emulated" not in out
        assert not left_behind(script.mark, script.temporary)
