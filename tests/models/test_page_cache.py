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
    order = page_cache.quasi_random(page_of, window, np.random.default_rng(2))
    assert sorted(order.tolist()) == list(range(400))
    pages = page_of[order].tolist()
    first, last = {}, {}
    for at, page in enumerate(pages):
        first.setdefault(page, at)
        last[page] = at
    assert max(sum(first[page] <= at <= last[page] for page in first) for at in range(400)) <= window
    again = page_cache.quasi_random(page_of, window, np.random.default_rng(2))
    assert np.array_equal(order, again)
    assert not np.array_equal(order, page_cache.quasi_random(page_of, window, np.random.default_rng(3)))


def test_pages_held_by_hand():
    def held(pages, batch=1, ahead=0):
        return page_cache.pages_held(range(len(pages)), np.array(pages), batch, ahead)

    assert held([1, 2, 3]) == 1
    assert held([1, 2, 3], ahead=1) == 2
    assert held([1, 2, 3, 3, 1, 1], batch=2) == 2
    assert held([1, 2, 3, 3, 1, 2], batch=2) == 3
    assert held(range(10), ahead=3) == 4


@pytest.mark.parametrize("size", [1, 8, 30])
def test_pages_held_is_the_room_that_ffcv_makes(size, tmp_path):
    if reason := ffcv.missing():
        missing(reason)
    ffcv.apply_fixes()
    from ffcv.memory_managers.process_cache.schedule import compute_schedule

    rng = np.random.default_rng(size)
    page_of = np.sort(rng.integers(0, 40, 300))
    for order in (np.arange(300), rng.permutation(300), page_cache.quasi_random(page_of, 5, rng)):
        batches = [{*page_of[order[i : i + size]].tolist()} for i in range(0, 300, size)]
        assert page_cache.pages_held(order, page_of, size) == compute_schedule(batches).num_slots


def test_share_from_memory_is_that_of_a_cache_that_drops_what_is_used_least_recently():
    share = page_cache.share_from_memory
    page_of, rng = np.repeat(np.arange(10), 9), np.random.default_rng(0)
    in_order = np.arange(90)
    assert share([in_order, in_order], page_of, 9) == pytest.approx(1 - 10 / 90)  # a page short: none is left
    assert share([in_order, in_order], page_of, 10) == 1
    for room in (1, 4, 9):
        orders = [rng.permutation(90), rng.permutation(90)]
        recent, hits = [], 0
        for at, page in enumerate(page_of[np.concatenate(orders)].tolist()):
            hits += page in recent and at >= 90
            recent = [*(p for p in recent if p != page), page][-room:]
        assert share(orders, page_of, room) == pytest.approx(hits / 90)


@pytest.mark.skipif(sys.platform != "linux", reason="counts of Linux")
def test_memory_of_a_mapped_file_is_not_the_process_s_own(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 80_000)  # 20 MB
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.astype(np.int64)[::1024].sum() >= 0 and mapped.max() == 255
    whole, share = page_cache.in_memory_of(path)
    assert whole >= 20_000_000 and 0 < share <= whole
    assert page_cache.in_memory_of(tmp_path / "another") == (0, 0)
    with mmap.mmap(-1, 40_000_000, flags=mmap.MAP_PRIVATE) as kept:  # new pages: an allocator may have old ones left
        own = page_cache.own_memory()
        kept.write(b"1" * len(kept))
        assert page_cache.own_memory() - own > 0.9 * len(kept)
    assert page_cache.bytes_from_disk() >= 0
    page_cache.drop_from_cache(path)
