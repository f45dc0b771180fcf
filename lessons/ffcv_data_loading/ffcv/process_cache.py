"""FFCV's process cache without a Loader: only what fetches pages, so nothing is decoded and nothing compiled."""

from __future__ import annotations

import os
from collections.abc import Sequence


def read_through_process_cache(path: str | os.PathLike, order: Sequence[int], batch: int) -> tuple[int, int]:
    """Read an epoch; return the pages that FFCV made room for, and the bytes of memory that it took for them."""
    from ffcv.memory_managers import ProcessCacheManager
    from ffcv.reader import Reader

    manager = ProcessCacheManager(Reader(str(path)))
    batches = [order[i : i + batch] for i in range(0, len(order), batch)]
    context = manager.schedule_epoch(batches)
    with context:
        for number in range(len(batches)):
            context.start_batch(number)  # waits until the pages of this batch are there
        return len(context.memory), context.memory.nbytes
