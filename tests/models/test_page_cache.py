"""Orders of reading and the pages that they need; what Linux says of mapped files."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest
from conftest import missing

from lessons.ffcv_data_loading import ffcv, page_cache


@pytest.mark.parametrize("window", [1, 4, 16, 100])
def test_quasi_random_is_a_permutation_with_few_pages_open(window):
    page_of = np.sort(np.random.default_rng(1).integers(5, 45, 400))
    order, again, other = (page_cache.quasi_random(page_of, window, np.random.default_rng(seed)) for seed in (2, 2, 3))
    assert sorted(order.tolist()) == list(range(400))
    assert page_cache.in_memory(page_of[order], 0).max() <= window
    assert np.array_equal(order, again) and not np.array_equal(order, other)


@pytest.mark.parametrize("size", [1, 8, 30])
def test_pages_held_is_the_room_that_ffcv_makes(size):
    if reason := ffcv.missing():
        missing(reason)
    ffcv.apply_fixes()
    from ffcv.memory_managers.process_cache.schedule import compute_schedule

    rng = np.random.default_rng(size)
    page_of = np.sort(rng.integers(0, 40, 300))
    for order in (np.arange(300), rng.permutation(300), page_cache.quasi_random(page_of, 5, rng)):
        batches = [{*page_of[order[i : i + size]].tolist()} for i in range(0, 300, size)]
        assert page_cache.pages_held(order, page_of, size) == compute_schedule(batches).num_slots


def test_hits_of_memories_by_hand():
    order, page_of = np.arange(90), np.repeat(np.arange(10), 9)
    assert page_cache.share_from_memory([order, order], page_of, 9) == pytest.approx(1 - 10 / 90)  # a page short
    assert page_cache.share_from_memory([order, order], page_of, 10) == 1
    assert page_cache.share_from_memory([np.array([0, 1, 0, 2, 0, 1])], np.arange(3), 2) == pytest.approx(2 / 6)
    assert page_cache.hit_rate([1, 2, 3, 1, 2, 3], 2) == pytest.approx(2 / 6)  # it knows what comes
    assert page_cache.hit_rate([1, 1, 2, 2, 3], 1) == pytest.approx(2 / 5)


@pytest.mark.skipif(sys.platform != "linux", reason="counts of Linux")
def test_memory_of_a_mapped_file_is_not_the_process_s_own(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 80_000)  # 20 MB
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.max() == 255
    whole, share = page_cache.in_memory_of(path)
    assert whole >= 20_000_000 and 0 < share <= whole
    assert page_cache.in_memory_of(tmp_path / "another") == (0, 0)
    with mmap.mmap(-1, 40_000_000, flags=mmap.MAP_PRIVATE) as kept:  # new pages: an allocator may have old ones left
        own = page_cache.own_memory()
        kept.write(b"1" * len(kept))
        assert page_cache.own_memory() - own > 0.9 * len(kept)
