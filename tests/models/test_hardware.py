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
