"""Which pages of a file an order of reading needs, and what the operating system keeps of a file in memory."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np


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


def in_memory(read: np.ndarray, ahead: int, batch: int = 1) -> np.ndarray:
    """Pages in memory at each batch: each page from `ahead` batches before its first access to its last one.

    `read` has the page of each sample in the order of reading.
    """
    changes = np.zeros(-(-len(read) // batch) + 1, int)
    for page in np.unique(read):
        first, last = np.flatnonzero(read == page)[[0, -1]] // batch
        changes[max(first - ahead, 0)] += 1
        changes[last + 1] -= 1
    return np.cumsum(changes)[:-1]


def pages_held(order: Sequence[int], page_of: np.ndarray, batch: int) -> int:
    """Most pages in memory at once if each is read once, and three batches ahead, as by FFCV's process cache."""
    return int(in_memory(page_of[order], 3, batch).max())


def share_from_memory(epochs: Sequence[Sequence[int]], page_of: np.ndarray, room: int) -> float:
    """Share of the last epoch's samples whose page is among the `room` pages that were used most recently."""
    cache: dict[int, None] = {}  # least recently used first
    hits = 0
    for order in epochs:
        hits = 0
        for page in page_of[order].tolist():
            hits += page in cache
            cache.pop(page, None)
            cache[page] = None
            if len(cache) > room:
                del cache[next(iter(cache))]
    return hits / len(epochs[-1])


def hit_rate(accesses: Sequence[int], cap: int) -> float:
    """Share of accesses whose page is in memory, if ``cap`` fit and the one that is needed latest goes first."""
    later: dict[int, list[int]] = {}
    for step in reversed(range(len(accesses))):
        later.setdefault(accesses[step], []).append(step)
    held, hits = set(), 0
    for page in accesses:
        later[page].pop()
        hits += page in held
        if page not in held:
            if len(held) == cap:
                held.remove(max(held, key=lambda p: later[p][-1] if later[p] else math.inf))
            held.add(page)
    return hits / len(accesses)


def _count(path: str, name: str) -> int:
    """What Linux counts of this process under a name; 0 on other systems."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def own_memory() -> int:
    """Bytes of memory that are this process's own, not those of files that it has mapped."""
    return 1024 * _count("/proc/self/status", "RssAnon")


def bytes_from_disk() -> int:
    """Bytes that were fetched from a disk for this process so far; none where a file lies in memory only."""
    return _count("/proc/self/io", "read_bytes")


def drop_from_cache(path: str | os.PathLike) -> None:
    """Ask the system to forget what it has of a file in memory. It keeps what a process has mapped."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_memory_of(path: str | os.PathLike) -> tuple[int, int]:
    """Bytes of a mapped file that this process has in memory; and its share, in which n processes divide a page."""
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
