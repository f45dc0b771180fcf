"""The exercises on data loading: solutions pass, empty stubs fail, usual wrong answers get their own hint."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import wrong_data_loading
from exercise_cases import ExerciseTests

from course_utils.checks import _beton, _jobs, _limits
from course_utils.checks import data_loading as data_loading
from course_utils.ffcv import fixes

pytestmark = pytest.mark.guard(90)


@pytest.fixture
def with_ffcv():
    if reason := fixes.missing():
        pytest.skip(reason)
    fixes.apply_fixes()


class TestDataLoading(ExerciseTests):
    checks, mutants = data_loading, wrong_data_loading

    def passes(self, name, answer):
        getattr(data_loading, name)(answer)

    def test_wrong_answer_is_refused_with_its_own_hint(self, mutant):
        if mutant.hint == "numba" and fixes.missing():
            pytest.skip("nothing is compiled without FFCV")
        super().test_wrong_answer_is_refused_with_its_own_hint(mutant)

    def test_header_with_another_reader_passes(self):
        def read_header(file):
            """Number by number, from where the file stands, with a seek only at the end."""

            def number(size):
                return int.from_bytes(file.read(size), "little")

            version, count = number(2), number(2)
            if version != 2:
                raise ValueError
            values = {"page_size": number(4), "samples": number(8), "table": number(8)}
            fields = []
            for _ in range(count):
                kind, name = number(1), file.read(16)
                fields.append([name.split(b"\0")[0].decode("ascii"), np.uint8(kind)])
                file.seek(1024, io.SEEK_CUR)
            return {"version": np.uint16(version), "fields": tuple(fields), **values}

        self.passes("read_header", read_header)

    @pytest.mark.usefixtures("with_ffcv")
    def test_files_of_the_checks_are_read_by_ffcv(self, tmp_path: Path):
        from ffcv.reader import Reader

        fields = [("label", _beton.INT), ("weight", _beton.FLOAT), ("image", _beton.IMAGE)]
        images = _beton.pictures(30, 1)
        content = _beton.beton(fields, [list(range(30)), [0.5] * 30, images], shuffled=True)
        path = tmp_path / "small.beton"
        path.write_bytes(content)
        reader = Reader(str(path))
        assert (reader.num_samples, reader.page_size) == (30, _beton.PAGE)
        assert reader.field_names == ["label", "weight", "image"]
        sizes = dict(zip(reader.alloc_table["ptr"].tolist(), reader.alloc_table["size"].tolist(), strict=True))
        for sample, (label, weight, (mode, width, height, pointer)) in enumerate(reader.metadata.tolist()):
            assert (label, weight, mode) == (sample, 0.5, 1)
            assert images[sample].shape == (height, width, 3)
            assert content[pointer : pointer + sizes[pointer]] == images[sample].tobytes()

    @pytest.mark.usefixtures("with_ffcv")
    def test_first_file_is_written_by_ffcv_as_the_checks_write_one(self):
        columns = [_beton.pictures(40, 3), [7 * i % 10 for i in range(40)]]
        assert _beton.beton([("image", _beton.IMAGE), ("label", _beton.INT)], columns) == data_loading.own_file()

    def test_file_cannot_be_read_without_being_counted(self):
        file = _beton.CountedFile(bytes(range(200)) * 100)
        assert file.read(10) == bytes(range(10)) and file.count == 10
        buffered = io.BufferedReader(file)
        assert buffered.read(4) and file.count > 14
        before = file.count
        assert len(file.read()) == file.count - before and file.tell() == 20_000
        with pytest.raises(io.UnsupportedOperation):
            np.fromfile(file, np.uint8)

    def test_boxes_by_struct_pass(self):
        def encode_boxes(destination, boxes, malloc):
            data = np.array(boxes, dtype="<f4", order="C").tobytes()
            address = 0
            if data:
                address, memory = malloc(len(data))
                memory[...] = list(data)
            destination[0] = (len(boxes), address)

        self.passes("encode_boxes", encode_boxes)

    def test_without_ffcv_the_checks_say_so_and_pass(self, monkeypatch, capsys):
        monkeypatch.setattr(fixes, "missing", lambda: "not here")
        data_loading.own_file.cache_clear()
        for name in ("read_header", "encode_boxes", "box_decoder"):
            self.passes(name, self.answer(name))
        assert "without FFCV" in capsys.readouterr().out
        data_loading.own_file.cache_clear()

    def test_order_that_opens_a_page_when_it_could_have_been_loaded_passes(self):
        def attempt(pages, cap, ahead, rng):
            waiting = [rng.permutation(np.flatnonzero(pages == page)).tolist() for page in np.unique(pages)]
            rng.shuffle(waiting)
            order, opened, ended = [], [], []
            while waiting or opened:
                while waiting and len(opened) + sum(end >= len(order) - ahead for end in ended) < cap:
                    opened.append(waiting.pop())
                if not opened:  # all places are kept for pages that have ended
                    return None
                chosen = opened[rng.integers(len(opened))]
                order.append(chosen.pop())
                if not chosen:
                    opened.remove(chosen)
                    ended.append(len(order) - 1)
            return order

        def quasi_random(pages, cap, ahead, seed):
            rng = np.random.default_rng(seed)
            return next(filter(None, (attempt(pages, cap, ahead, rng) for _ in range(5000))))

        self.passes("quasi_random", quasi_random)
        pages, window = np.repeat(np.arange(32), 24), self.answer("quasi_random")
        for fn, opened in ((quasi_random, 7.8), (window, 6.3)):  # as the text says
            means = [data_loading._in_memory(pages[np.array(fn(pages, 9, 12, seed))], 0).mean() for seed in range(20)]
            assert np.mean(means) == pytest.approx(opened, abs=0.25)

    @pytest.mark.parametrize("seed", range(20))
    def test_right_order_passes_whatever_chance_brings(self, seed):
        answer = self.answer("quasi_random")
        self.passes("quasi_random", lambda *case: answer(*case[:3], 1000 * seed + case[3]))

    @pytest.mark.usefixtures("with_ffcv")
    def test_order_of_ffcv_passes(self):
        from ffcv.traversal_order.quasi_random import generate_order_inner

        def quasi_random(pages, cap, ahead, seed):
            orders = (window_of(pages, window, seed) for window in range(cap, 0, -1))
            return next(order for order in orders if data_loading._in_memory(pages[order], ahead).max() <= cap)

        def window_of(pages, window, seed):
            names = np.unique(pages)
            lists = [np.flatnonzero(pages == page) for page in names]
            table = np.zeros((len(names), max(map(len, lists))), np.int64)
            for row, samples in zip(table, lists, strict=True):
                row[: len(samples)] = samples
            order = np.zeros(len(pages), np.int64)
            generate_order_inner(seed, table, np.array(list(map(len, lists))), order, window)
            return order

        self.passes("quasi_random", quasi_random)

    def test_hit_rate_of_a_memory_that_knows_the_future(self):
        assert data_loading.hit_rate([1, 2, 3, 1, 2, 3], 3) == pytest.approx(3 / 6)
        assert data_loading.hit_rate([1, 2, 3, 1, 2, 3], 2) == pytest.approx(2 / 6)
        assert data_loading.hit_rate([1, 1, 2, 2, 3], 1) == pytest.approx(2 / 5)

    def test_jobs_have_one_bottleneck_each_that_any_long_measurement_finds(self):
        for name, job in (_jobs.JOBS | _jobs.HIDDEN).items():
            for skip in (5, 50):
                first, second = sorted(_jobs.steady(job.halved(stage), skip)[0] for stage in data_loading.STAGES)[:2]
                assert first < 0.98 * second, name
            assert _jobs.steady(job, 5)[1] == pytest.approx(_jobs.steady(job, 60)[1], abs=1), name

    def test_bottleneck_by_the_rate_of_the_last_batches_passes(self):
        def find_bottleneck(job):
            def ends(job):
                times = []
                for batch in job.batches(300):
                    taken = job.clock()
                    job.step(batch)
                    times.append((taken, job.clock()))
                return times

            def seconds(job):
                times = ends(job)
                return times[-1][1] - times[100][1]

            best = sorted(data_loading.STAGES, key=lambda stage: seconds(job.halved(stage)))[0]
            times = ends(job)
            gaps = [later[0] - before[1] for before, later in zip(times[100:], times[101:], strict=False)]
            return [best, np.float64(100 * sum(gaps) / (times[-1][1] - times[100][1]))]

        self.passes("find_bottleneck", find_bottleneck)

    def test_contiguous_shards_pass(self):
        def shard(count, batch, epoch, seed):
            rank, n = dist.get_rank(), dist.get_world_size()
            order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
            own = order.tensor_split(n)[rank]
            return own.tensor_split(-(-count // (batch * n)))

        self.passes("shard", shard)

    def test_answer_that_never_ends_is_refused_and_ended(self, monkeypatch):
        def quasi_random(pages, cap, ahead, seed):
            while True:
                last.append(time.monotonic())
                del last[:-1]
                time.sleep(0.001)

        last = []
        monkeypatch.setattr(_limits, "LIMIT", 2.0)
        error = self.refusal("quasi_random", quasi_random)
        assert error.hint == "endless" and "does not come to an end" in str(error)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and time.monotonic() - last[0] < 2:
            time.sleep(0.2)
        assert time.monotonic() - last[0] >= 2  # nobody runs any more

    def test_reader_that_never_ends_on_another_version_is_ended(self, monkeypatch):
        def read_header(file):
            try:
                return answer(file)
            except ValueError:
                while True:
                    time.sleep(0.001)

        answer = self.answer("read_header")
        monkeypatch.setattr(_limits, "LIMIT", 5.0)
        assert self.refusal("read_header", read_header).hint == "endless"

    def test_refusals_name_bytes_samples_and_ranks(self):
        def text(name):
            wrong = next(m for m in wrong_data_loading.MUTANTS if m.answer.__name__ == name)
            return str(self.refusal(wrong.exercise, wrong.answer))

        assert "65,536 bytes were read, 2,106 do;" in text("first_page_for_the_header")
        assert re.search(r"4,2\d\d,\d{3} bytes were read, 2,\d{3} do;", text("whole_file_for_a_sample"))
        assert "2 ranks, 299 samples in batches of 16: 1 samples come twice" in text("sampler_of_torch")
        assert "65 samples in batches of 32: the ranks have 2, 1 batches." in text("every_nth_sample")
        assert "32 pages are open at once; 4 fit." in text("full_shuffle")
