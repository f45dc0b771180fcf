"""The solutions of the exercises of lesson 15; what stands between the marks is what a learner writes."""

import io

import numpy as np
import torch.distributed as dist

from lessons.ffcv_data_loading.jobs import STAGES, Job


def read_header(file: io.RawIOBase) -> dict:
    """What a `.beton` file says, wherever it was read last; ValueError if its version is not 2.

    Returns
    -------
    dict
        version, page_size (bytes), samples, table (bytes from the beginning): int;
        fields: list of (name, type), a str and an int, in the order of the file.
    """
    ### BEGIN SOLUTION
    file.seek(0)
    head = file.read(24)
    version, fields = np.frombuffer(head, "<u2", 2).tolist()
    (page_size,) = np.frombuffer(head, "<u4", 1, offset=4).tolist()
    samples, table = np.frombuffer(head, "<u8", 2, offset=8).tolist()
    if version != 2:
        raise ValueError(f"version 2 is wanted, and this is version {version}")
    descriptor = np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")])
    rows = np.frombuffer(file.read(fields * descriptor.itemsize), descriptor)
    names = [(row["name"].decode(), int(row["type"])) for row in rows]
    return dict(
        version=version, page_size=page_size, samples=samples, table=table, fields=names
    )
    ### END SOLUTION


def read_sample(file: io.RawIOBase, index: int) -> tuple[np.ndarray, int]:
    """The image (height, width, 3) in uint8 and the label of sample `index`."""
    ### BEGIN SOLUTION
    header = read_header(file)
    image = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("pointer", "<u8")])
    kinds = {0: np.dtype("<f8"), 1: np.dtype("<i8"), 2: image}
    types = [kind for _, kind in header["fields"]]
    row = np.dtype([(f"type {kind}", kinds[kind]) for kind in types], align=True)
    file.seek(24 + 1041 * len(types) + row.itemsize * index)
    sample = np.frombuffer(file.read(row.itemsize), row)[0]
    place = sample["type 2"]
    shape = int(place["height"]), int(place["width"]), 3
    file.seek(int(place["pointer"]))
    pixels = np.frombuffer(file.read(shape[0] * shape[1] * 3), np.uint8)
    return pixels.reshape(shape), int(sample["type 1"])
    ### END SOLUTION


def quasi_random(pages: np.ndarray, cap: int, ahead: int, seed: int) -> np.ndarray:
    """The numbers of all samples in the order of reading; `pages` has the page of each."""
    ### BEGIN SOLUTION
    for window in range(cap, 0, -1):
        rng = np.random.default_rng(seed)
        waiting = [rng.permutation(np.flatnonzero(pages == page)) for page in np.unique(pages)]
        rng.shuffle(waiting := [samples.tolist() for samples in waiting])
        order, opened = [], []
        while waiting or opened:
            while waiting and len(opened) < window:
                opened.append(waiting.pop())
            k = rng.integers(len(opened))
            order.append(opened[k].pop())
            if not opened[k]:
                del opened[k]

        read, steps = pages[order], np.arange(len(pages))
        spans = [np.flatnonzero(read == page)[[0, -1]] for page in np.unique(pages)]
        in_memory = sum((first - ahead <= steps) & (steps <= last) for first, last in spans)
        if in_memory.max() <= cap:
            return np.array(order)
    ### END SOLUTION


def find_bottleneck(job: Job) -> tuple[str, float]:
    """The bottleneck, one of STAGES, and the per cent of its time that the loop waits."""

    ### BEGIN SOLUTION
    def measure(job, skip=20, count=100):
        batches, waited, begin = job.batches(skip + count), 0.0, 0.0
        for n in range(skip + count):
            start = job.clock()
            batch = next(batches)
            if n == skip:
                waited, begin = 0.0, start
            waited += job.clock() - start
            job.step(batch)
        seconds = job.clock() - begin
        return seconds, 100 * waited / seconds

    stage = min(STAGES, key=lambda stage: measure(job.halved(stage))[0])
    return stage, measure(job)[1]
    ### END SOLUTION


def shard(count: int, batch: int, epoch: int, seed: int) -> list[list[int]]:
    """This rank's batches, each with 1 to `batch` of the numbers from 0 to count - 1."""
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    order = np.random.default_rng((seed, epoch)).permutation(count)
    steps = -(-count // (batch * n))  # rounded up
    parts = np.array_split(order, steps * n)
    return [part.tolist() for part in parts[rank::n]]
    ### END SOLUTION


def text_rows(
    lengths: list[int], length: int, batch: int, step: int, rank: int, ranks: int, seed: int
) -> list[list[tuple[int, int, int]]]:
    """This rank's rows of a step, each a list of pieces (document, first token, end).

    `lengths` are the tokens of each document, `length` those of a row, `batch` the rows in a step.
    """
    ### BEGIN SOLUTION
    ends = np.cumsum(lengths)
    starts = ends - lengths
    rows, share = int(ends[-1]) // length, batch // ranks
    own = range(step * batch + rank * share, step * batch + (rank + 1) * share)
    found = []
    for number in own:
        epoch, place = divmod(number, rows)
        begin = int(np.random.default_rng([seed, epoch]).permutation(rows)[place]) * length
        pieces = []
        for document, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            first, last = max(start, begin), min(end, begin + length)
            if first < last:
                pieces.append((document, first - start, last - start))
        found.append(pieces)
    return found
    ### END SOLUTION


def imagenet_epoch(
    images: int, gigabytes: float, memory: float, disk: float, cpu: float, gpu: float
) -> tuple[float, float, str]:
    """Seconds of the first epoch, seconds of a later one, and what sets the later ones' pace.

    Parameters
    ----------
    gigabytes, memory : float
        Size of the file, and memory that is free for it, in GB.
    disk : float
        GB/s.
    cpu, gpu : float
        Images/s that the CPU loads from memory, and that all GPUs together train on.

    Returns
    -------
    tuple
        Two numbers, and "disk", "cpu" or "gpu".
    """
    ### BEGIN SOLUTION
    rates = {"disk": images * disk / gigabytes, "cpu": cpu, "gpu": gpu}
    later = rates if gigabytes > memory else {"cpu": cpu, "gpu": gpu}
    return images / min(rates.values()), images / min(later.values()), min(later, key=later.get)
    ### END SOLUTION
