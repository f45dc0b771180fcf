"""FFCV's writer with an eye on its processes (why: see `fixes`)."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import multiprocessing
import os
import queue
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

_job: tuple[Callable, multiprocessing.Queue, tuple, Any, Any, tuple]  # of a process of the writer


def write(self, num_samples: int, queue_content, work_fn: Callable, extra_worker_args: tuple) -> None:
    """Stand in for ``DatasetWriter._write_common``: the same processes and file, but the first failure ends all."""
    from ffcv.memory_allocator import MemoryAllocator

    if num_samples < 1:
        raise ValueError("there are no samples to write")
    self.num_samples = num_samples
    self.prepare()
    context, todo = multiprocessing.get_context("fork"), multiprocessing.Queue()
    for item in [*queue_content, *[None] * self.num_workers]:
        todo.put(item)
    allocator = MemoryAllocator(self.fname, self.data_region_start, self.page_size)
    done, shared = context.Value(ctypes.c_uint64, 0), (self.metadata_sm, self.metadata_type, self.fields)
    if work_fn.__name__ == "worker_job_indexed_dataset":
        extra_worker_args = (_Watched(extra_worker_args[0]), *extra_worker_args[1:])
    job = work_fn, todo, shared, allocator, done, extra_worker_args
    try:
        with ProcessPoolExecutor(self.num_workers, context, _begin, job) as pool:
            parts = [pool.submit(_write_some) for _ in range(self.num_workers)]
            try:
                self.finalize([entry for part in as_completed(parts) for entry in part.result()])
            except BaseException:
                for process in list((pool._processes or {}).values()):  # they wait for the pages of the one that failed
                    process.kill()
                raise
    except BaseException as error:
        todo.cancel_join_thread()  # what nobody will read any more must not hold up the end of Python
        with contextlib.suppress(OSError):
            os.unlink(self.fname)
        if isinstance(error, Exception):
            raise RuntimeError(f"writing failed {error}") from error
        raise
    finally:
        self.metadata_sm.close()
        self.metadata_sm.unlink()


def _begin(*job: Any) -> None:
    global _job
    _job = job
    torch.set_num_threads(1)  # after a fork the threads of torch's parent are not there, and waiting for them hangs


def _write_some() -> list:
    """Run FFCV's own function in a process of the writer; an error says at which sample."""
    work, todo, shared, allocator, done, extra = _job
    allocator, found = copy.copy(allocator), queue.SimpleQueue()  # a process may come to run two parts
    allocator.allocations = []
    try:
        work(todo, *shared, allocator, done, found, *extra)
    except Exception as error:
        where = f"at sample {extra[0].index}: " if isinstance(extra[0], _Watched) else ""
        raise RuntimeError(where + _in_words(error)) from error
    return found.get()


class _Watched:
    """A data set that remembers which sample was asked for last."""

    def __init__(self, dataset) -> None:
        self.dataset, self.index = dataset, None

    def __getitem__(self, index):
        self.index = int(index)
        return self.dataset[index]


def _in_words(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or "Tried allocating" in str(error):
        return text + " (a sample must fit in one page: DatasetWriter(page_size=...), a power of 2)"
    if isinstance(error, IndexError) and "tuple index" in str(error):
        return text + " (an image must have 3 channels: image.convert('RGB'))"
    return text
