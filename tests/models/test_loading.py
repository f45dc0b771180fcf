"""Measurements of data loaders: what is counted, what waits, and the ways that were recorded; no time is asserted."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lessons.ffcv_data_loading import loader_records, loading


def test_an_epoch_counts_its_samples_and_waits_for_what_is_loaded_in_turns():
    class Slow:
        def __iter__(self):
            for size in (4, 4, 3):
                time.sleep(0.05)
                yield np.zeros((size, 2)), np.zeros(size)

    steps = []
    speed = loading.measure(Slow(), lambda images, _: (steps.append(len(images)), time.sleep(0.05)), epochs=1)
    assert steps == [4, 4, 3] and 0.3 < speed.waits < 0.7  # both take the same
    assert speed.rate < 11 / 0.3 and speed.busy >= 0 and speed.core_ms >= 0


class Counting:
    """Samples that take work, by number."""

    def __init__(self, work: int):
        self.work = work

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sum(range(self.work))
        return torch.zeros(1), index


def test_work_of_worker_processes_is_counted_where_they_stay():
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    computing = DataLoader(Counting(3_000_000), 4, **options)
    speed = loading.measure(computing)
    assert speed.core_ms > 1  # of the worker; this process only waits
    assert loading.measure(DataLoader(loading.SlowReads(Counting(0), 0.03), 4, **options)).busy < speed.busy


def test_parts_of_a_pipeline_get_what_the_part_before_returned():
    seen = []
    work = {"double": lambda x: 2 * x, "add": lambda x: x + 1, "whole": lambda items: seen.append([*items])}
    costs = loading.costs_of_parts(work, [1, 2, 3, 4, 5], batch=4)
    assert list(costs) == ["double", "add", "whole"] and all(seconds >= 0 for seconds in costs.values())
    assert seen == [[3, 5, 7, 9], [11]] * 3  # once to fill the cache


def test_crops_lie_in_the_image_and_have_the_area_asked_for():
    random.seed(1)
    for width, height in ((300, 200), (200, 300), (2000, 50), (1, 1)):
        for _ in range(200):
            left, top, right, bottom = loading.crop_box(width, height)
            assert 0 <= left < right <= width and 0 <= top < bottom <= height
    areas = [(b[2] - b[0]) * (b[3] - b[1]) / 1e6 for b in (loading.crop_box(1000, 1000) for _ in range(500))]
    assert min(areas) < 0.12 and max(areas) > 0.9


def test_emulated_step_and_network():
    start = time.perf_counter()
    loading.emulated_step(1000)(np.zeros(50))
    assert time.perf_counter() - start >= 0.05
    model, images = loading.convnet(), torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    loss = loading.image_loss(model, images, torch.tensor([0, 1, 6]))
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None for p in model.parameters())


def test_records_name_the_ways_and_compare_them_within_rounds():
    name, row = loader_records.best_workers("ffcv_raw")
    assert name == "FFCV, raw, 2" and loader_records.rates("ffcv_raw") == {name: row["images_per_s"]}
    middle, least, most = loader_records.gain("ffcv_raw")
    assert 1 < least <= middle <= most and loader_records.gain("dataloader") == (1, 1, 1)
    times = loader_records.core_times("ffcv_raw")  # of 2 cores, both at work
    assert times == {"FFCV, raw": pytest.approx(2e3 / row["images_per_s"])}
