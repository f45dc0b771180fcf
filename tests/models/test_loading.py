"""Measurements of data loaders: what is counted, what waits, and the ways that were recorded; no time is asserted."""

from __future__ import annotations

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
    assert steps == [4, 4, 3] and 0 < speed.waits < 1
    assert speed.rate < 11 / 0.3  # the least that they can wait


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
    assert loading.measure(DataLoader(Counting(3_000_000), 4, **options)).core_ms > 1  # this process only waits


def test_records_name_the_ways_and_compare_them_within_rounds():
    name, row = loader_records.best_workers("ffcv_raw")
    assert name == "FFCV, raw, 2" and loader_records.rates("ffcv_raw") == {name: row["images_per_s"]}
    middle, least, most = loader_records.gain("ffcv_raw")
    assert 1 < least <= middle <= most and loader_records.gain("dataloader") == (1, 1, 1)
    times = loader_records.core_times("ffcv_raw")  # of 2 cores, both at work
    assert times == {"FFCV, raw": pytest.approx(2e3 / row["images_per_s"])}
