"""What the lesson on interconnects claims in its text, and no cell asserts."""

from __future__ import annotations

import pytest
from lesson_cells import definitions

from course_utils.costs import bytes_sent
from course_utils.hardware import GPUS, LINKS, growth, rungs
from course_utils.recorded import ACHIEVABLE_MATMUL
from course_utils.topology import cluster, leaf_spine, most_shared, reference

H100, PORT = GPUS["h100"], LINKS["ib_ndr"].bandwidth


def waiting(bandwidth: float) -> float:
    """Share of the step of section 8 that is waiting."""
    seconds = bytes_sent("all_reduce", 16, 14e9) / bandwidth
    return seconds / (seconds + 6 * 7e9 * 8192 / 430e12)


def test_operations_while_a_number_comes():
    assert [round(H100.flops["bf16"] / (speed / 2)) for speed in (H100.memory_bandwidth, PORT)] == [591, 39576]
    assert round(H100.flops["bf16"] / PORT) == 19788


def test_the_ladder_spans_what_the_text_says():
    speeds, kinds = rungs()
    assert round(speeds["HBM (H100)"] / speeds["Ethernet 10G"]) == 2680
    assert min(speeds.values()) == 1.25e9 and max(speeds.values()) == 8e12 and speeds.keys() == kinds.keys()
    between = {name for name, speed in speeds.items() if 100e9 <= speed < 1e12 and kinds[name] != "HBM"}
    assert between == {"NVLink 2", "NVLink 3", "NVLink 4", "NVLink 5", "PCIe 6 x16", "InfiniBand XDR"}


def test_arithmetic_outgrew_all_that_moves_data():
    grown = {what: values[-1] / values[0] for what, values in growth()[1].items()}
    assert grown["16-bit arithmetic"] > 9 * max(grown["memory bandwidth"], grown["NVLink"], grown["PCIe"])


def test_small_messages_suffer_from_latency_large_ones_from_bandwidth():
    two = cluster("dgx h100", 2)
    ratios = [two.path(0, 8).seconds(size) / two.path(0, 1).seconds(size) for size in (4096, 2**30)]
    assert ratios == pytest.approx([4.1, 9.0], abs=0.05)
    assert LINKS["nvlink4"].latency * LINKS["nvlink4"].bandwidth > 2**20


def test_what_the_explorer_has_to_find():
    inside, clouds = reference("dgx h100").path(0, 7), reference("2 x t4").path(0, 1)
    assert inside.bandwidth / clouds.bandwidth == 450 and clouds.bandwidth == 1e9
    assert reference("pcie workstation").path(0, 1).bottleneck.kind == "PCIe 4 x16"
    assert {reference("gb200 nvl72").path(0, peer).bandwidth for peer in range(1, 72)} == {900e9}


def test_shares_of_a_step_that_is_waiting():
    shares = [waiting(speed) for speed in (LINKS["nvlink4"].bandwidth, PORT, LINKS["eth_10g"].bandwidth, 8 * PORT)]
    assert [round(share, 2) for share in shares] == [0.07, 0.40, 0.96, 0.08]
    assert round(364.7e9 / PORT) == 7


@pytest.mark.parametrize(
    ("leaves", "oversubscription", "rails", "factors"),
    [(2, 1, False, (1, 1)), (2, 7, False, (1.75, 7)), (8, 7, True, (1, 1))],
)
def test_rings_through_eight_nodes(leaves: int, oversubscription: float, rails: bool, factors: tuple):
    network = leaf_spine(cluster("dgx h100", 8), leaves, oversubscription, rails)
    rings = definitions("01")["rings"]
    for order, factor in zip(([0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 1, 5, 2, 6, 3, 7]), factors, strict=True):
        link, users = most_shared(network, rings(order))
        assert users * PORT / link.bandwidth == pytest.approx(factor)


def test_the_layer_on_the_roof():
    layer = definitions("01", h100=H100)["layer"]
    assert layer(1)[1] < 0.005 * H100.flops["bf16"] and layer(8192)[1] == H100.flops["bf16"]
    assert layer(324)[0] < H100.ridge() <= layer(325)[0]
    assert [round(rate / H100.flops["bf16"], 2) for rate in (ACHIEVABLE_MATMUL["h100"], 430e12)] == [0.80, 0.43]


def test_recorded_copies_reach_the_share_that_the_text_says():
    assert round(12150.7 / 3783.4, 1) == 3.2 and round(386.6e-3 / 13.3e-3) == 29
