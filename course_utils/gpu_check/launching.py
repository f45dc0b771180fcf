"""A check of the course's launcher with one rank a GPU. The launcher needs packages beside torch."""

from __future__ import annotations

import re
from typing import Any

from .setting import CheckError, Setting, need


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


def _more_groups() -> float:
    import torch
    import torch.distributed as dist

    from course_utils import device

    total = torch.ones(1, device=device())
    dist.all_reduce(total, group=dist.new_group([*range(dist.get_world_size())]))
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


def launcher(setting: Setting) -> dict[str, Any]:
    """Results, the refusal of more ranks than GPUs, an error and a hang, each followed by a call that works."""
    need("launch()", "cloudpickle", "numpy", "psutil")
    from ..ranks import HangError, WorkerError, launch, shutdown

    n, backend, facts = setting.ranks, setting.backend, {}
    wanted = [n * (n + 1) / 2] * n
    try:
        _works(launch, setting, wanted)
        facts["devices"] = [where for _, where, _ in launch(_sum, world_size=n, backend=backend)]
        if setting.on == "gpu":
            facts["too_many_ranks"] = _refusal(launch, ValueError, _sum, world_size=n + 1, backend="nccl")
            default = launch(_sum, world_size=n)[0][2]
            _expect(default == "nccl", f"with a GPU for each of {n} ranks launch took {default}", facts)
            default = launch(_sum, world_size=n + 1)[0][2]
            _expect(default == "gloo", f"with too few GPUs launch took {default}", facts)
        _expect(launch(_more_groups, world_size=n, backend=backend) == [n] * n, "a second group adds wrongly", facts)
        _works(launch, setting, wanted)
        facts["rank_that_fails"] = _refusal(launch, WorkerError, _fail_on_last, world_size=n, backend=backend)
        _expect(f"rank {n - 1}" in facts["rank_that_fails"].lower(), "the failing rank is not named", facts)
        _works(launch, setting, wanted)
        if n > 1:
            hang = {"world_size": n, "backend": backend, "timeout": setting.choose(20, 3)}
            facts["rank_that_is_waited_for"] = _refusal(launch, HangError, _leave_out_one, **hang)
            _expect("all_reduce" in facts["rank_that_is_waited_for"], "the collective is not named", facts)
            _works(launch, setting, wanted)
    finally:
        shutdown()
    return facts


def _works(launch: Any, setting: Setting, wanted: list[float]) -> None:
    found = launch(_sum, world_size=setting.ranks, backend=setting.backend, timeout=60)
    _expect([total for total, _, _ in found] == wanted, f"sums are {found}, expected {wanted}", {})
    places = [setting.choose(f"cuda:{rank}", "cpu") for rank in range(setting.ranks)]
    _expect([place for _, place, _ in found] == places, f"devices are {found}, expected {places}", {})


def _refusal(launch: Any, kind: type[Exception], *args: Any, **kwargs: Any) -> str:
    """The beginning of what is said as a call fails as it should."""
    try:
        got = launch(*args, **kwargs)
    except kind as error:
        return re.sub(r"\s+", " ", re.sub(r"\x1b\[[\d;]*m", "", str(error)))[:400]
    raise CheckError(f"{args[0].__name__} returned {got!r}, where {kind.__name__} was expected")


def _expect(right: bool, otherwise: str, facts: dict[str, Any]) -> None:
    if not right:
        raise CheckError(otherwise, facts)
