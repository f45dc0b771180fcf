"""How fast a data loader is and who waits for whom: samples a second, waiting, busy cores, core time of each part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .crops import crop_box as crop_box


class Speed(NamedTuple):
    """What an epoch of a loader is like."""

    rate: float  # samples a second
    waits: float  # share of the time for which the loop waited for its next batch
    busy: float  # cores that this process and its child processes kept at work, on average
    core_ms: float  # milliseconds of a core that they took for each sample


def processes() -> dict[int, float]:
    """The child processes of this one: for each PID the seconds that it has computed so far."""
    found = {}
    for child in psutil.Process().children():
        try:
            found[child.pid] = sum(child.cpu_times()[:2])
        except psutil.Error:  # it has ended
            continue
    return found


def measure(loader: Iterable, step: Callable[..., object] | None = None, epochs: int = 2) -> Speed:
    """Go through a loader for some epochs, with ``step(*batch)`` for each batch, and describe the fastest.

    The first epoch starts workers or compiles, so take two at least. Time to start the workers counts as waiting.
    Workers that end with the epoch do not count in `busy`: make them persistent.
    """
    return max((_epoch(loader, step) for _ in range(epochs)), key=lambda speed: speed.rate)


def _epoch(loader: Iterable, step: Callable[..., object] | None) -> Speed:
    before, own, start = processes(), time.process_time(), time.perf_counter()
    asked, waited, seen = start, 0.0, 0
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        seen += len(batch[0])
        if step:
            step(*batch)
        asked = time.perf_counter()
    seconds = time.perf_counter() - start
    used = time.process_time() - own + sum(t - before.get(pid, 0.0) for pid, t in processes().items())
    if not seen:
        raise ValueError("the loader gave no batch")
    return Speed(seen / seconds, waited / seconds, used / seconds, 1e3 * used / seen)


def core_ms(function: Callable[[Any], object], items: Sequence) -> float:
    """Milliseconds of a core that a function takes for each item, in the faster of two rounds."""
    times = []
    for _ in range(2):
        start = time.process_time()
        for item in items:
            function(item)
        times.append(time.process_time() - start)
    return 1e3 * min(times) / len(items)


def costs_of_parts(
    parts: Mapping[str, Callable[[Any], object]], samples: Sequence, batch: int = 64
) -> dict[str, float]:
    """Seconds of a core that a sample takes in each part of a pipeline, of which the last one gets a whole batch."""
    *single, whole = parts
    found = []
    for _ in range(3):  # the first fills the page cache
        times = dict.fromkeys(parts, 0.0)
        for first in range(0, len(samples), batch):
            items = samples[first : first + batch]
            for name in single:
                start = time.process_time()
                items = [parts[name](item) for item in items]
                times[name] += time.process_time() - start
            start = time.process_time()
            parts[whole](items)
            times[whole] += time.process_time() - start
        found.append({name: seconds / len(samples) for name, seconds in times.items()})
    return min(found[1:], key=lambda times: sum(times.values()))


def emulated_step(rate: float) -> Callable[..., None]:
    """A training step that only waits, for as long as a GPU of so many samples a second would take."""
    return lambda samples, *_: time.sleep(len(samples) / rate)


def training_step(model: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """A training step on the model's GPU, which returns when the GPU has finished."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    device = next(model.parameters()).device

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        image_loss(model, images.to(device), labels.to(device)).backward()
        optimizer.step()
        torch.cuda.synchronize(device)

    return step


def convnet(classes: int = 10) -> nn.Sequential:
    """A small network: images (B, 3, H, W) as float32 to logits (B, classes)."""
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 32, 4), (32, 64, 2), (64, 128, 2)):
        layers += [nn.Conv2d(before, after, 5, stride), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of images, uint8 (B, 3, H, W), which become floats where the model is."""
    return nn.functional.cross_entropy(model(images.float() / 255), labels)


class SlowReads(Dataset):
    """A data set whose every read waits for a while, as for a disk or the network, and needs no core for it."""

    def __init__(self, data: Dataset, seconds: float) -> None:
        self.data, self.seconds = data, seconds

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.data[index]


class SlowStore:
    """A folder as an object store: each request waits, and then gets its bytes at a bandwidth.

    `requests`, `bytes` and `seconds` are what it has answered so far, and how long that took.
    """

    def __init__(self, folder: str | os.PathLike, wait: float, bandwidth: float) -> None:
        self.folder, self.wait, self.bandwidth = Path(folder), wait, bandwidth
        self.requests, self.bytes, self.seconds = 0, 0, 0.0

    def read(self, name: str | os.PathLike) -> bytes:
        """The bytes of a file, after `wait` seconds and its size divided by `bandwidth` (bytes/s)."""
        start = time.perf_counter()
        data = (self.folder / name).read_bytes()
        time.sleep(self.wait + len(data) / self.bandwidth)
        self.requests, self.bytes = self.requests + 1, self.bytes + len(data)
        self.seconds += time.perf_counter() - start
        return data
