"""All-reduces on emulated links, one after the other: how long each one takes, and how that feels in slow motion."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from course_utils.ranks import launch

AllReduce = Callable[[torch.Tensor], None]  #: in place, made of messages between two ranks


def _on_rank(all_reduces: Mapping[str, AllReduce], topology, sizes: Sequence[int], slowdown: float) -> dict:
    from . import emulate

    seconds = {}
    for name, all_reduce in all_reduces.items():
        for size in sizes:
            x = torch.ones(size // 4)
            with emulate(topology) as clock:
                all_reduce(x)
            time.sleep(slowdown * clock.seconds)
            assert not len(x) or x[0] == dist.get_world_size(), f"{name}: the sum is wrong"
            seconds[name, size] = clock.seconds
    return seconds


def _slowest(all_reduces: Mapping[str, AllReduce], topology, sizes: Sequence[int], slowdown: float = 0.0) -> dict:
    """Emulated seconds of the slowest rank, by name and size; a rank for each GPU."""
    ranks = len(topology.gpus)
    by_rank = launch(_on_rank, dict(all_reduces), topology, list(sizes), slowdown, world_size=ranks, backend="gloo")
    return {key: max(rank[key] for rank in by_rank) for key in by_rank[0]}


def emulated_seconds(
    all_reduces: Mapping[str, AllReduce], topology, sizes: Sequence[int]
) -> dict[str, list[float]]:
    """Run all-reduces on real ranks, one for each GPU of `topology`, and return what each takes on its links.

    They are named functions of a float32 tensor on the CPU, which they sum in place by messages between two ranks;
    `sizes` are its bytes, multiples of 4. By name, the emulated seconds of the slowest rank at each size.
    """
    found = _slowest(all_reduces, topology, sizes)
    return {name: [found[name, size] for size in sizes] for name in all_reduces}


def slow_motion(all_reduces: Mapping[str, AllReduce], topology, size: int, slowdown: float) -> None:
    """Run each all-reduce of `size` bytes, let `slowdown` times its emulated time pass, and print both."""
    for name, all_reduce in all_reduces.items():
        start = time.monotonic()
        found = _slowest({name: all_reduce}, topology, [size], slowdown)
        waited = time.monotonic() - start
        print(f"{name:13}{found[name, size] * 1e6:6.1f} µs emulated; you waited {waited:.1f} s", flush=True)
