"""Promises about the machine: nothing beyond this user and loopback, no name server, a port that is free, CUDA."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import missing
from kernels import Kernel, Script, marked, namespace

from course_utils import launch

pytestmark = pytest.mark.guard(120)

POOL = """
import os, time
import torch
import torch.distributed as dist
from course_utils import launch

def wait():
    while not os.path.exists("go"):
        time.sleep(0.02)
    time.sleep(0.1)

def program():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(10))
    print("open")
    wait()
    dist.barrier()
    dist.destroy_process_group()

for init in (True, False):
    launch(program, world_size=2, init=init, timeout=1000)
    os.remove("go")
"""


def _is_loopback(address: str) -> bool:
    plain = ipaddress.ip_address(address)
    return (getattr(plain, "ipv4_mapped", None) or plain).is_loopback


def test_sockets_are_on_loopback_and_files_the_users_own():
    """While ranks work with the group that they were given, and with one of their own."""
    with Script(POOL) as script:
        for _ in range(2):
            script.read("open")
            processes = marked(script.mark)
            sockets = [c for p in processes for c in p.net_connections(kind="inet")]
            ends = [end.ip for c in sockets for end in (c.laddr, c.raddr) if end]
            assert len(processes) >= 4 and ends and all(map(_is_loopback, ends)), ends
            for name in {c.laddr for p in processes for c in p.net_connections(kind="unix") if c.laddr}:
                assert script.temporary in Path(name).parents, name
            for folder in script.temporary.iterdir():
                assert folder.stat().st_uid == os.getuid() and not stat.S_IMODE(folder.stat().st_mode) & 0o077
            (script.folder / "go").touch()
        script.finish()


# In namespaces of its own: only loopback, a host name that nobody knows, a name server that never answers.
OFFLINE = """
import fcntl, socket, struct, subprocess

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # `ip link set lo up`
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
socket.sethostname("a-host-nobody-knows")
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.77", 53))
with open("resolv.conf", "w") as file:
    file.write("nameserver 127.0.0.77\\noptions timeout:5 attempts:1\\n")
subprocess.run(["mount", "--bind", "resolv.conf", "/etc/resolv.conf"], check=True)
server.setblocking(False)

import torch
import torch.distributed as dist
from course_utils import launch

def total():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.new_group([0, 1])
    dist.barrier()
    return x.item()

print(launch(total, world_size=4, init=False), launch(total, world_size=2), launch(total, world_size=3))
try:
    server.recv(65536)
except BlockingIOError:
    print("nothing was asked")
"""


def test_ranks_meet_without_a_network_and_ask_no_name_server():
    prefix = namespace("mnu", "mount", "--bind", "/etc/hosts", "/etc/resolv.conf")
    prefix = prefix or missing("the right to make network, mount and name namespaces")
    with Script(OFFLINE, prefix=prefix) as script:
        assert script.finish(110) == "[4.0, 4.0, 4.0, 4.0] [2.0, 2.0] [3.0, 3.0, 3.0]\nnothing was asked\n"


def test_the_port_that_a_program_is_told_is_free():
    """A program may serve a store of its own there, as `tcp://` and TCPStore do."""

    def serve():
        rank = os.environ["RANK"]
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == "0")
        store.set(f"rank {rank}", "there")
        store.wait(["rank 0", "rank 1"])
        store.add("leaves", 1)
        while rank == "0" and store.add("leaves", 0) < 2:
            pass
        return rank

    def refused():
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))) != 0

    assert launch(refused, world_size=2) == [True, True]
    assert launch(serve, world_size=2, init=False, timeout=80) == ["0", "1"]


def test_files_in_which_ranks_meet_do_not_pile_up():
    def place():
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return type(store).__name__, store.path

    counts = []
    for call in range(8):
        (kind, path), *others = launch(place, world_size=2 + call % 2)
        assert others == [(kind, path)] * len(others) and kind == "FileStore"
        counts.append(sum(len(names) for _, _, names in os.walk(os.path.dirname(path))))
    assert counts[-1] <= counts[2] + 1, counts


def test_no_rank_listens_for_others_to_meet():
    def listening():
        dist.barrier()
        found = [c for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
        dist.barrier()
        return len(found)

    assert launch(listening, world_size=3) == [1] * 3  # gloo's own


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_use_the_gpu_also_after_the_notebook_has():
    with Kernel() as kernel:
        kernel.good("import torch\nimport torch.distributed as dist\nfrom course_utils import device, launch")
        kernel.good("torch.ones(1).cuda()")
        code = """
def work():
    x = torch.ones(3, device=device())
    dist.all_reduce(x)
    return str(x.device), dist.get_backend(), x
[(where, backend, x.device.type, x.tolist()) for where, backend, x in launch(work, world_size=1)]
"""
        assert kernel.good(code).value == "[('cuda:0', 'nccl', 'cpu', [1.0, 1.0, 1.0])]"
        more = torch.cuda.device_count() + 1
        cell = kernel.good(f"launch(lambda: (dist.get_backend(), device().type), world_size={more})[0]")
        assert cell.value == "('gloo', 'cpu')"
