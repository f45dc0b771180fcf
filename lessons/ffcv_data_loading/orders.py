"""Orders of reading: which pages they keep in memory, what a memory makes of them, and the cases of the exercise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["SEEDS", "OrderCase", "by_page", "hit_rate", "in_memory", "open_in_window", "order_cases"]

SEEDS = 6  # orders that are judged where chance decides what fits


class OrderCase(NamedTuple):
    """The page of every sample, how many pages fit, how far ahead they are loaded (samples)."""

    name: str
    pages: np.ndarray
    cap: int
    ahead: int
    fallback: str | None = None  # hint for failures that nothing more exact explains


def order_cases() -> Iterator[OrderCase]:
    """Pages hold more samples than are loaded ahead: an order with one page open has no more than two in memory."""
    rng = np.random.default_rng(11)
    even, small = np.repeat(np.arange(1, 33), 24), np.repeat(np.arange(24), 16)
    odd = np.repeat(3 + 2 * np.arange(30), rng.integers(8, 40, 30))
    by_turns = np.concatenate([np.tile(group, 20) for group in np.arange(27).reshape(-1, 3)])
    long = np.repeat(np.arange(40), rng.integers(24, 60, 40))
    yield OrderCase("pages 1 to 32 of 24 samples each, 4 fit", even, 4, 0)
    yield OrderCase("30 pages of 8 to 39 samples, numbered 3, 5, 7, …, 5 fit", odd, 5, 0)
    yield OrderCase("three writers took turns, 4 of 27 pages fit", by_turns, 4, 0, "unsorted")
    yield OrderCase("24 pages of 16 samples, 1 fits", small, 1, 0, "one")
    yield OrderCase("10 pages of 30 samples, 12 fit", np.repeat(np.arange(1, 11), 30), 12, 0, "large-cap")
    yield OrderCase("pages 1 to 32 of 24 samples each, 9 fit, loaded 12 samples ahead", even, 9, 12)
    yield OrderCase("pages 1 to 32 of 24 samples each, 9 fit, loaded 2 samples ahead", even, 9, 2)
    yield OrderCase("40 pages of 24 to 59 samples, 12 fit, loaded 20 samples ahead", long, 12, 20)
    yield OrderCase("24 pages of 16 samples, 2 fit, loaded 8 samples ahead", small, 2, 8, "dead-end")


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


def open_in_window(case: OrderCase) -> float:
    """Pages open on average in orders of the widest window that fits: what others are measured by."""
    if case.name not in _OPEN:
        orders = [_windowed(case, seed) for seed in range(SEEDS if case.ahead else 1)]
        _OPEN[case.name] = float(np.mean(orders))
    return _OPEN[case.name]


_OPEN: dict[str, float] = {}  # by the name of the case


def _windowed(case: OrderCase, seed: int) -> float:
    names = np.unique(case.pages)
    for window in range(min(case.cap, len(names)), 0, -1):
        rng = np.random.default_rng(seed)
        waiting = [rng.permutation(np.flatnonzero(case.pages == page)).tolist() for page in names]
        order: list[int] = []
        opened: list[list[int]] = []
        while waiting or opened:
            opened += [waiting.pop() for _ in range(min(len(waiting), window - len(opened)))]
            chosen = opened[rng.integers(len(opened))]
            order.append(chosen.pop())
            opened = [page for page in opened if page]
        if in_memory(case.pages[order], case.ahead).max() <= case.cap:
            break
    return float(in_memory(case.pages[order], 0).mean())
