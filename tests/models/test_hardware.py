"""Data sheet figures: every one has a source, and they agree with each other where they must."""

import re

import pytest

from course_utils.hardware import GPUS, LINKS

GENERATIONS = ["p100", "v100", "a100", "h100", "h200", "b200"]


def test_every_figure_names_a_title_and_an_address():
    for entry in (*LINKS.values(), *GPUS.values()):
        assert re.search(r"\w+, https://\S+", entry.source), entry.name


def test_pcie_follows_from_its_rate_and_encoding():
    """Billion transfers a second on each of 16 lanes, 128 payload bits in every 130."""
    for rate, key in ((8, "pcie3"), (16, "pcie4"), (32, "pcie5")):
        assert LINKS[key].bandwidth == pytest.approx(rate * 1e9 * 16 * 128 / 130 / 8, rel=0.005), key


def test_newer_links_are_faster():
    for family in ("nvlink", "pcie", "ib", "eth"):
        speeds = [link.bandwidth for key, link in LINKS.items() if key.startswith(family) and key != "nvlink_c2c"]
        assert speeds == sorted(set(speeds)), family


def test_latency_grows_with_distance():
    nvlink, pcie, network = (LINKS[key].latency for key in ("nvlink4", "pcie5", "ib_ndr"))
    assert 0 < nvlink < pcie < network < 1e-4


def test_generations_grow():
    for figure in (
        lambda gpu: gpu.year, lambda gpu: gpu.memory_bandwidth, lambda gpu: gpu.memory_bytes,
        lambda gpu: gpu.flops["fp16"], lambda gpu: LINKS[gpu.nvlink].bandwidth,
    ):
        values = [figure(GPUS[key]) for key in GENERATIONS]
        assert values == sorted(values)


def test_flops_are_dense():
    """989 TFLOP/s in bf16, not the 1979 that count 2:4 sparsity."""
    h100 = GPUS["h100"]
    assert h100.flops["bf16"] == 989.4e12
    assert h100.flops["bf16"] * h100.sparse_factor == pytest.approx(1979e12, rel=1e-3)
    assert GPUS["b200"].flops["bf16"] == 2.25e15


def test_h100_peak_follows_from_its_units_and_clocks():
    h100 = GPUS["h100"]
    assert h100.sms * 4 * 512 * 2 * 1.83e9 == pytest.approx(h100.flops["bf16"], rel=1e-3)  # tensor cores
    assert h100.sms * 128 * 2 * 1.98e9 == pytest.approx(h100.flops["fp32"], rel=1e-3)  # CUDA cores


def test_ridge_point():
    assert GPUS["h100"].ridge() == pytest.approx(295.3, abs=0.1)
    with pytest.raises(ValueError, match="no figure for 'bf16'; choose one of fp64, fp32, fp16"):
        GPUS["p100"].ridge()
