"""Topologies: published figures, the best path, recorded `nvidia-smi topo -m`, and this machine."""

import itertools
import math
import os
import random
import stat
from dataclasses import replace

import cloudpickle
import pytest

from course_utils.hardware import LINKS
from course_utils.topology import (
    REFERENCES,
    Device,
    Link,
    Topology,
    cluster,
    from_matrix,
    reference,
    this_machine,
    two_level,
)
from course_utils.topology.detection import parse_gpus, parse_matrix, pcie_slot, read_numa, read_pci

# Recorded outputs; the columns were separated by tabs and the legend is left out.
# https://github.com/NVIDIA/nccl/issues/1505
DGX_A100 = """
GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7 NIC0 NIC1 NIC2 NIC3 NIC4 NIC5 NIC6 NIC7 NIC8 NIC9 NIC10 NIC11 CPU Affinity NUMA
GPU0 X NV12 NV12 NV12 NV12 NV12 NV12 NV12 PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS 48-63,176-191 3 N/A
GPU1 NV12 X NV12 NV12 NV12 NV12 NV12 NV12 PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS 48-63,176-191 3 N/A
GPU2 NV12 NV12 X NV12 NV12 NV12 NV12 NV12 SYS SYS PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS 16-31,144-159 1 N/A
GPU3 NV12 NV12 NV12 X NV12 NV12 NV12 NV12 SYS SYS PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS 16-31,144-159 1 N/A
GPU4 NV12 NV12 NV12 NV12 X NV12 NV12 NV12 SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS SYS SYS 112-127,240-255 7 N/A
GPU5 NV12 NV12 NV12 NV12 NV12 X NV12 NV12 SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS SYS SYS 112-127,240-255 7 N/A
GPU6 NV12 NV12 NV12 NV12 NV12 NV12 X NV12 SYS SYS SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS 80-95,208-223 5 N/A
GPU7 NV12 NV12 NV12 NV12 NV12 NV12 NV12 X SYS SYS SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS 80-95,208-223 5 N/A
NIC4 SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS X PIX SYS SYS SYS SYS SYS SYS
NIC10 SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS X PIX
"""
# https://github.com/vllm-project/vllm/issues/13855, rows of the GPUs and of the storage card (NIC1, NIC2)
DGX_H100 = """
GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7 NIC0 NIC1 NIC2 NIC3 NIC4 NIC5 NIC6 NIC7 NIC8 NIC9 NIC10 NIC11 CPU Affinity NUMA
GPU0 X NV18 NV18 NV18 NV18 NV18 NV18 NV18 PXB NODE NODE NODE NODE NODE SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU1 NV18 X NV18 NV18 NV18 NV18 NV18 NV18 NODE NODE NODE PXB NODE NODE SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU2 NV18 NV18 X NV18 NV18 NV18 NV18 NV18 NODE NODE NODE NODE PXB NODE SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU3 NV18 NV18 NV18 X NV18 NV18 NV18 NV18 NODE NODE NODE NODE NODE PXB SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU4 NV18 NV18 NV18 NV18 X NV18 NV18 NV18 SYS SYS SYS SYS SYS SYS PXB NODE NODE NODE NODE NODE 56-111,168-223 1 N/A
GPU5 NV18 NV18 NV18 NV18 NV18 X NV18 NV18 SYS SYS SYS SYS SYS SYS NODE NODE NODE PXB NODE NODE 56-111,168-223 1 N/A
GPU6 NV18 NV18 NV18 NV18 NV18 NV18 X NV18 SYS SYS SYS SYS SYS SYS NODE NODE NODE NODE PXB NODE 56-111,168-223 1 N/A
GPU7 NV18 NV18 NV18 NV18 NV18 NV18 NV18 X SYS SYS SYS SYS SYS SYS NODE NODE NODE NODE NODE PXB 56-111,168-223 1 N/A
NIC1 NODE NODE NODE NODE SYS SYS SYS SYS NODE X PIX NODE NODE NODE SYS SYS SYS SYS SYS SYS
"""
# https://github.com/noonghunna/club-3090/issues/1229: two RTX 5090 in a workstation
WORKSTATION = """
 GPU0 GPU1 CPU Affinity NUMA Affinity GPU NUMA ID
GPU0 X PHB 0-63 0 N/A
GPU1 PHB X 0-63 0 N/A
"""
# https://github.com/NVIDIA/go-gpuallocator/issues/17: eight RTX 4090 in a server
SERVER_4090 = """
GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7 NIC0 NIC1 CPU Affinity NUMA Affinity GPU NUMA ID
GPU0 X SYS SYS SYS SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU1 SYS X SYS SYS SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU2 SYS SYS X SYS SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU3 SYS SYS SYS X SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU4 SYS SYS SYS SYS X SYS SYS SYS SYS SYS 56-111,168-223 1 N/A
GPU5 SYS SYS SYS SYS SYS X SYS SYS SYS SYS 56-111,168-223 1 N/A
GPU6 SYS SYS SYS SYS SYS SYS X SYS PHB PHB 56-111,168-223 1 N/A
GPU7 SYS SYS SYS SYS SYS SYS SYS X SYS SYS 56-111,168-223 1 N/A
NIC0 SYS SYS SYS SYS SYS SYS PHB SYS X PIX
NIC1 SYS SYS SYS SYS SYS SYS PHB SYS PIX X
"""


def kinds(topology, a, b):
    return [topology.devices[name].kind for name in topology.path(a, b).devices[1:-1]]


@pytest.mark.parametrize(
    "name, gigabytes, relays",
    [
        ("pcie workstation", 31.5, ["cpu"]), ("2 x t4", 1, ["cpu", "nic", "switch", "nic", "cpu"]),
        ("dgx a100", 300, ["nvswitch"]), ("dgx h100", 450, ["nvswitch"]), ("dgx h200", 450, ["nvswitch"]),
        ("gb200 nvl72", 900, ["nvswitch"]),
    ],
)
def test_reference_machines_have_their_published_speed(name, gigabytes, relays):
    machine = reference(name)
    assert machine.path(0, len(machine.gpus) - 1).bandwidth == pytest.approx(gigabytes * 1e9)
    assert kinds(machine, 0, len(machine.gpus) - 1) == relays
    assert "https://" in machine.source


@pytest.mark.parametrize(
    "name, gigabytes, port",
    [("dgx a100", 25, "HDR"), ("dgx h100", 50, "NDR"), ("gb200 nvl72", 50, "NDR"), ("pcie workstation", 1.25, "10G")],
)
def test_between_nodes_the_network_port_is_the_bottleneck(name, gigabytes, port):
    two = cluster(name, 2)
    path = two.path(0, len(two.gpus) // 2)
    assert path.bandwidth == gigabytes * 1e9
    assert port in path.bottleneck.kind
    assert path.latency == pytest.approx(LINKS["ib_ndr"].latency)  # NCCL's whole network step
    assert kinds(two, 0, len(two.gpus) // 2).count("nic") == 2


def test_every_pair_of_gpus_is_joined_alike_in_both_directions():
    for name in REFERENCES:
        machine = reference(name)
        for a, b in itertools.combinations(range(len(machine.gpus)), 2):
            there, back = machine.path(a, b), machine.path(b, a)
            assert (there.bandwidth, len(there.links)) == (back.bandwidth, len(back.links)), name
        step = {"pcie workstation": "pcie4", "2 x t4": "eth_10g"}.get(name, "nvlink4")
        assert machine.path(0, 1).latency == pytest.approx(LINKS[step].latency), name


def test_a_path_in_a_node_does_not_leave_it():
    two = cluster("dgx h100", 2)
    assert kinds(two, "node0.CPU0", "node0.CPU1") == []  # 50 GB/s by the network would beat the 22 between the CPUs
    assert kinds(two, "node0.GPU0", "node0.GPU1") == ["nvswitch"]
    assert "gpu" not in kinds(two, "node0.GPU0", "node0.NIC7")


@pytest.mark.parametrize("name", ["dgx a100", "dgx h100", "gb200 nvl72"])
def test_each_gpu_sends_through_a_card_of_its_own(name):
    two = cluster(name, 2)
    half = len(two.gpus) // 2
    cards = [[d for d in two.path(r, r + half).devices if "NIC" in d] for r in range(half)]
    assert len({pair[0] for pair in cards}) == len({pair[1] for pair in cards}) == half


@pytest.mark.parametrize("nics", ["gpu", "node"])
@pytest.mark.parametrize("intra, inter", [((3.4e-6, 1 / 450e9), (14e-6, 1 / 50e9)), ((1e-5, 1e-8), (1e-6, 1e-9))])
def test_two_level_has_exactly_the_alpha_and_beta_given(nics, intra, inter):
    made = two_level(3, 4, intra, inter, nics=nics)
    assert len(made.gpus) == 12
    for a, b in itertools.permutations(range(12), 2):
        alpha, beta = intra if a // 4 == b // 4 else inter
        path = made.path(a, b)
        assert (path.latency, path.bandwidth) == (alpha, 1 / beta)
    cards = {name for r in range(4) for name in made.path(r, r + 4).devices if "NIC" in name}
    assert len(cards) == (8 if nics == "gpu" else 2)


def brute_force(graph, start, end):
    """Best (bandwidth, -latency, -links) of all simple paths."""
    found = []

    def walk(here, seen, width, latency):
        if here == end:
            found.append((width, -latency, 1 - len(seen)))
        elif here == start or graph.devices[here].kind != "gpu":
            for link in graph.links:
                if here in (link.a, link.b):
                    there = link.b if here == link.a else link.a
                    if there not in seen:
                        walk(there, {*seen, there}, min(width, link.bandwidth), latency + link.latency)

    walk(start, {start}, math.inf, 0)
    return max(found, default=None)


def random_topology(seed: int) -> Topology:
    draw = random.Random(seed)
    names = [f"d{i}" for i in range(7)]
    devices = {name: Device(name, draw.choice(["gpu", "pcie", "cpu", "nvswitch"])) for name in names}
    links = [
        Link(*draw.sample(names, 2), "link", draw.choice([1.0, 2.0, 4.0]), draw.choice([0.0, 1.0, 2.0, 5.0]))
        for _ in range(draw.randint(6, 14))
    ]
    return Topology("random", "none", devices, links)


def test_best_path_is_that_of_a_search_of_all_paths():
    for seed in range(30):
        graph = random_topology(seed)
        for a, b in itertools.permutations(graph.devices, 2):
            best = brute_force(graph, a, b)
            if best is None:
                with pytest.raises(ValueError, match=f"no path from {a} to {b}"):
                    graph.path(a, b)
            else:
                path = graph.path(a, b)
                assert (path.bandwidth, -path.latency, -len(path.links)) == best, f"seed {seed}"


def test_time_of_a_message_is_latency_and_size_over_bandwidth():
    path = cluster("dgx h100", 2).path("node0.GPU0", "node1.GPU0")
    assert path.seconds(0) == path.latency
    assert path.seconds(1e9) == pytest.approx(14e-6 + 0.02)
    assert str(reference("dgx h100").path(0, 5)) == (
        "GPU0 → NVSwitch → GPU5: 450 GB/s, 3.4 µs, slowest link: NVLink 4 between GPU0 and NVSwitch"
    )


@pytest.mark.parametrize(
    "call, allowed",
    [
        (lambda: reference("dgx z"), "choose one of pcie workstation, dgx a100"),
        (lambda: reference("dgx a100").path("GPU0", "GPU9"), "choose one of .*GPU7"),
        (lambda: reference("dgx a100").path(0, 8), "has 8 GPUs"),
        (lambda: cluster("dgx a100", 2, "ib_fast"), "choose one of nvlink1"),
        (lambda: cluster(replace(reference("dgx a100"), name="mine"), 2), "link="),
        (lambda: from_matrix(WORKSTATION, gpu="rtx"), "choose one of p100"),
        (lambda: from_matrix("no table"), "whole output"),
        (
            lambda: from_matrix(WORKSTATION.replace("PHB", "FAR")),
            "'FAR'; expected one of PIX, PXB, PHB, NODE, SYS, NV1",
        ),
        (lambda: from_matrix(WORKSTATION.replace("GPU1 PHB X 0-63 0 N/A", "GPU1")), "row of GPU1 has 0 cells"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(call, allowed):
    with pytest.raises(ValueError, match=allowed):
        call()


def test_topologies_travel_to_workers_and_print_the_same_each_time():
    two = cluster("dgx a100", 2)
    two.path(0, 8)
    assert cloudpickle.loads(cloudpickle.dumps(two)) == two
    assert repr(two) == "Topology('2 x dgx a100': 16 gpu, 4 cpu, 8 pcie, 2 nvswitch, 16 nic, 1 switch)"


@pytest.mark.parametrize(
    "text, gpu, gigabytes", [(DGX_A100, "a100", 300), (DGX_H100, "h100", 450), (DGX_H100, None, 450)]
)
def test_matrix_of_an_nvswitch_machine(text, gpu, gigabytes):
    machine = from_matrix(text, gpu)
    assert len(machine.gpus) == 8
    for a, b in itertools.combinations(machine.gpus, 2):
        assert machine.path(a, b).bandwidth == gigabytes * 1e9
        assert kinds(machine, a, b) == ["nvswitch"]


@pytest.mark.parametrize("text, name", [(DGX_A100, "dgx a100"), (DGX_H100, "dgx h100")])
def test_reference_machine_has_the_recorded_places_of_gpus_and_cards(text, name):
    matrix, recorded, known = parse_matrix(text), from_matrix(text), reference(name)
    cards = [n for n in matrix.names if any(matrix.cells[gpu, n] == "PXB" for gpu in known.gpus)]
    assert len(cards) == 8  # the others serve storage and are not in the reference
    for gpu in known.gpus:
        for i, card in enumerate(cards):
            together = matrix.cells[gpu, card] == "PXB"
            assert (kinds(recorded, gpu, card) == ["pcie"]) == together
            assert (kinds(known, gpu, f"NIC{i}") == ["pcie"]) == together


def test_matrix_of_a_workstation_leads_through_the_cpu():
    machine = from_matrix(WORKSTATION)
    assert machine.path(0, 1).devices == ("GPU0", "CPU0", "GPU1")
    assert math.isnan(machine.path(0, 1).bandwidth) and math.isnan(machine.path(0, 1).seconds(1))
    assert "unknown speed" in str(machine.path(0, 1))
    assert from_matrix(WORKSTATION, "t4").path(0, 1).bandwidth == LINKS["pcie3"].bandwidth


def test_matrix_tells_pcie_switch_from_cpu_from_another_numa_node():
    machine = from_matrix(SERVER_4090)
    assert kinds(machine, "NIC0", "NIC1") == ["pcie"]
    assert kinds(machine, "GPU6", "NIC0") == ["cpu", "pcie"]
    assert kinds(machine, "GPU0", "GPU7") == ["cpu", "cpu", "cpu"]
    assert "socket link" in {link.kind for link in machine.path("GPU0", "GPU7").links}


def test_nvlink_bridges_and_older_or_coloured_output():
    text = "\x1b[4mGPU0\tGPU1\tGPU2\x1b[0m\nGPU0\tX\tNV4\tSOC\nGPU1\tNV4\tX\tSOC\nGPU2\tSOC\tSOC\tX\n"
    machine = from_matrix(text)
    assert machine.path("GPU0", "GPU1").devices == ("GPU0", "GPU1")
    assert machine.path("GPU0", "GPU1").bandwidth == 100e9
    assert machine.path("GPU0", "GPU2").devices == ("GPU0", "CPU0", "CPU1", "GPU2")


def test_pcie_speed_from_generation_and_lanes():
    speeds = [pcie_slot(generation, lanes).bandwidth for generation, lanes in ((3, 16), (4, 8), (1, 1))]
    assert speeds == [15.75e9, 15.75e9, 0.25e9]
    assert math.isnan(pcie_slot(0, 16).bandwidth)
    ((name, link),) = parse_gpus("Tesla T4, 3, 16\nFailed to read\n")
    assert (name, link.name) == ("Tesla T4", "PCIe 3 x16")
    assert math.isnan(parse_gpus("NVIDIA X, [N/A], [N/A]")[0][1].bandwidth)


def add_pci(root, path, **files):
    """Add a device below the PCI root, such as ``0000:00:01.0/0000:01:00.0``."""
    folder = root / "devices/pci0000:00" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    entries = root / "bus/pci/devices"
    entries.mkdir(parents=True, exist_ok=True)
    (entries / folder.name).symlink_to(folder)
    return folder


@pytest.fixture
def sys_tree(tmp_path):
    """Two NUMA nodes; a card alone on the first, a card with two functions and a GPU behind a switch on the second."""
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       33554432 kB\n")
    port = {"class": "0x020000", "current_link_speed": "8.0 GT/s PCIe", "current_link_width": "8"}
    add_pci(tmp_path, "0000:00:01.0", **{"class": "0x060400"})
    alone = add_pci(tmp_path, "0000:00:01.0/0000:01:00.0", **port, numa_node="0")
    (alone / "net/enx0a1b2c3d4e5f").mkdir(parents=True)
    (alone / "net/enx0a1b2c3d4e5f/speed").write_text("25000\n")
    switch = "0000:00:02.0/0000:80:00.0"
    wide = {"class": "0x060400", "current_link_speed": "16.0 GT/s PCIe", "current_link_width": "16"}
    for path in ("0000:00:02.0", switch, f"{switch}/0000:81:01.0", f"{switch}/0000:81:02.0"):
        add_pci(tmp_path, path, **wide)
    nic = add_pci(tmp_path, f"{switch}/0000:81:01.0/0000:82:00.0", **wide | {"class": "0x020700"}, numa_node="1")
    (nic / "infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (nic / "infiniband/mlx5_0/ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
    virtual = add_pci(tmp_path, f"{switch}/0000:81:01.0/0000:82:00.1", **wide | {"class": "0x020700"}, numa_node="1")
    (virtual / "physfn").symlink_to(nic)
    gpu = wide | {"class": "0x030200", "vendor": "0x10de"}
    add_pci(tmp_path, f"{switch}/0000:81:02.0/0000:83:00.0", **gpu, numa_node="1")
    add_pci(tmp_path, "0000:00:03.0", **{"class": "0x010802"})  # a disk
    return tmp_path


@pytest.fixture
def no_nvidia_smi(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))


def test_machine_read_from_the_kernel(sys_tree, no_nvidia_smi):
    machine = this_machine(sys_tree)
    assert repr(machine) == "Topology('this machine': 1 gpu, 2 cpu, 1 pcie, 2 nic)"
    assert machine.devices["CPU1"].detail == "8 CPUs, 32 GiB"
    assert [machine.devices[name].detail for name in ("NIC0", "NIC1")] == ["25 Gb/s", "200 Gb/s"]
    assert machine.path("NIC0", "CPU0").links[0].kind == "PCIe 3 x8"
    assert machine.path("GPU0", "NIC1").devices == ("GPU0", "PCIe0", "NIC1")
    assert machine.path("GPU0", "NIC1").bandwidth == LINKS["pcie4"].bandwidth
    assert machine.path("GPU0", "NIC0").devices == ("GPU0", "PCIe0", "CPU1", "CPU0", "NIC0")
    seen = repr((machine.devices, machine.links, machine.source))
    assert not any(secret in seen for secret in ("enx", "0a1b2c", "mlx5", os.uname().nodename))


def test_virtual_functions_and_other_devices_are_left_out(sys_tree):
    assert [device.address for device in read_pci(sys_tree)] == ["0000:01:00.0", "0000:82:00.0", "0000:83:00.0"]
    assert [(node.cpus, node.memory) for node in read_numa(sys_tree)] == [(8, 2**35), (8, 2**35)]


def test_machine_without_anything_to_read_is_one_cpu(tmp_path, no_nvidia_smi):
    machine = this_machine(tmp_path / "nothing")
    assert list(machine.devices) == ["CPU0"]
    assert machine.devices["CPU0"].detail.startswith(f"{os.cpu_count()} CPUs")
    (broken := tmp_path / "bus/pci/devices/0000:00:01.0").mkdir(parents=True)
    (broken / "class").write_text("0x020000")
    (broken / "current_link_speed").write_text("Unknown")
    assert list(this_machine(tmp_path).devices) == ["CPU0", "NIC0"]


def stand_in_smi(folder, topo, query):
    """Put a program called nvidia-smi on the path that prints what was recorded."""
    program = folder / "nvidia-smi"
    (folder / "topo.txt").write_text(topo)
    (folder / "query.txt").write_text(query)
    program.write_text(
        '#!/bin/sh\n[ "$1" = topo ] && exec /bin/cat "${0%/*}/topo.txt"\nexec /bin/cat "${0%/*}/query.txt"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_machine_with_gpus_is_what_nvidia_smi_prints(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    stand_in_smi(tmp_path, DGX_A100, "NVIDIA A100-SXM4-80GB, 4, 16\n" * 8)
    machine = this_machine()
    assert machine.path(0, 7).bottleneck.kind == "NVLink 3"
    assert kinds(machine, "GPU0", "NIC1") == ["pcie"]
    stand_in_smi(tmp_path, WORKSTATION, "NVIDIA GeForce RTX 5090, 4, 16\nNVIDIA GeForce RTX 5090, 4, 8\n")
    machine = this_machine()
    assert machine.path(0, 1).bottleneck.kind == "PCIe 4 x8"
    assert machine.path(0, 1).bandwidth == LINKS["pcie4"].bandwidth / 2
    stand_in_smi(tmp_path, "topology is not supported here", "Tesla T4, 3, 16\nTesla T4, 3, 16\n")
    assert this_machine().path(0, 1).devices == ("GPU0", "CPU0", "GPU1")
    stand_in_smi(tmp_path, "", "No devices were found\n")
    assert this_machine(tmp_path).gpus == []
