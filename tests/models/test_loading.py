"""Measurements of data loaders: what is counted, what waits, and the ways that were recorded; no time is asserted."""

from __future__ import annotations

import io
import random
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from lessons.ffcv_data_loading import loader_records, loading
from lessons.ffcv_data_loading.ffcv import ImageFolder, image_folder


def batches(*sizes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.zeros((size, 2)), np.zeros(size)) for size in sizes]


def test_an_epoch_counts_its_samples_and_waits_no_longer_than_it_takes():
    steps = []
    speed = loading.measure(batches(4, 4, 3), lambda *batch: steps.append(len(batch[0])), epochs=1)
    assert steps == [4, 4, 3] and speed.rate > 0 and 0 <= speed.waits <= 1
    assert speed.busy >= 0 and speed.core_ms >= 0


def test_a_loader_that_takes_turns_with_its_step_waits_for_what_it_loads():
    def slow():
        for batch in batches(2, 2, 2):
            time.sleep(0.05)
            yield batch

    class Loader:
        def __iter__(self):
            return slow()

    idle = loading.measure(Loader(), lambda *batch: time.sleep(0.05))
    assert 0.3 < idle.waits < 0.7  # both take the same


class Counting:
    """Samples that take work or time, by number."""

    def __init__(self, work: int):
        self.work = work

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sum(range(self.work))
        return torch.zeros(1), index


def test_work_of_worker_processes_is_counted_where_they_stay():
    loader = DataLoader(Counting(3_000_000), 4, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    computing = loading.measure(loader)
    assert computing.core_ms > 1  # of the worker; this process only waits
    assert loading.processes()
    slow = DataLoader(loading.SlowReads(Counting(0), 0.03), 4, num_workers=1, persistent_workers=True,
                      multiprocessing_context="fork")
    assert loading.measure(slow).busy < computing.busy
    assert len(loading.SlowReads(Counting(0), 0.03)) == 8


def test_parts_of_a_pipeline_get_what_the_part_before_returned():
    seen = []
    work = {"double": lambda x: 2 * x, "add": lambda x: x + 1, "whole": lambda items: seen.append([*items])}
    costs = loading.costs_of_parts(work, [1, 2, 3, 4, 5], batch=4, rounds=1)
    assert list(costs) == ["double", "add", "whole"] and all(seconds >= 0 for seconds in costs.values())
    assert seen == [[3, 5, 7, 9], [11]] * 2  # once to fill the cache


def test_crops_lie_in_the_image_and_have_the_area_asked_for():
    random.seed(1)
    for width, height in ((300, 200), (200, 300), (224, 224), (2000, 50), (1, 1)):
        for _ in range(200):
            left, top, right, bottom = loading.crop_box(width, height)
            assert 0 <= left < right <= width and 0 <= top < bottom <= height
    areas = [(b[2] - b[0]) * (b[3] - b[1]) / 1e6 for b in (loading.crop_box(1000, 1000) for _ in range(500))]
    assert min(areas) < 0.12 and max(areas) > 0.9


def test_emulated_step_and_network():
    start = time.perf_counter()
    loading.emulated_step(1000)(np.zeros(50))
    assert time.perf_counter() - start >= 0.05
    model, images = loading.convnet(7), torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    assert model(images.float()).shape == (3, 7)
    loss = loading.image_loss(model, images, torch.tensor([0, 1, 6]))
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None for p in model.parameters())


def test_slow_store_counts_requests_and_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    store = loading.SlowStore(tmp_path, wait=0.01, bandwidth=1e5)
    assert store.read("a") == b"x" * 1000 and store.read("a")
    assert (store.requests, store.bytes) == (2, 2000) and store.seconds >= 0.04


def test_large_photographs_and_contact_sheets_are_made_of_the_set(tmp_path):
    images = ImageFolder(image_folder(tmp_path, count=20, classes=2) / "train", lambda image: 1 / 0)
    sheet = images.contact_sheet(4)
    assert sheet.size == (440, 88)
    files = [images.large_photograph(number) for number in (0, 0, 1)]
    assert files[0] == files[1] != files[2]
    with Image.open(io.BytesIO(files[0])) as photograph:
        assert photograph.size == (1200, 960) and photograph.format == "JPEG"


def test_records_name_the_ways_and_compare_them_within_rounds():
    assert loader_records.rates_by_workers("dataloader")[0] > 100
    name, row = loader_records.best_workers("ffcv_raw")
    assert name == "FFCV, raw, 2" and loader_records.rates("ffcv_raw") == {name: row["images_per_s"]}
    middle, least, most = loader_records.gain("ffcv_raw")
    assert 1 < least <= middle <= most
    assert loader_records.gain("dataloader") == (1, 1, 1)
    lines = loader_records.table(["dataloader", "mosaicml_streaming"]).splitlines()
    assert lines[1].startswith("DataLoader, PIL") and lines[-1].startswith("MosaicML Streaming: without")
    assert {"cold_s", "next_process_s"} < {*loader_records.compile_seconds()}
    assert "2 cores" in loader_records.machine()


def test_modelled_step_waits_for_a_slow_loader_only():
    found = loader_records.with_step(("dataloader", "ffcv_raw"), 2900)
    (slow, both, waits), fast = found.values()
    assert both == slow < 2900 and waits == pytest.approx(1 - slow / 2900)
    assert fast[1:] == (2900, 0)
