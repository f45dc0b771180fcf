"""Data sheet figures: every one has a source, and they agree with each other where they must."""

import re

import pytest

from course_utils.hardware import GPUS, LINKS


def test_every_figure_names_a_title_and_an_address():
    for entry in (*LINKS.values(), *GPUS.values()):
        assert re.search(r"\w+, https://\S+", entry.source), entry.name


def test_pcie_follows_from_its_rate_and_encoding():
    """Billion transfers a second on each of 16 lanes, 128 payload bits in every 130."""
    for rate, key in ((8, "pcie3"), (16, "pcie4"), (32, "pcie5")):
        assert LINKS[key].bandwidth == pytest.approx(rate * 1e9 * 16 * 128 / 130 / 8, rel=0.005), key


def test_flops_are_dense():
    """989 TFLOP/s in bf16, not the 1979 that count 2:4 sparsity."""
    h100 = GPUS["h100"]
    assert h100.flops["bf16"] == 989.4e12
    assert h100.flops["bf16"] * h100.sparse_factor == pytest.approx(1979e12, rel=1e-3)
    assert GPUS["b200"].flops["bf16"] == 2.25e15


def test_ridge_point():
    assert GPUS["h100"].ridge() == pytest.approx(295.3, abs=0.1)
    with pytest.raises(ValueError, match="no figure for 'bf16'; choose one of fp64, fp32, fp16"):
        GPUS["p100"].ridge()
