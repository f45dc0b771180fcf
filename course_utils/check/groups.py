"""Process groups that the ranks of an exercise make: all of them in the same order, or an error instead of chance."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

#: What the error says when ranks ask for different groups.
DIFFERENT = "new_group was called for different groups"


class GroupsInStep:
    """Inside its ``with`` block `new_group` raises where ranks ask for different groups.

    Without it gloo sometimes waits, and sometimes connects ranks of different groups, which then add up wrong numbers.
    """

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        self._steps, self._new_group = 0, c10d.new_group
        self._patches = [patch.object(module, "new_group", self._in_step) for module in (dist, c10d)]

    def __enter__(self) -> GroupsInStep:
        for one in self._patches:
            one.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for one in self._patches:
            one.stop()

    def _in_step(self, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A group that all ranks ask for; they compare through the store, so that the ledger has no entry of it."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        if not kwargs.get("use_local_synchronization"):
            store, wish = _get_default_store(), None if ranks is None else sorted(int(rank) for rank in ranks)
            self._steps += 1
            store.set(f"checks/{self._steps}/{dist.get_rank()}", f"call {self._steps} for {wish}")
            wishes = [store.get(f"checks/{self._steps}/{r}").decode() for r in range(dist.get_world_size())]
            if len({*wishes}) > 1:
                told = ", ".join(f"rank {rank}: {wish}" for rank, wish in enumerate(wishes))
                raise RuntimeError(f"{DIFFERENT} ({told})")
        return self._new_group(ranks, *args, **kwargs)
