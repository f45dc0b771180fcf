"""What is read out of NCCL's logs, beyond the recorded ones that the lesson reads."""

from __future__ import annotations

from lessons.nccl.nccl_logs import CONNECTIONS, LOGS, network, ring_order, table, transports


def test_connections_and_channels_of_the_recorded_log():
    found = transports(CONNECTIONS)
    assert found[1, 3, "NET/IB/2/GDRDMA"] == {4, 6}
    assert found[3, 1, "NET/IB/2/GDRDMA"] == {5, 7}
    assert found[1, 0, "P2P/CUMEM"] == {5, 7}
    assert len(found) == len(table(CONNECTIONS).splitlines()[1:]) == 5
    assert all(line in CONNECTIONS for line in LOGS["nccl 1189"].splitlines())
    assert network("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM") == network("") == "one node"


def test_rings_are_put_together_from_what_each_rank_prints():
    whole = "\n".join(f"Ring 00 : {(r - 1) % 4} -> {r} -> {(r + 1) % 4}" for r in (2, 0, 3, 1))
    assert ring_order(whole, 0) == [0, 1, 2, 3]
    assert ring_order(whole, 5) == [0]
