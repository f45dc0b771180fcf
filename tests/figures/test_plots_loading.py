"""Figures of data loading: files are to scale, pages stand where they are read, bars are as long as their numbers."""

import pytest
from figures import BETON, bars, edge, key, texts, titles
from matplotlib.colors import to_rgb
from matplotlib.patches import ConnectionPatch

from course_utils import plots


def drawn(ax):
    """Left and right ends of the segments, in bytes."""
    return [(path.get_extents().x0, path.get_extents().x1) for c in ax.collections for path in c.get_paths()]


class TestFile:
    def test_every_segment_is_to_scale(self):
        figure = plots.file_layout(BETON, "measured: a file")
        whole, start = figure.axes
        assert drawn(whole) == [(a, a + size) for _, a, size in BETON]
        assert whole.get_xlim() == (0, BETON[-1][1] + BETON[-1][2])
        assert drawn(start) == [(a, a + size) for _, a, size in BETON[:3]] and start.get_xlim() == (0, 66_106)
        assert figure.get_suptitle() == "measured: a file"

    def test_what_is_too_small_is_enlarged_and_named_there(self):
        whole, start = plots.file_layout(BETON, "").axes
        assert set(texts(whole)) == {"47 x heap page, 8 MiB", "allocation table, 46.9 KiB"}
        assert {"header, 24 B", "field descriptors, 2.03 KiB", "data table, 62.5 KiB"} <= set(texts(start))
        assert "enlarged 6,092 times" in texts(start)
        lines = [artist for artist in whole.figure.artists if isinstance(artist, ConnectionPatch)]
        assert [line.xy1[0] for line in lines] == [0, 66_106]

    def test_small_parts_of_what_is_enlarged_are_enlarged_again(self):
        segments = [("a", 0, 1), ("b", 1, 2), ("c", 3, 10_000), ("d", 10_003, 10_000_000)]
        rows = plots.file_layout(segments, "").axes
        assert [ax.get_xlim() for ax in rows] == [(0, 10_010_003), (0, 10_003), (0, 3)]

    def test_labels_have_one_colour(self):
        whole, start = plots.file_layout(BETON, "").axes
        colors = [tuple(c.get_edgecolor()[0][:3]) for c in whole.collections]
        assert len(colors) == len(set(colors)) == 5
        assert [tuple(c.get_edgecolor()[0][:3]) for c in start.collections] == colors[:3]


class TestPages:
    ORDERS = {"sequential": [(i, i // 2) for i in range(6)], "random": [(0, 2), (1, 0), (2, 1)]}

    def test_pages_stand_at_their_steps_on_equal_axes(self):
        figure = plots.page_accesses(self.ORDERS, "measured: pages", notes={"random": "hit rate 0 %"})
        one, other = figure.axes
        assert [tuple(map(int, xy)) for xy in zip(*one.lines[0].get_data(), strict=True)] == self.ORDERS["sequential"]
        assert (one.get_xlim(), one.get_ylim()) == (other.get_xlim(), other.get_ylim())
        assert titles(figure) == ["sequential", "random\nhit rate 0 %"]
        assert figure.get_suptitle() == "measured: pages"


class TestLoaders:
    RATES = {"DataLoader": 1000.0, "FFCV raw": 4210.0, "another": 500.0}

    def test_bars_are_rates_with_how_many_times_the_baseline(self):
        (ax,) = plots.loader_bars(self.RATES, "recorded: rates", "DataLoader", strong=["FFCV raw"]).axes
        assert bars(ax) == [(0, 1000), (0, 4210), (0, 500)]
        assert texts(ax) == ["1,000  1.0×", "4,210  4.2×", "500  0.5×"]
        assert len({edge(bar) for bar in ax.patches}) == 3
        assert "samples/s" in ax.get_xlabel()

    def test_times_that_are_known_better_are_shown_instead(self):
        times = {"DataLoader": 1.0, "FFCV raw": 4.6, "another": 0.4}
        (ax,) = plots.loader_bars(self.RATES, "", "DataLoader", times=times).axes
        assert texts(ax) == ["1,000  1.0×", "4,210  4.6×", "500  0.4×"]

    def test_without_a_baseline_there_are_only_rates(self):
        (ax,) = plots.loader_bars(self.RATES, "", unit="MB/s").axes
        assert texts(ax) == ["1,000", "4,210", "500"] and ax.get_xlabel() == "MB/s"


class TestShares:
    def test_shares_fill_the_bar_and_seconds_stand_at_its_end(self):
        rows = {"one image": {"decode": 3e-3, "copy": 1e-3}, "an epoch": {"step": 1.5, "wait": 0.5}}
        (ax,) = plots.time_shares(rows, "measured: shares").axes
        assert bars(ax) == [(0, 0.75), (0.75, 0.25)] * 2
        assert {"75%", "25%", "4 ms", "2 s"} <= set(texts(ax))
        assert edge(ax.patches[0]) == pytest.approx(to_rgb(plots.LOADING_COLORS["decode"]))
        assert key(ax) == ["decode", "copy", "step", "wait"]

    def test_parts_that_the_course_does_not_know_have_colours_of_their_own(self):
        parts = dict.fromkeys(("decode", "my own", "another", "wait"), 1.0)
        (ax,) = plots.time_shares({"a": parts}, "").axes
        assert len({edge(bar) for bar in ax.patches}) == 4
