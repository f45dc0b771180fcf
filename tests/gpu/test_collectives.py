"""Collectives, on ranks that torch alone starts."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from .kit import RankError, Setting, measured, own_device, run_ranks

_COUNT = 1000  # float32 numbers of a rank
_WARM_UP, _CALLS = 5, 20


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """What all ranks hold, (N, N x count), on the CPU, and what this one holds: whole numbers, for exact sums."""
    n, rank = dist.get_world_size(), dist.get_rank()
    everyone = torch.stack([torch.arange(n * _COUNT) % 97 + 100 * r for r in range(n)]).float()
    return everyone, everyone[rank].to(own_device())


def _each_collective() -> list[str]:
    """Run each collective once and return the names of those with wrong results."""
    n, rank = dist.get_world_size(), dist.get_rank()
    everyone, mine = _inputs()
    part, found = slice(rank * _COUNT, (rank + 1) * _COUNT), {}
    dist.all_reduce(total := mine.clone())
    found["all_reduce"] = total, everyone.sum(0)
    dist.all_gather_into_tensor(gathered := mine.new_empty(n * n * _COUNT), mine)
    found["all_gather"] = gathered, everyone.flatten()
    dist.reduce_scatter_tensor(share := mine.new_empty(_COUNT), mine)
    found["reduce_scatter"] = share, everyone.sum(0)[part]
    dist.broadcast(last := mine.clone(), src=n - 1)
    found["broadcast"] = last, everyone[n - 1]
    dist.reduce(at_root := mine.clone(), dst=0, op=dist.ReduceOp.MAX)
    found["reduce"] = (at_root, everyone.amax(0)) if rank == 0 else (mine, everyone[rank])
    dist.all_to_all_single(swapped := torch.empty_like(mine), mine)
    found["all_to_all"] = swapped, everyone[:, part].flatten()
    if n > 1:
        came = torch.empty_like(mine)
        pair = [dist.P2POp(dist.isend, mine, (rank + 1) % n), dist.P2POp(dist.irecv, came, (rank - 1) % n)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        found["send, recv"] = came, everyone[rank - 1]
    dist.barrier()
    return [name for name, (got, wanted) in found.items() if not torch.equal(got.cpu(), wanted)]


def _results_and_times(sizes: list[int]) -> tuple[list[str], list[float]]:
    wrong = _each_collective()
    return wrong, [] if wrong else _times(sizes)


def _times(sizes: list[int]) -> list[float]:
    """Seconds of one all-reduce at each size in bytes: the mean of `_CALLS` in a row, after some that do not count."""
    device, found = own_device(), []
    for size in sizes:
        x = torch.zeros(size // 4, device=device)
        for _ in range(_WARM_UP):
            dist.all_reduce(x)
        dist.barrier()
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
        start = time.perf_counter()
        for _ in range(_CALLS):
            dist.all_reduce(x)
        if device.type == "cuda":
            end.record()
            torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 1e3 if device.type == "cuda" else time.perf_counter() - start
        found.append(seconds / _CALLS)
    return found


@pytest.mark.limit(90)
def test_collectives(setting: Setting, facts: dict):
    """Results of all, and the time of all-reduce from 1 KiB on."""
    n = setting.ranks
    sizes = [2**k for k in range(10, setting.choose(29, 15), 2)]
    found = run_ranks(_results_and_times, sizes, ranks=n, backend=setting.backend, timeout=setting.choose(80, 240))
    wrong = sorted({name for names, _ in found for name in names})
    assert not wrong, f"wrong results: {', '.join(wrong)}"
    seconds = found[0][1]
    how = (
        f"mean of {_CALLS} all-reduces of float32 in a row on rank 0 of {n}, after {_WARM_UP} that do not count; "
        + setting.clock
    )
    facts |= {"backend": setting.backend, "ranks": n, "all_reduce": measured(seconds, "s", how, sizes, "bytes")}
    if n > 1:
        rates = [2 * (n - 1) / n * size / t / 1e9 for size, t in zip(sizes, seconds, strict=True)]
        how = f"bus bandwidth, 2 (N - 1) / N x bytes / seconds, of all_reduce above, N = {n}"
        facts["busbw"] = measured(rates, "GB/s", how, sizes, "bytes")


def _recorded() -> tuple[list[tuple[str, int]], list[str], int]:
    """Operations with their bytes; operations under way behind long products, and how many are left after them."""
    from course_utils.ranks import interceptor, record

    n = dist.get_world_size()
    _, mine = _inputs()
    with record() as seen:
        dist.all_reduce(mine.clone())
        dist.all_gather_into_tensor(mine.new_empty(n * n * _COUNT), mine)
        dist.reduce_scatter_tensor(mine.new_empty(_COUNT), mine)
        dist.broadcast(mine.clone(), src=0)
        dist.all_to_all_single(torch.empty_like(mine), mine)
        dist.barrier()
    busy = torch.ones(8192 if mine.is_cuda else 8, device=mine.device).repeat(8192 if mine.is_cuda else 8, 1)
    for _ in range(20):
        torch.mm(busy, busy)
    dist.all_reduce(mine)
    under_way = [entry.op for entry in interceptor.unfinished()]
    torch.cuda.synchronize() if mine.is_cuda else None
    return [(entry.op, entry.bytes) for entry in seen], under_way, len(interceptor.unfinished())


@pytest.mark.limit(60)
def test_ledger(setting: Setting, facts: dict):
    """The entries of rank 0; the same on all."""
    n = setting.ranks
    found = run_ranks(_recorded, ranks=n, backend=setting.backend, timeout=setting.choose(50, 150))
    size = 4 * n * _COUNT
    wanted = [("all_reduce", size), ("all_gather", n * size), ("reduce_scatter", size), ("broadcast", size),
              ("all_to_all", size), ("barrier", 0)]
    entries, under_way, left = found[0]
    facts |= {"operations": [{"op": op, "bytes": count} for op, count in entries], "under_way": under_way}
    assert all([*map(tuple, seen)] == wanted for seen, _, _ in found), f"the ledger has {entries}, expected {wanted}"
    assert left == 0 and (not setting.on_gpu or "all_reduce" in under_way), f"{left} operations are left of {under_way}"


def _one_all_reduce() -> float:
    x = torch.ones(1, device=own_device())
    dist.all_reduce(x)
    return x.item()


@pytest.mark.limit(60)
def test_two_ranks_one_gpu(setting: Setting, facts: dict):
    """What NCCL says; it is asked by two processes that both take GPU 0."""
    setting.need_gpu("it is NCCL that refuses")
    os.environ["NCCL_DEBUG"] = "WARN"
    try:
        sums = run_ranks(_one_all_reduce, ranks=2, backend="nccl", timeout=45, one_gpu=True)
    except RankError as error:
        facts |= {"refused": True, "message": str(error)[:700]}
    else:
        facts |= {"refused": False, "sums": sums}
    assert facts["refused"], "two ranks on one GPU are not refused"
