"""The network above the nodes: who is below which leaf, what a trunk carries, which link limits messages together."""

from __future__ import annotations

from course_utils.topology import cluster, leaf_spine, most_shared

FLAT = cluster("dgx h100", 4)


def leaf_of(network, card: str) -> str:
    return next(link.b for link in network.links if link.a == card and link.b.startswith("leaf"))


def trunks(network) -> dict[str, float]:
    return {link.a: link.bandwidth for link in network.links if link.b == "spine"}


def test_leaves_divide_the_nodes_in_order():
    network = leaf_spine(FLAT, 2)
    assert [leaf_of(network, f"node{node}.NIC7") for node in range(4)] == ["leaf0", "leaf0", "leaf1", "leaf1"]
    assert trunks(network) == {"leaf0": 16 * 50e9, "leaf1": 16 * 50e9} and network.gpus == FLAT.gpus


def test_rails_divide_the_cards_of_each_node():
    network = leaf_spine(FLAT, 8, rails=True)
    for node in range(4):
        assert [leaf_of(network, f"node{node}.NIC{r}") for r in range(8)] == [f"leaf{r}" for r in range(8)]
    assert set(trunks(network).values()) == {4 * 50e9}


def test_oversubscription_divides_the_trunks():
    assert set(trunks(leaf_spine(FLAT, 2, 7)).values()) == {16 * 50e9 / 7}


def test_nodes_that_do_not_divide_evenly():
    odd = leaf_spine(cluster("pcie workstation", 3), 2)
    assert [leaf_of(odd, f"node{node}.NIC0") for node in range(3)] == ["leaf0", "leaf0", "leaf1"]


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
