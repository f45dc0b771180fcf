"""Figures of lesson 01: what is drawn is what was given, labelled and with units."""

import numpy as np
import pytest
from figures import rows, texts, titles

from course_utils.costs import bootstrap_alpha_beta
from course_utils.plots import RANK_COLORS, generations, ladder, latency_fit, roofline


def test_generations_show_growth_not_figures():
    figure = generations(
        ["old\n2016", "new\n2024"], {"FLOP/s": [2e12, 20e12], "memory": [1.0, 3.0]}, "recorded: growth"
    )
    ax = figure.axes[0]
    assert {"FLOP/s: ×10", "memory: ×3"} <= set(texts(figure))
    assert [list(line.get_ydata()) for line in ax.lines[:2]] == [[1, 10], [1, 3]]
    assert ax.get_ylabel() == "multiple of old" and ax.get_yscale() == "log"
    assert titles(figure) == ["recorded: growth"]


def test_ladder_is_ordered_and_says_every_figure():
    rungs = {"slow": 1.25e9, "fast": 3.35e12, "middle": 63e9}
    figure = ladder(rungs, "recorded: links", {"slow": "network", "fast": "memory", "middle": "network"})
    ax = figure.axes[0]
    assert rows(ax) == ["fast", "middle", "slow"]
    assert texts(figure) == ["3.35 TB/s", "63 GB/s", "1.25 GB/s"]
    assert ax.get_xscale() == "log" and "one direction" in ax.get_xlabel()
    ends = [bar.get_x() + bar.get_width() for bar in ax.patches]
    assert ends == pytest.approx([3.35e12, 63e9, 1.25e9])
    colors = [bar.get_facecolor() for bar in ax.patches]
    assert colors[0] != colors[1] == colors[2]


def test_ladder_needs_no_groups():
    assert len({bar.get_facecolor() for bar in ladder({"a": 1e9, "b": 2e9}, "x").axes[0].patches}) == 1


def test_roof_bends_at_the_ridge():
    figure = roofline(1e12, 1e11, {"add": (0.1, 9e9), "matmul": (200, 9e11)}, "measured: here")
    ax = figure.axes[0]
    x, y = ax.lines[0].get_data()
    assert x[1] == pytest.approx(10) and y[1] == y[2] == 1e12
    assert y[0] == pytest.approx(x[0] * 1e11)
    assert {"add", "matmul", "ridge: 10 FLOP/byte", "1 TFLOP/s", "100 GB/s"} <= set(texts(figure))
    assert "FLOP per byte" in ax.get_xlabel() and ax.get_ylabel() == "FLOP/s"


def test_modelled_points_are_hollow():
    solid, hollow = (
        roofline(1e12, 1e11, {"add": (0.1, 9e9)}, "x", modelled=modelled).axes[0].lines[2] for modelled in (False, True)
    )
    assert solid.get_markerfacecolor() == RANK_COLORS[0]
    assert hollow.get_markerfacecolor() == "white"


def test_fit_shows_its_points_its_band_and_the_unseen_sizes():
    sizes = [2.0**k for k in range(10, 22, 2)]
    seconds = [1e-4 * (1 + 0.1 * (-1) ** i) + 1e-9 * size for i, size in enumerate(sizes)]
    unseen = [3e3, 3e5], [1.1e-4, 4e-4]
    figure = latency_fit(sizes, seconds, bootstrap_alpha_beta(sizes, seconds, 50), unseen, title="measured: pairs")
    ax = figure.axes[0]
    line, fitted, later = (line.get_data() for line in ax.lines[:3])
    assert np.allclose(fitted, (sizes, np.multiply(seconds, 1e3)))
    assert np.allclose(later, (unseen[0], np.multiply(unseen[1], 1e3)))
    assert len(ax.collections) == 1 and np.all(np.diff(line[1]) >= 0)
    assert "(ms)" in ax.get_ylabel() and "◆ predicted first, then measured" in texts(figure)
    without = latency_fit(sizes, seconds, bootstrap_alpha_beta(sizes, seconds, 50), title="measured: pairs")
    assert len(without.axes[0].lines) == 2
