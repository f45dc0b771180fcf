"""Promises about the machine: nothing beyond this user and loopback, no name server, a port that is free, CUDA."""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path

import pytest
from conftest import missing
from kernels import Script, marked, namespace

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
