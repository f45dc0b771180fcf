"""The course's launcher with one rank a GPU. The launcher needs packages beside torch."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .kit import Setting

_HELD = 1 << 30  # bytes that a call holds as it fails


def _sum() -> tuple[float, str, str]:
    import torch
    import torch.distributed as dist

    from course_utils import device

    total = torch.tensor([dist.get_rank() + 1.0], device=device())
    dist.all_reduce(total)
    return total.item(), str(device()), dist.get_backend()


def _fail_on_last() -> None:
    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("a fault on purpose")


def _more_groups(seconds: float) -> float:
    """Add up in a second group, which is then `seconds` old when the next call ends it."""
    import time

    import torch
    import torch.distributed as dist

    from course_utils import device

    total = torch.ones(1, device=device())
    dist.all_reduce(total, group=dist.new_group([*range(dist.get_world_size())]))
    time.sleep(seconds)
    return total.item()


def _leave_out_one() -> None:
    """Rank 0 does not come to the all-reduce."""
    import torch
    import torch.distributed as dist

    from course_utils import device

    if dist.get_rank() > 0:
        x = torch.ones(1, device=device())
        dist.all_reduce(x)
        x.item()  # under NCCL it is here that Python waits


def _misuse_gpu() -> None:
    """An index out of range, which the GPU finds and Python hears of later."""
    import torch

    from course_utils import device

    x = torch.ones(2, device=device())
    x[torch.tensor([5], device=device())].item()


def _ask_for_too_much() -> None:
    import torch

    from course_utils import device

    held = torch.ones(_HELD, dtype=torch.uint8, device=device())
    torch.empty(1 << 42, dtype=torch.uint8, device=device()).add_(held[0])


def _held() -> tuple[int, int]:
    import os

    import torch

    return torch.cuda.memory_allocated(), os.getpid()


def _keep_gpu_busy() -> None:
    """Python waits for products of matrices that take minutes, in a call that no signal ends."""
    import torch

    from course_utils import device

    x = torch.ones(16384, 16384, device=device())
    for _ in range(900):  # fewer than the launches that CUDA queues
        y = x @ x
    y[0, 0].item()


@pytest.mark.limit(100)
def test_launcher(setting: Setting, facts: dict):
    """Results, the refusal of more ranks than GPUs, an error and a hang, each followed by a call that works."""
    for package in ("cloudpickle", "numpy", "psutil"):
        pytest.importorskip(package)
    from course_utils.ranks import HangError, WorkerError, launch, shutdown

    n, backend = setting.ranks, setting.backend
    wanted = [n * (n + 1) / 2] * n
    try:
        _works(launch, setting, wanted)
        facts["devices"] = [where for _, where, _ in launch(_sum, world_size=n, backend=backend)]
        if setting.on_gpu:
            facts["too_many_ranks"] = _refusal(launch, ValueError, _sum, world_size=n + 1, backend="nccl")
            assert f"NCCL needs one GPU for each of {n + 1} ranks" in facts["too_many_ranks"]
            default = launch(_sum, world_size=n)[0][2]
            assert default == "nccl", f"with a GPU for each of {n} ranks launch took {default}"
            default = launch(_sum, world_size=n + 1)[0][2]
            assert default == "gloo", f"with too few GPUs launch took {default}"
        for age in setting.choose((0.0, 1.3, 1.6, 1.9), (0.0,)):  # a thread of NCCL's reads the store each second
            sums = launch(_more_groups, age, world_size=n, backend=backend)
            assert sums == [n] * n, "a second group adds wrongly"
            _works(launch, setting, wanted)
        facts["rank_that_fails"] = _refusal(launch, WorkerError, _fail_on_last, world_size=n, backend=backend)
        assert f"rank {n - 1}" in facts["rank_that_fails"].lower(), "the failing rank is not named"
        _works(launch, setting, wanted)
        if n > 1:
            hang = {"world_size": n, "backend": backend, "timeout": setting.choose(20, 3)}
            facts["rank_that_is_waited_for"] = _refusal(launch, HangError, _leave_out_one, **hang)
            assert "all_reduce" in facts["rank_that_is_waited_for"], "the collective is not named"
            _works(launch, setting, wanted)
        if setting.on_gpu:
            _gpu_faults(launch, setting, wanted, facts)
    except WorkerError as error:
        raise AssertionError(_plain(error)) from None
    finally:
        shutdown()


def _gpu_faults(launch: Any, setting: Setting, wanted: list[float], facts: dict[str, Any]) -> None:
    """What is said of a GPU that reports a fault, has too little memory or does not end, and whether ranks go on."""
    from course_utils.ranks import HangError, WorkerError

    nccl = {"world_size": setting.ranks, "backend": "nccl"}
    before = [pid for _, pid in launch(_held, **nccl)]
    facts["memory_that_lacks"] = _refusal(launch, WorkerError, _ask_for_too_much, **nccl)
    assert "out of memory" in facts["memory_that_lacks"], "the missing memory is not named"
    facts["bytes_held_after_it"] = [held for held, _ in launch(_held, **nccl)]
    assert max(facts["bytes_held_after_it"]) < _HELD, "tensors of the failed call are still there"
    facts["fault_of_the_gpu"] = _refusal(launch, WorkerError, _misuse_gpu, **nccl)
    assert "device-side assert" in facts["fault_of_the_gpu"], "the fault is not named"
    after = [pid for _, pid in launch(_held, **nccl)]
    assert not {*before} & {*after}, "ranks whose GPU serves them no longer are used again"
    _works(launch, setting, wanted)
    facts["gpu_without_end"] = _refusal(launch, HangError, _keep_gpu_busy, timeout=15, **nccl)
    assert "rank 0" in facts["gpu_without_end"], "the rank that waits is not named"
    _works(launch, setting, wanted)


def _works(launch: Any, setting: Setting, wanted: list[float]) -> None:
    found = launch(_sum, world_size=setting.ranks, backend=setting.backend, timeout=60)
    assert [total for total, _, _ in found] == wanted, f"sums are {found}, expected {wanted}"
    places = [setting.choose(f"cuda:{rank}", "cpu") for rank in range(setting.ranks)]
    assert [place for _, place, _ in found] == places, f"devices are {found}, expected {places}"


def _refusal(launch: Any, kind: type[Exception], *args: Any, **kwargs: Any) -> str:
    """The beginning of what is said as a call fails as it should."""
    try:
        got = launch(*args, **kwargs)
    except kind as error:
        return _plain(error)
    raise AssertionError(f"{args[0].__name__} returned {got!r}, where {kind.__name__} was expected")


def _plain(error: Exception) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[\d;]*m", "", str(error)))[:400]
