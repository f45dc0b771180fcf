"""What other ways to load the images of lesson 15 were recorded at, by `measure_loaders.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = Path(__file__).resolve().parents[2] / "docs" / "loading.json"


@cache
def _record() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def compile_seconds() -> dict[str, float]:
    """Seconds from FFCV's Loader to its first batch: ``without_fixes_s``, ``cold_s`` and ``next_process_s``."""
    return _record()["compile"]


def best_workers(key: str) -> tuple[str, dict[str, Any]]:
    """A way's name with the number of workers that is best for it, and what was measured with so many."""
    way = _record()["ways"][key]
    workers = max(way["by_workers"], key=lambda n: way["by_workers"][n]["images_per_s"])
    return f"{way['name']}, {workers}", way["by_workers"][workers]


def rates(*keys: str) -> dict[str, float]:
    """Images/s of ways to load, each with its best number of workers: median over the rounds."""
    return {name: row["images_per_s"] for name, row in map(best_workers, keys)}


def gain(key: str, base: str = "dataloader", workers: int | None = None) -> tuple[float, float, float]:
    """How many times as fast as `base` a way was within the same round: median, lowest and highest of all rounds.

    Both with so many ``workers``, or each with the best number.
    """
    ways, found = _record()["ways"], []
    for name in (key, base):
        found.append(ways[name]["by_workers"][str(workers)] if workers else best_workers(name)[1])
    one, other = (row["rounds"] for row in found)
    times = [a / b for a, b in zip(one, other, strict=True)]
    return median(times), min(times), max(times)


def core_times(*keys: str) -> dict[str, float]:
    """Milliseconds of a core that an image takes in ways to load, which keep all cores at work."""
    ways, cores = _record()["ways"], _record()["machine"]["cores"]
    return {ways[key]["name"]: 1e3 * cores / best_workers(key)[1]["images_per_s"] for key in keys}


def bars(keys: Sequence[str]) -> Figure:
    """Draw images/s of ways to load, and how many times as fast as the first each is; FFCV has a colour of its own."""
    from course_utils.draw.bars import loader_bars

    found, record = rates(*keys), _record()
    times = dict(zip(found, (gain(key, keys[0])[0] for key in keys), strict=True))
    marked = [name for name in found if name.startswith("FFCV")]
    measured = f"{record['images']['count']:,} images, {record['machine']['cores']} cores"
    title = f"recorded: {measured}; behind each name the best number of workers"
    return loader_bars(found, title, next(iter(found)), strong=marked, times=times, unit="images/s")
