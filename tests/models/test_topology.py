"""Topologies: published figures, the best path, recorded `nvidia-smi topo -m`, and this machine."""

import itertools
import os

import pytest

from course_utils.hardware import LINKS
from course_utils.topology import (
    cluster,
    from_matrix,
    reference,
    this_machine,
    two_level,
)

# Excerpts of recorded outputs; the columns were separated by tabs.
# https://github.com/NVIDIA/nccl/issues/1505
DGX_A100 = """
GPU0 GPU1 GPU2 GPU4 NIC0 NIC1 NIC2 NIC3 NIC4 NIC5 CPU Affinity NUMA
GPU0 X NV12 NV12 NV12 PXB PXB SYS SYS SYS SYS 48-63,176-191 3 N/A
GPU1 NV12 X NV12 NV12 PXB PXB SYS SYS SYS SYS 48-63,176-191 3 N/A
GPU2 NV12 NV12 X NV12 SYS SYS PXB PXB SYS SYS 16-31,144-159 1 N/A
GPU4 NV12 NV12 NV12 X SYS SYS SYS SYS SYS SYS 112-127,240-255 7 N/A
NIC4 SYS SYS SYS SYS SYS SYS SYS SYS X PIX
"""
# https://github.com/noonghunna/club-3090/issues/1229: two RTX 5090 in a workstation
WORKSTATION = """
 GPU0 GPU1 CPU Affinity NUMA Affinity GPU NUMA ID
GPU0 X PHB 0-63 0 N/A
GPU1 PHB X 0-63 0 N/A
"""

def kinds(topology, a, b):
    return [topology.devices[name].kind for name in topology.path(a, b).devices[1:-1]]


@pytest.mark.parametrize(("name", "gigabytes", "relays", "step"), [
    ("pcie workstation", 31.5, ["cpu"], "pcie4"), ("dgx a100", 300, ["nvswitch"], "nvlink4"),
    ("2 x t4", 1, ["cpu", "nic", "switch", "nic", "cpu"], "eth_10g"), ("dgx h100", 450, ["nvswitch"], "nvlink4"),
    ("dgx h200", 450, ["nvswitch"], "nvlink4"), ("gb200 nvl72", 900, ["nvswitch"], "nvlink4"),
])
def test_reference_machines_have_their_published_speed(name, gigabytes, relays, step):
    machine = reference(name)
    last = len(machine.gpus) - 1
    path = machine.path(0, last)
    assert path.bandwidth == machine.path(last, 0).bandwidth == pytest.approx(gigabytes * 1e9)
    assert kinds(machine, 0, last) == relays and "https://" in machine.source
    assert path.latency == pytest.approx(LINKS[step].latency)  # NCCL's, of a whole step


@pytest.mark.parametrize(("name", "gigabytes", "port"), [
    ("dgx a100", 25, "HDR"), ("dgx h100", 50, "NDR"), ("gb200 nvl72", 50, "NDR"), ("pcie workstation", 1.25, "10G"),
])
def test_between_nodes_the_network_port_is_the_bottleneck(name, gigabytes, port):
    two = cluster(name, 2)
    half = len(two.gpus) // 2
    path = two.path(0, half)
    assert path.bandwidth == gigabytes * 1e9 and port in path.bottleneck.kind
    assert path.latency == pytest.approx(LINKS["ib_ndr"].latency)
    cards = [[d for d in two.path(r, r + half).devices if "NIC" in d] for r in range(half)]
    if name != "pcie workstation":  # where two GPUs share a card
        assert len({pair[0] for pair in cards}) == len({pair[1] for pair in cards}) == half


@pytest.mark.parametrize("nics", ["gpu", "node"])
def test_two_level_has_exactly_the_alpha_and_beta_given(nics):
    intra, inter = (1e-5, 1e-8), (1e-6, 1e-9)  # a network that is better than the node
    made = two_level(3, 4, intra, inter, nics=nics)
    for a, b in itertools.permutations(range(12), 2):
        alpha, beta = intra if a // 4 == b // 4 else inter
        assert (made.path(a, b).latency, made.path(a, b).bandwidth) == (alpha, 1 / beta)
    cards = {name for r in range(4) for name in made.path(r, r + 4).devices if "NIC" in name}
    assert len(cards) == (8 if nics == "gpu" else 2)


# --- nvidia-smi topo -m


def test_matrix_of_an_nvswitch_machine_and_its_cards():
    machine = from_matrix(DGX_A100)
    for a, b in itertools.combinations(machine.gpus, 2):
        assert machine.path(a, b).bandwidth == 300e9 and kinds(machine, a, b) == ["nvswitch"]
    for gpu, card in itertools.product(machine.gpus, ("NIC0", "NIC1", "NIC2", "NIC3")):
        near = gpu in (("GPU0", "GPU1") if card in ("NIC0", "NIC1") else ("GPU2",))
        assert (kinds(machine, gpu, card) == ["pcie"]) == near
    assert kinds(machine, "NIC4", "NIC5") == ["pcie"]
    assert kinds(machine, "GPU0", "NIC3") == ["pcie", "cpu", "cpu", "cpu", "pcie"]


# --- this machine


@pytest.fixture
def sys_tree(tmp_path):
    """Two NUMA nodes; a card alone on the first, a card with two functions and a GPU behind a switch on the second."""
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        write(tmp_path / f"devices/system/node/node{node}/cpulist", cpus)
        write(tmp_path / f"devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:       33554432 kB")

    def add(path: str, kind: str, speed: str = "16.0", lanes: int = 16, **files: str) -> None:
        folder = tmp_path / "devices/pci0000:00" / path
        files |= {"class": kind, "current_link_speed": f"{speed} GT/s PCIe", "current_link_width": str(lanes)}
        for name, text in files.items():
            write(folder / name, text)
        (tmp_path / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (tmp_path / "bus/pci/devices" / folder.name).symlink_to(folder)

    add("0000:00:01.0", "0x060400")
    add("0000:00:01.0/0000:01:00.0", "0x020000", "8.0", 8, numa_node="0", **{"net/enx0a1b2c3d4e5f/speed": "25000"})
    switch = "0000:00:02.0/0000:80:00.0"
    for path in ("0000:00:02.0", switch, f"{switch}/0000:81:01.0", f"{switch}/0000:81:02.0"):
        add(path, "0x060400")
    rate = {"infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)"}
    add(f"{switch}/0000:81:01.0/0000:82:00.0", "0x020700", numa_node="1", **rate)
    add(f"{switch}/0000:81:01.0/0000:82:00.1", "0x020700", numa_node="1", **{"physfn/vendor": "0x15b3"})
    add(f"{switch}/0000:81:02.0/0000:83:00.0", "0x030200", numa_node="1", vendor="0x10de")
    add("0000:00:03.0", "0x010802")  # a disk
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_machine_read_from_the_kernel_without_names_and_addresses(sys_tree, monkeypatch):
    monkeypatch.setenv("PATH", str(sys_tree))
    machine = this_machine(sys_tree)
    assert sorted(machine.devices) == ["CPU0", "CPU1", "GPU0", "NIC0", "NIC1", "PCIe0"]
    assert machine.devices["CPU1"].detail == "8 CPUs, 32 GiB"
    assert [machine.devices[name].detail for name in ("NIC0", "NIC1")] == ["25 Gb/s", "200 Gb/s"]
    assert machine.path("NIC0", "CPU0").links[0].kind == "PCIe 3 x8"
    assert machine.path("GPU0", "NIC1").devices == ("GPU0", "PCIe0", "NIC1")
    assert machine.path("GPU0", "NIC1").bandwidth == LINKS["pcie4"].bandwidth
    assert machine.path("GPU0", "NIC0").devices == ("GPU0", "PCIe0", "CPU1", "CPU0", "NIC0")
    seen = repr((machine.devices, machine.links, machine.source))
    assert not any(secret in seen for secret in ("enx", "0a1b2c", "mlx5", os.uname().nodename))


@pytest.mark.parametrize(("topo", "query", "slowest"), [
    (WORKSTATION, "NVIDIA GeForce RTX 5090, 4, 16\nNVIDIA GeForce RTX 5090, 4, 8\n", "PCIe 4 x8"),
    ("topology is not supported here", "Tesla T4, 3, 16\nTesla T4, 3, 16\n", "PCIe 3 x16"),
    ("", "No devices were found\n", None),
])
def test_machine_with_gpus_is_what_nvidia_smi_prints(topo, query, slowest, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    write(tmp_path / "topo", topo)
    write(tmp_path / "query", query)
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = topo ] && exec /bin/cat {tmp_path}/topo\nexec /bin/cat {tmp_path}/query\n')
    program.chmod(0o755)
    machine = this_machine(tmp_path)
    if slowest is None:
        assert machine.gpus == []
    else:
        assert machine.path(0, 1).bottleneck.kind == slowest
