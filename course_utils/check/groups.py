"""Process groups that the ranks of an exercise make: all of them in the same order, or an error instead of chance."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

#: What the error says when ranks ask for different groups.
DIFFERENT = "new_group was called for different groups"


class GroupsInStep:
    """Inside its ``with`` block `new_group` raises where ranks ask for different groups.

    Without it gloo sometimes waits, and sometimes connects ranks of different groups, which then add up wrong numbers.

    Attributes
    ----------
    made : list
        Of each call of `new_group`, the ranks asked for in ascending order, or None for all.
    """

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        self.made: list[list[int] | None] = []
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
        self.made.append(None if ranks is None else sorted(int(rank) for rank in ranks))
        if not kwargs.get("use_local_synchronization"):
            self.together(f"call {len(self.made)} for {self.made[-1]}")
        return self._new_group(ranks, *args, **kwargs)

    def together(self, step: str, what: Any = None) -> list[Any]:
        """What the ranks bring to a step, by rank: anything that JSON holds.

        It goes through the store of the default group, so that the ledger has no entry of it.

        Raises
        ------
        RuntimeError
            The ranks are at different steps.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        self._steps += 1
        store.set(f"checks/{self._steps}/{dist.get_rank()}", json.dumps((step, what)))
        everyone = [json.loads(store.get(f"checks/{self._steps}/{rank}")) for rank in range(dist.get_world_size())]
        if len({theirs for theirs, _ in everyone}) > 1:
            wishes = ", ".join(f"rank {rank}: {theirs}" for rank, (theirs, _) in enumerate(everyone))
            raise RuntimeError(f"{DIFFERENT} ({wishes})")
        return [theirs for _, theirs in everyone]
