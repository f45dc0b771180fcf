"""Promises about who can reach the ranks, and about CUDA: nothing beyond this machine and this user."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pickle
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import missing
from kernels import Kernel, Script, marked, namespace

from course_utils import launch

pytestmark = pytest.mark.guard(90)


def sockets_of(process: psutil.Process) -> list[tuple[str, str, str]]:
    """(status, address, peer) of every network socket, listening or not."""
    found = process.net_connections(kind="inet")
    return [(c.status, c.laddr.ip, c.raddr.ip if c.raddr else "") for c in found]


def loopback_only(sockets: list[tuple[str, str, str]]) -> None:
    for _, *ends in sockets:
        for address in filter(None, ends):
            plain = ipaddress.ip_address(address)
            plain = getattr(plain, "ipv4_mapped", None) or plain
            assert plain.is_loopback, f"a socket on {address}: {sockets}"


def test_with_a_given_process_group_nothing_is_open_beyond_loopback():
    def work():
        dist.all_reduce(torch.ones(10))
        group = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(10), group=group)
        dist.barrier()
        return sockets_of(psutil.Process())

    for sockets in launch(work, world_size=4):
        loopback_only(sockets)


@pytest.mark.parametrize("arguments", [("gloo",), (), ("gloo", "env://")])
def test_with_an_own_process_group_nothing_is_open_beyond_loopback(arguments):
    def program():
        dist.init_process_group(*arguments)
        dist.all_reduce(torch.ones(10))
        sockets = sockets_of(psutil.Process())
        dist.barrier()
        dist.destroy_process_group()
        return sockets

    for sockets in launch(program, world_size=4, init=False):
        assert sockets, "the group has sockets, and they were looked at"
        loopback_only(sockets)


def test_the_output_of_a_rank_is_open_to_no_other_rank():
    def pipes():
        links = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue
        return links

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    ranks = launch(pipes, world_size=4)
    for rank, links in enumerate(ranks):
        assert links[1].startswith(("pipe:", "socket:", "/"))
        for other, others in enumerate(ranks):
            if other != rank:
                assert not {links[1], links[2]} & set(others.values()), f"rank {other} holds the output of rank {rank}"


POOL = """
import os, time
import torch
import torch.distributed as dist
from course_utils import launch

def wait():
    while not os.path.exists("go"):
        time.sleep(0.02)

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
    print("quiet", flush=True)
    wait()
    os.remove("go")
print("after", launch(dist.get_rank, world_size=2))
"""


@dataclass
class Stage:
    """What the processes of a pool, helpers and fork server too, had open at one moment of its life."""

    sockets: list[tuple[str, str, str]]
    unix: list[str]
    files: dict[Path, os.stat_result]
    commands: list[str]


@pytest.fixture(scope="module")
def pool():
    """A script with a pool, and its stages: ranks at work (given group), waiting, at work (own group), waiting."""
    with Script(POOL) as script:
        stages = []
        for word in ("open", "quiet") * 2:
            script.read(word)
            processes = marked(script.mark)
            unix = [c.laddr for p in processes for c in p.net_connections(kind="unix") if c.laddr]
            stages.append(
                Stage(
                    sockets=[row for p in processes for row in sockets_of(p)],
                    unix=unix,
                    files={
                        path: path.lstat() for path in [*script.temporary.iterdir(), *map(Path, unix)] if path.exists()
                    },
                    commands=[" ".join(p.cmdline()) for p in processes],
                )
            )
            if len(stages) < 4:
                (script.folder / "go").touch()
        yield script, stages


def test_no_process_of_a_pool_has_a_socket_beyond_loopback(pool):
    _, stages = pool
    assert stages[0].sockets and stages[2].sockets, "the groups have sockets, and they were looked at"
    for stage in stages:
        assert len(stage.commands) >= 3
        loopback_only(stage.sockets)


def test_sockets_and_files_are_the_users_own(pool):
    """No file, folder or socket is open to other users, and no abstract socket is open to all."""
    script, stages = pool
    for stage in stages:
        for path, status in stage.files.items():
            folder = status if path.parent == script.temporary else path.parent.stat()
            assert status.st_uid == folder.st_uid == os.getuid()
            assert not stat.S_IMODE(folder.st_mode) & 0o077, f"{path.name}: {oct(folder.st_mode)}"
        for name in stage.unix:
            assert not name.startswith(("@", "\0")), f"abstract socket {name!r}"
            assert script.temporary in Path(name).parents


def test_nothing_secret_is_on_a_command_line(pool):
    """Other users can read command lines."""
    for stage in pool[1]:
        for line in stage.commands:
            assert not any(word in line.lower() for word in ("authkey", "token", "password", "secret"))


def test_a_strangers_pickle_is_never_loaded(pool):
    """Whatever listens is sent a pickle that would make a folder; it does not, and the next call works."""
    script, stages = pool
    trap = script.folder / "trap"
    payload = pickle.dumps(_Trap(str(trap)))
    framed = len(payload).to_bytes(4, "big") + payload
    for process in marked(script.mark):
        with contextlib.suppress(psutil.NoSuchProcess):  # the fork server may end over it, and its ranks with it
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    family = socket.AF_INET6 if ":" in connection.laddr.ip else socket.AF_INET
                    _send(family, (connection.laddr.ip, connection.laddr.port), framed)
            for connection in process.net_connections(kind="unix"):
                if connection.laddr and Path(connection.laddr).exists():
                    _send(socket.AF_UNIX, connection.laddr, framed)
    time.sleep(0.5)
    (script.folder / "go").touch()
    assert "after [0, 1]" in script.finish()
    assert not trap.exists()


class _Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _send(family: int, address: object, payload: bytes) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(2)
        try:
            client.connect(address)
            client.sendall(payload)
            client.recv(10)
        except OSError:
            pass


def test_ranks_talk_without_a_network():
    """A laptop offline: only the loopback device, and a host name that nobody knows."""
    prefix = namespace("nu", "true") or missing("the right to make a network namespace")
    with Script(
        """
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
socket.sethostname("a-host-nobody-knows")
import torch
import torch.distributed as dist
from course_utils import launch

def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

def own():
    dist.init_process_group("gloo")
    result = total()
    dist.destroy_process_group()
    return result

print(launch(total, world_size=2), launch(own, world_size=2, init=False))
""",
        prefix=prefix,
    ) as script:
        assert script.finish() == "[2.0, 2.0] [2.0, 2.0]\n"


# --- CUDA ----------------------------------------------------------------------------------------------------------


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
