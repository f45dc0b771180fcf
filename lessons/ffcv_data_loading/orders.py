"""Orders of reading: which pages they keep in memory, and what a memory makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["by_page", "hit_rate", "in_memory"]


def in_memory(read: np.ndarray, ahead: int) -> np.ndarray:
    """Pages in memory at each step: each from ``ahead`` steps before its first access to its last one."""
    steps = np.zeros(len(read) + 1, int)
    for page in np.unique(read):
        places = np.flatnonzero(read == page)
        steps[max(places[0] - ahead, 0)] += 1
        steps[places[-1] + 1] -= 1
    return np.cumsum(steps)[:-1]


def by_page(order: np.ndarray, pages: np.ndarray) -> dict[int, np.ndarray]:
    """The samples of each page in the order of reading; pages in the order in which they are opened."""
    read = pages[order]
    _, first = np.unique(read, return_index=True)
    return {int(page): order[read == page] for page in read[np.sort(first)]}


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
