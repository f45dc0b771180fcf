"""Figures of data loading: files are to scale, pages stand where they are read, bars are as long as their numbers."""

import matplotlib.pyplot as plt
import pytest
from figures import inside, texts
from matplotlib.colors import to_rgb
from matplotlib.patches import ConnectionPatch

from course_utils import plots

MIB = 2**20
BETON = [
    ("header", 0, 24), ("field descriptors", 24, 2082), ("data table", 2106, 64_000),
    *(("heap page", 8 * MIB * (i + 1), 8 * MIB) for i in range(47)), ("allocation table", 48 * 8 * MIB, 48_000),
]


def drawn(ax):
    """Left and right ends of the segments, in bytes."""
    return [(path.get_extents().x0, path.get_extents().x1) for c in ax.collections for path in c.get_paths()]


def edge(patch):
    return tuple(patch.get_edgecolor()[:3])


class TestFile:
    def test_every_segment_is_to_scale(self):
        figure = plots.file_layout(BETON, "measured: a file")
        whole, start = figure.axes
        assert drawn(whole) == [(a, a + size) for _, a, size in BETON]
        assert whole.get_xlim() == (0, BETON[-1][1] + BETON[-1][2])
        assert drawn(start) == [(a, a + size) for _, a, size in BETON[:3]] and start.get_xlim() == (0, 66_106)
        assert figure.get_suptitle() == "measured: a file" and plt.get_fignums() == []

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

    def test_names_do_not_lie_over_each_other(self):
        segments = [(f"a name {i}", 100_000 * i, 99_000 if i % 2 else 1) for i in range(6)]
        figure = plots.file_layout([("first", 0, 1), *segments[1:], ("the last of all", 600_000, 1)], "")
        figure.draw_without_rendering()
        boxes = sorted((t.get_window_extent() for t in figure.axes[0].texts), key=lambda box: (box.y0, box.x0))
        assert not any(a.y0 == b.y0 and a.x1 > b.x0 for a, b in zip(boxes, boxes[1:], strict=False))

    @pytest.mark.parametrize("segments", [[("all", 0, 1)], BETON, BETON[:3], [("a", 10**12, 10**12)]])
    def test_nothing_is_cut_off(self, segments):
        inside(plots.file_layout(segments, "measured: a file"))

    @pytest.mark.parametrize(("segments", "message"), [
        ([], "at least one segment"), ([("a", 0, 0)], "at least one byte"), ([("a", -1, 2)], "from byte 0 on"),
        ([("a", 0, 10), ("b", 8, 2)], "'b' starts at byte 8, before 'a' ends at byte 10"),
    ])
    def test_impossible_files_are_refused(self, segments, message):
        with pytest.raises(ValueError, match=message):
            plots.file_layout(segments, "")


class TestPages:
    ORDERS = {"sequential": [(i, i // 2) for i in range(6)], "random": [(0, 2), (1, 0), (2, 1)]}

    def test_pages_stand_at_their_steps_on_equal_axes(self):
        figure = plots.page_accesses(self.ORDERS, "measured: pages", notes={"random": "hit rate 0 %"})
        one, other = figure.axes
        assert [tuple(map(int, xy)) for xy in zip(*one.lines[0].get_data(), strict=True)] == self.ORDERS["sequential"]
        assert (one.get_xlim(), one.get_ylim()) == (other.get_xlim(), other.get_ylim())
        assert (one.get_title(loc="left"), other.get_title(loc="left")) == ("sequential", "random\nhit rate 0 %")
        assert figure.get_suptitle() == "measured: pages"
        inside(figure)

    @pytest.mark.parametrize("orders", [{}, {"empty": []}])
    def test_an_order_must_read(self, orders):
        with pytest.raises(ValueError, match="at least one"):
            plots.page_accesses(orders, "")


class TestLoaders:
    RATES = {"DataLoader": 1000.0, "FFCV raw": 4210.0, "another": 500.0}

    def test_bars_are_rates_with_how_many_times_the_baseline(self):
        (ax,) = plots.loader_bars(self.RATES, "recorded: rates", "DataLoader", strong=["FFCV raw"]).axes
        assert [bar.get_width() for bar in ax.patches] == [1000, 4210, 500]
        assert texts(ax) == ["1,000  1.0×", "4,210  4.2×", "500  0.5×"]
        assert len({edge(bar) for bar in ax.patches}) == 3
        assert "samples/s" in ax.get_xlabel()
        inside(ax.figure)

    def test_times_that_are_known_better_are_shown_instead(self):
        times = {"DataLoader": 1.0, "FFCV raw": 4.6, "another": 0.4}
        (ax,) = plots.loader_bars(self.RATES, "", "DataLoader", times=times).axes
        assert texts(ax) == ["1,000  1.0×", "4,210  4.6×", "500  0.4×"]
        with pytest.raises(ValueError, match="times lacks 'another'"):
            plots.loader_bars(self.RATES, "", "DataLoader", times={"DataLoader": 1, "FFCV raw": 2})

    def test_without_a_baseline_there_are_only_rates(self):
        (ax,) = plots.loader_bars(self.RATES, "", unit="MB/s").axes
        assert texts(ax) == ["1,000", "4,210", "500"] and ax.get_xlabel() == "MB/s"

    @pytest.mark.parametrize(("rows", "options", "message"), [
        ({}, {}, "at least one row"), ({"a": 0.0}, {}, "above 0"), ({"a": float("nan")}, {}, "above 0"),
        ({"a": 1.0}, {"baseline": "b"}, "no row is called 'b'"),
        ({"a": 1.0}, {"strong": ["c"]}, "no row is called 'c'"),
    ])
    def test_impossible_rates_are_refused(self, rows, options, message):
        with pytest.raises(ValueError, match=message):
            plots.loader_bars(rows, "", **options)


class TestShares:
    def test_shares_fill_the_bar_and_seconds_stand_at_its_end(self):
        rows = {"one image": {"decode": 3e-3, "copy": 1e-3}, "an epoch": {"step": 1.5, "wait": 0.5}}
        (ax,) = plots.time_shares(rows, "measured: shares").axes
        bars = [bar for bar in ax.patches if bar.get_width()]
        assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 0.75), (0.75, 0.25)] * 2
        assert {"75%", "25%", "4 ms", "2 s"} <= set(texts(ax))
        assert edge(bars[0]) == pytest.approx(to_rgb(plots.LOADING_COLORS["decode"]))
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["decode", "copy", "step", "wait"]
        inside(ax.figure)

    def test_parts_that_the_course_does_not_know_have_colours_of_their_own(self):
        parts = dict.fromkeys(("decode", "my own", "another", "wait"), 1.0)
        (ax,) = plots.time_shares({"a": parts}, "").axes
        assert len({edge(bar) for bar in ax.patches}) == 4

    @pytest.mark.parametrize("rows", [{}, {"a": {}}, {"a": {"step": 0.0}}, {"a": {"step": 1.0, "wait": -0.1}}])
    def test_impossible_times_are_refused(self, rows):
        with pytest.raises(ValueError, match="at least one row; parts must not be negative, and not all 0"):
            plots.time_shares(rows, "")
