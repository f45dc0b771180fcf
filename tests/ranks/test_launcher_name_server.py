"""Promises about how ranks meet: through a file of the user's own; no port is open for it, no name server is asked."""

from __future__ import annotations

import os
import socket
import stat

import psutil
import pytest
import torch.distributed as dist
from conftest import missing
from kernels import Script, namespace

from course_utils import launch

pytestmark = pytest.mark.guard(120)

# In namespaces of its own: loopback is up, and the only name server takes questions and never answers.
SURROUNDINGS = """
import fcntl, socket, struct, subprocess, time

def name_server_that_never_answers():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # `ip link set lo up`
        flags = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, flags)  # SIOCSIFFLAGS
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.77", 53))
    with open("resolv.conf", "w") as file:
        file.write("nameserver 127.0.0.77\\noptions timeout:5 attempts:1\\n")
    subprocess.run(["mount", "--bind", "resolv.conf", "/etc/resolv.conf"], check=True)
    server.setblocking(False)
    return server

def questions(server):
    count = 0
    while True:
        try:
            server.recv(65536)
        except BlockingIOError:
            return count
        count += 1
"""
PROGRAM = (
    SURROUNDINGS
    + """
server = name_server_that_never_answers()
from datetime import timedelta
import torch
import torch.distributed as dist
from course_utils import launch, shutdown

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
print("TCPSTORE", questions(server), flush=True)

def total():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.new_group([0, 1])
    dist.barrier()
    return x.item()

assert launch(total, world_size=4, init=False) == [4.0] * 4
for world_size in (2, 3, 2):  # ranks of their own, one more, one less
    assert launch(total, world_size=world_size) == [world_size] * world_size
print("RANKS", questions(server))
"""
)


def test_ranks_meet_without_a_question_to_a_name_server_that_does_not_answer():
    prefix = namespace("mn", "mount", "--bind", "/etc/hosts", "/etc/resolv.conf")
    prefix = prefix or missing("the right to make network and mount namespaces")
    with Script(PROGRAM, prefix=prefix) as script:
        out = script.finish(110)
    asked = dict(line.split() for line in out.splitlines() if line.startswith(("TCPSTORE ", "RANKS ")))
    assert int(asked["TCPSTORE"]), "the name server is asked: the set-up is right"
    assert asked["RANKS"] == "0", out


@pytest.mark.parametrize("init", [True, False])
def test_no_rank_listens_for_others_to_meet(init):
    def listening():
        if not init:
            dist.init_process_group("gloo")
        dist.barrier()
        me = psutil.Process()
        ports = [c.laddr.port for c in me.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
        dist.barrier()
        return len(ports), int(os.environ["MASTER_PORT"]) in ports

    assert launch(listening, world_size=3, init=init) == [(1, False)] * 3  # the one is gloo's own


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
    assert launch(refused, world_size=2, init=False) == [True, True]
    assert launch(serve, world_size=2, init=False, timeout=80) == ["0", "1"]


@pytest.mark.parametrize("init", [True, False])
def test_the_meeting_place_is_a_file_in_a_folder_of_the_users_own_and_files_do_not_pile_up(init):
    def place():
        if not init:
            dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        dist.barrier()
        return type(store).__name__, store.path

    counts = []
    for call in range(8 if init else 1):
        (kind, path), *others = launch(place, world_size=2 + call % 2, init=init)
        assert others == [(kind, path)] * len(others) and kind == "FileStore"
        counts.append(sum(len(names) for _, _, names in os.walk(os.path.dirname(path))))
    assert counts[-1] <= counts[len(counts) // 3] + 1, counts
    folder = os.path.dirname(path)
    found = os.stat(folder)
    while folder != "/" and stat.S_IMODE(found.st_mode) != 0o700:  # the folder, or one above it
        folder = os.path.dirname(folder)
        found = os.stat(folder)
    assert stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.getuid() and folder != "/"
    assert os.path.basename(folder).startswith("course-")
