"""Which pages of a file an order of reading needs, and what the operating system keeps of a file in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = [
    "LINUX", "bytes_from_disk", "drop_from_cache", "in_memory_of", "own_memory", "pages_held", "quasi_random",
    "share_from_memory",
]

#: Whether the counts of processes below can be read here; elsewhere they are 0.
LINUX = Path("/proc/self/status").exists()


def quasi_random(page_of: np.ndarray, window: int, rng: np.random.Generator) -> np.ndarray:
    """Samples in an order that keeps `window` pages open at most: int (n,).

    The samples of the open pages come at random; when a page is used up, the next one, also at random, is opened.
    `page_of` has the page of each sample.
    """
    left = {page: rng.permutation(np.flatnonzero(page_of == page)).tolist() for page in np.unique(page_of)}
    closed, opened, order = rng.permutation([*left]).tolist(), [], []
    while closed or opened:
        while closed and len(opened) < window:
            opened.append(closed.pop())
        page = opened[rng.integers(len(opened))]
        order.append(left[page].pop())
        if not left[page]:
            opened.remove(page)
    return np.array(order)


def pages_held(order: Sequence[int], page_of: np.ndarray, batch: int, ahead: int = 3) -> int:
    """Most pages in memory at once if each is read once, `ahead` batches before its first use, and kept to its last.

    Parameters
    ----------
    order : sequence of int
        Numbers of samples in the order of reading.
    page_of : array of int
        The page of each sample.
    batch : int
        Samples in a batch.
    ahead : int
        FFCV's process cache takes three.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, page in enumerate(np.asarray(page_of)[np.asarray(order)].tolist()):
        first.setdefault(page, place // batch)
        last[page] = place // batch
    changes = np.zeros(max(last.values()) + 2, int)
    for page, begin in first.items():
        changes[max(0, begin - ahead)] += 1
        changes[last[page] + 1] -= 1
    return int(np.cumsum(changes).max())


def share_from_memory(epochs: Sequence[Sequence[int]], page_of: np.ndarray, room: int) -> float:
    """Share of the last epoch's samples whose page is in memory.

    The memory has room for `room` pages; when it is full, the page that was used least recently goes.
    """
    cache: dict[int, None] = {}  # least recently used first
    hits = 0
    for order in epochs:
        hits = 0
        for page in np.asarray(page_of)[np.asarray(order)].tolist():
            hits += page in cache
            cache.pop(page, None)
            cache[page] = None
            if len(cache) > room:
                del cache[next(iter(cache))]
    return hits / len(epochs[-1])


def _counts(path: str, *names: str) -> list[int]:
    lines = [line.split() for line in Path(path).read_text().splitlines()] if LINUX else []
    found = {line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1 and line[0].rstrip(":") in names}
    return [found.get(name, 0) for name in names]


def own_memory() -> int:
    """Bytes of memory that are this process's own, not those of files that it has mapped."""
    return 1024 * _counts("/proc/self/status", "RssAnon")[0]


def bytes_from_disk() -> int:
    """Bytes that were fetched from a disk for this process so far; none where a file lies in memory only."""
    return _counts("/proc/self/io", "read_bytes")[0]


def drop_from_cache(path: str | os.PathLike) -> None:
    """Ask the system to forget what it has of a file in memory. It keeps what a process has mapped."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_memory_of(path: str | os.PathLike) -> tuple[int, int]:
    """Bytes of a mapped file that this process has in memory, and its fair share of them.

    A page that n processes have counts an n-th in the fair share.
    """
    smaps, rss, pss, inside = Path("/proc/self/smaps"), 0, 0, False
    for line in smaps.read_text().splitlines() if smaps.exists() else ():
        name, *values = line.split()
        if not name.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and name == "Rss:":
            rss += 1024 * int(values[0])
        elif inside and name == "Pss:":
            pss += 1024 * int(values[0])
    return rss, pss
