"""The network above the nodes: who is below which leaf, and which link limits messages together."""

from __future__ import annotations

from course_utils.topology import cluster, leaf_spine, most_shared

FLAT = cluster("dgx h100", 4)


def leaves_of(network, card: str, nodes: int) -> list[str]:
    ups = {link.a: link.b for link in network.links if link.b.startswith("leaf")}
    return [ups[f"node{node}.{card}"] for node in range(nodes)]


def test_leaves_divide_the_nodes_in_order_also_unevenly_and_rails_the_cards():
    assert leaves_of(leaf_spine(FLAT, 2), "NIC7", 4) == ["leaf0", "leaf0", "leaf1", "leaf1"]
    assert leaves_of(leaf_spine(cluster("pcie workstation", 3), 2), "NIC0", 3) == ["leaf0", "leaf0", "leaf1"]
    assert leaves_of(leaf_spine(FLAT, 8, rails=True), "NIC5", 4) == ["leaf5"] * 4


def test_paths_below_a_leaf_do_not_meet_the_spine_and_latency_stays():
    network = leaf_spine(FLAT, 2)
    assert "spine" not in network.path(0, 8).devices and "spine" in network.path(0, 16).devices
    assert network.path(0, 16).latency == network.path(0, 8).latency == FLAT.path(0, 8).latency


def test_messages_one_way_share_and_both_ways_do_not():
    network = leaf_spine(FLAT, 2, 16)  # each trunk has the bandwidth of one port
    link, users = most_shared(network, [(0, 16), (1, 17), (2, 18), (16, 0), (17, 1)])
    assert {link.a, link.b} in ({"leaf0", "spine"}, {"leaf1", "spine"}) and users == 3
    link, users = most_shared(network, [(0, 8), (9, 1)])
    assert users == 1 and link.bandwidth == 50e9
