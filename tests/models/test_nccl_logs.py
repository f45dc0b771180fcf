"""What is read out of NCCL's logs, recorded ones and others."""

from __future__ import annotations

import pytest

from lessons.nccl.nccl_logs import CONNECTIONS, LOGS, network, ring_order, table, transports


def test_connections_and_channels_of_the_recorded_log():
    found = transports(CONNECTIONS)
    assert found[1, 3, "NET/IB/2/GDRDMA"] == {4, 6}
    assert found[3, 1, "NET/IB/2/GDRDMA"] == {5, 7}
    assert found[1, 0, "P2P/CUMEM"] == {5, 7}
    assert len(found) == 5
    assert table(CONNECTIONS).splitlines()[1:] == sorted(table(CONNECTIONS).splitlines()[1:])
    assert all(line in CONNECTIONS for log in ["nccl 1189"] for line in LOGS[log].splitlines())


def test_old_logs_have_pci_addresses_in_their_brackets():
    assert set(transports(LOGS["nccl-tests 228"])) == {(7, 6, "SHM/direct/direct"), (1, 0, "SHM/direct/direct")}


@pytest.mark.parametrize(("log", "says"), {
    "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM": "one node",
    "Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0": "TCP",
    "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0": "RDMA from host memory",
    "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA": "GPUDirect RDMA",
    "Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct": "one node, GPUs through host memory",
    "": "one node",
}.items())
def test_network_is_named(log: str, says: str):
    assert network(log) == says


def test_rings_are_put_together_from_what_each_rank_prints():
    assert ring_order(CONNECTIONS, 6) == [0, 1, 3, 2]
    whole = "\n".join(f"Ring 00 : {(r - 1) % 4} -> {r} -> {(r + 1) % 4}" for r in (2, 0, 3, 1))
    assert ring_order(whole, 0) == [0, 1, 2, 3]
    assert ring_order(whole, 5) == [0]
