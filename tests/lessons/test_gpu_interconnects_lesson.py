"""What the lesson on interconnects claims in its text, and no cell prints or asserts."""

from __future__ import annotations

from course_utils.hardware import GPUS, LINKS, rungs
from course_utils.recorded import ACHIEVABLE_MATMUL
from course_utils.topology import reference

H100, PORT = GPUS["h100"], LINKS["ib_ndr"].bandwidth


def test_operations_while_a_number_comes():
    assert [round(H100.flops["bf16"] / (speed / 2)) for speed in (H100.memory_bandwidth, PORT)] == [591, 39576]
    assert round(H100.flops["bf16"] / PORT) == 19788
    assert [round(rate / H100.flops["bf16"], 2) for rate in (ACHIEVABLE_MATMUL["h100"], 430e12)] == [0.80, 0.43]


def test_the_ladder_spans_what_the_text_says():
    speeds, kinds = rungs()
    assert round(speeds["HBM (H100)"] / speeds["Ethernet 10G"]) == 2680
    assert min(speeds.values()) == 1.25e9 and max(speeds.values()) == 8e12 and speeds.keys() == kinds.keys()
    between = {name for name, speed in speeds.items() if 100e9 <= speed < 1e12 and kinds[name] != "HBM"}
    assert between == {"NVLink 2", "NVLink 3", "NVLink 4", "NVLink 5", "PCIe 6 x16", "InfiniBand XDR"}


def test_what_the_explorer_has_to_find():
    inside, clouds = reference("dgx h100").path(0, 7), reference("2 x t4").path(0, 1)
    assert inside.bandwidth / clouds.bandwidth == 450 and clouds.bandwidth == 1e9
    assert reference("pcie workstation").path(0, 1).bottleneck.kind == "PCIe 4 x16"
    assert {reference("gb200 nvl72").path(0, peer).bandwidth for peer in range(1, 72)} == {900e9}
