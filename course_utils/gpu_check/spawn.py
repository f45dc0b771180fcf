"""Run a function on ranks with nothing but torch: processes that meet in a file."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

__all__ = ["RankError", "run_ranks"]


class RankError(RuntimeError):
    """A rank failed; the message says which and why."""


def run_ranks(
    fn: Callable[..., Any], *args: Any, ranks: int, backend: str, timeout: float = 60.0, one_gpu: bool = False
) -> list[Any]:
    """Run ``fn(*args)`` on ranks of a default process group; return the results by rank.

    Parameters
    ----------
    fn : callable
        A function of a module, whose results are numbers, texts, lists and dictionaries.
    ranks : int
    backend : {"gloo", "nccl"}
        With NCCL rank r uses GPU r, or all use GPU 0 with `one_gpu`.
    timeout : float
        Seconds until the ranks are stopped.

    Raises
    ------
    RankError
        A rank raised something, died, or the time was over.

    Notes
    -----
    On the CPU ranks are forked, so call it before this process computes gradients.
    """
    context = multiprocessing.get_context("spawn" if backend == "nccl" else "fork")  # who has used CUDA cannot fork
    results = context.Queue()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        given = (fn, args, ranks, backend, os.path.join(folder, "store"), timeout, one_gpu, results)
        processes = [context.Process(target=_rank, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            return _collect(processes, results, time.monotonic() + timeout, timeout)
        finally:
            for process in processes:
                process.join(5) if process.exitcode is None else None
                process.kill()
                process.join()


def _collect(processes: list, results: Any, end: float, timeout: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(processes):
        gone = [r for r, p in enumerate(processes) if p.exitcode is not None and r not in found]
        try:
            rank, error, value = results.get(timeout=0.5)
        except queue.Empty:
            if gone:
                raise RankError(f"rank {gone[0]} ended with exit code {processes[gone[0]].exitcode}") from None
            if time.monotonic() > end:
                missing = [rank for rank in range(len(processes)) if rank not in found]
                raise RankError(f"no result of ranks {missing} after {timeout:.0f} s") from None
            continue
        if error:
            for process in processes:  # the others may wait for it
                process.kill()
            raise RankError(f"rank {rank}: {error}")
        found[rank] = value
    return [found[rank] for rank in range(len(processes))]


def _rank(
    rank: int, fn: Callable[..., Any], args: tuple, ranks: int, backend: str, store: str, timeout: float,
    one_gpu: bool, results: Any,
) -> None:
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        device = None
        if backend == "nccl":
            device = torch.device("cuda", 0 if one_gpu else rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=ranks, device_id=device,
            timeout=timedelta(seconds=timeout),
        )
        results.put((rank, "", fn(*args)))
        dist.destroy_process_group()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        results.put((rank, f"{type(error).__name__}: {' | '.join(lines[:6])[:700]}", None))
        results.close()
        results.join_thread()  # the message is on its way
        os._exit(1)  # a group that failed may wait for ever when it is destroyed
