"""Promises where hosts cannot be emulated, or are asked for wrongly: what is refused, and what runs all the same."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

from course_utils import launch, record
from lessons.multi_node.hosts import hosts_available, network, results

pytestmark = pytest.mark.guard(60)


REFUSED = [
    ({"hosts": 3}, "4 ranks can be divided equally among 1, 2 or 4 hosts"),
    ({"hosts": 2, "link": "100"}, "unit (kbit, mbit or gbit), such as '100mbit'"),
    ({"hosts": 2, "fault": "rain"}, "allowed are 'cable pulled', 'port closed', 'only one port open'"),
    ({"link": "100mbit"}, "link is about the link between hosts; say how many: hosts=2"),
]


def test_what_makes_no_sense_is_refused_with_what_is_allowed():
    for options, said in REFUSED:
        with pytest.raises((TypeError, ValueError)) as caught:
            launch(dist.get_rank, world_size=4, **options)
        assert said in str(caught.value)


@pytest.fixture
def unavailable(monkeypatch):
    monkeypatch.setattr(results, "_trial", lambda: "this system has no network for hosts")
    monkeypatch.setattr(results, "_said", set())


def place() -> tuple:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
    return socket.gethostname(), *(os.environ[name] for name in names)


def test_without_networks_ranks_run_on_one_host_with_the_same_variables(unavailable, capsys):
    assert hosts_available() == (False, "this system has no network for hosts")

    def work():
        with record() as ledger:
            x = torch.ones(1)
            dist.all_reduce(x)
        return *place(), x.item(), len(ledger)

    results = launch(work, world_size=4, hosts=2, link="100mbit")
    assert results == [
        (socket.gethostname(), str(rank), str(rank % 2), "2", str(rank // 2), "2", "127.0.0.1", 4.0, 1)
        for rank in range(4)
    ]
    assert results.left_host is None
    said = "2 hosts are not emulated: this system has no network for hosts. The ranks run on the machine itself"
    assert capsys.readouterr().out.startswith(said)
    launch(place, world_size=4, hosts=2)
    assert capsys.readouterr().out.startswith("2 hosts are not emulated. The ranks run"), "the reason is told once"
    plain = launch(place, world_size=4)
    assert plain == [(socket.gethostname(), str(rank), str(rank), "4", "0", "1", "127.0.0.1") for rank in range(4)]


def test_a_fault_that_cannot_be_made_is_refused(unavailable):
    with pytest.raises(RuntimeError, match="fault 'cable pulled' needs emulated hosts: this system has no network"):
        launch(dist.get_rank, world_size=4, hosts=2, fault="cable pulled")


@pytest.mark.parametrize(("settings", "files", "said"), [
    ({"kernel.apparmor_restrict_unprivileged_userns": "1"}, [],
     "`sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`"),
    ({}, ["/.dockerenv"], "this container may not make the network of emulated hosts"),
])
def test_what_forbids_it_is_named_with_the_way_out(monkeypatch, settings, files, said):
    monkeypatch.setattr(network, "_setting", lambda name: settings.get(name, ""))
    monkeypatch.setattr(network.os.path, "exists", lambda path: path in files)
    assert said in network._reason({"what": "a user namespace", "errno": 1, "error": "Operation not permitted"})


def test_what_is_missing_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setattr(results, "program", lambda name: None if name == "tc" else f"/sbin/{name}")
    way_out = "the way out: `sudo apt-get install iproute2`"
    assert results._missing() == f"emulated hosts need the program `tc`; {way_out}"
    monkeypatch.setattr(results.sys, "platform", "darwin")
    monkeypatch.setattr(results.platform, "system", lambda: "Darwin")
    assert "the network namespaces of Linux, which Darwin does not have" in results._missing()
