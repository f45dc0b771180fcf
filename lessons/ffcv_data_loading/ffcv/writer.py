"""FFCV's writer with an eye on its processes (why: see `fixes`)."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable

import torch


def write(self, num_samples: int, queue_content, work_fn: Callable, extra_worker_args: tuple) -> None:
    """Stand in for ``DatasetWriter._write_common``: the same processes and file, but each process is watched."""
    from ffcv.memory_allocator import MemoryAllocator

    if num_samples < 1:
        raise ValueError("there are no samples to write")
    self.num_samples = num_samples
    self.prepare()
    todo, allocations, failures = (multiprocessing.Queue() for _ in range(3))
    for item in [*queue_content, *[None] * self.num_workers]:
        todo.put(item)
    if work_fn.__name__ == "worker_job_indexed_dataset":
        extra_worker_args = (_Watched(extra_worker_args[0]), *extra_worker_args[1:])
    allocator = MemoryAllocator(self.fname, self.data_region_start, self.page_size)
    done = multiprocessing.Value(ctypes.c_uint64, 0)
    job = (todo, self.metadata_sm, self.metadata_type, self.fields, allocator, done, allocations, *extra_worker_args)
    workers = [
        multiprocessing.Process(target=_write_some, args=(failures, work_fn, job)) for _ in range(self.num_workers)
    ]
    found = []
    try:
        for worker in workers:
            worker.start()
        while len(found) < len(workers):
            ended = [worker.exitcode for worker in workers if worker.exitcode]  # looked at before the queues
            with contextlib.suppress(queue.Empty):
                found.append(allocations.get(timeout=0.05))
                continue
            if ended:
                raise RuntimeError(_why_writing_failed(ended[0], failures))
        self.finalize([entry for part in found for entry in part])
    except BaseException:
        for worker in workers:
            if worker.pid:
                worker.kill()
                worker.join()
        todo.cancel_join_thread()  # what nobody will read any more must not hold up the end of Python
        with contextlib.suppress(OSError):
            os.unlink(self.fname)
        raise
    finally:
        self.metadata_sm.close()
        self.metadata_sm.unlink()


def _write_some(failures: multiprocessing.Queue, work: Callable, job: tuple) -> None:
    """Run in a process of the writer: FFCV's own function, and on its failure the reason to the parent."""
    torch.set_num_threads(1)  # after a fork the threads of torch's parent are not there, and waiting for them hangs
    try:
        work(*job)
    except BaseException as error:
        watched = next((part for part in job if isinstance(part, _Watched)), None)
        where = "" if watched is None else f"sample {watched.index}: "
        failures.put((where + _in_words(error), traceback.format_exc()))
        failures.close()
        failures.join_thread()
        os._exit(1)


class _Watched:
    """A data set that remembers which sample was asked for last."""

    def __init__(self, dataset) -> None:
        self.dataset, self.index = dataset, None

    def __getitem__(self, index):
        self.index = int(index)
        return self.dataset[index]


def _in_words(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or "Tried allocating" in str(error):
        return text + " (a sample must fit in one page: DatasetWriter(page_size=...), a power of 2)"
    if isinstance(error, IndexError) and "tuple index" in str(error):
        return text + " (an image must have 3 channels: image.convert('RGB'))"
    return text


def _why_writing_failed(exitcode: int, failures: multiprocessing.Queue) -> str:
    with contextlib.suppress(queue.Empty):
        reason, trace = failures.get(timeout=1)
        return f"writing failed at {reason}\n\nIn the writer's process:\n{trace}"
    how = f"was killed by signal {-exitcode}" if exitcode < 0 else f"ended with exit code {exitcode}"
    return f"writing failed: a process of the writer {how}" + (" (no memory left?)" if exitcode == -9 else "")
